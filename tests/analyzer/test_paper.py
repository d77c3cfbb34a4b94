"""Where tables of schedules change their form, and which of several ranks is told to diverge."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache_obs.analyzer.stalls import find_stalls
from hicache_obs.analyzer.witness import MAX_COLUMNS, SHOWN_SLOTS, table, witness
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import OpId
from hicache_obs.testing import History
from hicache_obs.trace import Trace

Step = dict[str, Any]


def scenario(steps: list[Step], **top: Any) -> Trace:
    """Steps ``s1``, ``s2``, …"""
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    return parse_scenario(json.dumps({"steps": numbered, **top}).encode(), source="test")


def gathered(streams: list[str]) -> str:
    """F follows all of these, then races with L."""
    work = [f"{stream}:w{page}" for page, stream in enumerate(streams)]
    return " ".join([*work, *(f"F<{stream}" for stream in streams), "F:w99 L:w99"])


@pytest.mark.parametrize(("actors", "wide"), [(MAX_COLUMNS - 1, True), (MAX_COLUMNS, True), (MAX_COLUMNS + 1, False)])
def test_so_many_actors_have_columns(actors: int, wide: bool) -> None:
    streams = [f"S{number}" for number in range(actors - 2)]
    history = History(gathered(streams))
    last = history.records[-1].op
    rows = table(witness(history.records, last - 1, last)).splitlines()
    heads = [line for line in rows if line.startswith("  slot")]
    assert len(heads) == 2
    for head in heads:
        names = head.split()[1:]
        assert sorted(names) == (sorted([*streams, "F", "L"]) if wide else ["actor", "what"])


@pytest.mark.parametrize("before", [0, SHOWN_SLOTS - 3, SHOWN_SLOTS - 2, SHOWN_SLOTS - 1, SHOWN_SLOTS + 5])
def test_so_many_slots_are_shown(before: int) -> None:
    """The last ones; how many came before them is said. Two slots are the pair's."""
    history = History("F:w1 " * before + "F:w5 L:w5")
    last = history.records[-1].op
    found = witness(history.records, last - 1, last)
    hidden = max(0, before + 2 - SHOWN_SLOTS)
    for part, schedule in zip(table(found).split("\n\n"), (found.overlap, found.reverse), strict=True):
        _, *lines = part.splitlines()
        assert [line for line in lines if "earlier slots" in line] == (
            [f"  ({hidden} earlier slots run what these need)"] if hidden else []
        )
        assert not hidden or "earlier slots" in lines[1]
        shown = sorted({int(line.split()[0]) for line in lines if line.split()[0].isdigit()})
        assert shown == list(range(hidden + 1, schedule[-1].slot + 1))


@pytest.mark.parametrize(
    ("entered", "at"),
    [
        ([("b", 0), ("a", 1), ("b", 1)], "s2"),  # rank 0 leaves a out: rank 1 is alone there
        ([("a", 0), ("b", 0), ("b", 1)], "s1"),
        ([("a", 1), ("b", 1), ("b", 0)], "s1"),
        ([("b", 0), ("c", 2), ("a", 1), ("b", 1), ("b", 2)], "s3"),  # of two, the lower rank's
        ([("a", 0), ("b", 0), ("b", 1), ("a", 1)], "s1"),  # nobody leaves any out: the lowest rank's first
    ],
)
def test_the_collective_that_a_peer_leaves_out(entered: list[tuple[str, int]], at: str) -> None:
    steps: list[Step] = [
        {"op": "collective", "group": "tp", "name": name, "rank": rank, "thread": f"r{rank}"} for name, rank in entered
    ]
    trace = scenario(steps)
    (stall,) = find_stalls(trace).stalls
    assert trace.label(stall.at) == at
    assert stall.ranks == tuple(sorted({rank for _, rank in entered}))
    assert stall.blocked_ns is None


def test_the_earliest_of_those_that_would_be_enough_is_named() -> None:
    """The stream in between follows the work that is needed: waiting for its own would do as well, later."""

    def kernel(stream: str, dur_us: int, **keys: Any) -> Step:
        return {"op": "kernel", "stream": stream, "dur_us": dur_us, **keys}

    def fence(waiter: str, on: str) -> Step:
        return {"op": "wait_stream", "waiter": waiter, "on": on}

    work = [kernel("f", 100, writes=[1]), fence("g", "f"), kernel("g", 200, writes=[2]), kernel("g", 500, writes=[3])]
    for page, needed in ((1, "s1"), (2, "s3")):
        trace = scenario([*work, fence("b", "g"), kernel("b", 10, reads=[page])])
        assert [trace.label(stall.needed or OpId(0)) for stall in find_stalls(trace).stalls] == [needed]


@pytest.mark.parametrize(("reads", "stalls"), [({"reads": [30]}, 1), ({"reads_host": [30]}, 0)])
def test_host_pages_of_the_same_numbers_consume_nothing(reads: Step, stalls: int) -> None:
    """Copies that overlap nothing, and a round that reads what they bring, or something else."""
    steps: list[Step] = []
    for layer in range(3):
        steps.append({"op": "memcpy", "kind": "h2d", "stream": "load", "host_pages": [2], "device_pages": [30]})
        steps[-1] |= {"dur_us": 300, "layer": layer, "host_us": 2400}
        steps.append({"op": "event_record", "event": f"e{layer}", "stream": "load"})
    steps.append({"op": "host_access", "dur_us": 400})
    for layer in range(3):
        steps.append({"op": "event_wait", "event": f"e{layer}", "stream": "f"})
        steps.append({"op": "kernel", "stream": "f", "dur_us": 350, "layer": layer, **reads})
    assert len(find_stalls(scenario(steps, layers=3)).stalls) == stalls
