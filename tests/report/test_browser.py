"""The report in Chromium, opened from its file: zoomed, clicked, by keyboard, light and dark, narrow and printed."""

from __future__ import annotations

import json
import os
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hicache_obs.cli import main
from hicache_obs.records import AnyRecord, Define

HOSTILE = "</script><script>alert(1)</script>\"'&$$\\alpha$$\u202e"
Browse = Callable[..., dict[str, Any]]


def made(path: Path, name: str = "report.html") -> Path:
    """A report of ``path``, beside it."""
    html = path.parent / name
    main(["report", str(path), "-o", str(html)])
    return html


def charts(html: Path) -> dict[str, Any]:
    """The data of the only section."""
    data: dict[str, Any] = json.loads(html.read_text(encoding="utf-8").split('class="data">')[1].split("</script>")[0])
    return data


def quiet(found: dict[str, Any], html: Path) -> None:
    """Nothing was complained about, and nothing but the file itself was asked for."""
    assert found["complaints"] == []
    assert found["requests"] == [html.as_uri()]


@pytest.fixture(scope="module")
def racy(engine: Any) -> Path:
    """A report of 20,000 operations with 25 races; no test changes it."""
    _, path = engine(2500, races=100)
    return made(path)


def test_zoomed_out_operations_are_summed_and_zoomed_in_they_are_exact(browse: Browse, racy: Path) -> None:
    found = browse(
        racy, steps=[{"key": "0"}, *[{"key": "+"}] * 5, {"key": "-"}, {"key": "ArrowRight"}, {"key": "Home"}]
    )
    states = found["states"]

    quiet(found, racy)
    assert (states[0]["mode"], states[0]["inView"]) == ("summed", "20000")
    assert 500 < int(states[0]["drawn"]) < 4000
    assert states[0]["view"].startswith("20,000 of 20,000 operations in view, too many to draw")
    assert (states[5]["mode"], states[5]["drawn"]) == ("exact", states[5]["inView"])
    assert 0 < int(states[5]["inView"]) <= 4000
    spans = [float(state["to"]) - float(state["from"]) for state in states]
    assert spans[5] == pytest.approx(spans[0] / 32)
    assert spans[6] == pytest.approx(2 * spans[5])
    assert float(states[7]["from"]) == pytest.approx(float(states[6]["from"]) + spans[6] / 4)
    assert spans[8] == pytest.approx(spans[0])
    assert {"#0072b2", "#e69f00", "#ffffff"} <= set(found["colours"])  # kernels and copies are painted


def test_a_click_shows_the_operation_under_it(browse: Browse, racy: Path) -> None:
    assert charts(racy)["lanes"] == ["forward", "load-back"]
    close = [{"click": ".pairs button"}]
    first = browse(racy, steps=close)["states"][0]
    middle = (float(first["from"]) + float(first["to"])) / 2
    found = browse(racy, steps=[*close, {"tap": [middle, 0]}, {"tap": [middle, 1]}, {"key": "]"}, {"key": "Enter"}])
    states = found["states"]

    quiet(found, racy)
    assert states[0]["pair"] == "0"
    assert states[0]["readout"].startswith("pair 1 of ")
    assert "earlier: op " in states[0]["readout"]
    assert " on forward: kernel, forward work, round 100, layer " in states[1]["readout"]
    assert states[1]["chosen"] != ""
    assert states[1]["readout"].startswith(f"op {states[1]['chosen']} on forward")
    assert "writes device pages" in states[1]["readout"]
    assert int(states[3]["chosen"] or -1) >= 0
    took_ns = 1000 * float(re.search(r"takes ([\d.]+) µs", states[4]["readout"])[1])
    assert float(states[4]["to"]) - float(states[4]["from"]) == pytest.approx(3 * took_ns)


def test_a_finding_is_marked_with_what_it_spoiled(browse: Browse, racy: Path) -> None:
    found = browse(racy, steps=[{"key": "n"}, {"key": "n"}, {"key": "p"}, {"key": "p"}])
    states = found["states"]

    quiet(found, racy)
    pairs = [int(state["pair"]) for state in states]
    count = int(states[0]["readout"].split(" of ")[1].split(",")[0])
    assert pairs == [0, 1, 0, count - 1]
    assert all(int(state["marks"]) >= 2 for state in states)
    assert "takes" in states[0]["readout"]


def test_the_mouse_drags_and_the_wheel_zooms(browse: Browse, racy: Path) -> None:
    middle = charts(racy)["span"] / 2
    found = browse(racy, steps=[{"key": "+"}, {"drag": [middle, 0, 100]}, {"wheel": [middle, 0, -200]}])
    before, dragged, zoomed = [(float(state["from"]), float(state["to"])) for state in found["states"]]

    quiet(found, racy)
    assert dragged[0] < before[0]
    assert dragged[1] - dragged[0] == pytest.approx(before[1] - before[0])
    assert zoomed[1] - zoomed[0] < dragged[1] - dragged[0]


def test_everything_is_reached_by_keyboard_and_operations_are_listed(browse: Browse, racy: Path) -> None:
    steps = [
        {"key": "n"},
        {"click": ".listing summary"},
        {"key": "ArrowDown"},
        {"key": "]"},
        {"key": "]"},
        {"key": "["},
    ]
    found = browse(racy, steps=steps)
    states = found["states"]

    quiet(found, racy)
    assert 0 < len(states[1]["listed"]) <= 100
    assert any("load-back" in row for row in states[1]["listed"])
    assert states[2]["readout"] == "row load-back"
    chosen = [int(state["chosen"]) for state in states[3:]]
    assert chosen[0] < chosen[1]
    assert chosen[2] == chosen[0]


