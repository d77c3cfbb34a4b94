"""Page shadow: for each access, the earlier operations that conflict with it and are not surely ordered.

Exact for all pairs inside the retained history, and cheap when everything is ordered:

* Consecutive operations of one actor that touch the *same page arrays* over different layers form a *group* (a
  load-back's layer copies, a forward round's layer segments). Page sets are looked at once per group.
* If all that other actors have done so far is ordered, so is every pair with it, whatever the pages.
* Per space and pool, two arrays hold the number of the last group that wrote, and that touched, each page.
  Group numbers increase in issue order, so one gather and a maximum prove "everything that touched these pages
  is older than the oldest group that is not ordered", independent of the number of readers.
* Otherwise only groups with an unordered operation are looked at, by layer first and by page second; the page
  intersection of two groups is computed once.

Completeness follows from keeping every operation until each host thread knows it to be complete, bounded by
``MAX_GROUPS`` per actor (older ones are counted in ``forgotten``).
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import dropwhile, repeat, takewhile
from typing import Final

import numpy as np

from hicache_obs._struct import Struct
from hicache_obs.analyzer.order import Actor, Clock
from hicache_obs.analyzer.page_table import BOTH, PageTable, Room
from hicache_obs.records import (
    Access,
    GraphNode,
    GraphReplay,
    HostAccess,
    IoBegin,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageIds,
    Relocate,
    Space,
    StreamId,
    ThreadId,
)

MAX_GROUPS: Final = 8192
MAX_CALLS: Final = 1 << 16
"""Allocator calls that a free can be placed in the trace by."""
MAX_NUMBER: Final = 1 << 30
"""Numbers in page tables are at most this at a pruning, and 32 bits wide."""
MAX_KEPT_IDS: Final = 1 << 22
"""Page ids in the groups that measured times are compared with; their arrays take at most eight bytes for each."""
_NO_PAGES: Final = np.empty(0, np.int64)
_READ: Final = Mode.READ
_WRITE: Final = Mode.WRITE

Touching = Kernel | Memcpy | HostAccess | GraphReplay | GraphNode | Relocate | IoBegin
"""Records of operations that touch pages."""


class Label(Struct, frozen=True, eq=False, gc=False):
    """What an operation is, for classification and for people.

    Attributes:
        what: ``forward``, ``restore``, ``backup``, ``copy``, ``kernel`` (touches no KV page), ``graph``, ``relocate``,
            ``storage``, ``device read``, ``rdma`` (I/O in no stream) or ``host``.
        site: Id of the code site.
        stream: ``None`` for a host access.
        number: Round id or transfer id.
        thread: Issuing host thread.
        kind: Kind of record, of a kernel or copy.
    """

    what: str
    site: int
    stream: StreamId | None
    number: int
    thread: ThreadId
    kind: type[Kernel | Memcpy] | None = None


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
        rows: As in ``Kernel``.
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
    rows: PageIds | None = None
    unordered: tuple[OpId, ...] = ()
    start_ns: int | None = None
    end_ns: int | None = None
    error_ns: int = 0
    within: bool = False


class Group(Struct, eq=False):
    """Operations of one actor over the same pages.

    Attributes:
        number: Increases in order of each group's first operation.
        actor: Stream or host thread.
        label: What the newest member is.
        accesses: What every member touches.
        members: In issue order; their layer ranges ascend without overlap.
        epochs: Of each member, for bisection.
        last, top: Epoch and end of the layer range of the newest member.
        shared: Page sets shared with another group, by that group's number.
        latest: By the number of an earlier group, whether it was the last one on a page that both conflict on.
        safe, seen: No group of another actor numbered in ``(safe, seen]`` shares a page with this one.
        owned_at: Number of allocator calls when all pages were last found to be used by their owner.
        suspect: When the group was opened, some page was in no state for what is done to it, as far as could be seen.
        end_ns: Latest end of a member whose times are known, else 0.
        before_ns: Latest such end of the groups before it in ``Measured``.
    """

    number: int
    actor: Actor
    label: Label
    accesses: tuple[Access, ...]
    members: list[Operation]
    epochs: list[int]
    shared: dict[int, tuple[Overlap, ...]]
    latest: dict[int, bool]
    last: int = 0
    top: int = 0
    safe: int = 0
    seen: int = 0
    owned_at: int = -1
    suspect: bool = False
    end_ns: int = 0
    before_ns: int = 0

    def continues(self, record: Kernel | Memcpy) -> bool:
        """Whether ``record``, of the group's actor, is the same thing done to the same pages."""
        label = self.label
        return (
            self.accesses is record.accesses
            and label.number == record.group
            and label.site == record.site
            and label.thread == record.thread
            and label.kind is type(record)
        )

    def overlapping(self, layers: tuple[int, int], after: int) -> list[Operation]:
        """Members past epoch ``after`` whose layers overlap ``layers``."""
        low, high = layers
        members = self.members
        first = bisect_right(self.epochs, after) if after else 0
        if first < len(members) and members[first].layers[0] >= high:
            return _NOBODY  # a layer that the waiter does not need yet, and so are those behind
        first += self._above(low, first)
        last = first
        while last < len(members) and members[last].layers[0] < high:
            last += 1
        return members[first:last]

    def _above(self, layer: int, start: int) -> int:
        """How many members from ``start`` on end at or below ``layer``; at once if each has one layer."""
        members = self.members
        guess = layer - members[0].layers[0]
        if start <= guess < len(members):
            low, high = members[guess].layers
            if low <= layer < high:
                return guess - start
        return bisect_right(members, layer, start, key=_top) - start


