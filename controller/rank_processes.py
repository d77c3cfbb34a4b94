"""Ranks as processes of one machine: started together, watched together, and ended together.

A rank that fails or is killed ends the run of all. The others learn of it from their links: the decision log's, the
pipeline's. Whoever has not ended by itself soon after is killed, so a run ends whatever becomes of its ranks.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Final, Generic, TypeVar

from hicache_obs.errors import HicacheObsError, RankError

T = TypeVar("T")
Links = Mapping[int, Connection]
"""To the first rank, or of the first rank to each other, by number."""
GRACE_S: Final = 5.0
"""Beyond its own timeouts, a rank gets so long to end after one has failed."""


class RankBug(RuntimeError):
    """A rank ended with an exception that nobody expected; its traceback is the message."""


@dataclass(frozen=True, slots=True)
class _Word:
    """What a rank says at its end: a result, an expected error, or a traceback."""

    result: object = None
    error: HicacheObsError | None = None
    bug: str = ""


def star(ranks: int) -> tuple[Links, ...]:
    """Each rank's links: the first one's to all others, and theirs to it."""
    ends = {rank: multiprocessing.Pipe() for rank in range(1, ranks)}
    return ({rank: end[0] for rank, end in ends.items()}, *({0: ends[rank][1]} for rank in range(1, ranks)))


class RankProcesses(Generic[T]):
    """Runs ``work(number, links, argument)`` once per rank, each in a process of its own.

    Args:
        work: A function of a module; its arguments and its result are pickled.
        names: Of the ranks, for messages.
        arguments: One per rank.
        timeout_s: How long a rank may wait for another one, as it knows from its argument.
    """

    def __init__(
        self, work: Callable[[int, Links, T], object], names: Sequence[str], arguments: Sequence[T], *, timeout_s: float
    ) -> None:
        self._names = names
        self._timeout_s = timeout_s
        context = multiprocessing.get_context("spawn")
        links = star(len(names))
        ends = [context.Pipe(duplex=False) for _ in names]
        self._words: list[_Word | None] = [None] * len(names)
        self._lost: list[int] = []
        self._reports = [end[0] for end in ends]
        self.processes: list[SpawnProcess] = [
            context.Process(target=_body, args=(work, n, links[n], ends[n][1], arguments[n]), name=name, daemon=True)
            for n, name in enumerate(names)
        ]
        """In order of the ranks."""
        try:
            for process in self.processes:
                process.start()
        finally:
            # This process keeps no end of theirs: a rank that dies must be the only one that held it.
            for link in (*(link for each in links for link in each.values()), *(end[1] for end in ends)):
                link.close()

    def results(self) -> list[object]:
        """What each rank has returned; blocks until all have ended.

        Raises:
            HicacheObsError: A rank raised it, first of all; RankError if one was killed.
            RankBug: A rank raised something else.
        """
        try:
            self._await()
            failure = self._failure()
        finally:
            self._end()
        if failure is not None:
            raise failure
        return [word.result for word in self._words if word is not None]

    def _await(self) -> None:
        """Take what the ranks say until all have ended, or one has failed and the time of the others is up."""
        open_reports = dict(enumerate(self._reports))
        deadline: float | None = None
        while open_reports:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(open_reports.values()), left)
            if not ready:
                return
            for rank in [rank for rank, report in open_reports.items() if report in ready]:
                if not self._take(rank) and deadline is None:
                    deadline = time.monotonic() + 2 * self._timeout_s + GRACE_S
                del open_reports[rank]

    def _take(self, rank: int) -> bool:
        """Take what a rank says at its end; whether all is well with it."""
        try:
            word: _Word = self._reports[rank].recv()
        except (EOFError, OSError):
            self._lost.append(rank)
            return False
        self._words[rank] = word
        return word.error is None and not word.bug

    def _failure(self) -> Exception | None:
        """What went wrong first of all. That a rank was lost is the cause of what the others say, not the reverse."""
        for rank in self._lost:
            process = self.processes[rank]
            process.join(GRACE_S)
            return RankError(f"{self._names[rank]}, process {process.pid}, {_ended(process.exitcode)}")
        words = [word for word in self._words if word is not None]
        if bugs := [word.bug for word in words if word.bug]:
            return RankBug(bugs[0])
        errors = [word.error for word in words if word.error is not None]
        errors.sort(key=lambda error: isinstance(error, RankError))
        if errors:
            return errors[0]
        late = [name for name, word in zip(self._names, self._words, strict=True) if word is None]
        return RankError(f"{' and '.join(late)}: not at its end") if late else None

    def _end(self) -> None:
        for process, word in zip(self.processes, self._words, strict=True):
            if word is not None:
                process.join(GRACE_S)  # it is on its way out
            if process.is_alive():
                process.kill()
            process.join()
        for report in self._reports:
            report.close()


def _ended(code: int | None) -> str:
    if code is None:
        return "has closed its report and goes on"
    if code >= 0:
        return f"has ended without a word, with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def _body(work: Callable[[int, Links, T], object], number: int, links: Links, report: Connection, argument: T) -> None:
    """A rank's process. An interrupt of the terminal is for the one that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with _links_closed(links):
        try:
            word = _Word(result=work(number, links, argument))
        except HicacheObsError as error:
            word = _Word(error=_cause(error))
        except Exception:  # noqa: BLE001 it is shown where the run was started
            word = _Word(bug=traceback.format_exc())
    with contextlib.suppress(OSError):  # nobody waits for it any more
        report.send(word)
    report.close()
    if word.error or word.bug:
        os._exit(1)  # threads of the device may hang in a message that never comes


@contextlib.contextmanager
def _links_closed(links: Links) -> Iterator[None]:
    """Peers that wait for this rank learn at once that it has ended."""
    try:
        yield
    finally:
        for link in links.values():
            link.close()


def _cause(error: HicacheObsError) -> HicacheObsError:
    """A rank that is lost shows in launched functions too, whose errors the device wraps."""
    return error.__cause__ if isinstance(error.__cause__, RankError) else error
