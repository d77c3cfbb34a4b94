"""``convert``: every format of every input, what it refuses, and what becomes of outputs that are there already."""

from __future__ import annotations

import contextlib
import gc
import gzip
import inspect
import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.readers import open_trace
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.readers.open_profile import open_profile
from hicache_obs.readers.profile_records import profile_trace
from hicache_obs.records import OpId, ThreadId, Times
from hicache_obs.testing import History
from hicache_obs.testing.kineto_writer import FORMATS, write_kineto
from hicache_obs.testing.nsys_writer import GENERATIONS, nsys_tables, write_nsys
from hicache_obs.testing.profiled import Seen, profiled

CASES = Path(__file__).parent.parent / "cases"
RACY, FENCED = "F:w5 L:w5", "F:w5 L<<F L:w5"
SCRIPT = "<script>alert(1)</script>\x1b[31m"


def journal(folder: Path, records: Any, *, rank: int = 0) -> Path:
    """A journal of ``records``."""
    writer = JournalWriter(folder, rank=rank, engine="test 1", clock="CLOCK_MONOTONIC", wall_ns=7, host_ns=3)
    writer.write(list(records))
    writer.close()
    return folder


def recording(folder: Path, text: str, **options: Any) -> tuple[Path, Path, Seen]:
    """Profiler file and journal of one run of a history."""
    seen = profiled(History(text).records, **{"seed": 1, "threads": 1, **options})
    export = write_nsys(folder / "export.sqlite", nsys_tables([seen], GENERATIONS["2026.2"]))
    return export, journal(folder / "journal", seen.history), seen


def chrome(path: Path) -> list[dict[str, Any]]:
    """The events of a JSON trace."""
    data = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


def arrows(events: list[dict[str, Any]]) -> set[tuple[str, str]]:
    """Names of the slices that each arrow joins, first in time first."""
    slices = {(e["pid"], e["tid"], e["ts"]): e["name"] for e in events if e["ph"] == "X"}
    ends: dict[int, dict[str, str]] = defaultdict(dict)
    for event in events:
        if event["ph"] in "sf":
            ends[event["id"]][event["ph"]] = slices[event["pid"], event["tid"], event["ts"]]
    assert all(found.keys() == {"s", "f"} for found in ends.values())
    return {(found["s"], found["f"]) for found in ends.values()}


# -- timelines -----------------------------------------------------------------------------------------------


def test_a_race_is_a_finding_and_an_arrow_and_a_fence_is_an_arrow_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in (("racy", RACY), ("fenced", FENCED)):
        assert (
            main(
                ["convert", str(journal(tmp_path / name, History(text).records)), "-o", str(tmp_path / f"{name}.json")]
            )
            == 0
        )
    racy, fenced = chrome(tmp_path / "racy.json"), chrome(tmp_path / "fenced.json")

    (finding,) = [event for event in racy if event.get("cat") == "finding"]
    assert finding["args"]["fix"] == "before op 1 is issued: L.wait_stream(F), or wait for an event recorded after op 0"
    assert (finding["args"]["earlier_op"], finding["args"]["later_op"]) == (0, 1)
    pairs = {("F work", "L work"), ("F work", finding["name"]), ("L work", finding["name"])}
    assert arrows(racy) == pairs
    assert [event for event in fenced if event.get("cat") == "finding"] == []
    assert arrows(fenced) == {("F work", "L work")}
    out = capsys.readouterr().out
    assert f"{tmp_path / 'racy.json'}: 2 operations on 2 streams, 1 finding\n" in out
    assert f"{tmp_path / 'fenced.json'}: 2 operations on 2 streams, 1 wait\n" in out


