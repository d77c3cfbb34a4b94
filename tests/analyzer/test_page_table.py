"""Page tables against a model that keeps every page on its own: one id, a few, and as many as take the quick ways."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest

from hicache_obs.analyzer import page_table
from hicache_obs.analyzer.page_table import FREED_FROM, FRESH_FROM, OWN, SHARED, WROTE, Own, PageTable, Room
from hicache_obs.errors import TraceError
from hicache_obs.records import MAX_IDS, PageIds

COUNTS = (1, 2, 7, 8, 9, 10, 1023, 1024, 1025, 1500)
"""Around the numbers of ids from which on another way is taken."""
STATES = OWN * len(Own)


def _ids(rng: random.Random, count: int) -> PageIds:
    """Consecutive ids, or any, ascending or not; of the type that records have, seldom of a smaller one."""
    if rng.random() < 0.4:
        first = rng.randrange(3000)
        ids = list(range(first, first + count))
        if rng.random() < 0.3:
            ids[0], ids[-1] = ids[-1], ids[0]
        elif count > 3 and rng.random() < 0.3:
            ids[1] = 4800  # begins and ends like a run
    else:
        ids = rng.sample(range(rng.choice((1600, 5000))), count)
    return np.array(ids, np.int32 if rng.random() < 0.2 else np.int64)


@dataclass
class Model:
    """Each page's numbers and state."""

    marks: dict[str, dict[int, int]] = field(
        default_factory=lambda: {name: defaultdict(int) for name in ("touched", "wrote", "given", "freed", "moved")}
    )
    state: dict[int, int] = field(default_factory=lambda: defaultdict(int))

    def seen(self, pages: list[int], worst: int) -> tuple[int, bool, int]:
        states = [self.state[page] for page in pages]
        owned, wrote = sum(s >= OWN for s in states), sum(s & WROTE for s in states)
        return owned, any(s >= worst for s in states), wrote


