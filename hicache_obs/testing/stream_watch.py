"""A recorded device for one test, and what the analyzer says of everything the test did on it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from hicache_obs.analyzer import Analyzer
from hicache_obs.findings import BlastRadius, Finding, Hazard, Verdict
from hicache_obs.recorder import RecordedDevice, Recorder
from hicache_obs.records import NO_OP, Access, AnyRecord, CaptureMode, DropReason, Lost, Space, ThreadId
from hicache_obs.streams import open_device
from hicache_obs.testing.recording import RecordingSink
from hicache_obs.trace import Trace, make_trace

MAX_RECORDS: Final = 1 << 20
"""Records kept of one test. What comes after them is counted as lost, and the verdict is that nobody can tell."""


class MemorySink:
    """A ``RecordSink`` that keeps records in memory, ``limit`` at most. Called under the recorder's lock."""

    writable = True
    mode = CaptureMode.OBSERVE

    def __init__(self, limit: int = MAX_RECORDS) -> None:
        self.records: list[AnyRecord] = []
        self._limit = limit
        self._dropped: dict[DropReason, int] = {}

    def append(self, record: AnyRecord) -> bool:
        """Keep ``record``, behind a ``Lost`` record if some before it were dropped; False at the limit."""
        if len(self.records) >= self._limit:
            self.drop(DropReason.RING_FULL)
            return False
        self.records += self.losses(record.host_ns)
        self._dropped.clear()
        self.records.append(record)
        return True

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """See ``RecordSink.drop``."""
        self._dropped[reason] = self._dropped.get(reason, 0) + count

    def beat(self, host_ns: int) -> None:
        """Nothing: nobody watches from outside."""

    def losses(self, host_ns: int) -> list[AnyRecord]:
        """``Lost`` records of what was dropped since the last record."""
        return [Lost(NO_OP, ThreadId(0), host_ns, count, reason) for reason, count in self._dropped.items()]


@dataclass(frozen=True, slots=True)
class Watched:
    """What a test did, judged.

    Attributes:
        trace: Everything recorded.
        findings: Pairs that nothing orders, worst first; pairs proven but measured otherwise are among them.
        unknown: Pairs that cannot be decided, because records were lost.
        pairs_checked: Pages with an earlier access that an operation was compared with; 0: nothing was checked.
        radii: What each finding spoiled, by its position in ``findings``.
    """

    trace: Trace
    findings: tuple[Finding, ...]
    unknown: tuple[Finding, ...]
    pairs_checked: int
    radii: tuple[BlastRadius, ...]

    @property
    def hazards(self) -> frozenset[Hazard]:
        """The hazards found."""
        return frozenset(finding.hazard for finding in self.findings)


class StreamWatch:
    """Opens a device, records it, and judges what was recorded.

    Args:
        device, schedule, seed: As ``open_device`` takes them.
        source: What is watched, for messages.

    Attributes:
        device: The recorded device. Run the code under test on it.
        recorder: Takes what the device cannot see: pool names, allocations, accesses of the host.
        allow_unchecked: Set it in a test that may leave nothing to check.

    Raises:
        ConfigError: There is no such device or schedule here.
    """

    def __init__(self, device: str, *, schedule: str = "adversarial", seed: int = 0, source: str = "test") -> None:
        self._bare = open_device(device, schedule=schedule, seed=seed)
        self._sink = MemorySink()
        self._source = source
        self._watched: Watched | None = None
        self.recorder: Final = Recorder(self._sink, clock=self._bare.host_ns, max_pending=MAX_RECORDS)
        self.device: Final = RecordedDevice(self._bare, self.recorder)
        self.allow_unchecked = False

    def define_pool(self, name: str, layers: int, *, pool: int = 0, space: Space = Space.DEVICE) -> None:
        """State the name and layer count of a page pool, for messages."""
        self.recorder.define_pool(name, layers, pool=pool, space=space)

    def host_access(self, site: str, *accesses: Access) -> None:
        """State that the calling thread itself reads or writes memory which the device also uses, here and now."""
        self.recorder.host_access(site, accesses)

    def finish(self) -> Watched:
        """Finish the device's work, close it and judge. Idempotent; raises what launched work raised.

        To be called when no other thread uses the device any more.
        """
        if self._watched is None:
            self.device.close()
            self.recorder.resolve()
            self._watched = judge(
                make_trace(self._source, [*self._sink.records, *self._sink.losses(self._bare.host_ns())])
            )
        return self._watched


def judge(trace: Trace) -> Watched:
    """The analyzer's word on a finished trace."""
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace)
    analyzer.finish()
    worst = (Verdict.VIOLATION, Verdict.CONTRADICTION, Verdict.LATENT)
    found = sorted(
        (finding for finding in sink.findings if finding.verdict in worst),
        key=lambda finding: (worst.index(finding.verdict), finding.secondary, finding.later.op, finding.earlier.op),
    )
    unknown = tuple(finding for finding in sink.findings if finding.verdict is Verdict.UNKNOWN)
    radii = tuple(analyzer.blast_radius((finding.earlier.op, finding.later.op)) for finding in found)
    return Watched(trace, tuple(found), unknown, analyzer.totals.lookups, radii)
