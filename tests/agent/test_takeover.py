"""An agent that takes over: nothing is judged or kept twice, and what cannot be known is unknown."""

from __future__ import annotations

import random
import signal
import time
import urllib.request
from contextlib import closing

import pytest

from hicache_obs.agent import journals as journals_module
from hicache_obs.agent import scrape_mark
from hicache_obs.agent.journals import RingJournal, journal_folder
from hicache_obs.agent.scrape_mark import ScrapeMark
from hicache_obs.readers import open_trace
from hicache_obs.readers.journal import newest_run
from hicache_obs.readers.ring import RingReader
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.records import (
    NO_OP,
    Define,
    DefineSpace,
    DropReason,
    EventRecord,
    Lost,
    Ranks,
)

RACE = {"hazard": "waw_forward_restore"}


def kept(folder):
    """Numbers of the operations in a journal, and what is missing."""
    return [
        f"lost {r.count}" if isinstance(r, Lost) else int(r.op)
        for r in open_trace(folder)
        if isinstance(r, Lost) or r.op != NO_OP
    ]


def only_folder(journals):
    (folder,) = journals.iterdir()
    return folder


def test_the_next_agent_goes_on_where_the_journal_ends(node, ring, tmp_path, round_of, times_of, fill, value):
    journals = tmp_path / "j"
    first, metrics = node(journals=journals)
    writer = ring()
    fill(writer, round_of(1, times=True), round_of(2))
    first.cycle(budget_s=9)
    assert value(metrics, "violations_total", **RACE) == 1
    first.close()
    fill(writer, round_of(3))
    second, metrics = node(journals=journals)
    fill(writer, times_of(2), times_of(3))
    second.cycle(budget_s=9)
    # Round 1 was reported before; the pair of round 2 was open, and its times came only now.
    assert value(metrics, "violations_total", **RACE) == 2
    assert value(metrics, "unknown_total", reason="records_lost") == 0
    assert value(metrics, "records_total") == 3 + 4
    writer.close()
    second.drain()
    assert value(metrics, "latent_races_total", **RACE) == 0
    second.close()
    assert kept(only_folder(journals)) == [10, 11, 10, 11, 20, 21, 30, 31, 20, 21, 30, 31]


@pytest.mark.parametrize(
    ("options", "scrape_after", "counted"),
    [
        ({"scraped": True}, 1, 1),  # round 2, of which no scrape knows
        ({"scraped": True}, 2, 0),
        ({"scraped": True}, None, 2),
        ({}, None, 0),  # nobody scrapes this one
    ],
)
def test_what_no_scrape_has_shown_is_counted_again(
    node, ring, tmp_path, round_of, fill, value, options, scrape_after, counted
):
    first, _ = node(journals=tmp_path / "j", **options)
    writer = ring()
    for number in (1, 2):
        fill(writer, round_of(number, times=True))
        first.cycle(budget_s=9)
        if number == scrape_after:
            first.scraped()
        first.cycle(budget_s=9)
    first.close()
    second, metrics = node(journals=tmp_path / "j", **options)
    second.cycle(budget_s=9)

    assert value(metrics, "violations_total", **RACE) == counted
    assert len(second.board.entries()) == (1 if counted else 0)
    assert value(metrics, "records_total") == 5 * counted
    assert value(metrics, "dropped_records_total", reason="missing") == 0
    second.scraped()
    second.cycle(budget_s=9)
    second.close()
    third, metrics = node(journals=tmp_path / "j", **options)
    third.cycle(budget_s=9)
    assert value(metrics, "violations_total", **RACE) == 0


def test_a_scrape_has_shown_what_was_judged_before_it_and_no_more(tmp_path):
    """It came at some moment of a cycle: what that cycle judged may not have been in it."""
    mark = ScrapeMark(tmp_path, begin=0)
    mark.turn(5, scraped=False)
    mark.turn(9, scraped=True)
    assert (tmp_path / "scraped").read_text() == "5"
    mark.turn(9, scraped=True)
    assert ScrapeMark(tmp_path, begin=12).first == 9
    assert ScrapeMark(tmp_path, begin=7).first == 7


