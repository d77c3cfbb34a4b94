"""Which device pages each admitted request uses, in the order of its tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hicache_obs.controller.radix_node import Int64Array, Node, upwards
from hicache_obs.controller.request_state import RequestState
from hicache_obs.records import PageIds


class PageTable:
    """One row per slot. Host memory, scheduler's thread.

    Attributes:
        page_size: Tokens per page.
        pages: ``(rows, width) int64`` device pages; unused cells hold anything.
        tenancies, sources: Likewise, of the pages.
        version: Changes with every change.
    """

    def __init__(self, rows: int, width: int, page_size: int) -> None:
        self.page_size = page_size
        self.pages: Int64Array = np.zeros((rows, width), np.int64)
        self.tenancies: Int64Array = np.zeros((rows, width), np.int64)
        self.sources: Int64Array = np.zeros((rows, width), np.int64)
        self.version = 0

    def append(self, state: RequestState, pages: PageIds, tenancies: Int64Array, sources: Int64Array) -> None:
        """Give the request more pages, behind those it has."""
        end = state.page_count + len(pages)
        self._store(state, state.page_count, end, pages, tenancies, sources)
        state.page_count = end

    def move(self, state: RequestState, pages: PageIds, tenancies: Int64Array) -> None:
        """The request's pages have moved; arguments as in ``Scheduler.move_pages``."""
        row = self.pages[state.slot, : state.page_count]
        new = tenancies[row]
        held = self.tenancies[state.slot, : state.page_count]
        held[new >= 0] = new[new >= 0]
        row[:] = pages[row]
        self.version += 1

    def used(self, state: RequestState) -> PageIds:
        """``(page_count,) int64`` copy of the request's pages."""
        pages: PageIds = self.pages[state.slot, : state.page_count].copy()
        return pages

    def cells(self, slots: Int64Array, width: int) -> tuple[Int64Array, Int64Array]:
        """``(n, width) int64`` copies of pages and tenancies of ``slots``; unused cells hold anything."""
        return self.pages[slots, :width], self.tenancies[slots, :width]

    def distinct(self, parts: Sequence[PageIds]) -> PageIds:
        """``(n,) int64`` ascending: every page of ``parts`` once."""
        found: PageIds = np.flatnonzero(self._marked(parts))
        return found

    def among(self, pages: PageIds, others: PageIds) -> npt.NDArray[np.bool_]:
        """``(n,)``: whether each of ``(n,) int64`` pages is one of the others."""
        found: npt.NDArray[np.bool_] = self._marked((others,))[pages]
        return found

    def owned(self, state: RequestState) -> PageIds:
        """Pages of the request that the tree does not own: those behind its locked node."""
        shared = sum(len(node.tokens) for node in upwards(state.locked)) // self.page_size
        return self.used(state)[shared:]

    def adopt(self, state: RequestState, full: int) -> None:
        """Use the tree's pages for the first ``full`` ones: where it had them already, ours were duplicates."""
        chain: list[Node] = list(upwards(state.locked))
        end = full
        for node in chain:
            assert node.device_pages is not None  # just inserted
            start = end - len(node.device_pages)
            self._store(state, start, end, node.device_pages, node.tenancies, node.sources)
            end = start
        self.version += 1

    def restored(self, slots: Int64Array, counts: Int64Array) -> tuple[PageIds, Int64Array, Int64Array]:
        """Pages, tenancies and sources of the restored pages among the first ``counts`` pages of ``slots``.

        Only those whose contents were produced in this process: of others nobody here knows what they should be.
        """
        row = np.repeat(slots, counts)
        column = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        tenancies, sources = self.tenancies[row, column], self.sources[row, column]
        restored = np.flatnonzero((tenancies != sources) & (sources >= 0))
        _, first = np.unique(tenancies[restored], return_index=True)  # rows may share pages
        cells = row[restored[first]], column[restored[first]]
        return self.pages[cells], self.tenancies[cells], self.sources[cells]

    def _marked(self, parts: Sequence[PageIds]) -> npt.NDArray[np.bool_]:
        """Of every page of the pool, whether it is in ``parts``: a tenth of what sorting them costs."""
        seen = np.zeros(self.pages.shape[1], np.bool_)  # a row is as long as the pool
        for part in parts:
            seen[part] = True
        return seen

    def _store(
        self,
        state: RequestState,
        start: int,
        end: int,
        pages: PageIds,
        tenancies: Int64Array,
        sources: Int64Array,
    ) -> None:
        self.pages[state.slot, start:end] = pages
        self.tenancies[state.slot, start:end] = tenancies
        self.sources[state.slot, start:end] = sources
        self.version += 1
