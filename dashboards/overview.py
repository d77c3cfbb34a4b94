"""The overview board: is it safe, what does safety cost, what is transferred, can the detector be trusted."""

from __future__ import annotations

from typing import Final

from hicache_obs.dashboards.panels import (
    NOT_CHECKED,
    Board,
    Kind,
    Panel,
    Query,
    Row,
    Shown,
    Step,
    Unit,
    series,
)

_GREEN: Final = Step(None, "green")
_NEUTRAL: Final = (Step(None, "blue"),)
_RED_FROM_ONE: Final = (_GREEN, Step(1, "red"))
_ORANGE_FROM_ONE: Final = (_GREEN, Step(1, "orange"))
_WORDS: Final = (
    Shown(0, NOT_CHECKED, "orange"),
    Shown(1, "SAFE", "green"),
    Shown(2, "NOT DECIDABLE", "orange"),
    Shown(3, "LATENT RACES", "orange"),
    Shown(4, "CONTRADICTION", "red"),
    Shown(5, "VIOLATED", "red"),
)


def _total(name: str, matchers: str = "", by: str = "") -> str:
    """The most a counter reached in the selected range, over all processes.

    Not ``increase``: a process that raced before its first scrape would look clean.
    """
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (max_over_time({series(name, matchers)}[$__range]))"


def _total_if(denominator: str, name: str) -> str:
    """``_total``, but nothing while ``denominator`` is 0: 0 of 0 must not look like 0."""
    total = _total(name)
    return f"({total} > 0) or ({total} and on () ({_total(denominator)} > 0))"


def _rate(name: str, by: str, matchers: str = "") -> str:
    return f"sum by ({by}) (rate({series(name, matchers)}[$__rate_interval]))"


def _events(name: str, by: str) -> str:
    """Whole events per interval."""
    return f"round(sum by ({by}) (increase({series(name)}[$__rate_interval])))"


def _share(part: str, whole: str) -> str:
    return f"{part} / ({whole} > 0)"


def _quantile(quantile: float, name: str, matchers: str = "", *, by: str = "le") -> str:
    return f"histogram_quantile({quantile}, {_rate(name + '_bucket', by, matchers)})"


def _verdict() -> str:
    """The worst that holds; ``_WORDS`` names the numbers."""
    levels = {
        5: _total("violations_total"),
        4: _total("contradictions_total"),
        3: _total("latent_races_total"),
        2: _total("unknown_total"),
        1: _total("checks_total"),
    }
    worst_first = [f"({total} > bool 0 == 1) * {level}" for level, total in levels.items()]
    return " or ".join([*worst_first, f"{_total('checks_total')} * 0"])


def _tile(title: str, text: str, name: str, steps: tuple[Step, ...], x: int, y: int) -> Panel:
    return Panel(
        title,
        text,
        (Query(_total_if("checks_total", name)),),
        Unit.EXACT,
        (x, y, 3, 5),
        Kind.STAT,
        steps,
        no_value=NOT_CHECKED,
        decimals=0,
    )


