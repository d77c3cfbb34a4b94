"""Linkers that follow SGLang's interface or do not, on stand-ins. What is recorded of real ones: ``tests_sglang``."""

from __future__ import annotations

import contextlib
import threading
from types import SimpleNamespace

import pytest
import torch

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.findings import Hazard
from hicache_obs.readers.ring_header import set_mode
from hicache_obs.records import (
    ALL_LAYERS,
    CaptureMode,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Record,
    ThreadPost,
    ThreadRecv,
)
from hicache_obs.sglang.install import install
from hicache_obs.sglang.linkers import LINKER_ADAPTERS
from hicache_obs.sglang.resolve import Found
from hicache_obs.sglang.session import MAX_FAILURES
from hicache_obs.sglang.streams import stream_adapters

OFFLOADED = (Hazard.RAW_FORWARD_BACKUP, Hazard.WAR_BACKUP_FORWARD)
ALL = (Hazard.RDMA, *OFFLOADED)


class Counter:
    """What a load's layers are counted by."""

    num_layers, consumer_index = 3, 0

    def complete(self, index, layer): ...

    def fail(self, index, error): ...

    def wait_until(self, threshold): ...


class Linker:
    """A linker of the interface alone. Its thread's work is done by whoever calls ``work``, on that thread."""

    offload_owner = True

    def __init__(self, pool, event):
        self.pools = {"kv": SimpleNamespace(device_pool=pool)}
        self.layer_done_counter, self.event = Counter(), event
        self.events, self.index = [], 0

    def ready(self):
        made = self.event()
        made.record()
        return [made]

    def load(self, rid, transfers):
        return bool(transfers)

    def cancel_queued_load(self, rid):
        return True

    def start_layer_wise_loading(self):
        self.events = self.ready()
        return self.index

    def finish_layer_wise_loading(self, counter_index):
        return True

    def offload(self, transfers, session_id=None):
        self.events = self.ready()
        return bool(transfers)

    def pop_completed_offload(self):
        return True

    def reset(self): ...

    def wait(self):
        for event in self.events:
            event.synchronize()

    def work(self, *layers):
        self.wait()
        for layer in layers:
            self.layer_done_counter.complete(self.index, layer)


def elsewhere(work, *args):
    """Run it on a thread of its own, to the end."""
    thread = threading.Thread(target=work, args=args)
    thread.start()
    thread.join()


def transfer(first, **more):
    return SimpleNamespace(name="kv", host_indices=None, device_indices=torch.arange(first, first + 4), **more)


@pytest.fixture
def linked(server):
    """``linked(change)``: a server whose linker is attached, and hooks on its events and streams; ``it.linker``."""

    def make(change=lambda linker: None, **options):
        it = server(**options)
        it.session.timed, it.session._timing = False, None

        class Event:
            def record(self, stream=None): ...

            def synchronize(self): ...

            def query(self):
                return True

        class Stream(it.stream):
            def wait_stream(self, stream): ...

        for row in stream_adapters("e.Stream", "e.Event"):
            owner = {"Event": Event, "Stream": Stream}[row.target.split(".")[1]]
            if hasattr(owner, row.target.split(".")[2]):
                it.hook(owner, row.target.split(".")[2], row)
        it.current, it.forward = Stream(5), Stream(7)
        it.linker = Linker(it.pool, Event)
        change(it.linker)
        for _ in range(2):  # the second time it is known
            it.call("UnifiedRadixCache.init_cache_linker", None, it.linker)
        return it

    return make


def round_on(it, stream):
    """A forward round that writes page 1, launched on ``stream``."""
    schedule, it.current = it.current, stream
    it.call("ModelRunner.forward", it.runner, it.batch)
    it.current = schedule


def judged(it):
    tally = Tally()
    analyzer = Analyzer(tally)
    analyzer.feed(it.records(Record))
    analyzer.finish()
    assert analyzer.totals.lookups > 0
    sites = {(defect.example.earlier.site, defect.example.later.site) for defect in tally.defects.values()}
    return {defect.example.hazard.value for defect in tally.defects.values()}, sites


def kinds(it):
    """What was recorded of transfers, in order."""
    return [(type(one).__name__, getattr(one, "layers", None)) for one in it.records(IoBegin, IoEnd)]


