"""``open_device``, and that nothing here needs torch to be imported."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.streams import SCHEDULES, open_device


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_virtual_takes_a_schedule(schedule):
    device = open_device("virtual", schedule=schedule)
    assert (device.name, device.torch_device, device.clock_error_ns) == ("virtual", "cpu", 0)
    assert device.schedule == schedule


def test_threads_is_on_the_cpu():
    device = open_device("threads")
    assert (device.name, device.torch_device, device.clock_error_ns) == ("threads", "cpu", 1_000)
    device.close()


@pytest.mark.parametrize(("has_cuda", "name"), [(True, "cuda"), (False, "threads")])
def test_auto_is_cuda_where_there_is_one(monkeypatch, has_cuda, name):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    monkeypatch.setattr("hicache_obs.streams.open.CudaDevice", lambda: "cuda")
    device = open_device("auto")
    assert device == "cuda" if has_cuda else device.name == name
    if not has_cuda:
        device.close()


def test_auto_is_threads_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    device = open_device("auto")
    assert device.name == "threads"
    device.close()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"name": "gpu"}, "device 'gpu': must be one of auto, cuda, threads, virtual"),
        (
            {"name": "virtual", "schedule": "evil"},
            "schedule 'evil': must be one of eager, asap, lazy, random, adversarial",
        ),
        ({"name": "threads", "schedule": ""}, "schedule '': must be one of"),
    ],
)
def test_unknown_names_are_refused_with_what_is_allowed(arguments, text):
    with pytest.raises(ConfigError) as caught:
        open_device(**arguments)
    assert text in str(caught.value)


def test_cuda_without_a_device_is_refused(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="device 'cuda': torch finds no CUDA device here"):
        open_device("cuda")


def test_importing_the_package_does_not_import_torch():
    code = "import sys, hicache_obs.streams; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("name", "told"), [("auto", True), ("cuda", True), ("threads", False), ("virtual", False)])
def test_cuda_is_told_before_it_starts_that_streams_will_be_held(monkeypatch, name, told):
    seen = []
    monkeypatch.setattr(os, "environ", {"CUDA_DEVICE_MAX_CONNECTIONS": "16"})
    monkeypatch.setattr("hicache_obs.streams.open._has_cuda", lambda: seen.append(dict(os.environ)) or False)
    with contextlib.suppress(ConfigError):
        open_device(name).close()
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "16"
    assert ("CUDA_MODULE_LOADING" in os.environ) is told
    assert all(environment["CUDA_MODULE_LOADING"] == "EAGER" for environment in seen)
    assert bool(seen) is told
