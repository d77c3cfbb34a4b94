"""Ranks and agent are killed, and the disk is full, at random moments: what is left is whole, or counted as gone."""

from __future__ import annotations

import os
import subprocess
import sys

ROUNDS = int(os.environ.get("HICACHE_OBS_CHAOS", "6"))
"""Rounds of trouble; `make chaos` has 200."""


def test_nothing_is_lost_that_is_not_counted(checkout):
    command = [sys.executable, str(checkout / "benchmarks" / "stress" / "chaos.py"), str(ROUNDS), "--seed", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60 + 5 * ROUNDS, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = {line[:42].strip(): line[43:] for line in done.stdout.splitlines()}
    assert int(counted["ranks killed"]) > 0
    assert int(counted["agents killed"]) > 0
    assert counted["… lost"] == counted["problems"] == "0"
    assert int(counted["races made, all records in a ring"].replace(",", "")) > 10
