"""One pipeline stage of the transformer: some of its layers, and the way from and to the stages beside it.

Every stage has the whole batch and its own pages for its own layers. Hidden states go from stage to stage, sampled
tokens from the last stage to all others, as part of the launched round: on the device's time, not the scheduler's. A
batch is in one stage at a time, so stages take turns; what overlaps them are the transfers between their tiers.
"""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as dist

from hicache_obs.controller.batch import ForwardBatch
from hicache_obs.controller.decision_log import TIMEOUT_S
from hicache_obs.controller.ledger import ContentLedger
from hicache_obs.controller.model_runner import TOKEN_SLOTS
from hicache_obs.controller.pools import RoundPool
from hicache_obs.controller.transformer import TransformerRound, TransformerRunner, Weights, seeded_weights
from hicache_obs.errors import RankError
from hicache_obs.streams.protocol import Device


class StageLinks(Protocol):
    """Messages between the stages of one pipeline. Called by launched functions, in order of the rounds."""

    def send(self, values: torch.Tensor, stage: int, round_id: int) -> None:
        """Send ``values`` of ``round_id`` to another stage."""

    def receive(self, values: torch.Tensor, stage: int, round_id: int) -> None:
        """Fill ``values`` with what another stage sends of ``round_id``. Blocks."""

    def close(self) -> None:
        """Nothing more is sent or received. Not while a launched round may."""


class Connect(Protocol):
    """Makes the links of one stage."""

    def __call__(self, rendezvous: Path, stage: int, stages: int, *, timeout_s: float) -> StageLinks:
        """See ``GlooLinks``."""


class GlooLinks:
    """Stages in separate processes of one machine: ``torch.distributed`` with its CPU back end, over loopback.

    It makes the process's default group, so a process is a stage of one pipeline. Partner of ``close``.

    Args:
        rendezvous: A file that no other pipeline uses; it must not exist before the first stage is made.
        stage, stages: Which one this is, of how many.
        timeout_s: How long to wait for a message, and for the other stages to be made.

    Raises:
        RankError: The other stages do not come in time.
    """

    def __init__(self, rendezvous: Path, stage: int, stages: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._stage = stage
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _loopback())
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{rendezvous.absolute()}",
                rank=stage,
                world_size=stages,
                timeout=timedelta(seconds=timeout_s),
            )
        except RuntimeError as error:
            raise RankError(
                f"stage {stage}: the other {stages - 1} stages are not there within {timeout_s:g} s"
            ) from error

    def send(self, values: torch.Tensor, stage: int, round_id: int) -> None:
        """See ``StageLinks.send``.

        Raises:
            RankError: The other stage has ended, or does not take it in time.
        """
        try:
            dist.send(values, stage, tag=round_id)
        except RuntimeError as error:
            raise RankError(f"stage {self._stage}: round {round_id} for stage {stage}: {_why(error)}") from error

    def receive(self, values: torch.Tensor, stage: int, round_id: int) -> None:
        """See ``StageLinks.receive``.

        Raises:
            RankError: The other stage has ended, or sends nothing in time.
        """
        try:
            dist.recv(values, stage, tag=round_id)
        except RuntimeError as error:
            raise RankError(f"stage {self._stage}: round {round_id} of stage {stage}: {_why(error)}") from error

    def close(self) -> None:
        """Leave the group. Partner of the constructor; see ``StageLinks.close``."""
        dist.destroy_process_group()


def _loopback() -> str:
    """Name of this machine's loopback interface."""
    return next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")


def _why(error: RuntimeError) -> str:
    """What became of the other stage, of gloo's many words."""
    return "no answer in time" if "imed out" in str(error) or "imeout" in str(error) else "its process has ended"


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a model.

    Attributes:
        number, stages: Which one, of how many, in order of the layers.
        layers: ``(first, end)`` of the model's.
    """

    number: int
    stages: int
    layers: tuple[int, int]

    @property
    def last(self) -> bool:
        """It samples."""
        return self.number == self.stages - 1

    @classmethod
    def split(cls, layers: int, stages: int) -> tuple[Stage, ...]:
        """``stages`` stages of nearly equal size; the first ones take what is left over."""
        ends = [0]
        for number in range(stages):
            ends.append(ends[-1] + layers // stages + (number < layers % stages))
        return tuple(cls(number, stages, (ends[number], ends[number + 1])) for number in range(stages))


class StageRound(TransformerRound):
    """One round of one stage."""

    def __init__(
        self,
        stage: Stage,
        links: StageLinks,
        weights: Weights,
        batch: ForwardBatch,
        pool: RoundPool,
        ledger: ContentLedger,
        token_buffer: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        super().__init__(weights, batch, pool, ledger, token_buffer, next_tokens)
        self._stage = stage
        self._links = links

    def embed(self) -> None:
        """Behind the first stage: take over what the stage before has made of the tokens."""
        super().embed()
        if self._stage.number:
            self._links.receive(self._x, self._stage.number - 1, self.batch.round_id)

    def sample(self) -> torch.Tensor:
        """The last stage samples, for all."""
        stage, round_id = self._stage, self.batch.round_id
        if stage.last:
            tokens = super().sample()
            for other in range(stage.stages - 1):
                self._links.send(tokens, other, round_id)
            return tokens
        self._links.send(self._x, stage.number + 1, round_id)
        tokens = torch.empty(self.batch.rows, dtype=torch.int64)
        self._links.receive(tokens, stage.stages - 1, round_id)
        return tokens


class StageRunner(TransformerRunner):
    """Launches rounds of one stage. The pool has the stage's layers only; its round ids are those of the other stages.

    Args:
        stage, links: Which stage, and how to reach the others.
        layers: Of the whole model.
    """

    def __init__(
        self,
        device: Device,
        pool: RoundPool,
        ledger: ContentLedger,
        *,
        stage: Stage,
        links: StageLinks,
        layers: int,
        seed: int,
        vocabulary: int = 512,
        hidden: int = 64,
        mlp: int = 128,
        token_slots: int = TOKEN_SLOTS,
    ) -> None:
        first, end = stage.layers
        assert pool.layout.layers == end - first, f"a pool of {pool.layout.layers} layers for layers {first} to {end}"
        whole = seeded_weights(
            replace(pool.layout, layers=layers),
            seed=seed,
            vocabulary=vocabulary,
            hidden=hidden,
            mlp=mlp,
            device=device.torch_device,
        )
        own = replace(whole, layers=whole.layers[first:end])
        super().__init__(device, pool, ledger, seed=seed, vocabulary=vocabulary, token_slots=token_slots, weights=own)
        self._stage = stage
        self._links = links

    def start(self, batch: ForwardBatch, next_tokens: torch.Tensor) -> StageRound:
        return StageRound(
            self._stage, self._links, self.weights, batch, self.pool, self.ledger, self.token_buffer, next_tokens
        )
