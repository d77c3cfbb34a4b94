"""A real Prometheus and promtool accept what is served, and every dashboard query returns data from it."""

import importlib.resources
import json
import math
import re
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import pytest

from hicache_obs.costs import FenceCost, TransferCost, TransferKind
from hicache_obs.exporters.catalogue import CATALOGUE, PREFIX, Phase, Provenance
from hicache_obs.exporters.endpoint import serve
from hicache_obs.exporters.metric_row import MetricType
from hicache_obs.exporters.metrics_page import markdown
from hicache_obs.exporters.metrics_sink import MetricsSink
from hicache_obs.exporters.prometheus import Metrics, render
from hicache_obs.exporters.server import Server
from hicache_obs.findings import Cause, Finding, Hazard, Verdict
from hicache_obs.records import DropReason, OpId, Ranks

T = TypeVar("T")

pytestmark = pytest.mark.slow

INSTALL = "apt-get install prometheus"
DEADLINE_S = 90
POLL_S = 0.1
WAW = Hazard.WAW_FORWARD_RESTORE

OVERVIEW = json.loads((importlib.resources.files("hicache_obs.dashboards") / "grafana" / "overview.json").read_text())
PANELS = [panel for panel in OVERVIEW["panels"] if panel["type"] != "row"]
PANEL_QUERIES = {
    f"{panel['title']}/{target['refId']}": target["expr"]
    for panel in PANELS
    for target in panel["targets"]
    if "sglang" not in target["expr"]  # these need SGLang's own metrics
}
DOCS_QUERIES = re.findall(r"```promql\n(.*?)\n```", markdown(), re.DOTALL)


def until(ask: Callable[[], T], accept: Callable[[T], bool]) -> T:
    """The first accepted answer; at the deadline the last one, for the caller's assertion to show."""
    deadline = time.monotonic() + DEADLINE_S
    while True:
        answer = ask()
        if accept(answer) or time.monotonic() > deadline:
            return answer
        time.sleep(POLL_S)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class Target:
    """What one test exports, and the ``instance`` label under which Prometheus knows it."""

    metrics: Metrics
    server: Server

    @property
    def instance(self) -> str:
        return f"127.0.0.1:{self.server.port}"


