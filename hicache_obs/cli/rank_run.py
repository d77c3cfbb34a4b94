"""One rank of ``hicache-obs demo --tp N --pp M``: a check run of each fence policy, in a process of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from hicache_obs.agent import Follower, WatchedRing
from hicache_obs.analyzer.divergence import CollectiveOrder
from hicache_obs.cli.demo_run import DemoOptions, DemoRun, ModeResult
from hicache_obs.controller.decision_log import DecisionLog
from hicache_obs.controller.engine import Engine, MakeRunner, build_engine
from hicache_obs.controller.host_threads import HostThreads
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.pipeline import Connect, GlooLinks, StageLinks, StageRunner
from hicache_obs.controller.pools import DevicePool
from hicache_obs.controller.rank_group import Collectives, RankGrid, join, publish_requests
from hicache_obs.controller.rank_processes import Links
from hicache_obs.costs import Ignore
from hicache_obs.recorder.recorded import RecordedDevice
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.records import AnyRecord
from hicache_obs.streams.protocol import Device
from hicache_obs.trace import Names


@dataclass(frozen=True, slots=True)
class RankTask:
    """What one rank is told.

    Attributes:
        grid: Of all ranks.
        options: What to run; ``engine`` is the whole one. Only the first rank's has requests.
        reference: Tokens of the run without host tier, by request.
        folder: Where pipelines meet; of this run alone.
        timeout_s: How long to wait for another rank.
        off: Protections that are taken out.
    """

    grid: RankGrid
    options: DemoOptions
    reference: Mapping[int, list[int]]
    folder: Path
    timeout_s: float
    off: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RankResult:
    """What one rank did under one policy.

    Attributes:
        mode: As of the demo without ranks; without the cost run.
        order: Collectives it entered.
        decisions: Entries of the decision log.
        digest: Of the log's entries so far, all policies together.
        waited_ns: Time spent in the log.
    """

    mode: ModeResult
    order: CollectiveOrder
    decisions: int
    digest: str
    waited_ns: int


def run_rank(number: int, links: Links, task: RankTask, *, connect: Connect = GlooLinks) -> list[RankResult]:
    """Run rank ``number``; one result per policy. For ``RankProcesses``.

    Args:
        number, links, task: Which rank, what joins it with the others, and what to do.
        connect: Makes the links of its pipeline.

    Raises:
        RankError: Another rank has ended, is late, or has decided something else.
    """
    torch.set_num_threads(1)  # as in the process that started this one
    grid, rank = task.grid, task.grid.ranks[number]
    log = DecisionLog(grid.names, number, links, timeout_s=task.timeout_s)
    options = task.options
    requests = publish_requests(log, options.requests if number == 0 else None)
    make_runner: MakeRunner | None = None
    with ExitStack() as stack:
        if grid.pp > 1:
            stage_links = connect(task.folder / f"tp{rank.tp}", rank.pp, grid.pp, timeout_s=task.timeout_s)
            stack.callback(stage_links.close)
            make_runner = partial(_stage, task, number, stage_links)
        own = dataclasses.replace(
            options,
            requests=requests,
            engine=grid.config(options.engine, number),
            seed=options.seed + number,  # ranks share no clock and no scheduler of the operating system
        )
        run = RankRun(own, grid=grid, number=number, log=log, make_runner=make_runner, off=task.off)
        return [run.check(fence, task.reference) for fence in options.fences]


def _stage(
    task: RankTask, number: int, links: StageLinks, device: Device, pool: DevicePool, ledger: ContentLedger
) -> StageRunner:
    whole = task.options.engine
    stage = task.grid.stages(whole.layers)[task.grid.ranks[number].pp]
    return StageRunner(
        device,
        pool,
        ledger,
        stage=stage,
        links=links,
        layers=whole.layers,
        seed=whole.seed,
        vocabulary=whole.vocabulary,
    )


class _Follows(Ignore):
    """Gathers the collectives of one ring."""

    def __init__(self) -> None:
        self.order = CollectiveOrder()
        self._names = Names()

    def on_batch(self, records: Sequence[AnyRecord], *, last: bool) -> None:
        """See ``Follower.on_batch``."""
        self.order.feed(records, self._names)


class RankRun(DemoRun):
    """The check runs of one rank.

    Args:
        options: As of the demo, with the engine of this rank.
        grid, number: Which rank it is.
        log: What its peers enter too.
        make_runner: See ``build_engine``.
        off: ``decision-log``: decide alone.
    """

    def __init__(
        self,
        options: DemoOptions,
        *,
        grid: RankGrid,
        number: int,
        log: DecisionLog,
        make_runner: MakeRunner | None = None,
        off: Sequence[str] = (),
    ) -> None:
        super().__init__(options, progress=lambda name, done, total: None)
        self._rank, self._number = grid.ranks[number], number
        self._log = log
        self._decides = None if "decision-log" in off else log
        self._make_runner = make_runner
        self._collectives: Collectives | None = None
        self._follows = _Follows()

    def check(self, fence: str, reference: Mapping[int, list[int]]) -> RankResult:
        """The check run of one policy; all ranks begin together."""
        self._log.publish("policy", [self._options.fences.index(fence)] if self._number == 0 else None)
        decided, waited_ns = self._log.entries, self._log.waited_ns
        mode = self._check(fence, dict(reference))
        return RankResult(
            mode, self._follows.order, self._log.entries - decided, self._log.digest, self._log.waited_ns - waited_ns
        )

    def _build(self, observed: RecordedDevice, recorder: Recorder, fence: str, threads: HostThreads | None) -> Engine:
        engine = build_engine(
            observed, self._config(fence), self._options.requests, threads=threads, make_runner=self._make_runner
        )
        join(engine, self._decides)
        self._collectives = Collectives(recorder, self._number)
        self._collectives.watch(engine, self._decides)
        return engine

    def _ran(self) -> None:
        assert self._collectives is not None
        self._collectives.end()
        self._log.on_enter = None

    def _follow(self, ring: WatchedRing, fence: str, *, check: bool) -> Sequence[Follower]:
        self._follows = _Follows()
        return (self._follows,)
