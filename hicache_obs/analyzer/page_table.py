"""What is known of each page of one pool, in arrays that are looked up and marked by many ids at once.

Costs are numpy calls: a gather or a scatter per array and call. An array's smallest and largest are found by ``argmin``
and ``argmax``, which are vectorised: at 256 ids they take a third of the time of ``min`` and ``max``.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache_obs.analyzer.order import Actor
from hicache_obs.errors import TraceError
from hicache_obs.records import MAX_IDS, PageIds

_LONG: Final = 1024
"""From this many ids on, looking whether they are consecutive pays."""
_ENTRY_BYTES: Final = 33
MAX_TABLE_BYTES: Final = 3 << 29
"""What the page tables of one trace may take, all spaces and pools together."""


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
    """Last group per page of one space and pool; grows to the largest id seen.

    Args:
        room: For this and other tables.

    Attributes:
        wrote, touched: Number of the last group, 0 for none.
        freed, moved: Position in the trace plus one of the last free and move.
        scratch: All false between calls.
        newest: Number of each actor's last group here.
    """

    __slots__ = ("freed", "moved", "newest", "room", "scratch", "touched", "wrote")

    def __init__(self, room: Room) -> None:
        self.room = room
        self.wrote = self.touched = self.freed = self.moved = np.zeros(0, np.int64)
        self.scratch = np.zeros(0, np.bool_)
        self.newest: dict[Actor, int] = {}

    def place(self, ids: PageIds) -> PageIds | slice:
        """What to index the arrays with for ``ids``, which are not none; makes room for them.

        Raises:
            TraceError: An id is negative or too large, or there is no room.
        """
        first = ids.item(0)
        count = len(ids)
        if count == 1:
            low = high = first
        elif count >= _LONG and ids.item(-1) - first == count - 1 and _consecutive(ids):
            low, high = first, first + count - 1
        else:
            low, high = _bounds(ids)
            first = -1
        if low < 0 or high >= len(self.wrote):
            self._grow(low, high)
        return ids if first < 0 else slice(low, high + 1)

    def _grow(self, low: int, high: int) -> None:
        if high >= MAX_IDS or low < 0:
            raise TraceError(f"page or buffer ids {low} to {high}; expected 0 to {MAX_IDS - 1}")
        size = self.room.grow(len(self.wrote), high + 1, _ENTRY_BYTES)
        for name in ("wrote", "touched", "scratch", "freed", "moved"):
            old = getattr(self, name)
            new = np.zeros(size, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)


def _consecutive(ids: PageIds) -> bool:
    """Whether each id is one more than the one before."""
    return int(np.count_nonzero(ids[1:] - ids[:-1] == 1)) == len(ids) - 1


def _bounds(ids: PageIds) -> tuple[int, int]:
    """The largest id, and the smallest or any that is not negative."""
    if len(ids) >= _LONG and ids.dtype == np.int64:
        high = ids.item(ids.view(np.uint64).argmax())  # a negative one counts as the largest: one pass for both
        if high >= 0:
            return high, high
    return ids.item(ids.argmin()), ids.item(ids.argmax())
