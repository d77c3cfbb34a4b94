"""A slot of the ring: how a record of each kind becomes ``SLOT_BYTES``. ``hicache_obs.records`` has the layout.

The page ids of a record's accesses go into the arena first; the slot holds where they are.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from typing import Any, Final

from hicache_obs.recorder.arena import Arena
from hicache_obs.records import (
    KINDS,
    MAX_ACCESSES,
    MAX_TEXT_BYTES,
    SLOT_BYTES,
    Collective,
    Define,
    EventId,
    EventQuery,
    EventRecord,
    EventSync,
    EventWait,
    GraphNode,
    GraphReplay,
    HostAccess,
    HostSync,
    IoBegin,
    IoEnd,
    Kernel,
    Lost,
    Memcpy,
    OpId,
    PageAlloc,
    PageFree,
    Purpose,
    Record,
    RecordStream,
    Relocate,
    RowsDiscarded,
    StreamId,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    Times,
    WaitStream,
)

_HEAD: Final = "<BBHIqqqqqqii"
_pack: Final = struct.Struct(_HEAD).pack_into
_plain: Final = struct.Struct(f"<Qqqqq{SLOT_BYTES - 40}x")
pack_plain_into: Final = _plain.pack_into
pack_plain: Final = _plain.pack
"""A whole slot of a record without cells: first word, op, host_ns, a, b. The rest is zeros."""
unpack_plain: Final = _plain.unpack
pack_work: Final = tuple(struct.Struct("<Qqqqqqqii" + "BBHIQ" * count).pack_into for count in range(MAX_ACCESSES + 1))
"""By the number of accesses: a whole slot from its first word, op, host_ns, a to d, both layers, and the cells."""
_pack_cells: Final = tuple(struct.Struct(_HEAD + "BBHIQ" * count).pack_into for count in range(MAX_ACCESSES + 1))
cell_words: Final = tuple(struct.Struct("<" + "BBHIQ" * count).pack for count in range(MAX_ACCESSES + 1))
"""By their number: the bytes of the cells alone."""
_pack_text: Final = struct.Struct(f"{_HEAD}{MAX_TEXT_BYTES}s").pack_into

EVENT_RECORD: Final = KINDS.index(EventRecord)
EVENT_WAIT: Final = KINDS.index(EventWait)
WAIT_STREAM: Final = KINDS.index(WaitStream)
EVENT_SYNC: Final = KINDS.index(EventSync)
"""Kinds that ``RingWriter.put`` takes."""
KERNEL: Final = KINDS.index(Kernel)
MEMCPY: Final = KINDS.index(Memcpy)
"""Kinds that ``RingWriter.put_work`` takes."""


class SlotPacker:
    """Packs records into the slots of one mapped ring file. The caller holds the ring's lock.

    Args:
        file: The whole ring.
        arena: Where the page ids go.

    Attributes:
        pack: By the record's type: its packing function. Takes the slot's offset in the file and the record; false if
            the arena has no room for the pages.
    """

    def __init__(self, file: mmap.mmap, arena: Arena) -> None:
        self._map: Final = file
        self._cells: Final = arena.cells
        self._row_cell: Final = arena.row_cell
        self.pack: Final[dict[type[Record], Callable[[int, Any], bool]]] = {
            Kernel: self._kernel,
            Memcpy: self._memcpy,
            EventRecord: self._event_record,
            EventWait: self._event_wait,
            WaitStream: self._wait_stream,
            EventQuery: self._event_query,
            EventSync: self._event_sync,
            HostSync: self._host_sync,
            HostAccess: self._host_access,
            PageAlloc: self._page_alloc,
            PageFree: self._page_free,
            RecordStream: self._record_stream,
            Times: self._times,
            Lost: self._lost,
            Define: self._define,
            GraphReplay: self._graph_replay,
            GraphNode: self._graph_node,
            Relocate: self._relocate,
            IoBegin: self._io_begin,
            IoEnd: self._io_end,
            ThreadPost: self._thread_post,
            ThreadRecv: self._thread_recv,
            TensorAlloc: self._tensor_alloc,
            TensorFree: self._tensor_free,
            Collective: self._collective,
            RowsDiscarded: self._rows_discarded,
        }

    # -- one method per kind, in the order of ``records.KINDS`` ----------------------------------------------

    def _kernel(self, place: int, r: Kernel) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        if r.rows is not None and count < MAX_ACCESSES and (row_cell := self._row_cell(r.rows)) is not None:
            cells = [*cells, *row_cell]
            count += 1
        _pack_cells[count](
            self._map, place, 0, count, 0, r.thread, r.op, r.host_ns,
            r.stream, r.site, r.group, r.size_bytes, r.layers[0], r.layers[1], *cells,
        )  # fmt: skip
        return True

    def _memcpy(self, place: int, r: Memcpy) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 1, count, r.direction, r.thread, r.op, r.host_ns,
            r.stream, r.site, r.group, r.size_bytes, r.layers[0], r.layers[1], *cells,
        )  # fmt: skip
        return True

    def _event_record(self, place: int, r: EventRecord) -> bool:
        _pack(self._map, place, 2, 0, 0, r.thread, r.op, r.host_ns, r.event, r.stream, 0, 0, 0, 0)
        return True

    def _event_wait(self, place: int, r: EventWait) -> bool:
        _pack(self._map, place, 3, 0, r.purpose, r.thread, r.op, r.host_ns, r.event, r.stream, 0, 0, 0, 0)
        return True

    def _wait_stream(self, place: int, r: WaitStream) -> bool:
        _pack(self._map, place, 4, 0, r.purpose, r.thread, r.op, r.host_ns, r.waiter, r.on, 0, 0, 0, 0)
        return True

    def _event_query(self, place: int, r: EventQuery) -> bool:
        _pack(self._map, place, 5, 0, r.result, r.thread, r.op, r.host_ns, r.event, 0, 0, 0, 0, 0)
        return True

    def _event_sync(self, place: int, r: EventSync) -> bool:
        _pack(self._map, place, 6, 0, 0, r.thread, r.op, r.host_ns, r.event, 0, 0, 0, 0, 0)
        return True

    def _host_sync(self, place: int, r: HostSync) -> bool:
        one, stream = (0, 0) if r.stream is None else (1, r.stream)
        _pack(self._map, place, 7, 0, one, r.thread, r.op, r.host_ns, stream, 0, 0, 0, 0, 0)
        return True

    def _host_access(self, place: int, r: HostAccess) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](self._map, place, 8, count, 0, r.thread, r.op, r.host_ns, 0, r.site, 0, 0, *r.layers, *cells)
        return True

    def _page_alloc(self, place: int, r: PageAlloc) -> bool:
        cells = self._cells((r.access,))
        if cells is None:
            return False
        _pack_cells[1](self._map, place, 9, 1, 0, r.thread, r.op, r.host_ns, 0, 0, r.owner, 0, 0, 0, *cells)
        return True

    def _page_free(self, place: int, r: PageFree) -> bool:
        cells = self._cells((r.access,))
        if cells is None:
            return False
        _pack_cells[1](self._map, place, 10, 1, 0, r.thread, r.op, r.host_ns, 0, 0, r.owner, 0, 0, 0, *cells)
        return True

    def _record_stream(self, place: int, r: RecordStream) -> bool:
        _pack(self._map, place, 11, 0, 0, r.thread, r.op, r.host_ns, r.tensor, r.stream, 0, 0, 0, 0)
        return True

    def _times(self, place: int, r: Times) -> bool:
        _pack(self._map, place, 12, 0, 0, r.thread, r.op, r.host_ns, r.start_ns, r.end_ns, r.error_ns, 0, 0, 0)
        return True

    def _lost(self, place: int, r: Lost) -> bool:
        _pack(self._map, place, 13, 0, r.reason, r.thread, r.op, r.host_ns, r.count, 0, 0, 0, 0, 0)
        return True

    def _define(self, place: int, r: Define) -> bool:
        text = cut_text(r.text)
        _pack_text(self._map, place, 14, 0, len(text), r.thread, r.op, r.host_ns, r.id, r.value, r.space, 0, 0, 0, text)
        return True

    def _graph_replay(self, place: int, r: GraphReplay) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 15, count, r.nodes, r.thread, r.op, r.host_ns,
            r.stream, r.site, r.group, r.graph, *r.layers, *cells,
        )  # fmt: skip
        return True

    def _graph_node(self, place: int, r: GraphNode) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        one, event = (0, 0) if r.event is None else (1, r.event)
        _pack_cells[count](
            self._map, place, 16, count, one, r.thread, r.op, r.host_ns,
            event, r.after, r.index, 0, *r.layers, *cells,
        )  # fmt: skip
        return True

    def _relocate(self, place: int, r: Relocate) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 17, count, 0, r.thread, r.op, r.host_ns, r.stream, r.site, 0, 0, *r.layers, *cells
        )
        return True

    def _io_begin(self, place: int, r: IoBegin) -> bool:
        cells = self._cells(r.accesses)
        if cells is None:
            return False
        count = len(r.accesses)
        _pack_cells[count](
            self._map, place, 18, count, r.kind, r.thread, r.op, r.host_ns, r.io, r.site, 0, 0, *r.layers, *cells
        )
        return True

    def _io_end(self, place: int, r: IoEnd) -> bool:
        _pack(self._map, place, 19, 0, 0, r.thread, r.op, r.host_ns, r.io, 0, 0, 0, 0, 0)
        return True

    def _thread_post(self, place: int, r: ThreadPost) -> bool:
        _pack(self._map, place, 20, 0, 0, r.thread, r.op, r.host_ns, r.channel, 0, 0, 0, 0, 0)
        return True

    def _thread_recv(self, place: int, r: ThreadRecv) -> bool:
        _pack(self._map, place, 21, 0, 0, r.thread, r.op, r.host_ns, r.channel, 0, 0, 0, 0, 0)
        return True

    def _tensor_alloc(self, place: int, r: TensorAlloc) -> bool:
        _pack(self._map, place, 22, 0, 0, r.thread, r.op, r.host_ns, r.block, r.stream, r.tensor, 0, 0, 0)
        return True

    def _tensor_free(self, place: int, r: TensorFree) -> bool:
        _pack(self._map, place, 23, 0, 0, r.thread, r.op, r.host_ns, 0, 0, r.tensor, 0, 0, 0)
        return True

    def _collective(self, place: int, r: Collective) -> bool:
        _pack(self._map, place, 24, 0, 0, r.thread, r.op, r.host_ns, r.collective_group, r.site, r.rank, 0, 0, 0)
        return True

    def _rows_discarded(self, place: int, r: RowsDiscarded) -> bool:
        cell = self._row_cell(r.requests)
        if cell is None:
            return False
        _pack_cells[1](self._map, place, 25, 1, 0, r.thread, r.op, r.host_ns, 0, 0, r.group, 0, 0, 0, *cell)
        return True


def plain_record(word: int, op: int, host_ns: int, a: int, b: int) -> EventRecord | EventWait | EventSync | WaitStream:
    """The record that these numbers of a slot are, as ``put`` gets them."""
    kind, common = word & 0xFF, (OpId(op), ThreadId(word >> 32), host_ns)
    if kind == EVENT_RECORD:
        return EventRecord(*common, EventId(a), StreamId(b))
    if kind == EVENT_SYNC:
        return EventSync(*common, EventId(a))
    purpose = Purpose(word >> 16 & 0xFFFF)
    if kind == EVENT_WAIT:
        return EventWait(*common, EventId(a), StreamId(b), purpose)
    assert kind == WAIT_STREAM, kind
    return WaitStream(*common, StreamId(a), StreamId(b), purpose)


def cut_text(text: str) -> bytes:
    """UTF-8 of ``text``, at most ``MAX_TEXT_BYTES`` long, cut on a character boundary."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_TEXT_BYTES:
        return data
    return data[:MAX_TEXT_BYTES].decode("utf-8", "ignore").encode()
