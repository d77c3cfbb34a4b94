"""A finished trace: its records in issue order, the names in them, and where they came from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hicache_obs.records import (
    AnyRecord,
    Define,
    DefineSpace,
    EventId,
    OpId,
    StreamId,
    StreamKind,
    ThreadId,
)


@dataclass(slots=True)
class Names:
    """What the ``Define`` records of a trace gave names to. Later definitions of an id replace earlier ones.

    Attributes:
        stream_kinds: CUDA kind of each named stream.
        pool_layers: Layer count of each named device pool, 0 if it was not stated.
        engine: Name and version of the engine, empty if it was not stated.
        status: Newest number of everything the recording side said about itself.
    """

    streams: dict[StreamId, str] = field(default_factory=dict)
    stream_kinds: dict[StreamId, StreamKind] = field(default_factory=dict)
    events: dict[EventId, str] = field(default_factory=dict)
    threads: dict[ThreadId, str] = field(default_factory=dict)
    sites: dict[int, str] = field(default_factory=dict)
    pools: dict[int, str] = field(default_factory=dict)
    pool_layers: dict[int, int] = field(default_factory=dict)
    host_pools: dict[int, str] = field(default_factory=dict)
    buffers: dict[int, str] = field(default_factory=dict)
    requests: dict[int, str] = field(default_factory=dict)
    channels: dict[int, str] = field(default_factory=dict)
    graphs: dict[int, str] = field(default_factory=dict)
    ios: dict[int, str] = field(default_factory=dict)
    tensors: dict[int, str] = field(default_factory=dict)
    groups: dict[int, str] = field(default_factory=dict)
    status: dict[str, int] = field(default_factory=dict)
    engine: str = ""

    def learn(self, define: Define) -> None:
        """Take over one definition."""
        key, text = define.id, define.text
        if define.space is DefineSpace.STREAM:
            self.streams[StreamId(key)] = text
            self.stream_kinds[StreamId(key)] = StreamKind(define.value)
        elif define.space is DefineSpace.EVENT:
            self.events[EventId(key)] = text
        elif define.space is DefineSpace.THREAD:
            self.threads[ThreadId(key)] = text
        elif define.space is DefineSpace.SITE:
            self.sites[key] = text
        elif define.space is DefineSpace.POOL:
            self.pools[key] = text
            self.pool_layers[key] = define.value
        elif define.space is DefineSpace.HOST_POOL:
            self.host_pools[key] = text
        elif define.space is DefineSpace.BUFFER:
            self.buffers[key] = text
        elif define.space is DefineSpace.REQUEST:
            self.requests[key] = text
        elif define.space is DefineSpace.CHANNEL:
            self.channels[key] = text
        elif define.space is DefineSpace.GRAPH:
            self.graphs[key] = text
        elif define.space is DefineSpace.IO:
            self.ios[key] = text
        elif define.space is DefineSpace.TENSOR:
            self.tensors[key] = text
        elif define.space is DefineSpace.GROUP:
            self.groups[key] = text
        elif define.space is DefineSpace.ENGINE:
            self.engine = text
        elif define.space is DefineSpace.STATUS:
            self.status[text] = define.value

    def stream(self, stream: StreamId) -> str:
        """Name of ``stream``, or its number in words."""
        return self.streams.get(stream, f"stream {stream}")

    def thread(self, thread: ThreadId) -> str:
        """Name of ``thread``, or its number in words."""
        return self.threads.get(thread, f"thread {thread}")

    def site(self, site: int) -> str:
        """Name of ``site``, or its number in words."""
        return self.sites.get(site, f"site {site}")

    def buffer(self, buffer: int) -> str:
        """Name of ``buffer``, or its number in words."""
        return self.buffers.get(buffer, f"buffer {buffer}")


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Records of one process in issue order; iterate over it, as often as needed.

    Attributes:
        source: Where it was read from, for messages.
        records: All records, ``Define`` records included.
        names: The names they define.
        labels: Names of single operations in the source, such as the step ids of a scenario.
        planned_ns: Durations a scenario states. They were never measured; only a simulation may use them.
        planned_end_ns: Host clock at the end of its last call, likewise; ``None`` if it is not stated.
        notes: What a reader had to leave out, in words for the user. Empty when the source is whole.
        ranks: Those of a scenario's steps, ascending; empty for a recording.
    """

    source: str
    records: Sequence[AnyRecord]
    names: Names
    labels: Mapping[OpId, str] = field(default_factory=dict)
    planned_ns: Mapping[OpId, int] = field(default_factory=dict)
    planned_end_ns: int | None = None
    notes: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()

    def __iter__(self) -> Iterator[AnyRecord]:
        return iter(self.records)

    def __len__(self) -> int:
        return len(self.records)

    def label(self, op: OpId) -> str:
        """What the source calls operation ``op``; its number in words if it has no name there."""
        return self.labels.get(op, f"op {op}")


def make_trace(
    source: str,
    records: Sequence[AnyRecord],
    *,
    labels: Mapping[OpId, str] | None = None,
    planned_ns: Mapping[OpId, int] | None = None,
    planned_end_ns: int | None = None,
    notes: tuple[str, ...] = (),
    ranks: Iterable[int] = (),
) -> Trace:
    """A ``Trace`` of ``records``, with the names they define."""
    names = Names()
    for record in records:
        if isinstance(record, Define):
            names.learn(record)
    return Trace(source, records, names, labels or {}, planned_ns or {}, planned_end_ns, notes, tuple(sorted(ranks)))
