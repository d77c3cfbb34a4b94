"""What the commands say about a checked trace: outcome, text and JSON. Used by ``check`` and ``analyze``."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import click

from hicache_obs.analyzer import Analyzer, explain
from hicache_obs.analyzer.remedy import Timeline, public_report, remedies, timeline
from hicache_obs.analyzer.stalls import Stall, StallReport, find_stalls
from hicache_obs.analyzer.tally import Tally
from hicache_obs.cli.layout import FINDING_INDENT, fit
from hicache_obs.costs import FenceCost
from hicache_obs.errors import naming
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.findings import BlastRadius, ExitCode, Finding, Hazard, Shared, Verdict, worst
from hicache_obs.records import OpId
from hicache_obs.trace import Trace

OUTCOMES: Final = {
    ExitCode.CLEAN: "clean",
    ExitCode.FINDINGS: "findings",
    ExitCode.NOTHING_CHECKED: "nothing-checked",
}
_RESOURCES: Final = {"device": "pages", "host": "host_pages", "buffer": "buffers"}
STEP: Final = 1 << 14
"""Records between two reports of progress."""
SHOWN: Final = 20
"""Findings explained in full per file; the rest are counted."""


class Keeper(Tally):
    """A tally that keeps every finding, every pair that only something weak orders, and every fence's cost."""

    def __init__(self) -> None:
        super().__init__()
        self.findings: list[Finding] = []
        self.fence_costs: list[FenceCost] = []
        self.weak: dict[tuple[OpId, OpId], str] = {}

    def on_finding(self, finding: Finding) -> None:
        super().on_finding(finding)
        self.findings.append(finding)

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        super().on_weak_ordering(hazard, provenance, pair)
        self.weak[pair] = provenance

    def on_fence(self, cost: FenceCost) -> None:
        super().on_fence(cost)
        self.fence_costs.append(cost)


@dataclass(frozen=True, slots=True)
class Report:
    """What one file gave."""

    trace: Trace
    analyzer: Analyzer
    keeper: Keeper
    pairs_checked: int
    stalls: StallReport
    times: Timeline
    code: ExitCode
    accepted: Accepted

    @property
    def expected(self) -> int:
        """Operation pairs of findings that somebody has accepted for now."""
        return self.keeper.unexpected(lambda _: False) - self.keeper.unexpected(self.accepted.covers)

    @property
    def undecided(self) -> bool:
        """Whether something was checked in vain."""
        return bool(self.keeper.verdicts[Verdict.UNKNOWN] or self.analyzer.totals.shared)

    @property
    def notes(self) -> list[str]:
        """What was not looked at and why, in words for the user."""
        found = [*self.trace.notes, *([self.stalls.note] if self.stalls.note else [])]
        shared = self.analyzer.totals.shared
        if shared:
            found.append(f"{shared} accesses to memory that another process may touch too; its accesses are not here")
        if self.analyzer.forgotten:
            found.append(
                f"{self.analyzer.forgotten} groups of operations left a full history before every host thread knew "
                "them to be complete: later races with them were not looked for"
            )
        return found

    @property
    def outcome(self) -> str:
        if self.code is ExitCode.NOTHING_CHECKED and self.undecided:
            return "unknown"
        return OUTCOMES[self.code]


def analyse(
    trace: Trace, *, accepted: Accepted | None = None, progress: Callable[[int, int], None] | None = None
) -> Report:
    """Judge a whole trace. ``progress`` is told how many records of how many have been looked at.

    Raises:
        TraceError: Its ids are too large to analyse; the message names the trace.
    """
    accepted = Accepted() if accepted is None else accepted
    keeper = Keeper()
    analyzer = Analyzer(keeper)
    with naming(trace.source):
        for begin in range(0, len(trace), STEP):
            analyzer.feed(trace.records[begin : begin + STEP])
            if progress is not None:
                progress(min(begin + STEP, len(trace)), len(trace))
    analyzer.finish()
    lookups = analyzer.totals.lookups
    stalls = find_stalls(trace)
    times = timeline(trace) if keeper.findings else Timeline()
    code = keeper.exit_code(lookups, analyzer.totals.shared, accepts=accepted.covers)
    report = Report(trace, analyzer, keeper, lookups, stalls, times, code, accepted)
    if any(stall.ranks for stall in stalls.stalls):
        return replace(report, code=worst([code, ExitCode.FINDINGS]))  # to stand still for ever is wrong, not slow
    if code is ExitCode.NOTHING_CHECKED and (stalls.stalls or stalls.compared) and not report.undecided:
        return replace(report, code=ExitCode.CLEAN)  # waits were judged, or ranks compared: that is a check
    return report


