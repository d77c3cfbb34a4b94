"""The explicit happens-before graph of a finite trace: every item that runs, and what must be complete before it.

An *item* is an operation, a marker (record, wait, launch of a graph), a host access, a transfer in no stream, or a
point at which a host thread learned something. An edge means "complete before the other begins". The rules are those
of ``order``, spelled out as a graph: slower and larger than clocks, but it can say *what* an access needs. ``witness``
takes schedules from it, ``plan`` times; for the latter every host call is an item too.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from hicache_obs.records import (
    IN_ORDER,
    Access,
    Collective,
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

CALL: Final = "is called"
"""Verb of a host call, an item only of a graph with calls."""
RUN: Final = "runs"
"""Verb of work, the only items that touch memory."""
WAIT: Final = "is passed"
"""Verb of a wait on a stream."""
LAUNCH: Final = "is launched"
"""Verb of the beginning of a graph replay with entries."""
OVER: Final = "is over"
"""Verb of its end."""

Lane = tuple[str, int, int]
"""Where an item runs: items of one lane run one after the other."""
_NOTHING: Final = (0, 0)


@dataclass(frozen=True, slots=True)
class Item:
    """Something that runs.

    Attributes:
        index: Position in the graph; predecessors have lower ones.
        position: Position of its record in the trace.
        op: Operation id of its record.
        step: Operation id of its step: the replay's for an entry of a graph, otherwise ``op``.
        lane: Stream, host thread, entry of a graph, or transfer that runs it.
        actor: Name of that.
        verb: What it does, in the table: ``runs`` for work, ``is recorded``, ``is passed`` ... for a marker.
        follows: Items that must be complete before it begins because of where it runs and who called, ascending.
        awaits: Items that it waits for besides, or learns to be complete, ascending.
        layers: Half-open layer range of ``accesses``.
        accesses: What it touches; empty for a marker.
    """

    index: int
    position: int
    op: OpId
    step: OpId
    lane: Lane
    actor: str
    verb: str
    follows: tuple[int, ...]
    awaits: tuple[int, ...]
    layers: tuple[int, int]
    accesses: tuple[Access, ...]

    @property
    def before(self) -> tuple[int, ...]:
        """Items that must be complete before it begins, ascending; not all, but with theirs."""
        return tuple(sorted({*self.follows, *self.awaits})) if self.awaits else self.follows


@dataclass(slots=True, eq=False)
class _Replay:
    """A replay whose entries are being read."""

    record: GraphReplay
    position: int
    start: int
    entries: list[int]


class Graph:
    """All items of ``records`` in issue order. A true query counts as an edge, as in the trace it was one.

    Args:
        records: A finite trace.
        kinds: Kinds of streams that ``records`` do not define.
        calls: Whether each host call is an item too, and what the thread does next follows it.
    """

    def __init__(
        self, records: Iterable[Record], *, kinds: Mapping[StreamId, StreamKind] | None = None, calls: bool = False
    ) -> None:
        self.items: list[Item] = []
        self._names = Names(stream_kinds=dict(kinds or {}))
        self._calls = calls
        self._position = 0
        self._tail: dict[StreamId, int] = {}
        self._host: dict[ThreadId, int] = {}
        self._events: dict[EventId, int] = {}
        self._graphs: dict[int, int] = {}
        self._ios: dict[int, int] = {}
        self._channels: dict[int, deque[int | None]] = defaultdict(deque)
        self._tensors: dict[int, tuple[int, set[StreamId]]] = {}
        self._returned: dict[int, dict[StreamId, int]] = {}
        self._replay: _Replay | None = None
        for self._position, record in enumerate(records):
            handler = _HANDLERS.get(type(record))
            if calls and not isinstance(record, Define | GraphNode):
                self._call(record)
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
        follows: Iterable[int | None],
        awaits: Iterable[int | None] = (),
        *,
        step: OpId | None = None,
        position: int | None = None,
        layers: tuple[int, int] = _NOTHING,
        accesses: tuple[Access, ...] = (),
    ) -> int:
        index = len(self.items)
        position = self._position if position is None else position
        step = record.op if step is None else step
        known, awaited = _ascending(follows), _ascending(awaits)
        self.items.append(Item(index, position, record.op, step, lane, actor, verb, known, awaited, layers, accesses))
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
        *awaits: int | None,
        position: int | None = None,
        layers: tuple[int, int] = _NOTHING,
        accesses: tuple[Access, ...] = (),
    ) -> int:
        lane, name = ("stream", stream, 0), self._names.stream(stream)
        ready = self._ready(stream, record.thread)
        index = self._add(record, lane, name, verb, ready, awaits, position=position, layers=layers, accesses=accesses)
        self._tail[stream] = index
        return index

    def _on_work(self, record: Kernel | Memcpy | Relocate) -> None:
        self._enqueue(record, record.stream, RUN, layers=record.layers, accesses=record.accesses)

    def _on_event_record(self, record: EventRecord) -> None:
        self._events[record.event] = self._enqueue(record, record.stream, "is recorded")

    def _on_event_wait(self, record: EventWait) -> None:
        self._enqueue(record, record.stream, WAIT, self._events.get(record.event))

    def _on_wait_stream(self, record: WaitStream) -> None:
        marker = self._enqueue(record, record.on, "is recorded")
        self._enqueue(record, record.waiter, WAIT, marker)

    # -- graphs ----------------------------------------------------------------------------------------------

    def _on_graph_replay(self, record: GraphReplay) -> None:
        self._close_replay()
        earlier = self._graphs.get(record.graph)
        if record.nodes:
            start = self._enqueue(record, record.stream, LAUNCH, earlier)
            self._replay = _Replay(record, self._position, start, [])
        else:
            self._graphs[record.graph] = self._enqueue(
                record, record.stream, RUN, earlier, layers=record.layers, accesses=record.accesses
            )

    def _on_graph_node(self, record: GraphNode) -> None:
        replay = self._replay
        if replay is None:
            return  # its replay is not in the trace
        entries, number = replay.entries, replay.record.graph
        if record.after == IN_ORDER:
            before = entries[-1:]
        else:
            before = [entry for index, entry in enumerate(entries) if record.after >> index & 1]
        graph = self._names.graphs.get(number, f"graph {number}")
        index = self._add(
            record,
            ("entry", number, record.index),
            f"{graph} entry {record.index}",
            RUN if record.event is None else "is recorded",
            (replay.start, *before),
            step=replay.record.op,
            layers=record.layers,
            accesses=record.accesses if record.event is None else (),
        )
        if record.event is not None:
            self._events[record.event] = index
        entries.append(index)
        if len(entries) == replay.record.nodes:
            self._close_replay()

    def _close_replay(self) -> None:
        replay, self._replay = self._replay, None
        if replay is not None:
            record = replay.record
            self._graphs[record.graph] = self._enqueue(
                record, record.stream, OVER, replay.start, *replay.entries, position=replay.position
            )

    # -- host ------------------------------------------------------------------------------------------------

    def _call(self, record: Record) -> None:
        lane, name = ("thread", record.thread, 0), self._thread(record.thread)
        self._host[record.thread] = self._add(record, lane, name, CALL, (self._host.get(record.thread),))

    def _learn(self, record: Record, *items: int | None) -> None:
        """The calling thread knows ``items`` to be complete from now on."""
        if any(item is not None for item in items):
            lane, name = ("thread", record.thread, 0), self._thread(record.thread)
            self._host[record.thread] = self._add(
                record, lane, name, "returns", (self._host.get(record.thread),), items
            )

    def _on_collective(self, record: Collective) -> None:
        """Orders nothing; where time matters, its thread goes on at an item of its own."""
        if self._calls:
            lane, name = ("thread", record.thread, 0), self._thread(record.thread)
            self._host[record.thread] = self._add(record, lane, name, "returns", (self._host.get(record.thread),))

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
            record, lane, name, RUN, before, layers=record.layers, accesses=record.accesses
        )

    def _on_io_begin(self, record: IoBegin) -> None:
        name = f"I/O {self._names.ios.get(record.io, str(record.io))}"
        lane = ("io", len(self.items), 0)
        before = (self._host.get(record.thread),)
        self._ios[record.io] = self._add(
            record, lane, name, RUN, before, layers=record.layers, accesses=record.accesses
        )

    def _on_io_end(self, record: IoEnd) -> None:
        self._learn(record, self._ios.get(record.io))

    def _on_post(self, record: ThreadPost) -> None:
        self._channels[record.channel].append(self._host.get(record.thread))

    def _on_receive(self, record: ThreadRecv) -> None:
        if self._channels[record.channel]:
            self._learn(record, self._channels[record.channel].popleft())

    # -- allocator -------------------------------------------------------------------------------------------

    def _on_tensor_alloc(self, record: TensorAlloc) -> None:
        self._tensors[record.tensor] = (record.block, set())
        self._learn(record, *self._returned.get(record.block, {}).values())

    def _on_record_stream(self, record: RecordStream) -> None:
        if record.tensor in self._tensors:
            self._tensors[record.tensor][1].add(record.stream)

    def _on_tensor_free(self, record: TensorFree) -> None:
        block, marked = self._tensors.pop(record.tensor, (None, set()))
        if block is not None:
            returned = self._returned.setdefault(block, {})
            returned.update((stream, self._tail[stream]) for stream in marked if stream in self._tail)

    def _on_define(self, record: Define) -> None:
        self._names.learn(record)


def _ascending(items: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(sorted({item for item in items if item is not None}))


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
    Collective: Graph._on_collective,
}
"""Kinds that are not here order nothing and run nothing."""
