"""``hicache-obs analyze``: profiler files in, verdicts out; with the journal of the same run, page by page."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click

from hicache_obs.analyzer.pairs import PairProof, PairProofs
from hicache_obs.cli.layout import FINDING_INDENT, fit
from hicache_obs.cli.outputs import accepted_option, load_accepted
from hicache_obs.cli.verdict import STEP, Report, analyse, show, show_findings, to_json
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.findings import ExitCode, Proof, Verdict, worst
from hicache_obs.readers import open_trace
from hicache_obs.readers.copies import copy_pairs
from hicache_obs.readers.join import Coverage, join
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.readers.preflight import Check, Level, blind_spots, level, preflight
from hicache_obs.readers.profile import Profile
from hicache_obs.readers.profile_records import ProfileWriter, detached, processes
from hicache_obs.records import ALL_LAYERS, OpId

NO_EDGE: Final = "nothing in the file orders them; without page sets nobody knows whether they touch the same pages"
SHOWN: Final = 10
"""Undecided pairs listed as text per file; the rest are counted."""
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


AnyReport = Report | CopyReport | JoinedReport


@click.command("analyze")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE|DIR...")
@click.option(
    "--journal", type=click.Path(path_type=Path), metavar="DIR",
    help="Journal of the same run: page sets and order from it, device times from the one profile.",
)  # fmt: skip
@accepted_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON: one object for one report, a list for several.")
def command(files: Sequence[Path], journal: Path | None, accepted_file: Path | None, as_json: bool) -> int:
    """Judge recordings of Nsight Systems and torch.profiler, with what stands in the way of a verdict.

    FILE is a SQLite, Parquet or Arrow export of Nsight Systems, a .nsys-rep where nsys is installed, a torch.profiler
    trace (.json, .json.gz), or anything that 'check' takes. A profile has no page sets: without --journal it is looked
    at copy by copy, and a copy that nothing orders is not decidable (exit code 3), never a finding.
    """
    if journal is not None and len(files) > 1:
        raise ConfigError(
            f"--journal {journal}: is of one run, but {len(files)} files were given; expected one profile"
        )
    accepted = load_accepted(accepted_file)
    reports: list[AnyReport] = []
    for path in files:
        with _progress(path) as progress:
            reports += _analyze(path, journal, accepted, progress)
    if as_json:
        objects = [_as_json(report) for report in reports]
        click.echo(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2))
    else:
        for report in reports:
            _show(report)
    return int(worst([report.code for report in reports]))


def _analyze(path: Path, journal: Path | None, accepted: Accepted, progress: Progress) -> list[AnyReport]:
    progress(f"reading {path.name}", 0, 0)
    profile = open_profile(path)
    if profile is None:
        trace = open_trace(path)
        if journal is not None:
            raise ConfigError(f"--journal {journal}: belongs to a profile, but {path} is none")
        return [analyse(trace, accepted=accepted, progress=lambda done, total: progress("checking", done, total))]
    if journal is None:
        return [check_copies(profile, progress)]
    return [_judge(profile, trace_path, rank, accepted, progress) for trace_path, rank in _journals(journal)]


def _judge(profile: Profile, journal: Path, rank: int | None, accepted: Accepted, progress: Progress) -> JoinedReport:
    trace, coverage = join(open_trace(journal, rank=rank), profile)
    report = analyse(trace, accepted=accepted, progress=lambda done, total: progress("checking", done, total))
    return JoinedReport(profile, report, coverage)


def _journals(path: Path) -> list[tuple[Path, int | None]]:
    """The journals at ``path``: of every rank, or of every folder in it, such as the policies of a demo."""
    from hicache_obs.readers.journal import journal_ranks

    if not path.is_dir():
        return [(path, None)]
    ranks = journal_ranks(path)
    if ranks:
        return [(path, rank) for rank in ranks]
    folders = sorted(folder for folder in path.iterdir() if folder.is_dir() and journal_ranks(folder))
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
    """Why nothing orders a pair: the newest place behind its first operation where an order may be missing."""
    if pair.proof is Proof.NONE:
        return NO_EDGE
    return next(doubt.value for position, doubt in reversed(writer.doubts) if pair.since < position < pair.at)


# -- output --------------------------------------------------------------------------------------------------


def _show(report: AnyReport) -> None:
    if isinstance(report, Report):
        show(report)
        return
    source = report.profile.source if isinstance(report, CopyReport) else report.report.trace.source
    sentence = _copies_sentence(report) if isinstance(report, CopyReport) else _joined_sentence(report)
    click.echo(fit(f"{plain(source, width=1000)}: {sentence}", indent=FINDING_INDENT))
    _show_preflight(report)
    if isinstance(report, JoinedReport):
        show_findings(report.report)
        return
    for cause, count in report.causes.most_common():
        click.echo(fit(f"  {count} pairs: {cause}", indent=4))
    for pair in report.undecided[:SHOWN]:
        click.echo(fit(f"    {_op(report.profile, pair.earlier)}  |  {_op(report.profile, pair.later)}", indent=6))
    if len(report.undecided) > SHOWN:
        click.echo(f"    ... and {len(report.undecided) - SHOWN} more; --json lists them all")
    for text in report.blind:
        click.echo(fit(f"  not in the file: {text}", indent=4))


def _copies_sentence(report: CopyReport) -> str:
    pairs, ops = f"{report.pairs_checked:,} pairs of a copy and the work around it", len(report.profile.ops)
    if report.outcome == "nothing-checked":
        return f"NOTHING CHECKED: no copy between host and device beside other work in {ops:,} device operations"
    if report.outcome == "clean":
        return f"SAFE: all {pairs} are ordered, in {ops:,} device operations"
    if not report.undecided:
        return f"NOT DECIDABLE: all {pairs} are ordered, but the file does not hold everything that ran"
    return f"NOT DECIDABLE: {len(report.undecided):,} of {pairs} are in no order that the file shows"


def _joined_sentence(report: JoinedReport) -> str:
    inner, coverage = report.report, report.coverage
    verdicts = inner.keeper.verdicts
    seen = (
        f"{inner.pairs_checked:,} page pairs checked, times of {coverage.timed:,} of {coverage.operations:,} operations"
    )
    bad = inner.keeper.unexpected(inner.accepted.covers)
    known = (
        f", {inner.expected:,} more that {'is' if inner.expected == 1 else 'are'} accepted" if inner.expected else ""
    )
    if inner.code is ExitCode.FINDINGS:
        wrong = inner.keeper.unexpected(inner.accepted.covers, [Verdict.VIOLATION])
        pairs = f"{bad:,} operation pair{_are(bad)} in no proven order"
        return f"VIOLATED: {pairs}, {wrong:,} of them ran in the wrong one{known}; {seen}"
    if inner.code is ExitCode.CLEAN and inner.expected:
        pairs = f"{inner.expected:,} operation pair{_are(inner.expected)} in no proven order, which is accepted for now"
        return f"AS ACCEPTED: {pairs}; {seen}"
    if inner.code is ExitCode.CLEAN:
        return f"SAFE: every conflicting pair is in proven order; {seen}"
    if inner.undecided:
        return f"NOT DECIDABLE: the order of {verdicts[Verdict.UNKNOWN]:,} operation pairs is unknown; {seen}"
    return f"NOTHING CHECKED: no two operations touch the same pages; {seen}"


def _level(report: CopyReport | JoinedReport) -> str:
    """How far the file goes; a journal has every page set and every order."""
    return level(report.profile).value if isinstance(report, CopyReport) else Level.PROVABLE.value


def _preflight(report: CopyReport | JoinedReport) -> list[Check]:
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


def _show_preflight(report: CopyReport | JoinedReport) -> None:
    facts = report.profile.facts
    click.echo(fit(f"  {plain(facts.producer)}, {plain(facts.schema)}: {_level(report)}", indent=4))
    for check in _preflight(report):
        mark = "ok" if check.good else "!!"
        advice = f" -> {check.advice}" if check.advice else ""
        click.echo(fit(f"  {mark} {check.name}: {plain(check.text)}{advice}", indent=5))


def _as_json(report: AnyReport) -> dict[str, Any]:
    if isinstance(report, Report):
        return to_json(report)
    profile = report.profile
    about = {
        "producer": profile.facts.producer,
        "schema": profile.facts.schema,
        "preflight": [_check_json(check) for check in _preflight(report)],
        "level": _level(report),
    }
    if isinstance(report, JoinedReport):
        coverage = report.coverage
        counts = {"operations": coverage.operations, "timed": coverage.timed, "process": coverage.process}
        unknown = report.report.keeper.verdicts[Verdict.UNKNOWN]
        return {
            **to_json(report.report),
            **about,
            "granularity": "pages",
            "coverage": {**counts, "from_ranges": coverage.from_ranges},
            "undecided": {"pairs": unknown, "causes": {}, "between": []},
        }
    listed = [
        {
            "process": pair.process,
            "between": [_op_json(profile, pair.earlier), _op_json(profile, pair.later)],
            "cause": pair.cause,
        }
        for pair in report.undecided
    ]
    ordered = [
        {"between": [_label(profile, pair.earlier), _label(profile, pair.later)], "provenance": pair.proof.value}
        for _, pair in report.polled
    ]
    return {
        "file": profile.source,
        "outcome": report.outcome,
        "pairs_checked": report.pairs_checked,
        "races": [],
        "stalls": [],
        "ordered": ordered,
        "notes": [f"not in the file: {text}" for text in report.blind],
        "ownership": [],
        **about,
        "granularity": "copies",
        "undecided": {"pairs": len(listed), "causes": dict(report.causes), "between": listed},
    }


def _check_json(check: Check) -> dict[str, Any]:
    return {"name": check.name, "good": check.good, "text": check.text, "advice": check.advice}


def _label(profile: Profile, op: OpId) -> str:
    correlation = int(profile.ops.correlation[op])
    return f"#{correlation}" if correlation >= 0 else f"row {op}"


def _op(profile: Profile, op: OpId) -> str:
    stream = profile.streams[int(profile.ops.stream[op])]
    return f"{_label(profile, op)} {plain(profile.names[int(profile.ops.name[op])])} on {stream.text}"


def _op_json(profile: Profile, op: OpId) -> dict[str, Any]:
    ops, stream = profile.ops, profile.streams[int(profile.ops.stream[op])]
    start, end = int(ops.start_ns[op]), int(ops.end_ns[op])
    return {
        "operation": _label(profile, op),
        "name": profile.names[int(ops.name[op])],
        "device": stream.device,
        "stream": stream.number,
        "start_ns": None if start < 0 else start,
        "end_ns": None if end < 0 else end,
    }


def plain(text: str, *, width: int = 120) -> str:
    """``text`` from a file, fit to print: no control characters, not longer than ``width`` plus dots."""
    shown = "".join(letter if letter.isprintable() else "?" for letter in text[: width + 1])
    return shown if len(shown) <= width else shown[:width] + "..."


@contextlib.contextmanager
def _progress(path: Path) -> Iterator[Progress]:
    """Bars on standard error for a large input; nothing for a small one."""
    size = sum(f.stat().st_size for f in path.glob("*") if f.is_file()) if path.is_dir() else _size(path)
    if size < LARGE:
        yield lambda stage, done, total: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (bars.TextColumn("{task.description:24}", markup=False), bars.BarColumn(), bars.TimeElapsedColumn())
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as shown:
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
