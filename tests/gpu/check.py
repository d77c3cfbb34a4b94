"""Proves the GPU code on a machine with a GPU: ``make gpu-check``, at most four minutes, no installs.

Needs torch (one whose events may be external) with CUDA, numpy, pyarrow, click, rich and prometheus-client; nvtx,
msgspec, jsonschema and opentelemetry are optional. Prints one line per check and one JSON object; exit code 0 only if
every check passed. ``--json FILE`` keeps the object (docs/gpu/ has those of earlier runs), as far as it got. A check
that hangs ends the program before the four minutes are over, with every thread's traceback.
"""

from __future__ import annotations

import argparse
import faulthandler
import importlib.metadata
import itertools
import json
import platform
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hicache_obs.cli.demo import build_options
from hicache_obs.cli.demo_run import DemoRun, outcome
from hicache_obs.controller.pools import FORMS, HOST_LAYOUTS, DevicePool, HostPool, KVLayout
from hicache_obs.controller.transfer_engine import PageMove, TransferEngine
from hicache_obs.errors import StreamError
from hicache_obs.findings import ExitCode
from hicache_obs.records import Work, page_ids
from hicache_obs.streams import Device, open_device
from hicache_obs.streams.cuda_hold import prepare_holds

sys.path.insert(0, str(Path(__file__).resolve().parent))
import plugin

LIMIT_S = 225
"""How long all checks may take together."""
SPIN = 200_000_000
"""Cycles a delayed stream spins: about 0.1 s, far longer than a launch takes."""


def events() -> dict[str, Any]:
    """Events behave as the protocol says: snapshot, re-record, never recorded, query, elapsed time."""
    device = open_device("cuda")
    slow, other = device.Stream("slow"), device.Stream("other")
    event, never = device.Event(), device.Event(enable_timing=True)
    other.wait_event(never)
    assert never.query()
    with device.stream(slow):
        event.record()
        device.launch(lambda: torch.cuda._sleep(SPIN), Work(site="spin"))
    other.wait_event(event)  # the snapshot was before the spin
    other.synchronize()
    assert not slow.query()
    event.record(slow)
    other.wait_event(event)
    assert not other.query()
    device.synchronize()
    assert other.query()
    try:
        never.elapsed_time(never)
    except StreamError:
        pass
    else:
        raise AssertionError("elapsed_time of an event that was never recorded must fail")
    device.close()
    return {}


def probes() -> dict[str, Any]:
    """Event pairs give an operation's duration, on the host clock, within their stated error."""
    device = open_device("cuda")
    probe = device.probe()
    before = device.host_ns()
    device.launch(lambda: torch.cuda._sleep(SPIN), Work(site="spin"), probe=probe)
    device.synchronize()
    after = device.host_ns()
    assert probe.ready()
    start, end = probe.times_ns()
    error = device.clock_error_ns
    assert before - error <= start < end <= after + error, (before, start, end, after, error)
    device.close()
    return {"spin_ms": (end - start) / 1e6, "window_ms": (after - before) / 1e6, "clock_error_us": error / 1e3}


def gate() -> dict[str, Any]:
    """A held stream does not run; a stream that waits for it is seen as blocked, one that does not is not."""
    device = open_device("cuda")
    writer, fenced, free = device.Stream("writer"), device.Stream("fenced"), device.Stream("free")
    hold = device.gate()
    hold.hold(writer)
    with device.stream(writer):
        device.launch(lambda: torch.cuda._sleep(1000), Work(site="write"))
    fenced.wait_stream(writer)
    done = fenced.record_event()
    assert hold.wait_blocks_or(fenced, done, timeout_s=5)
    assert not done.query()
    passed = free.record_event()
    assert hold.wait_blocks_or(free, passed, timeout_s=5)
    assert passed.query()
    hold.open()
    device.synchronize()
    assert done.query()
    device.close()
    return {}


def graph() -> dict[str, Any]:
    """Replays of a captured graph follow each other; an external record covers what precedes it."""
    device = open_device("cuda")
    log, place = torch.full((64,), -1, device="cuda"), torch.zeros(1, dtype=torch.int64, device="cuda")

    def write(number: int) -> None:
        log.index_fill_(0, place, number)
        place.add_(1)

    write(0)
    torch.cuda.synchronize()
    captured = device.capture(1, [partial(write, 1), None, lambda: torch.cuda._sleep(SPIN), partial(write, 2)])
    nodes = [Work("first"), None, Work("spin"), Work("second")]
    a, b, reader = device.Stream("a"), device.Stream("b"), device.Stream("reader")
    for stream in (a, b):
        with device.stream(stream):
            device.replay(captured, Work("graph"), nodes)
    reader.wait_event(captured.events[0])
    reader.synchronize()
    early = not b.query()  # the reader went on while the replay it waits in was still running
    device.synchronize()
    assert log[: int(place)].tolist() == [0, 1, 2, 1, 2]
    assert early, "the external record waited for the whole replay"
    device.close()
    return {}


