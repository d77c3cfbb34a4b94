"""``EventState``: what a recorder keeps per event."""

from __future__ import annotations

from typing import Final

from hicache_obs.records import EventId


class Generation:
    """Events that are always recorded one after the other, by one thread: ``times`` counts for all of them.

    Eighty of them are as many objects to touch otherwise, twice for every transfer.
    """

    __slots__ = ("times",)

    def __init__(self) -> None:
        self.times = 0


_NONE: Final = Generation()


class EventState:
    """What a recorder keeps per event. ``stamp`` is odd while a record of it is being made."""

    __slots__ = ("event_id", "generation", "known_to", "layer", "step", "version", "waited_by", "waited_version")

    def __init__(self, event_id: EventId) -> None:
        self.event_id: Final = event_id
        self.step: Final = -event_id
        """How a batch notes it; the same object each time, so that blocks of the same shape compare fast."""
        self.version = 0
        """Goes up when a record of this event alone is being made, and again when it is made."""
        self.generation = _NONE
        """Goes up with the records of all of its events."""
        self.known_to: dict[int, int] = {}
        """Threads that know a record to be complete, and the ``stamp`` of that record."""
        self.layer = -1
        """The layer whose copy it ends, of an event that an engine keeps for that; else negative."""
        self.waited_by: object = None
        self.waited_version = 0
        """The round that waited for it last, and the record it waited for: a second wait orders nothing more."""

    @property
    def stamp(self) -> int:
        """Another one for each record; odd while one is being made."""
        return self.version + self.generation.times

    def share(self, generation: Generation) -> bool:
        """Be one of ``generation``'s from now on; false if it is another one's."""
        if self.generation is _NONE:
            self.generation = generation
        return self.generation is generation

    @property
    def shared(self) -> Generation | None:
        """Whose it is, if it is anybody's."""
        return None if self.generation is _NONE else self.generation
