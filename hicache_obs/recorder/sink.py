"""Where records go: what a recorder asks of a ring, or of what stands in front of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from hicache_obs.recorder.batch import Block
from hicache_obs.records import Access, AnyRecord, CaptureMode, DropReason


class Numbers(Protocol):
    """Consecutive 64-bit integers: an ``array`` of them."""

    def __len__(self) -> int: ...

    def __buffer__(self, flags: int, /) -> memoryview: ...


class RecordSink(Protocol):
    """Where a recorder puts its records."""

    @property
    def writable(self) -> bool:
        """False for good once closed, or in a forked child. May be read without a lock."""

    @property
    def mode(self) -> CaptureMode: ...

    def append(self, record: AnyRecord) -> bool:
        """Keep ``record``; False if it was dropped, and counted."""

    def drop(self, reason: DropReason, count: int = 1) -> None:
        """Count records that were lost before they got here; a ``Lost`` record will say so."""

    def beat(self, host_ns: int) -> None:
        """Say that the writer is alive."""


@runtime_checkable
class BlockSink(RecordSink, Protocol):
    """A ``RecordSink`` that also takes packed records, and many at once. See ``RingWriter``."""

    @property
    def switch(self) -> Sequence[int]:
        """One number: 0 while no record is taken. May be read without a lock."""

    def skip(self) -> None:
        """Count a record that came while ``switch`` was 0. Never raises."""

    def put(self, word: int, op: int, host_ns: int, a: int, b: int) -> bool: ...

    def put_work(
        self, word: int, op: int, host_ns: int, numbers: tuple[int, int, int, int], layers: tuple[int, int],
        accesses: tuple[Access, ...],
    ) -> bool: ...  # fmt: skip

    def put_round(
        self,
        word: int,
        op: int,
        host_ns: int,
        stream: int,
        site: int,
        group: int,
        pool: int,
        lists: Numbers,
        split: int,
    ) -> bool: ...

    def put_rows(self, rows: Sequence[tuple[int, ...]]) -> int: ...

    def put_packed(self, slot: bytes) -> bool: ...

    def append_block(self, block: Block) -> bool:
        """Keep all of ``block``'s records, in their order; False if all were dropped, and counted."""
