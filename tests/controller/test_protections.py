"""Every protection in pairs: with it nothing is found and nothing is spoiled; take it out, and its hazard is named.

Each twin is an engine that is whole but for one protection (``hicache_obs.testing.protections``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from hicache_obs.controller.cache_controller import CacheController, CacheOperation
from hicache_obs.controller.engine import Engine
from hicache_obs.controller.radix_cache import Node
from hicache_obs.errors import PagePinned
from hicache_obs.findings import Cause, Finding, Hazard, Verdict
from hicache_obs.records import Direction, PageIds, Purpose
from hicache_obs.streams import SCHEDULES
from hicache_obs.streams.protocol import Stream
from hicache_obs.testing.protections import (
    with_layer_waits_too_early,
    with_load_copies_elsewhere,
    with_write_copies_elsewhere,
    without_acknowledgements,
    without_layer_waits,
    without_load_fence,
    without_readers_in_stamps,
    without_start_waits,
    without_write_fence,
    without_write_pins,
)

WAW, WAR = Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_FORWARD_RESTORE
RAW_LOAD, RAW_WRITE = Hazard.RAW_RESTORE_FORWARD, Hazard.RAW_FORWARD_BACKUP
WAR_WRITE = Hazard.WAR_BACKUP_FORWARD

SETUP = {"device_pages": 16, "early_backup": True}
"""Barely room for two requests, and prompts are backed up before they are computed: every protection is needed."""


@dataclass(frozen=True)
class Twin:
    """What an engine without one protection does.

    Attributes:
        remove: Takes the protection out.
        hazards: What is found, and nothing else.
        causes: Of the findings, together.
        waiter: Stream that the fence was put on instead.
        spoils: Whether adversarial order spoils restored pages.
        fences: Policies that have the protection.
    """

    remove: Callable[[Engine], None]
    hazards: set[Hazard]
    causes: set[Cause] = field(default_factory=lambda: {Cause.MISSING_FENCE})
    waiter: str | None = None
    spoils: bool = True
    fences: tuple[str, ...] = ("stream", "page")


TWINS = {
    "load fence": Twin(without_load_fence, {WAW, WAR}),
    "write fence": Twin(without_write_fence, {RAW_WRITE}),
    "layer waits": Twin(without_layer_waits, {RAW_LOAD}),
    "layer waits of the right layer": Twin(
        with_layer_waits_too_early, {RAW_LOAD}, causes={Cause.MISSING_FENCE, Cause.EARLY_EVENT}
    ),
    "load copies on the fenced stream": Twin(
        with_load_copies_elsewhere, {WAW, WAR}, causes={Cause.WRONG_STREAM}, waiter="load-back"
    ),
    "write copies on the fenced stream": Twin(
        with_write_copies_elsewhere, {RAW_WRITE}, causes={Cause.WRONG_STREAM}, waiter="write-back"
    ),
    # An index tensor whose block was another's before also races with what filled that one.
    "start waits": Twin(
        without_start_waits,
        {Hazard.METADATA_WAR, Hazard.LIFETIME},
        causes={Cause.EVENT_UNRECORDED, Cause.NO_RECORD_STREAM},
    ),
    "readers in the page fence": Twin(without_readers_in_stamps, {WAR}, spoils=False, fences=("page",)),
    "pins of write-backs": Twin(without_write_pins, {WAR_WRITE}),
}
CASES = [(name, fence) for name, twin in TWINS.items() for fence in twin.fences]


@pytest.mark.parametrize("fence", ["stream", "page"])
@pytest.mark.parametrize("runner", ["pattern", "transformer"])
def test_with_every_protection_nothing_is_found(lab, runner, fence):
    requests = lab.requests(seed=3)
    run = lab.run(requests, fence=fence, runner=runner, **SETUP)
    assert run.findings == []
    assert run.corrupted == []
    assert run.outputs == lab.reference(requests, runner=runner)
    assert len(run.engine.scheduler.restored) > 20
    assert run.engine.scheduler.counters.retractions > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_acknowledgements_by_query_need_no_other_protection(lab, schedule):
    requests = lab.requests(seed=3)
    run = lab.run(requests, backend=f"virtual-{schedule}", poll_acks=True, **SETUP)
    assert run.findings == []
    assert run.corrupted == []
    assert run.sink.weak == {}
    assert run.outputs == lab.reference(requests)


def test_acknowledgements_by_query_depend_on_the_device(lab):
    """By step they do not: the same rounds, whatever the device does."""
    requests = lab.requests(seed=3)

    def retractions(*, poll_acks: bool) -> set[tuple[int, int]]:
        runs = [lab.run(requests, backend=f"virtual-{s}", poll_acks=poll_acks, **SETUP) for s in ("eager", "lazy")]
        return {(run.engine.scheduler.counters.rounds, run.engine.scheduler.counters.retractions) for run in runs}

    assert len(retractions(poll_acks=False)) == 1
    assert len(retractions(poll_acks=True)) == 2


@pytest.mark.parametrize(("name", "fence"), CASES)
def test_without(lab, name, fence):
    """One protection less: its hazard, its cause, and pages that are really spoiled."""
    twin = TWINS[name]
    run = lab.run(lab.requests(seed=3), fence=fence, prepare=twin.remove, **SETUP)
    assert set(run.hazards) == twin.hazards
    assert {finding.cause for finding in run.findings} == twin.causes
    assert {finding.wrong_waiter for finding in run.findings} == {twin.waiter}
    assert Verdict.VIOLATION in {finding.verdict for finding in run.findings} or not twin.spoils
    assert bool(run.corrupted) == twin.spoils


@pytest.mark.parametrize(("name", "fence"), CASES)
def test_without_but_in_order(lab, name, fence):
    """Where each operation is complete before the next is issued nothing is spoiled, and all of it is still found."""
    twin = TWINS[name]
    eager, struck = (
        lab.run(lab.requests(seed=3), fence=fence, prepare=twin.remove, backend=backend, **SETUP)
        for backend in ("virtual-eager", "virtual-adversarial")
    )
    assert eager.corrupted == []
    assert {finding.verdict for finding in eager.findings} == {Verdict.LATENT}
    assert eager.races == struck.races


@pytest.mark.parametrize("fence", ["stream", "page"])
def test_without_acknowledgements(lab, fence):
    """The host's own edge: host pages and device pages are used again under transfers that nobody waited for."""
    run = lab.run(lab.requests(seed=3), fence=fence, prepare=without_acknowledgements, **SETUP)
    assert set(run.hazards) >= {WAR_WRITE, Hazard.HOST_REUSE}
    assert run.corrupted != []


