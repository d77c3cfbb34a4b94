"""Operations whose device times are not known yet, in issue order."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Final

from hicache_obs.recorder.counters import RecorderCounters
from hicache_obs.recorder.pair import Pair
from hicache_obs.recorder.sink import BlockSink, RecordSink
from hicache_obs.records import KINDS, DropReason, OpId, ThreadId, Times
from hicache_obs.streams.protocol import Device, Probe

DEFAULT_MAX_PENDING: Final = 1 << 14
_TIMES: Final = KINDS.index(Times)
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
            while self._sink.writable and (item := self._first()) is not None:
                probe = item[2]
                try:
                    if not probe.ready():
                        if item is self._first():
                            break
                        continue  # it was given up meanwhile
                    start_ns, end_ns = probe.times_ns()
                    error_ns = item[3].clock_error_ns
                except Exception as error:  # noqa: BLE001 a device error must not end the agent
                    if self._take(item):
                        self._give_up()
                        self._failed(error)
                    continue
                if self._take(item, (start_ns, end_ns, error_ns, 0)):
                    count += 1
            self._sink.beat(self._clock())
        finally:
            with self._lock:
                self._counters.pairs_resolved += count
            self._resolving.release()
        return count

    def _first(self) -> _Item | None:
        try:
            return self._items[0]  # without the lock: whoever takes it looks again
        except IndexError:
            return None

    def _take(self, item: _Item, times: tuple[int, int, int, int] | None = None) -> bool:
        """Remove ``item``, if it is still the first, and append its times: start, end, error in ns, and 0."""
        items, packs = self._items, self._packs
        with self._lock:
            if not items or items[0] is not item:
                return False
            items.popleft()
            if times is not None:
                op, thread, now = item[0], item[1], self._clock()
                if packs is None or not packs.put_work(_TIMES | thread << 32, op, now, times, (0, 0), ()):
                    self._sink.append(Times(op, thread, now, *times[:3]))
            return True

    def _give_up(self) -> None:
        with self._lock:
            self._counters.pairs_dropped += 1
        self._sink.drop(DropReason.UNRESOLVED)
