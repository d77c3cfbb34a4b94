"""What the catalogue says about one metric: its row, its labels, its buckets."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import product


class MetricType(str, enum.Enum):
    """Prometheus metric types in use; the value is what a ``# TYPE`` line says."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Label:
    """One label besides the rank labels.

    Attributes:
        name: Label name.
        values: Every value it can have. Empty: one value per process, fixed when the metrics are created.
    """

    name: str
    values: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric.

    Attributes:
        name: Full name as a query spells it (for a histogram without ``_bucket``, ``_sum``, ``_count``).
        type: Prometheus type.
        unit: ``seconds`` and ``bytes`` are base units and part of the name; anything else is what is counted.
        labels: Labels besides ``RANK_LABELS``.
        buckets_ns: Upper bounds of a histogram, inclusive, ascending, nanoseconds; empty for other types.
        source: Call that feeds it.
        question: What a reader of a dashboard learns from it.
        help: Text of the ``# HELP`` line.
    """

    name: str
    type: MetricType
    unit: str
    labels: tuple[Label, ...]
    buckets_ns: tuple[int, ...]
    source: str
    question: str
    help: str

    @property
    def family(self) -> str:
        """Name of the metric family: ``name`` without the ``_total`` of a counter."""
        return self.name.removesuffix("_total")

    @property
    def base_unit(self) -> str:
        """``seconds``, ``bytes`` or nothing: what OpenMetrics may state as the unit."""
        return self.unit if self.unit in ("seconds", "bytes") else ""

    @property
    def series_names(self) -> tuple[str, ...]:
        """Names a query can select."""
        if self.type is MetricType.HISTOGRAM:
            return tuple(self.name + suffix for suffix in ("_bucket", "_sum", "_count"))
        return (self.name,)

    def children(self, fixed: Mapping[str, str]) -> Iterable[tuple[str, ...]]:
        """Every combination of label values, in ``labels`` order.

        Args:
            fixed: Values of the labels that have one value per process.
        """
        return product(*(label.values or (fixed[label.name],) for label in self.labels))


def decades(low_ns: int, high_ns: int) -> tuple[int, ...]:
    """1, 2.5, 5 per decade from ``low_ns`` (a power of ten) to ``high_ns``, both included."""
    bounds = []
    decade_ns = low_ns
    while decade_ns <= high_ns:
        bounds += [b for b in (decade_ns, decade_ns * 5 // 2, decade_ns * 5) if b <= high_ns]
        decade_ns *= 10
    return tuple(bounds)
