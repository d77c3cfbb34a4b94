"""The journals of a node: one folder per ring, bounded in size, and the way back into one after a restart.

A ring's folder is named after the ring and the moment it was made, since names come back when process ids do.
Journals number records as the ring does, so that an agent that takes over knows which records are kept already.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache_obs.agent import scrape_mark
from hicache_obs.analyzer import Analyzer
from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.readers.journal import JournalInfo, JournalWriter, newest_run, read_definitions, read_segment
from hicache_obs.readers.journal_format import records_of
from hicache_obs.readers.ring_header import RingInfo
from hicache_obs.recorder.ring_directory import RingName
from hicache_obs.records import NO_OP, AnyRecord, Define, DefineSpace, DropReason, Lost, ThreadId

MAX_DEFINITIONS: Final = 4096
SEGMENT_BYTES: Final = 8 << 20
REBUILD_BYTES: Final = 16 << 20
"""How much of a journal an agent that takes over reads again; pairs with older accesses are unknown to it."""
_RETRY_S: Final = 5.0
_SETTLE_S: Final = 1.0
_LASTING: Final = frozenset(DefineSpace) - {
    DefineSpace.EVENT,
    DefineSpace.REQUEST,
    DefineSpace.REQUEST_TRACE,
    DefineSpace.IO,
    DefineSpace.TENSOR,
}
"""What has a name for as long as the process runs; the others' names would only push these out."""


