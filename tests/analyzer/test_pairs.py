"""The proof of a chosen pair: what brute force says of two operations that write the same page."""

from __future__ import annotations

import numpy as np
import pytest

from hicache_obs.analyzer.pairs import PairProofs
from hicache_obs.findings import Proof
from hicache_obs.records import (
    ALL_LAYERS,
    EventId,
    EventRecord,
    GraphNode,
    GraphReplay,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    Record,
    StreamId,
    ThreadId,
    Times,
    device,
)
from hicache_obs.testing import History, races
from hicache_obs.testing.programs import random_program

PAGE = (device(Mode.WRITE, np.array([7], np.int64)),)


def _everywhere(record: Record) -> Record:
    """The record, on one page for all if it is an operation."""
    if isinstance(record, Kernel):
        return Kernel(*_head(record), record.group, 0, ALL_LAYERS, PAGE)
    if isinstance(record, Memcpy):
        return Memcpy(*_head(record), record.group, 0, ALL_LAYERS, PAGE, record.direction)
    if isinstance(record, GraphReplay):
        head = (record.op, record.thread, record.host_ns, record.graph, record.stream, record.site)
        return GraphReplay(*head, record.group, 0, ALL_LAYERS, PAGE)
    return record


def _head(record: Kernel | Memcpy) -> tuple[OpId, ThreadId, int, int, int]:
    return record.op, record.thread, record.host_ns, record.stream, record.site


@pytest.mark.parametrize("part", range(4))
def test_agrees_with_brute_force(part: int) -> None:
    """Every pair of operations of random programs is ordered, polled or neither."""
    told = dict.fromkeys(Proof, 0)
    for seed in range(part, 400, 4):
        records = [_everywhere(record) for record in random_program(seed) if not isinstance(record, GraphNode)]
        ops = [record.op for record in records if isinstance(record, Kernel | Memcpy | GraphReplay)]
        proofs = PairProofs({later: ops[:index] for index, later in enumerate(ops)})
        proofs.feed(records)
        weak, none = races(records, polled=False), races(records, polled=True)
        assert [(proof.earlier, proof.later) for proof in proofs.proofs] == [
            (earlier, later) for index, later in enumerate(ops) for earlier in ops[:index]
        ]
        for proof in proofs.proofs:
            pair = proof.earlier, proof.later
            expected = Proof.NONE if pair in none else Proof.POLLED if pair in weak else Proof.ORDERED
            assert proof.proof is expected, f"seed {seed}: {pair}"
            assert (records[proof.since].op, records[proof.at].op) == pair
            told[proof.proof] += 1
    assert min(told[proof] for proof in (Proof.NONE, Proof.POLLED, Proof.ORDERED)) > 0


@pytest.mark.parametrize(
    ("text", "proof"),
    [
        ("F:w5 L:w6", Proof.NONE),
        ("F:w5 ~1 L:w6", Proof.UNKNOWN),
        ("~1 F:w5 L:w6", Proof.NONE),
        ("F:w5 ~1 h<* L:w6", Proof.ORDERED),
    ],
)
def test_what_was_lost_may_have_ordered_a_pair(text: str, proof: Proof) -> None:
    """The pages do not matter, nor do times that say otherwise."""
    records = History(text).records
    first, last = (record for record in records if isinstance(record, Kernel | Memcpy))
    proofs = PairProofs({last.op: [first.op]})
    proofs.feed([*records, Times(first.op, first.thread, 0, 900, 1000), Times(last.op, last.thread, 0, 0, 100)])
    assert [found.proof for found in proofs.proofs] == [proof]


def test_only_what_is_wanted_is_told() -> None:
    """An operation that is not in the trace has no proof, nor has one that nobody asked for."""
    records = History("F:w5 S:w5 L:w5").records
    proofs = PairProofs({OpId(2): [OpId(0), OpId(77)], OpId(99): [OpId(0)]})
    proofs.feed(records)
    assert [(found.earlier, found.later) for found in proofs.proofs] == [(0, 2)]


def test_an_operation_of_a_run_is_one_like_any_other() -> None:
    """A copy and an event record for each of many layers, then a kernel: each copy is looked at."""
    main, loads, forward = ThreadId(0), StreamId(1), StreamId(2)
    records: list[Record] = []
    for op in range(0, 40, 2):
        records += [
            Memcpy(OpId(op), main, op, loads, 0, 1, 8, (op, op + 1), PAGE),
            EventRecord(OpId(op + 1), main, op, EventId(op + 1), loads),
        ]
    copies = [OpId(op) for op in range(0, 40, 2)]
    proofs = PairProofs({OpId(40): copies})
    proofs.feed([*records, Kernel(OpId(40), main, 40, forward, 0, 2, 0, ALL_LAYERS, PAGE)])
    assert [(found.earlier, found.proof) for found in proofs.proofs] == [(copy, Proof.NONE) for copy in copies]
