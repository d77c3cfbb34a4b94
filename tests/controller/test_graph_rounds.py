"""Replayed rounds: the same tokens as launched ones, and each rule of a replay needed."""

from __future__ import annotations

import pytest

from hicache_obs.records import GraphReplay

BACKENDS = ["virtual-eager", "virtual-lazy", "virtual-random", "virtual-adversarial", "threads"]


def requests(lab, n: int = 16):
    return lab.requests(n, seed=3)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv", ["mha", "mla", "fp8"])
def test_replayed_rounds_give_the_tokens_of_launched_ones(lab, backend, kv):
    run = lab.run(requests(lab), backend=backend, graphs=True, kv=kv, device_pages=16)
    assert run.outputs == lab.reference(requests(lab), kv=kv)
    assert run.findings == []
    assert run.corrupted == []
    runner, counters = run.engine.runner, run.engine.scheduler.counters
    assert runner.replays >= counters.rounds - counters.extend_rounds > 10
    assert runner.loads_awaited > 0
    assert len(run.of_kind(GraphReplay)) == runner.replays
