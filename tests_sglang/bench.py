"""What the plugin costs the scheduler thread: absent, installed, observing; paired in one run, with intervals.

    python bench.py [REPEATS]

Each repeat starts one process per mode, in turn, which drives SGLang's own classes on a CPU (``harness.Engine``) and
measures the hooked calls' own time: one event record, one decode round, one restore of 80 layers. What is compared is
the difference to the process without the plugin in the same repeat; the interval is its quartiles over the repeats.
A busy machine widens it. Goals: a decode round at most 5 us, a restore round of 80 layers at most 50 us.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODES = ("absent", "installed", "observing")
"""``installed`` is HICACHE_OBS unset; ``absent`` also keeps the entry point from being loaded (SGLANG_PLUGINS=none)."""
LAYERS = 80
ROUNDS = 300


def measure() -> dict[str, float]:
    """In the process under test: nanoseconds of one event record, decode round, restore round, and loop."""
    import harness

    harness.LAYERS = LAYERS
    with harness.published():
        engine = harness.Engine(harness.Scenario("base+readdone+loadfence+writefence"))
        counter = engine.controller.layer_done_counter

        def forward(runner: object, batch: object) -> object:  # as a model's attention layers do
            if counter.consumer_index >= 0:
                for layer in range(LAYERS):
                    counter.wait_until(layer)
            return harness.SimpleNamespace()

        engine.forward_raw = forward
        event = engine.device.Event()
        a = engine.alloc(2)
        engine.round(a, 1.0)
        slot = a[:1]
        result = {
            "event record": per_call(event.record, 3000),
            "decode round": per_call(lambda: engine.round(slot, 1.0, length=8), ROUNDS),
        }
        host = engine.controller.write(a, node_id=1)
        engine.acknowledge_writes()
        harness.host_module.transfer_kv_direct = lambda **arguments: None

        def restore() -> None:
            engine.allocator.free(engine.controller.load(host, node_id=1))
            producer = engine.controller.start_loading()
            engine.round(slot, 1.0, consumer=producer, length=8)
            engine.controller.ack_load_queue.clear()

        result["restore round"] = per_call(restore, 40)

        def busy() -> None:  # the scheduler's shape: a round, then host work of its own
            engine.round(slot, 1.0, length=8)
            sum(range(200_000))

        result["busy loop"] = per_call(busy, 50)

    return result


def per_call(fn, count: int) -> float:
    """Median of five batches, nanoseconds of this thread's CPU time per call: waiting for a core is not our cost."""
    for _ in range(min(count, 20)):
        fn()
    times = []
    for _ in range(5):
        started = time.thread_time_ns()
        for _ in range(count):
            fn()
        times.append((time.thread_time_ns() - started) / count)
    return statistics.median(times)


def run(mode: str, folder: str) -> dict[str, float]:
    """One process in ``mode``; an agent's work is done by nobody, so its ring is large enough not to fill."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("HICACHE_OBS")}
    variables |= {"OMP_NUM_THREADS": "1", "HICACHE_OBS_DIR": folder, "HICACHE_OBS_AGENT": "off"}
    variables |= {"HICACHE_OBS_PROCESSES": "all", "HICACHE_OBS_RING_SLOTS": str(1 << 19)}
    if mode == "absent":
        variables["SGLANG_PLUGINS"] = "none"
    if mode == "observing":
        variables["HICACHE_OBS"] = "observe"
    command = [sys.executable, "-W", "ignore", __file__, "--measure"]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=600, check=True)
    measured: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return measured


def main(repeats: int) -> None:
    values: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        for _ in range(repeats):
            for mode in MODES:
                for name, value in run(mode, folder).items():
                    values.setdefault(name, {}).setdefault(mode, []).append(value)
    print(f"{'per':16} {'absent':>12} {'installed':>12} {'observing':>12}   added by observing (quartiles)")
    for name, modes in values.items():
        added = sorted(after - before for before, after in zip(modes["absent"], modes["observing"], strict=True))
        low, high = added[len(added) // 4], added[(3 * len(added)) // 4]
        middle = [f"{statistics.median(modes[mode]) / 1e3:9.2f} us" for mode in MODES]
        spread = f"{statistics.median(added) / 1e3:+.2f} us ({low / 1e3:+.2f} … {high / 1e3:+.2f})"
        print(f"{name:16} {' '.join(middle)}   {spread}")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    if sys.argv[1:] == ["--measure"]:
        print(json.dumps(measure()))
    else:
        main(int(sys.argv[1]) if sys.argv[1:] else 3)
