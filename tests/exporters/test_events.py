"""Findings as lines: once per fingerprint, counted, rate-limited, bounded, and nothing in them that is not ours."""

from __future__ import annotations

import datetime
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.agent import Fanout
from hicache_obs.analyzer import Analyzer
from hicache_obs.costs import Ignore
from hicache_obs.errors import ConfigError
from hicache_obs.exporters import events
from hicache_obs.exporters.accepted import Acceptance, Accepted
from hicache_obs.exporters.events import EventLog, LineFile
from hicache_obs.findings import Finding
from hicache_obs.records import Define, DefineSpace, DropReason, Lost, OpId, Ranks, ThreadId
from hicache_obs.testing.history import History

WALL = 1_700_000_000_000_000_000
RACE, FENCED = "F:w5 L:w5", "F:w5 L<F L:w5"


class Log:
    """A log on a file, with a clock of its own."""

    def __init__(self, path: Path, **options: Any) -> None:
        self.path, self.now = path, 0.0
        self.file = LineFile(path, **{key: options.pop(key) for key in ("max_bytes",) if key in options})
        self.log = EventLog(self.file, clock=lambda: self.now, **options)

    def analyse(self, text: str, tp: int = 0, *, last: bool = True) -> None:
        """One ring that holds ``text``."""
        fanout = Fanout()
        analyzer = Analyzer(fanout)
        ring = self.log.ring(Ranks(tp=tp), analyzer, to_wall_ns=WALL, replay="hicache-obs replay J")
        fanout.listen([ring])
        records = [Define(OpId(-1), ThreadId(0), 0, DefineSpace.ENGINE, 0, "engine 1"), *History(text).records]
        analyzer.feed(records)
        analyzer.finish()
        ring.on_batch(records, last=last)  # type: ignore[arg-type]

    @property
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()] if self.path.exists() else []


def test_a_race_is_a_line_with_everything_an_operator_needs(tmp_path: Path) -> None:
    log = Log(tmp_path / "events.jsonl")
    log.analyse(RACE, tp=3)
    (line,) = log.lines

    assert line["event"] == "finding"
    assert line["fingerprint"].startswith("HC-")
    assert (line["hazard"], line["verdict"], line["count"]) == ("waw_forward_restore", "latent", 1)
    assert (line["ranks"], line["engine"], line["accepted"]) == (["dp0 pp0 tp3"], "engine 1", None)
    assert line["first_seen"] == line["last_seen"] == "2023-11-14T22:13:20.000001Z"
    assert (line["earlier"]["op"], line["earlier"]["what"], line["earlier"]["issued_ns"]) == (0, "forward", WALL)
    assert (line["later"]["op"], line["later"]["stream"], line["later"]["start_ns"]) == (1, "L", None)
    assert line["missing_edge"] == {"waiter": "L", "before": 1, "on": "F", "after": 0}
    assert line["fix"].startswith("before op 1 is issued: L.wait_stream(F)")
    assert line["blast_radius"]["device_pages"] == {"count": 1, "first": [5]}
    assert line["replay"] == "hicache-obs replay J"


def test_the_same_history_with_a_fence_writes_nothing(tmp_path: Path) -> None:
    log = Log(tmp_path / "events.jsonl")
    log.analyse(FENCED)
    log.log.flush(everything=True)
    assert log.lines == []


def test_one_line_per_fingerprint_and_interval_then_a_summary(tmp_path: Path) -> None:
    log = Log(tmp_path / "events.jsonl", interval_s=60)
    many = " ".join(f"F:w{page} L:w{page}" for page in range(50))
    log.analyse(many, last=False)
    log.now = 59
    log.log.flush()
    written = len(log.lines)
    log.now = 60
    log.log.flush()
    log.log.flush()
    log.now = 120
    log.log.flush()

    by_name: dict[str, list[dict[str, Any]]] = {}
    for line in log.lines:
        by_name.setdefault(line["fingerprint"], []).append(line)
    assert written == len(by_name)
    assert {tuple(line["event"] for line in lines) for lines in by_name.values()} <= {
        ("finding",),
        ("finding", "summary"),
    }
    assert sum(lines[-1]["count"] for lines in by_name.values()) == 50 > written


def test_ranks_share_a_line_and_what_is_over_is_summed_up(tmp_path: Path) -> None:
    log = Log(tmp_path / "events.jsonl")
    for tp in range(3):
        log.analyse(RACE, tp=tp)
    log.log.flush(everything=True)
    first, last = log.lines

    assert (first["event"], first["count"]) == ("finding", 1)
    assert (last["event"], last["count"]) == ("summary", 3)
    assert last["ranks"] == ["dp0 pp0 tp0", "dp0 pp0 tp1", "dp0 pp0 tp2"]
    assert last["blast_radius"] == first["blast_radius"]
    assert last["engine"] == "engine 1"


