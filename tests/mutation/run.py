"""Runs the analyzer's tests against mutants of its rules and tells which ones nobody notices: ``make mutants``.

Each mutant lives in a forked child that imports the analyzer anew, the mutated module among it. It first judges random
programs as ``test_fuzz.py`` does, whose races the parent has looked up by brute force. What survives that runs pytest:
the tests that know the module best, then the others that are quick. A child that takes much more processor time than
the tests need is a mutant that never ends, and counts as caught. Results are kept in ``.cache/mutants.json``: a run
that was interrupted goes on where it was, and a caught mutant is not tried again while its statement stays.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import importlib.abc
import importlib.machinery
import io
import json
import os
import resource
import sys
import time
from collections import Counter
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]
# Loaded once, before the forks; the analyzer must not be, or no child could load a mutant of it.
import numpy  # noqa: E402, F401
import pytest  # noqa: E402
import torch  # noqa: E402
from mutants import Mutant, mutants  # noqa: E402

from hicache_obs.records import Record  # noqa: E402
from hicache_obs.testing.brute_force import misuses, races  # noqa: E402
from hicache_obs.testing.programs import random_program  # noqa: E402
from hicache_obs.testing.recording import RecordingSink  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Pairs = set[tuple[int, int]]
PROGRAMS: list[tuple[list[Record], Pairs, Pairs, Pairs]] = []
"""Random programs with their races, pairs that a poll alone orders, and misuses; filled before the first fork."""
STATE = ROOT / ".cache" / "mutants.json"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
ORDER = ("test_order_rules.py", "test_cases.py", "test_fuzz.py")
FIRST = {
    "stalls": ("test_stalls.py", "test_cases.py"),
    "plan": ("test_stalls.py", "test_cases.py", "test_remedy.py"),
    "graph": ("test_witness.py", "test_stalls.py"),
    "witness": ("test_witness.py",),
    "fence_cost": ("test_fence_cost.py", "test_bounds.py"),
    "taint": ("test_taint.py", "test_bounds.py", "test_blast_radius.py"),
    "spread": ("test_taint.py", "test_blast_radius.py"),
    "remedy": ("test_remedy.py", "test_cases.py"),
    "ownership": ("test_ownership.py", "test_cases.py", "test_fuzz.py", "test_bounds.py"),
    "foreign": ("test_unknown.py", "test_order_rules.py"),
    "early": ("test_unknown.py", "test_order_rules.py"),
    "causes": ("test_order_rules.py", "test_cases.py", "test_explain.py", "test_unknown.py"),
}
"""Tests that know a module best; other modules have those in ``ORDER``."""
LONG = ("test_fuzz.py", "test_order_rules.py", "test_bounds.py", "test_witness.py", "test_blast_radius.py")
"""Tests that take long, and are run only for modules that have them in ``FIRST`` or ``ORDER``, or for lack of a row in
``FIRST``: a mutant that only another of them would catch counts as survived."""
GENERAL = LONG[:3]
TEXT = {"__init__", "explain", "tally"}
"""Modules that hold no rule."""


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed tree."""

    def __init__(self, name: str, file: Path, tree: ast.Module) -> None:
        self._name, self._file, self._tree = name, file, tree

    def find_spec(self, name, path=None, target=None):
        if name != self._name:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(self._file))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._tree, self._file, "exec"), module.__dict__)


def tests_of(module: str) -> list[list[str]]:
    """Arguments of the two runs of pytest that a mutant of ``module`` has to survive."""
    folder = ROOT / "tests" / "analyzer"
    first = [name for name in FIRST.get(module, ORDER) if (folder / name).exists()]
    rest = sorted({path.name for path in folder.glob("test_*.py")}.difference(first, LONG))
    rest += [name for name in GENERAL if name not in first and module not in FIRST]
    return [[str(folder / name) for name in names] for names in (first, rest)]


def misjudged() -> bool:
    """Whether the analyzer says something else than brute force, as ``test_agrees_with_brute_force`` asks."""
    from hicache_obs.analyzer import Analyzer

    for records, expected, weak, misused in PROGRAMS:
        sink = RecordingSink()
        analyzer = Analyzer(sink)
        analyzer.feed(records)
        analyzer.finish()
        pairs = set(sink.pairs)
        if (pairs, sink.weak_pairs - pairs, set(sink.misuses)) != (expected, weak, misused):
            return True
    return False


