"""Records that are packed straight into the ring, against the same ones that are made as objects and appended."""

from __future__ import annotations

import os
import random
import signal
import threading
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from hicache_obs.readers.ring import read_ring
from hicache_obs.readers.ring_header import set_mode
from hicache_obs.recorder import RecordedDevice, Recorder, RingWriter
from hicache_obs.recorder.hold_back import HoldBack, late
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.recorder.slot import EVENT_RECORD, EVENT_SYNC, pack_plain
from hicache_obs.records import (
    HEADER_BYTES,
    SLOT_BYTES,
    Access,
    CaptureMode,
    Define,
    Direction,
    DropReason,
    EventRecord,
    EventSync,
    HostAccess,
    HostSync,
    Lost,
    Mode,
    Purpose,
    Space,
    Times,
    Work,
)
from hicache_obs.streams import VirtualDevice, open_device


class AppendOnly:
    """A ring that takes no packed records."""

    def __init__(self, ring):
        self.append, self.drop, self.beat, self.lock = ring.append, ring.drop, ring.beat, ring.lock
        self._ring = ring

    @property
    def writable(self):
        return self._ring.writable

    @property
    def mode(self):
        return self._ring.mode


class Late:
    """Ids that arrive when ``there`` is set."""

    there = False

    def ready(self):
        return self.there

    def take(self):
        return np.array([4])


def program(dev, bare, recorder, seed):
    """Calls of every kind that is packed at once, and of some that are not."""
    draw = random.Random(seed)
    streams, events = [dev.Stream(str(n)) for n in range(4)], [dev.Event() for _ in range(5)]
    pages = [np.array(draw.sample(range(1000), draw.randrange(1, 40))) for _ in range(100)]
    for step in range(600):
        stream, event = draw.choice(streams), draw.choice(events)
        number = draw.randrange(10)
        if number == 0:
            stream.wait_stream(draw.choice(streams), purpose=draw.choice(list(Purpose)))
        elif number == 1:
            stream.wait_event(event, purpose=draw.choice(list(Purpose)))
        elif number == 2:
            event.record(draw.choice([stream, None]))
        elif number == 3:
            event.synchronize()
        elif number == 4:
            event.query()
        elif number == 5:
            stream.synchronize()
        elif number == 6:
            recorder.resolve()
        else:
            accesses = tuple(
                Access(draw.choice(list(Space)), draw.choice([Mode.READ, Mode.WRITE]), draw.choice(pages))
                for _ in range(draw.randrange(6))  # five are too many
            )
            direction, rows = draw.choice([None, None, *Direction]), draw.choice([None, None, pages[0]])
            layers, size_bytes = (draw.randrange(3), 4), draw.randrange(1 << 20)
            work = Work(draw.choice("abc"), accesses, layers, step, direction, size_bytes, rows, draw.random() < 0.05)
            with dev.stream(stream), suppress(Exception):
                dev.launch(lambda: None, work, probe=draw.choice([None, None, bare.probe()]))
    while recorder.resolve():
        pass


@pytest.mark.parametrize(("slots", "words"), [(1 << 12, 1 << 17), (300, 1 << 17), (1 << 12, 1000)])
def test_both_ways_write_the_same(tmp_path, slots, words):
    """Room for all, a ring that fills up, an arena that does."""
    found = []
    for name in ("short", "long"):
        bare = VirtualDevice("random", seed=1)
        ring = RingWriter(tmp_path / name, slots=slots, arena_words=words, clock=bare.host_ns)
        sink = ring if name == "short" else AppendOnly(ring)
        recorder = Recorder(sink, clock=bare.host_ns, ranges=NoRanges(), max_pending=8)
        program(RecordedDevice(bare, recorder), bare, recorder, seed=slots + words)
        counters = replace(recorder.counters, hook_ns=0)
        found.append((ring.path.read_bytes()[HEADER_BYTES:], counters, ring.dropped, recorder.next_op))
        ring.close()
    assert found[0] == found[1]
    assert found[0][1].launches > 10
    assert found[0][1].errors > 0
    assert any(found[0][0][:SLOT_BYTES])


@pytest.fixture
def ring(tmp_path):
    with closing(RingWriter(tmp_path / "ring")) as writer:
        yield writer


def records(ring):
    return [record for record in read_ring(ring.path) if not isinstance(record, Define)]


