"""SGLang's Mooncake linker, on a store that is a dictionary."""

from __future__ import annotations

import ctypes
import inspect
from types import SimpleNamespace
from typing import Any

import torch

from guest.engine import LAYERS, PAGE, Absent, Engine


class Store:
    """What its linker calls of a Mooncake store: whole pages by key, copied to and from the addresses it is given."""

    def __init__(self) -> None:
        self.store, self.objects = self, {}

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def _get_hybrid_page_component_keys(self, keys: list[str], transfer: Any) -> tuple[list[str], int]:
        return keys, 1

    def _tag_keys(self, keys: list[str]) -> list[str]:
        return keys

    def batch_get_session_start(self, keys: list[str]) -> list[int]:
        return [0] * len(keys)

    def batch_get_session_end(self, keys: list[str]) -> None: ...

    def close(self) -> None: ...

    def batch_set_v2(self, transfers: list[Any], extra_info: Any = None) -> dict[str, list[bool]]:
        for transfer in transfers:
            addresses, sizes = self.registered_pools[transfer.name].get_page_buffer_meta(transfer.host_indices)
            parts = [ctypes.string_at(*part) for part in zip(addresses, sizes, strict=True)]
            each = len(parts) // len(transfer.keys)
            for number, key in enumerate(transfer.keys):
                self.objects[key] = b"".join(parts[number * each : (number + 1) * each])
        return {transfer.name: [True] * len(transfer.keys) for transfer in transfers}

    def batch_get_into_multi_buffer_ranges(self, keys: Any, addresses: Any, sizes: Any, offsets: Any) -> list[int]:
        for key, *ranges in zip(keys, addresses, sizes, offsets, strict=True):
            for address, size, offset in zip(*ranges, strict=True):
                ctypes.memmove(address, self.objects[key][offset : offset + size], size)
        return [sum(part) for part in sizes]


def linker(engine: Engine) -> dict[str, Any]:
    """SGLang's Mooncake linker: a request's pages are offloaded, used by another and loaded back for a third."""
    from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
    from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup
    from sglang.srt.mem_cache.storage.mooncake_store import mooncake_direct_linker as module
    from sglang.srt.mem_cache.unified_cache import unified_cache_linker
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
    from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

    entry = DevicePoolEntry(
        name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=engine.pool, page_size=PAGE, rows_are_pages=False,
        components=[engine.pool.k_buffer, engine.pool.v_buffer], layer_mapping={one: one for one in range(LAYERS)},
    )  # fmt: skip
    # SGLang links pools of hybrid models only, which are larger than a test needs.
    module.resolve_hybrid_device_pool_group = lambda **_: DevicePoolGroup([entry], LAYERS, PAGE)
    module.device_module = unified_cache_linker.device_module = engine.device
    module.freeze_gc = lambda *_: None
    params = SimpleNamespace(
        page_size=PAGE, token_to_kv_pool_allocator=engine.allocator, req_to_token_pool=engine.requests,
        pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, attn_tp_cache_group=None, tp_cache_group=None,
    )  # fmt: skip
    store = Store()
    newer = "forward_stream" in inspect.signature(module.MooncakeDirectLinker).parameters
    options = {"forward_stream": engine.forward} if newer else {}
    made = module.MooncakeDirectLinker(Absent(), params, components={ComponentType.FULL}, storage=store, **options)
    tree = UnifiedRadixCache.__new__(UnifiedRadixCache)
    tree.tree_components, tree.components, tree._components_tuple = (), {}, ()
    tree.tree_core = SimpleNamespace()
    tree.init_cache_linker(made)

    def transfer(slots: Any) -> list[Any]:
        return [PoolTransfer(name=PoolName.KV, device_indices=slots, keys=["first", "second"])]

    a = engine.alloc(2)
    engine.round(a, 11.0)
    made.offload(transfer(a))
    made.offload_queue.join()
    assert made.pop_completed_offload()
    engine.allocator.free(a)
    b = engine.alloc(2)
    engine.round(b, 22.0)
    engine.allocator.free(b)
    back = engine.allocator.alloc(2 * PAGE)
    if "fenced" in engine.scenario:
        engine.schedule.wait_stream(engine.forward)
    made.load("r", transfer(back))
    engine.counter = counter = made.layer_done_counter
    index = made.start_layer_wise_loading()
    counter.set_consumer(index)
    c = engine.alloc(1)
    engine.requests.req_to_token[engine.next_request, : len(back) + len(c)] = torch.cat([back, c]).to(torch.int32)
    engine.round(c, 33.0, length=len(back) + len(c))
    assert made.finish_layer_wise_loading(index)
    made.close()
    return {"content": engine.content(back), "expected": [11.0]}
