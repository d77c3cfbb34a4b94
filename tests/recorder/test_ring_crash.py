"""What a ring is for: its process is killed, forks, or hangs, and the file still tells what it did."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import closing, suppress

import numpy as np
import pytest

from hicache_obs.errors import TraceError
from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import ALL_LAYERS, CaptureMode, DropReason, EventRecord, Kernel, Lost, Mode, device

KILLS = int(os.environ.get("HICACHE_OBS_KILLS", "20"))
"""Processes that are killed; `make crash` kills 200."""

# For each line, a path and two sizes, forks a process that writes records whose every field follows from their number,
# for ever; a record that is not whole cannot agree. Beside the ring, PATH.ack counts the appends that have returned.
NURSERY = """
import mmap
import os
import sys
import numpy as np
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import EventRecord, Kernel, Mode, device

def write(path, slots, words):
    with open(path + ".ack", "r+b") as file:
        returned = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    ring = RingWriter(path, slots=slots, arena_words=words)
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
        returned[0] = n

for line in sys.stdin:
    path, slots, words = line.split()
    child = os.fork()
    if not child:
        write(path, int(slots), int(words))
    print(child, flush=True)
    os.waitpid(child, 0)
    print("gone", flush=True)
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


@pytest.fixture
def nursery():
    """``write(path, slots, words)`` starts a writer of ``NURSERY``; returns its id, and what waits for its end."""
    with subprocess.Popen([sys.executable, "-c", NURSERY], stdin=-1, stdout=-1, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        answers = process.stdout

        def write(path, slots, words):
            path.with_name(path.name + ".ack").write_bytes(bytes(8))
            print(path, slots, words, file=process.stdin, flush=True)
            return int(answers.readline()), answers.readline

        yield write
        process.stdin.close()


def test_every_append_that_returned_before_a_sigkill_is_in_the_ring(tmp_path, nursery):
    """Killed at any moment, while it makes its ring too; with an agent that reads along, and without."""
    chance = random.Random(5)
    whole, records = 0, 0
    for kill in range(KILLS):
        path = tmp_path / f"{kill}.ring"
        pid, wait = nursery(path, chance.choice((64, 1024)), chance.choice((512, 4096)))
        reads_along = chance.random() < 0.7
        deadline = time.monotonic() + chance.choice((0.002, 0.01, 0.1)) * chance.random()
        reader, number = None, 0
        while time.monotonic() < deadline:
            if reads_along and reader is None:
                with suppress(TraceError):  # not made yet
                    reader = RingReader(path)
            elif reader is not None:
                number = check(reader.poll(chance.choice((1, 50, 1024))), number)
        os.kill(pid, signal.SIGKILL)
        assert wait() == "gone\n"
        returned = int.from_bytes(path.with_name(path.name + ".ack").read_bytes(), "little")
        try:
            reader = reader or RingReader(path)
        except TraceError:
            assert returned == 0, f"kill {kill}: the ring was in use"
            whole += 1
            continue
        with closing(reader):
            before = number
            left = [record for record in read_ring(path) if not isinstance(record, Lost)]
            number = check(reader.poll(), number)
            assert reader.poll() == []
        # The append that was killed may have been complete already.
        assert returned <= number <= returned + 1, f"kill {kill}: {returned} returned, {number} read"
        assert len(left) >= number - before
        assert check(left, number - len(left)) == number
        whole += 1
        records += number
    assert whole == KILLS
    assert records > KILLS


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
