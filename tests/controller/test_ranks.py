"""Ranks that decide alike. On the virtual device they are threads of this process, which differ in how soon work is
done; pipelines, and a rank that is killed, are real processes."""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import shutil
import signal
import threading
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from hicache_obs.cli import main
from hicache_obs.cli.demo_ranks import ROWS, WAITING, RanksMode, tables
from hicache_obs.cli.demo_run import DemoOptions, DemoRun
from hicache_obs.cli.rank_run import RankResult, RankTask, run_rank
from hicache_obs.controller.engine import EngineConfig
from hicache_obs.controller.pipeline import Stage, StageLinks
from hicache_obs.controller.rank_group import END, RankGrid
from hicache_obs.controller.rank_processes import RankProcesses, star
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.workloads import generate
from hicache_obs.errors import ConfigError, RankError
from hicache_obs.findings import ExitCode, Verdict

ENGINE = EngineConfig(
    runner="transformer",
    fence="page",
    device_pages=16,
    host_pages=200,
    page_size=4,
    layers=2,
    heads=1,
    head_dim=4,
    vocabulary=64,
    seed=0,
    scheduler=SchedulerOptions(max_running=5, max_extend_tokens=64),
)
REQUESTS = generate(
    32, seed=0, tokens_per_block=4, vocabulary=64, reuse=0.85, conversations=8, max_blocks=6, max_output=12
)
FAST, SLOW = "eager", "lazy"


def options(*fences: str, schedule: str = "adversarial", **changed: object) -> DemoOptions:
    given = DemoOptions(fences, "virtual", schedule, 0, ENGINE, REQUESTS)
    return dataclasses.replace(given, **changed)  # type: ignore[arg-type]  # fields of DemoOptions


class Mail:
    """Joins stages in threads of one process."""

    def __init__(self) -> None:
        self._boxes: dict[tuple[int, int, int], queue.SimpleQueue[torch.Tensor]] = defaultdict(queue.SimpleQueue)
        self._lock = threading.Lock()

    def box(self, by: int, to: int, round_id: int) -> queue.SimpleQueue[torch.Tensor]:
        with self._lock:
            return self._boxes[by, to, round_id]

    def connect(self, rendezvous: Path, stage: int, stages: int, *, timeout_s: float) -> StageLinks:
        mail = self

        class Links:
            def send(self, values: torch.Tensor, to: int, round_id: int) -> None:
                mail.box(stage, to, round_id).put(values.clone())

            def receive(self, values: torch.Tensor, by: int, round_id: int) -> None:
                values.copy_(mail.box(by, stage, round_id).get(timeout=timeout_s))

            def close(self) -> None:
                """The other one may still be at work."""

        return Links()


def tokens_of(asked: DemoOptions) -> dict[int, list[int]]:
    return DemoRun(asked, progress=lambda *_: None).reference()


@cache
def reference(runner: str) -> dict[int, list[int]]:
    return tokens_of(options("stream", engine=dataclasses.replace(ENGINE, runner=runner)))


