"""The decision log: ranks here are threads with real connections between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from hicache_obs.controller.decision_log import KEPT, Decision, DecisionLog
from hicache_obs.controller.rank_processes import star
from hicache_obs.errors import RankError

NAMES = ("rank 0", "rank 1", "rank 2")
Body = Callable[[DecisionLog], Any]


@contextmanager
def group(size: int, timeout_s: float = 20) -> Iterator[list[DecisionLog]]:
    logs = [DecisionLog(NAMES[:size], n, links, timeout_s=timeout_s) for n, links in enumerate(star(size))]
    try:
        yield logs
    finally:
        for log in logs:
            log.close()


def together(logs: list[DecisionLog], *bodies: Body) -> list[Any]:
    """What each body returns, or the error it raised; a rank's links are closed as its process would, at its end."""
    results: list[Any] = [None] * len(logs)

    def run(number: int) -> None:
        try:
            results[number] = bodies[number](logs[number])
        except RankError as error:
            results[number] = error
        finally:
            logs[number].close()

    threads = [threading.Thread(target=run, args=(number,)) for number in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
        assert not thread.is_alive(), "a rank hangs"
    return results


def test_ranks_agree_on_the_smallest_and_on_what_the_first_one_publishes() -> None:
    def body(values: list[int], published: list[int] | None) -> Body:
        def run(log: DecisionLog) -> list[list[int]]:
            return [log.agree("acks", values), log.publish("policy", published), log.agree("none", [])]

        return run

    with group(3) as logs:
        results = together(logs, body([3, -1], [7, 8]), body([2, 5], None), body([9, 0], None))
        assert results == [[[2, -1], [7, 8], []]] * 3
        assert {log.digest for log in logs} == {logs[0].digest}
        assert logs[1].newest == (Decision(1, "acks", (2, -1)), Decision(2, "policy", (7, 8)), Decision(3, "none", ()))
        assert all(log.entries == 3 and log.waited_ns > 0 for log in logs)


def test_a_log_keeps_its_newest_entries_and_a_digest_of_all() -> None:
    """Other values long ago: the digests differ, though what is kept is the same."""
    digests = []
    for first in (1, 2):
        with group(1) as (log,):
            for number in range(KEPT + 1):
                log.agree("acks", [first if number == 0 else 0])
            assert (log.entries, len(log.newest), log.newest[0].number) == (KEPT + 1, KEPT, 2)
            digests.append(log.digest)
    assert digests[0] != digests[1]


def test_a_rank_is_told_of_an_entry_before_it_waits() -> None:
    entered = threading.Event()
    with group(2) as logs:
        logs[1].on_enter = lambda what: entered.set()

        def late(log: DecisionLog) -> list[int]:
            assert entered.wait(20)
            return log.agree("acks", [1])

        assert together(logs, late, lambda log: log.agree("acks", [2])) == [[1], [1]]


def stays(log: DecisionLog) -> list[int]:
    log.agree("acks", [1])
    return log.agree("tokens", [4])


def test_a_rank_that_has_ended_is_named_on_every_other() -> None:
    """Also on one that has not come to the entry yet when the first rank gives up."""
    with group(3) as logs:
        _, _, leaver = results = together(logs, stays, stays, lambda log: log.agree("acks", [1]))
        assert leaver == [1]
        assert [str(error) for error in results[:2]] == ["rank 2 has ended before decision 2 (tokens)"] * 2


def test_the_first_rank_has_ended() -> None:
    with group(2) as logs:
        _, error = together(logs, lambda log: log.agree("acks", [1]), stays)
        assert str(error) == "rank 0 has ended before decision 2 (tokens)"


def test_a_rank_that_does_not_come_is_named_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the first one, and where that one does not come, by the others. The first entry may take longer."""
    over = threading.Event()

    def hangs(log: DecisionLog) -> None:
        log.agree("acks", [1])
        over.wait(20)

    def waits(log: DecisionLog) -> None:
        try:
            stays(log)
        finally:
            over.set()

    with group(2, timeout_s=0.2) as logs:
        first, _ = together(logs, waits, hangs)
        assert str(first) == "rank 1: not at decision 2 (tokens) within 0.2 s"
    over.clear()
    with group(2, timeout_s=0.2) as logs:
        _, second = together(logs, hangs, waits)
        assert str(second) == "rank 0: no outcome of decision 2 (tokens) within 0.2 s"
    monkeypatch.setattr("hicache_obs.controller.decision_log.START_S", 0.4)
    over.clear()
    with group(2, timeout_s=0.2) as logs:
        third, _ = together(logs, waits, lambda log: over.wait(20))
        assert str(third) == "rank 1: not at decision 1 (acks) within 0.4 s"


@pytest.mark.parametrize(
    ("theirs", "message"),
    [
        (lambda log: log.agree("tokens", [1]), "ranks differ: rank 1 is at decision 1 (tokens), not decision 1 (acks)"),
        (lambda log: log.agree("acks", [1, 2]), "ranks differ at decision 1 (acks): they enter 1, 2 values"),
    ],
)
def test_ranks_that_enter_something_else_end_with_the_same_words(theirs: Body, message: str) -> None:
    with group(2) as logs:
        results = together(logs, lambda log: log.agree("acks", [1]), theirs)
        assert [str(error) for error in results] == [message] * 2
