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

Memory: 17 bytes for each page up to the largest that an allocator named, and ``MAX_CHANGES`` calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs._struct import Struct
from hicache_obs.analyzer.order import Actor, Order
from hicache_obs.analyzer.page_table import Room
from hicache_obs.analyzer.shadow import Operation, Shadow
from hicache_obs.findings import Cause, Proof
from hicache_obs.records import Access, Mode, OpId, PageAlloc, PageFree, PageIds, Space, ThreadId

MAX_CHANGES: Final = 1 << 16
"""Allocator calls that a page can be traced back to; a page of an older one is not judged."""
_ENTRY_BYTES: Final = 17
_UNKNOWN, _SPENT, _HELD, _FRESH, _FREED = range(5)
"""States of a page; spent: freed, and a use of it reported. Up to held, no access is suspicious."""
_AFTER: Final = (Proof.ORDERED, Proof.POLLED)
_GIVEN_OUT: Final = np.array(
    [[_FRESH, _FRESH, _HELD, _FRESH, _FRESH], [_HELD, _FRESH, _HELD, _FRESH, _FRESH]], np.uint8
)
"""State of a page once it is given out, by whether it may have contents already, and by its state before."""
_NEW_OWNER: Final = np.array([[1, 1, 0, 0, 1], [0, 1, 0, 0, 1]], np.bool_)
"""Likewise: whether the one who gets it is its only owner."""
_GIVEN_AWAY: Final = np.array([_UNKNOWN, _FREED], np.uint8)
"""State of a page once it is freed, by whether surely by its last owner."""
_SINGLE: Final = -(1 << 62)
"""Owner of a page that was given out once since it was free: anybody's free is meant for it."""


class Change(Struct, frozen=True, eq=False, gc=False):
    """An allocator's call.

    Attributes:
        op, thread, issued_ns: Of its record.
        what: ``alloc`` or ``free``.
        ledger, epoch: Its place in the order of host calls.
    """

    op: OpId
    thread: ThreadId
    issued_ns: int
    what: str
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


