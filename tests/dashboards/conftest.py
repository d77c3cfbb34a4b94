"""A recorded evening: the demo without and with fences under a real Prometheus and Alertmanager, its spans received.

Everything the tests of this folder look at afterwards is in that Prometheus, so it runs once.
"""

from __future__ import annotations

import importlib.resources
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from hicache_obs.testing.otlp_receiver import Receiver

RULES = importlib.resources.files("hicache_obs.dashboards") / "prometheus"
DEADLINE_S = 90
POLL_S = 0.2
REQUESTS = "400"
SETTLE_S = 3
"""After a run, so that its last values are scraped and the pictures show its end."""
SCRAPE = "500ms"
SHORT = {"15m": "12s", "6h": "1m", "5m": "10s", "30s": "500ms"}
"""What the windows of the committed rules become here; what they mean is the business of the promtool tests."""
SENDING = {"HICACHE_OBS_SPAN_ONE_IN": "5", "OTEL_BSP_SCHEDULE_DELAY": "100"}
"""Some traces of the fenced run as well, and soon enough for the next scrape."""

Alert = dict[str, Any]


@dataclass(frozen=True)
class Period:
    """A stretch of the recording, seconds since the epoch."""

    start: float
    end: float


@dataclass
class Recording:
    """What is left of the evening.

    Attributes:
        url: Of the Prometheus, still running.
        racy, safe: The period of the unfenced demo, and of the fenced one at the same address.
        instance, other: Addresses of that node, and of one that was fenced all the time.
        receiver: Of the spans of all demos, still listening.
        webhooks: Alerts as they arrived, by receiver.
    """

    url: str
    racy: Period
    safe: Period
    instance: str
    other: str
    receiver: Receiver
    webhooks: dict[str, list[Alert]] = field(default_factory=dict)

    def query(self, expr: str, at: float) -> list[dict[str, Any]]:
        """The instant vector of ``expr`` at a time; Prometheus's words if it refuses."""
        body = urllib.parse.urlencode({"query": expr, "time": at}).encode()
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/query", data=body, timeout=20) as answer:
                result: list[dict[str, Any]] = json.load(answer)["data"]["result"]
                return result
        except urllib.error.HTTPError as error:
            pytest.fail(f"{expr}\n{error.read().decode()}")

    def exemplars(self, selector: str, period: Period) -> list[dict[str, Any]]:
        """What Prometheus has stored of the exemplars of the selected series."""
        values = urllib.parse.urlencode({"query": selector, "start": period.start, "end": period.end})
        with urllib.request.urlopen(f"{self.url}/api/v1/query_exemplars?{values}", timeout=20) as answer:
            return [exemplar for series in json.load(answer)["data"] for exemplar in series["exemplars"]]


def until(done: Callable[[], bool], what: str) -> None:
    """Wait for something that takes seconds on an idle machine."""
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, f"not in {DEADLINE_S} s: {what}"
        time.sleep(POLL_S)


def any_free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def free_port() -> Callable[[], int]:
    """``free_port()``: a port of loopback that nobody uses."""
    return any_free_port


def answers(url: str) -> bool:
    with suppress(OSError), urllib.request.urlopen(url, timeout=5):
        return True
    return False


