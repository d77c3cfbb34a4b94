"""Captured graphs: a list of entries that is replayed as one operation.

As in CUDA: a replay follows its stream's earlier work and earlier replays of the same graph, on any stream. Its entries
run in order. What the host did around the capture is not part of a replay: a wait issued there orders nothing later.
An entry may be an *external record*: it records the graph's event anew in every replay, after the entries before it and
before those after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from hicache_obs.errors import StreamError
from hicache_obs.records import Work
from hicache_obs.streams import protocol

Entry = Callable[[], None] | None
"""A function, or ``None`` for an external record."""


class EntryList:
    """A graph of a device that has none of its own: the entries themselves.

    Attributes:
        number: Names it in records.
        entries: What it replays.
        events: One per external record, in order.
        last: Recorded after its newest replay.
        last_stream: That ran it, ``None`` before the first.
    """

    def __init__(self, number: int, entries: Sequence[Entry], new_event: Callable[[], protocol.Event]) -> None:
        self.number: Final = number
        self.entries: Final = checked(entries)
        self.events: Final = tuple(new_event() for entry in entries if entry is None)
        self.last: Final = new_event()
        self.last_stream: protocol.Stream | None = None


def checked(entries: Sequence[Entry]) -> tuple[Entry, ...]:
    """``entries``; StreamError unless one of them is a function."""
    if not any(entry is not None for entry in entries):
        raise StreamError(f"capture: {len(entries)} entries and no function among them; a graph needs at least one")
    return tuple(entries)


def matched(entries: Sequence[Entry], nodes: Sequence[Work | None]) -> None:
    """StreamError unless there is one node per entry, ``None`` for each external record and for nothing else."""
    if [entry is None for entry in entries] != [node is None for node in nodes]:
        raise StreamError(
            f"replay: nodes are {['record' if node is None else node.site for node in nodes]}; expected one per entry, "
            f"None for each external record: {['record' if entry is None else 'work' for entry in entries]}"
        )


def replay_entries(
    device: protocol.Device,
    graph: EntryList,
    nodes: Sequence[Work | None],
    probes: tuple[protocol.Probe, protocol.Probe] | None,
) -> None:
    """Launch the entries on the current stream, one after the other."""
    matched(graph.entries, nodes)
    stream = device.current_stream()
    if graph.last_stream is not None and graph.last_stream.stream_id != stream.stream_id:
        stream.wait_event(graph.last)
    events = iter(graph.events)
    works = [index for index, node in enumerate(nodes) if node is not None]
    for index, (entry, node) in enumerate(zip(graph.entries, nodes, strict=True)):
        if entry is None or node is None:
            next(events).record(stream)
        else:
            device.launch(entry, node, probe=probe_of(index, works, probes))
    graph.last.record(stream)
    graph.last_stream = stream


def probe_of(
    index: int, works: Sequence[int], probes: tuple[protocol.Probe, protocol.Probe] | None
) -> protocol.Probe | None:
    """The probe around entry ``index``: of two, the first is around the first work, the second around the last."""
    if probes is None:
        return None
    if index == works[0]:
        return probes[0]
    return probes[1] if index == works[-1] else None