def test_a_call_from_within_the_short_way_is_left_out(ring):
    """A signal handler may use the engine in the middle of a hook of its own thread."""
    handler = []

    def clock():
        if handler:
            handler.pop()()
        return 9

    bare = VirtualDevice("eager")
    dev = RecordedDevice(bare, Recorder(ring, clock=clock, ranges=NoRanges()))
    first, second = dev.Stream("a"), dev.Stream("b")
    first.wait_stream(second)  # both have their names in the ring
    handler.append(lambda: second.wait_stream(first))
    first.wait_stream(second)
    dev.synchronize()
    kinds = [type(record).__name__ for record in records(ring)]
    assert kinds == ["WaitStream", "Lost", "WaitStream", "HostSync"]
    assert ring.dropped == {DropReason.RECORDER_ERROR: 1}
    assert [record.op for record in records(ring) if record.op >= 0] == [0, 1, 2]


def test_append_from_within_put_is_refused(ring):
    class Handler:
        def __index__(self):
            assert not ring.append(HostSync(7, 0, 0, None))
            return 5

    with ring.lock:
        assert ring.put(EVENT_RECORD, 1, 0, 1, Handler())
        assert ring.append(HostSync(2, 0, 0, None))
    assert [type(record) for record in records(ring)] == [EventRecord, Lost, HostSync]
    assert ring.dropped == {DropReason.RECORDER_ERROR: 1}


@pytest.mark.parametrize("again", [False, True])
def test_what_was_recorded_again_during_a_synchronize_is_not_known(ring, again):
    bare = VirtualDevice("eager")
    recorder = Recorder(ring, clock=bare.host_ns, ranges=NoRanges())
    stream, event = bare.Stream("s"), recorder.new_event()
    recorder.begin_event_record(bare, event, stream)
    recorder.end_event_record(event)
    version = event.stamp
    if again:
        recorder.begin_event_record(bare, event, stream)
        recorder.end_event_record(event)
    recorder.event_synchronized(event, version)
    assert any(isinstance(record, EventSync) for record in records(ring)) is not again
    assert recorder.counters.uncertain == again


@pytest.mark.parametrize("meanwhile", [False, True])
def test_a_synchronize_of_a_stream_does_not_cover_what_was_queued_meanwhile(ring, meanwhile):
    bare = VirtualDevice("eager")
    recorder = Recorder(ring, clock=bare.host_ns, ranges=NoRanges())
    stream, other = bare.Stream("s"), bare.Stream("other")
    recorder.wait_stream(bare, stream, other, Purpose.PLAIN)
    mark = recorder.begin_stream_sync(stream)
    if meanwhile:
        recorder.wait_stream(bare, stream, other, Purpose.PLAIN)
    recorder.end_stream_sync(stream, mark)
    assert any(isinstance(record, HostSync) for record in records(ring)) is not meanwhile


def test_a_packed_record_that_follows_a_loss(ring):
    ring.drop(DropReason.RING_FULL)
    assert ring.put_packed(pack_plain(EVENT_SYNC | 3 << 32, 2, 9, 5, 0))
    lost, found = records(ring)
    assert lost.count == 1
    assert (type(found), found.op, found.thread, found.host_ns, found.event) == (EventSync, 2, 3, 9, 5)


def test_a_synchronize_waits_behind_late_ids(ring):
    held, ids = HoldBack(ring), Late()
    recorder = ServerRecorder(held, clock=lambda: 9, ranges=NoRanges())
    event = recorder.new_event()
    recorder.host_access("read", ())  # the thread has its name in the ring
    held.expect()
    recorder.host_access("read", (Access(Space.DEVICE, Mode.READ, late(ids)),))
    recorder.event_synchronized(event, event.stamp)
    assert [type(record) for record in records(ring)] == [HostAccess]
    ids.there = True
    held.flush()
    assert [type(record) for record in records(ring)] == [HostAccess, HostAccess, EventSync]
    assert records(ring)[-1].event == event.event_id


def used(ring, clock=lambda: 9):
    """An observed device on ``ring``, and two streams and an event of it whose names are known."""
    bare = VirtualDevice("eager")
    recorder = Recorder(ring, clock=clock, ranges=NoRanges())
    dev = RecordedDevice(bare, recorder)
    first, second, event = dev.Stream("a"), dev.Stream("b"), dev.Event()
    calls(dev, first, second, event)
    return dev, first, second, event


def calls(dev, first, second, event):
    """One of each that is packed at once."""
    first.wait_stream(second)
    with dev.stream(first):
        dev.launch(lambda: None, Work("w", (Access(Space.DEVICE, Mode.READ, np.arange(3)),)))
    event.record(first)
    second.wait_event(event)
    event.synchronize()


