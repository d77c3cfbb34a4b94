"""``EventState``: what a recorder keeps per event."""

from __future__ import annotations

from typing import Final

from hicache_obs.records import EventId


class EventState:
    """What a recorder keeps per event. ``version`` is odd while a record of it is being made."""

    __slots__ = ("event_id", "known_to", "layer", "version", "waited_by", "waited_version")

    def __init__(self, event_id: EventId) -> None:
        self.event_id: Final = event_id
        self.version = 0
        self.known_to: set[int] = set()
        """Threads that know the current record to be complete."""
        self.layer = -1
        """The layer whose copy it ends, of an event that an engine keeps for that; else negative."""
        self.waited_by: object = None
        self.waited_version = 0
        """The round that waited for it last, and the record it waited for: a second wait orders nothing more."""
