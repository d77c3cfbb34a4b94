"""The values of one rank: one integer array (nanoseconds, bytes, counts), converted when scraped; and exemplars.

``prometheus_client``'s own metric classes are not used: in a server that has set its multiprocess directory
they would show up on the server's endpoint as well. The library is imported inside functions only, because a
plugin that imports it before that directory is set silently empties the server's own metrics.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from hicache_obs.exporters.catalogue import CATALOGUE, RANK_LABELS, row
from hicache_obs.exporters.metric_row import MetricRow, MetricType
from hicache_obs.records import Ranks

if TYPE_CHECKING:
    from prometheus_client.samples import Exemplar as OpenMetricsExemplar
    from prometheus_client.samples import Sample

_NS_PER_SECOND: Final = 1_000_000_000
_BILLIONTHS: Final = ("seconds", "ratio")
"""Units whose values are kept as whole billionths."""


class Exemplar(NamedTuple):
    """One event behind a number: ids that are no labels. OpenMetrics allows 128 characters of names and values.

    Attributes:
        labels: By name.
        wall_ns: When it was counted, nanoseconds since the epoch.
    """

    labels: Mapping[str, str]
    wall_ns: int


Exemplars = dict[int, tuple[Exemplar, int]]
"""By cell: the newest exemplar, and by how much the event moved the metric."""
TRACE_ID: Final = "trace_id"
SPAN_ID: Final = "span_id"
TRACED_NS: Final = 60 * _NS_PER_SECOND
"""Only a span replaces the exemplar that is a younger span: it is there for a scrape, however often things happen."""


class Counter:
    """One child of a counter, bound once; ``add`` is one array update."""

    __slots__ = ("_cells", "_exemplars", "_index")

    def __init__(self, cells: array[int], index: int, exemplars: Exemplars) -> None:
        self._cells = cells
        self._index = index
        self._exemplars = exemplars

    def add(self, amount: int = 1, exemplar: Exemplar | None = None) -> None:
        """Count ``amount`` more: nanoseconds for a metric in seconds, else what its name counts.

        Raises:
            ValueError: ``amount`` is negative.
        """
        if amount < 0:
            raise ValueError(f"a counter only grows, got {amount}")
        self._cells[self._index] += amount
        if exemplar is not None:
            _keep(self._exemplars, self._index, exemplar, amount)


class Gauge:
    """One child of a gauge, bound once."""

    __slots__ = ("_cells", "_index")

    def __init__(self, cells: array[int], index: int) -> None:
        self._cells = cells
        self._index = index

    def set(self, value: int) -> None:
        """Replace the value; nanoseconds for a metric in seconds, billionths for a ratio."""
        self._cells[self._index] = value


class Histogram:
    """One child of a histogram, bound once. Cells: one count per bucket, the overflow count, the sum."""

    __slots__ = ("_bounds_ns", "_cells", "_exemplars", "_first", "_sum")

    def __init__(self, cells: array[int], first: int, bounds_ns: tuple[int, ...], exemplars: Exemplars) -> None:
        self._cells = cells
        self._first = first
        self._bounds_ns = bounds_ns
        self._sum = first + len(bounds_ns) + 1
        self._exemplars = exemplars

    def observe(self, duration_ns: int, exemplar: Exemplar | None = None) -> None:
        """Count one duration. A duration equal to a bound belongs to that bound's bucket.

        Raises:
            ValueError: ``duration_ns`` is negative.
        """
        if duration_ns < 0:
            raise ValueError(f"a duration is not negative, got {duration_ns} ns")
        cells = self._cells
        cell = self._first + bisect_left(self._bounds_ns, duration_ns)
        cells[cell] += 1
        cells[self._sum] += duration_ns
        if exemplar is not None:
            _keep(self._exemplars, cell, exemplar, duration_ns)


def _keep(exemplars: Exemplars, cell: int, exemplar: Exemplar, amount: int) -> None:
    """Replace the exemplar of ``cell``, unless that is a span that has been there for less than ``TRACED_NS``."""
    known = exemplars.get(cell)
    if known is None or TRACE_ID not in known[0].labels or exemplar.wall_ns >= known[0].wall_ns + TRACED_NS:
        exemplars[cell] = exemplar, amount


class Slot(NamedTuple):
    """Where one child lives in a rank's cells."""

    row: MetricRow
    values: tuple[str, ...]
    first: int


