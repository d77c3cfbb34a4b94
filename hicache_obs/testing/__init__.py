"""For people who test their own stream code, and for this project's tests.

Names are loaded when they are first used: pytest imports the plugin in this package in every run, of every project,
and must not pay for numpy then.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from hicache_obs.testing.brute_force import misuses, races
    from hicache_obs.testing.exploration import Bounds, Execution, Exploration, execute, explore
    from hicache_obs.testing.history import History
    from hicache_obs.testing.recording import RecordingSink
    from hicache_obs.testing.world import Channel, HostThread, World

__all__ = [
    "Bounds",
    "Channel",
    "Execution",
    "Exploration",
    "History",
    "HostThread",
    "RecordingSink",
    "World",
    "execute",
    "explore",
    "misuses",
    "races",
]

_HOMES: Final = {
    "Bounds": "exploration",
    "Channel": "world",
    "Execution": "exploration",
    "Exploration": "exploration",
    "History": "history",
    "HostThread": "world",
    "RecordingSink": "recording",
    "World": "world",
    "execute": "exploration",
    "explore": "exploration",
    "misuses": "brute_force",
    "races": "brute_force",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
