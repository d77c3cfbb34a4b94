"""The rules, their promtool tests, the Alertmanager routes and the runbooks fit together, and the real tools agree."""

from __future__ import annotations

import importlib.resources
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from hicache_obs.exporters.catalogue import CATALOGUE
from hicache_obs.exporters.metric_row import MetricType
from hicache_obs.exporters.prometheus import Metrics, render

FOLDER = importlib.resources.files("hicache_obs.dashboards")
PROMETHEUS = "apt-get install prometheus"
ALERTMANAGER = "apt-get install prometheus-alertmanager"
RULES = yaml.safe_load((FOLDER / "prometheus" / "hicache-obs-rules.yml").read_text())
ALL = [rule for group in RULES["groups"] for rule in group["rules"]]
RECORDS = {rule["record"]: rule for rule in ALL if "record" in rule}
ALERTS = {rule["alert"]: rule for rule in ALL if "alert" in rule}
TESTS = yaml.safe_load((FOLDER / "prometheus" / "hicache-obs_test.yml").read_text())["tests"]
NAMES = {name for metric in CATALOGUE for name in metric.series_names}
COUNTERS = {name for metric in CATALOGUE if metric.type is not MetricType.GAUGE for name in metric.series_names}
PAGES = {"HiCacheViolation", "HiCacheContradiction"}
TICKETS = {"HiCacheLatentRace", "HiCacheUnfencedTransfers"}

each_alert = pytest.mark.parametrize("name", ALERTS)


