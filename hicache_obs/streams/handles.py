"""Handles: whose a stream or event is, and which stream is current on a host thread."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, Protocol, TypeVar

from hicache_obs.errors import StreamError
from hicache_obs.records import StreamKind


class _Owned(Protocol):
    """A stream, event or probe that knows its device."""

    @property
    def device(self) -> object: ...


OwnedT = TypeVar("OwnedT", bound=_Owned)
StreamT = TypeVar("StreamT")


def own(kind: type[OwnedT], thing: object, device: object) -> OwnedT:
    """``thing``, known to be a ``kind`` made by ``device``.

    Raises:
        StreamError: It belongs to another device, or to the recorder's wrapper instead of the bare device.
    """
    if isinstance(thing, kind) and thing.device is device:
        return thing
    raise StreamError(
        f"expected a {kind.__name__} made by this {type(device).__name__}, got {type(thing).__name__}"
        + (" of another device" if isinstance(thing, kind) else "")
    )


def refuse_legacy(kind: StreamKind, device_name: str) -> None:
    """Raise StreamError when ``kind`` asks for an implicit order with all blocking streams.

    Without a legacy stream a blocking one is ordered with nothing, so that kind is fine.
    """
    if kind is StreamKind.LEGACY:
        raise StreamError(
            f"Stream(kind={kind.name}) on device {device_name!r}: must be NONBLOCKING or BLOCKING; "
            "its default stream does not synchronize with others"
        )


class CurrentStream(Generic[StreamT]):
    """The current stream of every host thread; ``default`` on a thread that never entered ``use``."""

    def __init__(self, default: StreamT) -> None:
        self._default = default
        self._local = threading.local()

    def get(self) -> StreamT:
        """The calling thread's current stream."""
        stream: StreamT = getattr(self._local, "stream", self._default)
        return stream

    @contextmanager
    def use(self, stream: StreamT) -> Iterator[None]:
        """Make ``stream`` the calling thread's current stream inside the block. Blocks nest."""
        before = self.get()
        self._local.stream = stream
        try:
            yield
        finally:
            self._local.stream = before
