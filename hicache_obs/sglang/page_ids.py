"""Page ids out of an engine's index tensors, without ever making the engine's thread wait.

A host tensor is read at once. A device tensor is copied to pinned host memory on a stream of our own, behind an
event of the stream that makes it, and read by the flusher once the copy is over: ``.cpu()``, ``.item()`` or
``.tolist()`` of a device tensor would block the launching thread until the device is idle.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_obs.recorder.hold_back import late
from hicache_obs.records import PageIds, slot_list_head

DEFAULT_RING_IDS: Final = 1 << 20
_NO_IDS: Final[PageIds] = np.zeros(0, dtype=np.int64)


ToWords: TypeAlias = Callable[[PageIds], PageIds]
"""Makes the slot list of the numbers that were read; a ``Convert`` or a ``ConvertRows``."""


class TensorDevice(Protocol):
    """The part of a torch device module that copies need; ``torch.cuda`` has it."""

    def Stream(self) -> Any: ...  # noqa: N802 torch's name

    def Event(self) -> Any: ...  # noqa: N802 torch's name

    def current_stream(self) -> Any: ...

    def stream(self, stream: Any) -> AbstractContextManager[Any]: ...


class Convert:
    """How an index tensor becomes a slot list (``records.unpack_slots``).

    Args:
        page_size: Slots per page of the pool; 1 if the tensor holds page ids already.
        first_slots_only, skip_zero: See ``slot_list_head``.
    """

    __slots__ = ("_head",)

    def __init__(self, page_size: int, *, first_slots_only: bool = False, skip_zero: bool = False) -> None:
        self._head = slot_list_head(page_size, first_slots_only=first_slots_only, skip_zero=skip_zero)

    def __call__(self, slots: PageIds) -> PageIds:
        """The slot list, a fresh ``(3 + n,) int64``; pages are made of it by whoever reads the ring."""
        return np.concatenate((self._head, slots), dtype=np.int64, casting="unsafe")


@lru_cache(maxsize=256)
def convert(page_size: int, *, first_slots_only: bool = False, skip_zero: bool = False) -> Convert:
    """The ``Convert`` of these arguments."""
    return Convert(page_size, first_slots_only=first_slots_only, skip_zero=skip_zero)


class ConvertRows:
    """How rows of a request table, one entry per page, become a slot list.

    Args:
        page_size: Slots per page.
        lengths: ``(rows,)`` slots each row has.
    """

    __slots__ = ("_head", "_lengths")

    def __init__(self, page_size: int, lengths: npt.NDArray[np.integer[Any]]) -> None:
        self._head = _rows_head(page_size, len(lengths))
        self._lengths = lengths

    def __call__(self, slots: PageIds) -> PageIds:
        """As ``Convert``."""
        return np.concatenate((self._head, self._lengths, slots), dtype=np.int64, casting="unsafe")


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
        self._ring: Any = None
        self._stream: Any = None
        self._lock = threading.Lock()
        self._head = 0
        self._staged: deque[StagedIds] = deque()

    def read(
        self,
        tensor: Any,
        convert: ToWords,
        *,
        derive: Callable[[Any], Any] | None = None,
        count: int | None = None,
    ) -> PageIds | None:
        """Slot list of ``tensor``: at once for a host tensor, a late one for a device tensor.

        Args:
            tensor: Integer tensor of slots or page ids, any shape.
            derive: Makes the tensor to read out of ``tensor``; device work it launches goes to our own stream.
            count: How many elements ``derive`` gives.

        Returns:
            ``None`` if the pinned ring has no room: the record is lost, and the caller says so.
        """
        if tensor.device.type == "cpu":
            return convert((tensor if derive is None else derive(tensor)).numpy().reshape(-1))
        wanted = tensor.numel() if count is None else count
        if not wanted:
            return _NO_IDS
        with self._lock:
            staged = self._stage(tensor, convert, derive, wanted)
        if staged is None:
            return None
        self.on_late()
        return late(staged)

    def _stage(
        self, tensor: Any, convert: ToWords, derive: Callable[[Any], Any] | None, count: int
    ) -> StagedIds | None:
        device = self._device()
        if self._stream is None:
            self._ring = self._pinned(self._size)
            self._stream = device.Stream()
        start = self._place(count)
        if start is None:
            return None
        place = self._ring[start % self._size : start % self._size + count]
        made = device.Event()
        made.record(device.current_stream())
        done = device.Event()
        with device.stream(self._stream):
            made.wait(self._stream)
            source = (tensor if derive is None else derive(tensor)).reshape(-1)
            # The element type is changed on the device: a copy that converts would wait for it.
            place.copy_(source.long(), non_blocking=True)
            done.record(self._stream)
        staged = StagedIds(place, tensor, done, convert, start)
        self._staged.append(staged)
        self._head = start + count
        return staged

    def _place(self, count: int) -> int | None:
        """Where the next ``count`` ids go, numbered without wrapping; never across the end of the ring."""
        while self._staged and self._staged[0].free:
            self._staged.popleft()
        start = self._head
        if start % self._size + count > self._size:
            start += self._size - start % self._size
        full = bool(self._staged) and start + count - self._size > self._staged[0].begin
        return None if full or count > self._size else start
