"""Fence and transfer costs of random timed rounds against the definitions of ``hicache_obs.costs``, worked out anew."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import FenceCost, TransferCost, TransferKind
from hicache_obs.findings import Hazard
from hicache_obs.records import (
    Access,
    Define,
    DefineSpace,
    Direction,
    EventId,
    EventRecord,
    EventWait,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    Purpose,
    Record,
    Space,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
)
from hicache_obs.testing import RecordingSink

MAIN = ThreadId(0)
FORWARD, LOAD, WRITE = StreamId(0), StreamId(1), StreamId(2)
LAYERS = 3
HAZARDS = {
    ("forward", Mode.WRITE, "restore", Mode.WRITE): Hazard.WAW_FORWARD_RESTORE,
    ("forward", Mode.READ, "restore", Mode.WRITE): Hazard.WAR_FORWARD_RESTORE,
    ("forward", Mode.WRITE, "backup", Mode.READ): Hazard.RAW_FORWARD_BACKUP,
    ("backup", Mode.READ, "restore", Mode.WRITE): Hazard.OTHER,
    ("restore", Mode.WRITE, "backup", Mode.READ): Hazard.OTHER,
}
"""What orders a transfer behind an operation, by what the two do to a device page; the first is what names a pair."""


@dataclass(eq=False)
class Timed:
    """A wait or an operation: when it was issued and ran, and for a wait when the record that it waits for was over."""

    op: OpId
    issued_ns: int
    start_ns: int
    end_ns: int
    what: str = "wait"
    purpose: Purpose = Purpose.PLAIN
    released_ns: int = 0


@dataclass(eq=False)
class Group:
    """Operations on the same pages, with what they touch."""

    what: str
    stream: StreamId
    accesses: tuple[Access, ...]
    waits: list[Timed] = field(default_factory=list)
    ops: list[Timed] = field(default_factory=list)


class Machine:
    """Issues random work, and says when it runs."""

    def __init__(self, rng: random.Random, depths: tuple[int, ...]) -> None:
        self.rng = rng
        self.depths = depths
        self.records: list[Record] = []
        self.items: list[Timed] = []
        self.tail: dict[StreamId, Timed | None] = dict.fromkeys((FORWARD, LOAD, WRITE))
        self.waits: dict[StreamId, list[Timed]] = {stream: [] for stream in self.tail}
        self.groups: list[Group] = []
        self.events: dict[EventId, int] = {}

    def head(self) -> tuple[OpId, ThreadId, int]:
        op = len(self.records)
        return OpId(op), MAIN, 100 * op

    def completed(self, stream: StreamId, issued_ns: int) -> int:
        """When a record that is made on the stream now is over."""
        tail = self.tail[stream]
        return issued_ns if tail is None else max(issued_ns, tail.end_ns)

    def wait(self, waiter: StreamId, on: StreamId, purpose: Purpose) -> None:
        """``waiter`` follows ``on``, directly or by an event."""
        if self.rng.random() < 0.5:
            head = self.head()
            released = self.completed(on, head[2])
            self.records.append(WaitStream(*head, waiter, on, purpose))
        else:
            event = EventId(len(self.events))
            head = self.head()
            self.events[event] = released = self.completed(on, head[2])
            self.records.append(EventRecord(*head, event, on))
            head = self.head()
            self.records.append(EventWait(*head, event, waiter, purpose))
        start = self.completed(waiter, head[2])
        item = Timed(head[0], head[2], start, max(start, released), "wait", purpose, released)
        self.items.append(item)
        self.tail[waiter] = item
        if purpose is not Purpose.LAYER:
            self.waits[waiter].append(item)

    def work(self, what: str, stream: StreamId, accesses: tuple[Access, ...], layers: int, number: int) -> None:
        """One round, or one transfer layer by layer."""
        group = Group(what, stream, accesses, self.waits[stream][-16:])
        self.waits[stream] = []
        self.groups.append(group)
        for layer in range(layers):
            head = self.head()
            fields = (*head, stream, 0, number, 10, (layer, layer + 1), accesses)
            start = self.completed(stream, head[2]) + self.rng.choice((0, 0, 70))
            item = Timed(head[0], head[2], start, start + self.rng.choice((20, 150, 900)), what)
            self.items.append(item)
            self.tail[stream] = item
            group.ops.append(item)
            if what == "forward":
                self.records.append(Kernel(*fields))
            else:
                way = Direction.HOST_TO_DEVICE if what == "restore" else Direction.DEVICE_TO_HOST
                self.records.append(Memcpy(*fields, way))

    def step(self, number: int) -> None:
        rng = self.rng
        pages, others = (np.array(rng.sample(range(6), rng.randint(1, 3)), np.int64) for _ in range(2))
        kind = rng.choice(("forward", "forward", "restore", "backup"))
        if kind == "forward":
            if rng.random() < 0.3:
                self.wait(FORWARD, LOAD, rng.choice((Purpose.LAYER, Purpose.PLAIN)))
            accesses = (Access(Space.DEVICE, Mode.READ, others), Access(Space.DEVICE, Mode.WRITE, pages))
            self.work(kind, FORWARD, accesses, 1, number)
            return
        stream, fence = (LOAD, Purpose.LOAD_FENCE) if kind == "restore" else (WRITE, Purpose.WRITE_FENCE)
        for _ in range(rng.choice((0, 1, 1, 2))):
            on = rng.choice([other for other in self.tail if other != stream])
            self.wait(stream, on, rng.choice((fence, fence, Purpose.PLAIN)))
        device = Access(Space.DEVICE, Mode.WRITE if kind == "restore" else Mode.READ, pages)
        host = Access(Space.HOST, Mode.READ if kind == "restore" else Mode.WRITE, pages)
        self.work(kind, stream, (device, host), rng.choice(self.depths), number)


def _shared(first: Group, second: Group) -> list[tuple[Mode, Mode]]:
    """How two groups conflict on device pages."""
    return [
        (one.mode, other.mode)
        for one in first.accesses
        for other in second.accesses
        if one.space is other.space is Space.DEVICE
        and Mode.WRITE in (one.mode, other.mode)
        and set(one.ids.tolist()) & set(other.ids.tolist())
    ]


def _last(machine: Machine, group: Group) -> list[Group]:
    """Groups of other streams that were the last to write, or to touch, a page that the group reads, or writes."""
    earlier = machine.groups[: machine.groups.index(group)]
    found = []
    for access in group.accesses:
        for page in access.ids.tolist():
            touched = [
                before
                for before in earlier
                for other in before.accesses
                if other.space is access.space and page in other.ids.tolist()
                if Mode.WRITE in ((other.mode,) if access.mode is Mode.READ else (Mode.WRITE,))
            ]
            if touched and touched[-1].stream != group.stream:
                found.append(touched[-1])
    return found


def _fences(machine: Machine, group: Group) -> list[FenceCost]:
    first, kind = group.ops[0], TransferKind(group.what)
    needed_ns, hazard = 0, None
    for before in sorted(set(_last(machine, group)), key=machine.groups.index):
        for op in before.ops:
            if op.op < first.op and op.end_ns > needed_ns and (shared := _shared(before, group)):
                both = max(shared, key=lambda modes: (modes == (Mode.WRITE, Mode.WRITE), modes[0] is Mode.WRITE))
                needed_ns, hazard = op.end_ns, HAZARDS[before.what, both[0], group.what, both[1]]
    costs = []
    for fence in group.waits:
        if fence.purpose is Purpose.PLAIN:
            continue
        waited = max(0, fence.end_ns - max(fence.start_ns, first.issued_ns))
        others = [wait.released_ns for wait in group.waits if wait is not fence]
        without = max(fence.start_ns, first.issued_ns, needed_ns, *others)
        avoidable = min(waited, max(0, first.start_ns - without))
        over = needed_ns <= min(fence.issued_ns, fence.start_ns)  # it needed no fence any more
        needed = {} if hazard is None or over or waited == avoidable else {hazard: waited - avoidable}
        costs.append(FenceCost(fence.op, kind, waited, avoidable, needed, needed_ns > fence.issued_ns))
    return costs


def _transfer(group: Group, number: int, *, ordered: bool) -> TransferCost:
    first, last = group.ops[0], group.ops[-1]
    submitted = min(first.issued_ns, *(wait.issued_ns for wait in group.waits), first.issued_ns)
    return TransferCost(
        kind=TransferKind(group.what),
        transfer=number,
        copy_ns=last.end_ns - first.start_ns,
        op_ns=last.end_ns - submitted,
        size_bytes=10 * len(group.ops),
        pages=len(group.accesses[0].ids),
        fenced=ordered or any(wait.purpose is not Purpose.PLAIN for wait in group.waits),
    )


@pytest.mark.parametrize("declared", [False, True], ids=["by the end", "by layers"])
@pytest.mark.parametrize("part", range(3))
def test_agrees_with_the_definitions(part: int, declared: bool) -> None:
    """Every fence and every transfer, when it is known to be complete, and at the end of the trace."""
    in_flight = avoided = needed = 0
    for seed in range(part, 300, 3):
        machine = Machine(random.Random(seed), (LAYERS,) if declared else (1, LAYERS))
        steps = machine.rng.randint(2, 12)
        for number in range(steps):
            machine.step(number)
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        if declared:
            analyzer.feed([Define(OpId(-1), MAIN, 0, DefineSpace.POOL, 0, "kv", LAYERS)])
        analyzer.feed(machine.records)
        analyzer.feed(Times(item.op, MAIN, 0, item.start_ns, item.end_ns) for item in machine.items)
        assert bool(sink.transfers) == (declared and any(group.what != "forward" for group in machine.groups))
        analyzer.finish()

        racing = {later for _, later in sink.pairs}
        transfers = [(n, group) for n, group in enumerate(machine.groups) if group.what != "forward"]
        where = f"seed {seed}"
        assert sink.fences == [cost for _, group in transfers for cost in _fences(machine, group)], where
        assert sink.transfers == [
            _transfer(group, number, ordered=not racing & {op.op for op in group.ops}) for number, group in transfers
        ], where
        assert sink.layer_waits_ns == [
            item.end_ns - item.start_ns for item in machine.items if item.purpose is Purpose.LAYER
        ], where
        in_flight += sum(cost.in_flight for cost in sink.fences)
        avoided += sum(cost.avoidable_ns > 0 for cost in sink.fences)
        needed += sum(bool(cost.needed_ns) for cost in sink.fences)
    assert min(in_flight, avoided, needed) > 10
