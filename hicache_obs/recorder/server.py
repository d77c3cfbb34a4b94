"""``ServerRecorder``: the recorder of a process that runs somebody else's engine.

A hook there knows the stream a call goes to, not a device of ours; and a server also replays graphs, reads and
writes storage, and hands work from thread to thread.
"""

from __future__ import annotations

import time
from typing import Any, Final

from hicache_obs.recorder.batch import Batch, Measured, Shapes
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.lane import Lane
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.recorder.sink import BlockSink, Numbers
from hicache_obs.recorder.slot import KERNEL, MEMCPY, plain_record
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    Access,
    AnyRecord,
    DefineSpace,
    Direction,
    DropReason,
    EventWait,
    GraphNode,
    GraphReplay,
    Kernel,
    Memcpy,
    OpId,
    Purpose,
    ThreadId,
    WaitStream,
    Work,
)
from hicache_obs.streams.protocol import Stream

_ROUND: Final = KERNEL | 2 << 8
"""A kernel with two accesses."""


class ServerRecorder(Recorder):
    """A ``Recorder`` whose hooks name their streams. Any thread may call any method; none raises."""

    def __init__(self, sink: BlockSink, **options: Any) -> None:
        super().__init__(sink, **options)
        self._blocks = sink
        self._shapes = Shapes()

    @property
    def batch(self) -> Batch | None:
        """The calling thread's open batch."""
        return self._lanes.lane.batch

    def put(
        self, lane: Lane, word: int, a: int, stream: Stream, on: Stream | None = None, event: EventState | None = None
    ) -> None:
        """Record one call to a stream or event: ``EventRecord``, ``EventWait``, ``WaitStream``, packed at once.

        May raise, unlike the rest: whoever calls this has a guard of its own, and calls it more often than all else.
        Not in a forked child, where the lock may be held for ever.

        Args:
            lane: The calling thread's.
            word: The slot's first word (``RingWriter.put``) but for the thread.
            a: The event's id, or the id of the stream that waits.
            stream: The slot's b: what the call is queued on, or what is waited for.
            on: The stream that waits, for ``WaitStream``: the call is queued on both.
            event: Is recorded anew, for ``EventRecord``; ``end_event_record`` is to follow.
        """
        if lane.batch is not None:
            self.flush_batch()
        handle, streams = stream.stream_id, self._streams
        # By name: calls of an object's attributes cost a little more; ``with`` would cost twice as much as these two.
        acquire, release, clock, write = self._acquire, self._release, self._clock, self._blocks.put
        acquire()
        try:
            if event is not None:
                event.version += 1
                if event.known_to:
                    event.known_to.clear()
            op = self._next_op
            if (
                handle in streams
                and (on is None or a in streams)
                and lane.number >= 0
                and self._on
                and not self._busy
                and write(word | lane.number << 32, op, clock(), a, handle)
            ):
                self._last_on[handle] = op
                if on is not None:
                    self._last_on[a] = op
                self._next_op = op + 1  # type: ignore[assignment] # a call of the type costs as much as the clock
                return
        finally:
            release()
        self._put_slowly(word, a, stream, on)

    def _put_slowly(self, word: int, a: int, stream: Stream, on: Stream | None) -> None:
        """As ``put`` when something is new, full or lost."""

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            if on is not None:
                self._queue_on(on, op)
            return plain_record(word | thread << 32, op, now, a, self._queue_on(stream, op))

        self._emit(build)

    def begin_batch(self, stream: Stream, site: str, group: int, direction: Direction | None) -> Batch:
        """A batch for the calling thread's next operations on ``stream``; an open one is flushed.

        Whatever else the thread records flushes it, so that the ring keeps the order of the calls.
        """
        self.flush_batch()
        batch = self._lanes.lane.batch = Batch(stream, site, group, direction, self._clock())
        return batch

    def flush_batch(self) -> None:
        """Put what the calling thread has batched into the ring, as one block."""
        lane = self._lanes.lane
        batch, lane.batch = lane.batch, None
        lane.waits_on = lane.waits_handle = None
        if batch is None or not batch.steps or not self.on:
            return
        started = time.perf_counter_ns()
        try:
            with self._lock:
                if self._busy:
                    self._sink.drop(DropReason.RECORDER_ERROR, len(batch.steps))
                    batch.close()
                    return
                self._busy = True
                try:
                    op, thread = self._next_op, self._thread()
                    self._stream(batch.stream)
                    if batch.whole:
                        block = self._shapes.block(batch, op, thread, self._site(batch.site), self._clock())
                        self._next_op = OpId(op + len(block))
                        self._last_on[batch.stream.stream_id] = self._next_op - 1
                        self._blocks.append_block(block)
                    else:  # nobody knows what was launched of it
                        self._sink.drop(DropReason.RECORDER_ERROR, len(batch.steps))
                    self._row_of_failures = 0
                finally:
                    self._busy = False
                    self._counters.hook_ns += time.perf_counter_ns() - started
                    batch.close()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._failed(error)

    def enqueue(self, stream: Stream, work: Work, measured: Measured | None = None) -> None:
        """``work`` is launched on ``stream``; ``measured`` is around it, and over when it was launched already."""
        if self._enqueue(stream, work, measured):
            return
        issued: list[tuple[OpId, ThreadId]] = []

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            issued.append((op, thread))
            site, where = self._site(work.site), self._queue_on(stream, op)
            common = (op, thread, now, where, site, work.group, work.size_bytes, work.layers, work.accesses)
            return Kernel(*common) if work.direction is None else Memcpy(*common, work.direction)

        self._emit(build)
        self._await_times(issued, measured)

    def put_round(
        self, lane: Lane, stream: Stream, site: str, group: int, pool: int, lists: Numbers, split: int
    ) -> bool:
        """``enqueue`` of a kernel (``RingWriter.put_round``). May raise, as ``put``.

        Args:
            lane: The calling thread's.

        Returns:
            False if nothing was done, as something is new, full, lost or late: then ``enqueue`` sees to it.
        """
        handle, number = stream.stream_id, self._sites.get(site)
        if number is None or lane.batch is not None or lane.number < 0 or handle not in self._streams or not self._on:
            return False
        acquire, release, clock, write = self._acquire, self._release, self._clock, self._blocks.put_round
        acquire()
        try:
            op = self._next_op
            if self._busy or not write(
                _ROUND | lane.number << 32, op, clock(), handle, number, group, pool, lists, split
            ):
                return False
            self._last_on[handle] = op
            self._next_op = op + 1  # type: ignore[assignment] # as in put
            return True
        finally:
            release()

    def _enqueue(self, stream: Stream, work: Work, measured: Measured | None) -> bool:
        """As ``enqueue`` where nothing is new, full or lost: packed at once."""
        lane, handle, site = self._lanes.lane, stream.stream_id, self._sites.get(work.site)
        if lane.batch is not None or not self.on or lane.number < 0 or site is None or handle not in self._streams:
            return False
        try:
            word = KERNEL if work.direction is None else MEMCPY | work.direction << 16
            numbers = handle, site, work.group, work.size_bytes
            with self._lock:
                op = self._next_op
                if self._busy or not self._blocks.put_work(
                    word | lane.number << 32, op, self._clock(), numbers, work.layers, work.accesses
                ):
                    return False
                self._last_on[handle] = op
                self._next_op = op + 1  # type: ignore[assignment] # as in put
            if measured is not None:
                self._await_times([(op, lane.number)], measured)
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._failed(error)
        return True

    def wait_for_event(self, stream: Stream, event: EventState, purpose: Purpose) -> None:
        """``stream`` is told to wait for ``event``."""
        self._emit(
            lambda op, thread, now: EventWait(op, thread, now, event.event_id, self._queue_on(stream, op), purpose)
        )

    def wait_for_stream(self, waiter: Stream, on: Stream, purpose: Purpose, measured: Measured | None = None) -> None:
        """``waiter`` is told to wait for ``on``; ``measured`` is around the wait."""
        issued: list[tuple[OpId, ThreadId]] = []

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            issued.append((op, thread))
            return WaitStream(op, thread, now, self._queue_on(waiter, op), self._queue_on(on, op), purpose)

        self._emit(build)
        self._await_times(issued, measured)

    def graph_replay(
        self,
        stream: Stream,
        graph: int,
        accesses: tuple[Access, ...],
        *,
        site: str,
        group: int,
        early: EventState | None = None,
    ) -> None:
        """A captured graph is launched on ``stream``.

        Args:
            graph: Which executable graph.
            accesses: What its work touches.
            early: An event that the graph itself records, before any of these accesses.
        """

        def replay(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            where, name = self._queue_on(stream, op), self._site(site)
            if early is None:
                return GraphReplay(op, thread, now, graph, where, name, group, 0, ALL_LAYERS, accesses)
            return GraphReplay(op, thread, now, graph, where, name, group, 2, ALL_LAYERS, ())

        if not self.on:
            return
        with self._lock:  # the entries follow their replay at once
            self._emit(replay)
            if early is not None:
                event = early
                self._emit(lambda op, _, now: GraphNode(op, _, now, 0, IN_ORDER, event.event_id, ALL_LAYERS, ()))
                self._emit(lambda op, _, now: GraphNode(op, _, now, 1, IN_ORDER, None, ALL_LAYERS, accesses))

    def _await_times(self, issued: list[tuple[OpId, ThreadId]], measured: Measured | None) -> None:
        if measured is None or not issued:
            return
        op, thread = issued[0]
        self._pending.add(op, thread, measured.probe, measured.device)

    def status(self, name: str, value: int) -> None:
        """State a number about the recording itself; a later one of the same name replaces it."""
        self.define(DefineSpace.STATUS, 0, name, value)
