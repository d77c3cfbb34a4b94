"""The CUDA driver's own functions, for what torch has none: ``libcuda.so.1``, which torch has loaded before."""

from __future__ import annotations

import ctypes
from typing import Any, Final

SUCCESS: Final = 0
"""CUDA_SUCCESS."""


def driver_function(name: str, *arguments: Any) -> Any:
    """The driver's function of this name, which returns a CUresult; ``None`` without a driver that has it.

    Args:
        name: As the library exports it: with its suffix where the header's name stands for a later version.
        arguments: ctypes types of its arguments.
    """
    try:
        function = getattr(ctypes.CDLL("libcuda.so.1"), name)
    except (OSError, AttributeError):
        return None
    function.argtypes = arguments
    function.restype = ctypes.c_int
    return function
