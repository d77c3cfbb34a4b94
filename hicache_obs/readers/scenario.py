"""Reads a scenario: a small program trace as JSON (``tests/cases/README.md`` has the vocabulary).

Step ``sN`` of the file becomes the record with operation id N, its position in the file; ``Trace.labels`` has the
step ids. ``expect`` is never read. A scenario states no device times, so no ``Times`` record comes out of it; stated
durations are in ``Trace.planned_ns``, for simulations.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from hicache_obs.errors import TraceError
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    Access,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostAccess,
    HostSync,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    Space,
    StreamId,
    StreamKind,
    ThreadId,
    WaitStream,
    page_ids,
)
from hicache_obs.trace import Trace, make_trace

MAX_BYTES: Final = 64 << 20
DEFAULT_POOL: Final = "kv"
DEFAULT_THREAD: Final = "main"
_NS_PER_US: Final = 1000

HostPage = Annotated[int, Meta(ge=0, lt=2**31)]
DevicePage = HostPage | Annotated[str, Meta(pattern=r"^[^:]+:[0-9]{1,9}$")]
Micros = Annotated[float, Meta(ge=0, le=1e12)]
Name = Annotated[str, Meta(min_length=1)]


class _Step(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Keys that every step may have."""

    id: Name
    op: str
    thread: Name = DEFAULT_THREAD
    rank: Annotated[int, Meta(ge=0)] = 0
    name: str = ""
    dur_us: Micros = 10
    host_us: Micros = 2
    layer: Annotated[int, Meta(ge=0, lt=2**31 - 1)] | None = None


class _KernelStep(_Step, kw_only=True, frozen=True):
    stream: Name
    reads: tuple[DevicePage, ...] = ()
    writes: tuple[DevicePage, ...] = ()
    reads_host: tuple[HostPage, ...] = ()
    writes_host: tuple[HostPage, ...] = ()
    reads_buf: tuple[Name, ...] = ()
    writes_buf: tuple[Name, ...] = ()


class _MemcpyStep(_Step, kw_only=True, frozen=True):
    kind: Literal["h2d", "d2h", "d2d"]
    stream: Name
    device_pages: tuple[DevicePage, ...] = ()
    host_pages: tuple[HostPage, ...] = ()
    src_pages: tuple[DevicePage, ...] = ()
    dst_pages: tuple[DevicePage, ...] = ()
    src_buf: Name | None = None
    dst_buf: Name | None = None


class _EventStreamStep(_Step, kw_only=True, frozen=True):
    event: Name
    stream: Name


class _WaitStreamStep(_Step, kw_only=True, frozen=True):
    waiter: Name
    on: Name


class _EventQueryStep(_Step, kw_only=True, frozen=True):
    event: Name
    result: bool


class _EventSyncStep(_Step, kw_only=True, frozen=True):
    event: Name


class _HostSyncStep(_Step, kw_only=True, frozen=True):
    scope: Literal["stream", "device"]
    stream: Name | None = None


class _HostAccessStep(_Step, kw_only=True, frozen=True):
    reads_buf: tuple[Name, ...] = ()
    writes_buf: tuple[Name, ...] = ()
    reads_host: tuple[HostPage, ...] = ()
    writes_host: tuple[HostPage, ...] = ()


class _PagesStep(_Step, kw_only=True, frozen=True):
    pool: Literal["device", "host"]
    pages: tuple[DevicePage, ...]
    owner: str = ""


class _StreamDecl(Struct, forbid_unknown_fields=True, frozen=True):
    kind: Literal["nonblocking", "blocking", "legacy"] = "nonblocking"


class _File(Struct, forbid_unknown_fields=True, frozen=True):
    """The keys of a file; those that only describe it may hold anything."""

    steps: tuple[msgspec.Raw, ...]
    streams: dict[Name, _StreamDecl] = {}
    layers: Annotated[int, Meta(ge=1)] | None = None
    id: msgspec.Raw = msgspec.Raw()
    title: msgspec.Raw = msgspec.Raw()
    role: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()
    note: msgspec.Raw = msgspec.Raw()
    exhaustive: msgspec.Raw = msgspec.Raw()
    expect: msgspec.Raw = msgspec.Raw()


