"""The scenarios of real bug reports, and of what those leave out: exactly the expected races and stalls.

No answer hangs on names or file order.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.cli import main
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.testing import RecordingSink, races

REPORTED = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
COMBINED = sorted((Path(__file__).parent.parent / "cases" / "combined").glob("*.json"))
WAITS = ("event_wait", "wait_stream", "event_sync", "host_sync", "event_query")
Scenario = dict[str, Any]
every_case = pytest.mark.parametrize("path", [*REPORTED, *COMBINED], ids=lambda path: path.stem)


def load(path: Path) -> Scenario:
    """A case as it is in the file."""
    scenario: Scenario = json.loads(path.read_text())
    return scenario


def pairs(scenario: Scenario) -> set[tuple[str, str]]:
    """Step ids of all reported races."""
    trace = parse_scenario(json.dumps(scenario).encode(), source="case")
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace)
    analyzer.finish()
    return {(trace.labels[a], trace.labels[b]) for a, b in sink.pairs}


def searched(scenario: Scenario) -> set[tuple[str, str]]:
    """The same by brute force."""
    trace = parse_scenario(json.dumps(scenario).encode(), source="case")
    found = races(list(trace), polled=True)
    return {(trace.labels[a], trace.labels[b]) for a, b in found}


@every_case
def test_expected_races(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each race with its pair, resources, class and cause; on an exhaustive file nothing else."""
    expected = [e for e in load(path)["expect"] if e["verdict"] == "race"]
    code = main(["check", "--json", str(path)])
    report = json.loads(capsys.readouterr().out)
    found = {tuple(race["between"]): race for race in report["races"]}

    assert len(found) == len(report["races"])
    for race in expected:
        mine = found[tuple(race["between"])]
        for resource in ("pages", "host_pages", "buffers"):
            assert mine[resource] == race.get(resource, []), resource
        assert (mine["class"], mine["cause"]) == (race["class"], race["cause"])
    if load(path)["exhaustive"]:
        assert len(found) == len(expected)
    deadlock = any(stall.get("deadlock") for stall in report["stalls"])
    assert report["outcome"] in (["findings"] if expected or deadlock else ["clean", "nothing-checked"])
    assert code == {"findings": 1, "clean": 0, "nothing-checked": 3}[report["outcome"]]


def test_a_synchronize_with_an_idle_stream_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """The thread waited, with the wrong stream: the text says so and does not speak of a fence."""
    (path,) = (case for case in REPORTED if case.stem.startswith("27-"))
    main(["check", str(path)])
    out = capsys.readouterr().out

    assert "the host did synchronise, with 'saver_stream', which ran none of it" in out
    assert "synchronise with an event recorded on 'model' after op 1" in out
    assert "wait_stream" not in out


