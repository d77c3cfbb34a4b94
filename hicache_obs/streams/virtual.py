"""The virtual device: one thread, its own integer-nanosecond clock, the same run every time.

Device functions really run and really move data, so a corrupted page is a fact; only when they run is up to
the schedule. Nothing here reads a wall clock. ``runner`` has the rules, ``schedule`` the strategies.

Streams do not order with the default stream (id 0) implicitly, and gates are open from the start: a schedule
can reverse any unordered pair without holding a stream.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from hicache_obs.errors import StreamError
from hicache_obs.records import Purpose, StreamId, StreamKind, Work
from hicache_obs.streams import protocol
from hicache_obs.streams.cost import CostModel
from hicache_obs.streams.graph import Entry, EntryList, matched, probe_of
from hicache_obs.streams.handles import CurrentStream, own, refuse_legacy
from hicache_obs.streams.launching import refuse_in_launch
from hicache_obs.streams.runner import Item, Lane, Oracle, Runner
from hicache_obs.streams.schedule import Schedule, schedule_named

_NS_PER_MS: Final = 1e6


class VirtualProbe:
    """Start and end of one item on the virtual clock: exact, free, and invisible to the schedule.

    A wait starts when its stream reached it (free, and the wait issued) and ends when it was passed.
    """

    __slots__ = ("_item", "_on_begin", "_on_end", "device")

    def __init__(
        self,
        device: VirtualDevice,
        on_begin: Callable[[], None] | None,
        on_end: Callable[[], None] | None,
    ) -> None:
        self.device: Final = device
        self._on_begin = on_begin
        self._on_end = on_end
        self._item: Item | None = None

    def attach(self, item: Item) -> None:
        """Measure ``item``, which is not queued yet."""
        if self._item is not None:
            raise StreamError(f"probe already measures {self._item}: take a new one for each item")
        self._item = item
        item.on_begin = self._on_begin
        item.on_end = self._on_end

    def ready(self) -> bool:
        """Whether the host clock has passed the item's end. Any thread; costs no host time."""
        return self._item is not None and self.device.runner.complete(self._item)

    def times_ns(self) -> tuple[int, int]:
        """Start and end; StreamError unless ``ready``."""
        if self._item is None or not self.ready():
            raise StreamError("probe times are not known yet: ask ready() first")
        return self._item.start_ns, self._item.end_ns


