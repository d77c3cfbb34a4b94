"""The thread that asks for events: it becomes a harmless one before its first question, or never asks."""

from __future__ import annotations

import threading
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from hicache_obs.errors import StreamError
from hicache_obs.records import Mode, Space
from hicache_obs.sglang import session as session_module
from hicache_obs.sglang.page_ids import PageReader, convert
from hicache_obs.sglang.session import Session

WAIT_S = 20.0
"""Nothing waits this long unless a test is failing."""


class Slots:
    """An index tensor that says it is on a GPU."""

    is_cpu = False

    def __init__(self):
        self.values = torch.tensor([4, 5])

    def numel(self):
        return 2

    def reshape(self, *_):
        return self.values


class Event:
    def __init__(self, log, asked):
        self.log, self.asked = log, asked

    def record(self, *_):
        pass

    wait = record

    def query(self):
        self.log.append("query")
        self.asked.set()
        return True


@pytest.fixture
def begun(tmp_path, monkeypatch):
    """``begun(become_poller)``: a session of a process on device 3, with a page list on its way to the host."""
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("HICACHE_OBS_RING_SLOTS", "256")
    monkeypatch.setenv("HICACHE_OBS_ARENA_IDS", "1024")
    monkeypatch.setattr(session_module, "FLUSH_S", 0.001)
    sessions = []

    def make(become_poller, log):
        asked = threading.Event()
        stream = SimpleNamespace(cuda_stream=7, device_index=3)
        device = SimpleNamespace(
            Stream=lambda *, priority: stream,
            Event=lambda: Event(log, asked),
            current_stream=lambda: stream,
            stream=lambda _: nullcontext(),
        )
        session = Session(
            "engine 1",
            current_stream=lambda: stream,
            reader=PageReader(lambda: device, lambda ids: torch.zeros(ids, dtype=torch.int64), ring_ids=64),
            become_poller=become_poller,
        )
        sessions.append(session)
        assert session.recording
        access = session.access(Space.DEVICE, Mode.WRITE, object(), Slots(), convert(1))
        session.recorder.page_alloc(0, access)
        return session, asked

    yield make
    for session in sessions:
        session.close()


def test_the_thread_takes_the_servers_device_before_it_asks_for_the_first_event(begun):
    log = []
    _, asked = begun(lambda index: log.append((index, threading.current_thread().name)), log)
    assert asked.wait(WAIT_S)
    assert log[0] == (3, "hicache-obs-flush")
    assert "query" in log
    assert log.count(log[0]) == 1


def test_a_thread_that_must_not_ask_does_not_and_capture_ends(begun, caplog):
    log, refused = [], threading.Event()

    def refuse(index):
        thread.append(threading.current_thread())
        refused.set()
        raise StreamError("the driver has no such function")

    thread = []
    session, _ = begun(refuse, log)
    assert refused.wait(WAIT_S)
    thread[0].join(WAIT_S)
    assert session.off
    assert log == []
    assert "nothing is recorded from now on: StreamError: the driver has no such function" in caplog.text
