"""Plans in worked numbers; every stall rule with its twin that is none; the cases; agreement with the analyzer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.plan import NEVER, Plan, plan
from hicache_obs.analyzer.stalls import (
    MAX_RECORDS,
    Stall,
    StallCause,
    StallClass,
    StallReport,
    _Search,
    find_stalls,
)
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import (
    AnyRecord,
    DropReason,
    EventRecord,
    EventSync,
    EventWait,
    Lost,
    OpId,
    Record,
    ThreadId,
    WaitStream,
)
from hicache_obs.testing import History, RecordingSink
from hicache_obs.testing.programs import random_program
from hicache_obs.trace import Trace, make_trace

CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
Step = dict[str, Any]


def trace_of(steps: list[Step], **top: Any) -> Trace:
    """Steps ``s1``, ``s2``, …; each call takes 2 µs unless it says otherwise."""
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    return parse_scenario(json.dumps({"steps": numbered, **top}).encode(), source="test")


def kernel(stream: str, dur_us: float = 10, **keys: Any) -> Step:
    return {"op": "kernel", "stream": stream, "dur_us": dur_us, **keys}


def load(dur_us: float, layer: int | None = None, **keys: Any) -> Step:
    step = {"op": "memcpy", "kind": "h2d", "stream": "load", "host_pages": [2], "device_pages": [30]}
    return {**step, "dur_us": dur_us, **({} if layer is None else {"layer": layer}), **keys}


def fence(waiter: str, on: str) -> Step:
    return {"op": "wait_stream", "waiter": waiter, "on": on}


def record(event: str, stream: str) -> Step:
    return {"op": "event_record", "event": event, "stream": stream}


def wait(event: str, stream: str) -> Step:
    return {"op": "event_wait", "event": event, "stream": stream}


def runs_us(steps: list[Step], **top: Any) -> dict[str, tuple[float, float]]:
    """Start and end of what runs, by step."""
    trace = trace_of(steps, **top)
    return {trace.label(op): (span.start_ns / 1e3, span.end_ns / 1e3) for op, span in plan(trace).runs.items()}


def calls_us(steps: list[Step], **top: Any) -> dict[str, tuple[float, float]]:
    trace = trace_of(steps, **top)
    return {trace.label(op): (span.start_ns / 1e3, span.end_ns / 1e3) for op, span in plan(trace).calls.items()}


def found(report: StallReport, trace: Trace) -> list[dict[str, object]]:
    return [stall.as_json(trace) for stall in report.stalls]


def stalls(steps: list[Step], **top: Any) -> list[dict[str, object]]:
    trace = trace_of(steps, **top)
    report = find_stalls(trace)
    assert not report.skipped
    return found(report, trace)


# -- plan ------------------------------------------------------------------------------------------------------


def test_a_stream_is_first_in_first_out() -> None:
    assert runs_us([kernel("a", 100), kernel("a", 50), kernel("b", 20)]) == {
        "s1": (2, 102),
        "s2": (102, 152),
        "s3": (6, 26),
    }


def test_every_call_has_its_span() -> None:
    """The first operation's too, whose id is 0 in a trace that counts from there."""
    planned = plan(make_trace("test", cast("list[AnyRecord]", History("F:w5 h<F").records)))

    assert sorted(planned.calls) == [0, 1]
    assert sorted(planned.runs) == [0]


def test_the_last_call_takes_its_host_time_too() -> None:
    assert runs_us([kernel("a", 5), kernel("b", 5, host_us=700)])["s2"] == (702, 707)
    trace = trace_of([kernel("a", 5, host_us=700)])
    untold = make_trace("t", list(trace), planned_ns=trace.planned_ns)
    assert [span.start_ns for span in plan(untold).runs.values()] == [2000]


def test_a_stream_waits_for_the_record_that_was_current() -> None:
    steps = [kernel("a", 100), record("e", "a"), kernel("a", 70), wait("e", "b"), kernel("b", 5)]

    assert runs_us(steps)["s5"] == (102, 107)
    assert runs_us([*steps[:3], fence("b", "a"), steps[4]])["s5"] == (172, 177)


def test_a_wait_for_an_event_that_was_never_recorded_does_nothing() -> None:
    steps = [kernel("a", 100), wait("e", "b"), kernel("b", 5)]

    assert runs_us(steps)["s3"] == (6, 11)
    assert [made.awaited_ns for made in plan(trace_of(steps)).waits] == [0]


