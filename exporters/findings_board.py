"""The newest findings of all ranks, one entry per rank and fingerprint, for whoever wants to show them. Bounded."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Final

from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import FenceCost, TransferCost
from hicache_obs.findings import BlastRadius, Finding, Hazard, Verdict
from hicache_obs.records import DropReason, OpId, Ranks

MAX_ENTRIES: Final = 256
MAX_RADII: Final = 16
"""Newest entries of a rank whose blast radius is kept up to date."""
REFRESH_S: Final = 5.0
_SHARE: Final = 50
"""Blast radii are computed again after this many times what they took, at the earliest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """What one rank has of one fingerprint.

    Attributes:
        rank: The rank.
        finding: The newest of the worst verdict; rather not a secondary one.
        verdicts: Operation pairs by verdict.
        seen_ns: Wall clock at the newest.
        radius: What they all have spoiled; ``None`` if not computed.
    """

    rank: Ranks
    finding: Finding
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    seen_ns: int = 0
    radius: BlastRadius | None = None

    @property
    def count(self) -> int:
        """Operation pairs."""
        return sum(self.verdicts.values())


class FindingsBoard:
    """Collects findings from the threads of all analyzers; any thread may read.

    Args:
        now_ns: Wall clock, nanoseconds since the epoch.
    """

    def __init__(self, now_ns: Callable[[], int] = time.time_ns) -> None:
        self._now_ns = now_ns
        self._lock = threading.Lock()
        self._entries: dict[tuple[Ranks, str], Entry] = {}
        """The one that was seen last is last."""

    def sink(self, rank: Ranks, analyzer: Analyzer | None = None) -> BoardSink:
        """A listener to one analyzer of ``rank``; with the analyzer itself, blast radii are known."""
        return BoardSink(self, rank, analyzer)

    def entries(self) -> list[Entry]:
        """All entries, newest first."""
        with self._lock:
            return list(reversed(self._entries.values()))

    def note(self, rank: Ranks, finding: Finding) -> None:
        """Add one finding."""
        key = rank, finding.fingerprint
        with self._lock:
            known = self._entries.pop(key, None)
            verdicts = Counter(known.verdicts if known is not None else {})
            verdicts[finding.verdict] += 1
            kept = finding
            if known is not None and _severity(finding) < _severity(known.finding):
                kept = known.finding
            radius = None if known is None else known.radius
            self._entries[key] = Entry(rank, kept, verdicts, self._now_ns(), radius)
            if len(self._entries) > MAX_ENTRIES:
                del self._entries[next(iter(self._entries))]

    def spoiled(self, rank: Ranks, fingerprint: str, radius: BlastRadius) -> None:
        """State what the findings of an entry have spoiled."""
        with self._lock:
            known = self._entries.get((rank, fingerprint))
            if known is not None:
                self._entries[rank, fingerprint] = replace(known, radius=radius)


class BoardSink:
    """An ``AnalysisSink`` that tells a board; on the thread that feeds the analyzer.

    Args:
        board: To tell.
        rank: Whose records are analysed.
        analyzer: Asked for blast radii while it is not in the middle of a record.
    """

    def __init__(self, board: FindingsBoard, rank: Ranks, analyzer: Analyzer | None) -> None:
        self._board = board
        self._rank = rank
        self._analyzer = analyzer
        self._found: dict[str, None] = {}
        self._refresh_at = 0.0

    def on_finding(self, finding: Finding) -> None:
        self._found.pop(finding.fingerprint, None)
        self._found[finding.fingerprint] = None
        if len(self._found) > MAX_RADII:
            del self._found[next(iter(self._found))]
        self._board.note(self._rank, finding)

    def on_records(self, count: int) -> None:
        """The analyzer is done with a batch: now and then, ask it what the findings have spoiled since."""
        if self._found and time.monotonic() >= self._refresh_at:
            self.refresh()

    def refresh(self) -> None:
        """Bring the blast radii up to date, at the end of a ring for example."""
        if self._analyzer is None:
            return
        began = time.monotonic()
        for fingerprint in self._found:
            self._board.spoiled(self._rank, fingerprint, self._analyzer.blast_radius(fingerprint))
        now = time.monotonic()
        self._refresh_at = now + max(REFRESH_S, _SHARE * (now - began))

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        """Metrics count checks."""

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        """Weak orderings are a metric, not a finding."""

    def on_fence(self, cost: FenceCost) -> None:
        """Costs are metrics."""

    def on_layer_wait(self, waited_ns: int) -> None:
        """Costs are metrics."""

    def on_transfer(self, cost: TransferCost) -> None:
        """Costs are metrics."""

    def on_lost(self, count: int, reason: DropReason) -> None:
        """Metrics count losses."""


_ORDER: Final = (Verdict.LATENT, Verdict.UNKNOWN, Verdict.CONTRADICTION, Verdict.VIOLATION)


def _severity(finding: Finding) -> tuple[int, bool]:
    """The greater the sooner it is shown: a first race of its pages before what followed from one."""
    return (_ORDER.index(finding.verdict) if finding.verdict in _ORDER else -1, not finding.secondary)
