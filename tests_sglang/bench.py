"""What the plugin costs the scheduler thread: absent, installed, observing; paired in one run, with intervals.

    python bench.py [REPEATS] [--before FOLDER]

One process per mode drives SGLang's own classes on a CPU (``harness.Engine``); they measure in turn, REPEATS times. The
hooked calls are measured in CPU time of their thread: one event record, one decode round, one restore of 80 layers
with the round that waits for each of them. The busy loop, shaped like a scheduler, is wall-clock time, with the node's
agent running. Compared is the difference to the process without the plugin in the same repeat; the interval is its
quartiles. A busy machine widens it. Goals: a decode round at most 5 us, a restore round of 80 layers at most 50 us, the
busy loop at most 0.5 %. ``--before`` also measures the package of another checkout, in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

MODES = ("absent", "installed", "observing")
"""``installed`` is HICACHE_OBS unset; ``absent`` also keeps the entry point from being loaded (SGLANG_PLUGINS=none)."""
BEFORE = "before"
LAYERS = 80
ROUNDS = 100


def serve() -> None:
    """In the process under test: a line of nanoseconds by name for every line that comes in."""
    import harness

    if hasattr(harness, "load"):  # another checkout's may load at its import
        harness.load()
    parts = sys.modules[harness.Engine.__module__]
    parts.LAYERS = LAYERS
    with harness.published():
        engine = harness.Engine(harness.Scenario("base+readdone+loadfence+writefence"))
        counter = engine.controller.layer_done_counter

        def forward(runner: object, batch: object) -> object:  # as a model's attention layers do
            if counter.consumer_index >= 0:
                for layer in range(LAYERS):
                    counter.wait_until(layer)
            return SimpleNamespace()

        engine.forward_raw = forward
        event = engine.device.Event()
        a = engine.alloc(2)
        engine.round(a, 1.0)
        slot = a[:1]
        host = engine.controller.write(a, node_id=1)
        engine.acknowledge_writes()
        parts.host_module.transfer_kv_direct = lambda **arguments: None

        def restore() -> None:
            engine.allocator.free(engine.controller.load(host, node_id=1))
            producer = engine.controller.start_loading()
            engine.round(slot, 1.0, consumer=producer, length=8)
            engine.controller.ack_load_queue.clear()

        def busy() -> None:  # the scheduler's shape: a round, then host work of its own
            engine.round(slot, 1.0, length=8)
            sum(range(200_000))

        for _ in sys.stdin:
            measured = {
                "event record": per_call(event.record, 2000),
                "decode round": per_call(lambda: engine.round(slot, 1.0, length=8), ROUNDS),
                "restore round": per_call(restore, 20),
                "busy loop": per_call(busy, 20, clock=time.perf_counter_ns),
            }
            print(json.dumps(measured), flush=True)


def per_call(fn, count: int, *, clock=time.thread_time_ns) -> float:
    """Median of five batches, nanoseconds per call; of this thread's CPU time: waiting for a core is not our cost."""
    for _ in range(min(count, 20)):
        fn()
    times = []
    for _ in range(5):
        started = clock()
        for _ in range(count):
            fn()
        times.append((clock() - started) / count)
    return statistics.median(times)


def start(mode: str, folder: str, before: str) -> subprocess.Popen[str]:
    """A process in ``mode``. The plugin starts the agent, which empties the ring."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HICACHE_OBS")}
    variables |= {"OMP_NUM_THREADS": "1", "HICACHE_OBS_DIR": folder, "HICACHE_OBS_PORT": "0"}
    variables |= {"HICACHE_OBS_PROCESSES": "all", "HICACHE_OBS_RING_SLOTS": str(1 << 17)}
    if mode == "absent":
        variables["SGLANG_PLUGINS"] = "none"
    if mode in ("observing", BEFORE):
        variables["HICACHE_OBS"] = "observe"
    if mode == BEFORE:
        folder = os.path.join(folder, BEFORE)  # an agent of its own: the layout may differ
        os.mkdir(folder, 0o700)
        variables |= {"HICACHE_OBS_DIR": folder, "PYTHONPATH": before, "HARNESS": os.path.join(before, "tests_sglang")}
    command = [sys.executable, "-W", "ignore", __file__, "--serve"]
    return subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(process: subprocess.Popen[str]) -> dict[str, float]:
    """One measurement of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("measure\n")
    process.stdin.flush()
    measured: dict[str, float] = json.loads(process.stdout.readline())
    return measured


def stop_agent(folder: str) -> None:
    """The agent outlives the process that started it."""
    from hicache_obs.recorder.agent_lock import running_agent

    pid = running_agent(Path(folder)).get("pid")
    if pid:
        os.kill(int(pid), signal.SIGTERM)


def main(repeats: int, before: str) -> None:
    values: dict[str, dict[str, list[float]]] = {}
    # Where a server's rings are unless it is told otherwise: a file on a disk costs a fault for each page written to.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=memory) as folder:
        os.chmod(folder, 0o700)
        processes = {mode: start(mode, folder, before) for mode in (*MODES, *([BEFORE] if before else []))}
        try:
            for process in processes.values():
                ask(process)  # warm, and all of them started
            for _ in range(repeats):
                for mode, process in processes.items():
                    for name, value in ask(process).items():
                        values.setdefault(name, {}).setdefault(mode, []).append(value)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
            stop_agent(folder)
            if before:
                stop_agent(os.path.join(folder, BEFORE))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores, {repeats} repeats")
    print(f"{'per':16} {' '.join(f'{mode:>12}' for mode in processes)}   added by observing (quartiles)")
    for name, modes in values.items():
        middle = [f"{statistics.median(modes[mode]) / 1e3:9.2f} us" for mode in processes]
        print(f"{name:16} {' '.join(middle)}   {_added(modes, 'observing', name)}")
        if before:
            print(f"{'':16} {' ' * (13 * len(processes))}  before: {_added(modes, BEFORE, name)}")


def _added(modes: dict[str, list[float]], mode: str, name: str) -> str:
    """Median and quartiles of what ``mode`` adds; of the busy loop also as a part of it."""
    pairs = list(zip(modes["absent"], modes[mode], strict=True))
    added = sorted(after - before for before, after in pairs)
    low, high = added[len(added) // 4], added[(3 * len(added)) // 4]
    text = f"{statistics.median(added) / 1e3:+.2f} us ({low / 1e3:+.2f} … {high / 1e3:+.2f})"
    if name != "busy loop":
        return text
    parts = sorted(100 * (after / before - 1) for before, after in pairs)
    low, high = parts[len(parts) // 4], parts[(3 * len(parts)) // 4]
    return f"{text}, {statistics.median(parts):+.2f} % ({low:+.2f} … {high:+.2f})"


if __name__ == "__main__":
    sys.path.insert(0, os.environ.get("HARNESS") or str(Path(__file__).parent))
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
        parser.add_argument("repeats", type=int, nargs="?", default=9)
        parser.add_argument("--before", default="", metavar="FOLDER", help="another checkout")
        arguments = parser.parse_args()
        main(arguments.repeats, arguments.before)