@pytest.mark.parametrize("early_backup", [True, False])
def test_the_page_fence_needs_its_readers_and_the_stream_fence_does_not(lab, early_backup):
    setup = {**SETUP, "early_backup": early_backup}
    run = lab.run(lab.requests(seed=3), fence="stream", prepare=without_readers_in_stamps, **setup)
    assert run.findings == []


# -- the pin check of load-backs --------------------------------------------------------------------------------------


class NoPinCheck(CacheController):
    """A load-back may claim nodes that another one holds: it copies into the same pages once more."""

    def load(self, node: Node, device_pages: PageIds, tenancies: PageIds) -> None:
        if not node.loading:
            super().load(node, device_pages, tenancies)
        else:
            self._load_queue.append(CacheOperation(node, node.device_pages, node.host_pages))


@pytest.mark.parametrize("fence", ["stream", "page"])
@pytest.mark.parametrize("checked", [True, False])
def test_the_pin_check_of_load_backs(lab, checked, fence):
    """Two requests claim one prefix. The first acknowledgement releases it: if a second copy were in flight by
    then, it would land on whoever gets the evicted pages next."""
    tiers = lab.tiers(fence)
    controller = tiers.controller
    if not checked:
        controller.__class__ = NoPinCheck
    node = tiers.host_only(2, first_token=40)
    pages = tiers.load(node)
    ticket = controller.start_loading(1)
    tiers.forward(read=pages, layer_wait=lambda layer: controller.layer_done.wait_until(ticket, layer))
    fresh = tiers.device_pages.alloc(2)
    if checked:
        with pytest.raises(PagePinned):
            controller.load(node, fresh, fresh)
    else:
        controller.load(node, fresh, fresh)
    tiers.device_pages.free(fresh)
    assert (controller.start_loading(2) is None) == checked
    controller.acknowledge(1)
    evicted = tiers.radix.evict_device(2).pages
    assert set(evicted.tolist()) == set(pages.tolist())
    tiers.device_pages.free(evicted)
    taken = tiers.device_pages.alloc(2)
    assert set(taken.tolist()) == set(pages.tolist())
    tiers.forward(write=taken, value=77.0)
    tiers.device.synchronize()
    findings = tiers.observed.analyse().findings
    assert {finding.hazard for finding in findings} == (set() if checked else {WAW})
    assert all((finding.earlier.what, finding.later.what) == ("restore", "forward") for finding in findings)
    own, others = [[77.0] * 2, [78.0] * 2, [79.0] * 2], [[40.0] * 2, [41.0] * 2, [42.0] * 2]
    assert tiers.contents(taken) == (own if checked else others)


