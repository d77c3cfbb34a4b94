"""Many operations of one thread that go into the ring as one block: a load-back's layers, a round's layer waits.

Eighty layers are eighty copies and eighty event records. Making and packing each on its own takes the launching
thread 3 us apiece; here each is a number in a list, and the block's fixed part is made once and kept. In the ring
they are the same records, in the same order.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from hicache_obs.recorder.event_state import EventState, Generation
from hicache_obs.records import (
    ALL_LAYERS,
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
LAYER_BITS: Final = 31
"""A step is a part and a range of layers: ``part << 2 * LAYER_BITS | begin << LAYER_BITS | end``."""
_LAYER_MASK: Final = (1 << LAYER_BITS) - 1
MAX_SINGLE_LAYERS: Final = 512
"""Layers beyond are noted one by one."""
MAX_SHAPES: Final = 64
"""Fixed parts that are kept: a server has a few, for its layer events are used in turn."""


@lru_cache(maxsize=16)
def single_layers(part: int) -> tuple[int, ...]:
    """The steps ``part`` of layer n alone, by n; the same objects each time, as ``EventState.step``."""
    base = part << 2 * LAYER_BITS
    return tuple([base | layer << LAYER_BITS | layer + 1 for layer in range(MAX_SINGLE_LAYERS)])


def segment_step(begin: int, end: int) -> int:
    """The step of layers ``[begin, end)`` of the first part."""
    if end == begin + 1 and end <= MAX_SINGLE_LAYERS:
        return _FIRST_PART[begin]
    return begin << LAYER_BITS | end


_FIRST_PART: Final = single_layers(0)


Step: TypeAlias = int | EventState
"""See ``Batch.steps``."""
THE_REST: Final = -(1 << 63)
"""The step of the layers behind the last wait."""


@dataclass(frozen=True, slots=True)
class Measured:
    """An event pair around one operation, and the device whose clock it is on."""

    probe: Probe
    device: Device


Rows = Words | slice
"""Rows of a block: a slice where they are evenly spaced, which numpy writes to much faster."""


@dataclass(slots=True)
class Block:
    """Records that go into a ring together. Whoever has room for them lets it be filled.

    Attributes:
        fixed: ``(n, SLOT_BYTES / 8) int64``, the slots without numbers of their own; shared, never written to.
        parts: Accesses, the rows that have them, and their size in bytes.
        thread, host_ns: Of the first record.
        op: The first record's.
        step_ns: Between two records.
        group: Of all kernels or copies.
    """

    fixed: Words
    parts: list[tuple[tuple[Access, ...], Rows, int]]
    thread: ThreadId
    host_ns: int
    op: int
    step_ns: int
    group: int

    def __len__(self) -> int:
        return len(self.fixed)

    def fill(self, words: Words, cells: list[Words]) -> None:
        """Make ``words``, as large as ``fixed``, the slots; ``cells`` are the parts' access cells as words."""
        words[:] = self.fixed
        ops = words[:, _OP]
        # The rows count from 0 in the place of their operation.
        words[:, _HOST_NS] = ops * self.step_ns + self.host_ns
        ops += self.op
        for (_, rows, size_bytes), cell in zip(self.parts, cells, strict=True):
            words[rows, _GROUP] = self.group
            words[rows, _SIZE] = size_bytes
            words[rows, CELLS_WORD : CELLS_WORD + len(cell)] = cell


@dataclass(frozen=True, slots=True)
class Learned:
    """The batch of a transfer that was observed layer by layer. A later one of the same pools and events is the same.

    Attributes:
        steps, states: As in ``Batch``; shared, never written to.
        parts: How many there were.
        generation: Of these events.
    """

    steps: list[Step]
    states: list[EventState]
    parts: int
    generation: Generation


def learn(batch: Batch) -> Learned | None:
    """What ``batch``, which is in the ring, says of the next; ``None`` if its events are of several generations."""
    generation = (batch.states[0].shared if batch.states else None) or Generation()
    if not batch.states or not all(event.share(generation) for event in batch.states):
        return None
    return Learned(batch.steps, batch.states, len(batch.parts), generation)


