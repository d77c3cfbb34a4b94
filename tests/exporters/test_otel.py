"""OTLP export with a real gRPC receiver: what arrives, what is dropped, and what happens when nobody is there."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from prometheus_client.openmetrics.exposition import generate_latest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from hicache_obs.agent import Fanout
from hicache_obs.analyzer import Analyzer
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.catalogue import CATALOGUE, SpanOutcome
from hicache_obs.exporters.metric_row import MetricType
from hicache_obs.exporters.metrics_sink import MetricsSink
from hicache_obs.exporters.otel import Telemetry
from hicache_obs.exporters.otlp_options import read_options, resource
from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.exporters.spans import FORWARD_ROUND, Span, SpanId
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    HostSync,
    Kernel,
    Memcpy,
    Mode,
    Purpose,
    Ranks,
    Times,
    WaitStream,
    device,
    pack_rows,
)

WALL = 1_795_965_869_058_380_123
FAST = {"OTEL_BSP_SCHEDULE_DELAY": "10", "OTEL_METRIC_EXPORT_INTERVAL": "20", "HICACHE_OBS_SPAN_ONE_IN": "1"}
RANK = Ranks(tp=2)
CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def telemetry() -> Iterator[Callable[..., Telemetry]]:
    """``telemetry(url, **environment)``: sending, every ten milliseconds by default."""
    with ExitStack() as stack:

        def start(
            url: str | None,
            metrics: Metrics | None = None,
            accepts: Callable[[str], bool] = lambda _: False,
            **environment: str,
        ) -> Telemetry:
            options = read_options(url, {**FAST, **environment})
            assert options is not None
            made = Telemetry(options, metrics or Metrics(ranks=[RANK]), accepts=accepts, pauses=(0.02, 0.05))
            stack.callback(made.close, within_s=1.0)
            return made

        yield start


def race(number: int, *, fenced: bool) -> list[AnyRecord]:
    """A round writes a page that a load-back overwrites, which waits for it or not; measured."""
    op, ids = 10 * number, np.array([number % 50])
    start = 1000 * number
    return [
        Kernel(op, 1, start, 1, 1, number, 8, (0, 1), (device(Mode.WRITE, ids),), pack_rows([7], [ids], [0], [1])),
        *([WaitStream(op + 1, 1, start + 10, 2, 1, Purpose.LOAD_FENCE)] if fenced else []),
        Memcpy(op + 2, 1, start + 20, 2, 2, number, 8, (0, 1), (device(Mode.WRITE, ids),), Direction.HOST_TO_DEVICE),
        Times(op, 1, start + 900, start + 100, start + 301, 1),
        *([Times(op + 1, 1, start + 901, start + 30, start + 301, 1)] if fenced else []),
        Times(op + 2, 1, start + 902, start + (400 if fenced else 150), start + (507 if fenced else 257), 1),
        HostSync(NO_OP, 1, start + 950, None),
    ]


def feed(telemetry: Telemetry, records: Sequence[AnyRecord], *, metrics: bool = True, findings: bool = True) -> None:
    """Analyse one ring that holds ``records``."""
    fanout = Fanout()
    analyzer = Analyzer(fanout)
    ring = telemetry.ring(RANK, f"ring {id(records)}", to_wall_ns=WALL, findings=findings)
    fanout.listen([*([MetricsSink(telemetry.metrics, RANK)] if metrics else []), ring])
    named = [
        Define(NO_OP, 0, 0, DefineSpace.POOL, 0, "kv", 1),
        Define(NO_OP, 0, 0, DefineSpace.ENGINE, 0, "engine 1"),
        Define(NO_OP, 0, 0, DefineSpace.REQUEST_TRACE, 7, CONTEXT),
        *records,
    ]
    analyzer.feed(named)
    ring.on_batch(named, last=False)
    analyzer.finish()
    ring.on_batch((), last=True)


def outcomes(metrics: Metrics) -> dict[str, int]:
    """``spans_total`` by outcome."""
    families = text_string_to_metric_families(generate_latest(metrics.registry()).decode())
    (spans,) = (family for family in families if family.name == "hicache_obs_spans")
    return {sample.labels["outcome"]: int(sample.value) for sample in spans.samples if sample.labels["tp_rank"] == "2"}


def eventually(condition: Callable[[], bool], *, within_s: float = 20) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "never came true"
        time.sleep(0.01)


def test_spans_arrive_with_links_exact_nanoseconds_and_who_sent_them(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any
) -> None:
    receiver = otlp_receiver()
    feed(telemetry(receiver.url), race(3, fenced=False))
    eventually(lambda: len(receiver.spans) == 3)
    (round_,), (copy,) = receiver.named("hicache.forward_round"), receiver.named("hicache.transfer")
    (restore,) = receiver.named("hicache.restore")

    assert (round_.start_time_unix_nano, round_.end_time_unix_nano) == (WALL + 3100, WALL + 3301)
    assert (copy.start_time_unix_nano, copy.end_time_unix_nano) == (WALL + 3150, WALL + 3257)
    assert (copy.parent_span_id, copy.trace_id) == (restore.span_id, restore.trace_id)
    request, conflict = round_.links
    assert (request.trace_id.hex(), request.span_id.hex()) == (CONTEXT[3:35], CONTEXT[36:52])
    assert (conflict.trace_id, conflict.span_id) == (copy.trace_id, copy.span_id)
    assert [link.attributes[0].value.string_value for link in round_.links] == ["request", "conflict"]
    for span in (round_, copy):
        assert [(event.name, event.time_unix_nano) for event in span.events] == [
            ("hicache.ordering_finding", WALL + 3150)
        ]
        assert span.status.code == 2
    sender = receiver.resources[0]
    assert (sender["service.name"], sender["hicache.tp_rank"], sender["hicache.engine"]) == (
        "hicache-obs",
        2,
        "engine 1",
    )
    assert sender["host.name"]


def test_an_exemplar_is_a_trace_that_arrived_in_otlp_and_in_prometheus(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any
) -> None:
    receiver, metrics = otlp_receiver(), Metrics(ranks=[RANK])
    made = telemetry(receiver.url, metrics, HICACHE_OBS_SPAN_ONE_IN="3")
    feed(made, [record for n in range(1, 91) for record in race(n, fenced=True)])
    made.close(within_s=10)
    arrived = {(span.trace_id.hex(), span.span_id.hex()) for span in receiver.spans}
    text = generate_latest(metrics.registry()).decode()
    found = [
        (sample.name, sample.exemplar.labels["trace_id"], sample.exemplar.labels["span_id"], sample.exemplar.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar and "trace_id" in sample.exemplar.labels
    ]

    assert 0 < len(receiver.named("hicache.transfer")) < 90
    assert receiver.exemplars
    assert {(e.trace_id.hex(), e.span_id.hex()) for e in receiver.exemplars} <= arrived
    assert {name for name, *_ in found} >= {
        "hicache_obs_fence_wait_seconds_bucket",
        "hicache_obs_op_seconds_bucket",
        "hicache_obs_transfer_seconds_bucket",
    }
    assert {(trace, span) for _, trace, span, _ in found} <= arrived
    assert {value for name, _, _, value in found if name.startswith("hicache_obs_transfer")} == {107e-9}


def finding_exemplars(metrics: Metrics) -> list[dict[str, str]]:
    """Labels of the exemplars on the counters of violations."""
    families = text_string_to_metric_families(generate_latest(metrics.registry()).decode())
    (violations,) = (family for family in families if family.name == "hicache_obs_violations")
    return [dict(sample.exemplar.labels) for sample in violations.samples if sample.exemplar]


def test_a_finding_has_its_fingerprint_until_its_span_has_arrived(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any
) -> None:
    receiver, metrics, before = otlp_receiver(), Metrics(ranks=[RANK]), Metrics(ranks=[RANK])
    feed(telemetry("http://127.0.0.1:9", before), race(1, fenced=False))
    made = telemetry(receiver.url, metrics)
    feed(made, race(1, fenced=False))
    made.close(within_s=10)
    (plain,), (traced,) = finding_exemplars(before), finding_exemplars(metrics)
    failed = {(span.trace_id.hex(), span.span_id.hex()) for span in receiver.spans if span.events}

    assert set(plain) == {"fingerprint"}
    assert set(traced) == {"fingerprint", "trace_id", "span_id"}
    assert traced["fingerprint"] == plain["fingerprint"]
    assert (traced["trace_id"], traced["span_id"]) in failed


def test_spans_of_accepted_and_of_uncounted_findings_are_no_exemplars(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any
) -> None:
    for accepted, findings in ((True, True), (False, False)):
        receiver, metrics = otlp_receiver(), Metrics(ranks=[RANK])
        made = telemetry(receiver.url, metrics, accepts=lambda _, accepted=accepted: accepted)
        feed(made, race(1, fenced=False), metrics=False, findings=findings)
        made.close(within_s=10)

        assert [span for span in receiver.spans if span.events]
        assert finding_exemplars(metrics) == []


def test_metrics_mirror_the_catalogue(telemetry: Callable[..., Telemetry], otlp_receiver: Any) -> None:
    receiver = otlp_receiver()
    made = telemetry(receiver.url)
    feed(made, [record for n in range(1, 9) for record in race(n, fenced=True)])
    made.close(within_s=10)

    assert set(receiver.metrics) == {row.name for row in CATALOGUE}
    for row in CATALOGUE:
        kind = receiver.metrics[row.name].WhichOneof("data")
        assert (
            kind
            == {
                MetricType.COUNTER: "sum",
                MetricType.GAUGE: "gauge",
                MetricType.HISTOGRAM: "exponential_histogram",
            }[row.type]
        )
    copies = receiver.metrics["hicache_obs_transfer_seconds"]
    restore, backup = copies.exponential_histogram.data_points
    assert (copies.unit, restore.count, backup.count) == ("s", 8, 0)
    assert (restore.sum, restore.min, restore.max) == (pytest.approx(8 * 107e-9), 107e-9, 107e-9)
    assert {a.key: a.value.string_value for a in restore.attributes} == {
        "tp_rank": "2",
        "pp_rank": "0",
        "dp_rank": "0",
        "op": "restore",
    }
    assert receiver.metrics["hicache_obs_records_total"].sum.is_monotonic


@pytest.mark.slow
def test_a_burst_of_40_000_spans_loses_none_with_a_finding_and_counts_the_rest(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any
) -> None:
    receiver = otlp_receiver()
    made = telemetry(receiver.url, HICACHE_OBS_SPAN_QUEUE="8192", OTEL_BSP_SCHEDULE_DELAY="600000")
    records: list[AnyRecord] = []
    for n in range(1, 11_501):  # a fenced one is 4 spans, a race 3
        records += race(n, fenced=bool(n % 20))
    feed(made, records, metrics=False)  # nothing leaves while the burst comes
    made.close(within_s=60)
    count = outcomes(made.metrics)
    raced = [n for n in range(1, 11_501) if not n % 20]
    arrived = {span.attributes[0].value.int_value for span in receiver.named("hicache.forward_round") if span.events}

    assert arrived == set(raced)
    assert len([span for span in receiver.named("hicache.transfer") if span.events]) == len(raced)
    assert sum(count.values()) == 4 * 11_500 - len(raced) > 40_000
    assert count["exported"] == len(receiver.spans)
    assert count["queue_full"] > 20_000
    assert count["undelivered"] == 0


def test_nobody_listens_then_somebody_does(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    gone = otlp_receiver()
    gone.close()
    made = telemetry(gone.url)
    start = time.monotonic()
    feed(made, race(1, fenced=True) + race(2, fenced=False))
    assert time.monotonic() - start < 1  # the analysis does not wait
    eventually(lambda: outcomes(made.metrics)["undelivered"] > 0)
    back = otlp_receiver(gone.port)
    eventually(lambda: bool(back.named("hicache.forward_round")))
    (kept,) = back.named("hicache.forward_round")

    assert kept.events  # what has a finding was kept for better times
    feed(made, race(3, fenced=True))
    eventually(lambda: len(back.named("hicache.forward_round")) == 2)


def test_a_slow_receiver_holds_nobody_up(telemetry: Callable[..., Telemetry], otlp_receiver: Any) -> None:
    receiver = otlp_receiver()
    receiver.accepting.clear()
    made = telemetry(receiver.url, HICACHE_OBS_SPAN_QUEUE="64")
    start = time.monotonic()
    for n in range(1, 101):
        feed(made, race(n, fenced=True), metrics=False)
    assert time.monotonic() - start < 5
    assert len(made.queue) <= 64
    assert outcomes(made.metrics)["queue_full"] > 0
    start = time.monotonic()
    made.close(within_s=0.5)
    assert time.monotonic() - start < 5


def test_after_a_fork_only_the_parent_sends(otlp_receiver: Any) -> None:
    receiver = otlp_receiver()
    program = f"""
