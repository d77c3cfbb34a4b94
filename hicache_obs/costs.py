"""What fences, layer waits and transfers cost, as data; and the sink the analyzer reports everything to.

Definitions (DESIGN §6)::

    waited    = max(0, dependency_end - max(stream_free, next_op_issued))
    avoidable = start of the first operation behind the fence, minus its start recomputed with this wait
                replaced by the exact edges (only operations that really conflict), all other edges kept
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Protocol

from hicache_obs.findings import Finding, Hazard
from hicache_obs.records import DropReason, OpId


class TransferKind(str, enum.Enum):
    """Direction of a transfer as users name it; the value is the ``op`` metric label."""

    RESTORE = "restore"
    """Load-back, host to device."""
    BACKUP = "backup"
    """Write-back, device to host."""


@dataclass(frozen=True, slots=True)
class FenceCost:
    """One fence in front of a transfer.

    Attributes:
        op: Operation id of the ``wait_stream`` or ``event_wait``.
        kind: Transfer it protects.
        waited_ns: Time the transfer's stream really stood still for it.
        avoidable_ns: Part of it that exact edges would have saved.
        needed_ns: The rest, by hazard of the conflicting operations that end last.
        in_flight: An operation that conflicts with the transfer was not finished when the fence was issued.
    """

    op: OpId
    kind: TransferKind
    waited_ns: int
    avoidable_ns: int
    needed_ns: dict[Hazard, int] = field(default_factory=dict)
    in_flight: bool = False


@dataclass(frozen=True, slots=True)
class TransferCost:
    """One finished transfer (all its layer copies).

    Attributes:
        kind: Direction.
        transfer: Transfer id.
        copy_ns: First copy's start to last copy's end.
        op_ns: Submission (its fence included) to last copy's end.
        size_bytes, pages: Amount moved; pages counted once, not per layer.
        fenced: Some fence was issued for it, or its page fence proved none was needed.
    """

    kind: TransferKind
    transfer: int
    copy_ns: int
    op_ns: int
    size_bytes: int
    pages: int
    fenced: bool


@dataclass(frozen=True, slots=True)
class PendingTransfers:
    """Transfers of one direction that were submitted and are not known to have ended.

    Attributes:
        kind: Direction.
        transfers: How many.
        oldest_ns: When the oldest of them was submitted, on the trace's host clock; ``None`` without one.
    """

    kind: TransferKind
    transfers: int
    oldest_ns: int | None


class AnalysisSink(Protocol):
    """Receives what the analyzer finds, in analysis order, on the thread that feeds the analyzer."""

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        """``pages`` pages were looked up for ``hazard``; ``pairs`` operation pairs had an earlier access."""

    def on_finding(self, finding: Finding) -> None:
        """A pair got a verdict other than ordered or polled."""

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        """``pair`` (earlier, later) is ordered, but only by a weaker kind of edge (``polled``, ``incidental``).

        Once per conflict: the layers of a transfer are a pair each, the entries of a graph replay the same pair.
        """

    def on_fence(self, cost: FenceCost) -> None:
        """A fence resolved."""

    def on_layer_wait(self, waited_ns: int) -> None:
        """A forward round stood still for one layer of a load-back."""

    def on_transfer(self, cost: TransferCost) -> None:
        """A transfer finished."""

    def on_records(self, count: int) -> None:
        """``count`` records were analysed."""

    def on_lost(self, count: int, reason: DropReason) -> None:
        """``count`` records were lost before they could be analysed."""


class Ignore:
    """An ``AnalysisSink`` that ignores everything: the base of those that want a part of it."""

    def on_checked(self, hazard: Hazard, pages: int, pairs: int) -> None:
        """See ``AnalysisSink``."""

    def on_finding(self, finding: Finding) -> None:
        """See ``AnalysisSink``."""

    def on_weak_ordering(self, hazard: Hazard, provenance: str, pair: tuple[OpId, OpId]) -> None:
        """See ``AnalysisSink``."""

    def on_fence(self, cost: FenceCost) -> None:
        """See ``AnalysisSink``."""

    def on_layer_wait(self, waited_ns: int) -> None:
        """See ``AnalysisSink``."""

    def on_transfer(self, cost: TransferCost) -> None:
        """See ``AnalysisSink``."""

    def on_records(self, count: int) -> None:
        """See ``AnalysisSink``."""

    def on_lost(self, count: int, reason: DropReason) -> None:
        """See ``AnalysisSink``."""
