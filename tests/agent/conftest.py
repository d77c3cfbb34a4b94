"""Rings of made-up ranks, and agents that read them."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hicache_obs.agent import NodeAgent, NodeOptions
from hicache_obs.exporters.prometheus import Metrics, render
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.records import (
    NO_OP,
    AnyRecord,
    Direction,
    HostSync,
    Kernel,
    Memcpy,
    Mode,
    Ranks,
    Times,
    WaitStream,
    device,
)


@pytest.fixture
def rings(tmp_path: Path) -> Path:
    """An empty ring directory."""
    path = tmp_path / "rings"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def ring(rings: Path) -> Iterator[Callable[..., RingWriter]]:
    """``ring(tp)``: a new ring of this process."""
    with ExitStack() as stack:

        def make(tp: int = 0, **options: Any) -> RingWriter:
            options = {"slots": 64, "arena_words": 256, **options}
            writer = create_ring("scheduler", Ranks(tp=tp), directory=rings, **options)
            stack.callback(writer.close)
            return writer

        yield make


@pytest.fixture
def round_of() -> Callable[..., list[AnyRecord]]:
    """``round_of(n)``: a forward round writes page n, a load-back writes it too; five records.

    ``fenced``: the load-back waits for the round. ``times``: the load-back was measured to run first.
    """

    def make(n: int, *, fenced: bool = False, times: bool = False) -> list[AnyRecord]:
        page = np.array([n])
        records: list[AnyRecord] = [
            Kernel(10 * n, 1, 100 * n, 1, 1, n, 8, (0, 4), (device(Mode.WRITE, page),)),
            *([WaitStream(NO_OP, 1, 100 * n + 1, 2, 1)] if fenced else []),
            Memcpy(
                10 * n + 1, 1, 100 * n + 2, 2, 2, n, 8, (0, 4), (device(Mode.WRITE, page),), Direction.HOST_TO_DEVICE
            ),
        ]
        if times:
            records += measured(n)
        return [*records, HostSync(NO_OP, 1, 100 * n + 90, None)]

    return make


def measured(n: int) -> list[AnyRecord]:
    return [
        Times(10 * n, 1, 100 * n + 80, 100 * n + 50, 100 * n + 70, 1),
        Times(10 * n + 1, 1, 100 * n + 81, 100 * n + 10, 100 * n + 30, 1),
    ]


@pytest.fixture
def times_of() -> Callable[[int], list[AnyRecord]]:
    """``times_of(n)``: the device times of ``round_of(n)``, load-back first."""
    return measured


@pytest.fixture
def fill() -> Callable[..., None]:
    """``fill(writer, records)``: append all of them."""

    def append(writer: RingWriter, *parts: list[AnyRecord]) -> None:
        for part in parts:
            for record in part:
                assert writer.append(record)

    return append


@pytest.fixture
def value() -> Callable[..., float]:
    """``value(metrics, name, **labels)``: one series; the ranks not named are 0."""

    def read(metrics: Metrics | str, name: str, **labels: str) -> float:
        text = metrics if isinstance(metrics, str) else render(metrics).decode()
        wanted = {"tp_rank": "0", "pp_rank": "0", "dp_rank": "0", **labels}
        found = [
            float(number)
            for series, number in re.findall(rf"^hicache_obs_{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE)
            if wanted == dict(re.findall(r'(\w+)="([^"]*)"', series))
        ]
        if not found and isinstance(metrics, str):
            return float("nan")  # scraped before the agent has seen the rank
        assert len(found) == 1, f"{name} {wanted}: {found}"
        return found[0]

    return read


@pytest.fixture
def node(rings: Path) -> Iterator[Callable[..., tuple[NodeAgent, Metrics]]]:
    """``node(**options)``: an agent of the ring directory, and its metrics."""
    with ExitStack() as stack:

        def make(**options: Any) -> tuple[NodeAgent, Metrics]:
            metrics = Metrics(ranks=())
            agent = NodeAgent(NodeOptions(rings, **options), metrics)
            stack.callback(agent.close)
            return agent, metrics

        yield make


class AgentProcess:
    """``hicache-obs agent`` as a user starts it."""

    def __init__(self, folder: Path, arguments: list[str], **options: Any) -> None:
        self.log = folder / f"agent-{time.monotonic_ns()}.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "hicache_obs", "agent", *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, "HICACHE_OBS_POLL_MS": "10", "HICACHE_OBS_AGENT_CPU_PERCENT": "100"},
                **options,
            )

    def url(self) -> str:
        """Address of its metrics; blocks until it has said so."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert "metrics at" in line, self.log.read_text()
        return line.split()[-1]

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal; returns the exit status."""
        self.process.send_signal(number)
        status = self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return status


@pytest.fixture
def agent_process(tmp_path: Path, rings: Path) -> Iterator[Callable[..., AgentProcess]]:
    """``agent_process(*arguments)``: a running agent of the ring directory, on a free port."""
    started: list[AgentProcess] = []

    def start(*arguments: str, **options: Any) -> AgentProcess:
        started.append(AgentProcess(tmp_path, ["--dir", str(rings), "--port", "0", *arguments], **options))
        return started[-1]

    yield start
    for agent in started:
        if agent.process.poll() is None:
            agent.end(signal.SIGKILL)
        elif agent.process.stdout is not None:
            agent.process.stdout.close()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool]], None]:
    """``eventually(condition)``: wait until it holds, for a minute."""

    def wait(condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, "never came true"
            time.sleep(0.02)

    return wait
