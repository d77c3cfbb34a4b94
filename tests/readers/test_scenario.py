"""Scenario files: what the 27 cases become, and what a malformed file is told."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from hicache_obs.errors import TraceError
from hicache_obs.readers.scenario import parse_scenario, read_scenario
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    MAX_AFTER,
    NO_OP,
    Collective,
    Define,
    DefineSpace,
    Direction,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    PageAlloc,
    PageFree,
    RecordStream,
    Relocate,
    RowsDiscarded,
    Space,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadPost,
    ThreadRecv,
    WaitStream,
    unpack_rows,
)

CASES = Path(__file__).resolve().parent.parent / "cases"

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
    "relocate": Relocate,
    "graph_replay": GraphReplay,
    "io_begin": IoBegin,
    "io_end": IoEnd,
    "thread_post": ThreadPost,
    "thread_recv": ThreadRecv,
    "tensor_alloc": TensorAlloc,
    "tensor_free": TensorFree,
    "record_stream": RecordStream,
    "collective": Collective,
    "rows_discarded": RowsDiscarded,
}


def test_all_cases_are_here():
    assert [int(path.name[:2]) for path in sorted(CASES.glob("*.json"))] == list(range(1, 28))


@pytest.mark.parametrize("path", sorted(CASES.glob("*.json")), ids=lambda path: path.stem)
def test_every_case_is_read(path):
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
        for key, names in (
            ("graph", trace.names.graphs),
            ("io", trace.names.ios),
            ("tensor", trace.names.tensors),
            ("event", trace.names.events),
        ):
            if key in step:
                assert names[getattr(record, key)] == step[key]
        if "chan" in step:
            assert trace.names.channels[record.channel] == step["chan"]
        if isinstance(record, TensorAlloc):
            assert trace.names.buffer(record.block) == step["mem"]
        if isinstance(record, IoBegin):
            assert record.kind.name.lower() == step["kind"]
        if isinstance(record, Collective):
            assert (trace.names.groups[record.collective_group], record.rank) == (step["group"], step["rank"])
            assert trace.names.site(record.site) == step["name"]
        if isinstance(record, (Kernel, Memcpy, HostAccess, GraphReplay, Relocate, IoBegin)):
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
        ("reads_device", "DEVICE", "READ"),
        ("writes_device", "DEVICE", "WRITE"),
        ("reads_buf", "BUFFER", "READ"),
        ("writes_buf", "BUFFER", "WRITE"),
        ("src_pages", "DEVICE", "READ"),
        ("dst_pages", "DEVICE", "WRITE"),
        ("device_pages", "DEVICE", "WRITE" if step.get("kind") == "h2d" else "READ"),
        ("host_pages", "HOST", "READ" if step.get("kind") == "h2d" else "WRITE"),
    ):
        found.update((space, mode, item) for item in step.get(key, ()))
    for old, new in step.get("moves", ()):
        found.update([("DEVICE", "READ", old), ("DEVICE", "WRITE", new)])
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


ROUND = {
    "op": "kernel",
    "stream": "f",
    "reads": [1, 2, 3],
    "writes": [3, 4],
    "rows": [{"request": "A", "reads": [3, 1], "writes": [3]}, {"request": "B", "reads": [2], "writes": [4]}],
}


def test_rows_of_a_round():
    """What a row only reads comes first, what it only writes last."""
    trace, (kernel, gone) = parse(ROUND, {"op": "rows_discarded", "round": "s1", "requests": ["B"]})
    rows = unpack_rows(kernel.rows)
    assert [trace.names.requests[number] for number in rows.requests.tolist()] == ["A", "B"]
    assert (rows.pages.tolist(), rows.starts.tolist()) == ([1, 3, 2, 4], [0, 2, 4])
    assert (rows.reads.tolist(), rows.writes.tolist()) == ([2, 1], [1, 1])
    assert (gone.group, gone.requests.tolist()) == (kernel.group, [rows.requests[1]])
    _, (bare,) = parse({key: value for key, value in ROUND.items() if key != "rows"})
    assert bare.rows is None


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


def test_an_allocator_call_for_pages_of_several_pools_or_none():
    """A record for each pool, all of the one step; a call that got no page still is one."""
    pages = [5, "mamba:5", 6, "kv:7"]
    trace, (kernel, first, second, gone, none, last) = parse(
        {"op": "kernel", "stream": "f", "host_us": 5},
        {"op": "alloc", "pool": "device", "pages": pages, "owner": "A", "host_us": 3},
        {"op": "free", "pool": "device", "pages": ["mamba:5"], "owner": "A"},
        {"op": "alloc", "pool": "host", "pages": [], "owner": "A"},
        {"op": "free", "pool": "device", "pages": [], "owner": "A"},
    )
    assert [(type(r), r.access.pool, r.access.ids.tolist()) for r in (first, second, gone, none, last)] == [
        (PageAlloc, 0, [5, 6, 7]),
        (PageAlloc, 1, [5]),
        (PageFree, 1, [5]),
        (PageAlloc, 0, []),
        (PageFree, 0, []),
    ]
    assert (none.access.space, last.access.space) == (Space.HOST, Space.DEVICE)
    assert [trace.label(r.op) for r in (kernel, first, second, gone)] == ["s1", "s2", "s2", "s3"]
    assert [r.op for r in (kernel, first, second, gone)] == [1, 2, 3, 4]
    assert [r.host_ns for r in (first, second, gone)] == [5000, 5000, 8000]
    assert trace.planned_end_ns == 14000


def words(record):
    """Accesses as (space, mode, pool, ids)."""
    return [(a.space.name, a.mode.name, a.pool, a.ids.tolist()) for a in record.accesses]


def test_a_graph_replay_without_nodes_is_one_operation():
    step = {"op": "graph_replay", "graph": "g", "stream": "f", "reads": [1], "writes_buf": ["out"], "layer": 2}
    trace, (first, second) = parse({**step, "name": "decode"}, {**step, "stream": "h"})
    assert [(r.graph, r.nodes, r.layers, r.group) for r in (first, second)] == [(0, 0, (2, 3), 1), (0, 0, (2, 3), 2)]
    assert trace.names.graphs == {0: "g"}
    assert words(first) == [("DEVICE", "READ", 0, [1]), ("BUFFER", "WRITE", 0, [0])]
    assert [trace.names.site(r.site) for r in (first, second)] == ["decode", "replay of g"]
    assert [trace.names.stream(r.stream) for r in (first, second)] == ["f", "h"]


def test_the_nodes_of_a_graph_follow_its_replay():
    nodes = [
        {"writes": [1], "layer": 0, "dur_us": 30},
        {"event_record": "l0", "layer": 0, "dur_us": 7},
        {"writes": ["mamba:1"], "after": []},
        {"reads_host": [4], "after": [0, 2], "name": "for people"},
        {"event_record": "side", "after": [2]},
    ]
    replay = {"op": "graph_replay", "graph": "g", "stream": "f", "nodes": nodes, "dur_us": 100, "host_us": 5}
    trace, (event, step, *found, last) = parse(
        {"op": "event_sync", "event": "l0"}, {**replay, "thread": "t"}, {"op": "host_sync", "scope": "device"}
    )
    assert isinstance(step, GraphReplay)
    assert (step.op, step.nodes, step.accesses, step.layers) == (2, 5, (), ALL_LAYERS)
    assert all(isinstance(node, GraphNode) for node in found)
    assert [(node.op, node.index, node.after) for node in found] == [
        (3, 0, IN_ORDER),
        (4, 1, IN_ORDER),
        (5, 2, 0),
        (6, 3, 0b101),
        (7, 4, 0b100),
    ]
    assert [node.event and trace.names.events[node.event] for node in found][2:] == [None, None, "side"]
    assert found[1].event == event.event == 0
    assert [node.layers for node in found] == [(0, 1), (0, 1), *[ALL_LAYERS] * 3]
    assert [words(node) for node in found] == [
        [("DEVICE", "WRITE", 0, [1])],
        [],
        [("DEVICE", "WRITE", 1, [1])],
        [("HOST", "READ", 0, [4])],
        [],
    ]
    assert {trace.label(node.op) for node in (step, *found)} == {"s2"}
    assert {(node.thread, node.host_ns) for node in found} == {(step.thread, step.host_ns)} == {(1, 2000)}
    assert [trace.planned_ns[node.op] for node in (step, *found)] == [100_000, 30_000, 0, 35_000, 35_000, 0]
    assert (last.op, trace.label(last.op), last.host_ns) == (8, "s3", 7000)


def test_the_last_entry_that_after_can_name():
    nodes = [{} for _ in range(MAX_AFTER + 1)]
    replay = {"op": "graph_replay", "graph": "g", "stream": "f", "nodes": [*nodes, {"after": [MAX_AFTER]}]}
    _, records = parse(replay)
    assert records[-1].after == 1 << MAX_AFTER


def test_pools_are_numbered_as_they_appear():
    trace, (relocate, kernel) = parse(
        {"op": "relocate", "stream": "f", "moves": [[5, 2], ["mamba:5", "mamba:2"], [6, "kv:3"]], "layer": 1},
        {"op": "kernel", "stream": "f", "reads": ["swa:1", "mamba:1"], "reads_host": [1]},
    )
    assert words(relocate) == [
        ("DEVICE", "READ", 0, [5, 6]),
        ("DEVICE", "READ", 1, [5]),
        ("DEVICE", "WRITE", 0, [2, 3]),
        ("DEVICE", "WRITE", 1, [2]),
    ]
    assert relocate.layers == (1, 2)
    assert words(kernel) == [("DEVICE", "READ", 2, [1]), ("DEVICE", "READ", 1, [1]), ("HOST", "READ", 0, [1])]
    assert trace.names.pools == {0: "kv", 1: "mamba", 2: "swa"}
    assert trace.names.host_pools == {0: "host"}


def test_transfers_in_no_stream():
    kinds = ["storage_read", "storage_write", "device_read", "rdma_write"]
    begins = [{"op": "io_begin", "io": f"io{n}", "kind": kind, "dur_us": 7} for n, kind in enumerate(kinds)]
    begins[3].update(reads_host=[1], writes_host=[2], reads_device=["mamba:3"], writes_device=[4], layer=0)
    ends = [{"op": "io_end", "io": "io3"}, {"op": "io_end", "io": "io3", "thread": "t"}]
    trace, records = parse(*begins, *ends, begins[3])
    assert [record.kind for record in records[:4]] == list(IoKind)
    assert [record.io for record in records] == [0, 1, 2, 3, 3, 3, 3]
    assert trace.names.ios[3] == "io3"
    assert trace.planned_ns[4] == 7000
    assert trace.names.site(records[0].site) == "storage_read on main"
    assert records[3].layers == (0, 1)
    assert words(records[3]) == [
        ("HOST", "READ", 0, [1]),
        ("HOST", "WRITE", 0, [2]),
        ("DEVICE", "READ", 1, [3]),
        ("DEVICE", "WRITE", 0, [4]),
    ]


def test_a_block_is_a_buffer_and_tensors_have_names_of_their_own():
    trace, (alloc, kernel, mark, free, again, other) = parse(
        {"op": "tensor_alloc", "tensor": "idx", "mem": "M", "stream": "f"},
        {"op": "kernel", "stream": "l", "reads_buf": ["x", "M"]},
        {"op": "record_stream", "tensor": "idx", "stream": "l"},
        {"op": "tensor_free", "tensor": "idx", "mem": "M", "stream": "f"},
        {"op": "tensor_alloc", "tensor": "idx", "mem": "M", "stream": "f"},
        {"op": "tensor_alloc", "tensor": "M", "mem": "x", "stream": "f"},
    )
    assert kernel.accesses[0].ids.tolist() == [other.block, alloc.block] == [1, 0]
    assert alloc.tensor == mark.tensor == free.tensor == again.tensor == 0
    assert trace.names.tensors == {0: "idx", 1: "M"}
    assert (trace.names.stream(alloc.stream), trace.names.stream(mark.stream)) == ("f", "l")


def test_threads_and_ranks():
    trace, records = parse(
        {"op": "thread_post", "chan": "a"},
        {"op": "thread_post", "chan": "b"},
        {"op": "thread_recv", "chan": "b", "thread": "t"},
        {"op": "thread_recv", "chan": "a", "thread": "t"},
        {"op": "collective", "group": "tp", "name": "all_reduce", "thread": "t"},
        {"op": "collective", "group": "tp", "name": "all_reduce", "rank": 3, "thread": "u"},
        {"op": "kernel", "stream": "f", "rank": 3},
    )
    assert [record.channel for record in records[:4]] == [0, 1, 1, 0]
    assert [(r.collective_group, r.rank, trace.names.site(r.site)) for r in records[4:6]] == [
        (0, 0, "all_reduce"),
        (0, 3, "all_reduce"),
    ]
    assert trace.names.groups == {0: "tp"}


def test_names_can_be_told_of_every_space():
    trace, _ = parse({"op": "kernel", "stream": "f"})
    for number, space in enumerate(DefineSpace):
        trace.names.learn(Define(NO_OP, 0, 0, space, number, "x"))
    assert [trace.names.graphs, trace.names.ios, trace.names.tensors, trace.names.groups] == [
        {DefineSpace[name]: "x"} for name in ("GRAPH", "IO", "TENSOR", "GROUP")
    ]


def test_step_ids_need_not_be_numbered():
    body = {"steps": [{"id": "first", "op": "event_sync", "event": "e"}]}
    trace = parse_scenario(json.dumps(body).encode(), source="x.json")
    assert trace.labels == {1: "first"}


def test_expect_is_never_read():
    trace, _ = parse(expect={"this": ["is", None]}, id=7, title=[], exhaustive="x", role=1, source=2, note=3)
    assert trace.records


KERNEL = {"op": "kernel", "stream": "f"}
COPY = {"op": "memcpy", "stream": "l", "kind": "h2d"}
GRAPH = {"op": "graph_replay", "stream": "f", "graph": "g"}
IO = {"op": "io_begin", "io": "a", "kind": "rdma_write"}


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (7, "is int; must be an object"),
        ({}, "needs key 'op', a string"),
        ({"op": 3}, "needs key 'op', a string"),
        ({"op": "kernal"}, "op 'kernal' is unknown; known are kernel, memcpy, relocate, graph_replay, "),
        ({"op": "kernel"}, "needs key 'stream'"),
        ({**KERNEL, "reads": 3}, "key 'reads': Expected 'array', got 'int'; is 3"),
        (
            {**KERNEL, "reads": {"a": "b" * 59}},
            f"key 'reads': Expected 'array', got 'object'; is {{\"a\": \"{'b' * 53}...",
        ),
        ({**KERNEL, "reads": "b" * 58}, f"key 'reads': Expected 'array', got 'str'; is \"{'b' * 58}\""),
        ({**KERNEL, "reads": [1, -2]}, "key 'reads[1]': Expected 'int' >= 0; is -2"),
        ({**KERNEL, "reads": [1.5]}, "key 'reads[0]': Expected 'int | str', got 'float'"),
        ({**KERNEL, "writes": ["mamba"]}, "key 'writes[0]': must be a number or 'pool:number'; is \"mamba\""),
        ({**KERNEL, "writes": [2**31]}, "key 'writes[0]': Expected 'int' <= 67108863"),
        ({**KERNEL, "read": [1]}, "unknown key 'read'; known are id, op, thread, rank, name, dur_us, host_us, layer, "),
        ({**KERNEL, "layer": -1}, "key 'layer': Expected 'int' >= 0"),
        ({**KERNEL, "layer": 4}, "layer 4 of a scenario with 4 layers; must be below"),
        ({**KERNEL, "dur_us": -1}, "key 'dur_us': Expected 'float' >= 0.0"),
        ({**KERNEL, "thread": ""}, "key 'thread': Expected 'str' of length >= 1"),
        ({**KERNEL, "rank": -1}, "key 'rank': Expected 'int' >= 0"),
        ({"op": "event_sync", "event": "e", "layer": 4}, "layer 4 of a scenario with 4 layers; must be below"),
        ({"op": "event_wait", "stream": "f"}, "needs key 'event'"),
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
        ({"op": "graph_replay", "stream": "f"}, "needs key 'graph'"),
        ({**GRAPH, "reads": [-1]}, "key 'reads[0]': Expected 'int' >= 0"),
        ({**GRAPH, "nodes": []}, "key 'nodes': Expected 'array' of length >= 1"),
        ({**GRAPH, "nodes": [{}], "reads": [1]}, "states what it touches both itself and in 'nodes'; only one"),
        ({**GRAPH, "nodes": [{}], "layer": 1}, "states what it touches both itself and in 'nodes'; only one"),
        ({**GRAPH, "nodes": [{"writes": [-1]}]}, "key 'nodes[0].writes[0]': Expected 'int' >= 0"),
        ({**GRAPH, "nodes": [{"after": [-1]}]}, "key 'nodes[0].after[0]': Expected 'int' >= 0; is -1"),
        ({**GRAPH, "nodes": [{"op": "kernel"}]}, "key 'nodes[0]': unknown key 'op'; known are name, after, event_"),
        ({**GRAPH, "nodes": [{"layer": 4}]}, "key 'nodes[0]': layer 4 of a scenario with 4 layers; must be below"),
        (
            {**GRAPH, "nodes": [{}, {"after": [1]}, {}]},
            "key 'nodes[1]': 'after' names entry 1; must name entries before this one, counted from 0",
        ),
        (
            {**GRAPH, "nodes": [*[{}] * 64, {"after": [0, 63]}]},
            "key 'nodes[64]': 'after' names entry 63; can name entries 0 to 62 only",
        ),
        (
            {**GRAPH, "nodes": [{"event_record": "e", "writes": [1]}]},
            "key 'nodes[0]': an entry with 'event_record' touches nothing; it may have an 'after' beside it",
        ),
        ({"op": "relocate", "stream": "f", "moves": []}, "key 'moves': Expected 'array' of length >= 1"),
        ({"op": "relocate", "stream": "f", "moves": [[1]]}, "key 'moves[0]': Expected 'array' of length 2"),
        ({"op": "relocate", "stream": "f", "moves": [[1, -2]]}, "key 'moves[0][1]': Expected 'int' >= 0"),
        ({"op": "relocate", "stream": "f", "moves": [[1, "m"]]}, "key 'moves[0][1]': must be a number or 'pool:numb"),
        (
            {**IO, "kind": "storage"},
            "key 'kind': is 'storage'; must be one of storage_read, storage_write, device_read, rdma_write",
        ),
        ({**IO, "reads": [1]}, "unknown key 'reads'; known are id, op, thread, rank, name, dur_us, host_us, layer, io"),
        ({"op": "io_end"}, "needs key 'io'"),
        ({"op": "io_end", "io": "b"}, "io 'b' has not begun; begun before: none"),
        ({"op": "thread_post"}, "needs key 'chan'"),
        (
            {"op": "thread_recv", "chan": "q"},
            "chan 'q' has no post left to receive; the n-th receive must follow the n-th post",
        ),
        ({"op": "tensor_alloc", "tensor": "t", "stream": "f"}, "needs key 'mem'"),
        ({"op": "tensor_free", "tensor": "t"}, "tensor 't' is not allocated; allocated now: none"),
        ({"op": "record_stream", "tensor": "t", "stream": "f"}, "tensor 't' is not allocated; allocated now: none"),
        ({"op": "collective", "group": "tp"}, "needs key 'name'"),
    ],
)
def test_a_bad_step_is_named_with_what_was_allowed(step, text):
    good = {"id": "s1", **KERNEL, "layer": 3}
    body = {"layers": 4, "steps": [good, {"id": "s2", **step} if isinstance(step, dict) else step]}
    with pytest.raises(TraceError) as raised:
        parse_scenario(json.dumps(body).encode(), source="x.json")
    name = "s2" if isinstance(step, dict) else "number 2"
    assert str(raised.value).startswith(f"x.json: step {name}: {text}")


GONE = {"op": "rows_discarded", "round": "s1", "requests": ["A"]}
ALLOC = {"op": "tensor_alloc", "tensor": "t", "mem": "M", "stream": "f"}
FREE = {"op": "tensor_free", "tensor": "t"}
POST, RECV = {"op": "thread_post", "chan": "q"}, {"op": "thread_recv", "chan": "q", "thread": "t"}


@pytest.mark.parametrize(
    ("steps", "text"),
    [
        ([POST, RECV, RECV], "chan 'q' has no post left to receive; the n-th receive must follow the n-th post"),
        ([RECV, POST], "chan 'q' has no post left to receive"),
        ([IO, IO], "io 'a' began in step s1 and has not ended; end it first or choose another name"),
        ([IO, {"op": "io_end", "io": "b"}], "io 'b' has not begun; begun before: 'a'"),
        ([{**ROUND, "rows": []}], "key 'rows': Expected 'array' of length >= 1"),
        ([{**ROUND, "rows": [{"reads": [1]}]}], "key 'rows[0]': needs key 'request'"),
        ([{**ROUND, "rows": [{"request": "A", "page": 1}]}], "key 'rows[0]': unknown key 'page'; known are request, r"),
        (
            [{**ROUND, "rows": [{"request": "A", "reads": [4]}]}],
            "key 'rows[0].reads': page 4 is not in the step's own 'reads'",
        ),
        ([{**GRAPH, "rows": []}], "unknown key 'rows'; known are id, op, thread"),
        ([ROUND, {**GONE, "round": "s3"}], "round 's3' is no earlier kernel with rows; there are: 's1'"),
        ([ROUND, {**GONE, "requests": ["C"]}], "request 'C' has no row in round 's1'; requests there: 'A', 'B'"),
        ([ALLOC, ALLOC], "tensor 't' is live since step s1; free it first"),
        ([ALLOC, FREE, FREE], "tensor 't' is not allocated; allocated now: none"),
        ([ALLOC, {**FREE, "tensor": "M"}], "tensor 'M' is not allocated; allocated now: 't'"),
        ([ALLOC, {**FREE, "mem": "N"}], "key 'mem': is 'N'; tensor 't' was allocated with 'M'"),
        ([ALLOC, {**FREE, "stream": "l"}], "key 'stream': is 'l'; tensor 't' was allocated with 'f'"),
    ],
)
def test_steps_must_fit_those_before_them(steps, text):
    wrong = next(n for n, step in enumerate(steps, 1) if n == len(steps) or (step is RECV and n == 1))
    with pytest.raises(TraceError) as raised:
        parse(*steps)
    assert str(raised.value).startswith(f"x.json: step s{wrong}: {text}")


@pytest.mark.parametrize(
    ("step", "text"),
    [
        ({"id": "s1", **KERNEL}, "step s1: id 's1' is taken by step number 1; ids must be unique, here step number 2"),
        (KERNEL, "step number 2: needs key 'id'"),
        ({"id": 5, **KERNEL}, "step number 2: key 'id': Expected 'str', got 'int'; is 5"),
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
        (
            b'{"layers": "x"} and more',
            "key 'layers': Expected 'int | null', got 'str'",
        ),  # found before the rest is read
        (b'{"step": 1, "why": ' + b"[" * 100_000, "unknown key 'step'; known are"),
        (b"[]", "Expected 'object', got 'array'"),
        (b"{}", "needs key 'steps'"),
        (b'{"steps": {}}', "key 'steps': Expected 'array', got 'object'"),
        (
            b'{"steps": [], "streams": {"f": {"type": 1}}}',
            "key 'streams[...]': unknown key 'type'; known are kind",
        ),
        (b'{"steps": [], "shared": {"a": []}}', "key 'shared': unknown key 'a'; known are events, buffers, pools"),
        (
            b'{"steps": [], "stream": {}}',
            "unknown key 'stream'; known are steps, streams, layers, shared, early, id, title, ",
        ),
        (b'{"steps": [], "layers": 0}', "key 'layers': Expected 'int' >= 1; is 0"),
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
