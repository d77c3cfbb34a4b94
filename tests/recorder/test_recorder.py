"""The recorded device: what each call leaves, in which order, and that the engine never notices."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from contextlib import closing

import numpy as np
import pytest

from hicache_obs.errors import StreamError
from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.readers.ring_header import set_mode
from hicache_obs.recorder import RangeName, RecordedDevice, Recorder, RingWriter, emitter
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    CaptureMode,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventQuery,
    HostAccess,
    Kernel,
    Memcpy,
    Mode,
    PageAlloc,
    PageFree,
    Purpose,
    RecordStream,
    Space,
    StreamKind,
    ThreadPost,
    ThreadRecv,
    Times,
    Work,
    device,
)
from hicache_obs.streams import SCHEDULES, open_device


def test_every_call_leaves_its_record_in_issue_order(observed):
    dev = observed.dev
    forward, load = dev.Stream("forward"), dev.Stream("load", kind=StreamKind.BLOCKING)
    event = dev.Event()
    observed.kernel(forward)
    load.wait_stream(forward, purpose=Purpose.LOAD_FENCE)
    observed.copy(load)
    event.record(load)
    forward.wait_event(event, purpose=Purpose.LAYER)
    with dev.stream(forward):
        event.wait()
        event.record()
        second = dev.current_stream().record_event()
    assert event.query() in (True, False)
    event.synchronize()
    second.synchronize()
    forward.synchronize()
    dev.synchronize()
    dev.record_stream(object(), load)
    assert [line for line in observed.log() if "EventQuery" not in line and "RecordStream" not in line] == [
        "Kernel forward",
        "WaitStream load forward LOAD_FENCE",
        "Memcpy load",
        "EventRecord e1 load",
        "EventWait e1 forward LAYER",
        "EventWait e1 forward",
        "EventRecord e1 forward",
        "EventRecord e2 forward",
        "EventSync e1",
        "EventSync e2",
        "HostSync forward",
        "HostSync None",
    ]
    assert observed.ops() == list(range(14))
    assert len(observed.records_of(RecordStream)) == 1
    kinds = {r.text: r.value for r in observed.records_of(Define) if r.space is DefineSpace.STREAM}
    assert kinds == {"forward": StreamKind.NONBLOCKING, "load": StreamKind.BLOCKING}


def test_a_launch_is_recorded_as_it_was_described(observe):
    observed = observe()
    accesses = (device(Mode.READ, np.arange(4)), device(Mode.WRITE, np.arange(9)))
    stream = observed.dev.Stream("forward")
    with observed.dev.stream(stream):
        observed.dev.launch(lambda: None, Work("attention", accesses, (3, 5), 77, None, 1024))
        observed.dev.launch(lambda: None, Work("store", accesses, ALL_LAYERS, 78, Direction.DEVICE_TO_HOST, 9))
    (kernel,), (copy,) = observed.records_of(Kernel), observed.records_of(Memcpy)
    sites = observed.named(DefineSpace.SITE)
    assert (kernel.layers, kernel.group, kernel.size_bytes, sites[kernel.site]) == ((3, 5), 77, 1024, "attention")
    assert kernel.accesses is copy.accesses is accesses
    assert (copy.direction, copy.group, sites[copy.site]) == (Direction.DEVICE_TO_HOST, 78, "store")
    assert kernel.stream == copy.stream == stream.stream_id
    assert copy.host_ns > kernel.host_ns


def test_names_are_defined_once_and_before_they_are_used(observed):
    stream = observed.dev.Stream("forward")
    for _ in range(3):
        observed.kernel(stream)
    defines = [(r.space.name, r.text) for r in observed.records_of(Define)]
    assert sorted(defines) == [("SITE", "forward"), ("STREAM", "forward"), ("THREAD", "MainThread")]
    assert all(isinstance(record, Define) for record in observed.sink.records[:3])
    assert all(r.op == NO_OP for r in observed.records_of(Define))


def test_a_handle_that_is_used_again_gets_its_new_name(observe):
    observed = observe()
    stream = observed.dev.Stream("first")
    observed.kernel(stream)
    observed.recorder.new_stream(stream.bare)
    observed.kernel(stream)
    assert [r.text for r in observed.records_of(Define) if r.space is DefineSpace.STREAM] == ["first", "first"]


def test_counts_pairs_and_ranges_equal_the_calls(observed):
    dev = observed.dev
    forward, load, event = dev.Stream("forward"), dev.Stream("load"), dev.Event()
    for _ in range(25):
        observed.kernel(forward)
        load.wait_stream(forward)
        for _ in range(3):
            observed.copy(load)
        event.record(load)
        forward.wait_event(event)
    dev.synchronize()
    while observed.recorder.resolve():
        pass
    counters = observed.recorder.counters
    assert (counters.launches, counters.copies, counters.waits) == (25, 75, 50)
    assert counters.ranges_opened == counters.ranges_closed == counters.pairs_resolved == 150
    assert (counters.pairs_dropped, counters.uncertain, counters.errors) == (0, 0, 0)
    assert counters.hook_ns > 0
    assert observed.ranges.pushed == {
        RangeName.SEGMENT: 25,
        RangeName.COPY: 75,
        RangeName.WAIT_STREAM: 25,
        RangeName.WAIT_EVENT: 25,
    }
    assert observed.ranges.popped == 150
    timed = [r.op for r in observed.sink.records if type(r).__name__ in ("Kernel", "Memcpy", "WaitStream", "EventWait")]
    assert sorted(observed.ranges.ops) == timed
    assert [r.op for r in observed.records_of(Times)] == timed  # in issue order, each once
    assert all(start <= end for start, end in observed.times().values())
    assert observed.sink.beats


def test_times_are_the_devices_times(observe):
    observed = observe("virtual-asap")
    stream = observed.dev.Stream("s")
    observed.kernel(stream)
    observed.kernel(stream)
    assert observed.recorder.resolve() == 0  # not complete, and nothing else may overtake it
    stream.synchronize()
    assert observed.recorder.resolve() == 2
    (first, second) = observed.records_of(Times)
    kernels = observed.records_of(Kernel)
    assert [first.op, second.op] == [k.op for k in kernels]
    assert first.start_ns >= kernels[0].host_ns
    assert second.start_ns == first.end_ns
    assert first.error_ns == observed.bare.clock_error_ns


def test_recording_changes_nothing_on_the_virtual_device():
    """The same operations run in the same order at the same times, with and without."""

    def program(dev, clock):
        ran = []
        forward, load, event = dev.Stream("f"), dev.Stream("l"), dev.Event()

        def launch(stream, name, direction):
            with dev.stream(stream):
                dev.launch(lambda: ran.append((name, clock())), Work(name, (), ALL_LAYERS, 0, direction, 50_000))

        for number in range(12):
            launch(forward, f"f{number}", None)
            if number % 3:
                load.wait_stream(forward)
            launch(load, f"l{number}", Direction.HOST_TO_DEVICE)
            event.record(load)
            if number % 2:
                forward.wait_event(event)
            ran.append((event.query(), load.query(), clock()))
            if number == 7:
                event.synchronize()
        dev.synchronize()
        return [*ran, clock()]

    for schedule in SCHEDULES:
        bare = open_device("virtual", schedule=schedule, seed=3)
        expected = program(bare, bare.host_ns)
        bare = open_device("virtual", schedule=schedule, seed=3)
        recorder = Recorder(ListSinkLike(), clock=bare.host_ns)
        assert program(RecordedDevice(bare, recorder), bare.host_ns) == expected
        assert recorder.counters.launches == 12
        recorder.resolve()


class ListSinkLike:
    writable = True
    mode = CaptureMode.OBSERVE

    def append(self, record):
        return True

    def drop(self, reason, count=1):
        raise AssertionError(reason)

    def beat(self, host_ns):
        pass


# -- what the host thread knows --------------------------------------------------------------------------------


def test_a_query_is_recorded_once_per_call_until_the_answer_is_known(observe):
    observed = observe("virtual-lazy")
    stream, event = observed.dev.Stream("s"), observed.dev.Event()
    observed.kernel(stream)
    event.record(stream)
    assert [event.query(), event.query()] == [False, False]
    stream.synchronize()
    assert [event.query(), event.query(), event.query()] == [True] * 3
    assert [r.result for r in observed.records_of(EventQuery)] == [False, False, True]
    event.record(stream)
    stream.synchronize()
    assert event.query()
    assert [r.result for r in observed.records_of(EventQuery)] == [False, False, True, True]


def test_another_thread_that_asks_learns_it_too(observe):
    observed = observe("threads")
    stream, event = observed.dev.Stream("s"), observed.dev.Event()
    event.record(stream)
    stream.synchronize()
    event.query()
    thread = threading.Thread(target=event.query, name="poller")
    thread.start()
    thread.join()
    event.query()
    assert [r.thread for r in observed.records_of(EventQuery)] == [0, 1]
    assert observed.named(DefineSpace.THREAD) == {0: "MainThread", 1: "poller"}


def test_an_event_that_was_never_recorded_is_queried_and_waited_for(observed):
    stream, event = observed.dev.Stream("s"), observed.dev.Event()
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    assert observed.log() == ["EventQuery e1 True", "EventSync e1", "EventWait e1 s"]


class Intruder:
    """A bare event or stream during whose call something else happens, as another thread's call would."""

    def __init__(self, bare, meanwhile):
        self._bare = bare
        self._meanwhile = meanwhile

    def __getattr__(self, name):
        return getattr(self._bare, name)

    def _call(self, name):
        result = getattr(self._bare, name)()
        meanwhile, self._meanwhile = self._meanwhile, None
        if meanwhile is not None:
            meanwhile()
        return result

    def query(self):
        return self._call("query")

    def synchronize(self):
        return self._call("synchronize")


