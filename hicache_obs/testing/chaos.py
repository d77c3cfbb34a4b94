"""A storage back end on which everything goes wrong, by chance and by a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from hicache_obs.controller.storage_backend import StorageBackend


class ThreadKilled(BaseException):
    """Ends a storage thread. Not an Exception: an ordinary handler does not stop it."""


@dataclass(frozen=True, slots=True)
class Mishaps:
    """Chances per call, 0 to 1.

    Attributes:
        fails: The call raises OSError.
        wrong: A read returns other bytes.
        half: A read returns the first half.
        vanishes: A read finds nothing, although ``exists`` has said otherwise.
        kills: The calling thread dies.
        slow: The call takes its time.
    """

    fails: float = 0.0
    wrong: float = 0.0
    half: float = 0.0
    vanishes: float = 0.0
    kills: float = 0.0
    slow: float = 0.0


class ChaosBackend:
    """Another back end, and ``mishaps``.

    Args:
        inner: It.
        mishaps: What goes wrong.
        seed: Of the chances.
        delay: Called where a call is slow.

    Attributes:
        happened: How often, by name of the mishap.
    """

    def __init__(
        self, inner: StorageBackend, mishaps: Mishaps, *, seed: int = 0, delay: Callable[[], None] = lambda: None
    ) -> None:
        self._inner = inner
        self._mishaps = mishaps
        self._random = random.Random(seed)
        self._delay = delay
        self.happened: dict[str, int] = dict.fromkeys(Mishaps.__slots__, 0)

    def exists(self, key: str) -> bool:
        """See ``StorageBackend.exists``."""
        self._before()
        return self._inner.exists(key)

    def read(self, key: str) -> bytes | None:
        """See ``StorageBackend.read``."""
        self._before()
        data = self._inner.read(key)
        if data is None or self._strikes("vanishes"):
            return None
        if self._strikes("half"):
            return data[: len(data) // 2]
        if self._strikes("wrong"):
            place = self._random.randrange(len(data))
            return data[:place] + bytes([data[place] ^ (1 + self._random.randrange(255))]) + data[place + 1 :]
        return data

    def write(self, key: str, data: bytes) -> None:
        """See ``StorageBackend.write``."""
        self._before()
        self._inner.write(key, data)

    def _before(self) -> None:
        if self._strikes("slow"):
            self._delay()
        if self._strikes("kills"):
            raise ThreadKilled("by chance")
        if self._strikes("fails"):
            raise OSError("by chance")

    def _strikes(self, name: str) -> bool:
        chance: float = getattr(self._mishaps, name)
        strikes = self._random.random() < chance
        self.happened[name] += strikes
        return strikes
