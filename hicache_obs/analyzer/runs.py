"""Layers of a transfer or a round, many at once.

An engine with layer events writes a *run* for each load-back, a copy and an event record per layer, and one for the
round that consumes it, a wait and a kernel per layer. The records of a run differ in operation, event, layers, times
and sizes only; what they add to clocks, groups and costs is added by columns, at a third of the cost of one by one.
A run is taken where every operation goes on with the newest group of its stream and conflicts with nothing, and leaves
everything as its records one by one would have left it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat
from operator import attrgetter
from typing import Any, Final

from hicache_obs.analyzer.causes import Causes
from hicache_obs.analyzer.fence_cost import FenceMeter
from hicache_obs.analyzer.order import Actor, Order
from hicache_obs.analyzer.shadow import Group, Operation, Shadow
from hicache_obs.analyzer.taint import Taint
from hicache_obs.records import KINDS, EventRecord, EventWait, Kernel, Memcpy, OpId, Purpose, Record

SHORTEST: Final = 6
"""Pairs of records in a run: fewer are not worth the columns."""
_LETTERS: Final = {Kernel: "K", Memcpy: "K", EventRecord: "R", EventWait: "W"}
_CODES: Final = {kind: ord(_LETTERS.get(kind, ".")) for kind in KINDS}
_RUNS: Final = re.compile(rb"(?:KR){%d,}|(?:WK){%d,}" % (SHORTEST, SHORTEST))

_WHAT: Final = attrgetter("stream", "thread", "__class__", "site", "group", "accesses")
"""What the work of a run has in common; likewise its records and its waits."""
_RECORD: Final = attrgetter("stream", "thread")
_WAIT: Final = attrgetter("stream", "thread", "purpose")
_OP: Final = attrgetter("op")
_LAYERS: Final = attrgetter("layers")
_ISSUED: Final = attrgetter("host_ns")
_ROWS: Final = attrgetter("rows")
_EVENT: Final = attrgetter("event")
_EPOCH: Final = attrgetter("epoch")
_SIZE: Final = attrgetter("size_bytes")


def find_runs(records: Sequence[Record]) -> Iterator[tuple[int, int]]:
    """Begin and end of what may be a run."""
    if len(records) > 2 * SHORTEST:
        for match in _RUNS.finditer(bytes(map(_CODES.__getitem__, map(type, records)))):
            yield match.span()


class Runs:
    """Takes runs into the analyzer's parts. Fed by the analyzer in trace order; not thread-safe.

    Args:
        live: Operations whose device times may come; to be added to.
    """

    def __init__(
        self,
        order: Order,
        shadow: Shadow,
        causes: Causes,
        taint: Taint,
        meter: FenceMeter,
        live: dict[OpId, Operation | tuple[Operation, ...]],
    ) -> None:
        self._order = order
        self._shadow = shadow
        self._causes = causes
        self._taint = taint
        self._meter = meter
        self._live = live

    def take(self, records: Sequence[Any], seq: int, changes: int) -> int:
        """Analyse the run that ``records`` begin with, behind its first pair; returns how many records that were.

        Args:
            records: From ``find_runs``. The first two have just been analysed: they have opened the group, and what
                their thread knows and what waited in front of them is behind them.
            seq: Position of the third one in the trace.
            changes: Allocator calls so far.
        """
        waits = type(records[0]) is EventWait
        works, marks = records[waits::2], records[1 - waits :: 2]
        work = works[0]
        common = (work.stream, work.thread, Purpose.LAYER) if waits else (work.stream, work.thread)
        count = min(_alike(_WHAT, works, _WHAT(work)), _alike(_WAIT if waits else _RECORD, marks, common))
        group = self._shadow.newest[self._order.stream(work.stream)]
        if count < SHORTEST or group.owned_at != changes:
            return 0
        seqs = range(seq + waits, seq + 2 * count - 2, 2)
        take = self._take_waits if waits else self._take_records
        return 2 * count - 2 if take(group, works[1:count], marks[1:count], seqs) else 0

    def _take_records(
        self, group: Group, works: Sequence[Kernel | Memcpy], marks: Sequence[EventRecord], seqs: range
    ) -> bool:
        """Work and event records in turn."""
        order, actor, count = self._order, group.actor, len(works)
        epoch = order.clock(actor)[actor] + 1
        if not self._extend(group, works, seqs, range(epoch, epoch + 2 * count, 2)):
            return False
        epochs, seqs = range(epoch + 1, epoch + 2 * count, 2), range(seqs.start + 1, seqs.stop + 1, 2)
        order.record_all(map(_EVENT, marks), actor, epochs, seqs, map(_ISSUED, marks), map(_OP, works))
        order.step(actor, 2 * count)  # last: what the records share must not count work behind them
        return True

    def _take_waits(
        self, group: Group, works: Sequence[Kernel | Memcpy], marks: Sequence[EventWait], seqs: range
    ) -> bool:
        """Layer waits and work in turn."""
        order, actor, count = self._order, group.actor, len(works)
        snapshots = order.awaited(actor, map(_EVENT, marks))
        if not snapshots:
            return False
        epoch, source = order.clock(actor)[actor], snapshots[0].actor
        known = list(accumulate(map(_EPOCH, snapshots), max, initial=order.clock(actor)[source]))[1:]
        if not self._extend(group, works, seqs, range(epoch + 1, epoch + 1 + count), source, known):
            return False
        self._causes.note_waits(actor, works[0].stream, snapshots, seqs.start - 1, epoch)
        self._meter.on_layer_waits(map(_OP, marks))
        order.reach(actor, source, known[-1])
        order.step(actor, count)
        return True

    def _extend(
        self,
        group: Group,
        works: Sequence[Kernel | Memcpy],
        seqs: range,
        epochs: range,
        source: Actor = -1,
        known: Sequence[int] = (),
    ) -> bool:
        """Add work to its group, if the shadow admits all of it; the rest as for ``Shadow.admits``."""
        layers = list(map(_LAYERS, works))
        if not self._shadow.admits(group, self._order.clock(group.actor), layers, source, known):
            return False
        ops, issued_ns = list(map(_OP, works)), map(_ISSUED, works)
        rows = map(_ROWS, works) if group.label.kind is Kernel else repeat(None)
        operations = list(
            map(Operation, ops, epochs, seqs, layers, issued_ns, repeat(group.label), repeat(group), rows)
        )
        self._shadow.extend(group, operations, epochs)
        self._taint.steps(operations)
        self._live.update(zip(ops, operations, strict=True))
        self._meter.on_operations(group.actor, operations, map(_SIZE, works))
        return True


def _alike(key: Callable[[Any], Any], records: Sequence[Any], common: object) -> int:
    """How many of the first ``records`` have this key."""
    keys = list(map(key, records))
    if keys.count(common) == len(keys):
        return len(keys)
    return next(place for place, found in enumerate(keys) if found != common)
