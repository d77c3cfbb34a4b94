"""Random traces of every record kind, judged by the analyzer and by brute force; ``make fuzz N=20000`` runs more."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence

import pytest

from hicache_obs.analyzer import Analyzer
from hicache_obs.findings import Proof
from hicache_obs.records import NO_OP, DropReason, GraphNode, GraphReplay, Lost, Record, ThreadId
from hicache_obs.testing import RecordingSink, misuses, races
from hicache_obs.testing.programs import random_program

PROGRAMS = int(os.environ.get("HICACHE_OBS_FUZZ", "2000"))
BLOCKS = 8


def reported(records: Sequence[Record]) -> RecordingSink:
    """Everything the analyzer says of a trace."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()
    return sink


def difference(records: Sequence[Record]) -> str:
    """What the two judges disagree on, empty if nothing: races, and pairs that a poll alone orders."""
    sink = reported(records)
    expected, found = races(records, polled=True), set(sink.pairs)
    if expected != found:
        return f"missed {sorted(expected - found)}, false {sorted(found - expected)}"
    weak, listed = races(records, polled=False) - expected, sink.weak_pairs - found
    if weak != listed:
        return f"polled only: missed {sorted(weak - listed)}, false {sorted(listed - weak)}"
    wrong, told = misuses(records), set(sink.misuses)
    if wrong != told:
        return f"ownership: missed {sorted(wrong - told)}, false {sorted(told - wrong)}"
    return ""


def shrunk(records: list[Record]) -> list[Record]:
    """The trace without steps that the disagreement does not need."""
    index = 0
    while index < len(records):
        shorter = records[:index] + records[index + 1 :]
        try:
            still = bool(difference(shorter))
        except (KeyError, IndexError, AssertionError, ValueError):
            still = False  # no longer well formed
        if still:
            records = shorter
        else:
            index += 1
    return records


@pytest.mark.parametrize("block", range(BLOCKS))
def test_agrees_with_brute_force(block: int) -> None:
    """Exactly the racing pairs: none missed, none false. A failure prints the seed and the shrunk program."""
    pairs = owned = 0
    for seed in range(block, PROGRAMS, BLOCKS):
        records = random_program(seed)
        wrong = difference(records)
        if wrong:
            program = "\n".join(map(repr, shrunk(records)))
            pytest.fail(f"seed {seed}: {wrong}\n{program}")
        pairs += len(races(records, polled=True))
        owned += len(misuses(records))
    assert pairs > PROGRAMS / BLOCKS
    assert owned > PROGRAMS / BLOCKS / 10


@pytest.mark.parametrize("block", range(BLOCKS))
def test_losses_never_invent_a_verdict(block: int) -> None:
    """With a run of records missing, a pair gets the verdict of the full trace, or unknown, or is not seen."""
    unknown = 0
    for seed in range(block, PROGRAMS // 2, BLOCKS):
        records = random_program(seed)
        rng = random.Random(-seed)
        if len(records) < 6:
            continue
        first = rng.randrange(4, len(records))
        end = min(len(records), first + rng.randint(1, 4))
        lost = Lost(NO_OP, ThreadId(0), 0, end - first, DropReason.RING_FULL)
        whole = reported(records)
        full = set(whole.pairs)
        sink = reported([*records[:first], lost, *records[end:]])
        assert set(sink.misuses) <= set(whole.misuses), f"seed {seed}: misuse that the full trace does not have"
        for finding in sink.findings:
            pair = (finding.earlier.op, finding.later.op)
            if finding.misuse:
                continue
            if finding.proof is Proof.UNKNOWN:
                unknown += 1
            else:
                assert pair in full, f"seed {seed}: {pair} is no race of the full trace"
        ordered = full - set(sink.pairs)
        gone = _steps(records, first, end)
        for pair in ordered:
            assert gone & set(pair), f"seed {seed}: race {pair} is called ordered once records are missing"
    assert unknown > 10


def _steps(records: Sequence[Record], first: int, end: int) -> set[int]:
    """Steps that records ``first`` to ``end - 1`` belong to: an entry belongs to its graph's replay."""
    steps, replay = set(), -1
    for index, record in enumerate(records[:end]):
        replay = record.op if isinstance(record, GraphReplay) else replay
        if index >= first:
            steps.add(replay if isinstance(record, GraphNode) else record.op)
    return steps
