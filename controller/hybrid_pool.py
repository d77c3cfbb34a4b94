"""The pools of a hybrid as one round sees them: model layers, virtual pages."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.controller.hybrid import Member
from hicache_obs.controller.pools import KVLayout
from hicache_obs.records import Access, Mode


class HybridDevicePool:
    """A ``RoundPool`` over several members; what reads or writes pages is for launched functions, as of ``DevicePool``.

    Virtual pages and slots are looked up in the members' tables on the device, so a round reads the entries that were
    published before it.

    Attributes:
        layout: All layers, and as many pages as there are virtual ones.
    """

    def __init__(self, members: Sequence[Member], layout: KVLayout) -> None:
        """``members`` that are partial stand for ``ForwardBatch.partial`` in their order."""
        self.layout = layout
        self._partial = [member for member in members if member.partial is not None]
        self._owner = {layer: (member, place) for member in members for place, layer in enumerate(member.layers)}

    def partial(self, layer: int) -> int | None:
        """See ``RoundPool``."""
        member, _ = self._owner[layer]
        return None if member.partial is None else self._partial.index(member)

    def window(self, layer: int) -> int:
        """See ``RoundPool``; 0 for a layer with a state, too."""
        member, _ = self._owner[layer]
        return 0 if member.partial is None or member.partial.state else member.partial.window

    def state(self, layer: int) -> bool:
        """See ``RoundPool``."""
        member, _ = self._owner[layer]
        return member.partial is not None and member.partial.state

    def segments(self) -> Sequence[tuple[int, int]]:
        """See ``RoundPool``: runs of layers of one member."""
        owners = [self._owner[layer][0] for layer in range(self.layout.layers)]
        starts = [layer for layer, owner in enumerate(owners) if not layer or owner is not owners[layer - 1]]
        return list(zip(starts, [*starts[1:], len(owners)], strict=True))

    def touched(self, batch: ForwardBatch, first: int, end: int) -> tuple[tuple[int, int], tuple[Access, ...]]:
        """See ``RoundPool``; on the scheduler's thread. The layers are one member's, and count in its pool."""
        member, place = self._owner[first]
        part = batch if member.partial is None else batch.partial[self._partial.index(member)]
        accesses = [member.accesses(Mode.READ, part.read_pages), member.accesses(Mode.WRITE, part.write_pages)]
        if member.translation is not None:
            accesses.append(member.translation.reads(np.union1d(part.read_pages, part.write_pages)))
        return (place, place + end - first), tuple(accesses)

    def read(self, part: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """See ``RoundPool``."""
        member, place = self._owner[layer]
        return member.device_pool.read(part, place, self._slots(member, slots))

    def read_pages(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``RoundPool``."""
        member, place = self._owner[layer]
        return member.device_pool.read_pages(place, _places(member, pages))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See ``RoundPool``."""
        member, place = self._owner[layer]
        member.device_pool.write(place, self._slots(member, slots), k, v)

    def write_pages(self, layer: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See ``RoundPool``."""
        member, place = self._owner[layer]
        member.device_pool.write_pages(place, _places(member, pages), k, v)

    def _slots(self, member: Member, slots: torch.Tensor) -> torch.Tensor:
        if member.translation is None:
            return slots
        size = self.layout.page_size
        page = slots.div(size, rounding_mode="floor")
        return _places(member, page) * size + slots.remainder(size)


def _places(member: Member, pages: torch.Tensor) -> torch.Tensor:
    return pages if member.translation is None else member.translation.table.index_select(0, pages)
