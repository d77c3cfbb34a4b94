"""The virtual device: worked times, schedules, determinism, and legality against a brute-force order."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_obs.errors import ConfigError, DeadlockError, StreamError
from hicache_obs.records import Direction, Work
from hicache_obs.streams import SCHEDULES, Board, CostModel, Queued, VirtualDevice
from hicache_obs.streams.runner import MAX_FALSE_ANSWERS

MB = 1_000_000
SERIAL = [schedule for schedule in SCHEDULES if schedule != "asap"]


def _launch(device, stream, name, log, *, size_bytes=0, direction=None):
    probe = device.probe()
    with device.stream(stream):
        work = Work(name, size_bytes=size_bytes, direction=direction)
        device.launch(lambda: log.append(name), work, probe=probe)
    return probe


# Worked numbers: a call costs 2 µs, an operation at least 5 µs; 3 TB/s for kernels, 50 GB/s for copies.


def test_asap_starts_each_item_when_it_is_issued_its_stream_is_free_and_its_waits_are_over():
    device, log = VirtualDevice("asap"), []
    a, b = device.Stream("a"), device.Stream("b")
    waits = device.probe(), device.probe()
    a1 = _launch(device, a, "a1", log)
    b1 = _launch(device, b, "b1", log)
    b.wait_stream(a, probe=waits[0])
    b2 = _launch(device, b, "b2", log, size_bytes=MB, direction=Direction.HOST_TO_DEVICE)
    a2 = _launch(device, a, "a2", log, size_bytes=30 * MB)
    event = b.record_event()
    a.wait_event(event, probe=waits[1])
    assert device.host_ns() == 14_000
    assert (b1.ready(), b2.ready()) == (True, False)
    assert not event.query()
    assert device.host_ns() == 16_000
    a.synchronize()
    assert device.host_ns() == 29_000
    assert [probe.times_ns() for probe in (a1, b1, b2, a2)] == [
        (2_000, 7_000),
        (4_000, 9_000),
        (9_000, 29_000),
        (10_000, 20_000),
    ]
    assert [probe.times_ns() for probe in waits] == [(9_000, 9_000), (20_000, 29_000)]
    assert log == ["a1", "b1", "b2", "a2"]


def test_asap_runs_a_function_when_the_host_clock_passes_its_start():
    device, log = VirtualDevice("asap"), []
    _launch(device, device.current_stream(), "x", log)
    _launch(device, device.current_stream(), "y", log)
    assert (device.host_ns(), log) == (4_000, ["x"])
    device.advance(2_999)
    assert (device.host_ns(), log) == (6_999, ["x"])
    device.advance(1)
    assert (device.host_ns(), log) == (7_000, ["x", "y"])


def test_eager_is_done_before_the_host_continues_and_never_overlaps():
    device, log = VirtualDevice("eager"), []
    a, b = device.Stream("a"), device.Stream("b")
    probes = [_launch(device, stream, "x", log, size_bytes=30 * MB) for stream in (a, b, a)]
    assert [probe.times_ns() for probe in probes] == [(2_000, 12_000), (14_000, 24_000), (26_000, 36_000)]
    assert device.host_ns() == 36_000


def test_a_serial_schedule_starts_nothing_before_the_host_let_it():
    """What was idle while the host went on cannot have run earlier, or a query's False would be a lie."""
    device, log = VirtualDevice("lazy"), []
    a, b = device.Stream("a"), device.Stream("b")
    first, second = _launch(device, a, "x", log), _launch(device, b, "y", log)
    device.advance(100_000)
    assert not b.query()
    device.synchronize()
    assert [probe.times_ns() for probe in (first, second)] == [(108_000, 113_000), (113_000, 118_000)]


def test_elapsed_time_is_in_milliseconds():
    device = VirtualDevice("asap")
    start, end = device.Event(enable_timing=True), device.Event(enable_timing=True)
    start.record()
    _launch(device, device.current_stream(), "x", [], size_bytes=3_000 * MB)
    end.record()
    end.synchronize()
    assert start.elapsed_time(end) == pytest.approx(1.002)


