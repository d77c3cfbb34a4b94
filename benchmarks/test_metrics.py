"""Cost of counting one event and of one scrape, next to ``prometheus_client``'s own classes in the same run.

Both hold the whole catalogue for eight ranks, every child there from the start, and the same values. Durations are
drawn beforehand; a round of the first two tables is a thousand events.
"""

from __future__ import annotations

import random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.parser import text_string_to_metric_families
from pytest_benchmark.fixture import BenchmarkFixture

from hicache_obs import __version__
from hicache_obs.exporters.catalogue import CATALOGUE, RANK_LABELS
from hicache_obs.exporters.metric_row import MetricType
from hicache_obs.exporters.prometheus import Metrics, negotiate, render
from hicache_obs.exporters.rank_metrics import Exemplar
from hicache_obs.records import Ranks

RANKS = [Ranks(tp) for tp in range(8)]
EVENTS = 1000
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
DURATIONS_NS = [int(random.Random(0).lognormvariate(12, 3)) for _ in range(EVENTS)]
NOTE = {"op_id": "123456"}

Children = dict[tuple[str, int, tuple[str, ...]], Any]
"""By metric, rank and label values."""


def theirs() -> tuple[CollectorRegistry, Children]:
    """The catalogue in the library's classes."""
    registry, children = CollectorRegistry(), Children()
    for metric in CATALOGUE:
        labels = (*RANK_LABELS, *(label.name for label in metric.labels))
        parent: Any
        if metric.type is MetricType.HISTOGRAM:
            bounds = [bound / 1e9 for bound in metric.buckets_ns]
            parent = Histogram(metric.name, metric.help, labels, registry=registry, buckets=bounds)
        else:
            kind = Counter if metric.type is MetricType.COUNTER else Gauge
            parent = kind(metric.family, metric.help, labels, registry=registry)
        for rank in RANKS:
            for values in metric.children({"engine": "demo", "version": __version__}):
                child = parent.labels(str(rank.tp), str(rank.pp), str(rank.dp), *values)
                children[metric.name, rank.tp, values] = child
    for rank in RANKS:
        children["hicache_obs_build_info", rank.tp, (__version__, "demo")].set(1)
    return registry, children


@pytest.mark.parametrize("exemplar", [False, True], ids=["plain", "exemplar"])
@pytest.mark.parametrize("whose", ["hicache_obs", "prometheus_client"])
def test_observe(benchmark: BenchmarkFixture, whose: str, exemplar: bool) -> None:
    """A thousand durations into one histogram; microseconds each are listed at the end."""
    benchmark.group = f"observe {EVENTS} durations{' with exemplars' if exemplar else ''}"
    if whose == "hicache_obs":
        metrics = Metrics(ranks=RANKS)
        observe = metrics.rank(RANKS[0]).histogram("fence_wait_seconds", "restore").observe
        note = Exemplar(NOTE, 1) if exemplar else None
        durations: list[Any] = DURATIONS_NS
    else:
        registry, children = theirs()
        observe = children["hicache_obs_fence_wait_seconds", 0, ("restore",)].observe
        note = NOTE if exemplar else None
        durations = [duration / 1e9 for duration in DURATIONS_NS]

    def run() -> None:
        for duration in durations:
            observe(duration, note)

    benchmark.pedantic(run, rounds=200, warmup_rounds=5)
    benchmark.extra_info["us per event"] = round(benchmark.stats.stats.min * 1e6 / EVENTS, 3)
    text = render(metrics) if whose == "hicache_obs" else generate_latest(registry)
    count = 'hicache_obs_fence_wait_seconds_count{dp_rank="0",op="restore",pp_rank="0",tp_rank="0"} 205000.0'
    assert count in text.decode().splitlines()


@pytest.mark.parametrize("whose", ["hicache_obs", "prometheus_client"])
def test_count(benchmark: BenchmarkFixture, whose: str) -> None:
    """A thousand increments of one counter."""
    benchmark.group = f"count {EVENTS} events"
    if whose == "hicache_obs":
        metrics = Metrics(ranks=RANKS)
        count = metrics.rank(RANKS[0]).counter("records_total").add
    else:
        registry, children = theirs()
        count = children["hicache_obs_records_total", 0, ()].inc

    def run() -> None:
        for _ in range(EVENTS):
            count()

    benchmark.pedantic(run, rounds=200, warmup_rounds=5)
    benchmark.extra_info["us per event"] = round(benchmark.stats.stats.min * 1e6 / EVENTS, 3)
    text = render(metrics) if whose == "hicache_obs" else generate_latest(registry)
    assert b'hicache_obs_records_total{dp_rank="0",pp_rank="0",tp_rank="0"} 205000.0' in text.splitlines()


def lines(text: bytes) -> set[tuple[str, tuple[tuple[str, str], ...], float]]:
    """Samples of a scrape, but for the library's own created series."""
    return {
        (sample.name, tuple(sorted(sample.labels.items())), sample.value)
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.mark.parametrize("form", ["text", "OpenMetrics"])
@pytest.mark.parametrize("whose", ["hicache_obs", "prometheus_client"])
def test_scrape(benchmark: BenchmarkFixture, whose: str, form: str) -> None:
    """All series of eight ranks; the library's text has created series too, ours only where OpenMetrics has them."""
    benchmark.group = f"scrape 8 ranks, whole catalogue, {form}"
    metrics, (registry, _) = Metrics(ranks=RANKS), theirs()
    assert lines(render(metrics)) == lines(generate_latest(registry))

    def ours() -> bytes:
        return negotiate(metrics, OPENMETRICS if form == "OpenMetrics" else "")[0]

    generate = generate_openmetrics if form == "OpenMetrics" else generate_latest

    text = benchmark.pedantic(
        ours if whose == "hicache_obs" else lambda: generate(registry), rounds=15, warmup_rounds=1
    )

    benchmark.extra_info["lines"] = text.count(b"\n")
    assert text.count(b"\nhicache_obs_") > 2000
