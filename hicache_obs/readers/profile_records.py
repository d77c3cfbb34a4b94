"""``profile_trace``: the records of a profile, so that the analyzer can judge it like any other trace.

Every record call becomes an event of its own, because a profiler says which record a wait refers to: that is the
snapshot a wait takes, even if the event object is recorded again and again. Blocking calls count from their return.
Where the profile does not say what a call waited for, an order may be missing (``DropReason.EDGE``): pairs from
before it that look unordered are then ``unknown``, never a finding. Hand-overs between host threads are in no
profile; a pair that two threads issued is doubtful in the same way wherever a thread could have learned something.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

import numpy as np

from hicache_obs.readers.profile import UNKNOWN, CallKind, Calls, OpKind, Ops, Pairing, Profile
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
    page_ids,
)
from hicache_obs.trace import Trace, make_trace

PageSets = Mapping[int, tuple[tuple[Access, ...], tuple[int, int]]]
"""By index of a device operation: what it touches, and its layers."""

_DIRECTIONS: Final = {
    OpKind.HOST_TO_DEVICE: Direction.HOST_TO_DEVICE,
    OpKind.DEVICE_TO_HOST: Direction.DEVICE_TO_HOST,
    OpKind.DEVICE_TO_DEVICE: Direction.DEVICE_TO_DEVICE,
}
_BLOCKING: Final = (CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC)


def processes(profile: Profile) -> list[int]:
    """Processes that launched or ran something, ascending."""
    found = {profile.streams[index].process for index in np.unique(profile.ops.stream).tolist()}
    return sorted(found | {profile.threads[index].process for index in np.unique(profile.calls.thread).tolist()})


def pool_pages(profile: Profile) -> PageSets:
    """Page sets for a profile without any: one page per copy between host and device, which stands for all memory.

    The copy writes it; on every stream of the device, the last operation issued before the copy and the first one
    issued after it read it. A stream runs in order, so if those are ordered with the copy then all work is, and with
    it every pair of real pages. A lack of order implies nothing: the two may touch different pages.
    """
    ops, calls = profile.ops, profile.calls
    known = ops.call != UNKNOWN
    issued = np.where(known, calls.start_ns[ops.call], -1) if len(calls) else np.full(len(ops), -1, np.int64)
    order = np.lexsort((ops.start_ns, issued)).tolist()
    devices = [(stream.process, stream.device) for stream in profile.streams]
    read: dict[int, list[int]] = {}
    written: dict[int, int] = {}
    last: dict[tuple[int, int], dict[int, int]] = {}
    waiting: dict[int, list[int]] = {}
    kinds, streams = ops.kind.tolist(), ops.stream.tolist()
    for row in order:
        kind, stream = kinds[row], streams[row]
        if kind == OpKind.OTHER_COPY:
            continue
        neighbours = last.setdefault(devices[stream], {})
        for page in waiting.pop(stream, ()):
            read.setdefault(row, []).append(page)
        if kind in (OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_HOST):
            page = written[row] = len(written)
            for other in neighbours.values():
                read.setdefault(other, []).append(page)
            for other, device in enumerate(devices):
                if device == devices[stream]:
                    waiting.setdefault(other, []).append(page)
        neighbours[stream] = row
    found: dict[int, tuple[tuple[Access, ...], tuple[int, int]]] = {}
    for row in order:
        accesses = []
        if row in written:
            accesses.append(Access(Space.DEVICE, Mode.WRITE, page_ids([written[row]])))
        pages = [page for page in read.get(row, ()) if page != written.get(row)]
        if pages:
            accesses.append(Access(Space.DEVICE, Mode.READ, page_ids(sorted(set(pages)))))
        if accesses:
            found[row] = tuple(accesses), ALL_LAYERS
    return found


def profile_trace(profile: Profile, pages: PageSets, *, process: int | None = None) -> Trace:
    """The trace of one process of a profile, in the order its calls were issued.

    Args:
        profile: What a reader gave.
        pages: What each operation touches; one that is missing touches nothing.
        process: Which process; may be left out if there is only one.
    """
    if process is None:
        process = next(iter(processes(profile)), 0)
    return _Writer(profile, pages, process).write()


class _Writer:
    """Puts one process's calls and operations into records."""

    def __init__(self, profile: Profile, pages: PageSets, process: int) -> None:
        self._profile = profile
        self._pages = pages
        self._process = process
        self._records: list[AnyRecord] = []
        self._labels: dict[OpId, str] = {}
        self._sites: dict[int, None] = {}
        self._error_ns = profile.facts.error_ns
        calls = profile.calls
        own_threads = [thread.process == process for thread in profile.threads]
        self._mine = [index for index, thread in enumerate(calls.thread.tolist()) if own_threads[thread]]
        self._launched = self._operations_by_call()
        self._referenced = {record for record in calls.record.tolist() if record >= 0}
        self._handlers: dict[CallKind, Callable[[int, Calls], None]] = {
            CallKind.LAUNCH: self._launch,
            CallKind.EVENT_RECORD: self._record,
            CallKind.STREAM_WAIT: self._wait,
            CallKind.EVENT_QUERY: self._query,
            CallKind.EVENT_SYNC: self._event_sync,
            CallKind.STREAM_SYNC: self._stream_sync,
            CallKind.DEVICE_SYNC: self._device_sync,
            CallKind.STREAM_QUERY: self._stream_query,
        }

    def write(self) -> Trace:
        """All records, definitions first."""
        profile, calls = self._profile, self._profile.calls
        kinds = calls.kind
        moment = np.where(np.isin(kinds, _BLOCKING), calls.end_ns, calls.start_ns)
        self._orphans()
        for index in sorted(self._mine, key=lambda i: (int(moment[i]), i)):
            self._handlers[CallKind(int(kinds[index]))](index, calls)
        definitions: list[AnyRecord] = [self._define(DefineSpace.ENGINE, 0, profile.facts.producer)]
        for number, stream in enumerate(profile.streams):
            if stream.process == self._process:
                kind = StreamKind.NONBLOCKING if stream.kind is None else stream.kind
                definitions.append(self._define(DefineSpace.STREAM, number, stream.text, kind))
        for number, thread in enumerate(profile.threads):
            if thread.process == self._process:
                definitions.append(self._define(DefineSpace.THREAD, number, f"thread {thread.number}"))
        definitions += [self._define(DefineSpace.SITE, site, profile.names[site]) for site in self._sites]
        return make_trace(profile.source, [*definitions, *self._records], labels=self._labels)

    def _operations_by_call(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for index, call in enumerate(self._profile.ops.call.tolist()):
            if call != UNKNOWN:
                found.setdefault(call, []).append(index)
        return found

    def _define(self, space: DefineSpace, number: int, text: str, value: int = 0) -> Define:
        return Define(NO_OP, ThreadId(0), 0, space, number, text, value)

    def _doubt(self, thread: int, at_ns: int) -> None:
        self._records.append(Lost(NO_OP, ThreadId(thread), at_ns, 1, DropReason.EDGE))

    def _head(self, index: int) -> tuple[OpId, ThreadId, int]:
        calls = self._profile.calls
        return NO_OP, ThreadId(int(calls.thread[index])), int(calls.start_ns[index])

    # -- operations ------------------------------------------------------------------------------------------

    def _orphans(self) -> None:
        """Operations launched before the file begins: first in their streams, issued by nobody known."""
        ops, streams = self._profile.ops, self._profile.streams
        rows = [
            row
            for row in np.flatnonzero(ops.call == UNKNOWN).tolist()
            if streams[int(ops.stream[row])].process == self._process
        ]
        if not rows:
            return
        for row in sorted(rows, key=lambda r: (int(ops.start_ns[r]), r)):
            start = int(ops.start_ns[row])
            self._operation(row, ops, ThreadId(-1), start)
        self._doubt(0, 0)  # what their threads and streams waited for is not in the file

    def _launch(self, index: int, calls: Calls) -> None:
        rows = self._launched.get(index)
        if not rows:
            return
        ops = self._profile.ops
        _, thread, at_ns = self._head(index)
        if len(rows) == 1 and int(ops.kind[rows[0]]) != OpKind.GRAPH:
            self._operation(rows[0], ops, thread, at_ns)
        else:  # a replay, by node or whole: its inner order is the graph's business, to the rest it is one operation
            self._replay(rows, ops, thread, at_ns)

    def _operation(self, row: int, ops: Ops, thread: ThreadId, at_ns: int) -> None:
        kind, site = OpKind(int(ops.kind[row])), int(ops.name[row])
        op = OpId(row)
        stream, size = StreamId(int(ops.stream[row])), int(ops.size_bytes[row])
        accesses, layers = self._pages.get(row, ((), ALL_LAYERS))
        self._sites[site] = None
        correlation = int(ops.correlation[row])
        self._labels[op] = f"#{correlation}" if correlation != UNKNOWN else f"row {row}"
        direction = _DIRECTIONS.get(kind)
        if direction is None:
            self._records.append(Kernel(op, thread, at_ns, stream, site, row, size, layers, accesses))
        else:
            self._records.append(Memcpy(op, thread, at_ns, stream, site, row, size, layers, accesses, direction))
        self._times(op, thread, int(ops.start_ns[row]), int(ops.end_ns[row]))

    def _replay(self, rows: list[int], ops: Ops, thread: ThreadId, at_ns: int) -> None:
        row = rows[0]
        op, site = OpId(row), int(ops.name[row])
        self._sites[site] = None
        self._labels[op] = f"#{int(ops.correlation[row])}"
        accesses = tuple(dict.fromkeys(a for r in rows for a in self._pages.get(r, ((), ALL_LAYERS))[0]))[:4]
        graph = int(ops.name[row])
        self._records.append(
            GraphReplay(op, thread, at_ns, graph, StreamId(int(ops.stream[row])), site, row, 0, ALL_LAYERS, accesses)
        )
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
        """The event that call refers to; notes a doubt where the file does not say."""
        record = int(calls.record[index])
        if record >= 0 and calls.stream[record] != UNKNOWN:
            return EventId(record)
        if record != Pairing.BEFORE_FILE:
            self._doubt(int(calls.thread[index]), int(calls.start_ns[index]))
        return None

    def _wait(self, index: int, calls: Calls) -> None:
        event = self._paired(index, calls)
        if event is None:
            return
        if calls.stream[index] == UNKNOWN:
            self._doubt(int(calls.thread[index]), int(calls.start_ns[index]))
            return
        self._records.append(EventWait(*self._head(index), event, StreamId(int(calls.stream[index]))))

    def _query(self, index: int, calls: Calls) -> None:
        """A query that the file calls successful is a poll; one without a result orders nothing."""
        if calls.result[index] == 0:
            event = self._paired(index, calls)
            if event is not None:
                self._records.append(EventQuery(*self._head(index), event, True))

    def _event_sync(self, index: int, calls: Calls) -> None:
        event = self._paired(index, calls)
        if event is not None:
            _, thread, _ = self._head(index)
            self._records.append(EventSync(NO_OP, thread, int(calls.end_ns[index]), event))

    def _stream_sync(self, index: int, calls: Calls) -> None:
        _, thread, _ = self._head(index)
        stream = int(calls.stream[index])
        if stream == UNKNOWN:
            self._doubt(thread, int(calls.end_ns[index]))
        else:
            self._records.append(HostSync(NO_OP, thread, int(calls.end_ns[index]), StreamId(stream)))

    def _device_sync(self, index: int, calls: Calls) -> None:
        """Waits for one device; which one is known only where the process uses just one."""
        _, thread, _ = self._head(index)
        devices = {stream.device for stream in self._profile.streams if stream.process == self._process}
        if len(devices) > 1:
            self._doubt(thread, int(calls.end_ns[index]))
        else:
            self._records.append(HostSync(NO_OP, thread, int(calls.end_ns[index]), None))

    def _stream_query(self, index: int, calls: Calls) -> None:
        """A poll at most; without a result, or without its stream, it orders nothing that could be named."""
        if calls.result[index] == 0:
            self._doubt(int(calls.thread[index]), int(calls.start_ns[index]))
