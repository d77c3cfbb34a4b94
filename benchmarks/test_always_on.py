"""What being watched costs whoever launches: a decode round in each mode of ours, and with what one could use instead.

A decode round is a fence, a kernel that reads 256 pages and writes 32, an event and the wait for the one before it, on
the virtual device, whose own cost is the row *bare*. The peers put on the same thread, for the same round:
OpenTelemetry's spans (one a call, sampled out or not), NVTX ranges with texts of their own, ``prometheus_client``'s
classes, the handlers of torch's CUDA sanitizer, and our own analysis done in line.

``test_busy_loop`` is shaped like a scheduler under full load: the same round, then Python of its own. Many short turns,
the modes in an order drawn anew for each. It is timed on a clock too, since what it looks for is the interpreter lock
and the second core: with the node's agent as a process of its own, and with the analysis on a thread of the same
process. Both are held outside of the turns that are theirs, and look into their ring at the start of each: many times
as often as on a server.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import nvtx
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.sampling import TraceIdRatioBased
from prometheus_client import CollectorRegistry, Counter, Histogram
from pytest_benchmark.fixture import BenchmarkFixture

from hicache_obs.agent import Agent, RankPipeline
from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.readers.ring import RingReader
from hicache_obs.recorder import RecordedDevice, Recorder, create_ring
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.slot import pack_plain_into, pack_work
from hicache_obs.records import SLOT_BYTES, CaptureMode, Define, Mode, Work, device
from hicache_obs.streams.virtual import VirtualDevice
from hicache_obs.testing.median import median, percent_more

PAGES, NEW = 256, 32
ROUNDS, BATCHES = 100, 60
TURN, TURNS = 20, 600
MESSAGE = {f"request {number}": [number, number * 1.5, str(number)] for number in range(300)}
"""Written and read between two rounds of the busy loop, a few hundred microseconds. A loop that makes one integer after
the other would not do: how fast it is depends on where the allocator has room, and so on what was recorded before."""
SERVER_ROUNDS = 100
"""Rounds a second of a server, for what one costs as a part of its scheduler's thread."""
SLOTS, RECORDS = 1 << 16, 6
"""Slots of a ring, and the records of a round with the device times of two."""
AGENT, THREAD = "recording and agent", "recording and analysis on a thread"
Round = Callable[[], None]


class Engine:
    """Launches decode rounds on ``device``, one ahead of what it waits for."""

    def __init__(self, device_: Any) -> None:
        self._device = device_
        self._schedule, self._forward = device_.Stream("schedule"), device_.Stream("forward")
        self._events = [device_.Event() for _ in range(2)]
        self._pool = np.random.default_rng(0).permutation(1 << 14).astype(np.int64)
        self._rounds = 0
        self.pages = self._pool[:PAGES], self._pool[:NEW]
        """What the last round reads and writes."""

    def round(self) -> None:
        """One decode round."""
        self._rounds = number = self._rounds + 1
        at = number * NEW % (len(self._pool) - PAGES - NEW)
        self.pages = reads, writes = self._pool[at : at + PAGES], self._pool[at + PAGES : at + PAGES + NEW]
        self._forward.wait_stream(self._schedule)
        with self._device.stream(self._forward):
            accesses = (device(Mode.READ, reads), device(Mode.WRITE, writes))
            self._device.launch(_nothing, Work(site="forward", accesses=accesses, layers=(0, 1), group=number))
        self._events[number % 2].record(self._forward)
        if number > 1:
            self._events[(number + 1) % 2].synchronize()


def _nothing() -> None:
    """What the rounds compute."""


