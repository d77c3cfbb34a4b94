"""The scheduler: overlap, pages freed under rounds in flight, retraction, no page lost, and always the right tokens."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from hicache_obs.controller.batch import BatchMode
from hicache_obs.controller.engine import Engine
from hicache_obs.controller.eviction import EVICTION_POLICIES
from hicache_obs.controller.scheduler import Scheduler
from hicache_obs.controller.scheduler_options import BARRIERS, RETRACTIONS, WRITE_POLICIES
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ControllerError
from hicache_obs.findings import Hazard
from hicache_obs.records import unpack_rows
from hicache_obs.streams import SCHEDULES
from hicache_obs.testing.consistency import check_drained, check_engine

LAYERS, PAGE_SIZE = 3, 4
FENCED = pytest.mark.parametrize("fence", ["stream", "page"])
RUNNERS = pytest.mark.parametrize("runner", ["pattern", "transformer"])


def largest(requests: list[Request]) -> int:
    """Pages of the longest request, alone, its overrun row included."""
    return max(-(-(len(request.prompt) + request.output_length + 1) // PAGE_SIZE) for request in requests)


def assert_drained(engine: Engine) -> None:
    """What holds at the end."""
    check_drained(engine)
    scheduler = engine.scheduler
    assert engine.controller.counters.restored_pages == len(scheduler.restored)
    assert engine.ledger.checks >= LAYERS * len(scheduler.restored)  # the round that restores a page checks it


def check_batches(engine: Engine) -> None:
    """Let every round be checked: what it says that it reads and writes is what its rows use, no more and no less."""
    forward = engine.runner.forward

    def launching(batch, **kwargs):
        ends = batch.prefix_lens + batch.new_lens
        bounds = (batch.prefix_lens // PAGE_SIZE).tolist(), (-(-ends // PAGE_SIZE)).tolist()
        rows = list(zip(batch.page_table, *bounds, strict=True))
        assert batch.read_pages.tolist() == np.unique(np.concatenate([row[:end] for row, _, end in rows])).tolist()
        written = np.concatenate([row[start:end] for row, start, end in rows])
        assert batch.write_pages.tolist() == sorted(set(written.tolist()))
        assert len(set(written.tolist())) == len(written)  # rows never write one page
        stated = unpack_rows(batch.row_ids)
        slots = {state.slot: state.request.request_id for state in engine.scheduler._running}
        assert stated.requests.tolist() == [slots[slot] for slot in batch.token_slots.tolist()]
        assert stated.pages.tolist() == np.concatenate([row[:end] for row, _, end in rows]).tolist()
        assert np.diff(stated.starts).tolist() == [end for _, _, end in rows]
        assert stated.reads.tolist() == (-(-batch.prefix_lens // PAGE_SIZE)).tolist()
        assert stated.writes.tolist() == [end - start for _, start, end in rows]
        return forward(batch, **kwargs)

    engine.runner.forward = launching


workloads = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 10_000),
        "n": st.integers(1, 24),
        "reuse": st.sampled_from([0.3, 0.8, 0.95]),
        "conversations": st.sampled_from([2, 6]),
        "max_blocks": st.sampled_from([3, 8]),
        "max_output": st.sampled_from([1, 4, 12]),
        "output_mean": st.sampled_from([340.0, 1500.0]),
    }
)
setups = st.fixed_dictionaries(
    {
        "fence": st.sampled_from(["stream", "page"]),
        "write_fence": st.sampled_from([None, "stream", "page"]),
        "backend": st.sampled_from([f"virtual-{schedule}" for schedule in SCHEDULES]),
        "seed": st.integers(0, 1000),
        "host_pages": st.sampled_from([6, 20, 64]),
        "max_running": st.sampled_from([1, 3, 6]),
        "max_extend_tokens": st.sampled_from([16, 64]),
    }
)
policies = st.fixed_dictionaries(
    {
        "chunked_prefill": st.booleans(),
        "write_policy": st.sampled_from(WRITE_POLICIES),
        "write_threshold": st.sampled_from([1, 2, 3]),
        "host_eviction": st.sampled_from(EVICTION_POLICIES),
        "retraction": st.sampled_from(RETRACTIONS),
        "barrier": st.sampled_from(BARRIERS),
    }
)


@RUNNERS
@settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    phases=[Phase.explicit, Phase.generate],  # shrinking whole runs takes minutes, and says little more
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(workload=workloads, setup=setups, policies=policies, early=st.booleans(), spare=st.sampled_from([0, 1, 4, 12]))
def test_any_workload_in_any_setup(lab, runner, workload, setup, policies, early, spare):
    """Fenced, tokens are those of a run without host tier, nothing is found or spoiled, and nothing is left over."""
    requests = [replace(request, priority=request.request_id % 3) for request in lab.requests(**workload)]
    early = early and policies["write_policy"] == "write_through"
    setup = {**setup, "policies": policies, "early_backup": early, "prepare": check_batches}
    setup["device_pages"] = largest(requests) + spare
    run = lab.run(requests, runner=runner, after_step=check_engine, **setup)
    assert run.outputs == lab.reference(requests, runner=runner)
    assert run.findings == []
    assert run.corrupted == []
    assert_drained(run.engine)


@RUNNERS
@FENCED
@pytest.mark.parametrize("gated", [True, False])
def test_on_threads(lab, runner, fence, gated):
    requests = lab.requests(seed=3)
    setup = {"runner": runner, "fence": fence, "gated": gated, "device_pages": 16, "early_backup": True}
    run = lab.run(requests, backend="threads", after_step=check_engine, **setup)
    assert run.outputs == lab.reference(requests, runner=runner)
    assert run.findings == []
    assert run.corrupted == []
    assert len(run.engine.scheduler.restored) > 10
    assert_drained(run.engine)


@FENCED
def test_retracted_requests_get_their_tokens(lab, fence):
    total: Counter[str] = Counter()
    for seed in range(4):
        requests = lab.requests(seed=seed, max_output=16, output_mean=1500.0)
        run = lab.run(requests, fence=fence, device_pages=largest(requests) + 2, prepare=check_batches)
        assert run.outputs == lab.reference(requests)
        assert run.findings == []
        counters = run.engine.scheduler.counters
        total["retractions"] += counters.retractions
        total["finished"] += counters.finished
        total["restored"] += len(run.engine.scheduler.restored)
        assert [len(run.outputs[request.request_id]) for request in requests] == [r.output_length for r in requests]
    assert total["retractions"] > 20
    assert total["restored"] > 20
    assert total["finished"] == 4 * 24


def test_a_round_is_launched_before_the_result_of_the_last_is_handled(lab):
    log: list[str] = []

    def watch(engine: Engine) -> None:
        scheduler, forward, handle = engine.scheduler, engine.runner.forward, engine.scheduler._handle

        def launching(batch, **kwargs):
            log.append(f"launch {batch.round_id}")
            return forward(batch, **kwargs)

        def handling(launched):
            log.append(f"handle {launched.result.round_id}")
            handle(launched)

        engine.runner.forward, scheduler._handle = launching, handling

    requests = [Request(0, 0, np.arange(6), 4)]
    lab.run(requests, prepare=watch)
    assert log == [
        "launch 1",
        "launch 2",
        "handle 1",
        "launch 3",
        "handle 2",
        "launch 4",
        "handle 3",
        "launch 5",  # the overrun row: round 4 has the last token, but nobody knows yet
        "handle 4",
        "handle 5",
    ]


def test_pages_are_freed_while_a_launched_round_still_writes_them(lab):
    """On finish and on retraction, which is what makes fences necessary."""
    freed: Counter[str] = Counter()
    unfinished: dict[int, set[int]] = {}

    def watch(engine: Engine) -> None:
        scheduler, forward, completed = engine.scheduler, engine.runner.forward, engine.scheduler.in_flight.completed
        finish, retract, why = scheduler._finish, scheduler._retract, []

        def launching(batch, **kwargs):
            unfinished[batch.round_id] = set(batch.write_pages.tolist())
            return forward(batch, **kwargs)

        def known(stream, ticket):
            unfinished.pop(ticket)
            completed(stream, ticket)

        def during(reason, act):
            def acting(state):
                why.append(reason)
                act(state)
                why.pop()

            return acting

        def on_free(owner, pages):
            if why and any(written & set(pages.tolist()) for written in unfinished.values()):
                freed[why[-1]] += 1

        engine.runner.forward = launching
        scheduler.in_flight = Recounted(scheduler.in_flight, known)
        scheduler._finish, scheduler._retract = during("finish", finish), during("retract", retract)
        scheduler.on_free = on_free

    requests = lab.requests(seed=2)
    run = lab.run(requests, prepare=watch)
    assert freed["finish"] > 3
    assert freed["retract"] > 0
    assert run.findings == []


class Recounted:
    """``InFlight`` that tells somebody what is complete."""

    def __init__(self, in_flight, completed) -> None:
        self.launched, self.event, self.completed = in_flight.launched, in_flight.event, completed


def test_write_backs_that_nobody_submitted_do_not_hold_up_admission(lab):
    """A finished request's pages are pinned by its queued write-back, and no round can run before they are evicted."""
    requests = [Request(n, 0, np.arange(100 * n, 100 * n + 14) % 512, 1) for n in range(3)]
    run = lab.run(requests, device_pages=largest(requests), after_step=check_engine)
    assert run.outputs == lab.reference(requests)
    assert run.engine.controller.counters.backed_up_pages == 9


