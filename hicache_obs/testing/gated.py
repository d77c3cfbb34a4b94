"""Runs a small program on a real device with one operation held back, and sees whether another one overtakes it.

A timing test sees a race when the two happen to meet. Here a gate holds the stream of the earlier operation just
before it; the later one then either completes meanwhile, which no order between the two would allow, or stands at a
wait until the gate opens. Nothing depends on speed.

Host threads are played in the trace's order by one thread. One that would block behind the gate does nothing more, and
neither does a stream from the first call on that such a thread does not make: its queue is in the trace's order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

from hicache_obs.errors import InputError, StreamError
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import (
    AnyRecord,
    Define,
    DefineSpace,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostAccess,
    HostSync,
    Kernel,
    Memcpy,
    OpId,
    PageAlloc,
    PageFree,
    Record,
    Relocate,
    StreamId,
    StreamKind,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    WaitStream,
    Work,
)
from hicache_obs.streams import Device, Event, Stream, open_device
from hicache_obs.testing.regression import SOURCE, find_pair
from hicache_obs.trace import Trace

TIMEOUT_S: Final = 30.0
"""How long a device may take to decide whether an operation is complete or held up."""
_ELSEWHERE: Final = (
    *(DefineSpace.SHARED_EVENT, DefineSpace.SHARED_POOL, DefineSpace.SHARED_HOST_POOL, DefineSpace.SHARED_BUFFER),
    DefineSpace.EARLY_SITE,
)
_WORK: Final = (Kernel, Memcpy, Relocate)


def assert_held_back(scenario: str, earlier: str, later: str, *, device: str = "threads") -> None:
    """While step ``earlier`` is held at a gate, step ``later`` does not complete.

    Args:
        scenario: JSON text (``tests/cases/README.md`` has its keys).
        earlier, later: Step ids; ``earlier`` runs on a stream.
        device: ``threads`` or ``cuda``; the virtual device has no gates.

    Raises:
        AssertionError: It does: nothing holds it back.
        InputError: The program cannot be run like this; says why.
        StreamError: The device could not decide in time.
    """
    __tracebackhide__ = True
    trace = parse_scenario(scenario.encode(), source=SOURCE)
    ops = find_pair(trace, earlier, later)
    with closing(open_device(device)) as opened:
        overtook = overtakes(trace, *ops, opened)
    if overtook:
        raise AssertionError(
            f"step {later} was complete while step {earlier} was held at a gate on device {device!r}: "
            "nothing makes the one wait for the other"
        )


def overtakes(trace: Trace, earlier: OpId, later: OpId, device: Device) -> bool:
    """Whether operation ``later`` completes on ``device`` while ``earlier``, issued before it, is held at a gate.

    Raises:
        InputError: The program cannot be run like this; says why.
        StreamError: The device could not decide in time.
    """
    problem = unfit(trace, earlier, later)
    if problem:
        raise InputError(f"{trace.source}: cannot be run with a gate: {problem}")
    return _Run(trace, device, earlier, later).overtakes()


def unfit(trace: Trace, earlier: OpId, later: OpId) -> str:
    """Why a program cannot be run with a gate before ``earlier``; empty if it can."""
    for record in trace:
        if isinstance(record, Define) and record.space in _ELSEWHERE:
            return "another process, or an early launch, has a hand in it"
        if type(record) not in _PLAYERS:
            return f"{trace.label(record.op)} is a {type(record).__name__}, which a device cannot be told to do here"
        if record.op == earlier and not isinstance(record, _WORK):
            return f"{trace.label(earlier)} runs on no stream"
        if record.op == later and not isinstance(record, (*_WORK, HostAccess)):
            return f"{trace.label(later)} runs neither on a stream nor on a host thread"
    if any(kind is StreamKind.LEGACY for kind in trace.names.stream_kinds.values()):
        return "it has a legacy stream, which no device offers"
    return ""


@dataclass(frozen=True, slots=True)
class _Recorded:
    """A current record of an event on a stream: whether the device was told, and whether the stream was held then."""

    event: Event
    stream: Stream
    made: bool
    held: bool


class _Run:
    """One run. The gate is closed from just before the earlier operation to the end."""

    def __init__(self, trace: Trace, device: Device, earlier: OpId, later: OpId) -> None:
        self._trace = trace
        self._device = device
        self._earlier, self._later = earlier, later
        self._gate = device.gate()
        self._streams: dict[StreamId, Stream] = {}
        self._held: Stream | None = None
        self._stalled: set[StreamId] = set()
        """Streams, by their number in the trace, whose next call will never be made."""
        self._events: dict[EventId, _Recorded] = {}
        self._blocked: set[ThreadId] = set()
        self._channels: dict[int, deque[bool]] = {}
        """Posts not received yet: whether each has happened."""

    def overtakes(self) -> bool:
        """Whether the later operation completes while the earlier one is held."""
        try:
            for record in self._trace:
                if isinstance(record, ThreadPost):
                    happened = record.thread not in self._blocked
                    self._channels.setdefault(record.channel, deque()).append(happened)
                else:
                    _PLAYERS[type(record)](self, record)
                if record.op == self._later:
                    return self._completed(record)
        finally:
            self._gate.open()
        raise InputError(f"{self._trace.source}: the later step is not in it")

    def _completed(self, record: AnyRecord) -> bool:
        if isinstance(record, HostAccess):
            return record.thread not in self._blocked
        assert isinstance(record, _WORK)
        return self._done(self._mark(record.stream))

    def _mark(self, number: StreamId, event: Event | None = None) -> _Recorded:
        """A record made on a stream now."""
        stream = self._stream(number)
        if number in self._stalled:
            return _Recorded(self._device.Event() if event is None else event, stream, made=False, held=False)
        return _Recorded(stream.record_event(event), stream, made=True, held=stream is self._held)

    def _done(self, mark: _Recorded) -> bool:
        """Whether what ``mark`` covers completes; False if the gate holds it up."""
        if mark.held or not mark.made:
            return False
        if not self._gate.wait_blocks_or(mark.stream, mark.event, timeout_s=TIMEOUT_S):
            name = mark.stream.name
            raise StreamError(f"stream {name!r} neither finished nor stood at a wait within {TIMEOUT_S:g} s")
        return mark.event.query()

    def _stream(self, number: StreamId) -> Stream:
        known = self._streams.get(number)
        if known is None:
            known = self._streams[number] = self._device.Stream(self._trace.names.stream(number))
        return known

    def _calls(self, thread: ThreadId, stream: StreamId) -> bool:
        """Whether ``thread`` gets to make a call on ``stream``, and all calls before it there were made."""
        if thread in self._blocked:
            self._stalled.add(stream)
        return stream not in self._stalled

    def _learn(self, thread: ThreadId, mark: _Recorded | None) -> None:
        """The host waits for what ``mark`` covers, unless that is for ever."""
        if mark is None or thread in self._blocked:
            return
        if self._done(mark):
            mark.event.synchronize()
        else:
            self._blocked.add(thread)

    # -- one method per kind of record -----------------------------------------------------------------------

    def _work(self, record: Kernel | Memcpy | Relocate) -> None:
        if not self._calls(record.thread, record.stream):
            return
        stream = self._stream(record.stream)
        if record.op == self._earlier:
            self._gate.hold(stream)
            self._held = stream
        with self._device.stream(stream):
            self._device.launch(_nothing, Work(self._trace.label(record.op)))

    def _event_record(self, record: EventRecord) -> None:
        self._calls(record.thread, record.stream)
        known = self._events.get(record.event)
        self._events[record.event] = self._mark(record.stream, None if known is None else known.event)

    def _event_wait(self, record: EventWait) -> None:
        mark = self._events.get(record.event)
        if mark is None or not self._calls(record.thread, record.stream):
            return
        if mark.made:
            self._stream(record.stream).wait_event(mark.event)
        else:
            self._stalled.add(record.stream)

    def _wait_stream(self, record: WaitStream) -> None:
        told = self._calls(record.thread, record.on)
        if not self._calls(record.thread, record.waiter):
            return
        if told:
            self._stream(record.waiter).wait_stream(self._stream(record.on))
        else:
            self._stalled.add(record.waiter)

    def _event_known(self, record: EventQuery | EventSync) -> None:
        if not isinstance(record, EventQuery) or record.result:  # the program went on only once it was true
            self._learn(record.thread, self._events.get(record.event))

    def _host_sync(self, record: HostSync) -> None:
        for stream in list(self._streams) if record.stream is None else [record.stream]:
            self._learn(record.thread, self._mark(stream))

    def _receive(self, record: ThreadRecv) -> None:
        if not self._channels[record.channel].popleft():
            self._blocked.add(record.thread)

    def _pass(self, record: Record) -> None:
        """It asks nothing of a device."""


def _nothing() -> None:
    """The order of operations is tested, not their contents."""


_PLAYERS: Final[dict[type[Record], Callable[[_Run, Any], None]]] = {
    Kernel: _Run._work,
    Memcpy: _Run._work,
    Relocate: _Run._work,
    EventRecord: _Run._event_record,
    EventWait: _Run._event_wait,
    WaitStream: _Run._wait_stream,
    EventQuery: _Run._event_known,
    EventSync: _Run._event_known,
    HostSync: _Run._host_sync,
    ThreadPost: _Run._pass,
    ThreadRecv: _Run._receive,
    HostAccess: _Run._pass,
    PageAlloc: _Run._pass,
    PageFree: _Run._pass,
    Define: _Run._pass,
}
