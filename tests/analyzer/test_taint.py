"""Blast radius: each rule as a pair of histories. ``test_blast_radius`` compares it with what really went wrong."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from click.testing import CliRunner

from hicache_obs.analyzer import Analyzer, explain, spread, taint
from hicache_obs.cli.check import command
from hicache_obs.findings import BlastRadius, Finding
from hicache_obs.records import (
    ALL_LAYERS,
    Access,
    Define,
    IoBegin,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageIds,
    Record,
    Relocate,
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


def analysed(text: str, *more: Record, then: str = "", pairs: int = taint.MAX_PAIRS) -> tuple[Analyzer, list[Finding]]:
    """An analyzer fed with a history, further records, and more of the history."""
    records: list[Record] = [*History(text).records, *more]
    if then:
        records += History(f"{text} {then}").records[-len(then.split()) :]
    sink = RecordingSink()
    analyzer = Analyzer(sink, pairs=pairs)
    analyzer.feed(records)
    analyzer.finish()
    return analyzer, sink.findings


def radius(text: str, *more: Record, then: str = "") -> BlastRadius:
    """Blast radius of the first race of a history."""
    analyzer, findings = analysed(text, *more, then=then)
    return analyzer.blast_radius((findings[0].earlier.op, findings[0].later.op))


def reached(text: str, *more: Record, then: str = "") -> str:
    """The radius of the first race in one line; in histories a step is its own round."""
    found = radius(text, *more, then=then)
    assert found.complete
    return named(found)


def named(found: BlastRadius) -> str:
    """A radius in one line."""
    parts = {
        "request": found.requests,
        "round": found.rounds,
        "transfer": found.transfers,
        "io": found.ios,
        "device": [page for _, page in found.device_pages],
        "host": [page for _, page in found.host_pages],
    }
    return " ".join(f"{name} {','.join(map(str, ids))}" for name, ids in parts.items() if ids)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # What a race spoils by itself: pages both write, and what a reader made of the pages.
        ("F:w5 L:w5", "device 5"),
        ("F:w5,6 L:w6,7", "device 6"),
        ("F:w5 B:r5W1", "transfer 1 host 1"),
        ("L:R1w5 F:r5w6", "round 1 device 6"),
        ("F:r5w6 L:R1w5", "round 0 device 6"),
        ("B:r5W1 F:w5", "transfer 0 host 1"),
        # A round that reads a spoiled page is spoiled; one that does not is not.
        ("F:w5 L:w5 F<L F:r5w6", "round 3 device 5,6"),
        ("F:w5 L:w5 F<L F:r4w6", "device 5"),
        ("F:w5 L:w5 F<L F:r5w6 F:r6w7 F:r7w8", "round 3,4,5 device 5,6,7,8"),
        ("F:w5 L:w5 F<L F:r5w6 F:r8w7 F:r7w9", "round 3 device 5,6"),
        # Copies: page by page, layer by layer.
        ("F:w5 L:w5 B<L B<F B:r4,5W1,2", "transfer 4 device 5 host 2"),
        ("F:w5 L:w5 B<L B<F B:r4,6W1,2", "device 5"),
        ("F:w5 L:w5 B<L B<F B:r4,5W1", "transfer 4 device 5 host 1"),  # fewer places than pages: all by all
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@2", "transfer 4 device 5 host 1"),
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@0-1", "device 5"),
        ("F:w5@0 L:w5 F<L F:r5w6@0", "round 3 device 5,6"),
        ("F:w5@0 L:w5 F<L F:r5w6@1", "device 5"),
        ("F:w5 L:w5 B<L B<F B:r4,5W1W2", "transfer 4 device 5 host 2"),
        ("F:w4 L:w4 B<L B<F B:r4,5W1W2", "transfer 4 device 4 host 1"),
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@2 L<B L:R1w7 F<L F:r7w8@0", "transfer 4,6 device 5,7 host 1"),
        ("F:w5@2 L:w5@2 B<L B<F B:r5W1@2 L<B L:R1w7@2 F<L F:r7w8@2", "round 8 transfer 4,6 device 5,7,8 host 1"),
        ("F:w5@2 L:w5@2 F<L F:r5w6@2 F:r6w7@0", "round 3,4 device 5,6,7"),  # the next token is wrong at all layers
        ("F:w1023 L:w1023 F<L F:r2000w6", "device 1023"),
        # restore -> forward -> backup -> restore -> forward
        (
            "F:w5 L:R9w5 F<L F:r5w6 B<F B:r6W3 L<B L:R3w7 F<L F:r7w8",
            "round 3,9 transfer 5,7 device 5,6,7,8 host 3",
        ),
        ("F:w5 L:R9w5 F<L F:r5w6 B<F B:r4W3 L<B L:R3w7 F<L F:r7w8", "round 3 device 5,6"),
        # A whole overwrite by a clean copy cleans, at its layers; a round, which writes parts, does not.
        ("F:w5 L:w5 L:R2w5 F<L F:r5w6", "device 5"),
        ("F:w5 L:w5 L:R2w5@0 F<L F:r5w6@0", "device 5"),
        ("F:w5 L:w5 L:R2w5@0 F<L F:r5w6@1", "round 4 device 5,6"),
        ("F:w5 L:w5 F<L F:w5 F:r5w6", "round 4 device 5,6"),
        ("F:w5 B:r5W1 F:w6 B<F B:r6W1 L<B L:R1w7", "transfer 1 host 1"),
        ("F:w5 B:r5W1 L<B L:R1w7", "transfer 1,3 device 7 host 1"),
        ("F:w5 B:r5W1 L<B L:R1w7 L:R2w7 F<L F:r7w8", "transfer 1,3 device 7 host 1"),
        ("B:r5W1 F:w5@0 F:w5@1 L<B L:R1w7@1 F<L F:r7w8@1", "round 6 transfer 0,4 device 7,8 host 1"),
        ("B:r5W1 F:w5@0 F:w5@1 L<B L:R1w7@2 F<L F:r7w8@2", "transfer 0 host 1"),
        # What an operation made before the race was noticed: steps 1 to 3 read on from the round of step 0.
        ("F:r5w6 B<F B:r6W1 L<B L:R1w7 M:w5", "round 0 transfer 2,4 device 6,7 host 1"),
        ("F:r5w6 B<F B:r4W1 L<B L:R1w7 M:w5", "round 0 device 6"),
        ("F:r5w6 B<F B:r6W1 L<B L:R2w7 M:w5", "round 0 transfer 2 device 6 host 1"),
        ("X:r8w9 F:w5 L:R2w5 Y:w8 F<L F:r5w6", "round 5 device 5,6"),  # another race's past does not clean this one
    ],
)
def test_rule(text: str, expected: str) -> None:
    """What the first race of a history spoils."""
    assert reached(text) == expected


def measured(text: str, order: str, *more: Record, then: str = "", rows: bool = True) -> tuple[Analyzer, list[Finding]]:
    """An analyzer fed with a history whose operations ran in ``order``, one after the other: ``L F`` by their streams.

    Each round has one row, of the request with its number, unless ``rows`` is false.
    """
    whole = History(f"{text} {then}").records
    end = len(whole) - len(then.split())
    records: list[Record] = [*whole[:end], *more, *whole[end:]]
    queues: dict[str, list[OpId]] = {}
    for position, record in enumerate(records):
        if isinstance(record, Kernel) and rows and record.rows is None:
            records[position] = msgspec.structs.replace(record, rows=one_row(record))
        if isinstance(record, Kernel | Memcpy):
            name = next(d.text for d in records if isinstance(d, Define) and d.id == record.stream)
            queues.setdefault(name, []).append(record.op)
    for place, name in enumerate(order.split()):
        start_ns = 100 * place
        records.append(Times(queues[name].pop(0), MAIN, 1_000_000, start_ns, start_ns + 100))
    assert not any(queues.values()), "an operation without times"
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return analyzer, sink.findings


def one_row(record: Kernel) -> PageIds:
    """Rows of a round with one request, its number."""
    read, written = (
        {page for access in record.accesses if access.mode is mode for page in access.ids.tolist()}
        for mode in (Mode.READ, Mode.WRITE)
    )
    pages = [*(read - written), *(read & written), *(written - read)]
    return pack_rows([record.group], [page_ids(pages)], [len(read)], [len(written)])


@pytest.mark.parametrize(
    ("text", "order", "expected"),
    [
        # In the order of issue nothing is wrong.
        ("F:w5 L:w5", "F L", ""),
        ("F:w5 L:w5", "L F", "device 5"),
        ("F:r5w6 L:w5", "F L", ""),
        ("F:r5w6 L:w5", "L F", "request 0 round 0 device 6"),
        ("F:w5 B:r5W1", "F B", ""),
        ("F:w5 B:r5W1", "B F", "transfer 1 host 1"),
        ("L:R1w5 F:r5w6", "L F", ""),
        ("L:R1w5 F:r5w6", "F L", "request 1 round 1 device 6"),
        ("B:r5W1 F:w5", "F B", "transfer 0 host 1"),
        # A late write is read by who comes after it, and by nobody else.
        ("F:w5 L:w5 G<L G:r5w6", "L F G", "request 3 round 3 device 5,6"),
        ("F:w5 L:w5 G<L G:r5w6", "L G F", "device 5"),
        ("F:w5 L:w5 G<L G:r5w6", "F L G", ""),
        # What a copy overwrites is clean again, at its layers, wherever it was issued.
        ("F:w5 L:w5 L:R2w5 F<L F:r5w6", "L F L F", "device 5"),
        ("F:w5 L:w5 L:R2w5@0 F<L F:r5w6@1", "L F L F", "request 4 round 4 device 5,6"),
        ("F:w5@0 L:w5 F<L F:r5w6@1", "L F F", "device 5"),
        # What a reader should not see any more it does not miss, and it may be late itself.
        ("F:w5 L:w5 B<L B:r5W1", "L B F", "device 5"),
        ("F:w5 L:w5 B<L B:r5W1", "F L B", ""),
        ("F:w5 L:w5 B<L B:r5W1", "L F B", "transfer 3 device 5 host 1"),
        # On from there: restore, forward, backup, restore, forward.
        (
            "F:w5 L:R9w5 F<L F:r5w6 B<F B:r6W3 L<B L:R3w7 F<L F:r7w8",
            "L F F B L F",
            "request 3,9 round 3,9 transfer 5,7 device 5,6,7,8 host 3",
        ),
    ],
)
def test_measured(text: str, order: str, expected: str) -> None:
    """What the first race of a history spoiled, in the order in which its operations ran: no more and no less."""
    analyzer, findings = measured(text, order)
    found = analyzer.blast_radius((findings[0].earlier.op, findings[0].later.op))
    assert named(found) == expected
    assert found.exact


def test_what_a_reader_does_not_miss() -> None:
    """A write is missed only by who should have found it: not once a copy has replaced it, nor under a new owner."""

    def missed(text: str, *more: Record, then: str) -> str:
        analyzer, findings = measured(text, "L G F" if "L" in text else "G F", *more, then=then)
        first, last = findings[0].earlier.op, findings[-1].later.op
        found = analyzer.blast_radius((first, last))
        assert found.exact
        return named(found)

    assert missed("F:w5", then="G:r5w6") == "request 1 round 1 device 6"
    assert missed("F:w5 L:w5 G<L", then="G:r5w6") == ""
    assert missed("F:w5 L:w5@0 G<L", then="G:r5w6@0") == ""
    assert missed("F:w5 L:w5@0 G<L", then="G:r5w6@1") == "request 3 round 3 device 6"
    assert missed("F:w5", alloc(5), then="G:r5w6") == ""
    assert missed("F:w5", alloc(4), then="G:r5w6") == "request 1 round 1 device 6"


def two_rows(*, reads: tuple[int, int] = (1, 1)) -> Kernel:
    """Round 50: request 1 uses pages 5 and 6, request 2 pages 7 and 8, and each writes the second of its pages."""
    pages = [page_ids([5, 6]), page_ids([7, 8])]
    accesses = device(Mode.READ, page_ids([5, 6, 7, 8])), device(Mode.WRITE, page_ids([6, 8]))
    rows = pack_rows([1, 2], pages, list(reads), [1, 1])
    return Kernel(OpId(90), MAIN, 0, StreamId(0), 1, 50, 0, ALL_LAYERS, accesses, rows)


def test_rows() -> None:
    """A request is in the radius if its own row read a wrong page; without rows the round is one."""
    assert named(radius("F:w5 L:w5 h<*", two_rows())) == "request 1 round 50 device 5,6"
    assert named(radius("F:w7 L:w7 h<*", two_rows())) == "request 2 round 50 device 7,8"
    assert named(radius("F:w4 L:w4 h<*", two_rows())) == "device 4"
    whole = msgspec.structs.replace(two_rows(), rows=None)
    assert named(radius("F:w5 L:w5 h<*", whole)) == "round 50 device 5,6,8"
    damaged = msgspec.structs.replace(two_rows(), rows=page_ids([3, 1]))
    assert named(radius("F:w5 L:w5 h<*", damaged)) == "round 50 device 5,6,8"


def test_a_round_that_also_reads_something_else_wrong_is_spoiled_as_a_whole() -> None:
    """Which of its rows used the host page is not known."""
    both = msgspec.structs.replace(two_rows(), accesses=(*two_rows().accesses, host(Mode.READ, page_ids([3]))))
    assert radius("F:w5W3 L:w5W3 h<*", both).requests == (1, 2)
    assert radius("F:w5 L:w5 h<*", both).requests == (1,)


def test_a_row_that_went_wrong_stays_wrong_in_later_segments_of_its_round() -> None:
    """Whatever they read themselves: what they compute comes from what the segments before have computed."""
    pages = [page_ids([9]), page_ids([10])]
    more = {"op": OpId(91), "accesses": (device(Mode.WRITE, page_ids([9, 10])),)}
    later = msgspec.structs.replace(two_rows(), rows=pack_rows([1, 2], pages, [0, 0], [1, 1]), **more)
    assert named(radius("F:w5 L:w5 h<*", two_rows(), later)) == "request 1 round 50 device 5,6,9"
    assert named(radius("F:w7 L:w7 h<*", two_rows(), later)) == "request 2 round 50 device 7,8,10"
    other = msgspec.structs.replace(later, group=51)
    assert named(radius("F:w5 L:w5 h<*", two_rows(), other)) == "request 1 round 50 device 5,6"


def test_a_fresh_page_is_not_read() -> None:
    """A row that only writes a page reads nothing there but its own."""
    assert named(radius("F:w6 L:w6 h<*", two_rows())) == "device 6"
    assert named(radius("F:w6 L:w6 h<*", two_rows(reads=(2, 1)))) == "request 1 round 50 device 6"


def test_discarded_rows() -> None:
    """What was thrown away does not count for its request; what it wrote is there all the same."""
    gone = RowsDiscarded(OpId(91), MAIN, 0, 50, page_ids([1]))
    assert named(radius("F:w5 L:w5 h<*", two_rows(), gone)) == "round 50 device 5,6"
    other = RowsDiscarded(OpId(91), MAIN, 0, 50, page_ids([2]))
    assert named(radius("F:w5 L:w5 h<*", two_rows(), other)) == "request 1 round 50 device 5,6"


def test_exact_only_if_measured_and_told_apart() -> None:
    """Without times, with operations that overlapped, or without rows, the radius is what can be wrong."""
    analyzer, (finding,) = measured("F:r5w6 L:w5", "L F")
    assert analyzer.blast_radius(finding.fingerprint).exact
    analyzer, (finding,) = measured("F:r5w6 L:w5", "L F", rows=False)
    found = analyzer.blast_radius(finding.fingerprint)
    assert (named(found), found.exact, found.complete) == ("round 0 device 6", False, True)
    found = radius("F:r5w6 L:w5")
    assert (named(found), found.exact) == ("round 0 device 6", False)

    records = list(History("F:r5w6 L:w5").records)
    records += [Times(OpId(0), MAIN, 0, 0, 100), Times(OpId(1), MAIN, 0, 50, 150)]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    found = analyzer.blast_radius(sink.findings[0].fingerprint)
    assert (named(found), found.exact) == ("round 0 device 6", False)


@pytest.mark.parametrize(("start", "exact"), [(50, False), (100, True)], ids=["overlapped", "in order"])
def test_two_that_overlapped_are_not_told_apart(start: int, exact: bool) -> None:
    """Both times are known, and yet which write came last is not."""
    times = [Times(OpId(0), MAIN, 0, 0, 100), Times(OpId(1), MAIN, 0, start, 150)]
    analyzer, findings = analysed("F:w5 L:w5", *times)
    found = analyzer.blast_radius((findings[0].earlier.op, findings[0].later.op))
    assert (named(found), found.exact) == ("" if exact else "device 5", exact)


def test_a_short_operation_is_not_placed() -> None:
    """An operation shorter than the clock error cannot be put in order."""
    records: list[Record] = list(History("F:w5 L:w5").records)
    for op, start_ns in ((1, 0), (0, 1000)):
        records.append(Times(OpId(op), MAIN, 0, start_ns, start_ns + 100, 60))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    assert not analyzer.blast_radius(sink.findings[0].fingerprint).exact


def alloc(*pages: int) -> PageAlloc:
    """Pages get a new owner."""
    return PageAlloc(OpId(90), MAIN, 0, 2, device(Mode.WRITE, page_ids(pages)))


def test_new_owner() -> None:
    """The next owner's contents are its own, unless the page races again."""
    assert reached("F:w5 L:w5 F<L", then="F:r5w6") == "round 3 device 5,6"
    assert reached("F:w5 L:w5 F<L", alloc(5), then="F:r5w6") == "device 5"
    assert reached("F:w5 L:w5 F<L", alloc(4), then="F:r5w6") == "round 3 device 5,6"

    analyzer, findings = analysed("F:w5 L:w5 F<L L<F", alloc(5), then="F:w5 L:w5 F<L F:r5w6")
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.rounds, second.rounds) == ((), (7,))
    assert second.device_pages == ((0, 5), (0, 6))


