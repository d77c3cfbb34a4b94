"""``read_kineto``: the Chrome trace that torch.profiler (Kineto) writes, plain or gzipped, as a ``Profile``.

What the format says and does not say, by version (pytorch/kineto and torch.profiler sources):

* Old traces have integer microseconds, cut off; newer ones decimal microseconds, in traces with
  ``baseTimeNanoseconds`` relative to it. Decimal text becomes integer nanoseconds without passing through a float
  where a float would lose them.
* ``cuda_sync`` rows exist only when asked for. A row's own times are those of the API call, not of the device.
  A wait row names the *record call* it waits for; old ones do not, CUDA 12.9 and later leave it at -1, and before
  April 2026 it could be a later record. Waits on streams without device work are not written at all.
* A query has no result, so it orders nothing. Stream kinds are not written: torch's pool streams are non-blocking.
* AMD traces (``hip...`` calls) have no ``cuda_sync`` rows.
"""

from __future__ import annotations

import os
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import msgspec
import numpy as np
from msgspec import Struct, field

from hicache_obs.errors import TraceError
from hicache_obs.readers.profile import (
    UNKNOWN,
    CallKind,
    Calls,
    Facts,
    Int64s,
    Interner,
    OpKind,
    Ops,
    Pairing,
    Profile,
    Ranges,
    StreamInfo,
    ThreadInfo,
    call_kind,
    column,
    note_facts,
)
from hicache_obs.readers.trace_file import size_of

MAX_BYTES: Final = 4 << 30
"""Largest trace that is read, unpacked: reading takes about three times its size in memory."""
_CHUNK: Final = 1 << 20
_GZIP_FORMAT: Final = 31
"""``wbits`` of zlib."""
_GZIP: Final = b"\x1f\x8b"
_MAX_US: Final = (1 << 63) // 1000
_EXACT_FLOAT: Final = float(1 << 42)
"""Microseconds below which a float64 is exact to a nanosecond."""
CUT_ERROR_NS: Final = 2000
"""Of an end in whole microseconds: start and duration are both cut off."""
FLOAT_ERROR_NS: Final = 250
"""Of microseconds since 1970 that the writer kept in a float64."""


class _Args(Struct, gc=False):
    stream: int | None = None
    device: int | None = None
    correlation: int | None = None
    bytes: int | float | str | None = None
    cuda_sync_kind: str | None = None
    wait_on_stream: int | None = None
    record: int | None = field(default=None, name="wait_on_cuda_event_record_corr_id")


class _Event(Struct, gc=False):
    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: int | str | None = None
    tid: int | str | None = None
    ts: int | float = -1
    dur: int | float = -1
    args: _Args | None = None


class _File(Struct, gc=False):
    events: list[_Event] = field(name="traceEvents")
    base_ns: int = field(default=0, name="baseTimeNanoseconds")
    schema: int | str | None = field(default=None, name="schemaVersion")
    cuda: int | None = field(default=None, name="cuda_runtime_version")
    hip: int | None = field(default=None, name="hip_runtime_version")


class _TimedEvent(_Event, gc=False):
    ts: msgspec.Raw = msgspec.Raw(b"-1")  # type: ignore[assignment]
    dur: msgspec.Raw = msgspec.Raw(b"-1")  # type: ignore[assignment]


class _TimedFile(_File, gc=False):
    events: list[_TimedEvent] = field(name="traceEvents")  # type: ignore[assignment]


_OPS: Final = {
    "kernel": OpKind.KERNEL,
    "Kernel": OpKind.KERNEL,
    "gpu_memset": OpKind.MEMSET,
    "Memset": OpKind.MEMSET,
    "gpu_memcpy": OpKind.OTHER_COPY,
    "Memcpy": OpKind.OTHER_COPY,
}
_COPIES: Final = {
    "HtoD": OpKind.HOST_TO_DEVICE,
    "DtoH": OpKind.DEVICE_TO_HOST,
    "DtoD": OpKind.DEVICE_TO_DEVICE,
    "PtoP": OpKind.DEVICE_TO_DEVICE,
}
_CALL_CATEGORIES: Final = frozenset(("cuda_runtime", "cuda_driver", "Runtime"))


