"""Fixtures of the tests on the real SGLang; ``make test-sglang`` builds what they need and runs them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.findings import Finding
from hicache_obs.readers import open_trace
from hicache_obs.trace import Trace

HERE = Path(__file__).resolve().parent
NEWEST = "0.5.23"


BOOT = """
import contextlib, torch
for name in ("nms", "qnms"):
    with contextlib.suppress(RuntimeError):
        torch.library.define(f"torchvision::{name}", "(Tensor d, Tensor s, float i) -> Tensor")
"""
"""torchvision's wheel cannot load its operators beside a CPU torch; with their schemas it can be imported."""


class _Keeper(Tally):
    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []

    def on_finding(self, finding: Finding) -> None:
        super().on_finding(finding)
        self.findings.append(finding)


@dataclass(frozen=True)
class Outcome:
    """What one scenario gave: the harness's own account, and the verdict on its ring."""

    told: dict[str, Any]
    trace: Trace | None
    findings: tuple[Finding, ...]
    checked: int

    @property
    def right(self) -> bool:
        """Whether the pages ended with what their owner wrote."""
        return bool(self.told["content"] == self.told["expected"])

    @property
    def hazards(self) -> set[str]:
        return {finding.hazard.value for finding in self.findings}


@pytest.fixture(scope="session")
def sglang_folder() -> Path:
    """The folder ``make_env.sh`` made."""
    return Path(os.environ.get("HICACHE_OBS_SGLANG", HERE.parent / ".cache" / "sglang"))


@pytest.fixture(scope="session")
def environment(sglang_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., dict[str, str]]:
    """``environment(version, mode, **more)``: variables for a process that runs that release in that mode."""
    # SGLang builds an extension at its first use: two workers must not build into one folder. The lock of a run that
    # was killed while it built would be waited for without end.
    built = sglang_folder / f"built-{os.environ.get('PYTEST_XDIST_WORKER', 'alone')}"
    for lock in built.glob("*/lock"):
        lock.unlink()

    def make(version: str = NEWEST, mode: str = "observe", **more: str) -> dict[str, str]:
        places = [] if version == NEWEST else [sglang_folder / f"sglang-{version}"]
        if tuple(map(int, version.split("."))) <= (0, 5, 20):
            places.append(sglang_folder / "older")
        directory = tmp_path_factory.mktemp("rings")
        directory.chmod(0o700)
        variables = {name: value for name, value in os.environ.items() if not name.startswith("HICACHE_OBS")}
        variables |= {
            "PYTHONPATH": os.pathsep.join(map(str, places)),
            "HICACHE_OBS_DIR": str(directory),
            "HICACHE_OBS_AGENT": "off",
            "HICACHE_OBS_PROCESSES": "all",
            "HICACHE_OBS_RING_SLOTS": "4096",
            "HICACHE_OBS_ARENA_IDS": "65536",
            "HARNESS_TMP": str(directory),
            "OMP_NUM_THREADS": "1",
            "TORCH_EXTENSIONS_DIR": str(built),
        }
        if mode:
            variables["HICACHE_OBS"] = mode
        return variables | more

    return make


class Server:
    """A process that has imported one release, and forks for every run of the harness."""

    def __init__(self, variables: dict[str, str], folder: Path) -> None:
        self._folder = folder
        self._runs = 0
        plain = {name: value for name, value in variables.items() if not name.startswith("HICACHE_OBS")}
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", str(HERE / "harness.py"), "--serve"],
            env=plain,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, scenarios: Sequence[str], variables: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """The harness's scenarios with these variables."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._runs += 1
        out, err = (self._folder / f"{self._runs}.{name}" for name in ("out", "err"))
        request = {"environ": variables, "scenarios": list(scenarios), "stdout": str(out), "stderr": str(err)}
        print(json.dumps(request), file=self._process.stdin, flush=True)
        code = self._process.stdout.readline()
        assert code, "the harness's server has ended"
        return subprocess.CompletedProcess(request["scenarios"], int(code), out.read_text(), err.read_text())

    def stop(self) -> None:
        """End it: all it ran is over."""
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="session")
def harness(
    environment: Callable[..., dict[str, str]], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """``harness(scenarios, variables, version)``: a run of the harness in a process of its own."""
    servers: dict[str, Server] = {}

    def run(
        scenarios: Sequence[str], variables: dict[str, str], version: str = NEWEST
    ) -> subprocess.CompletedProcess[str]:
        if version not in servers:
            servers[version] = Server(environment(version, ""), tmp_path_factory.mktemp("server"))
        return servers[version].run(scenarios, variables)

    yield run
    for server in servers.values():
        server.stop()


@pytest.fixture(scope="session")
def outcomes(
    environment: Callable[..., dict[str, str]], harness: Callable[..., subprocess.CompletedProcess[str]]
) -> Callable[..., dict[str, Outcome]]:
    """``outcomes(scenarios, version, mode)``: runs the harness once for them and judges every ring."""

    @lru_cache
    def run(scenarios: tuple[str, ...], version: str, mode: str) -> dict[str, Outcome]:
        done = harness(scenarios, environment(version, mode), version)
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        assert len(lines) == len(scenarios), done.stderr[-4000:]
        return {told["scenario"]: judge(told) for told in lines}

    return lambda scenarios, version=NEWEST, mode="observe": run(tuple(scenarios), version, mode)


LOAD = "base+readdone+writefence+loadfence+deferred"
WRITE = "base+readdone+writeback+writefence+deferred"
COARSE = "base+coarse+writefence+loadfence+deferred"
STORAGE = "base+readdone+storage"


@pytest.fixture(scope="session")
def release(outcomes: Callable[..., dict[str, Outcome]]) -> Callable[[str], dict[str, Outcome]]:
    """``release(version)``: load-back, write-back, load-back behind the coarse barrier, storage where it can run."""

    def run(version: str) -> dict[str, Outcome]:
        names = {"load": LOAD, "write": WRITE, "coarse": COARSE}
        if version not in ("0.5.14", "0.5.18", "0.5.19"):  # other names, and queues in another order
            names["storage"] = STORAGE
        found = outcomes(list(names.values()), version)
        return {name: found[scenario] for name, scenario in names.items()}

    return run


def judge(told: dict[str, Any]) -> Outcome:
    """Read the scenario's ring and analyse it."""
    assert "error" not in told, told["error"]
    if not told.get("ring"):
        return Outcome(told, None, (), 0)
    trace = open_trace(Path(told["ring"]))
    keeper = _Keeper()
    analyzer = Analyzer(keeper)
    analyzer.feed(trace)
    analyzer.finish()
    return Outcome(told, trace, tuple(keeper.findings), analyzer.totals.lookups)


@pytest.fixture(scope="session")
def run_python(environment: Callable[..., dict[str, str]]) -> Callable[..., subprocess.CompletedProcess[str]]:
    """``run_python(code, *arguments, **environment options)``: a script in a process of its own."""

    def run(code: str, *arguments: str, variables: dict[str, str] | None = None, **options: Any) -> Any:
        command: Sequence[str] = [sys.executable, "-W", "ignore", "-c", BOOT + code, *arguments]
        chosen = environment() if variables is None else variables
        return subprocess.run(command, env=chosen, capture_output=True, text=True, timeout=300, check=False, **options)

    return run
