"""Hooks on linkers: external stores that read and write device pages directly, on threads of their own.

Every linker implements SGLang's ``UnifiedCacheLinker`` and most count layers with its ``LayerWiseLoadCounter``. Nothing
else of a linker is hooked, so one that is not SGLang's own is recorded as Mooncake's and UMBP's are. A load or offload
is queued by a call that records events; the linker's thread waits for them on the host before it touches a page, and
there the transfer begins (``links``). A load's layers end where the counter is told so, an offload where the scheduler
takes its result.

The base class is abstract: its functions are hooked on each linker as it is attached. One that lacks a function, or
whose thread waits in a way that is not seen, makes what it moves *not observable*.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.guard import Around, Guard, around
from hicache_obs.sglang.links import LOADED, OFFLOADED, LinkedTransfer, Links
from hicache_obs.sglang.rounds import end_segment
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.versions import Versions

# -- attaching -------------------------------------------------------------------------------------------------


def _before_attach(session: Session, _: Any, cache_linker: Any) -> None:
    watch_linker(session, cache_linker)


def watch_linker(session: Session, linker: Any) -> None:
    """Record ``linker``'s transfers from now on; or say that they cannot be. Idempotent."""
    if getattr(linker, _WATCHED, False):
        return
    name, pools = type(linker).__name__, getattr(linker, "pools", None)
    counter = getattr(linker, "layer_done_counter", None)
    layers = getattr(counter, "num_layers", None)
    session.links = links = Links(session, name, pools, layers if isinstance(layers, int) else 0)
    if not (isinstance(pools, dict) and all(hasattr(entry, "device_pool") for entry in pools.values())):
        links.unseen((*LOADED, *OFFLOADED), "keeps its pools in a way that is not known here")
        return
    if getattr(linker, "mla_broadcaster", None) is not None:
        links.unseen(LOADED, "hands pages to other ranks by NCCL, which is not seen")
    try:
        setattr(linker, _WATCHED, True)
    except AttributeError:
        links.unseen((*LOADED, *OFFLOADED), "takes no hooks: it has slots")
        return
    group = getattr(linker, "pool_group", None)
    if callable(getattr(group, "resolve_transfers", None)):
        _put_on(session, group, _POOL_ROWS)
    for hazards, parts in (
        (LOADED, ((linker, _LOAD_ROWS), (counter, _COUNTER_ROWS))),
        (OFFLOADED, ((linker, _OFFLOAD_ROWS),)),
    ):
        lacking = [_name(row) for owner, rows in parts for row in rows if not (row.optional or _has(owner, row))]
        if lacking:
            links.unseen(hazards, f"has no {' and no '.join(lacking)}")
            continue
        for owner, rows in parts:
            _put_on(session, owner, rows)
    _put_on(session, linker, _RESET_ROWS)


def _name(row: Adapter) -> str:
    return row.target.rpartition(".")[2]


def _has(owner: Any, row: Adapter) -> bool:
    return callable(getattr(owner, _name(row), None))


def _put_on(session: Session, owner: Any, rows: tuple[Adapter, ...]) -> None:
    """Hook ``owner``'s own functions as SGLang's registry hooks those of a class: with the owner as first argument."""
    for row in rows:
        if _has(owner, row):
            method = getattr(owner, _name(row))
            setattr(owner, _name(row), _hooked(around(session, row), owner, method))


def _hooked(hook: Around, owner: Any, method: Callable[..., Any]) -> Callable[..., Any]:
    def original(_: Any, *args: Any, **kwargs: Any) -> Any:
        return method(*args, **kwargs)

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return hook(original, owner, *args, **kwargs)

    return call


# -- queueing --------------------------------------------------------------------------------------------------


def _after_resolve(session: Session, _: object, resolved: Any, *__: Any, **___: Any) -> None:
    """A call has translated what it moves into the slots of each pool."""
    transfer = session.local.gated
    if transfer is not None:
        transfer.moved = list(resolved)


