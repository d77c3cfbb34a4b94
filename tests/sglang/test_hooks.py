"""What the hooks on rounds and copies put into the ring: on stand-ins of SGLang objects, with their own clock."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import pytest
import torch

from hicache_obs.findings import Hazard
from hicache_obs.readers import open_trace
from hicache_obs.records import (
    ALL_LAYERS,
    CaptureMode,
    Direction,
    EventRecord,
    EventWait,
    GraphNode,
    GraphReplay,
    HostSync,
    Kernel,
    Memcpy,
    PageAlloc,
    PageFree,
    Purpose,
    Times,
    WaitStream,
)
from hicache_obs.sglang import forwards, pages, streams
from hicache_obs.sglang.guard import around
from hicache_obs.sglang.session import IN_STREAM_CALL
from hicache_obs.sglang.table import SGLANG_ADAPTERS
from hicache_obs.sglang.tensors import TENSOR_ADAPTERS


def test_a_round_writes_its_slots_and_reads_its_requests_pages(server):
    it = server()
    it.call("ModelRunner.forward", it.runner, it.batch)
    kernel, times = it.records(Kernel, Times)
    assert [(access.mode.name, access.ids.tolist()) for access in kernel.accesses] == [("WRITE", [1]), ("READ", [1, 2])]
    assert (kernel.stream, kernel.layers) == (5, ALL_LAYERS)
    assert (times.op, times.start_ns, times.end_ns, times.error_ns) == (kernel.op, 100, 200, 3)
    assert it.log == [("begin", 5), ("end", 5)]


def test_a_layer_wait_ends_a_segment_and_starts_another_measurement(server):
    it = server()
    it.session.local.round_group = 16  # one round in sixteen is measured by segments
    events, wait, _ = layer_events(it)

    def forward(runner, batch):
        for layer in (0, 0, 2):
            wait(lambda *args: None, it.current, events[layer])

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    records = it.records(Kernel, EventWait)
    assert [type(record) for record in records] == [EventWait, Kernel, EventWait, Kernel]
    assert [record.layers for record in records if isinstance(record, Kernel)] == [(0, 2), (2, ALL_LAYERS[1])]
    assert len({record.group for record in records if isinstance(record, Kernel)}) == 1
    assert it.log == [("begin", 5), ("end", 5)] * 2


def layer_events(it):
    """The layer events of a controller that has started a load-back, and the hooks on a wait and on a record."""
    events = [SimpleNamespace() for _ in range(3)]
    counter = SimpleNamespace(events=[SimpleNamespace(load_events=events)])
    engine = SimpleNamespace(host_to_device_stream=it.stream(9))
    it.call(
        "HiCacheController.start_loading",
        SimpleNamespace(load_queue=[1], l2_transfer_engine=engine, load_fence_stream=1, layer_done_counter=counter),
    )
    rows = {row.target: row for row in streams.stream_adapters("a.Stream", "a.Event")}
    return events, around(it.session, rows["a.Stream.wait_event"]), around(it.session, rows["a.Event.record"])


def test_waits_of_other_rounds_are_batched_and_keep_the_order_of_the_calls(server):
    it = server()
    it.session.local.round_group = 17
    events, wait, record = layer_events(it)

    def forward(runner, batch):
        wait(lambda *args: None, it.current, events[1])
        record(lambda *args: None, SimpleNamespace())
        wait(lambda *args: None, it.current, events[1])
        wait(lambda *args: None, it.current, events[2])

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    records = it.records(Kernel, EventWait, EventRecord)
    assert [type(one) for one in records] == [Kernel, EventWait, EventRecord, Kernel, EventWait, Kernel]
    assert [one.layers for one in records if isinstance(one, Kernel)] == [(0, 1), (1, 2), (2, ALL_LAYERS[1])]
    assert [one.purpose for one in records if isinstance(one, EventWait)] == [Purpose.LAYER] * 2
    assert it.log == [("begin", 5), ("end", 5)]  # up to the first wait


def test_a_layers_event_is_recorded_behind_its_copy(server):
    it = server()
    events, _, record = layer_events(it)
    host = SimpleNamespace(page_size=4, layer_num=3, size_per_token=24)
    there, here = torch.arange(4, 12), torch.arange(8, 16)
    it.session.local.transfer = 15
    for layer in range(3):
        it.call("load_to_device_per_layer_physical", host, it.pool, there, here, layer, "direct")
        record(lambda *args: None, events[layer])
        assert it.session.event(events[layer]).version == 1  # for whoever asks on another thread
    record(lambda *args: None, SimpleNamespace())
    assert [it.session.event(event).version for event in events] == [2, 2, 2]
    records = it.records(Memcpy, EventRecord)
    assert [type(one) for one in records] == [Memcpy, EventRecord] * 3 + [EventRecord]
    assert [one.op for one in records] == sorted(one.op for one in records)
    assert [one.event for one in records[1:6:2]] == [it.session.event(event).event_id for event in events]
    assert {(one.group, one.size_bytes, one.layers[1] - one.layers[0]) for one in records[:6:2]} == {(15, 64, 1)}
    assert [access.ids.tolist() for access in records[4].accesses] == [[1, 2], [2, 3]]


class Restore:
    """A host pool and the layer events of a controller, of classes of their own, with hooks on them."""

    def __init__(self, it, layers=3, outer=None):
        self.it, self.calls = it, calls = it, []

        class Pool:
            page_size, layer_num, size_per_token = 4, layers, 24

            def load_to_device_per_layer_physical(self, *args, **kwargs):
                calls.append(("copy", args[3], kwargs))
                if kwargs.get("fails"):
                    raise RuntimeError("theirs")

        class Event:
            def record(self, stream=None):
                calls.append(("record", stream))

        rows = {row.target: row for row in streams.stream_adapters("a.Stream", "a.Event")}
        load = next(row for row in SGLANG_ADAPTERS if row.target.endswith("load_to_device_per_layer_physical"))
        it.hook(Pool, "load_to_device_per_layer_physical", load)
        it.hook(Event, "record", rows["a.Event.record"])
        if outer is not None:  # somebody else's hooks, around ours
            Pool.load_to_device_per_layer_physical = outer(Pool.load_to_device_per_layer_physical)
            Event.record = outer(Event.record)
        self.pool, self.events, self.other = Pool(), [Event() for _ in range(layers)], Event()
        self.there, self.here = torch.arange(4, 12), torch.arange(8, 16)
        for layer, event in enumerate(self.events):
            it.session.event(event).layer = layer
        it.session.local.transfer = 15

    def layer(self, layer, **options):
        self.pool.load_to_device_per_layer_physical(self.it.pool, self.there, self.here, layer, "direct", **options)

    def load(self, layers):
        for layer in layers:
            self.layer(layer, is_draft=False)
            self.events[layer].record()


def test_layers_after_the_first_go_by_a_shorter_way_with_the_same_records(server):
    it = server()
    restore = Restore(it)
    for transfer in (15, 17):
        it.session.local.transfer = transfer
        restore.load(range(3))
        assert it.session.event(restore.events[2]).version % 2 == 1  # for whoever asks on another thread
        restore.other.record()
    assert "load_to_device_per_layer_physical" in vars(restore.pool)
    assert all("record" in vars(event) for event in restore.events)
    assert "record" not in vars(restore.other)
    one = [(("copy", layer, {"is_draft": False}), ("record", None)) for layer in range(3)]
    assert restore.calls == 2 * [*(call for layer in one for call in layer), ("record", None)]
    assert it.session.counters.calls == 2 * 7
    records = it.records(Memcpy, EventRecord)
    assert [type(one) for one in records] == 2 * ([Memcpy, EventRecord] * 3 + [EventRecord])
    assert [one.group for one in records if isinstance(one, Memcpy)] == [15] * 3 + [17] * 3
    assert [one.layers for one in records if isinstance(one, Memcpy)] == 2 * [(0, 1), (1, 2), (2, 3)]
    numbers = [it.session.event(event).event_id for event in (*restore.events, restore.other)]
    assert [one.event for one in records if isinstance(one, EventRecord)] == 2 * numbers


def test_what_comes_between_the_layers_keeps_its_place(server):
    it = server()
    restore = Restore(it)
    restore.load([0])
    restore.other.record()
    restore.load([1])
    restore.events[0].record(it.current)  # not the end of this copy: its stream is named
    restore.here = restore.here.clone()
    restore.load([2])
    records = it.records(Memcpy, EventRecord)
    assert [one.layers[0] if isinstance(one, Memcpy) else one.event for one in records] == [
        0, it.session.event(restore.events[0]).event_id, it.session.event(restore.other).event_id,
        1, it.session.event(restore.events[1]).event_id, it.session.event(restore.events[0]).event_id,
        2, it.session.event(restore.events[2]).event_id,
    ]  # fmt: skip


def test_layers_of_other_pages_or_of_another_transfer_are_told_apart(server):
    it = server()
    restore = Restore(it)
    restore.layer(0)
    restore.here = torch.arange(16, 24)
    restore.layer(1)
    restore.there = torch.arange(12, 20)
    restore.layer(1)
    it.session.local.transfer = 17
    restore.layer(1)
    assert [
        (one.layers[0], one.group, *(access.ids.tolist() for access in one.accesses)) for one in it.records(Memcpy)
    ] == [
        (0, 15, [1, 2], [2, 3]),
        (1, 15, [1, 2], [4, 5]),
        (1, 15, [3, 4], [4, 5]),
        (1, 17, [3, 4], [4, 5]),
    ]


def test_pools_that_take_turns_keep_their_own_pages(server):
    it = server()
    one, other = Restore(it), Restore(it)
    other.here = torch.arange(16, 24)
    for layer in range(3):
        one.layer(layer)
        other.layer(layer)
        one.events[layer].record()
    records = it.records(Memcpy, EventRecord)
    assert [type(record) for record in records] == [Memcpy, Memcpy, EventRecord] * 3
    copies = [record for record in records if isinstance(record, Memcpy)]
    assert [(copy.layers[0], *(access.pool for access in copy.accesses)) for copy in copies] == [
        (layer, pool, 0) for layer in range(3) for pool in range(2)
    ]
    assert [copy.accesses[1].ids.tolist() for copy in copies] == [[2, 3], [4, 5]] * 3


def test_a_restore_that_dies_is_in_the_ring_with_the_next_record(server):
    it = server()
    restore = Restore(it)
    restore.load(range(2))
    with pytest.raises(RuntimeError, match="theirs"):
        restore.layer(2, fails=True)
    assert not it.session.local.in_copy
    restore.other.record()
    records = it.records(Memcpy, EventRecord)
    assert [type(one) for one in records] == [Memcpy, EventRecord] * 2 + [Memcpy, EventRecord]


@pytest.mark.parametrize("layer", [600, torch.tensor(1)])
def test_a_layer_that_is_no_small_number_is_recorded_all_the_same(server, layer):
    it = server()
    restore = Restore(it)
    restore.layer(0)
    restore.layer(layer)
    assert [one.layers for one in it.records(Memcpy)] == [(0, 1), (int(layer), int(layer) + 1)]


def test_the_shorter_way_is_not_taken_past_somebody_elses_hook(server):
    it = server()
    seen = []

    def outer(hooked):
        @functools.wraps(hooked)
        def wrapper(*args, **kwargs):
            seen.append(hooked.__name__)
            return hooked(*args, **kwargs)

        return wrapper

    restore = Restore(it, outer=outer)
    restore.load(range(3))
    assert seen == ["load_to_device_per_layer_physical", "record"] * 3
    assert len(it.records(Memcpy, EventRecord)) == 6


def test_the_shorter_way_grows_nothing_once_capture_has_ended(server):
    it = server()
    restore = Restore(it)
    restore.load(range(2))
    batch = it.session.local.batch
    it.session.ready, it.session._off = False, True  # as another thread leaves it
    restore.load([2, 0, 1])
    assert len(batch.steps) == 4
    assert len(restore.calls) == 10


def test_a_round_hook_that_fails_is_counted_and_the_round_runs_once(server, monkeypatch):
    it = server()
    runs = []

    def fails(*args, **kwargs):
        raise ZeroDivisionError

    for name in ("_before_forward", "_after_forward"):
        with monkeypatch.context() as patch:
            patch.setattr(forwards, name, fails)
            result = it.call("ModelRunner.forward", it.runner, it.batch, original=lambda *args: runs.append(args) or 3)
        assert result == 3
    assert len(runs) == 2
    assert it.session.counters.errors == {"sglang.srt.model_executor.model_runner.ModelRunner.forward": 2}


def test_a_round_that_raises_was_launched_and_is_over(server):
    it = server()
    with pytest.raises(RuntimeError, match="theirs"):
        it.call("ModelRunner.forward", it.runner, it.batch, original=fails)
    assert it.session.local.round is None
    assert len(it.records(Kernel)) == 1


def test_a_wait_for_a_layer_that_raises_is_called_once(server):
    it = server()
    it.session.local.round_group = 17
    events, wait, _ = layer_events(it)
    calls = []

    def raises(*args):
        calls.append(args)
        raise AttributeError("theirs")

    def forward(runner, batch):
        wait(lambda *args: None, it.current, events[0])
        with pytest.raises(AttributeError, match="theirs"):
            wait(raises, it.current, events[1])
        wait(lambda *args: None, it.current, SimpleNamespace())  # not a layer's: the order of the calls is kept
        wait(lambda *args, **named: None, it.current, event=events[2])

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    assert len(calls) == 1
    assert not it.session.local.in_stream_call
    assert [one.purpose for one in it.records(EventWait)] == [Purpose.LAYER] * 2 + [Purpose.PLAIN, Purpose.LAYER]


def test_an_event_recorded_inside_a_round_does_not_cover_it(server):
    it = server()
    record = next(row for row in streams.stream_adapters("a.Stream", "a.Event") if row.target == "a.Event.record")

    class Event:
        pass

    def forward(runner, batch):
        around(it.session, record)(lambda event: None, Event())

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    inside, kernel = it.records(EventRecord, Kernel)
    assert (type(inside), type(kernel)) == (EventRecord, Kernel)


def test_the_current_stream_may_be_asked_for_by_its_handle_alone(server):
    handle = [None, 77, 77]
    it = server(current_handle=lambda: handle.pop(0))
    row = next(row for row in streams.stream_adapters("a.Stream", "a.Event") if row.target == "a.Event.record")
    for _ in range(2):  # at first torch cannot tell yet
        around(it.session, row)(lambda event: None, SimpleNamespace())
    it.current = it.stream(77)
    it.session.stream(it.current, "forward")
    around(it.session, row)(lambda event: None, SimpleNamespace())
    assert [one.stream for one in it.records(EventRecord)] == [5, 77, 77]
    assert open_trace(it.session.ring.path).names.streams == {5: "stream 0x5", 77: "forward"}


def test_a_graph_replay_has_its_own_event_before_its_accesses(server):
    it = server()

    class Event:
        pass

    graphs = SimpleNamespace(in_graph_metadata_prep_done=Event(), model_runner=it.runner, _replay_graph_key=8)
    it.runner.shared_read_done_event = graphs.in_graph_metadata_prep_done

    def forward(runner, batch):
        it.call("DecodeCudaGraphRunner.execute", graphs, batch)

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    replay, first, second = it.records(GraphReplay, GraphNode)
    assert (replay.nodes, replay.accesses) == (2, ())
    assert first.event is not None
    assert (second.event, len(second.accesses)) == (None, 2)


def fails(*args, **kwargs):
    raise RuntimeError("theirs")


def test_sliding_window_pages_are_found_through_the_table_of_slots(server):
    it = server()
    window = SimpleNamespace(page_size=4, layer_num=2)
    table = torch.zeros(100, dtype=torch.int64)
    table[4:8] = torch.arange(12, 16)  # page 1 is the window pool's page 3; page 2 has left the window
    full = it.pool
    it.runner.token_to_kv_pool = SimpleNamespace(full_kv_pool=full, swa_kv_pool=window, full_to_swa_index_mapping=table)
    it.call("ModelRunner.forward", it.runner, it.batch)
    (kernel,) = it.records(Kernel)
    assert [(one.pool, one.mode.name, one.ids.tolist()) for one in kernel.accesses] == [
        (0, "WRITE", [1]),
        (0, "READ", [1, 2]),
        (1, "WRITE", [3]),
        (1, "READ", [3]),
    ]


def test_mamba_states_are_written_by_every_round_of_their_requests(server):
    it = server()
    requests = it.runner.req_to_token_pool
    requests.mamba_pool = SimpleNamespace(num_layers=2)
    requests.req_index_to_mamba_index_mapping = torch.tensor([0, 6], dtype=torch.int32)
    it.call("ModelRunner.forward", it.runner, it.batch)
    (kernel,) = it.records(Kernel)
    assert [(one.pool, one.mode.name, one.ids.tolist()) for one in kernel.accesses][2:] == [(1, "WRITE", [6])]


def test_a_round_that_reads_too_much_says_that_reads_are_out_of_sight(server, monkeypatch):
    monkeypatch.setenv("HICACHE_OBS_READ_IDS", "1")
    it = server()
    it.call("ModelRunner.forward", it.runner, it.batch)
    assert it.session.missing[Hazard.WAR_FORWARD_RESTORE] == "a round reads more than HICACHE_OBS_READ_IDS=1 pages"
    (kernel,) = it.records(Kernel)
    assert len(kernel.accesses) == 1


def test_the_copies_of_a_transfer_share_their_pages_and_one_in_sixteen_transfers_is_timed(server):
    it = server()
    host = SimpleNamespace(page_size=4, layer_num=3, size_per_token=24)
    there, here = torch.arange(4, 12), torch.arange(8, 16)
    for transfer in (15, 16):
        it.session.local.transfer = transfer
        for layer in range(3):
            it.call("load_to_device_per_layer_physical", host, it.pool, there, here, layer, "direct")
    copies = it.records(Memcpy)
    assert [copy.layers for copy in copies] == [(0, 1), (1, 2), (2, 3)] * 2
    assert all(copy.direction is Direction.HOST_TO_DEVICE and copy.size_bytes == 8 * 24 // 3 for copy in copies)
    assert [access.ids.tolist() for access in copies[0].accesses] == [[1, 2], [2, 3]]
    assert copies[0].accesses[0].ids is copies[1].accesses[0].ids
    assert it.log == [("begin", 5), ("end", 5)] * 3


@pytest.mark.parametrize(("size_per_token", "right"), [(3 * 100, True), (3 * 1_000_000, False)])
def test_a_copy_that_is_faster_than_any_link_ran_on_another_stream(server, size_per_token, right):
    it = server()  # whose event pairs are 100 ns apart
    host = SimpleNamespace(page_size=4, layer_num=3, size_per_token=size_per_token)
    it.session.local.transfer = 16
    it.call("load_to_device_per_layer_physical", host, it.pool, torch.arange(4, 12), torch.arange(8, 16), 0, "direct")
    (copy,) = it.records(Memcpy)
    assert copy.size_bytes == 8 * size_per_token // 3
    assert (it.session.copies.confirmed, it.session.copies.impossible) == ((1, 0) if right else (0, 1))
    status = open_trace(it.session.ring.path).names.status
    assert status["copies confirmed on their stream" if right else "copies not on their stream"] == 1
    assert (Hazard.WAW_FORWARD_RESTORE in it.session.missing) is not right


def test_enforce_issues_a_load_fence_once_there_is_a_round_and_only_where_none_is(server):

    it = server(mode=CaptureMode.ENFORCE)
    load = it.stream(9)
    controller = SimpleNamespace(
        load_queue=[1], l2_transfer_engine=SimpleNamespace(host_to_device_stream=load), load_fence_stream=None
    )
    it.call("HiCacheController.start_loading", controller)
    assert it.session.counters.fences_added == {}
    it.call("ModelRunner.forward", it.runner, it.batch)
    it.call("HiCacheController.start_loading", controller)
    assert load.waited_for is it.current
    assert it.session.counters.fences_added == {"load": 1}
    controller.load_fence_stream = it.current
    it.call("HiCacheController.start_loading", controller)
    assert it.session.counters.fences_added == {"load": 1}


def test_a_fence_is_told_from_other_waits_and_is_timed(server):
    it = server()
    waits = {row.target: row for row in streams.stream_adapters("a.Stream", "a.Event")}

    def start(controller):
        around(it.session, waits["a.Stream.wait_stream"])(lambda *args: None, it.stream(9), it.current)
        around(it.session, waits["a.Event.wait"])(lambda *args: None, SimpleNamespace(), it.stream(9))

    controller = SimpleNamespace(
        load_queue=[1], l2_transfer_engine=SimpleNamespace(host_to_device_stream=it.stream(9)), load_fence_stream=1
    )
    it.call("HiCacheController.start_loading", controller, original=start)
    around(it.session, waits["a.Stream.wait_stream"])(lambda *args: None, it.stream(9), it.current)
    records = it.records(WaitStream, EventWait)
    assert [record.purpose for record in records] == [Purpose.LOAD_FENCE, Purpose.START, Purpose.PLAIN]
    assert it.log == [("begin", 9), ("end", 9)]


def test_pages_are_new_with_their_first_slot_and_free_when_the_group_ends(server):
    it = server()
    allocator = SimpleNamespace(page_size=4, free_group=None, get_kvcache=lambda: it.pool)
    name = "PagedTokenToKVPoolAllocator"
    it.call(f"{name}.alloc_extend", allocator, original=lambda *args: torch.tensor([6, 7, 8, 9]))
    it.call(f"{name}._release_page_ids", allocator, torch.tensor([2]), torch.tensor([3]))
    token = SimpleNamespace(page_size=4, free_group=[], get_kvcache=lambda: it.pool)
    it.call(".TokenToKVPoolAllocator.free", token, torch.tensor([12]))
    allocated, *freed = it.records(PageAlloc, PageFree)
    assert allocated.access.ids.tolist() == [2]
    assert [record.access.ids.tolist() for record in freed] == [[2], [3]]
    assert pages.page_size(SimpleNamespace(page_size=None)) == 1


def test_tensor_syncs_are_those_of_device_tensors(server):
    it = server()
    item = next(row for row in TENSOR_ADAPTERS if row.target.endswith("item"))
    around(it.session, item)(lambda tensor: 1, torch.tensor(3))
    around(it.session, item)(lambda tensor: 1, SimpleNamespace(device=SimpleNamespace(type="cuda")))
    (sync,) = it.records(HostSync)
    assert sync.stream == 5


def test_our_own_stream_calls_are_quiet(server):
    it = server()
    row = next(row for row in streams.stream_adapters("a.Stream", "a.Event") if row.target == "a.Stream.wait_stream")
    with it.session.quietly():
        assert getattr(it.session.local, IN_STREAM_CALL)
        around(it.session, row)(lambda *args: None, it.stream(1), it.stream(2))
    assert it.records(WaitStream) == []
