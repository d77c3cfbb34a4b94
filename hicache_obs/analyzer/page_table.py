"""What is known of each page of one pool, in arrays that are looked up and marked by many ids at once.

Costs are numpy calls: a gather or a scatter per array and call. An array's smallest and largest are found by ``argmin``
and ``argmax``, which are vectorised: at 256 ids they take a quarter of the time of ``min`` and ``max``.

A page's *state* is one byte, ``own * 4 + shared * 2 + wrote``: whose the page is (``Own``), whether its owner is not
its only one, and whether an operation has written it since the trace began. So one gather answers for a read both
whether there is an earlier write and whether anything is wrong with the owner.
"""

from __future__ import annotations

import enum
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.errors import TraceError
from hicache_obs.records import MAX_IDS, PageIds

_LONG: Final = 1024
"""From this many ids on, looking whether they are consecutive pays."""
_FEW: Final = 8
"""Up to this many ids, going through them one by one is faster than three numpy calls."""
_ENTRY_BYTES: Final = 18
MAX_TABLE_BYTES: Final = 1 << 30
"""What the page tables of one trace may take, all spaces and pools together."""
States = npt.NDArray[np.uint8]
Numbers = npt.NDArray[np.int32]


class Own(enum.IntEnum):
    """Whose a page is. Up to ``HELD``, no access is suspicious."""

    UNKNOWN = 0
    SPENT = 1
    """Freed, and a use of it was reported."""
    HELD = 2
    FRESH = 3
    """Given out, and not written since."""
    FREED = 4


