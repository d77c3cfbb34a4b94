"""Why nothing orders a pair: what was done to its pages in between, and the recent waits that miss it."""

from __future__ import annotations

from collections import deque
from typing import Final

from hicache_obs._struct import Struct
from hicache_obs.analyzer.foreign import Foreign
from hicache_obs.analyzer.hazards import TRANSFERS, Hazards, principal
from hicache_obs.analyzer.order import Actor, Order, Snapshot
from hicache_obs.analyzer.shadow import Conflict, Operation, Shadow
from hicache_obs.findings import Cause, Proof
from hicache_obs.records import Space, StreamId

RECENT_WAITS: Final = 256


class _Wait(Struct, frozen=True, eq=False, gc=False):
    """A wait seen recently."""

    waiter: Actor
    stream: StreamId
    snapshot: Snapshot | None
    former: Snapshot | None
    """What the event's record had replaced."""
    seq: int
    epoch: int
    """The waiter's epoch at the wait: a later epoch means the waiter has run something since."""


class Causes:
    """Explains unordered pairs from the newest ``RECENT_WAITS`` waits. Fed by the analyzer in trace order."""

    def __init__(self, order: Order, shadow: Shadow, hazards: Hazards, foreign: Foreign) -> None:
        self._order = order
        self._foreign = foreign
        self._shadow = shadow
        self._hazards = hazards
        self._waits: deque[_Wait] = deque(maxlen=RECENT_WAITS)

    def note_wait(self, waiter: Actor, stream: StreamId, snapshot: Snapshot | None, seq: int) -> None:
        """``waiter`` (a stream or thread) waits for ``snapshot``, ``None`` if the event was never recorded.

        Args:
            stream: The waiting stream; for a thread the stream that it synchronised with.
        """
        former = None if snapshot is None else snapshot.former
        self._waits.append(_Wait(waiter, stream, snapshot, former, seq, self._order.clocks[waiter][0][waiter]))

    def of(self, conflict: Conflict, later: Operation, actor: Actor, proof: Proof) -> tuple[Cause, StreamId | None]:
        """The cause, and for ``WRONG_STREAM`` the stream that waits, or was waited for, instead."""
        earlier = conflict.earlier
        if proof is Proof.UNKNOWN:
            return self._unknown(conflict, later), None
        if self._hazards.moved(conflict.overlaps, earlier, later):
            return Cause.STALE_ADDRESS, None
        if later.label.what == "graph" and earlier.label.what == "restore":
            return Cause.GRAPH_SKIPS_WAIT, None
        freed = any(self._shadow.freed_since(overlap, earlier.seq) for overlap in conflict.overlaps)
        if freed and principal(conflict.overlaps).space is Space.BUFFER:
            return Cause.NO_RECORD_STREAM, None
        if freed and earlier.label.what in TRANSFERS:
            return Cause.EARLY_FREE, None
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

        For an access in no stream the wait is its thread's own: a synchronize with a stream that ran none of it.
        """
        before = earlier.group.actor
        thread = self._order.thread(later.label.thread) if later.label.stream is None else None
        cause = Cause.MISSING_FENCE
        for wait in reversed(self._waits):
            if wait.seq < earlier.seq:
                break
            if wait.snapshot is None:
                if wait.waiter == actor:
                    cause = Cause.EVENT_UNRECORDED
                continue
            covers = wait.snapshot.covers(before, earlier.epoch)
            former = wait.former
            if not covers and wait.waiter == actor and former is not None and former.covers(before, earlier.epoch):
                return Cause.EVENT_REUSE, None
            idle = not covers and wait.waiter == thread and wait.snapshot.actor != before
            elsewhere = covers and wait.waiter != actor and self._nothing_since(wait)
            if idle or elsewhere:
                return Cause.WRONG_STREAM, wait.stream
            if wait.waiter == actor and not covers and wait.snapshot.actor == before:
                cause = Cause.EARLY_EVENT
        return cause, None

    def _nothing_since(self, wait: _Wait) -> bool:
        """Whether the waiting stream has run nothing since: a fence that protects no work."""
        return wait.epoch == self._order.clock(wait.waiter)[wait.waiter]
