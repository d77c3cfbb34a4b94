"""The page shadow on its own, with clocks made up: conflicts, groups, what is kept, against models of single pages."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import pytest

from hicache_obs.analyzer import shadow
from hicache_obs.analyzer.shadow import Conflict, Group, Label, Operation, Overlap, Shadow
from hicache_obs.records import Access, Kernel, Mode, OpId, Space, StreamId, ThreadId

MAIN = ThreadId(0)
LABEL = Label("kernel", 0, StreamId(0), 0, MAIN, Kernel)
ACTORS = 3
Page = tuple[Space, int, int]


def kernel(op: int, layers: tuple[int, int], accesses: tuple[Access, ...]) -> Kernel:
    return Kernel(OpId(op), MAIN, 10 * op, StreamId(0), 0, 0, 0, layers, accesses, np.array([op]))


def access(mode: Mode, *pages: int, space: Space = Space.DEVICE, pool: int = 0) -> Access:
    return Access(space, mode, np.array(pages, np.int64), pool)


def pages_of(accesses: tuple[Access, ...], mode: Mode | None = None) -> set[Page]:
    return {(a.space, a.pool, p) for a in accesses if mode in (None, a.mode) for p in a.ids.tolist()}


@dataclass
class Machine:
    """A shadow, clocks, and everything that was entered."""

    rng: random.Random
    shadow: Shadow = field(default_factory=Shadow)
    clocks: list[list[int]] = field(default_factory=lambda: [[0] * ACTORS for _ in range(ACTORS)])
    ops: list[Operation] = field(default_factory=list)
    marks: list[dict[Page, int]] = field(default_factory=lambda: [defaultdict(int), defaultdict(int)])
    """By page, the number of the last group that touched it; and that wrote it."""
    numbers: int = 0
    exact: bool = True
    """Whether what is known of pages has all its numbers."""

    def learn(self) -> None:
        """An actor follows some of what another did."""
        actor, other = self.rng.sample(range(ACTORS), 2)
        clock, done = self.clocks[actor], self.clocks[other][other]
        clock[other] = done if self.rng.random() < 0.6 else self.rng.randint(clock[other], done)

    def enter(self, actor: int, layers: tuple[int, int], accesses: tuple[Access, ...], *, extend: bool) -> None:
        clock = self.clocks[actor]
        op, seq = len(self.ops), 2 * len(self.ops)
        newest = self.shadow.newest.get(actor)
        joins = newest is not None and newest.top <= layers[0] and same(newest.accesses, accesses)
        expected = [earlier for earlier in self.ops if self.races(earlier, actor, layers, accesses)]
        record = kernel(op, layers, accesses)
        label = Label("kernel", 0, StreamId(0), op, MAIN, Kernel)
        found: list[Conflict] = []
        operation = None
        if extend and joins and newest is not None and self.ops and self.ops[-1].group is newest:
            operation = extended(self.shadow, newest, clock, record, seq)
        if operation is None:
            sums = defaultdict[str, list[int]](lambda: [0] * 12)
            operation, found, owned = self.shadow.enter(actor, clock, record, OpId(op), seq, label, sums)
            assert operation.label is operation.group.label is label
            assert (owned == -1) == joins
        assert [conflict.earlier for conflict in found] == expected
        for conflict in found:
            cells = {(o.space, o.pool, p) for o in conflict.overlaps for p in o.pages.tolist()}
            assert cells == common(accesses, conflict.earlier.group.accesses)
        group = operation.group
        assert (operation.epoch, operation.seq, operation.layers, operation.issued_ns) == (
            clock[actor] + 1,
            seq,
            layers,
            10 * op,
        )
        assert (group.last, group.top, group.epochs[-1], group.members[-1]) == (
            operation.epoch,
            layers[1],
            operation.epoch,
            operation,
        )
        assert operation.rows is record.rows
        if not joins:
            self.numbers += 1
            self.opened(group, accesses)
        assert group.number == self.numbers or joins
        self.ops.append(operation)
        clock[actor] += 1

    def opened(self, group: Group, accesses: tuple[Access, ...]) -> None:
        """What a new group notes of those before it is right, and as much as can be said."""
        rivals = {
            earlier.group.number
            for earlier in self.ops
            if earlier.group.actor != group.actor and earlier.group.last > self.clocks[group.actor][earlier.group.actor]
        }
        assert group.number == self.numbers
        assert group.safe == min(rivals, default=group.number) - 1
        touched, wrote = self.marks
        clear = all(touched[page] <= group.safe for page in pages_of(accesses, Mode.WRITE)) and all(
            wrote[page] <= group.safe for page in pages_of(accesses, Mode.READ)
        )
        if not self.exact:
            return
        assert group.seen == (group.number - 1 if clear or group.safe == group.number - 1 else group.safe)
        for page in pages_of(accesses):
            touched[page] = group.number
        for page in pages_of(accesses, Mode.WRITE):
            wrote[page] = group.number

    def races(self, earlier: Operation, actor: int, layers: tuple[int, int], accesses: tuple[Access, ...]) -> bool:
        on = earlier.group.actor
        if on == actor or earlier.epoch <= self.clocks[actor][on]:
            return False
        apart = earlier.layers[0] >= layers[1] or layers[0] >= earlier.layers[1]
        return not apart and bool(common(accesses, earlier.group.accesses))


def extended(machine: Shadow, group: Group, clock: list[int], record: Kernel, seq: int) -> Operation | None:
    """Add an operation to the newest group of whoever was last, as runs do; ``None`` where they must not."""
    if not machine.admits(group, clock, [record.layers], group.actor, [clock[group.actor]]):
        return None
    epoch = clock[group.actor] + 1
    operation = Operation(record.op, epoch, seq, record.layers, record.host_ns, group.label, group)
    operation.rows = record.rows
    machine.extend(group, [operation], range(epoch, epoch + 1))
    return operation


def same(a: tuple[Access, ...], b: tuple[Access, ...]) -> bool:
    return [(x.space, x.mode, x.pool, id(x.ids)) for x in a] == [(x.space, x.mode, x.pool, id(x.ids)) for x in b]


def common(a: tuple[Access, ...], b: tuple[Access, ...]) -> set[Page]:
    """Pages on which two conflict."""
    return (pages_of(a, Mode.WRITE) & pages_of(b)) | (pages_of(a) & pages_of(b, Mode.WRITE))


def random_accesses(rng: random.Random) -> tuple[Access, ...]:
    found = []
    for _ in range(rng.randint(1, 3)):
        pages = rng.sample(range(8), rng.choice((0, 1, 1, 2, 3)))
        space, pool = rng.choice((Space.DEVICE, Space.DEVICE, Space.HOST)), rng.choice((0, 0, 1))
        found.append(access(rng.choice(tuple(Mode)), *pages, space=space, pool=pool))
    return tuple(found)


@pytest.mark.parametrize("seed", range(60))
def test_conflicts_are_those_of_a_model(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups over layers, with and without the short way; most of what others did is known, or hardly any."""
    monkeypatch.setattr(shadow, "MAX_NUMBER", 6 if seed % 4 == 0 else 1 << 30)
    rng = random.Random(seed)
    machine = Machine(rng, exact=seed % 4 > 0)
    known = rng.choice((0.1, 0.5, 0.8))
    kept = [random_accesses(rng) for _ in range(3)]
    while len(machine.ops) < 25:
        if rng.random() < known:
            machine.learn()
            continue
        if rng.random() < 0.2:
            machine.shadow.prune([0] * ACTORS)  # takes numbers down, and forgets nothing
        actor = rng.randrange(ACTORS)
        accesses = rng.choice(kept) if rng.random() < 0.6 else random_accesses(rng)
        if rng.random() < 0.3:  # other objects that say the same
            accesses = tuple(Access(a.space, a.mode, a.ids, a.pool) for a in accesses)
        low = rng.randrange(3)
        for layer in range(low, rng.randint(low, 4) + 1):
            if rng.random() < 0.2:
                machine.learn()
            machine.enter(actor, (layer, layer + rng.choice((1, 1, 1, 2))), accesses, extend=rng.random() < 0.7)
    groups = list({operation.group.number: operation.group for operation in machine.ops}.values())
    assert machine.shadow.retained == len(groups)
    for earlier, group in itertools.product(groups, repeat=2):
        if earlier.number < group.number:
            overlaps = machine.shadow.shared(group, earlier)
            cells = {(o.space, o.pool, p) for o in overlaps for p in o.pages.tolist()}
            assert cells == common(group.accesses, earlier.accesses)
        for _ in range(2):  # what was found is kept
            assert machine.shadow.was_last(group, earlier) == was_last(groups, group, earlier)