def with_intruder(thing, meanwhile):
    """``thing``, a recorded event or stream, whose next query or synchronize does ``meanwhile`` before it returns."""
    kind = type(thing)
    fields = {"state": thing.state} if hasattr(thing, "state") else {}
    return kind(thing._device, Intruder(thing.bare, meanwhile), *fields.values())


@pytest.mark.parametrize("call", ["query", "synchronize"])
def test_an_event_recorded_again_during_the_call_orders_nothing(observe, call):
    """What completed is the old record; saying so now would be taken for the new one."""
    observed = observe("virtual-eager")
    stream, event = observed.dev.Stream("s"), observed.dev.Event()
    event.record(stream)
    getattr(with_intruder(event, lambda: event.record(stream)), call)()
    assert observed.log() == ["EventRecord e1 s", "EventRecord e1 s"]
    assert observed.recorder.counters.uncertain == 1
    getattr(event, call)()
    assert len(observed.log()) == 3


def test_a_stream_sync_says_nothing_about_what_was_queued_meanwhile(observe):
    observed = observe("virtual-eager")
    stream = observed.dev.Stream("s")
    observed.kernel(stream)
    with_intruder(stream, lambda: observed.kernel(stream)).synchronize()
    assert observed.log() == ["Kernel s", "Kernel s"]
    assert observed.recorder.counters.uncertain == 1
    stream.synchronize()
    assert observed.log()[2:] == ["HostSync s"]


