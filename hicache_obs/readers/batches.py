"""``open_batches``: a trace file of any kind, batch by batch and as often as needed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from hicache_obs.readers.open import Container, container, open_trace
from hicache_obs.records import AnyRecord, OpId
from hicache_obs.trace import Trace

if TYPE_CHECKING:
    from hicache_obs.readers.journal_format import JournalInfo
    from hicache_obs.readers.stored import AnyPath, StoredPath

STEP: Final = 1 << 14


@dataclass(frozen=True, slots=True)
class Batches:
    """Records that can be gone through again and again.

    Attributes:
        source: Where they come from, for messages.
        labels: As in ``Trace``.
        info: Header of a journal or Parquet file; ``None`` for others.
        notes: What had to be left out; complete once ``read`` has come to its end.
        read: Starts from the beginning. It may raise ``TraceError`` at any place.
    """

    source: str
    read: Callable[[], Iterator[Sequence[AnyRecord]]]
    labels: Mapping[OpId, str] = field(default_factory=dict)
    info: JournalInfo | None = None
    notes: list[str] = field(default_factory=list)


def open_batches(path: str | os.PathLike[str] | StoredPath, *, rank: int | None = None) -> Batches:
    """The records of a ring file, journal, Parquet file or scenario.

    Journals and Parquet files are read batch by batch; of the others, which are small or must be read whole, all
    records are in memory. Elsewhere than on this machine only journals are read.

    Raises:
        TraceError: It is none of these, or cannot be read.
    """
    if not isinstance(path, str | os.PathLike):
        return _journal(path, rank)
    target = Path(path)
    kind = container(target)
    if kind is Container.JOURNAL:
        return _journal(target, rank)
    if kind is Container.PARQUET:
        from hicache_obs.readers.parquet import parquet_batches, parquet_file, parquet_info

        file = parquet_file(target, rank)
        return Batches(str(target), lambda: parquet_batches(file), info=parquet_info(file))
    return trace_batches(open_trace(target))


def _journal(target: AnyPath, rank: int | None) -> Batches:
    from hicache_obs.readers.journal import journal_batches, journal_segments

    notes: list[str] = []
    info = journal_segments(target, rank=rank, notes=[])[-1][1]

    def read() -> Iterator[Sequence[AnyRecord]]:
        notes.clear()
        return journal_batches(target, rank=rank, notes=notes)

    return Batches(str(target), read, info=info, notes=notes)


def trace_batches(trace: Trace) -> Batches:
    """A trace that is in memory already."""

    def read() -> Iterator[Sequence[AnyRecord]]:
        return (trace.records[begin : begin + STEP] for begin in range(0, len(trace), STEP))

    return Batches(trace.source, read, labels=trace.labels, notes=list(trace.notes))