import os, sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import test_otel as t
from hicache_obs.exporters.otel import Telemetry
from hicache_obs.exporters.prometheus import (Metrics)
made = Telemetry(t.read_options({receiver.url!r}, t.FAST), Metrics(ranks=[t.RANK]), pauses=(.02, .05))
t.feed(made, t.race(1, fenced=True))
child = os.fork()
t.feed(made, t.race(2, fenced=True))
made.close()
if child:
    assert os.waitpid(child, 0)[1] == 0
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    rounds = Counter(span.attributes[0].value.int_value for span in receiver.named("hicache.forward_round"))
    assert rounds == {1: 1, 2: 1}


def test_an_error_in_the_spans_harms_nobody_else(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = otlp_receiver()
    made = telemetry(receiver.url)
    ring = made.ring(RANK, "ring", to_wall_ns=WALL)
    ring.on_batch([Define(NO_OP, 0, 0, DefineSpace.REQUEST_TRACE, 0, None)], last=False)  # type: ignore[arg-type]
    assert "spans of rank" in caplog.text
    ring.on_batch(race(1, fenced=True), last=True)
    feed(made, race(2, fenced=True))
    eventually(lambda: len(receiver.named("hicache.forward_round")) == 1)


def test_a_silent_ring_does_not_keep_its_traces(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = otlp_receiver()
    made = telemetry(receiver.url)
    ring = made.ring(RANK, "ring", to_wall_ns=WALL)
    ring.on_batch(race(1, fenced=True), last=False)
    made.idle()
    assert len(made.queue) == 0
    monkeypatch.setattr("hicache_obs.exporters.otel._IDLE_S", 0.0)
    made.idle()
    eventually(lambda: len(receiver.spans) == 4)


# -- options -------------------------------------------------------------------------------------------------


def test_the_environment_alone_is_enough_and_is_respected(
    telemetry: Callable[..., Telemetry], otlp_receiver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    receiver = otlp_receiver()
    environment = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": receiver.url,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-token=abc",
        "OTEL_SERVICE_NAME": "mine",
        "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment=test,host.name=box",
        "OTEL_METRICS_EXPORTER": "none",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    made = telemetry(None, **environment)
    feed(made, race(1, fenced=True))
    made.close(within_s=10)

    assert receiver.headers[0]["x-token"] == "abc"
    sender = receiver.resources[0]
    assert (sender["service.name"], sender["deployment.environment"], sender["host.name"]) == ("mine", "test", "box")
    assert receiver.metrics == {}


@pytest.mark.parametrize(
    ("url", "environment"),
    [
        (None, {}),
        ("http://a:1", {"OTEL_SDK_DISABLED": "true"}),
        ("http://a:1", {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}),
    ],
)
def test_off(url: str | None, environment: dict[str, str]) -> None:
    assert read_options(url, environment) is None


def test_protocol_of_one_signal() -> None:
    options = read_options(None, {
        "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://a:4318/v1/traces",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
    })  # fmt: skip
    assert options is not None
    assert options.protocols == {"traces": "http/protobuf"}
    both = read_options("http://a:4318/", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"})
    assert both is not None
    assert both.span_exporter()._endpoint == "http://a:4318/v1/traces"  # type: ignore[attr-defined]
    assert both.metric_exporter()._endpoint == "http://a:4318/v1/metrics"  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("url", "environment", "message"),
    [
        ("a:1", {}, "--otlp a:1: not an address; expected http://HOST:PORT or https://HOST:PORT"),
        ("http://a:99999", {}, "--otlp http://a:99999: not an address"),
        ("http://me:secret@a:1", {}, "--otlp http://...: no user or password in the address, which shows"),
        ("http://me:1/secret@a:1", {}, "--otlp http://...: no user or password in the address, which shows"),
        ("me:secret@a:1", {}, "--otlp: no user or password in the address, which shows"),
        ("http:me:secret@://a:1", {}, "--otlp: no user or password in the address, which shows"),
        ("http://a:1", {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "OTEL_EXPORTER_OTLP_PROTOCOL: 'http/json'"),
        ("http://a:1", {"OTEL_BSP_SCHEDULE_DELAY": "-1"}, "OTEL_BSP_SCHEDULE_DELAY: '-1'; expected an integer from 1"),
        ("http://a:1", {"OTEL_TRACES_EXPORTER": "zipkin"}, "OTEL_TRACES_EXPORTER: 'zipkin'; expected otlp or none"),
        ("http://a:1", {"HICACHE_OBS_SPAN_QUEUE": "1"}, "HICACHE_OBS_SPAN_QUEUE: 1; expected an integer from 64"),
    ],
)
def test_a_value_that_is_not_allowed_is_named(url: str, environment: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_options(url, environment)
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)


def test_without_the_extra_there_is_one_clear_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.grpc", None)
    options = read_options("http://127.0.0.1:1", {})
    assert options is not None
    with pytest.raises(ConfigError) as caught:
        Telemetry(options, Metrics())
    assert str(caught.value).startswith("--otlp: OTLP exporters are not installed")
    assert str(caught.value).endswith("pip install 'hicache-obs[otel]'")


def test_a_rank_names_itself() -> None:
    attributes = resource(Ranks(1, 2, 3), "e", run="r").attributes
    assert attributes["service.instance.id"] == f"{attributes['host.name']}:dp3-pp2-tp1"
    assert (attributes["hicache.engine"], attributes["hicache.run"]) == ("e", "r")


def test_outcomes_are_all_there_at_zero() -> None:
    assert outcomes(Metrics(ranks=[RANK])) == {outcome.value: 0 for outcome in SpanOutcome}


def test_a_finished_span_is_plain_data() -> None:
    span = Span(FORWARD_ROUND, SpanId(1, 2), 0, 5, 6, {})
    assert (span.kept, span.failed, span.links, span.events, span.observation) == (False, False, (), (), None)
