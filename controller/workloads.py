"""Requests to serve, and a generator of them with the figures of a real trace.

Traces name prompts by the ids of their blocks of 512 tokens; equal ids are a reusable prefix. Here a block
becomes one page of ``tokens_per_block`` tokens, so a small model with small pages sees the sharing of the real
trace, and token counts scale by ``tokens_per_block / 512``. Tokens are made up, the same in every run.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Final

import numpy as np
import numpy.typing as npt

from hicache_obs.errors import ConfigError

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]

TRACE_BLOCK: Final = 512
"""Tokens per block in trace files and in the generator's figures."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One request.

    Attributes:
        request_id: Position in the file, or in the order of generation.
        arrival_ms: Since the start of the workload.
        prompt: ``(n,) int64`` tokens, n ≥ 1.
        output_length: Tokens to generate, at least 1.
        priority: Its prefix is given up after those of lower priority, where that is the eviction policy.
    """

    request_id: int
    arrival_ms: int
    prompt: Int64Array
    output_length: int
    priority: int = 0


@dataclass(frozen=True, slots=True)
class WorkloadStatistics:
    """Figures of a workload, in the trace's own unit: tokens of blocks of 512.

    Attributes:
        requests: How many.
        input_p50, input_p95, input_mean: Prompt lengths.
        output_p50, output_p95, output_mean: Output lengths.
        blocks_mean: Blocks per prompt, the partial last one included.
        prefix_hit_share: Blocks that an unbounded prefix cache would have had, of all blocks.
        requests_per_second: Over the time between the first and the last arrival; 0 if there is none.
    """

    requests: int
    input_p50: float
    input_p95: float
    input_mean: float
    output_p50: float
    output_p95: float
    output_mean: float
    blocks_mean: float
    prefix_hit_share: float
    requests_per_second: float


def generate(
    n: int,
    *,
    seed: int,
    tokens_per_block: int,
    vocabulary: int,
    reuse: float = 0.37,
    conversations: int = 1000,
    shared_blocks: int = 1,
    max_blocks: int | None = None,
    max_output: int | None = None,
    first_input_median: float = 6000.0,
    first_input_sigma: float = 1.12,
    turn_median: float = 600.0,
    turn_sigma: float = 1.2,
    output_mean: float = 340.0,
    output_deviation: float = 215.0,
    requests_per_second: float = 3.4,
) -> list[Request]:
    """``n`` made-up requests of multi-turn conversations, in order of arrival.

    The defaults match the figures of one hour of a public chat trace (12,031 requests: input p50 6,909, p95
    39,550, mean 12,035 tokens; output p50 350, p95 698, mean 343; 36.6 % of blocks a prefix hit; 3.4 requests
    per second). A conversation's next prompt is its last one and more (made-up tokens where the answer would
    be), so prefixes that were evicted in the meantime come back: few pages, several ``conversations`` and a
    high ``reuse`` make many load-backs.

    Args:
        n: Number of requests.
        seed: Equal arguments give equal requests.
        tokens_per_block, vocabulary: As in ``load_jsonl``.
        reuse: Chance that a request continues a conversation instead of starting one.
        conversations: Most conversations that can be continued; the one silent for longest is forgotten. Which
            of them is continued is drawn evenly.
        shared_blocks: Blocks that all prompts begin with (the system prompt).
        max_blocks: Longest prompt, in blocks. Lengths are drawn from below it, not cut to it; a conversation that
            has reached it is over.
        max_output: Most tokens generated, in tokens of the request (scaled, as in ``Request``).
        first_input_median, first_input_sigma: Log-normal length of a conversation's first prompt, 512-token
            blocks' tokens.
        turn_median, turn_sigma: Log-normal number of tokens a turn adds, likewise.
        output_mean, output_deviation: Normal output length, at least 1, likewise.
        requests_per_second: Mean rate of arrivals, which are a Poisson process.

    Raises:
        ConfigError: An argument is out of range.
    """
    require(n=(n, 1), seed=(seed, 0), tokens_per_block=(tokens_per_block, 1), vocabulary=(vocabulary, 2))
    require(conversations=(conversations, 1), shared_blocks=(shared_blocks, 0))
    if max_blocks is not None:
        require(max_blocks=(max_blocks, shared_blocks + 1))
    if max_output is not None:
        require(max_output=(max_output, 1))
    if not 0 <= reuse <= 1:
        raise ConfigError(f"reuse: {reuse}; expected a share in 0..1")
    positive = {
        "first_input_median": first_input_median,
        "turn_median": turn_median,
        "requests_per_second": requests_per_second,
    }
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"{name}: {value}; expected a number > 0")
    random = np.random.default_rng(seed)
    arrivals = np.cumsum(random.exponential(1000 / requests_per_second, n)).astype(np.int64)
    outputs = _normal_outputs(random, n, output_mean, output_deviation, tokens_per_block, max_output)
    shared = shared_blocks * tokens_per_block
    longest = math.inf if max_blocks is None else max_blocks * tokens_per_block
    scale = TRACE_BLOCK / tokens_per_block
    live: list[tuple[int, int]] = []  # (conversation, tokens so far), the one silent for longest first
    started = 0
    requests: list[Request] = []
    for i in range(n):
        if live and random.random() < reuse:
            conversation, length = live.pop(int(random.integers(len(live))))
            added = _log_normal(random, turn_median, turn_sigma, (longest - length) * scale)
            length += scaled(added, tokens_per_block)
        else:
            conversation, started = started, started + 1
            drawn = _log_normal(random, first_input_median, first_input_sigma, longest * scale)
            length = max(shared + 1, scaled(drawn, tokens_per_block))
        if length < longest:
            live.append((conversation, length))
        if len(live) > conversations:
            del live[0]
        prompt = _conversation_prompt(seed, conversation, length, shared, vocabulary)
        requests.append(Request(i, int(arrivals[i] - arrivals[0]), prompt, int(outputs[i])))
    return requests


def statistics(requests: list[Request], *, tokens_per_block: int) -> WorkloadStatistics:
    """Figures of ``requests``, whose blocks have ``tokens_per_block`` tokens."""
    require(requests=(len(requests), 1), tokens_per_block=(tokens_per_block, 1))
    scale = TRACE_BLOCK / tokens_per_block
    inputs = np.array([len(request.prompt) for request in requests]) * scale
    outputs = np.array([request.output_length for request in requests]) * scale
    blocks = sum(-(-len(request.prompt) // tokens_per_block) for request in requests)
    arrivals = [request.arrival_ms for request in requests]
    span_s = (max(arrivals) - min(arrivals)) / 1000
    return WorkloadStatistics(
        requests=len(requests),
        input_p50=float(np.percentile(inputs, 50)),
        input_p95=float(np.percentile(inputs, 95)),
        input_mean=float(inputs.mean()),
        output_p50=float(np.percentile(outputs, 50)),
        output_p95=float(np.percentile(outputs, 95)),
        output_mean=float(outputs.mean()),
        blocks_mean=blocks / len(requests),
        prefix_hit_share=_prefix_hits(requests, tokens_per_block) / blocks,
        requests_per_second=len(requests) / span_s if span_s else 0.0,
    )


def _prefix_hits(requests: list[Request], tokens_per_block: int) -> int:
    """Blocks found in a prefix cache that forgets nothing. A partial block is found only as it is."""
    known: dict[tuple[int, bytes], int] = {}
    hits = 0
    for request in requests:
        prefix = 0
        for start in range(0, len(request.prompt), tokens_per_block):
            key = (prefix, request.prompt[start : start + tokens_per_block].tobytes())
            hits += key in known  # behind a miss nothing is: the prefix is a new one
            prefix = known.setdefault(key, len(known) + 1)
    return hits


def require(**arguments: tuple[int, int]) -> None:
    """ConfigError unless each ``name=(value, lowest)`` holds ``value ≥ lowest``."""
    for name, (value, lowest) in arguments.items():
        if value < lowest:
            raise ConfigError(f"{name}: {value}; expected an integer ≥ {lowest}")


def scaled(tokens: float, tokens_per_block: int) -> int:
    """Tokens of 512-token blocks in blocks of ``tokens_per_block``, at least one."""
    return max(1, round(tokens / TRACE_BLOCK * tokens_per_block))


def _mixed(values: UInt64Array) -> UInt64Array:
    """splitmix64's finaliser: neighbouring inputs give unrelated outputs."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: UInt64Array = values ^ (values >> np.uint64(31))
    return mixed


