"""What a board is made of: rows, panels, columns, thresholds. Data only; ``grafana`` turns it into Grafana's JSON."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Final

NOT_CHECKED: Final = "NOT CHECKED"
NO_TRAFFIC: Final = "No traffic"
NO_TRACES: Final = "No traces"
NOT_RUNNING: Final = "Not running"
NOTHING_COLORS: Final = {NOT_CHECKED: "orange", NO_TRAFFIC: "blue", NO_TRACES: "blue", NOT_RUNNING: "orange"}
"""Colour of a tile without value. Grafana would take that of the lowest threshold: green."""


class Kind(str, enum.Enum):
    """Panel types in use; the value is Grafana's plugin id."""

    STAT = "stat"
    LINES = "timeseries"
    BARS = "bars"
    """A ``timeseries`` panel that draws bars: for counts per interval, so that 0 draws nothing."""
    BAR_GAUGE = "bargauge"
    TABLE = "table"
    """One row per rank (or per hazard), one column per query."""

    @property
    def graph(self) -> bool:
        """Draws values over time."""
        return self in (Kind.LINES, Kind.BARS)


class Unit(str, enum.Enum):
    """Grafana unit ids in use."""

    EXACT = "locale"
    """All digits: 2,431 and not 2 K; an axis that rounds to whole numbers would say 1 K twice."""
    SECONDS = "s"
    BYTES_PER_SECOND = "Bps"
    PER_SECOND = "cps"
    SHARE = "percentunit"
    TEXT = "none"


QUIET_AXIS: Final = {Unit.EXACT: 1, Unit.SHARE: 0.01}
"""How far an axis reaches at least; without it, all zeros are drawn on an axis up to 100."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel, and how its series are named and coloured (empty: by the palette)."""

    expr: str
    legend: str = ""
    color: str = ""


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


GREEN: Final = Step(None, "green")
NEUTRAL: Final = (Step(None, "blue"),)
RED_FROM_ONE: Final = (GREEN, Step(1, "red"))
ORANGE_FROM_ONE: Final = (GREEN, Step(1, "orange"))


@dataclass(frozen=True, slots=True)
class Column:
    """One value column of a table.

    Attributes:
        title: Heading.
        unit: Unit of the values.
        steps: Thresholds; with more than one step the cell takes their colour.
        words: Values shown as words.
        decimals: Fixed number of decimals.
        width: Pixels.
    """

    title: str
    unit: Unit
    steps: tuple[Step, ...] = NEUTRAL
    words: tuple[Shown, ...] = ()
    decimals: int | None = None
    width: int = 100


@dataclass(frozen=True, slots=True)
class Link:
    """Where a panel, or a label's cell in a table, leads to."""

    title: str
    url: str
    label: str = ""
    """Table only: the label whose cells carry the link."""


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
        exemplars: Ask for exemplars, the dots that lead to a trace.
        links: Where the panel leads to.
        labels: Table only: (label, heading, pixels) left to right, before the value columns; other labels are left out.
        columns: Table only: one per query; the first sorts the rows, highest on top.
    """

    title: str
    text: str
    queries: tuple[Query, ...]
    unit: Unit
    grid: tuple[int, int, int, int]
    kind: Kind = Kind.LINES
    steps: tuple[Step, ...] = (GREEN,)
    words: tuple[Shown, ...] = ()
    no_value: str = NO_TRAFFIC
    decimals: int | None = None
    name_only: bool = False
    exemplars: bool = False
    links: tuple[Link, ...] = ()
    labels: tuple[tuple[str, str, int], ...] = ()
    columns: tuple[Column, ...] = ()


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


def runbook(alert: str) -> Link:
    """The runbook page of ``alert``; the dashboard's hidden variable says where the pages are served."""
    return Link(f"Runbook: {alert}", f"${{runbooks}}/{alert}.md")
