"""Every record kind and its fixed binary layout: the one schema of the whole product.

A process under observation writes these records to its ring file; readers yield them; the analyzer consumes
them. A trace is their sequence in issue order. The meaning of each kind follows CUDA's stream semantics
(docs/analyzer.md lists the rules and their sources).

Layout of one ring slot, ``SLOT_BYTES`` long, little endian::

    0   u8  kind        1  u8 accesses (0-4)    2  u16 aux       4  u32 thread
    8   i64 op          16 i64 host_ns          24 i64 a   32 i64 b   40 i64 c   48 i64 d
    56  i32 layer_lo    60 i32 layer_hi
    64  four access cells of 16 bytes: u8 space | u8 mode | u16 pool | u32 count | u64 arena position
        (a ``Define`` record keeps up to 64 bytes of UTF-8 text here instead;
        a row cell has ``ROWS_CELL`` for its space: ``Kernel.rows``, the last cell, or ``RowsDiscarded.requests``;
        with ``SLOT_LIST`` in its mode a cell's words are a slot list, of which the reader makes page ids)

What ``aux`` and ``a`` to ``d`` hold; what is not named is 0::

    Kernel, Memcpy     a stream   b site    c group   d size_bytes   aux direction (Memcpy)
    EventRecord        a event    b stream
    EventWait          a event    b stream  aux purpose
    WaitStream         a waiter   b on      aux purpose
    EventQuery         a event    aux result
    EventSync          a event
    HostSync           a stream   aux 1, or 0 for all streams
    HostAccess         b site
    PageAlloc/Free     c owner    one cell
    RecordStream       a tensor   b stream
    Times              a start_ns b end_ns  c error_ns
    Lost               a count    aux reason
    Define             a id       b value   c space   aux text length in bytes
    GraphReplay        a stream   b site    c group   d graph        aux nodes
    GraphNode          a event    b after   c index   aux 1 if it records an event
    Relocate           a stream   b site
    IoBegin            a io       b site    aux kind
    IoEnd              a io
    ThreadPost/Recv    a channel
    TensorAlloc        a block    b stream  c tensor
    TensorFree         c tensor
    Collective         a group    b site    c rank
    RowsDiscarded      c group    one row cell

A ring file is one header page of ``HEADER_BYTES`` (``RingWord`` names its 64-bit words), ``slots`` slots, and an
arena of 64-bit page ids. Records and arena positions are numbered from 0 without wrapping; their place in the
file is the number modulo the size.

Records are ``msgspec`` structs, not dataclasses: a frozen dataclass of nine fields takes 1 µs to make, which is a
fifth of the budget of a whole round, and a struct 0.1. They hold no cycles, so the garbage collector skips them.
Where ``msgspec`` is not installed they are dataclasses after all.

Units: times are integer nanoseconds, sizes integer bytes. ``host_ns`` is the host clock at the call; device
times arrive later in a ``Times`` record, on the same clock, with a stated error.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NewType

import numpy as np
import numpy.typing as npt

from hicache_obs._struct import Struct

OpId = NewType("OpId", int)
StreamId = NewType("StreamId", int)
EventId = NewType("EventId", int)
ThreadId = NewType("ThreadId", int)
PageIds = npt.NDArray[np.int64]

SLOT_BYTES: Final = 128
MAX_ACCESSES: Final = 4
MAX_TEXT_BYTES: Final = 64
"""A longer text of a ``Define`` is cut, on a character boundary, when it is written to a ring."""
HEADER_BYTES: Final = 4096
RING_MAGIC: Final = b"hicaring"
RING_VERSION: Final = 3
"""Changes when a reader of one layout would misread the other. 2 has row cells, 3 slot lists."""
MAX_IDS: Final = 1 << 26
"""Ids of one pool are below this: the analyzer keeps 18 bytes for each up to the largest."""
MAX_SLOTS: Final = 1 << 24
MAX_ARENA_WORDS: Final = 1 << 30
NVTX_DOMAIN: Final = "hicache"
"""Domain of this project's ranges; their payload is the operation id."""
MAX_REASONS: Final = 16
OBSERVABLE_STATED: Final = 1 << 62
"""In ``RingWord.OBSERVABLE``: the other bits mean something."""
ROWS_CELL: Final = 3
"""Space of a cell that holds what a round's rows are, not an access."""
SLOT_LIST: Final = 0x80
"""Bit of a cell's mode: the words are a slot list (``unpack_slots``), not page ids."""
ALL_LAYERS: Final = (0, 2**31 - 1)
"""Layer range of an access that does not say which layers it touches. Ranges are half open."""
NO_OP: Final = OpId(-1)
IN_ORDER: Final = -1
"""``GraphNode.after`` of an entry that follows the entry before it."""
MAX_AFTER: Final = 62
"""Last graph entry that ``GraphNode.after`` has a bit for."""
MAX_NODES: Final = (1 << 16) - 1
"""Most entries one graph replay may have."""


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


