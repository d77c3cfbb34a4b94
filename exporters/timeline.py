"""What a timeline is made of, whatever file it ends up in: groups of tracks, slices, marks, arrows, counters.

``record_timeline`` draws records, ``profile_timeline`` a profiler's rows; ``perfetto`` and ``chrome`` write the files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np

from hicache_obs.records import PageIds

Value = int | str
Args = Mapping[str, Value]
MAX_RUNS: Final = 16
"""Runs of page ids that are spelled out in one argument; the rest are counted."""
MAX_TEXT: Final = 1000
"""Characters of one name or argument."""
MAX_LANES: Final = 64
"""Lanes of one track; what overlaps more than that shares the last one and is drawn as a mark."""


class Flow(NamedTuple):
    """One end of an arrow.

    Attributes:
        number: Of the arrow; both ends have the same.
        out: It leaves here. The end that an arrow leaves is never later than the one it enters.
    """

    number: int
    out: bool


class TimelineWriter(Protocol):
    """Takes a timeline in any order, and writes it at once. Numbers of groups and tracks are the caller's, from 1."""

    def group(self, number: int, parent: int, name: str, rank: int) -> None:
        """A group of tracks. One without ``parent`` (0) is a process; ``rank`` is its place among its siblings."""

    def track(self, number: int, group: int, name: str, rank: int, *, lane: int = 0) -> None:
        """A row for slices that follow each other; further lanes of a track have its name."""

    def counter_track(self, number: int, group: int, name: str, rank: int, unit: str) -> None:
        """A row for ``count``."""

    def slice(
        self, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Args, flows: Sequence[Flow] = ()
    ) -> None:
        """Something that lasted. On one track no slice begins before the one written before it has ended."""

    def mark(self, track: int, name: str, category: str, at_ns: int, args: Args, flows: Sequence[Flow] = ()) -> None:
        """A moment."""

    def count(self, track: int, at_ns: int, value: int) -> None:
        """A counter has a value from a moment on."""


class Numbers:
    """Numbers for groups, tracks and arrows, unique in one file."""

    def __init__(self) -> None:
        self._last = 0

    def __call__(self) -> int:
        self._last += 1
        return self._last


class Lanes:
    """One track of things that may overlap after all: what does not fit into a lane goes into the next one.

    Args:
        writer: Where to draw.
        numbers: Gives each lane its number.
        group, name, rank: Of the track.
    """

    def __init__(self, writer: TimelineWriter, numbers: Numbers, group: int, name: str, rank: int) -> None:
        self._writer = writer
        self._numbers = numbers
        self._place = (group, name, rank)
        self._tracks: list[int] = []
        self._ends: list[int] = []

    def slice(
        self, name: str, category: str, start_ns: int, end_ns: int, args: Args, flows: Sequence[Flow] = ()
    ) -> None:
        """Draw a slice in the first lane that is free from ``start_ns`` on."""
        lane = next((lane for lane, end in enumerate(self._ends) if end <= start_ns), len(self._ends))
        if lane == MAX_LANES:
            self.mark(name, category, start_ns, {**args, "end_ns": end_ns}, flows)
            return
        if lane == len(self._ends):
            self._add()
        self._ends[lane] = max(start_ns, end_ns)
        self._writer.slice(self._tracks[lane], name, category, start_ns, max(start_ns, end_ns), args, flows)

    def mark(self, name: str, category: str, at_ns: int, args: Args, flows: Sequence[Flow] = ()) -> None:
        """Draw a moment in the first lane."""
        if not self._tracks:
            self._add()
        self._writer.mark(self._tracks[0], name, category, at_ns, args, flows)

    def _add(self) -> None:
        track, lane = self._numbers(), len(self._tracks)
        group, name, rank = self._place
        self._writer.track(track, group, name, rank, lane=lane)
        self._tracks.append(track)
        self._ends.append(-(1 << 63))


def ids_text(ids: Sequence[int] | PageIds) -> str:
    """Ids as runs, in their order, and how many they are: ``3-9, 12 (8)``; of many runs the first ones."""
    values = np.asarray(ids, np.int64)
    if not len(values):
        return "none"
    begins = np.flatnonzero(values[1:] - values[:-1] != 1) + 1
    places = [0, *begins[:MAX_RUNS].tolist(), len(values)]
    firsts, lasts = values[places[:-1]].tolist(), values[np.array(places[1:]) - 1].tolist()
    runs = [str(low) if low == high else f"{low}-{high}" for low, high in zip(firsts, lasts, strict=True)]
    more = len(begins) + 1 - MAX_RUNS
    return ", ".join(runs[:MAX_RUNS]) + (f" and {more} more runs" if more > 0 else "") + f" ({len(values)})"


def plain_text(text: str) -> str:
    """``text`` from a file as every format takes it: valid Unicode without control characters, of bounded length."""
    if len(text) <= MAX_TEXT and text.isprintable():
        return text
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[:MAX_TEXT])
    return shown if len(text) <= MAX_TEXT else f"{shown}..."