def run_ranks(
    asked: DemoOptions, schedules: Sequence[str], folder: Path, off: tuple[str, ...] = (), *, stages: int = 1
) -> list[RanksMode]:
    """Ranks in threads, one per schedule; the results by policy."""
    grid = RankGrid(len(schedules) // stages, stages)
    tokens = reference(asked.engine.runner) if asked.requests is REQUESTS else tokens_of(asked)
    links, mail = star(grid.size), Mail()
    results: list[list[RankResult]] = [[] for _ in schedules]
    failures: list[BaseException] = []

    def body(number: int) -> None:
        own = dataclasses.replace(asked, schedule=schedules[number])
        try:
            task = RankTask(grid, own, tokens, folder, 60.0, off)
            results[number] = run_rank(number, links[number], task, connect=mail.connect)
        except BaseException as error:  # noqa: BLE001 shown by the test
            failures.append(error)
        finally:
            for link in links[number].values():
                link.close()

    threads = [threading.Thread(target=body, args=(number,)) for number in range(grid.size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    if failures:
        raise failures[0]
    return [RanksMode(fence, tuple(of_one[n] for of_one in results), off) for n, fence in enumerate(asked.fences)]


def covers(fingerprint: str) -> bool:
    return False


def test_ranks_decide_alike_whatever_each_sees_of_time(tmp_path: Path) -> None:
    """One whose transfers are over at once, and one whose transfers take as long as they may."""
    (mode,) = run_ranks(options("page"), [FAST, SLOW], tmp_path)
    for rank in mode.ranks:
        assert (rank.mode.wrong_requests, rank.mode.corrupted_pages, rank.mode.first()) == (0, 0, None)
        assert rank.mode.pairs_checked > 0
        assert rank.mode.restored_pages > 0
        assert rank.decisions > rank.mode.rounds
    assert mode.decided_alike
    assert mode.divergences == []
    assert mode.order.compared > 2 * mode.ranks[0].mode.rounds
    assert mode.exit_code(covers) is ExitCode.CLEAN
    (table,) = tables(RankGrid(2), [mode], timed=False)
    assert [column.header for column in table.columns] == ["", "tp 0, pp 0", "tp 1, pp 0", "all"]
    assert list(table.columns[0].cells) == [row for row in ROWS if row != WAITING]
    assert list(table.columns[3].cells)[:2] == [str(mode.ranks[0].mode.rounds), str(mode.ranks[1].mode.restored_pages)]


def test_without_the_decision_log_they_differ(tmp_path: Path) -> None:
    """The same ranks, each on its own: a transfer that one knows to be over decides what its next round is."""
    (mode,) = run_ranks(options("page"), [FAST, SLOW], tmp_path, off=("decision-log",))
    (divergence,) = mode.divergences
    assert divergence.group == "rounds"
    assert [entry.rank for entry in divergence.entered] == [0, 1]
    assert len({entry.name for entry in divergence.entered}) == 2
    assert END not in {entry.name for entry in divergence.entered}
    assert [rank.mode.wrong_requests for rank in mode.ranks] == [0, 0]  # each is right, but not with the other
    (table,) = tables(RankGrid(2), [mode], timed=True)
    assert "they differ" in table.columns[3].cells
    assert mode.exit_code(covers) is ExitCode.CLEAN
    assert dataclasses.replace(mode, off=()).exit_code(covers) is ExitCode.FINDINGS


def test_a_missing_fence_is_reported_on_every_rank(tmp_path: Path) -> None:
    """Also where nothing went wrong. And though one rank samples from spoiled pages, all go on with the same tokens."""
    engine = dataclasses.replace(ENGINE, runner="pattern")
    none, page = run_ranks(options("none", "page", engine=engine), [FAST, "adversarial"], tmp_path)
    lucky, spoiled = (rank.mode for rank in none.ranks)
    assert (lucky.verdicts(Verdict.LATENT) > 0, lucky.verdicts(Verdict.VIOLATION), lucky.corrupted_pages) == (
        True,
        0,
        0,
    )
    assert (spoiled.verdicts(Verdict.VIOLATION) > 0, spoiled.corrupted_pages > 0) == (True, True)
    assert lucky.wrong_requests == spoiled.wrong_requests > 0
    for rank in page.ranks:
        assert (rank.mode.first(), rank.mode.corrupted_pages, rank.mode.wrong_requests) == (None, 0, 0)
        assert rank.mode.pairs_checked > 0
    for mode in (none, page):
        assert (mode.decided_alike, mode.divergences) == (True, [])
        assert mode.exit_code(covers) is ExitCode.CLEAN


def test_a_missing_fence_is_reported_on_every_stage(tmp_path: Path) -> None:
    """Each stage restores its own layers, behind fences of its own; the tokens are those of the model in one piece.

    When transfers end, which is the machine's affair, decides what is restored: of some 45 pages 5 to 9 race here.
    """
    requests = generate(
        64, seed=0, tokens_per_block=4, vocabulary=64, reuse=0.85, conversations=8, max_blocks=6, max_output=12
    )
    engine = dataclasses.replace(
        ENGINE, device_pages=20, scheduler=SchedulerOptions(max_running=8, max_extend_tokens=64)
    )
    asked = options("none", "page", device="threads", engine=engine, requests=requests)
    none, page = run_ranks(asked, [FAST] * 2, tmp_path, stages=2)
    for rank in none.ranks:
        assert rank.mode.verdicts(Verdict.VIOLATION) + rank.mode.verdicts(Verdict.LATENT) > 0
    for rank in page.ranks:
        assert (rank.mode.first(), rank.mode.corrupted_pages, rank.mode.wrong_requests) == (None, 0, 0)
        assert rank.mode.pairs_checked > 0
    for mode in (none, page):
        assert (mode.decided_alike, mode.divergences) == (True, [])
        assert mode.exit_code(covers) is ExitCode.CLEAN


@pytest.fixture
def stored(tmp_path: Path) -> StorageConfig:
    """Storage in which the second rank has lost every third page."""
    storage = StorageConfig(str(tmp_path / "pages"), prefetch="wait")
    engine = dataclasses.replace(ENGINE, storage=storage)
    run_ranks(options("page", engine=engine), [SLOW, SLOW], tmp_path)
    lost = sorted(path for path in (tmp_path / "pages" / "tp1-pp0").rglob("*") if path.is_file())[::3]
    for path in lost:
        path.unlink()
    assert lost
    return storage


def test_ranks_restore_no_more_than_each_has_in_storage(tmp_path: Path, stored: StorageConfig) -> None:
    for off in ((), ("decision-log",)):
        shutil.copytree(tmp_path / "pages", folder := tmp_path / f"pages {len(off)}")
        engine = dataclasses.replace(ENGINE, storage=dataclasses.replace(stored, url=str(folder)))
        (mode,) = run_ranks(options("page", engine=engine), [SLOW, SLOW], tmp_path, off=off)
        assert [rank.mode.wrong_requests for rank in mode.ranks] == [0, 0]
        assert [rank.mode.corrupted_pages for rank in mode.ranks] == [0, 0]
        assert bool(mode.divergences) == bool(off)
        assert mode.ranks[0].mode.restored_pages > 0


def test_stages_share_out_the_layers() -> None:
    assert [stage.layers for stage in Stage.split(7, 3)] == [(0, 3), (3, 5), (5, 7)]
    assert [stage.last for stage in Stage.split(2, 2)] == [False, True]


@pytest.mark.parametrize(
    ("tp", "pp", "layers", "message"),
    [
        (0, 1, 4, "--tp 0: expected an integer ≥ 1"),
        (3, 3, 4, "--tp 3 --pp 3: 9 ranks, each of which is a process; expected at most 8"),
        (1, 3, 2, "--pp 3: the model has 2 layers; expected at most one stage per layer"),
    ],
)
def test_a_grid_that_cannot_be(tp: int, pp: int, layers: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        RankGrid(tp, pp).stages(layers)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--off decision-log", "--off decision-log: one rank has no peers to decide with; expected --tp 2 or more"),
        ("--pp 2 --off decision-log", "--off decision-log: stages need each other's rounds; expected --pp 1 with it"),
        ("--pp 2 --runner pattern", "--pp 2: --runner pattern has no stages; expected transformer"),
        ("--pp 2 --device virtual", "--pp 2: on --device virtual a stage cannot wait for another; expected threads"),
        ("--tp 2 --serve 0", "--serve: shows one engine's run; expected no --tp and no --pp with it"),
    ],
)
def test_what_ranks_cannot_run(flags: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--requests", "2", *flags.split()]) == 2
    assert capsys.readouterr().err == f"hicache-obs: {message}\n"


def test_a_run_that_has_lost_a_rank_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line, and neither clean nor a bug."""

    def lost(*_: object) -> list[RanksMode]:
        raise RankError("rank 1 (tp 1, pp 0), process 7, was killed by SIGKILL")

    monkeypatch.setattr("hicache_obs.cli.demo_ranks.run_ranks", lost)
    assert main(["demo", "--tp", "2", "--requests", "2"]) == 3
    assert capsys.readouterr().err == "hicache-obs: rank 1 (tp 1, pp 0), process 7, was killed by SIGKILL\n"


@pytest.mark.slow
def test_a_pipeline_in_processes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    journal, result = tmp_path / "journal", tmp_path / "result.json"
    flags = ["--pp", "2", "--fence", "page", "--requests", "24", "--device-pages", "24", "--journal", str(journal)]
    assert main(["demo", *flags, "--json", str(result)]) == 0
    assert "page: all ranks enter the same collectives" in capsys.readouterr().out
    (mode,) = json.loads(result.read_text())["modes"]
    assert (mode["fence"], mode["off"], mode["tp_divergence"]) == ("page", [], [])
    assert [(rank["rank"], rank["tp"], rank["pp"]) for rank in mode["ranks"]] == [(0, 0, 0), (1, 0, 1)]
    assert len({rank["decision_digest"] for rank in mode["ranks"]}) == 1
    for rank in mode["ranks"]:
        assert rank["pairs_checked"] > 0
        assert rank["decision_wait_ms"] > 0
        assert (rank["findings"], rank["wrong_requests"], rank["corrupted_pages"]) == ([], 0, 0)

    assert main(["analyze", str(journal), "--json"]) == 0
    reports = json.loads(capsys.readouterr().out)
    assert [report["outcome"] for report in reports] == ["clean"] * 3
    assert reports[-1]["collectives_compared"] == mode["collectives_compared"] > 0


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_run_of_all(tmp_path: Path) -> None:
    """Whether the other one waits for a decision or for a message of the pipeline."""
    grid = RankGrid(1, 2)
    long = [dataclasses.replace(REQUESTS[n % 32], request_id=n) for n in range(2000)]
    engine = dataclasses.replace(ENGINE, layers=2)
    first = RankTask(
        grid, options("page", device="threads", engine=engine, requests=long, journal=tmp_path), {}, tmp_path, 30
    )
    other = dataclasses.replace(first, options=dataclasses.replace(first.options, requests=()))
    ranks = RankProcesses(run_rank, grid.names, [first, other], timeout_s=30)

    def kill() -> None:
        while not list(tmp_path.glob("page/rank1-*.arrows")) and ranks.processes[1].is_alive():
            stop.wait(0.02)
        os.kill(ranks.processes[1].pid or 0, signal.SIGKILL)

    stop = threading.Event()
    killer = threading.Thread(target=kill)
    killer.start()
    with pytest.raises(RankError) as caught:
        ranks.results()
    killer.join()
    assert str(caught.value) == f"rank 1 (tp 0, pp 1), process {ranks.processes[1].pid}, was killed by SIGKILL"
    assert [process.exitcode for process in ranks.processes] == [1, -9]  # the other one has ended by itself
