"""The catalogue as OTLP metrics: counters and gauges from ``Metrics``, durations as exponential histograms.

Names and labels are the catalogue's, unit and ``_total`` included: what turns OTLP into Prometheus series adds neither
twice, so queries are the same either way.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Final

from hicache_obs import __version__
from hicache_obs.costs import FenceCost, Ignore, TransferCost, TransferKind
from hicache_obs.exporters.catalogue import CATALOGUE, PREFIX
from hicache_obs.exporters.exponential import DurationExemplar, ExponentialHistogram
from hicache_obs.exporters.metric_row import MetricRow, MetricType
from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.exporters.rank_metrics import Exemplar
from hicache_obs.exporters.spans import Observation, Span
from hicache_obs.records import Ranks

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import ExponentialHistogramDataPoint, Metric, MetricsData
    from opentelemetry.sdk.resources import Resource

SCOPE: Final = "hicache_obs"
_UNITS: Final = {"seconds": "s", "bytes": "By"}
_NS_PER_SECOND: Final = 1_000_000_000


def otlp_unit(metric: MetricRow) -> str:
    """Unit of a metric in OTLP; what is counted is an annotation."""
    if metric.base_unit:
        return _UNITS[metric.base_unit]
    return "" if metric.type is MetricType.GAUGE else "{" + metric.unit.replace(" ", "_") + "}"


class Durations(Ignore):
    """The catalogue's histograms of one rank once more, as exponential ones; an ``AnalysisSink``.

    Args:
        metrics: Its exemplars are set as well.
        rank: Whose.
    """

    def __init__(self, metrics: Metrics, rank: Ranks) -> None:
        self._of = metrics.rank(rank)
        self.histograms: Final[dict[tuple[str, tuple[str, ...]], ExponentialHistogram]] = {
            (metric.name.removeprefix(PREFIX), labels): ExponentialHistogram()
            for metric in CATALOGUE
            if metric.type is MetricType.HISTOGRAM
            for labels in metric.children({})
        }

    def on_fence(self, cost: FenceCost) -> None:
        """Record one fence's wait and the avoidable part of it."""
        self._record("fence_wait_seconds", cost.kind, cost.waited_ns)
        self._record("fence_avoidable_seconds", cost.kind, cost.avoidable_ns)

    def on_layer_wait(self, waited_ns: int) -> None:
        """Record one layer wait."""
        self.histograms["layer_wait_seconds", ()].record(waited_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        """Record a transfer's durations."""
        self._record("op_seconds", cost.kind, cost.op_ns)
        self._record("transfer_seconds", cost.kind, cost.copy_ns)

    def explain(self, span: Span, observation: Observation, exemplar: Exemplar) -> None:
        """``span`` was delivered: make it the exemplar of what it explains, here and (``exemplar``) for Prometheus."""
        metric, labels, value_ns = observation
        self.histograms[metric, labels].explain(DurationExemplar(value_ns, span.id, span.end_ns))
        self._of.explain(metric, *labels, amount=value_ns, exemplar=exemplar)

    def _record(self, name: str, kind: TransferKind, duration_ns: int) -> None:
        self.histograms[name, (kind.value,)].record(duration_ns)


class OtlpMetrics:
    """Makes one OTLP message of everything; safe on any one thread.

    Args:
        metrics: Counters and gauges.
        durations: Histograms of a rank, ``None`` if it has none yet.
        resource: Of a rank's metrics.
        now_ns: Wall clock, nanoseconds since the epoch.
    """

    def __init__(
        self,
        metrics: Metrics,
        durations: Callable[[Ranks], Durations | None],
        resource: Callable[[Ranks], Resource],
        *,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._metrics = metrics
        self._durations = durations
        self._resource = resource
        self._now_ns = now_ns
        self._start_ns = now_ns()

    def collect(self) -> MetricsData:
        """All metrics of all ranks as they are now."""
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        now_ns = self._now_ns()
        return MetricsData(
            [
                ResourceMetrics(
                    self._resource(rank),
                    [ScopeMetrics(InstrumentationScope(SCOPE, __version__), list(self._of(rank, now_ns)), "")],
                    "",
                )
                for rank in self._metrics.known_ranks
            ]
        )

    def _of(self, rank: Ranks, now_ns: int) -> Iterator[Metric]:
        from opentelemetry.sdk.metrics.export import (
            AggregationTemporality,
            ExponentialHistogram,
            Gauge,
            Metric,
            NumberDataPoint,
            Sum,
        )

        children = self._metrics.rank(rank)
        cells = children.snapshot()
        cumulative = AggregationTemporality.CUMULATIVE
        data: Sum | Gauge | ExponentialHistogram
        for metric in CATALOGUE:
            if metric.type is MetricType.HISTOGRAM:
                durations = self._durations(rank)
                if durations is None:
                    continue
                points = [self._point(durations, metric, labels, now_ns) for labels in children.labels(metric)]
                data = ExponentialHistogram(points, cumulative)
            else:
                numbers = [
                    NumberDataPoint(sample.labels, self._start_ns, now_ns, sample.value)
                    for sample in children.samples(metric, cells)
                ]
                counts = metric.type is MetricType.COUNTER
                data = Sum(numbers, cumulative, is_monotonic=True) if counts else Gauge(numbers)
            yield Metric(metric.name, metric.help, otlp_unit(metric), data)

    def _point(
        self, durations: Durations, metric: MetricRow, labels: dict[str, str], now_ns: int
    ) -> ExponentialHistogramDataPoint:
        from opentelemetry.sdk.metrics import Exemplar
        from opentelemetry.sdk.metrics._internal.point import Buckets  # no public name has it
        from opentelemetry.sdk.metrics.export import ExponentialHistogramDataPoint

        values = tuple(labels[label.name] for label in metric.labels)
        histogram = durations.histograms[metric.name.removeprefix(PREFIX), values]
        scale, offset, counts = histogram.buckets()
        return ExponentialHistogramDataPoint(
            attributes=labels,
            start_time_unix_nano=self._start_ns,
            time_unix_nano=now_ns,
            count=histogram.zeros + sum(counts),
            sum=histogram.sum_ns / _NS_PER_SECOND,
            scale=scale,
            zero_count=histogram.zeros,
            positive=Buckets(offset, counts),
            negative=Buckets(0, []),
            flags=0,
            min=histogram.min_ns / _NS_PER_SECOND,
            max=histogram.max_ns / _NS_PER_SECOND,
            exemplars=[
                Exemplar({}, taken.duration_ns / _NS_PER_SECOND, taken.time_ns, taken.span.span, taken.span.trace)
                for taken in histogram.take_exemplars()
            ],
        )
