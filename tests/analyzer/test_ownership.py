"""Ownership epochs: what is used after it was freed or read before it was written, and the twins that are neither."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer, check, explain, ownership, shadow
from hicache_obs.cli import main
from hicache_obs.findings import Cause, Hazard, Proof, Timing, Verdict, fingerprint
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import (
    Kernel,
    Mode,
    OpId,
    PageFree,
    StreamId,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    device,
    page_ids,
)
from hicache_obs.testing import History, RecordingSink, misuses
from hicache_obs.trace import Trace

USED, UNWRITTEN = Cause.USED_AFTER_FREE, Cause.NEVER_WRITTEN
Step = dict[str, Any]


def analyse(records: Any) -> RecordingSink:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return sink


def causes(text: str) -> list[Cause]:
    """Causes of all misuses in a history; brute force agrees on their pairs, unless records were lost."""
    records = History(text).records
    sink = analyse(records)
    assert "~" in text or set(sink.misuses) == misuses(records)
    return [finding.cause for finding in sink.findings if finding.misuse]


def scenario(*steps: Step) -> bytes:
    """Steps ``s1``, ``s2``, …"""
    return json.dumps({"steps": [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]}).encode()


def told(*steps: Step) -> list[tuple[str, str]]:
    """Step ids of all misuses."""
    trace: Trace = parse_scenario(scenario(*steps), source="test")
    found = [(trace.label(call), trace.label(op)) for call, op in analyse(trace).misuses]
    assert set(found) == {(trace.label(call), trace.label(op)) for call, op in misuses(list(trace))}
    return found


def call(op: str, page: int = 5, owner: str = "", pool: str = "device", **keys: Any) -> Step:
    return {"op": op, "pool": pool, "pages": [page], "owner": owner, **keys}


def kernel(**keys: Any) -> Step:
    return {"op": "kernel", "stream": "a", **keys}


@pytest.mark.parametrize(
    ("wrong", "right", "cause"),
    [
        ("h+5 F:w5 h-5 F:w5", "h+5 F:w5 F:w5 h-5", USED),
        ("h+5 F:w5 h-5 F:r5", "h+5 F:w5 h-5 h+5 F:w5", USED),
        ("h+5 F:w5 h-5 B:r5W1", "h+5 F:w5 h-5 B:r6W1", USED),
        ("h-5 F:w5", "F:w5", USED),  # a free tells enough; without one nothing is known
        ("h+5 h-5 F:w5", "h+5 h-5 h+5 F:w5", USED),
        ("h+5,6 h-6 F:w5,6", "h+5,6 h-6 F:w5", USED),
        ("h+5 F:r5", "h+5 F:w5 F:r5", UNWRITTEN),
        ("h+5 F:r5", "h+5 F:r5w5", UNWRITTEN),  # an operation may read what it writes itself
        ("h+5 F:r5", "h+5 L:R1w5 F<L F:r5", UNWRITTEN),
        ("h+5 B:r5W1", "h+5 F:w5 B<F B:r5W1", UNWRITTEN),
        ("h+5 F:r5", "F:r5", UNWRITTEN),  # a trace that begins in the middle says nothing of what is there
        ("h+5 F:r5", "F:w5 h+5 F:r5", UNWRITTEN),  # changes hands, contents and all
        ("h+5 F:w5 h-5 h+5 F:r5", "h+5 F:w5 h+5 F:r5", UNWRITTEN),
        ("h+5 F:w5 h-5 F:w5", "h+5 F:w5 h-5 ~1 F:w5", USED),  # it may have been given out again
        ("h+5 F:r5", "h+5 ~1 F:r5", UNWRITTEN),
        ("h+5 F:r5", "~1 h+5 F:r5", UNWRITTEN),  # it may have been held before
        ("h-5 F:w5", "~1 h-5 F:w5", USED),  # others may hold it too
        ("~1 h+5 h-5 F:w5", "~1 h+5 h-5 h+5 F:w5", USED),
    ],
)
def test_pair(wrong: str, right: str, cause: Cause) -> None:
    assert causes(wrong) == [cause]
    assert causes(right) == []


def test_an_operation_in_flight_at_the_free_is_a_matter_of_order() -> None:
    """The race this project began with is no misuse: the round was issued before its pages were given away."""
    sink = analyse(History("h+5 F:w5 h-5 h+5 L:R1w5").records)

    assert sink.misuses == []
    assert [finding.hazard for finding in sink.findings] == [Hazard.WAW_FORWARD_RESTORE]


def test_each_page_is_reported_once_per_epoch() -> None:
    assert causes("h+5,6 F:w5,6 h-5,6 F:w5 F:w5 F:w6") == [USED, USED]
    assert causes("h+5 F:w5 h-5 F:w5 h+5 h-5 F:w5") == [USED, USED]
    assert causes("h+5,6 F:r5 F:r5 F:r5,6") == [UNWRITTEN, UNWRITTEN]
    assert causes("h+5 h-5 F:w5 h+5 F:r5") == [USED, UNWRITTEN]  # a write after the free is nothing the next owner has


def test_layers_of_one_transfer_are_judged_again_after_a_free() -> None:
    """They are one group in the history; the free between them counts all the same."""
    assert causes("h+5 L:w5@0 L:w5@1 L:w5@2") == []
    assert causes("h+5 L:w5@0 L:w5@1 h-5 L:w5@2") == [USED]
    assert causes("h+5 L:w5@0 h-5 h+5 L:w5@1 F<L F:r5") == []  # the next layer writes for the new owner
    assert causes("h+5 L:w5@0 h-5 h+5 F<L F:r5") == [UNWRITTEN]
    assert causes("h+5 F:r5w5@0 h-5 h+5 F:r5w5@1") == []  # what it reads it writes itself
    assert causes("h+5 F:r5@0 h-5 h+5 F:r5@1") == [UNWRITTEN, UNWRITTEN]


def test_a_layer_is_judged_by_what_its_own_thread_was_told() -> None:
    """The layer before, of another thread or earlier, may have been as good as its thread knew."""
    accesses = (device(Mode.WRITE, page_ids([5])),)
    threads = ThreadId(0), ThreadId(1)

    def layer(op: int, thread: ThreadId) -> Kernel:
        return Kernel(OpId(op), thread, 0, StreamId(1), 0, 1, 0, (op, op + 1), accesses)

    free = PageFree(OpId(0), threads[1], 0, 0, accesses[0])
    post, receive = ThreadPost(OpId(2), threads[1], 0, 1), ThreadRecv(OpId(3), threads[0], 0, 1)
    for records in ([free, layer(1, threads[0]), post, receive, layer(4, threads[0])], [free, layer(1, threads[0])]):
        assert analyse(records).misuses == sorted(misuses(records))
    assert analyse([free, layer(1, threads[0]), post, receive, layer(4, threads[0])]).misuses == [(0, 4)]


def test_pages_are_looked_up_once_per_transfer() -> None:
    """Not once per layer, unless an allocator was called in between."""
    assert analyse(History("h+5 F:w5 L<F L:w5@0 L:w5@1 L:w5@2").records).checked[Hazard.LIFETIME] == 2
    assert analyse(History("h+5 F:w5 L<F L:w5@0 h+6 L:w5@1 L:w5@2").records).checked[Hazard.LIFETIME] == 3


def test_pages_of_different_calls_are_findings_of_their_own() -> None:
    sink = analyse(History("h+1,2 h+3 F:r1,2,3").records)

    assert sink.misuses == [(0, 2), (1, 2)]
    assert [finding.pages for finding in sink.findings] == [(1, 2), (3,)]


def test_another_thread_must_have_been_told() -> None:
    """Later in the file proves nothing between threads; a hand-over does."""
    free, use = call("free", thread="t"), kernel(writes=[5])
    post, recv = {"op": "thread_post", "chan": "q", "thread": "t"}, {"op": "thread_recv", "chan": "q"}

    assert told(free, use) == []
    assert told(free, post, recv, use) == [("s1", "s4")]
    assert told(post, free, recv, use) == []


def test_another_thread_may_have_learned_from_the_device() -> None:
    """What a thread issued after the free is over, and the other thread saw that."""
    free, work = call("free", thread="t"), kernel(writes=[9], thread="t")
    mark, use = {"op": "event_record", "event": "e", "stream": "a", "thread": "t"}, kernel(writes=[5])

    assert told(free, work, mark, {"op": "event_query", "event": "e", "result": True}, use) == [("s1", "s5")]
    assert told(free, work, mark, {"op": "event_query", "event": "e", "result": False}, use) == []


def test_a_shared_page_is_free_when_its_last_owner_says_so() -> None:
    give, use = call("alloc", owner="A"), kernel(writes=[5])

    assert told(give, use, call("alloc", owner="B"), call("free", owner="A"), use) == []
    assert told(give, use, call("alloc", owner="B"), call("free", owner="B"), use) == [("s4", "s5")]
    assert told(give, use, call("free", owner="evictor"), use) == [("s3", "s4")]


def test_whoever_moves_pages_keeps_books_of_their_own() -> None:
    """The target of a move may come from a list that no allocator call shows; its contents are there afterwards."""
    move = {"op": "relocate", "stream": "a", "moves": [[7, 5]]}

    assert told(call("free"), move, kernel(reads=[5])) == []
    assert told(call("alloc"), move, kernel(reads=[5])) == []
    assert told(call("alloc", 7), move) == []  # who moves a page that nobody has written need not know
    assert told(call("free", 7), move) == [("s1", "s2")]
    reported = call("free"), kernel(writes=[5])
    assert told(*reported, move, call("alloc"), kernel(reads=[5])) == [("s1", "s2")]
    assert told(*reported, call("alloc"), kernel(reads=[5])) == [("s1", "s2"), ("s3", "s4")]


def test_host_pages_and_transfers_in_no_stream() -> None:
    put = {"op": "io_begin", "io": "p", "kind": "storage_write", "reads_host": [5]}
    save = {"op": "memcpy", "kind": "d2h", "stream": "a", "device_pages": [1], "host_pages": [5]}
    sync = {"op": "host_sync", "scope": "device"}

    assert told(call("alloc", pool="host"), put) == [("s1", "s2")]
    assert told(call("alloc", pool="host"), save, sync, put) == []
    assert told(call("alloc"), put) == []  # a device page of that number
    assert told(call("free", pool="host"), {"op": "host_access", "writes_host": [5]}) == [("s1", "s2")]


def test_entries_of_a_graph_are_judged_as_one_step() -> None:
    nodes = [{"writes": [5]}, {"reads": [5]}]
    replay = {"op": "graph_replay", "graph": "g", "stream": "a"}

    assert told(call("alloc"), {**replay, "nodes": nodes}) == []
    assert told(call("alloc"), {**replay, "nodes": nodes[1:]}) == [("s1", "s2")]
    assert told(call("free"), {**replay, "nodes": nodes}) == [("s1", "s2")]


def test_calls_that_are_too_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then nothing is said of their pages."""
    monkeypatch.setattr(ownership, "MAX_CHANGES", 2)

    assert causes("h-5 h-6 F:w5,6") == [USED, USED]
    assert analyse(History("h-5 h-6 h-7 F:w5,6").records).misuses == [(1, 3)]


