"""``to_json``: the documented JSON object of a fleet."""

from __future__ import annotations

from typing import Any

from hicache_obs.costs import TransferKind
from hicache_obs.fleet.rank import FenceSum, FoundDefect, RankSummary
from hicache_obs.fleet.run import Clock, Fleet, GroupResult
from hicache_obs.fleet.verdict import Judged, NodeSum, clock_text


def to_json(judged: Judged) -> dict[str, Any]:
    """The same for the same records."""
    fleet = judged.fleet
    return {
        "outcome": judged.outcome,
        "text": judged.sentence,
        "ranks": [_rank(rank, judged) for rank in fleet.ranks],
        "unreadable": [{"rank": rank.place.name, "error": rank.error} for rank in fleet.ranks if rank.error],
        "nodes": [_node(node) for node in judged.nodes],
        "groups": [_group(fleet, group) for group in fleet.groups],
        "divergences": [_divergence(fleet, group) for group in fleet.groups if group.divergence is not None],
        "clocks": [_clock(fleet, clock) for clock in fleet.clocks],
        "notes": list(fleet.notes),
    }


def _rank(rank: RankSummary, judged: Judged) -> dict[str, Any]:
    place = rank.place
    return {
        "rank": place.name,
        "place": place.place,
        "node": place.node,
        "role": place.role,
        "dp": place.ranks.dp,
        "pp": place.ranks.pp,
        "tp": place.ranks.tp,
        "outcome": rank.outcome(judged.accepted),
        "error": rank.error or None,
        "records": rank.records,
        "pairs_checked": rank.lookups,
        "checked": {hazard.value: pages for hazard, pages in rank.checked.items()},
        "verdicts": {verdict.value: count for verdict, count in rank.verdicts.items()},
        "findings": [_defect(defect, judged) for defect in rank.defects],
        "more_findings": rank.more + rank.skipped,
        "fences": {kind.value: fences_json(rank.fences[kind]) for kind in TransferKind if kind in rank.fences},
        "transfers": rank.transfers,
        "lost": {reason.name.lower(): count for reason, count in rank.lost.items()},
        "engine": rank.engine,
        "notes": list(rank.notes),
    }


def _defect(defect: FoundDefect, judged: Judged) -> dict[str, Any]:
    finding = defect.example
    acceptance = judged.accepted.of(finding)
    return {
        "fingerprint": finding.fingerprint,
        "class": finding.hazard.value,
        "cause": finding.cause.value,
        "verdict": finding.verdict.value,
        "pairs": {verdict.value: count for verdict, count in defect.verdicts.items()},
        "between": [int(finding.earlier.op), int(finding.later.op)],
        "accepted": acceptance and {"reason": acceptance.reason, "expires": str(acceptance.expires)},
        "text": defect.text,
    }


def fences_json(fences: FenceSum) -> dict[str, Any]:
    """Milliseconds, as ``bench-fences`` has them."""
    return {
        "count": fences.count,
        "in_flight": fences.in_flight,
        "waited_ms": fences.waited_ns / 1e6,
        "avoidable_ms": fences.avoidable_ns / 1e6,
        "needed_ms_by_hazard": {hazard.value: ns / 1e6 for hazard, ns in fences.needed_ns.items()},
        "p50_ms": fences.p50_ns / 1e6,
        "p99_ms": fences.p99_ns / 1e6,
        "max_ms": fences.max_ns / 1e6,
    }


def _node(node: NodeSum) -> dict[str, Any]:
    return {
        "node": node.name,
        "ranks": node.ranks,
        "unreadable": node.unreadable,
        "findings": node.findings,
        "fences": {kind.value: fences_json(fences) for kind, fences in node.fences.items()},
    }


def _group(fleet: Fleet, result: GroupResult) -> dict[str, Any]:
    members = result.group.members
    return {
        "kind": result.group.kind,
        "group": result.group.name,
        "against": fleet.ranks[members[0].number].place.name,
        "decisions": result.decisions,
        "compared": {
            fleet.ranks[member.number].place.name: count
            for member, count in zip(members[1:], result.compared, strict=True)
        },
        "undecided": [fleet.ranks[number].place.name for number in result.undecided],
        "diverges": result.divergence is not None,
    }


def _divergence(fleet: Fleet, result: GroupResult) -> dict[str, Any]:
    assert result.divergence is not None
    return {
        "class": "tp_divergence",
        "cause": "rank_divergence",
        "kind": result.group.kind,
        "group": result.group.name,
        "position": result.divergence.position,
        "sides": [
            {
                "ranks": [fleet.ranks[number].place.name for number in side.numbers],
                "decision": None if side.decision is None else side.decision.text,
                "op": None if side.decision is None else int(side.decision.op),
                "host_ns": None if side.decision is None else side.decision.host_ns,
            }
            for side in result.divergence.sides
        ],
    }


def _clock(fleet: Fleet, clock: Clock) -> dict[str, Any]:
    bounds = clock.bounds
    told = bounds is not None and bounds.low_ns <= bounds.high_ns
    return {
        "rank": fleet.ranks[clock.number].place.name,
        "against": fleet.ranks[clock.against].place.name,
        "clock": "wall" if clock.wall else "host",
        "ahead_us": None if bounds is None or not told else [bounds.low_ns / 1e3, bounds.high_ns / 1e3],
        "collectives": 0 if bounds is None else bounds.count,
        "text": clock_text(clock),
    }
