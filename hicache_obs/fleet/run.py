"""``analyse_fleet``: every rank by itself, then ranks that must agree side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

from hicache_obs import __version__
from hicache_obs.fleet.agreement import Bounds, Comparison, clock_bounds, compare
from hicache_obs.fleet.decisions import COLLECTIVES, Decision, Decisions, SequenceName
from hicache_obs.fleet.peers import Group, find_groups
from hicache_obs.fleet.places import RankPlace
from hicache_obs.fleet.rank import AnalysedRank, RankSummary, analyse_rank, find_decision, summary_of

MAX_SIDES: Final = 64
"""Ranks of one divergence whose decisions are read again to be shown."""
Progress = Callable[[str, int, int], None]


class WorkerLost(Exception):
    """A task was given up because the workers that ran it died, again and again; the text says what is known."""


class Executor(Protocol):
    """Runs tasks. All functions given to it are pure."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """A handle of ``function(*arguments)``; an argument may be the handle of another task."""

    def results(self, handles: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Place in ``handles`` and result of each, as they end; a ``WorkerLost`` stands for a result that never came.

        Raises:
            Exception: What the function raised.
        """


@dataclass(frozen=True, slots=True)
class Side:
    """Ranks that took one decision where others took another.

    Attributes:
        numbers: Places of the ranks.
        decision: Of the first of them; ``None`` if its records do not hold it any more.
    """

    numbers: tuple[int, ...]
    decision: Decision | None


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where a group fell apart.

    Attributes:
        position: Number of the decision, from 0, in the sequence of the group's first member.
        sides: That of the first member first.
    """

    position: int
    sides: tuple[Side, ...]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What a group's comparison gave.

    Attributes:
        group: Which ranks and sequences.
        decisions: Of the first member.
        compared: Of each other member, in order: how many decisions are the same.
        undecided: Ranks of which nothing could be compared.
        divergence: The first, if there is one.
    """

    group: Group
    decisions: int
    compared: tuple[int, ...]
    undecided: tuple[int, ...]
    divergence: Divergence | None


@dataclass(frozen=True, slots=True)
class Clock:
    """How far a rank's clock is ahead of another's.

    Attributes:
        number, against: Places of the ranks.
        bounds: ``None`` if it cannot be told.
        wall: It is the wall clock of the journals' headers, not the host clock of the records.
    """

    number: int
    against: int
    bounds: Bounds | None
    wall: bool


@dataclass(frozen=True, slots=True)
class Fleet:
    """What all ranks gave, in the order of their places. The same for the same records, whoever ran the tasks."""

    ranks: tuple[RankSummary, ...]
    groups: tuple[GroupResult, ...]
    clocks: tuple[Clock, ...]
    notes: tuple[str, ...]


def analyse_fleet(places: Sequence[RankPlace], executor: Executor, progress: Progress) -> Fleet:
    """Analyse the ranks at ``places``.

    Args:
        places: As ``find_ranks`` gave them.
        executor: Runs the tasks.
        progress: Told the stage, how many of its tasks are done, and of how many.
    """
    analysed = [executor.submit(analyse_rank, place) for place in places]
    summaries: list[RankSummary | None] = [None] * len(places)
    handles = [executor.submit(summary_of, handle) for handle in analysed]
    for done, (number, result) in enumerate(executor.results(handles), 1):
        summaries[number] = _readable(places[number], result)
        progress("ranks", done, len(places))
    ranks = tuple(summary for summary in summaries if summary is not None)
    assert len(ranks) == len(places)
    groups, notes = find_groups(ranks)
    pairs = _compared(analysed, groups, executor, progress)
    results = _divergences(ranks, groups, pairs, executor, progress)
    return Fleet(ranks, tuple(results), tuple(_clocks(ranks, groups, pairs)), tuple(notes))


def _readable(place: RankPlace, result: RankSummary | WorkerLost) -> RankSummary:
    if isinstance(result, WorkerLost):
        return RankSummary(place, error=f"{place.place}: {result}")
    if result.version != __version__:
        what = f"analysed by hicache-obs {result.version}, this is {__version__}; install one version everywhere"
        return RankSummary(place, error=f"{place.place}: {what}")
    return result


# -- comparisons ------------------------------------------------------------------------------------------------

_Pairs = dict[tuple[int, int], tuple[Comparison, Bounds | None] | None]
"""By group and place of a member in it; ``None`` if the comparison was given up."""


def compare_pair(
    first: AnalysedRank, second: AnalysedRank, names: Sequence[tuple[SequenceName, SequenceName]]
) -> list[tuple[Comparison, Bounds | None]]:
    """Sequences of two ranks side by side. A task."""
    found: list[tuple[Comparison, Bounds | None]] = []
    for one, other in names:
        a, b = first.sequences.get(one, Decisions()), second.sequences.get(other, Decisions())
        comparison = compare(a, b)
        bounds = clock_bounds(a, b, comparison.aligned) if one.kind == COLLECTIVES else None
        found.append((replace(comparison, aligned=()), bounds))
    return found


def _compared(analysed: Sequence[Any], groups: Sequence[Group], executor: Executor, progress: Progress) -> _Pairs:
    """Every member of a group beside the group's first one; what two ranks share is one task."""
    wanted: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for index, group in enumerate(groups):
        for place, member in enumerate(group.members[1:], 1):
            wanted.setdefault((group.members[0].number, member.number), []).append((index, place))
    tasks = []
    for (first, second), keys in wanted.items():
        names = [(groups[g].members[0].sequence, groups[g].members[place].sequence) for g, place in keys]
        tasks.append(executor.submit(compare_pair, analysed[first], analysed[second], names))
    found: _Pairs = {}
    lists = list(wanted.values())
    for done, (number, result) in enumerate(executor.results(tasks), 1):
        given = [None] * len(lists[number]) if isinstance(result, WorkerLost) else result
        found.update(zip(lists[number], given, strict=True))
        progress("comparing", done, len(tasks))
    return found


