"""The switch matrix: every protection taken out once, under every fence policy that has it.

A cell runs one engine on the virtual device under a small workload. What the host does there depends on nothing that
the device does, so every schedule has the same records, and with them the same races. Only with a storage tier the host
threads decide as well, by a seed. A cell holds when

* *whole*, with nothing taken out, the engine is clean: no finding under any schedule, contents right, and pairs that
  need an order for each hazard of the cell: otherwise the clean result would mean nothing;
* *without*, its hazards are reported under every schedule, the quiet ones included, and under the witness of one of the
  findings, which runs the later access before the earlier one, contents come out wrong.

Contents are wrong when a restored or moved page is read with another digest than was written, or a round samples other
tokens than in the run where each operation is complete before the next is issued. Imports torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from hicache_obs.analyzer import Analyzer
from hicache_obs.controller.batch import RoundResult
from hicache_obs.controller.cache_pools import HYBRIDS
from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.watching import name_pools, watch_blocks
from hicache_obs.errors import StreamError
from hicache_obs.findings import Finding, Hazard
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.recorded import RecordedDevice, Recorder
from hicache_obs.records import (
    AnyRecord,
    EventRecord,
    EventWait,
    GraphReplay,
    Kernel,
    Memcpy,
    OpId,
    Relocate,
    WaitStream,
)
from hicache_obs.streams.runner import Runner
from hicache_obs.streams.schedule import Board, Queued, Schedule, schedule_named
from hicache_obs.streams.virtual import VirtualDevice
from hicache_obs.testing.controller_program import (
    GRAPH_WORKLOAD,
    HYBRID_PAGES,
    HYBRID_WORKLOAD,
    PAGES,
    engine_for,
    requests,
)
from hicache_obs.testing.exploration import ListSink, needs_order
from hicache_obs.testing.memory_backend import MemoryBackend
from hicache_obs.testing.protections import PROTECTIONS, Protection
from hicache_obs.testing.recording import RecordingSink
from hicache_obs.testing.world import SeededThreads

WORKLOAD: Final = (
    ("eeff", 2),
    ("aabb", 2),
    ("ccx", 1),
    ("eeffx", 1),
    ("ggz", 3),
    ("ccyv", 3),
    ("eeff", 3),
    ("aabbvxxy", 1),
    ("ccddxyv", 2),
    ("aabb", 4),
    ("ccddvx", 2),
)
"""As ``controller_program.WORKLOAD``. Found by a search: without any one of the protections something races here,
though transfers are acknowledged at a fixed distance."""
AGAIN: Final = WORKLOAD + WORKLOAD[:6]
"""Long enough for prompts to be in storage only."""
SEEDS: Final = 10
"""Random schedules per cell, besides the quiet one and the adversarial one."""
WITNESSES: Final = 60
"""Findings of a cell whose witness is tried, until contents come out wrong."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """One run of an engine.

    Attributes:
        records: Its trace.
        findings: What the analyzer reports for it.
        outputs: Tokens of each request.
        tokens: What each round sampled, discarded rows included, by round id; empty with a storage tier, whose threads
            decide what is in a round.
        spoiled: Whether a restored or moved page was read with wrong contents.
    """

    records: tuple[AnyRecord, ...]
    findings: tuple[Finding, ...]
    outputs: dict[int, list[int]]
    tokens: dict[int, list[int]]
    spoiled: bool

    @property
    def hazards(self) -> frozenset[Hazard]:
        """Of the findings."""
        return frozenset(finding.hazard for finding in self.findings)


@dataclass(frozen=True, slots=True)
class Cell:
    """A protection under a fence policy.

    Attributes:
        name: Of the protection.
        fence: The policy.
        against: Hazards that it is there against.
        checks: Pairs of those hazards that need an order, in the whole engine.
        clean: Whether the whole engine is, under every schedule.
        schedules: How many there were.
        reported: Under how many of them every hazard of ``against`` is reported, without the protection.
        findings: Without it, under any one of them.
        witnessed: Place of the witness under which contents come out wrong among those tried, from 1; 0: none.
    """

    name: str
    fence: str
    against: tuple[Hazard, ...]
    checks: int
    clean: bool
    schedules: int
    reported: int
    findings: int
    witnessed: int

    @property
    def holds(self) -> bool:
        """Clean with something to check; without the protection reported every time, and wrong under a witness.

        With a storage tier the order of host threads decides what the host does, so not every order has the race.
        """
        enough = 1 if PROTECTIONS[self.name].storage else self.schedules
        return self.clean and self.checks > 0 and self.reported >= enough and self.witnessed > 0


class Overtakes:
    """A schedule that runs one operation, and what it needs, as soon as it is queued, and else what the host asks for.

    What nothing orders before it runs later, though it was queued before: a witness, on the real engine.

    Args:
        place: Of the operation in the order of queued items.
        site: Of the operation.
    """

    name: Final = "witness"
    overlapped: Final = False
    host_waits: Final = False

    def __init__(self, place: int, site: str) -> None:
        self._place = place
        self._site = site
        self._met = False

    def on_call(self, board: Board) -> Iterator[Queued]:
        """See ``Schedule.on_call``."""
        assert isinstance(board, Runner)
        if self._met:
            return iter(())
        found = [item for lane in board.lanes for item in lane.items if item.seq == self._place]
        self._met = bool(found)
        if found and found[0].site != self._site:
            raise StreamError(f"queued item {self._place} is {found[0]}, not the witness's operation {self._site!r}")
        return iter(board.ancestors(found))

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        """See ``Schedule.on_force``."""
        return iter(board.ancestors(targets))


def cells() -> list[tuple[str, str]]:
    """Protection and fence policy of each cell."""
    return [(name, fence) for name, protection in PROTECTIONS.items() for fence in protection.fences]


def judge_cell(name: str, fence: str, *, seeds: int = SEEDS) -> Cell:
    """Run one cell.

    Args:
        name: In ``PROTECTIONS``.
        fence: One of its policies.
        seeds: Random schedules.
    """
    protection = PROTECTIONS[name]
    whole = _whole(engine_for((protection,), fence, storage=protection.storage), protection.storage, seeds)
    without = [run(protection, fence, schedule, seed=seed, off=True) for seed, schedule in _schedules(seeds)]
    in_order = without[0]
    return Cell(
        name=name,
        fence=fence,
        against=tuple(sorted(protection.against)),
        checks=min(whole.checks[hazard] for hazard in protection.against),
        clean=whole.clean,
        schedules=len(without),
        reported=sum(each.hazards >= protection.against for each in without),
        findings=len(in_order.findings),
        witnessed=_witness(protection, fence, in_order),
    )


@dataclass(frozen=True, slots=True)
class _Whole:
    """Runs of an engine with nothing taken out: pairs that need an order by hazard, and whether all are clean."""

    checks: Counter[Hazard]
    clean: bool


@cache
def _whole(config: EngineConfig, storage: bool, seeds: int) -> _Whole:
    """Runs under every schedule, once for all protections that this engine has."""
    runs = [_run(config, storage, schedule, seed, None) for seed, schedule in _schedules(seeds)]
    clean = all(not each.findings and not wrong(each, runs[0]) for each in runs)
    return _Whole(needs_order(runs[0].records), clean)


def run(protection: Protection, fence: str, schedule: Schedule, *, seed: int = 0, off: bool = False) -> Outcome:
    """One run of the engine that ``protection`` is part of, with it or (``off``) without; ``seed``: of its threads."""
    config = engine_for((protection,), fence, storage=protection.storage)
    return _run(config, protection.storage, schedule, seed, protection.remove if off else None)


def _run(
    config: EngineConfig, storage: bool, schedule: Schedule, seed: int, remove: Callable[[Engine], None] | None
) -> Outcome:
    device = VirtualDevice(schedule)
    trace = ListSink()
    recorder = Recorder(trace, clock=device.host_ns, ranges=NoRanges(), max_pending=1)
    recorder.define_engine("hicache-obs controller")
    limits = replace(config.scheduler, poll_acks=False)
    hybrid = config.kv in HYBRIDS
    pages = HYBRID_PAGES if hybrid else PAGES
    config = replace(config, scheduler=limits, device_pages=pages, host_pages=pages)
    own = GRAPH_WORKLOAD if config.graphs else HYBRID_WORKLOAD if hybrid else None
    work = requests(own or (AGAIN if storage else WORKLOAD))
    with closing(SeededThreads(recorder, seed)) as threads:
        recorded = RecordedDevice(device, recorder)
        engine = build_engine(recorded, config, work, threads=threads, backend=MemoryBackend())
        name_pools(engine.controller.engine, recorder)
        watch_blocks(engine.controller.engine, recorder)
        if remove is not None:
            remove(engine)
        rounds = _keep_rounds(engine)
        engine.run(work)
        engine.close()
    assert not recorder.counters.errors, "the recorder failed, so this run proves nothing"
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace.records)
    analyzer.finish()
    return Outcome(
        records=tuple(trace.records),
        findings=tuple(sink.findings),
        outputs=engine.scheduler.outputs,
        tokens={} if storage else {result.round_id: result.next_tokens.tolist() for result in rounds},
        spoiled=bool(len(engine.ledger.corrupted())),
    )


def wrong(outcome: Outcome, in_order: Outcome) -> bool:
    """Whether contents are: see the module's docstring."""
    return outcome.spoiled or outcome.outputs != in_order.outputs or outcome.tokens != in_order.tokens