@pytest.mark.parametrize("fence", ["stream", "page", "none"])
def test_a_finished_request_whose_continuation_is_already_running(lab, fence):
    """The next turn of a conversation is launched while the last round of this one is in flight: the tree has its
    pages, not ours, and they are backed up before they are known to be written."""
    first, other = np.arange(8), np.arange(40, 43)
    requests = [Request(0, 0, first, 6), Request(1, 0, other, 5)]
    answer = lab.reference(requests)[0]
    requests.append(Request(2, 0, np.concatenate([first, answer[:4], [7, 8]]), 3))
    again = Request(3, 0, np.concatenate([first, answer[:4], [9, 9, 9]]), 2)
    requests += [Request(4, 0, np.arange(200, 236), 1), again]

    run = lab.run(requests, fence=fence, device_pages=10, max_running=2, after_step=check_engine)
    fenced = fence != "none"
    assert set(run.hazards) == (set() if fenced else {Hazard.RAW_FORWARD_BACKUP})
    assert bool(run.corrupted) == (not fenced)
    assert (run.outputs == lab.reference(requests)) == fenced


def test_equal_prompts_in_one_round_share_their_pages(lab):
    """Each computes them, the first keeps them."""
    prompt = np.arange(18)
    requests = [Request(n, 0, prompt, 5) for n in range(3)]
    peak = []
    run = lab.run(requests, after_step=lambda engine: peak.append(engine.scheduler.device_pages.in_use))
    assert len({tuple(tokens) for tokens in run.outputs.values()}) == 1
    assert run.engine.scheduler.counters.extend_rounds == 1
    assert peak[0] == 4 + 3 * 1
    assert run.findings == []