def _divergences(
    ranks: Sequence[RankSummary], groups: Sequence[Group], pairs: _Pairs, executor: Executor, progress: Progress
) -> list[GroupResult]:
    """The result of each group, with the decisions at the first place where it fell apart."""
    firsts = {}
    for index, group in enumerate(groups):
        places = {
            place: pair[0].difference
            for place in range(1, len(group.members))
            if (pair := pairs[index, place]) is not None and pair[0].difference is not None
        }
        if places:
            position = min(at for at, _ in places.values())
            firsts[index] = position, {place: to for place, (at, to) in places.items() if at == position}
    asked = [
        (index, place, at)
        for index, (position, others) in firsts.items()
        for place, at in [(0, position), *sorted(others.items())[:MAX_SIDES]]
    ]
    tasks = []
    for index, place, at in asked:
        member = groups[index].members[place]
        tasks.append(executor.submit(find_decision, ranks[member.number].place, member.sequence, at))
    decisions: dict[tuple[int, int], Decision | None] = {}
    for done, (number, result) in enumerate(executor.results(tasks), 1):
        decisions[asked[number][:2]] = None if isinstance(result, WorkerLost) else result
        progress("reading divergences", done, len(tasks))
    return [_result(ranks, index, group, pairs, firsts.get(index), decisions) for index, group in enumerate(groups)]


def _result(
    ranks: Sequence[RankSummary],
    index: int,
    group: Group,
    pairs: _Pairs,
    first: tuple[int, dict[int, int]] | None,
    decisions: dict[tuple[int, int], Decision | None],
) -> GroupResult:
    others = [pairs[index, place] for place in range(1, len(group.members))]
    reference = group.members[0]
    divergence = None
    if first is not None:
        position, apart = first
        sides: dict[str, list[int]] = {"": [reference.number]}
        shown = {"": decisions.get((index, 0))}
        for place, member in enumerate(group.members[1:], 1):
            pair = pairs[index, place]
            if place in apart:
                decision = decisions.get((index, place))
                text = decision.text if decision is not None else "?"
                sides.setdefault(text, []).append(member.number)
                shown.setdefault(text, decision)
            elif pair is not None and pair[0].compared > position:
                sides[""].append(member.number)
        divergence = Divergence(position, tuple(Side(tuple(numbers), shown[text]) for text, numbers in sides.items()))
    return GroupResult(
        group,
        ranks[reference.number].lengths.get(reference.sequence, (0, True))[0],
        tuple(0 if pair is None else pair[0].compared for pair in others),
        tuple(
            member.number
            for member, pair in zip(group.members[1:], others, strict=True)
            if pair is None or not pair[0].decided
        ),
        divergence,
    )


def _clocks(ranks: Sequence[RankSummary], groups: Sequence[Group], pairs: _Pairs) -> list[Clock]:
    """Every member of a collective group beside the group's first one; what several groups say is put together.

    A group whose calls do not block fits no distance by itself and says nothing, if another one does.
    """
    found: dict[tuple[int, int], list[Bounds]] = {}
    for index, group in enumerate(groups):
        if group.kind != COLLECTIVES:
            continue
        for place, member in enumerate(group.members[1:], 1):
            said = found.setdefault((member.number, group.members[0].number), [])
            pair = pairs[index, place]
            if pair is not None and pair[1] is not None:
                said.append(pair[1])
    return [_clock(ranks, number, against, _together(said)) for (number, against), said in sorted(found.items())]


def _together(said: Sequence[Bounds]) -> Bounds | None:
    """The tightest of all that fit a distance by themselves; of none, the one that misses by least."""
    fitting = [bounds for bounds in said if bounds.low_ns <= bounds.high_ns]
    if not fitting:
        return min(said, key=lambda bounds: bounds.low_ns - bounds.high_ns, default=None)
    low, high = max(bounds.low_ns for bounds in fitting), min(bounds.high_ns for bounds in fitting)
    return Bounds(low, high, sum(bounds.count for bounds in fitting))


def _clock(ranks: Sequence[RankSummary], number: int, against: int, bounds: Bounds | None) -> Clock:
    ours, theirs = ranks[number].wall_ahead_ns, ranks[against].wall_ahead_ns
    wall = ours is not None and theirs is not None
    if bounds is not None and ours is not None and theirs is not None:
        ahead = ours - theirs
        bounds = replace(bounds, low_ns=bounds.low_ns + ahead, high_ns=bounds.high_ns + ahead)
    return Clock(number, against, bounds, wall)


# -- without workers ----------------------------------------------------------------------------------------------


class Inline:
    """An ``Executor`` that runs every task here, when its result is asked for."""

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See ``Executor``."""
        return _Later(function, arguments)

    def results(self, handles: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """See ``Executor``."""
        for number, handle in enumerate(handles):
            yield number, handle.get()


class _Later:
    """A task and, once it has run, its result."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        self._function = function
        self._arguments = arguments
        self._result: list[Any] = []

    def get(self) -> Any:
        if not self._result:
            values = [value.get() if isinstance(value, _Later) else value for value in self._arguments]
            self._result.append(self._function(*values))
        return self._result[0]
