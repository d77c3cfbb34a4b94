"""Reads a ring file: live, as the one agent that frees what it has read, or once, as it was left behind.

A ring is untrusted input: every number in it is checked before it is used. The partner is
``hicache_obs.recorder.ring``; ``hicache_obs.records`` has the layout.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np

from hicache_obs.errors import LayoutError, RingTaken, TraceError
from hicache_obs.findings import Hazard
from hicache_obs.readers.trace_file import node_fault, size_of
from hicache_obs.records import (
    HEADER_BYTES,
    KINDS,
    MAX_ACCESSES,
    MAX_ARENA_WORDS,
    MAX_IDS,
    MAX_SLOTS,
    MAX_TEXT_BYTES,
    NO_OP,
    OBSERVABLE_STATED,
    RING_MAGIC,
    RING_VERSION,
    ROWS_CELL,
    SLOT_BYTES,
    SLOT_LIST,
    Access,
    AnyRecord,
    CaptureMode,
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
    Ranks,
    RecordStream,
    Relocate,
    RingWord,
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
from hicache_obs.trace import Trace, make_trace

_SLOT: Final = struct.Struct("<BBHIqqqqqqii")
_CELLS: Final = struct.Struct("<" + "BBHIQ" * MAX_ACCESSES)
_CELL: Final = struct.Struct("<BBHIQ")
_CELL_BYTES: Final = _CELL.size
_WORDS: Final = struct.Struct(f"<{HEADER_BYTES // 8}q")
_READ_BYTES: Final = 1 << 30
_WINDOW_WORDS: Final = 1 << 13
_MAGIC: Final = int.from_bytes(RING_MAGIC, "little")

MAX_RANKS: Final = 1 << 20
"""A rank is a metric label: a header must not make as many as it likes."""

_SPACES: Final = tuple(Space)
_MODES: Final = tuple(Mode)
_DIRECTIONS: Final = tuple(Direction)
_PURPOSES: Final = tuple(Purpose)
_REASONS: Final = tuple(DropReason)
_IO_KINDS: Final = tuple(IoKind)
_STREAM_KINDS: Final = tuple(StreamKind)
_DEFINE_SPACES: Final = tuple(DefineSpace)

Words = memoryview | tuple[int, ...]
LoadIds = Callable[[int, int], PageIds]
"""``load(place, count)``: a read-only copy of words of the arena that lie side by side."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RingInfo:
    """What the header says for good.

    Attributes:
        version: Layout version.
        slots: Records the ring holds.
        arena_words: Page ids the ring holds.
        pid: Process that made it.
        ranks: Which worker of a server that is.
        wall_ns, host_ns: Unix time and host clock, read together when the ring was made.
        process_start: When process ``pid`` was started, clock ticks since boot; 0 if unknown.
        pid_namespace: Inode number of the namespace that ``pid`` counts in; 0 if unknown.
        first_mode: What the process was to do when it made the ring.
    """

    version: int
    slots: int
    arena_words: int
    pid: int
    ranks: Ranks
    wall_ns: int
    host_ns: int
    process_start: int = 0
    pid_namespace: int = 0
    first_mode: CaptureMode = CaptureMode.OBSERVE

    def to_wall_ns(self, host_ns: int) -> int:
        """Unix time of a host clock reading of the recorded process."""
        return self.wall_ns + host_ns - self.host_ns


class _Overwritten(Exception):
    """A record refers to page ids that are gone."""


class _Decoder:
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
            _Overwritten: Its page ids are gone.
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
            return _NO_PAGES
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
            return _NO_PAGES
        if position < self.arena_from:
            raise _Overwritten
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