class IoKind(enum.IntEnum):
    """What an ``IoBegin`` moves."""

    STORAGE_READ = 0
    STORAGE_WRITE = 1
    DEVICE_READ = 2
    RDMA_WRITE = 3


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


class RingWord(enum.IntEnum):
    """Place of each 64-bit word in a ring's header page, as a word number. Little endian.

    The writer changes ``HEAD`` to ``REPORTED``, the reader ``TAIL`` to ``FINISHED`` (on a cache line of their
    own), either of them ``MODE``; the rest is fixed when the file is made. ``MAGIC``, ``VERSION``, ``PID``,
    ``PROCESS_START``, ``PID_NAMESPACE`` and ``MODE`` keep their places in every layout.
    """

    MAGIC = 0
    """``RING_MAGIC``; written last, so a file that has it is complete."""
    VERSION = 1
    SLOT_BYTES = 2
    SLOTS = 3
    ARENA_WORDS = 4
    PID = 5
    TP_RANK = 6
    PP_RANK = 7
    DP_RANK = 8
    WALL_NS = 9
    """Wall clock (Unix time), read together with ``HOST_NS``."""
    HOST_NS = 10
    """Host clock of the records, read together with ``WALL_NS``."""
    PROCESS_START = 11
    """When the process was started, clock ticks since boot; with ``PID`` it names a process for good. 0: unknown."""
    PID_NAMESPACE = 12
    """In which namespace ``PID`` is a process (inode number). 0: unknown."""
    FIRST_MODE = 13
    """``MODE`` as the writer wanted it at first; what switching on again goes back to."""
    MODE = 16
    """A ``CaptureMode``."""
    HEAD = 24
    """Records written. Stored after the record itself: what is below it is whole."""
    ARENA_HEAD = 25
    """Arena words handed out. Stored before they are filled."""
    ARENA_LOW = 26
    """Records from now on refer to no arena position below this. Stored after ``HEAD``."""
    HEARTBEAT_NS = 27
    """Host clock when the writer last said it is alive."""
    CLOSED = 28
    """1 once the writer has closed the ring: nothing more will be appended."""
    OBSERVABLE = 29
    """Bit i: the records that show the i-th ``Hazard`` are captured. Bit 62: the writer has stated it."""
    DROPPED = 32
    """``MAX_REASONS`` words: records lost so far, by ``DropReason``."""
    REPORTED = 48
    """``MAX_REASONS`` words: the part of ``DROPPED`` that a ``Lost`` record in the ring states."""
    TAIL = 72
    """Records read."""
    ARENA_TAIL = 73
    """Arena words that may be used again."""
    FINISHED = 74
    """1 once the reader has read the ring of an ended process whole and given every pair its verdict."""


class CaptureMode(enum.IntEnum):
    """What a process under observation does; the mode byte of its ring."""

    OFF = 0
    """Append nothing. ``hicache-obs off`` sets it from outside."""
    OBSERVE = 1
    ENFORCE = 2
    """Observe, and issue missing fences."""


