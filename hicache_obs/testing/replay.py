"""Replays a witness on the virtual device: does it happen as claimed, and what do the pages hold then?

Every item becomes two launches on a stream of its actor, its beginning and its end, behind waits for the events of
its predecessors: the device enforces the edges, the schedule only picks among what may run. Memory is modelled for the
layer the two accesses share. A page has two halves; the beginning of an item touches the first, its end the second,
so that two writes in flight together leave a torn page.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from hicache_obs.analyzer.graph import Item, Lane
from hicache_obs.analyzer.witness import Cell, Moment, Step, Witness, fault
from hicache_obs.errors import StreamError
from hicache_obs.records import Mode, OpId, Space, Work
from hicache_obs.streams.protocol import Event, Probe, Stream
from hicache_obs.streams.schedule import Board, Queued
from hicache_obs.streams.virtual import VirtualDevice

Halves = tuple[OpId | None, OpId | None]
"""Who wrote the two halves of a page; ``None``: nobody in this run."""
_Half = tuple[Space, int, int, Moment]
"""Half of a page: space, pool, page, and the moment at which an item touches it."""


@dataclass(frozen=True, slots=True)
class Content:
    """One shared page after a replay.

    Attributes:
        cell: The page, and what the two accesses do to it.
        left: What it holds at the end.
        earlier_read, later_read: What each of the two read there, ``None`` if it does not read it.
        wrong: Whether this differs from a run in issue order: the later write is not what remains, or a reader saw
            a write that comes after it or missed one that comes before it.
    """

    cell: Cell
    left: Halves
    earlier_read: Halves | None
    later_read: Halves | None
    wrong: bool


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did.

    Attributes:
        earlier_ns, later_ns: When the two accesses ran, begin and end, on the virtual clock.
        contents: Every page they conflict on.
    """

    earlier_ns: tuple[int, int]
    later_ns: tuple[int, int]
    contents: tuple[Content, ...]

    @property
    def overlapped(self) -> bool:
        """Whether both were in flight at one time."""
        return self.earlier_ns[0] < self.later_ns[1] and self.later_ns[0] < self.earlier_ns[1]

    @property
    def reversed(self) -> bool:
        """Whether the later one was complete when the earlier one began."""
        return self.later_ns[1] <= self.earlier_ns[0]

    @property
    def all_wrong(self) -> bool:
        """Whether every shared page, or what was read of it, came out wrong."""
        return all(content.wrong for content in self.contents)


def replay(found: Witness, schedule: Sequence[Step]) -> Replayed:
    """Run ``schedule``, one of ``found``'s or one of your own over the same items, on a virtual device.

    Raises:
        StreamError: The schedule is not legal; the message names the step.
    """
    problem = fault(found.items, schedule)
    if problem:
        raise StreamError(f"refused, not a legal schedule: {problem}")
    return _Run(found).play(schedule)


class _Chosen:
    """A ``Schedule`` that runs nothing but what it is told to, one list of queue positions per host call."""

    name: Final = "witness"
    overlapped: Final = True
    host_waits: Final = True

    def __init__(self) -> None:
        self.next: list[int] = []

    def on_call(self, board: Board) -> Iterator[Queued]:
        chosen, self.next = self.next, []
        for seq in chosen:
            heads = [head for head in board.heads() if head.seq == seq]
            if not heads:
                raise StreamError(f"refused, not a legal schedule: queued item {seq} cannot run now")
            yield heads[0]

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        return iter(())


class _Run:
    """The device, the memory, and where each half of each item is queued."""

    def __init__(self, found: Witness) -> None:
        self._found = found
        self._order = _Chosen()
        self._device = VirtualDevice(self._order)
        self._queued = 0
        self._streams: dict[Lane, Stream] = {}
        self._events: dict[int, Event] = {}
        self._seqs: dict[tuple[int, Moment], list[int]] = {}
        self._probes: dict[tuple[int, Moment], Probe] = {}
        self._memory: dict[_Half, OpId] = {}
        self._reads: dict[tuple[int, _Half], OpId | None] = {}
        for item in found.items:
            self._queue(item)

    def play(self, schedule: Sequence[Step]) -> Replayed:
        """One host call per slot; the host stands still until what it started there is over."""
        tick = self._device.Event()
        slots: dict[int, list[int]] = {}
        for step in schedule:
            slots.setdefault(step.slot, []).extend(self._seqs[step.item, step.moment])
        for seqs in slots.values():
            self._order.next = seqs
            tick.query()
        self._device.close()
        found = self._found
        contents = tuple(self._content(cell) for cell in found.cells)
        return Replayed(self._times(found.earlier), self._times(found.later), contents)

    def _queue(self, item: Item) -> None:
        stream = self._streams.get(item.lane)
        if stream is None:
            stream = self._streams[item.lane] = self._device.Stream(item.actor)
        first = self._queued + 1
        for index in item.before:
            stream.wait_event(self._events[index])
            self._queued += 1
        with self._device.stream(stream):
            self._launch(item, Moment.BEGIN, first)
            self._launch(item, Moment.END, self._queued + 1)
        self._events[item.index] = stream.record_event()
        self._queued += 1
        self._seqs[item.index, Moment.END].append(self._queued)

    def _launch(self, item: Item, moment: Moment, first: int) -> None:
        probe = self._probes[item.index, moment] = self._device.probe()
        self._device.launch(lambda: self._touch(item, moment), Work(f"op {item.op}"), probe=probe)
        self._queued += 1
        self._seqs[item.index, moment] = list(range(first, self._queued + 1))

    def _touch(self, item: Item, moment: Moment) -> None:
        """Read, then write, one half of every page the item touches in the shared layer."""
        if not item.layers[0] <= self._found.layer < item.layers[1]:
            return
        for mode in Mode:
            for access in item.accesses:
                for page in access.ids.tolist() if access.mode is mode else ():
                    place = (access.space, access.pool, page, moment)
                    if mode is Mode.READ:
                        self._reads[item.index, place] = self._memory.get(place)
                    else:
                        self._memory[place] = item.op

    def _times(self, item: Item) -> tuple[int, int]:
        begin, end = (self._probes[item.index, moment].times_ns() for moment in Moment)
        return begin[0], end[1]

    def _content(self, cell: Cell) -> Content:
        a, b = self._found.earlier, self._found.later
        begin, end = (self._memory.get((cell.space, cell.pool, cell.page, moment)) for moment in Moment)
        left = (begin, end)
        first, second = self._read(a, cell), self._read(b, cell)
        wrong = first is not None and cell.later is Mode.WRITE and b.op in first
        wrong |= second is not None and cell.earlier is Mode.WRITE and second != (a.op, a.op)
        wrong |= cell.earlier is cell.later is Mode.WRITE and left != (b.op, b.op)
        return Content(cell, left, first, second, wrong)

    def _read(self, item: Item, cell: Cell) -> Halves | None:
        begin, end = ((item.index, (cell.space, cell.pool, cell.page, moment)) for moment in Moment)
        return (self._reads[begin], self._reads[end]) if begin in self._reads else None
