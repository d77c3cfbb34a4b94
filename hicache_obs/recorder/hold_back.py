"""Keeps records back until the page ids in them have arrived, and the ones after them, so that order is kept.

On a GPU the ids of a page list are device memory. Reading them would make the server wait, so they are copied aside
and the record is written when the copy is over. What was recorded meanwhile waits behind it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from typing import Final, Protocol, cast

from hicache_obs._struct import replace
from hicache_obs.recorder.batch import Block
from hicache_obs.recorder.sink import BlockSink, Numbers
from hicache_obs.recorder.slot import pack_plain
from hicache_obs.records import Access, AnyRecord, CaptureMode, DropReason, PageIds

DEFAULT_MAX_HELD: Final = 1 << 14


class LateIds(Protocol):
    """Page ids on their way. Stands in ``Access.ids`` until the record is written."""

    def ready(self) -> bool:
        """Whether they have arrived. Does not block."""

    def take(self) -> PageIds:
        """The ids; always the same array. Only once ``ready``."""


def late(ids: LateIds) -> PageIds:
    """``ids`` as they are put into an ``Access``."""
    return cast(PageIds, ids)


class HoldBack:
    """A ``RecordSink`` in front of another one. Any thread may call any method; nothing blocks.

    Args:
        sink: Where the records go, in the order they came.
        max_held: Records kept back at most. Beyond that new ones are dropped, and counted as ``RING_FULL``.
    """

    def __init__(self, sink: BlockSink, *, max_held: int = DEFAULT_MAX_HELD) -> None:
        self._sink = sink
        self._max_held = max_held
        self._held: deque[AnyRecord | Block | bytes | tuple[DropReason, int]] = deque()
        # The sink's own where it has one: a recorder holds it around its calls, and two could wait for each other.
        self._lock = self.lock = getattr(sink, "lock", None) or threading.RLock()
        self._expecting = False
        self.put = sink.put
        """See ``RingWriter.put``. The sink's own until late ids have been made: one call less."""
        self.put_work = sink.put_work
        """See ``RingWriter.put_work``. The same holds."""
        self.put_round = sink.put_round
        """See ``RingWriter.put_round``. The same holds."""
        self._resolved: tuple[tuple[Access, ...], tuple[Access, ...]] | None = None

    @property
    def writable(self) -> bool:
        """As the sink behind."""
        return self._sink.writable

    @property
    def mode(self) -> CaptureMode:
        """As the sink behind."""
        return self._sink.mode

    @property
    def switch(self) -> Sequence[int]:
        """As the sink behind."""
        return self._sink.switch

    def skip(self) -> None:
        """Count a record that came while ``switch`` was 0, after all that are kept back."""
        self.drop(DropReason.SWITCHED_OFF)

    def expect(self) -> None:
        """Late ids have been made: from now on records are looked at."""
        if not self._expecting:
            self._expecting = True
            self.put = self._put_behind
            self.put_work = self._put_work_behind
            self.put_round = self._put_round_behind

    def append(self, record: AnyRecord) -> bool:
        """Write ``record``, or keep it until its ids and all records before it are written."""
        if not self._expecting:
            return self._sink.append(record)
        if not self._sink.writable:
            return False  # without the lock: in a forked child it may be held for ever
        with self._lock:
            if not self._held and not _is_late(record):
                return self._sink.append(record)
            if len(self._held) >= self._max_held:
                self._drop(DropReason.RING_FULL, 1)
                return False
            self._held.append(record)
            return True

    def _put_work_behind(
        self, word: int, op: int, host_ns: int, numbers: tuple[int, int, int, int], layers: tuple[int, int],
        accesses: tuple[Access, ...],
    ) -> bool:  # fmt: skip
        """As ``put_work``; False if it has to be kept back."""
        if self._held or any(_is_late_access(access) for access in accesses):
            return False
        return self._sink.put_work(word, op, host_ns, numbers, layers, accesses)

    def _put_round_behind(
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
        """As ``put_round``; False if it has to be kept back."""
        return not self._held and self._sink.put_round(word, op, host_ns, stream, site, group, pool, lists, split)

    def put_rows(self, rows: Sequence[tuple[int, ...]]) -> int:
        """As the sink behind; none of them if they have to be kept back."""
        return 0 if self._held else self._sink.put_rows(rows)

    def put_packed(self, slot: bytes) -> bool:
        """As the sink behind."""
        return self._sink.put_packed(slot)

    def append_block(self, block: Block) -> bool:
        """As ``append``, for all records of ``block`` or none of them."""
        if not self._expecting:
            return self._sink.append_block(block)
        if not self._sink.writable:
            return False  # as above
        with self._lock:
            if not self._held and not any(_is_late_access(access) for part in block.parts for access in part[0]):
                return self._sink.append_block(block)
            if len(self._held) >= self._max_held:
                self._drop(DropReason.RING_FULL, len(block))
                return False
            self._held.append(block)
            return True

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count records lost here, after all that are kept back."""
        if not self._expecting:
            self._sink.drop(reason, count)
            return
        if not self._sink.writable:
            return
        with self._lock:
            if self._held:
                self._drop(reason, count)
            else:
                self._sink.drop(reason, count)

    def beat(self, host_ns: int) -> None:
        """As the sink behind."""
        self._sink.beat(host_ns)

    def flush(self) -> int:
        """Write what has become writable; returns how many records. Call it at 10 Hz or so."""
        count = 0
        while self._sink.writable and self._held:
            # Taken anew for each: an engine's thread must not wait for all of them.
            with self._lock:
                if not self._held:
                    break
                item = self._held[0]
                if isinstance(item, bytes):
                    self._sink.put_packed(item)
                    count += 1
                elif isinstance(item, tuple):
                    self._sink.drop(*item)
                elif isinstance(item, Block):
                    if not all(_ready(access) for part in item.parts for access in part[0]):
                        break
                    item.parts = [(self._with_pages(accesses), rows, size) for accesses, rows, size in item.parts]
                    self._sink.append_block(item)
                    count += len(item)
                else:
                    if not all(_ready(access) for access in _accesses(item)):
                        break
                    self._sink.append(self._with_ids(item))
                    count += 1
                self._held.popleft()
        return count

    def _put_behind(self, word: int, op: int, host_ns: int, a: int, b: int) -> bool:
        """As ``put``: kept back, packed, behind what is."""
        if not self._held:
            return self._sink.put(word, op, host_ns, a, b)
        if len(self._held) >= self._max_held or self.mode is CaptureMode.OFF:
            return False
        self._held.append(pack_plain(word, op, host_ns, a, b))
        return True

    def _drop(self, reason: DropReason, count: int) -> None:
        last = self._held[-1]
        if isinstance(last, tuple) and last[0] is reason:
            self._held[-1] = reason, last[1] + count
        else:
            self._held.append((reason, count))

    def _with_ids(self, record: AnyRecord) -> AnyRecord:
        """``record`` with its ids; records that shared their accesses go on sharing them."""
        accesses = _accesses(record)
        fresh = self._with_pages(accesses)
        if fresh is accesses:
            return record
        if hasattr(record, "access"):
            return replace(record, access=fresh[0])
        return replace(record, accesses=fresh)

    def _with_pages(self, accesses: tuple[Access, ...]) -> tuple[Access, ...]:
        """``accesses`` with their ids, the same object for the same object; themselves if none came late."""
        if not any(_is_late_access(access) for access in accesses):
            return accesses
        if self._resolved is None or self._resolved[0] is not accesses:
            self._resolved = accesses, tuple(_resolved(access) for access in accesses)
        return self._resolved[1]


def _accesses(record: AnyRecord) -> tuple[Access, ...]:
    accesses: tuple[Access, ...] | None = getattr(record, "accesses", None)
    if accesses is not None:
        return accesses
    access: Access | None = getattr(record, "access", None)
    return () if access is None else (access,)


def _is_late_access(access: Access) -> bool:
    return hasattr(access.ids, "take") and hasattr(access.ids, "ready")


def _is_late(record: AnyRecord) -> bool:
    return any(_is_late_access(access) for access in _accesses(record))


def _ready(access: Access) -> bool:
    return not _is_late_access(access) or cast(LateIds, access.ids).ready()


def _resolved(access: Access) -> Access:
    if not _is_late_access(access):
        return access
    return type(access)(access.space, access.mode, cast(LateIds, access.ids).take(), access.pool)
