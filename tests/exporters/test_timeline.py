"""The parts of a timeline: lanes, texts, operations without times, counters; and that little is kept in memory."""

from __future__ import annotations

import gc
import io
import itertools
import json
import tracemalloc
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hicache_obs.exporters import perfetto, record_timeline, timeline_links
from hicache_obs.exporters.chrome import ChromeWriter
from hicache_obs.exporters.perfetto import PerfettoWriter
from hicache_obs.exporters.record_timeline import RecordTimeline
from hicache_obs.exporters.timeline import MAX_LANES, MAX_TEXT, Args, Flow, Lanes, Numbers, ids_text, plain_text
from hicache_obs.exporters.timeline_links import Links
from hicache_obs.records import (
    AnyRecord,
    Direction,
    EventRecord,
    EventWait,
    GraphNode,
    GraphReplay,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    Times,
    device,
    page_ids,
)


class Drawing:
    """A ``TimelineWriter`` that keeps what it is told."""

    def __init__(self) -> None:
        self.groups: dict[int, str] = {}
        self.tracks: dict[int, tuple[str, str, int]] = {}
        self.slices: dict[int, list[tuple[str, int, int, Args]]] = defaultdict(list)
        self.marks: dict[int, list[tuple[str, int, Args]]] = defaultdict(list)
        self.values: dict[str, list[tuple[int, int]]] = defaultdict(list)
        self.flows: list[Flow] = []

    def group(self, number: int, parent: int, name: str, rank: int) -> None:
        self.groups[number] = name

    def track(self, number: int, group: int, name: str, rank: int, *, lane: int = 0) -> None:
        self.tracks[number] = (self.groups.get(group, ""), name, lane)

    def counter_track(self, number: int, group: int, name: str, rank: int, unit: str) -> None:
        self.tracks[number] = (self.groups[group], name, 0)

    def slice(
        self, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Args, flows: Sequence[Flow] = ()
    ) -> None:
        self.slices[track].append((name, start_ns, end_ns, args))
        self.flows += flows

    def mark(self, track: int, name: str, category: str, at_ns: int, args: Args, flows: Sequence[Flow] = ()) -> None:
        self.marks[track].append((name, at_ns, args))
        self.flows += flows

    def count(self, track: int, at_ns: int, value: int) -> None:
        self.values[self.tracks[track][1]].append((at_ns, value))

    def on(self, group: str, name: str = "") -> list[tuple[str, int, int, Args]]:
        """The slices of a track."""
        return [row for number, (g, n, _) in self.tracks.items() if g == group and n == (name or n)
                for row in self.slices[number]]  # fmt: skip

    def marked(self, group: str) -> list[tuple[str, int, Args]]:
        """The marks of a group."""
        return [row for number, (g, _, _) in self.tracks.items() if g == group for row in self.marks[number]]


def drawn(records: Sequence[AnyRecord]) -> Drawing:
    """The timeline of ``records``."""
    numbers, drawing = Numbers(), Drawing()
    links = Links(numbers)
    links.feed(records)
    links.finish()
    timeline = RecordTimeline(drawing, numbers, "x", 0, links, {})
    timeline.feed(records)
    timeline.finish()
    return drawing


def kernel(op: int, stream: int = 1, *, at: int = 0) -> Kernel:
    """A forward round that writes a page of its own."""
    return Kernel(op, 1, at or op, stream, 0, op, 0, (0, 1), (device(Mode.WRITE, page_ids([op])),))  # type: ignore[arg-type]


def times(op: int, start: int, end: int) -> Times:
    """Device times of ``op``."""
    return Times(op, 1, end, start, end)  # type: ignore[arg-type]


# -- lanes ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(-9, 40), st.integers(0, 12)), max_size=60))
def test_slices_of_a_lane_follow_each_other_and_none_is_lost(spans: list[tuple[int, int]]) -> None:
    drawing = Drawing()
    lanes = Lanes(drawing, Numbers(), 1, "x", 0)
    for start, length in spans:
        lanes.slice("s", "c", start, start + length, {})

    for rows in drawing.slices.values():
        assert all(before[2] <= after[1] for before, after in itertools.pairwise(rows))
    assert sorted((row[1], row[2]) for rows in drawing.slices.values() for row in rows) == sorted(
        (start, start + length) for start, length in spans
    )
    if all(a[0] + a[1] <= b[0] for a, b in itertools.pairwise(spans)):
        assert len(drawing.tracks) <= 1