@pytest.mark.parametrize("fenced", [False, True])
def test_a_load_races_with_the_round_in_flight_unless_its_event_is_behind_it(linked, fenced):
    it = linked()
    round_on(it, it.forward)
    if fenced:
        it.current.wait_stream(it.forward)
    assert it.linker.load("r", [transfer(4)]) is True
    assert it.linker.start_layer_wise_loading() == 0
    elsewhere(it.linker.work, 0, 1, 2)
    assert it.linker.finish_layer_wise_loading(0) is True
    assert not set(it.session.missing) & set(ALL)
    assert judged(it) == ((set(), set()) if fenced else ({"rdma"}, {("forward", "linker load")}))


@pytest.mark.parametrize("waited", [False, True])
def test_a_round_that_waits_for_no_layer_reads_what_a_load_still_writes(linked, waited):
    it = linked()
    it.linker.load("r", [transfer(8)])  # page 2, which the round reads
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.work, 0, 1, 2)
    if waited:
        for layer in range(3):
            it.linker.layer_done_counter.wait_until(layer)
    round_on(it, it.forward)
    assert judged(it) == ((set(), set()) if waited else ({"rdma"}, {("linker load", "forward")}))


@pytest.mark.parametrize("fenced", [False, True])
def test_an_offload_races_with_the_round_in_flight_unless_it_waits_for_it(linked, fenced):
    it = linked()
    round_on(it, it.forward)
    it.linker.ready = lambda: [made(it, stream) for stream in ((it.current, it.forward) if fenced else (it.current,))]
    assert it.linker.offload([transfer(4)], session_id="s") is True
    elsewhere(it.linker.wait)
    assert it.linker.pop_completed_offload() is True
    found = judged(it)
    assert found == ((set(), set()) if fenced else ({"raw_forward_backup"}, {("forward", "linker offload")}))


def made(it, stream):
    event = it.linker.event()
    event.record(stream)
    return event


@pytest.mark.parametrize("popped", [False, True])
def test_pages_are_the_next_owners_once_the_scheduler_has_the_offloads_result(linked, popped):
    it = linked()
    it.linker.offload([transfer(4)])
    elsewhere(it.linker.wait)
    if popped:
        it.linker.pop_completed_offload()
    round_on(it, it.forward)
    found = judged(it)
    assert found == ((set(), set()) if popped else ({"war_backup_forward"}, {("linker offload", "forward")}))


def test_layers_begin_one_after_the_other_and_all_of_a_batch_is_in_it(linked):
    it = linked()
    it.linker.load("a", [transfer(4)])
    it.linker.load("b", [transfer(8), transfer(12)])
    it.linker.load("c", [transfer(16)])
    assert it.linker.cancel_queued_load("c") is True
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.work, 0, 1, 2)
    it.linker.layer_done_counter.wait_until(1)
    it.linker.finish_layer_wise_loading(0)
    records = it.records(IoBegin, IoEnd, ThreadPost, ThreadRecv)
    begun = [one for one in records if isinstance(one, IoBegin)]
    assert [one.layers for one in begun] == [(0, 1), (1, 2), (2, 3)]
    assert {one.kind for one in begun} == {IoKind.RDMA_WRITE}
    assert [access.ids.tolist() for access in begun[0].accesses] == [[1], [2], [3]]
    assert [one.io for one in records if isinstance(one, IoEnd)] == [one.io for one in begun]
    posted = [one.channel for one in records if isinstance(one, ThreadPost)]
    received = [one.channel for one in records if isinstance(one, ThreadRecv)]
    assert received == [posted[1], posted[0], posted[2]]
    assert not it.session.links.loads


def test_a_load_may_be_over_before_the_call_that_starts_it(linked):
    """Its number is told then; that of one that is being started is not taken for an earlier one's."""
    it = linked()
    it.linker.load("a", [transfer(4)])
    it.linker.start_layer_wise_loading()
    first, begun, next_layer = it.linker.events, threading.Event(), threading.Event()

    def work():
        first[0].synchronize()
        begun.set()
        next_layer.wait()
        it.linker.layer_done_counter.complete(0, 0)

    earlier = threading.Thread(target=work)
    earlier.start()
    begun.wait()

    def ready():
        it.linker.events = [made(it, it.current)]
        elsewhere(it.linker.work, 0, 1, 2)
        next_layer.set()
        earlier.join()
        return it.linker.events

    it.linker.index, it.linker.ready = 1, ready
    it.linker.load("b", [transfer(8)])
    it.linker.start_layer_wise_loading()
    assert kinds(it) == [
        ("IoBegin", (0, 1)), *[("IoBegin", (at, at + 1)) if begin else ("IoEnd", None)
                               for at in range(3) for begin in (1, 0)],
        ("IoEnd", None), ("IoBegin", (1, 2)),
    ]  # fmt: skip
    assert not set(it.session.missing) & set(ALL)


