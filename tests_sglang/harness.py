"""Drives the real SGLang classes on the CPU, in the scheduler's own order, and says what the pages ended with.

    python harness.py SCENARIO...        each in a fork of its own; one JSON line per scenario on standard output
    python harness.py --serve            the same for every request on standard input, each in a fork of its own: SGLang
                                         is imported once, which takes longer than most scenarios

Real: the plugin loaded by ``load_plugins()``, HiCacheController or HybridCacheController, pools, allocator, transfer
engine, layer counters, ``ModelRunner.forward``, ``Scheduler._apply_war_barrier``. Not real: the model (a forward
writes a number to its slots, layer by layer), and the copy kernel that only CUDA has. With ``deferred`` streams the
device is hicache_obs's virtual one: copies and forwards really run later, and in the worst legal order.

A scenario is words joined by ``+``: see ``Scenario``.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import json
import os
import resource
import signal
import sys
import threading
import traceback
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

for _name in ("nms", "qnms"):  # torchvision's wheel cannot load its operators beside a CPU torch; their schemas do
    with contextlib.suppress(RuntimeError):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
torch.set_num_threads(1)

from hicache_obs.recorder.server import ServerRecorder  # noqa: E402
from hicache_obs.records import StreamKind, Work  # noqa: E402
from hicache_obs.sglang import forwards, install, transfers  # noqa: E402
from hicache_obs.sglang.session import Session  # noqa: E402
from hicache_obs.sglang.streams import stream_adapters  # noqa: E402
from hicache_obs.streams.virtual import VirtualDevice  # noqa: E402

PAGE, LAYERS, POOL = 4, 3, 64

install.EXTRA_ADAPTERS += stream_adapters(
    "hicache_obs.streams.virtual.VirtualStream", "hicache_obs.streams.virtual.VirtualEvent"
)

import sglang.srt.managers.cache_controller as controller_module  # noqa: E402
from sglang.srt.managers.scheduler import Scheduler  # noqa: E402
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402
from sglang.srt.model_executor.model_runner import ModelRunner  # noqa: E402
from sglang.srt.plugins import load_plugins  # noqa: E402
from sglang.srt.server_args import ServerArgs  # noqa: E402

try:
    import sglang.srt.mem_cache.pool_host.mha as host_module
except ImportError:
    import sglang.srt.mem_cache.memory_pool_host as host_module
try:
    import sglang.srt.mem_cache.l2_transfer as transfer_module
except ImportError:
    transfer_module = None

with contextlib.suppress(ImportError):  # for the forks, which would each import it anew
    import sglang.test.kits.unified_radix_cache.fixtures
    import sglang.test.test_utils  # noqa: F401


def fault() -> str:
    """What is to go wrong in this process."""
    return os.environ.get("HARNESS_FAULT", "")


def break_every_hook() -> None:
    """Every hook raises from now on: in place of what it would do, and again when the engine's call has returned."""
    from dataclasses import replace

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a hook that fails")

    for name in ("SGLANG_ADAPTERS", "CPU_ADAPTERS", "EXTRA_ADAPTERS"):
        rows = getattr(install, name)
        broken = (row if row.direct else replace(row, before=fail, after=fail, failed=fail) for row in rows)
        setattr(install, name, type(rows)(broken))
    # Whole hooks keep the promises themselves: it is what they call that fails.
    ServerRecorder.put = Session.event = transfers._first_of_layers = forwards._before_forward = fail


def load() -> None:
    """Load the plugins as a scheduler does, for this process and its forks."""
    if fault() == "hooks":
        break_every_hook()
    load_plugins()


class TorchCpu:
    """torch.cpu, whose streams and events do nothing: every call runs at once."""

    __name__ = "cpu"

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    current_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)

    def launch(self, fn: Any) -> None:
        fn()

    def synchronize(self) -> None:
        pass


class Deferred:
    """The virtual device: what is launched runs when the host waits for it, the newest first where that is legal."""

    __name__ = "virtual"

    def __init__(self) -> None:
        self._device = VirtualDevice("adversarial")
        self.Event = self._device.Event
        self.Stream = lambda: self._device.Stream(kind=StreamKind.NONBLOCKING)
        self.current_stream = self._device.current_stream
        self.stream = self._device.stream
        self.synchronize = self._device.synchronize

    def launch(self, fn: Any) -> None:
        self._device.launch(fn, Work("harness"))


