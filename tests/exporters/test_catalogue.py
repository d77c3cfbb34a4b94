"""The catalogue is a valid metric table, and its page in the docs is current."""

import subprocess
import sys
from pathlib import Path

import pytest

from hicache_obs.exporters.catalogue import CATALOGUE, PREFIX, row
from hicache_obs.exporters.metric_row import MetricRow, MetricType
from hicache_obs.exporters.metrics_page import markdown
from hicache_obs.findings import Hazard

NAMES = [r.name for r in CATALOGUE]


def test_docs_page_is_current(checkout: Path) -> None:
    page = (checkout / "docs" / "metrics.md").read_text(encoding="utf-8")

    assert page == markdown(), "python -m hicache_obs.exporters.catalogue > docs/metrics.md"


def test_module_prints_the_page() -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "hicache_obs.exporters.catalogue"], capture_output=True, check=True, encoding="utf-8"
    )

    assert (printed.stdout, printed.stderr) == (markdown(), "")


def test_names_are_unique_and_safe() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert all(name.startswith(PREFIX) and name.replace("_", "").isalnum() and name.islower() for name in NAMES)


@pytest.mark.parametrize("metric", CATALOGUE, ids=NAMES)
def test_row_follows_the_conventions(metric: MetricRow) -> None:
    assert metric.name.endswith("_total") == (metric.type is MetricType.COUNTER)
    assert bool(metric.buckets_ns) == (metric.type is MetricType.HISTOGRAM)
    assert list(metric.buckets_ns) == sorted(set(metric.buckets_ns))
    assert all(metric.family.endswith(f"_{unit}") == (metric.unit == unit) for unit in ("seconds", "bytes"))
    assert all(label.values or metric.name == f"{PREFIX}build_info" for label in metric.labels)
    assert all([metric.unit, metric.source])
    assert metric.question.endswith(("?", "."))
    assert metric.help.endswith(".")


def test_wait_buckets_are_three_per_decade_from_1_us_to_5_s() -> None:
    bounds_ns = row("fence_wait_seconds").buckets_ns

    assert bounds_ns[:4] == (1_000, 2_500, 5_000, 10_000)
    assert bounds_ns[-2:] == (2_500_000_000, 5_000_000_000)
    assert len(bounds_ns) == 21


def test_hazards_are_the_findings_hazards() -> None:
    assert row("violations_total").labels[0].values == tuple(hazard.value for hazard in Hazard)


@pytest.mark.parametrize("name", ["violations_total", "hicache_obs_violations_total"])
def test_row_by_name(name: str) -> None:
    assert row(name) is CATALOGUE[0]


def test_unknown_name_is_refused() -> None:
    with pytest.raises(KeyError, match="hicache_obs_violations"):
        row("violations")