def run(*command: str | Path, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The Prometheus and Alertmanager files, as files."""
    for file in (FOLDER / "prometheus").iterdir():
        (tmp_path / file.name).write_text(file.read_text())
    return tmp_path


# -- the tools -----------------------------------------------------------------------------------------------


def test_promtool_accepts_the_rules(require_tool: Callable[..., Path], folder: Path) -> None:
    promtool = require_tool("promtool", install=PROMETHEUS)

    checked = run(promtool, "check", "rules", "--lint=all", "--lint-fatal", "hicache-obs-rules.yml", cwd=folder)

    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert f"{len(ALL)} rules found" in checked.stdout


def test_promtool_rejects_a_broken_rule(require_tool: Callable[..., Path], folder: Path) -> None:
    promtool = require_tool("promtool", install=PROMETHEUS)
    rules = folder / "hicache-obs-rules.yml"
    rules.write_text(rules.read_text().replace("sum by (cluster, namespace, hazard) (", "sum by (cluster (", 1))

    assert run(promtool, "check", "rules", rules).returncode != 0


def test_the_unit_tests_pass(require_tool: Callable[..., Path], folder: Path) -> None:
    promtool = require_tool("promtool", install=PROMETHEUS)

    tested = run(promtool, "test", "rules", "hicache-obs_test.yml", cwd=folder)

    assert tested.returncode == 0, tested.stdout + tested.stderr


@pytest.mark.slow
@each_alert
def test_the_unit_tests_need_each_alert(require_tool: Callable[..., Path], folder: Path, name: str) -> None:
    """An alert that never fires, and one that always does, both fail its tests; as it is, it passes them."""
    promtool = require_tool("promtool", install=PROMETHEUS)
    its_own = []
    for test in TESTS:
        cases = [case for case in test["alert_rule_test"] if case["alertname"] == name]
        if cases:
            its_own.append({**test, "alert_rule_test": cases, "promql_expr_test": []})
    body = {"rule_files": ["rules.yml"], "evaluation_interval": "30s", "tests": its_own}
    (folder / "own_test.yml").write_text(json.dumps(body))
    failed = {}
    for expr in (ALERTS[name]["expr"], "vector(1) < 0", "vector(1)"):
        alerts = [{**rule, "expr": expr} if rule.get("alert") == name else rule for rule in ALL]
        (folder / "rules.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": alerts}]}))
        failed[expr] = run(promtool, "test", "rules", "own_test.yml", cwd=folder).returncode != 0

    assert list(failed.values()) == [False, True, True]


def test_sixty_four_ranks_make_one_page(require_tool: Callable[..., Path], folder: Path) -> None:
    """Eight ranks on each of eight nodes, with everything: one page, one ticket per hazard, one warning per node."""
    promtool = require_tool("promtool", install=PROMETHEUS)
    hazard, op = 'hazard="host_reuse"', 'op="restore"'
    values = {
        f"violations_total|{hazard}": "0x9 2x60",
        f"contradictions_total|{hazard}": "0x9 1x60",
        f"latent_races_total|{hazard}": "0x9 1x60",
        f"unfenced_ops_total|{op}": "0x9 1+1x60",
        'unknown_total|reason="other"': "0+1x70",
        "records_total|": "0+90x70",
        'dropped_records_total|reason="ring_full"': "0+10x70",
        "last_analysis_timestamp_seconds|": "1x70",
        "unread_records|": "1x70",
        "sampling|": "1x70",
        "coverage_ratio|": "0.5x70",
        f"fence_wait_seconds_sum|{op}": "0+3x70",
        f"op_seconds_sum|{op}": "0+4x70",
        f"op_seconds_count|{op}": "0+60x70",
        f"oldest_pending_seconds|{op}": "60x70",
    }
    series = []
    for rank in range(64):
        node = f'cluster="c",namespace="llm",pod="p-{rank // 8}",instance="10.0.0.{rank // 8}:9464",tp_rank="{rank}"'
        for key, text in values.items():
            name, _, label = key.partition("|")
            series.append({"series": f"hicache_obs_{name}{{{node},{label}}}", "values": text})
    for node in range(8):
        labels = f'job="hicache-obs",cluster="c",namespace="llm",pod="p-{node}",instance="10.0.0.{node}:9464"'
        series.append({"series": f"up{{{labels}}}", "values": "1x30 0x40"})
    counted = {"at": "19m", "expr": 'count by (alertname) (ALERTS{alertstate="firing"})'}
    expected = {name: 1 if name in PAGES | TICKETS else 8 for name in ALERTS}
    case = {
        "interval": "30s",
        "input_series": series,
        "promql_expr_test": [
            {
                "expr": counted["expr"],
                "eval_time": counted["at"],
                "exp_samples": [
                    {"labels": f'{{alertname="{name}"}}', "value": value} for name, value in expected.items()
                ],
            }
        ],
    }
    body = {"rule_files": ["hicache-obs-rules.yml"], "evaluation_interval": "30s", "tests": [case]}
    (folder / "many_test.yml").write_text(json.dumps(body))

    tested = run(promtool, "test", "rules", "many_test.yml", cwd=folder)

    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtool_and_amtool_accept_the_examples(require_tool: Callable[..., Path], tmp_path: Path) -> None:
    promtool = require_tool("promtool", install=PROMETHEUS)
    amtool = require_tool("amtool", install=ALERTMANAGER)
    for name in ("prometheus", "compose"):
        shutil.copytree(str(FOLDER / name), tmp_path / name)

    for command in (
        [promtool, "check", "config", tmp_path / "prometheus" / "prometheus.yml"],
        [promtool, "check", "config", tmp_path / "compose" / "prometheus.yml"],
        [amtool, "check-config", tmp_path / "prometheus" / "alertmanager.yml"],
    ):
        checked = run(*command)
        assert checked.returncode == 0, checked.stdout + checked.stderr


def test_promtool_finds_every_series_in_a_scrape(require_tool: Callable[..., Path]) -> None:
    promtool = require_tool("promtool", install=PROMETHEUS)
    scrape = render(Metrics()).decode()

    checked = run(promtool, "check", "metrics", input=scrape)

    assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
    assert {line.split("{")[0] for line in scrape.splitlines() if not line.startswith("#")} == NAMES


@each_alert
def test_alertmanager_routes_by_severity(require_tool: Callable[..., Path], folder: Path, name: str) -> None:
    amtool = require_tool("amtool", install=ALERTMANAGER)
    severity = ALERTS[name]["labels"]["severity"]

    labels = (f"alertname={name}", f"severity={severity}")
    routed = run(amtool, "config", "routes", "test", "--config.file=alertmanager.yml", *labels, cwd=folder)

    assert routed.stdout.split() == [{"page": "pager", "ticket": "tickets", "warning": "warnings"}[severity]]


# -- what they say -------------------------------------------------------------------------------------------


def test_only_two_alerts_page() -> None:
    by_severity = {
        severity: {name for name, rule in ALERTS.items() if rule["labels"]["severity"] == severity}
        for severity in ("page", "ticket", "warning")
    }

    assert by_severity["page"] == PAGES
    assert by_severity["ticket"] == TICKETS
    assert by_severity["warning"] == {
        "HiCacheObsDown",
        "HiCacheObsBlind",
        "HiCacheObsStale",
        "HiCacheObsDrops",
        "HiCacheObsSampling",
        "HiCacheFenceShare",
        "HiCacheStuckTransfer",
    } == set(ALERTS) - PAGES - TICKETS  # fmt: skip


def test_an_agent_that_is_down_inhibits_the_warnings_of_its_node() -> None:
    rules = yaml.safe_load((FOLDER / "prometheus" / "alertmanager.yml").read_text())["inhibit_rules"]
    down = next(rule for rule in rules if 'alertname="HiCacheObsDown"' in rule["source_matchers"])

    assert set(down["target_matchers"]) == {
        'alertname=~"HiCache.*"',
        'severity="warning"',
        'alertname!="HiCacheObsDown"',
    }
    assert down["equal"] == ["cluster", "namespace", "pod", "instance"]
    assert not any("page" in matcher for rule in rules for matcher in rule["target_matchers"])


@each_alert
def test_an_alert_says_what_to_do(name: str) -> None:
    notes = ALERTS[name]["annotations"]
    page = FOLDER / "runbooks" / f"{name}.md"
    boards = {json.loads(file.read_text())["uid"] for file in (FOLDER / "grafana").iterdir()}

    assert set(notes) == {"summary", "description", "runbook_url", "dashboard_url"}
    assert notes["runbook_url"] == f"https://hicache-obs.example/runbooks/{name}.md"
    assert notes["dashboard_url"].removeprefix("https://hicache-obs.example/grafana/d/") in boards
    text = page.read_text().lower()
    assert text.startswith(f"# {name.lower()} ({ALERTS[name]['labels']['severity']})")
    for word in ("contain", "enforce", "flush", "drain", "cp -r", "report", "fingerprint", "replay"):
        assert word in text, word


def test_every_runbook_has_an_alert_and_is_listed() -> None:
    pages = {file.name.removesuffix(".md") for file in (FOLDER / "runbooks").iterdir()} - {"README"}
    listed = re.findall(r"\]\((\w+)\.md\)", (FOLDER / "runbooks" / "README.md").read_text())

    assert pages == set(ALERTS)
    assert sorted(listed) == sorted(ALERTS)


@pytest.mark.parametrize("rule", ALL, ids=lambda rule: rule.get("alert") or rule["record"])
def test_every_metric_of_a_rule_exists(rule: Any) -> None:
    selectors: list[promql_parser.VectorSelector] = []
    ranges: list[str] = []

    def visit(node: object) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            selectors.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            ranges.append(node.vector_selector.name)

    promql_parser.walk(promql_parser.parse(rule["expr"]), visit)

    assert selectors
    for selector in selectors:
        assert selector.name in NAMES | RECORDS.keys() | {"up"}
        assert (selector.name in COUNTERS) == (selector.name in ranges), "a counter is never compared raw"


@each_alert
def test_the_unit_tests_have_it_fire_and_stay_silent(name: str) -> None:
    cases = [one for test in TESTS for one in test.get("alert_rule_test", []) if one["alertname"] == name]

    assert any(case["exp_alerts"] for case in cases)
    assert any(not case["exp_alerts"] for case in cases)
