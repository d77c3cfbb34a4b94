"""Names are looked up in source files: found, inherited, missing or no function, and never imported."""

from __future__ import annotations

import sys

import pytest

from hicache_obs.errors import ConfigError
from hicache_obs.sglang.resolve import Found, resolve
from hicache_obs.sglang.versions import Versions, parse_version

FILES = {
    "__init__.py": "",
    "base.py": "class Base:\n    def inherited(self): ...\n",
    "sub/__init__.py": "raise AssertionError('imported')\n",
    "sub/deep.py": """
from guinea.base import Base

def plain(): ...

class Thing(Base):
    alias = plain
    def method(self): ...
    @property
    def value(self): ...
    @staticmethod
    def static(): ...

class Child(Thing): ...
""",
}


@pytest.fixture
def guinea(tmp_path, monkeypatch):
    for name, text in FILES.items():
        file = tmp_path / "guinea" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("guinea", None)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("plain", Found.FUNCTION),
        ("Thing.method", Found.FUNCTION),
        ("Thing.static", Found.FUNCTION),
        ("Thing.inherited", Found.FUNCTION),
        ("Child.method", Found.FUNCTION),
        ("Child.inherited", Found.FUNCTION),
        ("Thing.value", Found.NOT_CALLABLE),
        ("Thing.alias", Found.NOT_CALLABLE),
        ("Thing.gone", Found.MISSING),
        ("Gone.method", Found.MISSING),
        ("gone", Found.MISSING),
    ],
)
def test_a_name_is_found_in_the_source(guinea, name, found):
    assert resolve(f"guinea.sub.deep.{name}") is found
    assert "guinea.sub" not in sys.modules


@pytest.mark.parametrize("name", ["guinea.nowhere.f", "nobody.has.this", "guinea"])
def test_a_module_that_is_not_there_is_missing(guinea, name):
    assert resolve(name) is Found.MISSING


def test_a_loaded_module_is_asked_itself():
    assert resolve("pathlib.Path.exists") is Found.FUNCTION
    assert resolve("pathlib.Path.parent") is Found.NOT_CALLABLE
    assert resolve("pathlib.Path.gone") is Found.MISSING


@pytest.mark.parametrize(
    ("text", "version"),
    [("0.5.23", (0, 5, 23)), ("v0.5.24rc1", (0, 5, 24)), ("0.5.9.post2", (0, 5, 9)), ("1", (1,))],
)
def test_a_version_is_its_release(text, version):
    assert parse_version(text) == version


def test_a_version_without_numbers_is_refused():
    with pytest.raises(ConfigError, match="version 'main': must begin with a release"):
        parse_version("main")


def test_ranges_end_before_and_may_be_open():
    assert (0, 5, 13) in Versions("0.5.13", "0.5.16")
    assert (0, 5, 16) not in Versions("0.5.13", "0.5.16")
    assert (9, 0) in Versions("0.5.21")
    assert (0, 5, 20) not in Versions("0.5.21")