@pytest.mark.parametrize("between", ["", " F:w7"])
def test_a_use_after_a_forgotten_call_is_not_held_against_a_later_one(
    between: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The page changes hands, read or not: what its first reader missed is said once, or not at all."""
    text = f"h+5 h+6 F:r5{between} h+5 F:r5"
    assert causes(text) == [UNWRITTEN]

    monkeypatch.setattr(ownership, "MAX_CHANGES", 1)
    assert analyse(History(text).records).misuses == []


def test_the_finding() -> None:
    """A violation in every execution, with the call on one side and the access on the other."""
    (finding,) = analyse(History("h+5 F:w5 h-5 L:R1w5").records).findings[:1]

    assert (finding.hazard, finding.verdict) == (Hazard.LIFETIME, Verdict.VIOLATION)
    assert (finding.earlier.what, finding.later.what, finding.later.mode) == ("free", "restore", "write")
    assert (finding.earlier.stream, finding.earlier.group) == (None, 0)
    assert (finding.timing, finding.coarse) == (Timing.UNTIMED, False)
    edge = finding.missing_edge
    name = fingerprint(Hazard.LIFETIME, "used_after_free", "L work", edge.on, edge.waiter, "")
    assert finding.fingerprint == name
    assert explain(finding) == (
        f"{finding.fingerprint}  VIOLATION  lifetime\n"
        "\n"
        "An operation was issued on pages that had been given away: whoever gets them next shares them with it.\n"
        "\n"
        "  device page 5\n"
        "  given away by host thread 0, op 2\n"
        "  then     restore transfer 3 writes them on stream 'L', op 3 (L work)\n"
        "  proof    op 3 was issued after op 2, whatever the device does\n"
        "  fix      give the pages away after op 3 is issued, or leave them out of it"
    )


def test_reading_what_nothing_wrote_has_words_of_its_own() -> None:
    (finding,) = analyse(History("h+5 F:r5").records).findings
    text = explain(finding)

    assert (finding.proof, finding.verdict) == (Proof.ORDERED, Verdict.VIOLATION)  # of host calls, in every execution
    assert "Nothing has written these pages since they were given out" in text
    assert "  given out  by host thread 0, op 0" in text
    assert "fill the pages before op 1" in text


def test_check_lists_misuses_apart_from_races(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A race is two accesses without an order; this is neither."""
    path = tmp_path / "used.json"
    path.write_bytes(scenario(call("alloc"), kernel(writes=[5]), call("free"), kernel(writes=[5])))

    assert main(["check", "--json", str(path)]) == 1
    report = json.loads(capsys.readouterr().out)
    (misuse,) = report["ownership"]
    assert report["outcome"] == "findings"
    assert report["races"] == []
    assert (misuse["class"], misuse["cause"], misuse["between"]) == ("lifetime", "used_after_free", ["s3", "s4"])
    assert (misuse["pages"], misuse["host_pages"], misuse["verdict"]) == ([5], [], "violation")

    assert main(["check", str(path)]) == 1
    assert "given away by host thread 0, op 3" in capsys.readouterr().out


def test_owners_are_known_after_the_numbers_were_made_small_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups and allocator calls are renumbered from time to time: the newest half keeps what it is known for."""
    monkeypatch.setattr(shadow, "MAX_NUMBER", 40)
    monkeypatch.setattr(check, "PRUNE_EVERY", 4)
    for freed in range(85, 100, 3):
        work = ["F:w9"] * 100
        work.insert(freed, "h+5 F:w5 h-5")
        assert causes(" ".join([*work, "F:w5"])) == [USED]
        assert causes(" ".join([*work, "h+5 F:w5"])) == []
        assert causes(" ".join([*work, "h+5 F:r5w7"])) == [UNWRITTEN]