def _tokens(streams: UInt64Array, positions: UInt64Array, vocabulary: int) -> Int64Array:
    """Token of each (stream, position), a fixed function of both; the arrays broadcast."""
    mixed = _mixed(_mixed(streams) + positions * np.uint64(0x9E3779B97F4A7C15))
    tokens: Int64Array = (mixed % np.uint64(vocabulary)).astype(np.int64)
    return tokens


def block_prompt(hash_ids: list[int], input_length: int, tokens_per_block: int, vocabulary: int) -> Int64Array:
    """``(n,) int64`` made-up tokens of a traced prompt: equal block ids give equal tokens."""
    full = len(hash_ids) - 1
    length = full * tokens_per_block + scaled(input_length - full * TRACE_BLOCK, tokens_per_block)
    streams = np.array(hash_ids, dtype=np.uint64)[:, None]
    blocks = _tokens(streams, np.arange(tokens_per_block, dtype=np.uint64), vocabulary)
    prompt: Int64Array = blocks.reshape(-1)[:length].copy()
    return prompt


def _conversation_prompt(seed: int, conversation: int, length: int, shared: int, vocabulary: int) -> Int64Array:
    """First ``length`` tokens of a conversation; its first ``shared`` are those of every conversation."""
    positions = np.arange(length, dtype=np.uint64)
    streams = np.full(length, conversation + 1, dtype=np.uint64)
    streams[:shared] = 0
    return _tokens(streams + _mixed(np.array([seed], dtype=np.uint64)), positions, vocabulary)


def _log_normal(random: np.random.Generator, median: float, sigma: float, highest: float) -> float:
    """A log-normal number below ``highest``."""
    normal = NormalDist(math.log(median), sigma)
    share = normal.cdf(math.log(highest)) * random.random()
    return min(highest, math.exp(normal.inv_cdf(share))) if share else 0.0


def _normal_outputs(
    random: np.random.Generator,
    n: int,
    mean: float,
    deviation: float,
    tokens_per_block: int,
    max_output: int | None,
) -> Int64Array:
    drawn = random.normal(mean, deviation, n) * tokens_per_block / TRACE_BLOCK
    outputs: Int64Array = np.maximum(1, np.rint(drawn)).astype(np.int64)
    return outputs if max_output is None else np.minimum(outputs, max_output)
