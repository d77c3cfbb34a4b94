"""Page ids out of an engine's index tensors, without ever making the engine's thread wait.

A host tensor is read at once. A device tensor is copied to pinned host memory on a stream of our own, behind an
event of the stream that makes it, and read by the flusher once the copy is over: ``.cpu()``, ``.item()`` or
``.tolist()`` of a device tensor would block the launching thread until the device is idle.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_obs._struct import Struct
from hicache_obs.recorder.hold_back import late
from hicache_obs.records import PageIds, slot_list_head
from hicache_obs.streams.cuda_module import OWN_PRIORITY

DEFAULT_RING_IDS: Final = 1 << 20
_MAX_VIEWS: Final = 64
_NO_IDS: Final[PageIds] = np.zeros(0, dtype=np.int64)


Numbers: TypeAlias = npt.NDArray[np.integer[Any]]
ToWords: TypeAlias = Callable[[Numbers], PageIds]
"""Makes the slot list of the numbers that were read; a ``Convert`` or a ``ConvertRows``."""


class Derive(Protocol):
    """Makes the numbers to read out of an index tensor, wherever that is."""

    def __call__(self, tensor: Any) -> Any:
        """A tensor, by device work on the current stream."""

    def on_host(self, reader: PageReader, tensor: Any) -> Numbers:
        """An array, at once."""


class Wanted(Struct, frozen=True, eq=False, gc=False):
    """What is to be read.

    Attributes:
        tensor: Integer tensor of slots or page ids, any shape.
        convert: Makes the slot list of the numbers.
        derive: Makes the numbers out of ``tensor``; ``None`` where it holds them.
        count: How many numbers ``derive`` gives.
    """

    tensor: Any
    convert: ToWords
    derive: Derive | None = None
    count: int = -1


class LookUp(Struct, frozen=True, eq=False, gc=False):
    """``Derive``: the entries of a one-dimensional table that the tensor points to."""

    table: Any

    def __call__(self, tensor: Any) -> Any:
        return self.table.index_select(0, tensor)

    def on_host(self, reader: PageReader, tensor: Any) -> Numbers:
        """See ``Derive``."""
        found: Numbers = reader.host_view(self.table).take(tensor.numpy())
        return found


class LookUpRows(Struct, frozen=True, eq=False, gc=False):
    """``Derive``: one entry per page of the rows of a request table that the tensor points to.

    Attributes:
        table: ``(requests, slots)``.
        longest: Slots of the longest of these requests.
        page_size: Slots per page.
        translate: ``(slots,)`` table from an entry to another pool's slot; ``None`` for the entry itself.
    """

    table: Any
    longest: int
    page_size: int
    translate: Any

    def __call__(self, tensor: Any) -> Any:
        """One gather; which entries are in use is told on the host, where the lengths are known."""
        slots = self.table[:, 0 : self.longest : self.page_size].index_select(0, tensor)
        return slots if self.translate is None else self.translate.index_select(0, slots.reshape(-1).long())

    def on_host(self, reader: PageReader, tensor: Any) -> Numbers:
        """See ``Derive``."""
        entries = reader.host_view(self.table)[:, 0 : self.longest : self.page_size]
        slots: Numbers = entries.take(tensor.numpy(), 0)
        if self.translate is not None:
            slots = reader.host_view(self.translate).take(slots)
        return slots


class TensorDevice(Protocol):
    """The part of a torch device module that copies need; ``torch.cuda`` has it."""

    def Stream(self, *, priority: int) -> Any: ...  # noqa: N802 torch's name

    def Event(self) -> Any: ...  # noqa: N802 torch's name

    def current_stream(self) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


class Convert:
    """How an index tensor becomes a slot list (``records.unpack_slots``).

    Args:
        page_size: Slots per page of the pool; 1 if the tensor holds page ids already.
        first_slots_only, skip_zero: See ``slot_list_head``.
    """

    __slots__ = ("_head", "_words")

    def __init__(self, page_size: int, *, first_slots_only: bool = False, skip_zero: bool = False) -> None:
        self._head = slot_list_head(page_size, first_slots_only=first_slots_only, skip_zero=skip_zero)
        self._words = len(self._head)

    def __call__(self, slots: Numbers) -> PageIds:
        """The slot list, a fresh ``(3 + n,) int64``; pages are made of it by whoever reads the ring."""
        words = np.empty(self._words + len(slots), dtype=np.int64)
        words[: self._words] = self._head
        words[self._words :] = slots
        return words


@lru_cache(maxsize=256)
def convert(page_size: int, *, first_slots_only: bool = False, skip_zero: bool = False) -> Convert:
    """The ``Convert`` of these arguments."""
    return Convert(page_size, first_slots_only=first_slots_only, skip_zero=skip_zero)


class ConvertRows(Struct, frozen=True, eq=False, gc=False):
    """How rows of a request table, one entry per page, become a slot list.

    Attributes:
        page_size: Slots per page.
        lengths: ``(rows,)`` slots each row has.
    """

    page_size: int
    lengths: Numbers

    def __call__(self, slots: Numbers) -> PageIds:
        """As ``Convert``."""
        head = _rows_head(self.page_size, len(self.lengths))
        return np.concatenate((head, self.lengths, slots), dtype=np.int64, casting="unsafe")


@lru_cache(maxsize=4096)
def _rows_head(page_size: int, rows: int) -> PageIds:
    head = slot_list_head(page_size, skip_zero=True)
    head[-1] = rows
    return head


class StagedIds:
    """A copy on its way to the host; ``hold_back.LateIds``."""

    __slots__ = ("_convert", "_event", "_ids", "_staged", "_tensor", "begin")

    def __init__(self, staged: Any, tensor: Any, event: Any, convert: ToWords, begin: int) -> None:
        self._staged = staged
        self._tensor = tensor
        """Kept alive until the copy is over: its memory must not get a new owner."""
        self._event = event
        self._convert = convert
        self._ids: PageIds | None = None
        self.begin: Final = begin
        """Its place in the pinned ring, numbered without wrapping."""

    def ready(self) -> bool:
        """Whether the copy is over. Asks the event once; does not block."""
        return self._ids is not None or bool(self._event.query())

    def take(self) -> PageIds:
        """The slot list; only once ``ready``."""
        if self._ids is None:
            self._ids = self._convert(self._staged.numpy().reshape(-1))
            self._staged = self._tensor = None
        return self._ids

    @property
    def free(self) -> bool:
        """Whether its place in the pinned ring may be used again."""
        return self._staged is None


class PageReader:
    """Reads index tensors. ``read`` is for the engine's threads.

    Args:
        device: Where device tensors live; asked for only when one is met.
        pinned: Makes the pinned host ring: ``pinned(ids)`` gives an int64 host tensor of so many elements.
        ring_ids: Ids the pinned ring holds.
    """

    def __init__(
        self,
        device: Callable[[], TensorDevice],
        pinned: Callable[[int], Any],
        *,
        ring_ids: int = DEFAULT_RING_IDS,
    ) -> None:
        self._device = device
        self._pinned = pinned
        self.on_late: Callable[[], None] = lambda: None
        """Called before ids that come late are handed out."""
        self._size = ring_ids
        self.device_index: int | None = None
        """Of the device that tensors are copied from, once one is."""
        self._ring: Any = None
        self._types: dict[Any, tuple[Any, int]] = {}
        """The ring as elements of other integer types, and how many of them a word holds."""
        self._stream: Any = None
        self._lock = threading.Lock()
        self._head = 0
        self._staged: deque[StagedIds] = deque()
        self._views: dict[int, tuple[Any, Numbers]] = {}

    def read(self, tensor: Any, convert: ToWords) -> PageIds | None:
        """As ``read_all`` of this tensor alone."""
        ids = self.read_all((Wanted(tensor, convert),))
        return None if ids is None else ids[0]

    def read_all(self, wanted: Sequence[Wanted]) -> list[PageIds] | None:
        """Slot lists of tensors: at once for host tensors, late ones for device tensors.

        The device tensors must all be known to the current stream: they are copied behind one event of it.

        Returns:
            ``None`` if the pinned ring has no room: the record is lost, and the caller says so.
        """
        ids: list[PageIds] = []
        for one in wanted:
            if not one.tensor.is_cpu:
                break
            ids.append(self._now(one))
        else:
            return ids
        with self._lock:
            staged = self._stage([one for one in wanted if not one.tensor.is_cpu])
        if staged is None:
            return None
        self.on_late()
        rest = iter(staged)
        return [self._now(one) if one.tensor.is_cpu else next(rest) for one in wanted]

    def _now(self, one: Wanted) -> PageIds:
        numbers = one.tensor.numpy() if one.derive is None else one.derive.on_host(self, one.tensor)
        return one.convert(numbers.ravel())

    def host_view(self, table: Any) -> Numbers:
        """A host tensor that stays the same for long, as an array of the same memory."""
        known = self._views.get(id(table))
        if known is None:
            if len(self._views) >= _MAX_VIEWS:
                self._views.clear()
            # The tensor is kept: its id must not become another one's.
            known = self._views[id(table)] = table, table.numpy()
        return known[1]

    def _stage(self, wanted: Sequence[Wanted]) -> list[PageIds] | None:
        """Copy device tensors aside, all of them or none."""
        device = self._device()
        if self._stream is None:
            self._ring = self._pinned(self._size)
            self._stream = device.Stream(priority=OWN_PRIORITY)
            self.device_index = getattr(self._stream, "device_index", None)
        starts = self._places([one.tensor.numel() if one.derive is None else one.count for one in wanted])
        if starts is None:
            return None
        if not any(count for _, count in starts):
            return [_NO_IDS] * len(wanted)
        made, done = device.Event(), device.Event()
        made.record(device.current_stream())
        staged: list[StagedIds] = []
        found: list[PageIds] = []
        with device.stream(self._stream):
            made.wait(self._stream)
            for one, (start, count) in zip(wanted, starts, strict=True):
                if not count:
                    found.append(_NO_IDS)
                    continue
                source = (one.tensor if one.derive is None else one.derive(one.tensor)).reshape(-1)
                place = self._place(start % self._size, count, source)
                place.copy_(source, non_blocking=True)
                staged.append(StagedIds(place, one.tensor, done, one.convert, start))
                found.append(late(staged[-1]))
            done.record(self._stream)
        self._staged += staged
        self._head = sum(starts[-1])
        return found

    def _place(self, start: int, count: int, source: Any) -> Any:
        """Where ``count`` ids from word ``start`` on go, as elements of ``source``'s type.

        A copy that converts would wait for the device, and a conversion before it is one more kernel to launch.
        """
        each = self._types.get(source.dtype)
        if each is None:
            each = self._types[source.dtype] = self._ring.view(source.dtype), 8 // source.element_size()
        ring, per_word = each
        first = start * per_word
        return ring[first : first + count]

    def _places(self, counts: Sequence[int]) -> list[tuple[int, int]] | None:
        """Where so many ids each go, numbered without wrapping; ``None`` if they do not all fit."""
        while self._staged and self._staged[0].free:
            self._staged.popleft()
        head, places = self._head, []
        for count in counts:
            # Never across the end of the ring.
            start = head if head % self._size + count <= self._size else head + self._size - head % self._size
            head = start + count
            places.append((start, count))
        oldest = self._staged[0].begin if self._staged else places[0][0]
        return None if head - self._size > oldest else places