def read_kineto(path: str | os.PathLike[str], *, limit: int = MAX_BYTES) -> Profile:
    """The profile in a torch.profiler trace (``.json`` or ``.json.gz``).

    Raises:
        TraceError: The file is not such a trace, is damaged, or holds more than ``limit`` bytes.
    """
    source = Path(path)
    data = _unpack(source, limit)
    file = _decode(source, data, _File)
    try:
        return _Builder(source, file).build(file.events)
    except _LosesDigits:
        del file
    timed = _decode(source, data, _TimedFile)
    return _Builder(source, timed).build(timed.events)


def _unpack(source: Path, limit: int) -> bytes | bytearray:
    try:
        size = size_of(source)
        with source.open("rb") as file:
            packed = file.read(2) == _GZIP
            file.seek(0)
            if packed:
                return _gunzip(source, file, limit)
            if size > limit:
                raise TraceError(f"{source}: {size} bytes; at most {limit} are read")
            return file.read(limit)
    except (EOFError, zlib.error) as error:
        raise TraceError(f"{source}: damaged gzip file ({error})") from None
    except OSError as error:
        raise TraceError(f"{source}: {error.strerror or error}") from None


def _gunzip(source: Path, file: BinaryIO, limit: int) -> bytearray:
    """All members of a gzip file; no more than ``limit`` bytes are ever unpacked."""
    data = bytearray()
    member = zlib.decompressobj(_GZIP_FORMAT)
    while chunk := file.read(_CHUNK):
        while chunk:
            data += member.decompress(chunk, limit + 1 - len(data))
            if len(data) > limit:
                raise TraceError(f"{source}: unpacks to more than {limit} bytes, which are the most that are read")
            chunk = member.unused_data.lstrip(b"\0") if member.eof else member.unconsumed_tail
            if member.eof and chunk:
                member = zlib.decompressobj(_GZIP_FORMAT)
    if not member.eof:
        raise EOFError("it ends early")
    return data


