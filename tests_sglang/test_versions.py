"""The same scenario on the code of older releases: who has which fence, and what ``enforce`` adds."""

from __future__ import annotations

import pytest

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


def test_enforce_adds_nothing_where_the_fences_are(outcomes):
    outcome = outcomes([LOAD], "0.5.23", "enforce")[LOAD]
    assert outcome.told["fences_added"] == {}
    assert outcome.right
