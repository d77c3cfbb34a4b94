"""End to end: the demo's race reaches the pager, the fence ends it, and then every query has an answer."""

from __future__ import annotations

import importlib.resources
import json
import math
import re
from typing import Any

import pytest
import yaml

pytestmark = pytest.mark.slow

FOLDER = importlib.resources.files("hicache_obs.dashboards")
BOARDS: dict[str, Any] = {
    name: json.loads((FOLDER / "grafana" / f"{name}.json").read_text()) for name in ("overview", "restore", "detector")
}
PANELS = {f"{name}/{panel['title']}": panel for name, board in BOARDS.items() for panel in board["panels"]}
QUERIES = {
    f"{name}/{target['refId']}": target["expr"] for name, panel in PANELS.items() for target in panel.get("targets", [])
}
GRAPHS = [name for name, panel in PANELS.items() if panel["type"] in ("timeseries", "bargauge")]
RULES = yaml.safe_load((FOLDER / "prometheus" / "hicache-obs-rules.yml").read_text())
ALERTS = {rule["alert"]: rule["expr"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}


def alerts(groups: list[dict[str, Any]], status: str) -> list[dict[str, Any]]:
    return [alert for group in groups for alert in group["alerts"] if alert["status"] == status]


def finite(result: list[dict[str, Any]]) -> list[float]:
    return [value for one in result if math.isfinite(value := float(one["value"][1]))]


def test_the_race_pages_once_and_the_fence_ends_it(recording: Any) -> None:
    pager = recording.webhooks["pager"]
    (fired,) = {alert["fingerprint"]: alert for alert in alerts(pager, "firing")}.values()
    (ended,) = {alert["fingerprint"]: alert for alert in alerts(pager, "resolved")}.values()

    assert fired["labels"] == {
        "alertname": "HiCacheViolation",
        "severity": "page",
        "cluster": "test",
        "namespace": "llm",
    }
    assert re.search(r"Hazards:.* waw_forward_restore \(\d+\)", fired["annotations"]["description"])
    assert fired["annotations"]["runbook_url"].endswith("/HiCacheViolation.md")
    assert ended["fingerprint"] == fired["fingerprint"]


def test_what_is_only_a_ticket_does_not_page(recording: Any) -> None:
    """The unfenced demo also leaves the fence out everywhere; the violation inhibits or precedes that ticket."""
    receivers = {
        receiver: {alert["labels"]["severity"] for group in groups for alert in group["alerts"]}
        for receiver, groups in recording.webhooks.items()
    }

    assert receivers["pager"] == {"page"}
    assert {"ticket"} >= receivers.get("tickets", set())
    assert {"warning"} >= receivers.get("warnings", set())


def concrete(expr: str, seconds: int, **chosen: str) -> str:
    """The expression as Grafana sends it, with everything selected but for what was chosen."""
    expr = expr.replace("$__range", f"{seconds}s").replace("$__rate_interval", f"{seconds}s")
    for name, value in chosen.items():
        expr = expr.replace(f"${name}", value)
    return re.sub(r"\$(cluster|namespace|pod|instance|tp_rank|pp_rank|dp_rank)", ".*", expr)


@pytest.mark.parametrize("name", QUERIES)
def test_every_panel_query_has_an_answer_in_the_fenced_run(recording: Any, name: str) -> None:
    period = recording.safe
    expr = concrete(QUERIES[name], math.ceil(period.end - period.start), instance=recording.instance)
    assert "$" not in expr

    result = recording.query(expr, period.end)

    assert result
    assert len(finite(result)) == len(result), result


@pytest.mark.parametrize("name", ALERTS)
def test_every_alert_has_something_to_compare_in_the_fenced_run(recording: Any, name: str) -> None:
    expr, compared = re.subn(r" (?:==|<|>) [\d.]+", "", ALERTS[name])
    expr = expr.replace("[15m]", "[30s]").replace("[5m]", "[30s]")

    assert compared
    assert finite(recording.query(expr, recording.safe.end))
    firing = f'ALERTS{{alertname="{name}",alertstate="firing",severity=~"page|ticket"}}'
    assert recording.query(firing, recording.safe.end) == []


@pytest.mark.parametrize("name", GRAPHS)
def test_series_are_told_apart(recording: Any, name: str) -> None:
    """With both nodes selected, each series of a panel has a name of its own, and no label of it is empty."""
    named = []
    for target in PANELS[name]["targets"]:
        for series in recording.query(concrete(target["expr"], 20), recording.safe.end):
            labels = series["metric"]
            named.append(re.sub(r"\{\{(\w+)\}\}", lambda match: labels[match[1]], target["legendFormat"]))  # noqa: B023

    assert len(set(named)) == len(named) > 0


@pytest.mark.parametrize("pod", [".*", "engine-0", "engine-1"])
def test_both_spellings_of_sglang_are_counted(recording: Any, pod: str) -> None:
    """A quarter of the prompt tokens, which each of two ranks counts: not half. One pod per spelling."""
    expr = QUERIES["overview/Cache hits and load-back (SGLang)/B"]

    (value,) = finite(recording.query(concrete(expr, 20, pod=pod), recording.safe.end))

    assert value == pytest.approx(0.25, rel=0.05)


def test_the_verdict_of_the_evening(recording: Any) -> None:
    def verdict(period: Any, instance: str) -> list[float]:
        # A second less: a sample at the very start may still be the predecessor's.
        seconds = math.floor(period.end - period.start) - 1
        return finite(recording.query(concrete(QUERIES["overview/Verdict/A"], seconds, instance=instance), period.end))

    assert verdict(recording.racy, recording.instance) == [5]
    assert verdict(recording.racy, recording.other) == [1]
    assert verdict(recording.safe, recording.instance) == [1]
