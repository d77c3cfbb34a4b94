"""``demo --serve``: a real Prometheus scrapes what the JSON says; it serves until interrupted."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_obs import __version__
from hicache_obs.cli import demo, demo_run, main
from hicache_obs.controller import engine
from hicache_obs.controller.engine import Engine
from hicache_obs.exporters.catalogue import CATALOGUE, PREFIX
from hicache_obs.exporters.metric_row import MetricType
from hicache_obs.exporters.server import Server
from hicache_obs.findings import Hazard

INSTALL = "apt-get install prometheus"
DEADLINE_S = 120
END_S = 20
"""To end after an interrupt; under a second when nothing else runs."""
SMALL = ["--requests", "60", "--device-pages", "32"]
"""Few enough device pages that restores race, in a second or two."""
RANK = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0"}

Series = tuple[str, frozenset[tuple[str, str]]]
Until = Callable[..., Any]


def get(url: str) -> str:
    """Body of a page of ours."""
    with urllib.request.urlopen(url, timeout=DEADLINE_S) as response:
        return str(response.read().decode())


def series(text: str) -> dict[Series, float]:
    """Values of a scrape, by name and labels."""
    from prometheus_client.parser import text_string_to_metric_families

    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, frozenset(sample.labels.items())): sample.value for sample in samples}


def declared() -> Iterator[Series]:
    """Every counter and histogram series that the catalogue declares, of the only rank."""
    for row in CATALOGUE:
        if row.type is MetricType.GAUGE:
            continue
        for values in row.children({"engine": "demo", "version": __version__}):
            labels = {**RANK, **dict(zip((label.name for label in row.labels), values, strict=True))}
            if row.type is MetricType.COUNTER:
                yield row.name, frozenset(labels.items())
                continue
            yield row.name + "_sum", frozenset(labels.items())
            yield row.name + "_count", frozenset(labels.items())
            for bound in (*(repr(bound / 1e9) for bound in row.buckets_ns), "+Inf"):
                yield row.name + "_bucket", frozenset({**labels, "le": bound}.items())


@pytest.fixture(scope="module")
def scrapes() -> list[dict[Series, float]]:
    """Two scrapes of one demo: right before its first engine is built, and when all is done."""
    servers: list[Server] = []
    taken: list[dict[Series, float]] = []
    make_server = demo._server

    def make_and_keep_server(*arguments: Any) -> Server:
        servers.append(make_server(*arguments))
        return servers[-1]

    def scrape() -> None:
        taken.append(series(get(servers[0].url)))

    def build_engine(*arguments: Any, **options: Any) -> Engine:
        if not taken:
            scrape()
        return engine.build_engine(*arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(demo, "_server", make_and_keep_server)
        patch.setattr(demo_run, "build_engine", build_engine)
        patch.setattr(demo, "_interruption", lambda: nullcontext(SimpleNamespace(wait=scrape)))
        assert main(["demo", "--device", "virtual", "--fence", "none", *SMALL, "--serve", "0"]) == 0
    return taken


def test_every_series_is_served_at_zero_before_the_first_round(scrapes: list[dict[Series, float]]) -> None:
    before, after = scrapes
    expected = set(declared())

    assert {name: value for name, value in before.items() if name in expected} == dict.fromkeys(expected, 0)
    assert after.keys() == before.keys()
    assert after[f"{PREFIX}records_total", frozenset(RANK.items())] > 0
    assert after[f"{PREFIX}coverage_ratio", frozenset(RANK.items())] == 1


def test_hazards_that_are_checked_or_found_are_observable(scrapes: list[dict[Series, float]]) -> None:
    """What cannot be seen here must read 0, and nothing that was seen may."""
    before, after = scrapes

    def hazards(scrape: dict[Series, float], *names: str) -> set[str]:
        values = ((name.removeprefix(PREFIX), dict(labels), value) for (name, labels), value in scrape.items())
        return {labels["hazard"] for name, labels, value in values if name in names and value}

    observable = hazards(before, "hazard_observable")
    assert observable == hazards(after, "hazard_observable") == {hazard.value for hazard in demo_run.OBSERVABLE}
    assert hazards(after, "pages_checked_total", "checks_total", "violations_total", "latent_races_total") <= observable
    assert Hazard.WAW_FORWARD_RESTORE in observable
    assert not {Hazard.GRAPH, Hazard.STORAGE_PREFETCH, Hazard.RELOCATION, Hazard.RDMA} & observable


def test_watching_is_accounted_for(scrapes: list[dict[Series, float]]) -> None:
    _, after = scrapes

    spent = [
        after[f"{PREFIX}overhead_seconds_total", frozenset({**RANK, "phase": phase}.items())]
        for phase in ("hook", "resolve", "analyze")
    ]
    assert min(spent) > 0
    assert max(spent) < DEADLINE_S


# -- in processes of their own -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Demo:
    """A demo that serves.

    Attributes:
        process, url, json_file: Of the demo.
        first: Its first scrape.
        log: What it prints to standard error.
    """

    process: subprocess.Popen[bytes]
    url: str
    json_file: Path
    first: str
    log: Path

    @property
    def instance(self) -> str:
        """Host and port."""
        return urllib.parse.urlsplit(self.url).netloc

    @property
    def modes(self) -> list[dict[str, Any]]:
        """Entries of the JSON file."""
        modes: list[dict[str, Any]] = json.loads(self.json_file.read_text())["modes"]
        return modes


@contextmanager
def killed_at_the_end(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that never outlives the block."""
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=file)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextmanager
def serving(fence: str, folder: Path, until: Until) -> Iterator[Demo]:
    """A demo of one policy, from the moment it serves."""
    folder.mkdir()
    log, json_file = folder / "demo.log", folder / "demo.json"
    arguments = ["--device", "virtual", "--fence", fence, *SMALL, "--serve", "0", "--json", str(json_file)]
    with killed_at_the_end([sys.executable, "-m", "hicache_obs", "demo", *arguments], log) as process:
        until(lambda: "metrics on http" in log.read_text() or process.poll() is not None)
        lines = [line for line in log.read_text().splitlines() if line.startswith("metrics on ")]
        assert lines, log.read_text()
        url = lines[0].split()[-1]
        yield Demo(process, url, json_file, get(url), log)


