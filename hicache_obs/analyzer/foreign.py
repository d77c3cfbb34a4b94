"""What another process has a hand in: events and memory that are shared through CUDA IPC or the operating system.

Its calls are in another trace, if in any. A wait for an event that it may have recorded orders something, but nobody
can tell what: perhaps everything that went before. Memory that it may touch has accesses that are not in this trace.
Both are therefore *unknown*: never clean, and a violation only where two recorded accesses were measured in the wrong
order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from hicache_obs.analyzer.shadow import Overlap
from hicache_obs.records import Access, Define, DefineSpace, EventId, Space

_POOLS: Final = {DefineSpace.SHARED_POOL: Space.DEVICE, DefineSpace.SHARED_HOST_POOL: Space.HOST}


class Foreign:
    """Events and memory that a trace defines as shared with another process.

    Attributes:
        events: The events.
        memory: Whether any memory is shared.
        waited_at: Position of the newest wait for a shared event, -1 without one.
    """

    def __init__(self) -> None:
        self.events: set[EventId] = set()
        self._pools: set[tuple[Space, int]] = set()
        self._buffers: set[int] = set()
        self.memory = False
        self.waited_at = -1

    def learn(self, define: Define) -> None:
        """Take over one definition; most are none of ours."""
        if define.space is DefineSpace.SHARED_EVENT:
            self.events.add(EventId(define.id))
        elif define.space is DefineSpace.SHARED_BUFFER:
            self._buffers.add(define.id)
            self.memory = True
        elif define.space in _POOLS:
            self._pools.add((_POOLS[define.space], define.id))
            self.memory = True

    def waits(self, event: EventId, seq: int) -> bool:
        """Whether a wait for ``event``, made at ``seq``, may be for another process."""
        if event not in self.events:
            return False
        self.waited_at = seq
        return True

    def touched(self, accesses: Iterable[Access]) -> int:
        """Shared ids among ``accesses``."""
        return sum(
            len(access.ids) if (access.space, access.pool) in self._pools else self._shared(access)
            for access in accesses
        )

    def _shared(self, access: Access) -> int:
        if access.space is not Space.BUFFER or not self._buffers:
            return 0
        return len(self._buffers.intersection(access.ids.tolist()))

    def covers(self, overlaps: Iterable[Overlap]) -> bool:
        """Whether all that a pair conflicts on is shared."""
        return all(
            (overlap.space, overlap.pool) in self._pools
            or (overlap.space is Space.BUFFER and self._buffers.issuperset(overlap.pages.tolist()))
            for overlap in overlaps
        )
