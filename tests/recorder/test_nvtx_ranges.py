"""NVTX ranges: which API is picked, and what a real tool (a small injection library) sees of a recorded run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import types
from pathlib import Path

import pytest

from hicache_obs.recorder.nvtx_ranges import (
    DomainRanges,
    ModuleRanges,
    NoRanges,
    RangeName,
    RangeStatus,
    describe,
    open_ranges,
)

SOURCE = Path(__file__).with_name("nvtx_injection.c")
TIMEOUT_S = 120

PROGRAM = """
import json, sys, threading
from hicache_obs.recorder import RecordedDevice, Recorder, RingWriter
from hicache_obs.records import Direction, Work
from hicache_obs.streams import open_device

bare = open_device(sys.argv[1], schedule="random", seed=4)
ring = RingWriter(sys.argv[2], clock=bare.host_ns)
recorder = Recorder(ring, clock=bare.host_ns)
dev = RecordedDevice(bare, recorder)
forward, load, event = dev.Stream("forward"), dev.Stream("load"), dev.Event()
for number in range(20):
    with dev.stream(forward):
        dev.launch(lambda: None, Work("forward", group=number))
    load.wait_stream(forward)
    with dev.stream(load):
        for layer in range(4):
            dev.launch(lambda: None, Work("copy", layers=(layer, layer + 1), direction=Direction.HOST_TO_DEVICE))
    event.record(load)
    forward.wait_event(event)
dev.synchronize()
while recorder.resolve():
    pass
counters = recorder.counters
print(json.dumps({"status": recorder.ranges.status.name, "opened": counters.ranges_opened,
                  "closed": counters.ranges_closed, "resolved": counters.pairs_resolved}))
