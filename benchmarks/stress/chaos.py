"""Kill ranks and the agent and fill the disk at random moments, and see what is left: ``make chaos N=200``.

Every ring and every journal opens, each record in them is as it was written, everything that is missing is counted, and
no race that was reported, or that is in the records, is lost. Exit code 1 and the first problems if not.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from audit import first, is_unmade, rows
from processes import kill, runs
from rig import Rig

from hicache_obs.errors import TraceError
from hicache_obs.readers import open_trace
from hicache_obs.readers.ring import read_ring

RANKS = 3
ROUND_S = 0.4
UNWATCHED = "hicache_obs_blind"


def main(arguments: list[str] | None = None) -> int:
    """Run, print a table; 0 if all is well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave all files there")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what was started and mounted goes, too
    folder = Path(tempfile.mkdtemp(prefix="hicache-obs-chaos-"))
    try:
        return _run(folder, options.rounds, random.Random(options.seed))
    finally:
        if options.keep is not None:
            shutil.copytree(folder, options.keep, dirs_exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)


def _run(folder: Path, rounds: int, chance: random.Random) -> int:
    happened = dict.fromkeys(("ranks killed", "agents killed", "disks filled", "bursts"), 0)
    problems: list[str] = []
    with Rig(folder, ranks=RANKS, rounds_per_s=100, race_every=20, slots=1024, arena=4096, disk_mib=256) as rig:
        rig.start_agent()
        for tp in range(RANKS):
            rig.start_rank(tp)
        for _ in range(rounds):
            _one_round(rig, chance, happened)
            problems += _open_some(rig, chance)
        rig.free_disk()
        problems += _wait_until_watched(rig)
        disk = rig.disk
        books = rig.finish()
        problems += books.problems + _whole_lines(rig.events)
    table = [("rounds", str(rounds)), *((name, str(count)) for name, count in happened.items())]
    table += [("a full disk is", disk), ("agents", str(rig.agents)), *rows(books)]
    for name, value in table:
        print(f"{name:42} {value}")
    if books.injected == 0 or books.live == 0:
        problems.append("no race was made, or none was found: nothing is shown")
    if problems:
        print(first(problems), file=sys.stderr)
    return int(bool(problems))


def _one_round(rig: Rig, chance: random.Random, happened: dict[str, int]) -> None:
    """Some of what can go wrong, in any order, at moments of a round."""
    events = [
        name
        for name, weight in (("rank", 0.5), ("agent", 0.5), ("disk", 0.2), ("burst", 0.2))
        if chance.random() < weight
    ]
    chance.shuffle(events)
    rig.free_disk()
    for event in events:
        time.sleep(chance.random() * ROUND_S / len(events))
        tp = chance.randrange(RANKS)
        if event == "rank":
            happened["ranks killed"] += 1
            kill(rig.ranks[tp].pid)
            rig.start_rank(tp)
        elif event == "agent":
            happened["agents killed"] += 1
            kill(rig.agent)
            if chance.random() < 0.7:
                rig.start_agent()
        elif event == "disk":
            happened["disks filled"] += 1
            rig.fill_disk()
        else:
            happened["bursts"] += 1
            rig.burst(tp, 200)
    if not runs(rig.agent):
        rig.start_agent()


def _open_some(rig: Rig, chance: random.Random) -> list[str]:
    """One ring and one journal, whatever happens to them meanwhile."""
    problems = []
    rings = [*rig.rings.glob("*.ring"), *rig.rings.glob("finished/*.ring")]
    journals = [path for path in rig.journals.iterdir() if path.is_dir()]
    with suppress(FileNotFoundError):  # moved meanwhile
        path = chance.choice(rings)
        if not is_unmade(path):
            try:
                read_ring(path)
            except TraceError as error:
                if path.exists():
                    problems.append(f"ring: {error}")
    if journals:
        path = chance.choice(journals)
        try:
            open_trace(path)
        except TraceError as error:
            # Killed or out of room before the first header was whole: there is nothing in it yet.
            if "header is complete" not in str(error) and "no file is named like" not in str(error):
                problems.append(f"journal: {error}")
    return problems


def _wait_until_watched(rig: Rig, within_s: float = 30.0) -> list[str]:
    """In the end every rank is watched again."""
    deadline = time.monotonic() + within_s
    seen: list[str] = []
    while time.monotonic() < deadline:
        seen = [line for line in rig.scrape().splitlines() if line.startswith(UNWATCHED + "{")]
        if len(seen) == RANKS and all(line.endswith(" 0.0") for line in seen):
            return []
        if not runs(rig.agent):
            rig.start_agent()
        time.sleep(0.2)
    return [f"ranks that nobody watches {within_s:.0f} s after the last kill: {seen}"]


def _whole_lines(path: Path) -> list[str]:
    """What in the event log is no line of JSON."""
    problems = []
    for file in (path, path.with_name(path.name + ".1")):
        if not file.exists():
            continue
        for number, line in enumerate(file.read_bytes().splitlines(keepends=True), 1):
            try:
                json.loads(line)
                whole = line.endswith(b"\n")
            except ValueError:
                whole = False
            if not whole:
                problems.append(f"{file.name}: line {number} is half a line: {line[:80]!r}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
