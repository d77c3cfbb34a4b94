"""The page of a fleet: what all its ranks gave, as plain data, and ``render_fleet``, which makes a document of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from hicache_obs.exporters.html.document import json_markup, render_document
from hicache_obs.exporters.html.page import COLORS, Table

_SCRIPTS: Final = ("figures.js", "bars.js")
MAX_BARS: Final = 60
"""Bars of one chart."""


@dataclass(frozen=True, slots=True)
class Bar:
    """What the fences of one node, or of one rank, cost; nanoseconds."""

    name: str
    waited_ns: int
    avoidable_ns: int


@dataclass(frozen=True, slots=True)
class Defect:
    """All findings of one fingerprint, in all ranks.

    Attributes:
        name: Fingerprint.
        verdict: The worst.
        hazard: Its name.
        bad: Whether it is sure to have gone wrong.
        count: How many pairs and ranks, in words.
        text: One of them, explained; lines.
        ranks: Names of the ranks, the first ones.
        accepted: Until when and why; empty if it is not.
    """

    name: str
    verdict: str
    hazard: str
    bad: bool
    count: str
    text: str
    ranks: Sequence[str]
    accepted: str = ""


@dataclass(frozen=True, slots=True)
class Divergence:
    """Ranks of a group that decided differently: the group and the place, and each decision with who took it."""

    group: str
    place: str
    sides: Sequence[tuple[str, str]]


@dataclass(frozen=True, slots=True)
class FleetPage:
    """What the page shows, top to bottom.

    Attributes:
        sentence: Verdict and coverage; begins with one of ``COLORS`` and a colon.
        lines: Further lines on how much was looked at.
        unreadable: Ranks that could not be read; ``None`` without any. So for all tables.
        divergences, defects: Findings.
        ranks: The worst first.
        groups: What was compared.
        clocks: How far the ranks' clocks are apart.
        no_clocks: Why there are none.
        nodes: What fences cost.
        bars: The same, to be drawn.
        blind: What was not seen or not looked at.
    """

    sentence: str
    lines: Sequence[str]
    unreadable: Table | None
    divergences: Sequence[Divergence]
    defects: Sequence[Defect]
    ranks: Table
    groups: Table | None
    clocks: Table | None
    no_clocks: str
    nodes: Table | None
    bars: Sequence[Bar]
    blind: Sequence[str]

    @property
    def color(self) -> str:
        """Class of the verdict."""
        return COLORS[self.sentence.partition(":")[0]]


def render_fleet(page: FleetPage) -> str:
    """The page as one HTML document; the same for the same page.

    Raises:
        ModuleNotFoundError: ``jinja2`` or ``bokeh`` is not installed.
    """
    bars = [[bar.name, bar.waited_ns, bar.avoidable_ns] for bar in page.bars[:MAX_BARS]]
    return render_document("fleet.html.jinja", _SCRIPTS if bars else (), page=page, bars=json_markup(bars))
