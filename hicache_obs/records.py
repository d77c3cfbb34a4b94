"""Every record kind and its fixed binary layout: the one schema of the whole product.

A process under observation writes these records to its ring file; readers yield them; the analyzer consumes
them. A trace is their sequence in issue order. The meaning of each kind follows CUDA's stream semantics
(docs/analyzer.md lists the rules and their sources).

Layout of one ring slot, ``SLOT_BYTES`` long, little endian::

    0   u8  kind        1  u8 accesses (0-4)    2  u16 aux       4  u32 thread
    8   i64 op          16 i64 host_ns          24 i64 a   32 i64 b   40 i64 c   48 i64 d
    56  i32 layer_lo    60 i32 layer_hi
    64  four access cells of 16 bytes: u8 space | u8 mode | u16 pool | u32 count | u64 arena position
        (a ``Define`` record keeps up to 64 bytes of UTF-8 text here instead)

Units: times are integer nanoseconds, sizes integer bytes. ``host_ns`` is the host clock at the call; device
times arrive later in a ``Times`` record, on the same clock, with a stated error.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

OpId = NewType("OpId", int)
StreamId = NewType("StreamId", int)
EventId = NewType("EventId", int)
ThreadId = NewType("ThreadId", int)
PageIds = npt.NDArray[np.int64]

SLOT_BYTES: Final = 128
MAX_ACCESSES: Final = 4
ALL_LAYERS: Final = (0, 2**31 - 1)
"""Layer range of an access that does not say which layers it touches. Ranges are half open."""
NO_OP: Final = OpId(-1)


class Space(enum.IntEnum):
    """What an id in an access counts. Equal numbers in different spaces or pools are different things."""

    DEVICE = 0
    """A page of a device KV pool."""
    HOST = 1
    """A page of a pinned host KV pool."""
    BUFFER = 2
    """A named buffer or allocator block (index tensor, staging buffer, flag)."""


class Mode(enum.IntEnum):
    """What an access does."""

    READ = 0
    WRITE = 1


class Direction(enum.IntEnum):
    """Direction of a ``Memcpy``."""

    HOST_TO_DEVICE = 0
    DEVICE_TO_HOST = 1
    DEVICE_TO_DEVICE = 2


class Purpose(enum.IntEnum):
    """Why a wait was issued. Never changes what the wait orders."""

    PLAIN = 0
    LOAD_FENCE = 1
    """A load-back's transfer stream waits for forward rounds."""
    WRITE_FENCE = 2
    """A write-back's transfer stream waits for forward rounds."""
    LAYER = 3
    """A forward round waits for one layer of a load-back."""
    START = 4
    """A transfer waits for the start event of its submission."""


class DefineSpace(enum.IntEnum):
    """What a ``Define`` record gives a name to."""

    STREAM = 0
    EVENT = 1
    THREAD = 2
    SITE = 3
    POOL = 4
    BUFFER = 5
    ENGINE = 6
    REQUEST = 7
    CHANNEL = 8


class StreamKind(enum.IntEnum):
    """CUDA stream kinds; decides the implicit order with the legacy default stream."""

    NONBLOCKING = 0
    BLOCKING = 1
    LEGACY = 2


class DropReason(enum.IntEnum):
    """Why records were lost. The metric label is the lower-case name."""

    RING_FULL = 0
    ARENA_FULL = 1
    UNRESOLVED = 2


@dataclass(frozen=True, slots=True, eq=False)
class Access:
    """Ids touched by one operation.

    Attributes:
        space: What the ids count.
        mode: Read or write.
        pool: Pool number inside the space, 0 for the only pool.
        ids: ``(n,) int64`` unique ids, host memory. Shared between records on purpose and never written to:
            two records that carry the *same array object* touch the same pages, which makes checks O(1).
    """

    space: Space
    mode: Mode
    ids: PageIds
    pool: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Record:
    """Fields every record has.

    Attributes:
        op: Id of the operation, unique in a trace and increasing in issue order; also the NVTX payload.
        thread: Host thread that issued the call.
        host_ns: Host clock at the call, nanoseconds.
    """

    op: OpId
    thread: ThreadId
    host_ns: int


@dataclass(frozen=True, slots=True, eq=False)
class DeviceWork(Record):
    """Fields shared by ``Kernel`` and ``Memcpy``: one operation enqueued on a stream.

    Attributes:
        stream: Stream the operation was enqueued on.
        site: Id of the code site (a ``Define`` of space ``SITE``); part of the fingerprint.
        group: Round id of a kernel, transfer id of a copy.
        size_bytes: Bytes moved, 0 when unknown.
        layers: Half-open layer range of all accesses.
        accesses: What it touches, at unknown times during its run.
    """

    stream: StreamId
    site: int
    group: int
    size_bytes: int
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Kernel(DeviceWork):
    """One launched segment of a forward round. A wait or record inside a round closes a segment."""


