"""``preflight``: what can be concluded from a profile, and what stands in the way; before anything is judged.

Each check is a fact about the file, what it means for a verdict, and the flag or setting that would mend it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache_obs.readers.profile import UNKNOWN, CallKind, OpKind, Pairing, Profile

_ORDERING: Final = (CallKind.STREAM_WAIT, CallKind.EVENT_SYNC, CallKind.STREAM_SYNC, CallKind.DEVICE_SYNC)


class Level(enum.Enum):
    """How far a file goes."""

    PROVABLE = "provable"
    """Order can be proved or its absence shown."""
    OBSERVABLE = "observable only"
    """Times can be compared; order cannot be proved."""
    UNDECIDABLE = "not decidable"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        name: Short and fixed.
        good: Nothing stands in the way.
        text: What the file shows.
        advice: What would mend it; empty if nothing needs to be.
    """

    name: str
    good: bool
    text: str
    advice: str = ""


@dataclass(frozen=True, slots=True)
class Counts:
    """Synchronisations of a profile: how many calls, and for how many the file says what they refer to."""

    waits: int
    waits_paired: int
    queries: int
    queries_paired: int
    event_syncs: int
    event_syncs_paired: int
    stream_syncs: int
    device_syncs: int
    future: int
    unresolved: int
    no_row: int


def count_syncs(profile: Profile) -> Counts:
    """What the calls of a profile look like."""
    calls = profile.calls

    def paired(kind: CallKind) -> tuple[int, int]:
        of_kind = calls.record[calls.kind == kind]
        return len(of_kind), int(((of_kind >= 0) | (of_kind == Pairing.BEFORE_FILE)).sum())

    waits, waits_paired = paired(CallKind.STREAM_WAIT)
    syncs, syncs_paired = paired(CallKind.EVENT_SYNC)
    queries, queries_paired = paired(CallKind.EVENT_QUERY)
    needs = calls.record[np.isin(calls.kind, (CallKind.STREAM_WAIT, CallKind.EVENT_SYNC))]
    return Counts(
        waits=waits,
        waits_paired=waits_paired,
        queries=queries,
        queries_paired=queries_paired,
        event_syncs=syncs,
        event_syncs_paired=syncs_paired,
        stream_syncs=int((calls.kind == CallKind.STREAM_SYNC).sum()),
        device_syncs=int((calls.kind == CallKind.DEVICE_SYNC).sum()),
        future=int((needs == Pairing.FUTURE).sum()),
        unresolved=int((needs == Pairing.UNRESOLVED).sum()),
        no_row=int((needs == Pairing.NO_ROW).sum()),
    )


def preflight(profile: Profile) -> tuple[Check, ...]:
    """All checks of a profile, in the order a reader should see them."""
    return (
        _operations(profile),
        _sync_source(profile),
        _pairs(profile),
        _annotations(profile),
        _graphs(profile),
        _event_trace(profile),
        _threads(profile),
        _clock(profile),
        _contents(profile),
    )


def level(profile: Profile) -> Level:
    """How far the order of copies against other work can be judged without a journal."""
    ops = profile.ops
    copies = np.isin(ops.kind, (OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_HOST))
    if not copies.any() or len(ops) == int(copies.sum()):
        return Level.UNDECIDABLE
    counts = count_syncs(profile)
    resolved = counts.waits == counts.waits_paired and counts.event_syncs == counts.event_syncs_paired
    calls = profile.calls
    resolved &= not bool(((calls.kind == CallKind.STREAM_SYNC) & (calls.stream == UNKNOWN)).any())
    used = [profile.streams[stream].process for stream in np.unique(ops.stream).tolist()]
    resolved |= len(used) == len(set(used))  # work of one stream is in order without any wait
    hidden = profile.facts.same_stream_overlaps or _nothing_traced(profile) or blind_spots(profile)
    return Level.PROVABLE if resolved and not hidden else Level.OBSERVABLE


def blind_spots(profile: Profile) -> tuple[str, ...]:
    """What ran and is not in the file, or cannot be told apart in it: in words, empty if nothing is known of.

    A race may be in what is not seen, so a file with any of these is never clean.
    """
    facts = profile.facts
    found = [
        (facts.unseen, "launches whose device operation is missing"),
        (facts.dropped, "operations without usable times, so that nobody sees whether they overlap their neighbours"),
        (facts.graph_rows, "graph replays without their contents"),
        (facts.mixed_ids, "correlation ids that calls of several processes share"),
    ]
    return (*(f"{count:,} {text}" for count, text in found if count), *facts.lost)


def _nothing_traced(profile: Profile) -> bool:
    """Several streams worked and nobody ever waited for another: the calls that wait were not recorded."""
    streams = len(np.unique(profile.ops.stream))
    return streams > 1 and not profile.facts.sync_rows and not np.isin(profile.calls.kind, _ORDERING).any()


