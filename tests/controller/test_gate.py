"""The writer gate: a held round begins once every transfer since has finished, or is parked behind it."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from hicache_obs.controller.gate import WriterGate
from hicache_obs.errors import GateTimeout


class FakeGate:
    """Writes down what is asked of it; ``moved`` is the answer for a transfer's stream."""

    def __init__(self, log: list[str], moved: dict[str, bool]) -> None:
        self._log, self._moved = log, moved
        log.append("new gate")

    def hold(self, stream: SimpleNamespace) -> None:
        self._log.append(f"hold {stream.name}")

    def open(self) -> None:
        self._log.append("open")

    def wait_blocks_or(self, stream: SimpleNamespace, done: str, *, timeout_s: float) -> bool:
        self._log.append(f"wait for {stream.name} or {done}, {timeout_s:g} s")
        return self._moved.get(stream.name, True)


def fake(moved: dict[str, bool]) -> tuple[WriterGate, SimpleNamespace, list[str]]:
    """A gate on a scheduler of two hooks and a runner."""
    log: list[str] = []
    device = SimpleNamespace(gate=lambda: FakeGate(log, moved))
    scheduler = SimpleNamespace(runner=SimpleNamespace(device=device, forward_stream=SimpleNamespace(name="forward")))
    return WriterGate(scheduler, timeout_s=2.5), scheduler, log


def transfer(number: int, stream: str) -> SimpleNamespace:
    return SimpleNamespace(transfer=number, stream=SimpleNamespace(name=stream), finish=f"end {number}")


def test_it_holds_the_round_and_opens_after_all_transfers_have_moved():
    gate, scheduler, log = fake({})
    scheduler.before_launch()
    assert log == ["new gate", "hold forward"]
    gate.on_transfer(transfer(1, "write-back"))
    gate.on_transfer(transfer(2, "load-back"))
    scheduler.after_submit()
    assert log[2:] == ["wait for write-back or end 1, 2.5 s", "wait for load-back or end 2, 2.5 s", "open"]
    scheduler.after_submit()
    assert log[5:] == []


def test_each_round_has_a_gate_and_its_own_transfers():
    gate, scheduler, log = fake({})
    for number in (1, 2):
        scheduler.before_launch()
        gate.on_transfer(transfer(number, "load-back"))
        scheduler.after_submit()
    assert log == [
        line
        for number in (1, 2)
        for line in ("new gate", "hold forward", f"wait for load-back or end {number}, 2.5 s", "open")
    ]


def test_without_a_round_in_flight_there_is_nothing_to_hold():
    gate, scheduler, log = fake({"load-back": False})
    gate.on_transfer(transfer(1, "load-back"))
    scheduler.after_submit()
    scheduler.before_launch()
    scheduler.after_submit()
    assert log == ["new gate", "hold forward", "open"]


def test_a_transfer_that_does_not_move_opens_the_gate_and_fails_the_run():
    gate, scheduler, log = fake({"load-back": False})
    scheduler.before_launch()
    gate.on_transfer(transfer(7, "load-back"))
    gate.on_transfer(transfer(8, "write-back"))
    with pytest.raises(GateTimeout) as failed:
        scheduler.after_submit()
    assert str(failed.value) == (
        "transfer 7 on 'load-back' neither finished nor waited for the round in flight within 2.5 s"
    )
    assert log[2:] == ["wait for load-back or end 7, 2.5 s", "open"]


class SpyGate:
    """A real gate that notes how each transfer had moved when the gate opened."""

    def __init__(self, gate, moved: list[tuple[str, str]]) -> None:
        self._gate, self._moved = gate, moved
        self.hold, self.open, self.blocks = gate.hold, gate.open, gate.blocks

    def wait_blocks_or(self, stream, done, *, timeout_s: float) -> bool:
        in_time = self._gate.wait_blocks_or(stream, done, timeout_s=timeout_s)
        self._moved.append((stream.name, "parked" if self.blocks(stream) else "finished" if done.query() else "?"))
        return in_time


def moved(lab, fence: str) -> tuple[set[tuple[str, str]], object]:
    """How the transfers of a gated run on threads had moved, and the run."""
    seen: list[tuple[str, str]] = []

    def spy(engine) -> None:
        gate = engine.runner.device.gate
        engine.runner.device.gate = lambda: SpyGate(gate(), seen)

    run = lab.run(
        lab.requests(seed=3),
        fence=fence,
        backend="threads",
        prepare=spy,
        gated=True,
        device_pages=16,
        early_backup=True,
        record=False,
    )
    assert {stream for stream, _ in seen} == {"load-back", "write-back"}
    return set(seen), run


def test_without_fences_every_transfer_overtakes_the_held_round(lab):
    seen, run = moved(lab, "none")
    assert {how for _, how in seen} == {"finished"}
    assert run.corrupted == moved(lab, "none")[1].corrupted != []


def test_with_stream_fences_every_transfer_is_parked_behind_it(lab):
    seen, run = moved(lab, "stream")
    assert {how for _, how in seen} == {"parked"}
    assert run.corrupted == []


def test_with_page_fences_only_those_that_conflict_are(lab):
    seen, run = moved(lab, "page")
    assert ("load-back", "parked") in seen
    assert ("load-back", "finished") in seen
    assert run.corrupted == []


@pytest.mark.parametrize("fence", ["none", "stream", "page"])
def test_a_gated_run_is_the_same_every_time(lab, fence):
    requests = lab.requests(seed=3)
    setup = {"fence": fence, "backend": "threads", "gated": True, "device_pages": 16}
    first, second = (lab.run(requests, **setup) for _ in range(2))
    assert first.races == second.races
    assert first.corrupted == second.corrupted
    assert bool(first.races) == (fence == "none")
    assert first.outputs == second.outputs


def test_a_stuck_transfer_stream_fails_the_run(lab):
    """Neither finished nor parked on the round: something else holds the copies up."""
    stuck = []

    def hold(engine) -> None:
        if not stuck and engine.scheduler.counters.rounds == 8:
            stuck.append(engine.runner.device.gate())
            stuck[0].hold(engine.controller.engine.host_to_device_stream)
            stuck[0].hold(engine.controller.engine.device_to_host_stream)
            engine.scheduler.before_launch.__self__._timeout_s = 0.05

    text = r"^transfer \d+ on '(load|write)-back' neither finished nor waited for the round in flight within 0.05 s$"
    setup = {"backend": "threads", "gated": True, "device_pages": 16, "early_backup": True, "after_step": hold}
    with pytest.raises(GateTimeout, match=re.compile(text)):
        lab.run(lab.requests(seed=3), **setup)
    stuck[0].open()
