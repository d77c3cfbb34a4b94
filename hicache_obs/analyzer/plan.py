"""Executes a trace on paper: when every step would have run, with the durations the trace states.

The rules are those of ``tests/cases/README.md``, section Time. A host thread advances by the host time of each call
and by blocking. A device operation starts at the latest of the end of its call, the end of earlier work on its stream
and its waits. I/O starts at its begin. Nothing here is a measurement: the numbers rank stalls.

The items of the happens-before graph (``graph``), host calls included, start when their predecessors have ended, so
one pass in topological order gives all times. What can never run, such as a collective whose peer entered another
one, ends at ``NEVER``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from hicache_obs.analyzer.graph import CALL, LAUNCH, OVER, RUN, WAIT, Graph, Item, Lane
from hicache_obs.records import (
    AnyRecord,
    Collective,
    Define,
    EventQuery,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostSync,
    IoEnd,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    Relocate,
    StreamId,
    StreamKind,
    TensorAlloc,
    ThreadId,
    ThreadRecv,
    Times,
    WaitStream,
)
from hicache_obs.trace import Trace

NEVER: Final = 1 << 62
"""A time that does not come."""
DEFAULT_HOST_NS: Final = 2_000
DEFAULT_DURATION_NS: Final = 10_000

DeviceRecord = Kernel | Memcpy | Relocate | GraphReplay
WaitRecord = EventWait | WaitStream | EventSync | HostSync
Edits = Mapping[int, Sequence[int]]
"""A plan with some waits changed: the predecessors that items have instead."""
Conflicts = Mapping[int, int]
"""Per item that touches memory, the earlier ones it conflicts with, as bits."""
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
        awaited: Items that complete what is awaited; none if the event was never recorded.
        gate: Item that starts only after them.
    """

    record: WaitRecord
    stream: StreamId | None
    free_ns: int
    awaited_ns: int
    then: OpId | None
    awaited: tuple[int, ...]
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
    _network: _Network
    _call_items: Mapping[OpId, tuple[int, int]]
    _run_items: Mapping[OpId, tuple[int, int]]

    def covered(self, wait: PlannedWait) -> set[OpId]:
        """Operations that are over once the record awaited by ``wait`` is complete."""
        return self._network.behind(*wait.awaited)

    def ordered_before(self, op: OpId) -> set[OpId]:
        """Operations that are over before operation ``op`` can start."""
        return self._network.behind(self._run_items[op][0]) - {op}

    def without(self, wait: PlannedWait, edits: Edits) -> Edits:
        """``edits``, and ``wait`` is not made: what its call alone put on a stream goes too."""
        network = self._network
        if wait.stream is None:
            return {**edits, wait.gate: network.items[wait.gate].follows}
        if isinstance(wait.record, WaitStream):
            edits = {**edits, **{marker: network.queued[marker] for marker in wait.awaited}}
        return {**edits, wait.gate: network.queued[wait.gate]}

    def narrowed(self, wait: PlannedWait, op: OpId, edits: Edits) -> Edits:
        """``edits``, and ``wait`` waits for operation ``op`` instead."""
        rest = self._network.items[wait.gate].follows
        return self._also({**self.without(wait, edits), wait.gate: rest}, wait.gate, op)

    def moved(self, wait: PlannedWait, op: OpId, before: OpId, edits: Edits) -> Edits:
        """``edits``, and instead of ``wait``, the thread that issues ``before`` waits for ``op`` just before it."""
        return self._also(self.without(wait, edits), self._call_items[before][0], op)

    def _also(self, edits: Edits, item: int, op: OpId) -> Edits:
        return {**edits, item: [*edits.get(item, self._network.before[item]), self._run_items[op][1]]}

    def gain(self, wait: PlannedWait, then: OpId | None, edits: Edits) -> int:
        """How much sooner the waiter of ``wait`` comes to ``then`` with ``edits``."""
        if then is None:
            return 0
        start, _ = self._network.solve(edits)
        items = self._call_items if wait.stream is None else self._run_items
        spans = self.calls if wait.stream is None else self.runs
        return spans[then].start_ns - start[items[then][0]]

    def unordered(self, conflicts: Conflicts, edits: Edits) -> dict[int, int]:
        """Of ``conflicts``, those that nothing orders with ``edits``; operations without any are left out."""
        done = self._network.done_before(edits)
        found = ((item, earlier & ~done[item]) for item, earlier in conflicts.items())
        return {item: earlier for item, earlier in found if earlier}

    def pairs(self, unordered: Mapping[int, int]) -> set[tuple[OpId, OpId]]:
        """``unordered`` as pairs of operations."""
        accesses = self._network.accesses
        found = set()
        for later, mask in unordered.items():
            while mask:
                bit = mask & -mask
                mask ^= bit
                found.add((accesses[bit.bit_length() - 1].step, self._network.items[later].step))
        return found

    def conflicts(self) -> Conflicts:
        """All pairs of conflicting accesses by different operations, ordered or not."""
        cells: dict[tuple[int, int, int], dict[tuple[int, int], list[int]]] = {}
        ops: dict[OpId, int] = {}
        found: dict[int, int] = {}
        for number, work in enumerate(self._network.accesses):
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
            ops[work.step] = ops.get(work.step, 0) | mine
            earlier &= ~ops[work.step]
            if earlier:
                found[work.index] = earlier
        return found


