"""Reads a journal. What a killed agent or a full disk left half-written is never believed: reading stops at the last
whole batch and says so. ``journal_format`` has the columns, ``journal_writer`` the partner.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import ipc

from hicache_obs.errors import TraceError
from hicache_obs.readers.journal_format import (
    ACCESSES,
    COMMON,
    FIELDS,
    FILE_NAME,
    JOURNAL_VERSION,
    KIND_NAMES,
    META,
    OPTIONAL,
    SCHEMA,
    STREAM_START,
    JournalInfo,
    records_of,
)
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.readers.stored import AnyPath, StoredPath
from hicache_obs.readers.trace_file import node_fault, size_of
from hicache_obs.records import (
    MAX_IDS,
    NO_OP,
    ROWS_CELL,
    Access,
    AnyRecord,
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
    IoKind,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    Purpose,
    Record,
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
    Times,
    WaitStream,
    unpack_rows,
)
from hicache_obs.trace import Trace, make_trace

__all__ = ["JournalInfo", "JournalWriter", "newest_run", "read_definitions", "read_journal", "read_segment"]

MAX_PAGES: Final = MAX_IDS
"""Page ids the accesses of one batch may hold, arrays that they share counted once.

A run length is just a number, and a file must not make us allocate the world.
"""
P = TypeVar("P", Path, StoredPath)


# -- batches to records --------------------------------------------------------------------------------------


def read_journal(path: str | os.PathLike[str], *, rank: int | None = None) -> Trace:
    """The newest run in a journal directory, or one segment file.

    Records that are known to have existed and are gone (a segment was removed or damaged) are stated by a ``Lost``
    record. ``notes`` says what else was left out.

    Args:
        path: A directory or a file.
        rank: Which rank of a directory; may be left out if there is only one.

    Raises:
        TraceError: Nothing there can be read, or the directory holds several ranks and ``rank`` names none of them.
    """
    notes: list[str] = []
    records = [record for batch in journal_batches(path, rank=rank, notes=notes) for record in batch]
    return make_trace(str(Path(path)), records, notes=tuple(notes))


def journal_batches(
    path: str | os.PathLike[str] | StoredPath, *, rank: int | None = None, notes: list[str]
) -> Iterator[list[AnyRecord]]:
    """The records of ``read_journal``, batch by batch: memory stays that of one batch.

    Args:
        path: A directory or a file.
        rank: Which rank of a directory; may be left out if there is only one.
        notes: Gets what had to be left out, in words, as far as it has been read.

    Raises:
        TraceError: As ``read_journal``, when the place is reached.
    """
    expected = 0
    for file, info in journal_segments(path, rank=rank, notes=notes):
        gone = info.records_before - expected
        batches = read_segment(file, notes)
        first = next(batches, [])
        if gone > 0:
            host_ns = first[0].host_ns if first else 0
            lost = Lost(NO_OP, ThreadId(0), host_ns, gone, DropReason.MISSING)
            yield [lost, *read_definitions(file, info)]
            notes.append(f"{file}: {gone} records before it are gone: an earlier segment is missing or damaged")
        count = 0
        for batch in itertools.chain([first], batches):
            count += sum(map(records_of, batch))
            yield batch
        expected = info.records_before + count


def journal_segments(
    path: str | os.PathLike[str] | StoredPath, *, rank: int | None = None, notes: list[str]
) -> list[tuple[AnyPath, JournalInfo]]:
    """The segments that ``read_journal`` reads, oldest first, with their headers.

    Raises:
        TraceError: As ``read_journal``, for the headers.
    """
    if isinstance(path, StoredPath):
        return [*_newest_run(path, rank, notes)] if path.is_dir() else [_segment(path, notes)]
    target = Path(path)
    return [*_newest_run(target, rank, notes)] if target.is_dir() else [_segment(target, notes)]


def _segment(target: AnyPath, notes: list[str]) -> tuple[AnyPath, JournalInfo]:
    """One segment by itself."""
    info = _read_info(target)
    if info.segment > 1 and not info.definitions:
        notes.append(f"{target}: segment {info.segment} of its run; names defined earlier are unknown")
    return target, info


def newest_run(directory: Path, *, rank: int) -> list[tuple[Path, JournalInfo]]:
    """The segments of the newest run of ``rank`` in a journal directory, oldest first.

    Raises:
        TraceError: There is none, or a header cannot be read.
    """
    return _newest_run(directory, rank, [])


def read_definitions(path: AnyPath, info: JournalInfo) -> list[Define]:
    """The names in use when segment ``path`` was made, as its header ``info`` states them.

    Raises:
        TraceError: They are damaged.
    """
    if not info.definitions:
        return []
    found = []
    try:
        for *numbers, text in json.loads(info.definitions):
            if not (isinstance(text, str) and all(type(number) is int for number in numbers)):
                raise ValueError(f"{[*numbers, text]} is not five numbers and a text")
            thread, host_ns, space, key, value = numbers
            found.append(_define(NO_OP, ThreadId(thread), host_ns, space, key, text, value, None))
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise TraceError(f"{path}: damaged header: {META}definitions: {_one_line(error)}") from None


def journal_ranks(directory: Path) -> list[int]:
    """Ranks that have a journal in ``directory``, ascending."""
    return sorted({int(match[1]) for file in directory.iterdir() if (match := FILE_NAME.fullmatch(file.name))})


def _newest_run(directory: P, rank: int | None, notes: list[str]) -> list[tuple[P, JournalInfo]]:
    by_rank: dict[int, list[tuple[int, P]]] = {}
    for file in directory.iterdir():
        match = FILE_NAME.fullmatch(file.name)
        if match:
            by_rank.setdefault(int(match[1]), []).append((int(match[2]), file))
    if not by_rank:
        raise TraceError(f"{directory}: no journal here: no file is named like rank0-000001.arrows")
    known = ", ".join(map(str, sorted(by_rank)))
    if rank is None:
        if len(by_rank) > 1:
            raise TraceError(f"{directory}: holds the journals of ranks {known}: say which one")
        rank = next(iter(by_rank))
    if rank not in by_rank:
        raise TraceError(f"{directory}: holds no journal of rank {rank}, only of {known}")
    headers: list[tuple[P, JournalInfo]] = []
    for _, file in sorted(by_rank[rank]):
        try:
            headers.append((file, _read_info(file)))
        except _NoHeader as error:
            notes.append(str(error))
    if not headers:
        raise TraceError(notes[-1])
    run = headers[-1][1].run
    older = [file.name for file, info in headers if info.run != run]
    if older:
        notes.append(f"{directory}: older runs are left out ({older[0]} to {older[-1]}); open a file to read it")
    return [(file, info) for file, info in headers if info.run == run]


class _NoHeader(TraceError):
    """A segment whose writer was killed before its header was whole."""


def _open(path: AnyPath) -> tuple[Any, Any]:
    """The file and its Arrow stream."""
    try:
        if isinstance(path, StoredPath):
            file = path.open_arrow()
        else:
            size_of(path)
            file = pa.OSFile(os.fsencode(path), "rb")
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror or error}") from None
    start = file.read(len(STREAM_START))
    file.seek(0)
    try:
        return file, ipc.open_stream(file)
    except (pa.ArrowException, OSError) as error:
        torn = file.tell() >= file.size() and start == STREAM_START[: len(start)]
        file.close()
        if torn:
            raise _NoHeader(f"{path}: ends before its header is complete; it holds no records") from None
        raise TraceError(f"{path}: not a journal: {_one_line(error)}") from None


def _read_info(path: AnyPath) -> JournalInfo:
    file, stream = _open(path)
    with file:
        return read_header(path, stream.schema)


def read_header(path: AnyPath, schema: Any) -> JournalInfo:
    """What the Arrow schema of a journal segment, or of a Parquet file of records, says about it.

    Raises:
        TraceError: It is of another kind or version, or damaged.
    """
    metadata = {k.decode(errors="replace"): v.decode(errors="replace") for k, v in (schema.metadata or {}).items()}
    version = metadata.get(META + "version", "")
    if not version.isdigit():
        raise TraceError(f"{path}: Arrow data, but no journal: it states no {META}version")
    if int(version) > JOURNAL_VERSION:
        raise TraceError(
            f"{path}: journal version {version} is newer than {JOURNAL_VERSION}, the newest known here; upgrade"
        )
    if 0 < int(version) < JOURNAL_VERSION:
        raise TraceError(
            f"{path}: journal version {version} is older than {JOURNAL_VERSION}, the only one known here; "
            "read it with the version that wrote it"
        )
    if not schema.equals(SCHEMA):
        raise TraceError(f"{path}: damaged: its columns are not those of journal version {version}")
    defaults = JournalInfo()
    values: dict[str, Any] = {}
    for name in JournalInfo.__dataclass_fields__:
        text = metadata.get(META + name, "")
        if isinstance(getattr(defaults, name), int):
            if not re.fullmatch(r"-?\d{1,19}", text):
                raise TraceError(f"{path}: damaged header: {META}{name} is {text!r}, not a number")
            values[name] = int(text)
        else:
            values[name] = text
    return JournalInfo(**values)


def read_segment(path: AnyPath, notes: list[str]) -> Iterator[list[AnyRecord]]:
    """The whole batches of a segment, in order.

    Args:
        path: The segment.
        notes: Gets what had to be left out, in words.

    Raises:
        TraceError: A batch is damaged.
    """
    file, stream = _open(path)
    with file:
        number = 0
        while True:
            number += 1
            try:
                batch = stream.read_next_batch()
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                if file.tell() < file.size():
                    raise TraceError(f"{path}: batch {number} is damaged: {_one_line(error)}") from None
                notes.append(f"{path}: ends in the middle of batch {number}; the records before it are whole")
                return
            yield batch_records(batch, f"{path}: batch {number}")


def _one_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Damaged(Exception):
    """A value in a batch is impossible."""


@dataclass(frozen=True, slots=True)
class _RowCell:
    """Row cell of a record: last among its accesses."""

    ids: PageIds


_Cells = tuple[Access | _RowCell, ...]


def batch_records(batch: Any, place: str) -> list[AnyRecord]:
    """The records of one Arrow batch; ``place`` names it in messages.

    Raises:
        TraceError: It is damaged.
    """
    try:
        batch.validate(full=True)
        return _records(batch)
    except (pa.ArrowException, _Damaged) as error:
        raise TraceError(f"{place} is damaged: {_one_line(error)}") from None


def _records(batch: Any) -> list[AnyRecord]:
    """All records of a batch, made kind by kind: row by row, the nulls of the other kinds would cost most."""
    kinds = np.array(batch.column("kind").to_pylist(), dtype=object)
    accesses = _read_accesses(batch.column(ACCESSES))
    columns: dict[str, _Column] = {}
    records: list[AnyRecord | None] = [None] * len(kinds)
    for kind in dict.fromkeys(kinds):
        if kind not in _MAKERS:
            row = kinds.tolist().index(kind)
            raise _Damaged(f"record {row}: kind {kind!r}; known are {', '.join(_MAKERS)}")
        rows = np.flatnonzero(kinds == kind)
        make, names = _MAKERS[kind]
        values = []
        for name in names:
            if name not in columns:
                columns[name] = _Column(name, batch.column(name))
            values.append(columns[name].take(rows, kind))
        for row, *fields in zip(rows.tolist(), *values, strict=True):
            try:
                if kind not in _WITH_ROWS and any(isinstance(cell, _RowCell) for cell in accesses[row]):
                    raise ValueError("a row cell where only accesses belong")
                records[row] = make(*fields, accesses[row])
            except (TypeError, ValueError) as error:
                raise _Damaged(f"record {row} ({kind}): {error}") from None
    return [record for record in records if record is not None]


_LAYER_COLUMNS: Final = ("layer_begin", "layer_end")


class _Column:
    """A column's values, and where it has any."""

    def __init__(self, name: str, column: Any) -> None:
        self._name = name
        self._valid: npt.NDArray[np.bool_] = column.is_valid().to_numpy(zero_copy_only=False)
        self._text: list[str] | None = None
        if name == "text":
            self._text = column.to_pylist()
        else:
            empty = False if name == "result" else 0
            self._values = column.fill_null(empty).to_numpy(zero_copy_only=False)

    def take(self, rows: npt.NDArray[np.intp], kind: str) -> list[Any]:
        """The values of ``rows``, all of ``kind``; a null where a value belongs is an error."""
        valid = self._valid[rows]
        optional = (kind, self._name) in _OPTIONAL
        if not valid.all() and not optional:
            raise _Damaged(f"record {rows[~valid][0]} ({kind}): no {self._name}")
        if self._text is not None:
            return [self._text[row] for row in rows.tolist()]
        found = self._values[rows]
        if self._name in _LAYER_COLUMNS and found.min() < 0:
            raise _Damaged(f"record {rows[found.argmin()]} ({kind}): {self._name} {found.min()}; must not be negative")
        values: list[Any] = found.tolist()
        return (
            [value if is_there else None for value, is_there in zip(values, valid, strict=True)] if optional else values
        )


