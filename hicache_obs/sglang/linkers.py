"""Hooks on linkers: external stores that read and write device pages directly, on threads of their own.

A linker's load waits on the host for the event that its submission recorded, then writes the pages layer by layer; a
forward round waits on the host for each layer. An offload waits for its events the same way. Those events are seen by
the hooks on events; here the transfers are recorded, and what their ends tell the thread that waits for them.

The threads run before the linker is known here, so only what they look up anew for each task is hooked, on the linker
itself. One whose functions have other names than SGLang's Mooncake linker makes the hazards *not observable*.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.records import ALL_LAYERS, MAX_ACCESSES, Access, IoKind, Mode, Space
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.page_ids import convert
from hicache_obs.sglang.pages import base_pool, page_size
from hicache_obs.sglang.rounds import end_segment
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.storage import MAX_WAITING
from hicache_obs.sglang.versions import Versions

LINKED: Final = (Hazard.RDMA, Hazard.RAW_FORWARD_BACKUP, Hazard.WAR_BACKUP_FORWARD)
"""What a linker's transfers can be part of."""
_WATCHED: Final = "_hicache_obs_linker"
_LOAD, _OFFLOAD, _RESULTS = "load_layer_wise", "batch_set_v2", "offload_results"


@dataclass(slots=True)
class _Load:
    """The load that a thread is running.

    Attributes:
        accesses: What each layer of it writes, a record's worth at a time.
        layers: Of the linker.
        open: Numbers of the transfers of the layer that is under way.
    """

    accesses: list[tuple[Access, ...]]
    layers: int
    open: list[int] = field(default_factory=list)


class Links:
    """What is known of one session's linkers: loads by their thread, and posts by what they tell of."""

    def __init__(self) -> None:
        self.loads: Final = threading.local()
        self.layers: Final[dict[tuple[int, int, int], int]] = {}
        """Channels of layers that are over, by counter, batch and layer."""
        self.results: Final[deque[int]] = deque(maxlen=MAX_WAITING)
        """Channels of offloads that are over, in their order."""


def _links(session: Session) -> Links:
    if session.links is None:
        session.links = Links()
    links: Links = session.links
    return links


# -- attaching -------------------------------------------------------------------------------------------------


def _before_attach(session: Session, _: Any, linker: Any, *__: Any, **___: Any) -> None:
    watch_linker(session, linker)


def watch_linker(session: Session, linker: Any) -> None:
    """Record ``linker``'s transfers from now on; or say that they cannot be. Idempotent."""
    if getattr(linker, _WATCHED, False):
        return
    name = type(linker).__name__
    storage, results = getattr(linker, "storage", None), getattr(linker, _RESULTS, None)
    counter = type(getattr(linker, "layer_done_counter", None))
    ours = f"{counter.__module__}.{counter.__qualname__}" == _COUNTER
    if not (ours and hasattr(linker, _LOAD) and hasattr(storage, _OFFLOAD) and hasattr(results, "put")):
        session.unobservable(LINKED, f"the linker {name} moves pages in functions that are not known here")
        return
    if getattr(linker, "mla_broadcaster", None) is not None:
        session.unobservable((Hazard.RDMA,), f"{name} hands pages to other ranks by NCCL, which is not seen")
    setattr(linker, _WATCHED, True)
    load, offload = getattr(linker, _LOAD), getattr(storage, _OFFLOAD)
    pools = linker.pools
    layers = int(linker.num_layers)
    setattr(
        linker, _LOAD, _watched(session, load, lambda _, requests, *__: _begin_load(session, pools, layers, requests))
    )
    setattr(
        storage, _OFFLOAD, _watched(session, offload, lambda moved, *_, **__: _begin_offload(session, pools, moved))
    )
    _watch_results(session, results)


def _watched(
    session: Session, original: Callable[..., Any], begin: Callable[..., Callable[[], None]]
) -> Callable[..., Any]:
    """``original``, with ``begin`` called before it and what that returned after it, whichever way it ends."""

    def call(*args: Any, **kwargs: Any) -> Any:
        end = _guarded(session, begin, *args, **kwargs) if session.recording else None
        try:
            return original(*args, **kwargs)
        finally:
            if end is not None:
                _guarded(session, end)

    return call


def _watch_results(session: Session, queue: Any) -> None:
    """The results of offloads are no objects of their own: the first put is the first got."""
    put, get = queue.put, queue.get

    def posting(item: Any, *args: Any, **kwargs: Any) -> Any:
        if session.recording:
            _guarded(session, _post_result, session)
        return put(item, *args, **kwargs)

    def receiving(*args: Any, **kwargs: Any) -> Any:
        item = get(*args, **kwargs)
        if session.recording:
            _guarded(session, _receive_result, session)
        return item

    queue.put, queue.get = posting, receiving


