"""A sink that keeps everything the analyzer reports, in order."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from hicache_obs.costs import FenceCost, TransferCost
from hicache_obs.findings import Finding, Hazard
from hicache_obs.records import DropReason, OpId


@dataclass(slots=True)
class RecordingSink:
    """An ``AnalysisSink`` for tests: unbounded, nothing summed up."""

    findings: list[Finding] = field(default_factory=list)
    fences: list[FenceCost] = field(default_factory=list)
    transfers: list[TransferCost] = field(default_factory=list)
    layer_waits_ns: list[int] = field(default_factory=list)
    checked: Counter[Hazard] = field(default_factory=Counter)
    weak: Counter[tuple[Hazard, str]] = field(default_factory=Counter)
    weak_pairs: set[tuple[OpId, OpId]] = field(default_factory=set)
    lost: Counter[DropReason] = field(default_factory=Counter)
    records: int = 0

    @property
    def pairs(self) -> list[tuple[OpId, OpId]]:
        """Operation pairs that nothing orders, in order of report."""
        return [(finding.earlier.op, finding.later.op) for finding in self.findings if not finding.misuse]

    @property
    def misuses(self) -> list[tuple[OpId, OpId]]:
        """Allocator calls and the operations that use their pages wrongly, in order of report."""
        return [(finding.earlier.op, finding.later.op) for finding in self.findings if finding.misuse]

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        self.checked[hazard] += pages

    def on_finding(self, finding: Finding) -> None:
        self.findings.append(finding)

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        self.weak[hazard, provenance] += 1
        self.weak_pairs.add(pair)

    def on_fence(self, cost: FenceCost) -> None:
        self.fences.append(cost)

    def on_layer_wait(self, waited_ns: int) -> None:
        self.layer_waits_ns.append(waited_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        self.transfers.append(cost)

    def on_records(self, count: int) -> None:
        self.records += count

    def on_lost(self, count: int, reason: DropReason) -> None:
        self.lost[reason] += count
