"""Blocks of records in the ring: whole or not at all, in order, across its end, and late ids."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest

from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.recorder.hold_back import HoldBack, late
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.records import Access, Direction, DropReason, EventRecord, Memcpy, Mode, Space, StreamId, StreamKind


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


@pytest.fixture
def ring(tmp_path):
    made = RingWriter(tmp_path / "a.ring", slots=16, arena_words=64)
    yield made
    made.close()


def load(recorder, touched, layers, group=1):
    batch = recorder.begin_batch(STREAM, "load-back copy", group, Direction.HOST_TO_DEVICE)
    batch.use(touched, 64, ())
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
    recorder.begin_event_record(recorder.new_event(), lambda: STREAM)
    assert held.flush() == 0
    ids.there = True
    assert held.flush() == 5
    kinds = [one for one in read_ring(ring.path) if isinstance(one, Memcpy | EventRecord)]
    assert [type(one) for one in kinds] == [Memcpy, EventRecord] * 2 + [EventRecord]
    assert kinds[0].accesses[1].ids.tolist() == [4, 5]
