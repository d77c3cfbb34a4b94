"""``find_ranks``: where the records of each rank are, below folders, globs and URLs.

A rank is a journal (``rank<N>-*.arrows`` files of one folder), a Parquet file of ``convert`` (``rank<N>.parquet``) or a
ring file (``*.ring``), however deep below what was named. The agent's folders are called after the ring, which says the
worker's role and its tensor-, pipeline- and data-parallel ranks; elsewhere only the file's number is known.

The *node* of a rank is the folder that the agent writes to: that in which the rank's folder lies, without the parts of
its path that all nodes have in common.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from hicache_obs.errors import ConfigError, TraceError
from hicache_obs.readers.journal_format import FILE_NAME
from hicache_obs.readers.parquet import PARQUET_NAME
from hicache_obs.readers.stored import file_system
from hicache_obs.readers.trace_file import one_line
from hicache_obs.recorder.ring_directory import SUFFIX, RingName
from hicache_obs.records import Ranks

MAX_RANKS: Final = 100_000
"""Ranks of one run."""
MAX_NUMBER: Final = 2**31 - 1
"""Of a rank."""
_MAGIC: Final = re.compile(r"[*?\[]")
_ALLOWED: Final = "expected journals (rank0-000001.arrows), Parquet of convert (rank0.parquet) or *.ring files"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where one rank's records are.

    Attributes:
        place: Folder of a journal, or a file; a path or a URL.
        number: Which rank of a folder; ``None`` for a file.
        node: Name of its node.
        role: What the process does, as the ring's name says; empty if nothing says it.
        ranks: Which worker of a server it is; without a role only a number is known, and is ``tp``.
        recording: 1, or more for further recordings of the same worker of the same node.
    """

    place: str
    number: int | None
    node: str
    role: str
    ranks: Ranks
    recording: int = 1

    @property
    def name(self) -> str:
        """Short, for people, of no other rank: the node and the worker."""
        ranks = self.ranks
        worker = f"{self.role} dp{ranks.dp} pp{ranks.pp} tp{ranks.tp}" if self.role else f"rank {ranks.tp}"
        again = f" recording {self.recording}" if self.recording > 1 else ""
        return f"{self.node} {worker}{again}"


def find_ranks(arguments: Sequence[str]) -> list[RankPlace]:
    """The ranks at all ``arguments``, each once: by node, then by worker.

    Raises:
        TraceError: One of them leads to no records, or cannot be looked at.
        ConfigError: A URL whose file system is not known or not installed.
    """
    found: dict[tuple[str, int | None], RankPlace] = {}
    for argument in arguments:
        here = _below(argument)
        if not here:
            raise TraceError(f"{argument}: no records of a rank here; {_ALLOWED}")
        for place in here:
            found.setdefault((place.place, place.number), place)
        if len(found) > MAX_RANKS:
            raise ConfigError(f"{argument}: more than {MAX_RANKS:,} ranks in all; name fewer")
    names = _short(place.node for place in found.values())
    placed = [replace(place, node=names[place.node]) for place in found.values()]
    seen: Counter[str] = Counter()
    ordered = []
    for place in sorted(placed, key=lambda p: (p.node, p.role, p.ranks.dp, p.ranks.pp, p.ranks.tp, p.place)):
        seen[place.name] += 1
        ordered.append(replace(place, recording=seen[place.name]))
    return ordered


def _below(argument: str) -> list[RankPlace]:
    files, root, local = file_system(argument)
    try:
        paths = sorted(files.glob(root)) if _MAGIC.search(root) and not files.exists(root) else [root]
        found: list[RankPlace] = []
        for path in paths:
            closed: list[RankPlace] = []
            names = [path] if files.isfile(path) else _find(files, path, local, closed)
            found += _ranks_of(files, sorted(names), local, named=not files.isdir(path))
            found += closed
        return found
    except Exception as error:  # noqa: BLE001 a driver raises what it likes
        raise TraceError(f"{argument}: cannot be looked at: {one_line(error)}") from None


def _ranks_of(files: Any, paths: Iterable[str], local: bool, *, named: bool) -> list[RankPlace]:
    """The ranks among ``paths``; ``named``: the user named the only one, which then is a rank whatever its name."""
    places: dict[tuple[str, int | None], RankPlace] = {}
    for path in paths:
        folder, name = posixpath.split(path)
        journal, parquet = FILE_NAME.fullmatch(name), PARQUET_NAME.fullmatch(name)
        if journal is not None and not named:
            place, number = folder, int(journal[1])
        elif named or parquet is not None or name.endswith(SUFFIX):
            place, number = path, None
        else:
            continue
        address = place if local else files.unstrip_protocol(place)
        if (address, number) in places:
            continue
        match = journal or parquet
        rank = int(match[1]) if match else 0
        if rank > MAX_NUMBER:
            raise ValueError(f"{path}: rank {rank}; allowed are 0 to {MAX_NUMBER}")
        role, ranks, node = _worker(folder, name, rank)
        places[address, number] = RankPlace(address, number, node, role, ranks)
    return list(places.values())


def _find(files: Any, path: str, local: bool, closed: list[RankPlace]) -> list[str]:
    """All files below ``path``. A local folder that cannot be listed joins ``closed``: a rank that cannot be read.

    fsspec's own ``find`` leaves such a folder out and says nothing.
    """
    if not local:
        return list(files.find(path))

    def refused(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            folder = str(error.filename)
            ring = _ring_of(folder)
            role, ranks, node = _worker(folder, "", 0 if ring is None else ring.ranks.tp)
            closed.append(RankPlace(folder, None, node, role, ranks))

    walk = os.walk(path, onerror=refused, followlinks=True)
    return [posixpath.join(folder, name) for folder, _, names in walk for name in names]


def _worker(folder: str, name: str, number: int) -> tuple[str, Ranks, str]:
    """Role, ranks and node of the records in file ``name`` of ``folder``."""
    ring = RingName.parse(name)
    if ring is not None:
        return ring.role, ring.ranks, folder
    ring = _ring_of(folder)
    if ring is not None:
        return ring.role, replace(ring.ranks, tp=number), posixpath.dirname(folder)
    return "", Ranks(tp=number), folder


def _ring_of(folder: str) -> RingName | None:
    """The ring that one of the agent's folders is called after."""
    return RingName.parse(f"{posixpath.basename(folder).rsplit('.', 2)[0]}{SUFFIX}")


def _short(nodes: Iterable[str]) -> dict[str, str]:
    """Each node without the parts of its path that all have in common."""
    parts = {node: [part for part in node.split("/") if part] for node in dict.fromkeys(nodes)}
    if len(parts) == 1:
        return {node: path[-1] if path else node for node, path in parts.items()}
    ahead = _common(list(parts.values()))
    behind = _common([path[ahead:][::-1] for path in parts.values()])
    return {node: "/".join(path[ahead : len(path) - behind]) or "." for node, path in parts.items()}


def _common(paths: Sequence[Sequence[str]]) -> int:
    """How many first parts are the same everywhere."""
    return next((n for n, parts in enumerate(zip(*paths, strict=False)) if len(set(parts)) > 1), min(map(len, paths)))


def local_path(place: RankPlace) -> Path | None:
    """The place as a path of this machine; ``None`` for a URL."""
    return None if "://" in place.place else Path(place.place)