class DefineSpace(enum.IntEnum):
    """What a ``Define`` record gives a name to."""

    STREAM = 0
    EVENT = 1
    THREAD = 2
    SITE = 3
    POOL = 4
    """A device pool."""
    BUFFER = 5
    ENGINE = 6
    REQUEST = 7
    CHANNEL = 8
    HOST_POOL = 9
    GRAPH = 10
    IO = 11
    TENSOR = 12
    GROUP = 13
    """A group of ranks that enter collectives together."""
    SHARED_EVENT = 14
    """An event that another process may record (CUDA IPC), by the event's id."""
    SHARED_POOL = 15
    """A device pool that another process may access, by the pool's id."""
    SHARED_HOST_POOL = 16
    """A host pool that another process may access, by the pool's id."""
    SHARED_BUFFER = 17
    """A buffer that another process may access, by the buffer's id."""
    EARLY_SITE = 18
    """Kernels of this site may start before the kernel before them has ended (programmatic dependent launch)."""
    STATUS = 19
    """What the recording side counts about itself: ``text`` names it, ``value`` is the newest number."""
    REQUEST_TRACE = 20
    """W3C trace context (``traceparent``) of the request's own trace, by the request's id."""


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
    """Device times that never came, or came too late. No edge and no access is missing."""
    SWITCHED_OFF = 3
    """The mode byte was off for a while."""
    RECORDER_ERROR = 4
    """The recorder failed, or was called in the middle of its own work (from a signal handler)."""
    MISSING = 5
    """The file no longer has them: overwritten in a ring that was read, or a journal segment that is gone."""
    EDGE = 6
    """A wait or synchronisation whose other side the source does not name. An order may be missing, nothing else."""
    SAMPLED_OUT = 7
    """The agent did not keep up within its share of the processor, and left them out. A journal has them."""


@dataclass(frozen=True, slots=True)
class Ranks:
    """Which worker of a server a ring or journal belongs to."""

    tp: int = 0
    pp: int = 0
    dp: int = 0


class Access(Struct, frozen=True, eq=False, gc=False):
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


class SlotAccess(Access, frozen=True, eq=False, gc=False):
    """An access whose ``ids`` are a slot list (``pack_slots``): only on its way into a ring, whose reader makes
    page ids of it. Sorting slots into pages would take the launching thread longer than all else in a record.
    """


class Record(Struct, frozen=True, eq=False, gc=False):
    """Fields every record has.

    Attributes:
        op: Id of the operation, unique in a trace and increasing in issue order; also the NVTX payload.
        thread: Host thread that issued the call.
        host_ns: Host clock at the call, nanoseconds.
    """

    op: OpId
    thread: ThreadId
    host_ns: int


class DeviceWork(Record, frozen=True, eq=False, gc=False):
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


class Kernel(DeviceWork, frozen=True, eq=False, gc=False):
    """One launched segment of a forward round. A wait or record inside a round closes a segment.

    Attributes:
        rows: Which request of the round uses which pages (``pack_rows``), one array for all segments of a round;
            ``None`` if it is not known. A ring keeps it beside at most ``MAX_ACCESSES - 1`` accesses.
    """

    rows: PageIds | None = None


class Memcpy(DeviceWork, frozen=True, eq=False, gc=False):
    """One copy; reads its source when it executes, not when it is issued."""

    direction: Direction = Direction.HOST_TO_DEVICE


class EventRecord(Record, frozen=True, eq=False, gc=False):
    """Marker after all work queued so far on ``stream``; becomes the event's current record."""

    event: EventId
    stream: StreamId


class EventWait(Record, frozen=True, eq=False, gc=False):
    """Later work on ``stream`` starts after the record that is current at this call; no-op if never recorded."""

    event: EventId
    stream: StreamId
    purpose: Purpose = Purpose.PLAIN


