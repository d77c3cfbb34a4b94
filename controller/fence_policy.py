"""What a transfer waits for before it touches device pages that forward rounds may still be using.

=========  ================================================================================================
none       nothing: the bug
stream     everything queued on the forward stream so far: SGLang's fix, one ``wait_stream``
page       per stream, the last launched operation that conflicts on one of the pages, if it may still run
=========  ================================================================================================

The same policies say what a round or a load-back waits for before it overwrites pages that were evicted while their
write-back is still in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

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

    def reuse(self, writer: Stream, readers: Sequence[EvictingCopy], pages: PageIds, purpose: Purpose) -> None:
        """Make ``writer`` wait for write-backs that may still read ``pages``, ``(n,) int64``, which it will overwrite.

        Args:
            writer: A forward stream, or the load-back stream.
            readers: Write-backs in flight whose pages may be used again, oldest first; not empty.
            pages: Device pages that are written.
            purpose: For the record of the wait.
        """


class PageUses(Protocol):
    """Who used pages last."""

    def last_uses(self, ids: PageIds, mode: Mode = Mode.WRITE) -> dict[int, int]:
        """See ``PageAllocator.last_uses``."""


@dataclass(frozen=True, slots=True, eq=False)
class EvictingCopy:
    """A write-back in flight of pages that were evicted at once.

    Attributes:
        stream: It runs there.
        finish: Its end.
        pages: ``(n,) int64`` device pages it reads.
    """

    stream: Stream
    finish: Event
    pages: PageIds


class NoFence:
    """Policy ``none``."""

    name = "none"

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """Issue no wait."""

    def reuse(self, writer: Stream, readers: Sequence[EvictingCopy], pages: PageIds, purpose: Purpose) -> None:
        """Issue no wait."""


class StreamFence:
    """Policy ``stream``."""

    name = "stream"

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """Wait for everything queued on ``fence_stream``, if there is one."""
        if fence_stream is not None:
            transfer_stream.wait_stream(fence_stream, purpose=purpose)

    def reuse(self, writer: Stream, readers: Sequence[EvictingCopy], pages: PageIds, purpose: Purpose) -> None:
        """Wait for everything queued on the write-back stream."""
        writer.wait_stream(readers[-1].stream, purpose=purpose)


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

    allocator: PageUses
    in_flight: InFlight
    name: str = "page"

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """Wait, per stream, for the newest operation in flight that conflicts on one of ``pages``.

        A write-back reads the pages and conflicts with writes only; whoever writes them conflicts with every use.
        """
        mode = Mode.READ if purpose is Purpose.WRITE_FENCE else Mode.WRITE
        for stream_key, ticket in self.allocator.last_uses(pages, mode).items():
            event = self.in_flight.event(stream_key, ticket)
            if event is not None and stream_key != transfer_stream.stream_id:
                transfer_stream.wait_event(event, purpose=purpose)

    def reuse(self, writer: Stream, readers: Sequence[EvictingCopy], pages: PageIds, purpose: Purpose) -> None:
        """Wait for the newest of them that reads one of ``pages``; those before it run on the same stream."""
        for reader in reversed(readers):
            if np.isin(pages, reader.pages).any():
                writer.wait_event(reader.finish, purpose=purpose)
                return


_POLICIES: dict[str, Callable[[PageUses, InFlight], FencePolicy]] = {
    "none": lambda allocator, in_flight: NoFence(),
    "stream": lambda allocator, in_flight: StreamFence(),
    "page": PageFence,
}
FENCE_POLICIES = tuple(_POLICIES)


def fence_policy(name: str, allocator: PageUses, in_flight: InFlight, *, flag: str = "--fence") -> FencePolicy:
    """The policy called ``name``; ConfigError, which names ``flag``, if there is none."""
    make = _POLICIES.get(name)
    if make is None:
        raise ConfigError(f"{flag} {name}: unknown policy; expected one of {', '.join(FENCE_POLICIES)}")
    return make(allocator, in_flight)
