"""Prometheus exposition of the analyzer's results: own storage, one sink, both text formats.

Values live in one integer array per rank (nanoseconds, bytes, counts) and are converted when scraped.
``prometheus_client``'s own metric classes are not used: in a server that has set its multiprocess directory
they would show up on the server's endpoint as well. The library is imported inside functions only, because a
plugin that imports it before that directory is set silently empties the server's own metrics.
"""

from __future__ import annotations

import threading
import time
from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Final, NamedTuple, cast

from hicache_obs import __version__
from hicache_obs.costs import FenceCost, TransferCost, TransferKind
from hicache_obs.exporters.catalogue import (
    CATALOGUE,
    RANK_LABELS,
    MetricRow,
    MetricType,
    Phase,
    Provenance,
    UnknownReason,
    row,
)
from hicache_obs.findings import Cause, Finding, Hazard, Verdict
from hicache_obs.records import DropReason, OpId, Ranks

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.registry import Collector
    from prometheus_client.samples import Exemplar as OpenMetricsExemplar
    from prometheus_client.samples import Sample

_NS_PER_SECOND: Final = 1_000_000_000


ONLY_RANK: Final = Ranks()
"""The rank of an engine that is not parallel."""


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
VERDICT_COUNTERS: Final = {
    Verdict.VIOLATION: "violations_total",
    Verdict.LATENT: "latent_races_total",
    Verdict.CONTRADICTION: "contradictions_total",
}


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
        """Replace the value; nanoseconds for a metric in seconds."""
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


class _Slot(NamedTuple):
    """Where one child lives in a rank's cells."""

    row: MetricRow
    values: tuple[str, ...]
    first: int


class RankMetrics:
    """All children of one rank, at 0 from the start.

    One thread at a time may feed the children of a rank; any number may scrape meanwhile.
    """

    def __init__(self, rank: Ranks, slots: Iterable[_Slot], size: int, created_s: float) -> None:
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

    def _slot(self, name: str, values: tuple[str, ...], kind: MetricType) -> _Slot:
        slot = self._slots[row(name).name, values]
        if slot.row.type is not kind:
            raise KeyError(f"{name} is a {slot.row.type.value}, not a {kind.value}")
        return slot


