"""The overview board, the one screen: is it safe, what does safety cost, what is transferred and saved."""

from __future__ import annotations

from typing import Final

from hicache_obs.dashboards.common import (
    AGE_STEPS,
    COVERAGE_COLUMN,
    RANK_LABELS_SHOWN,
    STATUS_PAGE,
    UNFENCED_COLUMN,
    VERDICT_COLUMN,
    VERDICTS,
    coverage_tile,
)
from hicache_obs.dashboards.panels import (
    GREEN,
    NEUTRAL,
    NOT_CHECKED,
    ORANGE_FROM_ONE,
    RED_FROM_ONE,
    Board,
    Column,
    Kind,
    Link,
    Panel,
    Query,
    Row,
    Step,
    Unit,
    runbook,
)
from hicache_obs.dashboards.queries import (
    RANK,
    coverage,
    events,
    quantile,
    rate,
    series,
    sglang,
    share,
    total,
    total_if,
    verdict,
)

_DRILL_DOWN: Final = Link(
    "Restores of this rank",
    "/d/hicache-obs-restore?${datasource:queryparam}&var-instance=${__data.fields.Node}"
    "&var-tp_rank=${__data.fields.TP}&var-pp_rank=${__data.fields.PP}&var-dp_rank=${__data.fields.DP}"
    "&from=${__from}&to=${__to}",
    "tp_rank",
)


def _tile(title: str, text: str, name: str, steps: tuple[Step, ...], alert: str, at: tuple[int, int]) -> Panel:
    return Panel(
        title,
        text,
        (Query(total_if("checks_total", name)),),
        Unit.EXACT,
        (*at, 4, 3),
        Kind.STAT,
        steps,
        no_value=NOT_CHECKED,
        decimals=0,
        links=(runbook(alert),) if alert else (),
    )


_TILES: Final = (
    coverage_tile((6, 0, 4, 3)),
    Panel(
        "Hazards watched",
        "Kinds of race whose records are captured on every selected rank. The others cannot be seen, which is not the "
        "same as absent; the detector board names them.",
        (Query(f"count(min by (hazard) ({series('hazard_observable')}) == 1) or vector(0)"),),
        Unit.EXACT,
        (6, 3, 4, 3),
        Kind.STAT,
        (Step(None, "orange"), Step(1, "blue")),
        no_value=NOT_CHECKED,
        decimals=0,
        links=(runbook("HiCacheObsBlind"),),
    ),
    _tile(
        "Pairs checked",
        "Operation pairs checked since start: what the zeros beside it are out of.",
        "checks_total",
        NEUTRAL,
        "",
        (6, 6),
    ),
    _tile(
        "Violations",
        "Operation pairs that nothing orders and that ran in the wrong order, since start.",
        "violations_total",
        RED_FROM_ONE,
        "HiCacheViolation",
        (10, 0),
    ),
    _tile(
        "Contradictions",
        "Pairs proven ordered but measured in the wrong order, since start: "
        "a fence is not where we think, or a clock lies.",
        "contradictions_total",
        RED_FROM_ONE,
        "HiCacheContradiction",
        (10, 3),
    ),
    _tile(
        "Latent races",
        "Pairs that nothing orders and that happened to run in the right order, since start.",
        "latent_races_total",
        ORANGE_FROM_ONE,
        "HiCacheLatentRace",
        (10, 6),
    ),
    _tile(
        "Unfenced transfers",
        "Transfers without a fence and without proof that none was needed, since start.",
        "unfenced_ops_total",
        ORANGE_FROM_ONE,
        "HiCacheUnfencedTransfers",
        (14, 0),
    ),
    _tile(
        "Not decidable",
        "Pairs that could not be judged, mostly because records were dropped, since start.",
        "unknown_total",
        ORANGE_FROM_ONE,
        "HiCacheObsBlind",
        (14, 3),
    ),
    _tile(
        "Records lost",
        "Records lost before they could be analysed, since start. What they would have shown is unknown.",
        "dropped_records_total",
        ORANGE_FROM_ONE,
        "HiCacheObsDrops",
        (14, 6),
    ),
)

_VERDICT: Final = Panel(
    "Verdict",
    "SAFE needs at least one checked pair and no violation, contradiction, latent race, undecidable pair or lost "
    "record since the processes in the selected range started. BLIND: some pairs could not be seen or judged.",
    (Query(verdict()),),
    Unit.TEXT,
    (0, 0, 6, 9),
    Kind.STAT,
    (Step(None, "orange"),),
    VERDICTS,
    no_value=NOT_CHECKED,
    links=(runbook("HiCacheViolation"),),
)

_COUNTED: Final = ("violations_total", "contradictions_total", "latent_races_total", "unfenced_ops_total")
_BY_RANK: Final = Panel(
    "Ranks, worst first",
    "One row per rank of each node, since start. The node leads to its status page with the last findings and their "
    "blast radius, the rank to its restores.",
    (
        Query(verdict(RANK)),
        *(Query(total_if("checks_total", name, by=RANK)) for name in _COUNTED),
        Query(total("checks_total", by=RANK)),
        Query(coverage(RANK)),
        Query(f"time() - (max by ({RANK}) (max_over_time({series('last_analysis_timestamp_seconds')}[$__range])) > 0)"),
    ),
    Unit.TEXT,
    (0, 9, 24, 7),
    Kind.TABLE,
    no_value=NOT_CHECKED,
    links=(STATUS_PAGE, _DRILL_DOWN),
    labels=RANK_LABELS_SHOWN,
    columns=(
        VERDICT_COLUMN,
        Column("Violations", Unit.EXACT, RED_FROM_ONE, decimals=0, width=88),
        Column("Contradictions", Unit.EXACT, RED_FROM_ONE, decimals=0, width=118),
        Column("Latent", Unit.EXACT, ORANGE_FROM_ONE, decimals=0, width=70),
        UNFENCED_COLUMN,
        Column("Checked", Unit.EXACT, decimals=0, width=80),
        COVERAGE_COLUMN,
        Column("Last analysis", Unit.SECONDS, AGE_STEPS, decimals=0, width=105),
    ),
)

