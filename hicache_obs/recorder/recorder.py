"""The recorder: turns stream calls into records, in issue order, without ever getting in the engine's way.

Every hook is called in the engine's thread, around the engine's call. A hook never raises, never waits for the
device and does no I/O; what goes wrong in it is counted, logged once, and after ``MAX_FAILURES`` in a row recording
switches itself off. An operation gets its id and its place in the ring in one step, so the ring is in id order.

What a host thread learns by a call that returns later than it was made (a query, a sync) is recorded only as far
as it is certain: if somebody recorded the event again, or queued work on the stream, during the call, then what
was complete is not what a record written now would say.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.lane import Lanes
from hicache_obs.recorder.nvtx_ranges import RangeName, Ranges, open_ranges
from hicache_obs.recorder.pair import Pair
from hicache_obs.recorder.sink import RecordSink
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    NO_OP,
    Access,
    AnyRecord,
    CaptureMode,
    Collective,
    Define,
    DefineSpace,
    DropReason,
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
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
    Work,
)
from hicache_obs.streams.protocol import Device, Probe, Stream

MAX_FAILURES: Final = 16
MAX_SITES: Final = 4096
MAX_STREAMS: Final = 1 << 16
DEFAULT_MAX_PENDING: Final = 1 << 14

_LOG: Final = logging.getLogger(__name__)
Build = Callable[[OpId, ThreadId, int], AnyRecord | None]
_Pending = tuple[OpId, ThreadId, Probe, Device]


@dataclass(frozen=True, slots=True)
class RecorderCounters:
    """What a recorder has done so far.

    Attributes:
        launches: Kernels recorded.
        copies: Copies recorded.
        waits: ``wait_stream`` and ``wait_event`` calls recorded.
        ranges_opened, ranges_closed: NVTX ranges, counted whether or not a tool is attached.
        pairs_resolved: Operations whose device times are known.
        pairs_dropped: Operations whose device times will never be known.
        uncertain: Queries and syncs left out, because something else happened during the call.
        errors: Failures inside the recorder.
        hook_ns: Time the engine's threads have spent in hooks.
    """

    launches: int = 0
    copies: int = 0
    waits: int = 0
    ranges_opened: int = 0
    ranges_closed: int = 0
    pairs_resolved: int = 0
    pairs_dropped: int = 0
    uncertain: int = 0
    errors: int = 0
    hook_ns: int = 0


@dataclass(frozen=True, slots=True)
class StreamMark:
    """What was queued when a sync of a stream was called."""

    last: int
    marker: EventId | None


class Recorder:
    """Makes the records of one process. Any thread may call any method.

    A record is made before the device's call, so host threads that use one stream at the same moment, without
    any order between them, may be recorded the other way round than the device saw them.

    Args:
        sink: Where the records go; a ``RingWriter``.
        clock: The observed device's ``host_ns``.
        ranges: NVTX ranges; chosen for this process by default.
        max_pending: Operations that may wait for their device times. Beyond that the oldest never gets any.
        first_op: Id of the first operation. A process with several recorders, one after the other, goes on with
            ``next_op`` of the one before: a profile of the process then holds every id once.
        lanes: The threads' states, if somebody else keeps them as well.
    """

    def __init__(
        self,
        sink: RecordSink,
        *,
        clock: Callable[[], int],
        ranges: Ranges | None = None,
        max_pending: int = DEFAULT_MAX_PENDING,
        first_op: int = 0,
        lanes: Lanes | None = None,
    ) -> None:
        self._sink = sink
        self._clock = clock
        self._ranges = open_ranges() if ranges is None else ranges
        self._max_pending = max_pending
        self._pending: deque[_Pending] = deque()
        """Operations whose device times are not known yet, in issue order."""
        # Re-entrant: a signal handler may use the engine while its own thread is in a hook. A ring's own, if the
        # records go into one: two locks would cost twice as much.
        self._lock = getattr(sink, "lock", None) or threading.RLock()
        self._tally_lock = threading.RLock()
        self._resolving = threading.Lock()
        self._busy = False
        self._on = True
        self._lanes = Lanes() if lanes is None else lanes
        self._threads = 0
        self._next_op = OpId(first_op)
        self._events = itertools.count(1)
        self._ios = itertools.count(1)
        self._sites: dict[str, int] = {}
        self._streams: set[int] = set()
        self._last_on: dict[int, int] = {}
        """Last operation queued on each stream, records and waits included."""
        self._markers: dict[tuple[int, int], EventId] = {}
        """Own events, by thread and stream: they mark what a sync covers."""
        self._stream_known: dict[tuple[int, int], int] = {}
        self._row_of_failures = 0
        self._launches = self._copies = self._waits = self._opened = self._closed = 0
        self._resolved = self._unresolved = self._uncertain = self._errors = self._hook_ns = 0

    @property
    def on(self) -> bool:
        """False once too many failures have switched recording off, or the sink is closed."""
        return self._on and self._sink.writable

    @property
    def next_op(self) -> int:
        """Id of the next operation."""
        return self._next_op

    @property
    def ranges(self) -> Ranges:
        """The NVTX ranges in use."""
        return self._ranges

    @property
    def counters(self) -> RecorderCounters:
        """A snapshot."""
        with self._lock, self._tally_lock:
            return RecorderCounters(
                launches=self._launches,
                copies=self._copies,
                waits=self._waits,
                ranges_opened=self._opened,
                ranges_closed=self._closed,
                pairs_resolved=self._resolved,
                pairs_dropped=self._unresolved,
                uncertain=self._uncertain,
                errors=self._errors,
                hook_ns=self._hook_ns,
            )

    # -- for the engine --------------------------------------------------------------------------------------

    def define_engine(self, name_and_version: str) -> None:
        """State which engine is recorded; part of every fingerprint."""
        self.define(DefineSpace.ENGINE, 0, name_and_version)

    def define_pool(self, name: str, layers: int, *, pool: int = 0, space: Space = Space.DEVICE) -> None:
        """State the name and layer count of a page pool."""
        self.define(DefineSpace.POOL if space is Space.DEVICE else DefineSpace.HOST_POOL, pool, name, layers)

    def define(self, space: DefineSpace, number: int, text: str, value: int = 0) -> None:
        """Give an id a name."""
        self._emit(lambda _, thread, now: Define(NO_OP, thread, now, space, number, text, value), uses_op=False)

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

        name = RangeName.SEGMENT if work.direction is None and not work.moves else RangeName.COPY
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
        opens = partial(self._open_range, RangeName.SEGMENT, op)
        try:
            if sum(node is not None for node in nodes) == 1:
                first = last = device.probe(opens, self._close_range)
            else:
                first, last = device.probe(opens), device.probe(None, self._close_range)
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._failed(error)
            return None
        self._await((op, thread, Pair(first, last), device))
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

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            return EventWait(op, thread, now, event.event_id, self._queue_on(stream, op), purpose)

        return self._emit(build, device if timed else None, RangeName.WAIT_EVENT)

    def wait_stream(
        self, device: Device, waiter: Stream, on: Stream, purpose: Purpose, *, timed: bool = True
    ) -> Probe | None:
        """``waiter`` is told to wait for ``on``. The probe is for the wait call."""

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            return WaitStream(op, thread, now, self._queue_on(waiter, op), self._queue_on(on, op), purpose)

        return self._emit(build, device if timed else None, RangeName.WAIT_STREAM)

    def abandon(self, probe: Probe | None) -> None:
        """The call that ``probe`` was for has failed: its times will never come."""
        if probe is None or not self.on:
            return
        with self._lock:
            for item in reversed(self._pending):
                if item[2] is probe or (isinstance(item[2], Pair) and item[2].first is probe):
                    self._pending.remove(item)
                    self._unresolved += 1
                    return

    def begin_event_record(self, event: EventState, stream: Callable[[], Stream]) -> None:
        """``event`` is recorded on the stream that ``stream()`` gives. Partner of ``end_event_record``."""

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord:
            return EventRecord(op, thread, now, event.event_id, self._queue_on(stream(), op))

        if not self.on:
            return  # without the lock: in a forked child it may be held for ever
        with self._lock:
            event.version += 1
            event.known_to.clear()
        self._emit(build)

    def end_event_record(self, event: EventState) -> None:
        """The device's call has returned or failed. Partner of ``begin_event_record``."""
        if not self._on:
            return
        with self._lock:
            event.version += 1

    def event_queried(self, event: EventState, version: int, result: bool) -> None:
        """A query of ``event`` has returned; ``version`` is from before the call."""

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord | None:
            if event.known_to.get(thread) == event.stamp:
                return None
            if result:
                if not self._settled(event, version):
                    return None
                event.known_to[thread] = event.stamp
            return EventQuery(op, thread, now, event.event_id, result)

        self._emit(build)

    def event_synchronized(self, event: EventState, version: int) -> None:
        """A synchronize of ``event`` has returned; ``version`` is from before the call."""

        def build(op: OpId, thread: ThreadId, now: int) -> AnyRecord | None:
            if not self._settled(event, version):
                return None
            event.known_to[thread] = event.stamp
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
            self._uncertain += 1
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
            self._uncertain += 1
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
                self._uncertain += 1
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
        if not self._resolving.acquire(blocking=False):
            return 0
        count = 0
        try:
            while self._sink.writable and self._pending:
                try:
                    op, thread, probe, device = item = self._pending.popleft()
                except IndexError:
                    break
                try:
                    ready = probe.ready()
                    start_ns, end_ns = probe.times_ns() if ready else (0, 0)
                    error_ns = device.clock_error_ns
                except Exception as error:  # noqa: BLE001 a device error must not end the agent
                    self._give_up()
                    self._failed(error)
                    continue
                if not ready:
                    self._pending.appendleft(item)
                    break
                self._sink.append(Times(op, thread, self._clock(), start_ns, end_ns, error_ns))
                count += 1
            self._sink.beat(self._clock())
        finally:
            with self._lock:
                self._resolved += count
            self._resolving.release()
        return count

    def flush_batch(self) -> None:
        """Put what the calling thread has batched into the ring. ``ServerRecorder`` makes batches."""

    # -- inside ----------------------------------------------------------------------------------------------

    def _emit(
        self, build: Build, device: Device | None = None, name: RangeName | None = None, *, uses_op: bool = True
    ) -> Probe | None:
        """Append what ``build`` makes, and count it; a probe if it was kept and ``device`` is given."""
        started = time.perf_counter_ns()
        if not (self._on and self._sink.writable):
            return None
        if self._sink.mode is CaptureMode.OFF:
            self._sink.drop(DropReason.SWITCHED_OFF)
            return None
        if self._lanes.lane.batch is not None:
            self.flush_batch()
        try:
            with self._lock:
                if self._busy:
                    self._sink.drop(DropReason.RECORDER_ERROR)
                    return None
                self._busy = True
                try:
                    op = self._next_op
                    thread = self._thread()
                    record = build(op, thread, self._clock())
                    if record is None:
                        return None
                    if uses_op:
                        self._next_op = op + 1  # type: ignore[assignment] # a call of the type costs as much as the clock
                    kept = self._sink.append(record)
                    self._row_of_failures = 0
                    if not kept or name is None:
                        return None
                    if name is RangeName.SEGMENT:
                        self._launches += 1
                    elif name is RangeName.COPY:
                        self._copies += 1
                    else:
                        self._waits += 1
                    return None if device is None else self._probe(device, op, thread, name)
                finally:
                    self._busy = False
                    self._hook_ns += time.perf_counter_ns() - started
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._failed(error)
            return None

    def _probe(self, device: Device, op: OpId, thread: ThreadId, name: RangeName) -> Probe:
        probe = device.probe(partial(self._open_range, name, op), self._close_range)
        self._await((op, thread, probe, device))
        return probe

    def _await(self, item: _Pending) -> None:
        """Write the operation's device times once they are known; beyond the bound the oldest never get any."""
        if len(self._pending) >= self._max_pending:
            try:
                self._pending.popleft()
            except IndexError:  # the agent was faster
                pass
            else:
                self._give_up()
        self._pending.append(item)

    def _give_up(self) -> None:
        with self._lock:
            self._unresolved += 1
        self._sink.drop(DropReason.UNRESOLVED)

    def _open_range(self, name: RangeName, op: OpId) -> None:
        try:
            self._ranges.push(name, op)
            with self._tally_lock:
                self._opened += 1
        except Exception as error:  # noqa: BLE001 this runs inside the device
            self._failed(error)

    def _close_range(self) -> None:
        try:
            self._ranges.pop()
            with self._tally_lock:
                self._closed += 1
        except Exception as error:  # noqa: BLE001 this runs inside the device
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        try:
            with self._lock:
                self._errors += 1
                self._row_of_failures += 1
                first = self._errors == 1
                off = self._on and self._row_of_failures >= MAX_FAILURES
                if off:
                    self._on = False
                self._sink.drop(DropReason.RECORDER_ERROR)
            if first:
                _LOG.warning("hicache-obs: recording failed, the engine is not affected", exc_info=error)
            if off:
                _LOG.error("hicache-obs: recording is off after %d failures in a row", MAX_FAILURES)
        except Exception:  # noqa: BLE001 the last line of defence
            pass

    def _settled(self, event: EventState, version: int) -> bool:
        """Whether no record of ``event`` was made since ``version``, nor was being made then."""
        if event.stamp == version and not version & 1:
            return True
        self._uncertain += 1
        return False

    def _thread(self) -> ThreadId:
        number = self._lanes.lane.number
        return number if number >= 0 else self._name_thread()

    def _name_thread(self) -> ThreadId:
        me = self._lanes.lane
        if me.assigned < 0:
            me.assigned = ThreadId(self._threads)
            self._threads += 1
        if self._define(DefineSpace.THREAD, me.assigned, threading.current_thread().name):
            me.number = me.assigned
        return me.assigned

    def _stream(self, stream: Stream) -> StreamId:
        handle = stream.stream_id
        if handle not in self._streams:
            if len(self._streams) >= MAX_STREAMS:
                self._streams.clear()
                self._last_on.clear()
                self._stream_known.clear()
            kind = getattr(stream, "kind", StreamKind.NONBLOCKING)
            if self._define(DefineSpace.STREAM, handle, stream.name, kind):
                self._streams.add(handle)
        return handle

    def _queue_on(self, stream: Stream, op: OpId) -> StreamId:
        """Name of ``stream``, on which ``op`` is being queued."""
        handle = self._stream(stream)
        self._last_on[handle] = op
        return handle

    def _site(self, name: str) -> int:
        site = self._sites.get(name)
        if site is not None:
            return site
        if len(self._sites) >= MAX_SITES:
            return MAX_SITES
        site = len(self._sites)
        if self._define(DefineSpace.SITE, site, name):
            self._sites[name] = site
        return site

    def _marker(self, thread: ThreadId, stream: Stream) -> EventId:
        key = (thread, stream.stream_id)
        marker = self._markers.get(key)
        if marker is None:
            if len(self._markers) >= MAX_STREAMS:
                self._markers.clear()
            marker = self._markers[key] = EventId(next(self._events))
        return marker

    def _define(self, space: DefineSpace, number: int, text: str, value: int = 0) -> bool:
        thread = ThreadId(max(0, self._lanes.lane.assigned))
        return self._sink.append(Define(NO_OP, thread, self._clock(), space, number, text, value))


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
