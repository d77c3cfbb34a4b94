"""Spans from records: names, parents, exact nanoseconds, links, what is kept and what is forgotten."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import Ignore
from hicache_obs.exporters.span_builder import HOLD, MAX_EVENTS, MAX_LINKS, MAX_OPEN, SpanBuilder
from hicache_obs.exporters.spans import Link, Observation, Span, SpanId, parse_traceparent
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    EventRecord,
    EventWait,
    Kernel,
    Memcpy,
    Mode,
    Purpose,
    Times,
    WaitStream,
    device,
    pack_rows,
)

F, L, B = 1, 2, 3
WALL = 1_700_000_000_000_000_000
CONTEXT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class Fed(Ignore):
    """An analyzer, and the builder that follows it, as ``RingSpans`` does it."""

    def __init__(self, one_in: int = 1) -> None:
        self.builder = SpanBuilder("ring", to_wall_ns=WALL, one_in=one_in)
        self.analyzer = Analyzer(self)
        self._told: list[Any] = []

    def on_finding(self, finding: Any) -> None:
        self._told.append(lambda: self.builder.note_finding(finding))

    def on_fence(self, cost: Any) -> None:
        self._told.append(lambda: self.builder.note_fence(cost, observed=True))

    def on_transfer(self, cost: Any) -> None:
        self._told.append(lambda: self.builder.note_transfer(cost, observed=True))

    def feed(self, *records: AnyRecord, last: bool = False) -> list[list[Span]]:
        self.analyzer.feed(records)
        if last:
            self.analyzer.finish()
        self.builder.feed(records)
        for tell in self._told:
            tell()
        self._told.clear()
        return self.builder.release(everything=last)


def pages(*ids: int) -> Any:
    return np.array(ids, np.int64)


def forward(op: int, number: int, ids: Any, *, layers: tuple[int, int] = (0, 2), rows: Any = None) -> Kernel:
    return Kernel(op, 1, 100 * op, F, 1, number, 8, layers, (device(Mode.WRITE, ids),), rows)


def copy(op: int, number: int, ids: Any, *, layers: tuple[int, int] = (0, 2), back: bool = False) -> Memcpy:
    mode, stream = (Mode.READ, B) if back else (Mode.WRITE, L)
    direction = Direction.DEVICE_TO_HOST if back else Direction.HOST_TO_DEVICE
    return Memcpy(op, 1, 100 * op, stream, 2, number, 64, layers, (device(mode, ids),), direction)


def times(op: int, start: int, end: int) -> Times:
    return Times(op, 1, 100_000, start, end, 1)


POOL = Define(NO_OP, 0, 0, DefineSpace.POOL, 0, "kv", 2)


def restored_round(*, fenced: bool) -> list[AnyRecord]:
    """Round 1 writes page 5; a load-back overwrites it layer by layer, and round 2 waits for each layer."""
    ids = pages(5)
    return [
        POOL,
        Define(NO_OP, 0, 0, DefineSpace.REQUEST_TRACE, 70, CONTEXT),
        forward(1, 1, ids),
        *([WaitStream(2, 1, 200, L, F, Purpose.LOAD_FENCE)] if fenced else []),
        copy(3, 9, ids, layers=(0, 1)),
        EventRecord(NO_OP, 1, 310, 50, L),
        copy(4, 9, ids, layers=(1, 2)),
        EventRecord(NO_OP, 1, 410, 51, L),
        EventWait(5, 1, 500, 50, F, Purpose.LAYER),
        forward(6, 2, pages(7), layers=(0, 1), rows=pack_rows([70, 71], [ids, pages(7)], [1, 0], [0, 1])),
        EventWait(7, 1, 700, 51, F, Purpose.LAYER),
        forward(8, 2, pages(7), layers=(1, 2)),
        times(1, 1000, 2000),
        *([times(2, 300, 2000)] if fenced else []),
        *([times(3, 2100, 2200), times(4, 2200, 2300)] if fenced else [times(3, 1100, 1200), times(4, 1200, 1300)]),
        times(5, 2000, 2210),
        times(6, 2210, 2400),
        times(7, 2400, 2400),
        times(8, 2400, 2555),
    ]


def by_name(spans: list[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        found.setdefault(span.name.removeprefix("hicache."), []).append(span)
    return found


def test_a_round_with_a_load_back_is_one_trace_with_exact_times() -> None:
    first, second = Fed().feed(*restored_round(fenced=True), last=True)
    spans = by_name(second)

    assert [span.name for span in first] == ["hicache.forward_round"]
    assert {name: [(s.start_ns - WALL, s.end_ns - WALL) for s in found] for name, found in spans.items()} == {
        "forward_round": [(2210, 2555)],
        "layer_wait": [(2000, 2210)],  # the second layer was there before the round came to it
        "restore": [(200, 2300)],  # from the call that submitted it, its fence
        "transfer": [(2100, 2300)],
        "fence_wait": [(300, 2000)],
    }
    (root,), (restore,) = spans["forward_round"], spans["restore"]
    parents = {name: found[0].parent for name, found in spans.items()}
    assert parents == {
        "forward_round": 0,
        "layer_wait": root.id.span,
        "restore": root.id.span,
        "transfer": restore.id.span,
        "fence_wait": restore.id.span,
    }
    assert {span.id.trace for span in second} == {root.id.trace} != {first[0].id.trace}
    assert len({span.id.span for span in [*first, *second]}) == 6


def test_a_round_links_to_its_requests_as_far_as_they_have_a_context() -> None:
    _, second = Fed().feed(*restored_round(fenced=True), last=True)
    round_ = by_name(second)["forward_round"][0]

    assert round_.links == (Link(SpanId(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331), "request"),)
    assert round_.attributes == {"hicache.round": 2, "hicache.requests": 2}


def test_costs_are_on_the_spans_and_make_them_exemplars() -> None:
    _, second = Fed().feed(*restored_round(fenced=True), last=True)
    spans = by_name(second)

    assert spans["fence_wait"][0].attributes == {"hicache.waited_ns": 1700, "hicache.avoidable_ns": 100}
    assert spans["restore"][0].attributes == {"hicache.transfer": 9, "hicache.pages": 1, "hicache.fenced": True}
    assert spans["transfer"][0].attributes == {"hicache.bytes": 128}
    assert {name: found[0].observation for name, found in spans.items()} == {
        "forward_round": None,
        "layer_wait": Observation("layer_wait_seconds", (), 210),
        "restore": Observation("op_seconds", ("restore",), 2100),
        "transfer": Observation("transfer_seconds", ("restore",), 200),
        "fence_wait": Observation("fence_wait_seconds", ("restore",), 1700),
    }


def test_a_violation_is_an_event_on_both_spans_which_link_to_each_other() -> None:
    first, second = Fed(one_in=0).feed(*restored_round(fenced=False), last=True)
    (writer,), (transfer,) = first, by_name(second)["transfer"]

    assert all(span.kept for span in [*first, *second])
    assert [(s.name, s.failed) for s in [*first, *second] if s.events] == [(writer.name, True), (transfer.name, True)]
    assert [event.time_ns - WALL for event in writer.events] == [1100, 1200]  # when each copy began
    assert [event.time_ns - WALL for event in transfer.events] == [1100, 1200]
    assert [event.attributes["hicache.side"] for event in (writer.events[0], transfer.events[0])] == [
        "earlier",
        "later",
    ]
    event = writer.events[0].attributes
    assert event["hicache.hazard"] == "waw_forward_restore"
    assert event["hicache.verdict"] == "violation"
    assert (event["hicache.op"], event["hicache.other_op"], event["hicache.pages"]) == (1, 3, (5,))
    assert writer.links == (Link(transfer.id, "conflict"),)
    assert transfer.links == (Link(writer.id, "conflict"),)


def test_without_a_finding_one_in_so_many_is_kept() -> None:
    fed = Fed(one_in=0)
    assert fed.feed(*restored_round(fenced=True), last=True) == []
    assert fed.builder.sampled_out == 7

    kept = 0
    fed = Fed(one_in=10)
    for n in range(1, 2001):
        kept += len(fed.feed(forward(n, n, pages(5)), times(n, 100 * n, 100 * n + 50), last=n == 2000))
    assert 150 < kept < 250
    assert fed.builder.sampled_out == 2000 - kept


def test_a_backup_is_a_trace_of_its_own_that_links_to_the_rounds_that_wrote_its_pages() -> None:
    first, second, third, backup = Fed().feed(
        POOL,
        forward(1, 1, pages(5)),
        forward(2, 2, pages(6)),
        forward(3, 3, pages(7)),
        WaitStream(4, 1, 400, B, F, Purpose.WRITE_FENCE),
        copy(5, 8, pages(5, 7), back=True),
        *[times(op, 1000 * op, 1000 * op + 500) for op in (1, 2, 3, 4, 5)],
        last=True,
    )
    assert [span.name for span in backup] == ["hicache.backup", "hicache.transfer", "hicache.fence_wait"]
    assert backup[0].links == (Link(first[0].id, "writer"), Link(third[0].id, "writer"))
    assert backup[0].parent == 0
    assert backup[0].id.trace != second[0].id.trace
    assert backup[2].observation is not None
    assert backup[2].observation.labels == ("backup",)


def test_a_trace_waits_for_findings_to_come_and_no_longer() -> None:
    fed = Fed()
    assert fed.feed(forward(1, 1, pages(1)), times(1, 100, 200)) == []
    released = []
    for n in range(2, HOLD + 2):
        released += fed.feed(forward(n, n, pages(n)), times(n, 100 * n, 100 * n + 50))
    assert [spans[0].attributes["hicache.round"] for spans in released] == [1]
    assert len(fed.builder.release(complete=True)) == HOLD


def test_a_round_that_is_never_measured_leaves_in_the_end_and_says_so() -> None:
    fed, released = Fed(), []
    for n in range(1, MAX_OPEN + 2):
        released += fed.feed(forward(n, n, pages(n)))
    ((span,),) = released
    assert (span.start_ns - WALL, span.end_ns - WALL) == (100, 100)
    assert span.attributes["hicache.timed"] is False


def test_links_and_events_are_bounded() -> None:
    rows = pack_rows(range(500), [pages(5)] * 500, [1] * 500, [0] * 500)
    contexts = [
        Define(NO_OP, 0, 0, DefineSpace.REQUEST_TRACE, n, f"00-{n + 1:032x}-{n + 1:016x}-01") for n in range(500)
    ]
    copies = [copy(op, op, pages(5)) for op in range(2, 102)]
    first, *_ = Fed().feed(
        *contexts,
        forward(1, 1, pages(5), rows=rows),
        *copies,
        times(1, 90_000, 99_000),
        *[times(c.op, 100 * c.op, 100 * c.op + 10) for c in copies],
        last=True,
    )
    (round_,) = first
    assert len([link for link in round_.links if link.what == "request"]) == MAX_LINKS
    assert len(round_.events) == MAX_EVENTS
    assert round_.attributes["hicache.findings"] > MAX_EVENTS  # type: ignore[operator]


def test_what_is_released_is_forgotten() -> None:
    fed = Fed(one_in=0)
    for n in range(10, 3000, 10):
        ids = pages(n % 37)
        fed.feed(
            forward(n, n, ids),
            copy(n + 1, n, ids),
            EventRecord(NO_OP, 1, 0, n, L),
            EventWait(n + 2, 1, 0, n, F, Purpose.LAYER),
            *[times(n + k, 100 * n + 10 * k, 100 * n + 10 * k + 5) for k in range(3)],
        )
    builder = fed.builder
    assert len(builder._open) <= 2 * HOLD
    assert len(builder._of_op) <= 8 * HOLD
    assert len(builder._transfers) <= 2 * HOLD
    assert sum(map(len, builder._waits.values())) + sum(map(len, builder._queued.values())) <= 2


def test_ids_are_the_same_for_another_agent_and_differ_between_rings() -> None:
    records = restored_round(fenced=True)
    again = [span.id for spans in Fed().feed(*records, last=True) for span in spans]
    other = Fed()
    other.builder = SpanBuilder("another ring", to_wall_ns=WALL, one_in=1)

    assert [span.id for spans in Fed().feed(*records, last=True) for span in spans] == again
    assert not {span.id for spans in other.feed(*records, last=True) for span in spans} & set(again)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "HC-1",
        CONTEXT[:-1],
        CONTEXT.upper(),
        "ff" + CONTEXT[2:],
        "00-" + "0" * 32 + CONTEXT[35:],
        CONTEXT[:36] + "0" * 16 + "-01",
    ],
)
def test_what_is_no_trace_context_gives_no_link(text: str) -> None:
    assert parse_traceparent(CONTEXT) == SpanId(0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert parse_traceparent(text) is None


def test_lost_times_hold_up_their_own_trace_only() -> None:
    fed, released = Fed(), []
    for n in range(1, 2 * HOLD):
        timed = [] if n == 3 else [times(n, 100 * n, 100 * n + 50)]
        released += fed.feed(forward(n, n, pages(n)), *timed)
    assert [spans[0].attributes["hicache.round"] for spans in released] == [1, 2, *range(4, HOLD)]
