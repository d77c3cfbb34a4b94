"""Runs the analyzer's tests against mutants of its rules and tells which ones nobody notices: ``make mutants``.

Results are kept in ``.cache/mutants.json``, by mutant the test that noticed it: a run that was interrupted goes on
where it was, and a caught mutant is not tried again while its statement stays. ``--fresh`` forgets them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(Path(__file__).resolve().parent), str(ROOT)]
# Loaded once, before the forks; the analyzer must not be, or no child could load a mutant of it.
import numpy  # noqa: E402, F401
import torch  # noqa: E402
from mutants import Mutant, mutants  # noqa: E402
from play import SURVIVED, Stage, file_of, measure, module_of  # noqa: E402

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

STATE = ROOT / ".cache" / "mutants.json"
PROFILE = ROOT / ".cache" / "mutants-profile.json"
EQUIVALENT = Path(__file__).with_name("equivalent.toml")
TEXT = {"__init__", "explain", "tally"}
"""Modules that hold no rule."""


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


def digest() -> str:
    """Of all that the profile hangs on."""
    whole = hashlib.sha256()
    for folder in ("hicache_obs", "tests/analyzer", "tests/mutation"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            whole.update(file.read_bytes())
    return whole.hexdigest()


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
        if mutant.key in equivalent:
            verdict = "equivalent"
        else:
            verdict = "survived" if results[mutant.key] == SURVIVED else "caught"
        counts.setdefault(module_of(mutant), Counter())[verdict] += 1
        if verdict == "survived":
            survivors.append(mutant)
    for mutant in survivors:
        print(f"{mutant.key}  {module_of(mutant)}.py:{mutant.line}  {mutant.function}: {mutant.change}")
        before, after = mutant.lines()
        print(f"    - {before}\n    + {after}")
    total = sum(counts.values(), Counter[str]())
    print(f"\n{'module':12} {'mutants':>8} {'caught':>8} {'survived':>9} {'equivalent':>11} {'share':>7}")
    for module, row in (*sorted(counts.items()), ("all", total)):
        judged = row["caught"] + row["survived"]
        share = f"{100 * row['caught'] / judged:.1f} %" if judged else "-"
        print(f"{module:12} {row.total():8} {row['caught']:8} {row['survived']:9} {row['equivalent']:11} {share:>7}")
    return total["caught"] >= 0.95 * (total["caught"] + total["survived"])


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sample", type=int, help="so many mutants, chosen at random (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--modules", nargs="*", help="modules of the analyzer (default: all that hold rules)")
    parser.add_argument("--fresh", action="store_true", help="forget earlier results")
    parser.add_argument("--list", action="store_true", help="only print how many mutants there are")
    options = parser.parse_args(arguments)
    known = sorted(path.stem for path in file_of("x").parent.glob("*.py") if path.stem not in TEXT)
    options.modules = options.modules or known
    if unknown := set(options.modules) - set(known):
        parser.error(f"--modules {' '.join(sorted(unknown))}: must be among {' '.join(known)}")
    return options


def main() -> int:
    options = parse()
    os.chdir(ROOT)
    os.environ.update(PYTEST_DISABLE_PLUGIN_AUTOLOAD="1", PYTHONPATH=str(ROOT))
    os.environ.update(HICACHE_OBS_FUZZ="1600", HICACHE_OBS_BLAST="4")
    torch.set_num_threads(1)  # a child of a process with more threads would wait for them
    equivalent = {key: entry["reason"] for key, entry in tomllib.loads(EQUIVALENT.read_text()).items()}
    every = load(options.modules)
    chosen = sorted(every, key=lambda mutant: draw(mutant, options.seed))[: options.sample]
    print(f"{len(chosen)} of {len(every)} mutants of {len(options.modules)} modules", flush=True)
    if options.list:
        return 0
    profile, failed = measure(PROFILE, digest())
    if failed:
        print(f"without any mutant fail: {' '.join(failed)}", file=sys.stderr)
        return 2
    results = {} if options.fresh or not STATE.exists() else json.loads(STATE.read_text())
    todo = [mutant for mutant in chosen if mutant.key not in equivalent and not results.get(mutant.key)]
    started, done = time.monotonic(), 0

    def note(mutant: Mutant, test: str) -> None:
        nonlocal done
        results[mutant.key] = test
        done += 1
        save(results)
        left = f"{done} of {len(todo)} in {time.monotonic() - started:.0f} s"
        print(f"\r{left}", end="" if done < len(todo) else "\n", file=sys.stderr, flush=True)

    stage = Stage(profile, options.jobs, note)
    for mutant in every:
        if results.get(mutant.key) in profile:
            stage.learn(mutant, results[mutant.key])
    try:
        stage.play(todo)
    except KeyboardInterrupt:
        chosen = [mutant for mutant in chosen if mutant.key in equivalent or mutant.key in results]
        print(f"\ninterrupted; this is of {len(chosen)} mutants")
    return 0 if report(chosen, results, equivalent) else 1


if __name__ == "__main__":
    sys.exit(main())
