"""Exploration of what a query may answer: what is branched, what is forced, what is found, and what is said of it."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from hicache_obs.errors import ConfigError, StreamError
from hicache_obs.findings import ExitCode, Hazard
from hicache_obs.records import EventQuery, Mode, Work, device
from hicache_obs.testing import Bounds, Exploration, World, execute, explore, races

# -- the pair: a branch that races, and the same with one edge --------------------------------------------------------


def restore_while_writing(pages, *, fixed: bool):
    """Only the host that finds the round unfinished restores into its page without waiting."""

    def program(world: World) -> None:
        dev = world.device
        forward, load = dev.Stream("forward"), dev.Stream("load-back")
        pages.write(dev, forward, 5)
        done = forward.record_event()
        if not done.query() and fixed:
            load.wait_event(done)
        pages.write(dev, load, 5, copy=True)

    return program


def test_a_race_on_one_branch_is_found_there(pages):
    found = explore(restore_while_writing(pages, fixed=False))
    assert (found.runs, found.exhausted, found.exit_code) == (2, True, ExitCode.FINDINGS)
    (race,) = found.races.values()
    assert race.example.hazard is Hazard.WAW_FORWARD_RESTORE
    assert (race.choices, race.runs, race.pairs) == ("0", 1, 1)
    assert "choices  0" in found.explain()


def test_the_same_with_one_edge_is_clean(pages):
    found = explore(restore_while_writing(pages, fixed=True))
    assert (found.runs, found.queries, found.exit_code) == (2, 1, ExitCode.CLEAN)
    assert found.races == {}
    assert found.checks[Hazard.WAW_FORWARD_RESTORE] == 2
    assert found.weak == 1  # the run whose query was true has no other edge
    found.require_clean()


def test_one_run_again(pages):
    program = restore_while_writing(pages, fixed=False)
    assert execute(program, "1").findings == ()
    again = execute(program, "0")
    assert [finding.fingerprint for finding in again.findings] == list(explore(program).races)
    assert [(choice.taken, choice.options) for choice in again.made] == [("0", "10")]


# -- forced answers ---------------------------------------------------------------------------------------------------


def answers(found_in) -> list[tuple[bool, ...]]:
    """Answers of all queries, per run, in the order of the runs."""
    seen: list[tuple[bool, ...]] = []

    def program(world: World) -> None:
        seen.append(tuple(found_in(world.device)))

    explore(program)
    return seen


def never_recorded(dev):
    yield dev.Event().query()


def observed(dev):
    event = dev.Stream("a").record_event()
    event.synchronize()
    yield event.query()


def before_an_observed_one(dev):
    stream = dev.Stream("a")
    first, second = stream.record_event(), stream.record_event()
    second.synchronize()
    yield first.query()


def waited_for_by_an_observed_one(dev):
    a, b = dev.Stream("a"), dev.Stream("b")
    first = a.record_event()
    b.wait_event(first)
    b.record_event().synchronize()
    yield first.query()


def behind_an_observed_one(dev):
    """A marker is work of its own, even with nothing in between."""
    stream = dev.Stream("a")
    first, second = stream.record_event(), stream.record_event()
    first.synchronize()
    yield second.query()


def asked_twice(dev):
    event = dev.Stream("a").record_event()
    yield event.query()
    yield event.query()


def on_another_stream(dev):
    dev.Stream("a").record_event().synchronize()
    yield dev.Stream("b").record_event().query()


def recorded_again(dev):
    stream = dev.Stream("a")
    event = stream.record_event()
    event.synchronize()
    stream.record_event(event)
    yield event.query()


def a_stream(dev):
    stream = dev.Stream("a")
    yield stream.query()
    stream.record_event()
    yield stream.query()


@pytest.mark.parametrize("ask", [never_recorded, observed, before_an_observed_one, waited_for_by_an_observed_one])
def test_forced(ask):
    assert answers(ask) == [(True,)]


@pytest.mark.parametrize("ask", [behind_an_observed_one, on_another_stream, recorded_again])
def test_open(ask):
    assert answers(ask) == [(True,), (False,)]


def test_true_forces_what_follows_and_false_does_not():
    assert answers(asked_twice) == [(True, True), (False, True), (False, False)]


def test_a_stream_is_asked_for_its_last_item():
    assert answers(a_stream) == [(True, True), (True, False)]


def test_forced_answers_are_counted():
    def program(world: World) -> None:
        list(asked_twice(world.device))
        list(observed(world.device))

    found = explore(program)
    assert (found.runs, found.queries, found.forced) == (3, 2, 3 + 1)


def test_a_true_answer_orders_and_a_false_one_does_not(pages):
    def program(world: World) -> None:
        dev = world.device
        a, b = dev.Stream("a"), dev.Stream("b")
        pages.write(dev, a, 1)
        a.record_event().query()
        pages.write(dev, b, 1)

    assert execute(program, "1").findings == ()
    assert execute(program, "1").weak == 1
    assert len(execute(program, "0").findings) == 1


# -- polling loops ----------------------------------------------------------------------------------------------------


def test_a_polling_loop_ends(pages):
    def program(world: World) -> None:
        dev = world.device
        a, b = dev.Stream("a"), dev.Stream("b")
        pages.write(dev, a, 1)
        done = a.record_event()
        while not done.query():
            pass
        pages.write(dev, b, 1)

    found = explore(program, bounds=Bounds(max_false=5))
    assert (found.runs, found.bounded_queries, found.exit_code) == (6, 1, ExitCode.CLEAN)
    assert found.workloads == 1


def test_a_limited_number_of_attempts_has_its_way_out(pages):
    """The bound on False must be higher than the attempts, or the last branch is not seen; it says so."""

    def program(world: World) -> None:
        dev = world.device
        a, b = dev.Stream("a"), dev.Stream("b")
        pages.write(dev, a, 1)
        done = a.record_event()
        if any(done.query() for _ in range(3)):
            b.wait_event(done)
        pages.write(dev, b, 1)

    assert explore(program, bounds=Bounds(max_false=3)).exit_code is ExitCode.FINDINGS
    cut = explore(program, bounds=Bounds(max_false=2))
    assert (cut.exit_code, cut.bounded_queries) == (ExitCode.CLEAN, 1)


# -- against an independent count -------------------------------------------------------------------------------------


def random_program(seed: int):
    """Two streams, two events; operations, records, waits, syncs and up to four queries, each with two ways on."""
    rng = random.Random(seed)
    steps = [
        (rng.choice(("op", "op", "record", "record", "wait", "sync", "query")), rng.randrange(2), rng.randrange(2))
        for _ in range(rng.randint(6, 14))
    ]
    return [step for n, step in enumerate(steps) if step[0] != "query" or [s[0] for s in steps[:n]].count("query") < 4]


def run_steps(steps, pages, world: World) -> None:
    """A false query skips the next step: what is submitted depends on the answers."""
    dev = world.device
    streams, events = [dev.Stream("a"), dev.Stream("b")], [dev.Event(), dev.Event()]
    skip = False
    for kind, stream, event in steps:
        if skip:
            skip = False
        elif kind == "op":
            pages.write(dev, streams[stream], event)
        elif kind == "record":
            events[event].record(streams[stream])
        elif kind == "wait":
            streams[stream].wait_event(events[event])
        elif kind == "sync":
            events[event].synchronize()
        else:
            skip = not events[event].query()


def expected_answers(steps) -> set[tuple[bool, ...]]:
    """All sequences of answers, by sets of items and plain recursion; no device, no clock."""
    found: set[tuple[bool, ...]] = set()

    def walk(at, tails, events, known, given, skip) -> None:
        for place, (kind, stream, event) in enumerate(steps[at:], at):
            if skip:
                skip = False
                continue
            if kind in ("op", "record"):
                item = frozenset({place}) | tails[stream]
                tails = {**tails, stream: item}
                if kind == "record":
                    events = {**events, event: item}
            elif kind == "wait":
                tails = {**tails, stream: tails[stream] | events.get(event, frozenset())}
            elif kind == "sync":
                known = known | events.get(event, frozenset())
            else:
                item = events.get(event, frozenset())
                walk(place + 1, tails, events, known | item, (*given, True), False)
                if not item <= known:
                    walk(place + 1, tails, events, known, (*given, False), True)
                return
        found.add(given)

    walk(0, {0: frozenset(), 1: frozenset()}, {}, frozenset(), (), False)
    return found


@pytest.mark.parametrize("first", range(0, 300, 100))
def test_the_tree_and_the_races_are_those_of_brute_force(pages, first):
    branching = racy = 0
    for seed in range(first, first + 100):
        steps = random_program(seed)
        seen = []

        def on_run(_, run, seen=seen):
            seen.append(run)

        explore(lambda world, steps=steps: run_steps(steps, pages, world), on_run=on_run)
        assert {given(run) for run in seen} == {known_only(steps, full) for full in expected_answers(steps)}, seed
        assert len(seen) == len(expected_answers(steps)), seed
        for run in seen:
            assert {(f.earlier.op, f.later.op) for f in run.findings} == races(run.records, polled=True), (seed, run)
            racy += bool(run.findings)
        branching += len(seen) > 1
    assert branching > 20
    assert racy > 20


def given(run) -> tuple[bool, ...]:
    """The choices of a run."""
    return tuple(choice.taken == "1" for choice in run.made)


def known_only(steps, full) -> tuple[bool, ...]:
    """The answers of ``full`` that were not forced: those that another sequence contradicts at the same place."""
    others = expected_answers(steps)
    return tuple(
        answer
        for place, answer in enumerate(full)
        if any(other[:place] == full[:place] and len(other) > place and other[place] != answer for other in others)
    )


# -- budget, bounds and mistakes --------------------------------------------------------------------------------------


def independent(n: int):
    def program(world: World) -> None:
        for number in range(n):
            world.device.Stream(f"s{number}").record_event().query()

    return program


def test_a_budget_that_is_hit_is_not_clean(pages):
    def program(world: World) -> None:
        stream = world.device.Stream("a")
        pages.write(world.device, stream, 1)
        pages.write(world.device, stream, 1)
        independent(4)(world)

    assert explore(program).exit_code is ExitCode.CLEAN
    cut = explore(program, max_runs=10)
    assert (cut.runs, cut.exhausted, cut.exit_code) == (10, False, ExitCode.NOTHING_CHECKED)
    with pytest.raises(AssertionError, match="not all: raise max_runs"):
        cut.require_clean()


def test_every_answer_of_independent_queries():
    seen: list[str] = []
    found = explore(independent(4), on_run=lambda _, run: seen.append(run.choices))
    assert sorted(seen) == sorted("".join(bits) for bits in itertools.product("01", repeat=4))
    assert (found.queries, found.deepest, found.histories, found.workloads) == (15, 4, 16, 1)


def test_nothing_checked_is_not_clean():
    found = explore(independent(1))
    assert (found.exhausted, found.exit_code) == (True, ExitCode.NOTHING_CHECKED)
    with pytest.raises(AssertionError, match="nothing was checked"):
        found.require_clean()


def test_stop_at_the_first_finding(pages):
    def program(world: World) -> None:
        restore_while_writing(pages, fixed=False)(world)
        independent(3)(world)

    assert explore(program).runs == 16
    stopped = explore(program, stop=True)
    assert stopped.runs == 9
    assert not stopped.exhausted
    assert stopped.exit_code is ExitCode.FINDINGS


def test_what_the_program_raises_is_a_failure_of_its_run():
    def program(world: World) -> None:
        assert world.device.Stream("a").record_event().query(), "too early"

    found = explore(program)
    assert {name: failure.choices for name, failure in found.failures.items()} == {"AssertionError: too early": "0"}
    assert found.exit_code is ExitCode.FINDINGS
    with pytest.raises(AssertionError, match=r"(?s)too early.*\n  choices  0"):
        found.require_clean()


def test_what_a_launched_function_raises_is_a_failure_too():
    def program(world: World) -> None:
        world.device.launch(lambda: 1 / 0, Work("divide"))

    assert "ZeroDivisionError" in explore(program).explain()


def test_a_program_without_end():
    def program(world: World) -> None:
        stream = world.device.Stream("a")
        while True:
            stream.record_event()

    (failure,) = explore(program, bounds=Bounds(max_calls=50)).failures.values()
    assert failure.error.startswith("StreamError: no end after 50 stream calls")


def test_a_program_that_differs_from_run_to_run_is_refused():
    runs = itertools.count()

    def program(world: World) -> None:
        run = next(runs)
        world.device.Stream("a").record_event().query()
        world.device.Stream(f"b{run}").record_event().query()

    with pytest.raises(StreamError, match=r"not the same in every run: choice 2 was .*'b0'.*now .*'b1'"):
        explore(program)


def test_a_program_that_ends_earlier_in_a_later_run_is_refused():
    runs = itertools.count()

    def program(world: World) -> None:
        independent(2 if not next(runs) else 0)(world)

    with pytest.raises(StreamError, match="not the same in every run: it ended after 0 of the choices 10"):
        explore(program)


@pytest.mark.parametrize("ids", [[5], (5,), np.array([5], np.int32), np.array([[5]])])
def test_pages_that_are_no_array_are_refused(ids):
    def program(world: World) -> None:
        world.device.launch(lambda: None, Work("op", (device(Mode.WRITE, ids),)))

    (failure,) = explore(program).failures.values()
    assert failure.error.startswith("StreamError: launch of 'op': accesses name ")
    assert failure.error.endswith("; expected an (n,) int64 array, as page_ids makes")


@pytest.mark.parametrize(
    ("choices", "message"),
    [("2", r"choice 1 \(query of item 1 .*\) must be one of 1, 0"), ("101", "must be 2 at most")],
)
def test_choices_that_do_not_fit(choices, message):
    with pytest.raises(ConfigError, match=message):
        execute(independent(2), choices)


def test_choices_that_do_not_fit_are_refused_even_if_the_program_catches_everything():
    def program(world: World) -> None:
        try:
            independent(1)(world)
        except Exception:  # noqa: BLE001 this is what is tested
            pass

    with pytest.raises(ConfigError, match="must be one of"):
        execute(program, "x")


@pytest.mark.parametrize("bad", [{"max_false": -1}, {"preemptions": -1}, {"max_calls": 0}])
def test_bounds_have_limits(bad):
    with pytest.raises(ConfigError, match=f"{next(iter(bad))}: .*expected an integer"):
        Bounds(**bad)


def test_a_budget_has_a_limit():
    with pytest.raises(ConfigError, match="max_runs: 0"):
        explore(independent(1), max_runs=0)


def test_queries_are_in_the_trace(pages):
    run = execute(restore_while_writing(pages, fixed=False), "0")
    assert [record.result for record in run.records if isinstance(record, EventQuery)] == [False]


def test_one_run_alone_shows_its_own_choice_points(pages):
    found = Exploration.of(execute(restore_while_writing(pages, fixed=True), "0"), Bounds())
    assert (found.runs, found.queries, found.exit_code) == (1, 1, ExitCode.CLEAN)
