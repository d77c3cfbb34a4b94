"""The textfile: whole or not at all, and valid for node exporter."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.exporters.metrics_sink import MetricsSink
from hicache_obs.exporters.prometheus import Metrics, render
from hicache_obs.exporters.textfile import check_textfile, write_textfile


def test_holds_one_scrape_that_others_may_read(tmp_path: Path, require_tool: Callable[..., Path]) -> None:
    metrics = Metrics(engine='a "b"\nc')
    MetricsSink(metrics).on_records(3)
    path = tmp_path / "hicache.prom"
    write_textfile(metrics, path)

    assert path.read_bytes() == render(metrics)
    assert path.stat().st_mode & 0o777 == 0o644
    assert list(tmp_path.iterdir()) == [path]
    promtool = require_tool("promtool", install="apt-get install prometheus")
    checked = subprocess.run(
        [promtool, "check", "metrics"], input=path.read_bytes(), capture_output=True, timeout=60, check=False
    )
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


FULL = """
import resource, signal, sys
from pathlib import Path
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.prometheus import (Metrics)
from hicache_obs.exporters.textfile import write_textfile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
try:
    write_textfile(Metrics(), Path(sys.argv[1]))
except ConfigError as error:
    print(error)
"""


def test_a_full_disk_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "hicache.prom"
    path.write_text("before\n")
    ran = subprocess.run(
        [sys.executable, "-c", FULL, path], capture_output=True, text=True, timeout=60, check=True, env=os.environ
    )

    assert ran.stdout == f"--textfile {path}: File too large; what was there is unchanged\n"
    assert path.read_text() == "before\n"
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_cannot_be_written_is_refused_beforehand(tmp_path: Path) -> None:
    for name, text in (
        ("hicache.txt", "the collector reads files whose names end in .prom"),
        ("none/hicache.prom", "cannot be written; expected a file in a directory that exists"),
        ("folder.prom", "cannot be written; expected a file in a directory that exists"),
    ):
        (tmp_path / "folder.prom").mkdir(exist_ok=True)
        with pytest.raises(ConfigError) as caught:
            check_textfile(tmp_path / name)
        assert str(caught.value) == f"--textfile {tmp_path / name}: {text}"
    assert check_textfile(tmp_path / "x.prom") == tmp_path / "x.prom"
