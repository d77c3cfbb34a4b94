"""Dask: the same results on workers, whatever happens to them."""

from __future__ import annotations

import gc
import json
import logging
import os
import signal
import socket
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.findings import ExitCode
from hicache_obs.fleet.places import RankPlace, find_ranks
from hicache_obs.fleet.run import Fleet, Inline, analyse_fleet
from hicache_obs.fleet.verdict import Judged

pytestmark = pytest.mark.usefixtures("need_fleet")
OPTIONS: dict[str, Any] = {
    "host": "127.0.0.1",
    "silence_logs": 50,
    "scheduler_kwargs": {"dashboard": False, "dashboard_address": "127.0.0.1:0"},
}
"""Of a cluster that is not ours."""


def silent(stage: str, done: int, total: int) -> None:
    """No progress."""


@pytest.fixture(scope="module")
def places(fleet_folder: Path, need_fleet: None) -> list[RankPlace]:
    return find_ranks([str(fleet_folder)])


@pytest.fixture(scope="module")
def expected(places: list[RankPlace]) -> Fleet:
    """What one process makes of both servers."""
    return analyse_fleet(places, Inline(), silent)


def test_workers_give_what_one_process_does(workers: Any, places: list[RankPlace], expected: Fleet) -> None:
    told: list[tuple[str, int, int]] = []

    found = analyse_fleet(places, workers, lambda *step: told.append(step))

    assert found == expected
    assert [step for step in told if step[0] == "ranks"] == [("ranks", n, 8) for n in range(1, 9)]


def test_a_killed_worker_changes_nothing(workers: Any, places: list[RankPlace], expected: Fleet) -> None:
    """Killed when half of the ranks are done: what it had analysed, and others need, is analysed again."""
    before = set(workers.client.run(os.getpid).values())
    killed: list[int] = []

    def kill(stage: str, done: int, total: int) -> None:
        if stage == "ranks" and done == total // 2:
            killed.append(min(before))
            os.kill(killed[0], signal.SIGKILL)

    found = analyse_fleet(places, workers, kill)

    assert found == expected
    workers.client.wait_for_workers(2, timeout=60)
    assert killed[0] not in set(workers.client.run(os.getpid).values())


class _GivenUp:
    """A future whose task has killed worker after worker."""

    key = "task"

    def result(self) -> None:
        from distributed.scheduler import KilledWorker

        raise KilledWorker("task", None, 3)


