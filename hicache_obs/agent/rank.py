"""One rank as the node's agent sees it: its ring, its analyzer, its journal and its metrics."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache_obs.agent.fanout import Fanout
from hicache_obs.agent.journals import RingJournal, journal_folder, rebuild
from hicache_obs.agent.pipeline import Follower, RankPipeline
from hicache_obs.agent.sampling import WINDOW_S, Backlog, Coverage
from hicache_obs.agent.scrape_mark import ScrapeMark
from hicache_obs.agent.writers import writer_runs
from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import AnalysisSink
from hicache_obs.errors import TraceError
from hicache_obs.exporters.catalogue import Phase, RingProblem
from hicache_obs.exporters.findings_board import BoardSink, FindingsBoard
from hicache_obs.exporters.metrics_sink import MetricsSink
from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.readers.ring import RingReader
from hicache_obs.readers.ring_header import RingInfo
from hicache_obs.records import Define, Ranks

LOG: Final = logging.getLogger("hicache_obs.agent")
MoreSinks = Callable[[Ranks, Analyzer], Sequence[AnalysisSink]]
"""Further listeners to what is found in a rank's ring."""


@dataclass(frozen=True, slots=True)
class WatchedRing:
    """What a follower of a ring may want to know.

    Attributes:
        path: The ring file.
        info: Its header.
        analyzer: Judges it; to be asked on the thread that feeds it.
        journal: Folder of its journal, ``None`` without one.
    """

    path: Path
    info: RingInfo
    analyzer: Analyzer
    journal: Path | None


Follow = Callable[[WatchedRing], Sequence[Follower]]
"""Makes the followers of a ring."""
MIN_BATCH: Final = 64
MAX_BATCH: Final = 8192
MAX_PAIRS: Final = 512
"""Raced pairs of a rank that may wait for their device times; the board asks for radii by fingerprint."""
TURN_NS: Final = 20_000_000
"""A batch that takes longer is halved next time: the other ranks wait meanwhile, and so does SIGTERM."""
SETTLE_WITHIN_S: Final = 600.0
"""So long the ring of an ended process waits for room in its journal; of ranks that crash in a loop many would wait."""
_QUIET_S: Final = 60.0


class Problems:
    """Counts what went wrong with a rank, and logs the same trouble once a minute at most.

    Args:
        metrics: Where to count.
        rank: Whose trouble it is; ``None`` if a file does not say.
    """

    def __init__(self, metrics: Metrics, rank: Ranks | None) -> None:
        self._counters = {}
        if rank is not None:
            of = metrics.rank(rank)
            self._counters = {kind: of.counter("ring_errors_total", kind.value) for kind in RingProblem}
        self._said: dict[RingProblem, tuple[str, float]] = {}

    def note(self, kind: RingProblem, what: str) -> None:
        """Count one problem of ``kind`` and log ``what``."""
        if kind in self._counters:
            self._counters[kind].add()
        text, until = self._said.get(kind, ("", 0.0))
        now = time.monotonic()
        if what != text or now >= until:
            self._said[kind] = (what, now + _QUIET_S)
            LOG.warning("%s", what)