def was_last(groups: list[Group], group: Group, earlier: Group) -> bool:
    """Whether nobody in between wrote, or for a write touched, some page that the two conflict on."""
    between = [other.accesses for other in groups if earlier.number < other.number < group.number]
    wrote = set().union(*(pages_of(accesses, Mode.WRITE) for accesses in between))
    touched = set().union(*(pages_of(accesses) for accesses in between))
    written = (pages_of(group.accesses, Mode.WRITE) & pages_of(earlier.accesses)) - touched
    read = (pages_of(group.accesses, Mode.READ) & pages_of(earlier.accesses, Mode.WRITE)) - wrote
    return earlier.number < group.number and bool(written | read)


@pytest.mark.parametrize("seed", range(30))
def test_members_that_overlap(seed: int) -> None:
    """Of a group whose layers ascend: one after the other, with gaps, or several at once."""
    rng = random.Random(seed)
    group = Group(1, 0, LABEL, (), [], [], {}, {})
    at, epoch = rng.randrange(4), 0
    for _ in range(rng.randint(1, 8)):
        epoch += rng.choice((1, 1, 2))
        layers = (at, at + rng.choice((1, 1, 1, 3) if seed % 2 else (1,)))
        at = layers[1] + (rng.choice((0, 0, 2)) if seed % 3 else 0)
        group.members.append(Operation(OpId(epoch), epoch, epoch, layers, 0, LABEL, group))
        group.epochs.append(epoch)
    for low in range(at + 2):
        for high in range(low + 1, at + 3):
            for after in range(epoch + 2):
                expected = [m for m in group.members if m.epoch > after and m.layers[0] < high and low < m.layers[1]]
                assert group.overlapping((low, high), after) == expected, (low, high, after)


