"""Device pages of requests: allocation, eviction for room, sharing with the tree, and giving them back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.backups import Backups
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.page_table import PageTable
from hicache_obs.controller.partial_pool import PartialPools
from hicache_obs.controller.radix_cache import HostHold, RadixCache
from hicache_obs.controller.radix_node import Int64Array
from hicache_obs.controller.request_state import RequestState
from hicache_obs.records import Mode, PageIds


@dataclass(eq=False)
class RequestPages:
    """Moves device pages between allocator, requests and tree. Scheduler's thread; orders nothing.

    Attributes:
        radix, allocator, ledger, table, backups: Its parts.
        before_free: Called before evicted pages are free: the place to submit their write-backs.
        on_alloc, on_free: Told of device page ownership: ``(owner, pages)``.
        evicted_pages: Device pages taken from the tree so far.
        partial: Pools that have a place for some pages only.
    """

    radix: RadixCache
    allocator: PageAllocator
    ledger: ContentLedger
    table: PageTable
    backups: Backups
    before_free: Callable[[], object] | None = None
    on_alloc: Callable[[int, PageIds], None] | None = None
    on_free: Callable[[int, PageIds], None] | None = None
    evicted_pages: int = 0
    partial: PartialPools = field(default_factory=PartialPools)

    def room(self, pages: int, needs: Sequence[int] | None = None) -> bool:
        """Evict until ``pages`` are free, if that is possible.

        Args:
            needs: Places there must be in each partial pool; default: as more pages of a running request need.
        """
        missing = pages - self.allocator.available
        needs = self.partial.more(pages) if needs is None else needs
        if missing > self.radix.device_evictable_pages or not self.partial.possible(needs):
            return False
        if missing > 0:
            evicted = self.radix.evict_device(missing, before_drop=self.backups.before_drop).pages
            self.evicted_pages += len(evicted)
            if self.before_free is not None:
                self.before_free()
            self.free(-1, evicted, cold=True)
        return True

    def alloc(self, owner: int, count: int) -> tuple[PageIds, Int64Array]:
        """``count`` fresh pages and their tenancies; ``room`` was made for them."""
        pages = self.allocator.alloc(count)
        if self.on_alloc is not None and count:
            self.on_alloc(owner, pages)
        return pages, self.ledger.open(count)

    def free(self, owner: int, pages: PageIds, *, cold: bool = False) -> None:
        """Give pages back."""
        if self.on_free is not None and len(pages):
            self.on_free(owner, pages)
        self.partial.freed(pages, cold=cold)
        self.allocator.free(pages, cold=cold)

    def grow(self, state: RequestState, count: int) -> None:
        """Give the request ``count`` fresh pages."""
        pages, tenancies = self.alloc(state.request.request_id, count)
        self.partial.grown(pages, tenancies)
        self.append(state, pages, tenancies, tenancies)

    def append(self, state: RequestState, pages: PageIds, tenancies: Int64Array, sources: Int64Array) -> None:
        """The request uses ``pages``, its own or the tree's, behind those it has."""
        self.partial.joined(state, pages)
        self.table.append(state, pages, tenancies, sources)

    def advance(self, state: RequestState, start: int, end: int) -> None:
        """The next round computes tokens ``start`` to ``end``: give places up that are behind the windows."""
        if self.partial.pools:
            row, tenancies = self.table.used(state), self.table.tenancies[state.slot, : state.page_count]
            shared = state.page_count - len(self.table.owned(state))
            self.partial.advance(state, start, end, row=row, tenancies=tenancies, shared=shared)

    def share(self, state: RequestState, start: int) -> None:
        """The launched round writes the request's KV from token ``start`` on: hand the full pages to the tree.

        Pages whose contents the tree already has are duplicates and are freed.
        """
        self._stamp(state, start)
        full = state.launched_len // self.radix.page_size
        left = self._insert(state, full)
        self.backups.launched(state.locked)
        self.free(state.request.request_id, left[: len(left) - (state.page_count - full)])

    def finish(self, state: RequestState) -> None:
        """The request is over: hand its full pages to the tree and free the rest, stamped with its last round."""
        self._stamp(state, state.launched_len - 1)
        left = self._insert(state, self._complete_pages(state))
        self.backups.computed(state.locked)
        self._let_go(state, left)

    def give_up(self, state: RequestState) -> None:
        """The request is retracted, and starts over: free its pages, stamped with its last round."""
        self._stamp(state, state.launched_len - 1)
        self._let_go(state, self.table.owned(state))

    def set_aside(self, state: RequestState) -> HostHold | None:
        """The request is retracted, and will go on: copy its full pages to host memory, and free all.

        Returns:
            What keeps the copies; ``None`` if not all of them fit, so that some must be computed again.
        """
        self._stamp(state, state.launched_len - 1)
        left = self._insert(state, self._complete_pages(state))
        hold = self.backups.retracted(state.locked)
        self._let_go(state, left)
        return hold

    def _complete_pages(self, state: RequestState) -> int:
        """The newest token's KV is written by the overrun row: it is not part of the cached sequence."""
        return min(len(state.tokens) - 1, state.launched_len) // self.radix.page_size

    def _let_go(self, state: RequestState, left: PageIds) -> None:
        self.radix.unlock(state.locked)
        self.partial.end(state, self.table.used(state))
        self.free(state.request.request_id, left)
        self.table.version += 1
        state.alive = False

    def _stamp(self, state: RequestState, kept: int) -> None:
        """Stamp the request's pages with its newest round, which writes past the first ``kept`` tokens."""
        size = self.radix.page_size
        pages = self.table.used(state)[: -(-state.launched_len // size)]
        self.allocator.stamp(pages, state.last_stream, state.last_round, mode=Mode.READ)
        self.allocator.stamp(pages[kept // size :], state.last_stream, state.last_round)
        self.partial.stamp(state, pages, kept // size)

    def _insert(self, state: RequestState, full: int) -> PageIds:
        """Insert the first ``full`` pages into the tree and move the request's lock there.

        Returns:
            The request's own pages that the tree did not take: duplicates, and those behind the first ``full``.
        """
        slot, size = state.slot, self.radix.page_size
        pages, mine = self.table.used(state)[:full], self.table.owned(state)
        inserted = self.radix.insert(
            state.tokens[: full * size],
            pages,
            self.table.tenancies[slot, :full],
            self.table.sources[slot, :full],
            priority=state.request.priority,
        )
        self.radix.lock(inserted.last_node)
        self.radix.unlock(state.locked)
        state.locked = inserted.last_node
        self.table.adopt(state, full)
        self._swap(state, pages)
        taken = self.table.among(mine, pages) & ~self.table.among(mine, inserted.duplicate_pages)
        left: PageIds = mine[~taken]
        return left

    def _swap(self, state: RequestState, before: PageIds) -> None:
        """The request's first pages were ``before`` until the tree's took their place."""
        if self.partial.pools:
            after = self.table.used(state)[: len(before)]
            changed = np.flatnonzero(before != after)
            self.partial.swapped(state, changed, before[changed], after[changed])
