"""Files of racy histories that have lost rows, cells, arguments or whole tables: what is left is never clean."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any, Final

import pytest

from hicache_obs.cli.judge import check_copies
from hicache_obs.errors import TraceError
from hicache_obs.readers.kineto import read_kineto
from hicache_obs.readers.nsys import read_nsys
from hicache_obs.readers.profile import Profile
from hicache_obs.testing import History
from hicache_obs.testing.kineto_writer import FORMATS, write_kineto
from hicache_obs.testing.nsys_writer import GENERATIONS, Table, nsys_tables, write_nsys
from hicache_obs.testing.profiled import Seen, profiled

FILES: Final = int(os.environ.get("HICACHE_OBS_FUZZ_DAMAGE", "6"))
"""Per history and format."""
RACY: Final = (
    "F:w1 L:w1",
    "F:w1 L:w1 F:r1 h<*",
    "F:w1 e=F G:w2 L<e L:w1 F:r1",
    "G:w2 g=G F:w1 e=G L<e L:w1",
    "L:w1 e=L F<e F:r1 G:w2 L:w2",
)
NOTHING: Final = (None, -1, (1 << 32) - 1)
"""What stands for no value."""
ARGUMENTS: Final = (
    "stream", "device", "context", "correlation", "wait_on_stream", "wait_on_cuda_event_record_corr_id",
    "wait_on_cuda_event_id",
)  # fmt: skip
Event = dict[str, Any]


def seen_of(text: str, seed: int) -> Seen:
    start = 1_700_000_000_000_000_000
    return profiled(History(text).records, seed=seed, threads=1, kinds=False, start_ns=start)


def damaged_events(events: list[Event], rng: random.Random) -> list[Event]:
    category = rng.choice(["kernel", "gpu_memcpy", "cuda_runtime", "cuda_sync"])
    mine = [event for event in events if event["cat"] == category]
    if not mine:
        return events
    victim = rng.choice(mine)
    how = rng.randrange(6)
    if how == 0:
        return [event for event in events if event["cat"] != category]
    if how == 1:
        return [event for event in events if event is not victim]
    if how == 2:
        return [*events, {**victim, "args": dict(victim["args"])}]
    if how == 3:
        victim["ts"] = rng.choice([-5, 0])
        return rng.sample(events, len(events))
    name, value = rng.choice(ARGUMENTS), rng.choice(NOTHING)
    for event in mine if how == 4 else [victim]:
        if name in event["args"]:
            event["args"][name] = value
    return events


def damaged_tables(tables: dict[str, Table], rng: random.Random) -> dict[str, Table]:
    name = rng.choice([name for name in tables if name.startswith("CUPTI")])
    columns, rows = tables[name]
    place, row = rng.randrange(len(columns)), rng.randrange(len(rows))
    how = rng.randrange(5)
    if how == 0:
        return {key: table for key, table in tables.items() if key != name}
    if how == 1 and len(rows) > 1:
        return {**tables, name: (columns, rows[:row] + rows[row + 1 :])}
    if how == 2:
        return {**tables, name: (columns, rng.sample([*rows, rows[row]], len(rows) + 1))}
    if how == 3:
        kept = [cells[:place] + cells[place + 1 :] for cells in rows]
        return {**tables, name: (columns[:place] + columns[place + 1 :], kept)}
    cells = (*rows[row][:place], rng.choice(NOTHING), *rows[row][place + 1 :])
    return {**tables, name: (columns, [*rows[:row], cells, *rows[row + 1 :]])}


def read_trace(path: Path, seen: Seen, rng: random.Random, damages: int) -> Profile:
    write_kineto(path, seen, FORMATS[rng.choice(list(FORMATS))])
    trace = json.loads(path.read_text())
    for _ in range(damages):
        trace["traceEvents"] = damaged_events(trace["traceEvents"], rng)
    path.write_text(json.dumps(trace))
    return read_kineto(path)


def read_export(path: Path, seen: Seen, rng: random.Random, damages: int) -> Profile:
    tables = nsys_tables([seen], GENERATIONS[rng.choice(list(GENERATIONS))])
    for _ in range(damages):
        tables = damaged_tables(tables, rng)
    path.unlink(missing_ok=True)
    return read_nsys(write_nsys(path, tables))


@pytest.mark.parametrize("read", [read_trace, read_export])
@pytest.mark.parametrize("text", RACY)
def test_no_loss_makes_a_race_clean(tmp_path: Path, text: str, read: Any) -> None:
    judged = 0
    assert check_copies(read(tmp_path / "whole", seen_of(text, 0), random.Random(0), 0)).outcome == "unknown"
    for number in range(FILES):
        rng, seen = random.Random(f"{text} {number}"), seen_of(text, number)
        try:
            profile = read(tmp_path / "damaged", seen, rng, rng.randint(1, 3))
        except TraceError:
            continue  # refused: that is an answer too
        assert check_copies(profile).outcome != "clean", number
        judged += 1

    assert judged > FILES // 2
