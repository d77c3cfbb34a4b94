"""Rounds of the pattern model as captured graphs: launched with one call, every size and address in them fixed.

A graph is captured for each *shape*: rows, pages of the longest row, restored pages to verify. What differs from round
to round lies in one static input tensor, filled on the scheduler's stream before the replay. That gives a replay its
three order rules:

* The inputs may be filled again once the replay before has read them: the graph records an external event right behind
  that, and the next fill waits for it (the *read-done* form of the barrier; waiting for the whole round would do too).
* The replay waits for its inputs.
* Waits per layer do not exist inside a replay, so a round that consumes a load-back waits for its last layer, once,
  before it begins. The copies of a load-back run lowest layer first, so that covers them all.

Only rounds in which every row adds one token are captured: decode, and prefills of prompts that are cached but for
their last token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from hicache_obs.controller.batch import BatchMode, ForwardBatch, Int64Array, RoundResult
from hicache_obs.controller.index_blocks import INDEX_BUFFERS
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import LaunchedRound
from hicache_obs.controller.pattern import PatternRound, PatternRunner
from hicache_obs.controller.pattern_numbers import PatternNumbers, sampled_slots
from hicache_obs.controller.pools import RoundPool, synchronize
from hicache_obs.records import Access, Mode, PageIds, Space, Work
from hicache_obs.streams.protocol import Event, Graph

GRAPH_BUFFERS = INDEX_BUFFERS + 1
"""Ids of graphs' tensors among the buffers in records, behind that of shared metadata: inputs and tokens of each."""


