"""Cost of the spans of one round: built from records in the agent, beside OpenTelemetry's own made as work is launched.

Both make the same spans with the same attributes and links. OpenTelemetry's have to be made on the
launching thread, sampled out or not; ours are made by the agent, where this cost takes nothing from the server. "for
everybody" keeps every trace, "one in 100" is the default. Sending is in neither.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from opentelemetry.trace import Link, SpanContext, TraceFlags, set_span_in_context
from pytest_benchmark.fixture import BenchmarkFixture

from hicache_obs.exporters.span_builder import SpanBuilder
from hicache_obs.exporters.spans import Span
from hicache_obs.records import AnyRecord
from hicache_obs.testing.rounds import Rounds, Shape

ROUNDS = 300
KINDS = ("decode", "restore, a record per transfer", "restore, a record per layer")


def _maker(kind: str) -> tuple[Rounds, Callable[[], list[AnyRecord]]]:
    rounds = Rounds(timed=True)
    if kind == "decode":
        return rounds, rounds.decode
    shape = Shape.PER_LAYER if "layer" in kind else Shape.WHOLE
    return rounds, lambda: rounds.restore(shape)


def _spans(kind: str) -> list[Span]:
    """One round's trace or traces, as the builder makes them."""
    rounds, make = _maker(kind)
    builder = SpanBuilder("ring", to_wall_ns=0, one_in=1)
    builder.feed([*rounds.prologue(), *make()])
    builder.release(everything=True)
    builder.feed(make())
    return [span for trace in builder.release(everything=True) for span in trace]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("one_in", [100, 1], ids=["one in 100", "for everybody"])
def test_built_from_records(benchmark: BenchmarkFixture, kind: str, one_in: int) -> None:
    rounds, make = _maker(kind)
    builder = SpanBuilder("ring", to_wall_ns=0, one_in=one_in)
    builder.feed([*rounds.prologue(), *make()])
    spans = 0

    def build(records: list[AnyRecord]) -> None:
        nonlocal spans
        builder.feed(records)
        spans += sum(map(len, builder.release()))

    benchmark.group = f"spans of a round: {kind}"
    benchmark.pedantic(build, setup=lambda: ((make(),), {}), rounds=ROUNDS, warmup_rounds=80)
    assert spans + builder.sampled_out > ROUNDS


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.01, 1.0], ids=["sampled one in 100", "for everybody"])
def test_opentelemetry_on_the_launching_thread(benchmark: BenchmarkFixture, kind: str, share: float) -> None:
    spans = _spans(kind)
    assert spans
    provider = TracerProvider(sampler=TraceIdRatioBased(share), shutdown_on_exit=False)
    tracer = provider.get_tracer("peer")
    links = {
        span.id: [
            Link(SpanContext(*link.to, is_remote=True, trace_flags=TraceFlags(1)), {"hicache.link": link.what})
            for link in span.links
        ]
        for span in spans
    }

    def make() -> int:
        contexts = {}
        for span in spans:
            parent = contexts.get(span.parent)
            made = tracer.start_span(
                span.name, context=parent, attributes=span.attributes, links=links[span.id], start_time=span.start_ns
            )
            contexts[span.id.span] = set_span_in_context(made)
            made.end(span.end_ns)
        return len(contexts)

    benchmark.group = f"spans of a round: {kind}"
    made = benchmark.pedantic(make, rounds=ROUNDS, warmup_rounds=80)
    benchmark.extra_info["spans in a round"] = made
    benchmark.extra_info["links in a round"] = sum(map(len, links.values()))
    assert made == len(spans)
