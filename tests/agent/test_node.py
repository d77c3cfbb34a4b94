"""The node's agent: every rank is read, judged and finished, whatever happens to the others."""

from __future__ import annotations

import os
import random
import stat
import subprocess
import sys
import time
from contextlib import closing

import msgspec
import pytest

from hicache_obs import __version__
from hicache_obs.agent import rank as rank_module
from hicache_obs.agent.node import NodeAgent, NodeOptions
from hicache_obs.cli import main
from hicache_obs.errors import AgentRunning, ConfigError
from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.findings import Hazard
from hicache_obs.readers import open_trace
from hicache_obs.readers.ring import RingReader
from hicache_obs.recorder.agent_lock import AgentLock, running_agent
from hicache_obs.records import NO_OP, RING_VERSION, CaptureMode, DropReason, EventRecord, Ranks, RingWord

RACE = {"hazard": "waw_forward_restore"}


def put_word(path, word, value):
    with path.open("r+b") as file:
        file.seek(int(word) * 8)
        file.write(value.to_bytes(8, "little", signed=True))


def test_each_rank_is_judged_on_its_own(node, ring, round_of, fill, value):
    agent, metrics = node()
    racy, fenced = ring(0), ring(1)
    fill(racy, round_of(1, times=True), round_of(2, times=True))
    fill(fenced, round_of(1, fenced=True))
    assert agent.cycle(budget_s=9) == 10 + 4
    assert value(metrics, "violations_total", **RACE) == 2
    assert value(metrics, "violations_total", tp_rank="1", **RACE) == 0
    assert value(metrics, "checks_total", tp_rank="1", **RACE) == 1
    assert [value(metrics, "records_total", tp_rank=tp) for tp in "01"] == [10, 4]
    assert [value(metrics, "rings", tp_rank=tp) for tp in "01"] == [1, 1]
    assert [value(metrics, "blind", tp_rank=tp) for tp in "01"] == [0, 0]


def test_a_ring_that_comes_later_is_found(node, ring, round_of, fill, value):
    agent, metrics = node()
    assert agent.cycle(budget_s=9) == 0
    fill(ring(3), round_of(1))
    assert agent.cycle(budget_s=9) == 3
    assert value(metrics, "records_total", tp_rank="3") == 3


def test_gauges_follow_the_header(node, ring, value):
    agent, metrics = node()
    writer = ring(mode=CaptureMode.ENFORCE, clock=lambda: 1000)
    writer.state_observable([Hazard.WAW_FORWARD_RESTORE, Hazard.GRAPH])
    writer.beat(1000 + 5 * 10**9)
    agent.cycle(budget_s=9)
    assert value(metrics, "capture_mode") == 2
    assert value(metrics, "heartbeat_timestamp_seconds") == pytest.approx(time.time() + 5, abs=60)
    seen = {hazard.value for hazard in Hazard if value(metrics, "hazard_observable", hazard=hazard.value)}
    assert seen == {"waw_forward_restore", "graph"}


def test_a_process_that_says_nothing_about_hazards_shows_none(node, ring, value):
    agent, metrics = node()
    ring()
    agent.cycle(budget_s=9)
    assert not any(value(metrics, "hazard_observable", hazard=hazard.value) for hazard in Hazard)


# -- the end of a writer -------------------------------------------------------------------------------------


def test_the_ring_of_an_ended_writer_is_read_whole_judged_and_moved(node, ring, rings, round_of, fill, value):
    agent, metrics = node()
    writer = ring()
    fill(writer, round_of(1))
    agent.cycle(budget_s=9, look=True)
    assert value(metrics, "latent_races_total", **RACE) == 0  # its device times may still come
    fill(writer, round_of(2))
    writer.close()
    agent.cycle(budget_s=9, look=True)
    assert value(metrics, "latent_races_total", **RACE) == 2
    assert value(metrics, "rings") == 0
    assert [path.name for path in (rings / "finished").iterdir()] == [writer.path.name]
    assert stat.S_IMODE((rings / "finished").stat().st_mode) == 0o700
    assert not writer.path.exists()


def test_what_was_dropped_last_is_counted(node, ring, round_of, fill, value):
    agent, metrics = node()
    writer = ring()
    fill(writer, round_of(1))
    writer.drop(DropReason.RECORDER_ERROR, 7)
    writer.close()
    agent.drain()
    assert value(metrics, "dropped_records_total", reason="recorder_error") == 7


