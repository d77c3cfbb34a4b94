"""SGLang's linkers, on stores that are dictionaries, and one that is not SGLang's own."""

from __future__ import annotations

import ctypes
import enum
import inspect
import queue
import threading
import time
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer
from sglang.srt.mem_cache.hybrid_cache.linker_pool_assembler import DevicePoolEntry, DevicePoolGroup
from sglang.srt.mem_cache.storage.mooncake_store import mooncake_direct_linker
from sglang.srt.mem_cache.unified_cache import unified_cache_linker
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from guest.engine import LAYERS, PAGE, Absent, Engine


class Store:
    """What the linkers call of a store, Mooncake's or a UMBP client: pages by key, at the addresses they are given."""

    def __init__(self) -> None:
        self.store = self.client = self
        self.objects: dict[str, bytes] = {}

    def register_buffer(self, address: int, size: int) -> int:
        return 0

    def register_memory(self, address: int, size: int) -> bool:
        return True

    deregister_memory = register_memory

    def get_deployment_mode(self) -> Any:
        return enum.Enum("Mode", "Local StandaloneProcess").Local

    def supports_ranged_io(self) -> bool:
        return True

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

    def batch_put_ranges_from_ptr(self, keys: Any, whole: Any, addresses: Any, sizes: Any, offsets: Any) -> list[bool]:
        for key, size, *ranges in zip(keys, whole, addresses, sizes, offsets, strict=True):
            made = bytearray(size)
            for address, part, offset in zip(*ranges, strict=True):
                made[offset : offset + part] = ctypes.string_at(address, part)
            self.objects[key] = bytes(made)
        return [True] * len(keys)

    def batch_get_into_multi_buffer_ranges(self, keys: Any, addresses: Any, sizes: Any, offsets: Any) -> list[int]:
        for key, *ranges in zip(keys, addresses, sizes, offsets, strict=True):
            for address, size, offset in zip(*ranges, strict=True):
                ctypes.memmove(address, self.objects[key][offset : offset + size], size)
        return [sum(part) for part in sizes]

    def batch_get_ranges_into_ptr(self, keys: Any, addresses: Any, sizes: Any, offsets: Any) -> list[bool]:
        return [bool(size) for size in self.batch_get_into_multi_buffer_ranges(keys, addresses, sizes, offsets)]


class Foreign(unified_cache_linker.UnifiedCacheLinker):
    """None of SGLang's: no pool group, and names of its own for all that SGLang does not ask for."""

    def __init__(self, engine: Engine, entry: Any) -> None:
        self.engine, self.pools = engine, {PoolName.KV: entry}
        self.layer_done_counter = unified_cache_linker.LayerWiseLoadCounter(LAYERS)
        self.forward_stream, self.kept, self.asked, self.done = engine.forward, {}, [], queue.Queue()
        self.jobs: queue.Queue[Any] = queue.Queue()
        self.worker = threading.Thread(target=self._work, daemon=True)
        self.worker.start()

    def _work(self) -> None:
        while (job := self.jobs.get()) is not None:
            events, work = job
            for event in events:
                event.synchronize()
            work()

    def lookup(self, rid: str, transfers: list[Any]) -> list[int]:
        return []

    def load(self, rid: str, transfers: list[Any]) -> bool:
        self.asked += transfers
        return True

    def cancel_queued_load(self, rid: str) -> bool:
        return False

    def start_layer_wise_loading(self) -> int:
        index, asked, self.asked = self.layer_done_counter.update_producer(), self.asked, []
        ready = self.engine.device.Event()
        ready.record()

        def work() -> None:
            for layer in range(LAYERS):
                for transfer in asked:
                    for buffer, kept in zip(self._buffers(layer), self.kept[layer], strict=True):
                        buffer[transfer.device_indices] = kept
                self.layer_done_counter.complete(index, layer)

        self.jobs.put(([ready], work))
        return index

    def finish_layer_wise_loading(self, counter_index: int) -> bool:
        return self.layer_done_counter.finish(counter_index)

    def offload(self, transfers: list[Any], session_id: str | None = None) -> bool:
        def work() -> None:
            for transfer in transfers:
                for layer in range(LAYERS):
                    self.kept[layer] = [one[transfer.device_indices].clone() for one in self._buffers(layer)]
            self.done.put(True)

        self.jobs.put((self.record_offload_ready(), work))
        return True

    def _buffers(self, layer: int) -> tuple[Any, Any]:
        return self.engine.pool.k_buffer[layer], self.engine.pool.v_buffer[layer]

    def num_completed_offloads(self) -> int:
        return self.done.qsize()

    def pop_completed_offload(self) -> bool:
        return self.done.get_nowait()

    def reset(self) -> None:
        self.layer_done_counter.reset()

    def close(self) -> None:
        self.jobs.put(None)
        self.worker.join()


