"""The committed files are what the code builds, and the boards follow the rules a Grafana reviewer would check."""

import importlib.resources
import json
import re
import sys
from itertools import combinations
from typing import Any

import promql_parser
import pytest

from hicache_obs.dashboards.common import VERDICTS
from hicache_obs.dashboards.panels import NOT_CHECKED, Unit
from hicache_obs.dashboards.queries import VARIABLES, series
from hicache_obs.exporters.catalogue import CATALOGUE
from hicache_obs.exporters.metric_row import MetricType

FOLDER = importlib.resources.files("hicache_obs.dashboards")
BOARDS: dict[str, Any] = {
    file.name: json.loads(file.read_text(encoding="utf-8")) for file in (FOLDER / "grafana").iterdir()
}
PANELS = [panel for board in BOARDS.values() for panel in board["panels"]]
GRAPHS = [panel for panel in PANELS if panel["type"] != "row"]
EXPRS = [target["expr"] for panel in GRAPHS for target in panel["targets"]]
TYPES = {name: metric.type for metric in CATALOGUE for name in metric.series_names}
NAMES = {name: metric.name for metric in CATALOGUE for name in metric.series_names}

SGLANG = re.compile(r"sglang[:_](\w+)")

each_board = pytest.mark.parametrize("board", BOARDS.values(), ids=BOARDS)
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


@pytest.mark.skipif(sys.version_info < (3, 11), reason="python version: grafana-foundation-sdk needs 3.11")
def test_committed_files_are_current() -> None:
    from hicache_obs.dashboards.build import files

    made = files()

    assert {name: (FOLDER / name).read_text(encoding="utf-8") for name in made} == made
    assert {name.removeprefix("grafana/") for name in made if name.startswith("grafana/")} == set(BOARDS)


@each_board
def test_identity(board: Any) -> None:
    assert board["uid"].startswith("hicache-obs-")
    assert (board["schemaVersion"], board["editable"], board["tags"]) == (41, False, ["hicache-obs"])
    assert board["title"]
    assert board["description"]


def test_identities_differ() -> None:
    assert len({board["uid"] for board in BOARDS.values()}) == len(BOARDS) == 3


@each_board
def test_ids_are_unique_and_nothing_overlaps(board: Any) -> None:
    ids = [panel["id"] for panel in board["panels"]]
    places = {panel["id"]: panel["gridPos"] for panel in board["panels"]}

    assert len(set(ids)) == len(ids)
    assert all(p["x"] >= 0 and p["x"] + p["w"] <= 24 and p["w"] > 0 and p["h"] > 0 for p in places.values())
    for (_, a), (_, b) in combinations(places.items(), 2):
        apart_x = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        apart_y = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert apart_x or apart_y, (a, b)


@each_board
def test_variables(board: Any) -> None:
    """Asked of our own metric, so that no other exporter's label values show up; each narrowed by those before."""
    variables = {v["name"]: v for v in board["templating"]["list"]}
    asked = [v for v in variables.values() if v["type"] == "query"]
    matchers = [f'{name}=~"${name}"' for name in VARIABLES]

    assert list(variables) == ["datasource", *VARIABLES, "runbooks", "traces", "scheme"]
    assert (variables["datasource"]["type"], "current" in variables["datasource"]) == ("datasource", False)
    assert [v["query"]["query"] for v in asked] == [
        f"label_values(hicache_obs_build_info{{{','.join(matchers[:place])}}}, {name})".replace("{}", "")
        for place, name in enumerate(VARIABLES)
    ]
    assert all(v["datasource"]["uid"] == "${datasource}" and v["multi"] and v["includeAll"] for v in asked)
    assert [v["hide"] for v in variables.values() if v["type"] == "textbox"] == [2, 2, 2]


@each_board
def test_findings_and_alerts_are_marked(board: Any) -> None:
    findings, alerts = board["annotations"]["list"]

    assert {s.name for s in selectors(findings["expr"])} == {
        f"hicache_obs_{name}_total" for name in ("violations", "contradictions", "latent_races")
    }
    assert 'alertname=~"HiCache.*"' in alerts["expr"]
    assert all(
        a["enable"] and a["datasource"]["uid"] == "${datasource}" and a["titleFormat"] for a in (findings, alerts)
    )


@each_board
def test_links_lead_to_runbooks_that_exist(board: Any) -> None:
    links = [link for panel in board["panels"] for link in panel.get("links", [])]
    names = {link["url"].removeprefix("${runbooks}/") for link in links}

    assert names
    assert all((FOLDER / "runbooks" / name).is_file() for name in names)
    assert [link["title"] for link in board["links"]] == ["hicache-obs", "Runbooks", "Traces"]


