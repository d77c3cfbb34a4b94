"""``hicache-obs status``: every ring of this node, what its process does, and how far the agent has read it."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from hicache_obs.agent.journals import journal_folder
from hicache_obs.agent.node import FINISHED
from hicache_obs.agent.writers import beat_age_s, seems_to_run, writer_runs
from hicache_obs.errors import LayoutError, TraceError
from hicache_obs.findings import ExitCode
from hicache_obs.readers.ring_header import RingState, read_process, read_state
from hicache_obs.recorder.agent_lock import running_agent
from hicache_obs.recorder.ring_directory import RingName, list_rings, open_ring_directory

HEADINGS: Final = ("ring", "rank", "pid", "process", "mode", "written", "read", "dropped", "last beat", "journal")
_Command = TypeVar("_Command", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class RingRow:
    """One ring of a node.

    Attributes:
        path: The file.
        state: What its header says; ``None`` if it cannot be read.
        problem: Why not.
        runs: Its process still runs; also known of a ring of another version.
        journal: Where its records are kept, empty if nowhere.
    """

    path: Path
    state: RingState | None
    problem: str
    runs: bool
    journal: str

    def as_json(self) -> dict[str, Any]:
        """The documented JSON entry."""
        name = RingName.parse(self.path.name)
        role = "" if name is None else name.role
        if self.state is None:
            return {"ring": str(self.path), "role": role, "problem": self.problem}
        state, info = self.state, self.state.info
        return {
            "ring": str(self.path),
            "role": role,
            "tp_rank": info.ranks.tp,
            "pp_rank": info.ranks.pp,
            "dp_rank": info.ranks.dp,
            "pid": info.pid,
            "running": self.runs,
            "mode": state.mode.name.lower(),
            "written": state.written,
            "read": state.read,
            "dropped": {reason.name.lower(): count for reason, count in state.dropped.items()},
            "beat_age_seconds": round(beat_age_s(info, state.heartbeat_ns), 3),
            "finished": state.finished,
            "journal": self.journal or None,
        }

    def cells(self) -> tuple[str, ...]:
        """One line of the table, in the order of ``HEADINGS``."""
        if self.state is None:
            return (self.path.name, self.problem)
        state, info = self.state, self.state.info
        process = "runs" if self.runs else "read to its end" if state.finished else "ended"
        return (
            self.path.name,
            f"dp{info.ranks.dp} pp{info.ranks.pp} tp{info.ranks.tp}",
            str(info.pid),
            process,
            state.mode.name.lower(),
            str(state.written),
            str(state.read),
            str(sum(state.dropped.values())),
            f"{beat_age_s(info, state.heartbeat_ns):.1f} s ago",
            self.journal or "none",
        )


def ring_options(command: _Command) -> _Command:
    """The options that choose rings."""
    for option in (
        click.option("--rank", type=click.IntRange(min=0), metavar="N", help="Only this tensor-parallel rank."),
        click.option("--pid", type=click.IntRange(min=1), metavar="N", help="Only this process."),
        click.option("--dir", "directory", type=click.Path(path_type=Path), metavar="DIR", help="Where the rings are."),
    ):
        command = option(command)
    return command


@click.command("status")
@ring_options
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(directory: Path | None, pid: int | None, rank: int | None, as_json: bool) -> int:
    """Show each ring of this node: whose it is, what its process does, and how far it has been read.

    Exit code 3 if there is none, 2 if their directory is not there.
    """
    folder = open_ring_directory(directory, create=False)
    rows = find_rings(folder, pid, rank)
    if as_json:
        agent = running_agent(folder)
        click.echo(json.dumps({"agent": agent or None, "rings": [row.as_json() for row in rows]}, indent=2))
    else:
        show(folder, rows)
    return int(ExitCode.CLEAN if rows else ExitCode.NOTHING_CHECKED)


def find_rings(folder: Path, pid: int | None, rank: int | None) -> list[RingRow]:
    """The rings in ``folder``; with ``pid`` or ``rank`` those whose header says so.

    Raises:
        TraceError: The directory cannot be read.
    """
    journals = running_agent(folder).get("journal", "")
    rows = []
    try:
        paths = list_rings(folder)
    except OSError as error:
        raise TraceError(f"ring directory {folder}: {error.strerror}") from None
    for path in paths:
        try:
            state = read_state(path)
        except LayoutError as error:
            name, process = RingName.parse(path.name), read_process(path)
            own = None if name is None else name.ranks.tp
            if process is not None and pid in (None, process[0]) and rank in (None, own):
                rows.append(RingRow(path, None, str(error), seems_to_run(path), ""))
            continue
        except TraceError as error:
            if pid is None and rank is None:
                rows.append(RingRow(path, None, str(error), False, ""))
            continue
        info = state.info
        if pid in (None, info.pid) and rank in (None, info.ranks.tp):
            runs = writer_runs(info, heartbeat_ns=state.heartbeat_ns, closed=state.closed)
            journal = str(journal_folder(Path(journals), path, info)) if journals else ""
            rows.append(RingRow(path, state, "", runs, journal))
    return rows


def show(folder: Path, rows: Sequence[RingRow]) -> None:
    """Print the rings as a table, and who reads them."""
    agent = running_agent(folder)
    if agent:
        click.echo(f"agent: process {agent['pid']}, metrics at {agent.get('url') or 'no port'}")
    else:
        click.echo("agent: none runs; start one with 'hicache-obs agent'")
    click.echo(f"rings in {folder}")
    if not rows:
        over = len(list_rings(folder / FINISHED)) if (folder / FINISHED).is_dir() else 0
        read = f"; {over} of ended processes, read to their end, in {folder / FINISHED}" if over else ""
        if list_rings(folder):
            click.echo(f"no such ring in {folder}{read}")
        else:
            click.echo(f"no ring in {folder}{read}; a process makes its ring when it first uses its cache")
        return
    table = [HEADINGS, *(row.cells() for row in rows)]
    whole = [cells for cells in table if len(cells) == len(HEADINGS)]
    widths = [max(len(cells[column]) for cells in whole) for column in range(len(HEADINGS))]
    for cells in table:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=False)).rstrip())