def test_a_short_way_is_taken_only_where_nothing_can_conflict() -> None:
    """Nobody else has come, layers ascend, and no layer of a rival's that begins below them is unordered."""
    both = (access(Mode.WRITE, 5),)
    for last, known, layers, taken in (
        (0, 0, (3, 4), True),  # nobody has worked before
        (1, 0, (3, 4), False),  # a rival's only layer, 0 to 3, is not known
        (1, 1, (3, 4), True),
        (1, 0, (1, 2), False),
    ):
        machine = Shadow()
        clocks = [[0, known], [0, 0]]
        if last:
            machine.enter(1, clocks[1], kernel(0, (0, 3), both), OpId(0), 0, LABEL, defaultdict(lambda: [0] * 12))
        start = 0 if layers[0] else 1
        record = kernel(1, (start, start + 1), both)
        machine.enter(0, clocks[0], record, OpId(1), 1, LABEL, defaultdict(lambda: [0] * 12))
        clocks[0][0] = 1
        assert (extended(machine, machine.newest[0], clocks[0], kernel(2, layers, both), 2) is not None) == taken
    assert extended(machine, machine.newest[0], clocks[0], kernel(2, (0, 1), both), 2) is None  # not above the last
    rival = Shadow()
    rival.enter(1, [0, 0], kernel(0, (4, 5), both), OpId(0), 0, LABEL, defaultdict(lambda: [0] * 12))
    rival.enter(0, [0, 0], kernel(1, (0, 1), both), OpId(1), 1, LABEL, defaultdict(lambda: [0] * 12))
    for layers, taken in (((1, 4), True), ((4, 5), False)):  # up to where the rival begins
        assert (extended(rival, rival.newest[0], [1, 0], kernel(2, layers, both), 2) is not None) == taken


def filled(groups: int, pages: int = 1, actor: int = 0, into: Shadow | None = None) -> Shadow:
    """So many groups of one operation each, of so many pages."""
    machine = into or Shadow()
    for number in range(groups):
        clock = [0] * ACTORS
        clock[actor] = number
        accesses = (access(Mode.READ, *range(pages)),)
        machine.enter(actor, clock, kernel(0, (0, 1), accesses), OpId(0), 0, LABEL, defaultdict(lambda: [0] * 12))
    return machine