@pytest.mark.parametrize(
    ("work", "duration_ns"),
    [
        (Work("empty"), 5_000),
        (Work("kernel", size_bytes=15_000_001), 5_001),
        (Work("copy", size_bytes=15_000_001, direction=Direction.HOST_TO_DEVICE), 300_001),
        (Work("copy", size_bytes=MB, direction=Direction.DEVICE_TO_HOST), 20_000),
        (Work("move", size_bytes=30 * MB, direction=Direction.DEVICE_TO_DEVICE), 10_000),
    ],
)
def test_cost_model(work, duration_ns):
    assert CostModel().duration_ns(work) == duration_ns


def test_cost_model_refuses_impossible_numbers():
    with pytest.raises(ConfigError, match=r"CostModel floor_ns=0: must be at least 1"):
        CostModel(floor_ns=0)


# Schedules.


def test_adversarial_runs_last_issued_first_and_keeps_what_a_fence_orders():
    device, log = VirtualDevice("adversarial"), []
    a, b, c = (device.Stream(name) for name in "abc")
    _launch(device, a, "a1", log)
    _launch(device, b, "b1", log)
    c.wait_stream(a)
    _launch(device, c, "c1 after a1", log)
    _launch(device, a, "a2", log)
    device.synchronize()
    assert log == ["b1", "a1", "a2", "c1 after a1"]


def test_lazy_runs_only_the_ancestors_of_what_the_host_waits_for():
    device, log = VirtualDevice("lazy"), []
    a, b, c = (device.Stream(name) for name in "abc")
    _launch(device, a, "a1", log)
    _launch(device, c, "c1", log)
    b.wait_stream(a)
    _launch(device, a, "a2", log)
    _launch(device, b, "b1", log)
    _launch(device, b, "b2", log)
    b.synchronize()
    assert log == ["a1", "b1", "b2"]
    device.synchronize()
    assert log == ["a1", "b1", "b2", "c1", "a2"]


def test_random_repeats_with_its_seed_and_differs_between_seeds():
    def run(seed):
        device, log = VirtualDevice("random", seed=seed), []
        streams = [device.Stream(name) for name in "abc"]
        for index in range(12):
            _launch(device, streams[index % 3], str(index), log)
        device.synchronize()
        return tuple(log), device.host_ns()

    runs = [run(seed) for seed in range(20)]
    assert runs == [run(seed) for seed in range(20)]
    assert len(set(runs)) > 15


@pytest.mark.parametrize("schedule", ["lazy", "adversarial"])
def test_a_query_advances_nothing_until_64_in_a_row_were_false(schedule):
    device, log = VirtualDevice(schedule), []
    (stream,) = [device.Stream("a")]
    _launch(device, stream, "x", log)
    event = stream.record_event()
    assert [event.query() for _ in range(MAX_FALSE_ANSWERS)] == [False] * 64
    assert log == []
    assert event.query()
    assert log == ["x"]


class _Withhold:
    """A schedule that never runs anything on stream ``a``."""

    name = "withhold"
    overlapped = False
    host_waits = False

    def on_call(self, board: Board) -> Iterator[Queued]:
        return iter(())

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        while heads := [head for head in board.heads() if "'a'" not in str(head)]:
            yield heads[0]


def test_a_deadlock_says_what_each_stream_waits_for():
    device = VirtualDevice(_Withhold())
    a, b, c = (device.Stream(name) for name in "abc")
    _launch(device, a, "x", [])
    b.wait_stream(a)
    _launch(device, b, "y", [])
    _launch(device, c, "z", [])
    c.wait_event(b.record_event())
    with pytest.raises(DeadlockError) as caught:
        c.synchronize()
    assert str(caught.value) == (
        "the host waits for item 7 (wait) of stream 'c', which can never run: "
        "item 1 (op of site 'x') of stream 'a' can run, but schedule 'withhold' does not run it; "
        "stream 'b' waits at item 3 for item 2 (record) of stream 'a'; "
        "stream 'c' waits at item 7 for item 6 (record) of stream 'b'"
    )