def test_with_several_threads_a_stream_sync_is_exact(observe):
    """An event of the recorder's own marks what was queued when the call was made."""
    observed = observe("threads")
    stream = observed.dev.Stream("s")
    observed.kernel(stream)
    thread = threading.Thread(target=observed.kernel, args=(stream,))
    thread.start()
    thread.join()
    stream.synchronize()
    with_intruder(stream, lambda: observed.kernel(stream)).synchronize()
    log = observed.log()
    marker = observed.events()[0]
    assert log == [
        "Kernel s",
        "Kernel s",
        f"EventRecord e{marker} s",
        "HostSync s",
        f"EventRecord e{marker} s",
        "Kernel s",
        f"EventSync e{marker}",
    ]


def test_a_device_sync_covers_the_streams_on_which_nothing_happened_meanwhile(observe):
    observed = observe("virtual-eager")
    a, b = observed.dev.Stream("a"), observed.dev.Stream("b")
    observed.kernel(a)
    observed.kernel(b)
    queued = observed.recorder.begin_device_sync()
    observed.kernel(b)
    observed.recorder.end_device_sync(queued)
    assert observed.log()[3:] == ["HostSync a"]
    observed.dev.synchronize()
    assert observed.log()[4:] == ["HostSync None"]


def test_a_stream_query_that_is_true_is_a_poll_of_all_that_is_queued(observe):
    observed = observe("virtual-lazy")
    stream = observed.dev.Stream("s")
    observed.kernel(stream)
    assert not stream.query()
    stream.synchronize()
    assert stream.query()
    assert stream.query()
    marker = observed.events()[0]
    assert observed.log() == ["Kernel s", "HostSync s", f"EventRecord e{marker} s", f"EventQuery e{marker} True"]
    observed.kernel(stream)
    stream.synchronize()
    assert with_intruder(stream, lambda: observed.kernel(stream)).query()
    assert observed.log()[4:] == ["Kernel s", "HostSync s", "Kernel s"]


