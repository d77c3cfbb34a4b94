"""The same scenario on the code of older releases: who has which fence, what ``enforce`` adds, and that the audit,
which only reads their source, says the same.

In one module, for two workers must not import a release each: run with ``--dist loadfile``.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from hicache_obs.sglang.audit import Verdict, audit

LOAD = "base+readdone+writefence+loadfence+deferred"
WRITE = "base+readdone+writeback+writefence+deferred"
VERSIONS = {"0.5.14": (False, False), "0.5.18": (False, False), "0.5.20": (True, False), "0.5.22": (True, False)}
"""Which of the two fences (load, write) each release has."""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_release_without_the_fence_is_racy_and_corrupt(release, version):
    found = release(version)
    for path, fenced, hazard in (
        ("load", VERSIONS[version][0], "waw_forward_restore"),
        ("write", VERSIONS[version][1], "raw_forward_backup"),
    ):
        outcome = found[path]
        assert outcome.told["missing"] == {}
        assert set(outcome.told["unobservable"]) == {"metadata_war", "rdma", "relocation", "tp_divergence"}
        assert outcome.checked > 0
        assert outcome.hazards == (set() if fenced else {hazard})
        assert outcome.right is fenced, outcome.told["content"]
    for path in found.keys() - {"load", "write"}:
        assert found[path].hazards == set()
        assert found[path].right


@pytest.mark.parametrize("version", ["0.5.14", "0.5.18"])
def test_enforce_adds_the_missing_fences_and_the_pages_are_right(outcomes, version):
    found = outcomes([LOAD, WRITE], version, "enforce")
    assert found[LOAD].told["fences_added"] == {"load": 1, "write": 1}
    assert found[WRITE].told["fences_added"] == {"write": 1}
    for outcome in found.values():
        assert outcome.hazards == set()
        assert outcome.checked > 0
        assert outcome.right
    assert found[LOAD].trace.names.status["fences added load"] == 1


def verdicts(sglang_folder, version):
    source = sglang_folder / f"sglang-{version}" / "sglang"
    if not source.is_dir():
        source = next(Path(place) / "sglang" for place in sys.path if (Path(place) / "sglang" / "srt").is_dir())
    return {audited.path.path: audited.verdict for audited in audit(source)}


@pytest.mark.parametrize("version", ["0.5.14", "0.5.18", "0.5.20", "0.5.22"])
def test_the_audit_says_what_load_back_and_write_back_do(release, sglang_folder, version):
    found, ran = verdicts(sglang_folder, version), release(version)
    assert (found["load-back"] is Verdict.ORDERED) is not bool(ran["load"].hazards)
    assert (found["write-back"] is Verdict.ORDERED) is not bool(ran["write"].hazards)


@pytest.mark.parametrize(("name", "words"), [("Mooncake", "linker"), ("UMBP", "linker+umbp")])
@pytest.mark.parametrize(("version", "offload"), [("0.5.20", True), ("0.5.22", True), ("0.5.23", False)])
def test_what_the_audit_says_of_linkers_is_what_they_do(outcomes, sglang_folder, version, offload, name, words):
    """Up to 0.5.22 the offload's event is of the schedule stream alone, as the load's is in all of them."""
    scenarios = [f"base+readdone+{words}", f"base+readdone+{words}+fenced"]
    said, found = verdicts(sglang_folder, version), outcomes(scenarios, version)
    assert said[f"{name}'s linker, load"] is Verdict.RACE
    assert said[f"{name}'s linker, offload"] is (Verdict.RACE if offload else Verdict.ORDERED)
    early = {("forward", "linker offload")} if offload else set()
    racy, fenced = (
        {(finding.earlier.site, finding.later.site) for finding in found[scenario].findings} for scenario in scenarios
    )
    assert racy == {("forward", "linker load")} | early
    assert fenced == early  # the fence of the scenario is for the load
    assert all(outcome.told["errors"] == {} and outcome.right for outcome in found.values())


def test_the_newest_release_has_one_race_left_in_each_linker(sglang_folder):
    found = verdicts(sglang_folder, "0.5.23")
    assert [path for path, verdict in found.items() if verdict is Verdict.RACE] == [
        "Mooncake's linker, load", "UMBP's linker, load",
    ]  # fmt: skip
    assert [path for path, verdict in found.items() if verdict is Verdict.UNDECIDED] == [
        "LMCache", "FlexKV", "MLA host deduplication",
    ]  # fmt: skip
