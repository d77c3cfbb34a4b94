"""The third tier: pages and back ends; an engine that finds its prefixes again; and everything that goes wrong."""

from __future__ import annotations

import builtins
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hicache_obs.controller.engine import Engine
from hicache_obs.controller.host_threads import NoRecorder, RealThreads
from hicache_obs.controller.storage import Throttle
from hicache_obs.controller.storage_backend import STALE_S, FileBackend, FsspecBackend, open_backend
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.storage_page import (
    NO_TAG,
    BadPage,
    checksum,
    pack_page,
    page_keys,
    unpack_page,
)
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError, ControllerError
from hicache_obs.findings import Hazard
from hicache_obs.records import HostAccess, IoBegin, IoEnd, IoKind, ThreadPost, ThreadRecv
from hicache_obs.streams import SCHEDULES
from hicache_obs.testing.chaos import ChaosBackend, Mishaps
from hicache_obs.testing.consistency import check_drained, check_engine
from hicache_obs.testing.memory_backend import MemoryBackend
from hicache_obs.testing.protections import (
    without_completed_backups,
    without_storage_holds,
    without_storage_replies,
)

WRITER = b"w" * 16
SETUP = {"device_pages": 20, "host_pages": 16, "max_running": 2}
"""Two requests of seven pages fit the device, two fit host memory, and ten prompts go round: most come from storage."""


def prompts(rounds: int = 3, count: int = 10) -> list[Request]:
    """The same prompts again and again, with a common beginning."""
    one = [np.concatenate([np.arange(8), 100 + 30 * n + np.arange(17)]) for n in range(count)]
    return [Request(n, 0, one[n % count], 3) for n in range(rounds * count)]


# -- pages ------------------------------------------------------------------------------------------------------------


def test_a_key_depends_on_all_tokens_before_it_and_on_the_model():
    keys = page_keys("model", np.arange(13), 4)
    assert len(keys) == len(set(keys)) == 3
    assert page_keys("model", np.arange(8), 4) == keys[:2]
    other = page_keys("model", np.array([9, *range(1, 12)]), 4)
    assert set(other).isdisjoint(keys)
    assert set(page_keys("other", np.arange(12), 4)).isdisjoint(keys)


def packed(payload: bytes = b"abcd", tag: int = 7) -> bytes:
    return pack_page(payload, WRITER, tag, checksum("key", payload, WRITER, tag))


def test_a_page_comes_back_as_it_was_stored():
    page = unpack_page(packed(), 4)
    assert (bytes(page.payload), page.writer, page.tag) == (b"abcd", WRITER, 7)
    assert page.checksum == checksum("key", page.payload, WRITER, 7)
    assert page.checksum != checksum("other", page.payload, WRITER, 7)
    assert page.checksum != checksum("key", page.payload, WRITER, NO_TAG)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "0 bytes; a page has 68"),
        (packed()[:30], "30 bytes; a page has 68"),
        (packed()[:-1], "3 bytes of payload, 4 stated; expected 4"),
        (packed(b"abcdef"), "6 bytes of payload, 6 stated; expected 4"),
        (packed() + b"x", "5 bytes of payload, 4 stated; expected 4"),
        (b"x" + packed()[1:], "no page of version 1: it begins with b'xicapage"),
    ],
)
def test_what_is_no_page(data, message):
    with pytest.raises(BadPage) as bad:
        unpack_page(data, 4)
    assert str(bad.value).startswith(message)


# -- back ends --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["file", "file-url", "fsspec", "fsspec-local"])
def test_back_ends_keep_what_they_are_given(tmp_path, kind):
    urls = {
        "file": str(tmp_path / "a"),
        "file-url": f"file://{tmp_path}/a",
        "fsspec": f"memory://{tmp_path.name}",
        "fsspec-local": f"local://{tmp_path}/a",
    }
    backend = open_backend(urls[kind])
    assert isinstance(backend, FsspecBackend if kind.startswith("fsspec") else FileBackend)
    assert (backend.exists("aa11"), backend.read("aa11")) == (False, None)
    backend.write("aa11", b"one")
    backend.write("aa11", b"two")
    backend.write("ab11", b"")
    assert (backend.exists("aa11"), backend.read("aa11"), backend.read("ab11")) == (True, b"two", b"")
    assert open_backend(urls[kind]).read("aa11") == b"two"