class WaitStream(Record, frozen=True, eq=False, gc=False):
    """Same as recording a fresh event on ``on`` now and waiting for it on ``waiter``."""

    waiter: StreamId
    on: StreamId
    purpose: Purpose = Purpose.PLAIN


class EventQuery(Record, frozen=True, eq=False, gc=False):
    """Host asked once; ``True`` means the current record is complete and the thread now knows it."""

    event: EventId
    result: bool


class EventSync(Record, frozen=True, eq=False, gc=False):
    """Host thread blocked until the event's current record was complete. Written when the call *returned*."""

    event: EventId


class HostSync(Record, frozen=True, eq=False, gc=False):
    """Host thread blocked until all work queued on ``stream`` (``None``: on all streams) was complete."""

    stream: StreamId | None


class HostAccess(Record, frozen=True, eq=False, gc=False):
    """The CPU itself touches memory, in thread order."""

    site: int
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


class PageAlloc(Record, frozen=True, eq=False, gc=False):
    """Pages handed out by an allocator. Changes the owner; orders nothing."""

    owner: int
    access: Access


class PageFree(Record, frozen=True, eq=False, gc=False):
    """Pages given back to an allocator. Changes the owner; orders nothing and waits for nothing."""

    owner: int
    access: Access


class RecordStream(Record, frozen=True, eq=False, gc=False):
    """A tensor is marked as used by ``stream`` (``torch.Tensor.record_stream``).

    Attributes:
        tensor: As in ``TensorAlloc``; the recorder passes the id of the tensor's storage.
    """

    tensor: int
    stream: StreamId


class Times(Record, frozen=True, eq=False, gc=False):
    """Device times of operation ``op``, known once its event pair resolved.

    Attributes:
        start_ns, end_ns: On the same clock as ``host_ns``.
        error_ns: Half width of the uncertainty of both.
    """

    start_ns: int
    end_ns: int
    error_ns: int = 0


class Lost(Record, frozen=True, eq=False, gc=False):
    """``count`` records before this one were lost; everything learned before it about mutable state is doubtful."""

    count: int
    reason: DropReason


class Define(Record, frozen=True, eq=False, gc=False):
    """A name for an id. Streams also state their kind, pools their layer count, in ``value``."""

    space: DefineSpace
    id: int
    text: str
    value: int = 0


class GraphReplay(Record, frozen=True, eq=False, gc=False):
    """One replay of captured work: after its stream's earlier work, and after earlier replays of the same graph.

    Without nodes it is one operation with these accesses. With nodes, exactly ``nodes`` ``GraphNode`` records follow
    at once, and ``accesses`` is empty.

    Attributes:
        graph: Id of the executable graph.
        stream, site, group, layers, accesses: As in ``DeviceWork``.
        nodes: Number of node records that follow.
    """

    graph: int
    stream: StreamId
    site: int
    group: int
    nodes: int
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


class GraphNode(Record, frozen=True, eq=False, gc=False):
    """One entry of the graph replay before it: work, or an external event record.

    Attributes:
        index: Position in the graph, from 0; ``after`` can name entries 0 to ``MAX_AFTER``.
        after: Bit ``i`` set: this entry follows entry ``i``, and only such entries. ``IN_ORDER``: it follows the
            entry before it, as captured stream work does.
        event: The event that this entry records, ``None`` for work. It covers only the entry's ancestors.
        layers, accesses: Of work.
    """

    index: int
    after: int
    event: EventId | None
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


class Relocate(Record, frozen=True, eq=False, gc=False):
    """Device copy of pages to new places; from this call on new work uses the new addresses.

    ``accesses`` reads the old pages and writes the new ones.
    """

    stream: StreamId
    site: int
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


class IoBegin(Record, frozen=True, eq=False, gc=False):
    """Storage, network or third-party transfer in no stream begins; its accesses happen any time from now on."""

    io: int
    kind: IoKind
    site: int
    layers: tuple[int, int]
    accesses: tuple[Access, ...]


