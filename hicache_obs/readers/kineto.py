"""``read_kineto``: the Chrome trace that torch.profiler (Kineto) writes, plain or gzipped, as a ``Profile``.

What the format says and does not say, by version (pytorch/kineto and torch.profiler sources):

* Old traces have integer microseconds, cut off; newer ones decimal microseconds, in traces with
  ``baseTimeNanoseconds`` relative to it. Decimal text becomes integer nanoseconds without passing through a float
  where a float would lose them.
* ``cuda_sync`` rows exist only when asked for. A row's own times are those of the API call, not of the device.
  A wait row names the *record call* it waits for; old ones do not, CUDA 12.9 and later leave it at -1, and before
  April 2026 it could be a later record. Waits on streams without device work are not written at all.
* A query has no result, so it orders nothing. Stream kinds are not written: torch's pool streams are non-blocking.
* AMD traces (``hip...`` calls) have no ``cuda_sync`` rows, and their ``stream`` was the hardware queue before it was
  the stream; then it is 0 where the stream is not known.
* Copies between devices name their device ``inDevice``; Intel's rows have no stream, and calls of their own.

What a row does not say is never filled in: such an operation has no stream, and ``Facts.lost`` names the loss.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Sequence
from itertools import compress
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from hicache_obs.errors import TraceError
from hicache_obs.readers.kineto_file import (
    NO_ARGS,
    Args,
    Event,
    File,
    TimedFile,
    decode,
    id_of,
    place_of,
    unpack,
    whole,
)
from hicache_obs.readers.kineto_streams import DeviceStreams
from hicache_obs.readers.kineto_times import LosesDigits, ns_of
from hicache_obs.readers.profile import (
    ELSEWHERE,
    NO_ID,
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

MAX_BYTES: Final = 4 << 30
"""Largest trace that is read, unpacked: reading takes about three times its size in memory."""
_MAX_NS: Final = 1 << 61
"""Largest time, duration or base: their sums stay inside 64 bits."""
CUT_ERROR_NS: Final = 2000
"""Of an end in whole microseconds: start and duration are both cut off."""
FLOAT_ERROR_NS: Final = 250
"""Of microseconds since 1970 that the writer kept in a float64."""


_OPS: Final = {
    "kernel": OpKind.KERNEL,
    "Kernel": OpKind.KERNEL,
    "gpu_memset": OpKind.MEMSET,
    "Memset": OpKind.MEMSET,
    "gpu_memcpy": OpKind.OTHER_COPY,
    "Memcpy": OpKind.OTHER_COPY,
}
_COPY: Final = re.compile(r"\b([HDPAMS])(?:to|2)([HDPAMS])\b|\bCopy(Host|Device)To(Host|Device)\b")
"""Where from and where to: host, device, peer, array; Intel also has (pageable) memory and shared memory."""
_SIDES: Final = {"M": "H", "P": "D", "Host": "H", "Device": "D"}
_COPIES: Final = {
    "HD": OpKind.HOST_TO_DEVICE,
    "DH": OpKind.DEVICE_TO_HOST,
    "DD": OpKind.DEVICE_TO_DEVICE,
}
_CALL_CATEGORIES: Final = frozenset(("cuda_runtime", "cuda_driver", "Runtime"))
_FOREIGN: Final = frozenset(
    ("xpu_runtime", "xpu_driver", "xpu_sync", "mtia_runtime", "mtia_ccp_events", "mtia_insight", "hpu_op",
     "glow_runtime", "privateuse1_runtime", "privateuse1_driver")
)  # fmt: skip
"""Calls and operations of devices whose order nobody here can tell."""


def read_kineto(path: str | os.PathLike[str], *, limit: int = MAX_BYTES) -> Profile:
    """The profile in a torch.profiler trace (``.json`` or ``.json.gz``).

    Raises:
        TraceError: The file is not such a trace, is damaged, or holds more than ``limit`` bytes.
    """
    source = Path(path)
    data = unpack(source, limit)
    file = decode(source, data, File)
    try:
        return _Builder(source, file).build(file.events)
    except LosesDigits:
        del file
    timed = decode(source, data, TimedFile)
    return _Builder(source, timed).build(timed.events)


class _Builder:
    """Sorts the events of one file into columns."""

    def __init__(self, source: Path, file: File) -> None:
        self._source = source
        self._base = file.base_ns
        cuda, hip = whole(file.cuda), whole(file.hip)
        self._hip = hip > 0
        runtime = f"HIP {hip}" if self._hip else f"CUDA {cuda // 1000}.{cuda % 1000 // 10}" if cuda > 0 else ""
        version = "not stated" if file.schema is None else file.schema
        self._facts = Facts(producer=f"torch.profiler {runtime}".strip(), schema=f"schema {version}")
        self._threads = Interner()
        self._names = Interner()

    def build(self, events: Sequence[Event]) -> Profile:
        """The whole profile."""
        work: list[Event] = []
        apis: list[Event] = []
        marks: list[Event] = []
        syncs: list[Event] = []
        foreign: list[Event] = []
        # Nearly all events of a trace are of no interest here; one look-up per event sorts them.
        buckets = dict.fromkeys(_OPS, work)
        buckets |= dict.fromkeys(_CALL_CATEGORIES, apis)
        buckets |= dict.fromkeys(_FOREIGN, foreign)
        buckets |= {"user_annotation": marks, "cuda_sync": syncs, "cuda_event": syncs}
        for event in events:
            bucket = buckets.get(event.cat)
            if bucket is not None and event.ph == "X":
                bucket.append(event)
        try:
            self._facts.error_ns = self._error(work)
            calls, place = self._calls(apis)
            args = [event.args or NO_ARGS for event in work]
            ids = [id_of(row.correlation) for row in args]
            launched = [place.get(value, UNKNOWN) for value in ids]
            owner = [*self._owner, self._processes[0]]  # the place behind the last call is for UNKNOWN
            places = ((owner[call], *place_of(row)) for call, row in zip(launched, args, strict=True))
            few: dict[tuple[int, int, int], tuple[int, int, int]] = {}  # one object each: Python's collector stays idle
            self._places = [few.setdefault(place, place) for place in places]
            self._streams = DeviceStreams(self._places)
            gaps = self._pair(calls, place, [event.args or NO_ARGS for event in syncs])
            ops = self._ops(work, args, ids, launched)
            ranges = self._ranges(marks)
        except OverflowError:
            raise TraceError(f"{self._source}: an id or time does not fit into 64 bits") from None
        except ValueError as error:
            raise TraceError(f"{self._source}: a time or size is no number: {error}") from None
        for category, count in sorted(Counter(event.cat for event in foreign).items()):
            self._facts.lose(count, f"{category} events: the order of such a device is not known here")
        note_facts(ops, calls, self._facts)
        return Profile(
            source=str(self._source),
            facts=self._facts,
            ops=ops,
            calls=calls,
            ranges=ranges,
            streams=[StreamInfo(*key, None) for key in self._streams.keys],
            threads=[ThreadInfo(_number(process), _number(thread)) for process, thread in self._threads.keys],
            names=self._names.keys,
            gaps=[(process, correlation) for process in self._processes for correlation in sorted(gaps)],
        )

    def _error(self, events: list[Event]) -> int:
        """Largest rounding of a time: whole microseconds, cut off, or a float64 of microseconds since 1970 or later."""
        times: list[Any] = [event.ts for event in events]
        if times and isinstance(times[0], msgspec.Raw):
            return FLOAT_ERROR_NS if any(b"." in bytes(time) for time in times) else CUT_ERROR_NS
        return 1 if any(type(time) is float for time in times) else CUT_ERROR_NS

    def _span(self, events: Sequence[Event]) -> tuple[Int64s, Int64s]:
        start, length = ns_of([event.ts for event in events]), ns_of([event.dur for event in events])
        if len(start) and max(abs(self._base), int(np.abs(start).max()), int(np.abs(length).max())) > _MAX_NS:
            raise OverflowError
        start = start + self._base
        return start, start + length

    def _calls(self, events: list[Event]) -> tuple[Calls, dict[int, int]]:
        """Calls that order or launch something, and their places by correlation id."""
        kinds: dict[str, CallKind | None] = {}
        known: list[Event] = []
        ids: list[int] = []
        for event in events:
            name = event.name
            if name not in kinds:
                kinds[name] = call_kind(name)
            if kinds[name] is not None:
                known.append(event)
                ids.append(UNKNOWN if event.args is None else id_of(event.args.correlation))
        starts, ends = self._span(known)
        usable = (starts != self._base - 1000) & (column(ids) != UNKNOWN)
        useless = len(known) - int(usable.sum())
        self._facts.lose(useless, "host calls without a correlation id or time")
        kept = list(compress(known, usable.tolist())) if useless else known
        correlation = list(compress(ids, usable.tolist())) if useless else ids
        start, end = starts[usable], ends[usable]
        threads = self._threads
        named = [event.name for event in kept]
        unknown = np.full(len(kept), UNKNOWN, np.int64)
        calls = Calls(
            start_ns=start,
            end_ns=np.maximum(end, start),
            thread=column([threads((event.pid, event.tid)) for event in kept]),
            kind=column([kinds[name] for name in named]),  # type: ignore[misc]
            correlation=column(correlation),
            result=unknown,
            stream=unknown.copy(),
            record=np.full(len(kept), Pairing.NOT_APPLICABLE, np.int64),
        )
        place = {value: index for index, value in enumerate(correlation)}
        if len(place) < len(kept):
            self._facts.mixed_ids = self._remove_mixed(kept, correlation, place)
        self._hip = self._hip or any(name.startswith("hip") for name, kind in kinds.items() if kind is not None)
        copies = {name for name in kinds if "Memcpy" in name}
        self._copying = {index for index, name in enumerate(named) if name in copies}
        # Device rows name no process: it is that of the call. What has none is given to the one that calls most.
        self._owner = [pid if type(pid) is int else _number(pid) for pid in [event.pid for event in kept]]
        self._processes = [process for process, _ in Counter(self._owner).most_common()] or [0]
        return calls, place

    def _remove_mixed(self, kept: list[Event], correlation: list[int], place: dict[int, int]) -> int:
        """Forget ids that several processes used: device rows name no process, so nobody knows whose they are."""
        users: dict[int, set[int | float | str | None]] = {}
        for event, value in zip(kept, correlation, strict=True):
            users.setdefault(value, set()).add(event.pid)
        mixed = [value for value, pids in users.items() if len(pids) > 1]
        for value in mixed:
            del place[value]
        return len(mixed)

    def _ops(self, events: list[Event], args: list[Args], correlation: list[int], launched: list[int]) -> Ops:
        start, end = self._span(events)
        useless = (end < start) | (start <= self._base)
        start[useless] = end[useless] = UNKNOWN
        self._facts.dropped = int(useless.sum())
        kinds: dict[tuple[str, str], tuple[OpKind | None, int]] = {}
        found: list[tuple[OpKind | None, int]] = []
        for event in events:
            key = event.cat, event.name
            if key not in kinds:
                kind = _OPS[event.cat]
                kinds[key] = _copy_kind(event.name) if kind is OpKind.OTHER_COPY else (kind, 0)
            found.append(kinds[key])
        names = self._names
        numbers = [whole(a.stream) for a in args]
        pairs = dict.fromkeys(zip(self._places, numbers, strict=True))
        stream_of = {(place, number): self._streams.of_operation(*place, number) for place, number in pairs}
        streams = [stream_of[pair] for pair in zip(self._places, numbers, strict=True)]
        self._note_lost(events, args, launched, streams, found)
        return Ops(
            start_ns=start,
            end_ns=end,
            kind=column([OpKind.OTHER_COPY if kind is None else kind for kind, _ in found]),
            stream=column(streams),
            call=column(launched),
            correlation=column(correlation),
            size_bytes=column([int(float(a.bytes or 0)) for a in args]),
            name=column([names(event.name) for event in events]),
            pageable=column([pageable for _, pageable in found]),
        )

    def _note_lost(
        self,
        events: list[Event],
        args: list[Args],
        launched: list[int],
        streams: list[int],
        kinds: list[tuple[OpKind | None, int]],
    ) -> None:
        """Name what the rows of operations leave open."""
        facts, keys = self._facts, self._streams.keys
        facts.lose(sum(keys[stream][3] == UNKNOWN for stream in streams), "operations whose stream is not stated")
        facts.lose(sum(kind is None for kind, _ in kinds), "copies whose direction is not stated")
        if not self._copying.isdisjoint(launched):
            by_kernel = (
                kind is OpKind.KERNEL and c in self._copying for (kind, _), c in zip(kinds, launched, strict=True)
            )
            facts.lose(sum(by_kernel), "copies that a kernel did, in a direction that is not stated")
        if self._hip:
            unsure = sum(a.hsa_queue is None or not whole(a.stream) for a in args)
            facts.lose(unsure, "operations placed by hardware queue, which several streams may share")
        facts.lose(self._streams.contradictions, "contexts whose operations name several devices")
        if len({device for _, device, _ in self._places}) > 1:
            peers = sum("PtoP" in event.name for event in events)
            facts.lose(peers, "copies between devices, compared with the work of one of them only")
        if len(self._processes) > 1:
            facts.lose(
                launched.count(UNKNOWN), "operations of one of several processes, without the call that tells whose"
            )

    def _ranges(self, events: list[Event]) -> Ranges:
        start, end = self._span(events)
        unknown = np.full(len(events), UNKNOWN, np.int64)
        threads = column([self._threads((event.pid, event.tid)) for event in events])
        names = column([self._names(event.name) for event in events])
        return Ranges(start, end, threads, names, unknown, unknown.copy())

    # -- synchronisation -------------------------------------------------------------------------------------

    def _pair(self, calls: Calls, place: dict[int, int], syncs: list[Args]) -> set[int]:
        """Give waits, queries and synchronisations what their ``cuda_sync`` rows say.

        Returns the correlation ids of rows whose call is not in the file.
        """
        facts = self._facts
        gaps: set[int] = set()
        kinds = calls.kind
        needs = np.isin(kinds, (CallKind.STREAM_WAIT, CallKind.EVENT_QUERY, CallKind.EVENT_SYNC))
        calls.record[needs] = Pairing.NO_ROW
        first = min(place, default=0)
        made = _Made()
        elsewhere = 0
        for row in syncs:
            if row.cuda_sync_kind is None:  # a cuda_event row: the record itself
                index = place.get(id_of(row.correlation))
                made.note(row, row.event_id, id_of(row.correlation))
                if index is not None and kinds[index] == CallKind.EVENT_RECORD:
                    calls.stream[index] = self._named(index, row, row.stream)
        for row in syncs:
            if row.cuda_sync_kind is None:
                continue
            facts.sync_rows += 1
            correlation = id_of(row.correlation)
            index = place.get(correlation)
            if index is None:
                if correlation != UNKNOWN:
                    gaps.add(correlation)
                continue
            kind = CallKind(int(kinds[index]))
            elsewhere += kind is CallKind.DEVICE_SYNC and not self._streams.may_work(
                self._owner[index], place_of(row)[1]
            )
            if kind in (CallKind.STREAM_WAIT, CallKind.STREAM_SYNC):
                calls.stream[index] = self._named(index, row, row.stream)
            if needs[index]:
                calls.record[index] = self._record(calls, place, row, first)
                if calls.record[index] >= 0:
                    made.note(row, row.event, id_of(row.record))
        for row in syncs:
            index = place.get(id_of(row.correlation))
            if index is not None and needs[index] and calls.record[index] >= 0 and made.later(row):
                calls.record[index] = Pairing.UNRESOLVED
        facts.lose(elsewhere, ELSEWHERE)
        return gaps

    def _named(self, index: int, row: Args, stream: Any) -> int:
        """The stream that a row of call ``index`` names."""
        device, context = place_of(row)
        return self._streams.of_sync(self._owner[index], device, context, whole(stream))

    def _record(self, calls: Calls, place: dict[int, int], row: Args, first: int) -> int:
        named, own = id_of(row.record), id_of(row.correlation)
        if named == UNKNOWN or not 0 <= whole(row.wait_on_stream) < NO_ID:
            return Pairing.UNRESOLVED
        if named >= own:
            return Pairing.FUTURE
        record = place.get(named)
        if record is None:
            return Pairing.BEFORE_FILE if named < first else Pairing.UNRESOLVED
        if calls.kind[record] != CallKind.EVENT_RECORD or self._owner[record] != self._owner[place[own]]:
            return Pairing.UNRESOLVED
        stream = self._named(record, row, row.wait_on_stream)
        if calls.stream[record] not in (UNKNOWN, stream):
            return Pairing.UNRESOLVED  # rows contradict each other
        calls.stream[record] = stream
        return record


class _Made:
    """Records that rows name, by event: a wait can only mean the latest one before it."""

    def __init__(self) -> None:
        self._records: dict[tuple[int, int], list[int]] = {}
        self._sorted = False

    def note(self, row: Args, event: Any, record: int) -> None:
        """``record`` is one of ``event`` in the row's context."""
        if record != UNKNOWN and whole(event) != UNKNOWN:
            self._records.setdefault((whole(row.context), whole(event)), []).append(record)

    def later(self, row: Args) -> bool:
        """Whether the event was recorded again between the record that a wait names and the wait itself."""
        if not self._sorted:
            for records in self._records.values():
                records.sort()
            self._sorted = True
        records = self._records.get((whole(row.context), whole(row.event)), [])
        place = bisect_right(records, id_of(row.record))
        return place < len(records) and records[place] < id_of(row.correlation)


def _copy_kind(name: str) -> tuple[OpKind | None, int]:
    """Kind of a copy from its name, such as ``Memcpy HtoD (Pinned -> Device)``; ``None`` if that does not say."""
    match = _COPY.search(name)
    if match is None:
        return None, 0
    sides = "".join(_SIDES.get(side, side) for side in match.groups() if side)
    return _COPIES.get(sides, OpKind.OTHER_COPY), int("Pageable" in name)


def _number(value: object) -> int:
    return value if isinstance(value, int) else UNKNOWN