@dataclass(frozen=True, slots=True, eq=False)
class Memcpy(DeviceWork):
    """One copy; reads its source when it executes, not when it is issued."""

    direction: Direction = Direction.HOST_TO_DEVICE


@dataclass(frozen=True, slots=True, eq=False)
class EventRecord(Record):
    """Marker after all work queued so far on ``stream``; becomes the event's current record."""

    event: EventId
    stream: StreamId


@dataclass(frozen=True, slots=True, eq=False)
class EventWait(Record):
    """Later work on ``stream`` starts after the record that is current at this call; no-op if never recorded."""

    event: EventId
    stream: StreamId
    purpose: Purpose = Purpose.PLAIN


@dataclass(frozen=True, slots=True, eq=False)
class WaitStream(Record):
    """Same as recording a fresh event on ``on`` now and waiting for it on ``waiter``."""

    waiter: StreamId
    on: StreamId
    purpose: Purpose = Purpose.PLAIN


@dataclass(frozen=True, slots=True, eq=False)
class EventQuery(Record):
    """Host asked once; ``True`` means the current record is complete and the thread now knows it."""

    event: EventId
    result: bool


@dataclass(frozen=True, slots=True, eq=False)
class EventSync(Record):
    """Host thread blocked until the event's current record was complete. Written when the call *returned*."""

    event: EventId


@dataclass(frozen=True, slots=True, eq=False)
class HostSync(Record):
    """Host thread blocked until all work queued on ``stream`` (``None``: on all streams) was complete."""

    stream: StreamId | None


@dataclass(frozen=True, slots=True, eq=False)
class HostAccess(Record):
    """The CPU itself touches memory, in thread order."""

    site: int
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PageAlloc(Record):
    """Pages handed out by an allocator. Changes the owner; orders nothing."""

    owner: int
    access: Access


@dataclass(frozen=True, slots=True, eq=False)
class PageFree(Record):
    """Pages given back to an allocator. Changes the owner; orders nothing and waits for nothing."""

    owner: int
    access: Access


@dataclass(frozen=True, slots=True, eq=False)
class RecordStream(Record):
    """An allocator block is marked as used by ``stream`` (``torch.Tensor.record_stream``)."""

    buffer: int
    stream: StreamId


@dataclass(frozen=True, slots=True, eq=False)
class Times(Record):
    """Device times of operation ``op``, known once its event pair resolved.

    Attributes:
        start_ns, end_ns: On the same clock as ``host_ns``.
        error_ns: Half width of the uncertainty of both.
    """

    start_ns: int
    end_ns: int
    error_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Lost(Record):
    """``count`` records before this one were lost; everything learned before it about mutable state is doubtful."""

    count: int
    reason: DropReason


@dataclass(frozen=True, slots=True, eq=False)
class Define(Record):
    """A name for an id. Streams also state their kind, pools their page and layer count, in ``value``."""

    space: DefineSpace
    id: int
    text: str
    value: int = 0


AnyRecord = (
    Kernel
    | Memcpy
    | EventRecord
    | EventWait
    | WaitStream
    | EventQuery
    | EventSync
    | HostSync
    | HostAccess
    | PageAlloc
    | PageFree
    | RecordStream
    | Times
    | Lost
    | Define
)

KINDS: Final[tuple[type[Record], ...]] = (
    Kernel,
    Memcpy,
    EventRecord,
    EventWait,
    WaitStream,
    EventQuery,
    EventSync,
    HostSync,
    HostAccess,
    PageAlloc,
    PageFree,
    RecordStream,
    Times,
    Lost,
    Define,
)
"""Position in this tuple is the ``kind`` byte. Append only: a position is never reused."""


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What an engine tells ``launch`` about the operation it enqueues; the recorder turns it into a record.

    Attributes:
        site: Name of the code site, a fixed string (``"forward"``, ``"load-back copy"``).
        accesses: What the operation touches.
        layers: Half-open layer range.
        group: Round id or transfer id.
        direction: ``None`` for a kernel.
        size_bytes: Bytes moved; the virtual device derives the duration from it.
    """

    site: str
    accesses: tuple[Access, ...] = ()
    layers: tuple[int, int] = ALL_LAYERS
    group: int = 0
    direction: Direction | None = None
    size_bytes: int = 0


def page_ids(ids: Iterable[int]) -> PageIds:
    """``(n,) int64`` array of ``ids`` in the given order."""
    return np.fromiter(ids, dtype=np.int64)


def device(mode: Mode, ids: PageIds, *, pool: int = 0) -> Access:
    """An access to pages of a device pool."""
    return Access(Space.DEVICE, mode, ids, pool)


def host(mode: Mode, ids: PageIds, *, pool: int = 0) -> Access:
    """An access to pages of a pinned host pool."""
    return Access(Space.HOST, mode, ids, pool)
