"""Runs a command under a profiler, and keeps what the processes of it record: the parts of ``hicache-obs record``."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.readers.nsys_report import REPORTS, STREAMS, import_report
from hicache_obs.recorder import torch_profile

RINGS: Final = "rings"
JOURNAL: Final = "journal"
REPORT: Final = "recording"
TORCH: Final = "torch"
_HELP_S: Final = 60
_FLAGS: Final = ("--trace=cuda,nvtx", "--sample=none", "--cpuctxsw=none")
_IF_KNOWN: Final = {"--cuda-graph-trace": "node", "--cuda-event-trace": "false"}
"""Flags that not every version has: entries of a graph as rows, and no event times, which can serialise streams."""


def program(command: Sequence[str]) -> str:
    """The path of the program that ``command`` names.

    Raises:
        ConfigError: There is none.
    """
    path = shutil.which(command[0])
    if path is None:
        raise ConfigError(f"record -- {command[0]}: no such program; expected one on PATH, or the path of one")
    return path


def make_folder(path: Path) -> None:
    """An empty folder for a recording, which nobody else can read.

    Raises:
        ConfigError: It cannot be made, or holds something.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        if any(path.iterdir()):
            raise ConfigError(f"-o {path}: is not empty; a recording has a folder of its own")
    except OSError as error:
        raise ConfigError(f"-o {path}: {error.strerror}; expected a folder that can be made") from None


def nsys_command(nsys: str, folder: Path, command: Sequence[str]) -> list[str]:
    """``command`` under Nsight Systems, with the flags that a verdict needs as far as this version knows them."""
    try:
        told = subprocess.run(
            [nsys, "profile", "--help"], stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
            timeout=_HELP_S, check=False,
        ).stdout  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--with nsys: {nsys} cannot be run: {error}") from None
    known = [f"{flag}={value}" for flag, value in _IF_KNOWN.items() if f"{flag}=" in told]
    return [nsys, "profile", *_FLAGS, *known, "--output", str(folder.absolute() / REPORT), *command]


def import_stream(folder: Path) -> None:
    """Make the report that nsys itself did not make, where it does not find its own importer; else nothing."""
    stream, report = (folder.absolute() / f"{REPORT}{suffix}" for suffix in (STREAMS[0], REPORTS[0]))
    if report.exists() or not stream.exists():
        return
    try:
        import_report(stream, report)
    except TraceError:
        return  # whoever reads it will say why it cannot be read
    stream.unlink()


def recording_environment(folder: Path) -> dict[str, str]:
    """What makes the processes of a command record into ``folder``; an engine without the recorder ignores it."""
    wanted = os.environ.get("HICACHE_OBS", "off")
    return {
        **os.environ,
        "HICACHE_OBS": "observe" if wanted == "off" else wanted,
        "HICACHE_OBS_DIR": str(folder.absolute() / RINGS),
        "HICACHE_OBS_JOURNAL": str(folder.absolute() / JOURNAL),
        "HICACHE_OBS_AGENT": "off",
    }


@contextmanager
def torch_environment(folder: Path) -> Iterator[dict[str, str]]:
    """What makes every Python process of a command profile itself into ``folder``."""
    traces = folder.absolute() / TORCH
    traces.mkdir()
    with tempfile.TemporaryDirectory(prefix="hicache-obs-") as site:
        shutil.copyfile(torch_profile.__file__, Path(site) / "sitecustomize.py")
        places = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
        yield {torch_profile.FOLDER: str(traces), "PYTHONPATH": os.pathsep.join(places)}


@contextmanager
def rings_read(folder: Path) -> Iterator[None]:
    """Read the rings of ``folder`` into its journal while the block runs, and to their end after it."""
    from hicache_obs.agent import NodeAgent, NodeOptions
    from hicache_obs.config import read_setting
    from hicache_obs.exporters.prometheus import Metrics

    options = NodeOptions(
        directory=folder.absolute() / RINGS,
        journals=folder.absolute() / JOURNAL,
        journal_max_bytes=read_setting("journal_max_bytes")[0],
        period_s=read_setting("poll_ms")[0] / 1e3,
        keep=True,
    )
    agent = NodeAgent(options, Metrics(ranks=(), engine="record"))
    over = threading.Event()
    reader = threading.Thread(target=agent.run, args=(over.wait,), name="hicache-obs-record")
    reader.start()
    try:
        yield
    finally:
        over.set()
        reader.join()
        agent.drain()
        agent.close()


def run(command: Sequence[str], environment: dict[str, str]) -> int:
    """Run ``command`` to its end; its exit code, negative for the signal that ended it, as ``subprocess`` has it.

    Ctrl-C reaches the command as it would without us; it may end in its own way. SIGTERM and SIGHUP are passed on.

    Raises:
        ConfigError: It cannot be run.
    """
    received: list[int] = []
    child: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, frame: FrameType | None) -> None:
        received.append(number)
        if child is not None and number != signal.SIGINT:
            child.send_signal(number)

    passed = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, pass_on) for number in passed}
    try:
        child = subprocess.Popen(command, env=environment)
        for number in received:  # while it was being started
            if number != signal.SIGINT:
                child.send_signal(number)
        return child.wait()
    except OSError as error:
        raise ConfigError(f"record -- {command[0]}: cannot be run: {error.strerror}") from None
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def ending(code: int) -> str:
    """How a command ended, in words; empty if well. A shell says 128 and the signal's number."""
    if code == 0:
        return ""
    number = -code if code < 0 else code - 128
    try:
        name = signal.Signals(number).name
    except ValueError:
        return f"ended with exit code {code}"
    return f"was ended by {name}" if code < 0 else f"ended with exit code {code} ({name})"
