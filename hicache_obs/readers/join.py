"""``join``: a journal and a profile of one run as one trace: what happened from the journal, when from the profile.

The journal has every page set and every edge; its ranges of domain ``hicache`` carry the same operation ids into the
profiler's file. An operation's times are those of the device operations that were launched inside its range. Where
the profile has no device operations at all, as with a device made of host threads, the range itself is the operation;
but only if it is in the thread that ran it: around a launch it says when that was called, not when the device ran it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hicache_obs.errors import TraceError
from hicache_obs.readers.profile import LAUNCHING, UNKNOWN, Profile
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Define,
    DefineSpace,
    EventWait,
    GraphReplay,
    Kernel,
    Memcpy,
    OpId,
    Relocate,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
)
from hicache_obs.trace import Trace

_TIMED: Final = (Kernel, Memcpy, GraphReplay, Relocate)
_WAITS: Final = (EventWait, WaitStream)
_CLEARER: Final = 2
"""The process of a journal fits at least this many times better than the next one, or it is not named."""
_Operation = Kernel | Memcpy | GraphReplay | Relocate
_Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a journal was found in a profile.

    Attributes:
        operations: Operations of the journal that run on the device.
        timed: Those of them that the profile gives times for.
        from_ranges: The times are those of ranges, not of device operations.
        process: Process of the profile.
        shift_ns: Added to the profile's times: the journal's clock minus its own.
    """

    operations: int
    timed: int
    from_ranges: bool
    process: int
    shift_ns: int


def join(journal: Trace, profile: Profile) -> tuple[Trace, Coverage]:
    """The journal's trace with the profile's device times in place of its own, and how many there were.

    Raises:
        TraceError: The two share no operation, the profile holds an operation id twice or in several processes that
            fit equally well, or it has launch times only.
    """
    operations = {record.op: record for record in journal if isinstance(record, _TIMED)}
    rows, process = _rows_of_run(journal, profile, operations)
    from_ranges = not len(profile.ops)
    if from_ranges:
        _check_workers(profile, operations, rows)
    times = _times_by_op(profile, rows, from_ranges=from_ranges)
    timed = sum(op in times for op in operations)
    if not timed:
        raise TraceError(
            f"{profile.source}: has no device times of the {len(operations)} operations of {journal.source}; "
            "record with CUDA tracing on (nsys -t cuda,nvtx)"
        )
    error_ns = profile.facts.error_ns
    shift = max(_gaps(profile, operations, rows))
    records: list[AnyRecord] = [*_early(journal, times, error_ns, from_ranges=from_ranges)]
    for record in journal:
        if isinstance(record, Times):
            continue
        records.append(record)
        if isinstance(record, _TIMED) or (from_ranges and isinstance(record, _WAITS)):
            span = times.get(record.op)
            if span is not None:
                start, end = span[0] + shift, span[1] + shift
                records.append(Times(record.op, record.thread, end, start, end, error_ns))
    source = f"{profile.source} + {journal.source}"
    coverage = Coverage(len(operations), timed, from_ranges, process, shift)
    return replace(journal, source=source, records=records), coverage


def _rows_of_run(journal: Trace, profile: Profile, operations: dict[OpId, _Operation]) -> tuple[list[int], int]:
    """Ranges of the journal's operations in the process that it is of, and that process.

    Processes number their operations alike. Of several, it is the one whose ranges follow the journal's calls at the
    steadiest distance: both were made by the same calls.
    """
    ranges, threads = profile.ranges, profile.threads
    known = np.array(sorted(int(op) for op in operations), np.int64)
    rows = np.flatnonzero(np.isin(ranges.payload, known)).tolist()
    by_process: dict[int, list[int]] = {}
    for row in rows:
        by_process.setdefault(threads[int(ranges.thread[row])].process, []).append(row)
    if not by_process:
        raise TraceError(
            f"{profile.source}: none of the {len(operations)} operations of {journal.source} is in it; "
            "they must be recordings of the same run"
        )
    fits = []
    for process, found in by_process.items():
        gaps = np.array(_gaps(profile, operations, found))
        unsteady = float(np.abs(gaps - np.median(gaps)).mean())
        fits.append((len(found) < max(map(len, by_process.values())), unsteady, process))
    fits.sort()
    if len(fits) > 1 and fits[0][0] == fits[1][0] and fits[1][1] < _CLEARER * fits[0][1] + 1:
        names = ", ".join(str(process) for _, _, process in fits)
        raise TraceError(
            f"{profile.source}: processes {names} have ranges with the operation ids of {journal.source}, and it "
            "cannot be told which of them it is of; record one process per file"
        )
    process = fits[0][2]
    return by_process[process], process