def test_new_owner_before_the_race_is_noticed() -> None:
    """What was spoiled before is replayed with its owners."""
    assert reached("F:r5w6", then="X<F X:r6w9 M:w5") == "round 0,2 device 6,9"
    assert reached("F:r5w6", alloc(6), then="X<F X:r6w9 M:w5") == "round 0 device 6"


def segment(number: int, layer: int, read: int, write: int) -> Kernel:
    """One layer of a forward round on the history's first stream."""
    accesses = device(Mode.READ, page_ids([read])), device(Mode.WRITE, page_ids([write]))
    return Kernel(OpId(90 + layer), MAIN, 0, StreamId(0), 1, number, 0, (layer, layer + 1), accesses)


def test_round_stays_spoiled() -> None:
    """Later segments of a round follow from its first ones, whatever they read; other rounds do not."""
    assert reached("F:w5 L:w5 h<*", segment(50, 0, 5, 6), segment(50, 1, 7, 8)) == "round 50 device 5,6,8"
    assert reached("F:w5 L:w5 h<*", segment(50, 0, 5, 6), segment(51, 1, 7, 8)) == "round 50 device 5,6"


def test_wrong_indices() -> None:
    """A copy that may have read wrong indices has written anything anywhere it wrote."""
    index = page_ids([3])
    fill = Kernel(OpId(90), MAIN, 0, StreamId(7), 1, 0, 0, ALL_LAYERS, (Access(Space.BUFFER, Mode.WRITE, index),))
    copy = Memcpy(
        OpId(91),
        MAIN,
        0,
        StreamId(8),
        1,
        60,
        0,
        ALL_LAYERS,
        (
            host(Mode.READ, page_ids([1, 2])),
            device(Mode.WRITE, page_ids([4, 7])),
            Access(Space.BUFFER, Mode.READ, index),
        ),
    )
    assert reached("F:w5", fill, copy) == "transfer 60 device 4,7"


