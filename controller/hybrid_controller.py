"""The cache controller over hybrid pools, and what fences look at there: the bytes behind virtual ids."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.cache_controller import CacheController, CacheOperation, SubmittedTransfer
from hicache_obs.controller.fence_policy import EvictingCopy, FencePolicy
from hicache_obs.controller.hybrid import HybridTransferEngine
from hicache_obs.controller.layer_done import Ticket
from hicache_obs.controller.partial_pool import PartialPool, PartialPools
from hicache_obs.controller.radix_node import Node
from hicache_obs.records import Direction, Mode, PageIds, Purpose
from hicache_obs.streams.protocol import Stream

_POOL: Final = 1 << 40
"""Places of different pools, and entries of tables, are told apart by multiples of it."""


@dataclass(slots=True)
class HybridUses:
    """Who used pages last, in any pool: what a page fence asks.

    A virtual id tells little: its place in a partial pool may have been another page's a moment ago, or hold another
    role of a member that shares the bytes. So the stamps of places are asked, not those of ids.

    Attributes:
        pages: Stamps of the full-attention pool, where virtual ids are places.
        partial: The other pools.
    """

    pages: PageAllocator
    partial: PartialPools

    def last_uses(self, ids: PageIds, mode: Mode = Mode.WRITE) -> dict[int, int]:
        """See ``PageAllocator.last_uses``."""
        found = self.pages.last_uses(ids[~self.partial.parts_only[ids]], mode)
        for stream, ticket in self.partial.last_uses(ids, mode).items():
            found[stream] = max(ticket, found.get(stream, 0))
        return found


@dataclass(eq=False)
class HybridCacheController(CacheController):
    """A cache controller whose pages have parts in several pools.

    Attributes:
        table_policies: What the change of each table waits for: the rounds that may read what was there.
        partial_pools: Told of submitted load-backs.
        table_stream: Tables change there.
    """

    table_policies: Sequence[FencePolicy] = ()
    partial_pools: PartialPools | None = None
    table_stream: Stream = field(init=False)
    _touched: dict[int, PageIds] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.table_stream = self.device.Stream("translation")

    @property
    def partial(self) -> list[PartialPool]:
        """The pools that do not have a place for every page."""
        return [member.partial for member in self._hybrid.members if member.partial is not None]

    @property
    def _hybrid(self) -> HybridTransferEngine:
        assert isinstance(self.engine, HybridTransferEngine)
        return self.engine

    def load(self, node: Node, device_pages: PageIds, tenancies: PageIds) -> None:
        """See ``CacheController.load``; the pages have the places already that they are to be restored into."""
        super().load(node, device_pages, tenancies)
        for pool in self.partial:
            pool.pin(device_pages)

    def load_parts(self, node: Node) -> None:
        """Queue the load-back of what is ``arriving`` of a node that is on both tiers; otherwise as ``load``."""
        assert node.device_pages is not None
        assert node.host_pages is not None
        node.loading = True
        self._load_queue.append(CacheOperation(node, node.device_pages, node.host_pages))
        for pool in self.partial:
            pool.pin(node.device_pages)

    def write(self, node: Node, host_pages: PageIds) -> None:
        """See ``CacheController.write``; copies what there is of the pages now."""
        super().write(node, host_pages)
        assert node.device_pages is not None
        for pool in self.partial:
            pool.backed_up(node.device_pages, host_pages)
            pool.pin(node.device_pages)

    def write_evicted(self, node: Node, host_pages: PageIds) -> None:
        """See ``CacheController.write_evicted``; copies what there is of the pages now."""
        super().write_evicted(node, host_pages)
        assert node.device_pages is not None
        for pool in self.partial:
            pool.backed_up(node.device_pages, host_pages)

    def start_loading(self, step: int) -> Ticket | None:
        """See ``CacheController.start_loading``."""
        if self._load_queue:
            self.publish()
        return super().start_loading(step)

    def before_round(self, stream: Stream, pages: PageIds) -> None:
        """See ``CacheController.before_round``; the round will read the tables."""
        self.publish()
        self._hybrid.await_translations(stream)
        super().before_round(stream, pages)

    def before_overwrite(self, stream: Stream, pages: PageIds, purpose: Purpose = Purpose.PLAIN) -> None:
        """See ``CacheController.before_overwrite``; it is the bytes that count."""
        self._reuse(self.backup_policy or self.policy, stream, self.bytes_of(pages), purpose)

    def publish(self) -> None:
        """Tell the device of new places, once no round and no write-back in flight reads the old entries."""
        stream = self.table_stream
        for number, (pool, policy) in enumerate(zip(self.partial, self.table_policies, strict=True)):
            changed = pool.translation.changed
            if len(changed):
                policy.fence(stream, self.load_fence_stream, changed, Purpose.PLAIN)
                self._reuse(policy, stream, _entries(number, changed), Purpose.PLAIN)
                pool.translation.publish(stream)

    def bytes_of(self, pages: PageIds) -> PageIds:
        """Ids of the places that virtual ``pages`` have, in all pools."""
        return np.concatenate([pool * _POOL + places[places >= 0] for pool, places in self.engine.places(pages)])

    def _reuse(self, policy: FencePolicy, stream: Stream, touched: PageIds, purpose: Purpose) -> None:
        readers = [EvictingCopy(w.stream, w.finish, self._touched[w.transfer]) for w in self._writes if w.evicting]
        if readers:
            policy.reuse(stream, readers, touched, purpose)

    def _start_writing(self, queue: list[CacheOperation], step: int, *, evicting: bool) -> bool:
        if queue:
            self.publish()
        return super()._start_writing(queue, step, evicting=evicting)

    def _submitted(self, queue: deque[SubmittedTransfer], transfer: SubmittedTransfer) -> None:
        pages = transfer.device_pages
        if transfer.evicting:
            entries = [_entries(number, pages) for number in range(len(self.partial))]
            self._touched[transfer.transfer] = np.concatenate([self.bytes_of(pages), *entries])
        super()._submitted(queue, transfer)
        if transfer.direction is Direction.HOST_TO_DEVICE and self.partial_pools is not None:
            self.partial_pools.submitted(pages)

    def _release(self, done: SubmittedTransfer) -> None:
        super()._release(done)
        self._touched.pop(done.transfer, None)
        for operation in done.operations:
            if done.direction is Direction.HOST_TO_DEVICE or operation.hold is None:
                for pool in self.partial:
                    pool.unpin(operation.device_pages)


def _entries(table: int, pages: PageIds) -> PageIds:
    return pages - (table + 1) * _POOL
