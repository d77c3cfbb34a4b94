"""``render_document``: a page that needs nothing else and does nothing but what it was made for.

Everything is in the document: style, scripts and data. Its content security policy names the scripts by their hashes
and allows nothing to be loaded or sent, so whatever a name in a trace contains, no other script can run and no
request can leave. Text is escaped by the template; data goes in as JSON without ``<``.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from hicache_obs import __version__

MARK: Final = "<!doctype html><!-- hicache-obs report -->"
"""First line of every report: what tells one from a file that must not be overwritten."""
_LIBRARY: Final = ("bokeh.min.js", "bokeh-api.min.js")


def render_document(template: str, scripts: Sequence[str], **values: Any) -> str:
    """One HTML document; the same for the same arguments.

    Args:
        template: Name of a template beside this module; it also gets ``mark``, ``policy``, ``style``, ``scripts`` and
            ``version``.
        scripts: Names of scripts beside this module, run together after the chart library; without any the page has
            neither.
        values: For the template.

    Raises:
        ModuleNotFoundError: ``jinja2`` or ``bokeh`` is not installed: they are in the extra ``report``.
    """
    import jinja2

    files = importlib.resources.files("hicache_obs.exporters.html")
    texts = [_library(name) for name in _LIBRARY]
    if scripts:
        ours = "\n".join((files / name).read_text(encoding="utf-8") for name in scripts)
        texts.append(f"'use strict';\n(() => {{\n{ours}\n}})();")
    else:
        texts = []
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    made = environment.from_string((files / template).read_text(encoding="utf-8"))
    return made.render(
        mark=_markup(MARK),
        policy=_policy(texts),
        style=_markup((files / "report.css").read_text(encoding="utf-8")),
        scripts=[_markup(text) for text in texts],
        version=__version__,
        **values,
    )


def json_markup(value: Any) -> Any:
    """``value`` as JSON, for a script element of data."""
    return _markup(_json(value))


def _policy(scripts: Sequence[str]) -> str:
    """What the document may do: run exactly these scripts, and style itself."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (
        f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _library(name: str) -> str:
    """A script of the chart library, which is not imported: its wheel carries it."""
    spec = importlib.util.find_spec("bokeh")
    if spec is None or not spec.submodule_search_locations:
        raise ModuleNotFoundError("No module named 'bokeh'", name="bokeh")
    path = Path(spec.submodule_search_locations[0], "server", "static", "js", name)
    script = path.read_text(encoding="utf-8").replace("\r\n", "\n")
    assert "</script" not in script.lower()
    return "\n".join(line for line in script.split("\n") if not line.startswith("//# sourceMappingURL"))


def _json(value: Any) -> str:
    """JSON that holds nothing an HTML parser would look at."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _markup(text: str) -> Any:
    """``text``, which was made here or is ours, to be put in as it is."""
    from markupsafe import Markup

    return Markup(text)
