"""``read_nsys``: an Nsight Systems export as a ``Profile``; any schema from 2022.4 on.

What differs between versions, and what is relied on instead (seen in exports of 2022.2 to 2026.2):

* ``syncType`` means different things in different versions although its own table says otherwise. What a
  synchronisation is comes from the name of the API call with the same process and correlation id; correlation ids
  alone are not unique in a file of several processes.
* Start and end of a synchronisation row are those of the API call, and its device may be 0 where its context is on
  another one: a stream is known by its context and number, and its device from the operations in that context.
* A wait belongs to the record with the same ``eventSyncId`` where both tables have one, else to the latest earlier
  record of the same event: event objects are recorded again and again.
* Rows of event records need not have a time; they are never filtered by it. Without them no wait can be resolved.
* Streams on which nothing but waits and records happen are kept: order passes through them.
* A graph replay is one row without its contents, unless graphs were traced by node.
* A column that is not there, or a cell that says nothing, is never filled in: ``Facts.lost`` names it.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterable
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np

from hicache_obs.errors import TraceError
from hicache_obs.readers.nsys_pairs import records_of
from hicache_obs.readers.profile import (
    ELSEWHERE,
    NO_ID,
    UNKNOWN,
    CallKind,
    Calls,
    Facts,
    Int64s,
    Interner,
    Keys,
    OpKind,
    Ops,
    Pairing,
    Profile,
    Ranges,
    StreamInfo,
    ThreadInfo,
    call_kind,
    distinct,
    note_facts,
)
from hicache_obs.readers.tables import ABSENT, Tables, open_tables
from hicache_obs.records import NVTX_DOMAIN, StreamKind

_KERNEL: Final = "CUPTI_ACTIVITY_KIND_KERNEL"
_MEMCPY: Final = "CUPTI_ACTIVITY_KIND_MEMCPY"
_MEMSET: Final = "CUPTI_ACTIVITY_KIND_MEMSET"
_GRAPH: Final = "CUPTI_ACTIVITY_KIND_GRAPH_TRACE"
_RUNTIME: Final = "CUPTI_ACTIVITY_KIND_RUNTIME"
_SYNC: Final = "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION"
_EVENT: Final = "CUPTI_ACTIVITY_KIND_CUDA_EVENT"
_NVTX: Final = "NVTX_EVENTS"
_STREAM: Final = "TARGET_INFO_CUDA_STREAM"

_COPY_KINDS: Final = {
    1: OpKind.HOST_TO_DEVICE,
    2: OpKind.DEVICE_TO_HOST,
    8: OpKind.DEVICE_TO_DEVICE,
    10: OpKind.DEVICE_TO_DEVICE,
}
"""``copyKind`` of CUPTI."""
_OTHER_COPIES: Final = (3, 4, 5, 6, 7, 9, 11, 12, 13)
"""Of arrays, from host to host, and migrations of unified memory: none of ours."""
_PEER: Final = 10
_PAGEABLE: Final = 0
"""``srcKind``/``dstKind`` of an export (CUPTI itself counts from 1)."""
_STREAM_FLAGS: Final = {1: StreamKind.BLOCKING, 2: StreamKind.NONBLOCKING, 3: StreamKind.LEGACY}
_PUSH_POP: Final = 59
_START_END: Final = 60
_DOMAIN_CREATE: Final = 75
_PROCESS: Final = 1 << 24
"""``globalTid`` and ``globalPid`` are vm, hardware and process number above, thread number below this."""
_CORRELATION_BITS: Final = 33
_OPERATION: Final = ("start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid")
_ORDER: Final = ("contextId", "streamId", "correlationId", "globalPid", "eventId")
_NEEDED: Final = {
    _KERNEL: _OPERATION,
    _MEMCPY: (*_OPERATION, "copyKind"),
    _MEMSET: _OPERATION,
    _RUNTIME: ("start", "globalTid", "correlationId", "nameId"),
    _SYNC: _ORDER,
    _EVENT: _ORDER,
}
"""Columns without which rows of a table say too little."""
_DIAGNOSTICS: Final = "DIAGNOSTIC_EVENT"
_LOSS: Final = re.compile(r"(?=.*\b(CUDA|CUPTI|GPU)\b).*\b(drop|dropped|lost|overflow|not all)\b", re.I | re.S)


def read_nsys(path: str | os.PathLike[str]) -> Profile:
    """The profile in an export: a SQLite file, or a folder of Parquet or Arrow files.

    Raises:
        TraceError: It is no such export, is damaged, or is too large.
    """
    source = Path(path)
    try:
        tables = open_tables(source)
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}") from None
    if tables is not None:
        with closing(tables):
            if tables.columns("StringIds"):
                return _Export(tables).read()
    raise TraceError(
        f"{source}: not an Nsight Systems export; expected a SQLite file or a folder of Parquet or Arrow tables, "
        "with a table StringIds"
    )


class _Export:
    """One export being read."""

    def __init__(self, tables: Tables) -> None:
        self._tables = tables
        self._facts = Facts(producer="Nsight Systems", schema="unknown schema")
        self._processes = Interner()
        self._streams = Interner()
        self._threads = Interner()
        self._names = Interner()
        self._gaps: set[tuple[int, int]] = set()
        self._synced: list[tuple[int, int]] = []
        """Process and context of every device synchronisation."""
        self._devices: dict[tuple[int, int], set[int]] = {}
        """By process and context: devices that its operations name."""
        ids = tables.numbers("StringIds", ["id"])[0].tolist()
        self._strings = dict(zip(ids, tables.texts("StringIds", "value"), strict=False))

    def read(self) -> Profile:
        """The whole profile."""
        self._version()
        calls = self._calls()
        keys = Keys(self._keys(self._call_process, calls.correlation))
        self._pair(calls, keys)
        ops = self._ops(keys)
        ranges = self._ranges()
        self._diagnostics()
        note_facts(ops, calls, self._facts)
        pids = self._pids()
        kinds = self._stream_kinds()
        found = [(pids[self._processes.keys[p]], self._device(p, d, c), c, n) for p, d, c, n in self._streams.keys]
        streams = [StreamInfo(p, d, c, n, kinds.get((p, c, n))) for p, d, c, n in found]
        threads = [ThreadInfo(pids[process], thread) for process, thread in self._threads.keys]
        gaps = sorted((pids[process], correlation) for process, correlation in self._gaps)
        source, names = str(self._tables.source), self._names.keys
        return Profile(source, self._facts, ops, calls, ranges, streams, threads, names, gaps)

    def _pids(self) -> dict[int, int]:
        """What each process is called: its number, or where several machines have that number, the whole id."""
        whole = {*self._processes.keys, *(process for process, _ in self._threads.keys)}
        shared = Counter(process % _PROCESS for process in whole)
        return {process: process % _PROCESS if shared[process % _PROCESS] == 1 else process for process in whole}

    def _device(self, process: int, device: int, context: int) -> int:
        """The device of a stream, given what the first row that names it says."""
        devices = self._devices.get((process, context), {device}) - {UNKNOWN}
        return min(devices) if len(devices) == 1 else UNKNOWN

    def _numbers(self, table: str, names: list[str]) -> list[Int64s]:
        """Columns of a table; names what it lacks, if it has any rows."""
        found = self._tables.numbers(table, names)
        if len(found[0]):
            have = self._tables.columns(table)
            missing = [name for name in _NEEDED.get(table, ()) if name not in have]
            if "eventSyncId" in have and "eventId" in missing:
                missing.remove("eventId")  # the other one says more
            self._facts.lost += [f"table {table} has no column {name}" for name in missing]
        return found

    def _diagnostics(self) -> None:
        """The tool's own word that it lost something; its text may name anything and is not shown."""
        texts = self._tables.texts(_DIAGNOSTICS, "text")
        lost = sum(text is not None and _LOSS.match(text[:1000]) is not None for text in texts)
        self._facts.lose(lost, "messages of the tool that say that CUDA records were lost")

    def _version(self) -> None:
        for table in ("META_DATA_EXPORT", "EXPORT_META_DATA"):
            if {"name", "value"} <= self._tables.columns(table):
                found = dict(zip(self._tables.texts(table, "name"), self._tables.texts(table, "value"), strict=False))
                version = found.get("EXPORT_PRODUCT_VERSION") or "of unknown version"
                self._facts.producer = f"Nsight Systems {version}"
                self._facts.schema = f"schema {found.get('EXPORT_SCHEMA_VERSION') or 'unknown'}"
                return

    # -- host calls ------------------------------------------------------------------------------------------

    def _calls(self) -> Calls:
        start, end, thread, correlation, name, result = self._numbers(
            _RUNTIME, ["start", "end", "globalTid", "correlationId", "nameId", "returnValue"]
        )
        names, place = distinct(name)
        kind_of = [call_kind(self._strings.get(key) or "") for key in names]
        kinds = np.array([UNKNOWN if kind is None else int(kind) for kind in kind_of], np.int64)[place]
        nameless = np.array([self._strings.get(key) is None for key in names], bool)[place]
        placed = (correlation > 0) & (start != ABSENT)
        self._facts.lose(int(nameless.sum()), "host calls without a name")
        lost = int(((kinds != UNKNOWN) & ~placed).sum())
        self._facts.lose(lost, "host calls without a correlation id or time")
        keep = (kinds != UNKNOWN) & placed
        start, end, thread, correlation, result, kinds = (
            values[keep] for values in (start, end, thread, correlation, result, kinds)
        )
        end = np.maximum(end, start)
        threads, where = distinct(thread)
        numbers = [self._threads((value // _PROCESS, value % _PROCESS)) for value in threads]
        processes = [self._processes(value // _PROCESS) for value in threads]
        self._callers = {value // _PROCESS for value in threads}
        self._call_process = np.array(processes, np.int64)[where]
        unknown = np.full(len(start), UNKNOWN, np.int64)
        return Calls(
            start_ns=start,
            end_ns=end,
            thread=np.array(numbers, np.int64)[where],
            kind=kinds,
            correlation=correlation,
            result=np.where(result == ABSENT, UNKNOWN, result),
            stream=unknown,
            record=np.full(len(start), Pairing.NOT_APPLICABLE, np.int64),
        )

    def _keys(self, process: Int64s, correlation: Int64s) -> Int64s:
        """One number per (process, correlation id)."""
        if len(correlation) and int(correlation.max()) >= 1 << _CORRELATION_BITS:
            raise TraceError(
                f"{self._tables.source}: correlation id {int(correlation.max())}; at most 32 bits are used"
            )
        return (process << _CORRELATION_BITS) + correlation

    def _process(self, global_pid: Int64s) -> Int64s:
        values, place = distinct(global_pid)
        whole = self._as_callers([value // _PROCESS for value in values])
        return np.array([self._processes(process) for process in whole], np.int64)[place]

    def _as_callers(self, processes: list[int]) -> list[int]:
        """The processes of a table as the calls name them: one that differs in its upper bits only is the same, if
        nothing else has its number."""
        found = []
        for process in processes:
            alike = [caller for caller in self._callers if caller % _PROCESS == process % _PROCESS]
            rivals = {other for other in processes if other % _PROCESS == process % _PROCESS}
            found.append(alike[0] if len(alike) == len(rivals) == 1 else process)
        return found

    def _pair(self, calls: Calls, keys: Keys) -> None:
        """Streams of records, waits and synchronisations, and the record each wait refers to."""
        tables, facts = self._tables, self._facts
        waits = np.isin(calls.kind, (CallKind.STREAM_WAIT, CallKind.EVENT_QUERY, CallKind.EVENT_SYNC))
        calls.record[waits] = Pairing.NO_ROW
        columns = ["deviceId", "contextId", "streamId", "correlationId", "globalPid", "eventId", "eventSyncId"]
        device, context, stream, correlation, pid, event, sync_id = self._numbers(_EVENT, columns)
        process = self._process(pid)
        record_call = keys.find(self._keys(process, correlation))
        record_keys = process, context, event, correlation, sync_id
        known = record_call != UNKNOWN
        of_stream = known & (stream >= 0) & (stream != NO_ID)
        named_rows = (values[of_stream] for values in (process, device, context, stream))
        calls.stream[record_call[of_stream]] = self._stream(*named_rows)
        self._note_gaps(process[~known], correlation[~known])
        unseen = self._records_without_row(calls, record_call[known])
        if "timestamp" in tables.columns(_EVENT) and len(event):
            facts.event_trace = bool((tables.numbers(_EVENT, ["timestamp"])[0] > 0).any())

        device, context, stream, correlation, pid, event, sync_id = self._numbers(_SYNC, columns)
        facts.sync_rows = len(event)
        process = self._process(pid)
        index = keys.find(self._keys(process, correlation))
        self._note_gaps(process[index == UNKNOWN], correlation[index == UNKNOWN])
        if not len(calls):
            return
        whole = (index != UNKNOWN) & (calls.kind[index] == CallKind.DEVICE_SYNC) & (context >= 0)
        self._synced = list(zip(process[whole].tolist(), context[whole].tolist(), strict=True))
        named = (index != UNKNOWN) & (stream >= 0) & (stream != NO_ID)
        of_stream = named & np.isin(calls.kind[index], (CallKind.STREAM_WAIT, CallKind.STREAM_SYNC))
        named_rows = (values[of_stream] for values in (process, device, context, stream))
        calls.stream[index[of_stream]] = self._stream(*named_rows)
        of_event = (index != UNKNOWN) & waits[index]
        rows = process, context, event, correlation, sync_id
        calls.record[index[of_event]] = records_of(rows, of_event, record_keys, record_call, unseen)

    def _note_gaps(self, process: Int64s, correlation: Int64s) -> None:
        """Rows of ``process`` with these correlation ids belong to calls that are not in the file."""
        names = self._processes.keys
        self._gaps.update((names[p], c) for p, c in zip(process.tolist(), correlation.tolist(), strict=True))

    def _records_without_row(self, calls: Calls, known: Int64s) -> dict[int, list[int]]:
        """By process: correlation ids, ascending, of event records of which the file does not say what they record."""
        missing = calls.kind == CallKind.EVENT_RECORD
        missing[known] = False
        found: dict[int, list[int]] = {}
        for row in np.flatnonzero(missing).tolist():
            found.setdefault(int(self._call_process[row]), []).append(int(calls.correlation[row]))
        return {process: sorted(ids) for process, ids in found.items()}

    # -- device operations -----------------------------------------------------------------------------------

    def _ops(self, keys: Keys) -> Ops:
        parts = [part for part in (self._kernels(), self._copies(), self._memsets(), self._graphs()) if part]
        if not parts:
            parts = [[np.empty(0, np.int64) for _ in range(8)]]
        start, end, kind, stream, process, correlation, size, name = (
            np.concatenate(columns) for columns in zip(*(part[:8] for part in parts), strict=True)
        )
        pageable = np.concatenate([part[8] if len(part) > 8 else np.zeros(len(part[0]), np.int64) for part in parts])
        useless = (start <= 0) | (end < start)
        start, end = np.where(useless, UNKNOWN, start), np.where(useless, UNKNOWN, end)
        self._facts.dropped = int(useless.sum())
        correlation = np.where((correlation <= 0) | (correlation >= NO_ID), UNKNOWN, correlation)
        working = {process for process, _ in self._devices}
        elsewhere = sum(place not in self._devices and place[0] in working for place in self._synced)
        self._facts.lose(elsewhere, ELSEWHERE)
        several = sum(len(devices - {UNKNOWN}) > 1 for devices in self._devices.values())
        self._facts.lose(several, "contexts whose operations name several devices")
        if len(set[int]().union(*self._devices.values()) - {UNKNOWN}) > 1:
            self._facts.lose(self._peers, "copies between devices, compared with the work of one of them only")
        nowhere = np.array([number < 0 for *_, number in self._streams.keys], bool)
        if nowhere.any():
            lost = int((nowhere[stream] & (kind != OpKind.OTHER_COPY)).sum())
            self._facts.lose(lost, "operations whose stream is not stated")
        call = np.where(correlation == UNKNOWN, UNKNOWN, keys.find(self._keys(process, correlation)))
        return Ops(start, end, kind, stream, call, correlation, size, name, pageable)

    def _common(self, table: str, more: list[str]) -> list[Int64s]:
        columns = ["start", "end", "deviceId", "contextId", "streamId", "globalPid", "correlationId", *more]
        start, end, device, context, stream, pid, correlation, *rest = self._numbers(table, columns)
        process = self._process(pid)
        device, context = (np.where(ids == NO_ID, UNKNOWN, ids) for ids in (device, context))
        code = _codes((process, context, device))
        for row in _firsts(code).tolist():
            if context[row] >= 0:
                self._devices.setdefault((int(process[row]), int(context[row])), set()).add(
                    max(int(device[row]), UNKNOWN)
                )
        return [start, end, self._stream(process, device, context, stream), process, correlation, *rest]

    def _kernels(self) -> list[Int64s]:
        start, end, stream, process, correlation, name = self._common(_KERNEL, ["shortName"])
        kind = np.full(len(start), OpKind.KERNEL, np.int64)
        return [start, end, kind, stream, process, correlation, np.zeros(len(start), np.int64), self._named(name)]

    def _copies(self) -> list[Int64s]:
        more = ["copyKind", "bytes", "srcKind", "dstKind", "copyCount"]
        start, end, stream, process, correlation, copy, size, source, target, count = self._common(_MEMCPY, more)
        kinds = np.full(len(start), OpKind.OTHER_COPY, np.int64)
        for code, kind in _COPY_KINDS.items():
            kinds[copy == code] = kind
        self._facts.lose(
            int((~np.isin(copy, (*_COPY_KINDS, *_OTHER_COPIES))).sum()), "copies whose direction is not stated"
        )
        self._peers = int((copy == _PEER).sum())
        self._facts.batch_copies = int((count > 1).sum())
        pageable = ((source == _PAGEABLE) | (target == _PAGEABLE)).astype(np.int64)
        values, place = distinct(kinds)
        names = np.array([self._names(OpKind(value).name.lower()) for value in values], np.int64)[place]
        return [start, end, kinds, stream, process, correlation, np.maximum(size, 0), names, pageable]

    def _memsets(self) -> list[Int64s]:
        start, end, stream, process, correlation, size = self._common(_MEMSET, ["bytes"])
        kind = np.full(len(start), OpKind.MEMSET, np.int64)
        name = np.full(len(start), self._names("memset"), np.int64)
        return [start, end, kind, stream, process, correlation, np.maximum(size, 0), name]

    def _graphs(self) -> list[Int64s]:
        start, end, stream, process, correlation = self._common(_GRAPH, [])
        self._facts.graph_rows = len(start)
        kind = np.full(len(start), OpKind.GRAPH, np.int64)
        name = np.full(len(start), self._names("graph replay"), np.int64)
        return [start, end, kind, stream, process, correlation, np.zeros(len(start), np.int64), name]

    def _named(self, ids: Int64s) -> Int64s:
        values, place = distinct(ids)
        return np.array([self._names(self._strings.get(value) or "kernel") for value in values], np.int64)[place]

    def _stream(self, process: Int64s, device: Int64s, context: Int64s, stream: Int64s) -> Int64s:
        """Indices of the streams these rows name; one that is not stated has the number ``UNKNOWN``."""
        context, stream = np.maximum(context, UNKNOWN), np.where(stream == NO_ID, UNKNOWN, np.maximum(stream, UNKNOWN))
        device = np.where(context >= 0, UNKNOWN, np.maximum(device, UNKNOWN))  # a context tells the device
        code = _codes((process, device, context, stream))
        first = _firsts(code)
        rows = zip(*(column[first].tolist() for column in (process, device, context, stream)), strict=True)
        return np.array([self._streams(row) for row in rows], np.int64)[code]

    def _stream_kinds(self) -> dict[tuple[int, int, int], StreamKind]:
        columns = ["processId", "contextId", "streamId", "flag"]
        found: dict[tuple[int, int, int], StreamKind] = {}
        for process, context, stream, flag in zip(
            *(c.tolist() for c in self._tables.numbers(_STREAM, columns)), strict=True
        ):
            if flag in _STREAM_FLAGS:
                found[process, context, stream] = _STREAM_FLAGS[flag]
        for table, name in (
            ("TARGET_INFO_CUDA_CONTEXT_INFO", "nullStreamId"),
            ("TARGET_INFO_CUDA_NULL_STREAM", "streamId"),
        ):
            rows = self._tables.numbers(table, ["processId", "contextId", name])
            for process, context, stream in zip(*(c.tolist() for c in rows), strict=True):
                found[process, context, stream] = StreamKind.LEGACY
        return found

    # -- ranges ----------------------------------------------------------------------------------------------

    def _ranges(self) -> Ranges:
        """The ranges of this project's domain."""
        tables = self._tables
        names = [
            "start",
            "end",
            "eventType",
            "globalTid",
            "textId",
            "domainId",
            "uint64Value",
            "int64Value",
            "uint32Value",
            "int32Value",
        ]
        start, end, kind, tid, text_id, domain, *payloads = tables.numbers(_NVTX, names)
        empty = np.empty(0, np.int64)
        if not len(start):
            return Ranges(empty, empty, empty, empty, empty, empty)
        texts = tables.texts(_NVTX, "text")
        owners, place = distinct(tid // _PROCESS)
        process = np.array(self._as_callers(owners), np.int64)[place]
        created = np.flatnonzero(kind == _DOMAIN_CREATE)
        ours = {
            (int(process[row]), int(domain[row]))
            for row in created.tolist()
            if (texts[row] or self._strings.get(int(text_id[row]))) == NVTX_DOMAIN
        }
        is_range = (kind == _PUSH_POP) | (kind == _START_END)
        rows = [row for row in np.flatnonzero(is_range).tolist() if (int(process[row]), int(domain[row])) in ours]
        self._facts.lost_ranges = bool(len(created)) and (not bool(is_range.any()) or bool(ours and not rows))
        last = int(max(start.max(), end.max()))
        picked = np.array(rows, np.int64)
        ends = np.where(end[picked] == ABSENT, last, end[picked])
        payload = np.full(len(picked), UNKNOWN, np.int64)
        for values in payloads:
            payload = np.where((payload == UNKNOWN) & (values[picked] != ABSENT), values[picked], payload)
        named = [self._names(texts[row] or self._strings.get(int(text_id[row])) or "") for row in rows]
        threads = [self._threads((int(process[row]), int(tid[row]) % _PROCESS)) for row in rows]
        domains = np.full(len(picked), self._names(NVTX_DOMAIN), np.int64)
        return Ranges(start[picked], ends, np.array(threads, np.int64), np.array(named, np.int64), domains, payload)


def _codes(columns: Iterable[Int64s]) -> Int64s:
    """For each row a number from 0 on, the same for rows that are equal in all ``columns``."""
    code: Int64s | None = None
    for part in columns:
        values, place = distinct(part)
        code = place if code is None else distinct(code * len(values) + place)[1]  # dense, so that it cannot overflow
    assert code is not None
    return code


def _firsts(code: Int64s) -> Int64s:
    """The first row of each number of ``_codes``."""
    first = np.full(int(code.max(initial=-1)) + 1, -1, np.int64)
    first[code[::-1]] = np.arange(len(code))[::-1]
    return first