def test_slots_are_those_that_the_call_has_translated_for_the_pools(linked):
    class Group:
        def resolve_transfers(self, transfers, allow_partial=False):
            return [SimpleNamespace(name="kv", host_indices=torch.arange(8, 12), device_indices=None)]

    def change(linker):
        linker.pool_group = group = Group()
        linker.load = lambda rid, transfers: bool(group.resolve_transfers(transfers, allow_partial=True))

    it = linked(change)
    it.linker.pool_group.resolve_transfers([])  # a look-up's
    it.linker.load("r", [transfer(4)])
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.work)
    (begun,) = it.records(IoBegin)
    assert [access.ids.tolist() for access in begun.accesses] == [[2]]


def test_slots_are_read_on_their_own_device(linked, monkeypatch):
    """A thread begins with device 0, whichever its rank has: a stream or event there would make a context on it."""
    it, log = linked(), []

    @contextlib.contextmanager
    def device_of(tensor):
        log.append(("device of", tensor[0].item()))
        yield
        log.append("and back")

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    read = it.session.access
    monkeypatch.setattr(it.session, "access", lambda *args: log.append("read") or read(*args))
    it.linker.offload([transfer(4), transfer(8)])
    elsewhere(it.linker.wait)
    assert log == [("device of", 4), "read", "and back", ("device of", 8), "read", "and back"]


def test_events_of_a_queued_load_gate_its_batch(linked):
    """A linker may record one for each load, and none at the start. Waiting for some of them begins nothing."""

    def change(linker):
        linker.load = lambda rid, transfers: linker.events.extend(linker.ready()) or True
        linker.start_layer_wise_loading = lambda: 0

    it = linked(change)
    for rid, first in (("a", 4), ("b", 8)):
        it.linker.load(rid, [transfer(first)])
    first, second = it.linker.events
    elsewhere(first.synchronize)
    it.linker.start_layer_wise_loading()
    begun = it.session.links.loads[0].thread
    elsewhere(second.query)
    assert begun is None
    (record,) = it.records(IoBegin)
    assert [access.ids.tolist() for access in record.accesses] == [[1], [2]]


def test_a_load_that_fails_ends_with_the_layer_it_was_at_and_whoever_waits_is_told(linked):
    it = linked()
    it.linker.load("r", [transfer(4)])
    it.linker.start_layer_wise_loading()

    def work():
        it.linker.work(0)
        for _ in range(2):
            it.linker.layer_done_counter.fail(0, RuntimeError("theirs"))

    elsewhere(work)
    for layer in (0, 1, 2):
        it.linker.layer_done_counter.wait_until(layer)
    records = it.records(IoBegin, IoEnd, ThreadPost, ThreadRecv)
    assert [one.layers for one in records if isinstance(one, IoBegin)] == [(0, 1), (1, 2)]
    assert sum(isinstance(one, IoEnd) for one in records) == 2
    posted = [one.channel for one in records if isinstance(one, ThreadPost)]
    assert len(posted) == 3
    assert [one.channel for one in records if isinstance(one, ThreadRecv)] == posted


def test_results_of_offloads_come_in_their_order_whether_they_were_recorded_or_not(linked):
    it = linked()
    it.linker.offload([])  # refused: it has no result
    it.linker.offload_owner = False
    it.linker.ready = list
    it.linker.offload([transfer(4)])  # another rank stores it
    it.linker.offload_owner = True
    del it.linker.ready
    set_mode(it.session.ring.path, CaptureMode.OFF)
    it.linker.offload([transfer(4)])
    set_mode(it.session.ring.path, CaptureMode.OBSERVE)
    for first in (8, 12):
        it.linker.offload([transfer(first)])
        elsewhere(it.linker.wait)
    for _ in range(3):
        it.linker.pop_completed_offload()
    records = it.records(IoBegin, IoEnd)
    assert [type(one) for one in records] == [IoBegin, IoBegin, IoEnd]
    assert {one.kind for one in records[:2]} == {IoKind.DEVICE_READ}
    assert {one.layers for one in records[:2]} == {ALL_LAYERS}
    assert records[2].io == records[0].io
    assert not set(it.session.missing) & set(ALL)


