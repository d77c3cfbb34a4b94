"""Exploration of host threads: hand-overs in pairs, preemptions, and threads that cannot go on."""

from __future__ import annotations

import itertools
import threading

import pytest

from hicache_obs.findings import ExitCode, Hazard
from hicache_obs.records import ThreadPost, ThreadRecv, Work
from hicache_obs.testing import Bounds, World, execute, explore, races
from hicache_obs.testing.turns import Turns

# -- hand-overs -------------------------------------------------------------------------------------------------------


def hand_over(pages, *, after_the_sync: bool):
    """A producer fills a page and hands it to a worker, which restores into it on a stream of its own."""

    def program(world: World) -> None:
        dev = world.device
        forward, load = dev.Stream("forward"), dev.Stream("load-back")
        ready = world.channel("pages")

        def worker() -> None:
            page = ready.receive()
            pages.write(dev, load, page, copy=True)

        thread = world.spawn(worker, name="worker")
        pages.write(dev, forward, 5)
        done = forward.record_event()
        if not after_the_sync:
            ready.post(5)
        done.synchronize()
        if after_the_sync:
            ready.post(5)
        thread.join()

    return program


def test_handed_over_after_the_sync_the_page_is_safe(pages):
    found = explore(hand_over(pages, after_the_sync=True))
    assert found.exit_code is ExitCode.CLEAN
    assert found.turns > 5
    assert found.checks[Hazard.WAW_FORWARD_RESTORE] == found.runs


def test_handed_over_before_the_sync_it_is_not(pages):
    """In every run: that the host did wait in some of them is no order if the worker does not hear of it."""
    found = explore(hand_over(pages, after_the_sync=False))
    (race,) = found.races.values()
    assert race.example.hazard is Hazard.WAW_FORWARD_RESTORE
    assert race.runs == found.runs > 1


@pytest.mark.parametrize(("through", "racy"), [("channel", False), ("variable", True)])
def test_a_value_seen_by_chance_orders_nothing(pages, through, racy):
    """The same synchronisation and the same page, handed over with an edge or without."""

    def program(world: World) -> None:
        dev = world.device
        forward, load = dev.Stream("forward"), dev.Stream("load-back")
        ready, seen = world.channel("pages"), []

        def worker() -> None:
            if through == "channel":
                ready.receive()
            else:
                world.switch()
                if not seen:
                    return
            pages.write(dev, load, 5, copy=True)

        thread = world.spawn(worker, name="worker")
        pages.write(dev, forward, 5)
        forward.synchronize()
        if through == "channel":
            ready.post(5)
        else:
            seen.append(5)
        thread.join()

    assert bool(explore(program).races) == racy


@pytest.mark.parametrize("after_the_sync", [True, False])
def test_an_independent_judge_finds_the_same_races_in_every_order(pages, after_the_sync):
    judged = []

    def on_run(_, run) -> None:
        judged.append({(f.earlier.op, f.later.op) for f in run.findings} == races(run.records, polled=True))

    explore(hand_over(pages, after_the_sync=after_the_sync), on_run=on_run)
    assert len(judged) > 5
    assert all(judged)


def test_a_thread_knows_what_its_maker_knew_and_a_join_tells(pages):
    """Without the edges of start and join all three writes race."""

    def program(world: World) -> None:
        dev = world.device
        a, b, c = (dev.Stream(name) for name in "abc")

        def body() -> None:
            pages.write(dev, b, 1)
            b.synchronize()

        pages.write(dev, a, 1)
        a.synchronize()
        world.spawn(body, name="child").join()
        pages.write(dev, c, 1)

    found = explore(program)
    assert found.exit_code is ExitCode.CLEAN
    kinds = [type(record) for record in execute(program, "").records if isinstance(record, ThreadPost | ThreadRecv)]
    assert kinds == [ThreadPost, ThreadRecv, ThreadPost, ThreadRecv]


def test_what_a_maker_learns_later_its_thread_does_not_know(pages):
    def program(world: World) -> None:
        dev = world.device
        a, b = dev.Stream("a"), dev.Stream("b")
        pages.write(dev, a, 1)
        thread = world.spawn(lambda: pages.write(dev, b, 1), name="child")
        a.synchronize()
        thread.join()

    assert explore(program).races != {}


