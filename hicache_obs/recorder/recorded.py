"""``RecordedDevice``: the stream protocol again, with every call recorded on its way to the real device.

An engine written against ``hicache_obs.streams.protocol`` is recorded without changes. Streams and events of the
bare device may be mixed with wrapped ones. The engine's call always goes through, whatever the recorder does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from hicache_obs.recorder.counters import RecorderCounters
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.records import Purpose, StreamId, StreamKind, Work
from hicache_obs.streams import protocol

__all__ = [
    "RecordedDevice",
    "RecordedEvent",
    "RecordedGate",
    "RecordedStream",
    "Recorder",
    "RecorderCounters",
    "observe",
    "unwrap_event",
    "unwrap_stream",
]

_MAX_BARE_EVENTS: Final = 256
_MAX_STREAMS: Final = 4096


def observe(device: protocol.Device, recorder: Recorder) -> protocol.Device:
    """``device``, recorded."""
    return RecordedDevice(device, recorder)


def unwrap_stream(stream: protocol.Stream) -> protocol.Stream:
    """The bare device's stream."""
    return stream.bare if isinstance(stream, RecordedStream) else stream


def unwrap_event(event: protocol.Event) -> protocol.Event:
    """The bare device's event."""
    return event.bare if isinstance(event, RecordedEvent) else event


