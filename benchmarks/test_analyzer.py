"""Cost of analysing one round, against the same analyzer without page groups, in the same run.

A decode round reads and writes 256 pages; a restore round restores 4,096 pages over 80 layers, fenced, and the
forward round that consumes it waits for and reads every layer. The peer hands every record its own page array,
which is what a checker that keeps one clock per layer has to look at.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.records import (
    Direction,
    EventId,
    EventRecord,
    EventSync,
    EventWait,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageIds,
    Purpose,
    Record,
    StreamId,
    ThreadId,
    WaitStream,
    device,
)

MAIN = ThreadId(0)
SCHEDULE, FORWARD, LOAD = StreamId(0), StreamId(1), StreamId(2)
DONE, START = EventId(0), EventId(1)
LAYER_EVENTS = 2
PAGES = 1 << 17


class Rounds:
    """Makes records of decode and restore rounds; ``grouped`` shares page arrays, as the recorder does."""

    def __init__(self, *, grouped: bool) -> None:
        self._ops = count()
        self._grouped = grouped
        rng = np.random.default_rng(0)
        self._decode = rng.choice(PAGES, 256, replace=False).astype(np.int64)
        self._restore = rng.choice(PAGES, 4096, replace=False).astype(np.int64)

    def _ids(self, ids: PageIds) -> PageIds:
        return ids if self._grouped else ids.copy()

    def _kernel(self, ids: PageIds, layers: tuple[int, int], number: int) -> Kernel:
        ids = self._ids(ids)
        accesses = (device(Mode.READ, ids), device(Mode.WRITE, ids[:256] if not self._grouped else self._decode))
        return Kernel(OpId(next(self._ops)), MAIN, 0, FORWARD, 0, number, 0, layers, accesses)

    def decode(self) -> list[Record]:
        """One decode round, its result handled by the host."""
        op = self._ops
        return [
            WaitStream(OpId(next(op)), MAIN, 0, FORWARD, SCHEDULE),
            self._kernel(self._decode, (0, 80), 0),
            EventRecord(OpId(next(op)), MAIN, 0, DONE, FORWARD),
            EventSync(OpId(next(op)), MAIN, 0, DONE),
        ]

    def restore(self, layers: int = 80) -> list[Record]:
        """A forward round in flight, a fenced load-back, and the round that consumes it layer by layer."""
        op = self._ops
        records: list[Record] = [
            WaitStream(OpId(next(op)), MAIN, 0, FORWARD, SCHEDULE),
            self._kernel(self._decode, (0, layers), 0),
            EventRecord(OpId(next(op)), MAIN, 0, START, SCHEDULE),
            WaitStream(OpId(next(op)), MAIN, 0, LOAD, FORWARD, Purpose.LOAD_FENCE),
            EventWait(OpId(next(op)), MAIN, 0, START, LOAD, Purpose.START),
        ]
        for layer in range(layers):
            accesses = (device(Mode.WRITE, self._ids(self._restore)),)
            records.append(
                Memcpy(OpId(next(op)), MAIN, 0, LOAD, 1, 0, 0, (layer, layer + 1), accesses, Direction.HOST_TO_DEVICE)
            )
            records.append(EventRecord(OpId(next(op)), MAIN, 0, EventId(LAYER_EVENTS + layer), LOAD))
        records.append(WaitStream(OpId(next(op)), MAIN, 0, FORWARD, SCHEDULE))
        for layer in range(layers):
            event = EventId(LAYER_EVENTS + layer)
            records.append(EventWait(OpId(next(op)), MAIN, 0, event, FORWARD, Purpose.LAYER))
            records.append(self._kernel(self._restore, (layer, layer + 1), 1))
        records.append(EventRecord(OpId(next(op)), MAIN, 0, DONE, FORWARD))
        records.append(EventSync(OpId(next(op)), MAIN, 0, DONE))
        return records


@pytest.fixture
def tally() -> Iterator[Tally]:
    """Checks after the benchmark that work was done and nothing was reported."""
    kept = Tally()
    yield kept
    assert not kept.defects
    assert sum(kept.checked.values()) > 0


@pytest.mark.parametrize("grouped", [True, False], ids=["grouped", "per-layer"])
@pytest.mark.parametrize("kind", ["decode", "restore"])
def test_round(benchmark: BenchmarkFixture, tally: Tally, kind: str, grouped: bool) -> None:
    """Analyse one round; the records are made outside the timing."""
    benchmark.group = f"analyse a {kind} round"
    analyzer = Analyzer(tally)
    rounds = Rounds(grouped=grouped)
    make = rounds.decode if kind == "decode" else rounds.restore
    analyzer.feed(make())

    benchmark.pedantic(analyzer.feed, setup=lambda: ((make(),), {}), rounds=40, warmup_rounds=5)