def test_a_write_that_fails_leaves_nothing(tmp_path, monkeypatch):
    backend = FileBackend(tmp_path)
    backend.write("aa11", b"one")

    def full(self: Path, data: bytes) -> int:
        with self.open("wb") as file:
            file.write(data[:1])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OSError, match="No space left"):
        backend.write("aa11", b"two")
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["aa11"]
    assert backend.read("aa11") == b"one"


def test_what_a_killed_writer_left_is_removed_once_it_is_old(tmp_path):
    folder = tmp_path / "aa"
    folder.mkdir()
    for name in (".aa11.0.partial", ".aa12.1.partial", "aa13"):
        (folder / name).write_bytes(b"x")
    old = time.time() - STALE_S - 60
    os.utime(folder / ".aa11.0.partial", (old, old))
    os.utime(folder / "aa13", (old, old))
    FileBackend(tmp_path)
    assert sorted(path.name for path in folder.iterdir()) == [".aa12.1.partial", "aa13"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("", "storage '': expected a folder, or a URL like memory://name or s3://bucket/folder"),
        ("memory://", "storage 'memory://': expected a folder"),
        ("nosuch://x", "storage nosuch://x: cannot be used (ValueError: Protocol not known: nosuch)"),
        ("/proc/version/x", "storage /proc/version/x: cannot be made (Not a directory); expected a writable folder"),
    ],
)
def test_storage_that_cannot_be_used(url, message):
    with pytest.raises(ConfigError) as refused:
        open_backend(url)
    assert str(refused.value).startswith(message)


def test_without_fsspec_the_extra_is_named(monkeypatch):
    imported = builtins.__import__

    def no_fsspec(name, *args, **kwargs):
        if name == "fsspec":
            raise ImportError(name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_fsspec)
    with pytest.raises(ConfigError, match=r"^storage memory://x: needs fsspec; install hicache-obs\[storage\]$"):
        open_backend("memory://x")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch": "never"}, "storage prefetch: 'never'; expected one of best_effort, wait, timeout"),
        ({"timeout_ms": -1}, "storage timeout_ms: -1; expected an integer ≥ 0"),
        ({"batch_pages": 0}, "storage batch_pages: 0; expected an integer ≥ 1"),
        ({"close_timeout_s": 0}, "storage close_timeout_s: 0; expected a number > 0"),
    ],
)
def test_settings_that_are_refused(options, message):
    with pytest.raises(ConfigError) as refused:
        StorageConfig("x", **options)
    assert str(refused.value) == message


class Clock:
    """Threads of which only the time is used."""

    def __init__(self) -> None:
        self.slept: list[int] = []
        self.now = 0

    def now_ns(self) -> int:
        return self.now

    def sleep(self, duration_ns: int) -> None:
        self.slept.append(duration_ns)
        self.now += duration_ns


def test_a_throttle_spreads_bytes_over_time():
    clock = Clock()
    throttle = Throttle(1000, clock)
    for _ in range(3):
        throttle.take(500)
    assert clock.slept == [500_000_000, 500_000_000]
    clock.now += 10_000_000_000
    throttle.take(500)
    assert len(clock.slept) == 2
    Throttle(0, clock).take(1 << 40)
    assert len(clock.slept) == 2


# -- an engine --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runner", ["pattern", "transformer"])
@pytest.mark.parametrize("backend", [*(f"virtual-{schedule}" for schedule in SCHEDULES), "threads"])
def test_prefixes_come_back_from_storage(lab, tmp_path, backend, runner):
    requests = prompts()
    config = StorageConfig(str(tmp_path), prefetch="wait")
    run = lab.run(requests, backend=backend, runner=runner, storage=config, after_step=check_engine, **SETUP)
    assert run.outputs == lab.reference(requests, runner=runner)
    assert run.findings == []
    assert run.corrupted == []
    storage = run.engine.scheduler.storage
    assert storage.counters.prefetched_pages > 5
    assert storage.tier.counters.stored_pages > 30
    assert (storage.tier.counters.bad_pages, storage.tier.counters.read_errors, storage.busy) == (0, 0, False)
    check_drained(run.engine)


