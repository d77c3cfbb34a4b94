"""Which pages were touched when, as counts of a grid; one map per pool."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from hicache_obs.analyzer.remedy import Timeline
from hicache_obs.exporters.html.timeline import ISSUE_STEP_NS, Basis, Drawing
from hicache_obs.findings import Finding
from hicache_obs.records import GraphReplay, HostAccess, IoBegin, Kernel, Memcpy, OpId, Relocate, Space
from hicache_obs.trace import Trace

ROWS: Final = 48
COLUMNS: Final = 120
MAX_MAPS: Final = 4
"""Maps of one trace: pools with races first, then the most used."""
_TOUCHING: Final = (Kernel, Memcpy, Relocate, GraphReplay, HostAccess, IoBegin)
_Pool = tuple[Space, int]


@dataclass(frozen=True, slots=True, eq=False)
class HeatMap:
    """Accesses of one pool.

    Attributes:
        title: Space and pool.
        low: First page of the first row.
        pages_per_row: Pages in each row.
        column_ns: Length of each column.
        counts: ``(ROWS or fewer, COLUMNS) int64``: page accesses of operations that begin then.
        raced: Row and column of pages in findings, where the later access begins.
    """

    title: str
    low: int
    pages_per_row: int
    column_ns: float
    counts: npt.NDArray[np.int64]
    raced: tuple[tuple[int, int], ...]

    def as_json(self) -> dict[str, Any]:
        """What ``chart.js`` draws: only cells that are not 0."""
        rows, columns = np.nonzero(self.counts)
        return {
            "title": self.title,
            "low": self.low,
            "step": self.pages_per_row,
            "rows": len(self.counts),
            "width": self.column_ns,
            "cells": [rows.tolist(), columns.tolist(), self.counts[rows, columns].tolist()],
            "raced": [list(cell) for cell in self.raced],
        }


def heat_maps(trace: Trace, times: Timeline, drawing: Drawing, findings: Sequence[Finding]) -> list[HeatMap]:
    """Maps of the pools that ``trace`` touches, over the time that ``drawing`` covers."""
    begins = _Begins(trace, times, drawing)
    width = drawing.span_ns / COLUMNS
    touched: dict[_Pool, dict[int, tuple[npt.NDArray[np.int64], Counter[int]]]] = {}
    for record in trace:
        if not isinstance(record, _TOUCHING):
            continue
        begin = begins.of(record.op)
        if begin is None:
            continue
        column = min(max(int(begin / width), 0), COLUMNS - 1)
        for access in record.accesses:
            if access.space is not Space.BUFFER and len(access.ids):
                arrays = touched.setdefault((access.space, access.pool), {})
                arrays.setdefault(id(access.ids), (access.ids, Counter()))[1][column] += 1
    races = _races(findings, begins, width)
    chosen = sorted(touched, key=lambda pool: (pool not in races, -len(touched[pool]), pool))[:MAX_MAPS]
    return [_map(trace, pool, touched[pool].values(), races.get(pool, ()), width) for pool in sorted(chosen)]


class _Begins:
    """Start of an operation in the drawing's time, ``None`` if it is not known."""

    def __init__(self, trace: Trace, times: Timeline, drawing: Drawing) -> None:
        self._spans = times.spans
        self._zero_ns = drawing.zero_ns
        self._calls: dict[OpId, int] = {}
        if drawing.basis is Basis.ISSUED:
            ops = (record.op for record in trace if isinstance(record, _TOUCHING))
            self._calls = {op: number * ISSUE_STEP_NS - self._zero_ns for number, op in enumerate(ops)}
        elif times.measured:
            self._calls = {r.op: r.host_ns - self._zero_ns for r in trace if isinstance(r, HostAccess | IoBegin)}

    def of(self, op: OpId) -> int | None:
        span = self._spans.get(op)
        return self._calls.get(op) if span is None else span[0] - self._zero_ns


def _races(findings: Sequence[Finding], begins: _Begins, width: float) -> dict[_Pool, set[tuple[int, int]]]:
    """Page and column of every page in a finding, by pool."""
    found: dict[_Pool, set[tuple[int, int]]] = {}
    for finding in findings:
        begin = begins.of(finding.later.op)
        if begin is None or finding.space == "buffer":
            continue
        column = min(max(int(begin / width), 0), COLUMNS - 1)
        cells = found.setdefault((Space[finding.space.upper()], finding.pool), set())
        cells.update((page, column) for page in finding.pages)
    return found


def _map(
    trace: Trace,
    pool: _Pool,
    arrays: Iterable[tuple[npt.NDArray[np.int64], Counter[int]]],
    raced: Iterable[tuple[int, int]],
    width: float,
) -> HeatMap:
    arrays = list(arrays)
    low = min(int(ids.min()) for ids, _ in arrays)
    high = max(int(ids.max()) for ids, _ in arrays)
    step = -(-(high - low + 1) // ROWS)
    rows = -(-(high - low + 1) // step)
    counts = np.zeros((rows, COLUMNS), np.int64)
    for ids, columns in arrays:
        touched = np.bincount((ids - low) // step, minlength=rows)
        where = np.flatnonzero(touched)
        for column, times in columns.items():
            counts[where, column] += touched[where] * times
    space, number = pool
    names = trace.names.pools if space is Space.DEVICE else trace.names.host_pools
    of = f" of {names[number]}" if number in names else f" of pool {number}" if number else ""
    cells = {((page - low) // step, column) for page, column in raced if low <= page <= high}
    return HeatMap(f"{space.name.lower()} pages{of}", low, step, width, counts, tuple(sorted(cells)))
