"""``Median``: the middle of a sample and a 95 % confidence interval of it, as the benchmarks state their differences.

The interval lies between two order statistics. Each value of a sample is above the true median as often as below it,
so how many lie below is binomial, whatever the distribution of the values is, and the interval from the k-th smallest
to the k-th largest misses the true median in 2 P(Bin(n, 1/2) < k) of all samples (H. A. David, H. N. Nagaraja, *Order
Statistics*, 3rd edition, 7.1). It narrows with the root of n, and a few wild values on a busy machine do not widen it.

The values have to be independent. Turns of a benchmark are neighbours in time and share the machine's noise; so what is
compared runs in an order drawn anew for each pair. Of two equal things each is then slower in half of the pairs, and
independently so, however the noise comes in bursts.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from hicache_obs.errors import ConfigError

_ONE_SIDE = 40
"""Of so many samples one at most may have its interval above the true median, and one below."""
_FEWEST = 6
"""Of five values not even the smallest and the largest enclose the median in 95 % of all samples."""


@dataclass(frozen=True, slots=True)
class Median:
    """Of a sample, in its unit.

    Attributes:
        middle: The sample's median.
        low, high: 95 % confidence interval of the median that the sample was drawn from.
    """

    middle: float
    low: float
    high: float

    def __format__(self, spec: str) -> str:
        """``middle (low to high)``, each in the format of a number."""
        return f"{self.middle:{spec}} ({self.low:{spec}} to {self.high:{spec}})"


def median(values: Sequence[float]) -> Median:
    """The middle of ``values``, in any order.

    Raises:
        ConfigError: There are fewer than six.
    """
    count = len(values)
    if count < _FEWEST:
        raise ConfigError(f"median of {count} values: an interval of 95 % needs at least {_FEWEST}")
    allowed = 2**count // _ONE_SIDE
    below = rank = 0
    while (below := below + math.comb(count, rank)) <= allowed:
        rank += 1
    ordered = sorted(values)
    return Median(statistics.median(ordered), ordered[rank - 1], ordered[count - rank])


def percent_more(values: Sequence[float], base: Sequence[float]) -> Median:
    """By how many percent the values exceed those of ``base`` that were measured in the same turns.

    Raises:
        ConfigError: There are fewer than six turns.
    """
    return median([100 * (mine / other - 1) for mine, other in zip(values, base, strict=True)])
