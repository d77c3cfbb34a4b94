"""The stream protocol: the subset of a torch device module that a KV-cache engine uses.

The same engine code runs on every implementation: ``cuda`` (any torch device module), ``threads`` (one worker
thread per stream, work really races in memory) and ``virtual`` (deterministic, one thread, own clock). Events
behave as in CUDA: a record is a snapshot, a re-record never moves an earlier wait, a wait on a never recorded
event does nothing and its query is true.

All work on device tensors happens inside ``Device.launch``. Nothing here records anything: the recorder wraps
a device (``hicache_obs.recorder.recorded``), and an engine that is not observed gets the bare device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

from hicache_obs.records import Purpose, StreamId, StreamKind, Work


class Event(Protocol):
    """A CUDA-style event. Methods may be called from any host thread."""

    def record(self, stream: Stream | None = None) -> None:
        """Mark all work queued so far on ``stream`` (default: the current stream)."""

    def wait(self, stream: Stream | None = None) -> None:
        """Make later work on ``stream`` (default: the current stream) start after the current record."""

    def query(self) -> bool:
        """Whether the current record is complete; true when never recorded. Does not block."""

    def synchronize(self) -> None:
        """Block the calling thread until the current record is complete."""

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds from this event to ``end``; StreamError unless both are complete timing events."""


class Probe(Protocol):
    """An event pair around one stream item, for the recorder only: orders nothing, costs no stream time.

    ``on_begin`` and ``on_end`` run right before and after the item, in the thread that runs it (``threads``,
    ``virtual``) or that issues it (``cuda``). The recorder opens and closes its NVTX range there.
    """

    def ready(self) -> bool:
        """Whether both events are complete. Does not block."""

    def times_ns(self) -> tuple[int, int]:
        """Start and end on the device's host clock; StreamError unless ``ready``."""


class Stream(Protocol):
    """An in-order queue of device work."""

    @property
    def stream_id(self) -> StreamId:
        """The handle. Two objects with one handle are one stream."""

    @property
    def name(self) -> str: ...

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event`` (default: a fresh one) on this stream and return it."""

    def wait_event(self, event: Event, *, purpose: Purpose = Purpose.PLAIN, probe: Probe | None = None) -> None:
        """Later work here starts after ``event``'s current record; a no-op if it was never recorded."""

    def wait_stream(self, stream: Stream, *, purpose: Purpose = Purpose.PLAIN, probe: Probe | None = None) -> None:
        """Later work here starts after all work queued so far on ``stream``."""

    def synchronize(self) -> None:
        """Block the calling thread until all work queued so far is complete."""

    def query(self) -> bool:
        """Whether all work queued so far is complete. Does not block."""


class Gate(Protocol):
    """Holds one stream at a point until opened: how the demo makes a race happen on any machine, at any load.

    A gate is not stream order: it is not recorded, and the analyzer never sees it.
    """

    def hold(self, stream: Stream) -> None:
        """Enqueue the hold; later work on ``stream`` waits until ``open``."""

    def open(self) -> None:
        """Let the stream go on. Idempotent."""

    def blocks(self, stream: Stream) -> bool:
        """Whether ``stream`` is parked on a wait that cannot be satisfied before this gate opens."""

    def wait_blocks_or(self, stream: Stream, done: Event, *, timeout_s: float) -> bool:
        """Block the host until ``blocks(stream)`` or ``done`` is complete; False if neither in time."""


class Graph(Protocol):
    """Captured work (``hicache_obs.streams.graph``); made by ``Device.capture``."""

    @property
    def number(self) -> int:
        """Names it in records."""

    @property
    def events(self) -> Sequence[Event]:
        """One per external record among its entries, in order; recorded by each replay."""


_Stream: TypeAlias = Stream
"""Inside ``Device`` the name ``Stream`` is the method."""


class Device(Protocol):
    """A device module: streams, events, and the one entry for device work, ``launch``."""

    @property
    def name(self) -> str:
        """``cuda``, ``threads`` or ``virtual``."""

    @property
    def torch_device(self) -> str:
        """Where tensors of this device live, as ``torch.device`` spells it."""

    @property
    def clock_error_ns(self) -> int:
        """Half width of the uncertainty of times from ``Probe.times_ns``."""

    def Stream(self, name: str = "", *, kind: StreamKind = StreamKind.NONBLOCKING) -> _Stream:  # noqa: N802 torch's name
        """A new stream."""

    def Event(self, enable_timing: bool = False) -> Event:  # noqa: N802 torch's name
        """A new event, never recorded."""

    def current_stream(self) -> _Stream:
        """The calling thread's current stream; the default stream unless inside ``stream``."""

    def stream(self, stream: _Stream) -> AbstractContextManager[None]:
        """Make ``stream`` the calling thread's current stream inside the block."""

    def synchronize(self) -> None:
        """Block until all work on all streams is complete; raises what a launched function raised."""

    def launch(self, fn: Callable[[], None], work: Work, *, probe: Probe | None = None) -> None:
        """Enqueue ``fn`` on the current stream. StreamError when called from inside a launched function.

        ``fn`` runs later, on another thread, or (``cuda``) at once, enqueueing kernels on the current stream.
        ``work`` says what it touches; only the virtual device reads it (cost from ``size_bytes``).
        """

    def capture(self, number: int, entries: Sequence[Callable[[], None] | None]) -> Graph:
        """A graph of ``entries``; nothing runs. ``None``: an external record. May block until the device is idle.

        On ``cuda`` each function is called once, while the capture is on; otherwise in every replay.
        """

    def replay(
        self, graph: Graph, work: Work, nodes: Sequence[Work | None], *, probes: tuple[Probe, Probe] | None = None
    ) -> None:
        """Enqueue one replay on the current stream, after earlier replays of the graph on any stream.

        Args:
            graph: Captured on this device.
            work: The replay as a whole; its accesses are those of the nodes.
            nodes: What each entry touches this time, ``None`` for each external record.
            probes: Around the first and the last entry that is work; one object if that is the same entry.
        """

    def record_stream(self, tensor: object, stream: _Stream) -> None:
        """Tell the caching allocator that ``stream`` uses ``tensor`` (``torch.Tensor.record_stream``)."""

    def probe(self, on_begin: Callable[[], None] | None = None, on_end: Callable[[], None] | None = None) -> Probe:
        """An event pair for one ``launch``, ``wait_event`` or ``wait_stream``."""

    def gate(self) -> Gate:
        """A new closed gate."""

    def host_ns(self) -> int:
        """The host clock that ``Probe.times_ns`` is expressed in."""

    def close(self) -> None:
        """Finish queued work, stop workers. Idempotent."""
