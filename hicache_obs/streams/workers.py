"""The workers behind device ``threads``: one daemon thread per stream, and the items in its queue.

A worker takes items in order and completes each before the next. Records carry the order between streams: a
waiting worker, or host thread, parks on a lock of its own that the record releases, so nothing polls.

Times are ``perf_counter_ns``. Nothing here refers to the device object, so that it can be collected.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

from hicache_obs.errors import StreamError
from hicache_obs.streams.launching import Failures, run_launched


class Item(Protocol):
    """Something in a stream's queue."""

    def run(self, worker: Worker) -> None:
        """Do it, in the worker's thread, and count it in ``worker.completed``. Blocks; never raises."""


class Crew:
    """All workers of one device, and what they share.

    ``lock`` guards positions in queues, parked workers, records' waiters and gates. It is held for a few
    instructions and never while user code runs or anything blocks.
    """

    def __init__(self) -> None:
        self.lock: Final = threading.Lock()
        self.failures: Final = Failures()
        self.workers: Final[list[Worker]] = []
        self.closed_latches: Final[set[Latch]] = set()
        self.closed = False
        self._changed = threading.Condition(self.lock)
        self._watchers = 0

    def hire(self, name: str) -> Worker:
        """A new worker, its thread running; named by its number for want of a name. StreamError once closed."""
        with self.lock:
            if self.closed:
                raise StreamError(f"Stream {name!r}: the device is closed")
            worker = Worker(self, name or f"stream {len(self.workers)}")
            self.workers.append(worker)
            worker.thread.start()
        return worker

    def changed(self) -> None:
        """Wake ``wait_until``: a worker parked, a record completed or a gate opened. Call with ``lock`` held."""
        if self._watchers:
            self._changed.notify_all()

    def wait_until(self, condition: Callable[[], bool], timeout_s: float) -> bool:
        """Block until ``condition``, evaluated with ``lock`` held, is true; False when it is not in time."""
        with self.lock:
            self._watchers += 1
            try:
                return self._changed.wait_for(condition, timeout_s)
            finally:
                self._watchers -= 1


class Worker:
    """One stream's queue and thread.

    Attributes:
        parked: The record the worker stands at, if it is inside a wait.
        completed: Items done; written by the worker's thread alone.
        issued: Items ever queued, under the crew's lock.
    """

    def __init__(self, crew: Crew, name: str) -> None:
        self.crew: Final = crew
        self.name: Final = name
        self.parked: Record | None = None
        self.issued = 0
        self.completed = 0
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        self.thread: Final = threading.Thread(target=self._serve, name=f"hicache-obs {name}", daemon=True)

    def put(self, item: Item) -> int:
        """Queue ``item`` and return its position. Call with the crew's lock held. StreamError once closed."""
        if self.crew.closed:
            raise StreamError(f"stream {self.name!r}: the device is closed")
        self.issued += 1
        self._queue.put(item)
        return self.issued

    def record(self) -> Record:
        """Queue a fresh record. Call with the crew's lock held."""
        record = Record(self)
        record.position = self.put(record)
        return record

    def idle(self) -> bool:
        """Whether everything queued so far is done."""
        return self.completed >= self.issued

    def stop(self) -> None:
        """Let the thread end after what is queued. Takes no lock: a finalizer may call it anywhere."""
        self._queue.put(None)

    def _serve(self) -> None:
        take = self._queue.get
        while (item := take()) is not None:
            item.run(self)
            del item  # an idle worker must not keep the last function's tensors alive


class Probe:
    """Host times taken in the worker's thread right around one item. Any thread may read them."""

    __slots__ = ("_end_ns", "_on_begin", "_on_end", "_start_ns", "_taken", "device")

    def __init__(self, device: object, on_begin: Callable[[], None] | None, on_end: Callable[[], None] | None) -> None:
        self.device: Final = device
        self._on_begin = on_begin
        self._on_end = on_end
        self._taken = False
        self._start_ns = 0
        self._end_ns: int | None = None

    def take(self) -> None:
        """Use this probe for one item; StreamError the second time."""
        if self._taken:
            raise StreamError("probe already measures another item: take a new one for each item")
        self._taken = True

    def begin(self, failures: Failures) -> None:
        """The item starts."""
        if self._on_begin is not None:
            _call_back(self._on_begin, failures)
        self._start_ns = time.perf_counter_ns()

    def end(self, failures: Failures) -> None:
        """The item is over; ``ready`` from now on."""
        end_ns = time.perf_counter_ns()
        if self._on_end is not None:
            _call_back(self._on_end, failures)
        self._end_ns = end_ns

    def ready(self) -> bool:
        """Whether the item is over."""
        return self._end_ns is not None

    def times_ns(self) -> tuple[int, int]:
        """Start and end; StreamError unless ``ready``."""
        if self._end_ns is None:
            raise StreamError("probe times are not known yet: ask ready() first")
        return self._start_ns, self._end_ns


