"""``ChromeWriter``: a timeline as Chrome's JSON trace, which chrome://tracing, Perfetto and many tools read.

Times are microseconds with three decimals since ``otherData.base_ns``, because readers keep them in 53 bits. Every
group without parent is a process, every lane a thread; marks are slices without length, which arrows can end in.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import IO, Any, Final

import msgspec

from hicache_obs.exporters.timeline import Args, Flow, plain_text

MAX_EXACT: Final = 1 << 53
"""Whole numbers from here on are written as text: JavaScript would round them."""
ARROW: Final = "order"


class ChromeWriter:
    """Writes one file, in the order it is told; see ``TimelineWriter``. End it with ``close``.

    Args:
        file: Open for writing bytes; stays open.
        base_ns: Time 0 of the file; nothing in it is earlier.

    Raises:
        OSError: By any method: the file cannot be written.
    """

    def __init__(self, file: IO[bytes], base_ns: int) -> None:
        self._file = file
        self._base_ns = base_ns
        self._process: dict[int, int] = {}
        self._prefix: dict[int, str] = {}
        self._rank: dict[int, int] = {}
        self._tracks: dict[int, int] = {}
        self._counters: dict[int, str] = {}
        self._separator = b'{"displayTimeUnit":"ns","traceEvents":[\n'

    def group(self, number: int, parent: int, name: str, rank: int) -> None:
        """See ``TimelineWriter``."""
        process = self._process[number] = self._process[parent] if parent else rank + 1
        if parent:
            self._prefix[number] = f"{self._prefix[parent]}{plain_text(name)} / "
            self._rank[number] = (self._rank[parent] << 8) + rank
            return
        self._prefix[number], self._rank[number] = "", 0
        self._meta(process, 0, "process_name", "name", plain_text(name))
        self._meta(process, 0, "process_sort_index", "sort_index", rank)

    def track(self, number: int, group: int, name: str, rank: int, *, lane: int = 0) -> None:
        """See ``TimelineWriter``."""
        process = self._tracks[number] = self._process[group]
        text = f"{self._prefix[group]}{plain_text(name)}" + (f" ({lane + 1})" if lane else "")
        self._meta(process, number, "thread_name", "name", text)
        order = ((self._rank[group] << 16) + rank << 8) + lane
        self._meta(process, number, "thread_sort_index", "sort_index", order)

    def counter_track(self, number: int, group: int, name: str, rank: int, unit: str) -> None:
        """See ``TimelineWriter``."""
        self._tracks[number] = self._process[group]
        self._counters[number] = plain_text(name)

    def slice(
        self, track: int, name: str, category: str, start_ns: int, end_ns: int, args: Args, flows: Sequence[Flow] = ()
    ) -> None:
        """See ``TimelineWriter``."""
        where: dict[str, Any] = {"pid": self._tracks[track], "tid": track, "ts": self._micros(start_ns)}
        shown = {plain_text(key): self._value(value) for key, value in args.items()}
        self._put(
            {
                "ph": "X",
                "name": plain_text(name),
                "cat": category,
                **where,
                "dur": _micros(end_ns - start_ns),
                "args": shown,
            }
        )
        for flow in flows:
            arrow = {"cat": ARROW, "name": ARROW, "id": flow.number, **where}
            self._put({"ph": "s", **arrow} if flow.out else {"ph": "f", "bp": "e", **arrow})

    def mark(self, track: int, name: str, category: str, at_ns: int, args: Args, flows: Sequence[Flow] = ()) -> None:
        """See ``TimelineWriter``."""
        self.slice(track, name, category, at_ns, at_ns, args, flows)

    def count(self, track: int, at_ns: int, value: int) -> None:
        """See ``TimelineWriter``."""
        name, args = self._counters[track], {"value": self._value(value)}
        self._put({"ph": "C", "name": name, "pid": self._tracks[track], "ts": self._micros(at_ns), "args": args})

    def close(self) -> None:
        """End the file."""
        if self._separator != b",\n":
            self._file.write(self._separator)
        other = _dumps({"base_ns": str(self._base_ns), "clock": "host clock of the recording"})
        self._file.write(b'\n],"otherData":' + other + b"}\n")

    def _micros(self, at_ns: int) -> msgspec.Raw:
        return _micros(max(0, at_ns - self._base_ns))

    def _value(self, value: int | str) -> int | str:
        if isinstance(value, str):
            return plain_text(value)
        return value if abs(value) < MAX_EXACT else str(value)

    def _meta(self, process: int, thread: int, name: str, key: str, value: int | str) -> None:
        self._put({"ph": "M", "pid": process, "tid": thread, "name": name, "args": {key: value}})

    def _put(self, event: dict[str, Any]) -> None:
        self._file.write(self._separator + _dumps(event))
        self._separator = b",\n"


def _micros(time_ns: int) -> msgspec.Raw:
    """Nanoseconds, not negative, as a JSON number of microseconds; no float comes near it."""
    return msgspec.Raw(b"%d.%03d" % divmod(time_ns, 1000))


def _dumps(value: Any) -> bytes:
    """JSON that may also stand in a web page."""
    return msgspec.json.encode(value).replace(b"<", b"\\u003c")
