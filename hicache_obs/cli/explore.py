"""``hicache-obs explore``: every way a controller's host code can go, each judged for all device schedules."""

from __future__ import annotations

import contextlib
import json
import shlex
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click
from rich.console import Console
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from hicache_obs.analyzer import explain
from hicache_obs.cli.explore_matrix import print_matrix
from hicache_obs.cli.layout import FINDING_INDENT, fit, progress_bars
from hicache_obs.errors import ConfigError
from hicache_obs.findings import ExitCode, Hazard

if TYPE_CHECKING:
    from hicache_obs.testing.exploration import Execution, Exploration
    from hicache_obs.testing.world import World

FENCES: Final = ("stream", "page", "none")
PROTECTIONS: Final = (
    "load-fence", "write-fence", "layer-waits", "layer-order", "load-stream", "write-stream", "start-waits",
    "write-pins", "acks", "reader-stamps", "reuse-fence", "metadata-barrier", "storage-holds",
    "storage-replies", "backup-acks", "record-stream", "graph-load-wait", "graph-input-wait", "move-gate", "move-wait",
    "place-stamps", "shared-stamps", "table-fence", "table-wait",
)  # fmt: skip
"""Names of ``hicache_obs.testing.protections``, which imports torch."""
_OUTCOMES: Final = {ExitCode.CLEAN: "clean", ExitCode.FINDINGS: "findings", ExitCode.NOTHING_CHECKED: "not-decided"}
MAX_RUNS: Final = 10_000
PREEMPTIONS: Final = 2
SHOWN: Final = 10
"""Races and errors explained in full; the rest are counted."""


@dataclass(frozen=True, slots=True)
class _Subject:
    """What is explored.

    Attributes:
        program: It.
        title: As people read it.
        arguments: Command line that names it.
        ranges: Lowest and highest of what the program counted, over all runs.
        absent: Hazards it cannot have, with the reason.
    """

    program: Callable[[World], None]
    title: str
    arguments: tuple[str, ...]
    ranges: Callable[[], Mapping[str, tuple[int, int]]] = dict
    absent: Mapping[Hazard, str] = field(default_factory=dict)

    def replay(self, choices: str, preemptions: int) -> str:
        """The command that makes one run again."""
        bound = () if preemptions == PREEMPTIONS else ("--preemptions", str(preemptions))
        return shlex.join(("hicache-obs", "explore", *self.arguments, *bound, "--choices", choices))


@click.command(
    "explore",  # the names stay whole: click would break them at their hyphens
    epilog="\b\nFor --off:\n" + textwrap.fill(", ".join(PROTECTIONS), 76, break_on_hyphens=False),
)
@click.argument("program", required=False, metavar="[PROGRAM]")
@click.option(
    "--fence", type=click.Choice(FENCES), help="Built-in program: what a transfer waits for.  [default: page]"
)
@click.option(
    "--off", type=click.Choice(PROTECTIONS), multiple=True, metavar="NAME",
    help="Built-in program: take a protection out; repeatable. The names are below.",
)  # fmt: skip
@click.option(
    "--max-runs", type=click.IntRange(min=1), default=MAX_RUNS, show_default=True, metavar="N",
    help="Budget. Exit code 3 if runs are missing by then and nothing was found.",
)  # fmt: skip
@click.option(
    "--preemptions", type=click.IntRange(min=0), default=PREEMPTIONS, show_default=True, metavar="N",
    help="How often a host thread that could go on may be interrupted, in one run.",
)  # fmt: skip
@click.option("--stop", is_flag=True, help="Stop at the first run with a finding.")
@click.option("--choices", metavar="DIGITS", help="Make one run again: the choices printed with a finding.")
@click.option(
    "--journal", type=click.Path(path_type=Path), metavar="DIR",
    help="Keep the trace of the first run with a finding, or of the run of --choices, "
    "for 'hicache-obs check' and 'replay'.",
)  # fmt: skip
@click.option(
    "--matrix", is_flag=True,
    help="Take every protection out once, under each fence policy, and print what that does as a table.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    program: str | None,
    fence: str | None,
    off: tuple[str, ...],
    max_runs: int,
    preemptions: int,
    stop: bool,
    choices: str | None,
    journal: Path | None,
    matrix: bool,
    as_json: bool,
) -> int:
    """Run a controller for every way its host code can go, and check every run.

    The program is run again and again on the virtual device: once for each answer that its queries may get and each
    order in which its host threads may run. Each run is judged for all device schedules at once. A finding is
    printed with the command that makes its run again.

    PROGRAM is a function of your own, FILE.py:NAME or MODULE:NAME; it gets a hicache_obs.testing.World
    (docs/explore.md). Without it: this project's cache controller under a small workload.

    Exit code 0: every run was made and nothing was found. 1: a race or an error. 3: runs are missing, or nothing was
    checked. With --matrix, 0: every cell holds; 1: one does not.
    """
    if matrix:
        for flag, given in (("PROGRAM", program), ("--fence", fence), ("--off", off), ("--choices", choices)):
            if given:
                raise ConfigError(f"--matrix: runs the built-in program in every way; expected no {flag} with it")
        return print_matrix(as_json=as_json)
    subject = _built_in(fence or "page", off) if program is None else _own(program, fence, off)
    from hicache_obs.testing.exploration import Bounds, Exploration, execute, explore

    bounds = Bounds(preemptions=preemptions)
    keep = _Keeper(journal)
    run: Execution | None = None
    if choices is None:
        with _progress() as tell:

            def on_run(found: Exploration, run: Execution) -> None:
                keep.see(run)
                tell(found)

            found = explore(subject.program, bounds=bounds, max_runs=max_runs, stop=stop, on_run=on_run)
    else:
        run = execute(subject.program, choices, bounds=bounds)
        found = Exploration.of(run, bounds)
        keep.see(run, wanted=True)
    code = found.exit_code
    if as_json:
        click.echo(json.dumps(_as_json(subject, found, code), indent=2))
    elif run is None:
        _show(subject, found, stop=stop)
    else:
        _show_run(subject, found, run)
    keep.tell()
    return int(code)


