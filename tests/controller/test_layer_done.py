"""Layer events: producers take turns, a round waits for its own load-back's layers, late waits are refused."""

from __future__ import annotations

import pytest

from hicache_obs.controller.layer_done import PRODUCERS, LayerDoneCounter, Ticket
from hicache_obs.errors import StaleGeneration
from hicache_obs.records import Work


class Loads:
    """Load-backs of three layers whose copies leave their names in ``ran``."""

    def __init__(self, observed) -> None:
        self.observed = observed
        self.device = observed.device
        self.counter = LayerDoneCounter(self.device, 3)
        self.load, self.forward = self.device.Stream("load-back"), self.device.Stream("forward")
        self.ran: list[str] = []

    def submit(self, name: str) -> Ticket:
        """One load-back, as the transfer engine and the controller do it."""
        ticket = self.counter.begin()
        with self.device.stream(self.load):
            for layer in range(3):
                self.op(f"{name}{layer}")
                self.counter.complete(ticket, layer)
            self.counter.finish(ticket, self.load.record_event())
        return ticket

    def consume(self, ticket: Ticket, name: str, layers: range = range(3)) -> None:
        """One round with a segment per layer."""
        with self.device.stream(self.forward):
            for layer in layers:
                self.counter.wait_until(ticket, layer)
                self.op(f"{name}{layer}")

    def op(self, name: str) -> None:
        self.device.launch(lambda: self.ran.append(name), Work("op"))


@pytest.fixture
def loads(lab):
    """``loads(schedule)``."""
    return lambda schedule="adversarial": Loads(lab.observed(f"virtual-{schedule}"))


def test_producers_take_turns(loads):
    bench = loads()
    tickets = [bench.submit("load") for _ in range(2 * PRODUCERS + 1)]
    assert [(ticket.producer, ticket.generation) for ticket in tickets] == [
        (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2), (0, 3)
    ]  # fmt: skip


def test_begin_blocks_for_the_load_back_that_used_the_producer_and_for_no_other(loads):
    """On the lazy schedule only what the host waits for runs."""
    bench = loads("lazy")
    for name in "abc":
        bench.submit(name)
    assert bench.ran == []
    bench.counter.begin()
    assert bench.ran == ["a0", "a1", "a2"]
    bench.counter.begin()
    assert bench.ran == ["a0", "a1", "a2", "b0", "b1", "b2"]


def test_begin_does_not_block_for_a_load_back_that_was_never_submitted(loads):
    bench = loads("lazy")
    for _ in range(2 * PRODUCERS):
        bench.counter.begin()
    assert "host: synchronize" not in bench.observed.calls()


def test_each_segment_waits_for_its_layer_and_for_no_later_one(loads):
    """Adversarial runs whatever it can of what was issued last: a segment runs as soon as its own layer is there."""
    bench = loads()
    bench.consume(bench.submit("load"), "forward")
    bench.device.synchronize()
    assert bench.ran == ["load0", "forward0", "load1", "forward1", "load2", "forward2"]


def test_a_round_that_does_not_wait_overtakes_the_load_back(loads):
    bench = loads()
    bench.submit("load")
    with bench.device.stream(bench.forward):
        bench.op("forward")
    bench.device.synchronize()
    assert bench.ran[0] == "forward"


def test_waits_are_issued_on_the_current_stream_as_layer_waits(loads):
    bench = loads()
    ticket = bench.submit("load")
    before = len(bench.observed.records)
    bench.consume(ticket, "forward", range(2))
    assert bench.observed.calls(before) == [
        "forward: wait event (layer)",
        "forward: op",
        "forward: wait event (layer)",
        "forward: op",
    ]


def test_a_wait_is_for_the_load_back_of_its_ticket(loads):
    """Three load-backs in flight; the round of the first runs before the other two."""
    bench = loads("lazy")
    tickets = [bench.submit(name) for name in "abc"]
    bench.consume(tickets[0], "forward")
    bench.forward.synchronize()
    assert bench.ran == ["a0", "a1", "a2", "forward0", "forward1", "forward2"]


def test_recording_over_an_event_leaves_the_waits_for_it_alone(loads):
    bench = loads("lazy")
    first = bench.submit("a")
    bench.consume(first, "forward")
    for name in "bcd":  # d records over the events of a
        bench.submit(name)
    bench.forward.synchronize()
    assert not {name for name in bench.ran if name[0] in "bcd"}


def test_a_ticket_whose_events_were_recorded_over_is_refused(loads):
    bench = loads()
    first = bench.submit("a")
    for name in "bc":
        bench.submit(name)
    bench.counter.wait_until(first, 2)  # still its own
    bench.submit("d")
    text = "producer 0: generation 1 was asked for, its events now belong to generation 2"
    before = bench.observed.calls()
    with pytest.raises(StaleGeneration) as late:
        bench.counter.wait_until(first, 2)
    assert str(late.value) == text
    with pytest.raises(StaleGeneration, match=text):
        bench.counter.complete(first, 0)
    with pytest.raises(StaleGeneration, match=text):
        bench.counter.finish(first, bench.device.Event())
    assert bench.observed.calls() == before


def test_it_is_stale_from_begin_on_not_only_once_recorded_over(loads):
    """Between the two the old record is still there, but a wait issued later would silently be for the new one."""
    bench = loads()
    first = bench.submit("a")
    for name in "bc":
        bench.submit(name)
    bench.counter.begin()
    with pytest.raises(StaleGeneration):
        bench.counter.wait_until(first, 0)
