"""Runs one workload under several fence policies and says what each did; no printing here.

Each policy runs twice on the same requests: a *check* run, in which a gate (or, on the virtual device, the
schedule) makes a missing fence strike, gives findings and contents; a *cost* run without gate (``asap`` on the
virtual device) gives waits and throughput. A run without host tier gives the reference tokens.
"""

from __future__ import annotations

import dataclasses
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from hicache_obs import __version__
from hicache_obs.agent import Agent, Fanout, Follower, RankPipeline, WatchedRing
from hicache_obs.agent.sampling import Coverage
from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Defect, Tally
from hicache_obs.cli.demo_journal import DemoJournal
from hicache_obs.cli.lineage import ExplainingTally, Lineage
from hicache_obs.cli.outputs import Outputs, made_up_traceparent
from hicache_obs.config import read_setting
from hicache_obs.controller.cache_controller import SubmittedTransfer
from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.gate import WriterGate
from hicache_obs.controller.host_threads import HostThreads
from hicache_obs.controller.watching import name_pools, watch_blocks
from hicache_obs.controller.workloads import Request
from hicache_obs.costs import AnalysisSink
from hicache_obs.exporters.catalogue import Phase, RingProblem
from hicache_obs.exporters.findings_board import FindingsBoard
from hicache_obs.exporters.metrics_sink import MetricsSink
from hicache_obs.exporters.prometheus import ONLY_RANK, Metrics
from hicache_obs.findings import ExitCode, Hazard, Verdict, worst
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.readers.ring import RingReader
from hicache_obs.recorder.recorded import RecordedDevice
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.records import DefineSpace, Mode, PageIds, device
from hicache_obs.streams import CostModel, open_device
from hicache_obs.streams.protocol import Device
from hicache_obs.testing.world import SeededThreads

