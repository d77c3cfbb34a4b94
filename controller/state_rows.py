"""Which states a round goes on from, and which it leaves, at layers with a recurrent state instead of attention."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_obs.controller.batch import ForwardBatch, Int64Array


@dataclass(frozen=True, slots=True, eq=False)
class StateRows:
    """Host memory.

    Each row begins with the state of the page before its first new token, and leaves one behind its last token, in the
    page of that token, and one at the end of the last page that is full, if the round fills it: what a cached prefix
    is gone on with.

    Attributes:
        previous: ``(n,) int64`` page whose state each row begins with; its own first page if there is none.
        none: ``(n,) bool``: there is none.
        marks: ``(m,) int64`` tokens of the round, rows concatenated, behind which a state is left.
        pages, tenancies: ``(m,) int64`` where.
    """

    previous: Int64Array
    none: npt.NDArray[np.bool_]
    marks: Int64Array
    pages: Int64Array
    tenancies: Int64Array

    @classmethod
    def of(cls, batch: ForwardBatch, page_size: int) -> StateRows:
        """Those of ``batch``."""
        rows, starts = np.arange(batch.rows), batch.prefix_lens
        ends = starts + batch.new_lens
        offsets = np.cumsum(batch.new_lens) - batch.new_lens - starts  # of a row's position 0 among the new tokens
        full = ends // page_size * page_size - 1
        leaves = (full >= starts) & (full < ends - 1)
        row = np.concatenate((rows[leaves], rows))
        position = np.concatenate((full[leaves], ends - 1))
        page = position // page_size
        return cls(
            previous=batch.page_table[rows, np.maximum(starts - 1, 0) // page_size],
            none=starts == 0,
            marks=position + offsets[row],
            pages=batch.page_table[row, page],
            tenancies=batch.page_tenancies[row, page],
        )
