"""What ``make gpu-check`` does with the plugin, on the virtual device instead of a GPU."""

from __future__ import annotations

import importlib.util
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


def test_the_cost_of_a_round_is_measured(plugin, machine):
    told = plugin.cost(machine, rounds=5)
    assert told["observing_us"] > told["absent_us"] > 0


def test_the_hooks_are_gone_afterwards(plugin, machine):
    before = VirtualStream.wait_stream, VirtualEvent.record, plugin.ModelRunner.forward
    with plugin.observed(machine) as session:
        assert VirtualEvent.record is not before[1]
        assert session.recording
    assert (VirtualStream.wait_stream, VirtualEvent.record, plugin.ModelRunner.forward) == before