def test_elapsed_time_is_a_poll_of_both_events(observe):
    observed = observe("virtual-eager")
    stream = observed.dev.Stream("s")
    start, end = observed.dev.Event(enable_timing=True), observed.dev.Event(enable_timing=True)
    start.record(stream)
    observed.kernel(stream)
    end.record(stream)
    assert start.elapsed_time(end) > 0
    assert observed.log()[3:] == ["EventQuery e1 True", "EventQuery e2 True"]


def test_a_failed_call_orders_nothing(observe):
    observed = observe("virtual-eager")
    stream = observed.dev.Stream("s")
    start = observed.dev.Event()
    start.record(stream)
    with pytest.raises(StreamError):
        start.elapsed_time(observed.dev.Event())
    observed.kernel(stream, lambda: 1 / 0)
    with pytest.raises(StreamError):
        stream.synchronize()
    assert observed.log() == ["EventRecord e1 s", "Kernel s"]


# -- mixed use -------------------------------------------------------------------------------------------------


def test_bare_streams_and_events_may_be_mixed_in(observed):
    dev = observed.dev
    mine, bare_stream, bare_event = dev.Stream("mine"), observed.bare.Stream("bare"), observed.bare.Event()
    observed.kernel(bare_stream)
    mine.wait_stream(bare_stream)
    assert mine.record_event(bare_event) is bare_event
    with dev.stream(bare_stream):
        assert dev.current_stream().bare is bare_stream
        mine.wait_event(bare_event)
        dev.Event().record(bare_stream)
    event = mine.record_event()
    bare_stream.wait_event(event.bare)  # past the recorder: not seen, and no harm
    dev.synchronize()
    dev.record_stream(object(), bare_stream)
    assert observed.log()[:5] == [
        "Kernel bare",
        "WaitStream mine bare",
        "EventRecord e1 mine",
        "EventWait e1 mine",
        "EventRecord e2 bare",
    ]


def test_one_handle_is_one_stream(observe):
    observed = observe()
    stream = observed.dev.Stream("s")
    with observed.dev.stream(stream):
        assert observed.dev.current_stream() is stream
    assert (stream.name, stream.kind) == ("s", StreamKind.NONBLOCKING)


def test_gates_take_wrapped_streams_and_leave_no_record(observe):
    observed = observe("threads")
    a, b, gate = observed.dev.Stream("a"), observed.dev.Stream("b"), observed.dev.gate()
    gate.hold(a)
    b.wait_stream(a)
    done = b.record_event()
    assert gate.wait_blocks_or(b, done, timeout_s=20)
    assert gate.blocks(b)
    gate.open()
    b.synchronize()
    assert observed.log() == ["WaitStream b a", "EventRecord e1 b", "HostSync b"]


