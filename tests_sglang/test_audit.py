"""The audit's verdicts, read from the source, agree with what the same releases do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hicache_obs.sglang.audit import Verdict, audit


def verdicts(sglang_folder, version):
    source = sglang_folder / f"sglang-{version}" / "sglang"
    if not source.is_dir():
        source = next(Path(place) / "sglang" for place in sys.path if (Path(place) / "sglang" / "srt").is_dir())
    return {audited.path.path: audited.verdict for audited in audit(source)}


@pytest.mark.parametrize("version", ["0.5.14", "0.5.18", "0.5.20", "0.5.22"])
def test_load_back_and_write_back(release, sglang_folder, version):
    found, ran = verdicts(sglang_folder, version), release(version)
    assert (found["load-back"] is Verdict.ORDERED) is not bool(ran["load"].hazards)
    assert (found["write-back"] is Verdict.ORDERED) is not bool(ran["write"].hazards)


def test_the_newest_release_has_no_race_left(sglang_folder):
    found = verdicts(sglang_folder, "0.5.23")
    assert Verdict.RACE not in found.values()
    assert [path for path, verdict in found.items() if verdict is Verdict.UNDECIDED] == [
        "linkers, load",
        "MLA host deduplication",
    ]
