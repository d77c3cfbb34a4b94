"""Passes what the analyzer reports on to several listeners, or to none for a while."""

from __future__ import annotations

from collections.abc import Sequence

from hicache_obs.costs import AnalysisSink, FenceCost, TransferCost
from hicache_obs.findings import Finding, Hazard
from hicache_obs.records import DropReason, OpId


class Fanout:
    """An ``AnalysisSink`` that passes everything on to several; one thread at a time, as the analyzer's.

    Args:
        sinks: Told in this order.
    """

    def __init__(self, sinks: Sequence[AnalysisSink] = ()) -> None:
        self._sinks = tuple(sinks)

    def listen(self, sinks: Sequence[AnalysisSink]) -> None:
        """Tell ``sinks`` from now on, instead of those before."""
        self._sinks = tuple(sinks)

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        for sink in self._sinks:
            sink.on_checked(hazard, pages, pairs)

    def on_finding(self, finding: Finding) -> None:
        for sink in self._sinks:
            sink.on_finding(finding)

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        for sink in self._sinks:
            sink.on_weak_ordering(hazard, provenance, pair)

    def on_fence(self, cost: FenceCost) -> None:
        for sink in self._sinks:
            sink.on_fence(cost)

    def on_layer_wait(self, waited_ns: int) -> None:
        for sink in self._sinks:
            sink.on_layer_wait(waited_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        for sink in self._sinks:
            sink.on_transfer(cost)

    def on_records(self, count: int) -> None:
        for sink in self._sinks:
            sink.on_records(count)

    def on_lost(self, count: int, reason: DropReason) -> None:
        for sink in self._sinks:
            sink.on_lost(count, reason)
