"""Looks a dotted name up in source files, without importing the module it is in.

A hook on a name that is not there would be logged by the engine as its own failure, one on a property would break
the property, and importing a module to look costs seconds and memory in processes that never need it.
"""

from __future__ import annotations

import ast
import enum
import importlib.util
import inspect
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

_MAX_BASES: Final = 8


class Found(enum.Enum):
    """What a dotted name is."""

    FUNCTION = "function"
    MISSING = "missing"
    NOT_CALLABLE = "not callable"
    """A property or a plain attribute: wrapping it would change what it is."""


def resolve(target: str) -> Found:
    """What ``target`` (``package.module.Class.method`` or ``package.module.function``) is."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        module = sys.modules.get(".".join(parts[:length]))
        if module is not None:
            found = _in_loaded(module, parts[length:])
            if found is not Found.MISSING:
                return found
            break
    root = _package_folder(parts[0])
    if root is None:
        return Found.MISSING
    for length in range(len(parts) - 1, 0, -1):
        file = _module_file(root, parts[1:length])
        if file is not None:
            return _in_module(root, file, parts[length:])
    return Found.MISSING


def _in_loaded(module: object, names: list[str]) -> Found:
    """The same question to a module that is loaded anyway; this also finds what it has from elsewhere."""
    place = module
    for name in names[:-1]:
        place = getattr(place, name, None)
    try:
        found = inspect.getattr_static(place, names[-1])
    except AttributeError:
        return Found.MISSING
    plain = isinstance(found, staticmethod | classmethod) or (callable(found) and not isinstance(found, type))
    return Found.FUNCTION if plain else Found.NOT_CALLABLE


@lru_cache(maxsize=64)
def _package_folder(name: str) -> Path | None:
    module = sys.modules.get(name)
    try:
        spec = module.__spec__ if module is not None and module.__spec__ else importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _module_file(root: Path, parts: list[str]) -> Path | None:
    base = root.joinpath(*parts)
    for file in (base / "__init__.py", base.with_suffix(".py") if parts else base / "__init__.py"):
        if file.is_file():
            return file
    return None


@lru_cache(maxsize=64)
def _parse(file: Path) -> ast.Module:
    return ast.parse(file.read_bytes())


def _in_module(root: Path, file: Path, names: list[str]) -> Found:
    if len(names) == 1:
        for node in _parse(file).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
                return Found.FUNCTION
        return Found.MISSING
    return _in_class(root, file, names[0], names[1], 0) if len(names) == 2 else Found.MISSING


def _in_class(root: Path, file: Path, class_name: str, method: str, depth: int) -> Found:
    """The method in the class, or in the first of its base classes that has it."""
    tree = _parse(file)
    node = next((item for item in ast.walk(tree) if isinstance(item, ast.ClassDef) and item.name == class_name), None)
    if node is None or depth > _MAX_BASES:
        return Found.MISSING
    for item in node.body:
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef) and item.name == method:
            wrapped = any(isinstance(mark, ast.Name) and "property" in mark.id for mark in item.decorator_list)
            return Found.NOT_CALLABLE if wrapped else Found.FUNCTION
        if isinstance(item, ast.Assign) and any(isinstance(to, ast.Name) and to.id == method for to in item.targets):
            return Found.NOT_CALLABLE
    for base in node.bases:
        if isinstance(base, ast.Name):
            place = _origin(root, file, tree, base.id)
            found = Found.MISSING if place is None else _in_class(root, place[0], place[1], method, depth + 1)
            if found is not Found.MISSING:
                return found
    return Found.MISSING


def _origin(root: Path, file: Path, tree: ast.Module, name: str) -> tuple[Path, str] | None:
    """File and name of what ``name`` means in ``file``: its own class, or one imported from the same package."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return file, name
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    parts = node.module.split(".")
                    place = _module_file(root, parts[1:]) if parts[0] == root.name else None
                    return None if place is None else (place, alias.name)
    return None
