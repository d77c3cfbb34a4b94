"""The transfer engine: the right bytes, in the right order, on the right stream, after the start event."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hicache_obs.controller.page_copies import runs
from hicache_obs.records import Access, Direction, Memcpy, Mode, RecordStream, Space, Work, page_ids

PAGES = 12
ANYWHERE = pytest.mark.parametrize(
    "backend",
    ["threads", "virtual-eager", "virtual-lazy", "virtual-adversarial", pytest.param("cuda", marks=pytest.mark.gpu)],
)


@st.composite
def page_pairs(draw: Callable[..., list[int]]) -> tuple[list[int], list[int]]:
    """Two lists of distinct pages of one length, in any order."""
    sides = [draw(st.permutations(range(PAGES))) for _ in range(2)]
    count = draw(st.integers(1, PAGES))
    return sides[0][:count], sides[1][:count]


def fill(tiers) -> tuple[torch.Tensor, torch.Tensor]:
    """Both pools full of different numbers; returns clones of the four tensors, device first, K and V stacked."""
    for pool, sign in ((tiers.pool, 1.0), (tiers.host, -1.0)):
        count = pool.k.numel()
        pool.k.copy_(torch.arange(count).view(pool.k.shape) * sign)
        pool.v.copy_(torch.arange(count, 2 * count).view(pool.v.shape) * sign)
    return tuple(torch.stack([pool.k.cpu(), pool.v.cpu()]) for pool in (tiers.pool, tiers.host))


def now(tiers) -> tuple[torch.Tensor, torch.Tensor]:
    return tuple(torch.stack([pool.k.cpu(), pool.v.cpu()]) for pool in (tiers.pool, tiers.host))


@ANYWHERE
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=page_pairs())
def test_a_load_back_copies_its_pages_and_touches_nothing_else(lab, backend, pairs):
    tiers = lab.tiers(backend=backend, pages=PAGES)
    device, host = fill(tiers)
    done = tiers.engine.submit_host_to_device(
        tiers.move(*pairs), start_event=tiers.device.Event(), on_layer_done=lambda layer: None
    )
    done.synchronize()
    expected = device.clone()
    for to, by in zip(*pairs, strict=True):
        expected[:, :, to] = host[:, :, by]
    after = now(tiers)
    assert torch.equal(after[0], expected)
    assert torch.equal(after[1], host)


@ANYWHERE
@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(pairs=page_pairs())
def test_a_write_back_copies_its_pages_and_touches_nothing_else(lab, backend, pairs):
    tiers = lab.tiers(backend=backend, pages=PAGES)
    device, host = fill(tiers)
    tiers.engine.submit_device_to_host(tiers.move(*pairs), start_event=tiers.device.Event()).synchronize()
    expected = host.clone()
    for by, to in zip(*pairs, strict=True):
        expected[:, :, to] = device[:, :, by]
    after = now(tiers)
    assert torch.equal(after[1], expected)
    assert torch.equal(after[0], device)


def test_a_load_back_is_one_copy_per_layer_lowest_first_each_followed_by_its_callback(lab):
    tiers = lab.tiers()
    start = tiers.device.current_stream().record_event()
    seen: list[tuple[int, str, int]] = []

    def on_layer_done(layer: int) -> None:
        seen.append((layer, tiers.device.current_stream().name, tiers.engine.launched_copies))
        tiers.device.Event().record()

    tiers.engine.submit_host_to_device(tiers.move([4, 1], [0, 9]), start_event=start, on_layer_done=on_layer_done)
    assert tiers.observed.calls() == [
        "default: record",
        "load-back: wait event (start)",
        "load-back: load-back copy 0",
        "load-back: record",
        "load-back: load-back copy 1",
        "load-back: record",
        "load-back: load-back copy 2",
        "load-back: record",
        "load-back: record",
    ]
    assert seen == [(0, "load-back", 1), (1, "load-back", 2), (2, "load-back", 3)]
    assert tiers.device.current_stream().name == "default"


def test_a_write_back_is_one_copy_of_all_layers(lab):
    tiers = lab.tiers()
    start = tiers.device.current_stream().record_event()
    tiers.engine.submit_device_to_host(tiers.move([4, 1], [0, 9]), start_event=start)
    assert tiers.observed.calls() == [
        "default: record",
        "write-back: wait event (start)",
        "write-back: write-back copy 0-2",
        "write-back: record",
    ]
    assert tiers.engine.launched_copies == 1


@pytest.mark.parametrize("direction", [Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST])
def test_what_a_copy_says_that_it_touches(lab, direction):
    """Pages of both pools and the index buffer, for the recorder; one array object for all layers of a transfer."""
    tiers = lab.tiers()
    move = tiers.move([4, 1], [0, 9])
    start = tiers.device.Event()
    if direction is Direction.HOST_TO_DEVICE:
        tiers.engine.submit_host_to_device(move, start_event=start, on_layer_done=lambda layer: None)
        expected = [(Space.HOST, Mode.READ, [0, 9]), (Space.DEVICE, Mode.WRITE, [4, 1])]
    else:
        tiers.engine.submit_device_to_host(move, start_event=start)
        expected = [(Space.DEVICE, Mode.READ, [4, 1]), (Space.HOST, Mode.WRITE, [0, 9])]
    copies = [record for record in tiers.observed.records if isinstance(record, Memcpy)]
    whole = 2 * tiers.pool.layout.page_bytes
    for copy in copies:
        told = [(access.space, access.mode, access.ids.tolist()) for access in copy.accesses]
        assert told == [*expected, (Space.BUFFER, Mode.READ, [move.transfer])]
        assert all(a.ids is b.ids for a, b in zip(copy.accesses, copies[0].accesses, strict=True))
        assert (copy.direction, copy.group) == (direction, move.transfer)
    assert sum(copy.size_bytes for copy in copies) == whole
    assert sum(isinstance(record, RecordStream) for record in tiers.observed.records) == 1


@pytest.mark.parametrize("direction", ["load-back", "write-back"])
@pytest.mark.parametrize("bound", [True, False])
def test_the_copies_read_their_indices_after_the_start_event(lab, direction, bound):
    """The indices are moved on the current stream; a transfer that does not wait for that copies other pages."""
    tiers = lab.tiers(backend="virtual-adversarial", pages=PAGES)
    device, host = fill(tiers)
    move = tiers.move([5, 6], [7, 8])
    ready = move.device_index.clone()
    move.device_index.copy_(torch.tensor([0, 1]))
    access = Access(Space.BUFFER, Mode.WRITE, move.index_buffer)
    tiers.device.launch(lambda: move.device_index.copy_(ready), Work("index move", (access,)))
    recorded = tiers.device.current_stream().record_event()
    start = recorded if bound else tiers.device.Event()
    if direction == "load-back":
        tiers.engine.submit_host_to_device(move, start_event=start, on_layer_done=lambda layer: None)
    else:
        tiers.engine.submit_device_to_host(move, start_event=start)
    tiers.device.synchronize()
    pages = [5, 6] if bound else [0, 1]
    after = now(tiers)
    if direction == "load-back":
        expected = device.clone()
        expected[:, :, pages] = host[:, :, [7, 8]]
        assert torch.equal(after[0], expected)
    else:
        expected = host.clone()
        expected[:, :, [7, 8]] = device[:, :, pages]
        assert torch.equal(after[1], expected)
    findings = tiers.observed.analyse().findings
    assert {finding.hazard.value for finding in findings} == (set() if bound else {"metadata_war"})


@pytest.mark.parametrize("direction", ["load-back", "write-back"])
def test_the_returned_event_marks_the_end(lab, direction):
    """On the lazy schedule nothing runs but what the host waits for."""
    tiers = lab.tiers(backend="virtual-lazy", pages=PAGES)
    device, host = fill(tiers)
    move, start = tiers.move([2], [3]), tiers.device.Event()
    if direction == "load-back":
        end = tiers.engine.submit_host_to_device(move, start_event=start, on_layer_done=lambda layer: None)
    else:
        end = tiers.engine.submit_device_to_host(move, start_event=start)
    assert all(map(torch.equal, now(tiers), (device, host)))
    end.synchronize()
    assert torch.equal(*(side[:, :, page] for side, page in zip(now(tiers), (2, 3), strict=True)))


def test_a_copy_reads_its_source_when_it_runs_not_when_it_is_submitted(lab):
    tiers = lab.tiers(backend="virtual-lazy", pages=PAGES)
    fill(tiers)
    end = tiers.engine.submit_host_to_device(
        tiers.move([2], [3]), start_event=tiers.device.Event(), on_layer_done=lambda layer: None
    )
    tiers.host.k[:, 3] = 7.0
    end.synchronize()
    assert (tiers.pool.k[:, 2] == 7.0).all()


def test_the_directions_have_streams_of_their_own(lab):
    """A write-back that waits does not hold up a load-back."""
    tiers = lab.tiers(backend="threads")
    gate = tiers.device.gate()
    gate.hold(tiers.engine.device_to_host_stream)
    move = tiers.move([2], [3])
    tiers.engine.submit_device_to_host(move, start_event=tiers.device.Event())
    end = tiers.engine.submit_host_to_device(move, start_event=tiers.device.Event(), on_layer_done=lambda layer: None)
    end.synchronize()
    assert not tiers.engine.device_to_host_stream.query()
    gate.open()


@given(pairs=page_pairs())
def test_runs_are_the_pages_in_order_and_cannot_be_joined(pairs):
    device_pages, host_pages = map(page_ids, pairs)
    found = runs(device_pages, host_pages)
    assert [d + i for d, _, n in found for i in range(n)] == device_pages.tolist()
    assert [h + i for _, h, n in found for i in range(n)] == host_pages.tolist()
    for (d, h, n), following in itertools.pairwise(found):
        assert (d + n, h + n) != following[:2]


def test_runs_by_example():
    assert runs(page_ids([3, 4, 5, 9, 10]), page_ids([0, 1, 7, 8, 9])) == [(3, 0, 2), (5, 7, 1), (9, 8, 2)]
    assert runs(page_ids([]), page_ids([])) == []