class _Illegal(_Withhold):
    """A schedule that passes a wait."""

    name = "illegal"

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        yield board.ancestors(targets)[-1]


def test_a_schedule_cannot_run_what_is_not_runnable():
    device = VirtualDevice(_Illegal())
    a, b = device.Stream("a"), device.Stream("b")
    b.wait_stream(a)
    with pytest.raises(StreamError, match=r"schedule 'illegal' chose item 2 \(wait\) of stream 'b', which cannot"):
        b.synchronize()


# Use.


def test_gates_are_open_from_the_start(virtual):
    bench = virtual("lazy")
    (a,) = bench.streams("a")
    gate = bench.device.gate()
    gate.hold(a)
    bench.op("x", a)
    assert gate.wait_blocks_or(a, a.record_event(), timeout_s=0)
    assert not gate.blocks(a)
    a.synchronize()
    assert bench.ran() == ["x"]


def test_one_thread_owns_the_device_and_any_may_read_a_probe():
    device = VirtualDevice("asap")
    probe = _launch(device, device.current_stream(), "x", [])
    device.synchronize()
    seen: list[object] = []

    def other_thread() -> None:
        seen.append(probe.times_ns())
        try:
            device.synchronize()
        except StreamError as error:
            seen.append(str(error))

    thread = threading.Thread(target=other_thread)
    thread.start()
    thread.join()
    assert seen[0] == (2_000, 7_000)
    assert "it is single-threaded; use device 'threads'" in str(seen[1])


def test_a_failing_probe_callback_is_kept_like_a_failing_function():
    device, ended = VirtualDevice("lazy"), []

    def broken() -> None:
        raise KeyError("range")

    device.launch(lambda: None, Work("x"), probe=device.probe(broken, lambda: ended.append(True)))
    with pytest.raises(StreamError, match="raised KeyError: 'range'"):
        device.synchronize()
    assert ended == [True]


# Random programs. A step is (call, stream or event, other stream).

STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["launch"] * 5
            + ["record", "wait", "wait_stream", "event_query", "stream_query"]
            + ["event_sync", "stream_sync", "device_sync", "compute"]
        ),
        st.integers(0, 2),
        st.integers(0, 2),
    ),
    max_size=40,
)


