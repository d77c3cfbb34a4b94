"""The detector board: can the verdict be trusted, and what does watching cost."""

from __future__ import annotations

from typing import Final

from hicache_obs.dashboards.common import AGE_STEPS, coverage_tile
from hicache_obs.dashboards.panels import (
    GREEN,
    NEUTRAL,
    NO_TRACES,
    NOT_CHECKED,
    NOT_RUNNING,
    ORANGE_FROM_ONE,
    RED_FROM_ONE,
    Board,
    Column,
    Kind,
    Panel,
    Query,
    Row,
    Shown,
    Step,
    Unit,
    runbook,
)
from hicache_obs.dashboards.queries import RANK, RANK_NAME, events, rate, series, total, total_if

_AGE: Final = f"time() - ({series('last_analysis_timestamp_seconds')} > 0)"

_ALIVE: Final = Row(
    "Is it alive?",
    (
        Panel(
            "Last analysis",
            "Age of the last analysis on the rank where it is oldest.",
            (Query(f"max({_AGE})"),),
            Unit.SECONDS,
            (0, 0, 4, 4),
            Kind.STAT,
            AGE_STEPS,
            no_value=NOT_CHECKED,
            decimals=0,
            links=(runbook("HiCacheObsStale"),),
        ),
        Panel(
            "Clock error",
            "Largest uncertainty of device times on the host clock.",
            (Query(f"max({series('clock_error_seconds')}) and on () ({total('records_total')} > 0)"),),
            Unit.SECONDS,
            (0, 4, 4, 4),
            Kind.STAT,
            (GREEN, Step(1e-4, "yellow"), Step(1e-3, "red")),
            no_value=NOT_CHECKED,
        ),
        Panel(
            "Ranks watched",
            "Ranks that report, of the selected nodes.",
            (Query(f"count({series('build_info')})"),),
            Unit.EXACT,
            (4, 0, 4, 4),
            Kind.STAT,
            NEUTRAL,
            no_value=NOT_RUNNING,
            decimals=0,
            links=(runbook("HiCacheObsDown"),),
        ),
        Panel(
            "Version",
            "hicache-obs version and observed engine.",
            (Query(f"max by (version, engine) ({series('build_info')})", "{{version}} on {{engine}}"),),
            Unit.TEXT,
            (4, 4, 4, 4),
            Kind.STAT,
            NEUTRAL,
            no_value=NOT_RUNNING,
            name_only=True,
        ),
        Panel(
            "Records analysed",
            "Records per second, by node.",
            (Query(rate("records_total", "instance"), "{{instance}}"),),
            Unit.PER_SECOND,
            (8, 0, 8, 8),
            no_value=NOT_CHECKED,
        ),
        Panel(
            "Last analysis by rank",
            "Age of the last analysis; it grows while nothing is analysed.",
            (Query(_AGE, RANK_NAME),),
            Unit.SECONDS,
            (16, 0, 8, 8),
            steps=AGE_STEPS,
            no_value=NOT_CHECKED,
            links=(runbook("HiCacheObsStale"),),
        ),
    ),
)

_MISSED: Final = Row(
    "What does it miss?",
    (
        coverage_tile((0, 0, 4, 4)),
        Panel(
            "Records dropped",
            "Records lost since start.",
            (Query(total_if("records_total", "dropped_records_total")),),
            Unit.EXACT,
            (0, 4, 4, 4),
            Kind.STAT,
            RED_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
            links=(runbook("HiCacheObsDrops"),),
        ),
        Panel(
            "Records dropped by reason",
            "Records lost per interval. What they would have shown is unknown, not clean.",
            (Query(events("dropped_records_total", "reason"), "{{reason}}"),),
            Unit.EXACT,
            (4, 0, 7, 8),
            Kind.BARS,
            RED_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
            links=(runbook("HiCacheObsDrops"),),
        ),
        Panel(
            "Pairs not decidable",
            "Pairs per interval that could not be judged, by reason.",
            (Query(events("unknown_total", "reason"), "{{reason}}"),),
            Unit.EXACT,
            (11, 0, 7, 8),
            Kind.BARS,
            ORANGE_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
            links=(runbook("HiCacheObsBlind"),),
        ),
        Panel(
            "Weak orderings",
            "Pairs per interval that only something weaker than a fence orders.",
            (Query(events("weak_orderings_total", "provenance"), "{{provenance}}"),),
            Unit.EXACT,
            (18, 0, 6, 8),
            Kind.BARS,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Coverage by rank",
            "Share of the records of the last minute that were analysed. An agent that may not use more of the "
            "processor leaves stretches out.",
            (Query(series("coverage_ratio"), RANK_NAME),),
            Unit.SHARE,
            (0, 8, 24, 6),
            no_value=NOT_CHECKED,
            links=(runbook("HiCacheObsSampling"),),
        ),
    ),
)

