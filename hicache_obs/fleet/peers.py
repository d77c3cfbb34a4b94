"""Which ranks are to be compared with each other, and with which of them.

*Servers.* Ranks of one role are of one server as long as no two of them are the same worker (tensor-, pipeline- and
data-parallel rank). Where two are, as with the former runs of a server that was started again, ranks are told apart by
their node, and on one node by when they ran: those of a server run at the same time. Where neither tells, they are not
compared, and that is said.

*Groups.* Within a server, the tensor-parallel ranks of one pipeline stage and one data-parallel replica must take the
same cache decisions; and all members of a collective group must enter the same collectives. A name that several
members of a server use for the same place in a group stands for one group per stage and replica.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from hicache_obs.fleet.decisions import CACHE, COLLECTIVES, SequenceName
from hicache_obs.fleet.rank import RankSummary

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Member:
    """One rank's sequence; ``number`` is the rank's place among all that were analysed."""

    number: int
    sequence: SequenceName


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences that must be the same.

    Attributes:
        kind: ``CACHE`` or ``COLLECTIVES``.
        name: For people.
        members: The one that the others are compared with comes first: complete from its first decision if any is,
            and the longest.
    """

    kind: str
    name: str
    members: Sequence[Member]


def find_groups(ranks: Sequence[RankSummary]) -> tuple[list[Group], list[str]]:
    """All groups of two or more, and what cannot be compared, in words."""
    groups: list[Group] = []
    notes: list[str] = []
    for server in _servers(ranks, notes):
        groups += _cache_groups(ranks, server)
        groups += _collective_groups(ranks, server, notes)
    return groups, notes


def _worker(rank: RankSummary) -> tuple[str, int, int, int]:
    place = rank.place
    return place.role, place.ranks.dp, place.ranks.pp, place.ranks.tp


def _servers(ranks: Sequence[RankSummary], notes: list[str]) -> list[list[int]]:
    """The ranks of each server, by their places in ``ranks``."""
    servers: list[list[int]] = []
    readable = [number for number, rank in enumerate(ranks) if not rank.error]
    for role, of_role in _by(readable, lambda n: ranks[n].place.role).items():
        if _distinct(ranks, of_role):
            servers.append(of_role)
            continue
        for node, of_node in _by(of_role, lambda n: ranks[n].place.node).items():
            parts = [of_node] if _distinct(ranks, of_node) else _by_time(ranks, of_node)
            if all(_distinct(ranks, part) for part in parts):
                servers += parts
            else:
                what = f"{role or 'ranks'} of {node}"
                notes.append(
                    f"{what}: several recordings of the same worker overlap in time, so it cannot be told which ranks "
                    "belong together; name the journals of one server only"
                )
    return servers


def _by_time(ranks: Sequence[RankSummary], numbers: Iterable[int]) -> list[list[int]]:
    """Ranks whose recordings overlap in time, directly or through others."""
    parts: list[list[int]] = []
    until = 0
    for number in sorted(numbers, key=lambda n: (_begin(ranks[n]), n)):
        if not parts or _begin(ranks[number]) > until:
            parts.append([])
        parts[-1].append(number)
        until = max(until, _begin(ranks[number]) + ranks[number].end_ns - ranks[number].begin_ns)
    return [sorted(part) for part in parts]


def _begin(rank: RankSummary) -> int:
    return rank.begin_ns + (rank.wall_ahead_ns or 0)


def _distinct(ranks: Sequence[RankSummary], numbers: Sequence[int]) -> bool:
    return len({_worker(ranks[number]) for number in numbers}) == len(numbers)


def _cache_groups(ranks: Sequence[RankSummary], server: Sequence[int]) -> list[Group]:
    found = []
    for (dp, pp), peers in _by(server, lambda n: (ranks[n].place.ranks.dp, ranks[n].place.ranks.pp)).items():
        if len(peers) < 2:
            continue
        names = sorted({name for number in peers for name in ranks[number].lengths if name.kind == CACHE})
        for name in names:
            members = [Member(number, name) for number in peers]
            text = f"{_place(ranks, peers)}dp{dp} pp{pp}, thread {name.name}"
            found.append(Group(CACHE, text, _reference_first(ranks, members)))
    return found


def _collective_groups(ranks: Sequence[RankSummary], server: Sequence[int], notes: list[str]) -> list[Group]:
    members = [Member(n, name) for n in server for name in ranks[n].lengths if name.kind == COLLECTIVES]
    found = []
    for group, whole in _by(members, lambda member: member.sequence.name).items():
        parts = {"": whole}
        if not _one_each(whole):
            parts = _by(whole, lambda m: f"dp{ranks[m.number].place.ranks.dp} pp{ranks[m.number].place.ranks.pp}, ")
        for where, part in sorted(parts.items()):
            text = f"{_place(ranks, [m.number for m in part])}{where}group {group}"
            if not _one_each(part):
                notes.append(f"{text}: two ranks claim the same place in it, so its members cannot be told apart")
            elif len(part) > 1:
                found.append(Group(COLLECTIVES, text, _reference_first(ranks, part)))
    return sorted(found, key=lambda group: group.name)


def _one_each(members: Sequence[Member]) -> bool:
    return len({member.sequence.member for member in members}) == len(members)


def _place(ranks: Sequence[RankSummary], numbers: Sequence[int]) -> str:
    nodes = {ranks[number].place.node for number in numbers}
    return f"{nodes.pop()} " if len(nodes) == 1 else ""


def _reference_first(ranks: Sequence[RankSummary], members: Sequence[Member]) -> list[Member]:
    def best(member: Member) -> tuple[bool, int, int]:
        length, from_start = ranks[member.number].lengths.get(member.sequence, (0, True))
        return not (from_start and length), -length, member.number

    return sorted(members, key=best)


def _by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """``items`` by ``key``, in order of first appearance."""
    found: dict[K, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found
