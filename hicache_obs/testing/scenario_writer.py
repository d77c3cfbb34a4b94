"""A trace as a scenario: the partner of ``hicache_obs.readers.scenario``, for programs that people go on to edit.

What a scenario has no word for is left out if it cannot matter (device times, names of nothing) and refused if it can
(lost records). A range of several layers becomes all layers: a scenario names one layer or none.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from hicache_obs.errors import TraceError
from hicache_obs.readers.scenario import DEFAULT_POOL, HOST_POOL
from hicache_obs.readers.scenario_format import DEFAULT_THREAD
from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    MAX_AFTER,
    Access,
    Collective,
    Define,
    DefineSpace,
    Direction,
    DropReason,
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
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    Record,
    RecordStream,
    Relocate,
    Space,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
)
from hicache_obs.trace import Trace

Fields = dict[str, Any]
"""Keys of a step or of a file, as JSON has them."""

_KINDS: Final = {
    Direction.HOST_TO_DEVICE: "h2d",
    Direction.DEVICE_TO_HOST: "d2h",
    Direction.DEVICE_TO_DEVICE: "d2d",
}
_PAGE_KEYS: Final = {
    Direction.HOST_TO_DEVICE: {(Space.HOST, Mode.READ): "host_pages", (Space.DEVICE, Mode.WRITE): "device_pages"},
    Direction.DEVICE_TO_HOST: {(Space.DEVICE, Mode.READ): "device_pages", (Space.HOST, Mode.WRITE): "host_pages"},
    Direction.DEVICE_TO_DEVICE: {(Space.DEVICE, Mode.READ): "src_pages", (Space.DEVICE, Mode.WRITE): "dst_pages"},
}
_KERNEL_KEYS: Final = {
    (Space.DEVICE, Mode.READ): "reads",
    (Space.DEVICE, Mode.WRITE): "writes",
    (Space.HOST, Mode.READ): "reads_host",
    (Space.HOST, Mode.WRITE): "writes_host",
    (Space.BUFFER, Mode.READ): "reads_buf",
    (Space.BUFFER, Mode.WRITE): "writes_buf",
}
_HOST_KEYS: Final = {key: name for key, name in _KERNEL_KEYS.items() if key[0] is not Space.DEVICE}
_IO_KEYS: Final = {
    (Space.HOST, Mode.READ): "reads_host",
    (Space.HOST, Mode.WRITE): "writes_host",
    (Space.DEVICE, Mode.READ): "reads_device",
    (Space.DEVICE, Mode.WRITE): "writes_device",
}
_UNSTATED: Final = "unstated"
"""Buffer on the side of a copy that the trace says nothing about."""


def write_scenario(trace: Trace) -> tuple[Fields, dict[OpId, str]]:
    """``trace`` as the object of a scenario file, and the step id of each operation in it.

    Raises:
        TraceError: The trace holds something a scenario cannot say; names the operation.
    """
    writer = _Writer(trace)
    for record in trace:
        writer.add(record)
    streams = {
        writer.stream(stream): {"kind": kind.name.lower()}
        for stream, kind in trace.names.stream_kinds.items()
        if kind is not StreamKind.NONBLOCKING
    }
    head: Fields = {"streams": streams, "shared": writer.shared, "early": writer.early}
    return {**{key: value for key, value in head.items() if value}, "steps": writer.steps}, writer.ids


def render(scenario: Mapping[str, Any]) -> str:
    """The JSON text of a scenario, one step per line."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in scenario.items() if key != "steps"]
    steps = ",\n  ".join(json.dumps(step) for step in scenario["steps"])
    return "{" + "".join(f"{part},\n " for part in parts) + f'"steps": [\n  {steps}\n]}}\n'


class _Names:
    """A name of its own for every id of one kind."""

    def __init__(self, known: Mapping[Any, str], otherwise: str) -> None:
        self._known = known
        self._otherwise = otherwise
        self._given: dict[int, str] = {}
        self._taken: set[str] = set()

    def __call__(self, number: int) -> str:
        if number not in self._given:
            name = self._known.get(number, "").replace(":", ".") or f"{self._otherwise}{number}"
            while name in self._taken:
                name += f"#{number}"
            self._given[number] = name
            self._taken.add(name)
        return self._given[number]


