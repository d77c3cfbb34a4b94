"""Puts one engine together: pools, caches, controller, runner, scheduler, on any device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.blank import BlankRunner
from hicache_obs.controller.cache_controller import CacheController
from hicache_obs.controller.compaction import Compactor
from hicache_obs.controller.fence_policy import InFlight, fence_policy
from hicache_obs.controller.graph_rounds import GraphRunner
from hicache_obs.controller.host_threads import HostRecorder, HostThreads, NoRecorder, RealThreads
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import ModelRunner
from hicache_obs.controller.pattern import PatternRunner
from hicache_obs.controller.pools import DevicePool, HostPool, KVLayout
from hicache_obs.controller.radix_cache import RadixCache
from hicache_obs.controller.scheduler import Scheduler
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage import StorageTier
from hicache_obs.controller.storage_backend import StorageBackend, open_backend
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.storage_control import StorageControl
from hicache_obs.controller.storage_page import HostPageMemory
from hicache_obs.controller.transfer_engine import TransferEngine
from hicache_obs.controller.transformer import TransformerRunner
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError
from hicache_obs.recorder.recorded import RecordedDevice
from hicache_obs.streams.protocol import Device

RUNNERS: Final = ("transformer", "pattern", "blank")
MakeRunner: TypeAlias = Callable[[Device, DevicePool, ContentLedger], ModelRunner]
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
        kv: Form of the pools, one of ``FORMS``.
        host_layout: One of ``HOST_LAYOUTS``.
        io: Back end of the copies, one of ``IO_BACKENDS``; default: ``direct`` on a GPU, else ``kernel``.
        graphs: Replay captured graphs for the rounds in which every row adds one token.
        compact_every: Scheduler steps between two compactions of the device pool; 0: pages never move.
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
    if config.runner not in RUNNERS:
        raise ConfigError(f"--runner {config.runner}: unknown runner; expected one of {', '.join(RUNNERS)}")
    if config.runner != "pattern":
        if config.graphs:
            raise ConfigError(f"--graphs: --runner {config.runner} cannot be captured; expected --runner pattern")
        if config.kv not in ("mha", "mla"):
            raise ConfigError(f"--kv {config.kv}: --runner {config.runner} needs mha or mla; expected --runner pattern")

    largest = max((_pages(request, config.page_size) for request in requests), default=0)
    if largest > config.device_pages:
        raise ConfigError(
            f"--device-pages {config.device_pages}: the longest request needs {largest} pages; expected at least that"
        )

    def layout(pages: int) -> KVLayout:
        return KVLayout(config.layers, pages, config.page_size, config.heads, config.head_dim, form=config.kv)

    pool = DevicePool(layout(config.device_pages), device.torch_device)
    host = HostPool(layout(config.host_pages), pinned=device.name == "cuda", arrangement=config.host_layout)
    ledger = ContentLedger(config.layers, _tenancies(config, requests), device.torch_device)
    runner: ModelRunner
    if make_runner is not None:
        runner = make_runner(device, pool, ledger)
    elif config.runner == "transformer":
        runner = TransformerRunner(device, pool, ledger, seed=config.seed, vocabulary=config.vocabulary)
    elif config.runner == "blank":
        runner = BlankRunner(device, pool, ledger, vocabulary=config.vocabulary)
    else:
        kind = GraphRunner if config.graphs else PatternRunner
        runner = kind(device, pool, ledger, vocabulary=config.vocabulary)
    device_pages = PageAllocator(config.device_pages, name="device")
    in_flight = InFlight()
    radix = RadixCache(config.page_size, host_eviction=config.scheduler.host_eviction)
    policy = fence_policy(config.fence, device_pages, in_flight)
    backup_policy = None
    if config.write_fence is not None:
        backup_policy = fence_policy(config.write_fence, device_pages, in_flight, flag="--write-fence")
    transfers = TransferEngine(device, pool, host, io=config.io)
    controller = CacheController(device, transfers, radix, policy, backup_policy)
    host_pages = PageAllocator(config.host_pages, name="host")
    scheduler = Scheduler(runner, controller, radix, in_flight, device_pages, host_pages, ledger, config.scheduler)
    if config.storage is not None:
        recorder: HostRecorder = device.recorder if isinstance(device, RecordedDevice) else NoRecorder()
        tier = StorageTier(
            backend or open_backend(config.storage.url),
            HostPageMemory(host),
            threads or RealThreads(recorder),
            recorder,
            config.storage,
        )
        scheduler.use_storage(StorageControl(tier, radix, scheduler.backups, config.storage, config.namespace))
    compactor = Compactor(scheduler, config.compact_every) if config.compact_every else None
    if compactor is not None:
        scheduler.before_batch = compactor.step
    return Engine(scheduler, controller, runner, ledger, compactor)


def _tenancies(config: EngineConfig, requests: Sequence[Request]) -> int:
    pages = sum(_pages(request, config.page_size) for request in requests)
    return TENANCIES_PER_PAGE * (pages + config.device_pages) * (2 if config.compact_every else 1)


def _pages(request: Request, page_size: int) -> int:
    """Pages of a request that runs alone, its overrun row included."""
    return -(-(len(request.prompt) + request.output_length + 1) // page_size)
