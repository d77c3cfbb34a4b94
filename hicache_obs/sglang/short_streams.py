"""The hooks of ``streams`` for calls with plain arguments, made to be put on the classes themselves (``shorten``).

Each does what the row's own hook does for the usual call, and hands every other one to it. A call that reaches the
engine's function from here makes no hooked call of its own, but for ``wait_stream``.

The four repeat how a call is counted, guarded and handed on: a function for that would be one more Python call in each
of an engine's most frequent calls.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hicache_obs.recorder.slot import EVENT_RECORD, EVENT_WAIT, WAIT_STREAM
from hicache_obs.records import Purpose
from hicache_obs.sglang.captures import capture_question
from hicache_obs.sglang.guard import Guard
from hicache_obs.sglang.session import MARK, Session

_START: Final = EVENT_WAIT | Purpose.START << 16
_FENCES: Final = (Purpose.LOAD_FENCE, Purpose.WRITE_FENCE)


def short_record(
    session: Session, guard: Guard, original: Callable[..., Any], hooked: Callable[..., Any]
) -> Callable[..., Any]:
    """``Event.record`` of an event that ends no layer; most are new ones, which a server makes several of per round."""
    lanes, counters, in_graph = session.lanes, session.counters, capture_question()
    put, stream_of, current = session.recorder.put, session.stream, session.current_stream
    new_event = session.recorder.new_event

    def record(event: Any, stream: Any = None) -> Any:
        lane = lanes.lane
        try:
            state = event._hicache_obs
        except AttributeError:
            return hooked(event) if stream is None else hooked(event, stream)
        if (
            lane.in_stream_call
            or (lane.gated is not None if state is None else state.layer >= 0)
            or guard.off
            or not session.ready
            or (in_graph and in_graph())
        ):
            return hooked(event) if stream is None else hooked(event, stream)
        counters.calls += 1
        noted = False
        try:
            if state is None:
                state = event._hicache_obs = new_event()
            where = current() if stream is None else stream_of(stream)
            noted = True
            put(lane, EVENT_RECORD, state.event_id, where, None, state)
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_stream_call = True
        try:
            return original(event, stream)
        finally:
            lane.in_stream_call = False
            if noted:
                state.version += 1

    return record


def short_wait_event(
    session: Session, guard: Guard, original: Callable[..., Any], hooked: Callable[..., Any]
) -> Callable[..., Any]:
    """``Stream.wait_event``: of a round for a layer, into its batch; of any other stream for a known event.

    torch.cuda's calls the event's own ``wait``, which is hooked where the event is of its class: then that sees to it.
    """
    lanes, counters, in_graph = session.lanes, session.counters, capture_question()
    put, stream_of = session.recorder.put, session.stream
    if original.__code__.co_names == ("wait",):
        seen: type | None = None

        def hand_on(stream: Any, event: Any) -> Any:
            nonlocal seen
            if type(event) is not seen:
                if not hasattr(getattr(type(event), "wait", None), "__wrapped__"):
                    return hooked(stream, event)
                seen = type(event)
            return original(stream, event)

        return hand_on

    def wait_event(stream: Any, event: Any) -> Any:
        lane = lanes.lane
        state = getattr(event, MARK, None)
        if state is None:
            return hooked(stream, event)
        if stream is lane.waits_on and state.layer >= 0 and session.ready:
            lane.note_wait(state)
            return original(stream, event)
        if (
            state.layer >= 0
            or lane.in_stream_call
            or lane.purpose is not None
            or guard.off
            or not session.ready
            or (in_graph and in_graph())
        ):
            return hooked(stream, event)
        counters.calls += 1
        try:
            put(lane, EVENT_WAIT, state.event_id, stream_of(stream))
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_stream_call = True
        try:
            return original(stream, event)
        finally:
            lane.in_stream_call = False

    return wait_event


def short_wait(
    session: Session, guard: Guard, original: Callable[..., Any], hooked: Callable[..., Any]
) -> Callable[..., Any]:
    """``Event.wait`` with a stream: of a round for a layer, into its batch; of any other for a known event."""
    lanes, counters, in_graph = session.lanes, session.counters, capture_question()
    put, stream_of = session.recorder.put, session.stream

    def wait(event: Any, stream: Any = None) -> Any:
        lane = lanes.lane
        if lane.in_stream_call:
            return original(event, stream)
        state = getattr(event, MARK, None)
        if state is None:
            return hooked(event) if stream is None else hooked(event, stream)
        if state.layer >= 0:
            on = lane.waits_on
            if (
                on is not None
                and stream is not None
                and (stream is on or getattr(stream, "cuda_stream", stream) == lane.waits_handle)
                and session.ready
            ):
                lane.note_wait(state)
                return original(event, stream)
            return hooked(event) if stream is None else hooked(event, stream)
        if stream is None or guard.off or not session.ready or (in_graph and in_graph()):
            return hooked(event) if stream is None else hooked(event, stream)
        counters.calls += 1
        try:
            purpose = lane.purpose
            word = _START if purpose in _FENCES else EVENT_WAIT | (purpose or 0) << 16
            put(lane, word, state.event_id, stream_of(stream))
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_stream_call = True
        try:
            return original(event, stream)
        finally:
            lane.in_stream_call = False

    return wait


def short_wait_stream(
    session: Session, guard: Guard, original: Callable[..., Any], hooked: Callable[..., Any]
) -> Callable[..., Any]:
    """``Stream.wait_stream`` that is not timed."""
    lanes, counters, in_graph = session.lanes, session.counters, capture_question()
    put, stream_of, timed = session.recorder.put, session.stream, session.timed

    def wait_stream(waiter: Any, stream: Any) -> Any:
        lane = lanes.lane
        purpose = lane.purpose
        if lane.in_stream_call or guard.off or not session.ready or (timed and purpose) or (in_graph and in_graph()):
            return hooked(waiter, stream)
        counters.calls += 1
        try:
            waiting = stream_of(waiter)
            word = WAIT_STREAM | (purpose or 0) << 16
            put(lane, word, waiting.stream_id, stream_of(stream), waiting)
            if session.failures:
                session.hook_worked()
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
        lane.in_stream_call = True
        try:
            return original(waiter, stream)
        finally:
            lane.in_stream_call = False

    return wait_stream
