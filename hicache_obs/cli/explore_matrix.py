"""``hicache-obs explore --matrix``: every protection taken out once, and what that does."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from hicache_obs.cli.layout import progress_bars
from hicache_obs.findings import ExitCode

if TYPE_CHECKING:
    from hicache_obs.testing.matrix import Cell


def print_matrix(*, as_json: bool) -> int:
    """Run all cells and print them; returns the exit code."""
    import torch

    from hicache_obs.testing.matrix import cells, judge_cell, table

    torch.set_num_threads(1)  # the tensors are tiny
    found: list[Cell] = []
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with progress_bars(*columns) as bars:
        task = bars.add_task("matrix", total=None)
        for name, fence in cells():
            bars.update(task, description=f"cell {len(found) + 1} of {len(cells())}: {name}, fence {fence}")
            found.append(judge_cell(name, fence))
    failed = [cell for cell in found if not cell.holds]
    if as_json:
        click.echo(json.dumps([_as_json(cell) for cell in found], indent=2))
    else:
        click.echo(table(found))
        click.echo("")
        click.echo(f"{len(found) - len(failed)} of {len(found)} cells hold.")
        for cell in failed:
            click.echo(f"  does not hold: {cell.name}, fence {cell.fence}")
    return int(ExitCode.FINDINGS if failed else ExitCode.CLEAN)


def _as_json(cell: Cell) -> dict[str, Any]:
    return {
        "protection": cell.name,
        "fence": cell.fence,
        "hazards": [hazard.value for hazard in cell.against],
        "whole": {"pairs_checked": cell.checks, "clean": cell.clean},
        "without": {"schedules": cell.schedules, "reported": cell.reported, "findings": cell.findings},
        "contents_wrong_under_witness": cell.witnessed,
        "holds": cell.holds,
    }
