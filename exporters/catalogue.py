"""Every metric this package exports, one row each: the only place a metric is declared.

The exposition, ``docs/metrics.md`` and the dashboards are all made from or checked against ``CATALOGUE``.
``python -m hicache_obs.exporters.catalogue > docs/metrics.md`` rewrites the page.

Rules, held by tests: base units, ``_total`` on counters; labels are closed sets, every child exists at 0
before the first record; ids (request, page, node, stream, fingerprint) are never labels.
"""

from __future__ import annotations

import enum
from typing import Final

from hicache_obs.costs import TransferKind
from hicache_obs.exporters.metric_row import Label, MetricRow, MetricType, decades
from hicache_obs.findings import Hazard
from hicache_obs.records import DropReason

PREFIX: Final = "hicache_obs_"
RANK_LABELS: Final = ("tp_rank", "pp_rank", "dp_rank")
"""On every metric, with the names of SGLang's own cache metrics, so that both join."""


class Phase(str, enum.Enum):
    """Where host time goes that exists only because of this package; the ``phase`` label."""

    HOOK = "hook"
    """In the observed thread: writing records."""
    RESOLVE = "resolve"
    """Turning event pairs into device times."""
    ANALYZE = "analyze"
    EXPORT = "export"


class Provenance(str, enum.Enum):
    """Why a proven order is weaker than a fence; the ``provenance`` label."""

    POLLED = "polled"
    """The host once saw an event complete."""
    INCIDENTAL = "incidental"
    """An ordering the hardware or driver happens to give, but does not promise."""


class UnknownReason(str, enum.Enum):
    """Why a pair could not be judged; the ``reason`` label of ``unknown_total``."""

    RECORDS_LOST = "records_lost"
    OTHER = "other"


class RingProblem(str, enum.Enum):
    """What kept the agent from doing its work on a rank's ring; the ``reason`` label of ``ring_errors_total``."""

    UNREADABLE = "unreadable"
    """Damaged, cut short, or not permitted."""
    VERSION = "version"
    """Written by a version with another layout."""
    ANALYSIS = "analysis"
    """The analyzer failed on a record; the rank is no longer judged."""
    JOURNAL = "journal"
    """Records could not be kept: disk full, or no permission."""


class SpanOutcome(str, enum.Enum):
    """What became of a span; the ``outcome`` label of ``spans_total``."""

    EXPORTED = "exported"
    SAMPLED_OUT = "sampled_out"
    """Its trace has no finding and is not one of the sample."""
    QUEUE_FULL = "queue_full"
    UNDELIVERED = "undelivered"
    """The endpoint refused it, or could not be reached."""


WAIT_BUCKETS_NS: Final = decades(1_000, 5_000_000_000)
"""1 µs to 5 s: SGLang's finest bucket is 1 ms, above most fences."""
OPERATION_BUCKETS_NS: Final = decades(10_000, 10_000_000_000)
"""10 µs (one small copy) to 10 s."""

HAZARD: Final = Label("hazard", tuple(h.value for h in Hazard))
OP: Final = Label("op", tuple(k.value for k in TransferKind))
PROVENANCE: Final = Label("provenance", tuple(p.value for p in Provenance))
UNKNOWN_REASON: Final = Label("reason", tuple(r.value for r in UnknownReason))
DROP_REASON: Final = Label("reason", tuple(r.name.lower() for r in DropReason))
RING_PROBLEM: Final = Label("reason", tuple(p.value for p in RingProblem))
PHASE: Final = Label("phase", tuple(p.value for p in Phase))
SPAN_OUTCOME: Final = Label("outcome", tuple(o.value for o in SpanOutcome))
VERSION: Final = Label("version")
ENGINE: Final = Label("engine")


def _counter(name: str, unit: str, labels: tuple[Label, ...], source: str, question: str, text: str) -> MetricRow:
    return MetricRow(PREFIX + name, MetricType.COUNTER, unit, labels, (), source, question, text)


def _gauge(name: str, unit: str, labels: tuple[Label, ...], source: str, question: str, text: str) -> MetricRow:
    return MetricRow(PREFIX + name, MetricType.GAUGE, unit, labels, (), source, question, text)


