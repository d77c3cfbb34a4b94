"""Witnesses: for every race two legal, minimal schedules, which do on the virtual device what they claim."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hicache_obs.analyzer.graph import Graph, Item
from hicache_obs.analyzer.witness import Moment, Schedule, Witness, fault, shared, table, witness
from hicache_obs.cli import main
from hicache_obs.errors import InputError, StreamError
from hicache_obs.readers.scenario import read_scenario
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    Define,
    DefineSpace,
    EventId,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    Kernel,
    Mode,
    OpId,
    Record,
    Relocate,
    StreamId,
    StreamKind,
    ThreadId,
    device,
    page_ids,
)
from hicache_obs.testing import races
from hicache_obs.testing import replay as replay_module
from hicache_obs.testing.programs import random_program
from hicache_obs.testing.replay import Content, replay

CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
FIRST, GRAPH = CASES[0], CASES[9]
PROGRAMS, BLOCKS = 1000, 4
READ, WRITE = Mode.READ, Mode.WRITE


def kernel(op: int, stream: int, mode: Mode, *pages: int) -> Record:
    """A kernel that touches ``pages``."""
    return Kernel(OpId(op), ThreadId(0), 0, StreamId(stream), 0, 0, 0, ALL_LAYERS, (device(mode, page_ids(pages)),))


def prove(records: list[Record]) -> int:
    """Check the witnesses of all races of a trace; returns how many there were."""
    pairs = races(records, polled=True)
    for earlier, later in sorted(pairs):
        found = witness(records, OpId(earlier), OpId(later))
        assert (found.earlier.step, found.later.step) == (earlier, later)
        assert fault(found.items, found.overlap) == fault(found.items, found.reverse) == ""
        overlap, reverse = replay(found, found.overlap), replay(found, found.reverse)
        assert overlap.overlapped
        assert not overlap.reversed
        assert overlap.all_wrong
        assert reverse.reversed
        assert not reverse.overlapped
        assert reverse.all_wrong
        for content in reverse.contents:
            assert as_claimed(content, found), (earlier, later, content)
    return len(pairs)


def as_claimed(content: Content, found: Witness) -> bool:
    """The earlier write remains; a reader saw the write that comes after it, or missed the one before it."""
    a, b = found.earlier.op, found.later.op
    both_write = content.cell.earlier is content.cell.later is WRITE
    if both_write and content.left != (a, a):
        return False
    if content.earlier_read is not None and content.cell.later is WRITE and content.earlier_read != (b, b):
        return False
    return content.later_read is None or content.cell.earlier is READ or a not in content.later_read


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_every_race_of_the_cases(path: Path) -> None:
    """Both replays of each do what they claim."""
    prove(list(read_scenario(path)))


@pytest.mark.parametrize("block", range(BLOCKS))
def test_every_race_of_random_programs(block: int) -> None:
    """Both replays of each do what they claim."""
    assert sum(prove(random_program(seed)) for seed in range(block, PROGRAMS, BLOCKS)) > PROGRAMS


@pytest.mark.parametrize("block", range(BLOCKS))
def test_graph_agrees_with_brute_force(block: int) -> None:
    """Conflicting pairs that the explicit graph leaves unordered are the races."""
    for seed in range(block, PROGRAMS, BLOCKS):
        records = random_program(seed)
        graph = Graph(records)
        found: set[tuple[int, int]] = set()
        for b in graph.items:
            needed = graph.needs(b.index)
            found |= {
                (a.step, b.step)
                for a in graph.items[: b.index]
                if a.step != b.step and a.index not in needed and shared(a, b)
            }
        assert found == races(records, polled=True), f"seed {seed}"


@pytest.mark.parametrize(
    ("reader_at", "after", "needed"),
    [(1, 0b01, False), (1, 0b10, True), (1, 0b11, True), (1, 0, False), (1, IN_ORDER, True), (0, IN_ORDER, False)],
)
def test_who_waits_for_an_entry_needs_those_before_it_in_the_graph(reader_at: int, after: int, needed: bool) -> None:
    """And no others: the third entry is an event, one before it reads what is written behind the wait for it."""
    main, rounds, fills = ThreadId(0), StreamId(1), StreamId(2)
    read, write = (device(mode, page_ids([7])) for mode in (Mode.READ, Mode.WRITE))
    records = [
        GraphReplay(OpId(0), main, 0, 1, rounds, 0, 1, 3, ALL_LAYERS, ()),
        *(
            GraphNode(OpId(1 + index), main, 0, index, 0, None, ALL_LAYERS, (read,) if index == reader_at else ())
            for index in range(2)
        ),
        GraphNode(OpId(3), main, 0, 2, after, EventId(5), ALL_LAYERS, ()),
        EventWait(OpId(4), main, 1, EventId(5), fills),
        Kernel(OpId(5), main, 2, fills, 0, 2, 0, ALL_LAYERS, (write,)),
    ]
    graph = Graph(records)
    (reader,), (writer,) = graph.of(OpId(1 + reader_at)), graph.of(OpId(5))
    assert (reader.index in graph.needs(writer.index)) is needed
    assert bool(races(records, polled=True)) is not needed


@pytest.mark.parametrize("calls", [False, True])
def test_a_thread_is_one_lane(calls: bool) -> None:
    """And so is a stream: a witness has one column for each."""
    seen = 0
    for seed in range(30):
        lanes = {item.lane for item in Graph(random_program(seed), calls=calls).items}
        named = [lane[:2] for lane in lanes if lane[0] in ("thread", "stream")]
        assert len(named) == len(set(named))
        seen += sum(lane[0] == "thread" for lane in named)
    assert seen > 10


def test_ordered_pairs_are_refused() -> None:
    """In random programs too: a pair that conflicts is a race or refused."""
    refused = 0
    for seed in range(30):
        records = random_program(seed)
        items = [item for item in Graph(records).items if item.accesses]
        steps = {(a.step, b.step) for a in items for b in items if a.index < b.index and a.step != b.step}
        steps = {
            (a, b) for a, b in steps if any(shared(x, y) for x in items for y in items if (x.step, y.step) == (a, b))
        }
        for a, b in steps - races(records, polled=True):
            refused += 1
            with pytest.raises(InputError, match="are ordered: no schedule lets them overlap"):
                witness(records, a, b)
    assert refused > 100


def test_table_of_the_first_case() -> None:
    """The exact text."""
    trace = read_scenario(FIRST)

    assert table(witness(trace, OpId(2), OpId(5)), trace.label) == (
        "overlap: s2 and s5 in flight together\n"
        "  slot  forward    load\n"
        "  1     s2 begins  s5 begins\n"
        "  2     s2 ends    s5 ends\n"
        "\n"
        "reverse: s5 is complete before s2 begins\n"
        "  slot  forward  load\n"
        "  1              s5 runs\n"
        "  2     s2 runs"
    )


FENCED = [
    kernel(1, 0, WRITE, 9),
    EventRecord(OpId(2), ThreadId(0), 0, EventId(0), StreamId(0)),
    EventWait(OpId(3), ThreadId(0), 0, EventId(0), StreamId(1)),
    kernel(4, 2, WRITE, 9),  # nobody needs it
    kernel(5, 0, WRITE, 7, 8),
    kernel(6, 1, READ, 7, 8),
]


def test_table_shows_what_the_pair_needs_and_nothing_else() -> None:
    """Records and waits stand in their stream's column; without names, operations have numbers."""
    assert table(witness(FENCED, OpId(5), OpId(6))) == (
        "overlap: op 5 and op 6 in flight together\n"
        "  slot  stream 0          stream 1\n"
        "  1     op 1 runs\n"
        "  2     op 2 is recorded\n"
        "  3                       op 3 is passed\n"
        "  4     op 5 begins       op 6 begins\n"
        "  5     op 5 ends         op 6 ends\n"
        "\n"
        "reverse: op 6 is complete before op 5 begins\n"
        "  slot  stream 0          stream 1\n"
        "  1     op 1 runs\n"
        "  2     op 2 is recorded\n"
        "  3                       op 3 is passed\n"
        "  4                       op 6 runs\n"
        "  5     op 5 runs"
    )


