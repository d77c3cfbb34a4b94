"""Wrong contents on their way: which pages hold them, at which layers, because of which races. Pure.

A *source* is a bit, one per race that is told apart. A page's *mark* is a small number that stands for the sources
at each of its layers, so that what happens to thousands of pages at once is a few array operations.

A page given to a new owner starts afresh. Every mark is therefore stamped with its owner, the position in the trace
of the page's last allocation, and an operation meets only marks of the owner it was issued for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_obs.analyzer.shadow import Operation
from hicache_obs.records import Access, Mode, PageIds, Rows, Space, unpack_rows

MAX_REACHED: Final = 1 << 16
"""Requests, rounds, transfers and I/O transfers kept, each."""
MAX_LAYER: Final = 4096
"""Layers from here on count as one."""
ALL: Final = -1
"""Mask of all layers. Masks and sources are bit sets."""
COPIES: Final = frozenset({"restore", "backup", "copy", "relocate", "storage", "device read", "rdma"})
IO: Final = frozenset({"storage", "device read", "rdma"})
ROUNDS: Final = frozenset({"forward", "graph"})

Pool = tuple[Space, int]
Value = tuple[tuple[int, int], ...]
"""What a mark stands for: layer mask and sources, once per different sources."""
Marks = npt.NDArray[np.int32]
_Key = TypeVar("_Key")
_SEQ_BITS: Final = 37
_NO_KEYS: Final = np.zeros(0, np.int64)
_NO_PAGE: Final = np.iinfo(np.int64).max


class _Table:
    """The values of marks. Mark 0 is clean."""

    def __init__(self) -> None:
        self.values: list[Value] = [()]
        self._marks: dict[Value, int] = {(): 0}
        self._joined: dict[tuple[int, int, int], int] = {}

    def _mark(self, value: Value) -> int:
        mark = self._marks.get(value)
        if mark is None:
            mark = self._marks[value] = len(self.values)
            self.values.append(value)
        return mark

    def _join(self, mark: int, mask: int, sources: int) -> int:
        key = mark, mask, sources
        known = self._joined.get(key)
        if known is None:
            masks = {bits: layers for layers, bits in self.values[mark]}
            masks[sources] = masks.get(sources, 0) | mask
            known = self._joined[key] = self._mark(tuple((layers, bits) for bits, layers in sorted(masks.items())))
        return known

    def join(self, marks: Marks, mask: int, sources: int) -> Marks:
        """``marks`` with ``sources`` added at the layers of ``mask``."""
        return self._map(marks, {mark: self._join(mark, mask, sources) for mark in distinct(marks)})

    def cut(self, marks: Marks, mask: int) -> Marks:
        """``marks`` without the layers of ``mask``."""
        kept = {
            mark: self._mark(tuple((left, bits) for layers, bits in self.values[mark] if (left := layers & ~mask)))
            for mark in distinct(marks)
        }
        return self._map(marks, kept)

    def _map(self, marks: Marks, to: Mapping[int, int]) -> Marks:
        if len(to) == 1:
            return np.full(len(marks), next(iter(to.values())), np.int32)
        table = np.zeros(len(self.values), np.int32)
        for mark, new in to.items():
            table[mark] = new
        return table[marks]


def distinct(marks: Marks) -> list[int]:
    """The different numbers in ``marks``; most often there is one, which is quick to see."""
    if not len(marks):
        return []
    first = int(marks[0])
    if (marks == first).all():
        return [first]
    found: list[int] = np.unique(marks).tolist()
    return found


@dataclass(slots=True, eq=False)
class _Cells:
    """Those pages of one space and pool that were ever wrong, by ascending id; behind them one that never is.

    Attributes:
        ids: Of each page.
        marks: What it holds now.
        owners: Stamp of the mark.
        ever: What it ever held, layers left out.
    """

    ids: PageIds = field(default_factory=lambda: np.full(1, _NO_PAGE, np.int64))
    marks: Marks = field(default_factory=lambda: np.zeros(1, np.int32))
    owners: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(1, -1, np.int64))
    ever: Marks = field(default_factory=lambda: np.zeros(1, np.int32))

    def reach(self, pages: PageIds) -> PageIds:
        """Where ``pages`` are, which get a place if they have none."""
        ids = np.union1d(self.ids, pages)
        if len(ids) > len(self.ids):
            place = np.searchsorted(ids, self.ids)
            for name in ("marks", "owners", "ever"):
                old = getattr(self, name)
                new = np.full(len(ids), -1 if name == "owners" else 0, old.dtype)
                new[place] = old
                setattr(self, name, new)
            self.ids = ids
        return self.places(pages)

    def places(self, pages: PageIds) -> PageIds:
        """Where ``pages`` are; that of the last, clean one for those that have no place."""
        found = np.searchsorted(self.ids, pages)
        return np.where(self.ids[found] == pages, found, len(self.ids) - 1)

    def copy(self) -> _Cells:
        return _Cells(self.ids, self.marks.copy(), self.owners.copy(), self.ever.copy())


class Owners:
    """Last allocation of each page before a position in the trace, -1 if none is known.

    Args:
        allocations: Position and pages of each, in trace order.
    """

    def __init__(self, allocations: Iterable[tuple[int, Access]]) -> None:
        keys: dict[Pool, list[npt.NDArray[np.int64]]] = {}
        for seq, access in allocations:
            keys.setdefault((access.space, access.pool), []).append((access.ids << _SEQ_BITS) | seq)
        self._keys = {pool: np.sort(np.concatenate(found)) for pool, found in keys.items()}

    def before(self, pool: Pool, pages: PageIds, seq: int) -> npt.NDArray[np.int64]:
        """``(n,) int64`` position of each page's last allocation before ``seq``."""
        keys = self._keys.get(pool, _NO_KEYS)
        if not len(keys):
            return np.full(len(pages), -1, np.int64)
        last = keys[np.maximum(np.searchsorted(keys, (pages << _SEQ_BITS) | seq) - 1, 0)]
        owned = (last >> _SEQ_BITS == pages) & (last & ((1 << _SEQ_BITS) - 1) < seq)
        return np.where(owned, last & ((1 << _SEQ_BITS) - 1), -1)


