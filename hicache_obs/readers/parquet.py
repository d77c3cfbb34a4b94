"""Records as Parquet: one file per rank, for other people's tools; and the way back.

The columns are those of a journal (``journal_format``, docs/formats.md). Only ``same_as`` is empty: each access states
its own pages, so that a row can be used without the rows before it. Compression takes care of the repetition.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from pyarrow import parquet

from hicache_obs.errors import TraceError
from hicache_obs.readers.journal import read_header
from hicache_obs.readers.journal_format import SCHEMA, JournalInfo, header_metadata
from hicache_obs.readers.journal_records import batch_records
from hicache_obs.readers.journal_writer import record_batch
from hicache_obs.readers.trace_file import entries, size_of
from hicache_obs.records import Access, AnyRecord, PageAlloc, PageFree, PageIds

PARQUET_NAME: Final = re.compile(r"rank(\d+)\.parquet")
MAX_ROWS: Final = 1 << 14
"""Rows of one row group."""
MAX_GROUP_IDS: Final = 1 << 22
"""Page ids of one row group: it is in memory as a whole, when written and when read."""
MAX_GROUP_BYTES: Final = 1 << 30
"""Of one row group, as it is when unpacked; ours are far smaller. A file states it before anything is unpacked."""


def write_parquet(path: Path, batches: Iterable[Sequence[AnyRecord]], info: JournalInfo) -> int:
    """Write all records to a new file; returns how many.

    Raises:
        OSError: The file cannot be written.
    """
    header = replace(info, segment=1, records_before=0, definitions="")
    count = 0
    with (
        path.open("xb") as file,
        parquet.ParquetWriter(file, SCHEMA.with_metadata(header_metadata(header)), compression="zstd") as writer,
    ):
        for group in _groups(batches):
            writer.write_batch(record_batch(group, shared=False))
            count += len(group)
    return count


def _groups(batches: Iterable[Sequence[AnyRecord]]) -> Iterator[list[AnyRecord]]:
    """The same records in groups of bounded size."""
    group: list[AnyRecord] = []
    ids = 0
    for batch in batches:
        for record in batch:
            more = _ids(record)
            if group and (len(group) == MAX_ROWS or ids + more > MAX_GROUP_IDS):
                yield group
                group, ids = [], 0
            group.append(record)
            ids += more
    if group:
        yield group


def _ids(record: AnyRecord) -> int:
    if isinstance(record, (PageAlloc, PageFree)):
        return len(record.access.ids)
    rows = getattr(record, "rows", None)
    return sum(len(access.ids) for access in getattr(record, "accesses", ())) + (0 if rows is None else len(rows))


def parquet_info(path: Path) -> JournalInfo:
    """The header of a file.

    Raises:
        TraceError: It is no Parquet file of records.
    """
    with _open(path) as file:
        return read_header(path, file.schema_arrow)


def parquet_batches(path: Path) -> Iterator[list[AnyRecord]]:
    """The records of a file, row group by row group. Equal page sets of one row group come out as one array.

    Raises:
        TraceError: It is no Parquet file of records, or damaged.
    """
    with _open(path) as file:
        read_header(path, file.schema_arrow)
        for number in range(file.metadata.num_row_groups):
            place = f"{path}: row group {number + 1}"
            size = file.metadata.row_group(number).total_byte_size
            if not 0 <= size <= MAX_GROUP_BYTES:
                raise TraceError(f"{place} has {size} bytes; allowed are {MAX_GROUP_BYTES}")
            try:
                table = file.read_row_group(number).combine_chunks()
            except (pa.ArrowException, OSError) as error:
                raise TraceError(f"{place} is damaged: {str(error).splitlines()[0]}") from None
            for batch in table.to_batches():
                yield _shared(batch_records(batch, place))


def _shared(records: list[AnyRecord]) -> list[AnyRecord]:
    """The same records, with one array for equal page sets: checks that compare arrays by identity stay fast."""
    known: dict[bytes, PageIds] = {}

    def once(ids: PageIds) -> PageIds:
        return known.setdefault(ids.tobytes(), ids)

    found: list[AnyRecord] = []
    for record in records:
        accesses, rows = getattr(record, "accesses", ()), getattr(record, "rows", None)
        if not accesses and rows is None:
            found.append(record)
            continue
        fields = {name: getattr(record, name) for name in type(record).__struct_fields__}
        fields["accesses"] = tuple(Access(a.space, a.mode, once(a.ids), a.pool) for a in accesses)
        if rows is not None:
            fields["rows"] = once(rows)
        found.append(type(record)(**fields))
    return found


def parquet_ranks(directory: Path) -> list[int]:
    """Ranks that have a Parquet file in ``directory``, ascending.

    Raises:
        TraceError: It cannot be listed.
    """
    return sorted({int(match[1]) for file in entries(directory) if (match := PARQUET_NAME.fullmatch(file.name))})


def parquet_file(path: str | os.PathLike[str], rank: int | None) -> Path:
    """The file of ``rank``, where ``path`` is a folder of them; ``path`` itself otherwise.

    Raises:
        TraceError: There are several and ``rank`` names none of them.
    """
    target = Path(path)
    if not os.path.isdir(target):
        return target
    ranks = parquet_ranks(target)
    known = ", ".join(map(str, ranks))
    if rank is None and len(ranks) == 1:
        rank = ranks[0]
    if rank is None:
        raise TraceError(
            f"{target}: holds the records of ranks {known}: say which one (--rank N); 'hicache-obs analyze' takes all"
        )
    if rank not in ranks:
        raise TraceError(f"{target}: holds no records of rank {rank}, only of {known}")
    return target / f"rank{rank}.parquet"


def _open(path: Path) -> Any:
    size_of(path)
    try:
        return parquet.ParquetFile(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:  # the last: a column's name
        raise TraceError(f"{path}: not a Parquet file: {str(error).splitlines()[0]}") from None
