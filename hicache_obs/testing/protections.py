"""Takes one protection at a time out of the cache controller: each is there against a race, and here is the proof.

Every ``without_…`` and ``with_…`` changes one engine that is otherwise whole, before it runs. Imports torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np

from hicache_obs.controller.cache_controller import CacheController, SubmittedTransfer
from hicache_obs.controller.compaction import Compactor, MoveGate
from hicache_obs.controller.engine import Engine
from hicache_obs.controller.fence_policy import EvictingCopy, FencePolicy, NoFence, PageFence
from hicache_obs.controller.graph_rounds import GraphRunner
from hicache_obs.controller.hybrid import HybridTransferEngine
from hicache_obs.controller.hybrid_controller import HybridCacheController
from hicache_obs.controller.index_blocks import IndexBlock, IndexBlocks
from hicache_obs.controller.layer_done import LayerDoneCounter, Ticket
from hicache_obs.controller.page_stamps import PageStamps
from hicache_obs.controller.radix_cache import HostHold, Node
from hicache_obs.controller.storage_control import Prefetch, StorageControl
from hicache_obs.controller.storage_jobs import Done, Fetch, Store
from hicache_obs.controller.storage_page import NO_TAG, unpack_page
from hicache_obs.controller.transfer_engine import PageMove, TransferEngine
from hicache_obs.findings import Hazard
from hicache_obs.records import Direction, Mode, PageIds, Purpose
from hicache_obs.streams.protocol import Event, Stream


class LeavesOut:
    """A fence policy, but for transfers of one purpose."""

    def __init__(self, policy: FencePolicy, purpose: Purpose) -> None:
        self.name = policy.name
        self._policy, self._purpose = policy, purpose

    def fence(self, transfer_stream: Stream, fence_stream: Stream | None, pages: PageIds, purpose: Purpose) -> None:
        """See ``FencePolicy.fence``."""
        if purpose is not self._purpose:
            self._policy.fence(transfer_stream, fence_stream, pages, purpose)

    def reuse(self, writer: Stream, readers: Sequence[EvictingCopy], pages: PageIds, purpose: Purpose) -> None:
        """See ``FencePolicy.reuse``."""
        self._policy.reuse(writer, readers, pages, purpose)


class NeverWaits(LayerDoneCounter):
    """Rounds read restored pages without waiting for them."""

    def wait_until(self, ticket: Ticket, layer: int) -> None:
        """Check the ticket only."""
        self._current(ticket)


class WaitsTooEarly(LayerDoneCounter):
    """Layer n is read once layer n - 1 has been restored."""

    def wait_until(self, ticket: Ticket, layer: int) -> None:
        """Wait for the layer before."""
        if layer:
            super().wait_until(ticket, layer - 1)


class CopiesElsewhere(TransferEngine):
    """The fenced streams stay empty: the copies of one direction run on another."""

    def __init__(self, engine: TransferEngine, direction: Direction) -> None:
        super().__init__(engine.device, engine.device_pool, engine.host_pool, io=engine.io)
        self.blocks = engine.blocks
        self._direction = direction
        self._elsewhere = engine.device.Stream("elsewhere")

    def submit_host_to_device(
        self, move: PageMove, *, start_event: Event, on_layer_done: Callable[[int], None]
    ) -> Event:
        """See ``TransferEngine.submit_host_to_device``."""
        fenced = self.host_to_device_stream
        if self._direction is Direction.HOST_TO_DEVICE:
            self.host_to_device_stream = self._elsewhere
        try:
            return super().submit_host_to_device(move, start_event=start_event, on_layer_done=on_layer_done)
        finally:
            self.host_to_device_stream = fenced

    def submit_device_to_host(self, move: PageMove, *, start_event: Event) -> Event:
        """See ``TransferEngine.submit_device_to_host``."""
        fenced = self.device_to_host_stream
        if self._direction is Direction.DEVICE_TO_HOST:
            self.device_to_host_stream = self._elsewhere
        try:
            return super().submit_device_to_host(move, start_event=start_event)
        finally:
            self.device_to_host_stream = fenced


class StartsAtOnce(TransferEngine):
    """Copies do not wait for the event after which their index tensors are filled; see ``FreshBlocks``."""

    def submit_host_to_device(
        self, move: PageMove, *, start_event: Event, on_layer_done: Callable[[int], None]
    ) -> Event:
        """See ``TransferEngine.submit_host_to_device``."""
        start_event = self.device.Event()  # never recorded: a wait for it is a no-op
        return super().submit_host_to_device(move, start_event=start_event, on_layer_done=on_layer_done)

    def submit_device_to_host(self, move: PageMove, *, start_event: Event) -> Event:
        """See ``TransferEngine.submit_device_to_host``."""
        return super().submit_device_to_host(move, start_event=self.device.Event())


class FreshBlocks(IndexBlocks):
    """Blocks hold page 0 until they are filled: what a copy makes of a wild index is not the same in every run."""

    def take(self, count: int) -> IndexBlock:
        """See ``IndexBlocks.take``."""
        block = super().take(count)
        block.tensor.zero_()
        return block


class NeverAwaited:
    """The end of a transfer, for a host that takes it for granted."""

    def record(self, stream: Stream | None = None) -> None:
        """Nothing."""

    def wait(self, stream: Stream | None = None) -> None:
        """Nothing."""

    def query(self) -> bool:
        """True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""

    def elapsed_time(self, end: Event) -> float:
        """0."""
        return 0.0


