"""The ledger: it sees every wrong page, and no right one."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_obs.controller import ledger as ledger_module
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.errors import ControllerError

PAGE, HEADS, DIM = 4, 2, 3
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


class Pages:
    """Random K and V of some full pages, written under fresh tenancies at layer 1 of 2."""

    def __init__(self, count: int = 3, *, dtype: torch.dtype = torch.float64, device: str = "cpu") -> None:
        self.ledger = ContentLedger(2, 64, device)
        generator = torch.Generator().manual_seed(1)
        shape = (count, PAGE, HEADS, DIM)
        self.k = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        self.v = torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)
        self.written = self.ledger.open(count)
        self.write(np.arange(count * PAGE))
        self.restored = self.ledger.open(count)

    def write(self, order: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        """Add tokens in ``order``; token i is slot i % PAGE of page i // PAGE."""
        index = torch.from_numpy(order).to(self.k.device)
        page, slot = np.divmod(order, PAGE)
        k, v = self.k.flatten(0, 1)[index], self.v.flatten(0, 1)[index]
        self.ledger.add_tokens(1, self.written[page], slot, k, v)

    def check(self, sources: np.ndarray[tuple[int], np.dtype[np.int64]] | None = None) -> list[int]:
        """Positions of the restored pages that are found corrupted."""
        expected = self.written if sources is None else sources
        self.ledger.check_pages(1, self.k, self.v, self.restored, expected)
        return (self.ledger.corrupted() - len(self.written)).tolist()


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_written_is_clean(dtype: torch.dtype) -> None:
    pages = Pages(dtype=dtype)
    assert pages.check() == []
    assert pages.ledger.checks == 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("part", ["k", "v"])
def test_one_changed_bit_is_seen_in_its_page_only(dtype: torch.dtype, part: str) -> None:
    pages = Pages(dtype=dtype)
    integers = torch.int64 if dtype is torch.float64 else torch.int32 if dtype is torch.float32 else torch.int16
    getattr(pages, part).view(integers)[1, 2, 1, 0] ^= 1
    assert pages.check() == [1]


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(lambda p: swap(p.k[1], 0, 1), id="slots"),
        pytest.param(lambda p: swap(p.k[1].transpose(0, 2), 0, 1), id="elements"),
        pytest.param(lambda p: swap((p.k[1], p.v[1]), 0, 1), id="k and v"),
        pytest.param(lambda p: p.k[1].fill_(2.0**100), id="never written"),
        pytest.param(lambda p: p.k[1].copy_(p.k[2]), id="another page"),
        pytest.param(lambda p: p.k[1, 3].zero_(), id="last token missing"),
    ],
)
def test_contents_in_the_wrong_place_are_seen(spoil: object) -> None:
    pages = Pages()
    assert callable(spoil)
    spoil(pages)
    assert pages.check() == [1]


def swap(tensors: torch.Tensor | tuple[torch.Tensor, ...], a: int, b: int) -> None:
    """Exchange the contents of two entries, in place."""
    first = tensors[a].clone()
    tensors[a].copy_(tensors[b])
    tensors[b].copy_(first)


def test_small_integers_are_told_apart() -> None:
    """Their float64 patterns differ in a few top bits only."""
    pages = Pages(1)
    seen = set()
    for value in range(2000):
        pages.ledger.digests.zero_()
        pages.k.fill_(float(value))
        pages.v.fill_(float(value % 7))
        pages.write(np.arange(PAGE))
        seen.add(int(pages.ledger.digests[0, 1]))
    assert len(seen) == 2000


@given(order=st.permutations(range(2 * PAGE)), cuts=st.sets(st.integers(1, 2 * PAGE - 1)))
@settings(max_examples=50, deadline=None)
def test_digest_does_not_depend_on_how_the_page_was_filled(order: list[int], cuts: set[int]) -> None:
    """Prefill in any chunks, then decode: the sum is the same."""
    pages = Pages(2)
    pages.ledger.digests.zero_()
    for part in np.split(np.array(order, dtype=np.int64), sorted(cuts)):
        pages.write(part)
    assert pages.check() == []