@pytest.mark.parametrize(
    "sync",
    [
        {"op": "event_sync", "event": "e"},
        {"op": "host_sync", "scope": "stream", "stream": "a"},
        {"op": "host_sync", "scope": "device"},
    ],
)
def test_a_host_thread_blocks(sync: Step) -> None:
    steps = [kernel("a", 100), record("e", "a"), sync, kernel("b", 5)]

    assert calls_us(steps)["s3"] == (4, 102)
    assert runs_us(steps)["s4"] == (104, 109)


def test_a_receiver_waits_for_the_post_only() -> None:
    post, recv = {"op": "thread_post", "chan": "q"}, {"op": "thread_recv", "chan": "q", "thread": "t"}
    steps = [kernel("a", 100, host_us=50), post, recv, kernel("b", 5, thread="t")]

    assert calls_us(steps)["s3"] == (0, 52)
    assert runs_us(steps)["s4"] == (54, 59)


def test_a_cpu_access_takes_host_time_and_io_does_not() -> None:
    cpu = {"op": "host_access", "reads_buf": ["x"], "dur_us": 40}
    begin = {"op": "io_begin", "io": "i", "kind": "storage_read", "writes_host": [1], "dur_us": 500}
    steps = [cpu, begin, kernel("a"), {"op": "io_end", "io": "i"}, kernel("a")]

    assert runs_us(steps) == {"s1": (2, 42), "s2": (44, 544), "s3": (46, 56), "s5": (546, 556)}


def test_the_legacy_stream_and_blocking_streams_wait_for_each_other() -> None:
    kinds = {"legacy": {"kind": "legacy"}, "b": {"kind": "blocking"}, "n": {"kind": "nonblocking"}}
    steps = [kernel("b", 100), kernel("legacy", 10), kernel("n", 10), kernel("b", 10)]

    assert runs_us(steps, streams=kinds) == {"s1": (2, 102), "s2": (102, 112), "s3": (6, 16), "s4": (112, 122)}


def test_graph_replays_follow_each_other_and_their_nodes_follow_what_they_name() -> None:
    nodes = [{"writes": [1], "dur_us": 10}, {"writes": [2], "dur_us": 20}, {"writes": [3], "dur_us": 30, "after": [0]}]
    replay = {"op": "graph_replay", "graph": "g", "nodes": nodes}
    steps = [{**replay, "stream": "a"}, {**replay, "stream": "b"}, kernel("a")]

    assert runs_us(steps) == {"s1": (2, 42), "s2": (42, 82), "s3": (42, 52)}


def test_a_reused_block_blocks_until_marked_streams_are_done() -> None:
    alloc = {"op": "tensor_alloc", "tensor": "t", "mem": "M", "stream": "a"}
    mark = {"op": "record_stream", "tensor": "t", "stream": "b"}
    steps = [alloc, kernel("b", 200, reads_buf=["M"]), mark, {"op": "tensor_free", "tensor": "t"}, alloc]

    assert calls_us(steps)["s5"] == (8, 204)
    unmarked = calls_us([*steps[:2], *steps[3:]])
    assert unmarked["s4"] == (6, 8)


def collective(name: str, rank: int, host_us: float = 2) -> Step:
    return {"op": "collective", "group": "tp", "name": name, "rank": rank, "thread": f"r{rank}", "host_us": host_us}


def test_a_collective_returns_when_all_ranks_are_in_and_never_if_they_differ() -> None:
    steps = [collective("x", 0), collective("x", 1, 300), collective("y", 0), collective("x", 1), collective("z", 0)]
    calls = calls_us(steps)

    never = NEVER / 1e3
    assert calls == {"s1": (0, 300), "s2": (0, 300), "s3": (300, never), "s4": (300, never), "s5": (never, never)}


def test_blocked_time() -> None:
    """From when the stream is free and the operation issued: the second wait of an operation adds what is left."""
    steps = [
        *(kernel("a", 100), record("e", "a"), kernel("a", 200), kernel("b", 50)),
        *(wait("e", "b"), fence("b", "a"), kernel("b")),
    ]
    planned: Plan = plan(trace_of(steps))

    assert [wait.blocked_ns for wait in planned.waits] == [102_000 - 58_000, 200_000]


# -- stalls ----------------------------------------------------------------------------------------------------


def test_a_fence_that_nothing_needs() -> None:
    steps = [kernel("f", 500, writes=[1]), fence("b", "f"), kernel("b", writes=[2])]

    assert [(s["at"], s["needed"], s["cause"]) for s in stalls(steps)] == [("s2", None, "coarse_fence")]
    assert stalls([steps[0], steps[2]]) == []
    assert stalls([*steps[:2], kernel("b", reads=[1])]) == []  # needed in full


