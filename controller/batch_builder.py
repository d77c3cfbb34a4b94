"""Makes the batch of a round out of the page table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from hicache_obs.controller.batch import BatchMode, ForwardBatch, Int64Array, PartialBatch
from hicache_obs.controller.page_table import PageTable
from hicache_obs.controller.partial_pool import PartialPool
from hicache_obs.controller.request_state import PrefillRow, RequestState
from hicache_obs.records import PageIds, pack_rows

_NONE: Final[Int64Array] = np.empty(0, np.int64)


@dataclass(slots=True, eq=False)
class _Decoding:
    """What decode rounds have in common that follow each other without a change of the page table.

    Attributes:
        version: Of the page table.
        round_id: The last of them.
        slots, new, reads, pages, tenancies: As in their batches.
        lengths: Of the last of them: tokens of each row before the round.
        read_counts, rows: Pages that each row reads, and ``pack_rows`` with them.
    """

    version: int
    round_id: int
    slots: Int64Array
    lengths: Int64Array
    new: Int64Array
    reads: PageIds
    pages: Int64Array
    tenancies: Int64Array
    read_counts: Int64Array
    rows: PageIds


class BatchBuilder:
    """Builds batches; nothing else changes. Scheduler's thread.

    Arrays that have not changed since the last round are the same ones: batches never write to theirs.
    """

    def __init__(self, table: PageTable, partial: Sequence[PartialPool] = ()) -> None:
        self._table = table
        self._partial = tuple(partial)
        self._decoding: _Decoding | None = None

    def extend(self, round_id: int, rows: Sequence[PrefillRow]) -> ForwardBatch:
        """A prefill round."""
        table, size = self._table, self._table.page_size
        starts = np.array([row.start for row in rows], np.int64)
        ends = np.array([row.end for row in rows], np.int64)
        slots = np.array([row.state.slot for row in rows], np.int64)
        used = [table.used(row.state)[: -(-row.end // size)] for row in rows]
        written = [pages[row.start // size :] for pages, row in zip(used, rows, strict=True)]
        pages, tenancies = table.cells(slots, max(map(len, used)))
        checks = table.restored(slots, starts // size)
        return ForwardBatch(
            round_id=round_id,
            mode=BatchMode.EXTEND,
            token_slots=slots,
            input_tokens=np.concatenate([row.state.tokens[row.start : row.end] for row in rows]),
            prefix_lens=starts,
            new_lens=ends - starts,
            page_table=pages,
            page_tenancies=tenancies,
            read_pages=table.distinct(used),
            write_pages=table.distinct(written),
            check_pages=checks[0],
            check_tenancies=checks[1],
            check_sources=checks[2],
            row_ids=pack_rows(
                [row.state.request.request_id for row in rows],
                used,
                (-(-starts // size)).tolist(),
                [len(pages) for pages in written],
            ),
            partial=self._parts(BatchMode.EXTEND, slots, starts, ends),
        )

    def decode(self, round_id: int, states: Sequence[RequestState]) -> ForwardBatch:
        """A decode round: one token for each request, behind those that are launched."""
        last = self._decoding
        if last is not None and last.version == self._table.version and last.round_id == round_id - 1:
            last.lengths = last.lengths + 1  # every change of the requests that run is one of the table, too
            last.round_id = round_id
        else:
            lengths = np.array([state.launched_len for state in states], np.int64)
            last = self._decoding = self._begin(round_id, states, lengths)
        written, places = np.divmod(last.lengths, self._table.page_size)
        read_counts = written + (places > 0)
        if (read_counts != last.read_counts).any():
            last.read_counts, last.rows = read_counts, self._row_ids(states, read_counts)
        return ForwardBatch(
            round_id=round_id,
            mode=BatchMode.DECODE,
            token_slots=last.slots,
            input_tokens=_NONE,
            prefix_lens=last.lengths,
            new_lens=last.new,
            page_table=last.pages,
            page_tenancies=last.tenancies,
            read_pages=last.reads,
            write_pages=np.sort(self._table.pages[last.slots, written]),
            check_pages=_NONE,
            check_tenancies=_NONE,
            check_sources=_NONE,
            row_ids=last.rows,
            partial=self._parts(BatchMode.DECODE, last.slots, last.lengths, last.lengths + 1),
        )

    def _parts(
        self, mode: BatchMode, slots: Int64Array, starts: Int64Array, ends: Int64Array
    ) -> tuple[PartialBatch, ...]:
        """The round in each partial pool, anew each time: places come and go without a change of the page table."""
        return tuple(self._part(pool, mode, slots, starts, ends) for pool in self._partial)

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

    def _begin(self, round_id: int, states: Sequence[RequestState], lengths: Int64Array) -> _Decoding:
        table = self._table
        slots = np.array([state.slot for state in states], np.int64)
        pages, tenancies = table.cells(slots, max(state.page_count for state in states))
        read_counts: Int64Array = -(-lengths // table.page_size)
        return _Decoding(
            table.version,
            round_id,
            slots=slots,
            lengths=lengths,
            new=np.ones(len(states), np.int64),
            reads=table.distinct([table.used(state) for state in states]),
            pages=pages,
            tenancies=tenancies,
            read_counts=read_counts,
            rows=self._row_ids(states, read_counts),
        )

    def _row_ids(self, states: Sequence[RequestState], read_counts: Int64Array) -> PageIds:
        requests = [state.request.request_id for state in states]
        pages = [self._table.used(state) for state in states]
        return pack_rows(requests, pages, read_counts.tolist(), [1] * len(states))
