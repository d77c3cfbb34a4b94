"""``judge_file``: a file of any kind in, what was concluded out. What ``analyze`` and ``report`` have in common."""

from __future__ import annotations

import contextlib
import os
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from hicache_obs.analyzer.pairs import PairProof, PairProofs
from hicache_obs.analyzer.tally import DEFINITE
from hicache_obs.cli.layout import progress_bars
from hicache_obs.cli.ranks_report import RanksReport, compare_ranks
from hicache_obs.cli.verdict import STEP, Report, analyse
from hicache_obs.errors import ConfigError, naming
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.exporters.health import Health, Outcome
from hicache_obs.findings import ExitCode, Hazard, Proof, Verdict
from hicache_obs.readers import open_trace
from hicache_obs.readers.copies import copy_pairs
from hicache_obs.readers.join import Coverage, join
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.readers.preflight import Check, Level, blind_spots, level, preflight
from hicache_obs.readers.profile import Profile
from hicache_obs.readers.profile_records import ProfileWriter, detached, processes
from hicache_obs.readers.trace_file import entries
from hicache_obs.records import ALL_LAYERS, OpId

NO_EDGE: Final = "nothing in the file orders them; without page sets nobody knows whether they touch the same pages"
LARGE: Final = 10 << 20
"""Size in bytes from which progress is shown."""
_STILL_COUNTS: Final = ("annotations", "event trace", "clock")
"""Checks that matter where order comes from a journal."""
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Undecided:
    """A copy and an operation that the file does not order.

    Attributes:
        process: Of both.
        earlier, later: Rows of ``Profile.ops``.
        cause: Why nobody can tell.
    """

    process: int
    earlier: OpId
    later: OpId
    cause: str


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What a profile without journal gave: the order of its copies against the work around them.

    Attributes:
        profile: The file.
        pairs_checked: Pairs looked at, in all processes.
        polled: Pairs that only a successful query orders.
        undecided: Pairs that nothing in the file orders.
        blind: What the file does not show and could hold a race.
    """

    profile: Profile
    pairs_checked: int
    polled: list[tuple[int, PairProof]]
    undecided: list[Undecided]
    blind: tuple[str, ...]

    @property
    def outcome(self) -> str:
        """``clean``, ``unknown`` or ``nothing-checked``; never ``findings``."""
        if not self.pairs_checked:
            return "nothing-checked"
        return "unknown" if self.undecided or self.blind else "clean"

    @property
    def code(self) -> ExitCode:
        """Exit code."""
        return ExitCode.CLEAN if self.outcome == "clean" else ExitCode.NOTHING_CHECKED

    @property
    def causes(self) -> Counter[str]:
        """Undecided pairs by cause."""
        return Counter(pair.cause for pair in self.undecided)


@dataclass(frozen=True, slots=True)
class JoinedReport:
    """What a profile and the journal of its run gave."""

    profile: Profile
    report: Report
    coverage: Coverage

    @property
    def code(self) -> ExitCode:
        """Exit code."""
        return self.report.code


AnyReport = Report | CopyReport | JoinedReport | RanksReport


def check_journal(files: Sequence[Path], journal: Path | None) -> None:
    """Raises ``ConfigError`` for a journal beside several files: it is of one run."""
    if journal is not None and len(files) > 1:
        raise ConfigError(
            f"--journal {journal}: is of one run, but {len(files)} files were given; expected one profile"
        )


def judge_file(
    path: Path, journal: Path | None, progress: Progress, accepted: Accepted | None = None
) -> list[AnyReport]:
    """What ``path`` gave: one report, or one per journal found at ``journal`` or in ``path``.

    Ranks that have recorded collectives are compared as well: their folder's last report.

    Args:
        path: A profile, or anything that ``open_trace`` takes.
        journal: Of the run that the profile is of.
        progress: Told about each stage: its name, how much of it is done, of how much.
        accepted: Findings to be expected; of no meaning for a profile without journal.

    Raises:
        TraceError: A file cannot be read, or profile and journal are not of one run.
        ConfigError: A journal was given, and ``path`` is no profile.
    """
    progress(f"reading {path.name}", 0, 0)
    profile = open_profile(path)
    if profile is None:
        if journal is not None:
            open_trace(path)  # says what is wrong with it, if it is no trace either
            raise ConfigError(f"--journal {journal}: belongs to a profile, but {path} is none")
        return _judge_traces(path, progress, accepted)
    if journal is None:
        return [check_copies(profile, progress)]
    return [_judge(profile, trace_path, rank, progress, accepted) for trace_path, rank in journals_at(journal)]


def _judge_traces(path: Path, progress: Progress, accepted: Accepted | None) -> list[AnyReport]:
    """One report per rank of each folder, and what the ranks of a folder say together."""
    reports: list[AnyReport] = []
    for folder, places in groupby(journals_at(path), key=lambda place: place[0]):
        ranks = [rank for _, rank in places]
        traces = []
        for rank in ranks:
            trace = open_trace(folder, rank=rank)
            if len(ranks) > 1:
                trace = replace(trace, source=f"{trace.source}, rank {rank}")
            traces.append(trace)
            reports.append(analyse(trace, accepted=accepted, progress=partial(progress, "checking")))
        together = compare_ranks(str(folder), traces) if len(ranks) > 1 else None
        if together is not None:
            reports.append(together)
    return reports


def _judge(
    profile: Profile, journal: Path, rank: int | None, progress: Progress, accepted: Accepted | None
) -> JoinedReport:
    trace, coverage = join(open_trace(journal, rank=rank), profile)
    report = analyse(trace, accepted=accepted, progress=lambda done, total: progress("checking", done, total))
    return JoinedReport(profile, report, coverage)


def journals_at(path: Path) -> list[tuple[Path, int | None]]:
    """The journals at ``path``: of every rank, or of every folder in it, such as the policies of a demo.

    Raises:
        TraceError: It, or a folder in it, cannot be listed.
    """
    from hicache_obs.readers.journal import journal_ranks
    from hicache_obs.readers.parquet import parquet_ranks

    if not os.path.isdir(path):
        return [(path, None)]
    ranks = journal_ranks(path) or parquet_ranks(path)
    if ranks:
        return [(path, rank) for rank in ranks]
    folders = sorted(folder for folder in entries(path) if os.path.isdir(folder) and journal_ranks(folder))
    return [(folder, rank) for folder in folders for rank in journal_ranks(folder)] or [(path, None)]


def check_copies(profile: Profile, progress: Progress = lambda stage, done, total: None) -> CopyReport:
    """The order of a profile's copies against the work around them, in every process."""
    checked = 0
    polled: list[tuple[int, PairProof]] = []
    undecided: list[Undecided] = []
    for process in processes(profile):
        placeless = detached(profile, process)
        wanted, without = {}, 0
        for later, pairs in copy_pairs(profile, process).items():
            for earlier in pairs:
                reason = placeless.get(later) or placeless.get(earlier)
                if reason is not None:
                    undecided.append(Undecided(process, earlier, later, reason.value))
                    without += 1
            wanted[later] = tuple(op for op in pairs if op not in placeless and later not in placeless)
        touched = {op for later, pairs in wanted.items() if pairs for op in (later, *pairs)}
        writer = ProfileWriter(profile, dict.fromkeys(touched, ((), ALL_LAYERS)), process)
        proofs = PairProofs(wanted)
        records = writer.trace.records
        with naming(writer.trace.source):
            for begin in range(0, len(records), STEP):
                proofs.feed(records[begin : begin + STEP])
                progress(f"process {process}", min(begin + STEP, len(records)), len(records))
        checked += len(proofs.proofs) + without
        for pair in proofs.proofs:
            if pair.proof is Proof.POLLED:
                polled.append((process, pair))
            elif pair.proof is not Proof.ORDERED:
                undecided.append(Undecided(process, pair.earlier, pair.later, _cause(writer, pair)))
    return CopyReport(profile, checked, polled, undecided, blind_spots(profile))


