"""The analyzer: records in, findings and costs out. Pure: no clock, thread, file or global.

For every operation: what it conflicts with that is not surely ordered (``shadow``, ``order``), and, once device
times are known, whether the measured order was kept. Both answers meet in ``findings.judge``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from hicache_obs.analyzer.fence_cost import FenceMeter
from hicache_obs.analyzer.order import Actor, Order, Snapshot
from hicache_obs.analyzer.shadow import Conflict, Group, Label, Lookup, Operation, Overlap, Shadow
from hicache_obs.costs import AnalysisSink
from hicache_obs.findings import (
    AccessInfo,
    Cause,
    Edge,
    Finding,
    Hazard,
    Proof,
    Timing,
    fingerprint,
    judge,
)
from hicache_obs.records import (
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostAccess,
    HostSync,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    Purpose,
    Record,
    RecordStream,
    Space,
    StreamId,
    StreamKind,
    Times,
    WaitStream,
)
from hicache_obs.trace import Names

PRUNE_EVERY: Final = 512
RECENT_WAITS: Final = 256
MAX_PENDING: Final = 65536


@dataclass(frozen=True, slots=True, eq=False)
class _Wait:
    """A wait seen recently; explains why a pair is not ordered."""

    waiter: Actor
    stream: StreamId
    snapshot: Snapshot | None
    purpose: Purpose
    seq: int
    epoch: int
    """The waiter's epoch at the wait: a later epoch means the waiter has run something since."""


@dataclass(slots=True, eq=False)
class _Pair:
    """An unordered pair that waits for device times."""

    conflict: Conflict
    later: Operation
    proof: Proof
    cause: Cause
    wrong_waiter: str | None


@dataclass(slots=True)
class Totals:
    """Running sums over the whole trace.

    Attributes:
        records: Records analysed.
        pages_checked: Pages of restores that were looked up (once per restore, not per layer).
        pairs_checked: Those of them that had an earlier access.
        lookups: Pages of any operation that had an earlier access: 0 means nothing at all was checked.
        lost: Records lost.
    """

    records: int = 0
    pages_checked: int = 0
    pairs_checked: int = 0
    lookups: int = 0
    lost: int = 0


