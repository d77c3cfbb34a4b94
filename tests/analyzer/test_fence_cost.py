"""What a fence waited, and how much of it exact edges would have saved: worked numbers, in nanoseconds."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import FenceCost, PendingTransfers, TransferKind
from hicache_obs.findings import Hazard
from hicache_obs.records import (
    Define,
    DefineSpace,
    EventWait,
    Memcpy,
    Mode,
    OpId,
    Purpose,
    StreamId,
    ThreadId,
    Times,
    device,
)
from hicache_obs.testing import History, RecordingSink


def measure(text: str, times: dict[int, tuple[int, int]], *, layers: int = 0) -> RecordingSink:
    """Analyse a history whose step ``n`` ran from ``times[n][0]`` to ``times[n][1]``; step n is issued at n µs."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    history = History(text)
    if layers:
        analyzer.feed([Define(OpId(-1), ThreadId(0), 0, space=DefineSpace.POOL, id=0, text="kv", value=layers)])
    analyzer.feed(history.records)
    analyzer.feed(Times(OpId(op), ThreadId(0), 0, start, end) for op, (start, end) in sorted(times.items()))
    analyzer.finish()
    return sink


def the_fence(text: str, times: dict[int, tuple[int, int]]) -> FenceCost:
    """The only fence of a history."""
    (cost,) = measure(text, times).fences
    return cost


# Steps:      0     1     2         ops are issued at 0, 1,000 and 2,000 ns
RESTORE = "F:w5 L<<F L:w5"
UNRELATED = "F:w6 L<<F L:w5"


def test_a_fence_for_a_conflict_is_needed() -> None:
    """The round writes the page until 9,000; the copy was issued at 2,000: 7,000 waited, none avoidable."""
    cost = the_fence(RESTORE, {0: (500, 9000), 1: (1000, 9000), 2: (9000, 9500)})

    assert (cost.waited_ns, cost.avoidable_ns, cost.in_flight) == (7000, 0, True)
    assert cost.needed_ns == {Hazard.WAW_FORWARD_RESTORE: 7000}
    assert cost.kind is TransferKind.RESTORE


def test_the_same_wait_without_a_conflict_is_avoidable() -> None:
    """No page in common: the copy could have begun when it was issued."""
    cost = the_fence(UNRELATED, {0: (500, 9000), 1: (1000, 9000), 2: (9000, 9500)})

    assert (cost.waited_ns, cost.avoidable_ns, cost.in_flight) == (7000, 7000, False)
    assert cost.needed_ns == {}


def test_a_fence_that_met_an_idle_stream_cost_nothing() -> None:
    """It was passed at once."""
    cost = the_fence(RESTORE, {0: (100, 600), 1: (1000, 1000), 2: (2000, 2500)})

    assert (cost.waited_ns, cost.avoidable_ns, cost.in_flight) == (0, 0, False)


def test_waiting_before_the_copy_is_issued_does_not_count() -> None:
    """The dependency ended at 1,500, before there was anything to copy."""
    cost = the_fence(UNRELATED, {0: (500, 1500), 1: (1000, 1500), 2: (2000, 2500)})

    assert (cost.waited_ns, cost.avoidable_ns) == (0, 0)


def test_only_the_conflicting_round_is_needed() -> None:
    """Round 0 writes the page until 4,000, round 1 another until 9,000: 5,000 of 6,000 were avoidable."""
    #        0    1    2     3
    text = "F:w5 F:w6 L<<F L:w5"
    cost = the_fence(text, {0: (500, 4000), 1: (4000, 9000), 2: (2000, 9000), 3: (9000, 9500)})

    assert (cost.waited_ns, cost.avoidable_ns) == (6000, 5000)
    assert cost.needed_ns == {Hazard.WAW_FORWARD_RESTORE: 1000}


