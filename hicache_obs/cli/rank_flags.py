"""Options of ``hicache-obs demo`` that run it on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import click

OFF: Final = ("decision-log",)
"""What can be taken out of a group of ranks."""
TIMEOUT_S: Final = 60.0
_F = TypeVar("_F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RankFlags:
    """What the options say.

    Attributes:
        tp, pp: Ranks, and stages of each.
        rank_timeout: Seconds that one waits for another.
        off: Protections to take out.
    """

    tp: int = 1
    pp: int = 1
    rank_timeout: float = TIMEOUT_S
    off: tuple[str, ...] = ()


def rank_flags(command: _F) -> _F:
    """Adds the options; ``command`` gets each as a keyword, as ``RankFlags`` takes them."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


_OPTIONS: Final = (
    click.option(
        "--tp", type=click.IntRange(min=1), default=1, metavar="N",
        help="Tensor-parallel ranks, each a process with caches of its own, which decide alike.  [default: 1]",
    ),
    click.option(
        "--pp", type=click.IntRange(min=1), default=1, metavar="N",
        help="Pipeline stages of each, which share out the layers; processes as well.  [default: 1]",
    ),
    click.option(
        "--rank-timeout", type=click.FloatRange(min=0, min_open=True), default=TIMEOUT_S, show_default=True,
        metavar="SECONDS", help="How long a rank waits for another one.",
    ),
    click.option(
        "--off", type=click.Choice(OFF), multiple=True, metavar="NAME",
        help=f"Take a protection of the ranks out; one of {', '.join(OFF)}.",
    ),
)  # fmt: skip