_BLIND: Final = Row(
    "Blind spots",
    (
        Panel(
            "Hazards",
            "NOT OBSERVABLE: some selected rank does not capture what shows it. It cannot be seen there, which is not "
            "the same as absent. Watched but never checked: no pair of this kind came up since start, and nothing is "
            "said about it.",
            (
                Query(f"1 - min by (hazard) ({series('hazard_observable')})"),
                Query(total("checks_total", by="hazard")),
                Query(total("pages_checked_total", by="hazard")),
                Query(total_if("checks_total", "violations_total", by="hazard")),
                Query(total_if("checks_total", "latent_races_total", by="hazard")),
            ),
            Unit.TEXT,
            (0, 0, 14, 16),
            Kind.TABLE,
            no_value=NOT_CHECKED,
            labels=(("hazard", "Hazard", 190),),
            columns=(
                Column(
                    "Watched",
                    Unit.TEXT,
                    words=(Shown(0, "watched", "green"), Shown(1, "NOT OBSERVABLE", "orange")),
                    width=140,
                ),
                Column("Pairs checked", Unit.EXACT, decimals=0, width=115),
                Column("Pages", Unit.EXACT, decimals=0, width=80),
                Column("Violations", Unit.EXACT, RED_FROM_ONE, decimals=0, width=95),
                Column("Latent", Unit.EXACT, ORANGE_FROM_ONE, decimals=0, width=75),
            ),
        ),
        Panel(
            "Pairs checked by hazard",
            "Pairs checked per second. A hazard without checks is not a safe one.",
            (Query(rate("checks_total", "hazard"), "{{hazard}}"),),
            Unit.PER_SECOND,
            (14, 0, 10, 16),
            no_value=NOT_CHECKED,
        ),
    ),
)

_LOST_SPANS: Final = 'outcome=~"queue_full|undelivered"'

_TOLD: Final = Row(
    "What is accepted, and what is sent?",
    (
        Panel(
            "Accepted findings",
            "Operation pairs of findings that --accepted names, since start; they count nowhere else, and page nobody.",
            (Query(total_if("checks_total", "accepted_total")),),
            Unit.EXACT,
            (0, 0, 4, 5),
            Kind.STAT,
            NEUTRAL,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Spans lost",
            "Spans since start that did not fit into the queue, or that the OTLP endpoint did not take.",
            (Query(total_if("spans_total", "spans_total", _LOST_SPANS)),),
            Unit.EXACT,
            (0, 5, 4, 5),
            Kind.STAT,
            ORANGE_FROM_ONE,
            no_value=NO_TRACES,
            decimals=0,
        ),
        Panel(
            "Accepted findings by hazard",
            "Operation pairs of accepted findings per interval.",
            (Query(events("accepted_total", "hazard"), "{{hazard}}"),),
            Unit.EXACT,
            (4, 0, 10, 10),
            Kind.BARS,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Spans by outcome",
            "Spans per interval by what became of them. Sampled out: nothing was found in their trace.",
            (Query(events("spans_total", "outcome"), "{{outcome}}"),),
            Unit.EXACT,
            (14, 0, 10, 10),
            Kind.BARS,
            no_value=NO_TRACES,
            decimals=0,
        ),
    ),
)

_COST: Final = Row(
    "What does watching cost?",
    (
        Panel(
            "Overhead by phase",
            "Host time spent by hicache-obs itself, as part of one core.",
            (Query(rate("overhead_seconds_total", "phase"), "{{phase}}"),),
            Unit.SHARE,
            (0, 0, 12, 7),
        ),
        Panel(
            "Overhead by rank",
            "Host time spent by hicache-obs itself, as part of one core.",
            (Query(rate("overhead_seconds_total", RANK), RANK_NAME),),
            Unit.SHARE,
            (12, 0, 12, 7),
        ),
    ),
)

DETECTOR: Final = Board(
    uid="hicache-obs-detector",
    title="HiCache ordering: detector",
    description="What the detector costs, what it lost, and what it cannot see.",
    rows=(_ALIVE, _MISSED, _BLIND, _TOLD, _COST),
)