def test_the_rest_passes_through(observe):
    observed = observe("virtual-asap")
    assert (observed.dev.name, observed.dev.torch_device, observed.dev.clock_error_ns) == ("virtual", "cpu", 0)
    assert observed.dev.host_ns() == observed.bare.host_ns()
    stream, probe = observed.dev.Stream("s"), observed.dev.probe()
    with observed.dev.stream(stream):
        observed.dev.launch(lambda: None, Work("w"), probe=probe)
    stream.synchronize()
    assert probe.ready()
    assert observed.recorder.resolve() == 0  # the caller's own probe is the caller's


def test_what_only_an_engine_knows(observe):
    observed = observe()
    recorder, access = observed.recorder, device(Mode.WRITE, np.arange(3))
    recorder.define_engine("demo 1.0")
    recorder.define_pool("kv", 80)
    recorder.define_pool("kv host", 80, space=Space.HOST)
    recorder.page_alloc(5, access)
    recorder.page_free(5, access)
    recorder.host_access("sample", (access,))
    assert [(r.space.name, r.id, r.text, r.value) for r in observed.records_of(Define) if r.text != "MainThread"] == [
        ("ENGINE", 0, "demo 1.0", 0),
        ("POOL", 0, "kv", 80),
        ("HOST_POOL", 0, "kv host", 80),
        ("SITE", 0, "sample", 0),
    ]
    (alloc,), (free,), (touch,) = (observed.records_of(kind) for kind in (PageAlloc, PageFree, HostAccess))
    assert (alloc.owner, free.owner, alloc.access is free.access is access) == (5, 5, True)
    assert (touch.site, touch.layers, touch.accesses) == (0, ALL_LAYERS, (access,))
    assert observed.ops() == [0, 1, 2]


def test_hand_overs_between_threads(observed):
    """The post is the poster's, the receive the receiver's."""
    recorder = observed.recorder
    recorder.thread_post(7)
    other = threading.Thread(target=recorder.thread_recv, args=(7,))
    other.start()
    other.join()
    (post,), (recv,) = (observed.records_of(kind) for kind in (ThreadPost, ThreadRecv))
    assert (post.channel, recv.channel) == (7, 7)
    assert post.op < recv.op
    assert post.thread != recv.thread


# -- several threads -------------------------------------------------------------------------------------------


def test_the_ring_is_in_id_order_whatever_the_threads_do(tmp_path):
    bare = open_device("threads")
    ring = RingWriter(tmp_path / "x.ring", clock=bare.host_ns)
    recorder = Recorder(ring, clock=bare.host_ns)
    dev = RecordedDevice(bare, recorder)

    def work(number):
        stream, event = dev.Stream(f"s{number}"), dev.Event()
        for _ in range(100):
            with dev.stream(stream):
                dev.launch(lambda: None, Work("w"))
            event.record(stream)
            stream.wait_event(event)
            event.query()

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    dev.synchronize()
    recorder.resolve()
    with closing(RingReader(ring.path)) as reader:
        records = [r for r in reader.poll() if not isinstance(r, (Define, Times))]
    assert [r.op for r in records] == list(range(len(records)))
    assert Counter(type(r).__name__ for r in records)["Kernel"] == 400
    assert recorder.counters.pairs_resolved == 800
    assert recorder.counters.errors == 0
    dev.close()
    ring.close()


def test_two_agents_at_once_resolve_each_pair_once(observe):
    observed = observe("threads")
    stream = observed.dev.Stream("s")
    for _ in range(300):
        observed.kernel(stream)
    stream.synchronize()
    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(observed.recorder.resolve())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    observed.recorder.resolve()
    assert [r.op for r in observed.records_of(Times)] == [r.op for r in observed.records_of(Kernel)]


# -- failures --------------------------------------------------------------------------------------------------


def test_a_failing_sink_never_reaches_the_engine(observed, caplog):
    ran = []
    stream, event = observed.dev.Stream("s"), observed.dev.Event()
    observed.sink.fail = True
    with caplog.at_level(logging.WARNING):
        for _ in range(30):
            observed.kernel(stream, lambda: ran.append(1))
            event.record(stream)
            stream.wait_event(event)
            event.query()
            event.synchronize()
            stream.query()
            stream.synchronize()
            observed.dev.synchronize()
            observed.dev.record_stream(object(), stream)
    assert len(ran) == 30
    assert observed.recorder.counters.errors == emitter.MAX_FAILURES
    assert observed.sink.dropped == {DropReason.RECORDER_ERROR: emitter.MAX_FAILURES}
    assert not observed.recorder.on
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("hicache_obs")]
    assert ours == [
        "hicache-obs: recording failed, the engine is not affected",
        "hicache-obs: recording is off after 16 failures in a row",
    ]
    observed.sink.fail = False
    observed.kernel(stream)
    stream.synchronize()
    assert observed.sink.records == []


