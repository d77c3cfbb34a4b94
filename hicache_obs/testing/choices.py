"""The choices of one run of a program: which ones it met, and which way it went.

A run is determined by the string of its choices, one character each: for a query ``1`` (complete) or ``0`` (not yet),
for the next host thread ``0`` (the one that would go on anyway) or the number of another one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from hicache_obs.errors import ConfigError, StreamError

DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
QUERY_OPTIONS: Final = "10"
"""True first: a loop that polls then ends in the first run."""


@dataclass(frozen=True, slots=True)
class Choice:
    """One choice point of a run.

    Attributes:
        what: What was to be decided; equal choices before it give an equal text.
        options: One character per way to go on; the first is taken where nothing is prescribed.
        taken: The one that was.
    """

    what: str
    options: str
    taken: str


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where a run leaves the run before it.

    Attributes:
        base: Choices of the run it leaves.
        at: Number of choices it shares with that.
        then: The option it takes next; empty for the first run of all.
    """

    base: Sequence[Choice] = ()
    at: int = 0
    then: str = ""

    @property
    def text(self) -> str:
        """Prescribed choices, as in ``Script.text``."""
        return text_of(self.base[: self.at]) + self.then


class Script:
    """Makes the choices of one run: those prescribed, then the first option of each.

    Args:
        prescribed: Choice characters.
        expected: The choice points these belong to, as another run met them; to notice a program that is not the same
            in every run.
    """

    def __init__(self, prescribed: str = "", expected: Sequence[Choice] = ()) -> None:
        self._prescribed = prescribed
        self._expected = expected
        self.made: list[Choice] = []
        self.fault: Exception | None = None
        """What ``choose`` raised, in case the program caught it."""

    @property
    def text(self) -> str:
        """Choices so far; as ``prescribed`` they repeat the run."""
        return text_of(self.made)

    @property
    def unused(self) -> str:
        """Prescribed choices that the run did not come to."""
        return self._prescribed[len(self.made) :]

    def choose(self, what: str, options: str) -> str:
        """The option to take.

        Raises:
            StreamError: The run does not meet the choice points that an equal one met.
            ConfigError: The prescribed choice is none of ``options``.
        """
        place = len(self.made)
        if place < len(self._expected):
            known = self._expected[place]
            if (known.what, known.options) != (what, options):
                self.fault = StreamError(
                    f"the program is not the same in every run: choice {place + 1} was {known.what!r} before, now "
                    f"{what!r}; it must not depend on time, addresses, or anything else outside it"
                )
                raise self.fault
        taken = self._prescribed[place] if place < len(self._prescribed) else options[0]
        if taken not in options:
            self.fault = ConfigError(
                f"choices {self._prescribed!r}: choice {place + 1} ({what}) must be one of {', '.join(options)}"
            )
            raise self.fault
        self.made.append(Choice(what, options, taken))
        return taken

    def branches(self, since: int) -> list[Prefix]:
        """Runs that take another option at choice ``since`` or later; the first one leaves last."""
        made = tuple(self.made)
        return [
            Prefix(made, place, option)
            for place, choice in enumerate(made[since:], since)
            for option in choice.options
            if option != choice.taken
        ]


class SeededScript(Script):
    """Chooses at random, and remembers nothing.

    Args:
        random: The dice.
        changes: Chance that any option may be taken, and not the first, which changes nothing.
    """

    def __init__(self, random: Random, changes: float) -> None:
        super().__init__()
        self._random = random
        self._changes = changes

    def choose(self, what: str, options: str) -> str:
        """One of ``options``."""
        return self._random.choice(options) if self._random.random() < self._changes else options[0]


def text_of(made: Sequence[Choice]) -> str:
    """The choices as one string."""
    return "".join(choice.taken for choice in made)
