"""What is left after a stress run, counted: rings, journals, what ranks say they wrote, and what agents say they found.

Every record is in the journal, or counted as lost; every record there is as it was written; every race whose records
are there is found in them; and no race is found that was not made.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from processes import Control, Word, read_acknowledged, read_races
from rounds import OPS, fault, is_racy, names, racing_pair, round_of

from hicache_obs.agent.journals import journal_folder
from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import Ignore
from hicache_obs.errors import TraceError
from hicache_obs.findings import Finding, Verdict
from hicache_obs.readers.journal import journal_batches
from hicache_obs.readers.ring import read_ring
from hicache_obs.readers.ring_header import RingState, read_state, read_words, unreported
from hicache_obs.records import AnyRecord, Define, DropReason, Kernel, Lost, Memcpy

Pair = tuple[int, int]
RACES = (Verdict.VIOLATION, Verdict.LATENT)
UNBOOKED = max(len(names()), OPS)
"""Records that a rank appends before it counts them."""


@dataclass(slots=True)
class Audit:
    """The books of a run.

    Attributes:
        rings, journals: How many were opened.
        unmade: Files of ranks that were killed before there was a ring in them.
        attempted, appended: Records that ranks wanted to write, and those whose writing returned.
        written, read: Records in rings by their headers, and those of them that agents have read.
        kept: Records in journals.
        dropped: Records that found no room in a ring, by reason.
        missing: Records that journals state as gone.
        injected: Races whose records were all appended.
        live: Those of them that an agent reported.
        later: Those that only reading the journal again found: left out, or made while no agent ran.
        unrecorded: Those with a record that no journal has, and that a journal counts as gone.
        problems: What is not as it should be.
    """

    rings: int = 0
    unmade: int = 0
    journals: int = 0
    attempted: int = 0
    appended: int = 0
    written: int = 0
    read: int = 0
    kept: int = 0
    dropped: Counter[DropReason] = field(default_factory=Counter)
    missing: int = 0
    injected: int = 0
    live: int = 0
    later: int = 0
    unrecorded: int = 0
    problems: list[str] = field(default_factory=list)


class _Races(Ignore):
    """Pairs that are found."""

    def __init__(self) -> None:
        self.found: set[Pair] = set()

    def on_finding(self, finding: Finding) -> None:
        if finding.verdict in RACES:
            self.found.add((finding.earlier.op, finding.later.op))


@dataclass(slots=True)
class _Journal:
    """What one ring's journal holds."""

    races: set[Pair]
    ops: set[int]
    kept: int = 0
    losses: int = 0
    """Records of the ring that state a loss."""
    stated: Counter[DropReason] = field(default_factory=Counter)


def audit(rings: Path, journals: Path, controls: list[Path], acknowledged: Path, *, race_every: int) -> Audit:
    """The books of a run whose processes have all ended, and whose rings an agent has read to their end.

    Args:
        rings: The ring directory; finished rings are in ``finished`` below it.
        journals: The journal directory.
        controls: Of each rank's process, in order of life from 0; ``<tp>-<life>``.
        acknowledged: What the agents have found.
        race_every: As the ranks were told.
    """
    books = Audit()
    by_pid: dict[int, tuple[Path, RingState]] = {}
    unreported_of: dict[int, int] = {}
    for path in sorted([*rings.glob("*.ring"), *rings.glob("finished/*.ring")]):
        if is_unmade(path):
            books.unmade += 1
            continue
        try:
            state = read_state(path)
            _check_records(books, path, list(read_ring(path)))
            by_pid[state.info.pid] = path, state
            with path.open("rb") as file:
                unreported_of[state.info.pid] = len(unreported(read_words(file.fileno()), 0))
        except TraceError as error:
            books.problems.append(f"ring: {error}")
    books.rings = len(by_pid)
    found_live: set[tuple[int, Pair]] = set()
    for tp, first, second, _ in read_acknowledged(acknowledged):
        life, number = round_of(first)  # type: ignore[arg-type] # an operation's number
        if not is_racy(number, race_every) or (first, second) != racing_pair(life, number):
            books.problems.append(f"tp{tp}: the agent found a race of {first} and {second}; none was made there")
        found_live.add((tp, (first, second)))
    for control in controls:
        tp, life = map(int, control.name.split("-"))
        words = Control(control).words
        if not words[Word.PID]:
            continue  # killed before it had a ring
        if words[Word.PID] not in by_pid:
            books.problems.append(f"{control.name}: its ring is gone")
            continue
        path, state = by_pid[words[Word.PID]]
        journal = _read(books, journal_folder(journals, path, state.info), race_every)
        journal.kept -= unreported_of[words[Word.PID]]  # what the ring itself had no room to state
        journal.losses -= unreported_of[words[Word.PID]]
        _one_life(books, control, (tp, life), (path, state), journal, found_live)
    return books


