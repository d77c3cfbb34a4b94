"""A journal whose disk is full when its ring ends: what it lacks is stated once there is room, by whatever agent."""

from __future__ import annotations

import errno
import os
import time

import pytest

from hicache_obs.agent import journals, rank
from hicache_obs.agent.writers import SILENT_S, has_ended
from hicache_obs.readers import journal_writer, open_trace
from hicache_obs.records import DropReason, Lost


@pytest.fixture
def disk(monkeypatch):
    """``disk(full)``: whether a byte can be written to a journal."""
    put = journal_writer._SegmentFile._put
    state = {"full": False}

    def limited(self, message):
        if state["full"]:
            raise OSError(errno.ENOSPC, "No space left on device")
        put(self, message)

    monkeypatch.setattr(journal_writer._SegmentFile, "_put", limited)
    monkeypatch.setattr(journals, "_RETRY_S", 0.0)
    monkeypatch.setattr(journals, "_SETTLE_S", 0.0)
    return lambda full: state.update(full=full)


def gone(folder):
    """Records that a journal states as gone, and how many it has."""
    records = list(open_trace(folder))
    lost = [record for record in records if isinstance(record, Lost)]
    assert {record.reason for record in lost} <= {DropReason.MISSING}
    return sum(record.count for record in lost), len(records) - len(lost)


@pytest.mark.parametrize("kept", [0, 1], ids=["from the beginning", "in the middle"])
@pytest.mark.parametrize("killed", [False, True], ids=["the same agent", "the next agent"])
def test_a_loss_at_the_end_is_stated_once_there_is_room(
    node, ring, rings, tmp_path, round_of, fill, value, disk, kept, killed
):
    agent, metrics = node(journals=tmp_path / "j")
    writer = ring()
    for n in range(kept):
        fill(writer, round_of(n))
        agent.cycle(budget_s=9)
    disk(True)
    fill(writer, round_of(7), round_of(8))
    writer.close()
    agent.drain()
    assert writer.path.exists(), "nobody would see to it any more"
    assert value(metrics, "latent_races_total", hazard="waw_forward_restore") == kept + 2
    if killed:
        for reader in agent._ranks.values():  # as the system does
            reader.reader.close()
        agent._ranks.clear()
        agent.close()
        agent, _ = node(journals=tmp_path / "j")
    agent.drain()
    assert writer.path.exists()
    disk(False)
    agent.drain()
    assert not writer.path.exists()
    (folder,) = (tmp_path / "j").iterdir()
    assert gone(folder) == (6, 3 * kept)


def test_a_ring_does_not_wait_for_ever(node, ring, tmp_path, round_of, fill, disk, monkeypatch):
    agent, _ = node(journals=tmp_path / "j")
    writer = ring()
    disk(True)
    fill(writer, round_of(7))
    writer.close()
    agent.drain()
    assert writer.path.exists()
    monkeypatch.setattr(rank, "SETTLE_WITHIN_S", -1.0)
    agent.drain()
    assert not writer.path.exists()


def test_without_a_loss_nothing_more_is_written(node, ring, tmp_path, round_of, fill, disk):
    agent, _ = node(journals=tmp_path / "j")
    writer = ring()
    fill(writer, round_of(1))
    agent.cycle(budget_s=9)
    (folder,) = (tmp_path / "j").iterdir()
    (segment,) = folder.glob("*.arrows")
    writer.close()
    agent.drain()
    assert gone(folder) == (0, 3)
    assert list(folder.glob("*.arrows")) == [segment]


@pytest.mark.parametrize(
    ("name", "content", "age_s", "ended"),
    [
        ("scheduler-dp0-pp0-tp0.4194303.ring", bytes(5000), SILENT_S + 1, True),
        ("scheduler-dp0-pp0-tp0.4194303.ring", b"", SILENT_S + 1, True),
        ("scheduler-dp0-pp0-tp0.4194303.ring", bytes(5000), 1, False),  # it may be about to write it
        ("scheduler-dp0-pp0-tp0.1.ring", bytes(5000), SILENT_S + 1, False),  # it runs
        ("scheduler-dp0-pp0-tp0.4194303.ring", b"x" * 5000, SILENT_S + 1, False),  # something else
        ("unnamed.ring", bytes(5000), SILENT_S + 1, False),
    ],
)
def test_a_ring_that_was_never_made_is_nobodys(tmp_path, name, content, age_s, ended):
    path = tmp_path / name
    path.write_bytes(content)
    then = time.time() - age_s
    os.utime(path, (then, then))
    assert has_ended(path) is ended
