"""Exports of Nsight Systems made of known histories, as its versions would write them. See ``profiled``."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache_obs.records import NVTX_DOMAIN, Direction, StreamKind
from hicache_obs.testing.profiled import Seen, SeenSync

Table = tuple[list[str], list[tuple[Any, ...]]]
"""Column names and rows."""
_COPY_KINDS: Final = {Direction.HOST_TO_DEVICE: 1, Direction.DEVICE_TO_HOST: 2, Direction.DEVICE_TO_DEVICE: 8}
_MEMORY: Final = {
    Direction.HOST_TO_DEVICE: (1, 2),
    Direction.DEVICE_TO_HOST: (2, 1),
    Direction.DEVICE_TO_DEVICE: (2, 2),
}
_FLAGS: Final = {StreamKind.BLOCKING: 1, StreamKind.NONBLOCKING: 2, StreamKind.LEGACY: 3}
_DOMAIN: Final = 7
_CONTEXT: Final = 1


@dataclass(frozen=True)
class Generation:
    """What one version writes.

    Attributes:
        product, schema: Its versions.
        meta: Name of the table that states them.
        sync_types: ``syncType`` by API call, as wrong as seen.
        sync_ids: Which of ``record`` and ``wait`` rows have an ``eventSyncId``.
        timestamps: Records have a ``timestamp``.
        contexts: ``TARGET_INFO_CUDA_CONTEXT_INFO`` instead of ``..._NULL_STREAM``.
        counts: Copies have a ``copyCount``.
    """

    product: str
    schema: str
    meta: str
    sync_types: Mapping[str, int]
    sync_ids: frozenset[str] = frozenset()
    timestamps: bool = False
    contexts: bool = True
    counts: bool = False


GENERATIONS: Final = {
    "2022.4": Generation(
        "2022.4.2.1", "3.0.0", "EXPORT_META_DATA",
        {"cudaDeviceSynchronize": 1, "cudaStreamSynchronize": 3, "cudaEventSynchronize": 1, "cudaStreamWaitEvent": 2},
        contexts=False,
    ),
    "2023.3": Generation(
        "2023.3.1.92", "3.4.0", "META_DATA_EXPORT",
        {"cudaDeviceSynchronize": 1, "cudaStreamSynchronize": 3, "cudaEventSynchronize": 2, "cudaStreamWaitEvent": 2},
        contexts=False,
    ),
    "2024.5": Generation(
        "2024.5.1.113", "3.13.2", "META_DATA_EXPORT",
        {"cudaDeviceSynchronize": 0, "cudaStreamSynchronize": 0, "cudaEventSynchronize": 0, "cudaStreamWaitEvent": 0},
        timestamps=True,
    ),
    "2025.1": Generation(
        "2025.1.3.140", "3.17.2", "META_DATA_EXPORT",
        {"cudaDeviceSynchronize": 4, "cudaStreamSynchronize": 3, "cudaEventSynchronize": 1, "cudaStreamWaitEvent": 2},
        timestamps=True,
    ),
    "2026.1": Generation(
        "2026.1.1.204", "3.24.14", "META_DATA_EXPORT",
        {"cudaDeviceSynchronize": 4, "cudaStreamSynchronize": 2, "cudaEventSynchronize": 1, "cudaStreamWaitEvent": 1},
        sync_ids=frozenset({"wait"}), timestamps=True, counts=True,
    ),
    "2026.2": Generation(
        "2026.2.1.210", "3.25.0", "META_DATA_EXPORT",
        {"cudaDeviceSynchronize": 4, "cudaStreamSynchronize": 3, "cudaEventSynchronize": 1, "cudaStreamWaitEvent": 2},
        sync_ids=frozenset({"record", "wait"}), timestamps=True, counts=True,
    ),
}  # fmt: skip
"""By the version they are named after; what was not seen in a real export is the neighbour's."""


def nsys_tables(
    processes: Sequence[Seen], generation: Generation, *, graph_rows: bool = False, event_times: bool = False
) -> dict[str, Table]:
    """The tables of an export.

    Args:
        processes: What was seen of each.
        graph_rows: Graph replays are one row each.
        event_times: Records have device times, as with event tracing on.
    """
    return _Export(processes, generation, graph_rows, event_times).tables()


