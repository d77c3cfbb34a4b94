"""The transformer against a plain one without pages, cache or batch; and how far its logits are apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
import torch

from hicache_obs.controller.batch import BatchMode, ForwardBatch
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.pools import DevicePool, KVLayout
from hicache_obs.controller.transformer import NORM_EPS, TransformerRunner, Weights, seeded_weights
from hicache_obs.records import Work, page_ids
from hicache_obs.streams import open_device

LAYOUT = KVLayout(layers=4, pages=256, page_size=16, heads=2, head_dim=16)
PAGES_PER_ROW = 16
NO_IDS = page_ids([])


def plain_logits(weights: Weights, tokens: list[int]) -> torch.Tensor:
    """``(len(tokens), vocabulary)``: the model as a textbook would write it."""
    count, heads, half = len(tokens), LAYOUT.heads, LAYOUT.head_dim // 2

    def norm(x: torch.Tensor) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + NORM_EPS).sqrt()

    def rotary(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(count, dtype=torch.float64)[:, None, None] * weights.rotary
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = torch.empty_like(x)
        turned[..., 0::2] = even * angles.cos() - odd * angles.sin()
        turned[..., 1::2] = even * angles.sin() + odd * angles.cos()
        return turned

    x = weights.embedding[torch.tensor(tokens)]
    future = torch.ones(count, count, dtype=torch.bool).triu(1)
    for layer in weights.layers:
        q, k, v = (part.view(count, heads, 2 * half) for part in (norm(x) @ layer.qkv).chunk(3, -1))
        scores = torch.einsum("ihd,jhd->hij", rotary(q), rotary(k)) / (2 * half) ** 0.5
        attention = scores.masked_fill(future, -torch.inf).softmax(-1)
        x = x + torch.einsum("hij,jhd->ihd", attention, v).reshape(count, -1) @ layer.out
        gate, up = (norm(x) @ layer.gate_up).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down
    return norm(x) @ weights.head


class Served:
    """Rows on the engine's side; row ``i`` owns token slot ``i`` and ``PAGES_PER_ROW`` scattered pages."""

    def __init__(self, runner: TransformerRunner, rows: int) -> None:
        self.runner = runner
        order = np.random.default_rng(1).permutation(LAYOUT.pages)
        self._table = order[: rows * PAGES_PER_ROW].reshape(rows, PAGES_PER_ROW)
        self._tenancies = runner.ledger.open(self._table.size).reshape(self._table.shape)
        self._cached = np.zeros(rows, dtype=np.int64)

    def logits(self, rows: list[int], texts: list[list[int]] | None = None) -> torch.Tensor:
        """``(len(rows), vocabulary)`` of an extend round of ``texts``, or of a decode round."""
        new = page_ids(map(len, texts)) if texts else np.ones(len(rows), dtype=np.int64)
        pages = np.unique(self._table[rows])
        batch = ForwardBatch(
            round_id=0,
            mode=BatchMode.EXTEND if texts else BatchMode.DECODE,
            token_slots=page_ids(rows),
            input_tokens=page_ids(token for text in texts or [] for token in text),
            prefix_lens=self._cached[rows],
            new_lens=new,
            page_table=self._table[rows],
            page_tenancies=self._tenancies[rows],
            read_pages=pages,
            write_pages=pages,
            check_pages=NO_IDS,
            check_tenancies=NO_IDS,
            check_sources=NO_IDS,
        )
        self._cached[rows] += new
        next_tokens = torch.empty(len(rows), dtype=torch.int64)
        work = self.runner.start(batch, next_tokens)
        self.runner.device.launch(lambda: work.run(0, LAYOUT.layers), Work(site="forward"))
        self.runner.device.synchronize()
        assert next_tokens.tolist() == work.logits.argmax(-1).tolist()
        return work.logits


@pytest.fixture
def runner() -> Iterator[TransformerRunner]:
    with closing(open_device("virtual", schedule="eager")) as device:
        pool = DevicePool(LAYOUT, device.torch_device)
        yield TransformerRunner(device, pool, ContentLedger(LAYOUT.layers, 1024, device.torch_device), seed=11)


def random_texts(lengths: list[int]) -> list[list[int]]:
    random = np.random.default_rng(2)
    return [random.integers(0, 512, length).tolist() for length in lengths]


def test_extend_and_decode_equal_a_plain_transformer(runner: TransformerRunner) -> None:
    texts = random_texts([1, 16, 37, 120])
    served = Served(runner, 4)
    rows = [0, 1, 2, 3]
    served.logits(rows, [text[: len(text) // 2 + 1] for text in texts])
    # The second half, where there is one, extends a cached prefix that does not end with a page.
    logits = served.logits([1, 2, 3], [text[len(text) // 2 + 1 :] for text in texts[1:]])
    for row, got in zip([1, 2, 3], logits, strict=True):
        assert torch.allclose(got, plain_logits(runner.weights, texts[row])[-1], rtol=1e-9, atol=1e-9)
        texts[row].append(int(got.argmax()))
    texts[0].append(int(plain_logits(runner.weights, texts[0])[-1].argmax()))
    for _ in range(30):
        for row, got in zip(rows, served.logits(rows), strict=True):
            expected = plain_logits(runner.weights, texts[row])[-1]
            assert torch.allclose(got, expected, rtol=1e-9, atol=1e-9)
            assert got.argmax() == expected.argmax()
            texts[row].append(int(got.argmax()))


def test_batching_moves_logits_far_less_than_the_best_two_are_apart(runner: TransformerRunner) -> None:
    texts = random_texts([20, 33, 48, 64, 90, 100, 111, 127])
    served, together, alone = Served(runner, 16), list(range(8)), range(8, 16)
    moved, apart = 0.0, np.inf
    seen: set[int] = set()
    for step in range(60):
        batched = served.logits(together, None if step else texts)
        single = torch.cat([served.logits([row], None if step else [texts[row - 8]]) for row in alone])
        best = batched.topk(2).values
        apart = min(apart, float((best[:, 0] - best[:, 1]).min()))
        moved = max(moved, float((batched - single).abs().max()))
        seen |= set(batched.argmax(-1).tolist())
    assert moved < 1e-11
    assert apart > 1e-6
    assert len(seen) > 200  # 480 tokens of 512: the model does not repeat itself


def test_weights_depend_on_the_seed_alone() -> None:
    def make(seed: int) -> Weights:
        return seeded_weights(LAYOUT, seed=seed, vocabulary=64, hidden=16, mlp=32)

    assert torch.equal(make(1).head, make(1).head)
    assert torch.equal(make(1).layers[3].qkv, make(1).layers[3].qkv)
    assert not torch.equal(make(1).head, make(2).head)