def test_a_page_of_a_newer_owner_is_not_marked_for_an_older_one() -> None:
    """A row of an older owner may write late; what the newer owner holds, at other layers too, stays as it is."""
    page = page_ids([5])
    owners = spread.Owners([(10, device(Mode.WRITE, page))])
    state = spread.Spread().fork(owners, {})
    state.taint(spread.Wrong((Space.DEVICE, 0), page, 2, 1, 20))
    state.taint(spread.Wrong((Space.DEVICE, 0), page, 1, 2, 5))
    assert state.sources() == 1
    assert state.ever(2) == [(Space.DEVICE, 0, 5)]
    state.taint(spread.Wrong((Space.DEVICE, 0), page, 1, 2, 20))
    assert state.sources() == 3
    state.settle(15)
    assert state.sources() == 3
    other = spread.Spread().fork(owners, {})
    other.taint(spread.Wrong((Space.DEVICE, 0), page, 2, 1, 5))
    other.settle(15)
    assert other.sources() == 0
    assert other.ever(1) == [(Space.DEVICE, 0, 5)]


def test_two_races_are_told_apart() -> None:
    """Each race has its own radius; a fingerprint has that of all its races."""
    analyzer, findings = analysed("F:w5 L:w5 F<L L<F F:w8 L:w8 F<L F:r5w6 F:r8w9")
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.rounds, first.device_pages) == ((7,), ((0, 5), (0, 6)))
    assert (second.rounds, second.device_pages) == ((8,), ((0, 8), (0, 9)))
    assert findings[0].fingerprint == findings[1].fingerprint
    assert analyzer.blast_radius(findings[0].fingerprint).rounds == (7, 8)

    analyzer, findings = analysed("F:w5 L:w5 F<L L<F F:w8 L:w8 F<L F:r5w6 F:r8w6")  # both in one page
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.device_pages, second.device_pages) == (((0, 5), (0, 6)), ((0, 6), (0, 8)))

    analyzer, findings = analysed("F:r5w6 L:w5 F<L L<F F:r8w9 L:w8")  # both noticed late
    first, second = (analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings)
    assert (first.rounds, second.rounds) == ((0,), (4,))


