"""What ``hicache-obs on`` and ``hicache-obs off`` share: both set the mode byte of running processes' rings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hicache_obs.cli.status import find_rings, show
from hicache_obs.errors import TraceError
from hicache_obs.findings import ExitCode
from hicache_obs.readers.ring_header import RingInfo, set_mode
from hicache_obs.recorder.ring_directory import open_ring_directory
from hicache_obs.records import CaptureMode


def switch(
    directory: Path | None, pid: int | None, rank: int | None, choose: Callable[[RingInfo], CaptureMode]
) -> ExitCode:
    """Set the mode of every chosen ring whose process runs, and show them.

    The ring of a process that has ended is evidence and stays as it is.

    Raises:
        ConfigError: The directory is refused.
        TraceError: A ring cannot be written to.
    """
    folder = open_ring_directory(directory, create=False)
    live = [row for row in find_rings(folder, pid, rank) if row.runs]
    failed: TraceError | None = None
    for row in live:
        assert row.state is not None
        try:
            set_mode(row.path, choose(row.state.info))
        except TraceError as error:  # the others are switched all the same
            failed = error
    if failed is not None:
        raise failed
    if not live:
        click.echo(f"no running process records into {folder}")
        return ExitCode.NOTHING_CHECKED
    paths = {row.path for row in live}
    show(folder, [row for row in find_rings(folder, pid, rank) if row.path in paths])
    return ExitCode.CLEAN
