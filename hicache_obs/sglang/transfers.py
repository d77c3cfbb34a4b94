"""Hooks on HiCache's transfers: what is copied, on which stream, for whom, and the layer events that readers wait on.

A copy is recorded by the host pool's own copy function, on the stream that is current in it: that is what runs,
whichever of the paths in SGLang asked for it. The path only names it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.recorder.batch import Batch, Measured
from hicache_obs.recorder.lane import Lane
from hicache_obs.records import ALL_LAYERS, Access, Direction, Mode, PageIds, Purpose, SlotAccess, Space, Work
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.blind_spots import state_own_copies
from hicache_obs.sglang.copy_check import CopyCheck
from hicache_obs.sglang.fences import add_load_fence, add_write_fence
from hicache_obs.sglang.guard import Around, Guard, hooked_here
from hicache_obs.sglang.page_ids import Wanted, convert
from hicache_obs.sglang.pages import page_size
from hicache_obs.sglang.rounds import TIME_EVERY
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.submissions import Submission
from hicache_obs.sglang.versions import Versions

_REMEMBERED: Final = 8
_LOADS: Final = (Hazard.WAW_FORWARD_RESTORE, Hazard.WAR_FORWARD_RESTORE, Hazard.RAW_RESTORE_FORWARD)
_WRITES: Final = (Hazard.RAW_FORWARD_BACKUP, Hazard.WAR_BACKUP_FORWARD)
_LAYERS: Final = (Hazard.RAW_RESTORE_FORWARD,)

LOAD_BACK: Final = "load-back"
WRITE_BACK: Final = "write-back"


# -- paths: who asked for a transfer ---------------------------------------------------------------------------


def _enter(path: str) -> Callable[..., str | None]:
    def before(session: Session, *_: Any, **__: Any) -> str | None:
        outer: str | None = session.local.path
        session.local.path = outer or path
        return outer

    return before


def _leave(session: Session, outer: str | None, *_: Any, **__: Any) -> None:
    session.local.path = outer


def _before_start_loading(session: Session, controller: Any) -> tuple[str | None, Purpose | None]:
    outer = _enter(LOAD_BACK)(session)
    purpose = session.local.purpose
    if controller.load_queue:
        session.local.transfer = session.number()
        stream = load_stream(controller)
        session.stream(stream, LOAD_BACK)
        session.stream(session.raw_current_stream(), "schedule")
        session.local.purpose = Purpose.LOAD_FENCE
        _know_host_pools(session, controller)
        _know_layers(session, controller)
        if session.enforcing and getattr(controller, "load_fence_stream", None) is None:
            add_load_fence(session, stream)
    return outer, purpose


def _before_start_writing(session: Session, controller: Any) -> tuple[str | None, Purpose | None]:
    outer = _enter(WRITE_BACK)(session)
    purpose = session.local.purpose
    if controller.write_queue:
        session.local.transfer = session.number()
        stream = write_stream(controller)
        session.stream(stream, WRITE_BACK)
        session.local.purpose = Purpose.WRITE_FENCE
        _know_host_pools(session, controller)
        if session.enforcing and getattr(controller, "write_fence_stream", None) is None:
            add_write_fence(session, stream)
    return outer, purpose


def _after_start(session: Session, outer: tuple[str | None, Purpose | None], *_: Any, **__: Any) -> None:
    session.local.path, session.local.purpose = outer


def _know_host_pools(session: Session, controller: Any) -> None:
    """Before 0.5.18 a controller has its host pool, or its group of them, copy; then the engine is given each."""
    if getattr(controller, "l2_transfer_engine", None) is None:
        pool = getattr(controller, "mem_pool_host", None)
        entries = getattr(pool, "entries", None)
        state_own_copies(session, [pool] if entries is None else [entry.host_pool for entry in entries])


def load_stream(controller: Any) -> Any:
    """The stream a controller's load-backs run on."""
    engine = getattr(controller, "l2_transfer_engine", None)
    return controller.load_stream if engine is None else engine.host_to_device_stream


