"""What the scheduler hands to the model runner for one forward round, and what it gets back."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_obs.records import PageIds
from hicache_obs.streams.protocol import Event

Int64Array = npt.NDArray[np.int64]


class BatchMode(enum.Enum):
    """Kind of round; a batch never mixes the two."""

    EXTEND = "extend"
    """Prefill: each row brings its uncached prompt tokens."""
    DECODE = "decode"
    """Each row brings one token, which lives in the device token buffer."""


@dataclass(frozen=True, slots=True, eq=False)
class PartialBatch:
    """What one round does in one partial pool; the fields are those of ``ForwardBatch``, of that pool's layers."""

    read_pages: PageIds
    write_pages: PageIds
    check_pages: PageIds
    check_tenancies: Int64Array
    check_sources: Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class ForwardBatch:
    """One forward round of ``n`` rows. Host memory only; arrays are not changed after launch.

    Attributes:
        round_id: Increases by one per launched round.
        mode: Extend or decode.
        token_slots: ``(n,) int64`` row's entry in the device token buffer; the round writes its next token there.
        input_tokens: Extend only: ``(sum(new_lens),) int64``, rows concatenated. Empty for decode.
        prefix_lens: ``(n,) int64`` tokens of the row already in the KV cache.
        new_lens: ``(n,) int64`` tokens this round adds (1 for decode).
        page_table: ``(n, max_pages) int64`` device pages of the row, the written ones included; unused cells 0.
        page_tenancies: ``(n, max_pages) int64`` tenancy id (``ledger``) of each page in ``page_table``.
        read_pages: ``(r,) int64`` unique device pages that attention reads.
        write_pages: ``(w,) int64`` unique device pages that receive new tokens.
        check_pages: ``(c,) int64`` restored pages among ``read_pages`` whose contents the round verifies.
        check_tenancies: ``(c,) int64`` their tenancy ids.
        check_sources: ``(c,) int64`` tenancy that produced the contents; its digest is the truth.
        row_ids: ``records.pack_rows`` of requests and pages, for whoever observes; ``None`` if nobody does.
        partial: The round in each partial pool, in the order of the engine's.
    """

    round_id: int
    mode: BatchMode
    token_slots: Int64Array
    input_tokens: Int64Array
    prefix_lens: Int64Array
    new_lens: Int64Array
    page_table: Int64Array
    page_tenancies: Int64Array
    read_pages: PageIds
    write_pages: PageIds
    check_pages: PageIds
    check_tenancies: Int64Array
    check_sources: Int64Array
    row_ids: PageIds | None = None
    partial: tuple[PartialBatch, ...] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.token_slots)

    @property
    def new_tokens(self) -> int:
        """Tokens this round adds, of all rows."""
        return self.rows if self.mode is BatchMode.DECODE else len(self.input_tokens)


@dataclass(frozen=True, slots=True, eq=False)
class RoundResult:
    """Handle of a launched round.

    Attributes:
        round_id: Of the batch.
        done: Recorded on the forward stream after the round; synchronize before reading ``next_tokens``.
        next_tokens: ``(n,) int64`` host memory, valid once ``done`` is complete.
    """

    round_id: int
    done: Event
    next_tokens: Int64Array
