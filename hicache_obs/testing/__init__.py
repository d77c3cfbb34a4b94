"""For people who test their own stream code, and for this project's tests."""

from hicache_obs.testing.brute_force import misuses, races
from hicache_obs.testing.explore import Bounds, Execution, Exploration, execute, explore
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
