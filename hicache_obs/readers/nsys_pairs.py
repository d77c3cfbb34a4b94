"""``records_of``: which record of an event each wait of an Nsight Systems export refers to."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.readers.profile import NO_ID, UNKNOWN, Int64s, Keys, Pairing
from hicache_obs.readers.tables import ABSENT

_MAX_SYNC_ID: Final = 1 << 40


def _named(sync_id: Int64s) -> npt.NDArray[np.bool_]:
    """Where a sync id says something."""
    named: npt.NDArray[np.bool_] = (sync_id > 0) & (sync_id != NO_ID) & (sync_id < _MAX_SYNC_ID)
    return named


def _sync_keys(process: Int64s, sync_id: Int64s) -> Int64s:
    return process * _MAX_SYNC_ID + sync_id


EventKeys = tuple[Int64s, Int64s, Int64s, Int64s, Int64s]
"""Process, context, event id, correlation id, sync id."""


def records_of(
    rows: EventKeys,
    wanted: npt.NDArray[np.bool_],
    records: EventKeys,
    record_call: Int64s,
    unseen: Mapping[int, list[int]],
) -> Int64s:
    """For each wanted synchronisation row: its record call, or why there is none.

    A record in ``unseen`` (by process, ascending, those of which the file does not say what they record) between the
    two may be of the same event and replace the one that was found: then nobody knows.
    """
    if len(records[4]) and _named(records[4]).all() and _named(rows[4][wanted]).all():
        named = _sync_keys(records[0], records[4])
        place = Keys(named).find(_sync_keys(rows[0][wanted], rows[4][wanted]))
        uniques, counts = np.unique(named, return_counts=True)
        twice = np.isin(named, uniques[counts > 1])  # an id that two records have names neither
        calls = np.where((place == UNKNOWN) | twice[place], UNKNOWN, record_call[place])
        found = np.where(calls == UNKNOWN, Pairing.UNRESOLVED, calls)
        later = (calls != UNKNOWN) & (records[3][place] >= rows[3][wanted])
        return np.where(later, Pairing.FUTURE, found).astype(np.int64)
    return _records_one_by_one(rows, wanted, records, record_call, unseen)


def _records_one_by_one(
    rows: EventKeys,
    wanted: npt.NDArray[np.bool_],
    records: EventKeys,
    record_call: Int64s,
    unseen: Mapping[int, list[int]],
) -> Int64s:
    """The same where not every row has a sync id."""
    by_sync: dict[tuple[int, int], tuple[int, int]] = {}
    by_event: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    columns = [column.tolist() for column in (*records, record_call)]
    for process, context, event, correlation, sync_id, call in sorted(zip(*columns, strict=True), key=lambda r: r[3]):
        if sync_id not in (ABSENT, 0, NO_ID):
            known = (process, sync_id) in by_sync
            by_sync[process, sync_id] = (correlation, UNKNOWN if known else call)
        if event != ABSENT:
            by_event.setdefault((process, context, event), []).append((correlation, call))
    found: list[int] = []
    picked = (column[wanted].tolist() for column in rows)
    for process, context, event, correlation, sync_id in zip(*picked, strict=True):
        call = UNKNOWN
        if by_sync and sync_id not in (ABSENT, 0, NO_ID):
            recorded, call = by_sync.get((process, sync_id), (UNKNOWN, UNKNOWN))
            if call != UNKNOWN and recorded >= correlation:
                call = Pairing.FUTURE
        else:
            for recorded, candidate in reversed(by_event.get((process, context, event), ())):
                if recorded < correlation:
                    others = unseen.get(process, [])
                    if bisect_right(others, recorded) == bisect_left(others, correlation):
                        call = candidate
                    break
        found.append(Pairing.UNRESOLVED if call == UNKNOWN else call)
    return np.array(found, np.int64)