class Scenario:
    """What a scenario's words mean.

    ``base`` or ``hybrid`` controller; ``coarse`` or ``readdone`` barrier; ``loadfence``, ``writefence``: bound as
    that release's Scheduler binds them; ``deferred``: the virtual device; and what happens: ``loadback`` (default),
    ``writeback``, ``offload``, ``direct_backup``, ``direct_restore``, ``overlap_off``, ``storage``, ``tree``,
    ``retraction``, ``linker``, ``drafts`` (with ``onegraph``), ``raise``,
    ``kill``; ``blind``: the forward does not wait for a linker's layers.
    """

    def __init__(self, words: str) -> None:
        self.words = set(words.split("+"))

    def __contains__(self, word: str) -> bool:
        return word in self.words


class Absent:
    """Settings that are all ``None``."""

    def __getattr__(self, name: str) -> None:
        return None


class Runner(ModelRunner):
    """A ModelRunner without a model: attributes it was not given are ``None``."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.forward_pass_id = 0
        self.token_to_kv_pool = engine.pool
        self.req_to_token_pool = engine.requests
        self.is_draft_worker = False
        self.page_size = PAGE
        self.server_args = Absent()

    def __getattr__(self, name: str) -> Any:
        return None

    def _forward_raw(self, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        return self.engine.forward_raw(self, forward_batch)


class Engine:
    """Pools, controller and the scheduler's moves."""

    page = PAGE

    def __init__(self, scenario: Scenario) -> None:
        self.device = device = Deferred() if "deferred" in scenario else TorchCpu()
        self.scenario = scenario
        controller_module.device_module = device
        if transfer_module is not None:
            transfer_module.device_module = device
            transfer_module._timing_events_supported.cache_clear()
        host_module.transfer_kv_direct = self._copy_kernel
        self.next_request = 0
        self.after_forward = lambda batch: None
        """What a batch launches behind the target model's forward."""
        self.counter = None
        """A linker's, which a forward's layers wait for on the host."""
        self._build()
        self.schedule = device.current_stream()
        self.forward = self.schedule if "overlap_off" in scenario else device.Stream()
        self.runner = Runner(self)
        for word, attribute in (("loadfence", "load_fence_stream"), ("writefence", "write_fence_stream")):
            if word in scenario and hasattr(self.controller, attribute):
                setattr(self.controller, attribute, self.forward)

    def _build(self) -> None:
        self.pool = pool = self._pool()
        self.allocator = PagedTokenToKVPoolAllocator(POOL, PAGE, torch.float32, "cpu", pool, need_sort=False)
        self.requests = SimpleNamespace(req_to_token=torch.zeros((8, POOL), dtype=torch.int32))
        self.host = self._host_pool(pool)
        self.controller = self._hybrid() if "hybrid" in self.scenario else self._base()

    def _pool(self) -> Any:
        return MHATokenToKVPool(
            size=POOL, page_size=PAGE, dtype=torch.float32, head_num=1, head_dim=2, layer_num=LAYERS, device="cpu",
            enable_memory_saver=False,
        )  # fmt: skip

    def _host_pool(self, pool: Any) -> Any:
        cls = host_module.MHATokenToKVPoolHost
        if "buffer_info" in inspect.signature(cls.__init__).parameters:
            info = pool.get_device_pool_infos()[0].buffer_info
            return cls(
                info, 2.0, 0, PAGE, "layer_first", pin_memory=False, device_capacity_tokens=POOL,
                start_layer=pool.start_layer, end_layer=pool.end_layer,
            )  # fmt: skip
        return cls(pool, 2.0, 0, PAGE, "layer_first", pin_memory=False)

    def _base(self, **options: Any) -> Any:
        return controller_module.HiCacheController(
            self.allocator, self.host, PAGE, None, threading.Event(), write_policy="write_through",
            io_backend="direct", **options,
        )  # fmt: skip

    def _hybrid(self) -> Any:
        from sglang.srt.mem_cache.hicache_storage import PoolName
        from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
        from sglang.srt.mem_cache.hybrid_cache.hybrid_pool_assembler import build_pool_entry
        from sglang.srt.mem_cache.pool_host import HostPoolGroup

        entry = build_pool_entry(
            name=PoolName.KV, host_pool=self.host, device_pool=self.pool,
            layer_mapping={layer: layer for layer in range(LAYERS)}, transfer_layer_id_max=LAYERS, is_anchor=True,
        )  # fmt: skip
        controller = HybridCacheController(
            self.allocator, HostPoolGroup([entry]), PAGE, None, threading.Event(), write_policy="write_through",
            io_backend="direct", transfer_layer_id_max=LAYERS,
        )  # fmt: skip
        self.pool.register_layer_transfer_counter(controller.layer_done_counter)
        return controller

    def _copy_kernel(self, *, src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, **_: Any) -> None:
        def copy(source: Any, target: Any, where_from: Any, where_to: Any) -> None:
            target.index_copy_(0, where_to, source[where_from])

        for source, target in zip(src_layers, dst_layers, strict=True):
            self.device.launch(partial(copy, source, target, src_indices.clone(), dst_indices.clone()))

    # -- the scheduler's moves -------------------------------------------------------------------------------

    def alloc(self, pages: int) -> Any:
        """Slots of new pages, entered into the table of a new request."""
        slots = self.allocator.alloc(pages * self.page)
        assert slots is not None
        self.next_request += 1
        self.requests.req_to_token[self.next_request, : len(slots)] = slots.to(torch.int32)
        return slots

    def round(self, slots: Any, value: float, *, consumer: int = -1, length: int | None = None) -> Any:
        """One forward round of the newest request, launched and fenced as ``Scheduler.run_batch`` does.

        Returns its ``copy_done`` event: the scheduler synchronizes it when it processes the round's result.
        """
        length = len(slots) if length is None else length
        batch = SimpleNamespace(
            forward_mode=ForwardMode.DECODE, out_cache_loc=slots, value=value, batch_size=1,
            req_pool_indices=torch.tensor([self.next_request]), seq_lens=torch.tensor([length]),
            seq_lens_cpu=torch.tensor([length]), seq_lens_sum=length, extend_num_tokens=None,
            num_token_non_padded_cpu=1,
            apply_deprecated_skip_attn_backend_init=lambda flag: None, spec_info=None, global_num_tokens_cpu=None,
            return_logprob=False, lora_ids=None, rids=["r"], input_ids=torch.zeros(1, dtype=torch.int64),
        )  # fmt: skip
        with self.device.stream(self.forward):
            if self.forward is not self.schedule:
                self.forward.wait_stream(self.schedule)
            self.controller.layer_done_counter.set_consumer(consumer)
            self.runner.forward(batch)
            self.after_forward(batch)
            copy_done = self.device.Event()
            copy_done.record()
        if "overlap_off" not in self.scenario:
            self.barrier()
        return copy_done

    def forward_raw(self, runner: Any, batch: Any) -> Any:
        """The model: publish the end of the shared reads, then write every layer's slots."""
        done = self.device.Event()
        done.record()
        runner.shared_read_done_event = runner.war_fastpath_read_done_event = done
        if "coarse" in self.scenario:
            runner.shared_read_done_event = runner.war_fastpath_read_done_event = None
        for layer in range(LAYERS):
            if self.counter is not None and "blind" not in self.scenario:
                self.counter.wait_until(layer)
            keys, values = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
            self.device.launch(lambda k=keys, v=values: (k.__setitem__(batch.out_cache_loc, batch.value),
                                                         v.__setitem__(batch.out_cache_loc, batch.value)))  # fmt: skip
        if "raise" in self.scenario and batch.value == 33.0:
            raise RuntimeError("the model failed")
        return SimpleNamespace()

    def barrier(self) -> None:
        """``Scheduler._apply_war_barrier`` itself."""
        worker = SimpleNamespace(last_shared_read_runner=self.runner, war_fastpath_runner=self.runner)
        Scheduler._apply_war_barrier(
            SimpleNamespace(
                _war_barrier_enabled=True,
                model_worker=worker,
                schedule_stream=self.schedule,
                forward_stream=self.forward,
            )
        )

    def acknowledge_writes(self) -> None:
        """What ``writing_check`` does with completed write-backs."""
        for ack in self.controller.ack_write_queue:
            ack.finish_event.synchronize()
        self.controller.ack_write_queue.clear()

    def content(self, slots: Any) -> list[float]:
        """What the pages of ``slots`` hold once everything has run; taken without any hook of ours."""
        return self.pool.k_buffer[0][slots].unique().tolist()

    def host_content(self, slots: Any) -> list[float]:
        """The same of host pages."""
        return self.host.kv_buffer[0, :, slots].unique().tolist()


