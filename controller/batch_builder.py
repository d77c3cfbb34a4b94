"""Makes the batch of a round out of the page table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from hicache_obs.controller.batch import BatchMode, ForwardBatch, Int64Array, PartialBatch
from hicache_obs.controller.page_table import PageTable
from hicache_obs.controller.partial_pool import PartialPool
from hicache_obs.controller.request_state import PrefillRow, RequestState
from hicache_obs.records import PageIds, pack_rows

_NONE: Final[Int64Array] = np.empty(0, np.int64)


class BatchBuilder:
    """Builds batches; nothing else changes. Scheduler's thread."""

    def __init__(self, table: PageTable, partial: Sequence[PartialPool] = ()) -> None:
        self._table = table
        self._partial = tuple(partial)
        self._decode_reads: tuple[int, PageIds] = (-1, _NONE)
        self._decode_rows: tuple[int, bytes, PageIds] = (-1, b"", _NONE)

    def extend(self, round_id: int, rows: Sequence[PrefillRow]) -> ForwardBatch:
        """A prefill round."""
        table, size = self._table, self._table.page_size
        starts = np.array([row.start for row in rows], np.int64)
        ends = np.array([row.end for row in rows], np.int64)
        slots = np.array([row.state.slot for row in rows], np.int64)
        used = [table.used(row.state)[: -(-row.end // size)] for row in rows]
        written = [pages[row.start // size :] for pages, row in zip(used, rows, strict=True)]
        return self._batch(
            round_id,
            BatchMode.EXTEND,
            slots,
            np.concatenate([np.asarray(row.state.tokens[row.start : row.end], np.int64) for row in rows]),
            starts,
            ends - starts,
            table.distinct(used),
            table.distinct(written),
            table.restored(slots, starts // size),
            pack_rows(
                [row.state.request.request_id for row in rows],
                used,
                (-(-starts // size)).tolist(),
                [len(pages) for pages in written],
            ),
        )

    def decode(self, round_id: int, states: Sequence[RequestState]) -> ForwardBatch:
        """A decode round: one token for each request, behind those that are launched."""
        table, size = self._table, self._table.page_size
        slots = np.array([state.slot for state in states], np.int64)
        lengths = np.array([state.launched_len for state in states], np.int64)
        return self._batch(
            round_id,
            BatchMode.DECODE,
            slots,
            _NONE,
            lengths,
            np.ones(len(states), np.int64),
            self._reads(states),
            np.sort(table.pages[slots, lengths // size]),
            (_NONE, _NONE, _NONE),
            self._row_ids(states, -(-lengths // size)),
        )

    def _reads(self, states: Sequence[RequestState]) -> PageIds:
        """Pages a decode round reads; the last round's array if nothing has changed."""
        if self._decode_reads[0] != self._table.version:
            reads = self._table.distinct([self._table.used(state) for state in states])
            self._decode_reads = (self._table.version, reads)
        return self._decode_reads[1]

    def _row_ids(self, states: Sequence[RequestState], read_counts: Int64Array) -> PageIds:
        """``pack_rows`` of a decode round; the last round's array if nothing has changed."""
        key = self._table.version, read_counts.tobytes()
        if self._decode_rows[:2] != key:
            requests = [state.request.request_id for state in states]
            pages = [self._table.used(state) for state in states]
            self._decode_rows = *key, pack_rows(requests, pages, read_counts.tolist(), [1] * len(states))
        return self._decode_rows[2]

    def _batch(
        self,
        round_id: int,
        mode: BatchMode,
        slots: Int64Array,
        tokens: Int64Array,
        cached: Int64Array,
        new: Int64Array,
        reads: PageIds,
        writes: PageIds,
        checks: tuple[PageIds, Int64Array, Int64Array],
        rows: PageIds,
    ) -> ForwardBatch:
        width = int((-(-(cached + new) // self._table.page_size)).max())
        return ForwardBatch(
            round_id=round_id,
            mode=mode,
            token_slots=slots,
            input_tokens=tokens,
            prefix_lens=cached,
            new_lens=new,
            page_table=self._table.pages[slots, :width],
            page_tenancies=self._table.tenancies[slots, :width],
            read_pages=reads,
            write_pages=writes,
            check_pages=checks[0],
            check_tenancies=checks[1],
            check_sources=checks[2],
            row_ids=rows,
            partial=tuple(self._part(pool, mode, slots, cached, cached + new) for pool in self._partial),
        )

    def _part(
        self, pool: PartialPool, mode: BatchMode, slots: Int64Array, starts: Int64Array, ends: Int64Array
    ) -> PartialBatch:
        """The round in one partial pool: rows compute tokens ``starts`` to ``ends``."""
        size, rows = pool.page_size, self._table.pages[slots]
        spans = list(zip(rows, starts.tolist(), ends.tolist(), strict=True))
        read = self._table.distinct([row[pool.first(start) : -(-start // size)] for row, start, _ in spans])
        written = self._table.distinct([row[start // size : -(-end // size)] for row, start, end in spans])
        written = written[pool.translation.here(written)]
        seen = read if pool.state else self._table.distinct([read, written])
        restored = _NONE
        if mode is BatchMode.EXTEND:
            restored = read[(pool.tenancies[read] != pool.sources[read]) & (pool.sources[read] >= 0)]
        return PartialBatch(seen, written, restored, pool.tenancies[restored], pool.sources[restored])