def copies(io: str) -> dict[str, Any]:
    """Pages out and back in every form and host layout, and the bandwidth against the device's own copy."""
    device = open_device("cuda")
    for form, arrangement in itertools.product(FORMS, HOST_LAYOUTS):
        engine = transfer_engine(device, KVLayout(3, 16, 8, 2, 8, form=form), arrangement, io)
        pool = engine.device_pool
        slots, ones = torch.arange(16 * 8, device="cuda"), torch.ones(16 * 8, 2, 8, dtype=torch.float64, device="cuda")
        for layer in range(3):
            pool.write(layer, slots, ones * (layer + 1), -ones)
        torch.cuda.synchronize()
        engine.submit_device_to_host(move(engine, [3, 4, 9], [0, 5, 6]), start_event=device.Event()).synchronize()
        for buffer in pool.buffers:
            buffer.zero_()
        torch.cuda.synchronize()
        back = move(engine, [1, 2, 7], [6, 5, 0])
        engine.submit_host_to_device(back, start_event=device.Event(), on_layer_done=lambda layer: None).synchronize()
        for layer in range(3):
            k, v = pool.read_pages(layer, torch.tensor([1, 2, 7], device="cuda"))
            assert (k == layer + 1).all(), (form, arrangement)
            assert (v == -1).all(), (form, arrangement)
    engine = transfer_engine(device, KVLayout(8, 1024, 64, 8, 16), "layer-first", io)
    pages = list(range(1024))
    own = bandwidth(
        lambda: engine.device_pool.k.copy_(engine.host_pool.k, non_blocking=True), engine.host_pool.k.nbytes
    )

    def load() -> None:
        whole = move(engine, pages, pages)
        engine.submit_host_to_device(whole, start_event=device.Event(), on_layer_done=lambda layer: None).synchronize()

    ours = bandwidth(load, engine.device_pool.layout.pool_bytes)
    device.close()
    assert io == "kernel" or ours >= 0.9 * own, (ours, own)
    return {"gb_per_s": round(ours / 1e9, 1), "own_copy_gb_per_s": round(own / 1e9, 1), "share": round(ours / own, 3)}


def transfer_engine(device: Device, layout: KVLayout, arrangement: str, io: str) -> TransferEngine:
    """Two pools and what moves pages between them."""
    host = HostPool(layout, pinned=True, arrangement=arrangement)
    return TransferEngine(device, DevicePool(layout, "cuda"), host, io=io)


def move(engine: TransferEngine, device_pages: list[int], host_pages: list[int]) -> PageMove:
    """A transfer's pages, its index tensor ready."""
    block = engine.blocks.take(len(device_pages))
    index = block.tensor[: len(device_pages)]
    index.copy_(torch.tensor(device_pages))
    torch.cuda.synchronize()
    return PageMove(page_ids(device_pages), page_ids(host_pages), index, torch.tensor(host_pages), 1, block)


def bandwidth(copy: Callable[[], object], size_bytes: int) -> float:
    """Bytes per second of the best of five calls."""
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return size_bytes / best


def demo(runner: str, **pools: Any) -> dict[str, Any]:
    """The demo's three policies on CUDA streams, with the race made certain by the gate."""
    requests = 120 if runner == "transformer" else 150
    options = build_options(device="cuda", runner=runner, requests=requests, pools=pools)
    run = DemoRun(options, progress=lambda *_: None)
    reference = run.reference()
    modes = [run.mode(fence, reference) for fence in options.fences]
    none, *fenced = modes
    assert none.as_json()["violations"] > 0
    assert none.corrupted_pages > 0
    assert outcome(modes) is ExitCode.CLEAN, [mode.as_json() for mode in modes]
    assert all(mode.pairs_checked > 0 for mode in fenced)
    return {"modes": [mode.as_json() for mode in modes]}


