"""Host threads that take turns: one runs, the others stand still, and where they change over is a choice.

Each is a real thread, so that recorder, current streams and thread-locals work as ever, but only the one whose turn
it is runs. It may lose its turn at its *calls*: calls of streams and events, posts and receives. Between two of them a
thread runs undisturbed. Losing the turn while one could go on is a preemption, and their number is bounded: most
errors of concurrent programs need very few (CHESS; Musuvathi and Qadeer, PLDI 2007).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from hicache_obs.errors import DeadlockError, StreamError
from hicache_obs.testing.choices import DIGITS, Script

HANG_S: Final = 30.0
"""A thread that makes no call for so long is taken to wait for something outside."""


class Stopped(BaseException):
    """Unwinds a host thread of a run that is over. Not an Exception: nobody but us may catch it."""


class Task:
    """One host thread of a program.

    Attributes:
        name: As in the trace.
        done: Whether its function has returned.
    """

    def __init__(self, name: str) -> None:
        self.name: Final = name
        self.done = False
        self.go: Final = threading.Semaphore(0)
        self.thread: threading.Thread | None = None
        self.ready: Callable[[], bool] | None = None
        """While it waits: whether it can go on."""
        self.why = ""

    @property
    def runnable(self) -> bool:
        """Whether it could run if it were its turn."""
        return not self.done and (self.ready is None or self.ready())


class Turns:
    """Whose turn it is. Every method is called by the thread whose turn it is.

    Args:
        script: Makes the choices.
        preemptions: How often a thread that could go on may lose its turn.
        max_calls: Calls of one run; more raise StreamError.

    Attributes:
        calls: Made so far.
        bounded: Calls at which a thread kept its turn only because no preemption was left.
    """

    def __init__(self, script: Script, *, preemptions: int, max_calls: int) -> None:
        self._script = script
        self._preemptions = preemptions
        self._max_calls = max_calls
        self._main = Task("the main thread")
        self._tasks = [self._main]
        self._running = self._main
        self._stopped = False
        self._error: tuple[Task, BaseException] | None = None
        self.calls = 0
        self.bounded = 0

    def call(self, what: str) -> None:
        """The running thread is about to make call ``what``; others may run first."""
        if self._stopped:
            raise Stopped
        self.calls += 1
        if self.calls > self._max_calls:
            raise StreamError(
                f"no end after {self._max_calls} stream calls: a loop waits for something that never happens, or the "
                "program is too large to explore"
            )
        if len(self._tasks) > 1:
            self._pass_on(what)

    def wait_until(self, ready: Callable[[], bool], why: str) -> None:
        """The running thread goes on once ``ready()``, which only other threads can make true.

        Raises:
            DeadlockError: No thread can go on.
        """
        if not ready():
            me = self._running
            me.ready, me.why = ready, why
            self._pass_on(why)
            me.ready = None

    def start(self, fn: Callable[[], None], name: str) -> Task:
        """A new thread that will run ``fn`` when its turn comes."""
        if len(self._tasks) == len(DIGITS):
            raise StreamError(f"thread {name!r} is one too many: a program may have {len(DIGITS)} host threads")
        task = Task(name)
        task.thread = threading.Thread(target=self._run, args=(task, fn), name=name, daemon=True)
        self._tasks.append(task)
        task.thread.start()
        return task

    def finish(self) -> None:
        """The main thread has nothing more to do; the others run to their ends. Raises what one of them raised."""
        self.wait_until(lambda: all(task.done for task in self._tasks[1:]), "the end of all threads")

    def close(self) -> None:
        """End the threads that are left, after a failure. Raises nothing; for the main thread only."""
        self._stopped = True
        for task in self._tasks[1:]:
            if task.thread is not None and task.thread.is_alive():
                task.go.release()
                task.thread.join(HANG_S)

    @property
    def error(self) -> tuple[str, BaseException] | None:
        """The thread that failed first, other than the main one, and what it raised."""
        return None if self._error is None else (self._error[0].name, self._error[1])

    def _run(self, task: Task, fn: Callable[[], None]) -> None:
        task.go.acquire()
        try:
            if not self._stopped:
                fn()
                task.done = True
                self._pass_on("its end")
        except Stopped:
            pass
        except BaseException as error:  # noqa: BLE001 handed to the main thread, whatever it is
            self._stopped = True
            self._error = self._error or (task, error)
            self._main.go.release()
        finally:
            task.done = True

    def _pass_on(self, what: str) -> None:
        me = self._running
        others = [task for task in self._tasks if task is not me and task.runnable]
        able = me.runnable
        if able and (not others or not self._preemptions):
            self.bounded += bool(others)
            return
        tasks = [me, *others] if able else others
        if not tasks:
            raise DeadlockError(self._deadlock())
        chosen = tasks[0]
        if len(tasks) > 1:
            names = ", ".join(f"{digit} {task.name}" for digit, task in zip(DIGITS, tasks, strict=False))
            digits = DIGITS[: len(tasks)]
            chosen = tasks[digits.index(self._script.choose(f"next thread at {what} of {me.name}: {names}", digits))]
        if chosen is not me:
            self._preemptions -= able
            self._running = chosen
            chosen.go.release()
            if not me.done:
                self._stand_still(me)

    def _stand_still(self, me: Task) -> None:
        """Until it is ``me``'s turn again. The main thread also notices when nobody makes progress."""
        seen = -1
        while not me.go.acquire(timeout=HANG_S if me is self._main else None):
            if seen == self.calls:
                self._stopped = True
                raise StreamError(
                    f"thread {self._running.name!r} has made no call for {HANG_S:g} s: it must not block on anything "
                    "but channels, joins and the device (a lock may be held by a thread whose turn it is not)"
                )
            seen = self.calls
        if self._stopped:
            raise Stopped

    def _deadlock(self) -> str:
        waits = [f"{task.name} waits for {task.why}" for task in self._tasks if not task.done]
        return f"no host thread can go on: {'; '.join(waits)}"
