"""Grafana's dashboard JSON from a few records: boards, rows, panels, variables.

Every query is built by ``series``, which refuses a name that is not in the metric catalogue and adds the
dashboard's variables.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hicache_obs.exporters.catalogue import CATALOGUE, PREFIX

Json = dict[str, object]

GRID_COLUMNS: Final = 24
SCHEMA_VERSION: Final = 41
"""Grafana 11.6; newer ones migrate it."""
NOT_CHECKED: Final = "NOT CHECKED"
NO_TRAFFIC: Final = "No traffic"

_SELECTOR: Final = 'job=~"$job",instance=~"$instance",tp_rank=~"$tp_rank"'
_DATASOURCE: Final[Json] = {"type": "prometheus", "uid": "${datasource}"}
_SERIES: Final = {name: row.name for row in CATALOGUE for name in row.series_names}


class Kind(str, enum.Enum):
    """Panel types in use; the value is Grafana's plugin id."""

    STAT = "stat"
    LINES = "timeseries"
    BARS = "bars"
    """A ``timeseries`` panel that draws bars: for counts per interval, so that 0 draws nothing."""
    BAR_GAUGE = "bargauge"


class Unit(str, enum.Enum):
    """Grafana unit ids in use."""

    COUNT = "short"
    EXACT = "locale"
    """All digits: 2,431 and not 2 K."""
    SECONDS = "s"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "cps"
    SHARE = "percentunit"
    TEXT = "none"


_QUIET_AXIS: Final = {Unit.COUNT: 1, Unit.SHARE: 0.01}
"""How far an axis reaches at least; without it, all zeros are drawn on an axis up to 100."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel and how its series are named."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True)
class Step:
    """From ``value`` on (``None``: from the lowest), the panel has ``color``."""

    value: float | None
    color: str


@dataclass(frozen=True, slots=True)
class Shown:
    """A value that is shown as a word."""

    value: int
    text: str
    color: str


@dataclass(frozen=True, slots=True)
class Panel:
    """One panel.

    Attributes:
        title: Heading.
        text: What it shows, one or two sentences; the metrics it uses are appended.
        queries: Expressions.
        unit: Unit of the values.
        grid: x, y, width, height; y counts from below the row's heading.
        kind: Panel type.
        steps: Thresholds; for a stat they give the colour.
        words: Values shown as words.
        no_value: Text when the query returns nothing.
        decimals: Fixed number of decimals.
        name_only: Show the series' name instead of its value.
    """

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: Unit
    grid: tuple[int, int, int, int]
    kind: Kind = Kind.LINES
    steps: tuple[Step, ...] = (Step(None, "green"),)
    words: tuple[Shown, ...] = ()
    no_value: str = NO_TRAFFIC
    decimals: int | None = None
    name_only: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """A heading and the panels under it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True)
class Board:
    """One dashboard."""

    uid: str
    title: str
    description: str
    rows: tuple[Row, ...]
    tags: tuple[str, ...] = field(default=("hicache-obs",))


def series(name: str, matchers: str = "") -> str:
    """Selector of our series ``name`` (prefix left out) under the dashboard's variables.

    Raises:
        KeyError: The catalogue has no such series.
    """
    full = PREFIX + name
    _ = _SERIES[full]
    return f"{full}{{{_SELECTOR}{',' if matchers else ''}{matchers}}}"


def metrics_in(exprs: Sequence[str]) -> list[str]:
    """Catalogue names used in ``exprs``, in catalogue order, ``_bucket``, ``_sum`` and ``_count`` folded."""
    text = " ".join(exprs)
    return [row.name for row in CATALOGUE if any(name + "{" in text for name in row.series_names)]


def dashboard(board: Board) -> Json:
    """Grafana's JSON of ``board``."""
    return {
        "uid": board.uid,
        "title": board.title,
        "description": board.description,
        "tags": list(board.tags),
        "schemaVersion": SCHEMA_VERSION,
        "editable": False,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "links": [_link(board.tags)],
        "annotations": {"list": []},
        "templating": {"list": _variables()},
        "panels": _placed(board.rows),
    }


def _placed(rows: Sequence[Row]) -> list[Json]:
    """All rows and panels, top to bottom, with their ids and absolute places."""
    placed: list[Json] = []
    top = 0
    for row in rows:
        place = {"x": 0, "y": top, "w": GRID_COLUMNS, "h": 1}
        heading: Json = {
            "type": "row",
            "title": row.title,
            "collapsed": False,
            "panels": [],
            "gridPos": place,
        }
        placed.append({"id": len(placed) + 1, **heading})
        top += 1
        for panel in row.panels:
            x, y, width, height = panel.grid
            place = {"x": x, "y": top + y, "w": width, "h": height}
            placed.append({"id": len(placed) + 1, "gridPos": place, **_panel(panel)})
        top += max(panel.grid[1] + panel.grid[3] for panel in row.panels)
    return placed