# -- the verdict is exact ---------------------------------------------------------------------------------------------


class OverAThirdStream:
    """Orders transfers after the forward stream over a stream in between."""

    name = "third"

    def __init__(self, engine: Engine) -> None:
        self._third = engine.runner.device.Stream("third")

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        self._third.wait_stream(fence_stream)
        transfer_stream.wait_stream(self._third, purpose=purpose)


def test_an_order_over_a_third_stream_is_as_good_as_a_fence(lab):
    def prepare(engine: Engine) -> None:
        engine.controller.policy = OverAThirdStream(engine)

    requests = lab.requests(seed=3)
    run = lab.run(requests, fence="none", prepare=prepare, **SETUP)
    assert run.findings == []
    assert run.corrupted == []
    assert run.outputs == lab.reference(requests)


def test_one_missing_fence_gives_the_findings_of_that_transfer_and_no_others(lab):
    """Every load-back that races without fences, taken one at a time."""
    requests = lab.requests(seed=3)
    unfenced = lab.run(requests, fence="stream", prepare=without_load_fence, **SETUP)
    transfers = sorted({finding.later.group for finding in unfenced.findings})
    assert len(transfers) > 3
    for transfer in transfers:
        run = lab.run(requests, fence="stream", prepare=lambda engine, t=transfer: leave_out_one(engine, t), **SETUP)
        expected = {key(finding) for finding in unfenced.findings if finding.later.group == transfer}
        assert {key(finding) for finding in run.findings} == expected


def leave_out_one(engine: Engine, transfer: int) -> None:
    policy = engine.controller.policy
    fence = policy.fence

    class AllButOne:
        name = policy.name

        def fence(self, transfer_stream, fence_stream, pages, purpose) -> None:
            if engine.controller._transfers != transfer:
                fence(transfer_stream, fence_stream, pages, purpose)

    engine.controller.policy = AllButOne()


def key(finding: Finding) -> tuple[object, ...]:
    """A finding without operation numbers, which depend on how many fences there are."""
    sides = [(side.what, side.group, side.layers) for side in (finding.earlier, finding.later)]
    return finding.hazard, finding.pages, *sides


def test_unfenced_but_disjoint(lab):
    """A load-back into pages that no round in flight uses, beside rounds that use others, needs no fence."""
    tiers = lab.tiers("none")
    node = tiers.host_only(2, first_token=40)
    pages = tiers.load(node)
    others = tiers.device_pages.alloc(6)
    tiers.forward(read=others[:3], write=others[3:], value=9.0)
    tiers.controller.start_loading(1)
    tiers.forward(read=others[3:], write=others[:3], value=9.0)
    tiers.device.synchronize()
    assert tiers.observed.analyse().findings == []
    assert tiers.contents(pages) == [[40.0] * 2, [41.0] * 2, [42.0] * 2]