class TreeEngine(Engine):
    """The same with SGLang's unified radix tree over its hybrid controller; pages of one slot, as its own kit has."""

    page = 1

    def _build(self) -> None:
        import sglang.srt.mem_cache.pool_host.common as host_memory
        from sglang.srt.server_args import set_global_server_args_for_scheduler
        from sglang.test.kits.unified_radix_cache import config, fixtures, mixins

        host_memory._cuda_host_register = host_memory._cuda_host_unregister = lambda *args, **kwargs: None
        fixtures.get_device = lambda: "cpu"
        kit = self.kit = mixins.UnifiedRadixCacheFixtures()
        kit.cfg = config.CacheConfig(
            page_size=1, components=(fixtures.ComponentType.FULL,), num_layers=LAYERS, kv_size=POOL, dtype=torch.float32
        )
        self.fixtures = fixtures
        self.cache, self.allocator, self.requests = fixtures.build_fixture(kit.cfg)
        settings = ServerArgs(
            model_path="dummy", page_size=1, device="cpu", hicache_io_backend="direct",
            hicache_mem_layout="layer_first", hicache_write_policy="write_through", enable_hierarchical_cache=True,
        )  # fmt: skip
        set_global_server_args_for_scheduler(settings)
        self.cache.init_hicache(settings, self.cache.cache_init_params)
        self.cache.load_back_threshold = 0
        self.pool = self.allocator.get_kvcache()
        self.controller = self.cache.cache_controller
        self.host = self.controller.storage_host_pool

    def insert(self, tokens: list[int], slots: Any) -> Any:
        """Put a finished request into the tree, which writes it through; returns its node."""
        from array import array

        from sglang.srt.mem_cache.base_prefix_cache import InsertParams

        key = self.fixtures.RadixKey(array("q", tokens))
        self.cache.insert(InsertParams(key=key, value=slots.clone(), priority=0))
        return self.fixtures.match_prefix(self.cache, tokens).last_device_node


