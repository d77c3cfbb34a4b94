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
    Mode,
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
_Accessing = DeviceRecord | HostAccess | IoBegin | GraphNode
WaitRecord = EventWait | WaitStream | EventSync | HostSync
Edits = Mapping[int, Sequence[int]]
"""A plan with some waits changed: the predecessors that nodes have instead."""
Conflicts = Mapping[int, int]
"""Per node of an access, the earlier accesses it conflicts with, as bits."""
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
        gate: Node of the plan that starts only after ``node``.
    """

    record: WaitRecord
    stream: StreamId | None
    free_ns: int
    awaited_ns: int
    then: OpId | None
    node: int
    gate: int

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
    _call_nodes: Mapping[OpId, tuple[int, int]]
    _run_nodes: Mapping[OpId, tuple[int, int]]

    def covered(self, wait: PlannedWait) -> set[OpId]:
        """Operations that are over once the record awaited by ``wait`` is complete."""
        return self._graph.behind(wait.node) if wait.node >= 0 else set()

    def ordered_before(self, op: OpId) -> set[OpId]:
        """Operations that are over before operation ``op`` can start."""
        return self._graph.behind(self._run_nodes[op][0]) - {op}

    def without(self, wait: PlannedWait, edits: Edits) -> Edits:
        """``edits``, and ``wait`` is not made: what its call alone put on a stream goes too."""
        queued = self._graph.queued
        if wait.stream is None:
            return {**edits, wait.gate: self._rest(wait)}
        if isinstance(wait.record, WaitStream):
            edits = {**edits, wait.node: queued[wait.node]}
        return {**edits, wait.gate: queued[wait.gate]}

    def _rest(self, wait: PlannedWait) -> list[int]:
        """What the waiter follows besides the awaited record."""
        before = [*self._graph.before[wait.gate]]
        before.remove(wait.node)
        return before

    def narrowed(self, wait: PlannedWait, op: OpId, edits: Edits) -> Edits:
        """``edits``, and ``wait`` waits for operation ``op`` instead."""
        return self._also({**self.without(wait, edits), wait.gate: self._rest(wait)}, wait.gate, op)

    def moved(self, wait: PlannedWait, op: OpId, before: OpId, edits: Edits) -> Edits:
        """``edits``, and instead of ``wait``, the thread that issues ``before`` waits for ``op`` just before it."""
        return self._also(self.without(wait, edits), self._call_nodes[before][0], op)

    def _also(self, edits: Edits, node: int, op: OpId) -> Edits:
        return {**edits, node: [*edits.get(node, self._graph.before[node]), self._run_nodes[op][1]]}

    def gain(self, wait: PlannedWait, then: OpId | None, edits: Edits) -> int:
        """How much sooner the waiter of ``wait`` comes to ``then`` with ``edits``."""
        if then is None:
            return 0
        start, _ = self._graph.solve(edits)
        nodes = self._call_nodes if wait.stream is None else self._run_nodes
        spans = self.calls if wait.stream is None else self.runs
        return spans[then].start_ns - start[nodes[then][0]]

    def unordered(self, conflicts: Conflicts, edits: Edits) -> dict[int, int]:
        """Of ``conflicts``, those that nothing orders with ``edits``; operations without any are left out."""
        done = self._graph.done_before(edits)
        found = ((node, earlier & ~done[node]) for node, earlier in conflicts.items())
        return {node: earlier for node, earlier in found if earlier}

    def pairs(self, unordered: Mapping[int, int]) -> set[tuple[OpId, OpId]]:
        """``unordered`` as pairs of operations."""
        accesses = list(self._graph.accesses)
        found = set()
        for later, mask in unordered.items():
            while mask:
                bit = mask & -mask
                mask ^= bit
                earlier = accesses[bit.bit_length() - 1]
                found.add((self._graph.accesses[earlier][0], self._graph.accesses[later][0]))
        return found

    def conflicts(self) -> Conflicts:
        """All pairs of conflicting accesses by different operations, ordered or not."""
        cells: dict[tuple[int, int, int], dict[tuple[int, int], list[int]]] = {}
        ops: dict[OpId, int] = {}
        found: dict[int, int] = {}
        for number, (node, (op, work)) in enumerate(self._graph.accesses.items()):
            low, high = work.layers
            earlier, mine = 0, 1 << number
            for access in work.accesses:
                writes = access.mode is Mode.WRITE
                for page in access.ids.tolist():
                    cell = cells.setdefault((access.space, access.pool, page), {})
                    for (first, end), (wrote, touched) in cell.items():
                        if first < high and low < end:
                            earlier |= touched if writes else wrote
                    marks = cell.setdefault(work.layers, [0, 0])
                    marks[0] |= mine if writes else 0
                    marks[1] |= mine
            ops[op] = ops.get(op, 0) | mine
            earlier &= ~ops[op]
            if earlier:
                found[node] = earlier
        return found


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
        self.meets: dict[int, list[int]] = {}
        """Collectives: what else a node starts after, though it orders no access."""
        self.knows: dict[int, list[int]] = {}
        """True queries: what a node is ordered behind, though it did not wait for it."""
        self.queued: dict[int, list[int]] = {}
        """The stream item that a stream item is right behind."""
        self.accesses: dict[int, tuple[OpId, _Accessing]] = {}

    def add(self, before: Iterable[int], cost: int = 0, op: OpId | None = None) -> int:
        self.before.append(list(before))
        self.cost.append(cost)
        self.op.append(op)
        return len(self.before) - 1

    def solve(self, edits: Edits) -> tuple[list[int], list[int]]:
        """Start and end of every node with other predecessors for some; those behind a cycle never run."""
        count = len(self.before)
        start, end = [0] * count, [NEVER] * count
        missing = [0] * count
        after: list[list[int]] = [[] for _ in range(count)]
        for node, known in enumerate(self.before):
            befores = [*edits.get(node, known), *self.meets.get(node, ())]
            missing[node] = len(befores)
            for before in befores:
                after[before].append(node)
        ready = deque(node for node in range(count) if not missing[node])
        while ready:
            node = ready.popleft()
            end[node] = min(NEVER, start[node] + self.cost[node])
            for other in after[node]:
                start[other] = max(start[other], end[node])
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        for node in range(count):
            if missing[node]:
                start[node] = NEVER
        return start, end

    def done_before(self, edits: Edits) -> list[int]:
        """Per node, the accesses that are over before it starts, as bits in the order of ``accesses``."""
        bits = {node: 1 << number for number, node in enumerate(self.accesses)}
        done: list[int] = []
        for node, known in enumerate(self.before):
            mine = 0
            for before in (*edits.get(node, known), *self.knows.get(node, ())):
                mine |= done[before] | bits.get(before, 0)
            done.append(mine)
        return done

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
    node: int
    gate: int
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
        self._entries: dict[int, list[Step]] = {}
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
        entries: list[Step] = []
        for step in reversed(steps):  # entries come after their replay
            if isinstance(step.record, GraphNode):
                entries.append(step)
            elif isinstance(step.record, GraphReplay):
                self._entries[id(step.record)] = entries[::-1]
                entries = []
        for step in steps:
            if not isinstance(step.record, GraphNode):
                self._step(step)
        self._meet()
        graph = self._graph
        start, end = graph.solve({})
        calls = {op: Span(start[call], end[back]) for op, (call, back) in self._calls.items()}
        runs = {op: Span(start[first], end[last]) for op, (first, last) in self._runs.items()}
        waits = []
        for wait in self._waits:
            times = end if wait.stream is not None else start
            free = max((times[node] for node in wait.free), default=0)
            awaited = end[wait.node] if wait.node >= 0 else 0
            waits.append(PlannedWait(wait.record, wait.stream, free, awaited, wait.then, wait.node, wait.gate))
        return Plan(calls, runs, tuple(waits), graph, self._calls, self._runs)

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
            self._work(record, call, step.duration_ns)
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
        elif isinstance(record, EventQuery):
            if record.result and record.event in self._events:
                back = self._graph.add([call])
                self._graph.knows[back] = [self._events[record.event]]
                return back
        elif isinstance(record, HostAccess):
            run = self._graph.add([call], step.duration_ns, record.op)
            self._runs[record.op] = run, run
            self._graph.accesses[run] = record.op, record
            return run
        elif isinstance(record, IoBegin):
            run = self._graph.add([call], step.duration_ns, record.op)
            self._ios[record.io] = run
            self._runs[record.op] = run, run
            self._graph.accesses[run] = record.op, record
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
        back = self._graph.add([call, awaited]) if awaited >= 0 else call
        wait = _OpenWait(record, None, [call], awaited, back)
        self._waits.append(wait)
        self._thread_waits.setdefault(record.thread, []).append(wait)
        return back

    def _meet(self) -> None:
        """A collective returns once every rank has entered it, and never if a rank entered another instead."""
        for ranks in self._entered.values():
            for number in range(max(map(len, ranks.values()))):
                here = [entered[number] for entered in ranks.values() if number < len(entered)]
                matched = len({site for site, _, _ in here}) == 1
                for _, _, back in here:
                    self._graph.meets[back] = [call for _, call, _ in here]
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
        previous = self._of(self._last, stream)
        node = self._last[stream] = self._graph.add([call, *previous, *self._implied(stream), *extra], cost, op)
        self._graph.queued[node] = previous
        return node

    def _work(self, record: DeviceRecord, call: int, cost: int, extra: Sequence[int] = ()) -> None:
        """Queue one operation."""
        stream = record.stream
        self._delayed(stream, record.op, [call, *self._implied(stream), *extra])
        node = self._queue(stream, call, extra, cost, record.op)
        self._runs[record.op] = node, node
        self._graph.accesses[node] = record.op, record

    def _delayed(self, stream: StreamId, op: OpId, others: list[int]) -> None:
        """``op`` is what the stream's waits so far hold up, and ``others`` hold it up too."""
        for wait in self._stream_waits.pop(stream, ()):
            wait.then = op
            wait.free.extend(others)

    def _wait(self, record: EventWait | WaitStream, stream: StreamId, call: int, awaited: int) -> None:
        free = [*self._of(self._last, stream), *self._implied(stream)]
        gate = self._queue(stream, call, [awaited] if awaited >= 0 else ())
        wait = _OpenWait(record, stream, free, awaited, gate)
        self._waits.append(wait)
        self._stream_waits.setdefault(stream, []).append(wait)

    # -- graphs ----------------------------------------------------------------------------------------------

    def _graph_replay(self, record: GraphReplay, call: int, step: Step, entries: Sequence[Step]) -> None:
        """A replay follows earlier ones of the same graph."""
        stream, earlier = record.stream, self._of(self._graphs, record.graph)
        if not entries:
            self._work(record, call, step.duration_ns, earlier)
            self._graphs[record.graph] = self._last[stream]
            return
        others = [call, *self._implied(stream), *earlier]
        self._delayed(stream, record.op, others)
        first = self._graph.add([*self._of(self._last, stream), *others])
        nodes: list[int] = []
        for part in entries:
            entry = part.record
            assert isinstance(entry, GraphNode)
            if entry.after == IN_ORDER:
                before = nodes[-1:]
            else:
                before = [node for index, node in enumerate(nodes) if entry.after >> index & 1]
            nodes.append(self._graph.add([first, *before], 0 if entry.event is not None else part.duration_ns))
            if entry.event is not None:
                self._events[entry.event] = nodes[-1]
            else:
                self._graph.accesses[nodes[-1]] = record.op, entry
        last = self._graph.add(nodes, 0, record.op)
        self._last[stream] = self._graphs[record.graph] = last
        self._runs[record.op] = first, last
