"""The last round that wrote each device page, for links of backups."""

from __future__ import annotations

from typing import Final

import numpy as np

from hicache_obs.records import Access, Mode, PageIds, Space

MAX_PAGE: Final = 1 << 24
"""Page ids above it have no known writer here: a link costs eight bytes for each page."""
_NO_ROUNDS: Final[PageIds] = np.empty(0, np.int64)


class PageWriters:
    """By pool, a table of rounds. One thread at a time."""

    def __init__(self) -> None:
        self._tables: dict[int, PageIds] = {}
        """The last round that wrote each page, -1 for none."""
        self._noted: tuple[PageIds, int] = (_NO_ROUNDS, -1)

    def note(self, accesses: tuple[Access, ...], number: int) -> None:
        """Round ``number`` does ``accesses``."""
        for access in accesses:
            if access.mode is not Mode.WRITE or access.space is not Space.DEVICE or not len(access.ids):
                continue
            if self._noted[0] is access.ids and self._noted[1] == number:
                continue  # another segment of the round
            self._noted = (access.ids, number)
            ids = access.ids[(access.ids >= 0) & (access.ids < MAX_PAGE)]
            table = self._tables.get(access.pool, _NO_ROUNDS)
            if len(ids) and int(ids.max()) >= len(table):
                table = np.concatenate([table, np.full(int(ids.max()) + 1, -1, np.int64)])
                self._tables[access.pool] = table
            table[ids] = number

    def of(self, accesses: list[Access]) -> PageIds:
        """The rounds that wrote the pages of ``accesses``, ascending, each once."""
        rounds = np.unique(np.concatenate([self._of(access) for access in accesses] or [_NO_ROUNDS]))
        return rounds[rounds >= 0]

    def _of(self, access: Access) -> PageIds:
        table = self._tables.get(access.pool, _NO_ROUNDS)
        return table[access.ids[(access.ids >= 0) & (access.ids < len(table))]]
