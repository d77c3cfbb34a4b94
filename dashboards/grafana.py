"""Grafana's dashboard JSON of a board, built with ``grafana-foundation-sdk`` (extra ``dev``, not needed to run)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final, TypeVar

from grafana_foundation_sdk.builders import bargauge, common, dashboard, prometheus, stat, table, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as common_models
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import prometheus as prometheus_models

from hicache_obs.dashboards.addresses import RUNBOOKS, SCHEME
from hicache_obs.dashboards.panels import (
    NOTHING_COLORS,
    QUIET_AXIS,
    Board,
    Column,
    Kind,
    Link,
    Panel,
    Query,
    Row,
    Shown,
    Step,
)
from hicache_obs.dashboards.queries import VARIABLES, metrics_in, series
from hicache_obs.exporters.catalogue import PREFIX

Json = dict[str, object]

GRID_COLUMNS: Final = 24
SCHEMA_VERSION: Final = 41
"""Grafana 11.6, the version the pinned SDK describes; newer ones migrate it."""
DATASOURCE: Final = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
TRACES: Final = "/explore"
"""Where the menu's trace link leads; the hidden variable ``traces`` overrides it."""

NO_CELL: Final = "–"
"""A cell without value."""

LABELS: Final = {
    "cluster": "Cluster",
    "namespace": "Namespace",
    "pod": "Pod",
    "instance": "Node",
    "tp_rank": "TP rank",
    "pp_rank": "PP rank",
    "dp_rank": "DP rank",
}


B = TypeVar("B", timeseries.Panel, stat.Panel, bargauge.Panel, table.Panel)


def dashboard_json(board: Board) -> Json:
    """Grafana's JSON of ``board``."""
    builder = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.description)
        .tags(list(board.tags))
        .readonly()
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .links([_menu(board.tags), _link("Runbooks", "${runbooks}/"), _link("Traces", "${traces}")])
        .variables(_variables())
    )
    _place(builder, board.rows)
    built: Json = json.loads(JSONEncoder().encode(builder.build()))
    # What the SDK of this schema cannot say: an annotation's text, and its own schema version for imports.
    built["annotations"] = {"list": _annotations()}
    built["schemaVersion"] = SCHEMA_VERSION
    return built


# -- layout --------------------------------------------------------------------------------------------------


def _place(builder: dashboard.Dashboard, rows: Sequence[Row]) -> None:
    """All rows and panels, top to bottom, with their ids and absolute places."""
    top, number = 0, 0
    for row in rows:
        number += 1
        heading = dashboard.Row(row.title).id(number).collapsed(False)
        builder.with_row(heading.grid_pos(models.GridPos(h=1, w=GRID_COLUMNS, x=0, y=top)))
        top += 1
        for panel in row.panels:
            number += 1
            x, y, width, height = panel.grid
            built = _panel(panel)
            built.id_val = number
            # The builder moves a panel at (0, 0); top is never 0 here.
            built.grid_pos = models.GridPos(h=height, w=width, x=x, y=top + y)
            builder.with_panel(_Built(built))
        top += max(panel.grid[1] + panel.grid[3] for panel in row.panels)


class _Built:
    """A panel that is built already, in the shape the SDK's ``with_panel`` takes."""

    def __init__(self, panel: models.Panel) -> None:
        self._panel = panel

    def build(self) -> models.Panel:
        return self._panel


# -- panels --------------------------------------------------------------------------------------------------


def _panel(panel: Panel) -> models.Panel:
    if panel.kind is Kind.TABLE:
        return _table(_common(table.Panel(), panel), panel).build()
    if panel.kind is Kind.STAT:
        return _stat(_common(stat.Panel(), panel), panel).build()
    if panel.kind is Kind.BAR_GAUGE:
        return _bar_gauge(_common(bargauge.Panel(), panel)).build()
    return _graph(_common(timeseries.Panel(), panel), panel).build()


def _common(builder: B, panel: Panel) -> B:
    """What every panel has."""
    used = metrics_in([query.expr for query in panel.queries])
    names = ", ".join(f"`{name}`" for name in used)
    mode = models.FieldColorModeId.PALETTE_CLASSIC if panel.kind.graph else models.FieldColorModeId.THRESHOLDS
    builder.title(panel.title)
    builder.description(f"{panel.text} {'Metric' if len(used) == 1 else 'Metrics'}: {names}")
    builder.datasource(DATASOURCE)
    builder.targets([_target(query, _ref(place), panel) for place, query in enumerate(panel.queries)])
    builder.unit(panel.unit.value).no_value(panel.no_value)
    builder.color_scheme(dashboard.FieldColor().mode(mode))
    builder.thresholds(_thresholds(panel.steps))
    if panel.decimals is not None:
        builder.decimals(panel.decimals)
    builder.links([_link(link.title, link.url) for link in panel.links if not link.label])
    return builder