def _cause(writer: ProfileWriter, pair: PairProof) -> str:
    """Why nothing orders a pair: the newest place before its second operation where an order may be missing, which is
    behind its first one, or the pair would not be unknown.
    """
    if pair.proof is Proof.NONE:
        return NO_EDGE
    return writer.doubts[bisect_left(writer.doubts, pair.at, key=itemgetter(0)) - 1][1].value


# -- in words -----------------------------------------------------------------------------------------------


def source_of(report: AnyReport) -> str:
    """Where the report's contents come from."""
    if isinstance(report, CopyReport):
        return report.profile.source
    if isinstance(report, RanksReport):
        return report.source
    return (report if isinstance(report, Report) else report.report).trace.source


def sentence(report: AnyReport) -> str:
    """The verdict and what it is about. The part before the colon is ``SAFE``, ``VIOLATED``, ``CONTRADICTION``,
    ``LATENT RACES``, ``AS ACCEPTED`` (findings, all of them expected), ``NOT DECIDABLE`` or ``NOTHING CHECKED``."""
    if isinstance(report, CopyReport):
        return _copies_sentence(report)
    if isinstance(report, RanksReport):
        return report.sentence
    if isinstance(report, Report):
        return _trace_sentence(report, f"{report.pairs_checked:,} page pairs checked")
    inner, coverage = report.report, report.coverage
    times = f"times of {coverage.timed:,} of {coverage.operations:,} operations"
    return _trace_sentence(inner, f"{inner.pairs_checked:,} page pairs checked, {times}")


