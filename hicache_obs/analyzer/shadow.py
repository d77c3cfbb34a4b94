"""Page shadow: for each access, the earlier operations that conflict with it and are not surely ordered.

Exact for all pairs inside the retained history, and cheap when everything is ordered:

* Consecutive operations of one actor that touch the *same page arrays* over different layers form a *group* (a
  load-back's layer copies, a forward round's layer segments). Page sets are looked at once per group.
* Per space and pool, two arrays hold the number of the last group that wrote, and that touched, each page.
  Group numbers increase in issue order, so one gather and a maximum prove "everything that touched these pages
  is older than the oldest group that is not ordered": the fast path, independent of the number of readers.
* Otherwise only groups with an unordered operation are looked at, by layer first and by page second; the page
  intersection of two groups is computed once.

Completeness follows from keeping every operation until each host thread knows it to be complete, bounded by
``MAX_GROUPS`` per actor (older ones are counted in ``forgotten``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.analyzer.order import Actor, Clock
from hicache_obs.errors import TraceError
from hicache_obs.records import MAX_IDS, Access, Mode, OpId, PageIds, Space, StreamId, ThreadId

MAX_GROUPS: Final = 8192
_NO_PAGES: Final = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What an operation is, for classification and for people.

    Attributes:
        what: ``forward``, ``restore``, ``backup``, ``copy``, ``kernel`` (touches no KV page), ``graph``, ``relocate``,
            ``storage``, ``device read``, ``rdma`` (I/O in no stream) or ``host``.
        site: Id of the code site.
        stream: ``None`` for a host access.
        number: Round id or transfer id.
        thread: Issuing host thread.
    """

    what: str
    site: int
    stream: StreamId | None
    number: int
    thread: ThreadId


@dataclass(slots=True, eq=False)
class Operation:
    """One operation in the history.

    Attributes:
        op: Operation id.
        epoch: Its count on its actor.
        seq: Position in the trace.
        layers: Half-open layer range.
        issued_ns: Host clock at the call.
        label: What it is.
        group: Group it belongs to.
        unordered: Earlier operations that conflict and are not proven ordered.
        start_ns, end_ns, error_ns: Device times once known, else ``None``.
    """

    op: OpId
    epoch: int
    seq: int
    layers: tuple[int, int]
    issued_ns: int
    label: Label
    group: Group
    unordered: tuple[OpId, ...] = ()
    start_ns: int | None = None
    end_ns: int | None = None
    error_ns: int = 0


@dataclass(slots=True, eq=False)
class Group:
    """Operations of one actor over the same pages.

    Attributes:
        number: Increases in order of each group's first operation.
        actor: Stream or host thread.
        accesses: What every member touches.
        members: In issue order; their layer ranges ascend without overlap, so a layer is found by bisection.
        shared: Page sets shared with another group, by that group's number.
        safe, seen: No group numbered in ``(safe, seen]`` shares a page with this one.
        prior: Numbers of the groups that last touched these pages before this group, newest only where they
            may still run; what the measured check and the fence cost compare with.
    """

    number: int
    actor: Actor
    accesses: tuple[Access, ...]
    members: list[Operation] = field(default_factory=list)
    shared: dict[int, tuple[Overlap, ...]] = field(default_factory=dict)
    safe: int = 0
    seen: int = 0
    prior: tuple[Group, ...] = ()

    def overlapping(self, layers: tuple[int, int], after: int) -> Iterator[Operation]:
        """Members past epoch ``after`` whose layers overlap ``layers``."""
        low, high = layers
        members = self.members
        first = bisect_right(members, after, key=_epoch)
        for member in members[max(first, bisect_right(members, low, key=_layer_end)) :]:
            if member.layers[0] >= high:
                return
            yield member


@dataclass(frozen=True, slots=True, eq=False)
class Overlap:
    """Pages two groups share through one access of each, at least one of which writes."""

    space: Space
    pool: int
    earlier: Mode
    later: Mode
    pages: PageIds


def _seq(conflict: Conflict) -> int:
    return conflict.earlier.seq


def _epoch(operation: Operation) -> int:
    return operation.epoch


def _layer_end(operation: Operation) -> int:
    return operation.layers[1]


def _last_epoch(group: Group) -> int:
    return group.members[-1].epoch


