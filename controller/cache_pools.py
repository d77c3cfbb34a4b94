"""The memory of an engine: pools on both tiers, what moves pages between them, and who knows which page is where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.fence_policy import PageUses
from hicache_obs.controller.hybrid import HybridTransferEngine, Member
from hicache_obs.controller.hybrid_controller import HybridUses
from hicache_obs.controller.hybrid_pool import HybridDevicePool
from hicache_obs.controller.partial_pool import STATES_PER_REQUEST, PartialPool, PartialPools
from hicache_obs.controller.pools import FORMS, DevicePool, HostPool, KVLayout, RoundPool
from hicache_obs.controller.transfer_engine import TransferEngine
from hicache_obs.controller.translation import Translation
from hicache_obs.errors import ConfigError
from hicache_obs.streams.protocol import Device

HYBRIDS: Final = ("swa", "hybrid")
"""Layouts of several pools. ``swa``: every second layer has sliding-window attention, in a smaller pool. ``hybrid``: of
three layers one has full attention, one a sliding window and one a state; the last two share their memory."""
KV_LAYOUTS: Final = (*FORMS, *HYBRIDS)
WINDOW_PAGES: Final = 2
"""A window is as long as so many pages, if nothing is said."""


@dataclass(frozen=True, slots=True, eq=False)
class CachePools:
    """Attributes:
    rounds: The device pools as rounds see them.
    transfers: Moves pages between the tiers.
    partial: Pools that have a place for some pages only.
    device_pages: Ids of device pages.
    uses: What a page fence asks.
    host: The host pool of the layers with full attention.
    """

    rounds: RoundPool
    transfers: TransferEngine
    partial: PartialPools
    device_pages: PageAllocator
    uses: PageUses
    host: HostPool


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What ``open_pools`` makes.

    Attributes:
        layout: Of all layers together, on the device; its form is that of every pool.
        kv: One of ``KV_LAYOUTS``.
        host_pages: Size of the host pools.
        arrangement, io: As of ``HostPool`` and ``TransferEngine``.
        window: Tokens that a sliding-window layer attends to; 0: ``WINDOW_PAGES`` pages.
        window_pages: Places of windows; 0: half the device pages, or as many as the longest request needs. There are
            as many more as states of running requests may need.
        longest: Pages of the longest request.
        rows: Most running requests.
    """

    layout: KVLayout
    kv: str
    host_pages: int
    arrangement: str
    io: str | None
    window: int
    window_pages: int
    longest: int
    rows: int


def open_pools(device: Device, shape: PoolShape) -> CachePools:
    """Allocate the pools.

    Raises:
        ConfigError: More memory than there is, or pools that cannot hold a request.
    """
    device_pages = PageAllocator(shape.layout.pages, name="device")
    if shape.kv not in HYBRIDS:
        if shape.window or shape.window_pages:
            raise ConfigError(f"window: --kv {shape.kv} has no sliding window; expected {' or '.join(HYBRIDS)}")
        pool = DevicePool(shape.layout, device.torch_device)
        host = _host(device, shape, shape.layout.layers)
        plain = TransferEngine(device, pool, host, io=shape.io)
        return CachePools(pool, plain, PartialPools(), device_pages, device_pages, host)
    members = _members(device, shape)
    pools = [member.partial for member in members if member.partial is not None]
    partial = PartialPools(pools, rows=shape.rows)
    transfers = HybridTransferEngine(device, members, io=shape.io)
    transfers.parts_only = partial.parts_only
    return CachePools(
        HybridDevicePool(members, shape.layout),
        transfers,
        partial,
        device_pages,
        HybridUses(device_pages, partial),
        members[0].host_pool,
    )


def _members(device: Device, shape: PoolShape) -> tuple[Member, ...]:
    layers = range(shape.layout.layers)
    kinds = 3 if shape.kv == "hybrid" else 2
    if len(layers) < kinds:
        raise ConfigError(f"layers: {len(layers)}; --kv {shape.kv} needs at least {kinds}")
    size = shape.layout.page_size
    window = shape.window or WINDOW_PAGES * size
    if window < 2:
        raise ConfigError(f"window: {window}; expected at least 2 tokens")
    places = shape.window_pages or max(shape.longest, shape.layout.pages // 2)
    if places < shape.longest:
        raise ConfigError(f"window_pages: {places}; the longest request needs {shape.longest}; expected at least that")
    if kinds == 3:
        places += STATES_PER_REQUEST * shape.rows
    slabs = PageAllocator(places, name="arena" if kinds == 3 else "window")
    full, partial = tuple(layers[::kinds]), [tuple(layers[kind::kinds]) for kind in range(1, kinds)]
    arena = _device(device, shape, max(map(len, partial)), places)
    members = [
        Member("full", full, _device(device, shape, len(full), shape.layout.pages), _host(device, shape, len(full)))
    ]
    for number, (name, reach, own) in enumerate(zip(("window", "state"), (window, 0), partial, strict=False)):
        table = Translation(device, shape.layout.pages, slabs, number=number)
        pool = PartialPool(name, table, window=reach, page_size=size, host_pages=shape.host_pages)
        members.append(
            Member(
                name,
                own,
                arena,
                _host(device, shape, len(own)),
                pool=1,
                host_number=1 + number,
                translation=table,
                partial=pool,
            )
        )
    return tuple(members)


def _device(device: Device, shape: PoolShape, layers: int, pages: int) -> DevicePool:
    return DevicePool(_layout(shape, layers, pages), device.torch_device)


def _host(device: Device, shape: PoolShape, layers: int) -> HostPool:
    pinned = device.name == "cuda"
    return HostPool(_layout(shape, layers, shape.host_pages), pinned=pinned, arrangement=shape.arrangement)


def _layout(shape: PoolShape, layers: int, pages: int) -> KVLayout:
    whole = shape.layout
    return KVLayout(layers, pages, whole.page_size, whole.heads, whole.head_dim, whole.dtype, whole.form)
