"""``hicache-obs record``: a command under Nsight Systems or torch.profiler, with its journal, and the verdict."""

from __future__ import annotations

import datetime
import shlex
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import click

from hicache_obs.cli.analyze import show_report
from hicache_obs.cli.judge import AnyReport, CopyReport, JoinedReport, journals_at, judge_file, plain, progress_of
from hicache_obs.cli.layout import fit
from hicache_obs.cli.record_run import (
    JOURNAL,
    REPORT,
    TORCH,
    ending,
    import_stream,
    make_folder,
    nsys_command,
    program,
    recording_environment,
    rings_read,
    run,
    torch_environment,
)
from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.findings import ExitCode, worst
from hicache_obs.readers.nsys_report import REPORTS, STREAMS

PROFILERS: Final = ("nsys", "torch")


@click.command("record", context_settings={"ignore_unknown_options": True})
@click.option(
    "--with", "profiler", type=click.Choice(PROFILERS),
    help="Nsight Systems or torch.profiler; default: nsys if it is on PATH.",
)  # fmt: skip
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), metavar="DIR",
    help="Folder of the recording, new or empty; default: recording-DATE-TIME here.",
)  # fmt: skip
@click.argument("arguments", nargs=-1, required=True, type=click.UNPROCESSED, metavar="-- CMD...")
def command(profiler: str | None, output: Path | None, arguments: tuple[str, ...]) -> int:
    """Run CMD under a profiler with the flags that a verdict needs, keep its journal, and judge both.

    CMD's processes get HICACHE_OBS=observe and keep their records in DIR/journal; device times come from the profiler.
    What was recorded without the other is judged alone. Ctrl-C ends CMD, not the judging.

    Exit code 1 with findings, 3 if nothing could be checked or CMD failed, 2 if it cannot be run.
    """
    tool = _tool(profiler)
    program(arguments)
    folder = output or Path(f"recording-{datetime.datetime.now().astimezone():%Y%m%d-%H%M%S}")
    make_folder(folder)
    code = _record(tool, folder, arguments)
    click.echo(f"recorded in {folder}")
    if code:
        under = " under nsys" if tool == "nsys" else ""  # whose exit code is its own or the command's
        click.echo(f"{shlex.join(arguments)}{under} {ending(code)}: what it would have done then is not recorded")
    verdict = _judge(tool, folder)
    return int(ExitCode.NOTHING_CHECKED if code and verdict is ExitCode.CLEAN else verdict)


def _tool(profiler: str | None) -> str:
    if profiler is None:
        return "nsys" if shutil.which("nsys") else "torch"
    if profiler == "nsys" and shutil.which("nsys") is None:
        raise ConfigError("--with nsys: no nsys on PATH; install Nsight Systems, or record --with torch")
    return profiler


def _record(tool: str, folder: Path, arguments: Sequence[str]) -> int:
    environment = recording_environment(folder)
    wrapped = list(arguments)
    with ExitStack() as stack:
        if tool == "nsys":
            nsys = shutil.which("nsys")
            assert nsys is not None
            wrapped = nsys_command(nsys, folder, arguments)
        else:
            environment |= stack.enter_context(torch_environment(folder))
        with rings_read(folder):
            code = run(wrapped, environment)
        if tool == "nsys":
            import_stream(folder)
        return code


def _judge(tool: str, folder: Path) -> ExitCode:
    """Judge what is in the folder of a recording, and say it."""
    profiles = _profiles(tool, folder)
    journals = journals_at(folder / JOURNAL) if any((folder / JOURNAL).glob("**/*.arrows")) else []
    if not profiles:
        _say(f"{folder}: nothing of {'Nsight Systems' if tool == 'nsys' else 'torch.profiler'}: {_why(tool, folder)}")
    if not journals:
        _say(f"{folder}: no journal: none of the command's processes has a recorder; pages are unknown")
    reports: list[AnyReport] = []
    alone = {journal for journal, _ in journals}
    for profile in profiles:
        joined = _joined(profile, folder / JOURNAL, alone) if journals else []
        reports += joined or _report(profile, None)
    for journal in sorted(alone):
        reports += _report(journal, None)
    for report in reports:
        show_report(report)
    if not reports:
        click.echo("NOTHING CHECKED: nothing was recorded")
        return ExitCode.NOTHING_CHECKED
    _advise(folder, reports, profiles)
    by_page = [report for report in reports if not isinstance(report, CopyReport)]
    return worst([report.code for report in by_page or reports])  # whole copies say nothing where pages are known


def _profiles(tool: str, folder: Path) -> list[Path]:
    if tool == "torch":
        return sorted((folder / TORCH).glob("*.json.gz"))
    found = [folder / f"{REPORT}{suffix}" for suffix in (*REPORTS, *STREAMS)]
    return [path for path in found if path.is_file()][:1]  # the report, else what it would be made of


def _why(tool: str, folder: Path) -> str:
    """Why a profiler left nothing."""
    if tool == "nsys":
        return "it wrote no report; its messages are above"
    errors = [plain(file.read_text(errors="replace").strip()) for file in sorted((folder / TORCH).glob("*.error"))]
    return errors[0] if errors else "no process of the command imported torch and came to its end"


def _report(path: Path, journal: Path | None) -> list[AnyReport]:
    with progress_of(path) as progress:
        return judge_file(path, journal, progress)


def _joined(profile: Path, journals: Path, alone: set[Path]) -> list[AnyReport]:
    """What a profile and the journals that fit it gave; those leave ``alone``."""
    try:
        reports = _report(profile, journals)
        alone.clear()
        return reports
    except TraceError:
        pass  # not all of them fit
    reports = []
    for journal in sorted(alone):
        try:
            reports += _report(profile, journal)
            alone.remove(journal)
        except TraceError as error:
            _say(f"{profile.name} and {journal.name} are judged apart: {error}")
    return reports


def _advise(folder: Path, reports: Sequence[AnyReport], profiles: Sequence[Path]) -> None:
    """The command that draws it: the profile with the journal if they fit, else the one that says more."""
    words = ["hicache-obs", "convert"]
    if any(isinstance(report, JoinedReport) for report in reports):
        words += [str(profiles[0]), "--journal", str(folder / JOURNAL)]
    elif all(isinstance(report, CopyReport) for report in reports):
        words.append(str(profiles[0]))
    else:
        words.append(str(folder / JOURNAL))
    click.echo(f"timeline for ui.perfetto.dev: {shlex.join([*words, '-o', str(folder / 'timeline.pftrace')])}")


def _say(text: str) -> None:
    click.echo(fit(text, indent=4))
