"""What a forward round touches: pages of the batch's requests, in each of the pools that the model keeps state in.

A hybrid model has more than one pool. Sliding-window layers have pages of their own, which a table on the device finds
from those of the full-attention layers; Mamba layers have one state per request, which every round reads and writes.
"""

from __future__ import annotations

from array import array
from typing import Any, Final

import numpy as np

from hicache_obs.findings import Hazard
from hicache_obs.records import MAX_ACCESSES, Access, Mode, SlotAccess, Space, slot_list_head
from hicache_obs.sglang.blind_spots import state_blind_spots
from hicache_obs.sglang.page_ids import ConvertRows, LookUp, LookUpRows, Wanted, convert
from hicache_obs.sglang.pages import base_pool, page_size
from hicache_obs.sglang.session import Session

_WINDOW: Final = "full_to_swa_index_mapping"
_STATES: Final = "req_index_to_mamba_index_mapping"
_MAX_RUNNERS: Final = 64
_FEW: Final = 16
"""Requests up to which plain numbers are quicker than arrays."""
_READS: Final = (Hazard.WAR_FORWARD_RESTORE, Hazard.RAW_RESTORE_FORWARD)


class RoundPools:
    """The pools of one model runner, looked up once.

    Args:
        runner: The ModelRunner, of a target or a draft model.
    """

    __slots__ = (
        "full",
        "full_convert",
        "full_size",
        "heads",
        "numbers",
        "plain",
        "pool",
        "requests",
        "states",
        "table",
        "view",
        "window",
    )

    def __init__(self, session: Session, runner: Any) -> None:
        self.pool: Final = runner.token_to_kv_pool
        self.requests: Final = getattr(runner, "req_to_token_pool", None)
        self.full: Final = base_pool(self.pool)
        self.full_size: Final = page_size(self.full)
        self.full_convert: Final = convert(self.full_size, skip_zero=True)
        with_window = getattr(self.pool, _WINDOW, None) is not None
        self.window: Final = getattr(self.pool, "swa_kv_pool", None) if with_window else None
        with_states = getattr(self.requests, _STATES, None) is not None
        self.states: Final = getattr(self.requests, "mamba_pool", None) if with_states else None
        pools = (self.full, self.window, self.states)
        self.plain: Final = self.window is None and self.states is None
        """Whether a round touches the full-attention pool alone."""
        self.heads: Final[list[tuple[int, ...]]] = [
            (*slot_list_head(self.full_size, skip_zero=True)[:-1].tolist(), rows) for rows in range(_FEW + 1)
        ]
        """First words of a slot list, by its number of rows."""
        self.table: Any = None
        self.view: Any = None
        """The request table that was read last, and its memory as an array."""
        self.numbers: Final = [0 if pool is None else session.pool(pool, Space.DEVICE) for pool in pools]


def round_accesses(session: Session, runner: Any, batch: Any, written: Any) -> tuple[Access, ...] | PlainRound:
    """What the round of ``batch`` touches; empty if its written slots were lost, which is then counted.

    Args:
        runner: The ModelRunner, of a target or a draft model.
        written: ``(n,) int64`` slots of the full-attention pool that the round writes.
    """
    pools: RoundPools | None = session.rounds.get(id(runner))
    if (
        pools is None
        or pools.pool is not runner.token_to_kv_pool
        or pools.requests is not getattr(runner, "req_to_token_pool", None)
    ):
        if len(session.rounds) >= _MAX_RUNNERS:
            session.rounds.clear()
        state_blind_spots(session, runner)
        pools = session.rounds[id(runner)] = RoundPools(session, runner)
    if pools.plain and written.is_cpu:
        try:
            plain = _plain_round(session, pools, batch, written)
        except (AttributeError, TypeError):  # a batch without lengths, or with a list of them
            plain = None
        if plain is not None:
            return plain
    full, _, states = pools.numbers
    wanted, kinds = [Wanted(written, pools.full_convert)], [(Mode.WRITE, full)]
    reads = _reads(session, pools, batch, pools.full_size, None)
    if reads is not None:
        wanted.append(reads)
        kinds.append((Mode.READ, full))
    if pools.window is not None:
        _add_window(session, pools, batch, wanted, kinds)
    if pools.states is not None and (rows := getattr(batch, "req_pool_indices", None)) is not None:
        if len(wanted) == MAX_ACCESSES:
            session.unobservable(_READS, f"a round of this model has more than {MAX_ACCESSES} kinds of accesses")
            del wanted[-1], kinds[-1]
        wanted.append(Wanted(rows, convert(1, skip_zero=True), LookUp(getattr(pools.requests, _STATES)), rows.numel()))
        kinds.append((Mode.WRITE, states))
    ids = session.ids(wanted)
    if ids is None and len(wanted) > 1:  # there may be room for what it writes
        ids = session.ids(wanted[:1])
    if ids is None:
        return ()
    return tuple([SlotAccess(Space.DEVICE, mode, one, pool) for (mode, pool), one in zip(kinds, ids, strict=False)])


