"""Moves KV pages between the device pool and the pinned host pool, on two streams of its own.

One stream per direction, so load-backs and write-backs overlap each other and the forward stream. The engine
orders nothing against forward rounds: fences are the cache controller's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hicache_obs.controller.pools import DevicePool, HostPool
from hicache_obs.records import Access, Direction, Mode, PageIds, Purpose, Space, Work, device, host
from hicache_obs.streams.protocol import Device, Event, Stream

INDEX_BUFFERS: Final = 4096
"""Index buffers get ids modulo this; a transfer is acknowledged long before its id comes round again."""


@dataclass(frozen=True, slots=True, eq=False)
class PageMove:
    """Pages of one merged transfer, index tensors included.

    Attributes:
        transfer: Transfer id, unique over both directions.
        device_pages, host_pages: ``(n,) int64``, host memory, matching by position.
        device_index, host_index: ``(n,) int64`` tensors the copies read: the first on the device, the second in
            host memory. Filled on the stream that was current when the move was prepared.
    """

    transfer: int
    device_pages: PageIds
    host_pages: PageIds
    device_index: torch.Tensor
    host_index: torch.Tensor

    @property
    def index_buffer(self) -> PageIds:
        """Id of the device index tensor among the buffers."""
        return np.array([self.transfer % INDEX_BUFFERS], dtype=np.int64)


class TransferEngine:
    """Submits layer copies. Called by the scheduler's thread; never blocks.

    Attributes:
        host_to_device_stream, device_to_host_stream: The only streams copies run on. A fence for a load-back
            belongs on the first, a fence for a write-back on the second.
        launched_copies: Copies launched so far, both directions.
    """

    def __init__(self, device: Device, device_pool: DevicePool, host_pool: HostPool) -> None:
        self.device = device
        self.device_pool = device_pool
        self.host_pool = host_pool
        self.host_to_device_stream: Stream = device.Stream("load-back")
        self.device_to_host_stream: Stream = device.Stream("write-back")
        self.launched_copies = 0

    def submit_host_to_device(
        self, move: PageMove, *, start_event: Event, on_layer_done: Callable[[int], None]
    ) -> Event:
        """Launch one copy per layer, lowest first, each followed by ``on_layer_done(layer)``.

        Args:
            move: Its index tensors are ready once ``start_event`` is complete.
            start_event: The copies start after it.
            on_layer_done: Called right after each layer's copy is launched, the load-back stream being current:
                the place to record that layer's event.

        Returns:
            Event recorded after the last copy.
        """
        stream = self.host_to_device_stream
        accesses = (
            host(Mode.READ, move.host_pages),
            device(Mode.WRITE, move.device_pages),
            Access(Space.BUFFER, Mode.READ, move.index_buffer),
        )
        layout = self.device_pool.layout
        with self.device.stream(stream):
            stream.wait_event(start_event, purpose=Purpose.START)
            for layer in range(layout.layers):
                work = Work(
                    site="load-back copy",
                    accesses=accesses,
                    layers=(layer, layer + 1),
                    group=move.transfer,
                    direction=Direction.HOST_TO_DEVICE,
                    size_bytes=len(move.device_pages) * layout.page_bytes_per_layer,
                )
                self.device.launch(self._load(move, layer), work)
                self.launched_copies += 1
                on_layer_done(layer)
            self.device.record_stream(move.device_index, stream)
            return stream.record_event()

    def submit_device_to_host(self, move: PageMove, *, start_event: Event) -> Event:
        """Launch one copy of all layers; it starts after ``start_event``. Returns the event recorded after it."""
        stream = self.device_to_host_stream
        layout = self.device_pool.layout
        work = Work(
            site="write-back copy",
            accesses=(
                device(Mode.READ, move.device_pages),
                host(Mode.WRITE, move.host_pages),
                Access(Space.BUFFER, Mode.READ, move.index_buffer),
            ),
            layers=(0, layout.layers),
            group=move.transfer,
            direction=Direction.DEVICE_TO_HOST,
            size_bytes=len(move.device_pages) * layout.page_bytes,
        )
        with self.device.stream(stream):
            stream.wait_event(start_event, purpose=Purpose.START)
            self.device.launch(self._store(move), work)
            self.launched_copies += 1
            self.device.record_stream(move.device_index, stream)
            return stream.record_event()

    def _load(self, move: PageMove, layer: int) -> Callable[[], None]:
        pool, source = self.device_pool, self.host_pool

        def copy() -> None:
            for to, by in ((pool.k[layer], source.k[layer]), (pool.v[layer], source.v[layer])):
                if to.device.type == "cpu":
                    to.index_copy_(0, move.device_index, by.index_select(0, move.host_index))
                else:
                    for d, h, n in _runs(move.device_pages, move.host_pages):
                        to[d : d + n].copy_(by[h : h + n], non_blocking=True)

        return copy

    def _store(self, move: PageMove) -> Callable[[], None]:
        pool, target = self.device_pool, self.host_pool

        def copy() -> None:
            for to, by in ((target.k, pool.k), (target.v, pool.v)):
                if by.device.type == "cpu":
                    to.index_copy_(1, move.host_index, by.index_select(1, move.device_index))
                else:
                    for d, h, n in _runs(move.device_pages, move.host_pages):
                        to[:, h : h + n].copy_(by[:, d : d + n], non_blocking=True)

        return copy


def _runs(device_pages: PageIds, host_pages: PageIds) -> list[tuple[int, int, int]]:
    """``(device, host, count)`` runs that are contiguous on both sides: one asynchronous copy each.

    On a GPU the pinned source has to be read when the copy executes, not when it is issued, so pages are copied
    straight from the pool and never gathered on the host.
    """
    if not len(device_pages):
        return []
    breaks = np.flatnonzero((np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(device_pages)]
    return [(int(device_pages[a]), int(host_pages[a]), b - a) for a, b in zip(starts, ends, strict=True)]
