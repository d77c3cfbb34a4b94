"""torch.profiler in somebody else's program, from the import of torch to the end of the process.

``hicache-obs record --with torch`` copies this file to a folder of PYTHONPATH as ``sitecustomize.py``: every Python
process of the command then runs it first, whether or not hicache-obs is installed for it. It therefore imports nothing
but the standard library, and torch only after the program has done so. One trace per process, named after its id; what
went wrong goes to a file beside it and never to the program.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.machinery
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType, ModuleType
from typing import Any

FOLDER = "HICACHE_OBS_TORCH_TRACES"
"""Environment variable that names the folder of the traces."""


class _AfterTorch(importlib.abc.MetaPathFinder):
    """Calls ``then`` once, when torch has been imported."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        loader = None if spec is None else spec.loader
        if loader is None:
            return None
        run = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            self._then()

        loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class _Session:
    """The profiler of this process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._profiler: Any = None

    def start(self) -> None:
        try:
            import torch
            from torch import profiler

            activities = [profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(profiler.ProfilerActivity.CUDA)
            self._profiler = profiler.profile(activities=activities, experimental_config=_config())
            self._profiler.start()
        except Exception as error:  # noqa: BLE001 the program must not notice
            self._fail("start", error)
            return
        atexit.register(self.stop)
        _exit_on(signal.SIGTERM)

    def stop(self) -> None:
        if os.getpid() != self._process:
            return  # a forked child, whose profiler is its parent's
        try:
            self._profiler.stop()
            self._profiler.export_chrome_trace(os.path.join(self._folder, f"{self._process}.json.gz"))
        except Exception as error:  # noqa: BLE001 as above
            self._fail("stop", error)

    def _fail(self, when: str, error: Exception) -> None:
        try:
            with open(os.path.join(self._folder, f"{self._process}.error"), "w") as file:
                file.write(f"torch.profiler did not {when}: {type(error).__name__}: {error}\n")
        except OSError:
            pass


def _config() -> Any:
    """Synchronisation rows, without which no wait is in the trace; all threads, where this torch can."""
    from torch._C._profiler import _ExperimentalConfig

    try:
        return _ExperimentalConfig(enable_cuda_sync_events=True, profile_all_threads=True)
    except TypeError:
        return _ExperimentalConfig(enable_cuda_sync_events=True)


def _exit_on(number: signal.Signals) -> None:
    """End in the orderly way when asked to, where the program would just be gone."""
    if signal.getsignal(number) is not signal.SIG_DFL:
        return

    def leave(received: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + received)

    try:
        signal.signal(number, leave)
    except ValueError:
        pass  # torch was imported in another thread than the main one


def _go_on() -> None:
    """Run the ``sitecustomize`` that this one stands in front of, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [place for place in sys.path if os.path.abspath(place or ".") != here]
    mine = sys.modules.pop("sitecustomize")
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        sys.modules["sitecustomize"] = mine


if __name__ == "sitecustomize":
    if os.environ.get(FOLDER):
        sys.meta_path.insert(0, _AfterTorch(_Session(os.environ[FOLDER]).start))
    _go_on()