def _before_load(session: Session, _: Any, rid: Any, transfers: Any) -> LinkedTransfer:
    session.local.gated = queued = LinkedTransfer(session.links, list(transfers), rids=(rid,), started=False)
    return queued


def _after_load(
    session: Session, queued: LinkedTransfer, accepted: Any, _: Any, rid: Any, *__: Any, **___: Any
) -> None:
    session.local.gated = None
    if accepted:
        session.links.queued[rid] = queued


def _call_failed(session: Session, _: Any) -> None:
    session.local.gated = None


def _after_cancel(session: Session, _: object, cancelled: Any, __: Any, rid: Any) -> None:
    if cancelled:
        session.links.queued.pop(rid, None)


def _start(session: Session, guard: Guard) -> Around:
    """``start_layer_wise_loading``: what is queued is started, whether that is recorded or not."""

    def hook(original: Around, linker: Any, *args: Any, **kwargs: Any) -> Any:
        links: Links = session.links
        queued, links.queued = links.queued, {}
        if not queued or guard.off or not session.recording:
            return original(linker, *args, **kwargs)
        session.counters.calls += 1
        try:
            load = links.start(queued)
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
            return original(linker, *args, **kwargs)
        session.local.gated = load
        index = None
        try:
            index = original(linker, *args, **kwargs)
        finally:
            session.local.gated = None
            if isinstance(index, int) and index >= 0:
                load.index = index
            else:
                links.drop(load)  # nothing was started
        return index

    return hook


def _offload(session: Session, guard: Guard) -> Around:
    """``offload``: one that is accepted has a result in its turn, whether it is recorded or not."""

    def hook(original: Around, linker: Any, *args: Any, **kwargs: Any) -> Any:
        links: Links = session.links
        offload = None
        if not guard.off and session.recording:
            session.counters.calls += 1
            session.local.gated = offload = LinkedTransfer(links, args[0] if args else kwargs.get("transfers", ()))
        try:
            accepted = original(linker, *args, **kwargs)
        finally:
            session.local.gated = None
        if accepted:
            elsewhere = getattr(linker, "offload_owner", True) is False  # another rank stores the same pages
            links.offloads.append(None if elsewhere else offload)
        return accepted

    return hook


