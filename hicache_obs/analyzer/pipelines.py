"""Copies that an engine issues piece by piece so that their consumer can run behind the first of them.

A *pipeline* is two or more copies on one stream that bring different pieces: the same pages layer by layer, or whole
pages one after another. A copy is a ``Memcpy``, or a kernel that only moves pages between host and device.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from hicache_obs.analyzer.hazards import copying
from hicache_obs.analyzer.plan import DeviceRecord
from hicache_obs.records import ALL_LAYERS, AnyRecord, Kernel, Memcpy, Mode, Space, StreamId

Copy = Memcpy | Kernel
Cell = tuple[Space, int, int]
"""A page or buffer: space, pool, id."""


@dataclass(slots=True, eq=False)
class Pipeline:
    """Copies that belong together.

    Attributes:
        copies: In issue order.
        cells: What they bring together: each the same in layers of its own, or each others of all layers.
        layers: Layer ranges that they bring.
    """

    copies: list[Copy]
    cells: set[Cell]
    layers: set[tuple[int, int]]

    def consumed_by(self, record: AnyRecord) -> bool:
        """Whether ``record`` was issued after the first copy and touches, elsewhere, what a copy brings."""
        first = self.copies[0]
        if not isinstance(record, DeviceRecord) or record.stream == first.stream or record.op < first.op:
            return False
        return self.shares_layer(record) and not self.cells.isdisjoint(_touched(record))

    def shares_layer(self, record: DeviceRecord) -> bool:
        """Whether a copy brings a layer that ``record`` works on."""
        low, high = record.layers
        return any(low < end and first < high for first, end in self.layers)


def find_pipelines(records: Iterable[AnyRecord]) -> list[Pipeline]:
    """All pipelines among ``records``. One of whole pages ends where a piece of it is consumed."""
    found: list[Pipeline] = []
    by_layer: dict[tuple[StreamId, frozenset[Cell]], Pipeline] = {}
    by_page: dict[StreamId, Pipeline] = {}
    for record in records:
        for stream in [stream for stream, pages in by_page.items() if pages.consumed_by(record)]:
            del by_page[stream]
        if not isinstance(record, Copy) or not (cells := _brought(record)):
            continue
        whole = record.layers == ALL_LAYERS
        known = by_page.get(record.stream) if whole else by_layer.get((record.stream, cells))
        if known is None or (not known.cells.isdisjoint(cells) if whole else known.shares_layer(record)):
            known = Pipeline([], set(), set())
            found.append(known)
            if whole:
                by_page[record.stream] = known
            else:
                by_layer[record.stream, cells] = known
        known.copies.append(record)
        known.cells |= cells
        known.layers.add(record.layers)
    return [pipeline for pipeline in found if len(pipeline.copies) > 1]


def _brought(record: Copy) -> frozenset[Cell]:
    """What a copy writes; nothing if ``record`` is none."""
    if isinstance(record, Kernel) and copying(record.accesses) is None:
        return frozenset()
    return frozenset(_touched(record, Mode.WRITE))


def _touched(record: DeviceRecord, *modes: Mode) -> Iterable[Cell]:
    """Pages and buffers of ``record``, of these modes or all."""
    for access in record.accesses:
        if not modes or access.mode in modes:
            for number in access.ids.tolist():
                yield access.space, access.pool, number