def test_relocation_and_storage() -> None:
    """A relocation carries taint to the new place; I/O out of a spoiled page is in the radius, I/O in cleans."""
    move = Relocate(
        OpId(90),
        MAIN,
        0,
        StreamId(1),
        0,
        ALL_LAYERS,
        (device(Mode.READ, page_ids([4, 5])), device(Mode.WRITE, page_ids([7, 8]))),
    )
    assert reached("F:w5 L:w5 F<L h<*", move, then="h<* F:r8w6") == "round 5 device 5,6,8"
    assert reached("F:w5 L:w5 F<L h<*", move, then="h<* F:r7w6") == "device 5,8"

    def io(kind: IoKind, mode: Mode, page: int) -> IoBegin:
        return IoBegin(OpId(90), MAIN, 0, 40, kind, 0, ALL_LAYERS, (host(mode, page_ids([page])),))

    history = "F:w5 B:r5W1 h<*"
    assert reached(history, io(IoKind.STORAGE_WRITE, Mode.READ, 1)) == "transfer 1 io 40 host 1"
    assert reached(history, io(IoKind.STORAGE_WRITE, Mode.READ, 2)) == "transfer 1 host 1"
    assert radius(history, io(IoKind.STORAGE_READ, Mode.WRITE, 1), then="L:R1w7").device_pages == ()