def test_single_failures_are_stated_and_recording_goes_on(observe):
    observed = observe()
    stream = observed.dev.Stream("s")
    for _ in range(40):
        observed.sink.fail = True
        observed.kernel(stream)
        observed.sink.fail = False
        observed.kernel(stream)
    assert observed.recorder.on
    assert len(observed.records_of(Kernel)) == 40
    assert observed.sink.dropped == {DropReason.RECORDER_ERROR: 40}
    assert observed.ops() == sorted(set(observed.ops()))


def test_bad_accesses_lose_their_record_only(tmp_path):
    bare = open_device("virtual")
    ring = RingWriter(tmp_path / "x.ring", clock=bare.host_ns, slots=64, arena_words=64)
    dev = RecordedDevice(bare, Recorder(ring, clock=bare.host_ns))
    ran = []
    for accesses in ((device(Mode.READ, None),), (device(Mode.READ, np.arange(2)),) * 9, ()):
        dev.launch(lambda: ran.append(1), Work("w", accesses))
    dev.synchronize()
    assert len(ran) == 3
    assert ring.dropped == {DropReason.RECORDER_ERROR: 2}
    ring.close()


def test_a_mode_byte_of_off_stops_every_writer_until_it_is_on_again(tmp_path):
    bare = open_device("virtual")
    ring = RingWriter(tmp_path / "x.ring", clock=bare.host_ns, slots=64, arena_words=64)
    recorder = Recorder(ring, clock=bare.host_ns, ranges=NoRanges())
    dev = RecordedDevice(bare, recorder)
    ran = []

    def round_trip():
        dev.launch(lambda: ran.append(1), Work("w"))
        dev.Event().record()
        dev.current_stream().synchronize()

    for mode in (CaptureMode.OFF, CaptureMode.OBSERVE):
        set_mode(ring.path, mode)
        round_trip()
        if mode is CaptureMode.OFF:
            assert recorder.counters.launches == 0
            assert recorder.next_op == 0
    assert len(ran) == 2
    assert recorder.counters.launches == 1
    kinds = [type(record).__name__ for record in read_ring(ring.path) if not isinstance(record, Define)]
    assert kinds == ["Lost", "Kernel", "EventRecord", "HostSync"]
    assert set(ring.dropped) == {DropReason.SWITCHED_OFF}
    ring.close()


def test_failing_ranges_never_reach_the_engine(observe):
    observed = observe("threads")

    def fail(*_):
        raise RuntimeError("no ranges today")

    observed.ranges.push = fail
    stream, ran = observed.dev.Stream("s"), []
    observed.kernel(stream, lambda: ran.append(1))
    stream.synchronize()
    assert ran == [1]
    assert observed.recorder.counters.errors == 1
    assert observed.recorder.resolve() == 1


def test_the_engines_own_errors_pass_and_leave_no_probe_behind(observe):
    observed = observe("virtual-asap")
    dev, stream = observed.dev, observed.dev.Stream("s")
    other = open_device("virtual")

    def nested():
        dev.launch(lambda: None, Work("inner"))

    observed.kernel(stream, nested)
    with pytest.raises(StreamError, match=r"raised StreamError: Device.launch called from inside"):
        dev.synchronize()
    with pytest.raises(StreamError):
        stream.wait_stream(other.Stream("elsewhere"))
    with pytest.raises(StreamError):
        stream.wait_event(other.Event())
    observed.kernel(stream)
    stream.synchronize()
    assert observed.recorder.resolve() == 2
    counters = observed.recorder.counters
    assert (counters.pairs_dropped, counters.errors) == (3, 0)
    other.close()


