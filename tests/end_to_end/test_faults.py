"""What goes wrong around a demo does not change what it finds."""

from __future__ import annotations

import errno
import itertools
import json
import os
import re
import socket
import struct
import time
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from hicache_obs.cli import demo as demo_module
from hicache_obs.cli import main
from hicache_obs.exporters.server import Server
from hicache_obs.readers import journal_writer, open_trace
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.records import Lost

VIRTUAL = ["demo", "--device", "virtual", "--fence", "none", "--requests", "60", "--device-pages", "32"]
FORKS = 3

Demo = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def demo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Demo:
    """``demo(*options)``: the results of a deterministic demo."""

    def run(*options: str) -> list[dict[str, Any]]:
        path = tmp_path / "demo.json"
        assert main([*VIRTUAL, *options, "--json", str(path)]) == 0
        modes: list[dict[str, Any]] = json.loads(path.read_text())["modes"]
        return modes

    return run


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    path = tmp_path_factory.mktemp("undisturbed") / "demo.json"
    assert main([*VIRTUAL, "--json", str(path)]) == 0
    modes: list[dict[str, Any]] = json.loads(path.read_text())["modes"]
    assert modes[0]["violations"] > 0
    return modes


def test_a_clock_that_is_set_back(
    demo: Demo, undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backwards = itertools.count(1_800_000_000_000_000_000, -3_600_000_000_000)
    monkeypatch.setattr(time, "time_ns", lambda: next(backwards))
    monkeypatch.setattr(time, "time", lambda: next(backwards) / 1e9)

    assert demo() == undisturbed
    assert next(backwards) < 1_800_000_000_000_000_000 - 3_600_000_000_000, "somebody asked"


@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")  # it is what the test is about
def test_a_process_that_forks_while_it_is_observed(
    demo: Demo, undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    page_free = Recorder.page_free
    children: list[int] = []

    def fork_first(self: Recorder, *arguments: Any) -> Any:
        if len(children) < FORKS:
            before = self._sink.path.read_bytes()
            child = os.fork()
            if not child:
                try:
                    for _ in range(5):
                        page_free(self, *arguments)
                    self.resolve()
                finally:
                    os._exit(0)
            children.append(child)
            assert os.waitpid(child, 0)[1] == 0
            assert self._sink.path.read_bytes() == before
        return page_free(self, *arguments)

    monkeypatch.setattr(Recorder, "page_free", fork_first)

    assert demo() == undisturbed
    assert len(children) == FORKS


def test_a_disk_that_is_full_for_a_while(
    demo: Demo,
    undisturbed: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert demo("--journal", str(tmp_path / "whole")) == undisturbed
    whole = list(open_trace(tmp_path / "whole" / "none"))
    calls = itertools.count()
    write = journal_writer._SegmentFile.write

    def full(self: Any, batch: Any) -> None:
        if 5 <= next(calls) < 40:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(self, batch)

    monkeypatch.setattr(journal_writer._SegmentFile, "write", full)
    capsys.readouterr()

    assert demo("--journal", str(tmp_path / "holed")) == undisturbed
    assert "none: the journal is incomplete (No space left on device); it says where." in capsys.readouterr().out
    assert next(calls) > 45
    holed = list(open_trace(tmp_path / "holed" / "none"))
    lost = [record for record in holed if isinstance(record, Lost)]
    assert len(lost) == 1
    assert len(holed) - 1 + lost[0].count == len(whole)


def test_a_prometheus_that_dies_in_the_middle_of_a_scrape(
    demo: Demo, undisturbed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a request, and whole ones whose answers nobody takes; somebody else is served all the same."""
    make_server = demo_module._server
    open_sockets: list[socket.socket] = []
    served: list[str] = []

    def disturbed(*arguments: Any) -> Server:
        server = make_server(*arguments)
        for sent in (b"GET /metrics HT", b"GET /metrics HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n"):
            client = socket.create_connection(("127.0.0.1", server.port))
            client.sendall(sent)
            open_sockets.append(client)
        open_sockets[1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        open_sockets[1].close()  # at once, as when a process is killed
        served.append(server.url)
        return server

    def scrape() -> None:
        with urllib.request.urlopen(served[0], timeout=60) as answer:
            served.append(answer.read().decode())

    monkeypatch.setattr(demo_module, "_server", disturbed)
    monkeypatch.setattr(demo_module, "_interruption", lambda: nullcontext(SimpleNamespace(wait=scrape)))
    try:
        assert demo("--serve", "0") == undisturbed
    finally:
        for client in open_sockets:
            client.close()
    counted = re.findall(r"^hicache_obs_violations_total\{.*\} (\S+)$", served[1], re.MULTILINE)
    assert sum(map(float, counted)) == undisturbed[0]["violations"]


def test_a_port_that_is_taken_is_said_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it ran")

    monkeypatch.setattr("hicache_obs.cli.demo._run", never)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main([*VIRTUAL, "--serve", str(port)]) == 2
    assert f"--serve: port {port} on 127.0.0.1 is in use" in capsys.readouterr().err
