"""What ran on each stream and when, as columns: from a trace, or from a profiler's file."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hicache_obs.analyzer.plan import NEVER, plan
from hicache_obs.analyzer.remedy import Timeline
from hicache_obs.analyzer.stalls import Stall
from hicache_obs.costs import FenceCost
from hicache_obs.exporters.html.packed import MAX_EXACT, Int64s, Packed
from hicache_obs.readers.profile import OpKind, Profile
from hicache_obs.records import (
    ALL_LAYERS,
    Access,
    AnyRecord,
    Direction,
    EventWait,
    GraphReplay,
    HostAccess,
    IoBegin,
    IoEnd,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    Relocate,
    Space,
    StreamId,
    ThreadId,
    WaitStream,
)
from hicache_obs.trace import Trace

MAX_LANES: Final = 40
"""Rows of one timeline; further streams are counted."""
MAX_TEXTS: Final = 1 << 16
"""Different names, and different page sets, that one timeline keeps as text."""
MAX_TEXT_CHARACTERS: Final = 1 << 20
MAX_NAME: Final = 160
"""Characters of a name that are kept."""
ISSUE_STEP_NS: Final = 1000
"""Distance of operations that have no times, and are drawn in issue order."""
NOT_KEPT: Final = "(not in this report: too many different ones)"
_SHOWN_RUNS: Final = 6
_WORK: Final = (Kernel, Memcpy, Relocate, GraphReplay)
_VERBS: Final = {Mode.READ: "reads", Mode.WRITE: "writes"}


class Kind(enum.IntEnum):
    """What an operation of a timeline is; the page gives each a colour and a name."""

    KERNEL = 0
    RESTORE = 1
    BACKUP = 2
    MOVE = 3
    GRAPH = 4
    IO = 5
    HOST = 6
    MEMSET = 7
    OTHER = 8


class Basis(str, enum.Enum):
    """Where the times come from."""

    MEASURED = "measured"
    PLANNED = "planned"
    """By the durations that a scenario states."""
    ISSUED = "issued"
    """There are none: an operation's place is its number in issue order."""


_KINDS: Final = {
    Direction.HOST_TO_DEVICE: Kind.RESTORE,
    Direction.DEVICE_TO_HOST: Kind.BACKUP,
    Direction.DEVICE_TO_DEVICE: Kind.MOVE,
}
_PROFILE_KINDS: Final = {
    OpKind.KERNEL: Kind.KERNEL,
    OpKind.HOST_TO_DEVICE: Kind.RESTORE,
    OpKind.DEVICE_TO_HOST: Kind.BACKUP,
    OpKind.DEVICE_TO_DEVICE: Kind.MOVE,
    OpKind.MEMSET: Kind.MEMSET,
    OpKind.GRAPH: Kind.GRAPH,
    OpKind.OTHER_COPY: Kind.OTHER,
}


