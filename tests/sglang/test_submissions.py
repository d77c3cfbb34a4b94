"""Load-backs of pools and events that are known already: fewer calls of ours, the same records."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import pytest
import torch

from hicache_obs.records import DropReason, EventQuery, EventRecord, EventWait, Kernel, Lost, Memcpy
from hicache_obs.sglang.streams import stream_adapters
from hicache_obs.sglang.table import SGLANG_ADAPTERS

LAYERS = 4
SUBMIT = next(row for row in SGLANG_ADAPTERS if row.target.endswith("submit_host_to_device"))
COPY = next(row for row in SGLANG_ADAPTERS if row.target.endswith("load_to_device_per_layer_physical"))


class Transfer(NamedTuple):
    host_pool: object
    device_pool: object
    host_indices: object
    device_indices: object
    layer_mapper: object = None
    is_draft: bool = False


class Machine:
    """A transfer engine like SGLang's, of hooked classes."""

    def __init__(self, it, pools=1):
        self.it, self.calls = it, calls = it, []

        class Pool:
            page_size, layer_num, size_per_token = 4, LAYERS, 24

            def load_to_device_per_layer_physical(self, device_pool, there, here, layer, backend, *, is_draft):
                calls.append(layer)

        class Event:
            def record(self, stream=None):
                calls.append("record")

        class Loading:
            def __init__(self):
                self.load_events = [Event() for _ in range(LAYERS)]

            def complete(self, layer):
                self.load_events[layer].record()

        class Engine:
            host_to_device_stream = it.stream(9)
            fails_at = skips = interrupts_at = None

            def submit_host_to_device(self, transfers, *, transfer_layer_id_max, on_layer_done):
                for layer in range(transfer_layer_id_max):
                    if layer == self.fails_at:
                        raise RuntimeError("theirs")
                    if layer == self.interrupts_at:
                        machine.other.record()
                    for one in transfers:
                        one.host_pool.load_to_device_per_layer_physical(
                            one.device_pool, one.host_indices, one.device_indices, layer, "x", is_draft=one.is_draft
                        )
                    if layer != self.skips:
                        on_layer_done(layer)
                machine.done.record()

        machine = self
        rows = {row.target: row for row in stream_adapters("a.Stream", "a.Event")}
        it.hook(Pool, "load_to_device_per_layer_physical", COPY)
        it.hook(Event, "record", rows["a.Event.record"])
        it.hook(Engine, "submit_host_to_device", SUBMIT)
        self.engine, self.loadings = Engine(), [Loading(), Loading()]
        self.pools, self.done, self.other = [Pool() for _ in range(pools)], Event(), Event()
        for loading in self.loadings:
            for layer, event in enumerate(loading.load_events):
                it.session.event(event).layer = layer
        self.first = itertools.count(4, 4)

    def load(self, loading=0):
        there = next(self.first)
        transfers = [
            Transfer(pool, self.it.pool, torch.arange(there, there + 4), torch.arange(there + 4, there + 8))
            for pool in self.pools
        ]
        done = self.loadings[loading].complete
        self.engine.submit_host_to_device(transfers, transfer_layer_id_max=LAYERS, on_layer_done=done)
        return there // 4


@pytest.fixture
def machine(server):
    def make(**options):
        it = server()
        it.session.timed = False
        it.session._timing = None
        return it, Machine(it, **options)

    return make


def shapes(it):
    """Layer and pages of each copy, number of each event that is recorded."""
    return [
        (one.layers[0], *(page for access in one.accesses for page in access.ids.tolist()))
        if isinstance(one, Memcpy)
        else one.event
        for one in it.records(Memcpy, EventRecord)
    ]


@pytest.mark.parametrize("pools", [1, 2])
def test_a_known_load_back_has_the_same_records_with_its_own_pages(machine, pools):
    it, one = machine(pools=pools)
    pages, calls = [], []
    turns = (0, 0, 1, 0, 1)  # naming the second pool comes between the first one's layers
    for loading in turns:
        before = it.session.counters.calls
        pages.append(one.load(loading))
        calls.append(it.session.counters.calls - before)
    assert len(it.session.submissions) == 2
    assert calls[0] == 1 + (pools + 1) * LAYERS + 1
    assert calls[3:] == [1 + pools + 1] * 2
    layers = [call for layer in range(LAYERS) for call in (*[layer] * pools, "record")]
    assert one.calls == 5 * [*layers, "record"]
    assert all("load_to_device_per_layer_physical" in vars(pool) for pool in one.pools)  # the shorter way is back
    numbers = [[it.session.event(event).event_id for event in loading.load_events] for loading in one.loadings]
    done = it.session.event(one.done).event_id
    expected = []
    for turn, page in zip(turns, pages, strict=True):
        for layer in range(LAYERS):
            expected += [(layer, page, page + 1)] * pools + [numbers[turn][layer]]
        expected.append(done)
    assert shapes(it) == expected


