"""Pages survive a trip to the host and back, for every form, host layout and back end of the copies."""

from __future__ import annotations

import itertools

import pytest
import torch

from hicache_obs.controller.index_blocks import IndexBlocks
from hicache_obs.controller.page_copies import IO_BACKENDS, pieces
from hicache_obs.controller.pools import FORMS, HOST_LAYOUTS, DevicePool, HostPool, KVLayout, poison
from hicache_obs.controller.transfer_engine import PageMove, TransferEngine
from hicache_obs.errors import ConfigError, ControllerError
from hicache_obs.records import Space, page_ids
from hicache_obs.streams import open_device

PAGES, SIZE = 9, 4
EVERYWHERE = pytest.mark.parametrize(
    ("form", "arrangement", "io"), list(itertools.product(FORMS, HOST_LAYOUTS, IO_BACKENDS))
)
DEVICES = pytest.mark.parametrize("name", ["virtual", pytest.param("cuda", marks=pytest.mark.gpu)])


class Trip:
    """A device pool full of numbers, a host pool, and the engine between them."""

    def __init__(self, name: str, form: str, arrangement: str, io: str) -> None:
        self.device = open_device(name, schedule="eager")
        self.layout = KVLayout(3, PAGES, SIZE, 2, 4, form=form)
        self.pool = DevicePool(self.layout, self.device.torch_device)
        self.host = HostPool(self.layout, pinned=name == "cuda", arrangement=arrangement)
        self.engine = TransferEngine(self.device, self.pool, self.host, io=io)
        self.blocks = IndexBlocks(self.device)
        generator = torch.Generator().manual_seed(1)
        shape = (PAGES * SIZE, 2, 4)
        slots = torch.arange(PAGES * SIZE, device=self.device.torch_device)
        for layer in range(3):
            k, v = (
                torch.randint(0, 16, shape, generator=generator).to(torch.float64).to(slots.device) for _ in range(2)
            )
            self.pool.write(layer, slots, k, v)

    def move(self, device_pages: list[int], host_pages: list[int]) -> PageMove:
        ids = page_ids(device_pages), page_ids(host_pages)
        block = self.blocks.take(len(device_pages))
        index = block.tensor[: len(device_pages)]
        index.copy_(torch.from_numpy(ids[0]))
        return PageMove(*ids, index, torch.from_numpy(ids[1]), 1, block)

    def store(self, *pages: list[int]) -> None:
        self.engine.submit_device_to_host(self.move(*pages), start_event=self.device.Event()).synchronize()

    def load(self, *pages: list[int]) -> None:
        self.engine.submit_host_to_device(
            self.move(*pages), start_event=self.device.Event(), on_layer_done=lambda layer: None
        ).synchronize()

    def contents(self) -> list[torch.Tensor]:
        every = torch.arange(PAGES, device=self.device.torch_device)
        return [torch.stack(self.pool.read_pages(layer, every)).cpu() for layer in range(3)]


@DEVICES
@EVERYWHERE
def test_round_trip(name, form, arrangement, io):
    """Out in one order, back into other pages in another: equal, and nothing else is touched."""
    trip = Trip(name, form, arrangement, io)
    before = trip.contents()
    trip.store([4, 1, 2, 3, 8], [0, 7, 8, 6, 3])
    trip.load([0, 5, 6, 7], [8, 7, 0, 6])
    came_from = {0: 2, 5: 1, 6: 4, 7: 3}
    for was, now in zip(before, trip.contents(), strict=True):
        for page in range(PAGES):
            assert torch.equal(now[:, page], was[:, came_from.get(page, page)])
    filled = [
        page for page in range(PAGES) if not (trip.host.buffers[0][:, page] == poison(trip.layout.buffers[0][1])).all()
    ]
    assert filled == [0, 3, 6, 7, 8]


@pytest.mark.parametrize("io", IO_BACKENDS)
def test_only_the_gather_reads_its_index_tensor(io):
    trip = Trip("virtual", "mha", "layer-first", io)
    move = trip.move([1, 2], [0, 1])
    spaces = [access.space for part in trip.engine.store_parts(move) for access in part.work.accesses]
    assert (Space.BUFFER in spaces) == (io == "kernel")
    move.device_index.copy_(torch.tensor([5, 6]))
    before = trip.contents()
    trip.engine.submit_device_to_host(move, start_event=trip.device.Event()).synchronize()
    expected = [5, 6] if io == "kernel" else [1, 2]
    assert torch.equal(trip.host.k[:, [0, 1]], torch.stack([layer[0, expected] for layer in before]))


