"""Operations whose device times are not known yet, in issue order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from hicache_obs.recorder.counters import RecorderCounters
from hicache_obs.recorder.pair import Pair
from hicache_obs.recorder.sink import RecordSink
from hicache_obs.records import DropReason, OpId, ThreadId, Times
from hicache_obs.streams.protocol import Device, Probe

DEFAULT_MAX_PENDING: Final = 1 << 14
_Item = tuple[OpId, ThreadId, Probe, Device]


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
            while self._sink.writable and (item := self._first()) is not None:
                op, thread, probe, device = item
                try:
                    if not probe.ready():
                        if item is self._first():
                            break
                        continue  # it was given up meanwhile
                    start_ns, end_ns = probe.times_ns()
                    error_ns = device.clock_error_ns
                except Exception as error:  # noqa: BLE001 a device error must not end the agent
                    if self._take(item):
                        self._give_up()
                        self._failed(error)
                    continue
                if self._take(item):
                    self._sink.append(Times(op, thread, self._clock(), start_ns, end_ns, error_ns))
                    count += 1
            self._sink.beat(self._clock())
        finally:
            with self._lock:
                self._counters.pairs_resolved += count
            self._resolving.release()
        return count

    def _first(self) -> _Item | None:
        with self._lock:
            return self._items[0] if self._items else None

    def _take(self, item: _Item) -> bool:
        """Remove ``item``, if it is still the first."""
        with self._lock:
            if not self._items or self._items[0] is not item:
                return False
            self._items.popleft()
            return True

    def _give_up(self) -> None:
        with self._lock:
            self._counters.pairs_dropped += 1
        self._sink.drop(DropReason.UNRESOLVED)
