"""Writes a journal: records kept on disk as Arrow IPC streams, one batch per flush, in segments of bounded size.

Used by the agent, which is above readers and recorder alike; it lives here because it shares the columns with
the reader. A batch reaches the file in one piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from hicache_obs.errors import ConfigError
from hicache_obs.readers.journal_format import (
    ACCESS,
    COLUMNS,
    COMMON,
    FIELDS,
    FILE_NAME,
    KIND_NAMES,
    RUNS,
    SCHEMA,
    JournalInfo,
    header_metadata,
    pack_definitions,
    records_of,
)
from hicache_obs.records import (
    NO_OP,
    ROWS_CELL,
    Access,
    AnyRecord,
    Define,
    DropReason,
    Kernel,
    Lost,
    PageAlloc,
    PageFree,
    PageIds,
    RowsDiscarded,
    ThreadId,
)

_END_OF_STREAM: Final = b"\xff\xff\xff\xff\0\0\0\0"
DEFAULT_SEGMENT_BYTES: Final = 64 << 20


class JournalWriter:
    """Writes the records of one rank. One thread at a time; does file I/O, so never on a launching thread.

    Existing files are left alone: a new run in the same directory takes the next numbers. The first segment is
    made at once, so that a directory that cannot be written to is known before anything has been recorded.

    Args:
        directory: Made if it does not exist.
        rank: Number of the worker; part of the file names.
        engine: Name and version of the recorded engine.
        clock: Name of the clock of ``host_ns``.
        wall_ns, host_ns: Unix time and host clock, read together.
        segment_bytes: A segment that has grown to this size is followed by a new one.
        resume: The last segment of a run to go on with, by another writer.
        records_before: Records of the run before the first one written here; those that no segment holds are gone.
        definitions: Asked at each new segment for the names in use.

    Raises:
        ConfigError: The directory cannot be written to.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        rank: int = 0,
        engine: str = "",
        clock: str = "",
        wall_ns: int = 0,
        host_ns: int = 0,
        segment_bytes: int = DEFAULT_SEGMENT_BYTES,
        resume: JournalInfo | None = None,
        records_before: int = 0,
        definitions: Callable[[], Iterable[Define]] = tuple,
    ) -> None:
        if segment_bytes < 1:
            raise ConfigError(f"journal segment_bytes={segment_bytes}: must be at least 1")
        self.directory: Final = Path(directory)
        self._info = JournalInfo(rank=rank, engine=engine, clock=clock, wall_ns=wall_ns, host_ns=host_ns)
        self._segment_bytes = segment_bytes
        self._definitions = definitions
        self._segments = 0
        if resume is not None:
            self._info = replace(self._info, run=resume.run)
            self._segments = resume.segment
        self._written = records_before
        self._lost = 0
        self._segment: _SegmentFile | None = None
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._segment = self._next_segment()
        except OSError as error:
            raise ConfigError(
                f"--journal {self.directory}: {error.strerror}; name a directory this process can write to"
            ) from None

    @property
    def path(self) -> Path | None:
        """The segment that is being written; ``None`` between two segments."""
        return None if self._segment is None else self._segment.path

    @property
    def segment(self) -> int:
        """Number of the newest segment in its run."""
        return self._segments

    def write(self, records: Sequence[AnyRecord]) -> None:
        """Append ``records`` as one batch; nothing happens if there are none.

        Raises:
            OSError: The disk is full or gone. The file ends after the last whole batch, as before; the next batch
                that can be written states the loss.
        """
        if not records:
            return
        self._put([*self._losses(records[0].thread, records[0].host_ns), *records])

    @property
    def settled(self) -> bool:
        """Whether all that was to be written is there, or stated as lost."""
        return not self._lost

    def settle(self) -> None:
        """State a loss that no later batch has stated yet.

        Raises:
            OSError: As ``write``.
        """
        if self._lost:
            self._put(self._losses(ThreadId(0), 0))

    def _losses(self, thread: ThreadId, host_ns: int) -> list[AnyRecord]:
        return [Lost(NO_OP, thread, host_ns, self._lost, DropReason.MISSING)] if self._lost else []

    def _put(self, records: Sequence[AnyRecord]) -> None:
        """Append ``records``, which begin with what was lost before them."""
        try:
            if self._segment is None:
                self._segment = self._next_segment()
            self._segment.write(record_batch(records))
        except OSError:
            self._lost += len(records) - (1 if self._lost else 0)
            raise
        self._lost = 0
        self._written += sum(map(records_of, records))
        if self._segment.size_bytes >= self._segment_bytes:
            self._finish_segment()

    def close(self) -> None:
        """End the last segment. Idempotent; ``write`` after it starts a new segment. See ``settle``."""
        self._finish_segment()

    def _finish_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            segment.close()

    def _next_segment(self) -> _SegmentFile:
        rank = self._info.rank
        taken = [
            int(m[2]) for p in self.directory.iterdir() if (m := FILE_NAME.fullmatch(p.name)) and int(m[1]) == rank
        ]
        number = max(taken, default=0) + 1
        definitions = pack_definitions(self._definitions())
        header = replace(self._info, segment=self._segments + 1, records_before=self._written, definitions=definitions)
        schema = SCHEMA.with_metadata(header_metadata(header))
        while True:
            try:
                segment = _SegmentFile(self.directory / f"rank{rank}-{number:06d}.arrows", schema)
            except FileExistsError:
                number += 1
            else:
                self._segments += 1
                return segment


