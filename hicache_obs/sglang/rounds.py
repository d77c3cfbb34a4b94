"""The forward round that is being launched, and how a wait for a layer divides it.

What was launched before the wait did not wait: it is a segment of its own. One round in ``TIME_EVERY`` has its segments
measured and recorded one by one; the others' go into the ring together, when the round is launched or something else
is recorded.
"""

from __future__ import annotations

from typing import Any, Final

from hicache_obs.recorder.batch import THE_REST, Batch, Measured
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.lane import Lane
from hicache_obs.records import ALL_LAYERS, Access, Purpose, Work
from hicache_obs.sglang.round_pages import PlainRound
from hicache_obs.sglang.session import Session
from hicache_obs.streams.protocol import Stream

SITE: Final = "forward"
TIME_EVERY: Final = 16
"""Layers are timed in every so-many-th round or transfer: an event pair per layer would cost more than all the rest."""


class Round:
    """A round being launched on the calling thread.

    Attributes:
        stream, group: Of its records.
        touches: What it touches, as ``round_accesses`` gives it.
        raw: The stream, the engine's own object.
        measured: An event pair around the segment that is being launched.
        next_layer: First layer of that segment; of a batch, that of its first.
        graph: The captured graph that is replayed; negative without one.
        early: Event that the graph records before its accesses.
        batch: Its waits for layers that are not in the ring yet.
    """

    next_layer = 0  # in the class: a round without layer waits never touches them, and each costs it 30 ns
    graph = -1
    early: EventState | None = None
    batch: Batch | None = None

    def __init__(
        self,
        stream: Stream,
        raw: Any,
        touches: tuple[Access, ...] | PlainRound,
        group: int,
        measured: Measured | None,
    ) -> None:
        self.stream = stream
        self.raw = raw
        self.touches = touches
        self.group = group
        self.measured = measured

    @property
    def accesses(self) -> tuple[Access, ...]:
        """What it touches; the same object each time."""
        if isinstance(self.touches, PlainRound):
            self.touches = self.touches.accesses()
        return self.touches


def wait_for_layer(session: Session, lane: Lane, this: Round, stream: Any, event: EventState) -> Round | None:
    """While ``this`` is launched, a stream is told to wait for the end of a layer's copy. Partner of ``waited``.

    Args:
        stream: The engine's own object; ``None`` for the current stream.

    Returns:
        The round if its segment behind the wait is to be measured once the wait is issued.
    """
    if stream is not this.raw:
        waiter = session.current_stream() if stream is None else session.stream(stream)
        if waiter is not this.stream:
            session.recorder.wait_for_event(waiter, event, Purpose.LAYER)
            return None
    if event.waited_by is this and event.waited_version == event.stamp:
        return None
    if this.measured is not None:
        event.waited_by, event.waited_version = this, event.stamp
        return _wait_measured(session, this, event)
    batch = lane.batch
    if batch is None or batch is not this.batch:
        batch = _begin_batch(session, lane, this)
    batch.steps.append(event)
    return None


def _wait_measured(session: Session, this: Round, event: EventState) -> Round | None:
    if event.layer > this.next_layer:
        end_segment(session, this, event.layer)
    session.recorder.wait_for_event(this.stream, event, Purpose.LAYER)
    if this.group % TIME_EVERY == 0:
        return this
    session.stop_timing(this.measured, this.raw)
    this.measured = None
    return None


def waited(session: Session, this: Round) -> None:
    """The wait inside a measured round has been issued: from here on it is measured again."""
    if this.measured is None:
        this.measured = session.start_timing(this.raw)


def end_segment(session: Session, this: Round, end: int) -> None:
    """What the round has launched since the last segment are its layers up to ``end``."""
    batch, waited = session.recorder.batch, this.batch
    if waited is not None and waited is batch and this.measured is None and end == ALL_LAYERS[1]:
        session.counters.calls += len(batch.steps)
        batch.steps.append(THE_REST)
    else:
        if waited is not None:
            session.recorder.flush_batch()
            this.next_layer, this.batch = waited.next_layer(), None
        layers = ALL_LAYERS if not this.next_layer and end == ALL_LAYERS[1] else (this.next_layer, end)
        session.stop_timing(this.measured, this.raw)
        session.recorder.enqueue(this.stream, Work(SITE, this.accesses, layers, this.group), this.measured)
    this.measured = None
    this.next_layer = end


def _begin_batch(session: Session, lane: Lane, this: Round) -> Batch:
    if this.batch is not None:  # something else was recorded meanwhile
        this.next_layer = this.batch.next_layer()
        for event in this.batch.waited():
            event.waited_by, event.waited_version = this, event.stamp
    batch = session.recorder.begin_batch(this.stream, SITE, this.group, None)
    batch.first_layer = this.next_layer
    batch.raw = lane.waits_on = this.raw
    lane.waits_handle, lane.note_wait = getattr(this.raw, "cuda_stream", None), batch.step
    batch.use(this.accesses, 0)
    this.batch = batch
    return batch