@dataclass(frozen=True, slots=True, eq=False)
class Drawing:
    """A timeline.

    Attributes:
        lanes: Rows, top to bottom: streams, then host threads and I/O.
        ops: ``lane``, ``kind``, ``start``, ``end`` (nanoseconds since ``zero_ns``), ``op``, ``group``, ``low`` and
            ``high`` (layers, both 0 if not stated), ``name`` and ``access`` (indices into ``names`` and ``accesses``):
            each ``(n,) int64``, sorted by lane, kind, start and end.
        waits: ``lane``, ``start``, ``end``, ``avoidable`` and ``op`` of the times that a stream or thread stood still.
        names, accesses: Texts.
        labels: What the source calls single operations, if not by their number.
        mark: What stands before an operation's number in messages.
        groups: What ``group`` counts; empty if that is rounds and transfers.
        basis: Where the times come from.
        zero_ns: Time 0 of the drawing on the trace's clock.
        left_out: What is not drawn, in words for the user.
    """

    lanes: Sequence[str]
    ops: Mapping[str, Int64s]
    waits: Mapping[str, Int64s]
    names: Sequence[str]
    accesses: Sequence[str]
    labels: Mapping[OpId, str]
    mark: str
    groups: str
    basis: Basis
    zero_ns: int
    left_out: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.ops["op"])

    @property
    def span_ns(self) -> int:
        """End of the last thing drawn."""
        return max(int(self.ops["end"].max(initial=0)), int(self.waits["end"].max(initial=0)), 1)

    def places(self, wanted: Iterable[OpId]) -> dict[OpId, int]:
        """Row in ``ops`` of each operation that is drawn; of several rows the first."""
        numbers = np.array(sorted({int(op) for op in wanted}), np.int64)
        rows = np.flatnonzero(np.isin(self.ops["op"], numbers))
        return {OpId(op): row for op, row in zip(self.ops["op"][rows].tolist()[::-1], rows.tolist()[::-1], strict=True)}

    def as_json(self) -> dict[str, Any]:
        """What ``chart.js`` draws."""
        packed = Packed()
        for part, columns, sorted_by in (("ops", self.ops, "start"), ("waits", self.waits, "start")):
            for name in ("lane", "kind", sorted_by, "op", "group"):
                if name in columns:
                    packed.add(f"{part}.{name}", columns[name], delta=True)
            packed.add(f"{part}.length", columns["end"] - columns["start"])
            for name in ("low", "high", "name", "access", "avoidable"):
                if name in columns:
                    packed.add(f"{part}.{name}", columns[name])
        return {
            "lanes": list(self.lanes),
            "names": list(self.names),
            "accesses": list(self.accesses),
            "labels": {str(op): text for op, text in self.labels.items()},
            "mark": self.mark,
            "groups": self.groups,
            "basis": self.basis.value,
            "span": self.span_ns,
            "packed": packed.as_json(),
        }


def _longs() -> array[int]:
    return array("q")


@dataclass(slots=True)
class _Rows:
    """Columns, while a trace is gone through."""

    lane: array[int] = field(default_factory=_longs)
    kind: array[int] = field(default_factory=_longs)
    start: array[int] = field(default_factory=_longs)
    end: array[int] = field(default_factory=_longs)
    op: array[int] = field(default_factory=_longs)
    group: array[int] = field(default_factory=_longs)
    low: array[int] = field(default_factory=_longs)
    high: array[int] = field(default_factory=_longs)
    name: array[int] = field(default_factory=_longs)
    access: array[int] = field(default_factory=_longs)


class _Texts:
    """Numbers for texts, as long as there is room; 0 is for those that came too late."""

    def __init__(self) -> None:
        self.texts = [NOT_KEPT]
        self._index: dict[str, int] = {}
        self._left = MAX_TEXT_CHARACTERS

    def __call__(self, text: str) -> int:
        text = text[:MAX_NAME]
        found = self._index.get(text, 0)
        if not found and len(self.texts) < MAX_TEXTS and len(text) <= self._left:
            found = self._index[text] = len(self.texts)
            self._left -= len(text)
            self.texts.append(text)
        return found


def draw_trace(
    trace: Trace, times: Timeline, fences: Sequence[FenceCost], stalls: Sequence[Stall], *, first: Iterable[OpId] = ()
) -> Drawing:
    """The timeline of a trace.

    Args:
        trace: Records.
        times: Of ``trace``; without any, operations are drawn in issue order.
        fences: What its fences cost.
        stalls: Waits that could go or shrink; used where times are planned.
        first: Operations whose streams are drawn whatever else is not.
    """
    made = _FromTrace(trace, times)
    for record in trace:
        made.take(record)
    waits = made.measured_waits(fences) if times.measured else made.planned_waits(stalls)
    left_out = []
    if made.untimed:
        left_out.append(f"{made.untimed:,} operations without device times are not on the timeline")
    basis = Basis.ISSUED if not times.spans else Basis.MEASURED if times.measured else Basis.PLANNED
    labels = trace.labels if len(trace.labels) < MAX_TEXTS else {}
    return _arranged(
        [made.lane_name(lane) for lane in made.lanes], _columns(made.rows), waits, made.names.texts,
        made.accesses.texts, labels, "op ", "", basis, left_out, first,
    )  # fmt: skip


