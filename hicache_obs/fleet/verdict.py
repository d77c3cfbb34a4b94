"""What a fleet's results come to: exit code, outcome, the one sentence, sums per node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hicache_obs.analyzer.tally import DEFINITE
from hicache_obs.costs import TransferKind
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.exporters.health import Health, Outcome
from hicache_obs.findings import ExitCode, Hazard, Verdict, worst
from hicache_obs.fleet.rank import FenceSum, RankSummary
from hicache_obs.fleet.run import Clock, Fleet

OUTCOMES: Final = {
    ExitCode.CLEAN: "clean",
    ExitCode.FINDINGS: "findings",
    ExitCode.NOTHING_CHECKED: "nothing-checked",
}


@dataclass(frozen=True, slots=True)
class NodeSum:
    """The ranks of one node together.

    Attributes:
        ranks, unreadable: Ranks; those that could not be read.
        findings: Operation pairs in no proven order that nobody has accepted.
        fences: By kind of transfer; ``p50_ns`` and ``p99_ns`` are those of the worst rank.
    """

    name: str
    ranks: int
    unreadable: int
    findings: int
    fences: dict[TransferKind, FenceSum]

    @property
    def waited_ns(self) -> int:
        """All fences."""
        return sum(fences.waited_ns for fences in self.fences.values())

    @property
    def avoidable_ns(self) -> int:
        """All fences."""
        return sum(fences.avoidable_ns for fences in self.fences.values())


@dataclass(frozen=True, slots=True)
class Judged:
    """A fleet and which of its findings are accepted."""

    fleet: Fleet
    accepted: Accepted

    @property
    def code(self) -> ExitCode:
        """Findings of a rank or a divergence; then what was not checked, or cannot be told."""
        codes = [rank.code(self.accepted) for rank in self.fleet.ranks]
        codes += [ExitCode.FINDINGS for group in self.fleet.groups if group.divergence is not None]
        if self.fleet.notes or any(group.undecided for group in self.fleet.groups):
            codes.append(ExitCode.NOTHING_CHECKED)
        return worst(codes)

    @property
    def undecided(self) -> bool:
        """Whether something was checked in vain."""
        return any(rank.undecided for rank in self.fleet.ranks) or any(group.undecided for group in self.fleet.groups)

    @property
    def outcome(self) -> str:
        """As ``analyze`` says it: ``clean``, ``findings``, ``unknown`` or ``nothing-checked``."""
        if self.code is not ExitCode.NOTHING_CHECKED:
            return OUTCOMES[self.code]
        return "unknown" if self.undecided or self.fleet.notes else "nothing-checked"

    @property
    def by_severity(self) -> list[RankSummary]:
        """Violations first, then other findings, ranks that could not be read, undecided ones, and the costliest."""

        def key(rank: RankSummary) -> tuple[int, int, bool, int, int]:
            wrong = rank.unexpected(self.accepted, [Verdict.VIOLATION])
            avoidable = sum(fences.avoidable_ns for fences in rank.fences.values())
            unknown = rank.verdicts.get(Verdict.UNKNOWN, 0)
            return -wrong, -rank.unexpected(self.accepted), not rank.error, -unknown, -avoidable

        return sorted(self.fleet.ranks, key=key)

    @property
    def sentence(self) -> str:
        """The verdict, a colon, and what it is about."""
        ranks = self.fleet.ranks
        bad = sum(rank.code(self.accepted) is ExitCode.FINDINGS for rank in ranks)
        apart = sum(group.divergence is not None for group in self.fleet.groups)
        unread = sum(bool(rank.error) for rank in ranks)
        seen = f"{_count(len(ranks) - unread, 'rank')} of {len(ranks):,} read"
        seen += f", {sum(rank.lookups for rank in ranks):,} page pairs checked"
        compared = sum(sum(group.compared) for group in self.fleet.groups)
        seen += f", {compared:,} decisions compared between ranks"
        if self.code is ExitCode.FINDINGS:
            what = [f"{_count(bad, 'rank')} with findings"] if bad else []
            what += [f"{_count(apart, 'group')} of ranks whose decisions differ"] if apart else []
            wrong, against, latent = (sum(rank.unexpected(self.accepted, [v]) for rank in ranks) for v in DEFINITE)
            health = Health(violations=wrong, contradictions=against, latent=latent)
            word = (Outcome.VIOLATED if apart else health.outcome).value
            return f"{word}: {' and '.join(what)}; {seen}"
        if self.code is ExitCode.CLEAN:
            if any(rank.expected(self.accepted) for rank in ranks):
                return f"AS ACCEPTED: all findings are accepted for now; {seen}"
            return f"SAFE: every conflicting pair is in proven order{', and ranks agree' if compared else ''}; {seen}"
        if self.outcome == "unknown":
            return f"NOT DECIDABLE: of some pairs or ranks the order, or the agreement, is not known; {seen}"
        idle = sum(not rank.error and not rank.lookups for rank in ranks)
        why = [f"{_count(unread, 'rank')} cannot be read"] if unread else []
        why += [f"{_count(idle, 'rank')} touched no page twice"] if idle else []
        return f"NOTHING CHECKED: {' and '.join(why)}; {seen}"

    @property
    def nodes(self) -> list[NodeSum]:
        """The costliest first."""
        found = []
        for name in dict.fromkeys(rank.place.node for rank in self.fleet.ranks):
            ranks = [rank for rank in self.fleet.ranks if rank.place.node == name]
            fences = {kind: add_fences([r.fences[kind] for r in ranks if kind in r.fences]) for kind in TransferKind}
            found.append(
                NodeSum(
                    name,
                    len(ranks),
                    sum(bool(rank.error) for rank in ranks),
                    sum(rank.unexpected(self.accepted) for rank in ranks),
                    fences,
                )
            )
        return sorted(found, key=lambda node: (-node.waited_ns, node.name))


def add_fences(sums: Sequence[FenceSum]) -> FenceSum:
    """All together; the shares are those of the worst."""
    needed: Counter[Hazard] = Counter()
    for each in sums:
        needed.update(each.needed_ns)
    return FenceSum(
        sum(each.count for each in sums),
        sum(each.in_flight for each in sums),
        sum(each.waited_ns for each in sums),
        sum(each.avoidable_ns for each in sums),
        dict(sorted(needed.items())),
        max((each.p50_ns for each in sums), default=0),
        max((each.p99_ns for each in sums), default=0),
        max((each.max_ns for each in sums), default=0),
    )


def clock_text(clock: Clock) -> str:
    """In words, without the names of the two ranks."""
    bounds = clock.bounds
    if bounds is None:
        return "cannot be told: no collective of both is known to be the same one"
    if bounds.low_ns > bounds.high_ns:
        return (
            f"cannot be told: no distance fits {bounds.count:,} collectives, by {bounds.low_ns - bounds.high_ns:,} ns; "
            "a clock drifts, a call does not block, or they are not the same calls"
        )
    what = "wall clock" if clock.wall else "host clock"
    return (
        f"{what} ahead by {bounds.low_ns / 1e3:,.3f} to {bounds.high_ns / 1e3:,.3f} us, by {bounds.count:,} collectives"
    )


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'s' * (number != 1)}"