# -- preemptions ------------------------------------------------------------------------------------------------------


def check_then_act(pages, *, claimed_first: bool):
    """Two threads look whether a page is free, and use it. Between the look and the use there is a stream call."""

    def program(world: World) -> None:
        dev = world.device
        free = [5]

        def use(name: str):
            stream = dev.Stream(name)

            def body() -> None:
                if free:
                    page = free[0]
                    if claimed_first:
                        free.clear()
                    stream.wait_event(dev.Event())
                    pages.write(dev, stream, page)
                    free.clear()

            return body

        threads = [world.spawn(use(name), name=name) for name in ("first", "second")]
        for thread in threads:
            thread.join()

    return program


def test_a_race_that_needs_one_preemption(pages):
    racy = check_then_act(pages, claimed_first=False)
    assert explore(racy, bounds=Bounds(preemptions=0)).races == {}
    found = explore(racy, bounds=Bounds(preemptions=1), stop=True)
    (race,) = found.races.values()
    again = execute(racy, race.choices, bounds=Bounds(preemptions=1))
    assert [finding.fingerprint for finding in again.findings] == [race.example.fingerprint]
    assert explore(check_then_act(pages, claimed_first=True), bounds=Bounds(preemptions=4)).races == {}


def test_preemptions_left_out_are_counted(pages):
    program = check_then_act(pages, claimed_first=True)
    assert explore(program, bounds=Bounds(preemptions=0)).bounded_turns > 0
    assert explore(program, bounds=Bounds(preemptions=20)).bounded_turns == 0


CALLS = {
    "launch": lambda world, stream, event: world.device.launch(lambda: None, Work("op")),
    "record": lambda world, stream, event: event.record(stream),
    "record_event": lambda world, stream, event: stream.record_event(),
    "wait": lambda world, stream, event: event.wait(stream),
    "wait_event": lambda world, stream, event: stream.wait_event(event),
    "wait_stream": lambda world, stream, event: stream.wait_stream(world.device.current_stream()),
    "query": lambda world, stream, event: event.query(),
    "query of a stream": lambda world, stream, event: stream.query(),
    "synchronize": lambda world, stream, event: event.synchronize(),
    "synchronize of a stream": lambda world, stream, event: stream.synchronize(),
    "synchronize of the device": lambda world, stream, event: world.device.synchronize(),
    "elapsed_time": lambda world, stream, event: event.elapsed_time(timed(world, stream)),
    "post": lambda world, stream, event: world.channel().post(1),
    "switch": lambda world, stream, event: world.switch(),
}


def timed(world, stream):
    """A complete timing event."""
    event = world.device.Event(enable_timing=True)
    event.record(stream)
    stream.synchronize()
    return event


@pytest.mark.parametrize("name", CALLS)
def test_every_call_is_a_place_to_change_over(name):
    orders: set[str] = set()

    def program(world: World) -> None:
        log: list[str] = []
        stream = world.device.Stream("a")
        event = timed(world, stream)
        thread = world.spawn(lambda: log.append("other"), name="other")
        log.append("before")
        CALLS[name](world, stream, event)
        log.append("after")
        thread.join()
        orders.add(" ".join(log))

    assert explore(program).failures == {}
    assert orders == {"before other after", "before after other"}


@pytest.mark.parametrize(("preemptions", "expected"), [(0, 2), (1, 6), (99, 20)])
def test_all_interleavings(preemptions, expected):
    """Two threads of three calls each: all 20 orders, and with few preemptions those that need no more."""
    seen: set[str] = set()

    def program(world: World) -> None:
        order: list[str] = []

        def body(name: str):
            def run() -> None:
                for _ in range(3):
                    world.switch()
                    order.append(name)

            return run

        for thread in [world.spawn(body(name), name=name) for name in "ab"]:
            thread.join()
        seen.add("".join(order))

    found = explore(program, bounds=Bounds(preemptions=preemptions))
    assert found.exhausted
    orders = {"".join(order) for order in itertools.permutations("aaabbb")}
    assert seen == {order for order in orders if needed(order) <= preemptions}
    assert len(seen) == expected