def test_a_fence_in_front_of_a_graph() -> None:
    """What counts is when the replay begins, however long it takes."""
    steps = [kernel("f", 500, writes=[1]), fence("b", "f")]
    replay = {"op": "graph_replay", "graph": "g", "stream": "b"}

    assert [s["at"] for s in stalls([*steps, {**replay, "nodes": [{"writes": [2], "dur_us": 450}]}])] == ["s2"]
    assert stalls([*steps, {**replay, "nodes": [{"reads": [1], "dur_us": 450}]}]) == []


def test_a_fence_that_waits_for_too_much() -> None:
    gather, layers, rewrite = kernel("f", 15, reads=[1]), kernel("f", 900, writes=[2]), kernel("s", writes=[1])

    [stall] = stalls([gather, layers, fence("s", "f"), rewrite])

    assert (stall["at"], stall["waiter"], stall["needed"]) == ("s3", "stream:s", "s1")
    assert stall["blocked_us"] == 917 - 8
    assert stalls([gather, record("e", "f"), layers, wait("e", "s"), rewrite]) == []
    assert stalls([gather, {**layers, "dur_us": 90}, fence("s", "f"), rewrite]) == []  # saves too little


def test_a_host_that_blocks_for_too_much() -> None:
    steps = [kernel("f", 20, writes_buf=["out"]), kernel("f", 700, writes=[1]), {"op": "host_sync", "scope": "device"}]
    use = {"op": "host_access", "reads_buf": ["out"]}

    assert [(s["at"], s["waiter"], s["needed"]) for s in stalls([*steps, use])] == [("s3", "thread:main", "s1")]
    assert stalls([steps[0], record("e", "f"), steps[1], {"op": "event_sync", "event": "e"}, use]) == []
    assert stalls(steps) == []  # nothing is seen to come after it


def test_a_needless_sync_and_one_that_is_needed() -> None:
    steps = [kernel("f", 700, writes=[1], writes_buf=["out"]), record("e", "f"), {"op": "event_sync", "event": "e"}]

    [stall] = stalls([*steps, kernel("f", writes=[1])])

    assert (stall["at"], stall["needed"], stall["cause"]) == ("s3", None, "blocking_host")
    assert stalls([*steps, {"op": "host_access", "reads_buf": ["out"]}]) == []


def test_of_two_waits_of_which_one_is_enough_none_is_reported() -> None:
    """Dropping either saves nothing: the other one blocks instead."""
    first, second = fence("b", "f"), fence("b", "f")
    steps = [kernel("f", 500, writes=[1]), first, second, kernel("b", reads=[1])]

    assert stalls(steps) == []


def test_what_is_confirmed_is_what_is_proposed() -> None:
    """The trace that the analyzer confirms a narrower wait with: one record, right behind what is needed."""
    gather, layers, rewrite = kernel("f", 15, reads=[1]), kernel("f", 900, writes=[2]), kernel("s", writes=[1])
    trace = trace_of([gather, layers, fence("s", "f"), rewrite, record("e", "f"), record("g", "f")])
    [stall] = find_stalls(trace).stalls
    search = _Search(trace)
    fenced = next(step.record for step in search._steps if isinstance(step.record, WaitStream))
    changed = [step.record for step in search._changed(search._steps, fenced, stall)]

    assert [type(record).__name__ for record in changed] == [
        *("Kernel", "EventRecord", "Kernel", "EventWait", "Kernel", "EventRecord", "EventRecord"),
    ]
    mark, narrowed = changed[1], changed[3]
    assert isinstance(mark, EventRecord)
    assert isinstance(narrowed, EventWait)
    assert (mark.stream, narrowed.stream) == (fenced.on, fenced.waiter)
    assert mark.event == narrowed.event
    taken = {record.event for record in trace if isinstance(record, EventRecord)}
    assert len({mark.event, *taken, search._event(), search._event()}) == len(taken) + 3


def test_what_is_confirmed_of_a_wait_that_moves() -> None:
    """It is made by the other thread, right before the step that needs it."""
    trace = trace_of(handed_over(sync="main"))
    [stall] = find_stalls(trace).stalls
    search = _Search(trace)
    sync = next(step.record for step in search._steps if isinstance(step.record, EventSync))
    changed = [step.record for step in search._changed(search._steps, sync, stall)]

    assert [type(record).__name__ for record in changed] == [
        *("Memcpy", "EventRecord", "EventRecord", "ThreadPost", "ThreadRecv", "EventSync", "IoBegin", "Kernel"),
    ]
    mark, moved, put = changed[1], changed[5], changed[6]
    assert isinstance(mark, EventRecord)
    assert isinstance(moved, EventSync)
    assert moved.event == mark.event
    assert moved.thread == put.thread != sync.thread


