"""What happens: how pages are given away while something still runs on them, and what they should hold at the end."""

from __future__ import annotations

import inspect
import os
import signal
from typing import Any

import torch

from guest.drafts import drafts
from guest.engine import LAYERS, PAGE, POOL, Engine, TreeEngine


def loadback(engine: Engine) -> dict[str, Any]:
    """A's prefix was evicted; B used its pages and is done while its last round still runs; A is loaded back."""
    a = engine.alloc(2)
    engine.round(a, 11.0).synchronize()
    host = engine.controller.write(a, node_id=1)
    engine.acknowledge_writes()
    engine.allocator.free(a)
    b = engine.alloc(2)
    assert sorted(b.tolist()) == sorted(a.tolist())
    engine.round(b, 22.0)
    engine.allocator.free(b)
    loaded = engine.controller.load(host, node_id=1)
    producer = engine.controller.start_loading()
    c = engine.alloc(1)
    engine.requests.req_to_token[engine.next_request, : len(loaded) + len(c)] = torch.cat([loaded, c]).to(torch.int32)
    try:
        engine.round(c, 33.0, consumer=producer, length=len(loaded) + len(c))
    finally:
        engine.device.synchronize()
    return {"content": engine.content(loaded), "expected": [11.0]}


def writeback(engine: Engine) -> dict[str, Any]:
    """A finished request is cached while the round that writes its last token still runs."""
    a = engine.alloc(2)
    engine.round(a, 11.0).synchronize()
    engine.round(a[-1:], 12.0, length=len(a))
    host = engine.controller.write(a, node_id=1)
    engine.device.synchronize()
    engine.acknowledge_writes()
    return {"content": engine.host_content(host), "expected": [11.0, 12.0]}


def offload(engine: Engine) -> dict[str, Any]:
    """The decode offload manager's way: its own controller, which nobody fences, and only whole, processed pages."""
    own = engine._base()
    a = engine.alloc(3)
    done = engine.round(a[: 2 * PAGE], 11.0)
    done.synchronize()
    engine.round(a[2 * PAGE : 2 * PAGE + 1], 12.0, length=2 * PAGE + 1)
    host = own.write(a[: 2 * PAGE], node_id=1)
    engine.device.synchronize()
    return {"content": engine.host_content(host), "expected": [11.0]}


def overlap_off(engine: Engine) -> dict[str, Any]:
    """Without overlap the forward runs on the schedule stream: the start event orders the load, no fence needed."""
    return loadback(engine)


def direct(engine: Engine, *, fenced: bool) -> tuple[Any, Any]:
    """Pages whose last round still runs, backed up through the engine as retraction does."""
    a = engine.alloc(2)
    engine.round(a, 11.0).synchronize()
    engine.round(a[-1:], 12.0, length=len(a))
    if fenced:
        engine.schedule.wait_stream(engine.forward)
    return a, engine.host.alloc(len(a))


def _submit(engine: Engine, name: str, host: Any, slots: Any) -> None:
    controller = engine.controller
    moved = controller.move_indices(host, slots)
    transfers = controller._l2_transfers(*moved)
    options: dict[str, Any] = {}
    if name == "submit_host_to_device":
        parameters = inspect.signature(type(controller.l2_transfer_engine).submit_host_to_device).parameters
        options["transfer_layer_id_max" if "transfer_layer_id_max" in parameters else "layer_num"] = LAYERS
    getattr(controller.l2_transfer_engine, name)(transfers, **options).finish_event.synchronize()


def direct_backup(engine: Engine) -> dict[str, Any]:
    """``UnifiedRadixCache.backup_kv_cache``'s own steps: no fence, a synchronized finish event."""
    a, host = direct(engine, fenced="fenced" in engine.scenario)
    _submit(engine, "submit_device_to_host", host, a)
    engine.device.synchronize()
    return {"content": engine.host_content(host), "expected": [11.0, 12.0]}


def direct_restore(engine: Engine) -> dict[str, Any]:
    """``restore_kv_cache``'s own steps, behind its callers' ``schedule_stream.wait_stream(forward_stream)``."""
    a, host = direct(engine, fenced=True)
    _submit(engine, "submit_device_to_host", host, a)
    engine.allocator.free(a)
    b = engine.alloc(2)
    engine.round(b, 22.0)
    engine.allocator.free(b)
    back = engine.allocator.alloc(2 * PAGE)
    if "fenced" in engine.scenario:
        engine.schedule.wait_stream(engine.forward)
    _submit(engine, "submit_host_to_device", host, back)
    engine.device.synchronize()
    return {"content": engine.content(back), "expected": [11.0, 12.0]}


