"""Traces as scenarios, and races kept as the shortest program that has them."""

from __future__ import annotations

from pathlib import Path

import pytest

from hicache_obs.errors import InputError, TraceError
from hicache_obs.readers import open_trace
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import ALL_LAYERS, Access, Define, DropReason, Mode, OpId, Space, Work, device, page_ids
from hicache_obs.testing import History
from hicache_obs.testing.gated import unfit
from hicache_obs.testing.programs import random_program
from hicache_obs.testing.regression import assert_ordered, keep, write_test
from hicache_obs.testing.scenario_writer import render, write_scenario
from hicache_obs.testing.stream_watch import MemorySink, StreamWatch, judge
from hicache_obs.trace import Trace, make_trace

CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
PAGES = page_ids([3])


def raced(trace: Trace, ids: dict[int, str]) -> set[tuple[str, ...]]:
    """Races by the steps of the scenario."""
    return {
        (ids[found.earlier.op], ids[found.later.op], found.hazard.value, found.cause.value)
        for found in judge(trace).findings
    }


def read_back(trace: Trace) -> tuple[set[tuple[str, ...]], set[tuple[str, ...]]]:
    """Races of a trace, and of the scenario written from it."""
    scenario, ids = write_scenario(trace)
    again = parse_scenario(render(scenario).encode(), source="again")
    return raced(trace, dict(ids)), raced(again, dict(again.labels))


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases_survive_being_written(path: Path) -> None:
    """Same races for the same causes."""
    before, after = read_back(open_trace(path))
    assert before == after


def test_random_programs_survive_being_written() -> None:
    """Those that a scenario can say; a range of several layers becomes all layers, which only adds pairs."""
    written = equal = 0
    for seed in range(2000):
        try:
            before, after = read_back(make_trace("random", random_program(seed)))
        except TraceError:
            continue  # a copy of five buffers, say
        written += 1
        equal += before == after
        assert {pair[:2] for pair in before} <= {pair[:2] for pair in after}, seed
    assert written > 200
    assert equal > 0.9 * written


@pytest.mark.parametrize(
    ("text", "steps", "cause"),
    [
        ("F:w9 F:w5 L:w5", ["kernel", "memcpy"], "missing_fence"),
        ("F:w9 e=F F:w5 B:r7 L<e G:w1 L:w5", ["event_record", "kernel", "event_wait", "memcpy"], "early_event"),
        ("F:w5 M<F h?e L:w5 F:w5", ["kernel", "wait_stream", "memcpy"], "wrong_stream"),
        ("F:w5 B:r7 L<e M:w1 L:w5", ["kernel", "event_wait", "memcpy"], "event_unrecorded"),
    ],
)
def test_a_race_is_kept_with_its_cause(text: str, steps: list[str], cause: str) -> None:
    """No step is left that the race or its explanation does not need."""
    trace = make_trace("history", History(text).records)
    finding = judge(trace).findings[0]
    assert finding.cause.value == cause

    kept = keep(trace, finding)

    assert [step["op"] for step in kept.scenario["steps"]] == steps
    assert (kept.earlier, kept.later) == ("s1" if steps[0] == "kernel" else "s2", f"s{len(steps)}")
    with pytest.raises(AssertionError, match="nothing makes 'L' wait for 'F'"):
        assert_ordered(render(kept.scenario), kept.earlier, kept.later)


def test_a_kept_race_passes_with_its_edge() -> None:
    """And only with the right one."""
    trace = make_trace("history", History("F:w5 L:w5").records)
    kept = keep(trace, judge(trace).findings[0])
    first, last = kept.scenario["steps"]
    for waiter, on, ordered in (("L", "F", True), ("F", "L", False), ("M", "F", False)):
        fence = {"id": "fence", "op": "wait_stream", "waiter": waiter, "on": on}
        text = render({"steps": [first, fence, last]})
        if ordered:
            assert_ordered(text, "s1", "s2")
        else:
            with pytest.raises(AssertionError, match="s2 is complete before s1 begins"):
                assert_ordered(text, "s1", "s2")


