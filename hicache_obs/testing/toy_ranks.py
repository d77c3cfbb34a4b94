"""Ranks without an engine, for tests of what watches ranks: they agree on numbers, and one may come to a bad end.

Imports no torch: processes that run this start quickly.
"""

from __future__ import annotations

import os
import signal
import threading
from dataclasses import dataclass

from hicache_obs.controller.decision_log import DecisionLog
from hicache_obs.controller.rank_processes import Links
from hicache_obs.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ToyTask:
    """What a toy rank does.

    Attributes:
        names: Of all ranks.
        timeout_s: How long it waits for another.
        entries: So many numbers it agrees on.
        end: What it does then, before one more: nothing, ``kill`` or ``stop`` its process, ``exit``, ``refuse`` its
            input, ``fail``, or ``hang``.
    """

    names: tuple[str, ...]
    timeout_s: float
    entries: int = 3
    end: str = ""


def toy_rank(number: int, links: Links, task: ToyTask) -> str:
    """Run one toy rank; returns the digest of its log. For ``RankProcesses``."""
    log = DecisionLog(task.names, number, links, timeout_s=task.timeout_s)
    for entry in range(task.entries):
        log.agree("acks", [number, entry])
    if task.end == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif task.end == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif task.end == "exit":
        os._exit(3)
    elif task.end == "refuse":
        raise ConfigError("--storage nowhere: cannot be made")
    elif task.end == "fail":
        raise LookupError("nobody expected this")
    elif task.end == "hang":
        threading.Event().wait()
    log.agree("end", [])
    return log.digest
