"""A whole engine: on every device, with every policy, against the run without host tier; and what it never touches."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError, StreamError
from hicache_obs.records import Direction, EventWait, Kernel, Memcpy, Purpose, WaitStream
from hicache_obs.streams import SCHEDULES
from hicache_obs.streams.guard import PoolGuard

CONFIG = EngineConfig(
    runner="pattern",
    fence="stream",
    device_pages=16,
    host_pages=16,
    page_size=4,
    layers=3,
    heads=1,
    head_dim=2,
    vocabulary=512,
    seed=0,
    scheduler=SchedulerOptions(),
)
SETUP = {"device_pages": 16, "early_backup": True}
RUNNERS = pytest.mark.parametrize("runner", ["pattern", "transformer"])
BACKENDS = [
    "threads",
    *(f"virtual-{schedule}" for schedule in SCHEDULES),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@RUNNERS
@pytest.mark.parametrize("fence", ["stream", "page"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_device_gives_the_tokens_of_the_run_without_host_tier(lab, backend, fence, runner):
    requests = lab.requests(seed=3)
    run = lab.run(requests, backend=backend, fence=fence, runner=runner, **SETUP)
    assert run.outputs == lab.reference(requests, runner=runner)
    assert run.findings == []
    assert run.corrupted == []
    assert len(run.engine.scheduler.restored) > 10


@RUNNERS
def test_without_fences_tokens_are_right_or_wrong_by_schedule(lab, runner):
    """The silent failure: nothing crashes, and some requests get other tokens."""
    requests = lab.requests(seed=3)
    expected = lab.reference(requests, runner=runner)
    wrong = {}
    for schedule in ("eager", "adversarial"):
        run = lab.run(requests, fence="none", backend=f"virtual-{schedule}", runner=runner, **SETUP)
        wrong[schedule] = sum(run.outputs[request] != tokens for request, tokens in expected.items())
        assert bool(wrong[schedule]) == bool(run.corrupted)
    assert wrong["eager"] == 0
    assert wrong["adversarial"] > 3


@RUNNERS
def test_a_virtual_run_is_the_same_every_time(lab, runner):
    requests = lab.requests(seed=3)
    setup = {"fence": "none", "runner": runner, "backend": "virtual-random", "seed": 5}
    runs = [lab.run(requests, **setup, **SETUP) for _ in range(2)]
    first, second = ([(type(record), record.op, record.host_ns) for record in run.records] for run in runs)
    assert first == second
    assert runs[0].findings == runs[1].findings != []
    assert runs[0].outputs == runs[1].outputs
    assert runs[0].corrupted == runs[1].corrupted


@pytest.mark.parametrize("fence", ["none", "stream", "page"])
def test_the_trace_has_what_the_engine_counts(lab, fence):
    run = lab.run(lab.requests(seed=3), fence=fence, **SETUP)
    engine, counters = run.engine, run.engine.controller.counters
    kernels, copies = run.of_kind(Kernel), run.of_kind(Memcpy)
    assert len(kernels) == engine.runner.launched_segments + counters.index_moves
    assert len(copies) == engine.controller.engine.launched_copies
    assert len(copies) == 3 * counters.load_backs + counters.write_backs
    assert counters.index_moves == counters.load_backs + counters.write_backs
    restored = [copy for copy in copies if copy.direction is Direction.HOST_TO_DEVICE and copy.layers[0] == 0]
    assert sum(len(copy.accesses[1].ids) for copy in restored) == counters.restored_pages
    purposes = Counter(record.purpose for record in run.of_kind(WaitStream, EventWait))
    assert purposes[Purpose.START] == counters.index_moves
    assert purposes[Purpose.LAYER] == 3 * counters.load_backs
    fences = [purposes[Purpose.LOAD_FENCE], purposes[Purpose.WRITE_FENCE]]
    if fence == "page":
        assert 0 < fences[0] < counters.load_backs
        assert 0 < fences[1] <= counters.write_backs
    else:
        assert fences == ([counters.load_backs, counters.write_backs] if fence == "stream" else [0, 0])


def test_page_ownership_reported_by_the_scheduler_is_consistent(lab):
    """Every page is allocated, then freed, then allocated; what is left belongs to the tree."""
    owned: set[int] = set()

    def prepare(engine: Engine) -> None:
        def on_alloc(owner: int, pages) -> None:
            assert owned.isdisjoint(pages.tolist())
            owned.update(pages.tolist())

        def on_free(owner: int, pages) -> None:
            assert owned.issuperset(pages.tolist())
            owned.difference_update(pages.tolist())

        engine.scheduler.on_alloc, engine.scheduler.on_free = on_alloc, on_free

    run = lab.run(lab.requests(seed=3), prepare=prepare, **SETUP)
    nodes = [node.device_pages for node in run.engine.scheduler.radix.nodes() if node.device_pages is not None]
    assert owned == set(np.concatenate(nodes).tolist())


def test_after_step_is_called_after_every_step_and_at_the_end(lab):
    steps: list[tuple[int, bool, int]] = []

    def after_step(engine: Engine) -> None:
        scheduler = engine.scheduler
        steps.append((scheduler.counters.rounds, scheduler.done, engine.controller.transfers_in_flight))

    lab.run([Request(0, 0, np.arange(9), 2)], after_step=after_step)
    assert steps == [(1, False, 0), (2, False, 0), (3, False, 1), (3, True, 1), (3, True, 0)]


# -- pools are touched inside launched functions only ----------------------------------------------------------------


def pools(engine: Engine) -> list:
    """All pool tensors, both tiers."""
    transfers = engine.controller.engine
    return [transfers.device_pool.k, transfers.device_pool.v, transfers.host_pool.k, transfers.host_pool.v]


@RUNNERS
@pytest.mark.parametrize("backend", ["threads", "virtual-eager", "virtual-adversarial"])
def test_no_pool_is_touched_outside_launch(lab, backend, runner):
    requests = lab.requests(seed=3)
    engine, _ = lab.build(lab.setup(backend=backend, runner=runner, **SETUP), requests)
    with PoolGuard(engine.runner.device, pools(engine)):
        engine.run(requests)
    assert engine.scheduler.outputs == lab.reference(requests, runner=runner)


@pytest.mark.parametrize("which", range(4))
def test_a_touch_outside_launch_is_noticed(lab, which):
    requests = lab.requests(seed=3)
    engine, _ = lab.build(lab.setup(**SETUP), requests)

    def peek() -> None:
        if engine.scheduler.counters.rounds == 5:
            pools(engine)[which][0, 0].sum()

    with PoolGuard(engine.runner.device, pools(engine)), pytest.raises(StreamError, match="outside launch"):
        engine.run(requests, after_step=peek)


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"runner": "gpt"}, "--runner gpt: unknown runner; expected one of transformer, pattern, blank"),
        ({"fence": "some"}, "--fence some: unknown policy; expected one of none, stream, page"),
        ({"device_pages": 4}, "--device-pages 4: the longest request needs 5 pages; expected at least that"),
    ],
)
def test_what_cannot_be_built(lab, change, text):
    requests = [Request(0, 0, np.arange(3), 1), Request(1, 0, np.arange(12), 4)]
    observed = lab.observed("virtual-eager", record=False)
    with pytest.raises(ConfigError) as refused:
        build_engine(observed.device, replace(CONFIG, **change), requests)
    assert str(refused.value) == text


def test_the_smallest_pool_that_is_accepted_is_enough(lab):
    requests = [Request(n, 0, np.arange(50 * n, 50 * n + 12), 4) for n in range(3)]
    run = lab.run(requests, device_pages=5)
    assert run.outputs == lab.reference(requests)
