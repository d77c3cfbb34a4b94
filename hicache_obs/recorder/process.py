"""Names a process for good: a process id alone is used again, and counts only inside its own namespace."""

from __future__ import annotations

import os
from pathlib import Path


def process_start(pid: int) -> int | None:
    """When process ``pid`` was started, clock ticks since boot; ``None`` if it is not running.

    A process that has ended and was not waited for yet is not running. Source: proc_pid_stat(5), fields state and
    starttime.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return None
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = stat[stat.rindex(b")") + 2 :].split()
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def pid_namespace() -> int:
    """Inode number of the namespace in which this process's ids count; 0 if the system does not tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0