class IoEnd(Record, frozen=True, eq=False, gc=False):
    """The calling thread learns that transfer ``io`` is finished."""

    io: int


class ThreadPost(Record, frozen=True, eq=False, gc=False):
    """Hand-over between host threads, sending side: the n-th post is ordered before the n-th receive."""

    channel: int


class ThreadRecv(Record, frozen=True, eq=False, gc=False):
    """Hand-over between host threads, receiving side."""

    channel: int


class TensorAlloc(Record, frozen=True, eq=False, gc=False):
    """The caching allocator hands out block ``block`` as ``tensor`` for use on ``stream``."""

    tensor: int
    block: int
    stream: StreamId


class TensorFree(Record, frozen=True, eq=False, gc=False):
    """``tensor``'s block is given back; its own stream may reuse it at once, others after marked streams' work."""

    tensor: int


class Collective(Record, frozen=True, eq=False, gc=False):
    """A rank enters a blocking collective; all ranks of a group must enter the same ones in the same order."""

    collective_group: int
    rank: int
    site: int


class RowsDiscarded(Record, frozen=True, eq=False, gc=False):
    """The host throws away what round ``group`` computed for some of its requests: they were over or retracted.

    Attributes:
        group: Round id.
        requests: ``(n,) int64`` request ids, as in the round's rows.
    """

    group: int
    requests: PageIds


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
    | GraphReplay
    | GraphNode
    | Relocate
    | IoBegin
    | IoEnd
    | ThreadPost
    | ThreadRecv
    | TensorAlloc
    | TensorFree
    | Collective
    | RowsDiscarded
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
    GraphReplay,
    GraphNode,
    Relocate,
    IoBegin,
    IoEnd,
    ThreadPost,
    ThreadRecv,
    TensorAlloc,
    TensorFree,
    Collective,
    RowsDiscarded,
)
"""Position in this tuple is the ``kind`` byte. Append only: a position is never reused."""


class Work(Struct, frozen=True, eq=False, gc=False):
    """What an engine tells ``launch`` about the operation it enqueues; the recorder turns it into a record.

    Attributes:
        site: Name of the code site, a fixed string (``"forward"``, ``"load-back copy"``).
        accesses: What the operation touches.
        layers: Half-open layer range.
        group: Round id or transfer id.
        direction: ``None`` for a kernel.
        size_bytes: Bytes moved; the virtual device derives the duration from it.
        rows: As in ``Kernel``.
        moves: It is a ``Relocate``: pages get new addresses.
        tokens: Of a forward round: tokens that it computes, in all its layers. For cost models; not recorded.
    """

    site: str
    accesses: tuple[Access, ...] = ()
    layers: tuple[int, int] = ALL_LAYERS
    group: int = 0
    direction: Direction | None = None
    size_bytes: int = 0
    rows: PageIds | None = None
    moves: bool = False
    tokens: int = 0


def page_ids(ids: Iterable[int]) -> PageIds:
    """``(n,) int64`` array of ``ids`` in the given order."""
    return np.fromiter(ids, dtype=np.int64)


def device(mode: Mode, ids: PageIds, *, pool: int = 0) -> Access:
    """An access to pages of a device pool."""
    return Access(Space.DEVICE, mode, ids, pool)


def host(mode: Mode, ids: PageIds, *, pool: int = 0) -> Access:
    """An access to pages of a pinned host pool."""
    return Access(Space.HOST, mode, ids, pool)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """What the ``n`` rows of a forward round are.

    Attributes:
        requests: ``(n,) int64`` request of each row.
        starts: ``(n + 1,) int64`` row ``i`` uses ``pages[starts[i] : starts[i + 1]]``.
        reads: ``(n,) int64`` how many of them, the first ones, hold contents that it reads.
        writes: ``(n,) int64`` how many of them, the last ones, it writes. A page that is filled further is both.
        pages: ``(starts[n],) int64`` device pages.
    """

    requests: PageIds
    starts: PageIds
    reads: PageIds
    writes: PageIds
    pages: PageIds


