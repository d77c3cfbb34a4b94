"""``analyse_rank``: one rank's records in, what was concluded out. A pure task, to be run anywhere and twice.

The records are streamed: memory is that of one batch of the journal, of the analyzer's bounded tables and of the
bounded results.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache_obs import __version__
from hicache_obs.analyzer import Analyzer, explain
from hicache_obs.analyzer.tally import DEFINITE, MAX_WAITS, Defect, Tally
from hicache_obs.costs import FenceCost, TransferKind
from hicache_obs.errors import InputError
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.findings import ExitCode, Finding, Hazard, Verdict
from hicache_obs.fleet.decisions import Decision, DecisionLog, Decisions, SequenceName
from hicache_obs.fleet.places import RankPlace, local_path
from hicache_obs.readers.batches import Batches, open_batches
from hicache_obs.readers.stored import StoredPath
from hicache_obs.records import DropReason

MAX_TEXTS: Final = 20
"""Findings of one rank that are explained in words; the others are rows."""
MAX_LONG: Final = 2**63 - 1
MAX_ROWS: Final = 500
"""Findings of one rank that are kept by fingerprint."""


@dataclass(frozen=True, slots=True)
class FenceSum:
    """What a rank's fences in front of one kind of transfer cost, nanoseconds.

    Attributes:
        count, in_flight: Fences; those that met a conflicting operation still running.
        waited_ns, avoidable_ns: In all.
        needed_ns: In all, by what would have raced.
        p50_ns, p99_ns, max_ns: Of the waits.
    """

    count: int = 0
    in_flight: int = 0
    waited_ns: int = 0
    avoidable_ns: int = 0
    needed_ns: Mapping[Hazard, int] = field(default_factory=dict)
    p50_ns: int = 0
    p99_ns: int = 0
    max_ns: int = 0


@dataclass(frozen=True, slots=True)
class FoundDefect:
    """All findings of one fingerprint in one rank.

    Attributes:
        example: One of them.
        verdicts: Operation pairs by verdict.
        text: In words; empty beyond the first ``MAX_TEXTS``.
    """

    example: Finding
    verdicts: Mapping[Verdict, int]
    text: str

    @property
    def count(self) -> int:
        """Operation pairs."""
        return sum(self.verdicts.values())


@dataclass(frozen=True, slots=True)
class RankSummary:
    """What one rank gave: as much of it as everybody needs, and no more.

    Attributes:
        place: Which rank.
        error: Why it could not be read; empty if it could. Everything else is then empty.
        records: Records read.
        lookups: Page pairs that were looked at, as ``analyze`` counts them.
        shared: Accesses to memory that another process may touch too.
        checked: Pages looked up by hazard.
        verdicts: Operation pairs by verdict.
        defects: By severity; ``more`` is how many further ones there are.
        skipped: Findings of further kinds, beyond all that are counted by fingerprint.
        fences: By kind of transfer.
        transfers: Transfers that finished.
        lost: Lost records by reason.
        notes: What was left out, in words.
        begin_ns, end_ns: Host clock of the first and the last call.
        wall_ahead_ns: Wall clock minus host clock, as the journal's header says; ``None`` if it does not.
        engine: Name and version of the recorded engine.
        lengths: Decisions of each sequence, and whether they are complete from the first one.
        version: Of the program that analysed it.
    """

    place: RankPlace
    error: str = ""
    records: int = 0
    lookups: int = 0
    shared: int = 0
    checked: Mapping[Hazard, int] = field(default_factory=dict)
    verdicts: Mapping[Verdict, int] = field(default_factory=dict)
    defects: Sequence[FoundDefect] = ()
    more: int = 0
    skipped: int = 0
    fences: Mapping[TransferKind, FenceSum] = field(default_factory=dict)
    transfers: int = 0
    lost: Mapping[DropReason, int] = field(default_factory=dict)
    notes: Sequence[str] = ()
    begin_ns: int = 0
    end_ns: int = 0
    wall_ahead_ns: int | None = None
    engine: str = ""
    lengths: Mapping[SequenceName, tuple[int, bool]] = field(default_factory=dict)
    version: str = __version__

    def unexpected(self, accepted: Accepted, verdicts: Sequence[Verdict] = DEFINITE) -> int:
        """Operation pairs of findings with one of ``verdicts`` that nobody has accepted."""
        return sum(self.verdicts.get(verdict, 0) for verdict in verdicts) - self.expected(accepted, verdicts)

    def expected(self, accepted: Accepted, verdicts: Sequence[Verdict] = DEFINITE) -> int:
        """Operation pairs of findings with one of ``verdicts`` that are accepted for now."""
        return sum(
            defect.verdicts.get(verdict, 0)
            for defect in self.defects
            for verdict in verdicts
            if accepted.covers(defect.example.fingerprint)
        )

    @property
    def undecided(self) -> bool:
        """Whether something was checked in vain."""
        return bool(self.verdicts.get(Verdict.UNKNOWN) or self.shared)

    def code(self, accepted: Accepted) -> ExitCode:
        """As ``analyze`` on this rank alone; a rank that cannot be read was not checked."""
        if self.error:
            return ExitCode.NOTHING_CHECKED
        if self.unexpected(accepted):
            return ExitCode.FINDINGS
        return ExitCode.NOTHING_CHECKED if self.undecided or not self.lookups else ExitCode.CLEAN

    def outcome(self, accepted: Accepted) -> str:
        """``unreadable``, or ``clean``, ``findings``, ``unknown``, ``nothing-checked`` as ``analyze`` says."""
        if self.error:
            return "unreadable"
        code = self.code(accepted)
        if code is ExitCode.NOTHING_CHECKED:
            return "unknown" if self.undecided else "nothing-checked"
        return "clean" if code is ExitCode.CLEAN else "findings"


@dataclass(frozen=True, slots=True)
class AnalysedRank:
    """A rank's summary, and what it is compared with others by, which stays where it was made."""

    summary: RankSummary
    sequences: Mapping[SequenceName, Decisions]


