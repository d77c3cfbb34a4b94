"""One scrape as a file, for the textfile collector of Prometheus's node exporter."""

from __future__ import annotations

import os
from pathlib import Path

from hicache_obs.errors import ConfigError
from hicache_obs.exporters.prometheus import Metrics, render
from hicache_obs.whole_file import write_whole


def check_textfile(path: Path, option: str = "--textfile") -> Path:
    """``path``, if a file can be written there: ask before the work that fills it.

    Raises:
        ConfigError: It cannot, or the collector would not read it.
    """
    if path.suffix != ".prom":
        raise ConfigError(f"{option} {path}: the collector reads files whose names end in .prom")
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise ConfigError(f"{option} {path}: cannot be written; expected a file in a directory that exists")
    return path


def write_textfile(metrics: Metrics, path: Path, option: str = "--textfile") -> None:
    """Replace ``path`` by the current values: whole or not at all, whoever reads it meanwhile.

    Raises:
        ConfigError: It cannot be written; what was there is unchanged.
    """
    # The collector runs as another user, and does not look at names like those of partial files.
    write_whole(path, render(metrics), option, permissions=0o644)