def _post_result(session: Session) -> None:
    channel = session.number()
    session.recorder.thread_post(channel)
    _links(session).results.append(channel)


def _receive_result(session: Session) -> None:
    results = _links(session).results
    if results:
        session.recorder.thread_recv(results.popleft())


def _guarded(session: Session, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    try:
        return fn(*args, **kwargs)
    except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
        session.hook_failed("UnifiedCacheLinker", error)
        return None


# -- transfers -------------------------------------------------------------------------------------------------


def _begin_load(session: Session, pools: Any, layers: int, requests: Any) -> Callable[[], None]:
    """The layers of a load begin one after the other: ``LayerWiseLoadCounter.complete`` ends one."""
    moved = [transfer for transfers in requests for transfer in transfers]
    load = _links(session).loads.load = _Load(_accesses(session, pools, moved, Mode.WRITE), layers)
    _begin_layer(session, load, 0)

    def end() -> None:
        _links(session).loads.load = None
        _end_layer(session, load)

    return end


def _begin_layer(session: Session, load: _Load, layer: int) -> None:
    load.open = [
        session.recorder.io_begin(IoKind.RDMA_WRITE, accesses, site="linker load", layers=(layer, layer + 1))
        for accesses in load.accesses
    ]


def _end_layer(session: Session, load: _Load) -> None:
    for io in load.open:
        session.recorder.io_end(io)
    load.open = []


def _begin_offload(session: Session, pools: Any, moved: Any) -> Callable[[], None]:
    ios = [
        session.recorder.io_begin(IoKind.DEVICE_READ, accesses, site="linker offload", layers=ALL_LAYERS)
        for accesses in _accesses(session, pools, moved, Mode.READ)
    ]

    def end() -> None:
        for io in ios:
            session.recorder.io_end(io)

    return end


def _accesses(session: Session, pools: Any, moved: Iterable[Any], mode: Mode) -> list[tuple[Access, ...]]:
    """The device pages of ``moved``, whose ``host_indices`` are device slots, as many as a record holds at a time."""
    found = []
    for transfer in moved:
        slots = transfer.host_indices
        if slots is not None and slots.numel():
            pool = base_pool(pools[transfer.name].device_pool)
            how = convert(page_size(pool), skip_zero=True)
            access = session.access(Space.DEVICE, mode, pool, slots, how)
            if access is not None:
                found.append(access)
    return [tuple(found[start : start + MAX_ACCESSES]) for start in range(0, len(found), MAX_ACCESSES)]


# -- layers ----------------------------------------------------------------------------------------------------


def _before_complete(session: Session, counter: Any, index: int, layer: int) -> None:
    """A layer has arrived: the thread that waits for it may know from now on."""
    links = _links(session)
    load: _Load | None = getattr(links.loads, "load", None)
    if load is not None:
        _end_layer(session, load)
    if len(links.layers) >= MAX_WAITING:
        links.layers.clear()  # nobody waits for these layers; one that does loses its edge, which is reported
    channel = session.number()
    session.recorder.thread_post(channel)
    links.layers[id(counter), index, layer] = channel
    if load is not None and layer + 1 < load.layers:
        _begin_layer(session, load, layer + 1)


def _after_wait(session: Session, _: object, __: object, counter: Any, threshold: int) -> None:
    """A round has waited for a layer: what it has launched until then had not."""
    channel = _links(session).layers.pop((id(counter), counter.consumer_index, threshold), None)
    if channel is None:
        return
    this = session.local.round
    if this is not None and threshold > this.next_layer:
        end_segment(session, this, threshold)
    session.recorder.thread_recv(channel)


def _after_finish(session: Session, _: object, __: object, counter: Any, index: int) -> None:
    layers = _links(session).layers
    for layer in range(int(counter.num_layers)):
        channel = layers.pop((id(counter), index, layer), None)
        if channel is not None:
            session.recorder.thread_recv(channel)


_TREE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_COUNTER: Final = "sglang.srt.mem_cache.unified_cache.unified_cache_linker.LayerWiseLoadCounter"
LINKER_ADAPTERS: Final = (
    Adapter(f"{_TREE}.init_cache_linker", Versions("0.5.19"), before=_before_attach, optional=True),
    Adapter(f"{_COUNTER}.complete", Versions("0.5.22"), before=_before_complete, hazards=(Hazard.RDMA,)),
    Adapter(f"{_COUNTER}.wait_until", Versions("0.5.22"), after=_after_wait, hazards=(Hazard.RDMA,)),
    Adapter(f"{_COUNTER}.finish", Versions("0.5.22"), after=_after_finish, hazards=(Hazard.RDMA,)),
)