class Metrics:
    """All metrics of one process, for one or more ranks; a ``prometheus_client`` collector.

    Args:
        ranks: Ranks that exist from the start, so that they are exported at 0 before their first record.
        engine: What is observed, e.g. ``demo`` or ``sglang 0.5.23``.
        version: Version of this package; by default the running one.
        now_ns: Wall clock, nanoseconds since the epoch.
    """

    def __init__(
        self,
        *,
        ranks: Iterable[Ranks] = (ONLY_RANK,),
        engine: str = "demo",
        version: str = __version__,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._now_ns = now_ns
        fixed = {"engine": engine, "version": version}
        self._slots, self._size = _layout(fixed)
        self._lock = threading.Lock()
        self._ranks: dict[Ranks, RankMetrics] = {}
        for rank in ranks:
            self.rank(rank)

    def rank(self, rank: Ranks) -> RankMetrics:
        """The children of ``rank``; created, all at 0, on first use."""
        with self._lock:
            if rank not in self._ranks:
                created = RankMetrics(rank, self._slots, self._size, self._now_ns() / _NS_PER_SECOND)
                build_info = next(slot for slot in self._slots if slot.row is row("build_info"))
                created.gauge("build_info", *build_info.values).set(1)
                # A new dict: a scrape that is iterating keeps the old one.
                self._ranks = {**self._ranks, rank: created}
            return self._ranks[rank]

    @property
    def known_ranks(self) -> tuple[Ranks, ...]:
        """The ranks that are exported."""
        return tuple(self._ranks)

    def set_observable(self, hazards: Iterable[Hazard], rank: Ranks = ONLY_RANK) -> None:
        """State which hazards' records are captured for ``rank``; all others become 0."""
        observable = set(hazards)
        children = self.rank(rank)
        for hazard in Hazard:
            children.gauge("hazard_observable", hazard.value).set(int(hazard in observable))

    def set_clock_error(self, error_ns: int, rank: Ranks = ONLY_RANK) -> None:
        """State the half width of the uncertainty of ``rank``'s device times."""
        self.rank(rank).gauge("clock_error_seconds").set(error_ns)

    def set_pending(self, kind: TransferKind, transfers: int, oldest_ns: int, rank: Ranks = ONLY_RANK) -> None:
        """State how many of ``rank``'s transfers are under way, and for how long the oldest of them is."""
        children = self.rank(rank)
        children.gauge("pending_transfers", kind.value).set(transfers)
        children.gauge("oldest_pending_seconds", kind.value).set(oldest_ns)

    def add_overhead(self, phase: Phase, duration_ns: int, rank: Ranks = ONLY_RANK) -> None:
        """Account ``duration_ns`` of host time to ``phase``; on the thread that feeds ``rank``."""
        self.rank(rank).counter("overhead_seconds_total", phase.value).add(duration_ns)

    def describe(self) -> Iterator[Metric]:
        """The metric families without samples."""
        from prometheus_client import Metric

        for metric in CATALOGUE:
            yield Metric(metric.family, metric.help, metric.type.value, metric.base_unit)

    def collect(self, *, created: bool = False) -> Iterator[Metric]:
        """The metric families with the samples of all ranks; safe on any thread."""
        ranks = [(children, children.snapshot()) for children in self._ranks.values()]
        for metric, family in zip(CATALOGUE, self.describe(), strict=True):
            for children, cells in ranks:
                family.samples.extend(children.samples(metric, cells, created=created))
            yield family

    def registry(self, *, created: bool = False) -> CollectorRegistry:
        """A fresh registry that holds these metrics and nothing else.

        Args:
            created: Also since when each counter and histogram counts. OpenMetrics knows these series; the older
                text format would declare them as gauges of their own.
        """
        from prometheus_client import CollectorRegistry

        registry = CollectorRegistry()
        # Not a subclass of Collector, which would import the library with this module.
        registry.register(cast("Collector", _Created(self) if created else self))
        return registry


class _Created:
    """``metrics`` as a collector that also says since when they count."""

    def __init__(self, metrics: Metrics) -> None:
        self.describe = metrics.describe
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        return self._metrics.collect(created=True)


class MetricsSink:
    """Counts what the analyzer reports; an ``AnalysisSink``.

    All calls come from one thread at a time. Records, lost records and the time of the last analysis are
    always counted; the two switches let one run feed findings and another feed costs.

    Args:
        metrics: Where to count.
        rank: The rank whose records are analysed.
        findings: Count checks, findings and weak orderings.
        costs: Count fences, layer waits and transfers.
        accepts: Whether a fingerprint is one that somebody has accepted for now; its pairs count as ``accepted``.
        now_ns: Wall clock, nanoseconds since the epoch.
    """

    def __init__(
        self,
        metrics: Metrics,
        rank: Ranks = ONLY_RANK,
        *,
        findings: bool = True,
        costs: bool = True,
        accepts: Callable[[str], bool] = lambda _: False,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        of = metrics.rank(rank)
        self._accepts = accepts
        self._accepted = {h: of.counter("accepted_total", h.value) for h in Hazard}
        self._findings = findings
        self._costs = costs
        self._now_ns = now_ns
        self._by_verdict = {
            verdict: {h: of.counter(name, h.value) for h in Hazard} for verdict, name in VERDICT_COUNTERS.items()
        }
        self._unknown = {reason: of.counter("unknown_total", reason.value) for reason in UnknownReason}
        self._weak = {
            (h, p.value): of.counter("weak_orderings_total", h.value, p.value) for h in Hazard for p in Provenance
        }
        self._checks = {h: of.counter("checks_total", h.value) for h in Hazard}
        self._pages_checked = {h: of.counter("pages_checked_total", h.value) for h in Hazard}
        self._fence_wait = {k: of.histogram("fence_wait_seconds", k.value) for k in TransferKind}
        self._fence_avoidable = {k: of.histogram("fence_avoidable_seconds", k.value) for k in TransferKind}
        self._layer_wait = of.histogram("layer_wait_seconds")
        self._unfenced = {k: of.counter("unfenced_ops_total", k.value) for k in TransferKind}
        self._bytes = {k: of.counter("transfer_bytes_total", k.value) for k in TransferKind}
        self._pages = {k: of.counter("transfer_pages_total", k.value) for k in TransferKind}
        self._op = {k: of.histogram("op_seconds", k.value) for k in TransferKind}
        self._copy = {k: of.histogram("transfer_seconds", k.value) for k in TransferKind}
        self._records = of.counter("records_total")
        self._dropped = {r: of.counter("dropped_records_total", r.name.lower()) for r in DropReason}
        self._last_analysis = of.gauge("last_analysis_timestamp_seconds")

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        """Count looked-up pages and checked pairs."""
        if self._findings:
            self._pages_checked[hazard].add(pages)
            self._checks[hazard].add(pairs)

    def on_finding(self, finding: Finding) -> None:
        """Count one operation pair under its verdict."""
        if not self._findings:
            return
        if finding.verdict is Verdict.UNKNOWN:
            lost = finding.cause is Cause.RECORDS_LOST
            self._unknown[UnknownReason.RECORDS_LOST if lost else UnknownReason.OTHER].add()
        elif finding.verdict in self._by_verdict:
            if self._accepts(finding.fingerprint):
                self._accepted[finding.hazard].add()
                return
            exemplar = Exemplar({"fingerprint": finding.fingerprint}, self._now_ns())
            self._by_verdict[finding.verdict][finding.hazard].add(1, exemplar)

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        """Count one pair whose order rests on a weaker kind of edge."""
        if self._findings:
            self._weak[hazard, provenance].add()

    def on_fence(self, cost: FenceCost) -> None:
        """Observe one fence's wait and the avoidable part of it."""
        if self._costs:
            exemplar = Exemplar({"op_id": str(cost.op)}, self._now_ns())
            self._fence_wait[cost.kind].observe(cost.waited_ns, exemplar)
            self._fence_avoidable[cost.kind].observe(cost.avoidable_ns, exemplar)

    def on_layer_wait(self, waited_ns: int) -> None:
        """Observe one layer wait."""
        if self._costs:
            self._layer_wait.observe(waited_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        """Count one transfer and observe its durations."""
        if not self._costs:
            return
        kind = cost.kind
        if not cost.fenced:
            self._unfenced[kind].add()
        self._bytes[kind].add(cost.size_bytes)
        self._pages[kind].add(cost.pages)
        exemplar = Exemplar({"transfer": str(cost.transfer)}, self._now_ns())
        self._op[kind].observe(cost.op_ns, exemplar)
        self._copy[kind].observe(cost.copy_ns, exemplar)

    def on_records(self, count: int) -> None:
        """Count analysed records and note the time."""
        self._records.add(count)
        self._last_analysis.set(self._now_ns())

    def on_lost(self, count: int, reason: DropReason) -> None:
        """Count lost records."""
        self._dropped[reason].add(count)


def render(metrics: Metrics) -> bytes:
    """The current values as one scrape in the Prometheus text format, UTF-8."""
    from prometheus_client import generate_latest

    return generate_latest(metrics.registry())


def negotiate(metrics: Metrics, accept: str, *, names: Iterable[str] = (), created: bool = True) -> tuple[bytes, str]:
    """One scrape in the format a client asks for, and its content type; OpenMetrics has exemplars and created times.

    Args:
        metrics: What to expose.
        accept: The client's ``Accept`` header, empty for the Prometheus text format.
        names: Only the families with series of these names; none for all.
        created: Created times, where the format has them.
    """
    from prometheus_client.exposition import choose_encoder

    encode, content_type = choose_encoder(accept)
    openmetrics = content_type.startswith("application/openmetrics-text")
    registry = metrics.registry(created=created and openmetrics)
    wanted = list(names)
    return encode(registry.restricted_registry(wanted) if wanted else registry), content_type


def _layout(fixed: Mapping[str, str]) -> tuple[tuple[_Slot, ...], int]:
    """Every child's place in a rank's cells, and the number of cells."""
    slots = []
    size = 0
    for metric in CATALOGUE:
        width = len(metric.buckets_ns) + 2 if metric.type is MetricType.HISTOGRAM else 1
        for values in metric.children(fixed):
            slots.append(_Slot(metric, values, size))
            size += width
    return tuple(slots), size


def _label_dict(slot: _Slot) -> dict[str, str]:
    return dict(zip((label.name for label in slot.row.labels), slot.values, strict=True))


def _bounds(metric: MetricRow) -> tuple[str, ...]:
    """The ``le`` label values of all buckets: seconds, spelled as OpenMetrics wants (``1e-06``, ``1.0``)."""
    return (*(repr(bound / _NS_PER_SECOND) for bound in metric.buckets_ns), "+Inf")


def _convert(metric: MetricRow, value: int) -> float:
    return value / _NS_PER_SECOND if metric.unit == "seconds" else value
