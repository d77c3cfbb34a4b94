"""The plugin, loaded as a scheduler does it, and what is to go wrong in it."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

from sglang.srt.plugins import load_plugins

from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.sglang import forwards, install, transfers
from hicache_obs.sglang.session import Session


def fault() -> str:
    """What is to go wrong in this process."""
    return os.environ.get("HARNESS_FAULT", "")


def break_every_hook() -> None:
    """Every hook raises from now on: in place of what it would do, and again when the engine's call has returned."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise ZeroDivisionError("a hook that fails")

    for name in ("SGLANG_ADAPTERS", "CPU_ADAPTERS", "EXTRA_ADAPTERS"):
        rows = getattr(install, name)
        broken = (row if row.direct else replace(row, before=fail, after=fail, failed=fail) for row in rows)
        setattr(install, name, type(rows)(broken))
    # Whole hooks keep the promises themselves: it is what they call that fails.
    ServerRecorder.put = Session.event = transfers._first_of_layers = forwards._before_forward = fail


def load() -> None:
    """Load the plugins as a scheduler does, for this process and its forks."""
    if fault() == "hooks":
        break_every_hook()
    load_plugins()
