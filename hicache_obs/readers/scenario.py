"""Reads a scenario: a small program trace as JSON (``tests/cases/README.md`` has the vocabulary).

Each step becomes one record; each entry of a graph replay one more, and so does each further pool of an allocator's
call. Operation ids count them from 1, so that step ``sN`` of a file without such steps is operation N; ``Trace.labels``
has the step ids. ``expect`` is never read. A scenario states no device times, so no ``Times`` record comes out of it;
stated durations are in ``Trace.planned_ns``, for simulations. ``scenario_format`` has the keys.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from hicache_obs.errors import TraceError
from hicache_obs.readers.scenario_format import (
    DEFAULT_THREAD,
    STEPS,
    BadStep,
    ChannelStep,
    CollectiveStep,
    DevicePage,
    EventQueryStep,
    EventStreamStep,
    EventSyncStep,
    GraphEntry,
    GraphReplayStep,
    HostAccessStep,
    HostSyncStep,
    IoBeginStep,
    IoEndStep,
    KernelStep,
    MemcpyStep,
    PagesStep,
    RecordStreamStep,
    RelocateStep,
    Row,
    RowsDiscardedStep,
    ScenarioFile,
    Step,
    TensorAllocStep,
    TensorFreeStep,
    WaitStreamStep,
    WorkStep,
    check_step,
    explain,
)
from hicache_obs.readers.trace_file import size_of
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    MAX_AFTER,
    MAX_IDS,
    NO_OP,
    Access,
    AnyRecord,
    Collective,
    Define,
    DefineSpace,
    Direction,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    RecordStream,
    Relocate,
    RowsDiscarded,
    Space,
    StreamId,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    WaitStream,
    pack_rows,
    page_ids,
)
from hicache_obs.trace import Trace, make_trace

MAX_BYTES: Final = 64 << 20
DEFAULT_POOL: Final = "kv"
HOST_POOL: Final = "host"
_NS_PER_US: Final = 1000

_MEMCPY_KEYS: Final = {
    "h2d": (Direction.HOST_TO_DEVICE, "host_pages", "device_pages"),
    "d2h": (Direction.DEVICE_TO_HOST, "device_pages", "host_pages"),
    "d2d": (Direction.DEVICE_TO_DEVICE, "src_pages", "dst_pages"),
}


def read_scenario(path: str | os.PathLike[str]) -> Trace:
    """The records of a scenario file, definitions first.

    Raises:
        TraceError: The file is not a scenario; names the step, and says what was allowed.
    """
    target = Path(path)
    size = size_of(target)
    if size > MAX_BYTES:
        raise TraceError(f"{target}: has {size} bytes; a scenario may have {MAX_BYTES} at most")
    try:
        with target.open("rb") as file:
            data = file.read(MAX_BYTES + 1)  # it may have grown meanwhile
    except OSError as error:
        raise TraceError(f"{target}: {error.strerror}") from None
    return parse_scenario(data, source=str(target))


def parse_scenario(data: bytes, *, source: str) -> Trace:
    """Like ``read_scenario``, of a file's contents; ``source`` stands for its name in messages."""
    try:
        file = msgspec.json.decode(data, type=ScenarioFile)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise TraceError(f"{source}: {explain(error, ScenarioFile, _fields(data))}") from None
    program = _Program(file)
    for position, raw in enumerate(file.steps, 1):
        step_id = f"number {position}"
        try:
            try:
                fields = msgspec.json.decode(raw)
                if isinstance(fields, dict) and isinstance(fields.get("id"), str):
                    step_id = fields["id"]
                program.add(check_step(fields))
            except (msgspec.MsgspecError, RecursionError, ValueError) as error:
                raise BadStep(explain(error, Step)) from None
        except BadStep as error:
            raise TraceError(f"{source}: step {step_id}: {error}") from None
    return make_trace(
        source,
        [*program.defines, *program.records],
        labels=program.labels,
        planned_ns=program.planned_ns,
        planned_end_ns=program.host_ns,
        ranks=program.ranks,
    )


