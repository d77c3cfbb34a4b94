"""Tells a recorder what an engine does beside its device: things that streams and events do not show."""

from __future__ import annotations

from hicache_obs.controller.hybrid import HybridTransferEngine
from hicache_obs.controller.transfer_engine import TransferEngine
from hicache_obs.recorder.recorder import Recorder


def watch_blocks(transfers: TransferEngine, recorder: Recorder) -> None:
    """Record which index tensor has which block."""
    transfers.blocks.on_take = recorder.tensor_alloc
    transfers.blocks.on_give_back = recorder.tensor_free


def name_pools(transfers: TransferEngine, recorder: Recorder) -> None:
    """State the names and layer counts of the device pools, before anything is recorded of them."""
    if not isinstance(transfers, HybridTransferEngine):
        recorder.define_pool("kv", transfers.model_layers)
        return
    for number in {member.pool for member in transfers.members}:
        members = [member for member in transfers.members if member.pool == number]
        layers = max(len(member.layers) for member in members)
        recorder.define_pool(" and ".join(member.name for member in members), layers, pool=number)
