"""``open_trace``: a trace file of any kind, told apart by its contents."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from hicache_obs.errors import TraceError
from hicache_obs.readers.ring import read_ring
from hicache_obs.readers.trace_file import size_of
from hicache_obs.records import RING_MAGIC
from hicache_obs.trace import Trace

_ARROW_STREAM: Final = b"\xff\xff\xff\xff"


def open_trace(path: str | os.PathLike[str], *, rank: int | None = None) -> Trace:
    """The trace in a ring file, a journal (directory or segment) or a scenario. Nothing is changed.

    Args:
        path: The file or directory.
        rank: Which rank of a journal directory; may be left out if there is only one.

    Raises:
        TraceError: It is none of these, or cannot be read.
    """
    target = Path(path)
    if target.is_dir():
        from hicache_obs.readers.journal import read_journal  # pyarrow takes 0.1 s to import; others do without

        return read_journal(target, rank=rank)
    size_of(target)
    try:
        with target.open("rb") as file:
            start = file.read(64)
    except OSError as error:
        raise TraceError(f"{target}: {error.strerror}") from None
    if start.startswith(RING_MAGIC):
        return read_ring(target)
    if start.startswith(_ARROW_STREAM):
        from hicache_obs.readers.journal import read_journal

        return read_journal(target)
    if start.lstrip().startswith(b"{"):
        from hicache_obs.readers.scenario import read_scenario  # the only reader that needs msgspec

        return read_scenario(target)
    raise TraceError(
        f"{target}: not a ring file, a journal (directory or .arrows segment) or a scenario (JSON); "
        f"it begins with {start[:16]!r}"
    )
