"""An agent that does not keep up leaves stretches out: counted, told, kept in the journal, and never a verdict."""

from __future__ import annotations

import time
from contextlib import closing

import numpy as np
import pytest

from hicache_obs.agent import rank as rank_module
from hicache_obs.agent import sampling
from hicache_obs.agent.sampling import Backlog, Coverage
from hicache_obs.cli import main
from hicache_obs.readers import open_trace
from hicache_obs.readers.ring import RingReader
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import (
    Define,
    DefineSpace,
    DropReason,
    EventRecord,
    Kernel,
    Lost,
    Mode,
    Ranks,
    Times,
    device,
)

RACE = {"hazard": "waw_forward_restore"}


@pytest.fixture
def slow(monkeypatch):
    """An analyzer that takes a millisecond a record."""
    feed = rank_module.Analyzer.feed

    def after_a_while(self, records):
        time.sleep(0.001 * len(records))
        return feed(self, records)

    monkeypatch.setattr(rank_module.Analyzer, "feed", after_a_while)
    monkeypatch.setattr(rank_module, "MIN_BATCH", 8)


def overload(agent, writer, round_of, rounds, *, cycles, per_cycle=30):
    """``per_cycle`` rounds between two cycles that can judge a few of them; returns the rounds that were made."""
    made = []
    for _ in range(cycles):
        for _ in range(per_cycle):
            n = next(rounds)
            made.append(n)
            for record in round_of(n, times=True):
                writer.append(record)
        agent.cycle(budget_s=0.02)
    return made


@pytest.mark.parametrize("journal", [True, False])
def test_what_is_left_out_is_counted_told_and_never_judged(
    node, ring, round_of, value, tmp_path, caplog, slow, journal
):
    caplog.set_level("INFO", "hicache_obs.agent")
    agent, metrics = node(journals=tmp_path / "j" if journal else None)
    writer = ring(slots=512, arena_words=2048)
    made = overload(agent, writer, round_of, iter(range(1, 1000)), cycles=12)
    agent.drain()

    left_out = value(metrics, "dropped_records_total", reason="sampled_out")
    found = value(metrics, "violations_total", **RACE) + value(metrics, "latent_races_total", **RACE)
    dropped = sum(writer.dropped.values())
    assert left_out > 200
    assert 0 < found < len(made)
    assert found <= len(made) - left_out // 5 + 12  # a round has 5 records; a stretch may begin and end inside one
    assert value(metrics, "sampling") == 1
    assert 0 < value(metrics, "coverage_ratio") < 1
    assert value(metrics, "unread_records") == 0
    told = [m for m in caplog.messages if "cannot be judged in time" in m]
    assert told == [
        f"{writer.path}: cannot be judged in time; records are "
        f"{'kept in the journal and' if journal else 'not kept and'} not judged in part from now on"
    ]
    agent.close()
    if journal:
        (folder,) = (tmp_path / "j").iterdir()
        kept = [r for r in open_trace(folder) if not isinstance(r, Lost)]
        assert len(kept) == 5 * len(made) - dropped
        assert main(["check", str(folder)]) == 1  # all of it, at leisure


def test_a_verdict_never_rests_on_half_a_history(node, ring, round_of, value, slow):
    """Fenced rounds only: a stretch that hides a fence may hide a pair, and invents none."""
    agent, metrics = node()
    writer = ring(slots=512, arena_words=2048)

    def fenced(n, **_):
        return round_of(n % 7, fenced=True)

    overload(agent, writer, fenced, iter(range(1, 1000)), cycles=12)
    agent.drain()
    assert value(metrics, "dropped_records_total", reason="sampled_out") > 200
    of = metrics.rank(Ranks())
    assert of.total("violations_total") == of.total("latent_races_total") == 0
    assert of.total("checks_total") > 0


def test_an_agent_that_keeps_up_leaves_nothing_out(node, ring, round_of, fill, value):
    agent, metrics = node()
    writer = ring(slots=512, arena_words=2048)
    for turn in range(6):
        fill(writer, *(round_of(n, times=True) for n in range(60 * turn, 60 * turn + 60)))
        agent.cycle(budget_s=9)
    assert value(metrics, "dropped_records_total", reason="sampled_out") == 0
    assert value(metrics, "violations_total", **RACE) == 360
    assert value(metrics, "coverage_ratio") == 1
    assert value(metrics, "sampling") == 0


