"""Hybrid pools: one model's layers in several pools, moved by one merged transfer.

The scheduler and the tree name pages by *virtual* ids. Each member pool holds some of the layers, and knows where
a virtual page is in it: under the same id, or at a physical place that a translation table names. Members may share
bytes: they then use one arena, whose slabs hold a page of either, and whose freed slabs go from one to the other.

Records name physical places, so that the arena's slabs conflict whoever uses them; the layer of an access is the place
inside the slab. The entries of a translation table are buffers: copies read them on the device, so they wait for the
newest ones. Of a partial pool a transfer moves only the pages that have their part there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from hicache_obs.controller.model_runner import to_device
from hicache_obs.controller.page_copies import PageMap, page_copier
from hicache_obs.controller.partial_pool import BoolArray, PartialPool
from hicache_obs.controller.pools import DevicePool, HostPool
from hicache_obs.controller.transfer_engine import PageMove, Part, TransferEngine
from hicache_obs.controller.translation import Translation
from hicache_obs.errors import ConfigError
from hicache_obs.records import Access, Direction, Mode, PageIds, Work, device, host
from hicache_obs.streams.protocol import Device, Event, Stream


@dataclass(frozen=True, slots=True, eq=False)
class Member:
    """One pool of a hybrid.

    Attributes:
        name: For messages.
        layers: Model layers it holds, in the order of its own; they may be fewer than its pool has.
        device_pool, host_pool: Its memory; host pages have the ids of the scheduler.
        pool, host_number: Numbers of the pools in records; members that share bytes share ``pool``.
        translation: ``None`` if virtual ids are places.
        partial: Which pages have their part in this pool; ``None`` if all have.
    """

    name: str
    layers: tuple[int, ...]
    device_pool: DevicePool
    host_pool: HostPool
    pool: int = 0
    host_number: int = 0
    translation: Translation | None = None
    partial: PartialPool | None = None

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

    def moved(self, move: PageMove, *, to_device: bool) -> BoolArray:
        """``(n,) bool``: which pages of a transfer have a part in this pool."""
        if self.partial is None:
            return np.ones(len(move.device_pages), np.bool_)
        if to_device:
            return self.partial.arriving[move.device_pages]
        return self.partial.host_has[move.host_pages]


class HybridTransferEngine(TransferEngine):
    """Moves the pages of all members at once: one start, one end, a copy per model layer and pool.

    Args:
        on: The device.
        members: Every model layer belongs to exactly one of them.
        io: As in ``TransferEngine``.

    Attributes:
        members: They.
        parts_only: As of ``PartialPools``: pages that are not moved in pools that have all pages.

    Raises:
        ConfigError: A layer has no member, or several.
    """

    def __init__(self, on: Device, members: Sequence[Member], *, io: str | None = None) -> None:
        super().__init__(on, members[0].device_pool, members[0].host_pool, io=io)
        owned = sorted(layer for member in members for layer in member.layers)
        if owned != list(range(len(owned))):
            raise ConfigError(f"hybrid pools: layers {owned}; expected each of 0..{max(owned)} exactly once")
        self.members = tuple(members)
        self.parts_only: BoolArray | None = None
        self._layers = len(owned)
        self._owner = {layer: (member, place) for member in self.members for place, layer in enumerate(member.layers)}

    def submit_host_to_device(
        self, move: PageMove, *, start_event: Event, on_layer_done: Callable[[int], None]
    ) -> Event:
        """See ``TransferEngine.submit_host_to_device``."""
        if self.io == "kernel":
            self.await_translations(self.host_to_device_stream)
        return super().submit_host_to_device(move, start_event=start_event, on_layer_done=on_layer_done)

    def submit_device_to_host(self, move: PageMove, *, start_event: Event) -> Event:
        """See ``TransferEngine.submit_device_to_host``."""
        if self.io == "kernel":
            self.await_translations(self.device_to_host_stream)
        return super().submit_device_to_host(move, start_event=start_event)

    def await_translations(self, stream: Stream) -> None:
        """``stream`` waits for the newest entries of all tables: what runs there next reads them on the device."""
        for member in self.members:
            if member.translation is not None:
                stream.wait_event(member.translation.ready)

    @property
    def model_layers(self) -> int:
        """See ``TransferEngine.model_layers``."""
        return self._layers

    def places(self, pages: PageIds) -> Sequence[tuple[int, PageIds]]:
        """See ``TransferEngine.places``."""
        return [(member.pool, member.places(pages)) for member in self.members]

    def load_parts(self, move: PageMove) -> Sequence[Sequence[Part]]:
        """See ``TransferEngine.load_parts``."""
        moved = {id(member): member.moved(move, to_device=True) for member in self.members}
        if self.parts_only is not None:
            for member in self.members:
                if member.partial is None:
                    moved[id(member)] &= ~self.parts_only[move.device_pages]
        parts = []
        for layer in range(self._layers):
            member, place = self._owner[layer]
            parts.append(self._parts(member, (place, place + 1), move, moved[id(member)], to_device=True))
        return parts

    def store_parts(self, move: PageMove) -> Sequence[Part]:
        """One copy per member."""
        parts: list[Part] = []
        for member in self.members:
            moved = member.moved(move, to_device=False)
            parts += self._parts(member, (0, len(member.layers)), move, moved, to_device=False)
        return parts

    def _parts(
        self, member: Member, layers: tuple[int, int], move: PageMove, moved: BoolArray, *, to_device: bool
    ) -> Sequence[Part]:
        """The copy of the pages that ``moved`` says, if there is any."""
        if not moved.any():
            return ()
        reads, writes = Mode.READ, Mode.WRITE
        virtual, host_pages = move.device_pages[moved], move.host_pages[moved]
        accesses = [
            member.accesses(writes if to_device else reads, virtual),
            host(reads if to_device else writes, host_pages, pool=member.host_number),
            *self.index_accesses(move),
        ]
        if member.translation is not None and self.io == "kernel":
            accesses.append(member.translation.reads(virtual))
        work = Work(
            site="load-back copy" if to_device else "write-back copy",
            accesses=tuple(accesses),
            layers=layers,
            group=move.transfer,
            direction=Direction.HOST_TO_DEVICE if to_device else Direction.DEVICE_TO_HOST,
            size_bytes=len(virtual) * (layers[1] - layers[0]) * member.device_pool.layout.page_bytes_per_layer,
        )
        copier = page_copier(self.io, member.device_pool.buffers, member.host_pool.buffers, layers, to_device=to_device)
        return (Part(self._copy_of(member, move, moved, copier), work),)

    def _copy_of(
        self, member: Member, move: PageMove, moved: BoolArray, copier: Callable[[PageMap], None]
    ) -> Callable[[], None]:
        places, host_pages = member.places(move.device_pages[moved]), move.host_pages[moved]
        chosen = None if moved.all() else np.flatnonzero(moved)
        translation = member.translation

        def copy() -> None:
            index = move.device_index
            if chosen is not None:
                index = index.index_select(0, to_device(chosen, self.device.torch_device))
            if translation is not None:
                index = translation.table.index_select(0, index)
            copier(PageMap(places, host_pages, index, to_device(host_pages, "cpu")))

        return copy
