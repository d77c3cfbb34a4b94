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
from collections.abc import Iterator
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs._struct import Struct
from hicache_obs.analyzer.order import Actor, Clock
from hicache_obs.analyzer.page_table import PageTable
from hicache_obs.records import Access, Mode, OpId, PageIds, Space, StreamId, ThreadId

MAX_GROUPS: Final = 8192
MAX_KEPT_IDS: Final = 1 << 22
"""Page ids in the groups that measured times are compared with; their arrays take at most eight bytes for each."""
_OWNED: Final = 2 * MAX_GROUPS
_MAX_OWNERS: Final = 64
_NO_PAGES: Final = np.empty(0, np.int64)


class Label(Struct, frozen=True, eq=False, gc=False):
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


class Operation(Struct, eq=False):
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
        within: It is an entry of a graph replay, whose times are those of the whole replay: it ran sometime in them.
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
    within: bool = False

    def set_times(self, start_ns: int, end_ns: int, error_ns: int) -> None:
        """The device times are known."""
        self.start_ns, self.end_ns, self.error_ns = start_ns, end_ns, error_ns
        group = self.group
        if end_ns > group.end_ns:
            group.end_ns = end_ns
        if end_ns - error_ns > group.surely_until_ns:
            group.surely_until_ns = end_ns - error_ns


class Group(Struct, eq=False):
    """Operations of one actor over the same pages.

    Attributes:
        number: Increases in order of each group's first operation.
        actor: Stream or host thread.
        accesses: What every member touches.
        members: In issue order; their layer ranges ascend without overlap.
        epochs, ends: Epoch and end of the layer range of each member, for bisection.
        shared: Page sets shared with another group, by that group's number.
        safe, seen: No group of another actor numbered in ``(safe, seen]`` shares a page with this one.
        prior: The groups of other actors that last touched these pages before this group, as far as they are
            kept; what the measured check and the fence cost compare with.
        owned_at: Number of allocator calls when all pages were last found to be used by their owner.
        end_ns, surely_until_ns: Latest end of a member whose times are known; the same less its error. 0 without.
    """

    number: int
    actor: Actor
    accesses: tuple[Access, ...]
    members: list[Operation]
    epochs: list[int]
    ends: list[int]
    shared: dict[int, tuple[Overlap, ...]]
    safe: int = 0
    seen: int = 0
    prior: tuple[Group, ...] = ()
    owned_at: int = 0
    end_ns: int = 0
    surely_until_ns: int = 0

    def overlapping(self, layers: tuple[int, int], after: int) -> list[Operation]:
        """Members past epoch ``after`` whose layers overlap ``layers``."""
        low, high = layers
        first = bisect_right(self.ends, low)
        if after:
            first = max(first, bisect_right(self.epochs, after))
        members = self.members
        last = first
        while last < len(members) and members[last].layers[0] < high:
            last += 1
        return members[first:last]


class Overlap(Struct, frozen=True, eq=False):
    """Pages two groups share through one access of each, at least one of which writes."""

    space: Space
    pool: int
    earlier: Mode
    later: Mode
    pages: PageIds


def _seq(conflict: Conflict) -> int:
    return conflict.earlier.seq


def _last_epoch(group: Group) -> int:
    return group.epochs[-1]


class _Owners:
    """Which groups are an actor's own, to find the others' among the last groups of a page set.

    Args:
        groups: The groups kept, by number; a view.
    """

    def __init__(self, groups: dict[int, Group]) -> None:
        self._groups = groups
        self._base = 0
        """Group ``n`` is at ``n - _base``; older groups count as at 0, which is everybody's own."""
        self._newest = 0
        self._own: dict[Actor, npt.NDArray[np.bool_]] = {}
        self._flags = np.zeros(_OWNED, np.bool_)
        """All false between calls."""

    def add(self, group: Group) -> None:
        """A new group, already among the kept ones."""
        self._newest = group.number
        place = group.number - self._base
        if place >= _OWNED:
            self._own.clear()
        elif (own := self._own.get(group.actor)) is not None:
            own[place] = True

    def others(self, actor: Actor, numbers: npt.NDArray[np.int64]) -> list[int]:
        """Numbers of the groups among ``numbers`` that are another actor's; none that was too old at the survey."""
        own = self._own.get(actor)
        if own is None:
            own = self._survey(actor)
        places = numbers - self._base
        np.maximum(places, 0, out=places)
        top = self._newest - self._base + 1
        flags = self._flags
        flags[places] = True
        found: list[int] = ((flags[:top] > own[:top]).nonzero()[0] + self._base).tolist()
        flags[places] = False
        return found

    def _survey(self, actor: Actor) -> npt.NDArray[np.bool_]:
        if not self._own or len(self._own) >= _MAX_OWNERS:
            self._own.clear()
            self._base = next(iter(self._groups)) - 1
        own = self._own[actor] = np.zeros(_OWNED, np.bool_)
        own[0] = True
        own[[number - self._base for number, group in self._groups.items() if group.actor == actor]] = True
        return own