def journal_folder(journals: Path, ring: Path, info: RingInfo) -> Path:
    """Where the records of ``ring`` are kept below ``journals``."""
    made = datetime.datetime.fromtimestamp(info.wall_ns // 1_000_000 / 1e3, datetime.timezone.utc)
    return journals / f"{ring.stem}.{made:%Y%m%dT%H%M%S}.{made.microsecond // 1000:03d}Z"


@dataclass(frozen=True, slots=True)
class Rebuilt:
    """What a journal gave back to an agent that takes over a ring.

    Attributes:
        kept: Number of the first record that the journal does not hold, and that the ring does.
        stated: Number of the first record that the journal says nothing of, not even that it is gone.
        last: Header of its last segment, to go on from; ``None`` if there is nothing to go on from.
        definitions: The names in it.
        problem: Why it could not be read to its end.
    """

    kept: int
    stated: int = 0
    last: JournalInfo | None = None
    definitions: Sequence[Define] = ()
    problem: TraceError | None = None


def rebuild(
    analyzer: Analyzer,
    folder: Path | None,
    info: RingInfo,
    *,
    tail: int,
    unshown: int | None = None,
    listen: Callable[[], None] = lambda: None,
) -> Rebuilt:
    """Bring ``analyzer`` to the state of the agent that has freed all records before ``tail``.

    What the journal does not hold is lost to the analyzer, and it is told so: pairs with such accesses are unknown.

    Args:
        analyzer: A new one, with nobody listening: the other agent has reported all before ``unshown``.
        folder: Of this ring's journal; ``None`` without journals.
        info: The ring's header.
        tail: Number of the first record that is still in the ring.
        unshown: Number of the first record whose results nobody has been shown; by default ``tail``.
        listen: Called before that one is fed.
    """
    unshown = tail if unshown is None else unshown
    number, listening = 0, False
    last: JournalInfo | None = None
    definitions: list[Define] = []
    problem = None
    try:
        for file, header in _newest_segments(folder, info.ranks.tp) if folder is not None else ():
            if header.records_before > number:
                definitions += read_definitions(file, header)
                analyzer.feed([_missing(info, header.records_before - number), *definitions])
                number = header.records_before
            for batch in read_segment(file, []):
                definitions = [*definitions, *(r for r in batch if type(r) is Define)][-MAX_DEFINITIONS:]
                for part in _split(batch, unshown - number):
                    if unshown <= number < tail and not listening:
                        listening = True
                        listen()
                    number += _feed(analyzer, part, tail - number)
            last = header
    except TraceError as error:
        last, problem = None, error
    if number < tail:
        analyzer.feed([_missing(info, tail - number)])
    kept = max(number, tail)
    # A damaged journal stays the newest run, as far as it can be read, until there is something new to keep.
    return Rebuilt(kept, kept if problem is not None else number, last, definitions, problem)


def _missing(info: RingInfo, count: int) -> Lost:
    return Lost(NO_OP, ThreadId(0), info.host_ns, count, DropReason.MISSING)


def _newest_segments(folder: Path, rank: int) -> list[tuple[Path, JournalInfo]]:
    if not folder.is_dir() or not any(folder.glob("*.arrows")):
        return []
    run = newest_run(folder, rank=rank)
    size, first = 0, len(run)
    while first and (size == 0 or size + run[first - 1][0].stat().st_size <= REBUILD_BYTES):
        first -= 1
        size += run[first][0].stat().st_size
    return run[first:]


def _split(batch: Sequence[AnyRecord], first: int) -> list[Sequence[AnyRecord]]:
    """``batch`` in two: the records that stand for less than ``first`` ones, and those behind; only parts with any."""
    count = place = 0
    while place < len(batch) and count < first:
        count += records_of(batch[place])
        place += 1
    return [part for part in (batch[:place], batch[place:]) if part]


def _feed(analyzer: Analyzer, batch: Sequence[AnyRecord], limit: int) -> int:
    """Feed the records of ``batch`` that come before the next ``limit``; returns how many the batch stands for."""
    count = 0
    for place, record in enumerate(batch):
        if count >= limit:
            analyzer.feed(batch[:place])
            return count + sum(map(records_of, batch[place:]))
        count += records_of(record)
    analyzer.feed(batch)
    return count


class RingJournal:
    """Keeps the records of one ring. Never raises for a disk that fails: that is told, and the next batch that can
    be written states how many records are missing.

    Args:
        folder: Of this ring, see ``journal_folder``.
        info: The ring's header.
        max_bytes: All folders of this rank together; the oldest segments are deleted first.
        on_error: Told what went wrong.
        position: Number of the first record that comes.
        stated: Number of the first record that the journal says nothing of.
        resume: The last segment to go on from.
    """

    def __init__(
        self,
        folder: Path,
        info: RingInfo,
        *,
        max_bytes: int,
        on_error: Callable[[Exception], None],
        position: int = 0,
        stated: int = 0,
        resume: JournalInfo | None = None,
    ) -> None:
        self.folder: Final = folder
        self._info = info
        self._max_bytes = max_bytes
        self._on_error = on_error
        self._position = position
        self._stated = stated
        """As long as there is no writer: the header of its first segment says how many came before."""
        self._resume = resume
        self._definitions: dict[tuple[DefineSpace, int], Define] = {}
        self._writer: JournalWriter | None = None
        self._retry_at = self._settle_at = 0.0
        self._segment = 0

    def learn(self, records: Sequence[AnyRecord]) -> None:
        """Take over the names in ``records``, for the headers of segments to come."""
        known = self._definitions
        for record in records:
            if type(record) is Define and record.space in _LASTING:
                known[record.space, record.id] = record
                if len(known) > MAX_DEFINITIONS:
                    del known[next(iter(known))]

    def write(self, records: Sequence[AnyRecord]) -> None:
        """Keep ``records`` as one batch."""
        self.learn(records)
        try:
            writer = self._open()
            if writer is not None:
                writer.write(records)
                if writer.segment != self._segment:
                    self._segment = writer.segment
                    self._bound(writer.path)
        except (OSError, ConfigError) as error:
            self._on_error(error)
        self._position += len(records)

    @property
    def settled(self) -> bool:
        """Whether every record is in the journal, or stated there as gone."""
        return self._position == self._stated if self._writer is None else self._writer.settled

    def settle(self) -> None:
        """State what no later batch has stated: after the last one, and before the end. As ``write``, it may fail."""
        if self.settled or time.monotonic() < self._settle_at:
            return
        self._settle_at = time.monotonic() + _SETTLE_S
        try:
            writer = self._open()
            if writer is not None:
                writer.settle()
        except (OSError, ConfigError) as error:
            self._on_error(error)

    def close(self) -> None:
        """End the segment."""
        self.settle()
        if self._writer is not None:
            self._writer.close()

    def _open(self) -> JournalWriter | None:
        """The writer; ``None`` while a failure to open it is recent."""
        if self._writer is None and time.monotonic() >= self._retry_at:
            self._retry_at = time.monotonic() + _RETRY_S
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._writer = JournalWriter(
                self.folder,
                rank=self._info.ranks.tp,
                clock="ring",
                wall_ns=self._info.wall_ns,
                host_ns=self._info.host_ns,
                segment_bytes=max(1, min(SEGMENT_BYTES, self._max_bytes // 4)),
                resume=self._resume,
                records_before=self._position,
                definitions=self._definitions.values,
            )
        return self._writer

    def _bound(self, current: Path | None) -> None:
        """Delete the oldest segments of this rank, but not ``current``, until the rest fits."""
        name = RingName.parse(f"{self.folder.name.rsplit('.', 2)[0]}.ring")
        group = self.folder.name if name is None else f"{str(name).split('.')[0]}."
        folders = sorted(self.folder.parent.glob(f"{group}*"), key=_made)
        files = [file for folder in folders for file in sorted(folder.glob("*.arrows"))]
        sizes = {file: file.stat().st_size for file in files}
        total = sum(sizes.values())
        for file in files:
            if total <= self._max_bytes:
                return
            if file == current:
                continue
            file.unlink()
            total -= sizes[file]
            if file.parent != self.folder and not any(file.parent.glob("*.arrows")):
                scrape_mark.remove(file.parent)
                if not any(file.parent.iterdir()):
                    os.rmdir(file.parent)


def _made(folder: Path) -> str:
    """The moment in a folder's name."""
    return ".".join(folder.name.rsplit(".", 2)[1:])
