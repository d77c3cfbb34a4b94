"""Damaged trace files through the command line: a verdict or one clear line, never a traceback, and soon.

``make fuzz-inputs N=10000`` runs more. A failure keeps its input and prints the command that reads it again.
"""

from __future__ import annotations

import contextlib
import copy
import gzip
import io
import json
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hicache_obs.cli import main
from hicache_obs.readers.journal import JournalInfo, JournalWriter
from hicache_obs.readers.parquet import write_parquet
from hicache_obs.recorder import RingWriter
from hicache_obs.testing.kineto_writer import FORMATS, write_kineto
from hicache_obs.testing.nsys_writer import GENERATIONS, nsys_tables, write_nsys, write_nsys_folder
from hicache_obs.testing.profiled import Seen, profiled
from hicache_obs.testing.programs import random_program

INPUTS = int(os.environ.get("HICACHE_OBS_FUZZ_INPUTS", "300"))
KEPT = Path(os.environ.get("HICACHE_OBS_FUZZ_KEEP", ".cache/fuzz-inputs"))
LIMIT_S = 5
"""Of processor time, for one input; other programs may be busy."""
BLOCKS = 6
CASES = sorted((Path(__file__).parent.parent / "cases").glob("*.json"))
ODD: tuple[Any, ...] = (
    *(None, True, False, -1, 0, 1, 2**31 - 1, 2**31, 2**53, 2**63 - 1, 2**63, 2**64, 10**400, -(2**63)),
    *(0.5, -0.0, 1e308, "", " ", "1", "kv:1", "kv:", ":1", "kv:999999999", "\x00", "\ud800", "\u2028", "x" * 100_000),
    *([], {}, [[]], [None], {"": {}}, [1, 2, 3], [-1], ["kv:1", 1], [[1, 2]], "kernel", "legacy", "s1"),
)
RAW = (
    b"NaN",
    b"9" * 5000,
    b"-Infinity",
    b"1e400",
    b"1e-400",
    b"01",
    b"[" * 100_000,
    b"{" * 100_000,
    b'"\\ud800"',
    b"\xff",
    b"\xef\xbb\xbf",
    b"//",
    b",",
    b"",
)
WORDS = (0, 1, 2, 7, 8, 255, 256, 2**15, 2**16, 2**31 - 1, 2**31, 2**32 - 1, 2**62, 2**63 - 1, 2**63, 2**64 - 1)


# -- mutations -----------------------------------------------------------------------------------------------


