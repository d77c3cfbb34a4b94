"""What a finding is called and why nothing orders its pair: every combination, and random waits against a graph."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.causes import RECENT_WAITS, Causes, Reason
from hicache_obs.analyzer.foreign import Foreign
from hicache_obs.analyzer.graph import Graph
from hicache_obs.analyzer.hazards import IO_ROLE, Hazards, part, principal
from hicache_obs.analyzer.order import Order
from hicache_obs.analyzer.shadow import Conflict, Group, Label, Operation, Overlap
from hicache_obs.findings import Cause, Hazard, Proof
from hicache_obs.records import (
    ALL_LAYERS,
    Access,
    Define,
    DefineSpace,
    Direction,
    EventId,
    EventRecord,
    EventWait,
    HostAccess,
    HostSync,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    Record,
    Space,
    StreamId,
    ThreadId,
    WaitStream,
    device,
)
from hicache_obs.testing import RecordingSink

MAIN = ThreadId(0)
PAGE = np.array([5], np.int64)
ROLES = (
    "forward",
    "restore",
    "backup",
    "copy",
    "kernel",
    "host",
    "graph",
    "relocate",
    "storage",
    "device read",
    "rdma",
)
READ, WRITE = Mode.READ, Mode.WRITE
CONFLICTS = ((WRITE, WRITE), (WRITE, READ), (READ, WRITE))
"""Modes of the earlier and the later access; the first of several names the pair."""


@dataclass
class Shadow:
    """Says what was freed or moved, by space."""

    freed: tuple[Space, ...] = ()
    moved: tuple[Space, ...] = ()
    overlaps: tuple[Overlap, ...] = ()
    asked: list[int] = field(default_factory=list)

    def freed_since(self, overlap: Overlap, seq: int) -> bool:
        self.asked.append(seq)
        return overlap.space in self.freed

    def moved_since(self, overlap: Overlap, seq: int) -> bool:
        self.asked.append(seq)
        return overlap.space in self.moved

    def shared(self, group: Group, earlier: Group) -> tuple[Overlap, ...]:
        assert group.number > earlier.number
        return self.overlaps


def operation(what: str, number: int, stream: int | None = None, seq: int | None = None) -> Operation:
    label = Label(what, 0, None if stream is None else StreamId(stream), number, MAIN)
    group = Group(number, number, label, (), [], [], {}, {})
    return Operation(OpId(number), 1, number if seq is None else seq, ALL_LAYERS, 0, label, group)


def overlap(space: Space, modes: tuple[Mode, Mode], pool: int = 0, page: int = 5) -> Overlap:
    return Overlap(space, pool, *modes, np.array([page], np.int64))


def name_of(kinds: tuple[str, str], space: Space, modes: tuple[Mode, Mode], *, freed: bool, moved: bool) -> Hazard:
    """The hazard, in the words of docs/analyzer.md."""
    if moved or "relocate" in kinds:
        return Hazard.RELOCATION
    for what, hazard in (("graph", Hazard.GRAPH), ("rdma", Hazard.RDMA)):
        if what in kinds:
            return hazard
    if space is Space.HOST:
        return Hazard.STORAGE_PREFETCH if "storage" in kinds else Hazard.HOST_REUSE
    if space is Space.BUFFER:
        if freed:
            return Hazard.LIFETIME
        pinned = set(kinds) in ({"host", "restore"}, {"host", "backup"})
        return Hazard.HOST_REUSE if pinned else Hazard.METADATA_WAR
    family = {"forward": "F", "copy": "F", "restore": "L", "backup": "B", "device read": "B"}
    text = "".join(f"{family.get(kind, '?')}{mode.name[0].lower()}" for kind, mode in zip(kinds, modes, strict=True))
    return {
        "FwLw": Hazard.WAW_FORWARD_RESTORE,
        "LwFw": Hazard.WAW_FORWARD_RESTORE,
        "FrLw": Hazard.WAR_FORWARD_RESTORE,
        "LwFr": Hazard.RAW_RESTORE_FORWARD,
        "FwBr": Hazard.RAW_FORWARD_BACKUP,
        "BrFw": Hazard.WAR_BACKUP_FORWARD,
    }.get(text, Hazard.STORAGE_PREFETCH if "storage" in kinds else Hazard.OTHER)


def test_every_hazard() -> None:
    """By two roles, where they meet, how, and what became of the page in between."""
    for kinds in itertools.product(ROLES, repeat=2):
        first, second = operation(kinds[0], 1, seq=7), operation(kinds[1], 2)
        for space, modes, freed, moved in itertools.product(Space, CONFLICTS, (False, True), (False, True)):
            shadow = Shadow((space,) if freed else (), (space,) if moved else ())
            overlaps = (overlap(space, modes),)
            expected = name_of(kinds, space, modes, freed=freed, moved=moved)
            assert Hazards(shadow).of(overlaps, first, second) is expected, (kinds, space, modes)
            assert set(shadow.asked) <= {7}
            shadow = Shadow((space,) if freed else (), (space,) if moved else (), overlaps)
            fenced = Hazards(shadow).between(first, second)
            assert fenced is (expected if space is Space.DEVICE else None)


def test_one_of_several_overlaps_names_a_conflict() -> None:
    """Device pages before the rest; two writes, then a write before a read; any page that moved."""
    rank = {(space is not Space.DEVICE, at) for space in Space for at in range(len(CONFLICTS))}
    assert len(rank) == 6
    every = [overlap(space, modes) for space in Space for modes in CONFLICTS]
    for pair in itertools.permutations(every, 2):
        ranks = [(one.space is not Space.DEVICE, CONFLICTS.index((one.earlier, one.later))) for one in pair]
        if ranks[0] != ranks[1]:
            assert principal(pair) is pair[ranks.index(min(ranks))]
    both = overlap(Space.DEVICE, (WRITE, WRITE)), overlap(Space.HOST, (WRITE, READ))
    first, second = operation("forward", 1), operation("restore", 2)
    for space in Space:
        expected = Hazard.WAW_FORWARD_RESTORE if space is Space.BUFFER else Hazard.RELOCATION
        assert Hazards(Shadow(moved=(space,))).of(both, first, second) is expected
    assert Hazards(Shadow(overlaps=both[::-1])).between(first, second) is Hazard.WAW_FORWARD_RESTORE


@pytest.mark.parametrize(
    ("accesses", "expected"),
    [
        ([(Space.HOST, READ), (Space.DEVICE, WRITE)], "restore"),
        ([(Space.HOST, READ), (Space.DEVICE, WRITE), (Space.BUFFER, READ)], "restore"),  # its indices
        ([(Space.HOST, READ), (Space.DEVICE, WRITE), (Space.DEVICE, READ)], "forward"),
        ([(Space.HOST, WRITE), (Space.DEVICE, READ)], "backup"),
        ([(Space.HOST, WRITE), (Space.DEVICE, WRITE)], "forward"),
        ([(Space.DEVICE, READ), (Space.DEVICE, WRITE)], "forward"),
    ],
)
def test_kernels_that_copy(accesses: list[tuple[Space, Mode]], expected: str) -> None:
    """They are the transfers that they do the work of; another operation is what it is."""
    for what in ROLES:
        copying = operation(what, 1)
        touched = tuple(Access(space, mode, 0, PAGE) for space, mode in accesses)
        copying.group = Group(1, 1, copying.label, touched, [], [], {}, {})
        assert part(copying) == (expected if what == "forward" else what)


def test_roles_of_transfers_in_no_stream() -> None:
    assert [IO_ROLE[kind] for kind in IoKind] == [
        {"STORAGE_READ": "storage", "STORAGE_WRITE": "storage", "DEVICE_READ": "device read", "RDMA_WRITE": "rdma"}[
            kind.name
        ]
        for kind in IoKind
    ]


def test_every_cause_without_a_wait() -> None:
    """A move, a graph that a load-back does not reach, a page given back too early; else no fence at all."""
    for kinds in itertools.product(ROLES, repeat=2):
        first, second = operation(kinds[0], 1, 1), operation(kinds[1], 2, 2)
        for space, other, freed, moved in itertools.product(Space, Space, Space, (False, True)):
            shadow = Shadow((freed,), (space,) if moved else ())
            overlaps = (overlap(space, (WRITE, WRITE)), overlap(other, (READ, WRITE)))
            order = Order()
            causes = Causes(order, shadow, Hazards(shadow), Foreign())
            found = causes.of(Conflict(first, overlaps), second, order.stream(StreamId(2)), Proof.NONE)
            gone = freed in (space, other)
            if moved or kinds[0] == "relocate":  # which read a page that it moved away, or moved one away since
                expected = Cause.STALE_ADDRESS
            elif kinds == ("restore", "graph"):
                expected = Cause.GRAPH_SKIPS_WAIT
            elif gone and principal(overlaps).space is Space.BUFFER:
                expected = Cause.NO_RECORD_STREAM
            elif gone and kinds[0] in ("restore", "backup", "storage", "device read", "rdma"):
                expected = Cause.EARLY_FREE
            else:
                expected = Cause.MISSING_FENCE
            assert found == Reason(expected), (kinds, space, other, freed, moved)
            assert set(shadow.asked) <= {1}


@pytest.mark.parametrize("streams", [(1, 2), (1, 1), (None, 1), (1, None), (None, None)])
def test_every_reason_why_nobody_can_tell(streams: tuple[int | None, int | None]) -> None:
    """The earlier operation is the sixth record; a wait for a shared event or a loss counts from the seventh on."""
    first, second = operation("forward", 1, streams[0], seq=5), operation("forward", 2, streams[1], seq=9)
    for waited, lost, shared in itertools.product((None, 4, 5, 6), (None, 4, 5, 6), (False, True)):
        order, foreign, shadow = Order(), Foreign(), Shadow()
        if shared:
            foreign.learn(Define(OpId(0), MAIN, 0, DefineSpace.SHARED_POOL, 3, "kv", 0))
        if waited is not None:
            foreign.learn(Define(OpId(0), MAIN, 0, DefineSpace.SHARED_EVENT, 1, "e", 0))
            assert foreign.waits(EventId(1), waited)
        if lost is not None:
            order.lose(lost)
        causes = Causes(order, shadow, Hazards(shadow), foreign)
        conflict = Conflict(first, (overlap(Space.DEVICE, (WRITE, WRITE), pool=3),))
        found = causes.of(conflict, second, order.stream(StreamId(2)), Proof.UNKNOWN)
        if streams == (1, 1):
            expected = Cause.EARLY_START
        elif waited == 6:
            expected = Cause.SHARED_EVENT
        elif lost == 6 or not shared:
            expected = Cause.RECORDS_LOST
        else:
            expected = Cause.SHARED_MEMORY
        assert found == Reason(expected)


# -- waits -----------------------------------------------------------------------------------------------------

STREAMS = range(1, 4)


def random_waits(rng: random.Random) -> list[Record]:
    """Two accesses to a page; before the first and between the two, records, waits and other work of three streams."""
    records: list[Record] = []
    before, between = rng.randint(0, 3), rng.randint(0, 6)
    for op in range(before + between + 2):
        head = OpId(op), MAIN, 10 * op
        on, waiter = (StreamId(rng.choice((usual, usual, *STREAMS))) for usual in (1, 2))
        kind = rng.random()
        if op in (before, before + between + 1):
            if kind < 0.15:
                records.append(HostAccess(*head, 0, (0, 1), (device(WRITE, PAGE),)))
            else:
                stream = on if op == before else waiter
                records.append(Kernel(*head, stream, 0, op, 0, (0, 1), (device(WRITE, PAGE),)))
        elif kind < 0.15:
            stream = StreamId(rng.choice(STREAMS))
            records.append(Kernel(*head, stream, 0, op, 0, (0, 1), (device(WRITE, np.array([100 + op])),)))
        elif kind < 0.5:
            records.append(EventRecord(*head, EventId(rng.choice((0, 0, 0, 1))), on))
        elif kind < 0.8:
            records.append(EventWait(*head, EventId(rng.choice((0, 0, 0, 1))), waiter))
        elif kind < 0.9 and waiter != on:
            records.append(WaitStream(*head, waiter, on))
        else:
            records.append(HostSync(*head, rng.choice((on, waiter))))
    return records


@dataclass
class Waited:
    """A wait: who waits, the stream it concerns, the item that marks what is waited for and the one before that."""

    op: int
    waiter: StreamId | None
    stream: StreamId
    on: StreamId | None
    marker: int | None
    former: int | None


def waits_of(records: list[Record], graph: Graph) -> list[Waited]:
    markers = {item.op: item.index for item in graph.items if item.verb == "is recorded"}
    events: dict[EventId, list[EventRecord]] = {}
    tails: dict[StreamId, int] = {}
    found = []
    for record in records:
        if isinstance(record, EventRecord):
            events.setdefault(record.event, []).append(record)
        elif isinstance(record, EventWait):
            known = events.get(record.event, [])
            marker, former = (markers[known[-back].op] if len(known) >= back else None for back in (1, 2))
            on = known[-1].stream if known else None
            found.append(Waited(record.op, record.stream, record.stream, on, marker, former))
        elif isinstance(record, WaitStream):
            found.append(Waited(record.op, record.waiter, record.waiter, record.on, markers[record.op], None))
        elif isinstance(record, HostSync):
            assert record.stream is not None
            found.append(Waited(record.op, None, record.stream, record.stream, tails.get(record.stream, -1), None))
        tails |= {StreamId(item.lane[1]): item.index for item in graph.items if item.op == record.op and _queued(item)}
    return found


def _queued(item: Any) -> bool:
    return item.lane[0] == "stream"


def why(records: list[Record], graph: Graph, waits: list[Waited], pair: tuple[OpId, OpId]) -> tuple[Cause, int | None]:
    """The cause by the definition of each, newest wait first."""
    (earlier,), (later,) = graph.of(pair[0]), graph.of(pair[1])
    waiter = StreamId(later.lane[1]) if later.lane[0] == "stream" else None
    runs = StreamId(earlier.lane[1]) if earlier.lane[0] == "stream" else None

    def covered(marker: int | None) -> bool:
        return marker is not None and marker >= 0 and earlier.index in graph.needs(marker)

    cause = Cause.MISSING_FENCE
    for wait in reversed([wait for wait in waits if pair[0] < wait.op < pair[1]]):
        mine = wait.waiter == waiter
        if wait.marker is None:
            cause = Cause.EVENT_UNRECORDED if mine else cause
            continue
        if mine and not covered(wait.marker) and covered(wait.former):
            return Cause.EVENT_REUSE, None
        if waiter is None and mine and not covered(wait.marker) and wait.on != runs:
            return Cause.WRONG_STREAM, wait.stream
        since = [item for item in graph.items if wait.op < item.op < pair[1] and item.verb in ("runs", "is recorded")]
        idle = not any(item.lane == ("stream", wait.waiter, 0) for item in since)
        if not mine and covered(wait.marker) and wait.waiter is not None and idle:
            return Cause.WRONG_STREAM, wait.stream
        if mine and not covered(wait.marker) and wait.on == runs:
            cause = Cause.EARLY_EVENT
    return cause, None


@pytest.mark.parametrize("part", range(4))
def test_waits_that_do_not_help(part: int) -> None:
    """The newest one that was meant to order the two is named."""
    seen = dict.fromkeys(Cause, 0)
    for seed in range(part, 1600, 4):
        records = random_waits(random.Random(seed))
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed(records)
        analyzer.finish()
        graph = Graph(records)
        waits = waits_of(records, graph)
        for finding in sink.findings:
            pair = finding.earlier.op, finding.later.op
            cause, stream = why(records, graph, waits, pair)
            assert finding.cause is cause, f"seed {seed}: {pair}"
            assert finding.wrong_waiter == (None if stream is None else f"stream {stream}"), f"seed {seed}: {pair}"
            seen[cause] += 1
    named = (Cause.MISSING_FENCE, Cause.WRONG_STREAM, Cause.EARLY_EVENT, Cause.EVENT_REUSE, Cause.EVENT_UNRECORDED)
    assert min(seen[cause] for cause in named) > 0, seen


def test_waits_long_ago_are_forgotten() -> None:
    """So many newer ones are looked at, and no more."""
    for others, cause in ((RECENT_WAITS - 1, Cause.EVENT_UNRECORDED), (RECENT_WAITS, Cause.MISSING_FENCE)):
        work = [Kernel(OpId(op), MAIN, 0, StreamId(op), 0, op, 0, (0, 1), (device(WRITE, PAGE),)) for op in (1, 2)]
        wait = EventWait(OpId(3), MAIN, 0, EventId(1), StreamId(2))
        noise = [EventWait(OpId(4), MAIN, 0, EventId(1), StreamId(3))] * others
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed([work[0], wait, *noise, work[1]])
        analyzer.finish()
        assert [finding.cause for finding in sink.findings] == [cause]


@pytest.mark.parametrize(
    ("direction", "hazard"),
    [
        (Direction.DEVICE_TO_HOST, Hazard.RAW_FORWARD_BACKUP),
        (Direction.HOST_TO_DEVICE, Hazard.WAW_FORWARD_RESTORE),
    ],
)
def test_copies_of_one_site_keep_their_own_roles(direction: Direction, hazard: Hazard) -> None:
    """A copy behind one of the other direction, in one group: what it is called is its own."""
    other = {Direction.DEVICE_TO_HOST: Direction.HOST_TO_DEVICE}.get(direction, Direction.DEVICE_TO_HOST)
    other_page = np.array([6], np.int64)
    forward = Kernel(OpId(1), MAIN, 0, StreamId(1), 0, 1, 0, (0, 1), (device(WRITE, PAGE),))

    def copy(op: int, towards: Direction, pages: Any) -> Memcpy:
        mode = WRITE if towards is Direction.HOST_TO_DEVICE else READ
        return Memcpy(OpId(op), MAIN, 0, StreamId(2), 1, 2, 0, (0, 1), (device(mode, pages),), towards)

    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed([forward, copy(2, other, other_page), copy(3, direction, PAGE)])
    analyzer.finish()
    assert [(finding.hazard, finding.later.op) for finding in sink.findings] == [(hazard, OpId(3))]


def test_what_goes_on_with_the_same_pages_has_its_own_name() -> None:
    """Layers of one thing share a label; what another site, round, thread or kind of call does has one of its own."""
    write = (device(WRITE, PAGE),)
    other = ThreadId(1)
    alike = [  # thread, site, group, kind of each: the second of a pair differs in one
        ((MAIN, 1, 7, Kernel), (MAIN, 2, 7, Kernel)),
        ((MAIN, 1, 7, Kernel), (MAIN, 1, 8, Kernel)),
        ((MAIN, 1, 7, Kernel), (other, 1, 7, Kernel)),
        ((MAIN, 1, 7, Kernel), (MAIN, 1, 7, Memcpy)),
        ((MAIN, 1, 7, Kernel), (MAIN, 1, 7, Kernel)),
    ]
    for pair in alike:
        records: list[Any] = [
            Define(OpId(-1), MAIN, 0, DefineSpace.SITE, 1, "first"),
            Define(OpId(-1), MAIN, 0, DefineSpace.SITE, 2, "second"),
        ]
        for op, (thread, site, group, kind) in enumerate(pair):
            records.append(kind(OpId(op), thread, op, StreamId(1), site, group, 8, (op, op + 1), write))
        records.append(Memcpy(OpId(2), MAIN, 2, StreamId(2), 3, 9, 8, ALL_LAYERS, write))
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed(records)
        analyzer.finish()
        found = [finding.earlier for finding in sink.findings]
        roles = {Kernel: "forward", Memcpy: "restore"}
        assert [(side.op, side.thread, side.site, side.group, side.what) for side in found] == [
            (op, thread, ("", "first", "second")[site], group, roles[kind])
            for op, (thread, site, group, kind) in enumerate(pair)
        ]
