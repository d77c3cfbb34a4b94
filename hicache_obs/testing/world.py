"""What an explored program gets to work with: one virtual device, host threads, and channels between them."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from hicache_obs.errors import StreamError
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.streams.protocol import Device
from hicache_obs.testing.turns import Task, Turns

T = TypeVar("T")


class Channel(Generic[T]):
    """A queue between host threads. The n-th receive follows whatever the poster of the n-th post knew by then.

    Posts and receives are calls: other threads may run before them.
    """

    def __init__(self, number: int, name: str, recorder: Recorder, turns: Turns) -> None:
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

    def __init__(self, task: Task, end: int, recorder: Recorder, turns: Turns) -> None:
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


class World:
    """One run's device and host threads.

    Attributes:
        device: A virtual device, recorded. Hand it to the code under test.
        recorder: Takes what the device does not see: page allocation, host accesses, names of pools.
    """

    def __init__(self, device: Device, recorder: Recorder, turns: Turns) -> None:
        self.device: Final = device
        self.recorder: Final = recorder
        self._turns = turns
        self._numbers = itertools.count()

    def channel(self, name: str = "") -> Channel[object]:
        """A new channel; ``name`` is for messages."""
        number = next(self._numbers)
        return Channel(number, f"channel {name or number}", self.recorder, self._turns)

    def spawn(self, fn: Callable[[], None], *, name: str) -> HostThread:
        """A host thread that runs ``fn``; it knows what its maker knows now, and starts when its turn comes.

        A run is over when all its threads are, joined or not.
        """
        start, end = next(self._numbers), next(self._numbers)

        def body() -> None:
            self.recorder.thread_recv(start)
            fn()
            self.recorder.thread_post(end)

        self.recorder.thread_post(start)
        return HostThread(self._turns.start(body, name), end, self.recorder, self._turns)

    def switch(self) -> None:
        """A call that does nothing: a place for other threads to run, between two reads of shared state."""
        self._turns.call("switch")
