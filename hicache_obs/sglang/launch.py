"""Starts the node's agent beside an observed process; the agent itself sees to it that there is only one."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from typing import Final

from hicache_obs.recorder.agent_lock import running_agent
from hicache_obs.recorder.ring_directory import open_ring_directory

_LOG: Final = logging.getLogger("hicache_obs.sglang")


def start_agent() -> None:
    """Start ``hicache-obs agent`` for the ring directory, detached from this process. Never raises.

    Nothing is started if one runs; of two that start at the same moment one ends at once.
    """
    try:
        directory = open_ring_directory()
        if running_agent(directory):
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
        threading.Thread(target=process.wait, name="hicache-obs-agent-wait", daemon=True).start()
    except Exception as error:  # noqa: BLE001 the server comes first
        _LOG.warning("hicache-obs: the agent was not started: %s", error)