class NobodyWaits(CacheController):
    """Nodes are released at the usual time, whether or not their transfers are complete."""

    def _submitted(self, queue: deque[SubmittedTransfer], transfer: SubmittedTransfer) -> None:
        super()._submitted(queue, replace(transfer, finish=NeverAwaited()))


class HoldsNothing(StorageControl):
    """Host pages may be given up, and filled with something else, while a storage thread reads them."""

    def _hold(self, node: Node) -> HostHold | None:
        return None


class TakesAtOnce(StorageControl):
    """Pages are taken to have arrived from storage when they are asked for; what they will hold is looked up."""

    def _fetch(self, prefetch: Prefetch, count: int) -> None:
        super()._fetch(prefetch, count)
        job = prefetch.job
        if isinstance(job, Fetch):
            self._take(Done(job, len(job.keys), np.array([self._tag(key) for key in job.keys], np.int64)))

    def _take(self, done: Done) -> None:
        if isinstance(done.job, Store) or done.job.number in self._fetching:
            super()._take(done)

    def _tag(self, key: str) -> int:
        data = self.tier.backend.read(key)
        assert data is not None  # a probe has seen it
        page = unpack_page(data, self.tier.memory.page_bytes)
        return page.tag if page.writer == self.tier.writer else NO_TAG


class ReplaysUnawaited(GraphRunner):
    """A replay does not wait for the load-back its round consumes: the waits per layer were left out, as they must be,
    and nothing took their place."""

    def await_load(self, layer_wait: Callable[[int], None]) -> None:
        """Nothing."""


class FillsAtOnce(GraphRunner):
    """The next round's inputs are filled whether or not the replay before has read its own."""

    def await_inputs(self, read_done: Event) -> None:
        """Nothing."""


class MovesAtOnce(MoveGate):
    """A move does not wait for the rounds that still use the old places, or the new ones."""

    def begin(self, moves: Stream, forward: Stream) -> None:
        """Nothing."""


class MovesUnawaited(MoveGate):
    """Rounds use the new places before the pages are there."""

    def end(self, moved: Event, forward: Stream) -> None:
        """Nothing."""


class UnawaitedTables(HybridTransferEngine):
    """Nobody waits for new entries of the translation tables."""

    def await_translations(self, stream: Stream) -> None:
        """Nothing."""


class UnmarkedBlocks(IndexBlocks):
    """The allocator is not told that the copies' stream reads an index tensor."""

    def mark(self, block: IndexBlock, stream: Stream) -> None:
        """Nothing."""


class UnsettledBlocks(IndexBlocks):
    """Marked blocks are kept for good."""

    def settled(self, transfer: int) -> None:
        """Nothing."""


def without_load_fence(engine: Engine) -> None:
    """Load-backs are not fenced."""
    engine.controller.policy = LeavesOut(engine.controller.policy, Purpose.LOAD_FENCE)


def without_write_fence(engine: Engine) -> None:
    """Write-backs are not fenced."""
    engine.controller.policy = LeavesOut(engine.controller.policy, Purpose.WRITE_FENCE)


def without_layer_waits(engine: Engine) -> None:
    """See ``NeverWaits``."""
    engine.controller.layer_done = NeverWaits(engine.controller.device, engine.controller.layer_done.layers)


def with_layer_waits_too_early(engine: Engine) -> None:
    """See ``WaitsTooEarly``."""
    engine.controller.layer_done = WaitsTooEarly(engine.controller.device, engine.controller.layer_done.layers)


def with_load_copies_elsewhere(engine: Engine) -> None:
    """Load-backs run on another stream than the one that is fenced."""
    engine.controller.engine = CopiesElsewhere(engine.controller.engine, Direction.HOST_TO_DEVICE)


def with_write_copies_elsewhere(engine: Engine) -> None:
    """Write-backs run on another stream than the one that is fenced."""
    engine.controller.engine = CopiesElsewhere(engine.controller.engine, Direction.DEVICE_TO_HOST)


