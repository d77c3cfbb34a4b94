"""What the analyzer concludes, as data: proof, timing, verdict, finding, and the exit code of a run.

Text is rendered elsewhere (``hicache_obs.analyzer.explain``). The verdict table is DESIGN's: two independent
answers per pair of conflicting accesses, *proof* (does any edge order them) and *timing* (what was measured).
"""

from __future__ import annotations

import enum
import hashlib
from dataclasses import dataclass

from hicache_obs.records import OpId, StreamId, ThreadId


class Hazard(str, enum.Enum):
    """The closed set of hazards; the value is the metric label."""

    WAW_FORWARD_RESTORE = "waw_forward_restore"
    WAR_FORWARD_RESTORE = "war_forward_restore"
    RAW_RESTORE_FORWARD = "raw_restore_forward"
    RAW_FORWARD_BACKUP = "raw_forward_backup"
    WAR_BACKUP_FORWARD = "war_backup_forward"
    HOST_REUSE = "host_reuse"
    STORAGE_PREFETCH = "storage_prefetch"
    RELOCATION = "relocation"
    GRAPH = "graph"
    METADATA_WAR = "metadata_war"
    LIFETIME = "lifetime"
    RDMA = "rdma"
    TP_DIVERGENCE = "tp_divergence"
    OTHER = "other"


class Proof(str, enum.Enum):
    """Does something order the earlier access before the later one?"""

    ORDERED = "ordered"
    """By guaranteed edges only."""
    POLLED = "polled"
    """Only because the host once saw an event complete (``query``)."""
    NONE = "none"
    UNKNOWN = "unknown"
    """Records were lost, or the order is made where no record shows it: an edge may be missing from the trace."""


class Timing(str, enum.Enum):
    """What the device times say."""

    KEPT = "kept"
    BROKEN = "broken"
    """The later access started before the earlier one ended, by more than the clock error."""
    UNTIMED = "untimed"


class Verdict(str, enum.Enum):
    """One word per conflicting pair."""

    ORDERED = "ordered"
    POLLED = "polled"
    LATENT = "latent"
    """Nothing orders the pair; this time it ran in the right order, or nobody measured."""
    VIOLATION = "violation"
    """Nothing orders the pair, and it did run in the wrong order or overlapped."""
    CONTRADICTION = "contradiction"
    """Proven ordered, yet measured broken: a fence is not where we think, or a clock lies."""
    UNKNOWN = "unknown"


class Cause(str, enum.Enum):
    """Why nothing orders the pair, as far as the trace shows."""

    MISSING_FENCE = "missing_fence"
    WRONG_STREAM = "wrong_stream"
    """A fence that covers the earlier access exists, on another stream than the later access ran on."""
    WRONG_THREAD = "wrong_thread"
    """A host thread that did not issue the later access has waited for the earlier one, and told nobody."""
    THREAD_RACE = "thread_race"
    """The earlier access is a host thread's, and the thread that issued the later one was not told of its end."""
    EARLY_EVENT = "early_event"
    """A wait exists, on a record made before the earlier access was queued."""
    EVENT_REUSE = "event_reuse"
    """A wait exists, on an event whose former record would have been enough; it was recorded again before the wait."""
    EVENT_UNRECORDED = "event_unrecorded"
    """A wait exists, on an event that had never been recorded."""
    EARLY_FREE = "early_free"
    """A transfer's pages were given away before it was known to be over."""
    GRAPH_SKIPS_WAIT = "graph_skips_wait"
    """Waits in the host code around a captured graph do not replay with it."""
    NO_RECORD_STREAM = "no_record_stream"
    """The allocator was not told which stream uses the block, and handed it out again."""
    STALE_ADDRESS = "stale_address"
    """A page was moved while an operation still used its old place."""
    USED_AFTER_FREE = "used_after_free"
    """The operation was issued after its pages were given away, and before they were given out again."""
    NEVER_WRITTEN = "never_written"
    """The operation reads pages that nothing has written since they were given out."""
    RECORDS_LOST = "records_lost"
    SHARED_EVENT = "shared_event"
    """A wait in between is for an event that another process may have recorded: nobody knows what it orders."""
    SHARED_MEMORY = "shared_memory"
    """Another process has access to the pages too, and may keep the two apart in a way that is not recorded."""
    EARLY_START = "early_start"
    """The later kernel may start before the one before it on its stream has ended; what it waits for is up to it."""
    CLOCK_OR_FENCE = "clock_or_fence"


def judge(proof: Proof, timing: Timing, *, both_recorded: bool = True) -> Verdict:
    """The verdict table.

    Args:
        both_recorded: Both accesses are in the trace (always, unless one is inferred); only then can an
            ``unknown`` proof with broken times be called a violation.
    """
    if proof in (Proof.ORDERED, Proof.POLLED):
        return Verdict.CONTRADICTION if timing is Timing.BROKEN else Verdict(proof.value)
    if proof is Proof.NONE:
        return Verdict.VIOLATION if timing is Timing.BROKEN else Verdict.LATENT
    return Verdict.VIOLATION if timing is Timing.BROKEN and both_recorded else Verdict.UNKNOWN