def _operations(profile: Profile) -> Check:
    ops, facts = profile.ops, profile.facts
    streams = len(np.unique(ops.stream))
    text = f"{len(ops)} device operations on {streams} stream{'s' * (streams != 1)}"
    if not len(ops):
        return Check(
            "operations", False, text, "record with CUDA tracing on (nsys -t cuda,nvtx; ProfilerActivity.CUDA)"
        )
    if facts.dropped:
        text += f"; {facts.dropped} without usable times"
    if facts.unseen:
        text += f"; {facts.unseen} launches without their operation"
    if facts.outside:
        text += f"; {facts.outside} launched before the file begins"
    if facts.batch_copies:
        text += f"; {facts.batch_copies} rows stand for several copies"
    good = not facts.dropped and not facts.unseen and not facts.mixed_ids
    return Check("operations", good, text, "" if good else "record in shorter sections, one process per file")


def _sync_source(profile: Profile) -> Check:
    facts = profile.facts
    calls = int(np.isin(profile.calls.kind, _ORDERING).sum())
    text = f"{facts.sync_rows} synchronisation rows for {calls} waits and synchronisations"
    nothing = _nothing_traced(profile)
    if nothing:
        text += ", although several streams work: such calls were not recorded"
    if not nothing and (not calls or facts.sync_rows):
        return Check("sync source", True, text)
    if "HIP" in facts.producer:
        return Check("sync source", False, text, "AMD traces have none: bring the journal of the same run (--journal)")
    if facts.producer.startswith("Nsight"):
        return Check(
            "sync source", False, text, "record with nsys -t cuda,nvtx, and export without --times or --tables"
        )
    advice = "torch.profiler: experimental_config=_ExperimentalConfig(enable_cuda_sync_events=True)"
    return Check("sync source", False, text, advice)


def _pairs(profile: Profile) -> Check:
    counts = count_syncs(profile)
    total, found = counts.waits + counts.event_syncs, counts.waits_paired + counts.event_syncs_paired
    text = f"{found} of {total} waits name the record they wait for"
    reasons = [
        (counts.no_row, "without a row"),
        (counts.unresolved, "unresolved"),
        (counts.future, "naming a later record"),
    ]
    missing = ", ".join(f"{count} {reason}" for count, reason in reasons if count)
    if not missing:
        return Check("event pairs", True, text)
    advice = "bring the journal of the same run (--journal): it has every wait"
    return Check("event pairs", False, f"{text}: {missing}", advice)


def _annotations(profile: Profile) -> Check:
    found = int((profile.ranges.payload != UNKNOWN).sum())
    if profile.facts.lost_ranges:
        text = "NVTX domains were created but no range is in the file: annotations lost"
        return Check("annotations", False, text, "nvtx 0.2.12 and newer need a newer nsys; install nvtx 0.2.11")
    text = f"{found} ranges of hicache-obs with an operation id"
    return Check("annotations", True, text)


def _graphs(profile: Profile) -> Check:
    rows = profile.facts.graph_rows
    text = f"{rows} graph replays recorded as one row each" if rows else "no graph replay without its contents"
    return Check("graphs", not rows, text, "nsys --cuda-graph-trace=node" if rows else "")


def _event_trace(profile: Profile) -> Check:
    if profile.facts.event_trace:
        text = "event tracing was on, which can serialise streams and hide a race"
        return Check("event trace", False, text, "nsys --cuda-event-trace=false")
    return Check("event trace", True, "no sign that the tool serialised streams")


def _threads(profile: Profile) -> Check:
    threads = len(np.unique(profile.calls.thread))
    text = f"{threads} host thread{'s' * (threads != 1)} made CUDA calls"
    if threads < 2:
        return Check("host threads", True, text)
    return Check("host threads", False, f"{text}; hand-overs between them are in no profile", "bring the journal")


def _clock(profile: Profile) -> Check:
    facts = profile.facts
    text = f"device times are within {max(facts.error_ns, 1)} ns"
    if facts.same_stream_overlaps:
        text += (
            f"; {facts.same_stream_overlaps} neighbours of one stream overlap by up to {facts.overlap_ns / 1e3:.1f} us"
        )
        advice = "kernels that start before their predecessor ends (programmatic dependent launch) prove no order"
        return Check("clock", False, text, advice)
    return Check("clock", True, text)


def _contents(profile: Profile) -> Check:
    lost = profile.facts.lost
    if not lost:
        return Check("contents", True, "nothing that was looked for is missing")
    return Check("contents", False, "; ".join(lost), "bring the journal of the same run (--journal): it has all work")
