"""What ``hicache-obs on`` and ``hicache-obs off`` share: both set the mode byte of running processes' rings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from hicache_obs.cli.status import find_rings, show
from hicache_obs.errors import LayoutError, TraceError
from hicache_obs.findings import ExitCode
from hicache_obs.readers.ring_header import RingInfo, set_mode
from hicache_obs.recorder.ring_directory import open_ring_directory
from hicache_obs.records import CaptureMode


def switch(
    directory: Path | None, pid: int | None, rank: int | None, choose: Callable[[RingInfo | None], CaptureMode | None]
) -> ExitCode:
    """Set the mode of every chosen ring whose process runs, and show them.

    The ring of a process that has ended is evidence and stays as it is.

    Args:
        choose: The mode for a ring, ``None`` to leave it; asked with ``None`` for a ring of another version.

    Raises:
        ConfigError: The directory is refused.
        TraceError: A ring cannot be written to.
    """
    folder = open_ring_directory(directory, create=False)
    live = [row for row in find_rings(folder, pid, rank) if row.runs]
    failed: TraceError | None = None
    for row in live:
        mode = choose(None if row.state is None else row.state.info)
        try:
            if mode is None:
                raise LayoutError(f"{row.problem}; it stays as it is")
            set_mode(row.path, mode)
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
