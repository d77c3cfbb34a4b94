"""The fence advisor, as its users see it: cells that differ in one thing, JSON, advice, journals, exit codes."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import pytest

from hicache_obs.cli import main

CONVERSATIONS = 9
TURNS = 6


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    """Conversations that take turns and grow by a block each time: prefixes come back after they were evicted."""
    path = tmp_path / "workload.jsonl"
    with path.open("w") as file:
        for turn in range(TURNS):
            for conversation in range(CONVERSATIONS):
                blocks = 2 + turn
                line = {
                    "timestamp": 1000 * turn,
                    "input_length": blocks * 512 - 100,
                    "output_length": 3 + conversation % 4,
                    "hash_ids": [100 * conversation + block for block in range(blocks)],
                }
                file.write(json.dumps(line) + "\n")
    return path


SMALL = ("--device-tokens", "12288", "--page-size", "128", "--clients", "3")


def bench(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> dict[str, Any]:
    """The JSON on standard output, which holds nothing else, valid by the schema."""
    assert main(["bench-fences", "--json", "-", *arguments]) == code
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    schema = json.loads((files("hicache_obs.cli") / "bench_fences.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(document, schema)
    assert ("from storage" in " ".join(captured.err.split())) is document.get("storage", False)
    return dict(document)


def cell(document: dict[str, Any], **which: Any) -> dict[str, Any]:
    """The only cell with these values."""
    (found,) = [cell for cell in document["cells"] if which.items() <= cell.items()]
    return dict(found)


def test_only_the_unfenced_cells_race_and_all_serve_the_same_rounds(capsys, workload):
    document = bench(capsys, "--workload", str(workload), *SMALL)
    cells = document["cells"]
    assert len(cells) == 9
    assert document["requests"] == CONVERSATIONS * TURNS
    same = ("rounds", "restored_pages", "retractions", "output_tokens", "prompt_tokens", "device_hit_tokens")
    assert len({tuple(cell[name] for name in same) for cell in cells}) == 1
    assert cells[0]["restored_pages"] > 0
    assert cells[0]["host_hit_tokens"] == cells[0]["restored_pages"] * 128
    for barrier in ("private", "read_done"):
        none = cell(document, barrier=barrier, fence="none")
        assert none["outcome"] == "findings"
        assert none["verdicts"]["violation"] + none["verdicts"]["latent"] > 0
        assert none["fences"]["restore"]["count"] == none["fences"]["backup"]["count"] == 0
    for each in cells:
        if each["fence"] != "none":
            assert each["outcome"] == "clean"
            assert not any(each["verdicts"].values())
            assert each["pairs_checked"] > 0
            assert each["first_token"]["count"] == document["requests"]


def test_the_page_fence_waits_for_no_more_than_is_needed(capsys, workload):
    document = bench(capsys, "--workload", str(workload), *SMALL, "--barrier", "private")
    stream, page = (cell(document, fence=fence)["fences"] for fence in ("stream", "page"))
    assert stream["backup"]["avoidable_ms"] > 0
    assert page["restore"]["needed_ms"] > 0
    assert page["restore"]["avoidable_ms"] == page["backup"]["avoidable_ms"] == 0
    for fences in (stream, page):
        for waits in fences.values():
            assert waits["waited_ms"] == pytest.approx(waits["needed_ms"] + waits["avoidable_ms"])
    (advice,) = document["advice"]
    assert advice["best"] == {"barrier": "private", "fence": "page"}
    assert advice["against"] == {"barrier": "private", "fence": "stream"}
    saved = (
        cell(document, fence="stream")["first_token"]["p99_ms"] - cell(document, fence="page")["first_token"]["p99_ms"]
    )
    assert advice["first_token_p99_saved_ms"] == pytest.approx(saved)
    assert f"saves {saved:,.2f} ms at p99 of the time to the first token" in advice["text"]
    assert {entry["op"]: entry["removed_share"] for entry in advice["avoidable"]}["backup"] == 1


def test_a_slower_bus_makes_load_backs_and_first_tokens_later(capsys, workload):
    common = ("--workload", str(workload), *SMALL, "--barrier", "private", "--fence", "page")
    (fast,) = bench(capsys, *common)["cells"]
    (slow,) = bench(capsys, *common, "--copy-gb-s", "5")["cells"]
    assert slow["restore"]["p50_ms"] > 5 * fast["restore"]["p50_ms"]
    assert slow["first_token"]["mean_ms"] > fast["first_token"]["mean_ms"]
    assert slow["rounds"] == fast["rounds"]


def test_longer_rounds_take_longer(capsys, workload):
    common = ("--workload", str(workload), *SMALL, "--barrier", "private", "--fence", "stream")
    (short,) = bench(capsys, *common)["cells"]
    (long,) = bench(capsys, *common, "--round-ms", "60")["cells"]
    # Every round costs at least its least time, and no two of them overlap.
    assert long["virtual_s"] > long["rounds"] * 0.06 > short["virtual_s"] / 2
    assert long["virtual_s"] > short["virtual_s"]


def test_the_axes_make_the_grid_and_values_count_once(capsys, workload):
    axes = ["--page-size", "64", "--page-size", "256", "--page-size", "64", "--host-ratio", "1", "--host-ratio", "6"]
    axes += ["--write-policy", "write_back", "--write-policy", "write_through", "--barrier", "private"]
    document = bench(
        capsys, "--workload", str(workload), "--device-tokens", "12288", "--clients", "3", *axes, "--fence", "page"
    )
    names = ("host_ratio", "page_size", "write_policy")
    assert [tuple(cell[name] for name in names) for cell in document["cells"]] == [
        (ratio, size, policy) for ratio in (1, 6) for size in (64, 256) for policy in ("write_back", "write_through")
    ]
    small, large = (cell(document, host_ratio=n, page_size=64, write_policy="write_through") for n in (1, 6))
    assert small["host_hit_tokens"] < large["host_hit_tokens"]


def test_storage_gives_back_what_host_memory_has_lost(capsys, workload):
    common = ("--workload", str(workload), *SMALL, "--host-ratio", "1", "--barrier", "private")
    without = bench(capsys, *common)
    document = bench(capsys, *common, "--storage")
    assert (without["storage"], document["storage"]) == (False, True)
    assert {cell["storage_hit_tokens"] for cell in without["cells"]} == {0}
    same = ("rounds", "restored_pages", "prompt_tokens", "device_hit_tokens", "host_hit_tokens", "storage_hit_tokens")
    assert len({tuple(cell[name] for name in same) for cell in document["cells"]}) == 1
    found, lost = cell(document, fence="page"), cell(without, fence="page")
    assert 0 < found["storage_hit_tokens"] <= found["host_hit_tokens"]
    assert found["host_hit_tokens"] - found["storage_hit_tokens"] <= lost["host_hit_tokens"]
    assert found["outcome"] == cell(document, fence="stream")["outcome"] == "clean"


def test_the_same_input_gives_the_same_output(capsys, workload, tmp_path):
    texts = []
    for name in ("a.json", "b.json"):
        path = tmp_path / name
        arguments = ["--workload", str(workload), *SMALL, "--barrier", "coarse", "--json", str(path)]
        assert main(["bench-fences", *arguments]) == 0
        texts.append(path.read_text())
    assert texts[0] == texts[1]
    assert json.loads(texts[0])["cells"]


def test_the_table_says_what_was_assumed_and_the_chart_has_a_bar_per_cell(capsys, workload, tmp_path):
    plot = tmp_path / "waits.svg"
    arguments = ["--workload", str(workload), *SMALL, "--barrier", "read_done", "--plot", str(plot)]
    assert main(["bench-fences", *arguments]) == 0
    out, err = capsys.readouterr()
    for part in (
        "54 requests; 3 clients",
        "131,072 bytes of KV per token",
        "read_done",
        "Barrier read_done with fence",
    ):
        assert part in " ".join(out.split())
    assert "rounds/s" in err
    bars = [bar for bar in ElementTree.parse(plot).getroot().iter() if bar.get("height") == "14"]
    assert len(bars) == 2 * 3


def test_too_few_requests_are_nothing_checked(capsys, workload):
    document = bench(capsys, "--workload", str(workload), *SMALL, "--requests", "2", "--fence", "page", code=3)
    assert {cell["outcome"] for cell in document["cells"]} == {"nothing-checked"}
    assert document["advice"] == []
    assert main(["bench-fences", "--workload", str(workload), *SMALL, "--requests", "2", "--barrier", "private"]) == 3
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("nothing was checked") == 1
    assert "In every cell no page was restored" in text
    assert "No fenced cell" not in text


def test_a_race_behind_a_fence_is_exit_code_1(capsys, workload, monkeypatch):
    from hicache_obs.controller.fence_policy import PageFence

    monkeypatch.setattr(PageFence, "fence", lambda *arguments: None)
    document = bench(capsys, "--workload", str(workload), *SMALL, "--barrier", "private", "--fence", "page", code=1)
    (racy,) = document["cells"]
    assert racy["outcome"] == "findings"
    assert document["advice"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--fence", "layer"], "'layer' is not one of 'none', 'stream', 'page'"),
        (["--barrier", "none"], "'none' is not one of 'private', 'coarse', 'read_done'"),
        (["--write-policy", "never"], "'never' is not one of"),
        (["--requests", "0"], "--requests"),
        (["--page-size", "0"], "--page-size"),
        (["--copy-gb-s", "0"], "--copy-gb-s"),
        (["--workload", "absent.jsonl"], "absent.jsonl"),
        (["--device-tokens", "1000", "--requests", "3"], "--device-tokens 1000: the longest request needs"),
        (["--json", "absent/out.json"], "--json absent/out.json: cannot be written"),
        (["--plot", "absent/out.svg"], "--plot absent/out.svg: cannot be written"),
        (["--plot", "waits.png"], "--plot waits.png: is drawn as SVG; expected a name that ends in .svg"),
        (["--journal", "absent"], "absent"),
        (["--journal", "absent", "--fence", "page"], "--fence: is for a run, and --journal runs nothing"),
    ],
)
def test_bad_input(capsys, arguments, said):
    assert main(["bench-fences", *arguments]) == 2
    out, err = capsys.readouterr()
    assert said in err
    assert not out


@pytest.fixture(scope="module")
def journals(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Journals of a run without fences, and of one with each kind."""
    folder = tmp_path_factory.mktemp("journals")
    arguments = ["--device", "virtual", "--schedule", "eager", "--requests", "30", "--device-pages", "24"]
    assert main(["demo", *arguments, "--journal", str(folder), "--json", str(folder / "demo.json")]) == 0
    return folder


