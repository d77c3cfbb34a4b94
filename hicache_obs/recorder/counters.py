"""What a recorder counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class RecorderCounters:
    """What a recorder has done so far.

    Attributes:
        launches: Kernels recorded.
        copies: Copies recorded.
        waits: ``wait_stream`` and ``wait_event`` calls recorded.
        ranges_opened, ranges_closed: NVTX ranges. Where no tool is attached none are made: then ``pairs_resolved``, the
            operations around which they would have been.
        pairs_resolved: Operations whose device times are known.
        pairs_dropped: Operations whose device times will never be known.
        uncertain: Queries and syncs left out, because something else happened during the call.
        errors: Failures inside the recorder.
        hook_ns: Time the engine's threads have spent in hooks; an estimate, for not all of the fast ones are timed.
    """

    launches: int = 0
    copies: int = 0
    waits: int = 0
    ranges_opened: int = 0
    ranges_closed: int = 0
    pairs_resolved: int = 0
    pairs_dropped: int = 0
    uncertain: int = 0
    errors: int = 0
    hook_ns: int = 0