class _Sums(Tally):
    """A tally that also sums up fences by kind of transfer. Bounded."""

    def __init__(self) -> None:
        super().__init__()
        self._waits = {kind: array("q") for kind in TransferKind}
        self._counts = {kind: [0, 0, 0, 0, 0] for kind in TransferKind}
        self._needed: dict[TransferKind, Counter[Hazard]] = {kind: Counter() for kind in TransferKind}

    def on_fence(self, cost: FenceCost) -> None:
        self.fences += 1
        counts, waits = self._counts[cost.kind], self._waits[cost.kind]
        counts[0] += 1
        counts[1] += cost.in_flight
        counts[2] += cost.waited_ns
        counts[3] += cost.avoidable_ns
        counts[4] = max(counts[4], cost.waited_ns)
        self._needed[cost.kind].update(cost.needed_ns)
        if len(waits) < MAX_WAITS:
            waits.append(min(cost.waited_ns, MAX_LONG))

    def sums(self) -> dict[TransferKind, FenceSum]:
        """By kind of transfer; of the first ``MAX_WAITS`` waits the shares."""
        found = {}
        for kind, (count, in_flight, waited, avoidable, most) in self._counts.items():
            waits = np.frombuffer(self._waits[kind], np.int64) if count else np.zeros(1, np.int64)
            p50, p99 = (int(np.quantile(waits, share, method="inverted_cdf")) for share in (0.5, 0.99))
            needed = dict(sorted(self._needed[kind].items()))
            found[kind] = FenceSum(count, in_flight, waited, avoidable, needed, p50, p99, most)
        return found


def analyse_rank(place: RankPlace) -> AnalysedRank:
    """Judge one rank's records. Never raises for what is wrong with them: the summary says it."""
    try:
        return _analyse(place)
    except InputError as error:
        return AnalysedRank(RankSummary(place, error=str(error)), {})
    except OSError as error:
        return AnalysedRank(RankSummary(place, error=f"{place.place}: {error.strerror or error}"), {})


def summary_of(rank: AnalysedRank) -> RankSummary:
    """The part that travels."""
    return rank.summary


def find_decision(place: RankPlace, name: SequenceName, index: int) -> Decision | None:
    """One decision of a rank, from its records; ``None`` if they hold no such decision any more."""
    log = DecisionLog((name, index))
    try:
        for batch in _open(place).read():
            log.feed(batch)
            if log.found is not None:
                break
    except (InputError, OSError):
        return None
    return log.found


def _open(place: RankPlace) -> Batches:
    path = local_path(place)
    return open_batches(StoredPath(place.place) if path is None else path, rank=place.number)


def _analyse(place: RankPlace) -> AnalysedRank:
    batches = _open(place)
    sums, log = _Sums(), DecisionLog()
    analyzer = Analyzer(sums)
    begin_ns = end_ns = 0
    for batch in batches.read():
        analyzer.feed(batch)
        log.feed(batch)
        begin_ns = begin_ns or next((record.host_ns for record in batch if record.host_ns), 0)
        end_ns = max(end_ns, batch[-1].host_ns if batch else 0)
    analyzer.finish()
    defects = sums.by_severity()
    info = batches.info
    summary = RankSummary(
        place,
        records=analyzer.totals.records,
        lookups=analyzer.totals.lookups,
        shared=analyzer.totals.shared,
        checked={hazard: sums.checked[hazard] for hazard in Hazard if sums.checked[hazard]},
        verdicts={verdict: sums.verdicts[verdict] for verdict in Verdict if sums.verdicts[verdict]},
        defects=[_found(analyzer, defect, number < MAX_TEXTS) for number, defect in enumerate(defects[:MAX_ROWS])],
        more=max(0, len(defects) - MAX_ROWS),
        skipped=sums.skipped,
        fences=sums.sums(),
        transfers=sums.transfers,
        lost={reason: sums.lost[reason] for reason in DropReason if sums.lost[reason]},
        notes=_notes(batches, analyzer, log),
        begin_ns=begin_ns,
        end_ns=end_ns,
        wall_ahead_ns=info.wall_ns - info.host_ns if info is not None and info.wall_ns else None,
        engine=analyzer.engine or (info.engine if info is not None else ""),
        lengths={name: (len(s.hashes), s.from_start) for name, s in sorted(log.sequences.items())},
    )
    return AnalysedRank(summary, log.sequences)


def _found(analyzer: Analyzer, defect: Defect, told: bool) -> FoundDefect:
    finding = defect.example
    text = ""
    if told:
        radius = None if finding.misuse else analyzer.blast_radius((finding.earlier.op, finding.later.op))
        text = explain(finding, radius)
    return FoundDefect(finding, {v: defect.verdicts[v] for v in Verdict if defect.verdicts[v]}, text)


def _notes(batches: Batches, analyzer: Analyzer, log: DecisionLog) -> list[str]:
    """What was not looked at and why, in words for the user."""
    found = [*batches.notes]
    if analyzer.totals.shared:
        found.append(
            f"{analyzer.totals.shared} accesses to memory that another process may touch too; its accesses are not here"
        )
    if analyzer.forgotten:
        found.append(
            f"{analyzer.forgotten} groups of operations left a full history before every host thread knew "
            "them to be complete: later races with them were not looked for"
        )
    skipped = sum(sequence.skipped for sequence in log.sequences.values())
    if skipped:
        found.append(f"{skipped:,} decisions beyond the first {len(log.sequences):,} full sequences are not compared")
    return found
