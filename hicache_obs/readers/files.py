"""``require_file``: a path that may be opened and read to its end."""

from __future__ import annotations

import stat
from pathlib import Path

from hicache_obs.errors import TraceError


def require_file(path: Path) -> int:
    """The size in bytes of the file at ``path``, links followed.

    Raises:
        TraceError: There is none, or it is a device, pipe or socket: those may block, or never end.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TraceError(f"{path}: {reason}") from None
    if not stat.S_ISREG(found.st_mode):
        raise TraceError(f"{path}: not a regular file")
    return found.st_size
