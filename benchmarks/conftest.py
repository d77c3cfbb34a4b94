"""What the analyzer is measured beside: a naive checker, torch's CUDA sanitizer, and the least one could do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from hicache_obs.records import (
    KINDS,
    AnyRecord,
    EventRecord,
    EventSync,
    EventWait,
    Kernel,
    Memcpy,
    Mode,
    Space,
    WaitStream,
)

Clock = dict[int, int]
LAYERS = 80


class NaiveChecker:
    """What one writes first: a clock copied per event, and per layer a dictionary from page to its last accesses.

    Exact for kernels, copies and waits on streams and events; it knows no thread, graph, I/O or time.
    """

    def __init__(self) -> None:
        self._clocks: dict[int, Clock] = {}
        self._events: dict[int, Clock] = {}
        self._host: Clock = {}
        self._writers: dict[tuple[Space, int, int], dict[int, tuple[int, int]]] = {}
        self._readers: dict[tuple[Space, int, int], dict[int, dict[int, int]]] = {}
        self.races = 0

    def feed(self, records: Iterable[AnyRecord]) -> None:
        """Check ``records``."""
        for record in records:
            if isinstance(record, (Kernel, Memcpy)):
                self._work(record)
            elif isinstance(record, EventRecord):
                self._events[record.event] = self._advance(record.stream)
            elif isinstance(record, EventWait):
                self._join(self._clock(record.stream), self._events.get(record.event, {}))
            elif isinstance(record, WaitStream):
                self._join(self._clock(record.waiter), self._advance(record.on))
            elif isinstance(record, EventSync):
                self._join(self._host, self._events.get(record.event, {}))

    def _clock(self, stream: int) -> Clock:
        clock = self._clocks.setdefault(stream, {})
        self._join(clock, self._host)
        return clock

    def _advance(self, stream: int) -> Clock:
        clock = self._clock(stream)
        clock[stream] = clock.get(stream, 0) + 1
        return clock.copy()

    def _join(self, clock: Clock, other: Clock) -> None:
        for stream, epoch in other.items():
            if epoch > clock.get(stream, 0):
                clock[stream] = epoch

    def _work(self, record: Kernel | Memcpy) -> None:
        stream = int(record.stream)
        clock = self._clock(stream)
        clock[stream] = epoch = clock.get(stream, 0) + 1
        for layer in range(*record.layers):
            for access in record.accesses:
                key = access.space, access.pool, layer
                writers = self._writers.setdefault(key, {})
                readers = self._readers.setdefault(key, {})
                for page in access.ids.tolist():
                    writer, written = writers.get(page, (stream, 0))
                    self.races += written > clock.get(writer, 0)
                    if access.mode is Mode.READ:
                        readers.setdefault(page, {})[stream] = epoch
                    else:
                        for reader, read in readers.pop(page, {}).items():
                            self.races += reader != stream and read > clock.get(reader, 0)
                        writers[page] = stream, epoch


class Sanitizer:
    """The handlers of torch's CUDA sanitizer, called with the same events as the analyzer gets.

    It knows tensors by address. A layer of the pool is one tensor here, the smallest number of addresses with which
    layers can be told apart; pages cannot. Its hooks in torch's dispatcher are not part of this.
    """

    def __init__(self) -> None:
        from torch.cuda._sanitizer import EventHandler

        self._handler: Any = EventHandler()
        self._events = 1 << 40
        self.races = 0

    def feed(self, records: Iterable[AnyRecord]) -> None:
        """Check ``records``."""
        handler = self._handler
        for record in records:
            if isinstance(record, (Kernel, Memcpy)):
                self._work(record)
            elif isinstance(record, EventRecord):
                handler._handle_event_record(record.event, record.stream)
            elif isinstance(record, EventWait):
                handler._handle_event_wait(record.event, record.stream)
            elif isinstance(record, WaitStream):
                handler._handle_event_creation(self._events)
                handler._handle_event_record(self._events, record.on)
                handler._handle_event_wait(self._events, record.waiter)
                handler._handle_event_deletion(self._events)
            elif isinstance(record, EventSync):
                handler._handle_event_synchronization(record.event)

    def _work(self, record: Kernel | Memcpy) -> None:
        reads: set[int] = set()
        writes: set[int] = set()
        for access in record.accesses:
            first = (access.space * 64 + access.pool) * LAYERS
            chosen = writes if access.mode is Mode.WRITE else reads
            chosen.update(range(first + record.layers[0], first + record.layers[1]))
        reads -= writes
        aliases = {address: ["pages"] for address in reads | writes}
        found = self._handler._handle_kernel_launch(record.stream, reads, writes, set(), "op", aliases)
        self.races += len(found)


class Floor:
    """What any analyzer in Python with numpy page tables has to do, and nothing else: it judges nothing.

    One call per record; one gather and one scatter per page array, once for records that share their arrays.
    """

    def __init__(self) -> None:
        self._tables = [np.zeros(1 << 19, np.int64) for _ in Space]
        self._seen: object = None
        self._handlers = dict.fromkeys(KINDS, self._nothing)
        self._handlers[Kernel] = self._handlers[Memcpy] = self._work
        self.races = 0

    def feed(self, records: Iterable[AnyRecord]) -> None:
        """Touch ``records``."""
        handlers = self._handlers
        for record in records:
            handlers[type(record)](record)

    def _nothing(self, record: Any) -> None:
        """The call is the cost."""

    def _work(self, record: Any) -> None:
        if record.accesses is not self._seen:
            self._seen = record.accesses
            for access in record.accesses:
                table = self._tables[access.space]
                table.take(access.ids)
                table[access.ids] = record.op


@pytest.fixture
def floor() -> Floor:
    """Does the least that could be done."""
    return Floor()


@pytest.fixture
def naive() -> NaiveChecker:
    """A fresh naive checker."""
    return NaiveChecker()


@pytest.fixture
def sanitizer() -> Sanitizer:
    """Fresh handlers of torch's CUDA sanitizer."""
    return Sanitizer()


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """What a table of times does not show: what each benchmark put into ``extra_info``."""
    session = getattr(config, "_benchmarksession", None)
    for bench in () if session is None else session.benchmarks:
        for what, value in bench.extra_info.items():
            row = value if isinstance(value, dict) else {what: value}
            name = f"{bench.name}, {what}" if isinstance(value, dict) else bench.name
            for column, entry in row.items():
                shown = entry if isinstance(entry, str) else f"{entry:,}"
                terminalreporter.write_line(f"{name}: {shown} {column}")
