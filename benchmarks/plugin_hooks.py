"""What the SGLang plugin's hooks cost the launching thread: ``python benchmarks/plugin_hooks.py [FOLDER]``.

A decode round makes the calls of a scheduler's: fence, forward, the events of its reads and of its end, the wait for
them. A restore is a load-back of 80 layers, with a copy and an event each, and a round that waits for every layer. The
classes are stand-ins that do nothing, wrapped as SGLang's registry wraps: what is measured is the wrapper and the
hook. A FOLDER is another checkout, measured in turn with this one. CPU time of the thread, the least of many batches.

The stand-ins' index tensors are host memory. A server's are on its GPU, and are copied aside with calls to torch: the
last line is what those cost the thread for one round, on host tensors and streams that do nothing, so without whatever
the driver takes for its two events, its wait, the gather and the two copies.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

LAYERS = 80
BATCHES, TURNS = 15, 3


class Stream:
    def wait_stream(self, stream: object) -> None: ...
    def wait_event(self, event: object) -> None: ...


class Event:
    def record(self, stream: object = None) -> None: ...
    def wait(self, stream: object = None) -> None: ...


class ModelRunner:
    def forward(self, batch: Any) -> Any:
        return self.model(batch)


class HostKVCache:
    page_size, layer_num, size_per_token = 4, LAYERS, LAYERS * 24

    def load_to_device_per_layer_physical(self, *arguments: Any, **named: Any) -> None: ...


class HiCacheController:
    def start_loading(self) -> None:
        self.fence_and_submit()


class L2TransferEngine:
    def submit_host_to_device(self, *arguments: Any, **named: Any) -> None:
        self.submit(*arguments, **named)


class L2Transfer(NamedTuple):
    host_pool: Any
    device_pool: Any
    host_indices: Any
    device_indices: Any
    layer_mapper: Any = None
    is_draft: bool = False


class LayerLoadingEvent:
    def __init__(self, load_events: list[Event]) -> None:
        self.load_events = load_events

    def complete(self, layer: int) -> None:
        self.load_events[layer].record()


HOOKED = {cls.__name__: cls for cls in (Stream, Event, ModelRunner, HostKVCache, HiCacheController, L2TransferEngine)}


class Engine:
    """The calls of a scheduler, in its order."""

    def __init__(self) -> None:
        import torch

        torch.set_num_threads(1)
        self.schedule, self.forward, self.load = Stream(), Stream(), Stream()
        self.current = self.schedule
        self.pool = SimpleNamespace(page_size=4, layer_num=LAYERS)
        self.runner = ModelRunner()
        self.runner.token_to_kv_pool = self.pool
        table = torch.randperm(64 * 4096).reshape(64, 4096).int()
        self.runner.req_to_token_pool = SimpleNamespace(req_to_token=table)
        self.batch = SimpleNamespace(
            out_cache_loc=torch.tensor([5]), seq_lens_cpu=torch.tensor([8]), req_pool_indices=torch.tensor([1])
        )
        self.reads_done, self.done, self.started, self.begun, self.ended = (Event() for _ in range(5))
        self.events = [Event() for _ in range(LAYERS)]
        self.host = HostKVCache()
        self.transfers = L2TransferEngine()
        self.transfers.submit, self.transfers.host_to_device_stream = self.submit, self.load
        self.controller = controller = HiCacheController()
        controller.fence_and_submit, controller.load_queue = self.fence_and_submit, [1]
        controller.l2_transfer_engine, controller.load_fence_stream = self.transfers, self.forward
        controller.layer_done_counter = SimpleNamespace(events=[SimpleNamespace(load_events=self.events)])
        self.slots = torch.arange(4, 12), torch.arange(8, 16)
        self.loading = LayerLoadingEvent(self.events)
        self.controller.layer_done_counter.events[0] = self.loading

    def model(self, layers: int, batch: Any) -> None:
        for layer in range(layers):
            self.current.wait_event(self.events[layer])
        self.reads_done.record()

    def decode(self, layers: int = 0) -> None:
        self.forward.wait_stream(self.schedule)
        self.current = self.forward
        self.runner.model = functools.partial(self.model, layers)
        self.runner.forward(self.batch)
        self.done.record()
        self.current = self.schedule
        self.schedule.wait_event(self.reads_done)

    def restore(self) -> None:
        self.controller.start_loading()
        self.decode(LAYERS)

    def fence_and_submit(self) -> None:
        self.started.record()
        self.load.wait_stream(self.forward)
        transfers = [L2Transfer(self.host, self.pool, *(slots.clone() for slots in self.slots))]
        self.transfers.submit_host_to_device(
            transfers, start_event=self.started, on_layer_done=self.loading.complete, transfer_layer_id_max=LAYERS
        )

    def submit(
        self, transfers: list[L2Transfer], *, start_event: Any, on_layer_done: Any, transfer_layer_id_max: int
    ) -> None:
        start_event.wait(self.load)
        self.begun.record()
        self.current = self.load
        for layer in range(transfer_layer_id_max):
            for one in transfers:
                one.host_pool.load_to_device_per_layer_physical(
                    one.device_pool, one.host_indices, one.device_indices, layer, "direct", is_draft=one.is_draft
                )
            on_layer_done(layer)
        self.ended.record()
        self.current = self.schedule


def hook_all(engine: Engine) -> Any:
    """The plugin's session, with its hooks on the stand-ins."""
    from hicache_obs.sglang.guard import around
    from hicache_obs.sglang.page_ids import PageReader
    from hicache_obs.sglang.session import Session
    from hicache_obs.sglang.streams import stream_adapters
    from hicache_obs.sglang.table import SGLANG_ADAPTERS

    def no_device() -> Any:
        raise AssertionError("every tensor is host memory")

    reader = PageReader(no_device, lambda ids: no_device())
    hooks: list[Any] = []

    def on_open(session: Session) -> None:  # as the plugin's; a version without it has nothing to do
        try:
            from hicache_obs.sglang.shorten import shorten_one
        except ImportError:
            return
        for row, hook, cls, name in hooks:
            shorten_one(session, row, hook, cls, name)

    session = Session("SGLang 0.5.23", current_stream=lambda: engine.current, reader=reader, on_open=on_open)
    rows = [row for row in SGLANG_ADAPTERS if (0, 5, 23) in row.versions]
    for row in (*rows, *stream_adapters("stand.Stream", "stand.Event")):
        owner, name = row.target.split(".")[-2:]
        if owner in HOOKED and hasattr(HOOKED[owner], name):
            hook = around(session, row)
            hooks.append((row, hook, HOOKED[owner], name))
            _hook(HOOKED[owner], name, hook)
    return session


