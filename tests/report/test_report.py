"""``report``: what the page says for each kind of input, that nothing in it can run or load, and what is refused."""

from __future__ import annotations

import base64
import hashlib
import json
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hicache_obs.cli import main
from hicache_obs.exporters.html.packed import MAX_EXACT, Packed, unpack
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.records import AnyRecord, Define, Memcpy, OpId, Times, WaitStream
from hicache_obs.testing import History
from hicache_obs.testing.kineto_writer import FORMATS, write_kineto
from hicache_obs.testing.nsys_writer import GENERATIONS, nsys_tables, write_nsys
from hicache_obs.testing.profiled import Seen, profiled

CASES = Path(__file__).parent.parent / "cases"
RACE, FENCED = "F:w5 L:w5", "F:w5 L<<F L:w5"
HOSTILE = "</script><script>alert(1)</script>\"'&$$\\alpha$$\u2028\u202e{{7*7}}"
EPOCH_NS = 1_700_000_000_000_000_000
Report = Callable[..., tuple[int, Any]]


def journal(tmp_path: Path, records: list[AnyRecord], name: str = "journal") -> Path:
    writer = JournalWriter(tmp_path / name)
    writer.write(records)
    writer.close()
    return tmp_path / name


def timed(text: str) -> list[AnyRecord]:
    """A history on a made-up device, with times."""
    return profiled(History(text).records, seed=1, threads=1).timed(0)


def seen(text: str) -> Seen:
    return profiled(History(text).records, seed=1, threads=1, kinds=False, start_ns=EPOCH_NS)


def headline(page: Any) -> str:
    return next(word for word in page.words if ": " in word)


# -- the verdict ---------------------------------------------------------------------------------------------


NONE_WRONG = "LATENT RACES: 1 operation pair is in no proven order, none is known to have run in the wrong one"
ONE_WRONG = "VIOLATED: 1 operation pair is in no proven order, 1 of them ran in the wrong one"
AGAINST = "CONTRADICTION: 1 operation pair ran against the proven order"


@pytest.mark.parametrize(
    ("text", "code", "sentence"),
    [
        (RACE, 1, f"{NONE_WRONG}; *"),
        (FENCED, 0, "SAFE: every conflicting pair is in proven order; 1 page pairs checked"),
        ("F:w5 ~1 L:w5", 3, "NOT DECIDABLE: the order of 1 operation pair is unknown; 1 page pairs checked"),
        ("F:w5 L:w6", 3, "NOTHING CHECKED: no two operations touch the same pages; 0 page pairs checked"),
    ],
)
def test_one_sentence_first(tmp_path: Path, report: Report, text: str, code: int, sentence: str) -> None:
    found, page = report(journal(tmp_path, History(text).records))

    assert found == code
    assert page.words[0].startswith(sentence.removesuffix("*"))
    assert headline(page) == page.words[0]


@pytest.mark.parametrize(
    ("text", "starts_ns", "sentence"),
    [
        (RACE, {0: 1000, 1: 3000}, NONE_WRONG),
        (RACE, {0: 1000, 1: 1500}, ONE_WRONG),
        (FENCED, {0: 1000, 2: 3000}, "SAFE: every conflicting pair is in proven order"),
        (FENCED, {0: 1000, 2: 1500}, AGAINST),
        (f"{FENCED} C:r5", {0: 1000, 2: 1500, 3: 9000}, f"{AGAINST}, and 2 operation pairs are in no proven"),
        (f"{RACE} C:r5", {0: 1000, 1: 1500, 2: 1500}, "VIOLATED: 3 operation pairs are in no proven order, 3 of them"),
    ],
)
def test_the_first_word_is_the_worst_that_was_seen(
    tmp_path: Path, report: Report, text: str, starts_ns: dict[int, int], sentence: str
) -> None:
    """What ran in the wrong order, what ran against a proven one, and what went right by luck are told apart."""
    records = History(text).records
    times = [Times(OpId(op), records[-1].thread, 0, start, start + 1000) for op, start in starts_ns.items()]
    code, page = report(journal(tmp_path, [*records, *times]))

    assert code == (not sentence.startswith("SAFE"))
    assert page.words[0].startswith(sentence)


