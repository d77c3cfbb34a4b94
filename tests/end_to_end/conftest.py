"""What the end-to-end tests share: the command in a process of its own, and an NVTX tool under it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

HERE = Path(__file__).parent
DEADLINE_S = 120
"""For anything that takes seconds on an idle machine."""
POLL_S = 0.05

T = TypeVar("T")
Range = tuple[int, str, int]
"""Native thread id, message, payload of one closed NVTX range."""


@dataclass(frozen=True)
class Driven:
    """A command that ran under the injected tool and the driver.

    Attributes:
        runs: What the driver wrote, one entry per observed run.
        modes: The demo's JSON.
        ranges: Closed ranges, as the tool saw them.
        summary: The tool's own totals.
    """

    runs: list[dict[str, Any]]
    modes: list[dict[str, Any]]
    ranges: Counter[Range]
    summary: dict[str, Any]

    def total(self, counter: str) -> int:
        """An engine counter, summed over the runs."""
        return sum(run["engine"][counter] for run in self.runs)


Drive = Callable[..., Driven]


@pytest.fixture(scope="session")
def injection(require_tool: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The compiled NVTX tool of ``tests/recorder``."""
    compiler = require_tool("cc", install="apt-get install gcc")
    library = tmp_path_factory.mktemp("nvtx") / "injection.so"
    source = HERE.parent / "recorder" / "nvtx_injection.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=DEADLINE_S)
    return library


@pytest.fixture(scope="session")
def drive(injection: Path, tmp_path_factory: pytest.TempPathFactory) -> Drive:
    """``drive(*arguments, nvtx=FOLDER)``: ``hicache-obs demo`` under the tool; each command line runs once.

    ``nvtx`` is a folder with another nvtx than the installed one.
    """
    known: dict[tuple[object, ...], Driven] = {}

    def run(*arguments: str, nvtx: Path | None = None) -> Driven:
        key = (*arguments, nvtx)
        if key not in known:
            known[key] = _drive(injection, tmp_path_factory.mktemp("driven"), arguments, nvtx)
        return known[key]

    return run


def _drive(injection: Path, folder: Path, arguments: Sequence[str], nvtx: Path | None) -> Driven:
    environment = {
        **os.environ,
        "NVTX_INJECTION64_PATH": str(injection),
        "HICACHE_OBS_NVTX_SUMMARY": str(folder / "summary.json"),
        "HICACHE_OBS_NVTX_RANGES": str(folder / "ranges"),
        "PYTHONPATH": "" if nvtx is None else str(nvtx),
    }
    driver = [sys.executable, str(HERE / "driver.py"), str(folder / "driver.json")]
    command = [*driver, "demo", *arguments, "--json", str(folder / "demo.json")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert ended.returncode == 0, ended.stderr
    ranges = (line.split() for line in (folder / "ranges").read_text().splitlines())
    return Driven(
        json.loads((folder / "driver.json").read_text())["runs"],
        json.loads((folder / "demo.json").read_text())["modes"],
        Counter((int(thread), message, int(payload)) for thread, message, payload in ranges),
        json.loads((folder / "summary.json").read_text()),
    )


@pytest.fixture(scope="session")
def until() -> Callable[..., Any]:
    """``until(ask, accept=bool)``: the first accepted answer; at the deadline the last one, for an assertion."""

    def wait(ask: Callable[[], T], accept: Callable[[T], bool] = bool) -> T:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            answer = ask()
            if accept(answer) or time.monotonic() > deadline:
                return answer
            time.sleep(POLL_S)

    return wait
