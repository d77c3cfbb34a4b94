"""``analyze``: what it prints first, what it refuses, and that everything but a profile goes the way of ``check``."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.testing import History
from hicache_obs.testing.nsys_writer import GENERATIONS, nsys_tables, write_nsys
from hicache_obs.testing.profiled import Seen, profiled

CASES = Path(__file__).parent.parent / "cases"
ORDERED, RACY = "F:w1 e=F L<e L:w1 f=L F<f F:r1", "F:w1 L:w1"
KEYS = {"file", "outcome", "pairs_checked", "races", "stalls", "ordered", "notes", "ownership"}
PROFILE_KEYS = KEYS | {"producer", "schema", "granularity", "level", "preflight", "undecided"}


def recording(tmp_path: Path, text: str, **options: Any) -> tuple[Seen, Path]:
    """What a profiler saw of a history, and its export."""
    seen = profiled(History(text).records, **{"seed": 1, "threads": 1, **options})
    return seen, write_nsys(tmp_path / "export.sqlite", nsys_tables([seen], GENERATIONS["2026.2"]))


def journal(tmp_path: Path, seen: Seen) -> Path:
    """The journal of the same run."""
    writer = JournalWriter(tmp_path / "journal")
    writer.write(seen.history)
    writer.close()
    return tmp_path / "journal"


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (ORDERED, 0, "SAFE: all 2 pairs of a copy and the work around it are ordered, in 3 device operations"),
        (RACY, 3, "NOT DECIDABLE: 1 of 1 pairs of a copy and the work around it are in no order that the file shows"),
        ("F:w1 F:w2", 3, "NOTHING CHECKED: no copy between host and device beside other work in 2 device operations"),
    ],
)
def test_without_journal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, sentence: str
) -> None:
    _, path = recording(tmp_path, text)

    assert main(["analyze", str(path)]) == code
    first, about, *_ = capsys.readouterr().out.splitlines()
    assert first == f"{path}: {sentence}"
    assert about.startswith("  Nsight Systems 2026.2.1.210, schema 3.25.0: ")
    assert main(["analyze", str(path), "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == PROFILE_KEYS
    assert (report["granularity"], report["races"]) == ("copies", [])


def test_undecided_pairs_are_listed_with_their_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, path = recording(tmp_path, RACY)

    main(["analyze", str(path), "--json"])
    undecided = json.loads(capsys.readouterr().out)["undecided"]

    (pair,) = undecided["between"]
    assert undecided["pairs"] == 1
    assert undecided["causes"] == {pair["cause"]: 1}
    assert "nothing in the file orders them" in pair["cause"]
    assert [(side["operation"], side["name"]) for side in pair["between"]] == [
        ("#101", "forward"),
        ("#102", "host_to_device"),
    ]


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (
            ORDERED,
            0,
            "SAFE: every conflicting pair is in proven order; 2 page pairs checked, times of 3 of 3 operations",
        ),
        (RACY, 1, "VIOLATED: 1 operation pair is in no proven order, "),
        (f"{RACY} ~1", 1, "VIOLATED: 1 operation pair is in no proven order, "),
        ("F:w1 L:w2", 3, "NOTHING CHECKED: no two operations touch the same pages; 0 page pairs checked, "),
    ],
)
def test_with_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, code: int, sentence: str) -> None:
    seen, path = recording(tmp_path, text)
    folder = journal(tmp_path, seen)

    assert main(["analyze", str(path), "--journal", str(folder)]) == code
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith(f"{path} + {folder}: {sentence}")
    assert main(["analyze", str(path), "--journal", str(folder), "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report.keys() == PROFILE_KEYS | {"coverage"}
    assert (report["granularity"], report["level"]) == ("pages", "provable")


def accept(tmp_path: Path, names: set[str], expires: str) -> str:
    """An ``accepted.toml`` for these fingerprints."""
    path = tmp_path / "accepted.toml"
    path.write_text("".join(f'[{name}]\nreason = "known"\nexpires = {expires}\n' for name in names))
    return str(path)


TWO_RACES = "F:w1 L:w1 F:r2 L:w2"


@pytest.mark.parametrize(
    ("names", "expires", "code", "sentence"),
    [
        (1, "2999-01-01", 1, "VIOLATED: 1 operation pair is in no proven order, "),
        (2, "2999-01-01", 0, "AS ACCEPTED: 2 operation pairs are in no proven order, which is accepted for now; "),
        (2, "2020-01-01", 1, "VIOLATED: 2 operation pairs are in no proven order, "),
    ],
    ids=["one of two", "both", "expired"],
)
def test_accepted_findings_are_shown_and_count_no_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], names: int, expires: str, code: int, sentence: str
) -> None:
    seen, path = recording(tmp_path, TWO_RACES)
    both = [str(path), "--journal", str(journal(tmp_path, seen))]
    assert main(["analyze", *both, "--json"]) == 1
    races = json.loads(capsys.readouterr().out)["races"]
    assert {race["accepted"] for race in races} == {None}
    found = sorted({race["fingerprint"] for race in races})
    assert len(found) == 2
    file = accept(tmp_path, set(found[:names]), expires)
    holds = found[:names] if expires > "2026" else []

    assert main(["analyze", *both, "--accepted", file]) == code
    text, said = capsys.readouterr()
    assert text.startswith(f"{path} + {tmp_path / 'journal'}: {sentence}")
    assert text.count("accepted until 2999-01-01: known") == len(holds)
    assert (", 1 more that is accepted; " in text) == (len(holds) == 1)
    assert said.count("its acceptance expired on 2020-01-01; it counts again") == (0 if holds else 2)
    assert main(["analyze", *both, "--accepted", file, "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert report["outcome"] == ("findings" if code else "clean")
    assert report.keys() == PROFILE_KEYS | {"coverage"}
    known = {"reason": "known", "expires": "2999-01-01"}
    assert {race["fingerprint"]: race["accepted"] for race in report["races"]} == {
        name: known if name in holds else None for name in found
    }


def test_what_cannot_be_decided_is_not_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    seen, path = recording(tmp_path, RACY)
    folder = journal(tmp_path, seen)
    main(["analyze", str(path), "--journal", str(folder), "--json"])
    names = {race["fingerprint"] for race in json.loads(capsys.readouterr().out)["races"]}

    assert main(["analyze", str(path), "--accepted", accept(tmp_path, names, "2999-01-01")]) == 3


def test_two_processes_are_one_report_and_the_worst_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = profiled(History(ORDERED).records, seed=1, threads=1, process=1)
    bad = profiled(History(RACY).records, seed=1, threads=1, process=2)
    path = write_nsys(tmp_path / "export.sqlite", nsys_tables([good, bad], GENERATIONS["2024.5"]))

    assert main(["analyze", str(path), "--json"]) == 3
    report = json.loads(capsys.readouterr().out)
    assert {pair["process"] for pair in report["undecided"]["between"]} == {2}
    assert report["pairs_checked"] == 3


def test_what_is_no_profile_goes_the_way_of_check(capsys: pytest.CaptureFixture[str]) -> None:
    case = str(CASES / "01-loadback-over-inflight-forward.json")

    assert main(["check", case]) == main(["analyze", case]) == 1
    text = capsys.readouterr().out
    assert text[: len(text) // 2] == text[len(text) // 2 :]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["a.sqlite", "b.sqlite", "--journal", "c"], "expected one profile"),
        ([str(CASES / "02-loadback-fenced-twin.json"), "--journal", "c"], "belongs to a profile"),
        (["no/such.sqlite"], "no/such.sqlite: No such file or directory"),
        ([], "FILE|DIR..."),
    ],
)
def test_refused(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["analyze", *arguments]) == 2

    assert text in capsys.readouterr().err


def test_torch_is_not_imported(tmp_path: Path) -> None:
    _, path = recording(tmp_path, RACY)
    code = (
        "import sys; from hicache_obs.cli import main; "
        f"main(['analyze', {str(path)!r}]); sys.exit('torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False).returncode == 0


@pytest.mark.parametrize("command", [["analyze"], ["report", "-o", "r.html"], ["convert", "-o", "r.pftrace"]])
def test_a_folder_that_cannot_be_listed_is_named(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever else is beside it. (Root may list everything, so the system's refusal is made here.)"""
    for name in ("closed", "open"):
        writer = JournalWriter(tmp_path / "journals" / name)
        writer.write(History(ORDERED).records)
        writer.close()
    iterdir = Path.iterdir

    def refusing(path: Path) -> Iterator[Path]:
        if path.name == "closed":
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", refusing)  # what it calls in os differs from Python to Python
    monkeypatch.chdir(tmp_path)

    assert main([*command, "journals"]) == 2
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hicache-obs: journals/closed: Permission denied\n")


@pytest.mark.parametrize(("dur_us", "code", "outcome"), [(900, 0, "clean"), (9, 3, "nothing-checked")])
def test_a_wait_that_was_judged_is_a_check(
    dur_us: int, code: int, outcome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No two operations touch a page: all that could be said is that nothing needs the wait, if it is long enough."""
    steps: list[dict[str, Any]] = [
        {"id": "s1", "op": "kernel", "stream": "f", "writes": [1], "dur_us": dur_us},
        {"id": "s2", "op": "host_sync", "scope": "device"},
        {"id": "s3", "op": "kernel", "stream": "f", "writes": [2]},
    ]
    (tmp_path / "sync.json").write_text(json.dumps({"steps": steps}))

    assert main(["check", str(tmp_path / "sync.json"), "--json"]) == code
    report = json.loads(capsys.readouterr().out)
    assert (report["outcome"], len(report["stalls"])) == (outcome, code == 0)