def test_a_race_has_a_card_and_its_fenced_twin_has_none(tmp_path: Path, report: Report) -> None:
    _, racy = report(journal(tmp_path, History(RACE).records, "racy"))
    _, safe = report(journal(tmp_path, History(FENCED).records, "safe"))

    assert "nothing makes 'L' wait for 'F' up to op 0 before op 1" in racy.words
    assert "before op 1 is issued: L.wait_stream(F), or wait for an event recorded after op 0" in racy.words
    assert f"hicache-obs replay {tmp_path / 'racy'} --between 0 1" in racy.words
    assert "op 0 → op 1" in racy.words
    assert [len(page.data[0]["pairs"]) for page in (racy, safe)] == [1, 0]
    assert "None." in safe.words
    assert not any(word.startswith("HC-") for word in safe.words)


def test_the_replay_command_runs(tmp_path: Path, report: Report, capsys: pytest.CaptureFixture[str]) -> None:
    _, page = report(CASES / "01-loadback-over-inflight-forward.json")
    command = next(word for word in page.words if word.startswith("hicache-obs replay "))

    assert main(command.split()[1:]) == 0
    assert "op" in capsys.readouterr().out


@pytest.mark.parametrize("case", sorted(CASES.glob("*.json")), ids=lambda path: path.stem[:2])
def test_the_exit_code_and_the_fingerprints_are_those_of_check(
    case: Path, report: Report, capsys: pytest.CaptureFixture[str]
) -> None:
    code, page = report(case)
    capsys.readouterr()

    assert code == main(["check", str(case), "--json"])
    checked = json.loads(capsys.readouterr().out)
    found = {race["fingerprint"] for race in checked["races"] + checked["ownership"]}
    assert {word for word in page.words if word.startswith("HC-")} == found


@pytest.mark.parametrize("kind", ["nsys", "kineto"])
@pytest.mark.parametrize(("text", "code"), [("F:w1 e=F L<e L:w1 f=L F<f F:r1", 0), ("F:w1 L:w1", 3)])
def test_a_profile_without_journal(tmp_path: Path, report: Report, kind: str, text: str, code: int) -> None:
    path = tmp_path / ("export.sqlite" if kind == "nsys" else "trace.json")
    if kind == "nsys":
        write_nsys(path, nsys_tables([seen(text)], GENERATIONS["2026.2"]))
    else:
        write_kineto(path, seen(text), FORMATS["2025"])
    found, page = report(path)

    assert found == code == main(["analyze", str(path)])
    assert headline(page).startswith("SAFE: all 2 pairs" if code == 0 else "NOT DECIDABLE: 1 of 1 pairs")
    assert "sync source" in page.words
    assert len(page.data[0]["pairs"]) == (1 if code else 0)
    assert sum(count for name, count, *_ in page.data[0]["packed"]["columns"] if name == "ops.op") == text.count(":")


def test_a_profile_with_its_journal(tmp_path: Path, report: Report) -> None:
    run = seen("F:w1 L:w1")
    export = write_nsys(tmp_path / "export.sqlite", nsys_tables([run], GENERATIONS["2026.2"]))
    code, page = report(export, "--journal", journal(tmp_path, run.history))

    assert code == 1
    assert headline(page).startswith("VIOLATED: 1 operation pair is in no proven order")
    assert headline(page).endswith("times of 2 of 2 operations")
    columns = unpack(page.data[0]["packed"])
    took = sorted((int(op), int(length)) for op, length in zip(columns["ops.op"], columns["ops.length"], strict=True))
    assert took == [(int(op), end - start) for op, (start, end) in sorted(run.times.items())]


def test_several_recordings_have_the_worst_verdict_first_and_their_own_below(tmp_path: Path, report: Report) -> None:
    paths = [journal(tmp_path, History(text).records, name) for name, text in (("safe", FENCED), ("racy", RACE))]
    code, page = report(*paths)

    assert code == 1
    assert headline(page) == "LATENT RACES: 1 of 2 recordings; each has its own verdict below"
    assert [word for word in page.words if word in ("SAFE", "LATENT RACES")] == ["SAFE", "LATENT RACES"]  # in the list
    assert len(page.data) == 2


def test_accepted_findings_are_said_to_be(tmp_path: Path, report: Report) -> None:
    path = journal(tmp_path, History(RACE).records)
    _, page = report(path)
    name = next(word for word in page.words if word.startswith("HC-"))
    accepted = tmp_path / "accepted.toml"
    accepted.write_text(f'["{name}"]\nreason = "known <b>"\nexpires = 2999-01-01\n')

    code, page = report(path, "--accepted", accepted)

    assert code == 0
    assert headline(page).startswith("AS ACCEPTED: 1 operation pair is in no proven order, which is accepted for now")
    assert "until 2999-01-01: known <b>" in page.words