def pack_rows(
    requests: Sequence[int], pages: Sequence[PageIds], reads: Sequence[int], writes: Sequence[int]
) -> PageIds:
    """``Rows`` as one array: ``n``, then ``n`` each of requests, page counts, reads and writes, then the pages.

    Args:
        requests: Request id of each row.
        pages: Device pages that each row uses.
        reads, writes: How many of them each row reads, from the first on, and writes, up to the last.
    """
    counts = [len(ids) for ids in pages]
    return np.concatenate(([len(counts), *requests, *counts, *reads, *writes], *pages), dtype=np.int64)


def unpack_rows(ids: PageIds) -> Rows:
    """Partner of ``pack_rows``.

    Raises:
        ValueError: ``ids`` are no such array.
    """
    count = int(ids[0]) if len(ids) else -1
    if not 0 <= count <= (len(ids) - 1) // 4:
        raise ValueError(f"{len(ids)} numbers for {count} rows")
    requests, counts, reads, writes = ids[1 : 1 + 4 * count].reshape(4, count)
    pages = ids[1 + 4 * count :]
    if (counts < 0).any() or int(counts.sum()) != len(pages):
        raise ValueError(f"rows of {int(counts.sum())} pages; {len(pages)} are there")
    if ((reads < 0) | (reads > counts) | (writes < 0) | (writes > counts)).any():
        raise ValueError("a row reads or writes more pages than it has")
    return Rows(requests, np.concatenate(([0], np.cumsum(counts))), reads, writes, pages)


_FIRST_SLOTS: Final = 1
_SKIP_ZERO: Final = 2
SLOT_WORDS: Final = 3
"""Words of a slot list before its lengths."""


def slot_list_head(page_size: int, *, first_slots_only: bool = False, skip_zero: bool = False) -> PageIds:
    """The first ``SLOT_WORDS`` words of a slot list without rows: page size, flags, number of rows.

    Args:
        page_size: Slots per page; 1 if the list holds page ids already.
        first_slots_only: Only pages whose first slot is in the list: what an allocation newly hands out.
        skip_zero: Leave out page 0, to which padded rows write and from which nobody reads.
    """
    return np.array([page_size, _FIRST_SLOTS * first_slots_only | _SKIP_ZERO * skip_zero, 0], dtype=np.int64)


def unpack_slots(words: PageIds) -> PageIds:
    """Page ids of a slot list: unique, ascending, ``(n,) int64``; a fresh array.

    A slot list is ``slot_list_head``, then a length for each of its rows, then slots. With rows the slots are those
    of a request table, ``(rows, k)``, one entry per page; what lies beyond a row's length is left over from others.

    Raises:
        ValueError: ``words`` are no slot list.
    """
    if len(words) < SLOT_WORDS:
        raise ValueError(f"{len(words)} words for a slot list")
    size, flags, rows = (int(word) for word in words[:SLOT_WORDS])
    if size < 1 or not 0 <= flags <= (_FIRST_SLOTS | _SKIP_ZERO) or not 0 <= rows <= len(words) - SLOT_WORDS:
        raise ValueError(f"a slot list of pages of {size}, flags {flags} and {rows} rows in {len(words)} words")
    slots = words[SLOT_WORDS + rows :]
    if rows:
        if len(slots) % rows:
            raise ValueError(f"a slot list of {rows} rows with {len(slots)} entries")
        entries = slots.reshape(rows, -1)
        lengths = words[SLOT_WORDS : SLOT_WORDS + rows]
        slots = entries[(np.arange(entries.shape[1]) * size)[None, :] < lengths[:, None]]
    if size > 1:
        if flags & _FIRST_SLOTS:
            slots = slots[slots % size == 0]
        slots = slots // size
    pages = np.unique(slots)
    return pages[1:] if flags & _SKIP_ZERO and len(pages) and pages[0] == 0 else pages
