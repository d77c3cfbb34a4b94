"""The committed files with the addresses of a site: where the runbooks and Grafana are served there."""

from __future__ import annotations

import importlib.resources
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from hicache_obs.errors import ConfigError

if TYPE_CHECKING:  # its place is another from Python 3.11 on
    from importlib.abc import Traversable

PLACEHOLDER: Final = "https://hicache-obs.example"
RUNBOOKS: Final = f"{PLACEHOLDER}/runbooks"
"""What the committed alerts and dashboards say in place of a site's runbooks."""
GRAFANA: Final = f"{PLACEHOLDER}/grafana"
SCHEME: Final = "http"
"""How the boards reach the agents' status pages: their hidden variable ``scheme``."""
_SCHEME_LINE: Final = f'"query": "{SCHEME}"'
FOLDERS: Final = ("compose", "grafana", "kubernetes", "prometheus", "provisioning", "runbooks")
_SUFFIXES: Final = (".json", ".md", ".yaml", ".yml")
_ADDRESS: Final = re.compile(r"https?://[\w.~:/?&=%@+,;\[\]-]+")


def site_files(*, runbooks: str = RUNBOOKS, grafana: str = GRAFANA, tls: bool = False) -> dict[str, str]:
    """Path → text of every rule, dashboard, manifest and runbook, with these addresses in them.

    Args:
        runbooks, grafana: Where they are served.
        tls: Agents serve their pages by https.

    Raises:
        ConfigError: An address is none.
    """
    new = {RUNBOOKS: _address("--runbooks", runbooks), GRAFANA: _address("--grafana", grafana)}
    if tls:
        new[_SCHEME_LINE] = '"query": "https"'
    files = {}
    for path, file in _committed():
        text = file.read_text(encoding="utf-8")
        for old, address in new.items():
            text = text.replace(old, address)
        files[path] = text
    return files


def _address(option: str, text: str) -> str:
    """Fit for YAML, JSON and the templates of alerts: nothing in it needs to be quoted."""
    if not _ADDRESS.fullmatch(text):
        raise ConfigError(f"{option} {text!r}: not an address; expected http://HOST/PATH or https://HOST/PATH")
    return text.rstrip("/")


def _committed() -> Iterator[tuple[str, Traversable]]:
    package = importlib.resources.files("hicache_obs.dashboards")
    for name in FOLDERS:
        yield from _below(name, package / name)


def _below(path: str, folder: Traversable) -> Iterator[tuple[str, Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        below = f"{path}/{entry.name}"
        if entry.is_dir():
            yield from _below(below, entry)
        elif entry.name.endswith(_SUFFIXES):
            yield below, entry