def test_a_mark_goes_with_its_journal_and_so_does_what_a_killed_agent_left_of_it(tmp_path):
    ScrapeMark(tmp_path, begin=3).turn(5, scraped=True)
    (tmp_path / ".scraped.0.partial").touch()
    (tmp_path / "0001.arrows").touch()
    scrape_mark.remove(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["0001.arrows"]


def test_a_pair_across_the_mark_is_counted_once(node, ring, tmp_path, round_of, times_of, fill, value):
    """Its accesses were shown to be open; the times that decide it came after that scrape."""
    first, _ = node(journals=tmp_path / "j", scraped=True)
    writer = ring()
    fill(writer, round_of(1))
    first.cycle(budget_s=9)
    first.scraped()
    fill(writer, times_of(1))
    first.cycle(budget_s=9)
    first.close()
    second, metrics = node(journals=tmp_path / "j", scraped=True)
    second.cycle(budget_s=9)
    assert value(metrics, "violations_total", **RACE) == 1
    assert value(metrics, "checks_total", **RACE) == 0


@pytest.mark.parametrize("text", ["", "x", "-5", "99999"])
def test_a_mark_that_says_nothing_changes_nothing(node, ring, tmp_path, round_of, fill, value, text):
    first, _ = node(journals=tmp_path / "j", scraped=True)
    fill(ring(), round_of(1, times=True))
    first.cycle(budget_s=9)
    first.close()
    (only_folder(tmp_path / "j") / "scraped").write_text(text)
    second, metrics = node(journals=tmp_path / "j", scraped=True)
    second.cycle(budget_s=9)
    assert value(metrics, "violations_total", **RACE) == (1 if text == "-5" else 0)


def test_a_race_between_the_last_scrape_and_a_kill_is_counted(
    agent_process, ring, tmp_path, round_of, fill, value, eventually
):
    def scrape(url):
        with urllib.request.urlopen(url) as answer:
            return answer.read().decode()

    journals = tmp_path / "j"
    agent = agent_process("--journal", str(journals))
    url = agent.url()
    writer = ring()
    fill(writer, round_of(1, times=True))
    eventually(lambda: value(scrape(url), "violations_total", **RACE) == 1)
    scraped = only_folder(journals) / "scraped"

    def is_shown():  # a scrape shows for sure what had been judged a cycle before it
        scrape(url)
        return scraped.exists() and scraped.read_text() == "5"

    eventually(is_shown)
    # As long as it is asked for one family only, it has not been scraped.
    one = f"{url}?name[]=hicache_obs_records_total"
    fill(writer, round_of(2, times=True))
    eventually(lambda: value(scrape(one), "records_total") == 10)
    assert agent.end(signal.SIGKILL) == -signal.SIGKILL
    agent = agent_process("--journal", str(journals))
    url = agent.url()
    eventually(lambda: value(scrape(url), "violations_total", **RACE) == 1)
    assert agent.end() == 0


def test_an_access_that_only_the_dead_agent_saw_still_races(node, ring, tmp_path, round_of, fill, value):
    """The journal gives the history back: the round was read by the first agent, its load-back by the second."""
    first, _ = node(journals=tmp_path / "j")
    writer = ring()
    kernel, copy, *_ = round_of(1)
    fill(writer, [kernel])
    first.cycle(budget_s=9)
    first.close()
    fill(writer, [copy])
    second, metrics = node(journals=tmp_path / "j")
    writer.close()
    second.drain()
    assert value(metrics, "latent_races_total", **RACE) == 1


def test_without_a_journal_such_an_access_is_unknown(node, ring, round_of, fill, value):
    first, _ = node()
    writer = ring()
    kernel, copy, sync = round_of(1)
    fill(writer, [kernel])
    first.cycle(budget_s=9)
    first.close()
    fill(writer, [copy, sync], round_of(2))
    second, metrics = node()
    writer.close()
    second.drain()
    assert value(metrics, "latent_races_total", **RACE) == 1  # round 2, of which it saw both
    assert value(metrics, "checks_total", **RACE) == 1
    assert value(metrics, "dropped_records_total", reason="missing") == 0  # the first agent had them


def test_an_agent_that_ends_without_a_journal_gives_open_pairs_their_verdict(node, ring, round_of, fill, value):
    agent, metrics = node()
    fill(ring(), round_of(1))
    agent.cycle(budget_s=9)
    assert value(metrics, "latent_races_total", **RACE) == 0
    agent.close()
    assert value(metrics, "latent_races_total", **RACE) == 1


def test_a_batch_that_was_kept_but_not_freed_is_judged_and_not_kept_again(node, ring, tmp_path, round_of, fill, value):
    """The agent is killed between the journal and the ring: the worst moment."""
    journals = tmp_path / "j"
    writer = ring()
    fill(writer, round_of(1), round_of(2))
    with closing(RingReader(writer.path)) as reader:
        journal = RingJournal(
            journal_folder(journals, writer.path, reader.info), reader.info, max_bytes=1 << 20, on_error=pytest.fail
        )
        journal.write(reader.read(3))
        reader.release()
        journal.write(reader.read(2))
        journal.close()  # its end mark is a courtesy; nothing depends on it
    fill(writer, round_of(3))
    agent, metrics = node(journals=journals)
    writer.close()
    agent.drain()
    assert value(metrics, "records_total") == 6
    assert value(metrics, "latent_races_total", **RACE) == 3
    assert kept(only_folder(journals)) == [10, 11, 20, 21, 30, 31]


def test_a_journal_with_a_hole_says_so(node, ring, tmp_path, round_of, fill, value):
    """Agents without a journal in between: what they read is in no journal."""
    journals = tmp_path / "j"
    writer = ring()
    for n, where in ((1, journals), (2, None), (3, journals)):
        agent, metrics = node(journals=where)
        fill(writer, round_of(n))
        agent.cycle(budget_s=9)
        agent.close()
    assert kept(only_folder(journals)) == [10, 11, "lost 3", 30, 31]
    agent, metrics = node(journals=journals)
    agent.cycle(budget_s=9)
    assert value(metrics, "dropped_records_total", reason="missing") == 0


def test_a_damaged_journal_is_told_and_a_new_run_begins(node, ring, tmp_path, round_of, fill, value, caplog):
    journals = tmp_path / "j"
    first, _ = node(journals=journals)
    writer = ring()
    fill(writer, round_of(1))
    first.cycle(budget_s=9)
    first.close()
    (file,) = only_folder(journals).iterdir()
    file.write_bytes(b"rubbish" * 99)
    fill(writer, round_of(2))
    second, metrics = node(journals=journals)
    second.cycle(budget_s=9)
    assert value(metrics, "records_total") == 3
    assert value(metrics, "ring_errors_total", reason="journal") == 1
    assert any(
        "rank0-000001.arrows: not a journal" in m and "earlier records are unknown" in m for m in caplog.messages
    )


# -- the journal's own bounds --------------------------------------------------------------------------------


def test_the_oldest_segments_of_a_rank_go_first_whatever_process_wrote_them(node, ring, tmp_path, round_of, fill):
    journals = tmp_path / "j"
    agent, _ = node(journals=journals, journal_max_bytes=1 << 16, scraped=True)
    for life in range(3):
        writer, other = ring(0), ring(1)
        for n in range(4):
            fill(writer, round_of(4 * life + n))
            agent.cycle(budget_s=9)
        fill(other, round_of(99))
        writer.close()
        other.close()
        agent.drain()
    files = sorted(journals.glob("*tp0*/*.arrows"))
    assert sum(file.stat().st_size for file in files) <= (1 << 16) + (1 << 14)
    last = sorted(journals.glob("*tp0*"), key=lambda folder: folder.name.rsplit(".", 2)[1:])[-1]
    assert kept(last)[-2:] == [110, 111]
    assert len(list(journals.glob("*tp1*/*.arrows"))) == 3
    assert all(list(folder.glob("*.arrows")) for folder in journals.iterdir()), "a mark keeps no folder alive"


def test_names_outlive_the_segments_they_were_defined_in(tmp_path, ring):
    writer = ring()
    with closing(RingReader(writer.path)) as reader:
        folder = tmp_path / "j" / "x.20260101T000000.000Z"
        journal = RingJournal(folder, reader.info, max_bytes=20_000, on_error=pytest.fail)
        journal.write([Define(NO_OP, 0, 0, DefineSpace.STREAM, 5, "load \u00e9", 1)])
        for n in range(40):
            journal.write([EventRecord(n, 0, n, 1, 5)])
        journal.close()
    run = newest_run(folder, rank=0)
    assert run[0][1].segment > 1
    trace = open_trace(folder)
    assert trace.names.streams == {5: "load \u00e9"}
    assert isinstance(trace.records[0], Lost)
    assert trace.records[0].count == run[0][1].records_before


def test_only_so_many_names_are_remembered(tmp_path, ring, monkeypatch):
    monkeypatch.setattr(journals_module, "MAX_DEFINITIONS", 3)
    with closing(RingReader(ring().path)) as reader:
        journal = RingJournal(tmp_path / "j", reader.info, max_bytes=1 << 20, on_error=pytest.fail)
        journal.write([Define(NO_OP, 0, 0, DefineSpace.SITE, n, f"site {n}", 0) for n in range(9)])
        journal.write([Define(NO_OP, 0, 0, DefineSpace.REQUEST, n, f"request {n}", 0) for n in range(9)])
        assert sorted(journal._definitions.values(), key=lambda d: d.id)[0].text == "site 6"
        assert len(journal._definitions) == 3
        journal.close()


def test_only_the_newest_part_of_a_long_journal_is_read_again(node, ring, tmp_path, round_of, fill, value, monkeypatch):
    monkeypatch.setattr(journals_module, "REBUILD_BYTES", 1)
    monkeypatch.setattr(journals_module, "SEGMENT_BYTES", 1)
    first, _ = node(journals=tmp_path / "j")
    writer = ring()
    (k1, c1, _), (k2, c2, _) = round_of(1), round_of(2)
    fill(writer, [k1])
    first.cycle(budget_s=9)
    fill(writer, [k2])
    first.cycle(budget_s=9)
    first.close()
    fill(writer, [c1, c2])
    second, metrics = node(journals=tmp_path / "j")
    writer.close()
    second.drain()
    # Round 2 is in the newest segment; round 1 is not read again, and nothing is claimed about it.
    assert value(metrics, "latent_races_total", **RACE) == 1
    assert value(metrics, "checks_total", **RACE) == 1


# -- killed --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_agent_killed_again_and_again_keeps_every_record_once(
    rings, tmp_path, agent_process, eventually, value, round_of, times_of
):
    chance = random.Random(7)
    writer = create_ring("scheduler", Ranks(tp=2), directory=rings, slots=1 << 12, arena_words=1 << 12)
    sent = 0
    for _ in range(6):
        agent = agent_process("--journal", str(tmp_path / "j"))
        agent.url()
        until = time.monotonic() + chance.uniform(0.0, 0.4)
        while time.monotonic() < until:
            for record in round_of(sent):
                assert writer.append(record)
            sent += 1
            time.sleep(0.002)
        assert agent.end(signal.SIGKILL) == -signal.SIGKILL
    agent = agent_process("--journal", str(tmp_path / "j"))
    url = agent.url()
    for record in times_of(sent - 1):
        writer.append(record)
    writer.close()
    eventually(lambda: (rings / "finished").exists())
    with urllib.request.urlopen(url) as answer:
        text = answer.read().decode()
    assert value(text, "dropped_records_total", tp_rank="2", reason="missing") == 0
    assert value(text, "ring_errors_total", tp_rank="2", reason="journal") == 0
    # Every earlier pair was open when its agent died: each is judged by the last, once.
    assert value(text, "violations_total", tp_rank="2", **RACE) == 1
    assert value(text, "latent_races_total", tp_rank="2", **RACE) == sent - 1
    assert agent.end() == 0
    expected = [op for n in range(sent) for op in (10 * n, 10 * n + 1)] + [10 * sent - 10, 10 * sent - 9]
    assert kept(only_folder(tmp_path / "j")) == expected


def test_a_writer_does_not_notice_that_the_agent_is_dead(rings, agent_process, ring, round_of, fill):
    """It fills its ring, then drops and counts; no append waits or raises."""
    writer = ring(slots=64)
    agent = agent_process()
    agent.url()
    agent.end(signal.SIGKILL)
    results = [writer.append(EventRecord(n, 0, n, n, 1)) for n in range(1000)]
    assert results == [True] * 64 + [False] * 936
    assert writer.dropped == {DropReason.RING_FULL: 936}