def _gaps(profile: Profile, operations: dict[OpId, _Operation], rows: list[int]) -> list[int]:
    """Nanoseconds from each range's begin to its operation's call, on the two clocks. No range begins before its
    operation was called, so their maximum leads from the profile's clock to the journal's."""
    ranges = profile.ranges
    return [operations[OpId(int(ranges.payload[row]))].host_ns - int(ranges.start_ns[row]) for row in rows]


def _check_workers(profile: Profile, operations: dict[OpId, _Operation], rows: list[int]) -> None:
    """The ranges of a profile without device operations must be in the threads that are the streams."""
    ranges = profile.ranges
    streams: dict[int, set[StreamId]] = {}
    runners: dict[ThreadId, set[int]] = {}
    for row in rows:
        record, thread = operations[OpId(int(ranges.payload[row]))], int(ranges.thread[row])
        streams.setdefault(thread, set()).add(record.stream)
        runners.setdefault(record.thread, set()).add(thread)
    if max(map(len, streams.values())) > 1 or max(map(len, runners.values())) < 2:
        raise TraceError(
            f"{profile.source}: no device operations, and its ranges are around launches: they do not say when the "
            "device ran; record with CUDA tracing on (nsys -t cuda,nvtx)"
        )


def _times_by_op(profile: Profile, rows: list[int], *, from_ranges: bool) -> dict[OpId, _Span]:
    """Start and end of every operation id that one of ``rows`` carries, and of the waits beside them."""
    ranges = profile.ranges
    process = profile.threads[int(ranges.thread[rows[0]])].process
    own = np.array([thread.process == process for thread in profile.threads], bool)
    all_rows = np.flatnonzero((ranges.payload != UNKNOWN) & own[ranges.thread]).tolist()
    spans = {} if from_ranges else _launched_in(profile, all_rows)
    found: dict[OpId, _Span] = {}
    seen: set[int] = set()
    for row in all_rows:
        op = OpId(int(ranges.payload[row]))
        if op in seen:
            raise TraceError(
                f"{profile.source}: operation id {op} is in two ranges of process {process}; "
                "a profile must be of one recorded run"
            )
        seen.add(op)
        span = (int(ranges.start_ns[row]), int(ranges.end_ns[row])) if from_ranges else spans.get(row)
        if span is not None:
            found[op] = span
    return found


def _launched_in(profile: Profile, rows: list[int]) -> dict[int, _Span]:
    """Of each range: first start and last end of the device operations launched inside it, innermost range first."""
    calls, ops, ranges = profile.calls, profile.ops, profile.ranges
    owner: dict[int, int] = {}
    for thread in np.unique(ranges.thread[rows]).tolist() if rows else []:
        mine = sorted((row for row in rows if ranges.thread[row] == thread), key=lambda row: int(ranges.start_ns[row]))
        launches = np.flatnonzero((calls.thread == thread) & np.isin(calls.kind, LAUNCHING))
        launches = launches[np.argsort(calls.start_ns[launches], kind="stable")]
        starts = calls.start_ns[launches]
        for row in mine:  # an inner range begins later and so takes over what the outer one claimed
            low, high = np.searchsorted(starts, (ranges.start_ns[row], ranges.end_ns[row]))
            owner.update(dict.fromkeys(launches[low:high].tolist(), row))
    spans: dict[int, _Span] = {}
    timed: set[int] = set()
    for index, call in enumerate(ops.call.tolist()):
        owned = owner.get(call)
        start, end = int(ops.start_ns[index]), int(ops.end_ns[index])
        if owned is None or start == UNKNOWN:
            continue
        timed.add(call)
        known = spans.get(owned, (start, end))
        spans[owned] = min(known[0], start), max(known[1], end)
    for call, owned in owner.items():
        if call not in timed and calls.result[call] in (0, UNKNOWN):
            spans.pop(owned, None)  # a part of it is missing: what is left may be shorter
    return spans


def _early(journal: Trace, times: dict[OpId, _Span], error_ns: int, *, from_ranges: bool) -> Iterable[AnyRecord]:
    """Sites of kernels that began before what their stream ran earlier had ended: its order does not hold for them."""
    if from_ranges:
        return
    ends: dict[StreamId, int] = {}
    early: set[int] = set()
    for record in journal:
        span = times.get(record.op) if isinstance(record, _TIMED) else None
        if span is None or not isinstance(record, _TIMED):
            continue
        if isinstance(record, Kernel) and span[0] < ends.get(record.stream, span[0]) - 2 * error_ns:
            early.add(record.site)
        ends[record.stream] = max(ends.get(record.stream, span[1]), span[1])
    for site in sorted(early):
        yield Define(NO_OP, ThreadId(0), 0, DefineSpace.EARLY_SITE, site, journal.names.site(site))
