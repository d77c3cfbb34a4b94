"""``RecordTimeline``: records as a timeline. Second pass, after ``Links``; an operation is drawn once its times came.

One process per trace. In it: the findings by defect, the device's streams, the host threads with what they called and
when, storage and network transfers, and counters of transfers that are pending and of bytes per second.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.exporters.record_names import call_name, waited_for
from hicache_obs.exporters.timeline import Flow, Lanes, Numbers, TimelineWriter, Value, ids_text
from hicache_obs.exporters.timeline_links import Links
from hicache_obs.records import (
    ALL_LAYERS,
    NO_OP,
    Access,
    AnyRecord,
    Define,
    Direction,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    IoBegin,
    IoEnd,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    Relocate,
    Space,
    StreamId,
    ThreadId,
    Times,
    WaitStream,
)
from hicache_obs.trace import Names

MAX_PENDING: Final = 1 << 16
"""Operations whose device times may still come; the oldest are drawn without."""
MAX_IOS: Final = 1 << 12
MAX_TEXTS: Final = 64
"""Page arrays whose text is kept; it keeps the arrays, too."""
STEP_NS: Final = 1000
"""Between two records where the source has no clock at all."""
MAX_RATE: Final = 1 << 50
"""Bytes per second that a damaged file may claim of one copy."""
_TRANSFERS: Final = {Direction.HOST_TO_DEVICE: "load-back", Direction.DEVICE_TO_HOST: "write-back"}
_SPACES: Final = {Space.DEVICE: "pages", Space.HOST: "host pages", Space.BUFFER: "buffers"}
_RANKS: Final = {"findings": 0, "counters": 1, "streams": 2, "threads": 3, "io": 4}
_Work = Kernel | Memcpy | GraphReplay | Relocate
_Wait = EventWait | WaitStream
_Args = dict[str, Value]


class RecordTimeline:
    """Draws one trace. Feed it all records in order, then ``finish``.

    Args:
        writer: Where to draw.
        numbers: The same that ``links`` has.
        name: Of the process: where the records come from.
        rank: Place among the processes.
        links: The arrows, found before.
        labels: As in ``Trace``.
    """

    def __init__(
        self,
        writer: TimelineWriter,
        numbers: Numbers,
        name: str,
        rank: int,
        links: Links,
        labels: Mapping[OpId, str],
    ) -> None:
        self._writer = writer
        self._numbers = numbers
        self._links = links
        self._labels = labels
        self._names = Names()
        self._process = numbers()
        writer.group(self._process, 0, name, rank)
        self._groups: dict[str, int] = {}
        self._streams: dict[StreamId, Lanes] = {}
        self._threads: dict[ThreadId, Lanes] = {}
        self._io = Lanes(writer, numbers, self._process, "storage and network", _RANKS["io"])
        self._pending: OrderedDict[OpId, _Work | _Wait] = OrderedDict()  # whose oldest goes in no time
        self._ios: OrderedDict[int, IoBegin] = OrderedDict()
        self._texts: dict[int, tuple[PageIds, str]] = {}
        self._transfers = _Transfers()
        self._position = 0
        self._clockless = not (links.host_times or links.measured)
        self.operations = 0

    @property
    def streams(self) -> int:
        """Streams drawn so far."""
        return len(self._streams)

    def feed(self, records: Sequence[AnyRecord]) -> None:
        """Draw the next records."""
        for record in records:
            self._position += 1
            if isinstance(record, Define):
                self._names.learn(record)
            elif isinstance(record, Times):
                self._timed(record)
            elif isinstance(record, (Kernel, Memcpy, GraphReplay, Relocate, EventWait, WaitStream)):
                self._issued(record)
            elif isinstance(record, IoBegin):
                self._begin_io(record)
            elif isinstance(record, IoEnd):
                self._end_io(record)
            elif not isinstance(record, GraphNode):
                self._called(record)

    def finish(self) -> None:
        """Draw what is left: operations without times, findings, counters."""
        while self._pending:
            self._untimed(self._pending.popitem(last=False)[1])
        for begun in self._ios.values():
            self._io.mark(self._names.ios.get(begun.io, "transfer"), "io", self._at(begun), self._about(begun))
        self._draw_findings()
        self._draw_counters()

    # -- operations ------------------------------------------------------------------------------------------

    def _issued(self, record: _Work | _Wait) -> None:
        self._thread(record.thread).mark(
            self._call_name(record), "call", self._at(record), {"op": record.op}, self._flows_of_call(record)
        )
        if isinstance(record, (Kernel, Memcpy, GraphReplay, Relocate)):
            self.operations += 1
            if self._clockless:
                self._draw(record, self._at(record), None, self._about(record))
                return
        if record.op != NO_OP:
            self._pending[record.op] = record
            if len(self._pending) > MAX_PENDING:
                self._untimed(self._pending.popitem(last=False)[1])

    def _flows_of_call(self, record: _Work | _Wait) -> Sequence[Flow]:
        """A wait's own arrows end in the call; those of work in the work."""
        return self._links.of(record.op) if isinstance(record, (EventWait, WaitStream)) else ()

    def _timed(self, times: Times) -> None:
        record = self._pending.pop(times.op, None)
        if record is None:
            return
        if isinstance(record, (EventWait, WaitStream)):
            if times.end_ns > times.start_ns:
                stream = record.stream if isinstance(record, EventWait) else record.waiter
                name = f"wait: {waited_for(self._names, record)}"
                self._stream(stream).slice(name, "fence", times.start_ns, times.end_ns, self._about_wait(record))
            return
        if isinstance(record, Memcpy) and record.direction in _TRANSFERS:
            self._transfers.add(record, times)
        self._draw(record, times.start_ns, times.end_ns, {**self._about(record), "error_ns": times.error_ns})

    def _untimed(self, record: _Work | _Wait) -> None:
        if not isinstance(record, (EventWait, WaitStream)):
            self._draw(record, self._at(record), None, {**self._about(record), "measured": "no, drawn where issued"})

    def _draw(self, record: _Work, start_ns: int, end_ns: int | None, args: _Args) -> None:
        stream, name, flows = self._stream(record.stream), self._name(record), self._links.of(record.op)
        if end_ns is None:
            stream.mark(name, "device", start_ns, args, flows)
        else:
            stream.slice(name, "device", start_ns, end_ns, args, flows)

    def _name(self, record: _Work) -> str:
        site = self._names.site(record.site)
        if isinstance(record, GraphReplay):
            return f"graph replay: {self._names.graphs.get(record.graph, site)}"
        return site

    def _about(self, record: _Work | IoBegin | HostAccess) -> _Args:
        args: _Args = {"op": record.op}
        if record.op in self._labels:
            args["label"] = self._labels[record.op]
        if isinstance(record, (Kernel, Memcpy, GraphReplay)):
            args["transfer" if isinstance(record, Memcpy) else "round"] = record.group
        if isinstance(record, (Kernel, Memcpy)) and record.size_bytes:
            args["bytes"] = record.size_bytes
        if record.layers != ALL_LAYERS:
            args["layers"] = f"{record.layers[0]}-{record.layers[1] - 1}"
        for access in record.accesses:
            args[self._memory(access)] = self._ids(access.ids)
        args["thread"] = self._names.thread(record.thread)
        args["issued_ns"] = record.host_ns
        return args

    def _ids(self, ids: PageIds) -> str:
        """Text of an array; the layers of a transfer share one."""
        known = self._texts.get(id(ids))
        if known is not None and known[0] is ids:
            return known[1]
        if len(self._texts) == MAX_TEXTS:
            self._texts.clear()
        text = ids_text(ids)
        self._texts[id(ids)] = ids, text
        return text

    def _memory(self, access: Access) -> str:
        pools = self._names.host_pools if access.space is Space.HOST else self._names.pools
        pool = f" of {pools.get(access.pool, access.pool)}" if access.pool else ""
        return f"{'reads' if access.mode is Mode.READ else 'writes'} {_SPACES[access.space]}{pool}"

    # -- host calls ------------------------------------------------------------------------------------------

    def _called(self, record: AnyRecord) -> None:
        args: _Args = {} if record.op == NO_OP else {"op": record.op}
        if isinstance(record, HostAccess):
            args = self._about(record)
        elif isinstance(record, (PageAlloc, PageFree)):
            args |= {"owner": record.owner, _SPACES[record.access.space]: self._ids(record.access.ids)}
        self._thread(record.thread).mark(
            self._call_name(record), "call", self._at(record), args, self._links.of(record.op)
        )

    def _call_name(self, record: AnyRecord) -> str:
        if isinstance(record, (Kernel, Memcpy, Relocate, GraphReplay)):
            return f"launch {self._name(record)}"
        return call_name(self._names, record)

    def _about_wait(self, record: _Wait) -> _Args:
        return {"op": record.op, "thread": self._names.thread(record.thread), "issued_ns": record.host_ns}

    # -- storage and network ---------------------------------------------------------------------------------

    def _begin_io(self, record: IoBegin) -> None:
        self._ios[record.io] = record
        if len(self._ios) > MAX_IOS:
            _, begun = self._ios.popitem(last=False)
            self._io.mark(self._io_name(begun), "io", self._at(begun), self._about(begun))

    def _end_io(self, record: IoEnd) -> None:
        begun = self._ios.pop(record.io, None)
        if begun is not None:
            args, flows = self._about(begun), self._links.of(begun.op)
            self._io.slice(self._io_name(begun), "io", begun.host_ns, record.host_ns, args, flows)

    def _io_name(self, record: IoBegin) -> str:
        return f"{record.kind.name.lower().replace('_', ' ')}: {self._names.site(record.site)}"

    # -- tracks ----------------------------------------------------------------------------------------------

    def _at(self, record: AnyRecord) -> int:
        return self._position * STEP_NS if self._clockless else record.host_ns

    def _group(self, name: str) -> int:
        if name not in self._groups:
            self._groups[name] = self._numbers()
            self._writer.group(self._groups[name], self._process, name, _RANKS[name])
        return self._groups[name]

    def _stream(self, stream: StreamId) -> Lanes:
        if stream not in self._streams:
            name, rank = self._names.stream(stream), len(self._streams)
            self._streams[stream] = Lanes(self._writer, self._numbers, self._group("streams"), name, rank)
        return self._streams[stream]

    def _thread(self, thread: ThreadId) -> Lanes:
        if thread not in self._threads:
            name, rank = self._names.thread(thread), len(self._threads)
            self._threads[thread] = Lanes(self._writer, self._numbers, self._group("threads"), name, rank)
        return self._threads[thread]

    # -- at the end ------------------------------------------------------------------------------------------

    def _draw_findings(self) -> None:
        tracks: dict[str, Lanes] = {}
        for finding in self._links.findings:
            if finding.title not in tracks:
                group, rank = self._group("findings"), len(tracks)
                tracks[finding.title] = Lanes(self._writer, self._numbers, group, finding.title, rank)
            track = tracks[finding.title]
            if finding.end_ns > finding.start_ns:
                track.slice(finding.name, "finding", finding.start_ns, finding.end_ns, finding.args, finding.flows)
            else:
                track.mark(finding.name, "finding", finding.start_ns, finding.args, finding.flows)

    def _draw_counters(self) -> None:
        for direction, name in _TRANSFERS.items():
            for text, unit, moments, values in self._transfers.counters(direction, name):
                track = self._numbers()
                self._writer.counter_track(track, self._group("counters"), text, track, unit)
                for at_ns, value in zip(moments.tolist(), values.tolist(), strict=True):
                    self._writer.count(track, at_ns, value)


