"""A node under stress: ranks and an agent that can be killed and started again, a disk that fills up, and a clock."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.request import urlopen

from audit import Audit, audit, is_unmade
from processes import Control, Nursery, Word, kill, runs

from hicache_obs.errors import TraceError
from hicache_obs.readers.ring_header import RingState, read_state


@dataclass(slots=True)
class RankProcess:
    """One life of a rank.

    Attributes:
        tp, life: Which.
        pid: Its process.
        control: Its control file.
    """

    tp: int
    life: int
    pid: int
    control: Path


class Rig:
    """Ranks, an agent, and their files below one folder. One thread at a time.

    Args:
        folder: Empty; on a disk with room.
        ranks: How many.
        rounds_per_s: Of each rank.
        race_every: One round in so many lacks its fence.
        slots, arena: Size of each ring.
        disk_mib: Size of the disk with the journals, where this user may mount one; otherwise it is the folder's,
            and a full disk is a limit on the size of files.
        agent_options: More arguments of ``hicache-obs agent``.
    """

    def __init__(
        self,
        folder: Path,
        *,
        ranks: int,
        rounds_per_s: float,
        race_every: int,
        slots: int = 8192,
        arena: int = 1 << 15,
        disk_mib: int = 0,
        agent_options: tuple[str, ...] = (),
    ) -> None:
        self.folder = folder
        self.rings, self.journals = folder / "rings", folder / "journals"
        self.acknowledged, self.events = folder / "acknowledged", folder / "events.jsonl"
        self.log = folder / "agent.log"
        self._controls = folder / "controls"
        for path in (self.rings, self.journals, self._controls):
            path.mkdir(mode=0o700)
        self._disk_bytes = disk_mib << 20
        self._mounted = bool(disk_mib) and _mount(self.journals, self._disk_bytes)
        self._options = {"rounds_per_s": rounds_per_s, "race_every": race_every, "slots": slots, "arena": arena}
        self._race_every = race_every
        self._agent_options = agent_options
        self._nursery = Nursery()
        self._lives = dict.fromkeys(range(ranks), -1)
        self.ranks: dict[int, RankProcess] = {}
        self.agent = 0
        self.agents = 0
        self.agent_control = Control(folder / "agent-control")
        self.controls: list[Path] = []

    @property
    def disk(self) -> str:
        """What a full disk is here."""
        return "a file system without room" if self._mounted else "a limit on the size of files"

    def start_rank(self, tp: int) -> RankProcess:
        """The next life of rank ``tp``."""
        self._lives[tp] += 1
        life = self._lives[tp]
        control = self._controls / f"{tp}-{life}"
        Control(control)
        pid = self._nursery.start(
            "rank", directory=str(self.rings), control=str(control), tp=tp, life=life, **self._options
        )
        self.controls.append(control)
        self.ranks[tp] = RankProcess(tp, life, pid, control)
        return self.ranks[tp]

    def start_agent(self) -> None:
        """An agent, the first or one that takes over."""
        arguments = [
            *("--dir", str(self.rings), "--journal", str(self.journals), "--journal-max-bytes", str(1 << 40)),
            *("--events", str(self.events), "--port", "0", *self._agent_options),
        ]
        self.agent = self._nursery.start(
            "agent",
            arguments=arguments,
            control=str(self.agent_control.path),
            acknowledged=str(self.acknowledged),
            log=str(self.log),
        )
        self.agents += 1

    def scrape(self) -> str:
        """The agent's metrics; empty while it does not answer."""
        with suppress(OSError, IndexError):
            text = self.log.read_text(errors="replace")
            url = text.rpartition("metrics at ")[2].split()[0]
            with urlopen(url, timeout=5) as answer:
                return str(answer.read().decode())
        return ""

    def live_rings(self) -> list[RingState]:
        """The headers of rings that are not read to their end yet."""
        found = []
        for path in self.rings.glob("*.ring"):
            with suppress(TraceError):  # being made, or moved meanwhile
                found.append(read_state(path))
        return found

    def burst(self, tp: int, rounds: int) -> None:
        """Have rank ``tp`` make so many rounds at once."""
        Control(self.ranks[tp].control).words[Word.BURST] = rounds

    def step_clock(self, offset_s: float) -> None:
        """Set the agent's wall clock ``offset_s`` off the real one."""
        self.agent_control.words[Word.CLOCK_STEP_NS] = int(offset_s * 1e9)

    def fill_disk(self) -> None:
        """No byte more for the journals. Partner of ``free_disk``."""
        if self._mounted:
            for _ in range(50):  # what is written meanwhile makes it fail
                room = os.statvfs(self.journals)
                if _mount(self.journals, (room.f_blocks - room.f_bfree) * room.f_frsize, "remount,"):
                    break
        elif self.agent and runs(self.agent):
            with suppress(ProcessLookupError):
                resource.prlimit(self.agent, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))

    def free_disk(self) -> None:
        """Room again. Partner of ``fill_disk``."""
        if self._mounted:
            _mount(self.journals, self._disk_bytes, "remount,")
        elif self.agent and runs(self.agent):
            with suppress(ProcessLookupError):
                free = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                resource.prlimit(self.agent, resource.RLIMIT_FSIZE, free)

    def finish(self, *, within_s: float = 120.0) -> Audit:
        """End the ranks, have an agent read all rings to their end, end it, and read the books.

        Raises:
            TimeoutError: The agent did not get there.
        """
        self.free_disk()
        self.step_clock(0)
        for rank in self.ranks.values():
            kill(rank.pid, signal.SIGCONT)
            kill(rank.pid, signal.SIGTERM)
        kill(self.agent, signal.SIGCONT)
        if not runs(self.agent):
            self.start_agent()
        deadline = time.monotonic() + within_s
        while left := [path.name for path in self.rings.glob("*.ring") if not is_unmade(path)]:
            if time.monotonic() > deadline:
                raise TimeoutError(f"not read to their end within {within_s:.0f} s: {', '.join(left)}\n{self.tail()}")
            time.sleep(0.05)
        kill(self.agent, signal.SIGTERM)
        while runs(self.agent):
            time.sleep(0.02)
        return audit(self.rings, self.journals, self.controls, self.acknowledged, race_every=self._race_every)

    def tail(self) -> str:
        """The end of the agent's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-20:]) if self.log.exists() else ""

    def close(self) -> None:
        """Kill what runs, and give the disk back. Idempotent."""
        self._nursery.close()
        if self._mounted:
            subprocess.run(["umount", "--lazy", str(self.journals)], check=False)
            self._mounted = False

    def __enter__(self) -> Rig:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _mount(folder: Path, size_bytes: int, how: str = "") -> bool:
    """A file system of its own and of that size for ``folder``; False where that is not allowed."""
    if shutil.which("mount") is None:
        return False
    command = ["mount", "-t", "tmpfs", "-o", f"{how}size={max(size_bytes, 4096)},mode=700", "tmpfs", str(folder)]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0