def test_what_storage_threads_do_is_recorded(lab, tmp_path):
    run = lab.run(prompts(), storage=StorageConfig(str(tmp_path), prefetch="wait"), **SETUP)
    counters = run.engine.scheduler.storage.tier.counters
    ios = run.of_kind(IoBegin)
    read = [io for io in ios if io.kind is IoKind.STORAGE_READ]
    written = [io for io in ios if io.kind is IoKind.STORAGE_WRITE]
    assert len(ios) == len(run.of_kind(IoEnd))
    assert sum(len(io.accesses[0].ids) for io in read) >= counters.fetched_pages > 0
    assert sum(len(io.accesses[0].ids) for io in written) == counters.stored_pages > 0
    assert len(run.of_kind(HostAccess)) == len(ios)
    main = {record.thread for record in run.of_kind(ThreadPost)} & {0}
    assert main == {0}
    assert len({io.thread for io in ios}) == 2
    assert 0 not in {io.thread for io in ios}
    assert len(run.of_kind(ThreadPost)) == len(run.of_kind(ThreadRecv))


def test_a_virtual_run_with_storage_is_the_same_every_time(lab):
    setup = {**SETUP, "backend": "virtual-random", "seed": 5, "storage": StorageConfig("memory")}
    runs = [lab.run(prompts(), store=MemoryBackend(), **setup) for _ in range(2)]
    first, second = ([(type(r), r.op, r.thread, r.host_ns) for r in run.records] for run in runs)
    assert first == second
    assert runs[0].engine.scheduler.storage.tier.counters == runs[1].engine.scheduler.storage.tier.counters
    assert runs[0].engine.scheduler.storage.counters.prefetched_pages > 0


def test_another_seed_interleaves_the_threads_otherwise(lab):
    def threads(seed: int) -> list[int]:
        setup = {**SETUP, "backend": "virtual-eager", "seed": seed, "storage": StorageConfig("memory")}
        return [record.thread for record in lab.run(prompts(1), store=MemoryBackend(), **setup).records]

    assert len({tuple(threads(seed)) for seed in range(4)}) == 4


def test_a_second_engine_finds_what_the_first_has_stored(lab, tmp_path):
    requests = prompts(1)
    config = StorageConfig(str(tmp_path), prefetch="wait")
    first = lab.run(requests, storage=config, **SETUP)
    assert first.engine.scheduler.storage.counters.prefetched_pages == 0
    second = lab.run(requests, storage=config, **SETUP)
    storage = second.engine.scheduler.storage
    assert second.outputs == first.outputs == lab.reference(requests)
    assert storage.counters.prefetched_pages > 10
    assert storage.tier.counters.stored_pages < first.engine.scheduler.storage.tier.counters.stored_pages / 2
    assert second.engine.controller.counters.restored_pages > first.engine.controller.counters.restored_pages


def test_another_model_does_not_find_it(lab, tmp_path):
    requests = prompts(1)
    config = StorageConfig(str(tmp_path), prefetch="wait")
    lab.run(requests, storage=config, **SETUP)
    other = lab.run(requests, runner="transformer", storage=config, **SETUP)
    assert other.engine.scheduler.storage.tier.counters.known_pages == 0
    assert other.outputs == lab.reference(requests, runner="transformer")


@pytest.mark.parametrize("prefetch", ["best_effort", "wait", "timeout"])
def test_how_long_a_request_waits(lab, tmp_path, prefetch):
    requests = prompts()
    config = StorageConfig(str(tmp_path), prefetch=prefetch, timeout_ms=0)
    early = 0
    for seed in range(4):
        run = lab.run(requests, storage=config, seed=seed, after_step=check_engine, **SETUP)
        assert run.outputs == lab.reference(requests)
        assert run.findings == []
        early += run.engine.scheduler.storage.counters.timeouts
    assert (early == 0) == (prefetch == "wait")


# -- what goes wrong --------------------------------------------------------------------------------------------------


def stored_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def test_a_gap_in_storage_ends_the_prefix(lab, tmp_path):
    """Of a prompt of six pages the fourth is gone: three come back, the rest is computed."""
    request = Request(0, 0, np.arange(25), 1)
    config = StorageConfig(str(tmp_path), prefetch="wait")
    lab.run([request], storage=config)
    engine, _ = lab.build(lab.setup(storage=config), [request])
    keys = page_keys("pattern 3 2 4 4 512 0", request.prompt, 4)
    assert {path.name for path in stored_files(tmp_path)} == set(keys)
    (tmp_path / keys[3][:2] / keys[3]).unlink()
    engine.run([request])
    engine.close()
    assert engine.scheduler.storage.counters.prefetched_pages == 3
    assert engine.scheduler.outputs == lab.reference([request])