NOT_YET: Final = frozenset(
    {
        "graph_replay",
        "relocate",
        "io_begin",
        "io_end",
        "thread_post",
        "thread_recv",
        "tensor_alloc",
        "tensor_free",
        "record_stream",
        "collective",
    }
)
"""Operations of the format that have no record kind yet."""

_CHOICES: Final[dict[type[Struct], str]] = {
    _MemcpyStep: "h2d, d2h, d2d",
    _HostSyncStep: "stream, device",
    _PagesStep: "device, host",
    _File: "nonblocking, blocking, legacy",
}
"""Values of the one key of each that takes a fixed set."""
_MEMCPY_KEYS: Final = {
    "h2d": (Direction.HOST_TO_DEVICE, "host_pages", "device_pages"),
    "d2h": (Direction.DEVICE_TO_HOST, "device_pages", "host_pages"),
    "d2d": (Direction.DEVICE_TO_DEVICE, "src_pages", "dst_pages"),
}
StepT = TypeVar("StepT", bound=_Step)


def read_scenario(path: str | os.PathLike[str]) -> Trace:
    """The records of a scenario file, definitions first.

    Raises:
        TraceError: The file is not a scenario, or uses an operation that is not supported yet; names the step.
    """
    target = Path(path)
    try:
        if target.stat().st_size > MAX_BYTES:
            raise TraceError(f"{target}: larger than {MAX_BYTES} bytes, the most a scenario may have")
        data = target.read_bytes()
    except OSError as error:
        raise TraceError(f"{target}: {error.strerror}") from None
    return parse_scenario(data, source=str(target))


def parse_scenario(data: bytes, *, source: str) -> Trace:
    """Like ``read_scenario``, of a file's contents; ``source`` stands for its name in messages."""
    try:
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise TraceError(f"{source}: {_explain(error, _File)}") from None
    program = _Program(file)
    for position, raw in enumerate(file.steps, 1):
        step_id = f"number {position}"
        try:
            try:
                fields = msgspec.json.decode(raw)
                if isinstance(fields, dict) and isinstance(fields.get("id"), str):
                    step_id = fields["id"]
                program.add(OpId(position), _check(fields))
            except (msgspec.ValidationError, RecursionError) as error:
                raise _BadStep(str(error)) from None
        except _BadStep as error:
            raise TraceError(f"{source}: step {step_id}: {error}") from None
    return make_trace(
        source, [*program.defines, *program.records], labels=program.labels, planned_ns=program.planned_ns
    )


class _BadStep(Exception):
    """Says what is wrong with a step."""


