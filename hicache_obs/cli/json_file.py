"""``--json FILE|-`` of commands that take a while: checked before they begin, there whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import click

from hicache_obs.errors import ConfigError
from hicache_obs.whole_file import is_same, write_whole


def writable_json(json_file: str | None, option: str = "--json", *, source: Path | None = None) -> Path | None:
    """Path of ``--json FILE``, checked before anything runs; ``None`` for standard output or no JSON.

    Raises:
        ConfigError: It cannot be written, or is ``source``, which the command reads, or part of it.
    """
    if json_file is None or json_file == "-":
        return None
    path = Path(json_file)
    if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path}: cannot be written; expected a file in a directory that exists")
    if source is not None and (is_same(path, source) or source.resolve() in path.resolve().parents):
        raise ConfigError(f"{option} {path}: is the input, or part of it; inputs are never overwritten")
    return path


def write_json(document: dict[str, Any], json_file: str | None, path: Path | None) -> None:
    """Write ``document``; ``path`` as ``writable_json`` gave it."""
    if json_file is None:
        return
    text = json.dumps(document, indent=2) + "\n"
    if path is None:
        click.echo(text, nl=False)
        return
    write_whole(path, text, "--json")