def test_each_call_while_it_is_off_is_counted_once(ring):
    observed = used(ring)
    set_mode(ring.path, CaptureMode.OFF)
    head = ring._head
    for _ in range(7):
        calls(*observed)
    assert ring.dropped == {DropReason.SWITCHED_OFF: 35}
    assert ring._head == head
    set_mode(ring.path, CaptureMode.OBSERVE)
    calls(*observed)
    lost, *after = records(ring)[5:]
    assert (lost.reason, lost.count, len(after)) == (DropReason.SWITCHED_OFF, 35, 5)
    assert [record.op for record in records(ring) if record.op >= 0] == list(range(10))


def test_a_record_that_is_left_out_while_a_loss_is_stated_is_stated_by_the_next(ring):
    """``skip`` takes no lock, so it may come at any time."""
    real = ring._pack[Lost]

    def interrupted(place, record):
        ring.skip()
        return real(place, record)

    ring.skip()
    ring._pack[Lost] = interrupted
    assert ring.append(HostSync(1, 0, 0, None))
    ring._pack[Lost] = real
    assert ring.append(HostSync(2, 0, 0, None))
    with ring.lock:
        assert ring.put(EVENT_SYNC, 3, 0, 1, 0)  # there is nothing left to state
    assert [getattr(record, "count", 0) for record in records(ring)] == [1, 0, 1, 0, 0]
    assert ring.dropped == {DropReason.SWITCHED_OFF: 2}


def test_a_loss_that_does_not_fit_yet_is_not_forgotten(tmp_path):
    with closing(RingWriter(tmp_path / "small", slots=8)) as small:
        for op in range(7):
            small.append(HostSync(op, 0, 0, None))
        small.skip()
        assert not small.append(HostSync(7, 0, 0, None))  # there is room for one more, not for two
        with small.lock:
            assert not small.put(EVENT_SYNC, 8, 0, 1, 0)


def test_once_the_ring_is_closed_no_call_does_anything(ring):
    observed = used(ring)
    ring.close()
    before = ring.path.read_bytes()
    calls(*observed)
    assert ring.switch[0] == 0
    assert ring._map.closed  # nothing of it is held
    assert observed[0].recorder.counters.errors == 0
    assert ring.path.read_bytes() == before


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # it is what the test is about
def test_a_child_forked_while_another_thread_is_in_a_hook_does_not_hang(ring):
    """There the lock is held for ever, by a thread that does not exist."""
    inside, go_on, slow = threading.Event(), threading.Event(), []

    def clock():
        if slow and threading.current_thread() is slow[0]:
            inside.set()
            go_on.wait()
        return 9

    observed = used(ring, clock)
    dev, stream, _, event = observed
    arguments = dev.bare, event.state, stream.bare
    slow.append(threading.Thread(target=dev.recorder.begin_event_record, args=arguments))
    slow[0].start()
    inside.wait()
    before = ring.path.read_bytes()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        code = 1
        try:
            calls(*observed)
            code = 0 if ring.switch[0] == 0 and ring.path.read_bytes() == before else 2
        finally:
            os._exit(code)
    try:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    finally:
        go_on.set()
        slow[0].join()


def test_a_wait_for_a_stream_is_queued_on_both(ring):
    dev, first, second, _ = used(ring)
    first.wait_stream(second)
    op = dev.recorder.next_op - 1
    assert [dev.recorder.last_on(stream.bare) for stream in (first, second)] == [op, op]


def test_hooks_that_are_packed_at_once_are_timed_too(ring):
    observed = used(ring)
    before = observed[0].recorder.counters.hook_ns
    for _ in range(4):
        calls(*observed)
    assert observed[0].recorder.counters.hook_ns > before


@pytest.mark.parametrize("ids", [np.arange(9, dtype=np.int32), np.arange(18)[::2], np.arange(9, dtype=">i8")])
def test_page_ids_of_another_type_or_with_gaps_are_the_same_in_the_ring(ring, ids):
    ring.append(HostAccess(0, 0, 0, 0, (0, 1), (Access(Space.DEVICE, Mode.READ, ids),)))
    assert records(ring)[0].accesses[0].ids.tolist() == ids.tolist()


# -- device times, written many at once ------------------------------------------------------------------------


class Watch:
    """A probe that is complete when it is told so."""

    def __init__(self, end_ns=0, error=None):
        self.done, self.end_ns, self.error = True, end_ns, error

    def ready(self):
        if self.error is not None:
            raise self.error
        return self.done

    def times_ns(self):
        return 0, self.end_ns


def pending_on(ring, probes, devices):
    recorder = Recorder(ring, clock=lambda: 9, ranges=NoRanges())
    for op, (probe, on) in enumerate(zip(probes, devices, strict=True)):
        recorder._pending.add(op, 3, probe, on)
    return recorder


def times(ring):
    return [(r.op, r.thread, r.host_ns, r.end_ns, r.error_ns) for r in records(ring) if isinstance(r, Times)]


