"""Kernels that may start before the kernel before them has ended: programmatic dependent launch.

Such a launch weakens the order inside one stream (CUDA programming guide, programmatic dependent launch). Whether the
kernel waits for its predecessor's results before it touches them is decided inside the kernel, which no record shows:
the order of the two is unknown. So it is with every kernel of an unbroken chain of them, and with none beyond: an
early kernel follows all that the first of its chain followed, and what comes behind the chain follows all of it.
Records that were lost may have ended a chain: it goes on, since *unknown* is then no lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache_obs.analyzer.order import Actor, Order, Snapshot
from hicache_obs.records import Kernel, StreamId

MAX_CHAIN: Final = 16
"""Early kernels of one chain that may be in flight together; the next begins a new chain behind all of them."""


@dataclass(slots=True, eq=False)
class _Chain:
    """Kernels right behind each other: what the first followed, the stream's count behind it, and how many more."""

    base: Snapshot
    epoch: int
    early: int = 0


class EarlyLaunches:
    """Places kernels on a stream, or beside it if they may start early. Fed by the analyzer in trace order."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._sites: set[int] = set()
        self.active = False
        """Whether any site launches early: else every kernel runs on its stream."""
        self._chains: dict[StreamId, _Chain] = {}

    def declare(self, site: int) -> None:
        """Kernels of ``site`` may start early from now on."""
        self._sites.add(site)
        self.active = True

    def place(self, record: Kernel, stream: Actor, seq: int) -> Actor:
        """The actor that runs ``record``: its stream's, or for an early start one of its own, which the stream must
        follow once the kernel has been entered."""
        order = self._order
        epoch = order.clock(stream)[stream]
        chain = self._chains.get(record.stream)
        broken = chain is None or chain.epoch != epoch or chain.early == MAX_CHAIN
        if chain is None or broken or record.site not in self._sites:
            self._chains[record.stream] = _Chain(order.note(stream, seq), epoch + 1)
            return stream
        actor = order.early(record.stream, chain.early, record.thread)
        chain.early += 1
        order.join(actor, chain.base)
        order.suspect(actor, (stream,))
        return actor

    def stop(self, stream: StreamId) -> None:
        """A wait on ``stream``: the next kernel starts behind all there is."""
        self._chains.pop(stream, None)