class RingReader:
    """The agent's end of a live ring: reads records in order and frees what it has read.

    One reader per ring, on one thread at a time; a second one is refused. The writer may run, hang or be long
    dead. Only the header is mapped, and the file's size is checked before it is touched: reading a mapped page of
    a file that somebody has cut short would end this process.

    Every method and property raises ``TraceError`` if the file has been cut short.

    Raises:
        LayoutError: The ring was written by another version.
        RingTaken: Another agent reads it.
        TraceError: The file is no ring.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path: Final = Path(path)
        self._file = _open(self.path, "r+b")
        try:
            self.info: Final = _read_info(self.path, self._file.fileno())
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RingTaken(f"{self.path}: another agent reads this ring; a ring has one reader") from None
            self._map = mmap.mmap(self._file.fileno(), HEADER_BYTES)
        except BaseException:
            self._file.close()
            raise
        self._size_bytes = _size_bytes(self.info.slots, self.info.arena_words)
        self._arena_at = HEADER_BYTES + self.info.slots * SLOT_BYTES
        self._header_words = memoryview(self._map).cast("q")
        # Zero pages until a slot is read; each record is copied to its own place.
        self._slots = memoryview(mmap.mmap(-1, self.info.slots * SLOT_BYTES))
        self._decoder = _Decoder(self.path, self._slots, self._load_ids, self.info)
        words = self._words()
        self._window: PageIds = _NO_PAGES
        """Arena words from ``_window_at`` on, as they were once everything below ``_until`` was written."""
        self._window_at = 0
        self._tail = self._until = words[RingWord.TAIL]
        self._promised = self._arena_free = words[RingWord.ARENA_TAIL]

    def poll(self, limit: int = 1 << 16) -> list[AnyRecord]:
        """The next records, ``limit`` at most, in the order they were issued. Empty if there are none yet.

        The records keep nothing of the ring: their arrays are copies, and its room is free when this returns.

        Raises:
            TraceError: The file is damaged; the same record is met again by the next call.
        """
        records = self.read(limit)
        self.release()
        return records

    def read(self, limit: int = 1 << 16) -> list[AnyRecord]:
        """Like ``poll``, but the room stays taken until ``release``: an agent that is killed between the two finds
        the same records again.
        """
        records: list[AnyRecord] = []
        while len(records) < limit:
            known = self._tail
            try:
                self._read(records, limit - len(records))
            except TraceError:
                if not records:
                    raise
                break  # those are good; the next call raises
            if self._tail == known:
                break
        return records

    def release(self) -> None:
        """Free the room of everything ``read`` so far; the partner of ``read``."""
        words = self._words()
        words[RingWord.TAIL] = self._tail
        words[RingWord.ARENA_TAIL] = self._arena_free

    @property
    def position(self) -> int:
        """Number of the next record, counted from 0 since the ring was made."""
        return self._tail

    @property
    def pending(self) -> int:
        """Records written and not read yet."""
        return max(0, self._words()[RingWord.HEAD] - self._tail)

    @property
    def dropped(self) -> dict[DropReason, int]:
        """Records lost so far, by reason; reasons that never happened are left out."""
        return _counts(self._words(), RingWord.DROPPED)

    @property
    def unreported(self) -> list[Lost]:
        """One ``Lost`` per reason for records that were dropped after the last one that the ring states. Exact only
        when the writer has ended.
        """
        return _unreported(self._words(), 0)

    @property
    def observable(self) -> frozenset[Hazard] | None:
        """Hazards whose records this process captures; ``None`` if it has not stated that."""
        bits = self._words()[RingWord.OBSERVABLE]
        if not bits & OBSERVABLE_STATED:
            return None
        return frozenset(hazard for place, hazard in enumerate(Hazard) if bits >> place & 1)

    @property
    def heartbeat_ns(self) -> int:
        """Host clock of the recorded process when it last said it is alive."""
        return self._words()[RingWord.HEARTBEAT_NS]

    @property
    def mode(self) -> CaptureMode:
        """What the recorded process does."""
        return _mode(self._words()[RingWord.MODE])

    @mode.setter
    def mode(self, mode: CaptureMode) -> None:
        self._words()[RingWord.MODE] = mode

    @property
    def closed(self) -> bool:
        """Whether the writer has closed the ring: what is pending is all that will ever come."""
        return bool(self._words()[RingWord.CLOSED])

    @property
    def finished(self) -> bool:
        """Whether an agent has said that nothing is left to do here (``finish``)."""
        return bool(self._words()[RingWord.FINISHED])

    def finish(self) -> None:
        """Say so: the writer has ended, all is read, and every pair has its verdict."""
        self._words()[RingWord.FINISHED] = 1

    def _read(self, records: list[AnyRecord], limit: int) -> None:
        """Append the next ``limit`` records at most; at the end of what was there, note what nothing refers to."""
        words, decoder = self._words(), self._decoder
        if self._tail >= self._until:
            # The promise before the head: every record it does not cover is then below the head.
            self._promised = words[RingWord.ARENA_LOW]
            self._until = words[RingWord.HEAD]
            self._window = _NO_PAGES
            decoder.arena_until = words[RingWord.ARENA_HEAD]
            decoder.arena_from = max(0, decoder.arena_until - self.info.arena_words)
            if not 0 <= self._until - self._tail <= self.info.slots:
                raise TraceError(f"{self.path}: damaged header: {self._tail} records read of {self._until} written")
        stop = min(self._until, self._tail + limit)
        self._fetch(self._tail, stop)
        try:
            records += [decoder.record(number) for number in range(self._tail, stop)]
        except (TraceError, _Overwritten):
            self._read_good(records, stop)
            return
        self._tail = stop
        if stop == self._until:
            self._arena_free = self._promised
            decoder.forget(self._promised)

    def _read_good(self, records: list[AnyRecord], stop: int) -> None:
        """Append the records before the first one that is damaged; raise if that is the next."""
        first = self._tail
        try:
            while self._tail < stop:
                records.append(self._decoder.record(self._tail))
                self._tail += 1
        except _Overwritten:
            if self._tail == first:
                raise TraceError(f"{self.path}: damaged: a record refers to page ids that are gone") from None
        except TraceError:
            if self._tail == first:
                raise

    def _words(self) -> memoryview:
        """The header, safe to touch now."""
        size = os.fstat(self._file.fileno()).st_size
        if size < self._size_bytes:
            raise self._cut_short(size)
        return self._header_words

    def _fetch(self, first: int, stop: int) -> None:
        """Copy the slots of records ``first`` to ``stop`` to their places."""
        slots = self.info.slots
        while first < stop:
            place = first % slots
            count = min(stop - first, slots - place)
            part = self._slots[place * SLOT_BYTES : (place + count) * SLOT_BYTES]
            got = os.preadv(self._file.fileno(), [part], HEADER_BYTES + place * SLOT_BYTES)
            if got < len(part):
                raise self._cut_short(HEADER_BYTES + place * SLOT_BYTES + got)
            first += count

    def _load_ids(self, place: int, count: int) -> PageIds:
        """Arrays lie one after the other, so many of them come with one call to the system."""
        first = place - self._window_at
        if first < 0 or first + count > len(self._window):
            wanted = max(count, min(_WINDOW_WORDS, self.info.arena_words - place))
            start = self._arena_at + place * 8
            data = os.pread(self._file.fileno(), wanted * 8, start)
            if len(data) < wanted * 8:
                raise self._cut_short(start + len(data))
            self._window, self._window_at, first = np.frombuffer(data, dtype="<i8"), place, 0
        ids: PageIds = self._window[first : first + count].copy()  # a view would keep the whole window alive
        ids.flags.writeable = False
        return ids

    def _cut_short(self, size: int) -> TraceError:
        return TraceError(f"{self.path}: cut short: {size} bytes of {self._size_bytes}")

    def close(self) -> None:
        """Unmap the file. What was not read stays in it. Idempotent."""
        if self._map.closed:
            return
        self._header_words.release()
        self._map.close()
        self._slots.release()
        self._file.close()


def set_mode(path: str | os.PathLike[str], mode: CaptureMode) -> CaptureMode:
    """Set the mode byte of a ring that somebody else reads; returns what it was.

    Raises:
        TraceError: The file is no ring this version can read.
    """
    target = Path(path)
    with _open(target, "r+b") as file:
        _read_info(target, file.fileno())
        with mmap.mmap(file.fileno(), HEADER_BYTES) as header, memoryview(header).cast("q") as words:
            before = words[RingWord.MODE]
            words[RingWord.MODE] = mode
    return _mode(before)


def read_ring(path: str | os.PathLike[str]) -> Trace:
    """Everything a ring still holds, read or not, without changing it; its process may still be writing.

    Records that are gone from the file are stated by a ``Lost`` record.

    Raises:
        TraceError: The file is no ring this version can read, or it is damaged.
    """
    target = Path(path)
    with _open(target, "rb") as file:
        descriptor = file.fileno()
        info = _read_info(target, descriptor)
        before = _read_words(descriptor)
        arena_at = HEADER_BYTES + info.slots * SLOT_BYTES
        # A file that was never full is read as far as it was written: most of a large one is empty.
        slots = _read(descriptor, SLOT_BYTES * _used(before[RingWord.HEAD], info.slots), HEADER_BYTES)
        arena = _read(descriptor, 8 * _used(before[RingWord.ARENA_HEAD], info.arena_words), arena_at)
        after = _read_words(descriptor)
    head = before[RingWord.HEAD]
    unread = after[RingWord.HEAD] - info.slots == after[RingWord.TAIL]
    # The writer may be in the middle of the next slot, unless that one is not read yet.
    first = max(0, after[RingWord.HEAD] - info.slots + (0 if unread else 1))
    if head < 0 or not head <= after[RingWord.HEAD] or not 0 <= after[RingWord.TAIL] <= after[RingWord.HEAD]:
        raise TraceError(f"{target}: damaged header: {after[RingWord.TAIL]} records read of {head} written")
    words = np.frombuffer(arena, dtype="<i8")
    decoder = _Decoder(target, memoryview(slots), lambda place, count: words[place : place + count], info)
    decoder.arena_until = before[RingWord.ARENA_HEAD]
    decoder.arena_from = max(0, after[RingWord.ARENA_HEAD] - info.arena_words)
    records: list[AnyRecord] = []
    for number in range(first, head):
        try:
            records.append(decoder.record(number))
        except _Overwritten:
            records.clear()
            first = number + 1
    notes: tuple[str, ...] = ()
    if first:
        records.insert(0, Lost(NO_OP, ThreadId(0), 0, first, DropReason.MISSING))
        notes = (f"{target}: the oldest {first} records are no longer in the ring; an agent has read them",)
    records += _unreported(before, records[-1].host_ns if records else 0)
    return make_trace(str(target), records, notes=notes)


@dataclass(frozen=True, slots=True)
class RingState:
    """What a ring's header says at one moment.

    Attributes:
        info: What it says for good.
        mode: What the process does.
        written, read: Records written so far; those of them that an agent has read.
        dropped: Records lost so far, by reason.
        heartbeat_ns: Host clock of the process when it last said it is alive.
        closed: The process has closed the ring.
        finished: An agent has read the ring of the ended process whole.
    """

    info: RingInfo
    mode: CaptureMode
    written: int
    read: int
    dropped: dict[DropReason, int]
    heartbeat_ns: int
    closed: bool
    finished: bool


def read_state(path: str | os.PathLike[str]) -> RingState:
    """What the header of a ring says now. Nothing is changed; anybody may read or write it meanwhile.

    Raises:
        TraceError: The file is no ring this version can read.
    """
    target = Path(path)
    with _open(target, "rb") as file:
        info = _read_info(target, file.fileno())
        words = _read_words(file.fileno())
    return RingState(
        info,
        _mode(words[RingWord.MODE]),
        words[RingWord.HEAD],
        words[RingWord.TAIL],
        _counts(words, RingWord.DROPPED),
        words[RingWord.HEARTBEAT_NS],
        bool(words[RingWord.CLOSED]),
        bool(words[RingWord.FINISHED]),
    )


def read_process(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """Process id, its start and its namespace (``RingInfo``) as a ring of any version, whole or cut short, says them.

    ``None`` if it says nothing.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            words = _read_words(file.fileno())
    except (OSError, struct.error):
        return None
    if words[RingWord.MAGIC] != _MAGIC:
        return None
    return words[RingWord.PID], words[RingWord.PROCESS_START], words[RingWord.PID_NAMESPACE]


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


