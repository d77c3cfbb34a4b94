"""The pool guard: touching a pool outside ``launch`` raises, on the guarded thread."""

from __future__ import annotations

import pytest
import torch

from hicache_obs.errors import StreamError
from hicache_obs.records import Work
from hicache_obs.streams.guard import PoolGuard


@pytest.fixture
def pool():
    """(8 pages, 4 elements) float64, cpu."""
    return torch.zeros(8, 4, dtype=torch.float64)


TOUCHES = {
    "read": lambda pool: pool.sum(),
    "write": lambda pool: pool.fill_(1.0),
    "through a view": lambda pool: pool[2:4].add_(1.0),
    "as an index source": lambda pool: pool.index_select(0, torch.tensor([1, 2])),
    "as a destination": lambda pool: torch.add(torch.ones(4), 1.0, out=pool[0]),
    "in a list": lambda pool: torch.stack([torch.ones(4), pool[0]]),
    "item": lambda pool: pool[0, 0].item(),
}


@pytest.mark.parametrize("touch", TOUCHES)
def test_a_touch_outside_launch_raises(threads, pool, touch):
    with PoolGuard(threads.device, [pool]), pytest.raises(StreamError) as caught:
        TOUCHES[touch](pool)
    text = "touches the pool tensor of shape (8, 4) outside launch() of device 'threads': the access is ordered"
    assert text in str(caught.value)


@pytest.mark.parametrize("schedule", ["eager", "adversarial"])
@pytest.mark.parametrize("touch", TOUCHES)
def test_the_same_touch_inside_launch_does_not(virtual, pool, touch, schedule):
    device = virtual(schedule).device
    with PoolGuard(device, [pool]):
        device.launch(lambda: TOUCHES[touch](pool), Work("x"))
        device.synchronize()


def test_views_metadata_and_other_tensors_are_free(threads, pool):
    with PoolGuard(threads.device, [pool]):
        row = pool[3]
        assert row.shape == (4,)
        pool.view(-1).unsqueeze(0).t()
        torch.ones(4).add_(1.0)
        pool.is_contiguous()
        threads.device.launch(lambda: row.fill_(2.0), Work("x"))
        threads.device.synchronize()
    assert pool[3].sum() == 8.0