def test_a_finished_ring_that_is_kept_is_not_read_again(node, ring, round_of, fill, value):
    agent, metrics = node(keep=True)
    writer = ring()
    fill(writer, round_of(1))
    writer.close()
    agent.drain()
    assert writer.path.exists()
    agent.close()
    again = NodeAgent(NodeOptions(writer.path.parent, keep=True), Metrics(ranks=()))
    assert again.cycle(budget_s=9) == 0
    again.close()
    assert value(metrics, "latent_races_total", **RACE) == 1


def test_only_so_many_finished_rings_are_kept(node, ring, rings):
    agent, _ = node(finished_rings=2)
    names = []
    for tp in range(4):
        writer = ring(tp)
        names.append(writer.path.name)
        writer.close()
        agent.drain()
    assert sorted(path.name for path in (rings / "finished").iterdir()) == names[2:]


def test_a_finished_ring_never_replaces_another(node, ring, rings):
    agent, _ = node()
    for _ in range(2):
        writer = ring()
        name = writer.path.stem
        writer.close()
        agent.drain()
    assert sorted(path.name for path in (rings / "finished").iterdir()) == [f"{name}.ring", f"{name}~2.ring"]


WRITER = """
import sys
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.records import EventRecord
ring = create_ring("scheduler", directory=sys.argv[1], slots=64, arena_words=64)
ring.append(EventRecord(1, 0, 0, 1, 2))
print("ready", flush=True)
input()
"""


def test_a_killed_writer_is_noticed_before_it_is_waited_for(node, rings, value):
    agent, metrics = node()
    with subprocess.Popen([sys.executable, "-c", WRITER, str(rings)], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        agent.drain()
        assert value(metrics, "rings") == 1
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        agent.drain()
    assert value(metrics, "rings") == 0
    assert len(list((rings / "finished").iterdir())) == 1


def test_another_process_with_the_writers_id_is_not_the_writer(node, ring, value):
    agent, metrics = node()
    writer = ring()
    agent.drain()
    assert value(metrics, "rings") == 1
    with closing(RingReader(ring(1).path)) as reader:
        start = reader.info.process_start
    put_word(writer.path, RingWord.PROCESS_START, start + 1)
    agent.close()
    agent, metrics = node()
    agent.drain()
    assert value(metrics, "rings") == 0


@pytest.mark.parametrize(("silent_s", "rings_left"), [(30, 1), (90, 0)])
def test_a_writer_in_another_namespace_counts_as_ended_when_it_is_silent(node, ring, value, silent_s, rings_left):
    agent, metrics = node()
    writer = ring(clock=lambda: 10**12)
    put_word(writer.path, RingWord.PID_NAMESPACE, 1)
    put_word(writer.path, RingWord.PID, 2**22 + 1)
    writer.beat(10**12 - silent_s * 10**9)
    agent.drain()
    assert value(metrics, "rings") == rings_left


# -- one rank's trouble --------------------------------------------------------------------------------------


def test_a_ring_of_another_version_is_refused_and_seen(node, ring, round_of, fill, value, caplog):
    agent, metrics = node()
    newer, good = ring(0), ring(1)
    put_word(newer.path, RingWord.VERSION, RING_VERSION + 1)
    fill(good, round_of(1))
    for _ in range(3):
        agent.cycle(budget_s=9)
    assert [value(metrics, "blind", tp_rank=tp) for tp in "01"] == [1, 0]
    assert value(metrics, "ring_errors_total", reason="version") == 1
    assert value(metrics, "records_total", tp_rank="1") == 3
    assert [m for m in caplog.messages if "version" in m or "layout" in m] == [
        f"{newer.path}: ring layout {RING_VERSION + 1} is newer than {RING_VERSION}, the newest known here; upgrade; "
        "it is not read"
    ]


def test_a_refused_ring_is_tried_again(node, ring, round_of, fill, value, monkeypatch):
    agent, metrics = node()
    writer = ring()
    put_word(writer.path, RingWord.VERSION, RING_VERSION + 1)
    fill(writer, round_of(1))
    agent.cycle(budget_s=9)
    assert value(metrics, "blind") == 1
    put_word(writer.path, RingWord.VERSION, RING_VERSION)
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 60)
    assert agent.cycle(budget_s=9) == 3
    assert value(metrics, "blind") == 0


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"hicaring" + b"\xff" * 8000, b"x" * 8000])
def test_a_file_that_is_no_ring_makes_its_rank_blind_and_nobody_else(node, rings, ring, round_of, fill, value, content):
    agent, metrics = node()
    (rings / "scheduler-dp0-pp0-tp7.1.ring").write_bytes(content)
    (rings / "unnamed.ring").write_bytes(content)
    fill(ring(1), round_of(1))
    assert agent.cycle(budget_s=9) == 3
    assert value(metrics, "blind", tp_rank="7") == 1
    assert value(metrics, "ring_errors_total", tp_rank="7", reason="unreadable") == 1
    assert value(metrics, "blind", tp_rank="1") == 0