def show(report: Report) -> None:
    """Print a report: one line, then what was found."""
    summary = f"{report.trace.source}: {report.outcome}, {report.pairs_checked} page pairs checked"
    if report.stalls.compared:
        summary += f", {report.stalls.compared} collectives compared"
    if report.expected:
        summary += f", {report.expected} accepted"
    click.echo(fit(summary, indent=FINDING_INDENT))
    show_findings(report)
    source, _, rank = str(report.trace.source).partition(", rank ")
    if Path(source).exists() and any(not finding.misuse for finding in report.keeper.findings):
        which = f" --rank {rank}" if rank else ""
        click.echo(f"to see the first of them go wrong: hicache-obs replay {shlex.quote(source)}{which}\n")


def show_findings(report: Report) -> None:
    """Print all that a report found, without its summary."""
    for finding in report.keeper.findings[:SHOWN]:
        radius = None if finding.misuse else report.analyzer.blast_radius((finding.earlier.op, finding.later.op))
        click.echo("\n" + fit(explain(finding, radius, report.times, report.trace.names), indent=FINDING_INDENT))
        acceptance = report.accepted.of(finding)
        if acceptance is not None:
            click.echo(fit(f"  accepted until {acceptance.expires}: {acceptance.reason}", indent=FINDING_INDENT))
    for stall in report.stalls.stalls:
        click.echo(fit(stall_line(report.trace, stall), indent=2))
    for note in report.notes:
        click.echo(fit(f"  {note}", indent=2))
    hidden = len(report.keeper.findings) - SHOWN
    if hidden > 0:
        click.echo(f"\n... and {hidden} more; --json lists them all")
    if report.keeper.findings:
        click.echo("")


def to_json(report: Report) -> dict[str, Any]:
    """The documented JSON object of one checked trace."""
    return {
        "file": str(report.trace.source),
        "outcome": report.outcome,
        "pairs_checked": report.pairs_checked,
        "races": _races(report),
        "stalls": [stall.as_json(report.trace) for stall in report.stalls.stalls],
        "ordered": _weakly_ordered(report),
        "notes": report.notes,
        "ownership": [_race(report, finding) for finding in report.keeper.findings if finding.misuse],
    }


def _weakly_ordered(report: Report) -> list[dict[str, Any]]:
    """Pairs that a poll alone orders, one entry per pair of steps; what else they share may race all the same."""
    raced = {(finding.earlier.op, finding.later.op) for finding in report.keeper.findings}
    return [
        {"between": [_step(report.trace, op) for op in pair], "provenance": provenance}
        for pair, provenance in report.keeper.weak.items()
        if pair not in raced
    ]


def _races(report: Report) -> list[dict[str, Any]]:
    """One entry per pair of steps: entries of one graph replay are one step."""
    trace = report.trace
    races: dict[tuple[str | int, str | int], dict[str, Any]] = {}
    for finding in report.keeper.findings:
        if finding.misuse:
            continue
        race = _race(report, finding)
        race |= _remedies(report, finding)
        race["tainted"] = _tainted(trace, report.analyzer.blast_radius((finding.earlier.op, finding.later.op)))
        known = races.setdefault(tuple(race["between"]), race)
        if known is not race:
            for key in _RESOURCES.values():
                known[key] = sorted({*known[key], *race[key]}, key=_place)
            every = not (known["layers"] and race["layers"])
            known["layers"] = [] if every else sorted({*known["layers"], *race["layers"]})
    return list(races.values())


