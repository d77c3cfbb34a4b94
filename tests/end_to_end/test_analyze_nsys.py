"""The real Nsight Systems around the demo, then ``analyze``: with the journal of the run it gives what the live run
found, operation by operation, from the recording's times; without, it can decide nothing."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.cli import main
from hicache_obs.readers import open_trace
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.records import AnyRecord, Purpose, Times, WaitStream
from hicache_obs.testing import RecordingSink
from hicache_obs.trace import Trace

pytestmark = pytest.mark.slow

DEADLINE_S = 240
INSTALL = "apt-get install nsight-systems (Debian non-free)"
IMPORTER_FOLDERS = ["/usr/lib/nsight-systems/host-linux-x64"]
ARGUMENTS = ["--device", "threads", "--requests", "60", "--device-pages", "32"]
# nvtx 0.2.12 and newer asks the tool for an extension that nsys 2022.4 lacks, and then makes no ranges; this asks not.
SHIM = """
from nvtx._lib import lib
def make(cls, name=None):
    domain = object.__new__(cls)
    domain.handle = lib.DomainHandle(name)
    return domain
lib.Domain.__new__ = staticmethod(make)
"""


@dataclass(frozen=True)
class Recorded:
    """A recording and what the run under it left."""

    report: Path
    journal: Path
    modes: dict[str, dict[str, Any]]


def call(*command: str | Path, **options: Any) -> None:
    """Run a program; the test shows what it printed if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module", params=["nvtx 0.2.11", "newest nvtx with a shim"])
def recorded(
    request: pytest.FixtureRequest,
    require_tool: Callable[..., Path],
    nsys_alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Recorded:
    """A recording of all fence policies of the demo, in one process."""
    nsys = require_tool("nsys", install=INSTALL)
    importer = require_tool("QdstrmImporter", install=INSTALL, also=IMPORTER_FOLDERS)
    folder = tmp_path_factory.mktemp("nsys")
    first = folder / "first"
    first.mkdir()
    if request.param == "nvtx 0.2.11":
        first = request.getfixturevalue("nvtx_0_2_11")
    else:
        lib = pytest.importorskip("nvtx._lib.lib", reason="tool: this nvtx has no nvtx._lib.lib")
        if not hasattr(lib, "DomainHandle"):
            pytest.skip("tool: this nvtx has no DomainHandle for the shim")
        (first / "sitecustomize.py").write_text(SHIM)
    environment = {**os.environ, "TMPDIR": str(folder)}
    environment["PYTHONPATH"] = os.pathsep.join([str(first), os.environ.get("PYTHONPATH", "")])
    files = ["--journal", str(folder / "journal"), "--json", str(folder / "demo.json")]
    command = [sys.executable, "-m", "hicache_obs", "demo", *ARGUMENTS, *files]
    profile = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--output", str(folder / "demo")]
    with nsys_alone():
        call(nsys, "profile", *profile, *command, env=environment)
    if not (folder / "demo.nsys-rep").exists():  # Debian's nsys does not find its own importer
        call(importer, "-i", folder / "demo.qdstrm", env=environment)
    modes = json.loads((folder / "demo.json").read_text())["modes"]
    return Recorded(folder / "demo.nsys-rep", folder / "journal", {mode["fence"]: mode for mode in modes})


def written(trace: Trace, folder: Path, keep: Callable[[AnyRecord], bool]) -> Path:
    """A journal of those records of ``trace``."""
    journal = JournalWriter(folder)
    journal.write([record for record in trace if keep(record)])
    journal.close()
    return folder


def untimed(record: AnyRecord) -> bool:
    """Not a device time: those are the recording's to give."""
    return not isinstance(record, Times)


def run(capsys: pytest.CaptureFixture[str], *arguments: str | Path) -> tuple[int, Any]:
    """Exit code and JSON of a command."""
    code = main([*map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def races(report: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What a report says of every pair of operations."""
    return sorted(
        (*race["between"], race["class"], race["verdict"], race["cause"], race["pages"]) for race in report["races"]
    )


@pytest.mark.parametrize("fence", ["none", "stream", "page"])
def test_the_recording_and_the_journal_give_the_findings_of_the_live_run(
    recorded: Recorded, fence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    live_code, live = run(capsys, "check", recorded.journal / fence)
    stripped = written(open_trace(recorded.journal / fence), tmp_path / "stripped", untimed)

    code, found = run(capsys, "analyze", recorded.report, "--journal", stripped)

    assert races(found) == races(live)
    assert code == live_code == (1 if fence == "none" else 0)
    assert found["pairs_checked"] == live["pairs_checked"] >= recorded.modes[fence]["pairs_checked"] > 0
    assert found["coverage"]["timed"] == found["coverage"]["operations"] > 0
    assert found["granularity"] == "pages"
    verdicts = [race["verdict"] for race in found["races"]]
    assert verdicts.count("violation") == recorded.modes[fence]["violations"]
    assert (verdicts.count("violation") > 0) == (fence == "none")


def test_without_the_times_of_the_recording_nothing_is_a_violation(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """So the violations above are the recording's doing."""
    stripped = written(open_trace(recorded.journal / "none"), tmp_path / "stripped", untimed)

    code, found = run(capsys, "check", stripped)

    assert code == 1
    assert {race["verdict"] for race in found["races"]} == {"latent"}


def test_without_the_journal_nothing_can_be_decided(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, "analyze", recorded.report)

    assert code == 3
    assert found["outcome"] == "nothing-checked"
    assert found["races"] == []
    (annotations,) = [check for check in found["preflight"] if check["name"] == "annotations"]
    assert annotations["good"]


def test_all_journals_of_a_folder_are_judged(recorded: Recorded, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = run(capsys, "analyze", recorded.report, "--journal", recorded.journal)

    assert code == 1
    assert [report["outcome"] for report in found] == ["findings", "clean", "clean"]


def test_deleting_one_wait_from_the_journal_changes_the_verdict(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = open_trace(recorded.journal / "stream")
    fences = [r for r in trace if isinstance(r, WaitStream) and r.purpose is Purpose.LOAD_FENCE]
    needed = next(fence for fence in fences if pairs([record for record in trace if record is not fence]))
    shorter = written(trace, tmp_path / "shorter", lambda record: untimed(record) and record is not needed)

    code, found = run(capsys, "analyze", recorded.report, "--journal", shorter)

    assert code == 1
    assert {race["class"] for race in found["races"]} >= {"war_forward_restore"}
    whole = written(trace, tmp_path / "whole", untimed)
    assert run(capsys, "analyze", recorded.report, "--journal", whole)[0] == 0


def pairs(records: Sequence[AnyRecord]) -> list[Any]:
    """Findings of a trace."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return sink.findings


def test_the_journal_of_another_run_is_refused(
    recorded: Recorded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = open_trace(recorded.journal / "stream")
    last = max(record.op for record in trace)
    late = [record for record in trace if record.op > last - 2 or record.op < 0]
    other = JournalWriter(tmp_path / "other")
    other.write([_moved(record, 10 * (last + 1)) for record in late])
    other.close()

    code = main(["analyze", str(recorded.report), "--journal", str(tmp_path / "other")])

    assert code == 2
    assert "recordings of the same run" in capsys.readouterr().err


def _moved(record: AnyRecord, by: int) -> AnyRecord:
    """The record of a later operation."""
    fields = {name: getattr(record, name) for name in record.__struct_fields__}
    return type(record)(**{**fields, "op": record.op + by if record.op >= 0 else record.op})
