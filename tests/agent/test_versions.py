"""Ranks and agent of different versions: the ring is refused and told of, and the rank goes on as if nobody read it."""

from __future__ import annotations

import base64
import gzip
import logging
import os

import pytest

from hicache_obs.cli import main
from hicache_obs.readers.ring_header import set_mode
from hicache_obs.recorder.process import pid_namespace, process_start
from hicache_obs.records import RING_VERSION, CaptureMode, DropReason, EventRecord, RingWord

OLD = {
    1: (
        "H4sICPfqDGsCA3NjaGVkdWxlci1kcDAtcHAwLXRwMC4xLnJpbmcAy8hMTizKzEtnZICABijNAaUFoPTdBAa8IGtxxJKULW8kDix3"
        "eWavyEA0YGSgDDCh0TCwdBVp7hgFo2AUjIJRMApGwSgYBaNgFIyCUTAKhjVgRO2Hc+HolzOijQuAAAtUgpI+PCMjav9dBEd/npD9"
        "jKMxOQpGAcmAFY2mNwAAenIToYAUAAA="
    ),
    2: (
        "H4sICPbqDGsCA3NjaGVkdWxlci1kcDAtcHAwLXRwMC4yLnJpbmcAy8hMTizKzEtnYoCABijNAaUFoPSlBAa8wPKUSmLKljcScy4K"
        "LLZXZGC4cdwcLP7n///3IJoRhz5GBsoAExoNAzVXIe6g1PxRMApGwSgYBaNgFIyCUTAKRsEoGAWjYFgARtR+OBeOfjkj2rgACLBA"
        "JSjpYzMyovbfRXD05wnZP9rPHwWjgHTAikbTGwAAii+dTYAUAAA="
    ),
}
"""Rings as the versions with these layouts wrote them: a kernel and a copy onto its page."""


def put_word(path, word, value):
    with path.open("r+b") as file:
        file.seek(int(word) * 8)
        file.write(value.to_bytes(8, "little", signed=True))


@pytest.fixture
def old_ring(rings):
    """``old_ring(layout)``: a ring of that layout; of this process, if ``runs``."""

    def make(layout, *, runs=True):
        path = rings / f"scheduler-dp0-pp0-tp5.{layout}.ring"
        path.write_bytes(gzip.decompress(base64.b64decode(OLD[layout])))
        if runs:
            put_word(path, RingWord.PID, os.getpid())
            put_word(path, RingWord.PROCESS_START, process_start(os.getpid()) if layout > 1 else 0)
            put_word(path, RingWord.PID_NAMESPACE, pid_namespace() if layout > 1 else 0)
        return path

    return make


@pytest.mark.parametrize("layout", OLD)
def test_a_new_agent_refuses_the_ring_of_an_old_rank_and_leaves_it_alone(
    node, ring, old_ring, round_of, fill, value, caplog, layout
):
    agent, metrics = node()
    old, good = old_ring(layout), ring(1)
    before = old.read_bytes()
    fill(good, round_of(1))
    for _ in range(3):
        agent.cycle(budget_s=9, look=True)
    assert old.read_bytes() == before
    assert [value(metrics, "blind", tp_rank=tp) for tp in "15"] == [0, 1]
    assert value(metrics, "ring_errors_total", tp_rank="5", reason="version") == 1
    assert value(metrics, "records_total", tp_rank="1") == 3
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{old}: ring layout {layout} is older than {RING_VERSION}, the only one known here; "
        "read it with the version that wrote it; it is not read"
    ]


def test_a_dead_rank_of_an_old_version_blinds_nobody(node, old_ring, value):
    agent, metrics = node()
    put_word(old_ring(2), RingWord.PROCESS_START, 1)  # a process that has this one's id and was another
    agent.cycle(budget_s=9, look=True)
    assert value(metrics, "blind", tp_rank="5") == 0
    assert value(metrics, "ring_errors_total", tp_rank="5", reason="version") == 1


def test_an_old_agent_costs_a_new_rank_nothing_but_what_does_not_fit(node, ring, round_of, fill, value):
    """The rank's ring has a layout that the agent does not know; then one comes that does."""
    agent, metrics = node()
    writer = ring(slots=16, arena_words=64)
    put_word(writer.path, RingWord.VERSION, RING_VERSION + 1)
    fill(writer, round_of(1))
    for n in range(100):
        agent.cycle(budget_s=9)
        writer.append(EventRecord(100 + n, 0, n, 1, 1))
    assert writer.mode is CaptureMode.OBSERVE
    assert writer.dropped == {DropReason.RING_FULL: 100 - 13}
    assert value(metrics, "blind") == 1
    agent.close()

    put_word(writer.path, RingWord.VERSION, RING_VERSION)
    newer, metrics = node()
    assert newer.cycle(budget_s=9) == 16
    writer.append(EventRecord(300, 0, 0, 1, 1))
    newer.cycle(budget_s=9)
    assert value(metrics, "blind") == 0
    assert value(metrics, "dropped_records_total", reason="ring_full") == 87


@pytest.mark.parametrize("layout", OLD)
def test_a_rank_of_another_version_can_be_switched_off(rings, ring, old_ring, capsys, layout):
    old, own = old_ring(layout), ring(0)
    assert main(["off", "--dir", str(rings), "--rank", "5"]) == 0
    assert f"ring layout {layout} is older than" in capsys.readouterr().out
    assert set_mode(old, CaptureMode.OFF) is CaptureMode.OFF
    assert own.mode is CaptureMode.OBSERVE
    assert main(["on", "--dir", str(rings), "--rank", "5"]) == 2
    assert "; it stays as it is" in capsys.readouterr().err
    assert set_mode(old, CaptureMode.OFF) is CaptureMode.OFF


def test_the_ring_of_a_dead_rank_of_another_version_is_evidence(rings, old_ring, capsys):
    old = old_ring(2, runs=False)
    put_word(old, RingWord.PROCESS_START, 1)
    before = old.read_bytes()
    assert main(["off", "--dir", str(rings)]) == 3
    assert old.read_bytes() == before
