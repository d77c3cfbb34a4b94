"""Tables stay bounded over a long trace, and what a forgotten entry would have ordered is doubtful, never false."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer, check, handover, order, shadow
from hicache_obs.cli import main
from hicache_obs.findings import Proof, Verdict
from hicache_obs.records import (
    AnyRecord,
    Define,
    DefineSpace,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphReplay,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    RecordStream,
    StreamId,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    Times,
    device,
)
from hicache_obs.testing import History, RecordingSink
from hicache_obs.testing.rounds import Rounds, Shape

A, B = StreamId(1), StreamId(2)
MAIN, HELPER = ThreadId(0), ThreadId(1)
PAGE = np.array([7], np.int64)


def _write(op: int, stream: StreamId, thread: ThreadId = MAIN) -> Kernel:
    return Kernel(OpId(op), thread, 0, stream, 0, op, 0, (0, 1), (device(Mode.WRITE, PAGE),))


def _proofs(records: list[AnyRecord]) -> list[Proof]:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return [finding.proof for finding in sink.findings]


def _sizes(value: object, depth: int = 0) -> Iterator[int]:
    """Entries of all tables below ``value``, a few levels down."""
    if isinstance(value, dict | list | set | tuple) or hasattr(value, "maxlen"):
        yield len(value)  # type: ignore[arg-type]
    elif depth < 3 and type(value).__module__.startswith("hicache_obs.analyzer") and hasattr(value, "__dict__"):
        for below in vars(value).values():
            yield from _sizes(below, depth + 1)


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what nobody refers to any more is freed."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("timed", [False, True], ids=["untimed", "timed"])
def test_tables_stop_growing(monkeypatch: pytest.MonkeyPatch, timed: bool, no_collector: None) -> None:
    """With small limits, twice as long a trace leaves no larger tables; ``make long-trace`` does it at full size.

    Nor does it leave more operations to the collector of cycles.
    """
    for module, name, limit in (
        (shadow, "MAX_GROUPS", 64),
        (shadow, "MAX_KEPT_IDS", 1 << 14),
        (shadow, "MAX_CALLS", 256),
        (order, "MAX_EVENTS", 512),
        ("hicache_obs.analyzer.verdicts", "MAX_PENDING", 256),
        ("hicache_obs.analyzer.fence_cost", "MAX_WAITS", 256),
        ("hicache_obs.analyzer.fence_cost", "MAX_ENDS", 256),
        ("hicache_obs.analyzer.fence_cost", "MAX_TRANSFERS", 4),
        ("hicache_obs.analyzer.ownership", "MAX_CHANGES", 256),
        ("hicache_obs.analyzer.taint", "MAX_RECENT", 128),
    ):
        if isinstance(module, str):
            monkeypatch.setattr(f"{module}.{name}", limit)
        else:
            monkeypatch.setattr(module, name, limit)
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    trace = Rounds(pages=4096, restored_pages=256, layers=8, timed=timed).trace(24_000)
    entries, alive = [], []
    batch: list[AnyRecord] = []
    for record in trace:
        batch.append(record)
        if len(batch) == 8_000:
            analyzer.feed(batch)
            entries.append(sum(_sizes(analyzer)))
            alive.append(sum(type(thing) is shadow.Operation for thing in gc.get_objects()))
            batch = []
    assert len(entries) == 3
    assert entries[0] > 500
    assert alive[0] > 100
    for sizes in (entries, alive):
        assert sizes[2] < 1.12 * max(sizes[:2]), (entries, alive)  # what has come since the last pruning differs
    analyzer.feed(batch)
    analyzer.finish()
    assert not sink.findings
    assert sum(sink.checked.values()) > 0


def test_a_rank_that_races_for_ever_fills_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An analyzer that asks by fingerprint: behind so many races none leaves anything, and what they spoil is known."""
    monkeypatch.setattr("hicache_obs.analyzer.taint.MAX_SOURCES", 16)
    monkeypatch.setattr("hicache_obs.analyzer.taint.MAX_RECENT", 64)
    monkeypatch.setattr(shadow, "MAX_GROUPS", 64)
    monkeypatch.setattr("hicache_obs.analyzer.fence_cost.MAX_ENDS", 64)
    monkeypatch.setattr("hicache_obs.analyzer.fence_cost.MAX_TRANSFERS", 4)
    sink = RecordingSink()
    analyzer = Analyzer(sink, pairs=16)
    entries = []
    for record in History("F:w5 L:w5 h<* " * 2000).records:
        analyzer.feed([record])
        if isinstance(record, Memcpy):
            starts = {record.op - 1: 1000 * record.op, record.op: 1000 * record.op + 50}
            analyzer.feed([Times(OpId(op), MAIN, 0, start, start + 100) for op, start in starts.items()])
            if len(sink.findings) % 500 == 0:
                entries.append(sum(_sizes(analyzer)))
    assert len(sink.findings) == 2000
    assert {finding.fingerprint for finding in sink.findings} == {sink.findings[0].fingerprint}
    assert max(entries[1:]) < 1.12 * entries[0]
    found = analyzer.blast_radius(sink.findings[0].fingerprint)
    assert found.device_pages == ((0, 5),)
    assert not found.complete