def test_a_journal_is_not_overwritten(capsys, journals):
    (segment,) = (journals / "page").iterdir()
    before = segment.read_bytes()
    assert main(["bench-fences", "--journal", str(journals / "page"), "--json", str(segment)]) == 2
    assert "is the input, or part of it; inputs are never overwritten" in capsys.readouterr().err
    assert segment.read_bytes() == before


def test_a_journal_is_priced_as_it_was_recorded(capsys, journals):
    document = bench(capsys, "--journal", str(journals / "stream"))
    (stream,) = document["journals"]
    restore = stream["fences"]["restore"]
    assert restore["count"] > 0
    assert restore["waited_ms"] == pytest.approx(restore["needed_ms"] + restore["avoidable_ms"])
    assert "page-exact ones would have left" in stream["text"]


def test_findings_of_a_journal_are_exit_code_1_and_none_to_price_is_said(capsys, journals):
    assert main(["bench-fences", "--journal", str(journals / "none")]) == 1
    captured = capsys.readouterr()
    assert captured.err == ""  # no trace of progress bars where there is no terminal
    assert "write-backs " in captured.out
    out = " ".join(captured.out.split())
    assert "there is nothing to price" in out
    assert "operation pairs are in no proven order" in out


def test_every_folder_of_a_demo_is_priced(capsys, journals):
    document = bench(capsys, "--journal", str(journals), code=1)
    assert [Path(each["file"].split(",")[0]).name for each in document["journals"]] == ["none", "page", "stream"]
    assert [each["outcome"] for each in document["journals"]] == ["findings", "clean", "clean"]


def test_long_waits_are_in_seconds_and_on_one_line(capsys, workload, monkeypatch):
    """In a terminal of 80 columns, where the number of milliseconds would be broken in two."""
    monkeypatch.setenv("COLUMNS", "80")
    arguments = ["--workload", str(workload), *SMALL, "--barrier", "read_done", "--fence", "stream"]
    assert main(["bench-fences", *arguments, "--round-ms", "50000"]) == 0
    lines = capsys.readouterr().out.splitlines()

    (row,) = (number for number, line in enumerate(lines) if line.startswith("read_done"))
    assert re.search(r"\d,\d{3}s ", lines[row])
    assert not lines[row + 1].startswith("  ")
