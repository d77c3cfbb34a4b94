"""Whole engines over hybrid pools: sliding windows, states, tombstones, and the pools' own races."""

from __future__ import annotations

import math

import pytest
import torch

from hicache_obs.controller.cache_pools import HYBRIDS
from hicache_obs.controller.hybrid import HybridTransferEngine
from hicache_obs.controller.transformer import NORM_EPS, Weights
from hicache_obs.errors import ConfigError
from hicache_obs.findings import Hazard
from hicache_obs.records import Kernel, Memcpy, Space
from hicache_obs.testing.consistency import check_contents, check_drained, check_engine

TIGHT = {"window": 5, "window_pages": 13, "device_pages": 24, "max_running": 3}
"""Fewer places than cached pages: tombstones, and windows that pass."""
WORKLOAD = {"seed": 3, "output_mean": 1800.0, "max_output": 16}


@pytest.mark.parametrize(("kv", "fence"), [("swa", "stream"), ("hybrid", "page")])
def test_right_tokens_and_contents(lab, kv, fence):
    requests = lab.requests(20, **WORKLOAD)
    shape = {"kv": kv, "window": TIGHT["window"]}
    reference = lab.run(
        requests, backend="virtual-eager", device_pages=400, host_tier=False, record=False, max_running=3, **shape
    )
    run = lab.run(requests, fence=fence, after_step=check_engine, **{**TIGHT, "kv": kv})
    assert run.outputs == reference.outputs
    assert (run.findings, run.corrupted) == ([], [])
    check_drained(run.engine)
    assert check_contents(run.engine, reference.engine, exact=True) > 0
    partial = run.engine.scheduler.pages.partial
    assert min(partial.tombstones, partial.revived, partial.passed) > 0
    assert run.engine.controller.counters.restored_pages > 0


@pytest.mark.parametrize("kv", HYBRIDS)
def test_without_fences_every_pool_races(lab, kv):
    """The same overrun rows that spoil a page of one pool spoil the places of the others."""
    run = lab.run(lab.requests(20, **WORKLOAD), fence="none", **{**TIGHT, "kv": kv})
    raced = {(f.hazard, f.pool) for f in run.findings if f.space == "device"}
    assert {(Hazard.WAW_FORWARD_RESTORE, 0), (Hazard.WAW_FORWARD_RESTORE, 1)} <= raced
    assert run.corrupted != []
    assert {f.hazard for f in run.findings} & {Hazard.METADATA_WAR} == set(), "tables are no transfers"


def test_rounds_say_what_they_touch_in_each_pool(lab):
    """A segment per run of layers in one pool; windows end where the context does, and begin no earlier than needed."""
    run = lab.run(lab.requests(4, max_output=12, output_mean=1500.0), **{**TIGHT, "kv": "swa", "device_pages": 40})
    rounds: dict[int, list[Kernel]] = {}
    for record in run.of_kind(Kernel):
        if any(access.space is Space.DEVICE for access in record.accesses):
            rounds.setdefault(record.group, []).append(record)
    assert {tuple(kernel.layers for kernel in kernels) for kernels in rounds.values()} == {((0, 1), (0, 1), (1, 2))}
    for kernels in rounds.values():
        full, window, last = (
            [access for access in kernel.accesses if access.space is Space.DEVICE] for kernel in kernels
        )
        assert [access.pool for access in (*full, *window, *last)] == [0, 0, 1, 1, 0, 0]
        assert full[0].ids.tolist() == last[0].ids.tolist()
        assert len(window[0].ids) <= len(full[0].ids)
        entries = [access for access in kernels[1].accesses if access.space is Space.BUFFER]
        assert [len(access.ids) for access in entries] == [len(window[0].ids)]
    assert any(len(kernels[1].accesses[0].ids) < len(kernels[0].accesses[0].ids) for kernels in rounds.values())


def test_tombstones_are_restored_without_the_rest_of_the_page(lab):
    """Some load-back writes places of the window pool, and no page of the full one for them."""
    run = lab.run(lab.requests(20, **WORKLOAD), **{**TIGHT, "kv": "swa"})
    loads: dict[int, set[int]] = {}
    for copy in run.of_kind(Memcpy):
        if copy.direction.name == "HOST_TO_DEVICE":
            loads.setdefault(copy.group, set()).update(a.pool for a in copy.accesses if a.space is Space.DEVICE)
    assert {1} in loads.values()
    assert {0, 1} in loads.values()