def test_a_violation_takes_the_place_of_a_doubt(tmp_path: Path) -> None:
    log = Log(tmp_path / "events.jsonl")
    ring = log.log.ring(Ranks(), Analyzer(_Collect([])), to_wall_ns=0, replay="")
    found: list[Finding] = []
    analyzer = Analyzer(_Collect(found))
    analyzer.feed([*History(RACE).records[:-1], Lost(OpId(-1), ThreadId(0), 5, 1, DropReason.RING_FULL)])
    analyzer.feed(History(RACE).records[-1:])
    analyzer.finish()
    analyzer = Analyzer(_Collect(found))
    analyzer.feed(History(RACE).records)
    analyzer.finish()
    assert [finding.verdict.value for finding in found] == ["unknown", "latent"]
    ring.on_batch((), last=True)  # there is no analyzer behind these
    for finding in found:
        ring.on_finding(finding)
    log.log.flush(everything=True)
    assert [line["verdict"] for line in log.lines] == ["unknown", "latent"]
    assert log.lines[-1]["verdicts"] == {"latent": 1, "unknown": 1}


class _Collect(Ignore):
    def __init__(self, found: list[Finding]) -> None:
        self._found = found

    def on_finding(self, finding: Finding) -> None:
        self._found.append(finding)


def test_accepted_findings_are_marked(tmp_path: Path) -> None:
    name = _fingerprint(tmp_path)
    day = datetime.date(2027, 1, 1)
    accepted = Accepted({name: Acceptance(name, "known", day)}, today=lambda: day)
    log = Log(tmp_path / "events.jsonl", accepted=accepted)
    log.analyse(RACE)
    assert log.lines[0]["accepted"] == {"reason": "known", "expires": "2027-01-01"}


def _fingerprint(folder: Path) -> str:
    log = Log(folder / "first.jsonl")
    log.analyse(RACE)
    return str(log.lines[0]["fingerprint"])


def test_no_environment_is_in_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer s3cr3t")
    log = Log(tmp_path / "events.jsonl")
    log.analyse(RACE)
    text = log.path.read_text()
    assert "s3cr3t" not in text
    assert not any(value in text for name, value in os.environ.items() if len(value) > 8)


def test_names_from_the_trace_cannot_break_a_line(tmp_path: Path) -> None:
    nasty = 'a"\n{"event": "finding"}\x00'
    history = History(RACE)
    names = [r for r in history.records if isinstance(r, Define) and r.space is DefineSpace.STREAM]
    bad = [Define(OpId(-1), ThreadId(0), 0, DefineSpace.STREAM, r.id, nasty) for r in names]
    log = Log(tmp_path / "events.jsonl")
    ring = log.log.ring(Ranks(), Analyzer(_Collect([])), to_wall_ns=2**62, replay="")  # a clock from nowhere, too
    ring.on_batch((), last=True)
    judge = Analyzer(ring)
    judge.feed([*names, *bad, *[r for r in history.records if r not in names]])
    judge.finish()
    (line,) = log.lines
    assert line["later"]["stream"] == nasty


def test_the_file_stays_within_its_size_and_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    file = LineFile(path, max_bytes=100)
    for number in range(50):
        file.write(f"{number:020d}")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["events.jsonl", "events.jsonl.1"]
    assert all(p.stat().st_size <= 100 for p in tmp_path.iterdir())
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.read_text().splitlines()[-1] == f"{49:020d}"


def test_a_disk_that_fails_costs_lines_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "d"
    folder.mkdir()
    file = LineFile(folder / "events.jsonl")
    (folder / "events.jsonl").unlink()
    folder.rmdir()
    for _ in range(3):
        file.write("x")
    assert file.lost == 3
    assert len(caplog.records) == 1
    folder.mkdir()
    file.write("y")
    assert (folder / "events.jsonl").read_text() == "y\n"


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--events .*No such file"):
        LineFile(tmp_path / "absent" / "events.jsonl")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"--events .*link"):
        LineFile(tmp_path / "link")


def test_a_disk_that_fills_up_in_the_middle_of_a_line_keeps_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "events"
    file = LineFile(path)
    file.write("first")
    room = [3, 100]

    class Nearly(io.FileIO):
        def write(self, data: Any) -> int:
            return super().write(bytes(data)[: room.pop(0)])

    monkeypatch.setattr(events, "_open", lambda path: Nearly(path, "ab"))
    file.write("second")
    assert (path.read_bytes(), file.lost) == (b"first\n", 1)
    file.write("third")
    assert (path.read_bytes(), file.lost) == (b"first\nthird\n", 1)