def test_limits_of_a_prefill_round(lab):
    batches: list[tuple[int, int]] = []

    def watch(engine: Engine) -> None:
        forward = engine.runner.forward

        def launching(batch, **kwargs):
            if batch.mode is BatchMode.EXTEND:
                batches.append((batch.rows, int(batch.new_lens.sum())))
            return forward(batch, **kwargs)

        engine.runner.forward = launching

    requests = lab.requests(30, seed=1)
    lab.run(requests, prepare=watch, device_pages=200, max_running=16, max_extend_tokens=16)
    assert max(rows for rows, _ in batches) == 4
    assert all(tokens <= 16 or rows == 1 for rows, tokens in batches)
    assert any(tokens > 16 for _, tokens in batches)  # one request alone may exceed it


def test_host_memory_is_evicted_and_too_little_of_it_backs_up_less(lab):
    requests = lab.requests(40, seed=4)
    backed_up = []
    for pages in (64, 12, 1):
        run = lab.run(requests, host_pages=pages, after_step=check_engine)
        assert run.outputs == lab.reference(requests)
        assert run.findings == []
        backed_up.append(
            (run.engine.controller.counters.restored_pages, run.engine.scheduler.backups.counters.evicted_host_pages)
        )
    assert [restored for restored, _ in backed_up] == sorted((restored for restored, _ in backed_up), reverse=True)
    assert backed_up[1][1] > 0