class Processes:
    """Child processes that end with the block."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder

    def start(self, name: str, command: Sequence[str | Path], **environment: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, cwd=self._folder, env={**os.environ, **environment}
            )
        self._stack.callback(self.end, process)
        return process

    @staticmethod
    def end(process: subprocess.Popen[bytes]) -> None:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


class Demo:
    """``hicache-obs demo --serve --otlp`` in a process of its own."""

    def __init__(self, processes: Processes, folder: Path, port: int, fence: str, otlp: str) -> None:
        self._results = folder / f"{fence}-{port}.json"
        served = ["--serve", str(port), "--otlp", otlp, "--json", str(self._results)]
        command = [sys.executable, "-m", "hicache_obs", "demo", "--requests", REQUESTS, "--fence", fence, *served]
        self.process = processes.start("demo", command, **SENDING)

    @property
    def ended(self) -> bool:
        """The run is over; it still serves."""
        assert self.process.poll() is None
        return self._results.exists()


class Sglang:
    """Series that SGLang exports, at two tensor-parallel ranks; counters grow with time."""

    def __init__(self, mark: str) -> None:
        self._mark = mark
        self._start = time.monotonic()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        tokens = 1000 * (time.monotonic() - self._start)
        rank = ("tp_rank", "dp_rank")
        hits = GaugeMetricFamily(f"sglang{self._mark}cache_hit_rate", "-", labels=rank)
        loaded = CounterMetricFamily(f"sglang{self._mark}load_back_tokens", "-", labels=[*rank, "pool"])
        for number in ("0", "1"):
            hits.add_metric([number, "0"], 0.6)
            loaded.add_metric([number, "0", "kv"], tokens / 4)
        yield hits
        yield loaded
        yield CounterMetricFamily(f"sglang{self._mark}prompt_tokens", "-", value=tokens)


def serve_sglang(stack: ExitStack, mark: str) -> str:
    registry = CollectorRegistry()
    registry.register(Sglang(mark))  # type: ignore[arg-type]
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return f"127.0.0.1:{server.server_port}"


def serve_webhooks(stack: ExitStack, received: dict[str, list[Alert]]) -> str:
    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            received.setdefault(self.path.strip("/"), []).append(body)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Receiver)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    stack.callback(thread.join)
    stack.callback(server.server_close)
    stack.callback(server.shutdown)
    return f"http://127.0.0.1:{server.server_port}"


def short(text: str) -> str:
    """The rules with windows of seconds, and nothing that has to last before it fires."""
    text = re.sub(r"\bfor: \w+", "for: 1s", text)
    return re.sub(r"(?<![\w.])(15m|6h|5m|30s)\b", lambda match: SHORT[match[1]], text)


def write_configs(folder: Path, alertmanager: str, webhooks: str, targets: dict[str, list[tuple[str, str]]]) -> None:
    """The committed rules and Alertmanager routes, only faster; targets by job as (address, pod)."""
    (folder / "hicache-obs-rules.yml").write_text(short((RULES / "hicache-obs-rules.yml").read_text()))
    routes = (RULES / "alertmanager.yml").read_text().replace("http://127.0.0.1:5001", webhooks)
    (folder / "alertmanager.yml").write_text(re.sub(r"(group_wait|group_interval): \w+", r"\1: 1s", routes))
    scrapes = [
        {
            "job_name": job,
            "static_configs": [
                {"targets": [address], "labels": {"cluster": "test", "namespace": "llm", "pod": pod}}
                for address, pod in addresses
            ],
        }
        for job, addresses in targets.items()
    ]
    config = {
        "global": {"scrape_interval": SCRAPE, "scrape_timeout": SCRAPE, "evaluation_interval": SCRAPE},
        "rule_files": ["hicache-obs-rules.yml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]},
        "scrape_configs": scrapes,
    }
    (folder / "prometheus.yml").write_text(json.dumps(config))


@pytest.fixture(scope="session")
def recording(require_tool: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recording]:
    """The unfenced demo pages; its fenced successor at the same address ends that. Then all is quiet."""
    prometheus = require_tool("prometheus", install="apt-get install prometheus")
    alertmanager = require_tool("prometheus-alertmanager", install="apt-get install prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("evening")
    ports = [any_free_port() for _ in range(4)]
    node, other, served, alerts = (f"127.0.0.1:{port}" for port in ports)
    webhooks: dict[str, list[Alert]] = {}
    with ExitStack() as stack:
        receiver = Receiver()
        stack.callback(receiver.close)
        processes = Processes(stack, folder)
        sglang = [(serve_sglang(stack, ":"), "engine-0"), (serve_sglang(stack, "_"), "engine-1")]
        agents = [(node, "engine-1"), (other, "engine-0")]  # the worst one's name is not the first
        write_configs(folder, alerts, serve_webhooks(stack, webhooks), {"hicache-obs": agents, "sglang": sglang})
        processes.start(
            "prometheus",
            [
                prometheus,
                "--config.file=prometheus.yml",
                "--storage.tsdb.path=data",
                f"--web.listen-address={served}",
                "--enable-feature=exemplar-storage",
            ],
        )
        processes.start(
            "alertmanager",
            [
                alertmanager,
                "--config.file=alertmanager.yml",
                "--storage.path=alerts",
                f"--web.listen-address={alerts}",
                "--cluster.listen-address=",
            ],
        )
        # Races come within seconds, and Prometheus looks up its targets for five: it must be there before the demos.
        recorded = Recording(f"http://{served}", Period(0, 0), Period(0, 0), node, other, receiver, webhooks)
        until(lambda: answers(f"http://{served}/-/ready") and scrapes(recorded, 0) == 2, "Prometheus scrapes")
        Demo(processes, folder, ports[1], "page", receiver.url)
        until(lambda: scrapes(recorded, 1) == 1, "the fenced demo serves")
        racy = Demo(processes, folder, ports[0], "none", receiver.url)
        until(lambda: scrapes(recorded, 1) == 2, "the unfenced demo serves")
        start = time.time()
        until(lambda: racy.ended and has(webhooks, "firing"), "the violation pages")
        time.sleep(SETTLE_S)
        racy_end = time.time()
        processes.end(racy.process)
        recorded = replace(recorded, racy=Period(start, racy_end))
        gone = f'up{{instance="{node}"}} == 0'
        until(lambda: bool(recorded.query(gone, time.time())), "Prometheus has missed the unfenced demo")
        time.sleep(1)  # pictures begin at the whole second
        safe_start = time.time()
        safe = Demo(processes, folder, ports[0], "stream", receiver.url)
        until(lambda: safe.ended and has(webhooks, "resolved"), "the page is over")
        time.sleep(SETTLE_S)
        yield replace(recorded, safe=Period(safe_start, time.time()))


def scrapes(recording: Recording, up: int) -> int:
    """Of how many demos the last scrape came to this."""
    return len(recording.query(f'up{{job="hicache-obs"}} == {up}', time.time()))


def has(webhooks: dict[str, list[Alert]], status: str) -> bool:
    """The pager was told that the violation fires, or that it no longer does."""
    return any(
        alert["status"] == status and alert["labels"]["alertname"] == "HiCacheViolation"
        for group in list(webhooks.get("pager", []))
        for alert in group["alerts"]
    )
