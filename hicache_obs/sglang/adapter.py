"""The adapter interface: one row says which function of an engine is hooked, in which releases, and what it emits.

An engine is supported by a table of rows. Each row's hook gets the session and the call's own arguments, and turns
them into records through ``session.recorder``. It runs inside the engine: it may not wait for the device, do I/O or
change what the engine passes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from hicache_obs.findings import Hazard
from hicache_obs.sglang.versions import ALL_VERSIONS, Versions

Before: TypeAlias = Callable[..., Any]
"""``before(session, *args, **kwargs)``, called before the engine's function; what it returns is the call's state."""
After: TypeAlias = Callable[..., None]
"""``after(session, state, result, *args, **kwargs)``, called when the engine's function has returned."""
Failed: TypeAlias = Callable[..., None]
"""``failed(session, state)``, called when the engine's function has raised, before the exception goes on."""
Direct: TypeAlias = Callable[..., Callable[..., Any]]
"""``direct(session, guard)`` makes the whole hook, ``hook(original, *args, **kwargs)``: for the few functions that are
called so often that the guard's own layers would cost more than the hook. It keeps the guard's promises itself."""


@dataclass(frozen=True, slots=True)
class Adapter:
    """One hooked function.

    Attributes:
        target: Dotted name of a function or method.
        versions: Releases that have it.
        before, after, failed: See the type aliases; each may be absent.
        direct: In place of these three.
        short: ``short(session, guard, original, hooked)`` makes what takes the place of ``hooked``, the hooked method,
            where it has two plain arguments (``shorten``).
        hazards: What cannot be observed where the target is missing.
        group: While a call of a group runs, further calls of that group on the same thread are the engine's own
            business and not recorded: ``wait_stream`` is made of ``record`` and ``wait``.
        optional: Another row covers the same thing: missing, it costs nothing.
        on_objects: The target is a function that every object of a kind has, which each implements itself: it is hooked
            on an object when that is made known. Missing, it is reported; what cannot be observed is said of an object.
    """

    target: str
    versions: Versions = ALL_VERSIONS
    before: Before | None = None
    after: After | None = None
    failed: Failed | None = None
    direct: Direct | None = None
    short: Callable[..., Callable[..., Any]] | None = None
    hazards: tuple[Hazard, ...] = field(default=())
    group: str = ""
    optional: bool = False
    on_objects: bool = False