def test_text() -> None:
    """One line of the explanation."""
    analyzer, (finding, *_) = analysed("F:w5 L:w5 F<L F:r5w6 F:r6w7 B<F B:r7W1")
    text = explain(finding, analyzer.blast_radius((finding.earlier.op, finding.later.op)))
    assert "\n  spoiled  at most 2 rounds (3–4), 3 device pages, 1 host page\n" in text
    analyzer, (finding,) = analysed("F:w5 L:w5")
    assert "spoiled  at most 1 device page\n" in explain(finding, analyzer.blast_radius(finding.fingerprint))
    assert "spoiled" not in explain(finding)
    analyzer, (finding,) = measured("F:r5w6 L:w5", "L F")
    text = explain(finding, analyzer.blast_radius(finding.fingerprint))
    assert "spoiled  1 request, 1 round (0), 1 device page\n" in text
    analyzer, (finding,) = measured("F:r5w6 L:w5", "F L")
    assert "spoiled  nothing\n" in explain(finding, analyzer.blast_radius(finding.fingerprint))


def test_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit makes the radius incomplete, and is never silently left out."""
    monkeypatch.setattr(spread, "MAX_REACHED", 1)
    assert not radius("F:w5 L:w5 F<L F:r5w6 F:r6w7").complete
    assert not Analyzer(RecordingSink()).blast_radius("HC-00000000").complete

    monkeypatch.undo()
    monkeypatch.setattr(taint, "MAX_RECENT", 3)
    assert radius("F:r5w6 F:w1 L:w5").complete
    assert not radius("F:r5w6 F:w1 F:w2 L:w5").complete
    assert radius("F:w5 L:w5 S:w1 S:w2").complete  # the half that is played for good ends with the race

    monkeypatch.undo()
    monkeypatch.setattr(taint, "MAX_SOURCES", 1)
    analyzer, findings = analysed("F:w5 L:w5 F<L L<F F:w8 L:w8 F<L F:r5w6 F:r8w9")
    found = [analyzer.blast_radius((f.earlier.op, f.later.op)) for f in findings]
    assert found[0] == found[1]
    assert found[0].rounds == (7, 8)
    assert not found[0].complete


def test_a_new_owner_at_the_end_of_what_is_played_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of six operations the first three are; the pages are given out before the third."""
    monkeypatch.setattr(taint, "MAX_RECENT", 5)
    later = "S:w9 S:w9 S:w9 S:w9 F:r5w6"
    assert reached("F:w5 L:w5 F<L", alloc(5), then=later) == "device 5"
    assert reached("F:w5 L:w5 F<L", alloc(4), then=later) == "round 7 device 5,6"


