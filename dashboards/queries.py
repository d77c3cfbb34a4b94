"""PromQL of the boards: every selector of our own metrics is made here, by ``series``.

``series`` refuses a name that is not in the metric catalogue and adds the dashboard's variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from hicache_obs.exporters.catalogue import CATALOGUE, PREFIX, RANK_LABELS

PLACE: Final = ("cluster", "namespace", "pod")
"""Labels that service discovery or the scrape configuration adds; absent elsewhere, which ``.*`` matches."""
VARIABLES: Final = (*PLACE, "instance", *RANK_LABELS)
"""Variables of every board, each a label of the same name, each narrowed by those before it."""
RANK: Final = ", ".join(VARIABLES)
RANK_NAME: Final = "{{instance}} tp{{tp_rank}} pp{{pp_rank}} dp{{dp_rank}}"

_SERIES: Final = {name: row.name for row in CATALOGUE for name in row.series_names}


def _variables(names: Sequence[str]) -> str:
    return ",".join(f'{name}=~"${name}"' for name in names)


def series(name: str, matchers: str = "") -> str:
    """Selector of our series ``name`` (prefix left out) under the dashboard's variables.

    Raises:
        KeyError: The catalogue has no such series.
    """
    full = PREFIX + name
    _ = _SERIES[full]
    return f"{full}{{{_variables(VARIABLES)}{',' if matchers else ''}{matchers}}}"


def sglang(name: str, matchers: str = "", interval: str = "") -> str:
    """SGLang's own series ``name`` in both spellings it is stored under, as a rate over ``interval`` if given.

    SGLang spells ``sglang:name``; a Prometheus that negotiates OpenMetrics with newer client libraries stores
    ``sglang_name``. Its endpoint is another than the agent's, so only the place labels can narrow it.
    """
    matchers = f"{_variables(PLACE)}{',' if matchers else ''}{matchers}"
    both = [f"sglang{mark}{name}{{{matchers}}}" for mark in (":", "_")]
    return " or ".join(f"rate({selector}[{interval}])" if interval else selector for selector in both)


def metrics_in(exprs: Sequence[str]) -> list[str]:
    """Our metrics in ``exprs`` in catalogue order, ``_bucket``, ``_sum`` and ``_count`` folded; then SGLang's."""
    text = " ".join(exprs)
    ours = [row.name for row in CATALOGUE if any(name + "{" in text for name in row.series_names)]
    parts = [part.rpartition("sglang:")[2] for part in text.split("{") if "sglang:" in part]
    return [*ours, *(f"sglang:{name}" for name in dict.fromkeys(parts))]


def total(name: str, matchers: str = "", by: str = "") -> str:
    """The most a counter reached in the selected range, over all processes.

    Not ``increase``: a process that raced before its first scrape would look clean.
    """
    grouped = f" by ({by})" if by else ""
    return f"sum{grouped} (max_over_time({series(name, matchers)}[$__range]))"


def total_if(denominator: str, name: str, matchers: str = "", by: str = "") -> str:
    """``total``, but nothing while ``denominator`` is 0: 0 of 0 must not look like 0."""
    value = total(name, matchers, by)
    return f"({value} > 0) or ({value} and on ({by}) ({total(denominator, by=by)} > 0))"


def rate(name: str, by: str, matchers: str = "") -> str:
    """Increase per second."""
    return f"sum by ({by}) (rate({series(name, matchers)}[$__rate_interval]))"


def events(name: str, by: str) -> str:
    """Whole events per interval."""
    return f"round(sum by ({by}) (increase({series(name)}[$__rate_interval])))"


def share(part: str, whole: str) -> str:
    """``part`` of ``whole``, nothing while there is no ``whole``."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, name: str, matchers: str = "", *, by: str = "le") -> str:
    """The ``q`` quantile of a histogram."""
    return f"histogram_quantile({q}, {rate(name + '_bucket', by, matchers)})"


def coverage(by: str = "") -> str:
    """Share of records that were analysed, times share of checked pairs that could be judged."""
    lost, kept = total("dropped_records_total", by=by), total("records_total", by=by)
    unknown, checked = total("unknown_total", by=by), total("checks_total", by=by)
    return f"({kept} / ({kept} + {lost} > 0)) * (1 - {unknown} / ({checked} > 0))"


def verdict(by: str = "") -> str:
    """The worst that holds, as a number that ``overview.VERDICTS`` names; 0 if nothing was checked."""
    blind = f"{total('unknown_total', by=by)} + {total('dropped_records_total', by=by)}"
    levels = {
        5: total("violations_total", by=by),
        4: total("contradictions_total", by=by),
        3: total("latent_races_total", by=by),
        2: blind,
        1: total("checks_total", by=by),
    }
    worst_first = [f"({value} > bool 0 == 1) * {level}" for level, value in levels.items()]
    return " or ".join([*worst_first, f"{total('checks_total', by=by)} * 0"])
