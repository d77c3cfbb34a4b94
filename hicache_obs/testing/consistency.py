"""What must hold of the engine whatever it is given: no page lost, none with two owners. Imports torch."""

from __future__ import annotations

import numpy as np
import torch

from hicache_obs.controller.engine import Engine
from hicache_obs.controller.storage_page import page_keys
from hicache_obs.records import PageIds, page_ids


def check_engine(engine: Engine) -> None:
    """AssertionError unless the tree's rules hold and each page has one owner; for between any two steps."""
    scheduler, radix = engine.scheduler, engine.scheduler.radix
    radix.check_invariants()
    owned = [scheduler.table.owned(state) for state in scheduler._running]
    cached = [node.device_pages for node in radix.nodes() if node.device_pages is not None]
    _check_owners("device", [*owned, *cached], scheduler.device_pages.in_use)
    kept = [node.host_pages for node in radix.nodes() if node.host_pages is not None]
    _check_owners("host", [*kept, *_fetched_into(engine)], scheduler.host_pages.in_use)
    slots = [state.slot for state in scheduler._running] + scheduler._free_slots
    assert sorted(slots) == list(range(scheduler.options.max_running)), f"slots {sorted(slots)}: lost or used twice"


def check_drained(engine: Engine) -> None:
    """AssertionError unless nothing is in flight, no lock, pin or hold is left, and all pages in use are the tree's."""
    scheduler, radix = engine.scheduler, engine.scheduler.radix
    assert scheduler.done, "requests are left"
    assert engine.controller.transfers_in_flight == 0, "transfers are left"
    assert scheduler.storage is None or not scheduler.storage.busy, "storage jobs are left"
    for node in radix.nodes():
        held = node.lock_ref or node.loading or node.backing_up or node.host_holds
        assert not held, f"{node!r} is still locked, pinned or held"
    assert scheduler.device_pages.in_use == radix.device_pages_total == radix.device_evictable_pages
    assert scheduler.host_pages.in_use == radix.host_pages_total
    assert scheduler.counters.finished == len(scheduler.outputs)
    check_engine(engine)


def cached_contents(engine: Engine) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """K and V of every cached page on the device and in host memory, by the key of its tokens. Device idle."""
    scheduler, transfers = engine.scheduler, engine.controller.engine
    radix = scheduler.radix
    found: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] = ({}, {})
    for node in radix.nodes():
        keys = page_keys("", radix.path(node), radix.page_size)
        for tier, pages, pool in (
            (found[0], node.device_pages, transfers.device_pool),
            (found[1], node.host_pages, transfers.host_pool),
        ):
            if pages is not None:
                for key, page in zip(keys[-len(pages) :], pages.tolist(), strict=True):
                    tier[key] = torch.stack([pool.k[:, page], pool.v[:, page]]).cpu()
    return found


def check_contents(engine: Engine, reference: Engine, *, exact: bool) -> int:
    """AssertionError unless pages hold what ``reference``, an engine without host tier, has for the same tokens.

    Args:
        exact: Bit by bit; otherwise close, where batching changes bits.

    Returns:
        Pages compared, both tiers together.
    """
    expected, _ = cached_contents(reference)
    compared = 0
    for tier, contents in zip(("device", "host"), cached_contents(engine), strict=True):
        for key in contents.keys() & expected.keys():
            same = torch.equal(contents[key], expected[key]) if exact else torch.allclose(contents[key], expected[key])
            assert same, f"a {tier} page holds other contents than the engine without host tier computed"
            compared += 1
    return compared


def _fetched_into(engine: Engine) -> list[PageIds]:
    storage = engine.scheduler.storage
    return [] if storage is None else storage.fetched_into()


def _check_owners(tier: str, owned: list[PageIds], in_use: int) -> None:
    pages = np.concatenate([page_ids([]), *owned])
    assert len(np.unique(pages)) == len(pages), f"a {tier} page has two owners"
    assert len(pages) == in_use, f"{in_use} {tier} pages in use, {len(pages)} of them owned: some are lost"
