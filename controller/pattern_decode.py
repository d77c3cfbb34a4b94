"""A decode round of the pattern model in numpy, for pools in host memory.

It reads, writes and samples what ``pattern.PatternRound`` does. A decode round has a few numbers per row, so there it
is calls that cost, and one of numpy costs a fraction of one of torch. The pool itself is read and written through
torch, as by everybody else.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hicache_obs.controller.batch import ForwardBatch, Int64Array
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import LaunchedRound, to_device
from hicache_obs.controller.pattern_numbers import POSITION, TOKEN, PatternNumbers, mixed, sampled_slots
from hicache_obs.controller.pools import DevicePool


@dataclass(frozen=True, slots=True, eq=False)
class DecodePlan:
    """What decode rounds have in common while no row gets another page; ``p`` pages of all rows, row by row.

    Attributes:
        table: ``(n, max_pages) int64``: the page table it was made of.
        counts: ``(n,) int64`` pages of each row, that of its new token included.
        rows, numbers: ``(p,) int64`` row of each page, and which of the row's it is.
        first_slots: ``(p,) int64`` slot in the pool of each page's first token.
        weights: ``(p, 1) int64``.
        starts, ends: ``(n,) int64`` where each row's pages begin, and the place of its last one.
        last: ``(n,) int64`` tokens before each row's last page.
        before: ``(n,) int64`` slot of the token before each row's last page; the row's first slot if there is none.
        tenancies: ``(n,) int64`` of each row's last page.
    """

    table: Int64Array
    counts: Int64Array
    rows: Int64Array
    numbers: Int64Array
    first_slots: Int64Array
    weights: Int64Array
    starts: Int64Array
    ends: Int64Array
    last: Int64Array
    before: Int64Array
    tenancies: Int64Array

    @classmethod
    def of(cls, batch: ForwardBatch, counts: Int64Array, page_size: int) -> DecodePlan:
        """For ``batch`` and those after it."""
        each = np.arange(batch.rows)
        rows = np.repeat(each, counts)
        ends = np.cumsum(counts)
        starts = ends - counts
        numbers = np.arange(len(rows)) - starts[rows]
        first_slots = batch.page_table[rows, numbers] * page_size
        last = (counts - 1) * page_size
        previous = np.maximum(last - 1, 0)
        before = batch.page_table[each, previous // page_size] * page_size + previous % page_size
        tenancies = batch.page_tenancies[each, counts - 1]
        weights = (2 * numbers + 1)[:, None]
        return cls(
            batch.page_table, counts, rows, numbers, first_slots, weights, starts, ends - 1, last, before, tenancies
        )

    def fits(self, batch: ForwardBatch, counts: Int64Array) -> bool:
        """Whether ``batch``, whose rows have ``counts`` pages, goes on with the same pages."""
        return batch.page_table is self.table and bool((counts == self.counts).all())


class DecodeRound(LaunchedRound):
    """One decode round. Every pool and tensor is in host memory."""

    def __init__(
        self,
        numbers: PatternNumbers,
        plan: DecodePlan,
        batch: ForwardBatch,
        pool: DevicePool,
        ledger: ContentLedger,
        token_buffer: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        self._numbers = numbers
        self._plan = plan
        self._batch = batch
        self._pool = pool
        self._ledger = ledger
        self._token_buffer = token_buffer
        self._next_tokens = next_tokens

    def run(self, first: int, end: int) -> None:
        """See ``LaunchedRound.run``."""
        if first == 0:
            self._begin()
        self._write(first, end)
        for part in (0, 1):  # K of the odd layers, V of the even ones
            layers = range(first + (first + part + 1) % 2, end, 2)
            if layers:
                self._read(part, layers)
        if end == self._pool.layout.layers:
            self._sample()

    def _begin(self) -> None:
        plan, prefix, size = self._plan, self._batch.prefix_lens, self._pool.layout.page_size
        slots = self.shared_slots
        self._token_slots = to_device(self._batch.token_slots, "cpu") if slots is None else slots
        tokens = self._token_buffer.index_select(0, self._token_slots).numpy()
        self._hashes = tokens * TOKEN + prefix * POSITION
        self._keys = self._numbers.keys(self._hashes, self._numbers.key_salts).astype(np.float64)
        self._places = prefix - plan.last
        written = plan.first_slots[plan.ends] + self._places
        self._written = written
        self._previous = np.where(self._places > 0, written - 1, plan.before)
        self._no_previous = prefix == 0
        lens = prefix + 1
        filled = np.full(len(plan.rows), size)
        filled[plan.ends] = self._places + 1
        in_page = sampled_slots(lens[plan.rows], plan.numbers, filled)
        self._sampled = plan.first_slots + in_page
        self._checksums = np.empty((self._pool.layout.layers, len(prefix)), np.int64)

    def _write(self, first: int, end: int) -> None:
        k = self._keys[first:end]
        layers = self._numbers.layer_places[first:end]
        base = self._pool.read_places(1, torch.from_numpy((layers + self._previous).ravel())).numpy().reshape(k.shape)
        base[:, self._no_previous] = 0.0
        v = self._numbers.wrapped(base + k)
        shape = (-1, self._pool.layout.heads, self._pool.layout.head_dim)
        as_tensors = torch.from_numpy(k).view(shape), torch.from_numpy(v).view(shape)
        self._pool.write_places(torch.from_numpy((layers + self._written).ravel()), *as_tensors)
        self._ledger.add_rows(first, self._plan.tenancies, self._places, k, v)

    def _read(self, part: int, layers: range) -> None:
        which = slice(layers.start, layers.stop, 2)
        places = self._numbers.layer_places[which] + self._sampled
        values = self._pool.read_places(part, torch.from_numpy(places.ravel())).numpy().view(np.int64)
        weighted = values.reshape(*places.shape, -1) * self._plan.weights
        self._checksums[which] = np.add.reduceat(weighted.sum(2), self._plan.starts, 1)

    def _sample(self) -> None:
        folded = mixed(self._checksums ^ (self._checksums >> 21) ^ (self._checksums >> 42))
        total = self._hashes + (folded * self._numbers.layer_salts[:, None]).sum(0)
        sampled = torch.from_numpy(mixed(total) % self._numbers.vocabulary)
        self._token_buffer.index_copy_(0, self._token_slots, sampled)
        self._next_tokens.copy_(sampled)
