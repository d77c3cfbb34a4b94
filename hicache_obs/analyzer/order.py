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
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hicache_obs.findings import Proof
from hicache_obs.records import EventId, StreamId, StreamKind, ThreadId

GUARANTEED, POLLED, DOUBTFUL = 0, 1, 2
_PROOF = (Proof.ORDERED, Proof.POLLED, Proof.UNKNOWN)

Clock = list[int]
Actor = int


@dataclass(slots=True)
class Snapshot:
    """What is complete once an event's record is complete.

    Attributes:
        levels: One clock per level.
        actor: Stream the record was made on.
        seq: Position of the record in the trace.
        mark: Caller's note, kept unread (the fence cost module keeps the last timed item there).
    """

    levels: list[Clock]
    actor: Actor
    seq: int
    mark: object = None


def _join(into: Clock, other: Clock) -> None:
    """Component-wise maximum, in place."""
    if len(into) < len(other):
        into.extend([0] * (len(other) - len(into)))
    for index, value in enumerate(other):
        if value > into[index]:
            into[index] = value


class Order:
    """Happens-before over one trace. Feed it steps in trace order; not thread-safe.

    Memory: one clock per actor and per named event; actors are streams and host threads of the process.
    """

    def __init__(self) -> None:
        self._actors: dict[tuple[str | int, ...], Actor] = {}
        self._clocks: list[list[Clock]] = []
        self._kinds: dict[Actor, StreamKind] = {}
        self._events: dict[EventId, Snapshot] = {}
        self._depth = 1
        self._lost_at = -1
        self._versions: list[int] = []
        self._joined: dict[tuple[Actor, Actor], int] = {}

    @property
    def lost_at(self) -> int:
        """Trace position of the newest loss, -1 if nothing was lost."""
        return self._lost_at

    @property
    def actors(self) -> int:
        """Number of actors seen."""
        return len(self._clocks)

    def stream(self, stream: StreamId) -> Actor:
        """Actor of a stream."""
        return self._actor("s", stream)

    def thread(self, thread: ThreadId) -> Actor:
        """Actor of a host thread."""
        return self._actor("t", thread)

    def declare(self, stream: StreamId, kind: StreamKind) -> None:
        """State a stream's kind; streams never declared are non-blocking."""
        self._kinds[self.stream(stream)] = kind

    def node(self, graph: int, index: int) -> Actor:
        """Actor of one entry of a graph. Replays of a graph follow each other, so the entry's runs are in order."""
        return self._actor("g", graph, index)

    def io(self, slot: int) -> Actor:
        """Actor of a transfer in no stream; the caller gives out slots so that users of one are in order."""
        return self._actor("i", slot)

    def ledger(self, thread: ThreadId) -> Actor:
        """Actor of a thread's allocator calls, which the thread itself follows."""
        return self._actor("l", thread)

    def early(self, stream: StreamId, slot: int, thread: ThreadId) -> Actor:
        """Actor of a kernel beside its stream, launched by ``thread``; users of one slot must be in order."""
        actor = self._actor("e", stream, slot)
        kind = self._kinds.get(self.stream(stream))
        if kind is not None:
            self._kinds[actor] = kind
        self.issue(actor, self.thread(thread))
        return actor

    def suspect(self, actor: Actor, others: Iterable[Actor] | None = None) -> None:
        """``actor`` may follow all that ``others`` (``None``: everybody) did so far, by order that nobody recorded."""
        self._deepen(DOUBTFUL + 1)
        for other in range(len(self._clocks)) if others is None else others:
            self._merge(actor, self._clocks[other], DOUBTFUL)

    def _actor(self, space: str, *ident: int) -> Actor:
        key: tuple[str | int, ...] = (space, *ident)
        actor = self._actors.get(key)
        if actor is None:
            actor = self._actors[key] = len(self._clocks)
            self._clocks.append([[] for _ in range(self._depth)])
            self._versions.append(0)
            for levels in self._clocks:
                for clock in levels:
                    clock.extend([0] * (actor + 1 - len(clock)))
        return actor

    def clock(self, actor: Actor) -> Clock:
        """The guaranteed clock of ``actor``: what its next operation surely happens after. Do not change it."""
        return self._clocks[actor][0]

    def issue(self, stream: Actor, thread: Actor) -> None:
        """A call by ``thread`` adds something to ``stream``: what the thread knows, the stream now follows.

        Also applies the implicit order between the legacy default stream and blocking streams.
        """
        if self._joined.get((stream, thread)) != self._versions[thread]:
            self._merge(stream, self._clocks[thread], GUARANTEED)
            self._joined[stream, thread] = self._versions[thread]
        kind = self._kinds.get(stream)
        if kind is None or kind is StreamKind.NONBLOCKING:
            return
        partner = StreamKind.BLOCKING if kind is StreamKind.LEGACY else StreamKind.LEGACY
        for other, other_kind in self._kinds.items():
            if other_kind is partner and other != stream:
                self._merge(stream, self._clocks[other], GUARANTEED)

    def advance(self, actor: Actor) -> int:
        """The actor's next operation happens now; returns its epoch. Check it *before* advancing."""
        levels = self._clocks[actor]
        epoch = levels[0][actor] + 1
        for clock in levels:
            clock[actor] = epoch
        self._versions[actor] += 1
        return epoch

    def proof(self, actor: Actor, before: Actor, epoch: int) -> Proof:
        """How ``actor``'s next operation is known to follow operation ``epoch`` of ``before``."""
        for level, clock in enumerate(self._clocks[actor]):
            if clock[before] >= epoch:
                return _PROOF[level]
        return Proof.NONE

    def record(self, event: EventId, stream: Actor, seq: int, mark: object = None) -> None:
        """``event`` now marks all work queued on ``stream``; the marker is itself work of the stream."""
        self._events[event] = self.snapshot(stream, seq, mark)

    def snapshot(self, stream: Actor, seq: int, mark: object = None) -> Snapshot:
        """An anonymous record on ``stream`` (what ``wait_stream`` makes)."""
        self.advance(stream)
        return Snapshot([clock.copy() for clock in self._clocks[stream]], stream, seq, mark)

    def current(self, event: EventId) -> Snapshot | None:
        """The event's current record, ``None`` if it was never recorded."""
        return self._events.get(event)

    def note(self, actor: Actor, seq: int) -> Snapshot:
        """What ``actor``'s next operation happens after, as it is now; no marker, no work of its own."""
        return Snapshot([clock.copy() for clock in self._clocks[actor]], actor, seq)

    def notes(self, seq: int) -> list[Snapshot]:
        """``note`` of every stream."""
        return [self.note(actor, seq) for key, actor in self._actors.items() if key[0] == "s"]

    def follow(self, actor: Actor, other: Actor) -> None:
        """``actor`` follows everything ``other`` has done so far, for good and on every level."""
        self._merge(actor, self._clocks[other], GUARANTEED)

    def join(self, actor: Actor, snapshot: Snapshot, *, polled: bool = False) -> None:
        """``actor`` (a stream that waits, a thread that synchronised or polled) follows ``snapshot`` from now on.

        A snapshot of a named event taken before the newest loss may have been replaced by a lost re-record, so
        it counts on the doubtful level only. Pass ``polled`` for knowledge gained by a query.
        """
        level = POLLED if polled else GUARANTEED
        if snapshot.seq < self._lost_at:
            level = DOUBTFUL
        self._deepen(level + 1)
        while len(snapshot.levels) < self._depth:
            snapshot.levels.append(snapshot.levels[-1].copy())
        self._merge(actor, snapshot.levels, level)

    def observe_all(self, thread: Actor) -> None:
        """``thread`` waited until all work queued on every stream was complete."""
        for key, actor in self._actors.items():
            if key[0] == "s":
                self.follow(thread, actor)

    def lose(self, seq: int) -> None:
        """Records before ``seq`` are missing: what named events mean is doubtful until they are recorded again."""
        self._lost_at = seq

    def floor(self) -> Clock:
        """Per actor, the epoch that every host thread knows to be complete: older operations cannot race."""
        threads = [self._clocks[actor][0] for key, actor in self._actors.items() if key[0] == "t"]
        if not threads:
            return [0] * len(self._clocks)
        return [min(column) for column in zip(*threads, strict=True)]

    def _deepen(self, depth: int) -> None:
        while self._depth < depth:
            for levels in self._clocks:
                levels.append(levels[-1].copy())
            for event in self._events.values():
                event.levels.append(event.levels[-1].copy())
            self._depth += 1

    def _merge(self, actor: Actor, levels: list[Clock], at_least: int) -> None:
        """Join ``levels[k]`` into the actor's level k, for every k from ``at_least`` up."""
        own = self._clocks[actor]
        for level in range(at_least, self._depth):
            _join(own[level], levels[min(level, len(levels) - 1)])
        self._versions[actor] += 1
