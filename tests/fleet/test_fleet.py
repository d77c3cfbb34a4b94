"""The whole of ``fleet`` in one process: as ``analyze`` on each rank, plus what only several ranks can show."""

from __future__ import annotations

import errno
import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from pyarrow import parquet

from hicache_obs.cli import main
from hicache_obs.cli.verdict import analyse
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.findings import ExitCode, Verdict
from hicache_obs.fleet.dataset import MARK, SCHEMAS
from hicache_obs.fleet.places import RankPlace, find_ranks
from hicache_obs.fleet.rank import RankSummary, analyse_rank
from hicache_obs.fleet.run import Fleet, Inline, analyse_fleet
from hicache_obs.fleet.verdict import Judged
from hicache_obs.readers import open_trace
from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.records import Collective, OpId, Ranks, ThreadId, Times
from hicache_obs.testing.fleet_ranks import Fault, ServerRank, write_rank

pytestmark = pytest.mark.usefixtures("need_fleet")
ACCEPTS_NONE = Accepted()
Run = Callable[..., tuple[int, dict[str, Any]]]


def fleet_of(*arguments: str | Path) -> Fleet:
    """The ranks at ``arguments``, analysed here."""
    return analyse_fleet(find_ranks([str(argument) for argument in arguments]), Inline(), lambda *_: None)


@pytest.fixture(scope="session")
def both(fleet_folder: Path, need_fleet: None) -> Fleet:
    """Both servers."""
    return fleet_of(fleet_folder)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """``run(arguments...)``: exit code and JSON of ``fleet`` without workers."""

    def go(*arguments: str | Path) -> tuple[int, dict[str, Any]]:
        code = main(["fleet", *map(str, arguments), "--workers", "0", "--json"])
        captured = capsys.readouterr()
        assert captured.err == ""
        return code, json.loads(captured.out)

    return go


# -- each rank by itself -------------------------------------------------------------------------------------


def test_each_rank_is_judged_as_analyze_does(both: Fleet) -> None:
    for rank in both.ranks:
        report = analyse(open_trace(rank.place.place, rank=rank.place.number))
        keeper = report.keeper

        assert rank.error == ""
        assert rank.outcome(ACCEPTS_NONE) == report.outcome
        assert rank.code(ACCEPTS_NONE) == report.code
        assert (rank.records, rank.lookups) == (len(report.trace), report.pairs_checked)
        assert dict(rank.checked) == {hazard: pages for hazard, pages in keeper.checked.items() if pages}
        assert {d.example.fingerprint: dict(d.verdicts) for d in rank.defects} == {
            name: dict(defect.verdicts) for name, defect in keeper.defects.items()
        }
        assert dict(rank.lost) == dict(keeper.lost)
        assert list(rank.notes) == [note for note in report.notes if not note.startswith("stalls not searched")]
        for kind, fences in rank.fences.items():
            costs = [cost for cost in keeper.fence_costs if cost.kind is kind]
            assert (fences.count, fences.in_flight) == (len(costs), sum(cost.in_flight for cost in costs))
            assert fences.waited_ns == sum(cost.waited_ns for cost in costs)
            assert fences.avoidable_ns == sum(cost.avoidable_ns for cost in costs)
            assert fences.max_ns == max((cost.waited_ns for cost in costs), default=0)
    assert [bool(rank.defects) for rank in both.ranks] == [False] * 5 + [True] + [False] * 2


def test_an_accepted_finding_is_one_that_is_expected(fleet_folder: Path, both: Fleet, tmp_path: Path, run: Run) -> None:
    raced = both.ranks[5]
    accepted = tmp_path / "accepted.toml"
    name = raced.defects[0].example.fingerprint
    accepted.write_text(f'["{name}"]\nreason = "known"\nexpires = 2999-01-01\n')
    code, found = run(raced.place.place)
    again, expected = run(raced.place.place, "--accepted", accepted)

    assert (code, found["outcome"], found["ranks"][0]["findings"][0]["accepted"]) == (1, "findings", None)
    assert (again, expected["outcome"]) == (0, "clean")
    assert expected["ranks"][0]["findings"][0]["accepted"] == {"reason": "known", "expires": "2999-01-01"}
    assert expected["text"].startswith("AS ACCEPTED: ")


