"""Prometheus exposition of all ranks of one process: one collector, both text formats.

The library is imported inside functions only, see ``rank_metrics``.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Final, cast

from hicache_obs import __version__
from hicache_obs.costs import TransferKind
from hicache_obs.exporters.catalogue import CATALOGUE, Phase, row
from hicache_obs.exporters.rank_metrics import RankMetrics, layout
from hicache_obs.findings import Hazard
from hicache_obs.records import Ranks

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry, Metric
    from prometheus_client.registry import Collector

_NS_PER_SECOND: Final = 1_000_000_000

ONLY_RANK: Final = Ranks()
"""The rank of an engine that is not parallel."""


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
        self._slots, self._size = layout(fixed)
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
