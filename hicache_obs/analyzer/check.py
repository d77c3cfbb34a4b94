"""The analyzer: records in, findings and costs out. Pure: no clock, thread, file or global.

For every operation: what it conflicts with that is not surely ordered (``shadow``, ``order``), and, once device
times are known, whether the measured order was kept. Both answers meet in ``findings.judge``.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from hicache_obs.analyzer.fence_cost import FenceMeter
from hicache_obs.analyzer.order import Actor, Order, Snapshot
from hicache_obs.analyzer.shadow import Conflict, Group, Label, Lookup, Operation, Overlap, Shadow
from hicache_obs.analyzer.taint import Taint
from hicache_obs.costs import AnalysisSink
from hicache_obs.findings import (
    AccessInfo,
    BlastRadius,
    Cause,
    Edge,
    Finding,
    Hazard,
    Proof,
    Shared,
    Timing,
    fingerprint,
    judge,
)
from hicache_obs.records import (
    IN_ORDER,
    Access,
    Collective,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    IoKind,
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
    Relocate,
    Space,
    StreamId,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
)
from hicache_obs.trace import Names

PRUNE_EVERY: Final = 512
_DOUBTFUL_SEQ: Final = -1
"""Sequence of a snapshot that is older than any loss: what follows it is never a proven edge."""
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


@dataclass(slots=True, eq=False)
class _Replay:
    """A graph replay whose node records are being read."""

    record: GraphReplay
    stream: Actor
    label: Label
    left: int


@dataclass(slots=True, eq=False)
class _Tensor:
    """A live tensor: its block, when it was handed out, and the streams marked as using it."""

    block: int
    seq: int
    marked: set[Actor] = field(default_factory=set)


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
        self._taint = Taint()
        self._names = Names()
        self._meter = FenceMeter(sink, self._conflict_hazard)
        self._waits: deque[_Wait] = deque(maxlen=RECENT_WAITS)
        self._live: dict[OpId, list[Operation]] = {}
        self._graphs: dict[int, Snapshot] = {}
        self._replay: _Replay | None = None
        self._channels: dict[int, deque[Snapshot]] = {}
        self._ios: dict[int, int] = {}
        self._io_slots: list[int] = []
        self._tensors: dict[int, _Tensor] = {}
        self._returned: dict[int, list[Snapshot]] = {}
        # After a loss: newest post per channel and thread, and what any block may have waited for.
        self._posts: dict[tuple[int, Actor], Snapshot] = {}
        self._strays: list[Snapshot] = []
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
            PageFree: self._on_free,
            RecordStream: self._on_record_stream,
            Times: self._on_times,
            Lost: self._on_lost,
            Define: self._on_define,
            GraphReplay: self._on_graph_replay,
            GraphNode: self._on_graph_node,
            Relocate: self._on_relocate,
            IoBegin: self._on_io_begin,
            IoEnd: self._on_io_end,
            ThreadPost: self._on_post,
            ThreadRecv: self._on_receive,
            TensorAlloc: self._on_tensor_alloc,
            TensorFree: self._on_tensor_free,
            Collective: _ignore,
        }

    @property
    def forgotten(self) -> int:
        """Groups dropped from a full history: pairs with them were not checked."""
        return self._shadow.forgotten

    @property
    def retained_groups(self) -> int:
        """Groups in the history now: what the analyzer's memory grows with."""
        return self._shadow.retained

    def blast_radius(self, race: str | tuple[OpId, OpId]) -> BlastRadius:
        """What a race can have spoiled so far; all races of a fingerprint, or one by its operations, earlier first.

        Every pair has its radius from its later operation on; a fingerprint once its findings are reported.
        """
        return self._taint.radius(race)

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
        self._live[record.op] = [operation]
        self._meter.on_operation(stream, operation, record)

    def _on_host_access(self, record: HostAccess) -> None:
        label = Label("host", record.site, None, 0, record.thread)
        operation = self._enter(record, self._order.thread(record.thread), label)
        self._settle_all(operation.op)  # a host access has no device times to wait for

    def _on_relocate(self, record: Relocate) -> None:
        stream = self._order.stream(record.stream)
        self._order.issue(stream, self._order.thread(record.thread))
        label = Label("relocate", record.site, record.stream, 0, record.thread)
        self._live[record.op] = [self._enter(record, stream, label)]
        for access in record.accesses:
            if access.mode is Mode.READ:
                self._shadow.note_move(access, self._seq)

    def _on_graph_replay(self, record: GraphReplay) -> None:
        """A replay follows its stream and earlier replays of the graph; host-side waits around it do not replay."""
        self._close_replay()
        order = self._order
        stream = order.stream(record.stream)
        order.issue(stream, order.thread(record.thread))
        earlier = self._graphs.get(record.graph)
        if earlier is not None:
            order.join(stream, earlier)
        label = Label("graph", record.site, record.stream, record.group, record.thread)
        if record.nodes:
            self._replay = _Replay(record, stream, label, record.nodes)
            return
        self._live[record.op] = [self._enter(record, stream, label)]
        self._graphs[record.graph] = order.note(stream, self._seq)

    def _on_graph_node(self, record: GraphNode) -> None:
        """One entry: follows the launch and its predecessors in the graph, and nothing else."""
        replay = self._replay
        if replay is None:
            return  # its replay was lost, and the loss has been noted
        order = self._order
        actor = order.node(replay.record.graph, record.index)
        order.follow(actor, replay.stream)
        for index in _predecessors(record):
            order.follow(actor, order.node(replay.record.graph, index))
        if record.event is not None:
            order.record(record.event, actor, self._seq)
        else:
            operation = self._enter(record, actor, replay.label, op=replay.record.op)
            self._live.setdefault(replay.record.op, []).append(operation)
        replay.left -= 1
        if not replay.left:
            self._close_replay()

    def _close_replay(self) -> None:
        """All entries of a replay were read, or those that are left were lost: its stream goes on after them."""
        replay, self._replay = self._replay, None
        if replay is None:
            return
        order = self._order
        for index in range(replay.record.nodes):
            order.follow(replay.stream, order.node(replay.record.graph, index))
        order.advance(replay.stream)
        self._graphs[replay.record.graph] = order.note(replay.stream, self._seq)

    def _on_io_begin(self, record: IoBegin) -> None:
        """I/O runs on its own: after what its thread knows, until somebody learns of its end."""
        order = self._order
        thread = order.thread(record.thread)
        slot = self._io_slot(thread)
        self._ios[record.io] = slot
        actor = order.io(slot)
        order.follow(actor, thread)
        self._settle_all(
            self._enter(record, actor, Label(_IO[record.kind], record.site, None, record.io, record.thread)).op
        )

    def _io_slot(self, thread: Actor) -> int:
        """A slot whose last transfer ``thread`` knows to be over, so that two users of it are really in order."""
        order = self._order
        busy = set(self._ios.values())
        for slot in self._io_slots:
            actor = order.io(slot)
            if slot not in busy and order.clock(thread)[actor] >= order.clock(actor)[actor]:
                return slot
        self._io_slots.append(len(self._io_slots))
        return self._io_slots[-1]

    def _on_io_end(self, record: IoEnd) -> None:
        slot = self._ios.pop(record.io, None)
        if slot is not None:
            self._order.follow(self._order.thread(record.thread), self._order.io(slot))

    def _enter(
        self,
        record: Kernel | Memcpy | HostAccess | GraphReplay | GraphNode | Relocate | IoBegin,
        actor: Actor,
        label: Label,
        *,
        op: OpId | None = None,
    ) -> Operation:
        """Check an operation and add it to the history; ``op`` replaces the record's id (a graph's entries)."""
        order = self._order
        clock = order.clock(actor)

        def make(group: Group) -> Operation:
            epoch = clock[actor] + 1
            return Operation(
                record.op if op is None else op, epoch, self._seq, record.layers, record.host_ns, label, group
            )

        operation, conflicts, lookups = self._shadow.enter(actor, record.accesses, record.layers, clock, make)
        for lookup in lookups:
            self._count(label.what, lookup)
        self._taint.step(operation)
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
        if earlier.op == later.op:
            return  # two entries of one graph replay: the graph's own business
        proof = self._order.proof(actor, earlier.group.actor, earlier.epoch)
        if proof is Proof.POLLED:
            self._sink.on_weak_ordering(self._hazard(conflict.overlaps, earlier, later), proof.value)
        if proof in (Proof.ORDERED, Proof.POLLED):
            return
        if proof is Proof.NONE and earlier.seq < self._order.lost_at:
            proof = Proof.UNKNOWN
        later.unordered += (earlier.op,)
        self._taint.race(earlier, later, conflict.overlaps)
        cause, waiter = self._cause(conflict, later, actor, proof)
        self._pending.setdefault(later.op, []).append(_Pair(conflict, later, proof, cause, waiter))

    def _cause(self, conflict: Conflict, later: Operation, actor: Actor, proof: Proof) -> tuple[Cause, str | None]:
        """Why nothing orders the pair: what was done to its pages, and the waits issued between the two."""
        earlier = conflict.earlier
        if proof is Proof.UNKNOWN:
            return Cause.RECORDS_LOST, None
        if self._moved(conflict.overlaps, earlier, later):
            return Cause.STALE_ADDRESS, None
        if later.label.what == "graph" and earlier.label.what == "restore":
            return Cause.GRAPH_SKIPS_WAIT, None
        freed = any(self._shadow.freed_since(overlap, earlier.seq) for overlap in conflict.overlaps)
        if freed and max(conflict.overlaps, key=_severity).space is Space.BUFFER:
            return Cause.NO_RECORD_STREAM, None
        if freed and earlier.label.what in _TRANSFERS:
            return Cause.EARLY_FREE, None
        return self._useless_wait(earlier, later, actor)

    def _useless_wait(self, earlier: Operation, later: Operation, actor: Actor) -> tuple[Cause, str | None]:
        """The wait between the two that was meant to order them, and the stream it concerns; newest first.

        For an access in no stream the wait is its thread's own: a synchronize with a stream that ran none of it.
        """
        before = earlier.group.actor
        thread = self._order.thread(later.label.thread) if later.label.stream is None else None
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
            idle = not covers and wait.waiter == thread and wait.snapshot.actor != before
            elsewhere = covers and wait.waiter != actor and self._nothing_since(wait)
            if idle or elsewhere:
                return Cause.WRONG_STREAM, self._names.stream(wait.stream)
            if wait.waiter == actor and not covers and wait.snapshot.actor == before:
                cause = Cause.EARLY_EVENT
        return cause, None

    def _nothing_since(self, wait: _Wait) -> bool:
        """Whether the waiting stream has run nothing since: a fence that protects no work."""
        return wait.epoch == self._order.clock(wait.waiter)[wait.waiter]

    def _moved(self, overlaps: tuple[Overlap, ...], earlier: Operation, later: Operation) -> bool:
        """Whether a relocation is one of the two, or moved a shared page away in between."""
        kinds = (earlier.label.what, later.label.what)
        return "relocate" in kinds or any(self._shadow.moved_since(o, earlier.seq) for o in overlaps)

    def _hazard(self, overlaps: tuple[Overlap, ...], earlier: Operation, later: Operation) -> Hazard:
        """Name of the conflict, by what the two operations are and what they share."""
        main = max(overlaps, key=_severity)
        kinds = (earlier.label.what, later.label.what)
        if self._moved(overlaps, earlier, later):
            return Hazard.RELOCATION
        if "graph" in kinds:
            return Hazard.GRAPH
        if "rdma" in kinds:
            return Hazard.RDMA
        if main.space is Space.HOST:
            return Hazard.STORAGE_PREFETCH if "storage" in kinds else Hazard.HOST_REUSE
        if main.space is Space.BUFFER:
            if self._shadow.freed_since(main, earlier.seq):
                return Hazard.LIFETIME
            return Hazard.HOST_REUSE if "host" in kinds and "restore" in kinds else Hazard.METADATA_WAR
        first, second = (_ROLE.get(kind, kind) for kind in kinds)
        return _DEVICE_HAZARDS.get((first, main.earlier, second, main.later), Hazard.OTHER)

    def _conflict_hazard(self, earlier: Operation, later: Operation) -> Hazard | None:
        """Hazard a fence between the two prevents, ``None`` if they share no device page."""
        shared = self._shadow.shared(later.group, earlier.group)
        overlaps = tuple(overlap for overlap in shared if overlap.space is Space.DEVICE)
        return self._hazard(overlaps, earlier, later) if overlaps else None

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
        order = self._order
        thread = order.thread(record.thread)
        if record.stream is None:
            order.observe_all(thread)
            return
        stream = order.stream(record.stream)
        order.follow(thread, stream)
        epoch = order.clock(thread)[thread]
        self._waits.append(_Wait(thread, record.stream, order.note(stream, self._seq), Purpose.PLAIN, self._seq, epoch))

    def _on_post(self, record: ThreadPost) -> None:
        order = self._order
        thread = order.thread(record.thread)
        if order.lost_at < 0:
            self._channels.setdefault(record.channel, deque()).append(order.note(thread, self._seq))
        else:
            self._posts[record.channel, thread] = order.note(thread, _DOUBTFUL_SEQ)

    def _on_receive(self, record: ThreadRecv) -> None:
        """Follow the matching post. After a loss nobody knows which it is: any of them, perhaps."""
        order = self._order
        thread = order.thread(record.thread)
        if order.lost_at < 0:
            posts = self._channels.get(record.channel)
            if posts:
                order.join(thread, posts.popleft())
            return
        for (channel, _), post in self._posts.items():
            if channel == record.channel:
                order.join(thread, post)

    # -- ownership, times, losses, names -------------------------------------------------------------------

    def _on_free(self, record: PageFree) -> None:
        self._shadow.note_free(record.access, self._seq)

    def _on_tensor_alloc(self, record: TensorAlloc) -> None:
        """The allocator hands a block out again once the work of marked streams, as of the free, is complete."""
        self._tensors[record.tensor] = _Tensor(record.block, self._seq)
        thread = self._order.thread(record.thread)
        for snapshot in (*self._returned.pop(record.block, ()), *self._strays):
            self._order.join(thread, snapshot)

    def _on_record_stream(self, record: RecordStream) -> None:
        tensor = self._tensors.get(record.tensor)
        if tensor is not None:
            tensor.marked.add(self._order.stream(record.stream))

    def _on_tensor_free(self, record: TensorFree) -> None:
        tensor = self._tensors.pop(record.tensor, None)
        if tensor is None or tensor.seq < self._order.lost_at:  # its block or its marks may be among the lost
            self._strays = self._order.notes(_DOUBTFUL_SEQ)
        if tensor is not None:
            self._returned[tensor.block] = [self._order.note(stream, self._seq) for stream in tensor.marked]
            block = Access(Space.BUFFER, Mode.WRITE, np.array([tensor.block], np.int64))
            self._shadow.note_free(block, self._seq)

    def _on_alloc(self, record: PageAlloc) -> None:
        self._taint.allocate(record.access)
        if self._raced:  # a new owner: the page is armed again
            access = record.access
            self._raced.difference_update((access.space, access.pool, page) for page in access.ids.tolist())

    def _on_times(self, record: Times) -> None:
        operations = self._live.pop(record.op, ())
        for operation in operations:
            operation.start_ns = record.start_ns
            operation.end_ns = record.end_ns
            operation.error_ns = record.error_ns
        self._meter.on_times(record)  # it looks at the operation's times
        if operations:
            self._settle_all(record.op)
        for operation in operations:
            self._check_measured(operation)

    def _on_lost(self, record: Lost) -> None:
        self._close_replay()
        if record.reason is not DropReason.UNRESOLVED:  # else only device times are missing: no edge, no access
            self._order.lose(self._seq)
            for channel, posts in self._channels.items():
                for post in posts:
                    self._posts[channel, post.actor] = dataclasses.replace(post, seq=_DOUBTFUL_SEQ)
            self._channels.clear()
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
                    self._taint.race(earlier, later, conflict.overlaps)
                    self._report(_Pair(conflict, later, Proof.ORDERED, Cause.CLOCK_OR_FENCE, None), Timing.BROKEN)

    def _settle(self, pair: _Pair) -> None:
        self._report(pair, _timing(pair.conflict.earlier, pair.later))

    def _report(self, pair: _Pair, timing: Timing) -> None:
        earlier, later, overlaps = pair.conflict.earlier, pair.later, pair.conflict.overlaps
        main = max(overlaps, key=_severity)
        shared = _by_pool(overlaps)
        pages = shared.pop((main.space, main.pool))
        cells = {(main.space, main.pool, page) for page in pages}
        secondary = not self._raced.isdisjoint(cells)
        self._raced |= cells
        hazard = self._hazard(overlaps, earlier, later)
        first, second = self._access(earlier, main.earlier), self._access(later, main.later)
        on, waiter = self._actor_name(earlier), self._actor_name(later)
        name = fingerprint(hazard, first.site, second.site, on, waiter, self._names.engine)
        self._taint.name(name, (earlier.op, later.op))
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
                pages=pages,
                layers=(
                    max(earlier.layers[0], later.layers[0]),
                    min(earlier.layers[1], later.layers[1]),
                ),
                missing_edge=Edge(on, earlier.op, waiter, later.op),
                wrong_waiter=pair.wrong_waiter,
                coarse="forward" in (first.what, second.what),
                fingerprint=name,
                secondary=secondary,
                also=tuple(Shared(space.name.lower(), pool, ids) for (space, pool), ids in shared.items()),
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
    """A record that neither orders nor touches anything; ``stalls`` compares collectives."""


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


