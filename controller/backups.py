"""Which prefixes are copied to host memory, when, and into which pages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.cache_controller import CacheController
from hicache_obs.controller.radix_cache import HostHold, Node, RadixCache
from hicache_obs.controller.radix_node import upwards
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.errors import OutOfPages
from hicache_obs.records import PageIds


@dataclass(slots=True)
class BackupCounters:
    """What became of host memory.

    Attributes:
        evicted_host_pages: Given up for others.
        refused_pages: Not backed up, because host memory was full of pages that may not be given up.
        retraction_pages: Of retracted requests, kept for them.
    """

    evicted_host_pages: int = 0
    refused_pages: int = 0
    retraction_pages: int = 0


@dataclass(eq=False)
class Backups:
    """The write policy, and host memory's allocator. Scheduler's thread.

    Attributes:
        controller, radix, host_pages, options: What it works with.
        on_host_alloc, on_host_free: Told of host page ownership.
        counters: What it did.
    """

    controller: CacheController
    radix: RadixCache
    host_pages: PageAllocator
    options: SchedulerOptions
    on_host_alloc: Callable[[PageIds], None] | None = None
    on_host_free: Callable[[PageIds], None] | None = None
    counters: BackupCounters = field(default_factory=BackupCounters)

    @property
    def _through(self) -> bool:
        return self.options.host_tier and self.options.write_policy == "write_through"

    def launched(self, node: Node) -> None:
        """A launched round computes the contents up to ``node``."""
        if self._through and self.options.early_backup:
            self._write(node)

    def computed(self, node: Node) -> None:
        """The contents up to ``node`` are computed, and the host knows it or soon will."""
        if self._through:
            self._write(node)
        else:
            self.used(node)

    def used(self, node: Node) -> None:
        """A request uses ``node``, whose contents a launched round computes."""
        if self.options.host_tier and self.options.write_policy == "write_through_selective":
            popular = (step for step in upwards(node) if step.uses >= self.options.write_threshold)
            chosen = next(popular, None)
            if chosen is not None:
                self._write(chosen)

    def before_drop(self, node: Node) -> None:
        """``node`` leaves the device and has no host copy: with ``write_back`` it gets one."""
        if self.options.host_tier and self.options.write_policy == "write_back":
            self._write(node, evicting=True)

    def ensure(self, node: Node) -> None:
        """Copy everything up to ``node`` to host memory, whatever the policy: something will hang below it there."""
        self._write(node)

    def retracted(self, node: Node) -> HostHold | None:
        """Copy everything up to ``node``, of a retracted request, and keep it in host memory.

        Returns:
            What keeps it there; ``None`` if not all of it fits.
        """
        self._write(node, evicting=True)
        nodes = list(upwards(node))
        if not nodes or any(step.host_pages is None for step in nodes):
            return None
        self.counters.retraction_pages += sum(len(step.tokens) for step in nodes) // self.radix.page_size
        return self.radix.hold_host([node])

    def alloc(self, count: int) -> PageIds | None:
        """``(count,) int64`` host pages, others given up for them if need be; ``None`` if there are not so many."""
        missing = count - self.host_pages.available
        if missing > 0 and missing <= self.radix.host_evictable_pages:
            freed = self.radix.evict_host(missing)
            self.counters.evicted_host_pages += len(freed)
            self.free(freed)
        try:
            pages = self.host_pages.alloc(count)
        except OutOfPages:
            self.counters.refused_pages += count
            return None
        if self.on_host_alloc is not None and count:
            self.on_host_alloc(pages)
        return pages

    def free(self, pages: PageIds) -> None:
        """Give host pages back; nobody may be using them any more."""
        if self.on_host_free is not None and len(pages):
            self.on_host_free(pages)
        self.host_pages.free(pages)

    def _write(self, node: Node, *, evicting: bool = False) -> None:
        """Queue write-backs for every node up to ``node`` that host memory does not have yet."""
        for step in self.radix.unbacked(node):
            if step.device_pages is None:
                return
            pages = self.alloc(len(step.device_pages))
            if pages is None:
                return  # host memory is full of pinned prefixes: this one is not backed up
            if evicting:
                self.controller.write_evicted(step, pages)
            else:
                self.controller.write(step, pages)