def _fields(data: bytes) -> object:
    """What a file that is refused holds, for the message; ``None`` if it is no JSON as far as nobody looked before."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None


class _Program:
    """Turns checked steps into records and numbers the names in them, in order of appearance."""

    def __init__(self, file: ScenarioFile) -> None:
        self.records: list[AnyRecord] = []
        self.defines: list[Define] = []
        self.labels: dict[OpId, str] = {}
        self.planned_ns: dict[OpId, int] = {}
        self._layers = file.layers
        self._ids: dict[DefineSpace, dict[str, int]] = {}
        self._seen: dict[str, int] = {}
        """Position of each step, by its id."""
        self.host_ns = 0
        self.ranks: set[int] = set()
        self._posts: Counter[str] = Counter()
        """Posts without a receive yet, by channel."""
        self._transfers: dict[str, str | None] = {}
        """Step that began each transfer, ``None`` once it ended."""
        self._tensors: dict[str, TensorAllocStep] = {}
        """How each live tensor was allocated."""
        self._rounds: dict[str, tuple[OpId, tuple[Row, ...]]] = {}
        """Operation and rows of each kernel that states them."""
        self._id(DefineSpace.THREAD, DEFAULT_THREAD)
        self._id(DefineSpace.POOL, DEFAULT_POOL, value=file.layers or 0)
        for name, stream in file.streams.items():
            self._id(DefineSpace.STREAM, name, value=StreamKind[stream.kind.upper()])
        for name in file.shared.events:
            self._mark(DefineSpace.SHARED_EVENT, self._event(name))
        for name in file.shared.buffers:
            self._mark(DefineSpace.SHARED_BUFFER, self._id(DefineSpace.BUFFER, name))
        for name in file.shared.pools:
            if name == HOST_POOL:
                self._mark(DefineSpace.SHARED_HOST_POOL, self._id(DefineSpace.HOST_POOL, name))
            else:
                self._mark(DefineSpace.SHARED_POOL, self._id(DefineSpace.POOL, name))
        for name in file.early:
            self._mark(DefineSpace.EARLY_SITE, self._id(DefineSpace.SITE, name))

    def _mark(self, space: DefineSpace, number: int) -> None:
        self.defines.append(Define(NO_OP, ThreadId(0), 0, space, number, ""))

    def add(self, step: Step) -> None:
        """Append the records of one step."""
        if step.id in self._seen:
            taken = f"id {step.id!r} is taken by step number {self._seen[step.id]}"
            raise BadStep(f"{taken}; ids must be unique, here step number {len(self._seen) + 1}")
        self._seen[step.id] = len(self._seen) + 1
        self.ranks.add(step.rank)
        self._layers_of(step)  # a layer that does not exist is a mistake whatever the operation
        op = self._next_op()
        self._append(_MAKERS[step.op](self, op, step), step, step.dur_us)
        if isinstance(step, GraphReplayStep) and step.nodes is not None:
            self._append_nodes(step, step.nodes)
        elif isinstance(step, PagesStep):
            self._append_pools(step)
        self.host_ns += round(step.host_us * _NS_PER_US)

    def _next_op(self) -> OpId:
        return OpId(len(self.records) + 1)

    def _append(self, record: AnyRecord, step: Step, dur_us: float) -> None:
        self.labels[record.op] = step.id
        self.planned_ns[record.op] = round(dur_us * _NS_PER_US)
        self.records.append(record)

    def _id(self, space: DefineSpace, name: str, *, value: int = 0) -> int:
        known = self._ids.setdefault(space, {})
        number = known.get(name)
        if number is None:
            number = known[name] = len(known)
            self.defines.append(Define(NO_OP, ThreadId(0), 0, space, number, name, value))
        return number

    def _base(self, op: OpId, step: Step) -> tuple[OpId, ThreadId, int]:
        return op, ThreadId(self._id(DefineSpace.THREAD, step.thread)), self.host_ns

    def _stream(self, name: str) -> StreamId:
        return StreamId(self._id(DefineSpace.STREAM, name))

    def _event(self, name: str) -> EventId:
        return EventId(self._id(DefineSpace.EVENT, name))

    def _site(self, step: Step, otherwise: str) -> int:
        return self._id(DefineSpace.SITE, step.name or otherwise)

    def _layers_of(self, step: Step | GraphEntry) -> tuple[int, int]:
        if step.layer is None:
            return ALL_LAYERS
        if self._layers is not None and step.layer >= self._layers:
            raise BadStep(f"layer {step.layer} of a scenario with {self._layers} layers; must be below")
        return step.layer, step.layer + 1

    def _work(self, step: WorkStep | GraphEntry) -> tuple[Access, ...]:
        return (
            *self._device(Mode.READ, step.reads),
            *self._device(Mode.WRITE, step.writes),
            *self._host(Mode.READ, step.reads_host),
            *self._host(Mode.WRITE, step.writes_host),
            *self._buffers(Mode.READ, step.reads_buf),
            *self._buffers(Mode.WRITE, step.writes_buf),
        )

    def _host(self, mode: Mode, pages: Sequence[int]) -> list[Access]:
        return _accesses(Space.HOST, mode, pages, self._id(DefineSpace.HOST_POOL, HOST_POOL)) if pages else []

    def _device(self, mode: Mode, pages: Iterable[DevicePage]) -> list[Access]:
        pools: dict[str, list[int]] = {}
        for page in pages:
            pool, number = (DEFAULT_POOL, page) if isinstance(page, int) else _split(page)
            if number >= MAX_IDS:
                raise BadStep(f"page {page!r}: must be below {MAX_IDS}")
            pools.setdefault(pool, []).append(number)
        return [
            access
            for pool, numbers in pools.items()
            for access in _accesses(Space.DEVICE, mode, numbers, self._id(DefineSpace.POOL, pool))
        ]

    def _buffers(self, mode: Mode, names: Iterable[str | None]) -> list[Access]:
        ids = [self._id(DefineSpace.BUFFER, name) for name in names if name is not None]
        return _accesses(Space.BUFFER, mode, ids)

    # -- one method per operation ----------------------------------------------------------------------------

    def kernel(self, op: OpId, step: KernelStep) -> Kernel:
        site, stream = self._site(step, f"kernel on {step.stream}"), self._stream(step.stream)
        rows = None if step.rows is None else self._rows(step, step.rows)
        if step.rows is not None:
            self._rounds[step.id] = op, step.rows
        return Kernel(*self._base(op, step), stream, site, op, 0, self._layers_of(step), self._work(step), rows)

    def _rows(self, step: KernelStep, rows: Sequence[Row]) -> PageIds:
        """What only reads, what does both, what only writes: the order that ``pack_rows`` asks for."""
        requests, pages, reads, writes = [], [], [], []
        for number, row in enumerate(rows):
            for key in ("reads", "writes"):
                strange = sorted(set(getattr(row, key)) - set(getattr(step, key)))
                if strange:
                    raise BadStep(f"key 'rows[{number}].{key}': page {strange[0]} is not in the step's own {key!r}")
            read, written = dict.fromkeys(row.reads), dict.fromkeys(row.writes)
            requests.append(self._id(DefineSpace.REQUEST, row.request))
            order = [p for p in read if p not in written] + [p for p in read if p in written]
            pages.append(page_ids([*order, *(p for p in written if p not in read)]))
            reads.append(len(read))
            writes.append(len(written))
        return pack_rows(requests, pages, reads, writes)

    def rows_discarded(self, op: OpId, step: RowsDiscardedStep) -> RowsDiscarded:
        if step.round not in self._rounds:
            raise BadStep(f"round {step.round!r} is no earlier kernel with rows; {_known('there are', self._rounds)}")
        number, rows = self._rounds[step.round]
        for request in step.requests:
            if request not in {row.request for row in rows}:
                raise BadStep(
                    f"request {request!r} has no row in round {step.round!r}; "
                    f"{_known('requests there', (row.request for row in rows))}"
                )
        requests = page_ids(self._id(DefineSpace.REQUEST, request) for request in step.requests)
        return RowsDiscarded(*self._base(op, step), number, requests)

    def memcpy(self, op: OpId, step: MemcpyStep) -> Memcpy:
        direction, source_key, target_key = _MEMCPY_KEYS[step.kind]
        for key in ("device_pages", "host_pages", "src_pages", "dst_pages"):
            if getattr(step, key) and key not in (source_key, target_key):
                raise BadStep(f"key {key!r} does not fit kind {step.kind!r}; it takes {source_key!r}, {target_key!r}")
        accesses = (
            *self._pages(source_key, Mode.READ, step),
            *self._buffers(Mode.READ, (step.src_buf,)),
            *self._pages(target_key, Mode.WRITE, step),
            *self._buffers(Mode.WRITE, (step.dst_buf,)),
        )
        for mode, key, buffer in ((Mode.READ, source_key, "src_buf"), (Mode.WRITE, target_key, "dst_buf")):
            if not any(access.mode is mode for access in accesses):
                raise BadStep(f"kind {step.kind!r} needs key {key!r} or {buffer!r}")
        site, stream = self._site(step, f"{step.kind} on {step.stream}"), self._stream(step.stream)
        return Memcpy(*self._base(op, step), stream, site, op, 0, self._layers_of(step), accesses, direction)

    def _pages(self, key: str, mode: Mode, step: MemcpyStep) -> list[Access]:
        if key == "host_pages":
            return self._host(mode, step.host_pages)
        return self._device(mode, getattr(step, key))

    def event_record(self, op: OpId, step: EventStreamStep) -> EventRecord:
        return EventRecord(*self._base(op, step), self._event(step.event), self._stream(step.stream))

    def event_wait(self, op: OpId, step: EventStreamStep) -> EventWait:
        return EventWait(*self._base(op, step), self._event(step.event), self._stream(step.stream))

    def wait_stream(self, op: OpId, step: WaitStreamStep) -> WaitStream:
        return WaitStream(*self._base(op, step), self._stream(step.waiter), self._stream(step.on))

    def event_query(self, op: OpId, step: EventQueryStep) -> EventQuery:
        return EventQuery(*self._base(op, step), self._event(step.event), step.result)

    def event_sync(self, op: OpId, step: EventSyncStep) -> EventSync:
        return EventSync(*self._base(op, step), self._event(step.event))

    def host_sync(self, op: OpId, step: HostSyncStep) -> HostSync:
        if (step.scope == "stream") != (step.stream is not None):
            raise BadStep("scope 'stream' needs key 'stream', and scope 'device' takes none")
        return HostSync(*self._base(op, step), None if step.stream is None else self._stream(step.stream))

    def host_access(self, op: OpId, step: HostAccessStep) -> HostAccess:
        accesses = (
            *self._host(Mode.READ, step.reads_host),
            *self._host(Mode.WRITE, step.writes_host),
            *self._buffers(Mode.READ, step.reads_buf),
            *self._buffers(Mode.WRITE, step.writes_buf),
        )
        site = self._site(step, f"host access on {step.thread}")
        return HostAccess(*self._base(op, step), site, self._layers_of(step), accesses)

    def alloc(self, op: OpId, step: PagesStep) -> PageAlloc:
        return PageAlloc(*self._base(op, step), self._id(DefineSpace.REQUEST, step.owner), self._owned(step)[0])

    def free(self, op: OpId, step: PagesStep) -> PageFree:
        return PageFree(*self._base(op, step), self._id(DefineSpace.REQUEST, step.owner), self._owned(step)[0])

    def _append_pools(self, step: PagesStep) -> None:
        """The records of an allocator's call for all its pools but the first."""
        kind = PageAlloc if step.op == "alloc" else PageFree
        owner = self._id(DefineSpace.REQUEST, step.owner)
        for access in self._owned(step)[1:]:
            self._append(kind(*self._base(self._next_op(), step), owner, access), step, step.dur_us)

    def _owned(self, step: PagesStep) -> list[Access]:
        """An access for each pool; one without pages for a call that got none."""
        numbers = [page for page in step.pages if isinstance(page, int)]
        if step.pool == "host" and len(numbers) < len(step.pages):
            raise BadStep("pages of pool 'host' must be numbers")
        found = self._host(Mode.WRITE, numbers) if step.pool == "host" else self._device(Mode.WRITE, step.pages)
        return found or [Access(Space[step.pool.upper()], Mode.WRITE, page_ids(()))]

    def relocate(self, op: OpId, step: RelocateStep) -> Relocate:
        accesses = (
            *self._device(Mode.READ, [old for old, _ in step.moves]),
            *self._device(Mode.WRITE, [new for _, new in step.moves]),
        )
        site, stream = self._site(step, f"relocate on {step.stream}"), self._stream(step.stream)
        return Relocate(*self._base(op, step), stream, site, self._layers_of(step), accesses)

    def graph_replay(self, op: OpId, step: GraphReplayStep) -> GraphReplay:
        accesses, layers = self._work(step), self._layers_of(step)
        if step.nodes is not None and (accesses or step.layer is not None):
            raise BadStep("states what it touches both itself and in 'nodes'; only one of them may")
        graph, stream = self._id(DefineSpace.GRAPH, step.graph), self._stream(step.stream)
        site, nodes = self._site(step, f"replay of {step.graph}"), len(step.nodes or ())
        return GraphReplay(*self._base(op, step), graph, stream, site, op, nodes, layers, accesses)

    def _append_nodes(self, step: GraphReplayStep, entries: Sequence[GraphEntry]) -> None:
        """The records of a graph's entries. Those that state no duration share what is left of the step's."""
        unstated = sum(entry.dur_us is None and entry.event_record is None for entry in entries)
        left_us = step.dur_us - sum(entry.dur_us or 0 for entry in entries if entry.event_record is None)
        share_us = max(0, left_us) / max(1, unstated)
        for index, entry in enumerate(entries):
            try:
                record = self._node(step, index, entry)
            except BadStep as error:
                raise BadStep(f"key 'nodes[{index}]': {error}") from None
            is_event = record.event is not None
            self._append(record, step, 0 if is_event else share_us if entry.dur_us is None else entry.dur_us)

    def _node(self, step: GraphReplayStep, index: int, entry: GraphEntry) -> GraphNode:
        accesses, layers = self._work(entry), self._layers_of(entry)
        event = None
        if entry.event_record is not None:
            if accesses:
                raise BadStep("an entry with 'event_record' touches nothing; it may have an 'after' beside it")
            event = self._event(entry.event_record)
        after = IN_ORDER
        if entry.after is not None:
            after = 0
            for number in entry.after:
                if number >= index:
                    raise BadStep(f"'after' names entry {number}; must name entries before this one, counted from 0")
                if number > MAX_AFTER:
                    raise BadStep(f"'after' names entry {number}; can name entries 0 to {MAX_AFTER} only")
                after |= 1 << number
        return GraphNode(*self._base(self._next_op(), step), index, after, event, layers, accesses)

    def io_begin(self, op: OpId, step: IoBeginStep) -> IoBegin:
        began = self._transfers.get(step.io)
        if began is not None:
            raise BadStep(
                f"io {step.io!r} began in step {began} and has not ended; end it first or choose another name"
            )
        self._transfers[step.io] = step.id
        accesses = (
            *self._host(Mode.READ, step.reads_host),
            *self._host(Mode.WRITE, step.writes_host),
            *self._device(Mode.READ, step.reads_device),
            *self._device(Mode.WRITE, step.writes_device),
        )
        io, site = self._id(DefineSpace.IO, step.io), self._site(step, f"{step.kind} on {step.thread}")
        kind = IoKind[step.kind.upper()]
        return IoBegin(*self._base(op, step), io, kind, site, self._layers_of(step), accesses)

    def io_end(self, op: OpId, step: IoEndStep) -> IoEnd:
        if step.io not in self._transfers:
            raise BadStep(f"io {step.io!r} has not begun; {_known('begun before', self._transfers)}")
        self._transfers[step.io] = None  # another thread may learn of the same end later
        return IoEnd(*self._base(op, step), self._id(DefineSpace.IO, step.io))

    def thread_post(self, op: OpId, step: ChannelStep) -> ThreadPost:
        self._posts[step.chan] += 1
        return ThreadPost(*self._base(op, step), self._id(DefineSpace.CHANNEL, step.chan))

    def thread_recv(self, op: OpId, step: ChannelStep) -> ThreadRecv:
        if not self._posts[step.chan]:
            raise BadStep(f"chan {step.chan!r} has no post left to receive; the n-th receive must follow the n-th post")
        self._posts[step.chan] -= 1
        return ThreadRecv(*self._base(op, step), self._id(DefineSpace.CHANNEL, step.chan))

    def tensor_alloc(self, op: OpId, step: TensorAllocStep) -> TensorAlloc:
        if step.tensor in self._tensors:
            raise BadStep(f"tensor {step.tensor!r} is live since step {self._tensors[step.tensor].id}; free it first")
        self._tensors[step.tensor] = step
        tensor, block = self._id(DefineSpace.TENSOR, step.tensor), self._id(DefineSpace.BUFFER, step.mem)
        return TensorAlloc(*self._base(op, step), tensor, block, self._stream(step.stream))

    def tensor_free(self, op: OpId, step: TensorFreeStep) -> TensorFree:
        alloc = self._live(step.tensor)
        for key in ("mem", "stream"):
            stated, known = getattr(step, key), getattr(alloc, key)
            if stated not in (None, known):
                raise BadStep(f"key {key!r}: is {stated!r}; tensor {step.tensor!r} was allocated with {known!r}")
        del self._tensors[step.tensor]
        return TensorFree(*self._base(op, step), self._id(DefineSpace.TENSOR, step.tensor))

    def record_stream(self, op: OpId, step: RecordStreamStep) -> RecordStream:
        self._live(step.tensor)
        tensor = self._id(DefineSpace.TENSOR, step.tensor)
        return RecordStream(*self._base(op, step), tensor, self._stream(step.stream))

    def _live(self, tensor: str) -> TensorAllocStep:
        alloc = self._tensors.get(tensor)
        if alloc is None:
            raise BadStep(f"tensor {tensor!r} is not allocated; {_known('allocated now', self._tensors)}")
        return alloc

    def collective(self, op: OpId, step: CollectiveStep) -> Collective:
        group, site = self._id(DefineSpace.GROUP, step.group), self._id(DefineSpace.SITE, step.name)
        return Collective(*self._base(op, step), group, step.rank, site)


_MAKERS: Final[dict[str, Callable[[_Program, OpId, Any], AnyRecord]]] = {
    op: getattr(_Program, op)  # each takes the step type of the same name
    for op in STEPS
}


def _known(state: str, names: Iterable[str]) -> str:
    shown = ", ".join(map(repr, names))
    return f"{state}: {shown or 'none'}"


def _split(page: str) -> tuple[str, int]:
    pool, _, number = page.rpartition(":")
    return pool, int(number)


def _accesses(space: Space, mode: Mode, ids: Sequence[int], pool: int = 0) -> list[Access]:
    """No access, or one; a page that is listed twice counts once."""
    return [Access(space, mode, page_ids(dict.fromkeys(ids)), pool)] if ids else []
