"""Parts of SGLang whose accesses to pages no hook sees: known when a server runs with one, and said then.

``SEEN_NEVER`` is for ``doctor``, which runs beside a server and not in it.
"""

from __future__ import annotations

from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.sglang.session import Session

_TRANSFERS: Final = (
    Hazard.WAW_FORWARD_RESTORE,
    Hazard.WAR_FORWARD_RESTORE,
    Hazard.RAW_RESTORE_FORWARD,
    Hazard.RAW_FORWARD_BACKUP,
    Hazard.WAR_BACKUP_FORWARD,
)
_INJECTING: Final = ("DFLASH", "DSPARK")
_OWN_ALLOCATORS: Final = ("PageInterleave", "HiSparse", "MultiEnded", "UnifiedMamba", "UnifiedSWA")

SEEN_NEVER: Final = (
    "the KV that DFLASH and DSPARK drafts store outside of a forward round",
    "HiSparse's swaps between its device buffer and the host",
    "transfers of a linker other than the Mooncake linker of 0.5.22 or later",
    "pages that NCCL hands to other ranks (MLA deduplication), and all collectives",
    "page moves by allocators that share one pool (multi-ended, page-interleaved)",
    "remote transfers between prefill and decode servers",
)
"""What SGLang does with pages that is never recorded, one line each."""


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
