"""What is exported: every child at 0, exact sums per sink call, both text formats, one endpoint."""

import os
import re
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

import hicache_obs
from hicache_obs.costs import AnalysisSink, FenceCost, TransferCost, TransferKind
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.catalogue import CATALOGUE, RANK_LABELS, Phase, row
from hicache_obs.exporters.endpoint import serve
from hicache_obs.exporters.metric_row import MetricType
from hicache_obs.exporters.metrics_sink import MetricsSink
from hicache_obs.exporters.prometheus import ONLY_RANK, Metrics, negotiate, render
from hicache_obs.exporters.rank_metrics import TRACED_NS, Exemplar
from hicache_obs.exporters.server import Server
from hicache_obs.findings import Cause, Finding, Hazard, Verdict
from hicache_obs.records import DropReason, OpId, Ranks

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]

RESTORE, BACKUP = TransferKind.RESTORE, TransferKind.BACKUP
WAW = Hazard.WAW_FORWARD_RESTORE
NOW_NS = 1_700_000_000_500_000_000


def finding(verdict: Verdict, hazard: Hazard = WAW, cause: Cause = Cause.MISSING_FENCE) -> Finding:
    """A finding of which a counter looks at four fields; the others are left empty."""
    empty: dict[str, Any] = dict.fromkeys(field.name for field in fields(Finding))
    return Finding(
        **{**empty, "verdict": verdict, "hazard": hazard, "cause": cause, "fingerprint": f"HC-{verdict.value}"}
    )


def fence(waited_ns: int, avoidable_ns: int, kind: TransferKind = RESTORE) -> FenceCost:
    return FenceCost(OpId(1), kind, waited_ns, avoidable_ns)


def transfer(kind: TransferKind = RESTORE, *, fenced: bool = True) -> TransferCost:
    return TransferCost(kind, 7, copy_ns=40_000, op_ns=50_000, size_bytes=4096, pages=3, fenced=fenced)


def samples(families: Iterable[Metric]) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def scrape(metrics: Metrics) -> Samples:
    return samples(parse_text(render(metrics).decode()))


def changed(before: Samples, after: Samples) -> dict[str, float]:
    """``name{label=value,...}`` → increase, of what changed; rank labels and finite buckets left out."""
    increases = {}
    for (name, labels), value in after.items():
        shown = [f"{k}={v}" for k, v in labels if k not in RANK_LABELS]
        if value != before[name, labels] and not name.endswith("_bucket"):
            increases[f"{name.removeprefix('hicache_obs_')}{{{','.join(shown)}}}"] = value - before[name, labels]
    return increases


def fed(call: Callable[[MetricsSink], None], *, findings: bool = True, costs: bool = True) -> dict[str, float]:
    """What one sink call changes."""
    metrics = Metrics()
    sink = MetricsSink(metrics, findings=findings, costs=costs, now_ns=lambda: NOW_NS)
    before = scrape(metrics)
    call(sink)
    return changed(before, scrape(metrics))


# -- before the first record ---------------------------------------------------------------------------------


def expected_children(rank: Ranks, engine: str, version: str) -> set[tuple[str, tuple[tuple[str, str], ...]]]:
    """Every sample the catalogue promises, written down independently of the exposition."""
    fixed = {"engine": (engine,), "version": (version,)}
    promised = set()
    for metric in CATALOGUE:
        names = [label.name for label in metric.labels]
        for values in product(*(label.values or fixed[label.name] for label in metric.labels)):
            labels = {
                **dict(zip(RANK_LABELS, (str(rank.tp), str(rank.pp), str(rank.dp)), strict=True)),
                **dict(zip(names, values, strict=True)),
            }
            key = tuple(sorted(labels.items()))
            if metric.type is not MetricType.HISTOGRAM:
                promised.add((metric.name, key))
                continue
            promised |= {(metric.name + "_sum", key), (metric.name + "_count", key)}
            for bound in [*(str(bound_ns / 1e9) for bound_ns in metric.buckets_ns), "+Inf"]:
                promised.add((metric.name + "_bucket", tuple(sorted({**labels, "le": bound}.items()))))
    return promised


def test_every_child_is_there_at_zero_before_the_first_record() -> None:
    ranks = [Ranks(0, 0, 0), Ranks(1, 0, 3)]
    exposed = scrape(Metrics(ranks=ranks, engine="sglang 0.5.23", version="9.9"))

    assert set(exposed) == set().union(*(expected_children(rank, "sglang 0.5.23", "9.9") for rank in ranks))
    assert {name for (name, _), value in exposed.items() if value != 0} == {"hicache_obs_build_info"}


