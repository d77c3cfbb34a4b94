"""Ranks that enter different collectives, whose records are in one trace or in one each."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from hicache_obs.analyzer.divergence import CollectiveOrder
from hicache_obs.cli import main
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.records import AnyRecord, Collective, Define, DefineSpace, DropReason, Lost, OpId, ThreadId
from hicache_obs.trace import Names

MAIN = ThreadId(0)


def rank(number: int, entered: str, *, first_site: int = 0, lost: DropReason | None = None) -> list[AnyRecord]:
    """Records of one process that enters collectives of one letter each; ``-``: a record was lost there."""
    sites = {name: first_site + place for place, name in enumerate(sorted(set(entered)))}
    records: list[AnyRecord] = [Define(OpId(-1), MAIN, 0, DefineSpace.GROUP, 1, "tp", 0)]
    records += [Define(OpId(-1), MAIN, 0, DefineSpace.SITE, site, name, 0) for name, site in sites.items()]
    for place, name in enumerate(entered):
        if name == "-":
            assert lost is not None
            records.append(Lost(OpId(-1), MAIN, place, 1, lost))
        else:
            records.append(Collective(OpId(place), MAIN, place, 1, number, sites[name]))
    return records


def together(*ranks: Sequence[AnyRecord]) -> CollectiveOrder:
    order = CollectiveOrder()
    for records in ranks:
        of_one = CollectiveOrder()
        of_one.feed(records, Names())
        order.merge(of_one)
    return order


def test_ranks_that_enter_the_same_collectives() -> None:
    """Names count, not the numbers that each process gives them."""
    order = together(rank(0, "abab"), rank(1, "abab", first_site=7))
    assert (order.divergences(), order.compared, order.ranks, order.cut) == ([], 4, (0, 1), False)


@pytest.mark.parametrize(
    ("ranks", "place", "at"),
    [
        (("aba", "aca"), 2, (0, "b")),
        (("aab", "abab"), 2, (0, "a")),
        (("aba", "abc"), 3, (1, "c")),
        (("ab", "ab", "ac"), 2, (0, "b")),
    ],
)
def test_the_first_place_where_one_differs(ranks: Sequence[str], place: int, at: tuple[int, str]) -> None:
    (found,) = together(*(rank(number, entered) for number, entered in enumerate(ranks))).divergences()
    assert (found.group, found.place) == ("tp", place)
    assert [(entry.rank, entry.name) for entry in found.entered] == [(n, e[place - 1]) for n, e in enumerate(ranks)]
    assert (found.at.rank, found.at.name) == at


def test_a_rank_that_has_not_come_so_far_does_not_differ() -> None:
    order = together(rank(0, "abab"), rank(1, "ab"))
    assert (order.divergences(), order.compared) == ([], 2)
    assert together(rank(0, "ab")).compared == 0


def test_what_comes_after_a_loss_has_no_place() -> None:
    """Device times that never came, or the other side of a wait, are no such loss."""
    order = together(rank(0, "abc"), rank(1, "a-c", lost=DropReason.RING_FULL))
    assert (order.divergences(), order.compared, order.cut) == ([], 1, True)
    for harmless in (DropReason.UNRESOLVED, DropReason.EDGE):
        order = together(rank(0, "abc"), rank(1, "a-c", lost=harmless))
        assert ([found.place for found in order.divergences()], order.cut) == ([2], False)


@pytest.mark.parametrize(
    ("second", "code", "outcome", "line"),
    [
        ("aba", 3, "clean", "SAFE: all ranks enter the same collectives; 3 collectives of 2 ranks compared"),
        ("aca", 1, "findings", "VIOLATED: ranks enter different collectives (tp_divergence); 3 collectives of 2 ranks"),
        ("a-a", 3, "unknown", "NOT DECIDABLE: records were lost, so later collectives were not compared; 1"),
        ("", 3, "nothing-checked", "NOTHING CHECKED: no two ranks enter collectives of one group; 0 collectives of 1"),
    ],
)
def test_analyze_compares_the_ranks_of_a_folder(
    second: str, code: int, outcome: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each alone has nothing to check, which is never clean."""
    for number, entered in enumerate(("aba", second)):
        writer = JournalWriter(tmp_path / "kept" / "run", rank=number)
        writer.write(rank(number, entered, lost=DropReason.RING_FULL))
        writer.close()
    assert main(["analyze", str(tmp_path / "kept"), "--json"]) == code
    reports = json.loads(capsys.readouterr().out)
    assert [Path(report["file"]).name for report in reports] == ["run, rank 0", "run, rank 1", "run"]
    assert reports[-1]["outcome"] == outcome
    assert main(["analyze", str(tmp_path / "kept")]) == code
    text = " ".join(capsys.readouterr().out.split())
    assert line in text
    assert ("collective 2: rank 0 enters 'b', rank 1 enters 'c'" in text) == (outcome == "findings")
    assert main(["report", str(tmp_path / "kept"), "-o", str(tmp_path / "report.html")]) == code
    assert line.partition(":")[0] in (tmp_path / "report.html").read_text()


def test_a_folder_without_collectives_has_no_such_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for number in (0, 1):
        writer = JournalWriter(tmp_path, rank=number)
        writer.write(rank(number, ""))
        writer.close()
    assert main(["analyze", str(tmp_path), "--json"]) == 3
    assert len(json.loads(capsys.readouterr().out)) == 2


@pytest.mark.parametrize(("mended", "code", "outcome"), [(False, 1, "findings"), (True, 0, "clean")])
def test_ranks_of_one_trace(
    mended: bool, code: int, outcome: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A scenario of several ranks: nothing races, a deadlock is a finding, and agreement has been checked."""
    case = Path(__file__).parent.parent / "cases" / "23-rank-skips-collective.json"
    scenario = json.loads(case.read_text())
    if mended:
        scenario["steps"][6]["name"] = "all_reduce finished-writes"
    path = tmp_path / "ranks.json"
    path.write_text(json.dumps(scenario))
    assert main(["analyze", str(path), "--json"]) == code
    assert json.loads(capsys.readouterr().out)["outcome"] == outcome
    assert main(["check", str(path)]) == code
    out = capsys.readouterr().out
    assert f"{outcome}, 0 page pairs checked, 2 collectives compared" in " ".join(out.split())
    assert ("tp_divergence (rank_divergence) at s6" in out) == bool(code)
    assert main(["report", str(path), "-o", str(tmp_path / "report.html")]) == code
    verdict = "VIOLATED: ranks enter different" if code else "SAFE: every conflicting pair"
    assert verdict in (tmp_path / "report.html").read_text()