def _one(accesses: tuple[Access, ...]) -> Access:
    if len(accesses) != 1:
        raise ValueError(f"{len(accesses)} accesses where exactly 1 belongs")
    return accesses[0]


def _kernel(o: OpId, t: ThreadId, h: int, stream: StreamId, *v: Any) -> Kernel:
    site, group, size_bytes, begin, end, cells = v
    rows = None
    if cells and isinstance(cells[-1], _RowCell):
        rows, cells = cells[-1].ids, cells[:-1]
        unpack_rows(rows)
    if any(isinstance(cell, _RowCell) for cell in cells):
        raise ValueError("a row cell among the accesses")
    return Kernel(o, t, h, stream, site, group, size_bytes, (begin, end), cells, rows)


def _rows_discarded(o: OpId, t: ThreadId, h: int, group: int, cells: Any) -> RowsDiscarded:
    (cell,) = cells
    if not isinstance(cell, _RowCell):
        raise ValueError("an access where a row cell belongs")
    return RowsDiscarded(o, t, h, group, cell.ids)


def _memcpy(o: OpId, t: ThreadId, h: int, stream: StreamId, *v: Any) -> Memcpy:
    site, group, size_bytes, begin, end, direction, accesses = v
    return Memcpy(o, t, h, stream, site, group, size_bytes, (begin, end), accesses, Direction(direction))