_Int64s = npt.NDArray[np.int64]


class _Transfers:
    """Times and sizes of all copies between host and device: 48 bytes each."""

    def __init__(self) -> None:
        self._values = {direction: array("q") for direction in _TRANSFERS}

    def add(self, record: Memcpy, times: Times) -> None:
        issued = min(record.host_ns, times.start_ns)
        self._values[record.direction].extend((record.group, issued, times.start_ns, times.end_ns, record.size_bytes))

    def counters(self, direction: Direction, name: str) -> list[tuple[str, str, _Int64s, _Int64s]]:
        """Name, unit, moments and values of each counter; none without copies."""
        rows = np.frombuffer(self._values[direction], np.int64).reshape(-1, 5)
        if not len(rows):
            return []
        group, issued, start, end, size = rows.T
        _, which = np.unique(group, return_inverse=True)
        first = np.full(which.max() + 1, np.iinfo(np.int64).max)
        last = np.full(which.max() + 1, np.iinfo(np.int64).min)
        np.minimum.at(first, which, issued)
        np.maximum.at(last, which, end)
        pending = _steps(np.concatenate((first, last)), np.repeat((1, -1), len(first)))
        found = [(f"pending {name}s", "", *pending)]
        long = (end > start) & (size > 0)
        if long.any():
            rate = np.minimum(size[long] * 1e9 / (end - start)[long], MAX_RATE).astype(np.int64)
            steps = _steps(np.concatenate((start[long], end[long])), np.concatenate((rate, -rate)))
            found.append((f"{name} bytes/s", "B/s", *steps))
        return found


def _steps(moments: _Int64s, changes: _Int64s) -> tuple[_Int64s, _Int64s]:
    """Moments at which a sum of changes has a new value, and the values."""
    order = np.argsort(moments, kind="stable")
    moments, values = moments[order], np.cumsum(changes[order])
    last = np.append(moments[1:] != moments[:-1], True)
    return moments[last], values[last]
