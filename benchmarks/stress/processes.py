"""The processes of a stress run: ranks that write rounds, the node's agent, and a nursery that forks them quickly.

``python processes.py`` is the nursery: it has imported everything, and forks a process for
each line it reads. The agent is ``hicache-obs agent`` itself, with two additions: each race it finds is written to a
file before anything else happens, and whoever holds its control file can set its wall clock.
"""

from __future__ import annotations

import json
import mmap
import os
import select
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from rounds import is_racy, names, round_records

from hicache_obs import agent as agent_package
from hicache_obs.agent import NodeAgent
from hicache_obs.cli import main
from hicache_obs.costs import Ignore
from hicache_obs.findings import Finding, Verdict
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.records import Ranks

_ACK: Final = struct.Struct("<qqqq")
"""A race that the agent has found: tp rank, both operations, and whether it was measured."""
_TICK_S: Final = 0.02


class Word(IntEnum):
    """A control file's 64-bit words. The process writes the first ones, whoever watches it the others."""

    ATTEMPTED = 0
    """Records that were to be appended."""
    APPENDED = 1
    ROUNDS = 2
    PID = 3
    BURST = 4
    """Rounds to be made at once, without a pause."""
    CLOCK_STEP_NS = 5
    """How far the wall clock is from the real one."""


class Control:
    """A mapped file of ``Word``s, which outlives the process.

    Args:
        path: Made if it does not exist.
    """

    def __init__(self, path: Path) -> None:
        self.path: Final = path
        if not path.exists():
            path.write_bytes(bytes(8 * len(Word)))
        with path.open("r+b") as file:
            self.words: Final = memoryview(mmap.mmap(file.fileno(), 8 * len(Word))).cast("q")


def run_rank(
    *, directory: str, control: str, tp: int, life: int, rounds_per_s: float, race_every: int, slots: int, arena: int
) -> None:
    """Write rounds until SIGTERM. Beside the control file, ``<name>.races`` has the number of each racy round that
    was appended whole.
    """
    words = Control(Path(control)).words
    stop: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stop.append(number))
    races = os.open(f"{control}.races", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    ring = create_ring("stress", Ranks(tp=tp), directory=directory, slots=slots, arena_words=arena)
    words[Word.PID] = os.getpid()

    def put(records: Sequence[Any]) -> bool:
        words[Word.ATTEMPTED] += len(records)
        kept = sum(ring.append(record) for record in records)
        words[Word.APPENDED] += kept
        return kept == len(records)

    put(names())
    number, began = 0, time.monotonic()
    while not stop:
        due = int((time.monotonic() - began) * rounds_per_s) + 1
        burst, words[Word.BURST] = words[Word.BURST], 0
        began -= burst / rounds_per_s
        for _ in range(max(0, due + burst - number)):
            racy = is_racy(number, race_every)
            if put(round_records(life, number, time.monotonic_ns(), racy=racy)) and racy:
                os.write(races, number.to_bytes(8, "little"))
            number += 1
            words[Word.ROUNDS] = number
        ring.beat(time.monotonic_ns())
        time.sleep(_TICK_S)
    ring.close()


def read_races(control: Path) -> list[int]:
    """Rounds that ``run_rank`` has appended whole and without a fence."""
    path = Path(f"{control}.races")
    data = path.read_bytes() if path.exists() else b""
    return [int.from_bytes(data[at : at + 8], "little") for at in range(0, len(data) - 7, 8)]


class _Acknowledge(Ignore):
    """Writes each race to a file, at once."""

    def __init__(self, file: int, tp: int) -> None:
        self._file = file
        self._tp = tp

    def on_finding(self, finding: Finding) -> None:
        if finding.verdict in (Verdict.VIOLATION, Verdict.LATENT):
            measured = finding.verdict is Verdict.VIOLATION
            os.write(self._file, _ACK.pack(self._tp, finding.earlier.op, finding.later.op, measured))


def read_acknowledged(path: Path) -> list[tuple[int, int, int, bool]]:
    """Tp rank, both operations, and whether it was measured to overlap: the races that agents have found."""
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) - len(data) % _ACK.size
    return [(tp, a, b, bool(measured)) for tp, a, b, measured in _ACK.iter_unpack(data[:whole])]


