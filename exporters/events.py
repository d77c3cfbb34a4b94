"""Findings as JSON lines: one line when a fingerprint first appears, then at most one per interval with its count.

What a line holds comes from records alone: ids, times, and the names that the engine gave to streams and code sites.
No request text, no environment. ``docs/otel.md`` lists the fields.
"""

from __future__ import annotations

import datetime
import errno
import json
import logging
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Final

from hicache_obs.analyzer import Analyzer
from hicache_obs.analyzer.explain import fix
from hicache_obs.costs import Ignore
from hicache_obs.errors import ConfigError
from hicache_obs.exporters.accepted import Accepted
from hicache_obs.findings import AccessInfo, BlastRadius, Finding, Verdict
from hicache_obs.records import AnyRecord, Ranks

LOG: Final = logging.getLogger("hicache_obs.events")
MAX_FINGERPRINTS: Final = 4096
MAX_IDS: Final = 32
"""Ids listed of each kind; their number is there as well."""
INTERVAL_S: Final = 60.0
MAX_FILE_BYTES: Final = 1 << 24
_QUIET_S: Final = 60.0
_LAST_NS: Final = 253_402_300_799_000_000_000
"""The end of the year 9999."""
_GRAVITY: Final = (Verdict.UNKNOWN, Verdict.LATENT, Verdict.CONTRADICTION, Verdict.VIOLATION)


