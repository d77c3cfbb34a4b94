"""Executes a trace on paper: when every step would have run, with the durations the trace states.

The rules are those of ``tests/cases/README.md``, section Time. A host thread advances by the host time of each call
and by blocking. A device operation starts at the latest of the end of its call, the end of earlier work on its stream
and its waits. I/O starts at its begin. Nothing here is a measurement: the numbers rank stalls.

Everything is a graph of nodes that start when their predecessors have ended, so one pass in topological order gives
all times. What can never run, such as a collective whose peer entered another one, ends at ``NEVER``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from hicache_obs.records import (
    IN_ORDER,
    AnyRecord,
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
    Lost,
    Memcpy,
    OpId,
    RecordStream,
    Relocate,
    StreamId,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
)
from hicache_obs.trace import Trace

_Key = TypeVar("_Key")
NEVER: Final = 1 << 62
"""A time that does not come."""
DEFAULT_HOST_NS: Final = 2_000
DEFAULT_DURATION_NS: Final = 10_000

DeviceRecord = Kernel | Memcpy | Relocate | GraphReplay
WaitRecord = EventWait | WaitStream | EventSync | HostSync
BLOCKING: Final = (EventSync, HostSync, EventQuery, ThreadRecv, IoEnd, Collective, TensorAlloc)
"""Calls that only observe or block: a thread has got on when it makes another one."""


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One record and the time it takes.

    Attributes:
        record: Any record but names, times and losses.
        host_ns: Host time of the call.
        duration_ns: Time on the device, in I/O, or of the CPU's own access.
    """

    record: AnyRecord
    host_ns: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class Span:
    """From start to end, nanoseconds since the first call; ``NEVER`` where that does not come."""

    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class PlannedWait:
    """What one wait cost its waiter.

    Attributes:
        record: The wait.
        stream: Stream that waits, ``None`` if the calling host thread does.
        free_ns: Host thread: the call. Stream: when it was otherwise free and its next operation issued. Waits
            before this one on the same stream count as work, so the waits of one operation share its delay.
        awaited_ns: When the awaited record completes.
        then: Next operation of the stream; next call of the thread that does more than wait; ``None`` if there is none.
        node: The awaited record's node in the plan, -1 if the event was never recorded.
    """

    record: WaitRecord
    stream: StreamId | None
    free_ns: int
    awaited_ns: int
    then: OpId | None
    node: int

    @property
    def blocked_ns(self) -> int:
        """Time the waiter stood still; 0 for a stream that has nothing to run after the wait."""
        if self.stream is not None and self.then is None:
            return 0
        return max(0, self.awaited_ns - self.free_ns)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """When everything runs.

    Attributes:
        calls: Host span of every call, blocking included.
        runs: Span of every device operation, I/O transfer and CPU access.
        waits: In trace order.
    """

    calls: Mapping[OpId, Span]
    runs: Mapping[OpId, Span]
    waits: tuple[PlannedWait, ...]
    _graph: _Graph
    _run_nodes: Mapping[OpId, int]

    def covered(self, wait: PlannedWait) -> set[OpId]:
        """Operations that are over once the record awaited by ``wait`` is complete."""
        return self._graph.behind(wait.node) if wait.node >= 0 else set()

    def ordered_before(self, op: OpId) -> set[OpId]:
        """Operations that are over before operation ``op`` can start."""
        node = self._run_nodes.get(op)
        return set() if node is None else self._graph.behind(node) - {op}


def plan(trace: Trace) -> Plan:
    """Times of all steps of ``trace``; durations it does not state are 10 µs."""
    return plan_steps(steps_of(trace), trace.names.stream_kinds)


def steps_of(trace: Trace) -> list[Step]:
    """The steps of a trace; a call lasts until the next one in the file, as scenario readers count host time."""
    records = [record for record in trace if not isinstance(record, Define | Times | Lost)]
    steps: list[Step] = []
    following: int | None = None
    for record in reversed(records):
        duration = trace.planned_ns.get(record.op, DEFAULT_DURATION_NS)
        if isinstance(record, GraphNode):
            steps.append(Step(record, 0, duration))
            continue
        host_ns = DEFAULT_HOST_NS if following is None else max(0, following - record.host_ns)
        following = record.host_ns
        steps.append(Step(record, host_ns, duration))
    steps.reverse()
    return steps