class _Program:
    """Turns checked steps into records and numbers the names in them, in order of appearance."""

    def __init__(self, file: _File) -> None:
        self.records: list[AnyRecord] = []
        self.defines: list[Define] = []
        self.labels: dict[OpId, str] = {}
        self.planned_ns: dict[OpId, int] = {}
        self._layers = file.layers
        self._ids: dict[tuple[DefineSpace, str], int] = {}
        self._seen: dict[str, int] = {}
        self._host_ns = 0
        self._id(DefineSpace.THREAD, DEFAULT_THREAD)
        self._id(DefineSpace.POOL, DEFAULT_POOL, value=file.layers or 0)
        for name, stream in file.streams.items():
            self._id(DefineSpace.STREAM, name, value=StreamKind[stream.kind.upper()])

    def add(self, op: OpId, step: _Step) -> None:
        """Append the record of one step."""
        if step.id in self._seen:
            raise _BadStep(f"id {step.id!r} is taken by step number {self._seen[step.id]}; ids must be unique")
        if step.rank:
            raise _BadStep(f"rank {step.rank} is not supported yet; only rank 0 is")
        if step.layer is not None and self._layers is not None and step.layer >= self._layers:
            raise _BadStep(f"layer {step.layer} of a scenario with {self._layers} layers; must be below")
        record = _MAKERS[step.op](self, op, step)
        self._seen[step.id] = op
        self.labels[op] = step.id
        self.planned_ns[op] = round(step.dur_us * _NS_PER_US)
        self.records.append(record)
        self._host_ns += round(step.host_us * _NS_PER_US)

    def _id(self, space: DefineSpace, name: str, *, value: int = 0) -> int:
        key = (space, name)
        number = self._ids.get(key)
        if number is None:
            number = sum(1 for other, _ in self._ids if other is space)
            self._ids[key] = number
            self.defines.append(Define(NO_OP, ThreadId(0), 0, space, number, name, value))
        return number

    def _base(self, op: OpId, step: _Step) -> tuple[OpId, ThreadId, int]:
        return op, ThreadId(self._id(DefineSpace.THREAD, step.thread)), self._host_ns

    def _stream(self, name: str) -> StreamId:
        return StreamId(self._id(DefineSpace.STREAM, name))

    def _event(self, name: str) -> EventId:
        return EventId(self._id(DefineSpace.EVENT, name))

    def _site(self, step: _Step, otherwise: str) -> int:
        return self._id(DefineSpace.SITE, step.name or otherwise)

    def _layers_of(self, step: _Step) -> tuple[int, int]:
        return ALL_LAYERS if step.layer is None else (step.layer, step.layer + 1)

    def _device(self, mode: Mode, pages: Iterable[int | str]) -> list[Access]:
        pools: dict[str, list[int]] = {}
        for page in pages:
            pool, number = (DEFAULT_POOL, page) if isinstance(page, int) else _split(page)
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

    def kernel(self, op: OpId, step: _KernelStep) -> Kernel:
        accesses = (
            *self._device(Mode.READ, step.reads),
            *self._device(Mode.WRITE, step.writes),
            *_accesses(Space.HOST, Mode.READ, step.reads_host),
            *_accesses(Space.HOST, Mode.WRITE, step.writes_host),
            *self._buffers(Mode.READ, step.reads_buf),
            *self._buffers(Mode.WRITE, step.writes_buf),
        )
        site, stream = self._site(step, f"kernel on {step.stream}"), self._stream(step.stream)
        return Kernel(*self._base(op, step), stream, site, op, 0, self._layers_of(step), accesses)

    def memcpy(self, op: OpId, step: _MemcpyStep) -> Memcpy:
        direction, source_key, target_key = _MEMCPY_KEYS[step.kind]
        for key in ("device_pages", "host_pages", "src_pages", "dst_pages"):
            if getattr(step, key) and key not in (source_key, target_key):
                raise _BadStep(f"key {key!r} does not fit kind {step.kind!r}; it takes {source_key!r}, {target_key!r}")
        accesses = (
            *self._pages(source_key, Mode.READ, step),
            *self._buffers(Mode.READ, (step.src_buf,)),
            *self._pages(target_key, Mode.WRITE, step),
            *self._buffers(Mode.WRITE, (step.dst_buf,)),
        )
        for mode, key, buffer in ((Mode.READ, source_key, "src_buf"), (Mode.WRITE, target_key, "dst_buf")):
            if not any(access.mode is mode for access in accesses):
                raise _BadStep(f"kind {step.kind!r} needs key {key!r} or {buffer!r}")
        site, stream = self._site(step, f"{step.kind} on {step.stream}"), self._stream(step.stream)
        return Memcpy(*self._base(op, step), stream, site, op, 0, self._layers_of(step), accesses, direction)

    def _pages(self, key: str, mode: Mode, step: _MemcpyStep) -> list[Access]:
        if key == "host_pages":
            return _accesses(Space.HOST, mode, step.host_pages)
        return self._device(mode, getattr(step, key))

    def event_record(self, op: OpId, step: _EventStreamStep) -> EventRecord:
        return EventRecord(*self._base(op, step), self._event(step.event), self._stream(step.stream))

    def event_wait(self, op: OpId, step: _EventStreamStep) -> EventWait:
        return EventWait(*self._base(op, step), self._event(step.event), self._stream(step.stream))

    def wait_stream(self, op: OpId, step: _WaitStreamStep) -> WaitStream:
        return WaitStream(*self._base(op, step), self._stream(step.waiter), self._stream(step.on))

    def event_query(self, op: OpId, step: _EventQueryStep) -> EventQuery:
        return EventQuery(*self._base(op, step), self._event(step.event), step.result)

    def event_sync(self, op: OpId, step: _EventSyncStep) -> EventSync:
        return EventSync(*self._base(op, step), self._event(step.event))

    def host_sync(self, op: OpId, step: _HostSyncStep) -> HostSync:
        if (step.scope == "stream") != (step.stream is not None):
            raise _BadStep("scope 'stream' needs key 'stream', and scope 'device' takes none")
        return HostSync(*self._base(op, step), None if step.stream is None else self._stream(step.stream))

    def host_access(self, op: OpId, step: _HostAccessStep) -> HostAccess:
        accesses = (
            *_accesses(Space.HOST, Mode.READ, step.reads_host),
            *_accesses(Space.HOST, Mode.WRITE, step.writes_host),
            *self._buffers(Mode.READ, step.reads_buf),
            *self._buffers(Mode.WRITE, step.writes_buf),
        )
        site = self._site(step, f"host access on {step.thread}")
        return HostAccess(*self._base(op, step), site, self._layers_of(step), accesses)

    def alloc(self, op: OpId, step: _PagesStep) -> PageAlloc:
        return PageAlloc(*self._base(op, step), self._id(DefineSpace.REQUEST, step.owner), self._owned(step))

    def free(self, op: OpId, step: _PagesStep) -> PageFree:
        return PageFree(*self._base(op, step), self._id(DefineSpace.REQUEST, step.owner), self._owned(step))

    def _owned(self, step: _PagesStep) -> Access:
        if step.pool == "host":
            numbers = [page for page in step.pages if isinstance(page, int)]
            if len(numbers) < len(step.pages):
                raise _BadStep("pages of pool 'host' must be numbers")
            found = _accesses(Space.HOST, Mode.WRITE, numbers)
        else:
            found = self._device(Mode.WRITE, step.pages)
        if len(found) != 1:
            raise _BadStep(f"pages of {len(found)} pools; one step takes pages of exactly one")
        return found[0]


