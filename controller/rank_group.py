"""Which ranks there are, what each holds, and what makes an engine one of them.

A group is a grid: ``tp`` tensor-parallel ranks, each a pipeline of ``pp`` stages. All of them take the same cache
decisions, so one decision log covers the grid. The tensor-parallel ranks hold all heads each: their rounds exchange
nothing but the sampled tokens, which stand for the all-reduces of a model whose heads are shared out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.controller.decision_log import DecisionLog
from hicache_obs.controller.engine import Engine, EngineConfig
from hicache_obs.controller.pipeline import Stage
from hicache_obs.controller.workloads import Request
from hicache_obs.errors import ConfigError
from hicache_obs.recorder.recorder import Recorder
from hicache_obs.records import DefineSpace, Ranks

MAX_RANKS: Final = 8
"""Every rank is a process with a model of its own."""
DECISIONS, ROUNDS = 0, 1
"""Groups of collectives: entries of the decision log; launched rounds."""
END: Final = "end"
"""Last collective of a rank: one that makes more rounds than its peers differs from them here."""


@dataclass(frozen=True, slots=True)
class RankGrid:
    """How many ranks there are.

    Attributes:
        tp, pp: Tensor-parallel ranks, and stages of each.

    Raises:
        ConfigError: Fewer than one of either, or more than ``MAX_RANKS`` in all.
    """

    tp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} {getattr(self, name)}: expected an integer ≥ 1")
        if self.size > MAX_RANKS:
            raise ConfigError(
                f"--tp {self.tp} --pp {self.pp}: {self.size} ranks, each of which is a process; "
                f"expected at most {MAX_RANKS}"
            )

    @property
    def size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp

    @property
    def ranks(self) -> tuple[Ranks, ...]:
        """All of them; a rank's place here is its number. Stages of one pipeline are neighbours."""
        return tuple(Ranks(tp=tp, pp=pp) for tp in range(self.tp) for pp in range(self.pp))

    @property
    def names(self) -> tuple[str, ...]:
        """Of the ranks, for people."""
        return tuple(f"rank {number} (tp {rank.tp}, pp {rank.pp})" for number, rank in enumerate(self.ranks))

    def stages(self, layers: int) -> tuple[Stage, ...]:
        """Who holds which layers.

        Raises:
            ConfigError: Fewer layers than stages.
        """
        if layers < self.pp:
            raise ConfigError(f"--pp {self.pp}: the model has {layers} layers; expected at most one stage per layer")
        return Stage.split(layers, self.pp)

    def config(self, whole: EngineConfig, number: int) -> EngineConfig:
        """The engine of rank ``number``: its layers, acknowledgements by query, and a folder of its own in storage."""
        rank = self.ranks[number]
        first, end = self.stages(whole.layers)[rank.pp].layers
        storage = whole.storage
        if storage is not None:
            storage = replace(storage, url=f"{storage.url.rstrip('/')}/tp{rank.tp}-pp{rank.pp}")
        scheduler = replace(whole.scheduler, poll_acks=True)
        return replace(whole, layers=end - first, storage=storage, scheduler=scheduler)


def join(engine: Engine, log: DecisionLog | None) -> None:
    """Make ``engine`` decide with its peers. Without a log it decides alone, as if it had none."""
    if log is None:
        return
    engine.scheduler.agree = log.agree
    engine.controller.agree = log.agree
    if engine.scheduler.storage is not None:
        engine.scheduler.storage.replies.agree = log.agree


class Collectives:
    """Records what a rank enters together with its peers: rounds, by their shape, and entries of the decision log.

    Args:
        recorder: Of the rank.
        rank: Its number.
    """

    def __init__(self, recorder: Recorder, rank: int) -> None:
        self._recorder = recorder
        self._rank = rank
        recorder.define(DefineSpace.GROUP, DECISIONS, "decisions")
        recorder.define(DefineSpace.GROUP, ROUNDS, "rounds")

    def watch(self, engine: Engine, log: DecisionLog | None) -> None:
        """Record what ``engine`` and ``log`` do from now on."""
        engine.runner.on_batch = self._on_batch
        if log is not None:
            log.on_enter = self._on_decision

    def end(self) -> None:
        """The rank has made its last round."""
        self._recorder.collective(ROUNDS, self._rank, END)

    def _on_batch(self, batch: ForwardBatch) -> None:
        shape = f"{batch.mode.value}, {batch.rows} rows, {int(batch.new_lens.sum())} tokens"
        self._recorder.collective(ROUNDS, self._rank, shape)

    def _on_decision(self, what: str) -> None:
        self._recorder.collective(DECISIONS, self._rank, what)


def publish_requests(log: DecisionLog, requests: Sequence[Request] | None) -> list[Request]:
    """The first rank's ``requests``, on every rank; the others give ``None``. One entry per request.

    Raises:
        RankError: See ``DecisionLog.publish``.
    """
    (count,) = log.publish("requests", None if requests is None else [len(requests)])
    return [_request(log.publish("request", None if requests is None else _words(requests[n]))) for n in range(count)]


def _words(request: Request) -> list[int]:
    about = [request.request_id, request.arrival_ms, request.output_length, request.priority]
    return [*about, *request.prompt.tolist()]


def _request(words: Sequence[int]) -> Request:
    request_id, arrival_ms, output_length, priority = words[:4]
    return Request(request_id, arrival_ms, np.array(words[4:], np.int64), output_length, priority)
