"""Hooks on HiCache's storage threads: what they read and write of host pages, and how work reaches them.

Operations travel through queues. Each queue object gets its own ``put`` and ``get`` as soon as a thread that uses it
starts: a put is a post and the get of the same object the matching receive, whatever else was put meanwhile.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.records import IoKind, Mode, Space
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.page_ids import convert
from hicache_obs.sglang.pages import page_size
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.versions import Versions

MAX_WAITING: Final = 1 << 14
"""Objects in one queue whose post is remembered."""
_STORAGE: Final = (Hazard.STORAGE_PREFETCH, Hazard.HOST_REUSE)
_QUEUES: Final = (
    "prefetch_queue",
    "backup_queue",
    "prefetch_buffer",
    "prefetch_sync_queue",
    "prefetch_hit_queue",
    "ack_prefetch_queue",
    "ack_backup_queue",
    "host_mem_release_queue",
)
_WATCHED: Final = "_hicache_obs_watched"
_GUARD: Final = threading.Lock()


def watch_queue(session: Session, queue: Any) -> None:
    """Record what travels through ``queue`` (a ``queue.Queue``) from now on. Idempotent; any thread."""
    with _GUARD:
        if queue is None or getattr(queue, _WATCHED, False):
            return
        setattr(queue, _WATCHED, True)
    channels: dict[int, int] = {}
    put, get = queue.put, queue.get

    def posting(item: Any, *args: Any, **kwargs: Any) -> Any:
        if item is not None and session.recording:
            _guarded(session, _post, session, channels, item)
        return put(item, *args, **kwargs)

    def receiving(*args: Any, **kwargs: Any) -> Any:
        item = get(*args, **kwargs)
        if item is not None and session.recording:
            _guarded(session, _receive, session, channels, item)
        return item

    queue.put, queue.get = posting, receiving


def _post(session: Session, channels: dict[int, int], item: Any) -> None:
    if len(channels) >= MAX_WAITING:
        channels.clear()  # the queue was emptied behind our back; what is left loses its edge, which is reported
    channels[id(item)] = channel = session.number()
    session.recorder.thread_post(channel)


def _receive(session: Session, channels: dict[int, int], item: Any) -> None:
    channel = channels.pop(id(item), None)
    if channel is not None:
        session.recorder.thread_recv(channel)


def _guarded(session: Session, fn: Callable[..., None], *args: Any) -> None:
    try:
        fn(*args)
    except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
        session.hook_failed("queue.Queue", error)


def _watch(session: Session, controller: Any) -> None:
    for name in _QUEUES:
        watch_queue(session, getattr(controller, name, None))
    for queue in getattr(controller, "extra_host_mem_release_queues", {}).values():
        watch_queue(session, queue)


def _before_thread(session: Session, controller: Any) -> None:
    _watch(session, controller)


def _after_threads(session: Session, _: object, __: object, controller: Any) -> None:
    _watch(session, controller)


def _storage_pool(controller: Any) -> Any:
    pool = getattr(controller, "storage_host_pool", None) or controller.mem_pool_host
    anchor = getattr(pool, "anchor_entry", None)
    return pool if anchor is None else anchor.host_pool


def _begin(session: Session, controller: Any, operation: Any, kind: IoKind, site: str) -> int | None:
    indices = operation.host_indices
    if indices is None or not indices.numel():
        return None
    pool = _storage_pool(controller)
    mode = Mode.WRITE if kind is IoKind.STORAGE_READ else Mode.READ
    access = session.access(Space.HOST, mode, pool, indices, convert(page_size(pool)))
    return None if access is None else session.recorder.io_begin(kind, (access,), site=site)


def _before_read(session: Session, controller: Any, operation: Any) -> int | None:
    return _begin(session, controller, operation, IoKind.STORAGE_READ, "storage prefetch")


def _before_write(session: Session, controller: Any, operation: Any) -> int | None:
    return _begin(session, controller, operation, IoKind.STORAGE_WRITE, "storage backup")


def _end(session: Session, io: int | None, *_: Any, **__: Any) -> None:
    if io is not None:
        session.recorder.io_end(io)


_CONTROLLER: Final = "sglang.srt.managers.cache_controller.HiCacheController"
_HYBRID: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"


def _io(owner: str) -> tuple[Adapter, ...]:
    return (
        Adapter(
            f"{owner}._page_transfer",
            Versions("0.5.11"),
            before=_before_read,
            after=_end,
            failed=_end,
            hazards=_STORAGE,
            group="in_storage_read",
        ),
        Adapter(
            f"{owner}._page_backup",
            Versions("0.5.11"),
            before=_before_write,
            after=_end,
            failed=_end,
            hazards=_STORAGE,
            group="in_storage_write",
        ),
    )


def _thread(name: str, versions: Versions) -> Adapter:
    return Adapter(name, versions, before=_before_thread, hazards=_STORAGE)


STORAGE_ADAPTERS: Final = (
    *_io(_CONTROLLER),
    *_io(_HYBRID),
    Adapter(f"{_CONTROLLER}._start_storage_threads", Versions("0.5.11"), after=_after_threads, hazards=_STORAGE),
    _thread(f"{_CONTROLLER}.prefetch_thread_func", Versions("0.5.11")),
    _thread(f"{_CONTROLLER}.prefetch_io_aux_func", Versions("0.5.11")),
    _thread(f"{_CONTROLLER}.backup_thread_func", Versions("0.5.11")),
    _thread(f"{_HYBRID}.backup_thread_func", Versions("0.5.17")),
    _thread(f"{_CONTROLLER}.prefetch_sync_thread_func", Versions("0.5.19")),
)
