"""SGLang's plugin on real streams, without SGLang: its own hooks on stand-ins that call as SGLang does.

``check.py`` runs this on ``torch.cuda``; a test runs the same functions on the virtual device, so that what runs on a
GPU once in a while is not wrong for reasons that have nothing to do with GPUs.
"""

from __future__ import annotations

import functools
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.tally import Tally
from hicache_obs.findings import Finding
from hicache_obs.readers import open_trace
from hicache_obs.records import Memcpy, Times
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.gpu_trace import start_gpu_trace
from hicache_obs.sglang.guard import Around, around
from hicache_obs.sglang.install import _current_handle
from hicache_obs.sglang.page_ids import PageReader
from hicache_obs.sglang.session import FLUSH_S, Session
from hicache_obs.sglang.shorten import shorten_one
from hicache_obs.sglang.streams import stream_adapters
from hicache_obs.sglang.table import SGLANG_ADAPTERS
from hicache_obs.streams.cuda_poller import become_poller
from hicache_obs.trace import Trace

PAGE, LAYERS, SLOTS, WIDTH = 4, 4, 64, 256
_RELEASE = (0, 5, 23)


@dataclass(frozen=True)
class Machine:
    """Where it runs.

    Attributes:
        module: A torch device module: ``Stream``, ``Event``, ``current_stream``, ``stream``, ``synchronize``.
        classes: Dotted names of its stream and event classes, and the classes.
        tensors: Where tensors live.
        launch: Runs a function that launches work on the current stream.
        delay: Launches work that takes far longer than launching anything does.
        timing: Gives the device for event pairs.
    """

    module: Any
    classes: tuple[tuple[str, type], tuple[str, type]]
    tensors: str
    launch: Callable[[Callable[[], Any]], None]
    delay: Callable[[], None]
    timing: Callable[[], Any] | None = None


class HostKVCache:
    """A pinned host pool, page by page: ``(LAYERS, SLOTS, WIDTH) float32``."""

    page_size, layer_num, size_per_token = PAGE, LAYERS, LAYERS * WIDTH * 4

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.pages = torch.full((LAYERS, SLOTS, WIDTH), 11.0, pin_memory=machine.tensors != "cpu")

    def load_to_device_per_layer_physical(
        self, device_pool: Any, host_indices: Any, device_indices: Any, layer_id: int, io_backend: str
    ) -> None:
        """The first slots of both, as many as there are: the indices are device memory and may not be read here."""
        count = host_indices.numel()
        source, target = self.pages[layer_id, :count], device_pool.pages[layer_id, PAGE : PAGE + count]
        self.machine.launch(lambda: target.copy_(source, non_blocking=True))


class Engine:
    """Pools and the calls of a scheduler: one page, held by a round that still runs when it is loaded back."""

    def __init__(self, machine: Machine) -> None:
        module = machine.module
        self.machine = machine
        self.pool = SimpleNamespace(
            page_size=PAGE, layer_num=LAYERS, pages=torch.zeros((LAYERS, SLOTS, WIDTH), device=machine.tensors)
        )
        self.host = HostKVCache(machine)
        self.schedule, self.forward_stream, self.load_stream = module.current_stream(), module.Stream(), module.Stream()
        self.slots = torch.arange(PAGE, 2 * PAGE, device=machine.tensors)
        self.host_slots = torch.arange(0, PAGE)
        table = torch.zeros((2, SLOTS), dtype=torch.int32, device=machine.tensors)
        table[1, :PAGE] = self.slots
        self.runner = ModelRunner(self.pool, table, machine)
        self.layer_events = [module.Event() for _ in range(LAYERS)]
        self.rows = torch.tensor([1], device=machine.tensors)
        module.synchronize()

    def round(self, value: float, *, late: bool = False) -> None:
        """One decode round that writes ``value``; ``late``: long after it is launched."""
        batch = SimpleNamespace(
            out_cache_loc=self.slots,
            req_pool_indices=self.rows,
            seq_lens_cpu=torch.tensor([PAGE]),
            value=value,
            late=late,
        )
        with self.machine.module.stream(self.forward_stream):
            self.forward_stream.wait_stream(self.schedule)
            self.runner.forward(batch)
            self.machine.module.Event().record()

    def load_back(self, *, fenced: bool) -> None:
        """As ``HiCacheController.start_loading`` does it."""
        started = self.machine.module.Event()
        started.record()
        if fenced:
            self.load_stream.wait_stream(self.forward_stream)
        with self.machine.module.stream(self.load_stream):
            started.wait(self.load_stream)
            for layer in range(LAYERS):
                self.host.load_to_device_per_layer_physical(self.pool, self.host_slots, self.slots, layer, "direct")
                self.layer_events[layer].record()