def plan_steps(steps: Sequence[Step], kinds: Mapping[StreamId, StreamKind]) -> Plan:
    """Times of ``steps``; ``kinds`` names the streams that are not plain non-blocking ones."""
    return _Planner(kinds).run(steps)


class _Graph:
    """Nodes that start when all their predecessors have ended."""

    def __init__(self) -> None:
        self.before: list[list[int]] = []
        self.cost: list[int] = []
        self.op: list[OpId | None] = []
        self.start: list[int] = []
        self.end: list[int] = []

    def add(self, before: Iterable[int], cost: int = 0, op: OpId | None = None) -> int:
        self.before.append(list(before))
        self.cost.append(cost)
        self.op.append(op)
        return len(self.before) - 1

    def solve(self) -> None:
        """Start and end of every node; those in or behind a cycle never run."""
        count = len(self.before)
        self.start, self.end = [0] * count, [NEVER] * count
        missing = [len(before) for before in self.before]
        after: list[list[int]] = [[] for _ in range(count)]
        for node, befores in enumerate(self.before):
            for before in befores:
                after[before].append(node)
        ready = deque(node for node in range(count) if not missing[node])
        for node in ready:
            self.start[node] = 0
        done = 0
        while ready:
            node = ready.popleft()
            done += 1
            self.end[node] = min(NEVER, self.start[node] + self.cost[node])
            for other in after[node]:
                self.start[other] = max(self.start[other], self.end[node])
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        if done < count:
            for node in range(count):
                if missing[node]:
                    self.start[node] = NEVER

    def behind(self, node: int) -> set[OpId]:
        """Operations at ``node`` and before it."""
        todo, seen, found = [node], {node}, set()
        while todo:
            at = todo.pop()
            op = self.op[at]
            if op is not None:
                found.add(op)
            new = [before for before in self.before[at] if before not in seen]
            seen.update(new)
            todo.extend(new)
        return found


@dataclass(slots=True, eq=False)
class _OpenWait:
    """A wait whose cost shows once the graph is solved and the waiter's next operation is known."""

    record: WaitRecord
    stream: StreamId | None
    free: list[int]
    free_at_start: bool
    node: int
    then: OpId | None = None


@dataclass(slots=True, eq=False)
class _Tensor:
    block: int
    marked: set[StreamId] = field(default_factory=set)


