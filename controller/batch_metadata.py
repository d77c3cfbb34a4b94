"""Metadata that all rounds share: one device tensor, written by the schedule stream, read by each round.

With overlap the scheduler prepares round n+1 while round n runs, so the next write must wait until round n has read
its own: a write-after-read barrier. Its two forms differ in what else they order. The coarse one makes the schedule
stream wait for the whole round, and with it everything that starts after an event of the schedule stream: a load-back
is then ordered after the round in flight even without a fence of its own. The read-done form waits for the event behind
the round's first read, and orders nothing else.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.controller.index_blocks import INDEX_BUFFERS
from hicache_obs.controller.model_runner import LaunchedRound, to_device
from hicache_obs.controller.pools import synchronize
from hicache_obs.records import Access, Mode, PageIds, Space, Work
from hicache_obs.streams.protocol import Device, Event, Stream

METADATA_BUFFER: Final = INDEX_BUFFERS
"""Id of the tensor among the buffers, behind those of index tensors."""


class BatchMetadata:
    """The shared tensor and its barrier. Scheduler's thread; never blocks.

    Args:
        device: Where it lives.
        rows: Most rows of a round.
        form: ``coarse`` or ``read_done``.

    Attributes:
        slots: ``(rows,) int64``, device: token slot of each row of the newest round.
    """

    def __init__(self, device: Device, rows: int, form: str) -> None:
        self.slots = torch.zeros(rows, dtype=torch.int64, device=device.torch_device)
        self._device = device
        self._form = form
        self._read_done: Event | None = None
        self._ids: PageIds = np.array([METADATA_BUFFER], np.int64)
        synchronize(self.slots.device)

    def barrier(self, forward: Stream) -> None:
        """Make the current stream wait for what may still read the tensor; ``forward`` runs the rounds."""
        if self._read_done is None:
            return
        if self._form == "coarse":
            self._device.current_stream().wait_stream(forward)
        else:
            self._device.current_stream().wait_event(self._read_done)

    def upload(self, batch: ForwardBatch) -> None:
        """Write ``batch``'s metadata on the current stream, behind ``barrier``."""
        work = Work(
            site="metadata upload",
            accesses=(Access(Space.BUFFER, Mode.WRITE, self._ids),),
            group=batch.round_id,
            size_bytes=batch.token_slots.nbytes,
        )
        self._device.launch(lambda: self._store(batch), work)

    def read(self, batch: ForwardBatch, round_work: LaunchedRound) -> None:
        """Launch the round's read of its metadata on the current stream, the forward stream."""
        work = Work(
            site="metadata read",
            accesses=(Access(Space.BUFFER, Mode.READ, self._ids),),
            group=batch.round_id,
            size_bytes=batch.token_slots.nbytes,
        )
        self._device.launch(lambda: self._fetch(batch, round_work), work)
        self._read_done = self._device.current_stream().record_event()

    def _store(self, batch: ForwardBatch) -> None:
        self.slots[: batch.rows].copy_(to_device(batch.token_slots, self._device.torch_device), non_blocking=True)

    def _fetch(self, batch: ForwardBatch, round_work: LaunchedRound) -> None:
        round_work.shared_slots = self.slots[: batch.rows].clone()
