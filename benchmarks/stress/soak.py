"""A node under load for a long time, and everything that goes wrong there: ``make soak MIN=30``.

Four ranks make 20,000 rounds a minute together, one in a few hundred without its fence. In the first quarter of the
time ranks and the agent are killed. Then the run goes on, faster, until the analyzer's tables are full, which is not
counted, and for the other three quarters memory and file descriptors are measured, while rings overflow, the disk fills
up, the agent is stopped, and its wall clock is set.

Prints a table. Exit code 1 if memory or descriptors grow by more than their noise, a clock drifts, a race is lost, or
something that is gone is not counted.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from audit import first, rows
from processes import Control, Word, kill, runs
from rig import Rig
from slope import Slope, slope

from hicache_obs.agent.rank import MAX_PAIRS
from hicache_obs.analyzer.taint import MAX_SOURCES

ROUNDS_PER_MIN = 20_000
RANKS = 4
RACE_EVERY = 331
TICK_S = 1.0
MARKS = ("<!-- make soak: begin -->", "<!-- make soak: end -->")
SLOTS = 16_384
MIN_MINUTES = 5
FLOOR_MIB, FLOOR_FDS, FLOOR_MS = 1.0, 0.5, 1.0
"""Growth over the whole time that is not told from nothing."""
_BEAT = re.compile(r'^hicache_obs_heartbeat_timestamp_seconds\{[^}]*tp_rank="(\d+)"[^}]*\} (\S+)$', re.MULTILINE)
_JUDGED = re.compile(r"^hicache_obs_records_total\{[^}]*\} (\S+)$", re.MULTILINE)
_RACED = re.compile(r'^hicache_obs_violations_total\{[^}]*hazard="waw_forward_restore"[^}]*\} (\S+)$', re.MULTILINE)
FILL_RECORDS, FILL_RACES = 100_000, 1.25 * max(MAX_SOURCES, MAX_PAIRS)
"""Records and races of each rank after which the analyzer's tables hold as many of them as they ever do."""
FILL_BURST = 500
"""Rounds that each rank makes at once, every ``TICK_S``, until then."""


@dataclass(slots=True)
class Measured:
    """What was seen of the processes that live on.

    Attributes:
        memory, descriptors: Of each process: (seconds, MiB) and (seconds, count).
        clock: (seconds, ms) between the agent's word for a rank's last beat and when it was, by real clocks.
        coverage: The least that an agent stated.
        cpu_s: Processor time of the last agent, and over how long.
    """

    memory: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    descriptors: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    clock: list[tuple[float, float]] = field(default_factory=list)
    cpu_s: float = 0.0
    over_s: float = 0.0


class Faults:
    """What goes wrong, by chance, a few times a minute."""

    def __init__(self, rig: Rig, chance: random.Random) -> None:
        self._rig = rig
        self._chance = chance
        self._due: list[tuple[float, str]] = []
        self._stepped = False
        self.happened = dict.fromkeys(
            ("ranks killed", "agents killed", "rings overflowed", "disks filled", "agents stopped", "clocks set"), 0
        )

    def tick(self, *, lethal: bool) -> None:
        """Once per ``TICK_S``."""
        now = time.monotonic()
        for due in [due for due in self._due if due[0] <= now]:
            self._due.remove(due)
            self._undo(due[1])
        for name in self.happened:
            if self._chance.random() < TICK_S / 40 and (lethal or "killed" not in name):
                self._do(name, now)

    def _do(self, name: str, now: float) -> None:
        rig, chance = self._rig, self._chance
        tp = chance.randrange(RANKS)
        if any(waiting == name for _, waiting in self._due):
            return
        self.happened[name] += 1
        if name == "ranks killed":
            kill(rig.ranks[tp].pid)
            rig.start_rank(tp)
        elif name == "agents killed":
            kill(rig.agent)
            self._due.append((now + chance.random() * 4, name))
        elif name == "rings overflowed":
            rig.burst(tp, 4000)
        elif name == "disks filled":
            rig.fill_disk()
            self._due.append((now + 1 + chance.random() * 4, name))
        elif name == "agents stopped":
            kill(rig.agent, signal.SIGSTOP)
            self._due.append((now + chance.random() * 4, name))
        else:
            self._stepped = not self._stepped
            rig.step_clock(chance.choice((-3600, 3600, 86400)) if self._stepped else 0)

    def _undo(self, name: str) -> None:
        if name == "disks filled":
            self._rig.free_disk()
        elif name == "agents stopped":
            kill(self._rig.agent, signal.SIGCONT)
        elif name == "agents killed" and not runs(self._rig.agent):
            self._rig.start_agent()

    def end(self) -> None:
        """Undo what is left to undo."""
        for _, name in self._due:
            self._undo(name)
        self._due.clear()
        self._rig.step_clock(0)


