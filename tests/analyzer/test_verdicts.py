"""What waits for device times, how much of it is kept, and what counts as raced before."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from hicache_obs.analyzer import Analyzer, check, verdicts
from hicache_obs.findings import Cause, Finding, Timing, Verdict
from hicache_obs.records import (
    IN_ORDER,
    AnyRecord,
    GraphNode,
    GraphReplay,
    HostAccess,
    Kernel,
    Mode,
    OpId,
    Relocate,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
    device,
    page_ids,
)
from hicache_obs.testing import History, RecordingSink

MAIN = ThreadId(0)


def times(op: int, start_ns: int, end_ns: int) -> Times:
    return Times(OpId(op), MAIN, 0, start_ns, end_ns)


def found_in(records: Iterable[AnyRecord]) -> list[Finding]:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return sink.findings


@pytest.mark.parametrize(("pending", "kept"), [(4, 4), (3, 3), (1, 1), (0, 0), (9, 6)])
def test_operations_whose_times_are_overdue_get_their_verdict(
    pending: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest of six are given up: at once if they race, and what comes of their times later changes nothing."""
    monkeypatch.setattr(verdicts, "MAX_PENDING", pending)
    records = History("F:w1 L:w1 F:w2 L:w2 F:w3 L:w3").records
    monkeypatch.setattr(check, "PRUNE_EVERY", len(records))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    assert sorted(analyzer._live) == list(range(6 - kept, 6))
    given_up = [(op - 1, op) for op in (1, 3, 5) if op < 6 - kept]
    assert sink.pairs == given_up
    assert all(finding.timing is Timing.UNTIMED for finding in sink.findings)
    analyzer.feed(times(op, 100 - op, 200) for op in range(6))
    late = {pair: Timing.BROKEN if pair[0] >= 6 - kept else Timing.UNTIMED for pair in [(0, 1), (2, 3), (4, 5)]}
    found = {(f.earlier.op, f.later.op): f.timing for f in sink.findings}
    assert found == {pair: Timing.UNTIMED if pair in given_up else timing for pair, timing in late.items()}
    assert not analyzer._live
    analyzer.finish()
    assert len(sink.findings) == 3


def test_what_is_left_at_the_end_gets_its_verdict_too() -> None:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(History("F:w1 L:w1").records)
    assert sink.findings == []
    analyzer.finish()
    assert [finding.verdict for finding in sink.findings] == [Verdict.LATENT]
    assert not analyzer._live
    analyzer.finish()
    assert len(sink.findings) == 1


@pytest.mark.parametrize(("limit", "secondary"), [(2, True), (1, False)])
def test_so_many_pages_are_known_to_have_raced(limit: int, secondary: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With more of them a later race on one counts as its first."""
    monkeypatch.setattr(verdicts, "MAX_RACED", limit)
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    records = History("F:w1,2 L:w1,2 X:w2").records
    analyzer.feed(records[:-1])
    analyzer.feed(times(op, op, op + 1) for op in (0, 1))
    analyzer._prune()
    analyzer.feed(records[-1:])
    analyzer.finish()
    assert [finding.secondary for finding in sink.findings] == [False, *[secondary, True]]


@pytest.mark.parametrize(("graph", "verdicts_"), [(False, [Verdict.CONTRADICTION]), (True, [])])
def test_nobody_knows_when_an_entry_of_a_graph_ran(graph: bool, verdicts_: list[Verdict]) -> None:
    """Its replay is said to have begun before what it follows was over: the entry may have come later."""
    write = (device(Mode.WRITE, page_ids([5])),)
    records: list[AnyRecord] = [
        Kernel(OpId(0), MAIN, 0, StreamId(1), 0, 0, 0, (0, 1), write),
        WaitStream(OpId(1), MAIN, 0, StreamId(2), StreamId(1)),
    ]
    if graph:
        records.append(GraphReplay(OpId(2), MAIN, 0, 1, StreamId(2), 0, 2, 1, (0, 1), ()))
        records.append(GraphNode(OpId(3), MAIN, 0, 0, IN_ORDER, None, (0, 1), write))
    else:
        records.append(Kernel(OpId(2), MAIN, 0, StreamId(2), 0, 2, 0, (0, 1), write))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([*records, times(0, 1000, 2000), times(2, 1500, 3000)])
    analyzer.finish()
    assert [finding.verdict for finding in sink.findings] == verdicts_
    assert {finding.cause for finding in sink.findings} <= {Cause.CLOCK_OR_FENCE}
    spoiled = analyzer.blast_radius((OpId(0), OpId(2)))  # one that ran in the wrong order spoils what a race spoils
    assert spoiled.device_pages == (() if graph else ((0, 5),))


@pytest.mark.parametrize(("text", "coarse"), [("F:w5 L:w5", True), ("L:w5 F:r5", True), ("L:w5 B:r5W1", False)])
def test_a_round_touches_its_pages_at_some_time_in_a_long_one(text: str, coarse: bool) -> None:
    """A copy's interval is its own."""
    (finding,) = found_in(History(text).records)
    assert finding.coarse is coarse


def test_a_move_belongs_to_no_round() -> None:
    """It does run on a stream."""
    accesses = (device(Mode.READ, page_ids([5])), device(Mode.WRITE, page_ids([6])))
    (finding,) = found_in([*History("F:w5").records, Relocate(OpId(1), MAIN, 1, StreamId(9), 0, (0, 1), accesses)])
    assert (finding.later.what, finding.later.group, finding.later.stream_id) == ("relocate", 0, 9)


def test_the_host_belongs_to_no_round() -> None:
    """Nor does it run on a stream."""
    write = HostAccess(OpId(1), MAIN, 1, 0, (0, 1), (device(Mode.WRITE, page_ids([5])),))
    (finding,) = found_in([*History("F:w5").records, write])
    assert (finding.later.what, finding.later.group, finding.later.stream) == ("host", 0, None)
