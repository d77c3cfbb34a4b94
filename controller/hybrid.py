"""Hybrid pools: one model's layers in several pools, moved by one merged transfer.

The scheduler and the tree name pages by *virtual* ids. Each member pool holds some of the layers, and knows where
a virtual page is in it: under the same id, or at a physical place that a translation table names. Members may share
bytes: they then use one arena, whose slabs hold a page of either, and whose freed slabs go from one to the other.

Records name physical places, so that the arena's slabs conflict whoever uses them; the layer of an access is the place
inside the slab. The translation table is a buffer: copies read it on the device, so they wait for its newest entries.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.index_blocks import INDEX_BUFFERS
from hicache_obs.controller.model_runner import to_device
from hicache_obs.controller.page_copies import PageMap, page_copier
from hicache_obs.controller.pools import DevicePool, HostPool
from hicache_obs.controller.radix_node import Int64Array
from hicache_obs.controller.transfer_engine import PageMove, Part, TransferEngine
from hicache_obs.errors import ConfigError
from hicache_obs.records import Access, Direction, Mode, PageIds, Space, Work, device, host
from hicache_obs.streams.protocol import Device, Event, Stream

TABLE_BUFFERS: Final = 2 * INDEX_BUFFERS
"""Ids of translation tables among the buffers in records, from here on: by member."""


class Translation:
    """Where the virtual pages of one member are. Scheduler's thread; never blocks.

    Attributes:
        table: ``(pages,) int64``, device: physical page of each virtual one.
        ready: Recorded after the newest change of the table.
    """

    def __init__(self, on: Device, pages: int, slabs: PageAllocator, *, number: int) -> None:
        """``slabs`` may be shared with other members; ``number`` of the table among the buffers."""
        self.table = torch.zeros(pages, dtype=torch.int64, device=on.torch_device)
        self.ready: Event = on.Event()
        self.buffer: PageIds = np.array([TABLE_BUFFERS + number], np.int64)
        self._device = on
        self._slabs = slabs
        self._mirror: Int64Array = np.full(pages, -1, np.int64)

    def places(self, pages: PageIds) -> PageIds:
        """``(n,) int64`` physical pages of virtual ones, as of now."""
        return self._mirror[pages]

    def assign(self, pages: PageIds, stream: Stream) -> None:
        """Give virtual pages a place each; the table changes on ``stream``, behind the rounds that read old entries.

        Raises:
            OutOfPages: There are not so many places.
        """
        self._mirror[pages] = places = self._slabs.alloc(len(pages))
        work = Work("page translation", (Access(Space.BUFFER, Mode.WRITE, self.buffer),), size_bytes=places.nbytes)
        with self._device.stream(stream):
            self._device.launch(lambda: self._store(pages, places), work)
            self.ready.record()

    def release(self, pages: PageIds) -> None:
        """Give the places of virtual pages back; what still runs may use them. Partner of ``assign``."""
        self._slabs.free(self._mirror[pages])
        self._mirror[pages] = -1

    def _store(self, pages: PageIds, places: PageIds) -> None:
        where = self._device.torch_device
        self.table.index_copy_(0, to_device(pages, where), to_device(places, where))


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One pool of a hybrid.

    Attributes:
        name: For messages.
        layers: Model layers it holds, in the order of its own; they may be fewer than its pool has.
        device_pool, host_pool: Its memory; host pages have the ids of the scheduler.
        pool, host_number: Numbers of the pools in records; members that share bytes share ``pool``.
        translation: ``None`` if virtual ids are places.
    """

    name: str
    layers: tuple[int, ...]
    device_pool: DevicePool
    host_pool: HostPool
    pool: int = 0
    host_number: int = 0
    translation: Translation | None = None

    def __post_init__(self) -> None:
        for tier, has in (("device", self.device_pool.layout.layers), ("host", self.host_pool.layout.layers)):
            if has < len(self.layers):
                raise ConfigError(
                    f"member {self.name}: {len(self.layers)} layers; its {tier} pool has {has}, expected at least that"
                )

    def places(self, pages: PageIds) -> PageIds:
        """Physical pages of virtual ones."""
        return pages if self.translation is None else self.translation.places(pages)

    def accesses(self, mode: Mode, pages: PageIds) -> Access:
        """What an operation that uses virtual ``pages`` says of them."""
        return device(mode, self.places(pages), pool=self.pool)