class VirtualEvent:
    """A CUDA-style event; every record is an item of its own, so a re-record leaves earlier waits alone."""

    __slots__ = ("_record", "device", "enable_timing")

    def __init__(self, device: VirtualDevice, *, enable_timing: bool) -> None:
        self.device: Final = device
        self.enable_timing: Final = enable_timing
        self._record: Item | None = None

    @property
    def current_record(self) -> Item | None:
        """The marker of the last ``record`` call; ``None`` if never recorded."""
        return self._record

    def record(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.record``."""
        refuse_in_launch("Event.record")
        self.device.runner.call(self.mark(self.device.own_or_current(stream).lane))

    def mark(self, lane: Lane) -> Item:
        """A marker on ``lane`` that becomes the current record, for the caller to queue."""
        self._record = Item(lane)
        return self._record

    def wait(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.wait``."""
        self.device.own_or_current(stream).wait_event(self)

    def query(self) -> bool:
        """See ``protocol.Event.query``. Costs host time; after 64 False in a row the device catches up."""
        refuse_in_launch("Event.query")
        return self.device.runner.query(self._record)

    def synchronize(self) -> None:
        """See ``protocol.Event.synchronize``."""
        refuse_in_launch("Event.synchronize")
        self.device.runner.wait_for((self._record,))

    def elapsed_time(self, end: protocol.Event) -> float:
        """See ``protocol.Event.elapsed_time``. Asks as two queries do, and costs as much host time."""
        other = own(VirtualEvent, end, self.device)
        for which, event in (("start", self), ("end", other)):
            if not event.enable_timing:
                raise StreamError(f"elapsed_time: the {which} event was made without enable_timing=True")
            if event.current_record is None:
                raise StreamError(f"elapsed_time: the {which} event was never recorded")
            if not event.query():
                raise StreamError(f"elapsed_time: the {which} event is not complete; synchronize it first")
        assert self._record is not None
        assert other._record is not None
        return (other._record.end_ns - self._record.end_ns) / _NS_PER_MS


class VirtualStream:
    """An in-order queue of the virtual device."""

    __slots__ = ("device", "kind", "lane", "name", "stream_id")

    def __init__(self, device: VirtualDevice, stream_id: StreamId, name: str, kind: StreamKind) -> None:
        self.device: Final = device
        self.stream_id: Final = stream_id
        self.name: Final = name
        self.kind: Final = kind
        self.lane: Final = Lane(name)

    def record_event(self, event: protocol.Event | None = None) -> protocol.Event:
        """See ``protocol.Stream.record_event``."""
        chosen = self.device.Event() if event is None else event
        chosen.record(self)
        return chosen

    def wait_event(
        self,
        event: protocol.Event,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``protocol.Stream.wait_event``. A never recorded event queues a wait for nothing."""
        refuse_in_launch("Stream.wait_event")
        self._wait(own(VirtualEvent, event, self.device).current_record, probe)

    def wait_stream(
        self,
        stream: protocol.Stream,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``protocol.Stream.wait_stream``. One host call: a fresh record there, a wait here."""
        refuse_in_launch("Stream.wait_stream")
        marker = Item(own(VirtualStream, stream, self.device).lane)
        self._wait(marker, probe, marker)

    def synchronize(self) -> None:
        """See ``protocol.Stream.synchronize``."""
        refuse_in_launch("Stream.synchronize")
        self.device.runner.wait_for((self.lane.tail,))

    def query(self) -> bool:
        """See ``protocol.Stream.query``. Costs host time; after 64 False in a row the device catches up."""
        refuse_in_launch("Stream.query")
        return self.device.runner.query(self.lane.tail)

    def _wait(self, record: Item | None, probe: protocol.Probe | None, *before: Item) -> None:
        wait = Item(self.lane, is_wait=True, dependency=record)
        self.device.attach(probe, wait)
        self.device.runner.call(*before, wait)


class VirtualGate:
    """Open from the start: here a race is made to happen by the schedule, not by holding a stream."""

    def hold(self, stream: protocol.Stream) -> None:
        """Nothing to hold."""

    def open(self) -> None:
        """Open already."""

    def blocks(self, stream: protocol.Stream) -> bool:
        """False: nothing waits for an open gate."""
        return False

    def wait_blocks_or(self, stream: protocol.Stream, done: protocol.Event, *, timeout_s: float) -> bool:
        """True at once: there is nothing to wait for."""
        return True


class VirtualDevice:
    """Device ``virtual``. Every call must come from one thread (see ``oracle``); probes may be read from any.

    Args:
        schedule: A name of ``SCHEDULES`` or a strategy of your own.
        seed: Seed of the ``random`` schedule.
        cost: Host and device costs.
        oracle: Answers queries; then several threads may make calls, one at a time.
    """

    def __init__(
        self,
        schedule: str | Schedule = "adversarial",
        *,
        seed: int = 0,
        cost: CostModel | None = None,
        oracle: Oracle | None = None,
    ) -> None:
        self._cost = CostModel() if cost is None else cost
        chosen = schedule_named(schedule, seed=seed) if isinstance(schedule, str) else schedule
        self.schedule: Final = chosen.name
        self.runner: Final = Runner(chosen, self._cost, oracle)
        self._closed = False
        self._current = CurrentStream(self._new_stream("default", StreamKind.NONBLOCKING))

    @property
    def name(self) -> str:
        """``virtual``."""
        return "virtual"

    @property
    def torch_device(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def clock_error_ns(self) -> int:
        """0: the times are decided, not measured."""
        return 0

    def Stream(  # noqa: N802 torch's name
        self, name: str = "", *, kind: StreamKind = StreamKind.NONBLOCKING
    ) -> VirtualStream:
        """See ``protocol.Device.Stream``. Lives as long as the device; StreamError for a legacy stream."""
        refuse_legacy(kind, self.name)
        return self._new_stream(name or f"stream {len(self.runner.lanes)}", kind)

    def Event(self, enable_timing: bool = False) -> VirtualEvent:  # noqa: N802 torch's name
        """See ``protocol.Device.Event``."""
        return VirtualEvent(self, enable_timing=enable_timing)

    def current_stream(self) -> VirtualStream:
        """See ``protocol.Device.current_stream``."""
        return self._current.get()

    def stream(self, stream: protocol.Stream) -> AbstractContextManager[None]:
        """See ``protocol.Device.stream``."""
        return self._current.use(own(VirtualStream, stream, self))

    def synchronize(self) -> None:
        """See ``protocol.Device.synchronize``."""
        refuse_in_launch("Device.synchronize")
        self.runner.wait_for([lane.tail for lane in self.runner.lanes])

    def launch(self, fn: Callable[[], None], work: Work, *, probe: protocol.Probe | None = None) -> None:
        """See ``protocol.Device.launch``. ``fn`` runs on this thread, inside this or a later call."""
        refuse_in_launch("Device.launch")
        if self._closed:
            raise StreamError(f"launch of site {work.site!r}: the device is closed")
        lane = self.current_stream().lane
        item = Item(lane, fn=fn, site=work.site, duration_ns=self._cost.duration_ns(work))
        self.attach(probe, item)
        self.runner.call(item)

    def capture(self, number: int, entries: Sequence[Entry]) -> EntryList:
        """See ``protocol.Device.capture``."""
        refuse_in_launch("Device.capture")
        return EntryList(number, entries, self.Event)

    def replay(
        self,
        graph: protocol.Graph,
        work: Work,
        nodes: Sequence[Work | None],
        *,
        probes: tuple[protocol.Probe, protocol.Probe] | None = None,
    ) -> None:
        """See ``protocol.Device.replay``. One host call."""
        refuse_in_launch("Device.replay")
        if not isinstance(graph, EntryList):
            raise StreamError(f"replay of {graph!r}: was not captured on this device")
        matched(graph.entries, nodes)
        lane = self.current_stream().lane
        items = [Item(lane, is_wait=True, dependency=own(VirtualEvent, graph.last, self).current_record)]
        events = iter(graph.events)
        works = [index for index, node in enumerate(nodes) if node is not None]
        for index, (entry, node) in enumerate(zip(graph.entries, nodes, strict=True)):
            if entry is None or node is None:
                items.append(own(VirtualEvent, next(events), self).mark(lane))
            else:
                items.append(Item(lane, fn=entry, site=node.site, duration_ns=self._cost.duration_ns(node)))
                self.attach(probe_of(index, works, probes), items[-1])
        self.runner.call(*items, own(VirtualEvent, graph.last, self).mark(lane))

    def record_stream(self, tensor: object, stream: protocol.Stream) -> None:
        """Nothing: host tensors have no caching allocator."""
        own(VirtualStream, stream, self)

    def probe(
        self, on_begin: Callable[[], None] | None = None, on_end: Callable[[], None] | None = None
    ) -> VirtualProbe:
        """See ``protocol.Device.probe``."""
        return VirtualProbe(self, on_begin, on_end)

    def gate(self) -> VirtualGate:
        """See ``protocol.Device.gate``; open from the start."""
        return VirtualGate()

    def host_ns(self) -> int:
        """The virtual clock, 0 at the start. Reading it costs no time; any thread."""
        return self.runner.now_ns

    def advance(self, duration_ns: int) -> None:
        """The host computes for ``duration_ns``, and the device goes on meanwhile. Not in the protocol."""
        refuse_in_launch("VirtualDevice.advance")
        self.runner.advance(duration_ns)

    def close(self) -> None:
        """Run what is still queued; raises what a function raised. Idempotent; launching after it raises."""
        if not self._closed:
            self._closed = True
            self.synchronize()

    def own_or_current(self, stream: protocol.Stream | None) -> VirtualStream:
        """``stream``, known to be of this device; the current stream for ``None``."""
        return self.current_stream() if stream is None else own(VirtualStream, stream, self)

    def attach(self, probe: protocol.Probe | None, item: Item) -> None:
        """Make ``probe``, if any, measure ``item``."""
        if probe is not None:
            own(VirtualProbe, probe, self).attach(item)

    def _new_stream(self, name: str, kind: StreamKind) -> VirtualStream:
        stream = VirtualStream(self, StreamId(len(self.runner.lanes)), name, kind)
        self.runner.lanes.append(stream.lane)
        return stream