def test_more_overlap_than_lanes_becomes_marks() -> None:
    drawing = Drawing()
    lanes = Lanes(drawing, Numbers(), 1, "x", 0)
    for number in range(MAX_LANES + 2):
        lanes.slice(str(number), "c", number, 1000, {})

    assert len(drawing.tracks) == MAX_LANES
    assert [(name, args["end_ns"]) for name, _, args in drawing.marks[1]] == [("64", 1000), ("65", 1000)]


# -- operations ----------------------------------------------------------------------------------------------


def test_an_operation_is_a_slice_if_measured_and_a_mark_where_issued_if_not() -> None:
    drawing = drawn([kernel(5), kernel(6), times(5, 100, 130)])

    assert [(start, end) for _, start, end, _ in drawing.on("streams")] == [(100, 130)]
    ((_, at, args),) = drawing.marked("streams")
    assert (at, args["op"], args["measured"]) == (6, 6, "no, drawn where issued")


def test_times_that_come_too_late_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_timeline, "MAX_PENDING", 2)
    drawing = drawn([kernel(5), kernel(6), kernel(7), times(5, 1, 2), times(6, 3, 4), times(7, 5, 6)])

    assert [args["op"] for *_, args in drawing.on("streams")] == [6, 7]
    assert [args["op"] for *_, args in drawing.marked("streams")] == [5]


def test_a_measured_wait_is_a_slice_of_its_stream() -> None:
    wait = EventWait(6, 1, 6, 9, 2)  # type: ignore[arg-type]
    record = EventRecord(5, 1, 5, 9, 1)  # type: ignore[arg-type]
    drawing = drawn([kernel(4), record, wait, kernel(7, 2), times(4, 10, 20), times(6, 12, 20), times(7, 20, 25)])

    assert [(name, start, end) for name, start, end, _ in drawing.on("streams", "stream 2")] == [
        ("wait: event 9", 12, 20),
        ("site 0", 20, 25),
    ]
    assert sorted(drawing.flows) == [Flow(1, False), Flow(1, True)]


def test_an_event_inside_a_graph_covers_the_replay() -> None:
    access = (device(Mode.WRITE, page_ids([1])),)
    replay = GraphReplay(3, 1, 3, 8, 1, 0, 3, 2, (0, 1), ())  # type: ignore[arg-type]
    nodes = [
        GraphNode(4, 1, 3, 0, -1, None, (0, 1), access),  # type: ignore[arg-type]
        GraphNode(5, 1, 3, 1, -1, 9, (0, 1), ()),  # type: ignore[arg-type]
    ]
    wait = EventWait(6, 1, 6, 9, 2)  # type: ignore[arg-type]

    drawing = drawn([replay, *nodes, wait, kernel(7, 2)])
    assert sorted(drawing.flows) == [Flow(1, False), Flow(1, True)]
    assert [name for name, *_ in drawing.marked("streams")] == ["graph replay: site 0", "site 0"]


def test_transfers_outside_streams_last_until_the_host_knows() -> None:
    begin = IoBegin(1, 1, 10, 4, IoKind.STORAGE_READ, 0, (0, 1), ())  # type: ignore[arg-type]
    drawing = drawn([begin, IoEnd(2, 1, 35, 4)])  # type: ignore[arg-type]

    ((name, start, end, _),) = drawing.on("x")
    assert (name, start, end) == ("storage read: site 0", 10, 35)


def test_counters_of_transfers() -> None:
    """Two layers of one transfer, submitted at 10 and over at 50; the bytes flow while they are copied."""

    def copy(op: int, transfer: int) -> Memcpy:
        return Memcpy(op, 1, op, 1, 0, transfer, 2_000, (0, 1), (), Direction.HOST_TO_DEVICE)  # type: ignore[arg-type]

    drawing = drawn([copy(10, 7), copy(11, 7), copy(12, 8), times(10, 20, 30), times(11, 30, 50), times(12, 60, 62)])

    assert drawing.values["pending load-backs"] == [(10, 1), (12, 2), (50, 1), (62, 0)]
    assert drawing.values["load-back bytes/s"] == [
        (20, 200_000_000_000), (30, 100_000_000_000), (50, 0), (60, 10**12), (62, 0),
    ]  # fmt: skip


