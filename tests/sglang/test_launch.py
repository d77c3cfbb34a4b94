"""The plugin starts the node's agent: once, detached, and without a word when it cannot."""

from __future__ import annotations

import os
import sys
from contextlib import closing, nullcontext
from types import SimpleNamespace

import pytest

from hicache_obs import __version__
from hicache_obs.recorder.agent_lock import AgentLock
from hicache_obs.records import RING_VERSION
from hicache_obs.sglang import launch


class Started:
    """Stands in for ``subprocess.Popen``."""

    calls: list

    def __init__(self, command, **options):
        self.calls.append((command, options))

    def wait(self):
        return 0


@pytest.fixture
def started(monkeypatch, tmp_path):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("HICACHE_OBS", "observe")
    monkeypatch.setattr(Started, "calls", [], raising=False)
    monkeypatch.setattr(launch.subprocess, "Popen", Started)
    return Started.calls


def test_it_is_started_detached_and_is_not_observed_itself(started, tmp_path):
    launch.start_agent()
    ((command, options),) = started
    assert command == [sys.executable, "-m", "hicache_obs", "agent", "--dir", str(tmp_path / "rings")]
    assert options["start_new_session"]
    assert "HICACHE_OBS" not in options["env"]


def test_it_is_not_started_twice(started, tmp_path):
    (tmp_path / "rings").mkdir(mode=0o700)
    with closing(AgentLock(tmp_path / "rings")):
        launch.start_agent()
    assert started == []


@pytest.mark.parametrize(("step", "told"), [(-1, True), (1, True), (0, False)])
def test_an_agent_of_another_version_is_told_of(started, tmp_path, caplog, step, told):
    layout = RING_VERSION + step
    (tmp_path / "rings").mkdir(mode=0o700)
    with closing(AgentLock(tmp_path / "rings")) as lock:
        lock.describe(version="0.0.9", layout=str(layout))
        launch.start_agent()
    assert started == []
    assert (
        f"the agent that runs here (process {os.getpid()}, version 0.0.9) reads ring layout {layout}, this process "
        f"writes {RING_VERSION}: it is not watched until an agent of version {__version__} takes over" in caplog.text
    ) == told


def test_a_server_goes_on_without_it(monkeypatch, started, caplog):
    def refuse(*args, **options):
        raise OSError("no more processes")

    monkeypatch.setattr(launch.subprocess, "Popen", refuse)
    launch.start_agent()
    assert "the agent was not started: no more processes" in caplog.text


@pytest.mark.parametrize(("code", "another", "told"), [(2, False, True), (0, False, False), (2, True, False)])
def test_an_agent_that_ends_by_itself_is_told_of(started, tmp_path, caplog, code, another, told):
    """Its output goes nowhere: a port that is taken would be in no log. Two that start at once are no fault."""
    directory = tmp_path / "rings"
    directory.mkdir(mode=0o700)
    with closing(AgentLock(directory)) if another else nullcontext():
        launch._collect(SimpleNamespace(wait=lambda: code), directory)
    text = f"the agent ended with exit code {code} and nobody reads the rings; 'hicache-obs agent --dir {directory}'"
    assert (text in caplog.text) is told
    assert bool(caplog.text) is told