class Prometheus:
    """A running Prometheus that scrapes every target twice a second.

    A scrape that takes longer, on a machine with much else to do, leaves a gap in all series: ask ``until`` it is over.
    """

    def __init__(self, program: Path, targets: Sequence[Target], folder: Path) -> None:
        addresses = [target.instance for target in targets]
        (folder / "prometheus.yml").write_text(
            "global: {scrape_interval: 500ms, scrape_timeout: 500ms}\n"
            "scrape_configs:\n"
            f"- {{job_name: hicache, static_configs: [{{targets: {addresses}}}]}}\n"
        )
        port = free_port()
        self._url = f"http://127.0.0.1:{port}"
        self._log = folder / "log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    program,
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{port}",
                    "--enable-feature=exemplar-storage",
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def query(self, expr: str) -> list[dict[str, Any]]:
        """The instant vector of ``expr``; an error of the query fails the test with Prometheus's words."""
        request = urllib.request.Request(
            self._url + "/api/v1/query", data=urllib.parse.urlencode({"query": expr}).encode()
        )
        try:
            with urllib.request.urlopen(request, timeout=10) as response:
                result: list[dict[str, Any]] = json.load(response)["data"]["result"]
                return result
        except urllib.error.HTTPError as error:
            if error.code == 503:  # still starting
                return []
            pytest.fail(f"{expr}\n{error.read().decode()}")
        except urllib.error.URLError:
            assert self._process.poll() is None, self._log.read_text()
            return []

    def exemplars(self, expr: str) -> list[dict[str, Any]]:
        """The exemplars of the series that ``expr`` selects, of the last hour."""
        now = time.time()
        values = urllib.parse.urlencode({"query": expr, "start": now - 3600, "end": now + 60})
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/query_exemplars?{values}", timeout=10) as response:
                return [exemplar for series in json.load(response)["data"] for exemplar in series["exemplars"]]
        except urllib.error.URLError:
            assert self._process.poll() is None, self._log.read_text()
            return []

    def value(self, expr: str) -> float | None:
        """The value of a query with one result, ``None`` without result."""
        result = self.query(expr)
        assert len(result) <= 1, result
        return float(result[0]["value"][1]) if result else None

    def close(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def targets() -> Iterator[dict[str, Target]]:
    """One endpoint per test, all there before Prometheus starts: it reads new targets every 5 s only."""
    made = {
        name: Metrics(ranks=[Ranks(0, 0, 0), Ranks(1, 0, 2)]) for name in ("exact", "names", "board", "steps", "ended")
    }
    sink = MetricsSink(made["ended"])
    sink.on_checked(WAW, 4, 2)
    sink.on_finding(finding(Verdict.VIOLATION))
    with ExitStack() as stack:
        yield {name: Target(metrics, stack.enter_context(serve(metrics, port=0))) for name, metrics in made.items()}


@pytest.fixture(scope="module")
def prometheus(
    require_tool: Callable[..., Path], targets: dict[str, Target], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Prometheus]:
    """A real Prometheus; ends with the module."""
    program = require_tool("prometheus", install=INSTALL)
    running = Prometheus(program, list(targets.values()), tmp_path_factory.mktemp("prometheus"))
    yield running
    running.close()


def finding(verdict: Verdict) -> Finding:
    """A finding of which a counter looks at four fields; the others are left empty."""
    empty: dict[str, Any] = dict.fromkeys(Finding.__dataclass_fields__)
    return Finding(
        **{**empty, "verdict": verdict, "hazard": WAW, "cause": Cause.RECORDS_LOST, "fingerprint": "HC-00000001"}
    )


def feed(metrics: Metrics, rank: Ranks) -> None:
    """Something of everything."""
    sink = MetricsSink(metrics, rank)
    for verdict in (Verdict.VIOLATION, Verdict.LATENT, Verdict.CONTRADICTION, Verdict.UNKNOWN):
        sink.on_finding(finding(verdict))
    for provenance in Provenance:
        sink.on_weak_ordering(WAW, provenance.value, (OpId(1), OpId(2)))
    sink.on_checked(WAW, 256, 10)
    for kind in TransferKind:
        sink.on_fence(FenceCost(OpId(1), kind, 20_000, 15_000))
        sink.on_transfer(TransferCost(kind, 1, 400_000, 500_000, 1 << 20, 16, fenced=False))
    sink.on_layer_wait(1_000)
    sink.on_records(50)
    sink.on_lost(1, DropReason.RING_FULL)
    for phase in Phase:
        metrics.add_overhead(phase, 1_000_000, rank)
    metrics.set_observable([WAW], rank)
    metrics.set_clock_error(1_000, rank)
    metrics.set_pending(TransferKind.RESTORE, 1, 2_000_000, rank)


def concrete(expr: str, instance: str) -> str:
    """The expression as Grafana would send it with one instance and one rank selected."""
    values = {"$__rate_interval": "2s", "$__range": "1m", "$instance": instance, "$tp_rank": "0"}
    for variable, value in values.items():
        expr = expr.replace(variable, value)
    expr = re.sub(r"\$(cluster|namespace|pod|pp_rank|dp_rank)", ".*", expr)
    assert "$" not in expr
    return expr


def test_promtool_finds_nothing_to_complain_about(require_tool: Callable[..., Path]) -> None:
    promtool = require_tool("promtool", install=INSTALL)
    metrics = Metrics(ranks=[Ranks(0), Ranks(1)])
    feed(metrics, Ranks(0))

    checked = subprocess.run(
        [promtool, "check", "metrics"], input=render(metrics), capture_output=True, timeout=DEADLINE_S, check=False
    )

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_prometheus_stores_the_exact_values(prometheus: Prometheus, targets: dict[str, Target]) -> None:
    of = f'instance="{targets["exact"].instance}"'
    sink = MetricsSink(targets["exact"].metrics, Ranks(1, 0, 2))
    for _ in range(3):
        sink.on_finding(finding(Verdict.VIOLATION))
    sink.on_fence(FenceCost(OpId(1), TransferKind.RESTORE, 1_234_567, 234_567))
    sink.on_transfer(TransferCost(TransferKind.BACKUP, 1, 1, 2, 9_007_199_254_740_991, 7, fenced=True))
    expected = {
        f"fence_wait_seconds_sum{{{of}}}": 0.001234567,
        f"fence_avoidable_seconds_sum{{{of}}}": 0.000234567,
        f'fence_wait_seconds_bucket{{{of},le="0.001"}}': None,
        f'fence_wait_seconds_bucket{{{of},le="0.0025"}}': 1,
        f"transfer_bytes_total{{{of}}}": 9_007_199_254_740_991,
        f"transfer_pages_total{{{of}}}": 7,
    }

    def values() -> dict[str, float | None]:
        return {series: prometheus.value(f"{PREFIX}{series} > 0") for series in expected}

    def violations() -> dict[tuple[str, str], str]:
        found = prometheus.query(f'{PREFIX}violations_total{{{of},hazard="{WAW.value}"}}')
        return {(v["metric"]["tp_rank"], v["metric"]["dp_rank"]): v["value"][1] for v in found}

    assert until(values, lambda found: found == expected) == expected
    by_rank = {("0", "0"): "0", ("1", "2"): "3"}
    assert until(violations, lambda found: found == by_rank) == by_rank


def test_prometheus_stores_the_exemplars(prometheus: Prometheus, targets: dict[str, Target]) -> None:
    of = f'instance="{targets["exact"].instance}"'
    MetricsSink(targets["exact"].metrics, Ranks(0, 0, 0)).on_fence(FenceCost(OpId(77), TransferKind.BACKUP, 9_000, 0))
    series = f'{PREFIX}fence_wait_seconds_bucket{{{of},op="backup"}}'

    found = until(lambda: prometheus.exemplars(series), bool)

    assert [(e["labels"], float(e["value"])) for e in found] == [({"op_id": "77"}, 9e-06)]


def test_prometheus_has_every_name_of_the_catalogue(prometheus: Prometheus, targets: dict[str, Target]) -> None:
    expr = f'group by (__name__) ({{__name__=~"{PREFIX}.*",instance="{targets["names"].instance}"}})'
    expected = {name for metric in CATALOGUE for name in metric.series_names}
    expected |= {f"{metric.family}_created" for metric in CATALOGUE if metric.type is not MetricType.GAUGE}

    def names() -> set[str]:
        return {result["metric"]["__name__"] for result in prometheus.query(expr)}

    assert until(names, lambda found: found == expected) == expected


def test_every_dashboard_and_docs_query_returns_numbers(prometheus: Prometheus, targets: dict[str, Target]) -> None:
    waiting = {
        **{name: concrete(expr, targets["board"].instance) for name, expr in PANEL_QUERIES.items()},
        **{f"docs/{i}": expr for i, expr in enumerate(DOCS_QUERIES)},
    }

    def still_waiting() -> list[str]:
        feed(targets["board"].metrics, Ranks(0, 0, 0))
        for name, expr in list(waiting.items()):
            values = [float(result["value"][1]) for result in prometheus.query(expr)]
            if values and all(math.isfinite(value) for value in values):
                del waiting[name]
        return list(waiting)

    assert until(still_waiting, lambda names: not names) == []
    assert len(PANEL_QUERIES) > 30
    assert DOCS_QUERIES


VERDICT = PANEL_QUERIES["Verdict/A"]
TILES = [PANEL_QUERIES[f"{title}/A"] for title in ("Violations", "Latent races", "Pairs checked")]


def test_verdict_gets_worse_step_by_step(prometheus: Prometheus, targets: dict[str, Target]) -> None:
    instance = targets["steps"].instance
    sink = MetricsSink(targets["steps"].metrics)
    verdict = concrete(VERDICT, instance)
    steps: list[tuple[list[float | None], Callable[[], None]]] = [
        ([0, None, None, None], lambda: None),
        ([1, 0, 0, 2], lambda: sink.on_checked(WAW, 4, 2)),
        ([2, 0, 0, 2], lambda: sink.on_finding(finding(Verdict.UNKNOWN))),
        ([3, 0, 1, 2], lambda: sink.on_finding(finding(Verdict.LATENT))),
        ([4, 0, 1, 2], lambda: sink.on_finding(finding(Verdict.CONTRADICTION))),
        ([5, 1, 1, 2], lambda: sink.on_finding(finding(Verdict.VIOLATION))),
    ]

    def shown() -> list[float | None]:
        return [prometheus.value(expr) for expr in (verdict, *(concrete(tile, instance) for tile in TILES))]

    for expected, act in steps:
        act()
        assert until(shown, lambda found, expected=expected: found == expected) == expected


def test_a_run_that_ended_before_the_first_scrape_is_still_judged(
    prometheus: Prometheus, targets: dict[str, Target]
) -> None:
    """``increase`` would see nothing: these counters were never seen at 0."""
    verdict = concrete(VERDICT, targets["ended"].instance)

    assert until(lambda: prometheus.value(verdict), lambda found: found == 5) == 5


def test_nothing_selected_is_no_verdict(prometheus: Prometheus, targets: dict[str, Target]) -> None:
    """The panel then shows its text, NOT CHECKED."""
    until(lambda: prometheus.query(f"{PREFIX}records_total"), bool)

    assert prometheus.value(concrete(VERDICT, "127.0.0.1:1")) is None
