"""A history as a profiler would have seen it: ``profiled`` runs it on a made-up device and notes calls and device work.

``nsys_writer`` and ``kineto_writer`` make files of the result. The device keeps every order that the history has and no
other, so a pair that nothing orders may run either way.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from hicache_obs.records import (
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphReplay,
    HostSync,
    Kernel,
    Memcpy,
    OpId,
    Relocate,
    StreamId,
    StreamKind,
    ThreadId,
    Times,
    WaitStream,
)

PROFILED: Final = (
    Define, Kernel, Memcpy, Relocate, GraphReplay, EventRecord, EventWait, WaitStream, EventQuery, EventSync, HostSync,
)  # fmt: skip
"""Kinds that a profiler can see. A replay's entries must not be in the history."""
_CALL_NS: Final = 4_000
_GAP_NS: Final = 20_000
_STEP_NS: Final = 10_000
"""All times are multiples of this: a format that cuts off less says the same."""


@dataclass(frozen=True, slots=True)
class SeenCall:
    """One host API call. ``result`` is 0 for success, 600 for a query whose event was not reached."""

    correlation: int
    name: str
    thread: int
    start_ns: int
    end_ns: int
    result: int = 0


@dataclass(frozen=True, slots=True)
class SeenOp:
    """One device operation; those of one graph replay share a correlation id."""

    correlation: int
    stream: int
    start_ns: int
    end_ns: int
    direction: Direction | None
    in_graph: bool = False


@dataclass(frozen=True, slots=True)
class SeenRecord:
    """One record of an event. ``number`` is unique; the event's id is not."""

    correlation: int
    stream: int
    event: int
    number: int
    done_ns: int


@dataclass(frozen=True, slots=True)
class SeenSync:
    """One wait, query or synchronisation; ``event`` and ``of`` (a ``SeenRecord``) are those it refers to."""

    correlation: int
    name: str
    stream: int | None
    event: int | None
    of: SeenRecord | None


@dataclass(frozen=True, slots=True)
class SeenRange:
    """The range around a launch; its payload is the operation id."""

    thread: int
    start_ns: int
    end_ns: int
    op: int


@dataclass(slots=True)
class Seen:
    """Everything a profiler saw of one process, and the history as it then happened.

    Attributes:
        history: The records, with the answers that queries really got; without device times.
        times: Start and end of each operation.
        op_of: Operation by correlation id.
    """

    process: int
    calls: list[SeenCall] = field(default_factory=list)
    ops: list[SeenOp] = field(default_factory=list)
    records: list[SeenRecord] = field(default_factory=list)
    syncs: list[SeenSync] = field(default_factory=list)
    ranges: list[SeenRange] = field(default_factory=list)
    streams: dict[int, StreamKind] = field(default_factory=dict)
    history: list[AnyRecord] = field(default_factory=list)
    times: dict[OpId, tuple[int, int]] = field(default_factory=dict)
    op_of: dict[int, OpId] = field(default_factory=dict)

    def timed(self, error_ns: int) -> list[AnyRecord]:
        """The history with its device times, as exact as ``error_ns``."""
        found: list[AnyRecord] = []
        for record in self.history:
            found.append(record)
            span = self.times.get(record.op)
            if span is not None and isinstance(record, (Kernel, Memcpy, Relocate, GraphReplay)):
                found.append(Times(record.op, record.thread, span[1], *span, error_ns))
        return found

    def without(self, **lost: Iterable[Any]) -> Seen:
        """The same, with rows left out: ``seen.without(records=[seen.records[0]])``."""
        found = replace(self)
        for name, rows in lost.items():
            gone = list(rows)
            setattr(found, name, [row for row in getattr(self, name) if row not in gone])
        return found


def profiled(
    records: Iterable[AnyRecord],
    *,
    seed: int,
    process: int = 4242,
    start_ns: int = 1_000_000_000,
    first_correlation: int = 100,
    threads: int = 2,
    kinds: bool = True,
    graph_nodes: int = 2,
) -> Seen:
    """What a profiler sees of a history.

    Args:
        records: Of kinds in ``PROFILED``; others, and waits for events that were never recorded, are left out.
        seed: Of durations and delays.
        process: Process number.
        start_ns: Host clock at the beginning.
        first_correlation: Of the first call.
        threads: 1 lets one thread make all calls.
        kinds: False makes all streams non-blocking.
        graph_nodes: Device operations per graph replay; 0 for one row without its contents.
    """
    device = _Device(random.Random(seed), process, start_ns, first_correlation, threads, kinds, graph_nodes)
    for record in records:
        device.take(record)
    return device.seen