def test_another_wait_that_holds_the_copy_anyway_makes_the_fence_free() -> None:
    """The start event, recorded behind work that ended at 8,000, would have held the copy almost as long."""
    #        0    1    2   3    4    5
    text = "F:w6 S:w9 a=S L<<F L<a L:w5"
    times = {0: (500, 9000), 1: (1000, 8000), 3: (3000, 9000), 4: (9000, 9000), 5: (9000, 9500)}
    cost = the_fence(text, times)

    assert (cost.waited_ns, cost.avoidable_ns) == (4000, 1000)


def test_a_busy_transfer_stream_does_not_wait_for_the_fence() -> None:
    """The stream reached the fence at 6,000, after its own work: only 3,000 were waited."""
    #        0    1    2     3
    text = "F:w6 L:w7 L<<F L:w5"
    cost = the_fence(text, {0: (500, 9000), 1: (1000, 6000), 2: (6000, 9000), 3: (9000, 9500)})

    assert (cost.waited_ns, cost.avoidable_ns) == (3000, 3000)


@pytest.mark.parametrize(("passed", "avoidable"), [(8000, 0), (5000, 1000)], ids=["stood still", "passed at once"])
def test_another_wait_whose_work_was_not_measured(passed: int, avoidable: int) -> None:
    """If the stream stood still for it until 8,000 the copy could not have begun before, fence or no fence."""
    #        0    1    2    3   4
    text = "F:w6 X:w1 L<<F L<X L:w5"
    times = {0: (500, 5000), 2: (2000, 5000), 3: (5000, passed), 4: (passed, passed + 500)}

    assert (the_fence(text, times).waited_ns, the_fence(text, times).avoidable_ns) == (1000, avoidable)


