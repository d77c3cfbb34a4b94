"""The five minutes of docs/operate.md, command by command as written, but on free ports and in a folder of its own."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

PORTS = ("9464", "5001", "9093", "9090")
TOOLS = {
    "promtool": "prometheus",
    "prometheus-alertmanager": "prometheus-alertmanager",
    "amtool": "prometheus-alertmanager",
}
DEADLINE_S = 120


def commands(page: str) -> list[str]:
    """What the section says to type, once everything is installed."""
    section = page.partition("## Five minutes")[2].partition("\n## ")[0]
    typed = [line[2:] for line in section.splitlines() if line.startswith("$ ")]
    return [re.sub(r"\s+#.*", "", line) for line in typed[typed.index("make venv") + 1 :]]


def until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not done():
        assert time.monotonic() < deadline, f"not in {DEADLINE_S} s: {what}"
        time.sleep(0.5)


def test_from_zero_to_a_page(
    checkout: Path, tmp_path: Path, free_port: Callable[[], int], require_tool: Callable[..., Path]
) -> None:
    for tool, package in TOOLS.items():
        require_tool(tool, install=f"apt-get install {package}")
    ports = {port: str(free_port()) for port in PORTS}

    def local(text: str) -> str:
        text = re.sub(r"\b(" + "|".join(PORTS) + r")\b", lambda match: ports[match[1]], text)
        return text.replace("/tmp/", f"{tmp_path}/")

    place = tmp_path / "checkout"
    for name in ("compose", "prometheus"):
        folder = place / "hicache_obs" / "dashboards" / name
        shutil.copytree(checkout / "dashboards" / name, folder)
        for file in folder.iterdir():
            file.write_text(local(file.read_text()))
    typed = commands((checkout / "docs" / "operate.md").read_text(encoding="utf-8"))
    assert [line.split()[0] for line in typed] == [
        ".venv/bin/hicache-obs", "cd", "promtool", "python3", "prometheus-alertmanager", "prometheus", "amtool",
    ]  # fmt: skip
    query = local(typed.pop())
    where, logs = place, {}
    with ExitStack() as stack:
        for line in typed:
            program, *arguments = shlex.split(local(line).removesuffix("&"))
            if program == "cd":
                where = where / arguments[0]
                continue
            beside = Path(sys.executable).with_name("hicache-obs")  # -m would take the copied folder for the package
            started = {".venv/bin/hicache-obs": [beside], "python3": [sys.executable]}
            command: list[Any] = [*started.get(program, [program]), *arguments]
            if program == "promtool":
                subprocess.run(command, cwd=where, check=True, capture_output=True, timeout=DEADLINE_S)
                continue
            logs[program] = tmp_path / f"{Path(program).name}.log"
            log = stack.enter_context(logs[program].open("wb"))
            process = subprocess.Popen(command, cwd=where, stdout=log, stderr=log)
            stack.callback(process.wait)
            stack.callback(process.kill)
        until(lambda: '"POST /pager' in logs["python3"].read_text(), "the page arrives")
        shown = subprocess.run(shlex.split(query), capture_output=True, text=True, timeout=DEADLINE_S, check=True)

    assert "KV-cache pages were raced; answers may be wrong" in shown.stdout
    assert {line.split()[0] for line in shown.stdout.splitlines()[1:]} >= {"HiCacheViolation"}
