"""Every dashboard drawn by Grafana's own libraries in Chromium, from the recorded evening; see render/README.md."""

from __future__ import annotations

import json
import math
import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

RENDER = Path(__file__).parent / "render"
DEADLINE_S = 90
RED, GREEN, ORANGE = (242, 73, 92), (115, 191, 105), (255, 152, 48)
"""Grafana's colours as ``rgb`` of a computed style has them."""


@dataclass(frozen=True)
class Page:
    """A drawn dashboard, as the browser saw it."""

    errors: list[str]
    queries: list[dict[str, Any]]
    panels: dict[str, dict[str, Any]]
    cut: list[str]
    width: int
    picture: Path

    def text(self, title: str) -> str:
        """All text of a panel, its title left out."""
        return str(self.panels[title]["text"]).replace(title, "", 1).strip()

    def has_color(self, title: str, color: tuple[int, int, int]) -> bool:
        """Whether something in the panel has a background near this colour."""
        found = [
            tuple(map(int, rgb))
            for c in self.panels[title]["colors"]
            for rgb in re.findall(r"rgba?\((\d+), (\d+), (\d+)", c)
        ]
        return any(math.dist(rgb, color) < 60 for rgb in found)


Draw = Callable[..., Page]


@pytest.fixture(scope="module")
def bundle(checkout: Path, require_tool: Callable[..., Path]) -> Path:
    """The folder with the built page, made by ``make render-env``."""
    require_tool("node", install="apt-get install nodejs npm")
    require_tool("chromium", install="apt-get install chromium")
    work = checkout / ".cache" / "dashboard-render"
    require_tool("esbuild", install="make render-env", also=[work / "node_modules" / ".bin"])
    for file in (RENDER / "package.json", RENDER / "shot.mjs", RENDER / "index.html", *(RENDER / "src").iterdir()):
        copy = work / file.relative_to(RENDER)
        assert copy.is_file(), f"{copy} is missing: make render-env"
        assert copy.read_bytes() == file.read_bytes(), f"{copy} is old: make render-env"
    return work


