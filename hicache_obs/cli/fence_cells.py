"""Runs the cells of ``hicache-obs bench-fences``: one engine each, on the virtual device; no printing here.

All cells of a setting (sizes and write policy) serve the same requests in the same rounds: the scheduler decides by
counting steps, never by time. So what two of them differ in is what their fence and their barrier do.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Final

from hicache_obs import __version__
from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import DEFINITE
from hicache_obs.cli.fence_tally import FenceTally, Quantiles
from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.pools import KVLayout
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.watching import watch_blocks
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError
from hicache_obs.findings import ExitCode, Verdict
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.recorded import RecordedDevice
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.records import AnyRecord, CaptureMode, DropReason, Mode, PageIds, device
from hicache_obs.streams.serving_cost import ServingCosts
from hicache_obs.streams.virtual import VirtualDevice
from hicache_obs.testing.memory_backend import MemoryBackend
from hicache_obs.testing.world import SeededThreads

LAYERS: Final = 4
"""Of the pool that stands for the model's; a load-back restores a quarter of the model at a time."""
CHUNK_TOKENS: Final = 8192
"""New tokens of one prefill round at most."""
POLL_RECORDS: Final = 1024
"""Records that are analysed at once."""


@dataclass(frozen=True, slots=True)
class Setting:
    """What cells have in common that are compared.

    Attributes:
        device_tokens: Size of the device pool.
        host_ratio: Size of the host pool, in device pools.
        page_size: Tokens per page.
        write_policy: As of ``SchedulerOptions``.
    """

    device_tokens: int
    host_ratio: int
    page_size: int
    write_policy: str


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes, in the order of the table; every value once."""

    device_tokens: tuple[int, ...]
    host_ratio: tuple[int, ...]
    page_size: tuple[int, ...]
    write_policy: tuple[str, ...]
    barrier: tuple[str, ...]
    fence: tuple[str, ...]

    def cells(self) -> Iterator[tuple[Setting, str, str]]:
        """Setting, barrier and fence of each cell."""
        settings = itertools.product(self.device_tokens, self.host_ratio, self.page_size, self.write_policy)
        for sizes, barrier, fence in itertools.product(settings, self.barrier, self.fence):
            yield Setting(*sizes), barrier, fence


@dataclass(frozen=True, slots=True)
class BenchOptions:
    """What to run.

    Attributes:
        requests: The workload, of full-sized tokens.
        clients: Requests in the system at any time: the next one comes when one has finished.
        costs: Of the model; what depends on the pool is filled in.
        storage: Whether there is a third tier, in memory: it holds everything and takes no time.
    """

    requests: Sequence[Request]
    clients: int
    costs: ServingCosts
    storage: bool = False


@dataclass(frozen=True, slots=True)
class Cell:
    """What one engine did.

    Attributes:
        setting, barrier, fence: Which one.
        rounds, restored_pages, retractions, output_tokens: As the engine counts them.
        admitted_tokens, device_hit_tokens, host_hit_tokens: Of its prompts.
        storage_hit_tokens: Those of the host's hits that came from storage for the request that hit.
        pairs_checked: Page pairs that the analyzer looked at.
        tally: Its findings and costs.
        restore: From the submission of a load-back, its fence included, to the end of its last copy.
        first_token: From the submission of a request to the handling of its first token.
        virtual_ns: Length of the run.
        lost: Records without which the analysis is incomplete.
    """

    setting: Setting
    barrier: str
    fence: str
    rounds: int
    restored_pages: int
    retractions: int
    output_tokens: int
    admitted_tokens: int
    device_hit_tokens: int
    host_hit_tokens: int
    storage_hit_tokens: int
    pairs_checked: int
    tally: FenceTally
    restore: Quantiles
    first_token: Quantiles
    virtual_ns: int
    lost: int

    @property
    def clean(self) -> bool:
        """Whether everything is in proven order."""
        return self.code is ExitCode.CLEAN and not self.tally.count(DEFINITE)

    @property
    def code(self) -> ExitCode:
        """Races are expected without fences, and only there."""
        surprising = (Verdict.CONTRADICTION,) if self.fence == "none" else DEFINITE
        if self.tally.count(surprising):
            return ExitCode.FINDINGS
        if not self.restored_pages or not self.pairs_checked or self.lost or self.tally.verdicts[Verdict.UNKNOWN]:
            return ExitCode.NOTHING_CHECKED
        return ExitCode.CLEAN


def run_cell(
    setting: Setting, barrier: str, fence: str, options: BenchOptions, progress: Callable[[int], None]
) -> Cell:
    """Serve all requests once. ``progress`` is told how many have finished.

    Raises:
        ConfigError: The device pool is too small for a request, or a pool for this machine.
    """
    config = _config(setting, barrier, fence, options)
    layout = KVLayout(config.layers, 1, setting.page_size, config.heads, config.head_dim)
    costs = _fitted(options.costs, layout)
    bare = VirtualDevice("asap", cost=costs)
    tally = FenceTally()
    analyzer = Analyzer(tally)
    sink = _LiveSink()
    recorder = Recorder(sink, clock=bare.host_ns, ranges=NoRanges())
    recorder.define_engine(f"hicache-obs {__version__}")
    recorder.define_pool("kv", config.layers)
    threads = SeededThreads(recorder, 0)
    engine = build_engine(
        RecordedDevice(bare, recorder), config, options.requests, threads=threads, backend=MemoryBackend()
    )
    watch_blocks(engine.controller.engine, recorder)
    _watch_pages(engine, recorder)

    def analyse(least: int) -> None:
        recorder.resolve()
        if len(sink.records) >= least:
            analyzer.feed(sink.records)
            sink.records.clear()
            progress(engine.scheduler.counters.finished)

    with closing(threads):
        _serve(engine, options, lambda: analyse(POLL_RECORDS))
        engine.close()
    virtual_ns = bare.host_ns()
    bare.close()
    analyse(0)
    analyzer.finish()
    counters, storage = engine.scheduler.counters, engine.scheduler.storage
    return Cell(
        setting=setting,
        barrier=barrier,
        fence=fence,
        rounds=counters.rounds,
        restored_pages=engine.controller.counters.restored_pages,
        retractions=counters.retractions,
        output_tokens=counters.output_tokens,
        admitted_tokens=counters.admitted_tokens,
        device_hit_tokens=counters.device_hit_tokens,
        host_hit_tokens=counters.host_hit_tokens,
        storage_hit_tokens=0 if storage is None else storage.counters.hit_tokens,
        pairs_checked=analyzer.totals.lookups,
        tally=tally,
        restore=Quantiles.of(tally.restores_ns),
        first_token=Quantiles.of(list(engine.scheduler.first_token_ns.values())),
        virtual_ns=virtual_ns,
        lost=sum(tally.lost.values()) + sink.dropped + recorder.counters.errors,
    )


def check_sizes(grid: Grid, requests: Sequence[Request]) -> None:
    """ConfigError for a device pool that the longest request does not fit, before anything runs."""
    longest = max(len(request.prompt) + request.output_length + 1 for request in requests)
    for tokens, page in itertools.product(grid.device_tokens, grid.page_size):
        need = -(-longest // page) * page
        if tokens // page * page < need:
            raise ConfigError(
                f"--device-tokens {tokens}: the longest request needs {need} tokens in pages of {page}; "
                "expected at least that"
            )


def _config(setting: Setting, barrier: str, fence: str, options: BenchOptions) -> EngineConfig:
    pages = setting.device_tokens // setting.page_size
    return EngineConfig(
        runner="blank",
        fence=fence,
        device_pages=pages,
        host_pages=pages * setting.host_ratio,
        page_size=setting.page_size,
        layers=LAYERS,
        heads=1,
        head_dim=1,
        vocabulary=512,
        seed=0,
        storage=StorageConfig("memory", prefetch="wait") if options.storage else None,
        scheduler=SchedulerOptions(
            max_running=options.clients,
            max_extend_tokens=max(CHUNK_TOKENS, setting.page_size),
            chunked_prefill=True,
            write_policy=setting.write_policy,
            barrier=barrier,
        ),
    )


def _fitted(costs: ServingCosts, layout: KVLayout) -> ServingCosts:
    """``costs`` for the pool that stands for the model's."""
    return replace(costs, pool_token_bytes=layout.page_bytes // layout.page_size, layers=layout.layers)


def _watch_pages(engine: Engine, recorder: Recorder) -> None:
    """Record who owns pages, as an engine under observation does."""

    def on_alloc(owner: int, pages: PageIds) -> None:
        recorder.page_alloc(owner, device(Mode.WRITE, pages))

    def on_free(owner: int, pages: PageIds) -> None:
        recorder.page_free(owner, device(Mode.WRITE, pages))

    scheduler = engine.scheduler
    scheduler.on_alloc, scheduler.on_free, scheduler.on_discard = on_alloc, on_free, recorder.rows_discarded


def _serve(engine: Engine, options: BenchOptions, after_step: Callable[[], None]) -> None:
    """Closed loop: ``clients`` requests are in the system as long as there are so many."""
    scheduler, coming = engine.scheduler, deque(options.requests)
    submitted = 0
    while coming or not scheduler.done:
        while coming and submitted - scheduler.counters.finished < options.clients:
            scheduler.submit([coming.popleft()])
            submitted += 1
        scheduler.step()
        after_step()
    scheduler.drain()
    scheduler.runner.device.synchronize()


class _LiveSink:
    """A ``RecordSink`` for an analysis in the same thread: records stay here for a moment."""

    writable: Final = True
    mode: Final = CaptureMode.OBSERVE

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []
        self.dropped = 0

    def append(self, record: AnyRecord) -> bool:
        """See ``RecordSink.append``."""
        self.records.append(record)
        return True

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """See ``RecordSink.drop``."""
        self.dropped += count

    def beat(self, host_ns: int) -> None:
        """Nobody watches."""