@dataclass(frozen=True, slots=True, eq=False)
class Wrong:
    """Pages whose contents are wrong at some layers because of a race.

    Attributes:
        pool, pages, mask, source: Which.
        seq: Position in the trace of the operation whose owner's contents they should be.
    """

    pool: Pool
    pages: PageIds
    mask: int
    source: int
    seq: int


@dataclass(frozen=True, slots=True, eq=False)
class _Hit:
    """Positions in an access's ids that are read wrong."""

    access: Access
    positions: PageIds
    value: Value

    @property
    def sources(self) -> int:
        return union(bits for _, bits in self.value)


@dataclass(slots=True)
class Reached:
    """What was ever read, moved or computed wrong: number to sources."""

    requests: dict[int, int] = field(default_factory=dict)
    rounds: dict[int, int] = field(default_factory=dict)
    transfers: dict[int, int] = field(default_factory=dict)
    ios: dict[int, int] = field(default_factory=dict)
    rows: dict[tuple[int, int], int] = field(default_factory=dict)
    """By round and row: what a later segment of the round starts with."""
    cut: int = 0
    """Sources of what was forgotten."""
    vague: int = 0
    """Sources that may have reached less than this."""

    def note(self, table: dict[_Key, int], key: _Key, sources: int) -> None:
        if key not in table and len(table) >= MAX_REACHED:
            self.cut |= table.pop(next(iter(table)))
        table[key] = table.get(key, 0) | sources

    def copy(self) -> Reached:
        requests, rounds, transfers, ios = map(dict, (self.requests, self.rounds, self.transfers, self.ios))
        return Reached(requests, rounds, transfers, ios, dict(self.rows), self.cut, self.vague)


