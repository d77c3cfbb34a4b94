"""Virtual page ids: which of them have a place in a pool, and where; on the host, and in a table that the device reads.

The host knows a new place at once. The device learns it when the changes are *published*: written into the table, on a
stream of its own. That gives a table two order rules:

* An entry is written after the rounds and copies in flight that read what was there: the page may have been another's.
* A round or a copy reads the table after the newest publication.

A place that is taken away stays in the table until the entry gets another one: nobody may read an entry without a
place.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.index_blocks import INDEX_BUFFERS
from hicache_obs.controller.model_runner import to_device
from hicache_obs.controller.page_stamps import PageStamps
from hicache_obs.controller.pools import synchronize
from hicache_obs.controller.radix_node import Int64Array
from hicache_obs.records import Access, Mode, PageIds, Space, Work
from hicache_obs.streams.protocol import Device, Event, Stream

TABLE_BUFFERS: Final = 2 * INDEX_BUFFERS
"""Ids of table entries among the buffers in records, from here on: by table and virtual page."""


class Translation:
    """Where the virtual pages of one member are. Scheduler's thread; never blocks.

    Attributes:
        slabs: Gives the places; may be shared with other tables.
        entries_used: Who read the entry of each virtual page last.
        table: ``(pages,) int64``, device: place of each virtual page that has one.
        ready: Recorded after the newest change of the table.
        published: Changes of the table so far, launches.
    """

    def __init__(self, on: Device, pages: int, slabs: PageAllocator, *, number: int) -> None:
        """``pages`` virtual ids without places; ``number`` of the table among those of its engine."""
        self.slabs = slabs
        self.entries_used = PageStamps(pages, name=f"{slabs.name} table")
        self.table = torch.zeros(pages, dtype=torch.int64, device=on.torch_device)
        self.ready: Event = on.Event()
        self.published = 0
        self._device = on
        self._places: Int64Array = np.full(pages, -1, np.int64)
        self._first_entry = TABLE_BUFFERS + number * pages
        self._changed: list[PageIds] = []
        synchronize(self.table.device)

    @property
    def changed(self) -> PageIds:
        """``(n,) int64`` virtual pages, ascending, whose places the device does not know yet."""
        pages: PageIds = np.unique(np.concatenate(self._changed)) if self._changed else np.empty(0, np.int64)
        return pages[self._places[pages] >= 0]

    def here(self, pages: PageIds) -> npt.NDArray[np.bool_]:
        """``(n,) bool``: which virtual pages have a place."""
        return self._places[pages] >= 0

    def places(self, pages: PageIds) -> PageIds:
        """``(n,) int64`` places of virtual pages as of now, -1 without."""
        return self._places[pages]

    def resident(self) -> PageIds:
        """``(n,) int64`` virtual pages with a place, ascending."""
        found: PageIds = np.flatnonzero(self._places >= 0)
        return found

    def entries(self, pages: PageIds) -> PageIds:
        """Ids of the table's entries among the buffers in records."""
        return pages + self._first_entry

    def reads(self, pages: PageIds) -> Access:
        """What an operation says that reads the entries of virtual ``pages``."""
        return Access(Space.BUFFER, Mode.READ, self.entries(pages))

    def assign(self, pages: PageIds) -> None:
        """Give virtual pages without a place one each; ``publish`` tells the device. Partner of ``release``.

        Raises:
            OutOfPages: There are not so many places.
        """
        self._places[pages] = self.slabs.alloc(len(pages))
        self._changed.append(pages.copy())

    def release(self, pages: PageIds, *, cold: bool = False) -> None:
        """Take the places of virtual pages away; what still runs may use them. ``cold``: as in ``PageAllocator``."""
        self.slabs.free(self._places[pages], cold=cold)
        self._places[pages] = -1

    def hand_over(self, old: PageIds, new: PageIds) -> None:
        """The places of ``old`` become those of ``new``, which have none, pair by pair."""
        self._places[new] = self._places[old]
        self._places[old] = -1
        self._changed.append(new.copy())

    def publish(self, stream: Stream) -> None:
        """Write all changes into the table, on ``stream``, which was made to wait for who reads the old entries."""
        pages = self.changed
        self._changed.clear()
        if not len(pages):
            return
        places = self._places[pages]
        work = Work(
            site="page translation",
            accesses=(Access(Space.BUFFER, Mode.WRITE, self.entries(pages)),),
            size_bytes=places.nbytes,
        )
        with self._device.stream(stream):
            self._device.launch(lambda: self._store(pages, places), work)
            self.ready.record()
        self.published += 1

    def _store(self, pages: PageIds, places: PageIds) -> None:
        where = self._device.torch_device
        self.table.index_copy_(0, to_device(pages, where), to_device(places, where))
