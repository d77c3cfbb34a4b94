"""A decode round in numpy does what one in torch does, to the last bit of the pool."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hicache_obs.controller.ledger import MAX_TOKEN_WORDS, ContentLedger
from hicache_obs.controller.pattern_decode import DecodeRound
from hicache_obs.errors import ControllerError


@pytest.mark.parametrize(
    ("kv", "fence", "graphs"),
    [("mha", "none", False), ("mla", "page", False), ("fp8", "page", False), ("mha", "page", True)],
)
def test_both_ways_agree(lab, monkeypatch, kv, fence, graphs):
    """Wrong contents included, where fences are missing; a captured round is torch's, too."""
    requests = lab.requests(24)
    launched = []
    begin = DecodeRound._begin
    monkeypatch.setattr(DecodeRound, "_begin", lambda self: (launched.append(self), begin(self))[1])

    def in_torch(engine):
        engine.runner._host_pool = None

    numpy = lab.run(requests, runner="pattern", fence=fence, kv=kv)
    assert len(launched) > 20
    launched.clear()
    other = lab.run(requests, runner="pattern", fence=fence, kv=kv, graphs=graphs, prepare=in_torch)
    assert launched == []
    assert numpy.outputs == other.outputs
    assert numpy.corrupted == other.corrupted
    assert bool(numpy.corrupted) == (fence == "none")
    assert torch.equal(numpy.engine.ledger.digests, other.engine.ledger.digests)
    for ours, theirs in zip(numpy.engine.runner.pool.buffers, other.engine.runner.pool.buffers, strict=True):
        assert torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))


def test_rows_are_digested_as_tokens_are():
    rng = np.random.default_rng(3)
    k, v = rng.normal(size=(2, 3, 4, 6))  # three layers, four rows, six values
    tokens, rows = (ContentLedger(5, 16, "cpu") for _ in range(2))
    tenancies, slots = np.array([7, 2, 11, 0]), np.array([0, 3, 63, 5])
    for layer in range(3):
        tensors = [torch.from_numpy(part[layer].reshape(4, 2, 3)) for part in (k, v)]
        tokens.add_tokens(1 + layer, tenancies, slots, *tensors)
    rows.add_rows(1, tenancies, slots, k, v)
    assert torch.equal(tokens.digests, rows.digests)
    assert int((tokens.digests != 0).sum()) == 12


def test_rows_that_are_too_wide_are_refused():
    wide = np.zeros((1, 1, MAX_TOKEN_WORDS // 2 + 1))
    with pytest.raises(ControllerError, match=rf"{MAX_TOKEN_WORDS + 2} words per token; at most {MAX_TOKEN_WORDS}"):
        ContentLedger(1, 1, "cpu").add_rows(0, np.array([0]), np.array([0]), wide, wide)
