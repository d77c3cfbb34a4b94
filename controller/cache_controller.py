"""Load-back and write-back between the two tiers: queues, merging, fences, layer events, acknowledgements.

Life of a load-back: ``load`` claims host-only nodes and gives them device pages; ``start_loading`` merges what is
queued into one transfer, fences it, submits it and returns a ticket for the round that will consume it;
``acknowledge`` synchronises with its end and unpins the nodes. Write-backs likewise, without a ticket.

There are two kinds of write-backs. ``write`` pins its node: the device pages cannot be used again before the
acknowledgement. ``write_evicted`` is for nodes that give their device pages up at once: only the host pages are held,
and whoever overwrites the device pages next waits for the copy (``before_overwrite``).

Everything runs on the scheduler's thread. ``acknowledge`` waits for transfers at a fixed distance in scheduler steps,
so the host's decisions never depend on device timing; ``acknowledge_complete`` takes what a query shows to be over,
which frees pages earlier and makes them depend on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np
import torch

from hicache_obs.controller.decision_log import Agree, alone
from hicache_obs.controller.fence_policy import EvictingCopy, FencePolicy
from hicache_obs.controller.layer_done import LayerDoneCounter, Ticket
from hicache_obs.controller.radix_cache import HostHold, Node, RadixCache
from hicache_obs.controller.transfer_engine import PageMove, TransferEngine
from hicache_obs.errors import ControllerError, PagePinned
from hicache_obs.records import Access, Direction, Mode, PageIds, Purpose, Space, Work
from hicache_obs.streams.protocol import Device, Event, Stream


@dataclass(frozen=True, slots=True, eq=False)
class CacheOperation:
    """Queued work on one node. Page arrays are the node's at the time; a later split does not change them.

    Attributes:
        node: It. After a split, its lower part.
        device_pages, host_pages: ``(n,) int64``, matching by position.
        hold: Of ``write_evicted``: what keeps the host pages until the acknowledgement.
    """

    node: Node
    device_pages: PageIds
    host_pages: PageIds
    hold: HostHold | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SubmittedTransfer:
    """A transfer in flight.

    Attributes:
        transfer: Its id.
        direction: Load-back or write-back.
        operations: What it moves.
        stream: Stream it runs on.
        finish: Recorded after its last copy.
        step: Scheduler step of the submission.
        evicting: Its device pages may be used again while it is in flight.
    """

    transfer: int
    direction: Direction
    operations: tuple[CacheOperation, ...]
    stream: Stream
    finish: Event
    step: int
    evicting: bool = False

    @property
    def device_pages(self) -> PageIds:
        """Of all operations."""
        return np.concatenate([operation.device_pages for operation in self.operations])

    @property
    def host_pages(self) -> PageIds:
        """Of all operations."""
        return np.concatenate([operation.host_pages for operation in self.operations])


@dataclass(slots=True)
class ControllerCounters:
    """What the controller did. Load-backs and write-backs count transfers, pages count once per transfer.

    Attributes:
        load_backs, write_backs: Transfers, the evicting ones included.
        evicting_write_backs: Write-backs of pages that were given up at once.
        restored_pages, backed_up_pages: Pages they moved.
        index_moves: Index tensors filled on the device.
    """

    load_backs: int = 0
    write_backs: int = 0
    evicting_write_backs: int = 0
    restored_pages: int = 0
    backed_up_pages: int = 0
    index_moves: int = 0


def merge_ops(operations: Sequence[CacheOperation]) -> tuple[PageIds, PageIds]:
    """Device pages and host pages of all operations, in queue order: one transfer instead of many."""
    return (
        np.concatenate([operation.device_pages for operation in operations]),
        np.concatenate([operation.host_pages for operation in operations]),
    )


@dataclass(eq=False)
class CacheController:
    """Moves cached prefixes between the tiers.

    Attributes:
        device, engine, radix: Its parts.
        policy: What load-backs wait for, and write-backs unless there is a ``backup_policy``.
        backup_policy: What write-backs wait for, and whoever overwrites pages that one of them still reads.
        load_fence_stream, write_fence_stream: Stream whose forward rounds a load-back, a write-back must not
            overtake. ``None`` (the default) means no fence; the scheduler sets them from the model runner before
            every submission, since the forward stream may be replaced.
        layer_done: Hands layer events to consuming rounds.
        on_transfer: Called with every submitted transfer; the demo's writer gate listens.
        on_backed_up: Told of every write-back that is known to be complete, right after its nodes are unpinned.
        agree: Asked before transfers are taken to be complete that only a query shows to be.
        counters: What it did.
    """

    device: Device
    engine: TransferEngine
    radix: RadixCache
    policy: FencePolicy
    backup_policy: FencePolicy | None = None
    load_fence_stream: Stream | None = None
    write_fence_stream: Stream | None = None
    layer_done: LayerDoneCounter = field(init=False)
    on_transfer: Callable[[SubmittedTransfer], None] | None = None
    on_backed_up: Callable[[SubmittedTransfer], None] | None = None
    agree: Agree = alone
    counters: ControllerCounters = field(default_factory=ControllerCounters)
    _load_queue: list[CacheOperation] = field(default_factory=list)
    _write_queue: list[CacheOperation] = field(default_factory=list)
    _evict_queue: list[CacheOperation] = field(default_factory=list)
    _loads: deque[SubmittedTransfer] = field(default_factory=deque)
    _writes: deque[SubmittedTransfer] = field(default_factory=deque)
    _transfers: int = 0

    def __post_init__(self) -> None:
        self.layer_done = LayerDoneCounter(self.device, self.engine.model_layers)

    @property
    def transfers_in_flight(self) -> int:
        """Submitted transfers that are not acknowledged."""
        return len(self._loads) + len(self._writes)

    def load(self, node: Node, device_pages: PageIds, tenancies: PageIds) -> None:
        """Queue the load-back of a host-only node into ``device_pages``; parents first.

        The node gets its device pages and is pinned at once; ``start_loading`` submits the copies.

        Args:
            node: On the host only, its parent on the device.
            device_pages, tenancies: ``(n,) int64`` freshly allocated pages and their ledger tenancies.

        Raises:
            PagePinned: An in-flight load-back has claimed the node already. Nothing changed.
            ControllerError: The node has no host pages, or see ``RadixCache.attach_device``.
        """
        if node.loading:
            raise PagePinned(f"{node!r} is pinned by an in-flight load-back; wait for its acknowledgement")
        if node.host_pages is None:
            raise ControllerError(f"load: {node!r} has no host pages to restore from")
        self.radix.attach_device(node, device_pages, tenancies)
        node.loading = True
        self._load_queue.append(CacheOperation(node, device_pages, node.host_pages))

    def write(self, node: Node, host_pages: PageIds) -> None:
        """Queue the write-back of a node into freshly allocated ``host_pages``; parents first.

        The node is pinned until the acknowledgement. Its contents must have been launched, not finished: the
        fence orders the copy after the rounds that write them.
        """
        if node.device_pages is None:
            raise ControllerError(f"write: {node!r} has no device pages to back up")
        self.radix.attach_host(node, host_pages)
        node.backing_up = True
        self._write_queue.append(CacheOperation(node, node.device_pages, host_pages))

    def write_evicted(self, node: Node, host_pages: PageIds) -> None:
        """Queue the write-back of a node whose device pages will be given up; parents first.

        As ``write``, but the device pages may be freed as soon as ``start_evicting`` was called.
        """
        if node.device_pages is None:
            raise ControllerError(f"write_evicted: {node!r} has no device pages to back up")
        self.radix.attach_host(node, host_pages)
        hold = self.radix.hold_host([node])
        self._evict_queue.append(CacheOperation(node, node.device_pages, host_pages, hold))

    def start_loading(self, step: int) -> Ticket | None:
        """Submit all queued load-backs as one transfer.

        Returns:
            What the consuming round passes to ``layer_done.wait_until`` for each layer; ``None`` if the queue
            was empty.
        """
        if not self._load_queue:
            return None
        move, operations = self._prepare(self._load_queue)
        start = self.device.current_stream().record_event()
        stream = self.engine.host_to_device_stream
        self.policy.fence(stream, getattr(self, "load_fence_stream", None), move.device_pages, Purpose.LOAD_FENCE)
        self.before_overwrite(stream, move.device_pages, Purpose.LOAD_FENCE)
        self._await_host_pages(stream, move.host_pages)
        ticket = self.layer_done.begin()
        finish = self.engine.submit_host_to_device(
            move, start_event=start, on_layer_done=lambda layer: self.layer_done.complete(ticket, layer)
        )
        self.layer_done.finish(ticket, finish)
        self.counters.load_backs += 1
        self.counters.restored_pages += len(move.device_pages)
        direction = Direction.HOST_TO_DEVICE
        self._submitted(self._loads, SubmittedTransfer(move.transfer, direction, operations, stream, finish, step))
        return ticket

    def start_writing(self, step: int) -> bool:
        """Submit all queued write-backs as one transfer; whether there was one."""
        return self._start_writing(self._write_queue, step, evicting=False)

    def start_evicting(self, step: int) -> bool:
        """Submit all queued write-backs of evicted nodes as one transfer; whether there was one."""
        return self._start_writing(self._evict_queue, step, evicting=True)

    def before_round(self, stream: Stream, pages: PageIds) -> None:
        """A round that writes device ``pages`` is about to be launched on ``stream``."""
        self.before_overwrite(stream, pages)

    def before_overwrite(self, stream: Stream, pages: PageIds, purpose: Purpose = Purpose.PLAIN) -> None:
        """Make ``stream`` wait for write-backs in flight that may read device ``pages``, as the policy says."""
        readers = [EvictingCopy(w.stream, w.finish, w.device_pages) for w in self._writes if w.evicting]
        if readers:
            (self.backup_policy or self.policy).reuse(stream, readers, pages, purpose)

    def _await_host_pages(self, stream: Stream, host_pages: PageIds) -> None:
        """A node evicted a moment ago may be restored while its write-back still fills the host pages."""
        for write in reversed(self._writes):
            if write.evicting and np.isin(host_pages, write.host_pages).any():
                stream.wait_event(write.finish)
                return  # those before it run on the same stream

    def _start_writing(self, queue: list[CacheOperation], step: int, *, evicting: bool) -> bool:
        if not queue:
            return False
        move, operations = self._prepare(queue)
        start = self.device.current_stream().record_event()
        stream = self.engine.device_to_host_stream
        policy = self.backup_policy or self.policy
        policy.fence(stream, getattr(self, "write_fence_stream", None), move.device_pages, Purpose.WRITE_FENCE)
        finish = self.engine.submit_device_to_host(move, start_event=start)
        self.counters.write_backs += 1
        self.counters.evicting_write_backs += evicting
        self.counters.backed_up_pages += len(move.device_pages)
        direction = Direction.DEVICE_TO_HOST
        submitted = SubmittedTransfer(move.transfer, direction, operations, stream, finish, step, evicting)
        self._submitted(self._writes, submitted)
        return True

    def acknowledge(self, up_to_step: int) -> None:
        """Synchronise with every transfer submitted in ``up_to_step`` or before, and unpin its nodes."""
        for queue in (self._loads, self._writes):
            while queue and queue[0].step <= up_to_step:
                self._release(queue.popleft())

    def acknowledge_complete(self) -> None:
        """Unpin the nodes of transfers that a query shows to be complete, in order of submission.

        With peers: of as many as are complete on all ranks. Blocks for them to ask, never for the device.
        """
        queues = (self._loads, self._writes)
        if self.agree is alone:  # each query sees what the release before it has waited for
            for queue in queues:
                while queue and queue[0].finish.query():
                    self._release(queue.popleft())
            return
        if not self.transfers_in_flight:
            return
        complete = [len(list(takewhile(_complete, queue))) for queue in queues]
        for queue, count in zip(queues, self.agree("acks", complete), strict=True):
            for _ in range(count):
                self._release(queue.popleft())

    def _release(self, done: SubmittedTransfer) -> None:
        """Unpin the nodes of a transfer once it is complete."""
        done.finish.synchronize()  # after a query that said so it returns at once, and turns the poll into an order
        self.engine.blocks.settled(done.transfer)
        for operation in done.operations:
            if done.direction is Direction.HOST_TO_DEVICE:
                operation.node.loading = False
            elif operation.hold is not None:
                self.radix.release_host(operation.hold)
            else:
                operation.node.backing_up = False
        if done.direction is Direction.DEVICE_TO_HOST and self.on_backed_up is not None:
            self.on_backed_up(done)

    def _prepare(self, queue: list[CacheOperation]) -> tuple[PageMove, tuple[CacheOperation, ...]]:
        """Merge and empty ``queue`` and move the indices to the device on the current stream."""
        operations = tuple(queue)
        queue.clear()
        device_pages, host_pages = merge_ops(operations)
        self._transfers += 1
        host_index = torch.from_numpy(host_pages)
        block = self.engine.blocks.take(len(device_pages))
        device_index = block.tensor[: len(device_pages)]
        move = PageMove(device_pages, host_pages, device_index, host_index, self._transfers, block)
        staging = torch.from_numpy(device_pages)
        if device_index.device.type == "cuda":
            staging = staging.pin_memory()
        work = Work(
            site="index move",
            accesses=(Access(Space.BUFFER, Mode.WRITE, move.index_buffer),),
            group=move.transfer,
            size_bytes=device_index.nbytes,
        )
        self.device.launch(lambda: _fill(device_index, staging), work)
        self.counters.index_moves += 1
        return move, operations

    def _submitted(self, queue: deque[SubmittedTransfer], transfer: SubmittedTransfer) -> None:
        queue.append(transfer)
        if self.on_transfer is not None:
            self.on_transfer(transfer)


def _complete(transfer: SubmittedTransfer) -> bool:
    return transfer.finish.query()


def _fill(index: torch.Tensor, staging: torch.Tensor) -> None:
    index.copy_(staging, non_blocking=True)
