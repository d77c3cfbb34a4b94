"""Scenario files: what the 27 cases become, and what a malformed file is told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hicache_obs.errors import TraceError
from hicache_obs.readers.scenario import NOT_YET, parse_scenario, read_scenario
from hicache_obs.records import (
    ALL_LAYERS,
    Define,
    Direction,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostAccess,
    HostSync,
    Kernel,
    Memcpy,
    Mode,
    PageAlloc,
    PageFree,
    Space,
    StreamKind,
    WaitStream,
)

CASES = Path(__file__).resolve().parent.parent / "cases"

# First step of a kind that has no record yet; the cases not named here are read.
UNSUPPORTED = {
    "10-graph-replay-skips-layer-waits": ("s7", "graph_replay"),
    "15-scheduler-blocks-for-storage-thread": ("s5", "thread_post"),
    "19-readers-share-page": ("s7", "thread_post"),
    "22-index-tensor-freed-under-side-stream": ("s1", "tensor_alloc"),
    "23-rank-skips-collective": ("s3", "collective"),
    "24-compaction-moves-inflight-page": ("s2", "relocate"),
    "27-sync-on-the-wrong-threads-stream": ("s2", "thread_post"),
}
KINDS = {
    "kernel": Kernel,
    "memcpy": Memcpy,
    "event_record": EventRecord,
    "event_wait": EventWait,
    "wait_stream": WaitStream,
    "event_query": EventQuery,
    "event_sync": EventSync,
    "host_sync": HostSync,
    "host_access": HostAccess,
    "alloc": PageAlloc,
    "free": PageFree,
}


def test_all_cases_are_here():
    assert [int(path.name[:2]) for path in sorted(CASES.glob("*.json"))] == list(range(1, 28))


@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
def test_every_case_is_read_or_refused_by_name(path):
    if path.stem in UNSUPPORTED:
        step, op = UNSUPPORTED[path.stem]
        with pytest.raises(TraceError) as raised:
            read_scenario(path)
        assert str(raised.value) == f"{path}: step {step}: op {op!r} is not supported yet"
        return
    steps = json.loads(path.read_text())["steps"]
    trace = read_scenario(path)
    records = [record for record in trace if not isinstance(record, Define)]
    assert [type(record) for record in records] == [KINDS[step["op"]] for step in steps]
    assert [trace.label(record.op) for record in records] == [step["id"] for step in steps]
    assert [f"s{record.op}" for record in records] == [step["id"] for step in steps]
    assert trace.planned_ns == {int(step["id"][1:]): step.get("dur_us", 10) * 1000 for step in steps}
    assert [record.host_ns for record in records] == [
        sum(earlier.get("host_us", 2) * 1000 for earlier in steps[:number]) for number in range(len(steps))
    ]
    for record, step in zip(records, steps, strict=True):
        assert trace.names.thread(record.thread) == step.get("thread", "main")
        for key in ("stream", "on", "waiter"):
            if key in step and not isinstance(record, HostSync):
                assert trace.names.stream(getattr(record, key)) == step[key]
        if isinstance(record, (Kernel, Memcpy, HostAccess)):
            assert touched(trace, record) == expected(step)
            assert record.layers == ((step["layer"], step["layer"] + 1) if "layer" in step else ALL_LAYERS)
            if "name" in step:
                assert trace.names.site(record.site) == step["name"]


def touched(trace, record):
    """What a record accesses, in the scenario's words."""
    return Counter(
        (access.space.name, access.mode.name, trace.names.buffer(i) if access.space is Space.BUFFER else i)
        for access in record.accesses
        for i in access.ids.tolist()
    )


def expected(step):
    """The same, straight from the file."""
    found: Counter[tuple[str, str, object]] = Counter()
    for key, space, mode in (
        ("reads", "DEVICE", "READ"),
        ("writes", "DEVICE", "WRITE"),
        ("reads_host", "HOST", "READ"),
        ("writes_host", "HOST", "WRITE"),
        ("reads_buf", "BUFFER", "READ"),
        ("writes_buf", "BUFFER", "WRITE"),
        ("src_pages", "DEVICE", "READ"),
        ("dst_pages", "DEVICE", "WRITE"),
        ("device_pages", "DEVICE", "WRITE" if step.get("kind") == "h2d" else "READ"),
        ("host_pages", "HOST", "READ" if step.get("kind") == "h2d" else "WRITE"),
    ):
        found.update((space, mode, item) for item in step.get(key, ()))
    for key, mode in (("src_buf", "READ"), ("dst_buf", "WRITE")):
        if key in step:
            found["BUFFER", mode, step[key]] += 1
    return found


def parse(*steps, **keys):
    body = {"steps": [{"id": f"s{n}", **step} for n, step in enumerate(steps, 1)], **keys}
    trace = parse_scenario(json.dumps(body).encode(), source="x.json")
    return trace, [record for record in trace if not isinstance(record, Define)]


