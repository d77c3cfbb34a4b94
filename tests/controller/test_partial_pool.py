"""Which prefixes can be used, what goes first, and what becomes of a place when its page changes hands."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass

import numpy as np
import pytest

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.partial_pool import PartialPool, PartialPools
from hicache_obs.controller.translation import Translation
from hicache_obs.errors import OutOfPages
from hicache_obs.records import Mode, page_ids
from hicache_obs.streams import open_device

PAGES, SIZE = 16, 4


@dataclass
class Row:
    """As much of a request as a pool looks at."""

    slot: int = 0
    page_count: int = 0
    last_stream: int = 7
    last_round: int = 3


@pytest.fixture
def make() -> Callable[..., PartialPool]:
    with closing(open_device("virtual", schedule="eager")) as device:

        def pool(window: int = 5, *, slabs: PageAllocator | None = None, number: int = 0) -> PartialPool:
            slabs = slabs or PageAllocator(6, name="window")
            table = Translation(device, PAGES, slabs, number=number)
            return PartialPool("window", table, window=window, page_size=SIZE, host_pages=PAGES)

        yield pool


@pytest.mark.parametrize("window", [0, 2, 4, 5, 8, 9])
def test_usable_lengths(make, window):
    """Against the definition: every page with one of the tokens that the next one needs is there."""
    pool = make(window)
    reach = window or 2
    for bits in itertools.product([False, True], repeat=5):
        here = np.array(bits)
        expected = []
        for length in range(6):
            needed = range(max(0, length * SIZE - reach + 1), length * SIZE)
            expected.append(all(here[token // SIZE] for token in needed))
        assert pool.usable(here).tolist() == expected


def filled(pool: PartialPool, pages: list[int], tick: int, slot: int) -> Row:
    """A request that has used these pages, in this order, and is over."""
    row, ids = Row(slot), page_ids(pages)
    pool.begin(row, 0)
    pool.fill(ids, ids, ids)
    pool.joined(row, 0, ids, tick)
    pool.end(row, ids, tick)
    return row


def test_the_least_recently_used_sequence_goes_first_from_its_front(make):
    pool = make()
    pools = PartialPools([pool], rows=2)
    filled(pool, [3, 1], 2, 0)
    filled(pool, [7, 5, 6], 1, 1)
    order = []
    for wanted in range(2, 7):
        before = set(pool.translation.resident().tolist())
        pools._free(pool.translation.slabs, wanted)
        order += sorted(before - set(pool.translation.resident().tolist()))
    assert order == [7, 5, 6, 3, 1]
    assert pools.tombstones == 5
    assert pool.translation.slabs.in_use == 0


@pytest.mark.parametrize("hold", ["user", "pin"])
def test_what_is_in_use_is_not_given_up(make, hold):
    pool = make()
    pools = PartialPools([pool], rows=1)
    filled(pool, [0, 1, 2], 1, 0)
    kept = page_ids([0, 2])
    (pool.hold if hold == "user" else pool.pin)(kept)
    assert pool.evictable().tolist() == [1]
    assert (pools.possible([4]), pools.possible([5])) == (True, False)
    pools.settle = lambda: pool.unpin(kept) if hold == "pin" else None
    pools._free(pool.translation.slabs, 5)
    assert pool.translation.resident().tolist() == ([0, 2] if hold == "user" else [2])


def test_states_have_a_share_of_the_arena(make):
    slabs = PageAllocator(10, name="arena")
    window, state = make(5, slabs=slabs), make(0, slabs=slabs, number=1)
    pools = PartialPools([window, state], rows=2)
    assert (pools.possible([4, 0]), pools.possible([5, 0])) == (True, False)
    row = Row()
    state.begin(row, 0)
    state.fill(page_ids([3]), page_ids([3]), page_ids([3]))
    state.joined(row, 0, page_ids([3]), 1)
    assert (pools.possible([4, 0]), pools.possible([5, 0])) == (True, False), "one of the six is taken from the share"


def test_what_is_restored_for_one_pool_is_not_taken_for_the_next(make):
    """The arena is full: the state gets the place of the tombstone that was used last, not that of its own window."""
    slabs = PageAllocator(2, name="arena")
    window, state = make(5, slabs=slabs), make(0, slabs=slabs, number=1)
    pools = PartialPools([window, state], rows=1)
    filled(window, [9], 1, 1)
    row = Row()
    pools.begin(row, SIZE)
    for pool in pools.pools:
        pool.host_has[0] = True
    pools.restored(row, page_ids([3]), page_ids([30]), page_ids([0]))
    assert (window.translation.here(page_ids([3, 9])).tolist(), state.translation.here(page_ids([3])).tolist()) == (
        [True, False],
        [True],
    )
    assert [pool.users(page_ids([3])).tolist() for pool in pools.pools] == [[0], [0]], "the request joins later"


def test_a_tombstone_gets_the_place_of_an_equal_page(make):
    pool = make()
    mine, old = page_ids([4, 5]), page_ids([8, 9])
    row = Row()
    pool.begin(row, 0)
    pool.fill(mine, page_ids([40, 50]), page_ids([41, 51]))
    pool.joined(row, 0, mine, 1)
    pool.fill(old[:1], page_ids([80]), page_ids([81]))
    places = pool.translation.places(mine).tolist()
    pool.swapped(row, np.arange(2), mine, old)
    assert pool.translation.here(np.concatenate((mine, old))).tolist() == [True, False, True, True]
    assert pool.translation.places(old).tolist()[1] == places[1]
    assert (pool.tenancies[old].tolist(), pool.sources[old].tolist()) == ([80, 50], [81, 51])
    assert pool.users(np.concatenate((mine, old))).tolist() == [0, 0, 1, 1]


def test_passed_pages_are_stamped_and_lose_their_place_unless_they_are_the_trees(make):
    pool = make(5)
    pools = PartialPools([pool], rows=1)
    row, pages = Row(), page_ids(range(5))
    pools.begin(row, 0)
    pools.grown(pages, pages)
    pools.joined(row, pages)
    row.page_count = 5
    places = pool.translation.places(pages)
    pools.advance(row, 14, 15, row=pages, tenancies=pages, shared=1)
    assert pool.low(row) == 2, "the last full page ends with token 11, and 8 to 11 are needed behind it"
    assert pool.translation.here(pages).tolist() == [True, False, True, True, True]
    assert pool.evictable().tolist() == [0]
    assert pools.passed == 1
    assert pool.translation.slabs.last_uses(places[:2], Mode.WRITE) == {7: 3}
    assert pool.translation.slabs.last_uses(places[:2], Mode.READ) == {7: 0}
    assert pool.translation.entries_used.last_uses(pages[2:], Mode.WRITE) == {7: 0}


def test_the_table_learns_new_places_only(make):
    pool = make()
    table = pool.translation
    table.assign(page_ids([2, 3]))
    table.release(page_ids([2]))
    assert table.changed.tolist() == [3]
    with pytest.raises(OutOfPages, match="window pool: 6 pages asked for, 5 of 6 are free"):
        table.assign(page_ids(range(4, 10)))
