"""Hooks in somebody else's process: results, exceptions and switches, on an engine of three functions."""

from __future__ import annotations

import os

import pytest

from hicache_obs.findings import Hazard
from hicache_obs.readers.ring import RingReader, read_ring
from hicache_obs.readers.ring_header import set_mode
from hicache_obs.recorder.server import ServerRecorder
from hicache_obs.records import CaptureMode, EventRecord, EventWait, WaitStream
from hicache_obs.sglang.adapter import Adapter
from hicache_obs.sglang.guard import around
from hicache_obs.sglang.install import install
from hicache_obs.sglang.links import Links
from hicache_obs.sglang.resolve import Found
from hicache_obs.sglang.session import MAX_FAILURES, Session
from hicache_obs.sglang.streams import stream_adapters
from hicache_obs.sglang.table import CPU_ADAPTERS, CUDA_ADAPTERS, SGLANG_ADAPTERS
from hicache_obs.sglang.tensors import TENSOR_ADAPTERS
from hicache_obs.sglang.versions import Versions


class Event:
    """A stream event that takes attributes."""


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "rings"))
    monkeypatch.setenv("HICACHE_OBS_RING_SLOTS", "256")
    monkeypatch.setenv("HICACHE_OBS_ARENA_IDS", "1024")
    made = Session("engine 1", current_stream=object)
    yield made
    made.close()


def fail(*args, **kwargs):
    raise ZeroDivisionError("ours")


def note(session, *args, **kwargs):
    session.recorder.status("seen", len(args))


def test_the_result_goes_through_and_nothing_is_made_before_the_first_call(session):
    hook = around(session, Adapter("engine.f", before=note))
    assert session.ring is None
    assert hook(lambda a, b: a - b, 5, b=2) == 3
    assert session.ring is not None
    assert session.counters.calls == 1


@pytest.mark.parametrize("adapter", [Adapter("e.f", before=fail), Adapter("e.f", after=fail)])
def test_a_failing_hook_changes_nothing_and_is_off_after_a_row(session, adapter, caplog):
    hook, calls = around(session, adapter), []
    for number in range(MAX_FAILURES + 3):
        assert hook(lambda n: calls.append(n) or n, number) == number
    assert calls == list(range(MAX_FAILURES + 3))
    assert session.counters.errors == {"e.f": MAX_FAILURES}
    assert session.off
    assert sum("hook on e.f failed" in line for line in caplog.messages) == 1


class Stream:
    """A stream that takes attributes."""


DIRECT = {row.target: row for row in stream_adapters("e.Stream", "e.Event")}
CALLS = [
    ("e.Event.record", (Event(),), {}),
    ("e.Event.record", (Event(),), {"stream": Stream()}),
    ("e.Event.wait", (Event(),), {"stream": Stream()}),
    ("e.Event.wait", (Event(), Stream()), {}),
    ("e.Stream.wait_event", (Stream(),), {"event": Event()}),
    ("e.Stream.wait_event", (Stream(), Event()), {}),
    ("e.Stream.wait_stream", (Stream(),), {"stream": Stream()}),
    ("e.Stream.wait_stream", (Stream(), Stream()), {}),
]


@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS)
def test_a_whole_hook_passes_on_what_it_was_given_and_records_once(session, target, args, kwargs):
    session._current_stream = Stream
    seen = []

    def original(*args, **kwargs):
        seen.append((args, kwargs))
        assert hook(lambda *args: "inner", *args) == "inner"  # torch's own calls inside are not recorded
        return "result"

    hook = around(session, DIRECT[target])
    assert hook(original, *args, **kwargs) == "result"
    assert seen == [(args, kwargs)]
    assert session.counters.errors == {}
    records = [one for one in read_ring(session.ring.path) if isinstance(one, EventRecord | EventWait | WaitStream)]
    assert len(records) == 1
    with pytest.raises(KeyError, match="theirs"):
        hook(raises, *args, **kwargs)
    assert not session.local.in_stream_call


def raises(*args, **kwargs):
    raise KeyError("theirs")


@pytest.mark.parametrize(("target", "args", "kwargs"), [*CALLS, ("e.Stream.wait_event", (Stream(), None), {})])
def test_a_whole_hook_that_fails_changes_nothing_and_is_off_after_a_row(session, target, args, kwargs, monkeypatch):
    monkeypatch.setattr(ServerRecorder, "put", fail)
    monkeypatch.setattr(Session, "event", fail)
    session._current_stream = Stream
    hook, calls = around(session, DIRECT[target]), []
    for _ in range(MAX_FAILURES + 3):
        assert hook(lambda *args, **kwargs: calls.append((args, kwargs)) or 3, *args, **kwargs) == 3
    assert calls == [(args, kwargs)] * (MAX_FAILURES + 3)
    assert session.counters.errors == {target: MAX_FAILURES}
    assert session.off


@pytest.mark.parametrize(
    ("more", "named"), [((), {}), ((object(),) * 9, {}), ((), {"renamed": object()}), ((None,) * 2, {"renamed": None})]
)
def test_a_function_that_has_another_signature_is_named_and_never_harmed(session, more, named):
    """A release that is not known yet may have one: whatever it is called with, it gets that, and gives its result."""
    session._current_stream = Stream
    misfits = set()
    for row in (*SGLANG_ADAPTERS, *CUDA_ADAPTERS, *CPU_ADAPTERS, *TENSOR_ADAPTERS):
        hook, owner, result = around(session, row), Event(), object()
        session.links = Links(session, "Linker", {}, 3)
        session.missing.clear()
        for _ in range(MAX_FAILURES + 1):
            session.failures = 0  # other hooks work meanwhile
            got = hook(lambda *args, **kwargs: (args, kwargs, result), owner, *more, **named)  # noqa: B023 called here
            assert got == ((owner, *more), named, result), row.target
        failed = session.counters.errors.pop(row.target, 0)
        assert failed in (0, MAX_FAILURES), row.target
        if failed:
            misfits.add(row.target)
            assert session.missing == dict.fromkeys(
                row.hazards, f"the hook on {row.target} failed {MAX_FAILURES} times"
            )
    assert len(misfits) > 20
    assert not session.off