def plan(trace: Trace) -> Plan:
    """Times of all steps of ``trace``; durations it does not state are 10 µs."""
    return plan_steps(steps_of(trace), trace.names.stream_kinds)


def steps_of(trace: Trace) -> list[Step]:
    """The steps of a trace; a call lasts until the next one in the file, as scenario readers count host time."""
    records = [record for record in trace if not isinstance(record, Define | Times | Lost)]
    steps: list[Step] = []
    following = trace.planned_end_ns
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
    graph = Graph((step.record for step in steps), kinds=kinds, calls=True)
    network = _Network(graph.items, steps)
    start, end = network.solve({})
    call_items, run_items = _spans(graph.items, steps)
    calls = {op: Span(start[call], end[back]) for op, (call, back) in call_items.items()}
    runs = {op: Span(start[first], end[last]) for op, (first, last) in run_items.items()}
    waits = []
    for wait in _waits(graph.items, steps, network.queued):
        times = end if wait.stream is not None else start
        free = max((times[item] for item in wait.free), default=0)
        awaited = max((end[item] for item in wait.awaited), default=0)
        waits.append(PlannedWait(wait.record, wait.stream, free, awaited, wait.then, wait.awaited, wait.gate))
    return Plan(calls, runs, tuple(waits), network, call_items, run_items)


class _Network:
    """The items with what each costs; solves for times."""

    def __init__(self, items: Sequence[Item], steps: Sequence[Step]) -> None:
        self.items = items
        self.before: list[Sequence[int]] = []
        self.cost: list[int] = []
        self.meets: dict[int, list[int]] = {}
        """Collectives: what else an item starts after, though it orders no access."""
        self.knows: dict[int, Sequence[int]] = {}
        """True queries: what an item is ordered behind, though it did not wait for it."""
        self.queued: dict[int, Sequence[int]] = {}
        """The stream item that a stream item is right behind."""
        self.accesses = [item for item in items if item.accesses]
        last: dict[Lane, tuple[int, ...]] = {}
        for item in items:
            step = steps[item.position]
            if isinstance(step.record, EventQuery):
                self.knows[item.index] = item.awaits
            self.before.append(item.follows if isinstance(step.record, EventQuery) else item.before)
            self.cost.append({CALL: step.host_ns, RUN: step.duration_ns}.get(item.verb, 0))
            if item.lane[0] == "stream":
                self.queued[item.index] = last.get(item.lane, ())
                last[item.lane] = (item.index,)
        self._meet(steps)

    def _meet(self, steps: Sequence[Step]) -> None:
        """A collective returns once every rank has entered it, and never if a rank entered another instead."""
        entered: dict[int, dict[int, list[tuple[int, Item]]]] = {}
        for item in self.items:
            record = steps[item.position].record
            if isinstance(record, Collective) and item.verb != CALL:
                ranks = entered.setdefault(record.collective_group, {})
                ranks.setdefault(record.rank, []).append((record.site, item))
        for ranks in entered.values():
            for number in range(max(map(len, ranks.values()))):
                here = [calls[number] for calls in ranks.values() if number < len(calls)]
                for _, item in here:
                    self.meets[item.index] = [call for _, other in here for call in other.follows]
                    if len({site for site, _ in here}) > 1:
                        self.cost[item.index] = NEVER

    def solve(self, edits: Edits) -> tuple[list[int], list[int]]:
        """Start and end of every item with other predecessors for some; those behind a cycle never run."""
        count = len(self.before)
        start, end = [0] * count, [NEVER] * count
        missing: list[int] = []
        after: list[list[int]] = [[] for _ in range(count)]
        for item, known in enumerate(self.before):
            befores = [*edits.get(item, known), *self.meets.get(item, ())]
            missing.append(len(befores))
            for before in befores:
                after[before].append(item)
        ready = deque(item for item in range(count) if not missing[item])
        while ready:
            item = ready.popleft()
            end[item] = min(NEVER, start[item] + self.cost[item])
            for other in after[item]:
                start[other] = max(start[other], end[item])
                missing[other] -= 1
                if not missing[other]:
                    ready.append(other)
        for item in range(count):
            if missing[item]:
                start[item] = NEVER
        return start, end

    def done_before(self, edits: Edits) -> list[int]:
        """Per item, the accesses that are over before it starts, as bits in the order of ``accesses``."""
        bits = {item.index: 1 << number for number, item in enumerate(self.accesses)}
        done: list[int] = []
        for item, known in enumerate(self.before):
            mine = 0
            for before in (*edits.get(item, known), *self.knows.get(item, ())):
                mine |= done[before] | bits.get(before, 0)
            done.append(mine)
        return done

    def behind(self, *items: int) -> set[OpId]:
        """Operations at ``items`` and before them; a graph replay once it is over."""
        todo, seen, found = list(items), set(items), set()
        while todo:
            at = todo.pop()
            item = self.items[at]
            if item.verb in (RUN, OVER) and item.lane[0] != "entry":
                found.add(item.op)
            new = [before for before in self.before[at] if before not in seen]
            seen.update(new)
            todo.extend(new)
        return found


