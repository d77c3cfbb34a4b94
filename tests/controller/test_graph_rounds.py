"""Replayed rounds: the same tokens as launched ones, and each wait around a replay needed."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_obs.controller.graph_rounds import Shape
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError
from hicache_obs.findings import Cause, Hazard
from hicache_obs.records import EventWait, GraphNode, GraphReplay, Kernel, Mode, Purpose, Space
from hicache_obs.streams.threads import ThreadsDevice, ThreadsGate
from hicache_obs.testing.protections import without_input_wait_of_replays, without_load_wait_of_replays

BACKENDS = ["virtual-eager", "virtual-lazy", "virtual-random", "virtual-adversarial", "threads"]
LAYERS = 3
SETUP = {"graphs": True, "device_pages": 14, "host_pages": 40, "max_running": 3}


def requests() -> list[Request]:
    """Six conversations of two blocks, each come back to several times by a prompt of one token more."""
    prompts = [(turn % 6, turn) for turn in range(24)]
    return [
        Request(n, 0, np.array([*(10 * talk + i for i in range(8)), 100 + turn], np.int64), 2 + n % 3)
        for n, (talk, turn) in enumerate(prompts)
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kv", ["mha", "mla", "fp8"])
def test_replayed_rounds_give_the_tokens_of_launched_ones(lab, backend, kv):
    run = lab.run(requests(), backend=backend, kv=kv, **SETUP)
    assert run.outputs == lab.reference(requests(), kv=kv)
    assert run.findings == []
    assert run.corrupted == []
    runner, counters = run.engine.runner, run.engine.scheduler.counters
    assert runner.replays >= counters.rounds - counters.extend_rounds > 10
    assert runner.loads_awaited > 3
    assert len(run.of_kind(GraphReplay)) == runner.replays
    assert run.engine.ledger.checks > 0


def test_no_graph_is_captured_while_a_gate_is_closed(lab, monkeypatch):
    """On a GPU a capture waits until the device is idle, and nobody could open the gate meanwhile."""
    held, captures = set(), []
    hold, open_gate, capture = ThreadsGate.hold, ThreadsGate.open, ThreadsDevice.capture
    monkeypatch.setattr(ThreadsGate, "hold", lambda gate, stream: (held.add(gate), hold(gate, stream))[1])
    monkeypatch.setattr(ThreadsGate, "open", lambda gate: (held.discard(gate), open_gate(gate))[1])
    monkeypatch.setattr(ThreadsDevice, "capture", lambda *args: (captures.append(len(held)), capture(*args))[1])
    run = lab.run(requests(), backend="threads", gated=True, **SETUP)
    assert run.engine.runner.replays > 10
    assert len(captures) > 1
    assert set(captures) == {0}


def test_what_a_replay_says_of_itself(lab):
    """Inputs, the record behind their read, then a layer per entry; the launched rounds are prefills."""
    run = lab.run(requests(), **SETUP)
    replay = run.of_kind(GraphReplay)[-1]
    place = run.records.index(replay)
    nodes = run.records[place + 1 : place + 1 + replay.nodes]
    assert [type(node) for node in nodes] == [GraphNode] * (LAYERS + 2)
    assert [(a.space, a.mode) for a in nodes[0].accesses] == [(Space.BUFFER, Mode.READ)]
    assert nodes[1].event is not None
    assert [node.layers for node in nodes[2:]] == [(0, 1), (1, 2), (2, 3)]
    pages = [(Space.DEVICE, Mode.READ), (Space.DEVICE, Mode.WRITE)]
    assert [(a.space, a.mode) for a in nodes[2].accesses] == pages
    assert [(a.space, a.mode) for a in nodes[4].accesses] == [*pages, (Space.BUFFER, Mode.WRITE)]
    layers = [record.layers for record in run.of_kind(Kernel) if len(record.accesses) == 2]
    assert layers
    read_done = [r for r in run.of_kind(EventWait) if r.event in {n.event for n in run.of_kind(GraphNode)}]
    assert len(read_done) == len(run.of_kind(GraphReplay))


def test_a_replay_that_consumes_a_load_back_waits_once_for_its_last_layer(lab):
    """Launched rounds wait layer by layer; each load-back here is consumed by either."""
    run = lab.run(requests(), **SETUP)
    waits = [record for record in run.of_kind(EventWait) if record.purpose is Purpose.LAYER]
    loads = run.engine.controller.counters.load_backs
    awaited = run.engine.runner.loads_awaited
    assert 0 < awaited <= loads
    assert len(waits) == awaited + LAYERS * (loads - awaited)


@pytest.mark.parametrize("fence", ["stream", "page"])
@pytest.mark.parametrize(
    ("remove", "cause"),
    [
        (without_load_wait_of_replays, Cause.GRAPH_SKIPS_WAIT),
        (without_input_wait_of_replays, Cause.MISSING_FENCE),
    ],
)
def test_without(lab, remove, cause, fence):
    run = lab.run(requests(), fence=fence, prepare=remove, **SETUP)
    assert set(run.hazards) == {Hazard.GRAPH}
    assert cause in {finding.cause for finding in run.findings}
    assert run.corrupted != [] or run.outputs != lab.reference(requests())


def test_an_independent_judge_finds_the_same_races(lab, judge):
    few = requests()[:10]
    run = lab.run(few, prepare=without_load_wait_of_replays, **SETUP)
    assert run.races == judge(run.records) != set()


def test_the_transformer_cannot_be_captured(lab):
    with pytest.raises(
        ConfigError, match=r"^--graphs: --runner transformer cannot be captured; expected --runner pattern$"
    ):
        lab.run(requests(), runner="transformer", graphs=True)
    with pytest.raises(
        ConfigError,
        match=r"^--kv fp8: --runner transformer needs one of mha, mla, swa, hybrid; expected --runner pattern$",
    ):
        lab.run(requests(), runner="transformer", kv="fp8")


@pytest.mark.parametrize(("rows", "pages", "checks"), [(1, 1, 0), (3, 4, 1), (2, 8, 4)])
def test_shapes_are_powers_of_two(rows, pages, checks):
    shape = Shape(rows, pages, checks, extend=False)
    assert shape.words == rows * (4 + pages) + 3 * checks
