"""``hicache-obs audit-sglang``: path by path, what orders HiCache's transfers in an SGLang release."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import click

from hicache_obs.cli.layout import fit
from hicache_obs.errors import ConfigError
from hicache_obs.findings import ExitCode
from hicache_obs.sglang.audit import Audited, Verdict, audit, barrier, release_of


@click.command("audit-sglang")
@click.argument("folder", required=False, type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(folder: Path | None, as_json: bool) -> int:
    """Name the edge that orders each of HiCache's transfers, or the missing one and the line that adds it.

    FOLDER is where an SGLang release is unpacked (it holds the folder sglang); by default the installed one. Nothing
    of it is imported. Exit code 1 if a path has no edge.
    """
    source = _source(folder)
    paths = audit(source)
    if as_json:
        click.echo(json.dumps([_as_json(path) for path in paths], indent=2))
    else:
        click.echo(fit(f"SGLang {release_of(source)}; the schedule stream waits for {barrier(source)}", indent=2))
        for path in paths:
            for line in _lines(path):
                click.echo(fit(line, indent=6))
    verdicts = {path.verdict for path in paths}
    if Verdict.RACE in verdicts:
        return ExitCode.FINDINGS
    return ExitCode.CLEAN if Verdict.ORDERED in verdicts else ExitCode.NOTHING_CHECKED


def _source(folder: Path | None) -> Path:
    if folder is not None:
        for source in (folder / "sglang", folder):
            if (source / "srt").is_dir():
                return source
        raise ConfigError(f"{folder}: no SGLang release; expected a folder that holds sglang/srt")
    spec = importlib.util.find_spec("sglang")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError("SGLang is not installed; name a FOLDER that holds the package sglang")
    return Path(next(iter(spec.submodule_search_locations)))


def _lines(audited: Audited) -> list[str]:
    path, verdict = audited.path, audited.verdict
    lines = [f"{path.path}: {verdict.value}"]
    if verdict is Verdict.ABSENT:
        return lines
    if verdict is Verdict.RACE:
        lines += [f"    missing: {path.edge}", f"    without it: {path.without}", f"    patch: {audited.patch}"]
    else:
        lines.append(f"    by: {path.edge}")
    return [*lines, f"    known: {path.how}", f"    at {', '.join(audited.where)}"]


def _as_json(audited: Audited) -> dict[str, object]:
    path = audited.path
    race = audited.verdict is Verdict.RACE
    return {
        "path": path.path,
        "verdict": audited.verdict.value,
        "edge": path.edge,
        "known": path.how,
        "where": list(audited.where),
        "without": path.without if race else None,
        "patch": audited.patch if race else None,
    }
