"""Why nothing orders a pair: what was done to its pages in between, and the recent waits that miss it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, repeat
from operator import attrgetter
from typing import Final

from hicache_obs.analyzer.foreign import Foreign
from hicache_obs.analyzer.hazards import TRANSFERS, Hazards, part, principal
from hicache_obs.analyzer.order import Actor, Order, Snapshot
from hicache_obs.analyzer.shadow import Conflict, Operation, Shadow
from hicache_obs.findings import Cause, Proof
from hicache_obs.records import NO_OP, Space, StreamId

RECENT_WAITS: Final = 256
_FORMER: Final = attrgetter("former")
_IN_VAIN: Final = (Cause.EARLY_EVENT, Cause.EVENT_REUSE, Cause.EVENT_UNRECORDED)
"""Causes of those who did wait before they gave pages away, for the wrong record."""


_Wait = tuple[Actor, StreamId | None, Snapshot | None, Snapshot | None, int, int, bool]
"""A wait seen recently: who waits, on which stream, for what, what the event's record had replaced, its position in
the trace, the waiter's epoch then: a later one means the waiter has run something since; and whether it just asked."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Why nothing orders a pair.

    Attributes:
        cause: What the program did wrong.
        stream: For ``WRONG_STREAM``: the stream that waits, or was waited for, instead.
        fence: For a fence on another stream: its actor, and that one's epoch then. If it runs something behind it, the
            fence was meant for that, and the cause is ``otherwise``.
    """

    cause: Cause
    stream: StreamId | None = None
    fence: tuple[Actor, int] | None = None
    otherwise: Cause = Cause.MISSING_FENCE


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
        self._replays: dict[Actor, int] = {}
        """By stream, its epoch behind its newest replay of several entries, which run beside it."""

    def note_wait(
        self, waiter: Actor, stream: StreamId | None, snapshot: Snapshot | None, seq: int, *, polled: bool = False
    ) -> None:
        """``waiter`` waits for ``snapshot``, ``None`` if the event was never recorded.

        Args:
            stream: The waiting stream; of ``note_sync`` the one that the thread synchronised with.
        """
        former = None if snapshot is None else snapshot.former
        self._waits.append((waiter, stream, snapshot, former, seq, self._order.clocks[waiter][0][waiter], polled))

    def note_sync(
        self, thread: Actor, stream: StreamId | None, snapshot: Snapshot | None, seq: int, *, polled: bool = False
    ) -> None:
        """``note_wait`` of a host thread; ``stream`` is ``None`` if it waits for an event, or for all streams, or has
        asked for an event and been told that it is complete."""
        self._threads.add(thread)
        self.note_wait(thread, stream, snapshot, seq, polled=polled)

    def note_waits(self, waiter: Actor, stream: StreamId, snapshots: Sequence[Snapshot], seq: int, epoch: int) -> None:
        """``note_wait`` for each of ``snapshots``, the first at ``seq`` and ``epoch``, an operation behind each."""
        formers, seqs, epochs = map(_FORMER, snapshots), count(seq, 2), count(epoch)
        waits = zip(repeat(waiter), repeat(stream), snapshots, formers, seqs, epochs, repeat(False), strict=False)
        self._waits.extend(waits)

    def note_replay(self, stream: Actor) -> None:
        """A graph of several entries is replayed on ``stream``."""
        self._replays[stream] = self._order.clock(stream)[stream] + 1

    def of(self, conflict: Conflict, later: Operation, actor: Actor, proof: Proof) -> Reason:
        """Why nothing orders the two, as far as can be told when the later one comes."""
        earlier = conflict.earlier
        if proof is Proof.UNKNOWN:
            return Reason(self._unknown(conflict, later))
        if self._hazards.stale(conflict.overlaps, earlier, later):
            return Reason(Cause.STALE_ADDRESS)
        if later.label.what == "graph" and part(earlier) == "restore":
            return Reason(Cause.GRAPH_SKIPS_WAIT)
        freed = any(self._shadow.freed_since(overlap, earlier.seq) for overlap in conflict.overlaps)
        if freed and principal(conflict.overlaps).space is Space.BUFFER:
            return Reason(Cause.NO_RECORD_STREAM)
        if freed and part(earlier) in TRANSFERS:
            cause = self._useless_wait(earlier, later, actor).cause
            return Reason(cause if cause in _IN_VAIN else Cause.EARLY_FREE)
        if earlier.label.stream is None and earlier.label.thread != later.label.thread:
            return Reason(Cause.THREAD_RACE)
        return self._useless_wait(earlier, later, actor)

    def settled(self, reason: Reason) -> Reason:
        """``reason``, now that more of the trace is known."""
        if reason.fence is None:
            return reason
        stream, epoch = reason.fence
        newest = self._shadow.newest.get(stream)
        ran = max(0 if newest is None else newest.last, self._replays.get(stream, 0))
        return Reason(reason.otherwise) if ran > epoch else reason

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

    def _useless_wait(self, earlier: Operation, later: Operation, actor: Actor) -> Reason:
        """The wait between the two that was meant to order them; newest first.

        For an access in no stream the wait is its thread's own: a synchronize with a stream that ran none of it. Before
        a launch, a thread that waits for older work, of a transfer before or a round before, has reasons of its own: no
        early event, unless there was no such work. That an event was never recorded is what whoever waits for it would
        want to know; but who asks for one may want to know whether it is in use, as engines do of events that they
        keep.
        """
        before, issuer = earlier.group.actor, self._order.thread(later.label.thread)
        thread = issuer if later.label.stream is None else None
        releaser = issuer if part(earlier) in TRANSFERS else thread
        cause = Cause.MISSING_FENCE
        fence: Reason | None = None
        for waiter, stream, snapshot, former, seq, epoch, polled in reversed(self._waits):
            if seq < earlier.seq:
                break
            mine = waiter in (actor, issuer)
            if snapshot is None:
                if mine and not (polled and waiter != releaser):
                    cause = Cause.EVENT_UNRECORDED
                continue
            covers = snapshot.covers(before, earlier.epoch)
            if not covers and mine and former is not None and former.covers(before, earlier.epoch):
                cause = Cause.EVENT_REUSE
                break
            if covers and waiter in self._threads and waiter != issuer:
                cause = Cause.WRONG_THREAD
                break
            if stream is not None and not covers and waiter == thread and snapshot.actor != before:
                return fence or Reason(Cause.WRONG_STREAM, stream)
            unused = epoch == self._order.clock(waiter)[waiter]  # a fence that protects no work so far
            if covers and waiter != actor and unused and fence is None:
                fence = Reason(Cause.WRONG_STREAM, stream, (waiter, epoch))
            meant = waiter in (actor, thread) or (waiter == releaser and snapshot.mark == NO_OP)
            if meant and not covers and self._ahead(snapshot, before, earlier):
                cause = Cause.EARLY_EVENT
        return Reason(cause) if fence is None else replace(fence, otherwise=cause)

    def _ahead(self, snapshot: Snapshot, before: Actor, earlier: Operation) -> bool:
        """Whether a record that does not cover ``earlier`` was made where it ran, too early: on its stream, or by an
        entry of its graph."""
        if snapshot.actor == before:
            return True
        return earlier.within and snapshot.seq < earlier.seq and self._order.same_graph(snapshot.actor, before)
