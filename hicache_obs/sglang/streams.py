"""Hooks on a device module's streams and events: every edge that Python code makes.

``wait_stream`` of torch is a record and a wait of a fresh event; the group makes that one record. Calls made while a
graph is captured become part of the graph, not of the timeline, and are left out.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.recorder.batch import Measured
from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.recorder import StreamMark
from hicache_obs.records import Purpose
from hicache_obs.sglang.adapter import DONE, Adapter
from hicache_obs.sglang.rounds import Round, wait_for_layer, waited
from hicache_obs.sglang.session import IN_STREAM_CALL, Session

ORDERED: Final = tuple(hazard for hazard in Hazard if hazard is not Hazard.TP_DIVERGENCE)
"""Without the calls that make order, everything that is judged by order is out of sight."""


def stream_adapters(stream: str, event: str, *, optional: bool = False) -> tuple[Adapter, ...]:
    """Rows for the stream and event classes of one device module, by their dotted names.

    Args:
        optional: The classes may lack a method (torch's CPU module does): that costs nothing.
    """

    def row(name: str, before: Any = None, after: Any = None, failed: Any = None, *, vital: bool = True) -> Adapter:
        return Adapter(
            name,
            before=before,
            after=after,
            failed=failed,
            hazards=ORDERED if vital and not optional else (),
            group=IN_STREAM_CALL,
            optional=optional,
        )

    return (
        row(f"{stream}.wait_stream", _wait_stream, _after_wait_stream),
        row(f"{stream}.wait_event", _wait_event, _after_event_wait),
        row(f"{stream}.synchronize", _before_stream_sync, _after_stream_sync),
        row(f"{stream}.query", _before_stream_query, _after_stream_query, vital=False),
        row(f"{event}.record", _before_record, _after_record, _after_record),
        row(f"{event}.wait", _event_wait, _after_event_wait),
        row(f"{event}.synchronize", _before_event_sync, _after_event_sync),
        row(f"{event}.query", _before_event_sync, _after_event_query),
        row(f"{event}.elapsed_time", _before_elapsed, _after_elapsed, vital=False),
    )


def device_sync_adapter(target: str) -> Adapter:
    """The row for a device module's ``synchronize``."""
    return Adapter(target, before=_before_device_sync, after=_after_device_sync, group=IN_STREAM_CALL)


def capturing() -> bool:
    """Whether the current stream is being captured into a graph. Never initialises a device."""
    cuda = _cuda()
    return cuda is not None and cuda.is_initialized() and bool(cuda.is_current_stream_capturing())


@cache
def _cuda() -> Any:
    """``torch.cuda`` where this torch has it; asked once, for hooks ask at every call."""
    torch = sys.modules.get("torch")
    return torch.cuda if torch is not None and (torch.version.cuda or torch.version.hip) else None


def _purpose(session: Session) -> Purpose:
    purpose: Purpose | None = getattr(session.local, "purpose", None)
    return Purpose.PLAIN if purpose is None else purpose


def _wait_stream(session: Session, waiter: Any, on: Any, *_: Any, purpose: Purpose | None = None, **__: Any) -> object:
    """``purpose`` is what our own stream protocol adds; torch has no such argument."""
    if not capturing():
        why = _purpose(session) if purpose is None else purpose
        fence = why in (Purpose.LOAD_FENCE, Purpose.WRITE_FENCE)
        measured = session.start_timing(waiter) if fence else None
        session.recorder.wait_for_stream(session.stream(waiter), session.stream(on), why, measured)
        return DONE if measured is None else (measured, waiter)
    return DONE


def _after_wait_stream(session: Session, begun: tuple[Measured, Any], *_: Any, **__: Any) -> None:
    session.stop_timing(*begun)


def _wait_event(
    session: Session, stream: Any, event: Any, *_: Any, purpose: Purpose | None = None, **__: Any
) -> object:
    state = session.event(event)
    this = getattr(session.local, "round", None) if state.layer >= 0 else None
    if this is not None:
        return wait_for_layer(session, this, session.stream(stream), state)
    if not capturing():
        why = _event_purpose(session, state) if purpose is None else purpose
        session.recorder.wait_for_event(session.stream(stream), state, why)
    return DONE


def _event_wait(session: Session, event: Any, stream: Any = None, *_: Any) -> object:
    state = session.event(event)
    this = getattr(session.local, "round", None) if state.layer >= 0 else None
    if this is None and capturing():
        return DONE
    waiter = session.current_stream() if stream is None else session.stream(stream)
    if this is not None:
        return wait_for_layer(session, this, waiter, state)
    session.recorder.wait_for_event(waiter, state, _event_purpose(session, state))
    return DONE


def _after_event_wait(session: Session, this: Round, *_: Any, **__: Any) -> None:
    waited(session, this)


def _event_purpose(session: Session, event: EventState) -> Purpose:
    """Inside a submission the fence is the wait for a stream; the wait for an event is that for its start."""
    if event.layer >= 0:
        return Purpose.LAYER
    purpose = _purpose(session)
    return Purpose.START if purpose in (Purpose.LOAD_FENCE, Purpose.WRITE_FENCE) else purpose


def _before_record(session: Session, event: Any, stream: Any = None, *_: Any) -> object:
    """A layer's event, recorded where the layer's copy was launched, goes into the ring with the copies."""
    state = session.event(event)
    if state.layer >= 0 and stream is None:
        batch = session.recorder.batch
        if batch is not None and batch.direction is not None:
            batch.record(state)
            return DONE
    if capturing():
        return DONE
    where = session.current_stream() if stream is None else session.stream(stream)
    session.recorder.begin_event_record(state, lambda: where)
    return state


def _after_record(session: Session, state: EventState, *_: Any, **__: Any) -> None:
    session.recorder.end_event_record(state)


def _before_event_sync(session: Session, event: Any, *_: Any) -> tuple[EventState, int]:
    state = session.event(event)
    return state, state.version


def _after_event_sync(session: Session, before: tuple[EventState, int], *_: Any) -> None:
    session.recorder.event_synchronized(*before)


def _after_event_query(session: Session, before: tuple[EventState, int], result: Any, *_: Any) -> None:
    session.recorder.event_queried(*before, bool(result))


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