class Conflict(Struct, frozen=True, eq=False):
    """An earlier operation that touches the same pages and layers and is not surely ordered."""

    earlier: Operation
    overlaps: tuple[Overlap, ...]


class Lookup(Struct, frozen=True, eq=False):
    """One access looked up: how many of its pages a conflicting access had touched before."""

    access: Access
    pairs: int


class Shadow:
    """Who touched which page last, and who may still be touching it. Feed in trace order; not thread-safe."""

    def __init__(self) -> None:
        self._cells: tuple[dict[int, PageTable], ...] = tuple({} for _ in Space)
        """By space and pool."""
        self._history: dict[Actor, list[Group]] = {}
        self._groups = 0
        self._by_number: dict[int, Group] = {}
        self._kept_ids = 0
        """Page ids in ``_by_number``."""
        self._oldest = 1
        """Number of the oldest group in ``_by_number``."""
        self._owners = _Owners(self._by_number)
        self._all_ordered: Actor | None = None
        """The actor of the last operation, if everything of others was ordered before it."""
        self.forgotten = 0
        """Groups dropped from a full history while they could still have raced."""

    def enter(
        self,
        actor: Actor,
        accesses: tuple[Access, ...],
        layers: tuple[int, int],
        clock: Clock,
        op: OpId,
        seq: int,
        issued_ns: int,
        label: Label,
    ) -> tuple[Operation, list[Conflict], list[Lookup]]:
        """Add an operation; tell what it conflicts with.

        Args:
            actor: Stream or thread of the operation.
            accesses: What it touches.
            layers: Half-open layer range.
            clock: The actor's guaranteed clock before the operation.
            op, seq, issued_ns, label: As in ``Operation``.

        Returns:
            The operation; its conflicts with unordered earlier operations, oldest first; and one look-up per
            access (none for a further member of a group: its pages were looked up with the first).
        """
        if self._all_ordered == actor:
            candidates = _NO_CANDIDATES  # only this actor has done anything since
        else:
            candidates = self._unordered(actor, clock)
            self._all_ordered = None if candidates else actor
        history = self._history.get(actor)
        group = history[-1] if history else None
        lookups = _NO_LOOKUPS
        if (
            group is None
            or group.ends[-1] > layers[0]
            or not (group.accesses is accesses or _same(group.accesses, accesses))
        ):
            group = self._new_group(actor, accesses)
            group.safe = (candidates[0][0] if len(candidates) == 1 else _oldest(candidates, group)).number - 1
            lookups = self._open(group)
        epoch = clock[actor] + 1
        operation = Operation(op, epoch, seq, layers, issued_ns, label, group)
        conflicts = self._conflicts(group, layers, candidates) if candidates else _NO_CONFLICTS
        group.members.append(operation)
        group.epochs.append(epoch)
        group.ends.append(layers[1])
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
            cells = self._cells_of(access)
            place = cells.place(access.ids)  # may replace the array
            cells.freed[place] = seq + 1

    def note_move(self, access: Access, seq: int) -> None:
        """The contents of the ids were moved elsewhere at ``seq``."""
        if len(access.ids):
            cells = self._cells_of(access)
            place = cells.place(access.ids)
            cells.moved[place] = seq + 1

    def ever_written(self, access: Access) -> npt.NDArray[np.bool_]:
        """For each id, whether an operation has written it since the trace began."""
        cells = self._cells_of(access)
        place = cells.place(access.ids)  # may replace the array
        return cells.wrote[place] > 0

    def freed_since(self, overlap: Overlap, seq: int) -> bool:
        """Whether a shared page was given back after ``seq``."""
        cells = self._cells[overlap.space][overlap.pool]
        return bool((cells.freed[overlap.pages] > seq + 1).any())

    def moved_since(self, overlap: Overlap, seq: int) -> bool:
        """Whether a shared page was moved away after ``seq``."""
        cells = self._cells[overlap.space][overlap.pool]
        return bool((cells.moved[overlap.pages] > seq + 1).any())

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
        self._prune_kept()

    def _prune_kept(self) -> None:
        kept = self._by_number
        while len(kept) > 1 and (len(kept) > MAX_GROUPS or self._kept_ids > MAX_KEPT_IDS):
            group = kept.pop(self._oldest)
            self._oldest += 1
            self._kept_ids -= _ids_in(group)
            group.shared.clear()
            group.prior = ()  # else groups would keep each other alive for ever

    def _cells_of(self, access: Access) -> PageTable:
        pools = self._cells[access.space]
        cells = pools.get(access.pool)
        if cells is None:
            cells = pools[access.pool] = PageTable()
        return cells

    def _new_group(self, actor: Actor, accesses: tuple[Access, ...]) -> Group:
        self._groups += 1
        group = Group(self._groups, actor, accesses, [], [], [], {})
        self._history.setdefault(actor, []).append(group)
        self._by_number[group.number] = group
        self._owners.add(group)
        return group

    def _unordered(self, actor: Actor, clock: Clock) -> list[tuple[Group, int]]:
        """Groups of other actors with an operation past ``clock``, and the ordered epoch of their actor."""
        found: list[tuple[Group, int]] = []
        for other, history in self._history.items():
            known = clock[other]
            if history[-1].epochs[-1] > known and other != actor:
                if len(history) == 1 or history[-2].epochs[-1] <= known:
                    found.append((history[-1], known))
                else:
                    first = bisect_right(history, known, key=_last_epoch)
                    found.extend((group, known) for group in history[first:])
        return found

    def _conflicts(self, group: Group, layers: tuple[int, int], candidates: list[tuple[Group, int]]) -> list[Conflict]:
        found: list[Conflict] = []
        for candidate, after in candidates:
            members = candidate.overlapping(layers, after)
            if members and (overlaps := self.shared(group, candidate)):
                found.extend(Conflict(earlier, overlaps) for earlier in members)
        if len(found) > 1:
            found.sort(key=_seq)
        return found

    def _open(self, group: Group) -> list[Lookup]:
        """Look the new group's pages up, then mark them."""
        number, actor, accesses = group.number, group.actor, group.accesses
        lookups: list[Lookup] = []
        places: list[tuple[PageTable, PageIds | slice, bool]] = []
        clear = True
        prior: set[int] = set()
        for access in accesses:
            ids = access.ids
            if not len(ids):
                continue
            self._kept_ids += len(ids)
            cells = self._cells_of(access)
            place = cells.place(ids)
            writes = access.mode is Mode.WRITE
            last = (cells.touched if writes else cells.wrote)[place]
            low = last.item(last.argmin())
            lookups.append(Lookup(access, len(ids) if low else int(np.count_nonzero(last))))
            foreign = 0
            for other, newest in cells.newest.items():
                if newest > foreign and other != actor:
                    foreign = newest
            if foreign > group.safe or foreign >= max(low, self._oldest):
                high = last.item(last.argmax())
                clear = clear and high <= group.safe
                if high >= self._oldest:
                    prior.update((high,) if low == high else self._owners.others(actor, last))
            places.append((cells, place, writes))
        for cells, place, writes in places:
            cells.touched[place] = number
            if writes:
                cells.wrote[place] = number
            cells.newest[actor] = number
        group.seen = number - 1 if clear else group.safe
        if prior:
            kept = self._by_number
            found = (kept[earlier] for earlier in sorted(prior) if earlier in kept)
            group.prior = tuple(earlier for earlier in found if earlier.actor != actor)
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
        scratch = self._cells[a.space][a.pool].scratch
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


def _oldest(candidates: list[tuple[Group, int]], group: Group) -> Group:
    return min((found for found, _ in candidates), key=_number, default=group)


def _number(group: Group) -> int:
    return group.number


def _ids_in(group: Group) -> int:
    return sum(len(access.ids) for access in group.accesses)


_NO_CANDIDATES: Final[list[tuple[Group, int]]] = []
_NO_LOOKUPS: Final[list[Lookup]] = []
_NO_CONFLICTS: Final[list[Conflict]] = []
