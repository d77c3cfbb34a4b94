"""Engines under observation: on any device, recorded in memory, analysed at the end; and tiers without a scheduler."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch

from hicache_obs.analyzer import Analyzer
from hicache_obs.controller.allocator import PageAllocator
from hicache_obs.controller.cache_controller import CacheController
from hicache_obs.controller.engine import Engine, EngineConfig, build_engine
from hicache_obs.controller.fence_policy import InFlight, fence_policy
from hicache_obs.controller.gate import WriterGate
from hicache_obs.controller.host_threads import NoRecorder
from hicache_obs.controller.index_blocks import IndexBlock
from hicache_obs.controller.pools import DevicePool, HostPool, KVLayout
from hicache_obs.controller.radix_cache import Node, RadixCache
from hicache_obs.controller.scheduler_options import SchedulerOptions
from hicache_obs.controller.storage_backend import StorageBackend
from hicache_obs.controller.storage_config import StorageConfig
from hicache_obs.controller.transfer_engine import PageMove, TransferEngine
from hicache_obs.controller.watching import name_pools, watch_blocks
from hicache_obs.controller.workloads import Request, generate
from hicache_obs.findings import Finding, Hazard
from hicache_obs.recorder.recorded import RecordedDevice, Recorder
from hicache_obs.records import (
    AnyRecord,
    CaptureMode,
    Define,
    DefineSpace,
    DropReason,
    EventRecord,
    EventSync,
    EventWait,
    Kernel,
    Memcpy,
    Mode,
    PageIds,
    Record,
    WaitStream,
    Work,
    page_ids,
)
from hicache_obs.records import device as device_access
from hicache_obs.streams import open_device
from hicache_obs.streams.protocol import Device, Event, Stream
from hicache_obs.testing import RecordingSink, races
from hicache_obs.testing.world import SeededThreads

VOCABULARY = 512
PAGE_SIZE = 4
LAYERS = 3
MAX_STEPS = 5000
"""Far more than any workload here takes."""


class Trace:
    """A ``RecordSink`` that is a list: unbounded, never drops."""

    writable = True
    mode = CaptureMode.OBSERVE

    def __init__(self) -> None:
        self.records: list[AnyRecord] = []

    def append(self, record: AnyRecord) -> bool:
        self.records.append(record)
        return True

    def drop(self, reason: DropReason, count: int = 1) -> None:
        raise AssertionError(f"the recorder lost {count} records: {reason.name}")

    def beat(self, host_ns: int) -> None:
        pass


class Observed:
    """A device whose calls are recorded in memory.

    Attributes:
        bare: The device itself.
        device: What an engine gets; the bare device if it is not to be recorded.
        recorder: Its recorder, if it is recorded.
        sink: What the analyzer reported, once ``analyse`` was called.
    """

    def __init__(self, bare: Device, *, record: bool = True) -> None:
        self.bare = bare
        self.device: Any = bare
        self.sink = RecordingSink()
        self._trace = Trace()
        self.recorder: Recorder | None = None
        if record:
            self.recorder = Recorder(self._trace, clock=bare.host_ns)
            self.recorder.define_engine("test engine")
            self.device = RecordedDevice(bare, self.recorder)

    @property
    def records(self) -> list[AnyRecord]:
        """Everything so far, in issue order."""
        return self._trace.records

    def watch(self, engine: Engine) -> None:
        """Record what the device does not see."""
        if self.recorder is not None:
            name_pools(engine.controller.engine, self.recorder)
            watch_blocks(engine.controller.engine, self.recorder)

    def resolve(self) -> None:
        """Append the device times that are known by now: a recorder remembers only so many open probes."""
        if self.recorder is not None:
            self.recorder.resolve()

    def analyse(self) -> RecordingSink:
        """Findings of the whole trace. The device must be idle."""
        self.resolve()
        analyzer = Analyzer(self.sink)
        analyzer.feed(self.records)
        analyzer.finish()
        return self.sink

    def calls(self, since: int = 0) -> list[str]:
        """Stream work from record ``since`` on, one short line per call, by stream and site names."""
        names = {
            (record.space, record.id): record.text
            for record in self.records
            if isinstance(record, Define) and record.space in (DefineSpace.STREAM, DefineSpace.SITE)
        }

        def stream(handle: int) -> str:
            return names[DefineSpace.STREAM, handle]

        lines: list[str] = []
        for record in self.records[since:]:
            match record:
                case Kernel() | Memcpy():
                    low, high = record.layers
                    site = names[DefineSpace.SITE, record.site]
                    layers = "" if high > LAYERS else f" {low}" if high == low + 1 else f" {low}-{high - 1}"
                    lines.append(f"{stream(record.stream)}: {site}{layers}")
                case EventRecord():
                    lines.append(f"{stream(record.stream)}: record")
                case EventWait():
                    lines.append(f"{stream(record.stream)}: wait event ({record.purpose.name.lower()})")
                case WaitStream():
                    on = stream(record.on)
                    lines.append(f"{stream(record.waiter)}: wait for {on} ({record.purpose.name.lower()})")
                case EventSync():
                    lines.append("host: synchronize")
                case _:
                    pass
        return lines


class Run:
    """An engine run that is over, the device idle.

    Attributes:
        engine: It.
        findings: What the analyzer reported; empty if nothing was recorded.
        sink: All that it reported.
        records: The trace.
        corrupted: Restored pages that a round read with wrong contents: ``(step, device page)``.
    """

    def __init__(self, engine: Engine, observed: Observed) -> None:
        self.engine = engine
        self.sink = observed.analyse()
        self.records: list[AnyRecord] = observed.records
        self.findings: list[Finding] = self.sink.findings
        restored = engine.scheduler.restored
        self.corrupted = sorted((restored[t].step, restored[t].device_page) for t in engine.ledger.corrupted().tolist())

    @property
    def outputs(self) -> dict[int, list[int]]:
        """Tokens by request."""
        return self.engine.scheduler.outputs

    @property
    def hazards(self) -> Counter[Hazard]:
        """Findings by hazard."""
        return Counter(finding.hazard for finding in self.findings)

    @property
    def races(self) -> set[tuple[int, int]]:
        """Operation pairs with a finding."""
        return {(finding.earlier.op, finding.later.op) for finding in self.findings}

    def of(self, hazard: Hazard) -> list[Finding]:
        """Findings of one hazard."""
        return [finding for finding in self.findings if finding.hazard is hazard]

    def of_kind(self, *kinds: type[Record]) -> list[Record]:
        """Records of these kinds."""
        return [record for record in self.records if isinstance(record, kinds)]


@dataclass(frozen=True)
class Setup:
    """What ``Lab.run`` runs.

    Attributes:
        backend: ``threads``, ``virtual-<schedule>`` or ``cuda``.
        policies: More of ``SchedulerOptions``.
        storage: A third tier: a ``StorageConfig``; on the virtual device its threads take turns as ``seed`` says.
        changes: Chance that a host thread may lose its turn at a call, on the virtual device.
        store: Its back end, instead of the one the URL names.
        prepare: Called with the engine before it starts: where a test takes a protection out.
        after_step: Called with the engine after every scheduler step.
        gated: With the demo's writer gate, of ``gate_timeout_s``.
        record: Off: the bare device, nothing analysed.
    """

    fence: str = "stream"
    runner: str = "pattern"
    backend: str = "virtual-adversarial"
    seed: int = 0
    device_pages: int = 20
    host_pages: int = 64
    max_running: int = 6
    max_extend_tokens: int = 64
    host_tier: bool = True
    early_backup: bool = False
    poll_acks: bool = False
    policies: Mapping[str, Any] = field(default_factory=dict)
    write_fence: str | None = None
    storage: StorageConfig | None = None
    changes: float = 0.5
    store: StorageBackend | None = None
    prepare: Callable[[Engine], None] | None = None
    after_step: Callable[[Engine], None] | None = None
    gated: bool = False
    gate_timeout_s: float = 30.0
    record: bool = True
    kv: str = "mha"
    host_layout: str = "layer-first"
    io: str | None = None
    graphs: bool = False
    compact_every: int = 0
    window: int = 0
    window_pages: int = 0


class Lab:
    """Makes devices and runs engines on them; closes them at the end of the test."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack

    def close(self) -> None:
        """Close what was made so far, for a test that makes thousands of engines; more can be made."""
        self._stack.close()

    @staticmethod
    def requests(n: int = 24, *, seed: int = 0, **options: Any) -> list[Request]:
        """A workload that makes many load-backs and some retractions in the default ``Setup``."""
        shape: dict[str, Any] = {"reuse": 0.8, "conversations": 6, "max_blocks": 8, "max_output": 8, **options}
        return generate(n, seed=seed, tokens_per_block=PAGE_SIZE, vocabulary=VOCABULARY, **shape)

    def observed(self, backend: str, *, seed: int = 0, record: bool = True) -> Observed:
        """A device by backend name, recorded."""
        name, _, schedule = backend.partition("-")
        bare = open_device(name, schedule=schedule or "adversarial", seed=seed)
        self._stack.callback(bare.close)
        return Observed(bare, record=record)

    @staticmethod
    def setup(**fields: Any) -> Setup:
        """What ``build`` takes."""
        return Setup(**fields)

    def build(self, setup: Setup, requests: Sequence[Request]) -> tuple[Engine, Observed]:
        """An engine that has not begun."""
        observed = self.observed(setup.backend, seed=setup.seed, record=setup.record)
        config = EngineConfig(
            runner=setup.runner,
            fence=setup.fence,
            device_pages=setup.device_pages,
            host_pages=setup.host_pages,
            page_size=PAGE_SIZE,
            layers=LAYERS,
            heads=2,
            head_dim=4,
            vocabulary=VOCABULARY,
            seed=0,
            kv=setup.kv,
            host_layout=setup.host_layout,
            io=setup.io,
            graphs=setup.graphs,
            compact_every=setup.compact_every,
            window=setup.window,
            window_pages=setup.window_pages,
            scheduler=SchedulerOptions(
                max_running=setup.max_running,
                max_extend_tokens=setup.max_extend_tokens,
                host_tier=setup.host_tier,
                early_backup=setup.early_backup,
                poll_acks=setup.poll_acks,
                **setup.policies,
            ),
            write_fence=setup.write_fence,
            storage=setup.storage,
        )
        threads = None
        if setup.storage is not None and setup.backend.startswith("virtual"):
            threads = SeededThreads(observed.recorder or NoRecorder(), setup.seed, changes=setup.changes)
            self._stack.callback(threads.close)
        engine = build_engine(observed.device, config, requests, threads=threads, backend=setup.store)
        self._stack.callback(engine.close)
        observed.watch(engine)
        if setup.gated:
            gate = WriterGate(engine.scheduler, timeout_s=setup.gate_timeout_s)
            engine.controller.on_transfer = gate.on_transfer
        if setup.prepare is not None:
            setup.prepare(engine)
        return engine, observed

    def run(self, requests: Sequence[Request], **setup: Any) -> Run:
        """Run ``requests`` to their end; keyword arguments as in ``Setup``. AssertionError if that never comes."""
        chosen = Setup(**setup)
        engine, observed = self.build(chosen, requests)
        steps = itertools.count()

        def after_step() -> None:
            assert next(steps) < MAX_STEPS, "the scheduler makes no progress"
            observed.resolve()
            if chosen.after_step is not None:
                chosen.after_step(engine)

        engine.run(requests, after_step=after_step)
        engine.close()
        result = Run(engine, observed)
        observed.bare.close()
        return result

    def reference(self, requests: Sequence[Request], **setup: Any) -> dict[int, list[int]]:
        """Tokens of the run without host tier, with room for everything."""
        options = {"backend": "virtual-eager", "device_pages": 400, "host_tier": False, "record": False, **setup}
        return self.run(requests, **options).outputs

    def tiers(self, fence: str = "stream", backend: str = "virtual-adversarial", *, pages: int = 16) -> Tiers:
        """Pools, tree and controller, without a scheduler."""
        return Tiers(self.observed(backend), fence, pages)


