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
States = npt.NDArray[np.uint8]


class Own(enum.IntEnum):
    """Whose a page is. Up to ``HELD``, no access is suspicious."""

    UNKNOWN = 0
    SPENT = 1
    """Freed, and a use of it was reported."""
    HELD = 2
    FRESH = 3
    """Given out, and not written since."""
    FREED = 4


WROTE: Final = 1
SHARED: Final = 2
OWN: Final = 4
"""Factor of the owner in a state."""
FRESH_FROM: Final = OWN * Own.FRESH
FREED_FROM: Final = OWN * Own.FREED
_STATES: Final = OWN * len(Own)
AFTER_WRITE: Final[States] = np.array(
    [(state - OWN if state // OWN == Own.FRESH else state) | WROTE for state in range(_STATES)], np.uint8
)
"""By state: the state once the page is written."""


class PageTable:
    """Last group per page of one space and pool, and its owner; grows to the largest id seen.

    Attributes:
        wrote, touched: Number of the last group, 0 for none.
        state: See above.
        given, freed, moved: Position in the trace plus one of the last allocation, free and move.
        scratch: All false between calls.
    """

    __slots__ = ("_ids", "_place", "freed", "given", "moved", "scratch", "state", "touched", "wrote")

    def __init__(self) -> None:
        self.wrote = self.touched = self.given = self.freed = self.moved = np.zeros(0, np.int64)
        self.state: States = np.zeros(0, np.uint8)
        self.scratch = np.zeros(0, np.bool_)
        self._ids: PageIds | None = None
        self._place: PageIds | slice = slice(0)

    def place(self, ids: PageIds) -> PageIds | slice:
        """What to index the arrays with for ``ids``, which are not none; makes room for them.

        Raises:
            TraceError: An id is negative or too large.
        """
        if ids is self._ids:
            return self._place
        first = ids.item(0)
        count = len(ids)
        place: PageIds | slice = ids
        if count >= _LONG and ids.item(-1) - first == count - 1 and _consecutive(ids):
            low, high = first, first + count - 1
            place = slice(low, high + 1)
        else:
            low, high = _bounds(ids)
        if low < 0 or high >= len(self.wrote):
            self._grow(low, high)
        self._ids, self._place = ids, place
        return place

    def _grow(self, low: int, high: int) -> None:
        if high >= MAX_IDS or low < 0:
            raise TraceError(f"page or buffer ids {low} to {high}; expected 0 to {MAX_IDS - 1}")
        size = max(1024, high + 1, 2 * len(self.wrote))
        for name in ("wrote", "touched", "state", "given", "freed", "moved", "scratch"):
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
