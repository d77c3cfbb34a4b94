"""Records that come in batches are judged as the same records one at a time, layers of a run included."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

import pytest

from hicache_obs._struct import replace
from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.order import Snapshot
from hicache_obs.analyzer.runs import Runs, find_runs
from hicache_obs.analyzer.shadow import Group
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Define,
    DefineSpace,
    DropReason,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    Purpose,
    StreamId,
    StreamKind,
    ThreadId,
    WaitStream,
    device,
    page_ids,
)
from hicache_obs.testing import RecordingSink
from hicache_obs.testing.programs import random_program
from hicache_obs.testing.rounds import Rounds, Shape

SEEDS = max(160, int(os.environ.get("HICACHE_OBS_FUZZ", "0")))
PARTS = 8
LAYERS = 12

Edit = Callable[[list[AnyRecord], random.Random], None]


def layered(seed: int) -> list[AnyRecord]:
    """Rounds with a record per layer, damaged in some places."""
    rng = random.Random(seed)
    rounds = Rounds(layers=LAYERS, pages=1024, restored_pages=16, timed=rng.random() < 0.5)
    records = rounds.prologue()
    for _ in range(rng.randrange(2, 8)):
        kind = rng.choice(["decode", "restore", "restore", "write back"])
        records += {"decode": rounds.decode, "restore": rounds.restore, "write back": rounds.write_back}[kind]()
    for edit in rng.choices(EDITS, k=rng.choice([0, 1, 2, 3, 5])):
        edit(records, rng)
    ends = [end for _, end in find_runs(records)]  # where what a run leaves shows best
    return records[: rng.choice([len(records), rng.randrange(len(records) // 2, len(records)), *ends[-2:]])]


def _drop(records: list[AnyRecord], rng: random.Random) -> None:
    """A fence, an event, a copy: races, and runs that break off."""
    del records[rng.randrange(len(records))]


def _drop_fences(records: list[AnyRecord], rng: random.Random) -> None:
    records[:] = [r for r in records if getattr(r, "purpose", None) is not rng.choice(list(Purpose)[:3])]


def _drop_waits(records: list[AnyRecord], rng: random.Random) -> None:
    records[:] = [r for r in records if type(r) is not EventWait or rng.random() < 0.7]


def _swap(records: list[AnyRecord], rng: random.Random) -> None:
    """Out of a run, or another order of layers in it."""
    for _ in range(8):
        place = rng.randrange(len(records) - 2)
        records[place], records[place + 2] = records[place + 2], records[place]


def _layers(records: list[AnyRecord], rng: random.Random) -> None:
    """A wider operation, so that layers overlap, or that what it waited for is not enough."""
    for place in rng.sample(range(len(records)), len(records) // 20):
        record = records[place]
        if isinstance(record, Kernel | Memcpy):
            records[place] = replace(record, layers=(rng.randrange(LAYERS), rng.randrange(LAYERS + 1)))


def _field(records: list[AnyRecord], rng: random.Random) -> None:
    """Another thread, group, site, stream, event or purpose in the middle of a run."""
    name = rng.choice(["thread", "group", "site", "stream", "event", "purpose", "accesses"])
    for place in rng.sample(range(len(records)), len(records) // 40):
        record = records[place]
        if isinstance(record, Kernel | Memcpy | EventRecord | EventWait) and hasattr(record, name):
            values = {"purpose": Purpose.PLAIN, "accesses": (), "event": EventId(rng.randrange(3 * LAYERS))}
            value = tuple(record.accesses) if name == "accesses" else values.get(name, rng.randrange(4))
            if name == "accesses" and rng.random() < 0.5:
                value = record.accesses[:1]
            records[place] = replace(record, **{name: value})


def _purposes(records: list[AnyRecord], rng: random.Random) -> None:
    """Waits for layers that are not called so: what stands behind them may be a transfer, which they then count for."""
    purpose = rng.choice(list(Purpose))
    records[:] = [replace(r, purpose=purpose) if isinstance(r, EventWait) else r for r in records]


def _intrude(records: list[AnyRecord], rng: random.Random) -> None:
    """Another thread works on the last layers or behind them, and the copies wait for that halfway, or do not."""
    low = rng.choice([LAYERS - 2, LAYERS])
    layer, stream, waits = rng.randrange(LAYERS), StreamId(rng.choice([0, 1, 3])), rng.random() < 0.6
    for place in reversed(range(len(records))):
        record = records[place]
        if isinstance(record, Memcpy) and record.layers == (layer, layer + 1):
            work = replace(record, op=OpId(9100 + place), thread=ThreadId(1), stream=stream, layers=(low, low + 2))
            wait = WaitStream(OpId(9000 - place), ThreadId(0), 0, record.stream, stream)
            records[place:place] = [work, wait] if waits else [work]


def _elsewhere(records: list[AnyRecord], rng: random.Random) -> None:
    """The first event record behind some copies is on another stream: nothing has been recorded on theirs yet."""
    for place in range(len(records) - 1):
        first, record = records[place : place + 2]
        if isinstance(first, Memcpy) and isinstance(record, EventRecord) and first.layers[0] == 0:
            records[place + 1] = replace(record, stream=StreamId(rng.choice([0, 3])))


def _insert(records: list[AnyRecord], rng: random.Random) -> None:
    """In or before a run: polls, losses, waits, work of others, order that nobody asked for, other processes."""
    for _ in range(rng.randrange(1, 4)):
        event = rng.choice([r.event for r in records if isinstance(r, EventRecord)])
        work = rng.choice([r for r in records if isinstance(r, Kernel | Memcpy)])
        stream, other = map(StreamId, rng.sample(range(4), 2))
        thread = ThreadId(rng.randrange(2))
        kinds = [StreamKind.LEGACY, StreamKind.BLOCKING]
        inserted: list[AnyRecord] = rng.choice(
            [
                [EventQuery(NO_OP, thread, 0, event, True)],
                [EventSync(NO_OP, thread, 0, event)],
                [EventWait(OpId(9000), thread, 0, event, stream, rng.choice(list(Purpose)))],
                [WaitStream(OpId(9001), thread, 0, stream, other)],
                [replace(work, stream=stream, thread=thread)],
                [Lost(NO_OP, thread, 0, 1, rng.choice(list(DropReason)))],
                [
                    Define(NO_OP, thread, 0, DefineSpace.STREAM, s, "s", k)
                    for s, k in zip((stream, other), kinds, strict=True)
                ],
                [Define(NO_OP, thread, 0, DefineSpace.SHARED_EVENT, event, "e")],
                [Define(NO_OP, thread, 0, DefineSpace.SHARED_POOL, 0, "p")],
                [Define(NO_OP, thread, 0, DefineSpace.EARLY_SITE, 0, "k")],
            ]
        )
        begin, end = rng.choice([*find_runs(records), (0, len(records))])
        place = rng.randrange(begin, begin + (end - begin) // 2 + 1)
        records[place:place] = inserted


EDITS: Sequence[Edit] = (
    _drop,
    _drop_fences,
    _drop_waits,
    _swap,
    _layers,
    _field,
    _purposes,
    _elsewhere,
    _intrude,
    _insert,
)


def told(records: Sequence[AnyRecord], most: int, rng: random.Random | None = None) -> list[Any]:
    """Everything the analyzer says of a trace that is fed in batches of ``most`` records, or at random up to that."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    place = 0
    while place < len(records):
        size = rng.randrange(1, most) if rng else most
        analyzer.feed(iter(records[place : place + size]))
        place += size
    state = [analyzer.pending_transfers(), analyzer.retained_groups, analyzer.forgotten, kept(analyzer)]
    analyzer.finish()
    races = dict.fromkeys(finding.fingerprint for finding in sink.findings)
    return [sink, analyzer.totals, state, *(analyzer.blast_radius(race) for race in [*races, *sink.pairs[:8]])]


