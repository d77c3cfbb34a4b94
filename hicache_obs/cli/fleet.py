"""``hicache-obs fleet``: the journals of many ranks in parallel, and whether ranks that must agree do."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from hicache_obs.cli.judge import plain
from hicache_obs.cli.layout import FINDING_INDENT, fit
from hicache_obs.cli.outputs import accepted_option, load_accepted
from hicache_obs.cli.report import check_output
from hicache_obs.errors import ConfigError
from hicache_obs.fleet.document import to_json
from hicache_obs.fleet.places import RankPlace, find_ranks
from hicache_obs.fleet.run import Executor, Inline, Progress, analyse_fleet
from hicache_obs.fleet.verdict import Judged, clock_text
from hicache_obs.whole_file import write_whole, written

if TYPE_CHECKING:
    from hicache_obs.fleet.rank import RankSummary

SHOWN: Final = 10
"""Ranks, divergences and clocks listed as text."""
WIDTH: Final = 400
MIN_MEMORY: Final = 128 << 20
_SIZE: Final = re.compile(r"(\d{1,6})\s*(MiB|GiB|MB|GB)")
_UNITS: Final = {"MiB": 1 << 20, "GiB": 1 << 30, "MB": 10**6, "GB": 10**9}


@click.command("fleet")
@click.argument("journals", nargs=-1, required=True, metavar="JOURNALS...")
@click.option(
    "--workers", type=click.IntRange(min=0, max=1024), default=2, show_default=True, metavar="N",
    help="Processes of this machine; 0 does everything in this one.",
)  # fmt: skip
@click.option("--memory", default="1 GiB", show_default=True, metavar="SIZE", help="Of each of these processes.")
@click.option("--scheduler", metavar="ADDRESS", help="A Dask scheduler to use instead, such as tcp://host:8786.")
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Write the results as Parquet, anew.")
@click.option("-o", "--output", type=click.Path(path_type=Path), metavar="FILE", help="Write a report as HTML.")
@accepted_option
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    journals: Sequence[str],
    workers: int,
    memory: str,
    scheduler: str | None,
    out: Path | None,
    output: Path | None,
    accepted_file: Path | None,
    as_json: bool,
) -> int:
    """Analyse the journals of many ranks, and compare the ranks that must agree.

    JOURNALS are folders, globs or URLs that fsspec knows (s3://bucket/run/*), looked through to any depth for journals,
    Parquet files of 'convert' and ring files. Each rank is judged as 'analyze' would. Tensor-parallel ranks must take
    the same cache decisions in the same order, members of a group must enter the same collectives; the collectives say
    how far the ranks' clocks are apart.

    Exit code 1 with findings or ranks that differ, 3 if a rank cannot be read or something cannot be told.
    """
    memory_bytes = _bytes(memory)
    accepted = load_accepted(accepted_file)
    places = find_ranks(journals)
    _check_outputs(out, output, places, accepted_file)
    with _progress(len(places)) as progress, _executor(workers, memory_bytes, scheduler) as executor:
        judged = Judged(analyse_fleet(places, executor, progress), accepted)
    if out is not None:
        from hicache_obs.fleet.dataset import write_dataset

        with written(out, "--out") as partial:
            write_dataset(judged, partial)
    if output is not None:
        from hicache_obs.exporters.html import render_fleet
        from hicache_obs.fleet.page import fleet_page

        write_whole(output, render_fleet(fleet_page(judged)), "--output")
    if as_json:
        click.echo(json.dumps(to_json(judged), indent=2))
    else:
        _show(judged)
        for path, what in ((out, "results"), (output, "report")):
            if path is not None:
                click.echo(f"{what}: {path}")
    return int(judged.code)


def _bytes(memory: str) -> int:
    match = _SIZE.fullmatch(memory.strip())
    size = int(match[1]) * _UNITS[match[2]] if match else 0
    if size < MIN_MEMORY:
        raise ConfigError(f"--memory {memory}: expected a size of 128 MiB or more, such as '512 MiB' or '2 GiB'")
    return size


def _check_outputs(
    out: Path | None, output: Path | None, places: Sequence[RankPlace], accepted_file: Path | None
) -> None:
    """Before the work.

    Raises:
        ConfigError: An output is an input, exists and is not of its kind, or cannot be written.
    """
    inputs = [Path(place.place) for place in places if "://" not in place.place]
    inputs += [accepted_file] if accepted_file is not None else []
    if output is not None:
        check_output(output, inputs)
    if out is None:
        return
    from hicache_obs.fleet.dataset import check_dataset

    check_dataset(out, inputs)
    if output is not None and output.absolute() == out.absolute():
        raise ConfigError(f"--output {output}: is the folder of --out; name another")


def _executor(workers: int, memory_bytes: int, scheduler: str | None) -> AbstractContextManager[Executor]:
    if scheduler is None and not workers:
        return contextlib.nullcontext(Inline())
    from hicache_obs.fleet.cluster import local_workers, remote_workers

    return local_workers(workers, memory_bytes) if scheduler is None else remote_workers(scheduler)


@contextlib.contextmanager
def _progress(ranks: int) -> Iterator[Progress]:
    """Bars on standard error, where that is a terminal."""
    from rich import progress as bars
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda stage, done, total: None
        return
    columns = (bars.TextColumn("{task.description:20}"), bars.BarColumn(), bars.MofNCompleteColumn())
    with bars.Progress(*columns, bars.TimeElapsedColumn(), console=console, transient=True) as shown:
        tasks = {"ranks": shown.add_task("ranks", total=ranks)}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(stage, total=total)
            shown.update(tasks[stage], completed=done, total=total)

        yield tell


# -- text ---------------------------------------------------------------------------------------------------------


def _show(judged: Judged) -> None:
    """The sentence, then the worst of everything."""
    lines = [judged.sentence, *map(_rank_line, _noteworthy(judged)), *_divergence_lines(judged)]
    lines += _more(judged)
    lines += [f"  {note}" for note in judged.fleet.notes]
    lines += _undecided_lines(judged)
    for node in judged.nodes[:SHOWN]:
        count = sum(fences.count for fences in node.fences.values())
        if count:
            lines.append(
                f"  {node.name}: {count:,} fences waited {node.waited_ns / 1e6:,.2f} ms, "
                f"{node.avoidable_ns / 1e6:,.2f} ms of it avoidable"
            )
    lines += _clock_lines(judged)
    for line in lines:
        click.echo(fit(plain(line, width=WIDTH), indent=FINDING_INDENT))


def _noteworthy(judged: Judged) -> list[tuple[RankSummary, Judged]]:
    worst = [rank for rank in judged.by_severity if rank.outcome(judged.accepted) != "clean"]
    return [(rank, judged) for rank in worst[:SHOWN]]


def _rank_line(of: tuple[RankSummary, Judged]) -> str:
    rank, judged = of
    text = f"  {rank.place.name}: {rank.outcome(judged.accepted)}"
    if rank.error:
        return f"{text}: {rank.error}"
    counts = [f"{count:,} {verdict.value}" for verdict, count in rank.verdicts.items()]
    names = [defect.example.fingerprint for defect in rank.defects[:3]]
    more = len(rank.defects) + rank.more - len(names)
    text += f", {', '.join(counts)}" if counts else ""
    text += f" ({', '.join(names)}{f' and {more} more' if more else ''})" if names else ""
    return f"{text}; {rank.place.place}"


def _divergence_lines(judged: Judged) -> list[str]:
    apart = [group for group in judged.fleet.groups if group.divergence is not None]
    lines = []
    for group in apart[:SHOWN]:
        assert group.divergence is not None
        lines.append(f"  {group.group.name}: differ at {group.group.kind} decision {group.divergence.position:,}")
        for side in group.divergence.sides:
            names = ", ".join(judged.fleet.ranks[number].place.name for number in side.numbers)
            decision = "its records are gone" if side.decision is None else side.decision.text
            op = "" if side.decision is None else f" (op {side.decision.op})"
            lines.append(f"    {names}: {decision}{op}")
    return lines


def _more(judged: Judged) -> list[str]:
    hidden = sum(rank.outcome(judged.accepted) != "clean" for rank in judged.fleet.ranks) - SHOWN
    apart = sum(group.divergence is not None for group in judged.fleet.groups) - SHOWN
    lines = [f"  ... and {hidden} more ranks that are not clean; --json lists them all"] if hidden > 0 else []
    return lines + ([f"  ... and {apart} more groups that differ; --json lists them all"] if apart > 0 else [])


def _undecided_lines(judged: Judged) -> list[str]:
    lines = []
    for group in judged.fleet.groups:
        if group.undecided:
            names = ", ".join(judged.fleet.ranks[number].place.name for number in group.undecided[:SHOWN])
            lines.append(f"  {group.group.name}: cannot tell whether these agree, nothing could be compared: {names}")
    return lines[:SHOWN]


def _clock_lines(judged: Judged) -> list[str]:
    clocks, ranks = judged.fleet.clocks, judged.fleet.ranks
    if not clocks:
        return ["  clocks: cannot be told how far they are apart: no two ranks entered a collective together"]
    lines = [
        f"  {ranks[clock.number].place.name} against {ranks[clock.against].place.name}: {clock_text(clock)}"
        for clock in clocks[:SHOWN]
    ]
    hidden = len(clocks) - SHOWN
    return lines + ([f"  ... and {hidden} more clocks; --json lists them all"] if hidden > 0 else [])