@dataclass(slots=True)
class _Cells:
    """Last group per page of one space and pool; grows to the largest id seen."""

    wrote: npt.NDArray[np.int64]
    touched: npt.NDArray[np.int64]
    scratch: npt.NDArray[np.bool_]
    freed: npt.NDArray[np.int64]
    moved: npt.NDArray[np.int64]

    @classmethod
    def empty(cls) -> _Cells:
        empty = np.zeros(0, np.int64)
        return cls(empty, empty, np.zeros(0, np.bool_), empty, empty)

    def reach(self, ids: PageIds) -> None:
        """Make room for ``ids``."""
        top = int(ids.max()) + 1
        if top > MAX_IDS or int(ids.min()) < 0:
            raise TraceError(f"page or buffer ids {int(ids.min())} to {top - 1}; expected 0 to {MAX_IDS - 1}")
        if top > len(self.wrote):
            size = max(1024, top, 2 * len(self.wrote))
            for name in ("wrote", "touched", "scratch", "freed", "moved"):
                old = getattr(self, name)
                new = np.zeros(size, old.dtype)
                new[: len(old)] = old
                setattr(self, name, new)


@dataclass(frozen=True, slots=True, eq=False)
class Conflict:
    """An earlier operation that touches the same pages and layers and is not surely ordered."""

    earlier: Operation
    overlaps: tuple[Overlap, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Lookup:
    """One access looked up: how many of its pages a conflicting access had touched before."""

    access: Access
    pairs: int


class Shadow:
    """Who touched which page last, and who may still be touching it. Feed in trace order; not thread-safe."""

    def __init__(self) -> None:
        self._cells: dict[tuple[Space, int], _Cells] = {}
        self._history: dict[Actor, list[Group]] = {}
        self._groups = 0
        self._by_number: dict[int, Group] = {}
        self.forgotten = 0
        """Groups dropped from a full history while they could still have raced."""

    def enter(
        self,
        actor: Actor,
        accesses: tuple[Access, ...],
        layers: tuple[int, int],
        clock: Clock,
        make: Callable[[Group], Operation],
    ) -> tuple[Operation, list[Conflict], list[Lookup]]:
        """Add an operation; tell what it conflicts with.

        Args:
            actor: Stream or thread of the operation.
            accesses: What it touches.
            layers: Half-open layer range.
            clock: The actor's guaranteed clock before the operation.
            make: Builds the operation, given its group.

        Returns:
            The operation; its conflicts with unordered earlier operations, oldest first; and one look-up per
            access (none for a further member of a group: its pages were looked up with the first).
        """
        group, fresh = self._group_of(actor, layers, accesses)
        candidates = self._unordered(actor, clock)
        lookups: list[Lookup] = []
        if fresh:
            group.safe = min((found.number for found, _ in candidates), default=group.number) - 1
            lookups = self._open(group)
        operation = make(group)
        conflicts = [
            Conflict(earlier, overlaps)
            for candidate, after in candidates
            if (overlaps := self.shared(group, candidate))
            for earlier in candidate.overlapping(layers, after)
        ]
        group.members.append(operation)
        conflicts.sort(key=_seq)
        return operation, conflicts, lookups

    @property
    def retained(self) -> int:
        """Groups in the history."""
        return sum(map(len, self._history.values()))

    def shared(self, group: Group, earlier: Group) -> tuple[Overlap, ...]:
        """Pages ``group`` shares with a group opened before it, conflicting accesses only."""
        if group.safe < earlier.number <= group.seen:
            return ()
        shared = group.shared.get(earlier.number)
        if shared is None:
            shared = group.shared[earlier.number] = tuple(self._overlaps(group, earlier))
        return shared

    def note_free(self, access: Access, seq: int) -> None:
        """The ids were given back to their allocator at ``seq``."""
        if len(access.ids):
            self._reach(access).freed[access.ids] = seq + 1

    def note_move(self, access: Access, seq: int) -> None:
        """The contents of the ids were moved elsewhere at ``seq``."""
        if len(access.ids):
            self._reach(access).moved[access.ids] = seq + 1

    def ever_written(self, access: Access) -> npt.NDArray[np.bool_]:
        """For each id, whether an operation has written it since the trace began."""
        return self._reach(access).wrote[access.ids] > 0

    def freed_since(self, overlap: Overlap, seq: int) -> bool:
        """Whether a shared page was given back after ``seq``."""
        cells = self._cells[overlap.space, overlap.pool]
        return bool((cells.freed[overlap.pages] > seq + 1).any())

    def moved_since(self, overlap: Overlap, seq: int) -> bool:
        """Whether a shared page was moved away after ``seq``."""
        cells = self._cells[overlap.space, overlap.pool]
        return bool((cells.moved[overlap.pages] > seq + 1).any())

    def _reach(self, access: Access) -> _Cells:
        cells = self._cells.get((access.space, access.pool))
        if cells is None:
            cells = self._cells[access.space, access.pool] = _Cells.empty()
        cells.reach(access.ids)
        return cells

    def prune(self, floor: Clock) -> None:
        """Forget operations that every host thread knows to be complete (``Order.floor``)."""
        for actor, history in self._history.items():
            known = floor[actor] if actor < len(floor) else 0
            done = bisect_right(history, known, key=_last_epoch)
            overflow = len(history) - done - MAX_GROUPS
            if overflow > 0:
                self.forgotten += overflow
                done += overflow
            done = min(done, len(history) - 1)  # the newest may still grow
            del history[:done]
        while len(self._by_number) > MAX_GROUPS:
            group = self._by_number.pop(next(iter(self._by_number)))
            group.shared.clear()
            group.prior = ()  # else groups would keep each other alive for ever

    def _group_of(self, actor: Actor, layers: tuple[int, int], accesses: tuple[Access, ...]) -> tuple[Group, bool]:
        history = self._history.setdefault(actor, [])
        if history:
            latest = history[-1]
            last = latest.members[-1].layers
            if last[1] <= layers[0] and _same(latest.accesses, accesses):
                return latest, False
        self._groups += 1
        group = Group(self._groups, actor, accesses)
        history.append(group)
        self._by_number[group.number] = group
        return group, True

    def _unordered(self, actor: Actor, clock: Clock) -> list[tuple[Group, int]]:
        """Groups of other actors with an operation past ``clock``, and the ordered epoch of their actor."""
        found: list[tuple[Group, int]] = []
        for other, history in self._history.items():
            if other == actor:
                continue
            known = clock[other] if other < len(clock) else 0
            if history and _last_epoch(history[-1]) > known:
                first = bisect_right(history, known, key=_last_epoch)
                found.extend((group, known) for group in history[first:])
        return found

    def _open(self, group: Group) -> list[Lookup]:
        """Look the new group's pages up, then mark them."""
        lookups = []
        clear = True
        prior: set[int] = set()
        for access in group.accesses:
            if not len(access.ids):
                continue
            cells = self._reach(access)
            source = cells.touched if access.mode is Mode.WRITE else cells.wrote
            last = source.take(access.ids)
            lookups.append(Lookup(access, int(np.count_nonzero(last))))
            newest = int(last.max())
            if newest > group.safe:
                clear = False
            prior.update((newest,) if int(last.min()) == newest else np.unique(last).tolist())
        for access in group.accesses:
            if len(access.ids):
                cells = self._cells[access.space, access.pool]
                cells.touched[access.ids] = group.number
                if access.mode is Mode.WRITE:
                    cells.wrote[access.ids] = group.number
        group.seen = group.number - 1 if clear else group.safe
        group.prior = tuple(self._by_number[number] for number in sorted(prior) if number in self._by_number)
        return lookups

    def _overlaps(self, group: Group, earlier: Group) -> Iterator[Overlap]:
        for mine in group.accesses:
            for theirs in earlier.accesses:
                if mine.mode is Mode.READ and theirs.mode is Mode.READ:
                    continue
                if mine.space is not theirs.space or mine.pool != theirs.pool:
                    continue
                pages = self._intersect(mine, theirs)
                if len(pages):
                    yield Overlap(mine.space, mine.pool, theirs.mode, mine.mode, pages)

    def _intersect(self, a: Access, b: Access) -> PageIds:
        if not len(a.ids) or not len(b.ids):
            return _NO_PAGES
        scratch = self._cells[a.space, a.pool].scratch
        scratch[a.ids] = True
        pages: PageIds = b.ids[scratch[b.ids]]
        scratch[a.ids] = False
        return pages


def _same(a: tuple[Access, ...], b: tuple[Access, ...]) -> bool:
    """Both touch the same page array objects in the same way."""
    return len(a) == len(b) and all(
        x.ids is y.ids and x.mode is y.mode and x.space is y.space and x.pool == y.pool
        for x, y in zip(a, b, strict=True)
    )
