"""What would have ordered a pair and what it would have cost; which public report is of the same kind."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer, explain
from hicache_obs.analyzer.remedy import MAX_PLANNED, Remedy, RemedyKind, Timeline, public_report, remedies, timeline
from hicache_obs.cli import main
from hicache_obs.findings import Finding
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import OpId, ThreadId, Times
from hicache_obs.testing import History, RecordingSink
from hicache_obs.trace import Trace, make_trace

CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
EVENT, STREAM, HOST = RemedyKind


def findings(trace: Trace) -> list[Finding]:
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace)
    analyzer.finish()
    return sink.findings


def timed(history: str, times: dict[int, tuple[int, int]]) -> Trace:
    """A history, measured."""
    spans: list[Any] = [Times(OpId(op), ThreadId(0), 0, *span) for op, span in times.items()]
    return make_trace("test", [*History(history).records, *spans])


def found(trace: Trace) -> list[Remedy]:
    (finding,) = findings(trace)
    return list(remedies(finding, timeline(trace)))


def test_the_exact_wait_is_cheaper_than_the_whole_stream() -> None:
    """The later operation began at 4 µs and was called at 2; its page was free at 9, its stream at 20."""
    trace = timed("F:w5 F:w6 L:w5", {0: (1_000, 9_000), 1: (9_000, 20_000), 2: (4_000, 6_000)})

    assert found(trace) == [
        Remedy(EVENT, "F", OpId(0), "L", OpId(2), 5_000),
        Remedy(STREAM, "F", OpId(1), "L", OpId(2), 16_000),
        Remedy(HOST, "F", OpId(0), "thread 0", OpId(2), 7_000),
    ]


def test_what_was_queued_after_the_later_operation_costs_nothing() -> None:
    trace = timed("F:w5 L:w5 F:w6", {0: (1_000, 9_000), 1: (4_000, 6_000), 2: (9_000, 20_000)})

    assert [(remedy.after, remedy.delay_ns) for remedy in found(trace)[:2]] == [(0, 5_000), (0, 5_000)]


def test_an_order_that_was_kept_anyway_would_have_been_free() -> None:
    trace = timed("F:w5 L:w5", {0: (1_000, 2_000), 1: (4_000, 6_000)})

    assert [remedy.delay_ns for remedy in found(trace)] == [0, 0, 1_000]


def test_without_times_the_cost_is_not_known() -> None:
    assert [remedy.delay_ns for remedy in found(timed("F:w5 L:w5", {}))] == [None, None, None]
    assert [remedy.delay_ns for remedy in found(timed("F:w5 L:w5", {0: (1_000, 9_000)}))] == [None, None, 8_000]


def test_a_pair_that_nobody_can_judge_has_no_remedy() -> None:
    assert found(timed("F:w5 ~1 L:w5", {})) == []
    assert found(timed("F:w5 L<F L:w5", {0: (0, 9_000), 2: (1_000, 2_000)})) == []  # a contradiction
    assert found(timed("h-5 F:w5", {})) == []


def scenario(steps: list[dict[str, Any]]) -> Trace:
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    return parse_scenario(json.dumps({"steps": numbered}).encode(), source="test")


def test_stated_durations_are_planned() -> None:
    steps: list[dict[str, Any]] = [
        {"op": "kernel", "stream": "a", "writes": [5], "dur_us": 100},
        {"op": "kernel", "stream": "b", "writes": [5], "thread": "t"},
    ]
    trace = scenario(steps)
    many = scenario([*steps, *({"op": "kernel", "stream": "c"} for _ in range(MAX_PLANNED))])

    assert [remedy.delay_ns for remedy in found(trace)] == [100_000, 100_000, 102_000]
    assert found(trace)[2].waiter == "t"
    assert [remedy.delay_ns for remedy in found(many)] == [None, None, None]


def test_what_never_runs_costs_nothing_that_could_be_told() -> None:
    """The second operation is behind a collective that the other rank does not enter."""
    enter = {"op": "collective", "group": "tp", "name": "a", "rank": 0, "thread": "r0"}
    steps = [
        {"op": "kernel", "stream": "a", "writes": [5]},
        enter,
        {**enter, "name": "b", "rank": 1, "thread": "r1"},
        {"op": "kernel", "stream": "b", "writes": [5], "thread": "r0"},
    ]

    assert [remedy.delay_ns for remedy in found(scenario(steps))[:2]] == [None, None]


def test_an_access_in_no_stream_leaves_the_thread_to_wait() -> None:
    put = {"op": "io_begin", "io": "p", "kind": "storage_write", "reads_host": [5], "dur_us": 50}
    save = {"op": "memcpy", "kind": "d2h", "stream": "a", "device_pages": [1], "host_pages": [5]}

    assert [remedy.kind for remedy in found(scenario([put, save]))] == [HOST]
    assert [remedy.kind for remedy in found(scenario([save, put]))] == [HOST]


def test_the_text_has_cost_and_report() -> None:
    trace = timed("F:w5 F:w6 L:w5", {0: (1_000, 9_000), 1: (9_000, 20_000), 2: (4_000, 6_000)})
    (finding,) = findings(trace)
    bare = explain(finding)

    assert explain(finding, times=timeline(trace)) == bare + (
        "\n  cost     waiting for the operation alone would have taken 5.0 us, for its whole stream 16.0 us, "
        "in the calling thread 7.0 us, from measured times"
        "\n  report   https://github.com/sgl-project/sglang/pull/36738 is of the same kind"
    )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_reports_are_those_of_the_cases(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Every race of a case has a report of its class and cause, and that is the source of a case with such a race."""
    sources: dict[tuple[str, str], set[str]] = {}
    for case in CASES:
        read = json.loads(case.read_text())
        for expected in read["expect"]:
            if expected["verdict"] == "race":
                sources.setdefault((expected["class"], expected["cause"]), set()).add(read["source"]["url"])
    main(["check", "--json", str(path)])
    races = json.loads(capsys.readouterr().out)["races"]

    for race in races:
        assert race["report"] in sources[race["class"], race["cause"]]
        assert race["remedies"]
        assert all(remedy["delay_us"] is not None for remedy in race["remedies"])


