"""Where the ring files of a node's processes are, and how they are called: what writers and agent agree on.

One directory per user and node, from the setting ``ring_dir``; in it one file per process and worker,
``<role>-dp<d>-pp<p>-tp<t>.<pid>.ring``. The directory is 0700 and the files 0600: a ring tells which pages a
server reuses, and whoever can write to it decides what the agent reads.
"""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache_obs.config import read_text
from hicache_obs.errors import ConfigError
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.records import Ranks

SUFFIX: Final = ".ring"
_ROLE: Final = re.compile(r"[a-z][a-z0-9_]{0,31}")
_NAME: Final = re.compile(
    rf"({_ROLE.pattern})-dp(\d{{1,9}})-pp(\d{{1,9}})-tp(\d{{1,9}})\.(\d{{1,10}})(?:-(\d{{1,9}}))?\.ring"
)


@dataclass(frozen=True, slots=True)
class RingName:
    """What the name of a ring file says.

    Attributes:
        role: What the process does, such as ``scheduler`` or ``demo``.
        ranks: Which worker of a server it is.
        pid: Its process id, in its own namespace.
        number: 1 for the first ring of such a process; more where ids were used again.
    """

    role: str
    ranks: Ranks
    pid: int
    number: int = 1

    def __str__(self) -> str:
        again = f"-{self.number}" if self.number > 1 else ""
        return f"{self.role}-dp{self.ranks.dp}-pp{self.ranks.pp}-tp{self.ranks.tp}.{self.pid}{again}{SUFFIX}"

    @classmethod
    def parse(cls, name: str) -> RingName | None:
        """What ``name`` says, ``None`` if it is not the name of a ring."""
        match = _NAME.fullmatch(name)
        if match is None:
            return None
        ranks = Ranks(tp=int(match[4]), pp=int(match[3]), dp=int(match[2]))
        return cls(match[1], ranks, int(match[5]), int(match[6] or 1))


def open_ring_directory(directory: str | os.PathLike[str] | None = None, *, create: bool = True) -> Path:
    """The directory of the rings, made if need be and checked: it is nobody else's to write to.

    Args:
        directory: By default what the setting ``ring_dir`` says.
        create: Make it if it does not exist; its parents too.

    Raises:
        ConfigError: It is a symbolic link or no directory, belongs to another user, can be written to by group or
            others, or cannot be made.
    """
    path = Path(read_text("ring_dir")[0] if directory is None else directory)
    try:
        if create and not os.path.lexists(path):
            os.makedirs(path, mode=0o700, exist_ok=True)
        status = os.lstat(path)
    except FileNotFoundError as error:
        hint = _CHOOSE if create else "has an observed process run here?"
        raise ConfigError(f"ring directory {path}: {error.strerror}; {hint}") from None
    except OSError as error:
        raise ConfigError(f"ring directory {path}: {error.strerror}; {_CHOOSE}") from None
    if stat.S_ISLNK(status.st_mode):
        raise ConfigError(f"ring directory {path}: is a symbolic link, which others may turn; {_CHOOSE}")
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"ring directory {path}: is not a directory; {_CHOOSE}")
    if status.st_uid != os.geteuid():
        owner, own = status.st_uid, os.geteuid()
        raise ConfigError(f"ring directory {path}: belongs to user {owner}, this process is user {own}; {_CHOOSE}")
    if status.st_mode & 0o022:
        mode = stat.S_IMODE(status.st_mode)
        mend = "name a folder inside it" if mode & stat.S_ISVTX else "chmod 700 it"
        raise ConfigError(f"ring directory {path}: others may write to it (mode {mode:04o}); {mend}, or {_CHOOSE}")
    return path


def create_ring(
    role: str,
    ranks: Ranks = Ranks(),  # noqa: B008 frozen
    *,
    directory: str | os.PathLike[str] | None = None,
    **options: Any,
) -> RingWriter:
    """A new ring of this process in the ring directory, where the node's agent finds it.

    Args:
        role: What this process does: a lower-case letter, then up to 31 letters, digits or ``_``.
        ranks: Which worker of a server it is.
        directory: By default what the setting ``ring_dir`` says; made if it does not exist.
        **options: ``RingWriter``'s ``slots``, ``arena_words``, ``clock`` and ``mode``.

    Raises:
        ConfigError: The role, the directory or an option is not allowed, or the file cannot be made.
    """
    if _ROLE.fullmatch(role) is None:
        raise ConfigError(f"ring role {role!r}: must be a lower-case letter and up to 31 letters, digits or '_'")
    folder = open_ring_directory(directory)
    number = 1
    while True:
        path = folder / str(RingName(role, ranks, os.getpid(), number))
        if not path.exists():
            try:
                return RingWriter(path, ranks=ranks, **options)
            except ConfigError:
                # Another container's process with the same id may have been faster.
                if not path.exists():
                    raise
        number += 1


def list_rings(directory: Path) -> list[Path]:
    """Ring files in ``directory``, in the order of their names; links and other things are no rings.

    Raises:
        OSError: The directory cannot be read.
    """
    with os.scandir(directory) as entries:
        return sorted(
            directory / entry.name
            for entry in entries
            if entry.name.endswith(SUFFIX) and entry.is_file(follow_symlinks=False)
        )


_CHOOSE: Final = "choose another with HICACHE_OBS_DIR or --dir"