def _built_in(fence: str, off: Sequence[str]) -> _Subject:
    import torch

    from hicache_obs.testing.controller_program import ABSENT, ControllerProgram
    from hicache_obs.testing.protections import PROTECTIONS as KNOWN

    for name in off:
        if fence not in KNOWN[name].fences:
            raise ConfigError(
                f"--off {name}: is no part of --fence {fence}; expected {' or '.join(KNOWN[name].fences)}"
            )
    torch.set_num_threads(1)  # the tensors are tiny
    program = ControllerProgram(fence, off)
    title = f"cache controller, fence {fence}, {len(program.requests)} requests"
    title += f"; without {', '.join(off)}" if off else ""
    arguments = ("--fence", fence, *(word for name in off for word in ("--off", name)))
    absent = {hazard: why for hazard, why in ABSENT.items() if hazard not in program.possible}
    return _Subject(program, title, arguments, program.ranges, absent)


def _own(argument: str, fence: str | None, off: Sequence[str]) -> _Subject:
    from hicache_obs.cli.program import load_program

    for flag, given in (("--fence", fence), ("--off", off)):
        if given:
            raise ConfigError(f"{flag}: belongs to the built-in program; expected no PROGRAM with it")
    return _Subject(load_program(argument), argument, (argument,))


class _Keeper:
    """Keeps the trace of one run as a journal."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._kept = ""
        if folder is not None:
            from hicache_obs.readers.journal_writer import JournalWriter

            self._writer = JournalWriter(folder, engine="explored program")

    def see(self, run: Execution, *, wanted: bool = False) -> None:
        """Write ``run`` down if it is ``wanted``, or the first with a finding."""
        if self._folder is None or self._kept or not (wanted or run.findings or run.error):
            return
        self._writer.write(run.records)
        self._writer.close()
        self._kept = run.choices or "none"

    def tell(self) -> None:
        """Say on standard error where the trace is."""
        if self._folder is not None:
            text = f"trace of the run with choices {self._kept}: {self._folder}" if self._kept else "no trace to keep"
            click.echo(text, err=True)


@contextlib.contextmanager
def _progress() -> Iterator[Callable[[Exploration], None]]:
    """A line on standard error that shows how far the exploration is."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with progress_bars(*columns) as bars:
        task = bars.add_task("exploring", total=None)

        def tell(found: Exploration) -> None:
            races = f", {len(found.races)} races" if found.races else ""
            bars.update(task, description=f"{found.runs:,} runs, {found.open:,} open branches{races}")

        yield tell


# -- output --------------------------------------------------------------------------------------------------


def _show(subject: _Subject, found: Exploration, *, stop: bool) -> None:
    click.echo(subject.title)
    space = "all of them" if found.exhausted else f"NOT all: {_count(found.open, 'branch', 'branches')} left"
    _row("runs", f"{found.runs:,}, {space}")
    _row(
        "choice points",
        f"{_count(found.queries, 'query', 'queries')}, {_count(found.turns, 'thread change')}; "
        f"{found.deepest} in one run at most",
    )
    _row("forced", f"{_count(found.forced, 'query', 'queries')} whose answer was known")
    work = _count(found.workloads, "different sequence")
    _row("histories", f"{found.histories:,} distinct, with {work} of work")
    if found.bounded_queries:
        _row("bound", f"{found.bounded_queries:,} queries had to be true after {found.bounds.max_false} false answers")
    if found.bounded_turns:
        _row("bound", f"{found.bounded_turns:,} calls could not be preempted: --preemptions {found.bounds.preemptions}")
    if found.runs:
        _counts(subject)
    _checks(subject, found)
    _findings(subject, found)
    if not found.races and not found.failures:
        if not found.lookups:
            text = "Nothing was checked: no access had an earlier one."
        elif found.exhausted:
            text = "No findings: every run was judged, for all device schedules."
        else:
            text = "No findings so far, and not decidable: raise --max-runs."
        click.echo(fit(text, indent=0))
    elif not found.exhausted:
        click.echo(
            "Stopped at the first finding (--stop)." if stop else "The space was not exhausted: raise --max-runs."
        )


