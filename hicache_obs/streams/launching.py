"""What a thread knows about the launched function it is inside of, and what happens to one that fails.

Shared by all devices: the nesting check, the pool guard and the kept errors are the same everywhere.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from hicache_obs.errors import StreamError


class _Inside(threading.local):
    """Site of the launched function that the current thread runs right now."""

    site: str | None = None


_INSIDE = _Inside()


def in_launch() -> bool:
    """Whether the calling thread is inside a function that some device launched."""
    return _INSIDE.site is not None


def refuse_in_launch(call: str) -> None:
    """Raise StreamError when the calling thread is inside a launched function; ``call`` names the culprit.

    A launched function that enqueues or waits would deadlock its own stream on one device and silently
    reorder work on another, so it is refused on all of them.
    """
    if _INSIDE.site is not None:
        raise StreamError(
            f"{call} called from inside the launched function of site {_INSIDE.site!r}: device work may not "
            "use streams or events; make the call on the host, before or after the launch"
        )


def run_launched(fn: Callable[[], None], site: str) -> None:
    """Call ``fn`` with ``in_launch`` true on this thread; whatever it raises passes through."""
    _INSIDE.site = site
    try:
        fn()
    finally:
        _INSIDE.site = None


class Failures:
    """Exceptions of launched functions, kept until a host thread synchronizes. Safe from any thread.

    Only the first is kept in full: the ones after it are usually its consequences, so they are counted.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._first: tuple[str, BaseException] | None = None
        self._more = 0

    def keep(self, site: str, error: BaseException) -> None:
        """Remember ``error`` of the function launched at ``site``."""
        with self._lock:
            if self._first is None:
                self._first = (site, error)
            else:
                self._more += 1

    def raise_pending(self) -> None:
        """Raise the kept error as a StreamError with its cause chained, once; return if there is none."""
        if self._first is None:  # the usual case, without the lock
            return
        with self._lock:
            first, more = self._first, self._more
            self._first, self._more = None, 0
        if first is not None:  # another thread may have raised it since
            raise failure(*first, more=more) from first[1]


def failure(site: str, error: BaseException, *, more: int = 0) -> StreamError:
    """The StreamError for ``error`` raised by the function launched at ``site``."""
    text = f"the function launched at site {site!r} raised {type(error).__name__}: {error}"
    return StreamError(text if not more else f"{text} ({more} later launches failed too)")
