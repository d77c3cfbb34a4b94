"""The logic of the cuda adapter, on a *fake* device module: no CUDA is involved, so this proves no GPU behaviour.

The fake knows handles, calls and a settable device clock. What a real device does with the same calls is tested
by the conformance suite's ``cuda`` cases, which need one.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from contextlib import contextmanager

import pytest

from hicache_obs.errors import StreamError
from hicache_obs.records import StreamKind, Work
from hicache_obs.streams import CudaDevice, cuda_poller
from hicache_obs.streams.cuda_clock import MIN_ERROR_NS, RENEW_NS, Clock
from hicache_obs.streams.cuda_driver import driver_function
from hicache_obs.streams.cuda_hold import Hold
from hicache_obs.streams.cuda_poller import become_poller


class FakeStream:
    """A stream is its handle; work on it is complete at once."""

    def __init__(self, module: FakeModule, handle: int) -> None:
        self.module, self.cuda_stream = module, handle

    def wait_event(self, event: FakeEvent) -> None:
        self.module.calls.append(f"{self.cuda_stream}: wait {event.number}")

    def synchronize(self) -> None:
        self.module.calls.append(f"{self.cuda_stream}: synchronize")

    def query(self) -> bool:
        return True


class FakeEvent:
    """Complete unless the module says its number is not; its time is the module's device clock when recorded."""

    def __init__(self, module: FakeModule, timing: bool) -> None:
        self.module, self.timing = module, timing
        self.number = module.events = module.events + 1
        self.device_ms: float | None = None

    def record(self, stream: FakeStream) -> None:
        self.device_ms = self.module.device_ms
        self.module.calls.append(f"{stream.cuda_stream}: record {self.number}")

    def query(self) -> bool:
        return self.number not in self.module.incomplete

    def synchronize(self) -> None:
        self.module.calls.append(f"synchronize {self.number}")

    def elapsed_time(self, end: FakeEvent) -> float:
        assert self.timing
        assert end.timing
        assert self.device_ms is not None
        assert end.device_ms is not None
        return end.device_ms - self.device_ms


class FakeModule:
    """Like ``torch.cuda``: default stream with handle 0, four streams per priority, handed out round robin."""

    POOL = 4

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.events = 0
        self.drawn: Counter[int] = Counter()
        self.device_ms = 0.0
        self.incomplete: set[int] = set()
        self.current = [FakeStream(self, 0)]

    def Stream(self, *, priority: int = 0) -> FakeStream:  # noqa: N802 torch's name
        self.drawn[priority] += 1
        return FakeStream(self, 100 - 100 * priority + self.drawn[priority] % self.POOL)

    def Event(self, enable_timing: bool = False) -> FakeEvent:  # noqa: N802 torch's name
        return FakeEvent(self, enable_timing)

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self.current[-1].cuda_stream)  # torch makes a new object each time

    @contextmanager
    def stream(self, stream: FakeStream):
        self.current.append(stream)
        yield
        self.current.pop()

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def _sleep(self, cycles: int) -> None:
        self.calls.append(f"{self.current[-1].cuda_stream}: sleep")


@pytest.fixture
def module() -> FakeModule:
    return FakeModule()


@pytest.fixture
def device(module) -> CudaDevice:
    """What is made later counts from 2, however many anchors a busy machine made the clock take."""
    made = CudaDevice(module)
    module.calls.clear()
    module.events = 1
    return made


def test_streams_are_keyed_by_handle(device, module):
    a = device.Stream("a")
    assert device.current_stream() is device.current_stream()
    assert (device.current_stream().stream_id, device.current_stream().kind) == (0, StreamKind.LEGACY)
    with device.stream(a):
        assert device.current_stream() is a
    assert (a.name, a.kind) == ("a", StreamKind.NONBLOCKING)


def test_a_stream_set_by_somebody_else_is_adopted(device, module):
    with module.stream(FakeStream(module, 0xAB)):
        assert device.current_stream().name == "stream 0xab"
        assert device.current_stream().stream_id == 0xAB


def test_new_streams_get_their_own_handles_while_the_pool_has_some(device):
    handles = [device.Stream(name).stream_id for name in "abcd"]
    assert len(set(handles)) == 4
    assert device.Stream("e").stream_id in handles


def test_a_handle_in_use_is_not_handed_out_again(device, module):
    with module.stream(FakeStream(module, 101)):
        assert device.current_stream().stream_id == 101
    assert device.Stream("a").stream_id == 102  # torch's next would have been 101


def test_the_clocks_anchors_are_on_a_stream_that_no_engine_is_given(module):
    module.POOL = 1
    engines = module.Stream()
    CudaDevice(module)
    assert module.calls[0] == "200: record 1"
    assert engines.cuda_stream == module.Stream().cuda_stream == 100