@every_case
def test_expected_stalls(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stall with its place, waiter and remedy, blocked long enough; on an exhaustive file nothing else."""
    expected = [e for e in load(path)["expect"] if e["verdict"] == "stall"]
    main(["check", "--json", str(path)])
    stalls = {stall["at"]: stall for stall in json.loads(capsys.readouterr().out)["stalls"]}

    assert set(stalls) == {e["at"] for e in expected}
    for stall in expected:
        mine = stalls[stall["at"]]
        for key in ("class", "cause", "waiter", "needed", "move_to", "copies", "ranks", "deadlock"):
            if key in stall:
                assert mine[key] == stall[key], key
        if "min_us" in stall:
            assert mine["blocked_us"] >= stall["min_us"]


@every_case
def test_pairs_that_a_poll_alone_orders_are_listed(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each once, and none that anything else orders: those that would race if true queries told nothing."""
    trace = parse_scenario(path.read_bytes(), source="case")
    polled = races(list(trace), polled=False) - races(list(trace), polled=True)
    main(["check", "--json", str(path)])
    ordered = json.loads(capsys.readouterr().out)["ordered"]

    assert len(ordered) == len(polled)
    assert {tuple(pair["between"]) for pair in ordered} == {(trace.labels[a], trace.labels[b]) for a, b in polled}
    assert all(pair["provenance"] == "polled" for pair in ordered)
    assert bool(polled) == path.stem.startswith(("04-", "19-", "20-", "c05-", "c08-", "c14-"))


def test_a_pair_that_races_is_not_listed_as_polled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One entry of the replay is known to be over, the other is not: as steps, the pair races."""
    nodes = [{"writes": [5]}, {"event_record": "e"}, {"writes": [6]}]
    steps: list[dict[str, Any]] = [
        {"op": "graph_replay", "graph": "g", "stream": "a", "nodes": nodes},
        {"op": "event_query", "event": "e", "result": True},
        {"op": "kernel", "stream": "b", "writes": [5, 6]},
    ]
    path = tmp_path / "both.json"
    for pages, raced, polled in (([5, 6], 1, 0), ([5], 0, 1)):
        steps[2]["writes"] = pages
        path.write_text(json.dumps({"steps": [{"id": f"s{n}", **step} for n, step in enumerate(steps, 1)]}))
        main(["check", "--json", str(path)])
        report = json.loads(capsys.readouterr().out)
        assert (len(report["races"]), len(report["ordered"])) == (raced, polled)


@pytest.mark.parametrize(
    ("entries", "writes", "pages", "layers"),
    [
        ([{"writes": ["a:10", 30]}, {"writes": ["a:9", 4]}], ["a:9", 30, "a:10", 4], [4, 30, "a:9", "a:10"], []),
        ([{"writes": [30], "layer": 0}, {"writes": [4]}], [4, 30], [4, 30], []),
        ([{"writes": [30], "layer": 1}, {"writes": [4], "layer": 0}], [4, 30], [4, 30], [0, 1]),
        ([{"reads": [7], "writes": ["a:1"]}], ["a:1", 7], [7, "a:1"], []),
    ],
)
def test_entries_of_a_replay_make_one_race(
    entries: list[dict[str, Any]],
    writes: list[int | str],
    pages: list[int | str],
    layers: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """With the pages of all, those of the first pool before the others'; no layers are all of them."""
    steps: list[dict[str, Any]] = [
        {"id": "s1", "op": "graph_replay", "graph": "g", "stream": "a", "nodes": entries},
        {"id": "s2", "op": "kernel", "stream": "b", "writes": writes},
    ]
    path = tmp_path / "replay.json"
    path.write_text(json.dumps({"layers": 2, "steps": steps}))
    assert main(["check", "--json", str(path)]) == 1
    (race,) = json.loads(capsys.readouterr().out)["races"]
    assert (race["pages"], race["layers"]) == (pages, layers)


@every_case
def test_ordered_pairs_are_not_reported(path: Path) -> None:
    """What the report calls safe is safe."""
    scenario = load(path)
    safe = {tuple(e["between"]) for e in scenario["expect"] if e["verdict"] == "no-race"}

    assert not safe & pairs(scenario)


def test_combined_cases_are_here() -> None:
    assert [path.stem[:3] for path in COMBINED] == [f"c{number:02}" for number in range(1, 25)]


@every_case
def test_names_do_not_matter(path: Path) -> None:
    """Renaming steps, streams, events, channels, threads and buffers, and adding idle streams, changes nothing."""
    scenario = load(path)
    renamed = copy.deepcopy(scenario)
    renamed["streams"] = {f"x {name}": value for name, value in scenario["streams"].items()}
    renamed["streams"] |= {"idle 1": {"kind": "nonblocking"}, "idle 2": {"kind": "blocking"}}
    for step in renamed["steps"]:
        step["id"] = f"z{step['id']}"
        for key in ("stream", "waiter", "on"):
            if key in step:
                step[key] = f"x {step[key]}"
        for key in ("event", "chan", "thread", "io", "tensor", "mem", "graph", "src_buf", "dst_buf"):
            if step.get(key, "main") != "main":  # the thread of steps that name none
                step[key] = f"y{step[key]}"
        for part in (step, *step.get("nodes", ())):
            if "event_record" in part:
                part["event_record"] = f"y{part['event_record']}"
            for key in ("reads_buf", "writes_buf"):
                if key in part:
                    part[key] = [f"y{name}" for name in part[key]]

    assert pairs(renamed) == {(f"z{a}", f"z{b}") for a, b in pairs(scenario)}


@pytest.mark.parametrize("path", REPORTED, ids=lambda path: path.stem)
def test_order_of_independent_steps_does_not_matter(path: Path) -> None:
    """Swapping two neighbours that brute force treats alike either way gives the same races."""
    scenario = load(path)
    expected = {frozenset(pair) for pair in pairs(scenario)}
    for index in range(len(scenario["steps"]) - 1):
        swapped = copy.deepcopy(scenario)
        steps = swapped["steps"]
        steps[index], steps[index + 1] = steps[index + 1], steps[index]
        try:
            independent = {frozenset(pair) for pair in searched(swapped)} == expected
        except ValueError:
            continue  # no longer a well-formed program
        if independent:
            assert {frozenset(pair) for pair in pairs(swapped)} == expected, steps[index]["id"]


@every_case
def test_every_wait_counts_as_much_as_brute_force_says(path: Path) -> None:
    """Taking out one wait or host observation at a time changes the verdict exactly when it should."""
    scenario = load(path)
    assert pairs(scenario) == searched(scenario)
    for index, step in enumerate(scenario["steps"]):
        if step["op"] in WAITS:
            without = copy.deepcopy(scenario)
            del without["steps"][index]
            assert pairs(without) == searched(without), step["id"]