# -- timeline, pages and costs -------------------------------------------------------------------------------


def test_the_timeline_has_every_operation_at_its_time(engine: Any, report: Report) -> None:
    recorded, path = engine(30, races=10)
    _, page = report(path)
    [data] = page.data
    columns = unpack(data["packed"])
    records = list(recorded.records())
    waits = {record.op for record in records if isinstance(record, WaitStream)}
    times = {r.op: (r.start_ns, r.end_ns) for r in records if isinstance(r, Times) and r.op not in waits}
    zero = min(start for start, _ in times.values())

    drawn = {
        int(op): (int(start), int(start + length))
        for op, start, length in zip(columns["ops.op"], columns["ops.start"], columns["ops.length"], strict=True)
    }
    assert drawn == {int(op): (start - zero, end - zero) for op, (start, end) in times.items()}
    assert data["lanes"] == ["forward", "load-back"]
    earlier, later, card = data["pairs"][0]
    assert [data["lanes"][int(columns["ops.lane"][row])] for row in (earlier, later)] == ["forward", "load-back"]
    assert card == 0
    assert data["accesses"][int(columns["ops.access"][earlier])] == "writes device pages 160-175"


def test_fence_waits_and_their_avoidable_part(engine: Any, report: Report) -> None:
    """Every fence is needed here: the restore goes where the round writes. Unless it goes elsewhere."""
    recorded, path = engine(20)
    _, page = report(path)
    columns = unpack(page.data[0]["packed"])
    ends = {record.op: record.end_ns for record in recorded.records() if isinstance(record, Times)}
    waited = dict(zip(columns["waits.op"].tolist(), columns["waits.length"].tolist(), strict=True))
    assert waited == {r.op: ends[r.op] - r.host_ns for r in recorded.records() if isinstance(r, WaitStream)}
    assert len(waited) == recorded.rounds
    assert not columns["waits.avoidable"].any()
    assert "before a restore" in page.words

    moved = [
        msgspec.structs.replace(
            record,
            accesses=tuple(msgspec.structs.replace(a, ids=a.ids + (a.space == 0) * 2000) for a in record.accesses),
        )
        if isinstance(record, Memcpy)
        else record
        for record in recorded.records()
    ]
    _, page = report(journal(path.parent, moved, "moved"))
    columns = unpack(page.data[0]["packed"])
    assert (columns["waits.avoidable"] == columns["waits.length"]).all()
    assert int(columns["waits.avoidable"].sum()) > 0


def test_the_heat_map_counts_every_access(engine: Any, report: Report) -> None:
    recorded, path = engine(30, races=10)
    _, page = report(path)
    device, host = page.data[0]["maps"]

    assert (device["title"], host["title"]) == ("device pages of kv", "host pages")
    assert sum(device["cells"][2]) == recorded.operations * 16
    assert sum(host["cells"][2]) == recorded.rounds * 2 * 16
    assert device["raced"]
    assert not host["raced"]


def test_without_times_operations_are_drawn_in_issue_order(tmp_path: Path, report: Report) -> None:
    _, page = report(journal(tmp_path, History("F:w1 L:w2 F:w3").records))
    columns = unpack(page.data[0]["packed"])

    assert page.data[0]["basis"] == "issued"
    order = np.argsort(columns["ops.start"])
    assert columns["ops.op"][order].tolist() == [0, 1, 2]


def test_rows_that_are_not_drawn_are_counted(tmp_path: Path, report: Report) -> None:
    """Sixty streams: those of the finding are drawn, although they are the idlest."""
    busy = " ".join(f"S{number}:w{number} S{number}:w{number}" for number in range(100, 160))
    _, page = report(journal(tmp_path, History(f"{busy} F:w5 L:w5").records))
    [data] = page.data

    assert len(data["lanes"]) == 40
    assert {"F", "L"} <= set(data["lanes"])
    assert min(data["pairs"][0]) >= 0
    assert "22 more streams with 44 operations are not on the timeline, only judged" in page.words