def test_allocator_calls_alone_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace may have any number of them between two operations, or no operation at all."""
    monkeypatch.setattr("hicache_obs.analyzer.taint.MAX_RECENT", 4)
    monkeypatch.setattr("hicache_obs.analyzer.ownership.MAX_CHANGES", 16)
    monkeypatch.setattr(shadow, "MAX_CALLS", 8)
    for before in ("", "F:w5 L:w5 "):
        entries = []
        for count in (200, 400):
            analyzer = Analyzer(RecordingSink())
            analyzer.feed(History(before + "h+5 " * count).records)
            entries.append(sum(_sizes(analyzer)))
        assert abs(entries[1] - entries[0]) <= 2 * 16


@pytest.mark.parametrize(
    ("limit", "verdicts"), [(1 << 22, [Verdict.CONTRADICTION]), (300, [Verdict.CONTRADICTION]), (50, [])]
)
def test_measured_times_are_compared_with_what_is_kept(
    monkeypatch: pytest.MonkeyPatch, limit: int, verdicts: list[Verdict]
) -> None:
    """A proven order that was not kept is noticed across a pruning, unless the earlier pages had to be forgotten."""
    monkeypatch.setattr(shadow, "MAX_KEPT_IDS", limit)
    records = History("S:w9 " * 400 + "F:w5 F:w6 L<F " + "S:w9 " * 200 + "L:w5,6").records
    times = [Times(OpId(op), MAIN, 0, start, start + 1000) for op, start in ((400, 1000), (603, 1900))]
    sink = RecordingSink()
    Analyzer(sink).feed([*records, *times])
    assert [finding.verdict for finding in sink.findings] == verdicts


@pytest.mark.parametrize(("last", "verdicts"), [("", [Verdict.CONTRADICTION]), (" S:w9", [])], ids=["kept", "dropped"])
def test_the_newest_group_is_kept_whatever_its_size(
    monkeypatch: pytest.MonkeyPatch, last: str, verdicts: list[Verdict]
) -> None:
    """With room for nothing only that one is left after a pruning, which comes right before the last operation."""
    monkeypatch.setattr(shadow, "MAX_KEPT_IDS", 0)
    tail = f"F:w5 L<F{last} L:w5"
    count = check.PRUNE_EVERY + 1 - len(History(f"S:w9 {tail}").records) + 1
    *records, later = History("S:w9 " * count + tail).records
    assert len(records) == check.PRUNE_EVERY
    sink = RecordingSink()
    times = [Times(OpId(op), MAIN, 0, start, start + 1000) for op, start in ((count, 1000), (later.op, 1900))]
    Analyzer(sink).feed([*records, later, *times])
    assert [finding.verdict for finding in sink.findings] == verdicts


def _many_events(first_op: int, count: int, thread: ThreadId = MAIN) -> list[EventRecord]:
    return [EventRecord(OpId(first_op + n), thread, 0, EventId(100 + n), StreamId(3)) for n in range(count)]


def test_a_forgotten_event_orders_nothing_for_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wait for an event that was dropped unobserved makes its pair unknown; one that is kept proves the order."""
    monkeypatch.setattr(order, "MAX_EVENTS", 16)
    begin = [_write(0, A), EventRecord(OpId(1), MAIN, 0, EventId(1), A)]
    end = [EventWait(OpId(9000), MAIN, 0, EventId(1), B), _write(9001, B)]
    assert _proofs([*begin, *_many_events(2, 8), *end]) == []
    assert _proofs([*begin, *_many_events(2, 2 * check.PRUNE_EVERY), *end]) == [Proof.UNKNOWN]
    assert _proofs([*begin, *_many_events(2, 2 * check.PRUNE_EVERY), end[1]]) == [Proof.NONE]
    earlier = EventRecord(OpId(8999), MAIN, 0, EventId(2), A)  # both records share a clock, but for the write between
    assert _proofs([earlier, *begin, *_many_events(2, 2 * check.PRUNE_EVERY), *end]) == [Proof.UNKNOWN]


