"""Makes a missing fence strike on any machine, at any load: holds each round's first segment until transfers moved.

A timing test sees the race in a few percent of runs. Here the writer waits instead: a launched round does not
begin before every transfer submitted since its launch has either finished (nothing made it wait: it overtook the
round, which is the race) or is parked on a wait that needs the round (a fence works). The condition is the same
in every mode and depends on no speed. Gates are not stream order, so neither the recorder nor the analyzer sees
them.
"""

from __future__ import annotations

from typing import Final

from hicache_obs.controller.cache_controller import SubmittedTransfer
from hicache_obs.controller.scheduler import Scheduler
from hicache_obs.errors import GateTimeout
from hicache_obs.streams.protocol import Gate

TIMEOUT_S: Final = 30.0


class WriterGate:
    """Hangs itself into a scheduler's hooks; scheduler's thread only."""

    def __init__(self, scheduler: Scheduler, *, timeout_s: float = TIMEOUT_S) -> None:
        self._scheduler = scheduler
        self._timeout_s = timeout_s
        self._gate: Gate | None = None
        self._transfers: list[SubmittedTransfer] = []
        scheduler.before_launch = self._hold
        scheduler.after_submit = self._release

    def on_transfer(self, transfer: SubmittedTransfer) -> None:
        """Note a submitted transfer; wire it to ``CacheController.on_transfer``."""
        self._transfers.append(transfer)

    def _hold(self) -> None:
        self._gate = self._scheduler.runner.device.gate()
        self._gate.hold(self._scheduler.runner.forward_stream)

    def _release(self) -> None:
        """Open the gate of the round in flight once the transfers submitted since have moved.

        Raises:
            GateTimeout: One of them neither finished nor parked in time; the run proves nothing.
        """
        if self._gate is not None:
            for transfer in self._transfers:
                if not self._gate.wait_blocks_or(transfer.stream, transfer.finish, timeout_s=self._timeout_s):
                    self._gate.open()
                    raise GateTimeout(
                        f"transfer {transfer.transfer} on '{transfer.stream.name}' neither finished nor waited for "
                        f"the round in flight within {self._timeout_s:g} s"
                    )
            self._gate.open()
            self._gate = None
        self._transfers.clear()
