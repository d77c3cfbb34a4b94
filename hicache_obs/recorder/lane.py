"""What one host thread has going on, in one object: a hook asks for it once, for a look-up per thread costs 50 ns."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from hicache_obs.records import Purpose, ThreadId

if TYPE_CHECKING:
    from hicache_obs.recorder.batch import Batch


class Lane:
    """One thread's state. Only that thread touches it.

    Attributes:
        number: The thread's number; negative until its name is in the ring.
        assigned: The number it will have; negative until it has one.
        batch: What it has not put into the ring yet.
        waits_on: The engine's stream whose waits for layers go into ``batch``; what it is made of, of a stream that is
            another object at each call, is ``waits_handle``. Only while there is a batch.
        note_wait: Puts such a wait there.
        in_stream_call: Calls to streams and events are the engine's or our own business, and not recorded.
        in_copy: A copy is being launched; what it calls is part of it.
        round: The forward round that is being launched.
        round_group: Number of the batch that is being run; 0 outside of one.
        transfer: Number of the last transfer.
        purpose: Why waits are issued now.
        path: Who asked for the transfer that is being submitted.
        copies: What the last copies touched.
        counter: The layer counter whose events are known.
        submission: The ``Submission`` of a load-back that is under way.
        gated: The transfer that a call is queueing: what waits for the events that the call makes.
        draft_batch: The graphs of a multi-layer draft that were prepared last, and the batch they are for.
    """

    def __init__(self) -> None:
        self.number = ThreadId(-1)
        self.assigned = ThreadId(-1)
        self.batch: Batch | None = None
        self.waits_on: Any = None
        self.waits_handle: Any = None
        self.note_wait: Any = None
        self.in_stream_call = False
        self.in_copy = False
        self.round: Any = None
        self.round_group = 0
        self.transfer = 0
        self.purpose: Purpose | None = None
        self.path: str | None = None
        self.copies: dict[tuple[int, ...], tuple[Any, ...]] = {}
        self.counter: Any = None
        self.submission: Any = None
        self.gated: Any = None
        self.draft_batch: tuple[Any, Any] = (None, None)


class Lanes(threading.local):
    """``lane`` is the calling thread's."""

    def __init__(self) -> None:
        self.lane = Lane()