class Batch:
    """Operations of one thread on one stream that are not in the ring yet. For that thread only.

    Args:
        stream: Where they are queued.
        site: Name of the code site of its kernels or copies.
        group: Round or transfer id.
        direction: Of its copies; ``None``: it has kernels, and its events are waited for, not recorded.
        began_ns: Host clock now. The records' ``host_ns`` are spread evenly from here to when the block is made: a
            clock call each would be a fifth of what they cost.
    """

    __slots__ = (
        "began_ns",
        "direction",
        "first_layer",
        "group",
        "here",
        "layers",
        "learned",
        "parts",
        "pool",
        "raw",
        "seen",
        "site",
        "states",
        "step",
        "steps",
        "stream",
        "there",
        "work_base",
    )

    def __init__(self, stream: Stream, site: str, group: int, direction: Direction | None, began_ns: int) -> None:
        self.stream: Final = stream
        self.site: Final = site
        self.group: Final = group
        self.direction: Final = direction
        self.pool: object = None
        self.there: object = None
        self.here: object = None
        """What the caller recognises the part by that is in use: a host pool, indices of it and of the device's."""
        self.parts: list[tuple[tuple[Access, ...], int]] = []
        """Accesses and sizes in bytes; kernels and copies have one of them each."""
        self.steps: list[Step] = []
        """A kernel or copy as part and layer range, an event that is recorded as its negative id; of a round, whose
        waits divide it, the events it waited for and at the end ``THE_REST``."""
        self.step: Final = self.steps.append
        """One attribute less where it counts."""
        self.first_layer = 0
        """Of a round: the first layer that it has not launched yet."""
        self.states: list[EventState] = []
        """Of events whose record is not in the ring yet: their versions stay odd until it is."""
        self.raw: object = None
        """Of a round: the engine's own object for ``stream``."""
        self.learned: Learned | None = None
        """What these copies are taken to be; then only the events' records are counted."""
        self.seen = 0
        """How many of these there were."""
        self.began_ns: Final = began_ns
        self.work_base = 0
        """Bits of the part in use, for a step."""
        self.layers = single_layers(0)
        """Steps of one layer each, of the part in use."""

    def use(self, accesses: tuple[Access, ...], size_bytes: int) -> None:
        """The kernels or copies from here on have these accesses, an object that stays the same, and this size."""
        numbers = [n for n, known in enumerate(self.parts) if known[0] is accesses and known[1] == size_bytes]
        if not numbers:
            numbers.append(len(self.parts))
            self.parts.append((accesses, size_bytes))
        self.work_base = numbers[0] << (2 * LAYER_BITS)
        self.layers = single_layers(numbers[0])

    def work(self, begin: int, end: int) -> None:
        """A kernel or copy of layers ``[begin, end)`` is launched, with the accesses of the last ``use``."""
        self.steps.append(self.work_base | begin << LAYER_BITS | end)

    def record(self, event: EventState) -> None:
        """``event`` is recorded on the stream, in a batch of copies."""
        event.version += 1
        if event.known_to:
            event.known_to.clear()
        self.states.append(event)
        self.steps.append(event.step)

    def follow(self, learned: Learned) -> None:
        """This will be what ``learned`` was, but for its pages: copies are not noted any more, events are counted."""
        self.learned = learned
        self.steps = learned.steps
        learned.generation.times += 1

    def close(self) -> None:
        """It is in the ring, or lost: what it has recorded is settled."""
        if self.learned is not None:
            self.learned.generation.times += 1
        for event in self.states:
            event.version += 1

    @property
    def whole(self) -> bool:
        """Whether all of what it follows was seen; true if it follows nothing."""
        learned = self.learned
        return learned is None or (self.seen == len(learned.states) and len(self.parts) == learned.parts)

    def next_layer(self) -> int:
        """The first layer that a round has not launched: of those it has waited for, the last."""
        return max((event.layer for event in self.waited()), default=self.first_layer)

    def waited(self) -> list[EventState]:
        """What a round has waited for."""
        return [step for step in self.steps if isinstance(step, EventState)]


