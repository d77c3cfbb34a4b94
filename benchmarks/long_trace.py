"""Memory and speed over a trace of any length: ``make long-trace N=10000000``.

Records are made lazily by ``hicache_obs.testing.rounds`` (decode rounds; one round in 32 restores 4,096 pages, one
is a write-back) and analysed in batches, without device times and with them. Prints records per second of processor
time in the analyzer, and the process's resident memory at every tenth. The analyzer's tables are full after some
``FILL`` records; fails, with exit code 1, if memory grows by more than ``--bound-mib`` from the first tenth after that
to the end, or by a finding.
"""

from __future__ import annotations

import argparse
import gc
import os
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.testing.rounds import Rounds

BATCH = 8192
FILL = 500_000


def resident_mib() -> float:
    """Resident memory of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def run(records: int, *, timed: bool, bound_mib: float) -> bool:
    """Analyse one trace; whether memory stayed within the bound."""
    tally = Tally()
    analyzer = Analyzer(tally)
    trace = Rounds(timed=timed).trace(records)
    title = "with device times" if timed else "without device times"
    print(f"{title}: {records:,} records; {resident_mib():.0f} MiB before the first", flush=True)
    fed, busy_s, step = 0, 0.0, 1
    full_mib: float | None = None
    while batch := list(islice(trace, BATCH)):
        began = time.process_time()
        fed += analyzer.feed(batch)
        busy_s += time.process_time() - began
        while step <= 10 and fed >= step * records // 10:
            gc.collect()
            now = resident_mib()
            if full_mib is None and fed >= FILL:
                full_mib = now
            print(
                f"  {fed:>12,} records  {fed / busy_s:>9,.0f} records/s  {now:6.0f} MiB  "
                f"{analyzer.retained_groups:,} groups",
                flush=True,
            )
            step += 1
    analyzer.finish()
    grown = resident_mib() - (full_mib or 0.0)
    kept = grown <= bound_mib
    print(f"  since the tables were full: {grown:+.0f} MiB; allowed: {bound_mib:.0f}; {len(tally.defects)} findings")
    if tally.defects or not analyzer.totals.lookups:
        print("  every fence is in place: there must be look-ups and no finding")
        return False
    return kept


def main() -> int:
    """Run both traces; 0 if memory stayed within the bound."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("records", type=int, nargs="?", default=10_000_000)
    parser.add_argument("--bound-mib", type=float, default=32.0, help="growth allowed once the tables are full")
    parser.add_argument("--only", choices=("timed", "untimed"), help="one of the two traces")
    options = parser.parse_args()
    if options.records < 2 * FILL:
        parser.error(f"records: {options.records}; at least {2 * FILL}, for the tables fill in the first {FILL}")
    if options.only:
        return 0 if run(options.records, timed=options.only == "timed", bound_mib=options.bound_mib) else 1
    # A process each: what the first leaves behind would hide what the second takes.
    command = [sys.executable, __file__, str(options.records), "--bound-mib", str(options.bound_mib), "--only"]
    return max(subprocess.run([*command, which], check=False).returncode for which in ("untimed", "timed"))


if __name__ == "__main__":
    sys.exit(main())
