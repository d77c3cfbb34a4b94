"""A bench: a device, and operations that leave their names in device memory in the order they really ran."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hicache_obs.records import Direction, Work
from hicache_obs.streams import SCHEDULES, Device, Event, Gate, Probe, Stream, VirtualDevice, open_device

TIMEOUT_S = 20.0
"""Nothing waits this long unless a test is failing."""

BACKENDS = [
    "threads",
    *(f"virtual-{schedule}" for schedule in SCHEDULES),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


class ListLog:
    """Names in the order the functions ran, on the devices whose functions do the work themselves."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def writer(self, name: str) -> Callable[[], None]:
        return lambda: self._names.append(name)

    def names(self) -> list[str]:
        return list(self._names)


class CudaLog:
    """Names in the order the kernels ran: each appends its number to a device tensor."""

    def __init__(self) -> None:
        import torch

        self._numbers: list[str] = []
        self._log = torch.full((256,), -1, dtype=torch.int64, device="cuda")
        self._next = torch.zeros(1, dtype=torch.int64, device="cuda")
        # Loading a kernel for the first time may wait for a stream that a gate holds, so load them now.
        self.writer("warm-up")()
        self._log.fill_(-1)
        self._next.zero_()
        torch.cuda.synchronize()

    def writer(self, name: str) -> Callable[[], None]:
        number = len(self._numbers)
        self._numbers.append(name)

        def write() -> None:
            self._log.index_fill_(0, self._next, number)
            self._next.add_(1)

        return write

    def names(self) -> list[str]:
        return [self._numbers[number] for number in self._log.tolist() if number >= 0]


class Bench:
    """A device under test.

    Attributes:
        device: It.
        backend: ``threads``, ``virtual-<schedule>`` or ``cuda``.
        holds: Whether gates really hold a stream here.
    """

    def __init__(self, backend: str, device: Device) -> None:
        self.backend = backend
        self.device = device
        self.holds = not isinstance(device, VirtualDevice)
        self._log = CudaLog() if device.name == "cuda" else ListLog()

    def op(
        self,
        name: str,
        stream: Stream,
        *,
        size_bytes: int = 0,
        direction: Direction | None = None,
        probe: Probe | None = None,
    ) -> None:
        """Launch an operation that leaves ``name`` in the log."""
        self.run(self.writer(name), stream, Work(name, size_bytes=size_bytes, direction=direction), probe)

    def writer(self, name: str) -> Callable[[], None]:
        """A function that leaves ``name`` in the log."""
        return self._log.writer(name)

    def run(self, fn: Callable[[], None], stream: Stream, work: Work | None = None, probe: Probe | None = None) -> None:
        """Launch ``fn`` on ``stream``."""
        with self.device.stream(stream):
            self.device.launch(fn, work or Work("test"), probe=probe)

    def ran(self) -> list[str]:
        """Names of the operations that ran so far, in order."""
        return self._log.names()

    def streams(self, names: str) -> list[Stream]:
        """One new stream per word."""
        return [self.device.Stream(name) for name in names.split()]

    def completes(self, gate: Gate, stream: Stream, done: Event) -> bool:
        """Whether ``done``, recorded last on ``stream``, completes with ``gate`` closed; opens nothing."""
        assert gate.wait_blocks_or(stream, done, timeout_s=TIMEOUT_S)
        if self.holds:
            return done.query()
        done.synchronize()
        return True


def _bench(backend: str) -> Iterator[Bench]:
    name, _, schedule = backend.partition("-")
    bench = Bench(backend, open_device(name, schedule=schedule or "adversarial", seed=7))
    yield bench
    bench.device.close()


@pytest.fixture(params=BACKENDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    """Every device, ``virtual`` under every schedule."""
    yield from _bench(request.param)


@pytest.fixture
def threads() -> Iterator[Bench]:
    """The threads device alone."""
    yield from _bench("threads")


@pytest.fixture
def virtual() -> Callable[[str], Bench]:
    """A virtual device by schedule."""
    return lambda schedule: next(_bench(f"virtual-{schedule}"))