dev.close()
ring.close()
"""


@pytest.fixture(scope="session")
def injection(tmp_path_factory, require_tool):
    """The compiled tool."""
    compiler = require_tool("cc", install="apt-get install gcc")
    library = tmp_path_factory.mktemp("nvtx") / "injection.so"
    flags = ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-cast-function-type", "-Werror"]
    subprocess.run([compiler, *flags, "-o", library, SOURCE, "-lpthread"], check=True, timeout=TIMEOUT_S)
    return library


def run(tmp_path, device, *, library=None, path=None):
    """What the recorder counted, and what the tool saw."""
    summary = tmp_path / "summary.json"
    env = {k: v for k, v in os.environ.items() if not k.startswith(("NVTX_", "HICACHE_OBS_NVTX"))}
    env["HICACHE_OBS_NVTX_SUMMARY"] = str(summary)
    if library is not None:
        env["NVTX_INJECTION64_PATH"] = str(library)
    if path is not None:
        env["PYTHONPATH"] = str(path)
    command = [sys.executable, "-c", PROGRAM, device, str(tmp_path / "x.ring")]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=TIMEOUT_S)
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout), json.loads(summary.read_text()) if summary.exists() else None


def ops(step):
    """Operation ids of one program round are 8 apart: launch, wait, four copies, record, wait."""
    return [8 * number + step for number in range(20)]


@pytest.mark.parametrize("device", ["threads", "virtual"])
def test_a_tool_sees_every_range_once_nested_and_with_its_operation_id(tmp_path, injection, device):
    counted, seen = run(tmp_path, device, library=injection)
    assert counted == {"status": "DOMAIN", "opened": 140, "closed": 140, "resolved": 140}
    check_summary(seen, threads=1 if device == "virtual" else 2)


def check_summary(seen, *, threads):
    sums = {
        "segment": ops(0),
        "wait_stream": ops(1),
        "copy": [*ops(2), *ops(3), *ops(4), *ops(5)],
        "wait_event": ops(7),
    }
    assert seen["messages"] == {
        name: {"opened": len(ids), "closed": len(ids), "payload_sum": sum(ids)} for name, ids in sums.items()
    }
    assert len(seen["threads"]) == threads  # the streams' workers, or the host
    assert all(t["opened"] == t["closed"] for t in seen["threads"])
    assert {t["deepest"] for t in seen["threads"]} == {1}
    assert [seen[key] for key in ("empty_pops", "unregistered", "without_payload", "other_domains")] == [0] * 4


def test_the_module_api_of_nvtx_0_2_11(tmp_path, injection, nvtx_0_2_11):
    env = {**os.environ, "PYTHONPATH": str(nvtx_0_2_11)}
    if subprocess.run([sys.executable, "-c", "import nvtx"], env=env, capture_output=True, check=False).returncode:
        pytest.skip(f"tool: nvtx 0.2.11 in {nvtx_0_2_11} is built for another Python; make clean nsys-env")
    counted, seen = run(tmp_path, "threads", library=injection, path=nvtx_0_2_11)
    assert counted == {"status": "MODULE", "opened": 140, "closed": 140, "resolved": 140}
    check_summary(seen, threads=2)


def test_without_a_tool_ranges_are_counted_and_go_nowhere(tmp_path):
    counted, seen = run(tmp_path, "threads")
    assert counted == {"status": "NO_TOOL", "opened": 140, "closed": 140, "resolved": 140}
    assert seen is None


# -- which API is picked ---------------------------------------------------------------------------------------


class Attributes:
    payload = None

    def __init__(self, message):
        self.message = message


class Domain:
    """An nvtx 0.2.12+ domain."""

    def __init__(self, calls, *, dummy):
        self.calls = calls
        self.dummy = dummy

    def get_event_attributes(self, message=None, payload=None):
        return None if self.dummy else Attributes(message)

    def push_range(self, attributes):
        self.calls.append((attributes.message, attributes.payload))

    def pop_range(self):
        self.calls.append("pop")


@pytest.fixture
def fake(monkeypatch):
    """``fake(version, tool=...)``: an nvtx module of that version, with or without a tool; returns its calls."""

    def install(version, *, tool, dummy=False):
        calls: list[object] = []
        module = types.ModuleType("nvtx")
        module.push_range = lambda message, color, domain, payload: calls.append((message, domain, payload))
        module.pop_range = lambda domain: calls.append(("pop", domain))
        if version >= (0, 2, 12):
            module.get_domain = lambda name: Domain(calls, dummy=dummy)
        elif version == (0, 2, 11):
            module.get_domain = lambda name: object()  # exists, but cannot push
        monkeypatch.setitem(sys.modules, "nvtx", module)
        monkeypatch.delenv("NVTX_INJECTION32_PATH", raising=False)
        if tool:
            monkeypatch.setenv("NVTX_INJECTION64_PATH", "/some/tool.so")
        else:
            monkeypatch.delenv("NVTX_INJECTION64_PATH", raising=False)
        return calls

    return install


@pytest.mark.parametrize(
    ("version", "options", "kind", "status"),
    [
        ((0, 2, 10), {"tool": True}, ModuleRanges, RangeStatus.MODULE),
        ((0, 2, 10), {"tool": False}, NoRanges, RangeStatus.NO_TOOL),
        ((0, 2, 11), {"tool": True}, ModuleRanges, RangeStatus.MODULE),
        ((0, 2, 11), {"tool": False}, NoRanges, RangeStatus.NO_TOOL),
        ((0, 2, 17), {"tool": True}, DomainRanges, RangeStatus.DOMAIN),
        ((0, 2, 17), {"tool": True, "dummy": True}, NoRanges, RangeStatus.REFUSED),
        ((0, 2, 17), {"tool": False, "dummy": True}, NoRanges, RangeStatus.NO_TOOL),
    ],
)
def test_the_api_is_picked_once_by_version_and_tool(fake, version, options, kind, status):
    fake(version, **options)
    ranges = open_ranges()
    assert type(ranges) is kind
    assert ranges.status is status


def test_without_the_package_there_are_no_ranges(monkeypatch):
    monkeypatch.setitem(sys.modules, "nvtx", None)
    assert open_ranges().status is RangeStatus.NO_PACKAGE
    assert describe() == "nvtx: not recorded: the nvtx package cannot be imported"


def test_describe_names_the_version_and_what_to_do(fake):
    fake((0, 2, 17), tool=True, dummy=True)
    assert describe().startswith("nvtx 0.")
    assert describe().endswith("not recorded: this nvtx needs a newer tool; install nvtx 0.2.11")


def test_both_apis_pass_message_and_operation_id(fake):
    calls = fake((0, 2, 17), tool=True)
    ranges = open_ranges()
    ranges.push(RangeName.COPY, 812)
    ranges.pop()
    assert calls == [("copy", 812), "pop"]
    calls = fake((0, 2, 11), tool=True)
    ranges = open_ranges()
    ranges.push(RangeName.WAIT_STREAM, 5)
    ranges.pop()
    assert calls == [("wait_stream", "hicache", 5), ("pop", "hicache")]


def test_prebuilt_attributes_are_not_shared_between_threads(fake):
    """They are changed in place: a thread that is interrupted in between would push another one's payload."""
    fake((0, 2, 17), tool=True)
    ranges = open_ranges()
    found = [ranges._attributes.by_name[0]]
    thread = threading.Thread(target=lambda: found.append(ranges._attributes.by_name[0]))
    thread.start()
    thread.join()
    assert found[0] is not found[1]


def test_nothing_is_called_when_nobody_watches():
    ranges = NoRanges()
    ranges.push(RangeName.SEGMENT, 1)
    ranges.pop()
    assert ranges.status is RangeStatus.NO_TOOL
