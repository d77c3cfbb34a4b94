"""Operations whose device times are not known yet, in issue order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from itertools import islice
from typing import Final

from hicache_obs.recorder.counters import RecorderCounters
from hicache_obs.recorder.pair import Pair
from hicache_obs.recorder.sink import BlockSink, RecordSink
from hicache_obs.records import KINDS, DropReason, OpId, ThreadId, Times
from hicache_obs.streams.protocol import Device, Probe

DEFAULT_MAX_PENDING: Final = 1 << 14
_TIMES: Final = KINDS.index(Times)
_AT_ONCE: Final = 16
"""Times that are written while the lock is held once: an engine's thread may be waiting for it."""
_Item = tuple[OpId, ThreadId, Probe, Device]
_Known = tuple[_Item, tuple[int, int]]
"""With start and end, ns."""


class PendingTimes:
    """Writes the device times of operations once they have come. Any thread may call any method.

    Args:
        sink: Where the times go.
        lock: The recorder's.
        counters: Gets the pairs that are resolved or dropped; under ``lock``.
        failed: Told of what a probe raises.
        limit: Operations that may wait. Beyond that the oldest never gets any times.
    """

    def __init__(
        self,
        sink: RecordSink,
        lock: AbstractContextManager[bool],
        counters: RecorderCounters,
        *,
        clock: Callable[[], int],
        failed: Callable[[Exception], None],
        limit: int = DEFAULT_MAX_PENDING,
    ) -> None:
        self._sink: Final = sink
        self._packs: Final = sink if isinstance(sink, BlockSink) else None
        """The same, if it takes packed records."""
        self._lock: Final = lock
        self._counters: Final = counters
        self._clock: Final = clock
        self._failed: Final = failed
        self._limit: Final = limit
        self._items: Final[deque[_Item]] = deque()
        self._resolving: Final = threading.Lock()

    def add(self, op: OpId, thread: ThreadId, probe: Probe, device: Device) -> None:
        """``op``'s times are what ``probe`` will say, by the clock of ``device``."""
        items = self._items
        if len(items) >= self._limit:
            with self._lock:
                full = len(items) >= self._limit  # else the agent was faster
                if full:
                    items.popleft()
            if full:
                self._give_up()
        items.append((op, thread, probe, device))

    def abandon(self, probe: Probe) -> None:
        """The call that ``probe`` was for has failed: its times will never come, and nobody waits for them."""
        with self._lock:
            for item in reversed(list(self._items)):
                if item[2] is probe or (isinstance(item[2], Pair) and item[2].first is probe):
                    self._items.remove(item)
                    self._counters.pairs_dropped += 1
                    return

    def resolve(self) -> int:
        """Append the times that have come, up to the first operation that is not complete; returns how many."""
        if not self._resolving.acquire(blocking=False):
            return 0
        count = 0
        try:
            while self._sink.writable and (items := list(islice(self._items, _AT_ONCE))):
                known, error_ns = self._known(items)
                if known:
                    count += self._append(known, error_ns)
                elif self._is_first(items[0]):  # else it was given up meanwhile
                    break
            self._sink.beat(self._clock())
        finally:
            with self._lock:
                self._counters.pairs_resolved += count
            self._resolving.release()
        return count

    def _known(self, items: list[_Item]) -> tuple[list[_Known], int]:
        """Those of ``items`` whose times have come, up to the first of another device, and the error of the times.

        If the first fails it is given up.
        """
        found: list[_Known] = []
        device = items[0][3]
        for item in items:
            probe = item[2]
            try:
                if item[3] is not device or not probe.ready():
                    break
                found.append((item, probe.times_ns()))
            except Exception as error:  # noqa: BLE001 a device error must not end the agent
                self._fail(item, error)
                break
        if not found:
            return [], 0
        try:
            return found, device.clock_error_ns
        except Exception as error:  # noqa: BLE001 as above
            self._fail(items[0], error)
            return [], 0

    def _fail(self, item: _Item, error: Exception) -> None:
        """Give ``item`` up if it is the first. If it is not, it will be and fail again, or somebody else gave it up."""
        with self._lock:
            if not self._is_first(item):
                return
            self._items.popleft()
        self._give_up()
        self._failed(error)

    def _is_first(self, item: _Item) -> bool:
        try:
            return self._items[0] is item
        except IndexError:
            return False

    def _append(self, known: list[_Known], error_ns: int) -> int:
        """Append the times of those that are still the first when it is their turn, and remove them; how many."""
        items, packs = self._items, self._packs
        rows: list[tuple[int, ...]] = []
        with self._lock:
            now = self._clock()
            for item, (start_ns, end_ns) in known:
                if items and items[0] is item:  # no other thread takes one away meanwhile: that needs the lock
                    items.popleft()
                    rows.append((_TIMES | item[1] << 32, item[0], now, start_ns, end_ns, error_ns, 0, 0, 0))
            done = 0 if packs is None else packs.put_rows(rows)
            for word, op, _, start_ns, end_ns, *_ in rows[done:]:
                self._sink.append(Times(OpId(op), ThreadId(word >> 32), now, start_ns, end_ns, error_ns))
        return len(rows)

    def _give_up(self) -> None:
        with self._lock:
            self._counters.pairs_dropped += 1
        self._sink.drop(DropReason.UNRESOLVED)