class Spread:
    """Wrong contents at one moment. Operations are run in the order in which they are taken to have happened."""

    def __init__(self) -> None:
        self.reached = Reached()
        self._cells: dict[Pool, _Cells] = {}
        self._table = _Table()
        self._owners = Owners(())
        self._discarded: Mapping[int, frozenset[int]] = {}
        self._rows: dict[int, tuple[PageIds, Rows | None]] = {}

    @property
    def empty(self) -> bool:
        """Nothing has ever been wrong."""
        return not self._cells

    def fork(self, owners: Owners, discarded: Mapping[int, frozenset[int]]) -> Spread:
        """A copy that goes on with these allocations, and these requests whose results were thrown away, by round."""
        other = Spread()
        other.reached = self.reached.copy()
        other._cells = {pool: cells.copy() for pool, cells in self._cells.items()}
        other._table = self._table
        other._owners = owners
        other._discarded = discarded
        return other

    def settle(self, seq: int, rounds: Collection[int] = ()) -> None:
        """Allocations before ``seq`` are behind: what they ended is clean, and what is left has no stamp.

        ``rounds`` may have segments still to come.
        """
        for pool, cells in self._cells.items():
            places = np.flatnonzero(cells.marks)
            over = places[self._owners.before(pool, cells.ids[places], seq) != cells.owners[places]]
            cells.marks[over] = 0
            cells.owners[:] = -1
        rows = self.reached.rows
        self.reached.rows = {key: sources for key, sources in rows.items() if key[0] in rounds}
        self._rows.clear()
        old, self._table = self._table, _Table()
        for cells in self._cells.values():
            for marks in (cells.marks, cells.ever):
                used = np.flatnonzero(marks)
                before = marks[used]
                for mark in distinct(before):
                    new = np.zeros(1, np.int32)
                    for mask, sources in old.values[mark]:
                        new = self._table.join(new, mask, sources)
                    marks[used[before == mark]] = new[0]

    def sources(self) -> int:
        """Sources that some page holds now."""
        marks = (mark for cells in self._cells.values() for mark in distinct(cells.marks))
        return union(bits for mark in marks for _, bits in self._table.values[mark])

    def held(self, pool: Pool, pages: PageIds) -> int:
        """Sources that some of these pages ever held."""
        cells = self._cells.get(pool) or _Cells()
        return union(bits for mark in distinct(cells.ever[cells.places(pages)]) for _, bits in self._table.values[mark])

    def ever(self, source: int) -> list[tuple[Space, int, int]]:
        """Space, pool and number of each page that ever held contents wrong because of ``source``; ascending."""
        found = []
        for (space, pool), cells in self._cells.items():
            marks = [m for m in distinct(cells.ever) if any(bits & source for _, bits in self._table.values[m])]
            pages = cells.ids[np.isin(cells.ever, marks)]
            found += [(space, pool, page) for page in pages.tolist()]
        return sorted(found)

    def taint(self, wrong: Wrong) -> None:
        """These pages now hold wrong contents, unless they have a newer owner already."""
        pages = wrong.pages
        if not len(pages):
            return
        cells = self._cells.get(wrong.pool)
        if cells is None:
            cells = self._cells[wrong.pool] = _Cells()
        places = cells.reach(pages)
        owners = self._owners.before(wrong.pool, pages, wrong.seq)
        marks, stamps = cells.marks[places], cells.owners[places]
        marked = marks != 0
        newer = marked & (stamps > owners)
        joined = self._table.join(np.where(marked & (stamps == owners), marks, 0), wrong.mask, wrong.source)
        cells.marks[places] = np.where(newer, marks, joined)
        cells.owners[places] = np.where(newer, stamps, owners)
        cells.ever[places] = self._table.join(cells.ever[places], ALL, wrong.source)

    def run(self, operation: Operation, wrong: Sequence[Wrong] = ()) -> None:
        """Spread through one operation; ``wrong`` is what it reads wrong, whatever its pages hold."""
        mask = layer_mask(operation.layers)
        reads = (access for access in operation.group.accesses if access.mode is Mode.READ and len(access.ids))
        hits = [hit for access in reads for hit in self._hits(access, mask, operation.seq, wrong)]
        what = operation.label.what
        if what in COPIES:
            self._copy(operation, mask, hits)
        elif what in ROUNDS:
            self._round(operation, self._unpacked(operation.rows), hits)
        elif hits:
            self._all(operation, union(hit.sources for hit in hits))

    def _hits(self, access: Access, mask: int, seq: int, wrong: Sequence[Wrong]) -> list[_Hit]:
        pool = access.space, access.pool
        cells = self._cells.get(pool)
        found = []
        for item in wrong:
            if item.pool == pool and item.mask & mask:
                places = np.flatnonzero(np.isin(access.ids, item.pages))
                if len(places):
                    found.append(_Hit(access, places, ((item.mask & mask, item.source),)))
        if cells is None:
            return found
        positions, places = self._marked(pool, cells, access.ids, seq)
        marks = cells.marks[places]
        for mark in distinct(marks):
            value = tuple((layers & mask, bits) for layers, bits in self._table.values[mark] if layers & mask)
            if value:
                found.append(_Hit(access, positions[marks == mark], value))
        return found

    def _marked(self, pool: Pool, cells: _Cells, ids: PageIds, seq: int) -> tuple[PageIds, PageIds]:
        """Positions in ``ids`` that hold wrong contents of the owner at ``seq``, and where in ``cells`` they are."""
        places = cells.places(ids)
        positions: PageIds = np.flatnonzero(cells.marks[places])
        places = places[positions]
        own = cells.owners[places] == self._owners.before(pool, ids[positions], seq)
        return positions[own], places[own]

    def _clean(self, access: Access, mask: int, seq: int) -> None:
        """A copy has written whole pages, at the layers of ``mask``."""
        pool = access.space, access.pool
        cells = self._cells.get(pool)
        if cells is not None:
            _, places = self._marked(pool, cells, access.ids, seq)
            cells.marks[places] = self._table.cut(cells.marks[places], mask)

    def _copy(self, operation: Operation, mask: int, hits: list[_Hit]) -> None:
        """Page by page if a copy reads as many pages as it writes, else all by all. Wrong indices spoil all."""
        accesses, seq = operation.group.accesses, operation.seq
        sources = [a for a in accesses if a.mode is Mode.READ and a.space is not Space.BUFFER]
        targets = [a for a in accesses if a.mode is Mode.WRITE]
        offsets = dict(zip(map(id, sources), np.cumsum([0, *(len(a.ids) for a in sources)]).tolist(), strict=False))
        aligned = sum(len(a.ids) for a in sources) == sum(len(a.ids) for a in targets)
        spread = union(hit.sources for hit in hits)
        self._note_copy(operation, spread)
        start = 0
        for target in targets:
            pool = target.space, target.pool
            self._clean(target, mask, seq)
            for hit in hits:
                if hit.access.space is Space.BUFFER or not aligned:
                    self.reached.vague |= hit.sources
                    pages, value = target.ids, hit.value
                    if hit.access.space is Space.BUFFER:
                        value = ((mask, hit.sources),)
                else:
                    places = hit.positions + (offsets[id(hit.access)] - start)
                    pages, value = target.ids[places[(places >= 0) & (places < len(target.ids))]], hit.value
                for layers, bits in value:
                    self.taint(Wrong(pool, pages, layers, bits, seq))
            start += len(target.ids)

    def _note_copy(self, operation: Operation, sources: int) -> None:
        label, reached = operation.label, self.reached
        if sources and label.what != "relocate":
            reached.note(reached.ios if label.what in IO else reached.transfers, label.number, sources)

    def _round(self, operation: Operation, rows: Rows | None, hits: list[_Hit]) -> None:
        """A row that reads wrong contents computes wrong contents, in this segment of its round and in later ones."""
        reached, number = self.reached, operation.label.number
        pools = {access.pool for access in operation.group.accesses if access.space is Space.DEVICE}
        if rows is None or len(pools) != 1 or any(hit.access.space is not Space.DEVICE for hit in hits):
            sources = union(hit.sources for hit in hits) | (reached.rounds.get(number, 0) if number else 0)
            if sources:
                self._all(operation, sources)
                reached.note(reached.rounds, number, sources)
                if rows is not None:
                    self._note_requests(number, rows, dict.fromkeys(range(len(rows.requests)), sources))
            return
        wrong = {row: bits for row in range(len(rows.requests)) if (bits := reached.rows.get((number, row), 0))}
        for hit in hits:
            for row in self._rows_of(rows, hit):
                wrong[row] = wrong.get(row, 0) | hit.sources
        if not wrong:
            return
        reached.note(reached.rounds, number, union(wrong.values()))
        self._note_requests(number, rows, wrong)
        pool = Space.DEVICE, pools.pop()
        for bits in set(wrong.values()):
            ends = [(rows.starts[row + 1], rows.writes[row]) for row, sources in wrong.items() if sources == bits]
            written = np.concatenate([rows.pages[end - count : end] for end, count in ends])
            self.taint(Wrong(pool, np.unique(written), ALL, bits, operation.seq))
        for access in operation.group.accesses:
            if access.mode is Mode.WRITE and access.space is not Space.DEVICE:
                self.reached.vague |= union(wrong.values())
                self.taint(Wrong((access.space, access.pool), access.ids, ALL, union(wrong.values()), operation.seq))

    def _rows_of(self, rows: Rows, hit: _Hit) -> list[int]:
        """Rows that read a page of ``hit``."""
        places = np.flatnonzero(np.isin(rows.pages, hit.access.ids[hit.positions]))
        users = np.searchsorted(rows.starts, places, side="right") - 1
        found: list[int] = np.unique(users[places - rows.starts[users] < rows.reads[users]]).tolist()
        return found

    def _note_requests(self, number: int, rows: Rows, wrong: Mapping[int, int]) -> None:
        reached, discarded = self.reached, self._discarded.get(number, frozenset())
        for row, bits in wrong.items():
            reached.note(reached.rows, (number, row), bits)
            request = int(rows.requests[row])
            if request not in discarded:
                reached.note(reached.requests, request, bits)

    def _all(self, operation: Operation, sources: int) -> None:
        """Which read made which write is not known."""
        self.reached.vague |= sources
        for access in operation.group.accesses:
            if access.mode is Mode.WRITE:
                self.taint(Wrong((access.space, access.pool), access.ids, ALL, sources, operation.seq))

    def _unpacked(self, rows: PageIds | None) -> Rows | None:
        if rows is None:
            return None
        known = self._rows.get(id(rows))
        if known is None:
            try:
                known = rows, unpack_rows(rows)
            except ValueError:
                known = rows, None
            self._rows[id(rows)] = known
        return known[1]


def layer_mask(layers: tuple[int, int]) -> int:
    """Bit set of a layer range; what a damaged ring calls a layer below 0 is none."""
    low, high = min(max(layers[0], 0), MAX_LAYER), max(*layers, 0)
    return ALL << low if high > MAX_LAYER else (1 << high) - (1 << low)


def union(sets: Iterable[int]) -> int:
    """Union of bit sets."""
    found = 0
    for bits in sets:
        found |= bits
    return found
