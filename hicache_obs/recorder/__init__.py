"""Everything that runs inside an observed process: ring, NVTX ranges, event timing, stream and event hooks."""

from hicache_obs.recorder.counters import RecorderCounters
from hicache_obs.recorder.nvtx_ranges import RangeName, Ranges, RangeStatus, open_ranges
from hicache_obs.recorder.recorded import RecordedDevice, observe
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.recorder.ring_directory import RingName, create_ring, list_rings, open_ring_directory
from hicache_obs.recorder.sink import RecordSink

__all__ = [
    "RangeName",
    "RangeStatus",
    "Ranges",
    "RecordSink",
    "RecordedDevice",
    "Recorder",
    "RecorderCounters",
    "RingName",
    "RingWriter",
    "create_ring",
    "list_rings",
    "observe",
    "open_ranges",
    "open_ring_directory",
]
