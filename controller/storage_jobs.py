"""What the scheduler's thread and the storage threads tell each other. Each object is handed over, never shared."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias

from hicache_obs.controller.radix_node import EMPTY, Int64Array
from hicache_obs.records import PageIds


@dataclass(slots=True, eq=False)
class Job:
    """Work for a storage thread.

    Attributes:
        number: Unique.
        keys: Of the pages, in order of the sequence.
        cancelled: The only field that changes after the hand-over: the thread stops at the next page batch.
    """

    number: int
    keys: tuple[str, ...]
    cancelled: bool = False


@dataclass(slots=True, eq=False)
class Probe(Job):
    """How many of the first pages are stored?"""


@dataclass(slots=True, eq=False)
class Fetch(Job):
    """Read pages into host memory.

    Attributes:
        pages: ``(n,) int64`` host pages to fill; the thread's own until its reply is received.
    """

    pages: PageIds = field(kw_only=True)


@dataclass(slots=True, eq=False)
class Store(Job):
    """Write pages from host memory.

    Attributes:
        pages: ``(n,) int64`` host pages to read; they may not change until the reply is received.
        tags: ``(n,) int64`` what to remember of each.
    """

    pages: PageIds = field(kw_only=True)
    tags: Int64Array = field(kw_only=True)


@dataclass(frozen=True, slots=True, eq=False)
class Done:
    """A job is over, in whatever way: the thread touches none of its pages any more.

    Attributes:
        job: It.
        count: Leading pages found, read and verified, or stored.
        tags: ``(count,) int64`` of a fetch: what their writer remembered, ``NO_TAG`` if that was another run.
        failed: It ended with an error of the back end, or because its thread died.
    """

    job: Job
    count: int = 0
    tags: Int64Array = field(default_factory=EMPTY.copy)
    failed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Died:
    """A storage thread has ended by something that is no ordinary error.

    Attributes:
        thread: Its name.
        job: What it was working on.
    """

    thread: str
    job: Job | None


@dataclass(frozen=True, slots=True)
class Ended:
    """A storage thread has ended because it was told to."""

    thread: str


Reply: TypeAlias = "Done | Died | Ended"
