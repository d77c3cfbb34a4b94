"""Hooks of mkdocs: pages that live outside docs/, and links to files that are not pages.

The README, CONTRIBUTING, CHANGELOG and the runbooks join the site under the names in ``PAGES``. A link to any other
file of the repository leads to a copy of it under ``source/``, so that no link of a page leads nowhere; one to a folder
leads to a page that lists it. What a link names must exist: ``mkdocs build`` is strict.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"} | {
    f"dashboards/runbooks/{path.name}": f"runbooks/{path.name}"
    for path in sorted((ROOT / "dashboards" / "runbooks").glob("*.md"))
}
"""Path in the repository of each page from outside docs/, and its path in the site."""

LINK = re.compile(r"\[([^\]]*)\]\((?![a-z]+:|#|/)([^)#\s]*)(#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of ``PAGES`` and a copy of every file that a page links to."""
    for source, uri in PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / source).read_text(encoding="utf-8")))
    wanted: set[str] = set()
    for file in files.documentation_pages():
        for _, target, _ in LINK.findall(file.content_string):
            path = _in_repository(file.src_uri, target)
            if _site_uri(path).startswith("source/"):
                wanted.add(path)
    for path in sorted(wanted):
        files.append(_copy(config, path))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links written for the repository to where the site has their targets."""
    here = page.file.src_uri

    def rewrite(match: re.Match[str]) -> str:
        text, target, anchor = match.groups()
        to = posixpath.relpath(_site_uri(_in_repository(here, target)), posixpath.dirname(here) or ".")
        return f"[{text}]({to}{anchor or ''})"

    return LINK.sub(rewrite, markdown)


def _in_repository(page: str, target: str) -> str:
    """The repository path that ``target`` names on the page of that site path."""
    source = next((source for source, uri in PAGES.items() if uri == page), f"docs/{page}")
    path = posixpath.normpath(posixpath.join(posixpath.dirname(source), target))
    if path.startswith("..") or not (ROOT / path).exists():
        raise PluginError(f"{source}: links to {target!r}, which is not in the repository")
    return path


def _site_uri(path: str) -> str:
    """Where the site has the file or folder of that repository path."""
    if path in PAGES:
        return PAGES[path]
    if (ROOT / path).is_dir():
        return PAGES.get(f"{path}/README.md", f"source/{path}/index.md")
    if path.startswith("docs/") and path.endswith((".md", ".jpg", ".png", ".svg")):
        return path.removeprefix("docs/")
    return f"source/{path}.txt"


def _copy(config: MkDocsConfig, path: str) -> File:
    """The site's copy of a file, as text that any browser shows, or the list of a folder."""
    uri, real = _site_uri(path), ROOT / path
    if real.is_dir():
        names = sorted(entry.name for entry in real.iterdir() if not entry.name.startswith(("__", ".")))
        listing = "\n".join(f"* `{name}`" for name in names)
        return File.generated(config, uri, content=f"# {path}/\n\nIn the repository:\n\n{listing}\n")
    return File.generated(config, uri, content=real.read_bytes())
