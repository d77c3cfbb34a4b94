"""Continuous batching with overlap scheduling: round n+1 is launched before round n's result is handled.

One step, in this order, on one thread::

    acknowledge old transfers
    choose the next batch (a prompt's next chunk, admission with load-back, else decode; retract if pages run out),
        submitting write-backs of pages before they are evicted
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
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Final

import numpy as np

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.backups import Backups
from hicache_obs.controller.batch import BatchMode, ForwardBatch, RoundResult
from hicache_obs.controller.batch_builder import BatchBuilder
from hicache_obs.controller.batch_metadata import BatchMetadata
from hicache_obs.controller.cache_controller import CacheController
from hicache_obs.controller.decision_log import Agree, alone
from hicache_obs.controller.fence_policy import InFlight
from hicache_obs.controller.layer_done import Ticket
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import ModelRunner
from hicache_obs.controller.page_table import PageTable
from hicache_obs.controller.partial_pool import PartialPools
from hicache_obs.controller.radix_cache import Match, Node, RadixCache
from hicache_obs.controller.radix_node import Int64Array
from hicache_obs.controller.request_pages import RequestPages
from hicache_obs.controller.request_state import PrefillRow, RequestState, Tokens, Waiting
from hicache_obs.controller.scheduler_counters import Restored, SchedulerCounters
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage_control import StorageControl
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError, ControllerError
from hicache_obs.records import PageIds
from hicache_obs.streams.protocol import Stream

ACK_DISTANCE: Final = 2
"""Transfers are acknowledged this many steps after submission: their consuming round has been handled by then."""


@dataclass(frozen=True, slots=True, eq=False)
class _Launched:
    """A round in flight, its stream, and its rows: the request, and whether the row samples its next token."""

    result: RoundResult
    stream: Stream
    rows: tuple[tuple[RequestState, bool], ...]
    mode: BatchMode


class Scheduler:
    """Runs requests to completion on one model runner. Not thread-safe.

    Attributes:
        runner, controller, radix, in_flight, device_pages, host_pages, ledger, options: Its parts; the two
            ``pages`` are the pools' allocators.
        table, backups, pages: The requests' pages, the write policy, and what moves pages between them.
        metadata: What rounds share; ``None`` if each brings its own.
        storage: The third tier, ``None`` without one; see ``use_storage``.
        before_batch: Called before a batch is chosen: where pages are moved. Defaults to nothing.
        before_launch, after_submit: Called before a round is launched and after the step's load-backs were
            submitted; the demo's writer gate hangs here. Both default to nothing.
        on_move: Told of pages that have moved: ``(step, old, new)``.
        on_round: Told of every launched round and the requests of its rows: ``(round_id, request_ids)``.
        agree: Asked for the tokens of a round before they are handled.
        on_discard: Told which of them the host had given up before it handled the round: ``(round_id, request_ids)``.
        counters: What it did.
        outputs: Output tokens of finished requests, by request id.
        first_token_ns: By request id: from its submission to the handling of its first output token, on the device's
            host clock.
        restored: Every restored page, by ledger tenancy.
    """

    def __init__(
        self,
        runner: ModelRunner,
        controller: CacheController,
        radix: RadixCache,
        in_flight: InFlight,
        device_pages: PageAllocator,
        host_pages: PageAllocator,
        ledger: ContentLedger,
        options: SchedulerOptions,
        partial: PartialPools | None = None,
    ) -> None:
        slots = len(runner.token_buffer)
        if options.max_running > slots:
            raise ControllerError(f"max_running: {options.max_running}; the token buffer has {slots} slots")
        if options.chunked_prefill and options.max_extend_tokens < radix.page_size:
            raise ConfigError(
                f"max_extend_tokens: {options.max_extend_tokens}; chunks are whole pages, expected at least "
                f"{radix.page_size}"
            )
        self.runner = runner
        self.controller = controller
        self.radix = radix
        self.in_flight = in_flight
        self.device_pages = device_pages
        self.host_pages = host_pages
        self.ledger = ledger
        self.options = options
        self.table = PageTable(options.max_running, device_pages.pages, radix.page_size)
        self.backups = Backups(controller, radix, host_pages, options)
        self.pages = RequestPages(radix, device_pages, ledger, self.table, self.backups)
        if partial is not None:
            self.pages.partial = partial
            partial.before_free = self._submit_evictions
            partial.settle = self._settle
        self.pages.before_free = self._submit_evictions
        self.metadata: BatchMetadata | None = None
        if options.barrier != "private":
            self.metadata = BatchMetadata(runner.device, options.max_running, options.barrier)
        self.storage: StorageControl | None = None
        self.before_batch: Callable[[], None] | None = None
        self.before_launch: Callable[[], None] | None = None
        self.after_submit: Callable[[], None] | None = None
        self.on_move: Callable[[int, PageIds, PageIds], None] | None = None
        self.on_round: Callable[[int, tuple[int, ...]], None] | None = None
        self.on_discard: Callable[[int, PageIds], None] | None = None
        self.agree: Agree = alone
        self.counters = SchedulerCounters()
        self.outputs: dict[int, list[int]] = {}
        self.first_token_ns: dict[int, int] = {}
        self.restored: dict[int, Restored] = {}
        self._builder = BatchBuilder(self.table, self.pages.partial.pools)
        self._waiting: deque[Waiting] = deque()
        self._running: list[RequestState] = []
        self._free_slots = list(range(options.max_running - 1, -1, -1))
        self._launched: _Launched | None = None
        self._decode_next = False
        self._step = 0
        self._last_forward: Stream | None = None

    @property
    def done(self) -> bool:
        """Every submitted request has finished and no round is in flight."""
        return not self._waiting and not self._running and self._launched is None

    @property
    def on_alloc(self) -> Callable[[int, PageIds], None] | None:
        """Told of device pages that are given out: ``(owner, pages)``."""
        return self.pages.on_alloc

    @on_alloc.setter
    def on_alloc(self, told: Callable[[int, PageIds], None] | None) -> None:
        self.pages.on_alloc = told

    @property
    def on_free(self) -> Callable[[int, PageIds], None] | None:
        """Told of device pages that are given back: ``(owner, pages)``."""
        return self.pages.on_free

    @on_free.setter
    def on_free(self, told: Callable[[int, PageIds], None] | None) -> None:
        self.pages.on_free = told

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests in order.

        Raises:
            ControllerError: A request can never fit the device pool, even alone.
        """
        size, now_ns = self.radix.page_size, self.runner.device.host_ns()
        for request in requests:
            need = -(-(len(request.prompt) + request.output_length + 1) // size)
            if need > self.device_pages.pages:
                raise ControllerError(
                    f"request {request.request_id}: needs {need} device pages, the pool has {self.device_pages.pages}"
                )
            self._waiting.append(Waiting(request, Tokens(request.prompt), request.output_length, since_ns=now_ns))

    def use_storage(self, storage: StorageControl) -> None:
        """Use a third tier from now on."""
        self.storage = storage
        self.controller.on_backed_up = storage.backed_up

    def step(self) -> None:
        """One scheduler step; see the module's docstring."""
        self._step += 1
        self.controller.acknowledge(self._step - ACK_DISTANCE)
        if self.options.poll_acks:
            self.controller.acknowledge_complete()
        if self.storage is not None:
            self.storage.poll()
            self.storage.look(list(islice(self._waiting, self.storage.config.lookahead)))
        if self.metadata is not None:
            self.metadata.barrier(self._forward_stream())
        self._set_fence_streams()
        if self.before_batch is not None:
            self.before_batch()
        batch, rows = self._next_batch()
        self._submit_evictions()
        ticket = self.controller.start_loading(self._step)
        if self.after_submit is not None:
            self.after_submit()
        launched = None
        if batch is not None:
            launched = self._launch(batch, rows, ticket)
        # Also when nothing can run: a queued write-back pins the very pages that are missing.
        self._set_fence_streams()
        self.controller.start_writing(self._step)
        if self._launched is not None:
            self._handle(self._launched)
        elif launched is None and self.storage is not None:
            self.storage.wait(self._waiting)
        self._launched = launched

    def move_pages(self, pages: PageIds, tenancies: PageIds) -> None:
        """Device pages have moved: running requests use the new ones.

        Args:
            pages: ``(device pages,) int64``: where each page is now.
            tenancies: Likewise: its new tenancy, -1 for a page that has not moved.
        """
        for state in self._running:
            self.table.move(state, pages, tenancies)
        moved = np.flatnonzero(tenancies >= 0)
        for page in moved.tolist():
            self.restored[int(tenancies[page])] = Restored(int(pages[page]), self._step)
        if self.on_move is not None:
            self.on_move(self._step, moved, pages[moved])

    def drain(self) -> None:
        """Submit and acknowledge all transfers that are queued or in flight. Blocks."""
        self._set_fence_streams()
        self._submit_evictions()
        self.controller.start_writing(self._step)
        if self.after_submit is not None:
            self.after_submit()
        self.controller.acknowledge(self._step)

    def flush(self) -> int:
        """Forget every cached prefix on both tiers, after all transfers in flight are over. Blocks.

        Returns:
            Pages given back, of both tiers.

        Raises:
            ControllerError: A request is waiting, running or in a round in flight; or storage is still at work on
                host pages after its timeout. Nothing was forgotten.
        """
        if not self.done:
            raise ControllerError(
                f"flush: {len(self._waiting)} requests wait and {len(self._running)} run; finish or abort them first"
            )
        self.drain()
        if self.storage is not None and not self.storage.drain():
            raise ControllerError(
                f"flush: storage has not answered for {self.storage.config.close_timeout_s:g} s, and may still use "
                "host pages; try again, or close the engine"
            )
        device, host = self.radix.clear()
        self.pages.free(-1, device)
        self.backups.free(host)
        return len(device) + len(host)

    def abort(self) -> list[int]:
        """Give up every request that has not finished; blocks until the round in flight is over.

        Returns:
            Their ids. They have no ``outputs``.
        """
        aborted = [waiting.request.request_id for waiting in self._waiting]
        aborted += [state.request.request_id for state in self._running]
        for waiting in self._waiting:
            if waiting.hold is not None:
                self.radix.release_host(waiting.hold)
        self._waiting.clear()
        for state in self._running:
            self.pages.give_up(state)
            self._free_slots.append(state.slot)
        self._running.clear()
        if self._launched is not None:
            self._handle(self._launched)
            self._launched = None
        self._decode_next = False
        if self.storage is not None:
            self.storage.aborted()
        self.counters.aborted += len(aborted)
        return sorted(aborted)

    def reset(self) -> list[int]:
        """``abort``, then ``flush``: afterwards both pools are empty, whatever was in flight. Blocks."""
        aborted = self.abort()
        self.flush()
        return aborted

    def _submit_evictions(self) -> None:
        self.controller.start_evicting(self._step)

    def _settle(self) -> None:
        """End the pins of all transfers that were submitted. Blocks."""
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

    def _next_batch(self) -> tuple[ForwardBatch | None, list[PrefillRow]]:
        """The next round, and its rows if it is a prefill round; ``None`` when nothing can run."""
        decode_next, self._decode_next = self._decode_next and any(not s.prefilling for s in self._running), False
        rows = [] if decode_next else self._prefill_rows()
        if rows:
            self._decode_next = any(not row.final for row in rows)
            self.counters.chunks += sum(not row.final for row in rows)
            return self._builder.extend(self._next_round(BatchMode.EXTEND), rows), rows
        self._make_room()
        states = self._decoding()
        if not states:
            return None, []
        for state in states:
            self.pages.advance(state, state.launched_len, state.launched_len + 1)
        batch = self._builder.decode(self._next_round(BatchMode.DECODE), states)
        for state in states:
            state.launched_len += 1
        return batch, []

    def _decoding(self) -> list[RequestState]:
        return [state for state in self._running if not state.prefilling]

    def _next_round(self, mode: BatchMode) -> int:
        self.counters.rounds += 1
        self.counters.extend_rounds += mode is BatchMode.EXTEND
        return self.counters.rounds

    def _prefill_rows(self) -> list[PrefillRow]:
        """The next chunk of a prompt that was begun, and newly admitted requests."""
        rows = [self._next_chunk(state, self.options.max_extend_tokens) for state in self._running if state.prefilling]
        budget = self.options.max_extend_tokens - sum(row.end - row.start for row in rows)
        while self._waiting and self._free_slots and len(rows) < self.options.max_extend_rows:
            if rows and not rows[-1].final:
                break  # the round's budget is spent
            waiting = self._next_waiting()
            row = None if waiting is None else self._admit(waiting, budget, alone=not rows)
            if waiting is None or row is None:
                break
            self._waiting.remove(waiting)
            self._running.append(row.state)
            rows.append(row)
            budget -= row.end - row.start
        return rows

    def _next_waiting(self) -> Waiting | None:
        """The first waiting request whose prefix is not on its way from storage."""
        if self.storage is None:
            return self._waiting[0]
        return next((waiting for waiting in self._waiting if not self.storage.holds_back(waiting)), None)

    def _next_chunk(self, state: RequestState, budget: int) -> PrefillRow:
        """The request's next tokens, whole pages unless they are its last."""
        start, end = state.launched_len, len(state.tokens)
        if self.options.chunked_prefill and end - start > budget:
            size = self.radix.page_size
            end = start + budget // size * size
        self.pages.advance(state, start, end)
        state.launched_len = end
        state.prefilling = end < len(state.tokens)
        return PrefillRow(state, start, end)

    def _admit(self, waiting: Waiting, budget: int, *, alone: bool) -> PrefillRow | None:
        """Match, lock, restore and allocate for one request; ``None``, with nothing changed, if it must wait."""
        size, tokens = self.radix.page_size, waiting.tokens
        match = self._match(tokens[: (len(tokens) - 1) // size * size])  # at least one token to compute
        cached = match.device_len + match.host_len
        least = min(len(tokens) - cached, size) if self.options.chunked_prefill else len(tokens) - cached
        if least > budget and not alone:
            return None
        fresh = -(-len(tokens) // size) - cached // size
        last = match.last_node
        self.radix.lock(last)
        partial = self.pages.partial
        with partial.keeping(match):  # optimistic: decode rows may have to retract one later
            room = self.pages.room(match.host_len // size + fresh, partial.needs(match, fresh))
        if not room:
            self.radix.unlock(last)
            return None
        state = RequestState(waiting.request, tokens, waiting.remaining, self._free_slots.pop(), cached, 0, last)
        state.since_ns = waiting.since_ns
        self.counters.admitted_tokens += len(tokens)
        self.counters.device_hit_tokens += match.device_len
        self.counters.host_hit_tokens += match.host_len
        partial.begin(state, cached)
        self.pages.append(state, match.device_pages(), match.tenancies(), match.sources())
        self._revive(match, state)
        for node in match.host_nodes:
            self._load(node, state)
        self.pages.grow(state, fresh)
        if waiting.hold is not None:
            self.radix.release_host(waiting.hold)
            self.counters.resumed_pages += cached // size
        if self.storage is not None:
            self.storage.admitted(waiting.request.request_id, range(match.device_len, cached))
        self.radix.record_use(last, waiting.request.priority)
        self.backups.used(last)
        return self._next_chunk(state, budget)

    def _match(self, prompt: Int64Array) -> Match:
        """The longest cached prefix behind which every pool has what the next token needs."""
        match = self.radix.match(prompt)
        while self.pages.partial.pools:
            usable = self.pages.partial.usable(match) * self.radix.page_size
            if usable == match.device_len + match.host_len:
                break
            match = self.radix.match(prompt[:usable])
        return match

    def _revive(self, match: Match, state: RequestState) -> None:
        """Restore what the request needs of pages that are on the device, but for some pools' part."""
        pages, tenancies = self.pages.partial.revive(state, match.device_nodes, self.ledger.open)
        for page, tenancy in zip(pages.tolist(), tenancies.tolist(), strict=True):
            self.restored[tenancy] = Restored(page, self._step)

    def _load(self, node: Node, state: RequestState) -> None:
        assert node.host_pages is not None  # match calls it a host node
        pages, tenancies = self.pages.alloc(state.request.request_id, len(node.host_pages))
        self.pages.partial.restored(state, pages, tenancies, node.host_pages)
        self.controller.load(node, pages, tenancies)
        for page, tenancy in zip(pages.tolist(), tenancies.tolist(), strict=True):
            self.restored[tenancy] = Restored(page, self._step)
        self.pages.append(state, pages, tenancies, node.sources)

    def _make_room(self) -> None:
        """Give each decoding request a slot for its next token; retract the newest while pages run out."""
        size = self.radix.page_size
        for state in self._decoding():
            while state.alive and state.launched_len >= state.page_count * size:
                if self.pages.room(1):
                    self.pages.grow(state, 1)
                else:
                    self._retract(self._running[-1])

    def _retract(self, state: RequestState) -> None:
        """Take a request's pages while its launched round still writes them; it goes on, or starts over, later."""
        self.counters.retractions += 1
        hold = None
        if self.options.host_tier and self.options.retraction == "backup":
            hold = self.pages.set_aside(state)
        else:
            self.pages.give_up(state)
        self._free_slots.append(state.slot)
        self._running.remove(state)
        self._waiting.appendleft(Waiting(state.request, state.tokens, state.remaining, hold, state.since_ns))

    # -- rounds ------------------------------------------------------------------------------------------------

    def _launch(self, batch: ForwardBatch, rows: Sequence[PrefillRow], ticket: Ticket | None) -> _Launched:
        self.runner.prepare(batch)
        if self.before_launch is not None:
            self.before_launch()
        if self.metadata is not None:
            self.metadata.upload(batch)
        stream = self._forward_stream()
        stream.wait_stream(self.runner.device.current_stream())
        self.controller.before_round(stream, batch.write_pages)
        wait: Callable[[int], None] | None = None
        if ticket is not None:
            wait = partial(self.controller.layer_done.wait_until, ticket)
        read_metadata = None if self.metadata is None else self.metadata.read
        result = self.runner.forward(batch, layer_wait=wait, read_metadata=read_metadata)
        members = [(row.state, row.final) for row in rows] or [(state, True) for state in self._decoding()]
        for state, _ in members:
            state.last_round, state.last_stream = batch.round_id, stream.stream_id
        if self.on_round is not None:
            self.on_round(batch.round_id, tuple(state.request.request_id for state, _ in members))
        self.in_flight.launched(stream, batch.round_id, result.done)
        for row in rows:
            self.pages.share(row.state, row.start)
        return _Launched(result, stream, tuple(members), batch.mode)

    def _handle(self, launched: _Launched) -> None:
        """Handle a round's result: append tokens, finish requests. Blocks until the round is done."""
        launched.result.done.synchronize()
        self.in_flight.completed(launched.stream, launched.result.round_id)
        given_up = [state.request.request_id for state, _ in launched.rows if not state.alive]
        if given_up and self.on_discard is not None:
            self.on_discard(launched.result.round_id, np.array(given_up, np.int64))
        extended = launched.mode is BatchMode.EXTEND
        tokens = self.agree("tokens", launched.result.next_tokens.tolist())
        for (state, final), token in zip(launched.rows, tokens, strict=True):
            if not state.alive:
                continue  # retracted or finished since: an overrun row, its token is dropped
            if extended:
                self.backups.computed(state.locked)
            if not final:
                continue  # a chunk: what it sampled follows the middle of a prompt
            if state.remaining == state.request.output_length:
                self.first_token_ns[state.request.request_id] = self.runner.device.host_ns() - state.since_ns
            state.tokens.append(token)
            state.remaining -= 1
            self.counters.output_tokens += 1
            if state.remaining == 0:
                self._finish(state)

    def _finish(self, state: RequestState) -> None:
        self.counters.finished += 1
        count = state.request.output_length
        self.outputs[state.request.request_id] = state.tokens[-count:].tolist()
        self.pages.finish(state)
        self._free_slots.append(state.slot)
        self._running.remove(state)
