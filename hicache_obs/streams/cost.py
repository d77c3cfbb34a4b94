"""What work costs on the virtual device, in integer nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Final

from hicache_obs.errors import ConfigError
from hicache_obs.records import Direction, Work

HOST_CALL_NS: Final = 2_000
"""Host time of one protocol call (launch, record, wait, query, synchronize): the order of a CUDA API call."""
FLOOR_NS: Final = 5_000
"""Shortest device operation: about what launching and draining an empty kernel takes."""
KERNEL_BYTES_PER_S: Final = 3_000_000_000_000
"""Kernels and device-to-device copies run at device memory bandwidth; 3 TB/s is an HBM3 part."""
COPY_BYTES_PER_S: Final = 50_000_000_000
"""Copies between host and device cross the bus; 50 GB/s is what PCIe 5.0 x16 gives a pinned copy."""

_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Integer costs, so that a virtual run prints the same numbers on every machine.

    Attributes:
        host_call_ns: See ``HOST_CALL_NS``.
        floor_ns: See ``FLOOR_NS``.
        kernel_bytes_per_s: See ``KERNEL_BYTES_PER_S``.
        copy_bytes_per_s: See ``COPY_BYTES_PER_S``.
    """

    host_call_ns: int = HOST_CALL_NS
    floor_ns: int = FLOOR_NS
    kernel_bytes_per_s: int = KERNEL_BYTES_PER_S
    copy_bytes_per_s: int = COPY_BYTES_PER_S

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            lowest = 0 if field.name == "host_call_ns" else 1
            if value < lowest:
                raise ConfigError(f"CostModel {field.name}={value!r}: must be at least {lowest}")

    def duration_ns(self, work: Work) -> int:
        """Device time of ``work``: its bytes over its bandwidth, rounded up, and never below the floor."""
        on_device = work.direction is None or work.direction is Direction.DEVICE_TO_DEVICE
        bytes_per_s = self.kernel_bytes_per_s if on_device else self.copy_bytes_per_s
        return max(self.floor_ns, -(-work.size_bytes * _NS_PER_S // bytes_per_s))