def _by_pool(overlaps: tuple[Overlap, ...]) -> dict[tuple[Space, int], tuple[int, ...]]:
    """Shared ids of each space and pool, ascending."""
    found: dict[tuple[Space, int], set[int]] = {}
    for overlap in overlaps:
        found.setdefault((overlap.space, overlap.pool), set()).update(overlap.pages.tolist())
    return {key: tuple(sorted(ids)) for key, ids in found.items()}


def _severity(overlap: Overlap) -> tuple[bool, bool, bool]:
    """Both write, then read-after-write, then write-after-read; device pages before the rest."""
    both = overlap.earlier is Mode.WRITE and overlap.later is Mode.WRITE
    return overlap.space is Space.DEVICE, both, overlap.earlier is Mode.WRITE


def _predecessors(record: GraphNode) -> Iterable[int]:
    """Entries that a graph's entry follows directly."""
    if record.after == IN_ORDER:
        return (record.index - 1,) if record.index else ()
    return (index for index in range(record.index) if record.after >> index & 1)


_IO: Final = {
    IoKind.STORAGE_READ: "storage",
    IoKind.STORAGE_WRITE: "storage",
    IoKind.DEVICE_READ: "device read",
    IoKind.RDMA_WRITE: "rdma",
}
_ROLE: Final = {"copy": "forward", "device read": "backup"}
"""What an operation counts as when it touches device pages."""
_TRANSFERS: Final = ("restore", "backup", "storage", "device read", "rdma")
"""Operations whose pages their owner must not give away before it knows them to be over."""

