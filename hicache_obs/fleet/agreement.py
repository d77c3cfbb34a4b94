"""``compare``: whether two ranks decided the same; ``clock_bounds``: how far their clocks are apart.

Sequences that are complete from their first decision are laid side by side. Where records were lost, or the oldest
segments of a journal are gone, the place in the sequence is not known: such a stretch is laid where ``ANCHOR``
decisions in a row, which occur once in either sequence, are the same. What cannot be laid anywhere is not compared.
A sequence that ends earlier agrees as far as it goes: a journal ends where its process or its agent did.

Clocks: nobody leaves a blocking collective before all have entered it. With ``a`` and ``b`` the readings of two ranks'
own clocks at their calls, and ``a'`` and ``b'`` those at the next call of the same thread, every common collective says
that the second clock is ahead by at least ``b - a'`` and at most ``b' - a``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache_obs.fleet.decisions import Decisions

ANCHOR: Final = 16
"""Decisions in a row that must be the same, and nowhere else, to know which place is which."""
_FACTOR: Final = np.uint64(0x9E3779B97F4A7C15)
Hashes = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two sequences side by side.

    Attributes:
        compared: Decisions that were compared and are the same.
        difference: The first place where they differ, in the first and in the second sequence.
        unplaced: Decisions of the second one behind a loss, of which nobody knows their counterparts.
        aligned: ``(first, second, count)``: parts that are the same.
    """

    compared: int
    difference: tuple[int, int] | None
    unplaced: int
    aligned: tuple[tuple[int, int, int], ...]

    @property
    def decided(self) -> bool:
        """Whether anything can be said at all."""
        return bool(self.compared or self.difference is not None)


def compare(first: Decisions, second: Decisions) -> Comparison:
    """Lay ``second`` beside ``first``."""
    a, b = _array(first.hashes), _array(second.hashes)
    aligned: list[tuple[int, int, int]] = []
    difference: tuple[int, int] | None = None
    unplaced = 0
    whole = first.from_start and second.from_start
    for begin, end in second.stretches:
        if begin == 0 and whole and len(a):
            count = min(first.stretches[0][1], end)
            places = [(0, 0, count), *_places(a, first.stretches[1:], b, (count, end))]
        else:
            places = _places(a, first.stretches, b, (begin, end))
        if not places:
            unplaced += end - begin
        for at, to, count in places:
            same = a[at : at + count] == b[to : to + count]
            good = count if same.all() else int(np.argmin(same))
            if good:
                aligned.append((at, to, good))
            if good < count:
                difference = at + good, to + good
                break
        if difference is not None:
            break  # what comes later is a consequence
    return Comparison(sum(count for _, _, count in aligned), difference, unplaced, tuple(aligned))


def _places(
    a: Hashes, stretches: list[tuple[int, int]], b: Hashes, stretch: tuple[int, int]
) -> list[tuple[int, int, int]]:
    """Where ``stretch`` of ``b`` lies in ``a``: begins and length, per stretch of ``a`` that has an anchor of it."""
    begin, end = stretch
    marks, where = _once(_anchors(b[begin:end]))
    found = []
    for low, high in stretches:
        others, elsewhere = _once(_anchors(a[low:high]))
        common, in_a, in_b = np.intersect1d(others, marks, assume_unique=True, return_indices=True)
        if not len(common):
            continue
        number = int(np.argmin(where[in_b]))
        at, to = low + int(elsewhere[in_a[number]]), begin + int(where[in_b[number]])
        back = min(at - low, to - begin)
        at, to = at - back, to - back
        found.append((at, to, min(high - at, end - to)))
    return sorted(found, key=lambda place: place[1])


def _once(marks: Hashes) -> tuple[Hashes, npt.NDArray[np.intp]]:
    """Numbers that occur once, and where."""
    values, where, counts = np.unique(marks, return_index=True, return_counts=True)
    return values[counts == 1], where[counts == 1]


def _anchors(hashes: Hashes) -> Hashes:
    """A number for every ``ANCHOR`` decisions in a row, by where they begin."""
    count = len(hashes) - ANCHOR + 1
    if count < 1:
        return np.zeros(0, np.uint64)
    marks = np.zeros(count, np.uint64)
    for number in range(ANCHOR):
        marks = marks * _FACTOR + hashes[number : number + count]
    return marks


def _array(values: Any) -> Hashes:
    return np.frombuffer(values, np.uint64) if len(values) else np.zeros(0, np.uint64)


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far a clock is ahead of another, nanoseconds; from ``count`` collectives.

    ``low_ns > high_ns``: no single distance fits, so a clock drifts, or the collective does not block.
    """

    low_ns: int
    high_ns: int
    count: int


def clock_bounds(first: Decisions, second: Decisions, aligned: tuple[tuple[int, int, int], ...]) -> Bounds | None:
    """How far the second rank's clock is ahead of the first's; ``None`` without a common collective.

    Args:
        first, second: Of one group.
        aligned: As ``compare`` gave it.
    """
    low, high, count = None, None, 0
    times = [
        np.frombuffer(column, np.int64) if len(column) else np.zeros(0, np.int64)
        for column in (first.entered_ns, first.left_ns, second.entered_ns, second.left_ns)
    ]
    for at, to, length in aligned:
        entered_a, left_a = (column[at : at + length] for column in times[:2])
        entered_b, left_b = (column[to : to + length] for column in times[2:])
        both = (left_a >= 0) & (left_b >= 0)
        if not both.any():
            continue
        lows, highs = (entered_b - left_a)[both], (left_b - entered_a)[both]
        low = int(lows.max()) if low is None else max(low, int(lows.max()))
        high = int(highs.min()) if high is None else min(high, int(highs.min()))
        count += int(both.sum())
    if low is None or high is None:
        return None
    return Bounds(low, high, count)
