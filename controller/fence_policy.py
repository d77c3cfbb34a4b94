"""What a transfer waits for before it touches device pages that forward rounds may still be using.

=========  ================================================================================================
none       nothing: the bug
stream     everything queued on the forward stream so far: SGLang's fix, one ``wait_stream``
page       per stream, the last launched operation that conflicts on one of the pages, if it may still run
=========  ================================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.errors import ConfigError
from hicache_obs.records import Mode, PageIds, Purpose
from hicache_obs.streams.protocol import Event, Stream


class FencePolicy(Protocol):
    """Issues the waits in front of one transfer. Scheduler's thread; never blocks."""

    name: str

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """Make ``transfer_stream`` wait for what may still use ``pages``, ``(n,) int64``.

        Args:
            transfer_stream: Stream the copies will run on.
            fence_stream: The controller's ``load_fence_stream`` or ``write_fence_stream``.
            pages: Device pages the transfer writes (load-back) or reads (write-back).
            purpose: For the record of the wait.
        """


class NoFence:
    """Policy ``none``."""

    name = "none"

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """Issue no wait."""


class StreamFence:
    """Policy ``stream``."""

    name = "stream"

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """Wait for everything queued on ``fence_stream``, if there is one."""
        if fence_stream is not None:
            transfer_stream.wait_stream(fence_stream, purpose=purpose)


@dataclass(slots=True)
class InFlight:
    """Launched operations per stream that the host does not know to be complete.

    Tickets of one stream are positive and increase. Scheduler's thread only.
    """

    _events: dict[int, dict[int, Event]] = field(default_factory=dict)
    _done: dict[int, int] = field(default_factory=dict)

    def launched(self, stream: Stream, ticket: int, event: Event) -> None:
        """Operation ``ticket`` was queued on ``stream``; ``event`` was recorded right after it."""
        self._events.setdefault(stream.stream_id, {})[ticket] = event

    def completed(self, stream: Stream, ticket: int) -> None:
        """The host has synchronised with ``ticket``: it and everything before it on the stream is complete."""
        key = stream.stream_id
        self._done[key] = max(ticket, self._done.get(key, 0))
        events = self._events.get(key, {})
        for old in [t for t in events if t <= ticket]:
            del events[old]

    def event(self, stream_key: int, ticket: int) -> Event | None:
        """Event that covers ``ticket``, ``None`` once the host knows it to be complete."""
        if ticket <= self._done.get(stream_key, 0):
            return None
        covering = [(t, event) for t, event in self._events.get(stream_key, {}).items() if t >= ticket]
        return min(covering, key=lambda item: item[0])[1] if covering else None


@dataclass(slots=True)
class PageFence:
    """Policy ``page``: the finer-grained fence. A transfer whose pages nothing in flight uses waits for nothing.

    Pages are stamped with the last operation launched on them (``PageAllocator.stamp``) at the latest when they
    are freed, so the stamps of pages being restored are complete.
    """

    allocator: PageAllocator
    in_flight: InFlight
    name: str = "page"

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """Wait, per stream, for the newest operation in flight that conflicts on one of ``pages``.

        A load-back writes the pages and conflicts with every use; a write-back reads them: with writes only.
        """
        mode = Mode.WRITE if purpose is Purpose.LOAD_FENCE else Mode.READ
        for stream_key, ticket in self.allocator.last_uses(pages, mode).items():
            event = self.in_flight.event(stream_key, ticket)
            if event is not None and stream_key != transfer_stream.stream_id:
                transfer_stream.wait_event(event, purpose=purpose)


_POLICIES: dict[str, Callable[[PageAllocator, InFlight], FencePolicy]] = {
    "none": lambda allocator, in_flight: NoFence(),
    "stream": lambda allocator, in_flight: StreamFence(),
    "page": PageFence,
}
FENCE_POLICIES = tuple(_POLICIES)


def fence_policy(name: str, allocator: PageAllocator, in_flight: InFlight) -> FencePolicy:
    """The policy called ``name``; ConfigError if there is none."""
    make = _POLICIES.get(name)
    if make is None:
        raise ConfigError(f"--fence {name}: unknown policy; expected one of {', '.join(FENCE_POLICIES)}")
    return make(allocator, in_flight)
