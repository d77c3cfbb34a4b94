"""Engines on every form of the pools, host layout and back end: the same tokens, and the same races."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize(
    ("kv", "io", "host_layout"),
    [
        ("mla", "direct", "page-first"),
        ("fp8", "kernel", "page-first-direct"),
        ("fp8", "direct", "layer-first"),
        ("mha", "direct", "page-first-direct"),
        ("mla", "kernel", "page-first"),
    ],
)
@pytest.mark.parametrize("backend", ["virtual-adversarial", "threads"])
def test_every_form_of_the_pools_gives_the_tokens_of_the_run_without_host_tier(lab, kv, io, host_layout, backend):
    work = lab.requests(seed=3)
    run = lab.run(work, backend=backend, kv=kv, io=io, host_layout=host_layout, device_pages=16)
    assert run.outputs == lab.reference(work, kv=kv)
    assert run.findings == []
    assert run.corrupted == []
    assert len(run.engine.scheduler.restored) > 10


@pytest.mark.parametrize("kv", ["mla", "fp8"])
def test_a_race_spoils_every_form_of_the_pools(lab, kv):
    run = lab.run(lab.requests(seed=3), fence="none", kv=kv, device_pages=16, early_backup=True)
    assert run.corrupted != []
    assert run.findings != []


def test_the_transformer_on_one_buffer(lab):
    work = lab.requests(12, seed=3)
    outputs = [lab.run(work, runner="transformer", kv=kv, device_pages=16).outputs for kv in ("mha", "mla")]
    assert outputs[0] == outputs[1]
