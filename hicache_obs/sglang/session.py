"""One observed process: its ring, its recorder, and the numbers its streams, events and pools have in the records.

Everything is made at the first record, on the thread that makes it: the process may never use its cache, and a
fork of it gets a ring of its own.
"""

from __future__ import annotations

import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, cast

from hicache_obs.config import read_setting
from hicache_obs.findings import Hazard
from hicache_obs.recorder.batch import Learned, Measured
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.hold_back import HoldBack
from hicache_obs.recorder.lane import Lane, Lanes
from hicache_obs.recorder.nvtx_ranges import NoRanges
from hicache_obs.recorder.ring import RingWriter
from hicache_obs.recorder.ring_directory import create_ring
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.records import (
    Access,
    CaptureMode,
    DefineSpace,
    DropReason,
    Mode,
    PageIds,
    Ranks,
    SlotAccess,
    Space,
    StreamId,
    StreamKind,
)
from hicache_obs.sglang.page_ids import PageReader, ToWords, Wanted
from hicache_obs.streams.protocol import Device, Stream

MAX_FAILURES: Final = 16
"""Failures in a row of one hook that switch it off, and of all hooks together that switch capture off."""
MAX_EVENTS: Final = 1 << 16
FLUSH_S: Final = 0.1
IN_STREAM_CALL: Final = "in_stream_call"
"""Group of the hooks on streams and events."""
MARK: Final = "_hicache_obs"
"""Attribute of an engine's event: its ``EventState``, or ``None``; of a stream without a handle: its number."""
_SHUT: Final = (0,)
_LOG: Final = logging.getLogger("hicache_obs.sglang")


@dataclass(frozen=True, slots=True)
class StreamRef:
    """Name and handle of an engine's stream: the part of ``streams.protocol.Stream`` that a recorder reads."""

    stream_id: StreamId
    name: str
    kind: StreamKind = StreamKind.NONBLOCKING


class EventHandles(Protocol):
    """What keeps events by their handle."""

    def know(self, handle: int, state: EventState) -> None:
        """The event with this handle is one that a hook has seen."""


@dataclass(slots=True)
class Counters:
    """What the hooks of a process have done.

    Attributes:
        calls: Hooked calls seen while recording.
        errors: Failures inside hooks, by target.
        fences_added: Missing fences issued in mode ``enforce``, by what they protect.
        resets: How often the cache was reset.
    """

    calls: int = 0
    errors: dict[str, int] = field(default_factory=dict)
    fences_added: dict[str, int] = field(default_factory=dict)
    resets: int = 0