# -- what happens ----------------------------------------------------------------------------------------------


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


def drafts(engine: Engine) -> dict[str, Any]:
    """A multi-layer draft writes its steps' pools by graphs; the second's pages are loaded back while one runs."""
    from sglang.srt.speculative import multi_layer_eagle_draft_extend_cuda_graph_runner as module

    module.fill_draft_extend_prepare_buffers = module.refresh_track_indices = lambda *_, **__: None
    one_graph, pools = "onegraph" in engine.scenario, [engine._pool() for _ in range(2)]
    made = vars(module)["OneGraph" * one_graph + "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"]
    steps = made.__new__(made)
    vars(steps).update(
        buffers=MagicMock(), captured_req_width=1, require_mlp_tp_gather=False, require_gathered_buffer=False,
        capture_bs=[1], num_front_tokens=0, seq_len_fill_value=1, draft_extend_attn_backend_list=[],
        prune_draft_extend_logits=True, runners=[],
    )  # fmt: skip
    batch: Any = None

    def replay(runners: list[Any], *_: Any) -> Any:
        for runner in runners:
            keys = runner.model_runner.token_to_kv_pool.k_buffer[0]
            engine.device.launch(partial(keys.__setitem__, batch.out_cache_loc, batch.value))
        return [MagicMock() for _ in runners] if one_graph else MagicMock()

    for number, pool in enumerate(pools):
        runner = module.MultiLayerEagleDraftExtendCudaGraphRunner.__new__(
            module.MultiLayerEagleDraftExtendCudaGraphRunner
        )
        model_runner = Runner(engine)
        model_runner.token_to_kv_pool, model_runner.model = pool, Absent()
        vars(runner).update(
            step=number, model_runner=model_runner, deepep_adapter=MagicMock(), buffers=steps.buffers,
            captured_req_width=1, metadata_captured_in_graph=True, forward_mode=None,
        )  # fmt: skip
        steps.runners.append(runner)
    for runner in steps.runners:
        replayed = steps.runners if one_graph else [runner]
        runner.backend = SimpleNamespace(replay=partial(replay, replayed))

    def launch(launched: Any) -> None:
        nonlocal batch
        batch = launched
        steps.prepare(MagicMock(**{**vars(batch), "spec_info": MagicMock()}))
        for step in range(2):
            steps.replay(step)

    engine.after_forward = launch
    a = engine.alloc(1)
    engine.round(a, 11.0).synchronize()
    host_pool = engine._host_pool(pools[1])
    host = host_pool.alloc(len(a))
    submit = engine.controller.l2_transfer_engine
    transfer = transfer_module.L2Transfer(host_pool, pools[1], host, a, is_draft=True)
    submit.submit_device_to_host([transfer]).finish_event.synchronize()
    engine.round(a, 22.0)
    if "fenced" in engine.scenario:
        engine.schedule.wait_stream(engine.forward)
    submit.submit_host_to_device([transfer], transfer_layer_id_max=LAYERS).finish_event.synchronize()
    engine.device.synchronize()
    return {"content": pools[1].k_buffer[0][a].unique().tolist(), "expected": [11.0]}


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


