"""The built-in program of ``hicache-obs explore``: the whole cache controller under a small workload. Imports torch.

It is the engine of ``hicache_obs.controller``, nothing faked: scheduler, radix cache, allocators, transfer engine,
layer events and fence policy, with acknowledgements taken by query, so that what the host does depends on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Final

import numpy as np

from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.watching import name_pools, watch_blocks
from hicache_obs.controller.workloads import Request
from hicache_obs.findings import Hazard
from hicache_obs.records import Mode, PageIds, device
from hicache_obs.streams.virtual import VirtualDevice
from hicache_obs.testing.memory_backend import MemoryBackend
from hicache_obs.testing.protections import PROTECTIONS, Protection
from hicache_obs.testing.world import World

Workload = Sequence[tuple[str, int]]
WORKLOAD: Final = (
    ("aabb", 1),
    ("aabbc", 1),
    ("aabbcc", 3),
    ("aadd", 2),
    ("aaeeff", 2),
    ("aaddx", 2),
    ("aagg", 1),
    ("aaggy", 2),
)
"""Prompts, one letter per token, and output lengths. A page holds two tokens: two requests barely fit the pool,
prefixes come back after they were evicted, and host pages are used again."""
GRAPH_WORKLOAD: Final = (
    ("aabbc", 1),
    ("ddeef", 1),
    ("gghhi", 1),
    ("aabbd", 2),
    ("ddeeg", 2),
    ("gghhj", 2),
    ("aabbx", 2),
    ("ddeez", 4),
)
"""Prompts that are restored but for their last token: rounds that consume a load-back and can be replayed."""
HYBRID_WORKLOAD: Final = (
    ("hhiijkl", 1),
    ("ooppqrstuvw", 1),
    ("vvwwxyzabcd", 2),
    ("aabbcdefg", 1),
    ("aabbcde", 2),
    ("hhiijklmn", 1),
    ("hhiij", 2),
    ("aabbcde", 2),
)
"""For hybrid pools of ``HYBRID_PAGES``. Found by a search: a tombstone is restored into a place that a round in flight
uses, for another page and another pool."""
HYBRID_PAGES: Final = 13
PAGES: Final = 6
EVICTIONS: Final = (("aabbccdd", 1), ("eeffgghhiijjkkll", 1), ("mmnnooppq", 1), ("aabbccddz", 2))
"""For 14 pages: the third prompt evicts the first, and the fourth restores it in the same step."""
EVICTIONS_PAGES: Final = 14
STORED: Final = (("aabbc", 1), ("ddeef", 1), ("gghhi", 1), ("jjkkl", 1)) * 2
"""For 4 pages of host memory: the second time all prompts are in storage only."""
STORED_HOST_PAGES: Final = 4
CONFIG: Final = EngineConfig(
    runner="pattern",
    fence="page",
    device_pages=PAGES,
    host_pages=PAGES,
    page_size=2,
    layers=2,
    heads=1,
    head_dim=1,
    vocabulary=64,
    seed=0,
    scheduler=SchedulerOptions(max_running=3, early_backup=True, poll_acks=True),
)
"""The engine that runs them, under policy ``page``."""
ABSENT: Final = {
    Hazard.STORAGE_PREFETCH: "there is no storage tier",
    Hazard.RELOCATION: "pages are moved with --off move-gate or move-wait only",
    Hazard.GRAPH: "rounds are replayed with --off graph-load-wait or graph-input-wait only",
    Hazard.RDMA: "nobody else reads or writes the pools",
    Hazard.TP_DIVERGENCE: "there is one rank",
}
"""Hazards this controller cannot have, and why; with a storage tier it can have the first."""


def workload_for(needs: Sequence[Protection], *, storage: bool = False) -> Workload:
    """A workload under which each of ``needs`` does something."""
    if storage:
        return STORED
    if any(need.evictions for need in needs):
        return EVICTIONS
    if any(need.engine.get("kv") for need in needs):
        return HYBRID_WORKLOAD
    return GRAPH_WORKLOAD if any(need.engine.get("graphs") for need in needs) else WORKLOAD


def engine_for(needs: Sequence[Protection], fence: str, *, storage: bool = False) -> EngineConfig:
    """An engine that has each of ``needs``, for ``workload_for`` them."""
    limits: dict[str, Any] = {}
    fields: dict[str, Any] = {}
    for need in needs:
        limits |= need.options
        fields |= need.engine
    pages = EVICTIONS_PAGES if any(need.evictions for need in needs) else HYBRID_PAGES if "kv" in fields else PAGES
    return replace(
        CONFIG,
        fence=fence,
        device_pages=pages,
        host_pages=STORED_HOST_PAGES if storage else pages,
        storage=StorageConfig("memory", prefetch="wait") if storage else None,
        scheduler=replace(CONFIG.scheduler, **limits),
        **fields,
    )


def requests(workload: Workload = WORKLOAD) -> list[Request]:
    """The workload as the scheduler takes it."""
    prompts = [np.array([ord(letter) - ord("a") for letter in prompt], np.int64) for prompt, _ in workload]
    return [
        Request(number, 0, prompt, output)
        for number, (prompt, (_, output)) in enumerate(zip(prompts, workload, strict=True))
    ]


class ControllerProgram:
    """A program for ``explore``: the engine runs the workload to its end.

    A run fails if a restored page was read with wrong contents, or a request's tokens are not those of an engine
    without a host tier: with a race that is possible, without one it must not happen.

    Args:
        fence: ``none``, ``stream`` or ``page``.
        off: Names in ``PROTECTIONS`` to take out.
        workload: As ``WORKLOAD``; the default depends on what is taken out, so that it is needed.
        pages: Of each pool; likewise.
        storage: With a storage tier, even if nothing that is taken out needs one.

    Attributes:
        requests: What it runs.
        possible: Hazards of ``ABSENT`` that it can have after all.
    """

    def __init__(
        self,
        fence: str = "page",
        off: Sequence[str] = (),
        *,
        workload: Workload | None = None,
        pages: int | None = None,
        storage: bool = False,
    ) -> None:
        needs = [PROTECTIONS[name] for name in off]
        storage = storage or any(need.storage for need in needs)
        config = engine_for(needs, fence, storage=storage)
        if pages is not None:
            config = replace(config, device_pages=pages, host_pages=config.host_pages if storage else pages)
        self._config = config
        self.requests: Final = requests(workload or workload_for(needs, storage=storage))
        self.possible: Final = frozenset({Hazard.STORAGE_PREFETCH}) if storage else frozenset()
        self._off = tuple(off)
        self._expected = self._reference()
        self._ranges: dict[str, tuple[int, int]] = {}

    def __call__(self, world: World) -> None:
        """One run; AssertionError if it computed something wrong."""
        recorder = world.recorder
        recorder.define_engine("hicache-obs controller")
        engine = build_engine(world.device, self._config, self.requests, threads=world, backend=MemoryBackend())

        def on_alloc(owner: int, pages: PageIds) -> None:
            recorder.page_alloc(owner, device(Mode.WRITE, pages))

        def on_free(owner: int, pages: PageIds) -> None:
            recorder.page_free(owner, device(Mode.WRITE, pages))

        name_pools(engine.controller.engine, recorder)
        watch_blocks(engine.controller.engine, recorder)
        engine.scheduler.on_alloc, engine.scheduler.on_free = on_alloc, on_free
        for name in self._off:
            PROTECTIONS[name].remove(engine)
        engine.run(self.requests)
        engine.close()
        self._count(engine)
        assert not len(engine.ledger.corrupted()), "restored pages were read with wrong contents"
        assert engine.scheduler.outputs == self._expected, "a request has other tokens than without a host tier"

    def ranges(self) -> dict[str, tuple[int, int]]:
        """Lowest and highest count of rounds, retractions, load-backs and write-backs, over all runs so far."""
        return dict(self._ranges)

    def _count(self, engine: Engine) -> None:
        scheduler, controller = engine.scheduler.counters, engine.controller.counters
        counts = {
            "rounds": scheduler.rounds,
            "retractions": scheduler.retractions,
            "load-backs": controller.load_backs,
            "write-backs": controller.write_backs,
        }
        if engine.scheduler.storage is not None:
            counts["pages from storage"] = engine.scheduler.storage.counters.prefetched_pages
        for name, count in counts.items():
            low, high = self._ranges.get(name, (count, count))
            self._ranges[name] = (min(low, count), max(high, count))

    def _reference(self) -> dict[int, list[int]]:
        """Tokens by request, of an engine that keeps nothing in host memory."""
        limits = replace(self._config.scheduler, host_tier=False)
        alone = replace(self._config, fence="stream", scheduler=limits, storage=None)
        engine = build_engine(VirtualDevice("eager"), alone, self.requests)
        engine.run(self.requests)
        return engine.scheduler.outputs
