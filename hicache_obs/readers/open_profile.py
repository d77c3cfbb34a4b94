"""``open_profile``: a profiler's file of any kind, told apart by its contents."""

from __future__ import annotations

import mmap
import os
from codecs import BOM_UTF8
from pathlib import Path
from typing import Final

from hicache_obs.readers.nsys_report import exported, is_report
from hicache_obs.readers.profile import Profile
from hicache_obs.readers.trace_file import first_bytes

SQLITE: Final = b"SQLite format 3\x00"
GZIP: Final = b"\x1f\x8b"
EVENTS: Final = b'"traceEvents"'


def open_profile(path: str | os.PathLike[str]) -> Profile | None:
    """The profile in an Nsight Systems report or export, or a torch.profiler trace; ``None`` if it is none of these.

    Raises:
        TraceError: It is one, but cannot be read; or no file at all.
    """
    target = Path(path)
    if os.path.isdir(target):
        if any(os.path.isfile(target / f"StringIds{suffix}") for suffix in (".parquet", ".arrow")):
            from hicache_obs.readers.nsys import read_nsys

            return read_nsys(target)
        return None
    if is_report(target):
        from hicache_obs.readers.nsys import read_nsys

        with exported(target) as export:
            profile = read_nsys(export)
        profile.source = str(target)
        return profile
    start = first_bytes(target, 64).removeprefix(BOM_UTF8)
    if start.startswith(SQLITE):
        from hicache_obs.readers.nsys import read_nsys

        return read_nsys(target)
    if start.startswith(GZIP) or start.lstrip()[:1] == b"[" or (start.lstrip()[:1] == b"{" and _has_events(target)):
        from hicache_obs.readers.kineto import read_kineto

        return read_kineto(target)
    return None


def _has_events(path: Path) -> bool:
    """Whether a JSON file has the key of a Chrome trace: a scenario is JSON too."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return data.find(EVENTS) >= 0