# -- several -------------------------------------------------------------------------------------------------


def test_a_server_without_faults_is_clean_and_its_ranks_agree(fleet_folder: Path, run: Run) -> None:
    code, found = run(fleet_folder / "node0")

    assert (code, found["outcome"], found["divergences"], found["unreadable"]) == (0, "clean", [], [])
    assert [(group["kind"], group["group"], group["diverges"]) for group in found["groups"]] == [
        ("cache", "journals dp0 pp0, thread scheduler", False),
        ("collectives", "journals group tp", False),
    ]
    assert [set(group["compared"].values()) for group in found["groups"]] == [
        {group["decisions"]} for group in found["groups"]
    ]


def test_a_rank_alone_agrees_with_nobody(both: Fleet, fleet_folder: Path, run: Run) -> None:
    safe = "SAFE: every conflicting pair is in proven order"
    _, alone = run(both.ranks[0].place.place)
    _, together = run(fleet_folder / "node0")

    assert alone["text"].startswith(f"{safe}; 1 rank of 1 read")
    assert together["text"].startswith(f"{safe}, and ranks agree; 4 ranks of 4 read")


def test_ranks_that_differ_are_found_with_what_each_decided(fleet_folder: Path, run: Run) -> None:
    code, found = run(fleet_folder)
    cache, collectives = sorted(found["divergences"], key=lambda divergence: divergence["kind"])

    assert (code, found["outcome"], len(found["divergences"])) == (1, "findings", 2)
    assert cache["group"] == "node1 dp1 pp0, thread scheduler"
    assert [(side["ranks"], side["decision"]) for side in cache["sides"]] == [
        (["node1 scheduler dp1 pp0 tp2"], "frees device page 32"),
        ([f"node1 scheduler dp1 pp0 tp{tp}" for tp in (0, 1, 3)], "frees device pages 956, 957"),
    ]
    assert [(side["ranks"], side["decision"]) for side in collectives["sides"]] == [
        ([f"node1 scheduler dp1 pp0 tp{tp}" for tp in (0, 1, 2)], "enters 'agree on the batch'"),
        (["node1 scheduler dp1 pp0 tp3"], "enters 'agree on what is written back'"),
    ]


def test_clocks_are_bounded_by_collectives_from_both_sides(fleet_folder: Path, run: Run) -> None:
    _, found = run(fleet_folder / "node0")
    clocks = {clock["rank"]: clock for clock in found["clocks"]}

    assert len(clocks) == 3
    for tp in range(1, 4):
        low, high = clocks[f"journals scheduler dp0 pp0 tp{tp}"]["ahead_us"]
        assert low <= 1000 * tp <= high  # conftest sets them apart
        assert high - low < 100


def test_a_loss_that_hides_all_is_undecided_never_clean(tmp_path: Path, run: Run) -> None:
    """Its decisions are too few to be placed behind the loss of its first round."""
    for tp in range(2):
        faults = {Fault.LOSES_RECORDS: 1} if tp else {}
        write_rank(tmp_path, ServerRank(Ranks(tp=tp), 9 if not tp else 4, faults))
    code, found = run(tmp_path)

    assert (code, found["outcome"]) == (3, "unknown")
    assert [group["undecided"] for group in found["groups"]].count([f"{tmp_path.name} scheduler dp0 pp0 tp1"]) >= 1


def test_ranks_agree_where_the_oldest_segments_of_their_journals_are_gone(tmp_path: Path, run: Run) -> None:
    """As of ranks whose journals have met their bound, each at another place."""
    for tp in range(3):
        rank = ServerRank(Ranks(tp=tp), 100, {Fault.EVICTS_MORE: 80} if tp == 2 else {})
        folder = write_rank(tmp_path / "both", rank, batch_records=150, segment_bytes=1)
        for file in sorted(folder.glob("*.arrows"))[:tp]:
            file.unlink()
        if tp < 2:
            (tmp_path / "agree").mkdir(exist_ok=True)
            (tmp_path / "agree" / folder.name).symlink_to(folder)
    _, agree = run(tmp_path / "agree" / "*")
    _, differ = run(tmp_path / "both")

    (compared,) = (group["compared"] for group in agree["groups"] if group["kind"] == "cache")
    assert agree["divergences"] == []
    assert [count > 150 for count in compared.values()] == [True]
    assert [rank["lost"].get("missing", 0) > 0 for rank in agree["ranks"]] == [False, True]
    (apart,) = differ["divergences"]
    assert [len(side["ranks"]) for side in apart["sides"]] == [2, 1]
    assert apart["sides"][1]["decision"] == "frees device page 32"


