"""The examples of docs/fleet.md and the README print what the pages say."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hicache_obs.cli import main

pytestmark = pytest.mark.usefixtures("need_fleet")


@pytest.mark.parametrize("page", ["docs/fleet.md", "README.md"])
def test_the_example_prints_what_the_page_says(
    page: str, checkout: Path, fleet_folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (checkout / page).read_text(encoding="utf-8")
    shown = re.search(r"^\$ hicache-obs (fleet journals)[^\n]*\n((?:.*\n)*?)```", text, re.MULTILINE)
    assert shown is not None
    monkeypatch.chdir(fleet_folder / "node1")

    assert main([*shown[1].split(), "--workers", "0"]) == 1
    lines = capsys.readouterr().out.replace(f"{fleet_folder / 'node1'}/", "").splitlines()
    expected = [line for line in shown[2].splitlines() if line.strip() != "..."]
    assert len(expected) >= 4
    assert [line for line in lines if line in expected] == expected
