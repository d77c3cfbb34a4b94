"""``hicache-obs analyze``: profiler files in, verdicts out; with the journal of the same run, page by page."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from hicache_obs.cli.judge import (
    AnyReport,
    CopyReport,
    JoinedReport,
    check_journal,
    checks_of,
    judge_file,
    label,
    level_of,
    plain,
    progress_of,
    sentence,
    source_of,
)
from hicache_obs.cli.layout import FINDING_INDENT, fit
from hicache_obs.cli.outputs import accepted_option, load_accepted
from hicache_obs.cli.ranks_report import RanksReport
from hicache_obs.cli.verdict import Report, show, show_findings, to_json
from hicache_obs.findings import Verdict, worst
from hicache_obs.readers.preflight import Check
from hicache_obs.readers.profile import Profile
from hicache_obs.records import OpId

SHOWN: Final = 10
"""Undecided pairs listed as text per file; the rest are counted."""


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
    check_journal(files, journal)
    accepted = load_accepted(accepted_file)
    reports: list[AnyReport] = []
    for path in files:
        with progress_of(path) as progress:
            reports += judge_file(path, journal, progress, accepted)
    if as_json:
        objects = [_as_json(report) for report in reports]
        click.echo(json.dumps(objects[0] if len(objects) == 1 else objects, indent=2))
    else:
        for report in reports:
            show_report(report)
    return int(worst([report.code for report in reports]))


# -- output --------------------------------------------------------------------------------------------------


def show_report(report: AnyReport) -> None:
    """Print a report: one sentence, the preflight, and what was found or could not be decided."""
    if isinstance(report, Report):
        show(report)
        return
    if isinstance(report, RanksReport):
        click.echo(fit(f"{plain(report.source, width=1000)}: {report.sentence}", indent=FINDING_INDENT))
        for line in report.lines:
            click.echo(fit(f"  {plain(line, width=1000)}", indent=4))
        return
    click.echo(fit(f"{plain(source_of(report), width=1000)}: {sentence(report)}", indent=FINDING_INDENT))
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


def _show_preflight(report: CopyReport | JoinedReport) -> None:
    facts = report.profile.facts
    click.echo(fit(f"  {plain(facts.producer)}, {plain(facts.schema)}: {level_of(report)}", indent=4))
    for check in checks_of(report):
        mark = "ok" if check.good else "!!"
        advice = f" -> {check.advice}" if check.advice else ""
        click.echo(fit(f"  {mark} {check.name}: {plain(check.text)}{advice}", indent=5))


def _as_json(report: AnyReport) -> dict[str, Any]:
    if isinstance(report, Report):
        return to_json(report)
    if isinstance(report, RanksReport):
        return report.as_json()
    profile = report.profile
    about = {
        "producer": profile.facts.producer,
        "schema": profile.facts.schema,
        "preflight": [_check_json(check) for check in checks_of(report)],
        "level": level_of(report),
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
        {"between": [label(profile, pair.earlier), label(profile, pair.later)], "provenance": pair.proof.value}
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


def _op(profile: Profile, op: OpId) -> str:
    stream = profile.streams[int(profile.ops.stream[op])]
    return f"{label(profile, op)} {plain(profile.names[int(profile.ops.name[op])])} on {stream.text}"


def _op_json(profile: Profile, op: OpId) -> dict[str, Any]:
    ops, stream = profile.ops, profile.streams[int(profile.ops.stream[op])]
    start, end = int(ops.start_ns[op]), int(ops.end_ns[op])
    return {
        "operation": label(profile, op),
        "name": profile.names[int(ops.name[op])],
        "device": None if stream.device < 0 else stream.device,
        "stream": None if stream.number < 0 else stream.number,
        "start_ns": None if start < 0 else start,
        "end_ns": None if end < 0 else end,
    }
