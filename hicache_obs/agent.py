"""The agent: reads a ring, writes the journal, analyses, reports. One loop, as a thread or called inline.

The observed engine only appends to its ring; everything else happens here. Inline use (``poll`` after each
scheduler step) keeps a run on the virtual device deterministic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import AnalysisSink, FenceCost, TransferCost
from hicache_obs.findings import Finding, Hazard
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.readers.ring import RingReader
from hicache_obs.records import DropReason, OpId


class Fanout:
    """An ``AnalysisSink`` that passes everything on to several."""

    def __init__(self, sinks: Sequence[AnalysisSink]) -> None:
        self._sinks = tuple(sinks)

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        for sink in self._sinks:
            sink.on_checked(hazard, pages, pairs)

    def on_finding(self, finding: Finding) -> None:
        for sink in self._sinks:
            sink.on_finding(finding)

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        for sink in self._sinks:
            sink.on_weak_ordering(hazard, provenance, pair)

    def on_fence(self, cost: FenceCost) -> None:
        for sink in self._sinks:
            sink.on_fence(cost)

    def on_layer_wait(self, waited_ns: int) -> None:
        for sink in self._sinks:
            sink.on_layer_wait(waited_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        for sink in self._sinks:
            sink.on_transfer(cost)

    def on_records(self, count: int) -> None:
        for sink in self._sinks:
            sink.on_records(count)

    def on_lost(self, count: int, reason: DropReason) -> None:
        for sink in self._sinks:
            sink.on_lost(count, reason)


class Agent:
    """Drives one ring to its reports.

    Args:
        reader: The ring's only reader.
        analyzer: Fed with every record, in ring order.
        resolve: Called before each read; appends device times of finished operations to the ring
            (``Recorder.resolve``). Absent when the observed process does that itself.
        journal: Receives every record before it is analysed.
        period_s: Time between reads of ``start``'s thread.
        on_spent: Told after each read how many nanoseconds of host time went into ``resolve``, and into the rest.
    """

    def __init__(
        self,
        reader: RingReader,
        analyzer: Analyzer,
        *,
        resolve: Callable[[], int] | None = None,
        journal: JournalWriter | None = None,
        period_s: float = 0.1,
        on_spent: Callable[[int, int], None] | None = None,
    ) -> None:
        self._reader = reader
        self._analyzer = analyzer
        self._resolve = resolve
        self._journal = journal
        self._period_s = period_s
        self._on_spent = on_spent
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def poll(self) -> int:
        """Read, journal and analyse what is there now; returns the number of records. Not for two threads."""
        start_ns = time.perf_counter_ns()
        if self._resolve is not None:
            self._resolve()
        resolved_ns = time.perf_counter_ns()
        records = self._reader.poll()
        if records:
            if self._journal is not None:
                self._journal.write(records)
            self._analyzer.feed(records)
        if self._on_spent is not None:
            self._on_spent(resolved_ns - start_ns, time.perf_counter_ns() - resolved_ns)
        return len(records)

    def start(self) -> None:
        """Poll from a thread until ``finish``."""
        self._thread = threading.Thread(target=self._run, name="hicache-obs-agent", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop the thread, take in what is left, give open pairs their verdict, close the journal.

        Call it when the engine is idle, so that every event pair can resolve. Raises what the thread raised.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        while self.poll():
            pass
        self._analyzer.finish()
        if self._journal is not None:
            self._journal.close()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._period_s):
                self.poll()
        except BaseException as error:  # noqa: BLE001 handed to the thread that calls finish
            self._failure = error