def test_following_the_whole_report_is_safe() -> None:
    """Stream c may drop its own fence or lean on the host's sync, but not both be dropped."""
    steps = [
        *(kernel("f", 500, writes=[1]), fence("c", "f"), kernel("c", 10), {"op": "host_sync", "scope": "device"}),
        kernel("c", reads=[1]),
    ]

    assert [s["at"] for s in stalls(steps)] == ["s2"]


def handed_over(*, sync: str, own_work: bool = True) -> list[Step]:
    """Main copies and hands over to a storage thread; ``sync`` is the thread that waits for the copy."""
    drain = {"op": "event_sync", "event": "e", "thread": sync}
    post, recv = {"op": "thread_post", "chan": "q"}, {"op": "thread_recv", "chan": "q", "thread": "storage"}
    put = {"op": "io_begin", "io": "p", "kind": "storage_write", "reads_host": [4], "thread": "storage", "dur_us": 50}
    copy = {"op": "memcpy", "kind": "d2h", "stream": "w", "device_pages": [3], "host_pages": [4], "dur_us": 900}
    middle = [drain, post, recv] if sync == "main" else [post, recv, drain]
    return [copy, record("e", "w"), *middle, put, *([kernel("f", writes=[9])] if own_work else [])]


def test_a_wait_that_belongs_to_another_thread() -> None:
    [stall] = stalls(handed_over(sync="main"))

    assert (stall["at"], stall["cause"], stall["waiter"]) == ("s3", "wrong_thread", "thread:main")
    assert stall["move_to"] == {"thread": "storage", "on": "s1", "before": "s6"}
    assert stalls(handed_over(sync="storage")) == []
    assert stalls(handed_over(sync="main", own_work=False)) == []  # a thread whose job it is to wait
    assert stalls([*handed_over(sync="main"), {"op": "host_access", "reads_host": [4]}]) == []  # its own work needs it
    copy, *rest = handed_over(sync="main")
    assert len(stalls([{**copy, "dur_us": 104}, *rest])) == 1  # its own work could begin 100 us earlier
    assert stalls([{**copy, "dur_us": 103}, *rest]) == []


def layered(*, host_us: float, dur_us: float = 300, waits: bool = True) -> list[Step]:
    """Three layer copies, 400 µs of host work, then three layers of a forward round."""
    steps: list[Step] = []
    for layer in range(3):
        steps += [load(dur_us, layer, host_us=host_us), record(f"e{layer}", "load")]
    steps.append({"op": "host_access", "dur_us": 400})
    for layer in range(3):
        steps += [wait(f"e{layer}", "f")] if waits else [fence("f", "load")] * (layer == 0)
        steps += [kernel("f", 350, reads=[30], layer=layer)]
    return steps


def test_copies_that_host_call_time_keeps_from_overlapping() -> None:
    [stall] = stalls(layered(host_us=2400), layers=3)

    assert (stall["class"], stall["at"], stall["waiter"]) == ("no_overlap", "s9", "stream:f")
    assert stall["copies"] == ["s1", "s3", "s5"]
    assert stall["blocked_us"] == 3 * 2402 + 402 + 4 - 2400
    assert stalls(layered(host_us=2), layers=3) == []
    assert stalls(layered(host_us=2, dur_us=1), layers=3) == []  # over at once: no call time to blame
    assert stalls(layered(host_us=2400, waits=False), layers=3) == []  # it waits for all: no pipeline


def test_a_copy_that_still_runs_overlaps() -> None:
    """Slow calls, but the last copy ends behind the consumer's start: that is an overlap, if a short one."""
    steps = layered(host_us=2400, dur_us=300)
    steps[4] = load(410, 2, host_us=2400)

    assert stalls(steps, layers=3) == []
    steps[4] = load(405, 2, host_us=2400)
    assert len(stalls(steps, layers=3)) == 1


def slowed(steps: list[Step], *slow: int, host_us: float = 2400) -> list[Step]:
    """``steps``, some of whose calls take long."""
    return [{**step, "host_us": host_us} if number in slow else step for number, step in enumerate(steps, 1)]