def test_a_rank_seen_later_starts_at_zero_too() -> None:
    metrics = Metrics(version="9.9")
    MetricsSink(metrics, Ranks(5, 1, 0))

    assert expected_children(Ranks(5, 1, 0), "demo", "9.9") <= set(scrape(metrics))


def test_build_info_names_the_running_version() -> None:
    assert f'version="{hicache_obs.__version__}"' in render(Metrics()).decode()


def test_types_and_help_are_the_catalogue() -> None:
    families = {family.name: family for family in parse_text(render(Metrics()).decode())}

    assert {name: (f.type, f.documentation) for name, f in families.items()} == {
        metric.family: (metric.type.value, metric.help) for metric in CATALOGUE
    }


# -- the sink ------------------------------------------------------------------------------------------------


def test_is_an_analysis_sink() -> None:
    sink: AnalysisSink = MetricsSink(Metrics())

    assert sink is not None


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (
            lambda s: s.on_finding(finding(Verdict.VIOLATION)),
            {"violations_total{hazard=waw_forward_restore}": 1},
        ),
        (
            lambda s: s.on_finding(finding(Verdict.LATENT, Hazard.HOST_REUSE)),
            {"latent_races_total{hazard=host_reuse}": 1},
        ),
        (
            lambda s: s.on_finding(finding(Verdict.CONTRADICTION, cause=Cause.CLOCK_OR_FENCE)),
            {"contradictions_total{hazard=waw_forward_restore}": 1},
        ),
        (
            lambda s: s.on_finding(finding(Verdict.UNKNOWN, cause=Cause.RECORDS_LOST)),
            {"unknown_total{reason=records_lost}": 1},
        ),
        (
            lambda s: s.on_finding(finding(Verdict.UNKNOWN)),
            {"unknown_total{reason=other}": 1},
        ),
        (lambda s: s.on_finding(finding(Verdict.ORDERED)), {}),
        (lambda s: s.on_finding(finding(Verdict.POLLED)), {}),
        (
            lambda s: s.on_checked(Hazard.GRAPH, 256, 5),
            {"checks_total{hazard=graph}": 5, "pages_checked_total{hazard=graph}": 256},
        ),
        (
            lambda s: s.on_weak_ordering(WAW, "polled", (OpId(1), OpId(2))),
            {"weak_orderings_total{hazard=waw_forward_restore,provenance=polled}": 1},
        ),
        (
            lambda s: s.on_weak_ordering(WAW, "incidental", (OpId(1), OpId(2))),
            {"weak_orderings_total{hazard=waw_forward_restore,provenance=incidental}": 1},
        ),
        (
            lambda s: s.on_fence(fence(2_000_000, 500_000)),
            {
                "fence_wait_seconds_sum{op=restore}": 0.002,
                "fence_wait_seconds_count{op=restore}": 1,
                "fence_avoidable_seconds_sum{op=restore}": 0.0005,
                "fence_avoidable_seconds_count{op=restore}": 1,
            },
        ),
        (
            lambda s: s.on_fence(fence(0, 0, BACKUP)),
            {"fence_wait_seconds_count{op=backup}": 1, "fence_avoidable_seconds_count{op=backup}": 1},
        ),
        (
            lambda s: s.on_layer_wait(1_500),
            {"layer_wait_seconds_sum{}": 1.5e-06, "layer_wait_seconds_count{}": 1},
        ),
        (
            lambda s: s.on_transfer(transfer()),
            {
                "transfer_bytes_total{op=restore}": 4096,
                "transfer_pages_total{op=restore}": 3,
                "op_seconds_sum{op=restore}": 5e-05,
                "op_seconds_count{op=restore}": 1,
                "transfer_seconds_sum{op=restore}": 4e-05,
                "transfer_seconds_count{op=restore}": 1,
            },
        ),
        (
            lambda s: s.on_transfer(transfer(BACKUP, fenced=False)),
            {
                "unfenced_ops_total{op=backup}": 1,
                "transfer_bytes_total{op=backup}": 4096,
                "transfer_pages_total{op=backup}": 3,
                "op_seconds_sum{op=backup}": 5e-05,
                "op_seconds_count{op=backup}": 1,
                "transfer_seconds_sum{op=backup}": 4e-05,
                "transfer_seconds_count{op=backup}": 1,
            },
        ),
        (
            lambda s: s.on_records(17),
            {"records_total{}": 17, "last_analysis_timestamp_seconds{}": 1_700_000_000.5},
        ),
        (lambda s: s.on_lost(4, DropReason.ARENA_FULL), {"dropped_records_total{reason=arena_full}": 4}),
    ],
)
def test_one_call_changes_exactly(call: Callable[[MetricsSink], None], expected: dict[str, float]) -> None:
    assert fed(call) == expected