class _SegmentFile:
    """One file. A message of the Arrow stream reaches it whole or not at all."""

    def __init__(self, path: Path, schema: Any) -> None:
        self.path = path
        self.size_bytes = 0
        self._file = open(path, "xb", buffering=0)  # noqa: SIM115 closed by close()
        try:
            self._put(schema.serialize())
        except BaseException:
            self._file.close()
            path.unlink(missing_ok=True)
            raise

    def write(self, batch: Any) -> None:
        """Append one batch."""
        self._put(batch.serialize())

    def close(self) -> None:
        """Append the stream's end mark and close the file."""
        try:
            self._put(_END_OF_STREAM)
        except OSError:
            pass  # the mark is a courtesy: a stream may as well just end
        finally:
            self._file.close()

    def _put(self, message: Any) -> None:
        """Write ``message``; on failure cut off what got through of it."""
        left = memoryview(message)
        size = len(left)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._file.truncate(self.size_bytes)
            self._file.seek(self.size_bytes)
            raise
        self.size_bytes += size


# -- records to a batch --------------------------------------------------------------------------------------


def record_batch(records: Sequence[AnyRecord], *, shared: bool = True) -> Any:
    """``records`` as one Arrow batch of ``SCHEMA``.

    Args:
        shared: An array that several accesses carry is kept once, and ``same_as`` refers to it.
    """
    columns: dict[str, list[Any]] = {name: [None] * len(records) for name, _ in COLUMNS}
    kinds = columns["kind"]
    accesses = _AccessColumn(shared=shared)
    for row, record in enumerate(records):
        kind = type(record)
        kinds[row] = KIND_NAMES[kind]
        for name, get in COMMON:
            columns[name][row] = get(record)
        for name, get in FIELDS[kind]:
            columns[name][row] = get(record)
        if isinstance(record, (PageAlloc, PageFree)):
            accesses.add((record.access,))
        else:
            accesses.add(getattr(record, "accesses", ()), _row_cell(record))
    arrays = [pa.array(columns[name], type=type_) for name, type_ in COLUMNS]
    return pa.RecordBatch.from_arrays([*arrays, accesses.array()], schema=SCHEMA)


class _AccessColumn:
    """Builds the accesses of a batch from flat lists: nested Python objects would be several times slower."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._spaces: list[int] = []
        self._modes: list[int] = []
        self._pools: list[int] = []
        self._same_as: list[int | None] = []
        self._of_record = [0]
        self._of_access = [0]
        self._starts: list[npt.NDArray[np.int64]] = []
        self._counts: list[npt.NDArray[np.int64]] = []
        self._runs = 0
        self._first: dict[int, int] = {}

    def add(self, accesses: tuple[Access, ...], rows: PageIds | None = None) -> None:
        """The accesses of the next record, and its row cell."""
        for access in accesses:
            self._add(access.space, access.mode, access.pool, access.ids)
        if rows is not None:
            self._add(ROWS_CELL, 0, 0, rows)
        self._of_record.append(len(self._spaces))

    def _add(self, space: int, mode: int, pool: int, ids: PageIds) -> None:
        number = len(self._spaces)
        # By identity, which is safe: the records of the batch keep the arrays alive.
        first = self._first.setdefault(id(ids), number) if self._shared else number
        self._spaces.append(space)
        self._modes.append(mode)
        self._pools.append(pool)
        self._same_as.append(None if first == number else first)
        if first == number:
            starts, counts = _runs(ids)
            self._starts.append(starts)
            self._counts.append(counts)
            self._runs += len(starts)
        self._of_access.append(self._runs)

    def array(self) -> Any:
        """The whole column."""
        empty = [np.zeros(0, dtype=np.int64)]
        runs = pa.StructArray.from_arrays(
            [pa.array(np.concatenate(self._starts or empty)), pa.array(np.concatenate(self._counts or empty))],
            fields=list(RUNS.value_type),
        )
        accesses = pa.StructArray.from_arrays(
            [
                pa.array(self._spaces, type=pa.int8()),
                pa.array(self._modes, type=pa.int8()),
                pa.array(self._pools, type=pa.int32()),
                pa.ListArray.from_arrays(pa.array(self._of_access, type=pa.int32()), runs, type=RUNS),
                pa.array(self._same_as, type=pa.int32()),
            ],
            fields=list(ACCESS),
        )
        return pa.ListArray.from_arrays(pa.array(self._of_record, type=pa.int32()), accesses, type=pa.list_(ACCESS))


def _row_cell(record: AnyRecord) -> PageIds | None:
    if isinstance(record, Kernel):
        return record.rows
    return record.requests if isinstance(record, RowsDiscarded) else None


def _runs(ids: PageIds) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """``ids`` as runs of consecutive numbers, in the given order."""
    if not len(ids):
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    first = np.concatenate(([0], np.flatnonzero(ids[1:] - ids[:-1] != 1) + 1))
    return ids[first], np.diff(first, append=len(ids)).astype(np.int64)