class RecordedEvent:
    """An event whose use is recorded."""

    __slots__ = ("_device", "_recorder", "bare", "state")

    def __init__(self, device: RecordedDevice, bare: protocol.Event, state: EventState) -> None:
        self._device = device
        self._recorder = device.recorder
        self.bare: Final = bare
        self.state: Final = state

    def record(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.record``."""
        bare = stream.bare if isinstance(stream, RecordedStream) else stream
        self._recorder.begin_event_record(self._device.bare, self.state, bare)
        try:
            self.bare.record(bare)
        finally:
            self.state.version += 1  # all that ``end_event_record`` does

    def wait(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.wait``."""
        device = self._device
        device.wait_event(device.bare.current_stream() if stream is None else unwrap_stream(stream), self)

    def query(self) -> bool:
        """See ``protocol.Event.query``."""
        version = self.state.stamp
        result = self.bare.query()
        self._device.recorder.event_queried(self.state, version, result)
        return result

    def synchronize(self) -> None:
        """See ``protocol.Event.synchronize``."""
        state = self.state
        version = state.stamp
        self.bare.synchronize()
        self._recorder.event_synchronized(state, version)

    def elapsed_time(self, end: protocol.Event) -> float:
        """See ``protocol.Event.elapsed_time``. An answer means that both events are complete, as a query would."""
        other = end.state if isinstance(end, RecordedEvent) else None
        mine, others = self.state.stamp, 0 if other is None else other.stamp
        result = self.bare.elapsed_time(unwrap_event(end))
        self._device.recorder.event_queried(self.state, mine, True)
        if other is not None:
            self._device.recorder.event_queried(other, others, True)
        return result


class RecordedStream:
    """A stream whose use is recorded."""

    __slots__ = ("_device", "_recorder", "bare", "kind")

    def __init__(self, device: RecordedDevice, bare: protocol.Stream) -> None:
        self._device = device
        self._recorder = device.recorder
        self.bare: Final = bare
        self.kind: Final[StreamKind] = getattr(bare, "kind", StreamKind.NONBLOCKING)

    @property
    def stream_id(self) -> StreamId:
        """See ``protocol.Stream.stream_id``."""
        return self.bare.stream_id

    @property
    def name(self) -> str:
        """See ``protocol.Stream.name``."""
        return self.bare.name

    def record_event(self, event: protocol.Event | None = None) -> protocol.Event:
        """See ``protocol.Stream.record_event``."""
        chosen = self._device.Event() if event is None else event
        self._device.wrap_event(chosen).record(self)
        return chosen

    def wait_event(
        self,
        event: protocol.Event,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``protocol.Stream.wait_event``."""
        self._device.wait_event(self.bare, event, purpose=purpose, probe=probe)

    def wait_stream(
        self,
        stream: protocol.Stream,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``protocol.Stream.wait_stream``."""
        recorder, on = self._recorder, stream.bare if isinstance(stream, RecordedStream) else stream
        own = recorder.wait_stream(self._device.bare, self.bare, on, purpose, timed=probe is None)
        try:
            self.bare.wait_stream(on, purpose=purpose, probe=own if probe is None else probe)
        except BaseException:
            recorder.abandon(own)
            raise

    def synchronize(self) -> None:
        """See ``protocol.Stream.synchronize``."""
        recorder = self._device.recorder
        mark = recorder.begin_stream_sync(self.bare)
        self.bare.synchronize()
        recorder.end_stream_sync(self.bare, mark)

    def query(self) -> bool:
        """See ``protocol.Stream.query``."""
        recorder = self._device.recorder
        last = recorder.last_on(self.bare)
        result = self.bare.query()
        recorder.stream_queried(self.bare, last, result)
        return result


class RecordedGraph:
    """A captured graph whose replays are recorded; waits for its events are too."""

    __slots__ = ("bare", "events")

    def __init__(self, bare: protocol.Graph, events: Sequence[RecordedEvent]) -> None:
        self.bare: Final = bare
        self.events: Final = tuple(events)

    @property
    def number(self) -> int:
        """See ``protocol.Graph.number``."""
        return self.bare.number


class RecordedGate:
    """A gate that takes wrapped streams. Gates are not stream order: nothing is recorded."""

    def __init__(self, bare: protocol.Gate) -> None:
        self._bare = bare

    def hold(self, stream: protocol.Stream) -> None:
        """See ``protocol.Gate.hold``."""
        self._bare.hold(unwrap_stream(stream))

    def open(self) -> None:
        """See ``protocol.Gate.open``."""
        self._bare.open()

    def blocks(self, stream: protocol.Stream) -> bool:
        """See ``protocol.Gate.blocks``."""
        return self._bare.blocks(unwrap_stream(stream))

    def wait_blocks_or(self, stream: protocol.Stream, done: protocol.Event, *, timeout_s: float) -> bool:
        """See ``protocol.Gate.wait_blocks_or``."""
        return self._bare.wait_blocks_or(unwrap_stream(stream), unwrap_event(done), timeout_s=timeout_s)


class RecordedDevice:
    """A device whose use is recorded.

    Args:
        device: The bare device.
        recorder: Takes the records; its clock must be ``device.host_ns``.
    """

    def __init__(self, device: protocol.Device, recorder: Recorder) -> None:
        self.bare: Final = device
        self.recorder: Final = recorder
        self._streams: dict[StreamId, RecordedStream] = {}
        self._bare_events: dict[int, tuple[protocol.Event, RecordedEvent]] = {}

    @property
    def name(self) -> str:
        """See ``protocol.Device.name``."""
        return self.bare.name

    @property
    def torch_device(self) -> str:
        """See ``protocol.Device.torch_device``."""
        return self.bare.torch_device

    @property
    def clock_error_ns(self) -> int:
        """See ``protocol.Device.clock_error_ns``."""
        return self.bare.clock_error_ns

    def Stream(  # noqa: N802 torch's name
        self, name: str = "", *, kind: StreamKind = StreamKind.NONBLOCKING
    ) -> RecordedStream:
        """See ``protocol.Device.Stream``."""
        bare = self.bare.Stream(name, kind=kind)
        self.recorder.new_stream(bare)
        self._streams.pop(bare.stream_id, None)
        return self._wrap_stream(bare)

    def Event(self, enable_timing: bool = False) -> RecordedEvent:  # noqa: N802 torch's name
        """See ``protocol.Device.Event``."""
        return RecordedEvent(self, self.bare.Event(enable_timing), self.recorder.new_event())

    def current_stream(self) -> RecordedStream:
        """See ``protocol.Device.current_stream``."""
        return self._wrap_stream(self.bare.current_stream())

    def stream(self, stream: protocol.Stream) -> AbstractContextManager[None]:
        """See ``protocol.Device.stream``."""
        return self.bare.stream(stream.bare if isinstance(stream, RecordedStream) else stream)

    def synchronize(self) -> None:
        """See ``protocol.Device.synchronize``."""
        queued = self.recorder.begin_device_sync()
        self.bare.synchronize()
        self.recorder.end_device_sync(queued)

    def launch(self, fn: Callable[[], None], work: Work, *, probe: protocol.Probe | None = None) -> None:
        """See ``protocol.Device.launch``."""
        own = self.recorder.work(self.bare, work, timed=probe is None)
        try:
            self.bare.launch(fn, work, probe=own if probe is None else probe)
        except BaseException:
            self.recorder.abandon(own)
            raise

    def capture(self, number: int, entries: Sequence[Callable[[], None] | None]) -> RecordedGraph:
        """See ``protocol.Device.capture``. Nothing is recorded: what is captured does not run."""
        bare = self.bare.capture(number, entries)
        return RecordedGraph(bare, [RecordedEvent(self, event, self.recorder.new_event()) for event in bare.events])

    def replay(
        self,
        graph: protocol.Graph,
        work: Work,
        nodes: Sequence[Work | None],
        *,
        probes: tuple[protocol.Probe, protocol.Probe] | None = None,
    ) -> None:
        """See ``protocol.Device.replay``."""
        bare = graph.bare if isinstance(graph, RecordedGraph) else graph
        events = [self.wrap_event(event).state for event in graph.events]
        own = self.recorder.begin_replay(self.bare, bare.number, work, nodes, events, timed=probes is None)
        try:
            self.bare.replay(bare, work, nodes, probes=own if probes is None else probes)
        except BaseException:
            self.recorder.abandon(None if own is None else own[0])
            raise
        finally:
            self.recorder.end_replay(events)

    def record_stream(self, tensor: object, stream: protocol.Stream) -> None:
        """See ``protocol.Device.record_stream``."""
        bare = unwrap_stream(stream)
        self.recorder.record_stream(tensor, bare)
        self.bare.record_stream(tensor, bare)

    def probe(
        self, on_begin: Callable[[], None] | None = None, on_end: Callable[[], None] | None = None
    ) -> protocol.Probe:
        """See ``protocol.Device.probe``."""
        return self.bare.probe(on_begin, on_end)

    def gate(self) -> RecordedGate:
        """See ``protocol.Device.gate``."""
        return RecordedGate(self.bare.gate())

    def host_ns(self) -> int:
        """See ``protocol.Device.host_ns``."""
        return self.bare.host_ns()

    def close(self) -> None:
        """See ``protocol.Device.close``."""
        self.bare.close()

    # -- for the wrapped streams and events ------------------------------------------------------------------

    def wait_event(
        self,
        stream: protocol.Stream,
        event: protocol.Event,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """``stream``, a bare one, waits for ``event``, and that is recorded."""
        wrapped = self.wrap_event(event)
        own = self.recorder.wait_event(self.bare, stream, wrapped.state, purpose, timed=probe is None)
        try:
            stream.wait_event(wrapped.bare, purpose=purpose, probe=own if probe is None else probe)
        except BaseException:
            self.recorder.abandon(own)
            raise

    def wrap_event(self, event: protocol.Event) -> RecordedEvent:
        """``event`` itself if it is wrapped; else the wrapper that this bare event had before, or a new one."""
        if isinstance(event, RecordedEvent):
            return event
        known = self._bare_events.get(id(event))
        if known is None:
            while len(self._bare_events) >= _MAX_BARE_EVENTS:
                self._bare_events.pop(next(iter(self._bare_events)), None)
            # The bare event is kept, so that its id cannot become another one's.
            known = self._bare_events[id(event)] = (event, RecordedEvent(self, event, self.recorder.new_event()))
        return known[1]

    def _wrap_stream(self, bare: protocol.Stream) -> RecordedStream:
        known = self._streams.get(bare.stream_id)
        if known is None:
            if len(self._streams) >= _MAX_STREAMS:
                self._streams.clear()
            known = self._streams[bare.stream_id] = RecordedStream(self, bare)
        return known
