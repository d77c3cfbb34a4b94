"""Which ranks are found, what they are called, and which of them are compared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.fleet.decisions import CACHE, COLLECTIVES, SequenceName
from hicache_obs.fleet.peers import find_groups
from hicache_obs.fleet.places import RankPlace, find_ranks
from hicache_obs.fleet.rank import RankSummary
from hicache_obs.records import Ranks

THREAD = SequenceName(CACHE, "scheduler")
pytestmark = pytest.mark.usefixtures("need_fleet")


def rank(tp: int, *, node: str = "n", dp: int = 0, pp: int = 0, begin: int = 1, length: int = 9) -> RankSummary:
    """One rank that has decided ``length`` times and entered as many collectives of its group."""
    place = RankPlace(f"/{node}/{dp}.{pp}.{tp}.{begin}", None, node, "scheduler", Ranks(tp=tp, pp=pp, dp=dp))
    lengths = {THREAD: (length, True), SequenceName(COLLECTIVES, "tp", tp): (length, True)}
    return RankSummary(place, begin_ns=begin, end_ns=begin + 10, wall_ahead_ns=0, lengths=lengths)


def members(ranks: list[RankSummary], kind: str) -> list[list[int]]:
    groups, _ = find_groups(ranks)
    return sorted(sorted(member.number for member in group.members) for group in groups if group.kind == kind)


def test_tensor_parallel_ranks_of_one_stage_and_replica_are_compared() -> None:
    ranks = [rank(tp, dp=dp, pp=pp) for dp in range(2) for pp in range(2) for tp in range(2)]

    assert members(ranks, CACHE) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert members(ranks, COLLECTIVES) == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert find_groups(ranks)[1] == []


def test_a_server_on_two_nodes_is_one_and_two_servers_are_told_apart_by_node() -> None:
    spread = [rank(0, node="a"), rank(1, node="b")]
    two = [rank(tp, node=node) for node in "ab" for tp in range(2)]

    assert members(spread, CACHE) == [[0, 1]]
    assert members(two, CACHE) == [[0, 1], [2, 3]]


def test_runs_of_one_node_are_told_apart_by_time_and_what_overlaps_is_not_compared() -> None:
    again = [rank(tp, begin=begin) for begin in (1, 100) for tp in range(2)]
    overlapping = [rank(tp, begin=begin) for begin in (1, 5) for tp in range(2)]

    assert members(again, CACHE) == [[0, 1], [2, 3]]
    groups, notes = find_groups(overlapping)
    assert groups == []
    assert notes == [
        "scheduler of n: several recordings of the same worker overlap in time, so it cannot be told which ranks "
        "belong together; name the journals of one server only"
    ]


def test_the_longest_complete_sequence_comes_first_and_an_unreadable_rank_is_in_no_group() -> None:
    ranks = [rank(0), rank(1, length=20), replace(rank(2), error="gone"), rank(3, length=30)]
    ranks[3] = replace(ranks[3], lengths={THREAD: (30, False)})
    groups, _ = find_groups(ranks)

    (group,) = [group for group in groups if group.kind == CACHE]
    assert [member.number for member in group.members] == [1, 0, 3]


def test_folders_globs_and_files_lead_to_the_same_ranks(fleet_folder: Path) -> None:
    found = find_ranks([str(fleet_folder)])

    assert [place.name for place in found] == [
        f"node{dp} scheduler dp{dp} pp0 tp{tp}" for dp in range(2) for tp in range(4)
    ]
    assert find_ranks([f"{fleet_folder}/node*"]) == found
    assert find_ranks([f"{fleet_folder}/node[01]/journals/*", str(fleet_folder)]) == found  # each once
    assert find_ranks([fleet_folder.as_uri()]) == found
    one = next(fleet_folder.glob("node1/journals/*tp2*/*.arrows"))
    assert [(place.place, place.number, place.ranks.tp) for place in find_ranks([str(one)])] == [(str(one), None, 2)]


def test_ranks_of_one_folder_are_told_apart_by_their_files(tmp_path: Path, fleet_folder: Path) -> None:
    for tp in range(2):
        file = next(fleet_folder.glob(f"node0/journals/*tp{tp}*/*.arrows"))
        (tmp_path / file.name).symlink_to(file)

    assert [(p.number, p.ranks.tp, p.node) for p in find_ranks([str(tmp_path)])] == [
        (0, 0, tmp_path.name), (1, 1, tmp_path.name),
    ]  # fmt: skip
    # Nothing says which worker of a server they are, so that no name claims it.
    assert [p.name for p in find_ranks([str(tmp_path)])] == [f"{tmp_path.name} rank {n}" for n in range(2)]


def test_recordings_of_one_worker_have_different_names(tmp_path: Path, fleet_folder: Path) -> None:
    file = next(fleet_folder.glob("node0/journals/*tp0*/*.arrows"))
    for pid in (7, 8):
        folder = tmp_path / f"scheduler-dp0-pp0-tp0.{pid}.20260101T000000.000Z"
        folder.mkdir()
        (folder / file.name).symlink_to(file)

    names = [place.name.partition(" ")[2] for place in find_ranks([str(tmp_path)])]

    assert names == ["scheduler dp0 pp0 tp0", "scheduler dp0 pp0 tp0 recording 2"]


@pytest.mark.parametrize(
    ("argument", "error", "message"),
    [
        ("absent", TraceError, "absent: no records of a rank here; expected journals (rank0-000001.arrows), "),
        ("absent*", TraceError, "absent*: no records of a rank here; expected "),
        ("nosuch://bucket/run", ConfigError, "nosuch://bucket/run: Protocol not known: nosuch; expected a path, or a "),
    ],
)
def test_what_leads_nowhere_is_one_error(
    argument: str, error: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error) as caught:
        find_ranks([argument])

    assert str(caught.value).startswith(message)
