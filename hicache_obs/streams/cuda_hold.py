"""Stops a CUDA stream at a point until the host opens it: ``cuStreamWaitValue32`` on a pinned word.

Where the driver call is unavailable the hold is a fixed delay (``torch.cuda._sleep``) that cannot be opened.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Final, cast

from hicache_obs.streams.cuda_driver import SUCCESS, driver_function

_WAIT_GEQ: Final = 0
"""CU_STREAM_WAIT_VALUE_GEQ: go on once the word is at least the value."""

_SLEEP_CYCLES: Final = 400_000_000
"""About 0.2 s at 2 GHz: longer than a gate needs to be seen, short enough to bound a demo."""


_SETTINGS: Final = {
    "CUDA_MODULE_LOADING": "EAGER",  # a kernel that is loaded at its first launch may wait for all streams
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",  # streams that share a hardware queue stand behind a held one
}
"""What CUDA reads when it starts, so that a hold stops one stream and nobody else."""


def prepare_holds() -> None:
    """Settings without which a hold may stop more than its stream. Before CUDA starts; what is set already stays."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


class Hold:
    """One word that streams wait for. ``opened`` streams pass at once.

    Args:
        module: The torch device module; used for ``_sleep`` only.
    """

    def __init__(self, module: object) -> None:
        self._module = module
        self._wait_value = _driver_wait()
        # The word lives in pinned memory, which the device reads under the same address.
        self._word: Any = None
        if self._wait_value is not None:
            import torch

            self._word = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def enqueue(self, raw_stream: object) -> None:
        """Make later work on ``raw_stream`` wait until ``open``."""
        if self._wait_value is not None:
            handle = ctypes.c_void_p(int(cast(Any, raw_stream).cuda_stream))
            address = ctypes.c_uint64(int(self._word.data_ptr()))
            if self._wait_value(handle, address, ctypes.c_uint32(1), ctypes.c_uint(_WAIT_GEQ)) == SUCCESS:
                return
        module = cast(Any, self._module)
        with module.stream(raw_stream):
            module._sleep(_SLEEP_CYCLES)

    def open(self) -> None:
        """Let waiting streams go on. Does nothing to a fixed delay. Idempotent."""
        if self._word is not None:
            ctypes.c_int32.from_address(int(self._word.data_ptr())).value = 1


def _driver_wait() -> Any:
    """The driver's ``cuStreamWaitValue32``; ``None`` without a driver that has it."""
    return driver_function("cuStreamWaitValue32_v2", ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint)
