"""Waits that cost time and order nothing, or more than is needed; copies that overlap nothing; ranks that diverge.

Times, and the order of a trace with one wait changed, come from ``plan``. A wait that blocks for ``MIN_NS`` or more is
judged by the races of the same trace without it: no new one, and it is not needed; else, if only other threads' work
races, the wait belongs there; else the earliest operation is searched that would have been enough to wait for. The
analyzer then has to find no new race in the trace with everything changed as proposed. A wait whose work is needed in
full is no stall, nor is one whose absence would save nothing because another wait would block instead, nor that of a
thread which only waits on behalf of others. Several waits may each be redundant only as long as the others stay: each
is judged with those reported so far already changed, so following the whole report is safe.

Not reported: ``event_reuse`` (no rule that could not be wrong), and calls that hand over rather than wait
(``thread_recv``, ``io_end``, allocator reuse).
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from hicache_obs.analyzer.check import Analyzer
from hicache_obs.analyzer.divergence import CollectiveOrder
from hicache_obs.analyzer.pipelines import Pipeline, find_pipelines
from hicache_obs.analyzer.plan import (
    BLOCKING,
    DEFAULT_HOST_NS,
    NEVER,
    DeviceRecord,
    Edits,
    PlannedWait,
    Span,
    Step,
    WaitRecord,
    plan_steps,
    steps_of,
)
from hicache_obs.costs import FenceCost, TransferCost
from hicache_obs.findings import Finding, Hazard
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Define,
    DropReason,
    EventId,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    Lost,
    OpId,
    StreamId,
    ThreadId,
    ThreadPost,
    WaitStream,
)
from hicache_obs.trace import Names, Trace

MIN_NS: Final = 100_000
"""Shorter stalls are not worth a report."""
MAX_RECORDS: Final = 4096
"""Longer traces are not searched: each wait in question means analysing the trace again."""
MAX_PLANNED: Final = 2_000_000
"""Records that the search of one trace goes over, all its trials together."""
MAX_CONFIRMED: Final = 32
"""Stalls that are confirmed one by one if the analyzer does not confirm them together."""

Pair = tuple[OpId, OpId]


class StallClass(str, enum.Enum):
    """Kind of a stall."""

    OVER_SYNC = "over_sync"
    NO_OVERLAP = "no_overlap"
    TP_DIVERGENCE = "tp_divergence"


class StallCause(str, enum.Enum):
    """What in the program makes the stall."""

    COARSE_FENCE = "coarse_fence"
    """The wait covers more than what is needed of it."""
    BLOCKING_HOST = "blocking_host"
    """A host thread waits for work that nothing after it needs."""
    WRONG_THREAD = "wrong_thread"
    """Another thread needs the order, not the one that blocks."""
    SERIAL_ENQUEUE = "serial_enqueue"
    """Host call time alone keeps work from overlapping."""
    RANK_DIVERGENCE = "rank_divergence"


@dataclass(frozen=True, slots=True)
class Move:
    """Where an order belongs: ``thread`` should wait for operation ``on`` right before its step ``before``."""

    thread: ThreadId
    on: OpId
    before: OpId


@dataclass(frozen=True, slots=True)
class Stall:
    """One finding about lost time.

    Attributes:
        kind, cause: See the enums.
        at: The wait; the first consumer for ``NO_OVERLAP``; the collective for ``TP_DIVERGENCE``.
        waiter: ``stream:name`` or ``thread:name``.
        blocked_ns: How long the waiter stood still; ``None``: for ever.
        needed: Waiting for this operation alone would have been enough; ``None``: nothing needs the wait here.
        move_to: The order is needed there instead.
        copies: The copies that overlapped nothing.
        ranks: Ranks of the group that disagree, ascending.
    """

    kind: StallClass
    cause: StallCause
    at: OpId
    waiter: str
    blocked_ns: int | None
    needed: OpId | None = None
    move_to: Move | None = None
    copies: tuple[OpId, ...] = ()
    ranks: tuple[int, ...] = ()

    def as_json(self, trace: Trace) -> dict[str, object]:
        """The stall in the words of ``trace``, as ``check --json`` prints it."""
        label, move = trace.label, self.move_to
        found: dict[str, object] = {
            "class": self.kind.value,
            "cause": self.cause.value,
            "at": label(self.at),
            "waiter": self.waiter,
            "blocked_us": None if self.blocked_ns is None else self.blocked_ns / 1000,
            "needed": None if self.needed is None else label(self.needed),
            "move_to": None,
        }
        if move is not None:
            thread = trace.names.thread(move.thread)
            found["move_to"] = {"thread": thread, "on": label(move.on), "before": label(move.before)}
        if self.copies:
            found["copies"] = [label(op) for op in self.copies]
        if self.kind is StallClass.TP_DIVERGENCE:
            found |= {"ranks": list(self.ranks), "deadlock": True}
        return found


@dataclass(frozen=True, slots=True)
class StallReport:
    """What was found.

    Attributes:
        stalls: In trace order.
        note: What was not searched and why, in words for the user; empty if nothing was left out.
        compared: Collectives to which at least two ranks came, and which were compared.
    """

    stalls: tuple[Stall, ...]
    note: str = ""
    compared: int = 0

    @property
    def skipped(self) -> bool:
        """Whether anything was left out."""
        return bool(self.note)


def find_stalls(trace: Trace) -> StallReport:
    """All stalls of at least ``MIN_NS``, and collectives that ranks do not enter together.

    Rank divergence is always looked for. The rest needs stated durations, a complete trace and one of at most
    ``MAX_RECORDS`` records; the report's note says which is missing.
    """
    order = CollectiveOrder()
    order.feed(trace, Names())
    stalls = _divergences(trace, order)
    note = _obstacle(trace)
    if not note:
        search = _Search(trace)
        stalls += search.needless_waits()
        stalls += search.serial_copies()
        note = search.note
    return StallReport(tuple(sorted(stalls, key=lambda stall: stall.at)), note, order.compared)


def _obstacle(trace: Trace) -> str:
    if not trace.planned_ns:
        return "stalls not searched: that takes the durations that a scenario states"
    if len(trace) > MAX_RECORDS:
        return f"stalls not searched: {len(trace)} records, more than {MAX_RECORDS}"
    if any(isinstance(record, Lost) and record.reason is not DropReason.UNRESOLVED for record in trace):
        return "stalls not searched: records were lost, so no wait is known to be needless"
    return ""


# -- ranks -----------------------------------------------------------------------------------------------------


def _divergences(trace: Trace, order: CollectiveOrder) -> list[Stall]:
    """Per group, the first place where its ranks enter different collectives; a scenario is a whole program."""
    return [
        Stall(
            StallClass.TP_DIVERGENCE,
            StallCause.RANK_DIVERGENCE,
            divergence.at.op,
            f"thread:{trace.names.thread(divergence.at.thread)}",
            None,
            ranks=divergence.ranks,
        )
        for divergence in order.divergences(whole=bool(trace.planned_ns), ranks=trace.ranks)
    ]


# -- waits -----------------------------------------------------------------------------------------------------


class _Search:
    """Looks for stalls in one trace."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._kinds = trace.names.stream_kinds
        self._defines = [record for record in trace if isinstance(record, Define)]
        self._steps = steps_of(trace)
        self._plan = plan_steps(self._steps, self._kinds)
        self._records = {step.record.op: step.record for step in self._steps if not isinstance(step.record, GraphNode)}
        events = (getattr(record, "event", None) for record in trace)
        self._fresh = max((int(event) for event in events if event is not None), default=0)
        self._conflicts = self._plan.conflicts()
        self._left = MAX_PLANNED
        self.note = ""

    def needless_waits(self) -> list[Stall]:
        """Waits that block for long and could go, shrink or move; the analyzer has the last word."""
        waits = [wait for wait in self._plan.waits if wait.blocked_ns >= MIN_NS and wait.awaited_ns < NEVER]
        waits.sort(key=lambda wait: (wait.free_ns, wait.record.op))  # not by file: between threads that is chance
        found: list[tuple[WaitRecord, Stall]] = []
        edits: Edits = {}
        base = self._plan.unordered(self._conflicts, edits) if waits else {}
        for wait in waits:
            if self._left < 0:
                self.note = f"stalls searched in part: the search takes more than {MAX_PLANNED} records"
                break
            stall = self._judge(wait, edits, base)
            if stall is not None:
                found.append((wait.record, stall))
                edits = self._edited(wait, stall, edits)
        return self._confirmed(found)

    def _confirmed(self, found: list[tuple[WaitRecord, Stall]]) -> list[Stall]:
        """Those that, changed as proposed, give no new race; normally all."""
        if not found:
            return []
        base = self._races(self._steps)
        steps = self._steps
        for record, stall in found:
            steps = self._changed(steps, record, stall)
        if self._races(steps) <= base:
            return [stall for _, stall in found]
        kept: list[Stall] = []
        steps = self._steps
        for record, stall in found[:MAX_CONFIRMED]:
            changed = self._changed(steps, record, stall)
            if self._races(changed) <= base:
                kept.append(stall)
                steps = changed
        return kept

    def _judge(self, wait: PlannedWait, edits: Edits, base: Mapping[int, int]) -> Stall | None:
        plan, record = self._plan, wait.record
        if self._gain(wait, wait.then, plan.without(wait, {})) < MIN_NS:
            return None
        new = self._new(plan.without(wait, edits), base)
        host = wait.stream is None
        plain = Stall(
            StallClass.OVER_SYNC,
            StallCause.BLOCKING_HOST if host else StallCause.COARSE_FENCE,
            record.op,
            self._waiter(wait),
            wait.blocked_ns,
        )
        if not new:
            return plain
        if host:
            move = self._move(wait, plan.pairs(new))
            if move is not None and not self._new(plan.moved(wait, move.on, move.before, edits), base):
                return replace(plain, cause=StallCause.WRONG_THREAD, move_to=move)
        needed = self._enough(wait, edits, base)
        return None if needed is None else replace(plain, cause=StallCause.COARSE_FENCE, needed=needed)

    def _edited(self, wait: PlannedWait, stall: Stall, edits: Edits) -> Edits:
        """``edits`` and the change that ``stall`` proposes."""
        if stall.move_to is not None:
            return self._plan.moved(wait, stall.move_to.on, stall.move_to.before, edits)
        if stall.needed is not None:
            return self._plan.narrowed(wait, stall.needed, edits)
        return self._plan.without(wait, edits)

    def _new(self, edits: Edits, base: Mapping[int, int]) -> dict[int, int]:
        """Pairs without an order that have one in ``base``."""
        self._left -= len(self._steps)
        found = self._plan.unordered(self._conflicts, edits)
        return {node: new for node, earlier in found.items() if (new := earlier & ~base.get(node, 0))}

    def _gain(self, wait: PlannedWait, then: OpId | None, edits: Edits) -> int:
        self._left -= len(self._steps)
        return self._plan.gain(wait, then, edits)

    def _waiter(self, wait: PlannedWait) -> str:
        names = self._trace.names
        if wait.stream is None:
            return f"thread:{names.thread(wait.record.thread)}"
        return f"stream:{names.stream(wait.stream)}"

    def _move(self, wait: PlannedWait, new: set[Pair]) -> Move | None:
        """Where the wait belongs if all that needs it is other threads' work, and its own thread has some too."""
        record = wait.record
        if any(self._records[later].thread == record.thread for _, later in new):
            return None
        before = min(later for _, later in new)
        on = max((earlier for earlier, _ in new), key=self._end)
        if not isinstance(self._records[on], DeviceRecord):
            return None
        move = Move(self._records[before].thread, on, before)
        gain = self._gain(wait, self._own_work(record), self._plan.moved(wait, on, before, {}))
        return move if gain >= MIN_NS else None

    def _own_work(self, record: WaitRecord) -> OpId | None:
        """What the thread that made the call does next, other than waiting and handing over."""
        records = iter(self._records.values())
        for later in records:
            if later is record:
                break
        own = (later.op for later in records if later.thread == record.thread)
        return next((op for op in own if not isinstance(self._records[op], (*BLOCKING, ThreadPost))), None)

    def _end(self, op: OpId) -> tuple[int, OpId]:
        return self._plan.runs[op].end_ns, op

    def _enough(self, wait: PlannedWait, edits: Edits, base: Mapping[int, int]) -> OpId | None:
        """The earliest operation that it is enough to wait for and that saves ``MIN_NS``.

        On one stream waiting for a later operation orders more, so each stream is bisected.
        """
        streams: dict[StreamId, list[OpId]] = {}
        for op in sorted(self._plan.covered(wait)):
            record = self._records[op]
            if isinstance(record, DeviceRecord):
                streams.setdefault(record.stream, []).append(op)
        found: list[OpId] = []
        for ops in streams.values():
            low, high = 0, len(ops)
            while low < high:
                middle = (low + high) // 2
                if self._new(self._plan.narrowed(wait, ops[middle], edits), base):
                    low = middle + 1
                else:
                    high = middle
            if low < len(ops):
                gain = self._gain(wait, wait.then, self._plan.narrowed(wait, ops[low], {}))
                if gain >= MIN_NS:
                    found.append(ops[low])
        return min(found, default=None, key=self._end)

    def _races(self, steps: Sequence[Step]) -> frozenset[Pair]:
        """Pairs that the analyzer does not find ordered when the trace is ``steps``."""
        sink = _PairSink()
        analyzer = Analyzer(sink)
        analyzer.feed([*self._defines, *(step.record for step in steps)])
        analyzer.finish()
        return frozenset(sink.pairs)

    # -- the trace with one wait changed ---------------------------------------------------------------------

    def _changed(self, steps: Sequence[Step], record: WaitRecord, stall: Stall) -> list[Step]:
        """``steps`` with ``record`` changed as ``stall`` proposes."""
        if stall.move_to is not None:
            return self._moved(steps, record, stall.move_to)
        if stall.needed is not None:
            return self._narrowed(steps, record, stall.needed)
        return _without(steps, record)

    def _narrowed(self, steps: Sequence[Step], record: WaitRecord, needed: OpId) -> list[Step]:
        """``record`` replaced by a wait for a record right behind operation ``needed``."""
        event = self._event()
        wait: AnyRecord
        if isinstance(record, EventWait | WaitStream):
            stream = record.stream if isinstance(record, EventWait) else record.waiter
            wait = EventWait(record.op, record.thread, record.host_ns, event, stream, record.purpose)
        else:
            wait = EventSync(record.op, record.thread, record.host_ns, event)
        marked = self._marked(steps, needed, event)
        return [replace(step, record=wait) if step.record is record else step for step in marked]

    def _moved(self, steps: Sequence[Step], record: WaitRecord, move: Move) -> list[Step]:
        """``record`` replaced by a wait in another thread."""
        event = self._event()
        found: list[Step] = []
        for step in self._marked(_without(steps, record), move.on, event):
            if step.record.op == move.before and not isinstance(step.record, GraphNode):
                sync = EventSync(NO_OP, move.thread, step.record.host_ns, event)
                found.append(Step(sync, 0, 0))
            found.append(step)
        return found

    def _event(self) -> EventId:
        self._fresh += 1
        return EventId(self._fresh)

    def _marked(self, steps: Sequence[Step], op: OpId, event: EventId) -> list[Step]:
        """``steps`` with a record of ``event`` right behind operation ``op``, which is not the last of them."""
        work = self._records[op]
        assert isinstance(work, DeviceRecord)
        marker = Step(EventRecord(NO_OP, work.thread, work.host_ns, event, work.stream), 0, 0)
        found: list[Step] = []
        pending = False
        for step in steps:
            if pending and not isinstance(step.record, GraphNode):
                found.append(marker)
                pending = False
            found.append(step)
            pending = pending or step.record is work
        return found

    # -- copies ----------------------------------------------------------------------------------------------

    def serial_copies(self) -> list[Stall]:
        """Copies that all end before their first consumer starts, for no reason but host call time."""
        late: dict[OpId, set[OpId]] = {}
        for pipeline in find_pipelines(step.record for step in self._steps):
            at = self._late_consumer(pipeline)
            if at is not None:  # one consumer may wait for several: pages that are copied each for itself
                late.setdefault(at, set()).update(copy.op for copy in pipeline.copies)
        return [self._no_overlap(at, tuple(sorted(copies))) for at, copies in late.items()]

    def _no_overlap(self, at: OpId, copies: tuple[OpId, ...]) -> Stall:
        record, runs = self._records[at], self._plan.runs
        assert isinstance(record, DeviceRecord)
        waiter = f"stream:{self._trace.names.stream(record.stream)}"
        blocked = runs[at].start_ns - min(runs[copy].start_ns for copy in copies)
        return Stall(StallClass.NO_OVERLAP, StallCause.SERIAL_ENQUEUE, at, waiter, blocked, copies=copies)

    def _late_consumer(self, pipeline: Pipeline) -> OpId | None:
        """The first consumer of a pipeline, if slow calls let all copies end before it."""
        runs, first, last = self._plan.runs, pipeline.copies[0].op, pipeline.copies[-1].op
        consumers = [record.op for record in self._records.values() if pipeline.consumed_by(record)]
        if not consumers:
            return None
        at = min(consumers, key=lambda op: (runs[op].start_ns, op))
        start = runs[at].start_ns
        blocked = start - runs[first].start_ns
        if start >= NEVER or blocked < MIN_NS or any(runs[copy.op].end_ns > start for copy in pipeline.copies):
            return None
        before = self._plan.ordered_before(at)
        if last in before or not any(copy.op in before for copy in pipeline.copies):
            return None  # it waits for all copies, or for none: no pipeline
        quick = self._quick(first, max(at, last))
        sooner = blocked - (quick[at].start_ns - quick[first].start_ns)
        overlaps = quick[at].start_ns < quick[last].end_ns
        if sooner < MIN_NS or not (overlaps or 2 * sooner > blocked):
            return None  # the device, or the host's own work, hides the copies
        return at

    def _quick(self, begin: OpId, end: OpId) -> Mapping[OpId, Span]:
        """When all would have run if no call from ``begin`` to ``end`` took longer than calls do."""
        steps = [
            replace(step, host_ns=min(step.host_ns, DEFAULT_HOST_NS)) if begin <= step.record.op <= end else step
            for step in self._steps
        ]
        return plan_steps(steps, self._kinds).runs


def _without(steps: Sequence[Step], record: WaitRecord) -> list[Step]:
    return [step for step in steps if step.record is not record]


class _PairSink:
    """Keeps the pairs of findings, and nothing else."""

    def __init__(self) -> None:
        self.pairs: set[Pair] = set()

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        """Not kept."""

    def on_finding(self, finding: Finding) -> None:
        """Keep the pair. Who owns a page does not hang on waits for devices."""
        if not finding.misuse:
            self.pairs.add((finding.earlier.op, finding.later.op))

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        """Not kept."""

    def on_fence(self, cost: FenceCost) -> None:
        """Not kept."""

    def on_layer_wait(self, waited_ns: int) -> None:
        """Not kept."""

    def on_transfer(self, cost: TransferCost) -> None:
        """Not kept."""

    def on_records(self, count: int) -> None:
        """Not kept."""

    def on_lost(self, count: int, reason: DropReason) -> None:
        """Not kept."""