@pytest.mark.parametrize("slow", [(1, 3, 5), (2, 4, 6), (7,), (8,), (9,)])
def test_it_does_not_matter_which_call_takes_so_long(slow: tuple[int, ...]) -> None:
    """A copy's, an event's, that of the host's own work, the wait's or the consumer's own: only not one behind it."""
    steps = layered(host_us=2)

    [stall] = stalls(slowed(steps, *slow), layers=3)
    assert (stall["class"], stall["at"], stall["copies"]) == ("no_overlap", "s9", ["s1", "s3", "s5"])
    assert stalls(slowed(steps, 10), layers=3) == []


def test_the_call_that_starts_the_copies_puts_all_off_alike() -> None:
    """However long it takes; unless their stream is busy meanwhile, then only the consumer is late."""
    steps = slowed(layered(host_us=2, dur_us=50), 1)

    assert stalls(steps, layers=3) == []
    [stall] = stalls([kernel("load", 2400), *steps], layers=3)
    assert (stall["at"], stall["blocked_us"]) == ("s10", 416.0)


def test_a_consumer_that_waits_for_no_copy_is_no_pipeline() -> None:
    """That is a race, and nothing that could be sooner."""
    steps = [step for step in layered(host_us=2400) if step["op"] != "event_wait"]

    assert stalls(steps, layers=3) == []
    assert stalls([*steps[:7], wait("e0", "f"), *steps[7:]], layers=3) != []


def test_what_hides_the_copies_anyway() -> None:
    """The CPU's own work or an earlier kernel, unless call time delays the consumer by more than half of all."""
    for place, hides in ((6, {"op": "host_access", "dur_us": 5000}), (0, kernel("f", 9000))):
        steps = layered(host_us=60)
        steps.insert(place, hides)
        assert stalls(steps, layers=3) == []
    steps = layered(host_us=2400)
    assert [stall["at"] for stall in stalls([*steps[:6], kernel("f", 100), *steps[6:]], layers=3)] == ["s10"]
    for host_us, at in ((150, []), (300, ["s9"]), (2400, ["s9"])):  # 296 of 714 us, 596 of 1014, nearly all
        assert [stall["at"] for stall in stalls(layered(host_us=host_us, dur_us=50), layers=3)] == at


def test_copies_of_whole_pages_one_after_another() -> None:
    """Each consumer waits for its own page; not so if the first waits for all, or if each page has its turn."""
    copies = [step for page in (30, 31) for step in (load(300, device_pages=[page]), record(f"e{page}", "load"))]
    work = {"op": "host_access", "dur_us": 400}
    parts = [[wait(f"e{page}", "f"), kernel("f", 350, reads=[page])] for page in (30, 31)]

    [stall] = stalls([*slowed(copies, 1, 3), work, *parts[0], *parts[1]])
    assert (stall["class"], stall["at"], stall["copies"]) == ("no_overlap", "s7", ["s1", "s3"])
    assert stalls([*copies, work, *parts[0], *parts[1]]) == []
    assert stalls([*slowed(copies, 1, 3), work, wait("e31", "f"), *parts[0], *parts[1]]) == []
    assert stalls([*slowed(copies[:2], 1), work, *parts[0], *slowed(copies[2:], 1), work, *parts[1]]) == []
    before = [load(5, device_pages=[29]), fence("f", "load"), kernel("f", 5, reads=[29])]
    [stall] = stalls([*before, *slowed(copies, 1, 3), work, *parts[0], *parts[1]])
    assert (stall["at"], stall["copies"]) == ("s10", ["s4", "s6"])
    again = [load(300, device_pages=[30]), record("e31", "load")]  # the same page, in its second use
    assert stalls([*slowed([*copies[:2], *again], 1, 3), work, *parts[0], *parts[1]]) == []


def test_a_page_that_is_copied_for_itself_in_every_layer() -> None:
    """The first consumer waits for two copies of each layer: one stall, with all copies."""
    steps = []
    for layer in range(3):
        steps += [load(150, layer, device_pages=[page], host_us=1200) for page in (30, 31)]
        steps += [record(f"e{layer}", "load")]
    steps.append({"op": "host_access", "dur_us": 400})
    for layer in range(3):
        steps += [wait(f"e{layer}", "f"), kernel("f", 350, reads=[31, 30], layer=layer)]

    [stall] = stalls(steps, layers=3)
    assert (stall["at"], stall["copies"]) == ("s12", ["s1", "s2", "s4", "s5", "s7", "s8"])
    assert stall["blocked_us"] == 6 * 1200 + 3 * 2 + 402 + 4 - 1200


