"""Journals in object stores and other places that fsspec knows: as much of a ``Path`` as the journal reader needs."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from hicache_obs.config import refuse_password
from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.readers.trace_file import one_line

_URL: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*(::[^/]*)?://")
BLOCK_BYTES: Final = 4 << 20
"""Read ahead of a stored file: one request."""


def file_system(place: str) -> tuple[Any, str, bool]:
    """The fsspec file system of a path or URL, the place in it, and whether it is this machine's.

    Raises:
        ConfigError: fsspec, or the driver that it wants, is not installed; nobody knows the URL; it holds a
            password.
    """
    refuse_password(place, "journals at")
    try:
        import fsspec
    except ImportError:
        raise ConfigError(f"{place}: needs fsspec; install hicache-obs[fleet]") from None
    if not _URL.match(place):
        return fsspec.filesystem("file"), fsspec.filesystem("file")._strip_protocol(place), True
    try:
        files, root = fsspec.core.url_to_fs(place)
    except (ImportError, ValueError, OSError) as error:
        raise ConfigError(f"{place}: {one_line(error)}; expected a path, or a URL that fsspec knows") from None
    return files, root, isinstance(files, fsspec.get_filesystem_class("file"))


class StoredPath:
    """A file or folder that is not on this machine.

    Args:
        url: Where it is.

    Raises:
        ConfigError: See ``file_system``.
    """

    def __init__(self, url: str) -> None:
        self._url = url
        self._files, self._path, _ = file_system(url)

    def __str__(self) -> str:
        return self._url

    def __lt__(self, other: StoredPath) -> bool:
        return self._url < other._url

    @property
    def name(self) -> str:
        """Last part."""
        return self._url.rstrip("/").rpartition("/")[2]

    def is_dir(self) -> bool:
        """Whether it is a folder.

        Raises:
            TraceError: The store does not answer.
        """
        try:
            return bool(self._files.isdir(self._path))
        except Exception as error:  # noqa: BLE001 a driver raises what it likes
            raise TraceError(f"{self}: {one_line(error)}") from None

    def iterdir(self) -> Iterator[StoredPath]:
        """What is in the folder.

        Raises:
            TraceError: The store does not answer.
        """
        try:
            names = self._files.ls(self._path, detail=False)
        except Exception as error:  # noqa: BLE001 a driver raises what it likes
            raise TraceError(f"{self}: {one_line(error)}") from None
        for name in names:
            yield StoredPath(f"{self._url.rstrip('/')}/{name.rstrip('/').rpartition('/')[2]}")

    def open_arrow(self) -> Any:
        """An Arrow file to read from, block by block.

        Raises:
            OSError: The store does not answer, or has no such file.
        """
        try:
            file = self._files.open(self._path, "rb", block_size=BLOCK_BYTES)
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 a driver raises what it likes
            raise OSError(one_line(error)) from None
        return pa.PythonFile(_Answering(file), mode="r")


class _Answering(io.RawIOBase):
    """A driver's file, all of whose errors are ``OSError``."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        try:
            found: bytes = self._file.read(size)
            return found
        except OSError:
            raise
        except Exception as error:  # noqa: BLE001 a driver raises what it likes
            raise OSError(one_line(error)) from None

    def seek(self, offset: int, whence: int = 0) -> int:
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        return int(self._file.tell())

    def close(self) -> None:
        if not self.closed:
            self._file.close()
        super().close()


AnyPath = Path | StoredPath