def test_a_load_that_was_started_unseen_is_not_taken_for_the_next_one(linked):
    it = linked()
    it.linker.load("a", [transfer(4)])
    set_mode(it.session.ring.path, CaptureMode.OFF)
    it.linker.start_layer_wise_loading()
    set_mode(it.session.ring.path, CaptureMode.OBSERVE)
    it.linker.load("b", [transfer(8)])
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.work)
    (begun,) = it.records(IoBegin)
    assert [access.ids.tolist() for access in begun.accesses] == [[2]]


def test_a_reset_ends_what_is_under_way(linked):
    it = linked()
    it.linker.offload([transfer(4)])
    elsewhere(it.linker.wait)
    it.linker.load("a", [transfer(8)])
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.work)
    it.linker.load("b", [transfer(12)])
    it.linker.reset()
    it.linker.start_layer_wise_loading()  # nothing is queued any more
    elsewhere(it.linker.work)
    assert kinds(it) == [("IoBegin", ALL_LAYERS), ("IoBegin", (0, 1)), ("IoEnd", None), ("IoEnd", None)]


def test_requests_name_the_batch_that_is_over_where_numbers_do_not(linked):
    it = linked(lambda linker: setattr(linker, "pop_completed_load", lambda: ["a", "b"]))
    for rid in "ab":
        it.linker.load(rid, [transfer(4)])
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.work, 0, 1, 2)
    assert it.linker.pop_completed_load() == ["a", "b"]
    records = it.records(ThreadPost, ThreadRecv)
    assert [type(one) for one in records] == [ThreadPost] * 3 + [ThreadRecv] * 3


def test_a_hosts_wait_for_a_layer_ends_a_segment_of_the_round(linked):
    it = linked()
    for layer in (0, 1):
        it.linker.layer_done_counter.complete(0, layer)

    def forward(runner, batch):
        for layer in (0, 1, 1):
            it.linker.layer_done_counter.wait_until(layer)

    it.call("ModelRunner.forward", it.runner, it.batch, original=forward)
    found = it.records(Kernel, ThreadRecv)
    assert [one.layers if isinstance(one, Kernel) else "received" for one in found] == [
        "received", (0, 1), "received", (1, 2**31 - 1),
    ]  # fmt: skip


def lose(owner, name):
    return lambda linker: setattr(linker if owner is None else getattr(linker, owner), name, None)


@pytest.mark.parametrize(
    ("change", "hazards", "reason"),
    [
        (lose(None, "pools"), ALL, "Linker keeps its pools in a way that is not known here"),
        (
            lambda linker: setattr(linker, "pools", {"kv": object()}),
            ALL,
            "Linker keeps its pools in a way that is not known here",
        ),
        (lose(None, "layer_done_counter"), ALL[:1], "Linker has no complete and no fail and no wait_until"),
        (lose("layer_done_counter", "complete"), ALL[:1], "Linker has no complete"),
        (lose(None, "start_layer_wise_loading"), ALL[:1], "Linker has no start_layer_wise_loading"),
        (lose(None, "pop_completed_offload"), OFFLOADED, "Linker has no pop_completed_offload"),
        (
            lambda linker: setattr(linker, "mla_broadcaster", object()),
            ALL[:1],
            "Linker hands pages to other ranks by NCCL, which is not seen",
        ),
    ],
)
def test_what_a_linker_lacks_is_not_observable(linked, change, hazards, reason):
    it = linked(change)
    assert it.session.missing == dict.fromkeys(hazards, reason)


def test_a_linker_that_takes_no_attributes_is_not_observable(server):
    it = server()
    slotted = type("Slotted", (), {"__slots__": (), "pools": {}, "layer_done_counter": Counter()})()
    it.call("UnifiedRadixCache.init_cache_linker", None, slotted)
    assert it.session.missing == dict.fromkeys(ALL, "Slotted takes no hooks: it has slots")
    assert it.session.counters.errors == {}


def test_a_thread_that_waits_for_nothing_makes_its_transfers_not_observable(linked):
    it = linked()
    it.linker.load("r", [transfer(4)])
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.layer_done_counter.complete, 0, 0)
    assert it.session.missing == {Hazard.RDMA: "Linker writes pages without a wait of the host for events of its load"}
    it.linker.offload([transfer(4)])
    it.linker.pop_completed_offload()
    assert {it.session.missing[hazard] for hazard in OFFLOADED} == {
        "Linker reads pages without a wait of the host for events of its offload"
    }
    assert kinds(it) == []


