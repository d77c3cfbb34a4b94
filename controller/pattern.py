"""A model at memory speed: exact integer K/V, and tokens that depend on what is actually in the pool.

Per layer, K of a token is a hash of (token, position, layer, lane) and V is the sum of K over the context up to
that token. All values are integers that float64 holds exactly, so no result depends on how rounds are batched.

The chain ``V[p] = V[p - 1] + K[p]`` shows one foreign token anywhere in a context without knowing the tokens
that belong there. An extend round reads its whole context and counts the broken links: 0 in an intact context,
so an extend and a decode round at the same position give the same token (a retracted request is resumed by an
extend round). Both also read one token of each context page.

In a pool of form fp8 K has four bits and the chain runs modulo 16, so that every value is exact there too.
"""

from __future__ import annotations

import numpy as np
import torch

from hicache_obs.controller.batch import BatchMode, ForwardBatch, Int64Array
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import LaunchedRound, ModelRunner, RoundWork
from hicache_obs.controller.pattern_decode import DecodePlan, DecodeRound
from hicache_obs.controller.pattern_numbers import MIX, POSITION, TOKEN, PatternNumbers, mixed, sampled_slots
from hicache_obs.controller.pools import DevicePool, RoundPool
from hicache_obs.errors import ControllerError


class PatternRound(RoundWork):
    """One round of the pattern model."""

    def __init__(
        self,
        numbers: PatternNumbers,
        batch: ForwardBatch,
        pool: RoundPool,
        ledger: ContentLedger,
        token_buffer: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        super().__init__(batch, pool, ledger, token_buffer, next_tokens)
        self.numbers = numbers
        self._lanes = numbers.lanes
        self._reads_all = batch.mode is BatchMode.EXTEND

    def embed(self) -> None:
        hashes = self.hashes(self.upload(self.positions))
        self._last_hashes = hashes.index_select(0, self.upload(self.last))
        self._layer_salts = self.upload(self.numbers.layer_salts)
        self._new_k = self.new_keys(hashes, self.upload(self.numbers.key_salts))
        self._checksums: list[torch.Tensor] = []
        self._prepare_chain()
        self._prepare_sample()
        if self._reads_all:
            self._prepare_full_read()

    def hashes(self, positions: torch.Tensor) -> torch.Tensor:
        """``(t,) int64`` of ``tokens`` at ``(t,) int64`` positions."""
        return self.tokens * TOKEN + positions * POSITION

    def new_keys(self, hashes: torch.Tensor, salts: torch.Tensor) -> torch.Tensor:
        """``(layers, t, lanes) float64``: K of the round's tokens."""
        return self.numbers.keys(hashes, salts).to(torch.float64)

    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        k = self._new_k[layer]
        stored = self.pool.read(1, layer, self._previous).view(-1, self._lanes)
        base = stored.masked_fill_(self._no_previous, 0.0)
        if self.batch.mode is BatchMode.DECODE:
            v = base + k
        else:
            sums = k.cumsum(0)
            before_row = (sums - k)[self._row_starts]
            v = sums - before_row[self._token_rows] + base[self._token_rows]
        v = self.numbers.wrapped(v)
        shape = (-1, self.layout.heads, self.layout.head_dim)
        return k.view(shape), v.view(shape)

    def attend(self, layer: int) -> None:
        # Alternating halves the cache misses, which are most of a decode round: one per page.
        values = self.pool.read(0 if layer % 2 else 1, layer, self._sample_slots)
        sampled = values.view(torch.int64)  # bits: NaN counts like any value
        weighted = sampled.view(self.batch.rows, -1, self._lanes) * self._sample_weights
        checksum = weighted.sum((1, 2))
        if self._reads_all:
            checksum = checksum + self.broken_links(layer) * MIX
        self._checksums.append(checksum)

    def sample(self) -> torch.Tensor:
        checksums = torch.stack(self._checksums, 1)
        # Integers in a float64 differ in the high bits only.
        folded = mixed(checksums ^ (checksums >> 21) ^ (checksums >> 42))
        return mixed(self._last_hashes + (folded * self._layer_salts).sum(1)) % self.numbers.vocabulary

    def _prepare_chain(self) -> None:
        """Where each row's chain goes on: the slot before its first new token, if any."""
        prefix = self.batch.prefix_lens
        self._previous = self.upload(self.slots(np.arange(self.batch.rows), np.maximum(prefix - 1, 0)))
        self._no_previous = self.upload(prefix == 0)[:, None]
        if self.batch.mode is BatchMode.EXTEND:
            self._token_rows = self.upload(self.rows)
            self._row_starts = self.upload(self.last + 1 - self.batch.new_lens)

    def _prepare_sample(self) -> None:
        """One token per context page.

        Padding reads the row's own first page with weight 0: page 0, in unused cells, belongs to someone else.
        """
        page_size = self.layout.page_size
        lens = self.context_lens[:, None]
        pages = np.arange(-(-int(lens.max()) // page_size))
        filled = np.clip(lens - pages * page_size, 0, page_size)
        slot = sampled_slots(lens, pages, np.maximum(filled, 1))
        table = self.batch.page_table[:, : len(pages)]
        table = np.where(filled > 0, table, table[:, :1])
        self._sample_slots = self.upload((table * page_size + slot).reshape(-1))
        self._sample_weights = self.upload(np.where(filled > 0, 2 * pages + 1, 0))[..., None]

    def _prepare_full_read(self) -> None:
        """All context pages of all rows, laid end to end in row order."""
        page_size = self.layout.page_size
        counts: Int64Array = -(-self.context_lens // page_size)
        ends = np.cumsum(counts)
        rows = np.repeat(np.arange(self.batch.rows), counts)
        pages = np.arange(ends[-1]) - np.repeat(ends - counts, counts)
        filled = self.context_lens - (counts - 1) * page_size
        self._context_pages = self.upload(self.batch.page_table[rows, pages])
        self._page_rows = self.upload(rows)
        self._first_slots = self.upload((ends - counts) * page_size)
        self._tail_pages = self.upload(ends - 1)
        self._tail_valid = self.upload(np.arange(page_size) < filled[:, None])[..., None]

    def broken_links(self, layer: int) -> torch.Tensor:
        """``(n,) int64``: places in each row's context where ``V[p] != V[p - 1] + K[p]``."""
        k, v = (pages.view(-1, self._lanes) for pages in self.pool.read_pages(layer, self._context_pages))
        expected = v.roll(1, 0).index_fill_(0, self._first_slots, 0.0)
        broken = (self.numbers.wrapped(expected.add_(k)) != v).view(-1, self.layout.page_size, self._lanes)
        broken[self._tail_pages] &= self._tail_valid
        per_page = broken.sum((1, 2))
        return per_page.new_zeros(self.batch.rows).index_add_(0, self._page_rows, per_page)


class PatternRunner(ModelRunner):
    """Launches rounds of the pattern model."""

    def set_up(self) -> None:
        """See ``ModelRunner.set_up``."""
        dtype = self.pool.layout.dtype
        if dtype != torch.float64:
            raise ControllerError(f"the pool has dtype {dtype}; the pattern model's integers need float64")
        self.numbers = PatternNumbers(self.vocabulary, self.pool.layout)
        on_host = self.token_buffer.device.type == "cpu"
        self._host_pool = self.pool if on_host and isinstance(self.pool, DevicePool) else None
        self._plan: DecodePlan | None = None

    def start(self, batch: ForwardBatch, next_tokens: torch.Tensor) -> LaunchedRound:
        buffers = self.ledger, self.token_buffer, next_tokens
        if self._host_pool is not None and batch.mode is BatchMode.DECODE and not len(batch.check_pages):
            return DecodeRound(self.numbers, self._planned(batch), batch, self._host_pool, *buffers)
        return PatternRound(self.numbers, batch, self.pool, *buffers)

    def _planned(self, batch: ForwardBatch) -> DecodePlan:
        page_size = self.pool.layout.page_size
        counts: Int64Array = batch.prefix_lens // page_size + 1
        if self._plan is None or not self._plan.fits(batch, counts):
            self._plan = DecodePlan.of(batch, counts, page_size)
        return self._plan
