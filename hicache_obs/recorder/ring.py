"""The ring file of one process: fixed-size records and their page ids, in a memory-mapped file.

The process under observation writes; one agent reads (``hicache_obs.readers.ring``). The file is the flight
recorder: it outlives the process, whatever killed it. ``hicache_obs.records`` has the layout.

What makes it safe without a lock between the two processes:

* A record is believed once ``HEAD`` is past it, and ``HEAD`` moves after the record is written.
* A slot is written again only once ``TAIL`` is past it, an arena word only once ``ARENA_TAIL`` is.
* Records that carry the same array object share one copy of it in the arena, so a read record does not free its
  pages. The writer remembers the last arrays and promises, in ``ARENA_LOW``, to refer to nothing older. It makes
  the promise after ``HEAD``; the reader reads it before ``HEAD``. So once all records below that head are read,
  nothing refers to words below that promise, and the reader frees them.
"""

from __future__ import annotations

import mmap
import os
import platform
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from hicache_obs.errors import ConfigError
from hicache_obs.findings import Hazard
from hicache_obs.recorder.batch import Block
from hicache_obs.recorder.process import pid_namespace, process_start
from hicache_obs.records import (
    ALL_LAYERS,
    HEADER_BYTES,
    KINDS,
    MAX_ACCESSES,
    MAX_ARENA_WORDS,
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
    Record,
    RecordStream,
    Relocate,
    RingWord,
    RowsDiscarded,
    SlotAccess,
    Space,
    StreamId,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
)

DEFAULT_SLOTS: Final = 1 << 16
DEFAULT_ARENA_WORDS: Final = 1 << 20
_REMEMBERED: Final = 64
"""At least so many arrays may be used again from the arena; a round and a restore of many layers need a dozen."""

_HEAD: Final = "<BBHIqqqqqqii"
_pack: Final = struct.Struct(_HEAD).pack_into
_plain: Final = struct.Struct(f"<Qqqqq{SLOT_BYTES - 40}x")
_pack_plain: Final = _plain.pack_into
pack_plain: Final = _plain.pack
"""A whole slot of a record without cells: first word, op, host_ns, a, b. The rest is zeros."""
_pack_work: Final = tuple(struct.Struct("<Qqqqqqqii" + "BBHIQ" * count).pack_into for count in range(MAX_ACCESSES + 1))
_pack_round: Final = _pack_work[2]
_ALL_END: Final = ALL_LAYERS[1]
_DEVICE, _READS, _WRITES = int(Space.DEVICE), Mode.READ | SLOT_LIST, Mode.WRITE | SLOT_LIST
_pack_cells: Final = tuple(struct.Struct(_HEAD + "BBHIQ" * count).pack_into for count in range(MAX_ACCESSES + 1))
_cell_words: Final = tuple(struct.Struct("<" + "BBHIQ" * count).pack for count in range(MAX_ACCESSES + 1))
_pack_text: Final = struct.Struct(f"{_HEAD}{MAX_TEXT_BYTES}s").pack_into

EVENT_RECORD: Final = KINDS.index(EventRecord)
EVENT_WAIT: Final = KINDS.index(EventWait)
WAIT_STREAM: Final = KINDS.index(WaitStream)
"""Kinds that ``put`` takes."""
_MODE: Final = int(RingWord.MODE)  # plain numbers: looking up an enum member costs more than the store
_HEAD_WORD: Final = int(RingWord.HEAD)
_ARENA_HEAD: Final = int(RingWord.ARENA_HEAD)
_ARENA_LOW: Final = int(RingWord.ARENA_LOW)

_MODES: Final = tuple(CaptureMode)

# Stores become visible in program order on x86; elsewhere a record could appear before its contents.
_STRONG_ORDER: Final = platform.machine().lower() in ("x86_64", "amd64", "i686")