class LineFile:
    """Appends lines to a file that stays within a size: when it is full it becomes ``<name>.1``, which it replaces.

    A disk that fails costs lines, which are counted in ``lost``, and nothing else.

    Args:
        path: The file; ``None`` for standard output.
        max_bytes: Size at which it is put aside.
    """

    def __init__(self, path: Path | None, *, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.lost = 0
        """Lines that could not be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._quiet_until = 0.0
        if path is not None:
            try:
                with _open(path):
                    pass
            except OSError as error:
                raise ConfigError(
                    f"--events {path}: {error.strerror}; expected a file that can be written, or - for standard output"
                ) from None

    def write(self, line: str) -> None:
        """Append one line, whole or not at all."""
        try:
            if self._path is None:
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
                return
            with _open(self._path) as file:
                if file.tell() and file.tell() + len(line) >= self._max_bytes:
                    self._path.replace(self._path.with_name(self._path.name + ".1"))
                else:
                    _append(file, line)
                    return
            with _open(self._path) as file:
                _append(file, line)
        except OSError as error:
            self.lost += 1
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + _QUIET_S
                LOG.warning("--events %s: %s; %d lines lost so far", self._path or "-", error.strerror, self.lost)


def _open(path: Path) -> IO[bytes]:
    """For appending, unbuffered; readable by its owner only, and never through a symbolic link."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.fdopen(os.open(path, flags, 0o600), "ab", buffering=0)


def _append(file: IO[bytes], line: str) -> None:
    """One line, or nothing: a disk that is full in the middle of it takes a part and says so by a number only."""
    size, data = file.tell(), line.encode() + b"\n"
    if file.write(data) < len(data):
        os.ftruncate(file.fileno(), size)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@dataclass(slots=True)
class _Known:
    """What has been found under one fingerprint."""

    example: Finding
    source: RingEvents
    first_ns: int
    last_ns: int
    radius: BlastRadius | None = None
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    ranks: set[Ranks] = field(default_factory=set)
    told: int = 0
    due_s: float = 0.0

    @property
    def count(self) -> int:
        return sum(self.verdicts.values())


class EventLog:
    """All findings of one process, of any number of rings. One thread at a time.

    Args:
        file: Takes the lines.
        accepted: Marks what somebody has accepted.
        interval_s: A fingerprint has one line in it, at most.
        clock: Seconds; never steps back.
    """

    def __init__(
        self,
        file: LineFile,
        *,
        accepted: Accepted | None = None,
        interval_s: float = INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._file = file
        self._accepted = accepted or Accepted()
        self._interval_s = interval_s
        self._clock = clock
        self._known: dict[str, _Known] = {}
        self._more = 0
        self._told_more = 0

    def ring(self, rank: Ranks, analyzer: Analyzer, *, to_wall_ns: int, replay: str) -> RingEvents:
        """A listener for one ring.

        Args:
            analyzer: Of that ring; asked for the blast radius.
            to_wall_ns: What to add to a host clock reading to get Unix time.
            replay: What a user does to see a finding again.
        """
        return RingEvents(self, rank, analyzer, to_wall_ns, replay)

    def note(self, source: RingEvents, finding: Finding) -> None:
        """Take in one finding; writes the first line of its fingerprint."""
        seen_ns = source.wall_ns(max(finding.earlier.issued_ns, finding.later.issued_ns))
        known = self._known.get(finding.fingerprint)
        if known is None:
            if len(self._known) >= MAX_FINGERPRINTS:
                self._more += 1
                return
            known = self._known[finding.fingerprint] = _Known(finding, source, seen_ns, seen_ns)
        elif _GRAVITY.index(finding.verdict) > _GRAVITY.index(known.example.verdict):
            known.example, known.source = finding, source
        known.first_ns, known.last_ns = min(known.first_ns, seen_ns), max(known.last_ns, seen_ns)
        known.verdicts[finding.verdict] += 1
        known.ranks.add(source.rank)
        if not known.told:
            self._tell("finding", known)

    def flush(self, *, everything: bool = False) -> None:
        """Write a summary of each fingerprint that was found again since its last line, if its interval is over.

        Args:
            everything: The interval does not matter: nothing follows.
        """
        now = self._clock()
        for known in self._known.values():
            if known.count > known.told and (everything or now >= known.due_s):
                self._tell("summary", known)
        if self._more > self._told_more and everything:
            self._told_more = self._more
            text = f"{self._more} findings of further fingerprints; {MAX_FINGERPRINTS} are kept"
            self._file.write(json.dumps({"event": "overflow", "text": text}))

    def leave(self, source: RingEvents) -> None:
        """A ring is over: write what is new in it while its analyzer can still be asked."""
        for known in self._known.values():
            if known.source is source and known.count > known.told:
                self._tell("summary", known)

    def _tell(self, event: str, known: _Known) -> None:
        known.told, known.due_s = known.count, self._clock() + self._interval_s
        finding, source = known.example, known.source
        known.radius = source.radius(finding) or known.radius
        accepted = self._accepted.of(finding)
        line = {
            "event": event,
            "fingerprint": finding.fingerprint,
            "hazard": finding.hazard.value,
            "verdict": finding.verdict.value,
            "cause": finding.cause.value,
            "count": known.count,
            "verdicts": {verdict.value: count for verdict, count in sorted(known.verdicts.items())},
            "first_seen": _moment(known.first_ns),
            "last_seen": _moment(known.last_ns),
            "ranks": [f"dp{rank.dp} pp{rank.pp} tp{rank.tp}" for rank in sorted(known.ranks, key=_order)],
            "engine": source.engine,
            "accepted": accepted and {"reason": accepted.reason, "expires": str(accepted.expires)},
            "space": finding.space,
            "pages": _some(finding.pages),
            "earlier": source.access(finding.earlier),
            "later": source.access(finding.later),
            "missing_edge": {
                "waiter": finding.missing_edge.waiter,
                "before": finding.missing_edge.before,
                "on": finding.missing_edge.on,
                "after": finding.missing_edge.after,
            },
            "fix": fix(finding),
            "blast_radius": known.radius and _radius(known.radius),
            "replay": source.replay,
        }
        self._file.write(json.dumps(line, separators=(",", ":")))


class RingEvents(Ignore):
    """Findings of one ring on their way to the log; made by ``EventLog.ring``."""

    def __init__(self, log: EventLog, rank: Ranks, analyzer: Analyzer, to_wall_ns: int, replay: str) -> None:
        self.rank: Final = rank
        self._analyzer: Analyzer | None = analyzer
        self._engine = ""
        self.replay: Final = replay
        self._log = log
        self._to_wall_ns = to_wall_ns

    def on_finding(self, finding: Finding) -> None:
        """Note one finding."""
        self._log.note(self, finding)

    def on_batch(self, records: Sequence[AnyRecord], *, last: bool) -> None:
        """Write the summaries that are due; let go of the analyzer with the last batch."""
        self._log.flush()
        if last:
            self._log.leave(self)
            self._engine, self._analyzer = self.engine, None

    @property
    def engine(self) -> str:
        """Name and version of the engine."""
        return self._engine if self._analyzer is None else self._analyzer.engine

    def wall_ns(self, host_ns: int) -> int:
        """Unix time of a host clock reading."""
        return host_ns + self._to_wall_ns

    def radius(self, finding: Finding) -> BlastRadius | None:
        """What all findings of this fingerprint in this ring have spoiled so far; ``None`` if nobody can tell."""
        if finding.misuse or self._analyzer is None:
            return None
        return self._analyzer.blast_radius(finding.fingerprint)

    def access(self, side: AccessInfo) -> dict[str, Any]:
        """One access as a line has it; times are Unix nanoseconds."""
        return {
            "op": side.op,
            "what": side.what,
            "mode": side.mode,
            "site": side.site,
            "stream": side.stream,
            "group": side.group,
            "thread": side.thread,
            "issued_ns": self.wall_ns(side.issued_ns),
            "start_ns": None if side.start_ns is None else self.wall_ns(side.start_ns),
            "end_ns": None if side.end_ns is None else self.wall_ns(side.end_ns),
        }


def _radius(radius: BlastRadius) -> dict[str, Any]:
    return {
        "requests": _some(radius.requests),
        "rounds": _some(radius.rounds),
        "transfers": _some(radius.transfers),
        "ios": _some(radius.ios),
        "device_pages": _some([page for _, page in radius.device_pages]),
        "host_pages": _some([page for _, page in radius.host_pages]),
        "complete": radius.complete,
        "exact": radius.exact,
    }


def _some(ids: Sequence[int]) -> dict[str, Any]:
    return {"count": len(ids), "first": list(ids[:MAX_IDS])}


def _order(rank: Ranks) -> tuple[int, int, int]:
    return rank.dp, rank.pp, rank.tp


def _moment(wall_ns: int) -> str:
    """RFC 3339 in UTC, microseconds."""
    seconds, rest_ns = divmod(max(0, min(wall_ns, _LAST_NS)), 1_000_000_000)  # a ring may hold anything
    moment = datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{rest_ns // 1000:06d}Z"
