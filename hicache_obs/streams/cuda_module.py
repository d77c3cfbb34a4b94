"""The part of a torch device module (``torch.cuda``) that is used here. ``Any`` stops at these protocols."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final, Protocol

OWN_PRIORITY: Final = -1
"""Of streams that are ours alone. torch keeps a pool of 32 streams per priority and hands them out in turn, so that two
who ask for one may get the same: an engine asks for priority 0, and ours would order its work, or wait for it."""


class RawEvent(Protocol):
    """A torch event."""

    def record(self, stream: Any) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any) -> float: ...


class RawStream(Protocol):
    """A torch stream."""

    def synchronize(self) -> None: ...

    def query(self) -> bool: ...

    def wait_event(self, event: Any) -> None: ...


class DeviceModule(Protocol):
    """The part of ``torch.cuda`` that is used here."""

    def Stream(self, *, priority: int = 0) -> RawStream: ...  # noqa: N802 torch's name

    def Event(self, enable_timing: bool = False) -> RawEvent: ...  # noqa: N802 torch's name

    def current_stream(self) -> RawStream: ...

    def stream(self, stream: RawStream) -> AbstractContextManager[Any]: ...

    def synchronize(self) -> None: ...
