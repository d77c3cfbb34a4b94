"""Which agent reads a ring directory: a lock file, held by one process at a time and gone with it."""

from __future__ import annotations

import fcntl
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from hicache_obs import __version__
from hicache_obs.errors import AgentRunning, ConfigError
from hicache_obs.records import RING_VERSION

FILE_NAME: Final = "agent.lock"
_MAX_BYTES: Final = 4096


class AgentLock:
    """The exclusive right to read the rings of a directory. The system takes it back when the process ends.

    Args:
        directory: The ring directory.

    Raises:
        AgentRunning: Another agent has it.
        ConfigError: The file cannot be made.
    """

    def __init__(self, directory: Path) -> None:
        self.path: Final = directory / FILE_NAME
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"agent lock {self.path}: {error.strerror}") from None
        if not self._taken():
            os.close(self._descriptor)
            pid = running_agent(directory).get("pid", "unknown")
            raise AgentRunning(
                f"agent: another agent (process {pid}) reads the rings in {directory}; stop it, or name another --dir"
            ) from None
        self.describe()

    def _taken(self) -> bool:
        for _ in range(10):
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            except OSError:
                time.sleep(0.02)  # somebody may only be asking (``running_agent``)
        return False

    def describe(self, **facts: str) -> None:
        """Leave word of this process for ``hicache-obs status``: its id, which rings it reads, and ``facts``."""
        own = {"pid": str(os.getpid()), "version": __version__, "layout": str(RING_VERSION)}
        text = json.dumps({**own, **facts}).encode()
        with suppress(OSError):  # a full disk: the lock holds without the words
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, text, 0)

    @property
    def holds(self) -> bool:
        """False once the file was removed or replaced: another agent could take what now has its name."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._descriptor)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (ours.st_dev, ours.st_ino)

    def close(self) -> None:
        """Give the right back. Idempotent."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def running_agent(directory: Path) -> dict[str, str]:
    """What the agent that reads ``directory`` says of itself, ``pid`` among it; empty if none runs.

    Any process may ask. The lock is tried and given back at once; an agent that starts in that moment tries again.
    """
    try:
        descriptor = os.open(directory / FILE_NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return {}
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return _facts(os.pread(descriptor, _MAX_BYTES, 0))
        return {}
    finally:
        os.close(descriptor)


def _facts(text: bytes) -> dict[str, str]:
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError):
        facts = {}
    known = facts if isinstance(facts, dict) else {}
    return {"pid": "unknown", **{str(key): value for key, value in known.items() if isinstance(value, str)}}
