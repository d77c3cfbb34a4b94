"""Pools whose layers need only the end of a context: sliding windows and states.

A cached page has its place in the full-attention pool for as long as it is cached. In a *partial* pool it has one only
while that is worth it, and what has none there is a *tombstone*: its tokens are known, but nothing can be computed
directly behind them.

=======  ==============================================================================================================
window   a layer attends to the last ``window`` tokens, itself included: a page needs its place until the context has
         gone so far past it
state    a layer has one recurrent state; the place of a page holds the state after the page's last token (of a page
         that is not full: after the newest one), so only the page before the next token is needed
=======  ==============================================================================================================

What is a tombstone on the device may still be in host memory: then only that part of the page is restored.

Computing token ``start`` needs the pages that hold tokens ``start - window + 1 … start - 1``; with a state ``window``
counts as 2. A cached prefix can be used up to a length at which each pool has what it needs there.

Places of pages that only the tree has are given up one by one, least recently used first, then from the front of the
sequence, so that the longest prefix stays usable. Requests count as users of the pages they still need, transfers pin
theirs. A request's own pages lose their place as soon as the window has passed them, though a round in flight may still
read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.page_stamps import PageStamps
from hicache_obs.controller.radix_node import EMPTY, Int64Array, Node, joined
from hicache_obs.controller.radix_results import Match
from hicache_obs.controller.request_state import RequestState
from hicache_obs.controller.translation import Translation
from hicache_obs.errors import ControllerError
from hicache_obs.records import Mode, PageIds

BoolArray = npt.NDArray[np.bool_]

STATE_WINDOW: Final = 2
"""What a state needs, in tokens: that before the next one."""
STATES_PER_REQUEST: Final = 3
"""Most places a running request needs of a pool of states: of its last full page, the one it fills, and the next."""


class PartialPool:
    """Which pages have a place in one partial pool, what is in it, and who needs it. Scheduler's thread.

    Attributes:
        name: For messages and records.
        window: See the module's docstring.
        state: Whether it holds states.
        page_size: Tokens per page.
        translation: Where the pages are.
        tenancies, sources: ``(pages,) int64`` ledger tenancies of the contents, by virtual page; they may have been
            produced for another page than what the full pool holds of it.
        host_has: ``(host pages,) bool``: whether the host copy of a page has its part of this pool.
        host_sources: ``(host pages,) int64`` tenancies that produced those parts.
        arriving: ``(pages,) bool``: whether the next load-back restores the part of each virtual page.
        place_stamps: Who used each place last, whichever page it was of, and whichever pool that shares the bytes.
    """

    def __init__(self, name: str, translation: Translation, *, window: int, page_size: int, host_pages: int) -> None:
        """``window`` 0: a pool of states."""
        pages = len(translation.table)
        self.name = name
        self.state = not window
        self.window = window or STATE_WINDOW
        self.page_size = page_size
        self.translation = translation
        self.tenancies: Int64Array = np.full(pages, -1, np.int64)
        self.sources: Int64Array = np.full(pages, -1, np.int64)
        self.host_has: BoolArray = np.zeros(host_pages, np.bool_)
        self.host_sources: Int64Array = np.full(host_pages, -1, np.int64)
        self.arriving: BoolArray = np.zeros(pages, np.bool_)
        self.place_stamps: PageStamps | PageAllocator = translation.slabs
        self._users: Int64Array = np.zeros(pages, np.int64)
        self._pins: Int64Array = np.zeros(pages, np.int64)
        self._used: Int64Array = np.zeros(pages, np.int64)
        self._depth: Int64Array = np.zeros(pages, np.int64)
        self._low: dict[int, int] = {}

    def first(self, start: int) -> int:
        """Number of the first page in a context that computing token ``start`` needs."""
        return max(0, start - self.window + 1) // self.page_size

    def usable(self, here: BoolArray) -> BoolArray:
        """Which lengths of a prefix can be used, ``(n + 1,) bool``, where ``(n,)`` says which pages are there."""
        numbers = np.arange(len(here) + 1)
        absent = np.maximum.accumulate(np.where(here, -1, numbers[:-1])) if len(here) else numbers[:0]
        first = np.maximum(0, numbers * self.page_size - self.window + 1) // self.page_size
        found: BoolArray = np.concatenate(([-1], absent)) < first
        found[0] = True
        return found

    def low(self, state: RequestState) -> int:
        """Number of the first page that a running request still needs."""
        return self._low[state.slot]

    def has(self, node: Node) -> BoolArray:
        """``(n,) bool``: which pages of a cached node have their part on the device, or can get it from host memory."""
        if node.device_pages is None:
            assert node.host_pages is not None  # it is somewhere
            return self.host_has[node.host_pages]
        here = self.translation.here(node.device_pages)
        if node.host_pages is not None and not node.loading and not node.backing_up:
            here |= self.host_has[node.host_pages]
        return here

    def users(self, pages: PageIds) -> Int64Array:
        """``(n,) int64``: how many running requests need each of the virtual pages."""
        users: Int64Array = self._users[pages]
        return users

    def fill(self, pages: PageIds, tenancies: Int64Array, sources: Int64Array) -> None:
        """Give pages a place, and say what will be in it."""
        self.translation.assign(pages)
        self.tenancies[pages], self.sources[pages] = tenancies, sources

    def begin(self, state: RequestState, start: int) -> None:
        """The request goes on with token ``start``. Partner of ``end``."""
        self._low[state.slot] = self.first(start)

    def joined(self, state: RequestState, number: int, pages: PageIds, tick: int) -> None:
        """``pages`` are the request's, from its page ``number`` on."""
        numbers = number + np.arange(len(pages))
        needed = pages[numbers >= self.low(state)]
        self._users[needed] += 1
        self._used[needed] = tick
        self._depth[pages] = numbers

    def passed(self, state: RequestState, start: int, row: PageIds) -> tuple[PageIds, int]:
        """The request goes on with token ``start``: pages of its ``row`` that it needs no longer.

        Returns:
            They, and the number of the first. The end of the last full page stays usable.
        """
        low, full = self.low(state), start // self.page_size * self.page_size
        self._low[state.slot] = high = max(low, self.first(full))
        pages = row[low:high]
        self._users[pages] -= 1
        return pages, low

    def swapped(self, state: RequestState, numbers: Int64Array, old: PageIds, new: PageIds) -> None:
        """The request uses the tree's pages ``new`` instead of its own ``old``, which hold the same tokens.

        Where the tree's page is a tombstone, it gets the place of the request's.

        Args:
            numbers: Of the pages in the request.
        """
        needed = numbers >= self.low(state)
        self._users[old[needed]] -= 1
        self._users[new[needed]] += 1
        gone = self.translation.here(old) & ~self.translation.here(new)
        before, after = old[gone], new[gone]
        if len(after):
            self.translation.hand_over(before, after)
            self.tenancies[after], self.sources[after] = self.tenancies[before], self.sources[before]
        self._depth[new] = numbers

    def end(self, state: RequestState, row: PageIds, tick: int) -> None:
        """The request needs nothing any more. Partner of ``begin``."""
        pages = row[self._low.pop(state.slot) :]
        self._users[pages] -= 1
        self._used[pages] = tick

    def hold(self, pages: PageIds) -> None:
        """Count a user of ``pages``. Partner of ``let_go``."""
        self._users[pages] += 1

    def let_go(self, pages: PageIds) -> None:
        """Undo one ``hold``."""
        self._users[pages] -= 1

    def pin(self, pages: PageIds) -> None:
        """A transfer works on ``pages``. Partner of ``unpin``."""
        self._pins[pages] += 1

    def unpin(self, pages: PageIds) -> None:
        """Undo one ``pin``."""
        self._pins[pages] -= 1

    def backed_up(self, pages: PageIds, host_pages: PageIds) -> None:
        """A write-back of ``pages`` is queued: the host pages will have what there is of them now."""
        self.host_has[host_pages] = self.translation.here(pages)
        self.host_sources[host_pages] = self.sources[pages]

    def evictable(self) -> PageIds:
        """``(n,) int64`` virtual pages whose places nobody needs, the tree's."""
        pages = self.translation.resident()
        found: PageIds = pages[(self._users[pages] == 0) & (self._pins[pages] == 0)]
        return found

    def live(self) -> int:
        """Places that running requests need."""
        return int((self._users[self.translation.resident()] > 0).sum())

    def ranks(self, pages: PageIds) -> tuple[Int64Array, Int64Array]:
        """When each of ``pages`` was last used, and its number in its sequence: the lowest go first."""
        return self._used[pages], self._depth[pages]