def test_a_backup_that_no_later_round_waits_for_has_been_reported() -> None:
    """With no fence at all, and with one that does not work; an early free is another report's."""
    for text in ("B:r5W1 F:w5", "e=B B:r5W1 F<e F:w5"):
        (finding,) = findings(timed(text, {}))
        assert public_report(finding) == "https://github.com/sgl-project/sglang/pull/38463"


def test_a_hazard_that_nobody_reported_has_no_address() -> None:
    (other,) = findings(timed("L:w5 B:r5W1", {}))

    assert public_report(other) == ""


@pytest.mark.parametrize("text", ["F:w5 L:w5", "e=F F:w5 L<e L:w5", "F:w5 e=F e=S L<e L:w5", "F:w5 L<e L:w5"])
def test_a_fence_that_does_not_work_is_none(text: str) -> None:
    (finding,) = findings(timed(text, {}))

    assert public_report(finding) == "https://github.com/sgl-project/sglang/pull/36738"


def test_a_trace_as_long_as_the_plan_goes() -> None:
    """One record more, and nothing is planned."""
    trace = scenario([{"op": "kernel", "stream": "a", "writes": [5]}, {"op": "kernel", "stream": "b", "writes": [5]}])
    records = list(trace)
    filled = [*records, *[records[0]] * (MAX_PLANNED - len(records))]

    assert timeline(make_trace("t", filled, planned_ns=trace.planned_ns)).spans
    assert not timeline(make_trace("t", [*filled, records[0]], planned_ns=trace.planned_ns)).spans


def test_what_is_known_of_times() -> None:
    """Measured or not, each call has its time; the first operation's id is 0."""
    assert timeline(timed("F:w5 L:w5", {})).calls == {0: 0, 1: 1000}
    assert not timeline(timed("F:w5 L:w5", {})).measured
    assert timeline(timed("F:w5 L:w5", {0: (5, 6)})).measured
    assert not Timeline().measured
