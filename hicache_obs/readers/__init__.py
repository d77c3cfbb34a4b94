"""Readers: whatever holds a trace becomes records. ``hicache_obs.readers.journal`` is imported on its own."""

from hicache_obs.readers.open import open_trace
from hicache_obs.readers.ring import RingInfo, RingReader, read_ring, set_mode
from hicache_obs.readers.scenario import read_scenario

__all__ = ["RingInfo", "RingReader", "open_trace", "read_ring", "read_scenario", "set_mode"]