@pytest.mark.parametrize(("start_ns", "kept"), [(300, True), (10, False)])
def test_a_findings_arrows_go_with_time(tmp_path: Path, start_ns: int, kept: bool) -> None:
    measured = [Times(OpId(0), ThreadId(0), 999, 100, 200), Times(OpId(1), ThreadId(0), 999, start_ns, start_ns + 9)]
    source, out = journal(tmp_path / "journal", [*History(RACY).records, *measured]), tmp_path / "out.json"
    assert main(["convert", str(source), "-o", str(out)]) == 0
    events = chrome(out)

    (finding,) = [event for event in events if event.get("cat") == "finding"]
    first, second = ("F work", "L work") if kept else ("L work", "F work")
    to_earlier = ("F work", finding["name"]) if kept else (finding["name"], "F work")
    expected = {(first, second), ("L work", finding["name"]), to_earlier}
    assert arrows(events) == expected
    assert finding["args"]["verdict"] == ("latent" if kept else "violation")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("F:w1 e=F L<e L:w2", {("F work", "L work")}),
        ("F:w1 e=F F:w3 L<e L:w2", {("F work", "L work")}),
        ("F:w1 L<e L:w2", set()),
        ("F:w1 e=F L:w2", set()),
        ("F:w1 e=F F<e F:w2", set()),
        ("F:w1 e=F h<e", {("F work", "synchronised with e")}),
        ("F:w1 h<F", {("F work", "synchronised with F")}),
        ("F:w1 G<F L<G L:w2", {("F work", "L work")}),
    ],
)
def test_arrows_follow_the_waits(tmp_path: Path, text: str, expected: set[tuple[str, str]]) -> None:
    out = tmp_path / "out.json"
    assert main(["convert", str(journal(tmp_path / "journal", History(text).records)), "-o", str(out)]) == 0

    assert arrows(chrome(out)) == expected


def test_a_profile_alone_shows_its_rows_and_what_is_in_no_known_order(tmp_path: Path) -> None:
    export, _, seen = recording(tmp_path, "F:w1 e=F L<e L:w1 F:r1 B:r2")
    out = tmp_path / "out.json"
    assert main(["convert", str(export), "-o", str(out)]) == 0
    events = chrome(out)

    assert len([event for event in events if event.get("cat") == "device"]) == len(seen.ops)
    assert ("forward", "host_to_device") in arrows(events)
    undecided = [event for event in events if event.get("cat") == "undecided"]
    assert undecided
    assert all("nobody knows" in event["args"]["cause"] for event in undecided)


def test_a_profile_with_its_journal_has_findings_at_the_profilers_times(tmp_path: Path) -> None:
    export, folder, seen = recording(tmp_path, RACY)
    out = tmp_path / "out.json"
    assert main(["convert", str(export), "--journal", str(folder), "-o", str(out)]) == 0
    events = chrome(out)

    (finding,) = [event for event in events if event.get("cat") == "finding"]
    device = [event for event in events if event.get("cat") == "device"]
    by_process: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in device:
        by_process[event["pid"]].append((event["ts"], event["dur"]))
    of_journal, of_profile = by_process.values()
    assert sorted(of_journal) == sorted(of_profile)  # the same operations, at the same moments
    assert len(of_journal) == len(seen.ops) == 2
    assert (finding["ts"], finding["dur"]) in of_journal


@pytest.mark.parametrize("style", sorted(FORMATS))
def test_torch_profiles_become_timelines_too(tmp_path: Path, style: str) -> None:
    seen = profiled(History("F:w1 e=F L<e L:w1").records, seed=1, threads=1)
    source = write_kineto(tmp_path / "trace.json.gz", seen, FORMATS[style])
    out = tmp_path / "out.json"
    assert main(["convert", str(source), "-o", str(out)]) == 0

    assert len([event for event in chrome(out) if event.get("cat") == "device"]) == 2


@pytest.mark.parametrize("case", sorted(CASES.glob("*.json")), ids=lambda path: path.stem[:2])
@pytest.mark.parametrize("suffix", ["pftrace", "json.gz", "parquet"])
def test_every_scenario_can_be_converted(tmp_path: Path, case: Path, suffix: str) -> None:
    out = tmp_path / f"out.{suffix}"

    assert main(["convert", str(case), "-o", str(out)]) == 0
    assert out.stat().st_size > 0


