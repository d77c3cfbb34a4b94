"""What a rank decided, in order, as one number per decision: what ranks of a group are compared by.

Two kinds of sequences:

* ``cache``: per host thread, the pages that allocators hand out and take back (an eviction is a free), and the
  load-backs and write-backs that are submitted, each with its pages. Ids of requests, operations, streams and transfers
  are left out: processes number them as they like. So is the order of the pages inside one call.
* ``collectives``: per group and member, the sites of the collectives that it enters.

Bounded: ``MAX_DECISIONS`` of a sequence are kept, 8 bytes of hash each and 16 more for the times of a collective.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import numpy as np

from hicache_obs.analyzer.divergence import HARMLESS
from hicache_obs.records import (
    Access,
    AnyRecord,
    Collective,
    Define,
    DefineSpace,
    Direction,
    Lost,
    Memcpy,
    OpId,
    PageAlloc,
    PageFree,
    Space,
    ThreadId,
    Times,
)
from hicache_obs.trace import Names

MAX_DECISIONS: Final = 1 << 22
MAX_SEQUENCES: Final = 256
"""Threads and groups of one rank; the decisions of further ones are not compared."""
MAX_NAMES: Final = 1 << 16
"""Names of threads, sites and groups that are kept."""
CACHE: Final = "cache"
COLLECTIVES: Final = "collectives"
_NO_CALL: Final = frozenset((Times, Define, Lost))
"""Records whose time is not that of a call of their thread."""
_NAMED: Final = frozenset((DefineSpace.THREAD, DefineSpace.SITE, DefineSpace.GROUP))
_SHOWN_PAGES: Final = 8
_TRANSFERS: Final = {Direction.HOST_TO_DEVICE: "loads back", Direction.DEVICE_TO_HOST: "writes back"}


@dataclass(frozen=True, slots=True, order=True)
class SequenceName:
    """Which sequence of a rank.

    Attributes:
        kind: ``CACHE`` or ``COLLECTIVES``.
        name: Of the thread or the group.
        member: Number of the rank in the group; 0 for a thread.
    """

    kind: str
    name: str
    member: int = 0


@dataclass(slots=True)
class Decisions:
    """Decisions of one thread, or one member of a group.

    Attributes:
        hashes: ``uint64`` of each decision.
        cuts: Places in ``hashes`` before which records are missing, ascending; 0 if the first ones may be.
        entered_ns, left_ns: Of collectives: host clock at the call, and at the next call of the thread, which comes
            after all members have entered; -1 where there is none.
        skipped: Further decisions, not kept.
    """

    hashes: array[int] = field(default_factory=lambda: array("Q"))
    cuts: array[int] = field(default_factory=lambda: array("q"))
    entered_ns: array[int] = field(default_factory=lambda: array("q"))
    left_ns: array[int] = field(default_factory=lambda: array("q"))
    skipped: int = 0

    @property
    def stretches(self) -> list[tuple[int, int]]:
        """Half-open parts without a loss inside, none of them empty."""
        ends = [*dict.fromkeys(self.cuts), len(self.hashes)]
        begins = [0, *ends]
        return [(begin, end) for begin, end in zip(begins, ends, strict=False) if begin < end]

    @property
    def from_start(self) -> bool:
        """Whether the first decision is the rank's first."""
        return not self.cuts or self.cuts[0] > 0


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision, for people.

    Attributes:
        text: What was decided; equal for equal decisions.
        op: Its record.
        host_ns: Host clock at the call.
    """

    text: str
    op: OpId
    host_ns: int


class DecisionLog:
    """Goes through one trace; one thread at a time.

    Args:
        wanted: A sequence and a place in it: ``found`` is that decision once it has come.
    """

    def __init__(self, wanted: tuple[SequenceName, int] | None = None) -> None:
        self.sequences: dict[SequenceName, Decisions] = {}
        self.found: Decision | None = None
        self._wanted = wanted
        self._names = Names()
        self._lost = False
        self._threads: dict[ThreadId, SequenceName] = {}
        self._transfers: dict[Direction, int] = {}
        self._entering: dict[ThreadId, list[tuple[Decisions, int]]] = {}
        self._handlers: dict[type[Any], Callable[[Any], None]] = {
            PageAlloc: self._on_pages,
            PageFree: self._on_pages,
            Memcpy: self._on_copy,
            Collective: self._on_collective,
            Lost: self._on_lost,
            Define: self._on_define,
        }

    def feed(self, records: Iterable[AnyRecord]) -> None:
        """Take the next records."""
        handlers, entering = self._handlers, self._entering
        for record in records:
            kind = type(record)
            if entering and record.thread in entering and kind not in _NO_CALL:
                for sequence, place in entering.pop(record.thread):
                    sequence.left_ns[place] = record.host_ns
            handler = handlers.get(kind)
            if handler is not None:
                handler(record)

    def _on_define(self, record: Define) -> None:
        if record.space in _NAMED and len(self._names.sites) + len(self._names.threads) < MAX_NAMES:
            self._names.learn(record)

    def _on_lost(self, record: Lost) -> None:
        if record.reason in HARMLESS:
            return
        self._lost = True
        self._entering.clear()
        for sequence in self.sequences.values():
            if not sequence.cuts or sequence.cuts[-1] != len(sequence.hashes):
                sequence.cuts.append(len(sequence.hashes))

    def _on_pages(self, record: PageAlloc | PageFree) -> None:
        verb = "hands out" if type(record) is PageAlloc else "frees"
        self._decide(self._thread(record.thread), verb, (record.access,), record)

    def _on_copy(self, record: Memcpy) -> None:
        verb = _TRANSFERS.get(record.direction)
        if verb is None or self._transfers.get(record.direction) == record.group:
            return  # a further layer of the same transfer
        self._transfers[record.direction] = record.group
        pages = tuple(access for access in record.accesses if access.space is not Space.BUFFER)
        self._decide(self._thread(record.thread), verb, pages, record)

    def _on_collective(self, record: Collective) -> None:
        group = self._names.groups.get(record.collective_group, f"group {record.collective_group}")
        name = SequenceName(COLLECTIVES, group, record.rank)
        text = self._names.site(record.site)
        sequence = self._add(name, blake2b(text.encode(), digest_size=8).digest(), record, lambda: f"enters {text!r}")
        if sequence is not None:
            sequence.entered_ns.append(record.host_ns)
            sequence.left_ns.append(-1)
            if len(self._entering) < MAX_SEQUENCES or record.thread in self._entering:
                self._entering.setdefault(record.thread, []).append((sequence, len(sequence.left_ns) - 1))

    def _thread(self, thread: ThreadId) -> SequenceName:
        """The sequence of ``thread``, by its name or by when it first decided something."""
        known = self._threads.get(thread)
        if known is None:
            text = self._names.threads.get(thread, f"thread number {len(self._threads) + 1}")
            known = SequenceName(CACHE, text)
            if len(self._threads) < MAX_SEQUENCES:
                self._threads[thread] = known
        return known

    def _decide(
        self, name: SequenceName, verb: str, accesses: tuple[Access, ...], record: PageAlloc | PageFree | Memcpy
    ) -> None:
        made = blake2b(verb.encode(), digest_size=8)
        for access in sorted(accesses, key=lambda access: (access.space, access.mode, access.pool)):
            made.update(bytes((access.space, access.mode)))
            made.update(access.pool.to_bytes(8, "little", signed=True))
            made.update(np.sort(access.ids).tobytes())
        self._add(name, made.digest(), record, lambda: f"{verb} {'; '.join(map(_pages, accesses)) or 'nothing'}")

    def _add(
        self, name: SequenceName, digest: bytes, record: AnyRecord, describe: Callable[[], str]
    ) -> Decisions | None:
        sequence = self.sequences.get(name)
        if sequence is None:
            if len(self.sequences) >= MAX_SEQUENCES:
                return None
            sequence = self.sequences[name] = Decisions()
            if self._lost:
                sequence.cuts.append(0)
        if len(sequence.hashes) >= MAX_DECISIONS:
            sequence.skipped += 1
            return None
        if self._wanted == (name, len(sequence.hashes)):
            self.found = Decision(describe(), record.op, record.host_ns)
        sequence.hashes.append(int.from_bytes(digest, "little"))
        return sequence


def _pages(access: Access) -> str:
    """``device pages 3, 4, 9``."""
    ids = np.sort(access.ids)
    shown = ", ".join(map(str, ids[:_SHOWN_PAGES].tolist()))
    more = f" and {len(ids) - _SHOWN_PAGES} more" if len(ids) > _SHOWN_PAGES else ""
    pool = f" of pool {access.pool}" if access.pool else ""
    return f"{access.space.name.lower()} page{'s' * (len(ids) != 1)} {shown}{more}{pool}"
