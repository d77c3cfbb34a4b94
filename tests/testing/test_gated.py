"""A gate before the earlier operation: the later one overtakes it exactly if nothing orders the two."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from hicache_obs.analyzer.graph import Graph
from hicache_obs.analyzer.witness import shared
from hicache_obs.errors import InputError
from hicache_obs.readers import open_trace
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import (
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostAccess,
    HostSync,
    Kernel,
    Memcpy,
    OpId,
    Relocate,
    ThreadPost,
    ThreadRecv,
    WaitStream,
)
from hicache_obs.streams import open_device
from hicache_obs.testing import races
from hicache_obs.testing.gated import assert_held_back, overtakes, unfit
from hicache_obs.testing.programs import random_program
from hicache_obs.trace import Trace, make_trace

CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
STEPS = {
    "a": '{"id": "a", "op": "kernel", "stream": "x", "writes": [1]}',
    "b": '{"id": "b", "op": "kernel", "stream": "y", "reads": [1]}',
    "host": '{"id": "host", "op": "host_access", "thread": "t", "reads_host": [1]}',
    "back": '{"id": "back", "op": "memcpy", "kind": "d2h", "stream": "x", "device_pages": [1], "host_pages": [1]}',
    "wait": '{"id": "wait", "op": "wait_stream", "waiter": "y", "on": "x"}',
    "wrong": '{"id": "wrong", "op": "wait_stream", "waiter": "z", "on": "x"}',
    "record": '{"id": "record", "op": "event_record", "event": "e", "stream": "x"}',
    "early": '{"id": "early", "op": "event_record", "event": "e", "stream": "x"}',
    "await": '{"id": "await", "op": "event_wait", "event": "e", "stream": "y"}',
    "sync": '{"id": "sync", "op": "event_sync", "event": "e"}',
    "query": '{"id": "query", "op": "event_query", "event": "e", "result": true}',
    "drain": '{"id": "drain", "op": "host_sync", "scope": "stream", "stream": "x"}',
    "drain all": '{"id": "drain all", "op": "host_sync", "scope": "device"}',
    "drain z": '{"id": "drain z", "op": "host_sync", "scope": "stream", "stream": "z"}',
    "t drains": '{"id": "t drains", "op": "host_sync", "thread": "t", "scope": "stream", "stream": "x"}',
    "t posts": '{"id": "t posts", "op": "thread_post", "thread": "t", "chan": "c"}',
    "recv": '{"id": "recv", "op": "thread_recv", "chan": "c"}',
}

PLAIN = (
    *(Kernel, Memcpy, Relocate, HostAccess),
    *(EventRecord, EventWait, WaitStream, EventQuery, EventSync, HostSync, ThreadPost, ThreadRecv),
)


def program(*names: str) -> str:
    """A scenario of these steps."""
    return '{"steps": [' + ", ".join(STEPS[name] for name in names) + "]}"


@pytest.mark.parametrize(
    ("without", "with_edge"),
    [
        (["a", "b"], ["a", "wait", "b"]),
        (["a", "wrong", "b"], ["a", "wait", "b"]),
        (["early", "a", "await", "b"], ["a", "record", "await", "b"]),
        (["early", "a", "sync", "b"], ["a", "record", "sync", "b"]),
        (["early", "a", "query", "b"], ["a", "record", "query", "b"]),
        (["a", "drain z", "b"], ["a", "drain", "b"]),
        (["drain all", "a", "b"], ["a", "drain all", "b"]),
        (["a", "t drains", "b"], ["a", "t drains", "t posts", "recv", "b"]),
        (["a", "t posts", "t drains", "recv", "b"], ["a", "t drains", "t posts", "recv", "b"]),
    ],
    ids=lambda steps: " ".join(steps),
)
def test_one_edge_holds_it_back(without: list[str], with_edge: list[str]) -> None:
    """On real threads, every time."""
    with pytest.raises(AssertionError, match="step b was complete while step a was held at a gate"):
        assert_held_back(program(*without), "a", "b")
    assert_held_back(program(*with_edge), "a", "b")


def test_a_host_access_is_held_back_too() -> None:
    """A thread that waits for the copy does not get to it."""
    with pytest.raises(AssertionError, match="step host was complete"):
        assert_held_back(program("back", "host"), "back", "host")
    assert_held_back(program("back", "t drains", "host"), "back", "host")


@pytest.mark.parametrize(
    ("text", "earlier", "message"),
    [
        (program("a", "b"), "c", "SCENARIO: step c: must be one of a, b"),
        (program("a", "wait"), "wait", "SCENARIO: steps wait and a: must touch a common page or buffer"),
        (program("host", "back"), "host", "cannot be run with a gate: host runs on no stream"),
        (
            '{"streams": {"x": {"kind": "legacy"}}, "steps": [' + STEPS["a"] + "," + STEPS["b"] + "]}",
            "b",
            "it has a legacy stream",
        ),
    ],
)
def test_what_cannot_be_run(text: str, earlier: str, message: str) -> None:
    """Says why."""
    with pytest.raises(InputError, match=message):
        assert_held_back(text, earlier, "back" if "back" in text else "a")


def conflicts(trace: Trace) -> list[tuple[OpId, OpId]]:
    """Every conflicting pair that can be run with a gate, earlier first."""
    items = [item for item in Graph(trace).items if item.accesses]
    pairs = [(a.op, b.op) for index, b in enumerate(items) for a in items[:index] if shared(a, b)]
    return [pair for pair in pairs if not unfit(trace, *pair)]


def decide(trace: Trace) -> dict[tuple[OpId, OpId], bool]:
    """What happens to each conflicting pair on real threads."""
    decided = {}
    for pair in conflicts(trace):
        with closing(open_device("threads")) as device:
            decided[pair] = overtakes(trace, *pair, device)
    return decided


def test_the_cases() -> None:
    """Real threads and a search over all executions say the same of every pair of every case that can be run."""
    both = {True: 0, False: 0}
    for path in CASES:
        trace = open_trace(path)
        expected = races(list(trace), polled=True)
        for pair, overtook in decide(trace).items():
            assert overtook == (pair in expected), (path.name, pair)
            both[overtook] += 1
    assert min(both.values()) >= 10, both


@pytest.mark.slow
def test_random_programs() -> None:
    """And of random programs, without the record kinds that no device can be told."""
    both = {True: 0, False: 0}
    for seed in range(300):
        plain = [record for record in random_program(seed, steps=20) if isinstance(record, PLAIN)]
        trace = make_trace(f"seed {seed}", plain)
        expected = races(list(trace), polled=True)
        for pair, overtook in decide(trace).items():
            assert overtook == (pair in expected), (seed, pair)
            both[overtook] += 1
    assert min(both.values()) >= 20, both


def test_the_same_program_twice_gives_the_same() -> None:
    """Nothing depends on speed."""
    trace = parse_scenario(program("a", "wrong", "b").encode(), source="race")
    assert [list(decide(trace).values()) for _ in range(20)] == [[True]] * 20
