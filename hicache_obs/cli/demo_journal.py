"""The journal of a demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress

from hicache_obs.readers.journal_writer import JournalWriter
from hicache_obs.records import AnyRecord


class DemoJournal:
    """A journal whose disk may fail: what it does not hold it says itself, and the run goes on.

    Args:
        writer: Writes it.
        on_failure: Told of each batch that could not be written.
    """

    def __init__(self, writer: JournalWriter, on_failure: Callable[[OSError], None]) -> None:
        self._writer = writer
        self._on_failure = on_failure

    def write(self, records: Sequence[AnyRecord]) -> None:
        """Keep ``records`` as one batch."""
        try:
            self._writer.write(records)
        except OSError as error:
            self._on_failure(error)

    @property
    def settled(self) -> bool:
        """See ``JournalWriter.settled``."""
        return self._writer.settled

    def close(self) -> None:
        """State what is lost, if there is room by now, and end it."""
        with suppress(OSError):
            self._writer.settle()
        self._writer.close()
