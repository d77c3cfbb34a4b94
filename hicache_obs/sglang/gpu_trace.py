"""torch's own callbacks on events and streams: the calls that no Python method makes.

torch tells a registered callback of every record, wait and synchronize that goes through its C++ classes (it is what
``TORCH_CUDA_SANITIZER`` uses): collectives, the caching allocator and extensions make them without a Python method that
could be hooked. A call that a hook sees as well is told twice, and taken from the hook: while one runs, the callbacks
are ours to leave alone. Each call costs the process a call into Python, so they are on only when asked for
(``HICACHE_OBS_GPU_TRACE``). What a library does with the driver's own functions is seen by neither.

torch calls back for a record or a wait when it is issued, and for a synchronize right before it blocks; nothing else of
that thread comes in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from hicache_obs.recorder.event_state import EventState
from hicache_obs.recorder.slot import EVENT_RECORD, EVENT_WAIT
from hicache_obs.records import Purpose
from hicache_obs.sglang.captures import capturing
from hicache_obs.sglang.session import MAX_FAILURES, Session

TARGET: Final = "torch.cuda._gpu_trace"
MAX_HANDLES: Final = 1 << 16
"""Events that are known by their handle."""


class GpuTrace:
    """The callbacks of one session. Any thread may call them; none raises.

    Args:
        session: Takes the records.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._states: dict[int, EventState] = {}
        self._off = False

    def know(self, handle: int, state: EventState) -> None:
        """The event with this handle is one that a hook has seen."""
        self._states.pop(handle, None)
        self._bound()
        self._states[handle] = state

    def callbacks(self) -> dict[str, Callable[..., None]]:
        """What to register, by the part of torch's ``register_callback_for_...`` after ``for_``."""
        return {
            "event_creation": self._guarded(self._made, always=True),
            "event_deletion": self._guarded(self._made, always=True),
            "event_record": self._guarded(self._recorded),
            "event_wait": self._guarded(self._waited),
            "event_synchronization": self._guarded(self._event_synchronized),
            "stream_synchronization": self._guarded(self._stream_synchronized),
            "device_synchronization": self._guarded(self._device_synchronized),
        }

    def _guarded(self, fn: Callable[..., None], *, always: bool = False) -> Callable[..., None]:
        session, lanes = self._session, self._session.lanes

        def callback(*handles: int) -> None:
            lane = lanes.lane
            if self._off or (lane.in_stream_call and not always):
                return
            try:
                if always or session.recording:
                    fn(*handles)
            except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
                self._off = session.hook_failed(TARGET, error) >= MAX_FAILURES

        return callback

    def _made(self, event: int) -> None:
        """A new event, or none any more: its handle means nothing of what it meant."""
        self._states.pop(event, None)

    def _recorded(self, event: int, stream: int) -> None:
        if capturing():
            return  # part of the graph, not of the timeline
        session, state = self._session, self._state(event)
        session.recorder.put(session.local, EVENT_RECORD, state.event_id, session.stream_of(stream), None, state)
        session.recorder.end_event_record(state)

    def _waited(self, event: int, stream: int) -> None:
        if capturing():
            return  # as above
        session, state = self._session, self._state(event)
        word = EVENT_WAIT | Purpose.PLAIN << 16
        session.recorder.put(session.local, word, state.event_id, session.stream_of(stream))

    def _event_synchronized(self, event: int) -> None:
        state = self._state(event)
        self._session.recorder.event_synchronized(state, state.stamp)

    def _stream_synchronized(self, stream: int) -> None:
        recorder, where = self._session.recorder, self._session.stream_of(stream)
        recorder.end_stream_sync(where, recorder.begin_stream_sync(where))

    def _device_synchronized(self) -> None:
        recorder = self._session.recorder
        recorder.end_device_sync(recorder.begin_device_sync())

    def _state(self, event: int) -> EventState:
        state = self._states.get(event)
        if state is None:
            self._bound()
            state = self._states.setdefault(event, self._session.recorder.new_event())
        return state

    def _bound(self) -> None:
        while len(self._states) >= MAX_HANDLES:
            self._states.pop(next(iter(self._states)), None)


def start_gpu_trace(session: Session, trace: Any, activate: Callable[[], None]) -> GpuTrace:
    """Register the callbacks; those that this torch does not have are left out.

    Args:
        trace: ``torch.cuda._gpu_trace``, or what has its functions.
        activate: ``torch._C._activate_gpu_trace``: from then on torch calls back.
    """
    made = session.gpu_trace = GpuTrace(session)
    for name, callback in made.callbacks().items():
        register = getattr(trace, f"register_callback_for_{name}", None)
        if register is not None:
            register(callback)
    activate()
    return made
