"""Random traces and tables of few entries: enough of them change nothing, too few make verdicts doubtful, not false."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.findings import Proof
from hicache_obs.records import (
    NO_OP,
    DropReason,
    GraphNode,
    IoEnd,
    Lost,
    Record,
    ThreadId,
    ThreadPost,
    ThreadRecv,
)
from hicache_obs.testing import RecordingSink, misuses, races
from hicache_obs.testing.programs import BLOCKS, EVENTS, GRAPHS, THREADS, random_program

PROGRAMS = int(os.environ.get("HICACHE_OBS_FUZZ", "2000")) // 4
PARTS = 4


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Prunes every few records."""
    monkeypatch.setattr("hicache_obs.analyzer.check.PRUNE_EVERY", 5)
    return monkeypatch


def program(seed: int) -> list[Record]:
    """A random trace in which every host thread says something first: nothing is forgotten before it appears."""
    records = random_program(seed, steps=50)
    return [*(ThreadPost(NO_OP, ThreadId(thread), 0, 99) for thread in range(THREADS)), *records]


def analyse(records: Sequence[Record]) -> RecordingSink:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    assert analyzer.forgotten == 0
    return sink


def _most(records: Sequence[Record], more: type, less: type | None) -> int:
    """The most that ever were there at once of what ``more`` adds and ``less`` takes away."""
    now = most = 0
    for record in records:
        now += isinstance(record, more) - (less is not None and isinstance(record, less))
        most = max(most, now)
    return most


@pytest.mark.parametrize("part", range(PARTS))
def test_tables_that_are_just_large_enough(part: int, limit: pytest.MonkeyPatch) -> None:
    """Nothing is doubtful, nothing is missed."""
    limit.setattr("hicache_obs.analyzer.order.MAX_EVENTS", EVENTS)
    limit.setattr("hicache_obs.analyzer.check.MAX_GRAPHS", GRAPHS)
    limit.setattr("hicache_obs.analyzer.handover.MAX_BLOCKS", BLOCKS)
    found = 0
    for seed in range(part, PROGRAMS, PARTS):
        records = program(seed)
        limit.setattr("hicache_obs.analyzer.check.MAX_ENDED", len({r.io for r in records if isinstance(r, IoEnd)}))
        limit.setattr("hicache_obs.analyzer.handover.MAX_POSTS", _most(records, ThreadPost, ThreadRecv))
        sink = analyse(records)
        expected = races(records, polled=True)
        assert set(sink.pairs) == expected, f"seed {seed}"
        assert set(sink.misuses) == misuses(records), f"seed {seed}"
        assert all(finding.proof is Proof.NONE for finding in sink.findings if not finding.misuse), f"seed {seed}"
        found += len(expected)
    assert found > PROGRAMS


@pytest.mark.parametrize("part", range(PARTS))
def test_numbers_that_hardly_fit(part: int, limit: pytest.MonkeyPatch) -> None:
    """Page tables that take something off all their numbers every few records miss no race and invent none."""
    limit.setattr("hicache_obs.analyzer.shadow.MAX_NUMBER", 8)
    found = told = 0
    for seed in range(part, PROGRAMS, PARTS):
        records = program(seed)
        sink = analyse(records)
        expected = races(records, polled=True)
        assert set(sink.pairs) == expected, f"seed {seed}"
        assert set(sink.misuses) <= misuses(records), f"seed {seed}"
        found += len(expected)
        told += len(sink.misuses)
    assert found > PROGRAMS
    assert told > 10


@pytest.mark.parametrize("lost", [False, True], ids=["whole", "lost"])
@pytest.mark.parametrize(
    ("table", "entries"),
    [
        ("order.MAX_EVENTS", 1),
        ("check.MAX_GRAPHS", 1),
        ("check.MAX_ENDED", 0),
        ("handover.MAX_POSTS", 1),
        ("handover.MAX_BLOCKS", 2),
    ],
)
def test_a_table_that_is_too_small(table: str, entries: int, lost: bool, limit: pytest.MonkeyPatch) -> None:
    """A race is certain or unknown, what is certain is a race; so too where the trace says that records were lost."""
    limit.setattr(f"hicache_obs.analyzer.{table}", entries)
    limit.setattr("hicache_obs.testing.programs.BLOCKS", 4)
    unknown = sure = 0
    for seed in range(lost, PROGRAMS, 2):
        records = program(seed)
        expected = races(records, polled=True)
        if lost:
            places = (at for at in range(len(records) // 3, len(records)) if not isinstance(records[at], GraphNode))
            records.insert(next(places, len(records)), Lost(NO_OP, ThreadId(0), 0, 1, DropReason.RING_FULL))
        sink = analyse(records)
        proofs = {(f.earlier.op, f.later.op): f.proof for f in sink.findings if not f.misuse}
        certain = {pair for pair, proof in proofs.items() if proof is Proof.NONE}
        assert expected <= set(proofs), f"seed {seed}: missed {sorted(expected - set(proofs))}"
        assert certain <= expected, f"seed {seed}: false {sorted(certain - expected)}"
        unknown += len(proofs) - len(certain)
        sure += len(certain)
    assert unknown > 0 or PROGRAMS < 400
    assert sure > unknown
