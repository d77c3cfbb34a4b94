"""What counts as checked, against a count of every page on its own: pages looked up, and those with an earlier access.

Every operation here begins a group of its own, so each is looked up.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.check import PRUNE_EVERY, Totals
from hicache_obs.findings import Hazard
from hicache_obs.records import (
    NO_OP,
    Access,
    Direction,
    DropReason,
    GraphReplay,
    HostAccess,
    IoBegin,
    IoKind,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    Record,
    Relocate,
    Space,
    StreamId,
    ThreadId,
    Times,
)
from hicache_obs.testing import History, RecordingSink

MAIN = ThreadId(0)
DEVICE_CHECKS = {
    ("forward", Mode.READ): {Hazard.RAW_RESTORE_FORWARD},
    ("forward", Mode.WRITE): {Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_BACKUP_FORWARD},
    ("copy", Mode.READ): {Hazard.RAW_RESTORE_FORWARD},
    ("copy", Mode.WRITE): {Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_BACKUP_FORWARD},
    ("restore", Mode.WRITE): {Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_FORWARD_RESTORE},
    ("backup", Mode.READ): {Hazard.RAW_FORWARD_BACKUP},
    ("device read", Mode.READ): {Hazard.RAW_FORWARD_BACKUP},
}
"""Hazards of which an access to device pages can be the later one."""
IOS = {"storage": (IoKind.STORAGE_READ, IoKind.STORAGE_WRITE), "device read": (IoKind.DEVICE_READ,)}
IOS["rdma"] = (IoKind.RDMA_WRITE,)
DIRECTIONS = {
    "restore": Direction.HOST_TO_DEVICE,
    "backup": Direction.DEVICE_TO_HOST,
    "copy": Direction.DEVICE_TO_DEVICE,
}
KINDS = ("forward", "restore", "backup", "copy", "kernel", "host", "graph", "relocate", *IOS)


@dataclass
class Told(RecordingSink):
    """Keeps the second number as well."""

    met: Counter[Hazard] = field(default_factory=Counter)

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        self.checked[hazard] += pages
        self.met[hazard] += pairs
        assert 0 <= pairs <= pages
        assert pages > 0


def _hazards(what: str, access: Access) -> set[Hazard]:
    if what in ("graph", "relocate"):
        return {Hazard.GRAPH if what == "graph" else Hazard.RELOCATION}
    if access.space is not Space.DEVICE:
        return {Hazard.HOST_REUSE if access.space is Space.HOST else Hazard.METADATA_WAR}
    return DEVICE_CHECKS.get((what, access.mode), set())


@dataclass
class Model:
    """Who touched and wrote what, and the counts."""

    touched: set[tuple[Space, int, int]] = field(default_factory=set)
    wrote: set[tuple[Space, int, int]] = field(default_factory=set)
    owned: set[tuple[Space, int, int]] = field(default_factory=set)
    pages: Counter[Hazard] = field(default_factory=Counter)
    pairs: Counter[Hazard] = field(default_factory=Counter)
    totals: Totals = field(default_factory=Totals)

    def work(self, what: str, accesses: tuple[Access, ...]) -> None:
        cells = [[(access.space, access.pool, page) for page in access.ids.tolist()] for access in accesses]
        for access, mine in zip(accesses, cells, strict=True):
            known = self.touched if access.mode is Mode.WRITE else self.wrote
            met = sum(cell in known for cell in mine)
            for hazard in _hazards(what, access):
                self.pages[hazard] += len(mine)
                self.pairs[hazard] += met
            owned = sum(cell in self.owned for cell in mine)
            self.pages[Hazard.LIFETIME] += owned
            self.pairs[Hazard.LIFETIME] += owned
            self.totals.lookups += met
            if what == "restore" and access.space is Space.DEVICE and access.mode is Mode.WRITE:
                self.totals.pages_checked += len(mine)
                self.totals.pairs_checked += met
        for access, mine in zip(accesses, cells, strict=True):
            self.touched.update(mine)
            if access.mode is Mode.WRITE:
                self.wrote.update(mine)


def _accesses(rng: random.Random, what: str) -> tuple[Access, ...]:
    """One to three, of any space and mode, some to the same pages or to none."""
    spaces = [Space.BUFFER] if what == "kernel" else list(Space)
    found = []
    for number in range(rng.randint(1, 3)):
        space = Space.DEVICE if what == "forward" and not number else rng.choice(spaces)
        ids = np.array(rng.sample(range(6), rng.randint(0, 3)), np.int64)
        found.append(Access(space, rng.choice(tuple(Mode)), ids, rng.choice((0, 0, 1))))
    return tuple(found)


def _record(rng: random.Random, op: int, what: str, accesses: tuple[Access, ...]) -> Record:
    head, stream = (OpId(op), MAIN, op), StreamId(rng.randrange(3))
    fields = (*head, stream, 0, op, 0, (0, 1), accesses)
    if what in DIRECTIONS:
        return Memcpy(*fields, DIRECTIONS[what])
    if what == "graph":
        return GraphReplay(*head, rng.randrange(2), stream, 0, op, 0, (0, 1), accesses)
    if what == "relocate":
        return Relocate(*head, stream, 0, (0, 1), accesses)
    if what == "host":
        return HostAccess(*head, 0, (0, 1), accesses)
    if what in IOS:
        return IoBegin(*head, op, rng.choice(IOS[what]), 0, (0, 1), accesses)
    return Kernel(*fields)


@pytest.mark.parametrize("seed", range(40))
def test_counts_are_those_of_a_model(seed: int) -> None:
    """In whatever parts the trace is fed, and whatever is known of owners and times."""
    rng = random.Random(seed)
    model, records = Model(), list[Record]()
    for op in range(rng.choice((1, 10, 60))):
        if rng.random() < 0.3:
            ids = np.array(rng.sample(range(6), rng.choice((0, 2, 2, 3))), np.int64)
            access = Access(Space.DEVICE, Mode.WRITE, ids)
            records.append(rng.choice((PageAlloc, PageFree))(OpId(op), MAIN, op, 0, access))
            model.owned.update((access.space, access.pool, page) for page in access.ids.tolist())
        elif rng.random() < 0.1:
            count = rng.randint(1, 5)
            records.append(Lost(NO_OP, MAIN, op, count, DropReason.UNRESOLVED))
            model.totals.lost += count
        else:
            what = rng.choice(KINDS)
            accesses = _accesses(rng, what)
            records.append(_record(rng, op, what, accesses))
            model.work(what, accesses)
    model.totals.records = len(records)
    parts = rng.choice((1, 3))
    sink = Told()
    analyzer = Analyzer(sink)
    assert analyzer.totals == Totals(0, 0, 0, 0, 0, 0)
    for part in range(parts):
        fed = records[part * len(records) // parts : (part + 1) * len(records) // parts]
        assert analyzer.feed(fed) == len(fed)
    analyzer.finish()

    assert sink.checked == +model.pages
    assert sink.met == model.pairs
    assert analyzer.totals == model.totals
    assert sink.records == len(records)
    assert sink.lost == ({DropReason.UNRESOLVED: model.totals.lost} if model.totals.lost else {})


@pytest.mark.parametrize("count", [PRUNE_EVERY - 1, PRUNE_EVERY, PRUNE_EVERY + 1, 2 * PRUNE_EVERY + 1])
def test_a_long_batch_tells_of_everything_once(count: int) -> None:
    """In the middle of it and at its end; the next batch goes on from there."""
    sink = Told()
    analyzer = Analyzer(sink)
    record = Kernel(OpId(0), MAIN, 0, StreamId(0), 0, 0, 0, (0, 1), (Access(Space.DEVICE, Mode.WRITE, np.arange(3)),))
    assert analyzer.feed([record] * count) == count
    assert analyzer.feed([record]) == 1

    assert sink.checked == dict.fromkeys((Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_BACKUP_FORWARD), 3 * (count + 1))
    assert sink.met == dict.fromkeys((Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_BACKUP_FORWARD), 3 * count)
    assert analyzer.totals.records == sink.records == count + 1


def test_a_free_writes_nothing() -> None:
    """By the last of two owners either: what is read then has no earlier write."""
    for text, met in (("h+5 h+5 h-5 F:r5", 0), ("h+5 F:w5 h+5 h-5 F:r5 F:r5", 2), ("F:w5 h+5 h-5 F:r5 F:r5 F:r5", 3)):
        sink = Told()
        Analyzer(sink).feed(History(text).records)
        assert sink.met[Hazard.RAW_RESTORE_FORWARD] == met


def test_times_of_something_else_while_a_pair_waits_for_its_own() -> None:
    """Of a wait, or of an operation that was given up."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(History("F:w5 L<S L:w5").records)
    analyzer.feed(Times(OpId(op), MAIN, 0, 0, 5) for op in (1, 77))
    assert sink.findings == []
    analyzer.feed([Times(OpId(2), MAIN, 0, 0, 5)])
    assert sink.pairs == [(0, 2)]
