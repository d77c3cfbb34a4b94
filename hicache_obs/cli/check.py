"""``hicache-obs check``: scenario, journal and ring files in, verdicts out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import click

from hicache_obs.cli.outputs import accepted_option, load_accepted, rank_option
from hicache_obs.cli.verdict import analyse, show, to_json
from hicache_obs.findings import worst
from hicache_obs.readers import open_trace
from hicache_obs.trace import Trace


@click.command("check")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@rank_option
@accepted_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object for one file, a list for several.")
def command(files: Sequence[Path], rank: int | None, accepted_file: Path | None, as_json: bool) -> int:
    """Check recorded histories for operations that touch the same pages in no proven order.

    FILE is a scenario (JSON), a journal file or folder, Parquet of 'convert', or a ring file. Exit code 1 if any has
    findings, 3 if one could not be decided or had nothing to check.
    """
    accepted = load_accepted(accepted_file)
    reports = [analyse(_open(path, rank), accepted=accepted) for path in files]
    if as_json:
        objects = [to_json(report) for report in reports]
        click.echo(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2))
    else:
        for report in reports:
            show(report)
    return int(worst([report.code for report in reports]))


def _open(path: Path, rank: int | None) -> Trace:
    """The trace at ``path``; its source names the rank that was asked for."""
    trace = open_trace(path, rank=rank)
    return trace if rank is None or not path.is_dir() else replace(trace, source=f"{trace.source}, rank {rank}")
