"""The recorder: turns stream calls into records, in issue order, without ever getting in the engine's way.

Every hook is called in the engine's thread, around the engine's call. A hook never raises, never waits for the
device and does no I/O. ``emitter`` has how a record is made and appended, here is which.

What a host thread learns by a call that returns later than it was made (a query, a sync) is recorded only as far
as it is certain: if somebody recorded the event again, or queued work on the stream, during the call, then what
was complete is not what a record written now would say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from hicache_obs.recorder.emitter import MAX_STREAMS, Emitter
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.nvtx_ranges import RangeName
from hicache_obs.recorder.pair import Pair
from hicache_obs.recorder.slot import EVENT_RECORD, EVENT_SYNC, EVENT_WAIT, KERNEL, MEMCPY, WAIT_STREAM
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    Access,
    AnyRecord,
    Collective,
    DefineSpace,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Memcpy,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    Purpose,
    RecordStream,
    Relocate,
    RowsDiscarded,
    Space,
    StreamId,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    WaitStream,
    Work,
)
from hicache_obs.streams.protocol import Device, Probe, Stream

_SEGMENT, _COPY = RangeName.SEGMENT, RangeName.COPY  # looking up an enum member costs as much as the clock
_WAIT_STREAM, _WAIT_EVENT = RangeName.WAIT_STREAM, RangeName.WAIT_EVENT


@dataclass(frozen=True, slots=True)
class StreamMark:
    """What was queued when a sync of a stream was called."""

    last: int
    marker: EventId | None


class Recorder(Emitter):
    """Makes the records of one process. Any thread may call any method.

    A record is made before the device's call, so host threads that use one stream at the same moment, without
    any order between them, may be recorded the other way round than the device saw them.

    Args: those of ``Emitter``.
    """

    # -- for the engine --------------------------------------------------------------------------------------

    def define_engine(self, name_and_version: str) -> None:
        """State which engine is recorded; part of every fingerprint."""
        self.define(DefineSpace.ENGINE, 0, name_and_version)

    def define_pool(self, name: str, layers: int, *, pool: int = 0, space: Space = Space.DEVICE) -> None:
        """State the name and layer count of a page pool."""
        self.define(DefineSpace.POOL if space is Space.DEVICE else DefineSpace.HOST_POOL, pool, name, layers)

    def page_alloc(self, owner: int, access: Access) -> None:
        """An allocator hands out pages to ``owner``."""
        self._emit(lambda op, thread, now: PageAlloc(op, thread, now, owner, access))

    def page_free(self, owner: int, access: Access) -> None:
        """``owner`` gives pages back."""
        self._emit(lambda op, thread, now: PageFree(op, thread, now, owner, access))

    def rows_discarded(self, round_id: int, requests: PageIds) -> None:
        """The calling thread throws away what a round computed for ``requests``."""
        self._emit(lambda op, thread, now: RowsDiscarded(op, thread, now, round_id, requests))

    def host_access(self, site: str, accesses: tuple[Access, ...], *, layers: tuple[int, int] = ALL_LAYERS) -> None:
        """The calling thread itself reads or writes memory that the device also uses, here and now."""
        self._emit(lambda op, thread, now: HostAccess(op, thread, now, self._site(site), layers, accesses))

    def thread_post(self, channel: int) -> None:
        """The calling thread hands what it knows to a receiver on ``channel``. Partner of ``thread_recv``."""
        self._emit(lambda op, thread, now: ThreadPost(op, thread, now, channel))

    def thread_recv(self, channel: int) -> None:
        """The calling thread has received the oldest post of ``channel``. Partner of ``thread_post``."""
        self._emit(lambda op, thread, now: ThreadRecv(op, thread, now, channel))

    def io_begin(
        self, kind: IoKind, accesses: tuple[Access, ...], *, site: str, layers: tuple[int, int] = ALL_LAYERS
    ) -> int:
        """A transfer in no stream begins, on the calling thread. Returns the number ``io_end`` wants."""
        io = next(self._ios)
        self._emit(lambda op, thread, now: IoBegin(op, thread, now, io, kind, self._site(site), layers, accesses))
        return io

    def io_end(self, io: int) -> None:
        """The calling thread knows transfer ``io`` to be over. Partner of ``io_begin``."""
        self._emit(lambda op, thread, now: IoEnd(op, thread, now, io))

    def collective(self, group: int, rank: int, site: str) -> None:
        """The calling thread enters a collective of ``group`` as ``rank``, and may block there. Call it before."""
        self._emit(lambda op, thread, now: Collective(op, thread, now, group, rank, self._site(site)))

    # -- hooks: called before the device's call unless they say otherwise ------------------------------------

    def work(self, device: Device, work: Work, *, timed: bool = True) -> Probe | None:
        """``work`` is launched on the current stream. The probe is for the launch call."""
        name = _SEGMENT if work.direction is None and not work.moves else _COPY
        packs = self._packs
        if packs is not None:
            if not packs.switch[0]:
                packs.skip()
                return None
            site = self._sites.get(work.site)
            if site is not None and work.rows is None and not work.moves:
                try:
                    stream = device.current_stream().stream_id
                    word = KERNEL if work.direction is None else MEMCPY | work.direction << 16
                    numbers = stream, site, work.group, work.size_bytes
                    done = self._write(
                        packs, word, numbers, work.layers, work.accesses,
                        stream, stream, name, device if timed else None,
                    )  # fmt: skip
                except Exception:  # noqa: BLE001 what is wrong with it is said below
                    done = False
                if done is not False:
                    return done
        return self._work(device, work, name, timed)

    def _work(self, device: Device, work: Work, name: RangeName, timed: bool) -> Probe | None:
        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            stream = self._queue_on(device.current_stream(), op)
            site = self._site(work.site)
            if work.moves:
                return Relocate(op, thread, now, stream, site, work.layers, work.accesses)
            if work.direction is None:
                return Kernel(
                    op, thread, now, stream, site, work.group, work.size_bytes, work.layers, work.accesses, work.rows
                )
            return Memcpy(
                op, thread, now, stream, site, work.group, work.size_bytes, work.layers, work.accesses, work.direction
            )

        return self._emit(build, device if timed else None, name)

    def begin_replay(
        self,
        device: Device,
        graph: int,
        work: Work,
        nodes: Sequence[Work | None],
        events: Sequence[EventState],
        *,
        timed: bool = True,
    ) -> tuple[Probe, Probe] | None:
        """A graph is replayed on the current stream. Partner of ``end_replay``.

        Args:
            device: The bare device.
            graph, work, nodes: As in ``protocol.Device.replay``.
            events: Those that its external records record, in order.

        Returns:
            Probes for the replay call.
        """

        issued: list[tuple[OpId, ThreadId]] = []

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            issued.append((op, thread))
            stream = self._queue_on(device.current_stream(), op)
            count = len(nodes)
            return GraphReplay(
                op, thread, now, graph, stream, self._site(work.site), work.group, count, work.layers, ()
            )

        if not self.on:
            return None
        with self._lock:  # the entries follow their replay at once
            for event in events:
                event.version += 1
                event.known_to.clear()
            self._emit(build, None, RangeName.SEGMENT)
            records = iter(events)
            for index, node in enumerate(nodes):
                self._emit(partial(_graph_node, index, node, next(records) if node is None else None))
        return self._replay_probes(device, *issued[0], nodes) if timed and issued else None

    def _replay_probes(
        self, device: Device, op: OpId, thread: ThreadId, nodes: Sequence[Work | None]
    ) -> tuple[Probe, Probe] | None:
        opens = None if self._unseen else partial(self._open_range, RangeName.SEGMENT, op)
        closes = None if self._unseen else self._close_range
        try:
            if sum(node is not None for node in nodes) == 1:
                first = last = device.probe(opens, closes)
            else:
                first, last = device.probe(opens), device.probe(None, closes)
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._failed(error)
            return None
        self._pending.add(op, thread, Pair(first, last), device)
        return first, last

    def end_replay(self, events: Sequence[EventState]) -> None:
        """The replay call has returned or failed. Partner of ``begin_replay``."""
        if not self.on:
            return
        with self._lock:
            for event in events:
                event.version += 1

    def wait_event(
        self, device: Device, stream: Stream, event: EventState, purpose: Purpose, *, timed: bool = True
    ) -> Probe | None:
        """``stream`` is told to wait for ``event``. The probe is for the wait call."""
        chosen = device if timed else None
        packs = self._packs
        if packs is not None:
            if not packs.switch[0]:
                packs.skip()
                return None
            handle = stream.stream_id
            done = self._write(
                packs, EVENT_WAIT | purpose << 16, event.event_id, handle, None, handle, handle, _WAIT_EVENT, chosen
            )
            if done is not False:
                return done
        return self._wait_event(chosen, stream, event, purpose)

    # The slow ways are methods of their own: what a nested function uses is boxed at each call.

    def _wait_event(self, device: Device | None, stream: Stream, event: EventState, purpose: Purpose) -> Probe | None:
        return self._emit(
            lambda op, thread, now: EventWait(op, thread, now, event.event_id, self._queue_on(stream, op), purpose),
            device,
            _WAIT_EVENT,
        )

    def wait_stream(
        self, device: Device, waiter: Stream, on: Stream, purpose: Purpose, *, timed: bool = True
    ) -> Probe | None:
        """``waiter`` is told to wait for ``on``. The probe is for the wait call."""
        chosen = device if timed else None
        packs = self._packs
        if packs is not None:
            if not packs.switch[0]:
                packs.skip()
                return None
            a, b = waiter.stream_id, on.stream_id
            done = self._write(packs, WAIT_STREAM | purpose << 16, a, b, None, a, b, _WAIT_STREAM, chosen)
            if done is not False:
                return done
        return self._wait_stream(chosen, waiter, on, purpose)

    def _wait_stream(self, device: Device | None, waiter: Stream, on: Stream, purpose: Purpose) -> Probe | None:
        return self._emit(
            lambda op, thread, now: WaitStream(
                op, thread, now, self._queue_on(waiter, op), self._queue_on(on, op), purpose
            ),
            device,
            _WAIT_STREAM,
        )

    def abandon(self, probe: Probe | None) -> None:
        """The call that ``probe`` was for has failed: its times will never come."""
        if probe is None or not self.on:
            return
        self._pending.abandon(probe)

    def begin_event_record(self, device: Device, event: EventState, stream: Stream | None) -> None:
        """``event`` is recorded on ``stream``, or on the current one. Partner of ``end_event_record``."""
        event.version += 1  # without the lock: no other thread comes in between here, there is no call
        if event.known_to:
            event.known_to.clear()
        packs = self._packs
        if packs is not None:
            if not packs.switch[0]:
                packs.skip()
                return
            if stream is not None:
                on = stream.stream_id
                if self._write(packs, EVENT_RECORD, event.event_id, on, None, on, on, None, None) is not False:
                    return
        self._record_event(device, event, stream)

    def _record_event(self, device: Device, event: EventState, stream: Stream | None) -> None:
        self._emit(
            lambda op, thread, now: EventRecord(
                op,
                thread,
                now,
                event.event_id,
                self._queue_on(device.current_stream() if stream is None else stream, op),
            )
        )

    def end_event_record(self, event: EventState) -> None:
        """The device's call has returned or failed. Partner of ``begin_event_record``."""
        event.version += 1  # as above

    def event_queried(self, event: EventState, version: int, result: bool) -> None:
        """A query of ``event`` has returned; ``version`` is from before the call."""

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord | None:
            if event.known_to.get(thread) == event.stamp:
                return None
            if result:
                if not self._settled(event, version):
                    return None
                event.known_to[thread] = version
            return EventQuery(op, thread, now, event.event_id, result)

        self._emit(build)

    def event_synchronized(self, event: EventState, version: int) -> None:
        """A synchronize of ``event`` has returned; ``version`` is from before the call."""
        packs = self._packs
        if packs is not None:
            if not packs.switch[0]:
                packs.skip()
                return
            number = event.event_id
            if self._write(packs, EVENT_SYNC, number, 0, None, 0, 0, None, None, event, version) is not False:
                return
        self._synchronized(event, version)

    def _synchronized(self, event: EventState, version: int) -> None:
        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord | None:
            if not self._settled(event, version):
                return None
            event.known_to[thread] = version
            return EventSync(op, thread, now, event.event_id)

        self._emit(build)

    def begin_stream_sync(self, stream: Stream) -> StreamMark | None:
        """A synchronize of ``stream`` is about to block. Partner of ``end_stream_sync``."""
        if not self.on:
            return None
        marker: EventId | None = None

        self.flush_batch()

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            nonlocal marker
            marker = self._marker(thread, stream)
            return EventRecord(op, thread, now, marker, self._stream(stream))

        with self._lock:
            if self._threads > 1:  # others may queue work meanwhile: an event of our own marks what this call covers
                self._emit(build)
            return StreamMark(self.last_on(stream), marker)

    def end_stream_sync(self, stream: Stream, mark: StreamMark | None) -> None:
        """The synchronize has returned. Partner of ``begin_stream_sync``."""
        if mark is None:
            return

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord | None:
            if self.last_on(stream) == mark.last:
                return HostSync(op, thread, now, self._stream(stream))
            if mark.marker is not None:
                return EventSync(op, thread, now, mark.marker)
            self._counters.uncertain += 1
            return None

        self._emit(build)

    def begin_device_sync(self) -> dict[int, int]:
        """A synchronize of all streams is about to block. Partner of ``end_device_sync``."""
        if not self.on:
            return {}
        self.flush_batch()
        with self._lock:
            return dict(self._last_on)

    def end_device_sync(self, queued: dict[int, int]) -> None:
        """The synchronize has returned. Partner of ``begin_device_sync``."""
        if not self.on:
            return
        with self._lock:
            if queued == self._last_on:
                self._emit(lambda op, thread, now: HostSync(op, thread, now, None))
                return
            quiet = [stream for stream, last in self._last_on.items() if queued.get(stream, -1) == last]
            self._counters.uncertain += 1
        for stream in quiet:
            self._emit(lambda op, thread, now, s=stream: HostSync(op, thread, now, StreamId(s)))  # type: ignore[misc] # a default binds the loop variable

    def last_on(self, stream: Stream) -> int:
        """Last operation queued on ``stream``; for ``stream_queried``."""
        return self._last_on.get(stream.stream_id, -1)

    def stream_queried(self, stream: Stream, last: int, result: bool) -> None:
        """A query of ``stream`` has returned; ``last`` is from before the call.

        There is no record of its own for this: true means what a record made now and then queried would mean.
        """
        if not result or not self.on:
            return
        self.flush_batch()
        with self._lock:
            key = (self._lanes.lane.assigned, stream.stream_id)
            if self._stream_known.get(key) == last:
                return
            if self.last_on(stream) != last:
                self._counters.uncertain += 1
                return
            self._stream_known[key] = last
            self._emit(
                lambda op, thread, now: EventRecord(op, thread, now, self._marker(thread, stream), self._stream(stream))
            )
            self._emit(lambda op, thread, now: EventQuery(op, thread, now, self._marker(thread, stream), True))

    def tensor_alloc(self, tensor: object, block: int, stream: Stream) -> None:
        """A caching allocator hands out block ``block`` as ``tensor``, for use on ``stream``."""
        self._emit(
            lambda op, thread, now: TensorAlloc(op, thread, now, _storage_id(tensor), block, self._stream(stream))
        )

    def tensor_free(self, tensor: object) -> None:
        """``tensor``'s block is given back. Partner of ``tensor_alloc``."""
        self._emit(lambda op, thread, now: TensorFree(op, thread, now, _storage_id(tensor)))

    def record_stream(self, tensor: object, stream: Stream) -> None:
        """``stream`` uses ``tensor``'s memory."""
        self._emit(lambda op, thread, now: RecordStream(op, thread, now, _storage_id(tensor), self._stream(stream)))

    def new_event(self) -> EventState:
        """For an event that the engine makes."""
        return EventState(EventId(next(self._events)))

    def new_stream(self, stream: Stream) -> None:
        """The engine made ``stream``; its handle may have had another name before."""
        if not self.on:
            return
        with self._lock:
            self._streams.discard(stream.stream_id)

    # -- for the agent ---------------------------------------------------------------------------------------

    def resolve(self) -> int:
        """Append the device times that have become known, in issue order; returns how many. Any thread.

        Call it at 10 Hz or less. It stops at the first operation that is not complete yet.
        """
        return self._pending.resolve()

    # -- inside ----------------------------------------------------------------------------------------------

    def _marker(self, thread: ThreadId, stream: Stream) -> EventId:
        key = (thread, stream.stream_id)
        marker = self._markers.get(key)
        if marker is None:
            if len(self._markers) >= MAX_STREAMS:
                self._markers.clear()
            marker = self._markers[key] = EventId(next(self._events))
        return marker


def _graph_node(
    index: int, node: Work | None, event: EventState | None, op: OpId, thread: ThreadId, now: int
) -> GraphNode:
    if node is None:
        assert event is not None
        return GraphNode(op, thread, now, index, IN_ORDER, event.event_id, ALL_LAYERS, ())
    return GraphNode(op, thread, now, index, IN_ORDER, None, node.layers, node.accesses)


def _storage_id(tensor: Any) -> int:
    """The address of the tensor's memory, which is what the allocator hands out; the object's without storage."""
    storage = getattr(tensor, "untyped_storage", None)
    return id(tensor) if storage is None else int(storage().data_ptr())