def test_a_call_that_waits_for_its_own_event_begins_nothing(linked):
    """It copies indices to the host, say, and hands the transfer on afterwards."""
    it = linked()
    early = it.linker.ready

    def ready():
        early()[0].synchronize()
        return early()

    it.linker.ready = ready
    it.linker.offload([transfer(4)])
    number = len(it.session.links.waiting)
    elsewhere(it.linker.wait)
    it.linker.pop_completed_offload()
    assert number == 1
    begun, _ = it.records(IoBegin, IoEnd)
    assert begun.thread != 0


def test_layers_that_another_thread_completes_are_not_observable(linked):
    it = linked()
    it.linker.load("r", [transfer(4)])
    it.linker.start_layer_wise_loading()
    elsewhere(it.linker.work)
    it.linker.layer_done_counter.complete(0, 0)
    assert it.session.missing == {
        Hazard.RDMA: "Linker completes layers on other threads than the one that waits for its load's events"
    }
    assert kinds(it) == [("IoBegin", (0, 1)), ("IoEnd", None)]


def test_a_transfer_to_a_pool_that_is_not_there_is_counted_and_changes_nothing(linked):
    it = linked()
    unknown = transfer(4)
    unknown.name = "other"
    for _ in range(MAX_FAILURES):
        it.linker.offload([unknown])
        elsewhere(it.linker.wait)
        it.session.failures = 0  # other hooks work meanwhile
        assert it.linker.pop_completed_offload() is True
    assert it.session.counters.errors == {"Linker's transfers": MAX_FAILURES}
    assert set(it.session.missing) == set(ALL)


@pytest.mark.parametrize(
    ("name", "args"),
    [("load", ("r", [transfer(4)])), ("start_layer_wise_loading", ()), ("offload", ([transfer(4)],))],
)
def test_a_linkers_own_exceptions_go_through_and_leave_nothing_behind(linked, name, args):
    it = linked(lambda linker: name == "load" and setattr(linker, name, lambda rid, transfers: linker.ready()))
    if name != "load":
        it.linker.load("r", [transfer(4)])
    it.linker.ready = lambda: 1 // 0
    with pytest.raises(ZeroDivisionError):
        getattr(it.linker, name)(*args)
    assert it.session.local.gated is None
    assert not it.session.links.loads
    assert not it.session.links.offloads
    assert it.session.counters.errors == {}


def test_a_start_that_resets_its_linker_and_gives_up_raises_what_the_linker_does(linked):
    it = linked()
    it.linker.load("r", [transfer(4)])
    it.linker.ready = lambda: it.linker.reset() or 1 // 0
    with pytest.raises(ZeroDivisionError):
        it.linker.start_layer_wise_loading()
    assert (it.session.local.gated, it.session.counters.errors) == (None, {})


def test_a_start_that_cannot_be_recorded_goes_through(linked, monkeypatch):
    it = linked()
    it.linker.load("r", [transfer(4)])
    monkeypatch.setattr(it.session.links, "start", lambda queued: 1 // 0)
    assert it.linker.start_layer_wise_loading() == it.linker.index
    assert list(it.session.counters.errors.values()) == [1]


@pytest.mark.parametrize(
    ("module", "attributes", "reason"),
    [
        ("sglang.srt.mem_cache.unified_radix_cache", {}, None),
        ("sglang.srt.mem_cache.unified_radix_cache", {"linker": None}, None),
        ("sglang.srt.mem_cache.unified_radix_cache", {"linker": 1}, "a linker was attached where no hook is"),
        ("sglang.srt.mem_cache.storage.lmcache.lmc_radix_cache", {}, "Tree moves pages in ways of its own"),
        ("sglangish.tree", {}, "Tree moves pages in ways of its own"),
    ],
)
def test_a_tree_that_moves_pages_itself_is_named(server, module, attributes, reason):
    it = server()
    tree = type("Tree", (), {"__module__": module, **attributes})()
    assert it.call("registry.create_tree_cache", None, original=lambda ctx: tree) is tree
    assert set(it.session.missing.values()) == ({reason} if reason else set())
    assert (Hazard.RDMA in it.session.missing) is (reason is not None)


def test_the_interface_is_looked_up_and_never_hooked_on_the_class(server):
    it = server()
    registered = []
    installed = install(it.session, LINKER_ADAPTERS, (0, 5, 23), lambda target, hook: registered.append(target))
    assert registered == []
    assert set(installed.missing.values()) == {Found.MISSING}  # there is no SGLang here
    assert "sglang.srt.mem_cache.unified_cache.unified_cache_linker.UnifiedCacheLinker.offload" in installed.missing
    assert set(it.session.missing) == {Hazard.RDMA}  # of the place where linkers are attached