def _call_back(callback: Callable[[], None], failures: Failures) -> None:
    try:
        callback()
    except BaseException as error:  # noqa: BLE001 a worker must outlive whatever it runs
        failures.keep("probe", error)


class Op:
    """A launched function. One that raises is kept for the next synchronize, and the stream goes on."""

    __slots__ = ("_fn", "_probe", "_site")

    def __init__(self, fn: Callable[[], None], site: str, probe: Probe | None) -> None:
        self._fn = fn
        self._site = site
        self._probe = probe

    def run(self, worker: Worker) -> None:
        """See ``Item.run``."""
        failures = worker.crew.failures
        if self._probe is not None:
            self._probe.begin(failures)
        try:
            run_launched(self._fn, self._site)
        except BaseException as error:  # noqa: BLE001 a worker must outlive whatever it runs
            failures.keep(self._site, error)
        if self._probe is not None:
            self._probe.end(failures)
        worker.completed += 1


class Record:
    """A marker: complete once the worker has taken it. ``position`` is its place in the worker's queue."""

    __slots__ = ("_waiters", "done", "end_ns", "position", "worker")

    def __init__(self, worker: Worker) -> None:
        self.worker: Final = worker
        self.position = 0
        self.done = False
        self.end_ns = 0
        self._waiters: list[threading.Lock] = []

    def run(self, worker: Worker) -> None:
        """See ``Item.run``."""
        self.end_ns = time.perf_counter_ns()
        worker.completed += 1  # before anybody who waits for this can ask whether the stream is idle
        with worker.crew.lock:
            self.done = True
            waiters, self._waiters = self._waiters, []
            worker.crew.changed()
        for waiter in waiters:
            waiter.release()

    def wait(self, parked: Worker | None = None) -> None:
        """Block the calling thread until done; ``parked`` is the worker whose thread that is, if any."""
        if not self.done:
            self._park(parked)

    def _park(self, parked: Worker | None) -> None:
        crew = self.worker.crew
        waiter = threading.Lock()
        waiter.acquire()
        with crew.lock:
            if self.done:
                return
            self._waiters.append(waiter)
            if parked is not None:
                parked.parked = self
                crew.changed()
        waiter.acquire()
        if parked is not None:
            parked.parked = None


class Wait:
    """Holds the worker until ``record`` is done; ``None``: the event was never recorded, nothing to wait for."""

    __slots__ = ("_probe", "_record")

    def __init__(self, record: Record | None, probe: Probe | None) -> None:
        self._record = record
        self._probe = probe

    def run(self, worker: Worker) -> None:
        """See ``Item.run``."""
        if self._probe is not None:
            self._probe.begin(worker.crew.failures)
        if self._record is not None:
            self._record.wait(worker)
        if self._probe is not None:
            self._probe.end(worker.crew.failures)
        worker.completed += 1


class Latch:
    """The core of a gate: holds workers at a point of their queues until it is opened, once and for good."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._holds: list[tuple[Worker, int]] = []
        self._opened = threading.Event()

    def hold(self, worker: Worker) -> None:
        """Queue a hold on ``worker``."""
        with self._crew.lock:
            self._holds.append((worker, worker.put(self)))
            if not self._opened.is_set():
                self._crew.closed_latches.add(self)

    def run(self, worker: Worker) -> None:
        """See ``Item.run``."""
        self._opened.wait()
        worker.completed += 1

    def open(self) -> None:
        """Let everything held go on, now and later. Idempotent."""
        with self._crew.lock:
            self._opened.set()
            self._holds.clear()
            self._crew.closed_latches.discard(self)
            self._crew.changed()

    def holds_up(self, record: Record | None) -> bool:
        """Whether ``record`` cannot complete before this opens. Call with the crew's lock held.

        True if a hold stands before it in its queue, or its worker is parked on a record that is held up.
        """
        if self._opened.is_set():
            return False
        seen: set[Worker] = set()
        while record is not None and not record.done and record.worker not in seen:
            if any(worker is record.worker and at < record.position for worker, at in self._holds):
                return True
            seen.add(record.worker)
            record = record.worker.parked
        return False
