"""The cuda device: an adapter over ``torch.cuda``, or any torch device module with the same streams and events.

``launch`` calls its function at once, on the caller's thread; what the function enqueues runs later on the
current stream. So a function that raises does so out of ``launch`` itself, wrapped in StreamError; a device
fault surfaces, as always, in some later call. Any host thread may make any call.

The default stream is CUDA's legacy stream (kind ``LEGACY``); streams made here are non-blocking, as torch's.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, cast

from hicache_obs.errors import StreamError
from hicache_obs.records import Purpose, StreamId, StreamKind, Work
from hicache_obs.streams import protocol
from hicache_obs.streams.cuda_clock import Clock
from hicache_obs.streams.cuda_hold import Hold
from hicache_obs.streams.cuda_module import OWN_PRIORITY, DeviceModule, RawEvent, RawStream
from hicache_obs.streams.cuda_probe import CudaProbe, PairPool
from hicache_obs.streams.graph import Entry, checked, matched
from hicache_obs.streams.handles import own
from hicache_obs.streams.launching import failure, refuse_in_launch, run_launched

_REDRAWS: Final = 64
"""torch hands streams out of a pool of 32, round robin; so many draws find a free one if there is any."""

_SETTLE_S: Final = 0.05
"""A stream that stands at a wait for this long, with the gate closed, is taken to be held up by it."""

_POLL_S: Final = 0.0005


class CudaEvent:
    """A torch event."""

    __slots__ = ("_recorded", "device", "enable_timing", "raw")

    def __init__(self, device: CudaDevice, *, enable_timing: bool, raw: RawEvent | None = None) -> None:
        self.device: Final = device
        self.enable_timing: Final = enable_timing
        self.raw: Final = device.module.Event(enable_timing=enable_timing) if raw is None else raw
        self._recorded = False

    def record(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.record``."""
        refuse_in_launch("Event.record")
        self.raw.record(self.device.own_or_current(stream).raw)
        self._recorded = True

    def wait(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.wait``."""
        self.device.own_or_current(stream).wait_event(self)

    def query(self) -> bool:
        """See ``protocol.Event.query``."""
        refuse_in_launch("Event.query")
        return self.raw.query()

    def synchronize(self) -> None:
        """See ``protocol.Event.synchronize``."""
        refuse_in_launch("Event.synchronize")
        self.raw.synchronize()

    def elapsed_time(self, end: protocol.Event) -> float:
        """See ``protocol.Event.elapsed_time``. float32: half a microsecond at 5 s."""
        refuse_in_launch("Event.elapsed_time")
        other = own(CudaEvent, end, self.device)
        for which, event in (("start", self), ("end", other)):
            if not event.enable_timing:
                raise StreamError(f"elapsed_time: the {which} event was made without enable_timing=True")
            if not event._recorded:
                raise StreamError(f"elapsed_time: the {which} event was never recorded")
            if not event.query():
                raise StreamError(f"elapsed_time: the {which} event is not complete; synchronize it first")
        return self.raw.elapsed_time(other.raw)


class CudaStream:
    """A torch stream, one object per handle."""

    __slots__ = ("device", "kind", "name", "raw", "stream_id", "waits")

    def __init__(self, device: CudaDevice, stream_id: StreamId, raw: RawStream, name: str, kind: StreamKind) -> None:
        self.device: Final = device
        self.stream_id: Final = stream_id
        self.raw: Final = raw
        self.name: Final = name
        self.kind: Final = kind
        self.waits: Final[deque[tuple[RawEvent, RawEvent]]] = deque(maxlen=256)
        """Events before and after each wait issued while a gate was closed; for ``Gate.blocks``."""

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
        """See ``protocol.Stream.wait_event``."""
        refuse_in_launch("Stream.wait_event")
        raw = own(CudaEvent, event, self.device).raw
        if self.device.closed_gates:
            before, after = self.device.module.Event(), self.device.module.Event()
            before.record(self.raw)
            self._wait(raw, probe)
            after.record(self.raw)
            self.waits.append((before, after))
        else:
            self._wait(raw, probe)

    def wait_stream(
        self,
        stream: protocol.Stream,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``protocol.Stream.wait_stream``: a fresh event recorded there and waited for here."""
        refuse_in_launch("Stream.wait_stream")
        self.wait_event(own(CudaStream, stream, self.device).record_event(), purpose=purpose, probe=probe)

    def synchronize(self) -> None:
        """See ``protocol.Stream.synchronize``."""
        refuse_in_launch("Stream.synchronize")
        self.raw.synchronize()

    def query(self) -> bool:
        """See ``protocol.Stream.query``."""
        refuse_in_launch("Stream.query")
        return self.raw.query()

    def stands_at_wait(self) -> bool:
        """Whether the stream has reached, and not passed, a wait issued while a gate was closed."""
        return any(before.query() and not after.query() for before, after in list(self.waits))

    def _wait(self, raw: RawEvent, probe: protocol.Probe | None) -> None:
        mine = None if probe is None else own(CudaProbe, probe, self.device)
        if mine is not None:
            mine.begin(self.raw)
        self.raw.wait_event(raw)
        if mine is not None:
            mine.end(self.raw)


class CudaGraph:
    """A captured CUDA graph and the events that it records itself."""

    __slots__ = ("entries", "events", "number", "raw")

    def __init__(self, number: int, entries: Sequence[Entry], raw: Any, events: Sequence[CudaEvent]) -> None:
        self.number: Final = number
        self.entries: Final = tuple(entry is None for entry in entries)
        self.raw: Final = raw
        self.events: Final = tuple(events)


class CudaGate:
    """Holds a stream by a driver wait on a host word, or for a fixed time where the driver has none.

    The driver's wait is invisible to the event API, so ``blocks`` is an observation, not a proof: a stream that
    stands at a wait while the hold stands. Work that *completes* while the hold stands is proven unordered with
    what is held; work that does not complete within the bound is taken to be fenced.
    """

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._hold = Hold(device.module)
        self._around: list[tuple[RawEvent, RawEvent]] = []

    def hold(self, stream: protocol.Stream) -> None:
        """See ``protocol.Gate.hold``."""
        refuse_in_launch("Gate.hold")
        raw = own(CudaStream, stream, self._device).raw
        if self not in self._device.closed_gates:
            self._device.closed_gates.append(self)
        before, after = self._device.module.Event(), self._device.module.Event()
        before.record(raw)
        self._hold.enqueue(raw)
        after.record(raw)
        self._around.append((before, after))

    def open(self) -> None:
        """See ``protocol.Gate.open``."""
        self._hold.open()
        if self in self._device.closed_gates:
            self._device.closed_gates.remove(self)
            self._device.opened_gates.append(self)

    def blocks(self, stream: protocol.Stream) -> bool:
        """Whether the hold stands and ``stream`` stands at a wait, right now. ``wait_blocks_or`` looks longer."""
        standing = any(before.query() and not after.query() for before, after in self._around)
        return standing and own(CudaStream, stream, self._device).stands_at_wait()

    def wait_blocks_or(self, stream: protocol.Stream, done: protocol.Event, *, timeout_s: float) -> bool:
        """See ``protocol.Gate.wait_blocks_or``. Polls: the driver wakes nobody. ``blocks`` must last 50 ms."""
        give_up = time.monotonic() + timeout_s
        since = time.monotonic()
        while not done.query():
            now = time.monotonic()
            if not self.blocks(stream):
                since = now
            elif now - since >= _SETTLE_S:
                return True
            if now >= give_up:
                return False
            time.sleep(_POLL_S)
        return True


class CudaDevice:
    """Device ``cuda`` over ``module``.

    Args:
        module: A torch device module; ``torch.cuda`` by default.
        torch_device: Where its tensors live.
    """

    def __init__(self, module: DeviceModule | None = None, *, torch_device: str = "cuda") -> None:
        if module is None:
            import torch

            module = cast(DeviceModule, torch.cuda)
        self.module: Final = module
        self.closed_gates: Final[list[CudaGate]] = []
        # A word must not be reused before the device has read it; by 64 gates later it has.
        self.opened_gates: Final[deque[CudaGate]] = deque(maxlen=64)
        self._torch_device = torch_device
        self._lock = threading.Lock()
        self._streams: dict[StreamId, CudaStream] = {}
        # Adopted like the engine's too, where a module has no pool per priority: no stream may have its handle.
        anchors = self._adopt(module.Stream(priority=OWN_PRIORITY), "clock anchors")
        self._clock = Clock(anchors.raw, self._timing_event)
        self._pairs = PairPool(self._timing_event)

    @property
    def name(self) -> str:
        """``cuda``."""
        return "cuda"

    @property
    def torch_device(self) -> str:
        """As given; ``cuda``."""
        return self._torch_device

    @property
    def clock_error_ns(self) -> int:
        """Half width of the last anchors' uncertainty, never below a microsecond."""
        return self._clock.error_ns

    def Stream(  # noqa: N802 torch's name
        self, name: str = "", *, kind: StreamKind = StreamKind.NONBLOCKING
    ) -> CudaStream:
        """See ``protocol.Device.Stream``. A handle of its own as long as torch's pool has one.

        Raises:
            StreamError: torch makes non-blocking streams only.
        """
        if kind is not StreamKind.NONBLOCKING:
            raise StreamError(f"Stream(kind={kind.name}) on device 'cuda': must be NONBLOCKING")
        raw = self.module.Stream()
        for _ in range(_REDRAWS):
            if _handle(raw) not in self._streams:
                break
            raw = self.module.Stream()
        return self._adopt(raw, name)

    def Event(self, enable_timing: bool = False) -> CudaEvent:  # noqa: N802 torch's name
        """See ``protocol.Device.Event``."""
        return CudaEvent(self, enable_timing=enable_timing)

    def current_stream(self) -> CudaStream:
        """See ``protocol.Device.current_stream``: torch's own, so streams set by others are seen too."""
        raw = self.module.current_stream()
        return self._streams.get(_handle(raw)) or self._adopt(raw)

    def stream(self, stream: protocol.Stream) -> AbstractContextManager[None]:
        """See ``protocol.Device.stream``."""
        context: AbstractContextManager[None] = self.module.stream(own(CudaStream, stream, self).raw)
        return context

    def synchronize(self) -> None:
        """See ``protocol.Device.synchronize``."""
        refuse_in_launch("Device.synchronize")
        self.module.synchronize()

    def launch(self, fn: Callable[[], None], work: Work, *, probe: protocol.Probe | None = None) -> None:
        """See ``protocol.Device.launch``. Calls ``fn`` now; StreamError with its cause if it raises."""
        refuse_in_launch("Device.launch")
        mine = None if probe is None else own(CudaProbe, probe, self)
        raw = None if mine is None else self.module.current_stream()
        if mine is not None and raw is not None:
            mine.begin(raw)
        try:
            run_launched(fn, work.site)
        except Exception as error:
            raise failure(work.site, error) from error
        finally:
            if mine is not None and raw is not None:
                mine.end(raw)

    def capture(self, number: int, entries: Sequence[Entry]) -> CudaGraph:
        """See ``protocol.Device.capture``. Blocks until the device is idle.

        Raises:
            StreamError: A function did what cannot be captured, a synchronization for one.
        """
        refuse_in_launch("Device.capture")
        module = cast(Any, self.module)
        raw, side = module.CUDAGraph(), self.module.Stream()
        events: list[CudaEvent] = []
        site = f"capture of graph {number}"
        try:
            # In torch's default mode a query by another thread, the recorder's for one, would break the capture.
            with module.graph(raw, stream=side, capture_error_mode="thread_local"):
                for entry in checked(entries):
                    if entry is None:
                        event = module.Event(external=True)  # recorded by every replay, not by the capture
                        event.record(side)
                        events.append(CudaEvent(self, enable_timing=False, raw=event))
                    else:
                        run_launched(entry, site)
        except Exception as error:
            raise failure(site, error) from error
        return CudaGraph(number, entries, raw, events)

    def replay(
        self,
        graph: protocol.Graph,
        work: Work,
        nodes: Sequence[Work | None],
        *,
        probes: tuple[protocol.Probe, protocol.Probe] | None = None,
    ) -> None:
        """See ``protocol.Device.replay``: CUDA itself orders replays of one graph. The probes are around the whole."""
        refuse_in_launch("Device.replay")
        if not isinstance(graph, CudaGraph):
            raise StreamError(f"replay of {graph!r}: was not captured on this device")
        matched([None if record else _captured for record in graph.entries], nodes)
        stream = self.module.current_stream()
        first, last = (None, None) if probes is None else (own(CudaProbe, probe, self) for probe in probes)
        if first is not None:
            first.begin(stream)
            if last is not first:
                first.end(stream)
        graph.raw.replay()
        if last is not None:
            if last is not first:
                last.begin(stream)
            last.end(stream)

    def record_stream(self, tensor: object, stream: protocol.Stream) -> None:
        """See ``protocol.Device.record_stream``."""
        cast(Any, tensor).record_stream(own(CudaStream, stream, self).raw)

    def probe(self, on_begin: Callable[[], None] | None = None, on_end: Callable[[], None] | None = None) -> CudaProbe:
        """See ``protocol.Device.probe``."""
        return CudaProbe(self, self._pairs, self._clock, on_begin, on_end)

    def gate(self) -> CudaGate:
        """See ``protocol.Device.gate``."""
        return CudaGate(self)

    def host_ns(self) -> int:
        """``time.perf_counter_ns``."""
        return time.perf_counter_ns()

    def close(self) -> None:
        """Open forgotten gates, which would hold the process at its exit, and synchronize. Idempotent."""
        for gate in list(self.closed_gates):
            gate.open()
        self.synchronize()

    def own_or_current(self, stream: protocol.Stream | None) -> CudaStream:
        """``stream``, known to be of this device; the current stream for ``None``."""
        return self.current_stream() if stream is None else own(CudaStream, stream, self)

    def _timing_event(self) -> RawEvent:
        return self.module.Event(enable_timing=True)

    def _adopt(self, raw: RawStream, name: str = "") -> CudaStream:
        handle = _handle(raw)
        legacy = handle == 0
        kind = StreamKind.LEGACY if legacy else StreamKind.NONBLOCKING
        name = name or ("default" if legacy else f"stream {handle:#x}")
        with self._lock:
            return self._streams.setdefault(handle, CudaStream(self, handle, raw, name, kind))


def _captured() -> None:
    """Stands for a function that was captured."""


def _handle(raw: RawStream) -> StreamId:
    """The driver's handle where the module has one (``torch.cuda``), else torch's stream id."""
    handle = getattr(raw, "cuda_stream", None)
    return StreamId(int(cast(Any, raw).stream_id if handle is None else handle))
