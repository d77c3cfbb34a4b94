"""What a worker of this machine does when it starts (``distributed.worker.preload``)."""

from __future__ import annotations

import signal
from typing import Any


def dask_setup(worker: Any) -> None:
    """Leave Ctrl-C, which a terminal sends to all processes of a command, to the one that was started: it ends us.

    Dask calls it in the worker's main thread, by its name.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