@pytest.mark.parametrize("damage", ["flipped", "half", "empty", "other page", "header"])
def test_a_damaged_page_is_a_miss(lab, tmp_path, damage):
    request = Request(0, 0, np.arange(25), 1)
    config = StorageConfig(str(tmp_path), prefetch="wait")
    lab.run([request], storage=config)
    keys = page_keys("pattern 3 2 4 4 512 0", request.prompt, 4)
    path = tmp_path / keys[2][:2] / keys[2]
    data = path.read_bytes()
    damaged = {
        "flipped": data[:-1] + bytes([data[-1] ^ 1]),
        "half": data[: len(data) // 2],
        "empty": b"",
        "other page": (tmp_path / keys[4][:2] / keys[4]).read_bytes(),
        "header": data[:24] + bytes([data[24] ^ 1]) + data[25:],
    }
    path.write_bytes(damaged[damage])
    run = lab.run([request], storage=config, after_step=check_engine)
    storage = run.engine.scheduler.storage
    assert run.outputs == lab.reference([request])
    assert storage.tier.counters.bad_pages == 1
    assert storage.counters.prefetched_pages == 2
    check_drained(run.engine)


@pytest.mark.parametrize(
    "mishaps",
    [
        Mishaps(fails=0.3),
        Mishaps(wrong=0.5),
        Mishaps(half=0.5),
        Mishaps(vanishes=0.5),
        Mishaps(kills=0.05),
        Mishaps(fails=0.1, wrong=0.1, half=0.1, vanishes=0.1, kills=0.02),
        Mishaps(fails=1.0),
    ],
)
@pytest.mark.parametrize("backend", ["virtual-adversarial", "threads"])
def test_chaos(lab, mishaps, backend):
    """Right tokens, no page lost, nothing found, and what happened is counted."""
    requests = prompts()
    store = ChaosBackend(MemoryBackend(), mishaps, seed=1)
    config = StorageConfig("memory", prefetch="wait")
    run = lab.run(requests, backend=backend, storage=config, store=store, after_step=check_engine, **SETUP)
    assert run.outputs == lab.reference(requests)
    assert run.findings == []
    assert run.corrupted == []
    check_drained(run.engine)
    counters = run.engine.scheduler.storage.tier.counters
    assert counters.bad_pages <= store.happened["wrong"] + store.happened["half"]  # the first of a batch ends it
    assert bool(counters.bad_pages) == bool(store.happened["wrong"] + store.happened["half"])
    assert counters.read_errors + counters.write_errors == store.happened["fails"]
    assert counters.deaths == store.happened["kills"]
    assert sum(store.happened.values()) > 0


def test_a_thread_that_died_is_replaced_and_then_the_tier_is_off(lab):
    requests = prompts(1)
    store = ChaosBackend(MemoryBackend(), Mishaps(kills=1.0))
    config = StorageConfig("memory", prefetch="wait", max_restarts=2)
    run = lab.run(requests, storage=config, store=store, after_step=check_engine, **SETUP)
    assert run.outputs == lab.reference(requests)
    storage = run.engine.scheduler.storage
    assert storage.tier.off
    assert storage.tier.counters.deaths >= 3
    assert storage.counters.skipped_backup_pages > 0
    check_drained(run.engine)


class Closed:
    """A back end whose calls do not return until it is opened."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.called = threading.Event()

    def exists(self, key: str) -> bool:
        self.called.set()
        self.open.wait()
        return False

    def read(self, key: str) -> bytes | None:
        raise AssertionError("nothing is there")

    def write(self, key: str, data: bytes) -> None:
        self.exists(key)


@pytest.mark.parametrize("prefetch", ["best_effort", "timeout"])
def test_requests_go_on_without_storage_that_hangs(lab, prefetch):
    requests = prompts(1)
    store = Closed()
    config = StorageConfig("closed", prefetch=prefetch, timeout_ms=20, close_timeout_s=0.2)
    engine, _ = lab.build(lab.setup(backend="threads", storage=config, store=store, **SETUP), requests)
    engine.run(requests)
    assert engine.scheduler.outputs == lab.reference(requests)
    assert engine.scheduler.storage.counters.timeouts > 0
    with pytest.raises(ControllerError, match=r"^flush: storage has not answered for 0\.2 s, and may still use host"):
        engine.scheduler.flush()
    check_engine(engine)  # nothing was forgotten
    start = time.monotonic()
    engine.close()
    assert time.monotonic() - start < 5
    assert engine.scheduler.storage.tier.counters.lost_threads == 2
    store.open.set()


def test_a_slow_store_ends_what_it_has_begun(lab):
    requests = prompts(1)
    store = ChaosBackend(MemoryBackend(), Mishaps(slow=1.0), delay=lambda: time.sleep(0.002))
    config = StorageConfig("memory", prefetch="best_effort")
    run = lab.run(requests, backend="threads", storage=config, store=store, **SETUP)
    assert run.outputs == lab.reference(requests)
    counters = run.engine.scheduler.storage.tier.counters
    assert counters.lost_threads == 0
    assert counters.stored_pages > 8
    check_drained(run.engine)


def test_rates_are_limited(lab):
    """One page has 1,536 bytes here; 100 of them a second."""
    requests = prompts(1, count=3)
    config = StorageConfig("memory", write_bytes_per_s=153_600)
    start = time.monotonic()
    run = lab.run(requests, backend="threads", storage=config, store=MemoryBackend(), **SETUP)
    stored = run.engine.scheduler.storage.tier.counters.stored_pages
    assert stored >= 8
    assert time.monotonic() - start > (stored - config.batch_pages) / 100


def test_host_memory_that_is_full_cuts_a_prefetch_short(lab, tmp_path):
    requests = prompts(2)
    config = StorageConfig(str(tmp_path), prefetch="wait", max_prefetch_pages=64)
    lab.run(requests, storage=config, **SETUP)
    run = lab.run(requests, storage=config, after_step=check_engine, **{**SETUP, "host_pages": 5})
    assert run.outputs == lab.reference(requests)
    storage = run.engine.scheduler.storage
    assert storage.counters.no_memory > 0
    assert storage.counters.prefetched_pages > 0
    check_drained(run.engine)


def test_no_more_backups_wait_than_allowed(lab):
    requests = prompts(1)
    config = StorageConfig("memory", max_backup_pages=4)
    run = lab.run(requests, storage=config, store=MemoryBackend(), **SETUP)
    storage = run.engine.scheduler.storage
    assert storage.counters.skipped_backup_pages > 0
    assert run.outputs == lab.reference(requests)


@pytest.mark.parametrize("backend", ["virtual-adversarial", "virtual-random", "threads"])
def test_reset_while_storage_is_at_work(lab, tmp_path, backend):
    requests = prompts(2)
    expected = lab.reference(requests)
    config = StorageConfig(str(tmp_path), prefetch="timeout", timeout_ms=5)
    lab.run(requests, storage=config, **SETUP)
    busy = 0
    for steps in range(1, 40, 5):
        engine, observed = lab.build(lab.setup(backend=backend, storage=config, seed=steps, **SETUP), requests)
        scheduler = engine.scheduler
        scheduler.submit(requests)
        for _ in range(steps):
            scheduler.step()
        busy += scheduler.storage.busy
        aborted = scheduler.reset()
        assert (scheduler.device_pages.in_use, scheduler.host_pages.in_use) == (0, 0)
        assert not scheduler.storage.busy
        engine.run([request for request in requests if request.request_id in aborted])
        engine.close()
        assert scheduler.outputs == expected
        assert observed.analyse().findings == []
        check_drained(engine)
    assert busy > 0


def test_close_may_be_called_twice_and_the_engine_goes_on_without_storage(lab):
    requests = prompts(1)
    engine, _ = lab.build(lab.setup(storage=StorageConfig("memory"), store=MemoryBackend(), **SETUP), requests)
    engine.close()
    engine.close()
    engine.run(requests)
    assert engine.scheduler.outputs == lab.reference(requests)
    assert engine.scheduler.storage.tier.counters.stores == 0


KILLED = """
import sys
import numpy as np
from hicache_obs.controller.engine import EngineConfig, build_engine
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.workloads import Request
from hicache_obs.streams import open_device

config = EngineConfig(
    runner="pattern", fence="stream", device_pages=20, host_pages=16, page_size=4, layers=3, heads=2, head_dim=4,
    vocabulary=512, seed=0, scheduler=SchedulerOptions(max_running=2), storage=StorageConfig(sys.argv[1]),
)
number = 0
while True:
    prompt = np.concatenate([np.arange(8), 100 + 30 * (number % 10) + np.arange(17)])
    requests = [Request(number, 0, prompt, 3), Request(number + 1, 0, np.arange(number, number + 29) % 512, 3)]
    number += 2
    engine = build_engine(open_device("threads"), config, requests)
    engine.run(requests)
    engine.close()
"""


@pytest.mark.slow
def test_a_process_that_was_killed_leaves_whole_pages(lab, tmp_path):
    """Killed at random moments while it stores pages; the next engine on the folder finds good pages only."""
    requests = prompts()
    expected = lab.reference(requests)
    for files in (3, 20, 47):
        script = [sys.executable, "-c", KILLED, str(tmp_path)]
        process = subprocess.Popen(script, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
        while len(stored_files(tmp_path)) < files:
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        config = StorageConfig(str(tmp_path), prefetch="wait")
        run = lab.run(requests, storage=config, after_step=check_engine, **SETUP)
        assert run.outputs == expected
        assert run.findings == []
        assert run.engine.scheduler.storage.tier.counters.bad_pages == 0
        assert run.engine.scheduler.storage.counters.prefetched_pages > 0
        check_drained(run.engine)


# -- without a protection ---------------------------------------------------------------------------------------------

BROKEN = {
    "holds": (without_storage_holds, {"host_pages": 12, "changes": 0.02}),
    "replies": (without_storage_replies, {"changes": 0.2}),
    "backup acks": (without_completed_backups, {"changes": 0.2}),
}
"""What is taken out, and how slow the threads are so that the scheduler needs it: in storage there is no device whose
order could be reversed, and a job that is over before anybody looks has no race."""


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("fence", ["stream", "page"])
@pytest.mark.parametrize("seed", range(5))
def test_without(lab, name, fence, seed):
    """One protection less: found under every interleaving of the threads, and with all of them nothing is."""
    remove, setup = BROKEN[name]
    setup = {**SETUP, **setup, "fence": fence, "seed": seed}
    setup["storage"] = StorageConfig("memory", prefetch="wait")
    whole = lab.run(prompts(), store=MemoryBackend(), **setup)
    assert (whole.findings, whole.corrupted) == ([], [])
    run = lab.run(prompts(), store=MemoryBackend(), prepare=remove, **setup)
    assert Hazard.STORAGE_PREFETCH in run.hazards
    assert set(run.hazards) <= {Hazard.STORAGE_PREFETCH, Hazard.HOST_REUSE}


@pytest.mark.parametrize("name", BROKEN)
def test_without_it_contents_are_wrong(lab, name):
    """Under some interleavings of the threads; the digests of the pages say so, with no detector at work."""
    remove, setup = BROKEN[name]
    setup = {**SETUP, "changes": 0.2, **setup, "record": False}
    setup["storage"] = StorageConfig("memory", prefetch="wait")
    if name == "holds":
        setup |= {"host_pages": 8, "changes": 0.2}
    runs = [lab.run(prompts(), store=MemoryBackend(), prepare=remove, seed=seed, **setup) for seed in range(6)]
    assert any(run.corrupted for run in runs)


# -- threads ----------------------------------------------------------------------------------------------------------


def test_real_threads_hand_over_in_order_and_end():
    threads = RealThreads(NoRecorder())
    inbox, outbox = threads.channel(), threads.channel()

    def double() -> None:
        while (value := inbox.receive()) is not None:
            outbox.post(2 * value)

    thread = threads.spawn(double, name="double")
    for value in (1, 2, 3):
        inbox.post(value)
    assert [outbox.receive() for _ in range(3)] == [2, 4, 6]
    assert not threads.join(thread, 1_000_000)
    start = threads.now_ns()
    threads.await_post(outbox, 20_000_000)
    assert threads.now_ns() - start >= 15_000_000
    inbox.post(None)
    assert threads.join(thread, 5_000_000_000)


def test_a_closed_engine_has_no_threads(lab):
    before = set(threading.enumerate())
    engine, _ = lab.build(
        lab.setup(backend="threads", storage=StorageConfig("memory"), store=MemoryBackend(), **SETUP), prompts(1)
    )
    names = {thread.name for thread in set(threading.enumerate()) - before}
    assert {"storage prefetch", "storage backup"} <= names
    engine.run(prompts(1))
    engine.close()
    names = {thread.name for thread in threading.enumerate()}
    assert {"storage prefetch", "storage backup"}.isdisjoint(names)


def test_the_engine_without_storage_makes_no_thread(lab):
    before = threading.active_count()
    engine, _ = lab.build(lab.setup(backend="virtual-eager"), prompts(1))
    assert isinstance(engine, Engine)
    assert threading.active_count() == before
    engine.close()