class RankMetrics:
    """All children of one rank, at 0 from the start.

    One thread at a time may feed the children of a rank; any number may scrape meanwhile.
    """

    def __init__(self, rank: Ranks, slots: Iterable[Slot], size: int, created_s: float) -> None:
        self.rank = rank
        self.created_s: Final = created_s
        """Unix time since which its counters and histograms count."""
        self._cells = array("q", bytes(8 * size))
        self._exemplars: Exemplars = {}
        self._slots = {(slot.row.name, slot.values): slot for slot in slots}
        rank_values = dict(zip(RANK_LABELS, (str(rank.tp), str(rank.pp), str(rank.dp)), strict=True))
        self._children: dict[str, list[tuple[int, dict[str, str]]]] = {metric.name: [] for metric in CATALOGUE}
        for slot in self._slots.values():
            self._children[slot.row.name].append((slot.first, {**rank_values, **_label_dict(slot)}))

    def counter(self, name: str, *values: str) -> Counter:
        """The child of counter ``name`` with these label values, in catalogue order.

        Raises:
            KeyError: No such metric or label value.
        """
        return Counter(self._cells, self._slot(name, values, MetricType.COUNTER).first, self._exemplars)

    def gauge(self, name: str, *values: str) -> Gauge:
        """The child of gauge ``name`` with these label values, in catalogue order.

        Raises:
            KeyError: No such metric or label value.
        """
        return Gauge(self._cells, self._slot(name, values, MetricType.GAUGE).first)

    def histogram(self, name: str, *values: str) -> Histogram:
        """The child of histogram ``name`` with these label values, in catalogue order.

        Raises:
            KeyError: No such metric or label value.
        """
        slot = self._slot(name, values, MetricType.HISTOGRAM)
        return Histogram(self._cells, slot.first, slot.row.buckets_ns, self._exemplars)

    def snapshot(self) -> array[int]:
        """A copy of all cells, taken while no other Python thread runs."""
        return self._cells[:]

    def labels(self, metric: MetricRow) -> list[dict[str, str]]:
        """The labels of every child of ``metric``, the rank's first."""
        return [labels for _, labels in self._children[metric.name]]

    def explain(self, name: str, *values: str, amount: int, exemplar: Exemplar) -> None:
        """Make a span that has been delivered the exemplar of what it shows; on any thread.

        Args:
            name, values: A counter or histogram, and its label values in catalogue order.
            amount: What was counted or observed, in the unit that ``add`` and ``observe`` take.
            exemplar: With the labels ``TRACE_ID`` and ``SPAN_ID``. Its time is that of the delivery: Prometheus takes
                the exemplars of a series in order only.

        Raises:
            KeyError: No such metric or label value.
        """
        slot = self._slots[row(name).name, values]
        cell = slot.first
        if slot.row.type is MetricType.HISTOGRAM:
            cell += bisect_left(slot.row.buckets_ns, amount)
        self._exemplars[cell] = exemplar, amount

    def value(self, name: str, *values: str) -> int:
        """The value of a counter or gauge, in the unit that ``add`` and ``set`` take; safe on any thread.

        Raises:
            KeyError: No such metric or label value.
        """
        return self._cells[self._slots[row(name).name, values].first]

    def total(self, name: str) -> int:
        """The sum of a counter over its label values."""
        return sum(self._cells[first] for first, _ in self._children[row(name).name])

    def samples(self, metric: MetricRow, cells: array[int], *, created: bool = False) -> Iterator[Sample]:
        """The samples of every child of ``metric`` as they stood in ``cells``; with ``created`` also since when."""
        from prometheus_client.samples import Sample

        bounds = _bounds(metric) if metric.type is MetricType.HISTOGRAM else ()
        for first, labels in self._children[metric.name]:
            if bounds:
                seen = 0
                for index, bound in enumerate(bounds, first):
                    seen += cells[index]
                    exemplar = self._exemplar(metric, index)
                    yield Sample(metric.name + "_bucket", {**labels, "le": bound}, seen, None, exemplar)
                yield Sample(metric.name + "_count", labels, seen)
                yield Sample(metric.name + "_sum", labels, _convert(metric, cells[first + len(bounds)]))
            else:
                value = _convert(metric, cells[first])
                yield Sample(metric.name, labels, value, None, self._exemplar(metric, first))
            if created and metric.type is not MetricType.GAUGE:
                yield Sample(metric.family + "_created", labels, self.created_s)

    def _exemplar(self, metric: MetricRow, cell: int) -> OpenMetricsExemplar | None:
        known = self._exemplars.get(cell)
        if known is None:
            return None
        from prometheus_client.samples import Exemplar, Timestamp

        (labels, wall_ns), amount = known
        return Exemplar(dict(labels), _convert(metric, amount), Timestamp(*divmod(wall_ns, _NS_PER_SECOND)))

    def _slot(self, name: str, values: tuple[str, ...], kind: MetricType) -> Slot:
        slot = self._slots[row(name).name, values]
        if slot.row.type is not kind:
            raise KeyError(f"{name} is a {slot.row.type.value}, not a {kind.value}")
        return slot


def layout(fixed: Mapping[str, str]) -> tuple[tuple[Slot, ...], int]:
    """Every child's place in a rank's cells, and the number of cells."""
    slots = []
    size = 0
    for metric in CATALOGUE:
        width = len(metric.buckets_ns) + 2 if metric.type is MetricType.HISTOGRAM else 1
        for values in metric.children(fixed):
            slots.append(Slot(metric, values, size))
            size += width
    return tuple(slots), size


def _label_dict(slot: Slot) -> dict[str, str]:
    return dict(zip((label.name for label in slot.row.labels), slot.values, strict=True))


def _bounds(metric: MetricRow) -> tuple[str, ...]:
    """The ``le`` label values of all buckets: seconds, spelled as OpenMetrics wants (``1e-06``, ``1.0``)."""
    return (*(repr(bound / _NS_PER_SECOND) for bound in metric.buckets_ns), "+Inf")


def _convert(metric: MetricRow, value: int) -> float:
    return value / _NS_PER_SECOND if metric.unit in _BILLIONTHS else value
