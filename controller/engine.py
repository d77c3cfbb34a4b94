"""Puts one engine together: pools, caches, controller, runner, scheduler, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeAlias

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.blank import BlankRunner
from hicache_obs.controller.cache_controller import CacheController
from hicache_obs.controller.cache_pools import HYBRIDS, KV_LAYOUTS, CachePools, PoolShape, open_pools
from hicache_obs.controller.compaction import Compactor
from hicache_obs.controller.fence_policy import InFlight, fence_policy
from hicache_obs.controller.graph_rounds import GraphRunner
from hicache_obs.controller.host_threads import HostRecorder, HostThreads, NoRecorder, RealThreads
from hicache_obs.controller.hybrid_controller import HybridCacheController
from hicache_obs.controller.hybrid_pattern import HybridPatternRunner
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import ModelRunner
from hicache_obs.controller.pattern import PatternRunner
from hicache_obs.controller.pools import FORMS, KVLayout, RoundPool
from hicache_obs.controller.radix_cache import RadixCache
from hicache_obs.controller.scheduler import Scheduler
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage import StorageTier
from hicache_obs.controller.storage_backend import StorageBackend, open_backend
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.storage_control import StorageControl
from hicache_obs.controller.storage_page import HostPageMemory
from hicache_obs.controller.transformer import TransformerRunner
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError
from hicache_obs.recorder.recorded import RecordedDevice
from hicache_obs.streams.protocol import Device

RUNNERS: Final = ("transformer", "pattern", "blank")
MakeRunner: TypeAlias = Callable[[Device, RoundPool, ContentLedger], ModelRunner]
TENANCIES_PER_PAGE: Final = 8
"""Ledger room: each page a workload needs may be allocated this often, by restores and retractions."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Everything that shapes an engine.

    Attributes:
        runner: ``transformer``, ``pattern``, or ``blank``, which computes nothing.
        fence: Policy of both directions: ``none``, ``stream`` or ``page``.
        write_fence: Policy of write-backs, and of whoever overwrites what one of them reads; ``None``: ``fence``.
        device_pages, host_pages: Pool sizes.
        page_size: Tokens per page; a workload block is one page.
        layers, heads, head_dim: Shape of the pools and the model.
        vocabulary: Token ids are ``0 … vocabulary - 1``.
        seed: Of the model's weights.
        scheduler: Limits of the scheduler; ``host_tier`` off gives the reference run.
        storage: The third tier; ``None`` for none.
        kv: Form of the pools, or which pools there are: one of ``KV_LAYOUTS``.
        host_layout: One of ``HOST_LAYOUTS``.
        io: Back end of the copies, one of ``IO_BACKENDS``; default: ``direct`` on a GPU, else ``kernel``.
        graphs: Replay captured graphs for the rounds in which every row adds one token.
        compact_every: Scheduler steps between two compactions of the device pool; 0: pages never move.
        window, window_pages: Of a hybrid: as in ``PoolShape``.
    """

    runner: str
    fence: str
    device_pages: int
    host_pages: int
    page_size: int
    layers: int
    heads: int
    head_dim: int
    vocabulary: int
    seed: int
    scheduler: SchedulerOptions
    write_fence: str | None = None
    storage: StorageConfig | None = None
    kv: str = "mha"
    host_layout: str = "layer-first"
    io: str | None = None
    graphs: bool = False
    compact_every: int = 0
    window: int = 0
    window_pages: int = 0

    @property
    def namespace(self) -> str:
        """Names everything that page contents depend on, but for the tokens."""
        shape = (self.layers, self.heads, self.head_dim, self.page_size, self.vocabulary, self.seed)
        form = "" if self.kv == "mha" else f" {self.kv}"
        return f"{self.runner} {' '.join(map(str, shape))}{form}"


@dataclass(eq=False)
class Engine:
    """One engine, ready to run.

    Attributes:
        scheduler, controller, runner, ledger: Its parts that callers look at.
        compactor: Moves pages; ``None`` if they never move.
    """

    scheduler: Scheduler
    controller: CacheController
    runner: ModelRunner
    ledger: ContentLedger
    compactor: Compactor | None = None

    def run(self, requests: Sequence[Request], *, after_step: Callable[[], None] | None = None) -> None:
        """Run ``requests`` to completion; blocks. ``after_step`` is called after every scheduler step.

        Afterwards everything submitted is acknowledged and the device is idle.
        """
        self.scheduler.submit(requests)
        while not self.scheduler.done:
            self.scheduler.step()
            if after_step is not None:
                after_step()
        self.scheduler.drain()
        self.scheduler.runner.device.synchronize()
        if after_step is not None:
            after_step()

    def close(self) -> None:
        """End the storage threads, after what is queued for them. Blocks for a while at most; idempotent."""
        if self.scheduler.storage is not None:
            self.scheduler.storage.close()


def build_engine(
    device: Device,
    config: EngineConfig,
    requests: Sequence[Request],
    *,
    threads: HostThreads | None = None,
    backend: StorageBackend | None = None,
    make_runner: MakeRunner | None = None,
) -> Engine:
    """An engine on ``device`` sized for ``requests``. With storage it has threads, and must be closed.

    Args:
        threads: Makes the storage threads; default ``RealThreads``.
        backend: Used instead of the one that ``config.storage.url`` names.
        make_runner: Makes a runner that ``config.runner`` cannot, such as one stage of a model.

    Raises:
        ConfigError: An unknown runner or policy, a pool larger than memory, or one too small for a request.
    """
    _check(config)
    largest = max((_pages(request, config.page_size) for request in requests), default=0)
    if largest > config.device_pages:
        raise ConfigError(
            f"--device-pages {config.device_pages}: the longest request needs {largest} pages; expected at least that"
        )

    pools = open_pools(device, _shape(config, largest))
    ledger = ContentLedger(config.layers, _tenancies(config, requests), device.torch_device)
    runner = (make_runner or _runner(config))(device, pools.rounds, ledger)
    in_flight = InFlight()
    radix = RadixCache(config.page_size, host_eviction=config.scheduler.host_eviction)
    controller = _controller(device, config, pools, radix, in_flight)
    host_pages = PageAllocator(config.host_pages, name="host")
    scheduler = Scheduler(
        runner,
        controller,
        radix,
        in_flight,
        pools.device_pages,
        host_pages,
        ledger,
        config.scheduler,
        pools.partial,
    )
    if config.storage is not None:
        recorder: HostRecorder = device.recorder if isinstance(device, RecordedDevice) else NoRecorder()
        tier = StorageTier(
            backend or open_backend(config.storage.url),
            HostPageMemory(pools.host),
            threads or RealThreads(recorder),
            recorder,
            config.storage,
        )
        scheduler.use_storage(StorageControl(tier, radix, scheduler.backups, config.storage, config.namespace))
    compactor = Compactor(scheduler, config.compact_every) if config.compact_every else None
    if compactor is not None:
        scheduler.before_batch = compactor.step
    return Engine(scheduler, controller, runner, ledger, compactor)


def _runner(config: EngineConfig) -> MakeRunner:
    if config.runner == "transformer":
        return partial(TransformerRunner, seed=config.seed, vocabulary=config.vocabulary)
    kind: type[BlankRunner] | type[PatternRunner] = BlankRunner
    if config.runner == "pattern":
        kind = GraphRunner if config.graphs else HybridPatternRunner if config.kv in HYBRIDS else PatternRunner
    return partial(kind, vocabulary=config.vocabulary)


def _controller(
    device: Device, config: EngineConfig, pools: CachePools, radix: RadixCache, in_flight: InFlight
) -> CacheController:
    policy = fence_policy(config.fence, pools.uses, in_flight)
    backup_policy = None
    if config.write_fence is not None:
        backup_policy = fence_policy(config.write_fence, pools.uses, in_flight, flag="--write-fence")
    if config.kv not in HYBRIDS:
        return CacheController(device, pools.transfers, radix, policy, backup_policy)
    # Policy none leaves transfers unfenced, not tables: they are metadata, like index tensors.
    table_fence = "page" if config.fence == "none" else config.fence
    tables = [pool.translation.entries_used for pool in pools.partial.pools]
    controller = HybridCacheController(
        device,
        pools.transfers,
        radix,
        policy,
        backup_policy,
        partial_pools=pools.partial,
        table_policies=[fence_policy(table_fence, uses, in_flight) for uses in tables],
    )
    pools.partial.load_parts = controller.load_parts
    return controller


def _check(config: EngineConfig) -> None:
    """ConfigError unless the parts go together."""
    if config.runner not in RUNNERS:
        raise ConfigError(f"--runner {config.runner}: unknown runner; expected one of {', '.join(RUNNERS)}")
    if config.kv not in KV_LAYOUTS:
        raise ConfigError(f"--kv {config.kv}: unknown; expected one of {', '.join(KV_LAYOUTS)}")
    if config.runner != "pattern":
        if config.graphs:
            raise ConfigError(f"--graphs: --runner {config.runner} cannot be captured; expected --runner pattern")
        if config.kv == "fp8":
            others = ", ".join(kv for kv in KV_LAYOUTS if kv != "fp8")
            raise ConfigError(f"--kv fp8: --runner {config.runner} needs one of {others}; expected --runner pattern")
    if config.kv in HYBRIDS:
        for flag, asked in (
            ("--graphs", config.graphs),
            ("--compact-every", config.compact_every),
            ("--storage", config.storage is not None),
        ):
            if asked:
                raise ConfigError(f"{flag}: not with --kv {config.kv}; expected one of {', '.join(FORMS)}")


def _shape(config: EngineConfig, longest: int) -> PoolShape:
    form = "mha" if config.kv in HYBRIDS else config.kv
    pages = config.device_pages
    return PoolShape(
        layout=KVLayout(config.layers, pages, config.page_size, config.heads, config.head_dim, form=form),
        kv=config.kv,
        host_pages=config.host_pages,
        arrangement=config.host_layout,
        io=config.io,
        window=config.window,
        window_pages=config.window_pages,
        longest=longest,
        rows=config.scheduler.max_running,
    )


def _tenancies(config: EngineConfig, requests: Sequence[Request]) -> int:
    pages = sum(_pages(request, config.page_size) for request in requests)
    return TENANCIES_PER_PAGE * (pages + config.device_pages) * (2 if config.compact_every else 1)


def _pages(request: Request, page_size: int) -> int:
    """Pages of a request that runs alone, its overrun row included."""
    return -(-(len(request.prompt) + request.output_length + 1) // page_size)
