"""A request on its way: waiting, or between admission and its finish or retraction."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hicache_obs.controller.radix_cache import HostHold, Node
from hicache_obs.controller.radix_node import Int64Array
from hicache_obs.controller.workloads import Request


class Tokens:
    """Prompt and output tokens of a request. Scheduler's thread.

    A slice is ``(n,) int64``; it may be a view of the prompt, which is never copied otherwise.

    Attributes:
        append: Adds one output token.
    """

    __slots__ = ("_output", "_prompt", "append")

    def __init__(self, prompt: Int64Array) -> None:
        self._prompt = prompt
        self._output: list[int] = []
        self.append = self._output.append

    def __len__(self) -> int:
        return len(self._prompt) + len(self._output)

    def __getitem__(self, part: slice) -> Int64Array:
        start, end, _ = part.indices(len(self))
        given = len(self._prompt)
        if end <= given:
            return self._prompt[start:end]
        added = np.array(self._output[max(start - given, 0) : end - given], np.int64)
        return added if start >= given else np.concatenate((self._prompt[start:], added))


@dataclass(slots=True, eq=False)
class Waiting:
    """A request that is not admitted.

    Attributes:
        request: It.
        tokens: Prompt and the output tokens the host has seen.
        remaining: Output tokens still to be handled.
        hold: Of a retracted request: keeps the host copies of its pages until it is resumed.
        since_ns: When it was submitted, on the device's host clock.
    """

    request: Request
    tokens: Tokens
    remaining: int
    hold: HostHold | None = None
    since_ns: int = 0


@dataclass(slots=True, eq=False)
class RequestState:
    """A request between admission and finish or retraction.

    Attributes:
        request, tokens, remaining, since_ns: As of ``Waiting``.
        launched_len: Tokens in the KV cache once every launched round is done.
        page_count: Used entries of the request's row in the page table.
        slot: Row of the page table and entry of the device token buffer.
        locked: Tree node this request holds.
        prefilling: A part of the prompt was not launched yet.
        last_round, last_stream: Newest round that has a row of it, and the stream that runs it.
        alive: Neither finished nor retracted.
    """

    request: Request
    tokens: Tokens
    remaining: int
    slot: int
    launched_len: int
    page_count: int
    locked: Node
    prefilling: bool = False
    last_round: int = 0
    last_stream: int = 0
    alive: bool = True
    since_ns: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class PrefillRow:
    """A row of a prefill round: tokens ``start`` to ``end`` of the request.

    Attributes:
        state: The request.
        start, end: ``start`` tokens are in the KV cache before the round.
    """

    state: RequestState
    start: int
    end: int

    @property
    def final(self) -> bool:
        """Whether the round samples the request's next token; what it samples for an earlier chunk is dropped."""
        return self.end >= len(self.state.tokens)
