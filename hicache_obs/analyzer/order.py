"""Vector clocks over streams and host threads: is a ordered before b, and by what kind of proof.

One question is answered, ``proof(before, epoch)`` for the next operation of an actor. The rules are CUDA's
(``cudaEventRecord`` snapshots, ``cudaStreamWaitEvent`` binds at the call, host synchronisation orders later
submissions by that thread; runtime API documentation, sections Event Management and Stream Management).

An *actor* is a stream or a host thread. ``C[actor]`` is what its next operation happens after; an operation's
*epoch* is its count on its own actor. Clocks are kept on up to three levels, each a superset of the one below:

* level 0: guaranteed edges (FIFO, record/wait, synchronize);
* level 1: also edges the host learned by polling (``query`` was true);
* level 2: also edges that may be false because records were lost.

All levels are one list until the first weaker edge appears, so an ordinary trace pays for one.

Between two waits of a stream only its own count changes. Its snapshots therefore share one copy of the clock, the
*base*, and state their own count beside it: recording an event per layer copies nothing, and waiting for one layer
after another joins one number each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from itertools import islice, repeat
from operator import ge
from typing import Final

from hicache_obs._struct import Struct
from hicache_obs.errors import TraceError
from hicache_obs.findings import Proof
from hicache_obs.records import EventId, OpId, StreamId, StreamKind, ThreadId

GUARANTEED, POLLED, DOUBTFUL = 0, 1, 2
_PROOF = (Proof.ORDERED, Proof.POLLED, Proof.UNKNOWN)
DOUBTFUL_SEQ: Final = -2
"""Sequence of a snapshot that is older than any loss: what follows it is never a proven edge."""
MAX_EVENTS: Final = 1 << 15
"""Recorded events kept. Of older ones only a sum is left, and what follows it is never a proven edge."""
MAX_ACTORS: Final = 1 << 13
"""Their clocks take half a GiB on each level: each has a number for each."""

Clock = list[int]
Actor = int


class Snapshot(Struct, eq=False, gc=False):
    """What is complete once an event's record is complete.

    Attributes:
        levels: One clock per level, shared by the actor's snapshots and never changed; its component of ``actor``
            may be older than ``epoch``.
        actor: Stream the record was made on.
        epoch: The actor's count.
        seq: Position of the record in the trace.
        issued_ns: Host clock at the call.
        mark: Caller's note, kept unread (fence costs keep the last timed item on the stream there).
        former: What this record of an event replaced; of the current record only.
    """

    levels: list[Clock]
    actor: Actor
    epoch: int
    seq: int
    issued_ns: int = 0
    mark: OpId | None = None
    former: Snapshot | None = None

    def covers(self, actor: Actor, epoch: int) -> bool:
        """Whether operation ``epoch`` of ``actor`` is guaranteed to be among what is complete."""
        if actor == self.actor:
            return epoch <= self.epoch
        clock = self.levels[GUARANTEED]
        return actor < len(clock) and epoch <= clock[actor]

    def doubted(self) -> Snapshot:
        """The same, as an edge that nobody can be sure of."""
        return Snapshot(self.levels, self.actor, self.epoch, DOUBTFUL_SEQ)


def _join(into: Clock, other: Clock) -> bool:
    """Component-wise maximum, in place; whether anything changed."""
    if len(into) < len(other):
        into.extend([0] * (len(other) - len(into)))
    changed = False
    for index, value in enumerate(other):
        if value > into[index]:
            into[index] = value
            changed = True
    return changed


class Order:
    """Happens-before over one trace. Feed it steps in trace order; not thread-safe.

    Memory: one clock per actor and at most one per event, ``MAX_EVENTS`` of them; actors are streams, graph entries
    and host threads of the process, ``MAX_ACTORS`` of them. A call that brings another one raises ``TraceError``.
    """

    def __init__(self) -> None:
        self._streams: dict[StreamId, Actor] = {}
        self._threads: dict[ThreadId, Actor] = {}
        self._others: dict[tuple[str, int, int], Actor] = {}
        self.clocks: list[list[Clock]] = []
        """By actor and level."""
        self._bases: list[list[Clock] | None] = []
        """What the actor's next snapshot shares, ``None`` once another component than its own has changed."""
        self._followed: list[list[Clock] | None] = []
        """The base that was joined into the actor's clock last."""
        self._versions: list[int] = []
        self._joined: list[dict[Actor, int]] = []
        """Per stream: the version of each thread's clock that was joined into it."""
        self._kinds: dict[Actor, StreamKind] = {}
        self._events: dict[EventId, Snapshot] = {}
        self._old_events: tuple[EventId, EventId] | None = None
        """Lowest and highest id of the events that were dropped."""
        self._stray = Snapshot([[]], -1, 0, DOUBTFUL_SEQ)
        """Sum of those events; nobody can tell which of them a wait is for."""
        self._depth = 1
        self._lost_at = -1
        self._doubt_at = -1

    @property
    def lost_at(self) -> int:
        """Trace position of the newest loss, -1 if nothing was lost."""
        return self._lost_at

    @property
    def doubt_at(self) -> int:
        """Trace position of the newest place where an edge may be missing, -1 if there is none."""
        return self._doubt_at

    @property
    def actors(self) -> int:
        """Number of actors seen."""
        return len(self.clocks)

    def stream(self, stream: StreamId) -> Actor:
        """Actor of a stream."""
        actor = self._streams.get(stream)
        if actor is None:
            actor = self._streams[stream] = self._new_actor()
        return actor

    def thread(self, thread: ThreadId) -> Actor:
        """Actor of a host thread."""
        actor = self._threads.get(thread)
        if actor is None:
            actor = self._threads[thread] = self._new_actor()
        return actor

    def declare(self, stream: StreamId, kind: StreamKind) -> None:
        """State a stream's kind; streams never declared are non-blocking."""
        actor = self.stream(stream)
        if kind is not StreamKind.NONBLOCKING:
            self._kinds[actor] = kind
        else:
            self._kinds.pop(actor, None)

    def node(self, graph: int, index: int) -> Actor:
        """Actor of one entry of a graph. Replays of a graph follow each other, so the entry's runs are in order."""
        return self._other("graph", graph, index)

    def same_graph(self, one: Actor, other: Actor) -> bool:
        """Whether both are entries of one graph. Looks through all of them; for explanations only."""
        graphs = [key[1] for key, actor in self._others.items() if key[0] == "graph" and actor in (one, other)]
        return len(graphs) == 2 and graphs[0] == graphs[1]

    def io(self, slot: int) -> Actor:
        """Actor of a transfer in no stream; the caller gives out slots so that users of one are in order."""
        return self._other("io", slot, 0)

    def ledger(self, thread: ThreadId) -> Actor:
        """Actor of a thread's allocator calls, which the thread itself follows."""
        return self._other("ledger", thread, 0)

    def early(self, stream: StreamId, slot: int, thread: ThreadId) -> Actor:
        """Actor of a kernel beside its stream, launched by ``thread``; users of one slot must be in order."""
        actor = self._other("early", stream, slot)
        kind = self._kinds.get(self.stream(stream))
        if kind is not None:
            self._kinds[actor] = kind
        self._merge(actor, self.clocks[self.thread(thread)], GUARANTEED)
        if self._kinds:
            self._follow_legacy(actor)
        return actor

    def suspect(self, actor: Actor, others: Iterable[Actor] | None = None) -> None:
        """``actor`` may follow all that ``others`` (``None``: everybody) did so far, by order that nobody recorded."""
        self._deepen(DOUBTFUL + 1)
        for other in range(len(self.clocks)) if others is None else others:
            self._merge(actor, self.clocks[other], DOUBTFUL)

    def _other(self, kind: str, number: int, index: int) -> Actor:
        key = kind, number, index
        actor = self._others.get(key)
        if actor is None:
            actor = self._others[key] = self._new_actor()
        return actor

    def _new_actor(self) -> Actor:
        actor = len(self.clocks)
        if actor == MAX_ACTORS:
            raise TraceError(f"more than {MAX_ACTORS} streams, host threads and graph entries, all together")
        self.clocks.append([[] for _ in range(self._depth)])
        self._bases.append(None)
        self._followed.append(None)
        self._versions.append(0)
        self._joined.append({})
        for levels in self.clocks:
            for clock in levels:
                clock.extend([0] * (actor + 1 - len(clock)))
        return actor

    def clock(self, actor: Actor) -> Clock:
        """The guaranteed clock of ``actor``: what its next operation surely happens after. Do not change it."""
        return self.clocks[actor][0]

    def issue(self, stream: StreamId, thread: ThreadId) -> Actor:
        """A call by ``thread`` adds something to ``stream``: what the thread knows, the stream now follows.

        Also applies the implicit order between the legacy default stream and blocking streams. Returns the stream's
        actor.
        """
        try:
            on, by = self._streams[stream], self._threads[thread]
        except KeyError:
            on, by = self.stream(stream), self.thread(thread)
        joined, version = self._joined[on], self._versions[by]
        if joined.get(by) != version:
            joined[by] = version
            self._merge(on, self.clocks[by], GUARANTEED)
        if self._kinds:
            self._follow_legacy(on)
        return on

    def _follow_legacy(self, stream: Actor) -> None:
        kind = self._kinds.get(stream)
        if kind is None:
            return
        partner = StreamKind.BLOCKING if kind is StreamKind.LEGACY else StreamKind.LEGACY
        for other, other_kind in self._kinds.items():
            if other_kind is partner:
                self._merge(stream, self.clocks[other], GUARANTEED)

    def step(self, actor: Actor, count: int) -> None:
        """``advance``, ``count`` times."""
        epoch = self.clocks[actor][0][actor] + count
        for clock in self.clocks[actor]:
            clock[actor] = epoch
        self._versions[actor] += count

    def advance(self, actor: Actor) -> int:
        """The actor's next operation happens now; returns its epoch. Check it *before* advancing."""
        levels = self.clocks[actor]
        clock = levels[0]
        clock[actor] = epoch = clock[actor] + 1
        if self._depth > 1:
            for clock in levels[1:]:
                clock[actor] = epoch
        self._versions[actor] += 1
        return epoch

    def proof(self, actor: Actor, before: Actor, epoch: int) -> Proof:
        """How ``actor``'s next operation is known to follow operation ``epoch`` of ``before``."""
        for level, clock in enumerate(self.clocks[actor]):
            if clock[before] >= epoch:
                return _PROOF[level]
        return Proof.NONE

    def record(self, event: EventId, stream: Actor, seq: int, issued_ns: int = 0, mark: OpId | None = None) -> None:
        """``event`` now marks all work queued on ``stream``; the marker is itself work of the stream."""
        former = self._events.pop(event, None)  # so that the table stays in order of records
        self._events[event] = snapshot = self.snapshot(stream, seq, issued_ns, mark)
        if former is not None:
            former.former = None
            snapshot.former = former

    def record_all(
        self,
        events: Iterable[EventId],
        stream: Actor,
        epochs: Iterable[int],
        seqs: Iterable[int],
        issued_ns: Iterable[int],
        marks: Iterable[OpId],
    ) -> None:
        """``record`` each of ``events``, at these epochs; the stream's count does not move."""
        levels = self._bases[stream] or self._base(stream)
        snapshots = map(Snapshot, repeat(levels), repeat(stream), epochs, seqs, issued_ns, marks)
        for event, snapshot in zip(events, snapshots, strict=True):
            former = self._events.pop(event, None)
            self._events[event] = snapshot
            if former is not None:
                former.former = None
                snapshot.former = former

    def snapshot(self, stream: Actor, seq: int, issued_ns: int = 0, mark: OpId | None = None) -> Snapshot:
        """An anonymous record on ``stream`` (what ``wait_stream`` makes)."""
        levels = self.clocks[stream]
        clock = levels[0]
        clock[stream] = epoch = clock[stream] + 1
        if self._depth > 1:
            for clock in levels[1:]:
                clock[stream] = epoch
        return Snapshot(self._bases[stream] or self._base(stream), stream, epoch, seq, issued_ns, mark)

    def current(self, event: EventId) -> Snapshot | None:
        """The event's current record, ``None`` if it was never recorded."""
        snapshot = self._events.get(event)
        if snapshot is None and self._old_events is not None:
            low, high = self._old_events
            return self._stray if low <= event <= high else None
        return snapshot

    def awaited(self, actor: Actor, events: Iterable[EventId]) -> list[Snapshot] | None:
        """Records of ``events``, if waits for them let ``actor`` follow more of one other actor for sure, and no more
        than that; else ``None``."""
        base = self._followed[actor]
        snapshots = []
        for snapshot in map(self._events.get, events):
            if snapshot is None or snapshot.levels is not base or snapshot.seq < self._lost_at:
                return None
            snapshots.append(snapshot)
        return snapshots

    def reach(self, actor: Actor, source: Actor, epoch: int) -> None:
        """``actor`` follows operation ``epoch`` of ``source`` for sure."""
        changed = False
        for clock in self.clocks[actor]:
            if clock[source] < epoch:
                clock[source] = epoch
                changed = True
        if changed:
            self._changed(actor)

    def note(self, actor: Actor, seq: int) -> Snapshot:
        """What ``actor``'s next operation happens after, as it is now; no marker, no work of its own."""
        return Snapshot(self._base(actor), actor, self.clocks[actor][0][actor], seq)

    def notes(self, seq: int) -> list[Snapshot]:
        """``note`` of every stream."""
        return [self.note(actor, seq) for actor in self._streams.values()]

    def follow(self, actor: Actor, other: Actor) -> None:
        """``actor`` follows everything ``other`` has done so far, for good and on every level."""
        self._merge(actor, self.clocks[other], GUARANTEED)

    def tell(self, thread: Actor, ledger: Actor) -> int:
        """``thread`` follows the next step of its ``ledger``, which follows nobody; returns that step's epoch."""
        levels = self.clocks[thread]
        epoch = levels[0][ledger] + 1
        for clock in levels:
            clock[ledger] = epoch
        self._changed(thread)
        return epoch

    def join(self, actor: Actor, snapshot: Snapshot, *, polled: bool = False) -> None:
        """``actor`` (a stream that waits, a thread that synchronised or polled) follows ``snapshot`` from now on.

        A snapshot of a named event taken before the newest loss may have been replaced by a lost re-record, so
        it counts on the doubtful level only. Pass ``polled`` for knowledge gained by a query.
        """
        base, source = snapshot.levels, snapshot.actor
        if not polled and snapshot.seq >= self._lost_at:
            if self._followed[actor] is not base:
                self._followed[actor] = base
                self._merge(actor, base, GUARANTEED)
            if self.clocks[actor][0][source] < snapshot.epoch:
                self.reach(actor, source, snapshot.epoch)
            return
        level = POLLED
        if snapshot.seq < self._lost_at:
            if self._knows(actor, snapshot):
                return
            level = DOUBTFUL
        self._deepen(level + 1)
        self._merge(actor, base, level)
        for clock in self.clocks[actor][level:]:
            if clock[source] < snapshot.epoch:
                clock[source] = snapshot.epoch
                self._changed(actor)

    def _knows(self, actor: Actor, snapshot: Snapshot) -> bool:
        """Whether ``actor`` follows all of ``snapshot`` for sure, so that joining it would change nothing."""
        own = self.clocks[actor][GUARANTEED]
        complete = snapshot.levels[-1]
        return own[snapshot.actor] >= snapshot.epoch and all(map(ge, own, complete))

    def observe_all(self, thread: Actor) -> None:
        """``thread`` waited until all work queued on every stream was complete."""
        for actor in self._streams.values():
            self.follow(thread, actor)

    def lose(self, seq: int) -> None:
        """Records before ``seq`` are missing: what named events mean is doubtful until they are recorded again."""
        self._lost_at = self._doubt_at = seq

    def doubt(self, seq: int) -> None:
        """At ``seq`` somebody waited for something unknown: pairs from before it that look unordered are doubtful."""
        self._doubt_at = seq

    def floor(self) -> Clock:
        """Per actor, the epoch that every host thread knows to be complete: older operations cannot race."""
        threads = [self.clocks[actor][0] for actor in self._threads.values()]
        if not threads:
            return [0] * len(self.clocks)
        return [min(column) for column in zip(*threads, strict=True)]

    def prune(self) -> None:
        """Drop the events beyond ``MAX_EVENTS`` that were recorded longest ago."""
        excess = len(self._events) - MAX_EVENTS
        if excess <= 0:
            return
        low, high = self._old_events or (sys.maxsize, -sys.maxsize)
        (clock,) = self._stray.levels
        for event in list(islice(self._events, excess)):
            snapshot = self._events.pop(event)
            low, high = min(low, event), max(high, event)
            _join(clock, snapshot.levels[-1])
            clock[snapshot.actor] = max(clock[snapshot.actor], snapshot.epoch)
        self._old_events = EventId(low), EventId(high)

    def _base(self, actor: Actor) -> list[Clock]:
        """What snapshots of the actor share until ``_changed``."""
        base = self._bases[actor]
        if base is None:
            base = self._bases[actor] = [clock.copy() for clock in self.clocks[actor]]
        return base

    def _deepen(self, depth: int) -> None:
        while self._depth < depth:
            for levels in self.clocks:
                levels.append(levels[-1].copy())
            self._depth += 1

    def _merge(self, actor: Actor, levels: list[Clock], at_least: int) -> None:
        """Join ``levels[k]`` into the actor's level k, for every k from ``at_least`` up."""
        own = self.clocks[actor]
        if self._depth == 1:
            changed = _join(own[0], levels[0])
        else:
            changed = False
            for level in range(at_least, self._depth):
                changed |= _join(own[level], levels[min(level, len(levels) - 1)])
        if changed:
            self._changed(actor)

    def _changed(self, actor: Actor) -> None:
        """Components of the actor's clock other than its own have changed."""
        self._versions[actor] += 1
        self._bases[actor] = None
