"""Wraps one adapter so that whatever goes wrong in it stays in it.

The engine's function is called exactly once, with its own arguments; its result or its exception goes through.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

from hicache_obs.sglang.adapter import DONE, Adapter
from hicache_obs.sglang.session import MAX_FAILURES, Session

Around: TypeAlias = Callable[..., Any]
"""``hook(original, *args, **kwargs)``: what SGLang's registry calls an AROUND hook."""


def around(session: Session, adapter: Adapter) -> Around:
    """The hook for ``adapter``. It is off after ``MAX_FAILURES`` failures of its own."""
    target, group = adapter.target, adapter.group
    before, after, failed = adapter.before, adapter.after, adapter.failed
    local, counters = session.local, session.counters
    off = False

    def report(error: Exception) -> None:
        nonlocal off
        if session.hook_failed(target, error) >= MAX_FAILURES:
            off = True
            session.unobservable(adapter.hazards, f"the hook on {target} failed {MAX_FAILURES} times")

    def observe(original: Around, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        counters.calls += 1
        state = None
        if before is not None:
            try:
                state = before(session, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
                report(error)
                return original(*args, **kwargs)
            if session.failures:
                session.hook_worked()
            if state is DONE:
                return original(*args, **kwargs)
        try:
            result = original(*args, **kwargs)
        except BaseException:
            if failed is not None:
                try:
                    failed(session, state)
                except Exception as error:  # noqa: BLE001 as above
                    report(error)
            raise
        if after is not None:
            try:
                after(session, state, result, *args, **kwargs)
            except Exception as error:  # noqa: BLE001 as above
                report(error)
            else:
                if session.failures:
                    session.hook_worked()
        return result

    def hook(original: Around, *args: Any, **kwargs: Any) -> Any:
        if off or not session.recording:
            return original(*args, **kwargs)
        return observe(original, args, kwargs)

    def grouped(original: Around, *args: Any, **kwargs: Any) -> Any:
        if off or getattr(local, group, False) or not session.recording:
            return original(*args, **kwargs)
        setattr(local, group, True)
        try:
            return observe(original, args, kwargs)
        finally:
            setattr(local, group, False)

    return grouped if group else hook
