"""The scheduler's side of the third tier: what to look for in storage, what to keep there, and when to wait.

Life of a prefetch: a waiting request's missing pages are looked up by key; as many as were found get host pages, which
a storage thread fills; those that arrived whole go into the tree as host-only nodes, and admission restores them like
any other. Life of a backup: once a write-back is known to be complete, its host pages are held and handed to a storage
thread; the reply ends the hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache_obs.controller.agreed_replies import AgreedReplies
from hicache_obs.controller.backups import Backups
from hicache_obs.controller.cache_controller import SubmittedTransfer
from hicache_obs.controller.radix_cache import HostHold, Node, RadixCache
from hicache_obs.controller.radix_node import Int64Array, joined, last_nodes
from hicache_obs.controller.request_state import Waiting
from hicache_obs.controller.storage import StorageTier
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.storage_jobs import Done, Fetch, Job, Store
from hicache_obs.controller.storage_page import page_keys
from hicache_obs.records import PageIds

_MS: Final = 1_000_000


@dataclass(slots=True, eq=False)
class Prefetch:
    """A waiting request's pages that may come from storage.

    Attributes:
        tokens: Of the request, whole pages, up to the last that is looked for.
        first: Pages of them that were cached when it began.
        keys: Of the pages from ``first`` on.
        since_ns: When it began.
        job: What the thread works on; ``None`` once it is over.
        found: Pages that are stored, but are not read yet, because too many others are on their way.
        taken: Pages, from ``first`` on, that have arrived and that the tree took.
        given_up: The request has been admitted, or is gone.
    """

    tokens: Int64Array
    first: int
    keys: tuple[str, ...]
    since_ns: int
    job: Job | None = None
    found: int = 0
    taken: int = 0
    given_up: bool = False


@dataclass(slots=True)
class StorageControlCounters:
    """What the scheduler made of it.

    Attributes:
        prefetched_pages: Pages from storage that the tree took.
        hit_tokens: Of admitted requests: tokens restored from pages that their own prefetch had brought.
        dropped_pages: Pages that arrived when their prefix was gone, or the tree had them meanwhile.
        no_memory: Prefetches cut short because host memory was full.
        postponed: Times that a prefetch had to wait because ``max_prefetch_pages`` were on their way.
        timeouts: Requests admitted while their prefetch was under way.
        skipped_backup_pages: Not stored because ``max_backup_pages`` were waiting, or the tier is off.
    """

    prefetched_pages: int = 0
    hit_tokens: int = 0
    dropped_pages: int = 0
    no_memory: int = 0
    postponed: int = 0
    timeouts: int = 0
    skipped_backup_pages: int = 0


@dataclass(eq=False)
class StorageControl:
    """Drives a ``StorageTier``. Scheduler's thread.

    Attributes:
        tier, radix, backups, config, namespace: What it works with; see ``page_keys`` for the last.
        replies: What it knows of the tier.
        counters: What it did.
    """

    tier: StorageTier
    radix: RadixCache
    backups: Backups
    config: StorageConfig
    namespace: str
    replies: AgreedReplies = field(init=False)
    counters: StorageControlCounters = field(default_factory=StorageControlCounters)
    _prefetches: dict[int, Prefetch] = field(default_factory=dict)
    _fetching: dict[int, Prefetch] = field(default_factory=dict)
    _storing: dict[int, HostHold | None] = field(default_factory=dict)
    _fetching_pages: int = 0
    _storing_pages: int = 0

    def __post_init__(self) -> None:
        self.replies = AgreedReplies(self.tier)

    @property
    def busy(self) -> bool:
        """A job was handed over and its reply not received."""
        return bool(self._fetching or self._storing)

    def fetched_into(self) -> list[PageIds]:
        """Host pages that belong to a storage thread, by job."""
        jobs = [prefetch.job for prefetch in self._fetching.values()]
        return [job.pages for job in jobs if isinstance(job, Fetch)]

    def poll(self) -> None:
        """Take the replies that have arrived. Does not block."""
        self.tier.switch()
        for done in self.replies.take(busy=self.busy):
            self._take(done)

    def look(self, waiting: Sequence[Waiting]) -> None:
        """Begin to look for what these requests miss; to be called in every step with the next ones."""
        for entry in waiting:
            prefetch = self._prefetches.get(entry.request.request_id)
            if self.replies.off or entry.hold is not None:
                continue
            if prefetch is None:
                self._begin(entry)
            elif prefetch.found:
                self._fetch(prefetch, prefetch.found)

    def holds_back(self, waiting: Waiting) -> bool:
        """Whether the request should not be admitted yet."""
        prefetch = self._prefetches.get(waiting.request.request_id)
        under_way = prefetch is not None and (prefetch.job is not None or prefetch.found)
        if prefetch is None or not under_way or self.replies.off or self.config.prefetch == "best_effort":
            return False
        if self.config.prefetch == "wait":
            return True
        return self.replies.now_ns() - prefetch.since_ns < self.config.timeout_ms * _MS

    def admitted(self, request_id: int, host_hits: range) -> None:
        """The request does not need its prefetch any more. What has arrived by the reply is kept.

        Args:
            request_id: The request.
            host_hits: Its tokens that are restored from host memory.
        """
        prefetch = self._prefetches.pop(request_id, None)
        if prefetch is not None:
            start, end = (pages * self.radix.page_size for pages in (prefetch.first, prefetch.first + prefetch.taken))
            self.counters.hit_tokens += len(range(max(host_hits.start, start), min(host_hits.stop, end)))
        if prefetch is not None and prefetch.job is not None:
            self.counters.timeouts += 1
            self._give_up(prefetch)

    def aborted(self) -> None:
        """Every waiting request is gone."""
        for prefetch in self._prefetches.values():
            self._give_up(prefetch)
        self._prefetches.clear()

    def backed_up(self, transfer: SubmittedTransfer) -> None:
        """The host pages of a write-back are complete: store them. For ``CacheController.on_backed_up``."""
        for operation in transfer.operations:
            count = len(operation.host_pages)
            if self.replies.off or self._storing_pages + count > self.config.max_backup_pages:
                self.counters.skipped_backup_pages += count
                continue
            nodes = last_nodes(operation.node, count * self.radix.page_size)
            keys = page_keys(self.namespace, self.radix.path(operation.node), self.radix.page_size)[-count:]
            tags = joined([node.host_sources for node in nodes])
            job = self.tier.store(tuple(keys), operation.host_pages, tags)
            self._storing[job.number] = self._hold(operation.node)
            self._storing_pages += count

    def wait(self, waiting: Iterable[Waiting]) -> None:
        """Block until a reply comes or a request has waited long enough, if one of ``waiting`` is held back."""
        if any(self.holds_back(entry) for entry in waiting):
            self.tier.await_reply(max(1, self.config.timeout_ms) * _MS)

    def drain(self) -> bool:
        """Take the replies of all jobs, prefetches cancelled. Blocks for ``close_timeout_s`` at most.

        Returns:
            Whether all of them came. Otherwise their host pages are still in use.
        """
        for prefetch in self._fetching.values():
            self._give_up(prefetch)
        end_ns = self.replies.now_ns() + int(self.config.close_timeout_s * 1e9)
        while self.busy and self.replies.now_ns() < end_ns:
            self.tier.await_reply(end_ns - self.replies.now_ns())
            self.poll()
        return not self.busy

    def close(self) -> None:
        """Store what is queued, end the threads. Blocks for ``close_timeout_s`` at most. Idempotent."""
        for prefetch in self._fetching.values():
            self._give_up(prefetch)
        for done in self.tier.close():
            self._take(done)

    def _hold(self, node: Node) -> HostHold | None:
        """What keeps the pages of a store, up to ``node``, in host memory until its reply."""
        return self.radix.hold_host([node])

    def _begin(self, waiting: Waiting) -> None:
        size = self.radix.page_size
        whole = waiting.tokens[: (len(waiting.tokens) - 1) // size * size]
        match = self.radix.match(whole)
        first = (match.device_len + match.host_len) // size
        keys = tuple(page_keys(self.namespace, whole, size)[first:])
        prefetch = Prefetch(whole, first, keys, self.replies.now_ns())
        if len(keys) >= self.config.least_pages:
            self._hand(prefetch, self.tier.probe(prefetch.keys))
        self._prefetches[waiting.request.request_id] = prefetch

    def _hand(self, prefetch: Prefetch, job: Job) -> None:
        prefetch.job = job
        self._fetching[job.number] = prefetch

    def _take(self, done: Done) -> None:
        if isinstance(done.job, Store):
            hold = self._storing.pop(done.job.number)
            if hold is not None:
                self.radix.release_host(hold)
            self._storing_pages -= len(done.job.keys)
            return
        prefetch = self._fetching.pop(done.job.number)
        prefetch.job = None
        if isinstance(done.job, Fetch):
            self._fetching_pages -= len(done.job.keys)
            self._arrived(prefetch, done.job.pages, done)
        elif done.count >= self.config.least_pages and not (prefetch.given_up or self.replies.off):
            self._fetch(prefetch, done.count)

    def _fetch(self, prefetch: Prefetch, count: int) -> None:
        limit = self.config.max_prefetch_pages or max(1, self.backups.host_pages.pages // 2)
        allowed = min(count, limit)
        if self._fetching_pages + allowed > limit:
            prefetch.found = count  # ``look`` tries again
            self.counters.postponed += 1
            return
        prefetch.found = 0
        possible = min(allowed, self.backups.host_pages.available + self.radix.host_evictable_pages)
        self.counters.no_memory += possible < allowed
        if possible < self.config.least_pages:
            return
        pages = self.backups.alloc(possible)
        assert pages is not None  # there is room for them
        self._fetching_pages += possible
        self._hand(prefetch, self.tier.fetch(prefetch.keys[:possible], pages))

    def _arrived(self, prefetch: Prefetch, pages: PageIds, done: Done) -> None:
        """The thread is done with ``pages``: the tree takes those that are good, the rest is free."""
        end = (prefetch.first + done.count) * self.radix.page_size
        tokens = prefetch.tokens[:end]
        if done.count and prefetch.first:
            match = self.radix.match(tokens[: prefetch.first * self.radix.page_size])
            self.backups.ensure(match.last_node)  # host-only nodes hang below nodes in host memory
        inserted = self.radix.insert_host(tokens, prefetch.first, pages[: done.count], done.tags)
        prefetch.taken = done.count - len(inserted.left_pages)
        self.counters.prefetched_pages += prefetch.taken
        self.counters.dropped_pages += len(inserted.left_pages)
        self.backups.free(np.concatenate([inserted.left_pages, pages[done.count :]]))

    def _give_up(self, prefetch: Prefetch) -> None:
        prefetch.given_up = True
        if prefetch.job is not None:
            prefetch.job.cancelled = True