def run_agent(*, arguments: list[str], control: str, acknowledged: str, log: str) -> int:
    """``hicache-obs agent`` with ``arguments``; returns its exit code."""
    words = Control(Path(control)).words
    words[Word.PID] = os.getpid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    file = os.open(acknowledged, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    real_ns = time.time_ns

    class Acknowledging(NodeAgent):
        def __init__(self, options: Any, metrics: Any, *, more_sinks: Any, **rest: Any) -> None:
            super().__init__(
                options,
                metrics,
                more_sinks=lambda rank, analyzer: [_Acknowledge(file, rank.tp), *more_sinks(rank, analyzer)],
                **rest,
            )

    agent_package.NodeAgent = Acknowledging  # type: ignore[misc] # the command looks it up there
    time.time_ns = lambda: real_ns() + words[Word.CLOCK_STEP_NS]
    time.time = lambda: (real_ns() + words[Word.CLOCK_STEP_NS]) / 1e9
    return main(["agent", *arguments])


_KINDS: Final[dict[str, Callable[..., int | None]]] = {"rank": run_rank, "agent": run_agent}


class Nursery:
    """Forks ranks and agents. Its end is theirs: they are killed. One thread at a time."""

    def __init__(self) -> None:
        environment = {**os.environ, "HICACHE_OBS_FINISHED_RINGS": "100000", "HICACHE_OBS_EVENTS_INTERVAL_S": "1"}
        self._process = subprocess.Popen([sys.executable, __file__], stdin=-1, stdout=-1, text=True, env=environment)

    def start(self, kind: str, **arguments: Any) -> int:
        """Run ``run_rank`` or ``run_agent`` with ``arguments`` in a process of its own; returns the process id."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([kind, arguments]), file=self._process.stdin, flush=True)
        return int(self._process.stdout.readline())

    def close(self) -> None:
        """Kill what still runs; blocks until it is gone. Idempotent."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Nursery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Signal a process of a nursery, if it is still there."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def runs(pid: int) -> bool:
    """Whether a process of a nursery is still there."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _nurse() -> None:
    """Fork a process per line of standard input, and reap them; at its end kill the rest."""
    import hicache_obs.cli.agent
    import hicache_obs.exporters.endpoint
    import hicache_obs.exporters.prometheus  # noqa: F401 the children need it, and forking is quicker

    children: set[int] = set()
    signal.set_wakeup_fd(-1)
    while True:
        ready, _, _ = select.select([0], [], [], 0.05)
        for pid in list(children):
            if os.waitpid(pid, os.WNOHANG)[0]:
                children.discard(pid)
        if not ready:
            continue
        line = _read_line()
        if not line:
            break
        kind, arguments = json.loads(line)
        child = os.fork()
        if not child:
            _become(kind, arguments)
        children.add(child)
        os.write(1, f"{child}\n".encode())
    for pid in children:
        kill(pid)
        os.waitpid(pid, 0)


def _read_line() -> bytes:
    """A line of standard input, unbuffered: the children share it."""
    line = bytearray()
    while not line.endswith(b"\n"):
        data = os.read(0, 1)
        if not data:
            break
        line += data
    return bytes(line)


def _become(kind: str, arguments: dict[str, Any]) -> None:
    """What the child does; never returns."""
    code: int | None = 70
    try:
        os.close(0)
        code = _KINDS[kind](**arguments)
    except BaseException as error:  # noqa: BLE001 a child must never go on as its parent
        os.write(2, f"{kind}: {error!r}\n".encode())
    finally:
        os._exit(code or 0)


if __name__ == "__main__":
    _nurse()
