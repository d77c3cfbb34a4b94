"""The explicit happens-before graph of a finite trace: every item that runs, and what must be complete before it.

An *item* is an operation, a marker (record, wait, launch of a graph), a host access, a transfer in no stream, or a
point at which a host thread learned something. An edge means "complete before the other begins". The rules are those
of ``order``, spelled out as a graph: slower and larger than clocks, but it can say *what* an access needs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache_obs.records import (
    IN_ORDER,
    Access,
    Define,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    Kernel,
    Memcpy,
    OpId,
    Record,
    RecordStream,
    Relocate,
    StreamId,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    WaitStream,
)
from hicache_obs.trace import Names

Lane = tuple[str, int, int]
"""Where an item runs: items of one lane run one after the other."""
_NOTHING: Final = (0, 0)


@dataclass(frozen=True, slots=True)
class Item:
    """Something that runs.

    Attributes:
        index: Position in the graph; predecessors have lower ones.
        op: Operation id of its record.
        step: Operation id of its step: the replay's for an entry of a graph, otherwise ``op``.
        lane: Stream, host thread, entry of a graph, or transfer that runs it.
        actor: Name of that.
        verb: What it does, in the table: ``runs`` for work, ``is recorded``, ``is passed`` ... for a marker.
        before: Items that must be complete before it begins, ascending; not all, but with theirs.
        layers: Half-open layer range of ``accesses``.
        accesses: What it touches; empty for a marker.
    """

    index: int
    op: OpId
    step: OpId
    lane: Lane
    actor: str
    verb: str
    before: tuple[int, ...]
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


class Graph:
    """All items of ``records`` in issue order. A true query counts as an edge, as in the trace it was one."""

    def __init__(self, records: Iterable[Record]) -> None:
        self.items: list[Item] = []
        self._names = Names()
        self._tail: dict[StreamId, int] = {}
        self._host: dict[ThreadId, int] = {}
        self._events: dict[EventId, int] = {}
        self._graphs: dict[int, int] = {}
        self._ios: dict[int, int] = {}
        self._channels: dict[int, deque[int | None]] = defaultdict(deque)
        self._tensors: dict[int, tuple[int, set[StreamId]]] = {}
        self._returned: dict[int, list[int]] = {}
        self._replay: tuple[GraphReplay, list[int]] | None = None
        """A replay whose entries are being read: its launch, then its entries."""
        for record in records:
            handler = _HANDLERS.get(type(record))
            if handler is not None:
                handler(self, record)

    def needs(self, *indices: int) -> set[int]:
        """``indices`` and everything that must be complete before one of them begins."""
        found: set[int] = set()
        todo = list(indices)
        while todo:
            index = todo.pop()
            if index not in found:
                found.add(index)
                todo.extend(self.items[index].before)
        return found

    def of(self, op: OpId) -> Sequence[Item]:
        """Items of an operation that touch memory; all entries' for a graph replay."""
        return [item for item in self.items if item.accesses and op in (item.op, item.step)]

    def _add(
        self,
        record: Record,
        lane: Lane,
        actor: str,
        verb: str,
        before: Iterable[int | None],
        *,
        step: OpId | None = None,
        layers: tuple[int, int] = _NOTHING,
        accesses: tuple[Access, ...] = (),
    ) -> int:
        index = len(self.items)
        known = tuple(sorted({item for item in before if item is not None}))
        step = record.op if step is None else step
        self.items.append(Item(index, record.op, step, lane, actor, verb, known, layers, accesses))
        return index

    # -- streams ---------------------------------------------------------------------------------------------

    def _ready(self, stream: StreamId, thread: ThreadId) -> set[int | None]:
        """What something put on ``stream`` by ``thread`` now must follow."""
        before = {self._tail.get(stream), self._host.get(thread)}
        kinds = self._names.stream_kinds
        kind = kinds.get(stream, StreamKind.NONBLOCKING)
        if kind is not StreamKind.NONBLOCKING:
            partner = StreamKind.BLOCKING if kind is StreamKind.LEGACY else StreamKind.LEGACY
            before |= {self._tail.get(other) for other, other_kind in kinds.items() if other_kind is partner}
        return before

    def _enqueue(
        self,
        record: Record,
        stream: StreamId,
        verb: str,
        *also: int | None,
        layers: tuple[int, int] = _NOTHING,
        accesses: tuple[Access, ...] = (),
    ) -> int:
        before = self._ready(stream, record.thread).union(also)
        name = self._names.stream(stream)
        index = self._add(record, ("stream", stream, 0), name, verb, before, layers=layers, accesses=accesses)
        self._tail[stream] = index
        return index

    def _on_work(self, record: Kernel | Memcpy | Relocate) -> None:
        self._enqueue(record, record.stream, "runs", layers=record.layers, accesses=record.accesses)

    def _on_event_record(self, record: EventRecord) -> None:
        self._events[record.event] = self._enqueue(record, record.stream, "is recorded")

    def _on_event_wait(self, record: EventWait) -> None:
        self._enqueue(record, record.stream, "is passed", self._events.get(record.event))

    def _on_wait_stream(self, record: WaitStream) -> None:
        marker = self._enqueue(record, record.on, "is recorded")
        self._enqueue(record, record.waiter, "is passed", marker)

    # -- graphs ----------------------------------------------------------------------------------------------

    def _on_graph_replay(self, record: GraphReplay) -> None:
        self._close_replay()
        earlier = self._graphs.get(record.graph)
        if record.nodes:
            self._replay = record, [self._enqueue(record, record.stream, "is launched", earlier)]
        else:
            self._graphs[record.graph] = self._enqueue(
                record, record.stream, "runs", earlier, layers=record.layers, accesses=record.accesses
            )

    def _on_graph_node(self, record: GraphNode) -> None:
        if self._replay is None:
            return  # its replay is not in the trace
        replay, (start, *entries) = self._replay
        if record.after == IN_ORDER:
            before = entries[-1:]
        else:
            before = [entry for index, entry in enumerate(entries) if record.after >> index & 1]
        graph = self._names.graphs.get(replay.graph, f"graph {replay.graph}")
        index = self._add(
            record,
            ("entry", replay.graph, record.index),
            f"{graph} entry {record.index}",
            "runs" if record.event is None else "is recorded",
            (start, *before),
            step=replay.op,
            layers=record.layers,
            accesses=record.accesses if record.event is None else (),
        )
        if record.event is not None:
            self._events[record.event] = index
        self._replay[1].append(index)
        if len(entries) + 1 == replay.nodes:
            self._close_replay()

    def _close_replay(self) -> None:
        if self._replay is not None:
            replay, items = self._replay
            self._replay = None
            self._graphs[replay.graph] = self._enqueue(replay, replay.stream, "is over", *items)

    # -- host ------------------------------------------------------------------------------------------------

    def _learn(self, record: Record, *items: int | None) -> None:
        """The calling thread knows ``items`` to be complete from now on."""
        if any(item is not None for item in items):
            lane, name = ("thread", record.thread, 0), self._thread(record.thread)
            before = (self._host.get(record.thread), *items)
            self._host[record.thread] = self._add(record, lane, name, "returns", before)

    def _thread(self, thread: ThreadId) -> str:
        name = self._names.threads.get(thread)
        return f"thread {thread}" if name is None else f"thread {name}"

    def _on_event_sync(self, record: EventSync) -> None:
        self._learn(record, self._events.get(record.event))

    def _on_query(self, record: EventQuery) -> None:
        if record.result:
            self._learn(record, self._events.get(record.event))

    def _on_host_sync(self, record: HostSync) -> None:
        if record.stream is None:
            self._learn(record, *self._tail.values())
        else:
            self._learn(record, self._tail.get(record.stream))

    def _on_host_access(self, record: HostAccess) -> None:
        lane, name = ("thread", record.thread, 0), self._thread(record.thread)
        before = (self._host.get(record.thread),)
        self._host[record.thread] = self._add(
            record, lane, name, "runs", before, layers=record.layers, accesses=record.accesses
        )

    def _on_io_begin(self, record: IoBegin) -> None:
        name = f"I/O {self._names.ios.get(record.io, str(record.io))}"
        lane = ("io", len(self.items), 0)
        before = (self._host.get(record.thread),)
        self._ios[record.io] = self._add(
            record, lane, name, "runs", before, layers=record.layers, accesses=record.accesses
        )

    def _on_io_end(self, record: IoEnd) -> None:
        self._learn(record, self._ios.pop(record.io, None))

    def _on_post(self, record: ThreadPost) -> None:
        self._channels[record.channel].append(self._host.get(record.thread))

    def _on_receive(self, record: ThreadRecv) -> None:
        if self._channels[record.channel]:
            self._learn(record, self._channels[record.channel].popleft())

    # -- allocator -------------------------------------------------------------------------------------------

    def _on_tensor_alloc(self, record: TensorAlloc) -> None:
        self._tensors[record.tensor] = (record.block, set())
        self._learn(record, *self._returned.pop(record.block, ()))

    def _on_record_stream(self, record: RecordStream) -> None:
        if record.tensor in self._tensors:
            self._tensors[record.tensor][1].add(record.stream)

    def _on_tensor_free(self, record: TensorFree) -> None:
        block, marked = self._tensors.pop(record.tensor, (None, set()))
        if block is not None:
            self._returned[block] = [self._tail[stream] for stream in marked if stream in self._tail]

    def _on_define(self, record: Define) -> None:
        self._names.learn(record)


_HANDLERS: Final[dict[type[Record], Callable[[Graph, Any], None]]] = {
    Define: Graph._on_define,
    Kernel: Graph._on_work,
    Memcpy: Graph._on_work,
    Relocate: Graph._on_work,
    EventRecord: Graph._on_event_record,
    EventWait: Graph._on_event_wait,
    WaitStream: Graph._on_wait_stream,
    GraphReplay: Graph._on_graph_replay,
    GraphNode: Graph._on_graph_node,
    EventSync: Graph._on_event_sync,
    EventQuery: Graph._on_query,
    HostSync: Graph._on_host_sync,
    HostAccess: Graph._on_host_access,
    IoBegin: Graph._on_io_begin,
    IoEnd: Graph._on_io_end,
    ThreadPost: Graph._on_post,
    ThreadRecv: Graph._on_receive,
    TensorAlloc: Graph._on_tensor_alloc,
    RecordStream: Graph._on_record_stream,
    TensorFree: Graph._on_tensor_free,
}
"""Kinds that are not here order nothing and run nothing."""