class RankReader:
    """Reads one ring to its end. One thread at a time.

    Args:
        path: The ring file.
        metrics: Gets everything about this rank.
        journals: Directory of the journals; ``None`` for none.
        journal_max_bytes: Of this rank.
        scraped: Somebody reads ``metrics`` again and again: what was not read yet is counted by the next agent.
        board: Gets the findings.
        more_sinks: Further listeners.
        follow: Makes those that want the records too; what an agent before this one has judged does not come again.
        accepts: See ``MetricsSink``.

    Raises:
        TraceError: The ring cannot be read.
    """

    def __init__(
        self,
        path: Path,
        metrics: Metrics,
        *,
        journals: Path | None,
        journal_max_bytes: int,
        scraped: bool,
        board: FindingsBoard,
        more_sinks: MoreSinks,
        follow: Follow,
        accepts: Callable[[str], bool],
    ) -> None:
        self.path: Final = path
        self.reader: Final = RingReader(path)
        try:
            self.rank: Final = self.reader.info.ranks
            self.done = self.reader.finished
            """Another agent has read it to its end."""
            self.blind = False
            self.ended = False
            """``end`` was called; the ring is kept until ``settle`` succeeds."""
            self._ended_at = 0.0
            self._batch = 256
            self._late = False
            """Not all was read when the last turn ended."""
            self._backlog, self._coverage = Backlog(), Coverage()
            self._skip_to = 0
            """Number of the first record behind those that are left out."""
            self._skipped = 0
            self._skipped_at: float | None = None
            self._accepts = accepts
            self._problems = Problems(metrics, self.rank)
            self._metrics = metrics
            self._of = metrics.rank(self.rank)
            self._journal: RingJournal | None = None
            self._mark: ScrapeMark | None = None
            if scraped and journals is not None and not self.done:
                self._mark = ScrapeMark(journal_folder(journals, path, self.reader.info), begin=self.reader.position)
            self._board, self._pipeline = self._open(journals, journal_max_bytes, board, more_sinks, follow)
        except BaseException:
            self.reader.close()
            raise

    def _open(
        self, journals: Path | None, max_bytes: int, board: FindingsBoard, more_sinks: MoreSinks, follow: Follow
    ) -> tuple[BoardSink, RankPipeline]:
        reader = self.reader
        fanout = Fanout()  # what is rebuilt has been reported by the agent before this one, but for its last seconds
        analyzer = Analyzer(fanout, pairs=MAX_PAIRS)
        counted = MetricsSink(self._metrics, self.rank, accepts=self._accepts)
        shown = board.sink(self.rank, analyzer)
        kept = reader.position
        definitions: Sequence[Define] = ()
        if not self.done:
            folder = None if journals is None else journal_folder(journals, self.path, reader.info)
            known = rebuild(
                analyzer,
                folder,
                reader.info,
                tail=reader.position,
                unshown=None if self._mark is None else self._mark.first,
                listen=lambda: fanout.listen([counted, shown]),
            )
            kept, definitions = known.kept, known.definitions
            if known.problem is not None:
                self._problems.note(RingProblem.JOURNAL, f"{known.problem}; earlier records are unknown")
            if folder is not None:
                self._journal = RingJournal(
                    folder,
                    reader.info,
                    max_bytes=max_bytes,
                    on_error=lambda error: self._problems.note(RingProblem.JOURNAL, f"journal {folder}: {error}"),
                    position=kept,
                    stated=known.stated,
                    resume=known.last,
                )
                self._journal.learn(known.definitions)
        followers = () if self.done else follow(WatchedRing(self.path, reader.info, analyzer, self.journal))
        for follower in followers:
            follower.on_batch(definitions, last=False)
        fanout.listen([counted, shown, *more_sinks(self.rank, analyzer), *followers])
        return shown, RankPipeline(reader, analyzer, journal=self._journal, kept=kept, followers=followers)

    @property
    def journal(self) -> Path | None:
        """Where its records are kept."""
        return None if self._journal is None else self._journal.folder

    def runs(self) -> bool:
        """Whether more may come: ask before the last ``step``.

        Raises:
            TraceError: The ring has been cut short.
        """
        return writer_runs(self.reader.info, heartbeat_ns=self.reader.heartbeat_ns, closed=self.reader.closed)

    def begin_turn(self) -> None:
        """Records are about to be read: leave out those that wait, if there are ever more of them."""
        late, self._late = self._late, True
        reader = self.reader
        try:
            fill, pending = reader.fill, reader.pending
        except TraceError:
            return  # the next step meets it, too
        if reader.position < self._skip_to or not self._backlog.hopeless(fill, late=late):
            return
        self._skip_to = reader.position + pending
        if self._skipped_at is None:
            kept = "kept in the journal and" if self._journal is not None else "not kept and"
            LOG.warning("%s: cannot be judged in time; records are %s not judged in part from now on", self.path, kept)

    def step(self) -> int:
        """Take in as many records as can be judged in a moment, or left out; returns how many.

        0 means that there are none. Never raises for what is in the ring.
        """
        start_ns = time.perf_counter_ns()
        count, limit = 0, self._batch
        try:
            if self.reader.position < self._skip_to:
                limit = min(limit, self._skip_to - self.reader.position)
                count = self._pipeline.skip(limit)
                self._skipped += count
                self._skipped_at = time.monotonic()
            else:
                count = self._pipeline.step(limit)
        except TraceError as error:
            self.blind = self.done = True
            self._problems.note(RingProblem.UNREADABLE, f"{error}; it is not read any further")
        except Exception as error:  # noqa: BLE001 one rank's trouble must not end the others' agent
            self._fail(error)
            count = 1  # at least
        spent_ns = time.perf_counter_ns() - start_ns
        self._metrics.add_overhead(Phase.ANALYZE, spent_ns, self.rank)
        if spent_ns > TURN_NS:
            self._batch = max(MIN_BATCH, limit // 2)
        elif count == self._batch:
            self._batch = min(MAX_BATCH, limit * 2)
        self._late = count > 0
        return count

    def end(self) -> None:
        """Give every pair its verdict: the writer has ended, and ``step`` found nothing more. See ``settle``."""
        self.ended, self._ended_at = True, time.monotonic()
        try:
            self._pipeline.end()
            self._board.refresh()
        except TraceError as error:
            self.blind = True
            self._problems.note(RingProblem.UNREADABLE, str(error))
        except Exception as error:  # noqa: BLE001 see step
            self._fail(error)
        self._show_pending()

    def settle(self) -> bool:
        """After ``end``: whether the ring needs nothing more. A journal on a full disk has to state its losses yet."""
        try:
            self.done = self._pipeline.settle(at_last=time.monotonic() - self._ended_at > SETTLE_WITHIN_S)
        except TraceError as error:
            self.blind = self.done = True
            self._problems.note(RingProblem.UNREADABLE, str(error))
        return self.done

    def leave(self) -> None:
        """The agent ends, the writer does not. With a journal the next agent goes on; without, open pairs end here."""
        try:
            if self._journal is None and not self.done and not self.ended:
                self._pipeline.finish()
            else:
                self._pipeline.close()
        except Exception as error:  # noqa: BLE001 see step
            self._fail(error)
        self.reader.close()

    def show(self) -> None:
        """Bring the gauges of this rank up to date."""
        if self.done:
            return
        reader, of = self.reader, self._of
        try:
            of.gauge("unread_records").set(_stored(reader.pending))
            of.gauge("capture_mode").set(reader.mode)
            of.gauge("heartbeat_timestamp_seconds").set(_stored(reader.info.to_wall_ns(reader.heartbeat_ns)))
            seen = reader.observable
        except TraceError:
            return  # the next step meets it, too
        self._metrics.set_clock_error(self._pipeline.clock_error_ns, self.rank)
        if seen is not None:
            self._metrics.set_observable(seen, self.rank)
        self._show_pending()
        self._show_coverage()

    def _show_coverage(self) -> None:
        self._coverage.show(self._of)
        if self._skipped_at is not None and time.monotonic() - self._skipped_at > WINDOW_S:
            LOG.info("%s: is judged in full again; %d records were left out", self.path, self._skipped)
            self._skipped, self._skipped_at = 0, None
        self._of.gauge("sampling").set(int(self._skipped_at is not None))

    def turn(self, *, scraped: bool) -> None:
        """A cycle is over; ``scraped``: the metrics were read since the last one."""
        if self._mark is not None:
            self._mark.turn(self.reader.position, scraped=scraped)

    def _show_pending(self) -> None:
        """Transfers under way, as far as they are followed: none of a rank that is not judged any more."""
        now_ns, judging = time.time_ns(), self._pipeline.judging
        for pending in self._pipeline.analyzer.pending_transfers():
            age_ns = 0
            if judging and pending.oldest_ns is not None:
                age_ns = max(0, now_ns - self.reader.info.to_wall_ns(pending.oldest_ns))
            self._metrics.set_pending(pending.kind, pending.transfers if judging else 0, _stored(age_ns), self.rank)

    def _fail(self, error: Exception) -> None:
        self.blind = True
        LOG.debug("%s", self.path, exc_info=error)
        what = f"{self.path}: the analyzer failed ({type(error).__name__}: {error}); this rank is not judged any more"
        self._problems.note(RingProblem.ANALYSIS, what)


def _stored(value: int) -> int:
    """``value`` as a metric can hold it: the words of a header may be anything."""
    return max(0, min(value, 2**63 - 1))
