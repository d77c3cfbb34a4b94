"""Entries of a replayed graph: ordered one by one, timed as a whole."""

from __future__ import annotations

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.findings import Cause, Hazard, Timing, Verdict
from hicache_obs.records import (
    IN_ORDER,
    Access,
    AnyRecord,
    EventId,
    EventWait,
    GraphNode,
    GraphReplay,
    Kernel,
    Mode,
    OpId,
    Space,
    StreamId,
    TensorAlloc,
    TensorFree,
    ThreadId,
    Times,
    WaitStream,
    page_ids,
)
from hicache_obs.testing import RecordingSink

HOST, ROUNDS, FILLS = ThreadId(0), StreamId(1), StreamId(2)
READ_DONE = EventId(5)
INPUTS = page_ids([7])


def buffer(mode: Mode) -> tuple[Access, ...]:
    return (Access(Space.BUFFER, mode, INPUTS),)


def history(*, waits: bool) -> list[AnyRecord]:
    """A replay reads its inputs, says so, and goes on; its inputs are filled again while it does."""
    records: list[AnyRecord] = [
        GraphReplay(OpId(0), HOST, 0, 1, ROUNDS, 0, 1, 3, (0, 1), ()),
        GraphNode(OpId(1), HOST, 0, 0, IN_ORDER, None, (0, 1), buffer(Mode.READ)),
        GraphNode(OpId(2), HOST, 0, 1, IN_ORDER, READ_DONE, (0, 1), ()),
        GraphNode(OpId(3), HOST, 0, 2, IN_ORDER, None, (0, 1), ()),
        EventWait(OpId(4), HOST, 1, READ_DONE, FILLS),
        Kernel(OpId(5), HOST, 2, FILLS, 0, 2, 0, (0, 1), buffer(Mode.WRITE)),
        Times(OpId(0), HOST, 9, 1_000, 90_000, 0),
        Times(OpId(5), HOST, 9, 20_000, 30_000, 0),
    ]
    return records if waits else [record for record in records if not isinstance(record, EventWait)]


def analyse(records: list[AnyRecord]) -> RecordingSink:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return sink


def test_who_follows_one_entry_may_run_while_the_replay_goes_on():
    """Its interval lies in the replay's, and nothing is wrong with that."""
    sink = analyse(history(waits=True))
    assert sink.findings == []
    assert sink.checked[Hazard.GRAPH] > 0


def test_without_the_wait_the_pair_is_found_and_its_interval_is_coarse():
    (finding,) = analyse(history(waits=False)).findings
    assert (finding.hazard, finding.verdict, finding.timing) == (Hazard.GRAPH, Verdict.VIOLATION, Timing.BROKEN)
    assert finding.coarse


@pytest.mark.parametrize("freed", ["before", "after"])
def test_a_pair_is_named_by_what_was_freed_between_its_two_accesses(freed):
    """A block that is given back later has not made it a matter of lifetimes."""
    free, alloc = TensorFree(OpId(2), HOST, 2, 11), TensorAlloc(OpId(3), HOST, 3, 12, 7, FILLS)
    write = Kernel(OpId(4), HOST, 4, FILLS, 0, 2, 0, (0, 1), buffer(Mode.WRITE))
    records: list[AnyRecord] = [
        TensorAlloc(OpId(0), HOST, 0, 11, 7, ROUNDS),
        Kernel(OpId(1), HOST, 1, ROUNDS, 0, 1, 0, (0, 1), buffer(Mode.READ)),
        *([free, alloc, write] if freed == "before" else [write, free, alloc]),
    ]
    (finding,) = analyse(records).findings
    assert finding.hazard is (Hazard.LIFETIME if freed == "before" else Hazard.METADATA_WAR)


@pytest.mark.parametrize("replayed", [True, False])
def test_a_fence_in_front_of_a_replay_protects_its_entries(replayed):
    """It is not the one that the later write lacks; a fence with nothing behind it is."""
    others = StreamId(3)
    replay = [
        GraphReplay(OpId(2), HOST, 0, 1, others, 0, 1, 1, (0, 1), ()),
        GraphNode(OpId(3), HOST, 0, 0, IN_ORDER, None, (0, 1), buffer(Mode.READ)),
    ]
    records: list[AnyRecord] = [
        Kernel(OpId(0), HOST, 0, ROUNDS, 0, 1, 0, (0, 1), buffer(Mode.READ)),
        WaitStream(OpId(1), HOST, 0, others, ROUNDS),
        *(replay if replayed else []),
        Kernel(OpId(4), HOST, 1, FILLS, 0, 2, 0, (0, 1), buffer(Mode.WRITE)),
    ]
    found = {finding.earlier.op: finding.cause for finding in analyse(records).findings}
    assert found[OpId(0)] is (Cause.MISSING_FENCE if replayed else Cause.WRONG_STREAM)
