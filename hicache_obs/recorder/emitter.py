"""How a call becomes a record: its id, its thread, the names it uses, its place in the ring, and later its times.

An operation gets its id and its place in the ring in one step, so the ring is in id order. What goes wrong is counted,
logged once, and after ``MAX_FAILURES`` in a row recording switches itself off.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Literal

from hicache_obs.recorder.counters import RecorderCounters
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.lane import Lanes
from hicache_obs.recorder.nvtx_ranges import NoRanges, RangeName, Ranges, open_ranges
from hicache_obs.recorder.pending import DEFAULT_MAX_PENDING, PendingTimes
from hicache_obs.recorder.sink import BlockSink, RecordSink
from hicache_obs.records import (
    NO_OP,
    Access,
    AnyRecord,
    CaptureMode,
    Define,
    DefineSpace,
    DropReason,
    EventId,
    OpId,
    StreamId,
    StreamKind,
    ThreadId,
)
from hicache_obs.streams.protocol import Device, Probe, Stream

MAX_FAILURES: Final = 16
MAX_SITES: Final = 4096
MAX_STREAMS: Final = 1 << 16

_TIMED_ONE_IN: Final = 7
"""Of so many operations that are packed at once one is timed: two readings of the clock take as long as the packing. A
prime, so that each kind of call has its turn, but where a round is of seven operations or fourteen."""
_OFF: Final = CaptureMode.OFF  # looking up an enum member costs as much as the clock
_SWITCHED_OFF: Final = DropReason.SWITCHED_OFF
_SEGMENT: Final = RangeName.SEGMENT
_COPY: Final = RangeName.COPY

_now_ns: Final = time.perf_counter_ns

_LOG: Final = logging.getLogger(__name__)
Build = Callable[[OpId, ThreadId, int], AnyRecord | None]


class Emitter:
    """Makes one record at a time, and appends it. Any thread may call any method; none raises.

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
        self._packs: Final = sink if isinstance(sink, BlockSink) else None
        """The same, if it takes packed records."""
        self._clock = clock
        self._ranges = open_ranges() if ranges is None else ranges
        self._unseen: Final = isinstance(self._ranges, NoRanges)
        """Nobody would see the ranges: none are opened, and devices need not call back."""
        # Re-entrant: a signal handler may use the engine while its own thread is in a hook. A ring's own, if the
        # records go into one: two locks would cost twice as much.
        self._lock = getattr(sink, "lock", None) or threading.RLock()
        self._acquire, self._release = self._lock.acquire, self._lock.release  # half of what ``with`` costs
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
        self._counters: Final = RecorderCounters()
        """But for those of ranges, under ``_lock``."""
        self._pending: Final = PendingTimes(
            sink, self._lock, self._counters, clock=clock, failed=self._failed, limit=max_pending
        )

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
        with self._lock:
            counters = replace(self._counters)
        if self._unseen:
            counters.ranges_opened = counters.ranges_closed = counters.pairs_resolved
        return counters

    def define(self, space: DefineSpace, number: int, text: str, value: int = 0) -> None:
        """Give an id a name."""
        self._emit(lambda _, thread, now: Define(NO_OP, thread, now, space, number, text, value), uses_op=False)

    def flush_batch(self) -> None:
        """Put what the calling thread has batched into the ring. ``ServerRecorder`` makes batches."""

    # -- inside ----------------------------------------------------------------------------------------------

    def _emit(
        self, build: Build, device: Device | None = None, name: RangeName | None = None, *, uses_op: bool = True
    ) -> Probe | None:
        """Append what ``build`` makes, and count it; a probe if it was kept and ``device`` is given."""
        if not (self._on and self._sink.writable):
            return None
        if self._sink.mode is _OFF:
            self._sink.drop(_SWITCHED_OFF)
            return None
        started = _now_ns()
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
                    return self._kept(device, op, thread, name) if kept and name is not None else None
                finally:
                    self._busy = False
                    self._counters.hook_ns += _now_ns() - started
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._failed(error)
            return None

    def _write(
        self, packs: BlockSink, word: int, a: Any, b: Any, accesses: tuple[Access, ...] | None,
        stream: int, other: int, name: RangeName | None, device: Device | None,
        event: EventState | None = None, version: int = 0,
    ) -> Probe | Literal[False] | None:  # fmt: skip
        """As ``_emit``, of a record that is packed at once; False if nothing was done: then ``_emit`` sees to it.

        This is the hot path: arguments by position, and no call that can be done without.

        Args:
            packs: The sink.
            word: The slot's first word but for the thread.
            a, b, accesses: What ``put_work`` gets after the time; ``put`` if the last is none.
            stream, other: What the operation is queued on; the same twice if that is one.
            name: Of the range, if the operation has one.
            device: As for ``_emit``.
            event: It was waited for by the thread, and queued on nothing: the record is left out if it was recorded
                since ``version``.
        """
        lane, streams = self._lanes.lane, self._streams
        thread, done = lane.number, False
        if thread < 0 or lane.batch is not None or not self._on:
            return False
        if event is None and (stream not in streams or other not in streams):
            return False
        started = 0 if self._next_op % _TIMED_ONE_IN else _now_ns()
        acquire, release, clock = self._acquire, self._release, self._clock  # as attributes their calls cost more
        acquire()
        if self._busy:
            release()
            return False
        try:
            self._busy = True
            if event is not None and not self._settled(event, version):
                return None
            op = self._next_op
            if accesses is None:
                done = packs.put(word | thread << 32, op, clock(), a, b)
            else:
                done = packs.put_work(word | thread << 32, op, clock(), a, b, accesses)
            if not done:
                return False
            self._next_op = op + 1  # type: ignore[assignment] # a call of the type costs as much as the clock
            self._row_of_failures = 0
            if event is not None:
                event.known_to[thread] = version
                return None
            self._last_on[stream] = op
            if other != stream:
                self._last_on[other] = op
            return None if name is None else self._kept(device, op, thread, name)
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            if not done:  # ``_emit`` says what is wrong with it
                return False
            self._failed(error)
            return None
        finally:
            self._busy = False
            if started:
                self._counters.hook_ns += _TIMED_ONE_IN * (_now_ns() - started)
            release()

    def _kept(self, device: Device | None, op: OpId, thread: ThreadId, name: RangeName) -> Probe | None:
        """Count a launch, copy or wait that was recorded; a probe for it if ``device`` is given."""
        counters = self._counters
        if name is _SEGMENT:
            counters.launches += 1
        elif name is _COPY:
            counters.copies += 1
        else:
            counters.waits += 1
        if device is None:
            return None
        if self._unseen:
            probe = device.probe()
        else:
            probe = device.probe(partial(self._open_range, name, op), self._close_range)
        self._pending.add(op, thread, probe, device)
        return probe

    def _settled(self, event: EventState, version: int) -> bool:
        """Whether no record of ``event`` was made since ``version``, nor was being made then."""
        if event.stamp == version and not version & 1:
            return True
        self._counters.uncertain += 1
        return False

    def _open_range(self, name: RangeName, op: OpId) -> None:
        try:
            self._ranges.push(name, op)
            self._counters.ranges_opened += 1  # no other thread comes in between here: there is no call
        except Exception as error:  # noqa: BLE001 this runs inside the device
            self._failed(error)

    def _close_range(self) -> None:
        try:
            self._ranges.pop()
            self._counters.ranges_closed += 1  # as above
        except Exception as error:  # noqa: BLE001 this runs inside the device
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        try:
            with self._lock:
                self._counters.errors += 1
                self._row_of_failures += 1
                first = self._counters.errors == 1
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

    def _define(self, space: DefineSpace, number: int, text: str, value: int = 0) -> bool:
        thread = ThreadId(max(0, self._lanes.lane.assigned))
        return self._sink.append(Define(NO_OP, thread, self._clock(), space, number, text, value))
