"""The status page: what it says for each state of a node, that it is escaped, and how it looks in a real browser."""

from __future__ import annotations

import datetime
import re
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import Message
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import pytest

from hicache_obs.agent import Fanout
from hicache_obs.analyzer import Analyzer
from hicache_obs.exporters.accepted import Acceptance, Accepted
from hicache_obs.exporters.catalogue import CATALOGUE, row
from hicache_obs.exporters.endpoint import serve
from hicache_obs.exporters.findings_board import MAX_ENTRIES, FindingsBoard
from hicache_obs.exporters.health import Health, Outcome, read_health
from hicache_obs.exporters.markup import Html, joined, tag
from hicache_obs.exporters.metrics_sink import MetricsSink
from hicache_obs.exporters.prometheus import ONLY_RANK, Metrics
from hicache_obs.exporters.status_page import MAX_FINDINGS, status_page
from hicache_obs.findings import BlastRadius, Hazard, Verdict
from hicache_obs.records import CaptureMode, Define, OpId, Ranks
from hicache_obs.testing import History

WAW = Hazard.WAW_FORWARD_RESTORE
NOW_NS = 1_700_000_000_000_000_000
RACE, FENCED = "F:w5 L:w5", "F:w5 L<F L:w5"
NOTHING_ACCEPTED = Accepted()
HOSTILE = "<script>alert(1)</script>&\"'\n"


