"""The arrays that wrong contents are kept in, against sets by page and layer."""

from __future__ import annotations

import random
from collections import defaultdict

import numpy as np
import pytest

from hicache_obs.analyzer import spread
from hicache_obs.analyzer.spread import ALL, Owners, Reached, Spread, Wrong, _Cells, _Table, distinct, union
from hicache_obs.records import Access, Mode, Space

LAYERS = range(4)
POOLS = ((Space.DEVICE, 0), (Space.HOST, 0), (Space.DEVICE, 1))


def access(pages: list[int], pool: tuple[Space, int] = POOLS[0]) -> Access:
    return Access(pool[0], Mode.WRITE, np.array(pages, np.int64), pool[1])


@pytest.mark.parametrize("seed", range(20))
def test_last_owner_before_a_position(seed: int) -> None:
    """Of any pages at once, the least and largest ids and positions among them; of other pools nothing is said."""
    rng = random.Random(seed)
    ids = [0, 1, 2, 7, (1 << 26) - 2, (1 << 26) - 1]
    times = sorted(rng.sample([0, 1, 2, 3, 50, 51, 1 << 20, (1 << 36) - 1, 1 << 36], rng.randint(0, 9)))
    calls = [(seq, rng.choice(POOLS), rng.sample(ids, rng.randint(1, 3))) for seq in times]
    owners = Owners((seq, access(pages, pool)) for seq, pool, pages in calls)
    for pool in POOLS:
        for at in {*times, *(seq + 1 for seq in times), 0, 40}:
            pages = np.array(rng.sample(ids, len(ids)), np.int64)
            last = [
                max((seq for seq, where, them in calls if where == pool and page in them and seq < at), default=-1)
                for page in pages.tolist()
            ]
            assert owners.before(pool, pages, at).tolist() == last


@pytest.mark.parametrize("seed", range(10))
def test_pages_get_places(seed: int) -> None:
    """What is kept of a page stays its own when others come; pages without a place share one that is clean."""
    rng = random.Random(seed)
    cells, model = _Cells(), dict[int, tuple[int, int, int]]()
    assert (cells.marks.tolist(), cells.ever.tolist(), len(cells.ids)) == ([0], [0], 1)
    for value in range(1, 12):
        pages = np.array(rng.sample(range(30), rng.randint(1, 4)), np.int64)
        for page, place in zip(pages.tolist(), cells.reach(pages).tolist(), strict=True):
            known = cells.marks.item(place), cells.owners.item(place), cells.ever.item(place)
            assert known == model.get(page, (0, -1, 0))
            cells.marks[place], cells.owners[place], cells.ever[place] = value, value + 100, value + 200
            model[page] = value, value + 100, value + 200
        assert cells.ids[:-1].tolist() == sorted(model)
        every = np.arange(35)
        places = cells.places(every)
        assert cells.marks[places].tolist() == [model.get(page, (0, -1, 0))[0] for page in range(35)]
        assert cells.ever[places].tolist() == [model.get(page, (0, -1, 0))[2] for page in range(35)]
        other = cells.copy()
        other.marks[:], other.owners[:], other.ever[:] = 9, 9, 9
        other.reach(np.array([40]))
        assert cells.marks[places].tolist() == [model.get(page, (0, -1, 0))[0] for page in range(35)]


@pytest.mark.parametrize("seed", range(10))
def test_marks_stand_for_sources_by_layer(seed: int) -> None:
    """However they were joined and cut: equal contents have one mark, and clean ones mark 0."""
    rng = random.Random(seed)
    table = _Table()
    marks, model = np.zeros(5, np.int32), [defaultdict[int, set[int]](set) for _ in range(5)]

    def told(mark: int) -> dict[int, set[int]]:
        found = defaultdict[int, set[int]](set)
        for layers, bits in table.values[mark]:
            for layer in LAYERS:
                if layers >> layer & 1:
                    found[layer] |= {source for source in range(3) if bits >> source & 1}
        return found

    for _ in range(25):
        some = np.array(rng.sample(range(5), rng.randint(1, 5)))
        mask, source = rng.randrange(1, 16), rng.randrange(3)
        layers = [layer for layer in LAYERS if mask >> layer & 1]
        if rng.random() < 0.6:
            marks[some] = table.join(marks[some], mask, 1 << source)
            for place in some.tolist():
                for layer in layers:
                    model[place][layer].add(source)
        else:
            marks[some] = table.cut(marks[some], mask)
            for place in some.tolist():
                for layer in layers:
                    model[place].pop(layer, None)
        for place in range(5):
            assert told(marks.item(place)) == {layer: sources for layer, sources in model[place].items() if sources}
            assert (marks.item(place) == 0) == (not any(model[place].values()))
    again = np.zeros(2, np.int32)
    before = len(table.values)
    for _ in range(3):
        again = table.join(again, 0b1000, 0b100)
        again = table.cut(again, 0b1000)
    assert again.tolist() == [0, 0]
    assert len(table.values) <= before + 1  # what was there before has its number still