def test_a_ring_whose_header_is_being_written_is_waited_for(node, rings, value, caplog):
    agent, metrics = node()
    path = rings / "scheduler-dp0-pp0-tp7.1.ring"
    path.write_bytes(bytes(8000))
    agent.cycle(budget_s=9)
    assert caplog.messages == []
    os.utime(path, (1, 1))  # nobody has touched it for long
    agent.cycle(budget_s=9)
    assert value(metrics, "blind", tp_rank="7") == 1


@pytest.mark.parametrize("size", [0, 4096, 10_000])
def test_a_ring_cut_short_while_it_is_read_blinds_its_rank_only(node, ring, round_of, fill, value, caplog, size):
    """A mapped page behind the end of the file would end the agent with SIGBUS."""
    agent, metrics = node()
    short, good = ring(0), ring(1)
    fill(short, round_of(1))
    agent.cycle(budget_s=9)
    os.truncate(short.path, size)
    fill(good, round_of(1))
    for _ in range(3):
        agent.cycle(budget_s=9, look=True)
    assert [value(metrics, "blind", tp_rank=tp) for tp in "01"] == [1, 0]
    assert value(metrics, "ring_errors_total", reason="unreadable") == 1
    assert value(metrics, "records_total", tp_rank="1") == 3
    assert any(f"cut short: {size} bytes of" in m for m in caplog.messages)
    short.disown()  # its own writer must not touch the mapping either


def test_a_damaged_record_blinds_its_rank_only(node, ring, round_of, fill, value, caplog):
    agent, metrics = node()
    bad, good = ring(0), ring(1)
    fill(bad, round_of(1), round_of(2))
    with bad.path.open("r+b") as file:
        file.seek(4096 + 128 * 4)
        file.write(b"\xee")
    fill(good, round_of(1))
    for _ in range(3):
        agent.cycle(budget_s=9)
    assert [value(metrics, "blind", tp_rank=tp) for tp in "01"] == [1, 0]
    assert [value(metrics, "records_total", tp_rank=tp) for tp in "01"] == [4, 3]
    assert any("record 4 is damaged: kind 238" in m for m in caplog.messages)


def test_an_analyzer_that_fails_is_counted_and_its_records_are_kept(
    node, ring, tmp_path, round_of, fill, value, monkeypatch, caplog
):
    feed = rank_module.Analyzer.feed

    def fails_for_op_20(self, records):
        records = list(records)
        if any(record.op == 20 for record in records):
            raise ZeroDivisionError("of a test")
        return feed(self, records)

    monkeypatch.setattr(rank_module.Analyzer, "feed", fails_for_op_20)
    agent, metrics = node(journals=tmp_path / "j")
    bad, good = ring(0), ring(1)
    for n in (1, 2, 3):
        fill(bad, round_of(n))
        agent.cycle(budget_s=9)
    fill(good, round_of(1))
    agent.cycle(budget_s=9)
    assert [value(metrics, "blind", tp_rank=tp) for tp in "01"] == [1, 0]
    assert value(metrics, "ring_errors_total", reason="analysis") == 1
    assert any(
        "the analyzer failed (ZeroDivisionError: of a test); this rank is not judged" in m for m in caplog.messages
    )
    bad.close()
    agent.drain()
    (folder,) = (tmp_path / "j").glob("*tp0*")
    assert [int(record.op) for record in open_trace(folder) if record.op != NO_OP] == [10, 11, 20, 21, 30, 31]


def test_a_ring_that_another_reads_is_left_to_it(node, ring, value):
    agent, metrics = node()
    with closing(RingReader(ring(0).path)):
        ring(1)
        agent.cycle(budget_s=9)
        assert value(metrics, "rings", tp_rank="1") == 1
        assert Ranks(tp=0) not in metrics.known_ranks


