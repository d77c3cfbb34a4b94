"""What the plugin costs the scheduler thread: absent, installed, observing; in many short turns of one run.

    python bench.py [STARTS] [--turns TURNS] [--before FOLDER]

One process per mode drives SGLang's own classes on a CPU (``harness.Engine``). They measure in turns of some
milliseconds, in an order drawn anew for each turn; who has no turn waits for a line of input. Measured are one event
record, one decode round, one restore of 80 layers with the round that waits for each of them, and a loop shaped like a
scheduler: a decode round, then host work that writes and reads messages; also of its rounds alone. Times are CPU time
of the thread, of the loop also on a clock. Compared is the difference to the process without the plugin in the same
turn.

How fast a process does one and the same work also depends on where its memory lies, which no number of turns evens out:
two equal processes differed by up to 2 % in host work that calls nothing of ours, and one with the plugin was 7 to 11 %
slower in a loop that makes one integer after the other, for whose next object the allocator finds room elsewhere. So
all processes are started anew, with addresses and hashes drawn at random, as C. Curtsinger and E. Berger do for
programs (*Stabilizer*, ASPLOS 2013). Stated is the median of the starts' medians and its 95 % confidence interval
(``hicache_obs.testing.median``). ``installed`` hooks nothing: its intervals should hold 0.

The node's agent is on the other core. In the loop's part it runs in the turns of ``observing`` alone, looks into the
ring at the start of each, and is stopped outside of them. Goals: a decode round at most 5 us, a restore round of 80
layers at most 50 us, the busy loop at most 0.5 % of the thread. ``--before`` also measures the package of another
checkout, in the same turns.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

MODES = ("absent", "installed", "observing")
"""``installed`` is HICACHE_OBS unset; ``absent`` also keeps the entry point from being loaded (SGLANG_PLUGINS=none)."""
BEFORE = "before"
LAYERS = 80
BUSY = "busy loop"
IN_LOOP = "decode round, in the loop"
"""Between two of them is the loop's host work, which is not counted."""
CALLS = {"event record": 400, "decode round": 20, IN_LOOP: 20, "restore round": 4, BUSY: 20}
"""What is measured, and how many of it make a turn."""
ROUNDS_PER_S = 100
"""Of a busy server."""
Turn = tuple[float, float]
"""Nanoseconds per call: CPU time, and on a clock."""
Measured = dict[str, dict[str, list[Turn]]]
"""By what was measured, and by mode: one for each turn."""
Row = tuple[float, float, float]
"""Of one start: us per call, us more than absent, % more."""


def serve() -> None:
    """In the process under test: one turn for every line that comes in, the name of what to measure."""
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

        def decode() -> None:
            engine.round(slot, 1.0, length=8)

        message = {f"request {number}": [number, number * 1.5, str(number)] for number in range(200)}

        def work() -> None:
            for _ in range(6):
                json.loads(json.dumps(message))

        def busy() -> None:  # the scheduler's shape: a round, then host work of its own
            decode()
            work()

        calls = {"event record": event.record, "decode round": decode, "restore round": restore, BUSY: busy}
        for line in sys.stdin:
            name = line.rstrip()
            measured = turn(decode, CALLS[name], work) if name == IN_LOOP else turn(calls[name], CALLS[name])
            print(*measured, flush=True)


