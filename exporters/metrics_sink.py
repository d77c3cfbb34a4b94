"""What the analyzer reports, counted: an ``AnalysisSink`` that feeds one rank's metrics."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from hicache_obs.costs import FenceCost, TransferCost, TransferKind
from hicache_obs.exporters.catalogue import Provenance, UnknownReason
from hicache_obs.exporters.prometheus import ONLY_RANK, Metrics
from hicache_obs.exporters.rank_metrics import Exemplar
from hicache_obs.findings import Cause, Finding, Hazard, Verdict
from hicache_obs.records import DropReason, OpId, Ranks

VERDICT_COUNTERS: Final = {
    Verdict.VIOLATION: "violations_total",
    Verdict.LATENT: "latent_races_total",
    Verdict.CONTRADICTION: "contradictions_total",
}


class MetricsSink:
    """Counts what the analyzer reports; an ``AnalysisSink``.

    All calls come from one thread at a time. Records, lost records and the time of the last analysis are
    always counted; the two switches let one run feed findings and another feed costs.

    Args:
        metrics: Where to count.
        rank: The rank whose records are analysed.
        findings: Count checks, findings and weak orderings.
        costs: Count fences, layer waits and transfers.
        accepts: Whether a fingerprint is one that somebody has accepted for now; its pairs count as ``accepted``.
        now_ns: Wall clock, nanoseconds since the epoch.
    """

    def __init__(
        self,
        metrics: Metrics,
        rank: Ranks = ONLY_RANK,
        *,
        findings: bool = True,
        costs: bool = True,
        accepts: Callable[[str], bool] = lambda _: False,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        of = metrics.rank(rank)
        self._accepts = accepts
        self._accepted = {h: of.counter("accepted_total", h.value) for h in Hazard}
        self._findings = findings
        self._costs = costs
        self._now_ns = now_ns
        self._by_verdict = {
            verdict: {h: of.counter(name, h.value) for h in Hazard} for verdict, name in VERDICT_COUNTERS.items()
        }
        self._unknown = {reason: of.counter("unknown_total", reason.value) for reason in UnknownReason}
        self._weak = {
            (h, p.value): of.counter("weak_orderings_total", h.value, p.value) for h in Hazard for p in Provenance
        }
        self._checks = {h: of.counter("checks_total", h.value) for h in Hazard}
        self._pages_checked = {h: of.counter("pages_checked_total", h.value) for h in Hazard}
        self._fence_wait = {k: of.histogram("fence_wait_seconds", k.value) for k in TransferKind}
        self._fence_avoidable = {k: of.histogram("fence_avoidable_seconds", k.value) for k in TransferKind}
        self._layer_wait = of.histogram("layer_wait_seconds")
        self._unfenced = {k: of.counter("unfenced_ops_total", k.value) for k in TransferKind}
        self._bytes = {k: of.counter("transfer_bytes_total", k.value) for k in TransferKind}
        self._pages = {k: of.counter("transfer_pages_total", k.value) for k in TransferKind}
        self._op = {k: of.histogram("op_seconds", k.value) for k in TransferKind}
        self._copy = {k: of.histogram("transfer_seconds", k.value) for k in TransferKind}
        self._records = of.counter("records_total")
        self._dropped = {r: of.counter("dropped_records_total", r.name.lower()) for r in DropReason}
        self._last_analysis = of.gauge("last_analysis_timestamp_seconds")

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        """Count looked-up pages and checked pairs."""
        if self._findings:
            self._pages_checked[hazard].add(pages)
            self._checks[hazard].add(pairs)

    def on_finding(self, finding: Finding) -> None:
        """Count one operation pair under its verdict."""
        if not self._findings:
            return
        if finding.verdict is Verdict.UNKNOWN:
            lost = finding.cause is Cause.RECORDS_LOST
            self._unknown[UnknownReason.RECORDS_LOST if lost else UnknownReason.OTHER].add()
        elif finding.verdict in self._by_verdict:
            if self._accepts(finding.fingerprint):
                self._accepted[finding.hazard].add()
                return
            exemplar = Exemplar({"fingerprint": finding.fingerprint}, self._now_ns())
            self._by_verdict[finding.verdict][finding.hazard].add(1, exemplar)

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        """Count one pair whose order rests on a weaker kind of edge."""
        if self._findings:
            self._weak[hazard, provenance].add()

    def on_fence(self, cost: FenceCost) -> None:
        """Observe one fence's wait and the avoidable part of it."""
        if self._costs:
            exemplar = Exemplar({"op_id": str(cost.op)}, self._now_ns())
            self._fence_wait[cost.kind].observe(cost.waited_ns, exemplar)
            self._fence_avoidable[cost.kind].observe(cost.avoidable_ns, exemplar)

    def on_layer_wait(self, waited_ns: int) -> None:
        """Observe one layer wait."""
        if self._costs:
            self._layer_wait.observe(waited_ns)

    def on_transfer(self, cost: TransferCost) -> None:
        """Count one transfer and observe its durations."""
        if not self._costs:
            return
        kind = cost.kind
        if not cost.fenced:
            self._unfenced[kind].add()
        self._bytes[kind].add(cost.size_bytes)
        self._pages[kind].add(cost.pages)
        exemplar = Exemplar({"transfer": str(cost.transfer)}, self._now_ns())
        self._op[kind].observe(cost.op_ns, exemplar)
        self._copy[kind].observe(cost.copy_ns, exemplar)

    def on_records(self, count: int) -> None:
        """Count analysed records and note the time."""
        self._records.add(count)
        self._last_analysis.set(self._now_ns())

    def on_lost(self, count: int, reason: DropReason) -> None:
        """Count lost records."""
        self._dropped[reason].add(count)
