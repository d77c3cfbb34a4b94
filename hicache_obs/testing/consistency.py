"""What must hold of the engine whatever it is given: no page lost, none with two owners. Imports torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch

from hicache_obs.controller.engine import Engine
from hicache_obs.controller.hybrid import HybridTransferEngine, Member
from hicache_obs.controller.partial_pool import PartialPool
from hicache_obs.controller.pools import DevicePool, HostPool
from hicache_obs.controller.storage_page import page_keys
from hicache_obs.controller.transfer_engine import TransferEngine
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
    _check_partial_pools(engine, np.concatenate([page_ids([]), *owned, *cached]))
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


Contents = dict[tuple[str, str], torch.Tensor]


def cached_contents(engine: Engine) -> tuple[Contents, Contents]:
    """K and V of every cached page on the device and in host memory, by the key of its tokens and pool. Device idle."""
    radix = engine.scheduler.radix
    found: tuple[Contents, Contents] = ({}, {})
    members = _members(engine.controller.engine)
    for node in radix.nodes():
        keys = page_keys("", radix.path(node), radix.page_size)
        for member in members:
            if node.device_pages is not None:
                _read(found[0], member, member.device_pool, keys, member.places(node.device_pages))
            if node.host_pages is not None:
                has = np.ones(len(node.host_pages), np.bool_)
                if member.partial is not None:
                    has = member.partial.host_has[node.host_pages]
                _read(found[1], member, member.host_pool, keys, np.where(has, node.host_pages, -1))
    return found


def _read(tier: Contents, member: Member, pool: DevicePool | HostPool, keys: Sequence[str], places: PageIds) -> None:
    """Add the pages that have a place in ``pool``: those of the last ``keys``."""
    for key, place in zip(keys[-len(places) :], places.tolist(), strict=True):
        if place >= 0:
            layers = len(member.layers)
            tier[key, member.name] = torch.stack([pool.k[:layers, place], pool.v[:layers, place]]).cpu()


def _members(transfers: TransferEngine) -> Sequence[Member]:
    if isinstance(transfers, HybridTransferEngine):
        return transfers.members
    layers = tuple(range(transfers.model_layers))
    return (Member("full", layers, transfers.device_pool, transfers.host_pool),)


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
            assert same, (
                f"a {tier} page of pool {key[1]} holds other contents than the engine without host tier computed"
            )
            compared += 1
    return compared


def _check_partial_pools(engine: Engine, used: PageIds) -> None:
    """AssertionError unless each place is one page's that somebody owns, and users are counted right."""
    scheduler = engine.scheduler
    places: dict[int, list[PageIds]] = {}
    in_use = {}
    for pool in scheduler.pages.partial.pools:
        resident = pool.translation.resident()
        assert np.isin(resident, used).all(), f"{pool.name} pool: a page that nobody owns has a place"
        slabs = pool.translation.slabs
        places.setdefault(id(slabs), []).append(pool.translation.places(resident))
        in_use[id(slabs)] = slabs
        _check_users(engine, pool)
    for key, slabs in in_use.items():
        _check_owners(slabs.name, places[key], slabs.in_use)


def _check_users(engine: Engine, pool: PartialPool) -> None:
    scheduler = engine.scheduler
    counted: Counter[int] = Counter()
    for state in scheduler._running:
        needed = scheduler.table.used(state)[pool.low(state) :]
        counted.update(needed.tolist())
        start = state.launched_len
        row = scheduler.table.used(state)[pool.first(start) : -(-start // pool.page_size)]
        assert pool.translation.here(row).all(), f"{pool.name} pool: a page that a request needs has no place"
    pages = np.arange(scheduler.device_pages.pages)
    expected = [counted[page] for page in pages.tolist()]
    assert pool.users(pages).tolist() == expected, f"{pool.name} pool: users are counted wrong"


def _fetched_into(engine: Engine) -> list[PageIds]:
    storage = engine.scheduler.storage
    return [] if storage is None else storage.fetched_into()


def _check_owners(tier: str, owned: list[PageIds], in_use: int) -> None:
    pages = np.concatenate([page_ids([]), *owned])
    assert len(np.unique(pages)) == len(pages), f"a {tier} page has two owners"
    assert len(pages) == in_use, f"{in_use} {tier} pages in use, {len(pages)} of them owned: some are lost"
