"""Memory of the KV cache: device pages, and their copies in host memory.

A pool is storage only. Which page holds what, and who may touch it when, is the business of the allocator, the
radix cache and the streams. After construction every access happens inside a launched function.

What a page holds, per layer, is a matter of the pool's *form*:

====  ==================================================================================================
mha   two buffers, K and V
mla   one buffer, K and V side by side in each token: a single copy moves both
fp8   K and V as float8_e4m3fn, and a float32 scale for each token and head of either: four buffers
====  ==================================================================================================

On the host a buffer lies in one of three *layouts*, by what is contiguous in it:

==================  ==============================================================  ============================
layer-first         ``(layers, pages, tokens, ...)``, as on the device              runs of pages, at one layer
page-first          ``(pages, tokens, layers, ...)``                                one token at all layers
page-first-direct   ``(pages, layers, tokens, ...)``                                one page at one layer, at all
==================  ==============================================================  ============================
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import torch

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.errors import ConfigError, ControllerError
from hicache_obs.records import Access, Mode
from hicache_obs.records import device as device_access

FORMS: Final = ("mha", "mla", "fp8")
HOST_LAYOUTS: Final = ("layer-first", "page-first", "page-first-direct")
FP8: Final = torch.float8_e4m3fn
FP8_DIGITS: Final = 16
"""Integers below it, times a power of two, are exact in ``FP8``: four significant bits."""
_POISON: Final = {torch.float64: 2.0**100, torch.float32: 2.0**40, torch.bfloat16: 2.0**40, torch.float16: 2.0**14}
_CGROUP: Final = Path("/sys/fs/cgroup")
"""Where a container sees its own group (version 2)."""


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Shape of a pool.

    Attributes:
        layers, pages, page_size, heads, head_dim: All at least 1; ``page_size`` counts tokens.
        dtype: Of K and V, as a model reads and writes them.
        form: How they are stored; one of ``FORMS``.
    """

    layers: int
    pages: int
    page_size: int
    heads: int
    head_dim: int
    dtype: torch.dtype = torch.float64
    form: str = "mha"

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ConfigError(f"form: {self.form!r}; expected one of {', '.join(FORMS)}")
        for name in ("layers", "pages", "page_size", "heads", "head_dim"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"{name}: {value}; expected an integer ≥ 1")

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """``(layers, pages, page_size, heads, head_dim)``, of K and of V."""
        return (self.layers, self.pages, self.page_size, self.heads, self.head_dim)

    @property
    def buffers(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Shape and dtype of each buffer; all begin with ``(layers, pages, page_size, heads)``."""
        if self.form == "mla":
            return (((*self.shape[:4], 2 * self.head_dim), self.dtype),)
        if self.form == "fp8":
            scales = (self.shape[:4], torch.float32)
            return ((self.shape, FP8), (self.shape, FP8), scales, scales)
        return ((self.shape, self.dtype), (self.shape, self.dtype))

    @property
    def page_bytes_per_layer(self) -> int:
        """Bytes of one page at one layer, K and V together."""
        return sum(math.prod(shape[2:]) * dtype.itemsize for shape, dtype in self.buffers)

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


class RoundPool(Protocol):
    """What a round of a model needs of the pages of all its layers, whatever pools they are in.

    Attributes:
        layout: Of all layers together. A *slot* is a token's place: ``page * page_size + place in the page``.
    """

    @property
    def layout(self) -> KVLayout:
        """See the class."""

    def partial(self, layer: int) -> int | None:
        """Place of the layer's pool in ``ForwardBatch.partial``; ``None``: it has full attention."""

    def window(self, layer: int) -> int:
        """Tokens that the layer attends to, itself included; 0: all."""

    def state(self, layer: int) -> bool:
        """Whether the layer has a state instead of attention."""

    def segments(self) -> Sequence[tuple[int, int]]:
        """Layers of each segment of a round that consumes no load-back, half-open, in order."""

    def touched(self, batch: ForwardBatch, first: int, end: int) -> tuple[tuple[int, int], tuple[Access, ...]]:
        """What a segment of ``batch`` at layers ``first <= layer < end`` says that it touches, and at which layers."""

    def read(self, part: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """``(n, heads, head_dim)`` of ``layout.dtype``: K (``part`` 0) or V (1) of ``(n,) int64`` slots."""

    def read_pages(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, ``(n, page_size, heads, head_dim)`` each, of ``(n,) int64`` pages."""

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V, ``(n, heads, head_dim)`` of ``layout.dtype``, in ``(n,) int64`` slots, each named once."""

    def write_pages(self, layer: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V, ``(n, page_size, heads, head_dim)``, in ``(n,) int64`` pages, each named once."""


class DevicePool:
    """KV pages on the device.

    Construction blocks until the pages are filled; that is the only device work outside a launched function.
    All methods are for launched functions. A *slot* is a token's place: ``page * page_size + place in the page``; a
    *place* is a slot at a layer: ``layer * pages * page_size + slot``.

    Attributes:
        layout: Its shape.
        buffers: As ``layout.buffers``, on the device, contiguous; filled with ``poison``.
        k, v: ``(layers, pages, page_size, heads, head_dim)`` of ``layout.dtype``, on the device: the two buffers, or
            views of the one. Form fp8 has none.
    """

    def __init__(self, layout: KVLayout, torch_device: str | torch.device) -> None:
        device = torch.device(torch_device)
        available = host_available_bytes() if device.type == "cpu" else _device_available_bytes(device)
        self.layout = layout
        self.buffers = _filled(
            layout,
            lambda shape, dtype: torch.empty(shape, dtype=dtype, device=device),
            flag=f"--device-pages {layout.pages}",
            needed=layout.pool_bytes,
            available=available,
        )
        self._places = tuple(buffer.flatten(0, 2) for buffer in self.buffers)
        self._layers = tuple(zip(*(buffer.flatten(1, 2).unbind() for buffer in self.buffers), strict=True))
        synchronize(device)

    @property
    def k(self) -> torch.Tensor:
        """See the class."""
        return _half(self.layout, self.buffers, 0)

    @property
    def v(self) -> torch.Tensor:
        """See the class."""
        return _half(self.layout, self.buffers, 1)

    def partial(self, layer: int) -> int | None:
        """See ``RoundPool``: every layer has full attention."""
        return None

    def window(self, layer: int) -> int:
        """See ``RoundPool``."""
        return 0

    def state(self, layer: int) -> bool:
        """See ``RoundPool``."""
        return False

    def segments(self) -> Sequence[tuple[int, int]]:
        """See ``RoundPool``: one."""
        return [(0, self.layout.layers)]

    def touched(self, batch: ForwardBatch, first: int, end: int) -> tuple[tuple[int, int], tuple[Access, ...]]:
        """See ``RoundPool``."""
        return (first, end), (device_access(Mode.READ, batch.read_pages), device_access(Mode.WRITE, batch.write_pages))

    def read(self, part: int, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """``(n, heads, head_dim)`` of ``layout.dtype``: K (``part`` 0) or V (1) of ``(n,) int64`` slots."""
        return self._read(self._layers[layer], part, slots)

    def read_places(self, part: int, places: torch.Tensor) -> torch.Tensor:
        """``read`` of ``(n,) int64`` places: at several layers at once."""
        return self._read(self._places, part, places)

    def read_pages(self, layer: int, pages: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V, ``(n, page_size, heads, head_dim)`` each, of ``(n,) int64`` pages."""
        if self.layout.form != "fp8":
            return self.k[layer].index_select(0, pages), self.v[layer].index_select(0, pages)
        size = self.layout.page_size
        slots = (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
        k, v = (self.read(part, layer, slots).unflatten(0, (-1, size)) for part in (0, 1))
        return k, v

    def write_pages(self, layer: int, pages: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """See ``RoundPool``."""
        size = self.layout.page_size
        slots = (pages[:, None] * size + torch.arange(size, device=pages.device)).flatten()
        self.write(layer, slots, k.flatten(0, 1), v.flatten(0, 1))

    def move(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """Copy ``(n,) int64`` pages ``old`` to pages ``new``, at all layers."""
        for buffer in self.buffers:
            stored = buffer.view(torch.uint8) if buffer.dtype is FP8 else buffer
            stored.index_copy_(1, new, stored.index_select(1, old))

    def write(self, layer: int, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store K and V, ``(n, heads, head_dim)`` of ``layout.dtype``, in ``(n,) int64`` slots, each named once.

        Form fp8 scales each token and head by a power of two, so that values of four significant bits are exact.
        """
        self._write(self._layers[layer], slots, k, v)

    def write_places(self, places: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        """``write`` in ``(n,) int64`` places: at several layers at once."""
        self._write(self._places, places, k, v)

    def _read(self, buffers: tuple[torch.Tensor, ...], part: int, rows: torch.Tensor) -> torch.Tensor:
        if self.layout.form == "mha":
            return buffers[part].index_select(0, rows)
        if self.layout.form == "mla":
            start = part * self.layout.head_dim
            return buffers[0].narrow(-1, start, self.layout.head_dim).index_select(0, rows)
        # Bytes are gathered: not every device has an index kernel for float8.
        digits = buffers[part].view(torch.uint8).index_select(0, rows).view(FP8)
        return digits.to(self.layout.dtype) * buffers[2 + part].index_select(0, rows)[..., None]

    def _write(self, buffers: tuple[torch.Tensor, ...], rows: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
        if self.layout.form == "mha":
            buffers[0].index_copy_(0, rows, k)
            buffers[1].index_copy_(0, rows, v)
        elif self.layout.form == "mla":
            buffers[0].index_copy_(0, rows, torch.cat((k, v), -1))
        else:
            for part, values in enumerate((k, v)):
                largest = values.abs().amax(-1).clamp_min(1.0)
                scales = torch.exp2(torch.floor(torch.log2(largest)) - 3.0)
                digits = (values / scales[..., None]).to(FP8).view(torch.uint8)
                buffers[part].view(torch.uint8).index_copy_(0, rows, digits)
                buffers[2 + part].index_copy_(0, rows, scales.to(torch.float32))


class HostPool:
    """KV pages in host memory: the second tier.

    Attributes:
        layout: Its shape.
        pinned: Whether the memory is page-locked, as asynchronous copies need.
        arrangement: One of ``HOST_LAYOUTS``.
        buffers: Views shaped as a device pool's buffers, whatever the arrangement; in host memory.
        k, v: As ``DevicePool``, in host memory.
    """

    def __init__(self, layout: KVLayout, *, pinned: bool, arrangement: str = "layer-first") -> None:
        if pinned and not torch.cuda.is_available():
            raise ConfigError("pinned: True; page-locked host memory needs a CUDA device, and none is usable here")
        if arrangement not in HOST_LAYOUTS:
            raise ConfigError(f"--host-layout {arrangement}: unknown; expected one of {', '.join(HOST_LAYOUTS)}")
        needed = layout.pool_bytes
        if pinned:
            needed = sum(_power_of_two(math.prod(shape) * dtype.itemsize) for shape, dtype in layout.buffers)
        self.layout = layout
        self.pinned = pinned
        self.arrangement = arrangement
        self.buffers = _filled(
            layout,
            lambda shape, dtype: _arranged(shape, dtype, arrangement, pinned=pinned),
            flag=f"--host-pages {layout.pages}",
            needed=needed,
            available=host_available_bytes(),
        )

    @property
    def k(self) -> torch.Tensor:
        """See the class."""
        return _half(self.layout, self.buffers, 0)

    @property
    def v(self) -> torch.Tensor:
        """See the class."""
        return _half(self.layout, self.buffers, 1)


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


def _half(layout: KVLayout, buffers: tuple[torch.Tensor, ...], part: int) -> torch.Tensor:
    if layout.form == "fp8":
        raise ControllerError("a pool of form fp8 has no K and V of one dtype; read it by slots or pages")
    return buffers[part] if layout.form == "mha" else buffers[0].chunk(2, -1)[part]


def _arranged(shape: tuple[int, ...], dtype: torch.dtype, arrangement: str, *, pinned: bool) -> torch.Tensor:
    """A view of ``shape``, which begins with layers, pages and tokens, of memory in another order."""
    order = {"layer-first": (0, 1, 2), "page-first": (1, 2, 0), "page-first-direct": (1, 0, 2)}[arrangement]
    stored = torch.empty([*(shape[axis] for axis in order), *shape[3:]], dtype=dtype, pin_memory=pinned)
    return stored.permute(*(order.index(axis) for axis in range(3)), *range(3, len(shape)))


def _filled(
    layout: KVLayout,
    empty: Callable[[tuple[int, ...], torch.dtype], torch.Tensor],
    *,
    flag: str,
    needed: int,
    available: int,
) -> tuple[torch.Tensor, ...]:
    """The layout's buffers, poisoned, or ConfigError before anything is allocated."""
    message = f"{flag}: the pool needs {_gib(needed)}, {_gib(available)} are available"
    if needed > available:
        raise ConfigError(message)
    try:
        buffers = [empty(shape, dtype) for shape, dtype in layout.buffers]
    except (RuntimeError, MemoryError) as error:  # another process was faster, or a limit nobody publishes
        raise ConfigError(f"{message}, but the allocation failed: {error}") from error
    return tuple(buffer.fill_(poison(buffer.dtype)) for buffer in buffers)


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
