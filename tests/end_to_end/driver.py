"""Runs a command of ``hicache-obs`` and writes down what the engine counted: ``driver.py OUT.json COMMAND ARGUMENT...``

The product has no door for this. So the names under which the demo makes its engine, recorder and analyzer are
replaced here by ones that make the same and keep it. OUT has the exit code and, per observed run, the engine's own
counters, the recorder's, and the operations and times that reached the analyzer.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hicache_obs.cli import demo_run, main
from hicache_obs.controller.engine import Engine
from hicache_obs.recorder import RecordedDevice, Recorder
from hicache_obs.records import AnyRecord, EventWait, Kernel, Memcpy, Times, WaitStream

MESSAGES = {Kernel: "segment", Memcpy: "copy", WaitStream: "wait_stream", EventWait: "wait_event"}
"""Records that stand for something a stream runs, and the range around it."""


class Listening(demo_run.Analyzer):
    """The demo's analyzer, which also keeps what it is fed."""

    made: list[Listening] = []  # noqa: RUF012 of the class on purpose

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.records: list[AnyRecord] = []
        self.made.append(self)

    def feed(self, records: Sequence[AnyRecord]) -> None:
        self.records += records
        super().feed(records)


def keep(name: str) -> list[Any]:
    """Everything that the demo will make through its global ``name``."""
    make: Callable[..., Any] = getattr(demo_run, name)
    made: list[Any] = []

    def make_and_keep(*arguments: Any, **options: Any) -> Any:
        made.append(make(*arguments, **options))
        return made[-1]

    setattr(demo_run, name, make_and_keep)
    return made


def describe(engine: Engine, recorder: Recorder, records: Sequence[AnyRecord]) -> dict[str, Any]:
    """One observed run."""
    device = engine.runner.device
    assert isinstance(device, RecordedDevice)
    crew = getattr(device.bare, "crew", None)
    main_thread = threading.main_thread().native_id
    runs_on = {} if crew is None else {number: worker.thread.native_id for number, worker in enumerate(crew.workers)}
    controller = engine.controller
    return {
        "engine": {
            "layers": engine.runner.pool.layout.layers,
            "segments": engine.runner.launched_segments,
            "copies": controller.engine.launched_copies,
            "rounds": engine.scheduler.counters.rounds,
            **dataclasses.asdict(controller.counters),
        },
        "recorder": dataclasses.asdict(recorder.counters),
        "operations": [
            (runs_on.get(stream_of(record), main_thread), MESSAGES[type(record)], record.op)
            for record in records
            if type(record) in MESSAGES
        ],
        "times": [record.op for record in records if isinstance(record, Times)],
        "main_thread": main_thread,
    }


def stream_of(record: Any) -> int:
    """The stream that runs it."""
    return int(record.waiter if isinstance(record, WaitStream) else record.stream)


def run(out: Path, arguments: list[str]) -> int:
    """Run the command; returns its exit code."""
    engines, recorders = keep("build_engine"), keep("Recorder")
    setattr(demo_run, "Analyzer", Listening)  # noqa: B010 a type checker would not let a class be replaced
    code = main(arguments)
    observed = [engine for engine in engines if isinstance(engine.runner.device, RecordedDevice)]
    runs = [
        describe(engine, recorder, analyzer.records)
        for engine, recorder, analyzer in zip(observed, recorders, Listening.made, strict=True)
    ]
    out.write_text(json.dumps({"exit": code, "runs": runs}))
    return code


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