@pytest.mark.parametrize("hazard", Hazard)
@pytest.mark.parametrize(
    ("verdict", "metric"),
    [
        (Verdict.VIOLATION, "violations_total"),
        (Verdict.LATENT, "latent_races_total"),
        (Verdict.CONTRADICTION, "contradictions_total"),
    ],
)
def test_every_hazard_has_its_own_count(verdict: Verdict, metric: str, hazard: Hazard) -> None:
    assert fed(lambda s: s.on_finding(finding(verdict, hazard))) == {f"{metric}{{hazard={hazard.value}}}": 1}


def feed_everything(sink: MetricsSink) -> None:
    sink.on_checked(WAW, 2, 1)
    sink.on_finding(finding(Verdict.VIOLATION))
    sink.on_finding(finding(Verdict.UNKNOWN, cause=Cause.RECORDS_LOST))
    sink.on_weak_ordering(WAW, "polled", (OpId(1), OpId(2)))
    sink.on_fence(fence(10, 5))
    sink.on_layer_wait(10)
    sink.on_transfer(transfer(fenced=False))
    sink.on_records(1)
    sink.on_lost(1, DropReason.RING_FULL)


ALWAYS = {"records_total", "dropped_records_total", "last_analysis_timestamp_seconds"}
FINDINGS = {"checks_total", "pages_checked_total", "violations_total", "unknown_total", "weak_orderings_total"}


@pytest.mark.parametrize(
    ("findings", "costs", "expected"),
    [
        (True, False, ALWAYS | FINDINGS),
        (False, False, ALWAYS),
        (
            False,
            True,
            ALWAYS
            | {"unfenced_ops_total", "transfer_bytes_total", "transfer_pages_total"}
            | {
                f"{name}_seconds_{part}"
                for name in ("fence_wait", "fence_avoidable", "layer_wait", "op", "transfer")
                for part in ("sum", "count")
            },
        ),
    ],
)
def test_switches_choose_what_is_fed(findings: bool, costs: bool, expected: set[str]) -> None:
    increases = fed(feed_everything, findings=findings, costs=costs)

    assert {key.partition("{")[0] for key in increases} == expected


@pytest.mark.parametrize(
    ("waited_ns", "bucket"),
    [
        (0, "1e-06"),
        (1_000, "1e-06"),
        (1_001, "2.5e-06"),
        (2_500, "2.5e-06"),
        (5_000_000_000, "5.0"),
        (5_000_000_001, "+Inf"),
    ],
)
def test_a_bound_belongs_to_its_bucket(waited_ns: int, bucket: str) -> None:
    metrics = Metrics()
    MetricsSink(metrics).on_layer_wait(waited_ns)
    found = [
        dict(labels)["le"]
        for (name, labels), value in scrape(metrics).items()
        if name == "hicache_obs_layer_wait_seconds_bucket" and value == 1
    ]

    assert found[0] == bucket  # cumulative: this bucket and all above it
    assert found[-1] == "+Inf"


