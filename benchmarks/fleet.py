"""Time, memory and results of ``fleet`` on synthesised ranks: ``make fleet-bench RANKS=64 ROUNDS=100000``.

Writes the journals of servers of eight tensor-parallel ranks, one server per node, and analyses them on one worker, on
two, and on two of which one is killed (SIGKILL) when half of the ranks are done. The second server has a rank with a
race, one that evicts a page more than its peers and one that loses records; the ranks of the other servers are
recordings of the same eight ranks, linked. Prints what each run took, in wall and processor time and in memory of its
largest worker, and fails with exit code 1 if any result differs from the first, if a worker grew beyond its bound, or
if what was put into the journals is not what was found.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from hicache_obs.findings import Verdict
from hicache_obs.fleet.cluster import DaskExecutor, local_workers
from hicache_obs.fleet.places import RankPlace, find_ranks
from hicache_obs.fleet.run import Fleet, analyse_fleet
from hicache_obs.records import Ranks
from hicache_obs.testing.fleet_ranks import Fault, ServerRank, link_rank, write_rank

SERVER = 8
"""Ranks of a server."""
RUNS = ("1", "2", "2-killed")


def write_fleet(folder: Path, ranks: int, rounds: int) -> None:
    """The journals, a node per server."""
    at = [max(8, rounds * share // 100 // 32 * 32 + 8) for share in (40, 60, 80)]
    faults = dict(
        zip((3, 5, 6), zip((Fault.RACE, Fault.EVICTS_MORE, Fault.LOSES_RECORDS), at, strict=True), strict=True)
    )
    jobs = []
    for number in range(ranks):
        dp, tp = divmod(number, SERVER)
        fault = {faults[tp][0]: faults[tp][1]} if dp == 1 and tp in faults else {}
        rank = ServerRank(Ranks(tp=tp), rounds, fault, skew_ns=tp * 1_000_000, pid=4000 + number)
        jobs.append((folder / f"node{dp}", rank))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        pool.starmap(write_rank, [job for job in jobs if job[1].faults or job[0].name == "node0"])
    first = {job[1].ranks.tp: job[0] / job[1].folder for job in jobs[:SERVER]}
    for node, rank in jobs[SERVER:]:
        if not rank.faults:
            link_rank(node, rank, first[rank.ranks.tp])


class Watch(threading.Thread):
    """The largest resident memory and the processor time of each child process, looked at twice a second."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.peak_bytes: dict[int, int] = {}
        self.cpu_s: dict[int, float] = {}
        self._end = threading.Event()

    def run(self) -> None:
        while not self._end.wait(0.5):
            for child in psutil.Process().children(recursive=True):
                try:
                    times = child.cpu_times()
                    self.peak_bytes[child.pid] = max(self.peak_bytes.get(child.pid, 0), child.memory_info().rss)
                    self.cpu_s[child.pid] = times.user + times.system
                except psutil.NoSuchProcess:
                    pass

    def stop(self) -> None:
        self._end.set()
        self.join()


def run(name: str, places: Sequence[RankPlace], bound_mib: int) -> tuple[Fleet, bool]:
    """One run; whether its workers stayed within the bound."""
    watch = Watch()
    watch.start()
    began = time.monotonic()
    with local_workers(int(name[0]), bound_mib << 20) as executor:
        up_s = time.monotonic() - began
        killed: list[int] = []

        def tell(stage: str, done: int, total: int) -> None:
            if name.endswith("killed") and not killed and stage == "ranks" and done >= total // 2:
                killed.append(_kill(executor))

        fleet = analyse_fleet(places, executor, tell)
        took_s = time.monotonic() - began
    watch.stop()
    peak_mib = max(watch.peak_bytes.values()) / 2**20
    note = f"; worker {killed[0]} was killed" if killed else ""
    print(
        f"workers {name:<9} {took_s:8.1f} s wall ({up_s:.1f} s of it until they were up), "
        f"{sum(watch.cpu_s.values()):8.1f} s processor time, largest worker {peak_mib:,.0f} MiB of {bound_mib:,}{note}",
        flush=True,
    )
    return fleet, peak_mib <= bound_mib and (bool(killed) or not name.endswith("killed"))


def _kill(executor: DaskExecutor) -> int:
    """Kill a worker in the middle of what it does; its process id."""
    pid = int(sorted(executor.client.run(os.getpid).values())[0])
    os.kill(pid, signal.SIGKILL)
    return pid


def as_made(fleet: Fleet, ranks: int) -> bool:
    """Whether what is in the journals was found, and nothing else."""
    raced = [rank.place.name for rank in fleet.ranks if rank.verdicts.get(Verdict.VIOLATION)]
    lost = [rank.place.name for rank in fleet.ranks if rank.lost]
    apart = [group.group.name for group in fleet.groups if group.divergence is not None]
    unread = [rank.error for rank in fleet.ranks if rank.error]
    decisions = sum(sum(group.compared) for group in fleet.groups)
    told = sum(clock.bounds is not None for clock in fleet.clocks)
    print(
        f"{len(fleet.ranks)} ranks, {sum(rank.records for rank in fleet.ranks):,} records, "
        f"{sum(rank.lookups for rank in fleet.ranks):,} page pairs; races in {raced or 'none'}; records lost in "
        f"{lost or 'none'}; {decisions:,} decisions compared, divergences in {apart or 'none'}; {told} clocks told"
    )
    wanted = 1 if ranks >= 2 * SERVER else 0
    return (len(raced), len(lost), len(apart), len(unread)) == (wanted, wanted, wanted, 0)


def main() -> int:
    """Write, analyse, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("ranks", type=int, nargs="?", default=64)
    parser.add_argument("rounds", type=int, nargs="?", default=100_000)
    parser.add_argument("--runs", default=",".join(RUNS), help="which of %(default)s")
    parser.add_argument("--memory-mib", type=int, default=512, help="bound of a worker")
    parser.add_argument("--folder", type=Path, help="where the journals go (3 kB a round for 11 ranks)")
    options = parser.parse_args()
    runs = options.runs.split(",")
    if options.ranks < 2 or options.rounds < 64 or not set(runs) <= set(RUNS):
        parser.error(f"{options.ranks} ranks of {options.rounds} rounds, runs {runs}: at least 2 of 64, of {RUNS}")
    folder = Path(tempfile.mkdtemp(prefix="fleet-", dir=options.folder))
    try:
        began = time.monotonic()
        write_fleet(folder, options.ranks, options.rounds)
        files = {file.stat().st_ino: file.stat().st_size for file in folder.rglob("*.arrows")}
        size_mib = sum(files.values()) / 2**20
        print(
            f"{options.ranks} ranks x {options.rounds:,} rounds: {size_mib:,.0f} MiB, {time.monotonic() - began:.0f} s"
        )
        places = find_ranks([str(folder)])
        results = [run(name, places, options.memory_mib) for name in runs]
    finally:
        shutil.rmtree(folder)
    same = all(fleet == results[0][0] for fleet, _ in results)
    bounded = all(kept for _, kept in results)
    print(f"results {'are the same' if same else 'DIFFER'}; memory {'within' if bounded else 'BEYOND'} the bound")
    return 0 if as_made(results[0][0], options.ranks) and same and bounded else 1


if __name__ == "__main__":
    sys.exit(main())
