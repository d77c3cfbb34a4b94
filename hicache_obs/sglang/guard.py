"""Wraps one adapter so that whatever goes wrong in it stays in it.

The engine's function is called exactly once, with its own arguments; its result or its exception goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.session import MAX_FAILURES, Session

Around: TypeAlias = Callable[..., Any]
"""``hook(original, *args, **kwargs)``: what SGLang's registry calls an AROUND hook."""


class Guard:
    """Counts the failures of one hook.

    Attributes:
        off: The hook has failed ``MAX_FAILURES`` times and does nothing any more.
    """

    __slots__ = ("_adapter", "_session", "off")

    def __init__(self, session: Session, adapter: Adapter) -> None:
        self._session = session
        self._adapter = adapter
        self.off = False

    def failed(self, error: Exception) -> None:
        """The hook raised. Never raises itself."""
        target = self._adapter.target
        if self._session.hook_failed(target, error) >= MAX_FAILURES:
            self.off = True
            self._session.unobservable(self._adapter.hazards, f"the hook on {target} failed {MAX_FAILURES} times")


def hooked_here(owner: Any, name: str, original: Around) -> bool:
    """Whether ``owner.name`` may be set on the object: its class has our hook around ``original`` and nobody else's."""
    hooked = getattr(type(owner), name, None)
    return getattr(hooked, "__wrapped__", None) is original and name not in getattr(owner, "__dict__", (name,))


def around(session: Session, adapter: Adapter) -> Around:
    """The hook for ``adapter``. It is off after ``MAX_FAILURES`` failures of its own."""
    guard = Guard(session, adapter)
    made = _around(session, adapter, guard) if adapter.direct is None else adapter.direct(session, guard)
    made.guard = guard  # type: ignore[attr-defined] # for ``shorten``
    return made


def _around(session: Session, adapter: Adapter, guard: Guard) -> Around:
    before, after, failed, group = adapter.before, adapter.after, adapter.failed, adapter.group
    lanes, counters = session.lanes, session.counters

    def observe(original: Around, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counters.calls += 1
        state = None
        if before is not None:
            try:
                state = before(session, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
                guard.failed(error)
                return original(*args, **kwargs)
            if session.failures:
                session.hook_worked()
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if failed is not None:
                try:
                    failed(session, state)
                except Exception as error:  # noqa: BLE001 as above
                    guard.failed(error)
            raise
        if after is not None:
            try:
                after(session, state, result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 as above
                guard.failed(error)
            else:
                if session.failures:
                    session.hook_worked()
        return result

    def hook(original: Around, *args: Any, **kwargs: Any) -> Any:
        if guard.off or not (session.switch[0] or session.recording):
            return original(*args, **kwargs)
        return observe(original, args, kwargs)

    def grouped(original: Around, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.lane
        if guard.off or getattr(lane, group, False) or not (session.switch[0] or session.recording):
            return original(*args, **kwargs)
        setattr(lane, group, True)
        try:
            return observe(original, args, kwargs)
        finally:
            setattr(lane, group, False)

    return grouped if group else hook
