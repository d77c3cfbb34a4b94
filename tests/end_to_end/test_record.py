"""docs/nsight.md with the real Nsight Systems: every command in it is run, in order, and ends as the page says."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import pytest
from rich.console import Console
from rich.terminal_theme import MONOKAI
from rich.text import Text

pytestmark = pytest.mark.slow

DEADLINE_S = 300
INSTALL = "apt-get install nsight-systems (Debian non-free)"
IMPORTER_FOLDERS = ["/usr/lib/nsight-systems/host-linux-x64"]
PICTURED = 22
"""Lines of the picture of the terminal."""


@dataclass(frozen=True)
class Ran:
    """One command of the page and what became of it.

    Attributes:
        shown: The lines under it on the page; ``...`` stands for any lines.
    """

    command: str
    shown: list[str]
    code: int
    out: str


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Every ``$ command`` of the page, and the lines under it."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif found:
                found[-1][1].append(line)
    return found


@pytest.fixture(scope="module")
def ran(
    require_tool: Callable[..., Path],
    nvtx_0_2_11: Path,
    nsys_alone: Callable[[], AbstractContextManager[None]],
    checkout: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Ran]:
    """The page, worked through in an empty folder; by the word after ``hicache-obs`` and the last argument."""
    require_tool("nsys", install=INSTALL)
    require_tool("QdstrmImporter", install=INSTALL, also=IMPORTER_FOLDERS)
    folder = tmp_path_factory.mktemp("review")
    (folder / "bin").mkdir()
    program = folder / "bin" / "hicache-obs"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m hicache_obs "$@"\n')
    program.chmod(0o755)
    environment = {
        **os.environ,
        "PATH": os.pathsep.join([str(program.parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(nvtx_0_2_11), os.environ.get("PYTHONPATH", "")]),
        "TMPDIR": str(folder),
    }
    found = {}
    for command, shown in commands((checkout / "docs" / "nsight.md").read_text()):
        with nsys_alone():
            ended = subprocess.run(
                shlex.split(command), cwd=folder, env=environment, capture_output=True, text=True, timeout=DEADLINE_S,
                check=False,
            )  # fmt: skip
        words = command.split()
        found[f"{words[1]} {words[-1]}"] = Ran(command, shown, ended.returncode, ended.stdout + ended.stderr)
    return found


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("record 32", 1),
        ("analyze review/journal/stream", 0),
        ("replay review/journal/none", 0),
        ("convert review/timeline.pftrace", 0),
        ("convert review/annotated.nsys-rep", 2),
        ("convert parquet", 0),
        ("check review/records/rank0.parquet", 1),
    ],
)
def test_every_command_ends_as_the_page_says(ran: dict[str, Ran], name: str, code: int) -> None:
    assert ran[name].code == code, ran[name].out


def test_the_table_above_has_every_command(ran: dict[str, Ran]) -> None:
    assert len(ran) == 7


def test_what_the_page_shows_is_what_is_printed(ran: dict[str, Ran]) -> None:
    """Numbers aside, which are those of one run on threads."""
    for step in ran.values():
        printed = {plain(line) for line in step.out.splitlines()}
        for line in step.shown:
            assert line == "..." or plain(line) in printed, (step.command, line, step.out)


def plain(line: str) -> str:
    """A line without its numbers, fingerprints and spaces."""
    return re.sub(r"[\d,.\u2013-]+", "#", re.sub(r"HC-[0-9a-f]{8}", "HC", line)).replace(" ", "")


def test_the_recording_is_judged_page_by_page(ran: dict[str, Ran]) -> None:
    out = ran["record 32"].out

    assert re.search(r"recording.nsys-rep \+ review/journal/none: VIOLATED: \d+ operation pairs? ", out)
    for fence in ("page", "stream"):
        assert f"recording.nsys-rep + review/journal/{fence}: SAFE: every conflicting pair is in proven order" in out
    assert "times of 394 of 394 operations" in out


def test_a_picture_of_the_verdict(ran: dict[str, Ran], pictures: Path) -> None:
    """For docs/nsight.md; the terminal as text in SVG, without the fonts that rich would load from elsewhere."""
    step = ran["record 32"]
    lines = [f"$ {step.command}", *step.out.splitlines()]
    first = next(number for number, line in enumerate(lines) if "VIOLATED" in line)
    console = Console(record=True, width=132, file=open(os.devnull, "w"), color_system="truecolor")  # noqa: SIM115
    for line in [lines[0], "...", *lines[first : first + PICTURED]]:
        text = Text(line, overflow="fold")
        text.highlight_regex(r"VIOLATED|VIOLATION|SAFE|!!", "bold red")
        text.highlight_regex(r"^\\$ .*| ok ", "bold green")
        console.print(text, highlight=False)
    console.file.close()
    picture = console.export_svg(title="hicache-obs record", theme=MONOKAI, unique_id="record")
    picture = re.sub(r"@font-face \{.*?\}\n", "", picture, flags=re.DOTALL)
    (pictures / "record.svg").write_text(picture)

    assert "url(http" not in picture
    assert "@font-face" not in picture
    assert "VIOLATED" in picture


def test_the_parquet_files_say_the_same(ran: dict[str, Ran], capsys: pytest.CaptureFixture[str]) -> None:
    """The first of the three is the run without fences."""
    out = ran["check review/records/rank0.parquet"].out

    assert "findings, 5555 page pairs checked" in out