def _made(engine: Engine) -> Any:
    """The linker of the scenario."""
    entry = DevicePoolEntry(
        name=PoolName.KV, indices_from_pool=PoolName.KV, device_pool=engine.pool, page_size=PAGE, rows_are_pages=False,
        components=[engine.pool.k_buffer, engine.pool.v_buffer], layer_mapping={one: one for one in range(LAYERS)},
    )  # fmt: skip
    unified_cache_linker.device_module = engine.device
    if "foreign" in engine.scenario:
        return Foreign(engine, entry)
    if "umbp" in engine.scenario:
        from sglang.srt.mem_cache.storage.umbp import umbp_direct_linker as module  # not before 0.5.20

        made = module.UMBPDirectLinker
    else:
        module, made = mooncake_direct_linker, mooncake_direct_linker.MooncakeDirectLinker
    # SGLang links pools of hybrid models only, which are larger than a test needs.
    module.resolve_hybrid_device_pool_group = lambda **_: DevicePoolGroup([entry], LAYERS, PAGE)
    module.device_module = engine.device
    module.freeze_gc = lambda *_: None
    params = SimpleNamespace(
        page_size=PAGE, token_to_kv_pool_allocator=engine.allocator, req_to_token_pool=engine.requests,
        pp_rank=0, pp_size=1, attn_cp_rank=0, attn_cp_size=1, attn_tp_cache_group=None, tp_cache_group=None,
    )  # fmt: skip
    parameters = inspect.signature(made).parameters
    options = {"_storage" if "_storage" in parameters else "storage": Store()}
    if "forward_stream" in parameters:
        options["forward_stream"] = engine.forward
    return made(Absent(), params, components={ComponentType.FULL}, **options)


def _until(count: Any) -> None:
    """The scheduler asks for results from time to time."""
    while not count():
        time.sleep(0.001)


def linker(engine: Engine) -> dict[str, Any]:
    """A request's pages are offloaded, used by another and loaded back for a third."""
    made = _made(engine)
    tree = UnifiedRadixCache.__new__(UnifiedRadixCache)
    tree.tree_components, tree.components, tree._components_tuple = (), {}, ()
    tree.tree_core = SimpleNamespace()
    tree.init_cache_linker(made)

    def transfer(slots: Any) -> list[Any]:
        return [PoolTransfer(name=PoolName.KV, device_indices=slots, keys=["first", "second"])]

    a = engine.alloc(2)
    engine.round(a, 11.0)
    made.offload(transfer(a))
    _until(made.num_completed_offloads)
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
    if "blind" in engine.scenario:  # behind the load, without knowing it
        futures = counter.futures[index]
        _until(lambda: all(one.done() for one in futures))
    c = engine.alloc(1)
    engine.requests.req_to_token[engine.next_request, : len(back) + len(c)] = torch.cat([back, c]).to(torch.int32)
    engine.round(c, 33.0, length=len(back) + len(c))
    if hasattr(made, "finish_layer_wise_loading"):
        assert made.finish_layer_wise_loading(index)
    else:
        _until(made.num_completed_loads)
        assert made.pop_completed_load() == ["r"]
    made.close()
    return {"content": engine.content(back), "expected": [11.0]}