def test_buckets_add_up() -> None:
    metrics = Metrics()
    sink = MetricsSink(metrics)
    for waited_ns in (500, 900, 2_000, 3_000_000_000, 9_000_000_000):
        sink.on_layer_wait(waited_ns)
    exposed = {
        dict(labels).get("le", name): value
        for (name, labels), value in scrape(metrics).items()
        if name.startswith("hicache_obs_layer_wait_seconds")
    }

    assert [exposed[le] for le in ("1e-06", "2.5e-06", "2.5", "5.0", "+Inf")] == [2, 3, 3, 4, 5]
    assert exposed["hicache_obs_layer_wait_seconds_count"] == 5
    assert exposed["hicache_obs_layer_wait_seconds_sum"] == 12.0000034


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda s: s.on_layer_wait(-1), "a duration is not negative, got -1 ns"),
        (lambda s: s.on_records(-2), "a counter only grows, got -2"),
    ],
)
def test_negative_amounts_are_refused(call: Callable[[MetricsSink], None], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        call(MetricsSink(Metrics()))


def test_ranks_do_not_mix() -> None:
    metrics = Metrics(ranks=[Ranks(0), Ranks(1)])
    MetricsSink(metrics, Ranks(1)).on_records(3)
    counts = {
        dict(labels)["tp_rank"]: value
        for (name, labels), value in scrape(metrics).items()
        if name == "hicache_obs_records_total"
    }

    assert counts == {"0": 0, "1": 3}


def test_what_no_sink_call_feeds() -> None:
    metrics = Metrics()
    before = scrape(metrics)
    metrics.set_observable([WAW, Hazard.GRAPH])
    metrics.set_observable([WAW])
    metrics.set_clock_error(1_500)
    metrics.add_overhead(Phase.ANALYZE, 250_000_000)
    metrics.add_overhead(Phase.ANALYZE, 250_000_000)

    assert changed(before, scrape(metrics)) == {
        "hazard_observable{hazard=waw_forward_restore}": 1,
        "clock_error_seconds{}": 1.5e-06,
        "overhead_seconds_total{phase=analyze}": 0.5,
    }


@pytest.mark.parametrize(
    ("name", "values"),
    [("violations_total", ("no_such_hazard",)), ("violations_total", ()), ("no_such_total", ()), ("build_info", ())],
)
def test_a_child_outside_the_catalogue_is_refused(name: str, values: tuple[str, ...]) -> None:
    with pytest.raises(KeyError):
        Metrics().rank(Ranks()).counter(name, *values)


def test_a_child_of_another_type_is_refused() -> None:
    with pytest.raises(KeyError, match="records_total is a counter, not a gauge"):
        Metrics().rank(Ranks()).gauge("records_total")


# -- formats -------------------------------------------------------------------------------------------------


OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def openmetrics_of(metrics: Metrics, *, created: bool = True) -> list[Metric]:
    body, kind = negotiate(metrics, OPENMETRICS, created=created)
    assert kind.startswith("application/openmetrics-text")
    return list(parse_openmetrics(body.decode()))


def test_both_text_formats_parse_to_the_same_values() -> None:
    metrics = Metrics()
    feed_everything(MetricsSink(metrics))
    text = scrape(metrics)
    openmetrics = openmetrics_of(metrics, created=False)

    assert samples(openmetrics) == text
    assert {f.name: f.unit for f in openmetrics} == {r.family: r.base_unit for r in CATALOGUE}


def test_openmetrics_says_since_when_each_counter_and_histogram_counts() -> None:
    clock = iter([1_700_000_000_250_000_000, 1_600_000_000_000_000_000])  # it is set back between two ranks
    metrics = Metrics(ranks=[Ranks(0)], now_ns=lambda: next(clock))
    metrics.rank(Ranks(1))
    with_created = samples(openmetrics_of(metrics))
    without = samples(openmetrics_of(metrics, created=False))
    created = {key: value for key, value in with_created.items() if key[0].endswith("_created")}

    assert with_created.keys() - created.keys() == without.keys()
    assert {(name, dict(labels)["tp_rank"]): value for (name, labels), value in created.items()} == {
        (f"{metric.family}_created", rank): value
        for metric in CATALOGUE
        if metric.type is not MetricType.GAUGE
        for rank, value in (("0", 1_700_000_000.25), ("1", 1_600_000_000.0))
    }
    assert "_created" not in render(metrics).decode()


def exemplars(metrics: Metrics) -> dict[str, tuple[dict[str, str], float, float]]:
    """By series: labels, value and time of its exemplar."""
    return {
        f"{s.name.removeprefix('hicache_obs_')} {s.labels.get('le', s.labels.get('hazard', ''))}": (
            dict(s.exemplar.labels),
            s.exemplar.value,
            float(s.exemplar.timestamp),
        )
        for family in openmetrics_of(metrics)
        for s in family.samples
        if s.exemplar
    }


def test_exemplars_name_the_event_behind_a_number() -> None:
    metrics = Metrics()
    sink = MetricsSink(metrics, now_ns=lambda: NOW_NS)
    sink.on_finding(finding(Verdict.LATENT))
    sink.on_finding(finding(Verdict.UNKNOWN))  # its counter is by reason: there may be a million
    sink.on_fence(FenceCost(OpId(634), RESTORE, 2_000, 1_000))
    sink.on_fence(FenceCost(OpId(635), RESTORE, 2_500, 0))
    sink.on_transfer(transfer())

    assert exemplars(metrics) == {
        "latent_races_total waw_forward_restore": ({"fingerprint": "HC-latent"}, 1, NOW_NS / 1e9),
        "fence_wait_seconds_bucket 2.5e-06": ({"op_id": "635"}, 2.5e-06, NOW_NS / 1e9),
        "fence_avoidable_seconds_bucket 1e-06": ({"op_id": "635"}, 0, NOW_NS / 1e9),
        "op_seconds_bucket 5e-05": ({"transfer": "7"}, 5e-05, NOW_NS / 1e9),
        "transfer_seconds_bucket 5e-05": ({"transfer": "7"}, 4e-05, NOW_NS / 1e9),
    }


def test_an_accepted_finding_counts_apart_and_has_no_exemplar() -> None:
    metrics = Metrics()
    sink = MetricsSink(metrics, accepts=lambda fingerprint: fingerprint == "HC-latent", now_ns=lambda: NOW_NS)
    sink.on_finding(finding(Verdict.LATENT))
    sink.on_finding(finding(Verdict.VIOLATION))
    of = metrics.rank(ONLY_RANK)

    assert [of.total(n) for n in ("accepted_total", "latent_races_total", "violations_total")] == [1, 0, 1]
    assert list(exemplars(metrics)) == ["violations_total waw_forward_restore"]


TRACED = {"trace_id": "1" * 32, "span_id": "2" * 16}


@pytest.mark.parametrize(
    ("later_ns", "kept"), [(TRACED_NS - 1, TRACED), (TRACED_NS, {"op_id": "635"})], ids=["young", "old"]
)
def test_a_delivered_span_stays_the_exemplar_for_a_minute(later_ns: int, kept: dict[str, str]) -> None:
    metrics, clock = Metrics(), [NOW_NS]
    sink = MetricsSink(metrics, now_ns=lambda: clock[0])
    sink.on_fence(FenceCost(OpId(634), RESTORE, 2_000, 1_000))
    span = Exemplar(TRACED, NOW_NS)
    metrics.rank(ONLY_RANK).explain("fence_wait_seconds", RESTORE.value, amount=2_000, exemplar=span)
    assert exemplars(metrics)["fence_wait_seconds_bucket 2.5e-06"] == (TRACED, 2e-06, NOW_NS / 1e9)
    clock[0] += later_ns
    sink.on_fence(FenceCost(OpId(635), RESTORE, 2_500, 0))

    assert exemplars(metrics)["fence_wait_seconds_bucket 2.5e-06"][0] == kept


@pytest.mark.parametrize(("later_ns", "kept"), [(TRACED_NS - 1, True), (TRACED_NS, False)], ids=["young", "old"])
def test_a_finding_keeps_its_delivered_span_for_a_minute(later_ns: int, kept: bool) -> None:
    metrics, clock = Metrics(), [NOW_NS]
    sink = MetricsSink(metrics, now_ns=lambda: clock[0])
    sink.on_finding(finding(Verdict.LATENT))
    hazard = finding(Verdict.LATENT).hazard.value
    span = Exemplar(TRACED, NOW_NS)
    metrics.rank(ONLY_RANK).explain("latent_races_total", hazard, amount=1, exemplar=span)
    clock[0] += later_ns
    sink.on_finding(finding(Verdict.LATENT))

    labels, value, _ = exemplars(metrics)["latent_races_total waw_forward_restore"]
    assert (labels, value) == (TRACED if kept else {"fingerprint": "HC-latent"}, 1)


AWKWARD = 'a "quoted"\nname \\ with\u2028 everything'


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_a_label_value_with_newline_and_quotes_comes_back_as_it_was(accept: str) -> None:
    body, kind = negotiate(Metrics(engine=AWKWARD), accept)
    parse = parse_openmetrics if "openmetrics" in kind else parse_text
    engines = {s.labels["engine"] for family in parse(body.decode()) for s in family.samples if "engine" in s.labels}

    assert engines == {AWKWARD}


def test_scrapes_while_writing_are_consistent() -> None:
    metrics = Metrics()
    sink = MetricsSink(metrics)
    rounds = 20_000
    writer = threading.Thread(target=lambda: [sink.on_layer_wait(n) for n in range(rounds)])
    writer.start()
    counts = []
    while writer.is_alive():
        by_name = {name + dict(labels).get("le", ""): v for (name, labels), v in samples(metrics.collect()).items()}
        counts.append(by_name["hicache_obs_layer_wait_seconds_count"])
        assert by_name["hicache_obs_layer_wait_seconds_bucket+Inf"] == counts[-1]
    writer.join()
    final = {name: v for (name, _), v in scrape(metrics).items()}

    assert all(earlier <= later for earlier, later in pairwise(counts))
    assert final["hicache_obs_layer_wait_seconds_count"] == rounds
    assert final["hicache_obs_layer_wait_seconds_sum"] == sum(range(rounds)) / 1e9


# -- inside somebody else's server ---------------------------------------------------------------------------


def run_python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, check=True, text=True
    )
    return done.stdout.strip()


