"""What the blast radius keeps of allocations, races and names, and that an answer is never older than what was fed."""

from __future__ import annotations

import pytest

from hicache_obs.analyzer import Analyzer, taint
from hicache_obs.analyzer.taint import Taint
from hicache_obs.findings import BlastRadius
from hicache_obs.records import (
    Access,
    Mode,
    OpId,
    PageAlloc,
    Record,
    RowsDiscarded,
    Space,
    ThreadId,
    Times,
    device,
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
    books, operations = Taint(), _operations()
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
