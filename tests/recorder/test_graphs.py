"""Recorded graphs, moves of pages, and blocks of a caching allocator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hicache_obs.errors import StreamError
from hicache_obs.records import (
    Define,
    EventSync,
    GraphNode,
    GraphReplay,
    Mode,
    RecordStream,
    Relocate,
    TensorAlloc,
    TensorFree,
    Times,
    Work,
    device,
)


def _replay_twice(observed: Any, entries: int) -> list[Any]:
    """The records of a graph of ``entries`` functions with an external record behind the first, replayed twice."""
    recorded = observed.dev
    functions: list[Callable[[], None] | None] = [lambda: None] * entries
    graph = recorded.capture(7, [functions[0], None, *functions[1:]])
    nodes = [Work(f"node {n}", (device(Mode.WRITE, np.array([n])),), (n, n + 1)) for n in range(entries)]
    with recorded.stream(recorded.Stream("forward")):
        for round_id in (1, 2):
            work = Work("graph round", layers=(0, entries), group=round_id)
            recorded.replay(graph, work, [nodes[0], None, *nodes[1:]])
    graph.events[0].synchronize()
    recorded.synchronize()
    recorded.recorder.resolve()
    return observed.sink.records


@pytest.mark.parametrize("entries", [1, 3])
def test_a_replay_is_followed_by_its_entries_and_has_times(observed, entries):
    records = _replay_twice(observed, entries)
    replays = [(place, record) for place, record in enumerate(records) if isinstance(record, GraphReplay)]
    assert [(r.graph, r.group, r.nodes, r.layers, r.accesses) for _, r in replays] == [
        (7, round_id, entries + 1, (0, entries), ()) for round_id in (1, 2)
    ]
    for place, replay in replays:
        nodes = records[place + 1 : place + entries + 2]
        assert all(isinstance(node, GraphNode) for node in nodes)
        assert [node.index for node in nodes] == list(range(entries + 1))
        assert [node.event is not None for node in nodes] == [False, True, *[False] * (entries - 1)]
        assert [node.layers[0] for node in nodes if node.event is None] == list(range(entries))
        (times,) = [r for r in records if isinstance(r, Times) and r.op == replay.op]
        assert times.end_ns > times.start_ns
    counters = observed.recorder.counters
    assert (counters.launches, counters.errors) == (2, 0)
    assert (counters.ranges_opened, counters.ranges_closed) == (2, 2)
    assert observed.ranges.ops == [replay.op for _, replay in replays]


def test_the_host_learns_of_an_external_record(observed):
    """The event of the synchronize is the one the last replay recorded, and the thread knows it only once."""
    records = _replay_twice(observed, 2)
    (known,) = [record.event for record in records if isinstance(record, EventSync)]
    assert {record.event for record in records if isinstance(record, GraphNode)} == {None, known}


def test_a_failed_replay_gets_no_times(observed):
    recorded = observed.dev
    graph = recorded.capture(1, [lambda: None, lambda: None])
    with pytest.raises(StreamError, match="expected one per entry"):
        recorded.replay(graph, Work("graph"), [Work("one")])
    recorded.recorder.resolve()
    assert (recorded.recorder.counters.pairs_dropped, recorded.recorder.counters.pairs_resolved) == (1, 0)


def test_moves_and_blocks(observed):
    torch = pytest.importorskip("torch")
    recorded = observed.dev
    tensor, stream = torch.zeros(4), recorded.Stream("moves")
    recorded.recorder.tensor_alloc(tensor, 3, stream)
    with recorded.stream(stream):
        recorded.launch(lambda: None, Work("compaction", layers=(0, 2), moves=True))
    recorded.record_stream(tensor, stream)
    recorded.recorder.tensor_free(tensor)
    kinds = [record for record in observed.sink.records if not isinstance(record, (Define, Times))]
    assert [type(record) for record in kinds] == [TensorAlloc, Relocate, RecordStream, TensorFree]
    assert (kinds[0].block, kinds[0].stream, kinds[1].layers) == (3, stream.stream_id, (0, 2))
    assert kinds[0].tensor == kinds[2].tensor == kinds[3].tensor == tensor.untyped_storage().data_ptr()
