"""Per-layer completion of load-backs: the load-back records one event per layer, a forward round waits for each.

Several producers rotate, so a new load-back can be submitted while a round still consumes an earlier one. A
producer's events are recorded again and again; a record is a snapshot, so a wait must be issued before the next
load-back of the same producer records over it. The generation number makes that a checked rule.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from hicache_obs.errors import StaleGeneration
from hicache_obs.records import Purpose
from hicache_obs.streams.protocol import Device, Event

PRODUCERS: Final = 3


@dataclass(frozen=True, slots=True)
class Ticket:
    """A load-back as a round names it: which producer, and in which use of it."""

    producer: int
    generation: int


@dataclass(slots=True, eq=False)
class _Producer:
    layers: list[Event]
    generation: int = 0
    finish: Event | None = None


@dataclass(slots=True, eq=False)
class LayerDoneCounter:
    """Hands layer events from load-backs to rounds. Scheduler's thread only.

    Attributes:
        device: Makes the events and says which stream is current.
        layers: Layers of the pool.
    """

    device: Device
    layers: int
    _producers: list[_Producer] = field(init=False)
    _next: int = 0

    def __post_init__(self) -> None:
        self._producers = [_Producer([self.device.Event() for _ in range(self.layers)]) for _ in range(PRODUCERS)]

    def begin(self) -> Ticket:
        """Take the next producer for a new load-back; partner of ``finish``.

        Blocks until the load-back that used it last, ``PRODUCERS`` load-backs ago, is complete.
        """
        index = self._next
        self._next = (index + 1) % PRODUCERS
        producer = self._producers[index]
        if producer.finish is not None:
            producer.finish.synchronize()
            producer.finish = None
        producer.generation += 1
        return Ticket(index, producer.generation)

    def complete(self, ticket: Ticket, layer: int) -> None:
        """Record ``layer``'s event on the current stream, right after its copy was launched."""
        self._current(ticket).layers[layer].record()

    def finish(self, ticket: Ticket, event: Event) -> None:
        """The load-back is submitted; ``event`` marks its end."""
        self._current(ticket).finish = event

    def wait_until(self, ticket: Ticket, layer: int) -> None:
        """Make the current stream wait for ``layer`` of the load-back.

        Raises:
            StaleGeneration: A newer load-back has recorded over the event; waiting for it would prove nothing.
        """
        event = self._current(ticket).layers[layer]
        self.device.current_stream().wait_event(event, purpose=Purpose.LAYER)

    def _current(self, ticket: Ticket) -> _Producer:
        producer = self._producers[ticket.producer]
        if producer.generation != ticket.generation:
            raise StaleGeneration(
                f"producer {ticket.producer}: generation {ticket.generation} was asked for, "
                f"its events now belong to generation {producer.generation}"
            )
        return producer