def test_streams_have_their_kind_declared_or_not():
    streams = {"a": {"kind": "legacy"}, "b": {"kind": "blocking"}, "c": {}}
    trace, records = parse({"op": "wait_stream", "waiter": "d", "on": "b"}, streams=streams)
    names = {trace.names.streams[number]: kind for number, kind in trace.names.stream_kinds.items()}
    assert names == {
        "a": StreamKind.LEGACY,
        "b": StreamKind.BLOCKING,
        "c": StreamKind.NONBLOCKING,
        "d": StreamKind.NONBLOCKING,
    }
    assert (trace.names.stream(records[0].waiter), trace.names.stream(records[0].on)) == ("d", "b")


def test_a_page_of_another_pool_is_another_page():
    trace, (kernel,) = parse({"op": "kernel", "stream": "f", "reads": [5, "mamba:5"], "writes": ["mamba:6"]})
    assert [(a.mode, trace.names.pools[a.pool], a.ids.tolist()) for a in kernel.accesses] == [
        (Mode.READ, "kv", [5]),
        (Mode.READ, "mamba", [5]),
        (Mode.WRITE, "mamba", [6]),
    ]


def test_copies_in_each_direction():
    _, records = parse(
        {"op": "memcpy", "kind": "h2d", "stream": "l", "host_pages": [1, 2], "device_pages": [8, 7]},
        {"op": "memcpy", "kind": "d2h", "stream": "l", "host_pages": [1], "device_pages": [8]},
        {"op": "memcpy", "kind": "d2d", "stream": "l", "src_pages": [1], "dst_pages": [2]},
        {"op": "memcpy", "kind": "h2d", "stream": "l", "src_buf": "idx", "device_pages": [3]},
    )
    assert [(r.direction, [(a.space.name, a.mode.name, a.ids.tolist()) for a in r.accesses]) for r in records] == [
        (Direction.HOST_TO_DEVICE, [("HOST", "READ", [1, 2]), ("DEVICE", "WRITE", [8, 7])]),
        (Direction.DEVICE_TO_HOST, [("DEVICE", "READ", [8]), ("HOST", "WRITE", [1])]),
        (Direction.DEVICE_TO_DEVICE, [("DEVICE", "READ", [1]), ("DEVICE", "WRITE", [2])]),
        (Direction.HOST_TO_DEVICE, [("BUFFER", "READ", [0]), ("DEVICE", "WRITE", [3])]),
    ]


def test_host_steps():
    trace, (query, sync, one, whole, alloc, free) = parse(
        {"op": "event_query", "event": "e", "result": False},
        {"op": "event_sync", "event": "e", "thread": "t"},
        {"op": "host_sync", "scope": "stream", "stream": "f"},
        {"op": "host_sync", "scope": "device", "dur_us": 2.5, "host_us": 0},
        {"op": "alloc", "pool": "host", "pages": [4, 5], "owner": "A"},
        {"op": "free", "pool": "device", "pages": ["mamba:4"], "owner": "B"},
    )
    assert query.result is False
    assert query.event == sync.event
    assert [trace.names.thread(r.thread) for r in (query, sync)] == ["main", "t"]
    assert trace.names.stream(one.stream) == "f"
    assert whole.stream is None
    assert trace.planned_ns[whole.op] == 2500
    assert alloc.host_ns == whole.host_ns
    assert (alloc.access.space, alloc.access.ids.tolist()) == (Space.HOST, [4, 5])
    assert [trace.names.requests[r.owner] for r in (alloc, free)] == ["A", "B"]
    assert trace.names.pools[free.access.pool] == "mamba"


def test_step_ids_need_not_be_numbered():
    body = {"steps": [{"id": "first", "op": "event_sync", "event": "e"}]}
    trace = parse_scenario(json.dumps(body).encode(), source="x.json")
    assert trace.labels == {1: "first"}


def test_expect_is_never_read():
    trace, _ = parse(expect={"this": ["is", None]}, id=7, title=[], exhaustive="x", role=1, source=2, note=3)
    assert trace.records


