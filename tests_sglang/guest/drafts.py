"""The steps of a multi-layer draft, each with a pool of its own."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from guest.engine import LAYERS, Absent, Engine, Runner, transfer_module


def drafts(engine: Engine) -> dict[str, Any]:
    """A multi-layer draft writes its steps' pools by graphs; the second's pages are loaded back while one runs."""
    from sglang.srt.speculative import multi_layer_eagle_draft_extend_cuda_graph_runner as module

    module.fill_draft_extend_prepare_buffers = module.refresh_track_indices = lambda *_, **__: None
    one_graph, pools = "onegraph" in engine.scenario, [engine._pool() for _ in range(2)]
    made = vars(module)["OneGraph" * one_graph + "MultiLayerEagleMultiStepDraftExtendCudaGraphRunner"]
    steps = made.__new__(made)
    vars(steps).update(
        buffers=MagicMock(), captured_req_width=1, require_mlp_tp_gather=False, require_gathered_buffer=False,
        capture_bs=[1], num_front_tokens=0, seq_len_fill_value=1, draft_extend_attn_backend_list=[],
        prune_draft_extend_logits=True, runners=[],
    )  # fmt: skip
    batch: Any = None

    def replay(runners: list[Any], *_: Any) -> Any:
        for runner in runners:
            keys = runner.model_runner.token_to_kv_pool.k_buffer[0]
            engine.device.launch(partial(keys.__setitem__, batch.out_cache_loc, batch.value))
        return [MagicMock() for _ in runners] if one_graph else MagicMock()

    for number, pool in enumerate(pools):
        runner = module.MultiLayerEagleDraftExtendCudaGraphRunner.__new__(
            module.MultiLayerEagleDraftExtendCudaGraphRunner
        )
        model_runner = Runner(engine)
        model_runner.token_to_kv_pool, model_runner.model = pool, Absent()
        vars(runner).update(
            step=number, model_runner=model_runner, deepep_adapter=MagicMock(), buffers=steps.buffers,
            captured_req_width=1, metadata_captured_in_graph=True, forward_mode=None,
        )  # fmt: skip
        steps.runners.append(runner)
    for runner in steps.runners:
        replayed = steps.runners if one_graph else [runner]
        runner.backend = SimpleNamespace(replay=partial(replay, replayed))

    def launch(launched: Any) -> None:
        nonlocal batch
        batch = launched
        steps.prepare(MagicMock(**{**vars(batch), "spec_info": MagicMock()}))
        for step in range(2):
            steps.replay(step)

    engine.after_forward = launch
    a = engine.alloc(1)
    engine.round(a, 11.0).synchronize()
    host_pool = engine._host_pool(pools[1])
    host = host_pool.alloc(len(a))
    submit = engine.controller.l2_transfer_engine
    transfer = transfer_module.L2Transfer(host_pool, pools[1], host, a, is_draft=True)
    submit.submit_device_to_host([transfer]).finish_event.synchronize()
    engine.round(a, 22.0)
    if "fenced" in engine.scenario:
        engine.schedule.wait_stream(engine.forward)
    submit.submit_host_to_device([transfer], transfer_layer_id_max=LAYERS).finish_event.synchronize()
    engine.device.synchronize()
    return {"content": pools[1].k_buffer[0][a].unique().tolist(), "expected": [11.0]}
