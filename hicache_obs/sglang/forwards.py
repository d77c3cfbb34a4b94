"""Hooks on forward rounds: the launch stream, the slots a round writes and the pages it reads.

A round is recorded when its launch has returned. Events that were recorded inside it (the end of its reads of shared
buffers, say) come before it in the ring, so they never cover its accesses. A wait for a layer inside it ends a
segment: what was launched before that wait did not wait.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from hicache_obs.findings import Hazard
from hicache_obs.records import ALL_LAYERS, Access, Mode, SlotAccess, Space
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.page_ids import ConvertRows, convert
from hicache_obs.sglang.pages import base_pool, page_size
from hicache_obs.sglang.rounds import SITE, Round, end_segment
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.streams import capturing
from hicache_obs.sglang.versions import Versions

_FORWARD: Final = (
    Hazard.WAW_FORWARD_RESTORE,
    Hazard.WAR_FORWARD_RESTORE,
    Hazard.RAW_RESTORE_FORWARD,
    Hazard.RAW_FORWARD_BACKUP,
    Hazard.WAR_BACKUP_FORWARD,
    Hazard.GRAPH,
)
_READS: Final = (Hazard.WAR_FORWARD_RESTORE, Hazard.RAW_RESTORE_FORWARD)


def _before_forward(session: Session, runner: Any, batch: Any, *_: Any, **__: Any) -> Round | None:
    lane = session.local
    lane.round = None
    written = batch.out_cache_loc
    if written is None or not written.numel() or capturing():
        return None
    raw = session.raw_current_stream()
    session.forward_stream = raw
    pool = base_pool(runner.token_to_kv_pool)
    writes = session.access(Space.DEVICE, Mode.WRITE, pool, written, convert(page_size(pool), skip_zero=True))
    if writes is None:
        return None
    reads = _reads(session, runner, batch, pool)
    group = lane.round_group or session.number()
    accesses = (writes,) if reads is None else (writes, reads)
    this = lane.round = Round(session.stream(raw, "forward"), raw, accesses, group, session.start_timing(raw))
    return this


def _reads(session: Session, runner: Any, batch: Any, pool: Any) -> Access | None:
    """Pages of the batch's requests: one entry of the request table per page, up to each request's length."""
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

    rows, entries = batch.req_pool_indices, table[:, 0:longest:size]
    # One gather; which entries are in use is told on the host, where the lengths are known.
    ids = session.ids(
        rows, ConvertRows(size, lengths), derive=lambda there: entries.index_select(0, there), count=count
    )
    return None if ids is None else SlotAccess(Space.DEVICE, Mode.READ, ids, session.pool(pool, Space.DEVICE))


def _after_forward(session: Session, this: Round | None, *_: Any, **__: Any) -> None:
    session.local.round = None
    if this is None:
        return
    if this.graph >= 0:
        session.recorder.graph_replay(
            this.stream, this.graph, this.accesses, site=SITE, group=this.group, early=this.early
        )
    else:
        end_segment(session, this, ALL_LAYERS[1])
    session.recorder.flush_batch()


def _after_replay(session: Session, _: object, __: object, graphs: Any, *___: Any, **____: Any) -> None:
    """The round is a replay of a captured graph, which may hold an event that is recorded with every replay."""
    this: Round | None = session.local.round
    if this is None:
        return
    this.graph = session.graph(graphs, getattr(graphs, "_replay_graph_key", None))
    inside = getattr(graphs, "in_graph_metadata_prep_done", None)
    runner = getattr(graphs, "model_runner", None)
    if inside is not None and getattr(runner, "shared_read_done_event", None) is inside:
        this.early = session.event(inside)


def _before_batch(session: Session, scheduler: Any, *_: Any, **__: Any) -> int:
    outer = session.local.round_group
    session.local.round_group = session.number()
    for attribute, role in (("schedule_stream", "schedule"), ("forward_stream", "forward")):
        stream = getattr(scheduler, attribute, None)
        if stream is not None:
            session.stream(stream, role)
    return outer


def _after_batch(session: Session, outer: int, *_: Any, **__: Any) -> None:
    session.local.round_group = outer


_RUNNER: Final = "sglang.srt.model_executor"
FORWARD_ADAPTERS: Final = (
    Adapter(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        Versions("0.5.11"),
        before=_before_batch,
        after=_after_batch,
        failed=_after_batch,
    ),
    Adapter(
        f"{_RUNNER}.model_runner.ModelRunner.forward",
        Versions("0.5.11"),
        before=_before_forward,
        after=_after_forward,
        failed=_after_forward,
        hazards=_FORWARD,
    ),
    Adapter(
        f"{_RUNNER}.cuda_graph_runner.CudaGraphRunner.replay",
        Versions("0.5.11", "0.5.14"),
        after=_after_replay,
        hazards=(Hazard.GRAPH,),
    ),
    Adapter(
        f"{_RUNNER}.runner.decode_cuda_graph_runner.DecodeCudaGraphRunner.execute",
        Versions("0.5.14"),
        after=_after_replay,
        hazards=(Hazard.GRAPH,),
    ),
)
