"""Reads a journal. What a killed agent or a full disk left half-written is never believed: reading stops at the last
whole batch and says so. ``journal_format`` has the columns, ``journal_writer`` the partner.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
from pyarrow import ipc

from hicache_obs.errors import TraceError
from hicache_obs.readers.journal_format import (
    FILE_NAME,
    JOURNAL_VERSION,
    META,
    SCHEMA,
    STREAM_START,
    JournalInfo,
    records_of,
)
from hicache_obs.readers.journal_records import batch_records, define_of
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.readers.stored import AnyPath, StoredPath
from hicache_obs.readers.trace_file import entries, one_line, size_of
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Define,
    DropReason,
    Lost,
    ThreadId,
)
from hicache_obs.trace import Trace, make_trace

__all__ = ["JournalInfo", "JournalWriter", "newest_run", "read_definitions", "read_journal", "read_segment"]

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
    return [*_newest_run(target, rank, notes)] if os.path.isdir(target) else [_segment(target, notes)]


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
            found.append(define_of(NO_OP, ThreadId(thread), host_ns, space, key, text, value, None))
        return found
    except (ValueError, TypeError, RecursionError) as error:
        raise TraceError(f"{path}: damaged header: {META}definitions: {one_line(error)}") from None


def journal_ranks(directory: Path) -> list[int]:
    """Ranks that have a journal in ``directory``, ascending.

    Raises:
        TraceError: It cannot be listed.
    """
    return sorted({int(match[1]) for file in entries(directory) if (match := FILE_NAME.fullmatch(file.name))})


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
            raise TraceError(
                f"{directory}: holds the journals of ranks {known}: say which one (--rank N); "
                "'hicache-obs analyze' takes all"
            )
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
        files = older[0] if len(older) == 1 else f"{older[0]} to {older[-1]}"
        notes.append(f"{directory}: older runs are left out ({files}); open a file to read it")
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
        raise TraceError(f"{path}: not a journal: {one_line(error)}") from None


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
                    raise TraceError(f"{path}: batch {number} is damaged: {one_line(error)}") from None
                notes.append(f"{path}: ends in the middle of batch {number}; the records before it are whole")
                return
            yield batch_records(batch, f"{path}: batch {number}")