@pytest.fixture(scope="module")
def draw(bundle: Path, checkout: Path, recording: Any, pictures: Path) -> Draw:
    """``draw(board, period, name)``: one screenshot, and what is on it."""

    def shoot(board: str, period: Any, name: str) -> Page:
        picture = pictures / f"{name}.jpg"
        start, end = (
            datetime.fromtimestamp(at, tz=timezone.utc).strftime("%FT%TZ") for at in (period.start, period.end)
        )
        file = checkout / "dashboards" / "grafana" / f"{board}.json"
        done = subprocess.run(
            ["node", "shot.mjs", recording.url, file, start, end, picture],
            cwd=bundle,
            capture_output=True,
            text=True,
            timeout=DEADLINE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        named = {panel["title"]: panel for panel in found["panels"]}
        return Page(found["errors"], found["queries"], named, found["cut"], found["width"], picture)

    return shoot


@pytest.fixture(scope="module")
def safe_pages(draw: Draw, recording: Any) -> dict[str, Page]:
    """All boards in the fenced period."""
    return {board: draw(board, recording.safe, board) for board in ("overview", "restore", "detector")}


@pytest.fixture(scope="module")
def racy_page(draw: Draw, recording: Any) -> Page:
    """The overview while the unfenced demo ran."""
    return draw("overview", recording.racy, "overview-violated")


@pytest.mark.parametrize("board", ["overview", "restore", "detector"])
def test_every_panel_is_drawn(safe_pages: dict[str, Page], checkout: Path, board: str) -> None:
    page = safe_pages[board]
    panels = json.loads((checkout / "dashboards" / "grafana" / f"{board}.json").read_text())["panels"]
    titles = {panel["title"] for panel in panels if panel["type"] != "row"}

    assert page.errors == []
    assert [query["query"] for query in page.queries if not query["results"]] == []
    assert set(page.panels) >= titles
    assert [title for title in titles if "No data" in page.text(title) or not page.text(title)] == []
    assert page.picture.stat().st_size > 20_000


@pytest.mark.parametrize(
    ("board", "title"),
    [
        ("overview", "Load-back time that is fence wait"),
        ("overview", "Fence wait"),
        ("overview", "Load-back: whole and copy time"),
        ("overview", "Cache hits and load-back (SGLang)"),
        ("restore", "Whole"),
        ("restore", "Layer wait"),
        ("restore", "Whole time by rank, p99"),
        ("restore", "Pages moved"),
        ("detector", "Coverage by rank"),
        ("detector", "Overhead by phase"),
    ],
)
def test_a_graph_with_values_has_something_drawn(safe_pages: dict[str, Page], board: str, title: str) -> None:
    """Values next to gaps: a quantile is not a number while nothing happens."""
    assert safe_pages[board].panels[title]["drawn"] > 50


def test_a_graph_of_zeros_has_nothing_drawn(safe_pages: dict[str, Page], racy_page: Page) -> None:
    assert safe_pages["overview"].panels["New findings"]["drawn"] == 0
    assert racy_page.panels["New findings"]["drawn"] > 50


@pytest.mark.parametrize("board", ["overview", "restore", "detector"])
def test_nothing_is_cut_off_at_1280_pixels(safe_pages: dict[str, Page], board: str) -> None:
    assert safe_pages[board].width <= 1280
    assert safe_pages[board].cut == []


def test_words_and_colours_follow_the_state(safe_pages: dict[str, Page], racy_page: Page) -> None:
    safe = safe_pages["overview"]

    assert (safe.text("Verdict"), racy_page.text("Verdict")) == ("SAFE", "VIOLATED")
    assert [safe.has_color("Verdict", color) for color in (GREEN, RED)] == [True, False]
    assert [racy_page.has_color("Verdict", color) for color in (GREEN, RED)] == [False, True]
    assert safe.text("Coverage") == "100.0%"


def test_without_data_nothing_looks_safe(draw: Draw, recording: Any) -> None:
    """An hour before anything was scraped: words, not zeros, and no green."""
    start = recording.racy.start
    page = draw("overview", replace(recording.racy, start=start - 3600, end=start - 3000), "not-checked")

    assert page.errors == []
    assert page.cut == []
    for title in ("Verdict", "Violations", "Unfenced transfers", "Coverage", "Pairs checked"):
        assert page.text(title) == "NOT CHECKED"
        assert not page.has_color(title, GREEN)
        assert page.has_color(title, ORANGE)
    assert page.text("Fence wait share") == "No traffic"
    assert not page.has_color("Fence wait share", GREEN)


def test_what_cannot_be_seen_is_not_a_green_zero(safe_pages: dict[str, Page]) -> None:
    """A hazard without records has no number of violations."""
    lines = safe_pages["detector"].text("Hazards").splitlines()
    row = lines[lines.index("rdma") :][:6]

    assert row == ["rdma", "NOT OBSERVABLE", "0", "0", "–", "–"]
    row = lines[lines.index("waw_forward_restore") :][:6]
    assert row[1] == "watched"
    assert row[4:] == ["0", "0"]


def test_whole_numbers_are_whole(racy_page: Page, recording: Any) -> None:
    expr = f'max_over_time(sum(hicache_obs_violations_total{{instance="{recording.instance}"}})[30s:500ms])'
    ((violations),) = recording.query(expr, recording.racy.end)

    assert racy_page.text("Violations") == violations["value"][1]
    for title in ("Contradictions", "Latent races", "Not decidable", "Unfenced transfers", "Pairs checked"):
        assert re.fullmatch(r"[\d,]+", racy_page.text(title)), title


def test_the_worst_rank_is_on_top(racy_page: Page, recording: Any) -> None:
    rows = [line for line in racy_page.text("Ranks, worst first").splitlines() if line in ("VIOLATED", "SAFE")]
    text = racy_page.text("Ranks, worst first")

    assert rows == ["VIOLATED", "SAFE"]
    assert text.index(recording.instance) < text.index(recording.other)