_DEVICE_HAZARDS: Final = {
    ("forward", Mode.WRITE, "restore", Mode.WRITE): Hazard.WAW_FORWARD_RESTORE,
    ("restore", Mode.WRITE, "forward", Mode.WRITE): Hazard.WAW_FORWARD_RESTORE,
    ("forward", Mode.READ, "restore", Mode.WRITE): Hazard.WAR_FORWARD_RESTORE,
    ("restore", Mode.WRITE, "forward", Mode.READ): Hazard.RAW_RESTORE_FORWARD,
    ("forward", Mode.WRITE, "backup", Mode.READ): Hazard.RAW_FORWARD_BACKUP,
    ("backup", Mode.READ, "forward", Mode.WRITE): Hazard.WAR_BACKUP_FORWARD,
}


def _checked_hazards(what: str, space: Space, mode: Mode) -> tuple[Hazard, ...]:
    if space is Space.HOST:
        return (Hazard.HOST_REUSE,)
    if space is Space.BUFFER:
        return (Hazard.METADATA_WAR,)
    role = (_ROLE.get(what, what), mode)
    found = {h for (_, _, later, later_mode), h in _DEVICE_HAZARDS.items() if (later, later_mode) == role}
    return tuple(sorted(found))


_CHECKED: Final = {
    (what, space, mode): _checked_hazards(what, space, mode)
    for what in ("forward", "restore", "backup", "copy", "kernel", "host", "graph", "relocate", *_IO.values())
    for space in Space
    for mode in Mode
}
"""Hazards for which a look-up of such an access counts as a check."""
