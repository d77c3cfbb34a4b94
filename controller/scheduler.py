"""Continuous batching with overlap scheduling: round n+1 is launched before round n's result is handled.

One step, in this order, on one thread::

    acknowledge old transfers
    choose the next batch (admit with load-back, else decode, retract if pages run out)
    submit load-backs                       <- may reuse pages that the round in flight still writes
    launch the batch's round
    submit write-backs: of handled results, or early, of what the launched round will write
    handle the result of the round launched one step before (finish requests, free their pages)

A request found finished while handling round n is already part of round n+1 (its *overrun* row): its pages are
freed, and may be restored into, while that round still uses them. Nothing here waits for a round before freeing:
that is the point of overlap, and why transfers need fences.

Token output is independent of all of it: each request generates ``output_length`` tokens, greedily.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import numpy as np

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.batch import BatchMode, ForwardBatch, Int64Array, RoundResult
from hicache_obs.controller.cache_controller import CacheController
from hicache_obs.controller.fence_policy import InFlight
from hicache_obs.controller.layer_done import Ticket
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import ModelRunner
from hicache_obs.controller.radix_cache import Node, RadixCache
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ControllerError, OutOfPages
from hicache_obs.records import Mode, PageIds, pack_rows
from hicache_obs.streams.protocol import Stream

ACK_DISTANCE: Final = 2
"""Transfers are acknowledged this many steps after submission: their consuming round has been handled by then."""
_NONE: Final[Int64Array] = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """Limits of one scheduler.

    Attributes:
        max_running: Requests in decode at once.
        max_extend_rows, max_extend_tokens: Limits of one prefill round; one request may exceed the second.
        host_tier: Back prefixes up to host memory and restore them. Off: the reference run.
        early_backup: Write a prompt back as soon as the round that computes it is launched, instead of when its
            result is handled. The host copy exists one round earlier, and nothing but the write fence keeps the
            copy from reading pages before they are written.
        poll_acks: Before a step, also release the transfers that a query shows to be complete. Their pages may be
            evicted up to ``ACK_DISTANCE`` steps earlier, but what the scheduler does then depends on device timing.
    """

    max_running: int = 16
    max_extend_rows: int = 4
    max_extend_tokens: int = 4096
    host_tier: bool = True
    early_backup: bool = False
    poll_acks: bool = False


@dataclass(slots=True, eq=False)
class _State:
    """A request between admission and finish or retraction.

    Attributes:
        tokens: Prompt and the output tokens the host has seen.
        launched_len: Tokens in the KV cache once every launched round is done.
        page_count: Used entries of the request's row in the page table.
        slot: Row of the page table and entry of the device token buffer.
        locked: Tree node this request holds.
        last_round, last_stream: Newest round that has a row of it, and the stream that runs it.
        remaining: Output tokens still to be handled.
    """

    request: Request
    tokens: list[int]
    remaining: int
    slot: int
    launched_len: int
    page_count: int
    locked: Node
    last_round: int = 0
    last_stream: int = 0
    alive: bool = True


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A round in flight, its stream, and the requests of its rows."""

    result: RoundResult
    stream: Stream
    states: tuple[_State, ...]
    extend: bool


@dataclass(frozen=True, slots=True)
class Restored:
    """Where a restored page came from; the demo matches wrong contents with findings through it.

    Attributes:
        device_page: Where it was restored to.
        step: Scheduler step that submitted the load-back.
    """

    device_page: int
    step: int


@dataclass(slots=True)
class SchedulerCounters:
    """What the scheduler did."""

    rounds: int = 0
    extend_rounds: int = 0
    finished: int = 0
    retractions: int = 0
    output_tokens: int = 0
    evicted_device_pages: int = 0
    evicted_host_pages: int = 0


