"""Blast radius: which requests read, and which pages held, wrong contents because of a race. Pure; fed in trace order.

What is right is what the operations do in the order in which they were issued. What is wrong after a race follows
from its two operations, the *first* and the *second* issued, if the second ran first:

* both write: the first's late write spoils the pages for the owner that the second wrote them for;
* the first reads: it has read what was not yet meant for it;
* the second reads: it has not read what it should have, unless that had been overwritten by then anyway.

If the order was kept, nothing is wrong. If they overlapped or were not measured, all of it may be. It spreads:

* a copy hands on what it reads: page by page if it reads as many as it writes, else all by all; for its own layers;
* a row of a forward round that reads a wrong page computes wrong contents: whatever it writes, at all layers, and
  its token. A round that does not state its rows (``Kernel.rows``) counts as one row;
* a copy cleans what it overwrites, at its layers. Rows write parts of pages and clean nothing. ``PageAlloc`` gives a
  page to a new owner, whose operations do not meet what older ones left there.

Where every operation has device times this is played in the order in which they started, and the radius is exact: no
more and no less than what became wrong, one page of a row's context, and what one row computes in one round, each
taken as a whole. Else it is played in the order of issue and contains all that can have become wrong.

A request that is retracted and starts over from wrong tokens is in the radius by what it read before; what it
computes afresh is right for those tokens. What a discarded row computed (``RowsDiscarded``) does not count for its
request.

Races are kept and played when somebody asks, or when history is full. With no race, the cost is one append per
operation.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache_obs.analyzer.shadow import Operation, Overlap
from hicache_obs.analyzer.spread import (
    COPIES,
    IO,
    Owners,
    Pool,
    Spread,
    Wrong,
    layer_mask,
    union,
)
from hicache_obs.findings import BlastRadius, Timing
from hicache_obs.records import Access, Mode, OpId, PageIds, Space

MAX_RECENT: Final = 4096
"""Operations kept for races that are noticed late."""
MAX_SOURCES: Final = 512
"""Races told apart; one more shares the radius of the latest of its kind."""
MAX_RACES: Final = 1 << 16
"""Operation pairs kept for playing, and fingerprints."""
MAX_PAIRS: Final = 1 << 16
"""Operation pairs that have a radius of their own."""

Pair = tuple[OpId, OpId]


@dataclass(frozen=True, slots=True, eq=False)
class _Race:
    """Two operations that nothing orders, or that ran in another order than was proven."""

    source: int
    first: Operation
    second: Operation
    overlaps: tuple[Overlap, ...]

    @property
    def mask(self) -> int:
        """Layers that both touch."""
        low, high = zip(self.first.layers, self.second.layers, strict=True)
        return layer_mask((max(low), min(high)))


class Taint:
    """Blast radius of every race of one trace. Feed in trace order; not thread-safe.

    Args:
        pairs: The newest operation pairs that ``radius`` knows; of older ones their fingerprint is left.
    """

    def __init__(self, pairs: int = MAX_PAIRS) -> None:
        self._max_pairs = pairs
        self._steps: list[Operation] = []
        self._allocations: list[tuple[int, Access]] = []
        self._discarded: dict[int, frozenset[int]] = {}
        self._races: list[_Race] = []
        self._past = Spread()
        self._past_started = 0
        """When the last of the operations that are in ``_past`` started."""
        self._past_end = -1
        """Position of the last operation that is in ``_past``."""
        self._played: Spread | None = None
        self._cut = 0
        self._groups: dict[tuple[int, int], int] = {}  # numbers of both page groups -> source
        self._kinds: dict[tuple[object, ...], int] = {}
        self._pairs: dict[Pair, int] = {}
        self._fingerprints: dict[str, int] = {}
        self._partial: set[str] = set()
        """Fingerprints with a race that was forgotten before it was named, or had no source."""

    def step(self, operation: Operation) -> None:
        """An operation was issued. Its races, if any, follow at once."""
        self._steps.append(operation)
        self._played = None
        if len(self._steps) > MAX_RECENT:
            self._forget()

    def steps(self, operations: Sequence[Operation]) -> None:
        """``step`` for each of them; they have no races."""
        if len(self._steps) + len(operations) <= MAX_RECENT:
            self._steps.extend(operations)
            self._played = None
        else:
            for operation in operations:
                self.step(operation)

    def allocate(self, seq: int, access: Access) -> None:
        """Pages got a new owner."""
        self._allocations.append((seq, access))
        self._played = None
        if len(self._allocations) > 4 * MAX_RECENT:
            self._forget()

    def discard(self, number: int, requests: PageIds) -> None:
        """What round ``number`` computed for ``requests`` is thrown away."""
        self._discarded[number] = self._discarded.get(number, frozenset()).union(requests.tolist())
        self._played = None
        if len(self._discarded) > MAX_RECENT:
            del self._discarded[next(iter(self._discarded))]

    def timed(self) -> None:
        """Device times became known."""
        self._played = None

    def race(self, first: Operation, second: Operation, overlaps: Iterable[Overlap]) -> None:
        """``second`` was issued after ``first``, and may have run before it or at once; it has been stepped."""
        source = self._source(first, second)
        if not source:
            return
        self._pairs[first.op, second.op] = self._pairs.get((first.op, second.op), 0) | source
        while len(self._pairs) > self._max_pairs:
            del self._pairs[next(iter(self._pairs))]
        self._played = None
        if len(self._races) < MAX_RACES:
            self._races.append(_Race(source, first, second, tuple(overlaps)))
        else:
            self._cut |= source

    def name(self, fingerprint: str, pair: Pair) -> None:
        """The race of ``pair`` was reported under ``fingerprint``, which is partial if the pair is no longer known."""
        known = self._fingerprints.get(fingerprint)
        if known is None and len(self._fingerprints) >= MAX_RACES:
            return
        source = self._pairs.get(pair, 0)
        self._fingerprints[fingerprint] = source | (known or 0)
        if not source:
            self._partial.add(fingerprint)

    def radius(self, race: str | Pair) -> BlastRadius:
        """What one race, or all races of one fingerprint, spoiled so far. Plays what was fed since the last call."""
        source = self._fingerprints.get(race, 0) if isinstance(race, str) else self._pairs.get(race, 0)
        if self._played is None:
            self._played = self._play(self._past, self._steps, self._races)
        reached = self._played.reached
        pages = self._played.ever(source)
        complete = bool(source) and not (reached.cut | self._cut) & source and race not in self._partial
        return BlastRadius(
            requests=_members(reached.requests, source),
            rounds=_members(reached.rounds, source),
            transfers=_members(reached.transfers, source),
            ios=_members(reached.ios, source),
            device_pages=tuple((pool, page) for space, pool, page in pages if space is Space.DEVICE),
            host_pages=tuple((pool, page) for space, pool, page in pages if space is Space.HOST),
            complete=complete,
            exact=complete and not reached.vague & source,
        )

    def _source(self, first: Operation, second: Operation) -> int:
        """Bit of the race: one per pair of page groups, so that the layers of a transfer share one."""
        groups = first.group.number, second.group.number
        source = self._groups.get(groups)
        kind = (*_kind(first), *_kind(second))
        if source is None:
            if len(self._groups) >= MAX_SOURCES:
                source = self._kinds.get(kind, 0)
                self._cut |= source
                return source
            source = self._groups[groups] = 1 << len(self._groups)
        self._kinds[kind] = source
        return source

    # -- playing ---------------------------------------------------------------------------------------------

    def _play(self, past: Spread, steps: Sequence[Operation], races: Sequence[_Race]) -> Spread:
        """What ``past`` has become after ``steps``."""
        if not races and past.empty:
            return past
        owners = Owners(self._allocations)
        spread = past.fork(owners, self._discarded)
        timed = all(map(_is_timed, steps))
        order = _started if timed else _issued
        known = set(steps)
        reads: dict[Operation, list[Wrong]] = {}
        after: dict[Operation, list[Wrong]] = {}
        crossing: list[Overlap] = []
        for race in races:
            timing = timing_of(race.first, race.second)
            if timing is Timing.KEPT:
                continue
            if race.first not in known or race.second not in known:
                spread.reached.cut |= race.source
                crossing += race.overlaps
            for overlap in race.overlaps:
                if timing is Timing.BROKEN and timed:
                    self._reversed(race, overlap, owners, reads, after)
                else:
                    spread.reached.vague |= race.source
                    _either(race, overlap, reads, after, last=max(race.first, race.second, key=order))
        if not timed:
            spread.reached.vague |= past.sources() | union(race.source for race in races)
        for operation in sorted(steps, key=order):
            spread.run(operation, reads.get(operation, ()))
            for wrong in after.get(operation, ()):
                spread.taint(wrong)
        for overlap in crossing:  # one of the two was played too early or too late for what else these pages held
            spread.reached.cut |= spread.held((overlap.space, overlap.pool), overlap.pages)
        if timed:
            for operation in steps:
                if _started(operation)[0] < self._past_started:  # a forgotten one that ran later was played before it
                    for access in operation.group.accesses:
                        spread.reached.cut |= spread.held((access.space, access.pool), access.ids)
        return spread

    def _reversed(
        self,
        race: _Race,
        overlap: Overlap,
        owners: Owners,
        reads: dict[Operation, list[Wrong]],
        after: dict[Operation, list[Wrong]],
    ) -> None:
        """What is wrong because the second operation ran before the first."""
        pool, first, second = (overlap.space, overlap.pool), race.first, race.second
        wrong = Wrong(pool, overlap.pages, race.mask, race.source, second.seq)
        if overlap.earlier is Mode.READ:
            reads.setdefault(first, []).append(wrong)
        elif overlap.later is Mode.WRITE:
            after.setdefault(first, []).append(wrong)
        else:
            meant = owners.before(pool, wrong.pages, first.seq) == owners.before(pool, wrong.pages, second.seq)
            parts = [(wrong.pages[meant], race.mask)]
            for access, mask in self._overwritten(pool, first, second):
                parts = [part for pages, left in parts for part in _without(pages, left, access.ids, mask)]
            reads.setdefault(second, []).extend(
                Wrong(pool, pages, mask, race.source, second.seq) for pages, mask in parts if len(pages) and mask
            )

    def _overwritten(self, pool: Pool, first: Operation, second: Operation) -> list[tuple[Access, int]]:
        """Whole pages written by copies issued between the two, and at which layers."""
        return [
            (access, layer_mask(operation.layers))
            for operation in self._steps
            if first.seq < operation.seq < second.seq and operation.label.what in COPIES
            for access in operation.group.accesses
            if access.mode is Mode.WRITE and (access.space, access.pool) == pool
        ]

    # -- bounds ----------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """Play the older half of history for good."""
        if not self._steps:
            self._forget_allocations()
            return
        spread = bool(self._races) or not self._past.empty
        end = self._cut_point() if spread else max(1, len(self._steps) // 2)
        old = self._steps[:end]
        races = [race for race in self._races if race.second.seq <= old[-1].seq]
        if races or not self._past.empty:
            self._past = self._play(self._past, old, races).fork(Owners(self._allocations), {})
            self._past.settle(old[-1].seq, {step.label.number for step in self._steps[end - 1 :]})
        self._past_end = old[-1].seq
        self._past_started = max(self._past_started, *(_started(operation)[0] for operation in old))
        del self._steps[:end]
        self._races = [race for race in self._races if race.second.seq > self._past_end]
        self._allocations = [item for item in self._allocations if item[0] > self._past_end]
        self._played = None

    def _forget_allocations(self) -> None:
        """Nothing that is kept was issued among them: whoever comes next finds the last owners."""
        if not self._past.empty:
            self._past = self._past.fork(Owners(self._allocations), {})
            self._past.settle(self._allocations[-1][0] + 1)
        self._allocations.clear()

    def _cut_point(self) -> int:
        """How many of the oldest steps to forget: if it can be, all of them had run before the rest began.

        Otherwise what is played on either side may have come the other way round, and ``_play`` sees to that.
        """
        steps = self._steps
        starts = np.array([_started(operation)[0] for operation in steps])  # nothing starts before it is issued
        last = np.maximum.accumulate(starts)[:-1]
        timed = np.logical_and.accumulate(list(map(_is_timed, steps)))[:-1]
        good = np.flatnonzero(timed & (last < np.minimum.accumulate(starts[::-1])[::-1][1:])) + 1
        good = good[good <= (3 * len(steps)) // 4]
        if len(good) and good[-1] >= len(steps) // 4:
            return int(good[-1])
        return max(1, len(steps) // 2)


def timing_of(first: Operation, second: Operation) -> Timing:
    """Whether two measured operations ran in the order of issue; ``UNTIMED`` also if they overlapped."""
    if first.start_ns is None or first.end_ns is None or second.start_ns is None or second.end_ns is None:
        return Timing.UNTIMED
    tolerance = first.error_ns + second.error_ns
    if second.start_ns >= first.end_ns - tolerance:
        return Timing.KEPT
    return Timing.BROKEN if second.end_ns <= first.start_ns + tolerance else Timing.UNTIMED


def _either(
    race: _Race,
    overlap: Overlap,
    reads: dict[Operation, list[Wrong]],
    after: dict[Operation, list[Wrong]],
    *,
    last: Operation,
) -> None:
    """What may be wrong if the two ran in either order or at once."""
    wrong = Wrong((overlap.space, overlap.pool), overlap.pages, race.mask, race.source, race.second.seq)
    if overlap.earlier is Mode.READ:
        reads.setdefault(race.first, []).append(wrong)
    if overlap.later is Mode.READ:
        reads.setdefault(race.second, []).append(wrong)
    if overlap.earlier is Mode.WRITE and overlap.later is Mode.WRITE:
        after.setdefault(last, []).append(wrong)


def _without(pages: PageIds, mask: int, ids: PageIds, gone: int) -> list[tuple[PageIds, int]]:
    hit = np.isin(pages, ids)
    return [(pages[~hit], mask), (pages[hit], mask & ~gone)]


def _is_timed(operation: Operation) -> bool:
    """Whether it is known when an operation started, surely enough to tell it from its neighbours."""
    if operation.start_ns is None or operation.end_ns is None:
        return operation.label.what == "host" or operation.label.what in IO
    return not operation.error_ns or operation.end_ns - operation.start_ns > 2 * operation.error_ns


def _started(operation: Operation) -> tuple[int, int]:
    """Sorts by start. What has no device times begins when it is issued."""
    return operation.issued_ns if operation.start_ns is None else operation.start_ns, operation.seq


def _issued(operation: Operation) -> tuple[int, int]:
    return operation.seq, operation.seq


def _kind(operation: Operation) -> tuple[object, ...]:
    return operation.label.what, operation.label.site, operation.label.stream


def _members(table: dict[int, int], source: int) -> tuple[int, ...]:
    return tuple(sorted(key for key, sources in table.items() if sources & source))