KERNEL = {"op": "kernel", "stream": "f"}
COPY = {"op": "memcpy", "stream": "l", "kind": "h2d"}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (7, "is int; must be an object"),
        ({}, "needs key 'op', a string"),
        ({"op": 3}, "needs key 'op', a string"),
        ({"op": "kernal"}, "op 'kernal' is unknown; known are kernel, memcpy, event_record, "),
        ({"op": "kernel"}, "needs key 'stream'"),
        ({**KERNEL, "reads": 3}, "key 'reads': Expected 'array', got 'int'"),
        ({**KERNEL, "reads": [1, -2]}, "key 'reads[1]': Expected 'int' >= 0"),
        ({**KERNEL, "reads": [1.5]}, "key 'reads[0]': Expected 'int | str', got 'float'"),
        ({**KERNEL, "writes": ["mamba"]}, "key 'writes[0]': must be a number or 'pool:number'"),
        ({**KERNEL, "writes": [2**31]}, "key 'writes[0]': Expected 'int' <= 2147483647"),
        ({**KERNEL, "read": [1]}, "unknown key 'read'; known are id, op, thread, rank, name, dur_us, host_us, layer, "),
        ({**KERNEL, "layer": -1}, "key 'layer': Expected 'int' >= 0"),
        ({**KERNEL, "layer": 4}, "layer 4 of a scenario with 4 layers; must be below"),
        ({**KERNEL, "dur_us": -1}, "key 'dur_us': Expected 'float' >= 0.0"),
        ({**KERNEL, "thread": ""}, "key 'thread': Expected 'str' of length >= 1"),
        ({**KERNEL, "rank": 1}, "rank 1 is not supported yet; only rank 0 is"),
        ({**COPY, "kind": "h2h"}, "key 'kind': is 'h2h'; must be one of h2d, d2h, d2d"),
        (COPY, "kind 'h2d' needs key 'host_pages' or 'src_buf'"),
        ({**COPY, "host_pages": [1]}, "kind 'h2d' needs key 'device_pages' or 'dst_buf'"),
        (
            {**COPY, "src_pages": [1]},
            "key 'src_pages' does not fit kind 'h2d'; it takes 'host_pages', 'device_pages'",
        ),
        ({"op": "event_query", "event": "e"}, "needs key 'result'"),
        ({"op": "event_query", "event": "e", "result": 1}, "key 'result': Expected 'bool', got 'int'"),
        ({"op": "host_sync", "scope": "all"}, "key 'scope': is 'all'; must be one of stream, device"),
        ({"op": "host_sync", "scope": "stream"}, "scope 'stream' needs key 'stream', and scope 'device' takes none"),
        (
            {"op": "host_sync", "scope": "device", "stream": "f"},
            "scope 'stream' needs key 'stream', and scope 'device' takes none",
        ),
        ({"op": "alloc", "pool": "l2", "pages": [1]}, "key 'pool': is 'l2'; must be one of device, host"),
        ({"op": "alloc", "pool": "host", "pages": ["a:1"]}, "pages of pool 'host' must be numbers"),
        (
            {"op": "alloc", "pool": "device", "pages": [1, "a:1"]},
            "pages of 2 pools; one step takes pages of",
        ),
        ({"op": "free", "pool": "device", "pages": []}, "pages of 0 pools; one step takes pages of exactly one"),
        *(({"op": op}, f"op {op!r} is not supported yet") for op in sorted(NOT_YET)),
    ],
)
def test_a_bad_step_is_named_with_what_was_allowed(step, text):
    good = {"id": "s1", **KERNEL, "layer": 3}
    body = {"layers": 4, "steps": [good, {"id": "s2", **step} if isinstance(step, dict) else step]}
    with pytest.raises(TraceError) as raised:
        parse_scenario(json.dumps(body).encode(), source="x.json")
    name = "s2" if isinstance(step, dict) else "number 2"
    assert str(raised.value).startswith(f"x.json: step {name}: {text}")


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"id": "s1", **KERNEL}, "step s1: id 's1' is taken by step number 1; ids must be unique"),
        (KERNEL, "step number 2: needs key 'id'"),
        ({"id": 5, **KERNEL}, "step number 2: key 'id': Expected 'str', got 'int'"),
    ],
)
def test_step_ids_must_be_there_and_unique(step, text):
    body = {"steps": [{"id": "s1", **KERNEL}, step]}
    with pytest.raises(TraceError) as raised:
        parse_scenario(json.dumps(body).encode(), source="x.json")
    assert str(raised.value) == f"x.json: {text}"


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "not JSON that can be read: Input data was truncated"),
        (b"{'steps': []}", "not JSON that can be read: JSON is malformed"),
        (b'{"steps": [', "not JSON that can be read: Input data was truncated"),
        (b'{"steps": ' + b"[" * 100_000, "not JSON that can be read: maximum recursion depth exceeded"),
        (b"[]", "Expected 'object', got 'array'"),
        (b"{}", "needs key 'steps'"),
        (b'{"steps": {}}', "key 'steps': Expected 'array', got 'object'"),
        (b'{"steps": [], "stream": {}}', "unknown key 'stream'; known are steps, streams, layers, id, title, "),
        (b'{"steps": [], "layers": 0}', "key 'layers': Expected 'int' >= 1"),
        (
            b'{"steps": [], "streams": {"a": {"kind": "fast"}}}',
            "key 'streams[...].kind': is 'fast'; must be one of nonblocking, blocking, legacy",
        ),
    ],
)
def test_a_bad_file_is_told_what_is_wrong(data, text):
    with pytest.raises(TraceError) as raised:
        parse_scenario(data, source="x.json")
    assert str(raised.value).startswith(f"x.json: {text}")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TraceError, match=r"gone.json: No such file"):
        read_scenario(tmp_path / "gone.json")