def test_without_host_tier_nothing_is_transferred(lab):
    requests = lab.requests(seed=3)
    run = lab.run(requests, host_tier=False, device_pages=16, after_step=check_engine)
    assert run.outputs == lab.reference(requests)
    counters = run.engine.controller.counters
    assert (counters.load_backs, counters.write_backs, counters.index_moves) == (0, 0, 0)
    assert_drained(run.engine)


@pytest.mark.parametrize("early", [True, False])
def test_when_prompts_are_backed_up(lab, early):
    """With the round that computes them, or once its result is handled."""
    seen: list[tuple[int, int]] = []
    requests = [Request(0, 0, np.arange(9), 4)]
    lab.run(
        requests,
        early_backup=early,
        after_step=lambda engine: seen.append(
            (engine.scheduler.counters.rounds, engine.controller.counters.backed_up_pages)
        ),
    )
    assert seen[:4] == ([(1, 2), (2, 2), (3, 2), (4, 2)] if early else [(1, 0), (2, 0), (3, 2), (4, 2)])
    assert seen[-1][1] == 3  # and the answer's first page when the request finishes


# -- the forward stream -----------------------------------------------------------------------------------------------


def replace_stream(every: int):
    """An ``after_step`` that gives the runner a new forward stream in every ``every``-th step."""
    steps = []

    def after_step(engine: Engine) -> None:
        steps.append(None)
        if len(steps) % every == 0:
            engine.runner.forward_stream = engine.runner.device.Stream(f"forward {len(steps)}")

    return after_step


@RUNNERS
@FENCED
@pytest.mark.parametrize("every", [1, 2, 5])
def test_the_forward_stream_may_be_replaced(lab, runner, fence, every):
    """Also in the step whose load-back needs the rounds that the old stream still runs."""
    requests = lab.requests(seed=3)
    setup = {"runner": runner, "fence": fence, "device_pages": 16, "early_backup": True}
    run = lab.run(requests, after_step=replace_stream(every), **setup)
    assert run.outputs == lab.reference(requests, runner=runner)
    assert run.findings == []
    assert run.corrupted == []


@FENCED
def test_the_forward_stream_may_be_replaced_on_threads(lab, fence):
    requests = lab.requests(seed=3)
    setup = {"fence": fence, "device_pages": 16, "backend": "threads", "gated": True}
    run = lab.run(requests, after_step=replace_stream(5), **setup)
    assert run.outputs == lab.reference(requests)
    assert run.findings == []


def test_a_new_forward_stream_must_follow_the_old_one_before_it_is_fenced(lab, monkeypatch):
    """A fence on a stream that does not follow the rounds in flight yet covers none of them."""

    def too_late(scheduler: Scheduler) -> None:
        for name in ("load_fence_stream", "write_fence_stream"):
            setattr(scheduler.controller, name, scheduler.runner.forward_stream)

    monkeypatch.setattr(Scheduler, "_set_fence_streams", too_late)
    run = lab.run(lab.requests(seed=3), device_pages=16, early_backup=True, after_step=replace_stream(1))
    assert Hazard.WAW_FORWARD_RESTORE in run.hazards
    assert run.corrupted != []


