"""Cost of analysing one round, and pages looked up per second; the peers in the same run.

``hicache_obs.testing.rounds`` says what is in a round. Records are made outside the timing. The rows of one table see
rounds of the same make; a table's ratios are against its fastest row. Microseconds per record and pages per second,
of the fastest round, are listed at the end. ``make bench`` counts processor time of the thread, not time on a clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.records import AnyRecord, Kernel, Mode, OpId, PageIds, StreamId, ThreadId, WaitStream, device
from hicache_obs.testing.rounds import Rounds, Shape

KINDS = ("decode", "restore, a record per layer", "restore, a record per transfer")
SIZES = (64, 256, 1024, 4096, 65536, 262144)
POOL = 1 << 19


class Checker(Protocol):
    """A peer; ``conftest`` has them."""

    races: int
    """Races reported so far."""

    def feed(self, records: Iterable[AnyRecord]) -> object:
        """Check ``records``."""


def _measure(benchmark: BenchmarkFixture, checker: Checker | Analyzer, rounds: Rounds, kind: str, times: int) -> None:
    """Time ``checker`` on rounds of ``kind``, in a trace that has decode and restore rounds before."""

    def make() -> list[AnyRecord]:
        if kind == "decode":
            return rounds.decode()
        return rounds.restore(Shape.PER_LAYER if "layer" in kind else Shape.WHOLE)

    checker.feed(rounds.prologue())
    for _ in range(2):
        checker.feed(rounds.decode())
        checker.feed(rounds.restore(Shape.WHOLE))
    benchmark.group = f"analyse a round: {kind}"
    records = len(make())
    benchmark.pedantic(checker.feed, setup=lambda: ((make(),), {}), rounds=times, warmup_rounds=1)
    benchmark.extra_info["us per record"] = round(benchmark.stats.stats.min * 1e6 / records, 2)


def _finished(tally: Tally, analyzer: Analyzer) -> None:
    """Work was done, and nothing was reported."""
    analyzer.finish()
    assert not tally.defects
    assert sum(tally.checked.values()) > 0


@pytest.mark.parametrize("pages", ["anywhere", "consecutive", "anywhere, timed"])
@pytest.mark.parametrize("kind", KINDS)
def test_round(benchmark: BenchmarkFixture, kind: str, pages: str) -> None:
    """This analyzer: pages anywhere in the pool or consecutive; without and with device times."""
    tally = Tally()
    analyzer = Analyzer(tally)
    rounds = Rounds(consecutive="consecutive" in pages, timed="timed" in pages)
    _measure(benchmark, analyzer, rounds, kind, 300 if kind == "decode" else 60)
    _finished(tally, analyzer)


@pytest.mark.parametrize("kind", KINDS)
def test_round_floor(benchmark: BenchmarkFixture, floor: Checker, kind: str) -> None:
    """A call per record, a gather and a scatter per page array: the limit for this analyzer's approach in Python."""
    _measure(benchmark, floor, Rounds(), kind, 300 if kind == "decode" else 60)


@pytest.mark.parametrize("kind", KINDS)
def test_round_naive(benchmark: BenchmarkFixture, naive: Checker, kind: str) -> None:
    """A dictionary per layer; in a small pool, for it takes some 300 bytes per page and layer."""
    _measure(benchmark, naive, Rounds(pages=8192), kind, 20 if kind == "decode" else 3)
    assert not naive.races


@pytest.mark.parametrize("kind", KINDS)
def test_round_sanitizer(benchmark: BenchmarkFixture, sanitizer: Checker, kind: str) -> None:
    """torch's CUDA sanitizer, one address per layer: it cannot tell pages apart, and has no threads or times."""
    _measure(benchmark, sanitizer, Rounds(), kind, 60)
    assert not sanitizer.races


class Pages:
    """Two streams in turn: one writes pages, the other waits for it and reads or writes them."""

    def __init__(self, ids: PageIds) -> None:
        self._ids = ids
        self._ops = 0

    def _touch(self, mode: Mode, stream: int) -> list[AnyRecord]:
        self._ops += 2
        wait, op = OpId(self._ops), OpId(self._ops + 1)
        accesses = (device(mode, self._ids.copy()),)
        return [
            WaitStream(wait, ThreadId(0), 0, StreamId(stream), StreamId(1 - stream)),
            Kernel(op, ThreadId(0), 0, StreamId(stream), 0, self._ops, 0, (0, 1), accesses),
        ]

    def write(self) -> list[AnyRecord]:
        """The fenced write before."""
        return self._touch(Mode.WRITE, 0)

    def check(self, mode: Mode) -> list[AnyRecord]:
        """What is measured."""
        return self._touch(mode, 1)


def _measure_pages(benchmark: BenchmarkFixture, checker: Checker | Analyzer, ids: PageIds, mode: Mode) -> None:
    pages = Pages(ids)

    def setup() -> tuple[tuple[list[AnyRecord]], dict[str, object]]:
        checker.feed(pages.write())
        return (pages.check(mode),), {}

    benchmark.group = f"page checks: {len(ids)} pages"
    benchmark.pedantic(checker.feed, setup=setup, rounds=50 if isinstance(checker, Analyzer) else 5, warmup_rounds=3)
    benchmark.extra_info["million pages per second"] = round(len(ids) / benchmark.stats.stats.min / 1e6, 1)


@pytest.mark.parametrize("what", ["read anywhere", "write anywhere", "read consecutive", "write consecutive"])
@pytest.mark.parametrize("size", SIZES)
def test_page_checks(benchmark: BenchmarkFixture, size: int, what: str) -> None:
    """A wait and one access: its pages are looked up and marked."""
    ids = np.arange(size, dtype=np.int64)
    if "anywhere" in what:
        ids = np.random.default_rng(0).choice(POOL, size, replace=False).astype(np.int64)
    tally = Tally()
    analyzer = Analyzer(tally)
    _measure_pages(benchmark, analyzer, ids, Mode.READ if "read" in what else Mode.WRITE)
    assert analyzer.totals.lookups >= 53 * size
    _finished(tally, analyzer)


@pytest.mark.parametrize("size", SIZES)
def test_page_checks_naive(benchmark: BenchmarkFixture, naive: Checker, size: int) -> None:
    """The dictionary, one layer."""
    ids = np.random.default_rng(0).choice(POOL, size, replace=False).astype(np.int64)
    _measure_pages(benchmark, naive, ids, Mode.READ)
    assert not naive.races