def test_one_failing_hook_among_working_ones_goes_off_alone(session):
    bad = around(session, Adapter("e.bad", before=fail, hazards=(Hazard.GRAPH,)))
    good = around(session, Adapter("e.good", before=note))
    for _ in range(MAX_FAILURES + 1):
        bad(lambda: None)
        good(lambda: None)
    assert not session.off
    assert session.counters.errors == {"e.bad": MAX_FAILURES}
    assert session.missing == {Hazard.GRAPH: f"the hook on e.bad failed {MAX_FAILURES} times"}


def test_the_engines_exception_is_its_own(session):
    undone = []
    hook = around(session, Adapter("e.f", before=lambda s: 7, failed=lambda s, state: undone.append(state)))
    error = KeyError("theirs")

    def raises():
        raise error

    with pytest.raises(KeyError) as caught:
        hook(raises)
    assert caught.value is error
    assert undone == [7]


def test_calls_inside_a_group_are_the_engines_own(session):
    seen = []
    outer = around(session, Adapter("e.outer", before=lambda s: seen.append("outer"), group="g"))
    inner = around(session, Adapter("e.inner", before=lambda s: seen.append("inner"), group="g"))
    outer(lambda: inner(lambda: None))
    inner(lambda: None)
    assert seen == ["outer", "inner"]


def test_switched_off_from_outside_it_records_nothing_and_says_so(session):
    hook = around(session, Adapter("e.f", before=note))
    hook(lambda: None)
    set_mode(session.ring.path, CaptureMode.OFF)
    for _ in range(3):
        hook(lambda: None)
    assert session.counters.calls == 1
    set_mode(session.ring.path, CaptureMode.OBSERVE)
    hook(lambda: None)
    session.close()
    names = read_ring(session.ring.path).names
    assert names.status["seen"] == 0
    assert session.counters.calls == 2


def test_a_fork_of_a_recording_process_records_nothing(session):
    hook = around(session, Adapter("e.f", before=note))
    hook(lambda: None)
    child = os.fork()
    if child == 0:
        os._exit(0 if hook(lambda: 5) == 5 and session.off else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert not session.off


def test_a_directory_that_cannot_be_used_ends_capture_quietly(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HICACHE_OBS_DIR", str(tmp_path / "file"))
    (tmp_path / "file").write_text("")
    session = Session("engine 1", current_stream=object)
    assert around(session, Adapter("e.f", before=note))(lambda: 4) == 4
    assert session.off
    assert "is not a directory" in caplog.text


def test_a_missing_name_makes_its_hazards_unobservable(session):
    rows = (
        Adapter("pathlib.Path.exists", before=note, hazards=(Hazard.RDMA,)),
        Adapter("pathlib.Path.gone", before=note, hazards=(Hazard.GRAPH,)),
        Adapter("pathlib.Path.later", Versions("2"), before=note, hazards=(Hazard.LIFETIME,)),
        Adapter("pathlib.Path.extra", before=note, hazards=(Hazard.OTHER,), optional=True),
    )
    registered = []
    installed = install(session, rows, (1, 0), lambda target, hook: registered.append(target))
    assert registered == ["pathlib.Path.exists"]
    assert installed.missing == {"pathlib.Path.gone": Found.MISSING}
    assert session.missing == {Hazard.GRAPH: "pathlib.Path.gone is missing"}
    assert session.recording
    reader = RingReader(session.ring.path)
    assert reader.observable == frozenset(Hazard) - {Hazard.GRAPH}
    session.unobservable((Hazard.RDMA,), "seen later")
    assert reader.observable == frozenset(Hazard) - {Hazard.GRAPH, Hazard.RDMA}
    reader.close()


@pytest.mark.parametrize("patch", [11, 13, 14, 16, 17, 18, 19, 20, 21, 22, 23, 99])
def test_every_release_has_one_row_per_name_and_all_it_needs(patch):
    rows = [row for row in SGLANG_ADAPTERS if (0, 5, patch) in row.versions]
    targets = [row.target for row in rows]
    assert len(set(targets)) == len(targets)
    for need in ("start_loading", "start_writing", "ModelRunner.forward", "HostKVCache.alloc", "_page_transfer"):
        assert any(need in target for target in targets), need
    assert any("load_to_device_per_layer" in target for target in targets)
    assert all(row.before or row.after or row.direct for row in rows)


def test_streams_are_known_by_handle_and_events_by_object(session):
    for row in (*CPU_ADAPTERS, *CUDA_ADAPTERS):
        assert row.group == "in_stream_call"
    assert session.recording
    one, same = type("S", (), {"cuda_stream": 77})(), type("S", (), {"cuda_stream": 77})()
    assert session.stream(one) is session.stream(same)
    assert session.stream(one, "load-back").name == "load-back"
    assert session.stream(same).name == "load-back"
    event = Event()
    assert session.event(event) is session.event(event)
    assert session.event(event) is not session.event(Event())