_SAFE: Final = Row(
    "Is it safe?",
    (
        Panel(
            "Verdict",
            "SAFE needs at least one checked pair, and no violation, contradiction, latent race or "
            "undecidable pair since the processes in the selected range started.",
            (Query(_verdict()),),
            Unit.TEXT,
            (0, 0, 6, 10),
            Kind.STAT,
            (Step(None, "orange"),),
            _WORDS,
            no_value=NOT_CHECKED,
        ),
        _tile(
            "Violations",
            "Operation pairs that nothing orders and that ran in the wrong order, since start.",
            "violations_total",
            _RED_FROM_ONE,
            6,
            0,
        ),
        _tile(
            "Contradictions",
            "Pairs proven ordered but measured in the wrong order, since start: "
            "a fence is not where we think, or a clock lies.",
            "contradictions_total",
            _RED_FROM_ONE,
            9,
            0,
        ),
        _tile(
            "Latent races",
            "Pairs that nothing orders and that happened to run in the right order, since start.",
            "latent_races_total",
            _ORANGE_FROM_ONE,
            12,
            0,
        ),
        _tile(
            "Not decidable",
            "Pairs that could not be judged, mostly because records were dropped, since start.",
            "unknown_total",
            _ORANGE_FROM_ONE,
            6,
            5,
        ),
        _tile(
            "Unfenced transfers",
            "Transfers without a fence and without proof that none was needed, since start.",
            "unfenced_ops_total",
            _ORANGE_FROM_ONE,
            9,
            5,
        ),
        _tile(
            "Pairs checked",
            "Operation pairs checked since start: what the zeros beside it are out of.",
            "checks_total",
            _NEUTRAL,
            12,
            5,
        ),
        Panel(
            "Violations by hazard",
            "New violations per interval.",
            (Query(_events("violations_total", "hazard"), "{{hazard}}"),),
            Unit.COUNT,
            (15, 0, 9, 10),
            Kind.BARS,
            _RED_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Latent races by hazard",
            "New latent races per interval.",
            (Query(_events("latent_races_total", "hazard"), "{{hazard}}"),),
            Unit.COUNT,
            (0, 10, 8, 9),
            Kind.BARS,
            _ORANGE_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Pairs checked by hazard",
            "Pairs checked per second. A hazard without checks is not a safe one.",
            (Query(_rate("checks_total", "hazard"), "{{hazard}}"),),
            Unit.PER_SECOND,
            (8, 10, 8, 9),
            no_value=NOT_CHECKED,
        ),
        Panel(
            "Hazards watched",
            "Whether the records that show a hazard are captured on every selected rank. "
            "NOT OBSERVABLE means it cannot be seen, not that it is absent.",
            (Query(f"min by (hazard) ({series('hazard_observable')})", "{{hazard}}"),),
            Unit.TEXT,
            (16, 10, 8, 9),
            Kind.BAR_GAUGE,
            (Step(None, "orange"), Step(1, "green")),
            (Shown(0, "NOT OBSERVABLE", "orange"), Shown(1, "watched", "green")),
            no_value=NOT_CHECKED,
        ),
    ),
)

_COST: Final = Row(
    "What does safety cost?",
    (
        Panel(
            "Avoidable share, overall",
            "Part of all fence waits since start that waiting for the conflicting operations only would have saved.",
            (Query(_share(_total("fence_avoidable_seconds_sum"), _total("fence_wait_seconds_sum"))),),
            Unit.SHARE,
            (0, 0, 4, 4),
            Kind.STAT,
            (_GREEN, Step(0.5, "yellow")),
            no_value="No fence wait",
            decimals=1,
        ),
        Panel(
            "Fence share, overall",
            "Part of the time spent in transfers since start that was fence wait.",
            (Query(_share(_total("fence_wait_seconds_sum"), _total("op_seconds_sum"))),),
            Unit.SHARE,
            (0, 4, 4, 4),
            Kind.STAT,
            (_GREEN, Step(0.5, "yellow")),
            decimals=1,
        ),
        Panel(
            "Fence wait",
            "Time a transfer's stream stood still for its fence.",
            tuple(
                Query(_quantile(q, "fence_wait_seconds", by="le, op"), f"{{{{op}}}} p{q * 100:g}") for q in (0.5, 0.99)
            ),
            Unit.SECONDS,
            (4, 0, 10, 8),
        ),
        Panel(
            "Avoidable share of fence wait",
            "Part of the fence wait that waiting for the conflicting operations only would have saved.",
            (
                Query(
                    _share(_rate("fence_avoidable_seconds_sum", "op"), _rate("fence_wait_seconds_sum", "op")),
                    "{{op}}",
                ),
            ),
            Unit.SHARE,
            (14, 0, 10, 8),
        ),
        Panel(
            "Fence wait share of transfer time",
            "Part of the time from a transfer's submission to its end that was fence wait.",
            (Query(_share(_rate("fence_wait_seconds_sum", "op"), _rate("op_seconds_sum", "op")), "{{op}}"),),
            Unit.SHARE,
            (0, 8, 8, 8),
        ),
        Panel(
            "Layer wait",
            "Time a forward round stood still for one layer of a load-back.",
            tuple(Query(_quantile(q, "layer_wait_seconds"), f"p{q * 100:g}") for q in (0.5, 0.99)),
            Unit.SECONDS,
            (8, 8, 8, 8),
        ),
        Panel(
            "Time stood still",
            "Seconds per second that a stream waited, summed over ranks.",
            (
                Query(_rate("fence_wait_seconds_sum", "op"), "{{op}} fence"),
                Query(_rate("layer_wait_seconds_sum", ""), "layer"),
            ),
            Unit.SHARE,
            (16, 8, 8, 8),
        ),
    ),
)


def _durations(title: str, op: str, x: int) -> Panel:
    matcher = f'op="{op}"'
    return Panel(
        title,
        "Submission to end (fence wait included) against the copy alone; the gap is what the copy waited.",
        tuple(
            Query(_quantile(q, name, matcher), f"{what} p{q * 100:g}")
            for name, what in (("op_seconds", "whole"), ("transfer_seconds", "copy"))
            for q in (0.5, 0.99)
        ),
        Unit.SECONDS,
        (x, 0, 6, 8),
    )