class PartialPools:
    """All partial pools of an engine; none in one whose layers all have full attention. Scheduler's thread.

    Attributes:
        pools: They.
        rows: Most running requests.
        before_free: Called before places are given up: queued write-backs of evicted pages are submitted there.
        load_parts: Queues the load-back of what is arriving of a node; see ``HybridCacheController``.
        settle: Called when the places that could be given up are pinned: ends the pins, and may block for it.
        parts_only: ``(pages,) bool``: whether the next load-back restores nothing of each virtual page but what
            arrives in partial pools; empty without any.
        tombstones: Places given up in the tree for others.
        revived: Tombstones that got their part from host memory.
        passed: Places of requests that their window has passed.
    """

    def __init__(self, pools: Sequence[PartialPool] = (), *, rows: int = 0) -> None:
        self.pools = tuple(pools)
        self.rows = rows
        self.before_free: Callable[[], object] | None = None
        self.load_parts: Callable[[Node], None] | None = None
        self.settle: Callable[[], object] | None = None
        self.parts_only: BoolArray = np.zeros(len(pools[0].sources) if pools else 0, np.bool_)
        self.tombstones = 0
        self.revived = 0
        self.passed = 0
        self._tick = 0

    def usable(self, match: Match) -> int:
        """How many pages of a match can be used: as many as leave each pool with what the next token needs."""
        lengths = np.ones((match.device_len + match.host_len) // self.pools[0].page_size + 1, np.bool_)
        for pool in self.pools:
            has = [pool.has(node) for node in (*match.device_nodes, *match.host_nodes)]
            lengths &= pool.usable(np.concatenate([np.empty(0, np.bool_), *has]))
        return int(np.flatnonzero(lengths)[-1])

    @contextmanager
    def keeping(self, match: Match) -> Iterator[None]:
        """Inside the block the places that a use of the whole match needs are not given up."""
        device = match.device_pages()
        cached = match.device_len + match.host_len
        held = [device[pool.first(cached) :] for pool in self.pools]
        for pool, pages in zip(self.pools, held, strict=True):
            pool.hold(pages)
        try:
            yield
        finally:
            for pool, pages in zip(self.pools, held, strict=True):
                pool.let_go(pages)

    def needs(self, match: Match, fresh: int) -> list[int]:
        """Places per pool to admit a request with this match and ``fresh`` more pages."""
        device, cached = match.device_pages(), match.device_len + match.host_len
        needs = []
        for pool in self.pools:
            first = pool.first(cached)
            missing = int((~pool.translation.here(device[first:])).sum())
            needs.append(0 if pool.state else fresh + missing + cached // pool.page_size - max(first, len(device)))
        return needs

    def more(self, pages: int) -> list[int]:
        """Places per pool for ``pages`` more pages of a running request. States have a share that is set aside."""
        return [0 if pool.state else pages for pool in self.pools]

    def possible(self, needs: Sequence[int]) -> bool:
        """Whether there are so many places; others are given up for them when they are assigned.

        What states of running requests may come to need is set aside.
        """
        for slabs in self._arenas():
            wanted = sum(need for pool, need in zip(self.pools, needs, strict=True) if pool.translation.slabs is slabs)
            room = slabs.available + sum(len(pool.evictable()) for pool in self._of(slabs))
            if wanted and wanted + self._set_aside(slabs) > room:
                return False
        return True

    def begin(self, state: RequestState, start: int) -> None:
        """A request is admitted and goes on with token ``start``. Partner of ``end``."""
        self._tick += 1
        for pool in self.pools:
            pool.begin(state, start)

    def joined(self, state: RequestState, pages: PageIds) -> None:
        """The request is about to get ``pages`` behind those it has."""
        for pool in self.pools:
            pool.joined(state, state.page_count, pages, self._tick)

    def restored(self, state: RequestState, pages: PageIds, tenancies: Int64Array, host_pages: PageIds) -> None:
        """The next pages of the request will be restored from host memory: those that it needs get their places."""
        numbers = state.page_count + np.arange(len(pages))
        for pool in self.pools:
            pool.hold(pages)  # or the next pool, of the same arena, would take the places again
            wanted = (numbers >= pool.low(state)) & pool.host_has[host_pages]
            self._fill(pool, pages[wanted], tenancies[wanted], pool.host_sources[host_pages[wanted]])
            pool.arriving[pages[wanted]] = True
        for pool in self.pools:
            pool.let_go(pages)

    def revive(
        self, state: RequestState, nodes: Sequence[Node], open_tenancies: Callable[[int], Int64Array]
    ) -> tuple[PageIds, Int64Array]:
        """Queue load-backs into the tombstones that the request needs of ``nodes``, its first pages.

        Returns:
            ``(n,) int64`` device pages and the new tenancies of their parts.
        """
        pages, tenancies, number = [EMPTY], [EMPTY], 0
        for node in nodes:
            assert node.device_pages is not None  # nodes of a match that are on the device
            numbers = number + np.arange(len(node.device_pages))
            number += len(node.device_pages)
            before = len(pages)
            for pool in self.pools:
                wanted = (numbers >= pool.low(state)) & ~pool.translation.here(node.device_pages)
                if wanted.any():
                    assert node.host_pages is not None  # or the match would have ended before
                    pages.append(node.device_pages[wanted])
                    tenancies.append(open_tenancies(len(pages[-1])))
                    self._fill(pool, pages[-1], tenancies[-1], pool.host_sources[node.host_pages[wanted]])
                    pool.arriving[pages[-1]] = True
            if len(pages) > before:
                self.parts_only[node.device_pages] = True
                assert self.load_parts is not None
                self.load_parts(node)
        self.revived += sum(map(len, pages))
        return joined(pages), joined(tenancies)

    def submitted(self, pages: PageIds) -> None:
        """The load-back of ``pages`` is submitted."""
        self.parts_only[pages] = False
        for pool in self.pools:
            pool.arriving[pages] = False

    def grown(self, pages: PageIds, tenancies: Int64Array) -> None:
        """The request gets fresh pages: the rounds will write their windows; states get places round by round."""
        for pool in self.pools:
            if not pool.state:
                self._fill(pool, pages, tenancies, tenancies)

    def advance(
        self, state: RequestState, start: int, end: int, *, row: PageIds, tenancies: Int64Array, shared: int
    ) -> None:
        """The next round computes tokens ``start`` to ``end`` of the request.

        Args:
            row, tenancies: The request's pages and theirs.
            shared: How many of them, from the first on, are the tree's.
        """
        for pool in self.pools:
            pages, number = pool.passed(state, start, row)
            self._stamp(pool, pages, state, Mode.READ)
            own = pages[max(0, shared - number) :]
            own = own[pool.translation.here(own)]
            pool.translation.release(own)
            self.passed += len(own)
            if pool.state:
                size = pool.page_size
                number = max(start // size, pool.first(end // size * size))
                entered = row[number : -(-end // size)]
                fresh = ~pool.translation.here(entered)
                new = tenancies[number : -(-end // size)][fresh]
                self._fill(pool, entered[fresh], new, new)

    def stamp(self, state: RequestState, row: PageIds, kept: int) -> None:
        """Stamp the places of the request's pages with its newest round, which writes past page ``kept``."""
        for pool in self.pools:
            low = pool.low(state)
            self._stamp(pool, row[low:], state, Mode.READ)
            self._stamp(pool, row[max(low, kept) :], state, Mode.WRITE)

    def swapped(self, state: RequestState, numbers: Int64Array, old: PageIds, new: PageIds) -> None:
        """See ``PartialPool.swapped``."""
        for pool in self.pools:
            pool.swapped(state, numbers, old, new)

    def end(self, state: RequestState, row: PageIds) -> None:
        """The request is over or retracted. Partner of ``begin``."""
        for pool in self.pools:
            pool.end(state, row, self._tick)

    def freed(self, pages: PageIds, *, cold: bool) -> None:
        """Virtual pages are free: so are their places."""
        for pool in self.pools:
            here = pages[pool.translation.here(pages)]
            if pool.users(here).any():
                raise ControllerError(f"{pool.name} pool: a running request needs a page that is freed")
            pool.translation.release(here, cold=cold)

    def last_uses(self, pages: PageIds, mode: Mode) -> dict[int, int]:
        """See ``PageAllocator.last_uses``; of the places that virtual ``pages`` have now."""
        found: dict[int, int] = {}
        for pool in self.pools:
            moved = pool.translation.here(pages) & (~self.parts_only[pages] | pool.arriving[pages])
            places = pool.translation.places(pages[moved])
            for stream, ticket in pool.place_stamps.last_uses(places, mode).items():
                found[stream] = max(ticket, found.get(stream, 0))
        return found

    def _stamp(self, pool: PartialPool, pages: PageIds, state: RequestState, mode: Mode) -> None:
        pages = pages[pool.translation.here(pages)]
        stream, ticket = state.last_stream, max(state.last_round, 1)
        pool.place_stamps.stamp(pool.translation.places(pages), stream, ticket, mode=mode)
        pool.translation.entries_used.stamp(pages, stream, ticket, mode=Mode.READ)

    def _arenas(self) -> list[PageAllocator]:
        return list({id(pool.translation.slabs): pool.translation.slabs for pool in self.pools}.values())

    def _of(self, slabs: PageAllocator) -> list[PartialPool]:
        return [pool for pool in self.pools if pool.translation.slabs is slabs]

    def _set_aside(self, slabs: PageAllocator) -> int:
        """Places that states of running requests may still come to need."""
        states = [pool for pool in self._of(slabs) if pool.state]
        return sum(STATES_PER_REQUEST * self.rows - pool.live() for pool in states)

    def _fill(self, pool: PartialPool, pages: PageIds, tenancies: Int64Array, sources: Int64Array) -> None:
        self._free(pool.translation.slabs, len(pages))
        pool.fill(pages, tenancies, sources)

    def _free(self, slabs: PageAllocator, wanted: int) -> None:
        """Give places up until ``wanted`` are free."""
        if wanted <= slabs.available:
            return
        if self.before_free is not None:
            self.before_free()
        pools = self._of(slabs)
        missing = wanted - slabs.available
        if sum(len(pool.evictable()) for pool in pools) < missing and self.settle is not None:
            self.settle()
        pages = [pool.evictable() for pool in pools]
        ranks = [pool.ranks(ids) for pool, ids in zip(pools, pages, strict=True)]
        used, depth = (np.concatenate([rank[key] for rank in ranks]) for key in (0, 1))
        owner = np.repeat(np.arange(len(pools)), [len(ids) for ids in pages])
        chosen = np.lexsort((depth, used))[:missing]
        candidates = np.concatenate(pages)
        for number, pool in enumerate(pools):
            pool.translation.release(candidates[chosen[owner[chosen] == number]], cold=True)
        self.tombstones += len(chosen)
