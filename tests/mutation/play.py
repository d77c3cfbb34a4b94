"""Plays mutants: which test notices one, and after how little work.

Two ways to put a mutant in place, both in a forked child. One that lies inside a function gets its code object swapped
in a process that has collected the tests already. Any other one (a table, a default) is loaded anew from the changed
tree, tests and all.

A first run without a mutant measures each test: its processor time, and the functions of the analyzer that it calls. A
test that never calls the changed function cannot notice, and is not run. The others come in order of time per success
to be expected, from what they caught before. A test that takes far longer than it should is a mutant that never ends,
which counts as caught.
"""

from __future__ import annotations

import ast
import gc
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import CodeType, FrameType, FunctionType, ModuleType

import pytest
from _pytest.runner import runtestprotocol
from mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
ANALYZER = ROOT / "hicache_obs" / "analyzer"
TESTS = ("tests/analyzer",)
OPTIONS = ("-q", "-s", "-p", "no:cacheprovider", "--no-header", "--tb=no")
SLOW = {
    "test_radius_is_what_went_wrong": {"taint", "spread"},
    "test_every_race_of_random_programs": {"graph", "witness"},
}
"""Tests that take long, and run for some modules alone: any other mutant that only they would catch has survived."""
MEMORY = 6 << 30
"""Bytes of data that a child may take: a mutant may fill a table for ever."""
TOO_LONG = "time limit"
SURVIVED = ""

Function = tuple[str, int]
"""Module and first line of a function."""
Profile = dict[str, tuple[float, frozenset[Function]]]
"""By test, its processor time in seconds and what it calls."""


def file_of(module: str) -> Path:
    return ANALYZER / f"{module}.py"


def module_of(mutant: Mutant) -> str:
    return mutant.module.rpartition(".")[2]


def _used_at_once(tree: ast.Module) -> set[str]:
    """Names that a module uses while it is loaded: a function among them has done some of its work by then."""
    plain = (node for node in tree.body if not isinstance(node, ast.FunctionDef | ast.ClassDef))
    return {part.id for node in plain for part in ast.walk(node) if isinstance(part, ast.Name)}


def home(mutant: Mutant) -> tuple[Function, str] | None:
    """The outermost function whose body holds the mutant, with its name; ``None`` if it must be loaded anew."""
    tree = ast.parse(mutant.source)
    node: ast.AST = tree
    at_once = _used_at_once(tree)
    fields = [*mutant.path[1:], ("", None)]
    for (field, position), (inner, _) in zip(mutant.path, fields, strict=True):
        found = getattr(node, field)
        node = found if position is None else found[position]
        if isinstance(node, ast.FunctionDef) and inner == "body":
            if any(isinstance(part, ast.Name) and part.id == "super" for part in ast.walk(node)):
                return None  # without its super() it would close over less, and no longer fit
            if node.name in at_once:
                return None
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            return (module_of(mutant), first), node.name
    return None


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads one module from a changed tree."""

    def __init__(self, mutant: Mutant) -> None:
        self._mutant = mutant

    def find_spec(self, name, path=None, target=None):
        if name != self._mutant.module:
            return None
        return importlib.machinery.ModuleSpec(name, self, origin=str(file_of(module_of(self._mutant))))

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self._mutant.tree(), file_of(module_of(self._mutant)), "exec"), module.__dict__)


def _codes(code: CodeType) -> Iterable[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _live() -> dict[tuple[Function, str], list[FunctionType]]:
    """The functions of the analyzer as they are loaded, by place and name."""
    for file in ANALYZER.glob("*.py"):
        importlib.import_module(f"hicache_obs.analyzer.{file.stem}")
    found: dict[tuple[Function, str], list[FunctionType]] = {}
    for thing in gc.get_objects():
        if type(thing) is FunctionType and Path(thing.__code__.co_filename).parent == ANALYZER:
            code = thing.__code__
            place = Path(code.co_filename).stem, code.co_firstlineno
            found.setdefault((place, code.co_name), []).append(thing)
    return found


def _function(test: str) -> str:
    return test.rpartition("::")[2].partition("[")[0]


def swap(mutant: Mutant, functions: dict[tuple[Function, str], list[FunctionType]]) -> None:
    """Give the live function the mutant's code."""
    place = home(mutant)
    assert place is not None
    (_, first), name = place
    module = compile(mutant.tree(), file_of(module_of(mutant)), "exec")
    (code,) = (code for code in _codes(module) if code.co_firstlineno == first and code.co_name == name)
    for function in functions[place]:
        function.__code__ = code


class Player:
    """A plugin of pytest that runs chosen tests until the first one fails.

    Args:
        order: Tests to run.
        seconds: What each should take.

    Attributes:
        noticed: The test that failed, ``SURVIVED`` if none did.
    """

    def __init__(self, order: Sequence[str], seconds: dict[str, float]) -> None:
        self._order = order
        self._seconds = seconds
        self.noticed: str | None = None

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.noticed = self.play({item.nodeid: item for item in session.items})
        return True

    def play(self, items: dict[str, pytest.Item]) -> str:
        for test in self._order:
            signal.setitimer(signal.ITIMER_PROF, 3 + 8 * self._seconds[test])
            signal.setitimer(signal.ITIMER_REAL, 120 + 60 * self._seconds[test])
            if any(report.failed for report in runtestprotocol(items[test], log=False, nextitem=None)):
                return test
        return SURVIVED


