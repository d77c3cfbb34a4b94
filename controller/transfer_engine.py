"""Moves KV pages between the device pool and the pinned host pool, on two streams of its own.

One stream per direction, so load-backs and write-backs overlap each other and the forward stream. The engine
orders nothing against forward rounds: fences are the cache controller's business.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from hicache_obs.controller.index_blocks import IndexBlock, IndexBlocks
from hicache_obs.controller.page_copies import IO_BACKENDS, PageMap, page_copier
from hicache_obs.controller.pools import DevicePool, HostPool
from hicache_obs.errors import ConfigError
from hicache_obs.records import Access, Direction, Mode, PageIds, Purpose, Space, Work, device, host
from hicache_obs.streams.protocol import Device, Event, Stream


@dataclass(frozen=True, slots=True, eq=False)
class PageMove(PageMap):
    """Pages of one merged transfer, index tensors included.

    Attributes:
        transfer: Transfer id, unique over both directions.
        block: Holds ``device_index``, which is filled on the stream that was current when the move was prepared.
    """

    transfer: int
    block: IndexBlock

    @property
    def index_buffer(self) -> PageIds:
        """Id of the device index tensor among the buffers."""
        return np.array([self.block.number], dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """One copy of a transfer: what it does and what it says of itself."""

    copy: Callable[[], None]
    work: Work


class TransferEngine:
    """Submits layer copies. Called by the scheduler's thread; never blocks.

    Attributes:
        device, device_pool, host_pool: What it moves pages on and between.
        io: Back end of the copies, one of ``IO_BACKENDS``; default: ``direct`` on a GPU, else ``kernel``.
        blocks: Memory of the index tensors.
        host_to_device_stream, device_to_host_stream: The only streams copies run on. A fence for a load-back
            belongs on the first, a fence for a write-back on the second.
        launched_copies: Copies launched so far, both directions.
    """

    def __init__(self, device: Device, device_pool: DevicePool, host_pool: HostPool, *, io: str | None = None) -> None:
        if io is not None and io not in IO_BACKENDS:
            raise ConfigError(f"--io {io}: unknown back end; expected one of {', '.join(IO_BACKENDS)}")
        self.device = device
        self.io = io or ("direct" if device.name == "cuda" else "kernel")
        self.blocks = IndexBlocks(device)
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
        with self.device.stream(stream):
            stream.wait_event(start_event, purpose=Purpose.START)
            for layer, parts in enumerate(self.load_parts(move)):
                self._launch(parts)
                on_layer_done(layer)
            return self._finish(move, stream)

    def submit_device_to_host(self, move: PageMove, *, start_event: Event) -> Event:
        """Launch one copy of all layers; it starts after ``start_event``. Returns the event recorded after it."""
        stream = self.device_to_host_stream
        with self.device.stream(stream):
            stream.wait_event(start_event, purpose=Purpose.START)
            self._launch(self.store_parts(move))
            return self._finish(move, stream)

    @property
    def model_layers(self) -> int:
        """Layers that a load-back restores, each with an event of its own."""
        return self.device_pool.layout.layers

    def places(self, pages: PageIds) -> Sequence[tuple[int, PageIds]]:
        """Where device ``pages`` are, pool by pool: its number in records, and a place for each, -1 for none."""
        return [(0, pages)]

    def load_parts(self, move: PageMove) -> Sequence[Sequence[Part]]:
        """The copies of a load-back, layer by layer."""
        layout = self.device_pool.layout
        accesses = (
            host(Mode.READ, move.host_pages),
            device(Mode.WRITE, move.device_pages),
            *self.index_accesses(move),
        )
        parts = []
        for layer in range(layout.layers):
            work = Work(
                site="load-back copy",
                accesses=accesses,
                layers=(layer, layer + 1),
                group=move.transfer,
                direction=Direction.HOST_TO_DEVICE,
                size_bytes=len(move.device_pages) * layout.page_bytes_per_layer,
            )
            parts.append((Part(self._copy((layer, layer + 1), move, to_device=True), work),))
        return parts

    def store_parts(self, move: PageMove) -> Sequence[Part]:
        """The copies of a write-back."""
        layout = self.device_pool.layout
        work = Work(
            site="write-back copy",
            accesses=(
                device(Mode.READ, move.device_pages),
                host(Mode.WRITE, move.host_pages),
                *self.index_accesses(move),
            ),
            layers=(0, layout.layers),
            group=move.transfer,
            direction=Direction.DEVICE_TO_HOST,
            size_bytes=len(move.device_pages) * layout.page_bytes,
        )
        return (Part(self._copy((0, layout.layers), move, to_device=False), work),)

    def index_accesses(self, move: PageMove) -> tuple[Access, ...]:
        """What a copy reads besides pages: back end ``direct`` has the ids from the host."""
        return (Access(Space.BUFFER, Mode.READ, move.index_buffer),) if self.io == "kernel" else ()

    def _copy(self, layers: tuple[int, int], move: PageMove, *, to_device: bool) -> Callable[[], None]:
        copier = page_copier(self.io, self.device_pool.buffers, self.host_pool.buffers, layers, to_device=to_device)
        return partial(copier, move)

    def _launch(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self.device.launch(part.copy, part.work)
            self.launched_copies += 1

    def _finish(self, move: PageMove, stream: Stream) -> Event:
        """Give the index tensor's block back, marked with ``stream``, which still reads it."""
        self.blocks.mark(move.block, stream)
        self.blocks.give_back(move.block, move.transfer)
        return stream.record_event()
