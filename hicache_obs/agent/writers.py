"""Whether the process that writes a ring still runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from hicache_obs.readers.ring_header import RingInfo, read_process
from hicache_obs.recorder.process import pid_namespace, process_start
from hicache_obs.recorder.ring_directory import RingName

SILENT_S: Final = 60.0
"""A writer in another process namespace, whose id says nothing here, counts as ended after so long without a beat."""


def writer_runs(info: RingInfo, *, heartbeat_ns: int, closed: bool) -> bool:
    """Whether the process that made a ring may still append to it.

    Args:
        info: The ring's header.
        heartbeat_ns: When the process last said it is alive, on its host clock.
        closed: It has closed the ring.
    """
    if closed:
        return False
    if info.pid_namespace in (0, pid_namespace()):
        return _runs(info.pid, info.process_start)
    return beat_age_s(info, heartbeat_ns) < SILENT_S


def has_ended(path: Path) -> bool:
    """Whether the process of a ring that cannot be read has surely ended."""
    process = read_process(path)
    if process is None:
        return _never_made(path)
    pid, start, namespace = process
    return namespace == pid_namespace() and not _runs(pid, start)


def _never_made(path: Path) -> bool:
    """Whether a file is the beginning of a ring whose process was killed before there was any: it states nothing, not
    even for a minute, and no process has the id in its name.
    """
    name = RingName.parse(path.name)
    try:
        with path.open("rb") as file:
            empty = file.read(8) in (b"", bytes(8))
        silent_s = time.time() - path.stat().st_mtime
    except OSError:
        return False
    return name is not None and empty and silent_s > SILENT_S and process_start(name.pid) is None


def seems_to_run(path: Path) -> bool:
    """Whether the process of a ring of another version runs, as far as can be told from here."""
    process = read_process(path)
    return process is not None and process[2] in (0, pid_namespace()) and _runs(*process[:2])


def _runs(pid: int, start: int) -> bool:
    started = process_start(pid)
    return started is not None and start in (0, started)


def beat_age_s(info: RingInfo, heartbeat_ns: int) -> float:
    """Seconds since the process of a ring last said it is alive."""
    return (time.time_ns() - info.to_wall_ns(heartbeat_ns)) / 1e9