def _open(path: Path, how: str) -> Any:
    size_of(path)
    try:
        return open(path, how, buffering=0)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def _size_bytes(slots: int, arena_words: int) -> int:
    return HEADER_BYTES + slots * SLOT_BYTES + arena_words * 8


def _used(written: int, room: int) -> int:
    """How many places of ``room`` hold something after ``written`` were written."""
    return max(0, min(written, room))


def _read(descriptor: int, size: int, offset: int) -> bytearray:
    """``size`` bytes of a file. One call reads 2 GiB at most."""
    data = bytearray(size)
    done = 0
    with memoryview(data) as view:
        while done < size:
            count = os.preadv(descriptor, [view[done : done + _READ_BYTES]], offset + done)
            if not count:
                break  # it was cut meanwhile; what is missing reads as zeros
            done += count
    return data


def _read_words(descriptor: int) -> tuple[int, ...]:
    return _WORDS.unpack(os.pread(descriptor, HEADER_BYTES, 0))


def _read_info(path: Path, descriptor: int) -> RingInfo:
    size = os.fstat(descriptor).st_size
    if size < HEADER_BYTES:
        raise TraceError(f"{path}: not a ring: {size} bytes, and a ring's header alone has {HEADER_BYTES}")
    words = _read_words(descriptor)
    if words[RingWord.MAGIC] != _MAGIC:
        found = words[RingWord.MAGIC].to_bytes(8, "little", signed=True)
        raise TraceError(f"{path}: not a ring: it begins with {found!r}, not {RING_MAGIC!r}")
    version = words[RingWord.VERSION]
    if version > RING_VERSION:
        raise LayoutError(f"{path}: ring layout {version} is newer than {RING_VERSION}, the newest known here; upgrade")
    if 0 < version < RING_VERSION:
        raise LayoutError(
            f"{path}: ring layout {version} is older than {RING_VERSION}, the only one known here; "
            "read it with the version that wrote it"
        )
    slots, arena_words = words[RingWord.SLOTS], words[RingWord.ARENA_WORDS]
    for name, value, limit in (("slots", slots, MAX_SLOTS), ("arena words", arena_words, MAX_ARENA_WORDS)):
        if not 0 < value <= limit:
            raise TraceError(f"{path}: damaged header: {value} {name}; must be from 1 to {limit}")
    for name, word in (("tp", RingWord.TP_RANK), ("pp", RingWord.PP_RANK), ("dp", RingWord.DP_RANK)):
        if not 0 <= words[word] < MAX_RANKS:
            raise TraceError(f"{path}: damaged header: {name} rank {words[word]}; must be from 0 to {MAX_RANKS - 1}")
    if version < 1 or words[RingWord.SLOT_BYTES] != SLOT_BYTES:
        raise TraceError(f"{path}: damaged header: layout {version} with {words[RingWord.SLOT_BYTES]} bytes per slot")
    if size < _size_bytes(slots, arena_words):
        raise TraceError(f"{path}: cut short: {size} bytes of {_size_bytes(slots, arena_words)}")
    return RingInfo(
        version=version,
        slots=slots,
        arena_words=arena_words,
        pid=words[RingWord.PID],
        ranks=Ranks(words[RingWord.TP_RANK], words[RingWord.PP_RANK], words[RingWord.DP_RANK]),
        wall_ns=words[RingWord.WALL_NS],
        host_ns=words[RingWord.HOST_NS],
        process_start=words[RingWord.PROCESS_START],
        pid_namespace=words[RingWord.PID_NAMESPACE],
        first_mode=_mode(words[RingWord.FIRST_MODE]),
    )


def _mode(word: int) -> CaptureMode:
    return CaptureMode(word) if 0 <= word < len(CaptureMode) else CaptureMode.OFF


def _counts(words: Words, first: RingWord) -> dict[DropReason, int]:
    counts = {reason: int(words[first + reason]) for reason in DropReason}
    return {reason: count for reason, count in counts.items() if count}


def _unreported(words: Words, host_ns: int) -> list[Lost]:
    reported = _counts(words, RingWord.REPORTED)
    return [
        Lost(NO_OP, ThreadId(0), host_ns, count - reported.get(reason, 0), reason)
        for reason, count in _counts(words, RingWord.DROPPED).items()
        if count > reported.get(reason, 0)
    ]


_NO_PAGES: Final[PageIds] = np.zeros(0, dtype=np.int64)
_NO_PAGES.flags.writeable = False