class Numbers(Protocol):
    """Consecutive 64-bit integers: an ``array`` of them."""

    def __len__(self) -> int: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class RecordSink(Protocol):
    """Where a recorder puts its records."""

    @property
    def writable(self) -> bool:
        """False for good once closed, or in a forked child. May be read without a lock."""

    @property
    def mode(self) -> CaptureMode: ...

    def append(self, record: AnyRecord) -> bool:
        """Keep ``record``; False if it was dropped, and counted."""

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count records that were lost before they got here; a ``Lost`` record will say so."""

    def beat(self, host_ns: int) -> None:
        """Say that the writer is alive."""


class BlockSink(RecordSink, Protocol):
    """A ``RecordSink`` that also takes packed records, and many at once. See ``RingWriter``."""

    def put(self, word: int, op: int, host_ns: int, a: int, b: int) -> bool: ...

    def put_work(
        self, word: int, op: int, host_ns: int, numbers: tuple[int, int, int, int], layers: tuple[int, int],
        accesses: tuple[Access, ...],
    ) -> bool: ...  # fmt: skip

    def put_round(
        self,
        word: int,
        op: int,
        host_ns: int,
        stream: int,
        site: int,
        group: int,
        pool: int,
        lists: Numbers,
        split: int,
    ) -> bool: ...

    def put_packed(self, slot: bytes) -> bool: ...

    def append_block(self, block: Block) -> bool:
        """Keep all of ``block``'s records, in their order; False if all were dropped, and counted."""


