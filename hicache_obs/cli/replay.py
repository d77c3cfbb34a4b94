"""``hicache-obs replay``: a finding, two schedules that prove it, and what they do on the virtual device."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import click

from hicache_obs.analyzer import Analyzer, explain
from hicache_obs.analyzer.witness import Cell, Witness, table, witness
from hicache_obs.cli.layout import FINDING_INDENT, fit
from hicache_obs.cli.outputs import rank_option
from hicache_obs.errors import InputError, TraceError, naming
from hicache_obs.findings import ExitCode, Finding, Proof
from hicache_obs.readers import open_trace
from hicache_obs.records import OpId, Space
from hicache_obs.testing import RecordingSink
from hicache_obs.testing.replay import Content, Halves, replay
from hicache_obs.trace import Trace

SHOWN_PAGES: Final = 8
"""Pages whose content is printed; the rest are counted."""


@click.command("replay")
@click.argument("file", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--between", nargs=2, metavar="A B", help="Step or operation ids (default: the first finding).")
@rank_option
def command(file: Path, between: tuple[str, str] | None, rank: int | None) -> int:
    """Print two legal schedules in which a finding goes wrong, and run both on the virtual device.

    FILE is a scenario (JSON), a journal file or folder, Parquet of 'convert', or a ring file. Exit code 0 if both
    runs did what they claim, 1 if not.
    """
    trace = open_trace(file, rank=rank)
    findings = _findings(trace)
    pair = _first(trace, findings) if between is None else (_op(trace, between[0]), _op(trace, between[1]))
    try:
        found = witness(trace, *pair)
    except InputError as error:
        names = " ".join(between or map(trace.label, pair))
        raise InputError(f"{trace.source}: --between {names}: {error}") from None
    sides = {found.earlier.step, found.later.step}
    for finding in findings:
        if {finding.earlier.op, finding.later.op} == sides:
            click.echo(fit(explain(finding, names=trace.names), indent=FINDING_INDENT) + "\n")
            break
    click.echo(table(found, trace.label) + "\n")
    return int(_run(trace, found))


def _findings(trace: Trace) -> list[Finding]:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    with naming(trace.source):
        analyzer.feed(trace)
    analyzer.finish()
    return sink.findings


def _first(trace: Trace, findings: list[Finding]) -> tuple[OpId, OpId]:
    for proof in (Proof.NONE, Proof.UNKNOWN):
        for finding in findings:
            if finding.proof is proof:
                return finding.earlier.op, finding.later.op
    raise TraceError(f"{trace.source}: nothing to replay: no pair of accesses is unordered")


def _op(trace: Trace, name: str) -> OpId:
    """The operation a step id or an operation id names; of a graph replay, the replay."""
    labelled = [op for op, label in trace.labels.items() if label == name]
    if labelled:
        return min(labelled)
    if name.isdecimal() and any(record.op == int(name) for record in trace):
        return OpId(int(name))
    raise TraceError(f"{trace.source}: --between {name}: must be a step or operation id of the file")


def _run(trace: Trace, found: Witness) -> ExitCode:
    overlap, reverse = replay(found, found.overlap), replay(found, found.reverse)
    happened = overlap.overlapped, reverse.reversed and reverse.all_wrong
    click.echo("on the virtual device")
    click.echo(f"  overlap  {'both were in flight together' if happened[0] else 'NOT as claimed'}")
    _show(trace, found, overlap.contents)
    click.echo(f"  reverse  {'the later one was complete first' if reverse.reversed else 'NOT as claimed'}")
    _show(trace, found, reverse.contents)
    return ExitCode.CLEAN if all(happened) else ExitCode.FINDINGS


def _show(trace: Trace, found: Witness, contents: tuple[Content, ...]) -> None:
    for content in contents[:SHOWN_PAGES]:
        facts = [f"holds {_halves(trace, content.left)}"]
        for item, read in ((found.earlier, content.earlier_read), (found.later, content.later_read)):
            if read is not None:
                facts.append(f"{trace.label(item.op)} read {_halves(trace, read)}")
        verdict = "wrong" if content.wrong else "right"
        click.echo(f"           {_place(trace, content.cell)}: {', '.join(facts)}: {verdict}")
    if len(contents) > SHOWN_PAGES:
        click.echo(f"           ... and {len(contents) - SHOWN_PAGES} more")


def _place(trace: Trace, cell: Cell) -> str:
    if cell.space is Space.BUFFER:
        return trace.names.buffer(cell.page)
    kind, names = ("page", trace.names.pools) if cell.space is Space.DEVICE else ("host page", trace.names.host_pools)
    return f"{kind} {cell.page}" + (f" of {names.get(cell.pool, f'pool {cell.pool}')}" if cell.pool else "")


def _halves(trace: Trace, halves: Halves) -> str:
    first, second = ("what was there before" if op is None else f"the write of {trace.label(op)}" for op in halves)
    return first if first == second else f"{first} and, in its other half, {second}"
