"""docs/operate.md speaks of files, alerts, verdicts and panels that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hicache_obs.dashboards.common import VERDICTS


@pytest.fixture
def text(checkout: Path) -> str:
    return (checkout / "docs" / "operate.md").read_text(encoding="utf-8")


def test_every_link_leads_somewhere(checkout: Path, text: str) -> None:
    pages = [checkout / "docs" / "operate.md", *(checkout / "dashboards" / "runbooks").glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())]

    assert len(links) > 30
    assert [str(link) for page, link in links if not (page.parent / link).exists()] == []


def test_every_number_it_explains_is_on_the_overview(checkout: Path, text: str) -> None:
    board = json.loads((checkout / "dashboards" / "grafana" / "overview.json").read_text())
    titles = " ".join(panel["title"] for panel in board["panels"])
    explained = re.findall(r"^\| (?!on the)([^|]+?) \|", text, re.MULTILINE)
    words = {name.strip("*") for name in explained if name.startswith("**")}

    assert words == {word.text for word in VERDICTS}
    assert [name for name in explained if name[0] not in "*-" and name not in titles] == []
    assert len(explained) > 12
