"""Tells a recorder what an engine does beside its device: things that streams and events do not show."""

from __future__ import annotations

from hicache_obs.controller.transfer_engine import TransferEngine
from hicache_obs.recorder.recorder import Recorder


def watch_blocks(transfers: TransferEngine, recorder: Recorder) -> None:
    """Record which index tensor has which block."""
    transfers.blocks.on_take = recorder.tensor_alloc
    transfers.blocks.on_give_back = recorder.tensor_free