def plain_tokens(weights: Weights, prompt: list[int], count: int, kinds: list[int | None], size: int) -> list[int]:
    """``count`` greedy tokens of a model without pages, cache or batch. Kinds: window, 0 for all, None for a state."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(_logits(weights, tokens, kinds, size).argmax()))
    return tokens[len(prompt) :]


def _norm(x: torch.Tensor) -> torch.Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + NORM_EPS).sqrt()


def _logits(weights: Weights, tokens: list[int], kinds: list[int | None], size: int) -> torch.Tensor:
    count, half = len(tokens), len(weights.rotary)
    place = torch.arange(count)
    angles = place[:, None, None].double() * weights.rotary

    def rotary(x: torch.Tensor) -> torch.Tensor:
        even, odd = x[..., 0::2], x[..., 1::2]
        turned = (even * angles.cos() - odd * angles.sin(), even * angles.sin() + odd * angles.cos())
        return torch.stack(turned, -1).flatten(-2)

    x = weights.embedding[torch.tensor(tokens)]
    for layer, kind in zip(weights.layers, kinds, strict=True):
        q, k, v = (part.view(count, -1, 2 * half) for part in (_norm(x) @ layer.qkv).chunk(3, -1))
        q, k = rotary(q), rotary(k)
        if kind is None:
            mixed = torch.zeros_like(q)
            for channel in range(size):
                rate = (channel + 1) / (size + 1)
                decay = rate * (1 - rate) ** (place[:, None] - place).clamp_min(0).double()
                mixed += torch.einsum("ij,jhd->ihd", decay.tril(), k * v)
            mixed = q * mixed / math.sqrt(size)
        else:
            seen = place <= place[:, None]
            if kind:
                seen &= place > place[:, None] - kind
            scores = torch.einsum("ihd,jhd->hij", q, k) / (2 * half) ** 0.5
            mixed = torch.einsum("hij,jhd->ihd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)
        x = x + mixed.reshape(count, -1) @ layer.out
        gate, up = (_norm(x) @ layer.gate_up).chunk(2, -1)
        x = x + (gate * gate.sigmoid() * up) @ layer.down
    return (_norm(x) @ weights.head)[-1]


@pytest.mark.parametrize(("kv", "kinds"), [("swa", [0, 5, 0]), ("hybrid", [0, 5, None])])
def test_the_transformer_equals_one_without_cache(lab, kv, kinds):
    requests = lab.requests(10, seed=1, output_mean=1000.0)
    policies = {"chunked_prefill": True, "retraction": "backup"}
    run = lab.run(
        requests, runner="transformer", **{**TIGHT, "kv": kv}, max_extend_tokens=12, policies=policies, record=False
    )
    assert run.engine.controller.counters.restored_pages > 0
    weights, size = run.engine.runner.weights, run.engine.scheduler.radix.page_size
    for request in requests:
        expected = plain_tokens(weights, request.prompt.tolist(), request.output_length, kinds, size)
        assert run.outputs[request.request_id] == expected


@pytest.mark.parametrize("io", ["kernel", "direct"])
def test_on_threads(lab, io):
    requests = lab.requests(10, **WORKLOAD)
    run = lab.run(
        requests, fence="page", backend="threads", io=io, host_layout="page-first", **{**TIGHT, "kv": "hybrid"}
    )
    assert run.outputs == lab.reference(requests, kv="hybrid", window=TIGHT["window"])
    assert (run.findings, run.corrupted) == ([], [])
    assert isinstance(run.engine.controller.engine, HybridTransferEngine)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"graphs": True}, "--graphs: not with --kv swa; expected one of mha, mla, fp8"),
        ({"compact_every": 1}, "--compact-every: not with --kv swa; expected one of mha, mla, fp8"),
        ({"window": 1}, "window: 1; expected at least 2 tokens"),
        ({"window_pages": 2}, r"window_pages: 2; the longest request needs \d+; expected at least that"),
        ({"kv": "mla", "window": 8}, "window: --kv mla has no sliding window; expected swa or hybrid"),
        ({"kv": "gqa"}, "--kv gqa: unknown; expected one of mha, mla, fp8, swa, hybrid"),
    ],
)
def test_what_does_not_go_together(lab, fields, message):
    with pytest.raises(ConfigError, match=f"^{message}$"):
        lab.build(lab.setup(**{"kv": "swa", **fields}), lab.requests(4))
