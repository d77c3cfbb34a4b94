"""``profile_trace``: the records of a profile, so that the analyzer can judge it like any other trace.

Every record call becomes an event of its own, because a profiler says which record a wait refers to: that is the
snapshot a wait takes, even if the event object is recorded again and again. A blocking call stands where it was
begun: what other threads queue until it returns, it need not have waited for, and its own thread does nothing else.

Where the profile does not say what a call waited for, or whether it waited, an order may be missing
(``DropReason.EDGE``): pairs from before it that look unordered are then ``unknown``, never a finding (``Doubt`` has the
reasons). An order that is not sure is never made up:

* hand-overs between host threads are in no profile, so what one thread has learned another may know;
* an operation whose launch is missing has its place in its stream by its correlation id, and no issuing thread;
* neighbours of a stream that overlap show that its order is not what it seems (kernels may start early, by
  programmatic dependent launch, but no file says so): such a stream keeps no order at all;
* entries of one graph replay are one operation; a replay seen on several streams is in none of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import numpy as np

from hicache_obs.readers.profile import UNKNOWN, CallKind, Calls, OpKind, Ops, Pairing, Profile, overlaps
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    Access,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphReplay,
    HostSync,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    Space,
    StreamId,
    StreamKind,
    ThreadId,
    Times,
)
from hicache_obs.trace import Trace, make_trace

PageSets = Mapping[int, tuple[tuple[Access, ...], tuple[int, int]]]
"""By index of a device operation: what it touches, and its layers."""

NOBODY: Final = ThreadId(-1)
"""Issues operations whose launch is not in the file. It never learns anything."""
_DIRECTIONS: Final = {
    OpKind.HOST_TO_DEVICE: Direction.HOST_TO_DEVICE,
    OpKind.DEVICE_TO_HOST: Direction.DEVICE_TO_HOST,
    OpKind.DEVICE_TO_DEVICE: Direction.DEVICE_TO_DEVICE,
}


class Doubt(enum.Enum):
    """Why an order may be missing from some point of a profile on."""

    WAIT = "a wait or synchronisation whose other side the file does not name"
    QUERY = "a query whose answer the file does not have"
    THREAD = "another host thread may have passed on what it had learned"
    LAUNCH = "an operation whose launch the file does not have"
    DEVICE = "a device synchronisation, in a process that uses several devices"
    COPY = "a copy call that may have blocked until the copy was over"
    GRAPH = "a graph that replays on several streams"
    OVERLAP = "neighbours of its stream overlap, so the stream's order proves nothing"
    STREAM = "an operation of which the file does not say on which stream it ran"


def processes(profile: Profile) -> list[int]:
    """Processes that launched or ran something, ascending."""
    found = {profile.streams[index].process for index in np.unique(profile.ops.stream).tolist()}
    return sorted(found | {profile.threads[index].process for index in np.unique(profile.calls.thread).tolist()})


def profile_trace(profile: Profile, pages: PageSets, *, process: int | None = None) -> Trace:
    """The trace of one process of a profile, in the order its calls were issued.

    An operation's id is its index in ``profile.ops``; a graph replay has that of its first entry.

    Args:
        profile: What a reader gave.
        pages: What each operation touches; one that is missing touches nothing and is left out where it may be.
        process: Which process; may be left out if there is only one.
    """
    if process is None:
        process = next(iter(processes(profile)), 0)
    return ProfileWriter(profile, pages, process).trace


class ProfileWriter:
    """Puts one process's calls and operations into records.

    Attributes:
        doubts: Position in the trace and reason of every place where an order may be missing.
        issued: What happened, in order.
        trace: The records, definitions first.
    """

    def __init__(self, profile: Profile, pages: PageSets, process: int) -> None:
        self._profile = profile
        self._pages = pages
        self._process = process
        self._records: list[AnyRecord] = []
        self._labels: dict[OpId, str] = {}
        self._sites: dict[int, None] = {}
        self._error_ns = profile.facts.error_ns
        self._devices = {(s.device, s.context) for s in profile.streams if s.process == process}
        kinds = {number: s.kind for number, s in enumerate(profile.streams) if s.process == process}
        # The implicit order with the default stream is one of each device: with several it is not modelled.
        self._legacy = {number for number, kind in kinds.items() if kind is StreamKind.LEGACY and self._several}
        self._referenced = {record for record in profile.calls.record.tolist() if record >= 0}
        self._learned: dict[int, int] = {}
        """By thread: number of the newest thing it learned."""
        self._told: dict[int, int] = {}
        """By thread: the newest number of another thread that a doubt covers."""
        self._lessons = 0
        self._graph_stream: StreamId | None = None
        self.doubts: list[tuple[int, Doubt]] = []
        self.issued = Issued(profile, process)
        self._detached = detached(profile, process)
        self._handlers: dict[CallKind, Callable[[int, Calls], None]] = {
            CallKind.LAUNCH: self._launch,
            CallKind.BLOCKING_COPY: self._blocking_copy,
            CallKind.EVENT_RECORD: self._record,
            CallKind.STREAM_WAIT: self._wait,
            CallKind.EVENT_QUERY: self._query,
            CallKind.EVENT_SYNC: self._event_sync,
            CallKind.STREAM_SYNC: self._stream_sync,
            CallKind.DEVICE_SYNC: self._device_sync,
            CallKind.STREAM_QUERY: self._stream_query,
        }
        self.trace = self._write()

    def _write(self) -> Trace:
        profile, calls = self._profile, self._profile.calls
        definitions = self._definitions()
        for what, index in self.issued:
            if what is What.CALL:
                self._hear(int(calls.thread[index]), int(calls.start_ns[index]))
                if calls.result[index] in (0, UNKNOWN):  # a call that failed did nothing
                    self._handlers[CallKind(int(calls.kind[index]))](index, calls)
            elif what is What.GAP:
                self._doubt(Doubt.WAIT, NOBODY, 0)
            else:
                self._orphan(index)
        sites = [self._define(DefineSpace.SITE, site, profile.names[site]) for site in self._sites]
        first = [*definitions, *sites]
        self.doubts = [(position + len(first), doubt) for position, doubt in self.doubts]
        return make_trace(profile.source, [*first, *self._records], labels=self._labels)

    def _definitions(self) -> list[AnyRecord]:
        profile = self._profile
        found: list[AnyRecord] = [self._define(DefineSpace.ENGINE, 0, profile.facts.producer)]
        for number, stream in enumerate(profile.streams):
            if stream.process == self._process:
                kind = StreamKind.NONBLOCKING if stream.kind is None or self._several else stream.kind
                found.append(self._define(DefineSpace.STREAM, number, stream.text, kind))
        for number, thread in enumerate(profile.threads):
            if thread.process == self._process:
                found.append(self._define(DefineSpace.THREAD, number, f"thread {thread.number}"))
        return found

    def _define(self, space: DefineSpace, number: int, text: str, value: int = 0) -> Define:
        return Define(NO_OP, ThreadId(0), 0, space, number, text, value)

    def _doubt(self, reason: Doubt, thread: int, at_ns: int) -> None:
        if self.doubts and self.doubts[-1] == (len(self._records) - 1, reason):
            return  # nothing has happened since the last one
        self.doubts.append((len(self._records), reason))
        self._records.append(Lost(NO_OP, ThreadId(thread), at_ns, 1, DropReason.EDGE))

    def _head(self, index: int) -> tuple[OpId, ThreadId, int]:
        calls = self._profile.calls
        return NO_OP, ThreadId(int(calls.thread[index])), int(calls.start_ns[index])

    def _learn(self, thread: int) -> None:
        """``thread`` knows of something that is over."""
        self._lessons += 1
        self._learned[thread] = self._lessons

    def _hear(self, thread: int, at_ns: int) -> None:
        """``thread`` calls; what other threads have learned so far it may have been told."""
        newest = max((number for other, number in self._learned.items() if other != thread), default=0)
        if newest > self._told.get(thread, 0):
            self._told[thread] = newest
            self._doubt(Doubt.THREAD, thread, at_ns)

    @property
    def _several(self) -> bool:
        return len(self._devices) > 1

    # -- operations ------------------------------------------------------------------------------------------

    def _orphan(self, row: int) -> None:
        """An operation whose launch is not in the file."""
        ops = self._profile.ops
        replay = self.issued.replays.get(row, [row])
        self._doubt(Doubt.LAUNCH, NOBODY, 0)  # what its thread had learned
        if len(replay) > 1 or ops.kind[row] == OpKind.GRAPH:
            self._replay(replay, ops, NOBODY, 0)
        else:
            self._operation(row, ops, NOBODY, 0)

    def _launch(self, index: int, calls: Calls) -> None:
        rows = self.issued.launched.get(index)
        if not rows:
            return
        ops = self._profile.ops
        _, thread, at_ns = self._head(index)
        if len(rows) == 1 and int(ops.kind[rows[0]]) != OpKind.GRAPH:
            self._operation(rows[0], ops, thread, at_ns)
        else:  # a replay, by node or whole: its inner order is the graph's business, to the rest it is one operation
            self._replay(rows, ops, thread, at_ns)

    def _blocking_copy(self, index: int, calls: Calls) -> None:
        self._launch(index, calls)
        thread = int(calls.thread[index])
        self._learn(thread)
        self._doubt(Doubt.COPY, thread, int(calls.end_ns[index]))

    def _stream(self, row: int) -> StreamId:
        """The stream of an operation; one of its own if it is in no stream's order."""
        if row in self._detached:
            return StreamId(len(self._profile.streams) + row)
        return StreamId(int(self._profile.ops.stream[row]))

    def _operation(self, row: int, ops: Ops, thread: ThreadId, at_ns: int) -> None:
        kind, site = OpKind(int(ops.kind[row])), int(ops.name[row])
        if row not in self._pages:
            return  # it orders nothing and touches nothing
        op = OpId(row)
        stream, size = self._stream(row), int(ops.size_bytes[row])
        accesses, layers = self._pages.get(row, ((), ALL_LAYERS))
        self._sites[site] = None
        self._labels[op] = _label(row, ops)
        direction = _DIRECTIONS.get(kind)
        reason = self._detached.get(row)
        if int(ops.stream[row]) in self._legacy:
            reason = Doubt.DEVICE
        if reason is not None:
            self._doubt(reason, thread, at_ns)
        if direction is None:
            self._records.append(Kernel(op, thread, at_ns, stream, site, row, size, layers, accesses))
        else:
            self._records.append(Memcpy(op, thread, at_ns, stream, site, row, size, layers, accesses, direction))
        if reason is not None:
            self._doubt(reason, thread, at_ns)
        self._times(op, thread, int(ops.start_ns[row]), int(ops.end_ns[row]))

    def _replay(self, rows: list[int], ops: Ops, thread: ThreadId, at_ns: int) -> None:
        """One replay. Replays of one graph follow each other, but which graph it is need not be in the file."""
        row = rows[0]
        op, site, stream = OpId(row), int(ops.name[row]), self._stream(row)
        self._sites[site] = None
        self._labels[op] = _label(row, ops)
        sets = [self._pages[r] for r in rows if r in self._pages]
        if not sets:
            return
        accesses = merged([access for found, _ in sets for access in found])
        layers = (min((low for _, (low, _) in sets), default=0), max((high for _, (_, high) in sets), default=1))
        reason = self._detached.get(row)
        if reason is None and self._graph_stream not in (None, stream):
            reason = Doubt.GRAPH
        if reason is not None:
            self._doubt(reason, thread, at_ns)
        self._graph_stream = stream
        self._records.append(GraphReplay(op, thread, at_ns, row, stream, site, row, 0, layers, accesses))
        if reason is not None:
            self._doubt(reason, thread, at_ns)
        times = [(int(ops.start_ns[r]), int(ops.end_ns[r])) for r in rows]
        if all(start != UNKNOWN for start, _ in times):
            self._times(op, thread, min(start for start, _ in times), max(end for _, end in times))

    def _times(self, op: OpId, thread: ThreadId, start_ns: int, end_ns: int) -> None:
        if start_ns != UNKNOWN:
            self._records.append(Times(op, thread, end_ns, start_ns, end_ns, self._error_ns))

    # -- order -----------------------------------------------------------------------------------------------

    def _record(self, index: int, calls: Calls) -> None:
        if index in self._referenced and calls.stream[index] != UNKNOWN:
            stream = StreamId(int(calls.stream[index]))
            self._records.append(EventRecord(*self._head(index), EventId(index), stream))

    def _paired(self, index: int, calls: Calls) -> EventId | None:
        """The event that a call refers to; notes a doubt where the file does not say."""
        record = int(calls.record[index])
        if record >= 0 and calls.stream[record] != UNKNOWN:
            return EventId(record)
        # A record from before the file covers only operations whose launch is not in it either.
        if record != Pairing.BEFORE_FILE or self.issued.orphans:
            self._doubt(Doubt.WAIT, int(calls.thread[index]), int(calls.start_ns[index]))
        return None

    def _wait(self, index: int, calls: Calls) -> None:
        event = self._paired(index, calls)
        if event is None:
            return
        if calls.stream[index] == UNKNOWN:
            self._doubt(Doubt.WAIT, int(calls.thread[index]), int(calls.start_ns[index]))
            return
        self._records.append(EventWait(*self._head(index), event, StreamId(int(calls.stream[index]))))

    def _query(self, index: int, calls: Calls) -> None:
        """A query that the file calls successful is a poll; one without a result orders nothing that is sure."""
        thread = int(calls.thread[index])
        self._learn(thread)
        if calls.result[index] == UNKNOWN:
            self._doubt(Doubt.QUERY, thread, int(calls.start_ns[index]))
            return
        event = self._paired(index, calls)
        if event is not None:
            self._records.append(EventQuery(*self._head(index), event, True))

    def _event_sync(self, index: int, calls: Calls) -> None:
        event = self._paired(index, calls)
        _, thread, _ = self._head(index)
        self._learn(thread)
        if event is not None:
            self._records.append(EventSync(NO_OP, thread, int(calls.end_ns[index]), event))

    def _stream_sync(self, index: int, calls: Calls) -> None:
        _, thread, _ = self._head(index)
        stream = int(calls.stream[index])
        self._learn(thread)
        if stream == UNKNOWN:
            self._doubt(Doubt.WAIT, thread, int(calls.end_ns[index]))
        else:
            self._records.append(HostSync(NO_OP, thread, int(calls.end_ns[index]), StreamId(stream)))

    def _device_sync(self, index: int, calls: Calls) -> None:
        """Waits for one device; which one is known only where the process uses just one."""
        _, thread, _ = self._head(index)
        self._learn(thread)
        if self._several:
            self._doubt(Doubt.DEVICE, thread, int(calls.end_ns[index]))
        else:
            self._records.append(HostSync(NO_OP, thread, int(calls.end_ns[index]), None))

    def _stream_query(self, index: int, calls: Calls) -> None:
        """A poll at most; no file names the stream."""
        thread = int(calls.thread[index])
        self._learn(thread)
        self._doubt(Doubt.QUERY, thread, int(calls.start_ns[index]))