REFERENCE: Final = "no host tier"
ENGINE: Final = f"hicache-obs {__version__}"
VIRTUAL_COSTS: Final = CostModel(kernel_bytes_per_s=3_000_000_000, copy_bytes_per_s=1_000_000_000)
"""The small model's bytes stand for a large model's: a decode round takes about 0.4 ms, a load-back as long."""
OBSERVABLE: Final = (
    Hazard.WAW_FORWARD_RESTORE,
    Hazard.WAR_FORWARD_RESTORE,
    Hazard.RAW_RESTORE_FORWARD,
    Hazard.RAW_FORWARD_BACKUP,
    Hazard.WAR_BACKUP_FORWARD,
    Hazard.HOST_REUSE,
    Hazard.METADATA_WAR,
    Hazard.LIFETIME,
    Hazard.OTHER,
)
"""What this engine's records can show: pages, index buffers and who owns them."""
Progress = Callable[[str, int, int], None]
"""``progress(run, finished_requests, all_requests)``."""


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What to run.

    Attributes:
        fences: Policies, in order.
        device: ``cuda``, ``threads`` or ``virtual``.
        schedule, seed: Of the virtual device; the seed also makes the weights.
        engine: Shape of the engine; its ``fence`` is replaced by each policy.
        requests: The workload.
        journal: Directory for the journals of the check runs, one folder per policy.
    """

    fences: tuple[str, ...]
    device: str
    schedule: str
    seed: int
    engine: EngineConfig
    requests: Sequence[Request]
    journal: Path | None = None


@dataclass(slots=True)
class ModeResult:
    """What one fence policy did.

    Attributes:
        fence: The policy.
        rounds, restored_pages, retractions: Of the check run.
        pages_checked, pairs_checked: Restored pages looked up; those of them with an earlier access.
        tally: Findings of the check run.
        corrupted_pages: Restored pages whose contents were wrong when a round read them.
        unexplained_pages: Those of them that no finding covers.
        wrong_requests: Requests whose tokens differ from the run without host tier.
        cost: Fence costs, of the cost run.
        seconds, output_tokens: Of the cost run, for the throughput.
        lost: Records lost in either run.
        journal_problem: Why the journal of the check run is incomplete, empty if it is not.
    """

    fence: str
    rounds: int
    restored_pages: int
    retractions: int
    pages_checked: int
    pairs_checked: int
    tally: Tally
    corrupted_pages: int
    unexplained_pages: int
    wrong_requests: int
    cost: Tally = field(default_factory=Tally)
    seconds: float = 0.0
    output_tokens: int = 0
    lost: int = 0
    journal_problem: str = ""

    def verdicts(self, verdict: Verdict) -> int:
        """Operation pairs with this verdict."""
        return self.tally.verdicts[verdict]

    def as_json(self) -> dict[str, Any]:
        """The documented JSON entry."""
        return {
            "fence": self.fence,
            "fences": self.cost.fences,
            "fences_without_conflict": self.cost.fences - self.cost.fences_in_flight,
            "rounds": self.rounds,
            "retractions": self.retractions,
            "restored_pages": self.restored_pages,
            "pages_checked": self.pages_checked,
            "pairs_checked": self.pairs_checked,
            "violations": self.verdicts(Verdict.VIOLATION),
            "latent": self.verdicts(Verdict.LATENT),
            "contradictions": self.verdicts(Verdict.CONTRADICTION),
            "unknown": self.verdicts(Verdict.UNKNOWN),
            "corrupted_pages": self.corrupted_pages,
            "unexplained_pages": self.unexplained_pages,
            "wrong_requests": self.wrong_requests,
            "fence_wait_ms_p50": self.cost.fence_wait_ns(0.5) / 1e6,
            "fence_wait_ms_p99": self.cost.fence_wait_ns(0.99) / 1e6,
            "avoidable_ms": self.cost.avoidable_ns / 1e6,
            "lost_records": self.lost,
            "findings": [
                {
                    "fingerprint": name,
                    "hazard": defect.example.hazard.value,
                    "verdict": verdict.value,
                    "count": count,
                }
                for name, defect in sorted(self.tally.defects.items())
                for verdict, count in sorted(defect.verdicts.items())
            ],
        }

    def first(self) -> Defect | None:
        """The defect to show, ``None`` without findings."""
        return next(iter(self.tally.by_severity()), None)

    def exit_code(self, accepts: Callable[[str], bool] = lambda _: False) -> ExitCode:
        """Findings are expected without fences, and only there; wrong contents always need a finding.

        Args:
            accepts: Whether findings of a fingerprint are expected elsewhere, too. Wrong contents never are.
        """
        if not self.pairs_checked or self.lost or self.verdicts(Verdict.UNKNOWN):
            return ExitCode.NOTHING_CHECKED
        surprising = self.unexplained_pages + self.tally.unexpected(accepts, (Verdict.CONTRADICTION,))
        if self.fence != "none":
            surprising += self.tally.unexpected(accepts) + self.corrupted_pages + self.wrong_requests
        return ExitCode.FINDINGS if surprising else ExitCode.CLEAN


class DemoRun:
    """Runs the modes of one demo.

    Args:
        options: What to run.
        progress: Told how far each run is.
        metrics: Fed live: findings and checks from check runs, fence and transfer costs from cost runs, and what
            watching costs from both.
        board: Gets the findings of the check runs.
        outputs: Findings of the check runs, and spans of all runs, go there as well.

    Raises:
        ConfigError: A setting in the environment is not allowed.
    """

    def __init__(
        self,
        options: DemoOptions,
        *,
        progress: Progress,
        metrics: Metrics | None = None,
        board: FindingsBoard | None = None,
        outputs: Outputs | None = None,
    ) -> None:
        self._options = options
        self._progress = progress
        self._rank, self._number = ONLY_RANK, 0
        self._metrics = metrics
        self._journal_problem = ""
        self._board = FindingsBoard() if board is None else board
        self._outputs = outputs
        self._coverage = Coverage()
        self._next_op = 0
        """Runs go on counting: a profile of the process holds every operation id once."""
        self._ring_slots = read_setting("ring_slots")[0]
        self._arena_ids = read_setting("arena_ids")[0]
        self._poll_s = read_setting("poll_ms")[0] / 1e3
        if metrics is not None:
            storage = () if options.engine.storage is None else (Hazard.STORAGE_PREFETCH,)
            metrics.set_observable((*OBSERVABLE, *storage))

    def reference(self) -> dict[int, list[int]]:
        """Output tokens of the run without host tier, by request id. Nothing is recorded."""
        options = self._options
        limits = dataclasses.replace(options.engine.scheduler, host_tier=False)
        config = dataclasses.replace(options.engine, fence="stream", scheduler=limits, storage=None)
        with self._device("asap") as bare:
            engine = build_engine(bare, config, options.requests)
            self._run(engine, REFERENCE)
        return engine.scheduler.outputs

    def mode(self, fence: str, reference: dict[int, list[int]]) -> ModeResult:
        """Check run and cost run of one policy."""
        result = self._check(fence, reference)
        self._measure(fence, result)
        return result

    def _check(self, fence: str, reference: dict[int, list[int]]) -> ModeResult:
        self._journal_problem = ""
        lineage = Lineage()
        tally = ExplainingTally(lineage)
        sinks = [tally, *self._metrics_sinks(findings=True)]
        with self._observed(fence, self._options.schedule, sinks, journal=True) as (engine, agent, analyzer):
            gate = WriterGate(engine.scheduler)

            def on_transfer(transfer: SubmittedTransfer) -> None:
                gate.on_transfer(transfer)
                lineage.on_transfer(transfer, engine.controller.engine)

            engine.controller.on_transfer, engine.scheduler.on_move = on_transfer, lineage.on_move
            self._run(engine, f"{fence}: check", agent)
        corrupted = engine.ledger.corrupted().tolist()
        restored = engine.scheduler.restored
        explained = [lineage.explains(restored[t].step, restored[t].device_page) for t in corrupted]
        outputs = engine.scheduler.outputs
        return ModeResult(
            fence=fence,
            rounds=engine.scheduler.counters.rounds,
            restored_pages=engine.controller.counters.restored_pages,
            retractions=engine.scheduler.counters.retractions,
            pages_checked=analyzer.totals.pages_checked,
            pairs_checked=analyzer.totals.pairs_checked,
            tally=tally,
            corrupted_pages=len(corrupted),
            unexplained_pages=explained.count(False),
            wrong_requests=sum(outputs[request] != tokens for request, tokens in reference.items()),
            lost=sum(tally.lost.values()),
            journal_problem=self._journal_problem,
        )

    def _measure(self, fence: str, result: ModeResult) -> None:
        sinks = [result.cost, *self._metrics_sinks(findings=False)]
        with self._observed(fence, "asap", sinks, journal=False) as (engine, agent, _):
            clock = engine.runner.device.host_ns
            start = clock()
            self._run(engine, f"{fence}: cost", agent)
            result.seconds = (clock() - start) / 1e9
        result.output_tokens = engine.scheduler.counters.output_tokens
        result.lost += sum(result.cost.lost.values())

    def _metrics_sinks(self, *, findings: bool) -> list[AnalysisSink]:
        if self._metrics is None:
            return []
        accepts = self._outputs.accepted.covers if self._outputs is not None else lambda _: False
        return [MetricsSink(self._metrics, findings=findings, costs=not findings, accepts=accepts)]

    def _run(self, engine: Engine, name: str, agent: Agent | None = None) -> None:
        total = len(self._options.requests)
        inline = agent is not None and self._options.device == "virtual"

        def after_step() -> None:
            self._progress(name, engine.scheduler.counters.finished, total)
            if agent is not None and inline:
                agent.poll()

        if agent is not None and not inline:
            agent.start()
        engine.run(self._options.requests, after_step=after_step)
        self._ran()
        engine.close()
        if agent is not None:
            agent.finish()

    def _ran(self) -> None:
        """The engine has made its last round."""

    @contextmanager
    def _device(self, schedule: str) -> Iterator[Device]:
        bare = open_device(self._options.device, schedule=schedule, seed=self._options.seed, cost=VIRTUAL_COSTS)
        try:
            yield bare
        finally:
            bare.close()

    @contextmanager
    def _observed(
        self, fence: str, schedule: str, sinks: Sequence[AnalysisSink], *, journal: bool
    ) -> Iterator[tuple[Engine, Agent, Analyzer]]:
        """An engine whose streams are recorded, and the agent that analyses them.

        Args:
            journal: It is the run that is judged: its records are kept if asked for, and its findings shown.
        """
        options = self._options
        with self._device(schedule) as bare, tempfile.TemporaryDirectory(prefix="hicache-obs-") as folder:
            sizes: dict[str, Any] = {"slots": self._ring_slots, "arena_words": self._arena_ids}
            ring = create_ring("demo", self._rank, directory=folder, clock=bare.host_ns, **sizes)
            recorder = Recorder(ring, clock=bare.host_ns, first_op=self._next_op)
            recorder.define_engine(ENGINE)
            observed = RecordedDevice(bare, recorder)
            threads = SeededThreads(recorder, options.seed) if options.device == "virtual" else None
            engine = self._build(observed, recorder, fence, threads)
            name_pools(engine.controller.engine, recorder)
            watch_blocks(engine.controller.engine, recorder)
            engine.scheduler.on_alloc = self._on_alloc(recorder, fence)
            engine.scheduler.on_discard = recorder.rows_discarded
            engine.scheduler.on_free = lambda owner, pages: recorder.page_free(owner, device(Mode.WRITE, pages))
            fanout = Fanout()
            analyzer = Analyzer(fanout)
            shown = self._board.sink(ONLY_RANK, analyzer)
            kept = options.journal / fence if journal and options.journal is not None else None
            writer = None
            if kept is not None:
                writer = DemoJournal(JournalWriter(kept, rank=self._number, engine=ENGINE), self._journal_failed)
            reader = RingReader(ring.path)
            followers = self._follow(WatchedRing(ring.path, reader.info, analyzer, kept), fence, check=journal)
            fanout.listen([*sinks, *([shown] if journal else []), *followers])
            agent = Agent(
                RankPipeline(reader, analyzer, journal=writer, followers=followers),
                resolve=recorder.resolve,
                period_s=self._poll_s,
                on_spent=self._account(recorder, bare, analyzer),
            )
            self._show_ring(reader, running=True)
            try:
                yield engine, agent, analyzer
                shown.refresh()
            finally:
                if threads is not None:
                    threads.close()
                self._show_ring(reader, running=False)
                self._next_op = recorder.next_op
                ring.close()
                reader.close()

    def _build(self, observed: RecordedDevice, recorder: Recorder, fence: str, threads: HostThreads | None) -> Engine:
        """The engine of one run, which ``recorder`` observes."""
        return build_engine(observed, self._config(fence), self._options.requests, threads=threads)

    def _config(self, fence: str) -> EngineConfig:
        """The engine with this policy. Each has a folder of its own in storage: what a race spoils stays there."""
        config = self._options.engine
        storage = config.storage
        if storage is not None:
            storage = dataclasses.replace(storage, url=f"{storage.url.rstrip('/')}/{fence}")
        return dataclasses.replace(config, fence=fence, storage=storage)

    def _follow(self, ring: WatchedRing, fence: str, *, check: bool) -> Sequence[Follower]:
        if self._outputs is None:
            return ()
        run = f"{fence}: {'check' if check else 'cost'}"
        folder = ring.journal or f"DIR/{fence}, after hicache-obs demo --journal DIR with the same options"
        replay = f"hicache-obs replay {folder}"
        return self._outputs.follow(ring, events=check, costs=not check, run=run, replay=replay)

    def _on_alloc(self, recorder: Recorder, fence: str) -> Callable[[int, PageIds], None]:
        """Records who owns pages; with spans, also a trace context for each request, before its first round."""
        seen: set[int] | None = None
        if self._outputs is not None and self._outputs.telemetry is not None:
            seen = set()

        def on_alloc(owner: int, pages: PageIds) -> None:
            recorder.page_alloc(owner, device(Mode.WRITE, pages))
            if seen is not None and owner not in seen:
                seen.add(owner)
                context = made_up_traceparent(self._options.seed, fence, owner)
                recorder.define(DefineSpace.REQUEST_TRACE, owner, context)

        return on_alloc

    def _journal_failed(self, error: OSError) -> None:
        self._journal_problem = error.strerror or str(error)
        if self._metrics is not None:
            self._metrics.rank(ONLY_RANK).counter("ring_errors_total", RingProblem.JOURNAL.value).add()

    def _show_ring(self, reader: RingReader, *, running: bool) -> None:
        """What an agent of the node would say about this run's ring, when it begins and when it ends."""
        if self._metrics is not None:
            of = self._metrics.rank(ONLY_RANK)
            of.gauge("rings").set(int(running))
            of.gauge("capture_mode").set(reader.mode)
            of.gauge("heartbeat_timestamp_seconds").set(time.time_ns())

    def _account(self, recorder: Recorder, bare: Device, analyzer: Analyzer) -> Callable[[int, int], None] | None:
        """``Agent(on_spent=)`` that tells the metrics what watching costs and misses, how exact times are, and more."""
        metrics = self._metrics
        if metrics is None:
            return None
        told_ns = 0

        def account(resolve_ns: int, analyze_ns: int) -> None:
            nonlocal told_ns
            hook_ns = recorder.counters.hook_ns
            metrics.add_overhead(Phase.HOOK, hook_ns - told_ns)
            told_ns = hook_ns
            metrics.add_overhead(Phase.RESOLVE, resolve_ns)
            metrics.add_overhead(Phase.ANALYZE, analyze_ns)
            metrics.set_clock_error(bare.clock_error_ns)
            self._coverage.show(metrics.rank(ONLY_RANK))
            for pending in analyzer.pending_transfers():
                age_ns = 0 if pending.oldest_ns is None else max(0, bare.host_ns() - pending.oldest_ns)
                metrics.set_pending(pending.kind, pending.transfers, age_ns)

        return account


def outcome(results: Sequence[ModeResult], accepts: Callable[[str], bool] = lambda _: False) -> ExitCode:
    """Exit code of the whole demo; ``accepts`` as in ``ModeResult.exit_code``."""
    return worst([result.exit_code(accepts) for result in results])
