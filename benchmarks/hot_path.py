"""What the plugin does on the launching thread besides writing memory, seen by tracing: ``make hot-path``.

The hooks of ``plugin_hooks`` run a scheduler's rounds and restores while every call from Python into C, every audit
event, and every lock is watched. Fails, with exit code 1, if a hooked call does I/O or sleeps, or takes a lock that any
thread holds across I/O. The first hooked call of a process, which makes the ring, is not one of them. States: a ring
that is read, one that is full, and one that is switched off.

Then, without the tracing: how long the calls take, up to the slowest of a thousand.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

IO_MODULES = ("posix", "_io", "io", "_socket", "socket", "select", "fcntl", "_ssl", "_posixsubprocess", "mmap")
NO_IO = ("posix.getpid",)
SLEEPS = ("time.sleep",)
IO_EVENTS = ("open", "os.", "socket.", "subprocess.", "mmap.", "fcntl.", "shutil.", "tempfile.", "ctypes.dlopen")
_make_lock, _make_rlock = threading.Lock, threading.RLock


class Watch:
    """What is seen. ``hot`` is set while the launching thread is in a hooked call.

    Attributes:
        io: I/O of hot calls, by name.
        hot_locks: Locks that hot calls take, by where they were made.
        io_locks: Locks that some thread held during I/O, with that I/O.
        calls: C functions that hot calls called, by name.
        fences: Locks that their thread never gives away, once there is a ring: memory barriers.
    """

    def __init__(self) -> None:
        self.io: Counter[str] = Counter()
        self.hot_locks: Counter[str] = Counter()
        self.io_locks: dict[str, str] = {}
        self.calls: Counter[str] = Counter()
        self.fences: set[str] = set()
        self.state = threading.local()

    def held(self) -> list[str]:
        """The calling thread's locks, innermost last."""
        if not hasattr(self.state, "held"):
            self.state.held = []
        found: list[str] = self.state.held
        return found

    @contextmanager
    def hot(self) -> Iterator[None]:
        """A hooked call, on this thread."""
        self.state.hot = True
        sys.setprofile(self.profile)
        try:
            yield
        finally:
            sys.setprofile(None)
            self.state.hot = False

    def profile(self, _frame: FrameType, event: str, function: Any) -> None:
        """For ``sys.setprofile``: C functions that are called."""
        if event != "c_call":
            return
        name = _name(function)
        if getattr(self.state, "hot", False):
            self.calls[name] += 1
        if name not in NO_IO and (name.partition(".")[0] in IO_MODULES or name in SLEEPS):
            self.note(name)

    def audit(self, event: str, _arguments: Any) -> None:
        """For ``sys.addaudithook``: what C code opens on its own is seen here."""
        if event == "open" or event.startswith(IO_EVENTS[1:]):
            self.note(f"audit event {event}")

    def note(self, name: str) -> None:
        """The calling thread does I/O."""
        if getattr(self.state, "hot", False):
            self.io[name] += 1
        for lock in self.held():
            self.io_locks.setdefault(lock, name)


WATCH = Watch()


class WatchedLock:
    """A lock that says who holds it."""

    def __init__(self, lock: Any, name: str) -> None:
        self._lock = lock
        self._name = name

    def acquire(self, *arguments: Any, **options: Any) -> bool:
        if getattr(WATCH.state, "hot", False):
            WATCH.hot_locks[self._name] += 1
        taken = bool(self._lock.acquire(*arguments, **options))
        if taken:
            WATCH.held().append(self._name)
        return taken

    def release(self) -> None:
        held = WATCH.held()
        if self._name in held:
            held.reverse()
            held.remove(self._name)
            held.reverse()
        self._lock.release()

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lock, name)


def _watched(make: Callable[[], Any]) -> Callable[[], Any]:
    """As ``make``, but what this package makes is watched."""

    def made() -> Any:
        frame = sys._getframe(1)
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith("hicache_obs"):
            return make()
        return WatchedLock(make(), f"{module.removeprefix('hicache_obs.')}:{frame.f_lineno}")

    return made


def _name(function: Any) -> str:
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, type(sys)):
        return f"{getattr(function, '__module__', None) or getattr(owner, '__name__', '')}.{function.__name__}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{function.__name__}"


def trace(rounds: int, after_round: Callable[[Any], None]) -> None:
    """Watch ``rounds`` decode rounds, and a restore for each ten."""
    from plugin_hooks import HOOKED, Engine, hook_all

    bare = [(cls, name, value) for cls in HOOKED.values() for name, value in vars(cls).items() if callable(value)]
    engine = Engine()
    session = hook_all(engine)
    engine.restore()
    WATCH.fences.update(WATCH.held())
    for number in range(rounds):
        with WATCH.hot():
            (engine.restore if number % 10 == 9 else engine.decode)()
        after_round(session)
    time.sleep(0.3)  # the flusher takes its turns; it is watched as well
    assert session.counters.calls > rounds
    assert not session.counters.errors, session.counters.errors
    session.close()
    for cls, name, value in bare:
        setattr(cls, name, value)


