"""The threads device: one worker thread per stream, so device work really races in memory.

Any host thread may make any call. Launched functions run on their stream's worker; those of two streams run
side by side as far as the interpreter lock allows (torch, numpy and waiting release it). The default stream has
id 0 and is a stream like the others: nothing orders with it implicitly.

A failing function does not stop its stream: later work still runs and records still complete, so nothing hangs;
the error is raised by the next synchronize of the device, a stream or an event.

A process that forks must not use the device in the child: worker threads do not survive ``fork``.
"""

from __future__ import annotations

import atexit
import os
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Final

from hicache_obs.errors import StreamError
from hicache_obs.records import Purpose, StreamId, StreamKind, Work
from hicache_obs.streams import protocol
from hicache_obs.streams.graph import Entry, EntryList, replay_entries
from hicache_obs.streams.handles import CurrentStream, own, refuse_legacy
from hicache_obs.streams.launching import refuse_in_launch
from hicache_obs.streams.workers import Crew, Latch, Op, Probe, Record, Wait, Worker

CLOCK_ERROR_NS: Final = 1_000
"""Probe times are host times taken around the item; reading the clock and getting there costs less than this."""

_EXIT_JOIN_S: Final = 5.0
"""How long the interpreter's exit waits for each worker; one stuck in user code is left behind (daemon)."""

_NS_PER_MS: Final = 1e6


