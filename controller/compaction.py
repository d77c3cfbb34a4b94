"""Compaction: cached pages move to lower addresses, so that runs of free and of used pages grow longer.

A move is a copy on the device, on a stream of its own, and from its launch on everybody uses the new addresses: the
radix tree, the page table of running requests, and with them every later round and transfer. What was launched before
still uses the old ones. The *move gate* keeps the two apart:

* The move begins after all rounds launched so far: one of them may still write the page that is moved, or the place it
  is moved to, as an overrun row; and after write-backs that still read that place.
* Later rounds begin after the move. So does a transfer: its fence covers the forward stream, or the page's stamps,
  which name the move as they name rounds.
* A page that a transfer in flight names is not moved: the node is pinned until the acknowledgement.

The old pages are free as soon as the move is launched. A moved page is a new tenancy of what it holds, so its contents
are verified as those of a restored page are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from hicache_obs.controller.model_runner import to_device
from hicache_obs.controller.radix_node import Int64Array, Node
from hicache_obs.errors import ConfigError
from hicache_obs.records import Direction, Mode, PageIds, Work, device
from hicache_obs.streams.protocol import Event, Stream

if TYPE_CHECKING:
    from hicache_obs.controller.scheduler import Scheduler

MOST_PAGES: Final = 64
"""Pages of one move."""
_KNOWN_AFTER: Final = 2
"""A move is known to be complete this many steps after it; as transfers are."""


class MoveGate:
    """The waits around a move. Scheduler's thread; never blocks."""

    def begin(self, moves: Stream, forward: Stream) -> None:
        """The move, to be launched on ``moves``, follows what was launched on ``forward``."""
        moves.wait_stream(forward)

    def end(self, moved: Event, forward: Stream) -> None:
        """What will be launched on ``forward`` follows the move, which ``moved`` ends."""
        forward.wait_event(moved)


@dataclass(frozen=True, slots=True, eq=False)
class _Move:
    ticket: int
    event: Event
    step: int


class Compactor:
    """Moves the highest cached pages to the lowest free ones, every few steps. Scheduler's thread.

    Args:
        scheduler: Whose pages it moves; ``step`` belongs into its ``before_batch``.
        every: Steps between two moves.

    Attributes:
        gate: The waits around a move.
        stream: Where moves run.
        moved_pages: So far.
    """

    def __init__(self, scheduler: Scheduler, every: int) -> None:
        if every < 1:
            raise ConfigError(f"--compact-every {every}: expected an integer ≥ 1")
        self.gate = MoveGate()
        self.stream: Final = scheduler.runner.device.Stream("compaction")
        self.moved_pages = 0
        self._scheduler = scheduler
        self._every = every
        self._steps = 0
        self._tickets = 0
        self._moves: deque[_Move] = deque()

    def step(self) -> None:
        """Before a batch is chosen: move pages, if it is time and there is something to gain."""
        self._steps += 1
        self._complete()
        ledger = self._scheduler.ledger
        if self._steps % self._every or ledger.opened > ledger.capacity // 2:
            return  # the other half of the ledger belongs to the workload
        nodes, old, new = self._plan()
        if len(old):
            self._move(old, new)
            self._tell(nodes, old, new)
            self._scheduler.pages.free(-1, old)
            self.moved_pages += len(old)

    def _plan(self) -> tuple[list[Node], PageIds, PageIds]:
        """Nodes that may move, and the pages to move from and to; allocates the latter."""
        nodes = [node for node in self._nodes() if not node.loading and not node.backing_up]
        if not nodes:
            return [], _NONE, _NONE
        candidates = np.sort(np.concatenate([node.device_pages for node in nodes if node.device_pages is not None]))
        allocator = self._scheduler.device_pages
        free = allocator.alloc(allocator.available)
        lowest = np.sort(free)
        count = min(len(candidates), len(free), MOST_PAGES)
        old, new = candidates[::-1][:count], lowest[:count]
        count = int((new < old).sum())  # both run towards each other
        old, new = old[:count].copy(), new[:count].copy()
        allocator.free(free[~np.isin(free, new)][::-1])  # as they were, the first one on top
        return nodes, old, new

    def _move(self, old: PageIds, new: PageIds) -> None:
        scheduler = self._scheduler
        runner = scheduler.runner
        layout = runner.pool.layout
        if scheduler.pages.on_alloc is not None:
            scheduler.pages.on_alloc(-1, new)
        self._tickets += 1
        work = Work(
            site="compaction",
            accesses=(device(Mode.READ, old), device(Mode.WRITE, new)),
            layers=(0, layout.layers),
            group=self._tickets,
            direction=Direction.DEVICE_TO_DEVICE,
            size_bytes=2 * len(old) * layout.page_bytes,
            moves=True,
        )
        forward, pool = runner.forward_stream, scheduler.controller.engine.device_pool
        self.gate.begin(self.stream, forward)
        scheduler.controller.before_overwrite(self.stream, new)

        def move() -> None:
            where = runner.device.torch_device
            pool.move(to_device(old, where), to_device(new, where))

        with runner.device.stream(self.stream):
            runner.device.launch(move, work)
            moved = self.stream.record_event()
        self.gate.end(moved, forward)
        allocator, key = scheduler.device_pages, self.stream.stream_id
        allocator.stamp(old, key, self._tickets, mode=Mode.READ)
        allocator.stamp(new, key, self._tickets)
        scheduler.in_flight.launched(self.stream, self._tickets, moved)
        self._moves.append(_Move(self._tickets, moved, self._steps))

    def _tell(self, nodes: list[Node], old: PageIds, new: PageIds) -> None:
        """Everybody uses the new addresses; the tenancies change with them."""
        scheduler = self._scheduler
        pages = np.arange(scheduler.device_pages.pages)
        pages[old] = new
        tenancies: Int64Array = np.full(len(pages), -1, np.int64)
        tenancies[old] = scheduler.ledger.open(len(old))
        for node in nodes:
            if node.device_pages is not None and (tenancies[node.device_pages] >= 0).any():
                node.tenancies = _replaced(node.tenancies, tenancies[node.device_pages])
                node.device_pages = pages[node.device_pages]
        scheduler.move_pages(pages, tenancies)

    def _complete(self) -> None:
        """Learn that old moves are over."""
        while self._moves and self._moves[0].step <= self._steps - _KNOWN_AFTER:
            move = self._moves.popleft()
            move.event.synchronize()
            self._scheduler.in_flight.completed(self.stream, move.ticket)

    def _nodes(self) -> Iterator[Node]:
        """On the device, parents first."""
        todo = list(self._scheduler.radix.root.children.values())
        while todo:
            node = todo.pop()
            if node.device_pages is not None:
                yield node
                todo += node.children.values()


_NONE: Final[PageIds] = np.empty(0, np.int64)


def _replaced(old: Int64Array, new: Int64Array) -> Int64Array:
    """``new`` where it is one, else ``old``."""
    chosen: Int64Array = np.where(new >= 0, new, old)
    return chosen
