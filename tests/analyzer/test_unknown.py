"""What nobody can tell from one trace: shared events and memory, early launches. Each with the twin that is decided."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer, early, explain
from hicache_obs.cli import main
from hicache_obs.findings import Cause, Proof, Verdict
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import NO_OP, DropReason, Lost, ThreadId, Times
from hicache_obs.testing import History, RecordingSink
from hicache_obs.trace import Trace

Step = dict[str, Any]
SHARED = {"events": ["e"]}


def trace_of(*steps: Step, **top: Any) -> Trace:
    """Steps ``s1``, ``s2``, …"""
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    return parse_scenario(json.dumps({"steps": numbered, **top}).encode(), source="test")


def analyse(trace: Trace, *more: Any) -> RecordingSink:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace)
    analyzer.feed(more)
    analyzer.finish()
    return sink


def found(*steps: Step, **top: Any) -> list[tuple[str, str, Proof, Cause]]:
    trace = trace_of(*steps, **top)
    return [(trace.label(f.earlier.op), trace.label(f.later.op), f.proof, f.cause) for f in analyse(trace).findings]


def kernel(stream: str = "a", **keys: Any) -> Step:
    return {"op": "kernel", "stream": stream, **keys}


def early_kernel(**keys: Any) -> Step:
    return kernel(name="early", **keys)


RECORD = {"op": "event_record", "event": "e", "stream": "a"}
WAIT = {"op": "event_wait", "event": "e", "stream": "b"}
SYNC = {"op": "event_sync", "event": "e"}
WRITE, LOAD = kernel(writes=[5]), kernel("b", writes=[5])


@pytest.mark.parametrize("wait", [WAIT, SYNC, {"op": "event_query", "event": "e", "result": True}])
def test_a_wait_for_a_shared_event_proves_nothing_and_refutes_nothing(wait: Step) -> None:
    """It may be another process's record, which may follow anything so far: also if nobody here recorded it."""
    unknown = [("s1", "s4", Proof.UNKNOWN, Cause.SHARED_EVENT)]

    assert found(WRITE, RECORD, wait, LOAD, shared=SHARED) == unknown
    assert found(WRITE, RECORD, wait, LOAD) == []
    assert found(WRITE, kernel("c"), wait, LOAD, shared=SHARED) == unknown
    assert [proof for _, _, proof, _ in found(WRITE, kernel("c"), wait, LOAD)] == [Proof.NONE]


def test_only_what_came_before_the_wait_is_in_doubt() -> None:
    assert found(RECORD, WAIT, WRITE, LOAD, shared=SHARED) == [("s3", "s4", Proof.NONE, Cause.MISSING_FENCE)]


def test_an_order_of_its_own_stays_proven() -> None:
    fence = {"op": "wait_stream", "waiter": "b", "on": "a"}

    assert found(WRITE, fence, RECORD, WAIT, LOAD, shared=SHARED) == []
    assert found(WRITE, RECORD, WAIT, LOAD, shared={"events": ["other"]}) == []
    assert found(WRITE, RECORD, SYNC, LOAD, shared={"events": ["other"]}) == []


def test_shared_memory_makes_races_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And a trace without any is not clean: the other process's accesses are not in it."""
    fence = {"op": "wait_stream", "waiter": "b", "on": "a"}
    shared = {"pools": ["kv"]}
    assert found(WRITE, LOAD, shared=shared) == [("s1", "s2", Proof.UNKNOWN, Cause.SHARED_MEMORY)]
    assert [proof for _, _, proof, _ in found(WRITE, LOAD, shared={"pools": ["other", "host"]})] == [Proof.NONE]
    assert found(WRITE, fence, LOAD, shared=shared) == []

    path = tmp_path / "shared.json"
    pages, buffers = (WRITE, LOAD), (kernel(writes_buf=["x"]), kernel("b", writes_buf=["x"]))
    for (first, second), sharing, code, outcome in [
        (pages, shared, 3, "unknown"), (pages, {}, 0, "clean"), (pages, {"pools": ["other"]}, 0, "clean"),
        (buffers, {"buffers": ["x"]}, 3, "unknown"), (buffers, {"buffers": ["y"]}, 0, "clean"),
    ]:  # fmt: skip
        steps = [{"id": f"s{number}", **step} for number, step in enumerate((first, fence, second), 1)]
        path.write_text(json.dumps({"steps": steps, "shared": sharing}))
        assert main(["check", "--json", str(path)]) == code
        report = json.loads(capsys.readouterr().out)
        assert report["outcome"] == outcome
        assert any("another process" in note for note in report["notes"]) == (code == 3)


