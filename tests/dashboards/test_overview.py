"""The committed dashboards are what the code builds, and follow the rules a Grafana reviewer would check."""

import importlib.resources
import re
from itertools import combinations
from typing import Any

import promql_parser
import pytest

from hicache_obs.dashboards.build import dashboards, text
from hicache_obs.dashboards.panels import NOT_CHECKED, SCHEMA_VERSION, Unit, series
from hicache_obs.exporters.catalogue import CATALOGUE, MetricType

BOARDS: dict[str, Any] = dashboards()
PANELS = [panel for board in BOARDS.values() for panel in board["panels"]]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
EXPRS = [target["expr"] for panel in GRAPHS for target in panel["targets"]]
TYPES = {name: metric.type for metric in CATALOGUE for name in metric.series_names}
NAMES = {name: metric.name for metric in CATALOGUE for name in metric.series_names}

each_panel = pytest.mark.parametrize("panel", GRAPHS, ids=lambda panel: panel["title"])
each_expr = pytest.mark.parametrize("expr", EXPRS, ids=range(len(EXPRS)))


def parsed(expr: str) -> promql_parser.Expr:
    """The expression with Grafana's interval macros replaced, which the grammar does not know."""
    return promql_parser.parse(expr.replace("$__rate_interval", "1m").replace("$__range", "1h"))


def selectors(expr: str) -> list[promql_parser.VectorSelector]:
    """Every metric selector of the expression."""
    found: list[promql_parser.VectorSelector] = []
    promql_parser.walk(
        parsed(expr), lambda node: found.append(node) if isinstance(node, promql_parser.VectorSelector) else None
    )
    return found


@pytest.mark.parametrize("name", BOARDS)
def test_committed_file_is_current(name: str) -> None:
    file = importlib.resources.files("hicache_obs.dashboards") / "grafana" / name

    assert file.read_text(encoding="utf-8") == text(BOARDS[name]), "python -m hicache_obs.dashboards.build"


def test_no_other_file_is_committed() -> None:
    folder = importlib.resources.files("hicache_obs.dashboards") / "grafana"

    assert {file.name for file in folder.iterdir()} == set(BOARDS)


def test_overview_identity() -> None:
    board = BOARDS["overview.json"]

    assert (board["uid"], board["schemaVersion"], board["editable"]) == (
        "hicache-obs-overview",
        SCHEMA_VERSION,
        False,
    )
    assert [panel["title"] for panel in board["panels"] if panel["type"] == "row"] == [
        "Is it safe?",
        "What does safety cost?",
        "Transfers",
        "Can I trust the detector?",
    ]


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_ids_are_unique_and_nothing_overlaps(board: Any) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    places = {panel["id"]: panel["gridPos"] for panel in board["panels"]}

    assert len(set(ids)) == len(ids)
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= 24 and p["w"] > 0 and p["h"] > 0 for p in places.values())
    for (_, a), (_, b) in combinations(places.items(), 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)


@pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
def test_variables(board: Any) -> None:
    """Asked of our own metric, so that no other exporter's label values show up."""
    variables = {v["name"]: v for v in board["templating"]["list"]}

    assert list(variables) == ["datasource", "job", "instance", "tp_rank"]
    assert (variables["datasource"]["type"], variables["datasource"]["current"]) == ("datasource", {})
    assert [v["query"]["query"] for v in variables.values() if v["type"] == "query"] == [
        "label_values(hicache_obs_build_info, job)",
        'label_values(hicache_obs_build_info{job=~"$job"}, instance)',
        'label_values(hicache_obs_build_info{job=~"$job",instance=~"$instance"}, tp_rank)',
    ]
    assert all(
        v["datasource"]["uid"] == "${datasource}" and v["multi"] and v["includeAll"]
        for v in variables.values()
        if v["type"] == "query"
    )


@each_panel
def test_panel_says_what_it_shows(panel: Any) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    used = {NAMES[s.name] for target in panel["targets"] for s in selectors(target["expr"])}
    prose, _, names = panel["description"].rpartition("Metric: " if len(used) == 1 else "Metrics: ")

    assert prose.endswith((". ", ": "))
    assert set(re.findall(r"`(\w+)`", names)) == used
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert defaults["unit"] in {unit.value for unit in Unit}
    assert defaults["noValue"]
    assert defaults["color"]["mode"] == ("palette-classic" if panel["type"] == "timeseries" else "thresholds")
    assert defaults["thresholds"]["steps"][0]["value"] is None
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@each_panel
def test_gaps_stay_gaps(panel: Any) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {"spanNulls": False})

    assert custom["spanNulls"] is False


@each_panel
def test_series_are_told_apart(panel: Any) -> None:
    """Several series need a legend; labels in it are the ones the query keeps."""
    for target in panel["targets"]:
        kept = set(re.findall(r"by \(([^)]*)\)", target["expr"]))
        labels = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
        assert labels == {label for group in kept for label in group.split(", ") if label not in ("le", "")}


@each_expr
def test_every_metric_exists(expr: str) -> None:
    assert selectors(expr)
    assert all(selector.name in NAMES for selector in selectors(expr))


@each_expr
def test_every_selector_uses_the_variables(expr: str) -> None:
    for selector in selectors(expr):
        matchers = {m.name: (m.op, m.value) for m in selector.matchers.matchers}
        for name in ("job", "instance", "tp_rank"):
            assert matchers[name] == (promql_parser.MatchOp.Re, f"${name}")


@each_expr
def test_counters_are_never_shown_raw(expr: str) -> None:
    """Only ranges of counters and histograms are read, over Grafana's own interval."""
    ranges: list[str] = []
    promql_parser.walk(
        parsed(expr),
        lambda n: ranges.append(n.vector_selector.name) if isinstance(n, promql_parser.MatrixSelector) else None,
    )

    for selector in selectors(expr):
        assert (selector.name in ranges) == (TYPES[selector.name] is not MetricType.GAUGE)
    assert set(re.findall(r"\[(.*?)\]", expr)) <= {"$__rate_interval", "$__range"}


@each_expr
def test_counts_are_whole(expr: str) -> None:
    """``increase`` extrapolates: without ``round`` Grafana shows 26.2 violations."""
    assert expr.count("increase(") == expr.count("round(")


def test_verdict_words() -> None:
    verdict = next(panel for panel in GRAPHS if panel["title"] == "Verdict")
    defaults = verdict["fieldConfig"]["defaults"]
    words = {int(value): word["text"] for value, word in defaults["mappings"][0]["options"].items()}

    assert words == {
        0: NOT_CHECKED,
        1: "SAFE",
        2: "NOT DECIDABLE",
        3: "LATENT RACES",
        4: "CONTRADICTION",
        5: "VIOLATED",
    }
    assert defaults["noValue"] == NOT_CHECKED
    assert [w["color"] for w in defaults["mappings"][0]["options"].values() if w["text"] == "SAFE"] == ["green"]


def test_a_query_on_an_unknown_metric_cannot_be_built() -> None:
    with pytest.raises(KeyError, match="hicache_obs_violations"):
        series("violations")
