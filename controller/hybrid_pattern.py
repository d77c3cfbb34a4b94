"""The pattern model over hybrid pools: layers with a sliding window read the end of the context only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.controller.pattern import PatternRound, PatternRunner
from hicache_obs.controller.pattern_numbers import MIX, sampled_slots
from hicache_obs.controller.radix_node import Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class _WindowReads:
    """What a round reads at layers of one window.

    Attributes:
        slots, weights: A token of each page that the last token attends to; as the whole-context ones of the round.
        pages: Pages of all rows' windows, laid end to end in row order; empty in a decode round.
        page_rows: Row of each page.
        links: ``(pages, page_size, 1) bool``: tokens of the window whose predecessor is in these pages too.
    """

    slots: torch.Tensor
    weights: torch.Tensor
    pages: torch.Tensor
    page_rows: torch.Tensor
    links: torch.Tensor


class HybridPatternRound(PatternRound):
    """One round of the pattern model."""

    def embed(self) -> None:
        super().embed()
        self._window_reads: dict[int, _WindowReads] = {}
        self._lane_weights = self.upload(np.arange(1, 2 * self._lanes, 2))

    def attend(self, layer: int) -> None:
        window = self.pool.window(layer)
        if not window:
            super().attend(layer)
            return
        reads = self._window_reads.get(window)
        if reads is None:
            reads = self._window_reads[window] = self._prepare_window(window)
        sampled = self.pool.read(layer % 2, layer, reads.slots).view(torch.int64)
        checksum = (sampled.view(self.batch.rows, -1, self._lanes) * reads.weights).sum((1, 2))
        if self._reads_all:
            checksum = checksum + self._broken_links_of(layer, reads) * MIX
        self._checksums.append(checksum)

    def advance_states(self, layer: int, states: torch.Tensor, marks: Int64Array) -> tuple[torch.Tensor, torch.Tensor]:
        """The chain of V, without the V: a state is its newest value, plus the place in the page; V holds the K."""
        size, shape = self.layout.page_size, (self.layout.heads, self.layout.head_dim)
        k = self._new_k[layer]
        rows = self.upload(self.rows)
        sums = k.cumsum(0)
        before = (sums - k)[self.upload(self.last + 1 - self.batch.new_lens)]
        chain = sums - before[rows] + states[:, 0].flatten(1)[rows]
        self._checksums.append((chain[self.upload(self.last)].view(torch.int64) * self._lane_weights).sum(1))
        marked = self.upload(marks)
        places = torch.arange(size, dtype=chain.dtype, device=chain.device)[:, None]
        kept = (chain[marked][:, None] + places).unflatten(-1, shape)
        return kept, k[marked][:, None].expand(-1, size, -1).unflatten(-1, shape)

    def _prepare_window(self, window: int) -> _WindowReads:
        slots, weights = self._window_sample(window)
        size, prefix = self.layout.page_size, self.batch.prefix_lens
        first = np.maximum(0, prefix - window + 1)
        counts: Int64Array = -(-self.context_lens // size) - first // size
        if not self._reads_all:
            counts = np.zeros_like(counts)
        rows = np.repeat(np.arange(self.batch.rows), counts)
        numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts) + (first // size)[rows]
        positions = numbers[:, None] * size + np.arange(size)
        # The first token there follows none, or one that is not there.
        links = (positions < self.context_lens[rows][:, None]) & (positions > (first // size * size)[rows][:, None])
        return _WindowReads(
            self.upload(slots),
            self.upload(weights)[..., None],
            self.upload(self.batch.page_table[rows, numbers]),
            self.upload(rows),
            self.upload(links)[..., None],
        )

    def _window_sample(self, window: int) -> tuple[Int64Array, Int64Array]:
        """Slots and weights: one token of each page of the last token's window, in the window and the context."""
        size, lens = self.layout.page_size, self.context_lens[:, None]
        low = np.maximum(0, lens - window)
        last = (lens - 1) // size
        numbers = low // size + np.arange(int((last - low // size).max()) + 1)
        begin, end = np.maximum(low, numbers * size), np.minimum(lens, (numbers + 1) * size)
        there = numbers <= last
        position = np.where(there, begin + sampled_slots(lens, numbers, (end - begin).clip(1)), low)
        rows = np.arange(self.batch.rows)[:, None]
        return self.slots(rows, position).reshape(-1), np.where(there, 2 * numbers + 1, 0)

    def _broken_links_of(self, layer: int, reads: _WindowReads) -> torch.Tensor:
        k, v = (pages.view(-1, self._lanes) for pages in self.pool.read_pages(layer, reads.pages))
        follows = self.numbers.wrapped(v.roll(1, 0).add_(k)) == v
        per_page = (reads.links & ~follows.view(-1, self.layout.page_size, self._lanes)).sum((1, 2))
        return per_page.new_zeros(self.batch.rows).index_add_(0, reads.page_rows, per_page)


class HybridPatternRunner(PatternRunner):
    """Launches rounds of the pattern model over hybrid pools."""

    def start(self, batch: ForwardBatch, next_tokens: torch.Tensor) -> PatternRound:
        return HybridPatternRound(self.numbers, batch, self.pool, self.ledger, self.token_buffer, next_tokens)
