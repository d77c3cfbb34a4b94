"""Blast radii of random timed traces against a second implementation, which follows every page and layer on its own.

The rules are those of ``hicache_obs.analyzer.taint``; what is compared is whether arrays, marks, stamps and bounds
amount to them.
"""

from __future__ import annotations

import os
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.findings import BlastRadius
from hicache_obs.records import (
    Access,
    Direction,
    HostAccess,
    IoBegin,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageIds,
    Record,
    Relocate,
    RowsDiscarded,
    Space,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
    pack_rows,
)
from hicache_obs.testing import RecordingSink

PROGRAMS = int(os.environ.get("HICACHE_OBS_FUZZ", "2000")) // 4
PARTS = 4
MAIN = ThreadId(0)
PAGES, LAYERS = 6, 3
Page = tuple[Space, int, int]
Rows = list[tuple[int, list[int], int, int]]
"""Per row: request, pages, how many are read, how many are written."""


Work = Kernel | Memcpy | Relocate | IoBegin | HostAccess
Source = tuple[int, int]
"""A race: the runs that its two operations belong to."""


@dataclass(eq=False)
class Op:
    """An operation: its record, what kind it is, and when it ran, where that is measured.

    Layers of the same pages, copied or computed one after the other, are one *run*.
    """

    record: Work
    what: str
    number: int
    run: int
    seq: int
    rows: Rows | None = None
    start_ns: int = -1
    end_ns: int = -1

    @property
    def layers(self) -> set[int]:
        return set(range(*self.record.layers))


@dataclass
class Program:
    """A random trace, its operations, and who owns what when."""

    records: list[Record] = field(default_factory=list)
    ops: list[Op] = field(default_factory=list)
    allocations: list[tuple[int, Page]] = field(default_factory=list)
    discarded: dict[int, set[int]] = field(default_factory=lambda: defaultdict(set))

    def owner(self, page: Page, seq: int) -> int:
        """Position of the last allocation of a page before ``seq``."""
        return max((at for at, mine in self.allocations if mine == page and at < seq), default=-1)


def _ids(rng: random.Random, count: int) -> PageIds:
    return np.array(rng.sample(range(PAGES), count), np.int64)


def _rows(rng: random.Random) -> tuple[Rows, tuple[Access, ...]]:
    """Rows of a round, and what they touch together."""
    rows: Rows = []
    for request in rng.sample(range(4), rng.randint(1, 2)):
        pages = rng.sample(range(PAGES), rng.randint(1, 3))
        rows.append((request, pages, rng.randint(0, len(pages)), rng.randint(0, len(pages))))
    read = sorted({page for _, pages, reads, _ in rows for page in pages[:reads]})
    written = sorted({page for _, pages, _, writes in rows for page in pages[len(pages) - writes :]})
    sides = ((Mode.READ, read), (Mode.WRITE, written))
    return rows, tuple(Access(Space.DEVICE, mode, np.array(ids, np.int64)) for mode, ids in sides)


def _copied(rng: random.Random, source: Space, target: Space) -> tuple[Access, ...]:
    """What a copy touches: as many pages as it writes, most often; an index buffer sometimes."""
    count = rng.randint(1, 3)
    other = count if rng.random() < 0.8 else rng.randint(1, 3)
    accesses = [Access(source, Mode.READ, _ids(rng, count)), Access(target, Mode.WRITE, _ids(rng, other))]
    if rng.random() < 0.2:
        accesses.insert(0, Access(Space.BUFFER, Mode.READ, np.array([rng.randrange(2)], np.int64)))
    return tuple(accesses)


