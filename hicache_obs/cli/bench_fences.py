"""``hicache-obs bench-fences``: what each barrier and each fence would cost on a workload, and which are right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from hicache_obs.cli.demo_policies import BARRIERS, FENCES, WRITE_POLICIES
from hicache_obs.cli.json_file import writable_json, write_json
from hicache_obs.cli.layout import progress_bars
from hicache_obs.errors import ConfigError
from hicache_obs.findings import worst
from hicache_obs.whole_file import write_whole

if TYPE_CHECKING:
    from hicache_obs.cli.fence_cells import BenchOptions, Cell, Grid
    from hicache_obs.controller.workloads import Request
    from hicache_obs.streams.serving_cost import ServingCosts

REQUESTS: Final = 120
"""Generated requests: a few seconds per cell."""
MAX_BLOCKS: Final = 40
"""Longest generated prompt, in blocks of 512 tokens."""
_COLUMNS: Final = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
_POSITIVE: Final = click.IntRange(min=1)


@click.command("bench-fences")
@click.option(
    "--workload", type=click.Path(path_type=Path), metavar="FILE.jsonl",
    help="Requests to serve, as 'demo --workload' takes them; default: generated conversations.",
)  # fmt: skip
@click.option(
    "--requests", type=_POSITIVE, metavar="N",
    help=f"Number of requests; default: all of FILE.jsonl, or {REQUESTS} generated ones.",
)  # fmt: skip
@click.option(
    "--device-tokens", type=_POSITIVE, multiple=True, default=(65_536,), show_default=True, metavar="N",
    help="Size of the device KV pool; may be given several times, as all axes may.",
)  # fmt: skip
@click.option(
    "--host-ratio", type=_POSITIVE, multiple=True, default=(8,), show_default=True, metavar="N",
    help="Size of the host KV pool, in device pools.",
)  # fmt: skip
@click.option(
    "--page-size", type=_POSITIVE, multiple=True, default=(64,), show_default=True, metavar="N",
    help="Tokens per page.",
)  # fmt: skip
@click.option(
    "--write-policy", type=click.Choice(WRITE_POLICIES), multiple=True, default=("write_through",), show_default=True,
    help="When a prefix is copied to host memory.",
)  # fmt: skip
@click.option(
    "--barrier", type=click.Choice(BARRIERS), multiple=True, default=BARRIERS, show_default=True,
    help="What keeps the next round's metadata from overwriting what the round in flight reads.",
)  # fmt: skip
@click.option(
    "--fence", type=click.Choice(FENCES), multiple=True, default=FENCES, show_default=True,
    help="What a transfer waits for: nothing, the whole forward stream, or the rounds that use its pages.",
)  # fmt: skip
@click.option(
    "--storage", is_flag=True,
    help="Add a third tier that holds all that was ever written back, and takes no time: what it could give at most.",
)  # fmt: skip
@click.option(
    "--clients", type=click.IntRange(1, 1024), default=16, show_default=True, metavar="N",
    help="Requests in the system; the next one comes when one has finished.",
)  # fmt: skip
@click.option(
    "--kv-token-bytes", type=_POSITIVE, default=131_072, show_default=True, metavar="N",
    help="Cost model: KV of one token, all layers.",
)  # fmt: skip
@click.option(
    "--copy-gb-s", type=click.FloatRange(min=0.001), default=50.0, show_default=True, metavar="X",
    help="Cost model: bandwidth between host and device, in each direction.",
)  # fmt: skip
@click.option(
    "--memory-gb-s", type=click.FloatRange(min=0.001), default=3000.0, show_default=True, metavar="X",
    help="Cost model: bandwidth of device memory, at which a round reads KV.",
)  # fmt: skip
@click.option(
    "--round-ms", type=click.FloatRange(min=0.001), default=6.0, show_default=True, metavar="X",
    help="Cost model: least time of a round, for its weights.",
)  # fmt: skip
@click.option(
    "--token-us", type=click.FloatRange(min=0.001), default=50.0, show_default=True, metavar="X",
    help="Cost model: time to compute one token; a round takes this or --round-ms, whichever is more.",
)  # fmt: skip
@click.option(
    "--seed", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Of generated requests.",
)  # fmt: skip
@click.option(
    "--journal", type=click.Path(path_type=Path), metavar="DIR",
    help="Run nothing: price the fences of a recorded run, and say what page-exact ones would have left.",
)  # fmt: skip
@click.option("--plot", type=click.Path(path_type=Path), metavar="FILE.svg", help="Draw the waits of all cells.")
@click.option("--json", "json_file", metavar="FILE|-", help="Write the results as JSON; - is standard output.")
@click.pass_context
def command(
    context: click.Context,
    /,
    workload: Path | None,
    requests: int | None,
    seed: int,
    journal: Path | None,
    plot: Path | None,
    json_file: str | None,
    clients: int,
    storage: bool,
    **others: Any,
) -> int:
    """Compare barriers and fences on a workload, in virtual time.

    Every cell of the grid serves the same requests with the built-in cache controller on the virtual device, whose
    times follow a stated cost model. Its streams are recorded and analysed: which pages raced, what each fence waited
    for, and which part of that a page-exact fence would have waited for as well. The same input gives the same output.

    Without fences findings are expected; exit code 1 means a finding where a fence should have prevented it, or in a
    journal.
    """
    path = writable_json(json_file, source=workload if journal is None else journal)
    console = Console(stderr=json_file == "-")
    if journal is not None:
        _refuse_grid(context)
        return _price(journal, console, json_file, path)
    if plot is not None:
        writable_json(str(plot), "--plot", source=workload)
        if plot.suffix != ".svg":
            raise ConfigError(f"--plot {plot}: is drawn as SVG; expected a name that ends in .svg")
    axes = {name: tuple(dict.fromkeys(others[name])) for name in _AXES}
    work = _requests(workload, requests, seed)
    options, grid = _prepare(work, clients, others, axes, storage=storage)
    started = time.perf_counter()
    cells = _run(grid, options)
    spent_s = time.perf_counter() - started
    from hicache_obs.cli.fence_advice import by_setting

    settings = by_setting(cells)
    write_json(_document(settings, options), json_file, path)
    _show(console, settings, options)
    if plot is not None:
        from hicache_obs.cli.fence_chart import chart

        write_whole(plot, chart(settings), "--plot")
    rounds = sum(cell.rounds for cell in cells)
    click.echo(f"simulated {rounds:,} rounds in {spent_s:.1f} s: {rounds / spent_s:,.0f} rounds/s", err=True)
    return int(worst([cell.code for cell in cells]))


_AXES: Final = ("device_tokens", "host_ratio", "page_size", "write_policy", "barrier", "fence")


def _requests(workload: Path | None, requests: int | None, seed: int) -> Sequence[Request]:
    from hicache_obs.controller.workloads import TRACE_BLOCK, generate

    if workload is not None:
        from hicache_obs.controller.workload_file import load_jsonl

        return load_jsonl(workload, tokens_per_block=TRACE_BLOCK, vocabulary=512, limit=requests)
    return generate(
        requests or REQUESTS,
        seed=seed,
        tokens_per_block=TRACE_BLOCK,
        vocabulary=512,
        reuse=0.7,
        conversations=48,
        max_blocks=MAX_BLOCKS,
    )


def _prepare(
    work: Sequence[Request], clients: int, costs: dict[str, Any], axes: dict[str, Any], *, storage: bool
) -> tuple[BenchOptions, Grid]:
    import torch

    from hicache_obs.cli.fence_cells import BenchOptions, Grid, check_sizes

    torch.set_num_threads(1)  # the tensors are tiny
    grid = Grid(**axes)
    check_sizes(grid, work)
    return BenchOptions(work, clients, _costs(costs), storage), grid


def _costs(options: dict[str, Any]) -> ServingCosts:
    from hicache_obs.streams.serving_cost import ServingCosts

    return ServingCosts(
        kv_token_bytes=options["kv_token_bytes"],
        copy_bytes_per_s=round(options["copy_gb_s"] * 1e9),
        kernel_bytes_per_s=round(options["memory_gb_s"] * 1e9),
        round_ns=round(options["round_ms"] * 1e6),
        token_ns=round(options["token_us"] * 1e3),
    )


def _run(grid: Grid, options: BenchOptions) -> list[Cell]:
    from hicache_obs.cli.fence_cells import run_cell

    cells: list[Cell] = []
    todo = list(grid.cells())
    with progress_bars(*_COLUMNS) as bars:
        task = bars.add_task("", total=len(options.requests))
        for number, (setting, barrier, fence) in enumerate(todo, 1):
            bars.reset(task, description=f"cell {number} of {len(todo)}: {barrier}, {fence}")
            cells.append(
                run_cell(setting, barrier, fence, options, lambda finished: bars.update(task, completed=finished))
            )
    return cells


def _document(settings: Sequence[Sequence[Cell]], options: BenchOptions) -> dict[str, Any]:
    from hicache_obs.cli.fence_advice import advise, cell_json

    costs = asdict(options.costs)
    for name in ("pool_token_bytes", "layers"):
        del costs[name]
    found = [advice for cells in settings if (advice := advise(cells)) is not None]
    return {
        "requests": len(options.requests),
        "clients": options.clients,
        "storage": options.storage,
        "cost_model": costs,
        "cells": [cell_json(cell) for cells in settings for cell in cells],
        "advice": [advice.as_json() for advice in found],
    }


def _show(console: Console, settings: Sequence[Sequence[Cell]], options: BenchOptions) -> None:
    from hicache_obs.cli.fence_advice import advise, costs_line, remarks, table

    console.print(f"{len(options.requests):,} requests; {costs_line(options.costs, options.clients)}", highlight=False)
    console.print(
        "Times in ms; with an s, in seconds. wait: of all fences before load-backs, before write-backs; vain: what "
        "page-exact ones would have saved of it.\n",
        highlight=False,
    )
    for cells in settings:
        console.print(table(cells, storage=options.storage))
        advice = advise(cells)
        lines = [] if advice is None else [*advice.sentences()]
        if advice is None and any(cell.restored_pages and cell.pairs_checked for cell in cells):
            lines = ["No fenced cell is in proven order."]
        for line in (*lines, *remarks(cells)):
            console.print(line, highlight=False)


# -- a recorded run ------------------------------------------------------------------------------------------


def _refuse_grid(context: click.Context) -> None:
    """ConfigError for an option that says what to run, beside a journal of what was run."""
    for name in context.params:
        source = context.get_parameter_source(name)
        if name not in ("journal", "json_file") and source is click.core.ParameterSource.COMMANDLINE:
            option = "--" + name.replace("_", "-")
            raise ConfigError(f"{option}: is for a run, and --journal runs nothing; expected --json alone with it")


def _price(journal: Path, console: Console, json_file: str | None, path: Path | None) -> int:
    from hicache_obs.cli.fence_journal import price, table

    with progress_bars(*_COLUMNS) as bars:
        task = bars.add_task("", total=None)
        priced = price(
            journal, lambda name, done, total: bars.update(task, description=name, completed=done, total=total)
        )
    write_json({"journals": [each.as_json() for each in priced]}, json_file, path)
    console.print(table(priced))
    for each in priced:
        for line in each.lines:
            console.print(line, highlight=False)
        if each.tally.verdicts.total():
            races = f"{each.tally.verdicts.total():,} operation pairs are in no proven order"
            console.print(f"{each.source}: {races}; 'hicache-obs check' explains them.", highlight=False)
    return int(worst([each.code for each in priced]))