class Profiler:
    """A plugin of pytest that measures every test."""

    def __init__(self) -> None:
        self.tests: dict[str, tuple[float, list[Function]]] = {}
        self.failed: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            seen: dict[int, CodeType] = {}

            def note(frame: FrameType, event: str, arg: object, seen: dict[int, CodeType] = seen) -> None:
                seen[id(frame.f_code)] = frame.f_code

            started = time.process_time()
            threading.settrace(note)
            sys.settrace(note)
            reports = runtestprotocol(item, log=False, nextitem=None)
            sys.settrace(None)
            threading.settrace(None)
            spent = time.process_time() - started
            if any(report.failed for report in reports):
                self.failed.append(item.nodeid)
            codes = [code for code in seen.values() if Path(code.co_filename).parent == ANALYZER]
            self.tests[item.nodeid] = spent, [(Path(code.co_filename).stem, code.co_firstlineno) for code in codes]
        return True


def _fork(work: Callable[[], str]) -> tuple[int, int]:
    """Do ``work`` in a child; its process id, and a pipe that its answer comes from."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        answer = work()
        with os.fdopen(writing, "w") as pipe:
            pipe.write("." + answer)
        os._exit(0)
    finally:
        os._exit(1)


def _answer(reading: int, status: int) -> str:
    with os.fdopen(reading) as pipe:
        said = pipe.read()
    if os.WIFSIGNALED(status):
        return TOO_LONG
    return said[1:] if said else "crash"


def measure(file: Path, digest: str) -> tuple[Profile, list[str]]:
    """The profile, from ``file`` if it has one for ``digest``; and the tests that fail without a mutant."""
    if file.exists():
        known = json.loads(file.read_text())
        if known["digest"] == digest:
            return _profile(known["tests"]), []

    def work() -> str:
        profiler = Profiler()
        pytest.main([*OPTIONS, *TESTS], plugins=[profiler])
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps({"digest": digest, "tests": profiler.tests, "failed": profiler.failed}))
        return "done"

    child, reading = _fork(work)
    _, status = os.waitpid(child, 0)
    if _answer(reading, status) != "done":
        return {}, ["the run without a mutant"]
    known = json.loads(file.read_text())
    if known["failed"]:
        file.unlink()
    return _profile(known["tests"]), known["failed"]


def _profile(tests: dict[str, tuple[float, list[Function]]]) -> Profile:
    return {
        test: (seconds, frozenset((module, line) for module, line in functions))
        for test, (seconds, functions) in tests.items()
    }


class Stage:
    """Plays mutants, ``jobs`` at a time.

    Args:
        profile: Of the tests.
        note: Told of each mutant and of the test that noticed it.
    """

    def __init__(self, profile: Profile, jobs: int, note: Callable[[Mutant, str], None]) -> None:
        self._profile = profile
        self._seconds = {test: seconds for test, (seconds, _) in profile.items()}
        self._jobs = jobs
        self._note = note
        self._kills: Counter[tuple[str, str, str]] = Counter()

    def learn(self, mutant: Mutant, test: str) -> None:
        """``test`` noticed a mutant: it may notice others there."""
        self._kills[module_of(mutant), mutant.function, test] += 1
        self._kills[module_of(mutant), "", test] += 1

    def order(self, mutant: Mutant) -> list[str]:
        """Tests that can notice a mutant, the most promising first."""
        place = home(mutant)
        module = module_of(mutant)

        def cost(test: str) -> float:
            here = self._kills[module, mutant.function, test] + 0.1 * self._kills[module, "", test]
            return self._seconds[test] / (0.05 + here)

        able = (test for test, (_, calls) in self._profile.items() if place is None or place[0] in calls)
        return sorted((test for test in able if module in SLOW.get(_function(test), (module,))), key=cost)

    def play(self, mutants: Sequence[Mutant]) -> None:
        """Play them all, those first that are loaded anew: that needs a process without the analyzer."""
        anew = [mutant for mutant in mutants if home(mutant) is None]
        swapped = [mutant for mutant in mutants if home(mutant) is not None]
        self._run(anew, self._load)
        if swapped:
            inside = _Inside(lambda swapper: self._run(swapped, swapper), self._player)
            if pytest.main([*OPTIONS, *TESTS], plugins=[inside]) != pytest.ExitCode.OK:
                raise RuntimeError("pytest stopped before all mutants were played")

    def _player(self, mutant: Mutant) -> Player:
        return Player(self.order(mutant), self._seconds)

    def _load(self, mutant: Mutant) -> Callable[[], str]:
        player = self._player(mutant)

        def work() -> str:
            sys.meta_path.insert(0, Finder(mutant))
            pytest.main([*OPTIONS, *TESTS], plugins=[player])
            return "collection" if player.noticed is None else player.noticed

        return work

    def _run(self, mutants: Sequence[Mutant], prepare: Callable[[Mutant], Callable[[], str]]) -> None:
        waiting = list(reversed(mutants))
        running: dict[int, tuple[Mutant, int]] = {}
        while waiting or running:
            while waiting and len(running) < self._jobs:
                mutant = waiting.pop()
                child, reading = _fork(prepare(mutant))
                running[child] = mutant, reading
            child, status = os.wait()
            mutant, reading = running.pop(child)
            test = _answer(reading, status)
            if test in self._seconds:
                self.learn(mutant, test)
            self._note(mutant, test)


class _Inside:
    """A plugin of pytest that plays swapped mutants once the tests are collected."""

    def __init__(
        self, run: Callable[[Callable[[Mutant], Callable[[], str]]], None], player: Callable[[Mutant], Player]
    ) -> None:
        self._run = run
        self._player = player

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        functions = _live()
        gc.collect()
        gc.freeze()  # a child would copy what its collector looks at

        def prepare(mutant: Mutant) -> Callable[[], str]:
            player = self._player(mutant)

            def work() -> str:
                swap(mutant, functions)
                return player.play(items)

            return work

        self._run(prepare)
        return True
