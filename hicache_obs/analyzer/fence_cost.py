"""What each fence cost, and what it would have needed to cost (definitions in ``hicache_obs.costs``).

Granularity: needed time is counted to the end of the whole forward segment or copy that conflicts, for the last
operation that touched each page; a transfer is judged by its first copy, since a fence holds back all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

from hicache_obs._struct import Struct
from hicache_obs.analyzer.measured import Measured
from hicache_obs.analyzer.order import Actor, Snapshot
from hicache_obs.analyzer.shadow import Group, Operation, Shadow
from hicache_obs.costs import AnalysisSink, FenceCost, PendingTransfers, TransferCost, TransferKind
from hicache_obs.findings import Hazard
from hicache_obs.records import (
    NO_OP,
    EventWait,
    Kernel,
    Memcpy,
    OpId,
    Purpose,
    Space,
    Times,
    WaitStream,
)

FENCES: Final = (Purpose.LOAD_FENCE, Purpose.WRITE_FENCE)
MAX_WAITS: Final = 4096
"""Waits whose device times may still come."""
MAX_ENDS: Final = 4096
"""Ends kept of operations and waits: when an event record was complete is told from what was queued before it."""
MAX_QUEUED: Final = 16
"""Waits in front of one operation."""
MAX_TRANSFERS: Final = 512
"""Transfers whose device times may still come: each keeps its page arrays."""


class _Wait(Struct, eq=False, gc=False):
    """A wait on a stream; ``snapshot`` is what it waits for."""

    op: OpId
    purpose: Purpose
    issued_ns: int
    snapshot: Snapshot | None
    start_ns: int | None = None
    end_ns: int | None = None


_LAYER_WAIT: Final = _Wait(NO_OP, Purpose.LAYER, 0, None)
"""Stands for all waits that no transfer waits for: of those only the duration is told."""
_KINDS: Final = {"restore": TransferKind.RESTORE, "backup": TransferKind.BACKUP}


class _Transfer(Struct, eq=False):
    """One load-back or write-back: its first and last copy, and the waits in front of the first.

    Attributes:
        whole: Layer count of its pool, 0 if never declared; ``layers`` counts those copied.
        untimed: Copies whose times are not known.
        unordered: Whether some copy has a conflict that is not proven ordered.
    """

    kind: TransferKind
    number: int
    waits: list[_Wait]
    first: Operation
    last: Operation
    pages: int
    whole: int
    size_bytes: int = 0
    untimed: int = 0
    layers: int = 0
    unordered: bool = False

    @property
    def fences(self) -> list[_Wait]:
        return [wait for wait in self.waits if wait.purpose in FENCES]

    @property
    def submitted_ns(self) -> int:
        return min([self.first.issued_ns, *(wait.issued_ns for wait in self.waits)])

    @property
    def ended(self) -> bool:
        """Every copy so far has its times, and no layer is known to be missing."""
        return not self.untimed and self.layers >= self.whole


class FenceMeter:
    """Measures fences, layer waits and transfers from device times. Fed by the analyzer in trace order.

    Args:
        sink: Receives the costs.
        shadow: Knows what groups have in common.
        measured: Groups whose times are known.
        hazard: ``hazard(earlier, later)``: what a fence between the two prevents, ``None`` if nothing.

    Attributes:
        last: What was queued last on each stream and has device times: the mark of a snapshot made now.
    """

    def __init__(
        self,
        sink: AnalysisSink,
        shadow: Shadow,
        measured: Measured,
        hazard: Callable[[Operation, Operation], Hazard | None],
    ) -> None:
        self._sink = sink
        self._shadow = shadow
        self._measured = measured
        self._hazard = hazard
        self.last: dict[Actor, OpId] = {}
        self._ends: dict[OpId, int] = {}
        """When what was measured last ended."""
        self._queued: dict[Actor, list[_Wait]] = {}
        self._waits: dict[OpId, _Wait] = {}
        self._transfers: dict[tuple[TransferKind, int], _Transfer] = {}
        """By kind and number; in order of their first copies."""
        self._pool_layers: dict[int, int] = {}

    def declare_pool(self, pool: int, layers: int) -> None:
        """State how many layers a device pool has, so that a transfer is known to be complete."""
        self._pool_layers[pool] = layers

    def on_wait(self, stream: Actor, record: EventWait | WaitStream, snapshot: Snapshot | None) -> None:
        """A wait was queued on ``stream``."""
        self.last[stream] = op = record.op
        if record.purpose is Purpose.LAYER:
            self._waits[op] = _LAYER_WAIT
            return
        self._waits[op] = wait = _Wait(op, record.purpose, record.host_ns, snapshot)
        queued = self._queued.get(stream)
        if queued is None:
            self._queued[stream] = [wait]
        else:
            queued.append(wait)
            if len(queued) > MAX_QUEUED:
                del queued[0]

    def on_operation(self, stream: Actor, operation: Operation, record: Kernel | Memcpy) -> None:
        """An operation was queued on ``stream``."""
        self.last[stream] = operation.op
        waits = self._queued.pop(stream, None)
        kind = _KINDS.get(operation.label.what)
        if kind is None:
            return
        transfer = self._transfers.get((kind, record.group))
        if transfer is None:
            transfer = self._transfers[kind, record.group] = self._begin(kind, operation, record, waits or [])
        transfer.last = operation
        transfer.size_bytes += record.size_bytes
        transfer.untimed += 1
        if operation.unordered:
            transfer.unordered = True
        if transfer.whole:
            low, high = record.layers
            transfer.layers += (high if high < transfer.whole else transfer.whole) - low

    def on_operations(self, stream: Actor, operations: Sequence[Operation], sizes_bytes: Iterable[int]) -> None:
        """``on_operation`` for more of what was last on ``stream``; they conflict with nothing."""
        self.last[stream] = operations[-1].op
        label = operations[0].label
        kind = _KINDS.get(label.what)
        if kind is not None:
            transfer = self._transfers[kind, label.number]
            transfer.last = operations[-1]
            transfer.size_bytes += sum(sizes_bytes)
            transfer.untimed += len(operations)
            if whole := transfer.whole:
                transfer.layers += sum(min(high, whole) - low for low, high in [o.layers for o in operations])

    def on_layer_waits(self, ops: Iterable[OpId]) -> None:
        """``on_wait`` for layer waits with an operation behind each."""
        self._waits.update(dict.fromkeys(ops, _LAYER_WAIT))

    def _begin(
        self, kind: TransferKind, operation: Operation, record: Kernel | Memcpy, waits: list[_Wait]
    ) -> _Transfer:
        device = [access for access in record.accesses if access.space is Space.DEVICE]
        whole = self._pool_layers.get(device[0].pool if device else 0, 0)
        pages = sum(len(access.ids) for access in device)
        return _Transfer(kind, record.group, waits, operation, operation, pages, whole)

    def on_times(self, record: Times, operations: tuple[Operation, ...]) -> None:
        """Device times of a wait or of ``operations`` arrived (those of an operation are already set)."""
        self._ends[record.op] = record.end_ns
        wait = self._waits.pop(record.op, None)
        if wait is _LAYER_WAIT:
            self._sink.on_layer_wait(record.end_ns - record.start_ns)
        elif wait is not None:
            wait.start_ns, wait.end_ns = record.start_ns, record.end_ns
        elif operations and (kind := _KINDS.get(operations[0].label.what)) is not None:
            transfer = self._transfers.get((kind, operations[0].label.number))
            if transfer is not None:
                transfer.untimed -= 1
                if transfer.whole and transfer.ended:
                    self._complete(transfer)

    def bound(self) -> None:
        """Give up on waits and transfers whose times are overdue, so that tables stay bounded."""
        for op in list(islice(self._waits, max(0, len(self._waits) - MAX_WAITS))):
            del self._waits[op]
        for key in list(islice(self._transfers, max(0, len(self._transfers) - MAX_TRANSFERS))):
            del self._transfers[key]
        for op in list(islice(self._ends, max(0, len(self._ends) - MAX_ENDS))):
            del self._ends[op]

    def pending(self) -> tuple[PendingTransfers, ...]:
        """Transfers under way, one entry per direction."""
        under_way: dict[TransferKind, list[int]] = {kind: [] for kind in TransferKind}
        for transfer in self._transfers.values():
            if not transfer.ended:
                under_way[transfer.kind].append(transfer.submitted_ns)
        return tuple(PendingTransfers(kind, len(ns), min(ns, default=None)) for kind, ns in under_way.items())

    def finish(self) -> None:
        """The trace is over: measure transfers of pools whose layer count was never declared."""
        for transfer in list(self._transfers.values()):
            if not transfer.untimed:
                self._complete(transfer)
        self._transfers.clear()

    def _complete(self, transfer: _Transfer) -> None:
        del self._transfers[transfer.kind, transfer.number]
        for fence in transfer.fences:
            cost = self._cost(transfer, fence)
            if cost is not None:
                self._sink.on_fence(cost)
        first, last = transfer.first, transfer.last
        if first.start_ns is None or last.end_ns is None:
            return
        self._sink.on_transfer(
            TransferCost(
                kind=transfer.kind,
                transfer=transfer.number,
                copy_ns=last.end_ns - first.start_ns,
                op_ns=last.end_ns - transfer.submitted_ns,
                size_bytes=transfer.size_bytes,
                pages=transfer.pages,
                fenced=bool(transfer.fences) or not transfer.unordered,
            )
        )

    def _cost(self, transfer: _Transfer, fence: _Wait) -> FenceCost | None:
        first = transfer.first
        if fence.start_ns is None or fence.end_ns is None or first.start_ns is None:
            return None
        waited = max(0, fence.end_ns - max(fence.start_ns, first.issued_ns))
        needed_end, hazard = self._needed(first, min(fence.issued_ns, fence.start_ns))
        others = [self._released(wait) for wait in transfer.waits if wait is not fence]
        exact = max(fence.start_ns, first.issued_ns, needed_end, *others)
        avoidable = min(waited, max(0, first.start_ns - exact))
        needed = waited - avoidable
        return FenceCost(
            op=fence.op,
            kind=transfer.kind,
            waited_ns=waited,
            avoidable_ns=avoidable,
            needed_ns={hazard: needed} if hazard is not None and needed else {},
            in_flight=needed_end > fence.issued_ns,
        )

    def _needed(self, first: Operation, after_ns: int) -> tuple[int, Hazard | None]:
        """When the last operation that conflicts with the transfer ended, and the hazard it would have been.

        What ended before ``after_ns`` needed no fence, and counts as nothing.
        """
        end, hazard = after_ns, None
        for group in sorted(self._measured.after(after_ns, first.group.actor), key=_number):
            if not self._shadow.was_last(first.group, group):
                continue
            for earlier in group.members:
                if earlier.seq < first.seq and earlier.end_ns is not None and earlier.end_ns > end:
                    found = self._hazard(earlier, first)
                    if found is not None:
                        end, hazard = earlier.end_ns, found
        return end, hazard

    def _released(self, wait: _Wait) -> int:
        """When the wait's dependency was complete: by its record if known, else by when the stream passed it."""
        snapshot = wait.snapshot
        if snapshot is not None and snapshot.mark is not None:
            if snapshot.mark == NO_OP:
                return snapshot.issued_ns
            ended = self._ends.get(snapshot.mark)
            if ended is not None:
                return max(snapshot.issued_ns, ended)
        if wait.end_ns is None or wait.start_ns is None:
            return 0
        return wait.end_ns if wait.end_ns > wait.start_ns else 0


def _number(group: Group) -> int:
    return group.number
