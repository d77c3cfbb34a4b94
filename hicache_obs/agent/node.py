"""The agent of a node: finds the rings of all ranks, reads them in turn, and survives each of them."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from hicache_obs.agent.rank import LOG, Follow, MoreSinks, Problems, RankReader
from hicache_obs.agent.writers import has_ended
from hicache_obs.errors import AgentRunning, ConfigError, LayoutError, RingTaken, TraceError
from hicache_obs.exporters.catalogue import RingProblem
from hicache_obs.exporters.findings_board import FindingsBoard
from hicache_obs.exporters.prometheus import Metrics
from hicache_obs.recorder.agent_lock import AgentLock
from hicache_obs.recorder.ring_directory import RingName, list_rings, open_ring_directory
from hicache_obs.records import Ranks

RETRY_S: Final = 10.0
FINISHED: Final = "finished"
STUCK_S: Final = 60.0
"""An agent whose cycles take so long does not read its rings; no budget allows that."""
_CHECK_S: Final = 1.0
"""How often it is looked up whether a silent ring's writer still runs."""

FileKey = tuple[str, int, int]
"""Name, device and inode: names come back with process ids, inodes when a file is removed, hardly both at once."""


@dataclass(frozen=True, slots=True)
class NodeOptions:
    """What an agent does.

    Attributes:
        directory: The ring directory.
        journals: Directory of the journals, ``None`` for none.
        journal_max_bytes: Of one rank.
        period_s: Time between two reads of a ring that has little to read.
        cpu_share: Part of one core the process may use, all its threads together; above 0, at most 1.
        keep: Leave finished rings where they are, instead of moving them to ``finished``.
        finished_rings: Moved rings that are kept.
        scraped: See ``RankReader``; whoever serves the metrics says when they are read, with ``scraped``.
    """

    directory: Path
    journals: Path | None = None
    journal_max_bytes: int = 1 << 28
    period_s: float = 0.1
    cpu_share: float = 0.5
    keep: bool = False
    finished_rings: int = 16
    scraped: bool = False


@dataclass(slots=True)
class _Refused:
    """A ring that could not be opened."""

    rank: Ranks | None
    problems: Problems
    blind: bool = False
    given_up: bool = False
    """It was read until it turned out to be damaged."""
    retry_at: float = 0.0


