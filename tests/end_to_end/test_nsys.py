"""An Nsight Systems recording of the demo holds every range, with the operation id as payload."""

from __future__ import annotations

import os
import sqlite3
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, closing
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

DEADLINE_S = 120
INSTALL = "apt-get install nsight-systems (Debian non-free)"
IMPORTER_FOLDERS = ["/usr/lib/nsight-systems/host-linux-x64"]
ARGUMENTS = ["--device", "threads", "--fence", "stream", "--requests", "60", "--device-pages", "32"]
PUSH_POP, DOMAIN_CREATE = 59, 75
THREADS_OF_PROCESS = 0x1000000
"""A ``globalTid`` is the process id times this, plus the thread id; the process id's upper bits name the machine."""


def call(*command: str | Path, **options: Any) -> None:
    """Run a program; the test shows what it printed if it fails."""
    ended = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=False, **options)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.fixture(scope="module")
def recording(
    require_tool: Callable[..., Path],
    nvtx_0_2_11: Path,
    nsys_alone: Callable[[], AbstractContextManager[None]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Path:
    """SQLite export of a recording of ``hicache-obs demo``."""
    nsys = require_tool("nsys", install=INSTALL)
    importer = require_tool("QdstrmImporter", install=INSTALL, also=IMPORTER_FOLDERS)
    folder = tmp_path_factory.mktemp("nsys")
    environment = {**os.environ, "PYTHONPATH": str(nvtx_0_2_11), "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "hicache_obs", "demo", *ARGUMENTS]
    profile = ["--trace=nvtx", "--sample=none", "--cpuctxsw=none", "--output", str(folder / "demo")]
    with nsys_alone():
        call(nsys, "profile", *profile, *command, env=environment)
    if not (folder / "demo.nsys-rep").exists():  # Debian's nsys does not find its own importer
        call(importer, "-i", folder / "demo.qdstrm", env=environment)
    call(nsys, "export", "--type", "sqlite", "--output", folder / "demo.sqlite", folder / "demo.nsys-rep")
    return folder / "demo.sqlite"


@pytest.fixture(scope="module")
def ranges(recording: Path) -> list[tuple[int, int, str, int, int | None, int]]:
    """``(process, thread, message, start, end, payload)`` of the ranges in domain ``hicache``."""
    query = """
        SELECT e.globalTid / :per % :per, e.globalTid % :per, COALESCE(e.text, s.value), e.start, e.end,
               COALESCE(e.int64Value, e.uint64Value)
        FROM NVTX_EVENTS AS e
        JOIN NVTX_EVENTS AS d ON d.eventType = :domain AND d.domainId = e.domainId AND d.text = 'hicache'
        LEFT JOIN StringIds AS s ON s.id = e.textId
        WHERE e.eventType = :range
    """
    values = {"per": THREADS_OF_PROCESS, "domain": DOMAIN_CREATE, "range": PUSH_POP}
    with closing(sqlite3.connect(f"file:{recording}?mode=ro", uri=True)) as database:
        return database.execute(query, values).fetchall()


def test_every_range_of_the_engine_is_in_the_recording(
    ranges: list[Any], drive: Callable[..., Any], nvtx_0_2_11: Path
) -> None:
    """As many, of the same operations, as the injected tool counted in another run of the same command."""
    injected = drive(*ARGUMENTS, nvtx=nvtx_0_2_11)

    recorded = Counter((message, payload) for _, _, message, _, _, payload in ranges)

    assert recorded == Counter((message, payload) for _, message, payload in injected.ranges.elements())
    assert Counter(message for message, _ in recorded.elements())["copy"] == injected.total("copies") > 0


def test_every_range_has_an_end_and_an_operation_of_its_own(ranges: list[Any]) -> None:
    assert all(end is not None and end >= start for _, _, _, start, end, _ in ranges)
    # The cost run goes on counting where the check run stopped.
    assert len({payload for *_, payload in ranges}) == len(ranges)


def test_ranges_are_on_the_workers_tracks(ranges: list[Any]) -> None:
    threads = {thread for _, thread, *_ in ranges}

    assert len(threads) == 2 * 4
    assert not threads & {process for process, *_ in ranges}  # the main thread has the process's number