class _Writer:
    """Adds random operations to a program. One every 10 ns; each starts some time after those that it follows."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.program = Program()
        self.ends: dict[int, int] = defaultdict(int)
        """By stream, when all that its next operation follows is over."""
        self.runs = 0

    def step(self) -> None:
        """An operation over all layers or layer by layer, or something else that the host does."""
        rng, program = self.rng, self.program
        kind = rng.random()
        head = OpId(len(program.records)), MAIN, 10 * len(program.records)
        if kind < 0.12:
            access = Access(rng.choice((Space.DEVICE, Space.DEVICE, Space.HOST)), Mode.WRITE, _ids(rng, 2))
            program.allocations += [(head[0], (access.space, 0, page)) for page in access.ids.tolist()]
            program.records.append(PageAlloc(*head, 0, access))
        elif kind < 0.2:
            waiter, on = rng.sample(range(3), 2)
            program.records.append(WaitStream(*head, StreamId(waiter), StreamId(on)))
            self.ends[waiter] = max(self.ends[waiter], self.ends[on])
        elif kind < 0.25:
            number, requests = 100 + rng.randint(max(0, self.runs - 3), self.runs), rng.sample(range(4), 2)
            program.discarded[number].update(requests)
            program.records.append(RowsDiscarded(*head, number, np.array(requests, np.int64)))
        else:
            self.runs += 1
            self.work(
                rng.choice((*("forward",) * 4, "restore", "restore", "backup", "copy", "relocate", "storage", "host"))
            )

    def work(self, what: str) -> None:
        rng = self.rng
        rows: Rows | None = None
        if what == "forward":
            rows, accesses = _rows(rng)
            if rng.random() < 0.15:
                accesses = (*accesses, Access(Space.BUFFER, rng.choice(tuple(Mode)), np.array([rng.randrange(2)])))
            if rng.random() < 0.15:
                rows = None
        elif what == "host":
            accesses = (Access(Space.HOST, rng.choice(tuple(Mode)), _ids(rng, 2)),)
        else:
            spaces = {"restore": (Space.HOST, Space.DEVICE), "backup": (Space.DEVICE, Space.HOST)}
            accesses = _copied(rng, *spaces.get(what, rng.choice(((Space.DEVICE,) * 2, (Space.HOST,) * 2))))
        packed = None if rows is None else _packed(rows)
        stream = rng.randrange(3)
        number = 50 + rng.randrange(6)
        if what == "forward":
            number = 100 + self.runs if self.runs > 1 else 0  # a round of its own, some with number 0
        whole = rng.random() < 0.5 or what == "storage"
        for layers in [(0, LAYERS)] if whole else [(layer, layer + 1) for layer in range(LAYERS)]:
            op = OpId(len(self.program.records))
            head = op, MAIN, 10 * op
            fields = (*head, StreamId(stream), 0, number, 0, layers, accesses)
            if what == "forward":
                self.add(Kernel(*fields, packed), what, number, stream, rows)
            elif what == "relocate":
                self.add(Relocate(*head, StreamId(stream), 0, layers, accesses), what, 0, stream)
            elif what == "storage":
                self.add(IoBegin(*head, op, IoKind.STORAGE_READ, 0, layers, accesses), what, op)
            elif what == "host":
                self.add(HostAccess(*head, 0, layers, accesses), what, 0)
            else:
                names = {"restore": Direction.HOST_TO_DEVICE, "backup": Direction.DEVICE_TO_HOST}
                self.add(Memcpy(*fields, names.get(what, Direction.DEVICE_TO_DEVICE)), what, number, stream)

    def add(self, record: Work, what: str, number: int, stream: int | None = None, rows: Rows | None = None) -> None:
        op = Op(record, what, number, self.runs, record.op, rows, start_ns=record.host_ns)
        if stream is not None:
            op.start_ns = max(record.host_ns, self.ends[stream]) + self.rng.choice((0, 10, 30))
            op.end_ns = self.ends[stream] = op.start_ns + self.rng.choice((5, 20, 60))
        self.program.records.append(record)
        self.program.ops.append(op)


def _packed(rows: Rows) -> PageIds:
    requests, pages, reads, writes = zip(*rows, strict=True)
    return pack_rows(requests, [np.array(ids, np.int64) for ids in pages], reads, writes)


def random_program(seed: int) -> Program:
    writer = _Writer(random.Random(seed))
    for _ in range(writer.rng.randint(4, 16)):
        writer.step()
    return writer.program


@dataclass
class Model:
    """What every page holds, layer by layer, while a program runs; sources are pairs of runs."""

    program: Program
    wrong: dict[Page, tuple[int, dict[int, set[Source]]]] = field(default_factory=dict)
    """By page: whose contents these should be, and by layer what spoiled them."""
    ever: dict[Source, set[Page]] = field(default_factory=lambda: defaultdict(set))
    reached: dict[tuple[str, int], set[Source]] = field(default_factory=lambda: defaultdict(set))
    """By what (a request, round, transfer or I/O) and number."""
    rows: dict[tuple[int, int], set[Source]] = field(default_factory=lambda: defaultdict(set))
    vague: set[Source] = field(default_factory=set)

    def taint(self, page: Page, layers: set[int], sources: set[Source], seq: int) -> None:
        if not sources or not layers:
            return
        owner = self.program.owner(page, seq)
        stamp, held = self.wrong.get(page, (owner, {}))
        for source in sources:
            self.ever[source].add(page)
        if held and stamp > owner:
            return
        if stamp != owner:
            held = {}
        for layer in layers:
            held[layer] = held.get(layer, set()) | sources
        self.wrong[page] = owner, held

    def held(self, page: Page, seq: int) -> dict[int, set[Source]]:
        """What is wrong with a page for its owner at ``seq``, by layer."""
        stamp, held = self.wrong.get(page, (-1, {}))
        return held if stamp == self.program.owner(page, seq) else {}

    def run(self, op: Op, misread: Sequence[tuple[Page, set[int], Source]]) -> None:
        reads: dict[tuple[int, Page], dict[int, set[Source]]] = {}
        for index, page in _touched(op, Mode.READ):
            found = {layer: set(sources) for layer, sources in self.held(page, op.seq).items() if layer in op.layers}
            for other, layers, source in misread:
                for layer in layers & op.layers if other == page else ():
                    found.setdefault(layer, set()).add(source)
            if found:
                reads[index, page] = found
        everything = set().union(*(sources for found in reads.values() for sources in found.values()))
        if op.what == "forward":
            self.round(op, reads, everything)
        elif op.what in ("host", "kernel"):
            self.all(op, everything)
        else:
            self.copy(op, reads, everything)

    def all(self, op: Op, sources: set[Source]) -> None:
        self.vague |= sources
        for _, page in _touched(op, Mode.WRITE):
            self.taint(page, set(range(LAYERS)), sources, op.seq)

    def copy(self, op: Op, reads: dict[tuple[int, Page], dict[int, set[Source]]], everything: set[Source]) -> None:
        if op.what != "relocate":
            self.reached["io" if op.what == "storage" else "transfer", op.number] |= everything
        accesses = op.record.accesses
        (target,) = (access for access in accesses if access.mode is Mode.WRITE)
        source = next(a for a in accesses if a.mode is Mode.READ and a.space is not Space.BUFFER)
        for page in _pages(target):
            for layer in op.layers & set(self.held(page, op.seq)):
                del self.wrong[page][1][layer]
        for (index, page), found in reads.items():
            if accesses[index].space is Space.BUFFER or len(source.ids) != len(target.ids):
                sources = set().union(*found.values())
                self.vague |= sources
                for other in _pages(target):
                    if accesses[index].space is Space.BUFFER:
                        self.taint(other, op.layers, sources, op.seq)
                    else:
                        for layer, bits in found.items():
                            self.taint(other, {layer}, bits, op.seq)
            else:
                other = _pages(target)[source.ids.tolist().index(page[2])]
                for layer, bits in found.items():
                    self.taint(other, {layer}, bits, op.seq)

    def round(self, op: Op, reads: dict[tuple[int, Page], dict[int, set[Source]]], everything: set[Source]) -> None:
        if op.rows is None or any(page[0] is not Space.DEVICE for _, page in reads):
            sources = everything | (self.reached["round", op.number] if op.number else set())
            if not sources:
                return
            self.all(op, sources)
            self.reached["round", op.number] |= sources
            for row in range(len(op.rows or ())):
                self.note_row(op, row, sources)
            return
        wrong: dict[int, set[Source]] = {}
        for row, (_, pages, count, _) in enumerate(op.rows):
            sources = set(self.rows[op.number, row])
            for (_, page), found in reads.items():
                if page[2] in pages[:count]:
                    sources = sources.union(*found.values())
            if sources:
                wrong[row] = sources
        for row, sources in wrong.items():
            self.reached["round", op.number] |= sources
            self.note_row(op, row, sources)
            _, pages, _, writes = op.rows[row]
            for number in pages[len(pages) - writes :]:
                self.taint((Space.DEVICE, 0, number), set(range(LAYERS)), sources, op.seq)
        for _, page in _touched(op, Mode.WRITE):
            if page[0] is not Space.DEVICE and wrong:
                self.vague |= set().union(*wrong.values())
                self.taint(page, set(range(LAYERS)), set().union(*wrong.values()), op.seq)

    def note_row(self, op: Op, row: int, sources: set[Source]) -> None:
        assert op.rows is not None
        self.rows[op.number, row] |= sources
        request = op.rows[row][0]
        if request not in self.program.discarded[op.number]:
            self.reached["request", request] |= sources

    def radius(self, source: Source, *, exact: bool) -> BlastRadius:
        def members(what: str) -> tuple[int, ...]:
            return tuple(sorted(n for (kind, n), sources in self.reached.items() if kind == what and source in sources))

        pages = sorted(self.ever[source])
        return BlastRadius(
            requests=members("request"),
            rounds=members("round"),
            transfers=members("transfer"),
            ios=members("io"),
            device_pages=tuple((pool, page) for space, pool, page in pages if space is Space.DEVICE),
            host_pages=tuple((pool, page) for space, pool, page in pages if space is Space.HOST),
            complete=True,
            exact=exact and source not in self.vague,
        )


def _pages(access: Access) -> list[Page]:
    return [(access.space, access.pool, page) for page in access.ids.tolist()]


def _touched(op: Op, mode: Mode) -> Iterator[tuple[int, Page]]:
    """Pages that an operation touches in one way, with the number of the access."""
    for index, access in enumerate(op.record.accesses):
        if access.mode is mode:
            yield from ((index, page) for page in _pages(access))


def play(program: Program, pairs: Sequence[tuple[Op, Op]], *, timed: bool) -> Model:
    """Run a program in the order in which its operations started, or were issued, with the races ``pairs``."""
    model = Model(program)
    misread: dict[Op, list[tuple[Page, set[int], Source]]] = defaultdict(list)
    after: dict[Op, list[tuple[Page, set[int], Source, int]]] = defaultdict(list)

    def order(op: Op) -> tuple[int, int]:
        return (op.start_ns if timed else op.seq), op.seq

    for first, second in pairs:
        source, layers = (first.run, second.run), first.layers & second.layers
        measured = timed and first.end_ns >= 0 and second.end_ns >= 0
        if measured and second.start_ns >= first.end_ns:
            continue
        backwards = measured and second.end_ns <= first.start_ns
        shared = [
            (page, one, other)
            for one in Mode
            for other in Mode
            for page in {page for _, page in _touched(first, one)} & {page for _, page in _touched(second, other)}
            if Mode.WRITE in (one, other)
        ]
        for page, one, other in shared:
            if not backwards:
                model.vague.add(source)
            if one is Mode.READ:
                misread[first].append((page, layers, source))
            elif other is Mode.WRITE:
                last = first if backwards else max(first, second, key=order)
                after[last].append((page, layers, source, second.seq))
            elif backwards:
                if program.owner(page, first.seq) == program.owner(page, second.seq):
                    left = layers - _overwritten(program, page, first, second)
                    misread[second].append((page, left, source))
            else:
                misread[second].append((page, layers, source))
    for op in sorted(program.ops, key=order):
        model.run(op, misread[op])
        for page, layers, source, seq in after[op]:
            model.taint(page, layers, {source}, seq)
    return model


def _overwritten(program: Program, page: Page, first: Op, second: Op) -> set[int]:
    """Layers of a page that copies issued between the two have written."""
    between = (
        op for op in program.ops if first.seq < op.seq < second.seq and op.what not in ("forward", "host", "kernel")
    )
    return set().union(*(op.layers for op in between if page in {other for _, other in _touched(op, Mode.WRITE)}))


def radii(program: Program, *, timed: bool) -> tuple[list[tuple[Op, Op]], list[BlastRadius]]:
    """The races that the analyzer finds, and what it says of each."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    ops = {op.seq: op for op in program.ops}
    for seq, record in enumerate(program.records):
        analyzer.feed([record])
        if timed and seq in ops and ops[seq].end_ns >= 0:
            analyzer.feed([Times(record.op, MAIN, 0, ops[seq].start_ns, ops[seq].end_ns)])
    analyzer.finish()
    pairs = sorted(set(sink.pairs))
    return [(ops[a], ops[b]) for a, b in pairs], [analyzer.blast_radius(pair) for pair in pairs]


