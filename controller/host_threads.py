"""Host threads of an engine, the channels between them, and who watches what they do.

The storage tier is written against the protocols, so the same code runs on real threads (``RealThreads``) and on
threads that take turns (``hicache_obs.testing``), where a run can be repeated and its interleavings enumerated.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Protocol

from hicache_obs.records import ALL_LAYERS, Access, IoKind


class HostRecorder(Protocol):
    """What host threads report about themselves; ``Recorder`` is one. Any thread; never raises or blocks."""

    def thread_post(self, channel: int) -> None:
        """See ``Recorder.thread_post``."""

    def thread_recv(self, channel: int) -> None:
        """See ``Recorder.thread_recv``."""

    def io_begin(self, kind: IoKind, accesses: tuple[Access, ...], *, site: str) -> int:
        """See ``Recorder.io_begin``."""

    def io_end(self, io: int) -> None:
        """See ``Recorder.io_end``."""

    def host_access(self, site: str, accesses: tuple[Access, ...], *, layers: tuple[int, int] = ALL_LAYERS) -> None:
        """See ``Recorder.host_access``."""


class NoRecorder:
    """Nobody watches."""

    def thread_post(self, channel: int) -> None:
        """Nothing."""

    def thread_recv(self, channel: int) -> None:
        """Nothing."""

    def io_begin(self, kind: IoKind, accesses: tuple[Access, ...], *, site: str) -> int:
        """0."""
        return 0

    def io_end(self, io: int) -> None:
        """Nothing."""

    def host_access(self, site: str, accesses: tuple[Access, ...], *, layers: tuple[int, int] = ALL_LAYERS) -> None:
        """Nothing."""


class Channel(Protocol):
    """A queue between host threads. The n-th receive follows whatever the poster of the n-th post knew by then."""

    def __len__(self) -> int:
        """Posts not received yet. Looking orders nothing."""

    def post(self, value: Any) -> None:
        """Hand ``value`` over. Does not block."""

    def receive(self) -> Any:
        """The oldest value; blocks until there is one."""


class HostThreads(Protocol):
    """Makes threads and channels, and knows the time they live by."""

    def channel(self, name: str = "") -> Channel:
        """A new channel; ``name`` is for messages."""

    def spawn(self, fn: Callable[[], None], *, name: str) -> Any:
        """A host thread that runs ``fn``; it knows what its maker knows now. For ``join``."""

    def join(self, thread: Any, timeout_ns: int) -> bool:
        """Wait for the end of ``thread``, at most so long; whether it has ended. The caller then knows what it knew."""

    def await_post(self, channel: Channel, timeout_ns: int) -> None:
        """Block until ``channel`` has a post, at most about so long. Orders nothing; ``receive`` does."""

    def sleep(self, duration_ns: int) -> None:
        """Let that much time pass."""

    def switch(self) -> None:
        """A place where other threads may run."""

    def now_ns(self) -> int:
        """Time of ``sleep`` and the timeouts, from any origin."""


class ThreadChannel:
    """A channel between real threads; any of them may post and receive."""

    def __init__(self, number: int, recorder: HostRecorder) -> None:
        self._number = number
        self._recorder = recorder
        self._values: deque[Any] = deque()
        self._filled = threading.Condition()

    def __len__(self) -> int:
        """See ``Channel``."""
        return len(self._values)

    def post(self, value: Any) -> None:
        """See ``Channel.post``."""
        with self._filled:  # the record and the place in the queue go together
            self._recorder.thread_post(self._number)
            self._values.append(value)
            self._filled.notify()

    def receive(self) -> Any:
        """See ``Channel.receive``."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._values))
            self._recorder.thread_recv(self._number)
            return self._values.popleft()

    def await_post(self, timeout_s: float) -> None:
        """See ``HostThreads.await_post``."""
        with self._filled:
            self._filled.wait_for(lambda: bool(self._values), timeout_s)


class RealThreads:
    """Operating-system threads. They are daemons: a back end that hangs does not keep the process alive.

    Args:
        recorder: Told of every hand-over.
    """

    def __init__(self, recorder: HostRecorder) -> None:
        self._recorder: Final = recorder
        self._numbers = itertools.count()

    def channel(self, name: str = "") -> ThreadChannel:
        """See ``HostThreads.channel``."""
        return ThreadChannel(next(self._numbers), self._recorder)

    def spawn(self, fn: Callable[[], None], *, name: str) -> tuple[threading.Thread, int]:
        """See ``HostThreads.spawn``."""
        start, end = next(self._numbers), next(self._numbers)

        def body() -> None:
            self._recorder.thread_recv(start)
            fn()
            self._recorder.thread_post(end)

        self._recorder.thread_post(start)
        thread = threading.Thread(target=body, name=name, daemon=True)
        thread.start()
        return thread, end

    def join(self, thread: tuple[threading.Thread, int], timeout_ns: int) -> bool:
        """See ``HostThreads.join``."""
        thread[0].join(timeout_ns / 1e9)
        if thread[0].is_alive():
            return False
        self._recorder.thread_recv(thread[1])
        return True

    def await_post(self, channel: Channel, timeout_ns: int) -> None:
        """See ``HostThreads.await_post``."""
        assert isinstance(channel, ThreadChannel)
        channel.await_post(timeout_ns / 1e9)

    def sleep(self, duration_ns: int) -> None:
        """See ``HostThreads.sleep``."""
        time.sleep(duration_ns / 1e9)

    def switch(self) -> None:
        """Nothing: the operating system does it."""

    def now_ns(self) -> int:
        """``time.perf_counter_ns``."""
        return time.perf_counter_ns()
