"""The examples of docs/explore.md run, and do what the page says."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.testing import History
from hicache_obs.testing.protections import PROTECTIONS


@pytest.fixture
def page(checkout: Path) -> str:
    """The text of docs/explore.md."""
    return (checkout / "docs" / "explore.md").read_text()


def test_the_examples_run(page):
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(block, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 4
    for test in tests:
        test()


def test_the_example_runs_from_the_command_line(page, tmp_path, monkeypatch, capsys):
    block = re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert block is not None
    shown = re.search(r"^\$ hicache-obs (.*restores.*)\n((?:.*\n)*?)```", page, re.MULTILINE)
    assert shown is not None
    (tmp_path / "restores.py").write_text(block[1])
    monkeypatch.chdir(tmp_path)
    assert main(shown[1].split()) == 1
    lines = capsys.readouterr().out.splitlines()
    expected = [line for line in shown[2].splitlines() if line.strip() != "..."]
    assert expected
    assert [line for line in lines if line in expected] == expected


def test_every_protection_is_on_the_page(page):
    rows = re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)
    assert [name.strip("`") for row in rows for name in row.split(", ")] == list(PROTECTIONS)


def test_the_histories_of_the_page_on_testing(checkout):
    """Its example runs, and its table has a step of every kind that the notation knows."""
    section = (
        (checkout / "docs" / "testing.md").read_text().partition("## Histories in one line")[2].partition("\n## ")[0]
    )
    names: dict[str, Any] = {}
    for block in re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL):
        exec(block, names)
    tests = [value for name, value in names.items() if name.startswith("test_")]
    assert len(tests) == 2
    for test in tests:
        test()
    steps = [
        step for row in re.findall(r"^\| (`.*?`) \|", section, re.MULTILINE) for step in re.findall(r"`(.*?)`", row)
    ]
    kinds = {type(History(step).records[-1]).__name__ for step in steps}
    assert kinds == {
        "Kernel", "WaitStream", "EventRecord", "EventWait", "EventSync", "HostSync", "EventQuery", "PageAlloc",
        "PageFree", "Lost",
    }  # fmt: skip