def nodes(value: Any) -> Iterator[tuple[Any, Any]]:
    """Every container and key inside ``value``."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in list(items):
        yield value, key
        yield from nodes(inner)


def mutate_json(rng: random.Random, data: bytes) -> bytes:
    """One to three changes of structure: keys and steps removed, renamed, doubled, swapped, and odd values."""
    scenario = json.loads(data)
    for _ in range(rng.randint(1, 3)):
        places = list(nodes(scenario))
        inside = [place for place in places if place[1] not in ("expect", "source", "note", "title")]
        box, key = rng.choice(inside or places or [({"": 0}, "")])
        other, other_key = rng.choice(places or [({"": 0}, "")])
        steps = scenario.get("steps") if isinstance(scenario, dict) else None
        action = rng.randrange(8)
        if action == 0:
            del box[key]
        elif action == 1:
            box[key] = copy.deepcopy(rng.choice(ODD))
        elif action == 2:
            box[key], other[other_key] = copy.deepcopy(other[other_key]), copy.deepcopy(box[key])
        elif action == 3 and isinstance(box, dict):
            box[rng.choice((str(other_key), "Op", "", "nodes", "thread"))] = box.pop(key)
        elif action == 4 and isinstance(box, list):
            box.insert(rng.randint(0, len(box)), copy.deepcopy(box[key]))
        elif isinstance(steps, list) and len(steps) > 1:
            a, b = rng.sample(range(len(steps)), 2)
            if action == 5:
                steps[a], steps[b] = steps[b], steps[a]
            elif isinstance(steps[a], dict) and isinstance(steps[b], dict):
                name = "id" if action == 6 else rng.choice(sorted(steps[a]) or ["id"])
                steps[b][name] = steps[a].get(name)
    return json.dumps(scenario).encode()


def mutate_text(rng: random.Random, data: bytes) -> bytes:
    """Something that is no JSON, or hardly, in place of a number or at any place."""
    at = rng.randrange(len(data) + 1)
    digits = [index for index, byte in enumerate(data) if 48 <= byte <= 57]
    if digits and rng.random() < 0.6:
        at = rng.choice(digits)
    return data[:at] + rng.choice(RAW) + data[at + rng.randint(0, 2) :]


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Flipped, cut, doubled or overwritten; a third of the time near the beginning, where headers are."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        if not changed:
            break
        top = len(changed) if rng.random() < 0.67 else min(len(changed), 1024)
        at = rng.randrange(top)
        action = rng.randrange(7)
        if action == 0:
            changed[at] ^= 1 << rng.randrange(8)
        elif action == 1:
            changed[at] = rng.choice((0, 1, 127, 128, 255))
        elif action == 2:
            del changed[at:]
        elif action == 3:
            size = rng.choice((1, 4, 8, 128))
            changed[at : at + size] = changed[(start := rng.randrange(len(changed))) : start + size]
        elif action == 4:
            del changed[at : at + rng.choice((1, 4, 8, 64, 128))]
        elif action == 5:
            changed[at:at] = rng.randbytes(rng.choice((1, 4, 8, 64)))
        else:
            size = rng.choice((1, 2, 4, 8))
            place = at - at % size
            changed[place : place + size] = (rng.choice(WORDS) % (1 << 8 * size)).to_bytes(size, "little")
    return bytes(changed)


# -- inputs --------------------------------------------------------------------------------------------------


def scenario_input(rng: random.Random, folder: Path) -> Path:
    """A damaged scenario."""
    path = folder / "case.json"
    data = rng.choice(CASES).read_bytes()
    path.write_bytes(rng.choice((mutate_json, mutate_json, mutate_json, mutate_text, mutate_bytes))(rng, data))
    return path


def ring_input(rng: random.Random, folder: Path) -> Path:
    """A damaged ring file."""
    path = folder / "ring"
    writer = RingWriter(path, slots=64, arena_words=128)
    for record in random_program(rng.randrange(1000)):
        writer.append(record)  # type: ignore[arg-type] # every kind it makes is one
    writer.close()
    data = path.read_bytes()
    if rng.random() < 0.4:  # words of the header
        words = bytearray(data)
        at = 8 * rng.randrange(80)
        words[at : at + 8] = (rng.choice(WORDS) % 2**64).to_bytes(8, "little")
        data = bytes(words)
    elif rng.random() < 0.6:  # a slot
        start = 4096 + 128 * rng.randrange(24)
        data = data[:start] + mutate_bytes(rng, data[start : start + 128])[:128].ljust(128, b"\0") + data[start + 128 :]
    else:
        data = mutate_bytes(rng, data)
    path.write_bytes(data)
    return path


def journal_input(rng: random.Random, folder: Path) -> Path:
    """A damaged journal: one of its segments, or the folder with segments lost, swapped or damaged."""
    path = folder / "journal"
    writer = JournalWriter(path, segment_bytes=20_000)
    for _ in range(rng.randint(1, 3)):
        writer.write(random_program(rng.randrange(1000)))  # type: ignore[arg-type] # as above
    writer.close()
    segments = sorted(path.iterdir())
    victim = rng.choice(segments)
    if rng.random() < 0.75:
        victim.write_bytes(mutate_bytes(rng, victim.read_bytes()))
    action = rng.randrange(6)
    if action == 0:
        victim.unlink()
    elif action == 1:
        victim.rename(path / rng.choice(("rank0-000000.arrows", "rank0-999999.arrows", "rank7-000001.arrows", "x")))
    elif action == 2:
        (path / f"rank0-{rng.randint(1, 9):06}.arrows").write_bytes(victim.read_bytes())
    elif action == 3:
        (path / "rank0-000099.arrows").mkdir()
    return victim if action > 3 and victim.exists() and rng.random() < 0.5 else path


def parquet_input(rng: random.Random, folder: Path) -> Path:
    """A damaged Parquet file of records: bytes of it, mostly near its end, where the file says what is where."""
    path = folder / "records.parquet"
    program: Any = random_program(rng.randrange(1000))
    write_parquet(path, [program], JournalInfo())
    data = path.read_bytes()
    start = rng.choice([0, max(0, len(data) - 2000), rng.randrange(len(data))])
    path.write_bytes(data[:start] + mutate_bytes(rng, data[start:]))
    return path


def _seen(rng: random.Random) -> Seen:
    """What a profiler saw of a random history."""
    return profiled(random_program(rng.randrange(1000)), seed=1, start_ns=1_700_000_000_000_000_000)  # type: ignore[arg-type] # as above


def export_input(rng: random.Random, folder: Path) -> Path:
    """A damaged export of Nsight Systems: odd values, bytes, or a table of a folder."""
    tables = nsys_tables([_seen(rng)], rng.choice(tuple(GENERATIONS.values())))
    if rng.random() < 0.4:
        for name in rng.sample(sorted(tables), min(3, len(tables))):
            columns, rows = tables[name]
            row, column = rng.randrange(len(rows)), rng.randrange(len(columns))
            odd = rng.choice((*WORDS[:14], "", "1; DROP TABLE StringIds", b"\xff", 1e300, None, -1))
            rows[row] = (*rows[row][:column], odd, *rows[row][column + 1 :])
        return write_nsys(folder / "export.sqlite", tables)
    if rng.random() < 0.5:
        path = write_nsys(folder / "export.sqlite", tables)
        path.write_bytes(mutate_bytes(rng, path.read_bytes()))
        return path
    path = write_nsys_folder(folder / "export", tables, kind=rng.choice(("parquet", "arrow")))
    victim = rng.choice(sorted(path.iterdir()))
    victim.write_bytes(mutate_bytes(rng, victim.read_bytes()))
    return path


def trace_input(rng: random.Random, folder: Path) -> Path:
    """A damaged trace of torch.profiler, gzipped at times; damaged before or after."""
    path = write_kineto(folder / "trace.json", _seen(rng), rng.choice(tuple(FORMATS.values())))
    mutate = rng.choice((mutate_json, mutate_json, mutate_text, mutate_bytes))
    data = path.read_bytes() if rng.random() < 0.2 else mutate(rng, path.read_bytes())
    if rng.random() < 0.3:
        data = mutate_bytes(rng, gzip.compress(data)) if rng.random() < 0.5 else gzip.compress(data)
    path.write_bytes(data)
    return path


MAKERS: tuple[Callable[[random.Random, Path], Path], ...] = (
    scenario_input,
    ring_input,
    journal_input,
    export_input,
    trace_input,
    parquet_input,
)
COMMANDS = (["check"], ["check", "--json"], ["replay"])
PROFILE_COMMANDS = (["analyze"], ["analyze", "--json"])
CONVERTED = ("json", "pftrace", "parquet", "arrows")


# -- running -------------------------------------------------------------------------------------------------


class Slow(BaseException):
    """An input took longer than the limit."""


def _alarm(*_: object) -> None:
    raise Slow


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code, and what was printed as an error."""
    error = io.StringIO()
    before = signal.signal(signal.SIGPROF, _alarm)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(error):
            code = main(arguments)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    return code, error.getvalue()