def test_a_rank_that_kills_every_worker_is_named_and_never_clean(
    workers: Any, places: list[RankPlace], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As memory that is too small does. The others are judged all the same."""
    real = type(workers)._result

    def result(executor: Any, future: Any) -> Any:
        found = real(executor, future)
        return real(executor, _GivenUp()) if getattr(found, "place", None) == places[0] else found

    monkeypatch.setattr(type(workers), "_result", result)
    found = analyse_fleet(places[:4], workers, silent)

    assert found.ranks[0].error == (
        f"{places[0].place}: given up, after 4 workers died on it; out of memory? --memory allows more"
    )
    assert [rank.outcome(Accepted()) for rank in found.ranks] == ["unreadable", "clean", "clean", "clean"]
    assert Judged(found, Accepted()).code is ExitCode.NOTHING_CHECKED


def test_servers_listen_on_the_loopback_address_with_certificates(workers: Any) -> None:
    """All of them: Dask also starts HTTP servers, which have no page here."""
    import psutil  # comes with Dask

    info = workers.client.scheduler_info(n_workers=-1)
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    listening = [c.laddr for p in processes for c in p.net_connections("inet") if c.status == psutil.CONN_LISTEN]

    assert all(address.startswith("tls://127.0.0.1:") for address in [info["address"], *info["workers"]])
    assert len(listening) > len(info["workers"])
    # Servers of other tests in this process may speak both protocols on one socket.
    assert {address.ip.removeprefix("::ffff:") for address in listening} == {"127.0.0.1"}
    for path in ("health", "info/main/workers.html", "json/counts.json", "metrics", "status"):
        with pytest.raises(urllib.error.HTTPError, match="404") as caught:
            urllib.request.urlopen(f"http://127.0.0.1:{info['services']['dashboard']}/{path}", timeout=10)
        caught.value.close()


def test_ctrl_c_is_left_to_the_command_itself(workers: Any) -> None:
    """A terminal sends it to the workers too, whose tracebacks would be all that is seen."""
    assert set(workers.client.run(signal.getsignal, signal.SIGINT).values()) == {signal.SIG_IGN}


def test_nobody_without_the_certificate_is_served(workers: Any) -> None:
    from distributed import Client

    address = workers.client.scheduler_info(n_workers=0)["address"].replace("tls://", "tcp://")
    with (
        pytest.raises(OSError, match=r"Timed out|reset by peer|closed"),
        Client(address, timeout=2, set_as_default=False),
    ):
        raise AssertionError("connected")


def test_any_cluster_by_its_address(
    fleet_folder: Path, expected: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here its worker is a thread, which makes no difference but in time."""
    from distributed import LocalCluster

    with LocalCluster(n_workers=1, threads_per_worker=1, processes=False, protocol="tcp", **OPTIONS) as cluster:
        code = main(["fleet", str(fleet_folder), "--scheduler", cluster.scheduler_address, "--json"])
    found = json.loads(capsys.readouterr().out)

    assert code == 1
    assert [rank["records"] for rank in found["ranks"]] == [rank.records for rank in expected.ranks]
    assert len(found["divergences"]) == 2


@pytest.fixture
def free_port() -> int:
    """A port at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:{port}", "nonsense://127.0.0.1:{port}", "127.0.0.1:{port}"])
def test_a_scheduler_that_is_not_there_is_one_error(
    address: str,
    free_port: int,
    fleet_folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from hicache_obs.fleet import cluster

    monkeypatch.setattr(cluster.remote_workers.__wrapped__, "__defaults__", (1.0,))
    where = address.format(port=free_port)
    began = time.monotonic()

    assert main(["fleet", str(fleet_folder), "--scheduler", where]) == 2
    captured = capsys.readouterr()
    assert time.monotonic() - began < 20
    assert (captured.out, captured.err.count("\n")) == ("", 1)
    assert captured.err.startswith(f"hicache-obs: --scheduler {where}: cannot be reached (")
    # One that is left would close itself whenever it is collected, and hang where another one is just starting.
    assert [c for c in gc.get_objects() if type(c).__name__ == "Client" and where in repr(vars(c))] == []


def test_what_dask_logs_is_not_shown_beside_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor is it lost to a program that uses this one and has asked for it before."""
    import distributed

    from hicache_obs.fleet.cluster import remote_workers

    logged: list[str] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", lambda record: logged.append(record.getMessage()))
    logger = logging.getLogger("distributed.client")
    before = logger.level
    logger.setLevel(logging.WARNING)

    def no_client(*_: object, **__: object) -> None:
        logger.error("a traceback of a hundred lines")
        raise OSError("no route")

    monkeypatch.setattr(distributed, "Client", no_client)
    logger.addHandler(handler)
    try:
        with pytest.raises(ConfigError, match=r"cannot be reached \(no route\)"), remote_workers("tcp://127.0.0.1:1"):
            pass
        assert logged == []
        logger.error("afterwards")
        assert logged == ["afterwards"]
    finally:
        logger.setLevel(before)
        logger.removeHandler(handler)


@pytest.mark.parametrize("address", ["dask", "tcp://dask", "dask:port", ""])
def test_an_address_without_a_port_is_refused_at_once(
    address: str, fleet_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", str(fleet_folder), "--scheduler", address]) == 2
    assert capsys.readouterr().err == (
        f"hicache-obs: --scheduler {address}: no address; expected the address of a running Dask scheduler, such as "
        "tcp://host:8786\n"
    )


def test_a_scheduler_without_workers_is_one_error(need_fleet: None) -> None:
    from distributed import LocalCluster

    from hicache_obs.errors import ConfigError
    from hicache_obs.fleet.cluster import remote_workers

    with LocalCluster(n_workers=0, **OPTIONS) as cluster:
        with pytest.raises(ConfigError) as caught, remote_workers(cluster.scheduler_address, 1.0):
            raise AssertionError("it has workers")

        assert str(caught.value) == f"--scheduler {cluster.scheduler_address}: has no worker, 1 s after it was asked"
