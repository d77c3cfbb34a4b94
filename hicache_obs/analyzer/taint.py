"""Blast radius: what read or copied a raced page since, by race. Pure; fed by the analyzer in trace order.

What is wrong after a race, as its two operations could have run in either order or both at once: pages that both
write, and whatever an operation made of pages that it read while the other wrote them. From there it spreads:

* a copy taints what it writes with what it reads: page by page if it reads as many as it writes, else all by all;
  for its own layers;
* a forward round (``Kernel`` group) that reads a tainted page is tainted, and with it, at all layers, every page
  it writes: the token it samples is wrong, and the next round begins with that token;
* a copy cleans what it overwrites, at its layers, and ``PageAlloc`` cleans a page for its next owner; both before
  the taint of the same operation. Kernels write parts of pages and clean nothing.

A race is noticed when its later operation is issued, long after its earlier one may have been read from. Recent
operations are therefore kept, and each race is played through them from the first operation it can have spoiled.

The radius is an over-approximation. In it are all requests of a tainted round, since records do not say which row
read which page; a request whose tokens happen to survive; and what a race would spoil, whether or not the order
was kept this time (the finding's verdict tells). It is complete for what the records state, within the bounds
below (else ``BlastRadius.complete`` is false), with one exception: a request that is retracted after a tainted
round and starts over from its wrong tokens is in the radius by the earlier round alone; what it computes afresh is
right for those tokens.

With no race, the cost is one append per operation.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from hicache_obs.analyzer.shadow import Operation, Overlap
from hicache_obs.findings import BlastRadius
from hicache_obs.records import Access, Mode, OpId, Space

MAX_RECENT: Final = 4096
"""Operations kept for races that are noticed late."""
MAX_SOURCES: Final = 512
"""Races told apart; one more shares the radius of the latest of its kind."""
MAX_REACHED: Final = 1 << 16
"""Pages, rounds, transfers, I/O transfers and operation pairs kept, each."""
MAX_LAYER: Final = 4096
"""Layers from here on count as one."""

Pair = tuple[OpId, OpId]
_Key = TypeVar("_Key")
_Cell = tuple[Space, int, int]
"""Space, pool, page."""
_Tenant = dict[int, int]
"""Taint of a page: layer mask to sources. Both are bit sets; a mask of -1 is all layers."""
_ALL: Final = -1
_COPIES: Final = frozenset({"restore", "backup", "copy", "relocate", "storage", "device read", "rdma"})
_IO: Final = frozenset({"storage", "device read", "rdma"})
_ROUNDS: Final = frozenset({"forward", "graph"})


class _Pool:
    """Tainted pages of one space and pool. ``flags`` lets untainted accesses pass with one gather."""

    def __init__(self) -> None:
        self.flags: npt.NDArray[np.bool_] = np.zeros(1024, np.bool_)  # the last stays false: ids beyond clip to it
        self.tenants: dict[int, _Tenant] = {}

    def tainted(self, access: Access) -> list[int]:
        """Positions in ``access.ids`` of tainted pages."""
        found: list[int] = np.flatnonzero(self.flags.take(access.ids, mode="clip")).tolist()
        return found

    def add(self, page: int, mask: int, sources: int) -> None:
        if page + 1 >= len(self.flags):
            grown = np.zeros(2 * (page + 1), np.bool_)
            grown[: len(self.flags)] = self.flags
            self.flags = grown
        self.flags[page] = True
        tenant = self.tenants.setdefault(page, {})
        tenant[mask] = tenant.get(mask, 0) | sources

    def clean(self, page: int, mask: int) -> None:
        """Take the layers of ``mask`` away."""
        left: _Tenant = {}
        for layers, sources in self.tenants.pop(page, {}).items():
            if kept := layers & ~mask:
                left[kept] = left.get(kept, 0) | sources
        if left:
            self.tenants[page] = left
        self.flags[page] = bool(left)


@dataclass(slots=True)
class _Reached:
    """What was ever tainted: identity to sources."""

    rounds: dict[int, int] = field(default_factory=dict)
    transfers: dict[int, int] = field(default_factory=dict)
    ios: dict[int, int] = field(default_factory=dict)
    pages: dict[_Cell, int] = field(default_factory=dict)
    cut: int = 0
    """Sources of what was forgotten."""

    def note(self, table: dict[_Key, int], key: _Key, sources: int) -> None:
        if key not in table and len(table) >= MAX_REACHED:
            self.cut |= table.pop(next(iter(table)))
        table[key] = table.get(key, 0) | sources


class _State:
    """Which pages hold tainted contents now. ``bits``: the sources this state follows."""

    def __init__(self, reached: _Reached, bits: int) -> None:
        self.pools: dict[tuple[Space, int], _Pool] = {}
        self._reached = reached
        self._bits = bits

    def taint(self, cell: _Cell, mask: int, sources: int) -> None:
        space, number, page = cell
        pool = self.pools.get((space, number))
        if pool is not None and not sources & ~pool.tenants.get(page, {}).get(mask, 0):
            return
        self.pools.setdefault((space, number), _Pool()).add(page, mask, sources)
        self._reached.note(self._reached.pages, cell, sources)

    def allocate(self, access: Access) -> None:
        """The pages' next contents are somebody else's."""
        self._clean(access, _ALL)

    def run(self, operation: Operation, raced: dict[_Cell, _Tenant] | None = None) -> None:
        """Spread taint through one operation; ``raced`` holds pages it reads wrong, whatever is known of them."""
        mask = _mask(operation.layers)
        what = operation.label.what
        reads = [self._read(access, mask, raced or {}) for access in operation.group.accesses]
        if what in _COPIES:
            self._copy(operation, mask, reads)
            return
        sources = _union(bits for read in reads for tenant in read.values() for bits in tenant.values())
        number = operation.label.number
        if what in _ROUNDS:
            sources |= self._reached.rounds.get(number, 0) & self._bits if number else 0
            if sources:
                self._reached.note(self._reached.rounds, number, sources)
        if sources:
            for access in operation.group.accesses:
                if access.mode is Mode.WRITE:
                    for page in access.ids.tolist():
                        self.taint((access.space, access.pool, page), _ALL, sources)

    def _read(self, access: Access, mask: int, raced: dict[_Cell, _Tenant]) -> dict[int, _Tenant]:
        """Taint at the positions of a read that have any at the layers of ``mask``."""
        found: dict[int, _Tenant] = {}
        if access.mode is not Mode.READ:
            return found
        pool = self.pools.get((access.space, access.pool))
        if pool is not None:
            for position in pool.tainted(access):
                _add(found, position, pool.tenants[int(access.ids[position])], mask)
        if raced:
            for position, page in enumerate(access.ids.tolist()):
                if tenant := raced.get((access.space, access.pool, page)):
                    _add(found, position, tenant, mask)
        return found

    def _copy(self, operation: Operation, mask: int, reads: list[dict[int, _Tenant]]) -> None:
        accesses = operation.group.accesses
        wrong: dict[int, _Tenant] = {}  # by place in the sources laid end to end
        everywhere: dict[int, _Tenant] = {}  # at place 0, if anything
        length = 0
        for access, read in zip(accesses, reads, strict=True):
            if access.mode is Mode.READ and access.space is not Space.BUFFER:
                wrong.update((length + position, tenant) for position, tenant in read.items())
                length += len(access.ids)
            elif read:  # wrong indices: any page may hold anything
                _add(everywhere, 0, {mask: _union(s for tenant in read.values() for s in tenant.values())}, mask)
        targets = [access for access in accesses if access.mode is Mode.WRITE]
        if length != sum(len(access.ids) for access in targets):
            for tenant in wrong.values():
                _add(everywhere, 0, tenant, mask)
            wrong = {}
        found = (*wrong.values(), *everywhere.values())
        self._note_copy(operation, _union(sources for tenant in found for sources in tenant.values()))
        place = 0
        for access in targets:
            self._clean(access, mask)
            for position in range(len(access.ids)) if everywhere else [p - place for p in wrong]:
                if 0 <= position < len(access.ids):
                    cell = access.space, access.pool, int(access.ids[position])
                    for tenant in (wrong.get(place + position, {}), everywhere.get(0, {})):
                        for layers, sources in tenant.items():
                            self.taint(cell, layers, sources)
            place += len(access.ids)

    def _clean(self, access: Access, mask: int) -> None:
        pool = self.pools.get((access.space, access.pool))
        if pool is not None:
            for position in pool.tainted(access):
                pool.clean(int(access.ids[position]), mask)

    def _note_copy(self, operation: Operation, sources: int) -> None:
        label = operation.label
        if sources and label.what in _IO:
            self._reached.note(self._reached.ios, label.number, sources)
        elif sources and label.what != "relocate":
            self._reached.note(self._reached.transfers, label.number, sources)


class Taint:
    """Blast radius of every race of one trace. Feed in trace order; not thread-safe."""

    def __init__(self) -> None:
        self._recent: deque[Operation | Access] = deque(maxlen=MAX_RECENT)
        self._reached = _Reached()
        self._state = _State(self._reached, _ALL)
        self._groups: dict[tuple[int, int], int] = {}  # numbers of both page groups -> source
        self._kinds: dict[tuple[object, ...], int] = {}
        self._pairs: dict[Pair, int] = {}
        self._fingerprints: dict[str, int] = {}
        self._replayed: tuple[int, Operation] | None = None

    def step(self, operation: Operation) -> None:
        """An operation was issued. Its races, if any, follow at once."""
        self._recent.append(operation)
        if self._state.pools:
            self._state.run(operation)

    def allocate(self, access: Access) -> None:
        """Pages got a new owner."""
        self._recent.append(access)
        if self._state.pools:
            self._state.allocate(access)

    def race(self, earlier: Operation, later: Operation, overlaps: Iterable[Overlap]) -> None:
        """``later`` and ``earlier`` may run in either order or at once; ``later`` has been stepped."""
        source = self._source(earlier, later)
        if not source:
            return
        self._pairs[earlier.op, later.op] = self._pairs.get((earlier.op, later.op), 0) | source
        while len(self._pairs) > MAX_REACHED:
            del self._pairs[next(iter(self._pairs))]
        overlaps = tuple(overlaps)
        state = _State(self._reached, source)
        wrong = _mask((max(earlier.layers[0], later.layers[0]), min(earlier.layers[1], later.layers[1])))
        tenant = {wrong: source}
        reads = {later: _cells((o for o in overlaps if o.later is Mode.READ), tenant)}
        first = later
        if any(o.earlier is Mode.READ for o in overlaps) and self._replayed != (source, earlier):
            first = earlier
            reads[earlier] = _cells((o for o in overlaps if o.earlier is Mode.READ), tenant)
            if earlier.label.what not in _COPIES:  # its next layer's race would taint the same once more
                self._replayed = (source, earlier)
        both = _cells((o for o in overlaps if o.earlier is Mode.WRITE and o.later is Mode.WRITE), tenant)
        steps = self._since(first)
        if steps[0] is not first:
            self._reached.cut |= source
        for step in steps:
            if isinstance(step, Access):
                state.allocate(step)
                continue
            if raced := reads.get(step):
                state.run(step, raced)
            elif state.pools:
                state.run(step)
            if step is later:
                for cell in both:
                    state.taint(cell, wrong, source)
        self._merge(state)

    def name(self, fingerprint: str, pair: Pair) -> None:
        """The race of ``pair`` was reported under ``fingerprint``."""
        source = self._pairs.get(pair, 0)
        if source and (fingerprint in self._fingerprints or len(self._fingerprints) < MAX_REACHED):
            self._fingerprints[fingerprint] = self._fingerprints.get(fingerprint, 0) | source

    def radius(self, race: str | Pair) -> BlastRadius:
        """What one race, or all races of one fingerprint, can have spoiled so far."""
        source = self._fingerprints.get(race, 0) if isinstance(race, str) else self._pairs.get(race, 0)
        reached = self._reached
        pages = sorted(cell for cell, sources in reached.pages.items() if sources & source)
        return BlastRadius(
            rounds=_members(reached.rounds, source),
            transfers=_members(reached.transfers, source),
            ios=_members(reached.ios, source),
            device_pages=tuple((pool, page) for space, pool, page in pages if space is Space.DEVICE),
            host_pages=tuple((pool, page) for space, pool, page in pages if space is Space.HOST),
            complete=bool(source) and not reached.cut & source,
        )

    def _source(self, earlier: Operation, later: Operation) -> int:
        """Bit of the race: one per pair of page groups, so that the layers of a transfer share one."""
        groups = earlier.group.number, later.group.number
        kind = (*_kind(earlier), *_kind(later))
        source = self._groups.get(groups)
        if source is None:
            if len(self._groups) >= MAX_SOURCES:
                source = self._kinds.get(kind, 0)
                self._reached.cut |= source
                return source
            source = self._groups[groups] = 1 << len(self._groups)
        self._kinds[kind] = source
        return source

    def _since(self, first: Operation) -> list[Operation | Access]:
        """Recent steps from ``first`` on; all of them if it is forgotten."""
        steps: list[Operation | Access] = []
        for step in reversed(self._recent):
            steps.append(step)
            if step is first:
                break
        return steps[::-1]

    def _merge(self, state: _State) -> None:
        for (space, number), pool in state.pools.items():
            known = self._state.pools.setdefault((space, number), _Pool())
            for page, tenant in pool.tenants.items():
                for mask, sources in tenant.items():
                    known.add(page, mask, sources)


def _add(found: dict[int, _Tenant], position: int, tenant: _Tenant, mask: int) -> None:
    """Join what ``tenant`` has at the layers of ``mask`` to ``found[position]``."""
    for layers, sources in tenant.items():
        if kept := layers & mask:
            known = found.setdefault(position, {})
            known[kept] = known.get(kept, 0) | sources


def _cells(overlaps: Iterable[Overlap], tenant: _Tenant) -> dict[_Cell, _Tenant]:
    return {(o.space, o.pool, page): tenant for o in overlaps for page in o.pages.tolist()}


def _kind(operation: Operation) -> tuple[object, ...]:
    return operation.label.what, operation.label.site, operation.label.stream


def _mask(layers: tuple[int, int]) -> int:
    """Bit set of a layer range."""
    low, high = min(layers[0], MAX_LAYER), layers[1]
    return _ALL << low if high > MAX_LAYER else (1 << high) - (1 << low)


def _union(sources: Iterable[int]) -> int:
    found = 0
    for bits in sources:
        found |= bits
    return found


def _members(table: dict[int, int], source: int) -> tuple[int, ...]:
    return tuple(sorted(key for key, sources in table.items() if sources & source))
