"""``written``: an output that is there whole or not at all, and never in the place of an input or of something else."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from hicache_obs.errors import ConfigError
from hicache_obs.readers.journal_format import FILE_NAME
from hicache_obs.readers.parquet import PARQUET_NAME


def check_output(path: Path, inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse an output before the work that fills it.

    Args:
        path: Where it is to be, a file or a folder.
        inputs: What it must not be, nor hold, nor be in the place of.
        force: A former output may be replaced: a file, or a folder of nothing but records.

    Raises:
        ConfigError: It cannot be there.
    """
    parent = path.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"-o {path}: cannot be written; expected a place in a directory that exists")
    for source in inputs:
        if _same(path, source) or (path.is_dir() and path.resolve() in source.resolve().parents):
            raise ConfigError(f"-o {path}: is the input {source}, or holds it; inputs are never overwritten")
    if not os.path.lexists(path):
        return
    if not force:
        raise ConfigError(f"-o {path}: exists already; name another, or give --force to replace it")
    if path.is_dir() and not path.is_symlink():
        other = [file.name for file in path.iterdir() if not _is_record_file(file.name)]
        if other:
            raise ConfigError(f"-o {path}: a folder that holds {other[0]}; --force replaces folders of records only")
    elif not path.is_file():
        raise ConfigError(f"-o {path}: is no regular file; --force replaces files, and folders of records")


def _same(path: Path, other: Path) -> bool:
    try:
        return path.samefile(other)
    except OSError:
        return path.absolute() == other.absolute()


def _is_record_file(name: str) -> bool:
    return bool(FILE_NAME.fullmatch(name) or PARQUET_NAME.fullmatch(name))


@contextmanager
def written(path: Path) -> Iterator[Path]:
    """A name beside ``path`` to write a file or folder at; it becomes ``path`` if the block ends well.

    Raises:
        ConfigError: The disk is full or gone; what was at ``path`` is unchanged.
    """
    work = None
    try:
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".partial", dir=path.absolute().parent))
        partial = work / path.name
        yield partial
        _replace(partial, path, work / "replaced")
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror or error}; what was there is unchanged") from None
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