def _hook(cls: type, name: str, hook: Any) -> None:
    """As SGLang's registry does."""
    original = getattr(cls, name)

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(cls, name, wrapper)


def measure(observe: bool) -> dict[str, float]:
    """Nanoseconds and hooked calls per decode round and per restore, in this process."""
    engine = Engine()
    session = hook_all(engine) if observe else None
    found: dict[str, float] = {}
    engine.restore()
    if session is not None:
        from hicache_obs.readers.ring import RingReader

        reader = RingReader(session.ring.path)
    for name, call, count in (("decode round", engine.decode, 200), ("restore", engine.restore, 20)):
        calls = 0 if session is None else session.counters.calls
        call()
        found[f"calls per {name}"] = 0 if session is None else session.counters.calls - calls
        least = float("inf")
        for _ in range(BATCHES):
            started = time.thread_time_ns()
            for _ in range(count):
                call()
            least = min(least, (time.thread_time_ns() - started) / count)
            if session is not None:
                while reader.poll():  # as the agent does: the ring never fills
                    pass
        found[name] = least
    assert session is None or not (session.counters.errors or session.ring.dropped), "a hook failed or lost a record"
    return found


def staging() -> float:
    """Nanoseconds of the thread to copy the page lists of a decode round of 32 requests aside."""
    import numpy as np
    import torch

    from hicache_obs.sglang.page_ids import ConvertRows, LookUpRows, PageReader, Wanted, convert

    torch.set_num_threads(1)
    requests, page, length = 32, 64, 4000
    device = SimpleNamespace(
        Event=Event, Stream=lambda priority: Stream(), current_stream=Stream, stream=lambda _: torch.cpu.stream(None)
    )
    table = torch.arange(256 * 8192, dtype=torch.int32).reshape(256, 8192)
    rows, written = torch.arange(requests), torch.arange(requests) + page
    lengths = np.full(requests, length)
    reader = PageReader(lambda: device, lambda ids: torch.empty(ids, dtype=torch.int64))

    def stage() -> None:
        look_up = LookUpRows(table, length, page, None)
        reads = Wanted(rows, ConvertRows(page, lengths), look_up, requests * -(-length // page))
        assert reader._stage([Wanted(written, convert(page, skip_zero=True)), reads]) is not None

    least = float("inf")
    for _ in range(BATCHES):
        started = time.thread_time_ns()
        for _ in range(200):
            stage()
        least = min(least, (time.thread_time_ns() - started) / 200)
        for one in reader._staged:
            one.take()
    return least


def ask(folder: Path, observe: bool) -> dict[str, float]:
    """``measure`` in a process of its own, with the package of ``folder``."""
    rings = tempfile.mkdtemp(dir="/dev/shm" if os.path.isdir("/dev/shm") else None)
    os.chmod(rings, 0o700)
    try:
        variables = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "HICACHE_OBS_DIR": rings}
        variables |= {"HICACHE_OBS_RING_SLOTS": str(1 << 17), "HICACHE_OBS_ARENA_IDS": str(1 << 20)}
        command = [sys.executable, __file__, "--measure", "observe" if observe else "absent"]
        found: dict[str, float] = json.loads(subprocess.check_output(command, env=variables, text=True))
        return found
    finally:
        shutil.rmtree(rings)


def main(before: str) -> None:
    """Print what observing adds, turn by turn."""
    here = Path(__file__).resolve().parent.parent
    checkouts = {"this version": here} | ({"before": Path(before)} if before else {})
    for turn in range(TURNS):
        absent = ask(here, observe=False)
        for name, folder in checkouts.items():
            found = ask(folder, observe=True)
            added = "  ".join(
                f"{what} +{(found[what] - absent[what]) / 1e3:.1f} us in {found[f'calls per {what}']:.0f} hooked calls"
                for what in absent
                if not what.startswith("calls")
            )
            print(f"turn {turn + 1}  {name:12}  {added}  (load average {os.getloadavg()[0]:.1f})", flush=True)
    print(f"page lists of a decode round that are on a device: +{staging() / 1e3:.1f} us, without the driver's calls")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("before", nargs="?", default="", metavar="FOLDER", help="another checkout")
    parser.add_argument("--measure", choices=("observe", "absent"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure == "observe")), flush=True)
        os._exit(0)  # the flusher's thread would wait for its next turn
    main(arguments.before)
