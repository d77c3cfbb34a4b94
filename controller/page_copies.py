"""How pages get from one pool's buffers into another's: two back ends.

=======  =================================================================================================
kernel   one gather over index tensors, whatever the pages' order: on a GPU a kernel reads or writes the pinned host
         pool through its device address
direct   one copy per run of pages that is contiguous on both sides, sorted by device page so that runs are long; all
         of them are handed over as one batch
=======  =================================================================================================

On a GPU the pinned side has to be read when the copy executes, not when it is issued, so a copy is only ever issued for
a piece that is contiguous on both sides: torch gathers any other on the host, at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from hicache_obs.records import PageIds

IO_BACKENDS: Final = ("kernel", "direct")


@dataclass(frozen=True, slots=True, eq=False)
class PageMap:
    """Which device page belongs to which host page.

    Attributes:
        device_pages, host_pages: ``(n,) int64``, host memory, matching by position.
        device_index, host_index: The same ids as tensors: the first on the device, the second in host memory.
    """

    device_pages: PageIds
    host_pages: PageIds
    device_index: torch.Tensor
    host_index: torch.Tensor


def page_copier(
    io: str, device: Sequence[torch.Tensor], host: Sequence[torch.Tensor], layers: tuple[int, int], *, to_device: bool
) -> Callable[[PageMap], None]:
    """A function that copies the pages of a map at some layers; for launched functions.

    Args:
        io: One of ``IO_BACKENDS``.
        device, host: Buffers of two pools, ``(layers, pages, ...)``, pair by pair of one shape but for the pages.
        layers: Half-open range.
        to_device: From the host pool to the device pool; otherwise the other way.
    """
    first, end = layers
    pairs = [(d[first:end], h[first:end]) for d, h in zip(device, host, strict=True)]
    run = _gather if io == "kernel" else _batch

    def copy(pages: PageMap) -> None:
        for on_device, on_host in pairs:
            run(on_device, on_host, pages, to_device)

    return copy


def _gather(device: torch.Tensor, host: torch.Tensor, pages: PageMap, to_device: bool) -> None:
    if device.dtype.itemsize == 1:  # not every device has an index kernel for float8
        device, host = device.view(torch.uint8), host.view(torch.uint8)
    host_index = pages.host_index
    if device.device.type == "cuda":
        host = mapped(host)
        host_index = host_index.pin_memory().to(device.device, non_blocking=True)
    if to_device:
        device.index_copy_(1, pages.device_index, host.index_select(1, host_index))
    else:
        host.index_copy_(1, host_index, device.index_select(1, pages.device_index))


def _batch(device: torch.Tensor, host: torch.Tensor, pages: PageMap, to_device: bool) -> None:
    order = np.argsort(pages.device_pages)
    targets: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for d, h, n in runs(pages.device_pages[order], pages.host_pages[order]):
        for on_device, on_host in pieces(device[:, d : d + n], host[:, h : h + n]):
            targets.append(on_device if to_device else on_host)
            sources.append(on_host if to_device else on_device)
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


def runs(device_pages: PageIds, host_pages: PageIds) -> list[tuple[int, int, int]]:
    """``(device, host, count)`` runs that are contiguous on both sides, in the order given."""
    if not len(device_pages):
        return []
    breaks = np.flatnonzero((np.diff(device_pages) != 1) | (np.diff(host_pages) != 1)) + 1
    starts = [0, *breaks.tolist()]
    ends = [*breaks.tolist(), len(device_pages)]
    return [(int(device_pages[a]), int(host_pages[a]), b - a) for a, b in zip(starts, ends, strict=True)]


def pieces(a: torch.Tensor, b: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The largest parts of two tensors of one shape that are contiguous in both."""
    if a.is_contiguous() and b.is_contiguous():
        yield a, b
    else:
        for x, y in zip(a.unbind(), b.unbind(), strict=True):
            yield from pieces(x, y)


class _Interface:
    """Pinned host memory as CUDA sees it: page-locked memory has one address on both sides."""

    def __init__(self, tensor: torch.Tensor) -> None:
        size = tensor.dtype.itemsize
        kind = "u" if tensor.dtype is torch.uint8 else "i" if not tensor.dtype.is_floating_point else "f"
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * size for stride in tensor.stride()),
            "typestr": f"{'|' if size == 1 else '<'}{kind}{size}",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }


def mapped(host: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor over the memory of a pinned host tensor, which must outlive it."""
    return torch.as_tensor(_Interface(host), device="cuda")
