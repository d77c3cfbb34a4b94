"""Launching forward rounds: what every model shares, from token read to token write.

A round is one launched segment, or one per layer when it consumes a load-back: a wait issued inside a round
closes a segment. Everything a segment does to device memory happens in its launched function, content checks
included, so the engine's own records are the whole truth about a round.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from hicache_obs.controller.batch import BatchMode, ForwardBatch, Int64Array, PartialBatch, RoundResult
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.pools import RoundPool, synchronize
from hicache_obs.controller.state_rows import StateRows
from hicache_obs.errors import ControllerError
from hicache_obs.records import Work
from hicache_obs.streams.protocol import Device, Stream

TOKEN_SLOTS = 1024
"""Default length of the token buffer."""


def to_device(array: npt.NDArray[np.generic], device: str) -> torch.Tensor:
    """``array`` as a tensor on ``device``; call it inside a launched function.

    On a CPU the tensor aliases the array, which must not change until the launched function has run. Elsewhere
    it is a copy through pinned memory that does not block the host.
    """
    # Copies only what torch cannot alias, a read-only array included: it would warn.
    tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
    if device == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


class LaunchedRound(ABC):
    """The device side of one round: its segments run in order on the forward stream and share this object.

    Only launched functions call its methods.

    Attributes:
        shared_slots: ``(n,) int64``, device: token slot of each row where the rounds share their metadata.
    """

    shared_slots: torch.Tensor | None = None

    @abstractmethod
    def run(self, first: int, end: int) -> None:
        """Run layers ``first <= layer < end``."""


class RoundWork(LaunchedRound):
    """A round of a model. It knows the batch, tensors and the ledger, never the runner.

    Attributes:
        batch: The round.
        tokens: ``(t,) int64``, device: tokens this round adds to the cache, rows concatenated.
        rows: ``(t,) int64``, host: row of each token.
        positions: ``(t,) int64``, host: position of each token in its row's context.
        context_lens: ``(n,) int64``, host: tokens each row attends to at its last position.
        last: ``(n,) int64``, host: index into ``tokens`` of each row's last token.
    """

    def __init__(
        self,
        batch: ForwardBatch,
        pool: RoundPool,
        ledger: ContentLedger,
        token_buffer: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        self.batch = batch
        self.pool = pool
        self.ledger = ledger
        self.layout = pool.layout
        self.device = str(token_buffer.device)
        self._token_buffer = token_buffer
        self._next_tokens = next_tokens
        self._states: StateRows | None = None

    def run(self, first: int, end: int) -> None:
        """Run layers ``first <= layer < end``; the first also embeds, the last also samples."""
        if first == 0:
            self._begin()
            self.embed()
        for layer in range(first, end):
            self.check(layer)
            if self.pool.state(layer):
                self._step(layer)
            else:
                self._write(layer, *self.keys_values(layer))
                self.attend(layer)
        if end == self.layout.layers:
            sampled = self.sample()
            self._token_buffer.index_copy_(0, self._token_slots, sampled)
            self._next_tokens.copy_(sampled, non_blocking=True)

    @abstractmethod
    def embed(self) -> None:
        """Turn ``tokens`` into the first layer's activations."""

    @abstractmethod
    def keys_values(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of ``tokens`` at ``layer``: ``(t, heads, head_dim)`` each, of the pool's dtype."""

    @abstractmethod
    def attend(self, layer: int) -> None:
        """Read the context from the pool, this round's tokens included, and finish ``layer``."""

    def advance_states(self, layer: int, states: torch.Tensor, marks: Int64Array) -> tuple[torch.Tensor, torch.Tensor]:
        """Go on with the states of a layer that has them, and finish ``layer``.

        Args:
            layer: It.
            states: ``(n, page_size, heads, head_dim)``: what each row begins with, as was kept in K; zeros at first.
            marks: ``(m,) int64``: tokens behind which a state is kept.

        Returns:
            What to keep, as K and V of ``m`` whole pages.
        """
        raise NotImplementedError(f"{type(self).__name__} has no layers with states")

    @abstractmethod
    def sample(self) -> torch.Tensor:
        """Next token of each row: ``(n,) int64``, device."""

    def upload(self, array: npt.NDArray[np.generic]) -> torch.Tensor:
        """``array`` on this round's device."""
        return to_device(array, self.device)

    def slots(self, rows: Int64Array, positions: Int64Array) -> Int64Array:
        """Slot in the pool of each row's token at each position; any two shapes that broadcast."""
        page, slot = np.divmod(positions, self.layout.page_size)
        found: Int64Array = self.batch.page_table[rows, page] * self.layout.page_size + slot
        return found

    def _begin(self) -> None:
        batch = self.batch
        self._token_slots = self.upload(batch.token_slots) if self.shared_slots is None else self.shared_slots
        self.context_lens = batch.prefix_lens + batch.new_lens
        if batch.mode is BatchMode.DECODE:
            self.tokens = self._token_buffer.index_select(0, self._token_slots)
            self.rows = self.last = np.arange(batch.rows)
            self.positions = batch.prefix_lens
        else:
            self.tokens = self.upload(batch.input_tokens)
            ends = np.cumsum(batch.new_lens)
            self.rows = np.repeat(np.arange(batch.rows), batch.new_lens)
            self.last = ends - 1
            self.positions = np.arange(ends[-1]) + np.repeat(self.context_lens - ends, batch.new_lens)
        page, slot = np.divmod(self.positions, self.layout.page_size)
        self._write_slots = self.upload(batch.page_table[self.rows, page] * self.layout.page_size + slot)
        self._slots_in_page = self.upload(slot)
        self._tenancies = self.upload(batch.page_tenancies[self.rows, page])
        parts: list[ForwardBatch | PartialBatch] = [batch, *batch.partial]
        self._checks = [
            tuple(self.upload(ids) for ids in (part.check_pages, part.check_tenancies, part.check_sources))
            for part in parts
        ]

    def check(self, layer: int) -> None:
        """Compare the restored pages that this round reads with what was once written."""
        partial = self.pool.partial(layer)
        pages, tenancies, sources = self._checks[0 if partial is None else partial + 1]
        if len(pages):
            k, v = self.pool.read_pages(layer, pages)
            self.ledger.check_pages(layer, k, v, tenancies, sources)

    def _step(self, layer: int) -> None:
        if self._states is None:
            self._states = StateRows.of(self.batch, self.layout.page_size)
        rows = self._states
        states, _ = self.pool.read_pages(layer, self.upload(rows.previous))
        states = states.masked_fill(self.upload(rows.none)[:, None, None, None], 0.0)
        k, v = self.advance_states(layer, states, rows.marks)
        self.pool.write_pages(layer, self.upload(rows.pages), k, v)
        self.ledger.set_pages(layer, k, v, rows.tenancies)

    def _write(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        self.pool.write(layer, self._write_slots, k, v)
        self.ledger.add_tokens(layer, self._tenancies, self._slots_in_page, k, v)


class ModelRunner(ABC):
    """Launches forward rounds of one model on one device.

    Attributes:
        device: Where rounds run.
        forward_stream: Stream of the rounds; may be replaced between rounds.
        token_buffer: ``(token_slots,) int64``, device: last sampled token of each slot. Decode rounds read their
            tokens from it, so round n+1 can be launched before the host has seen the tokens of round n.
        launched_segments: Segments launched so far.
        on_batch: Told of every round before it is launched.
    """

    def __init__(
        self,
        device: Device,
        pool: RoundPool,
        ledger: ContentLedger,
        *,
        vocabulary: int,
        token_slots: int = TOKEN_SLOTS,
    ) -> None:
        self.device = device
        self.pool = pool
        self.ledger = ledger
        self.vocabulary = vocabulary
        self.forward_stream: Stream = device.Stream("forward")
        self.token_buffer = torch.zeros(token_slots, dtype=torch.int64, device=device.torch_device)
        self.launched_segments = 0
        self.on_batch: Callable[[ForwardBatch], None] | None = None
        self._page_bytes = pool.layout.page_bytes_per_layer
        self.set_up()
        synchronize(self.token_buffer.device)

    def prepare(self, batch: ForwardBatch) -> None:  # noqa: B027 most runners have nothing to prepare
        """Do what may block until the device is idle, before ``forward`` and before anything is held for the round."""

    def forward(
        self,
        batch: ForwardBatch,
        *,
        layer_wait: Callable[[int], None] | None = None,
        read_metadata: Callable[[ForwardBatch, LaunchedRound], None] | None = None,
    ) -> RoundResult:
        """Launch ``batch`` on ``forward_stream`` and return at once.

        Args:
            batch: Its arrays must not change before the round is done.
            layer_wait: Given when the round consumes a load-back. Called with each layer right before that
                layer's segment is launched, the forward stream being current. Without it the round is one
                segment, or one for each run of layers in one pool.
            read_metadata: Given when the rounds share their metadata. Called before the first segment is launched,
                the forward stream being current, to launch the round's read of them.

        Returns:
            The round's ``done`` event and its tokens, which are valid once ``done`` is complete.

        Raises:
            ControllerError: ``batch`` has no row, a row without new tokens, or a token slot that does not exist.
        """
        self._accept(batch)
        next_tokens = torch.empty(batch.rows, dtype=torch.int64, pin_memory=self.token_buffer.device.type == "cuda")
        round_work = self.start(batch, next_tokens)
        layers = self.pool.layout.layers
        layer_bytes = self._layer_bytes(batch)
        with self.device.stream(self.forward_stream):
            if read_metadata is not None:
                read_metadata(batch, round_work)
            for first, end in self.pool.segments() if layer_wait is None else [(n, n + 1) for n in range(layers)]:
                if layer_wait is not None:
                    layer_wait(first)
                touched, accesses = self.pool.touched(batch, first, end)
                work = Work(
                    site="forward",
                    accesses=accesses,
                    layers=touched,
                    group=batch.round_id,
                    size_bytes=(end - first) * layer_bytes,
                    rows=batch.row_ids,
                    tokens=batch.new_tokens,
                )
                self.device.launch(partial(round_work.run, first, end), work)
                self.launched_segments += 1
            done = self.forward_stream.record_event()
        return RoundResult(batch.round_id, done, next_tokens.numpy())

    def set_up(self) -> None:  # noqa: B027 most runners have nothing to add
        """Make what a subclass has beside, if it takes no arguments of its own. Called once, by the constructor.

        Raises:
            ControllerError: The pool does not suit the model.
        """

    @abstractmethod
    def start(self, batch: ForwardBatch, next_tokens: torch.Tensor) -> LaunchedRound:
        """The device side of ``batch``, nothing run yet; it will write ``next_tokens``, ``(n,) int64``, host."""

    def _accept(self, batch: ForwardBatch) -> None:
        """Check the batch, and tell who wants to know that it will be launched."""
        if not batch.rows:
            raise ControllerError(f"round {batch.round_id} has no rows; a round needs at least one")
        if batch.new_lens.min() < 1:
            raise ControllerError(
                f"round {batch.round_id}: new_lens is {batch.new_lens.tolist()}; every row adds a token"
            )
        slots = len(self.token_buffer)
        if batch.token_slots.min() < 0 or batch.token_slots.max() >= slots:
            raise ControllerError(
                f"round {batch.round_id}: token_slots is {batch.token_slots.tolist()}; slots are 0..{slots - 1}"
            )
        if self.on_batch is not None:
            self.on_batch(batch)

    def _layer_bytes(self, batch: ForwardBatch) -> int:
        token_bytes = self._page_bytes // self.pool.layout.page_size
        return len(batch.read_pages) * self._page_bytes + batch.new_tokens * token_bytes
