"""Schedules of the virtual device: which queued item runs next, and when the host lets the device run.

Every order a schedule produces is one that a CUDA device may produce for the same calls: the runner only
offers items whose stream order and waits are satisfied. Add a strategy by writing a ``Schedule``; the runner
knows nothing about any of them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

from hicache_obs.errors import ConfigError


class Queued(Protocol):
    """One item in a stream's queue, as a schedule sees it."""

    @property
    def seq(self) -> int:
        """Position in issue order over all streams."""


class Board(Protocol):
    """What a schedule may ask about the queues. Answers change with every item it has run."""

    def heads(self) -> Sequence[Queued]:
        """Items that can run now, one per stream at most, in stream order."""

    def ancestors(self, targets: Sequence[Queued]) -> Sequence[Queued]:
        """``targets`` and every queued item that must run before one of them, in issue order."""


class Schedule(Protocol):
    """A strategy. Both methods yield a head of ``board``; it has run when the generator is resumed."""

    @property
    def name(self) -> str:
        """As it appears in messages."""

    @property
    def overlapped(self) -> bool:
        """Whether streams run side by side; otherwise the device is one lane that runs one item at a time."""

    @property
    def host_waits(self) -> bool:
        """Whether the host stands still until what ``on_call`` ran is complete."""

    def on_call(self, board: Board) -> Iterator[Queued]:
        """What the device runs unasked at a host call, after the call's own items were queued."""

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        """What runs while the host waits for ``targets``; resumed until all of them have run."""


def _drain(board: Board) -> Iterator[Queued]:
    """Everything that can run, in issue order."""
    while heads := board.heads():
        yield heads[0] if len(heads) == 1 else min(heads, key=_seq)


def _seq(item: Queued) -> int:
    return item.seq


class Eager:
    """Each item is complete before the host continues. Nothing ever overlaps: what timing tests see."""

    name: Final = "eager"
    overlapped: Final = False
    host_waits: Final = True

    def on_call(self, board: Board) -> Iterator[Queued]:
        return _drain(board)

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        return _drain(board)


class Asap:
    """The ordinary overlapped device: an item starts once issued, its stream free and its waits over."""

    name: Final = "asap"
    overlapped: Final = True
    host_waits: Final = False

    def on_call(self, board: Board) -> Iterator[Queued]:
        return _drain(board)

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        return _drain(board)


class Lazy:
    """Nothing runs before the host waits for it; then only what it waits for needs, in issue order."""

    name: Final = "lazy"
    overlapped: Final = False
    host_waits: Final = False

    def on_call(self, board: Board) -> Iterator[Queued]:
        return iter(())

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        return iter(board.ancestors(targets))


class Adversarial:
    """Nothing runs before the host waits; then always the runnable item that was issued last, on any stream.

    An item that becomes runnable overtakes every earlier one still queued. No single order reverses every
    unordered pair (b before a, a before c and c before b may exclude each other), so a pair whose later op
    hangs behind an old item of a third stream can keep its order here; ``random`` and the analyzer, which
    does not depend on the order at all, cover those.
    """

    name: Final = "adversarial"
    overlapped: Final = False
    host_waits: Final = False

    def on_call(self, board: Board) -> Iterator[Queued]:
        return iter(())

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        while heads := board.heads():
            yield max(heads, key=_seq)


class Random:
    """Seeded: about every second host call runs a few items at random; a wait runs random ones to its end."""

    name: Final = "random"
    overlapped: Final = False
    host_waits: Final = False

    _BURST: Final = 8
    """Most items one host call runs. Enough to get ahead of a host that issues a few items per round."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def on_call(self, board: Board) -> Iterator[Queued]:
        if self._random.random() < 0.5:
            for _ in range(self._random.randint(1, self._BURST)):
                heads = board.heads()
                if not heads:
                    return
                yield self._random.choice(heads)

    def on_force(self, board: Board, targets: Sequence[Queued]) -> Iterator[Queued]:
        while heads := board.heads():
            yield self._random.choice(heads)


SCHEDULES: Final = ("eager", "asap", "lazy", "random", "adversarial")
"""Names ``schedule_named`` knows."""


def schedule_named(name: str, *, seed: int = 0) -> Schedule:
    """A fresh schedule; ``seed`` matters to ``random`` only.

    Raises:
        ConfigError: ``name`` is none of ``SCHEDULES``.
    """
    if name == "random":
        return Random(seed)
    for schedule in (Eager, Asap, Lazy, Adversarial):
        if schedule.name == name:
            return schedule()
    raise ConfigError(f"schedule {name!r}: must be one of {', '.join(SCHEDULES)}")
