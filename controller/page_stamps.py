"""Which operation used each page of one pool last, by stream: what a page-exact fence waits for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hicache_obs.errors import ControllerError
from hicache_obs.records import Mode, PageIds


@dataclass(slots=True)
class _Stamps:
    """Highest tickets of one stream per page: of any use, and of writes."""

    used: npt.NDArray[np.int64]
    written: npt.NDArray[np.int64]
    highest: int = 0

    @classmethod
    def empty(cls, pages: int) -> _Stamps:
        return cls(np.zeros(pages, dtype=np.int64), np.zeros(pages, dtype=np.int64))

    def put(self, table: npt.NDArray[np.int64], ids: PageIds, ticket: int) -> None:
        if ticket >= self.highest:  # the rule; a plain store is half the price of a maximum
            table[ids] = ticket
        else:
            table[ids] = np.maximum(table[ids], ticket)


class PageStamps:
    """Per page and stream, the ticket of the last operation that was launched on it. Scheduler's thread.

    Attributes:
        pages: Their number.
        name: For messages.
    """

    def __init__(self, pages: int, *, name: str) -> None:
        self.pages = pages
        self.name = name
        self._stamps: dict[int, _Stamps] = {}

    def stamp(self, ids: PageIds, stream_key: int, ticket: int, *, mode: Mode = Mode.WRITE) -> None:
        """Note that the operation ``ticket`` of ``stream_key`` uses ``ids``; a page keeps its highest ticket.

        Tickets of one stream are positive and increase with each launched operation. Each stream seen costs
        16 bytes per page, so keys must be few: streams, not operations.

        Args:
            ids: ``(n,) int64`` pages.
            stream_key: The stream's handle.
            ticket: The operation.
            mode: Whether it writes the pages, or reads them only.
        """
        if ticket < 1:
            raise ControllerError(f"{self.name} pool: ticket {ticket}; expected an integer ≥ 1")
        if not len(ids):
            return
        check_range(ids, self.pages, self.name)
        stamps = self._stamps.get(stream_key)
        if stamps is None:
            stamps = self._stamps[stream_key] = _Stamps.empty(self.pages)
        stamps.put(stamps.used, ids, ticket)
        if mode is Mode.WRITE:
            stamps.put(stamps.written, ids, ticket)
        stamps.highest = max(stamps.highest, ticket)

    def last_uses(self, ids: PageIds, mode: Mode = Mode.WRITE) -> dict[int, int]:
        """What an access to ``ids`` must not overtake: for each stream key stamped so far the highest ticket.

        A write conflicts with every use, a read with writes only. 0 = that stream never conflicts.
        """
        if not len(ids):
            return dict.fromkeys(self._stamps, 0)
        check_range(ids, self.pages, self.name)
        if mode is Mode.WRITE:
            return {key: int(stamps.used[ids].max()) for key, stamps in self._stamps.items()}
        return {key: int(stamps.written[ids].max()) for key, stamps in self._stamps.items()}


def check_range(ids: PageIds, pages: int, name: str) -> None:
    """ControllerError unless ``ids``, not empty, are pages of a pool of so many."""
    if ids.view(np.uint64).max() >= pages:  # one pass: a negative id is a huge unsigned one
        wrong = ids[(ids < 0) | (ids >= pages)][0]
        raise ControllerError(f"{name} pool: page {wrong} is outside 0..{pages - 1}")
