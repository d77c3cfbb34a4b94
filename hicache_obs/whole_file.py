"""Files and folders that are there whole or not at all, whoever reads them meanwhile.

What a killed writer leaves is a hidden file or folder beside the target: see ``PARTIALS``.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from hicache_obs.errors import ConfigError

_SUFFIX: Final = ".partial"
PARTIALS: Final = f".*{_SUFFIX}"
"""Pattern of what is being written or was left, of any target; ``.NAME`` before it: of that one."""
_SHOWN: Final = 50
"""Characters of the target's name in that of its partial file, which may have 255 bytes."""


def is_same(path: Path, other: Path) -> bool:
    """Whether both name one file, by whatever links; of what is not there yet, by its absolute name."""
    try:
        return path.samefile(other)
    except OSError:
        return path.absolute() == other.absolute()


def replace_file(path: Path, content: bytes, *, permissions: int | None = None) -> None:
    """Make ``path`` hold ``content``. Any thread of any process may do so at the same time: the last one stays.

    Args:
        permissions: Of the file, whatever the umask says; ``None``: the usual ones of a new file.

    Raises:
        OSError: What was at ``path`` is unchanged.
    """
    partial = path.with_name(f"{_prefix(path)}{secrets.token_hex(8)}{_SUFFIX}")
    try:
        partial.write_bytes(content)
        if permissions is not None:
            partial.chmod(permissions)
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_whole(path: Path, content: str | bytes, option: str, *, permissions: int | None = None) -> None:
    """As ``replace_file``, for the file that a user named by ``option``; text becomes UTF-8.

    Raises:
        ConfigError: The disk is full or gone; what was at ``path`` is unchanged.
    """
    try:
        replace_file(path, content.encode() if isinstance(content, str) else content, permissions=permissions)
    except OSError as error:
        raise _not_written(path, option, error) from None


@contextmanager
def written(path: Path, option: str = "-o") -> Iterator[Path]:
    """A name beside ``path`` to write a file or folder at; it becomes ``path`` if the block ends well.

    Raises:
        ConfigError: The disk is full or gone; what was at ``path`` is unchanged.
    """
    work = None
    try:
        work = Path(tempfile.mkdtemp(prefix=_prefix(path), suffix=_SUFFIX, dir=path.absolute().parent))
        partial = work / path.name
        yield partial
        _replace(partial, path, work / "replaced")
    except OSError as error:
        raise _not_written(path, option, error) from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


def _prefix(path: Path) -> str:
    return f".{path.name[:_SHOWN]}."


def _not_written(path: Path, option: str, error: OSError) -> ConfigError:
    return ConfigError(f"{option} {path}: {error.strerror or error}; what was there is unchanged")


def _replace(partial: Path, path: Path, aside: Path) -> None:
    """Move ``partial`` to ``path``; a folder cannot be replaced in one step."""
    if not path.is_dir() or path.is_symlink():
        os.replace(partial, path)
        return
    os.rename(path, aside)
    try:
        os.rename(partial, path)
    except OSError:
        os.rename(aside, path)
        raise