class _FromTrace:
    """Goes through one trace."""

    def __init__(self, trace: Trace, times: Timeline) -> None:
        self._trace = trace
        self._times = times
        self.lanes: dict[tuple[str, int], int] = {}
        self.rows = _Rows()
        self.names = _Texts()
        self.accesses = _Texts()
        self.untimed = 0
        self._issued = 0
        self._known: dict[tuple[Any, ...], tuple[int, tuple[Access, ...]]] = {}
        self._io: dict[int, int] = {}

    def lane_name(self, lane: tuple[str, int]) -> str:
        what, number = lane
        names = self._trace.names
        if what == "stream":
            return names.stream(StreamId(number))
        return names.thread(ThreadId(number)) if what == "thread" else "storage and network"

    def take(self, record: AnyRecord) -> None:
        """The next record."""
        if isinstance(record, _WORK):
            self._work(record)
        elif isinstance(record, HostAccess):
            lane = self._lane("thread", record.thread)
            self._add(record, lane, Kind.HOST, (record.host_ns, record.host_ns), 0)
        elif isinstance(record, IoBegin):
            self._io[record.io] = len(self.rows.op)
            self._add(record, self._lane("io", 0), Kind.IO, (record.host_ns, record.host_ns), record.io)
        elif isinstance(record, IoEnd) and record.io in self._io and self._times.measured:
            row = self._io.pop(record.io)
            self.rows.end[row] = max(self.rows.start[row], record.host_ns)

    def _work(self, record: Kernel | Memcpy | Relocate | GraphReplay) -> None:
        kind = Kind.KERNEL
        group = 0 if isinstance(record, Relocate) else record.group
        if isinstance(record, Memcpy):
            kind = _KINDS[record.direction]
        elif isinstance(record, Relocate):
            kind = Kind.MOVE
        elif isinstance(record, GraphReplay):
            kind = Kind.GRAPH
        self._add(record, self._lane("stream", record.stream), kind, None, group)

    def _lane(self, what: str, number: int) -> int:
        return self.lanes.setdefault((what, number), len(self.lanes))

    def _add(
        self,
        record: Kernel | Memcpy | Relocate | GraphReplay | HostAccess | IoBegin,
        lane: int,
        kind: Kind,
        called: tuple[int, int] | None,
        group: int,
    ) -> None:
        span = self._times.spans.get(record.op, called if self._times.measured else None)
        if not self._times.spans:
            span = (self._issued * ISSUE_STEP_NS, self._issued * ISSUE_STEP_NS + ISSUE_STEP_NS // 2)
            self._issued += 1
        if span is None or span[1] < span[0]:
            self.untimed += 1
            span = None
        low, high = record.layers if record.layers != ALL_LAYERS and record.layers[1] < ALL_LAYERS[1] else (0, 0)
        rows = self.rows
        rows.lane.append(lane if span is not None else -1)
        rows.kind.append(kind)
        rows.start.append(span[0] if span is not None else 0)
        rows.end.append(span[1] if span is not None else 0)
        rows.op.append(record.op)
        rows.group.append(group)
        rows.low.append(low)
        rows.high.append(high)
        rows.name.append(self.names(self._trace.names.site(record.site)))
        rows.access.append(self._access(record.accesses))

    def _access(self, accesses: tuple[Access, ...]) -> int:
        key = tuple((access.space, access.mode, access.pool, id(access.ids)) for access in accesses)
        known = self._known.get(key)
        if known is None:
            text = "; ".join(self._touched(access) for access in accesses) or "touches no page"
            known = self.accesses(text), accesses  # the accesses are kept, so that no other array takes their ids
            if len(self._known) < MAX_TEXTS:
                self._known[key] = known
        return known[0]

    def _touched(self, access: Access) -> str:
        verb = _VERBS[access.mode]
        if access.space is Space.BUFFER:
            return f"{verb} {', '.join(self._trace.names.buffer(int(number)) for number in access.ids[:_SHOWN_RUNS])}"
        pool = f" of pool {access.pool}" if access.pool else ""
        return f"{verb} {access.space.name.lower()} page{'s' * (len(access.ids) != 1)} {_runs(access.ids)}{pool}"

    def measured_waits(self, fences: Sequence[FenceCost]) -> dict[str, list[int]]:
        """Waits on streams that have device times; with what could have been avoided, where it is known."""
        costs = {cost.op: cost for cost in fences}
        spans = self._times.spans
        found: dict[str, list[int]] = {name: [] for name in ("lane", "start", "end", "avoidable", "op")}
        for record in self._trace:
            if not isinstance(record, EventWait | WaitStream):
                continue
            span = spans.get(record.op)
            lane = self.lanes.get(("stream", record.stream if isinstance(record, EventWait) else record.waiter))
            if span is None or lane is None:
                continue
            cost = costs.get(record.op)
            start = span[0] if cost is None else span[1] - cost.waited_ns
            if start < span[1]:
                _put(found, lane, start, span[1], 0 if cost is None else cost.avoidable_ns, record.op)
        return found

    def planned_waits(self, stalls: Sequence[Stall]) -> dict[str, list[int]]:
        """Waits of a plan."""
        found: dict[str, list[int]] = {name: [] for name in ("lane", "start", "end", "avoidable", "op")}
        if not self._times.spans:
            return found
        reported = {stall.at: stall for stall in stalls}
        for wait in plan(self._trace).waits:
            if not wait.blocked_ns or wait.awaited_ns >= NEVER:
                continue
            lane = (
                self._lane("thread", wait.record.thread) if wait.stream is None else self._lane("stream", wait.stream)
            )
            stall, avoidable = reported.get(wait.record.op), 0
            if stall is not None:
                needed = self._times.spans.get(stall.needed) if stall.needed is not None else None
                since = wait.free_ns if needed is None else max(needed[1], wait.free_ns)
                avoidable = max(0, wait.awaited_ns - since)
            _put(found, lane, wait.free_ns, wait.awaited_ns, avoidable, wait.record.op)
        return found


def draw_profile(profile: Profile, *, first: Iterable[OpId] = ()) -> Drawing:
    """The timeline of a profiler's file; operations are numbered by their rows in ``Profile.ops``.

    A profile does not say how long a stream stood still, so there are no waits.
    """
    ops = profile.ops
    timed = (ops.start_ns >= 0) & (ops.end_ns >= ops.start_ns)
    texts = _Texts()
    used = np.unique(ops.name[timed])
    table = np.zeros(max(len(profile.names), 1), np.int64)
    for index in used.tolist():
        table[index] = texts(profile.names[index])
    kinds = np.full(max(_PROFILE_KINDS) + 1, Kind.OTHER, np.int64)
    for theirs, ours in _PROFILE_KINDS.items():
        kinds[theirs] = ours
    lanes = _stream_names(profile)
    rows = np.arange(len(ops), dtype=np.int64)
    nothing = np.zeros(len(ops), np.int64)
    columns = {
        "lane": np.where(timed, ops.stream, -1), "kind": kinds[ops.kind], "start": ops.start_ns, "end": ops.end_ns,
        "op": rows, "group": ops.correlation, "low": nothing, "high": nothing,
        "name": table[ops.name], "access": nothing,
    }  # fmt: skip
    untimed = int((~timed).sum())
    left_out = [f"{untimed:,} operations without usable times are not on the timeline"] if untimed else []
    left_out.append("a profile does not say how long a stream stood still, so no waits are drawn")
    empty: dict[str, list[int]] = {name: [] for name in ("lane", "start", "end", "avoidable", "op")}
    return _arranged(
        lanes, columns, empty, texts.texts, ["a profile does not say which pages"], {}, "row ", "correlation id",
        Basis.MEASURED, left_out, first,
    )  # fmt: skip


def _stream_names(profile: Profile) -> list[str]:
    """Names of the streams, without what is the same for all of them."""
    processes = len({stream.process for stream in profile.streams}) > 1
    devices = len({stream.device for stream in profile.streams}) > 1
    return [
        f"process {stream.process} " * processes + f"GPU {stream.device} " * devices + f"stream {stream.number}"
        for stream in profile.streams
    ]


def _arranged(
    lanes: Sequence[str],
    ops: Mapping[str, array[int] | Int64s],
    waits: Mapping[str, Sequence[int]],
    names: Sequence[str],
    accesses: Sequence[str],
    labels: Mapping[OpId, str],
    mark: str,
    groups: str,
    basis: Basis,
    left_out: list[str],
    first: Iterable[OpId],
) -> Drawing:
    """Sorted columns of the lanes that are drawn, from time 0."""
    columns = {name: np.asarray(values, np.int64) for name, values in ops.items()}
    stops = {name: np.asarray(values, np.int64) for name, values in waits.items()}
    beyond = _hide_beyond(columns)
    _hide_beyond(stops)
    if beyond:
        left_out.append(f"{beyond:,} operations with a number or a time too large to draw are not on the timeline")
    keep = _kept(len(lanes), columns, first)
    drawn = columns["lane"][columns["lane"] >= 0]
    hidden = drawn[~np.isin(drawn, keep)]
    if len(hidden):
        streams = len(np.unique(hidden))
        left_out.append(
            f"{streams:,} more streams with {len(hidden):,} operations are not on the timeline, only judged"
        )
    place = np.full(len(lanes) + 1, -1, np.int64)  # the last one is for lane -1
    place[keep] = np.arange(len(keep))
    columns["lane"], stops["lane"] = place[columns["lane"]], place[stops["lane"]]
    columns = {name: values[columns["lane"] >= 0] for name, values in columns.items()}
    stops = {name: values[stops["lane"] >= 0] for name, values in stops.items()}
    starts = [int(part["start"].min()) for part in (columns, stops) if len(part["start"])]
    zero = min(starts, default=0)
    for part in (columns, stops):
        part["start"], part["end"] = part["start"] - zero, part["end"] - zero
    order = np.lexsort((columns["end"], columns["start"], columns["kind"], columns["lane"]))
    behind = np.lexsort((stops["end"], stops["start"], stops["lane"]))
    return Drawing(
        [lanes[lane][:MAX_NAME] for lane in keep],
        {name: values[order] for name, values in columns.items()},
        {name: values[behind] for name, values in stops.items()},
        names, accesses, labels, mark, groups, basis, zero, tuple(left_out),
    )  # fmt: skip


def _hide_beyond(columns: dict[str, Int64s]) -> int:
    """Take what a browser cannot hold exactly off its lane; a time counts from the middle one. How many there were."""
    shown = columns["lane"] >= 0
    if not shown.any():
        return 0
    middle = int(np.median(columns["start"][shown]))
    exact = (columns["start"] >= middle - MAX_EXACT // 4) & (columns["end"] <= middle + MAX_EXACT // 4)
    for name in ("op", "group", "low", "high", "avoidable"):
        if name in columns:
            exact &= (columns[name] > -MAX_EXACT) & (columns[name] < MAX_EXACT)
    columns["lane"] = np.where(exact, columns["lane"], -1)
    return int((shown & ~exact).sum())


def _kept(count: int, ops: Mapping[str, Int64s], first: Iterable[OpId]) -> list[int]:
    """Lanes to draw: those of ``first``, then the busiest, in their own order."""
    busy = np.bincount(ops["lane"][ops["lane"] >= 0], minlength=count)
    wanted = np.array(sorted({int(op) for op in first}), np.int64)
    lanes = ops["lane"][np.isin(ops["op"], wanted)]
    urgent = np.zeros(count, bool)
    urgent[lanes[lanes >= 0]] = True
    best = np.lexsort((np.arange(count), -busy, ~urgent))[:MAX_LANES]
    return sorted(lane for lane in best.tolist() if busy[lane])


def _runs(ids: Int64s) -> str:
    """``3-5, 9`` for the ids; the first few runs."""
    ordered = np.sort(ids)
    breaks = np.flatnonzero(np.diff(ordered) != 1) + 1
    parts = np.split(ordered, breaks[:_SHOWN_RUNS])
    if not len(ordered):
        return "none"
    texts = [str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in parts[:_SHOWN_RUNS]]
    return ", ".join(texts) + (f", ... ({len(ordered):,} in all)" if len(breaks) >= _SHOWN_RUNS else "")


def _put(columns: dict[str, list[int]], lane: int, start: int, end: int, avoidable: int, op: int) -> None:
    for name, value in zip(("lane", "start", "end", "avoidable", "op"), (lane, start, end, avoidable, op), strict=True):
        columns[name].append(value)


def _columns(rows: _Rows) -> dict[str, array[int]]:
    """The columns of ``rows`` by name."""
    return {name: getattr(rows, name) for name in rows.__slots__}
