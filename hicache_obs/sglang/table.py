"""The adapter table of SGLang: every hooked name, the releases that have it, and what cannot be seen without it."""

from __future__ import annotations

from typing import Final

from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.blind_spots import BLIND_ADAPTERS
from hicache_obs.sglang.forwards import FORWARD_ADAPTERS
from hicache_obs.sglang.linkers import LINKER_ADAPTERS
from hicache_obs.sglang.pages import PAGE_ADAPTERS
from hicache_obs.sglang.storage import STORAGE_ADAPTERS
from hicache_obs.sglang.streams import device_sync_adapter, stream_adapters
from hicache_obs.sglang.tensors import TENSOR_ADAPTERS
from hicache_obs.sglang.transfers import TRANSFER_ADAPTERS

SGLANG_ADAPTERS: Final[tuple[Adapter, ...]] = (
    *PAGE_ADAPTERS,
    *TRANSFER_ADAPTERS,
    *STORAGE_ADAPTERS,
    *LINKER_ADAPTERS,
    *FORWARD_ADAPTERS,
    *BLIND_ADAPTERS,
)
"""Rows that every device shares. 0.5.11 is the first release with plugins; an open range includes unknown ones."""

CUDA_ADAPTERS: Final = (
    *stream_adapters("torch.cuda.Stream", "torch.cuda.Event"),
    device_sync_adapter("torch.cuda.synchronize"),
)
CPU_ADAPTERS: Final = (
    *stream_adapters("torch.cpu.Stream", "torch.cpu.Event", optional=True),
    device_sync_adapter("torch.cpu.synchronize"),
)

__all__ = ["CPU_ADAPTERS", "CUDA_ADAPTERS", "SGLANG_ADAPTERS", "TENSOR_ADAPTERS"]
