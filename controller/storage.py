"""The third tier: two host threads that read pages from storage and write pages to it.

The scheduler's thread hands jobs over and receives replies; it never waits for storage unless it says so. Between the
hand-over of a job and its reply the job's host pages belong to the thread. Every hand-over, every transfer and every
access of the CPU is recorded, so the rule is checked, not believed: a page that somebody else touches in between is
reported as ``storage_prefetch`` or ``host_reuse``.

Nothing a back end does can reach the scheduler. It may raise (counted, the job fails), be slow (requests go on without
it), return other bytes or fewer (the checksum says so, counted, a miss), hang (the end of the engine does not wait for
it) or kill its thread (replaced a few times, then the tier is off).
"""

from __future__ import annotations

import itertools
import logging
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np

from hicache_obs.controller.host_threads import Channel, HostRecorder, HostThreads
from hicache_obs.controller.radix_node import Int64Array
from hicache_obs.controller.storage_backend import StorageBackend
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.storage_jobs import Died, Done, Ended, Fetch, Job, Probe, Reply, Store
from hicache_obs.controller.storage_page import NO_TAG, BadPage, HostPageMemory, checksum, pack_page, unpack_page
from hicache_obs.records import IoKind, Mode, PageIds, host

_LOG: Final = logging.getLogger(__name__)
_READER, _WRITER = "storage prefetch", "storage backup"
_NS: Final = 1_000_000_000


@dataclass(slots=True)
class StorageCounters:
    """What the storage threads did. Each field is changed by one thread only.

    Attributes:
        probes, fetches, stores: Jobs done.
        probed_pages: Pages a probe has found.
        fetched_pages, stored_pages: Pages moved, verified or whole.
        known_pages: Pages that were stored before, so that nothing was written.
        missing_pages: A fetch found nothing under a key that a probe had seen.
        bad_pages: Checksum, size or header were wrong: treated as missing.
        read_errors, write_errors: Jobs that an error of the back end has ended.
        deaths: Threads that have ended by something that is no ordinary error.
        lost_threads: Threads that had not ended when the engine was closed.
    """

    probes: int = 0
    fetches: int = 0
    stores: int = 0
    probed_pages: int = 0
    fetched_pages: int = 0
    stored_pages: int = 0
    known_pages: int = 0
    missing_pages: int = 0
    bad_pages: int = 0
    read_errors: int = 0
    write_errors: int = 0
    deaths: int = 0
    lost_threads: int = 0


class Throttle:
    """Spreads bytes over time. One thread."""

    def __init__(self, bytes_per_s: int, threads: HostThreads) -> None:
        self._bytes_per_s = bytes_per_s
        self._threads = threads
        self._free_ns = 0

    def take(self, size_bytes: int) -> None:
        """Sleep until ``size_bytes`` more may be moved."""
        if self._bytes_per_s:
            now = self._threads.now_ns()
            start = max(now, self._free_ns)
            self._free_ns = start + size_bytes * _NS // self._bytes_per_s
            if start > now:
                self._threads.sleep(start - now)


