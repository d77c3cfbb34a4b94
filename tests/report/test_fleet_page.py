"""The page of ``fleet``: what it says without scripts, and that it is quiet in Chromium whatever names it is given."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hicache_obs.cli import main
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.records import Define, DefineSpace, Ranks
from hicache_obs.testing.fleet_ranks import MADE_NS, Fault, ServerRank

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&$$\\alpha$$\u202e"
NODE = "<img src=x onerror=alert(1)>&$$y$$"
Browse = Callable[..., dict[str, Any]]
FAULTS = {1: {Fault.RACE: 40}, 2: {Fault.EVICTS_MORE: 55}, 3: {Fault.SKIPS_COLLECTIVE: 50}}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report of a node with a hostile name, a second node, hostile names in all journals, and one that is damaged."""
    folder = tmp_path_factory.mktemp("hostile")
    for tp in range(4):
        rank = ServerRank(Ranks(tp=tp), 64, FAULTS.get(tp, {}), skew_ns=1000 * tp)
        place = folder / (NODE if tp < 2 else "quiet") / rank.folder
        writer = JournalWriter(place, rank=tp, wall_ns=MADE_NS + rank.skew_ns)
        writer.write(
            [
                msgspec.structs.replace(record, text=record.text + HOSTILE)
                if isinstance(record, Define) and record.space is not DefineSpace.STREAM
                else record
                for records in rank.records()
                for record in records
            ]
        )
        writer.close()
    (folder / "quiet" / "rank7-000001.arrows").write_bytes(b"nothing of the kind")
    html = folder / "fleet.html"
    assert main(["fleet", *(str(folder / name) for name in (NODE, "quiet")), "--workers", "0", "-o", str(html)]) == 1
    return html


def test_everything_is_said_in_text(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    words = re.sub(r"<[^>]*>", " ", re.sub(r"<(script|style).*?</\1>", " ", text, flags=re.DOTALL))

    assert text.startswith("<!doctype html><!-- hicache-obs report -->")
    for said in (
        "VIOLATED: 1 rank with findings and 2 groups of ranks whose decisions differ; 4 ranks of 5 read",
        "not a journal",
        "frees device page 32",
        "waw_forward_restore",
        "1 pair in 1 rank",
        "wall clock ahead by 0.999 to 1.001 us",
        "What the fences cost, by node",
        "agreement is not correctness",
    ):
        assert said in words
    assert "<img" not in text
    assert "alert(1)</script>" not in text


def test_nothing_is_loaded_and_nothing_complains(browse: Browse, page: Path) -> None:
    found = browse(page, steps=[{"click": ".bars[data-ready]"}, {"scheme": "dark"}])

    assert found["complaints"] == []
    assert found["requests"] == [page.as_uri()]
    assert found["scripts"] == 4  # the chart library, ours, and the data
    assert found["width"] <= 1280
    for name in ("<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>"):
        assert name in found["text"]


def test_a_narrow_page_fits(browse: Browse, page: Path) -> None:
    found = browse(page, width=380, steps=[{"click": ".bars[data-ready]"}])

    assert (found["complaints"], found["width"]) == ([], 380)


def test_the_same_results_are_the_same_bytes_and_only_a_report_is_replaced(
    page: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    inputs, other = [str(page.parent / name) for name in (NODE, "quiet")], tmp_path / "again.html"
    again = ["fleet", *inputs, "--workers", "0", "-o", str(other)]

    assert main(again) == 1
    assert other.read_bytes() == page.read_bytes()
    other.write_text("mine")
    assert main(again) == 2
    assert other.read_text() == "mine"
    assert "exists and is no report; only a report is replaced" in capsys.readouterr().err
