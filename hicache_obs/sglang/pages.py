"""Hooks on SGLang's allocators: which pages get a new owner, and when a freed one may be used again.

An allocation's slots may lie in a page that its request has already; only a page whose first slot is handed out is
new. A free inside a group is put off by the allocator itself and recorded when it takes effect.
"""

from __future__ import annotations

from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.records import Mode, Space
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.page_ids import Convert, convert
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.versions import Versions

_OWNERS: Final = (Hazard.LIFETIME,)
_PAGED: Final = "PagedTokenToKVPoolAllocator"
_TOKEN: Final = "TokenToKVPoolAllocator"
_PAGES: Final = convert(1, skip_zero=True)


def base_pool(pool: Any) -> Any:
    """The pool that holds the full-attention pages of a hybrid one; itself if it is none."""
    full = getattr(pool, "full_kv_pool", None)
    return pool if full is None else full


def page_size(pool: Any) -> int:
    """Slots per page of a pool or allocator; 1 if it does not say."""
    size = getattr(pool, "page_size", 1)
    return size if isinstance(size, int) and size > 0 else 1


def _after_alloc(session: Session, _: object, slots: Any, allocator: Any, *__: Any, **___: Any) -> None:
    if slots is None:
        return
    pool = base_pool(allocator.get_kvcache())
    how = convert(page_size(pool), first_slots_only=True, skip_zero=True)
    access = session.access(Space.DEVICE, Mode.WRITE, pool, slots, how)
    if access is not None:
        session.recorder.page_alloc(0, access)


def _deferred(allocator: Any) -> bool:
    """Whether a free is only noted now, until the group ends."""
    group = getattr(allocator, "free_group", None)
    plain = getattr(allocator, "is_not_in_free_group", None)
    return group is not None if plain is None else not plain


def _before_free(session: Session, allocator: Any, free_index: Any) -> None:
    if not _deferred(allocator) and free_index.numel():
        pool = base_pool(allocator.get_kvcache())
        _free(session, pool, free_index, convert(page_size(pool), skip_zero=True))


def _before_release(session: Session, allocator: Any, *page_ids: Any) -> None:
    pool = base_pool(allocator.get_kvcache())
    if page_size(pool) != page_size(allocator):
        session.unobservable(_OWNERS, "allocator and pool have pages of different sizes")
        return
    for pages in page_ids:
        _free(session, pool, pages, _PAGES)


def _free(session: Session, pool: Any, tensor: Any, how: Convert) -> None:
    access = session.access(Space.DEVICE, Mode.WRITE, pool, tensor, how)
    if access is not None:
        session.recorder.page_free(0, access)


def _after_host_alloc(session: Session, _: object, slots: Any, pool: Any, *__: Any, **___: Any) -> None:
    if slots is None:
        return
    access = session.access(Space.HOST, Mode.WRITE, pool, slots, convert(page_size(pool)))
    if access is not None:
        session.recorder.page_alloc(0, access)


def _before_host_free(session: Session, pool: Any, indices: Any) -> None:
    access = session.access(Space.HOST, Mode.WRITE, pool, indices, convert(page_size(pool)))
    if access is not None and indices.numel():
        session.recorder.page_free(0, access)


def _rows(module: str, versions: Versions, *, release: bool) -> tuple[Adapter, ...]:
    paged, token = f"{module.format('paged')}.{_PAGED}", f"{module.format('token')}.{_TOKEN}"
    group = "in_allocator"
    allocations = tuple(
        Adapter(name, versions, after=_after_alloc, hazards=_OWNERS, group=group)
        for name in (f"{paged}.alloc", f"{paged}.alloc_extend", f"{paged}.alloc_decode", f"{token}.alloc")
    )
    free = (
        Adapter(f"{paged}._release_page_ids", versions, before=_before_release, hazards=_OWNERS)
        if release
        else Adapter(f"{paged}.free", versions, before=_before_free, hazards=_OWNERS)
    )
    return (*allocations, free, Adapter(f"{token}.free", versions, before=_before_free, hazards=_OWNERS))


def _host_rows(module: str, versions: Versions) -> tuple[Adapter, ...]:
    return (
        Adapter(f"{module}.HostKVCache.alloc", versions, after=_after_host_alloc, hazards=(Hazard.HOST_REUSE,)),
        Adapter(f"{module}.HostKVCache.free", versions, before=_before_host_free, hazards=(Hazard.HOST_REUSE,)),
    )


_MEM: Final = "sglang.srt.mem_cache"
PAGE_ADAPTERS: Final = (
    *_rows(f"{_MEM}.allocator", Versions("0.5.11", "0.5.13"), release=False),
    *_rows(f"{_MEM}.allocator.{{}}", Versions("0.5.13", "0.5.17"), release=False),
    *_rows(f"{_MEM}.allocator.{{}}", Versions("0.5.17"), release=True),
    *_host_rows(f"{_MEM}.memory_pool_host", Versions("0.5.11", "0.5.14")),
    *_host_rows(f"{_MEM}.pool_host.base", Versions("0.5.14")),
)
