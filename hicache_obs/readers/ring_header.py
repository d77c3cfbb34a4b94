"""The header of a ring file: who wrote it, in which layout, and what its words say now.

A header is untrusted input. Magic, version, process and mode have the same places in every layout: a process of
another version can be switched off, and it is seen to end. ``read_info`` refuses its ring, and nothing else in it is
looked at.
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from hicache_obs.errors import LayoutError, TraceError
from hicache_obs.readers.trace_file import size_of
from hicache_obs.records import (
    HEADER_BYTES,
    MAX_ARENA_WORDS,
    MAX_SLOTS,
    NO_OP,
    RING_MAGIC,
    RING_VERSION,
    SLOT_BYTES,
    CaptureMode,
    DropReason,
    Lost,
    Ranks,
    RingWord,
    ThreadId,
)

_WORDS: Final = struct.Struct(f"<{HEADER_BYTES // 8}q")
_MAGIC: Final = int.from_bytes(RING_MAGIC, "little")

MAX_RANKS: Final = 1 << 20
"""A rank is a metric label: a header must not make as many as it likes."""

Words = memoryview | tuple[int, ...]


@dataclass(frozen=True, slots=True)
class RingInfo:
    """What the header says for good.

    Attributes:
        version: Layout version.
        slots: Records the ring holds.
        arena_words: Page ids the ring holds.
        pid: Process that made it.
        ranks: Which worker of a server that is.
        wall_ns, host_ns: Unix time and host clock, read together when the ring was made.
        process_start: When process ``pid`` was started, clock ticks since boot; 0 if unknown.
        pid_namespace: Inode number of the namespace that ``pid`` counts in; 0 if unknown.
        first_mode: What the process was to do when it made the ring.
    """

    version: int
    slots: int
    arena_words: int
    pid: int
    ranks: Ranks
    wall_ns: int
    host_ns: int
    process_start: int = 0
    pid_namespace: int = 0
    first_mode: CaptureMode = CaptureMode.OBSERVE

    def to_wall_ns(self, host_ns: int) -> int:
        """Unix time of a host clock reading of the recorded process."""
        return self.wall_ns + host_ns - self.host_ns


@dataclass(frozen=True, slots=True)
class RingState:
    """What a ring's header says at one moment.

    Attributes:
        info: What it says for good.
        mode: What the process does.
        written, read: Records written so far; those of them that an agent has read.
        dropped: Records lost so far, by reason.
        heartbeat_ns: Host clock of the process when it last said it is alive.
        closed: The process has closed the ring.
        finished: An agent has read the ring of the ended process whole.
    """

    info: RingInfo
    mode: CaptureMode
    written: int
    read: int
    dropped: dict[DropReason, int]
    heartbeat_ns: int
    closed: bool
    finished: bool


def set_mode(path: str | os.PathLike[str], mode: CaptureMode) -> CaptureMode:
    """Set the mode byte of a ring that somebody else reads, of whatever version; returns what it was.

    Raises:
        TraceError: The file is no ring.
    """
    target = Path(path)
    with open_file(target, "r+b") as file:
        _check_magic(target, file.fileno())
        with mmap.mmap(file.fileno(), HEADER_BYTES) as header, memoryview(header).cast("q") as words:
            before = words[RingWord.MODE]
            words[RingWord.MODE] = mode
    return mode_of(before)


def read_state(path: str | os.PathLike[str]) -> RingState:
    """What the header of a ring says now. Nothing is changed; anybody may read or write it meanwhile.

    Raises:
        TraceError: The file is no ring this version can read.
    """
    target = Path(path)
    with open_file(target, "rb") as file:
        info = read_info(target, file.fileno())
        words = read_words(file.fileno())
    return RingState(
        info,
        mode_of(words[RingWord.MODE]),
        words[RingWord.HEAD],
        words[RingWord.TAIL],
        counts_of(words, RingWord.DROPPED),
        words[RingWord.HEARTBEAT_NS],
        bool(words[RingWord.CLOSED]),
        bool(words[RingWord.FINISHED]),
    )


def read_process(path: str | os.PathLike[str]) -> tuple[int, int, int] | None:
    """Process id, its start and its namespace (``RingInfo``) as a ring of any version, whole or cut short, says them.

    ``None`` if it says nothing.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            words = read_words(file.fileno())
    except (OSError, struct.error):
        return None
    if words[RingWord.MAGIC] != _MAGIC:
        return None
    return words[RingWord.PID], words[RingWord.PROCESS_START], words[RingWord.PID_NAMESPACE]


