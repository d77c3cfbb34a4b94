"""An independent judge for small traces: an explicit graph of everything that must happen before, and search.

It shares no code with the analyzer: no clocks, no groups, no page tables. Nodes are items (operations, markers,
entries of graph replays, host accesses, transfers in no stream); an edge means "complete before the other begins".
A host thread carries the set of items it knows to be complete.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from hicache_obs.records import (
    IN_ORDER,
    Access,
    Define,
    DefineSpace,
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
    Mode,
    PageAlloc,
    PageFree,
    Record,
    RecordStream,
    Relocate,
    Space,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadPost,
    ThreadRecv,
    WaitStream,
)


@dataclass(slots=True)
class _Item:
    """Something that runs: the step it belongs to, and what it touches (nothing for a marker)."""

    step: int
    before: set[int]
    layers: tuple[int, int] = (0, 0)
    accesses: tuple[Access, ...] = ()
    told: frozenset[int] = frozenset()
    """Items its thread knew to be complete when it was issued."""
    call: PageAlloc | PageFree | None = None
    moves: bool = False


@dataclass(slots=True)
class _Machine:
    """Streams, events, threads and allocator blocks while a trace is read."""

    polled: bool
    items: list[_Item] = field(default_factory=list)
    tail: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # stream -> what its next item follows
    kinds: dict[int, StreamKind] = field(default_factory=dict)
    known: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))  # thread -> complete items
    events: dict[int, int] = field(default_factory=dict)
    graphs: dict[int, int] = field(default_factory=dict)
    channels: dict[int, deque[set[int]]] = field(default_factory=lambda: defaultdict(deque))
    ios: dict[int, int] = field(default_factory=dict)
    tensors: dict[int, tuple[int, set[int]]] = field(default_factory=dict)  # tensor -> block, marked streams
    returned: dict[int, set[int]] = field(default_factory=dict)
    replay: tuple[GraphReplay, set[int], list[int]] | None = None

    told: frozenset[int] = frozenset()

    def add(self, step: int, before: Iterable[int], layers: tuple[int, int], accesses: tuple[Access, ...]) -> int:
        self.items.append(_Item(step, set(before), layers, accesses, self.told))
        return len(self.items) - 1

    def ready(self, stream: int, thread: int) -> set[int]:
        """What something put on ``stream`` by ``thread`` now must follow."""
        before = self.tail[stream] | self.known[thread]
        kind = self.kinds.get(stream, StreamKind.NONBLOCKING)
        if kind is not StreamKind.NONBLOCKING:
            partner = StreamKind.BLOCKING if kind is StreamKind.LEGACY else StreamKind.LEGACY
            for other, other_kind in self.kinds.items():
                if other_kind is partner:
                    before |= self.tail[other]
        return before

    def enqueue(self, r: Record, stream: int, layers: tuple[int, int] = (0, 0), accesses: Sequence[Access] = ()) -> int:
        item = self.add(r.op, self.ready(stream, r.thread), layers, tuple(accesses))
        self.tail[stream] = {item}
        return item

    def wait(self, r: Record, stream: int, item: int | None) -> None:
        self.tail[stream] = self.ready(stream, r.thread) | (set() if item is None else {item})

    def node(self, r: GraphNode) -> None:
        assert self.replay is not None
        replay, start, nodes = self.replay
        if r.after == IN_ORDER:
            before = {nodes[-1]} if nodes else set()
        else:
            before = {nodes[index] for index in range(r.index) if r.after >> index & 1}
        nodes.append(self.add(replay.op, start | before, r.layers, () if r.event is not None else r.accesses))
        if r.event is not None:
            self.events[r.event] = nodes[-1]
        if len(nodes) == replay.nodes:
            end = self.add(replay.op, {*start, *nodes}, (0, 0), ())
            self.tail[replay.stream] = {end}
            self.graphs[replay.graph] = end
            self.replay = None


def races(records: Sequence[Record], *, polled: bool) -> set[tuple[int, int]]:
    """Pairs of steps with conflicting accesses that nothing orders. ``polled``: a true query counts as an edge."""
    machine = _Machine(polled)
    for record in records:
        _step(machine, record)
    return _unordered(machine.items)


def misuses(records: Sequence[Record]) -> set[tuple[int, int]]:
    """Allocator calls and steps that use their pages after a free, or read them before anything wrote them.

    Each page is followed on its own through the whole trace (``hicache_obs.analyzer.ownership`` states the rules).
    """
    machine = _Machine(polled=True)
    for record in records:
        _step(machine, record)
    items, past = machine.items, _ancestors(machine.items)
    pages = {(a.space, a.pool, page) for item in items for a in _touched(item) for page in a.ids.tolist()}
    return {pair for page in pages for pair in _page_misuses(items, past, page)}


def _touched(item: _Item) -> tuple[Access, ...]:
    return item.accesses if item.call is None else (item.call.access,)


def _page_misuses(
    items: Sequence[_Item], past: Sequence[set[int]], page: tuple[Space, int, int]
) -> Iterator[tuple[int, int]]:
    state, owner, change, written = "unknown", None, -1, False
    for index, item in enumerate(items):
        modes = {a.mode for a in _touched(item) if (a.space, a.pool) == page[:2] and page[2] in a.ids.tolist()}
        if not modes:
            continue
        if isinstance(item.call, PageAlloc):
            new = state in ("freed", "spent") or (state == "unknown" and not written)
            state, owner = "fresh" if new or state == "fresh" else "held", None if new else item.call.owner
            change = index
            continue
        if isinstance(item.call, PageFree):
            state, owner = "freed" if owner in (None, item.call.owner) else "unknown", None
            change = index
            continue
        aware = change in item.told or any(change in past[known] for known in item.told)
        if Mode.WRITE in modes:
            written = True
            if state == "fresh" or (item.moves and state != "unknown"):
                state = "held"
        unwritten = state == "fresh" and not item.moves
        if aware and (unwritten or state == "freed"):
            yield items[change].step, item.step
            state = "held" if unwritten else "spent"


def _step(m: _Machine, r: Record) -> None:
    m.told = frozenset(m.known[r.thread])
    if isinstance(r, Define) and r.space is DefineSpace.STREAM:
        m.kinds[r.id] = StreamKind(r.value)
    elif isinstance(r, Kernel | Memcpy | Relocate):
        m.items[m.enqueue(r, r.stream, r.layers, r.accesses)].moves = isinstance(r, Relocate)
    elif isinstance(r, PageAlloc | PageFree):
        call = m.add(r.op, m.known[r.thread], (0, 0), ())
        m.items[call].call = r
        m.known[r.thread].add(call)
    elif isinstance(r, EventRecord):
        m.events[r.event] = m.enqueue(r, r.stream)
    elif isinstance(r, EventWait):
        m.wait(r, r.stream, m.events.get(r.event))
    elif isinstance(r, WaitStream):
        m.wait(r, r.waiter, m.enqueue(r, r.on))
    elif isinstance(r, EventSync) or (isinstance(r, EventQuery) and r.result and m.polled):
        if r.event in m.events:
            m.known[r.thread].add(m.events[r.event])
    elif isinstance(r, HostSync):
        for stream in [r.stream] if r.stream is not None else list(m.tail):
            m.known[r.thread] |= m.tail[stream]
    elif isinstance(r, HostAccess):
        m.known[r.thread].add(m.add(r.op, m.known[r.thread], r.layers, r.accesses))
    elif isinstance(r, GraphReplay):
        before = m.ready(r.stream, r.thread) | ({m.graphs[r.graph]} if r.graph in m.graphs else set())
        if r.nodes:
            m.replay = (r, before, [])
        else:
            m.graphs[r.graph] = m.add(r.op, before, r.layers, r.accesses)
            m.tail[r.stream] = {m.graphs[r.graph]}
    elif isinstance(r, GraphNode):
        m.node(r)
    elif isinstance(r, IoBegin):
        m.ios[r.io] = m.add(r.op, m.known[r.thread], r.layers, r.accesses)
    elif isinstance(r, IoEnd):
        m.known[r.thread].add(m.ios[r.io])
    elif isinstance(r, ThreadPost):
        m.channels[r.channel].append(set(m.known[r.thread]))
    elif isinstance(r, ThreadRecv):
        m.known[r.thread] |= m.channels[r.channel].popleft()
    elif isinstance(r, TensorAlloc):
        m.tensors[r.tensor] = (r.block, set())
        m.known[r.thread] |= m.returned.get(r.block, set())
    elif isinstance(r, RecordStream):
        if r.tensor in m.tensors:
            m.tensors[r.tensor][1].add(r.stream)
    elif isinstance(r, TensorFree):
        block, marked = m.tensors.pop(r.tensor)
        m.returned.setdefault(block, set()).update(*(m.tail[stream] for stream in marked))


def _ancestors(items: Sequence[_Item]) -> list[set[int]]:
    """Per item, all that must be complete before it."""
    ancestors: list[set[int]] = []
    for item in items:
        ancestors.append(item.before.union(*(ancestors[index] for index in item.before)))
    return ancestors


def _unordered(items: Sequence[_Item]) -> set[tuple[int, int]]:
    ancestors = _ancestors(items)
    return {
        (a.step, b.step)
        for late, b in enumerate(items)
        for early, a in enumerate(items[:late])
        if a.step != b.step and early not in ancestors[late] and _conflict(a, b)
    }


def _conflict(a: _Item, b: _Item) -> bool:
    if not (a.layers[0] < b.layers[1] and b.layers[0] < a.layers[1]):
        return False
    return any(
        x.space is y.space
        and x.pool == y.pool
        and (x.mode is Mode.WRITE or y.mode is Mode.WRITE)
        and set(x.ids.tolist()) & set(y.ids.tolist())
        for x in a.accesses
        for y in b.accesses
    )
