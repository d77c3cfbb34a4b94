"""What ranks are compared by: equal decisions are equal numbers, and one that differs is found where it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest

from hicache_obs.fleet.agreement import ANCHOR, Bounds, clock_bounds, compare
from hicache_obs.fleet.decisions import CACHE, COLLECTIVES, DecisionLog, Decisions, SequenceName
from hicache_obs.fleet.run import _together
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    AnyRecord,
    Collective,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    StreamId,
    ThreadId,
    Times,
    device,
    host,
    page_ids,
)

MAIN, OTHER = ThreadId(0), ThreadId(1)
SCHEDULER = SequenceName(CACHE, "thread number 1")


def alloc(*pages: int, op: int = 0, owner: int = 0, thread: ThreadId = MAIN, pool: int = 0) -> PageAlloc:
    return PageAlloc(OpId(op), thread, op, owner, device(Mode.WRITE, page_ids(pages), pool=pool))


def free(*pages: int, op: int = 0) -> PageFree:
    return PageFree(OpId(op), MAIN, op, 0, device(Mode.WRITE, page_ids(pages)))


def copy(direction: Direction, *pages: int, transfer: int = 1, layer: int = 0, op: int = 0, stream: int = 2) -> Memcpy:
    reads, writes = (host, device) if direction is Direction.HOST_TO_DEVICE else (device, host)
    accesses = (reads(Mode.READ, page_ids(pages)), writes(Mode.WRITE, page_ids(pages)))
    return Memcpy(OpId(op), MAIN, op, StreamId(stream), 0, transfer, 0, (layer, layer + 1), accesses, direction)


def load(*pages: int, transfer: int = 1, layer: int = 0, op: int = 0, stream: int = 2) -> Memcpy:
    return copy(Direction.HOST_TO_DEVICE, *pages, transfer=transfer, layer=layer, op=op, stream=stream)


def logged(*records: AnyRecord, wanted: tuple[SequenceName, int] | None = None) -> DecisionLog:
    log = DecisionLog(wanted)
    log.feed(records)
    return log


def hashes(*records: AnyRecord) -> list[int]:
    return list(logged(*records).sequences.get(SCHEDULER, Decisions()).hashes)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([alloc(1, 2)], [alloc(2, 1)]),
        ([alloc(1, op=5, owner=7)], [alloc(1, op=900, owner=8)]),
        ([load(1, transfer=1, stream=2)], [load(1, transfer=31, stream=9)]),
        ([load(1, layer=0), load(1, layer=1)], [load(1, layer=0)]),
        ([alloc(1), Times(OpId(3), MAIN, 9, 1, 2)], [alloc(1)]),
        (
            [alloc(1), Kernel(OpId(1), MAIN, 1, StreamId(0), 0, 1, 0, ALL_LAYERS, (device(Mode.READ, page_ids([1])),))],
            [alloc(1)],
        ),
    ],
    ids=["order of pages", "ids of operation and request", "transfer and stream", "layers", "times", "rounds"],
)
def test_what_processes_number_for_themselves_is_no_decision(one: list[AnyRecord], other: list[AnyRecord]) -> None:
    assert hashes(*one) == hashes(*other) != []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ([alloc(1, 2)], [alloc(1, 3)]),
        ([alloc(1)], [free(1)]),
        ([alloc(1)], [alloc(1, pool=1)]),
        ([alloc(1), free(2)], [free(2), alloc(1)]),
        ([load(1)], [copy(Direction.DEVICE_TO_HOST, 1)]),
        ([load(1), load(1, transfer=2)], [load(1)]),
        ([alloc(1), load(1)], [alloc(1)]),
    ],
    ids=["pages", "free or hand out", "pool", "order", "direction", "a transfer more", "no load-back"],
)
def test_what_is_decided_is(one: list[AnyRecord], other: list[AnyRecord]) -> None:
    assert hashes(*one) != hashes(*other)


def test_threads_are_told_apart_by_name_or_by_when_they_first_decide() -> None:
    named = Define(NO_OP, MAIN, 0, DefineSpace.THREAD, int(OTHER), "prefetch")
    log = logged(alloc(1), named, alloc(2, thread=OTHER), alloc(3))

    assert {name: len(found.hashes) for name, found in log.sequences.items()} == {
        SCHEDULER: 2,
        SequenceName(CACHE, "prefetch"): 1,
    }


def test_a_decision_is_found_again_by_its_place_and_says_what_it_was() -> None:
    log = logged(alloc(4, op=1), free(*range(12), op=2), load(4, op=3), wanted=(SCHEDULER, 1))

    assert log.found is not None
    assert (log.found.text, log.found.op, log.found.host_ns) == (
        "frees device pages 0, 1, 2, 3, 4, 5, 6, 7 and 4 more", OpId(2), 2,
    )  # fmt: skip
    assert logged(alloc(4), wanted=(SCHEDULER, 1)).found is None


def test_a_loss_cuts_the_sequence_unless_no_decision_can_be_among_it() -> None:
    def cut(reason: DropReason) -> list[tuple[int, int]]:
        return logged(alloc(1), Lost(NO_OP, MAIN, 0, 3, reason), alloc(2)).sequences[SCHEDULER].stretches

    assert cut(DropReason.RING_FULL) == [(0, 1), (1, 2)]
    assert cut(DropReason.UNRESOLVED) == cut(DropReason.EDGE) == [(0, 2)]
    begun = logged(Lost(NO_OP, MAIN, 0, 3, DropReason.MISSING), alloc(2)).sequences[SCHEDULER]
    assert (begun.from_start, begun.stretches) == (False, [(0, 1)])


# -- side by side ----------------------------------------------------------------------------------------------------


def decisions(values: Iterable[int], cuts: Sequence[int] = ()) -> Decisions:
    made = Decisions()
    made.hashes.extend(values)
    made.cuts.extend(cuts)
    return made


NUMBERS = [int(value) for value in np.random.default_rng(1).integers(1 << 40, size=200)]


def test_the_first_difference_is_found_and_the_same_without_it_agrees() -> None:
    changed = [*NUMBERS[:70], 5, *NUMBERS[70:]]

    found, same = compare(decisions(NUMBERS), decisions(changed)), compare(decisions(NUMBERS), decisions(NUMBERS))

    assert (found.compared, found.difference) == (70, (70, 70))
    assert (same.compared, same.difference, same.decided) == (200, None, True)


def test_a_sequence_that_ends_earlier_agrees_as_far_as_it_goes() -> None:
    found = compare(decisions(NUMBERS), decisions(NUMBERS[:50]))

    assert (found.compared, found.difference, found.unplaced) == (50, None, 0)


@pytest.mark.parametrize("lost", [1, 30, 120])
def test_what_follows_a_loss_is_laid_where_its_decisions_are_the_same(lost: int) -> None:
    """Also where the oldest segments of a journal are gone."""
    holed = decisions([*NUMBERS[:40], *NUMBERS[40 + lost :]], [40])
    begun = decisions(NUMBERS[lost:], [0])
    wrong = decisions([*NUMBERS[:40], *NUMBERS[40 + lost : 190], 7, *NUMBERS[190:]], [40])

    assert compare(decisions(NUMBERS), holed).compared == 200 - lost
    assert compare(decisions(NUMBERS), begun).compared == 200 - lost
    assert compare(begun, decisions(NUMBERS)).compared == 200 - lost
    assert compare(decisions(NUMBERS), wrong).difference == (190, 190 - lost)


def test_a_difference_right_behind_a_loss_is_found_by_what_follows_it() -> None:
    wrong = decisions([*NUMBERS[:40], *NUMBERS[60:65], 7, *NUMBERS[66:]], [40])

    assert compare(decisions(NUMBERS), wrong).difference == (65, 45)


def test_a_loss_in_both_is_crossed() -> None:
    one = decisions([*NUMBERS[:60], *NUMBERS[70:]], [60])
    other = decisions([*NUMBERS[:120], *NUMBERS[125:]], [120])

    found = compare(one, other)

    assert (found.compared, found.difference) == (200 - 10 - 5, None)


def test_what_cannot_be_placed_is_not_compared_and_nothing_compared_is_undecided() -> None:
    periodic = decisions([1, 2] * 50, [0])
    short = decisions(NUMBERS[100 : 100 + ANCHOR - 1], [0])

    assert compare(decisions([1, 2] * 60), periodic).unplaced == 100
    assert compare(decisions(NUMBERS), short).unplaced == ANCHOR - 1
    assert not compare(decisions(NUMBERS), short).decided
    assert not compare(decisions(NUMBERS), decisions([])).decided


# -- clocks ----------------------------------------------------------------------------------------------------------


def entered(times: Sequence[tuple[int, int]], ahead_ns: int = 0) -> Decisions:
    """Collectives by when they were entered and left."""
    made = decisions(range(len(times)))
    made.entered_ns.extend(ahead_ns + enter for enter, _ in times)
    made.left_ns.extend(ahead_ns + left for _, left in times)
    return made


def test_every_collective_bounds_the_distance_of_two_clocks_from_both_sides() -> None:
    """The first enters at 10 and 110, the second at 14 and 104; both leave at 15 and 112."""
    one, other = entered([(10, 15), (110, 112)]), entered([(14, 15), (104, 112)], ahead_ns=1000)

    assert clock_bounds(one, other, ((0, 0, 2),)) == Bounds(1000 - 1, 1000 + 2, 2)
    assert clock_bounds(one, other, ((0, 0, 1),)) == Bounds(1000 - 1, 1000 + 5, 1)
    assert clock_bounds(one, other, ()) is None


def test_a_call_that_does_not_block_leaves_no_distance() -> None:
    one, other = entered([(10, 11), (100, 101)]), entered([(20, 21), (90, 91)])

    bounds = clock_bounds(one, other, ((0, 0, 2),))

    assert bounds is not None
    assert bounds.low_ns > bounds.high_ns


def test_a_group_that_does_not_block_is_left_aside_where_another_does() -> None:
    """What ``fleet`` says of two ranks by all their groups."""
    fits, tighter, wrong, worse = Bounds(5, 9, 2), Bounds(6, 20, 3), Bounds(9, 1, 4), Bounds(90, 1, 4)

    assert _together([wrong, fits, tighter]) == Bounds(6, 9, 5)
    assert _together([worse, wrong]) == wrong
    assert _together([]) is None


def test_a_collective_is_left_at_the_next_call_of_its_thread() -> None:
    records = [
        Define(NO_OP, MAIN, 0, DefineSpace.SITE, 1, "all_reduce"),
        Define(NO_OP, MAIN, 0, DefineSpace.GROUP, 3, "tp"),
        Collective(OpId(1), MAIN, 10, 3, 5, 1),
        alloc(9, op=12, thread=OTHER),
        Times(OpId(1), MAIN, 11, 1, 2),
        alloc(1, op=15),
        Collective(OpId(2), MAIN, 20, 3, 5, 1),
    ]

    found = logged(*records).sequences[SequenceName(COLLECTIVES, "tp", 5)]

    assert (list(found.entered_ns), list(found.left_ns)) == ([10, 20], [15, -1])
    assert found.hashes[0] == found.hashes[1]
