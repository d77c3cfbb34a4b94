"""``join``: a journal and a profile of one run as one trace: what happened from the journal, when from the profile.

The journal has every page set and every edge; its ranges of domain ``hicache`` carry the same operation ids into the
profiler's file. An operation's times are those of the device operations that were launched inside its range. Where
the profile has no device operations at all, as with a device made of host threads, the range itself is the operation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hicache_obs.errors import TraceError
from hicache_obs.readers.profile import UNKNOWN, CallKind, Profile
from hicache_obs.records import AnyRecord, GraphReplay, Kernel, Memcpy, OpId, Relocate, Times
from hicache_obs.trace import Trace

_TIMED: Final = (Kernel, Memcpy, GraphReplay, Relocate)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of a journal was found in a profile.

    Attributes:
        operations: Operations of the journal that run on the device.
        timed: Those of them that the profile gives times for.
        from_ranges: The times are those of ranges, not of device operations.
    """

    operations: int
    timed: int
    from_ranges: bool


def join(journal: Trace, profile: Profile) -> tuple[Trace, Coverage]:
    """The journal's trace with the profile's device times in place of its own, and how many there were.

    Raises:
        TraceError: The two share no operation, or the profile holds an operation id twice.
    """
    times, from_ranges = _times_by_op(profile)
    operations = [record for record in journal if isinstance(record, _TIMED)]
    shift = _shift(operations, profile)
    records: list[AnyRecord] = []
    timed = 0
    for record in journal:
        if isinstance(record, Times):
            continue
        records.append(record)
        if isinstance(record, _TIMED) and record.op in times:
            start_ns, end_ns = times[record.op]
            error_ns = profile.facts.error_ns
            records.append(Times(record.op, record.thread, end_ns + shift, start_ns + shift, end_ns + shift, error_ns))
            timed += 1
    if not timed:
        raise TraceError(
            f"{profile.source}: none of the {len(operations)} operations of {journal.source} is in it; "
            "they must be recordings of the same run"
        )
    source = f"{profile.source} + {journal.source}"
    return replace(journal, source=source, records=records), Coverage(len(operations), timed, from_ranges)


def _times_by_op(profile: Profile) -> tuple[dict[int, tuple[int, int]], bool]:
    """Start and end of every operation id that a range carries."""
    ranges = profile.ranges
    rows = np.flatnonzero(ranges.payload != UNKNOWN).tolist()
    from_ranges = not len(profile.ops)
    spans = {} if from_ranges else _launched_in(profile, rows)
    found: dict[int, tuple[int, int]] = {}
    for row in rows:
        op = int(ranges.payload[row])
        span = (int(ranges.start_ns[row]), int(ranges.end_ns[row])) if from_ranges else spans.get(row)
        if span is None:
            continue
        if op in found:
            raise TraceError(
                f"{profile.source}: operation id {op} is in two ranges; a profile must be of one recorded run"
            )
        found[op] = span
    return found, from_ranges


def _launched_in(profile: Profile, rows: list[int]) -> dict[int, tuple[int, int]]:
    """Of each range: first start and last end of the device operations launched inside it, innermost range first."""
    calls, ops, ranges = profile.calls, profile.ops, profile.ranges
    owner: dict[int, int] = {}
    for thread in np.unique(ranges.thread[rows]).tolist() if rows else []:
        mine = sorted((row for row in rows if ranges.thread[row] == thread), key=lambda row: int(ranges.start_ns[row]))
        launches = np.flatnonzero((calls.thread == thread) & (calls.kind == CallKind.LAUNCH))
        launches = launches[np.argsort(calls.start_ns[launches], kind="stable")]
        starts = calls.start_ns[launches]
        for row in mine:  # an inner range begins later and so takes over what the outer one claimed
            low, high = np.searchsorted(starts, (ranges.start_ns[row], ranges.end_ns[row]))
            owner.update(dict.fromkeys(launches[low:high].tolist(), row))
    spans: dict[int, tuple[int, int]] = {}
    for index, call in enumerate(ops.call.tolist()):
        owned = owner.get(call)
        start, end = int(ops.start_ns[index]), int(ops.end_ns[index])
        if owned is None or start == UNKNOWN:
            continue
        known = spans.get(owned, (start, end))
        spans[owned] = min(known[0], start), max(known[1], end)
    return spans


def _shift(operations: list[Kernel | Memcpy | GraphReplay | Relocate], profile: Profile) -> int:
    """Nanoseconds from the profile's clock to the journal's: no range can begin before its operation was issued."""
    issued = {int(record.op): record.host_ns for record in operations}
    ranges = profile.ranges
    gaps = [
        issued[op] - start
        for op, start in zip(ranges.payload.tolist(), ranges.start_ns.tolist(), strict=True)
        if op in issued
    ]
    return max(gaps, default=0)


def operation_ids(profile: Profile) -> frozenset[OpId]:
    """Operation ids that the profile's ranges carry."""
    return frozenset(OpId(op) for op in profile.ranges.payload.tolist() if op != UNKNOWN)
