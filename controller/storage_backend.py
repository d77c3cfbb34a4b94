"""Where stored pages live: a folder, or whatever fsspec has a driver for.

A back end knows names and bytes. It is called by the storage tier's threads, one call at a time for each, and may
raise anything: the tier counts it and goes on without.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any, Final, Protocol

from hicache_obs.config import refuse_password
from hicache_obs.errors import ConfigError
from hicache_obs.whole_file import PARTIALS, replace_file

STALE_S: Final = 3600.0
"""Files of a writer that was killed are removed after so long."""


class StorageBackend(Protocol):
    """Names to bytes."""

    def exists(self, key: str) -> bool:
        """Whether ``read`` would probably find it."""

    def read(self, key: str) -> bytes | None:
        """What was last written under ``key``; ``None`` if nothing was."""

    def write(self, key: str, data: bytes) -> None:
        """Keep ``data`` under ``key``: whole or not at all, also if the process dies."""


class FileBackend:
    """One file per page, in a folder that several processes may share.

    A page is written to a file of its own and renamed, so readers see whole pages only, and a killed writer leaves
    nothing but a partial file, which the next one removes after ``STALE_S``.

    Raises:
        ConfigError: The folder cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder: Final = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"storage {folder}: cannot be made ({error.strerror}); expected a writable folder"
            ) from None
        if not os.access(folder, os.W_OK | os.X_OK):
            raise ConfigError(f"storage {folder}: not writable; expected a writable folder")
        self._sweep()

    def exists(self, key: str) -> bool:
        """See ``StorageBackend.exists``."""
        return self._path(key).exists()

    def read(self, key: str) -> bytes | None:
        """See ``StorageBackend.read``."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: str, data: bytes) -> None:
        """See ``StorageBackend.write``."""
        path = self._path(key)
        path.parent.mkdir(exist_ok=True)
        replace_file(path, data)

    def _path(self, key: str) -> Path:
        return self._folder / key[:2] / key

    def _sweep(self) -> None:
        oldest = time.time() - STALE_S
        for partial in self._folder.glob(f"*/{PARTIALS}"):
            try:
                if partial.stat().st_mtime < oldest:
                    partial.unlink()
            except OSError:  # another process was faster
                pass


class FsspecBackend:
    """Pages in a store that fsspec knows, ``memory://name`` or ``s3://bucket/folder`` for instance.

    Stores of objects write whole objects; where a driver writes files in place, a reader may see a part, which the
    checksum turns into a miss.

    Raises:
        ConfigError: fsspec or the driver is not installed, the URL holds a password, or it cannot be used.
    """

    def __init__(self, url: str) -> None:
        refuse_password(url, "storage")
        try:
            import fsspec
        except ImportError:
            raise ConfigError(f"storage {url}: needs fsspec; install hicache-obs[storage]") from None
        try:
            self._files, self._root = fsspec.core.url_to_fs(url)
            self._files.makedirs(self._root, exist_ok=True)
        except Exception as error:
            raise ConfigError(f"storage {url}: cannot be used ({type(error).__name__}: {error})") from error

    def exists(self, key: str) -> bool:
        """See ``StorageBackend.exists``."""
        return bool(self._files.exists(self._path(key)))

    def read(self, key: str) -> bytes | None:
        """See ``StorageBackend.read``."""
        try:
            found: Any = self._files.cat_file(self._path(key))
        except FileNotFoundError:
            return None
        return bytes(found)

    def write(self, key: str, data: bytes) -> None:
        """See ``StorageBackend.write``."""
        self._files.makedirs(f"{self._root}/{key[:2]}", exist_ok=True)
        self._files.pipe_file(self._path(key), data)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key}"


def open_backend(url: str) -> StorageBackend:
    """The back end for ``url``: a path or ``file:`` URL is a folder, any other scheme goes to fsspec.

    Raises:
        ConfigError: It cannot be used.
    """
    scheme, separator, rest = url.partition("://")
    if not url or (separator and not rest):
        raise ConfigError(f"storage {url!r}: expected a folder, or a URL like memory://name or s3://bucket/folder")
    if not separator:
        return FileBackend(Path(url))
    return FileBackend(Path(rest)) if scheme == "file" else FsspecBackend(url)
