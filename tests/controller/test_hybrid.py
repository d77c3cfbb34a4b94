"""Hybrid pools: one merged transfer, members with fewer layers, shared bytes, virtual ids; and what each needs."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.cache_controller import CacheController
from hicache_obs.controller.fence_policy import InFlight, fence_policy
from hicache_obs.controller.hybrid import HybridTransferEngine, Member
from hicache_obs.controller.page_copies import IO_BACKENDS
from hicache_obs.controller.pools import HOST_LAYOUTS, DevicePool, HostPool, KVLayout
from hicache_obs.controller.radix_cache import RadixCache
from hicache_obs.controller.translation import Translation
from hicache_obs.errors import ConfigError, OutOfPages
from hicache_obs.findings import Hazard
from hicache_obs.records import Memcpy, Mode, PageIds, Space, Work, page_ids

PAGES, SIZE, LAYERS = 8, 4, 4
SLABS = 10
SCHEDULES = ["virtual-eager", "virtual-lazy", "virtual-adversarial", "threads"]


class Hybrid:
    """Model layers 0 and 3 in a pool of their own, layer 1 (window) and layer 2 (state) in one arena of slabs."""

    def __init__(self, observed, fence: str, io: str = "kernel", arrangement: str = "layer-first") -> None:
        self.observed, self.device = observed, observed.device
        where = self.device.torch_device
        layout = KVLayout(2, PAGES, SIZE, 1, 2)
        arena = DevicePool(KVLayout(1, SLABS, SIZE, 1, 2, form="mla"), where)
        self.slabs = PageAllocator(SLABS, name="arena")

        def host(layers: int, form: str) -> HostPool:
            shape = KVLayout(layers, PAGES, SIZE, 1, 2, form=form)
            return HostPool(shape, pinned=False, arrangement=arrangement)

        tables = [Translation(self.device, PAGES, self.slabs, number=number) for number in (0, 1)]
        self.members = (
            Member("full", (0, 3), DevicePool(layout, where), host(2, "mha")),
            Member("window", (1,), arena, host(1, "mla"), pool=1, host_number=1, translation=tables[0]),
            Member("state", (2,), arena, host(1, "mla"), pool=1, host_number=2, translation=tables[1]),
        )
        self.window, self.state = self.members[1:]
        self.engine = HybridTransferEngine(self.device, self.members, io=io)
        self.pages = PageAllocator(PAGES, name="device")
        self.host_pages = PageAllocator(PAGES, name="host")
        self.radix = RadixCache(SIZE)
        policy = fence_policy(fence, self.pages, InFlight())
        self.controller = CacheController(self.device, self.engine, self.radix, policy)
        self.forward = self.device.Stream("forward")
        self.controller.load_fence_stream = self.controller.write_fence_stream = self.forward

    def alloc(self, count: int) -> PageIds:
        ids = self.pages.alloc(count)
        for member in self.members[1:]:
            member.translation.assign(ids)
            member.translation.publish(self.forward)
        return ids

    def free(self, ids: PageIds) -> None:
        self.pages.free(ids)
        for member in self.members[1:]:
            member.translation.release(ids)

    def fill(self, ids: PageIds, value: float, members: tuple[Member, ...] | None = None) -> None:
        """Launch a round that writes ``value`` plus the model layer into the pages of some members."""
        for member in members or self.members:
            places = torch.from_numpy(member.places(ids).copy())
            for place, layer in enumerate(member.layers):
                work = Work("forward", (member.accesses(Mode.WRITE, ids),), (place, place + 1))
                with self.device.stream(self.forward):
                    self.device.launch(self._store(member, place, places, value + layer), work)

    def _store(self, member: Member, place: int, places: torch.Tensor, value: float):
        def run() -> None:
            for buffer in member.device_pool.buffers:
                buffer[place, places] = value

        return run

    def contents(self, ids: PageIds) -> list[list[float]]:
        """Per model layer, the one value each page holds."""
        found = {}
        for member in self.members:
            places = torch.from_numpy(member.places(ids).copy())
            for place, layer in enumerate(member.layers):
                pages = torch.stack([buffer[place, places].flatten(1)[:, 0] for buffer in member.device_pool.buffers])
                found[layer] = pages.amax(0).tolist()
        return [found[layer] for layer in range(LAYERS)]

    def host_only(self, count: int, value: float):
        """A node in host memory only; nothing is in flight afterwards."""
        ids = self.alloc(count)
        self.fill(ids, value)
        self.device.synchronize()
        tokens = np.arange(count * SIZE, dtype=np.int64) + int(value) * 1000
        node = self.radix.insert(tokens, ids, ids.copy(), ids.copy()).last_node
        self.controller.write(node, self.host_pages.alloc(count))
        self.controller.start_writing(0)
        self.controller.acknowledge(0)
        self.free(self.radix.evict_device(count).pages)
        self.device.synchronize()
        return node

    def load(self, node) -> PageIds:
        ids = self.alloc(len(node.host_pages))
        self.controller.load(node, ids, ids.copy())
        return ids


@pytest.fixture
def hybrid(lab):
    def make(backend: str = "virtual-adversarial", fence: str = "stream", **options: str) -> Hybrid:
        return Hybrid(lab.observed(backend), fence, **options)

    return make


@pytest.mark.parametrize(("io", "arrangement"), list(itertools.product(IO_BACKENDS, HOST_LAYOUTS)))
@pytest.mark.parametrize("backend", SCHEDULES)
def test_a_node_comes_back_into_every_member(hybrid, backend, io, arrangement):
    bed = hybrid(backend, io=io, arrangement=arrangement)
    node, other = bed.host_only(3, 10.0), bed.host_only(1, 50.0)
    ids = bed.load(node)
    more = bed.load(other)
    assert bed.controller.start_loading(1) is not None
    bed.device.synchronize()
    assert bed.contents(ids) == [[10.0] * 3, [11.0] * 3, [12.0] * 3, [13.0] * 3]
    assert bed.contents(more) == [[50.0], [51.0], [52.0], [53.0]]
    assert set(bed.window.places(ids).tolist()).isdisjoint(bed.state.places(ids).tolist())
    assert bed.observed.analyse().findings == []


def test_members_are_merged_into_one_load(hybrid):
    """Model layers in order, each from its own pool at its own place; one start, an event per layer, one end."""
    bed = hybrid()
    node = bed.host_only(2, 10.0)
    ids = bed.load(node)
    since = len(bed.observed.records)
    bed.controller.start_loading(1)
    copies = [record for record in bed.observed.records[since:] if isinstance(record, Memcpy)]
    assert len({copy.group for copy in copies}) == 1
    told = [
        [(a.space, a.pool, a.ids.tolist()) for a in copy.accesses if a.space is not Space.BUFFER] for copy in copies
    ]
    host = node.host_pages.tolist()
    places = [ids.tolist(), bed.window.places(ids).tolist(), bed.state.places(ids).tolist()]
    assert told == [
        [(Space.DEVICE, 0, places[0]), (Space.HOST, 0, host)],
        [(Space.DEVICE, 1, places[1]), (Space.HOST, 1, host)],
        [(Space.DEVICE, 1, places[2]), (Space.HOST, 2, host)],
        [(Space.DEVICE, 0, places[0]), (Space.HOST, 0, host)],
    ]
    assert [copy.layers for copy in copies] == [(0, 1), (0, 1), (0, 1), (1, 2)]
    lines = bed.observed.calls(since)
    assert lines.count("load-back: record") == LAYERS + 1
    assert lines.count("load-back: wait event (start)") == 1


@pytest.mark.parametrize("fence", ["none", "stream"])
def test_shared_bytes(hybrid, fence):
    """A round in flight writes the window part of a page; its slab is freed and becomes another page's state part."""
    bed = hybrid(fence=fence, io="direct")
    node = bed.host_only(1, 10.0)
    victim = bed.alloc(1)
    slabs = bed.window.places(victim).tolist()
    bed.device.synchronize()
    bed.fill(victim, 70.0, (bed.window,))
    bed.free(victim)
    taken = bed.slabs.alloc(1)  # the state slab of the victim goes elsewhere
    assert taken.tolist() != slabs
    ids = bed.pages.alloc(1)
    for member in (bed.state, bed.window):
        member.translation.assign(ids)
        member.translation.publish(bed.forward)
    assert bed.state.places(ids).tolist() == slabs, "the same bytes, in another role"
    bed.controller.load(node, ids, ids.copy())
    bed.controller.start_loading(1)
    bed.device.synchronize()
    findings = bed.observed.analyse().findings
    if fence == "none":
        assert {(f.hazard, f.pool, f.pages) for f in findings} == {(Hazard.WAW_FORWARD_RESTORE, 1, tuple(slabs))}
        assert bed.contents(ids)[2] == [71.0]
    else:
        assert findings == []
        assert bed.contents(ids) == [[10.0], [11.0], [12.0], [13.0]]


