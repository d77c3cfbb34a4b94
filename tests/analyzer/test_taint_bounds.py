"""What the blast radius keeps of allocations, races and names, and that an answer is never older than what was fed."""

from __future__ import annotations

import pytest

from hicache_obs.analyzer import Analyzer, taint
from hicache_obs.analyzer.taint import Taint, timing_of
from hicache_obs.findings import BlastRadius, Timing
from hicache_obs.records import (
    Access,
    Direction,
    EventId,
    EventRecord,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    Record,
    RowsDiscarded,
    Space,
    StreamId,
    ThreadId,
    Times,
    device,
    host,
    pack_rows,
    page_ids,
)
from hicache_obs.testing import History, RecordingSink

MAIN = ThreadId(0)
PAIR = OpId(0), OpId(1)
_FIELDS = ("op", "thread", "host_ns", "stream", "site", "group", "size_bytes", "layers", "accesses", "rows")
"""Of a kernel."""


def allocation(page: int) -> Access:
    return Access(Space.DEVICE, Mode.WRITE, page_ids([page]))


@pytest.mark.parametrize(("count", "kept"), [(7, 7), (8, 8), (9, 0), (12, 3)])
def test_allocations_are_kept_up_to_four_for_each_operation(
    count: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One more, with no operation kept that was issued among them, and they are behind."""
    monkeypatch.setattr(taint, "MAX_RECENT", 2)
    books = Taint()
    for seq in range(count):
        books.allocate(seq, allocation(5))
    assert len(books._allocations) == kept


def fed(*records: Record) -> Analyzer:
    analyzer = Analyzer(RecordingSink())
    analyzer.feed(records)
    return analyzer


def test_an_answer_is_not_kept_beyond_what_comes() -> None:
    """Times, a discarded row, a new race and a new operation each may change it."""
    race = History("F:w5 L:w5").records
    asked = fed(*race)
    before = asked.blast_radius(PAIR)
    assert not before.exact
    asked.feed([Times(OpId(0), MAIN, 0, 500, 600), Times(OpId(1), MAIN, 0, 100, 200)])
    after = asked.blast_radius(PAIR)
    assert (after.exact, after.device_pages) == (True, before.device_pages)

    reader = History("F:w5 L:w5 F<L F:r5w6").records
    rows = pack_rows([7], [page_ids([5, 6])], [1], [1])
    reader[-1] = type(reader[-1])(*(getattr(reader[-1], name) for name in _FIELDS[:-1]), rows)
    asked = fed(*reader)
    assert asked.blast_radius(PAIR).requests == (7,)
    asked.feed([RowsDiscarded(OpId(9), MAIN, 0, 3, page_ids([7]))])
    assert (asked.blast_radius(PAIR).requests, asked.blast_radius(PAIR).rounds) == ((), (3,))

    asked = fed(*race)
    assert asked.blast_radius((OpId(0), OpId(2))) == nothing()
    asked.feed(History("F:w5 L:w5 X:w5").records[-1:])
    assert asked.blast_radius((OpId(0), OpId(2))).device_pages == ((0, 5),)
    asked.feed(History("F:w5 L:w5 X:w5 F<L F<X F:r5w8").records[-3:])
    assert (0, 8) in asked.blast_radius(PAIR).device_pages
    asked.feed([PageAlloc(OpId(6), MAIN, 0, 1, allocation(8))])
    asked.feed(History("F:w5 L:w5 X:w5 F<L F<X F:r5w8 h+8 F:r8w9").records[-1:])
    assert (0, 9) not in asked.blast_radius(PAIR).device_pages


def nothing() -> BlastRadius:
    return Analyzer(RecordingSink()).blast_radius(PAIR)


@pytest.mark.parametrize(
    ("limit", "named"), [(2, [True, True, False]), (3, [True, True, True]), (1, [True, False, False])]
)
def test_so_many_fingerprints_have_a_radius(limit: int, named: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """Three races of three kinds; a second pair under a known name is always taken in."""
    monkeypatch.setattr(taint, "MAX_RACES", limit)
    books, operations = Taint(pairs=limit), _operations()
    for number, page in enumerate((1, 2, 3)):
        first, second = operations[2 * number : 2 * number + 2]
        books.race(first, second, ())
        books.name(f"HC-{page}", (first.op, second.op))
    assert [bool(books._fingerprints.get(f"HC-{page}")) for page in (1, 2, 3)] == named
    first, second = operations[6:8]
    books.race(first, second, ())
    known = books._fingerprints["HC-1"]
    books.name("HC-1", (first.op, second.op))
    assert books._fingerprints["HC-1"] != known
    books.name("HC-1", (OpId(77), OpId(78)))  # a pair that nobody knows lends nothing
    assert len(books._fingerprints) == sum(named)
    assert len(books._pairs) == min(limit, 4)
    assert len(books._races) == min(limit, 4)


@pytest.mark.parametrize(("pairs", "complete"), [(2, True), (1, False)])
@pytest.mark.parametrize("named_at_once", [False, True], ids=["named late", "named at once"])
def test_a_fingerprint_outlives_its_pairs(pairs: int, named_at_once: bool, complete: bool) -> None:
    """Who asks by fingerprint needs a pair until it has its name; without its name its radius is not complete."""
    books, operations = Taint(pairs=pairs), _operations()
    both = [operations[:2], operations[2:4]]
    for first, second in both:
        books.steps([first, second])
        books.race(first, second, ())
        if named_at_once:
            books.name("HC-1", (first.op, second.op))
    if not named_at_once:
        for first, second in both:
            books.name("HC-1", (first.op, second.op))
    assert books.radius("HC-1").complete == (complete or named_at_once)
    assert [books.radius((first.op, second.op)).complete for first, second in both] == [pairs == 2, True]
    books.name("HC-1", (OpId(77), OpId(78)))
    assert not books.radius("HC-1").complete


def _operations() -> list[taint.Operation]:
    """Eight of different groups."""
    analyzer = Analyzer(RecordingSink())
    seen: list[taint.Operation] = []
    analyzer._taint.step = seen.append  # type: ignore[method-assign]
    analyzer.feed(History(" ".join(f"{stream}:w{page}" for page in range(4) for stream in "FL")).records)
    assert all(device(Mode.WRITE, page_ids([1])).space is item.group.accesses[0].space for item in seen)
    return seen


@pytest.mark.parametrize("between", range(1, 12))
def test_the_newest_of_many_new_owners_has_a_clean_page(between: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it is with its call that the calls before are put behind; without it the next reader is in the radius."""
    monkeypatch.setattr(taint, "MAX_RECENT", 1)
    for page, reached in ((5, False), (9, True)):
        text = f"F:w5 L:w5 {'h+9 ' * between}h+{page} F<L F:r5w6"
        assert ((0, 6) in fed(*History(text).records).blast_radius(PAIR).device_pages) == reached


@pytest.mark.parametrize("swapped", [None, *range(2, 8)])
def test_what_is_played_for_good_ends_where_the_device_was_between_two_operations(
    swapped: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two neighbours in a long row may have run the other way round: they are not parted, and nothing is missed."""
    starts = [100, 50, *range(200, 900, 100)]
    if swapped is not None:
        starts[swapped], starts[swapped + 1] = starts[swapped + 1], starts[swapped]
    found = readers_of_a_raced_page(starts, monkeypatch)
    assert found.device_pages == ((0, 5), *((0, 20 + number) for number in range(7)))
    assert found.complete


def test_one_that_ran_long_after_its_turn_makes_a_radius_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was played for good before others that ran before it."""
    found = readers_of_a_raced_page([100, 50, 5000, *range(300, 900, 100)], monkeypatch)
    assert not found.complete


def readers_of_a_raced_page(starts: list[int], monkeypatch: pytest.MonkeyPatch) -> BlastRadius:
    """A race on page 5; then rounds that each read it and write a page of their own, on streams of their own."""
    monkeypatch.setattr(taint, "MAX_RECENT", 4)
    readers = " ".join(f"{stream}:r5w{20 + number}" for number, stream in enumerate("STUVXYZ"))
    analyzer = Analyzer(RecordingSink())
    left = iter(starts)
    for record in History(f"F:w5 L:w5 h<* {readers}").records:
        analyzer.feed([record])
        if isinstance(record, Kernel | Memcpy):
            start_ns = next(left)
            analyzer.feed([Times(record.op, MAIN, 0, start_ns, start_ns + 10)])
    return analyzer.blast_radius(PAIR)


@pytest.mark.parametrize(("fence", "complete"), [("", False), ("h<X", True)])
def test_a_race_with_what_was_played_for_good_leaves_its_pages_in_doubt(
    fence: str, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What another race had done to them too: the write may have come before the round that handed it on."""
    monkeypatch.setattr(taint, "MAX_RECENT", 4)
    between = " ".join(f"{stream}:w{30 + number}" for number, stream in enumerate("STUVZ"))
    records = History(f"F:w5 L:w5 h<* X:r5w6 {between} {fence} Y:w5").records
    assert fed(*records).blast_radius(PAIR).complete is complete


@pytest.mark.parametrize(
    ("second", "timing"),
    [((85, 200), Timing.KEPT), ((84, 200), Timing.UNTIMED), ((-50, 15), Timing.BROKEN), ((-50, 16), Timing.UNTIMED)],
)
def test_an_order_is_measured_within_both_errors(second: tuple[int, int], timing: Timing) -> None:
    """The first ran from 0 to 100, give or take 10; the second's times are known to within 5."""
    first, later = _operations()[:2]
    first.start_ns, first.end_ns, first.error_ns = 0, 100, 10
    later.start_ns, later.end_ns = second
    later.error_ns = 5
    assert timing_of(first, later) is timing


@pytest.mark.parametrize("recent", [8, 30, 1000])
def test_layers_of_a_run_are_in_the_radius_however_few_are_kept(recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twenty copies that come as one run hand a raced page on: each to a host page's layer."""
    monkeypatch.setattr(taint, "MAX_RECENT", recent)
    loads = StreamId(1)
    moved = (device(Mode.READ, page_ids([5])), host(Mode.WRITE, page_ids([3])))
    records: list[Record] = list(History("F:w5 L:w5 h<*").records)
    for layer in range(20):
        op = OpId(50 + 2 * layer)
        head = (op, MAIN, int(op), loads, 0, 9, 8, (layer, layer + 1), moved)
        records += [Memcpy(*head, Direction.DEVICE_TO_HOST), EventRecord(OpId(op + 1), MAIN, op + 1, EventId(1), loads)]
    back = (host(Mode.READ, page_ids([3])), device(Mode.WRITE, page_ids([6])))
    readers = [
        Memcpy(OpId(100 + n), MAIN, 100 + n, loads, 0, 20 + n, 8, (n, n + 1), back, Direction.HOST_TO_DEVICE)
        for n in range(20)
    ]
    found = fed(*records, *readers).blast_radius(PAIR)
    assert (found.host_pages, found.transfers) == (((0, 3),), (9, *range(20, 40)))
