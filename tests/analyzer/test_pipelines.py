"""Which copies make a pipeline, and who consumes one."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache_obs.analyzer.pipelines import find_pipelines
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.trace import Trace

Step = dict[str, Any]


def trace_of(steps: list[Step]) -> Trace:
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    return parse_scenario(json.dumps({"steps": numbered}).encode(), source="test")


def load(page: int | str, layer: int | None = None, stream: str = "l") -> Step:
    step = {"op": "memcpy", "kind": "h2d", "stream": stream, "host_pages": [1], "device_pages": [page]}
    return step if layer is None else {**step, "layer": layer}


def read(page: int | str, layer: int | None = None, stream: str = "f", **keys: Any) -> Step:
    step = {"op": "kernel", "stream": stream, "reads": [page], **keys}
    return step if layer is None else {**step, "layer": layer}


SAVE = {"op": "memcpy", "kind": "d2h", "stream": "w", "device_pages": [5]}


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        ([load(5, 0), load(5, 1)], ["s1 s2"]),
        ([load(5, 1), load(5, 0)], ["s1 s2"]),
        ([load(5, 0), load(5, 0)], []),
        ([load(5, 0), load(5, 1), load(5, 0), load(5, 1)], ["s1 s2", "s3 s4"]),
        ([load(5, 0), load(6, 1)], []),
        ([load(5, 0), load(5, 1, "m")], []),
        ([load(5, 0), load(6, 0), load(5, 1), load(6, 1)], ["s1 s3", "s2 s4"]),
        ([load(5, 0), load(5)], []),
        ([load(5), load(6)], ["s1 s2"]),
        ([load(5), load("a:5")], ["s1 s2"]),
        ([load(5), load(5), load(6)], ["s2 s3"]),
        ([load(5), load(6, stream="m")], []),
        ([load(5), read(5), load(6), load(7)], ["s3 s4"]),
        ([load(5), read(9), load(6), load(7)], ["s1 s3 s4"]),
        ([load(5), read(5, stream="l"), load(6), load(7)], ["s1 s3 s4"]),
        ([{**SAVE, "host_pages": [1]}, {**SAVE, "host_pages": [2]}], ["s1 s2"]),
        ([{**SAVE, "dst_buf": "a"}, {**SAVE, "dst_buf": "b"}], ["s1 s2"]),
        ([{"op": "event_record", "event": "e", "stream": "l"}, load(5), load(6)], ["s2 s3"]),
    ],
)
def test_what_makes_a_pipeline(steps: list[Step], expected: list[str]) -> None:
    trace = trace_of(steps)
    found = [[trace.label(copy.op) for copy in pipeline.copies] for pipeline in find_pipelines(trace)]
    assert found == [copies.split() for copies in expected]


@pytest.mark.parametrize(
    ("keys", "count"),
    [
        ({"reads_host": [1], "writes": [5]}, 1),
        ({"reads": [5], "writes_host": [1]}, 1),
        ({"reads_host": [1], "writes": [5], "reads_buf": ["i"], "writes_buf": ["o"]}, 1),
        ({"reads_host": [1], "reads": [6], "writes": [5]}, 0),
        ({"reads_host": [1], "writes_host": [2]}, 0),
        ({"reads": [6], "writes": [5]}, 0),
        ({"writes": [5], "writes_host": [1]}, 0),
        ({"writes": [5]}, 0),
    ],
)
def test_kernels_that_copy(keys: Step, count: int) -> None:
    """Those that only move pages between host and device."""
    trace = trace_of([{"op": "kernel", "stream": "l", "layer": layer, **keys} for layer in (0, 1)])
    assert len(find_pipelines(trace)) == count


@pytest.mark.parametrize(
    ("step", "consumes"),
    [
        (read(5, 2), True),
        (read(5, 3), True),
        (read(5), True),
        (read(5, 1), False),
        (read(5, 4), False),
        (read(6, 2), False),
        (read("a:5", 2), False),
        (read(5, 2, stream="l"), False),
        (read(9, 2, writes=[5]), True),
        (load(5, 3, "m"), True),
        ({"op": "graph_replay", "graph": "g", "stream": "f", "reads": [5]}, True),
        ({"op": "relocate", "stream": "f", "moves": [[5, 9]]}, True),
        ({"op": "host_access", "reads_host": [5]}, False),
    ],
)
def test_who_consumes_it(step: Step, consumes: bool) -> None:
    """Whoever touches its pages in its layers on another stream, after the first copy was issued."""
    copies = [load(5, 2), load(5, 3)]
    trace = trace_of([*copies, step])
    (pipeline,) = (p for p in find_pipelines(trace) if len(p.copies) == 2)
    assert pipeline.consumed_by(trace.records[-1]) is consumes

    trace = trace_of([step, *copies])
    (pipeline,) = (p for p in find_pipelines(trace) if p.copies[0].op == 2)
    (first,) = (record for record in trace if record.op == 1)
    assert not pipeline.consumed_by(first)
