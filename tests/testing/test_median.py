"""The interval of a median: the ranks of printed tables, and how often it misses the median of what was drawn from."""

from __future__ import annotations

import random

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.testing.median import Median, median, percent_more


@pytest.mark.parametrize(
    ("count", "rank"),  # of the lower end, from 1: the largest k with 2 P(Bin(count, 1/2) < k) <= 5 %
    [(6, 1), (8, 1), (9, 2), (11, 2), (12, 3), (20, 6), (25, 8), (50, 18), (100, 40), (400, 180), (2000, 956)],
)
def test_ranks(count: int, rank: int) -> None:
    values = list(range(1, count + 1))
    random.Random(count).shuffle(values)
    found = median(values)
    assert (found.low, found.high) == (rank, count + 1 - rank)
    assert found.middle == (count + 1) / 2


def test_misses_in_one_of_twenty_samples_at_most() -> None:
    draw = random.Random(8)
    missed = 0
    for _ in range(2000):
        found = median([draw.lognormvariate(1.0, 2.0) for _ in range(40)])
        missed += not found.low <= 2.718281828 <= found.high
    assert 50 <= missed <= 100  # 3.8 % of 2,000 are 77: the ranks are whole numbers


def test_percent_more() -> None:
    base = [100.0, 200.0, 400.0, 100.0, 200.0, 400.0, 100.0]
    more = percent_more([101.0, 204.0, 412.0, 104.0, 210.0, 424.0, 107.0], base)
    assert f"{more:.2f}" == "4.00 (1.00 to 7.00)"


def test_equal_values() -> None:
    assert median([3.0] * 10) == Median(3.0, 3.0, 3.0)


def test_too_few() -> None:
    with pytest.raises(ConfigError, match="median of 5 values: an interval of 95 % needs at least 6"):
        median([1.0] * 5)