@pytest.mark.parametrize("fault", ["fails_at", "skips", "interrupts_at"])
def test_a_known_load_back_that_goes_otherwise_is_lost_and_counted(machine, fault):
    it, one = machine()
    one.load()
    one.load()
    setattr(one.engine, fault, 2)
    if fault == "fails_at":
        with pytest.raises(RuntimeError, match="theirs"):
            one.load()
    else:
        one.load()
    setattr(one.engine, fault, None)
    assert it.session.local.submission is None
    page = one.load()
    records = it.records(Memcpy, Lost)
    lost = [record for record in records if isinstance(record, Lost)]
    assert {record.reason for record in lost} == {DropReason.RECORDER_ERROR}
    assert sum(record.count for record in lost) == 2 * LAYERS
    copies = [record for record in records if isinstance(record, Memcpy)]
    assert [record.layers[0] for record in copies[-LAYERS:]] == list(range(LAYERS))
    assert copies[-1].accesses[0].ids.tolist() == [page]
    events = [it.session.event(event) for event in one.loadings[0].load_events]
    assert all(event.stamp % 2 == 0 for event in events)


def test_what_another_thread_learns_of_a_known_layers_event_is_of_its_own_record(machine):
    it, one = machine()
    one.load()
    event = it.session.event(one.loadings[0].load_events[-1])
    stamps = [event.stamp]
    for _ in range(2):
        one.load()
        stamps.append(event.stamp)
    assert stamps == sorted(set(stamps))
    it.session.recorder.event_queried(event, stamps[1], True)  # asked before it was recorded anew
    assert event.known_to == {}
    it.session.recorder.event_queried(event, event.stamp, True)
    it.session.recorder.event_queried(event, event.stamp, True)  # known
    one.load()
    it.session.recorder.event_queried(event, event.stamp, True)
    assert len(it.records(EventQuery)) == 2


def test_events_of_two_sets_are_not_taken_for_known_together(machine):
    it, one = machine()
    one.load(0)
    one.load(1)
    mixed = type(one.loadings[0])()
    mixed.load_events = [*one.loadings[0].load_events[:2], *one.loadings[1].load_events[2:]]
    one.loadings.append(mixed)
    one.load(2)
    one.load(2)
    assert len(it.session.submissions) == 2
    assert len(it.records(Memcpy)) == 4 * LAYERS


def test_a_round_waits_for_layers_in_its_batch_whatever_the_way(server):
    """Waits, the second of each and one after a record in between: one segment and one wait per layer."""
    it = server()
    it.session.timed = False
    it.session._timing = None

    class Event:
        def wait(self, stream=None): ...

    class Stream:
        cuda_stream = 5

        def wait_event(self, event): ...

    rows = {row.target: row for row in stream_adapters("a.Stream", "a.Event")}
    it.hook(Stream, "wait_event", rows["a.Stream.wait_event"])
    it.hook(Event, "wait", rows["a.Event.wait"])
    events = [Event() for _ in range(LAYERS)]
    for layer, event in enumerate(events):
        it.session.event(event).layer = layer
    it.current = stream = Stream()

    def forward(runner, batch):
        for layer, event in enumerate(events):
            stream.wait_event(event)
            event.wait(stream)
            if layer == 1:
                it.session.recorder.thread_post(7)

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    it.call("ModelRunner.forward", it.runner, it.batch)
    found = it.records(Kernel, EventWait)
    assert [one.layers if isinstance(one, Kernel) else one.event for one in found] == [
        it.session.event(events[0]).event_id, (0, 1), it.session.event(events[1]).event_id,
        (1, 2), it.session.event(events[2]).event_id, (2, 3), it.session.event(events[3]).event_id,
        (3, 2**31 - 1), (0, 2**31 - 1),
    ]  # fmt: skip
