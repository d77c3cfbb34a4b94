"""What ``make gpu-check`` does with the plugin, on the virtual device instead of a GPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hicache_obs.records import StreamKind, Work
from hicache_obs.streams.virtual import VirtualDevice, VirtualEvent, VirtualStream


@pytest.fixture
def plugin(checkout, monkeypatch):
    place = Path(checkout) / "tests" / "gpu" / "plugin.py"
    spec = importlib.util.spec_from_file_location("gpu_check_plugin", place)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check_plugin", module)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def machine(plugin):
    device = VirtualDevice("adversarial")
    module = SimpleNamespace(
        Event=device.Event,
        Stream=lambda: device.Stream(kind=StreamKind.NONBLOCKING),
        current_stream=device.current_stream,
        stream=device.stream,
        synchronize=device.synchronize,
    )
    return plugin.Machine(
        module,
        (("virtual.Stream", VirtualStream), ("virtual.Event", VirtualEvent)),
        "cpu",
        lambda fn: device.launch(fn, Work("stand-in")),
        lambda: None,
    )


def test_the_unfenced_load_back_is_reported_and_wrong_and_the_fenced_one_is_neither(plugin, machine):
    told = plugin.load_backs(machine)
    assert told["unfenced"] == {"hazards": ["waw_forward_restore"], "page": 22.0}
    assert told["fenced"] == {"hazards": [], "page": 11.0}


def test_it_runs_without_the_packages_that_a_gpu_machine_may_lack(checkout, tmp_path):
    code = (
        "import sys\n"
        "for name in ('msgspec', 'nvtx', 'jsonschema', 'opentelemetry'): sys.modules[name] = None\n"
        "sys.path.insert(0, 'tests/gpu')\n"
        "import plugin\n"
        "print(plugin.Session('stand-in', current_stream=object).recording)\n"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    environment = {**os.environ, "PYTHONPATH": str(checkout), "HICACHE_OBS_DIR": str(tmp_path / "rings")}
    done = subprocess.run(
        command, cwd=checkout, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.stdout == "True\n", done.stderr


def test_the_cost_of_a_round_is_measured(plugin, machine):
    told = plugin.cost(machine, rounds=5)
    assert told["observing_us"] > 0 < told["absent_us"]
    assert told["hooked_calls"] >= 5 * 5  # which is more is for a machine to say that is not busy


def test_the_hooks_are_gone_afterwards(plugin, machine):
    before = VirtualStream.wait_stream, VirtualEvent.record, plugin.ModelRunner.forward
    with plugin.observed(machine) as session:
        assert VirtualEvent.record is not before[1]
        assert session.recording
    assert (VirtualStream.wait_stream, VirtualEvent.record, plugin.ModelRunner.forward) == before