class _Device:
    """Runs one history."""

    def __init__(
        self, rng: random.Random, process: int, now: int, correlation: int, threads: int, kinds: bool, nodes: int
    ) -> None:
        self._rng = rng
        self._now = now
        self._correlation = correlation
        self._threads = threads
        self._kinds = kinds
        self._nodes = nodes
        self._ready: dict[int, int] = {}
        self._graphs: dict[int, int] = {}
        self._current: dict[int, SeenRecord] = {}
        self._fresh = 1 << 20
        """Events of ``WaitStream``, which no history names."""
        self.seen = Seen(process)
        self._takers: dict[type[AnyRecord], Callable[[Any], None]] = {
            Define: self._define, Kernel: self._work, Memcpy: self._work, Relocate: self._work, GraphReplay: self._work,
            EventRecord: self._record, EventWait: self._wait, WaitStream: self._wait_stream, EventQuery: self._query,
            EventSync: self._event_sync, HostSync: self._host_sync,
        }  # fmt: skip

    def take(self, record: AnyRecord) -> None:
        """The next step of the history."""
        taker = self._takers.get(type(record))
        if taker is None or (isinstance(record, GraphReplay) and record.nodes):
            return
        taker(_changed(record, thread=ThreadId(record.thread % self._threads), host_ns=self._now))

    def _define(self, record: Define) -> None:
        if record.space is DefineSpace.STREAM:
            kind = StreamKind(record.value) if self._kinds else StreamKind.NONBLOCKING
            record = _changed(record, value=kind)
            self.seen.streams[record.id] = kind
        self.seen.history.append(record)

    def _call(self, record: AnyRecord, name: str, until: int = 0, result: int = 0) -> int:
        self._correlation += 1
        start = self._now
        end = max(start + _CALL_NS, until)
        call = SeenCall(self._correlation, name, record.thread, start, end, result)
        self.seen.calls.append(call)
        self._now = -(-(end + self._rng.choice((0, 1, 20)) * _GAP_NS) // _STEP_NS) * _STEP_NS
        return self._correlation

    def _free(self, stream: int) -> int:
        """When ``stream`` may begin the next thing: behind its own, and behind what the default stream implies."""
        kind = self.seen.streams.get(stream, StreamKind.NONBLOCKING)
        behind = [self._ready.get(stream, 0)]
        if kind is not StreamKind.NONBLOCKING:
            partner = StreamKind.BLOCKING if kind is StreamKind.LEGACY else StreamKind.LEGACY
            behind += [self._ready.get(other, 0) for other, of in self.seen.streams.items() if of is partner]
        return max(behind)

    def _work(self, record: Kernel | Memcpy | Relocate | GraphReplay) -> None:
        seen = self.seen
        graph = isinstance(record, GraphReplay)
        direction = record.direction if isinstance(record, Memcpy) else None
        copies = isinstance(record, (Memcpy, Relocate))
        if isinstance(record, Relocate):
            direction = Direction.DEVICE_TO_DEVICE
        name = "cudaGraphLaunch" if graph else "cudaMemcpyAsync" if copies else "cudaLaunchKernel"
        begin = self._now
        correlation = self._call(record, name)
        behind = max(self._free(record.stream), begin + _STEP_NS)
        if isinstance(record, GraphReplay):
            behind = max(behind, self._graphs.get(record.graph, 0))
        start = behind + self._rng.choice((0, 1, 8)) * _STEP_NS
        end = start + self._rng.randint(1, 12) * _STEP_NS
        self._ready[record.stream] = end
        if isinstance(record, GraphReplay):
            self._graphs[record.graph] = end
        entries = max(self._nodes, 1) if graph else 1
        step = (end - start) // entries
        for entry in range(entries):
            last = end if entry == entries - 1 else start + (entry + 1) * step
            seen.ops.append(SeenOp(correlation, record.stream, start + entry * step, last, direction, graph))
        seen.times[record.op], seen.op_of[correlation] = (start, end), record.op
        seen.ranges.append(SeenRange(record.thread, begin - 1000, begin + _CALL_NS + 1000, record.op))
        seen.history.append(record)

    def _mark(self, record: AnyRecord, event: int, stream: int) -> SeenRecord:
        correlation = self._call(record, "cudaEventRecord")
        done = self._ready[stream] = self._free(stream)
        mark = SeenRecord(correlation, stream, event, len(self.seen.records) + 1, done)
        self.seen.records.append(mark)
        self._current[event] = mark
        return mark

    def _record(self, record: EventRecord) -> None:
        self._mark(record, record.event, record.stream)
        self.seen.history.append(record)

    def _wait_for(self, record: AnyRecord, stream: StreamId, event: int, of: SeenRecord) -> None:
        correlation = self._call(record, "cudaStreamWaitEvent")
        self.seen.syncs.append(SeenSync(correlation, "cudaStreamWaitEvent", stream, event, of))
        self._ready[stream] = max(self._free(stream), of.done_ns)
        self.seen.history.append(record)

    def _wait(self, record: EventWait) -> None:
        of = self._current.get(record.event)
        if of is not None:
            self._wait_for(record, record.stream, record.event, of)

    def _wait_stream(self, record: WaitStream) -> None:
        self._fresh += 1
        self._wait_for(record, record.waiter, self._fresh, self._mark(record, self._fresh, record.on))

    def _query(self, record: EventQuery) -> None:
        of = self._current.get(record.event)
        if of is None:
            return
        result = of.done_ns <= self._now
        correlation = self._call(record, "cudaEventQuery", result=0 if result else 600)
        self.seen.syncs.append(SeenSync(correlation, "cudaEventQuery", None, record.event, of))
        self.seen.history.append(_changed(record, result=result))

    def _event_sync(self, record: EventSync) -> None:
        of = self._current.get(record.event)
        if of is not None:
            correlation = self._call(record, "cudaEventSynchronize", until=of.done_ns)
            self.seen.syncs.append(SeenSync(correlation, "cudaEventSynchronize", None, record.event, of))
            self.seen.history.append(record)

    def _host_sync(self, record: HostSync) -> None:
        if record.stream is None:
            name, until = "cudaDeviceSynchronize", max(self._ready.values(), default=0)
        else:
            name, until = "cudaStreamSynchronize", self._ready.get(record.stream, 0)
        correlation = self._call(record, name, until=until)
        self.seen.syncs.append(SeenSync(correlation, name, record.stream, None, None))
        self.seen.history.append(record)


def _changed(record: Any, **fields: Any) -> Any:
    """The record with other values in some fields; msgspec's structs and the dataclasses in their place alike."""
    names = getattr(record, "__struct_fields__", None) or record.__dataclass_fields__
    return type(record)(**{**{name: getattr(record, name) for name in names}, **fields})
