"""A profiler's file as columns: device operations, host API calls, ranges. What ``kineto`` and ``nsys`` fill in.

Nothing is interpreted here but names of API calls: which calls order something (``CALLS``). ``profile_records``
makes a trace of a profile, ``preflight`` says what can be concluded from it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache_obs.records import StreamKind

Int64s = npt.NDArray[np.int64]

UNKNOWN: Final = -1
"""In a column of indices, ids or results: the file does not say."""
NO_ID: Final = (1 << 32) - 1
"""What CUPTI writes for no stream, device or context."""


class OpKind(enum.IntEnum):
    """What a device operation is."""

    KERNEL = 0
    HOST_TO_DEVICE = 1
    DEVICE_TO_HOST = 2
    DEVICE_TO_DEVICE = 3
    MEMSET = 4
    GRAPH = 5
    """A whole graph replay in one row: what runs inside is not in the file."""
    OTHER_COPY = 6
    """A copy that touches no KV pool: host to host, unified-memory migration, array copies."""


class CallKind(enum.IntEnum):
    """What a host API call does to the order of things."""

    LAUNCH = 0
    """Enqueues device operations: those with its correlation id."""
    EVENT_RECORD = 1
    STREAM_WAIT = 2
    EVENT_QUERY = 3
    EVENT_SYNC = 4
    STREAM_SYNC = 5
    DEVICE_SYNC = 6
    STREAM_QUERY = 7
    BLOCKING_COPY = 8
    """Launches a copy, and may have waited for it."""


LAUNCHING: Final = (CallKind.LAUNCH, CallKind.BLOCKING_COPY)

_SUFFIXES: Final = {
    "EventRecord": CallKind.EVENT_RECORD,
    "EventRecordWithFlags": CallKind.EVENT_RECORD,
    "StreamWaitEvent": CallKind.STREAM_WAIT,
    "EventQuery": CallKind.EVENT_QUERY,
    "EventSynchronize": CallKind.EVENT_SYNC,
    "StreamSynchronize": CallKind.STREAM_SYNC,
    "StreamQuery": CallKind.STREAM_QUERY,
    "DeviceSynchronize": CallKind.DEVICE_SYNC,
    "CtxSynchronize": CallKind.DEVICE_SYNC,
    "ThreadSynchronize": CallKind.DEVICE_SYNC,
}
CALLS: Final = {prefix + suffix: kind for suffix, kind in _SUFFIXES.items() for prefix in ("cuda", "cu", "hip")}
"""API calls that record, wait or synchronise, by name without version suffix. Everything else can only launch."""
_LAUNCH_HINTS: Final = ("Launch", "Memcpy", "Memset")


def call_kind(name: str) -> CallKind | None:
    """What API call ``name`` does; ``None`` if it neither orders nor launches anything.

    Names of an export end in ``_v3020`` and the like, and per-thread default-stream variants in ``_ptsz`` or
    ``_ptds``; neither changes what the call does. A copy that is not asynchronous may wait for its end.
    """
    base = name.split("_", 1)[0]
    kind = CALLS.get(base)
    if kind is not None:
        return kind
    if base.endswith("LaunchHostFunc") or not any(hint in base for hint in _LAUNCH_HINTS):
        return None  # a host function is no device operation
    if "Graph" in base and "Launch" not in base:
        return None  # makes or changes a graph's entry; it runs when the graph is launched
    return CallKind.BLOCKING_COPY if "Memcpy" in base and "Async" not in base else CallKind.LAUNCH


@dataclass(slots=True)
class Ops:
    """Device operations, one row each, in file order.

    Attributes:
        start_ns, end_ns: Device times on the file's host clock.
        kind: An ``OpKind`` each.
        stream: Index into ``Profile.streams``.
        call: Index into ``Profile.calls`` of the call that launched it, ``UNKNOWN`` if the file has none.
        correlation: Correlation id the profiler gave, for messages.
        size_bytes: Bytes moved, 0 for kernels.
        name: Index into ``Profile.names``.
        pageable: 1 where one side is pageable host memory.
    """

    start_ns: Int64s
    end_ns: Int64s
    kind: Int64s
    stream: Int64s
    call: Int64s
    correlation: Int64s
    size_bytes: Int64s
    name: Int64s
    pageable: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(slots=True)
class Calls:
    """Host API calls that launch, record, wait or synchronise, in file order.

    Attributes:
        start_ns, end_ns: Of the call, host clock.
        thread: Index into ``Profile.threads``.
        kind: A ``CallKind`` each.
        correlation: Unique per process.
        result: 0 for success, ``UNKNOWN`` if the file does not say.
        stream: The stream it acts on, index into ``Profile.streams``; ``UNKNOWN`` if the file does not say.
        record: Of a wait, query or event sync: index of the record call it refers to, or a ``Pairing``.
    """

    start_ns: Int64s
    end_ns: Int64s
    thread: Int64s
    kind: Int64s
    correlation: Int64s
    result: Int64s
    stream: Int64s
    record: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)


class Pairing(enum.IntEnum):
    """Why ``Calls.record`` holds no index."""

    NO_ROW = -1
    """The file has the call and nothing about its event or stream."""
    UNRESOLVED = -2
    """The file has a row for it that does not name a record."""
    FUTURE = -3
    """It names a record that was made after it, which cannot be."""
    BEFORE_FILE = -4
    """The record was made before the file begins: it orders nothing that is in the file."""
    NOT_APPLICABLE = -5


@dataclass(slots=True)
class Ranges:
    """Annotated host ranges (NVTX push/pop and start/end, ``record_function``), in file order.

    Attributes:
        start_ns, end_ns: Host clock; a range that was never closed ends with the file.
        thread: Index into ``Profile.threads``.
        text: Index into ``Profile.names``.
        domain: Index into ``Profile.names`` of its domain, ``UNKNOWN`` for the default one.
        payload: Scalar integer payload, ``UNKNOWN`` without one.
    """

    start_ns: Int64s
    end_ns: Int64s
    thread: Int64s
    text: Int64s
    domain: Int64s
    payload: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)


@dataclass(frozen=True, slots=True)
class StreamInfo:
    """One stream. ``number`` is the profiler's, unique in (process, device, context).

    Device and number are ``UNKNOWN`` where the file does not say: such a stream has no order.
    """

    process: int
    device: int
    context: int
    number: int
    kind: StreamKind | None
    """``None``: the file does not say."""

    @property
    def text(self) -> str:
        """Name in messages."""
        device, number = ("unknown" if value < 0 else value for value in (self.device, self.number))
        return f"device {device} stream {number}"


@dataclass(frozen=True, slots=True)
class ThreadInfo:
    """One host thread."""

    process: int
    number: int


ELSEWHERE: Final = "device synchronisations of another context than that of any operation"
"""A loss: which device they waited for is then not sure."""


@dataclass(slots=True)
class Facts:
    """What the reader noticed that decides what can be concluded. Counts, unless said otherwise.

    Attributes:
        producer: Program and version that wrote the file.
        schema: Version of its format.
        sync_rows: Rows about synchronisation.
        error_ns: Largest rounding of a device time in this format.
        dropped: Operations without usable times (zero, or end before start).
        same_stream_overlaps: Neighbours of one stream whose times overlap.
        overlap_ns: The longest of them.
        graph_rows: Graph replays given as one row.
        lost_ranges: An NVTX domain was created and no range is in the file.
        event_trace: The tool's event tracing was on, which can serialise streams; ``None`` if the file does not say.
        batch_copies: Copy rows that stand for several copies.
        outside: Device operations whose launch is not in the file.
        unseen: Launches whose operation is not in the file.
        mixed_ids: Correlation ids that calls of several processes share, where device rows name no process.
        lost: What else the file holds or lacks that may hide work or its order: in words, with counts.
    """

    producer: str
    schema: str
    sync_rows: int = 0
    error_ns: int = 0
    dropped: int = 0
    same_stream_overlaps: int = 0
    overlap_ns: int = 0
    graph_rows: int = 0
    lost_ranges: bool = False
    event_trace: bool | None = None
    batch_copies: int = 0
    outside: int = 0
    unseen: int = 0
    mixed_ids: int = 0
    lost: list[str] = field(default_factory=list)

    def lose(self, count: int, text: str) -> None:
        """``count`` rows of the kind ``text`` are not what they should be; none is no loss."""
        if count:
            self.lost.append(f"{count:,} {text}")


@dataclass(slots=True)
class Profile:
    """One profiler file. Index columns refer to the lists here.

    Attributes:
        gaps: Process and correlation id of records, waits and synchronisations that left a row of their own but whose
            call is not in the file: an order may be missing there.
    """

    source: str
    facts: Facts
    ops: Ops
    calls: Calls
    ranges: Ranges
    streams: list[StreamInfo]
    threads: list[ThreadInfo]
    names: list[str]
    gaps: list[tuple[int, int]] = field(default_factory=list)


class Interner:
    """Numbers for hashable keys in order of first sight."""

    def __init__(self) -> None:
        self.keys: list[Any] = []
        self._index: dict[Any, int] = {}

    def __call__(self, key: Any) -> int:
        index = self._index.get(key)
        if index is None:
            index = self._index[key] = len(self.keys)
            self.keys.append(key)
        return index

    def find(self, key: Any) -> int:
        """The number of ``key``, or ``UNKNOWN``."""
        return self._index.get(key, UNKNOWN)


def column(values: Iterable[int] | Sequence[int] | Int64s) -> Int64s:
    """``values`` as ``(n,) int64``. ``OverflowError`` if one does not fit."""
    if isinstance(values, np.ndarray):
        return values.astype(np.int64, copy=False)
    return np.array(values if isinstance(values, (list, tuple)) else list(values), dtype=np.int64)


_FEW: Final = 1 << 16


def distinct(values: Int64s) -> tuple[list[int], Int64s]:
    """The different values, ascending, and for each row the place of its own among them.

    Columns of a profile have few values, mostly close together: a sort is then the slowest way.
    """
    if not len(values):
        return [], values
    low, high = int(values.min()), int(values.max())
    if low == high:
        return [low], np.zeros(len(values), np.int64)
    if high - low < _FEW:
        there = np.zeros(high - low + 1, bool)
        there[values - low] = True
        found = np.flatnonzero(there)
        place = np.zeros(len(there), np.int64)
        place[found] = np.arange(len(found))
        return (found + low).tolist(), place[values - low]
    uniques, inverse = np.unique(values, return_inverse=True)
    return uniques.tolist(), inverse.reshape(-1).astype(np.int64)


class Keys:
    """Look-ups in a column of keys."""

    def __init__(self, keys: Int64s) -> None:
        ascending = bool((keys[1:] >= keys[:-1]).all())
        self._order = None if ascending else np.argsort(keys, kind="stable")
        self._sorted = keys if self._order is None else keys[self._order]

    def find(self, wanted: Int64s) -> Int64s:
        """For each of ``wanted`` the row that holds it, ``UNKNOWN`` if none; the first if several."""
        if not len(self._sorted):
            return np.full(len(wanted), UNKNOWN, np.int64)
        place = np.searchsorted(self._sorted, wanted)
        place[place == len(self._sorted)] = 0
        row = place if self._order is None else self._order[place]
        return np.where(self._sorted[place] == wanted, row, UNKNOWN).astype(np.int64)


def overlaps(ops: Ops, error_ns: int) -> tuple[Int64s, Int64s]:
    """Operations that began before what their stream launched earlier had ended: their rows, and by how much.

    Entries of one graph replay may overlap each other and are not counted.
    """
    rows: list[Int64s] = []
    by: list[Int64s] = []
    timed = (ops.start_ns != UNKNOWN) & (ops.correlation != UNKNOWN)
    for stream in np.unique(ops.stream):
        mine = np.flatnonzero((ops.stream == stream) & timed)
        mine = mine[np.lexsort((ops.start_ns[mine], ops.correlation[mine]))]
        ends = np.maximum.accumulate(ops.end_ns[mine])
        late = ends[:-1] - ops.start_ns[mine][1:]
        graph = ops.correlation[mine][1:] == ops.correlation[mine][:-1]
        over = (late > error_ns) & ~graph
        rows.append(mine[1:][over])
        by.append(late[over])
    if not rows:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    return np.concatenate(rows), np.concatenate(by)


def _out_of_order(calls: Calls) -> int:
    """Calls that began before one of the same thread with a lower correlation id: ids count calls as they begin."""
    order = np.argsort(calls.correlation, kind="stable")
    order = order[np.argsort(calls.thread[order], kind="stable")]
    thread, start = calls.thread[order], calls.start_ns[order]
    return int(((start[1:] < start[:-1]) & (thread[1:] == thread[:-1])).sum())


def note_facts(ops: Ops, calls: Calls, facts: Facts) -> None:
    """Fill in what every reader counts in the same way."""
    _, by = overlaps(ops, facts.error_ns)
    facts.same_stream_overlaps, facts.overlap_ns = len(by), int(by.max(initial=0))
    facts.outside = int((ops.call == UNKNOWN).sum())
    launched = np.zeros(len(calls) + 1, bool)
    launched[ops.call] = True  # the place behind the last call is for UNKNOWN
    may_run = np.isin(calls.kind, LAUNCHING) & ((calls.result == 0) | (calls.result == UNKNOWN))
    facts.unseen = int((may_run & ~launched[:-1]).sum())
    facts.lose(_out_of_order(calls), "host calls whose times contradict the order of their correlation ids")
    if len(ops) and not np.isin(calls.kind, LAUNCHING).any():
        facts.lost.append("no call that launches anything: what ran besides cannot be told")