def test_without_a_clock_records_are_drawn_in_their_order(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    scenario = {"steps": [{"id": f"s{n}", "op": "kernel", "stream": "f", "writes": [n]} for n in (1, 2, 3)]}
    (tmp_path / "in.json").write_text(json.dumps(scenario))

    assert main(["convert", str(tmp_path / "in.json"), "-o", str(out)]) == 0
    drawn = [event for event in chrome(out) if event.get("cat") == "device"]
    assert [event["args"]["label"] for event in drawn] == ["s1", "s2", "s3"]
    assert sorted({event["ts"] for event in drawn}) == [event["ts"] for event in drawn]
    assert "nothing was measured" in capsys.readouterr().out


def test_equal_input_gives_equal_bytes(tmp_path: Path) -> None:
    folder = journal(tmp_path / "journal", History(FENCED).records)
    for suffix in ("pftrace", "json.gz", "json"):
        first, second = tmp_path / f"1.{suffix}", tmp_path / f"2.{suffix}"
        for out in (first, second):
            assert main(["convert", str(folder), "-o", str(out)]) == 0
        if suffix != "json.gz":  # whose header has the name of the file
            assert first.read_bytes() == second.read_bytes()
        else:
            assert gzip.decompress(first.read_bytes()) == gzip.decompress(second.read_bytes())


# -- records -------------------------------------------------------------------------------------------------


def test_parquet_and_journals_give_the_same_verdict_and_the_same_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = journal(tmp_path / "journal", History("h+5 F:w5,6r1@0 e=F L:w5@0-2 h?e h-5 ~3 B<<F B:r6 h<*").records)
    for out in ("a.parquet", "b.arrows"):
        assert main(["convert", str(source), "-o", str(tmp_path / out)]) == 0
    assert main(["convert", str(tmp_path / "a.parquet"), "-o", str(tmp_path / "c"), "--to", "journal"]) == 0
    assert main(["convert", str(source), "-o", str(tmp_path / "d"), "--to", "parquet"]) == 0
    capsys.readouterr()

    def verdict(path: Path) -> Any:
        code = main(["check", str(path), "--json"])
        return code, {**json.loads(capsys.readouterr().out), "file": ""}

    expected = verdict(source)
    assert expected[0] == 1
    for name in ("a.parquet", "b.arrows", "c", "d"):
        assert verdict(tmp_path / name) == expected
    assert [file.name for file in (tmp_path / "c").iterdir()] == ["rank0-000001.arrows"]
    assert [file.name for file in (tmp_path / "d").iterdir()] == ["rank0.parquet"]


def test_ranks_keep_their_numbers_and_equal_ones_get_new_ones(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    for rank in (2, 5):
        journal(ranks, History(RACY).records, rank=rank)
    other = journal(tmp_path / "other", History(FENCED).records)

    assert main(["convert", str(ranks), "-o", str(tmp_path / "p"), "--to", "parquet"]) == 0
    assert sorted(file.name for file in (tmp_path / "p").iterdir()) == ["rank2.parquet", "rank5.parquet"]
    assert len(open_trace(tmp_path / "p", rank=5)) == len(open_trace(ranks, rank=5))
    assert main(["convert", str(tmp_path / "p"), "-o", str(tmp_path / "r"), "--to", "journal"]) == 0
    assert sorted(file.name for file in (tmp_path / "r").iterdir()) == ["rank2-000001.arrows", "rank5-000001.arrows"]
    assert main(["convert", str(ranks), str(other), str(other), "-o", str(tmp_path / "q"), "--to", "journal"]) == 0
    names = sorted(file.name for file in (tmp_path / "q").iterdir())
    assert names == [f"rank{number}-000001.arrows" for number in range(4)]


def test_a_profile_alone_becomes_the_records_it_is_judged_by(tmp_path: Path) -> None:
    export, _, _ = recording(tmp_path, "F:w1 e=F L<e L:w1")
    assert main(["convert", str(export), "-o", str(tmp_path / "out.parquet")]) == 0
    profile = open_profile(export)
    assert profile is not None

    found = open_trace(tmp_path / "out.parquet")
    everything = profile_trace(profile, dict.fromkeys(range(len(profile.ops)), ((), (0, 1))))
    assert [type(record) for record in found] == [type(record) for record in everything]


# -- outputs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "out.txt"], "says no format; expected a suffix of .pftrace, .perfetto-trace, .json, .json.gz"),
        (["-o", "out.json", "--to", "perfetto"], "--to perfetto: but the suffix of -o {out.json} says chrome"),
        (["-o", "absent/out.json"], "cannot be written; expected a place in a directory that exists"),
        (["-o", "journal", "--to", "parquet"], "is, holds or is part of the input {journal}; inputs are never over"),
        (["-o", "journal/rank0-000001.arrows", "--force"], "inputs are never overwritten"),
        (["-o", "linked/rank0-000001.arrows", "--force"], "inputs are never overwritten"),
        (["-o", "journal/rank0-000002.arrows"], "inputs are never overwritten"),
        (["-o", "journal", "--to", "parquet", "--force"], "inputs are never overwritten"),
        (["-o", "linked", "--to", "journal", "--force"], "inputs are never overwritten"),
        (["-o", ".", "--to", "journal", "--force"], "inputs are never overwritten"),
        (["-o", "there.json"], "exists already; name another, or give --force to replace it"),
        (["-o", "folder", "--to", "journal", "--force"], "a folder that holds precious; --force replaces folders of"),
        (["-o", "pipe.json", "--force"], "is no regular file"),
        (["-o", "out.nsys-rep"], "expected FILE.nsys-rep and --journal DIR"),
        (["-o", "out.json", "--journal", "journal"], "belongs to a profile, but {journal} is none"),
    ],
)
def test_outputs_that_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    source = journal(tmp_path / "journal", History(RACY).records)
    (tmp_path / "linked").symlink_to(source)
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "precious").write_text("mine")
    os.mkfifo(tmp_path / "pipe.json")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    formats = ("perfetto", "parquet", "journal")
    words = [
        word if word.startswith("-") or (word in formats and arguments[place - 1] == "--to") else str(tmp_path / word)
        for place, word in enumerate(arguments)
    ]

    assert main(["convert", str(source), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    for name in ("out.json", "journal"):
        message = message.replace(f"{{{name}}}", str(tmp_path / name))
    assert message in line
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def test_force_replaces_files_and_folders_of_records(tmp_path: Path) -> None:
    source = journal(tmp_path / "journal", History(RACY).records)
    out = tmp_path / "out.json"
    out.write_text("old")
    old = journal(tmp_path / "old", History(FENCED).records, rank=7)

    assert main(["convert", str(source), "-o", str(out), "--force"]) == 0
    assert main(["convert", str(source), "-o", str(old), "--to", "parquet", "--force"]) == 0
    assert chrome(out)
    assert [file.name for file in old.iterdir()] == ["rank0.parquet"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal", "old", "out.json"]


def test_a_failure_leaves_what_was_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    source = journal(tmp_path / "journal", History(RACY).records)
    out = tmp_path / "out.json"
    out.write_text("old")

    def full(self: Any, event: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("hicache_obs.exporters.chrome.ChromeWriter._put", full)
    assert main(["convert", str(source), "-o", str(out), "--force"]) == 2
    assert capsys.readouterr().err == f"hicache-obs: -o {out}: No space left on device; what was there is unchanged\n"
    assert out.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["journal", "out.json"]


def test_a_damaged_input_is_one_line_and_no_output(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = journal(tmp_path / "journal", History(RACY).records)
    assert main(["convert", str(source), "-o", str(tmp_path / "in.parquet")]) == 0
    data = (tmp_path / "in.parquet").read_bytes()
    (tmp_path / "cut.parquet").write_bytes(data[: len(data) // 2])
    capsys.readouterr()

    assert main(["convert", str(tmp_path / "cut.parquet"), "-o", str(tmp_path / "out.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "cut.parquet: not a Parquet file" in line
    assert not (tmp_path / "out.json").exists()


@pytest.mark.filterwarnings("error::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("suffix", ["arrows", "parquet", "pftrace"])
def test_what_was_opened_for_a_damaged_input_is_closed(tmp_path: Path, suffix: str) -> None:
    """The input ends in the middle of its second batch, when the output has been begun."""
    writer = JournalWriter(tmp_path / "journal")
    for _ in range(2):
        writer.write(History(RACY).records)
    writer.close()
    [segment] = (tmp_path / "journal").iterdir()
    data = segment.read_bytes()
    place = data.rindex(b"kernel")
    segment.write_bytes(data[:place] + b"kernal" + data[place + 6 :])

    assert main(["convert", str(tmp_path / "journal"), "-o", str(tmp_path / f"out.{suffix}")]) == 2
    gc.collect()
    assert not [file for file in tmp_path.iterdir() if "partial" in file.name]


def test_without_the_package_perfetto_says_how_to_get_it(tmp_path: Path) -> None:
    source = journal(tmp_path / "journal", History(RACY).records)
    block = "import sys; sys.modules['perfetto'] = None; from hicache_obs.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", block, "convert", str(source), "-o"]
    ended = subprocess.run(
        [*command, tmp_path / "out.pftrace"], capture_output=True, text=True, timeout=60, check=False
    )

    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr == "hicache-obs: this needs the package perfetto, which is not installed: pip install perfetto\n"
    )
    assert (
        subprocess.run([*command, tmp_path / "out.json"], capture_output=True, timeout=60, check=False).returncode == 0
    )


# -- hostile names -------------------------------------------------------------------------------------------


def named(folder: Path) -> Path:
    """A journal whose every name is hostile."""
    scenario = {
        "steps": [
            {"id": SCRIPT, "op": "kernel", "stream": f'f"{SCRIPT}', "writes": [1]},
            {"id": "2", "op": "memcpy", "kind": "h2d", "stream": "\u2028}]\n,", "device_pages": [1], "host_pages": [1]},
        ]
    }
    folder.mkdir()
    (folder / "in.json").write_text(json.dumps(scenario))
    return folder / "in.json"


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    source = named(tmp_path / SCRIPT.replace("/", "_"))
    json_out, pb_out = tmp_path / "out.json", tmp_path / "out.pftrace"
    assert main(["convert", str(source), "-o", str(json_out)]) == 0
    assert main(["convert", str(source), "-o", str(pb_out)]) == 0

    data = json_out.read_bytes()
    assert b"<" not in data
    assert b"\x1b" not in data
    names = {event["args"]["name"] for event in json.loads(data)["traceEvents"] if event["name"] == "thread_name"}
    assert 'streams / f"<script>alert(1)</script>?[31m' in names
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2

    trace = perfetto_trace_pb2.Trace.FromString(pb_out.read_bytes())
    assert any("<script>" in packet.track_descriptor.name for packet in trace.packet)
    assert b"\x1b" not in pb_out.read_bytes()


@pytest.mark.parametrize("suffix", ["json", "pftrace", "parquet", "arrows"])
def test_the_environment_in_an_export_reaches_no_output(tmp_path: Path, suffix: str) -> None:
    secret = "AWS_SECRET_ACCESS_KEY=hunter2"
    seen = profiled(History(RACY).records, seed=1, threads=1)
    tables = nsys_tables([seen], GENERATIONS["2026.2"])
    columns, rows = tables["StringIds"]
    tables["StringIds"] = columns, [*rows, (999_999, secret)]
    tables["TARGET_INFO_SYSTEM_ENV"] = (
        ("globalVid", "devStateName", "name", "nameEnum", "value"),
        [(0, "env", "DeviceEnvironment", 1, secret)],
    )
    export = write_nsys(tmp_path / "export.sqlite", tables)
    assert secret.encode() in export.read_bytes()
    out = tmp_path / f"out.{suffix}"

    assert main(["convert", str(export), "-o", str(out)]) == 0
    assert b"hunter2" not in out.read_bytes()


# -- Nsight Systems' own view --------------------------------------------------------------------------------


class _Stream:
    """Notes what is written, and refuses what ``nvtx.writer`` has no parameter for."""

    def __init__(self, rows: list[Any]) -> None:
        self._rows = rows

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def write_startend(
        self, start: int, end: int, *, message: Any = None, color: Any = None, category: Any = None
    ) -> None:
        self._rows.append((start, end, message))

    def write_mark(self, timestamp: int, *, message: Any = None, color: Any = None, category: Any = None) -> None:
        self._rows.append((timestamp, timestamp, message))


@pytest.fixture
def nsys_writer(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Stands in for the vendor's module, with the calls its guide documents; says what was written."""
    written: dict[str, Any] = {"streams": {}}

    class Session(_Stream):
        def __init__(self, name: str, *, report_merge: str, time_base: str) -> None:
            written.update(name=name, report=report_merge, time_base=time_base)

        def get_domain(self, name: str | None = None) -> str:
            written["domain"] = name
            return str(name)

        def create_stream(self, name: str, *, domain: Any = None, scope: Any = None) -> _Stream:
            Path(f"{written['name']}.nsys-rep").write_bytes(Path(written["report"]).read_bytes())
            return _Stream(written["streams"].setdefault(name, []))

    module = type(sys)("nsys_writer")
    module.Session, module.TimeBase = Session, type("TimeBase", (), {"RELATIVE": "relative"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "nsys_writer", module)
    return written


@pytest.fixture
def report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[Path, Path]]:
    """``report(history)``: a ``.nsys-rep`` that an export is known of, and the journal of its run."""

    def make(text: str) -> tuple[Path, Path]:
        export, folder, _ = recording(tmp_path, text)
        path = tmp_path / "in.nsys-rep"
        path.write_bytes(b"private")
        monkeypatch.setattr("hicache_obs.readers.open_profile.exported", lambda _: contextlib.nullcontext(export))
        return path, folder

    return make


def test_findings_become_ranges_in_a_copy_of_the_report(
    tmp_path: Path, nsys_writer: dict[str, Any], report: Callable[[str], tuple[Path, Path]]
) -> None:
    path, folder = report(RACY)
    out = tmp_path / "out.nsys-rep"
    assert main(["convert", str(path), "--journal", str(folder), "-o", str(out)]) == 0

    profile = open_profile(tmp_path / "export.sqlite")
    assert profile is not None
    ((title, rows),) = nsys_writer["streams"].items()
    assert title.split()[1:] in (["VIOLATION", "waw_forward_restore"], ["LATENT", "waw_forward_restore"])
    assert [(start, end) for start, end, _ in rows] == [(profile.ops.start_ns[1], profile.ops.end_ns[1])]
    assert "L waits for F up to op 0, before op 1" in rows[0][2]
    assert (nsys_writer["report"], nsys_writer["time_base"]) == (str(path), "relative")
    assert (out.read_bytes(), path.read_bytes()) == (b"private", b"private")


def test_where_no_writer_is_installed_it_names_the_other_way(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    report: Callable[[str], tuple[Path, Path]],
) -> None:
    path, folder = report(RACY)
    monkeypatch.setattr("hicache_obs.exporters.nsys_findings._roots", list)

    assert main(["convert", str(path), "--journal", str(folder), "-o", str(tmp_path / "out.nsys-rep")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("write the findings for Perfetto instead: -o out.pftrace")
    assert not (tmp_path / "out.nsys-rep").exists()


def test_the_calls_are_those_of_the_installed_nvtx_writer() -> None:
    writer = pytest.importorskip("nvtx.writer", reason="tool: this nvtx has no writer")

    assert {"start", "end", "message", "color"} <= set(parameters(writer.Stream.write_startend))
    assert {"timestamp", "message", "color"} <= set(parameters(writer.Stream.write_mark))
    assert {"name", "domain"} <= set(parameters(writer.Session.create_stream))


def parameters(method: Any) -> list[str]:
    """Names of a method's parameters, also where only its documentation has them."""
    try:
        return list(inspect.signature(method).parameters)
    except ValueError:
        return [line.split(":")[0].strip() for line in (method.__doc__ or "").splitlines() if " : " in line]


@pytest.mark.parametrize("suffix", ["pftrace", "json.gz", "parquet", "arrows"])
def test_torch_is_not_imported(tmp_path: Path, suffix: str) -> None:
    source, out = journal(tmp_path / "journal", History(RACY).records), tmp_path / f"out.{suffix}"
    code = (
        "import sys; from hicache_obs.cli import main; import hicache_obs.cli.record; "
        f"code = main(['convert', {str(source)!r}, '-o', {str(out)!r}]); sys.exit(code or 'torch' in sys.modules)"
    )

    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0