def test_different_numbers() -> None:
    assert distinct(np.zeros(0, np.int32)) == []
    assert distinct(np.array([4], np.int32)) == [4]
    assert distinct(np.array([4, 4, 4], np.int32)) == [4]
    assert distinct(np.array([4, 1, 4], np.int32)) == [1, 4]
    assert union([]) == 0
    assert union([1, 4, 1]) == 5


def test_so_many_are_reached_and_the_first_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known already takes no room."""
    monkeypatch.setattr(spread, "MAX_REACHED", 3)
    reached = Reached()
    assert (reached.cut, reached.vague) == (0, 0)
    for key, sources in ((5, 1), (6, 2), (7, 4), (6, 8), (5, 16)):
        reached.note(reached.requests, key, sources)
    assert (reached.requests, reached.cut) == ({5: 17, 6: 10, 7: 4}, 0)
    other = reached.copy()
    reached.note(reached.requests, 8, 32)
    assert (reached.requests, reached.cut) == ({6: 10, 7: 4, 8: 32}, 17)
    reached.note(reached.requests, 9, 64)
    assert reached.cut == 17 | 10
    assert (other.requests, other.cut) == ({5: 17, 6: 10, 7: 4}, 0)


class Model:
    """By page, whose contents it should hold, and what spoiled which layer; and what it ever held."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Access]] = []
        self.now: dict[tuple[Space, int, int], tuple[int, set[tuple[int, int]]]] = {}
        self.ever: dict[tuple[Space, int, int], set[int]] = defaultdict(set)

    def owner(self, page: tuple[Space, int, int], seq: int) -> int:
        return max(
            (at for at, a in self.calls if (a.space, a.pool) == page[:2] and page[2] in a.ids and at < seq), default=-1
        )

    def taint(self, page: tuple[Space, int, int], layers: set[int], source: int, seq: int) -> None:
        self.ever[page].add(source)
        owner = self.owner(page, seq)
        stamp, held = self.now.get(page, (owner, set()))
        if held and stamp > owner:
            return
        self.now[page] = owner, (held if stamp == owner else set()) | {(layer, source) for layer in layers}


@pytest.mark.parametrize("seed", range(25))
def test_what_is_held_now_and_was_ever(seed: int) -> None:
    """Across new owners, and across what is behind for good: that cleans what it ended, and no more."""
    rng = random.Random(seed)
    model, here = Model(), Spread()
    settled = 0
    assert here.empty
    for seq in range(10, 400, 10):
        pool = rng.choice(POOLS)
        pages = rng.sample(range(8), rng.randint(1, 3))
        kind = rng.random()
        if kind < 0.25:
            model.calls.append((seq, access(pages, pool)))
            here = here.fork(Owners(model.calls), {})
        elif kind < 0.85:
            source, mask = rng.randrange(3), rng.randrange(1, 16)
            at = rng.randint(max(settled, seq - 60), seq)
            here.taint(Wrong(pool, np.array(pages, np.int64), mask, 1 << source, at))
            for page in pages:
                model.taint((*pool, page), {layer for layer in LAYERS if mask >> layer & 1}, source, at)
        elif kind < 0.95:
            settled = seq
            here.reached.rows = {(1, 0): 1, (0, 1): 2, (2, 0): 4}
            here.settle(seq, {1})
            assert here.reached.rows == {(1, 0): 1}
            here = here.fork(Owners(()), {})
            for page, (stamp, held) in model.now.items():
                model.now[page] = -1, held if stamp == model.owner(page, seq) else set()
            model.calls = []
        else:
            here.taint(Wrong(pool, np.zeros(0, np.int64), ALL, 1, seq))
        now = {bit for _, held in model.now.values() for _, bit in held}
        assert here.sources() == sum(1 << source for source in now)
        for source in range(3):
            assert here.ever(1 << source) == sorted(page for page, bits in model.ever.items() if source in bits)
        for where in POOLS:
            some = rng.sample(range(9), 3)
            bits = set().union(*(model.ever[(*where, page)] for page in some))
            assert here.held(where, np.array(some)) == sum(1 << source for source in bits)
        for space, number, page in list(model.now):
            stamp, held = model.now[space, number, page]
            cells = here._cells[space, number]
            (place,) = cells.places(np.array([page]))
            value = here._table.values[cells.marks[place]]
            found = {
                (layer, s) for m, bits in value for layer in LAYERS for s in range(3) if m >> layer & bits >> s & 1
            }
            assert found == held
            assert cells.owners[place] == stamp or not held
    assert not here.empty
