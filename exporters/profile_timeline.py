"""``draw_profile``: a profiler's own rows as a timeline: device operations, API calls, annotated ranges, fences."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from hicache_obs.exporters.timeline import Flow, Lanes, Numbers, TimelineWriter, Value
from hicache_obs.readers.profile import LAUNCHING, UNKNOWN, CallKind, Int64s, OpKind, Profile

_DEVICES, _THREADS, _UNDECIDED = 1, 1 << 20, 0
MAX_UNDECIDED: Final = 20_000
"""Undecided pairs that are drawn; the rest are counted by ``analyze``."""
_CALL_NAMES: Final = {kind: kind.name.lower().replace("_", " ") for kind in CallKind}


@dataclass(frozen=True, slots=True)
class UndecidedPair:
    """Two rows of ``Profile.ops`` that the file does not order, the one issued first first; and why."""

    process: int
    earlier: int
    later: int
    cause: str


@dataclass(slots=True)
class DrawnProfile:
    """What was drawn. Counts.

    Attributes:
        operations: Device operations.
        streams: Streams that ran some.
        arrows: Fences whose both sides are in the file.
        undecided: Pairs that nothing in the file orders.
    """

    operations: int = 0
    streams: int = 0
    arrows: int = 0
    undecided: int = 0
    flows: defaultdict[int, list[Flow]] = field(default_factory=lambda: defaultdict(list))
    """Arrow ends, by row of ``Profile.ops``."""


def first_ns(profile: Profile) -> int:
    """The earliest time in a profile; 0 if there is none."""
    columns = (profile.ops.start_ns, profile.calls.start_ns, profile.ranges.start_ns)
    return min((int(column[column != UNKNOWN].min()) for column in columns if (column != UNKNOWN).any()), default=0)


def draw_profile(
    profile: Profile,
    writer: TimelineWriter,
    numbers: Numbers,
    *,
    rank: int = 0,
    shift_ns: int = 0,
    undecided: Sequence[UndecidedPair] = (),
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> DrawnProfile:
    """Draw all processes of a profile, each as one of its own.

    Args:
        profile: What a reader gave.
        writer: Where to draw.
        numbers: Of the file.
        rank: Place of the first process among the processes.
        shift_ns: Added to all times.
        undecided: Pairs to show.
        progress: Told how many rows of how many are drawn.
    """
    drawn = DrawnProfile()
    _link_fences(profile, numbers, drawn)
    pairs = undecided[:MAX_UNDECIDED]
    marks = [_link_pair(profile, numbers, drawn, pair) for pair in pairs]
    found = {stream.process for stream in profile.streams} | {thread.process for thread in profile.threads}
    total = len(profile.ops) + len(profile.calls) + len(profile.ranges)
    page = _Page(profile, writer, numbers, shift_ns, drawn, lambda done: progress(done, total))
    for place, process in enumerate(sorted(found)):
        page.process(process, rank + place, [mark for mark in marks if mark[0].process == process])
    return drawn


class _Page:
    """Draws one process after the other."""

    def __init__(
        self,
        profile: Profile,
        writer: TimelineWriter,
        numbers: Numbers,
        shift_ns: int,
        drawn: DrawnProfile,
        progress: Callable[[int], None],
    ) -> None:
        self._profile = profile
        self._writer = writer
        self._numbers = numbers
        self._shift_ns = shift_ns
        self._drawn = drawn
        self._progress = progress
        self._done = 0

    def process(self, process: int, rank: int, marks: Sequence[tuple[UndecidedPair, int]]) -> None:
        """One process: what nobody can tell, its devices, its threads."""
        top = self._group(0, f"process {process} ({self._profile.facts.producer})", rank)
        if marks:
            self._undecided(top, marks)
        devices: dict[int, int] = {}
        for number, stream in enumerate(self._profile.streams):
            if stream.process != process:
                continue
            rows = np.flatnonzero(self._profile.ops.stream == number)
            if not len(rows):
                continue
            if stream.device not in devices:
                devices[stream.device] = self._group(top, f"device {stream.device}", _DEVICES + len(devices))
            name = f"stream {stream.number}"
            if stream.context > 0:
                name += f", context {stream.context}"
            self._stream(Lanes(self._writer, self._numbers, devices[stream.device], name, number), rows)
        for number, thread in enumerate(self._profile.threads):
            if thread.process == process:
                self._thread(top, number, thread.number)

    def _group(self, parent: int, name: str, rank: int) -> int:
        number = self._numbers()
        self._writer.group(number, parent, name, rank)
        return number

    def _stream(self, track: Lanes, rows: Int64s) -> None:
        ops, names, flows = self._profile.ops, self._profile.names, self._drawn.flows
        self._drawn.streams += 1
        for row in rows[np.argsort(ops.start_ns[rows], kind="stable")].tolist():
            start, end = int(ops.start_ns[row]), int(ops.end_ns[row])
            args: dict[str, Value] = {"row": row, "kind": OpKind(int(ops.kind[row])).name.lower()}
            if ops.correlation[row] != UNKNOWN:
                args["correlation"] = int(ops.correlation[row])
            if ops.size_bytes[row]:
                args["bytes"] = int(ops.size_bytes[row])
            call = int(ops.call[row])
            if call != UNKNOWN:
                args["issued_ns"] = int(self._profile.calls.start_ns[call])
            self._drawn.operations += 1
            self._tick()
            name = names[int(ops.name[row])]
            if start != UNKNOWN:
                track.slice(name, "device", start + self._shift_ns, end + self._shift_ns, args, flows.get(row, ()))
            elif call != UNKNOWN:
                at = int(self._profile.calls.start_ns[call]) + self._shift_ns
                track.mark(name, "device", at, {**args, "measured": "no, drawn where issued"}, flows.get(row, ()))

    def _thread(self, top: int, number: int, tid: int) -> None:
        calls, ranges, names = self._profile.calls, self._profile.ranges, self._profile.names
        mine = np.flatnonzero(calls.thread == number)
        if len(mine):
            track = Lanes(self._writer, self._numbers, top, f"thread {tid}: API calls", _THREADS + 2 * number)
            for row in mine[np.argsort(calls.start_ns[mine], kind="stable")].tolist():
                kind = CallKind(int(calls.kind[row]))
                args: dict[str, Value] = {"correlation": int(calls.correlation[row])}
                if calls.result[row] not in (0, UNKNOWN):
                    args["result"] = int(calls.result[row])
                start, end = int(calls.start_ns[row]) + self._shift_ns, int(calls.end_ns[row]) + self._shift_ns
                track.slice(_CALL_NAMES[kind], "call", start, end, args)
                self._tick()
        mine = np.flatnonzero(ranges.thread == number)
        if len(mine):
            track = Lanes(self._writer, self._numbers, top, f"thread {tid}: ranges", _THREADS + 2 * number + 1)
            for row in mine[np.argsort(ranges.start_ns[mine], kind="stable")].tolist():
                args = {}
                if ranges.payload[row] != UNKNOWN:
                    args["payload"] = int(ranges.payload[row])
                if ranges.domain[row] != UNKNOWN:
                    args["domain"] = names[int(ranges.domain[row])]
                start, end = int(ranges.start_ns[row]) + self._shift_ns, int(ranges.end_ns[row]) + self._shift_ns
                track.slice(names[int(ranges.text[row])], "range", start, end, args)
                self._tick()

    def _undecided(self, top: int, marks: Sequence[tuple[UndecidedPair, int]]) -> None:
        ops, names = self._profile.ops, self._profile.names
        track = Lanes(self._writer, self._numbers, top, "not decidable: copies in no known order", _UNDECIDED)
        for pair, flow in marks:
            texts = [names[int(ops.name[row])] for row in (pair.earlier, pair.later)]
            at = _position(self._profile, pair.later) + self._shift_ns
            args: dict[str, Value] = {"cause": pair.cause, "earlier_row": pair.earlier, "later_row": pair.later}
            track.mark(f"{texts[0]} | {texts[1]}", "undecided", at, args, (Flow(flow, False),))

    def _tick(self) -> None:
        self._done += 1
        if not self._done & 0x3FFF:
            self._progress(self._done)


def _position(profile: Profile, row: int) -> int:
    """Where an operation is drawn: its start, else its call; 0 without either."""
    start, call = int(profile.ops.start_ns[row]), int(profile.ops.call[row])
    if start != UNKNOWN:
        return start
    return int(profile.calls.start_ns[call]) if call != UNKNOWN else 0


def _link_pair(
    profile: Profile, numbers: Numbers, drawn: DrawnProfile, pair: UndecidedPair
) -> tuple[UndecidedPair, int]:
    """Arrows from the one that ran first to the other, and from the later one to the mark; the mark's."""
    sides = sorted((pair.earlier, pair.later), key=lambda row: _position(profile, row))
    _arrow(numbers, drawn, sides[0], sides[1])
    flow = numbers()
    drawn.flows[pair.later].append(Flow(flow, True))
    drawn.undecided += 1
    return pair, flow


