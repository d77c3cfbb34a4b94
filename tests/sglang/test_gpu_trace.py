"""torch's callbacks on events and streams, from a stand-in of its registry: recorded once, whoever saw the call."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from hicache_obs.readers.ring import read_ring
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.records import EventRecord, EventSync, EventWait, HostSync
from hicache_obs.sglang import gpu_trace
from hicache_obs.sglang.gpu_trace import TARGET, start_gpu_trace
from hicache_obs.sglang.guard import around
from hicache_obs.sglang.session import MAX_FAILURES, Session
from hicache_obs.sglang.streams import stream_adapters


class Registry:
    """What torch.cuda._gpu_trace has, and what torch does: ``fire`` calls back."""

    def __init__(self):
        self.known = {}
        self.active = False

    def __getattr__(self, name):
        prefix = "register_callback_for_"
        if not name.startswith(prefix) or name.endswith("stream_synchronization"):  # a torch that lacks one
            raise AttributeError(name)
        return lambda callback: self.known.setdefault(name.removeprefix(prefix), callback)

    def fire(self, name, *handles):
        assert self.active
        self.known[name](*handles)

    def activate(self):
        self.active = True


class Event:
    def __init__(self, handle):
        self.cuda_event = handle


@pytest.fixture
def traced(tmp_path, monkeypatch):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("HICACHE_OBS_RING_SLOTS", "256")
    monkeypatch.setenv("HICACHE_OBS_ARENA_IDS", "1024")
    stream = SimpleNamespace(cuda_stream=5)
    session, registry = Session("engine 1", current_stream=lambda: stream), Registry()
    start_gpu_trace(session, registry, registry.activate)
    yield session, registry, stream
    session.close()


def records(session, *kinds):
    return [one for one in read_ring(session.ring.path) if isinstance(one, kinds)]


def test_what_only_cpp_does_is_recorded_by_handle(traced):
    session, registry, _ = traced
    registry.fire("event_record", 111, 7)
    registry.fire("event_wait", 111, 8)
    registry.fire("event_synchronization", 111)
    registry.fire("device_synchronization")
    recorded, waited, synced, device = records(session, EventRecord, EventWait, EventSync, HostSync)
    assert (recorded.stream, waited.stream, device.stream) == (7, 8, None)
    assert recorded.event == waited.event == synced.event
    assert "stream_synchronization" not in registry.known
    session.gpu_trace.callbacks()["stream_synchronization"](7)
    assert records(session, HostSync)[-1].stream == 7
    assert session.counters.errors == {}


def test_a_call_that_a_hook_sees_is_recorded_once_and_its_event_is_the_same(traced):
    session, registry, _ = traced
    row = next(row for row in stream_adapters("e.Stream", "e.Event") if row.target == "e.Event.record")
    event = Event(222)

    def torch_records(event):
        registry.fire("event_creation", 222)  # lazily, inside the first record
        registry.fire("event_record", 222, 5)

    around(session, row)(torch_records, event)
    registry.fire("event_wait", 222, 8)
    recorded, waited = records(session, EventRecord, EventWait)
    assert (recorded.stream, waited.stream) == (5, 8)
    assert recorded.event == waited.event == session.event(event).event_id


def test_a_handle_that_is_used_again_is_another_event(traced):
    session, registry, _ = traced
    registry.fire("event_record", 111, 7)
    registry.fire("event_deletion", 111)
    registry.fire("event_record", 111, 7)
    first, second = records(session, EventRecord)
    assert first.event != second.event


def test_what_is_captured_into_a_graph_is_not_recorded(traced, monkeypatch):
    session, registry, _ = traced
    monkeypatch.setattr(gpu_trace, "capturing", lambda: True)
    registry.fire("event_record", 111, 7)
    registry.fire("event_wait", 111, 8)
    monkeypatch.setattr(gpu_trace, "capturing", lambda: False)
    registry.fire("event_record", 111, 7)
    assert len(records(session, EventRecord, EventWait)) == 1


def test_the_table_of_handles_is_bounded(traced, monkeypatch):
    monkeypatch.setattr(gpu_trace, "MAX_HANDLES", 4)
    session, registry, _ = traced
    for handle in range(9):
        registry.fire("event_record", handle, 7)
    assert len(session.gpu_trace._states) <= 4


def test_a_failing_callback_raises_nothing_and_goes_off(traced, monkeypatch):
    session, registry, _ = traced
    assert session.recording
    monkeypatch.setattr(ServerRecorder, "put", lambda *args: 1 / 0)
    for _ in range(MAX_FAILURES + 2):
        registry.fire("event_record", 111, 7)
    assert session.counters.errors == {TARGET: MAX_FAILURES}
    assert session.off