def _step(rng: random.Random, table: PageTable, model: Model, number: int) -> None:
    """One random call to both; what they answer is the same."""
    ids = _ids(rng, rng.choice(COUNTS))
    pages = ids.tolist()
    kind = rng.choice(("hand over", "hand over", "write", "look", "mark", "move", "rebase"))
    if kind == "hand over":
        alike = rng.randrange(STATES)
        mixed = rng.choice((0, 0.01, 0.5))
        rule = bytes(rng.randrange(STATES) if rng.random() < mixed else alike for _ in range(256))
        given = rng.random() < 0.5
        shared = [page for page in pages if model.state[page] & SHARED]
        assert table.hand_over(ids, number, rule, given=given) == shared
        for page in pages:
            model.marks["given" if given else "freed"][page] = number
            model.state[page] = rule[model.state[page]]
    elif kind == "write":
        owned, free, wrote = model.seen(pages, FREED_FROM)
        place, *found = table.note_write(ids)
        assert found == [owned, free, wrote < len(pages)]
        assert np.arange(len(table.state))[place].tolist() == pages
        for page in pages:
            state = model.state[page]
            model.state[page] = (OWN * Own.HELD + state % OWN if state // OWN == Own.FRESH else state) | WROTE
    elif kind == "look":
        place, *found = table.look(ids)
        assert tuple(found) == model.seen(pages, FRESH_FROM)
        assert np.arange(len(table.state))[place].tolist() == pages
    elif kind == "mark":
        place = table.place(ids)  # may replace the arrays
        table.touched[place] = number
        for page in pages:
            model.marks["touched"][page] = number
        if rng.random() < 0.5:
            table.wrote[place] = number
            for page in pages:
                model.marks["wrote"][page] = number
    elif kind == "move":
        table.note_move(ids, number)
        for page in pages:
            model.marks["moved"][page] = number
    else:
        by = rng.randint(1, 3)
        table.rebase(by)
        for name, marks in model.marks.items():
            if name != "moved":
                least = 1 if name in ("touched", "wrote") else 0
                for page, mark in marks.items():
                    marks[page] = max(mark - by, least) if mark else 0


@pytest.mark.parametrize("seed", range(25))
def test_agrees_with_a_model(seed: int) -> None:
    """Every answer, and at the end all that is kept of every page."""
    rng = random.Random(seed)
    table, model = PageTable(Room()), Model()
    for number in range(1, 31):
        _step(rng, table, model, number)
    size = len(table.state)
    known = {name: getattr(table, name).tolist() for name in model.marks}
    for name, marks in model.marks.items():
        assert known[name] == ([marks[page] for page in range(size)] if known[name] else []), name
        assert not known[name] or len(known[name]) == size
    assert table.state.tolist() == [model.state[page] for page in range(size)]
    assert len(table.scratch) == size
    assert not table.scratch.any()


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("type_", [np.int64, np.int32])
def test_ids_that_no_table_has(count: int, type_: type) -> None:
    """The least and the largest id are looked at, wherever they stand."""
    calls: tuple[Callable[[PageTable, PageIds], object], ...] = (
        lambda table, ids: table.place(ids),
        lambda table, ids: table.look(ids),
        lambda table, ids: table.note_write(ids),
        lambda table, ids: table.hand_over(ids, 1, bytes(256), given=True),
        lambda table, ids: table.note_move(ids, 1),
    )
    for bad in (-1, MAX_IDS):
        for place in {0, count // 2, count - 1}:
            ids = np.array(random.Random(count).sample(range(2000), count), type_)
            ids[place] = bad
            for call in calls:
                table = PageTable(Room())
                table.place(np.arange(2000))
                with pytest.raises(TraceError, match="page or buffer ids"):
                    call(table, ids)


@pytest.mark.parametrize("count", [2, 8, 9, 1024])
def test_a_table_is_as_long_as_its_largest_id(count: int) -> None:
    """Wherever that stands; a quarter more if it was there already, and 1,024 at least."""
    for place in (0, count - 1):
        for call in ("place", "hand over", "look", "write"):
            table = PageTable(Room())
            assert len(table.state) == len(table.touched) == 0
            for largest, size in ((1023, 1024), (1024, 1280), (1279, 1280), (1280, 1600), (5000, 5001)):
                ids = np.arange(count)
                ids[place] = largest
                if call == "place":
                    table.place(ids)
                elif call == "look":
                    table.look(ids)
                elif call == "write":
                    table.note_write(ids)
                else:
                    table.hand_over(ids, 1, bytes(256), given=False)
                assert len(table.state) == len(table.touched) == size, (call, largest)


def test_room_is_counted_to_the_byte(monkeypatch: pytest.MonkeyPatch) -> None:
    """A table gets no more than it needs where there is no room for more, and nothing where there is not that."""
    monkeypatch.setattr(page_table, "MAX_TABLE_BYTES", 18 * 1024)
    room = Room()
    assert room.grow(0, 500, 18) == 1024
    with pytest.raises(TraceError, match="id 1024: tables up to it"):
        room.grow(1024, 1025, 18)

    monkeypatch.setattr(page_table, "MAX_TABLE_BYTES", 18 * 1024 - 1)
    room = Room()
    assert room.grow(0, 500, 18) == 500
    assert room.grow(500, 1023, 18) == 1023  # 17 bytes are left
    with pytest.raises(TraceError, match="id 1023: tables up to it"):
        room.grow(1023, 1024, 18)
    assert room.grow(0, 17, 1) == 17


def test_moves_take_room_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight bytes a page more, from the first move on, and for pages that come later."""
    for spare, fits in ((8 * 1024, True), (8 * 1024 - 1, False)):
        monkeypatch.setattr(page_table, "MAX_TABLE_BYTES", 18 * 1024 + spare)
        table = PageTable(Room())
        table.place(np.arange(5))
        if fits:
            table.note_move(np.arange(5), 3)
            assert len(table.moved) == 1024
        else:
            with pytest.raises(TraceError, match="would take more than"):
                table.note_move(np.arange(5), 3)
    for spare, size in ((0, 1280), (-1, 1025)):
        monkeypatch.setattr(page_table, "MAX_TABLE_BYTES", 26 * 1280 + spare)
        table = PageTable(Room())
        table.note_move(np.arange(5), 3)
        table.place(np.array([1024]))
        assert len(table.moved) == len(table.state) == size


def test_a_place_is_kept_for_the_same_array() -> None:
    """Layers of one transfer look the same pages up again and again."""
    table = PageTable(Room())
    ids, same = np.arange(5, 1505), np.arange(5, 1505)
    assert table.place(ids) == slice(5, 1505)
    assert table.place(ids) is table.place(ids)
    assert table.place(same) == slice(5, 1505)
    assert table.place(same[::-1].copy()) is not table.place(same)
    assert isinstance(table.place(np.arange(1023)), np.ndarray)  # too few to look whether they are consecutive
    assert table.place(np.arange(1024)) == slice(0, 1024)
