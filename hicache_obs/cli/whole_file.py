"""``written``: a file or folder that is there whole or not at all, whoever reads it meanwhile."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hicache_obs.errors import ConfigError


def is_same(path: Path, other: Path) -> bool:
    """Whether both name one file, by whatever links; of what is not there yet, by its absolute name."""
    try:
        return path.samefile(other)
    except OSError:
        return path.absolute() == other.absolute()


@contextmanager
def written(path: Path, option: str = "-o") -> Iterator[Path]:
    """A name beside ``path`` to write a file or folder at; it becomes ``path`` if the block ends well.

    Raises:
        ConfigError: The disk is full or gone; what was at ``path`` is unchanged.
    """
    work = None
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{path.name[:100]}.", suffix=".partial", dir=path.absolute().parent))
        partial = work / path.name
        yield partial
        _replace(partial, path, work / "replaced")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error.strerror or error}; what was there is unchanged") from None
    finally:
        if work is not None:
            shutil.rmtree(work, ignore_errors=True)


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


def write_whole(path: Path, text: str, option: str) -> None:
    """Make ``path`` hold ``text``, as UTF-8; as ``written``."""
    with written(path, option) as partial:
        partial.write_text(text, encoding="utf-8", newline="\n")
