"""What several boards show in the same way: the verdict's words, the coverage tile, columns, labels and thresholds."""

from __future__ import annotations

from typing import Final

from hicache_obs.dashboards.panels import (
    GREEN,
    NOT_CHECKED,
    ORANGE_FROM_ONE,
    Column,
    Kind,
    Link,
    Panel,
    Query,
    Shown,
    Step,
    Unit,
    runbook,
)
from hicache_obs.dashboards.queries import coverage

VERDICTS: Final = (
    Shown(0, NOT_CHECKED, "orange"),
    Shown(1, "SAFE", "green"),
    Shown(2, "BLIND", "orange"),
    Shown(3, "LATENT RACES", "orange"),
    Shown(4, "CONTRADICTION", "red"),
    Shown(5, "VIOLATED", "red"),
)
COVERAGE_STEPS: Final = (Step(None, "red"), Step(0.99, "orange"), Step(1, "green"))
STATUS_PAGE: Final = Link("Status page: last findings, blast radius", "${scheme}://${__data.fields.Node}/", "instance")
RANK_LABELS_SHOWN: Final = (
    ("cluster", "Cluster", 75),
    ("pod", "Pod", 110),
    ("instance", "Node", 130),
    ("tp_rank", "TP", 50),
    ("pp_rank", "PP", 50),
    ("dp_rank", "DP", 50),
)
"""Columns of the rank tables and their pixels; with the values they fill a screen of 1280."""

AGE_STEPS: Final = (GREEN, Step(60, "yellow"), Step(120, "red"))
VERDICT_COLUMN: Final = Column("Verdict", Unit.TEXT, words=VERDICTS, width=110)
UNFENCED_COLUMN: Final = Column("Unfenced", Unit.EXACT, ORANGE_FROM_ONE, decimals=0, width=88)
COVERAGE_COLUMN: Final = Column("Coverage", Unit.SHARE, COVERAGE_STEPS, decimals=1, width=88)


def coverage_tile(grid: tuple[int, int, int, int]) -> Panel:
    """How much the verdict rests on."""
    return Panel(
        "Coverage",
        "How much the verdict rests on: the share of records that were analysed and not lost, times the share of "
        "checked pairs that could be judged, since start.",
        (Query(coverage()),),
        Unit.SHARE,
        grid,
        Kind.STAT,
        COVERAGE_STEPS,
        no_value=NOT_CHECKED,
        decimals=1,
        links=(runbook("HiCacheObsBlind"),),
    )