def _pop_offload(session: Session, guard: Guard) -> Around:
    """``pop_completed_offload``: the scheduler learns that the oldest offload is over."""

    def hook(original: Around, linker: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(linker, *args, **kwargs)
        links: Links = session.links
        offload = links.offloads.popleft() if links.offloads else None
        if offload is not None and not guard.off and session.recording:
            session.counters.calls += 1
            try:
                if offload.thread is None:
                    links.unseen(OFFLOADED, "reads pages without a wait of the host for events of its offload")
                offload.end()
            except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
                guard.failed(error)
        return result

    return hook


def _after_reset(session: Session, *_: Any, **__: Any) -> None:
    session.links.clear()


# -- layers ----------------------------------------------------------------------------------------------------


def _before_complete(session: Session, _: Any, index: int, layer: int) -> LinkedTransfer | None:
    """A layer has arrived: the thread that waits for it may know from now on."""
    links: Links = session.links
    load = links.load(index)
    if load is not None and load.thread != threading.get_ident():
        load.end()
        if load is session.local.gated:  # MLA deduplication: another rank loads, which is said at the attaching
            links.unseen(LOADED, "completes layers where it starts them")
        elif load.thread is None:
            links.unseen(LOADED, "writes pages without a wait of the host for events of its load")
        else:
            links.unseen(LOADED, "completes layers on other threads than the one that waits for its load's events")
        load = None
    if load is not None:
        load.end_layer(layer)
    links.post(index, layer)
    return load


def _after_complete(_: Session, load: LinkedTransfer | None, *__: Any, **___: Any) -> None:
    if load is not None:
        load.begin_layer()


def _before_fail(session: Session, _: Any, index: int, *__: Any, **___: Any) -> None:
    """The rest of a load will not arrive: whoever waits for it is told."""
    load = session.links.load(index)
    if load is not None:
        for layer in load.fail():
            session.links.post(index, layer)


def _after_wait(session: Session, _: object, __: object, counter: Any, threshold: int) -> None:
    """A round has waited for a layer: what it has launched until then had not."""
    channel = session.links.layers.pop((counter.consumer_index, threshold), None)
    if channel is None:
        return
    this = session.local.round
    if this is not None and threshold > this.next_layer:
        end_segment(session, this, threshold)
    session.recorder.thread_recv(channel)


def _after_finish(session: Session, _: object, __: object, ___: Any, counter_index: int) -> None:
    session.links.receive(counter_index)


def _after_pop_load(session: Session, _: object, rids: Any, *__: Any) -> None:
    """The requests of the oldest batch are named, not its number."""
    done = frozenset(rids)
    load = next((one for one in session.links.loads if one.rids == done and one.index is not None), None)
    if load is not None:
        session.links.receive(load.index)


_MEM: Final = "sglang.srt.mem_cache"
_BASE: Final = f"{_MEM}.unified_cache.unified_cache_linker"
_WATCHED: Final = "_hicache_obs_linker"
_LINKED: Final = Versions("0.5.19")
_ATTACH: Final = Adapter(
    f"{_MEM}.unified_radix_cache.UnifiedRadixCache.init_cache_linker",
    _LINKED,
    before=_before_attach,
    hazards=LOADED,
)


def _linker(name: str, versions: Versions | None = None, **options: Any) -> Adapter:
    return Adapter(f"{_BASE}.UnifiedCacheLinker.{name}", versions or _LINKED, on_objects=True, **options)


def _counter(name: str, **hooks: Any) -> Adapter:
    target = f"{_BASE}.LayerWiseLoadCounter.{name}"
    return Adapter(target, Versions("0.5.22"), hazards=LOADED, on_objects=True, **hooks)


_LOAD_ROWS: Final = (
    _linker("load", before=_before_load, after=_after_load, failed=_call_failed, hazards=LOADED),
    _linker("start_layer_wise_loading", direct=_start, hazards=LOADED),
    _linker("cancel_queued_load", after=_after_cancel, optional=True),
    _linker("finish_layer_wise_loading", Versions("0.5.22"), after=_after_finish, optional=True),
    _linker("pop_completed_load", Versions("0.5.19", "0.5.22"), after=_after_pop_load, optional=True),
)
_OFFLOAD_ROWS: Final = (
    _linker("offload", direct=_offload, hazards=OFFLOADED),
    _linker("pop_completed_offload", direct=_pop_offload, hazards=OFFLOADED),
)
_RESET_ROWS: Final = (_linker("reset", after=_after_reset, optional=True),)
_COUNTER_ROWS: Final = (
    _counter("complete", before=_before_complete, after=_after_complete),
    _counter("fail", before=_before_fail),
    _counter("wait_until", after=_after_wait),
)
_POOL_ROWS: Final = (
    Adapter(
        f"{_MEM}.hybrid_cache.linker_pool_assembler.DevicePoolGroup.resolve_transfers",
        _LINKED,
        after=_after_resolve,
        on_objects=True,
        optional=True,
    ),
)
_OLD_COUNTERS: Final = (
    (f"{_MEM}.storage.mooncake_store.mooncake_direct_linker", Versions("0.5.19", "0.5.22")),
    (f"{_MEM}.storage.umbp.umbp_direct_linker", Versions("0.5.20", "0.5.22")),
)
"""Before 0.5.22 each linker has a counter class of its own, with the same functions."""
LINKER_ADAPTERS: Final = (
    _ATTACH,
    *_LOAD_ROWS,
    *_OFFLOAD_ROWS,
    *_RESET_ROWS,
    *_POOL_ROWS,
    *_COUNTER_ROWS,
    *(
        replace(row, target=f"{module}.LayerWiseLoadCounter.{_name(row)}", versions=versions)
        for module, versions in _OLD_COUNTERS
        for row in _COUNTER_ROWS
    ),
)