def test_a_forgotten_event_that_was_observed_is_no_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """What every thread knows to be complete is ordered before all that follows, with its event or without."""
    monkeypatch.setattr(order, "MAX_EVENTS", 16)
    begin = [_write(0, A), EventRecord(OpId(1), MAIN, 0, EventId(1), A), EventSync(OpId(2), MAIN, 0, EventId(1))]
    end = [EventWait(OpId(9000), MAIN, 0, EventId(1), B), _write(9001, B)]
    assert _proofs([*begin, *_many_events(3, 2 * check.PRUNE_EVERY), *end]) == []


def test_a_forgotten_event_that_a_new_thread_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """All threads knew it to be complete; what one does that appears later is doubtful, and no race."""
    monkeypatch.setattr(order, "MAX_EVENTS", 16)
    begin = [_write(0, A), EventRecord(OpId(1), MAIN, 0, EventId(1), A), EventSync(OpId(2), MAIN, 0, EventId(1))]
    noise = [
        record
        for event in _many_events(3, check.PRUNE_EVERY)
        for record in (event, EventSync(OpId(3000), MAIN, 0, event.event))
    ]
    wait, end = EventWait(OpId(9000), HELPER, 0, EventId(1), B), _write(9001, B, HELPER)
    assert _proofs([*begin, wait, end]) == []
    assert _proofs([*begin, *noise, wait, end]) == [Proof.UNKNOWN]
    assert _proofs([*begin, *noise, end]) == [Proof.NONE]
    told = [ThreadPost(OpId(8000), MAIN, 0, 5), ThreadRecv(OpId(8001), HELPER, 0, 5)]
    assert _proofs([*begin, *noise, *told, wait, end]) == []
    sync = EventSync(OpId(9000), HELPER, 0, EventId(1))
    assert _proofs([*begin, *noise, sync, end]) == [Proof.UNKNOWN]


def test_a_forgotten_event_of_a_stream_that_followed_a_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its stream followed only weakly is part of what a wait for it may order."""
    monkeypatch.setattr(order, "MAX_EVENTS", 16)
    begin = [
        _write(0, A),
        EventRecord(OpId(1), MAIN, 0, EventId(1), A),
        EventQuery(OpId(2), MAIN, 0, EventId(1), True),
        EventRecord(OpId(3), MAIN, 0, EventId(2), StreamId(4)),
        EventRecord(OpId(4), ThreadId(2), 0, EventId(1), StreamId(3)),
    ]
    noise = _many_events(5, 2 * check.PRUNE_EVERY, ThreadId(2))
    wait, end = EventWait(OpId(9000), HELPER, 0, EventId(2), B), _write(9001, B, HELPER)
    assert _proofs([*begin, wait, end]) == []
    assert _proofs([*begin, *noise, wait, end]) == [Proof.UNKNOWN]
    assert _proofs([*begin, *noise, end]) == [Proof.NONE]


def test_a_wait_that_teaches_nothing_leaves_later_pairs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A forgotten event of which the waiter knows all makes nothing doubtful: not what came before, nor after it."""
    monkeypatch.setattr(order, "MAX_EVENTS", 16)
    begin = [_write(0, A), EventRecord(OpId(1), MAIN, 0, EventId(1), A), EventSync(OpId(2), MAIN, 0, EventId(1))]
    noise = _many_events(3, 2 * check.PRUNE_EVERY)
    sync = EventSync(OpId(8000), MAIN, 0, EventId(100 + 2 * check.PRUNE_EVERY - 1))
    wait = EventWait(OpId(8001), MAIN, 0, EventId(1), B)
    analyzer = Analyzer(RecordingSink())
    analyzer.feed([*begin, *noise, sync, wait])
    assert analyzer._order._depth == 1
    assert _proofs([*begin, *noise, sync, wait, _write(8002, A), _write(8003, B)]) == [Proof.NONE]


