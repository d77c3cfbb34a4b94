"""Captured graphs on every device: one operation, in order, after its stream and after earlier replays of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hicache_obs.errors import StreamError
from hicache_obs.records import Work
from hicache_obs.streams import Gate, Stream


def captured(bench: Any, *names: str | None) -> tuple[Any, Callable[[Stream], None]]:
    """A graph that leaves ``names`` in the log, ``None`` for an external record, and what replays it on a stream."""
    graph = bench.device.capture(1, [None if name is None else bench.writer(name) for name in names])
    nodes = [None if name is None else Work(name) for name in names]

    def replay(stream: Stream) -> None:
        with bench.device.stream(stream):
            bench.device.replay(graph, Work("graph"), nodes)

    return graph, replay


def completes(bench: Any, gate: Gate, stream: Stream) -> bool:
    return bench.completes(gate, stream, stream.record_event())


def test_nothing_runs_at_the_capture_and_everything_in_each_replay(bench):
    (a,) = bench.streams("a")
    _, replay = captured(bench, "x", "y")
    bench.device.synchronize()
    assert bench.ran() == []
    bench.op("before", a)
    replay(a)
    replay(a)
    bench.op("after", a)
    a.synchronize()
    assert bench.ran() == ["before", "x", "y", "x", "y", "after"]


def test_a_replay_follows_earlier_replays_on_another_stream(bench):
    a, b = bench.streams("a b")
    _, replay = captured(bench, "x")
    gate = bench.device.gate()
    gate.hold(a)
    bench.op("held", a)
    replay(a)
    replay(b)
    if bench.holds:
        assert gate.wait_blocks_or(b, b.record_event(), timeout_s=20)
        assert bench.ran() == []
    gate.open()
    b.synchronize()
    assert bench.ran() == ["held", "x", "x"]


def test_an_external_record_covers_what_precedes_it_and_nothing_else(bench):
    if bench.backend == "cuda":
        pytest.skip("gpu: nothing can be held inside a captured graph")
    a, b = bench.streams("a b")
    graph, replay = captured(bench, "read", None, "write")
    replay(a)
    b.wait_event(graph.events[0])
    bench.op("follower", b)
    b.synchronize()
    ran = bench.ran()
    assert ran.index("read") < ran.index("follower")
    if bench.backend == "virtual-lazy":
        assert "write" not in ran
    bench.device.synchronize()
    assert sorted(bench.ran()) == ["follower", "read", "write"]


def test_a_wait_for_an_external_record_before_the_first_replay_is_a_no_op(bench):
    (a,) = bench.streams("a")
    graph, replay = captured(bench, None, "x")
    a.wait_event(graph.events[0])
    assert graph.events[0].query()
    replay(a)
    a.wait_event(graph.events[0])
    bench.op("after", a)
    a.synchronize()
    assert bench.ran() == ["x", "after"]


def test_a_wait_around_the_capture_does_not_replay(bench):
    """It orders what its stream runs; a replay on another stream is ordered by nothing."""
    a, b, c = bench.streams("a b c")
    gate = bench.device.gate()
    gate.hold(a)
    bench.op("restore", a)
    b.wait_stream(a)
    if bench.backend == "cuda":
        gate.open()  # a capture waits for the device
    _, replay = captured(bench, "x")
    replay(c)
    if bench.backend == "cuda":
        c.synchronize()
        return
    assert completes(bench, gate, c)
    if bench.holds or bench.backend in ("virtual-lazy", "virtual-adversarial"):
        assert bench.ran() == ["x"]
    gate.open()


def test_a_graph_needs_a_function(bench):
    with pytest.raises(StreamError, match=r"capture: 1 entries and no function among them; a graph needs at least one"):
        bench.device.capture(1, [None])


def test_nodes_must_match_the_entries(bench):
    graph, _ = captured(bench, "x", None)
    expected = r"nodes are \['x'\]; expected one per entry, None for each external record: \['work', 'record'\]"
    with pytest.raises(StreamError, match=expected):
        bench.device.replay(graph, Work("graph"), [Work("x")])


def test_a_graph_of_another_device_is_refused(bench):
    with pytest.raises(StreamError, match="was not captured on this device"):
        bench.device.replay(object(), Work("graph"), [])


def test_the_virtual_device_queues_a_replay_in_one_call(virtual):
    bench = virtual("lazy")
    (a,) = bench.streams("a")
    _, replay = captured(bench, "x", "y", "z")
    before = bench.device.host_ns()
    bench.op("one", a)
    one_call = bench.device.host_ns() - before
    replay(a)
    assert bench.device.host_ns() - before == 2 * one_call


def test_probes_span_the_replay(virtual):
    bench = virtual("asap")
    (a,) = bench.streams("a")
    graph = bench.device.capture(1, [lambda: None, None, lambda: None])
    first, last = bench.device.probe(), bench.device.probe()
    with bench.device.stream(a):
        bench.device.replay(graph, Work("graph"), [Work("x"), None, Work("y")], probes=(first, last))
    a.synchronize()
    assert first.times_ns()[1] <= last.times_ns()[0] < last.times_ns()[1]
