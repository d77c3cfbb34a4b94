"""Page ids of one pool: which are free, and which stream used each of them last."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from hicache_obs.controller.page_stamps import PageStamps, check_range
from hicache_obs.errors import ControllerError, OutOfPages
from hicache_obs.records import Mode, PageIds


class PageAllocator:
    """Hands out page ids of one pool, most recently freed first.

    The free list is a stack in host memory. A page just freed is the likeliest to be in a cache still, and its
    immediate reuse is what makes a missing fence visible: with a queue, a page would rest for a whole turn of
    the pool before anybody could write it again, and races would hide. Pages evicted from a cache are cold: they
    are freed to the bottom and rest there until the warm ones are used up.

    Handing out and taking back a page is bookkeeping: it orders nothing on any stream. That is what the stamps
    are for: each page remembers, per stream, the ticket of the last operation that was launched on it, so a
    page-exact fence waits for those tickets and no more. Stamps outlive ``free``.

    Used by the scheduler's thread only. No method blocks; one that raises has changed nothing.
    """

    def __init__(self, pages: int, *, name: str) -> None:
        """``pages`` ids, all free, page 0 on top. ``name`` is for messages (``"device"``)."""
        if pages < 1:
            raise ControllerError(f"{name} pool: {pages} pages; expected an integer ≥ 1")
        self.pages = pages
        self.name = name
        self._ascending: PageIds = np.arange(pages, dtype=np.int64)
        self._stack: PageIds = self._ascending[::-1].copy()
        self._top = pages
        self._used: npt.NDArray[np.bool_] = np.zeros(pages, dtype=np.bool_)
        self._position: PageIds = np.zeros(pages, dtype=np.int64)
        self._groups = 0
        self._deferred: list[PageIds] = []
        self._stamps = PageStamps(pages, name=name)

    @property
    def available(self) -> int:
        """Pages that ``alloc`` can hand out now."""
        return self._top

    @property
    def in_use(self) -> int:
        """Pages handed out and not freed."""
        return self.pages - self._top - sum(map(len, self._deferred))

    def alloc(self, n: int) -> PageIds:
        """``(n,) int64`` fresh array of page ids; partner of ``free``.

        Raises:
            OutOfPages: Fewer than ``n`` pages are free.
        """
        if n < 0:
            raise ControllerError(f"{self.name} pool: alloc({n}); expected an integer ≥ 0")
        left = self._top - n
        if left < 0:
            deferred = self.pages - self._top - self.in_use
            later = f"; {deferred} more come back when the open free group ends" if deferred else ""
            raise OutOfPages(f"{self.name} pool: {n} pages asked for, {self._top} of {self.pages} are free{later}")
        ids: PageIds = self._stack[left : self._top][::-1].copy()
        self._top = left
        self._used[ids] = True
        return ids

    def free(self, ids: PageIds, *, cold: bool = False) -> None:
        """Take back ``ids``, the last one on top; partner of ``alloc``. Inside ``free_group``: at its end.

        Args:
            ids: ``(n,) int64`` pages handed out before.
            cold: Put them under all free pages instead, at once, also inside a group.

        Raises:
            ControllerError: An id is out of range, not handed out, or named twice.
        """
        count = len(ids)
        if not count:
            return
        check_range(ids, self.pages, self.name)
        position = self._ascending[:count]
        if count <= self.pages:  # more must be a repetition, which the second test finds
            self._position[ids] = position
        if not self._used[ids].all() or count > self.pages or (self._position[ids] != position).any():
            raise ControllerError(self._double_free(ids))
        self._used[ids] = False
        if cold:
            top = self._top + count
            self._stack[count:top] = self._stack[: self._top].copy()
            self._stack[:count] = ids[::-1]
            self._top = top
        elif self._groups:
            self._deferred.append(ids.copy())
        else:
            self._push(ids)

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Inside the block freed pages stay out of reach of ``alloc``; they come back when it ends.

        Groups nest; the outermost counts. Pages come back in the order they were freed, also after an exception.
        """
        self._groups += 1
        try:
            yield
        finally:
            self._groups -= 1
            if not self._groups:
                for ids in self._deferred:
                    self._push(ids)
                self._deferred.clear()

    def stamp(self, ids: PageIds, stream_key: int, ticket: int, *, mode: Mode = Mode.WRITE) -> None:
        """See ``PageStamps.stamp``."""
        self._stamps.stamp(ids, stream_key, ticket, mode=mode)

    def last_uses(self, ids: PageIds, mode: Mode = Mode.WRITE) -> dict[int, int]:
        """See ``PageStamps.last_uses``."""
        return self._stamps.last_uses(ids, mode)

    def _push(self, ids: PageIds) -> None:
        top = self._top + len(ids)
        self._stack[self._top : top] = ids
        self._top = top

    def _double_free(self, ids: PageIds) -> str:
        idle = ids[~self._used[ids]]
        if len(idle):
            return f"{self.name} pool: free of page {idle[0]}, which is free already"
        unique, counts = np.unique(ids, return_counts=True)
        return f"{self.name} pool: free names page {unique[counts > 1][0]} twice"
