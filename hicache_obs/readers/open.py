"""``open_trace``: a trace file of any kind, told apart by its contents."""

from __future__ import annotations

import enum
import os
from pathlib import Path
from typing import Final

from hicache_obs.errors import TraceError
from hicache_obs.readers.open_profile import EVENTS, GZIP, SQLITE
from hicache_obs.readers.ring import read_ring
from hicache_obs.readers.trace_file import entries, first_bytes
from hicache_obs.records import RING_MAGIC
from hicache_obs.trace import Trace, make_trace

_ARROW_STREAM: Final = b"\xff\xff\xff\xff"
_PARQUET: Final = b"PAR1"
_START: Final = 1 << 14
"""Bytes in which a profiler's JSON shows what it is."""
_RECORDINGS: Final = (".pt.trace.json", ".json.gz", ".nsys-rep", ".qdrep", ".qdstrm", ".sqlite")
SHOWN: Final = 3
"""Folders that a message names; the rest are not listed."""


class Container(enum.Enum):
    """What a path holds."""

    RING = enum.auto()
    JOURNAL = enum.auto()
    PARQUET = enum.auto()
    SCENARIO = enum.auto()


def container(path: Path) -> Container:
    """What kind of trace is at ``path``, by its first bytes or, of a directory, by the names in it.

    Raises:
        TraceError: None of them, or it cannot be read.
    """
    if os.path.isdir(path):
        return _folder(path)
    start = first_bytes(path, _START)
    if start.startswith((SQLITE, GZIP)) or EVENTS in start:
        raise TraceError(f"{path}: a recording of a profiler, which 'hicache-obs analyze' judges")
    if start.startswith(RING_MAGIC):
        return Container.RING
    if start.startswith(_ARROW_STREAM):
        return Container.JOURNAL
    if start.startswith(_PARQUET):
        return Container.PARQUET
    if start.lstrip().startswith(b"{"):
        return Container.SCENARIO
    if not start:
        raise TraceError(f"{path}: is empty")
    raise TraceError(
        f"{path}: not a ring file, a journal (directory or .arrows segment), Parquet, a scenario (JSON) "
        f"or a profiler's recording; it begins with {start[:16]!r}"
    )


def _folder(path: Path) -> Container:
    """What a directory holds. One without records says where they may be, if something in it looks like them."""
    names = [file.name for file in entries(path)]
    if any(name.startswith("rank") and name.endswith(".parquet") for name in names):
        return Container.PARQUET
    if not any(name.endswith(".arrows") for name in names):
        if any(name.endswith(".ring") for name in names):
            raise TraceError(f"{path}: no journal here, but ring files: name them, as in {path}/*.ring")
        journals = sorted({file.parent.name for file in path.glob("*/rank*-*.arrows")})
        if journals:
            shown = ", ".join(journals[:SHOWN]) + (", ..." if len(journals) > SHOWN else "")
            raise TraceError(
                f"{path}: no journal here, but in its folders {shown}: name one, or 'hicache-obs analyze {path}' "
                "judges all"
            )
        found = [path / name for name in names] + [*path.glob("torch/*")]  # 'record --with torch' leaves them there
        recordings = sorted({f"{f.parent}/*{end}" for f in found for end in _RECORDINGS if f.name.endswith(end)})
        if recordings:
            raise TraceError(
                f"{path}: no journal here, but files of a profiler: name them, as in {', '.join(recordings)}"
            )
    return Container.JOURNAL


def open_trace(path: str | os.PathLike[str], *, rank: int | None = None) -> Trace:
    """The trace in a ring file, a journal (directory or segment), Parquet or a scenario. Nothing is changed.

    Args:
        path: The file or directory.
        rank: Which rank of a directory; may be left out if there is only one.

    Raises:
        TraceError: It is none of these, or cannot be read.
    """
    target = Path(path)
    kind = container(target)
    if kind is Container.RING:
        return read_ring(target)
    if kind is Container.JOURNAL:
        from hicache_obs.readers.journal import read_journal  # pyarrow takes 0.1 s to import; others do without

        return read_journal(target, rank=rank)
    if kind is Container.PARQUET:
        from hicache_obs.readers.parquet import parquet_batches, parquet_file

        file = parquet_file(target, rank)
        return make_trace(str(target), [record for batch in parquet_batches(file) for record in batch])
    from hicache_obs.readers.scenario import read_scenario  # the only reader that needs msgspec

    return read_scenario(target)