class PlainRound:
    """Slot lists of a round that touches one pool, as plain numbers (``RingWriter.put_round``)."""

    __slots__ = ("lists", "pool", "split")

    def __init__(self, pool: int, lists: array[int], split: int) -> None:
        self.pool: Final = pool
        self.lists: Final = lists
        self.split: Final = split

    def accesses(self) -> tuple[Access, ...]:
        """The same as accesses, for a round that is recorded in parts."""
        words = np.array(self.lists, dtype=np.int64)
        return (
            SlotAccess(Space.DEVICE, Mode.WRITE, words[: self.split], self.pool),
            SlotAccess(Space.DEVICE, Mode.READ, words[self.split :], self.pool),
        )


def _plain_round(session: Session, pools: RoundPools, batch: Any, written: Any) -> PlainRound | None:
    """What the round touches where that is few numbers, all in host memory; ``None`` if it is not."""
    table, rows = getattr(pools.requests, "req_to_token", None), batch.req_pool_indices
    if not rows.is_cpu:
        return None
    if table is not pools.table:
        pools.view = table.numpy() if table is not None and table.is_cpu else None
        pools.table = table
    counts, view = batch.seq_lens_cpu.tolist(), pools.view
    if view is None or not 0 < len(counts) <= _FEW:
        return None
    size, longest = pools.full_size, max(counts)
    if len(counts) * -(-longest // size) > session.max_read_ids:
        return None
    slots: list[int] = []
    for row in rows.tolist():
        slots += view[row, 0:longest:size].tolist()
    writes = written.tolist()
    lists = array("q", (*pools.heads[0], *writes, *pools.heads[len(counts)], *counts, *slots))
    return PlainRound(pools.numbers[0], lists, len(pools.heads[0]) + len(writes))


def _reads(session: Session, pools: RoundPools, batch: Any, size: int, translate: Any) -> Wanted | None:
    """Pages of the batch's requests: one entry of the request table per page, up to each request's length.

    Args:
        size: Slots per page.
        translate: ``(slots,)`` table from a slot to this pool's own; ``None`` for the same.
    """
    lengths = getattr(batch, "seq_lens_cpu", None)
    table = getattr(pools.requests, "req_to_token", None)
    if lengths is not None:
        lengths = lengths.numpy() if hasattr(lengths, "numpy") else np.asarray(lengths)  # host memory either way
    if lengths is None or table is None or not len(lengths):
        session.unobservable(_READS, "the batch does not say on the host how long its requests are")
        return None
    longest = max(lengths.tolist())
    limit = session.max_read_ids
    count = len(lengths) * -(-longest // size)
    if count > limit:
        session.unobservable(_READS, f"a round reads more than HICACHE_OBS_READ_IDS={limit} pages")
        return None
    return Wanted(
        batch.req_pool_indices, ConvertRows(size, lengths), LookUpRows(table, longest, size, translate), count
    )


def _add_window(
    session: Session, pools: RoundPools, batch: Any, wanted: list[Wanted], kinds: list[tuple[Mode, int]]
) -> None:
    """The same of the sliding-window pool. Slots that have left the window are entry 0 of the table, and page 0."""
    size, table, number = page_size(pools.window), getattr(pools.pool, _WINDOW), pools.numbers[1]
    written = wanted[0].tensor
    wanted.append(Wanted(written, convert(size, skip_zero=True), LookUp(table), written.numel()))
    kinds.append((Mode.WRITE, number))
    reads = _reads(session, pools, batch, size, table)
    if reads is not None:
        wanted.append(reads)
        kinds.append((Mode.READ, number))