def main(arguments: list[str] | None = None) -> int:
    """Run, print a table; 0 if all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("minutes", type=float, nargs="?", default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, metavar="FILE.md", help="put the table between this page's marks, too")
    options = parser.parse_args(arguments)
    if options.out is not None and not all(mark in options.out.read_text() for mark in MARKS):
        parser.error(f"--out {options.out}: has no line {' and no line '.join(MARKS)}")
    if options.minutes < MIN_MINUTES:
        parser.error(f"minutes: {options.minutes:g}; at least {MIN_MINUTES}, for the slopes")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started and mounted goes, too
    folder = Path(tempfile.mkdtemp(prefix="hicache-obs-soak-"))
    try:
        table, problems = _run(folder, options.minutes * 60, options.seed)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    text = "| | |\n|---|---|\n" + "".join(f"| {name} | {value} |\n" for name, value in table)
    print(text, end="")
    if options.out is not None:
        _put(options.out, text)
    if problems:
        print(first(problems), file=sys.stderr)
    return int(bool(problems))


def _put(page: Path, table: str) -> None:
    before, _, rest = page.read_text().partition(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{table}\n{MARKS[1]}{rest.partition(MARKS[1])[2]}")


def _run(folder: Path, seconds: float, seed: int) -> tuple[list[tuple[str, str]], list[str]]:
    measured = Measured()
    rate = ROUNDS_PER_MIN / 60 / RANKS
    disk_mib = 4096 + int(seconds / 60 * 64)  # of memory, as far as it is used
    with Rig(folder, ranks=RANKS, rounds_per_s=rate, race_every=RACE_EVERY, slots=SLOTS, disk_mib=disk_mib) as rig:
        faults = Faults(rig, random.Random(seed))
        rig.start_agent()
        for tp in range(RANKS):
            rig.start_rank(tp)
        began = time.monotonic()
        _kill_some(rig, faults, began + seconds / 4)
        _fill_tables(rig, faults)
        _rest(rig, faults, measured, time.monotonic() + seconds * 3 / 4)
        busy_s = time.monotonic() - began
        faults.end()
        agents, disk = rig.agents, rig.disk
        books = rig.finish(within_s=300)
        made = sum(Control(path).words[Word.ROUNDS] for path in rig.controls)
    table = [
        ("minutes; of which measured", f"{busy_s / 60:.1f}; {measured.over_s / 60:.1f}"),
        ("rounds a minute that were to be made, all ranks", f"{ROUNDS_PER_MIN:,}"),
        ("rounds made, bursts included", f"{made:,}"),
        *((name, str(count)) for name, count in faults.happened.items()),
        ("a full disk is", disk),
        ("agents", str(agents)),
        *rows(books),
    ]
    problems = [*books.problems, *_judge(measured, table)]
    if made < ROUNDS_PER_MIN * busy_s / 60:
        problems.append(f"{made:,} rounds; {ROUNDS_PER_MIN:,} a minute were to be made")
    if not books.live:
        problems.append("no race was found while it happened: nothing is shown")
    return table, problems


def _kill_some(rig: Rig, faults: Faults, until: float) -> None:
    while time.monotonic() < until:
        time.sleep(TICK_S)
        faults.tick(lethal=True)

    faults.end()


def _fill_tables(rig: Rig, faults: Faults) -> None:
    """Go on until the analyzer of each rank has judged as much as its tables hold."""
    if not runs(rig.agent):
        rig.start_agent()
    until = time.monotonic() + 3600
    while True:
        text = rig.scrape()
        records, races = ([float(value) for value in of.findall(text)] or [0.0] for of in (_JUDGED, _RACED))
        if min(records) >= FILL_RECORDS and min(races) >= FILL_RACES:
            return
        if time.monotonic() > until:
            wanted = f"{FILL_RECORDS:,} and {FILL_RACES:,.0f} of each rank were to be"
            raise TimeoutError(f"records and races judged in an hour: {records}, {races}; {wanted}\n{rig.tail()}")
        for tp in rig.ranks:
            rig.burst(tp, FILL_BURST)
        time.sleep(TICK_S)
        faults.tick(lethal=False)


def _rest(rig: Rig, faults: Faults, measured: Measured, until: float) -> None:
    cpu_s, from_s = _cpu_s(rig.agent), time.monotonic()
    while (now := time.monotonic()) < until:
        time.sleep(TICK_S)
        faults.tick(lethal=False)
        measured.cpu_s, measured.over_s = _cpu_s(rig.agent) - cpu_s, now - from_s
        for name, pid in (("agent", rig.agent), *((f"rank {tp}", rank.pid) for tp, rank in rig.ranks.items())):
            measured.memory.setdefault(name, []).append((now, _memory_mib(pid)))
            measured.descriptors.setdefault(name, []).append((now, len(os.listdir(f"/proc/{pid}/fd"))))
        _measure_clock(rig, measured, now)


def _measure_clock(rig: Rig, measured: Measured, now: float) -> None:
    """The agent turns a beat on the rank's clock into wall time; it is a tick old, or as old as the agent's last turn.

    Of a rank that beats 50 times a second, the youngest of the ranks' beats says how far the two clocks are apart.
    """
    if rig.agent_control.words[Word.CLOCK_STEP_NS] or not runs(rig.agent):
        return  # set off the real one just now
    text = rig.scrape()
    beats = [float(value) for _, value in _BEAT.findall(text) if float(value)]
    if beats:
        measured.clock.append((now, (time.time() - max(beats)) * 1e3))


def _judge(measured: Measured, table: list[tuple[str, str]]) -> list[str]:
    problems = []
    for what, series, unit, floor in (
        ("memory", measured.memory, "MiB", FLOOR_MIB),
        ("file descriptors", measured.descriptors, "", FLOOR_FDS),
    ):
        for name, samples in series.items():
            found = slope(samples)
            table.append((f"{what} of {name}, {samples[-1][1]:.1f} {unit}".rstrip(), _text(found, unit)))
            if found.grows(floor):
                problems.append(f"{what} of {name} grows: {_text(found, unit)}")
    ages = _without_pauses(measured.clock)
    drift = slope(ages)
    table.append((f"clocks: a beat seems {ages[-1][1]:.0f} ms old", _text(drift, "ms")))
    if drift.grows(FLOOR_MS) or drift.negated().grows(FLOOR_MS):
        problems.append(f"a clock drifts: {_text(drift, 'ms')}")
    table.append(("processor time of the agent", f"{measured.cpu_s / max(measured.over_s, 1):.1%} of a core"))
    return problems


def _without_pauses(samples: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The younger half of the samples, in stretches of ten: an agent that was stopped shows old beats."""
    kept: list[tuple[float, float]] = []
    for at in range(0, len(samples), 10):
        part = samples[at : at + 10]
        middle = sorted(value for _, value in part)[len(part) // 2]
        kept += [sample for sample in part if sample[1] <= middle]
    return kept


def _text(found: Slope, unit: str) -> str:
    unit = f" {unit}" if unit else ""
    return f"{found.per_hour:+.2f} ({found.low:+.2f} to {found.high:+.2f}){unit} an hour; noise {found.noise:.2f}"


def _memory_mib(pid: int) -> float:
    """Memory of its own: files that it maps are not."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) / 1024
    return 0.0


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    sys.exit(main())