def test_a_pair_that_is_not_checked_is_no_pass() -> None:
    """Two steps that share nothing are a mistake in the scenario."""
    trace = make_trace("history", History("F:w5 L:w6").records)
    text = render(write_scenario(trace)[0])
    with pytest.raises(InputError, match="steps s1 and s2: must touch a common page"):
        assert_ordered(text, "s1", "s2")


def test_lost_records_are_not_written() -> None:
    """A scenario has no word for them, and leaving them out would turn "cannot tell" into a verdict."""
    trace = make_trace("history", History("F:w5 ~3 L:w5").records)
    with pytest.raises(TraceError, match="op 1 cannot be a step of a scenario: records were lost before it"):
        write_scenario(trace)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """The error names it."""
    trace = make_trace("history", History("F:w5 L:w5").records)
    finding = judge(trace).findings[0]
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(InputError, match="file/kept: Not a directory; must be a directory"):
        write_test(blocked / "kept", keep(trace, finding), finding, origin="test_a.py::test_b", device=None)


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    """Names of streams and tests go into a source file: they must not become code."""
    name = "\"\"\"\nimport os\n'''\\N{DASH} é"
    watch = StreamWatch("virtual")
    for number in range(2):
        with watch.device.stream(watch.device.Stream(f"{name}{number}")):
            watch.device.launch(lambda: None, Work(name, (device(Mode.WRITE, PAGES),)))
    watched = watch.finish()
    kept = keep(watched.trace, watched.findings[0])

    path = write_test(tmp_path, kept, watched.findings[0], origin=f"t.py::test[{name}]", device="threads")

    module: dict[str, object] = {}
    exec(compile(path.read_text(encoding="utf-8"), path, "exec"), module)
    assert "os" not in module
    read = parse_scenario(str(module["SCENARIO"]).encode(), source="written")
    assert set(read.names.streams.values()) == {f"{name}0", f"{name}1"}


def test_a_full_sink_states_the_loss() -> None:
    """What no longer fits is a ``Lost`` record, in its place."""
    sink = MemorySink(limit=3)
    records = History("F:w5 L:w5 F:w6 L:w6").records
    kept = [sink.append(record) for record in records]  # type: ignore[arg-type] # a history holds no other kinds

    assert kept == [True] * 3 + [False] * (len(records) - 3)
    (lost,) = sink.losses(7)
    assert (lost.count, lost.reason, lost.host_ns) == (len(records) - 3, DropReason.RING_FULL, 7)  # type: ignore[union-attr]


def test_after_a_loss_nobody_can_tell() -> None:
    """A race across a loss is unknown, not found and not absent."""
    watch = StreamWatch("virtual")
    forward, load = watch.device.Stream("forward"), watch.device.Stream("load")
    access = Access(Space.DEVICE, Mode.WRITE, PAGES)
    with watch.device.stream(forward):
        watch.device.launch(lambda: None, Work("forward", (access,), ALL_LAYERS, 1))
    watch._sink.drop(DropReason.RECORDER_ERROR)
    with watch.device.stream(load):
        watch.device.launch(lambda: None, Work("load", (access,), ALL_LAYERS, 2))

    watched = watch.finish()

    assert (len(watched.findings) + len(watched.unknown), watched.trace.source) == (1, "test")


def test_what_others_have_a_hand_in_survives_being_written() -> None:
    """Shared events, pools and buffers, and kernels that may start early: without them the verdict would be another."""
    text = (
        '{"shared": {"events": ["e"], "buffers": ["b"], "pools": ["kv", "host", "kv2"]}, "early": ["k"], "steps": ['
        '{"id": "s1", "op": "kernel", "stream": "a", "name": "k", "writes": [1, "kv2:1"], "writes_buf": ["b"]},'
        '{"id": "s2", "op": "event_wait", "event": "e", "stream": "c"},'
        '{"id": "s3", "op": "kernel", "stream": "c", "name": "k", "reads": [1], "writes_host": [1]}]}'
    )
    trace = parse_scenario(text.encode(), source="shared")

    scenario, _ = write_scenario(trace)

    again = parse_scenario(render(scenario).encode(), source="again")
    marks = [{(d.space, d.id) for d in read if isinstance(d, Define) and not d.text} for read in (trace, again)]
    assert marks[0] == marks[1] != set()
    assert "another process" in unfit(trace, OpId(1), OpId(3))