def test_a_probe_that_fails_is_given_up(observe):
    observed = observe("virtual-eager")
    stream = observed.dev.Stream("s")
    observed.kernel(stream)
    observed.kernel(stream)
    op, thread, probe, bare = observed.recorder._pending._items.popleft()

    class Broken:
        def ready(self):
            raise RuntimeError("the device fell off the bus")

    observed.recorder._pending._items.appendleft((op, thread, Broken(), bare))
    assert observed.recorder.resolve() == 1
    assert observed.recorder.counters.pairs_dropped == 1
    assert observed.sink.dropped == {DropReason.UNRESOLVED: 1, DropReason.RECORDER_ERROR: 1}
    assert probe.ready()


def test_a_probe_that_the_engine_gives_up_while_it_is_asked_holds_up_nothing(observe):
    observed = observe("virtual-eager")
    stream = observed.dev.Stream("s")
    observed.kernel(stream)
    observed.kernel(stream)
    items = observed.recorder._pending._items
    op, thread, _, bare = items.popleft()

    class Abandoned:
        def ready(self):
            observed.recorder.abandon(self)
            return False

    items.appendleft((op, thread, Abandoned(), bare))
    assert observed.recorder.resolve() == 1
    assert (list(observed.times()), len(items)) == ([1], 0)
    assert observed.recorder.counters.pairs_dropped == 1


def test_pending_probes_are_bounded_the_oldest_goes(observe):
    observed = observe("virtual-lazy", max_pending=5)
    stream = observed.dev.Stream("s")
    for _ in range(12):
        observed.kernel(stream)
    stream.synchronize()
    assert observed.recorder.resolve() == 5
    assert list(observed.times()) == list(range(7, 12))
    assert observed.sink.dropped == {DropReason.UNRESOLVED: 7}
    assert observed.recorder.counters.pairs_dropped == 7


def test_a_full_ring_costs_records_not_definitions(observe):
    """A name that did not get into the ring is offered again with the next record that uses it."""
    observed = observe()
    stream = observed.dev.Stream("s")
    observed.sink.full = True
    observed.kernel(stream)
    assert observed.recorder.counters.launches == 0
    observed.sink.full = False
    observed.kernel(stream)
    assert sorted(r.text for r in observed.records_of(Define)) == ["MainThread", "forward", "s"]
    stream.synchronize()
    assert observed.recorder.resolve() == 1  # what was not recorded is not measured


def test_a_call_from_within_a_hook_is_left_out_not_deadlocked(observe):
    """A signal handler may shut the engine down in the middle of a hook of its own thread."""
    observed = observe("virtual-eager")
    stream = observed.dev.Stream("s")
    append = observed.sink.append

    def interrupted(record):
        observed.sink.append = append
        observed.dev.synchronize()
        return append(record)

    observed.sink.append = interrupted
    observed.kernel(stream)
    assert observed.log() == ["Kernel s"]
    assert observed.sink.dropped == {DropReason.RECORDER_ERROR: 1}


def test_a_closed_ring_switches_the_hooks_off(observed):
    stream = observed.dev.Stream("s")
    observed.sink.writable = False
    observed.kernel(stream)
    stream.synchronize()
    observed.dev.synchronize()
    assert not observed.recorder.on
    assert observed.sink.records == []
    assert observed.ranges.popped == 0


def test_sites_are_bounded(observe, monkeypatch):
    monkeypatch.setattr(emitter, "MAX_SITES", 2)
    observed = observe()
    stream = observed.dev.Stream("s")
    for site in "abcda":
        observed.kernel(stream, site=site)
    assert [r.site for r in observed.records_of(Kernel)] == [0, 1, 2, 2, 0]
    assert observed.named(DefineSpace.SITE) == {0: "a", 1: "b"}


def test_bare_events_are_remembered_in_bounded_number(observe, monkeypatch):
    observed = observe()
    stream = observed.dev.Stream("s")
    for _ in range(600):
        stream.record_event(observed.bare.Event())
    assert len(observed.dev._bare_events) <= 256