class ModelRunner:
    """A forward writes a number to its slots, layer by layer."""

    def __init__(self, pool: Any, table: Any, machine: Machine) -> None:
        self.token_to_kv_pool = pool
        self.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.machine = machine

    def forward(self, batch: Any) -> None:
        """What is launched on the current stream."""
        if batch.late:
            self.machine.delay()
        for layer in range(LAYERS):
            page = self.token_to_kv_pool.pages[layer, PAGE : 2 * PAGE]
            self.machine.launch(lambda page=page: page.fill_(batch.value))


@contextmanager
def observed(machine: Machine) -> Iterator[Session]:
    """The hooks, while the block runs."""
    folder = tempfile.mkdtemp()
    os.chmod(folder, 0o700)
    before = os.environ.get("HICACHE_OBS_DIR")
    os.environ["HICACHE_OBS_DIR"] = folder
    hooks: list[tuple[Adapter, Around, type, str]] = []
    session = Session(
        "stand-in 1",
        current_stream=machine.module.current_stream,
        current_handle=None if machine.tensors == "cpu" else _current_handle(),
        reader=PageReader(lambda: machine.module, lambda ids: torch.empty(ids, dtype=torch.int64, pin_memory=True)),
        timing=machine.timing,
        become_poller=None if machine.tensors == "cpu" else become_poller,
        on_open=lambda session: _shorten(session, hooks),
    )
    (stream, stream_class), (event, event_class) = machine.classes
    owners: dict[str, type] = {stream: stream_class, event: event_class}
    rows = [row for row in stream_adapters(stream, event) if hasattr(owners[row.target.rsplit(".", 1)[0]], _name(row))]
    own: dict[str, type] = {"ModelRunner": ModelRunner, "HostKVCache": HostKVCache}
    for row in SGLANG_ADAPTERS:
        owner = row.target.rsplit(".", 2)[-2]
        if _RELEASE in row.versions and owner in own and hasattr(own[owner], _name(row)):
            owners[row.target.rsplit(".", 1)[0]] = own[owner]
            rows.append(row)
    undo = []
    try:
        for row in rows:
            place, hook = owners[row.target.rsplit(".", 1)[0]], around(session, row)
            original = place.__dict__[_name(row)]
            undo.append((place, _name(row), original))
            setattr(place, _name(row), _wrap(original, hook))
            hooks.append((row, hook, place, _name(row)))
        yield session
    finally:
        for place, name, original in reversed(undo):
            setattr(place, name, original)
        time.sleep(0.3 if machine.tensors != "cpu" else 0)  # the flusher takes late page ids ten times a second
        session.close()
        if before is None:
            del os.environ["HICACHE_OBS_DIR"]
        else:
            os.environ["HICACHE_OBS_DIR"] = before


def _shorten(session: Session, hooks: list[tuple[Adapter, Around, type, str]]) -> None:
    """As the plugin does when its ring exists."""
    for hook in hooks:
        shorten_one(session, *hook)


def _name(row: Any) -> str:
    return str(row.target.rsplit(".", 1)[1])


def _wrap(original: Any, hook: Any) -> Any:
    """What SGLang's registry does."""
    return functools.wraps(original)(lambda *args, **kwargs: hook(original, *args, **kwargs))


class _Findings(Tally):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[Finding] = []

    def on_finding(self, finding: Finding) -> None:
        super().on_finding(finding)
        self.found.append(finding)


def judge(session: Session) -> tuple[Trace, set[str]]:
    """The session's records, and the hazards in them."""
    assert session.ring is not None
    assert session.counters.errors == {}, session.counters.errors
    trace = open_trace(Path(session.ring.path))
    tally = _Findings()
    analyzer = Analyzer(tally)
    analyzer.feed(trace)
    analyzer.finish()
    return trace, {finding.hazard.value for finding in tally.found}


def load_backs(machine: Machine) -> dict[str, Any]:
    """Unfenced: reported, and the page is wrong. Fenced: neither. Nothing waits for the device meanwhile."""
    told: dict[str, Any] = {}
    for fenced in (False, True):
        with observed(machine) as session:
            engine = Engine(machine)
            engine.round(1.0)
            machine.module.synchronize()
            with no_sync(machine):
                engine.round(22.0, late=True)
                engine.load_back(fenced=fenced)
            machine.module.synchronize()
        trace, hazards = judge(session)
        copies = [record for record in trace if isinstance(record, Memcpy)]
        value = float(engine.pool.pages[0, PAGE, 0])
        assert len(copies) == LAYERS, copies
        assert all(access.ids.tolist() in ([0], [1]) for copy in copies for access in copy.accesses)
        assert hazards == (set() if fenced else {"waw_forward_restore"}), (fenced, hazards)
        assert value == (11.0 if fenced else 22.0), (fenced, value)
        told["fenced" if fenced else "unfenced"] = {"hazards": sorted(hazards), "page": value}
    return told


