"""Pools, controller and the scheduler's moves, of SGLang's own classes."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from functools import partial
from types import SimpleNamespace
from typing import Any

import sglang.srt.managers.cache_controller as controller_module
import torch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache.allocator import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.server_args import ServerArgs

from guest.devices import Deferred, TorchCpu

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

PAGE, LAYERS, POOL = 4, 3, 64
RESERVE = "HICACHE_HOST_MEMORY_RESERVE_BYTES"
"""What a host pool leaves free, 10 GiB: not on every machine that runs tests, and these pools are kilobytes."""
for module in [module for name, module in sys.modules.items() if name.startswith("sglang.srt.mem_cache")]:
    if hasattr(module, RESERVE):
        setattr(module, RESERVE, 0)


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


class Scenario:
    """What a scenario's words mean.

    ``base`` or ``hybrid`` controller; ``coarse`` or ``readdone`` barrier; ``loadfence``, ``writefence``: bound as
    that release's Scheduler binds them; ``deferred``: the virtual device; and what happens: ``loadback`` (default),
    ``writeback``, ``offload``, ``direct_backup``, ``direct_restore``, ``overlap_off``, ``storage``, ``tree``,
    ``retraction``, ``linker``, ``drafts`` (with ``onegraph``), ``raise``,
    ``kill``. The linker is Mooncake's, with ``umbp`` UMBP's, with ``foreign`` none of SGLang's; ``blind``: the forward
    does not wait for its layers.
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
