"""When an agent that does not keep up leaves records out, and what part of the newest ones it has judged.

It leaves out whole stretches: everything that waits in a ring that fills up although the agent has used all its time.
What follows is judged record by record again. The length of both follows from how much too slow the agent is.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Final

from hicache_obs.exporters.rank_metrics import RankMetrics

SAMPLE_FROM: Final = 0.5
"""A ring that is less full holds enough for a while: nothing is left out."""
WINDOW_S: Final = 60.0
"""Time over which coverage is stated, and after which an agent that leaves nothing out is said to keep up."""


class Backlog:
    """Whether the unread records of one ring are too many to be judged. One thread at a time."""

    def __init__(self) -> None:
        self._fill: float | None = None

    def hopeless(self, fill: float, *, late: bool) -> bool:
        """A turn begins.

        Args:
            fill: How full the ring is, 0 to 1.
            late: The turn before has ended with records unread.

        Returns:
            Whether the ring is ``SAMPLE_FROM`` full, and no emptier than at the last turn, which was late.
        """
        before, self._fill = self._fill, fill
        return late and before is not None and fill >= max(before, SAMPLE_FROM)


class Coverage:
    """Share of the records of the last ``WINDOW_S`` that was analysed. One thread at a time."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()
        self._share: float | None = None

    def share(self, now_s: float, *, analysed: int, lost: int) -> float:
        """The share now, 0 to 1; as before if nothing came meanwhile, and 0 if nothing ever has.

        Args:
            now_s: A clock that never goes back.
            analysed, lost: Records so far.
        """
        seen = self._seen
        if not seen or now_s - seen[-1][0] >= 1.0:
            seen.append((now_s, analysed, lost))
        while len(seen) > 1 and seen[1][0] <= now_s - WINDOW_S:
            seen.popleft()
        new, gone = analysed - seen[0][1], lost - seen[0][2]
        if new + gone:
            self._share = new / (new + gone)
        elif self._share is None and analysed + lost:
            self._share = analysed / (analysed + lost)
        return 0.0 if self._share is None else self._share

    def show(self, of: RankMetrics) -> None:
        """Set the rank's gauge from what its counters say now. Device times that never came are no record lost."""
        lost = of.total("dropped_records_total") - of.value("dropped_records_total", "unresolved")
        share = self.share(time.monotonic(), analysed=of.total("records_total"), lost=lost)
        of.gauge("coverage_ratio").set(int(share * 1e9))