def write_nsys(path: Path, tables: Mapping[str, Table]) -> Path:
    """A SQLite file of ``tables``."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA synchronous = OFF")  # it need not outlive a power cut
        for name, (columns, rows) in tables.items():
            database.execute(f'CREATE TABLE "{name}" ({", ".join(columns)})')
            places = ", ".join("?" * len(columns))
            database.executemany(f'INSERT INTO "{name}" VALUES ({places})', rows)
        database.commit()
    return path


def write_nsys_folder(path: Path, tables: Mapping[str, Table], *, kind: str) -> Path:
    """A folder of ``tables``; ``kind`` is ``parquet`` or ``arrow``."""
    import pyarrow as pa
    from pyarrow import ipc, parquet

    path.mkdir()
    for name, (columns, rows) in tables.items():
        values = list(zip(*rows, strict=True)) if rows else [() for _ in columns]
        text = {"value", "text", "name"}
        arrays = [
            pa.array(list(v), pa.string() if column in text and not _numbers(v) else pa.int64())
            for column, v in zip(columns, values, strict=True)
        ]
        table = pa.table(dict(zip(columns, arrays, strict=True)))
        if kind == "parquet":
            parquet.write_table(table, path / f"{name}.parquet")
        else:
            with ipc.new_file(path / f"{name}.arrow", table.schema) as file:
                file.write_table(table)
    return path


def _numbers(values: Sequence[Any]) -> bool:
    return any(isinstance(value, int) for value in values)


class _Export:
    """Builds the tables of one export."""

    def __init__(self, processes: Sequence[Seen], generation: Generation, graph_rows: bool, event_times: bool) -> None:
        self._processes = processes
        self._generation = generation
        self._graph_rows = graph_rows
        self._event_times = event_times
        self._strings: dict[str, int] = {}

    def tables(self) -> dict[str, Table]:
        """All of them; an export has no empty tables."""
        green = ["greenContextId"] if self._generation.contexts else []
        found = {
            "CUPTI_ACTIVITY_KIND_KERNEL": self._operations(green, None),
            "CUPTI_ACTIVITY_KIND_MEMCPY": self._copies(green),
            "CUPTI_ACTIVITY_KIND_GRAPH_TRACE": self._graphs(),
            "CUPTI_ACTIVITY_KIND_RUNTIME": self._calls(),
            "CUPTI_ACTIVITY_KIND_SYNCHRONIZATION": self._syncs(green),
            "CUPTI_ACTIVITY_KIND_CUDA_EVENT": self._records(green),
            "NVTX_EVENTS": self._ranges(),
            "TARGET_INFO_CUDA_STREAM": self._streams(),
            self._generation.meta: (
                ["name", "value"],
                [
                    ("EXPORT_PRODUCT_VERSION", self._generation.product),
                    ("EXPORT_SCHEMA_VERSION", self._generation.schema),
                ],
            ),
        }
        found["StringIds"] = (["id", "value"], [(number, text) for text, number in self._strings.items()])
        return {name: table for name, table in found.items() if table[1]}

    def _string(self, text: str) -> int:
        return self._strings.setdefault(text, len(self._strings) + 1)

    def _pid(self, seen: Seen) -> int:
        return seen.process << 24 | 1 << 56 >> 8

    def _tid(self, seen: Seen, thread: int) -> int:
        return self._pid(seen) | (seen.process + thread) & 0xFFFFFF

    def _operations(self, green: list[str], _: None) -> Table:
        columns = ["start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "shortName"]
        rows = [
            (o.start_ns, o.end_ns, 0, _CONTEXT, o.stream, o.correlation, self._pid(seen), self._string("forward"))
            + (o.correlation if o.in_graph else None,) + (None,) * len(green)
            for seen in self._processes
            for o in seen.ops
            if o.direction is None and not (o.in_graph and self._graph_rows)
        ]  # fmt: skip
        return [*columns, "graphNodeId", *green], rows

    def _copies(self, green: list[str]) -> Table:
        columns = ["start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "bytes"]
        more = ["copyKind", "srcKind", "dstKind", *green, *(["copyCount"] if self._generation.counts else [])]
        count = (1,) if self._generation.counts else ()
        rows = [
            (o.start_ns, o.end_ns, 0, _CONTEXT, o.stream, o.correlation, self._pid(seen), 4096)
            + (_COPY_KINDS[o.direction], *_MEMORY[o.direction]) + (None,) * len(green) + count
            for seen in self._processes
            for o in seen.ops
            if o.direction is not None
        ]  # fmt: skip
        return [*columns, *more], rows

    def _graphs(self) -> Table:
        columns = ["start", "end", "deviceId", "contextId", "streamId", "correlationId", "globalPid", "graphId"]
        rows = [
            (o.start_ns, o.end_ns, 0, _CONTEXT, o.stream, o.correlation, self._pid(seen), 1)
            for seen in self._processes
            for o in seen.ops
            if o.in_graph and self._graph_rows
        ]
        return columns, rows

    def _calls(self) -> Table:
        columns = ["start", "end", "eventClass", "globalTid", "correlationId", "nameId", "returnValue"]
        rows = [
            (
                c.start_ns,
                c.end_ns,
                0,
                self._tid(seen, c.thread),
                c.correlation,
                self._string(f"{c.name}_v3020"),
                c.result,
            )
            for seen in self._processes
            for c in seen.calls
        ]
        return columns, rows

    def _syncs(self, green: list[str]) -> Table:
        generation = self._generation
        ids = ["eventSyncId"] if "wait" in generation.sync_ids else []
        columns = [
            "start",
            "end",
            "deviceId",
            "contextId",
            "streamId",
            "correlationId",
            "globalPid",
            "syncType",
            "eventId",
        ]
        rows = []
        for seen in self._processes:
            window = {call.correlation: (call.start_ns, call.end_ns) for call in seen.calls}
            for sync in seen.syncs:
                start, end = window.get(sync.correlation, (0, 0))
                stream = (1 << 32) - 1 if sync.stream is None else sync.stream
                kind = generation.sync_types.get(sync.name, 1)
                event = 0 if sync.event is None else sync.event
                row = (start, end, 0, _CONTEXT, stream, sync.correlation, self._pid(seen), kind, event)
                rows.append(row + (None,) * len(green) + ((_sync_id(sync),) if ids else ()))
        return [*columns, *green, *ids], rows

    def _records(self, green: list[str]) -> Table:
        generation = self._generation
        ids = ["eventSyncId"] if "record" in generation.sync_ids else []
        times = ["timestamp"] if generation.timestamps else []
        columns = ["deviceId", "contextId", "streamId", "correlationId", "globalPid", "eventId"]
        rows = [
            (0, _CONTEXT, r.stream, r.correlation, self._pid(seen), r.event) + (None,) * len(green)
            + ((r.done_ns if self._event_times else 0,) if times else ()) + ((r.number,) if ids else ())
            for seen in self._processes
            for r in seen.records
        ]  # fmt: skip
        return [*columns, *green, *times, *ids], rows

    def _ranges(self) -> Table:
        columns = ["start", "end", "eventType", "text", "textId", "globalTid", "domainId", "uint64Value", "int64Value"]
        rows: list[tuple[Any, ...]] = []
        for seen in self._processes:
            if seen.ranges:
                rows.append((1, None, 75, NVTX_DOMAIN, None, self._tid(seen, 0), _DOMAIN, None, None))
            for mark in seen.ranges:
                tid = self._tid(seen, mark.thread)
                rows.append(
                    (mark.start_ns, mark.end_ns, 59, None, self._string("segment"), tid, _DOMAIN, None, mark.op)
                )
        return columns, rows

    def _streams(self) -> Table:
        rows = [
            (stream, seen.process, _CONTEXT, _FLAGS[kind])
            for seen in self._processes
            for stream, kind in seen.streams.items()
        ]
        return ["streamId", "processId", "contextId", "flag"], rows


def _sync_id(sync: SeenSync) -> int:
    return 0 if sync.of is None else sync.of.number
