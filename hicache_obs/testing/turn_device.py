"""A recorded device whose every call is a place where the host threads may take turns.

The turn comes before the call is recorded, so that records are in the order in which the device sees the calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np

from hicache_obs.errors import StreamError
from hicache_obs.recorder.recorded import RecordedDevice, RecordedEvent, RecordedGraph, RecordedStream, Recorder
from hicache_obs.records import Purpose, StreamId, Work
from hicache_obs.streams import protocol
from hicache_obs.testing.turns import Turns


class TurnEvent(RecordedEvent):
    """An event of a ``TurnDevice``."""

    __slots__ = ("_turns",)

    def __init__(self, device: TurnDevice, bare: protocol.Event) -> None:
        super().__init__(device, bare, device.recorder.new_event())
        self._turns = device.turns

    def record(self, stream: protocol.Stream | None = None) -> None:
        """See ``protocol.Event.record``."""
        self._turns.call("record")
        super().record(stream)

    def query(self) -> bool:
        """See ``protocol.Event.query``."""
        self._turns.call("query")
        return super().query()

    def synchronize(self) -> None:
        """See ``protocol.Event.synchronize``."""
        self._turns.call("synchronize")
        super().synchronize()

    def elapsed_time(self, end: protocol.Event) -> float:
        """See ``protocol.Event.elapsed_time``."""
        self._turns.call("elapsed_time")
        return super().elapsed_time(end)


class TurnStream(RecordedStream):
    """A stream of a ``TurnDevice``."""

    __slots__ = ("_turns",)

    def __init__(self, device: TurnDevice, bare: protocol.Stream) -> None:
        super().__init__(device, bare)
        self._turns = device.turns

    def wait_stream(
        self,
        stream: protocol.Stream,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``protocol.Stream.wait_stream``."""
        self._turns.call("wait_stream")
        super().wait_stream(stream, purpose=purpose, probe=probe)

    def synchronize(self) -> None:
        """See ``protocol.Stream.synchronize``."""
        self._turns.call("synchronize")
        super().synchronize()

    def query(self) -> bool:
        """See ``protocol.Stream.query``."""
        self._turns.call("query")
        return super().query()


class TurnDevice(RecordedDevice):
    """A device whose use is recorded, by threads that take turns."""

    def __init__(self, device: protocol.Device, recorder: Recorder, turns: Turns) -> None:
        super().__init__(device, recorder)
        self.turns: Final = turns
        self._known: dict[StreamId, TurnStream] = {}

    def Event(self, enable_timing: bool = False) -> TurnEvent:  # noqa: N802 torch's name
        """See ``protocol.Device.Event``."""
        return TurnEvent(self, self.bare.Event(enable_timing))

    def synchronize(self) -> None:
        """See ``protocol.Device.synchronize``."""
        self.turns.call("synchronize")
        super().synchronize()

    def launch(self, fn: Callable[[], None], work: Work, *, probe: protocol.Probe | None = None) -> None:
        """See ``protocol.Device.launch``. StreamError if ``work`` names pages by something else than an int64 array."""
        _check_ids(work)
        self.turns.call(f"launch of {work.site!r}")
        super().launch(fn, work, probe=probe)

    def capture(self, number: int, entries: Sequence[Callable[[], None] | None]) -> RecordedGraph:
        """See ``protocol.Device.capture``."""
        bare = self.bare.capture(number, entries)
        return RecordedGraph(bare, [TurnEvent(self, event) for event in bare.events])

    def replay(
        self,
        graph: protocol.Graph,
        work: Work,
        nodes: Sequence[Work | None],
        *,
        probes: tuple[protocol.Probe, protocol.Probe] | None = None,
    ) -> None:
        """See ``protocol.Device.replay``. StreamError as in ``launch``."""
        for node in nodes:
            if node is not None:
                _check_ids(node)
        self.turns.call(f"replay of graph {graph.number}")
        super().replay(graph, work, nodes, probes=probes)

    def wait_event(
        self,
        stream: protocol.Stream,
        event: protocol.Event,
        *,
        purpose: Purpose = Purpose.PLAIN,
        probe: protocol.Probe | None = None,
    ) -> None:
        """See ``RecordedDevice.wait_event``."""
        self.turns.call("wait_event")
        super().wait_event(stream, event, purpose=purpose, probe=probe)

    def _wrap_stream(self, bare: protocol.Stream) -> TurnStream:
        if bare.stream_id not in self._known:
            self._known[bare.stream_id] = TurnStream(self, bare)
        return self._known[bare.stream_id]


def _check_ids(work: Work) -> None:
    for access in work.accesses:
        ids: object = access.ids
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int64 and ids.ndim == 1):
            raise StreamError(
                f"launch of {work.site!r}: accesses name {ids!r}; expected an (n,) int64 array, as page_ids makes"
            )