@dataclass(eq=False)
class Scheduler:
    """Runs requests to completion on one model runner. Not thread-safe.

    Attributes:
        runner, controller, radix, in_flight, device_pages, host_pages, ledger, options: Its parts; the two
            ``pages`` are the pools' allocators.
        before_launch, after_submit: Called before a round is launched and after the step's load-backs were
            submitted; the demo's writer gate hangs here. Both default to nothing.
        on_alloc, on_free: Told of device page ownership: ``(owner, pages)``.
        on_round: Told of every launched round and the requests of its rows: ``(round_id, request_ids)``.
        on_discard: Told which of them the host had given up before it handled the round: ``(round_id, request_ids)``.
        outputs: Output tokens of finished requests, by request id.
        restored: Every restored page, by ledger tenancy.
    """

    runner: ModelRunner
    controller: CacheController
    radix: RadixCache
    in_flight: InFlight
    device_pages: PageAllocator
    host_pages: PageAllocator
    ledger: ContentLedger
    options: SchedulerOptions
    before_launch: Callable[[], None] | None = None
    after_submit: Callable[[], None] | None = None
    on_alloc: Callable[[int, PageIds], None] | None = None
    on_free: Callable[[int, PageIds], None] | None = None
    on_round: Callable[[int, tuple[int, ...]], None] | None = None
    on_discard: Callable[[int, PageIds], None] | None = None
    counters: SchedulerCounters = field(default_factory=SchedulerCounters)
    outputs: dict[int, list[int]] = field(default_factory=dict)
    restored: dict[int, Restored] = field(default_factory=dict)
    _waiting: deque[tuple[Request, list[int], int]] = field(default_factory=deque)
    _running: list[_State] = field(default_factory=list)
    _launched: _Launched | None = None
    _step: int = 0
    _version: int = 0
    _decode_reads: tuple[int, PageIds] = (-1, _NONE)
    _decode_rows: tuple[int, bytes, PageIds] = (-1, b"", _NONE)
    _last_forward: Stream | None = None

    def __post_init__(self) -> None:
        slots = len(self.runner.token_buffer)
        if self.options.max_running > slots:
            raise ControllerError(f"max_running: {self.options.max_running}; the token buffer has {slots} slots")
        self._free_slots = list(range(self.options.max_running - 1, -1, -1))
        width = self.device_pages.pages
        self._table = np.zeros((self.options.max_running, width), np.int64)
        self._tenancy_table = np.zeros((self.options.max_running, width), np.int64)
        self._source_table = np.zeros((self.options.max_running, width), np.int64)

    @property
    def done(self) -> bool:
        """Every submitted request has finished and no round is in flight."""
        return not self._waiting and not self._running and self._launched is None

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in order.

        Raises:
            ControllerError: A request can never fit the device pool, even alone.
        """
        size = self.radix.page_size
        for request in requests:
            need = -(-(len(request.prompt) + request.output_length + 1) // size)
            if need > self.device_pages.pages:
                raise ControllerError(
                    f"request {request.request_id}: needs {need} device pages, the pool has {self.device_pages.pages}"
                )
            self._waiting.append((request, request.prompt.tolist(), request.output_length))

    def step(self) -> None:
        """One scheduler step; see the module's docstring."""
        self._step += 1
        self.controller.acknowledge(self._step - ACK_DISTANCE)
        if self.options.poll_acks:
            self.controller.acknowledge_complete()
        batch, states = self._next_batch()
        self._set_fence_streams()
        ticket = self.controller.start_loading(self._step)
        if self.after_submit is not None:
            self.after_submit()
        launched = None
        if batch is not None:
            launched = self._launch(batch, states, ticket)
            if batch.mode is BatchMode.EXTEND:
                for state, cached in zip(states, batch.prefix_lens.tolist(), strict=True):
                    self._cache_prompt(state, cached)
        # Also when nothing can run: a queued write-back pins the very pages that are missing.
        self._set_fence_streams()
        self.controller.start_writing(self._step)
        if self._launched is not None:
            self._handle(self._launched)
        self._launched = launched

    def drain(self) -> None:
        """Acknowledge everything in flight; call when ``done``."""
        self._set_fence_streams()
        self.controller.start_writing(self._step)
        if self.after_submit is not None:
            self.after_submit()
        self.controller.acknowledge(self._step)

    def _set_fence_streams(self) -> None:
        """Bind the fences to the runner's forward stream of now; a controller without them is left alone."""
        stream = self._forward_stream()
        for name in ("load_fence_stream", "write_fence_stream"):
            if hasattr(self.controller, name):
                setattr(self.controller, name, stream)

    def _forward_stream(self) -> Stream:
        """The runner's forward stream of now, made to follow the one it replaced, if it did.

        Later rounds read what earlier ones wrote; and a fence on a stream that does not follow the rounds in
        flight would cover none of them, so this comes before any fence.
        """
        stream = self.runner.forward_stream
        if self._last_forward is not None and self._last_forward.stream_id != stream.stream_id:
            stream.wait_stream(self._last_forward)
        self._last_forward = stream
        return stream

    # -- choosing a batch --------------------------------------------------------------------------------------

    def _next_batch(self) -> tuple[ForwardBatch | None, tuple[_State, ...]]:
        """The next round and its rows' requests; ``None`` when nothing can run."""
        admitted = self._admit()
        if admitted:
            return self._extend_batch(admitted), tuple(state for state, _ in admitted)
        self._make_room()
        if not self._running:
            return None, ()
        return self._decode_batch(), tuple(self._running)

    def _admit(self) -> list[tuple[_State, int]]:
        """Admit waiting requests; returns each with its number of cached tokens."""
        admitted: list[tuple[_State, int]] = []
        budget = self.options.max_extend_tokens
        while self._waiting and self._free_slots and len(admitted) < self.options.max_extend_rows:
            request, tokens, remaining = self._waiting[0]
            found = self._admit_one(request, tokens, remaining, budget if admitted else None)
            if found is None:
                break
            self._waiting.popleft()
            admitted.append(found)
            budget -= len(tokens) - found[1]
        self._running.extend(state for state, _ in admitted)
        return admitted

    def _admit_one(
        self, request: Request, tokens: list[int], remaining: int, budget: int | None
    ) -> tuple[_State, int] | None:
        """Match, lock, restore and allocate for one request; ``None``, with nothing changed, if it must wait."""
        size = self.radix.page_size
        prompt = np.asarray(tokens, np.int64)
        match = self.radix.match(prompt[: (len(tokens) - 1) // size * size])  # at least one token to compute
        path = match.device_nodes + match.host_nodes
        cached = match.device_len + match.host_len
        if budget is not None and len(tokens) - cached > budget:
            return None
        fresh = -(-len(tokens) // size) - cached // size
        last = path[-1] if path else self.radix.root
        self.radix.lock(last)
        if not self._room(match.host_len // size + fresh):  # optimistic: decode rows may have to retract one later
            self.radix.unlock(last)
            return None
        slot = self._free_slots.pop()
        state = _State(request, tokens, remaining, slot, len(tokens), 0, last)
        self._append(state, match.device_pages(), match.tenancies(), match.sources())
        for node in match.host_nodes:
            self._load(node, state)
        self._grow(state, fresh)
        return state, cached

    def _load(self, node: Node, state: _State) -> None:
        assert node.host_pages is not None  # match calls it a host node
        pages, tenancies = self._alloc(state.request.request_id, len(node.host_pages))
        self.controller.load(node, pages, tenancies)
        for page, tenancy in zip(pages.tolist(), tenancies.tolist(), strict=True):
            self.restored[tenancy] = Restored(page, self._step)
        self._append(state, pages, tenancies, node.sources)

    def _make_room(self) -> None:
        """Give each running request a slot for its next token; retract the newest while pages run out."""
        size = self.radix.page_size
        for state in list(self._running):
            while state.alive and state.launched_len >= state.page_count * size:
                if self._room(1):
                    self._grow(state, 1)
                else:
                    self._retract(self._running[-1])

    def _retract(self, state: _State) -> None:
        """Take a request's pages while its launched round still writes them; it starts over later."""
        self.counters.retractions += 1
        self._release(state, cache=False)
        self._running.remove(state)
        self._waiting.appendleft((state.request, state.tokens, state.remaining))

    # -- pages -------------------------------------------------------------------------------------------------

    def _room(self, pages: int) -> bool:
        """Evict until ``pages`` are free, if that is possible."""
        missing = pages - self.device_pages.available
        if missing > self.radix.device_evictable_pages:
            return False
        if missing > 0:
            evicted = self.radix.evict_device(missing).pages
            self.counters.evicted_device_pages += len(evicted)
            self._free(-1, evicted, cold=True)
        return True

    def _alloc(self, owner: int, count: int) -> tuple[PageIds, Int64Array]:
        pages = self.device_pages.alloc(count)
        if self.on_alloc is not None and count:
            self.on_alloc(owner, pages)
        return pages, self.ledger.open(count)

    def _free(self, owner: int, pages: PageIds, *, cold: bool = False) -> None:
        if self.on_free is not None and len(pages):
            self.on_free(owner, pages)
        self.device_pages.free(pages, cold=cold)

    def _grow(self, state: _State, count: int) -> None:
        pages, tenancies = self._alloc(state.request.request_id, count)
        self._append(state, pages, tenancies, tenancies)

    def _append(self, state: _State, pages: PageIds, tenancies: Int64Array, sources: Int64Array) -> None:
        start, end = state.page_count, state.page_count + len(pages)
        self._table[state.slot, start:end] = pages
        self._tenancy_table[state.slot, start:end] = tenancies
        self._source_table[state.slot, start:end] = sources
        state.page_count = end
        self._version += 1

    def _release(self, state: _State, *, cache: bool) -> None:
        """Hand the request's full pages to the tree (or not) and free the rest, stamped with its last round."""
        self._stamp(state, state.launched_len - 1)
        # The newest token's KV is written by the overrun row: it is not part of the cached sequence.
        full = min(len(state.tokens) - 1, state.launched_len) // self.radix.page_size
        if cache:
            left = self._insert(state, full)
            self._write_through(state.locked)
        else:
            left = self._owned(state)
        self.radix.unlock(state.locked)
        self._free(state.request.request_id, left)
        self._free_slots.append(state.slot)
        self._version += 1
        state.alive = False

    def _stamp(self, state: _State, kept: int) -> None:
        """Stamp the request's pages with its newest round, which writes past the first ``kept`` tokens."""
        pages = self._pages(state)
        written = pages[kept // self.radix.page_size :]
        self.device_pages.stamp(pages, state.last_stream, state.last_round, mode=Mode.READ)
        self.device_pages.stamp(written, state.last_stream, state.last_round)

    def _pages(self, state: _State) -> PageIds:
        pages: PageIds = self._table[state.slot, : state.page_count].copy()
        return pages

    def _owned(self, state: _State) -> PageIds:
        """Pages of the request that the tree does not own: those behind its locked node."""
        shared = 0
        node = state.locked
        while node.parent is not None:
            shared += len(node.tokens) // self.radix.page_size
            node = node.parent
        return self._pages(state)[shared:]

    def _insert(self, state: _State, full: int) -> PageIds:
        """Insert the first ``full`` pages into the tree and move the request's lock there.

        Returns:
            The request's own pages that the tree did not take: duplicates, and those behind the first ``full``.
        """
        slot, size = state.slot, self.radix.page_size
        pages, mine = self._pages(state)[:full], self._owned(state)
        inserted = self.radix.insert(
            np.asarray(state.tokens[: full * size], np.int64),
            pages,
            self._tenancy_table[slot, :full],
            self._source_table[slot, :full],
        )
        self.radix.lock(inserted.last_node)
        self.radix.unlock(state.locked)
        state.locked = inserted.last_node
        self._adopt(state, full)
        taken = np.isin(mine, pages) & ~np.isin(mine, inserted.duplicate_pages)
        left: PageIds = mine[~taken]
        return left

    def _adopt(self, state: _State, full: int) -> None:
        """Use the tree's pages for the first ``full`` ones: where it had them already, ours were duplicates."""
        chain: list[Node] = []
        node = state.locked
        while node.parent is not None:
            chain.append(node)
            node = node.parent
        end = full
        for node in chain:
            assert node.device_pages is not None  # just inserted
            start = end - len(node.device_pages)
            self._table[state.slot, start:end] = node.device_pages
            self._tenancy_table[state.slot, start:end] = node.tenancies
            self._source_table[state.slot, start:end] = node.sources
            end = start
        self._version += 1

    def _cache_prompt(self, state: _State, cached: int) -> None:
        """The launched round writes the prompt's KV past its first ``cached`` tokens: share the full pages.

        Pages whose contents the tree already has are duplicates and are freed.
        """
        self._stamp(state, cached)
        full = state.launched_len // self.radix.page_size
        left = self._insert(state, full)
        if self.options.early_backup:
            self._write_through(state.locked)
        self._free(state.request.request_id, left[: len(left) - (state.page_count - full)])

    def _write_through(self, node: Node) -> None:
        """Queue write-backs for every node up to ``node`` that host memory does not have yet."""
        if not self.options.host_tier:
            return
        for step in self.radix.unbacked(node):
            if step.device_pages is None:
                return
            count = len(step.device_pages)
            missing = count - self.host_pages.available
            if missing > 0:
                freed = self.radix.evict_host(missing)
                self.counters.evicted_host_pages += len(freed)
                self.host_pages.free(freed)
            try:
                pages = self.host_pages.alloc(count)
            except OutOfPages:
                return  # host memory is full of pinned prefixes: this one is not backed up
            self.controller.write(step, pages)

    # -- rounds ------------------------------------------------------------------------------------------------

    def _extend_batch(self, admitted: list[tuple[_State, int]]) -> ForwardBatch:
        states = [state for state, _ in admitted]
        cached = np.array([length for _, length in admitted], np.int64)
        total = np.array([len(state.tokens) for state in states], np.int64)
        new = [np.asarray(state.tokens[length:], np.int64) for state, length in admitted]
        slots = np.array([state.slot for state in states], np.int64)
        size = self.radix.page_size
        rows = [self._pages(state) for state in states]
        writes = [row[length // size :] for row, (_, length) in zip(rows, admitted, strict=True)]
        return self._batch(
            BatchMode.EXTEND,
            slots,
            np.concatenate(new),
            cached,
            total - cached,
            np.unique(np.concatenate(rows)),
            np.unique(np.concatenate(writes)),
            self._restored_cells(slots, cached // size),
            pack_rows(
                [state.request.request_id for state in states],
                rows,
                (-(-cached // size)).tolist(),
                [len(pages) for pages in writes],
            ),
        )

    def _restored_cells(self, slots: Int64Array, counts: Int64Array) -> tuple[PageIds, Int64Array, Int64Array]:
        """Pages, tenancies and sources of the restored pages among the first ``counts`` pages of ``slots``."""
        row = np.repeat(slots, counts)
        column = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        tenancies = self._tenancy_table[row, column]
        restored = np.flatnonzero(tenancies != self._source_table[row, column])
        _, first = np.unique(tenancies[restored], return_index=True)  # rows may share pages
        cells = row[restored[first]], column[restored[first]]
        return self._table[cells], self._tenancy_table[cells], self._source_table[cells]

    def _decode_batch(self) -> ForwardBatch:
        states = self._running
        slots = np.array([state.slot for state in states], np.int64)
        lengths = np.array([state.launched_len for state in states], np.int64)
        tails = self._table[slots, lengths // self.radix.page_size]
        version, reads = self._decode_reads
        if version != self._version:
            reads = np.unique(np.concatenate([self._pages(state) for state in states]))
            self._decode_reads = (self._version, reads)
        batch = self._batch(
            BatchMode.DECODE,
            slots,
            _NONE,
            lengths,
            np.ones(len(states), np.int64),
            reads,
            np.sort(tails),
            (_NONE, _NONE, _NONE),
            self._decode_row_ids(states, -(-lengths // self.radix.page_size)),
        )
        for state in states:
            state.launched_len += 1
        return batch

    def _decode_row_ids(self, states: Sequence[_State], read_counts: Int64Array) -> PageIds:
        """``pack_rows`` of a decode round; the last round's array if nothing has changed."""
        key = self._version, read_counts.tobytes()
        if self._decode_rows[:2] != key:
            requests, pages = [state.request.request_id for state in states], [self._pages(state) for state in states]
            self._decode_rows = *key, pack_rows(requests, pages, read_counts.tolist(), [1] * len(states))
        return self._decode_rows[2]

    def _batch(
        self,
        mode: BatchMode,
        slots: Int64Array,
        tokens: Int64Array,
        cached: Int64Array,
        new: Int64Array,
        reads: PageIds,
        writes: PageIds,
        checks: tuple[PageIds, Int64Array, Int64Array],
        rows: PageIds,
    ) -> ForwardBatch:
        width = int((-(-(cached + new) // self.radix.page_size)).max())
        self.counters.rounds += 1
        self.counters.extend_rounds += mode is BatchMode.EXTEND
        return ForwardBatch(
            round_id=self.counters.rounds,
            mode=mode,
            token_slots=slots,
            input_tokens=tokens,
            prefix_lens=cached,
            new_lens=new,
            page_table=self._table[slots, :width],
            page_tenancies=self._tenancy_table[slots, :width],
            read_pages=reads,
            write_pages=writes,
            check_pages=checks[0],
            check_tenancies=checks[1],
            check_sources=checks[2],
            row_ids=rows,
        )

    def _launch(self, batch: ForwardBatch, states: tuple[_State, ...], ticket: Ticket | None) -> _Launched:
        if self.before_launch is not None:
            self.before_launch()
        stream = self._forward_stream()
        stream.wait_stream(self.runner.device.current_stream())
        wait: Callable[[int], None] | None = None
        if ticket is not None:
            wait = partial(self.controller.layer_done.wait_until, ticket)
        result = self.runner.forward(batch, layer_wait=wait)
        for state in states:
            state.last_round, state.last_stream = batch.round_id, stream.stream_id
        if self.on_round is not None:
            self.on_round(batch.round_id, tuple(state.request.request_id for state in states))
        self.in_flight.launched(stream, batch.round_id, result.done)
        return _Launched(result, stream, states, batch.mode is BatchMode.EXTEND)

    def _handle(self, launched: _Launched) -> None:
        """Handle a round's result: append tokens, finish requests. Blocks until the round is done."""
        launched.result.done.synchronize()
        self.in_flight.completed(launched.stream, launched.result.round_id)
        given_up = [state.request.request_id for state in launched.states if not state.alive]
        if given_up and self.on_discard is not None:
            self.on_discard(launched.result.round_id, np.array(given_up, np.int64))
        for state, token in zip(launched.states, launched.result.next_tokens.tolist(), strict=True):
            if not state.alive:
                continue  # retracted or finished since: an overrun row, its token is dropped
            if launched.extend and not self.options.early_backup:
                self._write_through(state.locked)
            state.tokens.append(token)
            state.remaining -= 1
            self.counters.output_tokens += 1
            if state.remaining == 0:
                self._finish(state)

    def _finish(self, state: _State) -> None:
        self.counters.finished += 1
        count = state.request.output_length
        self.outputs[state.request.request_id] = state.tokens[-count:]
        self._release(state, cache=True)
        self._running.remove(state)
