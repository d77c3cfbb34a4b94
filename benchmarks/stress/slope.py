"""Whether a series grows: the slope of a straight line through it, with an interval that its own noise gives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

BLOCKS = 12
"""Neighbouring samples depend on each other; the means of so many stretches hardly do."""
# Two-sided 95 % of Student's t with BLOCKS - 2 degrees of freedom.
_T = 2.228


@dataclass(frozen=True, slots=True)
class Slope:
    """Per hour.

    Attributes:
        per_hour: The slope.
        low, high: 95 % of it.
        noise: Standard deviation around the line.
        hours: From the first to the last sample.
    """

    per_hour: float
    low: float
    high: float
    noise: float
    hours: float

    def grows(self, floor: float) -> bool:
        """Whether it certainly grows, and by more than its noise and ``floor`` over the whole series."""
        return self.low > 0 and self.per_hour * self.hours > max(self.noise, floor)

    def negated(self) -> Slope:
        """The slope of the same values with the other sign."""
        return Slope(-self.per_hour, -self.high, -self.low, self.noise, self.hours)


def slope(samples: Sequence[tuple[float, float]]) -> Slope:
    """Of (seconds, value) in order of time.

    Raises:
        ValueError: There are fewer than two for each block.
    """
    if len(samples) < 2 * BLOCKS:
        raise ValueError(f"{len(samples)} samples; a slope needs {2 * BLOCKS}")
    means = []
    for block in range(BLOCKS):
        part = samples[block * len(samples) // BLOCKS : (block + 1) * len(samples) // BLOCKS]
        means.append((_mean([at for at, _ in part]) / 3600, _mean([value for _, value in part])))
    x0, y0 = _mean([x for x, _ in means]), _mean([y for _, y in means])
    spread = sum((x - x0) ** 2 for x, _ in means)
    per_hour = sum((x - x0) * (y - y0) for x, y in means) / spread
    rest = sum((y - y0 - per_hour * (x - x0)) ** 2 for x, y in means) / (BLOCKS - 2)
    half = _T * math.sqrt(rest / spread)
    line = [value - y0 - per_hour * (at / 3600 - x0) for at, value in samples]
    noise = math.sqrt(sum(left**2 for left in line) / len(line))
    return Slope(per_hour, per_hour - half, per_hour + half, noise, (samples[-1][0] - samples[0][0]) / 3600)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
