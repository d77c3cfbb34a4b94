"""Turns the slots of a ring into records. Every number in a slot is checked before it is used.

The partner is ``hicache_obs.recorder.ring``; ``hicache_obs.records`` has the layout.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

import numpy as np

from hicache_obs.errors import TraceError
from hicache_obs.readers.ring_header import RingInfo
from hicache_obs.readers.trace_file import node_fault
from hicache_obs.records import (
    KINDS,
    MAX_ACCESSES,
    MAX_IDS,
    MAX_TEXT_BYTES,
    ROWS_CELL,
    SLOT_BYTES,
    SLOT_LIST,
    Access,
    AnyRecord,
    Collective,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    Purpose,
    RecordStream,
    Relocate,
    RowsDiscarded,
    Space,
    StreamId,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
    unpack_rows,
    unpack_slots,
)

_SLOT: Final = struct.Struct("<BBHIqqqqqqii")
_CELLS: Final = struct.Struct("<" + "BBHIQ" * MAX_ACCESSES)
_CELL: Final = struct.Struct("<BBHIQ")
_CELL_BYTES: Final = _CELL.size

_SPACES: Final = tuple(Space)
_MODES: Final = tuple(Mode)
_DIRECTIONS: Final = tuple(Direction)
_PURPOSES: Final = tuple(Purpose)
_REASONS: Final = tuple(DropReason)
_IO_KINDS: Final = tuple(IoKind)
_STREAM_KINDS: Final = tuple(StreamKind)
_DEFINE_SPACES: Final = tuple(DefineSpace)

LoadIds = Callable[[int, int], PageIds]
"""``load(place, count)``: a read-only copy of words of the arena that lie side by side."""
T = TypeVar("T")

NO_PAGES: Final[PageIds] = np.zeros(0, dtype=np.int64)
NO_PAGES.flags.writeable = False


class Overwritten(Exception):
    """A record refers to page ids that are gone."""


class RingDecoder:
    """Turns slots into records.

    Args:
        path: For messages.
        slots: The slots, each at its place; only those that are asked for need to be filled.
        load: Fetches words of the arena.
        info: The file's header.
    """

    def __init__(self, path: Path, slots: memoryview, load: LoadIds, info: RingInfo) -> None:
        self._path = path
        self._slots = slots
        self._load = load
        self._info = info
        self._shared: dict[int, PageIds] = {}
        """By arena position, oldest first: records that share an array get the same object again."""
        self._repeated: dict[bytes, tuple[Access, ...]] = {}
        """By access cells as they are in the slot: the copies of one restore all have the same."""
        self._paged: dict[int, tuple[int, PageIds]] = {}
        """By arena position, oldest first: length of a slot list, and the pages made of it."""
        self.arena_from = 0
        """Positions below this are gone."""
        self.arena_until = 0
        """Positions from this on are not handed out yet."""
        self._makers: tuple[Callable[[int, tuple[int, ...]], AnyRecord], ...] = (
            self._kernel,
            self._memcpy,
            self._event_record,
            self._event_wait,
            self._wait_stream,
            self._event_query,
            self._event_sync,
            self._host_sync,
            self._host_access,
            self._page_alloc,
            self._page_free,
            self._record_stream,
            self._times,
            self._lost,
            self._define,
            self._graph_replay,
            self._graph_node,
            self._relocate,
            self._io_begin,
            self._io_end,
            self._thread_post,
            self._thread_recv,
            self._tensor_alloc,
            self._tensor_free,
            self._collective,
            self._rows_discarded,
        )
        assert len(self._makers) == len(KINDS)

    def record(self, number: int) -> AnyRecord:
        """Record ``number`` of the ring.

        Raises:
            TraceError: It is not a record.
            Overwritten: Its page ids are gone.
        """
        place = (number % self._info.slots) * SLOT_BYTES
        fields = _SLOT.unpack_from(self._slots, place)
        kind = fields[0]
        if kind >= len(self._makers):
            raise self._bad(number, f"kind {kind}; known are 0 to {len(self._makers) - 1}")
        try:
            record: AnyRecord = self._makers[kind](place, fields)
            return record
        except (_Damaged, UnicodeDecodeError) as error:
            raise self._bad(number, str(error)) from None

    def forget(self, below: int) -> None:
        """Drop shared arrays that no later record refers to."""
        self._repeated.clear()
        for shared in (self._shared, self._paged):
            while shared:
                oldest = next(iter(shared))
                if oldest >= below:
                    break
                del shared[oldest]

    def _bad(self, number: int, what: str) -> TraceError:
        return TraceError(f"{self._path}: record {number} is damaged: {what}")

    def _accesses(self, place: int, count: int) -> tuple[Access, ...]:
        if count > MAX_ACCESSES:
            raise _Damaged(f"{count} accesses; at most {MAX_ACCESSES} fit")
        start = place + _SLOT.size
        raw = bytes(self._slots[start : start + _CELL_BYTES * count])
        known = self._repeated.get(raw)
        if known is not None:
            return known
        cells = _CELLS.unpack_from(self._slots, start)
        accesses = self._repeated[raw] = tuple(
            Access(
                _one_of(_SPACES, cells[at], "space"),
                _one_of(_MODES, cells[at + 1] & ~SLOT_LIST, "access mode"),
                (self._slots_pages if cells[at + 1] & SLOT_LIST else self._ids)(cells[at + 4], cells[at + 3]),
                cells[at + 2],
            )
            for at in range(0, 5 * count, 5)
        )
        return accesses

    def _access(self, place: int, count: int) -> Access:
        if count != 1:
            raise _Damaged(f"{count} accesses where exactly 1 belongs")
        return self._accesses(place, 1)[0]

    def _row_cell(self, place: int, number: int) -> PageIds:
        """Ids of cell ``number``, which must be a row cell."""
        space, _, _, count, position = _CELL.unpack_from(self._slots, place + _SLOT.size + _CELL_BYTES * number)
        if space != ROWS_CELL:
            raise _Damaged(f"space {space} where a row cell ({ROWS_CELL}) belongs")
        return self._ids(position, count, pages=False)

    def _slots_pages(self, position: int, count: int) -> PageIds:
        """The pages of a slot list; the same object for the same list."""
        known = self._paged.get(position)
        if known is not None and known[0] == count:
            return known[1]
        try:
            ids = unpack_slots(self._words(position, count))
        except ValueError as error:
            raise _Damaged(str(error)) from None
        _check_ids(ids)
        ids.flags.writeable = False
        self._paged[position] = count, ids
        return ids

    def _ids(self, position: int, count: int, *, pages: bool = True) -> PageIds:
        if count == 0:
            return NO_PAGES
        known = self._shared.get(position)
        if known is not None and len(known) == count:
            return known
        ids = self._words(position, count)
        if pages:
            _check_ids(ids)
        self._shared[position] = ids
        return ids

    def _words(self, position: int, count: int) -> PageIds:
        """``count`` words of the arena; read-only."""
        if count == 0:
            return NO_PAGES
        if position < self.arena_from:
            raise Overwritten
        if count > self._info.arena_words or position + count > self.arena_until:
            raise _Damaged(f"{count} page ids at arena position {position}, which ends at {self.arena_until}")
        words = self._info.arena_words
        place = position % words
        if place + count <= words:
            ids = self._load(place, count)
        else:
            ids = np.concatenate((self._load(place, words - place), self._load(0, place + count - words)))
            ids.flags.writeable = False
        return ids

    # -- one method per kind, in the order of ``records.KINDS``; f: kind count aux thread op host_ns a b c d lo hi --

    def _kernel(self, place: int, f: tuple[int, ...]) -> Kernel:
        count = f[1]
        rows = None
        if 0 < count <= MAX_ACCESSES and self._slots[place + _SLOT.size + _CELL_BYTES * (count - 1)] == ROWS_CELL:
            count -= 1
            rows = self._row_cell(place, count)
            _check_rows(rows)
        return Kernel(
            OpId(f[4]), ThreadId(f[3]), f[5], StreamId(f[6]), f[7], f[8], f[9], (f[10], f[11]),
            self._accesses(place, count), rows,
        )  # fmt: skip

    def _memcpy(self, place: int, f: tuple[int, ...]) -> Memcpy:
        return Memcpy(
            OpId(f[4]), ThreadId(f[3]), f[5], StreamId(f[6]), f[7], f[8], f[9], (f[10], f[11]),
            self._accesses(place, f[1]), _one_of(_DIRECTIONS, f[2], "direction"),
        )  # fmt: skip

    def _event_record(self, place: int, f: tuple[int, ...]) -> EventRecord:
        return EventRecord(OpId(f[4]), ThreadId(f[3]), f[5], EventId(f[6]), StreamId(f[7]))

    def _event_wait(self, place: int, f: tuple[int, ...]) -> EventWait:
        purpose = _one_of(_PURPOSES, f[2], "purpose")
        return EventWait(OpId(f[4]), ThreadId(f[3]), f[5], EventId(f[6]), StreamId(f[7]), purpose)

    def _wait_stream(self, place: int, f: tuple[int, ...]) -> WaitStream:
        purpose = _one_of(_PURPOSES, f[2], "purpose")
        return WaitStream(OpId(f[4]), ThreadId(f[3]), f[5], StreamId(f[6]), StreamId(f[7]), purpose)

    def _event_query(self, place: int, f: tuple[int, ...]) -> EventQuery:
        return EventQuery(OpId(f[4]), ThreadId(f[3]), f[5], EventId(f[6]), bool(f[2]))

    def _event_sync(self, place: int, f: tuple[int, ...]) -> EventSync:
        return EventSync(OpId(f[4]), ThreadId(f[3]), f[5], EventId(f[6]))

    def _host_sync(self, place: int, f: tuple[int, ...]) -> HostSync:
        return HostSync(OpId(f[4]), ThreadId(f[3]), f[5], StreamId(f[6]) if f[2] else None)

    def _host_access(self, place: int, f: tuple[int, ...]) -> HostAccess:
        accesses = self._accesses(place, f[1])
        return HostAccess(OpId(f[4]), ThreadId(f[3]), f[5], f[7], (f[10], f[11]), accesses)

    def _page_alloc(self, place: int, f: tuple[int, ...]) -> PageAlloc:
        return PageAlloc(OpId(f[4]), ThreadId(f[3]), f[5], f[8], self._access(place, f[1]))

    def _page_free(self, place: int, f: tuple[int, ...]) -> PageFree:
        return PageFree(OpId(f[4]), ThreadId(f[3]), f[5], f[8], self._access(place, f[1]))

    def _record_stream(self, place: int, f: tuple[int, ...]) -> RecordStream:
        return RecordStream(OpId(f[4]), ThreadId(f[3]), f[5], f[6], StreamId(f[7]))

    def _times(self, place: int, f: tuple[int, ...]) -> Times:
        return Times(OpId(f[4]), ThreadId(f[3]), f[5], f[6], f[7], f[8])

    def _lost(self, place: int, f: tuple[int, ...]) -> Lost:
        return Lost(OpId(f[4]), ThreadId(f[3]), f[5], f[6], _one_of(_REASONS, f[2], "drop reason"))

    def _define(self, place: int, f: tuple[int, ...]) -> Define:
        if f[2] > MAX_TEXT_BYTES:
            raise _Damaged(f"a text of {f[2]} bytes; at most {MAX_TEXT_BYTES} fit")
        start = place + _SLOT.size
        text = bytes(self._slots[start : start + f[2]]).decode()
        space = _one_of(_DEFINE_SPACES, f[8], "definition space")
        if space is DefineSpace.STREAM:
            _one_of(_STREAM_KINDS, f[7], "stream kind")
        return Define(OpId(f[4]), ThreadId(f[3]), f[5], space, f[6], text, f[7])

    def _graph_replay(self, place: int, f: tuple[int, ...]) -> GraphReplay:
        return GraphReplay(
            OpId(f[4]), ThreadId(f[3]), f[5], f[9], StreamId(f[6]), f[7], f[8], f[2], (f[10], f[11]),
            self._accesses(place, f[1]),
        )  # fmt: skip

    def _graph_node(self, place: int, f: tuple[int, ...]) -> GraphNode:
        event = EventId(f[6]) if f[2] else None
        if problem := node_fault(f[8], f[7]):
            raise _Damaged(problem)
        accesses = self._accesses(place, f[1])
        return GraphNode(OpId(f[4]), ThreadId(f[3]), f[5], f[8], f[7], event, (f[10], f[11]), accesses)

    def _relocate(self, place: int, f: tuple[int, ...]) -> Relocate:
        accesses = self._accesses(place, f[1])
        return Relocate(OpId(f[4]), ThreadId(f[3]), f[5], StreamId(f[6]), f[7], (f[10], f[11]), accesses)

    def _io_begin(self, place: int, f: tuple[int, ...]) -> IoBegin:
        kind = _one_of(_IO_KINDS, f[2], "I/O kind")
        accesses = self._accesses(place, f[1])
        return IoBegin(OpId(f[4]), ThreadId(f[3]), f[5], f[6], kind, f[7], (f[10], f[11]), accesses)

    def _io_end(self, place: int, f: tuple[int, ...]) -> IoEnd:
        return IoEnd(OpId(f[4]), ThreadId(f[3]), f[5], f[6])

    def _thread_post(self, place: int, f: tuple[int, ...]) -> ThreadPost:
        return ThreadPost(OpId(f[4]), ThreadId(f[3]), f[5], f[6])

    def _thread_recv(self, place: int, f: tuple[int, ...]) -> ThreadRecv:
        return ThreadRecv(OpId(f[4]), ThreadId(f[3]), f[5], f[6])

    def _tensor_alloc(self, place: int, f: tuple[int, ...]) -> TensorAlloc:
        return TensorAlloc(OpId(f[4]), ThreadId(f[3]), f[5], f[8], f[6], StreamId(f[7]))

    def _tensor_free(self, place: int, f: tuple[int, ...]) -> TensorFree:
        return TensorFree(OpId(f[4]), ThreadId(f[3]), f[5], f[8])

    def _collective(self, place: int, f: tuple[int, ...]) -> Collective:
        return Collective(OpId(f[4]), ThreadId(f[3]), f[5], f[6], f[8], f[7])

    def _rows_discarded(self, place: int, f: tuple[int, ...]) -> RowsDiscarded:
        return RowsDiscarded(OpId(f[4]), ThreadId(f[3]), f[5], f[8], self._row_cell(place, 0))


class _Damaged(Exception):
    """A number in a slot is impossible."""


def _check_rows(rows: PageIds) -> None:
    try:
        unpack_rows(rows)
    except ValueError as error:
        raise _Damaged(str(error)) from None


def _check_ids(ids: PageIds) -> None:
    top = ids.view(np.uint64)  # a negative id counts as a large one; argmax takes a fifth of the time of max
    if len(top) and top.item(top.argmax()) >= MAX_IDS:
        raise _Damaged(f"page or buffer ids {ids.min()} to {ids.max()}; allowed are 0 to {MAX_IDS - 1}")


def _one_of(members: tuple[T, ...], value: int, what: str) -> T:
    if not 0 <= value < len(members):
        raise _Damaged(f"{what} {value}; known are 0 to {len(members) - 1}")
    return members[value]