def test_copies_on_two_streams_for_one_consumer() -> None:
    """It stands still since the first of them that began, which need not be the first that was issued."""
    steps = [kernel("load", 3000)]
    for layer in range(3):
        steps += [load(150, layer, host_us=1200), load(150, layer, host_us=1200, device_pages=[31], stream="other")]
        steps += [record(f"e{layer}", "load"), record(f"o{layer}", "other")]
    steps.append({"op": "host_access", "dur_us": 400})
    for layer in range(3):
        steps += [wait(f"e{layer}", "f"), wait(f"o{layer}", "f"), kernel("f", 350, reads=[30, 31], layer=layer)]

    [stall] = stalls(steps, layers=3)
    assert (stall["at"], stall["copies"]) == ("s17", ["s2", "s3", "s6", "s7", "s10", "s11"])
    assert stall["blocked_us"] == 6 * 1200 + 3 * 4 + 402 + 6 - 2 * 1200


def test_a_kernel_that_only_moves_pages_is_a_copy() -> None:
    for more, count in (({}, 1), ({"reads": [31]}, 0)):
        moves = {"reads_host": [2], "writes": [30], **more}
        steps = [
            kernel("load", 300, layer=step["layer"], host_us=2400, **moves) if step["op"] == "memcpy" else step
            for step in layered(host_us=2400)
        ]
        assert len(stalls(steps, layers=3)) == count


def test_layers_that_no_copy_brings_are_not_kept_waiting() -> None:
    """Kernels above or below the layers of the copies use other memory, though the pages have the same numbers."""
    steps = layered(host_us=2400)
    for shift in (3, -3):
        kernels = [{**s, "layer": s["layer"] + max(shift, 0)} if s["op"] == "kernel" else s for s in steps]
        moved = [{**s, "layer": s["layer"] - min(shift, 0)} if s["op"] == "memcpy" else s for s in kernels]
        assert stalls(moved, layers=6) == []


def test_ranks_that_diverge() -> None:
    """Reported at the collective that was left out, whichever comes first in the file."""
    steps = [collective("a", 0), collective("a", 1), collective("b", 0), collective("a", 1)]

    for order in ((0, 1, 2, 3), (1, 0, 3, 2)):
        shuffled = [{"id": f"s{n + 1}", **steps[n]} for n in order]
        [stall] = found(find_stalls(trace := trace_of(shuffled)), trace)
        assert (stall["class"], stall["at"], stall["waiter"]) == ("tp_divergence", "s3", "thread:r0")
        assert (stall["ranks"], stall["deadlock"], stall["blocked_us"]) == ([0, 1], True, None)
    assert stalls([*steps[:3], collective("b", 1)]) == []


def test_a_rank_that_ends_while_its_peers_go_on() -> None:
    """A scenario is a whole program, so a collective that a rank has not come to is one that it skips."""
    steps = [collective("a", 0), collective("a", 1), collective("a", 2), collective("a", 2), collective("a", 0)]
    for order in (steps, [*steps[:3], steps[4], steps[3]]):
        [stall] = stalls(order)
        assert (stall["class"], stall["at"]) == ("tp_divergence", f"s{1 + order.index(steps[4], 3)}")
        assert (stall["ranks"], stall["deadlock"]) == ([0, 1, 2], True)
    assert stalls([*steps, collective("a", 1)]) == []
    assert stalls([collective("a", 0), collective("a", 0)]) == []  # the only rank of its group
    trace = trace_of(steps)
    lost = Lost(OpId(9), ThreadId(0), 0, 1, DropReason.RING_FULL)
    assert find_stalls(make_trace("t", [*trace, lost], planned_ns=trace.planned_ns)).stalls == ()
    assert find_stalls(make_trace("t", list(trace))).stalls == ()  # a recording: it may have been cut off


@pytest.mark.parametrize(
    ("others", "ranks"),
    [
        ([], None),  # one rank
        ([kernel("g", 500, writes=[2], rank=1, thread="r1")], [0, 1]),
        ([{**collective("b", 1), "group": "pp"}], [0, 1]),  # and the other way round
        ([{**collective("b", rank), "group": "pp"} for rank in (1, 2)], None),  # nobody can tell whose peer rank 0 is
        ([kernel("g", rank=3), *({**collective("b", rank), "group": "pp"} for rank in (1, 2))], [0, 3]),
        ([kernel("g", rank=1), collective("a", 1)], None),
    ],
)
def test_a_collective_that_only_one_rank_enters(others: list[Step], ranks: list[int] | None) -> None:
    """It waits for those that enter none together with others."""
    for steps in ([collective("a", 0), *others], [*others, collective("a", 0)]):
        at = steps.index(collective("a", 0)) + 1
        of_group = [stall for stall in stalls(steps) if stall["at"] == f"s{at}"]
        assert [(stall["class"], stall["ranks"]) for stall in of_group] == ([("tp_divergence", ranks)] if ranks else [])


