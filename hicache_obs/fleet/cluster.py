"""Workers for ``analyse_fleet``: Dask's, of this machine or of any cluster.

A worker of this machine is a process of one thread and bounded memory that Dask's nanny starts again when it dies or
exceeds the bound. A Dask scheduler runs whatever code it is sent: these listen on the loopback address alone, and only
to who holds a certificate that is made for this run and never written to a file. There is no dashboard, and
Dask's HTTP servers, which cannot be switched off, have no pages.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import re
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from hicache_obs.errors import ConfigError
from hicache_obs.fleet.run import WorkerLost
from hicache_obs.readers.trace_file import one_line

CONNECT_S: Final = 10.0
"""For a scheduler to answer and have a worker."""
IDLE_S: Final = 60.0
"""For a cluster without workers to get one again."""
POLL_S: Final = 2.0
MEMORY_BYTES: Final = 1 << 30
"""Of a worker of this machine, by default."""
_ADDRESS: Final = re.compile(r"([a-z]+://)?[^\s/]+:[0-9]+/?")
_EXPECTED: Final = "expected the address of a running Dask scheduler, such as tcp://host:8786"
_TIMEOUT: Final = (TimeoutError, asyncio.TimeoutError)
"""One and the same from Python 3.11 on."""
_LOCAL: Final = {
    "distributed.worker.memory.terminate": 0.95,
    "distributed.scheduler.allowed-failures": 3,
    "distributed.scheduler.http.routes": [],
    "distributed.worker.http.routes": [],
    "distributed.worker.preload": ["hicache_obs.fleet.local_worker"],
}
_LOGGERS: Final = {"distributed", "tornado", "asyncio"}


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """What Dask, and the loops it runs on, log in tracebacks, our errors say in one line. Process-wide meanwhile."""
    loggers = [logging.getLogger(name) for name in logging.root.manager.loggerDict if name.split(".")[0] in _LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def local_workers(count: int, memory_bytes: int = MEMORY_BYTES) -> Iterator[DaskExecutor]:
    """``count`` workers of this machine, each with at most ``memory_bytes``.

    Raises:
        ModuleNotFoundError: The extra ``fleet`` is not installed.
        ConfigError: They cannot be started.
    """
    import dask
    import distributed

    with dask.config.set(_LOCAL), _quiet(), contextlib.ExitStack() as stack:
        spilled = stack.enter_context(tempfile.TemporaryDirectory(prefix="hicache-obs-fleet-"))
        try:
            cluster = stack.enter_context(
                distributed.LocalCluster(
                    n_workers=count,
                    threads_per_worker=1,
                    processes=True,
                    memory_limit=memory_bytes,
                    host="127.0.0.1",
                    protocol="tls",
                    security=distributed.Security.temporary(),
                    scheduler_kwargs={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
                    local_directory=spilled,
                    silence_logs=logging.CRITICAL,
                )
            )
            client = stack.enter_context(distributed.Client(cluster))
        except (OSError, RuntimeError, *_TIMEOUT) as error:
            raise ConfigError(f"--workers {count}: cannot be started: {one_line(error)}") from None
        yield DaskExecutor(client, f"--workers {count}")


@contextlib.contextmanager
def remote_workers(address: str, timeout_s: float = CONNECT_S) -> Iterator[DaskExecutor]:
    """The workers of the Dask scheduler at ``address``.

    Certificates for ``tls://`` come from Dask's own configuration.

    Raises:
        ModuleNotFoundError: The extra ``fleet`` is not installed.
        ConfigError: There is no scheduler, or it has no worker.
    """
    import distributed

    if not _ADDRESS.fullmatch(address):  # Dask's client would raise later, and once more when it is collected
        raise ConfigError(f"--scheduler {address}: no address; {_EXPECTED}")
    with _quiet():
        reason = ""
        try:
            client = distributed.Client(address, timeout=timeout_s, set_as_default=False)
        except (OSError, ValueError, TypeError, ImportError, RuntimeError, *_TIMEOUT) as error:
            reason = one_line(error)
        if reason:
            gc.collect()  # the client closes itself then; while another one starts, it would wait for that for ever
            raise ConfigError(f"--scheduler {address}: cannot be reached ({reason}); {_EXPECTED}")
        with client:
            try:
                client.wait_for_workers(1, timeout=timeout_s)
            except _TIMEOUT:
                raise ConfigError(
                    f"--scheduler {address}: has no worker, {timeout_s:.0f} s after it was asked"
                ) from None
            yield DaskExecutor(client, f"--scheduler {address}")


class DaskExecutor:
    """An ``Executor`` on a Dask client.

    Args:
        client: Connected.
        option: What the user asked for, for messages.
    """

    def __init__(self, client: Any, option: str) -> None:
        self.client: Final = client
        self._option = option
        self._run = uuid.uuid4().hex[:12]
        self._tasks = 0

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """See ``Executor``. Keys are of this run only: a scheduler keeps results of others under theirs."""
        self._tasks += 1
        key = f"hicache-obs-{function.__name__}-{self._run}-{self._tasks}"
        return self.client.submit(function, *arguments, key=key)

    def results(self, handles: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """See ``Executor``.

        Raises:
            ConfigError: The cluster is gone, or its workers cannot import this program.
        """
        from distributed import wait

        left = {future.key: (number, future) for number, future in enumerate(handles)}
        alive_at = time.monotonic()
        while left:
            try:
                done = wait([future for _, future in left.values()], timeout=POLL_S, return_when="FIRST_COMPLETED").done
            except _TIMEOUT:
                alive_at = self._alive(alive_at)
                continue
            alive_at = time.monotonic()
            for future in sorted(done, key=lambda future: left[future.key][0]):
                number, _ = left.pop(future.key)
                yield number, self._result(future)

    def _alive(self, since: float) -> float:
        """When the cluster last had a worker."""
        if self.client.status == "running" and self.client.scheduler_info(n_workers=1)["workers"]:
            return time.monotonic()
        if time.monotonic() - since > IDLE_S or self.client.status in ("closed", "closing"):
            raise ConfigError(f"{self._option}: the cluster is gone, or has lost all its workers; nothing was written")
        return since

    def _result(self, future: Any) -> Any:
        from distributed import CancelledError
        from distributed.scheduler import KilledWorker

        try:
            return future.result()
        except KilledWorker as error:
            return WorkerLost(
                f"given up, after {error.allowed_failures + 1} workers died on it; out of memory? --memory allows more"
            )
        except CancelledError:
            raise ConfigError(f"{self._option}: the cluster is gone; nothing was written") from None
        except ModuleNotFoundError as error:
            raise ConfigError(
                f"{self._option}: a worker cannot import {error.name}; install the same hicache-obs[fleet] there"
            ) from None