class HybridTransferEngine(TransferEngine):
    """Moves the pages of all members at once: one start, one end, a copy per model layer and pool.

    Args:
        on: The device.
        members: Every model layer belongs to exactly one of them.
        io: As in ``TransferEngine``.

    Attributes:
        members: They.

    Raises:
        ConfigError: A layer has no member, or several.
    """

    def __init__(self, on: Device, members: Sequence[Member], *, io: str | None = None) -> None:
        super().__init__(on, members[0].device_pool, members[0].host_pool, io=io)
        owned = sorted(layer for member in members for layer in member.layers)
        if owned != list(range(len(owned))):
            raise ConfigError(f"hybrid pools: layers {owned}; expected each of 0..{max(owned)} exactly once")
        self.members = tuple(members)
        self._layers = len(owned)
        self._owner = {layer: (member, place) for member in self.members for place, layer in enumerate(member.layers)}

    def submit_host_to_device(
        self, move: PageMove, *, start_event: Event, on_layer_done: Callable[[int], None]
    ) -> Event:
        """See ``TransferEngine.submit_host_to_device``."""
        self.await_translations(self.host_to_device_stream)
        return super().submit_host_to_device(move, start_event=start_event, on_layer_done=on_layer_done)

    def submit_device_to_host(self, move: PageMove, *, start_event: Event) -> Event:
        """See ``TransferEngine.submit_device_to_host``."""
        self.await_translations(self.device_to_host_stream)
        return super().submit_device_to_host(move, start_event=start_event)

    def await_translations(self, stream: Stream) -> None:
        """``stream`` waits for the newest entries of all tables, where copies read them on the device."""
        for member in self.members:
            if member.translation is not None and self.io == "kernel":
                stream.wait_event(member.translation.ready)

    @property
    def model_layers(self) -> int:
        """See ``TransferEngine.model_layers``."""
        return self._layers

    def load_parts(self, move: PageMove) -> Sequence[Sequence[Part]]:
        """See ``TransferEngine.load_parts``."""
        parts = []
        for layer in range(self._layers):
            member, place = self._owner[layer]
            parts.append((self._part(member, (place, place + 1), move, to_device=True),))
        return parts

    def store_parts(self, move: PageMove) -> Sequence[Part]:
        """One copy per member."""
        return [self._part(member, (0, len(member.layers)), move, to_device=False) for member in self.members]

    def _part(self, member: Member, layers: tuple[int, int], move: PageMove, *, to_device: bool) -> Part:
        reads, writes = Mode.READ, Mode.WRITE
        accesses = [
            member.accesses(writes if to_device else reads, move.device_pages),
            host(reads if to_device else writes, move.host_pages, pool=member.host_number),
            *self.index_accesses(move),
        ]
        if member.translation is not None and self.io == "kernel":
            accesses.append(Access(Space.BUFFER, reads, member.translation.buffer))
        work = Work(
            site="load-back copy" if to_device else "write-back copy",
            accesses=tuple(accesses),
            layers=layers,
            group=move.transfer,
            direction=Direction.HOST_TO_DEVICE if to_device else Direction.DEVICE_TO_HOST,
            size_bytes=len(move.device_pages)
            * (layers[1] - layers[0])
            * member.device_pool.layout.page_bytes_per_layer,
        )
        copier = page_copier(self.io, member.device_pool.buffers, member.host_pool.buffers, layers, to_device=to_device)
        places = member.places(move.device_pages)
        translation = member.translation

        def copy() -> None:
            index = move.device_index if translation is None else translation.table.index_select(0, move.device_index)
            copier(PageMap(places, move.host_pages, index, move.host_index))

        return Part(copy, work)
