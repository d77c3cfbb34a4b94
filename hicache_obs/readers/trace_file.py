"""What every reader checks: that a path leads to a file that ends, and that a graph's entries can exist.

Only regular files are read: a pipe or a device may never end, or never begin.
"""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Final

from hicache_obs.errors import TraceError
from hicache_obs.records import IN_ORDER, MAX_AFTER, MAX_NODES

_KINDS: Final = {
    stat.S_IFDIR: "a directory",
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def node_fault(index: int, after: int) -> str:
    """Why a ``GraphNode`` cannot have these fields, empty if it can: a file may name entries that are not there."""
    if not 0 <= index < MAX_NODES:
        return f"entry {index} of a graph; allowed are 0 to {MAX_NODES - 1}"
    if after != IN_ORDER and not 0 <= after < 1 << min(index, MAX_AFTER + 1):
        return f"entry {index} of a graph follows entries {after:#x} as bits; allowed are entries before it"
    return ""


def one_line(error: BaseException) -> str:
    """What an error says, without its further lines."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def entries(directory: Path) -> list[Path]:
    """What is in a directory, by name.

    Raises:
        TraceError: It cannot be listed.
    """
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise TraceError(f"{directory}: {error.strerror}") from None


def first_bytes(path: Path, count: int) -> bytes:
    """The first ``count`` bytes of a regular file, all of a shorter one.

    Raises:
        TraceError: There is none at ``path``, or it cannot be read.
    """
    size_of(path)
    try:
        with path.open("rb") as file:
            return file.read(count)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def size_of(path: Path) -> int:
    """Bytes of a regular file; nothing is opened.

    Raises:
        TraceError: There is none at ``path``; says what is there instead.
    """
    try:
        found = path.stat()
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        raise TraceError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "something else")
        raise TraceError(f"{path}: is {kind}; must be a regular file")
    return found.st_size
