"""The file of a ring: made at its full size, with its header."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path

from hicache_obs.errors import ConfigError
from hicache_obs.recorder.process import pid_namespace, process_start
from hicache_obs.records import RING_MAGIC, RING_VERSION, SLOT_BYTES, CaptureMode, Ranks, RingWord


def check_size(name: str, value: int, low: int, high: int) -> None:
    """Refuse a size that a ring cannot have.

    Raises:
        ConfigError: It is not from ``low`` to ``high``.
    """
    if not low <= value <= high:
        raise ConfigError(f"ring {name}={value}: must be from {low} to {high}")


def make_file(path: Path, size_bytes: int) -> mmap.mmap:
    """A new mapped file whose blocks all exist: touching a hole on a full disk would kill the process.

    Raises:
        ConfigError: It exists already, or cannot be made.
    """
    made = False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        made = True
        try:
            os.posix_fallocate(descriptor, 0, size_bytes)
            # Page tables are filled now, not on the launching thread.
            return mmap.mmap(descriptor, size_bytes, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
        finally:
            os.close(descriptor)
    except FileExistsError:
        raise ConfigError(
            f"ring file {path}: exists already, and a ring is never overwritten; choose another"
        ) from None
    except OSError as error:
        if made:
            path.unlink(missing_ok=True)
        raise ConfigError(
            f"ring file {path}: {error.strerror} ({size_bytes} bytes are needed); choose a directory this process can "
            "write to, such as /dev/shm"
        ) from None


def write_header(
    words: memoryview, ranks: Ranks, mode: CaptureMode, clock: Callable[[], int], *, slots: int, arena_words: int
) -> None:
    """Fill in the header of a ring of this process; its magic word, the last, says that it is complete."""
    for word, value in (
        (RingWord.VERSION, RING_VERSION),
        (RingWord.SLOT_BYTES, SLOT_BYTES),
        (RingWord.SLOTS, slots),
        (RingWord.ARENA_WORDS, arena_words),
        (RingWord.PID, os.getpid()),
        (RingWord.TP_RANK, ranks.tp),
        (RingWord.PP_RANK, ranks.pp),
        (RingWord.DP_RANK, ranks.dp),
        (RingWord.WALL_NS, time.time_ns()),
        (RingWord.HOST_NS, clock()),
        (RingWord.HEARTBEAT_NS, clock()),
        (RingWord.PROCESS_START, process_start(os.getpid()) or 0),
        (RingWord.PID_NAMESPACE, pid_namespace()),
        (RingWord.FIRST_MODE, mode),
        (RingWord.MODE, mode),
        (RingWord.MAGIC, int.from_bytes(RING_MAGIC, "little")),
    ):
        words[word] = value