class NodeAgent:
    """Reads all rings of a directory, as its only agent. One thread at a time.

    Args:
        options: What to do.
        metrics: Gets a rank's children when its first ring is found.
        board: Gets the findings of all ranks; may be read on any thread.
        more_sinks: Further listeners to what is found in each ring.
        follow: Makes followers of each ring.
        accepts: See ``MetricsSink``.

    Raises:
        ConfigError: The directory is refused, or another agent reads it (``AgentRunning``).
    """

    def __init__(
        self,
        options: NodeOptions,
        metrics: Metrics,
        *,
        board: FindingsBoard | None = None,
        more_sinks: MoreSinks = lambda _rank, _analyzer: (),
        follow: Follow = lambda _ring: (),
        accepts: Callable[[str], bool] = lambda _: False,
    ) -> None:
        self._options = options
        self._metrics = metrics
        self.board: Final = FindingsBoard() if board is None else board
        self._turned_at: float | None = None
        self._more_sinks = more_sinks
        self._follow = follow
        self._accepts = accepts
        open_ring_directory(options.directory)
        self._lock = AgentLock(options.directory)
        self._facts: dict[str, str] = {}
        self._ranks: dict[FileKey, RankReader] = {}
        self._refused: dict[FileKey, _Refused] = {}
        self._over: set[FileKey] = set()
        """Rings in the directory that need nothing more."""
        self._check_at = 0.0
        self._turn = 0
        self._was_scraped = False
        self._directory_problems = Problems(metrics, None)

    def describe(self, **facts: str) -> None:
        """Leave word for ``hicache-obs status``."""
        self._facts = facts
        self._lock.describe(**facts)

    @property
    def blind(self) -> list[Ranks | None]:
        """Ranks with a ring that cannot be read or judged; ``None`` for one whose file does not say whose it is."""
        refused = [refused.rank for refused in self._refused.values() if refused.blind]
        return [*(rank.rank for rank in self._ranks.values() if rank.blind), *refused]

    def stuck(self) -> str:
        """What keeps this agent from being alive and well, in words; empty if nothing. On any thread."""
        if self._turned_at is None:
            return "the ring directory has not been read yet"
        silent_s = time.monotonic() - self._turned_at
        return f"the last cycle ended {silent_s:.0f} s ago" if silent_s > STUCK_S else ""

    def scraped(self) -> None:
        """The metrics are about to be read; on any thread."""
        self._was_scraped = True

    def run(self, wait: Callable[[float], bool]) -> None:
        """Read within the share of a core; blocks until ``wait(seconds)``, called between cycles, returns True.

        Raises:
            AgentRunning: Another agent has taken over the directory.
        """
        period_s, share = self._options.period_s, self._options.cpu_share
        pause_s, used_before = 0.0, time.process_time()
        while not wait(pause_s):
            start = time.monotonic()
            self.cycle(budget_s=period_s)
            used = time.process_time()  # whoever is served by other threads counts, too
            # Time that others had the processor is a pause already.
            owed_s = max(period_s, (used - used_before) / share) - (time.monotonic() - start)
            pause_s, used_before = max(0.0, owed_s), used

    def drain(self) -> None:
        """Read what is there, as long as there is anything, and finish the rings of writers that have ended.

        Raises:
            AgentRunning: Another agent has taken over the directory.
        """
        while self.cycle(budget_s=60.0, look=True):
            pass

    def cycle(self, *, budget_s: float, look: bool = False) -> int:
        """Find rings, read each in turn until all are empty or ``budget_s`` is over, and finish those that ended.

        What cannot be read in time stays in its ring. Of a ring that fills up a stretch is then left out, see
        ``sampling``; a full ring drops and counts. Returns the records read.

        Args:
            budget_s: Time for reading.
            look: Look for writers that have ended in any case, not only once a second.

        Raises:
            AgentRunning: Another agent has taken over the directory.
        """
        self._discover()
        ended = self._ended(look=look)
        count = self._read(time.monotonic() + budget_s)
        for key, rank in list(self._ranks.items()):
            if rank.done or rank.ended or (key in ended and not self._pending(rank)):
                self._finish(key, rank)
            else:
                rank.show()
        self._end_turn()
        self._show_ranks()
        self._turned_at = time.monotonic()
        return count

    def _end_turn(self) -> None:
        scraped, self._was_scraped = self._was_scraped, False
        for rank in self._ranks.values():
            rank.turn(scraped=scraped)

    def close(self, *, within_s: float = 5.0, take_in: bool = True) -> None:
        """Take in what is there now, for ``within_s`` at most, and give everything back. Idempotent.

        Args:
            within_s: How long it may take.
            take_in: False for an agent that could not begin: what it read nobody would be told.
        """
        if take_in:
            if self._lock.holds:
                self._discover()
            self._read(time.monotonic() + within_s)
            self._end_turn()
        for rank in self._ranks.values():
            rank.leave()
        self._ranks.clear()
        self._lock.close()

    # -- finding rings ---------------------------------------------------------------------------------------

    def _discover(self) -> None:
        directory = self._options.directory
        try:
            self._keep_lock()
            paths = list_rings(directory)
        except AgentRunning:
            raise
        except (OSError, ConfigError) as error:
            self._directory_problems.note(RingProblem.UNREADABLE, f"cannot look for rings in {directory}: {error}")
            return
        found = {key: path for path in paths if (key := _key(path)) is not None}
        self._over &= found.keys()
        for key in self._refused.keys() - found.keys():
            del self._refused[key]
        for key, path in found.items():
            if key not in self._ranks and key not in self._over:
                self._adopt(key, path)

    def _keep_lock(self) -> None:
        """Take the lock anew where the directory, or the lock in it, was removed while this agent ran."""
        if self._lock.holds:
            return
        LOG.warning(
            "ring directory %s: was removed or emptied; going on with what is there now", self._lock.path.parent
        )
        open_ring_directory(self._options.directory)
        lock = AgentLock(self._options.directory)
        self._lock.close()
        self._lock = lock
        self._lock.describe(**self._facts)

    def _adopt(self, key: FileKey, path: Path) -> None:
        options = self._options
        refused = self._refused.get(key)
        if refused is not None and time.monotonic() < refused.retry_at:
            return
        if refused is not None and refused.given_up:
            refused.blind = not has_ended(path)
            refused.retry_at = time.monotonic() + RETRY_S
            return
        try:
            rank = RankReader(
                path,
                self._metrics,
                journals=options.journals,
                journal_max_bytes=options.journal_max_bytes,
                scraped=options.scraped,
                board=self.board,
                more_sinks=self._more_sinks,
                follow=self._follow,
                accepts=self._accepts,
            )
        except RingTaken as error:
            self._refuse(key, path, error, None)
        except LayoutError as error:
            self._refuse(key, path, error, RingProblem.VERSION)
        except TraceError as error:
            if not _in_the_making(path):
                self._refuse(key, path, error, RingProblem.UNREADABLE)
        except Exception as error:  # noqa: BLE001 one ring's trouble must not end the others' agent
            self._refuse(key, path, error, RingProblem.ANALYSIS)
        else:
            self._refused.pop(key, None)
            if rank.done:
                rank.reader.close()
                self._over.add(key)
                return
            LOG.info("%s: reading, process %d", path, rank.reader.info.pid)
            self._ranks[key] = rank

    def _refuse(self, key: FileKey, path: Path, error: Exception, problem: RingProblem | None) -> None:
        refused = self._refused.get(key)
        if refused is None:
            name = RingName.parse(path.name)
            rank = None if name is None or problem is None else name.ranks
            refused = self._refused[key] = _Refused(rank, Problems(self._metrics, rank))
            if problem is None:
                LOG.info("%s", error)
        if problem is not None:
            refused.problems.note(problem, f"{error}; it is not read")
        refused.blind = problem is not None and not has_ended(path)
        refused.retry_at = time.monotonic() + RETRY_S

    # -- reading ---------------------------------------------------------------------------------------------

    def _ended(self, *, look: bool) -> set[FileKey]:
        """Rings whose writer has ended. Asked before reading, so that nothing can come after the last read."""
        now = time.monotonic()
        if now < self._check_at and not look:
            return set()
        self._check_at = now + _CHECK_S
        ended = set()
        for key, rank in self._ranks.items():
            try:
                if not rank.runs():
                    ended.add(key)
            except TraceError:
                pass  # the next step meets it, too
        return ended

    def _read(self, until: float) -> int:
        """Read the rings in turn, beginning where the last cycle ended."""
        total = 0
        ranks = list(self._ranks.values())
        for rank in ranks:
            rank.begin_turn()
        full = [*ranks[self._turn % len(ranks) :], *ranks[: self._turn % len(ranks)]] if ranks else []
        while full:
            for rank in list(full):
                count = rank.step()
                total += count
                self._turn += 1
                if not count:
                    full.remove(rank)
                if time.monotonic() >= until:
                    return total
        return total

    def _pending(self, rank: RankReader) -> int:
        try:
            return rank.reader.pending
        except TraceError:
            return 1  # the next step meets it, too

    def _finish(self, key: FileKey, rank: RankReader) -> None:
        failed = rank.done
        if not failed and not rank.ended:
            rank.end()
        if not failed and not rank.settle():
            return  # tried again at the next turn
        rank.leave()
        del self._ranks[key]
        if failed:
            problems = Problems(self._metrics, rank.rank)
            self._refused[key] = _Refused(rank.rank, problems, not has_ended(rank.path), given_up=True)
            return
        self._over.add(key)
        LOG.info("%s: read to its end", rank.path)
        if not self._options.keep:
            self._move(rank.path)

    def _move(self, path: Path) -> None:
        folder = self._options.directory / FINISHED
        try:
            folder.mkdir(mode=0o700, exist_ok=True)
            target, number = folder / path.name, 1
            while target.exists():
                number += 1
                target = folder / f"{path.stem}~{number}.ring"
            path.rename(target)
            os.utime(target)  # by when it was finished, whatever its writer did last
            kept = sorted(folder.glob("*.ring"), key=lambda file: file.stat().st_mtime_ns)
            for old in kept[: max(0, len(kept) - self._options.finished_rings)]:
                old.unlink()
        except OSError as error:
            self._directory_problems.note(RingProblem.UNREADABLE, f"{path}: cannot be moved: {error.strerror}")

    def _show_ranks(self) -> None:
        rings = Counter(rank.rank for rank in self._ranks.values())
        blind = set(self.blind)
        for known in self._metrics.known_ranks:
            of = self._metrics.rank(known)
            of.gauge("rings").set(rings[known])
            of.gauge("blind").set(int(known in blind))


def _key(path: Path) -> FileKey | None:
    try:
        status = path.stat(follow_symlinks=False)
    except OSError:
        return None  # gone since it was listed
    return path.name, status.st_dev, status.st_ino


def _in_the_making(path: Path) -> bool:
    """Whether a ring's writer may still be filling in the header: its first word is written last."""
    try:
        with path.open("rb") as file:
            return file.read(8) == bytes(8) and time.time() - path.stat().st_mtime < RETRY_S
    except OSError:
        return False