class _Planner:
    """Turns steps into the graph, in trace order."""

    def __init__(self, kinds: Mapping[StreamId, StreamKind]) -> None:
        self._kinds = kinds
        self._graph = _Graph()
        self._thread: dict[ThreadId, int] = {}
        self._last: dict[StreamId, int] = {}
        self._events: dict[EventId, int] = {}
        self._graphs: dict[int, int] = {}
        self._entries: dict[int, list[GraphNode]] = {}
        self._posts: dict[int, deque[int]] = {}
        self._ios: dict[int, int] = {}
        self._tensors: dict[int, _Tensor] = {}
        self._returned: dict[int, list[int]] = {}
        self._entered: dict[int, dict[int, list[tuple[int, int, int]]]] = {}
        self._calls: dict[OpId, tuple[int, int]] = {}
        self._runs: dict[OpId, tuple[int, int]] = {}
        self._waits: list[_OpenWait] = []
        self._stream_waits: dict[StreamId, list[_OpenWait]] = {}
        self._thread_waits: dict[ThreadId, list[_OpenWait]] = {}

    def run(self, steps: Sequence[Step]) -> Plan:
        """Plan ``steps``; once per planner."""
        entries: list[GraphNode] = []
        for step in reversed(steps):  # entries come after their replay
            if isinstance(step.record, GraphNode):
                entries.append(step.record)
            elif isinstance(step.record, GraphReplay):
                self._entries[id(step.record)] = entries[::-1]
                entries = []
        for step in steps:
            if not isinstance(step.record, GraphNode):
                self._step(step)
        self._meet()
        graph = self._graph
        graph.solve()
        calls = {op: Span(graph.start[call], graph.end[back]) for op, (call, back) in self._calls.items()}
        runs = {op: Span(graph.start[first], graph.end[last]) for op, (first, last) in self._runs.items()}
        waits = tuple(self._close(wait) for wait in self._waits)
        return Plan(calls, runs, waits, graph, {op: first for op, (first, _) in self._runs.items()})

    def _close(self, wait: _OpenWait) -> PlannedWait:
        ends = self._graph.start if wait.free_at_start else self._graph.end
        free = max((ends[node] for node in wait.free), default=0)
        awaited = self._graph.end[wait.node] if wait.node >= 0 else 0
        return PlannedWait(wait.record, wait.stream, free, awaited, wait.then, wait.node)

    # -- host ------------------------------------------------------------------------------------------------

    def _step(self, step: Step) -> None:
        record, thread = step.record, step.record.thread
        call = self._graph.add(self._of(self._thread, thread), step.host_ns)
        if not isinstance(record, BLOCKING):
            for wait in self._thread_waits.pop(thread, ()):
                wait.then = record.op
        back = self._act(step, call)
        self._thread[thread] = back
        if record.op >= 0:
            self._calls[record.op] = (call, back)

    def _act(self, step: Step, call: int) -> int:
        """Do what the step says; returns the node at which the host goes on."""
        record = step.record
        if isinstance(record, Kernel | Memcpy | Relocate):
            self._work(record.stream, record.op, call, step.duration_ns)
        elif isinstance(record, GraphReplay):
            self._graph_replay(record, call, step, self._entries[id(record)])
        elif isinstance(record, EventRecord):
            self._events[record.event] = self._queue(record.stream, call)
        elif isinstance(record, EventWait):
            self._wait(record, record.stream, call, self._events.get(record.event, -1))
        elif isinstance(record, WaitStream):
            self._wait(record, record.waiter, call, self._queue(record.on, call))
        elif isinstance(record, EventSync):
            return self._block(record, call, self._events.get(record.event, -1))
        elif isinstance(record, HostSync):
            streams = list(self._last) if record.stream is None else [record.stream]
            found = [self._last[stream] for stream in streams if stream in self._last]
            return self._block(record, call, self._graph.add(found) if found else -1)
        elif isinstance(record, HostAccess):
            run = self._graph.add([call], step.duration_ns, record.op)
            self._runs[record.op] = run, run
            return run
        elif isinstance(record, IoBegin):
            run = self._graph.add([call], step.duration_ns, record.op)
            self._ios[record.io] = run
            self._runs[record.op] = run, run
        elif isinstance(record, ThreadPost):
            self._posts.setdefault(record.channel, deque()).append(call)
        elif isinstance(record, RecordStream):
            if record.tensor in self._tensors:
                self._tensors[record.tensor].marked.add(record.stream)
        elif isinstance(record, TensorFree):
            tensor = self._tensors.pop(record.tensor, None)
            if tensor is not None:
                self._returned[tensor.block] = [self._last[s] for s in tensor.marked if s in self._last]
        elif isinstance(record, Collective):
            back = self._graph.add([call])
            ranks = self._entered.setdefault(record.collective_group, {})
            ranks.setdefault(record.rank, []).append((record.site, call, back))
            return back
        else:
            return self._observe(record, call)
        return call

    def _observe(self, record: AnyRecord, call: int) -> int:
        """Calls that return when something else is over."""
        found: list[int] = []
        if isinstance(record, IoEnd):
            found = self._of(self._ios, record.io)
        elif isinstance(record, ThreadRecv):
            posts = self._posts.get(record.channel)
            found = [posts.popleft()] if posts else []
        elif isinstance(record, TensorAlloc):
            self._tensors[record.tensor] = _Tensor(record.block)
            found = self._returned.pop(record.block, [])
        return self._graph.add([call, *found]) if found else call

    def _block(self, record: EventSync | HostSync, call: int, awaited: int) -> int:
        wait = _OpenWait(record, None, [call], True, awaited)
        self._waits.append(wait)
        self._thread_waits.setdefault(record.thread, []).append(wait)
        return self._graph.add([call, awaited]) if awaited >= 0 else call

    def _meet(self) -> None:
        """A collective returns once every rank has entered it, and never if a rank entered another instead."""
        for ranks in self._entered.values():
            for number in range(max(map(len, ranks.values()))):
                here = [entered[number] for entered in ranks.values() if number < len(entered)]
                matched = len({site for site, _, _ in here}) == 1
                for _, _, back in here:
                    self._graph.before[back].extend(call for _, call, _ in here)
                    if not matched:
                        self._graph.cost[back] = NEVER

    # -- streams ---------------------------------------------------------------------------------------------

    @staticmethod
    def _of(table: Mapping[_Key, int], key: _Key) -> list[int]:
        return [table[key]] if key in table else []

    def _implied(self, stream: StreamId) -> list[int]:
        """Newest items that the legacy stream's rule puts before new items of ``stream``."""
        kind = self._kinds.get(stream, StreamKind.NONBLOCKING)
        if kind is StreamKind.NONBLOCKING:
            return []
        partner = StreamKind.BLOCKING if kind is StreamKind.LEGACY else StreamKind.LEGACY
        return [node for other, node in self._last.items() if other != stream and self._kinds.get(other) is partner]

    def _queue(
        self, stream: StreamId, call: int, extra: Iterable[int] = (), cost: int = 0, op: OpId | None = None
    ) -> int:
        """Put an item on a stream, behind what is there."""
        before = [call, *self._of(self._last, stream), *self._implied(stream), *extra]
        node = self._last[stream] = self._graph.add(before, cost, op)
        return node

    def _work(self, stream: StreamId, op: OpId, call: int, cost: int, extra: Sequence[int] = ()) -> None:
        """Queue one operation."""
        self._delayed(stream, op, [call, *self._implied(stream), *extra])
        node = self._queue(stream, call, extra, cost, op)
        self._runs[op] = node, node

    def _delayed(self, stream: StreamId, op: OpId, others: list[int]) -> None:
        """``op`` is what the stream's waits so far hold up, and ``others`` hold it up too."""
        for wait in self._stream_waits.pop(stream, ()):
            wait.then = op
            wait.free.extend(others)

    def _wait(self, record: EventWait | WaitStream, stream: StreamId, call: int, awaited: int) -> None:
        wait = _OpenWait(record, stream, [*self._of(self._last, stream), *self._implied(stream)], False, awaited)
        self._waits.append(wait)
        self._stream_waits.setdefault(stream, []).append(wait)
        if awaited >= 0:
            self._queue(stream, call, [awaited])

    # -- graphs ----------------------------------------------------------------------------------------------

    def _graph_replay(self, record: GraphReplay, call: int, step: Step, entries: Sequence[GraphNode]) -> None:
        """A replay follows earlier ones of the same graph; entries without a time of their own share the step's."""
        stream, earlier = record.stream, self._of(self._graphs, record.graph)
        if not entries:
            self._work(stream, record.op, call, step.duration_ns, earlier)
            self._graphs[record.graph] = self._last[stream]
            return
        others = [call, *self._implied(stream), *earlier]
        self._delayed(stream, record.op, others)
        first = self._graph.add([*self._of(self._last, stream), *others])
        share = step.duration_ns // max(1, sum(entry.event is None for entry in entries))
        nodes: list[int] = []
        for entry in entries:
            if entry.after == IN_ORDER:
                before = nodes[-1:]
            else:
                before = [node for index, node in enumerate(nodes) if entry.after >> index & 1]
            nodes.append(self._graph.add([first, *before], 0 if entry.event is not None else share))
            if entry.event is not None:
                self._events[entry.event] = nodes[-1]
        last = self._graph.add(nodes, 0, record.op)
        self._last[stream] = self._graphs[record.graph] = last
        self._runs[record.op] = first, last