class Tiers:
    """Pools, tree, allocators and controller on a recorded device. The test does the scheduler's part.

    Attributes:
        forward_stream: The stream of ``forward``.
    """

    def __init__(self, observed: Observed, fence: str, pages: int) -> None:
        self.observed = observed
        self.device: Device = observed.device
        layout = KVLayout(LAYERS, pages, PAGE_SIZE, 1, 2)
        self.pool = DevicePool(layout, self.device.torch_device)
        self.host = HostPool(layout, pinned=self.device.name == "cuda")
        self.device_pages = PageAllocator(pages, name="device")
        self.host_pages = PageAllocator(pages, name="host")
        self.in_flight = InFlight()
        self.radix = RadixCache(PAGE_SIZE)
        self.engine = TransferEngine(self.device, self.pool, self.host)
        policy = fence_policy(fence, self.device_pages, self.in_flight)
        self.controller = CacheController(self.device, self.engine, self.radix, policy)
        self.forward_stream = self.device.Stream("forward")
        self.controller.load_fence_stream = self.controller.write_fence_stream = self.forward_stream
        self._rounds = 0
        self._moves = itertools.count(1)

    def cached(self, pages: int, *, first_token: int = 0) -> Node:
        """A node on the device whose pages a launched round fills with ``value`` of their place in the prompt."""
        ids = self.device_pages.alloc(pages)
        self.forward(write=ids, value=float(first_token))
        tokens = np.arange(first_token, first_token + pages * PAGE_SIZE, dtype=np.int64)
        return self.radix.insert(tokens, ids, ids.copy(), ids.copy()).last_node

    def host_only(self, pages: int, *, first_token: int = 0) -> Node:
        """As ``cached``, backed up, acknowledged and evicted from the device; nothing is in flight afterwards."""
        node = self.cached(pages, first_token=first_token)
        self.settle()
        self.controller.write(node, self.host_pages.alloc(pages))
        self.controller.start_writing(0)
        self.controller.acknowledge(0)
        self.device_pages.free(self.radix.evict_device(pages).pages)
        assert node.device_pages is None
        return node

    def settle(self) -> None:
        """The host waits for the device, and knows that all rounds are complete."""
        self.device.synchronize()
        self.in_flight.completed(self.forward_stream, self._rounds)

    def load(self, node: Node) -> PageIds:
        """Queue the load-back of a host-only node into fresh pages."""
        assert node.host_pages is not None
        ids = self.device_pages.alloc(len(node.host_pages))
        self.controller.load(node, ids, ids.copy())
        return ids

    def forward(
        self,
        *,
        write: PageIds | Sequence[int] = (),
        read: PageIds | Sequence[int] = (),
        value: float = 0.0,
        into: list[Any] | None = None,
        stamp: bool = True,
        stream: Stream | None = None,
        layer_wait: Callable[[int], None] | None = None,
    ) -> Event:
        """Launch a round, one segment per layer: write ``value`` (plus the layer) and append what it reads.

        Returns its end. ``stamp`` tells the page fence of it, as the scheduler does.
        """
        stream = stream or self.forward_stream
        writes, reads = page_ids(write), page_ids(read)
        self._rounds += 1
        number = self._rounds
        accesses = (device_access(Mode.READ, reads), device_access(Mode.WRITE, writes))
        with self.device.stream(stream):
            for layer in range(LAYERS):
                if layer_wait is not None:
                    layer_wait(layer)
                fn = self._segment(layer, writes, reads, value, into)
                self.device.launch(fn, Work("forward", accesses, (layer, layer + 1), number))
            done = stream.record_event()
        self.in_flight.launched(stream, number, done)
        if stamp:
            self.device_pages.stamp(reads, stream.stream_id, number, mode=Mode.READ)
            self.device_pages.stamp(writes, stream.stream_id, number)
        return done

    def _segment(
        self, layer: int, writes: PageIds, reads: PageIds, value: float, into: list[Any] | None
    ) -> Callable[[], None]:
        def run() -> None:
            if into is not None:
                into.append(self.pool.k[layer, torch.from_numpy(reads)].cpu().clone())
            self.pool.k[layer, torch.from_numpy(writes)] = value + layer
            self.pool.v[layer, torch.from_numpy(writes)] = -(value + layer)

        return run

    def move(self, device_pages: Sequence[int], host_pages: Sequence[int]) -> PageMove:
        """A transfer's pages, its index tensors ready at once."""
        ids = page_ids(device_pages), page_ids(host_pages)
        index = torch.from_numpy(ids[0]).to(self.device.torch_device, copy=True)
        transfer = next(self._moves)
        return PageMove(*ids, index, torch.from_numpy(ids[1]), transfer, IndexBlock(transfer, index))

    def contents(self, pages: PageIds | Sequence[int]) -> list[list[float]]:
        """Of device pages: per layer the one value each page holds, NaN if it is not one. Device idle."""
        return [
            [_only(page) for page in self.pool.k[layer, torch.from_numpy(page_ids(pages))]] for layer in range(LAYERS)
        ]


def _only(page: torch.Tensor) -> float:
    values = page.unique().tolist()
    return float(values[0]) if len(values) == 1 else float("nan")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Rounds are too small to share between threads, and on a busy machine the threads wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Engines and devices, closed when the test ends."""
    with ExitStack() as stack:
        yield Lab(stack)


@pytest.fixture
def judge() -> Callable[[list[AnyRecord]], set[tuple[int, int]]]:
    """Races of a trace, found without the analyzer."""
    return lambda records: races(records, polled=False)
