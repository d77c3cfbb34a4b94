"""What a forward round touches: pages of the batch's requests, in each of the pools that the model keeps state in.

A hybrid model has more than one pool. Sliding-window layers have pages of their own, which a table on the device finds
from those of the full-attention layers; Mamba layers have one state per request, which every round reads and writes.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hicache_obs.findings import Hazard
from hicache_obs.records import MAX_ACCESSES, Access, Mode, SlotAccess, Space
from hicache_obs.sglang.page_ids import ConvertRows, convert
from hicache_obs.sglang.pages import base_pool, page_size
from hicache_obs.sglang.session import Session

_READS: Final = (Hazard.WAR_FORWARD_RESTORE, Hazard.RAW_RESTORE_FORWARD)


def round_accesses(session: Session, runner: Any, batch: Any, written: Any) -> tuple[Access, ...]:
    """What the round of ``batch`` touches; empty if its written slots were lost, which is then counted.

    Args:
        runner: The ModelRunner, of a target or a draft model.
        written: ``(n,) int64`` slots of the full-attention pool that the round writes.
    """
    pool = runner.token_to_kv_pool
    full = base_pool(pool)
    writes = session.access(Space.DEVICE, Mode.WRITE, full, written, convert(page_size(full), skip_zero=True))
    if writes is None:
        return ()
    reads = _reads(session, runner, batch, full, None)
    found = [writes] if reads is None else [writes, reads]
    window, table = getattr(pool, "swa_kv_pool", None), getattr(pool, "full_to_swa_index_mapping", None)
    if window is not None and table is not None:
        found += _window(session, runner, batch, written, window, table)
    states = _states(session, runner, batch)
    if states is not None:
        if len(found) == MAX_ACCESSES:
            session.unobservable(_READS, f"a round of this model has more than {MAX_ACCESSES} kinds of accesses")
            del found[-1]
        found.append(states)
    return tuple(found)


def _reads(session: Session, runner: Any, batch: Any, pool: Any, translate: Any) -> Access | None:
    """Pages of the batch's requests: one entry of the request table per page, up to each request's length.

    Args:
        translate: ``(slots,)`` table on the device from a slot to this pool's own; ``None`` for the same.
    """
    lengths = getattr(batch, "seq_lens_cpu", None)
    table = getattr(getattr(runner, "req_to_token_pool", None), "req_to_token", None)
    if lengths is None or table is None or not len(lengths):
        session.unobservable(_READS, "the batch does not say on the host how long its requests are")
        return None
    lengths = lengths.numpy() if hasattr(lengths, "numpy") else np.asarray(lengths)  # host memory either way
    size, longest = page_size(pool), max(lengths.tolist())
    limit = session.max_read_ids
    count = len(lengths) * -(-longest // size)
    if count > limit:
        session.unobservable(_READS, f"a round reads more than HICACHE_OBS_READ_IDS={limit} pages")
        return None
    entries = table[:, 0:longest:size]

    def gather(rows: Any) -> Any:
        """One gather; which entries are in use is told on the host, where the lengths are known."""
        slots = entries.index_select(0, rows)
        return slots if translate is None else translate.index_select(0, slots.reshape(-1).long())

    ids = session.ids(batch.req_pool_indices, ConvertRows(size, lengths), derive=gather, count=count)
    return None if ids is None else SlotAccess(Space.DEVICE, Mode.READ, ids, session.pool(pool, Space.DEVICE))


def _window(session: Session, runner: Any, batch: Any, written: Any, window: Any, table: Any) -> list[Access]:
    """The same of the sliding-window pool. Slots that have left the window are entry 0 of the table, and page 0."""
    how = convert(page_size(window), skip_zero=True)
    ids = session.ids(written, how, derive=lambda slots: table.index_select(0, slots), count=written.numel())
    if ids is None:
        return []
    writes = SlotAccess(Space.DEVICE, Mode.WRITE, ids, session.pool(window, Space.DEVICE))
    reads = _reads(session, runner, batch, window, table)
    return [writes] if reads is None else [writes, reads]


def _states(session: Session, runner: Any, batch: Any) -> Access | None:
    """States of the batch's requests in a Mamba pool, if the model has one."""
    requests = getattr(runner, "req_to_token_pool", None)
    states, table = getattr(requests, "mamba_pool", None), getattr(requests, "req_index_to_mamba_index_mapping", None)
    rows = getattr(batch, "req_pool_indices", None)
    if states is None or table is None or rows is None:
        return None
    ids = session.ids(
        rows, convert(1, skip_zero=True), derive=lambda there: table.index_select(0, there), count=rows.numel()
    )
    return None if ids is None else SlotAccess(Space.DEVICE, Mode.WRITE, ids, session.pool(states, Space.DEVICE))