class _Program:
    """Runs steps on a device and computes, by brute force, what must come before each operation."""

    def __init__(self, schedule: str, seed: int, *, probed: bool) -> None:
        self.device = VirtualDevice(schedule, seed=seed)
        self.log: list[object] = []
        self.order: list[int] = []
        self.before: list[frozenset[int]] = []
        self.probes = []
        self._probed = probed
        self._streams = [self.device.Stream(name) for name in "abc"]
        self._events = [self.device.Event() for _ in range(3)]
        self._after = [frozenset[int]()] * 3
        self._recorded = [frozenset[int]()] * 3
        self._host = frozenset[int]()

    def run(self, steps) -> _Program:
        for call, first, second in steps:
            answer = getattr(self, f"_{call}")(first, second)
            self.log.append((call, answer, self.device.host_ns()))
        self.device.synchronize()
        return self

    def times(self):
        return [probe.times_ns() for probe in self.probes]

    def _launch(self, s, size) -> None:
        op = len(self.before)
        self.before.append(self._after[s] | self._host)
        self._after[s] |= self._host | {op}
        self.probes.append(self.device.probe() if self._probed else None)

        def fn() -> None:
            self.order.append(op)
            self.log.append(op)

        with self.device.stream(self._streams[s]):
            self.device.launch(fn, Work("op", size_bytes=size * 20 * MB), probe=self.probes[-1])

    def _record(self, e, s) -> None:
        self._events[e].record(self._streams[s])
        self._recorded[e] = self._after[s]

    def _wait(self, e, s) -> None:
        probe = self.device.probe() if self._probed else None
        self._streams[s].wait_event(self._events[e], probe=probe)
        self._after[s] |= self._recorded[e]

    def _wait_stream(self, s, other) -> None:
        self._streams[s].wait_stream(self._streams[other])
        self._after[s] |= self._after[other]

    def _event_query(self, e, _) -> bool:
        done = self._events[e].query()
        self._host |= self._recorded[e] if done else frozenset()
        return done

    def _stream_query(self, s, _) -> bool:
        done = self._streams[s].query()
        self._host |= self._after[s] if done else frozenset()
        return done

    def _event_sync(self, e, _) -> None:
        self._events[e].synchronize()
        self._host |= self._recorded[e]

    def _stream_sync(self, s, _) -> None:
        self._streams[s].synchronize()
        self._host |= self._after[s]

    def _device_sync(self, *_) -> None:
        self.device.synchronize()
        self._host |= self._after[0] | self._after[1] | self._after[2]

    def _compute(self, s, _) -> None:
        self.device.advance(s * 7_000)


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(steps=STEPS, seed=st.integers(0, 3))
def test_every_run_is_one_that_the_order_allows(schedule, steps, seed):
    program = _Program(schedule, seed, probed=True).run(steps)
    times = program.times()
    assert sorted(program.order) == list(range(len(times)))
    place = {op: index for index, op in enumerate(program.order)}
    for op, before in enumerate(program.before):
        for earlier in before:
            assert place[earlier] < place[op]
            assert times[earlier][1] <= times[op][0]


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(steps=STEPS, seed=st.integers(0, 3))
def test_times_agree_with_the_order_in_which_functions_ran(schedule, steps, seed):
    program = _Program(schedule, seed, probed=True).run(steps)
    ran = [program.times()[op] for op in program.order]
    for (start, end), (next_start, _) in pairwise(ran):
        assert (end if schedule in SERIAL else start) <= next_start


@pytest.mark.parametrize("schedule", SCHEDULES)
@given(steps=STEPS, seed=st.integers(0, 3))
def test_a_run_repeats_exactly_and_probes_change_nothing(schedule, steps, seed):
    probed, again, bare = (_Program(schedule, seed, probed=flag).run(steps).log for flag in (True, True, False))
    assert probed == again == bare


class Answers:
    """An oracle that gives prepared answers."""

    def __init__(self, *answers: bool) -> None:
        self.answers = list(answers)
        self.asked: list[str] = []
        self.known = 0

    def forced(self) -> None:
        self.known += 1

    def choose(self, item) -> bool:
        self.asked.append(f"{item}, false before: {item.false_answers}")
        return self.answers.pop(0)


def test_an_oracle_answers_queries_and_the_device_follows():
    oracle = Answers(False, False, True)
    ran = []
    with closing(VirtualDevice("lazy", oracle=oracle)) as dev:
        stream = dev.Stream("a")
        with dev.stream(stream):
            dev.launch(lambda: ran.append(1), Work("op"))
        event = stream.record_event()
        assert [event.query(), event.query()] == [False, False]
        assert ran == []
        assert event.query()
        assert ran == [1]
        assert event.query()
        assert dev.Event().query()
    assert oracle.asked == [f"item 2 (record) of stream 'a', false before: {n}" for n in range(3)]
    assert oracle.known == 2


@pytest.mark.parametrize("shared", [True, False])
def test_with_an_oracle_threads_may_take_turns(shared):
    with closing(VirtualDevice("lazy", oracle=Answers() if shared else None)) as dev:
        dev.Stream("a").record_event()
        errors = []

        def other() -> None:
            try:
                dev.Stream("b").record_event()
            except StreamError as error:
                errors.append(str(error))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(errors) == (0 if shared else 1)