def _schedules(seeds: int) -> list[tuple[int, Schedule]]:
    """Each with a seed for host threads: the quiet one, the adversarial one, random ones."""
    fixed = [(0, schedule_named("eager")), (0, schedule_named("adversarial"))]
    return fixed + [(seed, schedule_named("random", seed=seed)) for seed in range(seeds)]


def _witness(protection: Protection, fence: str, in_order: Outcome) -> int:
    """Place of the first witness that leaves wrong contents, from 1; 0 if there is none.

    Where host threads take part, a witness is a schedule of theirs under which the device runs nothing unasked, or
    everything at once.
    """
    witnesses: list[tuple[int, Schedule]]
    if protection.storage:
        names = ("lazy", "eager") * (WITNESSES // 2)
        witnesses = [(number // 2, schedule_named(name)) for number, name in enumerate(names)]
    else:
        places = places_of(in_order.records)
        found = [finding.later for finding in in_order.findings if finding.hazard in protection.against]
        witnesses = [(0, Overtakes(places[later.op], later.site)) for later in found[:WITNESSES]]
    for number, (seed, schedule) in enumerate(witnesses, 1):
        if wrong(run(protection, fence, schedule, seed=seed, off=True), in_order):
            return number
    return 0


def places_of(records: Sequence[AnyRecord]) -> dict[OpId, int]:
    """Place of each operation among the items that the calls have queued on the virtual device, from 1.

    Of a graph replay: its last entry.
    """
    places: dict[OpId, int] = {}
    count = 0
    for record in records:
        if isinstance(record, Kernel | Memcpy | Relocate | EventRecord | EventWait):
            count += 1
        elif isinstance(record, WaitStream):
            count += 2  # a record there, a wait here
        elif isinstance(record, GraphReplay):
            count += record.nodes + 2  # a wait for the replay before, and a record for the next
            places[record.op] = count - 1
            continue
        places[record.op] = count
    return places


def _keep_rounds(engine: Engine) -> list[RoundResult]:
    """A list that gets the handle of every launched round."""
    rounds: list[RoundResult] = []
    forward = engine.runner.forward

    def kept(*args: Any, **options: Any) -> RoundResult:
        result = forward(*args, **options)
        rounds.append(result)
        return result

    engine.runner.forward = kept  # type: ignore[method-assign]  # whoever launches it
    return rounds


def table(found: Sequence[Cell]) -> str:
    """The matrix as a Markdown table."""
    lines = [
        "| protection taken out | fence | hazard | whole: pairs checked | findings | without: reported | findings "
        "| contents wrong under |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for cell in found:
        hazards = ", ".join(f"`{hazard.value}`" for hazard in cell.against)
        witness = f"witness {cell.witnessed}" if cell.witnessed else "**no witness**"
        reported = f"{cell.reported} of {cell.schedules} schedules"
        clean = "0" if cell.clean else "**some**"
        lines.append(
            f"| {cell.name} | {cell.fence} | {hazards} | {cell.checks} | {clean} | {reported} | {cell.findings} "
            f"| {witness} |"
        )
    return "\n".join(lines)
