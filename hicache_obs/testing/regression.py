"""A race found in a test, kept as a test of its own: the fewest steps that still show it, and what must hold.

The program is a scenario, which people can read and edit: the file fails while nothing orders the two steps, and
passes once the scenario has the edge that the engine now has.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache_obs.analyzer import explain
from hicache_obs.analyzer.graph import Graph
from hicache_obs.analyzer.witness import shared, table, witness
from hicache_obs.errors import InputError, TraceError
from hicache_obs.findings import Finding
from hicache_obs.readers.scenario import parse_scenario
from hicache_obs.records import OpId
from hicache_obs.testing.scenario_writer import Fields, render, write_scenario
from hicache_obs.testing.stream_watch import judge
from hicache_obs.trace import Trace
from hicache_obs.whole_file import replace_file

MAX_TRIALS: Final = 400
"""Programs tried while one is shortened; the shortest one so far is kept then."""
SOURCE: Final = "SCENARIO"


@dataclass(frozen=True, slots=True)
class Kept:
    """A race as a program of its own.

    Attributes:
        scenario: The program, as the object of a scenario file.
        earlier, later: Ids of the two steps.
    """

    scenario: Fields
    earlier: str
    later: str


def keep(trace: Trace, finding: Finding) -> Kept:
    """The shortest program found that has the race of ``finding``, for the same cause.

    Raises:
        TraceError: A scenario cannot say what the trace holds.
    """
    scenario, ids = write_scenario(trace)
    earlier, later = ids[finding.earlier.op], ids[finding.later.op]
    steps: list[Fields] = scenario["steps"]
    steps = steps[: 1 + next(at for at, step in enumerate(steps) if step["id"] == later)]
    trials, size = 0, len(steps) // 2
    while size:
        end = len(steps)
        while end > 0 and trials < MAX_TRIALS:
            begin = max(0, end - size)
            shorter = [step for at, step in enumerate(steps) if not begin <= at < end or step["id"] in (earlier, later)]
            if len(shorter) < len(steps):
                trials += 1
                if _races({**scenario, "steps": shorter}, earlier, later, finding):
                    steps = shorter
            end = begin
        size //= 2
    return _renumbered({**scenario, "steps": steps}, earlier, later)


def _races(scenario: Fields, earlier: str, later: str, like: Finding) -> bool:
    try:
        trace = parse_scenario(json.dumps(scenario).encode(), source=SOURCE)
    except TraceError:
        return False  # a step is gone that another one needs
    return any(
        (trace.label(found.earlier.op), trace.label(found.later.op)) == (earlier, later)
        and (found.hazard, found.cause) == (like.hazard, like.cause)
        for found in judge(trace).findings
    )


def _renumbered(scenario: Fields, earlier: str, later: str) -> Kept:
    ids = {step["id"]: f"s{number}" for number, step in enumerate(scenario["steps"], 1)}
    used = {step.get("stream") for step in scenario["steps"]}
    streams = {name: kind for name, kind in scenario.get("streams", {}).items() if name in used}
    steps = [{**step, "id": ids[step["id"]]} for step in scenario["steps"]]
    rest = {key: value for key, value in scenario.items() if key not in ("streams", "steps")}
    return Kept({**({"streams": streams} if streams else {}), **rest, "steps": steps}, ids[earlier], ids[later])


# -- what a kept test asserts --------------------------------------------------------------------------------


def assert_ordered(scenario: str, earlier: str, later: str) -> None:
    """Something orders step ``earlier`` before step ``later``, or the other way round, in every legal execution.

    Args:
        scenario: JSON text (``tests/cases/README.md`` has its keys).
        earlier, later: Step ids.

    Raises:
        AssertionError: Nothing does; says what happened, how to fix it, and two schedules that prove it.
        InputError: The scenario cannot be read, a step is not there, or the two have no page or buffer in common.
    """
    __tracebackhide__ = True
    trace = parse_scenario(scenario.encode(), source=SOURCE)
    pair = find_pair(trace, earlier, later)
    watched = judge(trace)
    for finding in (*watched.findings, *watched.unknown):
        labels = {trace.label(finding.earlier.op), trace.label(finding.later.op)}
        if labels == {earlier, later}:
            found = witness(trace, *pair)
            raise AssertionError(f"{explain(finding)}\n\n{table(found, trace.label)}")


def find_pair(trace: Trace, earlier: str, later: str) -> tuple[OpId, OpId]:
    """Operation ids of two steps that conflict.

    Raises:
        InputError: A step is not there, or the two have no page or buffer in common that one of them writes.
    """
    ops: list[OpId] = []
    for step in (earlier, later):
        labelled = [op for op, label in trace.labels.items() if label == step]
        if not labelled:
            known = ", ".join(dict.fromkeys(trace.labels.values()))
            raise InputError(f"{trace.source}: step {step}: must be one of {known}")
        ops.append(min(labelled))
    graph = Graph(trace)
    if not any(shared(a, b) for a in graph.of(ops[0]) for b in graph.of(ops[1])):
        raise InputError(
            f"{trace.source}: steps {earlier} and {later}: must touch a common page or buffer, at least one writing it"
        )
    return ops[0], ops[1]


# -- the file ------------------------------------------------------------------------------------------------

_TEXT: Final = '''"""{fingerprint}, {hazard}: found by {origin}.

Written by hicache-obs, and needs nothing else. It fails while nothing orders step {later} after step {earlier}. Once
the engine has the missing edge, put the same edge into SCENARIO, and it passes. To see the race run:
save SCENARIO as race.json, then `hicache-obs replay race.json --between {earlier} {later}`.
"""

from hicache_obs.testing.gated import assert_held_back
from hicache_obs.testing.regression import assert_ordered

EARLIER, LATER = "{earlier}", "{later}"
SCENARIO = r"""
{scenario}"""


def test_ordered():
    """Something orders the two steps, in every legal execution."""
    assert_ordered(SCENARIO, EARLIER, LATER)
'''
_GATED: Final = '''

def test_held_back():
    """With EARLIER held at a gate on a real device, LATER is held back too: no timing, no luck."""
    assert_held_back(SCENARIO, EARLIER, LATER, device="{device}")
'''


def write_test(folder: Path, kept: Kept, finding: Finding, *, origin: str, device: str | None) -> Path:
    """Write ``kept`` as a pytest file, whole or not at all; a file that is there already is left as it is.

    Args:
        folder: Made if it is not there.
        origin: Node id of the test that found it; part of the file's name.
        device: Device of the gated test (``threads`` or ``cuda``), ``None`` for no gated test.

    Raises:
        InputError: The folder cannot be made or written to.
    """
    short = re.sub(r"\W+", "_", origin.rpartition("::")[2]).strip("_").lower()[:48]
    name = f"{finding.fingerprint}_{short.removeprefix('test_')}".lower().replace("-", "_")
    path = folder / f"test_{name}.py"
    text = _TEXT.format(
        fingerprint=finding.fingerprint,
        hazard=finding.hazard.value,
        origin=re.sub(r"[^\w\s./:\[\]-]", "?", origin),
        earlier=kept.earlier,
        later=kept.later,
        scenario=render(kept.scenario),  # JSON holds no three quotes in a row, and a raw string keeps its backslashes
    )
    if device is not None:
        text += _GATED.format(device=device)
    else:
        text = text.replace("from hicache_obs.testing.gated import assert_held_back\n", "")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            replace_file(path, text.encode())
    except OSError as error:
        raise InputError(f"{folder}: {error.strerror}; must be a directory that can be written to") from None
    return path