def test_the_ranks_lead_to_the_status_page_and_the_drill_down() -> None:
    table = next(panel for panel in GRAPHS if panel["title"] == "Ranks, worst first")
    links = {
        override["matcher"]["options"]: link["url"]
        for override in table["fieldConfig"]["overrides"]
        for one in override["properties"]
        if one["id"] == "links"
        for link in one["value"]
    }

    assert links["Node"] == "${scheme}://${__data.fields.Node}/"
    assert links["TP"].startswith(f"/d/{BOARDS['restore.json']['uid']}?")
    assert table["options"]["sortBy"] == [{"displayName": "Verdict", "desc": True}]


def test_a_wait_shows_its_exemplars() -> None:
    marked = {panel["title"] for panel in GRAPHS for target in panel["targets"] if target.get("exemplar")}

    assert marked >= {"Fence wait", "Fence wait by rank, p99", "Layer wait"}


def shown_name(name: str) -> str:
    """The metric's name as descriptions have it."""
    found = SGLANG.fullmatch(name)
    return f"sglang:{found[1]}" if found else NAMES[name]


@each_panel
def test_panel_says_what_it_shows(panel: Any) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    used = {shown_name(s.name) for target in panel["targets"] for s in selectors(target["expr"])}
    prose, _, names = panel["description"].rpartition("Metric: " if len(used) == 1 else "Metrics: ")

    assert prose.endswith((". ", ": "))
    assert set(re.findall(r"`([\w:]+)`", names)) == used
    assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert all(target["datasource"] == panel["datasource"] for target in panel["targets"])
    assert defaults["unit"] in {unit.value for unit in Unit}
    assert defaults["noValue"]
    assert defaults["color"]["mode"] == ("palette-classic" if panel["type"] == "timeseries" else "thresholds")
    assert defaults["thresholds"]["steps"][0]["value"] is None
    assert ("color-background" in str(panel["fieldConfig"]["overrides"])) == (panel["type"] == "table")
    assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


@each_panel
def test_gaps_stay_gaps(panel: Any) -> None:
    custom = panel["fieldConfig"]["defaults"].get("custom", {"spanNulls": False})

    assert custom["spanNulls"] is False


@each_expr
def test_every_metric_exists(expr: str) -> None:
    assert selectors(expr)
    assert all(selector.name in NAMES or SGLANG.fullmatch(selector.name) for selector in selectors(expr))


@each_expr
def test_every_selector_uses_the_variables(expr: str) -> None:
    """SGLang's endpoint is another than the agent's: only the place can narrow it."""
    for selector in selectors(expr):
        matchers = {m.name: (m.op, m.value) for m in selector.matchers.matchers}
        for name in VARIABLES[:3] if SGLANG.fullmatch(selector.name) else VARIABLES:
            assert matchers[name] == (promql_parser.MatchOp.Re, f"${name}")


def test_sglang_is_asked_for_in_both_spellings() -> None:
    names = [s.name for expr in EXPRS for s in selectors(expr) if SGLANG.fullmatch(s.name)]

    assert len(names) == 6
    assert {name for name in names if ":" in name} == {name.replace("_", ":", 1) for name in names if ":" not in name}


@each_expr
def test_counters_are_never_shown_raw(expr: str) -> None:
    """Only ranges of counters and histograms are read, over Grafana's own interval."""
    ranges: list[str] = []
    promql_parser.walk(
        parsed(expr),
        lambda n: ranges.append(n.vector_selector.name) if isinstance(n, promql_parser.MatrixSelector) else None,
    )

    for selector in selectors(expr):
        if SGLANG.fullmatch(selector.name):
            assert (selector.name in ranges) == selector.name.endswith("_total")
        elif TYPES[selector.name] is not MetricType.GAUGE:
            assert selector.name in ranges
    assert set(re.findall(r"\[(.*?)\]", expr)) <= {"$__rate_interval", "$__range"}


@each_expr
def test_counts_are_whole(expr: str) -> None:
    """``increase`` extrapolates: without ``round`` Grafana shows 26.2 violations."""
    assert expr.count("increase(") == expr.count("round(")


def test_verdict_words() -> None:
    verdict = next(panel for panel in GRAPHS if panel["title"] == "Verdict")
    defaults = verdict["fieldConfig"]["defaults"]
    words = {int(value): (word["text"], word["color"]) for value, word in defaults["mappings"][0]["options"].items()}

    assert words == {word.value: (word.text, word.color) for word in VERDICTS}
    assert words == {
        0: (NOT_CHECKED, "orange"),
        1: ("SAFE", "green"),
        2: ("BLIND", "orange"),
        3: ("LATENT RACES", "orange"),
        4: ("CONTRADICTION", "red"),
        5: ("VIOLATED", "red"),
    }
    assert defaults["noValue"] == NOT_CHECKED


def test_a_query_on_an_unknown_metric_cannot_be_built() -> None:
    with pytest.raises(KeyError, match="hicache_obs_violations"):
        series("violations")
