"""HTML that is escaped unless it was made here: text goes in as ``str``, markup comes out as ``Html``."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import Final

_VOID: Final = frozenset({"meta", "br", "link"})


class Html(str):
    """Markup, to be put into a page as it is."""

    __slots__ = ()


def tag(name: str, /, *children: str, **attributes: str) -> Html:
    """One element. A ``str`` child or value is text and is escaped; ``class_`` is ``class``."""
    named = "".join(f' {key.rstrip("_").replace("_", "-")}="{escape(value)}"' for key, value in attributes.items())
    return Html(f"<{name}{named}>" if name in _VOID else f"<{name}{named}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Html:
    """Text and markup one after the other."""
    return Html("".join(child if isinstance(child, Html) else escape(child) for child in children))
