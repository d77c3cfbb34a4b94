"""A model that computes nothing: for runs in which only the order and the time of things matter.

Requests have the lengths they came with, so neither what is cached nor when anything runs depends on tokens. Every
round samples token 0, and pages hold whatever they held; the ledger is never asked.
"""

from __future__ import annotations

import torch

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.controller.model_runner import LaunchedRound, ModelRunner


class BlankRound(LaunchedRound):
    """One round: its tokens."""

    def __init__(self, layers: int, next_tokens: torch.Tensor) -> None:
        self._layers = layers
        self._next_tokens = next_tokens

    def run(self, first: int, end: int) -> None:
        """See ``LaunchedRound.run``; the last segment samples."""
        if end == self._layers:
            self._next_tokens.zero_()


class BlankRunner(ModelRunner):
    """Launches rounds that only take time."""

    def start(self, batch: ForwardBatch, next_tokens: torch.Tensor) -> BlankRound:
        return BlankRound(self.pool.layout.layers, next_tokens)