# -- the directory -------------------------------------------------------------------------------------------


def test_a_second_agent_is_refused_until_the_first_has_ended(node, rings):
    agent, _ = node()
    agent.describe(url="http://x")
    own = {"pid": str(os.getpid()), "version": __version__, "layout": str(RING_VERSION)}
    assert running_agent(rings) == {**own, "url": "http://x"}
    with pytest.raises(AgentRunning, match=rf"another agent \(process {os.getpid()}\) reads the rings in"):
        NodeAgent(NodeOptions(rings), Metrics(ranks=()))
    agent.close()
    assert running_agent(rings) == {}
    NodeAgent(NodeOptions(rings), Metrics(ranks=())).close()


@pytest.mark.parametrize("words", ["", "{", "[]", '{"pid": 3}', '{"pid": "99999999"}'])
def test_a_lock_file_left_behind_is_no_lock(rings, words):
    (rings / "agent.lock").write_text(words)
    assert running_agent(rings) == {}
    lock = AgentLock(rings)
    assert lock.holds
    assert running_agent(rings)["pid"] == str(os.getpid())
    lock.close()


def test_a_lock_that_is_a_link_is_refused(rings, tmp_path):
    (rings / "agent.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"agent\.lock: Too many levels of symbolic links"):
        AgentLock(rings)
    assert not (tmp_path / "victim").exists()


def test_rings_go_on_when_their_directory_is_removed(node, ring, rings, round_of, fill, value, caplog):
    agent, metrics = node()
    old = ring(0)
    agent.cycle(budget_s=9)
    for path in rings.iterdir():
        path.unlink()
    rings.rmdir()
    fill(old, round_of(1))
    assert agent.cycle(budget_s=9) == 3
    assert any("was removed or emptied" in m for m in caplog.messages)
    fill(ring(1), round_of(1))
    assert agent.cycle(budget_s=9) == 3
    assert running_agent(rings)["pid"] == str(os.getpid())
    old.close()
    agent.drain()
    assert value(metrics, "latent_races_total", **RACE) == 1


def test_an_agent_whose_directory_was_taken_over_ends(node, rings):
    agent, _ = node()
    (rings / "agent.lock").unlink()
    other = AgentLock(rings)
    with pytest.raises(AgentRunning):
        agent.cycle(budget_s=9)
    other.close()


def test_a_directory_that_turned_bad_is_told_and_waited_for(node, rings, ring, round_of, fill, caplog):
    agent, _ = node()
    writer = ring()
    agent.cycle(budget_s=9)
    rings.rename(rings.with_name("away"))
    rings.symlink_to("away")
    (rings / "agent.lock").unlink()
    fill(writer, round_of(1))
    assert agent.cycle(budget_s=9) == 3
    assert any("is a symbolic link" in m for m in caplog.messages)


# -- keeping up ----------------------------------------------------------------------------------------------


def test_a_cycle_ends_in_time_and_the_ranks_take_turns(node, ring, value, monkeypatch):
    """Analysis that takes 1 ms a record: 100 ms are not enough for 600 records."""
    feed = rank_module.Analyzer.feed

    def slow(self, records):
        time.sleep(0.001 * len(records))
        return feed(self, records)

    monkeypatch.setattr(rank_module.Analyzer, "feed", slow)
    agent, metrics = node()
    for tp in range(3):
        writer = ring(tp, slots=512)
        for n in range(200):
            writer.append(EventRecord(n, 0, n, n, 1))
    start = time.monotonic()
    first = agent.cycle(budget_s=0.1)
    assert time.monotonic() - start < 2
    assert 0 < first < 600
    total = first
    while total < 600:
        total += agent.cycle(budget_s=0.1)
    assert [value(metrics, "records_total", tp_rank=tp) for tp in "012"] == [200] * 3
    assert [value(metrics, "unread_records", tp_rank=tp) for tp in "012"] == [0] * 3


def test_run_keeps_to_its_share_of_a_core(node, ring):
    agent, _ = node(cpu_share=0.25, period_s=0.01)
    writer = ring(slots=1 << 15)
    for n in range(1 << 15):
        writer.append(EventRecord(n, 0, n, n, 1))
    pauses = []
    start, began = time.process_time(), time.monotonic()

    def wait(seconds):
        pauses.append(seconds)
        return len(pauses) > 8

    agent.run(wait)
    spent = time.process_time() - start
    assert spent > 0
    assert sum(pauses) + time.monotonic() - began >= 3.6 * spent
    assert all(pause >= 0 for pause in pauses)


@pytest.mark.parametrize(("used_s", "pause_s"), [(0.1, 0.1), (0.01, 0.0)], ids=["alone", "others run"])
def test_a_turn_that_others_made_long_is_not_paused_for(node, monkeypatch, used_s, pause_s):
    """A turn of 0.1 s, of which the agent had the processor for ``used_s``, at half a core."""
    agent, _ = node(cpu_share=0.5, period_s=0.1)
    clock = {"used": 0.0, "now": 1000.0}

    def cycle(*, budget_s):
        clock["used"] += used_s
        clock["now"] += budget_s

    monkeypatch.setattr(agent, "cycle", cycle)
    monkeypatch.setattr(time, "process_time", lambda: clock["used"])
    monkeypatch.setattr(time, "monotonic", lambda: clock["now"])
    pauses = []

    def wait(seconds):
        pauses.append(seconds)
        return len(pauses) > 3

    agent.run(wait)
    assert pauses == pytest.approx([0.0] + [pause_s] * 3)


# -- untrusted input -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("adopted", [False, True], ids=["before", "while it is read"])
@pytest.mark.parametrize("word", [-1, 2**63 - 1, -(2**63), 1 << 40])
def test_no_word_of_a_header_ends_the_agent(node, ring, rings, tmp_path, round_of, fill, value, caplog, word, adopted):
    caplog.set_level("CRITICAL", "hicache_obs.agent")
    whole = ring(5)
    fill(whole, *(round_of(n, times=True) for n in range(12)))
    content = whole.path.read_bytes()
    whole.path.unlink()
    agent, metrics = node(journals=tmp_path / "j")
    for number in range(1, 80):
        damaged = rings / f"scheduler-dp0-pp0-tp5.{number}.ring"
        damaged.write_bytes(content)
        if adopted:
            agent.cycle(budget_s=9)
        put_word(damaged, number, word)
        agent.cycle(budget_s=9, look=True)
        assert main(["status", "--dir", str(rings)]) == (0 if damaged.exists() else 3)
        damaged.unlink(missing_ok=True)
    fill(ring(1), round_of(1))
    agent.cycle(budget_s=9, look=True)
    assert value(metrics, "records_total", tp_rank="1") == 3
    assert set(metrics.known_ranks) == {Ranks(tp=1), Ranks(tp=5)}


@pytest.mark.parametrize("seed", range(3))
def test_no_bytes_of_a_slot_end_the_agent(node, ring, rings, round_of, fill, value, caplog, seed):
    chance = random.Random(seed)
    caplog.set_level("CRITICAL", "hicache_obs.agent")
    whole = ring(5)
    fill(whole, *(round_of(n, times=True) for n in range(12)))
    content = whole.path.read_bytes()
    whole.path.unlink()
    agent, metrics = node()
    for number in range(100):
        damaged = bytearray(content)
        for _ in range(chance.choice((1, 3, 30))):
            place = 4096 + chance.randrange(128 * 60)
            damaged[place : place + 1] = chance.randbytes(1)
        path = rings / f"scheduler-dp0-pp0-tp5.{number + 1}.ring"
        path.write_bytes(damaged)
        agent.cycle(budget_s=9, look=True)
        path.unlink(missing_ok=True)
    fill(ring(1), round_of(1))
    agent.cycle(budget_s=9, look=True)
    assert value(metrics, "records_total", tp_rank="1") == 3


def test_a_transfer_without_times_is_pending_until_its_process_ends(node, ring, round_of, fill, value):
    """The pool's layers are not declared, so times end it. Submitted a moment ago, not at the clock's beginning."""
    agent, metrics = node()
    writer = ring()
    now_ns = time.monotonic_ns()
    fill(writer, [msgspec.structs.replace(record, host_ns=now_ns) for record in round_of(1)])
    agent.cycle(budget_s=10)
    during = {op: value(metrics, "pending_transfers", op=op) for op in ("restore", "backup")}
    age_s = value(metrics, "oldest_pending_seconds", op="restore")

    writer.close()
    agent.cycle(budget_s=10, look=True)

    assert during == {"restore": 1, "backup": 0}
    assert 0 < age_s < 60
    assert value(metrics, "pending_transfers", op="restore") == 0
    assert value(metrics, "oldest_pending_seconds", op="restore") == 0