def wait_for_json(running: Demo, until: Until) -> None:
    """Wait for the results; fails at once if the demo ends instead."""
    until(lambda: running.json_file.exists() or running.process.poll() is not None)
    assert running.process.poll() is None, running.log.read_text()


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory, until: Until) -> Iterator[Mapping[str, Demo]]:
    """Two demos that serve until the module ends."""
    folder = tmp_path_factory.mktemp("serve")
    with ExitStack() as stack:
        yield {fence: stack.enter_context(serving(fence, folder / fence, until)) for fence in ("none", "stream")}


@pytest.fixture(scope="module")
def query(
    require_tool: Callable[..., Path],
    demos: Mapping[str, Demo],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[str], float | None]]:
    """Asks a real Prometheus that scrapes the demos: the value of an expression with one result, else ``None``."""
    program = require_tool("prometheus", install=INSTALL)
    folder = tmp_path_factory.mktemp("prometheus")
    targets = [demo.instance for demo in demos.values()]
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: hicache, static_configs: [{{targets: {targets}}}]}}]\n"
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    options = [f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}", f"--web.listen-address={address}"]
    with killed_at_the_end([str(program), *options], folder / "log") as process:

        def ask(expression: str) -> float | None:
            data = urllib.parse.urlencode({"query": expression}).encode()
            try:
                with urllib.request.urlopen(f"http://{address}/api/v1/query", data, timeout=DEADLINE_S) as response:
                    result = json.load(response)["data"]["result"]
            except urllib.error.URLError:  # still starting
                assert process.poll() is None, (folder / "log").read_text()
                return None
            return float(result[0]["value"][1]) if len(result) == 1 else None

        yield ask


@pytest.mark.slow
@pytest.mark.parametrize("fence", ["none", "stream"])
def test_the_first_scrape_has_every_family(demos: Mapping[str, Demo], fence: str) -> None:
    names = {line.split()[2] for line in demos[fence].first.splitlines() if line.startswith("# TYPE")}

    assert names == {row.name for row in CATALOGUE}


@pytest.mark.slow
@pytest.mark.parametrize("fence", ["none", "stream"])
def test_prometheus_has_what_the_json_says(
    demos: Mapping[str, Demo], query: Callable[[str], float | None], until: Until, fence: str
) -> None:
    running = demos[fence]
    wait_for_json(running, until)
    written = time.time()
    of = f'{{instance="{running.instance}"}}'

    def scraped_since() -> bool:
        return (query(f"min(timestamp({PREFIX}violations_total{of}))") or 0) > written

    assert until(scraped_since)
    (mode,) = running.modes
    assert query(f"sum({PREFIX}violations_total{of})") == mode["violations"]
    assert query(f"sum({PREFIX}fence_wait_seconds_count{of})") == mode["fences"]
    assert query(f"sum({PREFIX}latent_races_total{of})") == mode["latent"]
    assert (mode["violations"] > 0, mode["fences"] > 0) == ((True, False) if fence == "none" else (False, True))


@pytest.mark.slow
@pytest.mark.parametrize("fence", ["none", "stream"])
def test_promtool_accepts_scrapes_before_and_after(
    require_tool: Callable[..., Path], demos: Mapping[str, Demo], until: Until, fence: str
) -> None:
    promtool = require_tool("promtool", install=INSTALL)
    running = demos[fence]
    wait_for_json(running, until)
    for text in (running.first, get(running.url)):
        checked = subprocess.run(
            [promtool, "check", "metrics"], input=text, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")


@pytest.mark.slow
def test_serves_until_interrupted(tmp_path: Path, until: Until) -> None:
    """Also when the JSON is only just there: it ends at once, with the demo's exit code, and the port is free."""
    with serving("none", tmp_path / "demo", until) as running:
        wait_for_json(running, until)
        assert running.modes[0]["violations"] > 0
        get(running.url)

        running.process.send_signal(signal.SIGINT)

        assert running.process.wait(timeout=END_S) == 0, running.log.read_text()
        with pytest.raises(urllib.error.URLError):
            get(running.url)
        with socket.socket() as again:
            again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # its last connections may linger
            again.bind(("127.0.0.1", int(running.instance.split(":")[1])))