@pytest.mark.parametrize(("ends", "avoidable"), [(4096, 500), (2, 2000)], ids=["known", "forgotten"])
def test_a_record_that_was_forgotten(ends: int, avoidable: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The work behind event e was over at 9,500. Who does not know that sees a wait that was passed at once."""
    monkeypatch.setattr("hicache_obs.analyzer.fence_cost.MAX_ENDS", ends)
    monkeypatch.setattr("hicache_obs.analyzer.check.PRUNE_EVERY", 1)
    #        0   1   2   3   4   5    6    7   8
    text = "F:w6 e=F a=X b=X c=X X:w1 L<<X L<e L:w5"
    times = {0: (500, 9500), 5: (5000, 10_000), 6: (6000, 10_000), 7: (10_000, 10_000), 8: (10_000, 10_500)}

    assert (the_fence(text, times).waited_ns, the_fence(text, times).avoidable_ns) == (2000, avoidable)


@pytest.mark.parametrize(("waits", "fences"), [(4, 1), (1, 0)], ids=["kept", "given up"])
def test_times_that_come_after_a_pruning(waits: int, fences: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fence is measured if no more waits than are kept came behind it."""
    monkeypatch.setattr("hicache_obs.analyzer.fence_cost.MAX_WAITS", waits)
    monkeypatch.setattr("hicache_obs.analyzer.check.PRUNE_EVERY", 4)
    text = "F:w5 L<<F L:w5 S<F S<L S<F S:w1"

    assert len(measure(text, {0: (500, 9000), 1: (1000, 9000), 2: (9000, 9500)}).fences) == fences


def test_write_back_fences_are_measured_too() -> None:
    """Reading a page a round still writes is the conflict here."""
    cost = the_fence("F:w5 B<<F B:r5W1", {0: (500, 9000), 1: (1000, 9000), 2: (9000, 9500)})

    assert cost.kind is TransferKind.BACKUP
    assert cost.needed_ns == {Hazard.RAW_FORWARD_BACKUP: 7000}


def test_a_transfer_is_complete_with_its_last_layer() -> None:
    """Copy time is first start to last end; the operation's time begins with its fence."""
    text = "F:w6 L<<F L:w5@0 L:w5@1"
    history = History(text)
    group = 7
    records = [_with_group(record, group) if isinstance(record, Memcpy) else record for record in history.records]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([Define(OpId(-1), ThreadId(0), 0, space=DefineSpace.POOL, id=0, text="kv", value=2)])
    analyzer.feed(records)
    times = {0: (500, 1500), 1: (1000, 1500), 2: (2000, 2600), 3: (3000, 3700)}
    for op, (start, end) in times.items():
        assert sink.transfers == []
        analyzer.feed([Times(OpId(op), ThreadId(0), 0, start, end)])
    (transfer,) = sink.transfers

    assert (transfer.transfer, transfer.copy_ns, transfer.op_ns, transfer.pages) == (group, 1700, 2700, 1)
    assert transfer.fenced


@pytest.mark.parametrize(("text", "fenced"), [("F:w5 L:w5", False), ("F:w6 L:w5", True), (RESTORE, True)])
def test_unfenced_means_a_conflict_without_order(text: str, fenced: bool) -> None:
    """A transfer that needed no fence is not called unfenced."""
    steps = len(text.split())
    sink = measure(text, {op: (op * 1000 + 500, op * 1000 + 600) for op in range(steps)})

    assert [transfer.fenced for transfer in sink.transfers] == [fenced]


def test_layer_waits_are_counted_apart() -> None:
    """A forward round that waits for a layer is no fence."""
    history = History("L:w5@0 a=L F<a F:r5@0")
    (wait,) = (record for record in history.records if isinstance(record, EventWait))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(
        EventWait(wait.op, wait.thread, wait.host_ns, wait.event, wait.stream, Purpose.LAYER)
        if record is wait
        else record
        for record in history.records
    )
    analyzer.feed([Times(OpId(2), ThreadId(0), 0, 2000, 2750)])
    analyzer.finish()

    assert sink.layer_waits_ns == [750]
    assert sink.fences == []


def _with_group(r: Memcpy, group: int) -> Memcpy:
    return Memcpy(r.op, r.thread, r.host_ns, r.stream, r.site, group, r.size_bytes, r.layers, r.accesses, r.direction)


def test_a_transfer_is_as_deep_as_its_own_pool() -> None:
    """Pool 0 has one layer, pool 1 two: a transfer of pool 1 is not over after its first copy."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    define = {pool: Define(OpId(-1), ThreadId(0), 0, DefineSpace.POOL, pool, f"p{pool}", pool + 1) for pool in (0, 1)}
    analyzer.feed(define.values())
    for layer, done in ((0, 0), (1, 1)):
        accesses = (device(Mode.WRITE, np.array([5], np.int64), pool=1),)
        copy = Memcpy(OpId(layer), ThreadId(0), 0, StreamId(0), 0, 7, 0, (layer, layer + 1), accesses)
        analyzer.feed([copy, Times(OpId(layer), ThreadId(0), 0, 100 + layer, 101 + layer)])

        assert len(sink.transfers) == done


@pytest.mark.parametrize(
    ("copy", "after"),
    [
        pytest.param("L:w5@0-1", PendingTransfers(TransferKind.RESTORE, 0, None), id="all layers"),
        pytest.param("L:w5@0", PendingTransfers(TransferKind.RESTORE, 1, 1000), id="a layer is missing"),
    ],
)
def test_a_transfer_is_pending_from_its_fence_until_its_last_layer_ended(copy: str, after: PendingTransfers) -> None:
    """The fence at 1,000 ns begins it; the pool has two layers."""
    analyzer = Analyzer(RecordingSink())
    analyzer.feed([Define(OpId(-1), ThreadId(0), 0, space=DefineSpace.POOL, id=0, text="kv", value=2)])
    no_backup = PendingTransfers(TransferKind.BACKUP, 0, None)
    assert analyzer.pending_transfers() == (PendingTransfers(TransferKind.RESTORE, 0, None), no_backup)

    analyzer.feed(History(f"F:w5 L<<F {copy}").records)
    assert analyzer.pending_transfers() == (PendingTransfers(TransferKind.RESTORE, 1, 1000), no_backup)

    analyzer.feed([Times(OpId(2), ThreadId(0), 0, 3000, 4000)])
    assert analyzer.pending_transfers() == (after, no_backup)
