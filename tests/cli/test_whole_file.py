"""Outputs of commands are there whole or not at all, and never in the place of an input."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.errors import ConfigError
from hicache_obs.whole_file import write_whole

REQUEST = '{"input_length": 8, "output_length": 2, "hash_ids": [0]}\n'


def test_a_file_is_replaced_with_the_usual_permissions(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 255)
    path.write_text("old")
    plain = tmp_path / "plain"
    plain.touch()

    write_whole(path, "new\n", "--json")

    assert path.read_bytes() == b"new\n"
    assert path.stat().st_mode == plain.stat().st_mode
    assert sorted(tmp_path.iterdir()) == sorted([path, plain])


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.json"
    path.write_text("old")

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ConfigError, match=rf"--json {path}: No space left on device; what was there is unchanged"):
        write_whole(path, "new", "--json")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("command", [["demo", "--device", "virtual"], ["bench-fences"]], ids=lambda words: words[0])
@pytest.mark.parametrize("link", [False, True], ids=["itself", "link"])
def test_the_workload_is_not_overwritten(
    command: list[str], link: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload, target = tmp_path / "requests.jsonl", tmp_path / "out.json"
    workload.write_text(REQUEST)
    if link:
        target.symlink_to(workload)

    assert main([*command, "--workload", str(workload), "--json", str(target if link else workload)]) == 2

    assert "is the input, or part of it; inputs are never overwritten" in capsys.readouterr().err
    assert workload.read_text() == REQUEST
