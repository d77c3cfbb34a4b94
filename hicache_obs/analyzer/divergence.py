"""Ranks that enter different collectives: the first place of a group where they do.

Every rank of a group must enter the same collectives in the same sequence; where one enters another, all of them wait
for ever, or exchange what does not belong together. Between ranks nothing but the place in that sequence says what
belongs together: neither times nor the order in a file.

Here all ranks of a group are compared place by place, up to the first loss, and the rank that left something out is
named. ``hicache_obs.fleet.agreement`` compares two long sequences, of any kind of decision, and finds its way behind
losses. What a loss may hide is one rule for both: ``HARMLESS``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hicache_obs.records import AnyRecord, Collective, Define, DropReason, Lost, OpId, ThreadId
from hicache_obs.trace import Names

HARMLESS: Final = frozenset((DropReason.UNRESOLVED, DropReason.EDGE))
"""Reasons of losses among which no decision of a program can be: no collective, no allocation, no transfer."""


@dataclass(frozen=True, slots=True)
class Entered:
    """A rank enters a collective.

    Attributes:
        rank: Which one.
        name: Of the collective.
        op, thread: Of the record.
    """

    rank: int
    name: str
    op: OpId
    thread: ThreadId


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first place where ranks of a group enter different collectives.

    Attributes:
        group: Name of the group.
        place: In the sequence, from 1.
        at: The entry that a peer never makes, if there is one; else that of the lowest rank.
        entered: What each rank enters there that comes so far, by rank.
        ended: Ranks of whole programs that enter nothing more, ascending.
    """

    group: str
    place: int
    at: Entered
    entered: tuple[Entered, ...]
    ended: tuple[int, ...] = ()

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that disagree, ascending."""
        return tuple(sorted((*(entry.rank for entry in self.entered), *self.ended)))

    def __str__(self) -> str:
        each = ", ".join(f"rank {entry.rank} enters '{entry.name}'" for entry in self.entered)
        return f"group '{self.group}', collective {self.place}: {each}"


class CollectiveOrder:
    """What ranks enter, gathered from the records of one process, or merged from those of several.

    Where records are lost, collectives may be: what comes later has no known place, and is not compared.

    Attributes:
        cut: Records were lost.
    """

    def __init__(self) -> None:
        self.cut = False
        self._groups: dict[str, dict[int, list[Entered]]] = {}

    def feed(self, records: Iterable[AnyRecord], names: Names) -> None:
        """Take in ``records`` of one process, and learn the names they define into ``names``, which is its own."""
        for record in records:
            if isinstance(record, Define):
                names.learn(record)
            elif isinstance(record, Lost):
                self.cut = self.cut or record.reason not in HARMLESS
            elif isinstance(record, Collective) and not self.cut:
                group = names.groups.get(record.collective_group, str(record.collective_group))
                entry = Entered(record.rank, names.site(record.site), record.op, record.thread)
                self._groups.setdefault(group, {}).setdefault(record.rank, []).append(entry)

    def merge(self, other: CollectiveOrder) -> None:
        """Add what another one has gathered of other ranks."""
        self.cut = self.cut or other.cut
        for group, ranks in other._groups.items():
            for rank, entered in ranks.items():
                self._groups.setdefault(group, {}).setdefault(rank, []).extend(entered)

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that have entered anything, ascending."""
        return tuple(sorted({rank for ranks in self._groups.values() for rank in ranks}))

    @property
    def compared(self) -> int:
        """Places of all groups to which at least two ranks have come."""
        return sum(sorted(map(len, ranks.values()))[-2] for ranks in self._groups.values() if len(ranks) > 1)

    def divergences(self, *, whole: bool = False, ranks: Collection[int] = ()) -> list[Divergence]:
        """At most one per group: what ranks enter later says nothing.

        Args:
            whole: The records are all of each rank's program: one that enters fewer collectives than its peers has
                left the rest out. Otherwise it has not come so far.
            ranks: All ranks of such a program. A collective is not for one rank alone: if only one enters a group, it
                waits for those that enter nothing together with others.
        """
        whole = whole and not self.cut
        groups = self._groups
        if whole:
            met = {rank for entered in groups.values() if len(entered) > 1 for rank in entered}
            idle: dict[int, list[Entered]] = {rank: [] for rank in ranks if rank not in met}
            groups = {name: idle | entered if len(entered) == 1 else entered for name, entered in groups.items()}
        found = (_first(group, entered, whole=whole) for group, entered in groups.items())
        return [divergence for divergence in found if divergence is not None]


def _first(group: str, ranks: Mapping[int, Sequence[Entered]], *, whole: bool) -> Divergence | None:
    for place in range(max(map(len, ranks.values()))):
        here = [entered[place] for _, entered in sorted(ranks.items()) if place < len(entered)]
        ended = tuple(rank for rank, entered in sorted(ranks.items()) if place >= len(entered)) if whole else ()
        if len({entry.name for entry in here}) == 1 and not ended:
            continue
        known = [{entry.name for entry in entered} for entered in ranks.values()]
        # A peer left it out, rather than coming to it later. Not by place in a file: between ranks that is no order.
        left_out = (entry for entry in here if any(entry.name not in names for names in known))
        return Divergence(group, place + 1, next(left_out, here[0]), tuple(here), ended)
    return None
