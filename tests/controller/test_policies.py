"""What each policy of the scheduler does, and what goes wrong without the protection it needs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from hicache_obs.controller.batch import BatchMode
from hicache_obs.controller.engine import Engine
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError, ControllerError
from hicache_obs.findings import Hazard
from hicache_obs.records import Purpose, WaitStream
from hicache_obs.streams import SCHEDULES
from hicache_obs.testing.consistency import check_drained, check_engine
from hicache_obs.testing.protections import without_metadata_barrier, without_reuse_fence

PAGE_SIZE = 4
FENCED = pytest.mark.parametrize("fence", ["stream", "page"])
WRITE_BACK = {"write_policy": "write_back"}


def rounds_of(engine: Engine) -> list[tuple[str, list[int]]]:
    """Mode and new tokens per row of each round, once the engine has run."""
    seen: list[tuple[str, list[int]]] = []
    forward = engine.runner.forward

    def launching(batch, **kwargs):
        seen.append((batch.mode.value, batch.new_lens.tolist()))
        return forward(batch, **kwargs)

    engine.runner.forward = launching
    return seen


# -- chunked prefill --------------------------------------------------------------------------------------------------


def test_a_long_prompt_takes_several_rounds_with_decode_rounds_in_between(lab):
    requests = [Request(0, 0, np.arange(3), 9), Request(1, 0, np.arange(100, 122), 2)]
    seen = []
    run = lab.run(
        requests,
        prepare=lambda engine: seen.append(rounds_of(engine)),
        after_step=check_engine,
        max_extend_tokens=8,
        policies={"chunked_prefill": True},
    )
    assert run.outputs == lab.reference(requests)
    assert run.findings == []
    assert seen[0][:7] == [
        ("extend", [3, 4]),  # the budget of 8 in whole pages
        ("decode", [1]),
        ("extend", [8]),
        ("decode", [1]),
        ("extend", [8]),
        ("decode", [1]),
        ("extend", [2]),
    ]
    assert run.engine.scheduler.counters.chunks == 3


def test_without_chunks_one_round_takes_it_all(lab):
    requests = [Request(0, 0, np.arange(3), 9), Request(1, 0, np.arange(100, 122), 2)]
    seen = []
    run = lab.run(requests, prepare=lambda engine: seen.append(rounds_of(engine)), max_extend_tokens=8)
    assert [lens for mode, lens in seen[0] if mode == "extend"] == [[3], [22]]
    assert run.engine.scheduler.counters.chunks == 0


@FENCED
def test_no_round_exceeds_the_budget(lab, fence):
    requests = lab.requests(24, seed=3, max_blocks=12)
    seen = []
    run = lab.run(
        requests,
        fence=fence,
        prepare=lambda engine: seen.append(rounds_of(engine)),
        device_pages=24,
        max_extend_tokens=12,
        policies={"chunked_prefill": True},
    )
    assert run.outputs == lab.reference(requests)
    assert max(sum(lens) for mode, lens in seen[0] if mode == BatchMode.EXTEND.value) <= 12
    assert run.engine.scheduler.counters.chunks > 5


# -- write policies ---------------------------------------------------------------------------------------------------


def test_selective_write_through_waits_for_the_uses_it_is_told(lab):
    """Each request is admitted after the one before has finished, and is one more use of the shared prefix."""
    requests = [Request(n, 0, np.concatenate([np.arange(8), [100 + n]]), 1) for n in range(4)]

    def first_copy(**policies) -> int:
        """Step that copies the prefix."""
        copied: list[int] = []

        def after_step(engine: Engine) -> None:
            copied.append(engine.controller.counters.backed_up_pages)

        run = lab.run(requests, after_step=after_step, max_running=1, policies=policies)
        assert run.findings == []
        assert copied[-1] == 2
        return copied.index(2)

    through = first_copy(write_policy="write_through")
    selective = [first_copy(write_policy="write_through_selective", write_threshold=n) for n in (1, 2, 3, 4)]
    assert selective[0] == through
    assert selective[1:] == sorted(set(selective[1:]))
    assert selective[1] >= through


@FENCED
def test_write_back_copies_nothing_before_it_is_evicted(lab, fence):
    requests = lab.requests(40, seed=4)
    copied: list[tuple[int, int]] = []

    def after_step(engine: Engine) -> None:
        check_engine(engine)
        copied.append((engine.controller.counters.backed_up_pages, engine.scheduler.pages.evicted_pages))

    run = lab.run(requests, fence=fence, device_pages=20, after_step=after_step, policies=WRITE_BACK)
    counters = run.engine.controller.counters
    assert run.outputs == lab.reference(requests)
    assert run.findings == []
    assert run.corrupted == []
    assert all(pages == 0 for pages, evicted in copied if not evicted)
    assert counters.write_backs == counters.evicting_write_backs > 3
    assert counters.restored_pages > 10
    through = lab.run(requests, fence=fence, device_pages=20).engine.controller.counters
    assert counters.backed_up_pages < through.backed_up_pages
    check_drained(run.engine)


@FENCED
@pytest.mark.parametrize("backend", ["virtual-adversarial", "virtual-eager"])
def test_evicted_pages_are_overwritten_after_their_write_back(lab, fence, backend):
    requests = lab.requests(40, seed=3)
    setup = {"fence": fence, "backend": backend, "device_pages": 16, "policies": WRITE_BACK}
    assert lab.run(requests, **setup).findings == []
    run = lab.run(requests, prepare=without_reuse_fence, **setup)
    assert Hazard.WAR_BACKUP_FORWARD in run.hazards
    assert set(run.hazards) <= {Hazard.WAR_BACKUP_FORWARD, Hazard.OTHER}


def test_without_the_reuse_fence_pages_are_spoiled(lab):
    requests = lab.requests(40, seed=3)
    setup = {"device_pages": 16, "policies": WRITE_BACK, "prepare": without_reuse_fence}
    spoiled = [bool(lab.run(requests, backend=f"virtual-{s}", **setup).corrupted) for s in SCHEDULES]
    assert dict(zip(SCHEDULES, spoiled, strict=True))["adversarial"]
    assert not dict(zip(SCHEDULES, spoiled, strict=True))["eager"]


@pytest.mark.parametrize(("write_fence", "found"), [("none", True), ("stream", False), ("page", False), (None, False)])
def test_write_backs_have_a_policy_of_their_own(lab, write_fence, found):
    requests = lab.requests(40, seed=3)
    run = lab.run(requests, fence="page", write_fence=write_fence, device_pages=16, policies=WRITE_BACK)
    assert bool(run.findings) == found
    if found:
        assert set(run.hazards) <= {Hazard.WAR_BACKUP_FORWARD, Hazard.RAW_FORWARD_BACKUP, Hazard.OTHER}


def test_the_page_fence_waits_for_fewer_write_backs_than_the_stream_fence(lab):
    requests = lab.requests(40, seed=3)
    waits = Counter()
    for fence in ("stream", "page"):
        run = lab.run(requests, write_fence=fence, device_pages=16, policies=WRITE_BACK)
        names = {s.stream_id: s.name for s in (run.engine.controller.engine.device_to_host_stream,)}
        on = [record for record in run.of_kind(WaitStream) if record.on in names]
        waits[fence] = sum(record.purpose in (Purpose.PLAIN, Purpose.LOAD_FENCE) for record in on)
    assert waits["stream"] > 10
    assert waits["page"] == 0


@pytest.mark.parametrize("waits", [True, False])
def test_a_node_is_restored_after_its_write_back_has_filled_the_host_pages(lab, waits):
    """Evicted and wanted again at once. With no reuse fence nothing else keeps the two copies apart."""
    tiers = lab.tiers("stream")
    without_reuse_fence(type("Part", (), {"controller": tiers.controller}))
    if not waits:
        tiers.controller._await_host_pages = lambda *_: None
    node = tiers.cached(2, first_token=40)
    tiers.controller.write_evicted(node, tiers.host_pages.alloc(2))
    evicted = tiers.radix.evict_device(2).pages
    tiers.controller.start_evicting(1)
    pages = tiers.load(node)  # into other pages: the evicted ones are not free yet
    tiers.device_pages.free(evicted)
    tiers.controller.start_loading(1)
    tiers.device.synchronize()
    findings = tiers.observed.analyse().findings
    assert {finding.hazard for finding in findings} == (set() if waits else {Hazard.HOST_REUSE})
    expected = [[40.0] * 2, [41.0] * 2, [42.0] * 2]
    assert (tiers.contents(pages) == expected) == waits


# -- retraction -------------------------------------------------------------------------------------------------------


@FENCED
def test_a_retracted_request_goes_on_from_its_host_copies(lab, fence):
    total: Counter[str] = Counter()
    for seed in range(4):
        requests = lab.requests(seed=seed, max_output=16, output_mean=1500.0)
        largest = max(-(-(len(r.prompt) + r.output_length + 1) // PAGE_SIZE) for r in requests)
        for retraction in ("backup", "recompute"):
            run = lab.run(
                requests,
                fence=fence,
                device_pages=largest + 2,
                after_step=check_engine,
                policies={"retraction": retraction, **WRITE_BACK},
            )
            assert run.outputs == lab.reference(requests)
            assert run.findings == []
            assert run.corrupted == []
            check_drained(run.engine)
            total[f"{retraction}: retractions"] += run.engine.scheduler.counters.retractions
            total[f"{retraction}: resumed"] += run.engine.scheduler.counters.resumed_pages
            total[f"{retraction}: kept"] += run.engine.scheduler.backups.counters.retraction_pages
    assert total["backup: retractions"] > 10
    assert total["backup: resumed"] >= total["backup: kept"] > 20
    assert (total["recompute: resumed"], total["recompute: kept"]) == (0, 0)


def test_the_copies_of_a_retracted_request_cannot_be_evicted(lab):
    """Host memory has room for one retracted request; whoever comes after that starts over."""
    requests = lab.requests(seed=1, max_output=16, output_mean=1500.0)
    largest = max(-(-(len(r.prompt) + r.output_length + 1) // PAGE_SIZE) for r in requests)
    run = lab.run(
        requests,
        device_pages=largest + 2,
        host_pages=8,
        after_step=check_engine,
        policies={"retraction": "backup"},
    )
    assert run.outputs == lab.reference(requests)
    counters = run.engine.scheduler
    assert counters.backups.counters.refused_pages > 0
    assert counters.counters.retractions > 0


# -- the barrier of shared metadata -----------------------------------------------------------------------------------


@FENCED
@pytest.mark.parametrize("barrier", ["coarse", "read_done"])
@pytest.mark.parametrize("runner", ["pattern", "transformer"])
def test_shared_metadata_behind_a_barrier(lab, barrier, fence, runner):
    requests = lab.requests(seed=3)
    setup = {"runner": runner, "fence": fence, "device_pages": 16, "policies": {"barrier": barrier}}
    run = lab.run(requests, **setup)
    assert run.findings == []
    assert run.outputs == lab.reference(requests, runner=runner)
    broken = lab.run(requests, prepare=without_metadata_barrier, **setup)
    assert set(broken.hazards) == {Hazard.METADATA_WAR}
    assert broken.outputs != lab.reference(requests, runner=runner)


def test_only_the_coarse_barrier_orders_load_backs_too(lab):
    """Without load fences: behind the coarse barrier the start event covers the round in flight."""
    requests = lab.requests(seed=3)
    found = {}
    for barrier in ("coarse", "read_done"):
        setup = {"device_pages": 16, "write_fence": "stream", "policies": {"barrier": barrier}}
        found[barrier] = set(lab.run(requests, fence="none", **setup).hazards)
    assert found["coarse"] == set()
    assert Hazard.WAW_FORWARD_RESTORE in found["read_done"]


# -- flush and reset --------------------------------------------------------------------------------------------------


@FENCED
@pytest.mark.parametrize("policy", ["write_through", "write_back"])
@pytest.mark.parametrize("backend", ["virtual-adversarial", "virtual-random", "threads"])
def test_reset_in_the_middle(lab, fence, policy, backend):
    """At every third step of a run: both pools are empty, and what comes next is right."""
    requests = lab.requests(16, seed=3)
    expected = lab.reference(requests)
    in_flight = 0
    for steps in range(1, 30, 3):
        setup = lab.setup(fence=fence, backend=backend, device_pages=16, policies={"write_policy": policy})
        engine, observed = lab.build(setup, requests)
        scheduler = engine.scheduler
        scheduler.submit(requests)
        for _ in range(steps):
            scheduler.step()
        in_flight += engine.controller.transfers_in_flight
        finished = set(scheduler.outputs)
        aborted = scheduler.reset()
        assert sorted({*finished, *aborted}) == [request.request_id for request in requests]
        assert finished.isdisjoint(aborted)
        assert (scheduler.device_pages.in_use, scheduler.host_pages.in_use) == (0, 0)
        check_drained(engine)
        engine.run([request for request in requests if request.request_id in aborted])
        assert scheduler.outputs == expected
        assert observed.analyse().findings == []
    assert in_flight > 0


def test_flush_refuses_while_a_request_runs_and_drains_what_is_in_flight(lab):
    requests = lab.requests(6, seed=3)
    engine, _ = lab.build(lab.setup(device_pages=16), requests)
    scheduler = engine.scheduler
    scheduler.submit(requests)
    scheduler.step()
    before = scheduler.device_pages.in_use
    with pytest.raises(ControllerError, match=r"^flush: \d+ requests wait and \d+ run; finish or abort them first$"):
        scheduler.flush()
    assert scheduler.device_pages.in_use == before
    while not scheduler.done:
        scheduler.step()
    assert engine.controller.transfers_in_flight > 0
    held = scheduler.device_pages.in_use + scheduler.host_pages.in_use
    assert scheduler.flush() == held
    assert (scheduler.device_pages.in_use, scheduler.host_pages.in_use) == (0, 0)
    assert scheduler.flush() == 0


# -- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_running": 0}, "max_running: 0; expected an integer ≥ 1"),
        ({"write_threshold": 0}, "write_threshold: 0; expected an integer ≥ 1"),
        (
            {"write_policy": "through"},
            "write_policy: 'through'; expected one of write_through, write_through_selective, write_back",
        ),
        ({"host_eviction": "fifo"}, "host_eviction: 'fifo'; expected one of lru, lfu, priority"),
        ({"retraction": "swap"}, "retraction: 'swap'; expected one of recompute, backup"),
        ({"barrier": "fine"}, "barrier: 'fine'; expected one of private, coarse, read_done"),
        (
            {"early_backup": True, "write_policy": "write_back"},
            "early_backup: True; expected False with write_policy 'write_back'",
        ),
    ],
)
def test_options_that_are_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        SchedulerOptions(**options)
    assert str(refused.value) == message


def test_a_chunk_holds_a_page(lab):
    with pytest.raises(ConfigError, match=r"^max_extend_tokens: 3; chunks are whole pages, expected at least 4$"):
        lab.build(lab.setup(max_extend_tokens=3, policies={"chunked_prefill": True}), [])
