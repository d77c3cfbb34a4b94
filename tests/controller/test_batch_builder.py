"""Batches, and what they are made of: the same whether or not they are made of what the last one was."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.controller.batch_builder import BatchBuilder
from hicache_obs.controller.page_table import PageTable
from hicache_obs.controller.request_state import Tokens


@pytest.mark.parametrize("setup", [{}, {"compact_every": 3}, {"policies": {"chunked_prefill": True}}])
def test_what_is_kept_between_decode_rounds_is_what_a_fresh_builder_makes(lab, setup):
    kept = made = 0

    class Checked(BatchBuilder):
        def decode(self, round_id, states):
            nonlocal kept, made
            before = self._decoding
            batch = super().decode(round_id, states)
            fresh = BatchBuilder(self._table).decode(round_id, states)
            for name in ForwardBatch.__slots__:
                mine, other = getattr(batch, name), getattr(fresh, name)
                assert np.array_equal(mine, other) if isinstance(mine, np.ndarray) else mine == other
            made += 1
            kept += self._decoding is before
            return batch

    def prepare(engine):
        engine.scheduler._builder = Checked(engine.scheduler.table)

    run = lab.run(
        lab.requests(24, max_output=24, output_mean=1500.0), runner="pattern", fence="page", prepare=prepare, **setup
    )
    assert run.findings == []
    assert made > kept > 10


def test_tokens_are_sliced_as_a_list_is():
    tokens, expected = Tokens(np.arange(5)), list(range(5))
    for token in (70, 71, 72):
        tokens.append(token)
        expected.append(token)
    assert len(tokens) == 8
    for start in range(9):
        for end in range(9):
            assert tokens[start:end].tolist() == expected[start:end]
            assert tokens[start:end].dtype == np.int64
    assert tokens[-3:].tolist() == [70, 71, 72]
    assert tokens[:].tolist() == expected


def test_pages_among_others():
    table = PageTable(2, 9, 4)
    pages, others = np.array([8, 3, 3, 0, 5]), np.array([3, 8, 1])
    assert table.among(pages, others).tolist() == np.isin(pages, others).tolist() == [True, True, True, False, False]
    assert table.among(pages, others[:0]).tolist() == [False] * 5
