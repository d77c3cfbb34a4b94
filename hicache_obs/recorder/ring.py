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

import os
import platform
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from hicache_obs.findings import Hazard
from hicache_obs.recorder.arena import Arena
from hicache_obs.recorder.batch import Block
from hicache_obs.recorder.ring_file import check_size, make_file, write_header
from hicache_obs.recorder.sink import Numbers
from hicache_obs.recorder.slot import (
    SlotPacker,
    cell_words,
    pack_plain_into,
    pack_work,
    plain_record,
    unpack_plain,
)
from hicache_obs.records import (
    ALL_LAYERS,
    HEADER_BYTES,
    MAX_ARENA_WORDS,
    MAX_SLOTS,
    NO_OP,
    OBSERVABLE_STATED,
    SLOT_BYTES,
    SLOT_LIST,
    Access,
    AnyRecord,
    CaptureMode,
    DropReason,
    Lost,
    Mode,
    Ranks,
    Record,
    RingWord,
    Space,
)

DEFAULT_SLOTS: Final = 1 << 16
DEFAULT_ARENA_WORDS: Final = 1 << 20

_ALL_END: Final = ALL_LAYERS[1]
_DEVICE, _READS, _WRITES = int(Space.DEVICE), Mode.READ | SLOT_LIST, Mode.WRITE | SLOT_LIST
_pack_round: Final = pack_work[2]
_pack_row: Final = pack_work[0]
_MODE: Final = int(RingWord.MODE)  # plain numbers: looking up an enum member costs more than the store
_HEAD_WORD: Final = int(RingWord.HEAD)
_ARENA_LOW: Final = int(RingWord.ARENA_LOW)
_DROPPED: Final = int(RingWord.DROPPED)
_OFF: Final = int(DropReason.SWITCHED_OFF)
_SKIPPED: Final = _DROPPED + _OFF
_SHUT: Final = (0,)

_MODES: Final = tuple(CaptureMode)