# -- what does not depend on the schedule, and what does not depend on the detector ------------------------------------


def unfenced(lab, backend: str, *, seed: int = 0, **setup):
    return lab.run(lab.requests(seed=3), fence="none", backend=backend, seed=seed, **{**SETUP, **setup})


def test_the_same_pairs_race_under_every_schedule(lab):
    runs = {schedule: unfenced(lab, f"virtual-{schedule}") for schedule in SCHEDULES}
    assert {len(run.races) for run in runs.values()} == {len(runs["eager"].races)}
    assert all(run.races == runs["eager"].races for run in runs.values())
    assert set(runs["eager"].hazards) == {WAW, WAR, RAW_WRITE}
    assert {finding.verdict for finding in runs["eager"].findings} == {Verdict.LATENT}
    assert runs["eager"].corrupted == []
    assert Verdict.VIOLATION in {finding.verdict for finding in runs["adversarial"].findings}
    assert runs["adversarial"].corrupted != []


def test_a_hundred_random_schedules_report_one_set_of_races(lab):
    """The race is reported whether or not it strikes; under some seeds it does, and under some it does not."""
    requests = lab.requests(8, seed=15)
    setup = {"fence": "none", "device_pages": 12, "early_backup": True, "backend": "virtual-random"}
    runs = [lab.run(requests, seed=seed, **setup) for seed in range(100)]
    assert set(runs[0].hazards) == {WAW, RAW_WRITE}
    assert {frozenset(run.races) for run in runs} == {frozenset(runs[0].races)}
    assert {bool(run.corrupted) for run in runs} == {True, False}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_contents_do_not_depend_on_the_detector(lab, schedule):
    watched, alone = (unfenced(lab, f"virtual-{schedule}", record=record) for record in (True, False))
    assert watched.findings
    assert alone.records == []
    assert watched.corrupted == alone.corrupted
    assert watched.outputs == alone.outputs


def test_contents_on_threads_do_not_depend_on_the_detector(lab):
    watched, alone = (
        unfenced(lab, "threads", gated=True, early_backup=False, record=record) for record in (True, False)
    )
    assert watched.corrupted == alone.corrupted != []
    assert watched.outputs == alone.outputs


def test_a_spoiled_page_has_a_finding(lab):
    """On its load-back, or on the write-back that made the host copy."""
    transfers = []

    def prepare(engine: Engine) -> None:
        engine.controller.on_transfer = transfers.append

    run = unfenced(lab, "virtual-adversarial", prepare=prepare)
    copied: dict[int, tuple[int, int]] = {}
    origins: dict[tuple[int, int], set[tuple[int, int]]] = {}
    for transfer in transfers:
        for operation in transfer.operations:
            for device, host in zip(operation.device_pages.tolist(), operation.host_pages.tolist(), strict=True):
                if transfer.direction is Direction.DEVICE_TO_HOST:
                    copied[host] = (transfer.transfer, device)
                else:
                    origins[transfer.step, device] = {(transfer.transfer, device), copied[host]}
    raced = {
        (side.group, page)
        for finding in run.findings
        for side in (finding.earlier, finding.later)
        if side.what != "forward"
        for page in finding.pages
    }
    assert len(run.corrupted) > 10
    assert all(origins[spoiled] & raced for spoiled in run.corrupted)


@pytest.mark.parametrize("fence", ["none", "page"])
def test_an_independent_judge_finds_the_same_races(lab, judge, fence):
    """A search over the graph of everything that must happen before, in a trace with many kinds of races."""
    setup = {"fence": fence, "device_pages": 9, "early_backup": True}
    run = lab.run(lab.requests(10, seed=1), prepare=without_layer_waits, **setup)
    assert set(run.hazards) == ({WAW, RAW_LOAD, RAW_WRITE} if fence == "none" else {RAW_LOAD})
    assert run.races == judge(run.records)
