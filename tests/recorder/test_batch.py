"""Blocks of records in the ring: whole or not at all, in order, across its end, and late ids."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from hicache_obs.errors import TraceError
from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.readers.ring_header import set_mode
from hicache_obs.recorder.hold_back import HoldBack, late
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.recorder.slot import EVENT_RECORD, EVENT_WAIT, WAIT_STREAM
from hicache_obs.records import (
    Access,
    CaptureMode,
    Direction,
    DropReason,
    EventRecord,
    EventWait,
    Lost,
    Memcpy,
    Mode,
    PageFree,
    Purpose,
    SlotAccess,
    Space,
    StreamId,
    StreamKind,
    WaitStream,
    Work,
    slot_list_head,
)
from hicache_obs.streams import VirtualDevice


class Stream:
    stream_id, name, kind = StreamId(7), "load-back", StreamKind.NONBLOCKING


class Late:
    """Ids that arrive when told to."""

    def __init__(self):
        self.there = False

    def ready(self):
        return self.there

    def take(self):
        return np.array([4, 5])


STREAM = Stream()


def accesses(*ids):
    return (Access(Space.HOST, Mode.READ, np.array(ids)), Access(Space.DEVICE, Mode.WRITE, np.array(ids)))


ACCESSES = accesses(1, 2)


@pytest.fixture
def ring(tmp_path):
    made = RingWriter(tmp_path / "a.ring", slots=16, arena_words=64)
    yield made
    made.close()


def load(recorder, touched, layers, group=1):
    batch = recorder.begin_batch(STREAM, "load-back copy", group, Direction.HOST_TO_DEVICE)
    batch.use(touched, 64)
    event = recorder.new_event()
    for layer in range(layers):
        batch.work(layer, layer + 1)
        batch.record(event)
    recorder.flush_batch()
    return event


def test_blocks_go_across_the_end_of_the_ring(ring):
    recorder = ServerRecorder(ring, clock=lambda: 9, ranges=NoRanges())
    seen = []
    with closing(RingReader(ring.path)) as reader:
        for group in range(5):
            load(recorder, accesses(group, group + 1), 3, group)
            seen += reader.poll()
    copies = [one for one in seen if isinstance(one, Memcpy)]
    assert [(one.group, one.layers[0]) for one in copies] == [(n, layer) for n in range(5) for layer in range(3)]
    assert all(one.accesses[1].ids.tolist() == [one.group, one.group + 1] for one in copies)
    assert len([one for one in seen if isinstance(one, EventRecord)]) == 15
    assert ring.dropped == {}


def test_blocks_whose_steps_differ_in_one_place_only_are_told_apart(ring):
    recorder = ServerRecorder(ring, clock=lambda: 9, ranges=NoRanges())
    seen = []
    with closing(RingReader(ring.path)) as reader:
        for odd in (1, 5, 1):
            batch = recorder.begin_batch(STREAM, "load-back copy", 1, Direction.HOST_TO_DEVICE)
            batch.use(ACCESSES, 64)
            for layer in (0, odd, 2, 3):
                batch.work(layer, layer + 1)
            recorder.flush_batch()
            seen += reader.poll()
    assert [one.layers[0] for one in seen if isinstance(one, Memcpy)] == [0, 1, 2, 3, 0, 5, 2, 3, 0, 1, 2, 3]


def test_a_block_without_room_is_dropped_whole_and_counted(ring):
    recorder = ServerRecorder(ring, clock=lambda: 9, ranges=NoRanges())
    event = load(recorder, accesses(1), 9)
    assert ring.dropped == {DropReason.RING_FULL: 18}
    assert event.version % 2 == 0
    assert not [one for one in read_ring(ring.path) if isinstance(one, Memcpy)]


def test_a_block_waits_for_its_ids_and_what_follows_waits_behind_it(ring):
    held, ids = HoldBack(ring), Late()
    recorder = ServerRecorder(held, clock=lambda: 9, ranges=NoRanges())
    held.expect()
    touched = (Access(Space.HOST, Mode.READ, np.array([1])), Access(Space.DEVICE, Mode.WRITE, late(ids)))
    load(recorder, touched, 2)
    recorder.begin_event_record(VirtualDevice(), recorder.new_event(), STREAM)
    assert held.flush() == 0
    ids.there = True
    assert held.flush() == 5
    kinds = [one for one in read_ring(ring.path) if isinstance(one, Memcpy | EventRecord)]
    assert [type(one) for one in kinds] == [Memcpy, EventRecord] * 2 + [EventRecord]
    assert kinds[0].accesses[1].ids.tolist() == [4, 5]


class Other:
    stream_id, name, kind = StreamId(9), "forward", StreamKind.NONBLOCKING


OTHER = Other()


@pytest.mark.parametrize("full", [False, True])
def test_a_packed_record_is_the_same_as_a_made_one(ring, full):
    """Whether it goes the fast way (all is known) or the slow one (first sight, or something was lost)."""
    recorder = ServerRecorder(ring, clock=lambda: 9, ranges=NoRanges())
    lane = recorder._lanes.lane
    event = recorder.new_event()
    for _ in range(2):
        if full:
            ring.drop(DropReason.ARENA_FULL)
        recorder.put(lane, EVENT_RECORD, event.event_id, STREAM, None, event)
        recorder.end_event_record(event)
        recorder.put(lane, EVENT_WAIT | Purpose.LOAD_FENCE << 16, event.event_id, OTHER)
        recorder.put(lane, WAIT_STREAM | Purpose.WRITE_FENCE << 16, 9, STREAM, OTHER)
    found = [one for one in read_ring(ring.path) if isinstance(one, EventRecord | EventWait | WaitStream)]
    assert [(type(one), getattr(one, "purpose", None)) for one in found] == [
        (EventRecord, None),
        (EventWait, Purpose.LOAD_FENCE),
        (WaitStream, Purpose.WRITE_FENCE),
    ] * 2
    assert [one.op for one in found] == list(range(6))
    assert {(one.event, one.stream) for one in found if isinstance(one, EventRecord)} == {(event.event_id, 7)}
    assert {(one.waiter, one.on) for one in found if isinstance(one, WaitStream)} == {(9, 7)}
    assert event.version == 4
    assert recorder.last_on(STREAM) == recorder.last_on(OTHER) == 5


def test_a_packed_kernel_is_the_same_as_a_made_one(ring):
    recorder = ServerRecorder(ring, clock=lambda: 9, ranges=NoRanges())
    touched = accesses(3, 4)
    for group in range(3):  # the first is made, the others are packed
        recorder.enqueue(STREAM, Work("copy", touched, (1, 2), group, Direction.DEVICE_TO_HOST, 64))
    copies = [one for one in read_ring(ring.path) if isinstance(one, Memcpy)]
    assert [(one.group, one.op) for one in copies] == [(0, 0), (1, 1), (2, 2)]
    assert {(one.stream, one.layers, one.size_bytes, one.direction, one.site) for one in copies} == {
        (7, (1, 2), 64, Direction.DEVICE_TO_HOST, 0)
    }
    assert all(one.accesses is copies[0].accesses for one in copies)


def test_switched_off_means_that_nothing_is_recorded_and_the_loss_is_stated(ring):
    recorder = ServerRecorder(ring, clock=lambda: 9, ranges=NoRanges())
    lane, event = recorder._lanes.lane, recorder.new_event()
    recorder.put(lane, EVENT_RECORD, event.event_id, STREAM, None, event)
    set_mode(ring.path, CaptureMode.OFF)
    recorder.put(lane, EVENT_RECORD, event.event_id, STREAM, None, event)
    recorder.enqueue(STREAM, Work("copy", accesses(3), direction=Direction.DEVICE_TO_HOST))
    load(recorder, accesses(1), 2)
    set_mode(ring.path, CaptureMode.OBSERVE)
    recorder.put(lane, EVENT_RECORD, event.event_id, STREAM, None, event)
    found = [one for one in read_ring(ring.path) if isinstance(one, EventRecord | Memcpy | Lost)]
    assert [type(one) for one in found] == [EventRecord, Lost, EventRecord]
    assert (found[1].reason, found[1].count) == (DropReason.SWITCHED_OFF, 7)  # and the name of a site


def test_a_slot_list_comes_out_of_the_ring_as_pages(ring):
    head = slot_list_head(4, skip_zero=True)
    access = SlotAccess(Space.DEVICE, Mode.WRITE, np.concatenate((head, [8, 9, 1, 21])))
    recorder = ServerRecorder(ring, clock=lambda: 9, ranges=NoRanges())
    recorder.enqueue(STREAM, Work("forward", (access,)))
    recorder.page_free(0, access)
    with closing(RingReader(ring.path)) as reader:
        *_, kernel, freed = reader.poll()
        assert kernel.accesses[0].ids.tolist() == [2, 5]
        assert freed.access.ids is kernel.accesses[0].ids
        assert (type(freed.access), freed.access.mode) == (Access, Mode.WRITE)


def test_a_damaged_slot_list_is_named(ring):
    ring.append(PageFree(0, 0, 0, 0, SlotAccess(Space.DEVICE, Mode.WRITE, np.array([0, 0, 0, 5]))))
    with pytest.raises(TraceError, match="a slot list of pages of 0"):
        read_ring(ring.path)
