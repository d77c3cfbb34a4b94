"""Whether a copy can have run on the stream it was recorded on: its bytes against the time between its two events.

The stream that is current when a copy is launched is assumed to be the copy's. A library that launches on a stream of
its own makes that wrong, and every verdict on the copy with it. Then the events around it have nothing between them,
and the copy looks faster than any link is. A copy that took its time is confirmed.
"""

from __future__ import annotations

from typing import Final

from hicache_obs.config import read_setting
from hicache_obs.findings import Hazard
from hicache_obs.recorder.batch import Measured
from hicache_obs.sglang.session import Session
from hicache_obs.streams.protocol import Probe

RESOLUTION_NS: Final = 1000
"""What events around a copy may be off by; added to its time."""
TRANSFERS: Final = (
    Hazard.WAW_FORWARD_RESTORE,
    Hazard.WAR_FORWARD_RESTORE,
    Hazard.RAW_RESTORE_FORWARD,
    Hazard.RAW_FORWARD_BACKUP,
    Hazard.WAR_BACKUP_FORWARD,
)


class CopyCheck:
    """Counts a session's copies that their stream is confirmed for, and those it cannot be right for."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._peak = read_setting("link_gb_s")[0]
        self.confirmed = 0
        self.impossible = 0

    def watch(self, measured: Measured | None, size_bytes: int) -> Measured | None:
        """``measured``, judged when its times are known: on the flusher's thread."""
        if measured is None or not size_bytes:
            return measured
        return Measured(_Watched(measured.probe, size_bytes, self), measured.device)

    def judge(self, size_bytes: int, elapsed_ns: int) -> None:
        """A copy of so many bytes took so long."""
        session = self._session
        if size_bytes <= self._peak * (elapsed_ns + RESOLUTION_NS):  # a byte per nanosecond is a GB/s
            self.confirmed += 1
            if self.confirmed & (self.confirmed - 1) == 0:  # now and then: 1, 2, 4, 8, ...
                session.recorder.status("copies confirmed on their stream", self.confirmed)
            return
        self.impossible += 1
        session.recorder.status("copies not on their stream", self.impossible)
        session.unobservable(
            TRANSFERS,
            f"a copy of {size_bytes} bytes had only {elapsed_ns} ns between its events, more than {self._peak} GB/s: "
            "it ran on another stream than the current one",
        )


class _Watched:
    """A probe that tells what it found, once."""

    def __init__(self, probe: Probe, size_bytes: int, check: CopyCheck) -> None:
        self._probe = probe
        self._size_bytes = size_bytes
        self._check = check

    def ready(self) -> bool:
        """See ``Probe.ready``."""
        return self._probe.ready()

    def times_ns(self) -> tuple[int, int]:
        """See ``Probe.times_ns``."""
        start_ns, end_ns = self._probe.times_ns()
        self._check.judge(self._size_bytes, end_ns - start_ns)
        return start_ns, end_ns