def _ref(place: int) -> str:
    """Grafana's name of the query in this place: A, B, …"""
    return chr(ord("A") + place)


def _target(query: Query, ref: str, panel: Panel) -> prometheus.Dataquery:
    target = prometheus.Dataquery().expr(query.expr).ref_id(ref).datasource(DATASOURCE)
    target.editor_mode(prometheus_models.QueryEditorMode.CODE).legend_format(query.legend or "__auto")
    if panel.kind is Kind.TABLE:
        target.format(prometheus_models.PromQueryFormat.TABLE)
    if panel.exemplars:
        target.exemplar(True)
    return target.range() if panel.kind.graph else target.instant()


def _graph(builder: timeseries.Panel, panel: Panel) -> timeseries.Panel:
    bars = panel.kind is Kind.BARS
    builder.min(0)
    builder.draw_style(common_models.GraphDrawStyle.BARS if bars else common_models.GraphDrawStyle.LINE)
    builder.line_width(0 if bars else 1).fill_opacity(80 if bars else 10).span_nulls(False)
    builder.show_points(common_models.VisibilityMode.NEVER if bars else common_models.VisibilityMode.AUTO)
    stacking = common_models.StackingMode.NORMAL if bars else common_models.StackingMode.NONE
    builder.stacking(common.StackingConfig().mode(stacking).group("A"))
    for query in panel.queries:
        if query.color:
            fixed = {"mode": "fixed", "fixedColor": query.color}
            builder.override_by_name(query.legend, [_property("color", fixed)])
    if panel.unit in QUIET_AXIS:
        builder.axis_soft_max(QUIET_AXIS[panel.unit])
    if len(panel.steps) > 1 and not bars:
        style = common.GraphThresholdsStyleConfig().mode(common_models.GraphThresholdsStyleMode.DASHED)
        builder.thresholds_style(style)
    builder.legend(
        common.VizLegendOptions()
        .display_mode(common_models.LegendDisplayMode.LIST)
        .placement(common_models.LegendPlacement.BOTTOM)
        .show_legend(True)
        .calcs([])
    )
    tooltip = common.VizTooltipOptions().mode(common_models.TooltipDisplayMode.MULTI)
    return builder.tooltip(tooltip.sort(common_models.SortOrder.DESCENDING))


def _last_value() -> common.ReduceDataOptions:
    return common.ReduceDataOptions().calcs(["lastNotNull"]).fields("").values(False)


def _stat(builder: stat.Panel, panel: Panel) -> stat.Panel:
    mode = common_models.BigValueTextMode
    nothing = models.ValueMappingResult(text=panel.no_value, color=NOTHING_COLORS[panel.no_value])
    builder.mappings(_mappings(panel.words, nothing))
    builder.reduce_options(_last_value())
    builder.color_mode(common_models.BigValueColorMode.BACKGROUND)
    builder.graph_mode(common_models.BigValueGraphMode.NONE)
    builder.justify_mode(common_models.BigValueJustifyMode.AUTO)
    builder.orientation(common_models.VizOrientation.AUTO)
    return builder.text_mode(mode.NAME if panel.name_only else mode.VALUE)


def _bar_gauge(builder: bargauge.Panel) -> bargauge.Panel:
    builder.min(0).max(1).reduce_options(_last_value())
    builder.display_mode(common_models.BarGaugeDisplayMode.BASIC)
    builder.value_mode(common_models.BarGaugeValueMode.COLOR)
    builder.orientation(common_models.VizOrientation.HORIZONTAL)
    return builder.show_unfilled(True).min_viz_height(10).min_viz_width(0)


def _table(builder: table.Panel, panel: Panel) -> table.Panel:
    """Rows joined by their labels, one value column per query, worst first."""
    values = [f"Value #{_ref(place)}" for place in range(len(panel.queries))]
    order = [*(label for label, _, _ in panel.labels), *values]
    renamed = {label: title for label, title, _ in panel.labels}
    renamed.update({value: column.title for value, column in zip(values, panel.columns, strict=True)})
    builder.with_transformation(models.DataTransformerConfig(id_val="merge", options={}))
    builder.with_transformation(
        models.DataTransformerConfig(
            id_val="organize",
            options={
                "excludeByName": dict.fromkeys(["Time", *(name for name in VARIABLES if name not in renamed)], True),
                "indexByName": {name: place for place, name in enumerate(order)},
                "renameByName": renamed,
            },
        )
    )
    builder.sort_by([common.TableSortByFieldState().display_name(c.title).desc(True) for c in panel.columns[:1]])
    builder.show_header(True).cell_height(common_models.TableCellHeight.SM)
    for label, title, width in panel.labels:
        properties = [_property("custom.width", width)]
        links = [_data_link(link) for link in panel.links if link.label == label]
        if links:
            properties.append(_property("links", links))
        builder.override_by_name(title, properties)
    for column in panel.columns:
        builder.override_by_name(column.title, _column(column))
    return builder


