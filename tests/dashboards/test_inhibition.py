"""A real Alertmanager with the committed routes: what an agent that is down, and a violation, keep quiet."""

from __future__ import annotations

import importlib.resources
import json
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

FOLDER = importlib.resources.files("hicache_obs.dashboards") / "prometheus"
ALERTS = {
    rule["alert"]: rule["labels"]["severity"]
    for group in yaml.safe_load((FOLDER / "hicache-obs-rules.yml").read_text())["groups"]
    for rule in group["rules"]
    if "alert" in rule
}
DEADLINE_S = 60
DOWN, VIOLATION = "HiCacheObsDown", "HiCacheViolation"
OF_A_NODE = {name for name, severity in ALERTS.items() if severity == "warning"} - {DOWN}
OF_LAST, LAST = min(OF_A_NODE), "last"
"""A warning of a node that no test is about, and that node."""

Post = Callable[[list[dict[str, str]]], set[tuple[str, str]]]


def alert(name: str, **labels: str) -> dict[str, str]:
    return {"alertname": name, "severity": ALERTS.get(name, "warning"), "cluster": "c", **labels}


def on_node(name: str, node: str) -> dict[str, str]:
    return alert(name, namespace="llm", pod=f"p-{node}", instance=f"{node}:9464")


@pytest.fixture(scope="module")
def post(
    require_tool: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory, free_port: Callable[[], int]
) -> Iterator[Post]:
    """``post(alerts)``: those that an Alertmanager which has nothing else inhibits, by name and node."""
    program = require_tool("prometheus-alertmanager", install="apt-get install prometheus-alertmanager")
    folder = tmp_path_factory.mktemp("inhibition")
    (folder / "alertmanager.yml").write_text((FOLDER / "alertmanager.yml").read_text())
    url = f"http://127.0.0.1:{free_port()}"
    options = [f"--web.listen-address={url.removeprefix('http://')}", "--cluster.listen-address="]
    command = [program, "--config.file=alertmanager.yml", "--storage.path=data", *options]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)

    def call(body: list[dict[str, Any]] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{url}/api/v2/alerts", data, {"Content-Type": "application/json"})
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return json.loads(answer.read() or b"[]")
            except urllib.error.URLError:  # still starting
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < deadline
                time.sleep(0.1)

    def inhibited(count: int) -> set[tuple[str, str]]:
        known = call()
        assert len(known) == count
        return {
            (one["labels"]["alertname"], one["labels"].get("instance", ""))
            for one in known
            if one["status"]["inhibitedBy"]
        }

    def send(alerts: list[dict[str, str]]) -> set[tuple[str, str]]:
        # The inhibitor learns of alerts behind the answer, in their order: it has seen all once it has seen the last.
        alerts = [*alerts, on_node(OF_LAST, LAST), on_node(DOWN, LAST)]
        call([{"labels": labels} for labels in alerts])
        try:
            deadline, found, same = time.monotonic() + DEADLINE_S, inhibited(len(alerts)), 0
            while same < 5 or (OF_LAST, f"{LAST}:9464") not in found:
                assert time.monotonic() < deadline, found
                time.sleep(0.05)
                before, found = found, inhibited(len(alerts))
                same = same + 1 if found == before else 0
            return {(name, instance) for name, instance in found if instance != f"{LAST}:9464"}
        finally:
            past = "2020-01-01T00:00:00Z"
            call([{"labels": labels, "startsAt": past, "endsAt": past} for labels in alerts])

    yield send
    process.kill()
    process.wait()


def test_an_agent_that_is_down_silences_the_warnings_of_its_own_node(post: Post) -> None:
    quiet = post([on_node(DOWN, "a"), *(on_node(name, node) for name in OF_A_NODE for node in "ab")])

    assert quiet == {(name, "a:9464") for name in OF_A_NODE}
    assert len(OF_A_NODE) == 6


def test_it_silences_no_page_no_ticket_and_nobody_elses_alert(post: Post) -> None:
    summed = [alert(name, namespace="llm") for name in ALERTS if name not in OF_A_NODE | {DOWN, VIOLATION}]

    assert post([on_node(DOWN, "a"), *summed, on_node("DiskFull", "a")]) == set()
    assert post([on_node(DOWN, "a"), alert(VIOLATION, namespace="llm")]) == set()


def test_no_target_at_all_silences_nothing(post: Post) -> None:
    """``absent`` has no labels of a node."""
    assert post([alert(DOWN), *(on_node(name, "a") for name in OF_A_NODE)]) == set()


def test_a_violation_silences_the_tickets_of_its_namespace(post: Post) -> None:
    tickets = {name for name, severity in ALERTS.items() if severity == "ticket"}
    there = [alert(name, namespace="other", instance="other") for name in tickets]

    quiet = post([alert(VIOLATION, namespace="llm"), *(alert(name, namespace="llm") for name in tickets), *there])

    assert quiet == {(name, "") for name in tickets}
    assert len(tickets) == 2
