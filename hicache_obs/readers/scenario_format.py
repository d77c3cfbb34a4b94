"""The keys of a scenario file and of each of its steps, as types that ``msgspec`` checks; what a bad one is told.

``tests/cases/README.md`` has the vocabulary, ``scenario`` makes records of it.
"""

from __future__ import annotations

import json
import re
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta, Struct

from hicache_obs.records import MAX_IDS, MAX_NODES

DEFAULT_THREAD: Final = "main"
SHOWN: Final = 60
"""Characters of a wrong value that a message repeats."""

HostPage = Annotated[int, Meta(ge=0, lt=MAX_IDS)]
DevicePage = HostPage | Annotated[str, Meta(pattern=r"^[^:]+:[0-9]{1,9}$")]
Micros = Annotated[float, Meta(ge=0, le=1e12)]
Layer = Annotated[int, Meta(ge=0, lt=2**31 - 1)]
Name = Annotated[str, Meta(min_length=1)]


class BadStep(Exception):
    """Says what is wrong with a step."""


class Step(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """Keys that every step may have."""

    id: Name
    op: str
    thread: Name = DEFAULT_THREAD
    rank: Annotated[int, Meta(ge=0)] = 0
    name: str = ""
    dur_us: Micros = 10
    host_us: Micros = 2
    layer: Layer | None = None


class WorkStep(Step, kw_only=True, frozen=True):
    stream: Name
    reads: tuple[DevicePage, ...] = ()
    writes: tuple[DevicePage, ...] = ()
    reads_host: tuple[HostPage, ...] = ()
    writes_host: tuple[HostPage, ...] = ()
    reads_buf: tuple[Name, ...] = ()
    writes_buf: tuple[Name, ...] = ()


class Row(Struct, forbid_unknown_fields=True, frozen=True):
    """One of the ``rows`` of a kernel."""

    request: Name
    reads: tuple[HostPage, ...] = ()
    writes: tuple[HostPage, ...] = ()


class KernelStep(WorkStep, kw_only=True, frozen=True):
    rows: Annotated[tuple[Row, ...], Meta(min_length=1)] | None = None


class RowsDiscardedStep(Step, kw_only=True, frozen=True):
    round: Name
    requests: Annotated[tuple[Name, ...], Meta(min_length=1)]


class MemcpyStep(Step, kw_only=True, frozen=True):
    kind: Literal["h2d", "d2h", "d2d"]
    stream: Name
    device_pages: tuple[DevicePage, ...] = ()
    host_pages: tuple[HostPage, ...] = ()
    src_pages: tuple[DevicePage, ...] = ()
    dst_pages: tuple[DevicePage, ...] = ()
    src_buf: Name | None = None
    dst_buf: Name | None = None


class EventStreamStep(Step, kw_only=True, frozen=True):
    event: Name
    stream: Name


class WaitStreamStep(Step, kw_only=True, frozen=True):
    waiter: Name
    on: Name


class EventQueryStep(Step, kw_only=True, frozen=True):
    event: Name
    result: bool


class EventSyncStep(Step, kw_only=True, frozen=True):
    event: Name


class HostSyncStep(Step, kw_only=True, frozen=True):
    scope: Literal["stream", "device"]
    stream: Name | None = None


class HostAccessStep(Step, kw_only=True, frozen=True):
    reads_buf: tuple[Name, ...] = ()
    writes_buf: tuple[Name, ...] = ()
    reads_host: tuple[HostPage, ...] = ()
    writes_host: tuple[HostPage, ...] = ()


class PagesStep(Step, kw_only=True, frozen=True):
    pool: Literal["device", "host"]
    pages: tuple[DevicePage, ...]
    owner: str = ""


class GraphEntry(Struct, forbid_unknown_fields=True, kw_only=True, frozen=True):
    """One of the ``nodes`` of a graph replay; ``name`` is for people only."""

    name: str = ""
    after: tuple[Annotated[int, Meta(ge=0)], ...] | None = None
    event_record: Name | None = None
    dur_us: Micros | None = None
    layer: Layer | None = None
    reads: tuple[DevicePage, ...] = ()
    writes: tuple[DevicePage, ...] = ()
    reads_host: tuple[HostPage, ...] = ()
    writes_host: tuple[HostPage, ...] = ()
    reads_buf: tuple[Name, ...] = ()
    writes_buf: tuple[Name, ...] = ()


class GraphReplayStep(WorkStep, kw_only=True, frozen=True):
    graph: Name
    nodes: Annotated[tuple[GraphEntry, ...], Meta(min_length=1, max_length=MAX_NODES)] | None = None


class RelocateStep(Step, kw_only=True, frozen=True):
    stream: Name
    moves: Annotated[tuple[tuple[DevicePage, DevicePage], ...], Meta(min_length=1)]


class IoBeginStep(Step, kw_only=True, frozen=True):
    io: Name
    kind: Literal["storage_read", "storage_write", "device_read", "rdma_write"]
    reads_host: tuple[HostPage, ...] = ()
    writes_host: tuple[HostPage, ...] = ()
    reads_device: tuple[DevicePage, ...] = ()
    writes_device: tuple[DevicePage, ...] = ()


class IoEndStep(Step, kw_only=True, frozen=True):
    io: Name


class ChannelStep(Step, kw_only=True, frozen=True):
    chan: Name


class TensorAllocStep(Step, kw_only=True, frozen=True):
    tensor: Name
    mem: Name
    stream: Name


class TensorFreeStep(Step, kw_only=True, frozen=True):
    tensor: Name
    mem: Name | None = None
    stream: Name | None = None


class RecordStreamStep(Step, kw_only=True, frozen=True):
    tensor: Name
    stream: Name


class CollectiveStep(Step, kw_only=True, frozen=True):
    group: Name
    name: Name


class StreamDeclaration(Struct, forbid_unknown_fields=True, frozen=True):
    kind: Literal["nonblocking", "blocking", "legacy"] = "nonblocking"


class Shared(Struct, forbid_unknown_fields=True, frozen=True):
    """What another process may record or touch; the host pool is called ``host``."""

    events: tuple[Name, ...] = ()
    buffers: tuple[Name, ...] = ()
    pools: tuple[Name, ...] = ()


class ScenarioFile(Struct, forbid_unknown_fields=True, frozen=True):
    """The keys of a file; those that only describe it may hold anything."""

    steps: tuple[msgspec.Raw, ...]
    streams: dict[Name, StreamDeclaration] = {}
    layers: Annotated[int, Meta(ge=1)] | None = None
    shared: Shared = Shared()
    early: tuple[Name, ...] = ()
    id: msgspec.Raw = msgspec.Raw()
    title: msgspec.Raw = msgspec.Raw()
    role: msgspec.Raw = msgspec.Raw()
    source: msgspec.Raw = msgspec.Raw()
    note: msgspec.Raw = msgspec.Raw()
    exhaustive: msgspec.Raw = msgspec.Raw()
    expect: msgspec.Raw = msgspec.Raw()


STEPS: Final[dict[str, type[Step]]] = {
    "kernel": KernelStep,
    "memcpy": MemcpyStep,
    "relocate": RelocateStep,
    "graph_replay": GraphReplayStep,
    "event_record": EventStreamStep,
    "event_wait": EventStreamStep,
    "wait_stream": WaitStreamStep,
    "event_query": EventQueryStep,
    "event_sync": EventSyncStep,
    "host_sync": HostSyncStep,
    "host_access": HostAccessStep,
    "io_begin": IoBeginStep,
    "io_end": IoEndStep,
    "thread_post": ChannelStep,
    "thread_recv": ChannelStep,
    "alloc": PagesStep,
    "free": PagesStep,
    "tensor_alloc": TensorAllocStep,
    "tensor_free": TensorFreeStep,
    "record_stream": RecordStreamStep,
    "collective": CollectiveStep,
    "rows_discarded": RowsDiscardedStep,
}
"""What each operation may say; these are all operations of the format."""

_CHOICES: Final[dict[type[Struct], str]] = {
    MemcpyStep: "h2d, d2h, d2d",
    HostSyncStep: "stream, device",
    IoBeginStep: "storage_read, storage_write, device_read, rdma_write",
    PagesStep: "device, host",
    ScenarioFile: "nonblocking, blocking, legacy",
}
"""Values of the one key of each that takes a fixed set."""


_WITHIN: Final[dict[str, type[Struct]]] = {
    "nodes[": GraphEntry,
    "rows[": Row,
    "streams[": StreamDeclaration,
    "shared": Shared,
}
"""What keys hold that hold objects."""


def check_step(fields: object) -> Step:
    """``fields`` as a step of its operation.

    Raises:
        BadStep: They are none; says what was allowed.
    """
    if not isinstance(fields, dict):
        raise BadStep(f"is {type(fields).__name__}; must be an object")
    op = fields.get("op")
    if not isinstance(op, str):
        raise BadStep("needs key 'op', a string")
    kind = STEPS.get(op)
    if kind is None:
        raise BadStep(f"op {op!r} is unknown; known are {', '.join(STEPS)}")
    try:
        return msgspec.convert(fields, kind)
    except msgspec.ValidationError as error:
        raise BadStep(explain(error, kind, fields)) from None


def explain(error: Exception, kind: type[Struct], fields: object = None) -> str:
    """msgspec's message in the words of the format, with what was allowed and what there is instead.

    Args:
        fields: The object that ``kind`` does not fit; without it the value is named only where msgspec names it.
    """
    text = str(error)
    if not isinstance(error, msgspec.ValidationError):
        return f"not JSON that can be read: {text}"
    at = re.search(r" - at `\$\.?(.*)`$", text)
    if at:
        text = text[: at.start()]
        if at[1].strip("[.]"):
            text = f"key {at[1]!r}: {text}"
    if "Invalid enum value" in text:
        text += f"; must be one of {_CHOICES[kind]}"
    text = text.replace("Invalid enum value", "is").replace("Object missing required field", "needs key")
    text = re.sub(r"Expected `str` matching regex.*", "must be a number or 'pool:number'", text)
    if at and re.search(r"Expected|must be a number", text):
        text += _found(fields, at[1])
    if "unknown field" in text:
        text = text.replace("Object contains unknown field", "unknown key")
        within = (kind for key, kind in _WITHIN.items() if at and at[1].startswith(key))
        kind = next(within, kind)
        text += f"; known are {', '.join(kind.__struct_fields__)}"
    return text.replace("`", "'")


def _found(fields: object, path: str) -> str:
    """What is at ``path`` (``nodes[0].after[1]``) of ``fields``, as the end of a message; empty if it has no name."""
    for key, index in re.findall(r"([^.\[\]]+)|\[(\d+)\]", path):
        if isinstance(fields, dict) and key in fields:
            fields = fields[key]
        elif isinstance(fields, list) and index and int(index) < len(fields):
            fields = fields[int(index)]
        else:
            return ""
    shown = json.dumps(fields)
    return f"; is {shown if len(shown) <= SHOWN else shown[:SHOWN] + '...'}"
