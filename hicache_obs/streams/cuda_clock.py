"""Device event times on the host clock, by anchors: events whose host time is known within a few microseconds.

An event's time is an anchor's host time plus the elapsed time between the two. Elapsed times are float32
milliseconds, good to half a microsecond at 5 s and ever worse beyond, and the two clocks drift; so anchors are
renewed at least every 5 s while anybody asks for times. Nothing here touches the streams of the engine.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from hicache_obs.streams.cuda_module import RawEvent

RENEW_NS: Final = 4_000_000_000
"""Age at which the next poll takes a new anchor; below the 5 s so that a slow poller keeps them too."""

MIN_ERROR_NS: Final = 1_000
"""Twice the float32 step at 5 s. No anchor makes the times better than this."""

GOOD_ENOUGH_NS: Final = 10_000
"""An anchor this tight is taken at once; otherwise the best of ``_TRIES`` is."""

_TRIES: Final = 5
_GIVE_UP_NS: Final = 1_000_000
"""An anchor event that takes longer met a busy device: try again at the next poll."""


class Anchor(NamedTuple):
    """A complete timing event and its host time, give or take ``error_ns``."""

    event: RawEvent
    host_ns: int
    error_ns: int


class Clock:
    """Converts complete timing events to host time.

    Args:
        stream: A stream for the anchors alone.
        new_event: Makes a timing event.
        host_ns: The host clock.
    """

    def __init__(
        self,
        stream: object,
        new_event: Callable[[], RawEvent],
        host_ns: Callable[[], int] = time.perf_counter_ns,
    ) -> None:
        self._stream = stream
        self._new_event = new_event
        self._host_ns = host_ns
        self._busy = threading.Lock()
        self._drift_ns = 0
        # A few, so that an operation that began before the newest anchor is measured from a near one.
        self._anchors: deque[Anchor] = deque(maxlen=4)
        # Until the first anchor there are no times at all, so this one, at start-up, is waited for. The very
        # first event pays for the set-up of the context, hence not just one.
        first = _best(self._anchor_now)
        assert first is not None
        self._anchors.append(first)

    @property
    def error_ns(self) -> int:
        """Half width of the uncertainty: the anchor's own, plus how far the clocks drifted between two."""
        return max(MIN_ERROR_NS, max(anchor.error_ns for anchor in list(self._anchors)) + self._drift_ns)

    def keep(self) -> None:
        """Take a new anchor if the last is due for it. May spin for up to 5 ms: for a poller, not a launcher.

        Never waits for the engine's work: the anchors' stream has nothing else on it.
        """
        if self._host_ns() - self._anchors[-1].host_ns < RENEW_NS or not self._busy.acquire(blocking=False):
            return
        try:
            best = _best(self._anchor_soon)
            if best is not None:
                self._drift_ns = abs(self.to_host_ns(best.event) - best.host_ns)
                self._anchors.append(best)
        finally:
            self._busy.release()

    def to_host_ns(self, event: RawEvent) -> int:
        """Host time of ``event``, which is complete, from the anchor nearest to it."""
        anchors = list(self._anchors)
        times = [(anchor.event.elapsed_time(event), anchor) for anchor in anchors]
        elapsed_ms, anchor = min(times, key=lambda pair: abs(pair[0]))
        return anchor.host_ns + round(elapsed_ms * 1e6)

    def _anchor_now(self) -> Anchor:
        event = self._new_event()
        before_ns = self._host_ns()
        event.record(self._stream)
        event.synchronize()
        return _anchor(event, before_ns, self._host_ns())

    def _anchor_soon(self) -> Anchor | None:
        event = self._new_event()
        before_ns = self._host_ns()
        event.record(self._stream)
        while not event.query():
            if self._host_ns() - before_ns > _GIVE_UP_NS:
                return None
        return _anchor(event, before_ns, self._host_ns())


def _anchor(event: RawEvent, before_ns: int, after_ns: int) -> Anchor:
    half_ns = (after_ns - before_ns + 1) // 2
    return Anchor(event, before_ns + half_ns, half_ns)


def _best(attempt: Callable[[], Anchor | None]) -> Anchor | None:
    best: Anchor | None = None
    for _ in range(_TRIES):
        new = attempt()
        if new is not None and (best is None or new.error_ns < best.error_ns):
            best = new
        if best is not None and best.error_ns <= GOOD_ENOUGH_NS:
            break
    return best
