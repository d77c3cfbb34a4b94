"""Many operations of one thread that go into the ring as one block: a load-back's layers, a round's layer waits.

Eighty layers are eighty copies and eighty event records. Making and packing each on its own takes the launching
thread 3 us apiece; here each is a number in a list, and the block's fixed part is made once and kept. In the ring
they are the same records, in the same order.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.recorder.event_state import EventState
from hicache_obs.records import (
    KINDS,
    SLOT_BYTES,
    Access,
    Direction,
    EventRecord,
    EventWait,
    Kernel,
    Memcpy,
    Purpose,
    Record,
    ThreadId,
)
from hicache_obs.streams.protocol import Device, Probe, Stream

Words = npt.NDArray[np.int64]
_WORDS: Final = SLOT_BYTES // 8
_OP, _HOST_NS, _GROUP, _SIZE, CELLS_WORD = 1, 2, 5, 6, 8
"""Words of a slot (``records`` has the layout); the access cells begin at ``CELLS_WORD``, two words each."""
_pack: Final = struct.Struct("<BBHIqqqqqqii").pack_into
_LAYER_BITS: Final = 31
_LAYER_MASK: Final = (1 << _LAYER_BITS) - 1
MAX_SHAPES: Final = 64
"""Fixed parts that are kept: a server has a few, for its layer events are used in turn."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An event pair around one operation, and the device whose clock it is on."""

    probe: Probe
    device: Device


@dataclass(slots=True)
class Block:
    """Packed records, whole but for the access cells, which whoever writes them fills in.

    Attributes:
        words: ``(n, SLOT_BYTES / 8) int64``, one row per record.
        parts: Accesses, and the rows that have them.
        thread, host_ns: Of the first record.
    """

    words: Words
    parts: list[tuple[tuple[Access, ...], Words]]
    thread: ThreadId
    host_ns: int


class Batch:
    """Operations of one thread on one stream that are not in the ring yet. For that thread only.

    Args:
        stream: Where they are queued.
        site: Name of the code site of its kernels or copies.
        group: Round or transfer id.
        direction: Of its copies; ``None``: it has kernels, and its events are waited for, not recorded.
        clock: Of the records' ``host_ns``.
    """

    __slots__ = (
        "_clock",
        "_part",
        "direction",
        "group",
        "measured",
        "parts",
        "same",
        "site",
        "states",
        "steps",
        "stream",
        "times",
    )

    def __init__(
        self, stream: Stream, site: str, group: int, direction: Direction | None, clock: Callable[[], int]
    ) -> None:
        self.stream: Final = stream
        self.site: Final = site
        self.group: Final = group
        self.direction: Final = direction
        self.same: tuple[object, ...] = ()
        """What the caller recognises the part by that is in use."""
        self.parts: list[tuple[tuple[Access, ...], int]] = []
        """Accesses and sizes in bytes; kernels and copies have one of them each."""
        self.steps: list[int] = []
        """A kernel or copy as part and layer range, an event as its negative id."""
        self.times: list[int] = []
        self.states: list[EventState] = []
        """Of events whose record is not in the ring yet: their versions stay odd until it is."""
        self.measured: list[tuple[int, Measured]] = []
        self._clock = clock
        self._part = 0

    def use(self, accesses: tuple[Access, ...], size_bytes: int, same: tuple[object, ...]) -> None:
        """The kernels or copies from here on have these accesses, an object that stays the same, and this size."""
        numbers = [n for n, known in enumerate(self.parts) if known[0] is accesses and known[1] == size_bytes]
        if not numbers:
            numbers.append(len(self.parts))
            self.parts.append((accesses, size_bytes))
        self._part = numbers[0] << (2 * _LAYER_BITS)
        self.same = same

    def work(self, begin: int, end: int, measured: Measured | None = None) -> None:
        """A kernel or copy of layers ``[begin, end)`` is launched, with the accesses of the last ``use``."""
        if measured is not None:
            self.measured.append((len(self.steps), measured))
        self.steps.append(self._part | begin << _LAYER_BITS | end)
        self.times.append(self._clock())

    def record(self, event: EventState) -> None:
        """``event`` is recorded on the stream, in a batch of copies."""
        event.version += 1
        event.known_to.clear()
        self.states.append(event)
        self.steps.append(-event.event_id)
        self.times.append(self._clock())

    def wait(self, event: EventState) -> None:
        """The stream waits for ``event``, the end of one layer of a transfer, in a batch of kernels."""
        self.steps.append(-event.event_id)
        self.times.append(self._clock())


class Shapes:
    """The fixed parts of blocks, by what they are made of. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[Words, list[Words]]] = {}

    def block(self, batch: Batch, op: int, thread: ThreadId, site: int) -> Block:
        """``batch`` as a block whose first record is operation ``op``."""
        counts = tuple([len(accesses) for accesses, _ in batch.parts])
        key = (thread, batch.stream.stream_id, site, batch.direction, counts, tuple(batch.steps))
        known = self._known.get(key)
        if known is None:
            if len(self._known) >= MAX_SHAPES:
                del self._known[next(iter(self._known))]
            known = self._known[key] = _shape(batch, thread, site, counts)
        fixed, rows = known
        words = fixed.copy()
        words[:, _OP] += op
        words[:, _HOST_NS] = batch.times
        parts = []
        for (accesses, size_bytes), having in zip(batch.parts, rows, strict=True):
            words[having, _GROUP] = batch.group
            words[having, _SIZE] = size_bytes
            parts.append((accesses, having))
        return Block(words, parts, thread, batch.times[0])


def _shape(batch: Batch, thread: ThreadId, site: int, counts: tuple[int, ...]) -> tuple[Words, list[Words]]:
    """The records of ``batch`` without numbers of their own, and the rows of each part."""
    stream, direction = batch.stream.stream_id, batch.direction
    work, event, purpose = (
        (_number(Kernel), _number(EventWait), Purpose.LAYER)
        if direction is None
        else (_number(Memcpy), _number(EventRecord), 0)
    )
    packed = bytearray(len(batch.steps) * SLOT_BYTES)
    rows: list[list[int]] = [[] for _ in counts]
    for row, step in enumerate(batch.steps):
        place = row * SLOT_BYTES
        if step < 0:
            _pack(packed, place, event, 0, purpose, thread, row, 0, -step, stream, 0, 0, 0, 0)
            continue
        part, begin, end = step >> 2 * _LAYER_BITS, step >> _LAYER_BITS & _LAYER_MASK, step & _LAYER_MASK
        rows[part].append(row)
        _pack(packed, place, work, counts[part], direction or 0, thread, row, 0, stream, site, 0, 0, begin, end)
    fixed = np.frombuffer(packed, dtype="<i8").reshape(-1, _WORDS).astype(np.int64, copy=False)
    return fixed, [np.array(having, dtype=np.int64) for having in rows]


def _number(kind: type[Record]) -> int:
    return KINDS.index(kind)