def _race(report: Report, finding: Finding) -> dict[str, Any]:
    trace, acceptance = report.trace, report.accepted.of(finding)
    resources: dict[str, list[Any]] = {name: [] for name in _RESOURCES.values()}
    for shared in (Shared(finding.space, finding.pool, finding.pages), *finding.also):
        resources[_RESOURCES[shared.space]] += [_resource(trace, shared, page) for page in shared.pages]
    for named in resources.values():
        named.sort(key=_place)
    low, high = finding.layers
    return {
        "fingerprint": finding.fingerprint,
        "class": finding.hazard.value,
        "between": [_step(trace, finding.earlier.op), _step(trace, finding.later.op)],
        **resources,
        "layers": list(range(low, high)) if high < 2**31 - 1 else [],
        "verdict": finding.verdict.value,
        "cause": finding.cause.value,
        "accepted": acceptance and {"reason": acceptance.reason, "expires": str(acceptance.expires)},
    }


def _remedies(report: Report, finding: Finding) -> dict[str, Any]:
    """What would order a pair, cheapest first, with what it would have cost; and a public report of the same kind."""
    found = [
        {
            "kind": remedy.kind.value,
            "on": remedy.on,
            "after": _step(report.trace, remedy.after),
            "waiter": remedy.waiter,
            "before": _step(report.trace, remedy.before),
            "delay_us": None if remedy.delay_ns is None else remedy.delay_ns / 1000,
        }
        for remedy in remedies(finding, report.times)
    ]
    return {"remedies": found, "report": public_report(finding) or None}


def _tainted(trace: Trace, radius: BlastRadius) -> dict[str, Any]:
    """Blast radius of one race; a scenario's rounds and transfers are its steps."""
    device = [Shared("device", pool, (page,)) for pool, page in radius.device_pages]
    host = [Shared("host", pool, (page,)) for pool, page in radius.host_pages]
    return {
        "rounds": [_step(trace, OpId(number)) for number in radius.rounds],
        "transfers": [_step(trace, OpId(number)) for number in radius.transfers],
        "ios": list(radius.ios),
        "pages": [_resource(trace, shared, page) for shared in device for page in shared.pages],
        "host_pages": [_resource(trace, shared, page) for shared in host for page in shared.pages],
        "requests": [trace.names.requests.get(number, number) for number in radius.requests],
        "complete": radius.complete,
        "exact": radius.exact,
    }


def stall_line(trace: Trace, stall: Stall) -> str:
    """One line for people."""
    text = f"  {stall.kind.value} ({stall.cause.value}) at {trace.label(stall.at)}: {stall.waiter} "
    text += "waits for ever" if stall.blocked_ns is None else f"stands still for {stall.blocked_ns / 1e3:,.0f} us"
    if stall.needed is not None:
        text += f"; waiting for {trace.label(stall.needed)} alone would do"
    elif stall.move_to is not None:
        move = stall.move_to
        text += f"; only thread {trace.names.thread(move.thread)} needs it, before {trace.label(move.before)}"
    elif stall.copies:
        text += f"; all of {len(stall.copies)} layer copies were over before it could begin"
    elif not stall.ranks:
        text += "; nothing needs this wait"
    return text


def _resource(trace: Trace, shared: Shared, page: int) -> str | int:
    """A buffer's name, or a page; pages of other pools than the first are written ``pool:id``."""
    if shared.space == "buffer":
        return trace.names.buffers.get(page, str(page))
    pools = trace.names.host_pools if shared.space == "host" else trace.names.pools
    return f"{pools.get(shared.pool, str(shared.pool))}:{page}" if shared.pool else page


def _place(resource: str | int) -> tuple[str, int, str]:
    """Pages of the first pool come first, then those of other pools, by number; buffers by name."""
    if isinstance(resource, int):
        return "", resource, ""
    pool, _, page = resource.rpartition(":")
    return (pool, len(page), page) if pool else (resource, 0, "")


def _step(trace: Trace, op: OpId) -> str | int:
    return trace.labels.get(op, int(op))
