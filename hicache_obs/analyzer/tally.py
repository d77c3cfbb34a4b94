"""Sums up what an analyzer reports: counts, findings by fingerprint, fence costs. Bounded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache_obs.costs import FenceCost, TransferCost
from hicache_obs.findings import ExitCode, Finding, Hazard, Verdict
from hicache_obs.records import DropReason, OpId

MAX_FINGERPRINTS: Final = 4096
MAX_WAITS: Final = 1_000_000
DEFINITE: Final = (Verdict.VIOLATION, Verdict.CONTRADICTION, Verdict.LATENT)
"""Verdicts that are findings: the analyzer is sure of the pair."""


@dataclass(slots=True)
class Defect:
    """All findings of one fingerprint.

    Attributes:
        example: The first, a violation if there is one.
        verdicts: Operation pairs by verdict.
    """

    example: Finding
    verdicts: Counter[Verdict] = field(default_factory=Counter)

    @property
    def count(self) -> int:
        """Operation pairs."""
        return sum(self.verdicts.values())


@dataclass(slots=True)
class Tally:
    """An ``AnalysisSink`` that keeps totals. Fed on one thread; read it when that is done.

    Attributes:
        defects: By fingerprint, in order of first appearance.
        verdicts: Operation pairs by verdict, of all findings.
        checked: Pages looked up per hazard.
        fence_waits_ns: Every fence's waited time.
        avoidable_ns, needed_ns: Sums over all fences.
        fences, fences_in_flight: Fences; those that met a conflicting operation still running.
        transfers: Transfers that finished.
        lost: Lost records by reason.
        skipped: Findings not kept because there are too many fingerprints.
    """

    defects: dict[str, Defect] = field(default_factory=dict)
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    checked: Counter[Hazard] = field(default_factory=Counter)
    fence_waits_ns: list[int] = field(default_factory=list)
    avoidable_ns: int = 0
    needed_ns: Counter[Hazard] = field(default_factory=Counter)
    fences: int = 0
    fences_in_flight: int = 0
    transfers: int = 0
    lost: Counter[DropReason] = field(default_factory=Counter)
    skipped: int = 0

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        self.checked[hazard] += pages

    def on_finding(self, finding: Finding) -> None:
        self.verdicts[finding.verdict] += 1
        defect = self.defects.get(finding.fingerprint)
        if defect is None:
            if len(self.defects) >= MAX_FINGERPRINTS:
                self.skipped += 1
                return
            defect = self.defects[finding.fingerprint] = Defect(finding)
        elif finding.verdict is Verdict.VIOLATION and defect.example.verdict is not Verdict.VIOLATION:
            defect.example = finding
        defect.verdicts[finding.verdict] += 1

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        """Weak orderings are a metric, not a finding."""

    def on_fence(self, cost: FenceCost) -> None:
        self.fences += 1
        self.fences_in_flight += cost.in_flight
        self.avoidable_ns += cost.avoidable_ns
        self.needed_ns.update(cost.needed_ns)
        if len(self.fence_waits_ns) < MAX_WAITS:
            self.fence_waits_ns.append(cost.waited_ns)

    def on_layer_wait(self, waited_ns: int) -> None:
        """Layer waits are a metric only."""

    def on_transfer(self, cost: TransferCost) -> None:
        self.transfers += 1

    def on_records(self, count: int) -> None:
        """``Totals.records`` counts them."""

    def on_lost(self, count: int, reason: DropReason) -> None:
        self.lost[reason] += count

    def fence_wait_ns(self, quantile: float) -> float:
        """Quantile of the waited time over all fences, 0 without fences."""
        return float(np.quantile(self.fence_waits_ns, quantile)) if self.fence_waits_ns else 0.0

    def by_severity(self) -> list[Defect]:
        """Violations first, then contradictions, unknown and latent; the seed hazard first among equals."""
        order = [Verdict.VIOLATION, Verdict.CONTRADICTION, Verdict.UNKNOWN, Verdict.LATENT]
        hazards = list(Hazard)
        return sorted(
            self.defects.values(),
            key=lambda d: (order.index(d.example.verdict), hazards.index(d.example.hazard), d.example.fingerprint),
        )

    def unexpected(self, accepts: Callable[[str], bool], verdicts: Sequence[Verdict] = DEFINITE) -> int:
        """Findings with one of ``verdicts`` and a fingerprint that ``accepts`` is false for."""
        return sum(self.verdicts[verdict] for verdict in verdicts) - sum(
            defect.verdicts[verdict] for name, defect in self.defects.items() for verdict in verdicts if accepts(name)
        )

    def exit_code(self, lookups: int, shared: int = 0, *, accepts: Callable[[str], bool] = lambda _: False) -> ExitCode:
        """Outcome of a check of one trace; ``lookups`` and ``shared`` as in ``Totals``.

        Args:
            accepts: Whether findings of a fingerprint are to be expected. What could not be decided still counts.
        """
        if self.unexpected(accepts):
            return ExitCode.FINDINGS
        if self.verdicts[Verdict.UNKNOWN] or shared or not lookups:
            return ExitCode.NOTHING_CHECKED
        return ExitCode.CLEAN
