"""Whether what is called now becomes part of a graph instead of running."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache


def capturing() -> bool:
    """Whether the current stream is being captured into a graph. Never initialises a device."""
    ask = capture_question()
    return ask is not None and ask()


@cache
def capture_question() -> Callable[[], bool] | None:
    """What answers ``capturing``; ``None`` where this torch has no graphs to capture. Asked once per hook."""
    torch = sys.modules.get("torch")
    if torch is None or not (torch.version.cuda or torch.version.hip):
        return None
    cuda = torch.cuda

    def ask() -> bool:
        return bool(cuda.is_initialized() and cuda.is_current_stream_capturing())

    return ask
