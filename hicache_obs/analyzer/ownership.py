"""Ownership epochs of pages: what is read before anybody wrote it for its owner, and what is used after it was freed.

A page is *given out* by a ``PageAlloc`` and *given away* by a ``PageFree``. Two mistakes are proven by the order of
host calls alone, whatever the device does:

* ``used_after_free``: an operation that touches a page was issued after the page was given away, and before it was
  given out again;
* ``never_written``: an operation reads a page that nothing has written since it was given out.

"After" is happens-before between host threads: an operation that is merely later in the file, of a thread that was
not told of the free, is not reported. Nor is one that was issued before the free and is still in flight: whether it
is over before the next owner's work begins is the question of order. Each page is reported once per epoch.

What is not known is not reported:

* pages whose allocator calls are not in the trace, and every page after a loss until it is freed and given out again;
* a page given out while it is held, or with contents from before its first call: it changes hands and keeps them. A
  free by anyone but its last owner leaves such a page unknown, since others may still share it;
* the target of a relocation: whoever moves pages keeps books of their own;
* layers: a page that was written in one layer counts as written.

States are kept in ``page_table``. Memory: ``MAX_CHANGES`` calls.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache_obs._struct import Struct
from hicache_obs.analyzer.order import Actor, Order
from hicache_obs.analyzer.page_table import FREED_FROM, FRESH_FROM, OWN, SHARED, WROTE, Own, PageTable, States
from hicache_obs.analyzer.shadow import Operation, Shadow
from hicache_obs.findings import Cause, Proof
from hicache_obs.records import Access, Mode, OpId, PageAlloc, PageFree, PageIds, Space, ThreadId

MAX_CHANGES: Final = 1 << 16
"""Allocator calls that a page can be traced back to; a page of an older one is not judged."""
_AFTER: Final = (Proof.ORDERED, Proof.POLLED)


def _given_out(state: int, *, lost: bool) -> int:
    """A page's state once it is given out. Its owner is its only one, unless it was held already or may have been."""
    own, wrote = state // OWN, state & WROTE
    if own in (Own.SPENT, Own.FREED) or (own == Own.UNKNOWN and not wrote and not lost):
        return OWN * Own.FRESH | wrote
    return OWN * (Own.FRESH if own == Own.FRESH else Own.HELD) | SHARED | wrote