@pytest.mark.parametrize("timed", [False, True], ids=["untimed", "timed"])
@pytest.mark.parametrize("part", range(PARTS))
def test_agrees_with_a_second_implementation(part: int, timed: bool) -> None:
    """Every member of every radius, and whether it is exact."""
    exact = reached = 0
    for seed in range(part, PROGRAMS, PARTS):
        program = random_program(seed)
        pairs, found = radii(program, timed=timed)
        model = play(program, pairs, timed=timed)
        for (first, second), radius in zip(pairs, found, strict=True):
            expected = model.radius((first.run, second.run), exact=timed)
            assert radius == expected, f"seed {seed}: {first.seq} and {second.seq}"
            exact += radius.exact
            reached += len(radius.requests)
    assert reached > PROGRAMS / PARTS
    assert (exact > PROGRAMS / PARTS) == timed


def _members(radius: BlastRadius) -> set[tuple[str, object]]:
    parts = ("requests", "rounds", "transfers", "ios", "device_pages", "host_pages")
    return {(part, member) for part in parts for member in getattr(radius, part)}


@pytest.mark.parametrize("window", [6, 12])
def test_what_is_forgotten(window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that are forgotten make a radius larger, or incomplete, and it says so."""
    monkeypatch.setattr("hicache_obs.analyzer.taint.MAX_RECENT", window)
    counts = {"exact": 0, "complete": 0, "cut": 0}
    for seed in range(PROGRAMS // 2):
        program = random_program(seed)
        pairs, found = radii(program, timed=True)
        truth = play(program, pairs, timed=True)
        for (first, second), radius in zip(pairs, found, strict=True):
            expected = truth.radius((first.run, second.run), exact=True)
            where = f"seed {seed}: {first.seq} and {second.seq}"
            if radius.exact:
                assert radius == expected, where
                counts["exact"] += 1
            elif radius.complete:
                assert _members(radius) >= _members(expected), where
                counts["complete"] += 1
            else:
                counts["cut"] += 1
    assert counts["exact"] > PROGRAMS / 4
    assert counts["cut"] > 0


def test_what_is_not_measured() -> None:
    """Without times, all that any times can have spoiled is in the radius of some race."""
    larger = 0
    for seed in range(PROGRAMS // 2):
        program = random_program(seed)
        pairs, found = radii(program, timed=False)
        truth = play(program, pairs, timed=True)
        expected = [_members(truth.radius((first.run, second.run), exact=True)) for first, second in pairs]
        named, wrong = (set().union(*parts) for parts in (map(_members, found), expected))
        assert named >= wrong, f"seed {seed}"
        larger += named > wrong
    assert larger > PROGRAMS / 8