def test_no_collective_no_distance(tmp_path: Path, fleet_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = find_ranks([str(fleet_folder / "node0")])[0].place

    assert main(["fleet", place, "--workers", "0"]) == 0
    assert "clocks: cannot be told how far they are apart: no two ranks entered a collective" in capsys.readouterr().out


def test_a_rank_that_cannot_be_read_is_named_and_never_clean(tmp_path: Path, fleet_folder: Path, run: Run) -> None:
    for folder in (fleet_folder / "node0" / "journals").iterdir():
        (tmp_path / folder.name).mkdir()
        for file in folder.iterdir():
            (tmp_path / folder.name / file.name).write_bytes(file.read_bytes())
    damaged = next(tmp_path.glob("*tp2*/*.arrows"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2 : len(content) // 2 + 4000] = bytes(4000)
    damaged.write_bytes(content)
    code, found = run(tmp_path)

    assert (code, found["outcome"]) == (3, "nothing-checked")
    assert found["text"].startswith("NOTHING CHECKED: 1 rank cannot be read; 3 ranks of 4 read")
    assert [(entry["rank"], str(damaged) in entry["error"]) for entry in found["unreadable"]] == [
        (f"{tmp_path.name} scheduler dp0 pp0 tp2", True)
    ]
    assert [rank["outcome"] for rank in found["ranks"]] == ["clean", "clean", "unreadable", "clean"]
    assert all(len(group["compared"]) == 2 for group in found["groups"])


def test_hostile_numbers_and_names_are_only_shown(tmp_path: Path, run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    """Times that differ by more than 64 bits hold, wall clocks too; many threads in one collective; no UTF-8."""
    far = 2**63 - 1
    node = tmp_path / os.fsdecode(b"n\xff<b>\x1b[31m")
    for tp in range(2):
        rank = ServerRank(Ranks(tp=tp), 9, {Fault.RACE: 8})
        records = [
            msgspec.structs.replace(record, start_ns=-far, end_ns=far) if type(record) is Times else record
            for records in rank.records()
            for record in records
        ]
        made = [Collective(OpId(10**6 + n), ThreadId(n), -far if n % 2 else far, n, tp, 0) for n in range(600)]
        writer = JournalWriter(node / rank.folder, rank=tp, wall_ns=far - 5, host_ns=5 - far if tp else 5)
        writer.write([*records, *made])
        writer.close()
    code, found = run(tmp_path, "--out", tmp_path / "out", "-o", tmp_path / "page.html")
    text = main(["fleet", str(tmp_path), "--workers", "0"])

    assert (code, text, [rank["error"] for rank in found["ranks"]]) == (1, 1, [None, None])
    assert "\x1b" not in capsys.readouterr().out
    assert "<b>\x1b" not in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert parquet.read_table(tmp_path / "out" / "ranks").num_rows == 2
    (tmp_path / "rank99999999999-000001.arrows").touch()
    assert main(["fleet", str(tmp_path), "--workers", "0"]) == 2
    assert capsys.readouterr().err.endswith("rank 99999999999; allowed are 0 to 2147483647\n")


# -- where records are ---------------------------------------------------------------------------------------


@pytest.fixture
def in_memory(fleet_folder: Path, need_fleet: None) -> Iterator[str]:
    """The first server in a store that only fsspec knows."""
    import fsspec

    store, root = fsspec.filesystem("memory"), f"/{uuid.uuid4().hex}"
    store.put(str(fleet_folder / "node0"), root, recursive=True)
    yield f"memory:/{root}"
    store.rm(root, recursive=True)


def test_journals_in_a_store_give_the_same(in_memory: str, fleet_folder: Path) -> None:
    stored, local = fleet_of(in_memory), fleet_of(fleet_folder / "node0")

    def told(rank: RankSummary) -> tuple[Any, ...]:
        return rank.place.ranks, rank.records, rank.lookups, rank.checked, rank.fences, rank.lengths, rank.notes

    assert [rank.place.place.startswith("memory://") for rank in stored.ranks] == [True] * 4
    assert [told(rank) for rank in stored.ranks] == [told(rank) for rank in local.ranks]
    assert [group.compared for group in stored.groups] == [group.compared for group in local.groups]
    assert [clock.bounds for clock in stored.clocks] == [clock.bounds for clock in local.clocks]


def test_what_is_torn_in_a_store_is_read_up_to_its_last_whole_batch(in_memory: str, fleet_folder: Path) -> None:
    import fsspec

    store = fsspec.filesystem("memory")
    path = next(path for path in store.find(in_memory) if "tp1" in path and path.endswith(".arrows"))
    whole = store.cat_file(path)
    store.pipe_file(path, whole[:-1000])
    place = next(place for place in find_ranks([in_memory]) if place.ranks.tp == 1)
    torn = analyse_rank(place).summary
    store.pipe_file(path, whole[: len(whole) // 2] + bytes(3000) + whole[len(whole) // 2 + 3000 :])
    damaged = analyse_rank(place).summary

    assert torn.error == ""
    assert len(torn.notes) == 1
    assert torn.notes[0].endswith("; the records before it are whole")
    assert damaged.error.startswith("memory://")
    assert damaged.code(ACCEPTS_NONE) is ExitCode.NOTHING_CHECKED


# -- what is written -----------------------------------------------------------------------------------------


def test_the_data_set_holds_what_json_says(fleet_folder: Path, tmp_path: Path, run: Run) -> None:
    out = tmp_path / "results"
    code, found = run(fleet_folder, "--out", out)
    tables = {name: parquet.read_table(out / name).to_pylist() for name in SCHEMAS}

    assert code == 1
    assert sorted(path.name for path in (out / "ranks").iterdir()) == [f"{n:05d}.parquet" for n in range(8)]
    assert all(parquet.ParquetFile(file).metadata.num_row_groups <= 1 for file in out.rglob("*.parquet"))
    assert [(row["rank"], row["outcome"], row["records"]) for row in tables["ranks"]] == [
        (rank["rank"], rank["outcome"], rank["records"]) for rank in found["ranks"]
    ]
    assert [(row["rank"], row["fingerprint"], row["violation"]) for row in tables["findings"]] == [
        (rank["rank"], finding["fingerprint"], finding["pairs"]["violation"])
        for rank in found["ranks"]
        for finding in rank["findings"]
    ]
    assert sum(row["waited_ns"] for row in tables["fences"]) == pytest.approx(
        1e6 * sum(fences["waited_ms"] for node in found["nodes"] for fences in node["fences"].values())
    )
    assert {(row["rank"], row["name"]): row["count"] for row in tables["coverage"] if row["what"] == "lost"} == {
        (rank["rank"], reason): count for rank in found["ranks"] for reason, count in rank["lost"].items()
    }
    assert len({(row["group"], row["kind"]) for row in tables["divergences"]}) == len(found["divergences"])
    assert [row["low_ns"] is None for row in tables["clocks"]] == [
        clock["collectives"] == 0 for clock in found["clocks"]
    ]


def test_a_data_set_replaces_only_another(
    fleet_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place, out = find_ranks([str(fleet_folder / "node0")])[0].place, tmp_path / "out"
    arguments = ["fleet", place, "--workers", "0"]

    assert main([*arguments, "--out", str(out)]) == 0
    first = {path.relative_to(out): path.read_bytes() for path in out.rglob("*.parquet")}
    assert main([*arguments, "--out", str(out)]) == 0
    assert {path.relative_to(out): path.read_bytes() for path in out.rglob("*.parquet")} == first
    (out / MARK).unlink()
    capsys.readouterr()
    assert main([*arguments, "--out", str(out)]) == 2
    assert main([*arguments, "--out", str(Path(place).parent)]) == 2
    assert main([*arguments, "--out", str(tmp_path / "no" / "out")]) == 2
    assert capsys.readouterr().err.splitlines() == [
        f"hicache-obs: --out {out}: exists and holds no results of fleet; only such a folder is replaced",
        f"hicache-obs: --out {Path(place).parent}: is, holds or is part of the input {place}; expected another place",
        f"hicache-obs: --out {tmp_path / 'no' / 'out'}: cannot be written; expected a place in a directory that exists",
    ]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--memory", "12"], "--memory 12: expected a size of 128 MiB or more, such as '512 MiB' or '2 GiB'"),
        (["--memory", "5 MiB"], "--memory 5 MiB: expected a size of 128 MiB or more, such as '512 MiB' or '2 GiB'"),
        (["-o", "/nowhere/x.html"], "--output /nowhere/x.html: there is no directory /nowhere"),
    ],
)
def test_a_wrong_option_is_one_line(
    options: list[str], message: str, fleet_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", str(fleet_folder), "--workers", "0", *options]) == 2
    assert capsys.readouterr().err == f"hicache-obs: {message}\n"


def test_text_says_the_worst_first(both: Fleet, fleet_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", str(fleet_folder), "--workers", "0"]) == 1
    lines = capsys.readouterr().out.splitlines()

    assert lines[0] == Judged(both, ACCEPTS_NONE).sentence
    assert lines[0].startswith(
        "VIOLATED: 1 rank with findings and 2 groups of ranks whose decisions differ; 8 ranks of 8"
    )
    assert lines[1].startswith("  node1 scheduler dp1 pp0 tp1: findings, 1 violation (HC-")
    assert lines[2] == "  node1 dp1 pp0, thread scheduler: differ at cache decision 108"
    assert lines[3] == "    node1 scheduler dp1 pp0 tp2: frees device page 32 (op 425)"


@pytest.mark.parametrize(
    ("verdicts", "word"),
    [
        ({Verdict.LATENT: 2}, "LATENT RACES: 1 rank with findings; "),
        ({Verdict.LATENT: 2, Verdict.CONTRADICTION: 1}, "CONTRADICTION: 1 rank with findings; "),
        ({Verdict.CONTRADICTION: 1, Verdict.VIOLATION: 1}, "VIOLATED: 1 rank with findings; "),
        ({Verdict.UNKNOWN: 1}, "NOT DECIDABLE: "),
    ],
)
def test_the_first_word_is_the_worst_of_all_ranks(verdicts: dict[Verdict, int], word: str) -> None:
    place = RankPlace("/n/0", None, "n", "scheduler", Ranks())
    clean, bad = RankSummary(place, lookups=9), RankSummary(place, lookups=9, verdicts=verdicts)

    assert Judged(Fleet((clean, bad), (), (), ()), ACCEPTS_NONE).sentence.startswith(word)
    assert Judged(Fleet((clean, clean), (), (), ()), ACCEPTS_NONE).sentence.startswith("SAFE: ")


def test_a_folder_that_cannot_be_listed_is_named_and_not_clean(
    fleet_folder: Path, tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows which ranks are in it. (Root may list everything, so the system's refusal is made here.)"""
    journals = tmp_path / "journals"
    shutil.copytree(fleet_folder / "node0" / "journals", journals)
    closed = sorted(journals.iterdir())[1]

    def refusing(listing: Callable[..., Any]) -> Callable[..., Any]:
        def listed(path: str | Path) -> Any:
            if Path(path) == closed:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return listing(path)

        return listed

    with monkeypatch.context() as patch:
        for owner, name in ((os, "scandir"), (Path, "iterdir")):  # what the latter calls differs from Python to Python
            patch.setattr(owner, name, refusing(getattr(owner, name)))
        code, found = run(journals)
    again, whole = run(journals)

    assert (code, found["outcome"], len(found["ranks"])) == (3, "nothing-checked", 4)
    assert found["unreadable"] == [{"rank": "journals scheduler dp0 pp0 tp1", "error": f"{closed}: Permission denied"}]
    assert (again, whole["outcome"], len(whole["ranks"])) == (0, "clean", 4)
