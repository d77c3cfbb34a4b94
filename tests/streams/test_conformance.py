"""What every device promises, one suite for all of them: CUDA's stream semantics as the analyzer models them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hicache_obs.errors import StreamError
from hicache_obs.records import StreamKind, Work
from hicache_obs.streams import ThreadsDevice, VirtualDevice


def test_a_stream_runs_its_work_in_order(bench):
    (a,) = bench.streams("a")
    for name in "uvwxyz":
        bench.op(name, a)
    a.synchronize()
    assert bench.ran() == list("uvwxyz")


def test_a_record_is_a_snapshot(bench):
    a, b = bench.streams("a b")
    event, gate = bench.device.Event(), bench.device.gate()
    bench.op("before", a)
    event.record(a)
    gate.hold(a)
    bench.op("after", a)
    b.wait_event(event)
    bench.op("follower", b)
    assert bench.completes(gate, b, b.record_event())
    ran = bench.ran()
    assert ran.index("before") < ran.index("follower")
    if bench.holds or bench.backend == "virtual-lazy":
        assert "after" not in ran
    gate.open()
    bench.device.synchronize()
    assert sorted(bench.ran()) == ["after", "before", "follower"]


def test_a_new_record_does_not_move_an_earlier_wait(bench):
    a, b = bench.streams("a b")
    event, gate = bench.device.Event(), bench.device.gate()
    bench.op("first", a)
    event.record(a)
    b.wait_event(event)
    gate.hold(a)
    bench.op("second", a)
    event.record(a)
    bench.op("follower", b)
    assert bench.completes(gate, b, b.record_event())
    ran = bench.ran()
    assert ran.index("first") < ran.index("follower")
    if bench.holds or bench.backend == "virtual-lazy":
        assert "second" not in ran
    gate.open()


def test_a_wait_after_the_new_record_waits_for_it(bench):
    a, b = bench.streams("a b")
    event, gate = bench.device.Event(), bench.device.gate()
    event.record(a)
    gate.hold(a)
    bench.op("second", a)
    event.record(a)
    event.wait(b)
    bench.op("follower", b)
    assert gate.wait_blocks_or(b, b.record_event(), timeout_s=20)
    assert gate.blocks(b) == bench.holds
    gate.open()
    bench.device.synchronize()
    assert bench.ran() == ["second", "follower"]


def test_a_never_recorded_event_is_complete_and_orders_nothing(bench):
    a, b = bench.streams("a b")
    event, gate = bench.device.Event(), bench.device.gate()
    gate.hold(a)
    bench.op("held", a)
    b.wait_event(event)
    bench.op("free", b)
    event.record(a)
    assert bench.completes(gate, b, b.record_event())
    assert "free" in bench.ran()
    gate.open()
    fresh = bench.device.Event()
    assert fresh.query()
    fresh.synchronize()


def test_wait_stream_covers_the_work_queued_so_far(bench):
    a, b = bench.streams("a b")
    gate = bench.device.gate()
    bench.op("before", a)
    b.wait_stream(a)
    gate.hold(a)
    bench.op("after", a)
    bench.op("follower", b)
    assert bench.completes(gate, b, b.record_event())
    ran = bench.ran()
    assert ran.index("before") < ran.index("follower")
    if bench.holds or bench.backend == "virtual-lazy":
        assert "after" not in ran
    gate.open()


def test_order_is_transitive_over_a_third_stream(bench):
    a, b, c = bench.streams("a b c")
    gate = bench.device.gate()
    gate.hold(a)
    bench.op("first", a)
    c.wait_stream(a)
    bench.op("between", c)
    b.wait_event(c.record_event())
    bench.op("last", b)
    assert gate.wait_blocks_or(b, b.record_event(), timeout_s=20)
    assert gate.blocks(b) == bench.holds
    gate.open()
    b.synchronize()
    assert bench.ran() == ["first", "between", "last"]


def test_events_and_streams_default_to_the_current_stream(bench):
    a, b = bench.streams("a b")
    event = bench.device.Event()
    with bench.device.stream(a):
        bench.op("first", a)
        event.record()
        with bench.device.stream(b):
            assert bench.device.current_stream().stream_id == b.stream_id
            event.wait()
        assert bench.device.current_stream().stream_id == a.stream_id
    assert bench.device.current_stream().stream_id == 0
    assert bench.device.current_stream().name == "default"
    bench.op("second", b)
    b.synchronize()
    assert bench.ran() == ["first", "second"]


def test_synchronize_makes_queries_true(bench):
    a, b = bench.streams("a b")
    event = bench.device.Event()
    for _ in range(50):
        bench.op("a", a)
        event.record(a)
        event.synchronize()
        assert event.query()
        a.synchronize()
        assert a.query()
    bench.op("b", b)
    bench.device.synchronize()
    assert b.query()


def test_a_poll_loop_comes_to_an_end(bench):
    (a,) = bench.streams("a")
    bench.op("x", a)
    event = a.record_event()
    while not event.query():
        pass
    bench.op("y", a)
    while not a.query():
        pass
    assert bench.ran() == ["x", "y"]


def test_elapsed_time_is_between_two_complete_timing_events(bench):
    (a,) = bench.streams("a")
    start, end = bench.device.Event(enable_timing=True), bench.device.Event(enable_timing=True)
    a.record_event(start)
    bench.op("x", a)
    a.record_event(end)
    end.synchronize()
    assert start.elapsed_time(end) > 0
    assert end.elapsed_time(start) < 0


@pytest.mark.parametrize(
    ("timing", "recorded", "text"),
    [
        ((False, True), (True, True), "the start event was made without enable_timing=True"),
        ((True, False), (True, True), "the end event was made without enable_timing=True"),
        ((True, True), (False, True), "the start event was never recorded"),
        ((True, True), (True, False), "the end event was never recorded"),
    ],
)
def test_elapsed_time_refuses_what_has_no_time(bench, timing, recorded, text):
    (a,) = bench.streams("a")
    start, end = (bench.device.Event(enable_timing=each) for each in timing)
    for event, wanted in zip((start, end), recorded, strict=True):
        if wanted:
            a.record_event(event)
    a.synchronize()
    with pytest.raises(StreamError, match=text):
        start.elapsed_time(end)


def test_elapsed_time_refuses_an_incomplete_event(bench):
    (a,) = bench.streams("a")
    start, end, gate = bench.device.Event(True), bench.device.Event(True), bench.device.gate()
    a.record_event(start)
    gate.hold(a)
    bench.op("x", a, size_bytes=1 << 40)
    a.record_event(end)
    if bench.backend == "virtual-eager":  # here every event is complete
        assert start.elapsed_time(end) > 0
    else:
        with pytest.raises(StreamError, match=r"event is not complete; synchronize it first"):
            start.elapsed_time(end)
    gate.open()


def _broken() -> None:
    raise ValueError("no such page")


SYNCHRONIZES: list[Callable] = [
    lambda device, stream, event: device.synchronize(),
    lambda device, stream, event: stream.synchronize(),
    lambda device, stream, event: event.synchronize(),
]


@pytest.mark.parametrize("synchronize", SYNCHRONIZES, ids=["device", "stream", "event"])
def test_an_exception_surfaces_by_the_next_synchronize(bench, synchronize):
    (a,) = bench.streams("a")
    with pytest.raises(StreamError) as caught:  # noqa: PT012 cuda raises in launch, the others later
        bench.run(_broken, a, Work("restore"))
        bench.op("later", a)
        event = a.record_event()
        synchronize(bench.device, a, event)
    assert str(caught.value) == "the function launched at site 'restore' raised ValueError: no such page"
    assert isinstance(caught.value.__cause__, ValueError)
    bench.device.synchronize()  # it is raised once, and nothing hangs
    assert bench.ran() == ([] if bench.device.name == "cuda" else ["later"])


def test_later_failures_are_counted(bench):
    (a,) = bench.streams("a")
    if bench.device.name == "cuda":  # raises at each launch, so there is nothing to count
        return
    for _ in range(3):
        bench.run(_broken, a)
    with pytest.raises(StreamError, match=r"no such page \(2 later launches failed too\)"):
        bench.device.synchronize()


NESTED: dict[str, Callable] = {
    "Device.launch": lambda device, stream, event: device.launch(_broken, Work("inner")),
    "Device.synchronize": lambda device, stream, event: device.synchronize(),
    "Stream.synchronize": lambda device, stream, event: stream.synchronize(),
    "Stream.wait_stream": lambda device, stream, event: stream.wait_stream(stream),
    "Stream.wait_event": lambda device, stream, event: stream.wait_event(event),
    "Stream.query": lambda device, stream, event: stream.query(),
    "Event.record": lambda device, stream, event: event.record(stream),
    "Event.synchronize": lambda device, stream, event: event.synchronize(),
    "Event.query": lambda device, stream, event: event.query(),
}


@pytest.mark.parametrize("call", NESTED)
def test_nesting_raises(bench, call):
    (a,) = bench.streams("a")
    event = bench.device.Event()
    with pytest.raises(StreamError) as caught:  # noqa: PT012 cuda raises in launch, the others later
        bench.run(lambda: NESTED[call](bench.device, a, event), a, Work("outer"))
        bench.device.synchronize()
    assert f"{call} called from inside the launched function of site 'outer'" in str(caught.value.__cause__)


def test_streams_and_events_of_another_device_are_refused(bench):
    (a,) = bench.streams("a")
    for other in (VirtualDevice(), ThreadsDevice()):
        stream, event, probe = other.Stream("foreign"), other.Event(), other.probe()
        for call in (
            lambda stream=stream: bench.device.stream(stream),
            lambda stream=stream: a.wait_stream(stream),
            lambda event=event: a.wait_event(event),
            lambda stream=stream: bench.device.Event().record(stream),
            lambda probe=probe: bench.run(_broken, a, probe=probe),
        ):
            with pytest.raises(StreamError, match=r"expected a \w+ made by this \w+Device, got"):
                call()
        other.close()


def test_stream_ids_differ_and_a_legacy_stream_cannot_be_made(bench):
    streams = [bench.device.current_stream(), *bench.streams("a b c")]
    assert len({stream.stream_id for stream in streams}) == 4
    assert [stream.name for stream in streams] == ["default", "a", "b", "c"]
    assert bench.device.Stream().name.startswith("stream ")
    with pytest.raises(StreamError, match=r"Stream\(kind=LEGACY\) on device"):
        bench.device.Stream("x", kind=StreamKind.LEGACY)


def test_probes_bracket_their_item_and_follow_stream_order(bench):
    a, b = bench.streams("a b")
    calls: list[str] = []
    probes = [
        bench.device.probe(lambda: calls.append("begin"), lambda: calls.append("end")),
        bench.device.probe(),
        bench.device.probe(),
    ]
    bench.run(lambda: calls.append("run"), a, probe=probes[0])
    b.wait_stream(a, probe=probes[1])
    bench.op("x", b, probe=probes[2])
    bench.device.synchronize()
    assert calls == ["begin", "run", "end"]
    assert all(probe.ready() for probe in probes)
    first, wait, last = (probe.times_ns() for probe in probes)
    error_ns = 2 * bench.device.clock_error_ns
    assert first[0] <= first[1] <= wait[1] + error_ns
    assert wait[1] <= last[0] + error_ns
    assert last[0] <= last[1] <= bench.device.host_ns() + error_ns


def test_a_probe_of_a_wait_for_nothing_becomes_ready(bench):
    (a,) = bench.streams("a")
    probe = bench.device.probe()
    a.wait_event(bench.device.Event(), probe=probe)
    a.synchronize()
    assert probe.ready()


def test_a_probe_has_no_times_before_it_is_ready_and_measures_one_item(bench):
    (a,) = bench.streams("a")
    probe = bench.device.probe()
    assert not probe.ready()
    with pytest.raises(StreamError, match=r"probe times are not known yet: ask ready\(\) first"):
        probe.times_ns()
    bench.op("x", a, probe=probe)
    with pytest.raises(StreamError, match=r"probe already measures .*: take a new one for each item"):
        bench.op("y", a, probe=probe)
    a.synchronize()


def test_a_probe_times_the_wait_and_not_what_is_before_it(bench):
    """The wait is reached at once, and passed no sooner than the operation it waits for ends."""
    a, b = bench.streams("a b")
    op, wait = bench.device.probe(), bench.device.probe()
    gate = bench.device.gate()
    gate.hold(a)
    bench.op("x", a, size_bytes=3_000_000_000, probe=op)
    b.wait_stream(a, probe=wait)
    assert gate.wait_blocks_or(b, b.record_event(), timeout_s=20)
    gate.open()
    b.synchronize()
    reached, passed = wait.times_ns()
    start, end = op.times_ns()
    error_ns = 2 * bench.device.clock_error_ns
    assert passed >= end - error_ns
    if bench.holds:
        assert reached <= start + error_ns


def test_record_stream_takes_the_own_streams_only(bench):
    import torch

    (a,) = bench.streams("a")
    bench.device.record_stream(torch.zeros(1, device=bench.device.torch_device), a)


def test_close_finishes_the_work_and_may_be_repeated(bench):
    (a,) = bench.streams("a")
    bench.op("x", a)
    bench.device.close()
    bench.device.close()
    assert bench.ran() == ["x"]
    if bench.device.name != "cuda":
        with pytest.raises(StreamError, match="the device is closed"):
            bench.op("y", a)
    bench.device.synchronize()


def test_close_raises_what_nobody_has_seen(bench):
    (a,) = bench.streams("a")
    if bench.device.name == "cuda":  # raises at each launch, so close has nothing left to raise
        return
    bench.run(_broken, a)
    with pytest.raises(StreamError, match="no such page"):
        bench.device.close()
