"""An observed device: the calls of a test as one short line each, as the recorder saw them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from hicache_obs.recorder import RangeName, RangeStatus, RecordedDevice, Recorder
from hicache_obs.records import (
    AnyRecord,
    CaptureMode,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventRecord,
    Kernel,
    Memcpy,
    Mode,
    Purpose,
    Times,
    Work,
    device,
)
from hicache_obs.streams import SCHEDULES, open_device


class ListSink:
    """A ``RecordSink`` that keeps everything; ``fail`` makes ``append`` raise, ``full`` makes it drop."""

    writable = True
    mode = CaptureMode.OBSERVE

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []
        self.dropped: Counter[DropReason] = Counter()
        self.beats: list[int] = []
        self.fail = False
        self.full = False

    def append(self, record: AnyRecord) -> bool:
        if self.fail:
            raise ValueError("the sink is broken")
        if self.full:
            self.drop(DropReason.RING_FULL)
            return False
        self.records.append(record)
        return True

    def drop(self, reason: DropReason, count: int = 1) -> None:
        self.dropped[reason] += count

    def beat(self, host_ns: int) -> None:
        self.beats.append(host_ns)


class CountingRanges:
    """Ranges that count, by name."""

    status = RangeStatus.DOMAIN

    def __init__(self) -> None:
        self.pushed: Counter[RangeName] = Counter()
        self.popped = 0
        self.ops: list[int] = []

    def push(self, name: RangeName, op: int) -> None:
        self.pushed[name] += 1
        self.ops.append(op)

    def pop(self) -> None:
        self.popped += 1


class Observed:
    """A device ``dev`` that is recorded, and what was recorded."""

    def __init__(self, name: str, **options: int) -> None:
        kind, _, schedule = name.partition("-")
        self.bare = open_device(kind, schedule=schedule or "asap")
        self.sink = ListSink()
        self.ranges = CountingRanges()
        self.recorder = Recorder(self.sink, clock=self.bare.host_ns, ranges=self.ranges, **options)
        self.dev = RecordedDevice(self.bare, self.recorder)

    def kernel(self, stream: object, fn: Callable[[], None] = lambda: None, site: str = "forward") -> None:
        work = Work(site, (device(Mode.WRITE, np.arange(3)),), (0, 2), 7, None, 64)
        with self.dev.stream(stream):
            self.dev.launch(fn, work)

    def copy(self, stream: object, fn: Callable[[], None] = lambda: None) -> None:
        work = Work("copy", (device(Mode.WRITE, np.arange(3)),), (0, 2), 7, Direction.HOST_TO_DEVICE, 64)
        with self.dev.stream(stream):
            self.dev.launch(fn, work)

    def named(self, space: DefineSpace) -> dict[int, str]:
        return {r.id: r.text for r in self.sink.records if isinstance(r, Define) and r.space is space}

    def log(self) -> list[str]:
        """Records but ``Define`` and ``Times``, one line each, by name; own events are e1, e2, ..."""
        streams = self.named(DefineSpace.STREAM)
        lines = []
        for record in self.sink.records:
            if isinstance(record, (Define, Times)):
                continue
            kind = type(record).__name__
            if isinstance(record, (Kernel, Memcpy)):
                lines.append(f"{kind} {streams[record.stream]}")
                continue
            parts = [kind]
            for field in type(record).__struct_fields__[3:]:
                value = getattr(record, field)
                if field in ("stream", "waiter", "on") and value is not None:
                    parts.append(streams[value])
                elif field == "event":
                    parts.append(f"e{value}")
                elif field != "purpose" or value is not Purpose.PLAIN:
                    parts.append(value.name if field == "purpose" else str(value))
            lines.append(" ".join(parts))
        return lines

    def ops(self) -> list[int]:
        """Operation ids in the order of the sink."""
        return [int(r.op) for r in self.sink.records if not isinstance(r, (Define, Times))]

    def times(self) -> dict[int, tuple[int, int]]:
        return {int(r.op): (r.start_ns, r.end_ns) for r in self.sink.records if isinstance(r, Times)}

    def records_of(self, kind: type) -> list[AnyRecord]:
        return [record for record in self.sink.records if isinstance(record, kind)]

    def events(self) -> list[int]:
        return [int(r.event) for r in self.sink.records if isinstance(r, EventRecord)]


@pytest.fixture
def observe() -> Iterator[Callable[..., Observed]]:
    """``observe("threads")`` or ``observe("virtual-lazy")``; closed at the end."""
    made: list[Observed] = []

    def make(name: str = "virtual-asap", **options: int) -> Observed:
        made.append(Observed(name, **options))
        return made[-1]

    yield make
    for observed in made:
        observed.dev.close()


@pytest.fixture(params=["threads", *(f"virtual-{schedule}" for schedule in SCHEDULES)])
def observed(request: pytest.FixtureRequest, observe: Callable[..., Observed]) -> Observed:
    """On every device that needs no GPU."""
    return observe(request.param)
