"""Readers: whatever holds a trace becomes records. ``journal`` and ``scenario`` are imported on their own."""

from hicache_obs.readers.open import open_trace
from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.readers.ring_header import RingInfo, set_mode

__all__ = ["RingInfo", "RingReader", "open_trace", "read_ring", "set_mode"]