class Overlap(Struct, frozen=True, eq=False):
    """Pages two groups share through one access of each, at least one of which writes."""

    space: Space
    pool: int
    earlier: Mode
    later: Mode
    pages: PageIds


def _seq(conflict: Conflict) -> int:
    return conflict.earlier.seq


def _last(group: Group) -> int:
    return group.last


def _top(operation: Operation) -> int:
    return operation.layers[1]


class Conflict(Struct, frozen=True, eq=False):
    """An earlier operation that touches the same pages and layers and is not surely ordered."""

    earlier: Operation
    overlaps: tuple[Overlap, ...]


class Shadow:
    """Who touched which page last, and who may still be touching it. Feed in trace order; not thread-safe."""

    def __init__(self) -> None:
        self._room = Room()
        self._tables: tuple[dict[int, PageTable], ...] = tuple({} for _ in Space)
        """By space and pool."""
        self._history: dict[Actor, list[Group]] = {}
        self.newest: dict[Actor, Group] = {}
        """The last group of each history, which may still grow."""
        self._numbers = 0
        """Of the newest group or allocator call."""
        self.base = 0
        """What the numbers in page tables lack, so that they fit."""
        self._calls: list[int] = []
        """Position in the trace of the newest allocator calls, and beside it their numbers."""
        self._call_numbers: list[int] = []
        self._kept: deque[Group] = deque()
        """What measured times are compared with."""
        self._kept_ids = 0
        """Page ids in there."""
        self._surveyor: Actor | None = None
        """The actor of the last operation."""
        self._rivals: list[Group] = []
        """Groups of others with an operation that was not ordered before it."""
        self.forgotten = 0
        """Groups dropped from a full history while they could still have raced."""

    def enter(
        self,
        actor: Actor,
        clock: Clock,
        record: Touching,
        op: OpId,
        seq: int,
        label: Label,
        sums: Mapping[str, list[int]],
    ) -> tuple[Operation, list[Conflict], int]:
        """Add an operation; tell what it conflicts with.

        Args:
            actor: Stream or thread of the operation.
            clock: The actor's guaranteed clock before the operation.
            record: What it touches, when it was issued.
            op, seq, label: As in ``Operation``.
            sums: By ``Label.what``, see ``_look_up``.

        Returns:
            The operation; its conflicts with unordered earlier operations, oldest first; and, if it begins a group,
            how many of its pages have a known owner, else -1.
        """
        candidates = self._unordered(actor, clock) if self._rivals or self._surveyor != actor else _NO_CANDIDATES
        accesses, layers = record.accesses, record.layers
        group = self.newest.get(actor)
        owned = -1
        if (
            group is None
            or group.top > layers[0]
            or not (group.accesses is accesses or _same(group.accesses, accesses))
        ):
            self._numbers += 1
            group = self.newest[actor] = Group(self._numbers, actor, label, accesses, [], [], {}, {})
            history = self._history.get(actor)
            if history is None:
                self._history[actor] = [group]
            else:
                history.append(group)
            self._kept.append(group)
            group.safe = min(found.number for found, _ in candidates) - 1 if candidates else group.number - 1
            owned = self._look_up(group, sums[label.what])
        group.label = label
        group.last = epoch = clock[actor] + 1
        group.top = layers[1]
        operation = Operation(op, epoch, seq, layers, record.host_ns, label, group)
        if isinstance(record, Kernel):
            operation.rows = record.rows
        conflicts = self._conflicts(group, layers, candidates) if candidates else _NO_CONFLICTS
        group.members.append(operation)
        group.epochs.append(epoch)
        return operation, conflicts, owned

    def admits(
        self, group: Group, clock: Clock, layers: Sequence[tuple[int, int]], source: Actor, known: Sequence[int]
    ) -> bool:
        """Whether operations of these layers would go on with an actor's newest group and conflict with nothing.

        Args:
            group: Of the actor whose operation was the last of all.
            clock: The actor's, but for ``source``.
            source, known: By operation, the epoch of ``source`` that it follows.
        """
        top = group.top
        for low, high in layers:
            if top > low:
                return False
            top = high
        for rival in self._rivals:
            members = rival.members
            after = known if rival.actor == source else repeat(clock[rival.actor])
            for first, (_, high) in zip(map(bisect_right, repeat(rival.epochs), after), layers, strict=False):
                if first < len(members) and members[first].layers[0] < high:
                    return False
        return True

    def extend(self, group: Group, operations: Sequence[Operation], epochs: range) -> None:
        """Add operations that were admitted."""
        group.last, group.top = epochs[-1], operations[-1].layers[1]
        group.members.extend(operations)
        group.epochs.extend(epochs)

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

    @property
    def tables(self) -> Iterable[PageTable]:
        """All of them."""
        return (table for pools in self._tables for table in pools.values())

    def table(self, access: Access) -> PageTable:
        """What is known of the pages that an access is to."""
        pools = self._tables[access.space]
        table = pools.get(access.pool)
        if table is None:
            table = pools[access.pool] = PageTable(self._room)
        return table

    def was_last(self, group: Group, earlier: Group) -> bool:
        """Whether ``earlier`` was the last to write, or for a write the last to touch, some page of ``group`` when that
        was opened; as far as the groups in between are kept."""
        if earlier.number >= group.number:
            return False
        latest = group.latest.get(earlier.number)
        if latest is None:
            since = [access for other in self._kept_between(earlier, group) for access in other.accesses]
            latest = any(len(_left(overlap, since)) for overlap in self.shared(group, earlier))
            group.latest[earlier.number] = latest
        return latest

    def _kept_between(self, earlier: Group, group: Group) -> Iterator[Group]:
        """Newest first: the pair is nearly always of groups that were opened lately, of many that are kept."""
        later = takewhile(lambda other: other.number > earlier.number, reversed(self._kept))
        return dropwhile(lambda other: other.number >= group.number, later)

    def call(self, seq: int) -> int:
        """An allocator is called at ``seq``; returns the call's number for page tables."""
        self._numbers += 1
        self._calls.append(seq)
        self._call_numbers.append(self._numbers)
        if len(self._calls) > 2 * MAX_CALLS:
            del self._calls[:-MAX_CALLS], self._call_numbers[:-MAX_CALLS]
        return self._numbers - self.base

    def note_free(self, access: Access, seq: int) -> None:
        """The ids were given back, or handed out again, at ``seq`` by an allocator that nobody owns pages of."""
        table = self.table(access)
        place = table.place(access.ids)  # may replace the array
        table.freed[place] = self.call(seq)

    def note_move(self, access: Access, seq: int) -> None:
        """The contents of the ids were moved elsewhere at ``seq``."""
        if len(access.ids):
            self.table(access).note_move(access.ids, seq + 1)

    def freed_since(self, overlap: Overlap, seq: int) -> bool:
        """Whether a shared page changed hands after ``seq``, as far as calls are kept."""
        first = bisect_right(self._calls, seq)
        if first == len(self._calls):
            return False
        freed = self._tables[overlap.space][overlap.pool].freed[overlap.pages]
        return bool((freed >= max(1, self._call_numbers[first] - self.base)).any())

    def moved_since(self, overlap: Overlap, seq: int) -> bool:
        """Whether a shared page was moved away after ``seq``."""
        moved = self._tables[overlap.space][overlap.pool].moved
        return len(moved) > 0 and bool((moved[overlap.pages] > seq + 1).any())

    def prune(self, floor: Clock) -> None:
        """Forget operations that every host thread knows to be complete (``Order.floor``)."""
        for actor, history in self._history.items():
            known = floor[actor] if actor < len(floor) else 0
            done = bisect_right(history, known, key=_last)
            overflow = len(history) - done - MAX_GROUPS
            if overflow > 0:
                self.forgotten += overflow
                done += overflow
            done = min(done, len(history) - 1)  # the newest may still grow
            for group in history[:done]:
                if group.number < self.oldest:
                    self._let_go(group)
            del history[:done]
        self._prune_kept()
        if self._numbers - self.base > MAX_NUMBER:
            by = self._numbers - self.base - MAX_NUMBER // 2
            self.base += by
            for table in self.tables:
                table.rebase(by)

    def _prune_kept(self) -> None:
        kept = self._kept
        while len(kept) > 1 and (len(kept) > MAX_GROUPS or self._kept_ids > MAX_KEPT_IDS):
            group = kept.popleft()
            self._kept_ids -= sum(len(access.ids) for access in group.accesses)
            group.shared.clear()
            group.latest.clear()
            if group.number < self._history[group.actor][0].number:  # else it may still race
                self._let_go(group)

    def _let_go(self, group: Group) -> None:
        """The group was dropped: part it from its members, or both wait for Python's collector of cycles. That would
        cost a long trace a sixth of its time, and of its memory."""
        if group not in self._rivals:  # else a thread that comes later can still race with it
            group.members.clear()

    @property
    def oldest(self) -> int:
        """Number of the oldest group that measured times are compared with."""
        return self._kept[0].number if self._kept else 0

    def _unordered(self, actor: Actor, clock: Clock) -> list[tuple[Group, int]]:
        """Groups of other actors with an operation past ``clock``, and the ordered epoch of their actor."""
        if self._surveyor == actor:  # only this actor has done anything since the last survey
            found = [(group, known) for group in self._rivals if group.last > (known := clock[group.actor])]
        else:
            found = []
            for other, newest in self.newest.items():
                known = clock[other]
                if newest.last > known and other != actor:
                    history = self._history[other]
                    if len(history) == 1 or history[-2].last <= known:
                        found.append((newest, known))
                    else:
                        first = bisect_right(history, known, key=_last)
                        found.extend((group, known) for group in history[first:])
            self._surveyor = actor
        self._rivals = [group for group, _ in found]
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

    def _look_up(self, group: Group, sums: list[int]) -> int:
        """Look the new group's pages up, then mark them; returns how many of them have a known owner.

        Args:
            sums: To be added to: at ``4 * space + 2 * mode`` how many pages were looked up, and behind it how many of
                them had an earlier conflicting access.
        """
        number, safe, owned = group.number - self.base, group.safe - self.base, 0
        ordered = safe == number - 1
        clear, suspect, unwritten = True, False, False
        written: list[tuple[PageTable, PageIds | slice]] = []
        for access in group.accesses:
            if access.mode is _WRITE and (count := len(access.ids)):
                table = self.table(access)
                place, known, free, new = table.note_write(access.ids)
                earlier = count
                if new or not ordered or written:  # else all of them were written before, by another operation
                    last = table.touched[place]
                    earlier = int(np.count_nonzero(last))
                    clear = clear and (ordered or last.item(last.argmax()) <= safe)
                at = 4 * access.space + 2
                sums[at] += count
                sums[at + 1] += earlier
                owned += known
                suspect |= free
                unwritten |= new
                written.append((table, place))
                self._kept_ids += count
        for access in group.accesses:
            if access.mode is _READ and (count := len(access.ids)):
                table = self.table(access)
                place, known, wrong, earlier = table.look(access.ids)
                if unwritten or not ordered:  # before this operation's own writes are marked
                    last = table.wrote[place]
                    earlier = int(np.count_nonzero(last))
                    clear = clear and (ordered or last.item(last.argmax()) <= safe)
                at = 4 * access.space
                sums[at] += count
                sums[at + 1] += earlier
                owned += known
                suspect |= wrong
                table.touched[place] = number
                self._kept_ids += count
        for table, place in written:
            table.marks[place] = number * BOTH
        group.suspect = suspect
        group.seen = group.number - 1 if clear else group.safe
        return owned

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
        scratch = self._tables[a.space][a.pool].scratch
        scratch[a.ids] = True
        pages: PageIds = b.ids[scratch[b.ids]]
        scratch[a.ids] = False
        return pages


def _left(overlap: Overlap, since: Iterable[Access]) -> PageIds:
    """Pages that no access of ``since`` has written, or for a write touched."""
    pages = overlap.pages
    for access in since:
        counts = overlap.later is Mode.WRITE or access.mode is Mode.WRITE
        if counts and access.space is overlap.space and access.pool == overlap.pool:
            pages = pages[np.isin(pages, access.ids, invert=True)]
    return pages


def _same(a: tuple[Access, ...], b: tuple[Access, ...]) -> bool:
    """Both touch the same page array objects in the same way."""
    return len(a) == len(b) and all(
        x.ids is y.ids and x.mode is y.mode and x.space is y.space and x.pool == y.pool
        for x, y in zip(a, b, strict=True)
    )


_NO_CANDIDATES: Final[list[tuple[Group, int]]] = []
_NO_CONFLICTS: Final[list[Conflict]] = []
_NOBODY: Final[list[Operation]] = []