def states(rounds: int) -> Iterator[tuple[str, Callable[[], None]]]:
    """The name of each state of the ring, and what traces it."""
    from hicache_obs.readers.ring import RingReader
    from hicache_obs.readers.ring_header import set_mode
    from hicache_obs.records import CaptureMode

    def read() -> None:
        readers: list[RingReader] = []

        def poll(session: Any) -> None:
            if not readers:
                readers.append(RingReader(session.ring.path))
            readers[0].poll()

        trace(rounds, poll)

    def full() -> None:
        trace(rounds, lambda _session: None)

    def switch_off(session: Any) -> None:
        set_mode(session.ring.path, CaptureMode.OFF)

    def off() -> None:
        trace(rounds, switch_off)

    yield "read", read
    yield "full", full
    yield "switched off", off


def durations(rounds: int) -> dict[str, list[int]]:
    """Nanoseconds of each round, with the hooks and, in the same process before them, without."""
    from plugin_hooks import Engine, hook_all

    from hicache_obs.readers.ring import RingReader

    engine = Engine()
    found: dict[str, list[int]] = {}

    def measure(what: str, call: Callable[[], None], count: int, clear: Callable[[], object]) -> None:
        call()
        wall, own = [], []
        for _ in range(count):
            began, used = time.perf_counter_ns(), time.thread_time_ns()
            call()
            own.append(time.thread_time_ns() - used)
            wall.append(time.perf_counter_ns() - began)
            clear()
        found[f"{what}, processor time"], found[f"{what}, by the clock"] = sorted(own), sorted(wall)

    for hooked in (False, True):
        title = "observed" if hooked else "bare"
        clear: Callable[[], object] = lambda: None  # noqa: E731 one of two
        if hooked:
            session = hook_all(engine)
            engine.restore()
            reader = RingReader(session.ring.path)
            clear = reader.poll
        measure(f"decode round, {title}", engine.decode, rounds, clear)
        measure(f"restore of 80 layers, {title}", engine.restore, max(1000, rounds // 10), clear)
        measure(f"wait_stream, {title}", lambda: engine.forward.wait_stream(engine.schedule), rounds, clear)
        measure(f"event record, {title}", lambda: engine.done.record(), rounds, clear)
    return found


def main() -> int:
    """Print what was seen; 1 if a hot call does I/O or takes a lock that is held across I/O."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=2000, help="decode rounds to watch in each state of the ring")
    parser.add_argument("--timed", type=int, default=20_000, help="decode rounds to time; 0 for none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as folder:
        os.environ |= {"HICACHE_OBS_DIR": folder, "HICACHE_OBS_AGENT": "off", "HICACHE_OBS_RING_SLOTS": str(1 << 14)}
        if options.timed:
            child = os.fork()  # before anything is watched
            if not child:
                _print_durations(options.timed)
                sys.stdout.flush()
                os._exit(0)
            if os.waitpid(child, 0)[1]:
                return 1
        threading.Lock, threading.RLock = _watched(_make_lock), _watched(_make_rlock)  # type: ignore[assignment, misc]
        sys.addaudithook(WATCH.audit)
        threading.setprofile(WATCH.profile)
        for name, run in states(options.rounds):
            run()
            print(f"ring {name}: {sum(WATCH.calls.values()):,} calls of C functions seen so far", flush=True)
    during = {name: what for name, what in WATCH.io_locks.items() if name not in WATCH.fences}
    shared = sorted(WATCH.hot_locks.keys() & during.keys())
    print(f"I/O or sleep in a hooked call: {dict(WATCH.io) or 'none'}")
    print(f"locks that hooked calls take: {dict(WATCH.hot_locks)}")
    print(f"locks that any thread held during I/O: {during or 'none'}")
    print(f"both: {', '.join(shared) or 'none'}")
    if not WATCH.hot_locks or not WATCH.calls:
        print("nothing was seen: nothing is shown", file=sys.stderr)
        return 1
    return int(bool(WATCH.io or shared))


def _print_durations(rounds: int) -> None:
    print(f"{'microseconds':48} {'p50':>9} {'p99':>9} {'p99.9':>9} {'worst':>9}")
    for name, times in durations(rounds).items():
        p50, p99, p999 = (times[int(len(times) * share)] / 1e3 for share in (0.5, 0.99, 0.999))
        print(f"{name:48} {p50:9.1f} {p99:9.1f} {p999:9.1f} {times[-1] / 1e3:9.1f}")


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # the flushers' threads would wait for their next turn
