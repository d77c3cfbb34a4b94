"""``hicache-obs report``: what ``check`` and ``analyze`` conclude, as one HTML file to look through and pass on."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from hicache_obs.cli.judge import check_journal, judge_file, progress_of, sentence, source_of
from hicache_obs.cli.layout import FINDING_INDENT, fit
from hicache_obs.cli.outputs import accepted_option, load_accepted
from hicache_obs.cli.sections import section_of
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.html import MARK, Section, render
from hicache_obs.findings import ExitCode, worst
from hicache_obs.whole_file import is_same, write_whole

_JOURNAL_HELP: Final = "Journal of the same run: page sets and order from it, device times from the one profile."


@click.command("report")
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE|DIR...")
@click.option("-o", "--output", required=True, type=click.Path(path_type=Path), metavar="FILE", help="HTML to write.")
@click.option("--journal", type=click.Path(path_type=Path), metavar="DIR", help=_JOURNAL_HELP)
@accepted_option
def command(files: Sequence[Path], output: Path, journal: Path | None, accepted_file: Path | None) -> int:
    """Write a report that opens in any browser, without a network: verdict, findings, timeline, pages, fence costs.

    FILE is anything that 'check' or 'analyze' takes. The exit code is theirs: 1 with findings, 3 if something could
    not be decided or nothing was checked.
    """
    inputs = [*files, *([journal] if journal is not None else []), *([accepted_file] if accepted_file else [])]
    check_output(output, inputs)
    check_journal(files, journal)
    accepted = load_accepted(accepted_file)
    sections: list[Section] = []
    codes: list[ExitCode] = []
    lines: list[str] = []
    for path in files:
        with progress_of(path) as progress:
            for judged in judge_file(path, journal, progress, accepted):
                progress("drawing", 0, 0)
                again = _replay(path if journal is None else journal)
                sections.append(section_of(judged, again))
                codes.append(judged.code)
                lines.append(f"{source_of(judged)}: {sentence(judged)}")
    write_whole(output, render(sections), "--output")
    for line in lines:
        click.echo(fit(line, indent=FINDING_INDENT))
    click.echo(f"report: {output}")
    return int(worst(codes))


def check_output(output: Path, inputs: Sequence[Path]) -> None:
    """Ask, before the work, whether ``output`` may be written.

    Raises:
        ConfigError: It is one of ``inputs``, or in one that is a folder; it cannot be written; or something else than
            a report is there.
    """
    try:
        real = output.resolve()
        for given in inputs:
            if is_same(output, given) or (os.path.isdir(given) and real.is_relative_to(given.resolve())):
                raise ConfigError(f"--output {output}: is part of the input {given}; expected another place")
        if output.is_dir():
            raise ConfigError(f"--output {output}: is a directory; expected a file in it")
        if not output.parent.is_dir():
            raise ConfigError(f"--output {output}: there is no directory {output.parent}")
        if not os.access(output.parent, os.W_OK | os.X_OK):
            raise ConfigError(f"--output {output}: directory {output.parent} cannot be written to")
        if output.exists() and not (output.is_file() and _is_report(output)):
            raise ConfigError(f"--output {output}: exists and is no report; only a report is replaced")
    except OSError as error:
        raise ConfigError(f"--output {output}: {error.strerror}") from None


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MARK)) == MARK.encode()


def _replay(path: Path) -> str:
    """The command that replays a finding of ``path``, without the pair."""
    return f"hicache-obs replay {shlex.quote(str(path))}"