def test_a_backlog_that_shrinks_is_judged(node, ring, round_of, fill, value, slow):
    """A ring that was full when the agent came: it catches up, slowly."""
    agent, metrics = node()
    writer = ring(slots=512, arena_words=2048)
    fill(writer, *(round_of(n, times=True) for n in range(100)))
    while agent.cycle(budget_s=0.02):
        pass
    assert value(metrics, "dropped_records_total", reason="sampled_out") == 0
    assert value(metrics, "violations_total", **RACE) == 100


def test_an_agent_that_keeps_up_again_says_so(node, ring, round_of, value, caplog, slow, monkeypatch):
    caplog.set_level("INFO", "hicache_obs.agent")
    agent, metrics = node()
    writer = ring(slots=512, arena_words=2048)
    overload(agent, writer, round_of, iter(range(1, 1000)), cycles=12)
    agent.drain()
    left_out = int(value(metrics, "dropped_records_total", reason="sampled_out"))
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + sampling.WINDOW_S + 1)
    agent.cycle(budget_s=1)
    assert value(metrics, "sampling") == 0
    (told,) = [m for m in caplog.messages if "judged in full again" in m]
    assert told.startswith(f"{writer.path}: is judged in full again; ")
    assert left_out <= int(told.split("; ")[1].split()[0]) < left_out + 100  # names and times were not left out


@pytest.mark.parametrize(
    ("fills", "late", "hopeless"),
    [
        ([0.2, 0.6], True, True),
        ([0.6, 0.6], True, True),
        ([0.7, 0.6], True, False),  # it shrinks
        ([0.2, 0.4], True, False),  # there is room for a while
        ([0.2, 0.6], False, False),  # it has read all there was
        ([0.9], True, False),  # it has only begun
    ],
)
def test_when_a_backlog_is_hopeless(fills, late, hopeless):
    backlog = Backlog()
    assert [backlog.hopeless(fill, late=late) for fill in fills][-1] is hopeless


def test_coverage_is_that_of_the_last_minute():
    coverage = Coverage()
    assert coverage.share(0, analysed=0, lost=0) == 0
    assert coverage.share(10, analysed=90, lost=10) == 0.9
    assert coverage.share(40, analysed=100, lost=100) == 0.5
    assert coverage.share(50, analysed=100, lost=100) == 0.5
    assert coverage.share(200, analysed=200, lost=100) == 1
    assert coverage.share(400, analysed=200, lost=100) == 1
    assert Coverage().share(0, analysed=30, lost=10) == 0.75


def test_skipping_passes_on_names_losses_and_the_times_of_what_came_before(tmp_path):
    pages = np.arange(5)
    with closing(RingWriter(tmp_path / "x.ring", slots=16, arena_words=64)) as writer:

        def kernel(op):
            return Kernel(op, 0, op, 1, 0, 0, 0, (0, 1), (device(Mode.WRITE, pages),))

        with closing(RingReader(writer.path)) as reader:
            for turn in range(5):  # the last ones wrap around
                first = 10 * turn
                writer.append(kernel(first))
                assert [int(r.op) for r in reader.poll()] == [first]
                writer.append(kernel(first + 1))
                writer.append(Define(-1, 0, 0, DefineSpace.SITE, turn, "here"))
                writer.append(Times(first, 0, 0, 1, 2))
                writer.append(Times(first + 1, 0, 0, 1, 2))
                writer.drop(DropReason.RECORDER_ERROR, 3)
                writer.append(EventRecord(first + 2, 0, 0, 1, 1))
                assert reader.skip(2, last_op=first)[0] == 2
                count, passed = reader.skip(100, last_op=first)
                assert (count, [type(record) for record in passed]) == (4, [Times, Lost])
                assert passed[0].op == first
                assert passed[1].count == 3
                reader.release()
                assert reader.pending == 0
                assert reader.skip(9, last_op=first) == (0, [])
            writer.append(kernel(99))
            (after,) = reader.poll()
            assert after.accesses[0].ids.tolist() == pages.tolist()


def test_how_full_a_ring_is(tmp_path):
    with (
        closing(RingWriter(tmp_path / "x.ring", slots=16, arena_words=64)) as writer,
        closing(RingReader(writer.path)) as reader,
    ):
        assert reader.fill == 0
        for op in range(4):
            writer.append(EventRecord(op, 0, 0, 1, 1))
        assert reader.fill == 0.25
        reader.poll()
        assert reader.fill == 0
        writer.append(Kernel(9, 0, 0, 1, 0, 0, 0, (0, 1), (device(Mode.WRITE, np.arange(56)),)))
        assert reader.fill == 0.75
