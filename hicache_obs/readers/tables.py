"""Tables of an Nsight Systems export, whatever it was exported to: SQLite, or a folder of Parquet or Arrow files.

A source answers two questions: which columns a table has, and what is in some of them. Numbers come as ``int64``
with ``ABSENT`` for NULL, texts as lists. Nothing else of a file is ever looked at: an export also holds the
environment and the process list of the machine it was made on.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from hicache_obs.errors import TraceError
from hicache_obs.readers.profile import Int64s
from hicache_obs.readers.trace_file import first_bytes, size_of

ABSENT: Final = -(1 << 62)
"""In a column of numbers: NULL."""
MAX_VALUES: Final = 1 << 28
"""Most numbers of one table that are read, 8 bytes of memory each: a compressed file may hold any number of rows."""
MAX_TEXTS: Final = 1 << 24
"""Most texts of one table that are read."""
_SQLITE: Final = b"SQLite format 3\x00"
_HOT: Final = b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7"
"""Begin of a rollback journal that is not over."""
_ARROW: Final = b"ARROW1"
"""Begin of an Arrow file; a stream of the same has none."""
_BATCH: Final = 1 << 16
_LARGE: Final = 1 << 14
"""Rows from which the fast path pays."""


class Tables(Protocol):
    """An export's tables."""

    @property
    def source(self) -> Path: ...

    def columns(self, table: str) -> frozenset[str]:
        """Names of its columns; empty if there is no such table."""

    def numbers(self, table: str, names: Sequence[str]) -> list[Int64s]:
        """One ``(rows,) int64`` array per name; a column that the table lacks is all ``ABSENT``."""

    def texts(self, table: str, name: str) -> list[str | None]:
        """One text column."""

    def close(self) -> None:
        """Let go of the files."""


def open_tables(path: Path) -> Tables | None:
    """The export at ``path``, or ``None`` if it is none."""
    if os.path.isdir(path):
        for suffix, kind in ((".parquet", "parquet"), (".arrow", "ipc")):
            files = {file.stem: file for file in sorted(path.glob(f"*{suffix}")) if os.path.isfile(file)}
            if "StringIds" in files:
                return ArrowTables(path, files, kind)
        return None
    size_of(path)
    with path.open("rb") as file:
        if file.read(len(_SQLITE)) != _SQLITE:
            return None
    return SqliteTables(path)