class RingWriter:
    """Appends records to a new ring file. Any thread of the creating process may append; nothing ever blocks.

    A record that finds no room is dropped and counted; the next one that finds room is preceded by a ``Lost``
    record. In a child made by ``fork`` the writer is inert: the ring belongs to the parent.

    Args:
        path: File to make. It must not exist: a ring of a crashed process is evidence.
        ranks: Which worker of a server this is.
        slots: Records the ring holds.
        arena_words: Page ids the ring holds.
        clock: The clock of the records' ``host_ns``, nanoseconds.
        mode: What the mode byte says at first.

    Raises:
        ConfigError: A size is not allowed, or the file cannot be made at its full size.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        ranks: Ranks = Ranks(),  # noqa: B008 frozen
        slots: int = DEFAULT_SLOTS,
        arena_words: int = DEFAULT_ARENA_WORDS,
        clock: Callable[[], int] = time.monotonic_ns,
        mode: CaptureMode = CaptureMode.OBSERVE,
    ) -> None:
        _check_size("slots", slots, 8, MAX_SLOTS)
        _check_size("arena_words", arena_words, 16, MAX_ARENA_WORDS)
        self.path: Final = Path(path)
        self._map = _make_file(self.path, HEADER_BYTES + slots * SLOT_BYTES + arena_words * 8)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("q")
        self._arena: PageIds = np.frombuffer(
            self._map, dtype="<i8", count=arena_words, offset=HEADER_BYTES + slots * SLOT_BYTES
        )
        self._slot_words = np.frombuffer(
            self._map, dtype="<i8", count=slots * SLOT_BYTES // 8, offset=HEADER_BYTES
        ).reshape(slots, SLOT_BYTES // 8)
        self._arena_view = memoryview(self._map)[HEADER_BYTES + slots * SLOT_BYTES :].cast("q")
        """The arena for lists of plain numbers: they take numpy five times as long."""
        self._slots = slots
        self._arena_words = arena_words
        self._head = 0
        self._full_at = slots
        self._arena_head = self._arena_tail_seen = 0
        self._arena_low = self._promised = 0
        self._remembered: dict[int, tuple[PageIds, int, int]] = {}
        """By ``id`` of an array: the array (so that the id stays taken), its arena position and length."""
        self._same_accesses: tuple[Access, ...] | None = None
        """What ``_same_cells`` belongs to: the last accesses, if all their arrays are still remembered."""
        self._same_cells: list[int] = []
        self._forgotten = 0
        """How often arrays were forgotten."""
        self._clock = clock
        self._pending_lost = [0] * len(DropReason)
        self._any_lost = False
        # Re-entrant: a signal handler may append while its own thread is appending.
        self._lock = self.lock = threading.RLock()
        """Whoever appends much may hold it around several calls."""
        self._busy = False
        self._fence = threading.Lock()
        self._fence.acquire()
        self._pack: dict[type[Record], Callable[[int, Any], bool]] = {
            Kernel: self._kernel,
            Memcpy: self._memcpy,
            EventRecord: self._event_record,
            EventWait: self._event_wait,
            WaitStream: self._wait_stream,
            EventQuery: self._event_query,
            EventSync: self._event_sync,
            HostSync: self._host_sync,
            HostAccess: self._host_access,
            PageAlloc: self._page_alloc,
            PageFree: self._page_free,
            RecordStream: self._record_stream,
            Times: self._times,
            Lost: self._lost,
            Define: self._define,
            GraphReplay: self._graph_replay,
            GraphNode: self._graph_node,
            Relocate: self._relocate,
            IoBegin: self._io_begin,
            IoEnd: self._io_end,
            ThreadPost: self._thread_post,
            ThreadRecv: self._thread_recv,
            TensorAlloc: self._tensor_alloc,
            TensorFree: self._tensor_free,
            Collective: self._collective,
            RowsDiscarded: self._rows_discarded,
        }
        self._write_header(ranks, mode)
        self.writable = self._open = True
        _LIVE.add(self)

    @property
    def mode(self) -> CaptureMode:
        """The mode byte; an agent may change it at any time. Without the lock: recorders ask at every call."""
        try:
            word = self._words[_MODE] if self._open else 0
        except ValueError:  # closed meanwhile
            return CaptureMode.OFF
        return _MODES[word] if 0 <= word < len(_MODES) else CaptureMode.OFF

    @property
    def capturing(self) -> bool:
        """Whether records are taken. Without the lock: hooks ask at every call."""
        try:
            return self.writable and bool(self._words[_MODE])
        except ValueError:  # closed meanwhile
            return False

    @property
    def dropped(self) -> dict[DropReason, int]:
        """Records lost so far, by reason; reasons that never happened are left out."""
        with self._lock:
            if not self._open:
                return {}
            counts = {reason: self._words[RingWord.DROPPED + reason] for reason in DropReason}
        return {reason: count for reason, count in counts.items() if count}

    def append(self, record: AnyRecord) -> bool:
        """Write ``record``; False if it was dropped, and counted. Never blocks, never does I/O.

        Raises:
            Exception: ``record`` is malformed (too many accesses, a number out of range). Nothing was written.
        """
        if not self.writable:
            return False  # without the lock: in a forked child it may be held for ever
        with self._lock:
            if not self._open:
                return False
            if self._busy:
                self.drop(DropReason.RECORDER_ERROR)
                return False
            self._busy = True
            try:
                words = self._words
                if not words[_MODE]:  # CaptureMode.OFF
                    self.drop(DropReason.SWITCHED_OFF)
                    return False
                if self._any_lost and not self._report_lost(record):
                    self.drop(DropReason.RING_FULL)
                    return False
                head = self._head
                if head >= self._full_at and not self._room(1):
                    self.drop(DropReason.RING_FULL)
                    return False
                if not self._pack[type(record)](HEADER_BYTES + (head % self._slots) * SLOT_BYTES, record):
                    self._no_arena()
                    return False
                self._publish(head + 1)
                return True
            finally:
                self._busy = False

    def put(self, word: int, op: int, host_ns: int, a: int, b: int) -> bool:
        """Write a record without accesses, of the numbers in its slot. The caller holds ``lock``.

        Args:
            word: The slot's first word: kind, aux and thread.

        Returns:
            False if nothing was done, not even counted: the ring is full, closed, switched off, busy, or has lost
            something that is not stated yet. ``append`` sees to all of that.
        """
        head, words = self._head, self._words
        if head >= self._full_at or self._any_lost or self._busy or not self._open or not words[_MODE]:
            return False
        _pack_plain(self._map, HEADER_BYTES + head % self._slots * SLOT_BYTES, word, op, host_ns, a, b)
        if not _STRONG_ORDER:
            self._fence.release()
            self._fence.acquire()
        words[_HEAD_WORD] = self._head = head + 1
        return True

    def put_work(
        self, word: int, op: int, host_ns: int, numbers: tuple[int, int, int, int], layers: tuple[int, int],
        accesses: tuple[Access, ...],
    ) -> bool:  # fmt: skip
        """As ``put``, for a record with accesses; ``numbers`` are its a to d, ``word`` is without their count."""
        head = self._head
        if head >= self._full_at or self._any_lost or self._busy or not self._open or not self._words[_MODE]:
            return False
        cells = self._cells(accesses)
        if cells is None:
            return False
        count = len(accesses)
        place = HEADER_BYTES + head % self._slots * SLOT_BYTES
        _pack_work[count](self._map, place, word | count << 8, op, host_ns, *numbers, *layers, *cells)
        self._publish(head + 1)
        return True

    def put_round(
        self,
        word: int,
        op: int,
        host_ns: int,
        stream: int,
        site: int,
        group: int,
        pool: int,
        lists: Numbers,
        split: int,
    ) -> bool:
        """As ``put_work``, for a kernel of all layers that writes and reads slots of one device pool.

        Args:
            lists: The slot list of what it writes and, from word ``split`` on, that of what it reads. No other record
                shares them: nothing is remembered of them.
        """
        head, words, count, start = self._head, self._words, len(lists), self._arena_head
        place, end = start % self._arena_words, start + count
        if (
            head >= self._full_at
            or self._any_lost
            or self._busy
            or not self._open
            or not words[_MODE]
            or place + count > self._arena_words
            or end - self._arena_tail_seen > self._arena_words
            or end - self._arena_low > self._arena_words // 2
        ):
            return False
        words[_ARENA_HEAD] = self._arena_head = end  # before the words are overwritten
        self._arena_view[place : place + count] = lists
        _pack_round(
            self._map, HEADER_BYTES + head % self._slots * SLOT_BYTES, word, op, host_ns, stream, site, group, 0,
            0, _ALL_END, _DEVICE, _WRITES, pool, split, start, _DEVICE, _READS, pool, count - split, start + split,
        )  # fmt: skip
        self._publish(head + 1)
        return True

    def put_packed(self, slot: bytes) -> bool:
        """As ``append``, for a record that is ``pack_plain``'s."""
        if not self.writable:
            return False
        with self._lock:
            if self._open and self._head < self._full_at and not self._any_lost and not self._busy and self.capturing:
                place = HEADER_BYTES + self._head % self._slots * SLOT_BYTES
                self._map[place : place + SLOT_BYTES] = slot
                self._publish(self._head + 1)
                return True
            word, op, host_ns, a, b = _plain.unpack(slot)
            return self.append(plain_record(word, op, host_ns, a, b))

    def append_block(self, block: Block) -> bool:
        """As ``append``, for all records of ``block`` or none of them: they become visible at once."""
        if not self.writable:
            return False  # without the lock: in a forked child it may be held for ever
        with self._lock:
            if not self._open:
                return False
            count = len(block)
            if self._busy:
                self.drop(DropReason.RECORDER_ERROR, count)
                return False
            self._busy = True
            try:
                reason = self._put(block, count)
            finally:
                self._busy = False
            if reason is not None:
                self.drop(reason, count)
            return reason is None

    def _put(self, block: Block, count: int) -> DropReason | None:
        """Write ``block``; why that cannot be, if it cannot."""
        if not self._words[_MODE]:  # CaptureMode.OFF
            return DropReason.SWITCHED_OFF
        if (self._any_lost and not self._report_lost(block)) or (
            self._head + count > self._full_at and not self._room(count)
        ):
            return DropReason.RING_FULL
        words = []
        for accesses, _, _ in block.parts:
            cells = self._cells(accesses)
            if cells is None:
                self._free_arena()
                return DropReason.ARENA_FULL
            words.append(np.frombuffer(_cell_words[len(accesses)](*cells), dtype="<i8"))
        place = self._head % self._slots
        if place + count <= self._slots:
            block.fill(self._slot_words[place : place + count], words)
        else:
            slots = np.empty((count, SLOT_BYTES // 8), dtype=np.int64)
            block.fill(slots, words)
            first = self._slots - place
            self._slot_words[place:] = slots[:first]
            self._slot_words[: count - first] = slots[first:]
        self._publish(self._head + count)
        return None

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count records lost before they got here; the next appended record is preceded by a ``Lost``."""
        if not self.writable:
            return
        with self._lock:
            if self._open:
                self._words[RingWord.DROPPED + reason] += count
                self._pending_lost[reason] += count
                self._any_lost = True

    def beat(self, host_ns: int) -> None:
        """Say that the writer is alive; the agent shows how long ago that was."""
        if not self.writable:
            return
        with self._lock:
            if self._open:
                self._words[RingWord.HEARTBEAT_NS] = host_ns

    def state_observable(self, hazards: Iterable[Hazard]) -> None:
        """State whose records are captured here; all other hazards cannot be seen in this process."""
        seen = set(hazards)
        bits = sum(1 << place for place, hazard in enumerate(Hazard) if hazard in seen)
        with self._lock:
            if self._open:
                self._words[RingWord.OBSERVABLE] = OBSERVABLE_STATED | bits

    def close(self) -> None:
        """Stop writing and unmap the file, which stays. Idempotent."""
        with self._lock:
            self.writable = False
            if self._busy or self._map.closed:  # busy: a signal handler closes in the middle of an append
                return
            if self._open:  # in a forked child it is not, and the ring is the parent's
                self._words[RingWord.CLOSED] = 1
            self._open = False
            _LIVE.discard(self)
            self._remembered.clear()
            self._arena = np.zeros(0, dtype=np.int64)
            self._slot_words = self._arena.reshape(0, SLOT_BYTES // 8)
            self._words.release()
            self._arena_view.release()
            try:
                self._map.close()
            except BufferError:  # forked in the middle of another thread's append: it holds the map for ever
                pass

    def disown(self) -> None:
        """Never touch the file again: this process is a fork of its owner, and the lock may be held for ever."""
        self.writable = self._open = False
        self._lock = threading.RLock()
        self._busy = False

    # -- publishing ------------------------------------------------------------------------------------------

    def _publish(self, head: int) -> None:
        words = self._words
        if not _STRONG_ORDER:
            # A store-release then a load-acquire: everything above is visible before what follows.
            self._fence.release()
            self._fence.acquire()
        words[_HEAD_WORD] = head
        self._head = head
        if self._arena_low != self._promised:
            words[_ARENA_LOW] = self._promised = self._arena_low

    def _room(self, slots: int) -> bool:
        self._full_at = self._words[RingWord.TAIL] + self._slots
        return self._head + slots <= self._full_at

    def _report_lost(self, record: Record | Block) -> bool:
        """Write a ``Lost`` per reason; False if they and the record that is waiting do not all fit."""
        reasons = [reason for reason in DropReason if self._pending_lost[reason]]
        if not self._room(len(reasons) + 1):
            return False
        for reason in reasons:
            count = self._pending_lost[reason]
            lost = Lost(NO_OP, record.thread, record.host_ns, count, reason)
            self._lost(HEADER_BYTES + (self._head % self._slots) * SLOT_BYTES, lost)
            self._publish(self._head + 1)
            self._words[RingWord.REPORTED + reason] += count
            self._pending_lost[reason] -= count
        self._any_lost = any(self._pending_lost)
        return True

    # -- page ids --------------------------------------------------------------------------------------------

    def _cells(self, accesses: tuple[Access, ...]) -> list[int] | None:
        """Numbers of the access cells; ``None`` if the arena has no room for the pages."""
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

    def _row_cell(self, rows: PageIds) -> tuple[int, int, int, int, int] | None:
        """Numbers of a row cell; ``None`` if the arena has no room."""
        known = self._remembered.get(id(rows))
        if known is None:
            known = self._store(rows)
            self._same_accesses = None  # their arrays may just have been forgotten
        return None if known is None else (ROWS_CELL, 0, 0, known[2], known[1])

    def _store(self, ids: PageIds) -> tuple[PageIds, int, int] | None:
        count, words, start = len(ids), self._arena_words, self._arena_head
        end = start + count
        if count == 0:
            return ids, start, 0
        if end - self._arena_tail_seen > words:
            self._arena_tail_seen = self._words[RingWord.ARENA_TAIL]
            if end - self._arena_tail_seen > words:
                return None
        self._words[_ARENA_HEAD] = self._arena_head = end  # before the words are overwritten
        place = start % words
        if place + count <= words:
            self._arena[place : place + count] = ids
        else:
            first = words - place
            self._arena[place:] = ids[:first]
            self._arena[: count - first] = ids[first:]
        remembered = self._remembered
        remembered[id(ids)] = known = (ids, start, count)
        # At most half the arena stays taken by remembered arrays, so that reading always frees the other half.
        if len(remembered) > 2 * _REMEMBERED or end - self._arena_low > words // 2:
            self._forget(end)
        return known

    def _forget(self, end: int) -> None:
        """Forget the oldest arrays, more than needed, so that this is rare."""
        self._forgotten += 1
        remembered = self._remembered
        keep_from = end - self._arena_words // 4
        excess = len(remembered) - _REMEMBERED
        for number, (key, (_, start, _)) in enumerate(list(remembered.items())):
            if number >= excess and start >= keep_from:
                self._arena_low = start
                return
            del remembered[key]
        self._arena_low = end

    def _no_arena(self) -> None:
        """Drop a record for want of arena, and let the reader free all of it: the next may be as large."""
        self.drop(DropReason.ARENA_FULL)
        self._free_arena()

    def _free_arena(self) -> None:
        self._remembered.clear()
        self._same_accesses = None
        self._words[_ARENA_LOW] = self._promised = self._arena_low = self._arena_head

    # -- one method per kind, in the order of ``records.KINDS`` ----------------------------------------------

    def _kernel(self, place: int, r: Kernel) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        if r.rows is not None and count < MAX_ACCESSES and (row_cell := self._row_cell(r.rows)) is not None:
            cells = [*cells, *row_cell]
            count += 1
        _pack_cells[count](
            self._map, place, 0, count, 0, r.thread, r.op, r.host_ns,
            r.stream, r.site, r.group, r.size_bytes, r.layers[0], r.layers[1], *cells,
        )  # fmt: skip
        return True

    def _memcpy(self, place: int, r: Memcpy) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 1, count, r.direction, r.thread, r.op, r.host_ns,
            r.stream, r.site, r.group, r.size_bytes, r.layers[0], r.layers[1], *cells,
        )  # fmt: skip
        return True

    def _event_record(self, place: int, r: EventRecord) -> bool:
        _pack(self._map, place, 2, 0, 0, r.thread, r.op, r.host_ns, r.event, r.stream, 0, 0, 0, 0)
        return True

    def _event_wait(self, place: int, r: EventWait) -> bool:
        _pack(self._map, place, 3, 0, r.purpose, r.thread, r.op, r.host_ns, r.event, r.stream, 0, 0, 0, 0)
        return True

    def _wait_stream(self, place: int, r: WaitStream) -> bool:
        _pack(self._map, place, 4, 0, r.purpose, r.thread, r.op, r.host_ns, r.waiter, r.on, 0, 0, 0, 0)
        return True

    def _event_query(self, place: int, r: EventQuery) -> bool:
        _pack(self._map, place, 5, 0, r.result, r.thread, r.op, r.host_ns, r.event, 0, 0, 0, 0, 0)
        return True

    def _event_sync(self, place: int, r: EventSync) -> bool:
        _pack(self._map, place, 6, 0, 0, r.thread, r.op, r.host_ns, r.event, 0, 0, 0, 0, 0)
        return True

    def _host_sync(self, place: int, r: HostSync) -> bool:
        one, stream = (0, 0) if r.stream is None else (1, r.stream)
        _pack(self._map, place, 7, 0, one, r.thread, r.op, r.host_ns, stream, 0, 0, 0, 0, 0)
        return True

    def _host_access(self, place: int, r: HostAccess) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](self._map, place, 8, count, 0, r.thread, r.op, r.host_ns, 0, r.site, 0, 0, *r.layers, *cells)
        return True

    def _page_alloc(self, place: int, r: PageAlloc) -> bool:
        cells = self._cells((r.access,))
        if cells is None:
            return False
        _pack_cells[1](self._map, place, 9, 1, 0, r.thread, r.op, r.host_ns, 0, 0, r.owner, 0, 0, 0, *cells)
        return True

    def _page_free(self, place: int, r: PageFree) -> bool:
        cells = self._cells((r.access,))
        if cells is None:
            return False
        _pack_cells[1](self._map, place, 10, 1, 0, r.thread, r.op, r.host_ns, 0, 0, r.owner, 0, 0, 0, *cells)
        return True

    def _record_stream(self, place: int, r: RecordStream) -> bool:
        _pack(self._map, place, 11, 0, 0, r.thread, r.op, r.host_ns, r.tensor, r.stream, 0, 0, 0, 0)
        return True

    def _times(self, place: int, r: Times) -> bool:
        _pack(self._map, place, 12, 0, 0, r.thread, r.op, r.host_ns, r.start_ns, r.end_ns, r.error_ns, 0, 0, 0)
        return True

    def _lost(self, place: int, r: Lost) -> bool:
        _pack(self._map, place, 13, 0, r.reason, r.thread, r.op, r.host_ns, r.count, 0, 0, 0, 0, 0)
        return True

    def _define(self, place: int, r: Define) -> bool:
        text = cut_text(r.text)
        _pack_text(self._map, place, 14, 0, len(text), r.thread, r.op, r.host_ns, r.id, r.value, r.space, 0, 0, 0, text)
        return True

    def _graph_replay(self, place: int, r: GraphReplay) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 15, count, r.nodes, r.thread, r.op, r.host_ns,
            r.stream, r.site, r.group, r.graph, *r.layers, *cells,
        )  # fmt: skip
        return True

    def _graph_node(self, place: int, r: GraphNode) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        one, event = (0, 0) if r.event is None else (1, r.event)
        _pack_cells[count](
            self._map, place, 16, count, one, r.thread, r.op, r.host_ns,
            event, r.after, r.index, 0, *r.layers, *cells,
        )  # fmt: skip
        return True

    def _relocate(self, place: int, r: Relocate) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 17, count, 0, r.thread, r.op, r.host_ns, r.stream, r.site, 0, 0, *r.layers, *cells
        )
        return True

    def _io_begin(self, place: int, r: IoBegin) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 18, count, r.kind, r.thread, r.op, r.host_ns, r.io, r.site, 0, 0, *r.layers, *cells
        )
        return True

    def _io_end(self, place: int, r: IoEnd) -> bool:
        _pack(self._map, place, 19, 0, 0, r.thread, r.op, r.host_ns, r.io, 0, 0, 0, 0, 0)
        return True

    def _thread_post(self, place: int, r: ThreadPost) -> bool:
        _pack(self._map, place, 20, 0, 0, r.thread, r.op, r.host_ns, r.channel, 0, 0, 0, 0, 0)
        return True

    def _thread_recv(self, place: int, r: ThreadRecv) -> bool:
        _pack(self._map, place, 21, 0, 0, r.thread, r.op, r.host_ns, r.channel, 0, 0, 0, 0, 0)
        return True

    def _tensor_alloc(self, place: int, r: TensorAlloc) -> bool:
        _pack(self._map, place, 22, 0, 0, r.thread, r.op, r.host_ns, r.block, r.stream, r.tensor, 0, 0, 0)
        return True

    def _tensor_free(self, place: int, r: TensorFree) -> bool:
        _pack(self._map, place, 23, 0, 0, r.thread, r.op, r.host_ns, 0, 0, r.tensor, 0, 0, 0)
        return True

    def _collective(self, place: int, r: Collective) -> bool:
        _pack(self._map, place, 24, 0, 0, r.thread, r.op, r.host_ns, r.collective_group, r.site, r.rank, 0, 0, 0)
        return True

    def _rows_discarded(self, place: int, r: RowsDiscarded) -> bool:
        cell = self._row_cell(r.requests)
        if cell is None:
            return False
        _pack_cells[1](self._map, place, 25, 1, 0, r.thread, r.op, r.host_ns, 0, 0, r.group, 0, 0, 0, *cell)
        return True

    def _write_header(self, ranks: Ranks, mode: CaptureMode) -> None:
        words = self._words
        for word, value in (
            (RingWord.VERSION, RING_VERSION),
            (RingWord.SLOT_BYTES, SLOT_BYTES),
            (RingWord.SLOTS, self._slots),
            (RingWord.ARENA_WORDS, self._arena_words),
            (RingWord.PID, os.getpid()),
            (RingWord.TP_RANK, ranks.tp),
            (RingWord.PP_RANK, ranks.pp),
            (RingWord.DP_RANK, ranks.dp),
            (RingWord.WALL_NS, time.time_ns()),
            (RingWord.HOST_NS, self._clock()),
            (RingWord.HEARTBEAT_NS, self._clock()),
            (RingWord.PROCESS_START, process_start(os.getpid()) or 0),
            (RingWord.PID_NAMESPACE, pid_namespace()),
            (RingWord.FIRST_MODE, mode),
            (RingWord.MODE, mode),
            (RingWord.MAGIC, int.from_bytes(RING_MAGIC, "little")),
        ):
            words[word] = value


def plain_record(word: int, op: int, host_ns: int, a: int, b: int) -> EventRecord | EventWait | WaitStream:
    """The record that these numbers of a slot are, as ``put`` gets them."""
    kind, common = word & 0xFF, (OpId(op), ThreadId(word >> 32), host_ns)
    if kind == EVENT_RECORD:
        return EventRecord(*common, EventId(a), StreamId(b))
    purpose = Purpose(word >> 16 & 0xFFFF)
    if kind == EVENT_WAIT:
        return EventWait(*common, EventId(a), StreamId(b), purpose)
    assert kind == WAIT_STREAM, kind
    return WaitStream(*common, StreamId(a), StreamId(b), purpose)


def cut_text(text: str) -> bytes:
    """UTF-8 of ``text``, at most ``MAX_TEXT_BYTES`` long, cut on a character boundary."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_TEXT_BYTES:
        return data
    return data[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()


def _check_size(name: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise ConfigError(f"ring {name}={value}: must be from {low} to {high}")


def _make_file(path: Path, size_bytes: int) -> mmap.mmap:
    """A new mapped file whose blocks all exist: touching a hole on a full disk would kill the process."""
    made = False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        made = True
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            # Page tables are filled now, not on the launching thread.
            return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(descriptor)
    except FileExistsError:
        raise ConfigError(
            f"ring file {path}: exists already, and a ring is never overwritten; choose another"
        ) from None
    except OSError as error:
        if made:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"ring file {path}: {error.strerror} ({size_bytes} bytes are needed); choose a directory this process can "
            "write to, such as /dev/shm"
        ) from None


_LIVE: Final[weakref.WeakSet[RingWriter]] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the mapping is shared, the ring is the parent's. Its lock may be held for ever."""
    for ring in list(_LIVE):
        ring.disown()


os.register_at_fork(after_in_child=_leave_to_parent)
