"""The cache controller: queues, merging, pins, fences, acknowledgements, and load-backs that must be refused."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_obs.controller.cache_controller import CacheController, CacheOperation, SubmittedTransfer, merge_ops
from hicache_obs.errors import ControllerError, PagePinned
from hicache_obs.records import Direction, Memcpy, page_ids

LOAD_CALLS = [
    "default: index move",
    "default: record",
    "load-back: wait for forward (load_fence)",
    "load-back: wait event (start)",
    "load-back: load-back copy 0",
    "load-back: record",
    "load-back: load-back copy 1",
    "load-back: record",
    "load-back: load-back copy 2",
    "load-back: record",
    "load-back: record",
]
WRITE_CALLS = [
    "default: index move",
    "default: record",
    "write-back: wait for forward (write_fence)",
    "write-back: wait event (start)",
    "write-back: write-back copy 0-2",
    "write-back: record",
]


def since(tiers, act) -> list[str]:
    """Calls that ``act`` makes."""
    before = len(tiers.observed.records)
    act()
    return tiers.observed.calls(before)


def copies(tiers) -> list[tuple[list[int], list[int]]]:
    """Source and target pages of every copy so far."""
    found = [record for record in tiers.observed.records if isinstance(record, Memcpy)]
    return [(copy.accesses[0].ids.tolist(), copy.accesses[1].ids.tolist()) for copy in found]


def test_merge_ops_keeps_pairs_and_order(lab):
    node = lab.tiers().cached(1)
    pairs = [([4, 1], [0, 9]), ([7], [3]), ([2, 3], [6, 5])]
    merged = merge_ops([CacheOperation(node, page_ids(device), page_ids(host)) for device, host in pairs])
    assert [side.tolist() for side in merged] == [[4, 1, 7, 2, 3], [0, 9, 3, 6, 5]]


# -- load-back ----------------------------------------------------------------------------------------------------


def test_life_of_a_load_back(lab):
    tiers = lab.tiers()
    node = tiers.host_only(2, first_token=40)
    queued = since(tiers, lambda: tiers.load(node))
    assert queued == []
    assert (node.loading, node.device_pages is not None) == (True, True)
    assert tiers.controller.transfers_in_flight == 0
    tickets = []
    assert since(tiers, lambda: tickets.append(tiers.controller.start_loading(7))) == LOAD_CALLS
    assert tickets[0] is not None
    assert (node.loading, tiers.controller.transfers_in_flight) == (True, 1)
    assert since(tiers, lambda: tiers.controller.acknowledge(6)) == []
    assert (node.loading, tiers.controller.transfers_in_flight) == (True, 1)
    assert since(tiers, lambda: tiers.controller.acknowledge(7)) == ["host: synchronize"]
    assert (node.loading, tiers.controller.transfers_in_flight) == (False, 0)
    assert tiers.contents(node.device_pages) == [[40.0, 40.0], [41.0, 41.0], [42.0, 42.0]]
    tiers.radix.check_invariants()


def test_queued_load_backs_become_one_transfer(lab):
    tiers = lab.tiers()
    nodes = [tiers.host_only(count, first_token=100 * count) for count in (2, 1, 3)]
    done = len(copies(tiers))
    for node in nodes:
        tiers.load(node)
    assert since(tiers, lambda: tiers.controller.start_loading(1)) == LOAD_CALLS
    host, device = (np.concatenate([getattr(node, tier) for node in nodes]) for tier in ("host_pages", "device_pages"))
    assert copies(tiers)[done:] == [(host.tolist(), device.tolist())] * 3
    assert tiers.controller.start_loading(1) is None
    tiers.controller.acknowledge(1)
    assert not any(node.loading for node in nodes)
    assert [tiers.contents(node.device_pages)[0] for node in nodes] == [[200.0] * 2, [100.0], [300.0] * 3]
    counters = tiers.controller.counters
    assert (counters.load_backs, counters.restored_pages) == (1, 6)


def test_nothing_queued_nothing_submitted(lab):
    tiers = lab.tiers()
    assert since(tiers, lambda: tiers.controller.start_loading(1)) == []
    assert tiers.controller.start_loading(1) is None
    assert since(tiers, lambda: tiers.controller.start_writing(1)) == []
    assert not tiers.controller.start_writing(1)
    assert since(tiers, lambda: tiers.controller.acknowledge(9)) == []


@pytest.mark.parametrize("waits", [True, False])
def test_the_consuming_round_reads_what_was_restored_if_it_waits_for_each_layer(lab, waits):
    tiers = lab.tiers()
    node = tiers.host_only(2, first_token=40)
    spoiled = tiers.device_pages.alloc(4)
    tiers.forward(write=spoiled, value=-9.0)
    tiers.device_pages.free(spoiled)
    pages = tiers.load(node)
    ticket = tiers.controller.start_loading(1)
    seen = []
    wait = (lambda layer: tiers.controller.layer_done.wait_until(ticket, layer)) if waits else None
    tiers.forward(read=pages, into=seen, layer_wait=wait)
    tiers.device.synchronize()
    values = [layer.unique().tolist() for layer in seen]
    assert values == ([[40.0], [41.0], [42.0]] if waits else [[-9.0], [-8.0], [-7.0]])
    found = {finding.hazard.value for finding in tiers.observed.analyse().findings}
    assert found == (set() if waits else {"raw_restore_forward"})


def test_a_load_back_in_flight_pins_its_node_and_those_above_it(lab):
    tiers = lab.tiers()
    upper = tiers.host_only(1, first_token=40)
    tiers.load(upper)
    tiers.controller.start_loading(1)
    assert tiers.radix.device_evictable_pages == 0
    assert len(tiers.radix.evict_device(1).pages) == 0
    tiers.controller.acknowledge(1)
    assert tiers.radix.evict_device(1).nodes == (upper,)


def test_a_node_split_in_flight_is_released_whole(lab):
    tiers = lab.tiers()
    node = tiers.host_only(3, first_token=40)
    tiers.load(node)
    tiers.controller.start_loading(1)
    match = tiers.radix.match(np.arange(40, 44))
    assert [part.loading for part in (match.last_node, node)] == [True, True]
    tiers.radix.check_invariants()
    tiers.controller.acknowledge(1)
    assert [part.loading for part in (match.last_node, node)] == [False, False]
    tiers.radix.check_invariants()


@pytest.mark.parametrize("when", ["queued", "submitted", "acknowledged"])
def test_a_load_back_that_claims_pinned_nodes_is_refused(lab, when):
    tiers = lab.tiers()
    node = tiers.host_only(2, first_token=40)
    pages = tiers.load(node)
    if when != "queued":
        tiers.controller.start_loading(1)
    if when == "acknowledged":
        tiers.controller.acknowledge(1)
    more = tiers.device_pages.alloc(2)
    before = tiers.observed.calls()
    with pytest.raises(ControllerError) as refused:
        tiers.controller.load(node, more, more)
    assert isinstance(refused.value, PagePinned) == (when != "acknowledged")
    expected = f"<Node {node.node_id}: 8 tokens on device and host> is pinned by an in-flight load-back; wait for its"
    assert str(refused.value).startswith(expected) == (when != "acknowledged")
    assert node.device_pages.tolist() == pages.tolist()
    assert tiers.observed.calls() == before
    assert (tiers.controller.start_loading(2) is not None) == (when == "queued")
    tiers.controller.acknowledge(2)
    assert not node.loading
    tiers.radix.check_invariants()


def test_load_refuses_nodes_it_cannot_restore(lab):
    tiers = lab.tiers()
    node = tiers.cached(1)
    pages = tiers.device_pages.alloc(1)
    with pytest.raises(
        ControllerError, match=r"^load: <Node 2: 4 tokens on device> has no host pages to restore from$"
    ):
        tiers.controller.load(node, pages, pages)
    host = tiers.host_only(2, first_token=40)
    with pytest.raises(ControllerError, match="1 entries for the 2 pages"):
        tiers.controller.load(host, pages, pages)
    assert host.device_pages is None
    assert not host.loading
    assert tiers.controller.start_loading(1) is None


# -- write-back ---------------------------------------------------------------------------------------------------


def test_life_of_a_write_back(lab):
    tiers = lab.tiers()
    node = tiers.cached(2, first_token=40)
    host = tiers.host_pages.alloc(2)
    assert since(tiers, lambda: tiers.controller.write(node, host)) == []
    assert node.backing_up
    assert node.host_pages.tolist() == host.tolist()
    assert since(tiers, lambda: tiers.controller.start_writing(7)) == WRITE_CALLS
    assert tiers.controller.transfers_in_flight == 1
    assert since(tiers, lambda: tiers.controller.acknowledge(6)) == []
    assert node.backing_up
    assert since(tiers, lambda: tiers.controller.acknowledge(7)) == ["host: synchronize"]
    assert not node.backing_up
    assert tiers.host.k[:, host, 0, 0, 0].tolist() == [[40.0, 40.0], [41.0, 41.0], [42.0, 42.0]]
    counters = tiers.controller.counters
    assert (counters.write_backs, counters.backed_up_pages, counters.index_moves) == (1, 2, 1)


def test_queued_write_backs_become_one_transfer(lab):
    tiers = lab.tiers()
    nodes = [tiers.cached(count, first_token=100 * count) for count in (1, 2)]
    for node in nodes:
        tiers.controller.write(node, tiers.host_pages.alloc(len(node.device_pages)))
    assert tiers.controller.start_writing(1)
    device, host = (np.concatenate([getattr(node, tier) for node in nodes]) for tier in ("device_pages", "host_pages"))
    assert copies(tiers) == [(device.tolist(), host.tolist())]
    assert not tiers.controller.start_writing(1)


def test_a_write_back_in_flight_pins_its_node(lab):
    tiers = lab.tiers()
    node = tiers.cached(1)
    tiers.controller.write(node, tiers.host_pages.alloc(1))
    assert len(tiers.radix.evict_device(1).pages) == 0
    tiers.controller.start_writing(1)
    assert len(tiers.radix.evict_device(1).pages) == 0
    tiers.controller.acknowledge(1)
    assert tiers.radix.evict_device(1).nodes == (node,)


def test_write_refuses_nodes_it_cannot_back_up(lab):
    tiers = lab.tiers()
    node = tiers.host_only(1)
    pages = tiers.host_pages.alloc(1)
    with pytest.raises(ControllerError, match=r"^write: <Node 2: 4 tokens on host> has no device pages to back up$"):
        tiers.controller.write(node, pages)
    tiers.load(node)
    with pytest.raises(ControllerError, match="has host pages already"):
        tiers.controller.write(node, pages)
    assert not tiers.controller.start_writing(1)


def test_a_split_does_not_change_what_a_queued_transfer_moves(lab):
    tiers = lab.tiers()
    node = tiers.cached(3, first_token=40)
    pages, host = node.device_pages.tolist(), tiers.host_pages.alloc(3)
    tiers.controller.write(node, host)
    tiers.radix.match(np.arange(40, 44))
    tiers.controller.start_writing(1)
    assert copies(tiers) == [(pages, host.tolist())]
    tiers.controller.acknowledge(1)
    tiers.radix.check_invariants()


# -- both ---------------------------------------------------------------------------------------------------------


def test_acknowledgements_are_by_step_and_never_early(lab):
    """On the lazy schedule nothing runs but what the host waits for: each acknowledgement runs its own transfers."""
    tiers = lab.tiers(backend="virtual-lazy")
    first, second = (tiers.host_only(1, first_token=40 * n) for n in (1, 2))
    third = tiers.cached(1, first_token=120)
    tiers.settle()
    for step, node in enumerate((first, second), start=1):
        tiers.load(node)
        tiers.controller.start_loading(step)
    tiers.controller.write(third, tiers.host_pages.alloc(1))
    tiers.controller.start_writing(2)
    assert since(tiers, lambda: tiers.controller.acknowledge(1)) == ["host: synchronize"]
    assert [first.loading, second.loading, third.backing_up] == [False, True, True]
    assert tiers.contents(first.device_pages)[0] == [40.0]
    assert tiers.contents(second.device_pages)[0] != [80.0]
    assert since(tiers, lambda: tiers.controller.acknowledge(5)) == ["host: synchronize"] * 2
    assert [second.loading, third.backing_up] == [False, False]
    assert tiers.contents(second.device_pages)[0] == [80.0]


@pytest.mark.parametrize("backend", ["virtual-eager", "virtual-lazy"])
def test_complete_transfers_are_released_before_their_step(lab, backend):
    """A query finds out; what it does not find complete stays pinned, and so does what was submitted behind it."""
    tiers = lab.tiers(backend=backend)
    first, second = (tiers.host_only(1, first_token=40 * n) for n in (1, 2))
    fresh = tiers.cached(1, first_token=120)
    for step, node in enumerate((first, second), start=1):
        tiers.load(node)
        tiers.controller.start_loading(step)
    tiers.controller.write(fresh, tiers.host_pages.alloc(1))
    tiers.controller.start_writing(2)
    calls = since(tiers, tiers.controller.acknowledge_complete)
    pinned = backend == "virtual-lazy"
    assert [first.loading, second.loading, fresh.backing_up] == [pinned] * 3
    assert calls == ([] if pinned else ["host: synchronize"] * 3)  # an order, not only a poll
    tiers.controller.acknowledge(2)
    assert tiers.controller.transfers_in_flight == 0


def test_listeners_are_told_of_every_transfer(lab):
    tiers = lab.tiers()
    heard: list[SubmittedTransfer] = []
    node = tiers.host_only(1)
    tiers.controller.on_transfer = heard.append
    fresh = tiers.cached(2, first_token=40)
    tiers.controller.write(fresh, tiers.host_pages.alloc(2))
    tiers.controller.start_writing(3)
    tiers.load(node)
    tiers.controller.start_loading(4)
    assert [(t.direction, t.stream.name, t.step, [o.node for o in t.operations]) for t in heard] == [
        (Direction.DEVICE_TO_HOST, "write-back", 3, [fresh]),
        (Direction.HOST_TO_DEVICE, "load-back", 4, [node]),
    ]
    assert heard[0].transfer != heard[1].transfer
    tiers.controller.acknowledge(4)
    assert all(transfer.finish.query() for transfer in heard)


# -- fence streams ------------------------------------------------------------------------------------------------


def transfer(tiers, direction: str, first_token: int = 40) -> list[str]:
    """Calls of one transfer that moves two pages, while a round writes what it reads or writes."""
    if direction == "load":
        node = tiers.host_only(2, first_token=first_token)
        pages = tiers.device_pages.alloc(4)
        tiers.forward(write=pages)
        tiers.device_pages.free(pages)
        tiers.load(node)
        return since(tiers, lambda: tiers.controller.start_loading(1))
    node = tiers.cached(2, first_token=first_token)
    tiers.controller.write(node, tiers.host_pages.alloc(2))
    return since(tiers, lambda: tiers.controller.start_writing(1))


BOTH = pytest.mark.parametrize("direction", ["load", "write"])


def test_the_fence_streams_are_none_until_somebody_sets_them(lab):
    tiers = lab.tiers()
    fresh = CacheController(tiers.device, tiers.engine, tiers.radix, tiers.controller.policy)
    assert (fresh.load_fence_stream, fresh.write_fence_stream) == (None, None)
    assert {"load_fence_stream", "write_fence_stream"} <= set(vars(fresh))


@BOTH
@pytest.mark.parametrize("state", ["set", "none", "absent"])
def test_it_works_without_a_fence_stream(lab, monkeypatch, direction, state):
    """Without one it transfers all the same; the analyzer tells what that is worth."""
    tiers = lab.tiers()
    expected = LOAD_CALLS if direction == "load" else WRITE_CALLS
    name = f"{direction}_fence_stream"
    if state != "set":
        expected = [call for call in expected if "fence" not in call]
        setattr(tiers.controller, name, None)
    if state == "absent":
        monkeypatch.delattr(CacheController, name)
        delattr(tiers.controller, name)
        assert not hasattr(tiers.controller, name)
    assert transfer(tiers, direction) == expected
    tiers.device.synchronize()
    hazard = "waw_forward_restore" if direction == "load" else "raw_forward_backup"
    found = {finding.hazard.value for finding in tiers.observed.analyse().findings}
    assert found == (set() if state == "set" else {hazard})


@BOTH
def test_the_stream_of_the_moment_of_submission_is_fenced(lab, direction):
    tiers = lab.tiers()
    transfer(tiers, direction)
    tiers.settle()
    replacement = tiers.device.Stream("second")
    tiers.controller.load_fence_stream = tiers.controller.write_fence_stream = replacement
    tiers.forward_stream = replacement
    calls = transfer(tiers, direction, first_token=80)
    assert [call for call in calls if "fence" in call] == [f"{direction}-back: wait for second ({direction}_fence)"]
    tiers.device.synchronize()
    assert tiers.observed.analyse().findings == []


@BOTH
def test_each_direction_has_its_own_fence(lab, direction):
    tiers = lab.tiers()
    other = "write" if direction == "load" else "load"
    setattr(tiers.controller, f"{other}_fence_stream", None)
    assert any("fence" in call for call in transfer(tiers, direction))