def test_private_pages_have_nothing_to_do_with_buffers_of_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither are they shared because a buffer is, nor do they hide that it is."""
    pages = list(range(8))
    for more, code in (({}, 0), ({"reads_buf": ["x"]}, 3)):
        steps = [{"id": "s1", **kernel(writes=pages)}, {"id": "s2", **kernel(reads=pages, **more)}]
        path = tmp_path / "buffer.json"
        path.write_text(json.dumps({"steps": steps, "shared": {"buffers": ["x"]}}))
        assert main(["check", "--json", str(path)]) == code
        capsys.readouterr()


def test_how_much_shared_memory_is_touched_is_counted() -> None:
    analyzer = Analyzer(RecordingSink())
    analyzer.feed(trace_of(kernel(writes=[5, 6]), kernel(reads=[6]), shared={"pools": ["kv"]}))
    assert analyzer.totals.shared == 3


def test_shared_host_pages_and_buffers() -> None:
    host = kernel(writes_host=[1]), kernel("b", writes_host=[1])
    buffers = kernel(writes_buf=["x"]), kernel("b", writes_buf=["x"])
    causes = [Cause.SHARED_MEMORY]

    assert [cause for *_, cause in found(*host, shared={"pools": ["host"]})] == causes
    assert [cause for *_, cause in found(*host, shared={"pools": ["kv"]})] == [Cause.MISSING_FENCE]
    assert [cause for *_, cause in found(*buffers, shared={"buffers": ["x"]})] == causes
    assert [cause for *_, cause in found(*buffers, shared={"buffers": ["y"]})] == [Cause.MISSING_FENCE]


def test_a_pair_that_also_shares_private_memory_is_a_race() -> None:
    both = {"writes": [5], "writes_buf": ["x"]}

    assert [proof for _, _, proof, _ in found(kernel(**both), kernel("b", **both), shared={"pools": ["kv"]})] == [
        Proof.NONE
    ]


def test_recorded_and_measured_broken_is_a_violation_all_the_same() -> None:
    trace = trace_of(WRITE, LOAD, shared={"pools": ["kv"]})
    times = [Times(op, ThreadId(0), 0, *span) for op, span in zip((1, 2), ((0, 100), (50, 150)), strict=True)]

    assert [finding.verdict for finding in analyse(trace, *times).findings] == [Verdict.VIOLATION]
    assert [finding.verdict for finding in analyse(trace).findings] == [Verdict.UNKNOWN]


def test_a_kernel_that_may_start_early_is_in_doubt_with_the_one_before_it() -> None:
    read = early_kernel(reads=[5])

    assert found(WRITE, read, early=["early"]) == [("s1", "s2", Proof.UNKNOWN, Cause.EARLY_START)]
    assert found(WRITE, read) == []
    assert found(early_kernel(writes=[5]), kernel(reads=[5]), early=["early"]) == []  # the second starts in order


@pytest.mark.parametrize(
    "between",
    [
        RECORD,
        {"op": "event_wait", "event": "e", "stream": "a"},
        {"op": "wait_stream", "waiter": "a", "on": "b"},
        {"op": "wait_stream", "waiter": "b", "on": "a"},
        {"op": "memcpy", "kind": "h2d", "stream": "a", "device_pages": [9], "host_pages": [1]},
        {"op": "graph_replay", "graph": "g", "stream": "a"},
        kernel(writes=[9]),
    ],
)
def test_anything_between_the_two_ends_the_doubt(between: Step) -> None:
    """Only a kernel right behind another may start early, and behind the kernel between, ``s1`` is over."""
    assert found(WRITE, between, early_kernel(reads=[5]), early=["early"]) == []


def test_only_kernels_start_early() -> None:
    """A copy of the same name does not."""
    copy = {"op": "memcpy", "kind": "d2h", "stream": "a", "name": "early", "device_pages": [5], "host_pages": [1]}

    assert found(WRITE, copy, early=["early"]) == []
    assert len(found(WRITE, early_kernel(reads=[5]), early=["early"])) == 1


def test_a_chain_of_early_kernels() -> None:
    """Each is in doubt with all before it in the chain; what the chain followed, and what follows it, is not."""
    chain = [early_kernel(writes=[5], reads=[9]), early_kernel(reads=[5])]
    doubts = found(kernel(writes=[9]), kernel(writes=[5]), *chain, kernel(reads=[5]), early=["early"])

    assert [pair[:2] for pair in doubts] == [("s2", "s3"), ("s2", "s4"), ("s3", "s4")]


def test_other_streams_are_ordered_with_a_chain_as_with_any_work() -> None:
    fence, load = {"op": "wait_stream", "waiter": "a", "on": "b"}, kernel("b", writes=[5])
    back = {"op": "wait_stream", "waiter": "b", "on": "a"}
    tops = {"early": ["early"]}

    assert found(load, fence, kernel(), early_kernel(reads=[5]), **tops) == []
    assert [pair[2] for pair in found(load, kernel(), early_kernel(reads=[5]), **tops)] == [Proof.NONE]
    assert found(kernel(), early_kernel(reads=[5]), back, load, **tops) == []
    assert [pair[2] for pair in found(kernel(), early_kernel(reads=[5]), load, **tops)] == [Proof.NONE]


def test_an_early_kernel_of_a_blocking_stream_still_waits_for_the_legacy_stream() -> None:
    streams = {"a": {"kind": "blocking"}, "legacy": {"kind": "legacy"}}
    steps = kernel(writes=[9]), kernel("legacy", writes=[5]), early_kernel(reads=[5])

    assert found(*steps, streams=streams, early=["early"]) == []
    assert [pair[2] for pair in found(*steps, early=["early"])] == [Proof.NONE]


def test_the_thread_that_launches_it_has_seen_what_it_has_seen() -> None:
    sync = {"op": "host_sync", "scope": "stream", "stream": "b"}

    assert found(LOAD, kernel(), sync, early_kernel(reads=[5]), early=["early"]) == []
    assert len(found(LOAD, kernel(), early_kernel(reads=[5]), early=["early"])) == 1


def test_a_long_chain_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated bound: so many in flight together, then the next begins behind all of them."""
    monkeypatch.setattr(early, "MAX_CHAIN", 2)
    chain = [early_kernel(reads=[5])] * 4

    assert [pair[:2] for pair in found(WRITE, *chain, early=["early"])] == [("s1", "s2"), ("s1", "s3")]