def without_start_waits(engine: Engine) -> None:
    """See ``StartsAtOnce``."""
    engine.controller.engine.__class__ = StartsAtOnce
    engine.controller.engine.blocks.__class__ = FreshBlocks


def without_readers_in_stamps(engine: Engine) -> None:
    """Pages are stamped by the rounds that write them, and no longer by those that only read them."""
    pages = engine.scheduler.device_pages
    stamp = pages.stamp

    def writes_only(ids: PageIds, stream_key: int, ticket: int, *, mode: Mode = Mode.WRITE) -> None:
        if mode is Mode.WRITE:
            stamp(ids, stream_key, ticket)

    pages.stamp = writes_only  # type: ignore[method-assign]  # this is the one place that breaks it


def without_write_pins(engine: Engine) -> None:
    """Nodes may be evicted, and their pages used again, while a write-back still reads them."""
    write = engine.controller.write

    def unpinned(node: Node, host_pages: PageIds) -> None:
        write(node, host_pages)
        node.backing_up = False

    engine.controller.write = unpinned  # type: ignore[method-assign]  # this is the one place that breaks it


def without_acknowledgements(engine: Engine) -> None:
    """See ``NobodyWaits``. Index tensors are never used again: nobody knows when they could be."""
    engine.controller.__class__ = NobodyWaits
    engine.controller.engine.blocks.__class__ = UnsettledBlocks


def without_load_wait_of_replays(engine: Engine) -> None:
    """See ``ReplaysUnawaited``."""
    engine.runner.__class__ = ReplaysUnawaited


def without_input_wait_of_replays(engine: Engine) -> None:
    """See ``FillsAtOnce``."""
    engine.runner.__class__ = FillsAtOnce


def without_move_gate(engine: Engine) -> None:
    """See ``MovesAtOnce``."""
    _compactor(engine).gate = MovesAtOnce()


def without_wait_for_moves(engine: Engine) -> None:
    """See ``MovesUnawaited``."""
    _compactor(engine).gate = MovesUnawaited()


def without_record_stream(engine: Engine) -> None:
    """See ``UnmarkedBlocks``."""
    engine.controller.engine.blocks.__class__ = UnmarkedBlocks


def without_place_stamps(engine: Engine) -> None:
    """The page fence asks who used the virtual pages last, not who used the places they have now."""
    policy = engine.controller.policy
    assert isinstance(policy, PageFence)
    policy.allocator = engine.scheduler.device_pages


def without_shared_stamps(engine: Engine) -> None:
    """Each pool stamps places for itself: that the bytes were another pool's a moment ago is not seen."""
    for pool in engine.scheduler.pages.partial.pools:
        pool.place_stamps = PageStamps(pool.translation.slabs.pages, name=pool.name)


def without_table_fence(engine: Engine) -> None:
    """Entries of translation tables change while rounds and copies in flight read them."""
    assert isinstance(engine.controller, HybridCacheController)
    engine.controller.table_policies = [NoFence() for _ in engine.controller.table_policies]


def without_table_wait(engine: Engine) -> None:
    """See ``UnawaitedTables``."""
    engine.controller.engine.__class__ = UnawaitedTables


def _compactor(engine: Engine) -> Compactor:
    assert engine.compactor is not None, "pages of this engine never move"
    return engine.compactor


def without_reuse_fence(engine: Engine) -> None:
    """Nobody waits for write-backs of evicted pages before the pages are overwritten."""
    engine.controller.before_overwrite = lambda *_, **__: None  # type: ignore[method-assign]  # this is the one place that breaks it


def without_metadata_barrier(engine: Engine) -> None:
    """The next round's metadata are written whether or not the round in flight has read its own."""
    assert engine.scheduler.metadata is not None
    engine.scheduler.metadata.barrier = lambda forward: None  # type: ignore[method-assign]  # this is the one place that breaks it


def without_storage_holds(engine: Engine) -> None:
    """See ``HoldsNothing``."""
    _storage(engine).__class__ = HoldsNothing


def without_storage_replies(engine: Engine) -> None:
    """See ``TakesAtOnce``."""
    _storage(engine).__class__ = TakesAtOnce


def without_completed_backups(engine: Engine) -> None:
    """Host pages are handed to storage when their write-back is submitted, not when it is known to be complete."""
    controller, told = engine.controller, _storage(engine).backed_up
    submitted = controller._submitted
    controller.on_backed_up = None

    def early(queue: deque[SubmittedTransfer], transfer: SubmittedTransfer) -> None:
        submitted(queue, transfer)
        if transfer.direction is Direction.DEVICE_TO_HOST:
            told(transfer)

    controller._submitted = early  # type: ignore[method-assign]  # this is the one place that breaks it


