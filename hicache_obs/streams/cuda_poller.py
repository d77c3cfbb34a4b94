"""What a thread of ours in an engine's process does before it asks for the first event: it becomes a harmless one.

A new thread's current device is the first one, and its first call of the CUDA runtime makes a context there: half a
gigabyte, on a GPU that belongs to another rank. And while any thread captures a graph in CUDA's default mode, another
thread's query of an event is refused and the capture is broken with it, unless that other thread has said before that
it minds its own captures only (``cuThreadExchangeStreamCaptureMode`` in the driver's manual).
"""

from __future__ import annotations

import ctypes
from typing import Final

from hicache_obs.errors import StreamError
from hicache_obs.streams.cuda_driver import SUCCESS, driver_function

_EXCHANGE: Final = "cuThreadExchangeStreamCaptureMode"
_THREAD_LOCAL: Final = 1
"""CU_STREAM_CAPTURE_MODE_THREAD_LOCAL: captures of other threads are no concern of this one."""


def become_poller(device_index: int) -> None:
    """Make the calling thread one that may query events beside an engine. Once per thread, before its first query.

    Args:
        device_index: The device whose events it asks for.

    Raises:
        StreamError: The driver cannot be told to leave captures alone (ROCm's cannot): this thread must not ask.
    """
    import torch

    exchange = driver_function(_EXCHANGE, ctypes.POINTER(ctypes.c_int))
    if exchange is None:
        raise StreamError(f"the driver has no {_EXCHANGE}: asking for events might break the capture of a graph")
    torch.cuda.set_device(device_index)  # first: the next call is made in the context of the current device
    mode = ctypes.c_int(_THREAD_LOCAL)
    code = exchange(ctypes.byref(mode))
    if code != SUCCESS:
        raise StreamError(f"{_EXCHANGE} failed with CUDA error {code}: asking for events might break a capture")
