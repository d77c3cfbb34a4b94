"""The columns of a journal, and its header: what reader and writer share.

The columns are the fields of the records; a column is null where a record's kind has no such field. Page ids are kept
as runs, in order. Records of one batch that carry the same array keep it once: ``same_as`` is the number of the first
access in the batch that has it. What a round's rows are is kept as one more access, the last, of space ``ROWS_CELL``.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Final

import pyarrow as pa

from hicache_obs.records import (
    KINDS,
    Collective,
    Define,
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
    PageAlloc,
    PageFree,
    Record,
    RecordStream,
    Relocate,
    RowsDiscarded,
    TensorAlloc,
    TensorFree,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
)

JOURNAL_VERSION: Final = 2
"""2 has row cells."""
STREAM_START: Final = b"\xff\xff\xff\xff"
"""How an Arrow IPC stream begins."""

FILE_NAME: Final = re.compile(r"rank(\d+)-(\d{6,})\.arrows")
RUNS: Final = pa.list_(pa.struct([("start", pa.int64()), ("count", pa.int64())]))
ACCESS: Final = pa.struct(
    [("space", pa.int8()), ("mode", pa.int8()), ("pool", pa.int32()), ("pages", RUNS), ("same_as", pa.int32())]
)
COLUMNS: Final[tuple[tuple[str, Any], ...]] = (
    ("kind", pa.string()),
    ("op", pa.int64()),
    ("thread", pa.int64()),
    ("host_ns", pa.int64()),
    ("stream", pa.int64()),
    ("event", pa.int64()),
    ("site", pa.int64()),
    ("group", pa.int64()),
    ("size_bytes", pa.int64()),
    ("layer_begin", pa.int64()),
    ("layer_end", pa.int64()),
    ("direction", pa.int8()),
    ("waiter", pa.int64()),
    ("on", pa.int64()),
    ("purpose", pa.int8()),
    ("result", pa.bool_()),
    ("owner", pa.int64()),
    ("tensor", pa.int64()),
    ("start_ns", pa.int64()),
    ("end_ns", pa.int64()),
    ("error_ns", pa.int64()),
    ("count", pa.int64()),
    ("reason", pa.int8()),
    ("space", pa.int8()),
    ("id", pa.int64()),
    ("text", pa.string()),
    ("value", pa.int64()),
    ("graph", pa.int64()),
    ("nodes", pa.int64()),
    ("index", pa.int64()),
    ("after", pa.int64()),
    ("io", pa.int64()),
    ("io_kind", pa.int8()),
    ("channel", pa.int64()),
    ("block", pa.int64()),
    ("collective_group", pa.int64()),
    ("rank", pa.int64()),
)
ACCESSES: Final = "accesses"
SCHEMA: Final = pa.schema([*COLUMNS, (ACCESSES, pa.list_(ACCESS))])
META: Final = "hicache_obs."


def _names(*fields: str) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((name, attrgetter(name)) for name in fields)


_LAYERS: Final = (("layer_begin", lambda r: r.layers[0]), ("layer_end", lambda r: r.layers[1]))
_WORK: Final = (*_names("stream", "site", "group", "size_bytes"), *_LAYERS)
FIELDS: Final[dict[type[Record], tuple[tuple[str, Callable[[Any], Any]], ...]]] = {
    Kernel: _WORK,
    Memcpy: (*_WORK, *_names("direction")),
    EventRecord: _names("event", "stream"),
    EventWait: _names("event", "stream", "purpose"),
    WaitStream: _names("waiter", "on", "purpose"),
    EventQuery: _names("event", "result"),
    EventSync: _names("event"),
    HostSync: _names("stream"),
    HostAccess: (*_names("site"), *_LAYERS),
    PageAlloc: _names("owner"),
    PageFree: _names("owner"),
    RecordStream: _names("tensor", "stream"),
    Times: _names("start_ns", "end_ns", "error_ns"),
    Lost: _names("count", "reason"),
    Define: _names("space", "id", "text", "value"),
    GraphReplay: (*_names("graph", "stream", "site", "group", "nodes"), *_LAYERS),
    GraphNode: (*_names("index", "after", "event"), *_LAYERS),
    Relocate: (*_names("stream", "site"), *_LAYERS),
    IoBegin: (*_names("io"), ("io_kind", attrgetter("kind")), *_names("site"), *_LAYERS),
    IoEnd: _names("io"),
    ThreadPost: _names("channel"),
    ThreadRecv: _names("channel"),
    TensorAlloc: _names("tensor", "block", "stream"),
    TensorFree: _names("tensor"),
    Collective: _names("collective_group", "rank", "site"),
    RowsDiscarded: _names("group"),
}
OPTIONAL: Final[frozenset[tuple[type[Record], str]]] = frozenset({(HostSync, "stream"), (GraphNode, "event")})
"""Columns that may be null in a record that has the field."""
KIND_NAMES: Final = {kind: re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower() for kind in KINDS}
"""``Kernel`` is ``kernel``, ``WaitStream`` is ``wait_stream``."""
COMMON: Final = _names("op", "thread", "host_ns")


@dataclass(frozen=True, slots=True, kw_only=True)
class JournalInfo:
    """What a segment's header says.

    Attributes:
        rank: Number of the worker, as in the file names.
        run: Equal for all segments of one run.
        segment: Number of the segment in its run, from 1.
        records_before: Records of the run in earlier segments.
        engine: Name and version of the recorded engine.
        clock: Name of the clock of ``host_ns``.
        wall_ns, host_ns: Unix time and host clock, read together.
        definitions: The names in use when the segment was made (``pack_definitions``); needed where earlier
            segments are gone.
    """

    rank: int = 0
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    segment: int = 1
    records_before: int = 0
    engine: str = ""
    clock: str = ""
    wall_ns: int = 0
    host_ns: int = 0
    definitions: str = ""


def header_metadata(info: JournalInfo) -> dict[str, str]:
    """``info`` as metadata of a schema."""
    values = {name: getattr(info, name) for name in JournalInfo.__dataclass_fields__}
    return {META + key: str(value) for key, value in {"version": JOURNAL_VERSION, **values}.items()}


def pack_definitions(definitions: Iterable[Define]) -> str:
    """``definitions`` as text for a header; empty if there are none."""
    rows = [[d.thread, d.host_ns, d.space, d.id, d.value, d.text] for d in definitions]
    return json.dumps(rows, separators=(",", ":")) if rows else ""


def records_of(row: Record) -> int:
    """Records that a row of a journal stands for: more than one where it states a gap."""
    return row.count if isinstance(row, Lost) and row.reason is DropReason.MISSING else 1
