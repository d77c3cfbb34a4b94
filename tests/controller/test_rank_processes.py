"""Ranks as processes: what becomes of all of them when one comes to a bad end."""

from __future__ import annotations

import re

import pytest

from hicache_obs.controller.rank_processes import RankBug, RankProcesses
from hicache_obs.errors import ConfigError, HicacheObsError, RankError
from hicache_obs.testing.toy_ranks import ToyTask, toy_rank

NAMES = ("rank 0", "rank 1", "rank 2")


def ranks(*ends: str, timeout_s: float = 20) -> RankProcesses[ToyTask]:
    names = NAMES[: len(ends)]
    tasks = [ToyTask(names, timeout_s, end=end) for end in ends]
    return RankProcesses(toy_rank, names, tasks, timeout_s=timeout_s)


def test_every_rank_returns_what_it_has_made() -> None:
    started = ranks("", "", "")
    digests = started.results()
    assert len(digests) == 3
    assert len(set(digests)) == 1
    assert [process.exitcode for process in started.processes] == [0, 0, 0]


@pytest.mark.parametrize(
    ("ends", "kind", "message"),
    [
        (("", "kill", ""), RankError, r"rank 1, process \d+, was killed by SIGKILL"),
        (("kill", ""), RankError, r"rank 0, process \d+, was killed by SIGKILL"),
        (("", "exit"), RankError, r"rank 1, process \d+, has ended without a word, with exit code 3"),
        (("", "refuse"), ConfigError, r"--storage nowhere: cannot be made"),
        (("fail", ""), RankBug, r"Traceback .*LookupError: nobody expected this\n"),
    ],
)
def test_one_rank_ends_the_run_of_all(ends: tuple[str, ...], kind: type[Exception], message: str) -> None:
    """With its own error, not with those that the others have for that reason; and they end by themselves."""
    started = ranks(*ends)
    with pytest.raises(kind) as caught:
        started.results()
    assert re.fullmatch(message, str(caught.value), re.DOTALL)
    codes = [process.exitcode for process, end in zip(started.processes, ends, strict=True) if not end]
    assert set(codes) == {1}


def test_a_rank_that_stands_still_is_named_and_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hicache_obs.controller.rank_processes.GRACE_S", 0.1)
    started = ranks("", "stop", timeout_s=1.0)
    with pytest.raises(HicacheObsError) as caught:
        started.results()
    assert str(caught.value) == "rank 1: not at decision 4 (end) within 1 s"
    assert started.processes[1].exitcode == -9
