"""Records of serving rounds, as the recorder writes them: for benchmarks, and for traces of any length.

One host thread, a schedule, a forward, a load-back and a write-back stream, every fence in place. The scheduler runs
one round ahead: a round's result is awaited after the next round was launched. Times come from a small model of the
device, so they agree with the order.

A *decode round* is ``wait_stream``, one kernel, an event record and a synchronize. It reads ``ROWS`` rows of
``ROW_PAGES`` pages and writes the newest page of each row; half of the older pages came by a load-back. Rows grow: in
every round some of them begin a page that belonged to somebody else, so page arrays are never the same object twice.

A *restore round* is a decode round in flight, pages freed and given out, an index upload, a fenced load-back, the round
that consumes it, and its result. ``Shape.PER_LAYER`` is what the recorder writes for an engine with layer events: a
copy and an event record, then a wait and a kernel, per layer. ``Shape.WHOLE`` is one copy, one wait and one kernel of
all layers, as where layers are not recorded one by one.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from typing import Final

import numpy as np

from hicache_obs.records import (
    NO_OP,
    Access,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    EventId,
    EventRecord,
    EventSync,
    EventWait,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    Purpose,
    Space,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
    device,
    host,
)

ROWS: Final = 32
ROW_PAGES: Final = 8
MAIN: Final = ThreadId(0)
SCHEDULE, FORWARD, LOAD, WRITE = (StreamId(n) for n in range(4))
PRODUCERS: Final = 3
"""Load-backs whose layer events may be in use at once."""
_HOST_CALL_NS: Final = 2_000
_LAYER_NS: Final = 20_000


class Shape(enum.Enum):
    """How a restore round is recorded."""

    PER_LAYER = "a record per layer"
    WHOLE = "a record per transfer"


class Rounds:
    """Makes rounds; every call continues the same trace.

    Args:
        layers: Of the device pool.
        pages: Of the device pool; at least twice ``restored_pages``.
        restored_pages: Of one load-back.
        timed: Whether device times follow each round.
        consecutive: Whether a load-back's pages have consecutive ids; else they lie anywhere in the pool.
        rows, row_pages: Rows of a round, and pages of each.
    """

    def __init__(
        self,
        *,
        layers: int = 80,
        pages: int = 1 << 17,
        restored_pages: int = 4096,
        timed: bool = False,
        consecutive: bool = False,
        rows: int = ROWS,
        row_pages: int = ROW_PAGES,
    ) -> None:
        self.layers = layers
        self._row_pages = row_pages
        self._timed = timed
        self._random = np.random.default_rng(0)
        self._ops = 0
        self._events = PRODUCERS * layers
        self._rounds = self._transfers = self._owners = 0
        self._now_ns = 0
        self._free_ns = dict.fromkeys((SCHEDULE, FORWARD, LOAD, WRITE), 0)
        self._done_ns: dict[EventId, int] = {}
        self._times: list[AnyRecord] = []
        self._launched: EventId | None = None
        order = np.arange(pages) if consecutive else self._random.permutation(pages)
        self._pages: PageIds = order.astype(np.int64)
        self._count = restored_pages
        self._spare = pages // 4  # at the end of the order; rows grow into these, and load-backs leave them alone
        self._first = self._next = rows * row_pages
        self._rows: PageIds = self._pages[: self._next].reshape(rows, row_pages).copy()
        self._grown = 0

    def prologue(self) -> list[AnyRecord]:
        """Names; and a load-back of half of the pages that decode rounds read."""
        names = {SCHEDULE: "schedule", FORWARD: "forward", LOAD: "load-back", WRITE: "write-back"}
        records: list[AnyRecord] = [
            Define(NO_OP, MAIN, 0, DefineSpace.STREAM, stream, name) for stream, name in names.items()
        ]
        records.append(Define(NO_OP, MAIN, 0, DefineSpace.POOL, 0, "kv", self.layers))
        records += self._restore(self._rows[:, : self._row_pages // 2].ravel().copy(), Shape.WHOLE)
        return records

    def decode(self) -> list[AnyRecord]:
        """One decode round and the result of the round before."""
        records: list[AnyRecord] = []
        self._grow(records)
        launched = self._round(records, self._rows.ravel().copy())
        self._await_result(records)
        self._launched = launched
        return self._with_times(records)

    def restore(self, shape: Shape = Shape.PER_LAYER) -> list[AnyRecord]:
        """One restore round."""
        if self._next + self._count > len(self._pages) - self._spare:
            self._next = self._first
        pages = self._pages[self._next : self._next + self._count].copy()
        self._next += self._count
        return self._restore(pages, shape)

    def write_back(self) -> list[AnyRecord]:
        """A fenced write-back of the pages that decode rounds have filled."""
        records: list[AnyRecord] = []
        pages = self._rows[:, self._row_pages // 2 : -1].ravel().copy()
        start = self._record(records, SCHEDULE)
        self._wait_stream(records, WRITE, FORWARD, Purpose.WRITE_FENCE)
        self._wait_event(records, WRITE, start, Purpose.START)
        self._transfers += 1
        accesses = (device(Mode.READ, pages), host(Mode.WRITE, pages.copy()))
        self._copy(records, WRITE, accesses, (0, self.layers), Direction.DEVICE_TO_HOST)
        self._synchronize(records, self._record(records, WRITE))
        return self._with_times(records)

    def trace(self, records: int) -> Iterator[AnyRecord]:
        """At least ``records`` records; of 32 rounds one restores, in either shape, and one is a write-back."""
        made = 0
        number = 0
        batch = self.prologue()
        while True:
            yield from batch
            made += len(batch)
            if made >= records:
                return
            number += 1
            if number % 32 == 0:
                batch = self.restore(Shape.PER_LAYER if number % 64 else Shape.WHOLE)
            elif number % 32 == 16:
                batch = self.write_back()
            else:
                batch = self.decode()

    # -- parts of a round ------------------------------------------------------------------------------------

    def _restore(self, pages: PageIds, shape: Shape) -> list[AnyRecord]:
        records: list[AnyRecord] = []
        launched = self._round(records, self._rows.ravel().copy())
        self._await_result(records)
        self._owners += 1
        records.append(PageFree(self._op(), MAIN, self._now_ns, self._owners, device(Mode.WRITE, pages)))
        records.append(PageAlloc(self._op(), MAIN, self._now_ns, self._owners + 1, device(Mode.WRITE, pages)))
        self._transfers += 1
        index = Access(Space.BUFFER, Mode.READ, np.array([self._transfers % 1024], np.int64))
        upload = (Access(Space.BUFFER, Mode.WRITE, index.ids),)
        self._kernel(records, SCHEDULE, upload, (0, self.layers), self._transfers)
        start = self._record(records, SCHEDULE)
        self._wait_stream(records, LOAD, FORWARD, Purpose.LOAD_FENCE)
        self._wait_event(records, LOAD, start, Purpose.START)
        accesses = (host(Mode.READ, pages.copy()), device(Mode.WRITE, pages), index)
        spans = [(0, self.layers)]
        if shape is Shape.PER_LAYER:
            spans = [(layer, layer + 1) for layer in range(self.layers)]
        first = (self._transfers % PRODUCERS) * self.layers
        for number, span in enumerate(spans):
            self._copy(records, LOAD, accesses, span, Direction.HOST_TO_DEVICE)
            self._record(records, LOAD, EventId(first + number))
        finish = self._record(records, LOAD)
        self._launched = launched
        waits = [EventId(first + number) for number in range(len(spans))]
        launched = self._round(records, np.concatenate((self._rows.ravel(), pages)), spans, waits)
        self._await_result(records)
        self._synchronize(records, finish)
        self._launched = launched
        return self._with_times(records)

    def _round(
        self,
        records: list[AnyRecord],
        reads: PageIds,
        spans: list[tuple[int, int]] | None = None,
        waits: list[EventId] | None = None,
    ) -> EventId:
        """One forward round, by segments if ``spans`` are given; its event."""
        self._rounds += 1
        self._wait_stream(records, FORWARD, SCHEDULE, Purpose.PLAIN)
        accesses = (device(Mode.READ, np.unique(reads)), device(Mode.WRITE, self._rows[:, -1].copy()))
        for number, span in enumerate(spans or [(0, self.layers)]):
            if waits is not None:
                self._wait_event(records, FORWARD, waits[number], Purpose.LAYER)
            self._kernel(records, FORWARD, accesses, span, self._rounds)
        return self._record(records, FORWARD)

    def _grow(self, records: list[AnyRecord]) -> None:
        """Two rows begin a new page; their oldest pages go to somebody else."""
        rows = [self._grown % len(self._rows), (self._grown + 1) % len(self._rows)]
        fresh = self._pages[[-1 - self._grown % self._spare, -2 - self._grown % self._spare]]
        self._grown += 2
        old = self._rows[rows, 0]
        self._rows[rows, :-1] = self._rows[rows, 1:]
        self._rows[rows, -1] = fresh
        records.append(PageFree(self._op(), MAIN, self._now_ns, 0, device(Mode.WRITE, old)))
        records.append(PageAlloc(self._op(), MAIN, self._now_ns, 0, device(Mode.WRITE, fresh)))

    def _await_result(self, records: list[AnyRecord]) -> None:
        if self._launched is not None:
            self._synchronize(records, self._launched)
            self._launched = None

    # -- calls, and what the modelled device makes of them -------------------------------------------------------

    def _op(self) -> OpId:
        self._ops += 1
        self._now_ns += _HOST_CALL_NS
        return OpId(self._ops)

    def _run(self, op: OpId, stream: StreamId, duration_ns: int) -> None:
        start = max(self._free_ns[stream], self._now_ns)
        self._free_ns[stream] = start + duration_ns
        self._times.append(Times(op, MAIN, self._now_ns, start, start + duration_ns))

    def _kernel(
        self,
        records: list[AnyRecord],
        stream: StreamId,
        accesses: tuple[Access, ...],
        span: tuple[int, int],
        number: int,
    ) -> None:
        op = self._op()
        records.append(Kernel(op, MAIN, self._now_ns, stream, 0, number, 0, span, accesses))
        self._run(op, stream, (span[1] - span[0]) * _LAYER_NS)

    def _copy(
        self,
        records: list[AnyRecord],
        stream: StreamId,
        accesses: tuple[Access, ...],
        span: tuple[int, int],
        direction: Direction,
    ) -> None:
        op = self._op()
        size_bytes = len(accesses[0].ids) * (span[1] - span[0]) * 4096
        records.append(
            Memcpy(op, MAIN, self._now_ns, stream, 1, self._transfers, size_bytes, span, accesses, direction)
        )
        self._run(op, stream, (span[1] - span[0]) * _LAYER_NS)

    def _record(self, records: list[AnyRecord], stream: StreamId, event: EventId | None = None) -> EventId:
        if event is None:
            self._events += 1
            event = EventId(self._events)
        records.append(EventRecord(self._op(), MAIN, self._now_ns, event, stream))
        self._done_ns.pop(event, None)
        self._done_ns[event] = max(self._free_ns[stream], self._now_ns)
        if len(self._done_ns) > 4 * PRODUCERS * self.layers:
            del self._done_ns[next(iter(self._done_ns))]
        return event

    def _wait_event(self, records: list[AnyRecord], stream: StreamId, event: EventId, purpose: Purpose) -> None:
        op = self._op()
        records.append(EventWait(op, MAIN, self._now_ns, event, stream, purpose))
        self._run_wait(op, stream, self._done_ns[event])

    def _wait_stream(self, records: list[AnyRecord], waiter: StreamId, on: StreamId, purpose: Purpose) -> None:
        op = self._op()
        records.append(WaitStream(op, MAIN, self._now_ns, waiter, on, purpose))
        self._run_wait(op, waiter, self._free_ns[on])

    def _run_wait(self, op: OpId, stream: StreamId, until_ns: int) -> None:
        start = max(self._free_ns[stream], self._now_ns)
        self._run(op, stream, max(0, until_ns - start))

    def _synchronize(self, records: list[AnyRecord], event: EventId) -> None:
        self._now_ns = max(self._now_ns, self._done_ns[event])
        records.append(EventSync(self._op(), MAIN, self._now_ns, event))

    def _with_times(self, records: list[AnyRecord]) -> list[AnyRecord]:
        times, self._times = self._times, []
        return records + times if self._timed else records