class ThreadsEvent:
    """A CUDA-style event. Each ``record`` makes a fresh snapshot; waits keep the one they saw."""

    __slots__ = ("_record", "device", "enable_timing")

    def __init__(self, device: ThreadsDevice, *, enable_timing: bool) -> None:
        self.device: Final = device
        self.enable_timing: Final = enable_timing
        self._record: Record | None = None

    @property
    def current_record(self) -> Record | None:
        """The snapshot of the last ``record`` call; ``None`` if never recorded."""
        return self._record

    def record(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.record``."""
        refuse_in_launch("Event.record")
        worker = self.device.own_or_current(stream).worker
        with worker.crew.lock:
            self._record = worker.record()

    def wait(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.wait``."""
        self.device.own_or_current(stream).wait_event(self)

    def query(self) -> bool:
        """See ``protocol.Event.query``."""
        refuse_in_launch("Event.query")
        record = self._record
        return record is None or record.done

    def synchronize(self) -> None:
        """See ``protocol.Event.synchronize``. Never returns while a gate that holds it up stays closed."""
        refuse_in_launch("Event.synchronize")
        record = self._record
        if record is not None:
            record.wait()
        self.device.crew.failures.raise_pending()

    def elapsed_time(self, end: protocol.Event) -> float:
        """See ``protocol.Event.elapsed_time``."""
        refuse_in_launch("Event.elapsed_time")
        other = own(ThreadsEvent, end, self.device)
        return (other.time_ns("end") - self.time_ns("start")) / _NS_PER_MS

    def time_ns(self, which: str) -> int:
        """When the current record completed; StreamError, naming the event ``which``, if there is no time."""
        record = self._record
        if not self.enable_timing:
            raise StreamError(f"elapsed_time: the {which} event was made without enable_timing=True")
        if record is None:
            raise StreamError(f"elapsed_time: the {which} event was never recorded")
        if not record.done:
            raise StreamError(f"elapsed_time: the {which} event is not complete; synchronize it first")
        return record.end_ns


class ThreadsStream:
    """A stream: a queue and the worker thread that empties it. Lives as long as the device."""

    __slots__ = ("device", "kind", "name", "stream_id", "worker")

    def __init__(self, device: ThreadsDevice, stream_id: StreamId, worker: Worker, kind: StreamKind) -> None:
        self.device: Final = device
        self.stream_id: Final = stream_id
        self.name: Final = worker.name
        self.kind: Final = kind
        self.worker: Final = worker

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
        taken = self.device.take(probe)
        wait = Wait(own(ThreadsEvent, event, self.device).current_record, taken)
        with self.worker.crew.lock:
            self.worker.put(wait)

    def wait_stream(
        self,
        stream: protocol.Stream,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``protocol.Stream.wait_stream``. Record there and wait here are queued in one step."""
        refuse_in_launch("Stream.wait_stream")
        other = own(ThreadsStream, stream, self.device)
        taken = self.device.take(probe)
        with self.worker.crew.lock:
            self.worker.put(Wait(other.worker.record(), taken))

    def synchronize(self) -> None:
        """See ``protocol.Stream.synchronize``. Never returns while a gate that holds it stays closed."""
        refuse_in_launch("Stream.synchronize")
        self.device.wait_for([self.worker])

    def query(self) -> bool:
        """See ``protocol.Stream.query``."""
        refuse_in_launch("Stream.query")
        return self.worker.idle()


class ThreadsGate:
    """A gate that parks workers. Any host thread may open it; closing the device opens it too."""

    def __init__(self, device: ThreadsDevice) -> None:
        self._device = device
        self._latch = Latch(device.crew)

    def hold(self, stream: protocol.Stream) -> None:
        """See ``protocol.Gate.hold``."""
        refuse_in_launch("Gate.hold")
        self._latch.hold(own(ThreadsStream, stream, self._device).worker)

    def open(self) -> None:
        """See ``protocol.Gate.open``."""
        self._latch.open()

    def blocks(self, stream: protocol.Stream) -> bool:
        """See ``protocol.Gate.blocks``. Exact: follows the waits that workers stand at, over any streams."""
        worker = own(ThreadsStream, stream, self._device).worker
        with self._device.crew.lock:
            return self._latch.holds_up(worker.parked)

    def wait_blocks_or(self, stream: protocol.Stream, done: protocol.Event, *, timeout_s: float) -> bool:
        """See ``protocol.Gate.wait_blocks_or``. Woken by the workers; the time is a limit, not a poll."""
        refuse_in_launch("Gate.wait_blocks_or")
        worker = own(ThreadsStream, stream, self._device).worker
        record = own(ThreadsEvent, done, self._device).current_record

        def decided() -> bool:
            return record is None or record.done or self._latch.holds_up(worker.parked)

        return self._device.crew.wait_until(decided, timeout_s)


class ThreadsDevice:
    """Device ``threads``. Close it, or use ``contextlib.closing``; a forgotten one ends with the interpreter."""

    def __init__(self) -> None:
        self.crew: Final = Crew()
        self._current = CurrentStream(self._new_stream("default", StreamKind.NONBLOCKING))
        weakref.finalize(self, _stop, self.crew.workers).atexit = False
        _OPEN_DEVICES.add(self)

    @property
    def name(self) -> str:
        """``threads``."""
        return "threads"

    @property
    def torch_device(self) -> str:
        """``cpu``."""
        return "cpu"

    @property
    def clock_error_ns(self) -> int:
        """See ``CLOCK_ERROR_NS``."""
        return CLOCK_ERROR_NS

    def Stream(  # noqa: N802 torch's name
        self, name: str = "", *, kind: StreamKind = StreamKind.NONBLOCKING
    ) -> ThreadsStream:
        """See ``protocol.Device.Stream``. Starts a thread; StreamError for a legacy stream."""
        refuse_in_launch("Device.Stream")
        refuse_legacy(kind, self.name)
        return self._new_stream(name, kind)

    def Event(self, enable_timing: bool = False) -> ThreadsEvent:  # noqa: N802 torch's name
        """See ``protocol.Device.Event``."""
        return ThreadsEvent(self, enable_timing=enable_timing)

    def current_stream(self) -> ThreadsStream:
        """See ``protocol.Device.current_stream``. Each host thread has its own."""
        return self._current.get()

    def stream(self, stream: protocol.Stream) -> AbstractContextManager[None]:
        """See ``protocol.Device.stream``."""
        return self._current.use(own(ThreadsStream, stream, self))

    def synchronize(self) -> None:
        """See ``protocol.Device.synchronize``. Never returns while a gate that holds a stream stays closed."""
        refuse_in_launch("Device.synchronize")
        self.wait_for(self.crew.workers)

    def launch(self, fn: Callable[[], None], work: Work, *, probe: protocol.Probe | None = None) -> None:
        """See ``protocol.Device.launch``. ``fn`` runs on the stream's worker thread."""
        refuse_in_launch("Device.launch")
        worker = self._current.get().worker
        op = Op(fn, work.site, None if probe is None else self.take(probe))
        with self.crew.lock:
            worker.put(op)

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
        """See ``protocol.Device.replay``. Replays of one graph come from one host thread at a time."""
        refuse_in_launch("Device.replay")
        if not isinstance(graph, EntryList):
            raise StreamError(f"replay of {graph!r}: was not captured on this device")
        replay_entries(self, graph, nodes, probes)

    def record_stream(self, tensor: object, stream: protocol.Stream) -> None:
        """Nothing: host tensors have no caching allocator."""
        own(ThreadsStream, stream, self)

    def probe(self, on_begin: Callable[[], None] | None = None, on_end: Callable[[], None] | None = None) -> Probe:
        """See ``protocol.Device.probe``."""
        return Probe(self, on_begin, on_end)

    def gate(self) -> ThreadsGate:
        """See ``protocol.Device.gate``."""
        return ThreadsGate(self)

    def host_ns(self) -> int:
        """``time.perf_counter_ns``."""
        return time.perf_counter_ns()

    def close(self) -> None:
        """See ``protocol.Device.close``. Opens forgotten gates, joins the workers, raises a kept error."""
        refuse_in_launch("Device.close")
        self.end(join_s=None)
        self.crew.failures.raise_pending()

    def end(self, *, join_s: float | None) -> None:
        """Stop the workers after what is queued; wait for each for ``join_s`` seconds (``None``: as long as
        it takes). Idempotent, any thread but a worker's."""
        with self.crew.lock:
            first, self.crew.closed = not self.crew.closed, True
            latches = list(self.crew.closed_latches)
        for latch in latches:
            latch.open()
        if first:
            _stop(self.crew.workers)
        for worker in self.crew.workers:
            worker.thread.join(join_s)

    def wait_for(self, workers: list[Worker]) -> None:
        """Block until everything queued so far on ``workers`` is done, then raise what a function raised."""
        with self.crew.lock:
            closed = self.crew.closed
            records = [] if closed else [worker.record() for worker in workers]
        if closed:  # by now, or soon, everything is done: only the join can tell
            self.end(join_s=None)
        for record in records:
            record.wait()
        self.crew.failures.raise_pending()

    def own_or_current(self, stream: protocol.Stream | None) -> ThreadsStream:
        """``stream``, known to be of this device; the current stream for ``None``."""
        return self._current.get() if stream is None else own(ThreadsStream, stream, self)

    def take(self, probe: protocol.Probe | None) -> Probe | None:
        """``probe``, if any, used for one item from now on."""
        if probe is None:
            return None
        mine = own(Probe, probe, self)
        mine.take()
        return mine

    def _new_stream(self, name: str, kind: StreamKind) -> ThreadsStream:
        worker = self.crew.hire(name)
        return ThreadsStream(self, StreamId(self.crew.workers.index(worker)), worker, kind)


_OPEN_DEVICES: Final[weakref.WeakSet[ThreadsDevice]] = weakref.WeakSet()
os.register_at_fork(after_in_child=_OPEN_DEVICES.clear)


def _stop(workers: list[Worker]) -> None:
    for worker in workers:
        worker.stop()


@atexit.register
def _end_all() -> None:
    """Workers that run torch code while the interpreter is torn down would crash it."""
    for device in list(_OPEN_DEVICES):
        device.end(join_s=_EXIT_JOIN_S)