class Shapes:
    """The fixed parts of blocks, by what they are made of. Not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[list[Step], Words, list[Rows]]] = {}

    def block(self, batch: Batch, op: int, thread: ThreadId, site: int, now_ns: int) -> Block:
        """``batch``, which ends now, as a block whose first record is operation ``op``."""
        counts = tuple([len(accesses) for accesses, _ in batch.parts])
        steps = batch.steps
        # The ends tell the engine's sets of layer events apart; a key of all the steps takes longer than their packing.
        ends = steps[0], steps[-1], steps[len(steps) // 2], len(steps)
        key = (thread, batch.stream.stream_id, site, batch.direction, batch.first_layer, counts, ends)
        known = self._known.get(key)
        if known is None or (known[0] is not steps and known[0] != steps):
            if known is None and len(self._known) >= MAX_SHAPES:
                del self._known[next(iter(self._known))]
            known = self._known[key] = (steps, *_shape(batch, thread, site, counts))
        _, fixed, rows = known
        began_ns = batch.began_ns
        parts = [(accesses, having, size) for (accesses, size), having in zip(batch.parts, rows, strict=True)]
        return Block(fixed, parts, thread, began_ns, op, (now_ns - began_ns) // len(fixed), batch.group)


def _shape(batch: Batch, thread: ThreadId, site: int, counts: tuple[int, ...]) -> tuple[Words, list[Rows]]:
    """The records of ``batch`` without numbers of their own, and the rows of each part."""
    stream, direction = batch.stream.stream_id, batch.direction
    work, event, purpose = (
        (_number(Kernel), _number(EventWait), Purpose.LAYER)
        if direction is None
        else (_number(Memcpy), _number(EventRecord), 0)
    )
    steps = _plain_steps(batch.steps, batch.first_layer)
    packed = bytearray(len(steps) * SLOT_BYTES)
    rows: list[list[int]] = [[] for _ in counts]
    for row, step in enumerate(steps):
        place = row * SLOT_BYTES
        if step < 0:
            _pack(packed, place, event, 0, purpose, thread, row, 0, -step, stream, 0, 0, 0, 0)
            continue
        part, begin, end = step >> 2 * LAYER_BITS, step >> LAYER_BITS & _LAYER_MASK, step & _LAYER_MASK
        rows[part].append(row)
        _pack(packed, place, work, counts[part], direction or 0, thread, row, 0, stream, site, 0, 0, begin, end)
    fixed = np.frombuffer(packed, dtype="<i8").reshape(-1, _WORDS).astype(np.int64, copy=False)
    return fixed, [_evenly(having) for having in rows]


def _plain_steps(steps: list[Step], begin: int) -> list[int]:
    """``steps`` with the segments that a round's waits end; a second wait for an event orders nothing more."""
    found: list[int] = []
    waited: set[EventState] = set()
    for step in steps:
        if isinstance(step, int):
            if step == THE_REST:
                step = segment_step(begin, ALL_LAYERS[1])
            elif step >= 0:
                begin = step & _LAYER_MASK
            found.append(step)
        elif step not in waited:
            waited.add(step)
            if step.layer > begin:
                found.append(segment_step(begin, step.layer))
                begin = step.layer
            found.append(step.step)
    return found


def _evenly(rows: list[int]) -> Rows:
    """``rows``, ascending, as a slice if they are one."""
    step = rows[1] - rows[0] if len(rows) > 1 else 1
    even = bool(rows) and rows == list(range(rows[0], rows[-1] + 1, step))
    return slice(rows[0], rows[-1] + 1, step) if even else np.array(rows, dtype=np.int64)


def _number(kind: type[Record]) -> int:
    return KINDS.index(kind)