BOTH: Final = (1 << 32) + 1
WROTE: Final = 1
SHARED: Final = 2
OWN: Final = 4
"""Factor of the owner in a state."""
FRESH_FROM: Final = OWN * Own.FRESH
_HELD: Final = OWN * Own.HELD
FREED_FROM: Final = OWN * Own.FREED
_AFTER_WRITE: Final = bytes((state - OWN if state // OWN == Own.FRESH else state) | WROTE for state in range(256))
"""By state: the state once the page is written."""
_UNOWNED: Final = bytes(range(OWN))
_NOT_FRESH: Final = bytes(range(FRESH_FROM))
_NOT_FREE: Final = bytes(range(FREED_FROM))
_UNWRITTEN: Final = bytes(range(0, OWN * len(Own), 2))
_UNIFORM: Final = tuple(bytes([state]) * _LONG for state in range(OWN * len(Own)))
"""By state: so many pages that have it."""
_BYTE: Final = np.dtype(np.uint8)


class Room:
    """What page tables have left of ``MAX_TABLE_BYTES``."""

    def __init__(self) -> None:
        self._left_bytes = MAX_TABLE_BYTES

    def grow(self, length: int, least: int, entry_bytes: int) -> int:
        """The new length of a table: a quarter more, where there is room for that.

        Args:
            length: Entries that it has.
            least: Entries that it needs.
            entry_bytes: Size of one.

        Raises:
            TraceError: There is no room for ``least``.
        """
        for size in (max(1024, least, length + length // 4), least):
            more_bytes = (size - length) * entry_bytes
            if more_bytes <= self._left_bytes:
                self._left_bytes -= more_bytes
                return size
        raise TraceError(
            f"page or buffer id {least - 1}: tables up to it and those of other pools together would take more than "
            f"{MAX_TABLE_BYTES >> 20} MiB"
        )


class PageTable:
    """Last group and last allocator calls per page of one space and pool, and its owner; grows to the largest id seen.

    Args:
        room: For this and other tables.

    Attributes:
        touched, wrote: Number of the last group, 0 for none.
        given, freed: Number of the last allocator call, 0 for none.
        marks: ``touched`` and ``wrote`` as one number, ``BOTH`` times theirs if they are the same.
        state: See above.
        moved: Position in the trace plus one of the last move; empty without any.
        scratch: All false between calls.
    """

    def __init__(self, room: Room) -> None:
        self._room = room
        self._rows: Numbers = np.zeros((0, 4), np.int32)
        """What is looked up together lies together: most of the cost of many pages is fetching them from memory."""
        self._cells = bytearray()
        self.moved = np.zeros(0, np.int64)
        self.scratch = np.zeros(0, np.bool_)
        self._ids: PageIds | None = None
        self._place: PageIds | slice = slice(0)
        self._view()

    def _view(self) -> None:
        self.touched, self.wrote, self.given, self.freed = self._rows.T
        self.marks: npt.NDArray[np.int64] = self._rows.view(np.int64)[:, 0]
        self.state: States = np.frombuffer(self._cells, np.uint8)

    def place(self, ids: PageIds) -> PageIds | slice:
        """What to index the arrays with for ``ids``, which are not none; makes room for them.

        Raises:
            TraceError: An id is negative or too large, or there is no room.
        """
        if ids is self._ids:
            return self._place
        place: PageIds | slice = ids
        if (count := len(ids)) < _LONG:
            low, high = ids.item(ids.argmin()), ids.item(ids.argmax())
        elif ids.item(-1) - ids.item(0) == count - 1 and _consecutive(ids):
            low, high = ids.item(0), ids.item(-1)
            place = slice(low, high + 1)
        else:
            low, high = _bounds(ids)
        if low < 0 or high >= len(self._rows):
            self._grow(low, high)
        self._ids, self._place = ids, place
        return place

    def hand_over(self, ids: PageIds, number: int, rule: bytes, *, given: bool) -> list[int]:
        """An allocator call gives pages out or takes them back; returns those that had several owners.

        Args:
            ids: The pages; not none.
            number: Of the call.
            rule: New state by old state, 256 of them.
        """
        if len(ids) > _FEW:
            place = self.place(ids)
            (self.given if given else self.freed)[place] = number
            before = self.state[place]
            several = before & SHARED  # now: ``before`` may be a part of the table
            self.state[place] = rule[before.item(0)] if _alike(before) else _changed(before, rule)
            return ids[several.nonzero()].tolist() if several.item(several.argmax()) else []
        pages: list[int] = ids.tolist()
        if min(pages) < 0 or max(pages) >= len(self._cells):
            self._grow(min(pages), max(pages))
        column, cells, shared = self.given if given else self.freed, self._cells, []
        for page in pages:
            state = cells[page]
            if state & SHARED:
                shared.append(page)
            column[page] = number
            cells[page] = rule[state]
        return shared

    def note_write(self, ids: PageIds) -> tuple[PageIds | slice, int, bool, bool]:
        """Pages are written.

        Returns:
            What to index the arrays with for them; how many of them have a known owner; whether any of them is free;
            whether any was never written before.
        """
        place, state = self._find(ids)
        owned, worst, written, alike = _summary(state)
        new = written < len(state)
        if new or worst >= FRESH_FROM:
            self.state[place] = _AFTER_WRITE[worst] if alike else _changed(state, _AFTER_WRITE)
        return place, owned, worst >= FREED_FROM, new

    def look(self, ids: PageIds) -> tuple[PageIds | slice, int, bool, int]:
        """Pages are read.

        Returns:
            What to index the arrays with for them; how many of them have a known owner; whether any is free, or not
            written for its owner; how many were ever written.
        """
        place, state = self._find(ids)
        owned, worst, written, _ = _summary(state)
        return place, owned, worst >= FRESH_FROM, written

    def _find(self, ids: PageIds) -> tuple[PageIds | slice, States]:
        """``place`` of pages, and their states. Of a few, looking these up finds an id that is too large."""
        if len(ids) < _LONG:
            try:
                state = self.state[ids]
            except IndexError:
                pass
            else:
                if ids.item(ids.argmin()) >= 0:
                    return ids, state
        place = self.place(ids)
        return place, self.state[place]

    def rebase(self, by: int) -> None:
        """Take ``by`` off all numbers. A group below 1 becomes 1, older than any that matters; a call none."""
        groups, calls = self._rows[:, :2], self._rows[:, 2:]
        groups[:] = np.where(groups > by, groups - by, groups > 0)
        calls[:] = np.maximum(calls - by, 0)

    def note_move(self, ids: PageIds, at: int) -> None:
        """The contents of ``ids`` were moved elsewhere at ``at``, less one."""
        place = self.place(ids)
        if not len(self.moved):
            self._room.grow(0, len(self._rows), 8)
            self.moved = np.zeros(len(self._rows), np.int64)
        self.moved[place] = at

    def _grow(self, low: int, high: int) -> None:
        if high >= MAX_IDS or low < 0:
            raise TraceError(f"page or buffer ids {low} to {high}; expected 0 to {MAX_IDS - 1}")
        known = len(self._rows)
        more = self._room.grow(known, high + 1, _ENTRY_BYTES + (8 if len(self.moved) else 0)) - known
        self._rows = np.concatenate([self._rows, np.zeros((more, 4), np.int32)])
        self._cells = self._cells + bytes(more)
        self.scratch = np.zeros(known + more, np.bool_)
        if len(self.moved):
            self.moved = np.concatenate([self.moved, np.zeros(more, np.int64)])
        self._view()


def _changed(state: States, rule: bytes) -> States:
    """New states of pages, ``rule`` having one for each."""
    return np.frombuffer(state.tobytes().translate(rule), _BYTE)


def _alike(state: States) -> bool:
    """Whether all of some pages have the same state, as most often all pages of an operation do."""
    return state.item(state.argmin()) == state.item(state.argmax())


def _summary(state: States) -> tuple[int, int, int, bool]:
    """Of pages: how many have a known owner, some state of the worst owner, how many were ever written; and whether
    all have that one state."""
    count = len(state)
    if count > _LONG:
        first, top = state.item(state.argmin()), state.item(state.argmax())
        if first != top:
            return int(np.count_nonzero(state >= OWN)), top, int(np.count_nonzero(state & WROTE)), False
    else:  # numpy's functions take longer for so few
        cells = state.tobytes()
        first = cells[0]
        if cells != _UNIFORM[first][:count]:
            worst = _HELD
            if wrong := cells.translate(None, _NOT_FRESH):
                worst = FREED_FROM if wrong.translate(None, _NOT_FREE) else FRESH_FROM
            return len(cells.translate(None, _UNOWNED)), worst, len(cells.translate(None, _UNWRITTEN)), False
    return count if first >= OWN else 0, first, count if first & WROTE else 0, True


def _consecutive(ids: PageIds) -> bool:
    """Whether each id is one more than the one before."""
    return int(np.count_nonzero(ids[1:] - ids[:-1] == 1)) == len(ids) - 1


def _bounds(ids: PageIds) -> tuple[int, int]:
    """The largest of many ids, and the smallest or any that is not negative."""
    if ids.dtype == np.int64:
        high = ids.item(ids.view(np.uint64).argmax())  # a negative one counts as the largest: one pass for both
        if high >= 0:
            return high, high
    return ids.item(ids.argmin()), ids.item(ids.argmax())