def _column(column: Column) -> list[models.DynamicConfigValue]:
    properties = [
        _property("unit", column.unit.value),
        _property("thresholds", _thresholds(column.steps).build()),
        _property("mappings", _mappings(column.words, models.ValueMappingResult(text=NO_CELL, color="transparent"))),
        _property("custom.width", column.width),
    ]
    if column.decimals is not None:
        properties.append(_property("decimals", column.decimals))
    if len(column.steps) > 1 or column.words:
        properties.append(_property("custom.cellOptions", {"type": "color-background", "mode": "basic"}))
    return properties


def _property(name: str, value: object) -> models.DynamicConfigValue:
    return models.DynamicConfigValue(id_val=name, value=value)


def _thresholds(steps: Sequence[Step]) -> dashboard.ThresholdsConfig:
    made = [models.Threshold(value=step.value, color=step.color) for step in steps]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(made)


def _mappings(words: Sequence[Shown], nothing: models.ValueMappingResult) -> list[models.ValueMapping]:
    """Values as words, and what is shown where there is no value."""
    absent = models.DashboardSpecialValueMapOptions(match=models.SpecialValueMatch.NULL_AND_NAN, result=nothing)
    named = {
        str(word.value): models.ValueMappingResult(text=word.text, color=word.color, index=index)
        for index, word in enumerate(words)
    }
    return [*([models.ValueMap(options=named)] if words else []), models.SpecialValueMap(options=absent)]


# -- links, variables, annotations ---------------------------------------------------------------------------


def _menu(tags: Sequence[str]) -> dashboard.DashboardLink:
    """A menu of the other boards, keeping time range and variables."""
    link = dashboard.DashboardLink("hicache-obs").type(models.DashboardLinkType.DASHBOARDS).tags(list(tags))
    return link.as_dropdown(True).include_vars(True).keep_time(True).icon("external link")


def _link(title: str, url: str) -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(title).type(models.DashboardLinkType.LINK).url(url)
    return link.target_blank(True).icon("external link")


def _data_link(link: Link) -> Json:
    return {"title": link.title, "url": link.url, "targetBlank": True}


def _variables() -> list[dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.TextBoxVariable]:
    """Data source; each label, asked of our own metric and narrowed by those before; hidden, what links are made of."""
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    asked: list[dashboard.DatasourceVariable | dashboard.QueryVariable | dashboard.TextBoxVariable] = [source]
    narrowed: list[str] = []
    for name in VARIABLES:
        matchers = f"{{{','.join(narrowed)}}}" if narrowed else ""
        asked.append(_query_variable(name, f"label_values({PREFIX}build_info{matchers}, {name})"))
        narrowed.append(f'{name}=~"${name}"')
    for name, value in (("runbooks", RUNBOOKS), ("traces", TRACES), ("scheme", SCHEME)):
        hidden = dashboard.TextBoxVariable(name).default_value(value)
        asked.append(hidden.hide(models.VariableHide.HIDE_VARIABLE))
    return asked


def _query_variable(name: str, query: str) -> dashboard.QueryVariable:
    rank = name.endswith("_rank")
    return (
        dashboard.QueryVariable(name)
        .label(LABELS[name])
        .datasource(DATASOURCE)
        .query({"query": query, "refId": f"variable-{name}"})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(models.VariableSort.NUMERICAL_ASC if rank else models.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(models.VariableOption(selected=True, text=["All"], value=["$__all"]))
    )


def _annotations() -> list[Json]:
    """A mark where findings appear and where one of our alerts fires."""
    new = [f"(sum by (hazard) (increase({series(name)}[$__rate_interval])) > 0)" for name in _MARKED]
    findings, alerts = " or ".join(new), 'ALERTS{alertname=~"HiCache.*",alertstate="firing",cluster=~"$cluster"}'
    return [
        _annotation("Findings", findings, "red", "{{hazard}}"),
        _annotation("Alerts", alerts, "orange", "{{alertname}}"),
    ]


_MARKED: Final = ("violations_total", "contradictions_total", "latent_races_total")


def _annotation(name: str, expr: str, color: str, title: str) -> Json:
    built = dashboard.AnnotationQuery().name(name).datasource(DATASOURCE).enable(True).icon_color(color).expr(expr)
    made: Json = json.loads(JSONEncoder().encode(built.build()))
    return {**made, "titleFormat": title}
