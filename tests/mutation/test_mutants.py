"""The mutants themselves: what is changed, what is left alone, and names that stay."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def made() -> ModuleType:
    """The module ``mutants``, which is no part of the package."""
    spec = importlib.util.spec_from_file_location("hicache_obs_mutants", HERE / "mutants.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


RULE = '''"""A rule."""
LIMIT = 1 << 13
TABLE = {Mode.READ: 1}; Either = Kernel | Memcpy

def rule(a: int | None, b=0):
    """Not this 1."""
    if a is None or not b:
        raise ValueError(f"{a + 1}")
    for x in a:
        if x:
            continue
        self.join(x)
        self.seen[x] = True
    local = min(a)
    return local < 2

class Kept(Struct, frozen=True):
    """No rule."""
'''


def test_every_kind_of_change(made: ModuleType) -> None:
    """One of each that the text allows, and none of an annotation, a text, a message, a limit or a class."""
    found = [(m.line, m.function, m.change) for m in made.mutants("a.rule", RULE)]

    assert found == [
        (3, "<module>", "READ to WRITE"),
        (5, "rule", "0 to 1"),
        (7, "rule", "to And"),
        (7, "rule", "comparison 0 to IsNot"),
        (7, "rule", "not removed"),
        (10, "rule", "condition negated"),
        (11, "rule", "removed"),
        (12, "rule", "removed"),
        (13, "rule", "removed"),
        (13, "rule", "to False"),
        (14, "rule", "min to max"),
        (15, "rule", "comparison 0 to LtE"),
        (15, "rule", "2 to 3"),
    ]


def test_each_is_one_line_that_compiles(made: ModuleType) -> None:
    """And another one than before."""
    lines = {m.change: m.lines() for m in made.mutants("a.rule", RULE) if m.line in (7, 12, 15)}
    for mutant in made.mutants("a.rule", RULE):
        compile(mutant.tree(), "rule", "exec")

    assert lines == {
        "to And": ("if a is None or not b:", "if a is None and (not b):"),
        "comparison 0 to IsNot": ("if a is None or not b:", "if a is not None or not b:"),
        "not removed": ("if a is None or not b:", "if a is None or b:"),
        "removed": ("self.join(x)", "pass"),
        "comparison 0 to LtE": ("return local < 2", "return local <= 2"),
        "2 to 3": ("return local < 2", "return local < 3"),
    }


def test_keys_stay_when_other_lines_change(made: ModuleType) -> None:
    """The list of equivalent mutants must not need an edit for every commit; two equal lines are told apart."""
    before = {m.key for m in made.mutants("a.rule", RULE)}
    after = {
        m.key
        for m in made.mutants("a.rule", RULE.replace("LIMIT = 1 << 13\n", "LIMIT = 1\n\n\n\n").replace("< 2", "< 5"))
    }
    twice = [
        m.key for m in made.mutants("a.rule", RULE.replace("        self.join(x)\n", "        self.join(x)\n" * 2))
    ]

    assert len(before) == 13
    assert len(before - after) == 2
    assert len(twice) == len(set(twice)) == 14


def test_equivalent_mutants_exist_and_have_a_reason(made: ModuleType, checkout: Path) -> None:
    """A key whose line is gone must go too, or it may come to hide another mutant."""
    folder = checkout / "hicache_obs" / "analyzer"
    keys = {
        m.key
        for file in folder.glob("*.py")
        for m in made.mutants(f"hicache_obs.analyzer.{file.stem}", file.read_text())
    }
    listed = tomllib.loads((HERE / "equivalent.toml").read_text())

    assert len(keys) > 1000
    assert set(listed) <= keys
    assert all(len(entry["reason"]) > 20 for entry in listed.values())
