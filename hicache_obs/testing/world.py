"""What an explored program gets to work with: one virtual device, host threads, and channels between them.

``TurnThreads`` are ``HostThreads`` of the controller, so its storage tier runs on them too.
"""

from __future__ import annotations

import itertools
import random
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, TypeVar

from hicache_obs.controller import host_threads
from hicache_obs.errors import StreamError
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.streams.protocol import Device
from hicache_obs.testing.choices import SeededScript
from hicache_obs.testing.turns import Task, Turns

T = TypeVar("T")
_UNBOUNDED: Final = 1 << 62
_MOST_NS: Final = 50_000_000
"""A wait that times out takes no more: a long one, for the end of a thread, should be given up by nobody's dice."""


class Channel(Generic[T]):
    """A queue between host threads. The n-th receive follows whatever the poster of the n-th post knew by then.

    Posts and receives are calls: other threads may run before them.
    """

    def __init__(self, number: int, name: str, recorder: host_threads.HostRecorder, turns: Turns) -> None:
        self._number = number
        self._name = name
        self._recorder = recorder
        self._turns = turns
        self._values: deque[T] = deque()

    def __len__(self) -> int:
        """Posts not received yet. Looking is no call, and orders nothing."""
        return len(self._values)

    def post(self, value: T) -> None:
        """Hand ``value`` over. Does not block."""
        self._turns.call(f"post to {self._name}")
        self._recorder.thread_post(self._number)
        self._values.append(value)

    def receive(self) -> T:
        """The oldest value; blocks until there is one.

        Raises:
            DeadlockError: There never will be: every thread waits for another.
        """
        self._turns.call(f"receive from {self._name}")
        self._turns.wait_until(lambda: len(self._values) > 0, f"a post to {self._name}")
        self._recorder.thread_recv(self._number)
        return self._values.popleft()


class HostThread:
    """A host thread of the program; see ``World.spawn``."""

    def __init__(self, task: Task, end: int, recorder: host_threads.HostRecorder, turns: Turns) -> None:
        self._task = task
        self._end = end
        self._recorder = recorder
        self._turns = turns
        self._joined = False

    def join(self) -> None:
        """Block until the thread has ended; the caller then knows all that it knew. Once only.

        Raises:
            StreamError: It was joined before.
        """
        if self._joined:
            raise StreamError(f"thread {self._task.name!r} was joined before; a thread can be joined once")
        self._joined = True
        self._turns.call(f"join of {self._task.name}")
        self._turns.wait_until(lambda: self._task.done, f"the end of {self._task.name}")
        self._recorder.thread_recv(self._end)


class TurnThreads:
    """Host threads that take turns, and the channels between them.

    Time stands still: a thread that sleeps or waits for a post lets others run, and a wait never times out.
    """

    def __init__(self, recorder: host_threads.HostRecorder, turns: Turns) -> None:
        self._hand_overs = recorder
        self._turns = turns
        self._numbers = itertools.count()

    def channel(self, name: str = "") -> Channel[Any]:
        """A new channel; ``name`` is for messages."""
        number = next(self._numbers)
        return Channel(number, f"channel {name or number}", self._hand_overs, self._turns)

    def spawn(self, fn: Callable[[], None], *, name: str) -> HostThread:
        """A host thread that runs ``fn``; it knows what its maker knows now, and starts when its turn comes.

        A run is over when all its threads are, joined or not.
        """
        start, end = next(self._numbers), next(self._numbers)

        def body() -> None:
            self._hand_overs.thread_recv(start)
            fn()
            self._hand_overs.thread_post(end)

        self._hand_overs.thread_post(start)
        return HostThread(self._turns.start(body, name), end, self._hand_overs, self._turns)

    def join(self, thread: HostThread, timeout_ns: int) -> bool:
        """``thread.join``; true."""
        thread.join()
        return True

    def await_post(self, channel: host_threads.Channel, timeout_ns: int) -> None:
        """Block until ``channel`` has a post. A call; orders nothing."""
        self._turns.call("wait for a post")
        self._turns.wait_until(lambda: len(channel) > 0, "a post")

    def sleep(self, duration_ns: int) -> None:
        """As ``switch``."""
        self._turns.call("sleep")

    def switch(self) -> None:
        """A call that does nothing: a place for other threads to run, between two reads of shared state."""
        self._turns.call("switch")

    def now_ns(self) -> int:
        """0."""
        return 0


class SeededThreads(TurnThreads):
    """Threads whose turns, and whose waits that time out, a seed decides: the same run every time, on any machine.

    Made and used by one thread, the main one; ``close`` ends the others.

    Args:
        recorder: Told of every hand-over.
        seed: Of the choices.
        changes: Chance that a thread may lose its turn at a call.
        patience: One in so many waits times out although a post would have come.
    """

    def __init__(
        self, recorder: host_threads.HostRecorder, seed: int, *, changes: float = 0.5, patience: int = 8
    ) -> None:
        self._random = random.Random(seed)
        self._now_ns = 0
        self._patience = patience
        turns = Turns(SeededScript(self._random, changes), preemptions=_UNBOUNDED, max_calls=_UNBOUNDED)
        super().__init__(recorder, turns)

    def await_post(self, channel: host_threads.Channel, timeout_ns: int) -> None:
        """As of ``TurnThreads``, but now and then it times out."""
        if not self._random.randrange(self._patience):
            self.sleep(min(timeout_ns, _MOST_NS))
        else:
            super().await_post(channel, timeout_ns)

    def sleep(self, duration_ns: int) -> None:
        """Time passes at once."""
        self._now_ns += duration_ns
        super().sleep(duration_ns)

    def now_ns(self) -> int:
        """Nanoseconds slept so far, by all threads together."""
        return self._now_ns

    def close(self) -> None:
        """End the threads that are left."""
        self._turns.close()


class World(TurnThreads):
    """One run's device and host threads.

    Attributes:
        device: A virtual device, recorded. Hand it to the code under test.
        recorder: Takes what the device does not see: page allocation, host accesses, names of pools.
    """

    def __init__(self, device: Device, recorder: Recorder, turns: Turns) -> None:
        super().__init__(recorder, turns)
        self.device: Final = device
        self.recorder: Final = recorder