def test_fence_waits_and_costs(browse: Browse, engine: Any) -> None:
    _, path = engine(300)
    html = made(path)
    found = browse(html, steps=[{"key": "0"}])

    quiet(found, html)
    assert int(found["states"][0]["waits"]) > 0
    assert "SAFE: every conflicting pair is in proven order" in found["text"]
    assert "before a restore" in found["text"]


def test_names_are_copied_to_the_clipboard(browse: Browse, racy: Path) -> None:
    found = browse(racy, steps=[{"click": ".card [data-copy^='HC-']"}])

    quiet(found, racy)
    assert found["clipboard"].startswith("HC-")


@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_in_light_and_dark(browse: Browse, racy: Path, tmp_path: Path, width: int, scheme: str) -> None:
    picture = tmp_path / "page.png"
    found = browse(racy, width=width, scheme=scheme, steps=[{"key": "n"}, {"shot": str(picture)}])

    quiet(found, racy)
    assert found["width"] == width
    assert picture.stat().st_size > 20_000
    ground = {"light": "#ffffff", "dark": "#16181c"}
    assert {other: ground[other] in found["colours"] for other in ground} == {
        other: other == scheme for other in ground
    }


def test_a_change_of_scheme_is_followed_and_it_prints(browse: Browse, racy: Path, tmp_path: Path) -> None:
    steps = [{"key": "n"}, {"scheme": "dark"}, {"pdf": str(tmp_path / "page.pdf")}]
    found = browse(racy, steps=steps)

    quiet(found, racy)
    assert found["pdf"] > 20_000
    assert {"#56b4e9", "#16181c"} <= set(found["colours"])
    assert all(found["states"][2]["open"])


def test_hostile_names_are_only_shown(browse: Browse, engine: Any, tmp_path: Path) -> None:
    recorded, _ = engine(20, races=5)
    from hicache_obs.readers.journal_writer import JournalWriter

    records: list[AnyRecord] = [
        msgspec.structs.replace(record, text=record.text + HOSTILE) if isinstance(record, Define) else record
        for record in recorded.records()
    ]
    writer = JournalWriter(tmp_path / "hostile")
    writer.write(records)
    writer.close()
    html = made(tmp_path / "hostile", "hostile.html")
    found = browse(html, steps=[{"key": "n"}, {"click": ".listing summary"}])

    quiet(found, html)
    assert f"forward{HOSTILE}" in found["states"][0]["readout"]
    assert found["scripts"] == 4
    assert any(HOSTILE[:20] in row for row in found["states"][1]["listed"])


def test_several_recordings_are_drawn_as_they_come_into_view(browse: Browse, checkout: Path, tmp_path: Path) -> None:
    html = tmp_path / "cases.html"
    main(["report", *map(str, sorted((checkout / "tests" / "cases").glob("0*.json"))), "-o", str(html)])
    found = browse(html, steps=[{"key": "0"}])

    quiet(found, html)
    assert found["text"].startswith("LATENT RACES: ")


@pytest.mark.slow
def test_the_demo_without_fences(browse: Browse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also draws the picture of docs/report.md where ``make pictures`` says so: the demo is the same every time."""
    pictures = Path(os.environ.get("HICACHE_OBS_PICTURES", tmp_path)).resolve()
    monkeypatch.chdir(tmp_path)
    options = ["--device", "virtual", "--requests", "60", "--device-pages", "32", "--fence", "none"]
    assert main(["demo", *options, "--journal", "demo"]) == 0
    assert main(["report", "demo/none", "-o", "report.html"]) == 1
    html, picture = tmp_path / "report.html", pictures / "report.jpg"
    found = browse(html, height=1080, steps=[{"key": "n"}, {"view": str(picture)}])

    quiet(found, html)
    assert "VIOLATED: 16 operation pairs are in no proven order, 16 of them ran in the wrong one" in found["text"]
    assert int(found["states"][0]["spoiled"]) > 0
    assert picture.stat().st_size > 20_000


@pytest.mark.slow
def test_many_operations(browse: Browse, engine: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """The page stays quick: it draws some thousand bars, whatever is in view."""
    operations = int(os.environ.get("HICACHE_OBS_REPORT_OPERATIONS", "32000"))
    recorded, path = engine(operations // 8, races=1000)
    began = time.process_time()
    html = made(path)
    took_s = time.process_time() - began
    steps = [{"key": "0"}, *[{"key": "+"}] * 12, {"key": "n"}, {"key": "0"}]
    found = browse(html, steps=steps, wait=120_000)
    states = found["states"]

    quiet(found, html)
    assert recorded.operations == operations
    assert states[0]["inView"] == str(operations)
    assert all(int(state["drawn"]) <= 4000 for state in states)
    assert states[12]["mode"] == "exact"
    assert int(states[13]["marks"]) >= 2
    size = html.stat().st_size
    assert size < 16 << 20
    with capsys.disabled():
        slowest = max(state["took_ms"] for state in states)
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
        print(f"\n{operations:,} operations: made in {took_s:.0f} s and {peak_mb:,.0f} MB, {size / 1e6:.1f} MB long;")
        print(f"ready in {found['ready_ms'] / 1e3:.1f} s, slowest step {slowest} ms, heap {found['heap'] / 1e6:.0f} MB")