def fault(path: Path, arguments: list[str]) -> tuple[str, int]:
    """What is wrong with how an input was taken, empty if nothing; and the exit code."""
    try:
        code, error = run(arguments)
    except Slow:
        return f"more than {LIMIT_S} s", 70
    if code not in (0, 1, 2, 3):
        return f"exit code {code}\n{error}", code
    if "Traceback" in error or "Error:" in error or len(error.splitlines()) != (code == 2):
        return f"exit code {code}, and this on standard error:\n{error}", code
    if code == 2 and str(path) not in error:
        return f"the error does not name the file: {error}", code
    return "", code


@pytest.mark.parametrize("block", range(BLOCKS))
def test_damaged_inputs(block: int, tmp_path: Path) -> None:
    """Each is judged, or refused in one line that names it; some are judged, and some are refused."""
    codes: Counter[int] = Counter()
    for seed in range(block, INPUTS, BLOCKS):
        rng = random.Random(seed)
        folder = tmp_path / str(seed)
        folder.mkdir()
        maker = MAKERS[seed // BLOCKS % len(MAKERS)]
        path = maker(rng, folder)
        command = rng.choice(PROFILE_COMMANDS if maker in (export_input, trace_input) else COMMANDS)
        written = rng.random()
        if written < 0.3:
            command = ["convert", "-o", str(folder / f"out.{rng.choice(CONVERTED)}")]
        elif written < 0.5:
            command = ["report", "-o", str(folder / "report.html")]
        wrong, code = fault(path, [*command, str(path)])
        if wrong:
            KEPT.mkdir(parents=True, exist_ok=True)
            kept = KEPT / f"{seed}-{path.name}"
            shutil.copytree(path, kept, dirs_exist_ok=True) if path.is_dir() else shutil.copy(path, kept)
            pytest.fail(f"seed {seed}: hicache-obs {' '.join(command)} {kept}: {wrong}", pytrace=False)
        codes[code] += 1
        shutil.rmtree(folder)
    assert codes[2] > INPUTS / BLOCKS / 10, codes
    assert codes[0] + codes[1] + codes[3] > INPUTS / BLOCKS / 10, codes