_SAFE: Final = Row(
    "Is it safe?",
    (
        _VERDICT,
        *_TILES,
        Panel(
            "New findings",
            "Findings per interval; what --accepted names is apart. The detector board has them by hazard.",
            (
                Query(events("violations_total", ""), "violations", "red"),
                Query(events("contradictions_total", ""), "contradictions", "purple"),
                Query(events("latent_races_total", ""), "latent races", "orange"),
                Query(events("accepted_total", ""), "accepted", "blue"),
            ),
            Unit.EXACT,
            (18, 0, 6, 9),
            Kind.BARS,
            RED_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        _BY_RANK,
    ),
)

_RESTORE: Final = 'op="restore"'


def _of_load_back(name: str) -> str:
    return share(rate(name, "", _RESTORE), rate("op_seconds_sum", "", _RESTORE))


_COST: Final = Row(
    "What does safety cost?",
    (
        Panel(
            "Fence wait share",
            "Part of the time from a load-back's submission to its end that was fence wait, since start.",
            (Query(share(total("fence_wait_seconds_sum", _RESTORE), total("op_seconds_sum", _RESTORE))),),
            Unit.SHARE,
            (0, 0, 4, 4),
            Kind.STAT,
            (GREEN, Step(0.5, "yellow")),
            decimals=1,
            links=(runbook("HiCacheFenceShare"),),
        ),
        Panel(
            "Avoidable share",
            "Part of the time load-backs took since start that a fence with the exact edges would have saved.",
            (Query(share(total("fence_avoidable_seconds_sum", _RESTORE), total("op_seconds_sum", _RESTORE))),),
            Unit.SHARE,
            (0, 4, 4, 4),
            Kind.STAT,
            (GREEN, Step(0.25, "yellow")),
            decimals=1,
            links=(runbook("HiCacheFenceShare"),),
        ),
        Panel(
            "Load-back time that is fence wait",
            "Fence wait, and the part of it that waiting for the conflicting operations only would have saved, as part "
            "of load-back time.",
            (
                Query(_of_load_back("fence_wait_seconds_sum"), "fence wait"),
                Query(_of_load_back("fence_avoidable_seconds_sum"), "avoidable"),
            ),
            Unit.SHARE,
            (4, 0, 10, 8),
            steps=(GREEN, Step(0.5, "yellow")),
        ),
        Panel(
            "Fence wait",
            "Time a transfer's stream stood still for its fence.",
            tuple(
                Query(quantile(q, "fence_wait_seconds", by="le, op"), f"{{{{op}}}} p{q * 100:g}") for q in (0.5, 0.99)
            ),
            Unit.SECONDS,
            (14, 0, 10, 8),
            exemplars=True,
        ),
    ),
)

_KV_POOL: Final = 'pool=~"kv|"'
"""Older versions have no pool label."""
# Every TP rank counts the same tokens, so one of them is read.
_LOADED_BACK: Final = (
    "max by (cluster, namespace, pod, instance, dp_rank) "
    f"({sglang('load_back_tokens_total', _KV_POOL, '$__rate_interval')})"
)
_PROMPT_TOKENS: Final = sglang("prompt_tokens_total", interval="$__rate_interval")

_TRANSFERS: Final = Row(
    "Transfers",
    (
        Panel(
            "Bytes moved",
            "Bytes copied per second, summed over ranks.",
            (Query(rate("transfer_bytes_total", "op"), "{{op}}"),),
            Unit.BYTES_PER_SECOND,
            (0, 0, 6, 8),
        ),
        Panel(
            "Load-back: whole and copy time",
            "Submission to end (fence wait included) against the copy alone; the gap is what the copy waited.",
            tuple(
                Query(quantile(q, name, _RESTORE), f"{what} p{q * 100:g}")
                for name, what in (("op_seconds", "whole"), ("transfer_seconds", "copy"))
                for q in (0.5, 0.99)
            ),
            Unit.SECONDS,
            (6, 0, 6, 8),
        ),
        Panel(
            "Oldest pending transfer",
            "Age of the transfer that has been under way longest, on any rank.",
            (Query(f"max by (op) ({series('oldest_pending_seconds')})", "{{op}}"),),
            Unit.SECONDS,
            (12, 0, 6, 8),
            steps=(GREEN, Step(30, "red")),
            links=(runbook("HiCacheStuckTransfer"),),
        ),
        Panel(
            "Cache hits and load-back (SGLang)",
            "SGLang's cache hit rate, and the share of prompt tokens that were loaded back from host memory. "
            "Needs SGLang's own metrics in the same Prometheus.",
            (
                Query(f"avg({sglang('cache_hit_rate')})", "cache hit rate"),
                Query(share(f"sum({_LOADED_BACK})", f"sum({_PROMPT_TOKENS})"), "loaded back"),
            ),
            Unit.SHARE,
            (18, 0, 6, 8),
            no_value="No SGLang metrics",
        ),
    ),
)

OVERVIEW: Final = Board(
    uid="hicache-obs-overview",
    title="HiCache ordering: overview",
    description="Whether restored KV-cache pages were raced by the forward pass, and what avoiding it costs.",
    rows=(_SAFE, _COST, _TRANSFERS),
)