def _one_life(
    books: Audit,
    control: Path,
    who: tuple[int, int],
    ring: tuple[Path, RingState],
    journal: _Journal,
    live: set[tuple[int, Pair]],
) -> None:
    (tp, life), (path, state), words = who, ring, Control(control).words
    attempted, appended = words[Word.ATTEMPTED], words[Word.APPENDED]
    books.attempted += attempted
    books.appended += appended
    books.written += state.written
    books.read += state.read
    books.dropped.update(state.dropped)
    books.kept += journal.kept
    missing = journal.stated.pop(DropReason.MISSING, 0)
    books.missing += missing
    if state.read != state.written:
        books.problems.append(f"{path.name}: {state.written - state.read} records were never read")
    if journal.kept + missing != state.written:
        books.problems.append(f"{path.name}: {state.written} written, but {journal.kept} kept and {missing} gone")
    dropped = sum(state.dropped.values())
    # What was being written when the process was killed is not in its books yet.
    if not missing and not appended <= state.written - journal.losses <= appended + UNBOOKED:
        books.problems.append(f"{path.name}: {appended} appends returned, {state.written} records are in the ring")
    if not attempted - UNBOOKED <= appended + dropped <= attempted + UNBOOKED:
        books.problems.append(f"{path.name}: {attempted} attempted, {appended} appended, {dropped} counted as dropped")
    if not missing and journal.stated != state.dropped:
        books.problems.append(f"{path.name}: dropped {state.dropped}, but its journal states {dict(journal.stated)}")
    for number in read_races(control):
        pair = racing_pair(life, number)
        books.injected += 1
        books.live += (tp, pair) in live
        if (tp, pair) in live:
            continue
        if pair in journal.races:
            books.later += 1
        elif missing and not {pair[0], pair[1]} <= journal.ops:
            books.unrecorded += 1
        else:
            books.problems.append(f"tp{tp} life {life}: the race of round {number} was not found")
    for _, pair in (found for found in live if found[0] == tp and round_of(found[1][0])[0] == life):  # type: ignore[arg-type]
        if pair not in journal.races and (not missing or set(pair) <= journal.ops):
            books.problems.append(f"tp{tp} life {life}: the race {pair} was reported, and its records are gone")


def _read(books: Audit, folder: Path, race_every: int) -> _Journal:
    sink = _Races()
    analyzer = Analyzer(sink)
    journal = _Journal(sink.found, set())
    try:
        for batch in journal_batches(folder, notes=[]):
            analyzer.feed(_check_records(books, folder, batch, journal))
        analyzer.finish()
        books.journals += 1
    except (TraceError, OSError) as error:
        books.problems.append(f"journal: {error}")
    for first, second in sink.found:
        life, number = round_of(first)  # type: ignore[arg-type] # an operation's number
        if not is_racy(number, race_every) or (first, second) != racing_pair(life, number):
            books.problems.append(f"{folder.name}: a race of {first} and {second} is found; none was made there")
    return journal


def _check_records(
    books: Audit, path: Path, records: list[AnyRecord], journal: _Journal | None = None
) -> list[AnyRecord]:
    repeated = _states_a_gap(records)
    for record in records:
        if repeated and isinstance(record, Define):
            continue  # from a segment's header
        if isinstance(record, Lost):
            if journal is not None:
                journal.stated[record.reason] += record.count
                journal.kept += record.reason is not DropReason.MISSING
                journal.losses += record.reason is not DropReason.MISSING
            continue
        if wrong := fault(record):
            books.problems.append(f"{path.name}: a record is not as it was written: {wrong}")
        if journal is not None:
            journal.kept += 1
            if isinstance(record, Kernel | Memcpy):
                journal.ops.add(record.op)
    return records


def is_unmade(path: Path) -> bool:
    """Whether there is no ring: its rank was killed while it made it (the first word comes last), or it is moved."""
    try:
        with path.open("rb") as file:
            return file.read(8) in (b"", bytes(8))
    except FileNotFoundError:  # an agent has moved it meanwhile
        return True


def _states_a_gap(batch: list[AnyRecord]) -> bool:
    """Whether a batch is what a reader makes of the header of a journal segment that others before it are missing."""
    first, *rest = batch or [None]
    return isinstance(first, Lost) and first.reason is DropReason.MISSING and all(isinstance(r, Define) for r in rest)


def rows(books: Audit) -> list[tuple[str, str]]:
    """The books, for a table."""
    dropped = ", ".join(f"{count:,} {reason.name.lower()}" for reason, count in books.dropped.items()) or "0"
    return [
        ("rings, journals opened", f"{books.rings} of {books.rings}, {books.journals} of {books.rings}"),
        ("records that ranks wanted to write", f"{books.attempted:,}"),
        ("in rings; read by agents", f"{books.written:,}; {books.read:,}"),
        ("dropped and counted", dropped),
        ("in journals; counted as gone by them", f"{books.kept:,}; {books.missing:,}"),
        ("races made, all records in a ring", f"{books.injected:,}"),
        ("… found while they happened", f"{books.live:,}"),
        ("… found by reading the journal only", f"{books.later:,}"),
        ("… records gone and counted", f"{books.unrecorded:,}"),
        ("… lost", f"{books.injected - books.live - books.later - books.unrecorded:,}"),
        ("problems", f"{len(books.problems)}"),
    ]


def first(problems: list[str], count: int = 20) -> str:
    """The first of them, a line each."""
    more = [f"… and {len(problems) - count} more"] if len(problems) > count else []
    return "\n".join([*itertools.islice(problems, count), *more])
