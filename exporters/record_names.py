"""What records are called in a timeline: host calls by what they did, waits by what they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hicache_obs.records import (
    AnyRecord,
    Collective,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostAccess,
    HostSync,
    Lost,
    PageAlloc,
    PageFree,
    Purpose,
    Record,
    RecordStream,
    RowsDiscarded,
    TensorAlloc,
    TensorFree,
    ThreadPost,
    ThreadRecv,
    WaitStream,
)
from hicache_obs.trace import Names

_PURPOSES: Final = {
    Purpose.PLAIN: "",
    Purpose.LOAD_FENCE: "load fence",
    Purpose.WRITE_FENCE: "write fence",
    Purpose.LAYER: "layer wait",
    Purpose.START: "start event",
}


def call_name(names: Names, record: AnyRecord) -> str:
    """What a host call that launches nothing did."""
    name = _CALLS.get(type(record))
    return type(record).__name__ if name is None else name(names, record)


def waited_for(names: Names, record: EventWait | WaitStream) -> str:
    """What a wait on a stream is for."""
    what = names.stream(record.on) if isinstance(record, WaitStream) else _event(names, record)
    purpose = _PURPOSES[record.purpose]
    return f"{what} ({purpose})" if purpose else what


def _event(names: Names, record: EventRecord | EventWait | EventQuery | EventSync) -> str:
    return names.events.get(record.event, f"event {record.event}")


def _synchronised(names: Names, record: HostSync) -> str:
    return "synchronised with " + ("all streams" if record.stream is None else names.stream(record.stream))


_CALLS: Final[dict[type[Record], Callable[[Names, Any], str]]] = {
    EventRecord: lambda n, r: f"record {_event(n, r)} on {n.stream(r.stream)}",
    EventWait: lambda n, r: f"{n.stream(r.stream)} waits for {waited_for(n, r)}",
    WaitStream: lambda n, r: f"{n.stream(r.waiter)} waits for {waited_for(n, r)}",
    EventQuery: lambda n, r: f"query {_event(n, r)}: {'complete' if r.result else 'not complete'}",
    EventSync: lambda n, r: f"synchronised with {_event(n, r)}",
    HostSync: _synchronised,
    HostAccess: lambda n, r: f"host access: {n.site(r.site)}",
    PageAlloc: lambda n, r: "allocate pages",
    PageFree: lambda n, r: "free pages",
    RecordStream: lambda n, r: f"record_stream {n.stream(r.stream)}",
    Lost: lambda n, r: f"{r.count} records lost: {r.reason.name.lower()}",
    ThreadPost: lambda n, r: f"post to {n.channels.get(r.channel, f'channel {r.channel}')}",
    ThreadRecv: lambda n, r: f"receive from {n.channels.get(r.channel, f'channel {r.channel}')}",
    TensorAlloc: lambda n, r: f"allocate {n.tensors.get(r.tensor, f'tensor {r.tensor}')}",
    TensorFree: lambda n, r: f"free {n.tensors.get(r.tensor, f'tensor {r.tensor}')}",
    Collective: lambda n, r: f"collective: {n.site(r.site)}",
    RowsDiscarded: lambda n, r: f"discard rows of round {r.group}",
}