def test_importing_does_not_import_the_client_library() -> None:
    """A plugin that did so would empty the server's own metrics."""
    code = (
        "import sys, hicache_obs.exporters.prometheus as p; from hicache_obs.exporters.metrics_sink import MetricsSink;"
        "MetricsSink(p.Metrics()).on_records(1);"
        "print([m for m in sys.modules if m.startswith('prometheus_client')])"
    )

    assert run_python(code) == "[]"


def test_nothing_leaks_into_a_multiprocess_directory(tmp_path: Path) -> None:
    code = (
        "import hicache_obs.exporters.prometheus as p; from hicache_obs.exporters.metrics_sink import MetricsSink;"
        "m = p.Metrics(); MetricsSink(m).on_records(41);"
        "print([x for x in p.render(m).decode().splitlines() if x.startswith('hicache_obs_records_total')][0])"
    )

    line = run_python(code, PROMETHEUS_MULTIPROC_DIR=str(tmp_path))

    assert line.endswith(" 41.0")
    assert list(tmp_path.iterdir()) == []


# -- the endpoint --------------------------------------------------------------------------------------------


@pytest.fixture
def server() -> Iterator[Server]:
    metrics = Metrics()
    MetricsSink(metrics).on_records(41)
    with serve(metrics, port=0) as running:
        yield running


