"""Rounds of draft models: graphs that are replayed outside of the model runner's forward."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_obs.findings import Hazard
from hicache_obs.records import GraphReplay, Kernel
from hicache_obs.sglang.table import SGLANG_ADAPTERS


def draft_graphs(it):
    pool = SimpleNamespace(page_size=4, layer_num=1)
    runner = SimpleNamespace(token_to_kv_pool=pool, req_to_token_pool=it.runner.req_to_token_pool)
    return SimpleNamespace(model_runner=runner, _replay_graph_key=2)


def test_a_draft_graph_outside_of_a_forward_is_a_round_of_its_own_pool(server):
    it = server()
    it.session.local.round_group = 17
    it.call("ModelRunner.forward", it.runner, it.batch)
    it.call("EAGLEDraftCudaGraphRunner.execute", draft_graphs(it), it.batch)
    target, draft = it.records(Kernel, GraphReplay)
    assert (type(target), type(draft)) == (Kernel, GraphReplay)
    assert target.group == draft.group == 17  # one batch
    assert [access.pool for access in target.accesses] == [0, 0]
    assert [access.pool for access in draft.accesses] == [1, 1]
    assert [access.ids.tolist() for access in draft.accesses] == [[1], [1, 2]]


@pytest.mark.parametrize(
    ("graphs", "names"),
    [
        ("EAGLEDraftCudaGraphRunner", {11: "replay", 12: "replay", 13: "replay", 14: "execute", 15: "execute"}),
        ("EAGLEDraftExtendCudaGraphRunner", {11: "replay", 12: "replay", 13: "replay", 14: "execute", 15: "execute"}),
        ("FrozenKVMTPCudaGraphRunner", {12: "replay", 13: "replay", 14: "execute", 15: "execute"}),
        ("MultiLayerEagleDraftExtendCudaGraphRunner", {11: "replay", 12: "replay", 13: "replay", 14: "execute"}),
        ("MultiLayerEagleMultiStepDraftExtendCudaGraphRunner", {15: "prepare replay"}),
    ],
)
def test_a_draft_graph_is_hooked_by_the_name_it_has_in_a_release(graphs, names):
    """As the wheels have them. From 0.5.15 on a multi-layer draft's graphs are replayed by its runner of all steps."""
    found = {}
    for patch in range(11, 16):
        targets = [row.target.split(".")[-2:] for row in SGLANG_ADAPTERS if (0, 5, patch) in row.versions]
        hooked = [name for owner, name in targets if owner == graphs]
        if hooked:
            found[patch] = " ".join(hooked)
    assert found == names


def test_a_draft_graph_inside_of_a_forward_is_that_round(server):
    it = server()
    graphs = draft_graphs(it)

    def forward(runner, batch):
        it.call("EAGLEDraftExtendCudaGraphRunner.execute", graphs, batch, None)

    it.call("ModelRunner.forward", graphs.model_runner, it.batch, original=forward)
    (replay,) = it.records(Kernel, GraphReplay)
    assert replay.graph == 0
    with pytest.raises(RuntimeError, match="theirs"):
        it.call("FrozenKVMTPCudaGraphRunner.execute", graphs, it.batch, original=fails)
    assert it.session.local.round is None


def fails(*args, **kwargs):
    raise RuntimeError("theirs")


def multi_layer(it, steps=2, **more):
    """The graphs of a multi-layer draft: a model runner and a pool per step."""
    return SimpleNamespace(runners=[draft_graphs(it) for _ in range(steps)], bs=4, **more)


def test_each_step_of_a_multi_layer_draft_is_a_round_of_its_own_pool(server):
    it = server()
    it.session.local.round_group = 17
    graphs, name = multi_layer(it), "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"
    it.call("ModelRunner.forward", it.runner, it.batch)
    it.call(f".{name}.prepare", graphs, it.batch, staged=False)
    with pytest.raises(RuntimeError, match="theirs"):
        it.call(f".{name}.replay", graphs, 0, original=fails)
    it.call(f".{name}.replay", graphs, 1)
    it.call(f".{name}.replay", graphs, 1)  # of no batch: it was used up
    target, first, second = it.records(Kernel, GraphReplay)
    assert {one.group for one in (target, first, second)} == {17}
    assert [[access.pool for access in one.accesses] for one in (target, first, second)] == [[0, 0], [1, 1], [2, 2]]
    assert [one.ids.tolist() for one in second.accesses] == [[1], [1, 2]]
    assert first.graph != second.graph


def test_a_multi_layer_draft_in_one_graph_writes_the_pools_of_all_steps_at_its_first(server):
    it = server()
    graphs = multi_layer(it, rotates_in_graph=True)
    graphs.runners.insert(1, None)
    it.call(".MultiLayerEagleMultiStepDraftExtendCudaGraphRunner.prepare", graphs, it.batch)
    for step in range(3):
        it.call(".OneGraphMultiLayerEagleMultiStepDraftExtendCudaGraphRunner.replay", graphs, step)
    replays = it.records(Kernel, GraphReplay)
    assert [one.accesses[0].pool for one in replays] == [0, 1]
    assert {one.graph for one in replays} == {0}


def test_what_no_hook_sees_of_a_model_is_said(server):
    it = server()
    it.call("ModelRunner.forward", it.runner, it.batch)
    assert it.session.missing == {}
    other = SimpleNamespace(**vars(it.runner))
    other.hisparse_coordinator = object()
    it.call("ModelRunner.forward", other, it.batch)
    assert it.session.missing[Hazard.WAW_FORWARD_RESTORE] == "HiSparse moves pages in kernels of its own"

    class PageInterleavePoolAllocator:
        pass

    it = server()
    it.runner.spec_algorithm = SimpleNamespace(name="DSPARK")
    it.runner.token_to_kv_pool_allocator = PageInterleavePoolAllocator()
    it.call("ModelRunner.forward", it.runner, it.batch)
    assert it.session.missing[Hazard.RAW_FORWARD_BACKUP] == "DSPARK drafts store KV outside of a forward round"
    assert it.session.missing[Hazard.LIFETIME].startswith("PageInterleavePoolAllocator hands out")