def turn(call: Callable[[], object], count: int, between: Callable[[], object] | None = None) -> Turn:
    """Nanoseconds per call. Waiting for a core is not our cost, but on the clock it counts.

    Args:
        between: Called before each, and not counted.
    """
    for _ in range(1 + count // 20):  # others were here meanwhile
        call()
    if between is None:
        clock, used = time.perf_counter_ns(), time.thread_time_ns()
        for _ in range(count):
            call()
        used, clock = time.thread_time_ns() - used, time.perf_counter_ns() - clock
        return used / count, clock / count
    used = clock = 0
    for _ in range(count):
        between()
        began, started = time.perf_counter_ns(), time.thread_time_ns()
        call()
        used, clock = used + time.thread_time_ns() - started, clock + time.perf_counter_ns() - began
    return used / count, clock / count


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
    return subprocess.Popen(
        command, env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


def ask(process: subprocess.Popen[str], name: str) -> Turn:
    """One turn of it."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{name}\n")
    process.stdin.flush()
    used, clock = process.stdout.readline().split()
    return float(used), float(clock)


def agents(folders: dict[str, str], timeout_s: float) -> dict[str, int]:
    """By the mode it belongs to: the process of the node's agent, once it runs."""
    from hicache_obs.recorder.agent_lock import running_agent

    end, found = time.monotonic() + timeout_s, {}
    while True:
        for mode, folder in folders.items():
            pid = running_agent(Path(folder)).get("pid", "")
            if pid.isdigit():
                found[mode] = int(pid)
        if len(found) == len(folders) or time.monotonic() >= end:
            return found
        time.sleep(0.2)


def measure(
    processes: dict[str, subprocess.Popen[str]], running: dict[str, int], turns: int, draw: random.Random
) -> Measured:
    """All turns of all processes."""
    order = list(processes)
    measured: Measured = {}
    for name in CALLS:
        if name == BUSY:
            time.sleep(1)  # the agents have read what there is
            for pid in running.values():
                os.kill(pid, signal.SIGSTOP)
        of = measured[name] = {mode: [] for mode in processes}
        for _ in range(turns):
            draw.shuffle(order)
            for mode in order:
                agent = running.get(mode) if name == BUSY else None
                if agent is not None:
                    os.kill(agent, signal.SIGCONT)
                of[mode].append(ask(processes[mode], name))
                if agent is not None:
                    os.kill(agent, signal.SIGSTOP)
    return measured


def start_and_measure(turns: int, before: str, draw: random.Random) -> Measured:
    """One start of all processes, and their turns."""
    # Where a server's rings are unless it is told otherwise: a file on a disk costs a fault for each page written to.
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True, dir=memory) as folder:
        os.chmod(folder, 0o700)
        folders = {"observing": folder} | ({BEFORE: os.path.join(folder, BEFORE)} if before else {})
        processes = {mode: start(mode, folder, before) for mode in (*MODES, *([BEFORE] if before else []))}
        running: dict[str, int] = {}
        try:
            for process in processes.values():
                for name in CALLS:
                    ask(process, name)  # warm, and all of them started
            running = agents(folders, timeout_s=60)
            assert running.keys() == folders.keys(), f"agents run of {list(running)} only"
            return measure(processes, running, turns, draw)
        finally:
            for process in processes.values():
                process.kill()
                process.wait()
            for pid in (running or agents(folders, timeout_s=0)).values():  # they outlive the process that started them
                os.kill(pid, signal.SIGTERM)
                os.kill(pid, signal.SIGCONT)


def main(starts: int, turns: int, before: str) -> None:
    draw = random.Random(0)
    rows: dict[tuple[str, str], list[Row]] = {}
    for number in range(starts):
        print(f"start {number + 1} of {starts}", end="\r", file=sys.stderr, flush=True)
        for name, modes in start_and_measure(turns, before, draw).items():
            for clock in (False, True) if name == BUSY else (False,):
                label = f"{name}, clock" if clock else name
                absent = [turn[clock] for turn in modes["absent"]]
                for mode, values in modes.items():
                    row = compare([turn[clock] for turn in values], absent)
                    rows.setdefault((label, mode), []).append(row)
    print(f"{starts} starts of {turns} turns, load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("us per call, and what it is more than absent in the same turn: median of the starts (95 % interval)")
    for (label, mode), found in rows.items():
        print(line(label, mode, found))


def compare(values: list[float], absent: list[float]) -> Row:
    """The medians over the turns of one start."""
    pairs = list(zip(values, absent, strict=True))
    more = statistics.median(mine - other for mine, other in pairs)
    percent = statistics.median(100 * (mine / other - 1) for mine, other in pairs)
    return statistics.median(values) / 1e3, more / 1e3, percent


def line(label: str, mode: str, found: list[Row]) -> str:
    """Of all starts."""
    from hicache_obs.testing.median import median

    text = f"{label if mode == 'absent' else '':25} {mode:10} {statistics.median(us for us, _, _ in found):9.2f}"
    if mode == "absent":
        return text
    text += f"  {median([more for _, more, _ in found]):+.2f}"
    if label.startswith(BUSY):
        of_thread = median([more * ROUNDS_PER_S / 1e4 for _, more, _ in found])
        text += f", {median([percent for _, _, percent in found]):+.2f} %, "
        text += f"at {ROUNDS_PER_S} rounds/s {of_thread:+.3f} % of the thread"
    return text


if __name__ == "__main__":
    sys.path.insert(0, os.environ.get("HARNESS") or str(Path(__file__).parent))
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
        parser.add_argument("starts", type=int, nargs="?", default=12)
        parser.add_argument("--turns", type=int, default=20, help="per start")
        parser.add_argument("--before", default="", metavar="FOLDER", help="another checkout")
        arguments = parser.parse_args()
        if arguments.starts < 6:
            parser.error(f"starts {arguments.starts}: an interval of 95 % needs at least 6")
        main(arguments.starts, arguments.turns, arguments.before)
