"""``open_device``: a device by name."""

from __future__ import annotations

from typing import Final

from hicache_obs.errors import ConfigError
from hicache_obs.streams.cost import CostModel
from hicache_obs.streams.cuda import CudaDevice
from hicache_obs.streams.cuda_hold import prepare_holds
from hicache_obs.streams.protocol import Device
from hicache_obs.streams.schedule import SCHEDULES
from hicache_obs.streams.threads import ThreadsDevice
from hicache_obs.streams.virtual import VirtualDevice

DEVICES: Final = ("auto", "cuda", "threads", "virtual")
"""Names ``open_device`` knows; ``auto`` is ``cuda`` where torch has one, else ``threads``."""


def open_device(name: str, *, schedule: str = "adversarial", seed: int = 0, cost: CostModel | None = None) -> Device:
    """A new device. Close it when done.

    Args:
        name: One of ``DEVICES``.
        schedule: One of ``SCHEDULES``; used by ``virtual`` alone, checked always.
        seed: Of the ``random`` schedule.
        cost: What work costs on ``virtual``; default: ``CostModel()``.

    Raises:
        ConfigError: An unknown name or schedule, or ``cuda`` without a CUDA device.
    """
    if name not in DEVICES:
        raise ConfigError(f"device {name!r}: must be one of {', '.join(DEVICES)}")
    if schedule not in SCHEDULES:
        raise ConfigError(f"schedule {schedule!r}: must be one of {', '.join(SCHEDULES)}")
    if name == "virtual":
        return VirtualDevice(schedule, seed=seed, cost=cost)
    if name != "threads":
        prepare_holds()
    if name == "threads" or (name == "auto" and not _has_cuda()):
        return ThreadsDevice()
    if not _has_cuda():
        raise ConfigError("device 'cuda': torch finds no CUDA device here; use 'auto', 'threads' or 'virtual'")
    return CudaDevice()


def _has_cuda() -> bool:
    """Whether torch is installed and has a CUDA device. Imports torch."""
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()
