"""``hicache-obs off``: running processes stop recording, without a restart."""

from __future__ import annotations

from pathlib import Path

import click

from hicache_obs.cli.mode import switch
from hicache_obs.cli.status import ring_options
from hicache_obs.records import CaptureMode


@click.command("off")
@ring_options
def command(directory: Path | None, pid: int | None, rank: int | None) -> int:
    """Stop recording in the running processes of this node, at once and until 'hicache-obs on'.

    What happens meanwhile is counted as lost, so that nothing is taken for checked. Exit code 3 if no process
    records.
    """
    return int(switch(directory, pid, rank, lambda _: CaptureMode.OFF))
