"""The analyzer: records in, findings and costs out. Pure: no clock, thread, file or global.

For every operation: what it conflicts with that is not surely ordered (``shadow``, ``order``), and, once device
times are known, whether the measured order was kept. Both answers meet in ``findings.judge``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import numpy as np

from hicache_obs.analyzer.causes import Causes
from hicache_obs.analyzer.early import EarlyLaunches
from hicache_obs.analyzer.fence_cost import FenceMeter
from hicache_obs.analyzer.foreign import Foreign
from hicache_obs.analyzer.handover import Blocks, Channels
from hicache_obs.analyzer.hazards import CHECKED, IO_ROLE, Hazards, role
from hicache_obs.analyzer.measured import Measured
from hicache_obs.analyzer.order import Actor, Order, Snapshot
from hicache_obs.analyzer.ownership import Ownership
from hicache_obs.analyzer.runs import Runs, find_runs
from hicache_obs.analyzer.shadow import Conflict, Label, Operation, Shadow, Touching
from hicache_obs.analyzer.taint import MAX_PAIRS, Taint
from hicache_obs.analyzer.verdicts import Pair, Verdicts
from hicache_obs.costs import AnalysisSink, PendingTransfers
from hicache_obs.findings import (
    BlastRadius,
    Hazard,
    Proof,
)
from hicache_obs.records import (
    IN_ORDER,
    NO_OP,
    Access,
    Collective,
    Define,
    DefineSpace,
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
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    Record,
    RecordStream,
    Relocate,
    RowsDiscarded,
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
MAX_ENDED: Final = 1024
"""Transfers in no stream whose end a further thread may still learn of."""
MAX_GRAPHS: Final = 4096
"""Executable graphs known; a replay of an older one may follow anything."""
_NAMED: Final = frozenset({DefineSpace.STREAM, DefineSpace.THREAD, DefineSpace.SITE, DefineSpace.ENGINE})
"""What findings name. Requests, events and I/O have new ids for ever."""
_SUMS: Final = 4 * len(Space)
"""Numbers that ``Shadow.enter`` sums up: pages and pairs by space and mode."""
_RESTORED: Final = 4 * Space.DEVICE + 2 * Mode.WRITE
"""Place of the device pages that a restore writes."""


@dataclass(slots=True, eq=False)
class _Replay:
    """A graph replay whose node records are being read."""

    record: GraphReplay
    stream: Actor
    label: Label
    seen: list[int] = field(default_factory=list)
    """Entries read so far."""


@dataclass(slots=True)
class Totals:
    """Running sums over the whole trace.

    Attributes:
        records: Records analysed.
        pages_checked: Pages of restores that were looked up (once per restore, not per layer).
        pairs_checked: Those of them that had an earlier access.
        lookups: Pages of any operation that had an earlier access: 0 means nothing at all was checked.
        lost: Records lost.
        shared: Pages and buffers touched that another process may access too: its accesses were not checked.
    """

    records: int = 0
    pages_checked: int = 0
    pairs_checked: int = 0
    lookups: int = 0
    lost: int = 0
    shared: int = 0


class Analyzer:
    """Judges every pair of conflicting accesses of one trace (one process, one rank).

    Feed records in trace order with ``feed``; call ``finish`` once at the end, which gives pairs without device
    times their untimed verdict. Not thread-safe; calls ``sink`` on the feeding thread.

    Args:
        sink: Told what is found.
        pairs: The newest raced pairs whose blast radius can be asked for one by one. Whoever runs for ever and asks by
            fingerprint needs few: as many as wait for their device times at once.
    """

    def __init__(self, sink: AnalysisSink, *, pairs: int = MAX_PAIRS) -> None:
        self._sink = sink
        self._order = Order()
        self._shadow = Shadow()
        self._measured = Measured()
        self._taint = Taint(pairs)
        self._names = Names()
        self._hazards = Hazards(self._shadow)
        self._foreign = Foreign()
        self._early = EarlyLaunches(self._order)
        self._causes = Causes(self._order, self._shadow, self._hazards, self._foreign)
        self._verdicts = Verdicts(
            sink, self._names, self._shadow, self._measured, self._hazards, self._taint, self._causes
        )
        self._live = self._verdicts.live
        self._ownership = Ownership(self._order, self._shadow, self._verdicts.misuse)
        self._meter = FenceMeter(sink, self._shadow, self._measured, self._hazards.between)
        self._runs = Runs(self._order, self._shadow, self._causes, self._taint, self._meter, self._live)
        self._graphs: dict[int, Snapshot] = {}
        """By graph, its newest replay; ``_graphs_forgotten``: older graphs were dropped."""
        self._graphs_forgotten = False
        self._replay: _Replay | None = None
        self._channels = Channels(self._order)
        self._blocks = Blocks(self._order)
        self._ios: dict[int, int] = {}
        self._ended: dict[int, Snapshot] = {}
        self._ends_forgotten = False
        self._io_slots: list[int] = []
        self._sums: defaultdict[str, list[int]] = defaultdict(lambda: [0] * _SUMS)
        """By role, what was looked up and the sink has not heard of yet."""
        self._owned = 0
        """Pages whose owner was looked up, likewise."""
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
            RecordStream: self._blocks.mark,
            Times: self._on_times,
            Lost: self._on_lost,
            Define: self._on_define,
            GraphReplay: self._on_graph_replay,
            GraphNode: self._on_graph_node,
            Relocate: self._on_relocate,
            IoBegin: self._on_io_begin,
            IoEnd: self._on_io_end,
            ThreadPost: self._on_post,
            ThreadRecv: self._channels.receive,
            TensorAlloc: self._on_tensor_alloc,
            TensorFree: self._on_tensor_free,
            Collective: _ignore,
            RowsDiscarded: self._on_discarded,
        }

    @property
    def forgotten(self) -> int:
        """Groups dropped from a full history: pairs with them were not checked."""
        return self._shadow.forgotten

    @property
    def retained_groups(self) -> int:
        """Groups in the history now: what the analyzer's memory grows with."""
        return self._shadow.retained

    @property
    def engine(self) -> str:
        """Name and version of the engine, empty until it was stated."""
        return self._names.engine

    def blast_radius(self, race: str | tuple[OpId, OpId]) -> BlastRadius:
        """What a race can have spoiled so far; all races of a fingerprint, or one by its operations, earlier first.

        Every kept pair has its radius from its later operation on, a fingerprint once its findings are reported.
        """
        return self._taint.radius(race)

    def pending_transfers(self) -> tuple[PendingTransfers, ...]:
        """Transfers that were submitted and are not known to have ended, one entry per direction."""
        return self._meter.pending()

    def feed(self, records: Iterable[Record]) -> int:
        """Analyse ``records``; returns how many there were."""
        first = self._seq
        source = iter(records)
        pruned = True
        while pruned:
            room = PRUNE_EVERY - self._seq % PRUNE_EVERY
            part = list(islice(source, room))
            done = 0
            for begin, end in find_runs(part):
                self._take(part[done : begin + 2])
                done = begin + 2 + self._take_run(part[begin:end])
            self._take(part[done:] if done else part)
            if pruned := len(part) == room:
                self._prune()
        self._flush_checked()
        count = self._seq - first
        self.totals.records += count
        self._sink.on_records(count)
        return count

    def _take(self, records: Iterable[Record]) -> None:
        """Analyse records one by one."""
        handlers = self._handlers
        for record in records:
            handlers[type(record)](record)
            self._seq += 1

    def _take_run(self, records: Sequence[Record]) -> int:
        """Go on with the run whose first two records were the last; returns how many more were analysed at once."""
        foreign = self._foreign
        if self._early.active or foreign.memory or foreign.events:
            return 0
        count = self._runs.take(records, self._seq, self._ownership.changes)
        self._seq += count
        return count

    def _prune(self) -> None:
        floor = self._order.floor()
        self._order.prune()
        self._shadow.prune(floor)
        self._measured.forget(self._shadow.oldest)
        self._verdicts.bound()
        self._meter.bound()
        for graph in list(islice(self._graphs, max(0, len(self._graphs) - MAX_GRAPHS))):
            del self._graphs[graph]
            self._graphs_forgotten = True
        self._flush_checked()

    def finish(self) -> None:
        """Report pairs, fences and transfers whose device times never came."""
        self._verdicts.finish()
        self._meter.finish()

    # -- operations ------------------------------------------------------------------------------------------

    def _on_work(self, record: Kernel | Memcpy) -> None:
        order = self._order
        stream = actor = order.issue(record.stream, record.thread)
        if self._early.active and isinstance(record, Kernel):
            actor = self._early.place(record, stream, self._seq)
        group = self._shadow.newest.get(actor)
        if group is not None and group.continues(record):
            label = group.label
        else:
            label = Label(role(record), record.site, record.stream, record.group, record.thread, type(record))
        operation = self._enter(record, actor, label)
        if actor != stream:
            order.follow(stream, actor)
        self._live[record.op] = operation
        self._meter.on_operation(stream, operation, record)

    def _on_host_access(self, record: HostAccess) -> None:
        label = Label("host", record.site, None, 0, record.thread)
        operation = self._enter(record, self._order.thread(record.thread), label)
        self._verdicts.settle(operation.op)  # a host access has no device times to wait for

    def _on_relocate(self, record: Relocate) -> None:
        stream = self._order.issue(record.stream, record.thread)
        label = Label("relocate", record.site, record.stream, 0, record.thread)
        self._live[record.op] = self._enter(record, stream, label)
        for access in record.accesses:
            if access.mode is Mode.READ:
                self._shadow.note_move(access, self._seq)

    def _on_graph_replay(self, record: GraphReplay) -> None:
        self._close_replay()
        stream = self._launch(record)
        label = Label("graph", record.site, record.stream, record.group, record.thread)
        if record.nodes:
            self._replay = _Replay(record, stream, label)
            self._causes.note_replay(stream)
            return
        self._live[record.op] = self._enter(record, stream, label)
        self._graphs[record.graph] = self._order.note(stream, self._seq)

    def _launch(self, record: GraphReplay) -> Actor:
        """A replay follows its stream and earlier replays of the graph; host-side waits around it do not replay."""
        order = self._order
        stream = order.issue(record.stream, record.thread)
        earlier = self._graphs.pop(record.graph, None)  # noted again behind all others: in order of replays
        if earlier is not None:
            order.join(stream, earlier)
        elif self._graphs_forgotten:
            order.suspect(stream)
        return stream

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
            operation.within = True
            self._verdicts.await_entry(operation)
        replay.seen.append(record.index)
        if len(replay.seen) == replay.record.nodes:
            self._close_replay()

    def _close_replay(self) -> None:
        """All entries of a replay were read, or those that are left were lost: its stream goes on after them."""
        replay, self._replay = self._replay, None
        if replay is None:
            return
        order = self._order
        for index in replay.seen:
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
        self._verdicts.settle(
            self._enter(record, actor, Label(IO_ROLE[record.kind], record.site, None, record.io, record.thread)).op
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
        order = self._order
        thread = order.thread(record.thread)
        slot = self._ios.pop(record.io, None)
        if slot is not None:
            order.follow(thread, order.io(slot))
            self._ended[record.io] = order.note(order.io(slot), self._seq)
            if len(self._ended) > MAX_ENDED:
                del self._ended[next(iter(self._ended))]
                self._ends_forgotten = True
        elif record.io in self._ended:  # another thread learns of the same end
            order.join(thread, self._ended[record.io])
        elif self._ends_forgotten:
            order.suspect(thread, map(order.io, self._io_slots))

    def _enter(
        self,
        record: Touching,
        actor: Actor,
        label: Label,
        *,
        op: OpId | None = None,
    ) -> Operation:
        """Check an operation and add it to the history; ``op`` replaces the record's id (a graph's entries)."""
        operation, conflicts, owned = self._shadow.enter(
            actor, self._order.clock(actor), record, record.op if op is None else op, self._seq, label, self._sums
        )
        group = operation.group
        self._taint.step(operation)
        if self._foreign.memory:
            self.totals.shared += self._foreign.touched(record.accesses)
        if group.owned_at != self._ownership.changes:
            self._check_owner(operation, owned)
        for conflict in conflicts:
            self._on_conflict(conflict, operation, actor)
        self._order.advance(actor)
        return operation

    def _check_owner(self, operation: Operation, owned: int) -> None:
        """Judge an operation by its pages' owners, unless the look-up has shown that all of them may be used.

        Args:
            owned: How many pages of a new group have a known owner, -1 if nothing was looked up.
        """
        group = operation.group
        if owned < 0 or group.suspect or operation.label.what == "relocate":
            owned = self._ownership.check(operation)
        else:
            group.owned_at = self._ownership.changes
        self._owned += owned

    def _flush_checked(self) -> None:
        """Tell the sink what was looked up since the last time."""
        sink, totals = self._sink, self.totals
        for what, sums in self._sums.items():
            for at, hazards in CHECKED[what]:
                pages, pairs = sums[at], sums[at + 1]
                if pages:
                    for hazard in hazards:
                        sink.on_checked(hazard, pages, pairs)
                    totals.lookups += pairs
                    if what == "restore" and at == _RESTORED:
                        totals.pages_checked += pages
                        totals.pairs_checked += pairs
        self._sums.clear()
        if self._owned:
            sink.on_checked(Hazard.LIFETIME, self._owned, self._owned)
            self._owned = 0

    def _on_conflict(self, conflict: Conflict, later: Operation, actor: Actor) -> None:
        earlier = conflict.earlier
        if earlier.op == later.op:
            return  # two entries of one graph replay: the graph's own business
        proof = self._order.proof(actor, earlier.group.actor, earlier.epoch)
        if proof is Proof.POLLED:
            hazard = self._hazards.of(conflict.overlaps, earlier, later)
            self._sink.on_weak_ordering(hazard, proof.value, (earlier.op, later.op))
        if proof in (Proof.ORDERED, Proof.POLLED):
            return
        if proof is Proof.NONE and (earlier.seq < self._order.doubt_at or self._foreign.covers(conflict.overlaps)):
            proof = Proof.UNKNOWN
        later.unordered += (earlier.op,)
        self._taint.race(earlier, later, conflict.overlaps)
        reason = self._causes.of(conflict, later, actor, proof)
        hazard = self._hazards.of(conflict.overlaps, earlier, later)
        self._verdicts.expect(Pair(conflict, later, hazard, proof, reason))

    # -- order -----------------------------------------------------------------------------------------------

    def _on_event_record(self, record: EventRecord) -> None:
        order = self._order
        stream = order.issue(record.stream, record.thread)
        order.record(record.event, stream, self._seq, record.host_ns, self._meter.last.get(stream, NO_OP))

    def _on_event_wait(self, record: EventWait) -> None:
        order = self._order
        snapshot = order.current(record.event)
        stream = order.issue(record.stream, record.thread)
        self._causes.note_wait(stream, record.stream, snapshot, self._seq)
        if self._early.active:
            self._early.stop(record.stream)
        if self._foreign.events and self._foreign.waits(record.event, self._seq):
            order.suspect(stream)
        elif snapshot is not None:
            order.join(stream, snapshot)
        self._meter.on_wait(stream, record, snapshot)

    def _on_wait_stream(self, record: WaitStream) -> None:
        order = self._order
        on = order.issue(record.on, record.thread)
        snapshot = order.snapshot(on, self._seq, record.host_ns, self._meter.last.get(on, NO_OP))
        stream = order.issue(record.waiter, record.thread)
        self._causes.note_wait(stream, record.waiter, snapshot, self._seq)
        if self._early.active:
            self._early.stop(record.waiter)
        order.join(stream, snapshot)
        self._meter.on_wait(stream, record, snapshot)

    def _on_query(self, record: EventQuery) -> None:
        if record.result:
            self._learn(record, polled=True)

    def _on_event_sync(self, record: EventSync) -> None:
        self._learn(record, polled=False)

    def _learn(self, record: EventQuery | EventSync, *, polled: bool) -> None:
        """The calling thread knows the event's record to be complete."""
        order = self._order
        snapshot, thread = order.current(record.event), order.thread(record.thread)
        self._causes.note_sync(thread, None, snapshot, self._seq, polled=polled)
        if self._foreign.events and self._foreign.waits(record.event, self._seq):
            order.suspect(thread)
        elif snapshot is not None:
            order.join(thread, snapshot, polled=polled)

    def _on_host_sync(self, record: HostSync) -> None:
        order = self._order
        thread = order.thread(record.thread)
        if record.stream is None:
            order.observe_all(thread)
            self._causes.note_sync(thread, None, order.note(thread, self._seq), self._seq)
            return
        stream = order.stream(record.stream)
        order.follow(thread, stream)
        self._causes.note_sync(thread, record.stream, order.note(stream, self._seq), self._seq)

    def _on_post(self, record: ThreadPost) -> None:
        self._channels.post(record, self._seq)

    # -- ownership, times, losses, names -------------------------------------------------------------------

    def _on_free(self, record: PageFree) -> None:
        self._ownership.free(record, self._seq)

    def _on_tensor_alloc(self, record: TensorAlloc) -> None:
        self._blocks.hand_out(record, self._seq)
        self._note_new_hands(record.block)

    def _on_tensor_free(self, record: TensorFree) -> None:
        block = self._blocks.give_back(record, self._seq)
        if block is not None:
            self._note_new_hands(block)

    def _note_new_hands(self, block: int) -> None:
        """What used the block before and what uses it from now on are different tensors."""
        self._shadow.note_free(Access(Space.BUFFER, Mode.WRITE, np.array([block], np.int64)), self._seq)

    def _on_discarded(self, record: RowsDiscarded) -> None:
        self._taint.discard(record.group, record.requests)

    def _on_alloc(self, record: PageAlloc) -> None:
        self._taint.allocate(self._seq, record.access)
        self._ownership.allocate(record, self._seq)
        self._verdicts.rearm(record.access)

    def _on_times(self, record: Times) -> None:
        operations = self._verdicts.note_times(record)
        if operations:
            self._taint.timed()
        self._meter.on_times(record, operations)  # it looks at their times
        if operations:
            self._verdicts.judge_timed(operations)

    def _on_lost(self, record: Lost) -> None:
        self._close_replay()
        if record.reason is DropReason.EDGE:
            self._order.doubt(self._seq)
        elif record.reason is not DropReason.UNRESOLVED:  # else only device times are missing: no edge, no access
            self._order.lose(self._seq)
            self._channels.lose()
            self._ownership.lose()
        self.totals.lost += record.count
        self._sink.on_lost(record.count, record.reason)

    def _on_define(self, record: Define) -> None:
        if record.space in _NAMED:
            self._names.learn(record)
        self._foreign.learn(record)
        if record.space is DefineSpace.STREAM:
            self._order.declare(StreamId(record.id), StreamKind(record.value))
        elif record.space is DefineSpace.POOL:
            self._meter.declare_pool(record.id, record.value)
        elif record.space is DefineSpace.EARLY_SITE:
            self._early.declare(record.id)


def _ignore(record: Record) -> None:
    """A record that neither orders nor touches anything; ``stalls`` compares collectives."""


def _predecessors(record: GraphNode) -> Iterable[int]:
    """Entries that a graph's entry follows directly."""
    if record.after == IN_ORDER:
        return (record.index - 1,) if record.index else ()
    return (index for index in range(record.index) if record.after >> index & 1)