@dataclass(frozen=True, slots=True)
class AccessInfo:
    """One side of a finding.

    Attributes:
        op: Operation id; the NVTX payload of its range.
        what: ``forward``, ``restore``, ``backup``, ``copy``, ``host`` ...; ``alloc`` or ``free``, see ``Finding``.
        mode: ``read`` or ``write``; empty for an allocator's call.
        site: Code site name.
        stream: Stream name, or ``None`` for a host access.
        stream_id: Handle of that stream, ``None`` for a host access.
        group: Round or transfer id.
        layers: Half-open layer range of the operation.
        thread: Issuing host thread.
        issued_ns: Host clock at the call.
        start_ns, end_ns: Device times, ``None`` when not measured.
    """

    op: OpId
    what: str
    mode: str
    site: str
    stream: str | None
    stream_id: StreamId | None
    group: int
    layers: tuple[int, int]
    thread: ThreadId
    issued_ns: int
    start_ns: int | None
    end_ns: int | None


@dataclass(frozen=True, slots=True)
class Edge:
    """An order that is missing, or one that would be enough: ``waiter`` waits for ``on``'s work up to ``after``.

    Attributes:
        on: Stream (or host thread) that runs the earlier access.
        after: Operation the wait must cover.
        waiter: Stream (or host thread) that must wait.
        before: Operation the wait must be issued before.
    """

    on: str
    after: OpId
    waiter: str
    before: OpId


@dataclass(frozen=True, slots=True)
class Shared:
    """Ids of one pool that both sides of a pair touch.

    Attributes:
        space: ``device``, ``host`` or ``buffer``.
        pool: Pool number.
        pages: Ids, ascending.
    """

    space: str
    pool: int
    pages: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """One conflicting pair of operations that is not proven and kept; or the misuse of pages by one operation.

    In a misuse (``misuse`` is true) the earlier side is the allocator's call that gave the pages away or out, and the
    order of host calls proves that the later side follows it: ``proof`` is ``ordered``, ``timing`` is ``untimed``, and
    the verdict is ``violation``, since every execution does it.

    Attributes:
        hazard, verdict, proof, timing, cause: See the enums.
        earlier, later: The two accesses; *earlier* was issued first.
        space: ``device``, ``host`` or ``buffer``.
        pool: Pool number.
        pages: Ids both sides touch, ascending.
        layers: Half-open layer range both sides touch.
        missing_edge: The order that does not exist; its issue point is also the cheapest place for it.
        wrong_waiter: For ``Cause.WRONG_STREAM``: the stream the fence was put on instead.
        coarse: The interval is the segment's, not the single access's.
        fingerprint: ``HC-`` and 8 hex digits; equal for the same defect in every run of one engine version.
        secondary: A page of the pair had already raced before.
        also: What the pair shares in other spaces or pools, where it conflicts too.
    """

    hazard: Hazard
    verdict: Verdict
    proof: Proof
    timing: Timing
    cause: Cause
    earlier: AccessInfo
    later: AccessInfo
    space: str
    pool: int
    pages: tuple[int, ...]
    layers: tuple[int, int]
    missing_edge: Edge
    wrong_waiter: str | None
    coarse: bool
    fingerprint: str
    secondary: bool = False
    also: tuple[Shared, ...] = ()

    @property
    def misuse(self) -> bool:
        """Whether this is about who owns the pages, not about the order of two accesses."""
        return self.cause in (Cause.USED_AFTER_FREE, Cause.NEVER_WRITTEN)


@dataclass(frozen=True, slots=True)
class BlastRadius:
    """What has wrong contents because of a race, or can have (``hicache_obs.analyzer.taint``).

    Attributes:
        requests: Requests of which a row read wrong contents and was used, ascending; those of rounds that state
            their rows.
        rounds: Forward rounds that read wrong contents, ascending.
        transfers: Copies that moved one.
        ios: Storage, network or third-party transfers that moved one: what they wrote elsewhere is spoiled.
        device_pages, host_pages: ``(pool, page)`` that held spoiled contents, ascending; cleaned since or not.
        complete: Every consequence in the trace is here. False for an unknown race, or if a bound was met.
        exact: And nothing else is: every operation was measured and every round in it stated its rows.
    """

    requests: tuple[int, ...]
    rounds: tuple[int, ...]
    transfers: tuple[int, ...]
    ios: tuple[int, ...]
    device_pages: tuple[tuple[int, int], ...]
    host_pages: tuple[tuple[int, int], ...]
    complete: bool
    exact: bool


def fingerprint(hazard: Hazard, earlier_site: str, later_site: str, on: str, waiter: str, engine: str) -> str:
    """Stable name of a defect: hazard, both sites, the missing edge and the engine version; never ids or times."""
    text = "\0".join((hazard.value, earlier_site, later_site, on, waiter, engine))
    return "HC-" + hashlib.sha256(text.encode()).hexdigest()[:8]


class ExitCode(enum.IntEnum):
    """Exit codes of every command. Precedence when several files differ: 70 > 2 > 1 > 3 > 0."""

    CLEAN = 0
    FINDINGS = 1
    BAD_INPUT = 2
    NOTHING_CHECKED = 3
    INTERNAL = 70
    INTERRUPTED = 130
    """By Ctrl-C; what a shell says of a program that an interrupt ended."""
    UNREAD = 141
    """Nobody reads standard output any more, as behind ``| head``; what a shell says of a program that this ended."""


def worst(codes: list[ExitCode]) -> ExitCode:
    """The exit code that wins; CLEAN for an empty list."""
    for code in (ExitCode.INTERNAL, ExitCode.BAD_INPUT, ExitCode.FINDINGS, ExitCode.NOTHING_CHECKED):
        if code in codes:
            return code
    return ExitCode.CLEAN
