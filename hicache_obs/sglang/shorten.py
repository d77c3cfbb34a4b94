"""Takes an engine's own wrapper out of the way of the hooks that are called most.

A hook that SGLang's registry has applied is reached through a wrapper that packs and unpacks all arguments, 0.25 us
of a call. Where the hooked function has the plain arguments that torch's has, and nobody else hooks it, the function
that a row's ``short`` makes is put in the wrapper's place. Whatever is not plain it hands to the wrapper.
"""

from __future__ import annotations

import functools
import inspect
import pkgutil
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any

from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.session import MARK, Session


def shorten(session: Session, hooks: Iterable[tuple[Adapter, Callable[..., Any]]]) -> list[str]:
    """Shorten what can be of ``hooks``, rows with the hook that was registered for each; the targets that were."""
    done = []
    for row, hook in hooks:
        owner_name, _, name = row.target.rpartition(".")
        try:
            owner = pkgutil.resolve_name(owner_name) if row.short is not None else None
        except (ImportError, AttributeError):
            continue
        if owner is not None and shorten_one(session, row, hook, owner, name):
            done.append(row.target)
    return done


def shorten_one(session: Session, row: Adapter, hook: Callable[..., Any], owner: Any, name: str) -> bool:
    """As ``shorten``, of one method of a class; whether it was."""
    wrapper = owner.__dict__.get(name)
    original = getattr(wrapper, "__wrapped__", None)
    if row.short is None or session.gpu_trace is not None or not isinstance(original, FunctionType):
        return False
    if not isinstance(wrapper, FunctionType) or not _reaches(wrapper, hook, original) or not _plain(original):
        return False
    short = row.short(session, hook.guard, original, wrapper)  # type: ignore[attr-defined] # ``around`` sets it
    setattr(owner, name, functools.wraps(original)(short))
    if name == "record" and owner.__dictoffset__ and not hasattr(owner, MARK):
        setattr(owner, MARK, None)  # what a new event answers; that it has no such attribute would cost 0.5 us
    return True


def _reaches(wrapper: FunctionType, hook: Callable[..., Any], original: FunctionType) -> bool:
    """Whether ``wrapper`` is a closure around this hook and the engine's own function, and so around nobody else's."""
    cells = [cell.cell_contents for cell in wrapper.__closure__ or ()]
    return (
        any(cell is hook for cell in cells)
        and any(cell is original for cell in cells)
        and not hasattr(original, "__wrapped__")
    )


def _plain(original: FunctionType) -> bool:
    """Whether it takes itself and one more argument, which may be ``None``, by position."""
    try:
        parameters = list(inspect.signature(original).parameters.values())
    except (TypeError, ValueError):
        return False
    return len(parameters) == 2 and all(
        one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD and one.default in (None, inspect.Parameter.empty)
        for one in parameters
    )
