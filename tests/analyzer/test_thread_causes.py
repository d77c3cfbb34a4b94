"""Races of two host threads: which of them did not learn what the other one knows, in data and in words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer, explain
from hicache_obs.findings import Cause, Finding
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.testing import RecordingSink

Step = dict[str, Any]


def findings(steps: list[Step]) -> list[Finding]:
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(parse_scenario(json.dumps({"steps": numbered}).encode(), source="test"))
    analyzer.finish()
    return sink.findings


SAVE = {"op": "memcpy", "kind": "d2h", "stream": "w", "device_pages": [5], "host_pages": [1]}
RECORD = {"op": "event_record", "event": "e", "stream": "w"}
SYNC = {"op": "event_sync", "event": "e"}
QUERY = {"op": "event_query", "event": "e", "result": True}
DRAIN = {"op": "host_sync", "scope": "stream", "stream": "w"}
ALL = {"op": "host_sync", "scope": "device"}
PUT = {"op": "io_begin", "io": "put", "kind": "storage_write", "reads_host": [1], "thread": "t"}
GET = {"op": "io_begin", "io": "get", "kind": "storage_read", "writes_host": [1], "thread": "t"}
GOT = {"op": "io_end", "io": "get", "thread": "t"}
LOAD = {"op": "memcpy", "kind": "h2d", "stream": "l", "device_pages": [6], "host_pages": [1]}
FILL = {"op": "host_access", "writes_buf": ["b"]}
USE = {"op": "host_access", "reads_buf": ["b"], "thread": "t"}
OTHER = {"op": "event_record", "event": "e", "stream": "x"}
FREED = {"op": "free", "pool": "host", "pages": [1], "owner": "A"}
ROUND = {"op": "kernel", "stream": "f", "writes": [6]}
OVER = {"op": "memcpy", "kind": "h2d", "stream": "l", "device_pages": [6], "host_pages": [9]}


def told(first: str, second: str) -> list[Step]:
    return [{"op": "thread_post", "chan": "q", "thread": first}, {"op": "thread_recv", "chan": "q", "thread": second}]


@pytest.mark.parametrize(
    ("steps", "cause"),
    [
        ([FILL, USE], Cause.THREAD_RACE),
        ([FILL, *told("main", "t"), USE], None),
        ([*told("main", "t"), FILL, USE], Cause.THREAD_RACE),
        ([GET, GOT, LOAD], Cause.THREAD_RACE),
        ([GET, GOT, *told("t", "main"), LOAD], None),
        ([GET, {**LOAD, "thread": "t"}], Cause.MISSING_FENCE),  # its own transfer has not ended
        ([GET, GOT, {**LOAD, "thread": "t"}], None),
        ([SAVE, PUT], Cause.MISSING_FENCE),
        ([SAVE, RECORD, SYNC, PUT], Cause.WRONG_THREAD),
        ([SAVE, RECORD, SYNC, *told("main", "t"), PUT], None),
        ([SAVE, RECORD, {**SYNC, "thread": "t"}, PUT], None),
        ([SAVE, DRAIN, PUT], Cause.WRONG_THREAD),
        ([SAVE, ALL, PUT], Cause.WRONG_THREAD),
        ([SAVE, ALL, {**LOAD, "thread": "t"}], Cause.WRONG_THREAD),
        ([SAVE, RECORD, QUERY, PUT], Cause.WRONG_THREAD),  # however it learned
        ([SAVE, RECORD, {**QUERY, "result": False}, PUT], Cause.MISSING_FENCE),
        ([SAVE, RECORD, QUERY, LOAD], None),
        ([SAVE, QUERY, LOAD], Cause.EVENT_UNRECORDED),
        ([SAVE, RECORD, OTHER, QUERY, LOAD], Cause.EVENT_REUSE),
        ([RECORD, SAVE, QUERY, LOAD], Cause.EARLY_EVENT),
        ([RECORD, SAVE, QUERY, FREED, LOAD], Cause.EARLY_EVENT),  # it waited, for the wrong record
        ([SAVE, FREED, LOAD], Cause.EARLY_FREE),
        ([SAVE, RECORD, {**SYNC, "thread": "t"}, FREED, LOAD], Cause.EARLY_FREE),  # who gave it away did not look
        ([ROUND, SYNC, OVER], Cause.EVENT_UNRECORDED),
        ([ROUND, QUERY, OVER], Cause.MISSING_FENCE),  # is the event free to be used?
        ([ROUND, {**RECORD, "stream": "f"}, OTHER, SYNC, OVER], Cause.EVENT_REUSE),
        ([{**RECORD, "stream": "f"}, ROUND, SYNC, OVER], Cause.MISSING_FENCE),  # results of the round before
        ([ROUND, {**RECORD, "stream": "f"}, SYNC, OVER], None),
        ([DRAIN, SAVE, PUT], Cause.MISSING_FENCE),  # a wait from before was meant for something else
        ([RECORD, SAVE, SYNC, PUT], Cause.MISSING_FENCE),  # neither thread waited for it
        ([RECORD, SAVE, {**SYNC, "thread": "t"}, PUT], Cause.EARLY_EVENT),
        ([SAVE, {**SYNC, "thread": "t"}, PUT], Cause.EVENT_UNRECORDED),
        ([SAVE, SYNC, PUT], Cause.MISSING_FENCE),
        ([SAVE, RECORD, OTHER, {**SYNC, "thread": "t"}, PUT], Cause.EVENT_REUSE),
        ([SAVE, RECORD, OTHER, SYNC, PUT], Cause.MISSING_FENCE),
        ([SAVE, OTHER, {**SYNC, "thread": "t"}, PUT], Cause.MISSING_FENCE),  # its own wait, for something else
        ([SAVE, {**DRAIN, "stream": "x", "thread": "t"}, PUT], Cause.WRONG_STREAM),
        ([RECORD, SAVE, {**SYNC, "thread": "t"}, {**LOAD, "thread": "t"}], Cause.EARLY_EVENT),
        ([RECORD, SAVE, {**SYNC, "thread": "t"}, LOAD], Cause.MISSING_FENCE),
    ],
)
def test_cause(steps: list[Step], cause: Cause | None) -> None:
    races = [finding.cause for finding in findings(steps) if not finding.misuse]
    assert races == ([] if cause is None else [cause])


@pytest.mark.parametrize(
    ("steps", "proof", "fix"),
    [
        (
            [FILL, USE],
            "nothing makes 't' wait for 'main' up to op 1 before op 2; the thread that issued op 2 was not told that "
            "op 1 was over",
            "before op 2 is issued: its thread has to learn from 'main' that op 1 is over",
        ),
        (
            [SAVE, DRAIN, PUT],
            "nothing makes 't' wait for 'w' up to op 1 before op 3; another host thread did wait for op 1, but not "
            "the one that issued op 3",
            "before op 3 is issued: its thread has to wait itself, or to be told by the one that did",
        ),
        (
            [GET, {**LOAD, "thread": "t"}],
            "nothing makes 'l' wait for 't' up to op 1 before op 2",
            "before op 2 is issued: wait for the end of op 1",
        ),
    ],
)
def test_text(steps: list[Step], proof: str, fix: str) -> None:
    (finding,) = findings(steps)
    lines = [" ".join(line.split()) for line in explain(finding).splitlines()]
    assert f"proof {proof}" in lines
    assert f"fix {fix}" in lines


REPLAY = {"op": "graph_replay", "stream": "f", "graph": "g"}
TOP, LAST, MARK = {"writes": [4]}, {"writes": [5]}, {"event_record": "e"}
BACKUP = {"op": "memcpy", "kind": "d2h", "stream": "w", "device_pages": [5], "host_pages": [1]}


@pytest.mark.parametrize(
    ("nodes", "wait", "cause"),
    [
        ([TOP, MARK, LAST], {"op": "event_wait", "event": "e", "stream": "w"}, Cause.EARLY_EVENT),
        ([TOP, MARK, LAST], SYNC, Cause.MISSING_FENCE),  # results of an earlier entry
        ([TOP, {**LAST, "after": []}, {**MARK, "after": [0]}], {**SYNC, "op": "event_wait", "stream": "w"}, None),
        ([TOP, LAST, MARK], SYNC, None),
        ([TOP, LAST, MARK], {"op": "event_wait", "event": "e", "stream": "w"}, None),
    ],
)
def test_records_by_entries_of_a_graph(nodes: list[Step], wait: Step, cause: Cause | None) -> None:
    """Too early is one ahead of what it should cover, not one in another branch."""
    steps = [{**REPLAY, "nodes": nodes}, wait, BACKUP]
    branch = "after" in nodes[1]
    expected = [Cause.MISSING_FENCE] if branch else [] if cause is None else [cause]
    assert [finding.cause for finding in findings(steps)] == expected
    other = [{**REPLAY, "graph": "h", "nodes": [MARK]}, {**REPLAY, "nodes": [TOP, LAST]}, wait, BACKUP]
    assert [finding.cause for finding in findings(other)] == [Cause.MISSING_FENCE]


@pytest.mark.parametrize(
    ("move", "cause"),
    [
        ([[4, 5]], Cause.MISSING_FENCE),  # to where another one is reading
        ([[5, 4]], Cause.STALE_ADDRESS),
        ([[7, 5], [5, 4]], Cause.STALE_ADDRESS),
        ([[7, 8]], None),
    ],
)
def test_only_the_old_address_is_stale(move: list[list[int]], cause: Cause | None) -> None:
    moved, use = {"op": "relocate", "stream": "f", "moves": move}, {"op": "kernel", "stream": "x", "writes": [5]}
    for steps in ([moved, use], [use, moved]):
        found = findings(steps)
        assert [finding.cause for finding in found] == ([] if cause is None else [cause])
        assert all(finding.hazard.value == "relocation" for finding in found)
    assert findings([moved, {"op": "wait_stream", "waiter": "x", "on": "f"}, use]) == []


def transfer(kernel: bool, kind: str, stream: str) -> Step:
    """A copy between device page 5 and host page 1."""
    if not kernel:
        return {"op": "memcpy", "kind": kind, "stream": stream, "device_pages": [5], "host_pages": [1]}
    ends = {"h2d": {"reads_host": [1], "writes": [5]}, "d2h": {"reads": [5], "writes_host": [1]}}
    return {"op": "kernel", "stream": stream, **ends[kind]}


GIVEN = [{"op": op, "pool": "device", "pages": [5], "owner": owner} for op, owner in (("free", "A"), ("alloc", "B"))]
FORWARD = {"op": "kernel", "stream": "f", "reads": [3], "writes": [5]}


@pytest.mark.parametrize("kernel", [False, True])
def test_a_copy_is_named_alike_whoever_makes_it(kernel: bool) -> None:
    for steps, name in (
        ([FORWARD, transfer(kernel, "h2d", "l")], ("waw_forward_restore", Cause.MISSING_FENCE)),
        ([transfer(kernel, "h2d", "l"), {**REPLAY, "reads": [5]}], ("graph", Cause.GRAPH_SKIPS_WAIT)),
        ([transfer(kernel, "d2h", "w"), *GIVEN, FORWARD], ("war_backup_forward", Cause.EARLY_FREE)),
        ([transfer(kernel, "d2h", "f"), *GIVEN, FORWARD], None),
    ):
        found = [(finding.hazard.value, finding.cause) for finding in findings(steps)]
        assert found == ([] if name is None else [name])


FENCED = {"op": "wait_stream", "waiter": "x", "on": "f"}


@pytest.mark.parametrize(
    ("behind", "cause"),
    [
        ([], Cause.WRONG_STREAM),
        ([{**RECORD, "stream": "x"}], Cause.WRONG_STREAM),  # protects nothing
        ([{**FORWARD, "stream": "x", "writes": [8]}], Cause.MISSING_FENCE),
        ([{**REPLAY, "stream": "x", "writes": [8]}], Cause.MISSING_FENCE),
        ([{**REPLAY, "stream": "x", "nodes": [{"writes": [8]}, {"writes": [9]}]}], Cause.MISSING_FENCE),
    ],
)
def test_a_fence_of_another_stream_that_is_used_later(behind: list[Step], cause: Cause) -> None:
    """It was meant for what runs behind it, and the racing copy has none."""
    (finding,) = findings([FORWARD, FENCED, transfer(False, "h2d", "l"), *behind])
    assert (finding.cause, finding.wrong_waiter) == (cause, "x" if cause is Cause.WRONG_STREAM else None)
    before = [FORWARD, {**REPLAY, "stream": "x", "nodes": [{"writes": [9]}]}, FENCED, transfer(False, "h2d", "l")]
    assert [finding.cause for finding in findings(before)] == [Cause.WRONG_STREAM]