def test_table_leaves_out_a_long_past() -> None:
    """Only the last slots are shown, the rest counted."""
    records = [*(kernel(op, 0, WRITE, 1) for op in range(40)), kernel(40, 1, WRITE, 1)]
    lines = table(witness(records, OpId(39), OpId(40))).splitlines()

    assert lines[2] == "  (29 earlier slots run what these need)"
    assert lines[3] == "  30    op 29 runs"
    assert len(lines) == 31


def test_table_with_many_actors_names_them_in_rows() -> None:
    """A column for each would not fit a screen."""
    records: list[Record] = []
    for stream in range(8):
        records.append(kernel(3 * stream, stream, WRITE, stream))
        records.append(EventRecord(OpId(3 * stream + 1), ThreadId(0), 0, EventId(stream), StreamId(stream)))
        records.append(EventWait(OpId(3 * stream + 2), ThreadId(0), 0, EventId(stream), StreamId(8)))
    records += [kernel(50, 8, WRITE, 99), kernel(51, 9, READ, 99)]
    lines = table(witness(records, OpId(50), OpId(51))).splitlines()

    assert lines[1] == "  slot  actor     what"
    assert "  1     stream 3  op 9 runs" in lines
    assert lines[-1].split() == ["12", "stream", "8", "op", "50", "runs"]


