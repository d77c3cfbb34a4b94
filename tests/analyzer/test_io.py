"""Transfers in no stream: who learns of their end is ordered behind them, and nobody else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from hicache_obs.analyzer import Analyzer, check
from hicache_obs.analyzer.plan import plan
from hicache_obs.findings import Proof
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import HostAccess, IoEnd, OpId
from hicache_obs.testing import RecordingSink, races

Step = dict[str, Any]
BEGIN = {"op": "io_begin", "io": "p", "kind": "storage_read", "writes_host": [5]}
END = {"op": "io_end", "io": "p"}
TOLD = {**END, "thread": "t"}
USE = {"op": "host_access", "reads_host": [5], "thread": "t"}
OTHER = {**BEGIN, "io": "q", "writes_host": [9]}


def found(*steps: Step) -> list[tuple[str, str]]:
    """Races; brute force and the plan agree on them."""
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    trace = parse_scenario(json.dumps({"steps": numbered}).encode(), source="test")
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace)
    analyzer.finish()
    planned = plan(trace)
    assert set(sink.pairs) == races(list(trace), polled=True)
    assert set(sink.pairs) == planned.pairs(planned.unordered(planned.conflicts(), {}))
    return [(trace.label(earlier), trace.label(later)) for earlier, later in sink.pairs]


def test_every_thread_that_learns_of_the_end_is_ordered() -> None:
    """The second thread to be told as well as the first."""
    assert found(BEGIN, END, USE) == [("s1", "s3")]
    assert found(BEGIN, END, TOLD, USE) == []
    assert found(BEGIN, TOLD, END, {**USE, "thread": "main"}) == []


def test_a_later_transfer_is_not_covered_by_an_end_that_is_told_late() -> None:
    """Both may have used the same slot of the analyzer's table."""
    read = {**USE, "reads_host": [9]}

    assert found(BEGIN, END, OTHER, TOLD, USE, read) == [("s3", "s6")]
    assert found(BEGIN, END, {**BEGIN, "writes_host": [9]}, {**TOLD, "io": "p"}, read) == []  # the name begins anew


def test_ends_too_long_ago_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stated bound: the thread that is told late counts as not told."""
    monkeypatch.setattr(check, "MAX_ENDED", 1)
    steps = [BEGIN, END, OTHER, {**END, "io": "q"}, TOLD, USE]
    numbered = [{"id": f"s{number}", **step} for number, step in enumerate(steps, 1)]
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(parse_scenario(json.dumps({"steps": numbered}).encode(), source="test"))

    assert sink.pairs == [(1, 6)]


def test_the_end_of_what_never_began_is_no_order() -> None:
    """Nor does it leave anything in doubt: nothing has been forgotten."""
    steps = [{"id": f"s{number}", **step} for number, step in enumerate([BEGIN, USE], 1)]
    records = list(parse_scenario(json.dumps({"steps": steps}).encode(), source="test"))
    use = next(place for place, record in enumerate(records) if isinstance(record, HostAccess))
    records.insert(use, IoEnd(OpId(50), records[use].thread, records[use].host_ns, 77))
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(records)
    analyzer.finish()

    assert [finding.proof for finding in sink.findings] == [Proof.NONE]