def test_the_end_of_a_forgotten_transfer_is_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second thread that learns of an end long past follows some transfer, nobody knows which."""
    monkeypatch.setattr(check, "MAX_ENDED", 4)

    def transfers(others: int) -> list[AnyRecord]:
        found: list[AnyRecord] = []
        for io in range(others + 1):
            accesses = (device(Mode.WRITE, PAGE),) if io == 0 else ()
            found.append(IoBegin(OpId(2 * io), MAIN, 0, io, IoKind.STORAGE_READ, 0, (0, 1), accesses))
            found.append(IoEnd(OpId(2 * io + 1), MAIN, 0, io))
        return found

    learns, end = IoEnd(OpId(9000), HELPER, 0, 0), _write(9001, B, HELPER)
    assert _proofs([*transfers(3), learns, end]) == []
    assert _proofs([*transfers(4), learns, end]) == [Proof.UNKNOWN]
    assert _proofs([*transfers(4), end]) == [Proof.NONE]


def test_a_forgotten_post_orders_nothing_for_sure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Receives on channels that lost posts are doubtful; a channel that lost none still proves the order."""
    monkeypatch.setattr(handover, "MAX_POSTS", 16)

    def told(channel: int, posts: int) -> list[AnyRecord]:
        return [
            _write(0, A),
            EventRecord(OpId(1), MAIN, 0, EventId(1), A),
            EventSync(OpId(2), MAIN, 0, EventId(1)),
            ThreadPost(OpId(3), MAIN, 0, channel),
            *(ThreadPost(OpId(10 + n), MAIN, 0, 100 + n) for n in range(posts)),
            ThreadRecv(OpId(500), HELPER, 0, channel),
            _write(501, B, HELPER),
        ]

    assert _proofs(told(5, 8)) == []
    assert _proofs(told(5, 64)) == [Proof.UNKNOWN]
    assert _proofs([record for record in told(5, 64) if record.op != 500]) == [Proof.NONE]


def test_a_channel_that_lost_a_post_is_doubtful_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """What its threads hand over later is not certain, but is not forgotten either; other channels are as before."""
    monkeypatch.setattr(handover, "MAX_POSTS", 1)
    two = [ThreadPost(OpId(op), MAIN, 0, channel) for op, channel in ((0, 1), (1, 2))]  # the first is forgotten
    learn = [_write(2, A), EventRecord(OpId(3), MAIN, 0, EventId(1), A), EventSync(OpId(4), MAIN, 0, EventId(1))]

    def told(posted: int, received: int, *before: AnyRecord) -> list[Proof]:
        post, receive = ThreadPost(OpId(5), MAIN, 0, posted), ThreadRecv(OpId(6), HELPER, 0, received)
        return _proofs([*before, *learn, post, receive, _write(7, B, HELPER)])

    assert told(1, 1) == []
    assert told(1, 1, *two) == [Proof.UNKNOWN]
    assert told(3, 3, two[0], ThreadRecv(OpId(1), HELPER, 0, 1)) == []


