"""Columns of integers as text small enough for a page: differences, byte planes, gzip, base64.

A column of sorted or repeating numbers is mostly zeros once each value is its distance from the one before. All lowest
bytes, then all second ones and so on compress better than the values one after the other, and a browser undoes both
in one loop per column (``columns.js``).
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

Int64s = npt.NDArray[np.int64]
MAX_EXACT: Final = 2**53
"""JavaScript's numbers are exact below this."""


@dataclass(slots=True)
class Packed:
    """Columns under construction; ``as_json`` gives what ``unpack`` in ``columns.js`` takes.

    Attributes:
        columns: Name, number of values, bytes per value, and how it was made: ``plain``, or ``delta`` for distances
            from the value before (the first from 0), folded so that negative ones are odd.
    """

    columns: list[list[Any]] = field(default_factory=list)
    _planes: list[bytes] = field(default_factory=list)

    def add(self, name: str, values: Int64s, *, delta: bool = False) -> None:
        """Add a column.

        Args:
            name: Of the column.
            values: ``(n,) int64``, smaller than ``MAX_EXACT`` either way; not negative unless ``delta``.
            delta: Keep distances.

        Raises:
            OverflowError: A value that a browser could not hold exactly.
        """
        if len(values) and (int(values.max()) >= MAX_EXACT or int(values.min()) <= -MAX_EXACT):
            raise OverflowError(f"column {name}: {int(values.max())} is not below 2^53")
        kept = values
        if delta:
            steps = np.diff(values, prepend=np.int64(0))
            kept = np.where(steps < 0, -2 * steps - 1, 2 * steps)
        width = max(1, (int(kept.max(initial=0)).bit_length() + 7) // 8)
        self.columns.append([name, len(kept), width, "delta" if delta else "plain"])
        planes = kept.astype("<i8").view(np.uint8).reshape(-1, 8)[:, :width]
        self._planes.append(np.ascontiguousarray(planes.T).tobytes())

    def as_json(self) -> dict[str, Any]:
        """The columns and their contents; the same for the same values."""
        made = zlib.compressobj(6, zlib.DEFLATED, 31)  # 31: gzip, with no name and no time in its header
        text = b"".join([*(made.compress(plane) for plane in self._planes), made.flush()])
        return {"columns": self.columns, "data": base64.b64encode(text).decode("ascii")}


def unpack(packed: dict[str, Any]) -> dict[str, Int64s]:
    """The columns of ``Packed.as_json``, as the page sees them."""
    data = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"]), 31), np.uint8)
    found: dict[str, Int64s] = {}
    begin = 0
    for name, count, width, how in packed["columns"]:
        planes = data[begin : begin + count * width].reshape(width, count)
        begin += count * width
        values = np.zeros(count, np.int64)
        for number, plane in enumerate(planes):
            values |= plane.astype(np.int64) << (8 * number)
        found[name] = np.cumsum(np.where(values & 1, -(values + 1) // 2, values // 2)) if how == "delta" else values
    return found
