"""Parts of SGLang whose accesses to pages no hook sees: known when a server runs with one, and said then.

``SEEN_NEVER`` is for ``doctor``, which runs beside a server and not in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.versions import Versions

_TRANSFERS: Final = (
    Hazard.WAW_FORWARD_RESTORE,
    Hazard.WAR_FORWARD_RESTORE,
    Hazard.RAW_RESTORE_FORWARD,
    Hazard.RAW_FORWARD_BACKUP,
    Hazard.WAR_BACKUP_FORWARD,
)
_STORES: Final = "sglang.srt.mem_cache.storage."
_INJECTING: Final = ("DFLASH", "DSPARK")
_OWN_ALLOCATORS: Final = ("PageInterleave", "HiSparse", "MultiEnded", "UnifiedMamba", "UnifiedSWA")

COPY_OWNERS: Final = {
    "load_to_device_per_layer_physical": ("HostKVCache", "LogicalHostPool"),
    "load_to_device_per_layer": ("MHATokenToKVPoolHost", "MLATokenToKVPoolHost", "LogicalHostPool"),
}
"""Classes whose copy functions are hooked, or copy nothing: by the first of these names that a host pool has."""

SEEN_NEVER: Final = (
    "the KV that DFLASH and DSPARK drafts store outside of a forward round",
    "HiSparse's swaps between its device buffer and the host",
    "what LMCache and FlexKV move: their radix trees hand device pages to processes of their own",
    "transfers of a linker whose threads wait for other events than its calls make, or that counts layers by itself",
    "pages that NCCL hands to other ranks (MLA deduplication), and all collectives",
    "host pools that copy in functions of their own: before 0.5.21 all but MHA and MLA, then page envelopes and NVFP4",
    "page moves by allocators that share one pool (multi-ended, page-interleaved)",
    "remote transfers between prefill and decode servers",
)
"""What SGLang does with pages that is never recorded, one line each."""


def _after_tree(session: Session, _: object, tree: Any, *__: Any, **___: Any) -> None:
    """A tree of an external store moves pages itself; one with a linker has it attached where a hook is."""
    module = type(tree).__module__
    if module.startswith(_STORES) or not module.startswith("sglang."):
        reason = f"{type(tree).__name__} moves pages in ways of its own"
    elif getattr(tree, "linker", None) is not None and session.links is None:
        reason = "a linker was attached where no hook is"
    else:
        return
    session.unobservable((*_TRANSFERS, Hazard.RDMA), reason)


def state_own_copies(session: Session, host_pools: Iterable[Any]) -> None:
    """Make the transfers' hazards *not observable* where a host pool copies in functions that no hook is on."""
    for pool in host_pools:
        kind = type(pool)
        if kind in session.host_kinds:
            continue
        session.host_kinds.add(kind)
        name = next((name for name in COPY_OWNERS if hasattr(kind, name)), None)
        if name is not None and getattr(kind, name).__qualname__.split(".")[-2] not in COPY_OWNERS[name]:
            session.unobservable(_TRANSFERS, f"{kind.__name__} copies pages in functions of its own")


def state_blind_spots(session: Session, runner: Any) -> None:
    """Make the hazards of what ``runner``, a ModelRunner, has and no hook sees *not observable*."""
    if getattr(runner, "hisparse_coordinator", None) is not None:
        session.unobservable(
            (*_TRANSFERS, Hazard.HOST_REUSE, Hazard.LIFETIME), "HiSparse moves pages in kernels of its own"
        )
    algorithm = getattr(getattr(runner, "spec_algorithm", None), "name", "")
    if algorithm in _INJECTING:
        session.unobservable(_TRANSFERS, f"{algorithm} drafts store KV outside of a forward round")
    allocator = type(getattr(runner, "token_to_kv_pool_allocator", None)).__name__
    if allocator.startswith(_OWN_ALLOCATORS):
        session.unobservable((Hazard.LIFETIME,), f"{allocator} hands out and moves pages in its own way")


BLIND_ADAPTERS: Final = (
    Adapter("sglang.srt.mem_cache.registry.create_tree_cache", Versions("0.5.13"), after=_after_tree),
)