class Session:
    """State of the hooks of one process. Hooks on any thread may call anything here.

    Args:
        engine: Name and version of the observed engine; part of every fingerprint.
        mode: Observe, or also issue missing fences.
        role: What the process does; the first word of the ring's name.
        current_stream: The engine's current stream on the calling thread.
        current_handle: Its handle, where that is quicker to get than the stream; it may give ``None``.
        reader: Reads index tensors.
        ranks: Asked once, when the ring is made.
        timing: Gives the device whose event pairs time rounds, fences and copies; asked until there is one.
        become_poller: Called once by the thread that asks for events, with their device, before it asks for the first.
        on_open: Called with the session once the ring exists.
    """

    def __init__(
        self,
        engine: str,
        *,
        mode: CaptureMode = CaptureMode.OBSERVE,
        role: str = "scheduler",
        current_stream: Callable[[], Any],
        current_handle: Callable[[], int | None] | None = None,
        reader: PageReader | None = None,
        ranks: Callable[[], Ranks] = Ranks,
        timing: Callable[[], Device | None] | None = None,
        become_poller: Callable[[int], None] | None = None,
        on_open: Callable[[Session], None] = lambda session: None,
    ) -> None:
        self.engine: Final = engine
        self.enforcing: Final = mode is CaptureMode.ENFORCE
        self.counters: Final = Counters()
        self.lanes: Final = Lanes()
        self.ready = False
        """Whether there is a ring; if not, ``recording`` makes it. One look-up, for hooks ask at every call."""
        self.switch: Sequence[int] = _SHUT
        """Not 0 while records are taken; if 0, ``recording`` says whether that is about to change, and counts what is
        missed. Two look-ups, for hooks that do more than their record."""
        self.gpu_trace: EventHandles | None = None
        """Wants to know the handles of events, if somebody does."""
        self.copies: Any = None
        """The ``CopyCheck`` of this session, from its first copy on."""
        self.submissions: Final[dict[tuple[object, ...], tuple[Learned, object]]] = {}
        """What is known of load-backs (``Submission``), and what keeps their keys' ids from becoming others'."""
        self.pairs: Final[dict[tuple[int, int], Any]] = {}
        """What is known of a host and a device pool that pages are copied between, by their ids."""
        self.host_kinds: Final[set[type]] = set()
        """Classes of host pools that are known to be hooked, or said not to be."""
        self.links: Any = None
        """The ``Links`` of this session, from its first linker on."""
        self.missing: Final[dict[Hazard, str]] = {}
        """Why each hazard cannot be observed."""
        self.rounds: Final[dict[int, Any]] = {}
        """The ``RoundPools`` of each model runner, by its id."""
        self.forward_stream: Any = None
        """The stream the last forward round was launched on, the engine's own object."""
        self.max_read_ids: Final = read_setting("read_ids")[0]
        self._mode = mode
        self._role = role
        self._current_stream = current_stream
        self._current_handle = current_handle
        self._reader = reader
        self._ranks = ranks
        self._timing = timing
        self.timed: Final = timing is not None
        """Whether anything is measured at all."""
        self._clock: Device | None = None
        self._become_poller = become_poller
        self._timed_on: int | None = None
        """Index of the device that is measured, once something is."""
        self._on_open = on_open
        self._lock = threading.RLock()
        self._off = False
        self.failures = 0
        """Of hooks, in a row."""
        self._ring: RingWriter | None = None
        self._sink: HoldBack | None = None
        self._recorder: ServerRecorder | None = None
        self._streams: dict[int, Stream] = {}
        self._handles: dict[type, str] = {}
        """Which attribute of a stream of that class is its handle."""
        self._roles: dict[int, str] = {}
        self._stream_numbers = itertools.count(1)
        self._events: dict[int, tuple[Any, EventState]] = {}
        self._pools: dict[int, tuple[Any, int]] = {}
        self._host_pools: dict[int, tuple[Any, int]] = {}
        self._graphs: dict[tuple[int, str], int] = {}
        self._numbers = itertools.count(1)
        os.register_at_fork(after_in_child=self._in_child)

    # -- state -----------------------------------------------------------------------------------------------

    @property
    def local(self) -> Lane:
        """What the calling thread has going on."""
        return self.lanes.lane

    @property
    def recording(self) -> bool:
        """Whether hooks do anything. Cheap; asked at every hooked call."""
        ring = self._ring
        if self._off:
            return False
        if ring is None:
            return self._open()
        if ring.capturing:
            return True
        ring.drop(DropReason.SWITCHED_OFF)  # nothing, once it is closed
        return False

    @property
    def off(self) -> bool:
        """Whether capture has ended for good: closed, or too much went wrong."""
        return self._off

    @property
    def recorder(self) -> ServerRecorder:
        """Where hooks put their records. Only while ``recording``."""
        assert self._recorder is not None
        return self._recorder

    @property
    def ring(self) -> RingWriter | None:
        """The ring, once there is one."""
        return self._ring

    def number(self) -> int:
        """A number nobody else has in this process: a round, a transfer, a channel."""
        return next(self._numbers)

    def close(self) -> None:
        """Write what is kept back and close the ring; hooks do nothing from now on. Waits for nothing."""
        self._off = True
        self.ready, self.switch = False, _SHUT
        with self._lock:
            if self._sink is not None and self._recorder is not None and self._ring is not None:
                self._recorder.flush_batch()
                self._state_counters()
                self._sink.flush()
                self._ring.close()

    def start_timing(self, stream: Any) -> Measured | None:
        """Begin to measure what is launched on ``stream``, the engine's own object. Partner of ``stop_timing``."""
        if self._timing is None:
            return None
        with self.quietly():
            if self._clock is None:
                self._clock = self._timing()
                self._timed_on = getattr(stream, "device_index", None)
            if self._clock is None:
                return None
            probe = self._clock.probe()
            probe.begin(stream)  # type: ignore[attr-defined] # only probes of begin and end are taken
        return Measured(probe, self._clock)

    def stop_timing(self, measured: Measured | None, stream: Any) -> None:
        """What was to be measured is launched. Partner of ``start_timing``."""
        if measured is not None:
            with self.quietly():
                measured.probe.end(stream)  # type: ignore[attr-defined] # as above

    @contextmanager
    def quietly(self) -> Iterator[None]:
        """Stream and event calls inside the block are our own: nobody's order, and not recorded."""
        lane = self.lanes.lane
        outer, lane.in_stream_call = lane.in_stream_call, True
        try:
            yield
        finally:
            lane.in_stream_call = outer

    # -- numbers ---------------------------------------------------------------------------------------------

    def raw_current_stream(self) -> Any:
        """The calling thread's current stream, the engine's own object."""
        return self._current_stream()

    def current_stream(self) -> Stream:
        """The calling thread's current stream."""
        handle = None if self._current_handle is None else self._current_handle()
        if handle is None:
            return self.stream(self._current_stream())
        return self._streams.get(handle) or self.stream_of(handle)

    def graph(self, runner: Any, key: object) -> int:
        """Number of the executable graph that ``runner`` keeps under ``key``."""
        with self._lock:
            return self._graphs.setdefault((id(runner), repr(key)), len(self._graphs))

    def stream(self, stream: Any, role: str = "") -> Stream:
        """How ``stream`` is recorded: by its handle, for two objects may be one stream.

        Args:
            role: What the engine uses it for; its name from the first call on that says so.
        """
        try:
            handle = getattr(stream, self._handles[type(stream)])
        except (KeyError, AttributeError):
            handle = self._handle(stream)
        known = self._streams.get(handle)
        if known is None or (role and handle not in self._roles):
            known = self._name_stream(int(handle), role, legacy=not handle and hasattr(stream, "cuda_stream"))
        return known

    def stream_of(self, handle: int) -> Stream:
        """The stream with this handle, of which there is no object of the engine's."""
        return self._streams.get(handle) or self._name_stream(handle, "", legacy=not handle)

    def _handle(self, stream: Any) -> Any:
        """The handle of a stream of a class that is not known yet, or that has none of its own and is not numbered."""
        for name in ("cuda_stream", "stream_id"):
            handle = getattr(stream, name, None)
            if handle is not None:
                self._handles[type(stream)] = name
                return handle
        self._handles[type(stream)] = MARK
        handle = next(self._stream_numbers)
        setattr(stream, MARK, handle)
        return handle

    def event(self, event: Any) -> EventState:
        """What the recorder keeps about ``event``."""
        state = getattr(event, MARK, None)
        if state is None:
            known = self._events.get(id(event))
            if known is not None and known[0] is event:
                return known[1]
            state = self.recorder.new_event()
            gated = self.lanes.lane.gated
            if gated is not None:
                gated.expect(state.event_id)
            try:
                setattr(event, MARK, state)
            except AttributeError:  # an event class with slots: kept, so that its id stays its own
                while len(self._events) >= MAX_EVENTS:
                    self._events.pop(next(iter(self._events)), None)
                self._events[id(event)] = event, state
        assert isinstance(state, EventState)
        return state

    def pool(self, pool: Any, space: Space) -> int:
        """Number of a page pool among those of its space; its name and layer count go into the ring once."""
        pools = self._pools if space is Space.DEVICE else self._host_pools
        known = pools.get(id(pool))
        if known is None:
            with self._lock:
                known = pools.setdefault(id(pool), (pool, len(pools)))
            layers = getattr(pool, "layer_num", 0)
            self.recorder.define_pool(
                f"{type(pool).__name__} {known[1]}",
                layers if isinstance(layers, int) else 0,
                pool=known[1],
                space=space,
            )
        return known[1]

    def access(self, space: Space, mode: Mode, pool: Any, tensor: Any, convert: ToWords) -> Access | None:
        """``tensor``'s pages of ``pool``; ``None`` if they are lost, which is then counted."""
        ids = self.ids((Wanted(tensor, convert),))
        return None if ids is None else SlotAccess(space, mode, ids[0], self.pool(pool, space))

    def ids(self, wanted: Sequence[Wanted]) -> list[PageIds] | None:
        """Slot lists of index tensors, perhaps late; ``None`` if they are lost, which is then counted."""
        assert self._reader is not None
        lane = self.lanes.lane
        outer, lane.in_stream_call = lane.in_stream_call, True  # as ``quietly``, which costs more than all else here
        try:
            ids = self._reader.read_all(wanted)
        finally:
            lane.in_stream_call = outer
        if ids is None and self._sink is not None:
            self._sink.drop(DropReason.ARENA_FULL)
        return ids

    # -- what goes wrong -------------------------------------------------------------------------------------

    def unobservable(self, hazards: tuple[Hazard, ...], reason: str) -> None:
        """These hazards cannot be seen in this process. The first reason stays."""
        for hazard in hazards:
            if hazard not in self.missing:
                self.missing[hazard] = reason
                self._state_observable()

    def hook_failed(self, target: str, error: BaseException) -> int:
        """A hook raised: count, log once per hook, switch capture off after too many in a row. Never raises.

        Returns:
            How often this hook has failed so far.
        """
        try:
            with self._lock:
                errors = self.counters.errors
                errors[target] = count = errors.get(target, 0) + 1
                self.failures += 1
                row = self.failures
                if self._sink is not None:
                    self._sink.drop(DropReason.RECORDER_ERROR)
            if count == 1:
                _LOG.warning("hicache-obs: hook on %s failed; the server is not affected", target, exc_info=error)
            if row == MAX_FAILURES:
                self._switch_off(f"{row} failures in a row, last {type(error).__name__} in the hook on {target}")
            return count
        except Exception:  # noqa: BLE001 the last line of defence
            return MAX_FAILURES

    def hook_worked(self) -> None:
        """A hook did its work: the row of failures is over."""
        self.failures = 0

    def count_fence(self, protects: str) -> None:
        """A missing fence was issued (mode ``enforce``); ``protects`` is ``load`` or ``write``."""
        added = self.counters.fences_added
        added[protects] = count = added.get(protects, 0) + 1
        if count == 1:
            _LOG.warning(
                "hicache-obs: %s has no %s fence here; mode enforce issues one before each transfer",
                self.engine,
                protects,
            )
        self.recorder.status(f"fences added {protects}", count)

    # -- inside ----------------------------------------------------------------------------------------------

    def _open(self) -> bool:
        with self._lock:
            if self._ring is not None or self._off:
                return self._ring is not None
            try:
                self._ring = ring = create_ring(
                    self._role,
                    self._ranks(),
                    slots=read_setting("ring_slots")[0],
                    arena_words=read_setting("arena_ids")[0],
                    mode=self._mode,
                )
                self._sink = sink = HoldBack(ring)
                if self._reader is not None:
                    self._reader.on_late = sink.expect
                self._recorder = ServerRecorder(
                    self._sink, clock=time.monotonic_ns, ranges=NoRanges(), lanes=self.lanes
                )
                self._recorder.define_engine(self.engine)
                self._state_observable()
                threading.Thread(target=self._flush_until_closed, name="hicache-obs-flush", daemon=True).start()
                self._on_open(self)
                self.ready, self.switch = True, ring.switch
            except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
                self._switch_off(f"{type(error).__name__}: {error}")
                return False
            return True

    def _switch_off(self, reason: str) -> None:
        self._off = True
        self.ready, self.switch = False, _SHUT
        _LOG.error("hicache-obs: nothing is recorded from now on: %s", reason)

    def _state_observable(self) -> None:
        """In the ring's header, for whoever shows that a hazard is out of sight rather than absent."""
        if self._ring is not None:
            self._ring.state_observable(hazard for hazard in Hazard if hazard not in self.missing)

    def _state_counters(self) -> None:
        self.recorder.status("hooked calls", self.counters.calls)
        self.recorder.status("hook errors", sum(self.counters.errors.values()))

    def _flush_until_closed(self) -> None:
        """Write late records, say that the process is alive, and from time to time what the hooks have done."""
        sink, recorder, ring = self._sink, self._recorder, self._ring
        assert sink is not None
        assert recorder is not None
        assert ring is not None
        self.lanes.lane.in_stream_call = True  # this thread's event queries are our own
        stated, may_poll = 0, self._become_poller is None
        while ring.writable and not self._off:
            time.sleep(FLUSH_S)
            may_poll = may_poll or self._may_poll()
            if may_poll:
                sink.flush()
                recorder.resolve()
            else:
                sink.beat(time.monotonic_ns())
            if self.counters.calls != stated and ring.mode is not CaptureMode.OFF:
                stated = self.counters.calls
                self._state_counters()

    def _may_poll(self) -> bool:
        """Whether the calling thread may ask for events: there are some, and it has become a poller of theirs."""
        reader = self._reader
        index = self._timed_on if self._timed_on is not None or reader is None else reader.device_index
        if index is None or self._become_poller is None:
            return False
        try:
            self._become_poller(index)
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            self._switch_off(f"{type(error).__name__}: {error}")
            return False
        return True

    def _name_stream(self, handle: int, role: str, *, legacy: bool) -> Stream:
        kind = StreamKind.LEGACY if legacy else StreamKind.NONBLOCKING
        with self._lock:
            if role:
                self._roles[handle] = role
            ref = cast(Stream, StreamRef(StreamId(handle), role or f"stream {handle:#x}", kind))
            known = handle in self._streams
            self._streams[handle] = ref
        if known:
            self.recorder.define(DefineSpace.STREAM, handle, ref.name, kind)
        return ref

    def _in_child(self) -> None:
        """In a fork: a ring that was open is the parent's, and nothing is recorded; else this is a new process."""
        self._lock = threading.RLock()
        if self._ring is not None:
            self._off = True
            self.ready, self.switch = False, _SHUT
