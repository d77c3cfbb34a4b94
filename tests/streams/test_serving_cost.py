"""What a round and a transfer of the modelled model take, from what the small pool's work says."""

from __future__ import annotations

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.records import Direction, Mode, Work, device, host, page_ids
from hicache_obs.streams.serving_cost import ServingCosts

PAGES = (device(Mode.READ, page_ids([1, 2])),)
COSTS = ServingCosts(
    floor_ns=10,
    kernel_bytes_per_s=1_000_000_000_000,
    copy_bytes_per_s=1_000_000_000,
    kv_token_bytes=1000,
    pool_token_bytes=10,
    layers=4,
    round_ns=8000,
    token_ns=100,
)


@pytest.mark.parametrize(
    ("work", "duration_ns"),
    [
        # A decode round of 3 tokens takes the least time of a round; what it reads is a hundred times the pool's bytes.
        (Work("forward", PAGES, (0, 4), size_bytes=20_000, tokens=3), 8000 + 2000),
        # A prefill of 200 tokens takes longer than that.
        (Work("forward", PAGES, (0, 4), size_bytes=20_000, tokens=200), 20_000 + 2000),
        # One of four layers takes a quarter.
        (Work("forward", PAGES, (1, 2), size_bytes=5_000, tokens=200), 5000 + 500),
        (Work("copy", (*PAGES, host(Mode.WRITE, page_ids([1]))), (0, 1), 0, Direction.DEVICE_TO_HOST, 50), 5000),
        # Index tensors are as large as they are, and nothing is quicker than an empty kernel.
        (Work("index move", size_bytes=40_000), 40),
        (Work("index move", size_bytes=8), 10),
    ],
)
def test_durations(work, duration_ns):
    assert COSTS.duration_ns(work) == duration_ns


def test_costs_are_checked():
    with pytest.raises(ConfigError, match="round_ns=0: must be at least 1"):
        ServingCosts(round_ns=0)