_STEPS: Final[dict[str, type[_Step]]] = {
    "kernel": _KernelStep,
    "memcpy": _MemcpyStep,
    "event_record": _EventStreamStep,
    "event_wait": _EventStreamStep,
    "wait_stream": _WaitStreamStep,
    "event_query": _EventQueryStep,
    "event_sync": _EventSyncStep,
    "host_sync": _HostSyncStep,
    "host_access": _HostAccessStep,
    "alloc": _PagesStep,
    "free": _PagesStep,
}
_MAKERS: Final[dict[str, Callable[[_Program, OpId, Any], AnyRecord]]] = {
    op: getattr(_Program, op)  # each takes the step type of the same name
    for op in _STEPS
}


def _check(fields: object) -> _Step:
    """``fields`` as a step of its operation."""
    if not isinstance(fields, dict):
        raise _BadStep(f"is {type(fields).__name__}; must be an object")
    op = fields.get("op")
    if not isinstance(op, str):
        raise _BadStep("needs key 'op', a string")
    if op in NOT_YET:
        raise _BadStep(f"op {op!r} is not supported yet")
    kind = _STEPS.get(op)
    if kind is None:
        raise _BadStep(f"op {op!r} is unknown; known are {', '.join([*_STEPS, *sorted(NOT_YET)])}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise _BadStep(_explain(error, kind)) from None


def _explain(error: Exception, kind: type[Struct]) -> str:
    """msgspec's message in the words of the format, with what was allowed."""
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return f"not JSON that can be read: {text}"
    at = re.search(r" - at `\$\.?(.*)`$", text)
    if at:
        text = text[: at.start()]
        if at[1]:
            text = f"key {at[1]!r}: {text}"
    if "Invalid enum value" in text:
        text += f"; must be one of {_CHOICES[kind]}"
    text = text.replace("Invalid enum value", "is").replace("Object missing required field", "needs key")
    text = re.sub(r"Expected `str` matching regex.*", "must be a number or 'pool:number'", text)
    if "unknown field" in text:
        text = text.replace("Object contains unknown field", "unknown key")
        text += f"; known are {', '.join(kind.__struct_fields__)}"
    return text.replace("`", "'")


def _split(page: str) -> tuple[str, int]:
    pool, _, number = page.rpartition(":")
    return pool, int(number)


def _accesses(space: Space, mode: Mode, ids: Sequence[int], pool: int = 0) -> list[Access]:
    """No access, or one; a page that is listed twice counts once."""
    return [Access(space, mode, page_ids(dict.fromkeys(ids)), pool)] if ids else []