def _define(o: OpId, t: ThreadId, h: int, space: int, number: int, text: str, value: int, _: Any) -> Define:
    if space == DefineSpace.STREAM:
        StreamKind(value)  # ValueError unless it is one
    return Define(o, t, h, DefineSpace(space), number, text, value)


def _graph_replay(o: OpId, t: ThreadId, h: int, graph: int, stream: StreamId, *v: Any) -> GraphReplay:
    site, group, nodes, begin, end, accesses = v
    return GraphReplay(o, t, h, graph, stream, site, group, nodes, (begin, end), accesses)


def _graph_node(o: OpId, t: ThreadId, h: int, index: int, after: int, *v: Any) -> GraphNode:
    event, begin, end, accesses = v
    if problem := node_fault(index, after):
        raise ValueError(problem)
    return GraphNode(o, t, h, index, after, event, (begin, end), accesses)


def _relocate(o: OpId, t: ThreadId, h: int, stream: StreamId, site: int, *v: Any) -> Relocate:
    begin, end, accesses = v
    return Relocate(o, t, h, stream, site, (begin, end), accesses)


def _io_begin(o: OpId, t: ThreadId, h: int, io: int, kind: int, *v: Any) -> IoBegin:
    site, begin, end, accesses = v
    return IoBegin(o, t, h, io, IoKind(kind), site, (begin, end), accesses)


