"""Transfers under way and fences in front of them: what is counted, since when, and how much is kept."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer, check, fence_cost
from hicache_obs.costs import PendingTransfers, TransferKind
from hicache_obs.records import (
    NO_OP,
    Access,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    EventId,
    EventWait,
    Memcpy,
    Mode,
    OpId,
    Purpose,
    Space,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
)
from hicache_obs.testing import RecordingSink

MAIN = ThreadId(0)
PAGES = Access(Space.DEVICE, Mode.WRITE, np.array([5], np.int64))


def pool(layers: int, number: int = 0) -> Define:
    return Define(NO_OP, MAIN, 0, DefineSpace.POOL, number, "kv", layers)


def copy(
    op: int,
    number: int,
    layers: tuple[int, int] = (0, 1),
    *,
    accesses: tuple[Access, ...] = (PAGES,),
    way: Direction = Direction.HOST_TO_DEVICE,
) -> Memcpy:
    stream = StreamId(1 if way is Direction.HOST_TO_DEVICE else 2)
    return Memcpy(OpId(op), MAIN, 1000 * op, stream, 0, number, 10, layers, accesses, way)


def fence(op: int, purpose: Purpose = Purpose.LOAD_FENCE) -> WaitStream:
    return WaitStream(OpId(op), MAIN, 1000 * op, StreamId(1), StreamId(0), purpose)


def times(op: int, start_ns: int | None = None, end_ns: int | None = None) -> Times:
    start = 1000 * op if start_ns is None else start_ns
    return Times(OpId(op), MAIN, 0, start, start + 500 if end_ns is None else end_ns)


def fed(*records: AnyRecord) -> tuple[Analyzer, RecordingSink]:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    return analyzer, sink


def test_the_last_fences_in_front_of_a_copy_are_kept() -> None:
    """As many as the limit; one more, and the first is left out. Another operation's fences do not count."""
    most = fence_cost.MAX_QUEUED
    for count, first in ((1, 0), (most, 0), (most + 1, 1), (most + 3, 3)):
        fences = [fence(op) for op in range(count)]
        _, sink = fed(pool(1), *fences, copy(90, 1), *(times(op) for op in (*range(count), 90)))
        assert [cost.op for cost in sink.fences] == list(range(first, count))
        _, sink = fed(pool(1), *fences, copy(90, 1), copy(91, 2), *(times(op) for op in (*range(count), 90, 91)))
        assert len(sink.fences) == count - first
        assert [cost.fenced for cost in sink.transfers] == [True, True]  # the second conflicts with nobody


def test_a_transfer_is_over_with_its_last_layer_whenever_times_come() -> None:
    """Each copy's before the next is issued, or all at the end; layers beyond the pool's do not count."""
    copies = [copy(op, 1, (op, op + 1)) for op in range(3)]
    interleaved = [record for item in copies for record in (item, times(item.op))]
    for records in (interleaved, [*copies, *(times(item.op) for item in copies)]):
        analyzer, sink = fed(pool(3), *records[:-1])
        assert sink.transfers == []
        assert [entry.transfers for entry in analyzer.pending_transfers()] == [1, 0]
        analyzer.feed(records[-1:])
        (cost,) = sink.transfers
        assert (cost.copy_ns, cost.op_ns, cost.size_bytes, cost.pages) == (2500, 2500, 30, 1)
        assert [entry.transfers for entry in analyzer.pending_transfers()] == [0, 0]
    _, sink = fed(pool(3), copy(0, 1, (2, 9)), times(0), copy(1, 1, (0, 1)), times(1))
    assert sink.transfers == []  # of seven layers one is one of the pool's
    _, sink = fed(pool(3), copy(0, 1, (0, 9)), times(0))
    assert len(sink.transfers) == 1


def test_a_copy_of_pages_that_nobody_knows_is_taken_for_one_of_the_first_pool() -> None:
    for layers, transfers in ((1, 1), (2, 0)):
        _, sink = fed(pool(layers), pool(3 - layers, 1), copy(0, 1, accesses=()), times(0))
        assert len(sink.transfers) == transfers
        assert all(cost.pages == 0 for cost in sink.transfers)


def test_the_oldest_transfer_under_way_counts() -> None:
    """Since its fence, in each direction; none is left once the trace is over."""
    back = Direction.DEVICE_TO_HOST
    analyzer, sink = fed(pool(2), fence(1), copy(3, 1), copy(4, 2), copy(5, 3), copy(7, 1, way=back), times(3))
    assert analyzer.pending_transfers() == (
        PendingTransfers(TransferKind.RESTORE, 3, 1000),
        PendingTransfers(TransferKind.BACKUP, 1, 7000),
    )
    analyzer.finish()
    assert [(entry.transfers, entry.oldest_ns) for entry in analyzer.pending_transfers()] == [(0, None), (0, None)]
    assert [cost.transfer for cost in sink.transfers] == [1]  # measured as far as it went


def test_times_of_a_transfer_that_was_given_up_are_not_another_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A transfer of the same number has begun since: it is not measured by them."""
    monkeypatch.setattr(fence_cost, "MAX_TRANSFERS", 0)
    monkeypatch.setattr(check, "PRUNE_EVERY", 2)
    analyzer, sink = fed(pool(1), copy(0, 1))
    analyzer.feed([copy(2, 1)])
    analyzer.feed([times(0)])
    assert sink.transfers == []


@pytest.mark.parametrize(("limit", "waits"), [(3, 3), (2, 2), (0, 0)])
def test_so_many_waits_may_still_get_their_times(limit: int, waits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest of three; and the ends of so many things are known."""
    monkeypatch.setattr(fence_cost, "MAX_WAITS", limit)
    monkeypatch.setattr(fence_cost, "MAX_ENDS", limit)
    analyzer, sink = fed(*(fence(op, Purpose.LAYER) for op in range(3)))
    analyzer._prune()
    analyzer.feed(times(op) for op in range(3))
    assert sink.layer_waits_ns == [500] * waits
    analyzer._prune()
    assert sorted(analyzer._meter._ends) == list(range(3 - limit, 3))
    assert not analyzer._meter._waits or limit == 0


@pytest.mark.parametrize("timed", [False, True])
def test_a_wait_for_an_event_that_was_never_recorded_holds_nothing(timed: bool) -> None:
    """Nor does one whose own times are not known: all that the fence waited could have been spared."""
    unrecorded = EventWait(OpId(1), MAIN, 1000, EventId(9), StreamId(1))
    more = [times(1, 1000, 1000)] if timed else []
    _, sink = fed(pool(1), unrecorded, fence(2), copy(3, 1), *more, times(2, 2000, 9000), times(3, 9000, 9500))
    (cost,) = sink.fences
    assert (cost.waited_ns, cost.avoidable_ns, cost.needed_ns) == (6000, 6000, {})