def _row(name: str, text: str) -> None:
    click.echo(fit(f"  {name:<13}  {text}", indent=17))


def _counts(subject: _Subject) -> None:
    ranges = subject.ranges()
    if ranges:
        texts = [f"{low if low == high else f'{low}-{high}'} {name}" for name, (low, high) in ranges.items()]
        _row("in each run", ", ".join(texts))


def _checks(subject: _Subject, found: Exploration) -> None:
    table = Table()
    table.add_column("hazard")
    table.add_column("pairs that need an order", justify="right")
    table.add_column("racing", justify="right")
    racing: Counter[Hazard] = Counter()
    for race in found.races.values():
        racing[race.example.hazard] += race.pairs
    for hazard in Hazard:
        if found.checks[hazard] or racing[hazard]:
            count = racing[hazard]
            table.add_row(hazard.value, f"{found.checks[hazard]:,}", f"[bold red]{count:,}[/]" if count else "0")
    if table.row_count:
        Console().print(table)
    reasons: dict[str, list[str]] = {}
    for hazard, reason in subject.absent.items():
        reasons.setdefault(reason, []).append(hazard.value)
    for reason, names in reasons.items():
        click.echo(fit(f"  not here: {', '.join(names)}: {reason}", indent=4))
    click.echo("")


def _count(number: int, noun: str, several: str = "") -> str:
    return f"{number:,} {noun if number == 1 else several or noun + 's'}"


def _findings(subject: _Subject, found: Exploration, *, single: bool = False) -> None:
    preemptions = found.bounds.preemptions
    texts = [
        (explain(race.example), f"{_count(race.pairs, 'pair')} in {race.runs:,} of {found.runs:,} runs", race.choices)
        for race in found.races.values()
    ]
    texts += [
        (f"ERROR  {failure.error}", f"{failure.runs:,} of {found.runs:,} runs", failure.choices)
        for failure in found.failures.values()
    ]
    for text, count, choices in texts[:SHOWN]:
        click.echo(fit(text, indent=FINDING_INDENT))
        if not single:
            click.echo(fit(f"  found    {count}", indent=FINDING_INDENT))
            click.echo(f"  replay   {subject.replay(choices, preemptions)}")
        click.echo("")
    if len(texts) > SHOWN:
        click.echo(f"... and {len(texts) - SHOWN} more; --json lists them all\n")


def _show_run(subject: _Subject, found: Exploration, run: Execution) -> None:
    click.echo(f"{subject.title}; one run")
    for number, choice in enumerate(run.made, 1):
        click.echo(fit(f"  {number:3}  {choice.taken}  {choice.what}", indent=8))
    if not run.made:
        click.echo("  no choice points")
    _counts(subject)
    click.echo("")
    _findings(subject, found, single=True)
    if not found.races and not found.failures:
        click.echo(
            "No findings in this run." if found.lookups else "Nothing was checked: no access had an earlier one."
        )


def _as_json(subject: _Subject, found: Exploration, code: ExitCode) -> dict[str, Any]:
    preemptions = found.bounds.preemptions
    return {
        "program": subject.title,
        "outcome": _OUTCOMES[code],
        "exhausted": found.exhausted,
        "runs": found.runs,
        "choice_points": {"queries": found.queries, "threads": found.turns},
        "deepest": found.deepest,
        "forced_queries": found.forced,
        "bounded": {"queries": found.bounded_queries, "preemptions": found.bounded_turns},
        "histories": found.histories,
        "workloads": found.workloads,
        "in_each_run": subject.ranges(),
        "checks": {hazard.value: found.checks[hazard] for hazard in Hazard if found.checks[hazard]},
        "absent": {hazard.value: reason for hazard, reason in subject.absent.items()},
        "weak_orderings": found.weak,
        "races": [
            {
                "fingerprint": name,
                "class": race.example.hazard.value,
                "cause": race.example.cause.value,
                "pages": list(race.example.pages),
                "pairs": race.pairs,
                "runs": race.runs,
                "choices": race.choices,
                "replay": subject.replay(race.choices, preemptions),
            }
            for name, race in found.races.items()
        ],
        "errors": [
            {
                "error": failure.error,
                "runs": failure.runs,
                "choices": failure.choices,
                "replay": subject.replay(failure.choices, preemptions),
            }
            for failure in found.failures.values()
        ],
    }