def test_a_loss_leaves_a_chain_in_doubt() -> None:
    """What was lost may have ended it, or not: never ordered."""
    trace = trace_of(WRITE, early_kernel(reads=[5]), early=["early"])
    *rest, last = trace
    lost = Lost(NO_OP, ThreadId(0), 0, 1, DropReason.RING_FULL)

    for records in ((*rest, last), (*rest, lost, last)):
        assert [f.cause for f in analyse(trace_of(), *records).findings] == [Cause.EARLY_START]


@pytest.mark.parametrize(
    ("steps", "top", "words"),
    [
        ((WRITE, RECORD, WAIT, LOAD), {"shared": SHARED}, "an event that another process may have recorded"),
        ((WRITE, LOAD), {"shared": {"pools": ["kv"]}}, "another process shares this memory"),
        ((WRITE, early_kernel(reads=[5])), {"early": ["early"]}, "op 2 may start before op 1 has ended"),
    ],
)
def test_the_text_says_why_nobody_can_tell(steps: tuple[Step, ...], top: dict[str, Any], words: str) -> None:
    (finding,) = analyse(trace_of(*steps, **top)).findings

    assert finding.verdict is Verdict.UNKNOWN
    assert words in explain(finding)


def test_a_hand_over_after_a_loss_at_the_very_beginning() -> None:
    """Nobody knows which post a receive belongs to, from the first record on."""
    post, receive = {"op": "thread_post", "chan": "c"}, {"op": "thread_recv", "chan": "c", "thread": "t"}
    drain = {"op": "host_sync", "scope": "stream", "stream": "a"}
    trace = trace_of(WRITE, drain, post, receive, kernel("b", writes=[5], thread="t"))
    lost = Lost(NO_OP, ThreadId(0), 0, 1, DropReason.RING_FULL)
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([lost, *trace])
    analyzer.finish()

    assert analyse(trace).findings == []
    assert [(trace.label(f.earlier.op), trace.label(f.later.op), f.proof) for f in sink.findings] == [
        ("s1", "s5", Proof.UNKNOWN)
    ]


@pytest.mark.parametrize("reason", DropReason)
def test_what_a_loss_may_have_hidden_hangs_on_its_reason(reason: DropReason) -> None:
    """Times hide nothing; an edge only an order, so that events keep what they were recorded for; else anything."""
    lost = Lost(NO_OP, ThreadId(0), 0, 1, reason)

    def judged(before: str, behind: str) -> list[Proof]:
        records = History(f"{before} {behind}").records
        place = len(records) - len(behind.split())
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed([*records[:place], lost, *records[place:]])
        analyzer.finish()
        return [finding.proof for finding in sink.findings]

    harmless, edge = reason is DropReason.UNRESOLVED, reason is DropReason.EDGE
    assert judged("F:w5", "L:w5") == [Proof.NONE if harmless else Proof.UNKNOWN]
    assert judged("F:w5 e=F", "L<e L:w5") == ([] if harmless or edge else [Proof.UNKNOWN])
    assert judged("F:w5 e=F L<e", "L:w5") == []