def test_many_allocator_calls_in_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are forgotten too, and what they ended stays ended."""
    monkeypatch.setattr(taint, "MAX_RECENT", 3)
    text = "F:w5 L:w5 S:w1 S:w1 F<L {} " + "h+9 " * 30 + "F:r5w6"
    assert reached(text.format("h+5")) == "device 5"
    assert reached(text.format("h+4")) == "round 36 device 5,6"


def test_bounds_of_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Discarded rows are known for the newest rounds, and fingerprints for the first races."""
    monkeypatch.setattr(taint, "MAX_RECENT", 3)
    gone = [RowsDiscarded(OpId(91), MAIN, 0, number, page_ids([1])) for number in (50, 51, 52, 53)]
    assert radius("F:w5 L:w5 h<*", two_rows(), *gone[:3]).requests == ()
    assert radius("F:w5 L:w5 h<*", two_rows(), *gone).requests == (1,)

    monkeypatch.setattr(taint, "MAX_RACES", 1)
    analyzer, findings = analysed("F:w5 L:w5 F:w8 S:w8")
    assert len({finding.fingerprint for finding in findings}) == 2
    assert len(analyzer._taint._fingerprints) == 1


def test_json() -> None:
    """``check --json`` gives each race its radius, in the scenario's own names."""
    path = Path(__file__).parents[1] / "cases" / "05-load-over-block-still-being-read.json"
    result = CliRunner().invoke(command, ["--json", str(path)], standalone_mode=False)
    (race,) = json.loads(result.output)["races"]
    assert race["between"] == ["s1", "s7"]
    assert race["tainted"] == {
        "rounds": ["s1"],
        "transfers": ["s4"],
        "ios": [],
        "pages": [20],
        "host_pages": [7],
        "requests": [],
        "complete": True,
        "exact": False,
    }


