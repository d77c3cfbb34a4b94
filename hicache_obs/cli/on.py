"""``hicache-obs on``: running processes record again."""

from __future__ import annotations

from pathlib import Path

import click

from hicache_obs.cli.mode import switch
from hicache_obs.cli.status import ring_options
from hicache_obs.readers.ring_header import RingInfo
from hicache_obs.records import CaptureMode


@click.command("on")
@ring_options
def command(directory: Path | None, pid: int | None, rank: int | None) -> int:
    """Start recording again in the running processes of this node, as they were started.

    A process that was started switched off observes. Exit code 3 if no process has a ring.
    """
    return int(switch(directory, pid, rank, _as_started))


def _as_started(info: RingInfo | None) -> CaptureMode | None:
    if info is None:
        return None  # what it was started with is not known
    return info.first_mode or CaptureMode.OBSERVE
