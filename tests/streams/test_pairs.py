"""The same history with and without one edge: without it the race is struck, with it it is not.

Page 5 is written by a launched forward round, freed, and restored from the host by a copy on another stream.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_obs.records import Direction, Work, page_ids
from hicache_obs.streams import Device, Stream, open_device

EDGES: dict[str, tuple[Callable[[Device, Stream, Stream], None], bool]] = {
    # edge issued between the forward round and the copy            is the restore safe?
    "none": (lambda device, forward, load: None, False),
    "wait_stream": (lambda device, forward, load: load.wait_stream(forward), True),
    "record and wait": (lambda device, forward, load: load.wait_event(forward.record_event()), True),
    "over a third stream": (lambda device, forward, load: _over_third(device, forward, load), True),
    "host waits for the stream": (lambda device, forward, load: forward.synchronize(), True),
    "host waits for the device": (lambda device, forward, load: device.synchronize(), True),
    "host waits for an event": (lambda device, forward, load: forward.record_event().synchronize(), True),
    "host polls an event": (lambda device, forward, load: _poll(forward), True),
    "wait on the wrong stream": (lambda device, forward, load: device.Stream("x").wait_stream(forward), False),
    "wait the wrong way round": (lambda device, forward, load: forward.wait_stream(load), False),
    "event never recorded": (lambda device, forward, load: load.wait_event(device.Event()), False),
    "event recorded elsewhere": (lambda device, forward, load: load.wait_event(load.record_event()), False),
}


def _over_third(device: Device, forward: Stream, load: Stream) -> None:
    third = device.Stream("third")
    third.wait_stream(forward)
    load.wait_stream(third)


def _poll(forward: Stream) -> None:
    event = forward.record_event()
    while not event.query():
        pass


@pytest.mark.parametrize("edge", EDGES)
def test_adversarial_strikes_the_race_unless_an_edge_forbids_it(edge):
    assert _restored_value("adversarial", edge, seed=0) == ("restored" if EDGES[edge][1] else "stale")


@pytest.mark.parametrize("edge", EDGES)
def test_random_never_breaks_an_edge_and_finds_the_race_in_a_few_seeds(edge):
    seen = {_restored_value("random", edge, seed=seed) for seed in range(40)}
    assert seen == ({"restored"} if EDGES[edge][1] else {"restored", "stale"})


@pytest.mark.parametrize("schedule", ["eager", "lazy", "asap"])
@pytest.mark.parametrize("edge", EDGES)
def test_the_schedules_of_ordinary_tests_see_nothing(schedule, edge):
    assert _restored_value(schedule, edge, seed=0) == "restored"


def test_an_event_recorded_before_the_round_is_not_an_edge():
    assert _restored_value("adversarial", "none", seed=0, early_record=True) == "stale"


@pytest.mark.parametrize("edge", [edge for edge in EDGES if not edge.startswith("host")])
def test_on_threads_the_copy_passes_a_held_round_unless_an_edge_forbids_it(threads, edge):
    """The demo's proof: with the round held, the copy either completes or stands behind it."""
    forward, load = threads.streams("forward load")
    gate = threads.device.gate()
    gate.hold(forward)
    threads.op("forward", forward)
    EDGES[edge][0](threads.device, forward, load)
    threads.op("copy", load)
    done = load.record_event()
    assert gate.wait_blocks_or(load, done, timeout_s=20)
    assert (gate.blocks(load), done.query()) == (EDGES[edge][1], not EDGES[edge][1])
    gate.open()
    threads.device.synchronize()
    assert threads.ran() == (["forward", "copy"] if EDGES[edge][1] else ["copy", "forward"])


def _restored_value(schedule: str, edge: str, *, seed: int, early_record: bool = False) -> str:
    device = open_device("virtual", schedule=schedule, seed=seed)
    forward, load = device.Stream("forward"), device.Stream("load")
    page: list[str] = ["empty"]
    early = forward.record_event() if early_record else None
    with device.stream(forward):
        device.launch(lambda: page.__setitem__(0, "stale"), Work("forward"))
    if early is not None:
        load.wait_event(early)
    EDGES[edge][0](device, forward, load)
    copy = Work("copy", direction=Direction.HOST_TO_DEVICE, size_bytes=len(page_ids([5])) * 4096)
    with device.stream(load):
        device.launch(lambda: page.__setitem__(0, "restored"), copy)
    device.synchronize()
    return page[0]
