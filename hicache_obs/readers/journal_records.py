"""The records of one Arrow batch of a journal: every value is checked before it is believed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicache_obs.errors import TraceError
from hicache_obs.readers.journal_format import (
    ACCESSES,
    COMMON,
    FIELDS,
    KIND_NAMES,
    OPTIONAL,
)
from hicache_obs.readers.trace_file import node_fault, one_line
from hicache_obs.records import (
    MAX_IDS,
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

MAX_PAGES: Final = MAX_IDS
"""Page ids the accesses of one batch may hold, arrays that they share counted once.

A run length is just a number, and a file must not make us allocate the world.
"""


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
        raise TraceError(f"{place} is damaged: {one_line(error)}") from None


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


def define_of(o: OpId, t: ThreadId, h: int, space: int, number: int, text: str, value: int, _: Any) -> Define:
    """A name, of a record or of a segment's header.

    Raises:
        ValueError: There is no such space, or kind of stream.
    """
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
    Define: define_of,
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


_SPACES: Final = {space.value: space for space in Space}
_MODES: Final = {mode.value: mode for mode in Mode}
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
    ids, ends = _expand(starts, counts, lengths)
    arrays: list[PageIds] = []
    found: list[Access | _RowCell] = []
    for number, space in enumerate(spaces):
        same = same_as[number]
        if same is None:
            # A copy: a view would keep the ids of the whole batch as long as one of its accesses.
            own = ids[ends[number - 1] if number else 0 : ends[number]].copy()
            own.flags.writeable = False
            arrays.append(own)
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
            found.append(Access(_SPACES[space], _MODES[modes[number]], arrays[number], pools[number] or 0))
        except KeyError:
            raise _Damaged(
                f"access {number}: space {space}, mode {modes[number]}; "
                f"known are spaces {min(_SPACES)} to {max(_SPACES)}, modes {min(_MODES)} to {max(_MODES)}"
            ) from None
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


def _expand(
    starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]
) -> tuple[PageIds, list[int]]:
    """The ids of all runs of a batch, and where those of each access end. ``lengths``: how many runs each has."""
    before = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
    ids = np.repeat(starts - before[:-1], counts) + np.arange(before[-1], dtype=np.int64)
    return ids, before[np.cumsum(lengths)].tolist()