def open_file(path: Path, how: str) -> Any:
    size_of(path)
    try:
        return open(path, how, buffering=0)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from None


def size_bytes(slots: int, arena_words: int) -> int:
    return HEADER_BYTES + slots * SLOT_BYTES + arena_words * 8


def read_words(descriptor: int) -> tuple[int, ...]:
    return _WORDS.unpack(os.pread(descriptor, HEADER_BYTES, 0))


def read_info(path: Path, descriptor: int) -> RingInfo:
    size, words = _check_magic(path, descriptor)
    version = words[RingWord.VERSION]
    if version > RING_VERSION:
        raise LayoutError(f"{path}: ring layout {version} is newer than {RING_VERSION}, the newest known here; upgrade")
    if 0 < version < RING_VERSION:
        raise LayoutError(
            f"{path}: ring layout {version} is older than {RING_VERSION}, the only one known here; "
            "read it with the version that wrote it"
        )
    slots, arena_words = words[RingWord.SLOTS], words[RingWord.ARENA_WORDS]
    for name, value, limit in (("slots", slots, MAX_SLOTS), ("arena words", arena_words, MAX_ARENA_WORDS)):
        if not 0 < value <= limit:
            raise TraceError(f"{path}: damaged header: {value} {name}; must be from 1 to {limit}")
    for name, word in (("tp", RingWord.TP_RANK), ("pp", RingWord.PP_RANK), ("dp", RingWord.DP_RANK)):
        if not 0 <= words[word] < MAX_RANKS:
            raise TraceError(f"{path}: damaged header: {name} rank {words[word]}; must be from 0 to {MAX_RANKS - 1}")
    if version < 1 or words[RingWord.SLOT_BYTES] != SLOT_BYTES:
        raise TraceError(f"{path}: damaged header: layout {version} with {words[RingWord.SLOT_BYTES]} bytes per slot")
    if size < size_bytes(slots, arena_words):
        raise TraceError(f"{path}: cut short: {size} bytes of {size_bytes(slots, arena_words)}")
    return RingInfo(
        version=version,
        slots=slots,
        arena_words=arena_words,
        pid=words[RingWord.PID],
        ranks=Ranks(words[RingWord.TP_RANK], words[RingWord.PP_RANK], words[RingWord.DP_RANK]),
        wall_ns=words[RingWord.WALL_NS],
        host_ns=words[RingWord.HOST_NS],
        process_start=words[RingWord.PROCESS_START],
        pid_namespace=words[RingWord.PID_NAMESPACE],
        first_mode=mode_of(words[RingWord.FIRST_MODE]),
    )


def _check_magic(path: Path, descriptor: int) -> tuple[int, tuple[int, ...]]:
    """Size and header of a ring of any layout."""
    size = os.fstat(descriptor).st_size
    if size < HEADER_BYTES:
        raise TraceError(f"{path}: not a ring: {size} bytes, and a ring's header alone has {HEADER_BYTES}")
    words = read_words(descriptor)
    if words[RingWord.MAGIC] != _MAGIC:
        found = words[RingWord.MAGIC].to_bytes(8, "little", signed=True)
        raise TraceError(f"{path}: not a ring: it begins with {found!r}, not {RING_MAGIC!r}")
    return size, words


def mode_of(word: int) -> CaptureMode:
    return CaptureMode(word) if 0 <= word < len(CaptureMode) else CaptureMode.OFF


def counts_of(words: Words, first: RingWord) -> dict[DropReason, int]:
    counts = {reason: int(words[first + reason]) for reason in DropReason}
    return {reason: count for reason, count in counts.items() if count}


def unreported(words: Words, host_ns: int) -> list[Lost]:
    reported = counts_of(words, RingWord.REPORTED)
    return [
        Lost(NO_OP, ThreadId(0), host_ns, count - reported.get(reason, 0), reason)
        for reason, count in counts_of(words, RingWord.DROPPED).items()
        if count > reported.get(reason, 0)
    ]