def _without(found: Witness, gone: Item, schedule: Schedule) -> str:
    items = [item for item in found.items if item is not gone]
    return fault(items, [step for step in schedule if step.item != gone.index])


def test_witnesses_are_minimal() -> None:
    """Dropping any item but the two makes both schedules illegal, in cases and small programs."""
    dropped = 0
    traces: list[list[Record]] = [FENCED, *(random_program(seed) for seed in range(20))]
    traces += [[*read_scenario(path)] for path in CASES]
    for records in traces:
        for earlier, later in races(records, polled=True):
            found = witness(records, OpId(earlier), OpId(later))
            for item in found.items:
                if item is not found.earlier and item is not found.later:
                    dropped += 1
                    assert "left out" in _without(found, item, found.overlap)
                    assert "left out" in _without(found, item, found.reverse)
    assert dropped > 100


def _illegal() -> dict[str, Schedule]:
    """Broken schedules of ``FENCED``, by what is wrong with them."""
    found = witness(FENCED, OpId(5), OpId(6))
    good = found.reverse
    alien = dataclasses.replace(good[0], item=99, op=OpId(99))
    early = tuple(sorted(good, key=lambda step: step.op != 6))
    return {
        "slot 4: op 6 on stream 1 begins before op 3 on stream 1 is complete": tuple(
            dataclasses.replace(step, slot=max(step.slot, 4)) for step in early
        ),
        "slot 1: op 99 on stream 0 is not among the items": (alien, *good),
        "slot 1: op 1 on stream 0 begins twice": (good[0], *good),
        "slot 1: op 1 on stream 0 ends but is not running": good[1:],
        "slot 1: op 1 on stream 0 comes after slot 5": (*good, good[0]),
        "op 5 on stream 0 never ends": good[:-1],
    }


@pytest.mark.parametrize("problem", _illegal())
def test_an_illegal_schedule_is_refused(problem: str) -> None:
    """The message names the slot and the item."""
    with pytest.raises(StreamError) as error:
        replay(witness(FENCED, OpId(5), OpId(6)), _illegal()[problem])

    assert str(error.value) == f"refused, not a legal schedule: {problem}"


