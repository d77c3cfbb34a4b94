"""Page ids without a sync: a device tensor that counts who reads it, and a pinned ring that fills up."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hicache_obs.recorder.hold_back import HoldBack
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.recorder.slot import pack_plain
from hicache_obs.records import Access, CaptureMode, DropReason, Mode, PageAlloc, PageFree, Space, Work, unpack_slots
from hicache_obs.sglang.install import _pinned
from hicache_obs.sglang.page_ids import Convert, ConvertRows, LookUp, LookUpRows, PageReader, Wanted


class CudaLike:
    """A tensor that says it is on a GPU. Whatever would read it on the host is counted."""

    device = SimpleNamespace(type="cuda")
    is_cpu = False

    def __init__(self, values, reads, dtype=torch.int64):
        self.values, self.dtype = torch.tensor(values, dtype=dtype), dtype
        self.reads = reads

    def element_size(self):
        return self.values.element_size()

    def numel(self):
        return self.values.numel()

    def reshape(self, *shape):
        return self

    def _forbidden(self, *args, **kwargs):
        self.reads["sync"] += 1
        raise AssertionError("this would wait for the device")

    cpu = item = tolist = numpy = __int__ = __bool__ = __len__ = __iter__ = __array__ = _forbidden


class Pinned:
    """A pinned host tensor; copies from a device land when the device gets there."""

    def __init__(self, tensor, device):
        self.tensor, self.device = tensor, device

    def __getitem__(self, place):
        return Pinned(self.tensor[place], self.device)

    def view(self, dtype):
        return Pinned(self.tensor.view(dtype), self.device)

    def copy_(self, source, non_blocking):
        assert non_blocking
        assert source.dtype == self.tensor.dtype  # torch would convert on the device, and wait for that
        assert self.device.current is self.device.own
        self.device.queue.append(lambda: self.tensor.copy_(source.values))

    def numpy(self):
        return self.tensor.numpy()


class Device:
    """The part of torch.cuda that copies use; nothing runs before ``finish``."""

    def __init__(self):
        self.queue, self.log = [], []
        self.own, self.engines = None, "engine's stream"
        self.current = self.engines
        self.done = 0

    def Stream(self, *, priority):  # noqa: N802 torch's name
        assert priority < 0  # an engine's are of priority 0, and torch gives one stream to many
        self.own = "own stream"
        return self.own

    def Event(self):  # noqa: N802 torch's name
        device = self

        class Event:
            at = None

            def record(self, stream):
                self.at = len(device.queue)
                device.log.append(("record", stream))

            def wait(self, stream):
                device.log.append(("wait", stream))

            def query(self):
                return device.done >= self.at

        return Event()

    def current_stream(self):
        return self.current

    def stream(self, stream):
        self.current = stream
        return _Use(self)

    def finish(self):
        for work in self.queue[self.done :]:
            work()
        self.done = len(self.queue)


class _Use(nullcontext):
    def __init__(self, device):
        super().__init__()
        self.device = device

    def __exit__(self, *exc):
        self.device.current = self.device.engines


class Sink:
    """Keeps what is written."""

    writable = True
    mode = CaptureMode.OBSERVE

    def __init__(self):
        self.records, self.lost = [], Counter()

    def append(self, record):
        self.records.append(record)
        return True

    def put(self, *numbers):
        return False  # the slow way, through append

    put_work = put_round = put

    def put_packed(self, slot):
        self.records.append(slot)
        return True

    def drop(self, reason, count=1):
        self.records.append(reason)
        self.lost[reason] += count

    def beat(self, host_ns):
        pass


def reader(device, ring_ids=64):
    return PageReader(
        lambda: device, lambda ids: Pinned(torch.zeros(ids, dtype=torch.int64), device), ring_ids=ring_ids
    )


def ids(record):
    accesses = record.accesses if hasattr(record, "accesses") else (record.access,)
    return [access.ids.tolist() for access in accesses]


@pytest.mark.parametrize(
    ("convert", "slots", "pages"),
    [
        (Convert(4), [8, 9, 10, 11, 4], [1, 2]),
        (Convert(4, skip_zero=True), [0, 1, 12], [3]),
        (Convert(4, first_slots_only=True), [6, 7, 8, 9], [2]),
        (Convert(1, skip_zero=True), [0, 5, 5, 3], [3, 5]),
    ],
)
def test_slots_become_pages(convert, slots, pages):
    words = reader(Device()).read(torch.tensor(slots, dtype=torch.int32), convert)
    assert unpack_slots(words).tolist() == pages


def test_rows_of_a_request_table_become_pages_up_to_their_lengths():
    words = ConvertRows(4, np.array([5, 9]))(np.array([8, 12, 99, 16, 20, 0]))
    assert unpack_slots(words).tolist() == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "words",
    [[], [4, 0], [0, 0, 0], [4, 4, 0], [4, -1, 0], [4, 0, 2, 1], [4, 0, -1], [4, 0, 2, 1, 1, 7]],
)
def test_words_that_are_no_slot_list_are_refused(words):
    with pytest.raises(ValueError, match="slot list"):
        unpack_slots(np.array(words, dtype=np.int64))


def test_a_device_tensor_is_never_read_on_the_launching_thread():
    device, reads, sink = Device(), Counter(), Sink()
    held = HoldBack(sink)
    recorder = ServerRecorder(held, clock=lambda: 7)
    pages = reader(device)
    pages.on_late = held.expect
    first = pages.read(CudaLike([8, 9, 4], reads), Convert(4))
    recorder.page_alloc(0, Access(Space.DEVICE, Mode.WRITE, first))
    recorder.page_free(0, Access(Space.HOST, Mode.WRITE, np.array([5])))
    assert held.flush() == 0
    assert not any(isinstance(record, PageAlloc | PageFree) for record in sink.records)
    assert device.log == [("record", "engine's stream"), ("wait", "own stream"), ("record", "own stream")]
    device.finish()
    assert held.flush() == 2
    allocated, freed = sink.records[-2:]
    assert (unpack_slots(allocated.access.ids).tolist(), ids(freed)) == ([1, 2], [[5]])
    assert allocated.op < freed.op
    assert reads["sync"] == 0


def test_the_pinned_ring_may_be_written_by_threads_that_are_not_in_inference_mode(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **options: empty(*size, **options))
    with torch.inference_mode():
        ring = _pinned(8)
        slots = torch.arange(3)
    ring[0:3].copy_(slots, non_blocking=True)
    assert ring[:3].tolist() == [0, 1, 2]


def test_tensors_that_are_wanted_together_are_copied_behind_one_event():
    device, reads = Device(), Counter()
    pages = reader(device)
    told = []
    pages.on_late = lambda: told.append("late")
    table = CudaLike([9, 6], reads)
    wanted = (
        Wanted(CudaLike([8, 4], reads), Convert(4)),
        Wanted(torch.tensor([12]), Convert(4)),
        Wanted(CudaLike([], reads), Convert(1)),
        Wanted(CudaLike([1], reads), Convert(1), lambda tensor: table, 2),
    )
    first, host, none, last = pages.read_all(wanted)
    assert device.log == [("record", "engine's stream"), ("wait", "own stream"), ("record", "own stream")]
    assert (unpack_slots(host).tolist(), len(none), told) == ([3], 0, ["late"])
    assert not first.ready()
    assert not last.ready()
    device.finish()
    assert [unpack_slots(late.take()).tolist() for late in (first, last)] == [[1, 2], [6, 9]]
    assert reads["sync"] == 0


def test_integers_of_all_sizes_are_copied_as_they_are():
    device, reads = Device(), Counter()
    pages = reader(device, ring_ids=8)
    types = (torch.int32, torch.int64, torch.int16, torch.int32)
    wanted = [Wanted(CudaLike([n, 4, 100 + n], reads, dtype), Convert(1)) for n, dtype in enumerate(types)]
    for turn in range(3):  # around the end of the ring, too
        first = pages.read_all(wanted[turn % 2 : turn % 2 + 2])
        device.finish()
        assert [unpack_slots(late.take()).tolist() for late in first] == [
            sorted({n, 4, 100 + n}) for n in (turn % 2, turn % 2 + 1)
        ]
    assert pages.read_all(wanted[2:]) is not None
    device.finish()
    assert reads["sync"] == 0


def test_tensors_that_are_wanted_together_are_all_lost_for_want_of_room():
    device = Device()
    pages = reader(device, ring_ids=8)
    five = Wanted(CudaLike(range(5), Counter()), Convert(1))
    assert pages.read_all((five, five)) is None
    assert device.queue == []
    (late,) = pages.read_all((five,))
    device.finish()
    assert unpack_slots(late.take()).tolist() == [0, 1, 2, 3, 4]


def test_a_copy_that_fails_takes_no_room_in_the_pinned_ring():
    device = Device()
    pages = reader(device, ring_ids=8)
    eight = Wanted(CudaLike([1], Counter()), Convert(1), lambda tensor: CudaLike(range(8), Counter()), 8)
    with pytest.raises(ZeroDivisionError):
        pages.read_all((Wanted(CudaLike([1], Counter()), Convert(1), lambda tensor: 1 / 0, 8),))
    assert device.current is device.engines
    assert pages.read_all((eight,)) is not None
    assert pages.read_all((eight,)) is None


def test_host_tables_are_read_as_a_device_would_read_them():
    pages = reader(Device())
    table = torch.arange(32, dtype=torch.int32).reshape(2, 16)
    translate = torch.arange(32).flip(0)
    rows = torch.tensor([1, 0])
    for derive, tensor in (
        (LookUp(translate), torch.tensor([3, 30])),
        (LookUpRows(table, 9, 4, None), rows),
        (LookUpRows(table, 9, 4, translate), rows),
    ):
        assert derive.on_host(pages, tensor).ravel().tolist() == derive(tensor).reshape(-1).tolist()
    assert pages.host_view(table) is pages.host_view(table)
    table[1, 0] = 7
    assert LookUpRows(table, 1, 4, None).on_host(pages, rows).tolist() == [[7], [0]]


def test_layers_of_a_transfer_go_on_sharing_their_pages():
    device, sink = Device(), Sink()
    held = HoldBack(sink)
    recorder = ServerRecorder(held, clock=lambda: 7)
    pages = reader(device)
    pages.on_late = held.expect
    accesses = (Access(Space.DEVICE, Mode.WRITE, pages.read(CudaLike([8], Counter()), Convert(4))),)
    stream = SimpleNamespace(stream_id=3, name="load-back")
    for layer in range(2):
        recorder.enqueue(stream, Work("copy", accesses, (layer, layer + 1)))
    device.finish()
    held.flush()
    one, two = sink.records[-2:]
    assert one.accesses is two.accesses


def test_a_full_pinned_ring_loses_the_record_and_recovers():
    device = Device()
    pages = reader(device, ring_ids=8)
    first = pages.read(CudaLike(range(6), Counter()), Convert(1))
    assert pages.read(CudaLike(range(6), Counter()), Convert(1)) is None
    device.finish()
    assert first.take().tolist() == [1, 0, 0, 0, 1, 2, 3, 4, 5]
    again = pages.read(CudaLike([7, 3], Counter()), Convert(1))
    device.finish()
    assert unpack_slots(again.take()).tolist() == [3, 7]
    assert pages.read(CudaLike(range(9), Counter()), Convert(1)) is None


def test_packed_records_keep_their_place_behind_what_is_held():
    device, sink = Device(), Sink()
    held = HoldBack(sink)
    held.expect()
    assert not held.put(2, 0, 5, 6, 7)  # nothing is held: the sink's own way
    late = reader(device).read(CudaLike([4], Counter()), Convert(1))
    held.append(PageAlloc(0, 0, 0, 0, Access(Space.DEVICE, Mode.WRITE, late)))
    assert held.put(2, 1, 5, 6, 7)
    assert not held.put_work(0, 2, 5, (1, 2, 3, 4), (0, 1), ())
    assert held.flush() == 0
    device.finish()
    assert held.flush() == 2
    assert isinstance(sink.records[0], PageAlloc)
    assert sink.records[1] == pack_plain(2, 1, 5, 6, 7)


def test_losses_keep_their_place_behind_what_is_held():
    device, sink = Device(), Sink()
    held = HoldBack(sink, max_held=2)
    held.expect()
    late = reader(device).read(CudaLike([4], Counter()), Convert(1))
    access = Access(Space.DEVICE, Mode.WRITE, late)
    plain = Access(Space.DEVICE, Mode.WRITE, np.array([9]))
    assert held.append(PageAlloc(0, 0, 0, 0, access))
    assert held.append(PageFree(1, 0, 0, 0, plain))
    assert not held.append(PageFree(2, 0, 0, 0, plain))
    held.drop(DropReason.ARENA_FULL, 3)
    assert sink.records == []
    device.finish()
    held.flush()
    assert [type(record).__name__ for record in sink.records] == ["PageAlloc", "PageFree", "DropReason", "DropReason"]
    assert sink.lost == {DropReason.RING_FULL: 1, DropReason.ARENA_FULL: 3}