def _given_away(state: int, *, lost: bool) -> int:
    """A page's state once it is freed; that of a shared page if it is not by its last owner."""
    sure = not state & SHARED and not (lost and state // OWN == Own.UNKNOWN)
    return OWN * (Own.FREED if sure else Own.UNKNOWN) | state & WROTE


_GIVEN_OUT, _GIVEN_AWAY = (
    {lost: bytes(rule(state, lost=lost) for state in range(256)) for lost in (False, True)}
    for rule in (_given_out, _given_away)
)


class Change(Struct, frozen=True, eq=False, gc=False):
    """An allocator's call.

    Attributes:
        op, thread, issued_ns: Of its record.
        what: ``alloc`` or ``free``.
        owner: Of its record.
        ledger, epoch: Its place in the order of host calls.
    """

    op: OpId
    thread: ThreadId
    issued_ns: int
    what: str
    owner: int
    ledger: Actor
    epoch: int


@dataclass(frozen=True, slots=True, eq=False)
class Misuse:
    """An operation that uses pages it cannot own, or that hold nothing.

    Attributes:
        change: The call that gave the pages away or out.
        operation: The operation.
        cause: ``USED_AFTER_FREE`` or ``NEVER_WRITTEN``.
        mode: What the operation does to them.
        space, pool, pages: Which.
    """

    change: Change
    operation: Operation
    cause: Cause
    mode: Mode
    space: Space
    pool: int
    pages: tuple[int, ...]


class Ownership:
    """Judges operations by who owns their pages. Fed by the analyzer in trace order; not thread-safe.

    Args:
        report: Receives each misuse.
    """

    def __init__(self, order: Order, shadow: Shadow, report: Callable[[Misuse], None]) -> None:
        self._order = order
        self._shadow = shadow
        self._report = report
        self._changes: dict[int, Change] = {}
        """By number; ``_kept`` has the numbers, oldest first."""
        self._kept: deque[int] = deque()
        self._ledgers: dict[ThreadId, tuple[Actor, Actor]] = {}
        """Of each thread that has called an allocator: its own actor, and that of its calls."""
        self.changes = 0
        """Allocator calls so far; ``check`` of a group that has seen all of them finds nothing new."""
        self._lost = False

    def allocate(self, record: PageAlloc, seq: int) -> None:
        """Pages were given out at ``seq``."""
        if len(record.access.ids):
            table = self._shadow.table(record.access)
            number = self._change(record, "alloc", seq)
            table.hand_over(record.access.ids, number, _GIVEN_OUT[self._lost], given=True)

    def free(self, record: PageFree, seq: int) -> None:
        """Pages were given away at ``seq``. Those with several owners are free if it is their last owner's call."""
        if not len(record.access.ids):
            return
        table = self._shadow.table(record.access)
        number = self._change(record, "free", seq)
        for page in table.hand_over(record.access.ids, number, _GIVEN_AWAY[self._lost], given=False):
            change = self._found(table.given.item(page))
            if change is not None and change.owner == record.owner:
                table.state[page] = FREED_FROM | table.state.item(page) & WROTE

    def lose(self) -> None:
        """Records were lost, allocator calls perhaps among them."""
        self._lost = True
        for table in self._shadow.tables:
            table.state &= WROTE

    def check(self, operation: Operation) -> int:
        """Judge an operation whose writes are noted; returns how many of its pages have a known owner."""
        group = operation.group
        known = 0
        moves = operation.label.what == "relocate"
        clean = True
        for access in sorted(group.accesses, key=_is_read):  # writes first: a reader of its own writes
            if not len(access.ids):
                continue
            table = self._shadow.table(access)
            state = table.state[access.ids]
            known += int(np.count_nonzero(state >= OWN))
            if state.item(state.argmax()) >= FRESH_FROM or moves:
                clean = False
                self._look(operation, access, table, state, moves=moves)
        if clean:
            group.owned_at = self.changes
        return known

    def _look(self, operation: Operation, access: Access, table: PageTable, state: States, *, moves: bool) -> None:
        """Find the pages that are in no state for what is done to them."""
        own = state // OWN
        freed, fresh = access.ids[own == Own.FREED], access.ids[own == Own.FRESH]
        if access.mode is Mode.WRITE:
            _become(table, fresh, Own.HELD)
            if moves:
                _become(table, access.ids[(own == Own.FREED) | (own == Own.SPENT)], Own.HELD)
                return
        elif not moves and len(fresh):
            self._judge(operation, access, table, fresh, Cause.NEVER_WRITTEN)
        if len(freed):
            self._judge(operation, access, table, freed, Cause.USED_AFTER_FREE)

    def _judge(self, operation: Operation, access: Access, table: PageTable, pages: PageIds, cause: Cause) -> None:
        """Report those of ``pages`` whose change the thread that issued the operation knew of."""
        thread = self._order.thread(operation.label.thread)
        changes = (table.freed if cause is Cause.USED_AFTER_FREE else table.given)[pages]
        for number in np.unique(changes).tolist():
            change = self._found(number)
            if change is not None and self._order.proof(thread, change.ledger, change.epoch) not in _AFTER:
                continue
            found = pages[changes == number]
            _become(table, found, Own.SPENT if cause is Cause.USED_AFTER_FREE else Own.HELD)
            if change is not None:  # else it is forgotten, and the page is not held against a later call either
                ids = tuple(sorted(found.tolist()))
                self._report(Misuse(change, operation, cause, access.mode, access.space, access.pool, ids))

    def _found(self, mark: int) -> Change | None:
        """The call that a number in a page table stands for, as far as it is kept."""
        return self._changes.get(mark + self._shadow.base) if mark else None

    def _change(self, record: PageAlloc | PageFree, what: str, seq: int) -> int:
        """Note an allocator's call, as a step of its thread that later operations may know of; its number for marks."""
        order = self._order
        actors = self._ledgers.get(record.thread)
        if actors is None:
            actors = self._ledgers[record.thread] = order.thread(record.thread), order.ledger(record.thread)
        thread, ledger = actors
        epoch = order.tell(thread, ledger)
        self.changes += 1
        mark = self._shadow.call(seq)
        number = mark + self._shadow.base
        self._changes[number] = Change(record.op, record.thread, record.host_ns, what, record.owner, ledger, epoch)
        self._kept.append(number)
        if len(self._kept) > MAX_CHANGES:
            del self._changes[self._kept.popleft()]
        return mark


def _become(table: PageTable, pages: PageIds, own: Own) -> None:
    table.state[pages] = table.state[pages] & (SHARED | WROTE) | np.uint8(OWN * own)


def _is_read(access: Access) -> bool:
    return access.mode is Mode.READ
