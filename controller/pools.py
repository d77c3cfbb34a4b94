"""Memory of the KV cache: device pages, and their copies in host memory.

A pool is storage only. Which page holds what, and who may touch it when, is the business of the allocator, the
radix cache and the streams. After construction every access happens inside a launched function.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from hicache_obs.errors import ConfigError

_POISON: Final = {torch.float64: 2.0**100, torch.float32: 2.0**40, torch.bfloat16: 2.0**40, torch.float16: 2.0**14}
_CGROUP: Final = Path("/sys/fs/cgroup")
"""Where a container sees its own group (version 2)."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a pool.

    Attributes:
        layers, pages, page_size, heads, head_dim: All at least 1; ``page_size`` counts tokens.
        dtype: Of K and V.
    """

    layers: int
    pages: int
    page_size: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float64

    def __post_init__(self) -> None:
        for name in ("layers", "pages", "page_size", "heads", "head_dim"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: {value}; expected an integer ≥ 1")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, pages, page_size, heads, head_dim)``, of K and of V."""
        return (self.layers, self.pages, self.page_size, self.heads, self.head_dim)

    @property
    def page_bytes_per_layer(self) -> int:
        """Bytes of one page at one layer, K and V together."""
        return 2 * self.page_size * self.heads * self.head_dim * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        """Bytes of one page at all layers, K and V together."""
        return self.layers * self.page_bytes_per_layer

    @property
    def pool_bytes(self) -> int:
        """Bytes of all pages."""
        return self.pages * self.page_bytes


def poison(dtype: torch.dtype) -> float:
    """What never written memory of a pool holds.

    Finite on purpose: unused cells of a page table point at page 0, a masked position has weight 0, and
    0 × NaN would spoil a correct result. Far larger than any activation, so that an unmasked read changes the
    output beyond doubt.
    """
    return _POISON.get(dtype, 2.0**6)


class DevicePool:
    """KV pages on the device.

    Construction blocks until the pages are filled; that is the only device work outside a launched function.

    Attributes:
        layout: Its shape.
        k, v: ``(layers, pages, page_size, heads, head_dim)`` of ``layout.dtype``, on the device, contiguous;
            filled with ``poison``.
    """

    def __init__(self, layout: KVLayout, torch_device: str | torch.device) -> None:
        device = torch.device(torch_device)
        available = host_available_bytes() if device.type == "cpu" else _device_available_bytes(device)
        self.layout = layout
        self.k, self.v = _filled(
            lambda: torch.empty(layout.shape, dtype=layout.dtype, device=device),
            flag=f"--device-pages {layout.pages}",
            needed=layout.pool_bytes,
            available=available,
        )
        synchronize(device)


class HostPool:
    """KV pages in host memory: the second tier.

    Attributes:
        layout: Its shape.
        pinned: Whether the memory is page-locked, as asynchronous copies need.
        k, v: As ``DevicePool``, in host memory.
    """

    def __init__(self, layout: KVLayout, *, pinned: bool) -> None:
        if pinned and not torch.cuda.is_available():
            raise ConfigError("pinned: True; page-locked host memory needs a CUDA device, and none is usable here")
        needed = 2 * _power_of_two(layout.pool_bytes // 2) if pinned else layout.pool_bytes
        self.layout = layout
        self.pinned = pinned
        self.k, self.v = _filled(
            lambda: torch.empty(layout.shape, dtype=layout.dtype, pin_memory=pinned),
            flag=f"--host-pages {layout.pages}",
            needed=needed,
            available=host_available_bytes(),
        )


def synchronize(device: torch.device) -> None:
    """Block until setup work on ``device`` is done: streams made later do not wait for the default stream."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


def host_available_bytes() -> int:
    """Host memory this process can still get: the kernel's estimate, or what the memory cgroup leaves if less."""
    available = _meminfo_available_bytes()
    try:
        limit = int((_CGROUP / "memory.max").read_text())
        used = int((_CGROUP / "memory.current").read_text())
        cache = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
        available = min(available, limit - used + int(cache.get("inactive_file", 0)))
    except (OSError, ValueError):  # no such group, or no limit ("max")
        pass
    return max(available, 0)


def _meminfo_available_bytes() -> int:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _device_available_bytes(device: torch.device) -> int:
    free, _total = torch.get_device_module(device).mem_get_info(device)
    return int(free)


def _power_of_two(size_bytes: int) -> int:
    """What torch's pinned allocator really takes for one tensor: it rounds up to a power of two."""
    return 1 << (size_bytes - 1).bit_length()


def _filled(
    empty: Callable[[], torch.Tensor], *, flag: str, needed: int, available: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Two poisoned tensors, or ConfigError before anything is allocated."""
    message = f"{flag}: the pool needs {_gib(needed)}, {_gib(available)} are available"
    if needed > available:
        raise ConfigError(message)
    try:
        k, v = empty(), empty()
    except (RuntimeError, MemoryError) as error:  # another process was faster, or a limit nobody publishes
        raise ConfigError(f"{message}, but the allocation failed: {error}") from error
    value = poison(k.dtype)
    return k.fill_(value), v.fill_(value)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