class Watched:
    """An engine on a device of its own, with what the mode puts around it. Close it.

    Args:
        folder: For the ring.
        recorded: Whether it records at all.
        mode: What the ring's mode byte says.
    """

    def __init__(self, folder: Path, *, recorded: bool = True, mode: CaptureMode = CaptureMode.OBSERVE) -> None:
        self._stack = contextlib.ExitStack()
        bare = self._stack.enter_context(contextlib.closing(VirtualDevice("eager")))
        self._recorder: Recorder | None = None
        if not recorded:
            self.round = Engine(bare).round
            return
        ring = create_ring("bench", directory=folder, clock=bare.host_ns, mode=mode)
        self._stack.callback(ring.close)
        self._recorder = Recorder(ring, clock=bare.host_ns, ranges=NoRanges())
        self._recorder.define_pool("kv", 1)
        self.ring = ring
        self.round = Engine(RecordedDevice(bare, self._recorder)).round

    def rounds(self, count: int = ROUNDS) -> None:
        """``count`` rounds; device times are asked for every tenth, as ten times a second at 100 rounds a second."""
        for _ in range(count // 10):
            for _ in range(10):
                self.round()
            self.resolve()

    def resolve(self) -> int:
        """Ask for device times."""
        return 0 if self._recorder is None else self._recorder.resolve()

    def reader(self) -> RingReader:
        """Reads the ring in this process."""
        return self._stack.enter_context(contextlib.closing(RingReader(self.ring.path)))

    def close(self) -> None:
        self._stack.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """For rings: in memory, as a server's are unless it is told otherwise. On a disk, writing to a page may fault."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.fixture
def watched(folder: Path) -> Iterator[Callable[..., Watched]]:
    """``watched(inside=..., recorded=..., mode=...)``: a ``Watched`` that is closed at the end."""
    with contextlib.ExitStack() as stack:
        yield lambda inside=folder, **options: stack.enter_context(contextlib.closing(Watched(inside, **options)))


@contextlib.contextmanager
def agent_of(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The node's agent as a process of its own; it serves no port that anybody asks."""
    command = [sys.executable, "-m", "hicache_obs", "agent", "--port", "0"]
    environment = {**os.environ, "HICACHE_OBS_DIR": str(folder)}
    with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        try:
            time.sleep(2)  # it has imported what it needs, and found the ring
            assert process.poll() is None
            yield process
        finally:
            process.terminate()
            process.send_signal(signal.SIGCONT)
            process.wait(timeout=60)


def _measure(benchmark: BenchmarkFixture, run: Round, setup: Callable[[], object] = lambda: None) -> None:
    benchmark.group = f"launching thread: {ROUNDS} decode rounds"
    benchmark.pedantic(run, setup=lambda: setup() and None, rounds=BATCHES, warmup_rounds=3)
    benchmark.extra_info["us per round"] = round(benchmark.stats.stats.min * 1e6 / ROUNDS, 2)


def test_bare(benchmark: BenchmarkFixture, watched: Callable[..., Watched]) -> None:
    """Nobody watches."""
    _measure(benchmark, watched(recorded=False).rounds)


def test_off(benchmark: BenchmarkFixture, watched: Callable[..., Watched]) -> None:
    """Wrapped, and the mode byte says off."""
    engine = watched(mode=CaptureMode.OFF)
    reader = engine.reader()
    _measure(benchmark, engine.rounds)
    assert all(isinstance(record, Define) for record in reader.poll())


def test_recording(benchmark: BenchmarkFixture, watched: Callable[..., Watched]) -> None:
    """Recording; between the batches somebody empties the ring."""
    engine = watched()
    reader = engine.reader()
    _measure(benchmark, engine.rounds, reader.poll)
    assert len(reader.poll()) > 4 * ROUNDS
    assert not any(reader.dropped.values())


class Floor:
    """The least that the records of a round can cost in plain Python, on the engine of ``bare``.

    A record is one reading of the device's clock, one call that packs the slot and a store that publishes it; the page
    ids are copied beside. What a ``Recorder`` does besides is left out: the hooks themselves, locks, threads, counts,
    bounds, losses, the switch, arrays that records share, event pairs and what it takes to ask them for their times.
    """

    def __init__(self, bare: VirtualDevice) -> None:
        self._engine = Engine(bare)
        self._clock = bare.host_ns
        self._slots = bytearray(SLOTS * SLOT_BYTES)
        self._ids = np.zeros(1 << 20, dtype=np.int64)
        self._head = memoryview(bytearray(8)).cast("q")

    def round(self) -> None:
        """One decode round and its records: wait, kernel, event, synchronize, and the times of the first two."""
        self._engine.round()
        slots, clock, published = self._slots, self._clock, self._head
        head = published[0]
        at = head // RECORDS * (PAGES + NEW) % (len(self._ids) - PAGES - NEW)
        reads, writes = self._engine.pages
        self._ids[at : at + PAGES], self._ids[at + PAGES : at + PAGES + NEW] = reads, writes
        pack_work[2](
            slots, head % SLOTS * SLOT_BYTES, 0, head, clock(), 1, 2, 3, 4, 0, 1,
            0, 0, 0, PAGES, at, 0, 1, 0, NEW, at + PAGES,
        )  # fmt: skip
        published[0] = head = head + 1
        for word in range(1, 4):
            pack_plain_into(slots, head % SLOTS * SLOT_BYTES, word, head, clock(), 1, 2)
            published[0] = head = head + 1
        for word in range(4, RECORDS):
            pack_work[0](slots, head % SLOTS * SLOT_BYTES, word, head, clock(), 1, 2, 3, 4, 0, 0)
            published[0] = head = head + 1

    @property
    def records(self) -> int:
        """How many have been made."""
        return self._head[0]


def test_floor_clock_and_pack_per_record(benchmark: BenchmarkFixture) -> None:
    """No hook at all: only what cannot be left out of six records of a round."""
    with contextlib.closing(VirtualDevice("eager")) as bare:
        floor = Floor(bare)

        def run() -> None:
            for _ in range(ROUNDS):
                floor.round()

        _measure(benchmark, run)
    assert floor.records >= RECORDS * ROUNDS * BATCHES


def test_recording_and_agent(benchmark: BenchmarkFixture, watched: Callable[..., Watched], folder: Path) -> None:
    """Recording, and the node's agent reads and judges meanwhile on the other core."""
    engine = watched()
    with agent_of(folder):
        _measure(benchmark, engine.rounds, lambda: time.sleep(0.2))
    reader = engine.reader()
    assert not any(reader.dropped.values())
    assert reader.position > 4 * ROUNDS * BATCHES


def test_analysis_in_line(benchmark: BenchmarkFixture, watched: Callable[..., Watched]) -> None:
    """Recording, and the same thread judges after every tenth round."""
    engine = watched()
    tally = Tally()
    pipeline = RankPipeline(engine.reader(), Analyzer(tally))

    def run() -> None:
        for _ in range(ROUNDS // 10):
            engine.rounds(10)
            pipeline.step()

    _measure(benchmark, run)
    assert sum(tally.checked.values()) > 0
    assert not tally.defects


@pytest.mark.parametrize("one_in", [1, 100])
def test_opentelemetry(benchmark: BenchmarkFixture, watched: Callable[..., Watched], one_in: int) -> None:
    """A span a round with one for each of its four calls, made where they are launched; nothing is sent."""
    tracer = TracerProvider(sampler=TraceIdRatioBased(1 / one_in)).get_tracer("bench")
    step = watched(recorded=False).round

    def run() -> None:
        for number in range(ROUNDS):
            with tracer.start_as_current_span("round", attributes={"round": number, "pages": PAGES}):
                for name in ("wait", "forward", "record", "synchronize"):
                    with tracer.start_as_current_span(name, attributes={"stream": "forward"}):
                        pass
                step()

    _measure(benchmark, run)


def test_nvtx_texts(benchmark: BenchmarkFixture, watched: Callable[..., Watched]) -> None:
    """A range a round with a text of its own, and one a call; no tool is attached."""
    step = watched(recorded=False).round

    def run() -> None:
        for number in range(ROUNDS):
            with nvtx.annotate(f"round {number}: {PAGES} pages"):
                for name in ("wait", "forward", "record", "synchronize"):
                    with nvtx.annotate(f"{name} of round {number}"):
                        pass
                step()

    _measure(benchmark, run)


def test_prometheus_client(benchmark: BenchmarkFixture, watched: Callable[..., Watched]) -> None:
    """A counter and a histogram of each of its four calls, as one would instrument them by hand; it judges nothing."""
    registry = CollectorRegistry()
    calls = Counter("calls", "Calls.", ["call"], registry=registry)
    seconds = Histogram("seconds", "Of a call.", ["call"], registry=registry)
    children = [(calls.labels(name), seconds.labels(name)) for name in ("wait", "forward", "record", "synchronize")]
    step = watched(recorded=False).round

    def run() -> None:
        for _ in range(ROUNDS):
            for counter, histogram in children:
                start = time.perf_counter()
                counter.inc()
                histogram.observe(time.perf_counter() - start)
            step()

    _measure(benchmark, run)


def test_cuda_sanitizer(benchmark: BenchmarkFixture, watched: Callable[..., Watched], sanitizer: Any) -> None:
    """The handlers of torch's CUDA sanitizer, called for the round's records, one address for all pages.

    What it takes to get from torch's dispatcher to the handlers is not in here.
    """
    engine = watched()
    reader = engine.reader()
    engine.rounds()
    records = [record for record in reader.poll() if not isinstance(record, Define)]
    step = watched(recorded=False).round

    def run() -> None:
        for _ in range(ROUNDS):
            step()
        sanitizer.feed(records)

    _measure(benchmark, run)


# -- a scheduler under full load -----------------------------------------------------------------------------


def _busy(engine: Watched) -> tuple[float, float]:
    """Seconds on the clock and of processor time for a turn of the loop."""
    clock, used = time.perf_counter(), time.thread_time()
    for _ in range(TURN // 10):
        for _ in range(10):
            engine.round()
            json.loads(json.dumps(MESSAGE))
        engine.resolve()
    return time.perf_counter() - clock, time.thread_time() - used


@contextlib.contextmanager
def _analysis(engine: Watched) -> Iterator[threading.Event]:
    """The analysis on a thread of this process. It looks into the ring while the event is set."""
    tally, theirs = Tally(), threading.Event()
    agent = Agent(RankPipeline(engine.reader(), Analyzer(tally)), resolve=lambda: theirs.wait() and 0)
    agent.start()
    yield theirs
    theirs.set()
    agent.finish()
    assert sum(tally.checked.values()) > 0


def test_busy_loop(benchmark: BenchmarkFixture, watched: Callable[..., Watched], folder: Path) -> None:
    """Percent slower than *bare* in the same turn; *bare again* tells what is measured where nothing is different."""
    inside = folder / "agent"
    inside.mkdir(mode=0o700)
    engines = {name: watched(recorded=False) for name in ("bare", "bare again")}
    engines |= {"recording": watched(), AGENT: watched(inside), THREAD: watched()}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
    order, draw, alone = list(engines), random.Random(0), engines["recording"].reader()

    def turns(process: subprocess.Popen[bytes], theirs: threading.Event) -> None:
        draw.shuffle(order)
        for name in order:
            if name == AGENT:
                process.send_signal(signal.SIGCONT)
            elif name == THREAD:
                theirs.set()
            times[name].append(_busy(engines[name]))
            process.send_signal(signal.SIGSTOP)
            theirs.clear()
        alone.poll()

    benchmark.group = f"busy loop: {TURNS} turns of {TURN} rounds, each with host work"
    with agent_of(inside) as process, _analysis(engines[THREAD]) as theirs:
        benchmark.pedantic(turns, args=(process, theirs), rounds=TURNS, warmup_rounds=5)
    read = engines[AGENT].reader()
    assert read.position > 4 * TURN * TURNS
    assert not any(read.dropped.values())
    bare = list(zip(*times["bare"], strict=True))
    for name, mine in times.items():
        clock, used = zip(*mine, strict=True)
        row: dict[str, object] = {"us per round": round(statistics.median(used) * 1e6 / TURN, 1)}
        if name != "bare":
            row["% slower by processor time (95 % interval)"] = f"{percent_more(used, bare[1]):.2f}"
            row["% slower by the clock (95 % interval)"] = f"{percent_more(clock, bare[0]):.2f}"
            more = [100 * SERVER_ROUNDS * (after - before) / TURN for after, before in zip(clock, bare[0], strict=True)]
            row[f"% of a thread at {SERVER_ROUNDS} rounds/s (95 % interval)"] = f"{median(more):.3f}"
        benchmark.extra_info[name] = row
