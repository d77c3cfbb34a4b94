"""A test aid: raise when the host thread touches a pool tensor outside ``launch``. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hicache_obs.errors import StreamError
from hicache_obs.streams.launching import in_launch
from hicache_obs.streams.protocol import Device

_METADATA_ONLY: Final = ("aten::record_stream", "aten::is_pinned")
"""Operators that are no views but read no element either."""


class PoolGuard(TorchDispatchMode):
    """Context manager: an operator on the storage of one of ``tensors``, outside ``launch``, raises StreamError.

    Views are free: slicing a pool touches no element. A dispatch mode is thread-local, so this guards the
    thread that enters it and nobody else's; and it sees torch operators only, not numpy, ``data_ptr``, kernels
    that bypass the dispatcher, or printing a tensor, for which torch suspends all modes.

    Args:
        device: The device whose ``launch`` should be used; named in the message.
        tensors: Pool tensors, any shape and dtype. Their storage is what is guarded.
    """

    def __init__(self, device: Device, tensors: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        self._device = device
        self._tensors = tuple(tensors)  # kept alive, or another storage could take the identity
        self._pools = {_storage(tensor): tuple(tensor.shape) for tensor in self._tensors}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Called by torch for every operator on this thread."""
        if not in_launch() and not _touches_nothing(func):
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, torch.Tensor) and _storage(leaf) in self._pools:
                    raise StreamError(
                        f"{func} touches the pool tensor of shape {self._pools[_storage(leaf)]} outside "
                        f"launch() of device {self._device.name!r}: the access is ordered with nothing"
                    )
        return func(*args, **(kwargs or {}))


def _touches_nothing(func: Any) -> bool:
    return bool(func.is_view) or func.name() in _METADATA_ONLY


def _storage(tensor: torch.Tensor) -> int:
    """Identity of the storage: views of a tensor share it."""
    return int(tensor.untyped_storage()._cdata)
