"""Why nothing orders a pair: what was done to its pages in between, and the recent waits that miss it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import count, repeat
from operator import attrgetter
from typing import Final

from hicache_obs.analyzer.foreign import Foreign
from hicache_obs.analyzer.hazards import TRANSFERS, Hazards, part, principal
from hicache_obs.analyzer.order import Actor, Order, Snapshot
from hicache_obs.analyzer.shadow import Conflict, Operation, Shadow
from hicache_obs.findings import Cause, Proof
from hicache_obs.records import Space, StreamId

RECENT_WAITS: Final = 256
_FORMER: Final = attrgetter("former")
_IN_VAIN: Final = (Cause.EARLY_EVENT, Cause.EVENT_REUSE, Cause.EVENT_UNRECORDED)
"""Causes of those who did wait before they gave pages away, for the wrong record."""


_Wait = tuple[Actor, StreamId | None, Snapshot | None, Snapshot | None, int, int]
"""A wait seen recently: who waits, on which stream, for what, what the event's record had replaced, its position in
the trace, and the waiter's epoch then: a later one means the waiter has run something since."""


class Causes:
    """Explains unordered pairs from the newest ``RECENT_WAITS`` waits. Fed by the analyzer in trace order."""

    def __init__(self, order: Order, shadow: Shadow, hazards: Hazards, foreign: Foreign) -> None:
        self._order = order
        self._foreign = foreign
        self._shadow = shadow
        self._hazards = hazards
        self._waits: deque[_Wait] = deque(maxlen=RECENT_WAITS)
        self._threads: set[Actor] = set()
        """Host threads that have waited."""

    def note_wait(self, waiter: Actor, stream: StreamId | None, snapshot: Snapshot | None, seq: int) -> None:
        """``waiter`` waits for ``snapshot``, ``None`` if the event was never recorded.

        Args:
            stream: The waiting stream; of ``note_sync`` the one that the thread synchronised with.
        """
        former = None if snapshot is None else snapshot.former
        self._waits.append((waiter, stream, snapshot, former, seq, self._order.clocks[waiter][0][waiter]))

    def note_sync(self, thread: Actor, stream: StreamId | None, snapshot: Snapshot | None, seq: int) -> None:
        """``note_wait`` of a host thread; ``stream`` is ``None`` if it waits for an event, or for all streams, or has
        asked for an event and been told that it is complete."""
        self._threads.add(thread)
        self.note_wait(thread, stream, snapshot, seq)

    def note_waits(self, waiter: Actor, stream: StreamId, snapshots: Sequence[Snapshot], seq: int, epoch: int) -> None:
        """``note_wait`` for each of ``snapshots``, the first at ``seq`` and ``epoch``, an operation behind each."""
        formers, seqs, epochs = map(_FORMER, snapshots), count(seq, 2), count(epoch)
        self._waits.extend(zip(repeat(waiter), repeat(stream), snapshots, formers, seqs, epochs, strict=False))

    def of(self, conflict: Conflict, later: Operation, actor: Actor, proof: Proof) -> tuple[Cause, StreamId | None]:
        """The cause, and for ``WRONG_STREAM`` the stream that waits, or was waited for, instead."""
        earlier = conflict.earlier
        if proof is Proof.UNKNOWN:
            return self._unknown(conflict, later), None
        if self._hazards.stale(conflict.overlaps, earlier, later):
            return Cause.STALE_ADDRESS, None
        if later.label.what == "graph" and part(earlier) == "restore":
            return Cause.GRAPH_SKIPS_WAIT, None
        freed = any(self._shadow.freed_since(overlap, earlier.seq) for overlap in conflict.overlaps)
        if freed and principal(conflict.overlaps).space is Space.BUFFER:
            return Cause.NO_RECORD_STREAM, None
        if freed and part(earlier) in TRANSFERS:
            cause, _ = self._useless_wait(earlier, later, actor)
            return cause if cause in _IN_VAIN else Cause.EARLY_FREE, None
        if earlier.label.stream is None and earlier.label.thread != later.label.thread:
            return Cause.THREAD_RACE, None
        return self._useless_wait(earlier, later, actor)

    def _unknown(self, conflict: Conflict, later: Operation) -> Cause:
        """Why nobody can tell."""
        earlier = conflict.earlier
        if earlier.label.stream is not None and earlier.label.stream == later.label.stream:
            return Cause.EARLY_START  # nothing else takes the order out of a stream
        if earlier.seq < self._foreign.waited_at:
            return Cause.SHARED_EVENT
        if earlier.seq < self._order.lost_at:
            return Cause.RECORDS_LOST
        return Cause.SHARED_MEMORY if self._foreign.covers(conflict.overlaps) else Cause.RECORDS_LOST

    def _useless_wait(self, earlier: Operation, later: Operation, actor: Actor) -> tuple[Cause, StreamId | None]:
        """The wait between the two that was meant to order them, and the stream it concerns; newest first.

        For an access in no stream the wait is its thread's own: a synchronize with a stream that ran none of it. Before
        a launch, a thread that waits for a transfer wants to know its pages free, but one that waits for an older
        forward round just wants its results: no early event.
        """
        before, issuer = earlier.group.actor, self._order.thread(later.label.thread)
        thread = issuer if later.label.stream is None else None
        releaser = issuer if part(earlier) in TRANSFERS else thread
        cause = Cause.MISSING_FENCE
        for waiter, stream, snapshot, former, seq, epoch in reversed(self._waits):
            if seq < earlier.seq:
                break
            mine = waiter in (actor, issuer)
            if snapshot is None:
                if mine:
                    cause = Cause.EVENT_UNRECORDED
                continue
            covers = snapshot.covers(before, earlier.epoch)
            if not covers and mine and former is not None and former.covers(before, earlier.epoch):
                return Cause.EVENT_REUSE, None
            if covers and waiter in self._threads and waiter != issuer:
                return Cause.WRONG_THREAD, None
            idle = stream is not None and not covers and waiter == thread and snapshot.actor != before
            unused = epoch == self._order.clock(waiter)[waiter]  # a fence that protects no work
            if idle or (covers and waiter != actor and unused):
                return Cause.WRONG_STREAM, stream
            if waiter in (actor, releaser) and not covers and self._ahead(snapshot, before, earlier):
                cause = Cause.EARLY_EVENT
        return cause, None

    def _ahead(self, snapshot: Snapshot, before: Actor, earlier: Operation) -> bool:
        """Whether a record that does not cover ``earlier`` was made where it ran, too early: on its stream, or by an
        entry of its graph."""
        if snapshot.actor == before:
            return True
        return earlier.within and snapshot.seq < earlier.seq and self._order.same_graph(snapshot.actor, before)