@pytest.mark.parametrize(("page", "rounds"), [(5, ()), (4, (4,))])
def test_a_radius_that_was_asked_for_is_not_kept_beyond_an_allocation(page: int, rounds: tuple[int, ...]) -> None:
    """What came since the last answer counts, owners too."""
    records = History(f"F:w5 L:w5 F<L h+{page} F:r5w6").records
    analyzer = Analyzer(RecordingSink())
    analyzer.feed(records[:-1])
    assert analyzer.blast_radius((OpId(0), OpId(1))).device_pages == ((0, 5),)
    analyzer.feed(records[-1:])
    assert analyzer.blast_radius((OpId(0), OpId(1))).rounds == rounds

    analyzer = Analyzer(RecordingSink())
    analyzer.feed(records[:-2])
    analyzer.blast_radius((OpId(0), OpId(1)))
    analyzer.feed(records[-2:])
    assert analyzer.blast_radius((OpId(0), OpId(1))).rounds == rounds


def test_a_fingerprint_has_the_radius_of_its_own_races() -> None:
    analyzer, (first, second) = analysed("F:w5 L:w5 S:w1 B:r1W1")
    found = analyzer.blast_radius(second.fingerprint)
    assert (found.device_pages, found.host_pages) == ((), ((0, 1),))
    assert analyzer.blast_radius(first.fingerprint).device_pages == ((0, 5),)


