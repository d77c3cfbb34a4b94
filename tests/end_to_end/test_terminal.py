"""What people see: every flag in the help, a table that fits 80 columns, lines broken between words."""

from __future__ import annotations

import re

import pytest

from hicache_obs.cli import doctor, main
from hicache_obs.cli.demo import ROWS
from hicache_obs.cli.layout import FINDING_INDENT, broken, fit
from hicache_obs.testing.protections import PROTECTIONS

FLAGS = {
    "--fence": "[none|stream|page|all]",
    "--device": "[auto|cuda|threads|virtual]",
    "--schedule": "[eager|lazy|random|adversarial]",
    "--runner": "[transformer|pattern]",
    "--workload": "FILE.jsonl",
    "--requests": "N",
    "--device-pages": "N",
    "--host-pages": "N",
    "--write-fence": "[none|stream|page]",
    "--write-policy": "[write_through|write_through_selective|write_back]",
    "--host-eviction": "[lru|lfu|priority]",
    "--retraction": "[recompute|backup]",
    "--barrier": "[private|coarse|read_done]",
    "--chunk-tokens": "N",
    "--storage": "DIR|URL",
    "--prefetch": "[best_effort|wait|timeout]",
    "--tp": "N",
    "--pp": "N",
    "--rank-timeout": "SECONDS",
    "--off": "NAME",
    "--kv": "[mha|mla|fp8|swa|hybrid]",
    "--host-layout": "[layer-first|page-first|page-first-direct]",
    "--io": "[kernel|direct]",
    "--graphs": "",
    "--compact-every": "N",
    "--seed": "N",
    "--serve": "[PORT]",
    "--journal": "DIR",
    "--json": "FILE|-",
    "--accepted": "FILE",
    "--events": "FILE|-",
    "--otlp": "URL",
    "-h, --help": "",
}
TEXT = (
    "A story that is told in one line.\n\n  earlier  forward round 7 writes them on stream 'forward'\n  fix      wait"
)


def test_help_has_every_flag_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--help"]) == 0
    out = capsys.readouterr().out

    flags = dict(re.findall(r"^  (-.*?--?help|--[a-z-]+) ?(\S*)", out, re.MULTILINE))
    assert flags == FLAGS
    assert max(len(line) for line in out.splitlines()) <= 80


def test_help_has_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0

    assert re.findall(r"^  (demo|check|doctor) ", capsys.readouterr().out, re.MULTILINE) == ["demo", "check", "doctor"]


@pytest.mark.slow
def test_table_of_three_policies_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["demo", "--device", "virtual", "--requests", "60", "--device-pages", "32"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]

    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert [row[0] for row in cells] == list(ROWS)
    assert all(all(row) for row in cells)
    assert max(len(line) for line in lines) <= 80


def test_long_lines_are_broken_between_words() -> None:
    assert broken(TEXT, 40, indent=FINDING_INDENT) == (
        "A story that is told in one line.\n"
        "\n"
        "  earlier  forward round 7 writes them\n"
        "           on stream 'forward'\n"
        "  fix      wait"
    )
    assert broken(TEXT, 80, indent=FINDING_INDENT) == TEXT


def test_files_and_pipes_get_whole_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "20")

    assert fit(TEXT, indent=FINDING_INDENT) == TEXT


def test_the_names_of_protections_are_not_broken(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--help"]) == 0
    out = capsys.readouterr().out

    assert set(PROTECTIONS) <= set(re.split(r"[\s,]+", out))
    assert max(len(line) for line in out.splitlines()) <= 80


def test_doctor_says_which_extras_are_there(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = ["numpy>=2", 'bokeh>=3; extra == "report"', "jinja2; extra == 'report'", 'perfetto; extra == "perfetto"']
    monkeypatch.setattr(doctor, "requires", lambda name: [*needs, "ruff; python_version > '3' and extra == 'dev'"])
    monkeypatch.setattr(doctor, "_installed", lambda package: "" if package == "jinja2" else "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out

    assert "\n  extras: perfetto\n" in out
    assert "\n  without the extra report: jinja2 not installed; pip install 'hicache-obs[report]'\n" in out
    assert "ruff" not in out


def test_doctor_names_every_setting(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_OBS_POLL_MS", "20")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out

    assert "HICACHE_OBS_POLL_MS = 20 ms (from the environment; an integer from 10 to 60000)" in out
    assert "HICACHE_OBS_RING_SLOTS = 65536 records (default; a power of two from 64 to 16777216)" in out
    for title in ("Versions", "Settings", "Devices", "NVTX ranges", "Blind spots"):
        assert f"\n{title}\n" in f"\n{out}"
