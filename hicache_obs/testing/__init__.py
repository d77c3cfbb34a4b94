"""For people who test their own stream code, and for this project's tests."""

from hicache_obs.testing.brute_force import misuses, races
from hicache_obs.testing.history import History
from hicache_obs.testing.recording import RecordingSink

__all__ = ["History", "RecordingSink", "misuses", "races"]
