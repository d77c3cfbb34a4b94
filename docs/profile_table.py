"""Prints what is in profiler files as a table for ``docs/profilers.md``: ``python docs/profile_table.py FOLDER``.

Nothing of a file is copied but its name and counts.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from hicache_obs.cli.judge import check_copies
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.readers.preflight import count_syncs, level, preflight
from hicache_obs.readers.profile import OpKind, Profile

HEAD = (
    "file", "format", "operations (streams)", "host to device", "device to host", "stream waits", "event syncs",
    "event queries", "stream, device syncs", "ranges", "preflight finds", "level", "pairs", "outcome",
)  # fmt: skip


def row(name: str, profile: Profile) -> tuple[str, ...]:
    """One line of the table."""
    facts, ops, counts = profile.facts, profile.ops, count_syncs(profile)
    report = check_copies(profile)
    copies = [int((ops.kind == kind).sum()) for kind in (OpKind.HOST_TO_DEVICE, OpKind.DEVICE_TO_HOST)]
    wrong = [check.name for check in preflight(profile) if not check.good]
    return (
        f"`{name}`",
        f"{facts.producer}, {facts.schema}",
        f"{len(ops):,} ({len(np.unique(ops.stream))})",
        *(f"{count:,}" for count in copies),
        f"{counts.waits_paired:,} of {counts.waits:,}",
        f"{counts.event_syncs_paired:,} of {counts.event_syncs:,}",
        f"{counts.queries_paired:,} of {counts.queries:,}",
        f"{counts.stream_syncs:,}, {counts.device_syncs:,}",
        f"{len(profile.ranges):,}",
        ", ".join(wrong) or "nothing",
        level(profile).value,
        f"{report.pairs_checked - len(report.undecided):,} of {report.pairs_checked:,}",
        report.outcome,
    )


def table(folder: Path) -> str:
    """The table of all profiler files below ``folder``, by name."""
    files = sorted(p for p in folder.rglob("*") if p.name.endswith((".json", ".json.gz", ".sqlite")))
    lines = [HEAD, tuple("---" for _ in HEAD)]
    for file in files:
        profile = open_profile(file)
        if profile is not None:
            lines.append(row(file.name, profile))
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: python docs/profile_table.py FOLDER; {' '.join(sys.argv[1:]) or 'nothing'} is no folder")
    print(table(Path(sys.argv[1])), end="")