def test_a_race_without_a_radius_lends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """One race is told apart; another kind has no radius, and its fingerprint must not name the first one's."""
    monkeypatch.setattr(taint, "MAX_SOURCES", 1)
    analyzer, findings = analysed("F:w5 L:w5 S:w1 B:r1W1")
    first, second = findings
    assert analyzer.blast_radius(first.fingerprint).device_pages == ((0, 5),)
    assert analyzer.blast_radius(second.fingerprint).device_pages == ()
    assert not analyzer.blast_radius(second.fingerprint).complete


@pytest.mark.parametrize(("page", "rounds"), [(5, ()), (4, (1005,))])
def test_owners_are_known_however_many_allocations_came(
    page: int, rounds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All operations are forgotten, then the allocations behind them: the page has its new owner all the same."""
    monkeypatch.setattr(taint, "MAX_RECENT", 8)
    round_ = History("F:w5 F:r5w6").records[-1]
    assert isinstance(round_, Kernel)
    fields = (0, round_.stream, 0, 1005, 0, ALL_LAYERS, round_.accesses)
    for before in range(30, 70):  # also right behind those that are forgotten together
        analyzer = Analyzer(RecordingSink())
        analyzer.feed(History("F:w5 L:w5 F<L").records)
        analyzer.feed(History("h+9 " * before + f"h+{page} " + "h+9 " * 70).records)
        analyzer.feed([Kernel(OpId(1005), MAIN, *fields)])
        assert analyzer.blast_radius((OpId(0), OpId(1))).rounds == rounds


@pytest.mark.parametrize(("layer", "rounds"), [(0, (8,)), (1, ())])
def test_a_copy_of_other_shape_hands_on_layer_by_layer(layer: int, rounds: tuple[int, ...]) -> None:
    """Which page went where is not known, but the layer is."""
    text = "F:w5@0 L:w5@0 B<L B<F B:r5,6W1@0-1 L<B L:R1w7@0-1 F<L"
    assert radius(text, then=f"F:r7w8@{layer}").rounds == rounds


@pytest.mark.parametrize(("timed", "exact"), [((0, 1, 2), True), ((0, 1), False)])
def test_one_operation_without_times_makes_all_radii_vague(timed: tuple[int, ...], exact: bool) -> None:
    """Even that of a race whose order was kept."""
    times = [Times(OpId(op), MAIN, 0, 100 * op, 100 * op + 50) for op in timed]
    found = radius("F:w5 L:w5 S:w1", *times)
    assert (found.complete, found.exact, found.device_pages) == (True, exact, ())


def test_a_race_that_nobody_knows_has_no_radius() -> None:
    analyzer, _ = analysed("F:w5 L:w5")
    for unknown in ((OpId(7), OpId(8)), "HC-00000000"):
        found = analyzer.blast_radius(unknown)
        assert (found.device_pages, found.rounds, found.complete) == ((), (), False)


@pytest.mark.parametrize(("error_ns", "exact"), [(0, True), (49, True), (50, False)])
def test_a_start_is_known_if_the_error_is_less_than_half_the_time(error_ns: int, exact: bool) -> None:
    """Else its neighbours may have come first: the third operation ran for 100 ns."""
    times = [Times(OpId(op), MAIN, 0, 1000 * op, 1000 * op + 100, error_ns if op == 2 else 0) for op in range(3)]
    assert radius("F:w5 L:w5 S:w1", *times).exact == exact


def test_more_races_than_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last one's radius is not complete; those before it are."""
    monkeypatch.setattr(taint, "MAX_RACES", 2)
    analyzer, findings = analysed("F:w5 L:w5 S:w1 B:r1W1 X:w2 Y:w2", pairs=2)
    found = [analyzer.blast_radius((finding.earlier.op, finding.later.op)) for finding in findings]
    assert [radius.complete for radius in found] == [False, True, False]  # the first is no longer known by its pair


@pytest.mark.parametrize(
    ("layers", "mask"),
    [
        ((0, 3), 0b111),
        ((2, 3), 0b100),
        ((3, 3), 0),
        ((-2, 2), 0b11),
        ((-5, -2), 0),
        ((4, 2), 0),
        ((0, 1 << 30), -1),
        ((2, 1 << 30), -4),
    ],
)
def test_layers_as_bits(layers: tuple[int, int], mask: int) -> None:
    """Beyond the last one that is told apart all count; below 0 there are none."""
    assert spread.layer_mask(layers) == mask
