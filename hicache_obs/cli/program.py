"""``load_program``: the function that an argument ``FILE.py:NAME`` or ``MODULE:NAME`` means."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, cast

from hicache_obs.errors import ConfigError

if TYPE_CHECKING:
    from hicache_obs.testing.world import World


def load_program(argument: str) -> Callable[[World], None]:
    """Import the module and return its function. A module is looked for in the current directory too.

    Raises:
        ConfigError: There is no such file, module or function, or importing it failed.
    """
    place, colon, name = argument.rpartition(":")
    is_file = place.endswith(".py")
    if not colon or not place or not name or ("/" in place and not is_file):
        raise ConfigError(f"PROGRAM {argument}: expected FILE.py:NAME or MODULE:NAME")
    if is_file and not Path(place).is_file():
        raise ConfigError(f"PROGRAM {argument}: there is no file {place}")
    try:
        module = _from_file(Path(place)) if is_file else _from_path(place)
    except Exception as error:
        raise ConfigError(f"PROGRAM {argument}: cannot be imported: {type(error).__name__}: {error}") from error
    program = getattr(module, name, None)
    if not callable(program):
        functions = [value for value in vars(module).values() if isinstance(value, FunctionType)]
        own = [function.__name__ for function in functions if function.__module__ == module.__name__]
        names = [name for name in own if not name.startswith("_")]
        raise ConfigError(f"PROGRAM {argument}: {place} has no function {name}; it has {', '.join(names) or 'none'}")
    return cast("Callable[[World], None]", program)


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None  # the name ends with .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _from_path(name: str) -> ModuleType:
    if "" not in sys.path:
        sys.path.insert(0, "")
    return importlib.import_module(name)
