"""Exponential histograms hold what OpenTelemetry's own aggregation holds for the same values."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.metrics.view import ExponentialBucketHistogramAggregation, View

from hicache_obs.exporters.exponential import MAX_BUCKETS, MAX_EXEMPLARS, DurationExemplar, ExponentialHistogram
from hicache_obs.exporters.spans import SpanId

NS = 1_000_000_000


def ours(values: list[int]) -> ExponentialHistogram:
    histogram = ExponentialHistogram()
    for value in values:
        histogram.record(value)
    return histogram


@pytest.mark.parametrize("seed", range(4))
def test_the_same_buckets_as_opentelemetry(seed: int) -> None:
    dice = random.Random(seed)
    values = [int(10 ** dice.uniform(2, 9.7)) for _ in range(2000)]
    reader = InMemoryMetricReader()
    aggregation = ExponentialBucketHistogramAggregation(max_size=MAX_BUCKETS, max_scale=10)
    provider = MeterProvider([reader], views=[View(instrument_name="x", aggregation=aggregation)])
    histogram = provider.get_meter("m").create_histogram("x")
    for value in values:
        histogram.record(value / NS)
    data = reader.get_metrics_data()
    assert data is not None
    (point,) = data.resource_metrics[0].scope_metrics[0].metrics[0].data.data_points
    provider.shutdown()

    scale, offset, counts = ours(values).buckets()
    assert (scale, offset) == (point.scale, point.positive.offset)  # type: ignore[union-attr]
    theirs = list(point.positive.bucket_counts)  # type: ignore[union-attr]
    assert counts == theirs[: len(counts)]
    assert not any(theirs[len(counts) :])  # room that theirs keeps
    assert (ours(values).min_ns, ours(values).max_ns) == (min(values), max(values))
    assert ours(values).sum_ns == sum(values)


@given(st.lists(st.integers(0, 10**11), min_size=1, max_size=300))
def test_every_value_is_in_its_bucket_and_there_are_not_too_many(values: list[int]) -> None:
    histogram = ours(values)
    scale, offset, counts = histogram.buckets()

    assert histogram.zeros + sum(counts) == histogram.count == len(values)
    assert len(counts) <= MAX_BUCKETS
    for place, count in enumerate(counts, offset):
        low, high = 2.0 ** (place / 2.0**scale), 2.0 ** ((place + 1) / 2.0**scale)
        inside = sum(low * (1 - 1e-9) < value / NS <= high * (1 + 1e-9) for value in values)
        assert inside >= count


def test_powers_of_two_belong_to_the_bucket_below() -> None:
    histogram = ours([2 * NS])
    scale, offset, counts = histogram.buckets()
    assert (2.0 ** ((offset + 1) / 2.0**scale), counts) == (2.0, [1])


def test_the_newest_exemplars_are_kept_until_they_are_taken() -> None:
    histogram = ours([1, 2, 3])
    made = [DurationExemplar(n, SpanId(n, n), n) for n in range(1, 7)]
    for exemplar in made:
        histogram.explain(exemplar)

    assert histogram.take_exemplars() == made[-MAX_EXEMPLARS:]
    assert histogram.take_exemplars() == []