@FENCED
@pytest.mark.parametrize("direction", ["load", "write"])
def test_a_controller_without_the_attributes_is_left_alone(lab, monkeypatch, fence, direction):
    """An older controller: no fence of that direction under ``stream``, which needs it, and all the rest works."""
    name = f"{direction}_fence_stream"
    requests = lab.requests(seed=3)

    def prepare(engine: Engine) -> None:
        monkeypatch.delattr(type(engine.controller), name, raising=False)
        delattr(engine.controller, name)

    setup = {"device_pages": 16, "early_backup": True, "backend": "virtual-eager"}
    run = lab.run(requests, fence=fence, prepare=prepare, **setup)
    assert not hasattr(run.engine.controller, name)
    assert run.outputs == lab.reference(requests)
    expected = {
        "load": {Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_FORWARD_RESTORE},
        "write": {Hazard.RAW_FORWARD_BACKUP},
    }
    assert set(run.hazards) == (expected[direction] if fence == "stream" else set())


# -- mistakes ---------------------------------------------------------------------------------------------------------


def test_a_request_that_never_fits_is_refused(lab):
    engine, _ = lab.build(lab.setup(device_pages=4), [])
    engine.scheduler.submit([Request(1, 0, np.arange(12), 3)])
    with pytest.raises(ControllerError, match=r"^request 2: needs 5 device pages, the pool has 4$"):
        engine.scheduler.submit([Request(2, 0, np.arange(12), 4)])


def test_more_rows_than_token_slots_are_refused(lab):
    with pytest.raises(ControllerError, match=r"^max_running: 1025; the token buffer has 1024 slots$"):
        lab.build(lab.setup(max_running=1025), [])


def test_times_to_the_first_token_count_from_the_submission_also_of_a_retracted_request(lab):
    requests = lab.requests(24)
    seen: dict[int, tuple[int, int]] = {}
    last_ns = 0

    def after_step(engine: Engine) -> None:
        nonlocal last_ns
        now_ns = engine.scheduler.runner.device.host_ns()
        for request in engine.scheduler.first_token_ns:
            seen.setdefault(request, (last_ns, now_ns))
        last_ns = now_ns

    run = lab.run(requests, backend="virtual-asap", device_pages=largest(requests), after_step=after_step)
    first_token_ns = run.engine.scheduler.first_token_ns
    assert run.engine.scheduler.counters.retractions > 0
    assert sorted(first_token_ns) == [request.request_id for request in requests]
    for request, time_ns in first_token_ns.items():
        assert seen[request][0] < time_ns <= seen[request][1]  # all were submitted at 0
    assert min(first_token_ns.values()) > 0


@pytest.mark.parametrize("runner", ["pattern", "blank"])
def test_hits_and_computed_tokens_are_all_of_an_admitted_prompt(lab, runner):
    requests = lab.requests(24)
    computed = Counter()

    def prepare(engine: Engine) -> None:
        forward = engine.runner.forward

        def launching(batch, **kwargs):
            computed[batch.mode] += int(batch.new_lens.sum())
            return forward(batch, **kwargs)

        engine.runner.forward = launching

    run = lab.run(requests, runner=runner, device_pages=largest(requests) + 4, prepare=prepare)
    counters = run.engine.scheduler.counters
    assert counters.device_hit_tokens > 0
    assert counters.host_hit_tokens == run.engine.controller.counters.restored_pages * PAGE_SIZE > 0
    hits = counters.device_hit_tokens + counters.host_hit_tokens
    assert counters.admitted_tokens == hits + computed[BatchMode.EXTEND]


def test_the_blank_runner_runs_the_same_rounds(lab):
    requests = lab.requests(24)
    blank, pattern = (lab.run(requests, runner=runner) for runner in ("blank", "pattern"))
    assert blank.engine.scheduler.counters == pattern.engine.scheduler.counters
    assert blank.sink.checked == pattern.sink.checked
    assert not blank.findings
    assert blank.outputs == {request.request_id: [0] * request.output_length for request in requests}
