"""One stream protocol over three devices: ``cuda``, ``threads`` and ``virtual``. Importing this imports no torch."""

from hicache_obs.streams.cost import CostModel
from hicache_obs.streams.cuda import CudaDevice
from hicache_obs.streams.launching import in_launch
from hicache_obs.streams.open import DEVICES, open_device
from hicache_obs.streams.protocol import Device, Event, Gate, Probe, Stream
from hicache_obs.streams.schedule import SCHEDULES, Board, Queued, Schedule
from hicache_obs.streams.threads import ThreadsDevice
from hicache_obs.streams.virtual import VirtualDevice

__all__ = [
    "DEVICES",
    "SCHEDULES",
    "Board",
    "CostModel",
    "CudaDevice",
    "Device",
    "Event",
    "Gate",
    "Probe",
    "Queued",
    "Schedule",
    "Stream",
    "ThreadsDevice",
    "VirtualDevice",
    "in_launch",
    "open_device",
]
