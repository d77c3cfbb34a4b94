"""Verdicts of conflicting pairs: proof and measured order meet here and become findings.

A pair waits for the device times of its later operation; pairs that are proven ordered are compared with the times
as well.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from typing import Final

from hicache_obs.analyzer.causes import Causes, Reason
from hicache_obs.analyzer.hazards import Hazards, principal
from hicache_obs.analyzer.measured import Measured
from hicache_obs.analyzer.ownership import Misuse
from hicache_obs.analyzer.shadow import Conflict, Operation, Overlap, Shadow
from hicache_obs.analyzer.taint import Taint
from hicache_obs.costs import AnalysisSink
from hicache_obs.findings import (
    AccessInfo,
    Cause,
    Edge,
    Finding,
    Hazard,
    Proof,
    Shared,
    Timing,
    Verdict,
    fingerprint,
    judge,
)
from hicache_obs.records import ALL_LAYERS, Access, Mode, OpId, Space, Times
from hicache_obs.trace import Names

MAX_PENDING: Final = 65536
MAX_RACED: Final = 1 << 20
"""Pages known to have raced; with more of them, later races on them no longer count as secondary."""


@dataclass(slots=True, eq=False)
class Pair:
    """A pair of operations to be judged.

    Attributes:
        conflict: The earlier operation and what both touch.
        later: The later operation.
        hazard, proof: As in ``Finding``; named when the pair was met, for its pages may be freed later.
        reason: Of the cause, likewise.
    """

    conflict: Conflict
    later: Operation
    hazard: Hazard
    proof: Proof
    reason: Reason


class Verdicts:
    """Judges pairs once their times are known, and reports them. Fed by the analyzer in trace order."""

    def __init__(
        self,
        sink: AnalysisSink,
        names: Names,
        shadow: Shadow,
        measured: Measured,
        hazards: Hazards,
        taint: Taint,
        causes: Causes,
    ) -> None:
        self._sink = sink
        self._names = names
        self._shadow = shadow
        self._measured = measured
        self._hazards = hazards
        self._taint = taint
        self._causes = causes
        self.live: dict[OpId, Operation | tuple[Operation, ...]] = {}
        """Operations whose device times may come; the analyzer adds to it."""
        self._pending: dict[OpId, list[Pair]] = {}
        self._raced: dict[tuple[Space, int], set[int]] = {}

    def expect(self, pair: Pair) -> None:
        """Judge ``pair`` once the times of its later operation are known, or ``settle`` says they will not come."""
        self._pending.setdefault(pair.later.op, []).append(pair)

    def settle(self, op: OpId) -> None:
        """Report the pairs that wait for ``op``, with the times known now."""
        for pair in self._pending.pop(op, ()):
            self._report(pair, _timing(pair.conflict.earlier, pair.later))

    def await_entry(self, operation: Operation) -> None:
        """Times may come for an entry of a graph replay, together with those of the entries before it."""
        live = self.live.get(operation.op, ())
        self.live[operation.op] = (*(live if isinstance(live, tuple) else (live,)), operation)

    def note_times(self, record: Times) -> tuple[Operation, ...]:
        """Note the times of an operation; returns it, or the entries of a graph replay, for ``judge_timed``."""
        live = self.live.pop(record.op, ())
        operations = live if isinstance(live, tuple) else (live,)
        for operation in operations:
            self._measured.note(operation, record.start_ns, record.end_ns, record.error_ns)
        return operations

    def judge_timed(self, operations: tuple[Operation, ...]) -> None:
        """Times are known: judge the pairs of an operation, those that are proven ordered too."""
        if self._pending:
            self.settle(operations[0].op)
        for operation in operations:
            self._check_measured(operation)

    def rearm(self, access: Access) -> None:
        """Pages got a new owner: their next race is not secondary to earlier ones."""
        raced = self._raced.get((access.space, access.pool))
        if raced:
            raced.difference_update(access.ids.tolist())

    def bound(self) -> None:
        """Give operations whose times are overdue their untimed verdict, so that tables stay bounded."""
        for op in list(islice(self.live, max(0, len(self.live) - MAX_PENDING))):
            del self.live[op]
            if self._pending:
                self.settle(op)
        if sum(map(len, self._raced.values())) > MAX_RACED:
            self._raced.clear()

    def finish(self) -> None:
        """Report pairs whose device times never came."""
        for op in list(self._pending):
            self.settle(op)
        self.live.clear()

    def _check_measured(self, later: Operation) -> None:
        """A pair that is proven ordered must also have been kept; if not, a fence or a clock lies.

        The earlier one of a pair is the last that touched some page: what went before follows from other pairs.
        """
        if later.start_ns is None or later.within:
            return  # of a graph's entry nobody knows when it ran: another may follow it and still run in its interval
        shadow, broken = self._shadow, []
        for group in self._measured.after(later.start_ns + later.error_ns, later.group.actor):
            if group.number > later.group.number or not (overlaps := shadow.shared(later.group, group)):
                continue
            for earlier in group.overlapping(later.layers, 0):
                if earlier.seq > later.seq or earlier.within or earlier.op in later.unordered:
                    continue
                if _timing(earlier, later) is Timing.BROKEN and shadow.was_last(later.group, group):
                    broken.append(Conflict(earlier, overlaps))
        for conflict in sorted(broken, key=_earlier_seq):
            self._taint.race(conflict.earlier, later, conflict.overlaps)
            hazard = self._hazards.of(conflict.overlaps, conflict.earlier, later)
            self._report(Pair(conflict, later, hazard, Proof.ORDERED, Reason(Cause.CLOCK_OR_FENCE)), Timing.BROKEN)

    def _report(self, pair: Pair, timing: Timing) -> None:
        earlier, later, overlaps = pair.conflict.earlier, pair.later, pair.conflict.overlaps
        main = principal(overlaps)
        shared = _by_pool(overlaps)
        pages = shared.pop((main.space, main.pool))
        raced = self._raced.setdefault((main.space, main.pool), set())
        secondary = not raced.isdisjoint(pages)
        raced.update(pages)
        first, second = self._access(earlier, main.earlier), self._access(later, main.later)
        on, waiter = self._actor_name(earlier), self._actor_name(later)
        reason = self._causes.settled(pair.reason)
        name = fingerprint(pair.hazard, first.site, second.site, on, waiter, self._names.engine)
        self._taint.name(name, (earlier.op, later.op))
        self._sink.on_finding(
            Finding(
                hazard=pair.hazard,
                verdict=judge(pair.proof, timing),
                proof=pair.proof,
                timing=timing,
                cause=reason.cause,
                earlier=first,
                later=second,
                space=main.space.name.lower(),
                pool=main.pool,
                pages=pages,
                layers=(
                    max(earlier.layers[0], later.layers[0]),
                    min(earlier.layers[1], later.layers[1]),
                ),
                missing_edge=Edge(on, earlier.op, waiter, later.op),
                wrong_waiter=None if reason.stream is None else self._names.stream(reason.stream),
                coarse="forward" in (first.what, second.what) or earlier.within or later.within,
                fingerprint=name,
                secondary=secondary,
                also=tuple(Shared(space.name.lower(), pool, ids) for (space, pool), ids in shared.items()),
            )
        )

    def misuse(self, misuse: Misuse) -> None:
        """Report an operation that uses pages that are not its owner's, or hold nothing."""
        change, operation, space = misuse.change, misuse.operation, misuse.space.name.lower()
        second = self._access(operation, misuse.mode)
        on, waiter = self._names.thread(change.thread), self._actor_name(operation)
        first = AccessInfo(
            op=change.op,
            what=change.what,
            mode="",
            site=change.what,
            stream=None,
            stream_id=None,
            group=0,
            layers=ALL_LAYERS,
            thread=change.thread,
            issued_ns=change.issued_ns,
            start_ns=None,
            end_ns=None,
        )
        self._sink.on_finding(
            Finding(
                hazard=Hazard.LIFETIME,
                verdict=Verdict.VIOLATION,
                proof=Proof.ORDERED,
                timing=Timing.UNTIMED,
                cause=misuse.cause,
                earlier=first,
                later=second,
                space=space,
                pool=misuse.pool,
                pages=misuse.pages,
                layers=operation.layers,
                missing_edge=Edge(on, change.op, waiter, operation.op),
                wrong_waiter=None,
                coarse=False,
                fingerprint=fingerprint(
                    Hazard.LIFETIME, misuse.cause.value, second.site, on, waiter, self._names.engine
                ),
            )
        )

    def _access(self, operation: Operation, mode: Mode) -> AccessInfo:
        label = operation.label
        return AccessInfo(
            op=operation.op,
            what=label.what,
            mode=mode.name.lower(),
            site=self._names.site(label.site),
            stream=None if label.stream is None else self._names.stream(label.stream),
            stream_id=label.stream,
            group=label.number,
            layers=operation.layers,
            thread=label.thread,
            issued_ns=operation.issued_ns,
            start_ns=operation.start_ns,
            end_ns=operation.end_ns,
        )

    def _actor_name(self, operation: Operation) -> str:
        label = operation.label
        if label.stream is None:
            return self._names.thread(label.thread)
        return self._names.stream(label.stream)


def _earlier_seq(conflict: Conflict) -> int:
    return conflict.earlier.seq


def _timing(earlier: Operation, later: Operation) -> Timing:
    if earlier.end_ns is None or later.start_ns is None:
        return Timing.UNTIMED
    tolerance = earlier.error_ns + later.error_ns
    return Timing.BROKEN if later.start_ns < earlier.end_ns - tolerance else Timing.KEPT


def _by_pool(overlaps: tuple[Overlap, ...]) -> dict[tuple[Space, int], tuple[int, ...]]:
    """Shared ids of each space and pool, ascending."""
    found: dict[tuple[Space, int], set[int]] = {}
    for overlap in overlaps:
        found.setdefault((overlap.space, overlap.pool), set()).update(overlap.pages.tolist())
    return {key: tuple(sorted(ids)) for key, ids in found.items()}
