"""Text that fits the terminal; whole lines, for ``grep`` and files, where there is none."""

from __future__ import annotations

import shutil
import sys
import textwrap
from typing import IO, TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn

FINDING_INDENT: Final = 11
"""Where the text behind the labels of an explained finding begins."""


def fit(text: str, *, indent: int, to: IO[str] | None = None) -> str:
    """``text`` with its long lines broken between words if ``to`` (default: standard output) is a terminal.

    Args:
        text: Lines.
        indent: Of the continuation of a line that is itself indented.
        to: Where it will be printed.
    """
    stream = sys.stdout if to is None else to
    return broken(text, shutil.get_terminal_size().columns, indent=indent) if stream.isatty() else text


def broken(text: str, width: int, *, indent: int) -> str:
    """``text`` with lines of ``width`` characters at most, as far as its words allow."""
    lines = []
    for line in text.split("\n"):
        hanging = " " * (indent if line.startswith(" ") else 0)
        lines += textwrap.wrap(
            line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False
        ) or [""]
    return "\n".join(lines)


def progress_bars(*columns: ProgressColumn) -> Progress:
    """Bars on standard error while they are entered; nothing, not even an empty line, where that is no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