def storage(engine: Engine) -> dict[str, Any]:
    """A backup to the file backend and a prefetch from it, through SGLang's own threads."""
    import tempfile

    from sglang.srt.mem_cache.utils import get_storage_hash_str
    from sglang.srt.runtime_context import get_parallel

    os.environ["SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"] = tempfile.mkdtemp(dir=os.environ.get("HARNESS_TMP"))
    with get_parallel().override(tp_rank=0, tp_size=1, pp_rank=0, pp_size=1):
        controller = engine.controller = engine._base(storage_backend="file", prefetch_threshold=PAGE, model_name="m")
        tokens = list(range(2 * PAGE))
        a = engine.alloc(2)
        engine.round(a, 5.0).synchronize()
        host = controller.write(a, node_id=1)
        engine.acknowledge_writes()
        controller.write_storage(host, tokens, hash_value=get_storage_hash_str(tokens, None, page_size=PAGE))
        controller.ack_backup_queue.get(timeout=20)
        engine.host.free(host)
        controller.prefetch("r1", tokens)
        operation = controller.prefetch_hit_queue.get(timeout=20)
        operation.host_indices = engine.host.alloc(operation.storage_hit_count)
        engine.host.kv_buffer[:, :, operation.host_indices] = 0
        controller.prefetch_buffer.put(operation)
        while not controller.ack_prefetch_queue.get(timeout=20).completed_req:
            pass
        slots = engine.allocator.alloc(len(operation.host_indices))
        _submit(engine, "submit_host_to_device", operation.host_indices, slots)
        controller._stop_storage_threads()
    return {"content": engine.content(slots), "expected": [5.0]}


def tree(engine: TreeEngine) -> dict[str, Any]:
    """``loadback`` through the tree: insert, write through, evict, match, load back, with its own ack checks."""
    from sglang.srt.mem_cache.base_prefix_cache import EvictParams

    cache, count = engine.cache, 8
    a = engine.alloc(count)
    engine.round(a, 11.0).synchronize()
    node = engine.insert(list(range(100, 100 + count)), a)
    cache.writing_check(write_back=True)
    cache.evict(EvictParams(num_tokens=count))
    b = engine.alloc(POOL)
    engine.round(b, 22.0)
    engine.allocator.free(b)
    assert cache.load_back(node, req=None)
    producer = cache.ready_to_load_host_cache()
    loaded = engine.fixtures.node_device_value(cache, node, engine.fixtures.ComponentType.FULL)
    c = engine.alloc(1)
    engine.requests.req_to_token[engine.next_request, : count + 1] = torch.cat([loaded, c]).to(torch.int32)
    engine.round(c, 33.0, consumer=producer, length=count + 1)
    engine.device.synchronize()
    cache.loading_check()
    return {"content": engine.content(loaded), "expected": [11.0]}


def retraction(engine: TreeEngine) -> dict[str, Any]:
    """A request is retracted while its last round runs; another used its new slots when it is restored."""
    tokens, count = list(range(200, 208)), 10
    request, slots = engine.kit._make_inflight_req(
        engine.cache, engine.allocator, engine.requests, tokens, [1, 2], allocated=True
    )
    row = engine.next_request = int(request.kv.req_pool_idx)
    engine.round(slots[:-1], 11.0, length=count - 1).synchronize()
    engine.round(slots[-1:], 12.0, length=count)  # the last token's own KV: computed again after the restore
    backup = engine.cache.backup_kv_cache(request)
    engine.allocator.free(slots)
    b = engine.allocator.alloc(POOL)
    engine.next_request = row - 1
    engine.requests.req_to_token[row - 1, : len(b)] = b.to(torch.int32)
    engine.round(b, 22.0)
    engine.allocator.free(b)
    back = engine.allocator.alloc(count)
    engine.requests.req_to_token[row, :count] = back.to(torch.int32)
    if "fenced" in engine.scenario:  # what both callers of restore_kv_cache do first
        engine.schedule.wait_stream(engine.forward)
    engine.cache.restore_kv_cache(request, backup)
    engine.device.synchronize()
    return {"content": engine.content(back[:-1]), "expected": [11.0]}


def linker(engine: Engine) -> dict[str, Any]:
    """See ``guest.linker``; releases before 0.5.19 have nothing of it."""
    from guest.linker import linker

    return linker(engine)


def kill(engine: Engine) -> dict[str, Any]:
    """The process ends by SIGKILL after 200 records of its own."""
    event = engine.device.Event()
    for _ in range(200):
        event.record()
    print(os.getpid(), flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("still there")


ACTIONS = {
    "kill": kill,
    "linker": linker,
    "drafts": drafts,
    "tree": tree,
    "retraction": retraction,
    "writeback": writeback,
    "offload": offload,
    "overlap_off": overlap_off,
    "direct_backup": direct_backup,
    "direct_restore": direct_restore,
    "storage": storage,
}
