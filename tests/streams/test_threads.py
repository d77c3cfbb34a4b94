"""The threads device: real concurrency, gates, and a clean end."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
import weakref
from contextlib import closing

import pytest

from hicache_obs.errors import StreamError
from hicache_obs.records import Work
from hicache_obs.streams import ThreadsDevice

TIMEOUT_S = 20.0


def test_operations_of_two_streams_run_side_by_side(threads):
    a, b = threads.streams("a b")
    meet = threading.Barrier(2, timeout=TIMEOUT_S)
    for stream in (a, b):
        threads.run(lambda: meet.wait(), stream)
    threads.device.synchronize()  # raises BrokenBarrierError if they did not meet


def test_the_host_does_not_wait_for_its_launches(threads):
    (a,) = threads.streams("a")
    go = threading.Event()
    threads.run(lambda: go.wait(TIMEOUT_S), a)
    event = a.record_event()
    assert not event.query()
    assert not a.query()
    go.set()
    event.synchronize()
    assert a.query()


def test_each_host_thread_has_its_own_current_stream(threads):
    a, b = threads.streams("a b")
    seen = []

    def other_thread() -> None:
        seen.append(threads.device.current_stream().name)
        with threads.device.stream(b):
            seen.append(threads.device.current_stream().name)

    with threads.device.stream(a):
        thread = threading.Thread(target=other_thread)
        thread.start()
        thread.join(TIMEOUT_S)
        assert threads.device.current_stream().name == "a"
    assert seen == ["default", "b"]


def test_many_host_threads_share_streams_and_lose_nothing(threads):
    streams = threads.streams("a b c")
    counts = [0, 0, 0]
    log: list[tuple[int, int]] = []

    def count(which: int, item: tuple[int, int]) -> None:
        counts[which] += 1  # only this stream's worker writes it
        log.append(item)

    def host(number: int) -> None:
        for step in range(100):
            which = step % 3
            threads.run(lambda w=which, s=step: count(w, (number, s)), streams[which])
            streams[which].wait_stream(streams[(which + 1) % 3])

    hosts = [threading.Thread(target=host, args=(number,)) for number in range(4)]
    for thread in hosts:
        thread.start()
    for thread in hosts:
        thread.join(TIMEOUT_S)
    threads.device.synchronize()
    assert counts == [136, 132, 132]
    for number in range(4):
        for which in range(3):
            steps = [step for host_number, step in log if host_number == number and step % 3 == which]
            assert steps == sorted(steps)


# Gates.


def _parked(threads, *streams) -> bool:
    """Wait until the workers of ``streams`` stand at a wait."""
    workers = [stream.worker for stream in streams]
    return threads.device.crew.wait_until(lambda: all(worker.parked for worker in workers), TIMEOUT_S)


def test_a_gate_blocks_a_wait_for_what_it_holds(threads):
    a, b = threads.streams("a b")
    gate = threads.device.gate()
    gate.hold(a)
    threads.op("held", a)
    assert not gate.blocks(b)
    b.wait_stream(a)
    threads.op("waits", b)
    assert gate.wait_blocks_or(b, b.record_event(), timeout_s=TIMEOUT_S)
    assert gate.blocks(b)
    assert threads.ran() == []
    gate.open()
    assert not gate.blocks(b)
    threads.device.synchronize()
    assert threads.ran() == ["held", "waits"]


def test_a_gate_does_not_block_a_wait_for_what_is_before_it(threads):
    """Parked, but on the work in front of the hold."""
    a, b = threads.streams("a b")
    gate, go = threads.device.gate(), threading.Event()
    threads.run(lambda: go.wait(TIMEOUT_S), a)
    b.wait_stream(a)
    gate.hold(a)
    threads.op("held", a)
    threads.op("free", b)
    done = b.record_event()
    assert _parked(threads, b)
    assert not gate.blocks(b)
    assert not gate.wait_blocks_or(b, done, timeout_s=0)
    go.set()
    assert gate.wait_blocks_or(b, done, timeout_s=TIMEOUT_S)
    assert not gate.blocks(b)
    assert threads.ran() == ["free"]
    gate.open()


@pytest.mark.parametrize("behind", [True, False])
def test_a_gate_blocks_over_a_chain_of_streams(threads, behind):
    a, b, c, d = threads.streams("a b c d")
    gate, go = threads.device.gate(), threading.Event()
    threads.run(lambda: go.wait(TIMEOUT_S), b)
    if behind:
        gate.hold(a)
    c.wait_stream(a)
    if not behind:
        gate.hold(a)
    c.wait_stream(b)
    d.wait_stream(c)
    done = d.record_event()
    assert _parked(threads, c, d)
    assert gate.wait_blocks_or(d, done, timeout_s=TIMEOUT_S if behind else 0) == behind
    assert gate.blocks(d) == behind
    assert gate.blocks(c) == behind
    assert not gate.blocks(a)
    go.set()
    gate.open()
    threads.device.synchronize()


def test_two_gates_are_told_apart(threads):
    a, b = threads.streams("a b")
    first, second = threads.device.gate(), threads.device.gate()
    first.hold(a)
    b.wait_stream(a)
    assert first.wait_blocks_or(b, b.record_event(), timeout_s=TIMEOUT_S)
    assert (first.blocks(b), second.blocks(b)) == (True, False)
    second.open()
    assert first.blocks(b)
    first.open()


def test_an_open_gate_lets_everything_pass_and_opens_twice(threads):
    a, b = threads.streams("a b")
    gate, go = threads.device.gate(), threading.Event()
    gate.open()
    threads.run(lambda: go.wait(TIMEOUT_S), a)
    gate.hold(a)
    b.wait_stream(a)
    assert _parked(threads, b)
    assert not gate.blocks(b)
    go.set()
    threads.op("x", b)
    b.synchronize()
    gate.open()
    assert threads.ran() == ["x"]


def test_waiting_for_a_gate_wakes_when_another_thread_opens_it(threads):
    a, b = threads.streams("a b")
    gate = threads.device.gate()
    gate.hold(a)
    done = a.record_event()
    answers = []
    thread = threading.Thread(
        target=lambda: answers.append(gate.wait_blocks_or(b, done, timeout_s=TIMEOUT_S)), daemon=True
    )
    thread.start()
    gate.open()
    thread.join(TIMEOUT_S)
    assert answers == [True]


# The end.


def test_close_opens_forgotten_gates_and_ends_the_threads():
    device, ran = ThreadsDevice(), []
    stream = device.Stream("held")
    device.gate().hold(stream)
    with device.stream(stream):
        device.launch(lambda: ran.append("x"), Work("x"))
    threads = [worker.thread for worker in device.crew.workers]
    assert [thread.name for thread in threads] == ["hicache-obs default", "hicache-obs held"]
    device.close()
    assert ran == ["x"]
    assert not any(thread.is_alive() for thread in threads)
    with pytest.raises(StreamError, match=r"Stream 'late': the device is closed"):
        device.Stream("late")


def test_a_forgotten_device_is_collected_with_its_threads():
    device = ThreadsDevice()
    device.Stream("a").synchronize()
    threads = [worker.thread for worker in device.crew.workers]
    gone = weakref.ref(device)
    del device
    gc.collect()
    assert gone() is None
    for thread in threads:
        thread.join(TIMEOUT_S)
        assert not thread.is_alive()


def test_an_idle_worker_keeps_nothing_alive():
    class Tensor:
        pass

    with closing(ThreadsDevice()) as device:
        tensor = Tensor()
        gone = weakref.ref(tensor)
        device.launch(lambda tensor=tensor: None, Work("x"))
        del tensor
        give_up = time.monotonic() + TIMEOUT_S
        while gone() is not None and time.monotonic() < give_up:
            pass  # asking the device would give its worker something else to hold
        assert gone() is None


FORGETFUL = """
from hicache_obs.records import Work
from hicache_obs.streams import ThreadsDevice
device = ThreadsDevice()
stream = device.Stream("held")
device.gate().hold(stream)
with device.stream(stream):
    device.launch(lambda: print("ran"), Work("x"))
"""


def test_the_interpreter_exits_cleanly_with_a_closed_gate_and_queued_work():
    done = subprocess.run([sys.executable, "-c", FORGETFUL], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ran\n", "")