def _label(row: int, ops: Ops) -> str:
    """How messages name an operation: by correlation id if it has one."""
    correlation = int(ops.correlation[row])
    return f"#{correlation}" if correlation != UNKNOWN else f"row {row}"


def detached(profile: Profile, process: int) -> dict[int, Doubt]:
    """Rows of operations that are in no stream's order, and why. A graph replay has all its rows here, or none."""
    ops, issued = profile.ops, Issued(profile, process)
    rows, _ = overlaps(ops, profile.facts.error_ns)
    broken = set(ops.stream[rows].tolist())
    nowhere = {number for number, stream in enumerate(profile.streams) if stream.number < 0}
    streams = ops.stream.tolist()
    found: dict[int, Doubt] = {}
    for replay in issued.replays.values():
        on = {streams[row] for row in replay}
        if len(on) > 1:
            found.update(dict.fromkeys(replay, Doubt.GRAPH))
        elif on & nowhere:
            found.update(dict.fromkeys(replay, Doubt.STREAM))
        elif on & broken:
            found.update(dict.fromkeys(replay, Doubt.OVERLAP))
    unplaced = (row for row in issued.orphans if ops.correlation[row] == UNKNOWN)
    found.update(dict.fromkeys(unplaced, Doubt.LAUNCH))
    return found