@pytest.mark.parametrize(
    ("groups", "known", "retained", "forgotten"),
    [(3, 0, 3, 0), (4, 0, 4, 0), (5, 0, 4, 1), (9, 0, 4, 5), (9, 2, 4, 3), (9, 5, 4, 0), (9, 6, 3, 0), (9, 9, 1, 0)],
)
def test_history_is_kept_until_it_is_known_or_too_long(
    groups: int, known: int, retained: int, forgotten: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four groups of each actor, less those that every thread knows; the newest always."""
    monkeypatch.setattr(shadow, "MAX_GROUPS", 4)
    machine = filled(groups)
    filled(3, actor=1, into=machine)
    machine.prune([known])  # of an actor that came later nobody knows anything
    assert (machine.retained, machine.forgotten) == (retained + 3, forgotten)
    assert [group.last for group in machine._history[0]] == list(range(groups - retained + 1, groups + 1))
    machine.prune([known])
    assert (machine.retained, machine.forgotten) == (retained + 3, forgotten)


@pytest.mark.parametrize(
    ("groups", "pages", "oldest"),
    [(0, 1, 0), (4, 1, 1), (5, 1, 2), (7, 1, 4), (2, 5, 1), (3, 5, 2), (4, 3, 2), (3, 20, 3), (1, 20, 1)],
)
def test_measured_times_are_compared_with_so_many_groups_and_pages(
    groups: int, pages: int, oldest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four groups, and ten page ids; the newest group whatever its size."""
    monkeypatch.setattr(shadow, "MAX_GROUPS", 4)
    monkeypatch.setattr(shadow, "MAX_KEPT_IDS", 10)
    machine = filled(groups, pages)
    kept = list(machine._kept)
    for group in kept:
        group.shared[0], group.latest[0] = (), False
    for _ in range(2):
        machine.prune([0])
        assert machine.oldest == oldest
        assert machine._kept_ids == sum(len(a.ids) for group in machine._kept for a in group.accesses)
    for group in kept:
        assert bool(group.shared) == bool(group.latest) == (group.number >= oldest)


@pytest.mark.parametrize(
    ("kept_ids", "steps"),
    [
        (100, [(0, []), (2, []), (4, [])]),  # measured times are compared with all of them
        (2, [(0, []), (2, [1, 2]), (4, [1, 2])]),  # with 3 and 4: what they are not, parts when it leaves history
        (1, [(0, []), (1, [1]), (3, [1, 2, 3])]),
    ],
)
def test_a_group_parts_from_its_members_when_nothing_needs_it(
    kept_ids: int, steps: list[tuple[int, list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither history nor measured times, whichever comes last: then it is freed without the collector of cycles."""
    monkeypatch.setattr(shadow, "MAX_KEPT_IDS", kept_ids)
    machine = filled(4)
    groups = list(machine._kept)
    for known, parted in steps:
        machine.prune([known])
        assert [group.number for group in groups if not group.members] == parted
    monkeypatch.setattr(shadow, "MAX_KEPT_IDS", 0)
    machine.prune([4])
    assert [group.number for group in groups if not group.members] == [1, 2, 3]  # the newest may still grow


def test_a_group_that_was_dropped_can_still_be_the_rival_of_the_last_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every thread knows it to be complete; one that comes later does not, and it works on the same stream."""
    monkeypatch.setattr(shadow, "MAX_KEPT_IDS", 0)
    machine = Shadow()
    for number in range(2):
        record = kernel(number, (0, 1), (access(Mode.WRITE, number),))
        machine.enter(0, [number, 0], record, OpId(number), number, LABEL, defaultdict(lambda: [0] * 12))
    for number in (2, 3):
        record = kernel(number, (0, 1), (access(Mode.READ, 0, number),))
        _, conflicts, _ = machine.enter(
            1, [0, number], record, OpId(number), number, LABEL, defaultdict(lambda: [0] * 12)
        )
        assert [conflict.earlier.op for conflict in conflicts] == [0]
        machine.prune([2, 0])


def test_numbers_are_taken_down_when_they_get_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """To half of what fits, once there are more."""
    monkeypatch.setattr(shadow, "MAX_NUMBER", 10)
    for groups, base in ((10, 0), (11, 6), (15, 10)):
        machine = filled(groups)
        machine.prune([0])
        table = machine.table(access(Mode.READ))
        assert (machine.base, table.touched.item(0)) == (base, groups - base)
        assert machine.call(0) == groups - base + 1
        machine.prune([0])
        assert machine.base == base or groups == 10
    filled(6, into=machine)  # of 22 numbers, 10 were taken off before
    machine.prune([0])
    assert (machine.base, table.touched.item(0)) == (17, 5)


@pytest.mark.parametrize("seed", range(20))
def test_frees_and_moves_of_a_page_since_a_position(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as calls are kept: twice as many as the limit, then only the newest half of these."""
    monkeypatch.setattr(shadow, "MAX_CALLS", 3)
    monkeypatch.setattr(shadow, "MAX_NUMBER", 20 if seed % 2 else 1 << 30)
    rng = random.Random(seed)
    machine, kept = Shadow(), list[int]()
    freed: dict[int, int] = {}
    moved: dict[int, int] = {}
    machine.table(access(Mode.READ)).place(np.arange(4))
    for seq in range(40):
        page, kind = rng.randrange(4), rng.random()
        if kind < 0.5:
            machine.note_free(access(Mode.WRITE, page), seq)
            freed[page] = seq
        elif kind < 0.8:
            machine.call(seq)
        else:
            machine.note_move(access(Mode.READ, page), seq)
            moved[page] = seq
        if kind < 0.8:
            kept = [*kept, seq] if len(kept) < 6 else [*kept[-2:], seq]
        if rng.random() < 0.1:
            machine.prune([])
        for other in range(4):
            overlap = Overlap(Space.DEVICE, 0, Mode.WRITE, Mode.WRITE, np.array([other, 3]))
            for since in {max(0, seq - back) for back in (12, 2, 1, 0)}:
                late = [freed[p] for p in (other, 3) if p in freed and freed[p] > since and freed[p] in kept]
                assert machine.freed_since(overlap, since) == bool(late), (seq, other, since)
                assert machine.moved_since(overlap, since) == any(moved.get(p, 0) > since for p in (other, 3))
