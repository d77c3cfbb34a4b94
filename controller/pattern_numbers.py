"""The numbers of the pattern model: constants, and exact integer arithmetic on tensors and arrays alike."""

from __future__ import annotations

from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hicache_obs.controller.batch import Int64Array
from hicache_obs.controller.pools import FP8_DIGITS, KVLayout

HASH_BITS: Final = 24
"""Bits of one K. The sum over a context of 2**29 tokens still fits float64's 53 bits."""
_MASK: Final = 2**31 - 1
# Odd multipliers below 2**31: a product of two masked values stays inside int64.
TOKEN: Final = 0x2C1B3C6D
POSITION: Final = 0x297A2D39
_LAYER: Final = 0x1B873593
_LANE: Final = 0x4CF5AD43
MIX: Final = 0x5BD1E995

Numbers = TypeVar("Numbers", torch.Tensor, npt.NDArray[np.int64])
Chain = TypeVar("Chain", torch.Tensor, npt.NDArray[np.float64])


def mixed(x: Numbers) -> Numbers:
    """Well spread 31-bit values of int64 ones."""
    x = x & _MASK
    x = ((x ^ (x >> 15)) * MIX) & _MASK
    return x ^ (x >> 13)


def sampled_slots(lens: Numbers, numbers: Numbers, filled: Numbers) -> Numbers:
    """Which token a round reads of page ``numbers`` of a row of ``lens`` tokens, ``filled`` of them in the page.

    It changes with the length, so that every slot gets its turn.
    """
    return ((lens * 0x9E3779B1 + numbers * 0x85EBCA6B) >> 7) % filled


class PatternNumbers:
    """What the rounds of one model share. All arrays are in host memory.

    Attributes:
        vocabulary: Token ids are below it.
        lanes: Values of K of one token at one layer.
        layer_salts: ``(layers,) int64``.
        key_salts: ``(layers, 1, lanes) int64``.
        layer_places: ``(layers, 1) int64``: the pool's first place at each layer.
    """

    def __init__(self, vocabulary: int, layout: KVLayout) -> None:
        self.vocabulary = vocabulary
        self.lanes = layout.heads * layout.head_dim
        self.layer_salts: Int64Array = np.arange(1, layout.layers + 1, dtype=np.int64) * _LAYER
        self.key_salts: Int64Array = self.layer_salts[:, None, None] + np.arange(self.lanes) * _LANE
        slots = layout.pages * layout.page_size
        self.layer_places: Int64Array = np.arange(layout.layers, dtype=np.int64)[:, None] * slots
        self._wraps = layout.form == "fp8"
        self._shift = 31 - (FP8_DIGITS.bit_length() - 1 if self._wraps else HASH_BITS)

    def keys(self, hashes: Numbers, salts: Numbers) -> Numbers:
        """``(layers, t, lanes) int64``: K of tokens with ``(t,)`` hashes; ``salts``: ``key_salts`` on their device."""
        return mixed(hashes[:, None] + salts) >> self._shift

    def wrapped(self, chain: Chain) -> Chain:
        """Values of the chain as the pool can hold them."""
        return chain % FP8_DIGITS if self._wraps else chain