def kept(analyzer: Analyzer) -> list[Any]:
    """What the analyzer goes on with: what is wrong there would be told later, perhaps."""
    order, shadow, meter = analyzer._order, analyzer._shadow, analyzer._meter
    events = [(event, _point(record), _point(record.former)) for event, record in order._events.items()]
    groups = [_group(group) for history in shadow._history.values() for group in history]
    transfers = [(t.kind, t.number, t.last.op, t.size_bytes, t.untimed, t.layers) for t in meter._transfers.values()]
    queued = {stream: [wait.op for wait in waits] for stream, waits in meter._queued.items()}
    waits = [(*wait[:2], _point(wait[2]), _point(wait[3]), *wait[4:]) for wait in analyzer._causes._waits]
    steps = [operation.op for operation in analyzer._taint._steps]
    last = dict(meter.last)
    return [
        order.clocks,
        events,
        groups,
        transfers,
        queued,
        list(meter._waits),
        last,
        waits,
        steps,
        list(analyzer._live),
    ]


def _point(record: Snapshot | None) -> tuple[object, ...]:
    return () if record is None else (record.actor, record.epoch, record.seq, record.issued_ns, record.mark)


def _group(group: Group) -> tuple[object, ...]:
    members = [(m.op, m.epoch, m.seq, m.layers, m.issued_ns, m.rows is None) for m in group.members]
    return group.number, group.actor, group.label.number, group.last, group.top, list(group.epochs), members


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many records each call of ``Runs.take`` took."""
    taken: list[int] = []
    take = Runs.take

    def counted(self: Runs, records: Sequence[AnyRecord], seq: int, changes: int) -> int:
        taken.append(take(self, records, seq, changes))
        return taken[-1]

    monkeypatch.setattr(Runs, "take", counted)
    return taken


@pytest.mark.parametrize("part", range(PARTS))
def test_batches_and_single_records(part: int, taken: list[int]) -> None:
    """One at a time no run is found; in batches they are, or not, or break off anywhere."""
    found = 0
    for seed in range(part, SEEDS, PARTS):
        records = layered(seed)
        rng = random.Random(seed)
        single = told(records, 1)
        assert told(records, len(records)) == single, f"seed {seed}, one batch"
        assert told(records, 200, rng) == single, f"seed {seed}, random batches"
        found += len(single[0].findings)
    assert sum(count > 0 for count in taken) > SEEDS / PARTS
    assert sum(count == 0 for count in taken) > SEEDS / PARTS / 8
    assert found > SEEDS / PARTS


@pytest.mark.parametrize("part", range(PARTS))
def test_batches_of_any_records(part: int) -> None:
    """Every record kind, with few runs."""
    for seed in range(part, SEEDS, PARTS):
        records = random_program(seed)
        rng = random.Random(seed)
        assert told(records, 30, rng) == told(records, 1), f"seed {seed}"


def test_where_runs_are() -> None:
    """A load-back and the round behind it are one each; decode rounds have none."""
    rounds = Rounds(layers=LAYERS, pages=1024, restored_pages=16)
    records = rounds.prologue() + rounds.decode() + rounds.restore(Shape.WHOLE) + rounds.decode()
    assert not list(find_runs(records))
    restore = rounds.restore()
    assert [end - begin for begin, end in find_runs(restore)] == [2 * LAYERS, 2 * LAYERS]


def test_both_runs_of_a_restore_are_taken(taken: list[int]) -> None:
    """All but the first two records of each: copies with their events, kernels with their waits."""
    rounds = Rounds(layers=LAYERS, pages=1024, restored_pages=16)
    records = [*rounds.prologue(), *rounds.restore()]
    told(records, len(records))
    assert taken == [2 * LAYERS - 2, 2 * LAYERS - 2]


def test_what_the_copies_waited_for_between_two_layers_is_followed() -> None:
    """From the second layer on each event also covers another stream's work: the round that waits for it may go on."""
    main, other, loads, forward = ThreadId(0), StreamId(0), StreamId(1), StreamId(2)
    ids = count(1)

    def head() -> tuple[OpId, ThreadId, int]:
        op = OpId(next(ids))
        return op, main, int(op)

    used, restored = page_ids([7]), page_ids([5])
    copied, read = (device(Mode.WRITE, restored),), (device(Mode.READ, restored),)
    copies: list[AnyRecord] = []
    rounds: list[AnyRecord] = []
    for layer in range(LAYERS):
        if layer == 1:
            copies.append(WaitStream(*head(), loads, other))
        copies.append(Memcpy(*head(), loads, 0, 1, 8, (layer, layer + 1), copied))
        copies.append(EventRecord(*head(), EventId(layer), loads))
        rounds.append(EventWait(*head(), EventId(layer), forward, Purpose.LAYER))
        rounds.append(Kernel(*head(), forward, 0, 2, 0, (layer, layer + 1), read))
    before = Kernel(*head(), other, 0, 3, 0, (LAYERS, LAYERS + 1), (device(Mode.WRITE, used),))
    after = Kernel(*head(), forward, 0, 4, 0, (LAYERS, LAYERS + 1), (device(Mode.READ, used),))
    records = [before, *copies, *rounds, after]
    assert told(records, len(records)) == told(records, 1)
    assert told(records, len(records))[0].pairs == []
    unfenced = [record for record in records if type(record) is not WaitStream]
    assert told(unfenced, len(unfenced))[0].pairs == [(before.op, after.op)]