# In the order of FIELDS: op, thread, host_ns, the fields of the kind, and last the accesses.
_BY_KIND: Final[dict[type[Record], Callable[..., AnyRecord]]] = {
    Kernel: _kernel,
    Memcpy: _memcpy,
    EventRecord: lambda o, t, h, event, stream, _: EventRecord(o, t, h, event, stream),
    EventWait: lambda o, t, h, event, stream, purpose, _: EventWait(o, t, h, event, stream, Purpose(purpose)),
    WaitStream: lambda o, t, h, waiter, on, purpose, _: WaitStream(o, t, h, waiter, on, Purpose(purpose)),
    EventQuery: lambda o, t, h, event, result, _: EventQuery(o, t, h, event, result),
    EventSync: lambda o, t, h, event, _: EventSync(o, t, h, event),
    HostSync: lambda o, t, h, stream, _: HostSync(o, t, h, stream),
    HostAccess: lambda o, t, h, site, begin, end, accesses: HostAccess(o, t, h, site, (begin, end), accesses),
    PageAlloc: lambda o, t, h, owner, accesses: PageAlloc(o, t, h, owner, _one(accesses)),
    PageFree: lambda o, t, h, owner, accesses: PageFree(o, t, h, owner, _one(accesses)),
    RecordStream: lambda o, t, h, tensor, stream, _: RecordStream(o, t, h, tensor, stream),
    Times: lambda o, t, h, start_ns, end_ns, error_ns, _: Times(o, t, h, start_ns, end_ns, error_ns),
    Lost: lambda o, t, h, count, reason, _: Lost(o, t, h, count, DropReason(reason)),
    Define: _define,
    GraphReplay: _graph_replay,
    GraphNode: _graph_node,
    Relocate: _relocate,
    IoBegin: _io_begin,
    IoEnd: lambda o, t, h, io, _: IoEnd(o, t, h, io),
    ThreadPost: lambda o, t, h, channel, _: ThreadPost(o, t, h, channel),
    ThreadRecv: lambda o, t, h, channel, _: ThreadRecv(o, t, h, channel),
    TensorAlloc: lambda o, t, h, tensor, block, stream, _: TensorAlloc(o, t, h, tensor, block, stream),
    TensorFree: lambda o, t, h, tensor, _: TensorFree(o, t, h, tensor),
    Collective: lambda o, t, h, group, rank, site, _: Collective(o, t, h, group, rank, site),
    RowsDiscarded: _rows_discarded,
}
_OPTIONAL: Final = frozenset((KIND_NAMES[kind], column) for kind, column in OPTIONAL)
_MAKERS: Final = {
    KIND_NAMES[kind]: (make, tuple(name for name, _ in (*COMMON, *FIELDS[kind]))) for kind, make in _BY_KIND.items()
}


