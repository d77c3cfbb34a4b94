"""What the pages name exists, and what exists is named on a page: commands, options, variables, targets, metrics."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import click
import pytest

from hicache_obs.cli.app import COMMANDS, group
from hicache_obs.config import SETTINGS
from hicache_obs.exporters.catalogue import CATALOGUE, PREFIX

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/*.md", "dashboards/runbooks/*.md", "tests/cases/*.md")
OTHERS = {
    "--cov", "--enable-hierarchical-cache", "--now", "--config.file", "--storage.tsdb.path", "--storage.path",
    "--web.listen-address", "--cluster.listen-address", "--alertmanager.url", "--enable-feature", "--previous",
    "--bind", "--trace", "--sample", "--cpuctxsw", "--cuda-graph-trace", "--cuda-event-trace", "--times", "--tables",
    "--before", "--rounds", "--timed",
}  # fmt: skip
"""Options of other programs, of benchmarks and of pytest."""
TEST_ONLY = {"HICACHE_OBS_STAMPS"}
"""Variables that only tests read."""
SHORT = {"clean", "help"}
"""Targets that `make` itself explains well enough."""


@pytest.fixture(scope="module")
def pages(checkout: Path) -> dict[str, str]:
    """Every page of the documentation, by its path."""
    found = [path for pattern in PAGES for path in sorted(checkout.glob(pattern))]
    assert len(found) > 30
    return {str(path.relative_to(checkout)): path.read_text(encoding="utf-8") for path in found}


@pytest.fixture(scope="module")
def options() -> dict[str, set[str]]:
    """The options of each command."""
    context = click.Context(group)
    commands = {name: group.get_command(context, name) for name in COMMANDS}
    return {
        name: {option for parameter in command.params for option in parameter.opts if option[0] == "-"} | {"--help"}
        for name, command in commands.items()
        if command is not None
    }


def test_commands_and_their_options(pages: dict[str, str], options: dict[str, set[str]]) -> None:
    shown = [
        (page, command, typed.split(" -- ")[0])
        for page, text in pages.items()
        for command, typed in re.findall(r"hicache-obs ([a-z-]+)([^`\n|]*)", text)
        if command in COMMANDS
    ]
    assert {command for _, command, _ in shown} == set(COMMANDS)
    assert [
        (page, command, option)
        for page, command, typed in shown
        for option in re.findall(r"(?<![\w-])--?[a-z][a-z-]*", typed)
        if option not in options[command]
    ] == []
    known = set().union(*options.values(), OTHERS)
    assert [
        (page, option)
        for page, text in pages.items()
        for option in re.findall(r"(?<![\w-])--[a-z][a-z.-]+[a-z]", text)
        if option not in known and not option.startswith("--hicache-obs-")
    ] == []


def test_typed_commands_exist(pages: dict[str, str]) -> None:
    """At the begin of a line of code, and of code within text, ``hicache-obs X`` is a command."""
    typed = {
        (page, command)
        for page, text in pages.items()
        for command in re.findall(r"(?:^(?:\$ | {4})?|`)(?:\S*/)?hicache-obs ([a-z-]+)", text, re.MULTILINE)
    }
    assert len(typed) > 40
    assert [(page, command) for page, command in typed if command not in COMMANDS] == []


def test_variables(pages: dict[str, str]) -> None:
    named = {(page, name) for page, text in pages.items() for name in re.findall(r"HICACHE_OBS(?:_[A-Z_]+)?\b", text)}
    settings = {setting.variable for setting in SETTINGS}

    assert {name for _, name in named} - settings == TEST_ONLY
    assert settings <= {name for page, name in named if page == "docs/settings.md"}


def test_the_page_of_settings_is_current(checkout: Path, pages: dict[str, str]) -> None:
    spec = importlib.util.spec_from_file_location("settings_page", checkout / "docs" / "settings_page.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)

    assert pages["docs/settings.md"] == script.page(), "python docs/settings_page.py > docs/settings.md"


def test_options_of_the_agent_are_those_of_its_settings(pages: dict[str, str], options: dict[str, set[str]]) -> None:
    listed = set(re.findall(r"\| `(--[a-z-]+)` \|", pages["docs/settings.md"]))
    assert len(listed) == 12
    assert options["agent"] - listed == {"-h", "--help", "--once", "--otlp", "--textfile"} - {"-h"}


def test_targets(checkout: Path, pages: dict[str, str]) -> None:
    targets = set(re.findall(r"^([a-z-]+):.*##", (checkout / "Makefile").read_text(), re.MULTILINE))
    named = {
        (page, target)
        for page, text in pages.items()
        for code in re.findall(r"```.*?```|`[^`]+`", text, re.DOTALL)
        for target in re.findall(r"(?:^|[`$\s])make\s+([a-z-]+)\b", code)
    }
    assert [(page, target) for page, target in named if target not in targets] == []
    assert targets - {target for _, target in named} == SHORT


def test_metrics(pages: dict[str, str]) -> None:
    known = {row.name for row in CATALOGUE}
    families = known | {f"{name}{part}" for name in known for part in ("_sum", "_count", "_bucket")}
    named = {
        (page, name)
        for page, text in pages.items()
        for name in re.findall(r"hicache_obs_[a-z_]+|\b[a-z_]+_total\b", text)
        if page != "docs/testing.md"  # its names are pytest's
    }
    assert len(named) > 40
    assert [
        (page, name)
        for page, name in named
        if name not in families and f"{PREFIX}{name.removeprefix(PREFIX)}" not in known
    ] == []


def test_extras(checkout: Path, pages: dict[str, str]) -> None:
    project = tomllib.loads((checkout / "pyproject.toml").read_text())["project"]
    section = pages["docs/dependencies.md"].partition("## Extras")[2].partition("## Development (`dev`)")[0]
    explained = set(re.findall(r"^\| ([a-z]+) \|", section, re.MULTILINE)) - {"extra"} | {"dev"}
    named = {
        extra
        for text in pages.values()
        for extras in re.findall(r"hicache-obs\[([a-z,]+)\]|'\.\[([a-z,]+)\]'", text)
        for extra in ",".join(filter(None, extras)).split(",")
    }
    extras = set(project["optional-dependencies"])
    assert explained == extras
    assert named <= extras


def test_files(checkout: Path, pages: dict[str, str]) -> None:
    """Paths in code, as seen from the repository, the page, or the package."""
    made = {"FAST25-release/traces", "http/protobuf", "prometheus/prometheus.yml", "prometheus/alertmanager.yml"}
    made |= {"prometheus/hicache-obs-rules.yml", "../shared"}
    missing = [
        (page, path)
        for page, text in pages.items()
        for path in set(re.findall(r"`([A-Za-z_.][\w.-]*/[\w./*-]*[\w*/])`", text)) - made
        if not any(
            list(base.glob(path.rstrip("/")))
            for base in (checkout, (checkout / page).parent, checkout / "hicache_obs", checkout / "hicache_obs" / "cli")
        )
    ]
    assert missing == []


def test_the_first_screen_of_the_readme(checkout: Path, pages: dict[str, str]) -> None:
    """Its commands exist, its count is right, and the table before them leads to pages."""
    screen = pages["README.md"].partition("## The demo")[0]
    typed = re.search(r"```\n(.*?)```", screen, re.DOTALL)
    assert typed is not None
    lines = typed[1].splitlines()
    assert [line.split()[0] for line in lines] == ["make", ".", "hicache-obs"]
    cases = re.search(r"check (\S+) +# one of (\d+) cases", typed[1])
    assert cases is not None
    assert len(list(checkout.glob(cases[1]))) == 1
    assert len(list(checkout.glob("tests/cases/*.json"))) == int(cases[2])
    assert set(re.findall(r"\]\((docs/[a-z]+\.md)\)", screen)) <= set(pages)
    assert len(screen.splitlines()) < 40