class Analyzer:
    """Judges every pair of conflicting accesses of one trace (one process, one rank).

    Feed records in trace order with ``feed``; call ``finish`` once at the end, which gives pairs without device
    times their untimed verdict. Not thread-safe; calls ``sink`` on the feeding thread.
    """

    def __init__(self, sink: AnalysisSink) -> None:
        self._sink = sink
        self._order = Order()
        self._shadow = Shadow()
        self._names = Names()
        self._meter = FenceMeter(sink, self._conflict_hazard)
        self._waits: deque[_Wait] = deque(maxlen=RECENT_WAITS)
        self._live: dict[OpId, Operation] = {}
        self._pending: dict[OpId, list[_Pair]] = {}
        self._raced: set[tuple[Space, int, int]] = set()
        self._seq = 0
        self.totals = Totals()
        self._handlers: dict[type[Record], Callable[[Any], None]] = {
            Kernel: self._on_work,
            Memcpy: self._on_work,
            HostAccess: self._on_host_access,
            EventRecord: self._on_event_record,
            EventWait: self._on_event_wait,
            WaitStream: self._on_wait_stream,
            EventQuery: self._on_query,
            EventSync: self._on_event_sync,
            HostSync: self._on_host_sync,
            PageAlloc: self._on_alloc,
            PageFree: _ignore,
            RecordStream: _ignore,
            Times: self._on_times,
            Lost: self._on_lost,
            Define: self._on_define,
        }

    @property
    def forgotten(self) -> int:
        """Groups dropped from a full history: pairs with them were not checked."""
        return self._shadow.forgotten

    @property
    def retained_groups(self) -> int:
        """Groups in the history now: what the analyzer's memory grows with."""
        return self._shadow.retained

    def feed(self, records: Iterable[Record]) -> int:
        """Analyse ``records``; returns how many there were."""
        count = 0
        for record in records:
            self._handlers[type(record)](record)
            self._seq += 1
            count += 1
            if self._seq % PRUNE_EVERY == 0:
                self._shadow.prune(self._order.floor())
                self._bound()
        self.totals.records += count
        self._sink.on_records(count)
        return count

    def finish(self) -> None:
        """Report pairs, fences and transfers whose device times never came."""
        for pairs in list(self._pending.values()):
            for pair in pairs:
                self._settle(pair)
        self._pending.clear()
        self._live.clear()
        self._meter.finish()

    # -- operations ------------------------------------------------------------------------------------------

    def _on_work(self, record: Kernel | Memcpy) -> None:
        stream = self._order.stream(record.stream)
        self._order.issue(stream, self._order.thread(record.thread))
        label = Label(_what(record), record.site, record.stream, record.group, record.thread)
        operation = self._enter(record, stream, label)
        self._live[record.op] = operation
        self._meter.on_operation(stream, operation, record)

    def _on_host_access(self, record: HostAccess) -> None:
        label = Label("host", record.site, None, 0, record.thread)
        operation = self._enter(record, self._order.thread(record.thread), label)
        self._settle_all(operation.op)  # a host access has no device times to wait for

    def _enter(self, record: Kernel | Memcpy | HostAccess, actor: Actor, label: Label) -> Operation:
        order = self._order
        clock = order.clock(actor)

        def make(group: Group) -> Operation:
            epoch = clock[actor] + 1
            return Operation(record.op, epoch, self._seq, record.layers, record.host_ns, label, group)

        operation, conflicts, lookups = self._shadow.enter(actor, record.accesses, record.layers, clock, make)
        for lookup in lookups:
            self._count(label.what, lookup)
        for conflict in conflicts:
            self._on_conflict(conflict, operation, actor)
        order.advance(actor)
        return operation

    def _count(self, what: str, lookup: Lookup) -> None:
        access = lookup.access
        pages = len(access.ids)
        self.totals.lookups += lookup.pairs
        for hazard in _CHECKED[what, access.space, access.mode]:
            self._sink.on_checked(hazard, pages, lookup.pairs)
        if what == "restore" and access.space is Space.DEVICE:
            self.totals.pages_checked += pages
            self.totals.pairs_checked += lookup.pairs

    def _on_conflict(self, conflict: Conflict, later: Operation, actor: Actor) -> None:
        earlier = conflict.earlier
        proof = self._order.proof(actor, earlier.group.actor, earlier.epoch)
        if proof is Proof.POLLED:
            self._sink.on_weak_ordering(_hazard(conflict.overlaps, earlier, later), proof.value)
        if proof in (Proof.ORDERED, Proof.POLLED):
            return
        if proof is Proof.NONE and earlier.seq < self._order.lost_at:
            proof = Proof.UNKNOWN
        later.unordered += (earlier.op,)
        cause, waiter = self._cause(earlier, actor, proof)
        self._pending.setdefault(later.op, []).append(_Pair(conflict, later, proof, cause, waiter))

    def _cause(self, earlier: Operation, actor: Actor, proof: Proof) -> tuple[Cause, str | None]:
        """Why nothing orders the pair: look at the waits issued between the two."""
        if proof is Proof.UNKNOWN:
            return Cause.RECORDS_LOST, None
        before = earlier.group.actor
        cause = Cause.MISSING_FENCE
        for wait in reversed(self._waits):
            if wait.seq < earlier.seq:
                break
            if wait.snapshot is None:
                if wait.waiter == actor:
                    cause = Cause.EVENT_UNRECORDED
                continue
            clock = wait.snapshot.levels[0]
            covers = before < len(clock) and clock[before] >= earlier.epoch
            if wait.waiter == actor:
                if not covers and wait.snapshot.actor == before:
                    cause = Cause.EARLY_EVENT
            elif covers and wait.epoch == self._order.clock(wait.waiter)[wait.waiter]:
                return Cause.WRONG_STREAM, self._names.stream(wait.stream)
        return cause, None

    def _conflict_hazard(self, earlier: Operation, later: Operation) -> Hazard | None:
        """Hazard a fence between the two prevents, ``None`` if they share no device page."""
        shared = self._shadow.shared(later.group, earlier.group)
        overlaps = tuple(overlap for overlap in shared if overlap.space is Space.DEVICE)
        return _hazard(overlaps, earlier, later) if overlaps else None

    # -- order -----------------------------------------------------------------------------------------------

    def _on_event_record(self, record: EventRecord) -> None:
        order = self._order
        stream = order.stream(record.stream)
        order.issue(stream, order.thread(record.thread))
        order.record(record.event, stream, self._seq, self._meter.mark(stream, record.host_ns))

    def _on_event_wait(self, record: EventWait) -> None:
        snapshot = self._order.current(record.event)
        self._wait(record, self._order.stream(record.stream), snapshot, record.purpose)

    def _on_wait_stream(self, record: WaitStream) -> None:
        order = self._order
        on = order.stream(record.on)
        order.issue(on, order.thread(record.thread))
        snapshot = order.snapshot(on, self._seq, self._meter.mark(on, record.host_ns))
        self._wait(record, order.stream(record.waiter), snapshot, record.purpose)

    def _wait(self, record: EventWait | WaitStream, stream: Actor, snapshot: Snapshot | None, purpose: Purpose) -> None:
        order = self._order
        order.issue(stream, order.thread(record.thread))
        handle = record.stream if isinstance(record, EventWait) else record.waiter
        self._waits.append(_Wait(stream, handle, snapshot, purpose, self._seq, order.clock(stream)[stream]))
        if snapshot is not None:
            order.join(stream, snapshot)
        self._meter.on_wait(stream, record, snapshot)

    def _on_query(self, record: EventQuery) -> None:
        snapshot = self._order.current(record.event)
        if record.result and snapshot is not None:
            self._order.join(self._order.thread(record.thread), snapshot, polled=True)

    def _on_event_sync(self, record: EventSync) -> None:
        snapshot = self._order.current(record.event)
        if snapshot is not None:
            self._order.join(self._order.thread(record.thread), snapshot)

    def _on_host_sync(self, record: HostSync) -> None:
        thread = self._order.thread(record.thread)
        if record.stream is None:
            self._order.observe_all(thread)
        else:
            self._order.observe(thread, self._order.stream(record.stream))

    # -- times, losses, names ------------------------------------------------------------------------------

    def _on_alloc(self, record: PageAlloc) -> None:
        if self._raced:  # a new owner: the page is armed again
            access = record.access
            self._raced.difference_update((access.space, access.pool, page) for page in access.ids.tolist())

    def _on_times(self, record: Times) -> None:
        operation = self._live.pop(record.op, None)
        if operation is not None:
            operation.start_ns = record.start_ns
            operation.end_ns = record.end_ns
            operation.error_ns = record.error_ns
        self._meter.on_times(record)  # it looks at the operation's times
        if operation is not None:
            self._settle_all(record.op)
            self._check_measured(operation)

    def _on_lost(self, record: Lost) -> None:
        if record.reason is not DropReason.UNRESOLVED:  # only device times are missing: no edge, no access
            self._order.lose(self._seq)
        self.totals.lost += record.count
        self._sink.on_lost(record.count, record.reason)

    def _on_define(self, record: Define) -> None:
        self._names.learn(record)
        if record.space is DefineSpace.STREAM:
            self._order.declare(StreamId(record.id), StreamKind(record.value))
        elif record.space is DefineSpace.POOL:
            self._meter.declare_pool(record.id, record.value)

    # -- verdicts --------------------------------------------------------------------------------------------

    def _settle_all(self, op: OpId) -> None:
        for pair in self._pending.pop(op, ()):
            self._settle(pair)

    def _check_measured(self, later: Operation) -> None:
        """A pair that is proven ordered must also have been kept; if not, a fence or a clock lies."""
        for group in later.group.prior:
            for earlier in group.overlapping(later.layers, 0):
                if earlier.seq > later.seq or earlier.op in later.unordered:
                    continue
                if group.actor != later.group.actor and _timing(earlier, later) is Timing.BROKEN:
                    conflict = Conflict(earlier, self._shadow.shared(later.group, group))
                    self._report(_Pair(conflict, later, Proof.ORDERED, Cause.CLOCK_OR_FENCE, None), Timing.BROKEN)

    def _settle(self, pair: _Pair) -> None:
        self._report(pair, _timing(pair.conflict.earlier, pair.later))

    def _report(self, pair: _Pair, timing: Timing) -> None:
        earlier, later, overlaps = pair.conflict.earlier, pair.later, pair.conflict.overlaps
        main = max(overlaps, key=_severity)
        same = [o for o in overlaps if (o.space, o.pool) == (main.space, main.pool)]
        pages = sorted({page for overlap in same for page in overlap.pages.tolist()})
        cells = {(main.space, main.pool, page) for page in pages}
        secondary = not self._raced.isdisjoint(cells)
        self._raced |= cells
        hazard = _hazard(overlaps, earlier, later)
        first, second = self._access(earlier, main.earlier), self._access(later, main.later)
        on, waiter = self._actor_name(earlier), self._actor_name(later)
        self._sink.on_finding(
            Finding(
                hazard=hazard,
                verdict=judge(pair.proof, timing),
                proof=pair.proof,
                timing=timing,
                cause=pair.cause,
                earlier=first,
                later=second,
                space=main.space.name.lower(),
                pool=main.pool,
                pages=tuple(pages),
                layers=(
                    max(earlier.layers[0], later.layers[0]),
                    min(earlier.layers[1], later.layers[1]),
                ),
                missing_edge=Edge(on, earlier.op, waiter, later.op),
                wrong_waiter=pair.wrong_waiter,
                coarse="forward" in (first.what, second.what),
                fingerprint=fingerprint(hazard, first.site, second.site, on, waiter, self._names.engine),
                secondary=secondary,
            )
        )

    def _access(self, operation: Operation, mode: Mode) -> AccessInfo:
        label = operation.label
        return AccessInfo(
            op=operation.op,
            what=label.what,
            mode=mode.name.lower(),
            site=self._names.site(label.site),
            stream=None if label.stream is None else self._names.stream(label.stream),
            stream_id=label.stream,
            group=label.number,
            layers=operation.layers,
            thread=label.thread,
            issued_ns=operation.issued_ns,
            start_ns=operation.start_ns,
            end_ns=operation.end_ns,
        )

    def _actor_name(self, operation: Operation) -> str:
        label = operation.label
        if label.stream is None:
            return self._names.thread(label.thread)
        return self._names.stream(label.stream)

    def _bound(self) -> None:
        """Give operations whose times are overdue their untimed verdict, so that tables stay bounded."""
        while len(self._live) > MAX_PENDING:
            op = next(iter(self._live))
            del self._live[op]
            self._settle_all(op)