@pytest.mark.parametrize(("shift", "drawn"), [(0, 3), (MAX_EXACT // 8, 3), (MAX_EXACT, 2)])
def test_what_a_browser_cannot_count_is_not_drawn(tmp_path: Path, report: Report, shift: int, drawn: int) -> None:
    """One operation of three long after the others: up to a month it is drawn."""
    records = [
        msgspec.structs.replace(record, start_ns=record.start_ns + shift, end_ns=record.end_ns + shift)
        if isinstance(record, Times) and record.op == 2
        else record
        for record in timed("F:w1 F:w2 F:w3")
    ]
    _, page = report(journal(tmp_path, records))
    columns = unpack(page.data[0]["packed"])

    assert len(columns["ops.op"]) == drawn
    said = "1 operations with a number or a time too large to draw are not on the timeline"
    assert (said in page.words) == (drawn == 2)


def test_planned_waits_come_from_the_plan(report: Report) -> None:
    """A whole-forward barrier that nothing needs: all of it is avoidable."""
    _, page = report(CASES / "13-whole-forward-barrier-stalls-scheduler.json")
    columns = unpack(page.data[0]["packed"])

    assert page.data[0]["basis"] == "planned"
    assert columns["waits.avoidable"].any()
    assert any("over_sync" in word for word in page.words)


@given(st.lists(st.integers(-MAX_EXACT // 2 + 1, MAX_EXACT // 2 - 1), max_size=50), st.booleans())
def test_columns_come_back_as_they_were(values: list[int], delta: bool) -> None:
    column = np.array(values, np.int64) if delta else np.abs(np.array(values, np.int64))
    packed = Packed()
    packed.add("a", column, delta=delta)
    packed.add("b", column[:1] * 0)

    found = unpack(packed.as_json())
    assert found["a"].tolist() == column.tolist()
    assert found["b"].tolist() == [0] * len(column[:1])


def test_a_number_that_a_browser_cannot_hold_is_refused() -> None:
    with pytest.raises(OverflowError, match="column a"):
        Packed().add("a", np.array([MAX_EXACT], np.int64))


# -- nothing runs, nothing loads, nothing leaks --------------------------------------------------------------


def test_the_policy_names_exactly_the_scripts_of_the_page(report: Report) -> None:
    _, page = report(CASES / "01-loadback-over-inflight-forward.json")
    policy = next(value for _, name, value in page.attributes if name == "content" and "default-src" in (value or ""))
    running = [text for attrs, text in page.scripts if attrs.get("type") is None]
    hashes = {f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'" for text in running}

    directives = dict(part.strip().split(" ", 1) for part in policy.split(";"))
    assert directives["default-src"] == "'none'"
    assert set(directives["script-src"].split()) == hashes
    assert len(hashes) == 3
    assert directives["img-src"] == "data:"
    assert not [value for _, name, value in page.attributes if name in ("src", "srcset", "action", "data", "poster")]
    links = [value for _, name, value in page.attributes if name == "href"]
    assert all(link.startswith(("https://github.com/", "#")) for link in links)
    assert not [name for _, name, _ in page.attributes if name.startswith("on")]


def test_hostile_names_stay_names(tmp_path: Path, report: Report) -> None:
    records = [
        msgspec.structs.replace(record, text=record.text + HOSTILE) if isinstance(record, Define) else record
        for record in timed("F:w5 L:w5 F<L F:r5")
    ]
    path = journal(tmp_path, records, "<img src=x onerror=alert(1)>")
    _, page = report(path)

    assert len(page.scripts) == 4
    assert "<script>alert(1)" not in page.text
    assert not any("<" in text for attrs, text in page.scripts if attrs)
    assert "<img" not in page.text
    assert any(HOSTILE in word for word in page.words)
    assert [HOSTILE in name for name in page.data[0]["lanes"]] == [True, True]


def test_environment_strings_of_an_export_stay_in_it(tmp_path: Path, report: Report) -> None:
    run = seen("F:w1 L:w1")
    path = write_nsys(tmp_path / "export.sqlite", nsys_tables([run], GENERATIONS["2026.2"]))
    secret = "AWS_SECRET_ACCESS_KEY=hunter2"
    with sqlite3.connect(path) as database:
        database.execute("INSERT INTO StringIds VALUES (999999, ?)", (secret,))
        database.execute("CREATE TABLE TARGET_INFO_SYSTEM_ENV (globalVid INTEGER, name TEXT, value TEXT)")
        database.execute("INSERT INTO TARGET_INFO_SYSTEM_ENV VALUES (1, 'DeviceEnvironment', ?)", (secret,))
    database.close()

    for journal_of_run in ([], ["--journal", journal(tmp_path, run.history)]):
        _, page = report(path, *journal_of_run)
        assert "hunter2" not in page.text
        assert page.data[0]["names"]  # the operations' own names are there


def test_the_same_input_gives_the_same_bytes(engine: Any, tmp_path: Path) -> None:
    _, path = engine(20, races=5)
    made = []
    for name in ("a.html", "b.html"):
        main(["report", str(path), "-o", str(tmp_path / name)])
        made.append((tmp_path / name).read_bytes())

    assert made[0] == made[1]


# -- where it is written -------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """The error line of a command line that must fail before it reads anything."""
    assert main(["report", *map(str, arguments)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.removeprefix("hicache-obs: ").rstrip("\n")


def test_the_input_is_never_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scenario = tmp_path / "scenario.json"
    scenario.write_bytes((CASES / "01-loadback-over-inflight-forward.json").read_bytes())
    before = scenario.read_bytes()
    folder = journal(tmp_path, History(RACE).records)
    segment = next(folder.iterdir())
    (tmp_path / "link.html").symlink_to(scenario)
    (tmp_path / "hard.html").hardlink_to(scenario)

    for output in (scenario, tmp_path / "link.html", tmp_path / "hard.html"):
        assert refused(capsys, scenario, "-o", output) == (
            f"--output {output}: is part of the input {scenario}; expected another place"
        )
    for output in (segment, folder / "new.html", folder):
        assert refused(capsys, folder, "-o", output).endswith(f"is part of the input {folder}; expected another place")
        assert "is part of the input" in refused(capsys, scenario, "--journal", folder, "-o", output)
    assert scenario.read_bytes() == before
    assert list(folder.iterdir()) == [segment]


def test_only_a_report_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = CASES / "01-loadback-over-inflight-forward.json"
    notes, empty = tmp_path / "notes.html", tmp_path / "empty.html"
    notes.write_text("<!doctype html>my notes")
    empty.touch()

    for path in (notes, empty):
        assert (
            refused(capsys, case, "-o", path) == f"--output {path}: exists and is no report; only a report is replaced"
        )
    assert notes.read_text() == "<!doctype html>my notes"
    target = tmp_path / "report.html"
    assert main(["report", str(case), "-o", str(target)]) == 1
    first = target.stat().st_ino
    assert main(["report", str(case), "-o", str(target)]) == 1
    assert target.stat().st_ino != first  # a new file in its place: a reader of the old one is not disturbed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty.html", "notes.html", "report.html"]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("missing/report.html", "there is no directory {0}/missing"),
        (".", "is a directory; expected a file in it"),
    ],
)
def test_a_place_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], output: str, message: str
) -> None:
    text = refused(capsys, CASES / "01-loadback-over-inflight-forward.json", "-o", tmp_path / output)

    assert text.endswith(message.format(tmp_path)), text
    assert text.startswith("--output ")


def test_bad_input_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    bad = tmp_path / "bad.json"
    bad.write_text("{")

    assert main(["report", str(bad), "-o", str(tmp_path / "report.html")]) == 2
    assert str(bad) in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["bad.json"]
    assert main(["report", str(bad), str(bad), "--journal", str(tmp_path), "-o", "x.html"]) == 2


@pytest.mark.parametrize("package", ["bokeh", "jinja2"])
def test_a_missing_package_is_named(tmp_path: Path, package: str) -> None:
    code = (
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.split('.')[0] == {package!r}: raise ModuleNotFoundError(name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
        "from hicache_obs.cli import main\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    arguments = ["report", CASES / "02-loadback-fenced-twin.json", "-o", tmp_path / "r.html"]
    command = [sys.executable, "-c", code, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)

    assert ended.returncode == 2
    assert "pip install 'hicache-obs[report]'" in ended.stderr
    assert not (tmp_path / "r.html").exists()


def test_neither_torch_nor_the_chart_library_is_imported(tmp_path: Path) -> None:
    code = (
        "import sys; from hicache_obs.cli import main\n"
        f"main(['report', {str(CASES / '02-loadback-fenced-twin.json')!r}, '-o', {str(tmp_path / 'r.html')!r}])\n"
        "assert not {'torch', 'bokeh'} & set(sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)

    assert ended.returncode == 0, ended.stderr