@dataclass(slots=True, eq=False)
class _OpenWait:
    """A wait whose cost shows once the times are known and the waiter's next operation is."""

    record: WaitRecord
    stream: StreamId | None
    free: list[int]
    awaited: tuple[int, ...]
    gate: int
    then: OpId | None = None


_Spans = dict[OpId, tuple[int, int]]


def _spans(items: Sequence[Item], steps: Sequence[Step]) -> tuple[_Spans, _Spans]:
    """First and last item of every call, and of everything that runs."""
    calls: _Spans = {}
    runs: _Spans = {}
    for item in items:
        if item.lane[0] == "entry":
            continue
        op = steps[item.position].record.op
        if item.lane[0] == "thread" and op >= 0:
            calls[op] = (calls.get(op, (item.index, 0))[0], item.index)
        if item.verb in (RUN, LAUNCH, OVER):
            runs[op] = (runs.get(op, (item.index, 0))[0], item.index)
    return calls, runs


def _waits(items: Sequence[Item], steps: Sequence[Step], queued: Mapping[int, Sequence[int]]) -> list[_OpenWait]:
    """All waits in trace order, with what each holds up."""
    found: list[_OpenWait] = []
    streams: dict[int, list[_OpenWait]] = {}
    threads: dict[ThreadId, list[_OpenWait]] = {}
    call = -1
    for item in items:
        record = steps[item.position].record
        if item.verb == CALL:
            call = item.index
            if not isinstance(record, BLOCKING):
                for wait in threads.pop(record.thread, ()):
                    wait.then = record.op
            if isinstance(record, EventSync | HostSync):
                found.append(_OpenWait(record, None, [call], (), call))
                threads.setdefault(record.thread, []).append(found[-1])
        elif isinstance(record, EventSync | HostSync):
            found[-1].awaited, found[-1].gate = item.awaits, item.index
        elif isinstance(record, EventWait | WaitStream) and item.verb == WAIT:
            free = [before for before in item.follows if before != call]
            stream = StreamId(item.lane[1])
            found.append(_OpenWait(record, stream, free, item.awaits, item.index))
            streams.setdefault(stream, []).append(found[-1])
        elif item.lane[0] == "stream" and item.verb in (RUN, LAUNCH):
            for wait in streams.pop(item.lane[1], ()):
                wait.then = item.op
                wait.free.extend(before for before in item.before if before not in queued[item.index])
    return found
