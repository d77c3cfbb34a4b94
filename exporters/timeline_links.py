"""``Links``: the arrows of a timeline, found in a first pass over the records: what waits for what, and what raced.

An arrow belongs to both of its ends, and a timeline is written as it is read: so the arrows must be known before.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.explain import fix
from hicache_obs.costs import Ignore
from hicache_obs.exporters.timeline import Args, Flow, Numbers, ids_text
from hicache_obs.findings import AccessInfo, Finding, Shared
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    AnyRecord,
    Define,
    EventId,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostSync,
    Kernel,
    Memcpy,
    OpId,
    Relocate,
    StreamId,
    Times,
    WaitStream,
)

MAX_FINDINGS: Final = 20_000
"""Findings that are drawn; the rest are counted."""
MAX_EVENTS: Final = 1 << 16
"""Events whose newest record is known; the oldest go first."""
MAX_SOURCES: Final = 8
"""Operations that one wait is drawn to wait for."""
_WORK: Final = (Kernel, Memcpy, GraphReplay, Relocate)


@dataclass(frozen=True, slots=True)
class DrawnFinding:
    """A finding as a timeline shows it: beside its later access.

    Attributes:
        title: Of the track: fingerprint, verdict and hazard.
        name: Of the slice: its two accesses.
        start_ns, end_ns: Of the later access; equal to each other, and when it was issued, if it was not measured.
        flows: Ends of the arrows that join it to its two accesses.
    """

    title: str
    name: str
    start_ns: int
    end_ns: int
    args: Args
    flows: tuple[Flow, ...]


class Links(Ignore):
    """First pass: give it all records in order, then ``finish``; then ask for the arrows of each operation.

    Attributes:
        findings: Those that are drawn.
        more: How many are not.
        measured: Whether any operation has device times.
        arrows: Waits that are drawn as one, counted by what they wait for.
        host_times: Whether the host clock of the records moves at all.
        first_ns: The earliest time in them.
    """

    def __init__(self, numbers: Numbers) -> None:
        self._numbers = numbers
        self._analyzer: Analyzer | None = Analyzer(self)
        self._last: dict[StreamId, OpId] = {}
        self._recorded: OrderedDict[EventId, list[tuple[StreamId, OpId]]] = OrderedDict()
        self._waiting: dict[StreamId, list[tuple[StreamId, OpId]]] = {}
        self._replay: OpId = NO_OP
        self._ops = array("q")
        self._ends = array("q")
        self.first_ns: int | None = None
        self.findings: list[DrawnFinding] = []
        self.more = 0
        self.arrows = 0
        self.measured = False
        self.host_times = False

    def feed(self, records: Sequence[AnyRecord]) -> None:
        """Take in the next records."""
        assert self._analyzer is not None
        self._analyzer.feed(records)
        for record in records:
            if isinstance(record, Define):
                continue
            at_ns = record.start_ns if isinstance(record, Times) else record.host_ns
            if self.first_ns is None:
                self.first_ns = at_ns
            self.host_times |= at_ns != self.first_ns
            self.first_ns = min(self.first_ns, at_ns)
            self.measured |= isinstance(record, Times)
            self._follow(record)

    def finish(self) -> None:
        """All records were there."""
        assert self._analyzer is not None
        self._analyzer.finish()
        self._analyzer = None  # its tables are large, and the second pass needs none of them
        order = np.argsort(np.frombuffer(self._ops, np.int64), kind="stable")
        self._ends = array("q", np.frombuffer(self._ends, np.int64)[order].tobytes())
        self._ops = array("q", np.frombuffer(self._ops, np.int64)[order].tobytes())
        self._last.clear()
        self._recorded.clear()
        self._waiting.clear()

    def of(self, op: OpId) -> Sequence[Flow]:
        """The ends of arrows at operation ``op``; after ``finish``."""
        place = bisect_left(self._ops, op)
        found = []
        while place < len(self._ops) and self._ops[place] == op:
            found.append(Flow(self._ends[place] >> 1, bool(self._ends[place] & 1)))
            place += 1
        return found

    # -- fences ----------------------------------------------------------------------------------------------

    def _follow(self, record: AnyRecord) -> None:
        if isinstance(record, _WORK):
            for _, source in self._waiting.pop(record.stream, ()):
                self._link(source, record.op)
            self._last[record.stream] = record.op
            self._replay = record.op
        elif isinstance(record, EventRecord):
            self._record(record.event, self._covered(record.stream))
        elif isinstance(record, GraphNode):
            if record.event is not None:
                self._record(record.event, [(self._stream_of_replay(), self._replay)])
        elif isinstance(record, EventWait):
            self._wait(record.stream, self._recorded.get(record.event, ()))
        elif isinstance(record, WaitStream):
            self._wait(record.waiter, self._covered(record.on))
        elif isinstance(record, EventSync):
            for _, source in self._recorded.get(record.event, ()):
                self._link(source, record.op)
        elif isinstance(record, HostSync) and record.stream is not None:
            for _, source in self._covered(record.stream):
                self._link(source, record.op)

    def _covered(self, stream: StreamId) -> list[tuple[StreamId, OpId]]:
        """What a marker queued on ``stream`` now comes after: its last operation, and what it waits for since."""
        last = self._last.get(stream)
        return [*([] if last is None else [(stream, last)]), *self._waiting.get(stream, ())][:MAX_SOURCES]

    def _stream_of_replay(self) -> StreamId:
        return next((stream for stream, op in self._last.items() if op == self._replay), StreamId(-1))

    def _record(self, event: EventId, sources: list[tuple[StreamId, OpId]]) -> None:
        self._recorded.pop(event, None)
        self._recorded[event] = sources
        if len(self._recorded) > MAX_EVENTS:
            self._recorded.popitem(last=False)

    def _wait(self, waiter: StreamId, sources: Iterable[tuple[StreamId, OpId]]) -> None:
        queued = self._waiting.setdefault(waiter, [])
        for source in sources:
            if source[0] != waiter and source not in queued and len(queued) < MAX_SOURCES:
                queued.append(source)

    def _link(self, source: OpId, target: OpId) -> None:
        if NO_OP not in (source, target):
            self._arrow(source, target)
            self.arrows += 1

    def _arrow(self, source: OpId, target: OpId) -> None:
        number = self._numbers()
        self._end(source, Flow(number, True))
        self._end(target, Flow(number, False))

    def _end(self, op: OpId, flow: Flow) -> None:
        self._ops.append(op)
        self._ends.append(flow.number << 1 | flow.out)

    # -- findings --------------------------------------------------------------------------------------------

    def on_finding(self, finding: Finding) -> None:
        """See ``AnalysisSink``."""
        if len(self.findings) == MAX_FINDINGS:
            self.more += 1
            return
        earlier, later = finding.earlier, finding.later
        start_ns = _position(later)
        kept = _position(earlier) <= start_ns
        self._arrow(*((earlier.op, later.op) if kept else (later.op, earlier.op)))
        numbers = self._numbers(), self._numbers()
        self._end(later.op, Flow(numbers[0], True))
        self._end(earlier.op, Flow(numbers[1], kept))
        flows = Flow(numbers[0], False), Flow(numbers[1], not kept)
        end_ns = start_ns if later.end_ns is None else later.end_ns
        title = f"{finding.fingerprint} {finding.verdict.value.upper()} {finding.hazard.value}"
        name = f"{earlier.site} op {earlier.op} | {later.site} op {later.op}"
        self.findings.append(DrawnFinding(title, name, start_ns, end_ns, _args(finding), flows))


def _position(access: AccessInfo) -> int:
    """Where an access is drawn."""
    return access.issued_ns if access.start_ns is None else access.start_ns


def _args(finding: Finding) -> Args:
    edge = finding.missing_edge
    args: dict[str, int | str] = {
        "fingerprint": finding.fingerprint,
        "verdict": finding.verdict.value,
        "hazard": finding.hazard.value,
        "proof": finding.proof.value,
        "timing": finding.timing.value,
        "cause": finding.cause.value,
        "earlier_op": finding.earlier.op,
        "later_op": finding.later.op,
        "earlier": _side(finding.earlier),
        "later": _side(finding.later),
        "missing_edge": f"{edge.waiter} waits for {edge.on} up to op {edge.after}, before op {edge.before}",
    }
    for shared in (Shared(finding.space, finding.pool, finding.pages), *finding.also):
        args[f"{shared.space} pages of pool {shared.pool}"] = ids_text(shared.pages)
    if finding.layers[1] < ALL_LAYERS[1]:
        args["layers"] = f"{finding.layers[0]}-{finding.layers[1] - 1}"
    if not finding.misuse:
        args["fix"] = fix(finding)
    return args


def _side(access: AccessInfo) -> str:
    where = f"stream {access.stream}" if access.stream is not None else f"host thread {access.thread}"
    return f"{access.what} {access.group} {access.mode} by {access.site} on {where}"