def test_device_times_come_in_order_with_the_error_of_their_own_device(ring):
    one, other = open_device("virtual"), open_device("threads")
    probes = [Watch(op) for op in range(50)]
    probes[45].done = False
    recorder = pending_on(ring, probes, [one] * 20 + [other] * 30)
    assert recorder.resolve() == 45
    assert times(ring) == [(op, 3, 9, op, one.clock_error_ns if op < 20 else other.clock_error_ns) for op in range(45)]
    assert one.clock_error_ns != other.clock_error_ns
    probes[45].done = True
    assert recorder.resolve() == 5
    counters = recorder.counters
    assert counters.pairs_resolved == counters.ranges_opened == counters.ranges_closed == 50
    other.close()


def test_a_failing_probe_or_clock_costs_one_operation(ring):
    class Clockless:
        asked = 0

        @property
        def clock_error_ns(self):
            self.asked += 1
            if self.asked == 1:
                raise RuntimeError("no anchor")
            return 5

    probes = [Watch(op, RuntimeError("gone") if op == 7 else None) for op in range(20)]
    recorder = pending_on(ring, probes, [Clockless()] * 20)
    assert recorder.resolve() == 18
    assert [found[0] for found in times(ring)] == [op for op in range(20) if op not in (0, 7)]
    assert (recorder.counters.pairs_dropped, recorder.counters.errors) == (2, 2)


def test_what_is_given_up_while_the_next_are_asked_gets_no_times(ring):
    class Abandons(Watch):
        def ready(self):
            recorder.abandon(first)
            return True

    first = Watch(0)
    recorder = pending_on(ring, [first, Watch(1), Abandons(2), Watch(3)], [VirtualDevice("eager")] * 4)
    assert recorder.resolve() == 3
    assert [found[0] for found in times(ring)] == [1, 2, 3]
    assert recorder.counters.pairs_dropped == 1


def test_device_times_for_which_there_is_no_room_are_counted(tmp_path):
    with closing(RingWriter(tmp_path / "small", slots=8)) as small:
        device = VirtualDevice("eager")
        recorder = pending_on(small, [Watch(op) for op in range(12)], [device] * 12)
        recorder.resolve()
        assert [found[0] for found in times(small)] == list(range(8))
        assert small.dropped == {DropReason.RING_FULL: 4}


def test_device_times_wait_behind_late_ids(ring):
    held, ids = HoldBack(ring), Late()
    recorder = pending_on(held, [Watch(1)], [VirtualDevice("eager")])
    held.expect()
    held.append(HostAccess(0, 0, 0, 0, (0, 1), (Access(Space.DEVICE, Mode.READ, late(ids)),)))
    assert recorder.resolve() == 1
    assert records(ring) == []
    ids.there = True
    held.flush()
    assert [type(record) for record in records(ring)] == [HostAccess, Times]


def test_a_call_that_is_left_out_is_stated_behind_late_ids(ring):
    held, ids = HoldBack(ring), Late()
    dev = RecordedDevice(VirtualDevice("eager"), Recorder(held, clock=lambda: 9, ranges=NoRanges()))
    held.expect()
    held.append(HostAccess(0, 0, 0, 0, (0, 1), (Access(Space.DEVICE, Mode.READ, late(ids)),)))
    set_mode(ring.path, CaptureMode.OFF)
    dev.Event().synchronize()
    set_mode(ring.path, CaptureMode.OBSERVE)
    ids.there = True
    held.flush()
    assert ring.dropped == {DropReason.SWITCHED_OFF: 1}
    ring.append(HostSync(2, 0, 0, None))
    assert [type(record) for record in records(ring)] == [HostAccess, Lost, HostSync]


@pytest.mark.parametrize("seen", [True, False])
def test_without_a_tool_the_device_is_asked_for_no_callbacks(ring, seen):
    bare, asked = VirtualDevice("eager"), []

    class Watched:
        def __getattr__(self, name):
            return getattr(bare, name)

        def probe(self, *callbacks):
            asked.append(sum(callback is not None for callback in callbacks))
            return bare.probe(*callbacks)

    class Seen:
        status = None

        def push(self, name, op):
            pass

        def pop(self):
            pass

    recorder = Recorder(ring, clock=lambda: 9, ranges=Seen() if seen else NoRanges())
    for _ in range(2):  # the first time the slow way
        recorder.work(Watched(), Work("w"))
    recorder.begin_replay(Watched(), 1, Work("w"), [Work("w"), Work("w")], [])
    assert asked == ([2, 2, 1, 1] if seen else [0, 0, 0, 0])
