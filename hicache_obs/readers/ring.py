"""Reads a ring file: live, as the one agent that frees what it has read, or once, as it was left behind.

A ring is untrusted input: every number in it is checked before it is used. The partner is
``hicache_obs.recorder.ring``; ``hicache_obs.records`` has the layout.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np

from hicache_obs.errors import RingTaken, TraceError
from hicache_obs.findings import Hazard
from hicache_obs.readers.ring_decoder import NO_PAGES, Overwritten, RingDecoder
from hicache_obs.readers.ring_header import counts_of, mode_of, open_file, read_info, read_words, size_bytes, unreported
from hicache_obs.records import (
    HEADER_BYTES,
    KINDS,
    NO_OP,
    OBSERVABLE_STATED,
    SLOT_BYTES,
    AnyRecord,
    CaptureMode,
    Define,
    DropReason,
    Lost,
    PageIds,
    RingWord,
    ThreadId,
    Times,
)
from hicache_obs.trace import Trace, make_trace

_READ_BYTES: Final = 1 << 30
_WINDOW_WORDS: Final = 1 << 13
_DEFINE, _LOST, _TIMES = (KINDS.index(kind) for kind in (Define, Lost, Times))
_OP_AT: Final = 8
"""Where a slot has its operation."""


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
        self._file = open_file(self.path, "r+b")
        try:
            self.info: Final = read_info(self.path, self._file.fileno())
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise RingTaken(f"{self.path}: another agent reads this ring; a ring has one reader") from None
            self._map = mmap.mmap(self._file.fileno(), HEADER_BYTES)
        except BaseException:
            self._file.close()
            raise
        self._size_bytes = size_bytes(self.info.slots, self.info.arena_words)
        self._arena_at = HEADER_BYTES + self.info.slots * SLOT_BYTES
        self._header_words = memoryview(self._map).cast("q")
        # Zero pages until a slot is read; each record is copied to its own place.
        self._slots = memoryview(mmap.mmap(-1, self.info.slots * SLOT_BYTES))
        self._decoder = RingDecoder(self.path, self._slots, self._load_ids, self.info)
        words = self._words()
        self._window: PageIds = NO_PAGES
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

    def skip(self, limit: int, *, last_op: int) -> tuple[int, list[AnyRecord]]:
        """Like ``read``, at a small part of its cost: of the next ``limit`` records only some become any.

        Names, what was lost, and the device times of operations up to ``last_op``, which came before.

        Returns:
            How many records there were, and those of them that are not skipped.

        Raises:
            TraceError: A record that is not skipped is damaged. The same records are met again by the next call.
        """
        first = self._tail
        stop = self._find_until(limit)
        self._fetch(first, stop)
        places = np.arange(first, stop) % self.info.slots
        slots = np.frombuffer(self._slots, dtype=np.uint8).reshape(-1, SLOT_BYTES)[places, : _OP_AT + 8]
        kinds = slots[:, 0]
        ops = slots[:, _OP_AT:].copy().view("<i8").ravel()
        chosen = (kinds == _DEFINE) | (kinds == _LOST) | ((kinds == _TIMES) & (ops <= last_op))
        records = [self._decoder.record(first + int(index)) for index in np.flatnonzero(chosen)]
        self._pass(stop)
        return stop - first, records

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
    def fill(self) -> float:
        """How full the ring is of what was not read, 0 to 1: the fuller of its slots and its arena.

        A writer keeps up to half of the arena for arrays that it may refer to again; only the rest counts.
        """
        words, info = self._words(), self.info
        taken = (words[RingWord.ARENA_HEAD] - words[RingWord.ARENA_TAIL]) / info.arena_words
        return min(1.0, max(self.pending / info.slots, 2 * taken - 1, 0.0))

    @property
    def dropped(self) -> dict[DropReason, int]:
        """Records lost so far, by reason; reasons that never happened are left out."""
        return counts_of(self._words(), RingWord.DROPPED)

    @property
    def unreported(self) -> list[Lost]:
        """One ``Lost`` per reason for records that were dropped after the last one that the ring states. Exact only
        when the writer has ended.
        """
        return unreported(self._words(), 0)

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
        return mode_of(self._words()[RingWord.MODE])

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
        """Append the next ``limit`` records at most."""
        stop = self._find_until(limit)
        self._fetch(self._tail, stop)
        try:
            records += [self._decoder.record(number) for number in range(self._tail, stop)]
        except (TraceError, Overwritten):
            self._read_good(records, stop)
            return
        self._pass(stop)

    def _find_until(self, limit: int) -> int:
        """Number behind the next ``limit`` records that are whole."""
        words, decoder = self._words(), self._decoder
        if self._tail >= self._until:
            # The promise before the head: every record it does not cover is then below the head.
            self._promised = words[RingWord.ARENA_LOW]
            self._until = words[RingWord.HEAD]
            self._window = NO_PAGES
            decoder.arena_until = words[RingWord.ARENA_HEAD]
            decoder.arena_from = max(0, decoder.arena_until - self.info.arena_words)
            if not 0 <= self._until - self._tail <= self.info.slots:
                raise TraceError(f"{self.path}: damaged header: {self._tail} records read of {self._until} written")
        return min(self._until, self._tail + limit)

    def _pass(self, stop: int) -> None:
        """All below ``stop`` is read; at the end of what was there, note what nothing refers to."""
        self._tail = stop
        if stop == self._until:
            self._arena_free = self._promised
            self._decoder.forget(self._promised)

    def _read_good(self, records: list[AnyRecord], stop: int) -> None:
        """Append the records before the first one that is damaged; raise if that is the next."""
        first = self._tail
        try:
            while self._tail < stop:
                records.append(self._decoder.record(self._tail))
                self._tail += 1
        except Overwritten:
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


def read_ring(path: str | os.PathLike[str]) -> Trace:
    """Everything a ring still holds, read or not, without changing it; its process may still be writing.

    Records that are gone from the file are stated by a ``Lost`` record.

    Raises:
        TraceError: The file is no ring this version can read, or it is damaged.
    """
    target = Path(path)
    with open_file(target, "rb") as file:
        descriptor = file.fileno()
        info = read_info(target, descriptor)
        before = read_words(descriptor)
        arena_at = HEADER_BYTES + info.slots * SLOT_BYTES
        # A file that was never full is read as far as it was written: most of a large one is empty.
        slots = _read(descriptor, SLOT_BYTES * _used(before[RingWord.HEAD], info.slots), HEADER_BYTES)
        arena = _read(descriptor, 8 * _used(before[RingWord.ARENA_HEAD], info.arena_words), arena_at)
        after = read_words(descriptor)
    head = before[RingWord.HEAD]
    unread = after[RingWord.HEAD] - info.slots == after[RingWord.TAIL]
    # The writer may be in the middle of the next slot, unless that one is not read yet.
    first = max(0, after[RingWord.HEAD] - info.slots + (0 if unread else 1))
    if head < 0 or not head <= after[RingWord.HEAD] or not 0 <= after[RingWord.TAIL] <= after[RingWord.HEAD]:
        raise TraceError(f"{target}: damaged header: {after[RingWord.TAIL]} records read of {head} written")
    words = np.frombuffer(arena, dtype="<i8")
    decoder = RingDecoder(target, memoryview(slots), lambda place, count: words[place : place + count], info)
    decoder.arena_until = before[RingWord.ARENA_HEAD]
    decoder.arena_from = max(0, after[RingWord.ARENA_HEAD] - info.arena_words)
    records: list[AnyRecord] = []
    for number in range(first, head):
        try:
            records.append(decoder.record(number))
        except Overwritten:
            records.clear()
            first = number + 1
    notes: tuple[str, ...] = ()
    if first:
        records.insert(0, Lost(NO_OP, ThreadId(0), 0, first, DropReason.MISSING))
        notes = (f"{target}: the oldest {first} records are no longer in the ring; an agent has read them",)
    records += unreported(before, records[-1].host_ns if records else 0)
    return make_trace(str(target), records, notes=notes)


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
