"""Reading profiler files: how long, and with how much memory; the peers in the same run.

The peers give less: ``json`` only parses, ``pandas`` only loads the columns, HTA (HolisticTraceAnalysis, if it is
installed) parses and sorts into a table. The rows that *check copies* go on to the verdict. Peak memory is that of a
fresh process that does the same once.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from hicache_obs.cli.judge import check_copies
from hicache_obs.readers import tables
from hicache_obs.readers.kineto import read_kineto
from hicache_obs.readers.nsys import read_nsys

HERE = Path(__file__).parent
ROWS = int(os.environ.get("HICACHE_OBS_BENCH_ROWS", "2000000"))
TRACE_BYTES = 54_000_000
REAL = "hta_v100_perf_54MB.json.gz"
PEAK = "{code}; print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
WRITERS = "import sys; sys.path.insert(0, {here!r}); import profiles; from pathlib import Path; profiles.{call}"
READ = "from hicache_obs.readers.{module} import {name}; {name}({path!r})"


def needs(package: str) -> pytest.MarkDecorator:
    """Skips a row whose peer is not installed."""
    absent = importlib.util.find_spec(package) is None
    return pytest.mark.skipif(absent, reason=f"tool: {package} is not installed")


def _made(folder: Path, name: str, call: str) -> Path:
    path = folder / name
    code = WRITERS.format(here=str(HERE), call=call.format(path=f"Path({str(path)!r})"))
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)
    return path


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated trace of torch.profiler."""
    return _made(tmp_path_factory.mktemp("kineto"), "trace.json", f"write_trace({{path}}, {TRACE_BYTES})")


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recorded one, unpacked; or a skip."""
    packed = HERE.parent.parent / "shared" / "traces" / "kineto" / REAL
    if not packed.is_file():
        pytest.skip("shared data: no recorded trace beside this checkout")
    path = tmp_path_factory.mktemp("kineto") / "trace.json"
    with path.open("wb") as file:
        subprocess.run(["gzip", "-dc", packed], stdout=file, check=True, timeout=60)
    return path


@pytest.fixture(scope="module")
def export(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A generated export of Nsight Systems."""
    return _made(tmp_path_factory.mktemp("nsys"), "export.sqlite", f"write_export({{path}}, {ROWS})")


def _peak_mb(code: str) -> int:
    """Peak memory of a fresh process, MB."""
    ended = subprocess.run(
        [sys.executable, "-c", PEAK.format(code=code)], capture_output=True, text=True, timeout=600, check=True
    )
    return int(ended.stdout) // 1024


def _measure(benchmark: BenchmarkFixture, group: str, read: Callable[[], Any], peak: str | None, size: float) -> Any:
    benchmark.group = group
    found = benchmark.pedantic(read, rounds=3, warmup_rounds=1)
    benchmark.extra_info["per second"] = round(size / benchmark.stats.stats.min, 2)
    if peak is not None:
        benchmark.extra_info["peak MB"] = _peak_mb(peak)
    return found


def _load(path: Path) -> Any:
    with path.open("rb") as file:
        return json.load(file)


@pytest.mark.parametrize("which", ["generated", "real"])
def test_kineto_ours(benchmark: BenchmarkFixture, request: pytest.FixtureRequest, which: str) -> None:
    path = request.getfixturevalue(which)
    peak = READ.format(module="kineto", name="read_kineto", path=str(path))
    group, size = f"torch.profiler trace, {which} (MB)", path.stat().st_size / 1e6
    assert len(_measure(benchmark, group, lambda: read_kineto(path), peak, size).ops) > 20_000


@pytest.mark.parametrize("which", ["generated", "real"])
def test_kineto_check_copies(benchmark: BenchmarkFixture, request: pytest.FixtureRequest, which: str) -> None:
    path = request.getfixturevalue(which)
    group, size = f"torch.profiler trace, {which} (MB)", path.stat().st_size / 1e6
    report = _measure(benchmark, group, lambda: check_copies(read_kineto(path)), None, size)
    assert report.outcome == "nothing-checked"


@pytest.mark.parametrize("which", ["generated", "real"])
def test_kineto_json(benchmark: BenchmarkFixture, request: pytest.FixtureRequest, which: str) -> None:
    path = request.getfixturevalue(which)
    group, size = f"torch.profiler trace, {which} (MB)", path.stat().st_size / 1e6
    peak = f"import json; json.load(open({str(path)!r}))"
    assert _measure(benchmark, group, lambda: _load(path), peak, size)["traceEvents"]


@needs("hta")
@pytest.mark.parametrize("which", ["generated", "real"])
def test_kineto_hta(benchmark: BenchmarkFixture, request: pytest.FixtureRequest, which: str) -> None:
    path = request.getfixturevalue(which)
    from hta.common.trace import parse_trace_file

    group, size = f"torch.profiler trace, {which} (MB)", path.stat().st_size / 1e6
    peak = f"from hta.common.trace import parse_trace_file; parse_trace_file({str(path)!r})"
    _, table, *_ = _measure(benchmark, group, lambda: parse_trace_file(str(path)), peak, size)
    assert len(table) > 1000


@pytest.mark.parametrize("fast", [True, False], ids=["adbc", "standard library"])
def test_export_ours(benchmark: BenchmarkFixture, export: Path, monkeypatch: pytest.MonkeyPatch, fast: bool) -> None:
    if fast and importlib.util.find_spec("adbc_driver_sqlite") is None:
        pytest.skip("tool: adbc_driver_sqlite is not installed")
    if not fast:
        monkeypatch.setattr(tables, "_fast_path", lambda path: None)
    peak = READ.format(module="nsys", name="read_nsys", path=str(export))
    group = "Nsight Systems export (M rows)"
    assert len(_measure(benchmark, group, lambda: read_nsys(export), peak if fast else None, ROWS / 1e6).ops) > ROWS / 5


def test_export_check_copies(benchmark: BenchmarkFixture, export: Path) -> None:
    group = "Nsight Systems export (M rows)"
    report = _measure(benchmark, group, lambda: check_copies(read_nsys(export)), None, ROWS / 1e6)
    assert report.pairs_checked > ROWS / 10


@needs("pandas")
def test_export_pandas(benchmark: BenchmarkFixture, export: Path) -> None:
    sys.path.insert(0, str(HERE))
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import profiles; profiles.read_with_pandas({str(export)!r})"
    import profiles

    group = "Nsight Systems export (M rows)"
    assert _measure(benchmark, group, lambda: profiles.read_with_pandas(export), code, ROWS / 1e6) == ROWS