def needed(order: str) -> int:
    """Preemptions of an order: changes away from a thread that has something left to do."""
    return sum(a != b and a in order[place + 1 :] for place, (a, b) in enumerate(itertools.pairwise(order)))


def test_queries_and_threads_are_chosen_together(pages):
    """A worker polls what another thread launches: both answers, in every order."""
    seen: set[tuple[bool, bool]] = set()

    def program(world: World) -> None:
        dev = world.device
        stream, event = dev.Stream("a"), dev.Event()
        answers: list[bool] = []

        def record() -> None:
            event.record(stream)
            answers.append(False)

        def ask() -> None:
            recorded = bool(answers)
            seen.add((recorded, event.query()))

        for thread in [world.spawn(record, name="record"), world.spawn(ask, name="ask")]:
            thread.join()

    explore(program)
    assert {(True, True), (True, False), (False, True)} <= seen


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_threads_that_wait_for_each_other():
    def program(world: World) -> None:
        a, b = world.channel("a"), world.channel("b")

        def body() -> None:
            b.receive()
            a.post(None)

        world.spawn(body, name="worker")
        a.receive()

    found = explore(program)
    (failure,) = found.failures.values()
    assert failure.error == (
        "DeadlockError: no host thread can go on: the main thread waits for a post to channel a; "
        "worker waits for a post to channel b"
    )
    assert failure.runs == found.runs


def test_what_a_thread_raises_names_it():
    def program(world: World) -> None:
        def body() -> None:
            raise ValueError("no page")

        world.spawn(body, name="worker")
        world.channel("never").receive()

    assert "thread 'worker': ValueError: no page" in explore(program).failures


def test_a_failed_run_leaves_no_thread_behind():
    def program(world: World) -> None:
        for number in range(3):
            world.spawn(lambda: world.channel("never").receive(), name=f"waits {number}")
        raise ValueError("enough")

    before = threading.active_count()
    assert "ValueError: enough" in explore(program).failures
    assert threading.active_count() <= before  # one of an earlier test may have ended meanwhile


def test_a_run_that_is_over_makes_no_calls():
    """A thread that cleans up on its way out gets no further than its first call."""
    reached: list[int] = []

    def program(world: World) -> None:
        def body() -> None:
            try:
                world.channel("never").receive()
            finally:
                world.device.Stream("a").record_event()
                reached.append(1)

        world.spawn(body, name="worker")
        world.device.synchronize()
        raise ValueError("enough")

    assert explore(program, bounds=Bounds(preemptions=9)).failures.keys() == {"ValueError: enough"}
    assert reached == []


def test_threads_that_are_not_joined_run_to_their_ends():
    done: list[int] = []

    def program(world: World) -> None:
        world.spawn(lambda: done.append(world.channel("own").post(1) or 1), name="left alone")

    found = explore(program)
    assert len(done) == found.runs


def test_a_thread_is_joined_once():
    def program(world: World) -> None:
        thread = world.spawn(lambda: None, name="worker")
        thread.join()
        thread.join()

    assert "StreamError: thread 'worker' was joined before; a thread can be joined once" in explore(program).failures


def test_there_is_a_limit_of_threads():
    def program(world: World) -> None:
        for number in range(36):
            world.spawn(lambda: None, name=f"t{number}")

    (failure,) = explore(program, max_runs=1).failures.values()
    assert failure.error == "StreamError: thread 't35' is one too many: a program may have 36 host threads"


def test_a_thread_that_blocks_on_a_lock_is_noticed(monkeypatch):
    monkeypatch.setattr("hicache_obs.testing.turns.HANG_S", 0.05)
    lock = threading.Lock()

    def program(world: World) -> None:
        def body() -> None:
            lock.acquire()
            lock.release()

        with lock:
            world.spawn(body, name="worker").join()

    (failure,) = explore(program, max_runs=1).failures.values()
    assert "thread 'worker' has made no call for 0.05 s" in failure.error


def test_waiting_for_what_is_there_already_takes_no_turn():
    turns = Turns(None, preemptions=0, max_calls=1)
    turns.wait_until(lambda: True, "nothing")
    assert turns.calls == 0