def test_digest_by_hand() -> None:
    """Against Python integers, wrap-around included."""
    pages = Pages(1)
    ledger = pages.ledger
    slot_weights, word_weights = ledger._slot_weights.tolist(), ledger._word_weights.tolist()
    expected = 0
    for part, tensor in enumerate((pages.k, pages.v)):
        for slot in range(PAGE):
            words = tensor[0, slot].flatten().numpy().view(np.int32).tolist()
            expected += sum(w * word_weights[part][i] * slot_weights[slot] for i, w in enumerate(words))
    assert ledger.digests[0].tolist() == [0, (expected + 2**63) % 2**64 - 2**63]


def test_weights_are_odd_and_the_same_in_every_ledger() -> None:
    first, second = ContentLedger(1, 1, "cpu"), ContentLedger(3, 9, "cpu")
    assert torch.equal(first._slot_weights, second._slot_weights)
    assert torch.equal(first._word_weights, second._word_weights)
    assert (first._slot_weights % 2 != 0).all()
    assert (first._word_weights % 2 != 0).all()


def test_layers_are_apart() -> None:
    pages = Pages()
    pages.ledger.check_pages(0, pages.k, pages.v, pages.restored, pages.written)  # layer 0 was never written
    assert pages.ledger.corrupted().tolist() == pages.restored.tolist()


def test_a_wrong_source_is_seen() -> None:
    pages = Pages()
    assert pages.check(pages.written[[0, 2, 2]]) == [1]


def test_bad_stays_bad() -> None:
    pages = Pages()
    original = pages.k.clone()
    pages.k[0] += 1
    assert pages.check() == [0]
    pages.k.copy_(original)
    assert pages.check() == [0]
    assert pages.ledger.bad[pages.restored].tolist() == [1, 0, 0]


def test_device_tensors_are_taken_as_ids() -> None:
    pages = Pages()
    written, restored = torch.from_numpy(pages.written), torch.from_numpy(pages.restored)
    slots = torch.arange(3)
    pages.ledger.add_tokens(0, written, slots, pages.k[:, 0], pages.v[:, 0])
    pages.ledger.check_pages(1, pages.k, pages.v, restored, written)
    assert pages.ledger.corrupted().tolist() == []


def test_read_only_arrays_are_taken_as_ids() -> None:
    pages = Pages()
    pages.written.flags.writeable = False  # torch would warn about aliasing it
    assert pages.check() == []


def test_nothing_to_do() -> None:
    pages = Pages()
    none = np.empty(0, dtype=np.int64)
    pages.ledger.add_tokens(0, none, none, pages.k[:0, 0], pages.v[:0, 0])
    pages.ledger.check_pages(0, pages.k[:0], pages.v[:0], none, none)
    assert pages.ledger.checks == 0
    assert pages.ledger.open(0).tolist() == []


def test_ids_increase_until_the_capacity_is_used_up() -> None:
    ledger = ContentLedger(1, 5, "cpu")
    assert ledger.open(2).tolist() == [0, 1]
    with pytest.raises(ControllerError) as refused:
        ledger.open(4)
    assert str(refused.value) == (
        "ledger: 4 tenancies asked for, 3 of 5 are left; "
        "choose a capacity for every page the whole run will fill or restore"
    )
    assert ledger.open(3).tolist() == [2, 3, 4]
    assert ledger.opened == 5


def test_sizes_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ControllerError, match=r"^ledger: 0 layers, capacity 5; expected integers ≥ 1$"):
        ContentLedger(0, 5, "cpu")
    pages = Pages()
    monkeypatch.setattr(ledger_module, "MAX_PAGE_SIZE", PAGE - 1)
    with pytest.raises(ControllerError, match=r"^ledger: pages of 4 tokens; at most 3 are supported$"):
        pages.check()
    monkeypatch.setattr(ledger_module, "MAX_TOKEN_WORDS", 11)
    with pytest.raises(ControllerError, match=r"^ledger: 12 words per token; at most 11 are supported$"):
        pages.write(np.arange(1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_on_a_gpu_without_blocking_the_host(dtype: torch.dtype) -> None:
    pages, same = Pages(dtype=dtype, device="cuda"), Pages(dtype=dtype)
    assert torch.equal(pages.ledger.digests.cpu(), same.ledger.digests)
    pages.k[1, 0, 0, 0] += 1
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pages.ledger.add_tokens(0, pages.written, np.arange(3), pages.k[:, 0], pages.v[:, 0])
        pages.ledger.check_pages(1, pages.k, pages.v, pages.restored, pages.written)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pages.ledger.corrupted().tolist() == [4]
