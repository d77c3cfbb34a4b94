"""Records that are packed straight into the ring, against the same ones that are made as objects and appended."""

from __future__ import annotations

import random
from contextlib import closing, suppress
from dataclasses import replace

import numpy as np
import pytest

from hicache_obs.readers.ring import read_ring
from hicache_obs.recorder import RecordedDevice, Recorder, RingWriter
from hicache_obs.recorder.hold_back import HoldBack, late
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.recorder.slot import EVENT_RECORD, EVENT_SYNC, pack_plain
from hicache_obs.records import (
    HEADER_BYTES,
    SLOT_BYTES,
    Access,
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
    Work,
)
from hicache_obs.streams import VirtualDevice


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
    class Late:
        there = False

        def ready(self):
            return self.there

        def take(self):
            return np.array([4])

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