def test_launch_calls_at_once_between_the_probes_events(device, module):
    calls = module.calls
    probe = device.probe(lambda: calls.append("begin"), lambda: calls.append("end"))
    device.launch(lambda: calls.append("run"), Work("x"), probe=probe)
    assert calls == ["begin", "0: record 2", "run", "0: record 3", "end"]


def test_a_probe_closes_around_a_function_that_raises(device, module):
    probe = device.probe(None, lambda: module.calls.append("end"))
    with pytest.raises(StreamError, match="site 'x' raised ZeroDivisionError"):
        device.launch(lambda: 1 // 0, Work("x"), probe=probe)
    assert module.calls == ["0: record 2", "0: record 3", "end"]


def test_wait_stream_records_there_and_waits_here_inside_the_probe(device, module):
    a, b = device.Stream("a"), device.Stream("b")
    b.wait_stream(a, probe=device.probe())
    assert module.calls == ["101: record 2", "102: record 3", "102: wait 2", "102: record 4"]


def test_probe_events_are_reused_and_stale_ones_are_not_ready(device, module):
    first = device.probe()
    device.launch(lambda: None, Work("x"), probe=first)
    assert first.ready()
    assert first.times_ns() == first.times_ns()
    made = module.events
    second = device.probe()
    in_between = []
    device.launch(lambda: in_between.append(second.ready()), Work("x"), probe=second)
    assert in_between == [False]  # its end event is complete from its former use
    assert module.events == made


def test_a_probe_is_not_ready_before_its_end_is_complete(device, module):
    probe = device.probe()
    module.incomplete.add(3)
    device.launch(lambda: None, Work("x"), probe=probe)
    assert not probe.ready()
    with pytest.raises(StreamError, match="not known yet"):
        probe.times_ns()
    module.incomplete.clear()
    assert probe.ready()


# The clock.


class Times:
    """A host clock that goes on by ``step_ns`` at each look."""

    def __init__(self, step_ns: int) -> None:
        self.now_ns, self.step_ns = 0, step_ns

    def __call__(self) -> int:
        self.now_ns += self.step_ns
        return self.now_ns


def _event_at(module: FakeModule, ms: float) -> FakeEvent:
    event = module.Event(enable_timing=True)
    event.device_ms = ms
    return event


def test_times_are_counted_from_an_anchor(module):
    module.device_ms = 50.0
    clock = Clock(FakeStream(module, 1), lambda: module.Event(True), Times(step_ns=4_000))
    # before at 4 µs, after at 8 µs: device 50 ms is host 6 µs, give or take 2.
    assert clock.error_ns == 2_000
    assert clock.to_host_ns(_event_at(module, 50.25)) == 256_000
    assert clock.to_host_ns(_event_at(module, 49.999)) == 5_000


def test_the_error_is_never_below_a_microsecond(module):
    clock = Clock(FakeStream(module, 1), lambda: module.Event(True), Times(step_ns=10))
    assert clock.error_ns == MIN_ERROR_NS == 1_000


def test_an_anchor_is_renewed_when_it_is_old_and_the_drift_is_owned_up_to(module):
    host = Times(step_ns=100)
    clock = Clock(FakeStream(module, 1), lambda: module.Event(True), host)
    clock.keep()
    assert module.events == 1
    host.now_ns += RENEW_NS
    module.device_ms = RENEW_NS / 1e6 + 0.03  # the device clock gained 30 µs, less a few looks at ours
    clock.keep()
    assert module.events == 2
    assert 29_000 < clock.error_ns < 31_000
    # Near the new anchor the old one's drift plays no part.
    new_host_ns = host.now_ns - 50
    assert clock.to_host_ns(_event_at(module, module.device_ms + 1)) == pytest.approx(new_host_ns + 1e6, abs=200)


def test_a_busy_device_only_puts_the_anchor_off(module):
    host = Times(step_ns=300_000)
    clock = Clock(FakeStream(module, 1), lambda: module.Event(True), host)
    assert module.events == 5  # none was tight enough to stop there
    host.now_ns += RENEW_NS
    module.device_ms = RENEW_NS / 1e6
    module.incomplete = set(range(6, 100))
    clock.keep()
    assert module.events == 10  # each given up after a millisecond
    module.incomplete.clear()
    clock.keep()
    assert module.events == 15
    clock.keep()
    assert module.events == 15


# Gates.


@pytest.fixture
def no_driver(monkeypatch):
    """Makes the hold fall back to its fixed delay, on machines with a driver too."""
    monkeypatch.setattr("hicache_obs.streams.cuda_hold._driver_wait", lambda: None)


@pytest.mark.usefixtures("no_driver")
def test_without_the_driver_call_a_hold_is_a_fixed_delay(device, module):
    a = device.Stream("a")
    gate = device.gate()
    gate.hold(a)
    assert module.calls == ["101: record 2", "101: sleep", "101: record 3"]
    gate.open()
    gate.open()
    assert device.closed_gates == []


@pytest.mark.usefixtures("no_driver")
def test_a_gate_blocks_a_stream_that_stands_at_a_wait_while_the_hold_stands(device, module):
    a, b = device.Stream("a"), device.Stream("b")
    gate = device.gate()
    gate.hold(a)  # events 2 and 3
    b.wait_stream(a)  # record 4, before 5, after 6
    done = b.record_event()  # 7
    module.incomplete = {3, 4, 6, 7}
    assert gate.blocks(b)
    assert not gate.blocks(a)
    assert gate.wait_blocks_or(b, done, timeout_s=20)
    module.incomplete = {3, 4, 5, 6, 7}
    assert not gate.blocks(b), "b has not reached its wait"
    module.incomplete = {7}
    assert not gate.blocks(b), "the hold was passed"
    assert not gate.wait_blocks_or(b, done, timeout_s=0)
    module.incomplete = {3}
    assert gate.wait_blocks_or(b, done, timeout_s=0), "done is complete"


@pytest.mark.usefixtures("no_driver")
def test_waits_cost_no_extra_events_without_a_closed_gate(device, module):
    a, b = device.Stream("a"), device.Stream("b")
    b.wait_stream(a)
    assert module.calls == ["101: record 2", "102: wait 2"]


def test_close_opens_gates_first(device, module, no_driver):
    device.gate().hold(device.Stream("a"))
    device.close()
    assert device.closed_gates == []
    assert module.calls[-1] == "synchronize"


def test_the_driver_call_gets_the_handle_the_word_and_geq(module, monkeypatch):
    calls = []

    def wait_value(handle, address, value, flags):
        calls.append((handle.value, address.value, value.value, flags.value))
        return 0

    class Word:
        def data_ptr(self) -> int:
            return 0x1000

    monkeypatch.setattr("hicache_obs.streams.cuda_hold._driver_wait", lambda: wait_value)
    monkeypatch.setattr("torch.zeros", lambda *shape, dtype, pin_memory: Word())
    Hold(module).enqueue(FakeStream(module, 0x77))
    assert calls == [(0x77, 0x1000, 1, 0)]
    assert module.calls == []


# Beside an engine.


def test_other_threads_may_query_while_a_graph_is_captured(device, module):
    modes = []

    @contextmanager
    def graph(raw, *, stream, capture_error_mode="global"):
        modes.append(capture_error_mode)
        yield

    module.graph, module.CUDAGraph = graph, object
    device.capture(1, [lambda: None])
    assert modes == ["thread_local"]


@pytest.fixture
def driver(monkeypatch):
    """``driver(code)``: a driver that answers so; what a poller has called."""
    calls = []

    def make(code):
        def exchange(mode):
            calls.append(("mode", ctypes.cast(mode, ctypes.POINTER(ctypes.c_int)).contents.value))
            return code

        monkeypatch.setattr(cuda_poller, "driver_function", lambda *_: None if code is None else exchange)
        monkeypatch.setattr("torch.cuda.set_device", lambda index: calls.append(("device", index)))
        return calls

    return make


def test_a_poller_takes_the_engines_device_and_then_leaves_captures_alone(driver):
    calls = driver(0)
    become_poller(3)
    assert calls == [("device", 3), ("mode", 1)]


@pytest.mark.parametrize(("code", "words"), [(201, "failed with CUDA error 201"), (None, "the driver has no cuThread")])
def test_a_thread_that_would_break_captures_must_not_poll(driver, code, words):
    driver(code)
    with pytest.raises(StreamError, match=words):
        become_poller(0)


def test_a_driver_or_a_function_that_is_not_there_is_none(monkeypatch):
    def no_driver(name):
        raise OSError(name)

    monkeypatch.setattr("ctypes.CDLL", no_driver)
    assert driver_function("cuStreamWaitValue32_v2") is None
    monkeypatch.setattr("ctypes.CDLL", lambda name: object())
    assert driver_function("cuStreamWaitValue32_v2") is None


def test_legacy_and_blocking_streams_are_refused(device):
    with pytest.raises(StreamError, match=r"Stream\(kind=BLOCKING\) on device 'cuda': must be NONBLOCKING"):
        device.Stream("x", kind=StreamKind.BLOCKING)