def write_stream(controller: Any) -> Any:
    """The stream a controller's write-backs run on."""
    engine = getattr(controller, "l2_transfer_engine", None)
    return controller.write_stream if engine is None else engine.device_to_host_stream


def _before_submit_load(session: Session, engine: Any, *args: Any, **kwargs: Any) -> Submission | None:
    _before_submit(session, engine.host_to_device_stream, LOAD_BACK, add_load_fence)
    transfers, done = args[0] if args else kwargs.get("transfers"), kwargs.get("on_layer_done")
    state_own_copies(session, [one.host_pool for one in transfers or ()])
    if not transfers or done is None or session.gpu_trace is not None:
        return None
    layers = kwargs.get("transfer_layer_id_max", kwargs.get("layer_num"))
    session.local.submission = made = Submission(session, transfers, done, layers)
    return made


def _after_submit_load(session: Session, made: Submission | None, *_: Any, **__: Any) -> None:
    _end_submission(session, made, whole=True)


def _failed_submit_load(session: Session, made: Submission | None) -> None:
    _end_submission(session, made, whole=False)


def _end_submission(session: Session, made: Submission | None, *, whole: bool) -> None:
    session.local.submission = None
    if made is not None:
        session.recorder.flush_batch()
        made.end(whole=whole)


def _before_submit_write(session: Session, engine: Any, *args: Any, **kwargs: Any) -> None:
    transfers = args[0] if args else kwargs.get("transfers")
    state_own_copies(session, [one.host_pool for one in transfers or ()])
    _before_submit(session, engine.device_to_host_stream, WRITE_BACK, add_write_fence)


def _before_submit(session: Session, stream: Any, role: str, add_fence: Callable[[Session, Any], None]) -> None:
    """A path that goes straight to the engine: nobody has fenced it, and it has no transfer number yet."""
    session.stream(stream, role)
    if session.local.purpose not in (Purpose.LOAD_FENCE, Purpose.WRITE_FENCE):
        session.local.transfer = session.number()
        if session.enforcing:
            add_fence(session, stream)


class _Pair:
    """A host pool and a device pool that pages are copied between: what their slots are recorded as."""

    def __init__(self, session: Session, host_pool: Any, device_pool: Any) -> None:
        if getattr(device_pool, "host_transfer_translate", None) is not None:
            session.unobservable((*_LOADS, *_WRITES), "the device pool moves pages: its ids are virtual")
        self.host_words: Final = convert(page_size(host_pool))
        self.device_words: Final = convert(page_size(device_pool), skip_zero=True)
        self.host: Final = session.pool(host_pool, Space.HOST)
        self.device: Final = session.pool(device_pool, Space.DEVICE)  # the session keeps both


@dataclass(frozen=True, slots=True)
class _Copy:
    """A copy that is being launched."""

    work: Work
    stream: Any
    measured: Measured | None


# -- copies ----------------------------------------------------------------------------------------------------


