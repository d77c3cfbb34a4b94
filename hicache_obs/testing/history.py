"""Histories in one line: a notation for stream programs, and the records it stands for.

Steps are separated by spaces and happen in that order on one host thread::

    F:w5,6r1@0   operation on stream F: writes pages 5 and 6, reads page 1, layer 0 (``@0-2`` layers 0 to 2,
                 nothing: all layers). Streams starting with ``L`` run load-back copies, with ``B`` write-back
                 copies, others kernels. ``W`` and ``R`` name host pages.
    L<F          L.wait_stream(F)            L<<F   the same as a load fence (``B<<F``: a write fence)
    e=F          e.record(F)                 L<e    L.wait_event(e); events are lower case
    h<e          e.synchronize()             h<F    F.synchronize()      h<*   device synchronize
    h?e          e.query() is true           h!e    e.query() is false
    h+5,6        device pages 5 and 6 are given out    h-5,6    ... and given away
    ~3           three records were lost here

``F:w5 L:w5`` is the race this project began with; ``F:w5 L<F L:w5`` is its fix.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from hicache_obs.errors import TraceError
from hicache_obs.records import (
    ALL_LAYERS,
    Access,
    Define,
    DefineSpace,
    Direction,
    DropReason,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    HostSync,
    Kernel,
    Lost,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    Purpose,
    Record,
    Space,
    StreamId,
    ThreadId,
    WaitStream,
    page_ids,
)

_OPERATION: Final = re.compile(
    r"(?P<stream>[A-Z]\w*):(?P<parts>(?:[wrWR]\d+(?:,\d+)*)+)(?:@(?P<lo>\d+)(?:-(?P<hi>\d+))?)?"
)
_PART: Final = re.compile(r"([wrWR])(\d+(?:,\d+)*)")
_ORDER: Final = re.compile(r"(?P<left>\w+)(?P<sign><<|<|=|\?|!)(?P<right>\w+|\*)")
_OWNER: Final = re.compile(r"h(?P<sign>[+-])(?P<pages>\d+(?:,\d+)*)")
_LOST: Final = re.compile(r"~(\d+)")
_THREAD: Final = ThreadId(0)
_Head = tuple[OpId, ThreadId, int]
STEP_NS: Final = 1000
"""Host time per step."""


class History:
    """Records of one notation string.

    Attributes:
        text: The notation.
        steps: Step text by operation id, for messages.
        records: In issue order, names first.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.steps: dict[OpId, str] = {}
        self._names: dict[tuple[DefineSpace, str], int] = {}
        self._arrays: dict[str, PageIds] = {}
        self.records: list[Record] = []
        body = [self._step(OpId(number), step) for number, step in enumerate(text.split())]
        self.records = [*self._defines(), *body]

    def _step(self, op: OpId, step: str) -> Record:
        self.steps[op] = step
        head = op, _THREAD, op * STEP_NS
        if match := _OPERATION.fullmatch(step):
            return self._operation(match, head)
        if match := _ORDER.fullmatch(step):
            return self._order(match["left"], match["sign"], match["right"], head, step)
        if match := _OWNER.fullmatch(step):
            access = Access(Space.DEVICE, Mode.WRITE, self._pages(match["pages"]))
            return (PageAlloc if match["sign"] == "+" else PageFree)(*head, owner=0, access=access)
        if match := _LOST.fullmatch(step):
            return Lost(*head, count=int(match[1]), reason=DropReason.RING_FULL)
        raise TraceError(
            f"history step {step!r}: expected an operation, a wait, a record, a sync, an allocation or a loss"
        )

    def _operation(self, match: re.Match[str], head: _Head) -> Record:
        name = match["stream"]
        accesses = tuple(
            Access(
                Space.HOST if part.isupper() else Space.DEVICE,
                Mode.WRITE if part in "wW" else Mode.READ,
                self._pages(pages),
            )
            for part, pages in _PART.findall(match["parts"])
        )
        low = match["lo"]
        layers = ALL_LAYERS if low is None else (int(low), int(match["hi"] or low) + 1)
        stream, site = self._stream(name), self._id(DefineSpace.SITE, f"{name} work")
        fields = (*head, stream, site, int(head[0]), 0, layers, accesses)
        if name[0] in "LB":
            direction = Direction.HOST_TO_DEVICE if name[0] == "L" else Direction.DEVICE_TO_HOST
            return Memcpy(*fields, direction=direction)
        return Kernel(*fields)

    def _order(self, left: str, sign: str, right: str, head: _Head, step: str) -> Record:
        if sign == "=":
            return EventRecord(*head, event=self._event(left), stream=self._stream(right))
        if left == "h":
            if sign in "?!":
                return EventQuery(*head, event=self._event(right), result=sign == "?")
            if right == "*":
                return HostSync(*head, stream=None)
            if right[0].isupper():
                return HostSync(*head, stream=self._stream(right))
            return EventSync(*head, event=self._event(right))
        purpose = Purpose.PLAIN
        if sign == "<<":
            purpose = Purpose.WRITE_FENCE if left[0] == "B" else Purpose.LOAD_FENCE
        elif sign != "<":
            raise TraceError(f"history step {step!r}: only the host 'h' can query")
        if right[0].isupper():
            return WaitStream(*head, waiter=self._stream(left), on=self._stream(right), purpose=purpose)
        return EventWait(*head, event=self._event(right), stream=self._stream(left), purpose=purpose)

    def _pages(self, text: str) -> PageIds:
        """Equal lists are one array, as in recorded traces: the analyzer groups steps by it."""
        if text not in self._arrays:
            self._arrays[text] = page_ids(int(page) for page in text.split(","))
        return self._arrays[text]

    def _stream(self, name: str) -> StreamId:
        return StreamId(self._id(DefineSpace.STREAM, name))

    def _event(self, name: str) -> EventId:
        return EventId(self._id(DefineSpace.EVENT, name))

    def _id(self, space: DefineSpace, name: str) -> int:
        return self._names.setdefault((space, name), len(self._names))

    def _defines(self) -> Iterator[Record]:
        for (space, name), ident in self._names.items():
            yield Define(OpId(-1), _THREAD, 0, space=space, id=ident, text=name)
