"""``fleet_page``: a fleet's results as the texts, tables and bars of the HTML page."""

from __future__ import annotations

from typing import Final

from hicache_obs.analyzer.tally import DEFINITE
from hicache_obs.costs import TransferKind
from hicache_obs.exporters.html import Bar, Defect, Divergence, FleetPage, Table
from hicache_obs.findings import Verdict
from hicache_obs.fleet.rank import FoundDefect, RankSummary
from hicache_obs.fleet.verdict import Judged, clock_text

MAX_ROWS: Final = 500
"""Rows of one table."""
MAX_CARDS: Final = 50
MAX_NAMES: Final = 20
"""Ranks named for one finding, or on one side of a divergence."""
_ORDER: Final = (Verdict.VIOLATION, Verdict.CONTRADICTION, Verdict.UNKNOWN, Verdict.LATENT)
_BAD: Final = (Verdict.VIOLATION, Verdict.CONTRADICTION)


def fleet_page(judged: Judged) -> FleetPage:
    """The page of ``judged``."""
    ranks = judged.fleet.ranks
    unread = [(rank.place.name, rank.error) for rank in ranks if rank.error]
    return FleetPage(
        sentence=judged.sentence,
        lines=_lines(judged),
        unreadable=Table(("rank", "why"), unread[:MAX_ROWS]) if unread else None,
        divergences=_divergences(judged),
        defects=_defects(judged),
        ranks=_ranks(judged),
        groups=_groups(judged),
        clocks=_clocks(judged),
        no_clocks="It cannot be told how far clocks are apart: no two ranks entered a collective together.",
        nodes=_nodes(judged),
        bars=[Bar(plain(node.name), node.waited_ns, node.avoidable_ns) for node in judged.nodes if node.waited_ns],
        blind=_blind(judged),
    )


