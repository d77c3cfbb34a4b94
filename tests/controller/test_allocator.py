"""The page allocator: the order of reuse, refusals that change nothing, and the stamps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.errors import ControllerError, OutOfPages
from hicache_obs.records import PageIds, page_ids


def allocator(pages: int = 8) -> PageAllocator:
    return PageAllocator(pages, name="device")


def test_most_recently_freed_page_is_handed_out_first() -> None:
    pages = allocator()
    assert pages.alloc(4).tolist() == [0, 1, 2, 3]
    pages.free(page_ids([1]))
    pages.free(page_ids([3, 0]))
    assert pages.alloc(4).tolist() == [0, 3, 1, 4]


def test_out_of_pages_changes_nothing() -> None:
    pages = allocator()
    pages.alloc(3)
    with pytest.raises(OutOfPages, match=r"^device pool: 6 pages asked for, 5 of 8 are free$"):
        pages.alloc(6)
    assert pages.available == 5
    assert pages.alloc(5).tolist() == [3, 4, 5, 6, 7]


def test_a_result_is_the_callers_own() -> None:
    pages = allocator()
    first = pages.alloc(2)
    pages.free(first)
    first[:] = 7
    assert pages.alloc(2).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 5], "device pool: free of page 5, which is free already"),
        ([1, 2, 1], "device pool: free names page 1 twice"),
        ([0, 8], "device pool: page 8 is outside 0..7"),
        ([0, -1], "device pool: page -1 is outside 0..7"),
        ([0, 1, 2, 3] * 3, "device pool: free names page 0 twice"),
    ],
)
def test_wrong_free_is_refused_and_changes_nothing(ids: list[int], message: str) -> None:
    pages = allocator()
    pages.alloc(4)
    with pytest.raises(ControllerError) as refused:
        pages.free(page_ids(ids))
    assert str(refused.value) == message
    assert (pages.available, pages.in_use) == (4, 4)
    pages.free(page_ids([0, 1, 2, 3]))  # all of them are still handed out
    assert (pages.available, pages.in_use) == (8, 0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: PageAllocator(0, name="host"), "host pool: 0 pages; expected an integer ≥ 1"),
        (lambda: allocator().alloc(-1), "device pool: alloc(-1); expected an integer ≥ 0"),
        (lambda: allocator().stamp(page_ids([0]), 1, 0), "device pool: ticket 0; expected an integer ≥ 1"),
        (lambda: allocator().stamp(page_ids([-1]), 1, 1), "device pool: page -1 is outside 0..7"),
    ],
)
def test_argument_out_of_range(call: object, message: str) -> None:
    assert callable(call)
    with pytest.raises(ControllerError) as refused:
        call()
    assert str(refused.value) == message


def test_nothing_is_a_valid_request() -> None:
    pages = allocator()
    assert pages.alloc(0).tolist() == []
    pages.free(page_ids([]))
    pages.stamp(page_ids([]), 1, 1)
    assert pages.last_uses(page_ids([])) == {}


def test_free_group_holds_pages_back_until_its_outermost_end() -> None:
    pages = allocator(3)
    pages.alloc(3)
    with pages.free_group():
        pages.free(page_ids([0]))
        with pages.free_group():
            pages.free(page_ids([2, 1]))
        assert (pages.available, pages.in_use) == (0, 0)
        with pytest.raises(OutOfPages, match=r"are free; 3 more come back when the open free group ends$"):
            pages.alloc(1)
        with pytest.raises(ControllerError, match="free of page 2, which is free already"):
            pages.free(page_ids([2]))
    assert pages.alloc(3).tolist() == [1, 2, 0]


def test_free_group_gives_back_after_an_exception() -> None:
    pages = allocator()
    ids = pages.alloc(3)

    def fail_after_one_free() -> None:
        with pages.free_group():
            pages.free(ids[:2])
            pages.free(ids[:1])

    with pytest.raises(ControllerError, match="page 0, which is free already"):
        fail_after_one_free()
    assert (pages.available, pages.in_use) == (7, 1)


def test_last_uses_are_the_highest_tickets_per_stream() -> None:
    pages = allocator()
    forward, load = 7, 9
    pages.stamp(page_ids([0, 1]), forward, 3)
    pages.stamp(page_ids([1, 2]), forward, 4)
    pages.stamp(page_ids([2]), load, 1)
    assert pages.last_uses(page_ids([0])) == {forward: 3, load: 0}
    assert pages.last_uses(page_ids([0, 1])) == {forward: 4, load: 0}
    assert pages.last_uses(page_ids([2, 0])) == {forward: 4, load: 1}
    assert pages.last_uses(page_ids([5])) == {forward: 0, load: 0}


def test_a_late_stamp_never_lowers_a_ticket() -> None:
    pages = allocator()
    pages.stamp(page_ids([0]), 1, 5)
    pages.stamp(page_ids([0, 1]), 1, 2)
    assert [pages.last_uses(page_ids([page])) for page in (0, 1)] == [{1: 5}, {1: 2}]


def test_stamps_outlive_the_owner() -> None:
    pages = allocator()
    ids = pages.alloc(1)
    pages.stamp(ids, 1, 5)
    pages.free(ids)
    assert pages.last_uses(pages.alloc(1)) == {1: 5}


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("alloc"), st.integers(0, 9)),
        st.tuples(st.just("free"), st.integers(0, 30), st.integers(1, 12)),
        st.tuples(st.just("group"), st.just(0)),
        st.tuples(st.just("stamp"), st.integers(0, 30), st.integers(1, 3), st.integers(1, 9)),
    ),
    max_size=50,
)


@given(size=st.integers(1, 24), operations=OPERATIONS)
@settings(max_examples=300, deadline=None)
def test_pages_are_conserved_and_have_one_owner(size: int, operations: list[tuple[str, int, int, int]]) -> None:
    """Against a plain list as the stack. "group" opens a group, and closes it the next time."""
    pages = allocator(size)
    stack, owned, deferred = list(range(size))[::-1], list[int](), list[int]()
    stamps: dict[int, dict[int, int]] = {}
    group = None
    for kind, *arguments in operations:
        if kind == "alloc":
            n = arguments[0]
            if n > len(stack):
                with pytest.raises(OutOfPages):
                    pages.alloc(n)
            else:
                expected = [stack.pop() for _ in range(n)]
                assert pages.alloc(n).tolist() == expected
                owned += expected
        elif kind == "free":
            start, n = arguments
            part = owned[start % len(owned) :][:n] if owned else []
            owned = [page for page in owned if page not in part]
            pages.free(page_ids(part))
            if group is None:
                stack += part
            else:
                deferred += part
        elif kind == "group" and group is None:
            group = pages.free_group()
            group.__enter__()
        elif kind == "group":
            assert group is not None
            group.__exit__(None, None, None)
            group = None
            stack, deferred = stack + deferred, []
        else:
            start, key, ticket = arguments
            ids: PageIds = np.arange(start % size, size, 2, dtype=np.int64)
            pages.stamp(ids, key, ticket)
            table = stamps.setdefault(key, dict.fromkeys(range(size), 0))
            table.update({page: max(table[page], ticket) for page in ids.tolist()})
        assert pages.available == len(stack)
        assert pages.in_use == len(owned)
        assert sorted(stack + owned + deferred) == list(range(size))
    for page in range(size):
        assert pages.last_uses(page_ids([page])) == {key: table[page] for key, table in stamps.items()}
    everything = pages.last_uses(np.arange(size, dtype=np.int64))
    assert everything == {key: max(table.values()) for key, table in stamps.items()}