def _ignore(record: Record) -> None:
    """Records that change no order and no page (ownership and lifetime rules use them)."""


def _what(record: Kernel | Memcpy) -> str:
    if isinstance(record, Kernel):
        pages = any(access.space is Space.DEVICE for access in record.accesses)
        return "forward" if pages else "kernel"
    if record.direction is Direction.HOST_TO_DEVICE:
        return "restore"
    return "backup" if record.direction is Direction.DEVICE_TO_HOST else "copy"


def _timing(earlier: Operation, later: Operation) -> Timing:
    if earlier.end_ns is None or later.start_ns is None:
        return Timing.UNTIMED
    tolerance = earlier.error_ns + later.error_ns
    return Timing.BROKEN if later.start_ns < earlier.end_ns - tolerance else Timing.KEPT


def _severity(overlap: Overlap) -> tuple[bool, bool, bool]:
    """Both write, then read-after-write, then write-after-read; device pages before the rest."""
    both = overlap.earlier is Mode.WRITE and overlap.later is Mode.WRITE
    return overlap.space is Space.DEVICE, both, overlap.earlier is Mode.WRITE


_DEVICE_HAZARDS: Final = {
    ("forward", Mode.WRITE, "restore", Mode.WRITE): Hazard.WAW_FORWARD_RESTORE,
    ("restore", Mode.WRITE, "forward", Mode.WRITE): Hazard.WAW_FORWARD_RESTORE,
    ("forward", Mode.READ, "restore", Mode.WRITE): Hazard.WAR_FORWARD_RESTORE,
    ("restore", Mode.WRITE, "forward", Mode.READ): Hazard.RAW_RESTORE_FORWARD,
    ("forward", Mode.WRITE, "backup", Mode.READ): Hazard.RAW_FORWARD_BACKUP,
    ("backup", Mode.READ, "forward", Mode.WRITE): Hazard.WAR_BACKUP_FORWARD,
}


def _hazard(overlaps: tuple[Overlap, ...], earlier: Operation, later: Operation) -> Hazard:
    main = max(overlaps, key=_severity)
    if main.space is Space.HOST:
        return Hazard.HOST_REUSE
    if main.space is Space.BUFFER:
        return Hazard.METADATA_WAR
    key = (earlier.label.what, main.earlier, later.label.what, main.later)
    return _DEVICE_HAZARDS.get(key, Hazard.OTHER)


def _checked_hazards(what: str, space: Space, mode: Mode) -> tuple[Hazard, ...]:
    if space is Space.HOST:
        return (Hazard.HOST_REUSE,)
    if space is Space.BUFFER:
        return (Hazard.METADATA_WAR,)
    found = {h for (_, _, later, later_mode), h in _DEVICE_HAZARDS.items() if (later, later_mode) == (what, mode)}
    return tuple(sorted(found))


_CHECKED: Final = {
    (what, space, mode): _checked_hazards(what, space, mode)
    for what in ("forward", "restore", "backup", "copy", "kernel", "host")
    for space in Space
    for mode in Mode
}
"""Hazards for which a look-up of such an access counts as a check."""
