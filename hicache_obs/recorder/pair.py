"""``Pair``: two probes around one stretch of work, seen as one."""

from __future__ import annotations

from dataclasses import dataclass

from hicache_obs.streams.protocol import Probe


@dataclass(frozen=True, slots=True)
class Pair:
    """Starts where the first starts and ends where the last ends; they may be one object."""

    first: Probe
    last: Probe

    def ready(self) -> bool:
        """See ``protocol.Probe.ready``."""
        return self.first.ready() and self.last.ready()

    def times_ns(self) -> tuple[int, int]:
        """See ``protocol.Probe.times_ns``."""
        return self.first.times_ns()[0], self.last.times_ns()[1]