def rules() -> dict[str, Any]:
    """What orders two streams and what does not, on the device itself: the later work is done, or it is not.

    Each case launches a long spin on one stream and asks, right after, whether work behind the case's own edge on
    another stream has to wait for it.
    """

    def case(edge: Callable[[Any, Any], None]) -> bool:
        """Whether ``edge(slow, other)`` makes what is launched on ``other`` wait for the spin on ``slow``."""
        torch.cuda.synchronize()
        slow, other = torch.cuda.Stream(), torch.cuda.Stream()
        with torch.cuda.stream(slow):
            torch.cuda._sleep(SPIN)
        edge(slow, other)
        done = other.record_event()
        time.sleep(0.01)
        waited = not done.query()
        torch.cuda.synchronize()
        return waited

    event = torch.cuda.Event()

    def snapshot(slow: Any, other: Any) -> None:
        early = torch.cuda.Event()
        early.record(other)  # before the spin's stream is known to it: a record is a snapshot
        other.wait_event(early)

    def rerecorded(slow: Any, other: Any) -> None:
        event.record(slow)
        other.wait_event(event)
        event.record(torch.cuda.Stream())  # moves no wait that was issued earlier

    def through_third(slow: Any, other: Any) -> None:
        third = torch.cuda.Stream()
        third.wait_stream(slow)
        other.wait_stream(third)

    found = {
        "wait_stream orders": case(lambda slow, other: other.wait_stream(slow)),
        "record and wait order": case(lambda slow, other: other.wait_event(slow.record_event())),
        "a re-record moves no earlier wait": case(rerecorded),
        "order is transitive": case(through_third),
        "submission order orders nothing": not case(lambda slow, other: None),
        "a snapshot covers nothing later": not case(snapshot),
        "a wait on a never recorded event does nothing": not case(
            lambda _, other: other.wait_event(torch.cuda.Event())
        ),
        "the other direction orders nothing": not case(lambda slow, other: slow.wait_stream(other)),
        "a query orders nothing": not case(lambda slow, other: slow.query()),
    }
    wrong = [name for name, right in found.items() if not right]
    assert not wrong, wrong
    return {"cases": len(found)}


def main() -> int:
    """Run all checks; returns the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="file to write the results to")
    arguments = parser.parse_args()
    prepare_holds()
    if not torch.cuda.is_available():
        print("gpu-check: no CUDA device is usable here; run it on a machine with a GPU", file=sys.stderr)
        return int(ExitCode.NOTHING_CHECKED)
    checks: list[tuple[str, Callable[[], dict[str, Any]]]] = [
        ("events", events),
        ("probes", probes),
        ("gate", gate),
        ("graph", graph),
        ("copies direct", lambda: copies("direct")),
        ("copies kernel", lambda: copies("kernel")),
        ("demo graphs", lambda: demo("pattern", graphs=True)),
        ("demo transformer", lambda: demo("transformer")),
        ("demo pattern", lambda: demo("pattern")),
        ("plugin load-back", lambda: plugin.load_backs(plugin.cuda_machine())),
        ("plugin cost per round", lambda: plugin.cost(plugin.cuda_machine())),
        ("plugin beside a capture", plugin.captures),
        ("plugin copy streams (CUPTI)", plugin.copy_streams),
        ("rules", rules),
        ("plugin GPU-trace callbacks", plugin.callbacks),  # last: torch cannot be told to stop
    ]
    results: dict[str, Any] = {"machine": _machine(), "checks": {}}
    failed = 0
    faulthandler.dump_traceback_later(LIMIT_S, exit=True)
    for name, check in checks:
        start = time.perf_counter()
        try:
            entry = {"passed": True, **check()}
        except Exception:  # noqa: BLE001 a failed check must not hide the others
            entry = {"passed": False, "error": traceback.format_exc()}
            failed += 1
        entry["seconds"] = round(time.perf_counter() - start, 2)
        results["checks"][name] = entry
        print(f"{'ok  ' if entry['passed'] else 'FAIL'} {name} ({entry['seconds']} s)", flush=True)
        if not entry["passed"]:
            print(entry["error"], flush=True)
        text = json.dumps(results, indent=2)
        if arguments.json is not None:
            arguments.json.write_text(text + "\n")
    faulthandler.cancel_dump_traceback_later()
    print(text)
    return int(ExitCode.FINDINGS if failed else ExitCode.CLEAN)


def _machine() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    for package in ("nvtx", "numpy"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


if __name__ == "__main__":
    sys.exit(main())