class Words(HTMLParser):
    """The text of a page, one line per element; checks that every element is closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.lines: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        if tag not in ("meta", "br", "link"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "title") and data.strip():
            self.lines.append(data.strip())


def words(page: str) -> list[str]:
    parser = Words()
    parser.feed(page)
    parser.close()
    assert parser.open == []
    assert "script" not in parser.tags
    return parser.lines


def page_of(
    metrics: Metrics, board: FindingsBoard | None = None, now_ns: int = NOW_NS, accepted: Accepted = NOTHING_ACCEPTED
) -> list[str]:
    entries = board.entries() if board is not None else []
    return words(status_page(read_health(metrics), entries, accepted=accepted, now_ns=now_ns, facts={}))


def analyze(
    board: FindingsBoard, rank: Ranks = ONLY_RANK, metrics: Metrics | None = None, text: str = RACE, names: str = ""
) -> None:
    """A history on ``rank``, from records to the board; ``names`` is put into all names."""
    fanout = Fanout()
    analyzer = Analyzer(fanout)
    sink = board.sink(rank, analyzer)
    fanout.listen([sink, *([MetricsSink(metrics, rank)] if metrics is not None else [])])
    records = History(text).records
    analyzer.feed(msgspec.structs.replace(r, text=r.text + names) if isinstance(r, Define) else r for r in records)
    analyzer.finish()
    sink.refresh()


# -- the verdict ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("health", "outcome", "coverage"),
    [
        (Health(), Outcome.NOT_CHECKED, None),
        (Health(records=5), Outcome.NOT_CHECKED, None),
        (Health(records=5, checked=1), Outcome.SAFE, 1.0),
        (Health(records=5, checked=1, blind=1), Outcome.BLIND, 1.0),
        (Health(records=3, checked=1, lost=1), Outcome.BLIND, 0.75),
        (Health(lost=1), Outcome.BLIND, None),
        (Health(records=5, checked=4, unknown=1), Outcome.BLIND, 0.75),
        (Health(records=5, checked=4, unknown=9), Outcome.BLIND, 0.0),
        (Health(records=5, checked=1, unknown=1, latent=1), Outcome.LATENT, 0.0),
        (Health(records=5, checked=2, latent=1, contradictions=1), Outcome.CONTRADICTION, 1.0),
        (Health(records=5, checked=2, contradictions=1, violations=1), Outcome.VIOLATED, 1.0),
    ],
)
def test_the_worst_that_holds(health: Health, outcome: Outcome, coverage: float | None) -> None:
    assert (health.outcome, health.coverage) == (outcome, coverage)


def feed(metrics: Metrics, rank: Ranks, **counts: int) -> None:
    """Counters by name, under one of their labels."""
    of = metrics.rank(rank)
    of.gauge("rings").set(1)
    of.gauge("capture_mode").set(CaptureMode.OBSERVE)
    for name, count in counts.items():
        metric = row(name)
        of.counter(name, *(label.values[0] for label in metric.labels)).add(count)


@pytest.mark.parametrize(
    ("counts", "lines"),
    [
        (
            {},
            [
                "NOT CHECKED",
                "No conflicting operation pair has been seen: nothing was checked, which is not the same as safe.",
                "Coverage: none.",
            ],
        ),
        (
            {"checks_total": 1200, "records_total": 5000},
            [
                "SAFE",
                "1,200 operation pairs checked, and every one is ordered.",
                "Coverage 100 %: 5,000 of 5,000 records analysed, 1,200 of 1,200 checked pairs judged.",
            ],
        ),
        (
            {"checks_total": 1200, "records_total": 999_999, "dropped_records_total": 1, "unknown_total": 1},
            [
                "BLIND",
                "No race was found, but not everything was seen: 1 record lost, 1 operation pair could not be judged.",
                "Coverage 99.92 %: 999,999 of 1,000,000 records analysed, 1,199 of 1,200 checked pairs judged.",
            ],
        ),
        (
            {"checks_total": 2, "records_total": 9_999_999, "dropped_records_total": 1},
            [
                "BLIND",
                "No race was found, but not everything was seen: 1 record lost.",
                "Coverage 99.99 %: 9,999,999 of 10,000,000 records analysed, 2 of 2 checked pairs judged.",
            ],
        ),
        (
            {"checks_total": 2, "records_total": 4, "latent_races_total": 1},
            [
                "LATENT RACES",
                "Nothing orders 1 operation pair. Each ran in the right order this time, or was not measured.",
                "Coverage 100 %: 4 of 4 records analysed, 2 of 2 checked pairs judged.",
            ],
        ),
        (
            {"checks_total": 2, "records_total": 4, "contradictions_total": 2},
            [
                "CONTRADICTION",
                "2 operation pairs proven ordered, yet measured in the wrong order: a fence is not where it seems to "
                "be, or a clock lies.",
                "Coverage 100 %: 4 of 4 records analysed, 2 of 2 checked pairs judged.",
            ],
        ),
        (
            {"checks_total": 2, "records_total": 4, "violations_total": 1, "latent_races_total": 7},
            [
                "VIOLATED",
                "1 operation pair overlapped or ran in reverse with nothing to order them: pages, and answers built "
                "on them, may be wrong.",
                "Coverage 100 %: 4 of 4 records analysed, 2 of 2 checked pairs judged.",
            ],
        ),
    ],
)
def test_the_verdict_in_words(counts: dict[str, int], lines: list[str]) -> None:
    metrics = Metrics()
    feed(metrics, Ranks(), **counts)
    said = page_of(metrics)

    assert said[said.index(lines[0]) :][:3] == lines


def test_no_rank_is_not_safe() -> None:
    said = page_of(Metrics(ranks=()))

    assert "NOT CHECKED" in said
    assert "No rank has been seen: nothing was checked, which is not the same as safe." in said
    assert "None has been seen." in said


def test_idle_ranks_are_named_next_to_safe() -> None:
    metrics = Metrics(ranks=[Ranks(0), Ranks(1), Ranks(2)])
    feed(metrics, Ranks(1), checks_total=3, records_total=9)

    assert "3 operation pairs checked, and every one is ordered. 2 of 3 ranks had nothing to check." in page_of(metrics)


@pytest.mark.parametrize("how", ["blind", "off"])
def test_a_rank_that_nobody_watches_is_not_safe(how: str) -> None:
    metrics = Metrics(ranks=())
    for tp in range(3):
        feed(metrics, Ranks(tp), checks_total=3, records_total=9)
    assert "SAFE" in page_of(metrics)
    if how == "blind":
        metrics.rank(Ranks(1)).gauge("blind").set(1)
    else:
        metrics.rank(Ranks(1)).gauge("capture_mode").set(CaptureMode.OFF)
    said = page_of(metrics)

    assert "No race was found, but not everything was seen: tp1 unwatched." in said
    assert "unwatched" in said if how == "blind" else "off" in said
    assert said[said.index("last analysis") + 1 :][:2] == ["tp1", "BLIND"], "worst first"
    metrics.rank(Ranks(0)).counter("violations_total", WAW.value).add()
    assert any(line.endswith("9 of 9 checked pairs judged. Unwatched: tp1.") for line in page_of(metrics))


# -- ranks ---------------------------------------------------------------------------------------------------


def test_a_row_per_rank() -> None:
    metrics = Metrics(ranks=())
    rank = Ranks(tp=3, dp=1)
    feed(metrics, rank, checks_total=1500, records_total=20_000, dropped_records_total=2)
    metrics.rank(rank).gauge("unread_records").set(7)
    metrics.rank(rank).gauge("heartbeat_timestamp_seconds").set(NOW_NS - 250_000_000_000)
    said = page_of(metrics)

    assert said[said.index("last analysis") + 1 :][:9] == [
        "dp1 tp3", "BLIND", "observe", "1,500", "20,000", "2", "7", "4 min ago", "never",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("age_s", "text"),
    [
        (0, "0 s ago"),
        (99, "99 s ago"),
        (5 * 3600, "5 h ago"),
        (10 * 86400, "10 d ago"),
        (-0.5, "0 s ago"),
        (-7200, "2 h ahead of this clock"),
    ],
)
def test_a_clock_that_was_set_back_is_said(age_s: float, text: str) -> None:
    metrics = Metrics()
    metrics.rank(Ranks()).gauge("heartbeat_timestamp_seconds").set(NOW_NS - int(age_s * 1e9))

    assert text in page_of(metrics)


def test_what_cannot_be_seen_is_named() -> None:
    metrics = Metrics(ranks=[Ranks(0), Ranks(1)])
    metrics.set_observable(set(Hazard) - {Hazard.RDMA}, Ranks(0))
    metrics.set_observable(set(Hazard) - {Hazard.GRAPH}, Ranks(1))
    told = "12 of 14 kinds of race can be seen on every rank. Not seen, which is not the same as absent: graph, rdma."
    assert told in page_of(metrics)
    for rank in metrics.known_ranks:
        metrics.set_observable(Hazard, rank)
    assert not any("kinds of race" in line for line in page_of(metrics))


# -- findings ------------------------------------------------------------------------------------------------


def test_a_finding_shows_both_accesses_and_what_it_spoiled() -> None:
    metrics, board = Metrics(ranks=()), FindingsBoard(lambda: NOW_NS - 12_000_000_000)
    for tp in (1, 0):
        analyze(board, Ranks(tp), metrics)
    said = page_of(metrics, board)
    (name,) = {entry.finding.fingerprint for entry in board.entries()}
    start = said.index(name)

    assert said[start + 1 : start + 4] == ["LATENT", WAW.value, "2 pairs on tp0, tp1, last 12 s ago"]
    labels = dict(zip(said[start + 5 :: 2], said[start + 6 :: 2], strict=False))
    assert labels["device"] == "page 5"
    assert labels["earlier"].startswith("forward round 0 writes them on stream 'F', op 0")
    assert labels["later"].startswith("restore transfer 1 writes them on stream 'L', op 1")
    assert labels["spoiled"] == "at most 1 device page"
    assert labels["fix"].startswith("before op 1 is issued: L.wait_stream(F)")
    assert said.count(name) == 1


def test_with_a_fence_there_is_none() -> None:
    metrics, board = Metrics(ranks=()), FindingsBoard()
    analyze(board, Ranks(), metrics, FENCED)

    assert board.entries() == []
    assert {"SAFE", "None."} <= set(page_of(metrics, board))


def test_an_accepted_finding_is_marked_and_comes_after_the_others() -> None:
    board = FindingsBoard()
    for number in range(3):
        analyze(board, names=str(number))
    newest, *others = [entry.finding.fingerprint for entry in board.entries()]
    days = [datetime.date(2027, 3, 31)]
    accepted = Accepted({newest: Acceptance(newest, f"known {HOSTILE}", days[0])}, today=lambda: days[-1])
    said = page_of(Metrics(), board, accepted=accepted)

    assert [line for line in said if line.startswith("HC-")] == [*others, newest]
    after = said[said.index(newest) :]
    assert after[1:4] == ["LATENT", "ACCEPTED", WAW.value]
    assert f"Accepted until 2027-03-31, UTC: known {HOSTILE}".strip() in after
    assert said.count("ACCEPTED") == 1
    days.append(datetime.date(2027, 4, 1))
    said = page_of(Metrics(), board, accepted=accepted)
    assert [line for line in said if line.startswith("HC-")] == [newest, *others]
    assert "ACCEPTED" not in said


def test_what_could_not_be_judged_is_never_marked() -> None:
    board = FindingsBoard()
    analyze(board)
    (entry,) = board.entries()
    name = entry.finding.fingerprint
    accepted = Accepted({name: Acceptance(name, "known", datetime.date.max)})
    assert "ACCEPTED" in page_of(Metrics(), board, accepted=accepted)
    board = FindingsBoard()
    board.note(Ranks(), replace(entry.finding, verdict=Verdict.UNKNOWN))
    assert "ACCEPTED" not in page_of(Metrics(), board, accepted=accepted)


def test_a_verdict_says_what_it_leaves_out() -> None:
    metrics = Metrics()
    feed(metrics, Ranks(), checks_total=7, records_total=9, accepted_total=1)
    said = page_of(metrics)

    assert "7 operation pairs checked, and every one is ordered but the 1 that is accepted." in said
    assert said[said.index("accepted") + 1] == "1"
    assert "accepted" not in page_of(Metrics())


def test_names_from_a_ring_are_text() -> None:
    board = FindingsBoard()
    analyze(board, names=HOSTILE)
    page = status_page([], board.entries(), accepted=NOTHING_ACCEPTED, now_ns=NOW_NS, facts={"rings": HOSTILE})

    assert "script" not in page.replace("&lt;script&gt;", "").replace("&lt;/script&gt;", "")
    assert page.count("&lt;script&gt;alert(1)&lt;/script&gt;&amp;&quot;&#x27;") >= 3
    words(page)


def test_the_newest_kinds_are_shown_and_the_rest_counted() -> None:
    board = FindingsBoard()
    for number in range(MAX_FINDINGS + 3):
        analyze(board, names=str(number))
    said = page_of(Metrics(), board)

    assert said.count("LATENT") == MAX_FINDINGS
    assert "… and 3 older kinds" in said


def test_the_board_is_bounded_and_keeps_what_comes_again() -> None:
    board = FindingsBoard()
    analyze(board)
    (first,) = board.entries()
    for number in range(MAX_ENTRIES):
        board.note(Ranks(), replace(first.finding, fingerprint=f"HC-{number}"))
        if number == 10:
            board.note(Ranks(), first.finding)
    names = [entry.finding.fingerprint for entry in board.entries()]

    assert len(names) == MAX_ENTRIES
    assert names[0] == f"HC-{MAX_ENTRIES - 1}"
    assert names[-1] == "HC-1"
    assert next(e for e in board.entries() if e.finding.fingerprint == first.finding.fingerprint).count == 2


def test_the_example_is_the_worst_then_a_first_race_then_the_newest() -> None:
    board = FindingsBoard()
    analyze(board)
    (made,) = board.entries()

    def example(*findings: tuple[Verdict, bool, int]) -> int:
        fresh = FindingsBoard()
        for verdict, secondary, page in findings:
            fresh.note(Ranks(), replace(made.finding, verdict=verdict, secondary=secondary, pages=(page,)))
        return fresh.entries()[0].finding.pages[0]

    violation, latent = Verdict.VIOLATION, Verdict.LATENT
    assert example((latent, False, 1), (latent, False, 2)) == 2
    assert example((latent, False, 1), (latent, True, 2)) == 1
    assert example((latent, False, 1), (violation, True, 2)) == 2
    assert example((violation, True, 1), (latent, False, 2)) == 1


def test_blast_radii_are_refreshed_within_a_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked, cost_s = [100.0], [], [0.0]
    monkeypatch.setattr("hicache_obs.exporters.findings_board.time.monotonic", lambda: clock[0])
    nothing = BlastRadius((), (), (), (), (), (), complete=True, exact=True)

    class Slow(Analyzer):
        def blast_radius(self, race: str | tuple[OpId, OpId]) -> BlastRadius:
            asked.append(clock[0])
            clock[0] += cost_s[0]
            return nothing

    board = FindingsBoard()
    analyze(board)
    finding = board.entries()[0].finding
    sink = board.sink(Ranks(1), Slow(board.sink(Ranks(1))))

    def at(second: float) -> None:
        clock[0] = second
        sink.on_records(1)

    at(100)
    assert asked == [], "nothing was found yet"
    sink.on_finding(finding)
    assert board.entries()[0].radius is None
    assert "What it has spoiled is not known yet." in page_of(Metrics(), board)
    at(101)
    assert board.entries()[0].radius is nothing
    cost_s[0] = 1.0
    at(105.9)
    at(106.1)
    at(150)
    at(158)
    assert asked == [101, 106.1, 158]
    sink.refresh()
    assert len(asked) == 4


# -- markup --------------------------------------------------------------------------------------------------


def test_only_markup_is_not_escaped() -> None:
    assert tag("p", "a<b", tag("b", '"'), class_='x"y') == '<p class="x&quot;y">a&lt;b<b>&quot;</b></p>'
    assert tag("meta", http_equiv="refresh") == '<meta http-equiv="refresh">'
    assert joined(["<", Html("<br>")]) == "&lt;<br>"


# -- served --------------------------------------------------------------------------------------------------


def get(url: str) -> tuple[Message, str]:
    with urllib.request.urlopen(url, timeout=30) as answer:
        return answer.headers, answer.read().decode()


@pytest.fixture
def home() -> Iterator[str]:
    """Address of a node of four ranks: found, blind, safe and idle."""
    metrics, board = Metrics(ranks=[Ranks(3)], engine="agent"), FindingsBoard()
    analyze(board, Ranks(0), metrics)
    analyze(board, Ranks(1), metrics, FENCED)
    metrics.rank(Ranks(1)).gauge("blind").set(1)
    analyze(board, Ranks(2), metrics, FENCED)
    with serve(metrics, board=board, port=0, ready=lambda: "not yet") as server:
        yield server.home


def test_the_page_loads_nothing_and_may_run_nothing(home: str) -> None:
    headers, page = get(home)

    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; ")
    assert not re.search(r"(?:src|url)\s*[=(]|@import", page)
    assert set(re.findall(r'href="([^"]*)"', page)) == {"/metrics", "/docs/metrics", "/?reload"}
    assert "http-equiv" not in page
    assert '<meta http-equiv="refresh" content="10">' in get(home + "?reload")[1]


def test_its_links_lead_somewhere(home: str) -> None:
    assert "hicache_obs_checks_total" in get(home + "metrics")[1]
    assert all(f"`{metric.name}`" in get(home + "docs/metrics")[1] for metric in CATALOGUE)


def test_probes_say_why_not(home: str) -> None:
    assert get(home + "-/healthy")[1] == "ok\n"
    with pytest.raises(urllib.error.HTTPError) as caught:
        get(home + "-/ready")
    with caught.value as refused:
        assert (refused.code, refused.read()) == (503, b"not yet\n")


@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_it_with_its_style(
    home: str, width: int, require_tool: Callable[..., Path], tmp_path: Path
) -> None:
    """Chromium logs what the page's own policy makes it refuse; a page without its style is narrow text on white."""
    chromium = require_tool("chromium", install="apt-get install chromium")
    picture = tmp_path / "page.png"
    ran = subprocess.run(
        [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1200", f"--screenshot={picture}", home,
        ],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert picture.exists(), ran.stderr
    assert "CONSOLE" not in ran.stderr
    header = picture.read_bytes()[16:24]
    assert int.from_bytes(header[:4], "big") == width
    assert picture.stat().st_size > 30_000