def published() -> Any:
    """The context SGLang's classes read their settings from, as each release publishes it."""
    options = {"device": "cpu", "page_size": PAGE}
    try:
        from sglang.test.test_utils import published_topology
    except ImportError:
        from sglang.srt.server_args import set_global_server_args_for_scheduler

        set_global_server_args_for_scheduler(ServerArgs(model_path="dummy", **options))
        return contextlib.nullcontext()
    return published_topology(enable_hierarchical_cache=True, hicache_io_backend="direct", **options)


def run(words: str) -> dict[str, Any]:
    """One scenario in this process."""
    if fault() == "disk":  # what a full disk says, to any file of this process
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    scenario = Scenario(words)
    action = next((fn for word, fn in ACTIONS.items() if word in scenario), loadback)
    with published():
        engine = (TreeEngine if action in (tree, retraction) else Engine)(scenario)
        if fault() == "ring":  # more than the smallest ring holds, and nobody reads it
            for _ in range(100):
                engine.device.Event().record()
        try:
            result = action(engine)
        except RuntimeError as error:
            if "raise" not in scenario:
                raise
            result = {"raised": f"{type(error).__name__}: {error}", "content": [], "expected": []}
    result["scenario"] = words
    for installed in install.INSTALLED:
        session = installed.session
        dropped = {} if session.ring is None else {str(why.name): n for why, n in session.ring.dropped.items()}
        session.close()
        result["calls"] = session.counters.calls
        result["errors"] = session.counters.errors
        result["fences_added"] = session.counters.fences_added
        result["missing"] = {name: found.value for name, found in installed.missing.items()}
        result["hooked"] = len(installed.hooked)
        result["unobservable"] = {hazard.value: reason for hazard, reason in session.missing.items()}
        result["off"] = session.off
        result["dropped"] = dropped
        result["ring"] = None if session.ring is None else str(session.ring.path)
    return result


def main(scenarios: list[str]) -> int:
    for words in scenarios:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            with os.fdopen(write, "w") as out:
                try:
                    json.dump(run(words), out)
                except BaseException as error:  # noqa: BLE001 the parent reports it
                    json.dump({"scenario": words, "error": "".join(traceback.format_exception(error))}, out)
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as answer:
            print(answer.read(), flush=True)
        os.waitpid(child, 0)
    return 0


def serve() -> None:
    """Answer requests: ``{"environ": {...}, "scenarios": [...], "stdout": PATH, "stderr": PATH}``, a line each.

    A request is run in a fork that has these variables and no others of ours; the answer is a line with its exit
    code, once it is over.
    """
    for line in sys.stdin:
        request = json.loads(line)
        child = os.fork()
        if child == 0:
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(request[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ.update(request["environ"])
            code = 70
            try:
                load()
                code = main(request["scenarios"])
            except BaseException:  # noqa: BLE001 whoever asked reads it
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        load()
        sys.exit(main(sys.argv[1:]))