def _histogram(
    name: str, buckets_ns: tuple[int, ...], labels: tuple[Label, ...], source: str, question: str, text: str
) -> MetricRow:
    return MetricRow(PREFIX + name, MetricType.HISTOGRAM, "seconds", labels, buckets_ns, source, question, text)


CATALOGUE: Final[tuple[MetricRow, ...]] = (
    _counter(
        "violations_total",
        "op pairs",
        (HAZARD,),
        "on_finding, verdict violation",
        "Did a restored or stored page get raced?",
        "Operation pairs that nothing orders and that were measured in the wrong order or overlapping.",
    ),
    _counter(
        "latent_races_total",
        "op pairs",
        (HAZARD,),
        "on_finding, verdict latent",
        "Which orderings hold by luck only?",
        "Operation pairs that nothing orders but that were not measured in the wrong order.",
    ),
    _counter(
        "contradictions_total",
        "op pairs",
        (HAZARD,),
        "on_finding, verdict contradiction",
        "Is a fence not where we think, or does a clock lie?",
        "Operation pairs proven ordered but measured in the wrong order.",
    ),
    _counter(
        "accepted_total",
        "op pairs",
        (HAZARD,),
        "on_finding, fingerprint in --accepted",
        "How often does what we decided to live with happen?",
        "Operation pairs of accepted fingerprints; they count nowhere else until the acceptance expires.",
    ),
    _counter(
        "weak_orderings_total",
        "op pairs",
        (HAZARD, PROVENANCE),
        "on_weak_ordering",
        "Which orderings rest on something weaker than a fence?",
        "Operation pairs ordered only by a weaker kind of edge than a fence.",
    ),
    _counter(
        "unknown_total",
        "op pairs",
        (UNKNOWN_REASON,),
        "on_finding, verdict unknown",
        "How many pairs could not be judged?",
        "Operation pairs that could not be judged.",
    ),
    _counter(
        "checks_total",
        "op pairs",
        (HAZARD,),
        "on_checked, pairs",
        "Was anything checked at all? 0 violations of 0 checks is not safe.",
        "Operation pairs checked for an order.",
    ),
    _counter(
        "pages_checked_total",
        "pages",
        (HAZARD,),
        "on_checked, pages",
        "How much memory do the checks cover?",
        "Pages looked up for an earlier conflicting access.",
    ),
    _gauge(
        "hazard_observable",
        "0 or 1",
        (HAZARD,),
        "set_observable",
        "Which hazards can this deployment see? 0 means cannot be seen, not absent.",
        "1 if the records that show this hazard are captured here, else 0.",
    ),
    _counter(
        "unfenced_ops_total",
        "transfers",
        (OP,),
        "on_transfer, not fenced",
        "Does the engine skip the fence?",
        "Transfers without a fence of their own and without proof that none is needed.",
    ),
    _counter(
        "transfer_bytes_total",
        "bytes",
        (OP,),
        "on_transfer, size_bytes",
        "How much KV cache is moved?",
        "Bytes copied by finished transfers.",
    ),
    _counter(
        "transfer_pages_total",
        "pages",
        (OP,),
        "on_transfer, pages",
        "How many pages are moved?",
        "Pages copied by finished transfers, each counted once and not per layer.",
    ),
    _histogram(
        "fence_wait_seconds",
        WAIT_BUCKETS_NS,
        (OP,),
        "on_fence, waited_ns",
        "What does safety cost?",
        "Time a transfer's stream stood still for its fence.",
    ),
    _histogram(
        "fence_avoidable_seconds",
        WAIT_BUCKETS_NS,
        (OP,),
        "on_fence, avoidable_ns",
        "What would a finer fence save?",
        "Part of the fence wait that waiting for the conflicting operations only would have saved.",
    ),
    _histogram(
        "layer_wait_seconds",
        WAIT_BUCKETS_NS,
        (),
        "on_layer_wait",
        "Does a load-back stall the forward pass?",
        "Time a forward round stood still for one layer of a load-back.",
    ),
    _histogram(
        "op_seconds",
        OPERATION_BUCKETS_NS,
        (OP,),
        "on_transfer, op_ns",
        "How long does a transfer take, its fence included?",
        "Submission of a transfer to the end of its last copy, fence wait included.",
    ),
    _histogram(
        "transfer_seconds",
        OPERATION_BUCKETS_NS,
        (OP,),
        "on_transfer, copy_ns",
        "How long does the copy itself take?",
        "First copy's start to last copy's end of a transfer, fence wait excluded.",
    ),
    _gauge(
        "pending_transfers",
        "transfers",
        (OP,),
        "set_pending",
        "Is a transfer stuck? Steady growth means that it is.",
        "Transfers submitted whose last copy is not known to have ended.",
    ),
    _gauge(
        "oldest_pending_seconds",
        "seconds",
        (OP,),
        "set_pending",
        "For how long has the oldest transfer been under way?",
        "Time since the oldest pending transfer was submitted, 0 without one.",
    ),
    _counter(
        "overhead_seconds_total",
        "seconds",
        (PHASE,),
        "add_overhead",
        "What does watching cost?",
        "Host time spent by hicache-obs itself.",
    ),
    _counter(
        "records_total",
        "records",
        (),
        "on_records",
        "Is the detector fed?",
        "Records analysed.",
    ),
    _counter(
        "dropped_records_total",
        "records",
        (DROP_REASON,),
        "on_lost",
        "What did the detector miss?",
        "Records lost before they could be analysed.",
    ),
    _gauge(
        "last_analysis_timestamp_seconds",
        "seconds",
        (),
        "on_records, wall clock",
        "Is the detector alive?",
        "Unix time at which records were last analysed, 0 if never.",
    ),
    _gauge(
        "rings",
        "rings",
        (),
        "agent",
        "Does this rank's process write, and is it read?",
        "Rings of running processes that the agent reads.",
    ),
    _gauge(
        "blind",
        "0 or 1",
        (),
        "agent",
        "Is this rank watched at all? 1 means it runs unwatched.",
        "1 if the rank has a ring that the agent cannot read or judge, else 0.",
    ),
    _counter(
        "ring_errors_total",
        "errors",
        (RING_PROBLEM,),
        "agent",
        "Why is a rank blind, or its journal incomplete?",
        "Failures of the agent to read, judge or keep the records of a rank.",
    ),
    _gauge(
        "capture_mode",
        "0, 1 or 2",
        (),
        "agent",
        "Has somebody switched recording off?",
        "What the rank's process does: 0 nothing, 1 observe, 2 enforce.",
    ),
    _gauge(
        "unread_records",
        "records",
        (),
        "agent",
        "Does the agent keep up?",
        "Records in the rank's ring that the agent has not read yet.",
    ),
    _gauge(
        "coverage_ratio",
        "ratio",
        (),
        "agent, records of the last minute",
        "How much of what happens is judged?",
        "Records analysed of those that the rank made in the last minute, 0 to 1; as before while it makes none.",
    ),
    _gauge(
        "sampling",
        "0 or 1",
        (),
        "agent",
        "Is a part left out because the agent may not use more of the processor?",
        "1 if records of the rank were left out in the last minute to keep to the agent's share, else 0.",
    ),
    _gauge(
        "heartbeat_timestamp_seconds",
        "seconds",
        (),
        "agent, the ring's heartbeat",
        "Does the rank's recorder still run?",
        "Unix time at which the rank's recorder last said that it is alive, 0 if never.",
    ),
    _counter(
        "spans_total",
        "spans",
        (SPAN_OUTCOME,),
        "OTLP export",
        "Do traces arrive, and is what is missing missing on purpose?",
        "Spans built from records, by what became of them; 0 without OTLP export.",
    ),
    _gauge(
        "clock_error_seconds",
        "seconds",
        (),
        "set_clock_error",
        "How far can measured times be trusted?",
        "Half width of the uncertainty of device times on the host clock.",
    ),
    _gauge(
        "build_info",
        "1",
        (VERSION, ENGINE),
        "Metrics(version=, engine=)",
        "Which version runs where?",
        "Always 1; the labels name the hicache-obs version and the observed engine.",
    ),
)


def row(name: str) -> MetricRow:
    """The row called ``name``, with or without the prefix.

    Raises:
        KeyError: No metric has that name.
    """
    return _BY_NAME[name if name.startswith(PREFIX) else PREFIX + name]


_BY_NAME: Final = {r.name: r for r in CATALOGUE}


if __name__ == "__main__":
    from hicache_obs.exporters.metrics_page import markdown

    print(markdown(), end="")
