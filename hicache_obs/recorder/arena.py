"""The arena of a ring: page ids, stored once for all records that carry the same array object.

See ``hicache_obs.recorder.ring`` for what the agent's reader relies on.
"""

from __future__ import annotations

import mmap
from typing import Any, Final

import numpy as np

from hicache_obs.recorder.sink import Numbers
from hicache_obs.records import ROWS_CELL, SLOT_LIST, Access, PageIds, RingWord, SlotAccess

_REMEMBERED: Final = 64
"""At least so many arrays may be used again from the arena; a round and a restore of many layers need a dozen."""
_INT64: Final = np.dtype(np.int64)
_ARENA_HEAD: Final = int(RingWord.ARENA_HEAD)  # plain numbers: looking up an enum member costs more than the store


class Arena:
    """Lists of ids, one behind the other in a circle of 64-bit words. The caller holds the ring's lock.

    Args:
        file: The whole ring.
        offset: Where in it the arena begins.
        size: Of the arena, words.
        header: Words of the ring's header.

    Attributes:
        low: Nothing that is stored from now on refers to words before this one.
        promised: What the header says of that: the ring sets it, behind the records before.
    """

    def __init__(self, file: mmap.mmap, offset: int, size: int, header: memoryview) -> None:
        self.low = self.promised = 0
        self._words = header
        self._size: Final = size
        self._file: Any = file  # it takes arrays, which its type does not say before Python 3.12
        self._offset: Final = offset
        self._ids: PageIds = np.frombuffer(file, dtype="<i8", count=size, offset=offset)
        self._view = memoryview(file)[offset:].cast("q")
        """The same for lists of plain numbers: they take numpy five times as long."""
        self._head = self._tail_seen = 0
        self._remembered: dict[int, tuple[PageIds, int, int]] = {}
        """By ``id`` of an array: the array (so that the id stays taken), its arena position and length."""
        self._same_accesses: tuple[Access, ...] | None = None
        """What ``_same_cells`` belongs to: the last accesses, if all their arrays are still remembered."""
        self._same_cells: list[int] = []
        self._forgotten = 0
        """How often arrays were forgotten."""

    def cells(self, accesses: tuple[Access, ...]) -> list[int] | None:
        """Numbers of the access cells; ``None`` if there is no room for the pages."""
        if accesses is self._same_accesses:  # the layers of one round or transfer
            return self._same_cells
        self._same_accesses = None
        forgotten = self._forgotten
        cells: list[int] = []
        for access in accesses:
            ids = access.ids
            known = self._remembered.get(id(ids))
            if known is None:
                known = self._store(ids)
                if known is None:
                    return None
            mode = access.mode | SLOT_LIST if type(access) is SlotAccess else access.mode
            cells += (access.space, mode, access.pool, known[2], known[1])
        if self._forgotten == forgotten:
            self._same_accesses, self._same_cells = accesses, cells
        return cells

    def row_cell(self, rows: PageIds) -> tuple[int, int, int, int, int] | None:
        """Numbers of a row cell; ``None`` if there is no room."""
        known = self._remembered.get(id(rows))
        if known is None:
            known = self._store(rows)
            self._same_accesses = None  # their arrays may just have been forgotten
        return None if known is None else (ROWS_CELL, 0, 0, known[2], known[1])

    def put(self, numbers: Numbers) -> int | None:
        """Store a list that no other record shares: its position. ``None`` if it does not fit without ado."""
        start, count = self._head, len(numbers)
        place, end = start % self._size, start + count
        if place + count > self._size or end - self._tail_seen > self._size or end - self.low > self._size // 2:
            return None
        self._words[_ARENA_HEAD] = self._head = end  # before the words are overwritten
        self._view[place : place + count] = numbers
        return start

    def free(self) -> None:
        """Remember nothing, so that the reader frees all of it. The ring states ``promised`` at once."""
        self._remembered.clear()
        self._same_accesses = None
        self.low = self._head

    def close(self) -> None:
        """Let go of the file. Idempotent."""
        self._remembered.clear()
        self._ids = np.zeros(0, dtype=np.int64)
        self._view.release()

    def _store(self, ids: PageIds) -> tuple[PageIds, int, int] | None:
        count, words, start = len(ids), self._size, self._head
        end = start + count
        if count == 0:
            return ids, start, 0
        if end - self._tail_seen > words:
            self._tail_seen = self._words[RingWord.ARENA_TAIL]
            if end - self._tail_seen > words:
                return None
        self._words[_ARENA_HEAD] = self._head = end  # before the words are overwritten
        place = start % words
        if place + count <= words:
            begin = self._offset + place * 8
            try:
                if ids.dtype is not _INT64:
                    raise TypeError
                self._file[begin : begin + count * 8] = ids  # as below, in half the time
            except (TypeError, ValueError):
                self._ids[place : place + count] = ids
        else:
            first = words - place
            self._ids[place:] = ids[:first]
            self._ids[: count - first] = ids[first:]
        remembered = self._remembered
        remembered[id(ids)] = known = (ids, start, count)
        # At most half the arena stays taken by remembered arrays, so that reading always frees the other half.
        if len(remembered) > 2 * _REMEMBERED or end - self.low > words // 2:
            self._forget(end)
        return known

    def _forget(self, end: int) -> None:
        """Forget the oldest arrays, more than needed, so that this is rare."""
        self._forgotten += 1
        remembered = self._remembered
        keep_from = end - self._size // 4
        excess = len(remembered) - _REMEMBERED
        for number, (key, (_, start, _)) in enumerate(list(remembered.items())):
            if number >= excess and start >= keep_from:
                self.low = start
                return
            del remembered[key]
        self.low = end
