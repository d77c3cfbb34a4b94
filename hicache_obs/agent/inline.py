"""The agent inside the process it observes: one ring, as a thread or called inline.

Inline use (``poll`` after each scheduler step) keeps a run on the virtual device deterministic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from hicache_obs.agent.pipeline import RankPipeline


class Agent:
    """Drives one ring to its reports.

    Args:
        pipeline: The ring's way to its reports.
        resolve: Called before each read; appends device times of finished operations to the ring
            (``Recorder.resolve``). Absent when the observed process does that itself.
        period_s: Time between reads of ``start``'s thread.
        on_spent: Told after each read how many nanoseconds of host time went into ``resolve``, and into the rest.
    """

    def __init__(
        self,
        pipeline: RankPipeline,
        *,
        resolve: Callable[[], int] | None = None,
        period_s: float = 0.1,
        on_spent: Callable[[int, int], None] | None = None,
    ) -> None:
        self._pipeline = pipeline
        self._resolve = resolve
        self._period_s = period_s
        self._on_spent = on_spent
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None

    def poll(self) -> int:
        """Read, journal and analyse what is there now; returns the number of records. Not for two threads."""
        start_ns = time.perf_counter_ns()
        if self._resolve is not None:
            self._resolve()
        resolved_ns = time.perf_counter_ns()
        count = self._pipeline.step()
        if self._on_spent is not None:
            self._on_spent(resolved_ns - start_ns, time.perf_counter_ns() - resolved_ns)
        return count

    def start(self) -> None:
        """Poll from a thread until ``finish``."""
        self._thread = threading.Thread(target=self._run, name="hicache-obs-agent", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Stop the thread, take in what is left, give open pairs their verdict, close the journal.

        Call it when the engine is idle, so that every event pair can resolve. Raises what the thread raised.
        """
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        if self._failure is not None:
            raise self._failure
        while self.poll():
            pass
        self._pipeline.finish()

    def _run(self) -> None:
        try:
            while not self._stop.wait(self._period_s):
                self.poll()
        except BaseException as error:  # noqa: BLE001 handed to the thread that calls finish
            self._failure = error
