"""The packaging map in pyproject.toml, the links and the tree describe the same package."""

import importlib
import importlib.metadata
import pkgutil
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import hicache_obs

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

OUTER = ["controller", "dashboards", "exporters"]


@pytest.fixture
def build(checkout: Path) -> dict[str, Any]:
    """The ``[tool.setuptools]`` table."""
    return tomllib.loads((checkout / "pyproject.toml").read_text())["tool"]["setuptools"]


def folders(build: dict[str, Any], checkout: Path) -> dict[str, Path]:
    """Import name → real folder, for each entry of the package-dir map."""
    return {package: checkout / folder for package, folder in build["package-dir"].items()}


def modules_under(folder: Path) -> list[Path]:
    """Python files below ``folder``, not through the links to the outer folders."""
    links = [link for link in folder.iterdir() if link.is_symlink()]
    return [path for path in folder.rglob("*.py") if not any(path.is_relative_to(link) for link in links)]


def test_every_package_folder_is_listed(build: dict[str, Any], checkout: Path) -> None:
    """A folder with an ``__init__.py`` that is not listed would be missing from the wheel only."""
    found = [
        ".".join((package, *module.parent.relative_to(folder).parts))
        for package, folder in folders(build, checkout).items()
        for module in modules_under(folder)
        if module.name == "__init__.py"
    ]

    assert sorted(found) == build["packages"]


def test_every_code_folder_is_a_package(build: dict[str, Any], checkout: Path) -> None:
    """A folder of modules without ``__init__.py`` would be left out of the wheel."""
    bare = [
        str(module)
        for folder in folders(build, checkout).values()
        for module in modules_under(folder)
        if not (module.parent / "__init__.py").exists()
    ]

    assert bare == []


@pytest.mark.parametrize("name", OUTER)
def test_type_checkers_reach_the_outer_folders(name: str, checkout: Path) -> None:
    """The links in hicache_obs/ are what mypy and pyright follow; the build does not need them."""
    link = checkout / "hicache_obs" / name

    assert link.is_symlink()
    assert link.readlink() == Path("..", name)


@pytest.mark.parametrize("name", OUTER)
def test_no_generic_top_level_name(name: str) -> None:
    """An isolated interpreter (no current directory on sys.path) cannot import ``controller`` and so on."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({name!r}) is not None)"

    assert subprocess.run([sys.executable, "-I", "-c", code], check=False).returncode == 0


def test_package_declares_its_types() -> None:
    assert Path(hicache_obs.__file__).with_name("py.typed").exists()


def test_every_module_imports() -> None:
    """No module is broken on its own, and none needs an extra that is not installed to be imported."""
    names = [module.name for module in pkgutil.walk_packages(hicache_obs.__path__, "hicache_obs.")]
    for name in names:
        if not name.endswith("__main__"):
            importlib.import_module(name)

    assert {f"hicache_obs.{name}" for name in OUTER} <= set(names)


def test_help_does_not_import_torch() -> None:
    """Importing torch takes seconds, and a reader of traces need not wait for it."""
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hicache_obs", "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in result.stderr.splitlines()}

    assert result.returncode == 0, result.stderr
    assert "Usage" in result.stdout
    assert "hicache_obs" in imported
    assert "torch" not in imported


def test_installed_metadata_is_this_trees(checkout: Path) -> None:
    """A stale install would test something else."""
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="hicache-obs")

    assert importlib.metadata.version("hicache-obs") == hicache_obs.__version__
    assert script.value == project["scripts"]["hicache-obs"]


def test_the_lock_has_what_the_constraints_have(checkout: Path) -> None:
    """Each package but torch, in the same version, and each with hashes."""
    pinned = {line for line in (checkout / "constraints.txt").read_text().splitlines() if line[:1] not in ("#", "")}
    locked = (checkout / "requirements.lock").read_text().replace("\\\n", " ")
    entries = [line.split(maxsplit=1) for line in locked.splitlines() if line[:1] not in ("#", "")]
    assert all("--hash=sha256:" in hashes for _, hashes in entries)
    torch = {line for line in pinned if line.startswith("torch==")}
    assert len(torch) == 1
    assert {_normal(name) for name, _ in entries} == {_normal(line) for line in pinned - torch}


def _normal(requirement: str) -> str:
    name, _, version = requirement.partition("==")
    return re.sub(r"[-_.]+", "-", name).lower() + "==" + version
