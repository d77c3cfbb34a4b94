"""Spans from records, costs and findings of one rank. Pure: no clock, thread or OpenTelemetry object.

::

    hicache.forward_round          links: its requests
    ├── hicache.layer_wait         per layer that the round stood still for
    └── hicache.restore            a load-back that the round waits for
        ├── hicache.fence_wait
        └── hicache.transfer       first copy's start to last copy's end
    hicache.backup                 a trace of its own, since it outlives the round; links: rounds that wrote its pages
    ├── hicache.fence_wait
    └── hicache.transfer

A trace is kept back until ``HOLD`` later ones have begun, since a finding comes with the times of the *later* access;
then it is handed on if it has a finding, or is one of the sampled, else forgotten. Ids are hashes of the ring and the
operation, so that links need no table and an agent that takes over gives the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import islice
from typing import Any, Final

from hicache_obs.analyzer.hazards import role
from hicache_obs.analyzer.tally import DEFINITE
from hicache_obs.costs import FenceCost, TransferCost, TransferKind
from hicache_obs.exporters.page_writers import PageWriters
from hicache_obs.exporters.span_node import Side, SpanNode, adopt, make_node, tree
from hicache_obs.exporters.spans import (
    BACKUP,
    FENCE_WAIT,
    FORWARD_ROUND,
    LAYER_WAIT,
    ORDERING_FINDING,
    RESTORE,
    TRANSFER,
    Attributes,
    Event,
    Link,
    Observation,
    Span,
    SpanId,
    parse_traceparent,
)
from hicache_obs.findings import Finding, Verdict
from hicache_obs.records import (
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    EventId,
    EventRecord,
    EventWait,
    GraphReplay,
    Kernel,
    Memcpy,
    OpId,
    Purpose,
    Space,
    StreamId,
    Times,
    WaitStream,
    unpack_rows,
)

HOLD: Final = 64
"""Traces kept back for findings to come. A load-back that races a round is submitted before the second round after."""
HOLD_NS: Final = 5_000_000_000
GIVE_UP_NS: Final = 60_000_000_000
MAX_OPEN: Final = 1024
"""Traces whose device times may still come."""
MAX_LINKS: Final = 32
MAX_EVENTS: Final = 32
MAX_CONTEXTS: Final = 1 << 16
"""Requests whose trace context is known; the oldest go first."""
MAX_RECORDED: Final = 8192
"""Events known to follow a load-back."""
MAX_WAITS: Final = 1024
MAX_STREAMS: Final = 4096
_FENCES: Final = frozenset({Purpose.LOAD_FENCE, Purpose.WRITE_FENCE})
_WRONG: Final = frozenset({Verdict.VIOLATION, Verdict.CONTRADICTION})


class SpanBuilder:
    """Builds the spans of one ring. Per batch: ``feed``, then what the analyzer said about it, then ``release``.

    Args:
        key: Names the ring for good; part of every id.
        to_wall_ns: What to add to a host clock reading to get Unix time.
        one_in: Traces without a finding that are kept: one in so many, 0 for none.
    """

    def __init__(self, key: str, *, to_wall_ns: int, one_in: int) -> None:
        self.engine = ""
        """Name and version of the engine, once it was stated."""
        self.sampled_out = 0
        """Spans forgotten because their trace has no finding and was not sampled."""
        self.late = 0
        """Accesses of findings whose spans were handed on, or forgotten, before."""
        self._key = hashlib.blake2b(key.encode(), digest_size=16).digest()
        self._to_wall_ns = to_wall_ns
        self._one_in = one_in
        self._now_ns = 0
        self._open: dict[tuple[str, int], SpanNode] = {}
        """Roots, oldest first; a load-back is one until a round waits for it."""
        self._of_op: dict[OpId, SpanNode] = {}
        self._transfers: dict[tuple[str, int], SpanNode] = {}
        self._queued: dict[StreamId, list[SpanNode]] = {}
        """Fences that the next copy on a stream stands behind."""
        self._waits: dict[StreamId, list[SpanNode]] = {}
        """Waits that the next round on a stream stands behind."""
        self._last_load: dict[StreamId, SpanNode] = {}
        self._recorded: dict[EventId, SpanNode] = {}
        self._contexts: dict[int, SpanId] = {}
        self._writers = PageWriters()
        self._handlers: dict[type[Any], Any] = {
            Kernel: self._on_kernel,
            GraphReplay: self._on_round,
            Memcpy: self._on_copy,
            EventRecord: self._on_event_record,
            EventWait: self._on_wait,
            WaitStream: self._on_wait,
            Times: self._on_times,
            Define: self._on_define,
        }

    def feed(self, records: Iterable[AnyRecord]) -> None:
        """Take in ``records``, in trace order."""
        handlers = self._handlers
        record = None
        for record in records:
            handler = handlers.get(type(record))
            if handler is not None:
                handler(record)
        if record is not None:
            self._now_ns = max(self._now_ns, record.host_ns)

    def note_finding(self, finding: Finding) -> None:
        """Put ``finding`` on the spans of both its accesses."""
        earlier, later = (self._of_op.get(side.op) for side in (finding.earlier, finding.later))
        for access, node, other in ((finding.earlier, earlier, later), (finding.later, later, earlier)):
            if node is not None:
                node.findings.append(Side(finding, access, other))
            elif access.stream_id is not None:
                self.late += 1

    def note_fence(self, cost: FenceCost, *, observed: bool) -> None:
        """State what a fence cost; ``observed``: the histogram has it too."""
        node = self._of_op.get(cost.op)
        if node is not None:
            node.attributes["hicache.waited_ns"] = cost.waited_ns
            node.attributes["hicache.avoidable_ns"] = cost.avoidable_ns
            if observed:
                node.observation = Observation("fence_wait_seconds", (cost.kind.value,), cost.waited_ns)

    def note_transfer(self, cost: TransferCost, *, observed: bool) -> None:
        """State what a transfer cost; ``observed``: the histograms have it too."""
        name = RESTORE if cost.kind is TransferKind.RESTORE else BACKUP
        node = self._transfers.get((name, cost.transfer))
        if node is not None:
            node.attributes["hicache.fenced"] = cost.fenced
            if observed:
                node.observation = Observation("op_seconds", (cost.kind.value,), cost.op_ns)
                node.children[0].observation = Observation("transfer_seconds", (cost.kind.value,), cost.copy_ns)

    def release(self, *, complete: bool = False, everything: bool = False) -> list[list[Span]]:
        """The spans of the traces that are over and kept, a list per trace.

        Args:
            complete: No more findings come about traces whose times are all known.
            everything: Nothing follows.
        """
        over = []
        extra = len(self._open) - HOLD
        for place, root in enumerate(self._open.values()):
            age_ns = self._now_ns - root.issued_ns
            if not (everything or complete or place < extra or age_ns > HOLD_NS):
                break
            forced = everything or place < extra + HOLD - MAX_OPEN or age_ns > GIVE_UP_NS
            if forced or not any(node.untimed for node in tree(root)):
                over.append(root)
        for root in over:
            del self._open[root.name, root.number]
        return [spans for spans in map(self._close, over) if spans]

    # -- records ---------------------------------------------------------------------------------------------

    def _on_kernel(self, record: Kernel) -> None:
        self._unqueue(record.stream)
        if role(record) != "forward":
            return
        node = self._on_round(record)
        if node.rows is None:
            node.rows = record.rows
        self._writers.note(record.accesses, record.group)

    def _on_round(self, record: Kernel | GraphReplay) -> SpanNode:
        key = FORWARD_ROUND, record.group
        node = self._open.get(key)
        if node is None:
            node = self._open[key] = make_node(FORWARD_ROUND, record.group, record.host_ns)
            node.attributes["hicache.round"] = record.group
        self._expect(node, record.op)
        for wait in self._waits.pop(record.stream, ()):
            if wait.name == LAYER_WAIT:
                adopt(node, wait)
            load, key = wait.loaded, (RESTORE, wait.loaded.number if wait.loaded else -1)
            if load is not None and self._open.get(key) is load:
                del self._open[key]
                adopt(node, load)
        return node

    def _on_copy(self, record: Memcpy) -> None:
        if record.direction is Direction.DEVICE_TO_DEVICE:
            self._unqueue(record.stream)
            return
        restores = record.direction is Direction.HOST_TO_DEVICE
        key = RESTORE if restores else BACKUP, record.group
        fences = self._queued.pop(record.stream, [])
        node = self._transfers.get(key)
        if node is None:
            node = self._open[key] = self._transfers[key] = self._begin(key, record, fences)
        copies = node.children[0]
        copies.attributes["hicache.bytes"] = int(copies.attributes["hicache.bytes"]) + record.size_bytes  # type: ignore[arg-type]  # an int: _begin
        self._expect(copies, record.op)
        if restores:
            self._last_load[record.stream] = node
            if len(self._last_load) > MAX_STREAMS:
                del self._last_load[next(iter(self._last_load))]

    def _begin(self, key: tuple[str, int], record: Memcpy, fences: list[SpanNode]) -> SpanNode:
        issued_ns = min([record.host_ns, *(fence.issued_ns for fence in fences)])
        node = make_node(*key, issued_ns)
        device = [access for access in record.accesses if access.space is Space.DEVICE]
        node.attributes["hicache.transfer"] = record.group
        node.attributes["hicache.pages"] = sum(len(access.ids) for access in device)
        copies = make_node(TRANSFER, record.op, record.host_ns)
        copies.attributes["hicache.bytes"] = 0
        adopt(node, copies, *fences)
        if key[0] == BACKUP:
            rounds = self._writers.of(device)[-MAX_LINKS:].tolist()
            node.links = tuple(Link(self._id(FORWARD_ROUND, number), "writer") for number in rounds)
        return node

    def _on_event_record(self, record: EventRecord) -> None:
        load = self._last_load.get(record.stream)
        self._recorded.pop(record.event, None)
        if load is not None:
            self._recorded[record.event] = load
            if len(self._recorded) > MAX_RECORDED:
                del self._recorded[next(iter(self._recorded))]

    def _on_wait(self, record: EventWait | WaitStream) -> None:
        event = isinstance(record, EventWait)
        stream = record.stream if event else record.waiter  # type: ignore[union-attr]  # each has its own
        if record.purpose in _FENCES:
            self._queue(self._queued, stream, FENCE_WAIT, record)
        elif event:
            load = self._recorded.get(record.event)  # type: ignore[union-attr]  # see above
            if record.purpose is Purpose.LAYER or load is not None:
                name = LAYER_WAIT if record.purpose is Purpose.LAYER else ""
                self._queue(self._waits, stream, name, record).loaded = load

    def _queue(
        self, queue: dict[StreamId, list[SpanNode]], stream: StreamId, name: str, record: EventWait | WaitStream
    ) -> SpanNode:
        node = make_node(name, record.op, record.host_ns)
        if name:
            self._expect(node, record.op)
        waiting = queue.setdefault(stream, [])
        waiting.append(node)
        if len(waiting) > MAX_WAITS:
            self._forget(waiting.pop(0))
        if len(queue) > MAX_STREAMS:
            for old in queue.pop(next(iter(queue))):
                self._forget(old)
        return node

    def _unqueue(self, stream: StreamId) -> None:
        """Something else than a transfer came behind the fences of ``stream``."""
        for fence in self._queued.pop(stream, ()):
            self._forget(fence)

    def _on_times(self, record: Times) -> None:
        node = self._of_op.get(record.op)
        if node is None or not node.untimed:
            return
        node.untimed -= 1
        start_ns, end_ns = record.start_ns, record.end_ns
        node.start_ns = start_ns if node.start_ns is None else min(node.start_ns, start_ns)
        node.end_ns = end_ns if node.end_ns is None else max(node.end_ns, end_ns)
        if node.name == LAYER_WAIT:
            node.observation = Observation("layer_wait_seconds", (), end_ns - start_ns)

    def _on_define(self, record: Define) -> None:
        if record.space is DefineSpace.ENGINE:
            self.engine = record.text
        elif record.space is DefineSpace.REQUEST_TRACE:
            context = parse_traceparent(record.text)
            if context is not None:
                self._contexts.pop(record.id, None)
                self._contexts[record.id] = context
                if len(self._contexts) > MAX_CONTEXTS:
                    del self._contexts[next(iter(self._contexts))]

    def _expect(self, node: SpanNode, op: OpId) -> None:
        node.ops.append(op)
        node.untimed += 1
        self._of_op[op] = node

    # -- finished traces -------------------------------------------------------------------------------------

    def _close(self, root: SpanNode) -> list[Span]:
        nodes = tree(root)
        for node in nodes:
            self._forget(node)
        kept = any(side.finding.verdict in DEFINITE for node in nodes for side in node.findings)
        spans = []
        if kept or self._is_sampled(root.number):
            shown = (node for node in nodes if node.name != LAYER_WAIT or (node.end_ns or 0) > (node.start_ns or 0))
            spans = [self._span(node, kept=kept) for node in shown]
        else:
            self.sampled_out += len(nodes)
        for node in nodes:
            node.findings.clear()
        return spans

    def _forget(self, node: SpanNode) -> None:
        for op in node.ops:
            self._of_op.pop(op, None)
        if self._transfers.get((node.name, node.number)) is node:
            del self._transfers[node.name, node.number]

    def _is_sampled(self, number: int) -> bool:
        return bool(self._one_in) and (number * 0x9E3779B97F4A7C15 & 2**64 - 1) >> 32 < 2**32 // self._one_in

    def _span(self, node: SpanNode, *, kept: bool) -> Span:
        start_ns, end_ns = self._times(node)
        own = self._place(node)
        if node.untimed:
            node.attributes["hicache.timed"] = False
        if node.findings:
            node.attributes["hicache.findings"] = len(node.findings)
        shown = node.findings[:MAX_EVENTS]
        conflicts = [Link(self._place(side.other), "conflict") for side in shown if side.other is not None]
        return Span(
            name=node.name,
            id=own,
            parent=0 if node.parent is None else self._place(node.parent).span,
            start_ns=start_ns + self._to_wall_ns,
            end_ns=end_ns + self._to_wall_ns,
            attributes=node.attributes,
            links=(*self._requests(node), *node.links, *dict.fromkeys(conflicts)),
            events=tuple(self._event(side, start_ns, end_ns) for side in shown),
            failed=any(side.finding.verdict in _WRONG for side in node.findings),
            kept=kept,
            observation=node.observation,
        )

    def _times(self, node: SpanNode) -> tuple[int, int]:
        """Start and end on the host clock; of a transfer from the call that submitted it."""
        if node.name in (RESTORE, BACKUP):
            return node.issued_ns, max(node.issued_ns, self._times(node.children[0])[1])
        if node.start_ns is None or node.end_ns is None:
            return node.issued_ns, node.issued_ns
        return node.start_ns, max(node.start_ns, node.end_ns)

    def _requests(self, node: SpanNode) -> list[Link]:
        """The requests of a round's rows; also states how many there are."""
        if node.rows is None:
            return []
        try:
            requests = unpack_rows(node.rows).requests.tolist()
        except ValueError:
            return []  # the rows of a file that somebody has damaged
        node.attributes["hicache.requests"] = len(requests)
        contexts = (self._contexts.get(request) for request in requests)
        return [Link(context, "request") for context in islice((c for c in contexts if c is not None), MAX_LINKS)]

    def _event(self, side: Side, start_ns: int, end_ns: int) -> Event:
        """At the moment from which both ran, or the later one had run already."""
        finding = side.finding
        first = side.access is finding.earlier
        other = finding.later if first else finding.earlier
        starts = [access.start_ns for access in (side.access, other) if access.start_ns is not None]
        attributes: Attributes = {
            "hicache.fingerprint": finding.fingerprint,
            "hicache.hazard": finding.hazard.value,
            "hicache.verdict": finding.verdict.value,
            "hicache.side": "earlier" if first else "later",
            "hicache.op": side.access.op,
            "hicache.other_op": other.op,
            "hicache.space": finding.space,
            "hicache.pages": finding.pages[:MAX_LINKS],
        }
        return Event(ORDERING_FINDING, min(max([start_ns, *starts]), end_ns) + self._to_wall_ns, attributes)

    def _place(self, node: SpanNode) -> SpanId:
        """Trace and span id of ``node``: the trace is that of the root it has by now."""
        root = node
        while root.parent is not None:
            root = root.parent
        return SpanId(self._id(root.name, root.number).trace, self._id(node.name, node.number).span)

    def _id(self, name: str, number: int) -> SpanId:
        digest = hashlib.blake2b(f"{name} {number}".encode(), key=self._key, digest_size=24).digest()
        return SpanId(int.from_bytes(digest[:16], "little") or 1, int.from_bytes(digest[16:], "little") or 1)