def _arrow(numbers: Numbers, drawn: DrawnProfile, source: int, target: int) -> None:
    number = numbers()
    drawn.flows[source].append(Flow(number, True))
    drawn.flows[target].append(Flow(number, False))


def _link_fences(profile: Profile, numbers: Numbers, drawn: DrawnProfile) -> None:
    """For each wait whose record is known: from the last operation that the record covers to the first behind the wait.

    Both by when they were issued: what was launched on the record's stream before the record, on the wait's after it.
    """
    calls = profile.calls
    waits = np.flatnonzero((calls.kind == CallKind.STREAM_WAIT) & (calls.record >= 0) & (calls.stream != UNKNOWN))
    if not len(waits):
        return
    issued = _issued_by_stream(profile)
    for wait in waits.tolist():
        record = int(calls.record[wait])
        source, target = int(calls.stream[record]), int(calls.stream[wait])
        if source == target or source not in issued or target not in issued:
            continue
        times, rows = issued[source]
        before = int(np.searchsorted(times, calls.start_ns[record])) - 1
        later_times, later_rows = issued[target]
        behind = int(np.searchsorted(later_times, calls.start_ns[wait], side="right"))
        if before >= 0 and behind < len(later_rows):
            _arrow(numbers, drawn, int(rows[before]), int(later_rows[behind]))
            drawn.arrows += 1


def _issued_by_stream(profile: Profile) -> dict[int, tuple[Int64s, Int64s]]:
    """Of each stream: when its operations were launched, ascending, and their rows; those whose launch is known."""
    ops, calls = profile.ops, profile.calls
    known = np.flatnonzero(ops.call != UNKNOWN)
    known = known[np.isin(calls.kind[ops.call[known]], LAUNCHING)]
    found = {}
    for stream in np.unique(ops.stream[known]).tolist():
        mine = known[ops.stream[known] == stream]
        times = calls.start_ns[ops.call[mine]]
        order = np.argsort(times, kind="stable")
        found[stream] = times[order], mine[order]
    return found
