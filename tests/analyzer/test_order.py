"""The clocks on their own, against sets of single operations: who knows what, how surely, after any calls."""

from __future__ import annotations

import itertools
import random

import pytest

from hicache_obs.analyzer import order as module
from hicache_obs.analyzer.order import DOUBTFUL_SEQ, Order, Snapshot
from hicache_obs.errors import TraceError
from hicache_obs.findings import Proof
from hicache_obs.records import EventId, StreamId, StreamKind, ThreadId

LEVELS = range(3)
"""Guaranteed, polled, doubtful: what is known by each, and by all that are surer."""
Done = tuple[int, int]
"""An operation: its actor, and its count there."""
Known = list[set[Done]]
KINDS = (StreamKind.LEGACY, StreamKind.BLOCKING, StreamKind.NONBLOCKING)


class Machine:
    """An order, and for each actor the set of what is known at each level."""

    def __init__(self, rng: random.Random, *, kinds: bool, events: int = 3) -> None:
        self.rng = rng
        self.most = 1 + events
        self.deepest = 0
        """The weakest level that was needed."""
        self.order = Order()
        self.known: dict[int, Known] = {}
        self.counts: dict[int, int] = {}
        self.streams = [StreamId(n) for n in range(3)]
        self.threads = [ThreadId(n) for n in range(2)]
        self.kinds: dict[int, StreamKind] = {}
        self.events: dict[EventId, tuple[Known, int, int]] = {}
        """What each covers, when it was recorded, and the position."""
        self.stray: set[Done] = set()
        self.gone: set[EventId] = set()
        self.seq = 0
        self.lost_at = -1
        if kinds:
            for stream, kind in zip(self.streams, rng.choices(KINDS, k=3), strict=True):
                self.order.declare(stream, StreamKind.BLOCKING)  # the last word counts
                self.order.declare(stream, kind)
                self.kinds[self.on(stream)] = kind

    def actor(self, actor: int) -> int:
        self.known.setdefault(actor, [set(), set(), set()])
        self.counts.setdefault(actor, 0)
        return actor

    def on(self, stream: StreamId) -> int:
        return self.actor(self.order.stream(stream))

    def by(self, thread: ThreadId) -> int:
        return self.actor(self.order.thread(thread))

    def learn(self, actor: int, what: Known, level: int = 0) -> None:
        for at in LEVELS:
            if at >= level:
                self.known[actor][at] |= what[at]

    def count(self, actor: int) -> int:
        self.counts[actor] += 1
        for known in self.known[actor]:
            known.add((actor, self.counts[actor]))
        return self.counts[actor]

    def issue(self, stream: StreamId, thread: ThreadId) -> int:
        on, by = self.on(stream), self.by(thread)
        assert self.order.issue(stream, thread) == on
        self.learn(on, self.known[by])
        self.legacy(on, self.kinds.get(on, StreamKind.NONBLOCKING))
        return on

    def legacy(self, on: int, kind: StreamKind) -> None:
        if kind is not StreamKind.NONBLOCKING:
            for other, its in self.kinds.items():
                if {kind, its} == {StreamKind.LEGACY, StreamKind.BLOCKING}:
                    self.learn(on, self.known[other])

    def current(self, event: EventId) -> tuple[Snapshot | None, Known | None, bool]:
        """The snapshot, what it covers, and whether that is doubtful."""
        snapshot = self.order.current(event)
        if event in self.events:
            covered, _, seq = self.events[event]
            return snapshot, covered, seq < self.lost_at
        if self.gone and min(self.gone) <= event <= max(self.gone):
            return snapshot, [set(self.stray) for _ in LEVELS], True
        assert snapshot is None
        return None, None, False

    def join(self, actor: int, event: EventId, *, polled: bool) -> None:
        snapshot, covered, doubtful = self.current(event)
        if snapshot is None or covered is None:
            return
        self.order.join(actor, snapshot, polled=polled)
        if not doubtful:
            self.deepest = max(self.deepest, int(polled))
            self.learn(actor, covered, 1 if polled else 0)
        elif not covered[2] <= self.known[actor][0]:
            self.deepest = 2
            self.learn(actor, covered, 2)

    def step(self) -> None:
        rng, order = self.rng, self.order
        stream, thread = rng.choice(self.streams), rng.choice(self.threads)
        event = EventId(rng.randrange(1, self.most))
        kind = rng.random()
        self.seq += 1
        if kind < 0.25:
            on = self.issue(stream, thread)
            assert order.advance(on) == self.count(on)
        elif kind < 0.35:
            by = self.by(thread)
            assert order.advance(by) == self.count(by)
        elif kind < 0.55:
            on = self.issue(stream, thread)
            order.record(event, on, self.seq, 7 * self.seq)
            self.count(on)
            self.events.pop(event, None)
            self.events[event] = [set(known) for known in self.known[on]], on, self.seq
            snapshot = order.current(event)
            assert snapshot is not None
            assert (snapshot.actor, snapshot.epoch, snapshot.seq) == (on, self.counts[on], self.seq)
            assert snapshot.issued_ns == 7 * self.seq
        elif kind < 0.75:
            self.join(self.issue(stream, thread), event, polled=False)
        elif kind < 0.87:
            self.join(self.by(thread), event, polled=rng.random() < 0.5)
        elif kind < 0.91:
            by, on = self.by(thread), self.on(stream)
            order.follow(by, on)
            self.learn(by, self.known[on])
        elif kind < 0.93:
            by = self.by(thread)
            order.observe_all(by)
            for other in self.streams:
                if other in order._streams:
                    self.learn(by, self.known[self.on(other)])
        elif kind < 0.95:
            note = order.note(self.on(stream), self.seq)
            self.join_note(self.by(thread), note, self.known[self.on(stream)])
        elif kind < 0.965:
            on, by = self.on(stream), self.by(thread)
            actor = self.actor(order.early(stream, rng.randrange(2), thread))
            if self.kinds.get(on, StreamKind.NONBLOCKING) is not StreamKind.NONBLOCKING:
                self.kinds[actor] = self.kinds[on]
            self.learn(actor, self.known[by])
            self.legacy(actor, self.kinds.get(actor, StreamKind.NONBLOCKING))
        elif kind < 0.975 and self.known:
            actor = rng.choice(list(self.known))
            others = None if rng.random() < 0.3 else rng.sample(list(self.known), 1)
            order.suspect(actor, others)
            self.deepest = 2
            for other in list(self.known) if others is None else others:
                self.learn(actor, self.known[other], 2)
        else:
            by = self.by(thread)
            ledger = self.actor(order.ledger(thread))
            epoch = order.tell(by, ledger)
            self.counts[ledger] += 1
            assert epoch == self.counts[ledger]
            for known in self.known[by]:
                known.add((ledger, epoch))

    def join_note(self, actor: int, note: Snapshot, known: Known) -> None:
        self.order.join(actor, note)
        self.learn(actor, known)

    def check(self) -> None:
        for actor, other in itertools.product(self.known, repeat=2):
            for epoch in range(1, self.counts[other] + 1):
                level = next((at for at in LEVELS if (other, epoch) in self.known[actor][at]), None)
                words = {0: Proof.ORDERED, 1: Proof.POLLED, 2: Proof.UNKNOWN, None: Proof.NONE}
                assert self.order.proof(actor, other, epoch) is words[level], (actor, other, epoch)
        for event, (covered, _, _) in self.events.items():
            snapshot = self.order.current(event)
            assert snapshot is not None
            for other in self.known:
                for epoch in range(1, self.counts[other] + 1):
                    assert snapshot.covers(other, epoch) == ((other, epoch) in covered[0])
        floor = self.order.floor()
        threads = [self.by(thread) for thread in self.threads if thread in self.order._threads]
        for other, count in self.counts.items():
            least = min((sum((other, e) in self.known[t][0] for e in range(1, count + 1)) for t in threads), default=0)
            assert (floor[other] if other < len(floor) else 0) == least
        assert self.order._depth == self.deepest + 1
        assert self.order.actors == len(self.order.clocks) >= len(self.known)