def test_findings_beyond_the_bound_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeline_links, "MAX_FINDINGS", 2)
    links = Links(Numbers())
    pages = [(device(Mode.WRITE, page_ids([n])),) for n in range(5)]
    first = [Kernel(n, 1, n, 1, 0, n, 0, (0, 1), pages[n]) for n in range(5)]  # type: ignore[arg-type]
    second = [Kernel(10 + n, 1, 10 + n, 2, 0, n, 0, (0, 1), pages[n]) for n in range(5)]  # type: ignore[arg-type]
    links.feed([*first, *second])
    links.finish()

    assert (len(links.findings), links.more) == (2, 3)


# -- texts ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.text())
def test_every_text_becomes_one_that_every_format_takes(text: str) -> None:
    shown = plain_text(text)

    shown.encode()
    assert shown.isprintable()
    assert len(shown) <= MAX_TEXT + 3
    assert len(shown) == min(len(text), MAX_TEXT + 3)


@settings(deadline=None)
@given(st.text(alphabet=st.characters(codec=None), max_size=20), st.text(max_size=20))
def test_both_writers_take_every_text(name: str, value: str) -> None:
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    for make in (lambda file: ChromeWriter(file, 0), PerfettoWriter):
        file = io.BytesIO()
        writer: Any = make(file)
        writer.group(1, 0, name, 0)
        writer.track(2, 1, name, 0)
        writer.slice(2, name, "c", 1, 5, {name: value, "n": 2**60}, (Flow(1, True),))
        writer.mark(2, value, "c", 9, {}, (Flow(1, False),))
        writer.close()
        data = file.getvalue()
        if make is PerfettoWriter:
            packets = perfetto_trace_pb2.Trace.FromString(data).packet
            assert [packet.timestamp for packet in packets if packet.HasField("track_event")] == [1, 5, 9]
        else:
            events = json.loads(data)["traceEvents"]
            assert [(event["ts"], event["dur"]) for event in events if event["ph"] == "X"] == [
                (0.001, 0.004),
                (0.009, 0),
            ]


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], "none"),
        ([7], "7 (1)"),
        ([3, 4, 5, 9], "3-5, 9 (4)"),
        ([9, 3], "9, 3 (2)"),
        (list(range(0, 40, 2)), ", ".join(map(str, range(0, 32, 2))) + " and 4 more runs (20)"),
    ],
)
def test_ids_as_runs(ids: list[int], text: str) -> None:
    assert ids_text(np.array(ids, np.int64)) == text


# -- memory --------------------------------------------------------------------------------------------------


def rounds(count: int) -> Iterator[list[AnyRecord]]:
    """Measured rounds, a batch of 512 at a time."""
    for begin in range(0, count, 512):
        batch: list[AnyRecord] = []
        for op in range(begin, begin + 512):
            batch += [kernel(op, 1 + op % 3, at=10 * op + 1), times(op, 10 * op + 5, 10 * op + 9)]
        yield batch


@pytest.mark.slow
@pytest.mark.parametrize("make", [lambda file: ChromeWriter(file, 0), PerfettoWriter], ids=["chrome", "perfetto"])
def test_memory_does_not_grow_with_the_records(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrows take 16 bytes an end and counters 40 bytes a copy; here are neither."""

    class Nowhere(io.RawIOBase):
        def write(self, data: Any) -> int:
            return len(data)

    def peak(count: int) -> int:
        numbers = Numbers()
        links = Links(numbers)
        for batch in rounds(count):
            links.feed(batch)
        links.finish()
        timeline = RecordTimeline(make(Nowhere()), numbers, "x", 0, links, {})
        gc.collect()
        tracemalloc.start()
        for batch in rounds(count):
            timeline.feed(batch)
        timeline.finish()
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    monkeypatch.setattr(perfetto, "MAX_INTERNED", 256)
    # What else this process does in the meantime, other tests' threads included, counts too: the least of three or ten.
    small = min(peak(1_024) for _ in range(3))
    large = [peak(3_072)]
    while large[-1] >= small + 100_000 and len(large) < 10:
        large.append(peak(3_072))
    assert large[-1] < small + 100_000, (small, large)