def test_the_device_refuses_it_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events hold the edges: without the check up front an item still cannot run before what it needs."""
    schedule = next(iter(_illegal().values()))
    monkeypatch.setattr(replay_module, "fault", lambda items, schedule: "")

    with pytest.raises(StreamError, match="cannot run now"):
        replay(witness(FENCED, OpId(5), OpId(6)), schedule)


@pytest.mark.parametrize(
    ("modes", "left", "reads"),
    [
        ((WRITE, WRITE), (1, 1), (None, None)),
        ((WRITE, READ), (1, 1), (None, (None, None))),
        ((READ, WRITE), (2, 2), ((2, 2), None)),
    ],
)
def test_reverse_leaves_wrong_content(
    modes: tuple[Mode, Mode], left: tuple[int, int], reads: tuple[object, object]
) -> None:
    """Two writes: the earlier one's value stays. A reader: misses the write before it, or sees the one after it."""
    found = witness([kernel(1, 0, modes[0], 5), kernel(2, 1, modes[1], 5)], OpId(1), OpId(2))
    (content,) = replay(found, found.reverse).contents

    assert (content.left, (content.earlier_read, content.later_read), content.wrong) == (left, reads, True)


def test_issue_order_is_right() -> None:
    """The pair in issue order: neither claim holds, and no content is wrong."""
    for first, second in ((WRITE, WRITE), (WRITE, READ), (READ, WRITE)):
        found = witness([kernel(1, 0, first, 5), kernel(2, 1, second, 5)], OpId(1), OpId(2))
        one, two = found.reverse[:2], found.reverse[2:]
        run = replay(
            found,
            [
                *(dataclasses.replace(step, slot=1) for step in two),
                *(dataclasses.replace(step, slot=2) for step in one),
            ],
        )

        assert (run.overlapped, run.reversed) == (False, False)
        assert [content.wrong for content in run.contents] == [False]


def test_an_operation_that_reads_and_writes() -> None:
    """Only pages the two conflict on are looked at, with what each does to them."""
    accesses = (device(READ, page_ids([1])), device(WRITE, page_ids([2])))
    move = Relocate(OpId(2), ThreadId(0), 0, StreamId(1), 0, ALL_LAYERS, accesses)
    found = witness([kernel(1, 0, WRITE, 1, 2, 3), move], OpId(1), OpId(2))

    assert [(cell.page, cell.earlier, cell.later) for cell in found.cells] == [(1, WRITE, READ), (2, WRITE, WRITE)]
    assert replay(found, found.reverse).all_wrong


def test_host_synchronisation_is_an_item() -> None:
    """What a thread waited for is needed by what it issues later, and only that."""
    records = [
        kernel(1, 0, WRITE, 1),
        EventRecord(OpId(2), ThreadId(0), 0, EventId(0), StreamId(0)),
        EventSync(OpId(3), ThreadId(0), 0, EventId(0)),
        kernel(4, 0, WRITE, 1),
        kernel(5, 1, WRITE, 1),
    ]
    found = witness(records, OpId(4), OpId(5))

    assert [(item.op, item.actor, item.verb) for item in found.items[:3]] == [
        (1, "stream 0", "runs"),
        (2, "stream 0", "is recorded"),
        (3, "thread 0", "returns"),
    ]
    with pytest.raises(InputError, match="ordered"):
        witness(records, OpId(1), OpId(5))


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        ((5, 77), "op 77: must be an operation of the trace that touches pages or buffers"),
        ((2, 5), "op 2: must be an operation of the trace that touches pages or buffers"),
        ((1, 6), "ops 1 and 6: must touch a common page or buffer, at least one writing it"),
    ],
)
def test_bad_pairs(pair: tuple[int, int], message: str) -> None:
    """One sentence says what is wrong with the pair."""
    with pytest.raises(InputError) as error:
        witness(FENCED, OpId(pair[0]), OpId(pair[1]))

    assert str(error.value) == message


def test_the_order_of_the_two_does_not_matter() -> None:
    """The one issued first is the earlier one."""
    assert witness(FENCED, OpId(6), OpId(5)).overlap == witness(FENCED, OpId(5), OpId(6)).overlap