class What(enum.Enum):
    """What has a place in the order of issue."""

    CALL = 0
    GAP = 1
    """A row about synchronisation whose call is missing."""
    ORPHAN = 2
    """An operation whose launch is missing."""


class Issued:
    """What one process did, in the order in which it was issued; iterate for ``(What, index)``.

    A call has its place by its begin, and where a coarse clock shows two at once by its correlation id: ids count
    calls as they begin. What has no call has it by its correlation id alone, behind the call with the next lower one.

    Attributes:
        launched: Rows of operations by the index of their launch, ascending.
        orphans: Rows of operations without launch; of a graph replay the first.
        replays: All rows of a launch or an orphaned replay, by the first.
    """

    def __init__(self, profile: Profile, process: int) -> None:
        ops, calls = profile.ops, profile.calls
        own = np.array([stream.process == process for stream in profile.streams], bool)
        self.launched: dict[int, list[int]] = {}
        without: dict[int, list[int]] = {}
        mine = own[ops.stream] if len(ops) else np.empty(0, bool)
        for row in np.flatnonzero(mine).tolist():
            call, correlation = int(ops.call[row]), int(ops.correlation[row])
            if call != UNKNOWN:
                self.launched.setdefault(call, []).append(row)
            else:
                without.setdefault(correlation if correlation != UNKNOWN else -2 - row, []).append(row)
        self.orphans = [rows[0] for rows in without.values()]
        self.replays = {rows[0]: rows for rows in (*self.launched.values(), *without.values())}
        own_threads = np.array([thread.process == process for thread in profile.threads], bool)
        called = np.flatnonzero(own_threads[calls.thread]) if len(calls) else np.empty(0, np.int64)
        begin = calls.start_ns[called]
        order = np.argsort(calls.correlation[called], kind="stable")
        ids, begins = calls.correlation[called][order], np.maximum.accumulate(begin[order]) if len(order) else begin
        numbers = calls.correlation[called].tolist()
        rows_of = zip(begin.tolist(), numbers, called.tolist(), strict=True)
        entries = [(b, number, index, What.CALL) for b, number, index in rows_of]
        # Orphaned operations of one id are in file order; the begin of everything before the file is its earliest.
        for correlation, rows in without.items():
            entries.append((_moment(ids, begins, correlation), correlation, rows[0], What.ORPHAN))
        for gap_process, correlation in profile.gaps:
            if gap_process == process:
                entries.append((_moment(ids, begins, correlation), correlation, 0, What.GAP))
        entries.sort(key=lambda entry: (entry[0], entry[3] is not What.CALL, entry[1], entry[2]))
        self._entries = [(what, index) for _, _, index, what in entries]

    def __iter__(self) -> Iterator[tuple[What, int]]:
        return iter(self._entries)

    def operations(self) -> Iterator[int]:
        """First rows of all operations, in issue order."""
        for what, index in self._entries:
            if what is What.ORPHAN:
                yield index
            elif what is What.CALL and index in self.launched:
                yield self.launched[index][0]


def _moment(ids: np.ndarray, begins: np.ndarray, correlation: int) -> int:
    """When the call before ``correlation`` began; before everything if there is none, after it for unknown ids."""
    if correlation < 0:
        return 1 << 62
    place = int(np.searchsorted(ids, correlation)) - 1
    return int(begins[place]) if place >= 0 else -(1 << 62)


def merged(accesses: list[Access]) -> tuple[Access, ...]:
    """The same accesses, one for each memory and mode."""
    found: dict[tuple[Space, int, Mode], list[Access]] = {}
    for access in accesses:
        found.setdefault((access.space, access.pool, access.mode), []).append(access)
    return tuple(
        same[0] if len(same) == 1 else Access(space, mode, np.unique(np.concatenate([a.ids for a in same])), pool)
        for (space, pool, mode), same in found.items()
    )