@contextmanager
def no_sync(machine: Machine) -> Iterator[None]:
    """torch raises if anything inside waits for the device."""
    if machine.tensors == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def cost(machine: Machine, rounds: int = 200) -> dict[str, Any]:
    """CPU time of the calling thread per decode round, without the hooks and with them, in microseconds."""

    def per_round(engine: Engine) -> float:
        for _ in range(20):
            engine.round(1.0)
        machine.module.synchronize()
        started = time.thread_time_ns()
        for _ in range(rounds):
            engine.round(1.0)
        spent = time.thread_time_ns() - started
        machine.module.synchronize()
        return spent / rounds / 1e3

    plain = per_round(Engine(machine))
    with observed(machine) as session:
        hooked = per_round(Engine(machine))
    assert session.counters.errors == {}, session.counters.errors
    calls = session.counters.calls
    return {"absent_us": plain, "observing_us": hooked, "added_us": hooked - plain, "hooked_calls": calls}


def captures() -> dict[str, Any]:
    """A graph is captured in torch's default mode while the recorder asks for events; neither minds. Needs CUDA."""
    machine, ticks = cuda_machine(), 3
    numbers = torch.zeros(4, device=machine.tensors)
    numbers.add_(1)
    graph = torch.cuda.CUDAGraph()
    with observed(machine) as session:
        engine = Engine(machine)
        engine.round(1.0)
        with torch.cuda.graph(graph):  # waits for the round, whose events nobody has asked for yet
            numbers.add_(1)
            time.sleep(ticks * FLUSH_S)
        graph.replay()
        machine.module.synchronize()
        assert not session.off
    trace, _ = judge(session)
    assert float(numbers[0]) == 2
    assert any(isinstance(record, Times) for record in trace), "nobody asked for the round's events"
    return {"ticks": ticks}


def copy_streams() -> dict[str, Any]:
    """CUPTI's word on where a load-back's copies run: on the stream that the record names. Needs torch.cuda."""
    from torch.profiler import ProfilerActivity, profile

    machine = cuda_machine()
    with observed(machine) as session:
        engine = Engine(machine)
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
            with machine.module.stream(engine.load_stream):
                torch.cuda._sleep(1000)  # a kernel that marks the stream
            engine.load_back(fenced=True)
            machine.module.synchronize()
    trace, _ = judge(session)
    recorded = {record.stream for record in trace if isinstance(record, Memcpy)}
    assert recorded == {engine.load_stream.cuda_stream}, recorded
    marks = {event.device_resource_id() for event in _device_events(profiled) if "spin" in event.name().lower()}
    copies = [event for event in _device_events(profiled) if "memcpy htod" in event.name().lower()]
    assert len(copies) == LAYERS, [event.name() for event in _device_events(profiled)]
    assert {event.device_resource_id() for event in copies} == marks, (copies, marks)
    return {"copies": len(copies), "cupti_streams": sorted(marks)}


def _device_events(profiled: Any) -> list[Any]:
    found = profiled.profiler.kineto_results.events()
    return [event for event in found if event.device_type() != torch.autograd.DeviceType.CPU]


def callbacks() -> dict[str, Any]:
    """torch's GPU-trace callbacks see what its C++ event class does, and a hooked call once. Needs torch.cuda.

    torch cannot be told to stop calling back: this comes last.
    """
    import torch.cuda._gpu_trace

    from hicache_obs.records import EventRecord, EventWait

    machine = cuda_machine()
    with observed(machine) as session:
        start_gpu_trace(session, torch.cuda._gpu_trace, torch._C._activate_gpu_trace)
        assert session.recording  # only now: as the plugin, which then leaves the hooks that tell an event's handle
        one, two = machine.module.Stream(), machine.module.Stream()
        inner = torch.Event("cuda")
        inner.record(one)
        inner.wait(two)
        hooked = machine.module.Event()
        hooked.record(one)
        machine.module.synchronize()
    trace, _ = judge(session)
    records = [record for record in trace if isinstance(record, EventRecord) and record.stream == one.cuda_stream]
    waits = [record for record in trace if isinstance(record, EventWait) and record.stream == two.cuda_stream]
    assert len(records) == 2, records
    assert [record.event for record in waits] == [records[0].event]
    return {"records": len(records), "waits": len(waits)}


def cuda_machine() -> Machine:
    """``torch.cuda`` itself."""
    from hicache_obs.streams.cuda import CudaDevice

    timing: list[CudaDevice] = []

    def device() -> CudaDevice:
        if not timing:
            timing.append(CudaDevice())
        return timing[0]

    return Machine(
        torch.cuda,
        (("torch.cuda.Stream", torch.cuda.Stream), ("torch.cuda.Event", torch.cuda.Event)),
        "cuda",
        lambda fn: fn(),
        lambda: torch.cuda._sleep(200_000_000),
        device,
    )