class StorageTier:
    """Jobs in, replies out. Methods are for the scheduler's thread.

    Args:
        backend: Where pages are kept.
        memory: Bytes of the host pool.
        threads: Makes the two threads.
        recorder: Told of everything they do.
        config: Limits.

    Attributes:
        backend, memory: As given.
        counters: What the threads did.
        writer: Names this run in the pages it stores.
        off: No jobs are taken any more.
    """

    def __init__(
        self,
        backend: StorageBackend,
        memory: HostPageMemory,
        threads: HostThreads,
        recorder: HostRecorder,
        config: StorageConfig,
    ) -> None:
        self.counters = StorageCounters()
        self.writer: Final = uuid.uuid4().bytes
        self.off = False
        self.backend = backend
        self.memory = memory
        self._threads = threads
        self._recorder = recorder
        self._config = config
        self._numbers = itertools.count(1)
        self._replies: Channel = threads.channel("storage replies")
        self._inboxes: dict[str, Channel] = {name: threads.channel(name) for name in (_WRITER, _READER)}
        self._doing: dict[str, Job | None] = dict.fromkeys(self._inboxes)
        self._crew: dict[str, Any] = {}
        self._logged: set[str] = set()
        for name in self._inboxes:
            self._start(name)

    def probe(self, keys: tuple[str, ...]) -> Job:
        """Ask how many of the first ``keys`` are stored."""
        return self._hand(_READER, Probe(next(self._numbers), keys))

    def fetch(self, keys: tuple[str, ...], pages: PageIds) -> Job:
        """Fill host ``pages``; they belong to the thread until the reply."""
        return self._hand(_READER, Fetch(next(self._numbers), keys, pages=pages))

    def store(self, keys: tuple[str, ...], pages: PageIds, tags: Int64Array) -> Job:
        """Keep the contents of host ``pages``, which may not change until the reply."""
        return self._hand(_WRITER, Store(next(self._numbers), keys, pages=pages, tags=tags))

    def replies(self) -> Iterator[Done]:
        """Jobs that are over, as far as replies have arrived. Does not block."""
        while len(self._replies):
            yield from self._understand(self._replies.receive())

    def await_reply(self, timeout_ns: int) -> None:
        """Block until there is a reply, at most about so long."""
        self._threads.await_post(self._replies, timeout_ns)

    def switch(self) -> None:
        """Let the threads run, where threads take turns."""
        self._threads.switch()

    def now_ns(self) -> int:
        """The threads' clock."""
        return self._threads.now_ns()

    def close(self) -> list[Done]:
        """Let the threads finish what is queued, and end them; blocks for ``close_timeout_s`` at most. Idempotent.

        Returns:
            Replies that came meanwhile. A thread that has not ended by then is left behind and counted: the host
            pages of its jobs must never be used again.
        """
        if self.off and not self._crew:
            return []
        self.off = True
        done: list[Done] = []
        for name in self._crew:
            self._inboxes[name].post(None)
        end_ns = self._threads.now_ns() + int(self._config.close_timeout_s * _NS)
        while self._crew:
            left_ns = end_ns - self._threads.now_ns()
            if left_ns <= 0:
                break
            self._threads.await_post(self._replies, left_ns)
            done += self.replies()
        self.counters.lost_threads += len(self._crew)
        for name in self._crew:
            _LOG.warning("hicache-obs: thread %r had not ended after %g s", name, self._config.close_timeout_s)
        self._crew.clear()
        return done

    # -- scheduler's thread, inside ------------------------------------------------------------------------------

    def _hand(self, name: str, job: Job) -> Job:
        assert not self.off, "the storage tier is off"
        self._inboxes[name].post(job)
        return job

    def _start(self, name: str) -> None:
        self._crew[name] = self._threads.spawn(partial(self._work, name), name=name)

    def _understand(self, reply: Reply) -> Iterator[Done]:
        if isinstance(reply, Done):
            yield reply
            return
        thread = self._crew.pop(reply.thread)
        self._threads.join(thread, int(self._config.close_timeout_s * _NS))
        if isinstance(reply, Ended):
            return
        self.counters.deaths += 1
        if reply.job is not None:
            yield Done(reply.job, failed=True)
        if self.off or self.counters.deaths > self._config.max_restarts:
            self.off = True
            _LOG.error("hicache-obs: the storage tier is off: thread %r has died", reply.thread)
            yield from self._refuse(reply.thread)
        else:
            self._start(reply.thread)

    def _refuse(self, name: str) -> Iterator[Done]:
        """Nobody will work on what is queued for a thread that is gone."""
        inbox = self._inboxes[name]
        while len(inbox):
            job = inbox.receive()
            if job is not None:
                yield Done(job, failed=True)

    # -- storage threads -----------------------------------------------------------------------------------------

    def _work(self, name: str) -> None:
        """Body of one thread."""
        throttle = Throttle(
            self._config.read_bytes_per_s if name == _READER else self._config.write_bytes_per_s, self._threads
        )
        try:
            while True:
                job = self._inboxes[name].receive()
                if job is None:
                    self._replies.post(Ended(name))
                    return
                self._doing[name] = job
                done = self._do(job, throttle)
                self._doing[name] = None
                self._replies.post(done)
        except BaseException as death:  # noqa: BLE001 the scheduler must learn of it, whatever it is
            self._log(name, death)
            self._replies.post(Died(name, self._doing[name]))

    def _do(self, job: Job, throttle: Throttle) -> Done:
        if isinstance(job, Fetch):
            return self._fetch(job, throttle)
        if isinstance(job, Store):
            return self._store(job, throttle)
        return self._probe(job)

    def _probe(self, job: Job) -> Done:
        count, failed = 0, False
        try:
            for key in job.keys:
                if job.cancelled or not self.backend.exists(key):
                    break
                count += 1
        except Exception as error:  # noqa: BLE001 whatever a back end raises
            self._log(_READER, error)
            self.counters.read_errors += 1
            failed = True
        self.counters.probes += 1
        self.counters.probed_pages += count
        return Done(job, count, failed=failed)

    def _fetch(self, job: Fetch, throttle: Throttle) -> Done:
        tags: list[int] = []
        failed = False
        for part in self._batches(job):
            keys, pages = job.keys[part], job.pages[part]
            throttle.take(len(pages) * self.memory.page_bytes)
            read, error = self._read(keys, pages)
            tags += read
            if error is not None:
                self._log(_READER, error)
                self.counters.read_errors += 1
                failed = True
            if len(read) < len(keys):
                break
        self.counters.fetches += 1
        self.counters.fetched_pages += len(tags)
        return Done(job, len(tags), np.array(tags, np.int64), failed)

    def _read(self, keys: tuple[str, ...], pages: PageIds) -> tuple[list[int], Exception | None]:
        """Read a batch into host memory, then verify it there.

        Returns:
            The tags of the leading pages that are good, and the error that ended it.
        """
        arrived: list[tuple[bytes, int, bytes]] = []
        error: Exception | None = None
        io = self._recorder.io_begin(IoKind.STORAGE_READ, (host(Mode.WRITE, pages),), site=_READER)
        try:
            for key, page in zip(keys, pages.tolist(), strict=True):
                data = self.backend.read(key)
                if data is None:
                    self.counters.missing_pages += 1
                    break
                stored = unpack_page(data, self.memory.page_bytes)
                self.memory.write(page, stored.payload)
                arrived.append((stored.writer, stored.tag, stored.checksum))
        except BadPage as bad:
            self.counters.bad_pages += 1
            self._log(_READER, bad)
        except Exception as raised:  # noqa: BLE001 whatever a back end raises
            error = raised
        finally:
            self._recorder.io_end(io)
        tags: list[int] = []
        if arrived:
            self._recorder.host_access("storage checksum", (host(Mode.READ, pages[: len(arrived)]),))
        for key, page, (writer, tag, expected) in zip(keys, pages.tolist(), arrived, strict=False):
            if checksum(key, self.memory.read(page), writer, tag) != expected:
                self.counters.bad_pages += 1
                break
            tags.append(tag if writer == self.writer else NO_TAG)
        return tags, error

    def _store(self, job: Store, throttle: Throttle) -> Done:
        count, failed = 0, False
        try:
            for part in self._batches(job):
                count += self._write(job.keys[part], job.pages[part], job.tags[part], throttle)
        except Exception as error:  # noqa: BLE001 whatever a back end raises
            self._log(_WRITER, error)
            self.counters.write_errors += 1
            failed = True
        self.counters.stores += 1
        return Done(job, count, failed=failed)

    def _write(self, keys: tuple[str, ...], pages: PageIds, tags: Int64Array, throttle: Throttle) -> int:
        """Store a batch; returns how many pages are stored now, those that were before included."""
        new = [not self.backend.exists(key) for key in keys]
        wanted = pages[np.array(new, np.bool_)]
        self.counters.known_pages += len(pages) - len(wanted)
        if not len(wanted):
            return len(pages)
        throttle.take(len(wanted) * self.memory.page_bytes)
        todo = [(k, p, t) for k, p, t, n in zip(keys, pages.tolist(), tags.tolist(), new, strict=True) if n]
        self._recorder.host_access("storage checksum", (host(Mode.READ, wanted),))
        sums = [checksum(key, self.memory.read(page), self.writer, tag) for key, page, tag in todo]
        io = self._recorder.io_begin(IoKind.STORAGE_WRITE, (host(Mode.READ, wanted),), site=_WRITER)
        try:
            for (key, page, tag), digest in zip(todo, sums, strict=True):
                self.backend.write(key, pack_page(self.memory.read(page), self.writer, tag, digest))
                self.counters.stored_pages += 1
        finally:
            self._recorder.io_end(io)
        return len(pages)

    def _batches(self, job: Job) -> Iterator[slice]:
        """Parts of the job, until it is cancelled; other threads may run before each."""
        for start in range(0, len(job.keys), self._config.batch_pages):
            self._threads.switch()
            if job.cancelled:
                return
            yield slice(start, start + self._config.batch_pages)

    def _log(self, name: str, error: BaseException) -> None:
        """Once per thread and kind of error: what comes again is in the counters."""
        kind = f"{name}: {type(error).__name__}"
        if kind not in self._logged:
            self._logged.add(kind)
            _LOG.warning("hicache-obs: %s: %s", kind, error)
