"""``check_output``: where a converted recording may go. Never in the place of an input or of something else."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from hicache_obs.errors import ConfigError
from hicache_obs.readers.journal_format import FILE_NAME
from hicache_obs.readers.parquet import PARQUET_NAME
from hicache_obs.whole_file import is_same


def check_output(path: Path, inputs: Sequence[Path], *, force: bool) -> None:
    """Refuse an output before the work that fills it.

    Args:
        path: Where it is to be, a file or a folder.
        inputs: What it must not be, nor hold, nor be part of.
        force: A former output may be replaced: a file, or a folder of nothing but records.

    Raises:
        ConfigError: It cannot be there.
    """
    try:
        _check(path, inputs, force=force)
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror}") from None


def _check(path: Path, inputs: Sequence[Path], *, force: bool) -> None:
    parent = path.absolute().parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise ConfigError(f"-o {path}: cannot be written; expected a place in a directory that exists")
    for source in inputs:
        real, given = path.resolve(), source.resolve()
        if is_same(path, source) or (path.is_dir() and real in given.parents) or given in real.parents:
            raise ConfigError(f"-o {path}: is, holds or is part of the input {source}; inputs are never overwritten")
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


def _is_record_file(name: str) -> bool:
    return bool(FILE_NAME.fullmatch(name) or PARQUET_NAME.fullmatch(name))