def _decode(source: Path, data: bytes | bytearray, kind: type[Any]) -> Any:
    try:
        if data[:64].lstrip()[:1] == b"[":  # the bare list of the same format
            return kind(msgspec.json.decode(data, type=list[_Event] if kind is _File else list[_TimedEvent]))
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise TraceError(f"{source}: not a torch.profiler trace: {error}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise TraceError(f"{source}: not valid JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise TraceError(f"{source}: not UTF-8 at byte {error.start}") from None


class _LosesDigits(Exception):
    """Times are too large for a float to hold their nanoseconds: they must be decoded as text."""


def _ns(values: list[Any]) -> Int64s:
    """Nanoseconds of microseconds, as decoded: integers, floats that hold them exactly, or decimal text.

    Raises:
        _LosesDigits: Floats that do not.
        OverflowError: Beyond 64 bits.
    """
    if not values:
        return np.empty(0, np.int64)
    if isinstance(values[0], msgspec.Raw):
        return column([_text_ns(raw) for raw in values])
    numbers = np.array(values)
    if numbers.dtype.kind == "i":
        if int(np.abs(numbers).max()) >= _MAX_US:
            raise OverflowError
        return numbers.astype(np.int64, copy=False) * 1000
    if numbers.dtype.kind != "f":
        raise OverflowError
    if not bool((np.abs(numbers) < _EXACT_FLOAT).all()):  # not a number included
        raise _LosesDigits
    rounded: Int64s = np.rint(numbers * 1000).astype(np.int64)
    return rounded


def _text_ns(raw: msgspec.Raw) -> int:
    """Nanoseconds of decimal microseconds in text; digits below a nanosecond are cut off."""
    text = bytes(raw).decode("ascii")
    if "e" in text or "E" in text:
        return round(float(text) * 1000)
    whole, _, fraction = text.partition(".")
    sign = -1 if whole.startswith("-") else 1
    return int(whole) * 1000 + sign * int((fraction + "000")[:3])


class _Builder:
    """Sorts the events of one file into columns."""

    def __init__(self, source: Path, file: _File) -> None:
        self._source = source
        self._base = file.base_ns
        runtime = f"CUDA {file.cuda // 1000}.{file.cuda % 1000 // 10}" if file.cuda else ""
        if file.hip:
            runtime = f"HIP {file.hip}"
        version = "not stated" if file.schema is None else file.schema
        self._facts = Facts(producer=f"torch.profiler {runtime}".strip(), schema=f"schema {version}")
        self._streams = Interner()
        self._threads = Interner()
        self._names = Interner()

    def build(self, events: Sequence[_Event]) -> Profile:
        """The whole profile."""
        work: list[_Event] = []
        apis: list[_Event] = []
        marks: list[_Event] = []
        syncs: list[_Event] = []
        # Nearly all events of a trace are of no interest here; one look-up per event sorts them.
        buckets = dict.fromkeys(_OPS, work)
        buckets |= dict.fromkeys(_CALL_CATEGORIES, apis)
        buckets |= {"user_annotation": marks, "cuda_sync": syncs, "cuda_event": syncs}
        for event in events:
            bucket = buckets.get(event.cat)
            if bucket is not None and event.ph == "X":
                bucket.append(event)
        try:
            self._facts.error_ns = self._error(work)
            calls, place = self._calls(apis)
            # Device rows name no process. A trace is of one process; of several, the one that calls most.
            processes = Counter(self._threads.keys[thread][0] for thread in calls.thread.tolist())
            process = _number(processes.most_common(1)[0][0]) if processes else 0
            gaps = self._pair(calls, place, [event.args for event in syncs if event.args is not None])
            ops = self._ops(work, place)
            ranges = self._ranges(marks)
        except OverflowError:
            raise TraceError(f"{self._source}: an id or time does not fit into 64 bits") from None
        except ValueError as error:
            raise TraceError(f"{self._source}: a time or size is no number: {error}") from None
        note_facts(ops, calls, self._facts)
        return Profile(
            source=str(self._source),
            facts=self._facts,
            ops=ops,
            calls=calls,
            ranges=ranges,
            streams=[StreamInfo(process, device, 0, number, None) for device, number in self._streams.keys],
            threads=[ThreadInfo(_number(process), _number(thread)) for process, thread in self._threads.keys],
            names=self._names.keys,
            gaps=[(process, correlation) for correlation in sorted(gaps)],
        )

    def _error(self, events: list[_Event]) -> int:
        """Largest rounding of a time: whole microseconds, cut off, or a float64 of microseconds since 1970 or later."""
        times: list[Any] = [event.ts for event in events]
        if times and isinstance(times[0], msgspec.Raw):
            return FLOAT_ERROR_NS if any(b"." in bytes(time) for time in times) else CUT_ERROR_NS
        return 1 if any(type(time) is float for time in times) else CUT_ERROR_NS

    def _span(self, events: list[_Event]) -> tuple[Int64s, Int64s]:
        start = _ns([event.ts for event in events]) + self._base
        return start, start + _ns([event.dur for event in events])

    def _calls(self, events: list[_Event]) -> tuple[Calls, dict[int, int]]:
        """Calls that order or launch something, and their places by correlation id."""
        kinds: dict[str, CallKind | None] = {}
        kept: list[_Event] = []
        found: list[CallKind] = []
        for event in events:
            name = event.name
            if name not in kinds:
                kinds[name] = call_kind(name)
            kind = kinds[name]
            if kind is not None and event.args is not None and event.args.correlation is not None:
                kept.append(event)
                found.append(kind)
        start, end = self._span(kept)
        threads = self._threads
        correlation = [event.args.correlation for event in kept]  # type: ignore[union-attr]
        unknown = np.full(len(kept), UNKNOWN, np.int64)
        calls = Calls(
            start_ns=start,
            end_ns=np.maximum(end, start),
            thread=column([threads((event.pid, event.tid)) for event in kept]),
            kind=column(found),
            correlation=column(correlation),  # type: ignore[arg-type]
            result=unknown,
            stream=unknown.copy(),
            record=np.full(len(kept), Pairing.NOT_APPLICABLE, np.int64),
        )
        place: dict[int, int] = {value: index for index, value in enumerate(correlation)}  # type: ignore[misc]
        if len(place) < len(kept):
            self._facts.mixed_ids = self._remove_mixed(kept, place)
        return calls, place

    def _remove_mixed(self, kept: list[_Event], place: dict[int, int]) -> int:
        """Forget ids that several processes used: device rows name no process, so nobody knows whose they are."""
        users: dict[int, set[int | str | None]] = {}
        for event in kept:
            users.setdefault(event.args.correlation, set()).add(event.pid)  # type: ignore[union-attr, arg-type]
        mixed = [value for value, pids in users.items() if len(pids) > 1]
        for value in mixed:
            del place[value]
        return len(mixed)

    def _ops(self, events: list[_Event], place: dict[int, int]) -> Ops:
        events = [event for event in events if event.args is not None]
        start, end = self._span(events)
        useless = (end < start) | (start <= self._base)
        start[useless] = end[useless] = UNKNOWN
        self._facts.dropped = int(useless.sum())
        kinds: dict[tuple[str, str], tuple[OpKind, int]] = {}
        found: list[tuple[OpKind, int]] = []
        for event in events:
            key = event.cat, event.name
            if key not in kinds:
                kind = _OPS[event.cat]
                kinds[key] = _copy_kind(event.name) if kind is OpKind.OTHER_COPY else (kind, 0)
            found.append(kinds[key])
        args = [event.args for event in events if event.args is not None]
        streams, names = self._streams, self._names
        correlation = [UNKNOWN if a.correlation is None else a.correlation for a in args]
        launched = column([place.get(value, UNKNOWN) for value in correlation])
        return Ops(
            start_ns=start,
            end_ns=end,
            kind=column([kind for kind, _ in found]),
            stream=column([streams((a.device or 0, a.stream or 0)) for a in args]),
            call=launched,
            correlation=column(correlation),
            size_bytes=column([int(float(a.bytes or 0)) for a in args]),
            name=column([names(event.name) for event in events]),
            pageable=column([pageable for _, pageable in found]),
        )

    def _ranges(self, events: list[_Event]) -> Ranges:
        start, end = self._span(events)
        unknown = np.full(len(events), UNKNOWN, np.int64)
        threads = column([self._threads((event.pid, event.tid)) for event in events])
        names = column([self._names(event.name) for event in events])
        return Ranges(start, end, threads, names, unknown, unknown.copy())

    def _pair(self, calls: Calls, place: dict[int, int], syncs: list[_Args]) -> set[int]:
        """Give waits, queries and synchronisations what their ``cuda_sync`` rows say.

        Returns the correlation ids of rows whose call is not in the file.
        """
        facts = self._facts
        gaps: set[int] = set()
        kinds = calls.kind
        needs = np.isin(kinds, (CallKind.STREAM_WAIT, CallKind.EVENT_QUERY, CallKind.EVENT_SYNC))
        calls.record[needs] = Pairing.NO_ROW
        first = min(place, default=0)
        for row in syncs:
            index = place.get(row.correlation) if row.correlation is not None else None
            if row.cuda_sync_kind is None:
                if index is not None and row.stream is not None:  # a cuda_event row: the record itself
                    calls.stream[index] = self._streams((row.device or 0, row.stream))
                continue
            facts.sync_rows += 1
            if index is None:
                if row.correlation is not None:
                    gaps.add(row.correlation)
                continue
            kind = CallKind(int(kinds[index]))
            device = row.device or 0
            if kind in (CallKind.STREAM_WAIT, CallKind.STREAM_SYNC) and row.stream is not None and row.stream >= 0:
                calls.stream[index] = self._streams((device, row.stream))
            if kind in (CallKind.STREAM_WAIT, CallKind.EVENT_QUERY, CallKind.EVENT_SYNC):
                calls.record[index] = self._record(calls, place, row, first, device)
        return gaps

    def _record(self, calls: Calls, place: dict[int, int], row: _Args, first: int, device: int) -> int:
        assert row.correlation is not None
        if (
            row.record is None
            or row.record < 0
            or row.wait_on_stream is None
            or not 0 <= row.wait_on_stream < 2**32 - 1
        ):
            return Pairing.UNRESOLVED
        if row.record >= row.correlation:
            return Pairing.FUTURE
        record = place.get(row.record)
        if record is None:
            return Pairing.BEFORE_FILE if row.record < first else Pairing.UNRESOLVED
        if calls.kind[record] != CallKind.EVENT_RECORD:
            return Pairing.UNRESOLVED
        calls.stream[record] = self._streams((device, row.wait_on_stream))
        return record


def _copy_kind(name: str) -> tuple[OpKind, int]:
    """Kind of a copy from its name, such as ``Memcpy HtoD (Pinned -> Device)``."""
    kind = next((kind for text, kind in _COPIES.items() if text in name), OpKind.OTHER_COPY)
    return kind, int("Pageable" in name)


def _number(value: int | str | None) -> int:
    return value if isinstance(value, int) else UNKNOWN
