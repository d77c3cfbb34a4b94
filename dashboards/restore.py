"""The restore board: what each rank's load-backs took, waited for and raced."""

from __future__ import annotations

from typing import Final

from hicache_obs.dashboards.common import (
    COVERAGE_COLUMN,
    RANK_LABELS_SHOWN,
    STATUS_PAGE,
    UNFENCED_COLUMN,
    VERDICT_COLUMN,
)
from hicache_obs.dashboards.panels import (
    GREEN,
    NOT_CHECKED,
    RED_FROM_ONE,
    Board,
    Column,
    Kind,
    Panel,
    Query,
    Row,
    Step,
    Unit,
    runbook,
)
from hicache_obs.dashboards.queries import (
    RANK,
    RANK_NAME,
    coverage,
    events,
    quantile,
    rate,
    series,
    share,
    total,
    verdict,
)

_RESTORE: Final = 'op="restore"'
_QUANTILES: Final = (0.5, 0.9, 0.99)
_SHARE_STEPS: Final = (GREEN, Step(0.5, "yellow"), Step(0.8, "orange"))


def _all_quantiles(name: str, matchers: str = "") -> tuple[Query, ...]:
    return tuple(Query(quantile(q, name, matchers), f"p{q * 100:g}") for q in _QUANTILES)


def _worst_quantile(name: str, matchers: str = "") -> tuple[Query, ...]:
    return (Query(quantile(0.99, name, matchers, by=f"le, {RANK}"), RANK_NAME),)


def _mean(part: str, count: str) -> str:
    return share(total(part, _RESTORE, RANK), total(count, _RESTORE, RANK))


_RANKS: Final = Row(
    "Ranks",
    (
        Panel(
            "Load-backs by rank, slowest first",
            "Means since start. Whole: submission to end. Copy: first copy's start to last copy's end.",
            (
                Query(_mean("op_seconds_sum", "op_seconds_count")),
                Query(_mean("transfer_seconds_sum", "transfer_seconds_count")),
                Query(_mean("fence_wait_seconds_sum", "fence_wait_seconds_count")),
                Query(_mean("fence_avoidable_seconds_sum", "op_seconds_sum")),
                Query(total("op_seconds_count", _RESTORE, RANK)),
                Query(total("unfenced_ops_total", _RESTORE, RANK)),
                Query(verdict(RANK)),
                Query(coverage(RANK)),
            ),
            Unit.TEXT,
            (0, 0, 24, 7),
            Kind.TABLE,
            links=(STATUS_PAGE,),
            labels=RANK_LABELS_SHOWN,
            columns=(
                Column("Whole", Unit.SECONDS, decimals=2, width=88),
                Column("Copy", Unit.SECONDS, decimals=2, width=88),
                Column("Fence wait", Unit.SECONDS, decimals=2, width=95),
                Column("Avoidable", Unit.SHARE, _SHARE_STEPS, decimals=1, width=92),
                Column("Load-backs", Unit.EXACT, decimals=0, width=98),
                UNFENCED_COLUMN,
                VERDICT_COLUMN,
                COVERAGE_COLUMN,
            ),
        ),
        Panel(
            "Violations by rank",
            "New violations per interval.",
            (Query(events("violations_total", RANK), RANK_NAME),),
            Unit.EXACT,
            (0, 7, 8, 8),
            Kind.BARS,
            RED_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
            links=(runbook("HiCacheViolation"),),
        ),
        Panel(
            "Whole time by rank, p99",
            "Submission of a load-back to the end of its last copy, fence wait included.",
            _worst_quantile("op_seconds", _RESTORE),
            Unit.SECONDS,
            (8, 7, 8, 8),
            exemplars=True,
        ),
        Panel(
            "Fence wait by rank, p99",
            "Time the load-back stream stood still for its fence.",
            _worst_quantile("fence_wait_seconds", _RESTORE),
            Unit.SECONDS,
            (16, 7, 8, 8),
            exemplars=True,
            links=(runbook("HiCacheFenceShare"),),
        ),
    ),
)

_STAGES: Final = Row(
    "Where the time of a load-back goes",
    (
        Panel(
            "Whole",
            "Submission of a load-back to the end of its last copy.",
            _all_quantiles("op_seconds", _RESTORE),
            Unit.SECONDS,
            (0, 0, 8, 7),
        ),
        Panel(
            "Fence wait",
            "Time the load-back stream stood still for its fence.",
            _all_quantiles("fence_wait_seconds", _RESTORE),
            Unit.SECONDS,
            (8, 0, 8, 7),
        ),
        Panel(
            "Avoidable part of the fence wait",
            "What waiting for the conflicting operations only would have saved.",
            _all_quantiles("fence_avoidable_seconds", _RESTORE),
            Unit.SECONDS,
            (16, 0, 8, 7),
        ),
        Panel(
            "Copy",
            "First copy's start to last copy's end, fence wait excluded.",
            _all_quantiles("transfer_seconds", _RESTORE),
            Unit.SECONDS,
            (0, 7, 8, 7),
        ),
        Panel(
            "Layer wait",
            "Time a forward round stood still for one layer of a load-back.",
            _all_quantiles("layer_wait_seconds"),
            Unit.SECONDS,
            (8, 7, 8, 7),
            exemplars=True,
        ),
        Panel(
            "Time stood still",
            "Seconds per second that a stream waited, summed over ranks.",
            (
                Query(rate("fence_wait_seconds_sum", "op"), "{{op}} fence"),
                Query(rate("layer_wait_seconds_sum", ""), "layer"),
            ),
            Unit.SHARE,
            (16, 7, 8, 7),
        ),
    ),
)

_VOLUME: Final = Row(
    "Volume",
    (
        Panel(
            "Pages moved",
            "Pages copied per interval, summed over ranks; each counted once, not per layer.",
            (Query(events("transfer_pages_total", "op"), "{{op}}"),),
            Unit.EXACT,
            (0, 0, 8, 7),
            Kind.BARS,
            decimals=0,
        ),
        Panel(
            "Copy bandwidth by rank",
            "Load-back bytes per second of copy time, fence wait excluded.",
            (
                Query(
                    share(rate("transfer_bytes_total", RANK, _RESTORE), rate("transfer_seconds_sum", RANK, _RESTORE)),
                    RANK_NAME,
                ),
            ),
            Unit.BYTES_PER_SECOND,
            (8, 0, 8, 7),
        ),
        Panel(
            "Pending transfers",
            "Transfers under way, summed over ranks. Steady growth means one is stuck.",
            (Query(f"sum by (op) ({series('pending_transfers')})", "{{op}}"),),
            Unit.EXACT,
            (16, 0, 8, 7),
            decimals=0,
            links=(runbook("HiCacheStuckTransfer"),),
        ),
    ),
)

RESTORE: Final = Board(
    uid="hicache-obs-restore",
    title="HiCache ordering: restores by rank",
    description="What each rank's load-backs took, what they waited for, and which of them raced.",
    rows=(_RANKS, _STAGES, _VOLUME),
)