def play(mutant: Mutant | None, module: str) -> bool:
    """In a child: whether the tests notice the mutant."""
    if mutant is not None:
        sys.meta_path.insert(0, Finder(mutant.module, file_of(module), mutant.tree()))
    if (module not in FIRST or module == "ownership") and misjudged():
        return True
    options = ["-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
    for files in tests_of(module):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            if pytest.main([*options, *files]) != 0:
                return True
    return False


def start(mutant: Mutant | None, module: str, limit_s: int) -> int:
    """Fork a child that plays; its process id. Its exit code is 1 if the tests noticed."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_CPU, (limit_s, limit_s + 5))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        code = int(play(mutant, module))
    finally:
        os._exit(code)


def file_of(module: str) -> Path:
    return ROOT / "hicache_obs" / "analyzer" / f"{module}.py"


def load(modules: list[str]) -> list[Mutant]:
    """All mutants of the modules."""
    return [
        mutant
        for module in modules
        for mutant in mutants(f"hicache_obs.analyzer.{module}", file_of(module).read_text())
    ]


def draw(mutant: Mutant, seed: int) -> str:
    """Chance by which a sample takes it, lowest first; it does not hang on what other mutants there are."""
    return hashlib.sha256(f"{seed} {mutant.key}".encode()).hexdigest()


def name(mutant: Mutant) -> str:
    return mutant.module.rpartition(".")[2]


def run(todo: list[Mutant], jobs: int, results: dict[str, str], limit_s: int) -> None:
    """Play every mutant; ``results`` gets caught or survived, and is written as they come."""
    running: dict[int, Mutant] = {}
    waiting = list(reversed(todo))
    done = 0
    started = time.monotonic()
    while waiting or running:
        while waiting and len(running) < jobs:
            mutant = waiting.pop()
            running[start(mutant, name(mutant), limit_s)] = mutant
        child, status = os.wait()
        mutant = running.pop(child)
        results[mutant.key] = "survived" if status == 0 else "caught"
        done += 1
        save(results)
        print(f"\r{done} of {len(todo)} in {time.monotonic() - started:.0f} s", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)


def save(results: dict[str, str]) -> None:
    STATE.parent.mkdir(exist_ok=True)
    draft = STATE.with_suffix(".part")
    draft.write_text(json.dumps(results, indent=0))
    draft.replace(STATE)


def report(chosen: list[Mutant], results: dict[str, str], equivalent: dict[str, str]) -> bool:
    """Print the table and every survivor; whether at least 95 % were caught."""
    counts: dict[str, Counter[str]] = {}
    survivors = []
    for mutant in chosen:
        verdict = "equivalent" if mutant.key in equivalent else results[mutant.key]
        counts.setdefault(name(mutant), Counter())[verdict] += 1
        if verdict == "survived":
            survivors.append(mutant)
    for mutant in survivors:
        print(f"{mutant.key}  {name(mutant)}.py:{mutant.line}  {mutant.function}: {mutant.change}")
        before, after = mutant.lines()
        print(f"    - {before}\n    + {after}")
    total = sum(counts.values(), Counter[str]())
    print(f"\n{'module':12} {'mutants':>8} {'caught':>8} {'survived':>9} {'equivalent':>11} {'share':>7}")
    for module, row in (*sorted(counts.items()), ("all", total)):
        judged = row["caught"] + row["survived"]
        share = f"{100 * row['caught'] / judged:.1f} %" if judged else "-"
        print(f"{module:12} {row.total():8} {row['caught']:8} {row['survived']:9} {row['equivalent']:11} {share:>7}")
    return total["caught"] >= 0.95 * (total["caught"] + total["survived"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="so many mutants, chosen at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--modules", nargs="*", help="modules of the analyzer (default: all that hold rules)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--list", action="store_true", help="only print how many mutants there are")
    options = parser.parse_args()
    os.chdir(ROOT)
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONPATH=str(ROOT))
    os.environ.update(HICACHE_OBS_FUZZ="400", HICACHE_OBS_BLAST="4")
    torch.set_num_threads(1)  # a child of a process with more threads would wait for them
    known = sorted(path.stem for path in file_of("x").parent.glob("*.py") if path.stem not in TEXT)
    modules = options.modules or known
    if unknown := set(modules) - set(known):
        parser.error(f"--modules {' '.join(sorted(unknown))}: must be among {' '.join(known)}")
    equivalent = {key: entry["reason"] for key, entry in tomllib.loads(EQUIVALENT.read_text()).items()}
    every = load(modules)
    chosen = every
    if options.sample is not None and options.sample < len(every):
        chosen = sorted(every, key=lambda mutant: draw(mutant, options.seed))[: options.sample]
    print(f"{len(chosen)} of {len(every)} mutants of {len(modules)} modules", flush=True)
    if options.list:
        return 0
    results = {} if options.fresh or not STATE.exists() else json.loads(STATE.read_text())
    for program in map(random_program, range(300)):
        racing = races(program, polled=True)
        PROGRAMS.append((program, racing, races(program, polled=False) - racing, misuses(program)))
    _, status, spent = os.wait4(start(None, "order", 3600), 0)
    if status != 0:
        print("the tests of the analyzer fail without any mutant", file=sys.stderr)
        return 2
    limit_s = 20 + round(3 * spent.ru_utime)
    print(f"all tests take {spent.ru_utime:.0f} s of processor time; a mutant gets {limit_s}", flush=True)
    todo = [mutant for mutant in chosen if mutant.key not in equivalent and results.get(mutant.key) != "caught"]
    try:
        run(todo, options.jobs, results, limit_s)
    except KeyboardInterrupt:
        chosen = [mutant for mutant in chosen if mutant.key in equivalent or mutant.key in results]
        print(f"\ninterrupted; this is of {len(chosen)} mutants")
    return 0 if report(chosen, results, equivalent) else 1


if __name__ == "__main__":
    sys.exit(main())
