"""The device modules SGLang's classes are given: torch's own for the CPU, or ours that really runs things later."""

from __future__ import annotations

from typing import Any

import torch

from hicache_obs.records import StreamKind, Work
from hicache_obs.sglang import install
from hicache_obs.sglang.streams import stream_adapters
from hicache_obs.streams.virtual import VirtualDevice

install.EXTRA_ADAPTERS += stream_adapters(
    "hicache_obs.streams.virtual.VirtualStream", "hicache_obs.streams.virtual.VirtualEvent"
)


class TorchCpu:
    """torch.cpu, whose streams and events do nothing: every call runs at once."""

    __name__ = "cpu"

    Stream, Event = torch.cpu.Stream, torch.cpu.Event
    current_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)

    def launch(self, fn: Any) -> None:
        fn()

    def synchronize(self) -> None:
        pass


class Deferred:
    """The virtual device: what is launched runs when the host waits for it, the newest first where that is legal."""

    __name__ = "virtual"

    def __init__(self) -> None:
        self._device = VirtualDevice("adversarial")
        self.Event = self._device.Event
        self.Stream = lambda: self._device.Stream(kind=StreamKind.NONBLOCKING)
        self.current_stream = self._device.current_stream
        self.stream = self._device.stream
        self.synchronize = self._device.synchronize

    def launch(self, fn: Any) -> None:
        self._device.launch(fn, Work("harness"))