_TRANSFERS: Final = Row(
    "Transfers",
    (
        Panel(
            "Bytes moved",
            "Bytes copied per second, summed over ranks.",
            (Query(_rate("transfer_bytes_total", "op"), "{{op}}"),),
            Unit.BYTES_PER_SECOND,
            (0, 0, 6, 8),
        ),
        Panel(
            "Pages moved",
            "Pages copied per interval, summed over ranks; each counted once, not per layer.",
            (Query(_events("transfer_pages_total", "op"), "{{op}}"),),
            Unit.COUNT,
            (6, 0, 6, 8),
            Kind.BARS,
            decimals=0,
        ),
        _durations("Restore: whole and copy time", "restore", 12),
        _durations("Backup: whole and copy time", "backup", 18),
        Panel(
            "Copy bandwidth",
            "Bytes per second of copy time, fence wait excluded.",
            (Query(_share(_rate("transfer_bytes_total", "op"), _rate("transfer_seconds_sum", "op")), "{{op}}"),),
            Unit.BYTES_PER_SECOND,
            (0, 8, 12, 7),
        ),
        Panel(
            "Unfenced transfers",
            "Transfers per interval without a fence and without proof that none was needed.",
            (Query(_events("unfenced_ops_total", "op"), "{{op}}"),),
            Unit.COUNT,
            (12, 8, 12, 7),
            Kind.BARS,
            _ORANGE_FROM_ONE,
            decimals=0,
        ),
    ),
)

_DETECTOR: Final = Row(
    "Can I trust the detector?",
    (
        Panel(
            "Records analysed",
            "Records per second, by instance.",
            (Query(_rate("records_total", "instance"), "{{instance}}"),),
            Unit.PER_SECOND,
            (0, 0, 7, 8),
            no_value=NOT_CHECKED,
        ),
        Panel(
            "Records dropped",
            "Records lost per interval. What they would have shown is unknown, not clean.",
            (Query(_events("dropped_records_total", "reason"), "{{reason}}"),),
            Unit.COUNT,
            (7, 0, 7, 8),
            Kind.BARS,
            _RED_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Last analysis",
            "Age of the last analysis on the rank where it is oldest.",
            (Query(f"max(time() - ({series('last_analysis_timestamp_seconds')} > 0))"),),
            Unit.SECONDS,
            (14, 0, 5, 4),
            Kind.STAT,
            (_GREEN, Step(60, "yellow"), Step(120, "red")),
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Clock error",
            "Largest uncertainty of device times on the host clock.",
            (Query(f"max({series('clock_error_seconds')}) and on () ({_total('records_total')} > 0)"),),
            Unit.SECONDS,
            (19, 0, 5, 4),
            Kind.STAT,
            (_GREEN, Step(1e-4, "yellow"), Step(1e-3, "red")),
            no_value=NOT_CHECKED,
        ),
        Panel(
            "Records dropped, overall",
            "Records lost since start.",
            (Query(_total_if("records_total", "dropped_records_total")),),
            Unit.EXACT,
            (14, 4, 5, 4),
            Kind.STAT,
            _RED_FROM_ONE,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
        Panel(
            "Version",
            "hicache-obs version and observed engine.",
            (Query(f"max by (version, engine) ({series('build_info')})", "{{version}} on {{engine}}"),),
            Unit.TEXT,
            (19, 4, 5, 4),
            Kind.STAT,
            _NEUTRAL,
            no_value="Not running",
            name_only=True,
        ),
        Panel(
            "Overhead",
            "Host time spent by hicache-obs itself, as part of one core.",
            (Query(_rate("overhead_seconds_total", "phase"), "{{phase}}"),),
            Unit.SHARE,
            (0, 8, 12, 7),
        ),
        Panel(
            "Weak orderings",
            "Pairs per interval that only something weaker than a fence orders.",
            (Query(_events("weak_orderings_total", "provenance"), "{{provenance}}"),),
            Unit.COUNT,
            (12, 8, 12, 7),
            Kind.BARS,
            no_value=NOT_CHECKED,
            decimals=0,
        ),
    ),
)

OVERVIEW: Final = Board(
    uid="hicache-obs-overview",
    title="HiCache ordering: overview",
    description="Whether restored KV-cache pages were raced by the forward pass, and what avoiding it costs.",
    rows=(_SAFE, _COST, _TRANSFERS, _DETECTOR),
)
