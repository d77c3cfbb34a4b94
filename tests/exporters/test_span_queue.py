"""The queue gives up ordinary spans first, counts each, and never the ones with a finding while it has others."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from hicache_obs.exporters.span_queue import SpanQueue


def test_findings_leave_first_and_the_oldest_ordinary_one_makes_room() -> None:
    dropped: list[str] = []
    queue = SpanQueue[str](3, dropped.append)
    queue.put(["a", "b", "c"], kept=False)
    queue.put(["X"], kept=True)
    queue.put(["d"], kept=False)

    assert dropped == ["a", "b"]
    assert queue.take(2) == ["X", "c"]
    assert queue.take(9) == ["d"]
    assert queue.take(9) == []


def test_a_queue_full_of_findings_drops_what_comes() -> None:
    dropped: list[str] = []
    queue = SpanQueue[str](2, dropped.append)
    queue.put(["X", "Y", "Z"], kept=True)
    queue.put(["a"], kept=False)

    assert dropped == ["Z", "a"]
    assert queue.take(9) == ["X", "Y"]


def test_what_could_not_be_sent_goes_back_to_the_front_as_far_as_it_fits() -> None:
    queue = SpanQueue[str](3, lambda _: None)
    queue.put(["X", "Y", "Z"], kept=True)
    taken = queue.take(2)
    queue.put(["V"], kept=True)

    assert queue.put_back(taken) == ["X"]
    assert queue.take(9) == ["Y", "Z", "V"]


def test_a_closed_queue_takes_nothing_and_gives_what_it_has() -> None:
    dropped: list[str] = []
    queue = SpanQueue[str](3, dropped.append)
    queue.put(["a"], kept=False)
    queue.close()
    queue.put(["b"], kept=True)

    assert (dropped, queue.take(9)) == (["b"], ["a"])


def test_a_burst_of_40_000_spans_loses_none_with_a_finding_and_counts_the_rest() -> None:
    dropped: Counter[bool] = Counter()
    queue = SpanQueue[tuple[int, bool]](4096, lambda span: dropped.update([span[1]]))
    for number in range(40_000):
        queue.put([(number, number % 40 == 0)], kept=number % 40 == 0)
    left = Counter(kept for _, kept in queue.take(40_000))

    assert left[True] == 1000
    assert dropped[True] == 0
    assert left[False] + dropped[False] == 39_000


@given(st.integers(1, 8), st.lists(st.tuples(st.booleans(), st.integers(0, 4))))
def test_nothing_is_lost_uncounted(capacity: int, steps: list[tuple[bool, int]]) -> None:
    dropped: list[int] = []
    queue, put, taken = SpanQueue[int](capacity, dropped.append), 0, 0
    for kept, count in steps:
        queue.put(range(put, put + count), kept=kept)
        put += count
        taken += len(queue.take(1))
        assert len(queue) <= capacity
    assert put == taken + len(dropped) + len(queue)