def test_forgetting_posts_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them go at once: so many may come before the next are forgotten."""
    monkeypatch.setattr(handover, "MAX_POSTS", 16)
    learn = [_write(0, A), EventRecord(OpId(1), MAIN, 0, EventId(1), A), EventSync(OpId(2), MAIN, 0, EventId(1))]

    def posts(first: int, last: int) -> list[AnyRecord]:
        return [ThreadPost(OpId(channel), MAIN, 0, channel) for channel in range(first, last)]

    def told(later: int) -> list[Proof]:
        end = [ThreadRecv(OpId(900), HELPER, 0, 200), _write(901, B, HELPER)]
        return _proofs([*learn, *posts(100, 117), *posts(200, 201), *posts(300, 300 + later), *end])

    assert told(7) == []
    assert told(20) == [Proof.UNKNOWN]


def test_forgotten_graphs_and_blocks_are_doubtful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays of a graph whose last replay is forgotten, and blocks whose marks are, may be in order or not."""
    monkeypatch.setattr(check, "MAX_GRAPHS", 8)
    monkeypatch.setattr(handover, "MAX_BLOCKS", 8)

    def replay(op: int, graph: int, stream: StreamId, *, touch: bool) -> GraphReplay:
        accesses = (device(Mode.WRITE, PAGE),) if touch else ()
        return GraphReplay(OpId(op), MAIN, 0, graph, stream, 0, op, 0, (0, 1), accesses)

    def replays(others: int) -> list[AnyRecord]:
        between = [replay(1 + n, 100 + n, StreamId(3), touch=False) for n in range(others)]
        return [replay(0, 1, A, touch=True), *between, replay(9000, 1, B, touch=True)]

    assert _proofs(replays(4)) == []
    assert _proofs(replays(2 * check.PRUNE_EVERY)) == [Proof.UNKNOWN]

    *begin, end = replays(12)
    begin += _many_events(100, check.PRUNE_EVERY)
    assert _proofs([*begin, end]) == [Proof.UNKNOWN]
    assert _proofs([*begin[:13], replay(50, 1, A, touch=True), *begin[13:], end]) == []  # used again: not the oldest

    def blocks(others: int) -> list[AnyRecord]:
        tensors = [TensorAlloc(OpId(2 + n), MAIN, 0, 100 + n, 100 + n, A) for n in range(others)]
        return [
            _write(0, A),
            TensorAlloc(OpId(1), MAIN, 0, 1, 1, B),
            *tensors,
            TensorFree(OpId(8000), MAIN, 0, 1),
            TensorAlloc(OpId(8001), MAIN, 0, 2, 1, B),
            _write(8002, B),
        ]

    assert _proofs(blocks(2)) == [Proof.NONE]
    assert _proofs(blocks(32)) == [Proof.UNKNOWN]


@pytest.mark.parametrize(("groups", "told"), [(64, True), (4096, False)])
def test_check_says_what_it_forgot(
    groups: int, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More operations in flight than are kept: a race with one of the first would not be seen."""
    monkeypatch.setattr(shadow, "MAX_GROUPS", groups)
    steps = [{"id": f"s{n}", "op": "kernel", "stream": "a", "writes": [n % 3]} for n in range(2 * check.PRUNE_EVERY)]
    path = tmp_path / "long.json"
    path.write_text(json.dumps({"steps": steps}))

    assert main(["check", str(path)]) == 0
    assert ("left a full history before every host thread knew" in capsys.readouterr().out) == told


def test_free_blocks_do_not_pile_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many blocks were freed with work to wait for, so many are known."""
    monkeypatch.setattr(handover, "MAX_BLOCKS", 8)
    analyzer = Analyzer(RecordingSink())
    for block in range(100):
        head = OpId(block), MAIN, 0
        analyzer.feed([TensorAlloc(*head, block, block, A), RecordStream(*head, block, B), TensorFree(*head, block)])
        assert len(analyzer._blocks._returned) <= 8


def test_times_of_a_transfer_that_was_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come too late for its cost, and do no harm; a newer transfer is measured."""
    monkeypatch.setattr("hicache_obs.analyzer.fence_cost.MAX_TRANSFERS", 1)
    monkeypatch.setattr(check, "PRUNE_EVERY", 4)
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([Define(OpId(-1), MAIN, 0, DefineSpace.POOL, 0, "kv", 1), *History("L:w5@0 S:w1 L:w6@0").records])
    analyzer.feed(Times(OpId(op), MAIN, 0, 100, 200) for op in (0, 2))

    assert [cost.transfer for cost in sink.transfers] == [2]


@pytest.mark.parametrize("shape", list(Shape))
def test_rounds_are_clean_and_checked(shape: Shape) -> None:
    """The benchmark's rounds: all fences are in place, the order is kept, and removing a fence is noticed."""
    rounds = Rounds(layers=4, pages=4096, restored_pages=64, timed=True)
    records = [*rounds.prologue(), *rounds.decode(), *rounds.restore(shape), *rounds.write_back(), *rounds.decode()]
    assert _proofs(records) == []
    waits = [record for record in records if isinstance(record, EventWait) and record.purpose.name == "LAYER"]
    assert Proof.NONE in _proofs([record for record in records if record not in waits])