_WITH_ROWS: Final = frozenset((KIND_NAMES[Kernel], KIND_NAMES[RowsDiscarded]))


def _read_accesses(column: Any) -> list[_Cells]:
    """The accesses of each record of a batch. Shared arrays come out as one object."""
    flat = column.flatten()
    spaces, modes, pools, same_as = (flat.field(name).to_pylist() for name in ("space", "mode", "pool", "same_as"))
    pages = flat.field("pages")
    runs = pages.flatten()
    starts, counts = (runs.field(name).to_numpy(zero_copy_only=False) for name in ("start", "count"))
    if runs.null_count or runs.field("start").null_count or runs.field("count").null_count:
        raise _Damaged("a page run without start or count")
    lengths = pages.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)
    rows = np.repeat([space == ROWS_CELL for space in spaces], lengths)  # these runs count other things than pages too
    _check_runs(starts, counts, rows.astype(bool))
    ends = np.cumsum(lengths).tolist()
    arrays: list[PageIds] = []
    found: list[Access | _RowCell] = []
    for number, space in enumerate(spaces):
        same = same_as[number]
        if same is None:
            begin = ends[number - 1] if number else 0
            arrays.append(_expand(starts[begin : ends[number]], counts[begin : ends[number]]))
        elif 0 <= same < number:
            arrays.append(arrays[same])
            if space != ROWS_CELL:  # whose first owner may be a row cell, which holds any number
                _check_pages(arrays[same], arrays[same])
        else:
            raise _Damaged(f"access {number} has the pages of access {same}, which is not before it")
        if space == ROWS_CELL:
            found.append(_RowCell(arrays[number]))
            continue
        try:
            found.append(Access(Space(space), Mode(modes[number]), arrays[number], pools[number] or 0))
        except ValueError as error:
            raise _Damaged(f"access {number}: {error}") from None
    upto = np.cumsum(column.value_lengths().fill_null(0).to_numpy(zero_copy_only=False)).tolist()
    return [tuple(found[begin:end]) for begin, end in zip([0, *upto[:-1]], upto, strict=True)]


def _check_runs(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], rows: npt.NDArray[np.bool_]) -> None:
    """Every run of a batch: its length, its pages unless it is of ``rows``, and how many pages there are in all."""
    if not len(counts):
        return
    total = sum(counts.tolist())
    if counts.min() < 1 or total > MAX_PAGES:
        shortest = counts.min()
        raise _Damaged(f"page runs of {total} pages in all, the shortest {shortest}; allowed are 1 to {MAX_PAGES}")
    starts, counts = starts[~rows], counts[~rows]
    _check_pages(starts, starts + counts - 1)


def _check_pages(first: PageIds, last: PageIds) -> None:
    """First and last ids of runs. A sum that left the 64 bits is negative, or its start is too large."""
    if not len(first):
        return
    low, high = int(min(first.min(), last.min())), int(max(first.max(), last.max()))
    if low < 0 or high >= MAX_IDS:
        raise _Damaged(f"page or buffer ids {low} to {high}; allowed are 0 to {MAX_IDS - 1}")


def _expand(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> PageIds:
    total = int(counts.sum())
    ids: PageIds
    if len(counts) == 1:
        ids = starts[0] + np.arange(total, dtype=np.int64)
    else:
        before = np.cumsum(counts) - counts
        ids = np.repeat(starts - before, counts) + np.arange(total, dtype=np.int64)
    ids.flags.writeable = False
    return ids