class SqliteTables:
    """Tables of a SQLite file, opened read-only. Raises ``TraceError`` naming the file for whatever SQLite rejects."""

    def __init__(self, path: Path) -> None:
        self.source = path
        _check_written(path)
        try:
            self._connection = sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)
        except sqlite3.Error as error:
            raise TraceError(f"{path}: damaged SQLite file: {error}") from None
        try:
            self._connection.text_factory = lambda data: data.decode(errors="replace")
            self._connection.execute("PRAGMA trusted_schema = OFF")
            self._connection.execute("PRAGMA query_only = ON")
            query = "SELECT name, sql, rootpage FROM sqlite_master WHERE type = 'table'"
            rows = self._connection.execute(query).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:  # the latter: of SQLite's own message
            self._connection.close()
            raise TraceError(f"{path}: damaged SQLite file: {error}") from None
        self._fast = _fast_path(path)
        # A view or a virtual table runs what its author wrote; an export has neither.
        self._known = {name for name, sql, page in rows if page and sql and "VIRTUAL" not in sql[:40].upper()}

    def columns(self, table: str) -> frozenset[str]:
        """See ``Tables.columns``."""
        if table not in self._known:
            return frozenset()
        return frozenset(row[1] for row in self._all(f"PRAGMA table_info({_quote(table)})"))

    def numbers(self, table: str, names: Sequence[str]) -> list[Int64s]:
        """See ``Tables.numbers``."""
        have = self.columns(table)
        if not have:
            return [np.empty(0, np.int64) for _ in names]
        count = self._count(table, MAX_VALUES // len(names))
        wanted = [name for name in names if name in have]
        found = dict(zip(wanted, self._read(table, wanted, count), strict=True))
        return [found[name] if name in found else np.full(count, ABSENT, np.int64) for name in names]

    def texts(self, table: str, name: str) -> list[str | None]:
        """See ``Tables.texts``."""
        if name not in self.columns(table):
            return [None] * (self._count(table, MAX_TEXTS) if table in self._known else 0)
        self._count(table, MAX_TEXTS)
        rows = self._all(f"SELECT CAST({_quote(name)} AS TEXT) FROM {_quote(table)} ORDER BY rowid")
        return [row[0] for row in rows]

    def close(self) -> None:
        """See ``Tables.close``."""
        self._connection.close()

    def _count(self, table: str, limit: int) -> int:
        count = int(self._all(f"SELECT count(*) FROM {_quote(table)}")[0][0])
        _check_rows(self.source, table, count, limit)
        return count

    def _read(self, table: str, names: list[str], count: int) -> list[Int64s]:
        if not names:
            return []
        if self._fast is not None and count >= _LARGE:
            return self._fast(table, self._select(table, names))
        # CAST: a column of SQLite may hold anything; text becomes 0, a real is cut, both inside 64 bits.
        out = np.empty((count, len(names)), np.int64)
        try:
            cursor = self._connection.execute(self._select(table, names))
            place = 0
            while rows := cursor.fetchmany(_BATCH):
                out[place : place + len(rows)] = rows
                place += len(rows)
        except (sqlite3.Error, ValueError) as error:
            raise TraceError(f"{self.source}: table {table}: {error}") from None
        return list(out[:place].T)

    def _select(self, table: str, names: list[str]) -> str:
        columns = ", ".join(
            f"CAST(IFNULL({_quote(name)}, {ABSENT}) AS INTEGER) AS c{i}" for i, name in enumerate(names)
        )
        return f"SELECT {columns} FROM {_quote(table)} ORDER BY rowid"

    def _all(self, query: str) -> list[Any]:
        try:
            return self._connection.execute(query).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise TraceError(f"{self.source}: {error}") from None


class ArrowTables:
    """A folder with one file per table, as ``nsys export --type parquetdir`` or ``arrowdir`` makes it."""

    def __init__(self, path: Path, files: dict[str, Path], kind: str) -> None:
        self.source = path
        self._files = files
        self._kind = kind

    def columns(self, table: str) -> frozenset[str]:
        """See ``Tables.columns``."""
        if table not in self._files:
            return frozenset()
        try:
            return frozenset(self._dataset(table).schema.names)
        except UnicodeDecodeError as error:
            raise TraceError(f"{self._files[table]}: {error}") from None

    def numbers(self, table: str, names: Sequence[str]) -> list[Int64s]:
        """See ``Tables.numbers``."""
        import pyarrow as pa
        import pyarrow.compute as pc

        have = self.columns(table)
        if not have:
            return [np.empty(0, np.int64) for _ in names]
        wanted = [name for name in names if name in have]
        found = {}
        try:
            dataset = self._dataset(table)
            _check_rows(self.source, table, dataset.count_rows(), MAX_VALUES // len(names))
            rows = dataset.to_table(columns=wanted)
            rows.validate(full=True)  # offsets of a damaged file may lead anywhere
            for name in wanted:
                values = rows[name]
                if not pa.types.is_integer(values.type):
                    values = pc.cast(values, pa.int64())
                if values.null_count:  # of an unsigned column the upper half wraps, as without NULL
                    values = pc.fill_null(values.cast(pa.int64(), safe=False), ABSENT)
                found[name] = values.to_numpy().astype(np.int64, copy=False)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise TraceError(f"{self.source}: table {table}: {_first_line(error)}") from None
        return [found[name] if name in found else np.full(rows.num_rows, ABSENT, np.int64) for name in names]

    def texts(self, table: str, name: str) -> list[str | None]:
        """See ``Tables.texts``."""
        import pyarrow as pa

        have = self.columns(table)
        if not have:
            return []
        try:
            count = self._dataset(table).count_rows()
            _check_rows(self.source, table, count, MAX_TEXTS)
            if name not in have:
                return [None] * count
            column = self._dataset(table).to_table(columns=[name])[name]
            column.validate(full=True)
            found = column.to_pylist()
        except (pa.ArrowException, OSError, ValueError) as error:
            raise TraceError(f"{self.source}: table {table}: {_first_line(error)}") from None
        return [None if value is None else str(value) for value in found]

    def close(self) -> None:
        """See ``Tables.close``."""

    def _dataset(self, table: str) -> Any:
        import pyarrow as pa
        import pyarrow.dataset

        try:
            if self._kind == "ipc" and first_bytes(self._files[table], len(_ARROW)) != _ARROW:
                with pa.memory_map(os.fspath(self._files[table])) as file, pa.ipc.open_stream(file) as stream:
                    return pyarrow.dataset.dataset(stream.read_all())
            return pyarrow.dataset.dataset(os.fspath(self._files[table]), format=self._kind)
        except (pa.ArrowException, OSError) as error:
            raise TraceError(f"{self._files[table]}: {_first_line(error)}") from None


def _fast_path(path: Path) -> Callable[[str, str], list[Int64s]] | None:
    """A reader of large tables that makes no Python objects of their cells, if the extra ``profilers`` is installed."""
    try:
        from adbc_driver_sqlite import dbapi
    except ImportError:
        return None

    def read(table: str, query: str) -> list[Int64s]:
        try:
            with (
                dbapi.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1") as connection,
                connection.cursor() as cursor,
            ):
                cursor.execute(query)
                rows = cursor.fetch_arrow_table()
        except dbapi.Error as error:
            raise TraceError(f"{path}: table {table}: {_first_line(error)}") from None
        return [column.to_numpy().astype(np.int64, copy=False) for column in rows.columns]

    return read


def _check_written(path: Path) -> None:
    """Raises ``TraceError`` for a database whose last changes are in a file beside it: it is read without them."""
    real = os.path.realpath(path)
    wal, journal = Path(f"{real}-wal"), Path(f"{real}-journal")
    for file, unfinished in (
        (wal, os.path.isfile(wal) and wal.stat().st_size > 0),
        (journal, os.path.isfile(journal) and first_bytes(journal, len(_HOT)) == _HOT),
    ):
        if unfinished:
            raise TraceError(
                f"{path}: not written to its end: {file.name} beside it holds changes; let the program that writes it "
                f"finish, or open and close it once with sqlite3"
            )


def _check_rows(source: Path, table: str, count: int, limit: int) -> None:
    if count > limit:
        raise TraceError(f"{source}: table {table} has {count} rows; at most {limit} are read")


def _first_line(error: Exception) -> str:
    return str(error).split("\n", 1)[0]


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
