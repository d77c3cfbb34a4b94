"""Random small traces that use every record kind: what the analyzer is fuzzed with. Equal seeds give equal traces."""

from __future__ import annotations

import random
from itertools import count

import numpy as np

from hicache_obs.records import (
    ALL_LAYERS,
    IN_ORDER,
    NO_OP,
    Access,
    Define,
    DefineSpace,
    Direction,
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
    IoKind,
    Kernel,
    Memcpy,
    Mode,
    OpId,
    PageAlloc,
    PageFree,
    PageIds,
    Record,
    RecordStream,
    Relocate,
    Space,
    StreamId,
    StreamKind,
    TensorAlloc,
    TensorFree,
    ThreadId,
    ThreadPost,
    ThreadRecv,
    WaitStream,
)

STREAMS = {0: StreamKind.LEGACY, 1: StreamKind.BLOCKING, 2: StreamKind.NONBLOCKING, 3: StreamKind.NONBLOCKING}
EVENTS, THREADS, PAGES, LAYERS, GRAPHS, BLOCKS = 3, 2, 4, 3, 2, 2


class _Writer:
    """Adds random steps to a trace, keeping it well formed: no receive without a post, no end without a begin."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._ops = count()
        self._arrays: dict[tuple[int, ...], PageIds] = {}
        self._posted = [0, 0]
        self._open_ios: list[int] = []
        self._ids = count()
        self._tensors: dict[int, int] = {}
        self._kinds = (
            self._work, self._layers, self._record, self._wait, self._wait_stream, self._host_sync, self._query,
            self._host_access, self._graph, self._io, self._end_io, self._post, self._receive, self._tensor,
            self._relocate, self._owner,
        )  # fmt: skip
        # Every program has a taste of its own: with all kinds in each, the long chains some rules need are rare.
        usual = (26, 8, 8, 10, 6, 4, 3, 4, 5, 4, 4, 4, 4, 6, 2, 6)
        self._weights = [weight * rng.choice((0, 0.3, 1, 1, 4)) for weight in usual]
        self._weights[0] += 5
        self.records: list[Record] = [
            Define(NO_OP, ThreadId(0), 0, DefineSpace.STREAM, stream, f"s{stream}", kind)
            for stream, kind in STREAMS.items()
        ]

    def step(self) -> None:
        """One step, or a short run of steps that belong together."""
        self._rng.choices(self._kinds, self._weights)[0]()

    def _head(self) -> tuple[OpId, ThreadId, int]:
        op = next(self._ops)
        return OpId(op), ThreadId(self._rng.randrange(THREADS)), op * 1000

    def _stream(self) -> StreamId:
        return StreamId(self._rng.choice((0, 1, 2, 2, 3, 3)))

    def _event(self) -> EventId:
        return EventId(self._rng.randrange(EVENTS))

    def _array(self, limit: int = PAGES) -> PageIds:
        ids = tuple(sorted(self._rng.sample(range(limit), self._rng.randint(1, 2))))
        return self._arrays.setdefault(ids, np.array(ids, np.int64))

    def _accesses(self) -> tuple[Access, ...]:
        spaces = self._rng.choices((Space.DEVICE, Space.HOST, Space.BUFFER), (6, 2, 2), k=self._rng.randint(1, 2))
        return tuple(
            Access(space, self._rng.choice(tuple(Mode)), self._array(BLOCKS if space is Space.BUFFER else PAGES))
            for space in spaces
        )

    def _layer(self) -> tuple[int, int]:
        if self._rng.random() < 0.6:
            return ALL_LAYERS
        low = self._rng.randrange(LAYERS)
        return low, self._rng.randint(low + 1, LAYERS)

    def _put(self, accesses: tuple[Access, ...], stream: StreamId, layers: tuple[int, int]) -> None:
        fields = (*self._head(), stream, 0, 0, 0, layers, accesses)
        if self._rng.random() < 0.5:
            self.records.append(Kernel(*fields))
        else:
            self.records.append(Memcpy(*fields, self._rng.choice(tuple(Direction))))

    def _work(self) -> None:
        self._put(self._accesses(), self._stream(), self._layer())

    def _layers(self) -> None:
        accesses, stream = self._accesses(), self._stream()
        for layer in self._rng.choice(((0, 1), (0, 1, 2), (0, 2), (1, 0))):
            self._put(accesses, stream, (layer, layer + 1))
            if self._rng.random() < 0.3:
                self._record(stream)

    def _record(self, stream: StreamId | None = None) -> None:
        self.records.append(EventRecord(*self._head(), self._event(), self._stream() if stream is None else stream))

    def _wait(self) -> None:
        self.records.append(EventWait(*self._head(), self._event(), self._stream()))

    def _wait_stream(self) -> None:
        waiter, on = self._rng.sample(range(4), 2)
        self.records.append(WaitStream(*self._head(), StreamId(waiter), StreamId(on)))

    def _host_sync(self) -> None:
        if self._rng.random() < 0.5:
            self.records.append(EventSync(*self._head(), self._event()))
        else:
            stream = None if self._rng.random() < 0.15 else self._stream()
            self.records.append(HostSync(*self._head(), stream))

    def _query(self) -> None:
        self.records.append(EventQuery(*self._head(), self._event(), self._rng.random() < 0.7))

    def _host_access(self) -> None:
        self.records.append(HostAccess(*self._head(), 0, self._layer(), self._accesses()))

    def _graph(self) -> None:
        nodes = self._rng.choice((0, 0, 2, 3))
        accesses = () if nodes else self._accesses()
        graph = self._rng.randrange(GRAPHS)
        self.records.append(GraphReplay(*self._head(), graph, self._stream(), 0, 0, nodes, self._layer(), accesses))
        thread = self.records[-1].thread
        for index in range(nodes):
            op = next(self._ops)
            event = self._event() if self._rng.random() < 0.25 else None
            after = IN_ORDER if self._rng.random() < 0.5 else self._rng.getrandbits(index) if index else 0
            work = () if event is not None else self._accesses()
            self.records.append(GraphNode(OpId(op), thread, op * 1000, index, after, event, self._layer(), work))

    def _io(self) -> None:
        self._open_ios.append(next(self._ids))
        kind = self._rng.choice(tuple(IoKind))
        self.records.append(IoBegin(*self._head(), self._open_ios[-1], kind, 0, self._layer(), self._accesses()))

    def _end_io(self) -> None:
        if self._open_ios:
            io = self._open_ios.pop(self._rng.randrange(len(self._open_ios)))
            for _ in range(self._rng.choice((1, 1, 2))):  # another thread may learn of the same end
                self.records.append(IoEnd(*self._head(), io))

    def _post(self) -> None:
        channel = self._rng.randrange(2)
        self._posted[channel] += 1
        self.records.append(ThreadPost(*self._head(), channel))

    def _receive(self) -> None:
        channel = self._rng.randrange(2)
        if self._posted[channel]:
            self._posted[channel] -= 1
            self.records.append(ThreadRecv(*self._head(), channel))

    def _tensor(self) -> None:
        free = [block for block in range(BLOCKS) if block not in self._tensors.values()]
        action = self._rng.random()
        if free and (action < 0.4 or not self._tensors):
            tensor, block = next(self._ids), self._rng.choice(free)
            self._tensors[tensor] = block
            self.records.append(TensorAlloc(*self._head(), tensor, block, self._stream()))
        elif self._tensors:
            tensor = self._rng.choice(list(self._tensors))
            if action < 0.6:
                self.records.append(RecordStream(*self._head(), tensor, self._stream()))
            else:
                del self._tensors[tensor]
                self.records.append(TensorFree(*self._head(), tensor))

    def _owner(self) -> None:
        space, ids = self._rng.choice((Space.DEVICE, Space.DEVICE, Space.HOST)), self._array()
        kind = PageAlloc if self._rng.random() < 0.5 else PageFree
        self.records.append(kind(*self._head(), self._rng.choice((0, 0, 0, 1)), Access(space, Mode.WRITE, ids)))

    def _relocate(self) -> None:
        old, new = self._rng.sample(range(PAGES), 2)
        accesses = (
            Access(Space.DEVICE, Mode.READ, np.array([old], np.int64)),
            Access(Space.DEVICE, Mode.WRITE, np.array([new], np.int64)),
        )
        self.records.append(Relocate(*self._head(), self._stream(), 0, ALL_LAYERS, accesses))


def random_program(seed: int, *, steps: int = 24) -> list[Record]:
    """A well-formed random trace of up to ``steps`` steps: four streams of all kinds, two host threads."""
    rng = random.Random(seed)
    writer = _Writer(rng)
    for _ in range(rng.randint(3, steps)):
        writer.step()
    return writer.records
