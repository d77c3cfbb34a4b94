"""Journals of a server's ranks, in the agent's folders: for tests of ``fleet`` and its benchmark.

The tensor-parallel ranks of a server enter a collective before every round and then decide the same: which pages are
freed and handed out, what is loaded back and written back. A ``Fault`` makes one rank differ in one way.
"""

from __future__ import annotations

import datetime
import enum
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from hicache_obs.readers.journal_writer import DEFAULT_SEGMENT_BYTES, JournalWriter
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Collective,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    Lost,
    Mode,
    PageAlloc,
    PageFree,
    Purpose,
    Ranks,
    device,
    host,
)
from hicache_obs.testing.rounds import FORWARD, LOAD, MAIN, Rounds

SITES: Final = ((100, "agree on the batch"), (101, "agree on what is written back"))
"""Of the collectives, in turn."""
GROUP: Final = 0
MADE_NS: Final = 1_767_225_600_000_000_000
"""When the recordings begin, by a clock that is right."""
PERIOD_NS: Final = 1_000_000
"""Between the collectives of two rounds; more than a round takes."""
LAST_NS: Final = 50_000
"""The ranks enter a collective this long before all have, or less."""
BATCH: Final = 8192
"""Records of one batch of a journal."""


class Fault(enum.Enum):
    """What a rank does differently."""

    RACE = "a load-back without a fence"
    EVICTS_MORE = "frees and hands out one page more"
    SKIPS_COLLECTIVE = "does not enter a collective"
    LOSES_RECORDS = "loses the records of a round"


@dataclass(frozen=True, slots=True)
class ServerRank:
    """One rank to write.

    Attributes:
        ranks: Which worker it is.
        rounds: How many rounds it runs.
        faults: Round of each fault, from 1.
        skew_ns: How far its wall clock is ahead.
        pid: Of its process, in the name of its folder.
    """

    ranks: Ranks
    rounds: int
    faults: Mapping[Fault, int] = field(default_factory=dict)
    skew_ns: int = 0
    pid: int = 4000

    @property
    def folder(self) -> str:
        """Name of its folder, as the agent would call it."""
        made = datetime.datetime.fromtimestamp(MADE_NS / 1e9, datetime.timezone.utc)
        ranks = self.ranks
        name = f"scheduler-dp{ranks.dp}-pp{ranks.pp}-tp{ranks.tp}.{self.pid}"
        return f"{name}.{made:%Y%m%dT%H%M%S}.000Z"

    def records(self) -> Iterator[list[AnyRecord]]:
        """The records of each round."""
        made = _RankRounds(self.ranks.tp)
        yield [*_names(), *made.prologue()]
        for number in range(1, self.rounds + 1):
            here = {fault for fault, place in self.faults.items() if place == number}
            records = made.round(number, here)
            if Fault.LOSES_RECORDS in here:
                records = [Lost(NO_OP, MAIN, records[0].host_ns, len(records), DropReason.RING_FULL)]
            yield records


def _names() -> list[Define]:
    """What the engine's names are."""
    names = {
        (DefineSpace.SITE, 0): "forward",
        (DefineSpace.SITE, 1): "load-back copy",
        **{(DefineSpace.SITE, site): text for site, text in SITES},
        (DefineSpace.GROUP, GROUP): "tp",
        (DefineSpace.THREAD, int(MAIN)): "scheduler",
    }
    return [Define(NO_OP, MAIN, 0, space, number, text) for (space, number), text in names.items()]


class _RankRounds(Rounds):
    """Rounds of a small model: 8 rows of 4 pages, 4 layers, load-backs of 64 pages."""

    def __init__(self, tp: int) -> None:
        super().__init__(layers=4, pages=1 << 10, restored_pages=64, timed=True, consecutive=True, rows=8, row_pages=4)
        self._tp = tp

    def round(self, number: int, faults: set[Fault]) -> list[AnyRecord]:
        """Round ``number``: one in 32 restores, one writes back, one restores beside a round that is in flight."""
        records: list[AnyRecord] = []
        all_in_ns = number * PERIOD_NS
        assert self._now_ns < all_in_ns - LAST_NS, "a round takes longer than PERIOD_NS"
        self._now_ns = all_in_ns - 1 - (7 * self._tp + number) * 3_000 % LAST_NS
        if Fault.SKIPS_COLLECTIVE not in faults:
            site = SITES[number % len(SITES)][0]
            records.append(Collective(self._op(), MAIN, self._now_ns, GROUP, self._tp, site))
        self._now_ns = all_in_ns
        if Fault.EVICTS_MORE in faults:
            page = device(Mode.WRITE, self._pages[self._first : self._first + 1].copy())
            records.append(PageFree(self._op(), MAIN, self._now_ns, 0, page))
            records.append(PageAlloc(self._op(), MAIN, self._now_ns, 0, page))
        if number % 32 == 0:
            return records + self.restore()
        if number % 32 == 16:
            return records + self.write_back()
        if number % 32 == 8:
            return records + self._restore_in_flight(fenced=Fault.RACE not in faults)
        return records + self.decode()

    def _restore_in_flight(self, *, fenced: bool) -> list[AnyRecord]:
        """A round writes pages that are restored before it has ended."""
        records: list[AnyRecord] = []
        self._await_result(records)
        pages = self._pages[self._first : self._first + 8].copy()
        self._rounds += 1
        self._kernel(records, FORWARD, (device(Mode.WRITE, pages),), (0, self.layers), self._rounds)
        if fenced:
            self._wait_stream(records, LOAD, FORWARD, Purpose.LOAD_FENCE)
        self._transfers += 1
        accesses = (host(Mode.READ, pages.copy()), device(Mode.WRITE, pages))
        self._copy(records, LOAD, accesses, (0, self.layers), Direction.HOST_TO_DEVICE)
        for stream in (FORWARD, LOAD):
            self._synchronize(records, self._record(records, stream))
        return self._with_times(records)


def write_rank(
    journals: Path, rank: ServerRank, *, batch_records: int = BATCH, segment_bytes: int = DEFAULT_SEGMENT_BYTES
) -> Path:
    """The journal of ``rank`` in a folder of its own below ``journals``; that folder.

    Args:
        journals: Of a node.
        rank: What to write.
        batch_records: A batch is written when it has as many; whole rounds.
        segment_bytes: As of ``JournalWriter``.
    """
    folder = journals / rank.folder
    wall_ns = MADE_NS + rank.skew_ns
    writer = JournalWriter(
        folder,
        rank=rank.ranks.tp,
        engine="synthetic 1",
        clock="ring",
        wall_ns=wall_ns,
        segment_bytes=segment_bytes,
        definitions=_names,
    )
    batch: list[AnyRecord] = []
    for records in rank.records():
        batch += records
        if len(batch) >= batch_records:
            writer.write(batch)
            batch = []
    writer.write(batch)
    writer.close()
    return folder


def link_rank(journals: Path, rank: ServerRank, like: Path) -> Path:
    """The journal ``like`` once more, as that of ``rank``: no further room on the disk. Their ``tp`` are the same."""
    folder = journals / rank.folder
    folder.mkdir(parents=True)
    for file in sorted(like.glob("*.arrows")):
        os.link(file, folder / file.name)
    return folder