def plain(text: str, width: int = 1000) -> str:
    """``text`` from a file or its name, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:width])


def _lines(judged: Judged) -> list[str]:
    ranks = judged.fleet.ranks
    nodes = len({rank.place.node for rank in ranks})
    records = sum(rank.records for rank in ranks)
    return [f"Ranks: {len(ranks):,}, nodes: {nodes:,}, records: {records:,}."]


def _names(judged: Judged, numbers: tuple[int, ...]) -> str:
    names = [plain(judged.fleet.ranks[number].place.name) for number in numbers[:MAX_NAMES]]
    more = len(numbers) - len(names)
    return ", ".join(names) + (f" and {more:,} more" if more else "")


def _divergences(judged: Judged) -> list[Divergence]:
    found: list[Divergence] = []
    for result in judged.fleet.groups:
        if result.divergence is None or len(found) >= MAX_CARDS:
            continue
        sides = []
        for side in result.divergence.sides:
            decision = side.decision
            text = "its records are gone" if decision is None else f"{decision.text} (op {decision.op})"
            sides.append((_names(judged, side.numbers), plain(text)))
        place = f"{result.group.kind} decision {result.divergence.position:,}, counted from 0"
        found.append(Divergence(plain(result.group.name), place, sides))
    return found


def _defects(judged: Judged) -> list[Defect]:
    by_name: dict[str, list[tuple[RankSummary, FoundDefect]]] = {}
    for rank in judged.fleet.ranks:
        for defect in rank.defects:
            by_name.setdefault(defect.example.fingerprint, []).append((rank, defect))
    found = [_defect(judged, where) for where in by_name.values()]
    ordered = sorted(found, key=lambda d: ([v.value.upper() for v in _ORDER].index(d.verdict), d.name))
    return ordered[:MAX_CARDS]


def _defect(judged: Judged, where: list[tuple[RankSummary, FoundDefect]]) -> Defect:
    worst = min((defect for _, defect in where), key=lambda d: (_ORDER.index(d.example.verdict), not d.text))
    pairs = sum(defect.count for _, defect in where)
    acceptance = judged.accepted.of(worst.example)
    names = [plain(rank.place.name) for rank, _ in where[:MAX_NAMES]]
    return Defect(
        name=worst.example.fingerprint,
        verdict=worst.example.verdict.value.upper(),
        hazard=worst.example.hazard.value,
        bad=worst.example.verdict in _BAD,
        count=f"{pairs:,} pair{'s' * (pairs != 1)} in {len(where):,} rank{'s' * (len(where) != 1)}",
        text=worst.text.partition("\n\n")[2],
        ranks=[*names, *([f"and {len(where) - len(names):,} more"] if len(where) > len(names) else [])],
        accepted="" if acceptance is None else f"until {acceptance.expires}: {acceptance.reason}",
    )


def _ranks(judged: Judged) -> Table:
    heads = ("rank", "outcome", *(verdict.value for verdict in (*DEFINITE, Verdict.UNKNOWN)), "page pairs", "lost")
    rows = []
    for rank in judged.by_severity[:MAX_ROWS]:
        counts = [f"{rank.verdicts.get(verdict, 0):,}" for verdict in (*DEFINITE, Verdict.UNKNOWN)]
        waited = [sum(getattr(f, name) for f in rank.fences.values()) / 1e6 for name in ("waited_ns", "avoidable_ns")]
        figures = [f"{rank.lookups:,}", f"{sum(rank.lost.values()):,}", *(f"{ms:,.2f}" for ms in waited)]
        place = plain(rank.place.place)
        rows.append((plain(rank.place.name), rank.outcome(judged.accepted), *counts, *figures, place))
    return Table((*heads, "fences waited, ms", "avoidable, ms", "records"), rows)


def _groups(judged: Judged) -> Table | None:
    rows = []
    for result in judged.fleet.groups[:MAX_ROWS]:
        members = result.group.members
        least = min(result.compared)
        said = "differ" if result.divergence is not None else "agree"
        if result.undecided:
            said = f"{said}; nothing to compare in {_names(judged, result.undecided)}"
        against = plain(judged.fleet.ranks[members[0].number].place.name)
        rows.append((plain(result.group.name), result.group.kind, f"{len(members):,}", against,
                     f"{result.decisions:,}", f"{least:,}", said))  # fmt: skip
    heads = ("group", "decisions", "ranks", "compared with", "it took", "least compared", "result")
    return Table(heads, rows) if rows else None


def _clocks(judged: Judged) -> Table | None:
    ranks = judged.fleet.ranks
    rows = [
        (plain(ranks[clock.number].place.name), plain(ranks[clock.against].place.name), clock_text(clock))
        for clock in judged.fleet.clocks[:MAX_ROWS]
    ]
    return Table(("rank", "against", "distance"), rows) if rows else None


def _nodes(judged: Judged) -> Table | None:
    rows = []
    for node in judged.nodes[:MAX_ROWS]:
        for kind in TransferKind:
            fences = node.fences[kind]
            if fences.count:
                figures = (fences.waited_ns, fences.avoidable_ns, fences.p99_ns, fences.max_ns)
                needed = ", ".join(f"{hazard.value} {ns / 1e6:,.2f}" for hazard, ns in fences.needed_ns.items())
                rows.append((plain(node.name), kind.value, f"{fences.count:,}", f"{fences.in_flight:,}",
                             *(f"{ns / 1e6:,.3f}" for ns in figures), needed or "nothing"))  # fmt: skip
    heads = ("node", "before a", "fences", "conflict in flight", "waited, ms", "avoidable", "99 %", "longest")
    return Table((*heads, "needed, by hazard"), rows) if rows else None


def _blind(judged: Judged) -> list[str]:
    fleet = judged.fleet
    lines = [plain(note) for note in fleet.notes]
    for rank in fleet.ranks:
        lines += [f"{plain(rank.place.name)}: {plain(note)}" for note in rank.notes]
    hidden = max(0, len(fleet.ranks) - MAX_ROWS)
    lines = lines[:MAX_ROWS] + ([f"{hidden:,} more ranks have no row here"] if hidden else [])
    lines.append("what ranks that agree decided wrongly together: agreement is not correctness")
    lines.append("decisions behind lost records, unless a run of them occurs once in both ranks")
    lines.append("host code that did not run, and what was not recorded: a verdict is about these recordings only")
    return lines