@pytest.mark.parametrize(("arrangement", "count"), [("layer-first", 3), ("page-first-direct", 6), ("page-first", 24)])
def test_what_one_copy_moves_in_each_layout(arrangement, count):
    """Two neighbouring pages of three layers: a run per layer, a page per layer, or a token per layer."""
    layout = KVLayout(3, PAGES, SIZE, 2, 4)
    device, host = DevicePool(layout, "cpu"), HostPool(layout, pinned=False, arrangement=arrangement)
    found = [piece for layer in range(3) for piece in pieces(device.k[layer, 2:4], host.k[layer, 5:7])]
    assert len(found) == count
    assert all(a.is_contiguous() and b.is_contiguous() for a, b in found)


@pytest.mark.parametrize("arrangement", HOST_LAYOUTS)
def test_all_layouts_look_alike(arrangement):
    layout = KVLayout(3, PAGES, SIZE, 2, 4)
    pool = HostPool(layout, pinned=False, arrangement=arrangement)
    assert pool.k.shape == layout.shape
    assert (pool.k == poison(torch.float64)).all()
    strides = pool.k.stride()
    assert {
        "layer-first": strides[0] > strides[1] > strides[2],
        "page-first": strides[1] > strides[2] > strides[0],
        "page-first-direct": strides[1] > strides[0] > strides[2],
    }[arrangement]


@pytest.mark.parametrize("scale", [1.0, 0.25, 2.0**20])
def test_fp8_is_exact_for_four_significant_bits(scale):
    pool = DevicePool(KVLayout(1, 2, SIZE, 1, 16, form="fp8"), "cpu")
    k = (torch.arange(16.0, dtype=torch.float64) * scale).view(1, 1, 16)
    slot = torch.tensor([5])
    pool.write(0, slot, k, -k)
    assert torch.equal(pool.read(0, 0, slot), k)
    assert torch.equal(pool.read(1, 0, slot), -k)
    assert torch.equal(pool.read_pages(0, torch.tensor([1]))[0][0, 1], k[0])
    assert pool.layout.page_bytes == 2 * SIZE * (16 + 4)


def test_one_buffer_holds_both_halves():
    layout = KVLayout(2, 3, SIZE, 2, 4, form="mla")
    pool = DevicePool(layout, "cpu")
    assert [tuple(buffer.shape) for buffer in pool.buffers] == [(2, 3, SIZE, 2, 8)]
    assert layout.page_bytes == KVLayout(2, 3, SIZE, 2, 4).page_bytes
    pool.k.fill_(1.0)
    pool.v.fill_(2.0)
    assert pool.buffers[0].unique().tolist() == [1.0, 2.0]


def test_fp8_has_no_keys_of_one_type():
    with pytest.raises(ControllerError, match=r"form fp8 has no K and V of one dtype"):
        _ = DevicePool(KVLayout(1, 1, 1, 1, 1, form="fp8"), "cpu").k


def test_what_does_not_exist_is_refused():
    layout = KVLayout(1, 1, 1, 1, 1)
    with pytest.raises(ConfigError, match=r"^form: 'gqa'; expected one of mha, mla, fp8$"):
        KVLayout(1, 1, 1, 1, 1, form="gqa")
    with pytest.raises(
        ConfigError, match=r"^--host-layout token-first: unknown; expected one of layer-first, page-first"
    ):
        HostPool(layout, pinned=False, arrangement="token-first")
    device = open_device("virtual")
    pools = DevicePool(layout, "cpu"), HostPool(layout, pinned=False)
    with pytest.raises(ConfigError, match=r"^--io dma: unknown back end; expected one of kernel, direct$"):
        TransferEngine(device, *pools, io="dma")


# -- index blocks ------------------------------------------------------------------------------------------------------


def test_an_unmarked_block_is_handed_out_again_at_once_and_a_marked_one_when_it_is_settled():
    device = open_device("virtual")
    blocks, stream = IndexBlocks(device), device.Stream("load-back")
    first = blocks.take(3)
    blocks.give_back(first, 1)
    again = blocks.take(60)
    assert again is first
    blocks.mark(again, stream)
    blocks.give_back(again, 2)
    other = blocks.take(3)
    assert other is not first
    blocks.settled(1)
    assert blocks.take(3) not in (first, other)
    blocks.settled(2)
    last = blocks.take(3)
    assert last is first
    assert not last.marked


@pytest.mark.parametrize(("count", "capacity"), [(1, 64), (64, 64), (65, 128), (1000, 1024)])
def test_blocks_are_powers_of_two(count, capacity):
    blocks = IndexBlocks(open_device("virtual"))
    assert len(blocks.take(count).tensor) == capacity


def test_blocks_tell_who_has_them():
    device = open_device("virtual")
    blocks, told = IndexBlocks(device), []
    blocks.on_take = lambda tensor, number, stream: told.append((number, stream.name, tensor.data_ptr()))
    blocks.on_give_back = lambda tensor: told.append(tensor.data_ptr())
    with device.stream(device.Stream("side")):
        block = blocks.take(1)
    blocks.give_back(block, 1)
    assert told == [(0, "side", block.tensor.data_ptr()), block.tensor.data_ptr()]