class _Writer:
    """Turns records into steps, in order."""

    def __init__(self, trace: Trace) -> None:
        names = trace.names
        self.steps: list[Fields] = []
        self.ids: dict[OpId, str] = {}
        self.shared: dict[str, list[str]] = {}
        self.early: list[str] = []
        self._trace = trace
        self._nodes_left = 0
        self._ios: set[int] = set()
        self._tensors: set[int] = set()
        self.stream = _Names(names.streams, "stream ")
        self._event = _Names(names.events, "e")
        threads = {number: DEFAULT_THREAD if name == "MainThread" else name for number, name in names.threads.items()}
        self._thread = _Names(threads, "thread ")
        self._pool = _Names(names.pools, "pool ")
        self._buffer = _Names(names.buffers, "buffer ")
        self._channel = _Names(names.channels, "channel ")
        self._graph = _Names(names.graphs, "graph ")
        self._io = _Names(names.ios, "io ")
        self._tensor = _Names(names.tensors, "tensor ")
        self._group = _Names(names.groups, "group ")
        self._owner = _Names(names.requests, "request ")

    def add(self, record: Record) -> None:
        """Append what ``record`` says, if it says anything."""
        if isinstance(record, Define):
            self._mark(record)
            return
        if isinstance(record, Times) or (isinstance(record, Lost) and record.reason is DropReason.UNRESOLVED):
            return  # device times, no edge
        if isinstance(record, GraphNode):
            self._add_node(record)
            return
        make = _MAKERS.get(type(record))
        if make is None:
            raise self._refuse(record, "records were lost before it")
        fields = make(self, record)
        if fields is None:
            return
        step_id = f"s{len(self.steps) + 1}"
        self.ids[record.op] = step_id
        head: Fields = {"id": step_id, "op": _OPS[type(record)]}
        thread = self._thread(record.thread)
        if thread != DEFAULT_THREAD:
            head["thread"] = thread
        self.steps.append({**head, **{key: value for key, value in fields.items() if value not in ("", [], None)}})

    def _mark(self, define: Define) -> None:
        """What another process has a hand in, and which kernels may start early; other names come with their steps."""
        number = define.id
        if define.space is DefineSpace.EARLY_SITE:
            self.early.append(self._site(number))
        elif define.space is DefineSpace.SHARED_EVENT:
            self.shared.setdefault("events", []).append(self._event(number))
        elif define.space is DefineSpace.SHARED_BUFFER:
            self.shared.setdefault("buffers", []).append(self._buffer(number))
        elif define.space is DefineSpace.SHARED_POOL:
            self.shared.setdefault("pools", []).append(self._pool(number) if number else DEFAULT_POOL)
        elif define.space is DefineSpace.SHARED_HOST_POOL:
            self.shared.setdefault("pools", []).append(HOST_POOL)

    def _refuse(self, record: Record, why: str) -> TraceError:
        return TraceError(f"{self._trace.source}: op {record.op} cannot be a step of a scenario: {why}")

    def _layer(self, layers: tuple[int, int]) -> Fields:
        return {"layer": layers[0]} if layers != ALL_LAYERS and layers[1] == layers[0] + 1 else {}

    def _touched(
        self, record: Record, accesses: Iterable[Access], keys: Mapping[tuple[Space, Mode], str]
    ) -> dict[str, list[int | str]]:
        """Pages and buffers by the key they belong under."""
        found: dict[str, list[int | str]] = {}
        for access in accesses:
            key = keys.get((access.space, access.mode))
            if key is None:
                what = f"{access.mode.name.lower()}s {access.space.name.lower()} memory"
                raise self._refuse(record, f"it {what}, which a {_OPS[type(record)]} step has no key for")
            found.setdefault(key, []).extend(self._pages(record, access))
        return found

    def _pages(self, record: Record, access: Access) -> list[int | str]:
        ids: list[int] = access.ids.tolist()
        if access.space is Space.BUFFER:
            return [self._buffer(number) for number in ids]
        if access.pool == 0:
            return list(ids)
        if access.space is Space.HOST:
            raise self._refuse(record, f"a scenario has one host pool, and this is pool {access.pool}")
        return [f"{self._pool(access.pool)}:{number}" for number in ids]

    def _site(self, site: int) -> str:
        return self._trace.names.sites.get(site, "")

    # -- one method per kind of record, None where there is nothing to say -----------------------------------

    def _kernel(self, record: Kernel) -> Fields:
        touched = self._touched(record, record.accesses, _KERNEL_KEYS)
        return self._on(record.stream, record.site, record.layers) | touched

    def _on(self, stream: int, site: int, layers: tuple[int, int]) -> Fields:
        return {"stream": self.stream(stream), "name": self._site(site), **self._layer(layers)}

    def _memcpy(self, record: Memcpy) -> Fields:
        buffers = {(Space.BUFFER, Mode.READ): "src_buf", (Space.BUFFER, Mode.WRITE): "dst_buf"}
        keys = _PAGE_KEYS[record.direction]
        touched: Fields = dict(self._touched(record, record.accesses, {**keys, **buffers}))
        for mode, key in ((Mode.READ, "src_buf"), (Mode.WRITE, "dst_buf")):
            names = touched.pop(key, [])
            if len(names) > 1:
                raise self._refuse(record, f"key {key!r} takes one buffer, and it has {len(names)}")
            if names or not any(
                keys.get((access.space, access.mode)) for access in record.accesses if access.mode is mode
            ):
                touched[key] = names[0] if names else f"{_UNSTATED} {record.op}"
        return {"kind": _KINDS[record.direction], **self._on(record.stream, record.site, record.layers), **touched}

    def _relocate(self, record: Relocate) -> Fields:
        sides = self._touched(
            record, record.accesses, {(Space.DEVICE, Mode.READ): "old", (Space.DEVICE, Mode.WRITE): "new"}
        )
        moves = [list(pair) for pair in zip(sides["old"], sides["new"], strict=True)]
        return {**self._on(record.stream, record.site, record.layers), "moves": moves}

    def _graph_replay(self, record: GraphReplay) -> Fields:
        self._nodes_left = record.nodes
        layers = ALL_LAYERS if record.nodes else record.layers  # each entry says its own
        fields = {"graph": self._graph(record.graph), **self._on(record.stream, record.site, layers)}
        return {**fields, **self._touched(record, record.accesses, _KERNEL_KEYS)}

    def _add_node(self, record: GraphNode) -> None:
        replay = self.steps[-1] if self.steps else {}
        if not self._nodes_left or replay.get("op") != "graph_replay":
            raise self._refuse(record, "it is an entry of a graph whose replay is not there")
        self._nodes_left -= 1
        entry: Fields = {}
        if record.after != IN_ORDER:
            entry["after"] = [bit for bit in range(MAX_AFTER + 1) if record.after >> bit & 1]
        if record.event is not None:
            entry["event_record"] = self._event(record.event)
        else:
            entry |= {**self._layer(record.layers), **self._touched(record, record.accesses, _KERNEL_KEYS)}
        replay.setdefault("nodes", []).append(entry)
        self.ids[record.op] = replay["id"]

    def _host_access(self, record: HostAccess) -> Fields:
        touched = self._touched(record, record.accesses, _HOST_KEYS)
        return {"name": self._site(record.site), **self._layer(record.layers), **touched}

    def _owned(self, record: PageAlloc | PageFree) -> Fields:
        pages = self._pages(record, record.access)
        if not pages or record.access.space is Space.BUFFER:
            raise self._refuse(record, "it hands out no pages")
        return {"pool": record.access.space.name.lower(), "pages": pages, "owner": self._owner(record.owner)}

    def _io_begin(self, record: IoBegin) -> Fields:
        self._ios.add(record.io)
        touched = self._touched(record, record.accesses, _IO_KEYS)
        fields = {"io": self._io(record.io), "kind": record.kind.name.lower(), "name": self._site(record.site)}
        return {**fields, **self._layer(record.layers), **touched}

    def _io_end(self, record: IoEnd) -> Fields | None:
        return {"io": self._io(record.io)} if record.io in self._ios else None

    def _tensor_alloc(self, record: TensorAlloc) -> Fields:
        self._tensors.add(record.tensor)
        return {
            "tensor": self._tensor(record.tensor),
            "mem": self._buffer(record.block),
            "stream": self.stream(record.stream),
        }

    def _tensor_free(self, record: TensorFree) -> Fields | None:
        if record.tensor not in self._tensors:
            return None  # what was never handed out here is handed out again nowhere here
        self._tensors.remove(record.tensor)
        return {"tensor": self._tensor(record.tensor)}

    def _record_stream(self, record: RecordStream) -> Fields | None:
        if record.tensor not in self._tensors:
            return None
        return {"tensor": self._tensor(record.tensor), "stream": self.stream(record.stream)}

    def _host_sync(self, record: HostSync) -> Fields:
        if record.stream is None:
            return {"scope": "device"}
        return {"scope": "stream", "stream": self.stream(record.stream)}

    def _collective(self, record: Collective) -> Fields:
        name = self._site(record.site) or f"collective {record.site}"
        return {"group": self._group(record.collective_group), "rank": record.rank, "name": name}

    def _marker(self, record: EventRecord | EventWait) -> Fields:
        return {"event": self._event(record.event), "stream": self.stream(record.stream)}

    def _wait_stream(self, record: WaitStream) -> Fields:
        return {"waiter": self.stream(record.waiter), "on": self.stream(record.on)}

    def _query(self, record: EventQuery) -> Fields:
        return {"event": self._event(record.event), "result": record.result}

    def _event_sync(self, record: EventSync) -> Fields:
        return {"event": self._event(record.event)}

    def _hand_over(self, record: ThreadPost | ThreadRecv) -> Fields:
        return {"chan": self._channel(record.channel)}