class _Cells:
    """State, last change and last owner of each page of a pool; the last entry stays unknown, ids beyond clip to it."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self.state: npt.NDArray[np.uint8] = np.zeros(0, np.uint8)
        self.change: npt.NDArray[np.int64] = np.zeros(0, np.int64)
        self.owner: npt.NDArray[np.int64] = np.zeros(0, np.int64)

    def reach(self, ids: PageIds) -> None:
        size = ids.item(ids.argmax()) + 2
        if size > len(self.state):
            more = self.room.grow(len(self.state), size, _ENTRY_BYTES) - len(self.state)
            self.state = np.concatenate([self.state, np.zeros(more, np.uint8)])
            self.change = np.concatenate([self.change, np.zeros(more, np.int64)])
            self.owner = np.concatenate([self.owner, np.full(more, _SINGLE, np.int64)])


class Ownership:
    """Judges operations by who owns their pages. Fed by the analyzer in trace order; not thread-safe.

    Args:
        report: Receives each misuse.
    """

    def __init__(self, order: Order, shadow: Shadow, report: Callable[[Misuse], None]) -> None:
        self._order = order
        self._shadow = shadow
        self._report = report
        self._pools: tuple[dict[int, _Cells], ...] = tuple({} for _ in Space)
        """By space and pool."""
        self._changes: dict[int, Change] = {}
        self.changes = 0
        """Allocator calls so far; ``check`` of a group that has seen all of them finds nothing new."""
        self._lost = False

    def allocate(self, record: PageAlloc) -> None:
        """Pages were given out."""
        access = record.access
        if not len(access.ids):
            return
        full = self._shadow.ever_written(access)  # refuses absurd ids
        if self._lost:
            full[:] = True
        cells = self._change(record, access, "alloc")
        case = full.view(np.uint8), cells.state[access.ids]
        cells.state[access.ids] = _GIVEN_OUT[case]
        cells.owner[access.ids] = record.owner
        cells.owner[access.ids[_NEW_OWNER[case]]] = _SINGLE

    def free(self, record: PageFree) -> None:
        """Pages were given away. The shadow has seen their ids, and refused absurd ones."""
        access = record.access
        if not len(access.ids):
            return
        cells = self._change(record, access, "free")
        owner = cells.owner[access.ids]
        sure = (owner == _SINGLE) | (owner == record.owner)
        if self._lost:
            sure &= cells.state[access.ids] != _UNKNOWN
        cells.state[access.ids] = _GIVEN_AWAY[sure.view(np.uint8)]
        cells.owner[access.ids] = _SINGLE

    def lose(self) -> None:
        """Records were lost, allocator calls perhaps among them."""
        self._lost = True
        for cells in (cells for pools in self._pools for cells in pools.values()):
            cells.state[:] = _UNKNOWN
            cells.owner[:] = _SINGLE

    def check(self, operation: Operation) -> int:
        """Judge an operation, and note what it writes; returns how many of its pages have a known owner."""
        group = operation.group
        known = 0
        moves = operation.label.what == "relocate"
        clean = True
        for access in sorted(group.accesses, key=_is_read):  # writes first: a reader of its own writes
            cells = self._pools[access.space].get(access.pool) if len(access.ids) else None
            if cells is None:
                continue
            state = cells.state.take(access.ids, mode="clip")
            known += int(np.count_nonzero(state))
            if state.item(state.argmax()) > _HELD or (moves and _SPENT in state):
                clean = False
                self._look(operation, access, cells, state, moves=moves)
        if clean:
            group.owned_at = self.changes
        return known

    def _look(
        self, operation: Operation, access: Access, cells: _Cells, state: npt.NDArray[np.uint8], *, moves: bool
    ) -> None:
        """Find the pages that are in no state for what is done to them."""
        freed, fresh = access.ids[state == _FREED], access.ids[state == _FRESH]
        if access.mode is Mode.WRITE:
            cells.state[fresh] = _HELD
            if moves:
                cells.state[access.ids[(state == _FREED) | (state == _SPENT)]] = _HELD
                return
        elif not moves and len(fresh):
            self._judge(operation, access, cells, fresh, Cause.NEVER_WRITTEN)
        if len(freed):
            self._judge(operation, access, cells, freed, Cause.USED_AFTER_FREE)

    def _judge(self, operation: Operation, access: Access, cells: _Cells, pages: PageIds, cause: Cause) -> None:
        """Report those of ``pages`` whose change the thread that issued the operation knew of."""
        thread = self._order.thread(operation.label.thread)
        for number in np.unique(cells.change[pages]).tolist():
            change = self._changes.get(number)
            if change is None or self._order.proof(thread, change.ledger, change.epoch) not in _AFTER:
                continue
            found = pages[cells.change[pages] == number]
            cells.state[found] = _SPENT if cause is Cause.USED_AFTER_FREE else _HELD
            ids = tuple(sorted(found.tolist()))
            self._report(Misuse(change, operation, cause, access.mode, access.space, access.pool, ids))

    def _change(self, record: PageAlloc | PageFree, access: Access, what: str) -> _Cells:
        """Note an allocator's call, as a step of its thread that later operations may know of."""
        order = self._order
        ledger = order.ledger(record.thread)
        epoch = order.advance(ledger)
        order.follow(order.thread(record.thread), ledger)
        self.changes += 1
        self._changes[self.changes] = Change(record.op, record.thread, record.host_ns, what, ledger, epoch)
        self._changes.pop(self.changes - MAX_CHANGES, None)
        pools = self._pools[access.space]
        cells = pools.get(access.pool)
        if cells is None:
            cells = pools[access.pool] = _Cells(self._shadow.room)
        cells.reach(access.ids)
        cells.change[access.ids] = self.changes
        return cells


def _is_read(access: Access) -> bool:
    return access.mode is Mode.READ
