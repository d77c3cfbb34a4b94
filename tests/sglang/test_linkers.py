"""Linkers that are not SGLang's own, and failures around those that are. What is recorded of a real one:
``tests_sglang``.
"""

from __future__ import annotations

import queue
from types import SimpleNamespace

import pytest
import torch

from hicache_obs.findings import Hazard
from hicache_obs.records import IoBegin, IoEnd, IoKind, Kernel, ThreadPost, ThreadRecv

COUNTER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"


class Linker:
    """A linker with the names of SGLang's Mooncake linker."""

    def __init__(self, pool, counter):
        self.pools = {"kv": SimpleNamespace(device_pool=pool)}
        self.num_layers, self.layer_done_counter = 3, counter
        self.offload_results, self.mla_broadcaster = queue.Queue(), None
        self.storage = SimpleNamespace(batch_set_v2=lambda moved, *_: moved)
        self.complete = lambda index, layer: None

    def load_layer_wise(self, index, requests):
        for layer in range(2):
            self.complete(index, layer)
        raise RuntimeError("theirs")


@pytest.fixture
def counter():
    class LayerWiseLoadCounter:
        num_layers, consumer_index = 3, 0

    LayerWiseLoadCounter.__module__, LayerWiseLoadCounter.__qualname__ = COUNTER, "LayerWiseLoadCounter"
    return LayerWiseLoadCounter()


def transfer(first):
    return SimpleNamespace(name="kv", host_indices=torch.arange(first, first + 4))


def test_another_linker_makes_its_hazards_not_observable(server, counter):
    it = server()
    it.call("UnifiedRadixCache.init_cache_linker", None, SimpleNamespace(layer_done_counter=counter))
    text = "the linker SimpleNamespace moves pages in functions that are not known here"
    assert it.session.missing == dict.fromkeys(
        (Hazard.RDMA, Hazard.RAW_FORWARD_BACKUP, Hazard.WAR_BACKUP_FORWARD), text
    )
    known = Linker(it.pool, counter)
    known.mla_broadcaster = object()
    it.session.missing.clear()
    it.call("UnifiedRadixCache.init_cache_linker", None, known)
    assert it.session.missing == {Hazard.RDMA: "Linker hands pages to other ranks by NCCL, which is not seen"}


def test_a_load_that_fails_ends_with_the_layer_it_was_at(server, counter):
    it = server()
    linker = Linker(it.pool, counter)
    linker.complete = lambda index, layer: it.call("LayerWiseLoadCounter.complete", counter, index, layer)
    for _ in range(2):  # the second time it is known
        it.call("UnifiedRadixCache.init_cache_linker", None, linker)
    with pytest.raises(RuntimeError, match="theirs"):
        linker.load_layer_wise(0, [[transfer(4)], [transfer(8), transfer(12)]])
    for layer in (1, 2):  # nobody completed the third
        it.call("LayerWiseLoadCounter.wait_until", counter, layer)
    it.call("LayerWiseLoadCounter.finish", counter, 0)
    records = it.records(IoBegin, IoEnd, ThreadPost, ThreadRecv)
    begun = [one for one in records if isinstance(one, IoBegin)]
    assert [one.layers for one in begun] == [(0, 1), (1, 2), (2, 3)]
    assert {one.kind for one in begun} == {IoKind.RDMA_WRITE}
    assert [access.ids.tolist() for access in begun[0].accesses] == [[1], [2], [3]]
    assert sorted(one.io for one in records if isinstance(one, IoEnd)) == sorted(one.io for one in begun)
    posted = [one.channel for one in records if isinstance(one, ThreadPost)]
    assert [one.channel for one in records if isinstance(one, ThreadRecv)] == posted[::-1]


def test_results_of_offloads_are_received_in_their_order(server, counter):
    it = server()
    linker = Linker(it.pool, counter)
    it.call("UnifiedRadixCache.init_cache_linker", None, linker)
    assert linker.storage.batch_set_v2([transfer(4)], None)
    linker.offload_results.put(True)
    linker.offload_results.put(True)
    assert linker.offload_results.get_nowait() is linker.offload_results.get() is True
    records = it.records(IoBegin, IoEnd, ThreadPost, ThreadRecv)
    assert [type(one) for one in records] == [IoBegin, IoEnd, ThreadPost, ThreadPost, ThreadRecv, ThreadRecv]
    assert [one.channel for one in records[2:4]] == [one.channel for one in records[4:]]


def test_a_hosts_wait_for_a_layer_ends_a_segment_of_the_round(server, counter):
    it = server()
    it.session.timed, it.session._timing = False, None
    for layer in (0, 1):
        it.call("LayerWiseLoadCounter.complete", counter, 0, layer)

    def forward(runner, batch):
        for layer in (0, 1, 1):
            it.call("LayerWiseLoadCounter.wait_until", counter, layer)

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    found = it.records(Kernel, ThreadRecv)
    assert [one.layers if isinstance(one, Kernel) else "received" for one in found] == [
        "received", (0, 1), "received", (1, 2**31 - 1),
    ]  # fmt: skip
