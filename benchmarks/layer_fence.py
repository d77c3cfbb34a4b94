"""What a fence per layer could save, and what its events would cost: ``python benchmarks/layer_fence.py``.

Prints the rows of docs/fence-layer.md. Nothing it prints is wall-clock.
"""

from __future__ import annotations

import torch

from hicache_obs.analyzer import Analyzer
from hicache_obs.controller.engine import EngineConfig, build_engine
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.workloads import generate
from hicache_obs.recorder.recorded import RecordedDevice, Recorder
from hicache_obs.streams.cost import KERNEL_BYTES_PER_S, CostModel
from hicache_obs.streams.virtual import VirtualDevice
from hicache_obs.testing.exploration import ListSink
from hicache_obs.testing.recording import RecordingSink

LAYERS = 8
PAGE_SIZE = 16
VOCABULARY = 512


def measure(slower: int) -> str:
    """One row: rounds take ``slower`` times as long as the cost model says."""
    cost = CostModel(kernel_bytes_per_s=KERNEL_BYTES_PER_S // slower)
    requests = generate(
        200, seed=3, tokens_per_block=PAGE_SIZE, vocabulary=VOCABULARY, reuse=0.8, conversations=12, max_blocks=12,
        max_output=24,
    )  # fmt: skip
    device, trace = VirtualDevice("asap", cost=cost), ListSink()
    recorder = Recorder(trace, clock=device.host_ns, max_pending=1 << 20)
    recorder.define_pool("kv", LAYERS)
    limits = SchedulerOptions(max_running=8)
    config = EngineConfig("pattern", "page", 28, 1024, PAGE_SIZE, LAYERS, 2, 8, VOCABULARY, 0, limits)
    engine = build_engine(RecordedDevice(device, recorder), config, requests)
    engine.run(requests)
    recorder.resolve()
    sink = RecordingSink()
    analyzer = Analyzer(sink)
    analyzer.feed(trace.records)
    analyzer.finish()
    waited_ms = sum(fence.waited_ns for fence in sink.fences) / 1e6
    rounds = engine.scheduler.counters.rounds
    saved_ms = waited_ms * (1 - 1 / LAYERS)
    events_ms = rounds * LAYERS * cost.host_call_ns / 1e6
    loads = engine.controller.counters.load_backs
    return (
        f"| {slower} | {rounds} | {loads} | {len(sink.fences)} | {waited_ms:.1f} | {saved_ms:.1f} | {events_ms:.1f} |"
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    for factor in (1, 1000):
        print(measure(factor), flush=True)
