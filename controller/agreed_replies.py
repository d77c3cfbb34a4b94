"""What the scheduler knows of its storage tier: replies, clock and state, as far as all ranks know them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from hicache_obs.controller.decision_log import Agree, alone
from hicache_obs.controller.storage import StorageTier
from hicache_obs.controller.storage_jobs import Done, Store


@dataclass(eq=False)
class AgreedReplies:
    """Lets a reply through once every rank has it, with the fewest pages that any of them got.

    Each of the two threads does its jobs in order, so "the first n replies of each" means the same jobs on all ranks.
    Without peers everything is as the tier says, at once.

    Attributes:
        tier: It.
        agree: The decision log's.
    """

    tier: StorageTier
    agree: Agree = alone
    _now_ns: int = 0
    _off: bool = False
    _read: deque[Done] = field(default_factory=deque)
    _stored: deque[Done] = field(default_factory=deque)

    @property
    def off(self) -> bool:
        """The tier takes no jobs any more, on one rank at least."""
        return self.tier.off if self.agree is alone else self._off

    def now_ns(self) -> int:
        """The threads' clock; with peers the slowest one's, as of the last ``take``."""
        return self.tier.now_ns() if self.agree is alone else self._now_ns

    def take(self, *, busy: bool) -> Iterator[Done]:
        """Replies that are here. ``busy``: jobs were handed over whose reply was not taken; the same on every rank."""
        if self.agree is alone:
            yield from self.tier.replies()
            return
        for done in self.tier.replies():
            (self._stored if isinstance(done.job, Store) else self._read).append(done)
        counts = (len(self._read), len(self._stored)) if busy else (0, 0)
        on, self._now_ns, reads, stores = self.agree("replies", (int(not self.tier.off), self.tier.now_ns(), *counts))
        self._off = not on
        for _ in range(stores):
            yield self._stored.popleft()
        if reads:
            yield from self._fewest([self._read.popleft() for _ in range(reads)])

    def _fewest(self, replies: list[Done]) -> Iterator[Done]:
        pages = self.agree("pages", [done.count for done in replies])
        for done, count in zip(replies, pages, strict=True):
            yield replace(done, count=count, tags=done.tags[:count])
