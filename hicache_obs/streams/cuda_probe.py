"""Probes of the cuda device: pooled pairs of timing events around one stream item."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from hicache_obs.errors import StreamError
from hicache_obs.streams.cuda_clock import Clock
from hicache_obs.streams.cuda_module import RawEvent, RawStream

_FREE_PAIRS: Final = 1024
"""Pairs kept for reuse; making an event costs a driver call, keeping one about nothing."""


class PairPool:
    """Timing event pairs, used ones first. Any thread; ``take`` is paired with ``give``."""

    def __init__(self, new_event: Callable[[], RawEvent]) -> None:
        self._new_event = new_event
        self._free: deque[tuple[RawEvent, RawEvent]] = deque(maxlen=_FREE_PAIRS)

    def take(self) -> tuple[RawEvent, RawEvent]:
        """A pair nobody else has."""
        try:
            return self._free.popleft()
        except IndexError:
            return self._new_event(), self._new_event()

    def give(self, pair: tuple[RawEvent, RawEvent]) -> None:
        """Give ``pair``, both complete, back. Beyond the bound one is dropped."""
        self._free.append(pair)


class CudaProbe:
    """A pair of timing events around one item, from the pool."""

    __slots__ = (
        "_both",
        "_clock",
        "_on_begin",
        "_on_end",
        "_pair",
        "_pairs",
        "_taken",
        "_times_ns",
        "device",
    )

    def __init__(
        self,
        device: object,
        pairs: PairPool,
        clock: Clock,
        on_begin: Callable[[], None] | None,
        on_end: Callable[[], None] | None,
    ) -> None:
        self.device: Final = device
        self._pairs = pairs
        self._clock = clock
        self._on_begin = on_begin
        self._on_end = on_end
        self._taken = False
        self._both = False
        self._pair: tuple[RawEvent, RawEvent] | None = None
        self._times_ns: tuple[int, int] | None = None

    def begin(self, stream: RawStream) -> None:
        """Record the first event on ``stream``; StreamError the second time."""
        if self._taken:
            raise StreamError("probe already measures another item: take a new one for each item")
        self._taken = True
        self._pair = self._pairs.take()
        if self._on_begin is not None:
            self._on_begin()
        self._pair[0].record(stream)

    def end(self, stream: RawStream) -> None:
        """Record the second event on ``stream``. Partner of ``begin``."""
        assert self._pair is not None
        self._pair[1].record(stream)
        if self._on_end is not None:
            self._on_end()
        self._both = True

    def ready(self) -> bool:
        """See ``protocol.Probe.ready``. Re-anchors the clock when that is due: not for the launching thread."""
        if self._times_ns is not None:
            return True
        self._clock.keep()
        return self._complete()

    def times_ns(self) -> tuple[int, int]:
        """See ``protocol.Probe.times_ns``. The first call gives the events back to the pool."""
        if self._times_ns is None:
            if self._pair is None or not self._complete():
                raise StreamError("probe times are not known yet: ask ready() first")
            begin, end = self._pair
            start_ns = self._clock.to_host_ns(begin)
            # One anchor for both: a short item must not end before it starts because two anchors differ.
            self._times_ns = start_ns, start_ns + round(begin.elapsed_time(end) * 1e6)
            self._pairs.give(self._pair)
            self._pair = None
        return self._times_ns

    def _complete(self) -> bool:
        # A pooled event still answers for its former use until it is recorded again.
        return self._both and self._pair is not None and self._pair[1].query()