def _storage(engine: Engine) -> StorageControl:
    assert engine.scheduler.storage is not None
    return engine.scheduler.storage


@dataclass(frozen=True, slots=True)
class Protection:
    """A protection that can be taken out.

    Attributes:
        remove: Takes it out of an engine that has not begun.
        against: What it is there against: the races found without it.
        fences: Policies under which it does something.
        options: Of the scheduler, with which it does something.
        storage: Only with a storage tier.
        evictions: Shown by a workload that restores prefixes right after they were evicted.
        engine: Fields of ``EngineConfig`` without which there is nothing to take out.
    """

    remove: Callable[[Engine], None]
    against: frozenset[Hazard]
    fences: tuple[str, ...] = ("stream", "page")
    options: Mapping[str, str | int] = field(default_factory=dict)
    storage: bool = False
    evictions: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)


_WAW, _WAR = Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_FORWARD_RESTORE
_RAW_LOAD, _RAW_WRITE = Hazard.RAW_RESTORE_FORWARD, Hazard.RAW_FORWARD_BACKUP
_WAR_WRITE = Hazard.WAR_BACKUP_FORWARD
_STORAGE = frozenset({Hazard.STORAGE_PREFETCH})
_WRITE_BACK: Final[Mapping[str, str | bool]] = {"write_policy": "write_back", "early_backup": False}
_GRAPHS: Final = {"graphs": True}
_MOVES: Final = {"compact_every": 1}
_HYBRID: Final = {"kv": "hybrid", "layers": 3, "window": 4, "window_pages": 7}
_CHUNKS: Final[Mapping[str, str | int]] = {"chunked_prefill": True, "max_extend_tokens": 6, "poll_acks": False}

PROTECTIONS: Final = {
    "load-fence": Protection(without_load_fence, frozenset({_WAW, _WAR})),
    "write-fence": Protection(without_write_fence, frozenset({_RAW_WRITE})),
    "layer-waits": Protection(without_layer_waits, frozenset({_RAW_LOAD})),
    "layer-order": Protection(with_layer_waits_too_early, frozenset({_RAW_LOAD})),
    "load-stream": Protection(with_load_copies_elsewhere, frozenset({_WAW, _WAR})),
    "write-stream": Protection(with_write_copies_elsewhere, frozenset({_RAW_WRITE})),
    "start-waits": Protection(without_start_waits, frozenset({Hazard.METADATA_WAR})),
    "write-pins": Protection(without_write_pins, frozenset({_WAR_WRITE})),
    "acks": Protection(without_acknowledgements, frozenset({_WAR_WRITE, Hazard.HOST_REUSE})),
    "reader-stamps": Protection(without_readers_in_stamps, frozenset({_WAR}), fences=("page",)),
    "reuse-fence": Protection(without_reuse_fence, frozenset({_WAR_WRITE}), options=_WRITE_BACK, evictions=True),
    "metadata-barrier": Protection(
        without_metadata_barrier, frozenset({Hazard.METADATA_WAR}), options={"barrier": "read_done"}
    ),
    "storage-holds": Protection(without_storage_holds, _STORAGE | {Hazard.HOST_REUSE}, storage=True),
    "storage-replies": Protection(without_storage_replies, _STORAGE | {Hazard.HOST_REUSE}, storage=True),
    "backup-acks": Protection(without_completed_backups, _STORAGE | {Hazard.HOST_REUSE}, storage=True),
    "record-stream": Protection(without_record_stream, frozenset({Hazard.LIFETIME})),
    "graph-load-wait": Protection(without_load_wait_of_replays, frozenset({Hazard.GRAPH}), engine=_GRAPHS),
    "graph-input-wait": Protection(without_input_wait_of_replays, frozenset({Hazard.GRAPH}), engine=_GRAPHS),
    "move-gate": Protection(without_move_gate, frozenset({Hazard.RELOCATION}), engine=_MOVES),
    "move-wait": Protection(without_wait_for_moves, frozenset({Hazard.RELOCATION}), engine=_MOVES),
    "place-stamps": Protection(
        without_place_stamps, frozenset({_WAW}), fences=("page",), options=_CHUNKS, engine=_HYBRID
    ),
    "shared-stamps": Protection(
        without_shared_stamps, frozenset({_WAW}), fences=("page",), options=_CHUNKS, engine=_HYBRID
    ),
    "table-fence": Protection(without_table_fence, frozenset({Hazard.METADATA_WAR}), options=_CHUNKS, engine=_HYBRID),
    "table-wait": Protection(without_table_wait, frozenset({Hazard.METADATA_WAR}), options=_CHUNKS, engine=_HYBRID),
}
"""By the name that ``hicache-obs explore --off`` takes."""