def get(url: str, accept: str = "*/*") -> tuple[str, str]:
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=10) as response:
        return response.headers["Content-Type"], response.read().decode()


def test_serves_text(server: Server) -> None:
    kind, text = get(server.url)

    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    assert kind.startswith("text/plain")
    assert 'hicache_obs_records_total{dp_rank="0",pp_rank="0",tp_rank="0"} 41.0' in text.splitlines()


def test_serves_openmetrics_to_who_asks(server: Server) -> None:
    kind, text = get(server.url, "application/openmetrics-text; version=1.0.0")

    assert kind.startswith("application/openmetrics-text")
    assert len(list(parse_openmetrics(text))) == len(CATALOGUE)


def test_serves_one_family_on_request(server: Server) -> None:
    _, text = get(server.url + "?name[]=hicache_obs_records_total")

    assert [family.name for family in parse_text(text)] == [row("records_total").family]


def test_close_frees_the_port_and_can_be_repeated(server: Server) -> None:
    server.close()
    server.close()

    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("127.0.0.1", server.port))


def test_busy_port(server: Server) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(Metrics(), port=server.port)

    assert str(caught.value) == (
        f"--serve: port {server.port} on 127.0.0.1 is in use; choose another or 0 for any free port"
    )


@pytest.mark.parametrize(
    ("address", "port", "text"),
    [
        ("127.0.0.1", 65536, "--serve: port 65536 is out of range; choose 1 to 65535, or 0 for any free port"),
        ("127.0.0.1", -1, "--serve: port -1 is out of range; choose 1 to 65535, or 0 for any free port"),
        ("192.0.2.1", 0, "--serve: address 192.0.2.1 is not one of this machine; use 127.0.0.1 or 0.0.0.0"),
        (
            "no such host",
            0,
            "--serve: address 'no such host' cannot be resolved; give a local address such as 127.0.0.1 or 0.0.0.0",
        ),
    ],
)
def test_what_cannot_be_bound(address: str, port: int, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        serve(Metrics(), address=address, port=port)

    assert str(caught.value) == text
