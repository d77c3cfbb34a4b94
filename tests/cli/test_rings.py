"""``hicache-obs status``, ``off`` and ``on``."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from contextlib import closing

import pytest

from hicache_obs import __version__
from hicache_obs.agent.node import NodeAgent, NodeOptions
from hicache_obs.cli import main
from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.records import RING_VERSION, CaptureMode, DropReason, EventRecord, Ranks


@pytest.fixture
def rings(tmp_path):
    path = tmp_path / "rings"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def writers(rings):
    """Ranks 0 and 1 of this process, rank 1 enforcing; and rank 2, closed."""
    made = [
        create_ring("scheduler", Ranks(tp=tp), directory=rings, slots=64, arena_words=64, mode=CaptureMode(1 + tp % 2))
        for tp in range(3)
    ]
    made[2].close()
    yield made
    for writer in made:
        writer.close()


def mark(n):
    return EventRecord(n, 0, n, 1, 2)


def test_off_stops_recording_and_on_goes_back_to_what_was(rings, writers, capsys):
    zero, one, closed = writers
    before = closed.path.read_bytes()
    assert zero.append(mark(1))
    assert main(["off", "--dir", str(rings)]) == 0
    assert not zero.append(mark(2))
    assert not one.append(mark(2))
    assert zero.dropped == {DropReason.SWITCHED_OFF: 1}
    assert main(["on", "--dir", str(rings)]) == 0
    assert zero.append(mark(3))
    assert (zero.mode, one.mode) == (CaptureMode.OBSERVE, CaptureMode.ENFORCE)
    assert closed.path.read_bytes() == before
    assert capsys.readouterr().out.count("scheduler-dp0-pp0-tp2") == 0


@pytest.mark.parametrize(
    ("choice", "modes"),
    [
        (["--rank", "1"], (CaptureMode.OBSERVE, CaptureMode.OFF)),
        (["--pid", str(os.getpid())], (CaptureMode.OFF, CaptureMode.OFF)),
        (["--pid", str(os.getpid()), "--rank", "0"], (CaptureMode.OFF, CaptureMode.ENFORCE)),
    ],
)
def test_off_acts_on_the_chosen_rings(rings, writers, choice, modes):
    assert main(["off", "--dir", str(rings), *choice]) == 0
    assert tuple(writer.mode for writer in writers[:2]) == modes


@pytest.mark.parametrize("choice", [["--rank", "9"], ["--pid", "1"], ["--rank", "2"]])
def test_nothing_to_switch_is_told(rings, writers, capsys, choice):
    assert main(["off", "--dir", str(rings), *choice]) == 3
    assert capsys.readouterr().out == f"no running process records into {rings}\n"
    assert writers[0].mode is CaptureMode.OBSERVE


def test_on_starts_a_process_that_was_started_switched_off(rings):
    with closing(create_ring("demo", directory=rings, slots=64, arena_words=64, mode=CaptureMode.OFF)) as writer:
        assert main(["on", "--dir", str(rings)]) == 0
        assert writer.mode is CaptureMode.OBSERVE


def test_status_shows_each_ring(rings, writers, capsys):
    writers[0].append(mark(1))
    writers[0].drop(DropReason.UNRESOLVED, 4)
    assert main(["status", "--dir", str(rings)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "agent: none runs; start one with 'hicache-obs agent'"
    assert lines[1] == f"rings in {rings}"
    cells = [re.split(r"  +", line) for line in lines[2:]]
    assert cells[0] == [
        "ring", "rank", "pid", "process", "mode", "written", "read", "dropped", "last beat", "journal",
    ]  # fmt: skip
    pid = str(os.getpid())
    assert [row[:8] for row in cells[1:]] == [
        [f"scheduler-dp0-pp0-tp0.{pid}.ring", "dp0 pp0 tp0", pid, "runs", "observe", "1", "0", "4"],
        [f"scheduler-dp0-pp0-tp1.{pid}.ring", "dp0 pp0 tp1", pid, "runs", "enforce", "0", "0", "0"],
        [f"scheduler-dp0-pp0-tp2.{pid}.ring", "dp0 pp0 tp2", pid, "ended", "observe", "0", "0", "0"],
    ]
    assert all(re.fullmatch(r"\d+\.\d s ago", row[8]) and row[9] == "none" for row in cells[1:])


def test_status_as_json_names_agent_and_journal(rings, writers, tmp_path, capsys):
    writers[0].append(mark(1))
    agent = NodeAgent(NodeOptions(rings, journals=tmp_path / "j", keep=True), Metrics(ranks=()))
    agent.describe(url="http://127.0.0.1:1/metrics", journal=str(tmp_path / "j"))
    agent.drain()
    assert main(["status", "--dir", str(rings), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    agent.close()
    assert found["agent"] == {
        "pid": str(os.getpid()),
        "version": __version__,
        "layout": str(RING_VERSION),
        "url": "http://127.0.0.1:1/metrics",
        "journal": str(tmp_path / "j"),
    }
    zero, _, closed = found["rings"]
    assert zero["journal"] in {str(folder) for folder in (tmp_path / "j").iterdir()}
    assert 0 <= zero.pop("beat_age_seconds") < 600
    del zero["journal"]
    assert zero == {
        "ring": str(writers[0].path),
        "role": "scheduler",
        "tp_rank": 0,
        "pp_rank": 0,
        "dp_rank": 0,
        "pid": os.getpid(),
        "running": True,
        "mode": "observe",
        "written": 1,
        "read": 1,
        "dropped": {},
        "finished": False,
    }
    assert (closed["running"], closed["finished"]) == (False, True)


def test_status_tells_what_it_cannot_read_and_shows_the_rest(rings, writers, capsys):
    (rings / "bad.ring").write_bytes(b"x" * 10)
    assert main(["status", "--dir", str(rings)]) == 0
    out = capsys.readouterr().out
    assert "bad.ring" in out
    assert "not a ring: 10 bytes" in out
    assert "scheduler-dp0-pp0-tp1" in out
    assert main(["status", "--dir", str(rings), "--json"]) == 0
    bad = json.loads(capsys.readouterr().out)["rings"][0]
    assert "not a ring" in bad["problem"]


def test_status_without_rings_checks_nothing(rings, capsys):
    assert main(["status", "--dir", str(rings)]) == 3
    assert capsys.readouterr().out.endswith(
        f"no ring in {rings}; a process makes its ring when it first uses its cache\n"
    )


def test_status_of_a_ring_that_is_not_there_checks_nothing(rings, writers, capsys):
    assert main(["status", "--dir", str(rings), "--rank", "77"]) == 3
    assert capsys.readouterr().out.endswith(f"no such ring in {rings}\n")


@pytest.mark.parametrize("command", ["status", "off", "on"])
def test_a_directory_that_does_not_exist_is_named(tmp_path, capsys, command):
    assert main([command, "--dir", str(tmp_path / "none")]) == 2
    assert capsys.readouterr().err == (
        f"hicache-obs: ring directory {tmp_path / 'none'}: No such file or directory; "
        "has an observed process run here?\n"
    )


@pytest.mark.parametrize("module", ["status", "off", "on", "agent"])
def test_no_command_of_the_node_needs_torch(module):
    code = f"import sys, hicache_obs.cli.{module}, hicache_obs.agent; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