# Stores become visible in program order on x86; elsewhere a record could appear before its contents.
_STRONG_ORDER: Final = platform.machine().lower() in ("x86_64", "amd64", "i686")


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
        check_size("slots", slots, 8, MAX_SLOTS)
        check_size("arena_words", arena_words, 16, MAX_ARENA_WORDS)
        self.path: Final = Path(path)
        self._map = make_file(self.path, HEADER_BYTES + slots * SLOT_BYTES + arena_words * 8)
        self._words = memoryview(self._map)[:HEADER_BYTES].cast("q")
        self._slot_words = np.frombuffer(
            self._map, dtype="<i8", count=slots * SLOT_BYTES // 8, offset=HEADER_BYTES
        ).reshape(slots, SLOT_BYTES // 8)
        self._arena = Arena(self._map, HEADER_BYTES + slots * SLOT_BYTES, arena_words, self._words)
        self._pack = SlotPacker(self._map, self._arena).pack
        self._slots = slots
        self._head = 0
        self._full_at = slots
        self._pending_lost = [0] * len(DropReason)
        self._any_lost = False
        # Re-entrant: a signal handler may append while its own thread is appending.
        self._lock = self.lock = threading.RLock()
        """Whoever appends much may hold it around several calls."""
        self._busy = False
        self._fence = threading.Lock()
        self._fence.acquire()
        write_header(self._words, ranks, mode, clock, slots=slots, arena_words=arena_words)
        self.writable = self._open = True
        self.switch: Sequence[int] = self._words[_MODE : _MODE + 1]
        """The mode byte, for whoever asks at every call; 0 once closed, and in a forked child."""
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
        self._busy = True
        try:
            pack_plain_into(self._map, HEADER_BYTES + head % self._slots * SLOT_BYTES, word, op, host_ns, a, b)
            if not _STRONG_ORDER:
                self._fence.release()
                self._fence.acquire()
            words[_HEAD_WORD] = self._head = head + 1
        finally:
            self._busy = False
        return True

    def put_work(
        self, word: int, op: int, host_ns: int, numbers: tuple[int, int, int, int], layers: tuple[int, int],
        accesses: tuple[Access, ...],
    ) -> bool:  # fmt: skip
        """As ``put``, for a record with accesses or more numbers, its a to d; ``word`` is without their count."""
        head = self._head
        if head >= self._full_at or self._any_lost or self._busy or not self._open or not self._words[_MODE]:
            return False
        self._busy = True
        try:
            cells = self._arena.cells(accesses) if accesses else ()
            if cells is None:
                return False
            count = len(accesses)
            place = HEADER_BYTES + head % self._slots * SLOT_BYTES
            pack = pack_work[count]
            pack(self._map, place, word | count << 8, op, host_ns, *numbers, *layers, *cells)
            self._publish(head + 1)
        finally:
            self._busy = False
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
        head = self._head
        if head >= self._full_at or self._any_lost or self._busy or not self._open or not self._words[_MODE]:
            return False
        start = self._arena.put(lists)
        if start is None:
            return False
        _pack_round(
            self._map, HEADER_BYTES + head % self._slots * SLOT_BYTES, word, op, host_ns, stream, site, group, 0,
            0, _ALL_END, _DEVICE, _WRITES, pool, split, start,
            _DEVICE, _READS, pool, len(lists) - split, start + split,
        )  # fmt: skip
        self._publish(head + 1)
        return True

    def put_rows(self, rows: Sequence[tuple[int, ...]]) -> int:
        """As ``put_work`` for records without accesses, which become visible at once.

        Args:
            rows: Of each all the numbers of its slot: first word, op, host_ns, a to d, both layers.

        Returns:
            How many are written, the first ones.
        """
        if self._any_lost or self._busy or not self._open or not self._words[_MODE]:
            return 0
        self._busy = True
        try:
            head = self._head
            fitting = rows[: max(0, self._full_at - head)]
            for row in fitting:
                _pack_row(self._map, HEADER_BYTES + head % self._slots * SLOT_BYTES, *row)
                head += 1
            self._publish(head)
        finally:
            self._busy = False
        return len(fitting)

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
            word, op, host_ns, a, b = unpack_plain(slot)
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
            cells = self._arena.cells(accesses)
            if cells is None:
                self._free_arena()
                return DropReason.ARENA_FULL
            words.append(np.frombuffer(cell_words[len(accesses)](*cells), dtype="<i8"))
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
                self._words[_DROPPED + reason] += count
                self._pending_lost[reason] += count
                self._any_lost = True

    def skip(self) -> None:
        """As ``drop`` of a record that comes while ``switch`` is 0, without the lock. Never raises."""
        if self.writable:
            try:
                self._words[_SKIPPED] += 1  # no other thread comes in between, here and below: there is no call
            except ValueError:  # closed meanwhile
                return
            self._pending_lost[_OFF] += 1
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
            self.switch = _SHUT
            _LIVE.discard(self)
            self._arena.close()
            self._slot_words = np.zeros((0, SLOT_BYTES // 8), dtype=np.int64)
            self._words.release()
            try:
                self._map.close()
            except BufferError:  # forked in the middle of another thread's append: it holds the map for ever
                pass

    def disown(self) -> None:
        """Never touch the file again: this process is a fork of its owner, and the lock may be held for ever."""
        self.writable = self._open = False
        self.switch = _SHUT
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
        arena = self._arena
        if arena.low != arena.promised:
            words[_ARENA_LOW] = arena.promised = arena.low

    def _room(self, slots: int) -> bool:
        self._full_at = self._words[RingWord.TAIL] + self._slots
        return self._head + slots <= self._full_at

    def _report_lost(self, record: Record | Block) -> bool:
        """Write a ``Lost`` per reason; False if they and the record that is waiting do not all fit."""
        self._any_lost = False  # ``skip`` may say otherwise at any time
        reasons = [reason for reason in DropReason if self._pending_lost[reason]]
        if not self._room(len(reasons) + 1):
            self._any_lost = True
            return False
        for reason in reasons:
            count = self._pending_lost[reason]
            lost = Lost(NO_OP, record.thread, record.host_ns, count, reason)
            self._pack[Lost](HEADER_BYTES + (self._head % self._slots) * SLOT_BYTES, lost)
            self._publish(self._head + 1)
            self._words[RingWord.REPORTED + reason] += count
            self._pending_lost[reason] -= count
        return True

    def _no_arena(self) -> None:
        """Drop a record for want of arena, and let the reader free all of it: the next may be as large."""
        self.drop(DropReason.ARENA_FULL)
        self._free_arena()

    def _free_arena(self) -> None:
        arena = self._arena
        arena.free()
        self._words[_ARENA_LOW] = arena.promised = arena.low


_LIVE: Final[weakref.WeakSet[RingWriter]] = weakref.WeakSet()


def _leave_to_parent() -> None:
    """In a forked child: the mapping is shared, the ring is the parent's. Its lock may be held for ever."""
    for ring in list(_LIVE):
        ring.disown()


os.register_at_fork(after_in_child=_leave_to_parent)