def _panel(panel: Panel) -> Json:
    used = metrics_in([query.expr for query in panel.queries])
    names = ", ".join(f"`{name}`" for name in used)
    graph = panel.kind in (Kind.LINES, Kind.BARS)
    return {
        "type": "timeseries" if graph else panel.kind.value,
        "title": panel.title,
        "description": f"{panel.text} {'Metric' if len(used) == 1 else 'Metrics'}: {names}",
        "datasource": _DATASOURCE,
        "targets": [_target(query, chr(ord("A") + i), graph) for i, query in enumerate(panel.queries)],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": []},
        "options": _options(panel),
    }


def _target(query: Query, ref: str, graph: bool) -> Json:
    return {
        "refId": ref,
        "datasource": _DATASOURCE,
        "editorMode": "code",
        "expr": query.expr,
        "legendFormat": query.legend or "__auto",
        "range": graph,
        "instant": not graph,
    }


def _defaults(panel: Panel) -> Json:
    graph = panel.kind in (Kind.LINES, Kind.BARS)
    defaults: Json = {
        "unit": panel.unit.value,
        "noValue": panel.no_value,
        "color": {"mode": "palette-classic" if graph else "thresholds"},
        "thresholds": {
            "mode": "absolute",
            "steps": [{"value": step.value, "color": step.color} for step in panel.steps],
        },
        "mappings": _mappings(panel.words),
    }
    if panel.decimals is not None:
        defaults["decimals"] = panel.decimals
    if graph:
        defaults["min"] = 0
        defaults["custom"] = _drawing(panel)
    if panel.kind is Kind.BAR_GAUGE:
        defaults["min"], defaults["max"] = 0, 1
    return defaults


def _drawing(panel: Panel) -> Json:
    bars = panel.kind is Kind.BARS
    drawing: Json = {
        "drawStyle": "bars" if bars else "line",
        "lineWidth": 0 if bars else 1,
        "fillOpacity": 80 if bars else 10,
        "showPoints": "never" if bars else "auto",
        "spanNulls": False,
        "stacking": {"mode": "normal" if bars else "none", "group": "A"},
    }
    if panel.unit in _QUIET_AXIS:
        drawing["axisSoftMax"] = _QUIET_AXIS[panel.unit]
    return drawing


def _mappings(words: Sequence[Shown]) -> list[Json]:
    if not words:
        return []
    options = {
        str(word.value): {"text": word.text, "color": word.color, "index": index} for index, word in enumerate(words)
    }
    return [{"type": "value", "options": options}]


def _options(panel: Panel) -> Json:
    reduce_options = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind is Kind.STAT:
        return {
            "reduceOptions": reduce_options,
            "colorMode": "background",
            "graphMode": "none",
            "justifyMode": "auto",
            "orientation": "auto",
            "textMode": "name" if panel.name_only else "value",
        }
    if panel.kind is Kind.BAR_GAUGE:
        return {
            "reduceOptions": reduce_options,
            "displayMode": "basic",
            "orientation": "horizontal",
            "showUnfilled": True,
            "valueMode": "color",
            "minVizHeight": 10,
            "minVizWidth": 0,
        }
    return {
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True, "calcs": []},
        "tooltip": {"mode": "multi", "sort": "desc"},
    }


def _variables() -> list[Json]:
    """Data source; then job, instance, rank, each asked of our own metric and narrowed by those before."""
    source = f"{PREFIX}build_info"
    datasource: Json = {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "current": {},
        "options": [],
        "refresh": 1,
        "regex": "",
        "hide": 0,
        "includeAll": False,
        "multi": False,
    }
    asked = {
        "job": f"label_values({source}, job)",
        "instance": f'label_values({source}{{job=~"$job"}}, instance)',
        "tp_rank": f'label_values({source}{{job=~"$job",instance=~"$instance"}}, tp_rank)',
    }
    labels = {"job": "Job", "instance": "Instance", "tp_rank": "TP rank"}
    return [datasource, *(_query_variable(name, labels[name], query) for name, query in asked.items())]


def _query_variable(name: str, label: str, query: str) -> Json:
    return {
        "name": name,
        "label": label,
        "type": "query",
        "datasource": _DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": f"variable-{name}"},
        "refresh": 2,
        "sort": 3 if name == "tp_rank" else 1,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"selected": True, "text": ["All"], "value": ["$__all"]},
        "options": [],
        "regex": "",
        "hide": 0,
    }


def _link(tags: Sequence[str]) -> Mapping[str, object]:
    """A menu of the other boards, keeping time range and variables."""
    return {
        "title": "hicache-obs",
        "type": "dashboards",
        "tags": list(tags),
        "asDropdown": True,
        "includeVars": True,
        "keepTime": True,
        "targetBlank": False,
        "icon": "external link",
        "url": "",
        "tooltip": "",
    }
