"""How far a ring's results have been shown to whoever scrapes: a number beside the ring's journal.

An agent that ends, or is killed, between two scrapes takes with it what it has counted since. The next one finds the
records in the journal, and counts again from this number on: a race found in those seconds still pages.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Final

from hicache_obs.whole_file import PARTIALS, replace_file

NAME: Final = "scraped"


class ScrapeMark:
    """The mark of one ring. One thread at a time.

    Args:
        folder: Of the ring's journal; the mark is written once that is there.
        begin: Number of the first record that this agent reads.
    """

    def __init__(self, folder: Path, *, begin: int) -> None:
        self._path = folder / NAME
        self._written = self._read()
        self.first: Final = begin if self._written is None else min(self._written, begin)
        """Number of the first record whose results nobody has been shown."""
        self._shown = self._judged = self.first

    def turn(self, judged: int, *, scraped: bool) -> None:
        """A cycle is over.

        Args:
            judged: Number of the first record that is not judged yet.
            scraped: The metrics were read since the last call: what was judged by then has been shown.
        """
        if scraped:
            self._shown = self._judged
        self._judged = judged
        if self._shown != self._written:
            self._write()

    def _read(self) -> int | None:
        """``None`` where no mark is, or none that can be understood."""
        try:
            return max(0, int(self._path.read_text(encoding="ascii")))
        except (OSError, ValueError):
            return None

    def _write(self) -> None:
        """Whole or not at all; a full disk leaves the mark before, and the next agent counts more again."""
        with contextlib.suppress(OSError):
            replace_file(self._path, str(self._shown).encode())
            self._written = self._shown


def remove(folder: Path) -> None:
    """Delete the mark of a journal that is deleted, and what a killed agent has left of one."""
    for mark in (folder / NAME, *folder.glob(f".{NAME}{PARTIALS}")):
        mark.unlink(missing_ok=True)
