"""``section_of``: what was concluded from one recording, as the texts, tables and charts of the HTML report."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from hicache_obs.analyzer import explain
from hicache_obs.analyzer.fence_cost import FENCES
from hicache_obs.analyzer.remedy import Timeline, public_report, timeline
from hicache_obs.analyzer.tally import Defect
from hicache_obs.cli.judge import (
    AnyReport,
    CopyReport,
    JoinedReport,
    Undecided,
    checks_of,
    label,
    level_of,
    plain,
    sentence,
    source_of,
)
from hicache_obs.cli.ranks_report import RanksReport
from hicache_obs.cli.verdict import Report, stall_line
from hicache_obs.costs import FenceCost, TransferKind
from hicache_obs.exporters.html import Card, FenceRow, Pair, Section, Table
from hicache_obs.exporters.html.heat_map import heat_maps
from hicache_obs.exporters.html.timeline import draw_profile, draw_trace
from hicache_obs.findings import Finding, Hazard, Verdict
from hicache_obs.readers.profile import Profile
from hicache_obs.records import EventWait, OpId, WaitStream
from hicache_obs.trace import Trace

MAX_CARDS: Final = 50
"""Fingerprints with a card of their own; the others are rows of a table."""
MAX_PAIRS: Final = 20_000
"""Operation pairs on one timeline, the same number at most for each card."""
MAX_ROWS: Final = 500
MAX_FENCES: Final = 10
_BAD: Final = (Verdict.VIOLATION, Verdict.CONTRADICTION)
_ORDER: Final = (Verdict.VIOLATION, Verdict.CONTRADICTION, Verdict.UNKNOWN, Verdict.LATENT)
_FENCE_HEADS: Final = ("fence", "waited", "avoidable", "needed", "for")
_HERE: Final = ("replay", "report", "name")


def section_of(report: AnyReport, replay: str = "") -> Section:
    """The report's section.

    Args:
        report: What was concluded.
        replay: Command that replays a finding once ``--between A B`` is added.
    """
    if isinstance(report, CopyReport):
        return _copies(report)
    if isinstance(report, RanksReport):
        source, lines = plain(report.source, width=1000), [plain(line, width=1000) for line in report.lines]
        return Section(source=source, sentence=report.sentence, stalls=lines)
    if isinstance(report, Report):
        return _trace(report, report, replay)
    return _trace(report.report, report, replay)


# -- traces --------------------------------------------------------------------------------------------------


def _trace(inner: Report, report: Report | JoinedReport, replay: str) -> Section:
    trace, keeper = inner.trace, inner.keeper
    defects = keeper.by_severity()
    findings: dict[str, list[Finding]] = {defect.example.fingerprint: [] for defect in defects}
    for finding in keeper.findings:
        if finding.fingerprint in findings:
            findings[finding.fingerprint].append(finding)
    share = MAX_PAIRS // max(1, min(len(defects), MAX_CARDS))
    times = timeline(trace)
    cards = [
        _card(inner, defect, _worst_first(findings[defect.example.fingerprint], defect.example, share), times, replay)
        for defect in defects[:MAX_CARDS]
    ]
    first = [op for card in cards for pair in card.pairs for op in (pair.earlier, pair.later)]
    drawing = draw_trace(trace, times, keeper.fence_costs, inner.stalls.stalls, first=first)
    shown = [finding for defect in defects[:MAX_CARDS] for finding in findings[defect.example.fingerprint][:share]]
    joined = report if isinstance(report, JoinedReport) else None
    return Section(
        source=plain(source_of(report), width=1000),
        sentence=sentence(report),
        coverage=_coverage(inner),
        cards=cards,
        more_cards=_more(defects[MAX_CARDS:]),
        fences=_fence_sums(keeper.fence_costs),
        fence_heads=_FENCE_HEADS,
        worst_fences=_worst_fences(inner),
        stalls=[stall_line(trace, stall).strip() for stall in inner.stalls.stalls[:MAX_ROWS]],
        preflight=[] if joined is None else [(c.good, c.name, plain(c.text), c.advice) for c in checks_of(joined)],
        level="" if joined is None else level_of(joined),
        blind=_blind(inner, drawing.left_out, len(findings), first),
        drawing=drawing if len(drawing) else None,
        maps=heat_maps(trace, times, drawing, shown) if len(drawing) else [],
    )


def _worst_first(findings: Sequence[Finding], example: Finding, most: int) -> list[Finding]:
    """``example``, then the others by verdict, one per operation pair."""
    pairs: dict[tuple[OpId, OpId], Finding] = {(example.earlier.op, example.later.op): example}
    for finding in sorted(findings, key=lambda finding: _ORDER.index(finding.verdict)):
        if len(pairs) >= most:
            break
        pairs.setdefault((finding.earlier.op, finding.later.op), finding)
    return list(pairs.values())


def _card(report: Report, defect: Defect, findings: Sequence[Finding], times: Timeline, replay: str) -> Card:
    trace, finding = report.trace, defect.example
    radius = None if finding.misuse else report.analyzer.blast_radius((finding.earlier.op, finding.later.op))
    text = explain(finding, radius, times, trace.names).partition("\n")[2]
    story, facts = _explained(text)
    if finding.secondary:
        story.append("One of these pages had raced before.")
    acceptance = report.accepted.of(finding)
    between = " ".join(shlex.quote(str(trace.labels.get(op, op))) for op in (finding.earlier.op, finding.later.op))
    return Card(
        name=finding.fingerprint,
        verdict=finding.verdict.value.upper(),
        hazard=finding.hazard.value,
        bad=finding.verdict in _BAD,
        count=_counts(defect),
        story=story,
        facts=facts,
        accepted="" if acceptance is None else f"until {acceptance.expires}: {acceptance.reason}",
        replay=f"{replay} --between {between}" if replay and not finding.misuse else "",
        link=public_report(finding),
        pairs=[_pair(trace, finding) for finding in findings],
        radius=radius,
    )


def _pair(trace: Trace, finding: Finding) -> Pair:
    earlier, later = finding.earlier.op, finding.later.op
    return Pair(earlier, later, f"{trace.label(earlier)} → {trace.label(later)}")


def _explained(text: str) -> tuple[list[str], list[tuple[str, str]]]:
    """Paragraphs, and labelled lines, of an explained finding."""
    story: list[str] = []
    facts: list[tuple[str, str]] = []
    for labelled, lines in groupby(text.split("\n"), key=lambda line: line.startswith("  ")):
        for line in lines:
            name, _, rest = line.strip().partition(" ")
            if labelled and name not in _HERE:
                facts.append((name, rest.strip()))
            elif line and not labelled:
                story.append(line)
    return story, facts


def _counts(defect: Defect) -> str:
    """``3 pairs: 2 violation, 1 latent``."""
    kinds = ", ".join(f"{defect.verdicts[verdict]:,} {verdict.value}" for verdict in _ORDER if defect.verdicts[verdict])
    return f"{defect.count:,} pair{'s' * (defect.count != 1)}: {kinds}"


def _more(defects: Sequence[Defect]) -> Table | None:
    if not defects:
        return None
    rows = [
        (defect.example.fingerprint, defect.example.verdict.value, defect.example.hazard.value, f"{defect.count:,}")
        for defect in defects[:MAX_ROWS]
    ]
    return Table((f"{len(defects)} more findings", "worst verdict", "hazard", "pairs"), rows)


def _coverage(report: Report) -> list[str]:
    verdicts = report.keeper.verdicts
    judged = [f"{verdicts[verdict]:,} {verdict.value}" for verdict in _ORDER if verdicts[verdict]]
    checked = [f"{hazard.value} {pages:,}" for hazard, pages in sorted(report.keeper.checked.items()) if pages]
    lines = [f"Operation pairs: {', '.join(judged)}." if judged else "No operation pair without a proven order."]
    weak = len(report.keeper.weak)
    if weak:
        lines.append(f"{weak:,} pairs are ordered only by something weak, such as a successful query.")
    if checked:
        lines.append(f"Pages looked up: {', '.join(checked)}.")
    return [*lines, f"{report.analyzer.totals.records:,} records read."]


def _blind(report: Report, left_out: Iterable[str], kinds: int, first: Sequence[OpId]) -> list[str]:
    """What was not seen, not looked at, or is not in the report."""
    keeper = report.keeper
    lines = [*report.notes]
    lines += [
        f"{count:,} records lost ({reason.name.lower()})" for reason, count in sorted(keeper.lost.items()) if count
    ]
    if keeper.skipped:
        lines.append(f"{keeper.skipped:,} findings of further kinds, beyond the first {kinds:,}")
    fences = sum(isinstance(r, EventWait | WaitStream) and r.purpose in FENCES for r in report.trace)
    if fences > len(keeper.fence_costs):
        unpriced = fences - len(keeper.fence_costs)
        lines.append(f"what {unpriced:,} of {fences:,} fences cost: their times are missing or came too late")
    lines += left_out
    pairs, shown = sum(keeper.verdicts.values()), len(first) // 2
    if pairs > shown:
        lines.append(f"{shown:,} of {pairs:,} operation pairs of findings can be stepped through, the worst first")
    unseen = [hazard.value for hazard in Hazard if not keeper.checked[hazard]]
    if unseen:
        lines.append(f"kinds of race that nothing was checked for, which is not the same as none: {', '.join(unseen)}")
    lines.append("host code that did not run, and what was not recorded: a verdict is about this recording only")
    return lines


# -- fences --------------------------------------------------------------------------------------------------


def _fence_sums(costs: Sequence[FenceCost]) -> Table | None:
    if not costs:
        return None
    heads = ("fences", "count", "conflict in flight", "waited", "median", "99 %", "avoidable", "needed, by hazard")
    rows = []
    for kind in TransferKind:
        mine = [cost for cost in costs if cost.kind is kind]
        if not mine:
            continue
        waited = np.array([cost.waited_ns for cost in mine], np.int64)
        needed: Counter[Hazard] = Counter()
        for cost in mine:
            needed.update(cost.needed_ns)
        rows.append(
            (
                f"before a {kind.value}",
                f"{len(mine):,}",
                f"{sum(cost.in_flight for cost in mine):,}",
                _duration(int(waited.sum())),
                _duration(int(np.quantile(waited, 0.5))),
                _duration(int(np.quantile(waited, 0.99))),
                _duration(sum(cost.avoidable_ns for cost in mine)),
                ", ".join(f"{hazard.value} {_duration(ns)}" for hazard, ns in sorted(needed.items())) or "none",
            )
        )
    return Table(heads, rows)


def _worst_fences(report: Report) -> list[FenceRow]:
    costs = [cost for cost in report.keeper.fence_costs if cost.avoidable_ns]
    costs.sort(key=lambda cost: (-cost.avoidable_ns, cost.op))
    return [
        FenceRow(
            cost.op,
            (
                report.trace.label(cost.op),
                _duration(cost.waited_ns),
                _duration(cost.avoidable_ns),
                _duration(cost.waited_ns - cost.avoidable_ns),
                ", ".join(hazard.value for hazard in sorted(cost.needed_ns)) or "nothing",
            ),
        )
        for cost in costs[:MAX_FENCES]
    ]


def _duration(ns: int) -> str:
    for unit, name in ((10**9, "s"), (10**6, "ms"), (10**3, "µs")):
        if ns >= unit:
            return f"{ns / unit:,.2f} {name}"
    return f"{ns} ns"


# -- profiles ------------------------------------------------------------------------------------------------


def _copies(report: CopyReport) -> Section:
    profile = report.profile
    by_cause: dict[str, list[Undecided]] = {}
    for pair in report.undecided:
        by_cause.setdefault(pair.cause, []).append(pair)
    share = MAX_PAIRS // max(1, len(by_cause))
    cards = [
        Card(
            name="",
            verdict="UNKNOWN",
            hazard="a copy and the work around it",
            bad=False,
            count=f"{len(pairs):,} pair{'s' * (len(pairs) != 1)}",
            story=[f"{cause[0].upper()}{cause[1:]}."],
            facts=[("earlier", _about(profile, pairs[0].earlier)), ("later", _about(profile, pairs[0].later))],
            pairs=[
                Pair(pair.earlier, pair.later, f"{label(profile, pair.earlier)} → {label(profile, pair.later)}")
                for pair in pairs[:share]
            ],
        )
        for cause, pairs in sorted(by_cause.items(), key=lambda item: -len(item[1]))
    ]
    first = [op for card in cards for pair in card.pairs for op in (pair.earlier, pair.later)]
    drawing = draw_profile(profile, first=first)
    facts = profile.facts
    return Section(
        source=plain(source_of(report), width=1000),
        sentence=sentence(report),
        coverage=[
            f"{plain(facts.producer)}, format {plain(facts.schema)}.",
            f"{len(report.polled):,} pairs are ordered only by a successful query.",
        ],
        cards=cards,
        preflight=[(check.good, check.name, plain(check.text), check.advice) for check in checks_of(report)],
        level=level_of(report),
        blind=[
            *(f"not in the file: {text}" for text in report.blind),
            "which pages an operation touches: without the journal of the run (--journal) copies are judged as a whole",
            *drawing.left_out,
        ],
        drawing=drawing if len(drawing) else None,
    )


def _about(profile: Profile, op: OpId) -> str:
    stream = profile.streams[int(profile.ops.stream[op])]
    return f"{label(profile, op)} {plain(profile.names[int(profile.ops.name[op])])} on {stream.text}"