def _load_layer(session: Session, guard: Guard) -> Around:
    """A layer of a load-back. All layers of one run on the stream that is current at its first."""
    lanes, counters = session.lanes, session.counters

    def hook(original: Around, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.lane
        if lane.in_copy or guard.off or not (session.ready or session.recording):
            return original(*args, **kwargs)
        counters.calls += 1
        copy = None
        try:
            host_pool, device_pool, there, here, layer = args[:5] if len(args) > 4 else _named(args, kwargs)
            batch = lane.batch
            if batch is not None and _goes_on(batch, lane, host_pool, there, here):
                if batch.learned is None:
                    batch.work(int(layer), int(layer) + 1)
            else:
                copy = _first_of_layers(session, host_pool, device_pool, there, here, int(layer), original)
                _shorten(session, guard, original, host_pool)
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_copy = True
        try:
            result = original(*args, **kwargs)
        finally:
            lane.in_copy = False
        if copy is not None:
            try:
                _after_copy(session, copy)
            except Exception as error:  # noqa: BLE001 as above
                guard.failed(error)
        return result

    return hook


def _goes_on(batch: Batch, lane: Lane, host_pool: Any, there: Any, here: Any) -> bool:
    """Whether a copy of these pages is one more layer of the last one."""
    return batch.here is here and batch.there is there and batch.pool is host_pool and batch.group == lane.transfer


def _shorten(session: Session, guard: Guard, original: Around, host_pool: Any) -> None:
    """Let the layers that follow the first go by a shorter way, on the pool itself; where nobody else hooks them."""
    name = getattr(original, "__name__", "")
    if hooked_here(host_pool, name, original):
        setattr(host_pool, name, _next_layer(session, guard, original, host_pool, getattr(host_pool, name)))


def _next_layer(session: Session, guard: Guard, original: Around, host_pool: Any, hooked: Around) -> Around:
    """The copy function of one host pool: of a batched layer it notes the number, all else goes to its hook.

    Args:
        original: The engine's function.
        hooked: The pool's own, with its hook.
    """
    lanes, counters = session.lanes, session.counters

    def load(*args: Any, **kwargs: Any) -> Any:
        lane = lanes.lane
        batch = lane.batch
        if (
            batch is None
            or len(args) < 4
            or batch.here is not args[2]
            or batch.there is not args[1]
            or batch.pool is not host_pool
            or batch.group != lane.transfer
            or batch.learned is not None
            or lane.in_copy
            or guard.off
            or not session.ready
        ):
            return hooked(*args, **kwargs)
        try:
            batch.step(batch.layers[args[3]])
        except Exception:  # noqa: BLE001 no plain number, or too large a one
            return hooked(*args, **kwargs)
        counters.calls += 1
        lane.in_copy = True
        try:
            return original(host_pool, *args, **kwargs)
        finally:
            lane.in_copy = False

    return load


def _named(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    names = ("host_pool", "device_pool", "host_indices", "device_indices", "layer_id")
    return (*args, *(kwargs[name] for name in names[len(args) :]))


def _first_of_layers(
    session: Session,
    host_pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layer: int,
    original: Around,
) -> _Copy | None:
    """A layer with other pages than the one before: the rest that has them is batched with it, unless it is timed."""
    layers = (layer, layer + 1)
    copy = _copy(session, host_pool, device_pool, host_indices, device_indices, layers, Direction.HOST_TO_DEVICE)
    if copy is None or copy.measured is not None:
        return copy
    work, recorder, stream = copy.work, session.recorder, session.stream(copy.stream)
    batch = recorder.batch
    if batch is None or batch.stream is not stream or batch.group != work.group or batch.site != work.site:
        batch = recorder.begin_batch(stream, work.site, work.group, work.direction)
    batch.use(work.accesses, work.size_bytes)
    batch.pool, batch.there, batch.here = host_pool, host_indices, device_indices
    submission: Submission | None = session.local.submission
    if (submission is None or not submission.began(batch, host_pool, original)) and batch.learned is None:
        batch.work(*layers)
    return None


def _before_backup_all(
    session: Session, host_pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, *_: Any, **__: Any
) -> _Copy | None:
    return _copy(session, host_pool, device_pool, host_indices, device_indices, ALL_LAYERS, Direction.DEVICE_TO_HOST)


def _copy(
    session: Session,
    host_pool: Any,
    device_pool: Any,
    host_indices: Any,
    device_indices: Any,
    layers: tuple[int, int],
    direction: Direction,
) -> _Copy | None:
    accesses = _accesses(session, host_pool, device_pool, host_indices, device_indices, direction)
    if accesses is None:
        return None
    path = session.local.path or "direct"
    count = 1 if layers is ALL_LAYERS else max(1, getattr(host_pool, "layer_num", 1))
    size_bytes = int(host_indices.numel() * getattr(host_pool, "size_per_token", 0) // count)
    work = Work(f"{path} copy", accesses, layers, session.local.transfer, direction, size_bytes)
    stream = session.raw_current_stream()
    timed = layers is ALL_LAYERS or work.group % TIME_EVERY == 0
    return _Copy(work, stream, session.start_timing(stream) if timed else None)


def _after_copy(session: Session, copy: _Copy | None, *_: Any, **__: Any) -> None:
    """The copy is launched: it goes into the ring with what was measured around it."""
    if copy is not None:
        session.stop_timing(copy.measured, copy.stream)
        check = session.copies
        if check is None:
            check = session.copies = CopyCheck(session)
        measured = check.watch(copy.measured, copy.work.size_bytes)
        session.recorder.enqueue(session.stream(copy.stream), copy.work, measured)


def _accesses(
    session: Session, host_pool: Any, device_pool: Any, host_indices: Any, device_indices: Any, direction: Direction
) -> tuple[Access, ...] | None:
    """What one copy touches; the same object for all layers of a transfer, so that its pages are stored once."""
    remembered = session.local.copies
    key = (id(host_indices), id(device_indices), id(host_pool), id(device_pool), direction)
    known = remembered.get(key)
    if known is not None:
        found: tuple[Access, ...] | None = known[0]
        return found
    pair = session.pairs.get((id(host_pool), id(device_pool)))
    if pair is None:
        pair = session.pairs[id(host_pool), id(device_pool)] = _Pair(session, host_pool, device_pool)
    load = direction is Direction.HOST_TO_DEVICE
    host_mode, device_mode = (Mode.READ, Mode.WRITE) if load else (Mode.WRITE, Mode.READ)
    if host_indices.is_cpu and device_indices.is_cpu:
        ids: list[PageIds] | None = [
            pair.host_words(host_indices.numpy().ravel()),
            pair.device_words(device_indices.numpy().ravel()),
        ]
    else:
        ids = session.ids((Wanted(host_indices, pair.host_words), Wanted(device_indices, pair.device_words)))
    accesses = None
    if ids is not None:
        accesses = (
            SlotAccess(Space.HOST, host_mode, ids[0], pair.host),
            SlotAccess(Space.DEVICE, device_mode, ids[1], pair.device),
        )
    while len(remembered) >= _REMEMBERED:
        del remembered[next(iter(remembered))]
    # The tensors are kept with it: their ids must not become other tensors'.
    remembered[key] = accesses, host_indices, device_indices
    return accesses


# -- layer events ----------------------------------------------------------------------------------------------


def _know_layers(session: Session, controller: Any) -> None:
    """Mark the events that end the controller's layers: a wait for one of them is a wait for that layer."""
    counter = getattr(controller, "layer_done_counter", None)
    if session.local.counter is counter and counter is not None:
        return
    try:
        for loading in counter.events:  # type: ignore[union-attr] # without a counter it is the error below
            for layer, event in enumerate(loading.load_events):
                session.event(event).layer = layer
    except AttributeError as error:
        session.unobservable(_LAYERS, f"the controller's layer events are not where they were: {error}")
    session.local.counter = counter


def _before_move(session: Session, controller: Any, host_indices: Any, device_indices: Any) -> Any:
    """The direct backend reads device indices on the host: that waits for the current stream."""
    if controller.io_backend != "direct" or not getattr(device_indices, "is_cuda", False):
        return None
    stream = session.current_stream()
    return stream, session.recorder.begin_stream_sync(stream)


def _after_move(session: Session, begun: Any, *_: Any, **__: Any) -> None:
    if begun is not None:
        session.recorder.end_stream_sync(*begun)


def _before_reset(session: Session, *_: Any) -> None:
    session.counters.resets += 1
    session.recorder.status("cache resets", session.counters.resets)


_CONTROLLER: Final = "sglang.srt.managers.cache_controller"
_HYBRID: Final = "sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller.HybridCacheController"
_ENGINE: Final = "sglang.srt.mem_cache.l2_transfer.L2TransferEngine"
_TREE: Final = "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache"
_OFFLOAD: Final = "sglang.srt.disaggregation.decode_kvcache_offload_manager.DecodeKVCacheOffloadManager"


def _starts(owner: str, versions: Versions) -> tuple[Adapter, ...]:
    return (
        Adapter(
            f"{owner}.start_loading",
            versions,
            before=_before_start_loading,
            after=_after_start,
            failed=_after_start,
            hazards=_LOADS,
        ),
        Adapter(
            f"{owner}.start_writing",
            versions,
            before=_before_start_writing,
            after=_after_start,
            failed=_after_start,
            hazards=_WRITES,
        ),
    )


def _path(target: str, name: str, versions: Versions, *, optional: bool = False) -> Adapter:
    return Adapter(target, versions, before=_enter(name), after=_leave, failed=_leave, optional=optional)


def _copies(module: str, pool: str, versions: Versions) -> tuple[Adapter, ...]:
    group = "in_copy"
    return (
        Adapter(
            f"{module}.{pool}.load_to_device_per_layer",
            versions,
            direct=_load_layer,
            hazards=_LOADS,
            group=group,
        ),
        Adapter(
            f"{module}.{pool}.backup_from_device_all_layer",
            versions,
            before=_before_backup_all,
            after=_after_copy,
            hazards=_WRITES,
            group=group,
        ),
    )


_MHA: Final = "MHATokenToKVPoolHost"
_MLA: Final = "MLATokenToKVPoolHost"
_POOLS: Final = "sglang.srt.mem_cache.memory_pool_host"
_BASE: Final = "sglang.srt.mem_cache.pool_host.base.HostKVCache"

TRANSFER_ADAPTERS: Final = (
    *_starts(f"{_CONTROLLER}.HiCacheController", Versions("0.5.11")),
    *_starts(_HYBRID, Versions("0.5.11", "0.5.18")),
    Adapter(
        f"{_ENGINE}.submit_host_to_device",
        Versions("0.5.18"),
        before=_before_submit_load,
        after=_after_submit_load,
        failed=_failed_submit_load,
        hazards=_LOADS,
    ),
    Adapter(f"{_ENGINE}.submit_device_to_host", Versions("0.5.18"), before=_before_submit_write, hazards=_WRITES),
    _path(f"{_TREE}.backup_kv_cache", "retraction backup", Versions("0.5.21")),
    _path(f"{_TREE}.restore_kv_cache", "retraction restore", Versions("0.5.21")),
    _path(f"{_OFFLOAD}.offload_kv_cache", "decode offload", Versions("0.5.11"), optional=True),
    *_copies(_POOLS, _MHA, Versions("0.5.11", "0.5.16")),
    *_copies(_POOLS, _MLA, Versions("0.5.11", "0.5.16")),
    *_copies("sglang.srt.mem_cache.pool_host.mha", _MHA, Versions("0.5.16", "0.5.21")),
    *_copies("sglang.srt.mem_cache.pool_host.mla", _MLA, Versions("0.5.16", "0.5.21")),
    Adapter(
        f"{_BASE}.load_to_device_per_layer_physical",
        Versions("0.5.21"),
        direct=_load_layer,
        hazards=_LOADS,
        group="in_copy",
    ),
    Adapter(
        f"{_BASE}.backup_from_device_all_layer_physical",
        Versions("0.5.21"),
        before=_before_backup_all,
        after=_after_copy,
        hazards=_WRITES,
        group="in_copy",
    ),
    Adapter(
        f"{_CONTROLLER}.HiCacheController.move_indices", Versions("0.5.11"), before=_before_move, after=_after_move
    ),
    Adapter(f"{_CONTROLLER}.HiCacheController.reset", Versions("0.5.11"), before=_before_reset),
)
