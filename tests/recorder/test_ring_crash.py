"""What a ring is for: its process is killed, forks, or hangs, and the file still tells what it did."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack, closing

import numpy as np
import pytest

from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import ALL_LAYERS, CaptureMode, DropReason, EventRecord, Kernel, Lost, Mode, device

SLOTS, WORDS = 1024, 4096

# Writes records whose every field follows from their number, for ever; a record that is not whole cannot agree.
WRITER = f"""
import sys
import threading
import numpy as np
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import ALL_LAYERS, EventRecord, Kernel, Mode, device
ring = RingWriter(sys.argv[1], slots={SLOTS}, arena_words={WORDS})
print("ready", flush=True)
shared = np.arange(40)
n = 0
while True:
    if n % 3 == 0:
        fresh = np.full(1 + n % 17, n)
        ok = ring.append(Kernel(n, n % 7, n * 3, n * 5, n * 7, n * 11, n * 13, (n % 80, n % 80 + 1),
                                (device(Mode.READ, shared), device(Mode.WRITE, fresh))))
    else:
        ok = ring.append(EventRecord(n, n % 7, n * 3, n * 5, n * 7))
    n += ok
"""


def check(records, first):
    """Every record is the one its place says; returns the next number."""
    number = first
    for record in records:
        if isinstance(record, Lost):
            assert record.count > 0
            assert record.reason in (DropReason.RING_FULL, DropReason.ARENA_FULL)
            continue
        n = number
        assert (record.op, record.thread, record.host_ns) == (n, n % 7, n * 3)
        if n % 3 == 0:
            assert isinstance(record, Kernel)
            assert (record.stream, record.site, record.group, record.size_bytes) == (n * 5, n * 7, n * 11, n * 13)
            assert record.layers == (n % 80, n % 80 + 1)
            read, write = record.accesses
            assert read.ids.tolist() == list(range(40))
            assert write.ids.tolist() == [n] * (1 + n % 17)
        else:
            assert isinstance(record, EventRecord)
            assert (record.event, record.stream) == (n * 5, n * 7)
        number += 1
    return number


@pytest.mark.parametrize("seed", range(6))
def test_sigkill_at_a_random_moment_leaves_whole_records(tmp_path, seed):
    path = tmp_path / "x.ring"
    chance = random.Random(seed)
    with ExitStack() as stack:
        process = stack.enter_context(
            subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE)
        )
        stack.callback(process.kill)
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        reader = stack.enter_context(closing(RingReader(path)))
        number = 0
        deadline = time.monotonic() + chance.uniform(0.0, 0.3)
        while time.monotonic() < deadline:
            number = check(reader.poll(chance.choice((1, 50, SLOTS))), number)
        process.kill()
        process.wait()
        left = [record for record in read_ring(path) if not isinstance(record, Lost)]
        number = check(reader.poll(), number)
        assert reader.poll() == []
        if left:
            assert check(left, int(left[0].op)) == number


def test_a_forked_child_leaves_the_ring_to_its_parent(tmp_path):
    path = tmp_path / "x.ring"
    with closing(RingWriter(path, slots=8, arena_words=16)) as writer:
        writer.append(EventRecord(1, 0, 0, 1, 2))
        before = path.read_bytes()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                ok = not writer.append(EventRecord(2, 0, 0, 1, 2))
                writer.drop(DropReason.UNRESOLVED)
                writer.beat(77)
                ok = ok and writer.mode is CaptureMode.OFF and not writer.writable
                writer.close()
                code = 0 if ok else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert path.read_bytes() == before
        assert writer.append(EventRecord(3, 0, 0, 1, 2))
        assert [int(record.op) for record in read_ring(path)] == [1, 3]


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # it is what the test is about
def test_a_child_forked_in_the_middle_of_an_append_does_not_hang(tmp_path):
    """The lock is held by a thread that does not exist in the child."""
    with closing(RingWriter(tmp_path / "x.ring", slots=8, arena_words=16)) as writer:
        inside, go_on = threading.Event(), threading.Event()

        class Slow:
            def __index__(self):
                inside.set()
                go_on.wait()
                return 5

        thread = threading.Thread(target=writer.append, args=(EventRecord(1, 0, 0, 1, Slow()),))
        thread.start()
        inside.wait()
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            code = 1
            try:
                kept = writer.append(EventRecord(2, 0, 0, 1, 2))
                writer.close()
                code = 2 if kept else 0
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        go_on.set()
        thread.join()
        assert [int(record.op) for record in read_ring(writer.path)] == [1]


def test_a_spawned_child_has_a_ring_of_its_own(tmp_path):
    code = "import sys; from hicache_obs.recorder import RingWriter; RingWriter(sys.argv[1], slots=8, arena_words=16)"
    with closing(RingWriter(tmp_path / "parent.ring", slots=8, arena_words=16)):
        subprocess.run([sys.executable, "-c", code, str(tmp_path / "child.ring")], check=True)
    with closing(RingReader(tmp_path / "child.ring")) as reader:
        assert reader.info.pid != os.getpid()


def test_a_hung_process_does_not_disturb_the_reader(tmp_path):
    """The writer stops between filling the arena and publishing the record: nothing of it is seen."""
    with closing(RingWriter(tmp_path / "x.ring", slots=8, arena_words=16)) as writer:
        writer.append(EventRecord(1, 0, 0, 1, 2))

        class Killed(BaseException):
            pass

        class Deadly:
            def __index__(self):
                raise Killed

        half = Kernel(2, 0, 0, 1, 0, 0, Deadly(), ALL_LAYERS, (device(Mode.WRITE, np.arange(5)),))
        with pytest.raises(Killed):
            writer.append(half)
        with closing(RingReader(writer.path)) as reader:
            assert [int(record.op) for record in reader.poll()] == [1]