def test_steps_are_plain_data() -> None:
    """Slot, operation, actor, begin or end."""
    found = witness(read_scenario(FIRST), OpId(2), OpId(5))

    assert [(step.slot, step.op, step.actor, step.moment) for step in found.reverse] == [
        (1, 5, "load", Moment.BEGIN),
        (1, 5, "load", Moment.END),
        (2, 2, "forward", Moment.BEGIN),
        (2, 2, "forward", Moment.END),
    ]


# -- the command ---------------------------------------------------------------------------------------------


def test_command_replays_the_first_finding(capsys: pytest.CaptureFixture[str]) -> None:
    """The finding, both tables, and what happened."""
    assert main(["replay", str(FIRST)]) == 0
    text = capsys.readouterr().out

    trace = read_scenario(FIRST)
    assert text.startswith("HC-")
    assert table(witness(trace, OpId(2), OpId(5)), trace.label) in text
    assert text.endswith(
        "on the virtual device\n"
        "  overlap  both were in flight together\n"
        "           page 40: holds the write of s5 and, in its other half, the write of s2: wrong\n"
        "           page 41: holds the write of s5 and, in its other half, the write of s2: wrong\n"
        "  reverse  the later one was complete first\n"
        "           page 40: holds the write of s2: wrong\n"
        "           page 41: holds the write of s2: wrong\n"
    )


@pytest.mark.parametrize("between", [("s3", "s7"), ("3", "7"), ("s7", "s3")])
def test_command_replays_a_pair(capsys: pytest.CaptureFixture[str], between: tuple[str, str]) -> None:
    """Step ids or operation ids, in any order."""
    assert main(["replay", str(GRAPH), "--between", *between]) == 0

    assert "\noverlap: s3 and s7 in flight together\n" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("path", "between", "message"),
    [
        (FIRST, ["s2", "s9"], "--between s9: must be a step or operation id of the file"),
        (
            FIRST,
            ["s5", "s8"],
            "--between s5 s8: ops 5 and 8 are ordered: no schedule lets them overlap or run in reverse",
        ),
        (FIRST, ["s2", "s6"], "--between s2 s6: op 6: must be an operation of the trace that touches pages or buffers"),
        (CASES[1], [], "nothing to replay: no pair of accesses is unordered"),
    ],
)
def test_command_refuses(capsys: pytest.CaptureFixture[str], path: Path, between: list[str], message: str) -> None:
    """One line names the file and the pair; exit code 2."""
    assert main(["replay", str(path), *(["--between", *between] if between else [])]) == 2

    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", f"hicache-obs: {path}: {message}\n")


def test_command_says_when_a_claim_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit code 1 if a run did not do what it claims."""
    monkeypatch.setattr("hicache_obs.testing.replay.Replayed.reversed", property(lambda self: False))

    assert main(["replay", str(FIRST)]) == 1
    assert "  reverse  NOT as claimed\n" in capsys.readouterr().out


def test_a_huge_trace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explicit graph has a stated limit."""
    monkeypatch.setattr("hicache_obs.analyzer.witness.MAX_RECORDS", 5)

    with pytest.raises(InputError, match="must be 5 records at most"):
        witness(FENCED, OpId(5), OpId(6))


@pytest.mark.parametrize(
    ("kind", "ordered"), [(StreamKind.BLOCKING, True), (StreamKind.NONBLOCKING, False), (None, False)]
)
def test_streams_that_nobody_declared_do_not_block(kind: StreamKind | None, ordered: bool) -> None:
    """Beside the legacy stream only blocking ones are in order."""
    kinds = {1: StreamKind.LEGACY, **({} if kind is None else {2: kind})}
    defined = [
        Define(OpId(-1), ThreadId(0), 0, DefineSpace.STREAM, stream, "s", value) for stream, value in kinds.items()
    ]
    records = [*defined, kernel(0, 1, WRITE, 5), kernel(1, 2, WRITE, 5)]
    if ordered:
        with pytest.raises(InputError, match="are ordered"):
            witness(records, OpId(0), OpId(1))
    else:
        assert prove(records) == 1