def _copies_sentence(report: CopyReport) -> str:
    pairs, ops = f"{report.pairs_checked:,} pairs of a copy and the work around it", len(report.profile.ops)
    if report.outcome == "nothing-checked":
        return f"NOTHING CHECKED: no copy between host and device beside other work in {ops:,} device operations"
    if report.outcome == "clean":
        return f"SAFE: all {pairs} are ordered, in {ops:,} device operations"
    if not report.undecided:
        return f"NOT DECIDABLE: all {pairs} are ordered, but the file does not hold everything that ran"
    return f"NOT DECIDABLE: {len(report.undecided):,} of {pairs} are in no order that the file shows"


def _trace_sentence(report: Report, seen: str) -> str:
    unknown, expected = report.keeper.verdicts[Verdict.UNKNOWN], report.expected
    if report.code is ExitCode.FINDINGS:
        known = f", {expected:,} more that {'is' if expected == 1 else 'are'} accepted" if expected else ""
        return f"{_findings_sentence(report)}{known}; {seen}"
    if report.undecided:
        if not unknown:
            return f"NOT DECIDABLE: another process may touch the same memory; {seen}"
        return f"NOT DECIDABLE: the order of {unknown:,} operation pair{'s' * (unknown != 1)} is unknown; {seen}"
    if report.code is ExitCode.NOTHING_CHECKED:
        return f"NOTHING CHECKED: no two operations touch the same pages; {seen}"
    if expected:
        pairs = f"{expected:,} operation pair{_are(expected)} in no proven order, which is accepted for now"
        return f"AS ACCEPTED: {pairs}; {seen}"
    return f"SAFE: every conflicting pair is in proven order; {seen}"


def _findings_sentence(report: Report) -> str:
    """What is wrong, the worst first; its word is that of the status page."""
    wrong, against, latent = (report.keeper.unexpected(report.accepted.covers, [verdict]) for verdict in DEFINITE)
    outcome = Health(violations=wrong, contradictions=against, latent=latent).outcome
    found, unordered, backwards = [], [], []
    if any(stall.ranks for stall in report.stalls.stalls):
        outcome = Outcome.VIOLATED
        found.append(f"ranks enter different collectives ({Hazard.TP_DIVERGENCE.value})")
    if wrong or latent:
        pairs = f"{wrong + latent:,} operation pair{_are(wrong + latent)} in no proven order"
        ran = f"{wrong:,} of them ran" if wrong else "none is known to have run"
        unordered.append(f"{pairs}, {ran} in the wrong one")
    if against:
        backwards.append(f"{against:,} operation pair{'s' * (against != 1)} ran against the proven order")
    found += unordered + backwards if wrong else backwards + unordered
    return f"{outcome.value}: {', and '.join(found)}"


def level_of(report: CopyReport | JoinedReport) -> str:
    """How far the file goes; a journal has every page set and every order."""
    return level(report.profile).value if isinstance(report, CopyReport) else Level.PROVABLE.value


def checks_of(report: CopyReport | JoinedReport) -> list[Check]:
    """What was looked at before anything was judged, in the order a reader should see it."""
    checks = preflight(report.profile)
    if isinstance(report, CopyReport):
        return list(checks)
    text = f"times of {report.coverage.timed} of {report.coverage.operations} operations of the journal"
    if report.coverage.from_ranges:
        text += "; no device operations, so they are those of the ranges, in the threads that run the streams"
    joined = Check("operations", report.coverage.timed == report.coverage.operations, text)
    return [joined, *(check for check in checks if check.name in _STILL_COUNTS)]


def _are(count: int) -> str:
    return " is" if count == 1 else "s are"


def label(profile: Profile, op: OpId) -> str:
    """How messages name row ``op``: by correlation id if it has one."""
    correlation = int(profile.ops.correlation[op])
    return f"#{correlation}" if correlation >= 0 else f"row {op}"


def plain(text: str, *, width: int = 120) -> str:
    """``text`` from a file, fit to print: no control characters, not longer than ``width`` plus dots."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: width + 1])
    return shown if len(shown) <= width else shown[:width] + "..."


@contextlib.contextmanager
def progress_of(path: Path) -> Iterator[Progress]:
    """Bars on standard error for a large input; nothing for a small one."""
    size = sum(_size(f) for f in path.glob("*") if os.path.isfile(f)) if os.path.isdir(path) else _size(path)
    if size < LARGE:
        yield lambda stage, done, total: None
        return
    from rich import progress as bars

    columns = (bars.TextColumn("{task.description:24}", markup=False), bars.BarColumn(), bars.TimeElapsedColumn())
    with progress_bars(*columns) as shown:
        tasks: dict[str, bars.TaskID] = {}

        def tell(stage: str, done: int, total: int) -> None:
            if stage not in tasks:
                tasks[stage] = shown.add_task(plain(stage), total=None)
            shown.update(tasks[stage], completed=done, total=total or None)

        yield tell


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except (OSError, ValueError):
        return 0
