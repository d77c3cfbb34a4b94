"""Device memory for the index tensors of transfers, handed out and taken back as a caching allocator does.

A block belongs to the stream that was current when it was taken. It is given back as soon as the transfer is submitted,
long before the copies have read it, and may be taken again at once: work of its own stream comes later anyway. The
copies run on another stream, so that stream is *marked* on the block (``torch.Tensor.record_stream``), and a marked
block is kept back until the host knows the transfer to be complete.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import torch

from hicache_obs.errors import ControllerError
from hicache_obs.streams.protocol import Device, Stream

INDEX_BUFFERS: Final = 4096
"""Numbers of blocks stay below this: as buffers in records they share the numbers with other tensors."""
SMALLEST: Final = 64
"""Ids in the smallest block; larger ones hold a power of two."""


@dataclass(slots=True, eq=False)
class IndexBlock:
    """A block.

    Attributes:
        number: Its id among the buffers in records.
        tensor: ``(capacity,) int64``, device.
        marked: Whether another stream has been told to use it, since it was taken.
    """

    number: int
    tensor: torch.Tensor
    marked: bool = False


@dataclass(eq=False)
class IndexBlocks:
    """All blocks of one device. Scheduler's thread only; nothing blocks.

    Attributes:
        device: Where they are.
        on_take: Told of every block handed out: ``(tensor, number, stream)``.
        on_give_back: Told of every block given back: ``(tensor)``.
    """

    device: Device
    on_take: Callable[[torch.Tensor, int, Stream], None] | None = None
    on_give_back: Callable[[torch.Tensor], None] | None = None
    _free: dict[int, list[IndexBlock]] = field(default_factory=dict)
    _kept: dict[int, list[IndexBlock]] = field(default_factory=dict)
    _made: int = 0

    def take(self, count: int) -> IndexBlock:
        """A block for ``count`` ids, for use on the current stream; partner of ``give_back``. Contents are old.

        Raises:
            ControllerError: Too many transfers are in flight.
        """
        capacity = max(SMALLEST, 1 << (count - 1).bit_length() if count > 1 else 1)
        free = self._free.setdefault(capacity, [])
        if free:
            block = free.pop()
        elif self._made == INDEX_BUFFERS:
            raise ControllerError(f"index blocks: all {INDEX_BUFFERS} are in use; are transfers acknowledged?")
        else:
            tensor = torch.empty(capacity, dtype=torch.int64, device=self.device.torch_device)
            block = IndexBlock(self._made, tensor)
            self._made += 1
        if self.on_take is not None:
            self.on_take(block.tensor, block.number, self.device.current_stream())
        return block

    def mark(self, block: IndexBlock, stream: Stream) -> None:
        """``stream`` uses the block: it may not be taken again before that is over."""
        self.device.record_stream(block.tensor, stream)
        block.marked = True

    def give_back(self, block: IndexBlock, transfer: int) -> None:
        """The host needs the block no longer. Partner of ``take``.

        Args:
            block: It.
            transfer: What a marked block is kept for, until ``settled``.
        """
        if self.on_give_back is not None:
            self.on_give_back(block.tensor)
        if block.marked:
            self._kept.setdefault(transfer, []).append(block)
        else:
            self._free[len(block.tensor)].append(block)

    def settled(self, transfer: int) -> None:
        """The host knows that everything marked for ``transfer`` is complete."""
        for block in self._kept.pop(transfer, ()):
            block.marked = False
            self._free[len(block.tensor)].append(block)