@pytest.mark.parametrize("seed", range(90))
def test_everybody_knows_what_the_model_says(seed: int) -> None:
    """Work, records, waits, queries, hand-overs, streams of every kind; half of the time with losses."""
    rng = random.Random(seed)
    machine = Machine(rng, kinds=seed % 3 == 0)
    for _ in range(rng.randint(5, 50)):
        machine.step()
        if seed % 2 and rng.random() < 0.06:
            machine.lost_at = machine.seq + rng.choice((0, 1, 2))
            machine.order.lose(machine.lost_at)
            assert machine.order.lost_at == machine.order.doubt_at == machine.lost_at
            machine.seq += 1
        machine.check()


@pytest.mark.parametrize("seed", range(40))
def test_the_oldest_events_are_forgotten(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two are kept; any whose number lies among the forgotten ones may be one of them, and may cover all of theirs."""
    monkeypatch.setattr(module, "MAX_EVENTS", 2)
    rng = random.Random(seed)
    machine = Machine(rng, kinds=False, events=5)
    for _ in range(rng.randint(10, 40)):
        machine.step()
        if rng.random() < 0.2:
            machine.order.prune()
            while len(machine.events) > 2:
                event = next(iter(machine.events))
                covered, on, _ = machine.events.pop(event)
                machine.gone.add(event)
                weakest = 2 if machine.order._depth == 3 else machine.order._depth - 1
                machine.stray |= covered[weakest] | {(on, max(e for a, e in covered[0] if a == on))}
        for event in range(7):
            if EventId(event) not in machine.events:
                inside = bool(machine.gone) and min(machine.gone) <= event <= max(machine.gone)
                assert (machine.order.current(EventId(event)) is not None) == inside
        machine.check()


def test_who_may_have_followed_others_is_in_doubt() -> None:
    """All there is, or some; on the weakest level alone."""
    for others, proofs in ((None, [Proof.UNKNOWN] * 2), ((1,), [Proof.UNKNOWN, Proof.NONE]), ((), [Proof.NONE] * 2)):
        order = Order()
        first, *rest = (order.stream(StreamId(n)) for n in range(3))
        for actor in rest:
            order.advance(actor)
        order.suspect(first, others)
        assert [order.proof(first, actor, 1) for actor in rest] == proofs
        assert [order.proof(actor, rest[0], 1) for actor in rest] == [Proof.ORDERED, Proof.NONE]
        assert [order.proof(first, actor, 2) for actor in rest] == [Proof.NONE] * 2


def test_each_has_an_actor_of_its_own() -> None:
    order = Order()
    stream = StreamId(1)

    def actors() -> list[int]:
        return [
            order.stream(stream),
            order.thread(ThreadId(1)),
            *(order.node(graph, index) for graph in (1, 2) for index in (0, 1)),
            *(order.io(slot) for slot in (0, 1)),
            *(order.ledger(ThreadId(thread)) for thread in (0, 1)),
            *(order.early(stream, slot, ThreadId(1)) for slot in (0, 1)),
            order.early(StreamId(2), 0, ThreadId(1)),
        ]

    found = actors()
    assert len(set(found)) == len(found)
    assert actors() == found
    assert order.actors == len(found) + 1  # the stream of the last


def test_there_is_a_most_of_actors(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clocks grow with the square of their number; one that was seen goes on."""
    monkeypatch.setattr(module, "MAX_ACTORS", 3)
    order = Order()
    known = order.stream(StreamId(0)), order.thread(ThreadId(0)), order.node(0, 0)

    with pytest.raises(TraceError, match="more than 3 streams, host threads and graph entries, all together"):
        order.stream(StreamId(1))
    assert (order.stream(StreamId(0)), order.thread(ThreadId(0)), order.node(0, 0)) == known
    assert order.actors == 3


def test_a_record_keeps_what_it_replaced_and_no_more() -> None:
    """And a mark for whoever made it; an anonymous one has a count of its own as well."""
    order = Order()
    assert order.lost_at == order.doubt_at == -1
    order.doubt(3)
    assert (order.lost_at, order.doubt_at) == (-1, 3)
    assert order.floor() == []
    stream = order.stream(StreamId(1))
    assert order.floor() == [0]  # no thread is there that could know anything
    for seq in (4, 5, 6):
        order.record(EventId(1), stream, seq)
    newest = order.current(EventId(1))
    assert newest is not None
    assert newest.former is not None
    assert (newest.seq, newest.former.seq, newest.former.former) == (6, 5, None)
    assert (newest.issued_ns, newest.mark) == (0, None)
    anonymous = order.snapshot(stream, 7)
    assert (anonymous.epoch, anonymous.seq, anonymous.issued_ns, anonymous.mark) == (4, 7, 0, None)
    assert order.notes(DOUBTFUL_SEQ)[0].seq == DOUBTFUL_SEQ
    assert anonymous.doubted().seq == DOUBTFUL_SEQ
    assert (anonymous.doubted().actor, anonymous.doubted().epoch) == (stream, 4)


def test_snapshots_share_a_clock_until_it_changes() -> None:
    """So that an event per layer costs no copy; joining one after the other changes one number each."""
    order = Order()
    thread, stream, other = order.thread(ThreadId(0)), order.stream(StreamId(1)), order.stream(StreamId(2))
    shared = [order.snapshot(stream, seq).levels for seq in range(3)]
    assert shared[0] is shared[1] is shared[2]
    order.advance(stream)
    assert order.snapshot(stream, 3).levels is shared[0]
    order.issue(StreamId(1), ThreadId(0))
    assert order.snapshot(stream, 4).levels is shared[0]  # the thread knew nothing new
    order.join(stream, order.snapshot(other, 5))
    assert order.snapshot(stream, 6).levels is not shared[0]
    before = order._versions[thread]
    for note in (order.note(stream, 7), order.note(stream, 7)):
        order.join(thread, note)
    assert order._versions[thread] == before + 1
