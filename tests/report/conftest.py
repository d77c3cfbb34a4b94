"""Recordings, reports made of them, and Chromium to look at one."""

from __future__ import annotations

import json
import random
import subprocess
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.records import (
    NO_OP,
    Access,
    AnyRecord,
    Define,
    DefineSpace,
    Direction,
    HostSync,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    Purpose,
    Space,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
    page_ids,
)

DEADLINE_S = 240
NAMES = ("forward", "load-back")
KERNELS, COPIES = 6, 2
_THREAD = ThreadId(0)


class Page(HTMLParser):
    """What a browser without scripts would make of a report."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text
        self.words: list[str] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.attributes: list[tuple[str, str, str | None]] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.attributes += [(tag, name, value) for name, value in attrs]
        if tag not in ("meta", "br", "link", "input"):
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            attrs, text = self.scripts[-1]
            self.scripts[-1] = (attrs, text + data)
        elif self._open and self._open[-1] not in ("style", "title") and data.strip():
            self.words.append(data.strip())

    @property
    def data(self) -> list[dict[str, Any]]:
        """Data of each section's charts."""
        return [json.loads(text) for attrs, text in self.scripts if attrs.get("type") == "application/json"]


@pytest.fixture
def report(tmp_path: Path) -> Callable[..., tuple[int, Page]]:
    """``report(arguments...)``: exit code and page of a command line without its ``-o``."""

    def make(*arguments: str | Path) -> tuple[int, Page]:
        code = main(["report", *map(str, arguments), "-o", str(tmp_path / "report.html")])
        return code, Page((tmp_path / "report.html").read_text(encoding="utf-8"))

    return make


def write_journal(folder: Path, records: Iterable[AnyRecord]) -> Path:
    """A journal of ``records`` in a new folder."""
    writer = JournalWriter(folder)
    some: list[AnyRecord] = []
    for record in records:
        some.append(record)
        if len(some) == 20_000:
            writer.write(some)
            some = []
    writer.write(some)
    writer.close()
    return folder


@dataclass(frozen=True)
class Engine:
    """Rounds on one stream, restores of the same pages on another.

    Attributes:
        rounds: Each has ``KERNELS`` kernels and ``COPIES`` copies.
        races: Every so many-th restore has no fence; 0 for none.
    """

    rounds: int
    races: int = 0

    @property
    def operations(self) -> int:
        return self.rounds * (KERNELS + COPIES)

    def records(self) -> Iterator[AnyRecord]:
        for number, name in enumerate(NAMES):
            yield Define(NO_OP, _THREAD, 0, DefineSpace.STREAM, number, name)
            yield Define(NO_OP, _THREAD, 0, DefineSpace.SITE, number, f"{name} work")
        yield Define(NO_OP, _THREAD, 0, DefineSpace.POOL, 0, "kv", COPIES)
        pages = [page_ids(range(16 * block, 16 * block + 16)) for block in range(64)]
        rng = random.Random(self.rounds)  # or the columns compress better than those of a real recording
        op, now = 0, 1_000_000
        for number in range(1, self.rounds + 1):
            ids = pages[number % len(pages)]
            busy = now
            for layer in range(KERNELS):
                took = rng.randrange(4000, 9000)
                accesses = (Access(Space.DEVICE, Mode.WRITE, ids),)
                yield Kernel(OpId(op), _THREAD, now, StreamId(0), 0, number, 0, (layer, layer + 1), accesses)
                yield Times(OpId(op), _THREAD, busy + took, busy, busy + took)
                busy, op = busy + took, op + 1
            free = now - 300  # idle before the restore was called for: that is no waiting
            if not self.races or number % self.races:
                yield WaitStream(OpId(op), _THREAD, now, StreamId(1), StreamId(0), Purpose.LOAD_FENCE)
                yield Times(OpId(op), _THREAD, busy, free, busy)
                free, op = busy, op + 1
            free = max(free, now + 100)
            for layer in range(COPIES):
                accesses = (Access(Space.DEVICE, Mode.WRITE, ids), Access(Space.HOST, Mode.READ, ids))
                took = rng.randrange(1500, 4000)
                fields = (OpId(op), _THREAD, now, StreamId(1), 1, number, 65_536, (layer, layer + 1), accesses)
                yield Memcpy(*fields, direction=Direction.HOST_TO_DEVICE)
                yield Times(OpId(op), _THREAD, free + took, free, free + took)
                free, op = free + took, op + 1
            now = max(busy, free) + 2000
            yield HostSync(OpId(op), _THREAD, now, None)
            op += 1


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Engine, Path]]:
    """``engine(rounds, races=0)``: a recording and its journal, in a folder of its own."""

    def make(rounds: int, races: int = 0) -> tuple[Engine, Path]:
        recorded = Engine(rounds, races)
        folder = tmp_path_factory.mktemp("engine") / f"engine-{rounds}-{races}"
        return recorded, write_journal(folder, recorded.records())

    return make


@pytest.fixture(scope="session")
def browse(
    checkout: Path, require_tool: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., dict[str, Any]]:
    """``browse(html, steps=[...], width=..., scheme=...)``: what Chromium then shows; see ``drive.mjs``."""
    require_tool("node", install="apt-get install nodejs npm")
    require_tool("chromium", install="apt-get install chromium")
    folder = checkout / ".cache" / "dashboard-render"
    require_tool("playwright-core", install="make render-env", also=[folder / "node_modules" / ".bin"])
    script = Path(__file__).with_name("drive.mjs")

    def open_report(html: Path, **options: Any) -> dict[str, Any]:
        asked = tmp_path_factory.mktemp("browse") / "options.json"
        asked.write_text(json.dumps(options))
        done = subprocess.run(
            ["node", script, html, asked], cwd=folder, capture_output=True, text=True, timeout=DEADLINE_S, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return open_report
