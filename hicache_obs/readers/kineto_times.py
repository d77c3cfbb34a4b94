"""``ns_of``: times of a torch.profiler trace as integer nanoseconds, without a float where it would lose digits."""

from __future__ import annotations

from typing import Any, Final

import msgspec
import numpy as np

from hicache_obs.readers.profile import Int64s, column

_MAX_US: Final = (1 << 63) // 1000
_EXACT_FLOAT: Final = float(1 << 42)
"""Microseconds below which a float64 is exact to a nanosecond."""


class LosesDigits(Exception):
    """Times are too large for a float to hold their nanoseconds: they must be decoded as text."""


def ns_of(values: list[Any]) -> Int64s:
    """Nanoseconds of microseconds, as decoded: integers, floats that hold them exactly, or decimal text.

    Raises:
        LosesDigits: Floats that do not.
        OverflowError: Beyond 64 bits.
    """
    if not values:
        return np.empty(0, np.int64)
    if isinstance(values[0], msgspec.Raw):
        return column([_text_ns(raw) for raw in values])
    numbers = np.array(values)
    if numbers.dtype.kind == "i":
        if int(np.abs(numbers).max()) >= _MAX_US:
            raise OverflowError
        return numbers.astype(np.int64, copy=False) * 1000
    if numbers.dtype.kind != "f":
        raise OverflowError
    if not bool((np.abs(numbers) < _EXACT_FLOAT).all()):  # not a number included
        raise LosesDigits
    rounded: Int64s = np.rint(numbers * 1000).astype(np.int64)
    return rounded


def _text_ns(raw: msgspec.Raw) -> int:
    """Nanoseconds of decimal microseconds in text; digits below a nanosecond are cut off."""
    text = bytes(raw).decode("ascii")
    if "e" in text or "E" in text:
        return round(float(text) * 1000)
    whole, _, fraction = text.partition(".")
    sign = -1 if whole.startswith("-") else 1
    return int(whole) * 1000 + sign * int((fraction + "000")[:3])
