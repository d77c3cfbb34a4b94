"""Starts the node's agent beside an observed process; the agent itself sees to it that there is only one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Final

from hicache_obs import __version__
from hicache_obs.recorder.agent_lock import running_agent
from hicache_obs.recorder.ring_directory import open_ring_directory
from hicache_obs.records import RING_VERSION

_LOG: Final = logging.getLogger("hicache_obs.sglang")


def start_agent() -> None:
    """Start ``hicache-obs agent`` for the ring directory, detached from this process. Never raises.

    Nothing is started if one runs; of two that start at the same moment one ends at once. One that runs and cannot
    read this process's ring is told of in the log: it is of another version, and somebody has to restart it.
    """
    try:
        directory = open_ring_directory()
        agent = running_agent(directory)
        if agent:
            _compare(agent)
            return
        environment = {name: value for name, value in os.environ.items() if name != "HICACHE_OBS"}
        process = subprocess.Popen(
            [sys.executable, "-m", "hicache_obs", "agent", "--dir", str(directory)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env=environment,
        )
        # Somebody has to collect it when it ends before this process does.
        threading.Thread(target=_collect, args=(process, directory), name="hicache-obs-agent-wait", daemon=True).start()
    except Exception as error:  # noqa: BLE001 the server comes first
        _LOG.warning("hicache-obs: the agent was not started: %s", error)


def _collect(process: subprocess.Popen[bytes], directory: Path) -> None:
    """Wait for the agent's end; one that failed, and not because another one runs, is told of."""
    code = process.wait()
    if code and not running_agent(directory):
        _LOG.warning(
            "hicache-obs: the agent ended with exit code %d and nobody reads the rings; "
            "'hicache-obs agent --dir %s' in this environment says why",
            code,
            directory,
        )


def _compare(agent: dict[str, str]) -> None:
    layout = agent.get("layout", str(RING_VERSION))
    if layout != str(RING_VERSION):
        _LOG.warning(
            "hicache-obs: the agent that runs here (process %s, version %s) reads ring layout %s, this process writes "
            "%d: it is not watched until an agent of version %s takes over",
            agent["pid"],
            agent.get("version", "unknown"),
            layout,
            RING_VERSION,
            __version__,
        )
