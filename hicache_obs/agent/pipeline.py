"""One ring's way through the agent: read, keep in the journal, analyse, free. The same steps in every agent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import AnalysisSink
from hicache_obs.readers.ring import RingReader
from hicache_obs.records import NO_OP, AnyRecord, Define, DropReason, Lost, ThreadId, Times

_PASSED: Final = frozenset({Define, Lost})
_NOT_ISSUED: Final = frozenset({Define, Lost, Times})


class Journal(Protocol):
    """Where records are kept before they are analysed."""

    def write(self, records: Sequence[AnyRecord]) -> None:
        """Keep ``records`` as one batch."""

    @property
    def settled(self) -> bool:
        """Whether every record is kept, or stated as gone."""

    def close(self) -> None:
        """State what is not stated yet, if that is possible now, and end it; nothing follows."""


class Follower(AnalysisSink, Protocol):
    """A listener that also wants the records, after the analyzer has said what it makes of them."""

    def on_batch(self, records: Sequence[AnyRecord], *, last: bool) -> None:
        """``records`` were analysed; ``last``: every pair has its verdict, and nothing follows."""


class RankPipeline:
    """Drives one ring. One thread at a time.

    The room of a batch in the ring is freed last. An agent that is killed before that leaves a ring whose unread
    part begins with this batch: its successor sees the batch again, and finds in the journal whether it is kept.

    Args:
        reader: The ring's only reader.
        analyzer: Fed with every record, in ring order.
        journal: Gets every record before it is analysed.
        kept: Number of the first record that the journal does not hold yet; it is not given those before.
        followers: Given every batch once it is analysed; they are sinks of the analyzer as well.
    """

    def __init__(
        self,
        reader: RingReader,
        analyzer: Analyzer,
        *,
        journal: Journal | None = None,
        kept: int = 0,
        followers: Sequence[Follower] = (),
    ) -> None:
        self.reader: Final = reader
        self.analyzer: Final = analyzer
        self.judging = True
        """False after the analyzer failed: records are still kept, but nobody judges them."""
        self.clock_error_ns = 0
        """Half width of the uncertainty of the newest device times."""
        self._journal = journal
        self._kept = kept
        self._followers = followers
        self._last_op = int(NO_OP)
        """The newest operation that the analyzer has seen issued."""

    def step(self, limit: int = 1 << 16) -> int:
        """Take in the next ``limit`` records at most; returns how many there were.

        Raises:
            TraceError: The ring is damaged. The same record is met again by the next call.
            OSError: The journal refused the records.
            Exception: The analyzer failed. The batch is kept, its room is free, and later batches are not analysed.
        """
        first = self.reader.position
        records = self.reader.read(limit)
        if not records:
            return 0
        try:
            self._take(records[max(0, self._kept - first) :], records)
        finally:
            self.reader.release()
        return len(records)

    def skip(self, limit: int = 1 << 16) -> int:
        """As ``step``, but nobody judges these records, and the analyzer is told so: an access before them and one
        behind them make an unknown pair. The journal gets them all. Names and the device times of what was judged
        before are passed on.

        Raises:
            TraceError: As ``step``.
            OSError: As ``step``.
            Exception: As ``step``.
        """
        first = self.reader.position
        if self._journal is None:
            count, passed = self.reader.skip(limit, last_op=self._last_op)
        else:
            records = self.reader.read(limit)
            count = len(records)
            passed = [r for r in records if type(r) in _PASSED or (type(r) is Times and r.op <= self._last_op)]
        if not count:
            return 0
        try:
            if self._journal is not None and (new := records[max(0, self._kept - first) :]):
                self._journal.write(new)
            left_out = count - len(passed)
            if left_out:
                passed.append(Lost(NO_OP, ThreadId(0), 0, left_out, DropReason.SAMPLED_OUT))
            self._judge(passed)
        finally:
            self.reader.release()
        return count

    def finish(self) -> None:
        """Give open pairs their verdict and close the journal. The reader stays open."""
        try:
            self._judge([], last=True)
        finally:
            self.close()

    def end(self) -> None:
        """``finish`` for a ring whose writer has ended and that was read whole: what it dropped last is stated too.

        ``settle`` is to follow, until it succeeds.
        """
        lost = self.reader.unreported
        if lost:  # an agent before this one may have kept that, and been killed before the ring was marked
            self._take(lost[max(0, self._kept - self.reader.position) :], lost)
        self.finish()

    def settle(self, *, at_last: bool = False) -> bool:
        """Mark the ring as done, once its journal has everything or states what it has not; whether that is so.

        Until then the next agent finds the ring, and sees to it. ``at_last``: mark it in any case.
        """
        if self._journal is not None and not self._journal.settled:
            self._journal.close()
        journal = self._journal
        if journal is not None and not at_last and not journal.settled:
            return False
        self.reader.finish()
        return True

    def close(self) -> None:
        """Close the journal; open pairs stay open for an agent that goes on from there."""
        if self._journal is not None:
            self._journal.close()

    def _take(self, new: Sequence[AnyRecord], records: Sequence[AnyRecord]) -> None:
        if new and self._journal is not None:
            self._journal.write(new)
        self.clock_error_ns = next((r.error_ns for r in reversed(records) if type(r) is Times), self.clock_error_ns)
        self._judge(records)

    def _judge(self, records: Sequence[AnyRecord], *, last: bool = False) -> None:
        if not self.judging:
            return
        newest = next((int(r.op) for r in reversed(records) if type(r) not in _NOT_ISSUED), int(NO_OP))
        self._last_op = max(self._last_op, newest)
        try:
            self.analyzer.feed(records)
            if last:
                self.analyzer.finish()
        except Exception:
            self.judging = False
            raise
        for follower in self._followers:
            follower.on_batch(records, last=last)
