"""Base-2 exponential histograms of durations, as OTLP carries them, with exemplars.

Bucket ``i`` at scale ``s`` holds values in ``(base**i, base**(i + 1)]`` with ``base = 2**2**-s``. Source:
https://opentelemetry.io/docs/specs/otel/metrics/data-model/#exponentialhistogram
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

from hicache_obs.exporters.spans import SpanId

MAX_BUCKETS: Final = 160
START_SCALE: Final = 10
MAX_EXEMPLARS: Final = 4
_NS_PER_SECOND: Final = 1_000_000_000


class DurationExemplar(NamedTuple):
    """One recorded duration and the span that shows it."""

    duration_ns: int
    span: SpanId
    time_ns: int


class ExponentialHistogram:
    """Durations in seconds. One thread records; another may read counts that are a moment apart.

    Attributes:
        count, sum_ns, min_ns, max_ns: Of all durations.
        zeros: Durations of 0.
        scale: Halves its resolution whenever more than ``MAX_BUCKETS`` buckets would be needed.
    """

    __slots__ = ("_buckets", "_exemplars", "count", "max_ns", "min_ns", "scale", "sum_ns", "zeros")

    def __init__(self) -> None:
        self.count = 0
        self.sum_ns = 0
        self.min_ns = 0
        self.max_ns = 0
        self.zeros = 0
        self.scale = START_SCALE
        self._buckets: dict[int, int] = {}
        self._exemplars: list[DurationExemplar] = []

    def record(self, duration_ns: int) -> None:
        """Count one duration, at least 0."""
        self.min_ns = min(self.min_ns, duration_ns) if self.count else duration_ns
        self.max_ns = max(self.max_ns, duration_ns)
        self.count += 1
        self.sum_ns += duration_ns
        if duration_ns == 0:
            self.zeros += 1
            return
        index = _index(duration_ns, self.scale)
        buckets = self._buckets
        if index not in buckets:
            low, high = min(buckets, default=index), max(buckets, default=index)
            while max(high, index) - min(low, index) >= MAX_BUCKETS:
                self._coarsen()
                buckets = self._buckets
                low, high, index = low >> 1, high >> 1, index >> 1
        buckets[index] = buckets.get(index, 0) + 1

    def explain(self, exemplar: DurationExemplar) -> None:
        """Keep the newest few exemplars until they are taken; on any one thread."""
        self._exemplars = [*self._exemplars[1 - MAX_EXEMPLARS :], exemplar]

    def take_exemplars(self) -> list[DurationExemplar]:
        """Those since the last call."""
        taken, self._exemplars = self._exemplars, []
        return taken

    def buckets(self) -> tuple[int, int, list[int]]:
        """Scale, index of the first bucket, and the counts from there on."""
        scale, buckets = self.scale, dict(self._buckets)
        if not buckets:
            return scale, 0, []
        first = min(buckets)
        return scale, first, [buckets.get(index, 0) for index in range(first, max(buckets) + 1)]

    def _coarsen(self) -> None:
        merged: dict[int, int] = {}
        for index, count in self._buckets.items():
            merged[index >> 1] = merged.get(index >> 1, 0) + count
        self._buckets, self.scale = merged, self.scale - 1


def _index(duration_ns: int, scale: int) -> int:
    return math.ceil(math.log2(duration_ns / _NS_PER_SECOND) * 2.0**scale) - 1
