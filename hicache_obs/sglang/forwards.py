"""Hooks on forward rounds: the launch stream, the slots a round writes and the pages it reads.

A round is recorded when its launch has returned. Events that were recorded inside it (the end of its reads of shared
buffers, say) come before it in the ring, so they never cover its accesses. A wait for a layer inside it ends a
segment: what was launched before that wait did not wait.
"""

from __future__ import annotations

from typing import Any, Final

from hicache_obs.findings import Hazard
from hicache_obs.records import ALL_LAYERS
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.captures import capturing
from hicache_obs.sglang.guard import Around, Guard
from hicache_obs.sglang.round_pages import PlainRound, round_accesses
from hicache_obs.sglang.rounds import SITE, Round, end_segment
from hicache_obs.sglang.session import Session
from hicache_obs.sglang.versions import Versions

_FORWARD: Final = (
    Hazard.WAW_FORWARD_RESTORE,
    Hazard.WAR_FORWARD_RESTORE,
    Hazard.RAW_RESTORE_FORWARD,
    Hazard.RAW_FORWARD_BACKUP,
    Hazard.WAR_BACKUP_FORWARD,
    Hazard.GRAPH,
)


def _before_forward(session: Session, runner: Any, batch: Any, *_: Any, **__: Any) -> Round | None:
    lane = session.lanes.lane
    lane.round = None
    written = batch.out_cache_loc
    if written is None or capturing() or not written.numel():
        return None
    raw = session.raw_current_stream()
    session.forward_stream = raw
    touches = round_accesses(session, runner, batch, written)
    if not touches:
        return None
    this = lane.round = Round(
        session.stream(raw, "forward"),
        raw,
        touches,
        lane.round_group or session.number(),
        session.start_timing(raw) if session.timed else None,
    )
    return this


def _forward(session: Session, guard: Guard) -> Around:
    """``ModelRunner.forward``, which every round calls."""
    counters = session.counters

    def hook(original: Around, *args: Any, **kwargs: Any) -> Any:
        if guard.off or not (session.switch[0] or session.recording):
            return original(*args, **kwargs)
        counters.calls += 1
        try:
            this = _before_forward(session, *args, **kwargs)
        except Exception as error:  # noqa: BLE001 nothing of ours may reach the engine
            guard.failed(error)
            return original(*args, **kwargs)
        try:
            return original(*args, **kwargs)
        finally:
            try:
                _after_forward(session, this)
                if session.failures:
                    session.hook_worked()
            except Exception as error:  # noqa: BLE001 as above
                guard.failed(error)

    return hook


def _after_forward(session: Session, this: Round | None, *_: Any, **__: Any) -> None:
    lane = session.lanes.lane
    lane.round = None
    if this is None:
        return
    if this.graph >= 0:
        session.recorder.graph_replay(
            this.stream, this.graph, this.accesses, site=SITE, group=this.group, early=this.early
        )
    else:
        plain = this.touches
        if (
            type(plain) is not PlainRound
            or this.measured is not None
            or not session.recorder.put_round(lane, this.stream, SITE, this.group, plain.pool, plain.lists, plain.split)
        ):
            end_segment(session, this, ALL_LAYERS[1])
    if lane.batch is not None:
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


def _before_draft(session: Session, graphs: Any, batch: Any, *args: Any, **kwargs: Any) -> Round | None:
    """A draft model's graph is replayed by its own worker, outside of ``ModelRunner.forward``: a round of its own."""
    return None if session.local.round is not None else _before_forward(session, graphs.model_runner, batch)


def _after_draft(session: Session, this: Round | None, _: object, graphs: Any, *__: Any, **___: Any) -> None:
    _after_replay(session, None, None, graphs)
    if this is not None:
        _after_forward(session, this)


def _failed_draft(session: Session, this: Round | None) -> None:
    if this is not None:
        _after_forward(session, this)


def _after_prepare(session: Session, _: object, __: object, steps: Any, batch: Any, *___: Any, **____: Any) -> None:
    """A multi-layer draft: its steps' graphs are replayed out of buffers that were filled from this batch."""
    session.local.draft_batch = steps, batch


def _before_step(session: Session, steps: Any, step: int, *_: Any, **__: Any) -> list[Round]:
    """One step's graph, with a model runner and a pool of its own; or, at the first, the one graph of all steps."""
    lane, together = session.local, bool(getattr(steps, "rotates_in_graph", False))
    prepared, batch = lane.draft_batch
    if prepared is not steps or (together and step) or lane.round is not None:
        return []
    runners = steps.runners if together else steps.runners[step : step + 1]
    if together or step + 1 >= len(steps.runners):
        lane.draft_batch = None, None
    rounds = []
    for runner in runners:
        this = None if runner is None else _before_forward(session, runner.model_runner, batch)
        lane.round = None
        if this is not None:
            this.graph = session.graph(steps, (getattr(steps, "bs", None), None if together else step))
            rounds.append(this)
    return rounds


def _after_step(session: Session, rounds: list[Round], *_: Any, **__: Any) -> None:
    for this in rounds:
        _after_forward(session, this)


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
_SPECULATIVE: Final = "sglang.srt.speculative"


def _draft(name: str, method: str, versions: Versions) -> Adapter:
    return Adapter(
        f"{_SPECULATIVE}.{name}.{method}",
        versions,
        before=_before_draft,
        after=_after_draft,
        failed=_failed_draft,
        optional=True,
    )


_MULTI: Final = "multi_layer_eagle_draft_extend_cuda_graph_runner"
_STEPS: Final = f"{_SPECULATIVE}.{_MULTI}.MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"
_ONE_GRAPH: Final = f"{_SPECULATIVE}.{_MULTI}.OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner"


def _steps(target: str, versions: Versions) -> Adapter:
    return Adapter(
        f"{target}.replay", versions, before=_before_step, after=_after_step, failed=_after_step, optional=True
    )


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
        direct=_forward,
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
    _draft("eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner", "replay", Versions("0.5.11", "0.5.14")),
    _draft("eagle_draft_cuda_graph_runner.EAGLEDraftCudaGraphRunner", "execute", Versions("0.5.14")),
    _draft(
        "eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner", "replay", Versions("0.5.11", "0.5.14")
    ),
    _draft("eagle_draft_extend_cuda_graph_runner.EAGLEDraftExtendCudaGraphRunner", "execute", Versions("0.5.14")),
    _draft("frozen_kv_mtp_cuda_graph_runner.FrozenKVMTPCudaGraphRunner", "replay", Versions("0.5.12", "0.5.14")),
    _draft("frozen_kv_mtp_cuda_graph_runner.FrozenKVMTPCudaGraphRunner", "execute", Versions("0.5.14")),
    _draft(f"{_MULTI}.MultiLayerEagleDraftExtendCudaGraphRunner", "replay", Versions("0.5.11", "0.5.14")),
    _draft(f"{_MULTI}.MultiLayerEagleDraftExtendCudaGraphRunner", "execute", Versions("0.5.14", "0.5.15")),
    Adapter(f"{_STEPS}.prepare", Versions("0.5.15"), after=_after_prepare, optional=True),
    _steps(_STEPS, Versions("0.5.15")),
    _steps(_ONE_GRAPH, Versions("0.5.16")),
)
