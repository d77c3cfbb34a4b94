"""What a large model's rounds and transfers cost on the virtual device, while a small pool stands in for its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache_obs.records import Direction, Space, Work
from hicache_obs.streams.cost import CostModel

KV_TOKEN_BYTES: Final = 131_072
"""KV of one token in all layers: 32 layers, 8 heads of 128 for K and V each, 16 bits."""
ROUND_NS: Final = 6_000_000
"""A round reads all weights: 16 GB at 3 TB/s take 5.3 ms, and launching and sampling take the rest."""
TOKEN_NS: Final = 50_000
"""Computing one token: 20,000 tokens of a prompt per second."""

_NS_PER_S: Final = 1_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServingCosts(CostModel):
    """A round takes ``max(round_ns, tokens * token_ns)``, and the KV it reads and writes at memory bandwidth on top.

    A transfer takes its KV at copy bandwidth. Streams do not slow each other down.

    Attributes:
        kv_token_bytes: KV of one token of the model, all layers.
        pool_token_bytes: The same in the pool that stands for it.
        layers: Of that pool; each is the same share of the model.
        round_ns: Least time of a round of all layers.
        token_ns: Time of one token that is computed, all layers.
    """

    kv_token_bytes: int = KV_TOKEN_BYTES
    pool_token_bytes: int = KV_TOKEN_BYTES
    layers: int = 1
    round_ns: int = ROUND_NS
    token_ns: int = TOKEN_NS

    def duration_ns(self, work: Work) -> int:
        """Device time of ``work``, never below the floor."""
        size_bytes = work.size_bytes
        if any(access.space is Space.DEVICE for access in work.accesses):
            size_bytes = size_bytes * self.kv_token_bytes // self.pool_token_bytes
        on_device = work.direction is None or work.direction is Direction.DEVICE_TO_DEVICE
        bytes_per_s = self.kernel_bytes_per_s if on_device else self.copy_bytes_per_s
        duration_ns = -(-size_bytes * _NS_PER_S // bytes_per_s)
        if work.tokens:
            low, high = work.layers
            share = min(high, self.layers) - low
            duration_ns += max(self.round_ns, work.tokens * self.token_ns) * share // self.layers
        return max(self.floor_ns, duration_ns)
