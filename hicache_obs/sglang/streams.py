"""Hooks on a device module's streams and events: every edge that Python code makes.

``wait_stream`` of torch is a record and a wait of a fresh event; the group makes that one record. Calls made while a
graph is captured become part of the graph, not of the timeline, and are left out.

Records and waits are what a server calls most, so their hooks are whole ones (``Adapter.direct``): one closure and one
packed record each, instead of the guard's layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.recorder import StreamMark
from hicache_obs.recorder.slot import EVENT_RECORD, EVENT_WAIT, WAIT_STREAM
from hicache_obs.records import Purpose
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.captures import capture_question
from hicache_obs.sglang.guard import Around, Guard, hooked_here
from hicache_obs.sglang.rounds import wait_for_layer, waited
from hicache_obs.sglang.session import IN_STREAM_CALL, MARK, Session
from hicache_obs.sglang.short_streams import short_record, short_wait, short_wait_event, short_wait_stream

ORDERED: Final = tuple(hazard for hazard in Hazard if hazard is not Hazard.TP_DIVERGENCE)
"""Without the calls that make order, everything that is judged by order is out of sight."""


def stream_adapters(stream: str, event: str, *, optional: bool = False) -> tuple[Adapter, ...]:
    """Rows for the stream and event classes of one device module, by their dotted names.

    Args:
        optional: The classes may lack a method (torch's CPU module does): that costs nothing.
    """

    def row(
        name: str, before: Any = None, after: Any = None, *, direct: Any = None, short: Any = None, vital: bool = True
    ) -> Adapter:
        return Adapter(
            name,
            before=before,
            after=after,
            direct=direct,
            short=short,
            hazards=ORDERED if vital and not optional else (),
            group=IN_STREAM_CALL,
            optional=optional,
        )

    return (
        row(f"{stream}.wait_stream", direct=_wait_stream, short=short_wait_stream),
        row(f"{stream}.wait_event", direct=_stream_waits, short=short_wait_event),
        row(f"{stream}.synchronize", _before_stream_sync, _after_stream_sync),
        row(f"{stream}.query", _before_stream_query, _after_stream_query, vital=False),
        row(f"{event}.record", direct=_record, short=short_record),
        row(f"{event}.wait", direct=_event_waits, short=short_wait),
        row(f"{event}.synchronize", _before_event_sync, _after_event_sync),
        row(f"{event}.query", _before_event_sync, _after_event_query),
        row(f"{event}.elapsed_time", _before_elapsed, _after_elapsed, vital=False),
    )


def device_sync_adapter(target: str) -> Adapter:
    """The row for a device module's ``synchronize``."""
    return Adapter(target, before=_before_device_sync, after=_after_device_sync, group=IN_STREAM_CALL)


def _record(session: Session, guard: Guard) -> Around:
    """``Event.record``. A layer's event, recorded where its copy was launched, goes into the ring with the copies."""
    lanes, counters, in_graph = session.lanes, session.counters, capture_question()

    def hook(original: Around, event: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.lane
        if lane.in_stream_call or guard.off or not (session.ready or session.recording):
            return original(event, *args, **kwargs)
        counters.calls += 1
        state: EventState | None = None
        try:
            known = getattr(event, MARK, None) or session.event(event)
            if known.layer >= 0 and not args and (batch := lane.batch) is not None and batch.direction is not None:
                if batch.learned is None:
                    batch.record(known)
                else:
                    batch.seen += 1
                if hooked_here(event, "record", original):
                    event.record = _layer_record(session, guard, original, event, known, event.record)
            elif in_graph is None or not in_graph():
                raw = args[0] if args else kwargs.get("stream")
                where = session.current_stream() if raw is None else session.stream(raw)
                state = known
                session.recorder.put(lane, EVENT_RECORD, known.event_id, where, None, known)
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_stream_call = True
        try:
            return original(event, *args, **kwargs)
        finally:
            lane.in_stream_call = False
            if state is not None:
                state.version += 1  # no other thread comes in between here: there is no call
                if session.gpu_trace is not None:
                    _know_handle(session, guard, event, state)

    return hook


def _layer_record(
    session: Session, guard: Guard, original: Around, event: Any, state: EventState, hooked: Around
) -> Callable[..., Any]:
    """``record`` of one layer's event, set on the event itself: there is one per layer, and no argument to sort out.

    Args:
        original: The engine's function.
        hooked: The event's ``record`` with its hook, for whatever is not the end of a batched copy.
    """
    lanes, counters, step = session.lanes, session.counters, state.step

    def record(stream: Any = None) -> Any:
        lane = lanes.lane
        batch = lane.batch
        if batch is None or stream is not None:
            return hooked() if stream is None else hooked(stream)
        if batch.learned is not None:
            batch.seen += 1
            return original(event)
        if batch.direction is None or lane.in_stream_call or guard.off or not session.ready:
            return hooked()
        counters.calls += 1
        state.version += 1  # as ``batch.record``
        if state.known_to:
            state.known_to.clear()
        batch.states.append(state)
        batch.step(step)
        lane.in_stream_call = True
        try:
            return original(event)
        finally:
            lane.in_stream_call = False

    return record


def _know_handle(session: Session, guard: Guard, event: Any, state: EventState) -> None:
    """An event has a handle from its first record on."""
    try:
        if session.gpu_trace is not None:
            session.gpu_trace.know(int(event.cuda_event), state)
    except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
        guard.failed(error)


def _stream_waits(session: Session, guard: Guard) -> Around:
    """``Stream.wait_event``. The waits of a round for layers, but for its first, go into its batch by a shorter way."""
    wait, lanes, counters = _waits(session, guard), session.lanes, session.counters

    def hook(original: Around, stream: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.lane
        batch = lane.batch
        if batch is None or batch.raw is None or lane.in_stream_call or guard.off or not session.ready:
            return wait(original, stream, args[0] if args else kwargs.get("event"), (stream, *args), kwargs)
        batched = False
        try:
            state = args[0]._hicache_obs
            if (
                state is not None
                and state.layer >= 0
                and (stream is batch.raw or session.stream(stream) is batch.stream)
            ):
                batched = True
                batch.step(state)
        except (AttributeError, IndexError):  # an event that is not known yet, or named
            pass
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
            batched = True
        if not batched:
            return wait(original, stream, args[0] if args else kwargs.get("event"), (stream, *args), kwargs)
        counters.calls += 1
        lane.in_stream_call = True
        try:
            return original(stream, *args, **kwargs)
        finally:
            lane.in_stream_call = False

    return hook


def _event_waits(session: Session, guard: Guard) -> Around:
    """``Event.wait``: of the current stream, if none is given."""
    wait = _waits(session, guard)

    def hook(original: Around, event: Any, *args: Any, **kwargs: Any) -> Any:
        return wait(original, args[0] if args else kwargs.get("stream"), event, (event, *args), kwargs)

    return hook


def _waits(session: Session, guard: Guard) -> Callable[[Around, Any, Any, tuple[Any, ...], dict[str, Any]], Any]:
    lanes, counters, in_graph = session.lanes, session.counters, capture_question()

    def wait(original: Around, stream: Any, event: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        lane = lanes.lane
        if lane.in_stream_call or guard.off or not (session.ready or session.recording):
            return original(*args, **kwargs)
        counters.calls += 1
        measured = None
        try:
            state = getattr(event, MARK, None) or session.event(event)
            this = lane.round if state.layer >= 0 else None
            if this is not None:
                measured = wait_for_layer(session, lane, this, stream, state)
            elif in_graph is None or not in_graph():
                purpose = kwargs.get("purpose") if kwargs else None  # what our own stream protocol adds
                if purpose is None:
                    purpose = _event_purpose(lane.purpose, state)
                waiter = session.current_stream() if stream is None else session.stream(stream)
                session.recorder.put(lane, EVENT_WAIT | purpose << 16, state.event_id, waiter)
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_stream_call = True
        try:
            return original(*args, **kwargs)
        finally:
            lane.in_stream_call = False
            if measured is not None:
                waited(session, measured)

    return wait


def _event_purpose(purpose: Purpose | None, event: EventState) -> Purpose:
    """Inside a submission the fence is the wait for a stream; the wait for an event is that for its start."""
    if event.layer >= 0:
        return Purpose.LAYER
    return Purpose.START if purpose in _FENCES else purpose or Purpose.PLAIN


_FENCES: Final = (Purpose.LOAD_FENCE, Purpose.WRITE_FENCE)


def _wait_stream(session: Session, guard: Guard) -> Around:
    """``Stream.wait_stream``; one that is a fence is timed."""
    lanes, counters, in_graph = session.lanes, session.counters, capture_question()

    def hook(original: Around, waiter: Any, *args: Any, **kwargs: Any) -> Any:
        lane = lanes.lane
        if lane.in_stream_call or guard.off or not (session.ready or session.recording):
            return original(waiter, *args, **kwargs)
        counters.calls += 1
        measured = None
        try:
            if in_graph is None or not in_graph():
                why = kwargs.get("purpose") if kwargs else None  # as above
                if why is None:
                    why = lane.purpose or Purpose.PLAIN
                waiting, other = session.stream(waiter), session.stream(args[0] if args else kwargs["stream"])
                measured = session.start_timing(waiter) if why in _FENCES else None
                if measured is not None:
                    session.recorder.wait_for_stream(waiting, other, why, measured)
                else:
                    session.recorder.put(lane, WAIT_STREAM | why << 16, waiting.stream_id, other, waiting)
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_stream_call = True
        try:
            return original(waiter, *args, **kwargs)
        finally:
            lane.in_stream_call = False
            if measured is not None:
                session.stop_timing(measured, waiter)

    return hook


def _before_event_sync(session: Session, event: Any, *_: Any) -> tuple[EventState, int]:
    state = session.event(event)
    return state, state.stamp


def _after_event_sync(session: Session, before: tuple[EventState, int], *_: Any) -> None:
    session.recorder.event_synchronized(*before)
    if session.links is not None:
        session.links.waited(before[0].event_id)


def _after_event_query(session: Session, before: tuple[EventState, int], result: Any, *_: Any) -> None:
    session.recorder.event_queried(*before, bool(result))
    if result and session.links is not None:
        session.links.waited(before[0].event_id)


def _before_elapsed(session: Session, start: Any, end: Any) -> tuple[tuple[EventState, int], ...]:
    return _before_event_sync(session, start), _before_event_sync(session, end)


def _after_elapsed(session: Session, before: tuple[tuple[EventState, int], ...], *_: Any) -> None:
    """torch answers only when both are complete: that is two queries."""
    for state, version in before:
        session.recorder.event_queried(state, version, True)


def _before_stream_sync(session: Session, stream: Any) -> StreamMark | None:
    return session.recorder.begin_stream_sync(session.stream(stream))


def _after_stream_sync(session: Session, mark: StreamMark | None, _: Any, stream: Any) -> None:
    session.recorder.end_stream_sync(session.stream(stream), mark)


def _before_stream_query(session: Session, stream: Any) -> int:
    return session.recorder.last_on(session.stream(stream))


def _after_stream_query(session: Session, last: int, result: Any, stream: Any) -> None:
    session.recorder.stream_queried(session.stream(stream), last, bool(result))


def _before_device_sync(session: Session, *_: Any, **__: Any) -> dict[int, int]:
    return session.recorder.begin_device_sync()


def _after_device_sync(session: Session, queued: dict[int, int], *_: Any, **__: Any) -> None:
    session.recorder.end_device_sync(queued)