def test_a_wait_behind_a_divergence_is_the_divergence() -> None:
    """It never ends, needed or not; the twin whose ranks agree does, and is not needed."""
    work = [kernel("f", 500, writes=[1], thread="r0"), fence("b", "f"), kernel("b", writes=[2])]

    for name, kinds in (("y", ["tp_divergence"]), ("x", ["over_sync"])):
        steps = [collective("x", 0), collective(name, 1), *work]
        assert [stall["class"] for stall in stalls(steps)] == kinds


# -- limits ----------------------------------------------------------------------------------------------------


def test_what_is_not_searched_is_said() -> None:
    steps = [kernel("f", 500, writes=[1]), fence("b", "f"), kernel("b", writes=[2])]
    trace = trace_of(steps)
    lost = Lost(OpId(-1), ThreadId(0), 0, count=1, reason=DropReason.RING_FULL)

    assert "records were lost" in find_stalls(make_trace("t", [*trace, lost], planned_ns=trace.planned_ns)).note
    for reason in DropReason:
        lost = Lost(OpId(-1), ThreadId(0), 0, count=1, reason=reason)
        report = find_stalls(make_trace("t", [*trace, lost], planned_ns=trace.planned_ns))
        assert (len(report.stalls), report.skipped) == ((1, False) if reason is DropReason.UNRESOLVED else (0, True))
    assert "takes the durations" in find_stalls(make_trace("t", list(trace))).note
    long = find_stalls(trace_of(steps * (MAX_RECORDS // len(steps) + 1)))
    assert (long.stalls, long.skipped) == ((), True)


# -- cases and the analyzer --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_cases(path: Path) -> None:
    """Every expected stall, and on exhaustive files nothing else."""
    case = json.loads(path.read_text())
    trace = parse_scenario(path.read_bytes(), source=path.name)
    report = find_stalls(trace)
    mine = {stall["at"]: stall for stall in found(report, trace)}
    expected = [verdict for verdict in case["expect"] if verdict["verdict"] == "stall"]

    assert not report.skipped
    for verdict in expected:
        stall = mine[verdict["at"]]
        same = verdict.keys() & {"class", "cause", "waiter", "needed", "move_to", "copies", "ranks", "deadlock"}
        assert {key: stall[key] for key in same} == {key: verdict[key] for key in same}
        if "min_us" in verdict:
            assert isinstance(stall["blocked_us"], float)
            assert stall["blocked_us"] >= verdict["min_us"]
    if case["exhaustive"]:
        assert len(report.stalls) == len(expected)


def analyzed(records: Sequence[Record]) -> set[tuple[OpId, OpId]]:
    """Pairs that the analyzer reports."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return set(sink.pairs)


def test_the_plan_orders_what_the_analyzer_orders() -> None:
    """The search's own order is not a second opinion: on random programs, and without each wait, it never differs."""
    for seed in range(150):
        records = cast("list[AnyRecord]", random_program(seed))
        planned = plan(make_trace("random", records))
        conflicts = planned.conflicts()
        assert planned.pairs(planned.unordered(conflicts, {})) == analyzed(records), seed
        for made in planned.waits:
            if made.awaited:
                left = planned.unordered(conflicts, planned.without(made, {}))
                assert planned.pairs(left) == analyzed([r for r in records if r is not made.record]), seed


def test_a_report_that_would_race_is_cut_down() -> None:
    """What the analyzer does not confirm is left out, one by one: of two waits alike the second."""
    steps = [kernel("a", 500, writes=[5]), fence("b", "a"), fence("b", "a"), fence("c", "a"), kernel("b", writes=[5])]
    trace = trace_of([*steps, kernel("c", writes=[7])])
    search = _Search(trace)
    fences = [record for record in trace if isinstance(record, WaitStream)]
    proposed = [
        (record, Stall(StallClass.OVER_SYNC, StallCause.COARSE_FENCE, record.op, "stream:b", 500_000))
        for record in fences
    ]

    assert [stall.at for stall in search._confirmed([proposed[0], proposed[2]])] == [fences[0].op, fences[2].op]
    assert [stall.at for stall in search._confirmed(proposed)] == [fences[0].op, fences[2].op]


def test_a_search_that_takes_too_long_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_obs.analyzer.stalls.MAX_PLANNED", -1)
    steps = [kernel("a", 500, writes=[5]), fence("b", "a"), kernel("b", writes=[6])]
    report = find_stalls(trace_of(steps))

    assert report.stalls == ()
    assert report.note.startswith("stalls searched in part")


def test_ranks_that_enter_different_collectives_in_another_order() -> None:
    """Nobody left one out: reported at the lowest rank's, in whatever order the file has them."""
    ranks = [collective("a", 1), collective("b", 0), collective("b", 1), collective("a", 0)]
    for steps in (ranks, [ranks[1], ranks[0], *ranks[2:]]):
        (stall,) = stalls(steps)
        assert (stall["at"], stall["waiter"]) == (f"s{1 + steps.index(ranks[1])}", "thread:r0")


def test_a_rank_that_enters_more_often_waits_for_nobody() -> None:
    """A collective that the other rank has not come to yet returns; one that it never left does too."""
    steps = [collective("x", 0), collective("x", 1, 300), collective("x", 0), kernel("a", 5, thread="r0")]
    assert calls_us(steps)["s3"] == (300, 302)
    steps = [*steps[:3], collective("z", 1), kernel("a", 5, thread="r0")]
    assert runs_us(steps).get("s5", (NEVER / 1e3,))[0] >= NEVER / 1e3
    steps = [collective("x", 0), collective("x", 1), collective("x", 2), collective("y", 0), collective("y", 1, 300)]
    assert calls_us([*steps, kernel("a", 5, thread="r2")])["s4"] == (2, 302)


def test_a_call_is_over_long_before_what_it_issued() -> None:
    assert calls_us([kernel("a", 100), fence("b", "a"), kernel("b", 5)]) == {"s1": (0, 2), "s2": (2, 4), "s3": (4, 6)}


@pytest.mark.parametrize(("dur_us", "count"), [(104, 1), (103.9, 0)])
def test_a_stall_is_worth_a_line_from_100_us(dur_us: float, count: int) -> None:
    """The fence is issued at 4 us, the kernel behind it at 6."""
    assert len(stalls([kernel("a", dur_us), fence("b", "a"), kernel("b")])) == count


def test_a_race_elsewhere_hides_no_stall() -> None:
    race = [kernel("x", writes=[1]), kernel("y", writes=[1])]
    needless = [kernel("a", 500), fence("b", "a"), kernel("b")]

    assert [stall["at"] for stall in stalls([*race, *needless])] == ["s4"]


def test_a_stream_that_runs_nothing_more_is_not_blocked() -> None:
    """A host thread is, whatever comes after."""
    sync = {"op": "host_sync", "scope": "stream", "stream": "a"}
    assert [wait.blocked_ns for wait in plan(trace_of([kernel("a", 500), fence("b", "a")])).waits] == [0]
    assert [wait.blocked_ns for wait in plan(trace_of([kernel("a", 500), sync])).waits] == [500_000]


def test_what_waits_for_itself_never_starts() -> None:
    """A change that would make a cycle gains nothing."""
    planned = plan(trace_of([kernel("a", 10), kernel("b", 10)]))
    (first, _), (second, _) = planned._run_items.values()
    start, end = planned._network.solve({first: [second], second: [first]})

    assert start[first] == start[second] == end[first] == end[second] == NEVER


def test_a_search_stops_where_it_has_taken_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was found by then is reported, with a note."""
    needless = [step for name in "bcd" for step in (fence(name, "a"), kernel(name))]
    steps = [kernel("a", 900), *needless]
    assert [stall["at"] for stall in stalls(steps)] == ["s2", "s4", "s6"]

    monkeypatch.setattr("hicache_obs.analyzer.stalls.MAX_PLANNED", len(steps))
    report = find_stalls(trace_of(steps))
    assert len(report.stalls) == 1
    assert report.skipped


def test_the_wait_moves_to_the_first_that_needs_it_and_for_the_last_it_needs() -> None:
    """Two operations of another thread need two of a stream, one after the other."""
    post, recv = {"op": "thread_post", "chan": "q"}, {"op": "thread_recv", "chan": "q", "thread": "t"}
    steps = [
        kernel("a", 300, writes=[5]),
        kernel("a", 300, writes=[6]),
        {"op": "host_sync", "scope": "stream", "stream": "a"},
        post,
        kernel("c", 5),
        recv,
        kernel("b", 5, thread="t", writes=[5]),
        kernel("b", 5, thread="t", writes=[6]),
    ]
    (stall,) = stalls(steps)
    assert stall["move_to"] == {"thread": "t", "on": "s2", "before": "s7"}
    mixed = [*steps, kernel("d", 5, writes=[6])]  # its own thread needs it too
    assert all(stall["move_to"] is None for stall in stalls(mixed))