@pytest.mark.parametrize("awaited", [True, False])
def test_copies_need_the_newest_translation(hybrid, awaited):
    bed = hybrid(fence="none")
    node = bed.host_only(1, 10.0)
    bed.slabs.free(bed.slabs.alloc(3)[::-1])  # another order of places than last time
    bed.slabs.alloc(1)
    if not awaited:
        bed.engine.await_translations = lambda stream: None
    ids = bed.load(node)
    bed.controller.start_loading(1)
    bed.device.synchronize()
    findings = bed.observed.analyse().findings
    assert {finding.hazard for finding in findings} == (set() if awaited else {Hazard.METADATA_WAR})
    assert (bed.contents(ids) == [[10.0], [11.0], [12.0], [13.0]]) == awaited


def test_what_does_not_fit_together_is_refused(hybrid):
    bed = hybrid()
    full, window, state = bed.members
    with pytest.raises(ConfigError, match=r"^hybrid pools: layers \[0, 1, 3\]; expected each of 0..3 exactly once$"):
        HybridTransferEngine(bed.device, (full, window))
    with pytest.raises(ConfigError, match=r"^member wide: 3 layers; its device pool has 2, expected at least that$"):
        Member("wide", (0, 1, 2), full.device_pool, full.host_pool)
    window.translation.assign(page_ids(range(PAGES)))
    with pytest.raises(OutOfPages, match="arena pool"):
        state.translation.assign(page_ids(range(PAGES)))