_MAKERS: Final[dict[type[Record], Callable[[_Writer, Any], Fields | None]]] = {
    Kernel: _Writer._kernel,
    Memcpy: _Writer._memcpy,
    Relocate: _Writer._relocate,
    GraphReplay: _Writer._graph_replay,
    EventRecord: _Writer._marker,
    EventWait: _Writer._marker,
    WaitStream: _Writer._wait_stream,
    EventQuery: _Writer._query,
    EventSync: _Writer._event_sync,
    HostSync: _Writer._host_sync,
    HostAccess: _Writer._host_access,
    PageAlloc: _Writer._owned,
    PageFree: _Writer._owned,
    IoBegin: _Writer._io_begin,
    IoEnd: _Writer._io_end,
    ThreadPost: _Writer._hand_over,
    ThreadRecv: _Writer._hand_over,
    TensorAlloc: _Writer._tensor_alloc,
    TensorFree: _Writer._tensor_free,
    RecordStream: _Writer._record_stream,
    Collective: _Writer._collective,
}
_OPS: Final[dict[type[Record], str]] = {
    Kernel: "kernel",
    Memcpy: "memcpy",
    Relocate: "relocate",
    GraphReplay: "graph_replay",
    GraphNode: "graph_replay",
    EventRecord: "event_record",
    EventWait: "event_wait",
    WaitStream: "wait_stream",
    EventQuery: "event_query",
    EventSync: "event_sync",
    HostSync: "host_sync",
    HostAccess: "host_access",
    PageAlloc: "alloc",
    PageFree: "free",
    IoBegin: "io_begin",
    IoEnd: "io_end",
    ThreadPost: "thread_post",
    ThreadRecv: "thread_recv",
    TensorAlloc: "tensor_alloc",
    TensorFree: "tensor_free",
    RecordStream: "record_stream",
    Collective: "collective",
}
