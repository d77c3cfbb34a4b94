"""The built-in program of ``hicache-obs explore``: the whole cache controller under a small workload. Imports torch.

It is the engine of ``hicache_obs.controller``, nothing faked: scheduler, radix cache, allocators, transfer engine,
layer events and fence policy, with acknowledgements taken by query, so that what the host does depends on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np

from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.workloads import Request
from hicache_obs.findings import Hazard
from hicache_obs.records import Mode, PageIds, device
from hicache_obs.streams.virtual import VirtualDevice
from hicache_obs.testing.protections import PROTECTIONS
from hicache_obs.testing.world import World

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
PAGES: Final = 6
_CONFIG: Final = EngineConfig(
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
ABSENT: Final = {
    Hazard.STORAGE_PREFETCH: "there is no storage tier",
    Hazard.RELOCATION: "pages are never moved",
    Hazard.GRAPH: "rounds are launched, not replayed",
    Hazard.LIFETIME: "the virtual device has no caching allocator",
    Hazard.RDMA: "nobody else reads or writes the pools",
    Hazard.TP_DIVERGENCE: "there is one rank",
}
"""Hazards this controller cannot have, and why."""


def requests(workload: Sequence[tuple[str, int]] = WORKLOAD) -> list[Request]:
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
        workload: As ``WORKLOAD``.
        pages: Of each pool.

    Attributes:
        requests: What it runs.
    """

    def __init__(
        self,
        fence: str = "page",
        off: Sequence[str] = (),
        *,
        workload: Sequence[tuple[str, int]] = WORKLOAD,
        pages: int = PAGES,
    ) -> None:
        self.requests: Final = requests(workload)
        self._config = replace(_CONFIG, fence=fence, device_pages=pages, host_pages=pages)
        self._off = tuple(off)
        self._expected = self._reference()
        self._ranges: dict[str, tuple[int, int]] = {}

    def __call__(self, world: World) -> None:
        """One run; AssertionError if it computed something wrong."""
        recorder = world.recorder
        recorder.define_engine("hicache-obs controller")
        recorder.define_pool("kv", self._config.layers)
        engine = build_engine(world.device, self._config, self.requests)

        def on_alloc(owner: int, pages: PageIds) -> None:
            recorder.page_alloc(owner, device(Mode.WRITE, pages))

        def on_free(owner: int, pages: PageIds) -> None:
            recorder.page_free(owner, device(Mode.WRITE, pages))

        engine.scheduler.on_alloc, engine.scheduler.on_free = on_alloc, on_free
        for name in self._off:
            PROTECTIONS[name].remove(engine)
        engine.run(self.requests)
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
        for name, count in counts.items():
            low, high = self._ranges.get(name, (count, count))
            self._ranges[name] = (min(low, count), max(high, count))

    def _reference(self) -> dict[int, list[int]]:
        """Tokens by request, of an engine that keeps nothing in host memory."""
        alone = replace(self._config, fence="stream", scheduler=replace(self._config.scheduler, host_tier=False))
        engine = build_engine(VirtualDevice("eager"), alone, self.requests)
        engine.run(self.requests)
        return engine.scheduler.outputs
