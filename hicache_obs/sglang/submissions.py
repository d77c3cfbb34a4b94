"""A load-back's submission, and what an earlier one of the same pools and events says about it.

Eighty layers are eighty calls of a pool's copy function and eighty records of events. Of the first submission for a set
of pools and layer events each call is noted. Of the later ones only each pool's first copy is, for its pages, and the
events' records are counted: their number must be the first one's, or what was launched is not known, and all of it is
counted as lost. One submission in ``TIME_EVERY`` is noted call by call anyway.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, Final

from hicache_obs.recorder.batch import Batch, Learned, learn
from hicache_obs.sglang.guard import hooked_here
from hicache_obs.sglang.session import Session

UNKNOWN: Final = -(1 << 62)
"""``Batch.seen`` of a batch that cannot be what it follows."""
MAX_KNOWN: Final = 64
"""Sets of pools and events that are remembered: a server has three per controller."""


class Submission:
    """One call of ``submit_host_to_device``.

    Args:
        transfers: Its argument, tuples with the fields of SGLang's ``L2Transfer``.
        done: What is called when a layer's copies are launched: a method of the object that has the events.
        layers: How many layers there are.
    """

    def __init__(self, session: Session, transfers: Any, done: Any, layers: Any) -> None:
        self._session = session
        self._owners: Final = (
            getattr(done, "__self__", done),
            *[(t.host_pool, t.device_pool, t.layer_mapper) for t in transfers],
        )
        """Kept with what is learned: their ids must not become others'."""
        self._key: Final = (
            id(self._owners[0]),
            layers,
            *[(id(t.host_pool), id(t.device_pool), id(t.layer_mapper), t.is_draft) for t in transfers],
        )
        known = session.submissions.get(self._key)
        self.learned: Final[Learned | None] = None if known is None else known[0]
        self.direct: Final[list[tuple[Any, str, Any]]] = []
        """Pools whose copy function is not hooked meanwhile, its name, and what it was on the pool itself."""
        self._batch: Batch | None = None
        self._interrupted = False

    def began(self, batch: Batch, host_pool: Any, original: Callable[..., Any]) -> bool:
        """``host_pool``'s first copy is noted in ``batch``. Whether its others need not be."""
        first = self._batch is None
        if not first and batch is not self._batch:
            self._interrupted = True
            return False
        self._batch = batch
        name = getattr(original, "__name__", "")
        outer = getattr(host_pool, "__dict__", {}).get(name)
        known = self.learned
        if known is None or (outer is None and not hooked_here(host_pool, name, original)):
            batch.seen = UNKNOWN
            return False
        if first:
            batch.follow(known)
        elif batch.learned is None:
            return False
        setattr(host_pool, name, MethodType(original, host_pool))
        self.direct.append((host_pool, name, outer))
        return True

    def end(self, *, whole: bool) -> None:
        """The call is over; ``whole`` if it has returned. What was noted of it is in the ring."""
        for pool, name, outer in self.direct:
            if outer is None:
                delattr(pool, name)
            else:
                setattr(pool, name, outer)
        batch, known = self._batch, self._session.submissions
        if whole and batch is not None and self.learned is None and not self._interrupted:
            while len(known) >= MAX_KNOWN:
                del known[next(iter(known))]
            learned = learn(batch)
            if learned is not None:
                known[self._key] = learned, self._owners