@dataclass(frozen=True, slots=True)
class Shape:
    """What a captured round has fixed sizes for.

    Attributes:
        rows: Of the batch.
        pages: Cells per row of the page table, a power of two.
        checks: Restored pages to verify, a power of two, or 0.
        extend: Whether it reads its whole context, as prefill does.
    """

    rows: int
    pages: int
    checks: int
    extend: bool

    @classmethod
    def of(cls, batch: ForwardBatch) -> Shape:
        """The smallest one that ``batch`` fits."""
        extend = batch.mode is BatchMode.EXTEND
        return cls(batch.rows, _bucket(batch.page_table.shape[1]), _bucket(len(batch.check_pages)), extend)

    @property
    def words(self) -> int:
        """Length of the input tensor."""
        return self.rows * (4 + self.pages) + 3 * self.checks

    def pack(self, batch: ForwardBatch, page_size: int) -> Int64Array:
        """``(words,) int64`` inputs of ``batch``."""
        rows = np.arange(self.rows)
        tenancies = batch.page_tenancies[rows, batch.prefix_lens // page_size]
        tokens = batch.input_tokens if self.extend else np.full(self.rows, -1, np.int64)
        table = np.zeros((self.rows, self.pages), np.int64)
        cells = min(self.pages, batch.page_table.shape[1])
        table[:, :cells] = batch.page_table[:, :cells]
        checks = [_padded(ids, self.checks) for ids in (batch.check_pages, batch.check_tenancies, batch.check_sources)]
        parts = [batch.token_slots, batch.prefix_lens, tokens, tenancies, table.reshape(-1), *checks]
        packed: Int64Array = np.concatenate(parts, dtype=np.int64)
        return packed


class GraphRound(PatternRound):
    """A round whose launched functions depend on nothing but tensors that stay where they are.

    Attributes:
        inputs: ``(shape.words,) int64``, device.
        sampled: ``(rows,) int64``, device: next token of each row.
    """

    def __init__(
        self,
        numbers: PatternNumbers,
        shape: Shape,
        template: ForwardBatch,
        pool: RoundPool,
        ledger: ContentLedger,
        token_buffer: torch.Tensor,
    ) -> None:
        device = token_buffer.device
        self.sampled = torch.zeros(shape.rows, dtype=torch.int64, device=device)
        super().__init__(numbers, template, pool, ledger, token_buffer, self.sampled)
        self.inputs = torch.zeros(shape.words, dtype=torch.int64, device=device)
        self.shape = shape
        self._reads_all = shape.extend
        self._page_numbers = torch.arange(shape.pages, device=device)
        self._places = torch.arange(shape.pages * self.layout.page_size, device=device)
        self._salts = self.upload(numbers.key_salts)
        self._layer_salts = self.upload(numbers.layer_salts)
        synchronize(device)

    def read_inputs(self) -> None:
        """First entry of the graph; nothing after it reads ``inputs``."""
        shape = self.shape
        rows = shape.rows
        copied = self.inputs.clone()
        self._token_slots, self._prefix, self._given, self._tenancies = copied[: 4 * rows].view(4, rows)
        self._table = copied[4 * rows : rows * (4 + shape.pages)].view(rows, shape.pages)
        checks = copied[rows * (4 + shape.pages) :].view(3, shape.checks)
        self._check_pages, self._check_tenancies, self._check_sources = checks

    def _begin(self) -> None:
        size = self.layout.page_size
        held = self._token_buffer.index_select(0, self._token_slots)
        self.tokens = torch.where(self._given >= 0, self._given, held)
        self._slots_in_page = self._prefix % size
        self._write_slots = self._slot(self._prefix)
        self._previous = self._slot((self._prefix - 1).clamp_min(0))
        self._no_previous = (self._prefix == 0)[:, None]

    def embed(self) -> None:
        hashes = self.hashes(self._prefix)
        self._last_hashes = hashes
        self._new_k = self.new_keys(hashes, self._salts)
        self._checksums = []
        lens = (self._prefix + 1)[:, None]
        size, pages = self.layout.page_size, self._page_numbers
        filled = (lens - pages * size).clamp(0, size)
        slot = sampled_slots(lens, pages, filled.clamp_min(1))
        self._used = torch.where(filled > 0, self._table, self._table[:, :1])
        self._sample_slots = (self._used * size + slot).reshape(-1)
        self._sample_weights = torch.where(filled > 0, 2 * pages + 1, 0)[..., None]
        self._in_context = (self._places < lens)[..., None]

    def broken_links(self, layer: int) -> torch.Tensor:
        pages = self._used.reshape(-1)
        k, v = (part.view(self.shape.rows, -1, self._lanes) for part in self.pool.read_pages(layer, pages))
        expected = v.roll(1, 1)
        expected[:, 0] = 0.0
        broken: torch.Tensor = (self.numbers.wrapped(expected.add_(k)) != v) & self._in_context
        return broken.sum((1, 2))

    def check(self, layer: int) -> None:
        if self.shape.checks:
            k, v = self.pool.read_pages(layer, self._check_pages)
            self.ledger.check_pages(layer, k, v, self._check_tenancies, self._check_sources, counted=False)

    def _slot(self, positions: torch.Tensor) -> torch.Tensor:
        size = self.layout.page_size
        pages = self._table.gather(1, (positions // size)[:, None])[:, 0]
        return pages * size + positions % size


@dataclass(frozen=True, slots=True, eq=False)
class _Captured:
    round: GraphRound
    graph: Graph

    @property
    def read_done(self) -> Event:
        """Recorded by each replay once it has read its inputs."""
        return self.graph.events[0]

    @property
    def buffers(self) -> tuple[PageIds, PageIds]:
        """Ids of ``inputs`` and ``sampled``."""
        first = GRAPH_BUFFERS + 2 * self.graph.number
        return np.array([first], np.int64), np.array([first + 1], np.int64)


class GraphRunner(PatternRunner):
    """A pattern runner that replays a captured graph where it can.

    Attributes:
        replays: Rounds replayed so far.
        loads_awaited: Those of them that waited for a load-back.
    """

    def set_up(self) -> None:
        """See ``ModelRunner.set_up``."""
        super().set_up()
        self.replays = 0
        self.loads_awaited = 0
        self._graphs: dict[Shape, _Captured] = {}

    def prepare(self, batch: ForwardBatch) -> None:
        """See ``ModelRunner.prepare``: a capture waits for the whole device."""
        if _replayable(batch):
            self._captured(batch)

    def forward(
        self,
        batch: ForwardBatch,
        *,
        layer_wait: Callable[[int], None] | None = None,
        read_metadata: Callable[[ForwardBatch, LaunchedRound], None] | None = None,
    ) -> RoundResult:
        """See ``ModelRunner.forward``. A replay reads its own inputs, not the metadata that the rounds share."""
        if not _replayable(batch):
            return super().forward(batch, layer_wait=layer_wait, read_metadata=read_metadata)
        self._accept(batch)
        captured = self._captured(batch)
        next_tokens = torch.empty(batch.rows, dtype=torch.int64, pin_memory=self.token_buffer.device.type == "cuda")
        self._fill(captured, batch)
        with self.device.stream(self.forward_stream):
            if layer_wait is not None:
                self.await_load(layer_wait)
            self._replay(captured, batch)
            work = Work(
                "token read-back", (Access(Space.BUFFER, Mode.READ, captured.buffers[1]),), group=batch.round_id
            )
            self.device.launch(lambda: _copy(next_tokens, captured.round.sampled), work)
            done = self.forward_stream.record_event()
        self.replays += 1
        self.ledger.checks += len(batch.check_pages) * self.pool.layout.layers
        return RoundResult(batch.round_id, done, next_tokens.numpy())

    def await_load(self, layer_wait: Callable[[int], None]) -> None:
        """The forward stream, which is current, waits for the whole load-back: nothing inside a replay would."""
        layer_wait(self.pool.layout.layers - 1)
        self.loads_awaited += 1

    def await_inputs(self, read_done: Event) -> None:
        """The current stream waits until the replay before has read its inputs."""
        self.device.current_stream().wait_event(read_done)

    def _fill(self, captured: _Captured, batch: ForwardBatch) -> None:
        """Fill the inputs on the current stream, and make the forward stream follow."""
        self.await_inputs(captured.read_done)
        packed = torch.from_numpy(captured.round.shape.pack(batch, self.pool.layout.page_size))
        if self.token_buffer.device.type == "cuda":
            packed = packed.pin_memory()
        work = Work(
            "graph inputs",
            (Access(Space.BUFFER, Mode.WRITE, captured.buffers[0]),),
            group=batch.round_id,
            size_bytes=packed.nbytes,
        )
        self.device.launch(lambda: _copy(captured.round.inputs, packed), work)
        self.forward_stream.wait_event(self.device.current_stream().record_event())

    def _replay(self, captured: _Captured, batch: ForwardBatch) -> None:
        inputs, sampled = captured.buffers
        layers = self.pool.layout.layers
        size_bytes = self._layer_bytes(batch)
        nodes: list[Work | None] = [Work("graph inputs read", (Access(Space.BUFFER, Mode.READ, inputs),)), None]
        for layer in range(layers):
            touched, accesses = self.pool.touched(batch, layer, layer + 1)
            if layer == layers - 1:
                accesses = (*accesses, Access(Space.BUFFER, Mode.WRITE, sampled))
            nodes.append(
                Work("graph round", accesses, touched, batch.round_id, size_bytes=size_bytes, tokens=batch.rows)
            )
        whole = Work("graph round", (), (0, layers), batch.round_id, size_bytes=layers * size_bytes)
        self.device.replay(captured.graph, whole, nodes)
        self.launched_segments += 1

    def _captured(self, batch: ForwardBatch) -> _Captured:
        shape = Shape.of(batch)
        known = self._graphs.get(shape)
        if known is None:
            template = replace(batch, mode=BatchMode.DECODE, row_ids=None)
            work = GraphRound(self.numbers, shape, template, self.pool, self.ledger, self.token_buffer)
            layers = range(self.pool.layout.layers)
            entries = [work.read_inputs, None, *(partial(work.run, layer, layer + 1) for layer in layers)]
            known = self._graphs[shape] = _Captured(work, self.device.capture(len(self._graphs), entries))
        return known


def _replayable(batch: ForwardBatch) -> bool:
    """Whether every row adds one token."""
    return batch.rows > 0 and bool((batch.new_lens == 1).all())


def _copy(to: torch.Tensor, by: torch.Tensor) -> None:
    to.copy_(by, non_blocking=True)


def _bucket(count: int) -> int:
    return 1 << (count - 1).bit_length() if count else 0


def _padded(ids: Int64Array, count: int) -> Int64Array:
    """``ids``, the last one repeated: to verify a page twice does no harm."""
    return np.concatenate((ids, np.full(count - len(ids), ids[-1] if count else 0, np.int64)))
