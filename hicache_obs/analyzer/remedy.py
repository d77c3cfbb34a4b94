"""What would order an unordered pair, cheapest first, and what each would have cost: from times of the same trace.

Three edges would do (docs/analyzer.md, section The edges): a wait for an event recorded right behind the earlier
operation; a wait for all that was queued on its stream when the later one was issued, which is never cheaper; and a
host thread that synchronises before it issues the later one, which stands still meanwhile. The cost is how much later
the later operation, or its thread, would have gone on. Times are those measured, or those planned if a trace only
states durations.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from hicache_obs.analyzer.plan import NEVER, plan
from hicache_obs.findings import Cause, Finding, Hazard, Proof
from hicache_obs.records import GraphReplay, Kernel, Memcpy, OpId, Relocate, StreamId, Times
from hicache_obs.trace import Names, Trace

MAX_PLANNED: Final = 4096
"""Longer traces without measured times are not planned for this."""


class RemedyKind(str, enum.Enum):
    """How the missing edge can be made."""

    EVENT = "event"
    """The later operation's stream waits for an event recorded right behind the earlier operation."""
    STREAM = "stream"
    """... for everything queued on the earlier one's stream when the later one is issued."""
    HOST = "host"
    """The thread that issues the later operation waits until the earlier one is over, or is told so."""


@dataclass(frozen=True, slots=True)
class Remedy:
    """One way to order a pair.

    Attributes:
        kind: How.
        on: Stream or host thread that runs what is waited for.
        after: Last operation waited for.
        waiter: Stream or host thread that waits.
        before: Operation that the wait must come before.
        delay_ns: How much later ``waiter`` would have gone on; ``None`` if the times are not known.
    """

    kind: RemedyKind
    on: str
    after: OpId
    waiter: str
    before: OpId
    delay_ns: int | None


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When the operations of a trace ran, nanoseconds on one clock.

    Attributes:
        spans: Start and end by operation.
        calls: When each was issued.
        queues: What each stream ran, in issue order: ascending.
        measured: The times were measured, not planned.
        names: Names in the trace.
    """

    spans: Mapping[OpId, tuple[int, int]] = field(default_factory=dict)
    calls: Mapping[OpId, int] = field(default_factory=dict)
    queues: Mapping[StreamId, Sequence[OpId]] = field(default_factory=dict)
    measured: bool = False
    names: Names = field(default_factory=Names)


def timeline(trace: Trace) -> Timeline:
    """Times of ``trace``: measured ones if there are any, else planned ones if it states durations and is short."""
    queues: dict[StreamId, list[OpId]] = {}
    spans: dict[OpId, tuple[int, int]] = {}
    calls: dict[OpId, int] = {}
    for record in trace:
        if isinstance(record, Times):
            spans[record.op] = record.start_ns, record.end_ns
        elif record.op >= 0:
            calls[record.op] = record.host_ns
        if isinstance(record, Kernel | Memcpy | Relocate | GraphReplay):
            queues.setdefault(record.stream, []).append(record.op)
    if spans or not trace.planned_ns or len(trace) > MAX_PLANNED:
        return Timeline(spans, calls, queues, bool(spans), trace.names)
    planned = plan(trace)
    spans = {op: (span.start_ns, span.end_ns) for op, span in planned.runs.items() if span.end_ns < NEVER}
    calls = {op: span.start_ns for op, span in planned.calls.items()}
    return Timeline(spans, calls, queues, names=trace.names)


def remedies(finding: Finding, times: Timeline) -> tuple[Remedy, ...]:
    """Edges that would order the pair, the cheapest first; none if something orders it, or nobody can tell."""
    if finding.proof is not Proof.NONE:
        return ()
    edge, first, second = finding.missing_edge, finding.earlier, finding.later
    found = []
    if first.stream_id is not None and second.stream_id is not None:
        queue = times.queues.get(first.stream_id, ())
        newest = bisect_left(queue, second.op)
        span = times.spans.get(second.op)
        last = queue[newest - 1] if newest else first.op
        for kind, after in ((RemedyKind.EVENT, first.op), (RemedyKind.STREAM, last)):
            delay = _delay(times, after, None if span is None else span[0])
            found.append(Remedy(kind, edge.on, after, edge.waiter, second.op, delay))
    delay = _delay(times, first.op, times.calls.get(second.op))
    found.append(Remedy(RemedyKind.HOST, edge.on, first.op, times.names.thread(second.thread), second.op, delay))
    return tuple(found)


def _delay(times: Timeline, after: OpId, start: int | None) -> int | None:
    """How long something that went on at ``start`` would have waited for the end of operation ``after``."""
    if start is None or after not in times.spans:
        return None
    return max(0, times.spans[after][1] - start)


_GITHUB: Final = "https://github.com/"
_REPORTS: Final = {
    (Hazard.WAW_FORWARD_RESTORE, Cause.MISSING_FENCE): "sgl-project/sglang/pull/36738",
    (Hazard.WAW_FORWARD_RESTORE, Cause.WRONG_STREAM): "sgl-project/sglang/pull/36738",
    (Hazard.WAR_FORWARD_RESTORE, Cause.MISSING_FENCE): "vllm-project/vllm/issues/47282",
    (Hazard.RAW_RESTORE_FORWARD, Cause.MISSING_FENCE): "sgl-project/sglang/pull/36743",
    (Hazard.RAW_FORWARD_BACKUP, Cause.MISSING_FENCE): "vllm-project/vllm/issues/45704",
    (Hazard.RAW_FORWARD_BACKUP, Cause.WRONG_STREAM): "vllm-project/vllm-ascend/pull/4574",
    (Hazard.WAR_BACKUP_FORWARD, Cause.MISSING_FENCE): "sgl-project/sglang/pull/38463",
    (Hazard.WAR_BACKUP_FORWARD, Cause.EARLY_FREE): "lightseekorg/tokenspeed/pull/279",
    (Hazard.HOST_REUSE, Cause.MISSING_FENCE): "NVIDIA/TensorRT-LLM/pull/15546",
    (Hazard.HOST_REUSE, Cause.EARLY_FREE): "lightseekorg/tokenspeed/pull/41",
    (Hazard.GRAPH, Cause.GRAPH_SKIPS_WAIT): "vllm-project/vllm/issues/29608",
    (Hazard.METADATA_WAR, Cause.MISSING_FENCE): "sgl-project/sglang/pull/26380",
    (Hazard.LIFETIME, Cause.NO_RECORD_STREAM): "sgl-project/sglang/pull/32168",
    (Hazard.RELOCATION, Cause.STALE_ADDRESS): "sgl-project/sglang/pull/37496",
}
_NO_FENCE: Final = (Cause.MISSING_FENCE, Cause.EARLY_EVENT, Cause.EVENT_REUSE, Cause.EVENT_UNRECORDED)
"""Causes that come to the same: no fence that works."""


def public_report(finding: Finding) -> str:
    """Address of a public report of the same hazard with the same cause; empty if none is known here."""
    cause = Cause.MISSING_FENCE if finding.cause in _NO_FENCE else finding.cause
    path = _REPORTS.get((finding.hazard, cause))
    return "" if path is None else _GITHUB + path
